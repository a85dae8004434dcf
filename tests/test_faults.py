"""Signals, restarts, numbers gone bad, full disks and peers that fail: a run ends in a bounded time, and says why."""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from conftest import SCRIPTS, SINGLE, SPAWN, TORCHRUN, read_metrics
from test_resume import STEP_HOOK, Launch, contents, hooked, refusal, small_disk, small_text

import data
import gpt

FLAGS = ("--context-length", 16, "--global-batch-size", 12)
DDP_SCRIPTS = (SPAWN, TORCHRUN)
NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "SIGINT"}


def processes(script):
    return 1 if script == SINGLE else 2


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_text(tmp_path_factory.mktemp("corpus") / "corpus.txt")


# ----------------------------------------------------------------------------------------------------------------------
# Signals


def signalled_run(script, whom, signum, corpus, folder, before=()):
    """Start a run without end, send it a signal after step 10, and return it with its status."""
    flags = ("--data", corpus, *FLAGS, "--max-steps", 10**6, "--log-every", 5, "--eval-every", 10**6)
    launch = Launch(folder / "log", script, *flags, "--out", folder / "out", n=processes(script), before=before)
    launch.wait_for(r"step 10/")
    if whom == "launcher":
        os.kill(launch.process.pid, signum)
    elif whom == "group":  # what Ctrl-C in a terminal does; torchrun's workers are in sessions of their own
        os.killpg(launch.process.pid, signum)
    else:
        os.kill(launch.ranks()[whom], signum)
    return launch, launch.finish(60)


def assert_stopped(launch, status, script, signum, out):
    """It stopped at a log step, saved that step once, and said how to go on."""
    said = re.findall(r"^stopped by (SIG\w+) after step (\d+): saved in (.*); --resume goes on$", launch.text, re.M)
    assert len(said) == 1, launch.text
    name, step, folder = said[0]
    assert (name, folder) == (NAMES[signum], str(out))
    assert int(step) % 5 == 0
    assert status == 1 if script == TORCHRUN else status == 128 + signum, launch.text
    checkpoint = gpt.load_checkpoint(out / "checkpoint.pt")
    assert checkpoint["step"] == int(step)
    assert [row["step"] for row in read_metrics(out)] == list(range(5, int(step) + 1, 5))
    assert sorted(os.listdir(out)) == ["checkpoint.pt", "metrics.csv"]
    assert "Error" not in launch.text.replace("ChildFailedError", ""), launch.text


