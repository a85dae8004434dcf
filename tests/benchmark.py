"""Measure how fast the scripts train, what DDP costs, what each speed feature gives and what a corpus costs.

    python tests/benchmark.py scaling                 # one and two processes (on GPUs: up to all), in five minutes
    python tests/benchmark.py ablate --preset gpt2 --context-length 256
    python tests/benchmark.py data
    python tests/benchmark.py gpu                     # gpt2 on GPUs, eager and compiled, then ablate: in eight minutes

A shared machine is fast at one moment and slow at the next. So nothing is compared across runs: two ways of taking a
step take turns in short blocks, and what counts is the ratio of their median speeds. The quartiles of the ratios of
neighbouring blocks stand behind it. Random token ids of the gpt2 vocabulary are as good as real ones for speed, so no
tokenizer is fetched.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import itertools
import logging
import math
import os
import platform
import re
import shlex
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, RandomSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data
import gpt
import train_ddp_torchrun
import train_single_gpu

VOCABULARY = {"bytes": 257, "gpt2": 50257}
ENDLESS = 10**6  # steps: more than a measurement takes, so that a script never comes to its end
LOG_EVERY = 10  # the scripts' default
MB = 1e6
FAILURES = []  # what stands in the tables in place of figures

# Dense 16-bit peaks from the vendors' data sheets, in TFLOP/s.
# fmt: off
PEAK_TERAFLOPS = {
    "B200": 2250, "GH200": 989, "H200": 989, "H200 NVL": 835, "H100": 989, "H100 NVL": 835, "H100 PCIE": 756,
    "A100": 312, "A100 PCIE": 312, "L40S": 362, "A10G": 70, "A10": 125, "L4": 121,
    "V100": 125, "V100 PCIE": 112, "T4": 65, "RTX 4090": 165, "RTX 3090": 71,
}
# fmt: on


class Failed(Exception):
    """A measurement that could not be made, and why."""


# ----------------------------------------------------------------------------------------------------------------------
# Numbers and tables


def peak_flops(device_name):
    """Dense 16-bit FLOP/s of a GPU by the name that `torch.cuda.get_device_name` gives, or None if not known.

    Brand, socket and memory size do not matter; any other word, such as Laptop, Ti or MIG, can mean a slower chip.
    """
    words = re.split(r"[ -]", device_name.upper())
    neutral = re.compile(r"NVIDIA|TESLA|GEFORCE|SXM\d?|\d+GB|HBM\d\w?")
    teraflops = PEAK_TERAFLOPS.get(" ".join(word for word in words if not neutral.fullmatch(word)))
    return teraflops and teraflops * 1e12


def flops_per_token(model):
    """Floating-point operations of forward and backward for one token of a full context.

    6 N + 12 L T C, with N parameters (all but the positions, which are only looked up), L layers, T tokens of context
    and width C: Chowdhery et al., "PaLM", 2022, appendix B.
    """
    config = model.config
    n_parameters = sum(p.numel() for p in model.parameters()) - model.pos_emb.weight.numel()
    return 6 * n_parameters + 12 * config.n_layers * config.context_length * config.emb_dim


def empty_model(args):
    """The model of a script, without memory for its parameters."""
    with torch.device("meta"):
        return gpt.GPT(gpt.config_for(args, VOCABULARY[args.tokenizer]))


def mfu(tokens_per_second, args, n_processes=1):
    """The share of the GPUs' dense 16-bit peak that the model uses, as text; None where the peak is not known."""
    peak = peak_flops(torch.cuda.get_device_name()) if args.device == "cuda" else None
    return peak and f"{tokens_per_second * flops_per_token(empty_model(args)) / (peak * n_processes):.1%}"


def print_table(title, header, rows):
    """Print a Markdown table; a number of thousands gets its commas, None is n/a, and short rows are filled up."""

    def text(cell):
        if isinstance(cell, float):
            return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
        return "n/a" if cell is None else f"{cell:,}" if isinstance(cell, int) else str(cell)

    print(f"\n{title}\n\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(text(cell) for cell in (*row, *[''] * (len(header) - len(row))))} |", flush=True)
        FAILURES.extend(cell for cell in row if isinstance(cell, Failed))


