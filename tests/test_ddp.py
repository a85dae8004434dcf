"""The two DDP scripts beside the single one: the same losses, the same text but for DDP, and an end in every case.

The scripts run here as a user runs them. Where a test must look inside, or break something, it runs a changed copy.
"""

import ast
import difflib
import importlib
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    ROOT,
    SCRIPTS,
    SINGLE,
    SPAWN,
    TORCHRUN,
    command,
    finish,
    free_port,
    patched_copy,
    read_metrics,
    start,
)

import data
import gpt

DDP_SCRIPTS = (SPAWN, TORCHRUN)

# What the scripts reached: lines of each, of its train(), and code lines that change from one to another, counted as by
# diff <(grep -vE '^\s*(#|$)' A) <(grep -vE '^\s*(#|$)' B) | grep -c '^[<>]'
MAX_LINES = {SINGLE: 194, SPAWN: 312, TORCHRUN: 292}
MAX_TRAIN_LINES = {SINGLE: 96, SPAWN: 116, TORCHRUN: 116}
MAX_CHANGED_LINES = {(SINGLE, SPAWN): 151, (SINGLE, TORCHRUN): 132, (SPAWN, TORCHRUN): 83}
MAX_LINES_MARKED_1_TO_3 = 25

# The functions that need DDP; all others are the same text in the three scripts.
DIFFER_FROM_SINGLE = {"train", "evaluate", "stop", "refuse", "parse_args", "main"}
DIFFER_BETWEEN_LAUNCHERS = {"setup", "train", "refuse", "parse_args", "resolve_processes", "main"}


# ----------------------------------------------------------------------------------------------------------------------
# The lesson as text


def source(script):
    return Path(ROOT, script).read_text()


def functions(script):
    """The top-level functions of a script in their order, name to text."""
    text = source(script)
    return {
        node.name: ast.get_source_segment(text, node)
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    }


def code_lines(script):
    return [line for line in source(script).splitlines() if line.strip() and not line.strip().startswith("#")]


def changed_lines(old, new):
    """How many lines `diff` shows as removed or added."""
    with_marks = difflib.ndiff(code_lines(old), code_lines(new))
    return sum(line[0] in "-+" for line in with_marks)


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_functions_that_need_no_ddp_are_the_same_text_in_all_scripts(script):
    single, ddp = functions(SINGLE), functions(script)
    assert [name for name in ddp if name in single] == list(single), "all are there, in the same order"
    assert {name for name in single if ddp[name] != single[name]} <= DIFFER_FROM_SINGLE


def test_functions_that_no_launcher_changes_are_the_same_text_in_both_ddp_scripts():
    spawn, torchrun = functions(SPAWN), functions(TORCHRUN)
    assert list(spawn) == list(torchrun)
    assert {name for name in spawn if spawn[name] != torchrun[name]} <= DIFFER_BETWEEN_LAUNCHERS


@pytest.mark.parametrize("word", ["rank", "world", "dist"])
def test_the_baseline_has_no_word_of_ddp(word):
    assert word not in source(SINGLE).lower()


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_all_marks_are_there_and_each_gives_its_reason(script):
    marks = re.findall(r"# DDP (\d+)(.*)$", source(script), re.MULTILINE)
    assert {number for number, _ in marks} == set("12345678")
    assert {number for number, reason in marks if re.match(r": \S+ \S+", reason)} == set("12345678")


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_the_guide_s_three_components_fit_on_a_screen(script):
    lines = re.findall(r"^.*# DDP [123].*$", source(script), re.MULTILINE)
    assert len(lines) <= MAX_LINES_MARKED_1_TO_3
    for number, what in enumerate(["init_process_group", "DistributedSampler(", "DDP(model"], start=1):
        assert any(what in line and f"# DDP {number}" in line for line in lines)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_stays_short(script):
    assert len(source(script).splitlines()) <= MAX_LINES[script]
    assert len(functions(script)["train"].splitlines()) <= MAX_TRAIN_LINES[script]


@pytest.mark.parametrize("old, new", MAX_CHANGED_LINES)
def test_a_diff_shows_little_but_ddp(old, new):
    assert changed_lines(old, new) <= MAX_CHANGED_LINES[old, new]


# ----------------------------------------------------------------------------------------------------------------------
# The same command, the same losses