@pytest.mark.parametrize(
    "script, whom, signum",
    [
        (SINGLE, "launcher", signal.SIGTERM),
        (SPAWN, "group", signal.SIGINT),
        *(
            pytest.param(script, whom, signum, marks=pytest.mark.slow)
            for script, whom, signum in (
                (SINGLE, "group", signal.SIGINT),
                (SPAWN, "launcher", signal.SIGTERM),
                (SPAWN, "launcher", signal.SIGINT),
                (SPAWN, 0, signal.SIGINT),
                (SPAWN, 1, signal.SIGTERM),
                (TORCHRUN, "launcher", signal.SIGTERM),
                (TORCHRUN, "group", signal.SIGINT),
                (TORCHRUN, 0, signal.SIGINT),
                (TORCHRUN, 1, signal.SIGTERM),
            )
        ),
    ],
)
def test_a_signal_stops_all_ranks_at_the_next_log_step_and_saves_once(script, whom, signum, corpus, tmp_path):
    launch, status = signalled_run(script, whom, signum, corpus, tmp_path)
    assert_stopped(launch, status, script, signum, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_in_the_background_leaves_no_orphan_when_its_launcher_gets_sigterm(script, corpus, tmp_path):
    """A shell's background job ignores SIGINT, and one under nohup ignores SIGHUP too."""
    shell = ("bash", "-c", 'nohup "$@" & echo $! > $PID_FILE; wait $!', "bash")
    flags = ("--data", corpus, *FLAGS, "--max-steps", 10**6, "--log-every", 5, "--eval-every", 10**6)
    out, pid_file = tmp_path / "out", tmp_path / "pid"
    launch = Launch(
        tmp_path / "log", script, *flags, "--out", out, n=processes(script), before=shell, PID_FILE=pid_file
    )
    launch.wait_for(r"step 10/")
    os.kill(int(pid_file.read_text()), signal.SIGTERM)
    assert_stopped(launch, launch.finish(60), script, signal.SIGTERM, out)


@pytest.mark.slow
def test_a_signal_without_out_says_that_nothing_was_saved(corpus, tmp_path):
    flags = ("--data", corpus, *FLAGS, "--max-steps", 10**6, "--log-every", 5)
    launch = Launch(tmp_path / "log", SPAWN, *flags, n=2)
    launch.wait_for(r"step 10/")
    os.kill(launch.process.pid, signal.SIGTERM)
    assert launch.finish(60) == 143
    assert re.search(r"^stopped by SIGTERM after step \d+: nothing was saved without --out$", launch.text, re.M)


def assert_ended_early(launch, status, signum, script):
    """A quiet end: no traceback but the one of torchrun about its own signal."""
    assert status in (1,) if script == TORCHRUN else status in (128 + signum, -signum), (status, launch.text)
    assert launch.text.count("Traceback") <= (script == TORCHRUN), launch.text
    assert "step 1" not in launch.text


@pytest.mark.slow
@pytest.mark.parametrize("signum", NAMES)
@pytest.mark.parametrize(
    "script, where", [(SINGLE, "its own"), (SPAWN, "its own"), (SPAWN, "ranks"), (TORCHRUN, "ranks")]
)
def test_a_signal_during_the_imports_ends_every_process_quietly(script, where, signum, corpus, tmp_path):
    launch = Launch(tmp_path / "log", script, "--data", corpus, *FLAGS, n=processes(script))
    if where == "ranks":
        launch.wait_for(lambda launch: len(launch.ranks()) == 2)
    time.sleep(0.7)
    os.killpg(launch.process.pid, signum)
    assert_ended_early(launch, launch.finish(40), signum, script)


# Rank 0 is held while it tokenizes; rank 1 of torchrun waits in setup meanwhile.
HELD_TOKENIZER = """
import time
pieces = data._pieces
def held_pieces(path):
    yield from pieces(path)
    print("tokenizing", flush=True)
    while True:
        time.sleep(0.1)
data._pieces = held_pieces
"""


@pytest.mark.parametrize(
    "script, signum",
    [
        pytest.param(script, signum, marks=() if (script, signum) == (SINGLE, signal.SIGTERM) else pytest.mark.slow)
        for script in SCRIPTS
        for signum in NAMES
    ],
)
def test_a_signal_during_tokenizing_ends_every_process_and_leaves_no_litter(script, signum, tmp_path):
    text = small_text(tmp_path / "corpus.txt")
    copy = hooked(tmp_path / "code", HELD_TOKENIZER)
    launch = Launch(tmp_path / "log", script, "--data", text, *FLAGS, n=processes(script), folder=copy)
    launch.wait_for("^tokenizing")
    assert len(list(tmp_path.glob("corpus.txt.*"))) == 1, "nothing is being written, so nothing is shown"
    if script == TORCHRUN:
        time.sleep(3)  # for rank 1 to wait in setup
    os.killpg(launch.process.pid, signum)
    assert_ended_early(launch, launch.finish(40), signum, script)
    assert list(tmp_path.glob("corpus.txt.*")) == []


# Rank 1 never comes; TIMEOUT_SECONDS shortens the wait for it.
ABSENT_PEER = """
import os, time
TIMEOUT = timedelta(seconds=float(os.environ["TIMEOUT_SECONDS"]))
joined_setup = setup
def setup(rank, *rest):
    if rank == 1:
        time.sleep(1000)
    print("waiting in setup", flush=True)
    joined_setup(rank, *rest)
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", DDP_SCRIPTS)
@pytest.mark.parametrize("whom, signum", [("group", signal.SIGTERM), ("group", signal.SIGINT), (0, signal.SIGINT)])
def test_a_signal_while_a_rank_waits_in_setup_ends_every_process(script, whom, signum, corpus, tmp_path):
    copy = hooked(tmp_path / "code", ABSENT_PEER)
    launch = Launch(tmp_path / "log", script, "--data", corpus, *FLAGS, n=2, folder=copy, TIMEOUT_SECONDS=600)
    launch.wait_for("^waiting in setup")
    time.sleep(3)
    if whom == "group":
        os.killpg(launch.process.pid, signum)
    else:
        os.kill(launch.ranks()[whom], signum)
    status = launch.finish(60)
    assert status != 0
    if whom == "group":
        assert_ended_early(launch, status, signum, script)


# A signal in the moment between the start of the launcher's handler and that of the first process.
EARLY_SIGNAL = """
import os
real_spawn = spawn
def spawn(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGTERM)
    return real_spawn(*args, **kwargs)
"""


@pytest.mark.slow
def test_a_signal_just_before_the_first_process_starts_is_not_lost(corpus, tmp_path):
    copy = hooked(tmp_path / "code", EARLY_SIGNAL)
    flags = ("--data", corpus, *FLAGS, "--max-steps", 10**6, "--log-every", 5)
    launch = Launch(tmp_path / "log", SPAWN, *flags, n=2, folder=copy)
    assert launch.finish(60) == 143, launch.text


# ----------------------------------------------------------------------------------------------------------------------
# Restarts


def restarted_run(folder, corpus, kills, moments):
    """Kill a worker `kills` times with SIGKILL after some steps of each attempt; returns the run and its metrics.

    At least three steps, so that each attempt saves once (the second step is surely saved when the third is printed).
    """
    flags = ("--data", corpus, *FLAGS, *EXACT, "--out", folder / "out", "--resume")
    restarting = {"--standalone": ["--standalone", "--max-restarts=3"]}
    launch = Launch(folder / "log", TORCHRUN, *flags, n=2, replace=restarting)
    for number in range(kills):
        begun = rf"(?s)(^preset.*){{{number + 1}}}" + "^epoch .*" * moments.randint(3, 6)
        launch.wait_for(begun)
        time.sleep(moments.uniform(0, 0.15))
        os.kill(launch.ranks()[moments.randrange(2)], signal.SIGKILL)
    assert launch.finish(180) == 0, launch.text
    resumed = [int(step) for step in re.findall(r"resumed after step (\d+)", launch.text)]
    assert len(resumed) == kills, launch.text
    assert resumed[0] > 0 and resumed == sorted(set(resumed))
    assert sorted(os.listdir(folder / "out")) == ["checkpoint.pt", "metrics.csv"]
    return launch, read_metrics(folder / "out")


EXACT = ("--dtype", "float64", "--max-steps", 60, "--log-every", 1, "--eval-every", 2)


def undisturbed_run(folder, corpus):
    return Launch(folder / "undisturbed.txt", SINGLE, "--data", corpus, *FLAGS, *EXACT, "--out", folder / "undisturbed")


def assert_undisturbed(rows, expected):
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, other in zip(rows, expected):
        for name in ("train_loss", "val_loss"):
            assert (row[name] is None) == (other[name] is None)
            assert row[name] is None or abs(row[name] - other[name]) <= 1e-9, (row, other)


def test_torchrun_goes_on_by_itself_after_kill_9_of_a_worker(corpus, tmp_path):
    undisturbed = undisturbed_run(tmp_path, corpus)
    _, rows = restarted_run(tmp_path, corpus, 1, random.Random(1))
    assert undisturbed.finish() == 0, undisturbed.text
    assert_undisturbed(rows, read_metrics(tmp_path / "undisturbed"))


@pytest.mark.slow
def test_torchrun_goes_on_after_kill_9_of_a_worker_20_times_out_of_20(corpus, tmp_path):
    undisturbed, moments, survived = undisturbed_run(tmp_path, corpus), random.Random(20), 0
    assert undisturbed.finish() == 0, undisturbed.text
    expected = read_metrics(tmp_path / "undisturbed")
    while survived < 20:
        kills, folder = min(3, 20 - survived), tmp_path / f"after{survived}"
        folder.mkdir()
        _, rows = restarted_run(folder, corpus, kills, moments)
        assert_undisturbed(rows, expected)
        survived += kills
    print(f"{survived} restarts of {survived} ended with the losses of an undisturbed run")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_spawn_names_a_process_that_was_killed_and_ends_the_others(rank, corpus, tmp_path):
    flags = ("--data", corpus, *FLAGS, "--max-steps", 10**6, "--log-every", 5)
    launch = Launch(tmp_path / "log", SPAWN, *flags, n=2)
    launch.wait_for(r"step 10/")
    os.kill(launch.ranks()[rank], signal.SIGKILL)
    assert launch.finish(60) not in (0, -9)
    assert f"process {rank} was ended by SIGKILL" in launch.text


# ----------------------------------------------------------------------------------------------------------------------
# Numbers gone bad

# At step 7 on the last rank, FAULT: the loss becomes nan, or a gradient infinite while the loss stays finite.
BAD_NUMBERS = (
    STEP_HOOK
    + """
def before_step(step, rank):
    global bad
    last = torch.distributed.get_world_size() - 1 if torch.distributed.is_initialized() else 0
    bad = step == 7 and rank == last

forward = gpt.GPT.forward
def faulty_forward(self, token_ids, targets=None):
    output = forward(self, token_ids, targets)
    if not (self.training and bad):
        return output
    if os.environ["FAULT"] == "loss":
        return output._replace(loss=output.loss * math.nan)
    weight = self.final_norm.weight
    return output._replace(loss=output.loss + InfiniteGradient.apply(weight))
gpt.GPT.forward = faulty_forward

class InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, weight):
        context.save_for_backward(weight)
        return weight.new_zeros(())
    @staticmethod
    def backward(context, gradient):
        return torch.full_like(context.saved_tensors[0], math.inf)
