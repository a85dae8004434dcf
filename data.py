"""What a run reads and what it leaves: text, tokens and windows; a log, metrics and checkpoints.

Nothing here talks to other processes. To tokenize ahead of a run, or to join many files:

    python data.py corpus.txt                         # writes corpus.txt.gpt2.npy, which --data corpus.txt then uses
    python data.py a.txt b.txt --output tokens.npy    # for --data tokens.npy; <|endoftext|> ends each file
"""

import argparse
import codecs
import contextlib
import csv
import hashlib
import io
import itertools
import math
import os
import platform
import re
import shlex
import signal
import sys
import tempfile
import time
import weakref
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tiktoken
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch.utils.data import Dataset

try:
    import fcntl
except ImportError:  # Windows has no such locks, and goes on without
    fcntl = None

TOKENIZERS = ("bytes", "gpt2")
END_OF_TEXT = "<|endoftext|>"
BLOCK_BYTES = 2**18  # read at once; memory grows with this and the number of threads, not with the file
N_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()  # that we may use
N_THREADS = min(N_CORES, 16)  # that tokenize; more would only wait for the one that writes the ids
HEADER_BYTES = 128  # numpy pads the header of a flat array to this for any length


def get_tokenizer(name):
    """The tokenizer "bytes" (256 byte values and <|endoftext|>, no download) or "gpt2", both a `tiktoken.Encoding`.

    tiktoken fetches the gpt2 vocabulary at its first use; OSError says what to do where it cannot.
    """
    if name == "bytes":
        return tiktoken.Encoding(
            "bytes",
            pat_str=r"(?s:.{1,32})",  # any cut will do: no two bytes merge
            mergeable_ranks={bytes([value]): value for value in range(256)},
            special_tokens={END_OF_TEXT: 256},
        )
    if name != "gpt2":
        raise ValueError(f"there is no tokenizer {name!r}: it is bytes or gpt2")
    try:
        return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # no network, or a damaged file in the cache
        raise OSError(
            "the gpt2 vocabulary could not be fetched: connect to the network once, or set TIKTOKEN_CACHE_DIR to a "
            f"folder that tiktoken filled elsewhere, or choose --tokenizer bytes ({type(error).__name__})"
        ) from error


def load_tokens(path, tokenizer):
    """The token ids of a corpus as one flat integer array of shape (n_tokens,), a memory map where there is a file.

    `path` is a UTF-8 text file, a ready `.npy` of integers, a `.bin` of uint16 as nanoGPT or llm.c write it, or None
    for the text that comes with Python. A text file is tokenized once, into `<path>.<tokenizer>.npy` beside it, ended
    by <|endoftext|>. Those ids are used again while the text keeps its size and modification time (a change that keeps
    both is not seen). Raises ValueError or OSError with the reason and the way out.
    """
    if path is None:
        return np.array([*tokenizer.encode_ordinary(builtin_text()), tokenizer.eot_token])
    path = Path(path)
    _check_file(path)
    if path.suffix == ".npy":
        tokens, stamp = _open_npy(path)
        made_with = stamp.split(b" ")[0].decode(errors="replace")
        if made_with in TOKENIZERS and made_with != tokenizer.name:  # a file from elsewhere says nothing
            raise ValueError(f"{path} was made with --tokenizer {made_with}: give the same, not {tokenizer.name}")
        return tokens
    if path.suffix == ".bin":
        return _open_bin(path)

    lock = fcntl and Lock(path, wait=True)  # of several processes one tokenizes, and the others wait for its file
    cache = Path(f"{path}.{tokenizer.name}.npy")
    stamp = _stamp(tokenizer, path)
    with contextlib.suppress(OSError, ValueError):
        tokens, found = _open_npy(cache)
        if found == stamp:
            return tokens
    try:
        write_tokens([path], tokenizer, cache, stamp)
    except OSError as error:
        if error.filename == str(path):
            raise
        command = f"python data.py {shlex.quote(str(path))} --tokenizer {tokenizer.name} --output tokens.npy"
        raise OSError(f"{error}; tokenize with {command}, and give --data tokens.npy") from error
    finally:
        del lock  # also from the error, which may be kept
    return _open_npy(cache)[0]


