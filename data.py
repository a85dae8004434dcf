"""Text to tokens to samples: a corpus becomes one flat array on disk, and the array becomes training windows.

Nothing here talks to other processes. To tokenize ahead of a run, or to join many files:

    python data.py corpus.txt                         # writes corpus.txt.gpt2.npy, which --data corpus.txt then uses
    python data.py a.txt b.txt --output tokens.npy    # for --data tokens.npy; <|endoftext|> ends each file
"""

import argparse
import codecs
import contextlib
import hashlib
import itertools
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tiktoken
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch.utils.data import Dataset, Sampler

TOKENIZERS = ("bytes", "gpt2")
END_OF_TEXT = "<|endoftext|>"
BLOCK_BYTES = 2**18  # read at once; memory grows with this and the number of threads, not with the file
MAX_THREADS = 16  # more would only wait for the one that turns the ids into arrays
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

    `path` is a UTF-8 text file, a ready `.npy` of integers, a raw little-endian uint16 `.bin` (nanoGPT's format), or
    None for the text that comes with Python. A text file is tokenized once, into `<path>.<tokenizer>.npy` beside it,
    ended by <|endoftext|>. Those ids are used again while the text keeps its size and modification time (a change that
    keeps both is not seen). Raises ValueError or OSError with the reason and the way out.
    """
    if path is None:
        return np.array([*tokenizer.encode_ordinary(builtin_text()), tokenizer.eot_token])
    path = Path(path)
    _check_file(path)
    if path.suffix == ".npy":
        tokens = _open_npy(path)
        made_with = _read_stamp(path, tokens).split(b" ")[0].decode(errors="replace")
        if made_with in TOKENIZERS and made_with != tokenizer.name:  # a file from elsewhere says nothing
            raise ValueError(f"{path} was made with --tokenizer {made_with}: give the same, not {tokenizer.name}")
        return tokens
    if path.suffix == ".bin":
        if path.stat().st_size % 2:
            raise ValueError(f"{path} is no file of uint16 ids: its {path.stat().st_size:,} bytes are an odd number")
        return np.memmap(path, dtype="<u2", mode="r")

    cache = Path(f"{path}.{tokenizer.name}.npy")
    stamp = _stamp(tokenizer, path)
    with contextlib.suppress(OSError, ValueError):
        tokens = _open_npy(cache)
        if _read_stamp(cache, tokens) == stamp:
            return tokens
    try:
        write_tokens([path], tokenizer, cache, stamp)
    except OSError as error:
        if error.filename == str(path):
            raise
        raise OSError(
            f"{error}; tokenize with python data.py {path} --tokenizer {tokenizer.name} --output tokens.npy, and give "
            "--data tokens.npy"
        ) from error
    return _open_npy(cache)


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
    try:
        tokens = np.load(path, mmap_mode="r")
        is_flat_integer = tokens.ndim == 1 and tokens.dtype.kind in "iu"
    except OSError:
        raise
    except Exception as error:  # np.load fails in as many ways as a file can be broken
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path} is no .npy file of token ids, or it is damaged: {reason}") from error
    if not is_flat_integer:
        raise ValueError(
            f"{path} must hold whole numbers in one dimension; it holds {tokens.dtype} of shape {tokens.shape}"
        )
    return tokens


def _stamp(tokenizer, source=None):
    """What a token array was made from, as the bytes that follow it in its file, where np.load does not look."""
    facts = [tokenizer.name, tokenizer.n_vocab]
    if source:
        facts += [source.stat().st_size, source.stat().st_mtime_ns]
    return " ".join(map(str, facts)).encode()


def _read_stamp(path, tokens):
    with open(path, "rb") as file:
        file.seek(tokens.offset + tokens.nbytes)
        return file.read(100)


def write_tokens(paths, tokenizer, output, stamp=b""):
    """Tokenize text files into one `.npy` of uint16, <|endoftext|> after each; returns the number of tokens.

    The ids are those of each whole text at once, on all cores, in memory that does not grow with the text. `stamp`
    follows them in the file; without one, the tokenizer is noted there. The file is renamed into place when it is
    complete, so several processes may write the same one. Raises ValueError with the byte offset for text that is not
    UTF-8, and OSError where a text cannot be read (`filename` is then its path) or the output cannot be written.
    """
    if tokenizer.n_vocab > 2**16:
        raise ValueError(f"uint16 holds ids up to 65,535, the tokenizer {tokenizer.name} has {tokenizer.n_vocab:,}")
    n_tokens = 0
    temporary = Path(f"{output}.{os.urandom(4).hex()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.seek(HEADER_BYTES)
            for path in paths:
                for ids in _encode(path, tokenizer):
                    file.write(np.array(ids, dtype="<u2").tobytes())
                    n_tokens += len(ids)
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
    """The ids of a text file and <|endoftext|> after them, in lists."""
    n_threads = min(os.cpu_count() or 1, MAX_THREADS)
    pieces = _pieces(path)
    while batch := list(itertools.islice(pieces, n_threads)):
        if tokenizer.name == "gpt2" and any(map(_has_endless_space, batch)):
            raise ValueError(f"{path} has a million white-space characters in a row, more than tiktoken can take")
        yield from tokenizer.encode_ordinary_batch(batch, num_threads=n_threads)
    yield [tokenizer.eot_token]


# No token of either tokenizer crosses from a character that is not white space to one that is, so a cut there changes
# no ids. Greedy: the last such place of a block. No \s ahead: it holds \x1c to \x1f, which tiktoken takes for symbols.
LAST_CUT = re.compile(r"(?s:.*)\S(?=[ \t\r\n])")


def _pieces(path):
    """The text of a file in pieces of about BLOCK_BYTES, longer only where it has no place to cut."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    held = []  # text that waits for a place to cut
    with open(path, "rb") as file:
        offset = 0
        while block := file.read(BLOCK_BYTES):
            text = _decode(decoder, block, offset, path)
            offset += len(block)
            if cut := LAST_CUT.match(text):
                yield "".join([*held, text[: cut.end()]])
                held = [text[cut.end() :]]
            else:
                held.append(text)
        held.append(_decode(decoder, b"", offset, path))
    if rest := "".join(held):
        yield rest


def _has_endless_space(text):
    """Whether a run of white space with text after it would overflow the stack of gpt2's regular expression."""
    return len(text) > 999_999 and re.search(r"(?<!\s)\s{999999,}(?=\S)", text)


def _decode(decoder, block, offset, path):
    offset -= len(decoder.getstate()[0])  # bytes of a character that the last block cut in two
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text: byte {offset + error.start:,} ({error.reason}); convert it first"
        ) from None


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
        if len(tokens) <= context_length:
            raise ValueError(
                f"{len(tokens):,} tokens hold no window of {context_length} and the token after it: give more text, "
                "or a smaller --context-length"
            )
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
    cut = len(tokens) - n_val
    return TokenDataset(tokens[:cut], context_length, n_vocab), TokenDataset(tokens[cut:], context_length, n_vocab)


