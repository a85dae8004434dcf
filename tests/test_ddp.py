"""The two DDP scripts beside the single one: the same losses, the same text but for DDP, and an end in every case.

The scripts run here as a user runs them. Where a test must look inside, or break something, it runs a changed copy.
"""

import ast
import difflib
import functools
import importlib
import io
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    SCRIPTS,
    SINGLE,
    SPAWN,
    STEP_HOOK,
    TORCHRUN,
    command,
    finish,
    free_port,
    hooked,
    patched_copy,
    popen,
    read_metrics,
    refusal,
    start,
)
from torch.multiprocessing import ProcessExitedException

import data
import gpt

DDP_SCRIPTS = (SPAWN, TORCHRUN)
slow = functools.partial(pytest.param, marks=pytest.mark.slow)

# What the scripts reached, as counted by
#     wc -l A; awk '/^def train/,/^    sys.exit/' A | wc -l; grep -c '# DDP [123]' A
#     diff <(grep -vE '^\s*(#|$)' A) <(grep -vE '^\s*(#|$)' B) | grep -c '^[<>]'
MAX_LINES = {SINGLE: 98, SPAWN: 188, TORCHRUN: 168}
MAX_TRAIN_LINES = {SINGLE: 51, SPAWN: 72, TORCHRUN: 69}
MAX_LINES_MARKED_1_TO_3 = {SPAWN: 22, TORCHRUN: 20}
MAX_CHANGED_LINES = {(SINGLE, SPAWN): 114, (SINGLE, TORCHRUN): 96, (SPAWN, TORCHRUN): 60}


# ----------------------------------------------------------------------------------------------------------------------
# The lesson as text


def source(script):
    return Path(ROOT, script).read_text()