class Lock:
    """Holds a file or folder against other processes for as long as it, or its process, lives.

    BlockingIOError where another process holds it, unless this one shall `wait`. Some network file systems, and
    Windows, have no such locks: there it holds nothing.
    """

    def __init__(self, path, wait):
        descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if isinstance(error, BlockingIOError):
                raise


def builtin_text():
    """The language reference inside CPython, half a megabyte of English. It differs between Python releases."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _check_file(path):
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: join its files with python data.py FILE... --output tokens.npy")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty")


def _open_npy(path):
    """The array in a `.npy`, and the stamp that may follow it, where np.load does not look."""
    try:
        tokens = np.load(path, mmap_mode="r")
        dtype, shape = tokens.dtype, tokens.shape
    except OSError:
        raise
    except Exception as error:  # np.load fails in as many ways as a file can be broken
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} is no .npy file of token ids, or it is damaged: {reason}") from error
    if dtype.kind not in "iu" or len(shape) != 1:
        raise ValueError(f"{path} must hold whole numbers in one dimension; it holds {dtype} of shape {shape}")
    with open(path, "rb") as file:
        file.seek(tokens.offset + tokens.nbytes)
        return tokens, file.read(100)


def _open_bin(path):
    size, header = path.stat().st_size, np.fromfile(path, dtype="<i4", count=3)
    offset = 1024 if len(header) == 3 and header[0] == 20240520 else 0  # llm.c: magic number, version, number of ids
    if size % 2 or size <= offset:
        raise ValueError(f"{path} is no file of uint16 ids: its {size:,} bytes are an odd number, or too few")
    tokens = np.memmap(path, dtype="<u2", mode="r", offset=offset)
    if len(tokens) > 1000 and not tokens[1:100_000:2].any():
        raise ValueError(f"{path} holds ids of 32 bits, every second half is 0: write them as uint16, or as .npy")
    return tokens


def _stamp(tokenizer, source=None):
    """What a token array was made from, as the bytes that follow it in its file."""
    stat = source and source.stat()
    return f"{tokenizer.name} {stat.st_size} {stat.st_mtime_ns}".encode() if source else tokenizer.name.encode()


def write_tokens(paths, tokenizer, output, stamp=b""):
    """Tokenize text files into one `.npy` of uint16, <|endoftext|> after each; returns the number of tokens.

    The ids are those of each whole text at once, on all cores, in memory that does not grow with the text. `stamp`
    follows them in the file; without one, the tokenizer is noted there. The file is renamed into place when it is
    complete, so several processes may write the same one. Raises ValueError with the byte offset for text that is not
    UTF-8, and OSError where a text cannot be read (`filename` is then its path) or the output cannot be written.
    """
    if tokenizer.n_vocab > 2**16:
        raise ValueError(f"uint16 holds ids up to 65,535, the tokenizer {tokenizer.name} has {tokenizer.n_vocab:,}")
    temporary = Path(f"{output}.{os.urandom(4).hex()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.seek(HEADER_BYTES)
            for ids in itertools.chain.from_iterable(_encode(path, tokenizer) for path in paths):
                file.write(np.asarray(ids, dtype="<u2").tobytes())
            n_tokens = (file.tell() - HEADER_BYTES) // 2
            file.write(stamp or _stamp(tokenizer))
            file.seek(0)
            np.lib.format.write_array_header_1_0(file, {"descr": "<u2", "fortran_order": False, "shape": (n_tokens,)})
            assert file.tell() == HEADER_BYTES
        os.replace(temporary, output)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.filename not in map(str, paths):
            raise OSError(f"cannot write {output}: {error.strerror}") from error
        raise
    return n_tokens


def _encode(path, tokenizer):
    """The ids of a text file and <|endoftext|> after them, in lists or arrays."""
    if tokenizer.name == "bytes":  # a byte is its own id
        yield from (np.frombuffer(text.encode(), dtype=np.uint8) for text in _texts(path))
    else:
        pieces = _pieces(path)
        while batch := list(itertools.islice(pieces, N_THREADS)):
            if any(len(piece) > 999_999 and ENDLESS_SPACE.search(piece) for piece in batch):
                raise ValueError(f"{path} has a million white-space characters in a row, more than tiktoken can take")
            yield from tokenizer.encode_ordinary_batch(batch, num_threads=N_THREADS)
    yield [tokenizer.eot_token]


def _texts(path):
    """The text of a file in blocks; ValueError with the place if it is not UTF-8."""
    with open(path, "rb") as file:
        try:
            yield from codecs.iterdecode(_blocks(file, path), "utf-8")
        except UnicodeDecodeError as error:
            byte = file.tell() - len(error.object) + error.start
            raise ValueError(f"{path} is not UTF-8 text: byte {byte:,} ({error.reason}); convert it first") from None


def _blocks(file, path):
    """The bytes of an open file in blocks. Where that takes long, stderr hears every five seconds how far it is."""
    size, begun = os.path.getsize(path), time.monotonic()
    next_word = begun + 2
    while block := file.read(BLOCK_BYTES):
        yield block
        if (now := time.monotonic()) > next_word:
            done, speed, next_word = file.tell(), file.tell() / (now - begun), now + 5
            left = timedelta(seconds=max(0, round((size - done) / speed)))
            text = f"{path}: {done / 1e6:,.0f} of {size / 1e6:,.0f} MB tokenized, {speed / 1e6:,.1f} MB/s, {left} left"
            say(text, sys.stderr)


# No token of GPT-2 crosses from a character that is not white space to one that is, so a cut there changes no ids.
# Greedy: the last such place of a block. tiktoken's stack overflows at a million characters of white space with text
# after them. Python's \s also holds \x1c to \x1f, which are symbols to tiktoken.
LAST_CUT = re.compile(r"(?s:.*)\S(?=[ \t\r\n])")
ENDLESS_SPACE = re.compile(r"(?<!{0}){0}{{999999,}}(?!{0}|\Z)".format(r"[^\S\x1c-\x1f]"))


def _pieces(path):
    """The text of a file in pieces of about BLOCK_BYTES, longer only where it has no place to cut."""
    held = []  # text that waits for a place to cut
    for text in _texts(path):
        if cut := LAST_CUT.match(text):
            yield "".join([*held, text[: cut.end()]])
            held = [text[cut.end() :]]
        else:
            held.append(text)
    yield "".join(held)


def fingerprint(tokens):
    """A hash, as 12 hexadecimal digits, of the length and of 64 evenly spaced blocks: cheap at any size.

    Two corpora that differ only between the blocks (above a million tokens) have the same one.
    """
    digest = hashlib.sha256(str(len(tokens)).encode())
    for block in _spaced_blocks(tokens):
        digest.update(block.astype("<i8").tobytes())
    return digest.hexdigest()[:12]


def _spaced_blocks(tokens, n_blocks=64, block_tokens=2**14):
    starts = np.linspace(0, max(0, len(tokens) - block_tokens), n_blocks).astype(np.int64)
    return (tokens[start : start + block_tokens] for start in np.unique(starts))


class TokenDataset(Dataset):
    """Windows of T = `context_length` tokens: number i is `tokens[i*T : i*T + T + 1]` as (inputs, targets).

    Both are int64 of shape (T,); the targets are the inputs one token later. Each token but the first is a target at
    most once, and fewer than T tokens are left over at the end. Raises ValueError for ids outside 0 to `n_vocab` - 1:
    at once where a look at 64 blocks shows one (all of a corpus up to a million tokens), else when it is fetched.
    """

    def __init__(self, tokens, context_length, n_vocab):
        self.windows = sliding_window_view(tokens, context_length + 1)[::context_length]  # (n_windows, T + 1), no copy
        self.n_vocab = n_vocab
        for block in _spaced_blocks(tokens):
            self._check(block)

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        """A batch at once: DataLoader calls this in place of one `__getitem__` for each window."""
        rows = self.windows[indices]  # (batch, T + 1)
        self._check(rows)
        rows = torch.from_numpy(rows.astype(np.int64))
        return list(zip(rows[:, :-1], rows[:, 1:]))

    def _check(self, ids):
        if ids.min() < 0 or ids.max() >= self.n_vocab:
            wrong = ids[(ids < 0) | (ids >= self.n_vocab)][0]
            raise ValueError(
                f"the corpus holds the token id {wrong}, the tokenizer's ids are 0 to {self.n_vocab - 1}: choose the "
                "--tokenizer that the file was made with"
            )


def split_tokens(tokens, context_length, n_vocab):
    """The training and the validation set: the last 10 % of the tokens, at most a million, are for validation.

    They share no window. Raises ValueError where one of them would be empty.
    """
    n_val = min(len(tokens) // 10, 1_000_000)
    if n_val <= context_length:
        raise ValueError(
            f"the corpus has {len(tokens):,} tokens, of which the last {n_val:,} are for validation; with "
            f"--context-length {context_length} it needs at least {10 * (context_length + 1):,}: give a longer --data, "
            "or a smaller --context-length"
        )
    return [TokenDataset(part, context_length, n_vocab) for part in (tokens[:-n_val], tokens[-n_val:])]


def open_corpus(path, tokenizer_name, context_length):
    """A corpus ready to train on: its `tokenizer`, `train_set`, `val_set` and `hash`; errors as in `load_tokens`."""
    tokenizer = get_tokenizer(tokenizer_name)
    tokens = load_tokens(path, tokenizer)
    train_set, val_set = split_tokens(tokens, context_length, tokenizer.n_vocab)
    return SimpleNamespace(tokenizer=tokenizer, train_set=train_set, val_set=val_set, hash=fingerprint(tokens))


def plan_steps(n_windows, global_batch_size, batch_size, n_processes):
    """(sequences per forward pass, forward passes per step, steps per epoch) of a process.

    So that all processes together see the global batch: the forward batch is the largest divisor of a process's share
    that is at most `batch_size`. Raises ValueError, naming values that work, where the shares cannot be equal or the
    windows are too few for one step.
    """
    share, rest = divmod(global_batch_size, n_processes)
    if rest:
        sizes = [n for n in (share * n_processes, (share + 1) * n_processes) if n]
        counts = [n for n in range(1, min(global_batch_size, 64) + 1) if global_batch_size % n == 0]
        raise ValueError(
            f"{global_batch_size} sequences per step do not divide among {n_processes} processes: choose "
            f"--global-batch-size {' or '.join(map(str, sizes))}, or {', '.join(map(str, counts))} processes"
        )
    if n_windows < global_batch_size:
        raise ValueError(
            f"the corpus has {n_windows:,} windows to train on, one step needs {global_batch_size}: give a longer "
            "--data, or a smaller --global-batch-size or --context-length"
        )
    forward_batch = max(n for n in range(1, min(share, batch_size) + 1) if share % n == 0)
    return forward_batch, share // forward_batch, n_windows // global_batch_size


# ----------------------------------------------------------------------------------------------------------------------
# A run: its plan, its log, its files, its end


def on_signals(handler):
    """Let `handler` decide what Ctrl-C, SIGTERM and a closed terminal do."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        signum = getattr(signal, name, None)  # Windows has no SIGHUP
        if signum and signal.getsignal(signum) != signal.SIG_IGN:  # nohup makes SIGHUP ignored, and so it stays
            signal.signal(signum, handler)