class SkipSampler(Sampler):
    """What `sampler` gives after its first `n_skip` indices. A resumed epoch never reads what it skips."""

    def __init__(self, sampler, n_skip=0):
        self.sampler = sampler
        self.n_skip = n_skip

    def __iter__(self):
        return itertools.islice(self.sampler, self.n_skip, None)

    def __len__(self):
        return max(0, len(self.sampler) - self.n_skip)


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


def _refuse(reason):
    print(f"error: {reason}", file=sys.stderr)
    sys.exit(2)


def main():
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, frame: sys.exit(128 + signum))  # an exception: no half-written file stays
    parser = argparse.ArgumentParser(description="Tokenize text files ahead of a training run.")
    parser.error = _refuse
    parser.add_argument("files", nargs="+", metavar="FILE", help="UTF-8 text, one document each")
    parser.add_argument("--tokenizer", choices=TOKENIZERS, default="gpt2", help="default: %(default)s")
    parser.add_argument("--output", metavar="FILE.npy", help="one array of all files; default: one beside each file")
    args = parser.parse_args()
    try:
        paths = [Path(file) for file in args.files]
        for path in paths:
            _check_file(path)
        tokenizer = get_tokenizer(args.tokenizer)
        if args.output is None:
            for path in paths:
                n_tokens = len(load_tokens(path, tokenizer))
                print(f"{path}: {n_tokens:,} tokens; train with --data {path} --tokenizer {args.tokenizer}")
            return
        output = Path(args.output)
        if output.suffix != ".npy":
            raise ValueError(f"--output {output} must end in .npy, by which a training script knows the format")
        if output.exists() and any(output.samefile(path) for path in paths):
            raise ValueError(f"--output {output} is one of the files to read: choose another name")
        n_tokens = write_tokens(paths, tokenizer, output)
        print(f"{output}: {n_tokens:,} tokens; train with --data {output} --tokenizer {args.tokenizer}")
    except (ValueError, OSError) as error:
        _refuse(error)


if __name__ == "__main__":
    main()
