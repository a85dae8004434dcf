"""A run that is interrupted and resumed is the run that never stopped, in each script and from one to another."""

import json
import os
import random
import re
import shutil
import time

import pytest
import torch
from conftest import SINGLE, SPAWN, STEP_HOOK, TORCHRUN, Launch, contents, hooked, read_metrics, small_text

import data
import gpt

STEPS, STEPS_PER_EPOCH = 32, 14
# Logs and saves fall on different steps, dropout is on, and every process accumulates.
FLAGS = ("--context-length", 16, "--global-batch-size", 12, "--batch-size", 3, "--drop-rate", 0.1, "--seed", 7)
EVERY = ("--max-steps", STEPS, "--log-every", 2, "--eval-every", 3)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A text of 14 steps per epoch."""
    return small_text(tmp_path_factory.mktemp("corpus") / "corpus.txt")


# STOP_AT="5 9" sends the last rank signal 9 before step 5; STOP_AT="last rename" cuts the last save between its files.
# READS is a folder that gets the training windows which each rank reads, in order.
INTERRUPTIONS = (
    STEP_HOOK
    + f"""
def before_step(step, rank):
    global now
    now = step, rank
    at, number = os.environ["STOP_AT"].split()
    last = torch.distributed.get_world_size() - 1 if torch.distributed.is_initialized() else 0
    if at == str(step) and rank == last:
        os.kill(os.getpid(), int(number))

fetch = data.TokenDataset.__getitems__
def recorded_fetch(self, indices):
    if len(self) >= 12 * {STEPS_PER_EPOCH}:  # the training set
        with open(os.path.join(os.environ["READS"], f"rank{{now[1]}}.txt"), "a") as file:
            file.write("".join(f"{{index}}\\n" for index in indices))
    return fetch(self, indices)
data.TokenDataset.__getitems__ = recorded_fetch

rename = os.replace
def deadly_rename(source, target):
    rename(source, target)
    if os.environ["STOP_AT"] == "last rename" and now[0] == {STEPS}:
        os.kill(os.getpid(), signal.SIGKILL)