def functions(script):
    """The top-level functions of a script in their order: name to lines, with the comments at their ends."""
    lines, nodes = source(script).splitlines(), ast.parse(source(script)).body
    return {node.name: lines[node.lineno - 1 : node.end_lineno] for node in nodes if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_every_change_to_the_loop_and_the_evaluation_is_marked(script):
    single, ddp = functions(SINGLE), functions(script)
    assert [name for name in ddp if name in single] == list(single), "all are there, in the same order"
    for name in ("train", "evaluate"):
        changes = "\n".join(difflib.unified_diff(single[name], ddp[name], n=1, lineterm=""))
        for change in re.split(r"^@@.*", changes, flags=re.MULTILINE)[1:]:
            assert "# DDP" in change, change


def test_what_no_launcher_changes_is_the_same_text_in_both_ddp_scripts():
    spawn, torchrun = functions(SPAWN), functions(TORCHRUN)
    assert [name for name in spawn if name != "pass_on"] == list(torchrun)
    assert all(spawn[name] == torchrun[name] for name in ("cleanup", "all_gather", "evaluate"))
    loops = ["\n".join(script["train"]).split("all_gather(run.must_agree)", 1)[1] for script in (spawn, torchrun)]
    assert loops[0] == loops[1]


def test_the_baseline_has_no_word_of_ddp():
    assert not re.search("rank|world|dist", source(SINGLE).lower())


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_all_marks_are_there_with_their_reasons_and_the_guide_s_three_components_fit_on_a_screen(script):
    marks = re.findall(r"# DDP (\d+)(.*)$", source(script), re.MULTILINE)
    reasoned = {number for number, reason in marks if re.match(r": \S+ \S+", reason)}
    assert {number for number, _ in marks} == reasoned == set("12345678")
    lines = re.findall(r"^.*# DDP [123].*$", source(script), re.MULTILINE)
    assert len(lines) <= MAX_LINES_MARKED_1_TO_3[script]
    for number, what in enumerate(["init_process_group", "DistributedSampler(", "DDP(model"], start=1):
        assert any(what in line and f"# DDP {number}" in line for line in lines)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_stays_short(script):
    assert len(source(script).splitlines()) <= MAX_LINES[script]
    assert len(functions(script)["train"]) <= MAX_TRAIN_LINES[script]


@pytest.mark.parametrize("old, new", MAX_CHANGED_LINES)
def test_a_diff_shows_little_but_ddp(old, new):
    code = [re.findall(r"^(?!\s*(?:#|$)).+", source(script), re.MULTILINE) for script in (old, new)]
    assert sum(line[0] in "-+" for line in difflib.ndiff(*code)) <= MAX_CHANGED_LINES[old, new]


# ----------------------------------------------------------------------------------------------------------------------
# The same command, the same losses

SMALL = ("--device", "cpu", "--tokenizer", "bytes", "--context-length", 8, "--global-batch-size", 12)
WHOLE, ACCUMULATED = ("--batch-size", 12), ("--batch-size", 3)  # 1, 2, 3 processes: 1 x 12, 6, 4; 4 x 3, 2 x 3, 2 x 2
QUICK = ("--log-every", 1, "--eval-every", 15, "--max-steps", 30)  # of 13 in an epoch
# Several runs share few cores: threads that wait must not keep one busy.
ONE_THREAD = {"OMP_NUM_THREADS": 1, "OMP_WAIT_POLICY": "PASSIVE", "MASTER_PORT": None}
MACHINES = "1 + 1"  # in place of a number of processes
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A text of 157 training and 17 validation windows of 8 tokens: 2, 3 and 12 divide neither."""
    path = tmp_path_factory.mktemp("small") / "corpus.txt"
    path.write_bytes(data.builtin_text().encode("ascii", "replace")[:1403])
    opened = data.open_corpus(path, "bytes", 8)
    assert (len(opened.train_set), len(opened.val_set)) == (157, 17)
    return path


def main_here(script, *flags, env=None, **replaced):
    """(status, stdout, stderr) of main() in this process, where `env` is all that a launcher told it."""
    env, stdout, stderr = env or {}, io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(signal, "signal", lambda *_: None)
        patch.setattr(sys, "argv", [script, "--device", "cpu", *map(str, flags)])
        module = importlib.import_module(Path(script).stem)
        for name, value in replaced.items():
            patch.setattr(module, name, value)
        for name in VARIABLES:  # set first, so that what the script sets is undone
            patch.setenv(name, str(env.get(name)))
            name in env or patch.delenv(name)
        with pytest.raises(SystemExit) as end:
            sys.exit(module.main())
    return end.value.code or 0, stdout.getvalue(), stderr.getvalue()


def start_run(folder, script, n, *flags, code=ROOT, own=((), ())):
    """Start a run that writes to `folder`; with MACHINES as on two of them, which have flags of their `own`."""
    flags, env = (*SMALL, *flags, "--out", folder / "out"), {**ONE_THREAD, "PROBES": folder}
    if n != MACHINES:
        started = [start(script, *flags, n=n, folder=code, env=env)]
    else:
        address, port, started = "127.0.0.1", free_port(), []
        for node in (0, 1):
            words = command(script, *flags, *own[node], folder=code)
            if script == SPAWN:
                words += ["--nnodes", "2", "--node-rank", str(node)]
                env |= {"MASTER_ADDR": address, "MASTER_PORT": port}
            else:
                rendezvous = f"--nnodes=2 --node_rank={node} --rdzv_backend=c10d --rdzv_endpoint={address}:{port}"
                place = words.index("--standalone")
                words[place : place + 1] = rendezvous.split()
            started.append(popen(words, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    return SimpleNamespace(folder=folder / "out", probes=folder, started=started)


def ended_run(run, timeout=600):
    run.processes = [finish(process, timeout) for process in run.started]
    return run


# With these changes each process tells a file, at each step after its first forward pass: how often gradients were
# averaged so far, the seed, the threads, and whether all gradients lie in the buckets of the step before; and at its
# end, when it has left the group, the names of its threads.
PROBED = (
    ("        if args.drop_rate:", "        if True:"),
    (
        "    groups = gpt.weight_decay_groups(",
        """    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    probes, averaged, buckets = open(f"{os.environ['PROBES']}/{rank}", "w"), [], {}

    def count(state, bucket):
        averaged.append(bucket.is_last())
        buckets.setdefault(step, set()).add(bucket.buffer().untyped_storage().data_ptr())
        return allreduce_hook(state, bucket)

    ddp_model.register_comm_hook(None, count)
    groups = gpt.weight_decay_groups(""",
    ),
    (
        "            losses.append(loss.detach())",
        """            losses.append(loss.detach())
            if len(losses) == 1:
                places = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
                seen = (sum(averaged), torch.initial_seed(), torch.get_num_threads(), places == buckets.get(step - 1))
                print(step, *map(int, seen), file=probes)""",
    ),
    (
        "    cleanup()  # DDP 1: not after",
        """    cleanup()
    names = [open(f"/proc/self/task/{id}/comm").read().strip() for id in os.listdir("/proc/self/task")]
    print(*names, file=probes, flush=True)  # not after""",
    ),
)