SMALL = ("--device", "cpu", "--tokenizer", "bytes", "--context-length", 8, "--global-batch-size", 12)
FLAGS = (*SMALL, "--log-every", 1, "--eval-every", 30)
WHOLE, ACCUMULATED = ("--batch-size", 12), ("--batch-size", 3)  # 1, 2, 3 processes: 1 x 12, 6, 4; 4 x 3, 2 x 3, 2 x 2
FLOAT64, FLOAT32 = ("--dtype", "float64", "--max-steps", 120), ("--dtype", "float32", "--max-steps", 40)
# Several runs share few cores: threads that wait must not keep one busy.
ONE_THREAD = {"OMP_NUM_THREADS": 1, "OMP_WAIT_POLICY": "PASSIVE", "MASTER_PORT": None}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A text of 481 training and 53 validation windows of 8 tokens: 2, 3 and 12 divide neither."""
    path = tmp_path_factory.mktemp("small") / "corpus.txt"
    path.write_bytes(data.builtin_text().encode("ascii", "replace")[:4279])
    opened = data.open_corpus(path, "bytes", 8)
    assert (len(opened.train_set), len(opened.val_set)) == (481, 53)
    return path


def start_machines(script, *flags):
    """Start a DDP script as on two machines with a process each."""
    port = free_port()
    if script == SPAWN:
        env = {**ONE_THREAD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return [start(SPAWN, *flags, "--nnodes", 2, "--node-rank", node, n=1, env=env) for node in (0, 1)]
    processes = []
    for node in (0, 1):
        rendezvous = f"--nnodes=2 --node_rank={node} --rdzv_backend=c10d --rdzv_endpoint=127.0.0.1:{port}"
        arguments = command(TORCHRUN, *flags, n=1)
        place = arguments.index("--standalone")
        arguments[place : place + 1] = rendezvous.split()
        env = {**os.environ, **{name: str(value) for name, value in ONE_THREAD.items() if value is not None}}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(arguments, env=env, start_new_session=True, **pipes))
    return processes


# A copy with these changes tells how often gradients were averaged, the seed and the threads of each step, and the
# names of its threads when it has left the group.
PROBED = (
    ("        if args.drop_rate:", "        if True:"),
    (
        "    optimizer = torch.optim.AdamW(",
        """    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    averaged = []

    def count(state, bucket):
        averaged.append(bucket.is_last())
        return allreduce_hook(state, bucket)

    ddp_model.register_comm_hook(None, count)
    optimizer = torch.optim.AdamW(""",
    ),
    (
        "        scaler.unscale_(optimizer)",
        """        seen = f"averaged {sum(averaged)} seed {torch.initial_seed()} threads {torch.get_num_threads()}"
        sys.stdout.write(f"PROBE rank {rank} step {step} {seen}\\n")  # in one piece, also between other ranks' lines
        sys.stdout.flush()
        scaler.unscale_(optimizer)""",
    ),
    (
        "    if stop_signal:\n        sys.exit(128",
        """    names = [open(f"/proc/self/task/{id}/comm").read().strip() for id in os.listdir("/proc/self/task")]
    sys.stdout.write(f"LEFT rank {rank} {' '.join(names)}\\n")
    sys.stdout.flush()
    if stop_signal:\n        sys.exit(128""",
    ),
)

MACHINES = "1 + 1"  # in place of a number of processes

RUNS = [  # those of a row at the same time
    {
        "float64 single": (SINGLE, 1, *FLOAT64, *WHOLE),
        "float64 spawn 2": (SPAWN, 2, *FLOAT64, *ACCUMULATED),
        "float32 spawn 2 probed": (SPAWN, 2, *FLOAT32, *ACCUMULATED),
    },
    {
        "float64 torchrun 3": (TORCHRUN, 3, *FLOAT64, *ACCUMULATED),
        "float32 torchrun 2 probed": (TORCHRUN, 2, *FLOAT32, *ACCUMULATED),
    },
    {
        "float32 single": (SINGLE, 1, *FLOAT32, *WHOLE),
        "float32 spawn 1 + 1": (SPAWN, MACHINES, *FLOAT32, *WHOLE),
        "float32 torchrun 1 + 1": (TORCHRUN, MACHINES, *FLOAT32, *WHOLE),
    },
]
NAMES_64 = ["float64 spawn 2", "float64 torchrun 3"]
NAMES_32 = [name for row in RUNS for name in row if name.startswith("float32") and name != "float32 single"]


def run_all(runs, corpus, parent):
    """Runs at the same time, by name: what `finish` returns of the processes of each, and its `folder`."""
    started = {}
    for name, (script, n, *flags) in runs.items():
        folder, code = parent / name, ROOT
        flags = ("--data", corpus, *FLAGS, *flags, "--out", folder)
        if "probed" in name:
            code = parent / f"code of {name}"
            code.mkdir()
            patched_copy(code, script, *PROBED)
        if n == MACHINES:
            started[name] = start_machines(script, *flags)
        else:
            started[name] = [start(script, *flags, n=n, folder=code, env=ONE_THREAD)]
    return {
        name: SimpleNamespace(folder=parent / name, processes=[finish(process) for process in processes])
        for name, processes in started.items()
    }


@pytest.fixture(scope="module")
def ended(corpus, tmp_path_factory):
    """The runs of RUNS by name."""
    parent = tmp_path_factory.mktemp("runs")
    return {name: run for row in RUNS for name, run in run_all(row, corpus, parent).items()}


def stdout_of(run):
    """What the processes of a run printed, all of which must have succeeded."""
    for status, stdout, stderr in run.processes:
        assert status == 0, f"status {status}\n{stdout}\n{stderr}"
    return "".join(stdout for _, stdout, _ in run.processes)


def relative_difference(one, other):
    return abs(one - other) / abs(other)


def assert_same_losses(run, reference, steps, tolerance):
    stdout_of(run), stdout_of(reference)
    rows, expected = read_metrics(run.folder), read_metrics(reference.folder)
    assert [row["step"] for row in rows] == [row["step"] for row in expected] == list(range(1, steps + 1))
    assert sum(row["val_loss"] is not None for row in rows) >= 2
    for row, other in zip(rows, expected):
        assert relative_difference(row["train_loss"], other["train_loss"]) <= tolerance, row
        assert (row["val_loss"] is None) == (other["val_loss"] is None)
        if row["val_loss"] is not None:
            assert relative_difference(row["val_loss"], other["val_loss"]) <= tolerance, row


def assert_same_parameters(run, reference, tolerance):
    model, other = (gpt.load_checkpoint(Path(r.folder, "checkpoint.pt"))["model"] for r in (run, reference))
    assert list(model) == list(other), "the names of the raw module"
    for name in model:
        assert model[name].dtype == other[name].dtype
        difference = (model[name] - other[name]).abs().max() / other[name].abs().max()
        assert difference <= tolerance, name


@pytest.mark.parametrize("name", NAMES_64)
def test_the_losses_are_those_of_one_process(name, ended):
    assert_same_losses(ended[name], ended["float64 single"], steps=120, tolerance=1e-9)


@pytest.mark.parametrize("name", NAMES_64)
def test_the_final_parameters_are_those_of_one_process(name, ended):
    assert_same_parameters(ended[name], ended["float64 single"], tolerance=1e-9)


@pytest.mark.parametrize("name", NAMES_32)
def test_in_float32_and_on_two_machines_the_losses_differ_by_rounding_alone(name, ended):
    assert_same_losses(ended[name], ended["float32 single"], steps=40, tolerance=2e-5)


def test_two_spawn_runs_at_once_never_meet(ended):
    """They started together, and neither found the other's processes in its group."""
    for name in ("float64 spawn 2", "float32 spawn 2 probed"):
        assert "x 2 processes" in stdout_of(ended[name])


@pytest.mark.slow
def test_any_processes_machines_and_accumulation_give_the_same_losses(corpus, tmp_path):
    runs = {
        f"{script} {n} {batch[1]}": (script, n, *FLOAT64, *batch)
        for script in SCRIPTS
        for n in ((1,) if script == SINGLE else (1, 2, 3, MACHINES))
        for batch in (WHOLE, ACCUMULATED)
    }
    ended = {}
    for name in runs:
        ended |= run_all({name: runs[name]}, corpus, tmp_path)
    reference = ended[f"{SINGLE} 1 {WHOLE[1]}"]
    for run in ended.values():
        assert_same_losses(run, reference, steps=120, tolerance=1e-9)
        assert_same_parameters(run, reference, tolerance=1e-9)


# ----------------------------------------------------------------------------------------------------------------------
# What a run prints

STEP_LINE = re.compile(r"^epoch \d+  step (\d+)/\d+  loss (\S+)(?: \[(.*)\])?  norm ", re.MULTILINE)


@pytest.mark.parametrize("name, n", [("float64 spawn 2", 2), ("float64 torchrun 3", 3)])
def test_each_rank_s_loss_stands_beside_their_mean(name, n, ended):
    lines = STEP_LINE.findall(stdout_of(ended[name]))
    rows = read_metrics(ended[name].folder)
    assert len(lines) == len(rows) == 120
    for (step, loss, ranks), row in zip(lines, rows):
        losses = [float(loss) for loss in re.findall(r"rank \d+ (\S+?)(?:,|$)", ranks)]
        assert [int(rank) for rank in re.findall(r"rank (\d+)", ranks)] == list(range(n))
        assert len(set(losses)) == n, "each has windows of its own"
        assert sum(losses) / n == pytest.approx(float(loss), abs=2e-6)
        assert (int(step), float(loss)) == (row["step"], round(row["train_loss"], 6))


def test_above_eight_ranks_the_lowest_and_the_highest_loss_are_named():
    run = SimpleNamespace(steps_per_epoch=100, total_steps=100, n_processes=9)
    row = {"step": 1, "train_loss": 3.0, "learning_rate": 1e-3, "tokens_per_second": None, "tokens": 96}

    def line(losses):
        return gpt.describe_step(SimpleNamespace(device="cpu", dtype="float32"), run, None, row, losses, 1.0)

    losses = [3.0, 3.1, 3.2, 2.5, 3.0, 3.0, 3.7, 3.0]
    assert "[rank 0 3.000000, rank 1 3.100000, " in line(losses) and "rank 7 3.000000]" in line(losses)
    assert "[lowest rank 3 2.500000, highest rank 6 3.700000]" in line([*losses, 3.0])
    assert "rank" not in line([3.0])


@pytest.mark.parametrize("name", [*NAMES_64, *NAMES_32])
def test_one_process_speaks_for_all(name, ended):
    run = ended[name]
    stdout = stdout_of(run)
    steps = [int(step) for step, _, _ in STEP_LINE.findall(stdout)]
    assert steps == list(range(1, len(steps) + 1))
    for once in ("preset tiny", "backend gloo", "Epoch 1 completed", f"step {steps[-1]}: validation loss", "sample: "):
        assert stdout.count(once) == 1, once
    ours = [re.sub(r"^\[Gloo\] .*\n", "", stdout, flags=re.MULTILINE) for _, stdout, _ in run.processes]
    assert sum(map(bool, ours)) == 1, "on one of the machines; torch 2.8 has lines of its own"
    assert sorted(path.name for path in run.folder.iterdir()) == ["checkpoint.pt", "metrics.csv"]


@pytest.mark.parametrize("name", ["float64 single", *NAMES_64, "float32 spawn 1 + 1"])
def test_a_normal_run_warns_of_nothing(name, ended):
    """OMP_NUM_THREADS is set here: where it is not, torchrun has a word of its own."""
    assert [stderr for _, _, stderr in ended[name].processes] == [""] * len(ended[name].processes)


# ----------------------------------------------------------------------------------------------------------------------
# What each process does, told by the probes


@pytest.fixture(scope="module")
def probes(ended):
    """Per DDP script, what each of two ranks told at each of 40 steps of two micro-batches."""
    pattern = r"^PROBE rank (\d+) step (\d+) averaged (\d+) seed (\d+) threads (\d+)$"
    probes = {}
    for script, name in ((SPAWN, "float32 spawn 2 probed"), (TORCHRUN, "float32 torchrun 2 probed")):
        told = re.findall(pattern, stdout_of(ended[name]), re.MULTILINE)
        probes[script] = sorted(tuple(map(int, values)) for values in told)
        assert [values[:2] for values in probes[script]] == [(r, s) for r in (0, 1) for s in range(1, 41)]
    return probes


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_gradients_are_averaged_once_per_step_however_many_batches_it_accumulates(script, probes):
    for _, step, averaged, _, _ in probes[script]:
        assert averaged == step


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_each_rank_and_each_step_has_its_own_seed_for_dropout(script, probes):
    seeds = [seed for _, _, _, seed, _ in probes[script]]
    assert len(set(seeds)) == 80
    assert set(seeds) == {seed for *_, seed, _ in probes[SPAWN]}, "whichever script it is"


@pytest.mark.parametrize("name", ["float32 spawn 2 probed", "float32 torchrun 2 probed"])
def test_a_process_that_has_left_the_group_has_no_thread_of_it_any_more(name, ended):
    """Such a thread can abort the process, where it waits for the interpreter's lock and the interpreter ends."""
    left = re.findall(r"^LEFT rank \d (.*)$", stdout_of(ended[name]), re.MULTILINE)
    assert len(left) == 2
    assert not re.search("gloo|tcpstore", "".join(left)), left


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_processes_on_a_cpu_share_its_cores(script, probes, import_script, monkeypatch):
    assert {threads for *_, threads in probes[script]} == {max(1, os.cpu_count() // 2)}

    threads = torch.get_num_threads()
    try:
        monkeypatch.setattr(os, "cpu_count", lambda: 8)
        module = import_script(script)
        for local_world_size, share in ((1, 8), (3, 2), (8, 1), (9, 1)):
            assert module.pick_device("cpu", 0, local_world_size) == torch.device("cpu")
            assert torch.get_num_threads() == share
    finally:
        torch.set_num_threads(threads)


# ----------------------------------------------------------------------------------------------------------------------
# Which processes, and where they meet


@pytest.fixture
def import_script():
    """A function that imports a script; what it does with signals is undone."""
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    yield lambda script: importlib.import_module(Path(script).stem)
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


@pytest.fixture
def launcher_environment(monkeypatch):
    """A function that sets the variables of a launcher, and no other of them."""

    def set_to(**values):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.setenv(name, "")  # so that what the script sets is undone
            monkeypatch.delenv(name)
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return set_to


def spawn_flags(**flags):
    return SimpleNamespace(**{"device": "cpu", "nproc": None, "nnodes": 1, "node_rank": 0, **flags})


def torchrun_variables(rank, local_rank, world_size, local_world_size):
    return {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
    }


def test_spawn_looks_for_a_free_port_unless_one_is_set(import_script, launcher_environment):
    module = import_script(SPAWN)
    ports = set()
    for _ in range(3):
        launcher_environment()
        assert module.resolve_processes(spawn_flags()) == 2
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        ports.add(os.environ["MASTER_PORT"])
    assert len(ports) > 1

    launcher_environment(MASTER_PORT=12345)
    module.resolve_processes(spawn_flags())
    assert os.environ["MASTER_PORT"] == "12345"


def test_spawn_counts_processes_over_machines(import_script, launcher_environment):
    module = import_script(SPAWN)
    launcher_environment(MASTER_ADDR="10.0.0.1", MASTER_PORT=29500)
    assert module.resolve_processes(spawn_flags(nproc=3, nnodes=2, node_rank=1)) == 6


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"nproc": 0}, ["--nproc 0"]),
        ({"nnodes": 2, "node_rank": 2}, ["--node-rank 2", "1"]),
        ({"node_rank": -1}, ["--node-rank -1"]),
        ({"nnodes": 0}, ["--node-rank"]),
        ({"nnodes": 2}, ["MASTER_ADDR", "MASTER_PORT"]),
    ],
)
def test_spawn_refuses_processes_that_cannot_be(flags, words, import_script, launcher_environment):
    launcher_environment()
    with pytest.raises(ValueError) as refusal:
        import_script(SPAWN).resolve_processes(spawn_flags(**flags))
    assert all(word in str(refusal.value) for word in words)