"""
)


@pytest.mark.parametrize(
    "script, fault",
    [
        pytest.param(script, fault, marks=() if case in ((SINGLE, "gradient"), (SPAWN, "loss")) else pytest.mark.slow)
        for script in SCRIPTS
        for fault in ("loss", "gradient")
        for case in [(script, fault)]
    ],
)
def test_a_number_that_is_not_finite_stops_all_ranks_names_its_step_and_is_never_saved(script, fault, corpus, tmp_path):
    copy, out = hooked(tmp_path / "code", BAD_NUMBERS), tmp_path / "out"
    flags = ("--data", corpus, *FLAGS, "--max-steps", 40, "--log-every", 10, "--eval-every", 3)
    n = processes(script)
    launch = Launch(tmp_path / "log", script, *flags, "--out", out, n=n, folder=copy, FAULT=fault)
    assert launch.finish() not in (0, 143, 130), launch.text
    assert len(re.findall(r"^error: .*not finite.*\bstep 7\b", launch.text, re.M)) == 1, launch.text
    assert "Error" not in launch.text.replace("ChildFailedError", ""), launch.text
    checkpoint = gpt.load_checkpoint(out / "checkpoint.pt")
    assert checkpoint["step"] == 6
    assert all(tensor.isfinite().all() for tensor in checkpoint["model"].values())
    moments = [value for state in checkpoint["optimizer"]["state"].values() for value in state.values()]
    assert moments and all(value.isfinite().all() for value in moments)
    assert [row["step"] for row in read_metrics(out)] == [3, 6]


# The scaler of a GPU run, on a CPU: scaled gradients of float16 overflow at first, since the scale starts too high.
FLOAT16 = """
flags_of = gpt.resolve_flags
def resolve_flags(args, **rest):
    flags_of(args, **rest)
    args.dtype = "float16"
    return args