def print_facts(args=None, formats=""):
    """Print what the figures below depend on: the machine, the versions, the command, and the size of a step."""
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = next(iter(re.findall(r"model name\s*: (.*)", cpuinfo)), platform.processor())
    if args and args.device == "cuda":
        name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    versions = f"{platform.system()}, Python {platform.python_version()}, torch {torch.__version__}"
    print(f"\n{name}, {os.cpu_count()} CPU cores, {versions}")
    print("command: python", *map(shlex.quote, (os.path.relpath(sys.argv[0]), *sys.argv[1:])), flush=True)
    if args:
        sizes = f"{args.batch_size} x {args.context_length} tokens per process and forward pass"
        print(f"preset {args.preset}: {sizes}, device {args.device}, {formats}", flush=True)


# ----------------------------------------------------------------------------------------------------------------------
# Processes that take blocks of steps by turns


class Pace(NamedTuple):
    """How long to measure: seconds of a block, the most pairs of blocks, and when (time.monotonic) to give up."""

    seconds: float
    pairs: int
    deadline: float = math.inf


class Group:
    """`n` processes that each call `work(rank, n, blocks, *arguments)`, and take blocks of steps when asked."""

    def __init__(self, pace, work, n, *arguments):
        context = torch.multiprocessing.get_context("spawn")
        self.deadline, self.connections, self.processes = pace.deadline, [], []
        for rank in range(n):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, work, rank, n, *arguments), daemon=True)
            process.start()
            there.close()  # so that the end of the process ends what can be read here
            self.connections.append(here)
            self.processes.append(process)

    def ask(self, n_steps, other_way=False):
        """(seconds, bytes written, peak bytes) of a block, the most of any process. Raises Failed if one has none."""
        for connection in self.connections:
            with contextlib.suppress(OSError):  # of one that died; it is found out below
                connection.send((n_steps, other_way))
        answers, waiting = [], set(self.connections)
        while waiting:
            ready = wait(waiting, min(max(0, self.deadline - time.monotonic()), 10**6))
            if not ready:
                raise Failed("no time left")
            for connection in ready:
                try:
                    answers.append(connection.recv())
                except (EOFError, ConnectionError):
                    raise Failed("a process was killed; out of memory?") from None
                if isinstance(answers[-1], Failed):
                    raise answers[-1]
            waiting -= set(ready)
        return np.max(answers, axis=0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join()


def _serve(connection, work, rank, n, *arguments):
    logging.disable(logging.WARNING)  # of the compiler
    # The size is all that training on ready token ids asks of a tokenizer.
    data.get_tokenizer = lambda name: SimpleNamespace(name=name, n_vocab=VOCABULARY[name])
    data.on_signals = lambda handler: None  # a signal shall end the process at once, not at its next report
    try:
        with open(os.devnull, "w") as sys.stdout:
            work(rank, n, functools.partial(blocks, connection), *arguments)
    except torch.OutOfMemoryError:
        connection.send(Failed("out of memory"))
    except (Exception, SystemExit) as error:
        connection.send(Failed(f"error: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"))


def blocks(connection, device, other_way=None):
    """Yield for each step to take, as `Group.ask` says. `other_way` is a generator function that may yield or not."""
    while True:
        n_steps, other = connection.recv()
        way = other_way if other else range
        if n_steps > 1:
            yield from way(1)  # warms up, after a while without a turn
        peak_bytes(device)
        start, start_bytes = clock(device), process_figure("io", "wchar")
        yield from way(n_steps)
        seconds, n_bytes = clock(device) - start, process_figure("io", "wchar") - start_bytes
        connection.send((seconds, n_bytes, peak_bytes(device)))


def take_turns(ask, other_ask, pace):
    """Let two ways take blocks of equally many steps by turns; returns how fast they are and what they use.

    Each is a function like `Group.ask`. Long blocks hold equally many log lines.
    """
    first, other = [(way(1), way(1))[1] for way in (ask, other_ask)]  # the first step compiles
    step_seconds = max(first[0], other[0])
    n_steps = max(1, round(pace.seconds / step_seconds))
    if n_steps > LOG_EVERY:
        n_steps -= n_steps % LOG_EVERY
    n_pairs = min(pace.pairs, max(3, round(pace.pairs * pace.seconds / (n_steps * step_seconds))))
    turns = np.array([(ask(n_steps), other_ask(n_steps)) for _ in range(n_pairs)])
    seconds, n_bytes, _ = turns.transpose(2, 1, 0)  # each (2, n_pairs)
    speed, other_speed = n_steps / np.median(seconds, axis=1)
    low, high = np.percentile(seconds[1] / seconds[0], (25, 75))
    return SimpleNamespace(
        speed=speed,  # steps per second
        other_speed=other_speed,
        ratio=speed / other_speed,
        text=f"{speed / other_speed:.3f} ({low:.3f} to {high:.3f})",  # the quartiles of neighbouring blocks
        bytes=np.median(n_bytes[0] - n_bytes[1]) / n_steps,  # written in a step beyond those of the other way
        peak=first[2],
        other_peak=other[2],
    )


def clock(device):
    """Seconds, read when the device has done all it was told."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def process_figure(file, name):
    """A number from a file of Linux's /proc/self, kB as bytes; 0 on other systems."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self", file).read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * (1024 if line.endswith(" kB") else 1)
    return 0


BYTES_OF_IMPORTS = process_figure("status", "VmHWM")


def peak_bytes(device):
    """The most memory since the call before: on the GPU, or on a CPU resident beyond what the imports took."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    peak = process_figure("status", "VmHWM") - BYTES_OF_IMPORTS
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak


# ----------------------------------------------------------------------------------------------------------------------
# scaling and ablate: the scripts' own loops, and a plain one with or without each of the speed features

TF32, AUTOCAST, FUSED, SDPA = "TF32", "autocast", "fused AdamW", "SDPA"
PADDED, PARTS, COMPILE, CLIP = "padded vocabulary", "loss in parts", "compile", "clipping"
SCRIPT = {TF32, FUSED, SDPA, PADDED, PARTS, CLIP}  # what the scripts do with --dtype float32


def script_args(flags, accumulation=1, n_processes=1):
    """What a script makes of `flags`, for steps of `accumulation` full forward passes in each process."""
    args = gpt.make_parser("").parse_args(flags)
    args.nproc = n_processes
    try:
        gpt.resolve_flags(args, for_ddp=n_processes > 1)
    except ValueError as error:
        sys.exit(f"error: {error}")
    args.global_batch_size = args.batch_size * accumulation * n_processes
    return args


def plain_step(args, device, features, accumulation=1):
    """A function that takes a step over random ids in memory: forward, backward, optimizer, and no more."""
    _, autocast, _ = gpt.number_formats(args)
    if TF32 not in features:
        torch.set_float32_matmul_precision("highest")
    if SDPA not in features:  # leaves the attention that makes all scores at once
        for kernel in ("flash", "mem_efficient", "cudnn"):
            getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)  # on a CPU too
    n_vocab = VOCABULARY[args.tokenizer]
    config = gpt.config_for(args, n_vocab)
    model = gpt.GPT(config if PADDED in features else dataclasses.replace(config, vocab_size=n_vocab)).to(device)
    forward = torch.compile(model) if COMPILE in features else model
    groups = gpt.weight_decay_groups(model, weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups, lr=1e-5, betas=(0.9, 0.95), fused=FUSED in features or None)
    batches = torch.randint(n_vocab, (accumulation, args.batch_size, args.context_length + 1), device=device)
    batches = [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in batches]

    def step():
        for inputs, targets in batches:
            with autocast:
                if PARTS in features:
                    loss = forward(inputs, targets).loss
                else:  # the logits live to the end of the step, as in a loop whose model returns them
                    logits = forward(inputs).logits
                    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            (loss / accumulation).backward()
        if CLIP in features:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def held(run, turns):
    """The `run`, made to wait before each step for `turns`, and to end when these end."""
    steps = run.steps
    run.steps = lambda: (step for step, _ in zip(steps(), turns))
    return run


def hold_single(rank, n_processes, blocks, flags, accumulation, port):
    """Take steps of train_single_gpu.py, and the other way those of a bare loop."""
    args = script_args(flags, accumulation)
    device = gpt.pick_device(args)
    features = SCRIPT - {CLIP} | ({COMPILE} if args.compile else set())
    bare_step = functools.cache(lambda: plain_step(args, device, features, accumulation))  # after the script's memory

    def bare_loop(n_steps):
        for _ in range(n_steps):
            bare_step()()
        yield from ()  # no step of the script

    train_single_gpu.train(args, held(data.Run(args), blocks(device, bare_loop)))


def hold_ddp(rank, n_processes, blocks, flags, accumulation, port):
    """Take steps of train_ddp_torchrun.py, and the other way without all-reduce: the replicas drift apart."""
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    args = script_args(flags, accumulation, n_processes)
    wrapped = []
    train_ddp_torchrun.DDP = lambda *module, **options: wrapped.append(DDP(*module, **options)) or wrapped[0]

    def apart(n_steps):
        with wrapped[0].no_sync():
            yield from range(n_steps)

    run = data.Run(args, n_processes, quiet=rank > 0)
    train_ddp_torchrun.train(rank, n_processes, args, held(run, blocks(gpt.pick_device(args, rank), apart)))


def compare_loops(hold, n_processes, flags, accumulation, pace):
    """`take_turns` of a script's loop, held by `hold`, and its other way, over random token ids."""
    args = script_args(flags, accumulation, n_processes)
    n_windows = max(2 * args.global_batch_size, 2000)  # two steps, and some to validate
    ids = np.random.default_rng(0).integers(0, VOCABULARY[args.tokenizer], n_windows * args.context_length * 10 // 9)
    with tempfile.TemporaryDirectory() as folder:
        np.save(path := str(Path(folder, "tokens.npy")), ids.astype(np.uint16))
        flags = [*flags, "--data", path, "--max-steps", str(ENDLESS), "--eval-every", str(ENDLESS)]
        with Group(pace, hold, n_processes, flags, accumulation, get_free_port()) as group:
            return take_turns(group.ask, functools.partial(group.ask, other_way=True), pace)


def measure_scaling(flags, processes, accumulations, pace):
    """Print the tables of `scaling`."""
    args = script_args(flags)
    tokens = args.batch_size * args.context_length
    print_facts(args, f"{args.dtype}{', compiled' if args.compile else ''}")
    rows = []
    for accumulation in accumulations:
        try:
            figure = compare_loops(hold_single, 1, flags, accumulation, pace)
        except Failed as failure:
            rows.append([accumulation, failure])
            continue
        speed, other = figure.speed * tokens * accumulation, figure.other_speed * tokens * accumulation
        rows.append([accumulation, speed, other, figure.text, mfu(speed, args), figure.peak / MB])
    header = ["accumulation", "script, tokens/s", "bare loop, tokens/s", "script over bare loop (quartiles)", "MFU"]
    title = "train_single_gpu.py against a bare loop of forward, backward and optimizer over tensors in memory"
    print_table(title, [*header, "peak memory, MB"], rows)

    gradient_bytes = 4 * sum(p.numel() for p in empty_model(args).parameters())
    rows, one = [], {}
    for n, accumulation in itertools.product(processes, accumulations):
        try:
            figure = compare_loops(hold_ddp, n, flags, accumulation, pace)
        except Failed as failure:
            rows.append([n, accumulation, failure])
            continue
        speed, other = (each * tokens * accumulation * n for each in (figure.speed, figure.other_speed))
        times = f"{speed / one.setdefault(accumulation, speed):.2f}" if n == 1 or accumulation in one else None
        sent = figure.bytes / MB if args.device == "cpu" and process_figure("io", "wchar") else None
        paper = 2 * (n - 1) / n * gradient_bytes / MB  # a ring passes every part of the gradients around twice
        rows.append([n, accumulation, speed, other, figure.text, times, sent, paper, mfu(speed, args, n)])
    header = ["processes", "accumulation", "DDP, tokens/s", "no all-reduce, tokens/s", "efficiency (quartiles)"]
    header += ["times 1 process", "MB sent", "MB on paper", "MFU"]
    title = "train_ddp_torchrun.py against the same steps without all-reduce (bytes: sent by a process in a step)"
    if rows:
        print_table(title, header, rows)


def take_plain_steps(rank, n_processes, blocks, flags, features):
    args = script_args(flags)
    args.dtype = "float32" if AUTOCAST not in features else "float16" if args.dtype == "float16" else "bfloat16"
    device = gpt.pick_device(args)
    step = plain_step(args, device, features)
    for _ in blocks(device):
        step()


def measure_ways(title, flags, ways, pace):
    """Print a table of `ways`, {name: features}, over the first of them; returns {name: figure} of the others."""
    args = script_args(flags)
    tokens = args.batch_size * args.context_length
    name, *others = ways
    rows, figures = [[name]], {}
    with Group(pace, take_plain_steps, 1, flags, ways[name]) as first:
        try:
            first.ask(1)
        except Failed as failure:
            rows, others = [[name, failure]], []
        for way in others:
            try:
                with Group(pace, take_plain_steps, 1, flags, ways[way]) as second:
                    figures[way] = figure = take_turns(second.ask, first.ask, pace)
            except Failed as failure:
                rows.append([way, failure])
                continue
            speed, other = figure.speed * tokens, figure.other_speed * tokens
            rows[0] = [name, other, "1", figure.other_peak / MB, "1", mfu(other, args)]
            rows.append([way, speed, figure.text, figure.peak / MB, figure.peak / figure.other_peak, mfu(speed, args)])
    header = ["", "tokens/s", "speed over the first row (quartiles)", "peak memory, MB", "over the first row", "MFU"]
    print_table(title, header, rows)
    return figures


def measure_ablation(flags, pace):
    """Print the tables of `ablate`."""
    args = script_args(flags)
    print_facts(args, "16 bits, TF32 and the compiler where the row says so")
    on_gpu = args.device == "cuda"
    features = [*([TF32] if on_gpu else []), AUTOCAST, FUSED, SDPA, PADDED, PARTS, COMPILE]
    ways = {"float32, and none of them": {CLIP}, **{feature: {CLIP, feature} for feature in features}}
    measure_ways("Each feature alone", flags, {**ways, "all together": {CLIP, *features}}, pace)

    half = AUTOCAST if on_gpu else "--dtype bfloat16"
    ways = {"--dtype float32": SCRIPT, half: SCRIPT | {AUTOCAST}, "--compile": SCRIPT | {COMPILE}}
    measure_ways("The scripts' flags", flags, {**ways, "both": SCRIPT | {AUTOCAST, COMPILE}}, pace)


# ----------------------------------------------------------------------------------------------------------------------
# data: what a corpus costs


def start_script(args):
    """The seconds from the first line of train_single_gpu.py that knows its flags to the end of its first step."""
    importlib.import_module("torch._dynamo")  # else the first optimizer imports it, in the time that a start takes
    start = time.perf_counter()
    with contextlib.suppress(SystemExit):
        train_single_gpu.train(args, held(data.Run(args, quiet=True), range(1)))
    return time.perf_counter() - start


def read_corpus(args):
    """What a process pays for its corpus. Opening a text makes its tokens, if they are not there."""

    def resident():
        return np.array([process_figure("status", name) for name in ("RssAnon", "RssFile")])

    next(iter(DataLoader([torch.zeros(1)])))  # code that any loader brings into memory
    before, start, figure = resident(), time.perf_counter(), SimpleNamespace()
    corpus = data.open_corpus(args.data, args.tokenizer, args.context_length)
    figure.open_seconds, figure.peak = time.perf_counter() - start, peak_bytes(torch.device("cpu"))
    figure.windows = len(corpus.train_set)
    some = RandomSampler(range(figure.windows), replacement=True, num_samples=1001)  # without a permutation
    batches = iter(DataLoader(corpus.train_set, batch_size=1, sampler=some))
    next(batches)
    file_bytes = (resident() - before)[1]  # the windows to come map pages that the system may take back
    for _ in batches:
        pass
    figure.bytes = (resident() - before)[0] + file_bytes
    before, start = resident(), time.perf_counter()
    order = iter(RandomSampler(range(figure.windows), generator=torch.Generator()))
    next(order)
    figure.order_seconds, figure.order_bytes = time.perf_counter() - start, (resident() - before)[0]
    return figure


def measure_data(text_megabytes, token_gigabytes):
    """Print the table of `data`; returns the figures of each corpus."""

    def in_new_process(function):
        with ProcessPoolExecutor(1, mp_context=torch.multiprocessing.get_context("spawn")) as pool:
            return pool.submit(function, args).result()

    figures, rows = [], []
    text = data.builtin_text().encode()
    flags = ["--preset", "tiny", "--device", "cpu", "--context-length", "1024", "--batch-size", "1"]
    corpora = [(size, "MB of text", "txt") for size in text_megabytes]
    for size, kind, ending in corpora + [(size, "GB of token ids", "npy") for size in token_gigabytes]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"corpus.{ending}")
            if ending == "txt":
                path.write_bytes(text * math.ceil(size * MB / len(text)))
            else:  # sparse: zeros that take no room
                np.lib.format.open_memmap(path, "w+", np.uint16, (int(size * 1e9) // 2,))
            args = script_args([*flags, "--data", str(path), "--max-steps", str(ENDLESS)])
            first = in_new_process(read_corpus) if ending == "txt" else None
            figure = min((in_new_process(read_corpus) for _ in range(3)), key=lambda each: each.order_seconds)
            figure.start_seconds = min(in_new_process(start_script) for _ in range(3))
            figure.peak = first and first.peak
        figures.append(figure)
        rows.append([f"{size:g} {kind}", figure.windows, first and first.open_seconds, first and first.peak / MB])
        rows[-1] += [figure.start_seconds, figure.order_seconds, figure.bytes / MB, figure.order_bytes / MB]
    header = ["corpus", "windows", "tokenizing, s", "its peak, MB", "start to the end of step 1, ids ready, s"]
    header += ["permutation in it, s", "data but the permutation, MB", "permutation, MB"]
    print_table("What a corpus costs each process: seconds after the imports, MB that stay resident", header, rows)
    return figures


# ----------------------------------------------------------------------------------------------------------------------
# The command


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    scaling = commands.add_parser("scaling", help="the scripts against a bare loop, DDP against DDP without all-reduce")
    ablate = commands.add_parser("ablate", help="each speed feature alone and all together: speed and peak memory")
    corpus = commands.add_parser("data", help="start-up and resident memory for small and large corpora (Linux)")
    gpu = commands.add_parser("gpu", help="scaling of gpt2 on GPUs, eager and compiled, and ablate")
    for command, minutes in ((scaling, 5), (ablate, 15), (gpu, 8)):
        command.add_argument("--seconds", type=float, default=0.5, help="of a block of steps (default: %(default)s)")
        command.add_argument("--pairs", type=int, default=10, help="of blocks, at most (default: %(default)s)")
        command.add_argument("--minutes", type=float, default=minutes, help="then it leaves out the rest (%(default)s)")
    for command, more in ((scaling, ["--dtype"]), (ablate, [])):
        for flag in ("--preset", "--context-length", "--batch-size", "--device", *more):
            command.add_argument(flag, dest=flag, metavar="VALUE", help="as in the scripts")
    scaling.add_argument("--compile", action="store_true", help="torch.compile (default: off)")
    scaling.add_argument("--processes", type=int, nargs="+", metavar="N", help="(default: 1, 2, 4 ... all GPUs)")
    scaling.add_argument("--accumulation", type=int, nargs="+", default=[1, 4, 16], metavar="N", help="(1 4 16)")
    corpus.add_argument("--text", type=float, nargs="*", default=[1, 10, 100], metavar="MB", help="(1 10 100)")
    corpus.add_argument("--tokens", type=float, nargs="*", default=[10], metavar="GB", help="in a sparse file (10)")
    return parser.parse_args()


def measure_speed(args, pace):
    """Run `scaling`, `ablate`, or for `gpu` both."""
    if args.command == "gpu" and not torch.cuda.is_available():
        sys.exit("error: gpu needs a CUDA GPU, there is none here")
    flags = [part for item in vars(args).items() if item[0].startswith("--") and item[1] for part in item]
    n_all = torch.cuda.device_count() if script_args(flags).device == "cuda" else 2
    if args.command == "scaling":
        processes = args.processes or [*(2**i for i in range(n_all.bit_length()) if 2**i < n_all), n_all]
        measure_scaling(flags + ["--compile"] * args.compile, processes, args.accumulation, pace)
        return
    if args.command == "gpu":
        flags = ["--preset", "gpt2"]
        for batch_size in (32, 16, 8, 4, 2, 1):  # the largest that fits, of the script and a bare loop at once
            large = [*flags, "--batch-size", str(batch_size)]
            with contextlib.suppress(Failed):
                compare_loops(hold_single, 1, large, 1, pace._replace(pairs=1))
                break
        for compiled in ([], ["--compile"]):
            measure_scaling([*large, *compiled], sorted({1, n_all}) if n_all > 1 else [], [1], pace)
    measure_ablation(flags, pace)


def main():
    args = parse_args()
    data.on_signals(data.end_quietly)  # an exception: no process and no file stays
    start = time.monotonic()
    if args.command == "data":
        if not BYTES_OF_IMPORTS:
            sys.exit("error: data reads the memory of a process from Linux's /proc, which is not here")
        print_facts()
        measure_data(args.text, args.tokens)
    else:
        measure_speed(args, Pace(args.seconds, args.pairs, start + 60 * args.minutes - 10))
    print(f"\n{time.monotonic() - start:.0f} s in all")
    if unforeseen := [failure for failure in map(str, FAILURES) if failure.startswith("error")]:
        sys.exit(unforeseen[0])  # not for want of time or memory


if __name__ == "__main__":
    main()