def end_quietly(signum, frame):
    """A handler: an exception, so that no half-written file stays, and the status that a shell expects."""
    sys.exit(128 + signum)


def is_second_ctrl_c(signum, signals):
    """Add a signal to those before. Is it a second Ctrl-C? (Within a second it is the first one, told twice.)"""
    signals.append((signum, time.monotonic()))
    return signum == signal.SIGINT and signals[-1][1] - signals[0][1] > 1


def say(text, file=None):
    """Print `text`. Where it cannot be printed, it and what follows are lost, but the program goes on."""
    file = file or sys.stdout or io.StringIO()  # a program can be started without stdout
    encoding = file.encoding or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), file=file, flush=True)
    except OSError:  # a pipe that nobody reads any more, a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def difference(dictionaries, hint):
    """Where a process has another value than the first, in words, or None. Each gave a dictionary of its values."""
    for rank, other in enumerate(dictionaries):
        for name, value in dictionaries[0].items():
            if other[name] != value:
                return f"{name} is {value} on rank 0 and {other[name]} on rank {rank}: {hint}"


class Run:
    """A training run: what it reads, how far it is, what it reports and saves, and why it ends.

    A script calls `start`, takes each of the `steps` and gives its losses to `end_step`; where `is_report_step`,
    `is_eval_step` or `is_save_step` it calls `log`, `log_validation` or `save`; and it exits with the status that
    `finish` returns. Where several processes train together, each has its own Run, and only one is not `quiet`.

        args, n_processes, quiet              as given
        corpus                                its tokenizer, train_set, val_set and hash
        forward_batch, accumulation           sequences in a forward pass, and forward passes in a step
        steps_per_epoch, total_steps          the total counts from step 0, also where the run is resumed
        first_step, step                      the first step of this launch, and the last one that is done
        metrics                               the rows of metrics.csv, those before a resume too
        stop_signal, problem                  why it ends early: the signal (or 0), what is wrong (or None)

    Raises ValueError or OSError, with what to do, for a run that cannot be.
    """

    def __init__(self, args, n_processes=1, quiet=False):
        self.args, self.n_processes, self.quiet = args, n_processes, quiet
        self.corpus = open_corpus(args.data, args.tokenizer, args.context_length)
        self.forward_batch, self.accumulation, self.steps_per_epoch = plan_steps(
            len(self.corpus.train_set), args.global_batch_size, args.batch_size, n_processes
        )
        self.total_steps = args.max_steps or args.epochs * self.steps_per_epoch
        # What decides the losses: a checkpoint goes on only where it is the same.
        names = ("context_length", "emb_dim", "n_heads", "n_layers", "drop_rate", "tokenizer", "seed")
        self.identity = {name: getattr(args, name) for name in (*names, "global_batch_size")}
        self.identity["corpus"] = self.corpus.hash
        self.lock = open_run_folder(args.out) if args.out and not quiet else None
        self.checkpoint = find_checkpoint(args.out, args.resume, self.identity) if args.out else None
        self.step = self.checkpoint["step"] if self.checkpoint else 0
        self.metrics = self.checkpoint["metrics"] if self.checkpoint else []
        self.first_step, self.stop_signal, self.problem = self.step + 1, 0, None
        self.step_numbers, self.signals = [], []

    def print(self, text, file=None):
        if not self.quiet:
            say(text, file)

    @property
    def must_agree(self):
        """What must be the same in all processes, by its name."""
        own = ("data", "out", "nproc", "node_rank")  # paths and places may differ between machines
        flags = {f"--{name.replace('_', '-')}": value for name, value in vars(self.args).items() if name not in own}
        return {**flags, "corpus": self.corpus.hash, "first step": self.first_step, "torch": torch.__version__}

    def start(self, **parts):
        """Begin, or go on where a checkpoint stopped. It keeps these parts: `model`, `optimizer` and `scaler`."""
        self.parts = parts
        if self.checkpoint:
            for name, part in parts.items():
                if self.checkpoint[name]:  # empty for a scaler that had nothing to do, as in bfloat16
                    part.load_state_dict(self.checkpoint[name])
            # Copies, because on a CPU these tensors still lie in the open file, which the next save replaces.
            for state in parts["optimizer"].state.values():
                state.update({name: tensor.clone() for name, tensor in state.items()})
            self.checkpoint = None
        on_signals(self.take_signal)
        self.print(self.describe())
        if self.step:
            self.print(f"resumed after step {self.step}")

    def describe(self):
        """The facts on which the losses and the speed depend."""
        args, corpus = self.args, self.corpus
        n_parameters = sum(p.numel() for p in self.parts["model"].parameters())
        processes = "1 process" if self.n_processes == 1 else f"{self.n_processes} processes"
        advice = "; --compile makes steps faster" if args.device == "cuda" and not args.compile else ""
        is_native = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # knows x86 alone
        is_x86 = platform.machine() in ("x86_64", "AMD64")
        if args.device == "cpu" and args.dtype == "bfloat16" and is_x86 and is_native and not is_native():
            advice = "; this CPU has no instructions for bfloat16: float32 may be ten times as fast"
        return (
            f"preset {args.preset}: {args.n_layers} layers, {args.n_heads} heads, {args.emb_dim} wide, "
            f"{args.context_length} tokens of context, {n_parameters:,} parameters"
            f"{'' if args.data else '; for the real thing: --preset gpt2 --data FILE'}\n"
            f"device {args.device}, {processes}, {args.dtype}{', compiled' if args.compile else ''}, "
            f"torch {torch.__version__}{advice}\n"
            f"corpus {args.data or 'built into Python'}, hash {corpus.hash}, {args.tokenizer} tokens: "
            f"{len(corpus.train_set):,} windows to train on, {len(corpus.val_set):,} to validate\n"
            f"{args.global_batch_size} sequences per step = {self.forward_batch} per forward x {self.accumulation} "
            f"accumulated x {processes}; {self.steps_per_epoch:,} steps per epoch, {self.total_steps:,} in all"
        )

    def take_signal(self, signum, frame):
        """Handle a signal: the next report tells it. A second Ctrl-C ends a run without a launcher at once."""
        is_first = not self.signals
        if is_second_ctrl_c(signum, self.signals) and self.n_processes == 1:
            sys.exit(128 + signum)
        if is_first:
            next_report = min((self.step // every + 1) * every for every in (self.args.log_every, self.args.eval_every))
            last = min(next_report, self.total_steps)
            self.print(f"{signal.Signals(signum).name}: the run stops after step {last} at the latest", sys.stderr)

    def steps(self):
        """The numbers of the steps to take, up to the end of the run."""
        while not (self.is_complete or self.stop_signal or self.problem):
            if not self.step_numbers:  # the clock starts after a report: an evaluation does not count as training
                self.clock, self.timed_from = time.perf_counter(), self.step
            yield self.step + 1
            if self.step % self.steps_per_epoch == 0:
                self.print(f"Epoch {self.step // self.steps_per_epoch} completed")

    def end_step(self, losses, gradient_norm):
        """Count a step, and keep the losses of its forward passes and its gradient norm, which stay on the device."""
        self.step += 1
        self.step_numbers.append(torch.stack([*losses, gradient_norm]))
        if self.step == self.first_step:  # it compiles and warms up: wait for its end, then start the clock
            self.step_numbers[0].tolist()
            self.clock, self.timed_from = time.perf_counter(), self.step

    @property
    def is_complete(self):
        return not self.problem and self.step >= self.total_steps

    @property
    def is_eval_step(self):
        return not self.problem and (self.is_complete or self.step % self.args.eval_every == 0)

    @property
    def is_save_step(self):
        return not self.problem and (self.is_eval_step or self.stop_signal > 0)

    @property
    def is_report_step(self):
        return self.is_eval_step or self.step % self.args.log_every == 0

    def report(self):
        """What this process knows since its last report: the loss of the last step, the first step whose loss or
        gradient was not finite (else infinity), and the signal that asks for an end (else 0).
        """
        numbers = torch.stack(self.step_numbers).cpu()  # (steps, accumulation + 1); waits for the device
        *losses, self.gradient_norm = numbers[-1].tolist()
        scaler = self.parts["scaler"]
        # A gradient that overflows float16 is no fault: the scaler skips that step. If it has to all the time, it is.
        finite = (numbers[:, :-1] if scaler.is_enabled() else numbers).isfinite().all(dim=1).tolist()
        finite[-1] &= scaler.get_scale() >= 1
        bad_step = self.step - len(finite) + 1 + finite.index(False) if False in finite else math.inf
        return sum(losses), bad_step, max((signum for signum, _ in self.signals), default=0)

    def log(self, reports, learning_rate):
        """Print the last step as all processes report it, and see whether the run must end."""
        losses, bad_steps, stop_signals = zip(*reports)
        self.stop_signal = max(stop_signals)
        if min(bad_steps) <= self.step:
            self.problem = f"the loss or its gradient is not finite at step {min(bad_steps)}: try a lower --lr"
            return
        loss, seconds = sum(losses) / len(losses), time.perf_counter() - self.clock
        tokens_per_step = self.args.global_batch_size * self.args.context_length
        speed = (self.step - self.timed_from) * tokens_per_step / seconds if self.step > self.timed_from else None
        self.step_numbers = []
        self.metrics.append([self.step, self.step * tokens_per_step, learning_rate, loss, None, speed])
        epoch = math.ceil(self.step / self.steps_per_epoch)
        line = f"epoch {epoch}  step {self.step}/{self.total_steps}  loss {loss:.6f}"
        if 1 < len(losses) <= 8:
            line += " [" + ", ".join(f"rank {rank} {loss:.6f}" for rank, loss in enumerate(losses)) + "]"
        elif len(losses) > 8:
            low, high = min(losses), max(losses)
            line += f" [lowest rank {losses.index(low)} {low:.6f}, highest rank {losses.index(high)} {high:.6f}]"
        line += f"  norm {self.gradient_norm:.3f}  lr {learning_rate:.2e}"
        if speed:
            left = timedelta(seconds=round((self.total_steps - self.step) * tokens_per_step / speed))
            line += f"  {speed:,.0f} tokens/s  {left} left"
        self.print(line)

    def log_validation(self, loss):
        """Print the validation loss, and put it into the row of this step."""
        self.metrics[-1][METRICS.index("val_loss")] = loss
        self.print(f"step {self.step}: validation loss {loss:.6f}")
        if not math.isfinite(loss):
            self.problem = f"the validation loss is not finite after step {self.step}: try a lower --lr"

    def save(self):
        """Keep in `--out` what `start` needs to go on from here. Returns why it could not, or None."""
        if not self.args.out:
            return None
        checkpoint = {name: part.state_dict() for name, part in self.parts.items()}
        checkpoint |= {"step": self.step, "metrics": self.metrics, "run": self.identity}
        try:
            save_checkpoint(self.args.out, {**checkpoint, "config": asdict(self.parts["model"].config)})
        except OSError as error:
            return f"{error}: mend that, then --resume goes on from the last save"

    def finish(self):
        """Say how it ended, and return the status to exit with."""
        out = self.args.out
        if self.problem:
            self.print(f"error: {self.problem}", sys.stderr)
            return 1
        if self.stop_signal and not self.is_complete:
            saved = f"saved in {out}; --resume goes on" if out else "nothing was saved without --out"
            self.print(f"stopped by {signal.Signals(self.stop_signal).name} after step {self.step}: {saved}")
            return 128 + self.stop_signal
        self.print(f"written to {out}" if out else "nothing was written: --out DIR keeps a checkpoint")
        return 0


METRICS = ("step", "tokens", "learning_rate", "train_loss", "val_loss", "tokens_per_second")
CHECKPOINT_KEYS = {"model", "optimizer", "scaler", "step", "metrics", "config", "run"}


def open_run_folder(folder):
    """Make sure that a run can write to `folder`, and alone: returns the `Lock` to keep. Else ValueError or OSError."""
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        return fcntl and Lock(folder, wait=False)
    except BlockingIOError as error:
        raise ValueError(f"another run writes to --out {folder}: wait for its end, or choose another --out") from error
    except OSError as error:
        raise OSError(f"cannot write to --out {folder}: {error.strerror}") from error


def find_checkpoint(folder, resume, identity):
    """The checkpoint in `folder` from which a run of this `identity` may go on, or None if there is none.

    ValueError for one that the run would overwrite, or that is of another identity.
    """
    path = Path(folder, "checkpoint.pt")
    if not path.exists():
        return None
    if not resume:
        raise ValueError(f"{path} exists: add --resume to go on from it, or choose another --out")
    checkpoint = load_checkpoint(path)
    saved = {**checkpoint["config"], **checkpoint["run"]}
    for name, value in identity.items():
        if saved.get(name) != value:
            raise ValueError(
                f"{path} has {name} {saved.get(name)}, this run has {value}: give the same, or another --out"
            )
    return checkpoint


def load_checkpoint(path):
    """What `save_checkpoint` wrote, its tensors on the CPU and read only when used; ValueError if it is not that.

    `weights_only=True`: loading a file never runs code from it.
    """
    try:  # mapped, but on Windows, where the next save could not replace a mapped file
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=os.name != "nt")
        wrong = ", ".join(f"lacks {name}" for name in sorted(CHECKPOINT_KEYS - checkpoint.keys()))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}") from None
    except Exception as error:  # torch.load fails in as many ways as a file can be broken
        wrong = type(error).__name__  # its text may have many lines, and advise to load the file unsafely
    if wrong:
        raise ValueError(f"{path} is no checkpoint of this project or is damaged ({wrong}): choose another --out")
    return checkpoint


