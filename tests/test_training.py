"""The single script as a user runs it, and what all three scripts refuse before they begin."""

import importlib
import math
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
from conftest import SCRIPTS, SINGLE, SPAWN, TORCHRUN, finish, read_metrics, start, train

import data
import gpt

CPU = ("--device", "cpu", "--tokenizer", "bytes")
SMALL = (*CPU, "--context-length", 8, "--global-batch-size", 12, "--batch-size", 4)
ONE_THREAD = {"OMP_NUM_THREADS": 1}  # several runs at once on few cores


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A text of 481 training and 53 validation windows of 8 tokens: neither divides by a batch."""
    path = tmp_path_factory.mktemp("small") / "corpus.txt"
    path.write_bytes(data.builtin_text().encode("ascii", "replace")[:4279])
    return path


# ----------------------------------------------------------------------------------------------------------------------
# What a run prints and leaves

STEPS, LOG_EVERY, EVAL_EVERY = 86, 20, 30
FLAGS = (*SMALL, "--drop-rate", 0.1, "--max-steps", STEPS, "--log-every", LOG_EVERY, "--eval-every", EVAL_EVERY)


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """Three runs as (folder, output): the second has the flags of the first, the third another seed."""
    folders = [tmp_path_factory.mktemp("run") for _ in range(3)]
    started = [
        start(SINGLE, "--data", corpus, *FLAGS, "--seed", seed, "--out", folder, env=ONE_THREAD)
        for folder, seed in zip(folders, (5, 5, 6))
    ]
    ended = [finish(process) for process in started]
    for status, stdout, stderr in ended:
        assert (status, stderr) == (0, ""), stdout + stderr
    return [(folder, stdout) for folder, (_, stdout, _) in zip(folders, ended)]


def test_metrics_have_a_row_for_each_log_step_and_each_evaluation(runs):
    folder, _ = runs[0]
    header = Path(folder, "metrics.csv").read_text().splitlines()[0]
    assert header == "step,tokens,learning_rate,train_loss,val_loss,tokens_per_second"
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == [20, 30, 40, 60, 80, STEPS]
    assert [row["step"] for row in rows if row["train_loss"] is not None] == [20, 40, 60, 80, STEPS]
    assert [row["step"] for row in rows if row["tokens_per_second"] is not None] == [20, 40, 60, 80, STEPS]
    assert [row["step"] for row in rows if row["val_loss"] is not None] == [30, 60, STEPS]


def test_metrics_count_tokens_and_follow_the_schedule(runs):
    for row in read_metrics(runs[0][0]):
        assert row["tokens"] == row["step"] * 12 * 8
        assert row["learning_rate"] == gpt.learning_rate(row["step"], STEPS, gpt.PRESETS["tiny"].lr)
        assert row["tokens_per_second"] is None or row["tokens_per_second"] > 0


def test_metrics_and_log_show_the_same_losses(runs):
    folder, stdout = runs[0]
    for row in read_metrics(folder):
        step = int(row["step"])
        if row["train_loss"] is not None:
            assert f"step {step}/{STEPS}  loss {row['train_loss']:.6f}  norm" in stdout
        if row["val_loss"] is not None:
            assert f"step {step}: validation loss {row['val_loss']:.6f}\n" in stdout
    losses = [row["train_loss"] for row in read_metrics(folder) if row["train_loss"]]
    assert any(loss != round(loss, 6) for loss in losses), "the file keeps all digits"
    assert losses[-1] < losses[0] - 0.3, "it learns"


def test_two_equal_runs_give_equal_metrics_and_another_seed_gives_others(runs):
    first, again, other = (
        [{name: value for name, value in row.items() if name != "tokens_per_second"} for row in read_metrics(folder)]
        for folder, _ in runs
    )
    assert first == again
    assert all(mine["train_loss"] != theirs["train_loss"] for mine, theirs in zip(first, other) if mine["train_loss"])


def test_two_equal_runs_end_with_equal_parameters_and_samples(runs):
    (folder, stdout), (folder_again, stdout_again), _ = runs
    first, again = (gpt.load_checkpoint(Path(f, "checkpoint.pt"))["model"] for f in (folder, folder_again))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    samples = [text[text.index("sample: ") : text.index("written to")] for text in (stdout, stdout_again)]
    assert samples[0] == samples[1]


def test_the_validation_loss_of_a_row_is_that_of_the_saved_model_over_every_window_once(runs, corpus):
    folder, _ = runs[0]
    checkpoint = gpt.load_checkpoint(Path(folder, "checkpoint.pt"))
    model = gpt.GPT(gpt.GPTConfig(**checkpoint["config"]))
    model.load_state_dict(checkpoint["model"])
    model.eval()
    val_set = data.open_corpus(corpus, "bytes", 8).val_set
    assert len(val_set) == 53
    inputs, targets = (torch.stack(ids) for ids in zip(*(val_set[i] for i in range(53))))
    with torch.no_grad():
        expected = model(inputs, targets).loss.item()
    assert read_metrics(folder)[-1]["val_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_run_says_what_it_is_where_it_is_and_how_it_ended(runs):
    folder, stdout = runs[0]
    lines = stdout.splitlines()
    assert lines[0].startswith("preset tiny: 4 layers, 4 heads, 128 wide, 8 tokens of context, ")
    assert "device cpu, 1 process, float32" in stdout
    assert "481 windows to train on, 53 to validate" in stdout
    assert "12 sequences per step = 4 per forward x 3 accumulated x 1 process; 40 steps per epoch, 86 in all" in stdout
    assert [line for line in lines if line.endswith("completed")] == ["Epoch 1 completed", "Epoch 2 completed"]
    assert lines.index("Epoch 1 completed") == next(i for i, line in enumerate(lines) if "step 40/86" in line) + 1
    assert "sample: The " in stdout
    assert lines[-1] == f"written to {folder}"
    assert sorted(path.name for path in Path(folder).iterdir()) == ["checkpoint.pt", "metrics.csv"]


def test_the_first_row_is_the_loss_of_the_first_batch_before_any_update(corpus, tmp_path):
    """And without --out a run writes nothing, and says so. Two epochs are two times floor(481 / 480) steps."""
    flags = (*CPU, "--context-length", 8, "--global-batch-size", 480, "--batch-size", 120, "--epochs", 2, "--seed", 7)
    before = sorted(corpus.parent.iterdir())
    stdout = train(SINGLE, "--data", corpus, *flags, "--log-every", 1, cwd=tmp_path, env=ONE_THREAD)
    assert sorted(corpus.parent.iterdir()) == before
    assert not list(tmp_path.iterdir())
    assert stdout.endswith("nothing was written: --out DIR keeps a checkpoint\n")
    assert "step 2/2" in stdout

    opened = data.open_corpus(corpus, "bytes", 8)
    torch.manual_seed(7)
    model = gpt.GPT(gpt.GPTConfig(vocab_size=320, context_length=8, emb_dim=128, n_heads=4, n_layers=4))
    order = torch.randperm(481, generator=torch.Generator().manual_seed(7))[:480].tolist()
    inputs, targets = (torch.stack(ids) for ids in zip(*(opened.train_set[i] for i in order)))
    with torch.no_grad():
        expected = model(inputs, targets).loss.item()
    shown = float(stdout[stdout.index("step 1/2  loss ") :].split()[3])
    assert shown == pytest.approx(expected, abs=2e-6)
    assert shown == pytest.approx(math.log(320), abs=0.5), "near that of a guess"


@pytest.mark.slow
def test_the_gpt2_tokenizer_trains_from_a_text_file(text_file, tmp_path):
    flags = ("--data", text_file, "--tokenizer", "gpt2", "--device", "cpu", "--max-steps", 50, "--log-every", 1)
    train(SINGLE, *flags, "--out", tmp_path, timeout=1200)
    losses = [row["train_loss"] for row in read_metrics(tmp_path)]
    assert losses[0] == pytest.approx(math.log(50304), abs=0.3)
    assert losses[-1] < 8


# ----------------------------------------------------------------------------------------------------------------------
# What is refused. Each script's main() is called here: it refuses before it starts a process of its own.


@pytest.fixture
def call_main(monkeypatch, capfd, tmp_path):
    """A function that calls main() of a script with flags, as the only process; returns (status, stdout, stderr)."""
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.chdir(tmp_path)

    def call(script, *flags, local_rank=0):
        module = importlib.import_module(Path(script).stem)
        # A test that expected a refusal must not train instead.
        for name in ("train", "spawn"):
            monkeypatch.setattr(module, name, lambda *_, **__: sys.exit("nothing was refused"), raising=False)
        if script == TORCHRUN:
            for name in ("RANK", "LOCAL_RANK"):
                monkeypatch.setenv(name, str(local_rank))
            for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
                monkeypatch.setenv(name, str(local_rank + 1))
            monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
            monkeypatch.setenv("MASTER_PORT", "29500")
        else:
            monkeypatch.delenv("MASTER_PORT", raising=False)
            monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")  # so that what main() sets is undone
        if script == SPAWN:
            flags = ("--nproc", "1", *flags)
        monkeypatch.setattr(sys, "argv", [script, *map(str, flags)])
        capfd.readouterr()
        status = 0
        try:
            module.main()
        except SystemExit as exit:
            status = exit.code or 0
        monkeypatch.delenv("MASTER_PORT", raising=False)
        return status, *capfd.readouterr()

    yield call
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def assert_refused(result, *words):
    """One line `error: ...`, printed once, with `words` in it, and status 2."""
    status, stdout, stderr = result
    assert status == 2, (status, stdout, stderr)
    assert stdout == ""
    assert stderr.startswith("error: ") and stderr.count("\n") == 1, stderr
    for word in words:
        assert str(word) in stderr


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "flags, words",
    [
        (["--no-such-flag"], ["--no-such-flag"]),
        (["--preset", "huge"], ["--preset", "huge", "gpt2-medium"]),
        (["--max-steps", "0"], ["--max-steps", "0"]),
        (["--epochs", "-1"], ["--epochs", "-1"]),
        (["--batch-size", "2.5"], ["--batch-size", "2.5"]),
        (["--global-batch-size", "0"], ["--global-batch-size"]),
        (["--context-length", "many"], ["--context-length", "many"]),
        (["--log-every", "0"], ["--log-every"]),
        (["--eval-every", "0"], ["--eval-every"]),
        (["--lr", "nan"], ["--lr", "nan"]),
        (["--lr", "0"], ["--lr"]),
        (["--seed", "-1"], ["--seed", "-1"]),
        (["--drop-rate", "1"], ["drop", "1"]),
        (["--drop-rate", "nan"], ["drop", "nan"]),
        (["--device", "toaster"], ["--device toaster", "cpu"]),
        (["--dtype", "float16"], ["float16", "GPU"]),
        (["--resume"], ["--resume", "--out"]),
        (["--preset", "gpt2"], ["--data"]),
        (["--context-length", "100000"], ["--context-length", "1,000,010"]),
        (["--global-batch-size", "100000"], ["windows", "100000", "--data"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_flags_that_cannot_be_are_refused_in_one_line(script, flags, words, call_main, tmp_path):
    device = [] if "--device" in flags else ["--device", "cpu"]
    assert_refused(call_main(script, *device, *flags), *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_cuda_is_refused_where_there_is_none(script, call_main):
    assert_refused(call_main(script, "--device", "cuda"), "--device cuda", "cpu")


def bad_files():
    """Name of the file, what it holds, flags, and what the user must read."""

    def numbers(array):
        return lambda path: np.save(path, array)

    def content(raw):
        return lambda path: path.write_bytes(raw)

    ids = np.arange(20_000) % 256
    return {
        "missing": ("missing.txt", lambda path: None, ["missing.txt"]),
        "empty": ("empty.txt", content(b""), ["empty.txt", "empty"]),
        "not utf-8": ("latin.txt", content(b"x" * 1234 + b"\xe9" + b"x" * 9000), ["latin.txt", "UTF-8", "1,234"]),
        "too short": ("short.txt", content(b"Too short."), ["--context-length"]),
        "few windows": ("few.txt", content(b"A window. " * 90), ["12 windows", "24", "--global-batch-size"]),
        "folder": ("folder", lambda path: path.mkdir(), ["folder", "python data.py"]),
        "floats": ("floats.npy", numbers(ids.astype(np.float32)), ["floats.npy", "float32"]),
        "two dimensions": ("square.npy", numbers(ids.reshape(2, -1)), ["square.npy", "(2, 10000)"]),
        "no array": ("torn.npy", content(b"\x93NUMPY torn"), ["torn.npy"]),
        "odd size": ("odd.bin", content(b"\0" * 20_001), ["odd.bin", "20,001"]),
        "id too large": ("large.npy", numbers(ids + 2), ["257", "--tokenizer"]),
        "negative id": ("negative.npy", numbers(ids - 1), ["-1", "--tokenizer"]),
    }


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("kind", bad_files())
def test_a_corpus_that_cannot_be_used_is_refused_in_one_line(script, kind, call_main, tmp_path):
    name, make, words = bad_files()[kind]
    path = Path(tmp_path, name)
    make(path)
    flags = ("--data", path, "--device", "cpu", "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert_refused(call_main(script, *flags), *words)
    # At most the ids of a good text stay, for the next try.
    assert {entry.name for entry in tmp_path.iterdir()} <= {name, f"{name}.bytes.npy"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_unreachable_gpt2_vocabulary_is_refused_with_the_ways_out(script, call_main, monkeypatch, tmp_path):
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "nothing"))
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody answers there: no network, also where there is one
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    result = call_main(script, "--tokenizer", "gpt2", "--device", "cpu")
    assert_refused(result, "TIKTOKEN_CACHE_DIR", "--tokenizer bytes")


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_out_folder_that_cannot_be_is_refused_with_path_and_reason(script, call_main, tmp_path):
    occupied = tmp_path / "file"
    occupied.write_text("mine")
    assert_refused(call_main(script, "--device", "cpu", "--out", occupied), occupied)
    assert_refused(call_main(script, "--device", "cpu", "--out", occupied / "below"), occupied / "below")
    assert occupied.read_text() == "mine"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_that_would_overwrite_another_is_refused(script, call_main, runs, corpus):
    folder, _ = runs[0]
    before = {path: path.read_bytes() for path in Path(folder).iterdir()}
    result = call_main(script, "--data", corpus, *FLAGS, "--seed", 5, "--out", folder)
    assert_refused(result, folder, "--resume", "--out")
    assert {path: path.read_bytes() for path in Path(folder).iterdir()} == before


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_lists_every_flag_and_its_default(script, call_main):
    status, stdout, stderr = call_main(script, "--help")
    assert (status, stderr) == (0, "")
    flags = (
        "preset data tokenizer context-length drop-rate batch-size global-batch-size epochs max-steps lr seed device "
    )
    flags += "dtype compile log-every eval-every out resume" + (" nproc nnodes node-rank" if script == SPAWN else "")
    shown = [line.split()[0] for line in stdout.splitlines() if line.startswith("  --")]
    assert shown == [f"--{name}" for name in flags.split(" ")]
    assert stdout.count("(default") == len(shown), "each says what happens without it"


def test_a_refusal_of_flags_is_left_to_one_process(call_main, monkeypatch):
    """Under torchrun each process reads the same flags."""
    assert_refused(call_main(TORCHRUN, "--lr", -1), "--lr")
    assert call_main(TORCHRUN, "--lr", -1, local_rank=1) == (2, "", "")


def test_a_refusal_by_several_processes_is_printed_once_and_leaves_nothing(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    flags = ("--device", "cpu", "--data", short, "--tokenizer", "bytes", "--out", tmp_path / "out")
    started = [start(script, *flags, n=2, cwd=tmp_path, env=ONE_THREAD) for script in (SPAWN, TORCHRUN)]
    spawn, torchrun = (finish(process) for process in started)
    assert_refused(spawn, "--context-length")
    status, stdout, stderr = torchrun
    assert (status, stdout) == (1, "")
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "--context-length" in errors[0]
    assert "exitcode  : 2" in stderr, "in torchrun's summary"
    assert {entry.name for entry in tmp_path.iterdir()} <= {"short.txt", "short.txt.bytes.npy"}
