"""Text to tokens to samples: a corpus becomes one flat array on disk, and the array becomes training windows.

Nothing here knows how many processes train. To tokenize ahead of a run, or to join many files:

    python data.py corpus.txt                            # writes corpus.txt.gpt2.npy, which a run with --data corpus.txt uses
    python data.py a.txt b.txt --output tokens.npy       # for --data tokens.npy; <|endoftext|> ends each file
"""

import argparse
import codecs
import hashlib
import itertools
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tiktoken
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch.utils.data import Dataset, Sampler

END_OF_TEXT = "<|endoftext|>"
BLOCK_BYTES = 2**20  # read at once; memory grows with this and the number of cores, not with the file
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
            "the gpt2 vocabulary could not be fetched: connect to the network once, or set TIKTOKEN_CACHE_DIR to a folder "
            f"that holds it, or choose --tokenizer bytes ({type(error).__name__})"
        ) from error


def load_tokens(path, tokenizer):
    """The token ids of a corpus as one flat integer array of shape (n_tokens,), a memory map where there is a file.

    `path` is a UTF-8 text file, a ready `.npy` of integers, a raw little-endian uint16 `.bin` (nanoGPT's format), or None
    for the text that comes with Python. A text file is tokenized once, into `<path>.<tokenizer>.npy` beside it, ended
    by <|endoftext|>. Those ids are used again while the text keeps its size and modification time (a change that
    keeps both is not seen). Raises ValueError or OSError with the reason and the way out.
    """
    if path is None:
        return np.array([*tokenizer.encode_ordinary(builtin_text()), tokenizer.eot_token], dtype=np.uint16)
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: join its files with python data.py FILE... --output tokens.npy")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty")
    if path.suffix == ".npy":
        return _open_npy(path)
    if path.suffix == ".bin":
        if path.stat().st_size % 2:
            raise ValueError(f"{path} is no file of uint16 ids: its {path.stat().st_size:,} bytes are an odd number")
        return np.memmap(path, dtype="<u2", mode="r")

    cache = Path(f"{path}.{tokenizer.name}.npy")
    stamp = _stamp(path, tokenizer)
    if not _is_valid(cache, stamp):
        try:
            write_tokens([path], tokenizer, cache, stamp)
        except OSError as error:
            if error.filename == str(path):
                raise
            raise OSError(
                f"cannot write {cache} ({error.strerror}): tokenize with python data.py {path} --tokenizer "
                f"{tokenizer.name} --output tokens.npy, and give --data tokens.npy"
            ) from error
    return np.load(cache, mmap_mode="r")


def builtin_text():
    """The language reference inside CPython, half a megabyte of English. It differs between Python releases."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _open_npy(path):
    try:
        tokens = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} is no .npy file of token ids, or it is damaged: {error!s:.200}") from error
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"{path} must hold whole numbers in one dimension; it holds {tokens.dtype} of shape {tokens.shape}"
        )
    return tokens


def _stamp(path, tokenizer):
    """What a cached token array was made from, as the bytes that end its file."""
    source = path.stat()
    return json.dumps([source.st_size, source.st_mtime_ns, tokenizer.name, tokenizer.n_vocab]).encode()


def _is_valid(cache, stamp):
    try:
        with open(cache, "rb") as file:
            if np.lib.format.read_magic(file) != (1, 0):
                return False
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            array_bytes = file.tell() + shape[0] * dtype.itemsize
            file.seek(-len(stamp), os.SEEK_END)
            return file.tell() == array_bytes and file.read() == stamp
    except (OSError, ValueError):
        return False


def write_tokens(paths, tokenizer, output, stamp=b""):
    """Tokenize text files into one `.npy` of uint16, <|endoftext|> after each; returns the number of tokens.

    The ids are those of each whole text at once, on all cores, in memory that does not grow with the text. The file is
    renamed into place when it is complete, so several processes may write the same one. Raises ValueError with the
    byte offset for text that is not UTF-8.
    """
    n_threads = os.cpu_count() or 1
    n_tokens = 0
    temporary = Path(f"{output}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.seek(HEADER_BYTES)
            for path in paths:
                pieces = _pieces(path)
                while batch := list(itertools.islice(pieces, n_threads)):
                    for ids in tokenizer.encode_ordinary_batch(batch, num_threads=n_threads):
                        file.write(np.array(ids, dtype="<u2").tobytes())
                        n_tokens += len(ids)
                file.write(np.array([tokenizer.eot_token], dtype="<u2").tobytes())
                n_tokens += 1
            file.write(stamp)
            file.seek(0)
            np.lib.format.write_array_header_1_0(file, {"descr": "<u2", "fortran_order": False, "shape": (n_tokens,)})
            assert file.tell() == HEADER_BYTES
        os.replace(temporary, output)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return n_tokens


# No token of either tokenizer crosses from a character that is not white space to one that is, so a text may be cut
# there, and only there, without changing its ids. Greedy: the last such place of a block.
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
    most once, and fewer than T tokens are left over at the end. Raises ValueError for ids outside 0 to `n_vocab` - 1: at
    once where a look at 64 blocks shows one (all of a corpus up to a million tokens), else when it is fetched.
    """

    def __init__(self, tokens, context_length, n_vocab):
        if len(tokens) <= context_length:
            raise ValueError(
                f"{len(tokens):,} tokens hold no window of {context_length} and the token after it: give more text, or a "
                "smaller --context-length"
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
            f"the corpus has {len(tokens):,} tokens, of which the last {n_val:,} are for validation; with --context-length "
            f"{context_length} it needs at least {10 * (context_length + 1):,}: give a longer --data, or a smaller "
            "--context-length"
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

    So that all processes together see the global batch: the forward batch is the largest divisor of a process's share that
    is at most `batch_size`. Raises ValueError, naming values that work, where the shares cannot be equal or the windows
    are too few for one step.
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
            f"the corpus has {n_windows:,} windows to train on, one step needs {global_batch_size}: give a longer --data, or "
            "a smaller --global-batch-size or --context-length"
        )
    forward_batch = max(n for n in range(1, min(share, batch_size) + 1) if share % n == 0)
    return forward_batch, share // forward_batch, n_windows // global_batch_size


def main():
    parser = argparse.ArgumentParser(description="Tokenize text files ahead of a training run.")
    parser.add_argument("files", nargs="+", metavar="FILE", help="UTF-8 text, one document each")
    parser.add_argument("--tokenizer", choices=("bytes", "gpt2"), default="gpt2", help="default: %(default)s")
    parser.add_argument("--output", metavar="FILE.npy", help="one array of all files; default: one beside each file")
    args = parser.parse_args()
    try:
        tokenizer = get_tokenizer(args.tokenizer)
        if args.output:
            if not args.output.endswith(".npy"):
                raise ValueError(
                    f"--output {args.output} must end in .npy, by which a training script knows the format"
                )
            n_tokens = write_tokens(args.files, tokenizer, args.output)
            print(f"{args.output}: {n_tokens:,} tokens, {len(args.files)} documents; train with --data {args.output}")
        else:
            for path in args.files:
                print(f"{path}: {len(load_tokens(path, tokenizer)):,} tokens; train with --data {path}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