os.replace = deadly_rename
"""
)


def load_without_speed(folder):
    checkpoint = data.load_checkpoint(folder / "checkpoint.pt")
    return {**checkpoint, "metrics": [list(row[:-1]) for row in checkpoint["metrics"]]}


class Ending:
    """What a run, or a chain of runs that resume each other, leaves."""

    def __init__(self, folder):
        self.out, self.logs, self.statuses, self.reads = folder / "out", [], [], []
        self.folder = folder
        folder.mkdir()

    def launch(self, copy, corpus, script, n, *flags, stop_at="0 0"):
        number = len(self.reads)
        self.reads.append(self.folder / f"reads{number}")
        self.reads[-1].mkdir()
        return Launch(
            self.folder / f"log{number}.txt",
            script,
            *("--data", corpus, *FLAGS, *EVERY, "--out", self.out, *flags),
            n=n,
            folder=copy,
            READS=self.reads[-1],
            STOP_AT=stop_at,
        )

    def finish(self, launch):
        self.statuses.append(launch.finish())
        self.logs.append(launch.text)

    def chain(self, copy, corpus, stages, *flags):
        for script, n, stop_at in stages:
            self.finish(self.launch(copy, corpus, script, n, "--resume", *flags, stop_at=stop_at))
        return self

    def windows(self, stage, rank):
        return [int(line) for line in (self.reads[stage] / f"rank{rank}.txt").read_text().split()]

    @property
    def checkpoint(self):
        return load_without_speed(self.out)

    @property
    def metrics(self):
        """metrics.csv without its last column, the speed."""
        return [line.rpartition(",")[0] for line in (self.out / "metrics.csv").read_text().splitlines()]


def undisturbed_and_chain(folder, corpus, reference, stages, *flags):
    """The ending of an undisturbed run of (script, n), and that of a chain of (script, n, stop_at)."""
    copy = hooked(folder / "code", INTERRUPTIONS)
    undisturbed, chain = Ending(folder / "undisturbed"), Ending(folder / "chain")
    launch = undisturbed.launch(copy, corpus, *reference, *flags)
    if reference[0] != SINGLE:  # which leaves a core for the chain beside it
        undisturbed.finish(launch)
    chain.chain(copy, corpus, stages, *flags)
    if reference[0] == SINGLE:
        undisturbed.finish(launch)
    assert undisturbed.statuses == [0], undisturbed.logs
    assert chain.statuses[-1] == 0, chain.logs
    return undisturbed, chain


# Killed in mid-epoch two steps after a save; asked to stop, which happens at the epoch's last step; killed in the last
# save, between its two files; and resumed to the end.
MOMENTS = ("6 9", f"{STEPS_PER_EPOCH - 1} 15", "last rename", "0 0")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, corpus):
    stages = [(SINGLE, 1, moment) for moment in MOMENTS]
    return undisturbed_and_chain(tmp_path_factory.mktemp("one"), corpus, (SINGLE, 1), stages)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory, corpus):
    stages = [(SPAWN, 2, MOMENTS[0]), (TORCHRUN, 2, MOMENTS[-1])]
    return undisturbed_and_chain(tmp_path_factory.mktemp("two"), corpus, (SPAWN, 2), stages)


def assert_same_bits(a, b, where="checkpoint"):
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, (dict, list, tuple)):
        one, two = (list(x.items() if isinstance(x, dict) else enumerate(x)) for x in (a, b))
        assert [key for key, _ in one] == [key for key, _ in two], where
        for (key, x), (_, y) in zip(one, two):
            assert_same_bits(x, y, f"{where}[{key!r}]")
    else:
        assert a == b, where


def assert_same_ending(undisturbed, chain):
    assert [row[0] for row in chain.checkpoint["metrics"]] == [
        step for step in range(1, STEPS + 1) if step % 2 == 0 or step % 3 == 0
    ]
    assert_same_bits(chain.checkpoint, undisturbed.checkpoint)
    assert chain.metrics == undisturbed.metrics
    model = gpt.GPT(gpt.GPTConfig(**chain.checkpoint["config"]))
    assert list(chain.checkpoint["model"]) == [name for name, _ in model.named_parameters()]  # of no wrapper


def assert_continued(chain):
    """Each stage began where the last save was, so no interruption came at another moment than it should."""
    assert all(status != 0 for status in chain.statuses[:-1]), chain.statuses
    assert "resumed" not in chain.logs[0]
    for log, step in zip(chain.logs[1:], (3, STEPS_PER_EPOCH, STEPS - STEPS % 3)):
        assert f"resumed after step {step}\n" in log
    assert sorted(os.listdir(chain.out)) == ["checkpoint.pt", "metrics.csv"]


def test_one_process_interrupted_three_times_ends_bit_for_bit_as_one_never_stopped(one_process):
    assert_continued(one_process[1])
    assert_same_ending(*one_process)


def test_two_processes_killed_and_resumed_by_the_other_launcher_end_bit_for_bit_as_never_stopped(two_processes):
    assert_continued(two_processes[1])
    assert_same_ending(*two_processes)


@pytest.mark.parametrize("n", [1, 2])
def test_a_resumed_run_reads_the_next_windows_and_no_earlier_one(n, request):
    undisturbed, chain = request.getfixturevalue("one_process" if n == 1 else "two_processes")
    share = 12 // n
    for rank in range(n):
        windows = undisturbed.windows(0, rank)
        assert len(windows) == STEPS * share
        ends = (STEPS_PER_EPOCH, STEPS) if n == 1 else (STEPS,)
        for stage, (begin, end) in enumerate(zip((3, *ends), ends), 1):
            assert chain.windows(stage, rank) == windows[begin * share : end * share]


@pytest.mark.slow
@pytest.mark.parametrize("script, n", [(SPAWN, 1), (TORCHRUN, 2)])
def test_each_ddp_script_alone_resumes_bit_for_bit(script, n, tmp_path, corpus):
    stages = [(script, n, moment) for moment in MOMENTS]
    undisturbed, chain = undisturbed_and_chain(tmp_path, corpus, (script, n), stages)
    assert_continued(chain)
    assert_same_ending(undisturbed, chain)


def assert_close_ending(undisturbed, chain):
    rows, expected = read_metrics(chain.out), read_metrics(undisturbed.out)
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, other in zip(rows, expected):
        for name in ("learning_rate", "train_loss", "val_loss"):
            assert (row[name] is None) == (other[name] is None)
            assert row[name] is None or abs(row[name] - other[name]) <= 1e-9, (row, other)


@pytest.mark.slow
def test_three_processes_resume_within_1e_9_in_float64(tmp_path, corpus):
    stages = [(script, 3, moment) for script, moment in zip((TORCHRUN, SPAWN, TORCHRUN, SPAWN), MOMENTS)]
    undisturbed, chain = undisturbed_and_chain(tmp_path, corpus, (SPAWN, 3), stages, "--dtype", "float64")
    assert_continued(chain)
    assert_close_ending(undisturbed, chain)


@pytest.mark.slow
def test_a_chain_of_scripts_and_world_sizes_keeps_the_losses_of_one_run(tmp_path, corpus):
    """Without dropout, whose masks are a rank's own and so differ between world sizes."""
    stages = [(SINGLE, 1, "6 9"), (SPAWN, 2, "13 15"), (TORCHRUN, 3, "18 9"), (TORCHRUN, 2, "24 9"), (SPAWN, 3, "0 0")]
    exact = ("--dtype", "float64", "--drop-rate", 0)
    undisturbed, chain = undisturbed_and_chain(tmp_path, corpus, (SINGLE, 1), stages, *exact)
    for log, step in zip(chain.logs[1:], (3, 14, 15, 21)):
        assert f"resumed after step {step}\n" in log
    assert_close_ending(undisturbed, chain)