RUNS = {"float64": (SPAWN, 2, 2), "float64 probed": (TORCHRUN, 3, 3), "float32 probed": (SPAWN, MACHINES, 2)}  # ranks
PROBED_RUNS = ("float64 probed", "float32 probed")


@pytest.fixture(scope="module")
def ended(corpus, tmp_path_factory):
    """The runs of RUNS, all at the same time, and those of one process."""
    runs, flags = {}, ("--data", corpus, *QUICK)
    for name, (script, n, _) in RUNS.items():
        folder = tmp_path_factory.mktemp("run")
        code = patched_copy(folder / "code", script, *PROBED) if "probed" in name else ROOT
        runs[name] = start_run(folder, script, n, *flags, *ACCUMULATED, "--dtype", name[:7], code=code)
    for dtype in ("float64", "float32"):
        folder = tmp_path_factory.mktemp("single")
        result = main_here(SINGLE, *SMALL, *flags, *WHOLE, "--dtype", dtype, "--out", folder)
        runs[f"{dtype} single"] = SimpleNamespace(folder=folder, processes=[result])
    return {name: ended_run(run) if name in RUNS else run for name, run in runs.items()}


def stdout_of(run):
    """What the processes of a run printed, all of which must have succeeded."""
    for status, stdout, stderr in run.processes:
        assert status == 0, f"status {status}\n{stdout}\n{stderr}"
    return "".join(stdout for _, stdout, _ in run.processes)


def assert_same(run, reference, steps, tolerance, parameters=True):
    """Rows for each step with the same losses, and in the end the same parameters."""
    stdout_of(run), stdout_of(reference)
    rows, expected = read_metrics(run.folder), read_metrics(reference.folder)
    assert [row["step"] for row in rows] == [row["step"] for row in expected] == list(range(1, steps + 1))
    assert rows[-1]["val_loss"] is not None
    for row, other in zip(rows, expected):
        for name in ("train_loss", "val_loss"):
            assert row[name] == (other[name] and pytest.approx(other[name], rel=tolerance, abs=0)), (name, row)
    model, other = (data.load_checkpoint(Path(r.folder, "checkpoint.pt"))["model"] for r in (run, reference))
    assert list(model) == list(other), "the names of the raw module"
    for name in model if parameters else ():
        assert model[name].dtype == other[name].dtype
        assert (model[name] - other[name]).abs().max() <= tolerance * other[name].abs().max(), name


@pytest.mark.parametrize("name", RUNS)
def test_losses_and_parameters_are_those_of_one_process(name, ended):
    """In float32, and here on two machines, losses differ by rounding alone, which Adam's first steps magnify."""
    exact = "float64" in name
    assert_same(ended[name], ended[f"{name[:7]} single"], 30, 1e-9 if exact else 2e-5, parameters=exact)


@pytest.mark.slow
def test_any_processes_machines_and_accumulation_give_the_same_losses(corpus, tmp_path):
    flags = ("--data", corpus, "--log-every", 1, "--eval-every", 30, "--max-steps", 60, "--dtype", "float64")
    counts = {SINGLE: (1,), SPAWN: (1, 2, 3, MACHINES), TORCHRUN: (1, 2, 3, MACHINES)}
    cases = [
        (script, n, *flags, *batch) for batch in (WHOLE, ACCUMULATED) for script in SCRIPTS for n in counts[script]
    ]
    runs = [ended_run(start_run(tmp_path / str(number), *case)) for number, case in enumerate(cases)]
    for run in runs[1:]:
        assert_same(run, runs[0], 60, 1e-9)


# ----------------------------------------------------------------------------------------------------------------------
# What a run prints, and what its probes tell

STEP_LINE = re.compile(r"^epoch \d+  step (\d+)/\d+  loss (\S+)(?: \[(.*)\])?  norm (\S+)", re.MULTILINE)