def test_spawn_takes_all_gpus_and_refuses_more_processes(import_script, launcher_environment, monkeypatch):
    module = import_script(SPAWN)
    launcher_environment()
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    flags = spawn_flags(device="cuda")
    assert module.resolve_processes(flags) == flags.nproc == 3
    assert module.resolve_processes(spawn_flags(device="cuda", nproc=2)) == 2
    assert module.resolve_processes(spawn_flags(device="cpu", nproc=4)) == 4, "a GPU box can test on its CPU"
    with pytest.raises(ValueError, match=r"--nproc 4 .* 3 "):
        module.resolve_processes(spawn_flags(device="cuda", nproc=4))


def test_torchrun_refuses_more_processes_than_gpus_of_its_machine(import_script, launcher_environment, monkeypatch):
    module = import_script(TORCHRUN)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    launcher_environment(**torchrun_variables(rank=3, local_rank=1, world_size=4, local_world_size=2))
    assert module.resolve_processes(spawn_flags(device="cuda")) == (3, 4), "two machines with two GPUs each"
    launcher_environment(**torchrun_variables(rank=0, local_rank=0, world_size=3, local_world_size=3))
    assert module.resolve_processes(spawn_flags(device="cpu")) == (0, 3)
    with pytest.raises(ValueError, match=r"--nproc_per_node .* 2 .*--device cpu"):
        module.resolve_processes(spawn_flags(device="cuda"))


