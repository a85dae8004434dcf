"""data.Run and the files it leaves, without a training process: what it says, keeps and refuses, and when it ends."""

import io
import math
import os
import pickle
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, contents, small_text
from torch.utils._pytree import tree_flatten

import data
import gpt

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and fills /dev/full")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OTHERS = ["context_length 8", "drop_rate 0.25", "tokenizer gpt2", "seed 8", "global_batch_size 24", "data x.txt"]
OTHERS += ["emb_dim 4", "n_heads 4", "n_layers 4"]


@pytest.fixture(autouse=True)
def signal_handlers():
    """A run that has started handles signals; each test begins with none ignored and leaves all as they were."""
    before = [(signum, signal.signal(signum, signal.SIG_DFL)) for signum in SIGNALS]
    yield
    for signum, handler in before:
        signal.signal(signum, handler)


@pytest.fixture
def clock(monkeypatch):
    """The time, for data.py, stands still but for what is added to `now`."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(data, "time", SimpleNamespace(perf_counter=lambda: clock.now, monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def make_run(tmp_path):
    """A Run of these flags and changes, with 14 steps per epoch and a model so small that it costs nothing."""
    corpus = small_text(tmp_path / "corpus.txt")

    def make(*flags, n_processes=1, quiet=False, **changes):
        args = gpt.make_parser("").parse_args([str(flag) for flag in (*flags, "--device", "cpu")])
        vars(args).update(data=str(corpus), context_length=16, global_batch_size=12, batch_size=3)
        vars(args).update({"emb_dim": 8, "n_heads": 2, "n_layers": 1, **changes})
        return data.Run(gpt.resolve_flags(args), n_processes, quiet)

    return make


def start(run, scale=0, seed=0):
    """Start a run whose optimizer has made a step; `scale` is that of an enabled scaler."""
    torch.manual_seed(seed)
    model = gpt.GPT(gpt.config_for(run.args, run.corpus.tokenizer.n_vocab))
    optimizer = torch.optim.AdamW(gpt.weight_decay_groups(model, 0.1), lr=1e-3, fused=True)
    model(*(ids[None] for ids in run.corpus.train_set[seed])).loss.backward()
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale > 0)
    run.start(model=model, optimizer=optimizer, scaler=scaler)
    return run


def take(run, loss=lambda step: 2.0, norm=lambda step: 1.0, validate=lambda step: 3.0, others=()):
    """Take the steps of a run, in the loop of the scripts; `others` are the reports of other processes."""
    for step in run.steps():
        assert step < 100, "it goes on for ever"
        losses = [0.0] * (run.accumulation - 1) + [loss(step)]
        run.end_step([torch.tensor(value) for value in losses], torch.tensor(norm(step)))
        if run.is_report_step:
            run.log([run.report(), *others], 1e-3)
        if run.is_eval_step:
            run.log_validation(validate(step))
        if run.is_save_step:
            run.problem = run.save()
    return run


@pytest.fixture
def ended(make_run, tmp_path):
    """A run of 4 steps that has ended: the folder `out`, its files, and the checkpoint's `path` and values."""
    run = take(start(make_run("--out", tmp_path / "out", "--max-steps", 4, "--log-every", 3)))
    run.lock, path = None, tmp_path / "out" / "checkpoint.pt"
    saved = torch.load(path, weights_only=True)  # runs no code, so all is of plain types
    return SimpleNamespace(run=run, out=path.parent, files=contents(path.parent), path=path, saved=saved)


def plain(value):
    """The structure, types and bits of a checkpoint or a part of it, comparable."""
    leaves, structure = tree_flatten(value)
    bits = [(x.dtype, x.shape, x.numpy().tobytes()) if isinstance(x, torch.Tensor) else (type(x), x) for x in leaves]
    return structure, bits