@pytest.mark.parametrize("name", RUNS)
def test_each_rank_s_loss_stands_beside_their_mean(name, ended):
    lines, rows, n = STEP_LINE.findall(stdout_of(ended[name])), read_metrics(ended[name].folder), RUNS[name][2]
    assert len(lines) == len(rows) == 30
    for (step, loss, ranks, _), row in zip(lines, rows):
        losses = [float(loss) for loss in re.findall(r"rank \d+ (\S+?)(?:,|$)", ranks)]
        assert [int(rank) for rank in re.findall(r"rank (\d+)", ranks)] == list(range(n))
        assert len(set(losses)) == n, "each has windows of its own"
        assert sum(losses) / n == pytest.approx(float(loss), abs=2e-6)
        assert (int(step), float(loss)) == (row["step"], round(row["train_loss"], 6))


@pytest.mark.parametrize("name", RUNS)
def test_one_process_speaks_for_all_and_warns_of_nothing(name, ended):
    """OMP_NUM_THREADS is set here: where it is not, torchrun has a word of its own."""
    run = ended[name]
    assert [stderr for _, _, stderr in run.processes] == [""] * len(run.processes)
    # Only one of the machines speaks; torch 2.8 has lines of its own.
    (said,) = filter(None, (re.sub(r"^\[Gloo\] .*\n", "", out, flags=re.MULTILINE) for _, out, _ in run.processes))
    assert re.match(rf"gloo waits for {RUNS[name][2]} processes at \S+:\d+\npreset tiny: ", said)
    assert [int(step) for step, *_ in STEP_LINE.findall(said)] == list(range(1, 31))
    for once in ("waits for", "preset ", "Epoch 1 completed", "Epoch 2 completed", "step 30: validation", "sample: "):
        assert said.count(once) == 1, once
    assert sorted(path.name for path in run.folder.iterdir()) == ["checkpoint.pt", "metrics.csv"]


@pytest.fixture(scope="module")
def probes(ended):
    """Per probed run what each rank told at each step, and then the names of its threads."""
    told = {}
    for name in PROBED_RUNS:
        ranks = [path.read_text().splitlines() for path in sorted(ended[name].probes.glob("?"))]
        assert len(ranks) == RUNS[name][2]
        told[name] = [([tuple(map(int, line.split())) for line in lines[:-1]], lines[-1]) for lines in ranks]
    return told


@pytest.mark.parametrize("name", PROBED_RUNS)
def test_gradients_are_averaged_once_per_step_and_added_up_where_they_are_averaged(name, probes):
    """However many batches a step accumulates. Beside DDP's buckets they would take as much memory again."""
    for steps, _ in probes[name]:
        assert [(step, averaged) for step, averaged, *_ in steps] == [(k, k - 1) for k in range(1, 31)]
        assert all(in_buckets for *_, in_buckets in steps[2:]), "in step 2 DDP makes its buckets anew"


def test_each_rank_and_each_step_has_its_own_seed_for_dropout(probes):
    seeds = [{seed for steps, _ in probes[name] for _, _, seed, *_ in steps} for name in PROBED_RUNS]
    assert [len(of_run) for of_run in seeds] == [90, 60] and seeds[1] < seeds[0], "the same in both scripts"


