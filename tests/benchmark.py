"""Measure how fast the scripts train, what DDP costs, what each speed feature gives and what a corpus costs.

    python tests/benchmark.py scaling                 # one and two processes (on GPUs: up to all), in five minutes
    python tests/benchmark.py ablate --preset gpt2 --context-length 256
    python tests/benchmark.py data
    python tests/benchmark.py gpu                     # scaling and ablate of gpt2 on GPUs, in eight minutes

A shared machine is fast at one moment and slow at the next. So nothing is compared across runs: two ways of taking a
step take turns in short blocks, and what counts is the ratio of their median speeds. The quartiles of the ratios of
neighbouring blocks stand behind it. Random token ids of the gpt2 vocabulary are as good as real ones for speed, so no
tokenizer is fetched.
"""

import argparse
import contextlib
import dataclasses
import gc
import importlib
import logging
import math
import os
import platform
import shlex
import signal
import socket
import sys
import tempfile
import time
from contextlib import nullcontext
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import data
import gpt
import train_ddp_spawn
import train_single_gpu

signal.signal(signal.SIGINT, signal.default_int_handler)  # the scripts changed it

VOCABULARY = {"bytes": 257, "gpt2": 50257}
ENDLESS = 10**6  # steps: more than a measurement takes, so that a script never comes to its end
LOG_EVERY = 10  # the scripts' default
LARGEST_BATCH = 64  # sequences; more fills a GPU no better
N_STARTS = 3  # of a script with the same data, of which the faster counts
MB = 1e6
UNFORESEEN = []  # reasons for which the command ends with an error, after all else is measured


class Failed(Exception):
    """A measurement that could not be made, and why; `unforeseen` if not for want of time or memory."""

    def __init__(self, reason, unforeseen=False):
        super().__init__(reason, unforeseen)
        self.reason, self.unforeseen = reason, unforeseen


class Finished(Exception):
    """Carries what was measured out of a script's endless loop."""


# ----------------------------------------------------------------------------------------------------------------------
# Numbers and tables


class Ratio(NamedTuple):
    """The speed of one way of taking a step over that of another, from blocks of both that took turns."""

    median: float  # the ratio of the medians
    low: float  # the quartiles of the ratios of neighbouring blocks
    high: float

    def __str__(self):
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def compare(seconds, other_seconds):
    """The `Ratio` of speeds from the seconds that blocks of each way took, pair by pair."""
    ratios = np.divide(other_seconds, seconds)
    low, high = np.percentile(ratios, (25, 75))
    return Ratio(float(np.median(other_seconds) / np.median(seconds)), float(low), float(high))


def allreduce_bytes(n_processes, gradient_bytes):
    """Bytes that each process sends to average `gradient_bytes` of gradients: a ring passes every part around twice."""
    return 2 * (n_processes - 1) / n_processes * gradient_bytes


def mfu(tokens_per_second, args, n_processes=1):
    """The share of the GPUs' dense 16-bit peak that the model uses, as text; n/a where the peak is not known."""
    peak = gpt.peak_flops(torch.cuda.get_device_name()) if args.device == "cuda" else None
    if peak is None:
        return "n/a"
    with torch.device("meta"):
        model = gpt.GPT(gpt.config_for(args, VOCABULARY[args.tokenizer]))
    return f"{tokens_per_second * gpt.flops_per_token(model) / (peak * n_processes):.1%}"


def print_table(title, header, rows):
    """Print a Markdown table; a number of thousands gets its commas, None is n/a."""

    def text(cell):
        if isinstance(cell, float):
            return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
        return "n/a" if cell is None else f"{cell:,}" if isinstance(cell, int) else str(cell)

    print(f"\n{title}\n\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(text(cell) for cell in row)} |")
    sys.stdout.flush()


def print_facts(args=None, words=""):
    """What the figures below depend on."""
    name, n_gpus = platform.processor() or platform.machine(), 0
    if args and args.device == "cuda":
        name, n_gpus = torch.cuda.get_device_name(), torch.cuda.device_count()
    elif Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(": ")[1] for line in lines if line.startswith("model name")), name)
    print(f"{f'{n_gpus} x ' if n_gpus else ''}{name}, {os.cpu_count()} CPU cores, {platform.system()}")
    print(f"Python {platform.python_version()}, torch {torch.__version__}")
    print("command: python", *map(shlex.quote, (os.path.relpath(sys.argv[0]), *sys.argv[1:])))
    if args:
        print(
            f"preset {args.preset}: {args.batch_size} x {args.context_length} tokens per process and forward pass, "
            f"device {args.device}, {words}",
            flush=True,
        )