def save_checkpoint(folder, checkpoint):
    """Write `folder/checkpoint.pt`, and `folder/metrics.csv` from the rows in it, so that a kill loses neither.

    Both are written beside their places and flushed to disk, then renamed: whoever reads sees an old file or a new one,
    never a part. Raises OSError with the path and the reason; the earlier files are then untouched.
    """
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([METRICS, *checkpoint["metrics"]])
    writers = {  # the checkpoint last: a run killed in between saves both again
        Path(folder, "metrics.csv"): lambda file: file.write(table.getvalue().encode()),
        Path(folder, "checkpoint.pt"): lambda file: torch.save(checkpoint, file),
    }
    # One fixed name for each: what a kill leaves, the next save overwrites.
    temporary = {path: path.with_name(path.name + ".tmp") for path in writers}
    try:
        for path, write in writers.items():
            with open(temporary[path], "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
        for path in writers:
            os.replace(temporary[path], path)
    except (OSError, RuntimeError) as error:
        # torch.save turns a full disk into a RuntimeError about file positions; the reason is what it arose from.
        reason = error if isinstance(error, OSError) else error.__context__ or error
        raise OSError(f"cannot write {path}: {reason}") from error
    finally:
        for path in writers:
            with contextlib.suppress(OSError):
                temporary[path].unlink(missing_ok=True)


def main():
    on_signals(end_quietly)
    parser = argparse.ArgumentParser(description="Tokenize text files ahead of a training run.")
    parser.error = lambda reason: parser.exit(2, f"error: {reason}\n")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="UTF-8 text, one document each")
    parser.add_argument("--tokenizer", choices=TOKENIZERS, default="gpt2", help="default: %(default)s")
    parser.add_argument("--output", type=Path, metavar="FILE.npy", help="one array of all; default: one beside each")
    args = parser.parse_args()
    outputs = {args.output: args.files} if args.output else {path: [path] for path in args.files}
    try:
        for path in args.files:
            _check_file(path)
        if args.output and args.output.suffix != ".npy":
            raise ValueError(f"--output {args.output} must end in .npy, by which a training script knows the format")
        if args.output and args.output.exists() and any(args.output.samefile(path) for path in args.files):
            raise ValueError(f"--output {args.output} is one of the files to read: choose another name")
        tokenizer = get_tokenizer(args.tokenizer)
        for output, paths in outputs.items():
            n_tokens = write_tokens(paths, tokenizer, output) if args.output else len(load_tokens(output, tokenizer))
            given = shlex.quote(str(output))
            say(f"{output}: {n_tokens:,} tokens; train with --data {given} --tokenizer {args.tokenizer}")
    except (ValueError, OSError) as error:
        parser.error(error)


if __name__ == "__main__":
    main()