@pytest.mark.parametrize("present", [(), ("RANK",), ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")])
def test_torchrun_s_script_started_without_it_says_how_to_start(
    present, import_script, launcher_environment, monkeypatch, capfd
):
    module = import_script(TORCHRUN)
    variables = torchrun_variables(rank=0, local_rank=0, world_size=2, local_world_size=2)
    launcher_environment(**{name: value for name, value in variables.items() if name in present})
    monkeypatch.setattr("sys.argv", [TORCHRUN, "--device", "cpu"])
    with pytest.raises(SystemExit) as exit:
        module.main()
    stdout, stderr = capfd.readouterr()
    assert (exit.value.code, stdout) == (2, "")
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    named = stderr[: stderr.index("not set")]
    assert all((re.search(rf"\b{name}\b", named) is None) == (name in present) for name in variables)
    assert "torchrun --standalone --nproc_per_node=2 train_ddp_torchrun.py" in stderr


# ----------------------------------------------------------------------------------------------------------------------
# When something is wrong

ENDS_IN = 60  # seconds
ENDLESS = (*SMALL, "--max-steps", 10**6, "--log-every", 1, "--eval-every", 10**6)
FAULTS = {  # of rank 1 in step 3, and the flags of the run
    "exception": ("raise RuntimeError('broken on purpose')", ENDLESS),
    "kill -9": ("os.kill(os.getpid(), signal.SIGKILL)", ENDLESS),
    "drift": ("model.final_norm.bias.data[0] += 1e-6", (*SMALL, "--max-steps", 6, "--log-every", 1, "--eval-every", 2)),
}
QUICK = [(SPAWN, "exception"), (TORCHRUN, "exception"), (SPAWN, "kill -9"), (SPAWN, "drift")]  # at the same time


@pytest.fixture(scope="module")
def broken(corpus, tmp_path_factory):
    """A function that gives status, stdout and stderr of a script with a fault, and the seconds from that to its end.

    `finish` waits until nobody holds the pipes any more: an orphan is not overlooked.
    """
    ended = {}

    def start_broken(script, fault):
        statement, flags = FAULTS[fault]
        lines = ["if rank == 1 and step == 3:", "    print('FAULT AT', time.time(), flush=True)", f"    {statement}"]
        change = "".join(f"        {line}\n" for line in lines) + "        scaler.unscale_(optimizer)"
        copy = patched_copy(tmp_path_factory.mktemp("broken"), script, ("        scaler.unscale_(optimizer)", change))
        return start(script, "--data", corpus, *flags, n=2, folder=copy, env=ONE_THREAD)

    def get(*case):
        if case not in ended:
            started = {case: start_broken(*case) for case in (QUICK if case in QUICK else [case])}
            for other, process in started.items():
                status, stdout, stderr = finish(process)
                seconds = time.time() - float(re.search(r"FAULT AT (\S+)", stdout)[1])
                ended[other] = status, stdout, stderr, seconds
        return ended[case]

    return get


def cases(fault):
    return [pytest.param(s, fault, marks=[] if (s, fault) in QUICK else pytest.mark.slow) for s in DDP_SCRIPTS]


@pytest.mark.parametrize("script, fault", [*cases("exception"), *cases("kill -9")])
def test_a_rank_that_fails_ends_the_whole_job_soon_and_its_reason_is_shown(script, fault, broken):
    status, stdout, stderr, seconds = broken(script, fault)
    assert status not in (0, -signal.SIGKILL)
    assert seconds < ENDS_IN
    assert "step 2/" in stdout and "step 3/" not in stdout
    reason = "RuntimeError: broken on purpose" if fault == "exception" else "SIGKILL"
    if script == TORCHRUN:
        cause = stderr.split("Root Cause", 1)[1]
        assert "rank      : 1 " in cause and reason in cause
    elif fault == "exception":
        assert "Process 1 terminated with the following error" in stderr and reason in stderr
    else:
        assert stderr == "error: process 1 was ended by SIGKILL: add --resume\n"


@pytest.mark.parametrize("script, fault", cases("drift"))
def test_a_replica_that_drifted_is_found_at_the_next_evaluation_and_named(script, fault, broken):
    status, stdout, stderr, seconds = broken(script, fault)
    assert status not in (0, -signal.SIGKILL)
    assert seconds < ENDS_IN
    assert "step 2: validation loss" in stdout and "step 4: validation loss" not in stdout
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "model of rank 1 is not that of rank 0" in errors[0], stderr


@pytest.mark.slow
def test_a_machine_with_another_corpus_is_named_before_the_first_step(corpus, tmp_path):
    """Of the same length: only the fingerprint tells."""
    other = tmp_path / "other.txt"
    other.write_bytes(corpus.read_bytes().replace(b"e", b"a", 1))
    env = {**ONE_THREAD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    flags = (*ENDLESS, "--nnodes", 2, "--node-rank")
    started = [start(SPAWN, "--data", path, *flags, node, n=1, env=env) for node, path in enumerate((corpus, other))]
    ended = [finish(process) for process in started]
    assert all(status not in (0, -signal.SIGKILL) for status, _, _ in ended)
    assert "error: the corpus of rank 1 is not that of rank 0" in ended[0][2]
    assert "built into Python differs" in ended[0][2]
    assert "step 1/" not in ended[0][1]


@pytest.mark.parametrize("script", [pytest.param(SPAWN, marks=pytest.mark.slow), TORCHRUN])
def test_ctrl_c_ends_every_process_without_a_traceback_of_ours(script, corpus):
    process = start(script, "--data", corpus, *ENDLESS, n=2, env=ONE_THREAD)
    while "step 2/" not in (line := process.stdout.readline()):
        assert line, process.stderr.read()
    os.killpg(process.pid, signal.SIGINT)
    status, stdout, stderr = finish(process, timeout=ENDS_IN)
    assert "stopped by SIG" in stdout
    assert script not in stderr, stderr
    if script == SPAWN:
        assert (status, stderr) == (128 + signal.SIGINT, "")
    else:  # torchrun has a status and a traceback of its own
        assert status not in (0, -signal.SIGKILL)


@pytest.mark.slow
def test_no_finished_run_aborts_at_its_exit(corpus):
    """In one of ten small runs gloo aborted at interpreter exit; a test above looks for the cause."""
    flags = ("--data", corpus, *SMALL, "--max-steps", 1)
    failures = []
    for _ in range(8):
        started = [start(script, *flags, n=2, env=ONE_THREAD) for script in DDP_SCRIPTS]
        ended = [finish(process) for process in started]
        failures += [result for result in ended if result[0] != 0 or result[2] != ""]
    assert not failures, (len(failures), failures[0])


# ----------------------------------------------------------------------------------------------------------------------
# On GPUs: the same tests verify the machine that they run on

# Two processes on one GPU, which nccl does not allow and gloo does.
TWO_ON_ONE_GPU = (
    ("dist.get_default_backend_for_device(device)", '"gloo"'),
    ('device if device.type == "cuda" else None', "None"),
    ("torch.accelerator.device_count()", "2"),
    ("torch.accelerator.set_device_index(local_rank)", "torch.accelerator.set_device_index(0)"),
    ("torch.device(device_type, local_rank)", "torch.device(device_type, 0)"),
    ("[local_rank]", "[0]"),
)


def start_on_gpus(script, corpus, folder, *flags, n=1, **options):
    batch = ("--global-batch-size", 6 * torch.cuda.device_count(), "--batch-size", 2)
    small = ("--device", "cuda", "--preset", "tiny", "--tokenizer", "bytes", "--context-length", 8)
    steps = ("--log-every", 1, "--eval-every", 20)
    return start(script, "--data", corpus, *small, *batch, *steps, *flags, "--out", folder, n=n, **options)


def finished(folder, process):
    return SimpleNamespace(folder=folder, processes=[finish(process, timeout=600)])


@pytest.fixture(scope="module")
def on_one_gpu(corpus, tmp_path_factory):
    """The single script's run by its flags, made when it is first asked for."""
    runs = {}

    def get(*flags):
        if flags not in runs:
            folder = tmp_path_factory.mktemp("one_gpu")
            runs[flags] = finished(folder, start_on_gpus(SINGLE, corpus, folder, *flags))
        return runs[flags]

    return get


@pytest.mark.cuda
@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_all_gpus_give_the_losses_of_one(script, corpus, on_one_gpu, tmp_path):
    flags = ("--dtype", "float64", "--max-steps", 40)
    run = finished(tmp_path, start_on_gpus(script, corpus, tmp_path, *flags, n=torch.cuda.device_count()))
    assert "backend nccl" in stdout_of(run)
    assert_same_losses(run, on_one_gpu(*flags), steps=40, tolerance=1e-9)
    assert [stderr for _, _, stderr in run.processes if script == SPAWN] in ([""], [])


@pytest.mark.cuda
@pytest.mark.parametrize("script", DDP_SCRIPTS)
@pytest.mark.parametrize(
    "flags, tolerance",
    [
        (("--dtype", "bfloat16"), 0.02),
        (("--dtype", "float16"), 0.02),
        (("--dtype", "float32", "--compile"), 0.01),
        (("--dtype", "float16", "--compile", "--drop-rate", "0.1"), 0.1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_all_gpus_learn_in_each_format_as_one_does(script, flags, tolerance, corpus, on_one_gpu, tmp_path):
    """Within what 16 bits, or other dropout masks, change in 40 steps."""
    flags = (*flags, "--max-steps", 40)
    run = finished(tmp_path, start_on_gpus(script, corpus, tmp_path, *flags, n=torch.cuda.device_count()))
    assert flags[1] in stdout_of(run)
    assert_same_losses(run, on_one_gpu(*flags), steps=40, tolerance=tolerance)
    losses = [row["train_loss"] for row in read_metrics(tmp_path)]
    assert losses[-1] < losses[0] - 1


@pytest.mark.cuda
@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_a_run_on_all_gpus_resumes_where_it_was_interrupted(script, corpus, on_one_gpu, tmp_path):
    flags, n = ("--dtype", "float64", "--max-steps", 40), torch.cuda.device_count()
    process = start_on_gpus(script, corpus, tmp_path, "--dtype", "float64", "--max-steps", 10**6, n=n)
    while "step 20: validation loss" not in (line := process.stdout.readline()):
        assert line, process.stderr.read()
    os.killpg(process.pid, signal.SIGTERM)
    finish(process)
    stopped_after = gpt.load_checkpoint(Path(tmp_path, "checkpoint.pt"))["step"]
    run = finished(tmp_path, start_on_gpus(script, corpus, tmp_path, *flags, "--resume", n=n))
    assert f"resumed after step {stopped_after}" in stdout_of(run)


@pytest.mark.cuda
@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_two_processes_on_one_gpu_give_the_losses_of_one(script, corpus, on_one_gpu, tmp_path):
    flags = ("--dtype", "float64", "--max-steps", 40)
    copy, out = tmp_path / "copy", tmp_path / "out"
    copy.mkdir()
    patched_copy(copy, script, *TWO_ON_ONE_GPU)
    run = finished(out, start_on_gpus(script, corpus, out, *flags, n=2, folder=copy))
    assert "backend gloo" in stdout_of(run)
    assert_same_losses(run, on_one_gpu(*flags), steps=40, tolerance=1e-9)


@pytest.mark.parametrize("script", DDP_SCRIPTS)
def test_the_change_for_two_processes_on_one_gpu_fits_the_scripts(script, tmp_path):
    patched_copy(tmp_path, script, *TWO_ON_ONE_GPU)
