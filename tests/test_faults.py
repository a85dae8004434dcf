"""Signals, restarts, numbers gone bad, full disks and peers that fail: a run ends in a bounded time, and says why."""

import math
import os
import random
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import SCRIPTS, SINGLE, SPAWN, STEP_HOOK, TORCHRUN, Launch, hooked, read_metrics, small_disk, small_text

import data

FLAGS = ("--context-length", 16, "--global-batch-size", 12)
ENDLESS = (*FLAGS, "--max-steps", 10**6, "--log-every", 5, "--eval-every", 10**6)
SIGINT, SIGTERM, SIGHUP, SIGKILL = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def bash(line):
    """Words that start a command by way of this line of a shell, in which "$@" stands for it."""
    return "bash", "-c", line, "bash"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_text(tmp_path_factory.mktemp("corpus") / "corpus.txt")


@pytest.fixture
def launch(tmp_path, corpus):
    """Starts a script in as many processes as it has here; what a test leaves running ends with it."""
    started = []

    def start(script, *flags, log="log", **options):
        n = 1 if script == SINGLE else 2
        started.append(Launch(tmp_path / log, script, "--data", corpus, *flags, n=n, **options))
        return started[-1]

    yield start
    for run in started:
        run.kill()


def assert_says_no_more(text):
    """No traceback or error but those of torchrun, which shows one of its own for whatever ends it."""
    own = r"(?s)^Traceback .*?^torch\.distributed\.elastic\S+(Error|Exception): [^\n]*\n"
    assert not re.search(r"Traceback|Error\b|Exception", re.sub(own, "", text, flags=re.MULTILINE)), text


def assert_stopped(run, status, script, signum, out):
    """It stopped at a log step, saved that step once, and said how to go on."""
    said = re.findall(r"^stopped by (SIG\w+) after step (\d+): saved in (.*); --resume goes on$", run.text, re.M)
    assert len(said) == 1, run.text
    name, step, folder = said[0]
    assert (name, folder) == (signal.Signals(signum).name, str(out)) and int(step) % 5 == 0
    assert status == (1 if script == TORCHRUN else 128 + signum), run.text
    assert run.text.count(f"{name}: the run stops after step ") <= 1
    assert data.load_checkpoint(out / "checkpoint.pt")["step"] == int(step)
    assert [row["step"] for row in read_metrics(out)] == list(range(5, int(step) + 1, 5))
    assert sorted(os.listdir(out)) == ["checkpoint.pt", "metrics.csv"]
    assert_says_no_more(run.text)