gpt.resolve_flags = resolve_flags

scaler_class = torch.amp.GradScaler
def grad_scaler(device, enabled):
    return scaler_class(device, init_scale=2.0**40, enabled=enabled)
torch.amp.GradScaler = grad_scaler
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", [SINGLE, SPAWN])
def test_an_overflow_of_float16_is_the_business_of_the_scaler_and_no_error(script, corpus, tmp_path):
    copy, out = hooked(tmp_path / "code", FLOAT16), tmp_path / "out"
    flags = ("--data", corpus, *FLAGS, "--max-steps", 30, "--log-every", 1, "--eval-every", 10)
    launch = Launch(tmp_path / "log", script, *flags, "--out", out, n=processes(script), folder=copy)
    assert launch.finish() == 0, launch.text
    norms = re.findall(r"norm (\S+)", launch.text)
    assert {"inf", "nan"} & set(norms), "no step overflowed, so nothing is shown"
    checkpoint = gpt.load_checkpoint(out / "checkpoint.pt")
    assert 0 < checkpoint["scaler"]["scale"] < 2.0**40
    assert all(tensor.isfinite().all() for tensor in checkpoint["model"].values())
    updates = [state["step"].item() for state in checkpoint["optimizer"]["state"].values()]
    skipped = sum(norm in ("inf", "nan") for norm in norms)
    assert set(updates) == {30 - skipped}


