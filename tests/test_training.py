"""What a run of the single script does and leaves, and what each script's main() refuses before it begins."""

import math
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SCRIPTS, SINGLE, SPAWN, TORCHRUN, Launch, call_main, contents, read_metrics, refusal, small_text

import data
import gpt

SMALL = ("--context-length", 8, "--global-batch-size", 12, "--batch-size", 4)
STEPS = 86
FLAGS = (*SMALL, "--drop-rate", 0.1, "--max-steps", STEPS, "--log-every", 20, "--eval-every", 30)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A text of 481 training and 53 validation windows of 8 tokens: neither divides by a batch."""
    return small_text(tmp_path_factory.mktemp("small") / "corpus.txt", 4279)


def ended_well(launch, timeout=120):
    assert launch.finish(timeout) == 0 and "Warning" not in launch.text, launch.text
    return launch.text


def loss_of(model, windows):
    inputs, targets = (torch.stack(ids) for ids in zip(*windows))
    with torch.no_grad():
        return model.eval()(inputs, targets).loss.item()


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """Three runs as (folder, output): the second has the flags of the first, the third another seed."""
    folder, flags = tmp_path_factory.mktemp("runs"), ("--data", corpus, *FLAGS)
    outs = {folder / name: ("--seed", seed) for name, seed in (("first", 5), ("again", 5), ("other", 6))}
    launches = [Launch(f"{out}.log", SINGLE, *flags, *seed, "--out", out) for out, seed in outs.items()]
    return [(out, ended_well(launch)) for out, launch in zip(outs, launches)]


def test_metrics_have_a_row_for_each_log_step_and_each_evaluation_and_show_what_the_log_shows(runs):
    folder, stdout = runs[0]
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == [20, 30, 40, 60, 80, STEPS]
    assert [row["step"] for row in rows if row["val_loss"]] == [30, 60, STEPS]
    assert len([line for line in stdout.splitlines() if "norm" in line or "validation loss" in line]) == 6 + 3
    for row in rows:
        step = int(row["step"])
        assert row["tokens"] == step * 12 * 8 and row["tokens_per_second"] > 0
        assert row["learning_rate"] == gpt.learning_rate(step, STEPS, gpt.PRESETS["tiny"].lr)
        assert f"step {step}/{STEPS}  loss {row['train_loss']:.6f}  norm" in stdout
        assert not row["val_loss"] or f"\nstep {step}: validation loss {row['val_loss']:.6f}\n" in stdout
    assert rows[-1]["train_loss"] < rows[0]["train_loss"] - 0.3, "it learns"


def test_a_run_says_what_it_is_and_how_it_ended(runs):
    folder, stdout = runs[0]
    assert stdout.startswith("preset tiny: 4 layers, 4 heads, 128 wide, 8 tokens of context, ")
    assert "\n12 sequences per step = 4 per forward x 3 accumulated x 1 process; 40 steps per epoch, 86 in" in stdout
    assert stdout.endswith(f"\nwritten to {folder}\n")
    assert contents(folder).keys() == {"checkpoint.pt", "metrics.csv"}


def test_two_equal_runs_leave_the_same_and_another_seed_leaves_another(runs):
    first, again, other = ([list(row.values())[:-1] for row in read_metrics(folder)] for folder, _ in runs)
    assert first == again  # without the last column, the speed
    assert all(mine[3] != theirs[3] for mine, theirs in zip(first, other))
    one, two, _ = (data.load_checkpoint(folder / "checkpoint.pt")["model"] for folder, _ in runs)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    samples = [text[text.index("sample: The ") : text.index("written to")] for _, text in runs]
    assert samples[0] == samples[1] != samples[2]


def test_the_validation_loss_of_a_row_is_that_of_the_saved_model_over_every_window_once(runs, corpus):
    checkpoint = data.load_checkpoint(runs[0][0] / "checkpoint.pt")
    model = gpt.GPT(gpt.GPTConfig(**checkpoint["config"]))
    model.load_state_dict(checkpoint["model"])
    val_set = data.open_corpus(corpus, "bytes", 8).val_set
    expected = loss_of(model, [val_set[i] for i in range(len(val_set))])
    assert len(val_set) == 53 and read_metrics(runs[0][0])[-1]["val_loss"] == pytest.approx(expected, rel=1e-5)


def test_the_first_row_is_the_loss_of_the_first_batch_before_any_update(corpus, tmp_path):
    """And without --out a run writes nothing. Two epochs are two times floor(481 / 480) steps."""
    flags = ("--context-length", 8, "--global-batch-size", 480, "--batch-size", 120, "--epochs", 2, "--seed", 7)
    flags, before = ("--data", corpus, *flags, "--log-every", 1), contents(corpus.parent)
    (here := tmp_path / "here").mkdir()
    stdout = ended_well(Launch(tmp_path / "log", SINGLE, *flags, before=("env", "-C", str(here))))
    assert contents(corpus.parent).keys() <= before.keys() | {f"{corpus.name}.bytes.npy"}
    assert contents(here) == {}
    assert stdout.endswith("nothing was written: --out DIR keeps a checkpoint\n") and "step 2/2" in stdout

    torch.manual_seed(7)
    model = gpt.GPT(gpt.GPTConfig(vocab_size=320, context_length=8, emb_dim=128, n_heads=4, n_layers=4))
    order = torch.randperm(481, generator=torch.Generator().manual_seed(7))[:480].tolist()
    train_set = data.open_corpus(corpus, "bytes", 8).train_set
    shown = float(stdout[stdout.index("step 1/2  loss ") :].split()[3])
    assert shown == pytest.approx(loss_of(model, [train_set[i] for i in order]), abs=2e-6)
    assert shown == pytest.approx(math.log(320), abs=0.5), "near that of a guess"


@pytest.mark.slow
def test_the_gpt2_tokenizer_trains_from_a_text_file(tmp_path):
    flags = ("--data", small_text(tmp_path / "corpus.txt", 10**6), "--tokenizer", "gpt2", "--max-steps", 12)
    ended_well(Launch(tmp_path / "log", SINGLE, *flags, "--log-every", 1, "--out", tmp_path / "out"), timeout=1200)
    losses = [row["train_loss"] for row in read_metrics(tmp_path / "out")]
    assert losses[0] == pytest.approx(math.log(50304), abs=0.3) and losses[-1] < 10


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with files that no run can use."""
    monkeypatch.chdir(tmp_path)
    Path("damaged").mkdir()
    for name, raw in {
        "latin.txt": b"x" * 1234 + b"\xe9" + b"x" * 9000,
        "few.txt": b"A window. " * 90,
        "kept.txt": b"mine",
        "damaged/checkpoint.pt": b"step 3\nstep 4\n",
    }.items():
        Path(name).write_bytes(raw)
    np.save("large.npy", np.arange(20_000) % 256 + 2)
    return tmp_path


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "flags, words",
    [
        ("--no-such-flag", "--no-such-flag"),
        ("--lr nan", "--lr nan"),
        ("--out=", "--out empty"),
        ("--data=", "--data empty"),
        ("--device toaster", "--device toaster"),
        *([] if torch.cuda.is_available() else [("--device cuda", "--device cuda cpu")]),
        ("--resume", "--resume --out"),
        ("--data missing.txt", "missing.txt"),
        ("--data ~/missing.txt", "/home/of/missing.txt"),
        ("--data latin.txt", "latin.txt UTF-8 1,234"),
        ("--data few.txt --global-batch-size 24", "12 windows 24 --global-batch-size"),
        ("--data large.npy", "257 --tokenizer"),
        ("--out kept.txt", "--out kept.txt exists"),
        ("--out kept.txt/below", "kept.txt/below directory"),
        ("--out damaged --resume", "damaged/checkpoint.pt project --out"),
        ("--out damaged", "damaged/checkpoint.pt --resume --out"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(script, flags, words, folder):
    before = {path for path in folder.rglob("*")}
    out = ["--out", "new"] if "--out" not in flags and flags != "--resume" else []
    said = refusal(script, *shlex.split(flags), *out, HOME="/home/of")
    assert all(word in said for word in words.split()), said
    # At most the ids of a good text stay, for the next try.
    assert {path for path in folder.rglob("*")} - before <= {folder / "few.txt.bytes.npy"}
    assert Path("kept.txt").read_text() == "mine"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_that_would_overwrite_or_change_another_is_refused(script, runs, corpus):
    folder, _ = runs[0]
    before, flags = contents(folder), ("--data", corpus, *FLAGS, "--out", folder, "--seed")
    assert f"{folder}/checkpoint.pt exists: add --resume" in refusal(script, *flags, 5)
    assert f"{folder}/checkpoint.pt has seed 5, this run has 6: " in refusal(script, *flags, 6, "--resume")
    assert call_main(script, *flags, 5, "--resume") == (99, "", "")  # is not refused
    assert contents(folder) == before


@pytest.mark.parametrize("script", [SINGLE, *(pytest.param(script, marks=pytest.mark.slow) for script in SCRIPTS[1:])])
def test_a_second_run_in_one_folder_is_refused_while_the_first_lives(script, corpus, tmp_path):
    flags = ("--data", corpus, *SMALL, "--max-steps", 10**6, "--out", tmp_path / "out", "--resume")
    launch = Launch(tmp_path / "log", script, *flags, n=1 if script == SINGLE else 2)
    launch.wait_for(r"step 10/")
    others = [call_main(other, *flags) for other in SCRIPTS]
    launch.kill()
    said = f"error: another run writes to --out {tmp_path / 'out'}: wait for its end, or choose another --out\n"
    assert others == [(2, "", said)] * 3


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_lists_every_flag_and_its_default(script):
    status, stdout, stderr = call_main(script, "--help")
    assert (status, stderr) == (0, "")
    flags = "preset data tokenizer context-length drop-rate batch-size global-batch-size epochs max-steps lr seed "
    flags += "device dtype compile log-every eval-every out resume" + " nproc nnodes node-rank" * (script == SPAWN)
    shown = [line.split()[0] for line in stdout.splitlines() if line.startswith("  --")]
    assert shown == [f"--{name}" for name in flags.split(" ")]
    assert stdout.count("(default") == len(shown), "each says what happens without it"


def test_without_the_variables_of_torchrun_its_script_says_how_to_start():
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        for env in ({name: None}, {"LOCAL_RANK": 1, name: ""}):
            said = refusal(TORCHRUN, **env)
            assert said.startswith(f"error: {name} is not set: torchrun --standalone --nproc_per_node=2 {TORCHRUN} ")
            assert "--lr" in refusal(TORCHRUN, "--lr", -1, **env)


def test_a_refusal_under_torchrun_is_left_to_the_first_process_of_a_machine():
    for flags in (("--lr", -1), ("--device", "toaster"), ("--data", "missing.txt")):
        assert refusal(TORCHRUN, *flags, RANK=2, WORLD_SIZE=4)
        assert call_main(TORCHRUN, *flags, RANK=1, LOCAL_RANK=1) == (2, "", "")


def assert_refused(launch, *words):
    """Words of the only line `error: ...`, and status 2; torchrun has a status of its own, and a summary."""
    status = launch.finish()
    said = [line for line in launch.text.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and all(word in said[0] for word in words), launch.text
    assert status == 2 or (status == 1 and "exitcode  : 2" in launch.text), launch.text


@pytest.mark.parametrize("script", [SPAWN, TORCHRUN])
def test_a_refusal_by_several_processes_is_printed_once_and_leaves_nothing(script, tmp_path):
    short = small_text(tmp_path / "short.txt", 9)
    flags = ("--data", short, "--out", tmp_path / "out")
    assert_refused(Launch(tmp_path / "log", script, *flags, n=2), "--context-length")
    assert set(tmp_path.iterdir()) == {tmp_path / name for name in ("short.txt", "short.txt.bytes.npy", "log")}


@pytest.mark.parametrize("script", [SINGLE, SPAWN])
def test_the_scripts_that_torchrun_does_not_start_refuse_it(script, tmp_path):
    here = Path(data.__file__).parent
    replace = {str(here / TORCHRUN): [str(here / script)]}
    assert_refused(Launch(tmp_path / "log", TORCHRUN, "--max-steps", 1, replace=replace), "with python", TORCHRUN)