@pytest.mark.parametrize(
    "script, whom, signum",
    [
        (SINGLE, "launcher", SIGHUP),
        (SPAWN, "group", SIGINT),
        *(slow(SINGLE, *rest) for rest in (("launcher", SIGTERM), ("group", SIGINT))),
        *(slow(SPAWN, *rest) for rest in (("launcher", SIGTERM), ("group", SIGHUP), (0, SIGINT), (1, SIGTERM))),
        *(slow(TORCHRUN, *rest) for rest in (("launcher", SIGHUP), ("group", SIGINT), (0, SIGINT), (1, SIGTERM))),
    ],
)
def test_a_signal_stops_all_ranks_at_the_next_log_step_and_saves_once(script, whom, signum, launch, tmp_path):
    run = launch(script, *ENDLESS, "--out", tmp_path / "out")
    run.wait_for(r"step 10/")
    if whom == "group":  # what a terminal does; torchrun's workers are in sessions of their own
        os.killpg(run.process.pid, signum)
    else:
        os.kill(run.process.pid if whom == "launcher" else run.ranks()[whom], signum)
    assert_stopped(run, run.finish(60), script, signum, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_in_the_background_survives_its_terminal_and_leaves_no_orphan_at_sigterm(script, launch, tmp_path):
    """A shell's background job ignores SIGINT, and one under nohup ignores SIGHUP too."""
    shell = bash('nohup "$@" & echo $! > $PID_FILE; trap "" HUP; wait $!')
    listens = {"--standalone": ["--standalone", "--signals-to-handle=SIGTERM,SIGINT"]}  # else to SIGHUP all the same
    run = launch(script, *ENDLESS, "--out", tmp_path / "out", before=shell, replace=listens, PID_FILE=tmp_path / "pid")
    run.wait_for(r"step 10/")
    for pid in run.family():
        os.kill(pid, SIGHUP)
    step = int(re.findall(r"step (\d+)/", run.text)[-1])
    run.wait_for(rf"step {step + 20}/")
    os.kill(int((tmp_path / "pid").read_text()), SIGTERM)
    assert_stopped(run, run.finish(60), script, SIGTERM, tmp_path / "out")


# Starts a command in a terminal of its own, where SIGUSR1 presses Ctrl-C, and shows what it prints.
TERMINAL = """
import os, pty, signal, sys
pid, terminal = pty.fork()
if pid == 0:
    os.execvp(sys.argv[1], sys.argv[1:])
signal.signal(signal.SIGUSR1, lambda *_: os.write(terminal, bytes([3])))
try:
    while text := os.read(terminal, 10**4):
        os.write(1, text)
except OSError:  # all that used it have ended
    os.waitpid(pid, 0)
"""


@pytest.mark.parametrize("script", [SINGLE, slow(SPAWN)])
def test_ctrl_c_in_a_terminal_saves_also_where_it_ends_the_reader_of_the_output_first(script, launch, tmp_path):
    out, status, pipe = tmp_path / "out", tmp_path / "status", '{ "$@"; echo $? > $STATUS; } 2>&1 | tee $STATUS.log'
    terminal = (sys.executable, "-c", TERMINAL, *bash(pipe))
    run = launch(script, *ENDLESS, "--out", out, before=terminal, STATUS=status)
    run.wait_for("step 10/")
    os.kill(run.process.pid, signal.SIGUSR1)
    run.finish(60)
    assert status.read_text() == "130\n", run.text
    assert data.load_checkpoint(out / "checkpoint.pt")["step"] == read_metrics(out)[-1]["step"] >= 10
    assert_says_no_more(run.text)


@pytest.mark.slow
@pytest.mark.parametrize("script", [SINGLE, SPAWN])
def test_ctrl_c_says_when_the_run_stops_and_a_second_one_ends_it_at_once(script, launch):
    run = launch(script, *FLAGS, "--max-steps", 10**7, "--log-every", 10**6, "--eval-every", 10**6)
    run.wait_for("Epoch 1 completed")  # all are at work
    os.killpg(run.process.pid, SIGINT)
    run.wait_for(r"^SIGINT: the run stops after step 1000000 at the latest$")
    time.sleep(1.5)  # whoever presses it twice within a second means one
    os.killpg(run.process.pid, SIGINT)
    assert run.finish(20) == 130
    assert len(re.findall("SIGINT: the run stops", run.text)) == 1 and "stopped by" not in run.text
    assert_says_no_more(run.text)


def assert_ended_early(run, status, signum, script):
    """A quiet end: no traceback but the one of torchrun about its own signal."""
    assert status == 1 if script == TORCHRUN else status in (128 + signum, -signum), (status, run.text)
    assert "step 1" not in run.text
    assert run.text.count("Traceback") <= (script == TORCHRUN), run.text


def imports_torch(pid):
    with suppress(OSError):
        return "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("signum", [SIGINT, SIGTERM])
@pytest.mark.parametrize(
    "script, where", [(SINGLE, "its own"), (SPAWN, "its own"), (SPAWN, "ranks"), (TORCHRUN, "ranks")]
)
def test_a_signal_during_the_imports_ends_every_process_quietly(script, where, signum, launch):
    run = launch(script, *FLAGS)
    if where == "ranks":
        run.wait_for(lambda run: len(run.ranks()) == 2 and all(map(imports_torch, run.ranks())))
    run.wait_for(lambda run: imports_torch(run.process.pid))
    os.killpg(run.process.pid, signum)
    assert_ended_early(run, run.finish(40), signum, script)


# A process is held while it tokenizes; the other one of torchrun waits for the lock.
HELD_TOKENIZER = """
import time
texts = data._texts
def held_texts(path):
    yield from texts(path)
    print("tokenizing", flush=True)
    while True:
        time.sleep(0.1)
data._texts = held_texts

flock = data.fcntl.flock
def told_flock(*args):
    print("locking", flush=True)
    flock(*args)
data.fcntl.flock = told_flock
"""


@pytest.mark.parametrize(
    "script, signum",
    [(SINGLE, SIGTERM), slow(SINGLE, SIGINT), slow(SPAWN, SIGINT), slow(SPAWN, SIGTERM), slow(TORCHRUN, SIGINT)],
)
def test_a_signal_during_tokenizing_ends_every_process_and_leaves_no_litter(script, signum, launch, tmp_path):
    text, copy = small_text(tmp_path / "corpus.txt"), hooked(tmp_path / "code", HELD_TOKENIZER)
    run = launch(script, "--data", text, *FLAGS, folder=copy)
    run.wait_for("^tokenizing")
    assert len(list(tmp_path.glob("corpus.txt.*"))) == 1, "nothing is being written, so nothing is shown"
    run.wait_for("(?s)" + "^locking$.*" * (2 if script == TORCHRUN else 1))
    os.killpg(run.process.pid, signum)
    assert_ended_early(run, run.finish(40), signum, script)
    assert list(tmp_path.glob("corpus.txt.*")) == []


# Rank 1 never comes; TIMEOUT_SECONDS is the time-out of all that waits for it.
ABSENT_PEER = """
import time
whole_timedelta = timedelta
def timedelta(**_):
    return whole_timedelta(seconds=float(os.environ["TIMEOUT_SECONDS"]))

joined_setup = setup
def setup(rank, *rest):
    if rank == 1:
        time.sleep(1000)
    joined_setup(rank, *rest)
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", [SPAWN, TORCHRUN])
@pytest.mark.parametrize("whom, signum", [("group", SIGTERM), ("group", SIGINT), (0, SIGINT)])
def test_a_signal_while_a_rank_waits_in_setup_ends_every_process(script, whom, signum, launch, tmp_path):
    run = launch(script, *FLAGS, folder=hooked(tmp_path / "code", ABSENT_PEER), TIMEOUT_SECONDS=600)
    run.wait_for(r"^gloo waits for 2 \w+ at \S+:\d+$")
    if whom == "group":
        os.killpg(run.process.pid, signum)
    else:
        os.kill(run.ranks()[whom], signum)
    status = run.finish(60)
    assert status != 0
    if whom == "group":
        assert_ended_early(run, status, signum, script)


@pytest.mark.slow
def test_a_signal_between_the_launcher_s_handler_and_its_first_process_is_not_lost(launch, tmp_path):
    early = "real_spawn = spawn\ndef spawn(*_, **__): os.kill(os.getpid(), signal.SIGTERM), real_spawn(*_, **__)"
    assert launch(SPAWN, *ENDLESS, folder=hooked(tmp_path / "code", early)).finish(60) == 143


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["steps", "imports"])
def test_no_process_outlives_a_spawn_launcher_killed_with_9_and_the_run_goes_on(moment, launch, tmp_path):
    flags = (*FLAGS, "--log-every", 1, "--eval-every", 2, "--out", tmp_path / "out", "--resume", "--max-steps")
    run = launch(SPAWN, *flags, 10**6)
    if moment == "steps":
        run.wait_for(r"step 4/")
    else:
        run.wait_for(lambda run: len(run.ranks()) == 2 and all(map(imports_torch, run.ranks())))
    run.process.kill()
    assert run.process.wait() == -SIGKILL
    limit = time.monotonic() + 40
    while family := run.family():
        assert time.monotonic() < limit, f"{family}\n{run.text}"
        time.sleep(0.05)
    path = tmp_path / "out" / "checkpoint.pt"
    saved = data.load_checkpoint(path)["step"] if moment == "steps" else 0
    again = launch(SPAWN, *flags, saved + 2, log="again")
    assert again.finish() == 0, again.text
    assert f"resumed after step {saved}\n" in again.text or moment == "imports"
    assert data.load_checkpoint(path)["step"] == saved + 2


EXACT = ("--dtype", "float64", "--max-steps", 60, "--log-every", 1, "--eval-every", 2)


@pytest.mark.parametrize("survive", [1, slow(20)])
def test_torchrun_goes_on_by_itself_after_each_kill_9_of_a_worker(survive, launch, tmp_path):
    """At least three steps in each attempt, so that it saves once (the second is surely saved when the third shows)."""
    moments, survived = random.Random(survive), 0
    undisturbed = launch(SINGLE, *FLAGS, *EXACT, "--out", tmp_path / "undisturbed", log="undisturbed.log")
    while survived < survive:
        out, kills = tmp_path / f"out{survived}", min(3, survive - survived)
        restarting = {"--standalone": ["--standalone", "--max-restarts=3"]}
        run = launch(TORCHRUN, *FLAGS, *EXACT, "--out", out, "--resume", log=f"log{survived}", replace=restarting)
        for number in range(kills):
            run.wait_for(rf"(?s)(^preset.*){{{number + 1}}}" + "^epoch .*" * moments.randint(3, 6))
            time.sleep(moments.uniform(0, 0.15))
            os.kill(run.ranks()[moments.randrange(2)], SIGKILL)
        assert run.finish(180) == 0, run.text
        resumed = [int(step) for step in re.findall(r"resumed after step (\d+)", run.text)]
        assert len(resumed) == kills and resumed[0] > 0 and resumed == sorted(set(resumed)), run.text
        assert sorted(os.listdir(out)) == ["checkpoint.pt", "metrics.csv"]
        assert undisturbed.finish() == 0, undisturbed.text
        rows, expected = read_metrics(out), read_metrics(tmp_path / "undisturbed")
        for name in ("step", "train_loss", "val_loss"):  # None where there was no evaluation
            assert [row[name] or 0 for row in rows] == pytest.approx([row[name] or 0 for row in expected], 0, 1e-9)
        survived += kills


# At step 7 on the last rank, FAULT: the loss becomes nan, or a gradient infinite while the loss stays finite.
BAD_NUMBERS = """
def before_step(step, rank):
    global bad
    last = torch.distributed.get_world_size() - 1 if torch.distributed.is_initialized() else 0
    bad = step == 7 and rank == last

forward = gpt.GPT.forward
def faulty_forward(self, token_ids, targets=None):
    output = forward(self, token_ids, targets)
    if self.training and bad and os.environ["FAULT"] == "gradient":
        self.final_norm.weight.register_hook(lambda gradient: gradient * float("inf"))
    elif self.training and bad:
        output = output._replace(loss=output.loss * float("nan"))
    return output
gpt.GPT.forward = faulty_forward
"""


@pytest.mark.parametrize(
    "script, fault", [(SPAWN, "loss"), slow(SINGLE, "gradient"), slow(SPAWN, "gradient"), slow(TORCHRUN, "loss")]
)
def test_a_number_that_is_not_finite_stops_all_ranks_names_its_step_and_is_never_saved(script, fault, launch, tmp_path):
    flags = (*FLAGS, "--max-steps", 40, "--log-every", 10, "--eval-every", 3, "--out", tmp_path / "out")
    run = launch(script, *flags, folder=hooked(tmp_path / "code", STEP_HOOK + BAD_NUMBERS), FAULT=fault)
    assert run.finish() == 1, run.text
    assert len(re.findall(r"^error: .*not finite at step 7: ", run.text, re.M)) == 1, run.text
    assert_says_no_more(run.text)
    checkpoint = data.load_checkpoint(tmp_path / "out" / "checkpoint.pt")
    moments = [value for state in checkpoint["optimizer"]["state"].values() for value in state.values()]
    assert checkpoint["step"] == 6 and moments
    assert all(tensor.isfinite().all() for tensor in [*checkpoint["model"].values(), *moments])
    assert [row["step"] for row in read_metrics(tmp_path / "out")] == [3, 6]


# The scaler of a GPU run, on a CPU: scaled gradients of float16 overflow at first, since the scale starts too high.
FLOAT16 = """
formats = gpt.number_formats
def number_formats(args):
    autocast = torch.autocast(args.device, torch.float16)
    return formats(args)[0], autocast, torch.amp.GradScaler(args.device, init_scale=2.0**40)
gpt.number_formats = number_formats
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_an_overflow_of_float16_is_the_business_of_the_scaler_and_no_error(script, launch, tmp_path):
    flags = (*FLAGS, "--max-steps", 30, "--log-every", 1, "--eval-every", 10, "--out", tmp_path / "out")
    run = launch(script, *flags, folder=hooked(tmp_path / "code", FLOAT16))
    assert run.finish() == 0, run.text
    norms = list(map(float, re.findall(r"norm (\S+)", run.text)))
    skipped = sum(not math.isfinite(norm) for norm in norms)
    assert skipped, "no step overflowed, so nothing is shown"
    assert max(filter(math.isfinite, norms)) < 100  # clipping sees the true gradient, not the scaled one
    checkpoint = data.load_checkpoint(tmp_path / "out" / "checkpoint.pt")
    assert 0 < checkpoint["scaler"]["scale"] < 2.0**40
    assert all(tensor.isfinite().all() for tensor in checkpoint["model"].values())
    assert {state["step"].item() for state in checkpoint["optimizer"]["state"].values()} == {30 - skipped}


@pytest.mark.slow
@pytest.mark.parametrize("script, where", [(SPAWN, "disk"), (SINGLE, "limit"), (TORCHRUN, "limit")])
def test_a_save_that_fails_ends_all_ranks_and_keeps_the_earlier_checkpoint(script, where, launch, tmp_path):
    """The second save does not fit: with a checkpoint of 10 MB, no disk of 16 MB has room for the two."""
    flags = (*FLAGS, "--max-steps", 40, "--log-every", 1, "--eval-every", 3)
    with small_disk(tmp_path / "disk") as disk:
        out, before = disk / "out", ()
        if where == "limit":
            assert launch(SINGLE, *FLAGS, "--max-steps", 3, "--out", out).finish() == 0
            before = bash('ulimit -f 2000; exec "$@"')  # in KiB
        run = launch(script, *flags, "--out", out, "--resume", log="failed", before=before)
        assert run.finish() == 1, run.text
        assert sorted(os.listdir(out)) == ["checkpoint.pt", "metrics.csv"]
        assert [row["step"] for row in read_metrics(out)] == [1, 2, 3] if where == "disk" else [3]
        assert data.load_checkpoint(out / "checkpoint.pt")["step"] == 3
    reason = {"disk": "No space left on device", "limit": "File too large"}[where]
    assert len(re.findall(rf"^error: cannot write {out}/.*{reason}.*--resume", run.text, re.M)) == 1, run.text
    assert "step 6/" in run.text and "step 7/" not in run.text
    assert_says_no_more(run.text)


@pytest.mark.parametrize("how", ["| head -n 3", slow("> /dev/full"), slow(">&-")])
@pytest.mark.parametrize("script", [SINGLE, slow(SPAWN), slow(TORCHRUN)])
def test_a_run_whose_output_nobody_takes_goes_on_to_its_end_and_saves(script, how, launch, tmp_path):
    flags = (*FLAGS, "--max-steps", 30, "--log-every", 1, "--out", tmp_path / "out")
    run = launch(script, *flags, before=bash(f'set -o pipefail; "$@" {how}'))
    assert run.finish() == 0, run.text
    assert len(read_metrics(tmp_path / "out")) == data.load_checkpoint(tmp_path / "out" / "checkpoint.pt")["step"] == 30
    assert len(run.text.splitlines()) == (3 if "head" in how else 0), run.text


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_sample_is_printed_also_where_the_output_has_no_sign_for_its_characters(script, launch):
    run = launch(script, *FLAGS, "--max-steps", 1, PYTHONIOENCODING="cp1252")
    assert run.finish() == 0, run.text
    assert re.search(r"(?s)\nsample: The .*\?.*\nnothing was written: --out DIR keeps a checkpoint\n", run.text)
    assert_says_no_more(run.text)


def test_ids_that_a_run_reads_stay_what_they_were_when_the_text_changes(tmp_path):
    text, tokenizer = small_text(tmp_path / "corpus.txt"), data.get_tokenizer("bytes")
    tokens = data.load_tokens(text, tokenizer)
    before = tokens.tolist()
    text.write_text("Nothing of this was there before. " * 100)
    assert len(data.load_tokens(text, tokenizer)) == 3401  # as another run would
    assert tokens.tolist() == before


@pytest.mark.slow
@pytest.mark.parametrize("script, reason", [(SPAWN, "[34] s"), (TORCHRUN, "[34] s|3000 ?ms"), (SPAWN, "EADDRINUSE")])
def test_processes_that_cannot_meet_end_with_one_line_that_says_where_and_why(script, reason, launch, tmp_path):
    """The port is tried with the spawn script: under torchrun it is torchrun's to serve, before ours start."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1] if reason == "EADDRINUSE" else 0
        own = {"MASTER_PORT": port} if port else {"folder": hooked(tmp_path / "code", ABSENT_PEER)}
        run = launch(script, *FLAGS, TIMEOUT_SECONDS=3, **own)
        assert run.finish(90) == 1, run.text
    said = re.findall(r"^error: not all 2 \w+ came to \S+:(\d+), (.*)$", run.text, re.M)
    assert len(said) == 1 and re.search(rf"\b({reason})", said[0][1]), run.text
    assert int(said[0][0]) == port or not port
    assert_says_no_more(run.text)