# ----------------------------------------------------------------------------------------------------------------------
# Where a run writes


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("kind, reason", [("a file", "File exists"), ("under a file", "Not a directory")])
def test_an_out_that_is_no_folder_is_refused_with_its_path_and_the_reason(kind, reason, script, corpus, tmp_path):
    file = tmp_path / "out"
    file.write_text("kept")
    out = file if kind == "a file" else file / "run"
    said = refusal(script, "--data", corpus, *FLAGS, "--out", out)
    assert str(out) in said and reason in said
    assert file.read_text() == "kept"


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "options, reason", [("ro", "Read-only file system"), ("nr_inodes=2", "No space left on device")]
)
def test_an_out_that_cannot_be_written_is_refused_with_its_path_and_the_reason(
    options, reason, script, corpus, tmp_path
):
    with small_disk(tmp_path / "disk") as disk:
        (disk / "file").touch()  # with the root itself two inodes
        subprocess.run(["mount", "-o", f"remount,{options}", disk], check=True)
        said = refusal(script, "--data", corpus, *FLAGS, "--out", disk / "out")
    assert str(disk / "out") in said and reason in said


def full_disk_run(script, corpus, folder, out, before=()):
    flags = ("--data", corpus, *FLAGS, "--max-steps", 40, "--log-every", 10, "--eval-every", 3)
    before_it = contents(out)
    launch = Launch(
        folder / "log", script, *flags, "--out", out, "--resume", n=processes(script), before=before, TMPDIR=folder
    )
    assert launch.finish() not in (0, 143, 130), launch.text
    assert contents(out) == before_it
    assert gpt.load_checkpoint(out / "checkpoint.pt")["step"] == 3
    return launch.text


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory, corpus):
    """The folder of a run that has saved at step 3."""
    folder = tmp_path_factory.mktemp("three")
    launch = Launch(folder / "log", SINGLE, "--data", corpus, *FLAGS, "--max-steps", 3, "--out", folder / "out")
    assert launch.finish() == 0, launch.text
    return folder / "out"


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_save_past_the_file_size_limit_ends_all_ranks_and_keeps_the_earlier_checkpoint(
    script, three_steps, corpus, tmp_path
):
    out = Path(shutil.copytree(three_steps, tmp_path / "out"))
    limited = ("bash", "-c", 'ulimit -f 2000; exec "$@"', "bash")  # in KiB; a checkpoint has 10 MB
    said = full_disk_run(script, corpus, tmp_path, out, limited)
    assert len(re.findall(rf"^error: .*{out}.*File too large", said, re.M)) == 1, said