# ----------------------------------------------------------------------------------------------------------------------
# Processes that measure


class Group:
    """`n` processes; each calls `start(rank, n, *arguments)` for a function, and answers with it what `ask` sends."""

    def __init__(self, start, n, *arguments):
        context = torch.multiprocessing.get_context("spawn")
        self.connections, self.processes = [], []
        for rank in range(n):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, start, rank, n, *arguments), daemon=True)
            process.start()
            there.close()
            self.connections.append(here)
            self.processes.append(process)

    def ask(self, *question, deadline=math.inf):
        """The answer of rank 0, when all have answered. Raises Failed if one could not, or at the `deadline`."""
        answers = {}
        for connection in self.connections:
            with contextlib.suppress(OSError):  # of one that died; it is found out below
                connection.send(question)
        while len(answers) < len(self.connections):
            timeout = None if deadline == math.inf else max(0, deadline - time.monotonic())
            ready = wait([c for c in self.connections if c not in answers], timeout)
            if not ready:
                raise Failed("no time left")
            for connection in ready:
                try:
                    answers[connection] = connection.recv()
                except (EOFError, ConnectionError):
                    raise Failed("a process was killed; out of memory?") from None
                if isinstance(failure := answers[connection], Failed):
                    if failure.unforeseen:
                        UNFORESEEN.append(failure.reason)
                    raise failure
        return answers[self.connections[0]]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def _serve(connection, start, rank, n, *arguments):
    # A signal shall end the process at once; a script would note it, and go on to its next log step.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    train_single_gpu.on_signal = train_ddp_spawn.on_signal = lambda handler: None
    logging.disable(logging.WARNING)  # of the compiler
    try:
        answer = start(rank, n, *arguments)
        while True:
            connection.send(answer(*connection.recv()))
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone
    except torch.OutOfMemoryError:
        connection.send(Failed("out of memory"))
    except (Exception, SystemExit) as error:
        connection.send(Failed(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", unforeseen=True))


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def script_args(flags, accumulation=1, n_processes=1):
    """What a script makes of `flags`, for steps of `accumulation` full forward passes in each process."""
    parser = argparse.ArgumentParser()
    gpt.add_flags(parser)
    args = gpt.resolve_flags(parser.parse_args(flags), for_ddp=n_processes > 1)
    args.global_batch_size = args.batch_size * accumulation * n_processes
    args.nproc, args.nnodes, args.node_rank = n_processes, 1, 0
    return args


def random_corpus(path, args, sequences_per_step):
    """Write random token ids, enough for two steps and for a validation set."""
    n_windows = max(2 * sequences_per_step, 2000)
    ids = np.random.default_rng(0).integers(0, VOCABULARY[args.tokenizer], n_windows * args.context_length * 10 // 9)
    np.save(path, ids.astype(np.uint16))


def without_vocabulary(name):
    """In place of `data.get_tokenizer`: a size, which is all that training on ready token ids asks of a tokenizer."""
    return SimpleNamespace(name=name, n_vocab=VOCABULARY[name])


def clock(device):
    """Seconds, read when the device has done all it was told."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def plan_blocks(step_seconds, pace):
    """(steps of a block, pairs of blocks) for steps of `step_seconds`; long blocks hold equally many log lines."""
    n_steps = max(1, round(pace.seconds / step_seconds))
    if n_steps > LOG_EVERY:
        n_steps -= n_steps % LOG_EVERY
    n_pairs = round(pace.pairs * pace.seconds / (n_steps * step_seconds))
    return n_steps, min(pace.pairs, max(3, n_pairs))


class Pace(NamedTuple):
    """How long to measure: seconds of a block, and the most pairs of blocks."""

    seconds: float
    pairs: int


def run_script(train, turns, *train_arguments):
    """Run a script's own `train`; the generator `turns` gets control before each step, and its result is returned.

    The scripts call `gpt.learning_rate(step, ...)` as a step begins, so that is where they can be held.
    """
    learning_rate, last_step = gpt.learning_rate, 0

    def hold(step, *rest):
        nonlocal last_step
        if step > last_step:
            last_step = step
            try:
                next(turns)
            except StopIteration as end:
                raise Finished(end.value) from None
        return learning_rate(step, *rest)

    gpt.learning_rate = hold
    gc.collect()  # the model before, whose memory this one needs
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # compiles the next model from scratch, of the same shape or not
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            train(*train_arguments)
    except Finished as finished:
        return finished.args[0]
    finally:
        gpt.learning_rate = learning_rate


# ----------------------------------------------------------------------------------------------------------------------
# scaling: the scripts' own loops


def start_single(rank, n_processes, flags, pace):
    """Answers an accumulation with seconds of blocks of train_single_gpu.py and of a bare loop, and a block's steps."""
    data.get_tokenizer = without_vocabulary

    def answer(accumulation):
        args = script_args(flags, accumulation)
        return run_script(train_single_gpu.train, single_turns(args, accumulation, pace), args)

    return answer


def single_turns(args, accumulation, pace):
    device = torch.device(args.device)
    yield
    yield  # the script has compiled and warmed up
    start = clock(device)
    yield
    n_steps, n_pairs = plan_blocks(clock(device) - start, pace)
    step = bare_step(args, accumulation, device)
    step()
    step()
    script, bare = [], []
    for _ in range(n_pairs):
        start = clock(device)
        for _ in range(n_steps):
            yield
        script.append(clock(device) - start)
        start = clock(device)
        for _ in range(n_steps):
            step()
        bare.append(clock(device) - start)
    return script, bare, n_steps


def bare_step(args, accumulation, device):
    """A function that takes a step and does nothing else: forward, backward, optimizer, over tensors in memory."""
    config = gpt.config_for(args, VOCABULARY[args.tokenizer])
    model = gpt.GPT(config).to(device)
    forward = torch.compile(model) if args.compile else model
    optimizer = torch.optim.AdamW(gpt.weight_decay_groups(model, 0.1), lr=1e-5, betas=(0.9, 0.95), fused=True)
    shape = (accumulation, args.batch_size, args.context_length + 1)
    batches = torch.randint(VOCABULARY[args.tokenizer], shape, device=device)
    batches = [(batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in batches]
    autocast = gpt.autocast_for(args)

    def step():
        for inputs, targets in batches:
            with autocast:
                loss = forward(inputs, targets).loss / accumulation
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def start_ddp(rank, n_processes, flags, pace):
    """Answers with seconds of blocks of train_ddp_spawn.py with and without all-reduce, a block's steps, bytes."""
    data.get_tokenizer = without_vocabulary
    wrapped = []

    def wrap(module, **options):
        wrapped[:] = [DDP(module, **options)]
        return wrapped[0]

    train_ddp_spawn.DDP = wrap

    def answer(accumulation, port):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        args = script_args(flags, accumulation, n_processes)
        turns = ddp_turns(wrapped, train_ddp_spawn.pick_device(args.device, rank, n_processes), pace)
        result = run_script(train_ddp_spawn.train, turns, rank, n_processes, args)
        wrapped.clear()
        train_ddp_spawn.cleanup()
        return result

    return answer


def ddp_turns(wrapped, device, pace):
    def now():
        """Seconds, read when all processes have come here."""
        clock(device)
        dist.barrier()
        return time.perf_counter()

    yield
    yield  # DDP has put its buckets in order, and the script has compiled
    with wrapped[0].no_sync():
        yield
    start = now()
    yield
    n_steps, n_pairs = plan_blocks(max(train_ddp_spawn.gather(now() - start)), pace)  # the same for all
    averaging, apart, sent = [], [], []
    for _ in range(n_pairs):
        # no_sync() around the loop's own: no step averages, and the replicas drift apart, which costs no time.
        for seconds, context in ((averaging, nullcontext()), (apart, wrapped[0].no_sync())):
            with context:
                start, start_bytes = now(), bytes_written()
                for _ in range(n_steps):
                    yield
                seconds.append(now() - start)
                sent.append((bytes_written() - start_bytes) / n_steps)
    n_bytes = float(np.median(sent[::2]) - np.median(sent[1::2]))
    gradient_bytes = sum(p.numel() * p.element_size() for p in wrapped[0].parameters())
    return averaging, apart, n_steps, n_bytes if device.type == "cpu" and bytes_written() else None, gradient_bytes


def bytes_written():
    """Bytes that this process has handed to write(), sockets included; 0 where the system does not count them."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("wchar: "):
                return int(line.split()[1])
    return 0


def measure_scaling(flags, processes, accumulations, pace, deadline=math.inf, ddp=True):
    """Print the tables of `scaling`; returns {("single" or processes, accumulation): SimpleNamespace}."""
    args = script_args(flags)
    tokens = args.batch_size * args.context_length
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokens.npy")
        random_corpus(path, args, args.batch_size * max(accumulations) * max(processes))
        flags = [*flags, "--data", str(path), "--max-steps", str(ENDLESS), "--eval-every", str(ENDLESS)]
        flags += ["--log-every", str(LOG_EVERY)]

        rows = []
        if 1 in processes:
            with Group(start_single, 1, flags, pace) as group:
                for accumulation in accumulations:
                    try:
                        script, bare, n_steps = group.ask(accumulation, deadline=deadline)
                    except Failed as failure:
                        rows.append([accumulation, failure.reason, "", "", ""])
                        break
                    block = n_steps * accumulation * tokens
                    figure = SimpleNamespace(speed=block / np.median(script), ratio=compare(script, bare))
                    figures["single", accumulation] = figure
                    rows.append([accumulation, figure.speed, block / np.median(bare), figure.ratio])
                    rows[-1].append(mfu(figure.speed, args))
            print_table(
                "train_single_gpu.py against a bare loop of forward, backward and optimizer over tensors in memory",
                ["accumulation", "script, tokens/s", "bare loop, tokens/s", "script over bare loop (quartiles)", "MFU"],
                rows,
            )

        rows = []
        for n in processes if ddp else []:
            with Group(start_ddp, n, flags, pace) as group:
                for accumulation in accumulations:
                    try:
                        averaging, apart, n_steps, n_bytes, gradient_bytes = group.ask(
                            accumulation, free_port(), deadline=deadline
                        )
                    except Failed as failure:
                        rows.append([n, accumulation, failure.reason, *[""] * 6])
                        break
                    block = n_steps * accumulation * tokens * n
                    figures[n, accumulation] = figure = SimpleNamespace(
                        speed=block / np.median(averaging),
                        ratio=compare(averaging, apart),
                        bytes=n_bytes,
                        paper_bytes=allreduce_bytes(n, gradient_bytes),
                    )
                    one = figures.get((1, accumulation))
                    rows.append([n, accumulation, figure.speed, block / np.median(apart), figure.ratio])
                    rows[-1].append(f"{figure.speed / one.speed:.2f}" if one else None)
                    rows[-1].append(None if n_bytes is None else round(n_bytes) / MB)
                    rows[-1] += [figure.paper_bytes / MB, mfu(figure.speed, args, n)]
        if ddp:
            print_table(
                "train_ddp_spawn.py against the same steps without all-reduce (bytes: sent by a process in a step)",
                [
                    "processes",
                    "accumulation",
                    "DDP, tokens/s",
                    "no all-reduce, tokens/s",
                    "efficiency (quartiles)",
                    "times 1 process",
                    "MB sent",
                    "MB on paper",
                    "MFU",
                ],
                rows,
            )
    return figures


# ----------------------------------------------------------------------------------------------------------------------
# ablate: one feature at a time

TF32, AUTOCAST, FUSED, SDPA = "TF32", "autocast", "fused AdamW", "SDPA"
PADDED, PARTS, COMPILE = "padded vocabulary", "loss in parts", "compile"
DDP_ON, COMPILE_FIRST, VIEWS = "DDP", "compile, then DDP", "bucket views"
SCRIPT = {TF32, FUSED, SDPA, PADDED, PARTS}  # what the scripts do with --dtype float32


def spelled_out_attention(queries, keys, values, dropout_p=0.0, is_causal=True):
    """Causal attention as a textbook writes it: all scores at once, (batch, n_heads, n_tokens, n_tokens)."""
    n_tokens = queries.shape[-2]
    scores = queries @ keys.transpose(-2, -1) / math.sqrt(queries.shape[-1])
    future = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=queries.device).triu(1)
    weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
    return F.dropout(weights, dropout_p) @ values


def start_steps(rank, n_processes, flags, features, port=None):
    """Answers a number of steps with their seconds and the peak memory, in bytes beyond that after the imports."""
    args = script_args(flags)
    device = train_ddp_spawn.pick_device(args.device, rank, n_processes)
    if DDP_ON in features:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        train_ddp_spawn.setup(rank, n_processes, device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if TF32 in features else "highest")
    if SDPA not in features:
        F.scaled_dot_product_attention = spelled_out_attention
    n_vocab = VOCABULARY[args.tokenizer]
    config = gpt.config_for(args, n_vocab)
    config = config if PADDED in features else dataclasses.replace(config, vocab_size=n_vocab)

    torch.manual_seed(0)
    idle_bytes = peak_bytes(device)
    model = gpt.GPT(config).to(device)
    forward = torch.compile(model) if COMPILE_FIRST in features else model
    if DDP_ON in features:
        gpu = [device.index] if device.type == "cuda" else None
        forward = DDP(forward, device_ids=gpu, gradient_as_bucket_view=VIEWS in features)
    forward = torch.compile(forward) if COMPILE in features else forward
    groups = gpt.weight_decay_groups(model, 0.1)
    optimizer = torch.optim.AdamW(groups, lr=1e-5, betas=(0.9, 0.95), fused=True if FUSED in features else None)
    dtype = torch.float16 if args.dtype == "float16" else torch.bfloat16
    autocast = torch.autocast(device.type, dtype, enabled=AUTOCAST in features)
    tokens = torch.randint(n_vocab, (args.batch_size, args.context_length + 1), device=device)

    def step(tokens):
        inputs, targets = tokens[:, :-1], tokens[:, 1:].contiguous()
        with autocast:
            if PARTS in features:
                loss = forward(inputs, targets).loss
            else:
                logits = forward(inputs).logits  # kept to the end of the step, as in a loop whose model returns them
                loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def answer(n_steps, batch_size):
        batch = tokens.repeat(math.ceil(batch_size / len(tokens)), 1)[:batch_size]
        step(batch)  # warms up, after a while without a turn too
        if n_steps == 0:
            forget_peak(device)
            return None
        start = clock(device)
        for _ in range(n_steps):
            step(batch)
        seconds = clock(device) - start
        peak = peak_bytes(device) - idle_bytes
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the others on this GPU need the room
        return seconds, peak

    return answer


def peak_bytes(device):
    """The most memory that this process has had: on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):
        return memory("VmHWM")
    import resource  # neither on Windows, nor on Linux, where a new process inherits this figure from its parent

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def forget_peak(device):
    """Let `peak_bytes` start anew, so that compiling does not count."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def memory(field):
    """Bytes of this process from Linux's /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise OSError(f"no {field} in /proc/self/status")


def start_ways(flags, features, n_processes=1):
    port = free_port() if DDP_ON in features else None
    return Group(start_steps, n_processes, flags, features, port)


def measure_ways(title, flags, baseline, ways, pace, deadline=math.inf, n_processes=1):
    """Print a table of `ways`, {name: features}, over `baseline`, (name, features); returns {name: SimpleNamespace}."""
    args = script_args(flags)
    batch = args.batch_size
    tokens = batch * args.context_length * n_processes
    rows, figures = [], {}
    name, features = baseline
    header = ["", "tokens/s", "speed over the first row (quartiles)", "peak memory, MB", "over the first row", "MFU"]
    with start_ways(flags, features, n_processes) as first:
        try:
            first.ask(0, batch, deadline=deadline)
            step_seconds, first_bytes = first.ask(1, batch, deadline=deadline)
        except Failed as failure:
            print_table(title, header, [[name, failure.reason, "", "", "", ""]])
            return figures
        n_steps, n_pairs = plan_blocks(step_seconds, pace)
        speed = tokens / step_seconds
        for way, way_features in ways.items():
            with start_ways(flags, way_features, n_processes) as second:
                seconds, first_seconds = [], []
                try:
                    second.ask(0, batch, deadline=deadline)
                    for _ in range(n_pairs):
                        first_seconds.append(first.ask(n_steps, batch, deadline=deadline)[0])
                        way_seconds, way_bytes = second.ask(n_steps, batch, deadline=deadline)
                        seconds.append(way_seconds)
                except Failed as failure:
                    rows.append([way, failure.reason, "", "", "", ""])
                    continue
            speed = n_steps * tokens / np.median(first_seconds)
            way_speed = n_steps * tokens / np.median(seconds)
            ratio = compare(seconds, first_seconds)
            figures[way] = SimpleNamespace(speed=way_speed, ratio=ratio, bytes=way_bytes, first_bytes=first_bytes)
            rows.append([way, way_speed, ratio, way_bytes / MB, f"{way_bytes / first_bytes:.2f}"])
            rows[-1].append(mfu(way_speed, args, n_processes))
    rows.insert(0, [name, speed, "1", first_bytes / MB, "1", mfu(speed, args, n_processes)])
    print_table(title, header, rows)
    return figures


def measure_ablation(flags, n_processes, pace, deadline=math.inf):
    """Print the tables of `ablate`; returns the figures of each."""
    on_cuda = script_args(flags).device == "cuda"
    features = [*([TF32] if on_cuda else []), AUTOCAST, FUSED, SDPA, PADDED, PARTS, COMPILE]
    alone = measure_ways(
        "Each feature alone",
        flags,
        ("float32, and none of them", set()),
        {**{feature: {feature} for feature in features}, "all together": set(features)},
        pace,
        deadline,
    )
    half = AUTOCAST if on_cuda else "--dtype bfloat16"
    compiled = SCRIPT | {DDP_ON, VIEWS} | ({AUTOCAST} if on_cuda else set())
    processes = "1 process" if n_processes == 1 else f"{n_processes} processes"
    ddp = measure_ways(
        f"How DDP wraps the model, {processes}",
        flags,
        ("DDP, then compile, with bucket views: the scripts", compiled | {COMPILE}),
        {COMPILE_FIRST: compiled | {COMPILE_FIRST}, "no bucket views": compiled - {VIEWS} | {COMPILE}},
        pace,
        deadline,
        n_processes,
    )
    flagged = measure_ways(
        "The scripts' flags",
        flags,
        ("--dtype float32", SCRIPT),
        {half: SCRIPT | {AUTOCAST}, "--compile": SCRIPT | {COMPILE}, "both": SCRIPT | {AUTOCAST, COMPILE}},
        pace,
        deadline,
    )
    return alone, ddp, flagged


# ----------------------------------------------------------------------------------------------------------------------
# data: what a corpus costs


def start_run(rank, n_processes, flags):
    """Answers with the seconds from the call of train_single_gpu.py to the end of its first step, and peak memory."""

    importlib.import_module("torch._dynamo")  # else the first optimizer imports it, in the time that a start takes

    def turns(device):
        yield
        clock(device)

    def answer():
        args = script_args(flags)
        torch.set_num_threads(1)  # the step itself is of no interest, and waking threads takes a while
        before = memory("VmRSS")
        forget_peak(torch.device("cpu"))
        start = time.perf_counter()
        train_single_gpu.prepare(args)  # as its main() does
        prepared, peak = time.perf_counter() - start, memory("VmHWM") - before
        run_script(train_single_gpu.train, turns(torch.device(args.device)), args)
        return time.perf_counter() - start, prepared, peak

    return answer


def start_loader(rank, n_processes, flags):
    """Answers with the windows of a corpus and the bytes that stay resident.

    These are (its own memory, mapped pages of the file) with the first batch, and the same after 1,000 windows more.
    """

    def answer():
        args = script_args(flags)
        next(iter(DataLoader([torch.zeros(1)])))  # code that any loader brings into memory
        before = np.array([memory("RssAnon"), memory("RssFile")])
        corpus = data.open_corpus(args.data, args.tokenizer, args.context_length)
        sampler = RandomSampler(corpus.train_set, generator=torch.Generator())
        batches = iter(DataLoader(corpus.train_set, batch_size=1, sampler=data.SkipSampler(sampler)))
        next(batches)
        first = np.array([memory("RssAnon"), memory("RssFile")])
        for _, _ in zip(range(1000), batches):
            pass
        later = np.array([memory("RssAnon"), memory("RssFile")])
        return len(corpus.train_set), first - before, later - before

    return answer


def start_permutation(rank, n_processes, n_windows, n_ranks):
    """Answers with the seconds and the resident bytes of an epoch's permutation alone, with PyTorch's own samplers."""

    def answer():
        torch.randperm(10)
        before, start = memory("RssAnon"), time.perf_counter()
        if n_ranks == 1:
            sampler = RandomSampler(range(n_windows), generator=torch.Generator())
        else:
            sampler = DistributedSampler(range(n_windows), num_replicas=n_ranks, rank=0)
        indices = iter(sampler)
        next(indices)
        return time.perf_counter() - start, memory("RssAnon") - before

    return answer


def ask_new(start, *arguments):
    with Group(start, 1, *arguments) as group:
        return group.ask()


def measure_data(flags, text_megabytes, token_gigabytes):
    """Print the table of `data`; returns {name of the corpus: SimpleNamespace}."""
    figures, rows = {}, []
    with tempfile.TemporaryDirectory() as folder:
        corpora = {}
        text = data.builtin_text().encode()
        for size in text_megabytes:
            path = corpora[f"{size:g} MB of text"] = Path(folder, f"{size}.txt")
            with open(path, "wb") as file:
                for _ in range(math.ceil(size * MB / len(text))):
                    file.write(text)
        for size in token_gigabytes:
            path = corpora[f"{size:g} GB of token ids"] = Path(folder, f"{size}.npy")
            np.lib.format.open_memmap(path, "w+", np.uint16, (int(size * 1e9) // 2,))  # sparse: zeros that take no room
        for name, path in corpora.items():
            run_flags = [*flags, "--data", str(path), "--batch-size", "1"]
            first, peak = (None, None)
            if path.suffix == ".txt":
                _, first, peak = ask_new(start_run, run_flags)
            later = min(ask_new(start_run, run_flags)[0] for _ in range(N_STARTS))
            n_windows, resident, resident_later = ask_new(start_loader, run_flags)
            permutations = [ask_new(start_permutation, n_windows, 1) for _ in range(N_STARTS)]
            permutation, permutation_bytes = min(permutations)
            _, shared_bytes = ask_new(start_permutation, n_windows, 2)
            path.unlink()
            figures[name] = figure = SimpleNamespace(
                first_seconds=first,
                first_bytes=peak,
                start_seconds=later - permutation,
                permutation_seconds=permutation,
                data_bytes=max(resident_later[0], resident[0]) + resident[1] - permutation_bytes,
                permutation_bytes=permutation_bytes,
            )
            rows.append([name, n_windows, first, peak and peak / MB, later, permutation, figure.data_bytes / MB])
            rows[-1] += [permutation_bytes / MB, shared_bytes / MB, (resident_later[1] - resident[1]) / 1000 / 1000]
    print_table(
        "What a corpus costs each process: seconds after the imports, MB that stay resident",
        [
            "corpus",
            "windows",
            "tokenizing, s",
            "its peak, MB",
            "start to the end of step 1, ids ready, s",
            "permutation in it, s",
            "data but the permutation, MB",
            "permutation, MB",
            "permutation of a rank of 2, MB",
            "file pages mapped per window read, KB",
        ],
        rows,
    )
    print("\nThe system shares file pages between processes, and takes them back when it needs room.")
    print(f"The permutation takes {figures[name].permutation_bytes / n_windows:.0f} bytes per window in one process.")
    print_growth(list(figures.values()))
    return figures


def print_growth(figures):
    """Say what grows from the smallest to the largest corpus by more than measuring is uncertain."""
    texts = [figure for figure in figures if figure.first_seconds is not None]
    columns = {
        "seconds of tokenizing": ([f.first_seconds for f in texts], 1),
        "memory of tokenizing": ([f.first_bytes for f in texts], 100 * MB),
        "seconds of a later start without the permutation": ([f.start_seconds for f in figures], 1),
        "seconds of the permutation": ([f.permutation_seconds for f in figures], 0.1),
        "memory of the data without the permutation": ([f.data_bytes for f in figures], 100 * MB),
        "memory of the permutation": ([f.permutation_bytes for f in figures], 10 * MB),
    }
    grows, stays = [], []
    for name, (values, uncertainty) in columns.items():
        if values:
            (grows if max(values) - min(values) > uncertainty else stays).append(name)
    print(f"Grows with the corpus: {', '.join(grows) or 'nothing'}.\nDoes not: {', '.join(stays) or 'nothing'}.")


# ----------------------------------------------------------------------------------------------------------------------
# The command


def largest_batch(flags, deadline):
    """The largest power of two, up to LARGEST_BATCH, of sequences that fit the GPU in a step of the scripts."""
    room = torch.cuda.get_device_properties(0).total_memory
    fitting = 1
    with start_ways([*flags, "--batch-size", "1"], SCRIPT | {AUTOCAST}) as group, contextlib.suppress(Failed):
        while fitting < LARGEST_BATCH:
            group.ask(0, 2 * fitting, deadline=deadline)
            if group.ask(1, 2 * fitting, deadline=deadline)[1] > 0.8 * room:
                break  # the script's model and the bare loop's must both fit
            fitting *= 2
    return fitting


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    scaling = commands.add_parser("scaling", help="the scripts against a bare loop, DDP against DDP without all-reduce")
    ablate = commands.add_parser("ablate", help="each speed feature alone and all together: speed and peak memory")
    corpus = commands.add_parser("data", help="start-up and resident memory for small and large corpora (Linux)")
    gpu = commands.add_parser("gpu", help="scaling and ablate of gpt2 on GPUs: 16 bits, compiled, the largest batch")
    for command in (scaling, ablate):
        command.add_argument("--preset", choices=gpt.PRESETS, help="(default: tiny on a CPU, small on a GPU)")
        command.add_argument("--context-length", metavar="TOKENS", help="(default: the preset's)")
        command.add_argument("--batch-size", metavar="SEQUENCES", help="(default: the preset's)")
        command.add_argument("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    scaling.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: %(default)s)")
    scaling.add_argument("--compile", action="store_true", help="torch.compile (default: off)")
    scaling.add_argument("--processes", type=int, nargs="+", metavar="N", help="(default: 1, 2, 4 ... all GPUs)")
    for command in (scaling, gpu):
        command.add_argument("--accumulation", type=int, nargs="+", default=[1, 4, 16], metavar="N", help="(1 4 16)")
    gpu.set_defaults(processes=None)
    ablate.add_argument("--processes", type=int, metavar="N", help="of the DDP table (default: all GPUs, 2 on a CPU)")
    for command, minutes in ((scaling, 5), (ablate, 15), (gpu, 8)):
        command.add_argument("--seconds", type=float, default=0.5, help="of a block of steps (default: %(default)s)")
        command.add_argument("--pairs", type=int, default=10, help="of blocks, at most (default: %(default)s)")
        command.add_argument(
            "--minutes", type=float, default=minutes, help="after which what is missing is left out (%(default)s)"
        )
    corpus.add_argument("--text", type=float, nargs="*", default=[1, 10, 100], metavar="MB", help="(1 10 100)")
    corpus.add_argument("--tokens", type=float, nargs="*", default=[10], metavar="GB", help="in a sparse file (10)")
    corpus.add_argument("--tokenizer", choices=VOCABULARY, default="bytes", help="(default: %(default)s)")
    return parser.parse_args()


def main():
    args = parse_args()
    start = time.monotonic()
    if args.command == "data":
        if not Path("/proc/self/status").exists():
            sys.exit("error: data reads the memory of a process from Linux's /proc, which is not here")
        print_facts()
        flags = ["--preset", "tiny", "--device", "cpu", "--context-length", "1024", "--tokenizer", args.tokenizer]
        measure_data(flags, args.text, args.tokens)
    else:
        try:
            measure_speed(args, Pace(args.seconds, args.pairs), start + 60 * args.minutes - 10)
        except ValueError as error:
            sys.exit(f"error: {error}")
    print(f"\n{time.monotonic() - start:.0f} s in all")
    if UNFORESEEN:
        sys.exit(f"error: not all could be measured: {UNFORESEEN[0]}")


def measure_speed(args, pace, deadline):
    """Run `scaling`, `ablate`, or for `gpu` both."""
    n_gpus = 0 if getattr(args, "device", "cuda") == "cpu" else torch.cuda.device_count()
    n_all = n_gpus or 2
    powers = [2**i for i in range(n_all.bit_length()) if 2**i < n_all]
    if args.command == "gpu":
        if not torch.cuda.is_available():
            sys.exit("error: gpu needs a CUDA GPU, there is none here")
        flags, processes = ["--preset", "gpt2"], sorted({1, n_all})
        scaling_flags = [*flags, "--batch-size", str(largest_batch(flags, deadline)), "--compile"]
    else:
        flags, processes = ["--device", args.device], [*powers, n_all]
        for name in ("preset", "context_length", "batch_size"):
            if getattr(args, name) is not None:
                flags += [f"--{name.replace('_', '-')}", getattr(args, name)]
        scaling_flags = flags + (["--dtype", args.dtype, *["--compile"] * args.compile] if "dtype" in args else [])
    if args.command != "ablate":
        script = script_args(scaling_flags)
        print_facts(script, f"{script.dtype}{', compiled' if script.compile else ''}")
        half_time = (time.monotonic() + deadline) / 2 if args.command == "gpu" else deadline
        measure_scaling(scaling_flags, args.processes or processes, args.accumulation, pace, half_time)
    if args.command != "scaling":
        print_facts(script_args(flags), "16 bits, TF32 and the compiler where the row says so")
        measure_ablation(flags, args.processes or n_all, pace, deadline)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(128 + signal.SIGINT)