@pytest.fixture(scope="module")
def after_the_end(one_process, corpus, tmp_path_factory):
    """A finished run resumed with the same flags, and resumed to 8 more steps: (folder, status, output) of each."""
    folder = tmp_path_factory.mktemp("after")
    launches = {}
    for name, flags in {"same": (), "more": ("--max-steps", STEPS + 8)}.items():
        out = shutil.copytree(one_process[0].out, folder / name)
        flags = ("--data", corpus, *FLAGS, *EVERY, "--out", out, "--resume", *flags)
        launches[name] = Launch(folder / f"{name}.txt", SINGLE, *flags)
    return {name: (folder / name, launch.finish(), launch.text) for name, launch in launches.items()}


def test_resuming_a_finished_run_prints_its_sample_and_changes_nothing(after_the_end, one_process):
    out, status, text = after_the_end["same"]
    assert status == 0, text
    assert f"resumed after step {STEPS}\n" in text
    assert "sample: The " in text
    assert contents(out) == contents(one_process[0].out)


def test_a_finished_run_goes_on_to_more_steps_with_the_learning_rate_of_the_new_horizon(after_the_end, one_process):
    out, status, text = after_the_end["more"]
    assert status == 0, text
    before, rows = read_metrics(one_process[0].out), read_metrics(out)
    assert rows[: len(before)] == before
    new = rows[len(before) :]
    assert [row["step"] for row in new] == [33, 34, 36, 38, 39, 40]
    for row in new:
        expected = gpt.learning_rate(row["step"], STEPS + 8, gpt.PRESETS["tiny"].lr)
        assert row["learning_rate"] == pytest.approx(expected, rel=1e-12)
    assert data.load_checkpoint(out / "checkpoint.pt")["step"] == STEPS + 8


@pytest.mark.slow
@pytest.mark.parametrize("script", [SPAWN, TORCHRUN])
def test_resuming_a_finished_run_prints_its_sample_once_from_several_processes(script, two_processes, corpus, tmp_path):
    out = shutil.copytree(two_processes[0].out, tmp_path / "out")
    launch = Launch(tmp_path / "log", script, "--data", corpus, *FLAGS, *EVERY, "--out", out, "--resume", n=2)
    assert launch.finish() == 0, launch.text
    assert launch.text.count("sample: The ") == 1


# With the 20 of torchrun's restarts in test_faults.py, 52 moments.
@pytest.mark.slow
@pytest.mark.parametrize("script, n, kills", [(SINGLE, 1, 18), (SPAWN, 2, 14)])
def test_no_kill_9_at_any_moment_loses_the_checkpoint(script, n, kills, tmp_path, corpus):
    moments, steps = random.Random(script), 12 * kills
    flags = ("--data", corpus, *FLAGS, "--max-steps", steps, "--log-every", 1, "--eval-every", 1)
    out, saved, resumed = tmp_path / "out", 0, 0
    undisturbed = Launch(tmp_path / "undisturbed.txt", script, *flags, "--out", tmp_path / "undisturbed", n=n)
    for number in range(kills):
        launch = Launch(tmp_path / "log", script, *flags, "--out", out, "--resume", n=n)
        if moments.random() < 0.8:  # while it steps and saves
            n_lines = moments.randint(1, 6)
            launch.wait_for(lambda launch, n=n_lines: launch.text.count("validation loss") >= n)
            time.sleep(moments.uniform(0, 0.15))
        else:
            time.sleep(moments.uniform(0, 6))
        assert launch.process.poll() is None, f"kill {number} came too late\n{launch.text}"
        launch.kill()
        if begun := re.search(r"resumed after step (\d+)", launch.text):
            assert int(begun[1]) == saved, "a checkpoint was lost"
            resumed += 1
        if (out / "checkpoint.pt").exists():
            now = data.load_checkpoint(out / "checkpoint.pt")["step"]
            printed = [int(step) for step in re.findall(r"step (\d+): validation loss", launch.text)]
            assert now >= max([saved, *(step - 1 for step in printed)])
            saved = now
            whole = {"checkpoint.pt", "metrics.csv"}
            assert whole <= set(os.listdir(out)) <= whole | {f"{name}.tmp" for name in whole}
        assert {path.name for path in corpus.parent.iterdir()} == {corpus.name, f"{corpus.name}.bytes.npy"}
    last = Launch(tmp_path / "log", script, *flags, "--out", out, "--resume", n=n)
    assert last.finish() == 0, last.text
    assert undisturbed.finish() == 0, undisturbed.text
    assert resumed >= kills // 2
    assert sorted(os.listdir(out)) == ["checkpoint.pt", "metrics.csv"]
    assert_same_bits(load_without_speed(out), load_without_speed(tmp_path / "undisturbed"))
    print(json.dumps({"script": script, "kills": kills, "lost": 0, "steps": steps}))