def test_a_process_takes_the_threads_that_it_was_told_or_its_share_of_the_cores(probes):
    """OMP_NUM_THREADS is 1, which torchrun itself sets where nobody did."""
    for name, expected in zip(PROBED_RUNS, (max(1, len(os.sched_getaffinity(0)) // 3), 1)):
        assert {threads for steps, _ in probes[name] for *_, threads, _ in steps} == {expected}


@pytest.mark.parametrize("name", PROBED_RUNS)
def test_a_process_that_has_left_the_group_has_no_thread_of_it_any_more(name, probes):
    """Such a thread can abort the process, where it waits for the interpreter's lock and the interpreter ends."""
    for _, threads in probes[name]:
        assert threads and not re.search("gloo|tcpstore", threads), threads


# ----------------------------------------------------------------------------------------------------------------------
# Which processes train, where they meet, and how they end


def test_spawn_looks_for_a_free_port_unless_one_is_set():
    ports = []
    for env in ({}, {}, {}, {"MASTER_PORT": 12345}):
        main_here(SPAWN, env=env, spawn=lambda *_, **__: ports.append(os.environ["MASTER_PORT"]))
    assert len(set(ports)) > 2 and ports[3] == "12345"


@pytest.mark.parametrize(
    "flags", ["--nproc 0", "--nnodes 0", "--node-rank -1", "--node-rank 1", "--nnodes 2 --node-rank 2", "--nnodes 2"]
)
def test_spawn_refuses_processes_that_cannot_be(flags):
    flag, value = flags.split()[:2]
    said = refusal(SPAWN, *flags.split(), MASTER_ADDR=None if flags == "--nnodes 2" else "127.0.0.1")
    assert (
        f"{flag}: {value} is not" if int(value) < 1 else "--nnodes needs a --node-rank below it, MASTER_ADDR"
    ) in said


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_the_rank_counts_over_all_machines_and_the_local_rank_picks_the_gpu(script, monkeypatch):
    """Here for the last process of two machines with two GPUs each, all of which spawn takes by itself."""
    known, seen = {"is_available": True, "current_accelerator": torch.device("cuda"), "device_count": 2}, []
    for name in known:
        monkeypatch.setattr(torch.accelerator, name, functools.partial(known.get, name))
    monkeypatch.setattr(gpt, "pick_device", lambda args, index: seen.append((args.nproc, index)) or torch.device("cpu"))
    replaced = {"setup": lambda *places: sys.exit(seen.append(places[:2]))}
    flags, env = ["--device", "cuda", "--preset", "tiny"], dict(zip(VARIABLES, (3, 4, 1, 2, "10.0.0.1", 29500)))
    if script == SPAWN:
        flags += ["--nnodes", 2, "--node-rank", 1]
        replaced["spawn"] = lambda train, args, nprocs, join: train(nprocs - 1, *args)
        replaced["parent_process"] = lambda: SimpleNamespace(is_alive=lambda: True)
    assert main_here(script, *flags, env=env, **replaced) == (0, "", "")
    assert seen == [(2, 1), (3, 4)]


@pytest.mark.parametrize(
    "exit_code, status",
    [(1, 1), (130, 130), (-signal.SIGINT, 130), (-signal.SIGTERM, 143), (-signal.SIGHUP, 129), (-9, 137), (-11, 139)],
)
def test_spawn_ends_with_the_status_of_its_process_and_names_one_that_was_killed(exit_code, status):
    def spawn(*_, **__):
        raise ProcessExitedException("ended", 1, 4711, exit_code, name)

    name = signal.Signals(-exit_code).name if exit_code < 0 else None
    said = f"error: process 1 was ended by {name}: add --resume\n" if status in (137, 139) else ""
    assert main_here(SPAWN, spawn=spawn) == (status, "", said)


ENDS_IN = 180  # seconds, imports included; what hangs would wait ten minutes for its group
ENDLESS = ("--max-steps", 10**6, "--log-every", 1, "--eval-every", 10**6)


def broken(script, statement, folder, *flags):
    """(status, stdout, stderr) of a script in which rank 1 does this in step 3. An orphan would hold its pipes."""
    place = "        scaler.unscale_(optimizer)"
    code = patched_copy(folder / "code", script, (place, f"        if rank == 1 and step == 3: {statement}\n{place}"))
    return ended_run(start_run(folder, script, 2, *flags, code=code), ENDS_IN).processes[0]


@pytest.mark.parametrize("script", [slow(SPAWN), TORCHRUN])
def test_a_rank_that_fails_ends_the_whole_job_and_its_reason_is_shown(script, corpus, tmp_path):
    flags = ("--data", corpus, *ENDLESS)
    status, stdout, stderr = broken(script, "raise RuntimeError('broken on purpose')", tmp_path, *flags)
    assert status == 1 and "step 2/" in stdout and "step 3/" not in stdout
    said = {SPAWN: "Process 1 terminated with the following error", TORCHRUN: "Root Cause"}[script]
    assert "RuntimeError: broken on purpose" in (cause := stderr.split(said, 1)[1])
    assert script == SPAWN or "rank      : 1 " in cause


@pytest.mark.parametrize("script", [SPAWN, slow(TORCHRUN)])
def test_a_replica_that_drifted_is_found_at_the_next_evaluation_and_never_saved(script, corpus, tmp_path):
    flags = ("--data", corpus, "--max-steps", 6, "--log-every", 1, "--eval-every", 2)
    status, stdout, stderr = broken(script, "model.final_norm.bias.data[0] += 1e-6", tmp_path, *flags)
    assert status == 1 and "step 4/" in stdout and "step 5/" not in stdout
    (said,) = [line for line in stderr.splitlines() if script == SPAWN or line.startswith("error: ")]
    sums = re.fullmatch(r"error: model is (-?\d+) on rank 0 and (-?\d+) on rank 1: was each step averaged\?", said)
    assert sums and sums[1] != sums[2], said
    assert data.load_checkpoint(tmp_path / "out" / "checkpoint.pt")["step"] == 2


@pytest.mark.parametrize("script, what", [(SPAWN, "--seed"), slow(SPAWN, "corpus"), slow(TORCHRUN, "--seed")])
def test_machines_that_were_told_different_things_say_so_once_and_build_no_model(script, what, corpus, tmp_path):
    code = patched_copy(tmp_path / "code", "gpt.py", ("        self.config = config = config or", "        1 / 0 or"))
    own, values = [("--data", corpus, "--seed", 5), ("--data", corpus, "--seed", 6)], [5, 6]
    if what == "corpus":  # of the same length: only the hash tells
        (tmp_path / "other.txt").write_bytes(corpus.read_bytes().replace(b"e", b"a", 1))
        own = [("--data", path) for path in (corpus, tmp_path / "other.txt")]
        values = [data.open_corpus(path, "bytes", 8).hash for _, path in own]
    run = ended_run(start_run(tmp_path, script, MACHINES, *ENDLESS, code=code, own=own), ENDS_IN)
    statuses, stdouts, stderrs = zip(*run.processes)
    assert statuses == (1, 1) and "preset" not in "".join(stdouts) and "ZeroDivisionError" not in "".join(stderrs)
    said = [line for line in "".join(stderrs).splitlines() if script == SPAWN or line.startswith("error: ")]
    difference = f"{what} is {values[0]} on rank 0 and {values[1]} on rank 1"
    assert said == [f"error: {difference}: start all with the same flags, files and versions"]


# ----------------------------------------------------------------------------------------------------------------------
# On GPUs: the same tests verify the machine that they run on. What torch warns of there is no failure.

N_GPUS = max(1, torch.cuda.device_count())
ON_GPUS = ("--device", "cuda", "--preset", "tiny", "--log-every", 1, "--eval-every", 20)
BATCH = ("--tokenizer", "bytes", "--context-length", 8, "--global-batch-size", 6 * N_GPUS, "--batch-size", 2)
FLOAT64 = (*BATCH, "--dtype", "float64", "--max-steps", 40)
# Two processes on one GPU, which nccl does not allow and gloo does.
TWO_ON_ONE_GPU = (
    ("\nimport gpt\n", "\nimport gpt\n\ntorch.accelerator.device_count = lambda: 2\n"),
    ("dist.get_default_backend_for_device(device)", '"gloo"'),
    ('device if device.type == "cuda" else None', "None"),
    ("gpt.pick_device(args, local_rank)", "gpt.pick_device(args, 0)"),
    ("[local_rank] if on_gpu", "[0] if on_gpu"),
)
STOP_AT_13 = f"""{STEP_HOOK}
before_step = lambda step, rank: (step, rank) == (13, 0) and os.kill(os.getpid(), signal.SIGTERM)
"""
TELL_PEAK = """
finish = data.Run.finish
data.Run.finish = lambda run: (print("peak", torch.cuda.max_memory_allocated() / 2**30, flush=True), finish(run))[1]
"""


def gpu_run(script, folder, *flags, n=None, code=ROOT):
    """An ended run on all GPUs, or on one with the single script."""
    n = n or (1 if script == SINGLE else N_GPUS)
    started = [start(script, *ON_GPUS, *flags, "--out", folder, n=n, folder=code)]
    return ended_run(SimpleNamespace(folder=folder, started=started))


@pytest.fixture(scope="module")
def on_one_gpu(tmp_path_factory):
    """The single script's run by its flags, made when it is first asked for."""
    return functools.cache(lambda *flags: gpu_run(SINGLE, tmp_path_factory.mktemp("one_gpu"), *flags))


@pytest.mark.cuda
@pytest.mark.parametrize("script", DDP_SCRIPTS)
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_all_gpus_and_two_processes_on_one_give_the_losses_of_one(script, backend, corpus, on_one_gpu, tmp_path):
    here = (2, patched_copy(tmp_path / "code", script, *TWO_ON_ONE_GPU)) if backend == "gloo" else (N_GPUS, ROOT)
    flags = ("--data", corpus, *FLOAT64)
    run = gpu_run(script, tmp_path / "out", *flags, n=here[0], code=here[1])
    assert stdout_of(run).startswith(f"{backend} waits for {here[0]} processes")
    assert_same(run, on_one_gpu(*flags), 40, 1e-9)


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_the_change_for_two_processes_on_one_gpu_fits_the_scripts(script, tmp_path):
    patched_copy(tmp_path, script, *TWO_ON_ONE_GPU)


@pytest.mark.cuda
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "flags, tolerance",
    [("bfloat16", 0.02), ("float16", 0.02), ("float32 --compile", 0.02), ("float16 --compile --drop-rate 0.1", 0.1)],
)
def test_each_number_format_learns_as_float32_does(script, flags, tolerance, corpus, on_one_gpu, tmp_path):
    """Losses and gradient norm after 20 steps, within what 16 bits, or dropout, change in these."""
    dtype, *more = flags.split()
    common = ("--data", corpus, *BATCH, "--max-steps", 20, "--dtype")
    run, reference = gpu_run(script, tmp_path, *common, dtype, *more), on_one_gpu(*common, "float32")
    assert f", {dtype}{', compiled' if more else ''}, torch" in stdout_of(run)
    (first, *_, last), (*_, expected) = (read_metrics(r.folder) for r in (run, reference))
    assert last["step"] == 20 and last["train_loss"] < first["train_loss"] - 1
    for name in ("train_loss", "val_loss"):
        assert last[name] == pytest.approx(expected[name], rel=tolerance), name
    norm, expected = (float(STEP_LINE.findall(stdout_of(r))[-1][3]) for r in (run, reference))
    assert norm == pytest.approx(expected, rel=tolerance)


@pytest.mark.cuda
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_on_gpus_that_is_stopped_and_resumed_is_the_one_never_stopped(script, corpus, on_one_gpu, tmp_path):
    flags, out = ("--data", corpus, *FLOAT64), tmp_path / "out"
    stopped = gpu_run(script, out, *flags, code=hooked(tmp_path / "code", STOP_AT_13))
    ((status, stdout, stderr),) = stopped.processes
    assert status == (1 if script == TORCHRUN else 143), (stdout, stderr)
    assert "stopped by SIGTERM after step 13" in stdout and len(read_metrics(out)) == 13
    resumed = gpu_run(script, out, *flags, "--resume")
    assert "resumed after step 13" in stdout_of(resumed)
    assert_same(resumed, on_one_gpu(*flags), 40, 1e-9)


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    path = tmp_path_factory.mktemp("ids") / "ids.npy"
    np.save(path, np.random.default_rng(0).integers(0, 50257, 32 * 1024 * N_GPUS).astype(np.uint16))
    return path


@pytest.mark.cuda
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_vocabulary_whose_logits_are_made_in_parts_gives_the_same_losses(script, ids, on_one_gpu, tmp_path):
    """4,096 tokens in two parts each, against eight forward passes of 512."""
    n, shape = 64 * N_GPUS, ("--data", ids, "--tokenizer", "gpt2", "--context-length", 64)
    flags = (*shape, "--global-batch-size", n, "--max-steps", 4, "--dtype", "float64", "--batch-size")
    assert 64 * 64 * gpt.GPTConfig().vocab_size >= 2 * gpt.LOGITS_AT_ONCE
    run, whole = gpu_run(script, tmp_path / "out", *flags, 64), on_one_gpu(*flags, 8)
    assert f"{n} sequences per step = 64 per forward" in stdout_of(run) and "= 8 per forward" in stdout_of(whole)
    assert_same(run, whole, 4, 1e-9)


@pytest.mark.cuda
@pytest.mark.parametrize("script", [SINGLE, SPAWN])
def test_gpt2_fits_a_gpu_of_16_gb_at_its_default_batch(script, ids, tmp_path, capsys):
    """With two forward passes accumulated, or more."""
    flags = ("--preset", "gpt2", "--data", ids, "--global-batch-size", 16 * N_GPUS, "--max-steps", 3)
    run = gpu_run(script, tmp_path / "out", *flags, code=hooked(tmp_path / "code", TELL_PEAK))
    peaks = [float(peak) for peak in re.findall(r"^peak (\S+)$", stdout_of(run), re.MULTILINE)]
    assert " = 8 per forward" in stdout_of(run) and len(peaks) == (1 if script == SINGLE else N_GPUS)
    with capsys.disabled():
        print(f"\n{script}: gpt2 takes {max(peaks):.2f} GiB at its default batch")
    assert 2 < max(peaks) < 14