@pytest.mark.slow
def test_a_save_on_a_full_disk_ends_all_ranks_and_keeps_the_earlier_checkpoint(three_steps, corpus, tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        out = Path(shutil.copytree(three_steps, disk / "out"))
        said = full_disk_run(SPAWN, corpus, tmp_path, out)
    assert len(re.findall(rf"^error: .*{out}.*No space left on device", said, re.M)) == 1, said


# ----------------------------------------------------------------------------------------------------------------------
# Peers and corpora


@pytest.mark.slow
@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_a_peer_that_never_joins_ends_the_run_with_what_was_waited_for_and_the_time_out(script, corpus, tmp_path):
    copy = hooked(tmp_path / "code", ABSENT_PEER)
    launch = Launch(tmp_path / "log", script, "--data", corpus, *FLAGS, n=2, folder=copy, TIMEOUT_SECONDS=3)
    launch.wait_for("^waiting in setup")
    began = time.monotonic()
    assert launch.finish(60) not in (0, 143, 130)
    assert time.monotonic() - began < 45
    assert re.search(r"(?i)wait", launch.text.split("waiting in setup")[1]), launch.text
    assert re.search(r"(?i)time[d ]*out.*\b[34](000)? ?(s|ms|milli)|\b3000ms", launch.text), launch.text


@pytest.mark.slow
def test_a_port_in_use_ends_the_run_at_once_with_the_port_and_the_reason(corpus, tmp_path):
    """For the spawn script: under torchrun the port is torchrun's to serve, before any process of ours exists."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        launch = Launch(tmp_path / "log", SPAWN, "--data", corpus, *FLAGS, n=2, MASTER_PORT=port)
        status = launch.finish(90)
    assert status not in (0, 143, 130)
    assert re.search(rf"(?i){port}.*(EADDRINUSE|address already in use)", launch.text), launch.text


# The last rank reads another text.
ANOTHER_CORPUS = """
prepared = prepare
def prepare(args, *rest):
    if torch.distributed.is_initialized() and torch.distributed.get_rank() + 1 == torch.distributed.get_world_size():
        args.data += ".other.txt"
    return prepared(args, *rest)
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_a_corpus_that_differs_between_ranks_stops_them_and_names_the_rank(script, tmp_path):
    text = small_text(tmp_path / "corpus.txt")
    (tmp_path / "corpus.txt.other.txt").write_text(text.read_text().replace("the", "The", 1))
    copy = hooked(tmp_path / "code", ANOTHER_CORPUS)
    launch = Launch(tmp_path / "log", script, "--data", text, *FLAGS, n=2, folder=copy)
    assert launch.finish() not in (0, 143, 130)
    assert len(re.findall(r"^error: the corpus of rank 1 ", launch.text, re.M)) == 1, launch.text
    assert "Error" not in launch.text.replace("ChildFailedError", ""), launch.text


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_a_world_size_that_does_not_divide_the_global_batch_is_refused_with_values_that_do(script, corpus):
    nproc = ("--nproc", 2) if script == SPAWN else ()
    said = refusal(script, "--data", corpus, "--context-length", 16, "--global-batch-size", 15, *nproc)
    assert {"15", "2", "14", "16"} <= set(re.findall(r"\d+", said)), said


@pytest.mark.parametrize("script", SCRIPTS)
def test_fewer_windows_than_a_global_batch_are_refused_with_both_numbers(script, tmp_path):
    text = small_text(tmp_path / "corpus.txt", 1000)
    n_windows = len(data.open_corpus(str(text), "bytes", 16).train_set)
    said = refusal(script, "--data", text, "--context-length", 16, "--global-batch-size", 120)
    assert {str(n_windows), "120"} <= set(re.findall(r"\d+", said)), said


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_what_is_refused_before_the_group_exists_is_said_once_and_soon(script, three_steps, corpus, tmp_path):
    began = time.monotonic()
    launch = Launch(tmp_path / "log", script, "--data", corpus, *FLAGS, "--out", three_steps, n=processes(script))
    status = launch.finish()
    assert status == (1 if script == TORCHRUN else 2)
    assert len(re.findall(r"^error: .*checkpoint.pt exists", launch.text, re.M)) == 1, launch.text
    assert time.monotonic() - began < 60


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_text_that_changes_while_the_job_runs_breaks_nothing(script, tmp_path):
    """Even where another run tokenizes the new text meanwhile: the open token file stays what it was."""
    text = small_text(tmp_path / "corpus.txt")
    unchanged = Path(shutil.copy(text, tmp_path / "unchanged.txt"))
    copy = hooked(tmp_path / "code", STEP_HOOK + "def before_step(step, rank): time.sleep(0.05)")
    flags = (*FLAGS, "--max-steps", 60, "--log-every", 1, "--eval-every", 30)
    launch, other = (
        Launch(path.with_suffix(".log"), script, "--data", path, *flags, "--out", out, n=processes(script), folder=copy)
        for path, out in ((text, tmp_path / "out"), (unchanged, tmp_path / "expected"))
    )
    launch.wait_for(r"step 2/")
    text.write_text("Nothing of this was there before. " * 100)
    assert len(data.load_tokens(str(text), data.get_tokenizer("bytes"))) == 3401
    assert "step 50/" not in launch.text, "the text changed too late"
    for started in (launch, other):
        assert started.finish() == 0, started.text
    rows, expected = read_metrics(tmp_path / "out"), read_metrics(tmp_path / "expected")
    assert [(row["train_loss"], row["val_loss"]) for row in rows] == [
        (row["train_loss"], row["val_loss"]) for row in expected
    ]