def test_a_checkpoint_comes_back_from_any_device_as_it_was_saved_under_the_raw_names_of_the_model(ended, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
        data.save_checkpoint(ended.out, ended.saved)
    with pytest.raises((RuntimeError, AssertionError)):  # so that the test is one
        torch.load(ended.path, weights_only=True)
    run, loaded = ended.run, data.load_checkpoint(ended.path)
    expected = {name: part.state_dict() for name, part in run.parts.items()}
    expected |= {"step": 4, "metrics": run.metrics, "config": vars(run.parts["model"].config), "run": run.identity}
    assert loaded.keys() == expected.keys() == data.CHECKPOINT_KEYS
    assert all(plain(value) == plain(expected[name]) == plain(ended.saved[name]) for name, value in loaded.items())
    assert list(loaded["model"]) == [name for name, _ in run.parts["model"].named_parameters()]  # no prefix, one head


def test_files_are_on_disk_before_they_take_their_names_from_those_before_and_what_a_kill_left(ended, monkeypatch):
    """The other order could leave an empty file after a power cut."""
    events, fsync, replace = [], os.fsync, os.replace

    def watch(act, name, file, *target):
        events.append((name, os.stat(file).st_ino, os.stat(file).st_size))
        act(file, *target)

    monkeypatch.setattr(os, "fsync", lambda file: watch(fsync, "flushed", file))
    monkeypatch.setattr(os, "replace", lambda source, target: watch(replace, target.name, source, target))
    for name in ("checkpoint.pt.tmp", "metrics.csv.tmp"):
        (ended.out / name).write_bytes(b"half a checkp" * 100_000)
    rows = [[1, 192, 1e-3, 3.9, None, None], [3, 576, 0.1 + 0.2, 3.7, 3.8, 1234.5]]
    data.save_checkpoint(ended.out, {**ended.saved, "step": 5, "metrics": rows})
    # After a kill in between, the next save writes the table again.
    assert [name for name, *_ in events] == ["flushed", "flushed", "metrics.csv", "checkpoint.pt"]
    assert [file for _, *file in events[:2]] == [file for _, *file in events[2:]]
    assert data.load_checkpoint(ended.path)["step"] == 5 and contents(ended.out).keys() == ended.files.keys()
    header, *lines = (ended.out / "metrics.csv").read_text().splitlines()
    assert header == "step,tokens,learning_rate,train_loss,val_loss,tokens_per_second"
    assert lines == ["1,192,0.001,3.9,,", "3,576,0.30000000000000004,3.7,3.8,1234.5"]  # full precision, empty fields


@pytest.mark.parametrize("how", [0.0, 0.01, 0.5, 0.99, "checkpoint.pt", "metrics.csv", os.stat, sys.exit])
def test_a_save_that_fails_leaves_the_earlier_files_and_says_why(how, ended, monkeypatch):
    (limit, hard), reason = resource.getrlimit(resource.RLIMIT_FSIZE), ".*none"
    new_limit = limit
    if isinstance(how, float):  # no file may grow beyond a part of a checkpoint
        new_limit, reason = int(how * ended.path.stat().st_size), f"cannot write {ended.out}/.*: .*File too large"
    elif isinstance(how, str):  # a full disk under one of the two
        reason = f"cannot write {ended.out}/{how}: .*No space left"
        (ended.out / f"{how}.tmp").symlink_to("/dev/full")
    else:  # an error or a signal between writing and renaming
        monkeypatch.setattr(os, "replace", lambda source, target: how("none"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (new_limit, hard))
    try:
        with pytest.raises((OSError, SystemExit)) as failure:
            data.save_checkpoint(ended.out, {**ended.saved, "step": 5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    assert re.match(reason, str(failure.value)) and contents(ended.out) == ended.files


def test_what_is_no_checkpoint_is_refused_by_name_and_runs_no_code(tmp_path, ended, make_run):
    class Evil:  # makes a folder when it is unpickled
        def __reduce__(self):
            return os.mkdir, (f"{tmp_path}/code_ran",)

    def as_file(value):
        torch.save(value, file := io.BytesIO())
        return file.getvalue()

    whole, saved, evil = ended.path.read_bytes(), ended.saved, Evil()
    broken = [whole[:n] for n in (0, 1, 4, 100, len(whole) // 2, len(whole) - 100, len(whole) - 1)]
    broken += [b"step,tokens\n1,2\n", pickle.dumps({"model": {}}), pickle.dumps(evil)]
    broken += map(as_file, ({**saved, "run": evil}, torch.ones(3), saved["model"], {"model": {}, "epoch": 3}))
    lacking = {as_file({k: v for k, v in saved.items() if k != key}): key for key in data.CHECKPOINT_KEYS}
    for content in (*broken, *lacking):
        ended.path.write_bytes(content)
        with pytest.raises(ValueError) as refusal:
            make_run("--out", ended.out, "--resume")
        message = str(refusal.value)
        assert f"{ended.path} is no checkpoint of this project" in message and "\n" not in message, message
        assert f"lacks {lacking[content]}" in message if content in lacking else "weights_only" not in message
        assert not (tmp_path / "code_ran").exists()
    pickle.loads(pickle.dumps(evil))
    assert (tmp_path / "code_ran").exists()  # it would have run
    with pytest.raises(FileNotFoundError, match=f"there is no file {tmp_path}/none.pt"):
        data.load_checkpoint(tmp_path / "none.pt")


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_is_never_overwritten_and_no_start_for_another_run(other, ended, make_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.txt").write_text("Nothing of this was there before. " * 200)
    name, value = other.split()
    change = {name: type(vars(ended.run.args)[name])(value)}
    key = "corpus" if name == "data" else name
    given = make_run(**change).identity[key]
    with pytest.raises(ValueError, match=f"{ended.path} has {key} {ended.saved['run'][key]}, this run has {given}: "):
        make_run("--out", ended.out, "--resume", **change)
    with pytest.raises(ValueError, match=f"{ended.path} exists: .*--resume.*--out"):
        make_run("--out", ended.out)
    assert contents(ended.out) == ended.files


def test_a_folder_that_cannot_be_written_is_refused_before_the_run(make_run, tmp_path):
    (tmp_path / "file").write_text("kept")
    for folder in (tmp_path / "file", tmp_path / "file/below", Path("/proc/1")):
        with pytest.raises(OSError, match=rf"cannot write to --out {folder}: \w+"):
            make_run("--out", folder)
        with pytest.raises(OSError, match=f"cannot write {folder}/"):
            data.save_checkpoint(folder, {"metrics": []})
    assert (tmp_path / "file").read_text() == "kept"


def test_a_run_makes_its_folder_and_holds_it_as_long_as_it_lives(make_run, tmp_path, monkeypatch):
    out = tmp_path / "runs" / "first"
    hold = "import data, sys; lock = data.open_run_folder(sys.argv[1]); print('held', flush=True); input()"
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", hold, out], cwd=ROOT, **streams) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match=f"another run writes to --out {out}: "):
            make_run("--out", out)
        assert make_run("--out", out, quiet=True).lock is None  # the folder is held by rank 0 of its run
        other.kill()
    run = make_run("--out", out, "--resume")
    assert (run.first_step, run.metrics, contents(out)) == (1, [], {})
    with pytest.raises(ValueError, match="another run writes"):
        make_run("--out", out)
    del run
    run = make_run("--out", out)
    monkeypatch.setattr(data.fcntl, "flock", lambda *args: os.stat("no locks"))  # as some file systems
    assert make_run("--out", out).lock is not run.lock
    monkeypatch.setattr(data, "fcntl", None)  # as Windows
    assert make_run("--out", out).lock is None


def test_a_resumed_run_has_all_that_was_saved_and_lets_go_of_the_file(ended, make_run, capsys):
    flags, maps = ("--out", ended.out, "--resume", "--max-steps", 6), Path("/proc/self/maps")
    run = make_run(*flags)
    assert (run.first_step, run.metrics) == (5, ended.saved["metrics"]) and str(ended.path) in maps.read_text()
    start(run, scale=32.0, seed=1)  # of a scaler nothing was saved, since it was not enabled
    assert str(ended.path) not in maps.read_text() and run.parts["scaler"].get_scale() == 32
    for name in ("model", "optimizer"):
        assert plain(run.parts[name].state_dict()) == plain(ended.saved[name])
    assert capsys.readouterr().out.endswith("\nresumed after step 4\n")
    assert take(run).finish() == 0 and capsys.readouterr().out.endswith(f"\nwritten to {ended.out}\n")
    assert [row[0] for row in data.load_checkpoint(ended.path)["metrics"]] == [3, 4, 6]
    run.lock = None
    assert [start(make_run(*flags, quiet=True), scale).parts["scaler"].get_scale() for scale in (8.0, 0)] == [32, 1]


def test_a_run_begins_with_the_facts_that_decide_it(make_run, capsys, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    runs = [make_run("--max-steps", 1285), make_run("--dtype", "bfloat16", n_processes=2)]
    vars(runs[1].args).update(data=None, compile=True)  # without a compiler the flag would be refused
    one, two = ((start(run), capsys.readouterr().out)[1] for run in runs)
    assert "preset tiny: 1 layers, 2 heads, 8 wide, 16 tokens of context, 3,576 parameters\n" in one
    assert f"device cpu, 1 process, float32, torch {torch.__version__}\ncorpus {runs[0].args.data}, " in one
    assert f", hash {runs[0].corpus.hash}, bytes tokens: 168 windows to train on, 18 to validate\n" in one
    assert "12 sequences per step = 3 per forward x 4 accumulated x 1 process; 14 steps per epoch, 1,285 in" in one
    assert "device cpu, 2 processes, bfloat16, compiled, " in two and "= 3 per forward x 2 accumulated x 2 proc" in two
    assert ("no instructions for bfloat16" in two) == (platform.machine() == "x86_64") and "no instr" not in one
    assert "; for the real thing: --preset gpt2 --data FILE\n" in two and "\ncorpus built into Python, hash" in two
    take(start(make_run("--max-steps", 1, quiet=True))).finish()
    assert capsys.readouterr() == ("", "")


def test_a_run_reports_evaluates_and_saves_at_its_steps_and_times_none_of_it(
    make_run, clock, tmp_path, capsys, monkeypatch
):
    def wait(seconds, value):
        clock.now += seconds
        return value

    saves = []
    monkeypatch.setattr(data, "save_checkpoint", lambda out, checkpoint: saves.append(wait(1000, checkpoint["step"])))
    run = start(make_run("--max-steps", 31, "--log-every", 2, "--eval-every", 3, "--out", tmp_path))
    take(run, lambda step: wait(50 if step == 1 else 2, 2.5), validate=lambda step: wait(1000, 3.5))
    assert saves == [row[0] for row in run.metrics if row[4]] == [*range(3, 31, 3), 31]
    assert [row[0] for row in run.metrics] == sorted({*range(2, 31, 2), *range(3, 31, 3), 31})
    assert run.metrics[:2] == [[2, 384, 1e-3, 2.5, None, 96.0], [3, 576, 1e-3, 2.5, 3.5, 96.0]]
    assert {row[5] for row in run.metrics} == {12 * 16 / 2}  # tokens per second
    said = capsys.readouterr().out
    assert "\nepoch 1  step 2/31  loss 2.500000  norm 1.000  lr 1.00e-03  96 tokens/s  0:00:58 left\n" in said
    order = ["epoch 1  step 14", "Epoch 1 completed", "epoch 2  step 15", "\nstep 15: validation loss 3.500000\n"]
    places = [said.index(text) for text in (*order, "Epoch 2 completed")]
    assert places == sorted(places) and said.count("completed") == 2
    run = take(start(make_run("--max-steps", 2, "--log-every", 1)), lambda step: wait(2, 2.5))
    assert [row[5] for row in run.metrics] == [None, 96.0] and run.finish() == 0
    said = capsys.readouterr().out
    assert "lr 1.00e-03\n" in said and said.endswith("\nnothing was written: --out DIR keeps a checkpoint\n")


def test_a_line_shows_the_mean_loss_and_that_of_each_rank_or_the_two_outermost(make_run, capsys):
    for losses, shown in (
        ([2.5], "2.500000  norm"),
        ([2.0, 3.0], "2.500000 [rank 0 2.000000, rank 1 3.000000]  norm"),
        ([2.5] * 8, f"2.500000 [{', '.join(f'rank {rank} 2.500000' for rank in range(8))}]  norm"),
        ([2.0] * 3 + [1.0] + [2.0] * 4 + [3.0], "2.000000 [lowest rank 3 1.000000, highest rank 8 3.000000]  norm"),
    ):
        others = [(loss, math.inf, 0) for loss in losses[1:]]
        take(start(make_run("--max-steps", 1)), lambda step, loss=losses[0]: loss, others=others)
        assert f"epoch 1  step 1/1  loss {shown} 1.000" in capsys.readouterr().out


@pytest.mark.parametrize(("encoding", "said"), [("cp1252", b"\xe9 ?\n"), ("ascii", b"? ?\n"), ("utf-16-le", None)])
def test_what_an_output_cannot_show_is_replaced(encoding, said, monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    data.say("\xe9 \u8a9e")
    assert sys.stdout.buffer.getvalue() == (said or "\xe9 \u8a9e\n".encode(encoding))


def test_a_program_goes_on_where_nobody_can_read_it(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    for file in (os.fdopen(writer, "w"), os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"), io.StringIO()):
        monkeypatch.setattr(sys, "stdout", None if isinstance(file, io.StringIO) else file)
        for _ in range(3):
            data.say("Nobody hears this.")
        file.close()  # as at the program's end: nothing is left to fail


@pytest.mark.parametrize(
    ("scale", "losses", "norms", "others", "expected"),
    [
        (0, {9: math.inf, 7: math.nan}, {8: math.nan}, [], 7),
        (0, {20: -math.inf}, {}, [], 20),
        (0, {}, {6: math.nan, 5: math.inf}, [], 5),
        (0, {}, {}, [(2.0, math.inf, 0), (2.0, 4, 0)], 4),
        (8.0, {}, {5: math.inf, 6: math.nan, 10: math.inf}, [], None),  # the scaler skips such a step
        (8.0, {7: math.nan}, {5: math.inf}, [], 7),
        (0.5, {}, {}, [], 10),  # it skips them all the time
    ],
)
def test_the_first_bad_number_ends_the_run(scale, losses, norms, others, expected, make_run, tmp_path, capsys):
    run = start(make_run("--max-steps", 28, "--eval-every", 100, "--out", tmp_path / "out"), scale)
    take(run, lambda step: losses.get(step, 2.0), lambda step: norms.get(step, 1.0), others=others)
    reported = [step for step in (10, 20, 28) if expected is None or step < expected]
    assert [row[0] for row in run.metrics] == reported and run.finish() == (expected is not None)
    said = f"error: the loss or its gradient is not finite at step {expected}: try a lower --lr\n" if expected else ""
    assert capsys.readouterr().err == said and (expected is None or contents(tmp_path / "out") == {})


@pytest.mark.parametrize("bad", ["the validation loss is not finite after step 4: ", "cannot write OUT/.*No such file"])
def test_a_bad_validation_loss_or_save_ends_the_run(bad, make_run, tmp_path, capsys):
    run, out = start(make_run("--eval-every", 4, "--out", tmp_path / "out")), tmp_path / "out"
    take(run, validate=lambda step: math.nan if "OUT" not in bad else shutil.rmtree(out) or 3.0)
    assert run.step == 4 and run.finish() == 1 and not (out / "checkpoint.pt").exists()
    assert re.fullmatch(f"error: {bad.replace('OUT', str(out))}.*--(lr|resume).*\n", capsys.readouterr().err)


@pytest.mark.parametrize(("own", "other"), [("SIGTERM", 0), (None, 15), ("SIGINT", 15)])
def test_a_signal_to_any_process_ends_the_run_at_the_next_report_and_saves(own, other, make_run, tmp_path, capsys):
    run = start(make_run("--out", tmp_path, "--log-every", 5, "--eval-every", 100))
    if own:
        signal.raise_signal(signal.Signals[own])
    take(run, others=[(2.0, math.inf, other)])
    assert data.load_checkpoint(tmp_path / "checkpoint.pt")["step"] == 5 and run.finish() == 143
    stdout, stderr = capsys.readouterr()
    assert stdout.endswith(f"\nstopped by SIGTERM after step 5: saved in {tmp_path}; --resume goes on\n")
    assert stderr == (f"{own}: the run stops after step 5 at the latest\n" if own else "")
    run.args.out, run.stop_signal = None, signal.SIGHUP
    assert run.finish() == 129
    assert capsys.readouterr().out == "stopped by SIGHUP after step 5: nothing was saved without --out\n"
    run.total_steps = 5
    assert run.finish() == 0  # the signal came in the last step


def test_a_second_ctrl_c_a_second_later_ends_a_run_of_one_process_at_once(make_run, clock):
    for n_processes in (2, 1):
        start(make_run(n_processes=n_processes))
        for seconds, name in ((100, "SIGINT"), (0.9, "SIGINT"), (0.2, "SIGTERM")):  # 0.9: the first one told twice
            clock.now += seconds
            signal.raise_signal(signal.Signals[name])
        if n_processes == 2:
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(SystemExit) as end:
        signal.raise_signal(signal.SIGINT)
    assert end.value.code == 130


def test_a_signal_that_was_ignored_at_the_start_stays_ignored():
    data.on_signals(data.end_quietly)
    for signum in SIGNALS:
        with pytest.raises(SystemExit) as end:
            signal.raise_signal(signum)
        assert end.value.code == 128 + signum
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # by nohup
    data.on_signals(signal.SIG_DFL)
    assert [signal.getsignal(signum) for signum in SIGNALS] == [signal.SIG_DFL, signal.SIG_DFL, signal.SIG_IGN]


def test_processes_must_agree_in_all_but_paths_and_places_or_the_first_difference_is_named(make_run, monkeypatch):
    run, places = make_run(), {"data": "a", "out": "b", "nproc": 2, "node_rank": 0}
    vars(run.args).update({"nnodes": 1, **places})
    first = run.must_agree
    for name, value in vars(run.args).copy().items():
        setattr(run.args, name, "other")
        assert (run.must_agree == first) == (name in places), name
        setattr(run.args, name, value)
    assert data.difference([first, run.must_agree], "use the same") is None
    run.corpus.hash, run.first_step = "other", 7
    monkeypatch.setattr(torch, "__version__", "2.0")
    assert [name for name in first if run.must_agree[name] != first[name]] == ["corpus", "first step", "torch"]
    run.problem = data.difference([first, first, run.must_agree, {**first, "--lr": 0}], "use the same")
    assert run.problem == f"corpus is {first['corpus']} on rank 0 and other on rank 2: use the same"
    assert not any(run.steps()) and not (run.is_complete or run.is_eval_step or run.is_save_step)
