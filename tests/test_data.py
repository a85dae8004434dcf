"""A corpus: text becomes the right ids, in bounded memory and a file that is never half there; ids become windows."""

import errno
import io
import itertools
import os
import random
import re
import select
import shlex
import signal
import struct
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch
from conftest import finish, run, start
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

import data
import gpt

BYTES = data.get_tokenizer("bytes")
CAT, DOG = "The cat sat on the mat.\n", "The dog sat on the mat.\n"
on_linux = pytest.mark.skipif(not Path("/proc/locks").exists(), reason="reads memory use and locks from /proc")


@pytest.fixture(scope="module")
def gpt2(gpt2_vocabulary):
    return data.get_tokenizer("gpt2")


@pytest.fixture(params=["bytes", "gpt2"])
def tokenizer(request, gpt2):
    return {"bytes": BYTES, "gpt2": gpt2}[request.param]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text(CAT)
    return path


def ids_of(text, tokenizer):
    return [*tokenizer.encode_ordinary(text), tokenizer.eot_token]


def load(path, tokenizer=BYTES):
    return data.load_tokens(path, tokenizer).tolist()


@contextmanager
def refusal(*parts, error=ValueError):
    """What stands inside must end with this error, whose message is one line and holds these parts."""
    with pytest.raises(error) as caught:
        yield caught
    message = str(caught.value)
    assert "\n" not in message and all(part in message for part in parts), message


def tokenizer_that(meanwhile):
    """A tokenizer that takes bytes for ids, and calls `meanwhile` before it returns any."""

    def encode_ordinary_batch(texts, num_threads):
        meanwhile()
        return [list(text.encode()) for text in texts]

    return SimpleNamespace(name="gpt2", n_vocab=257, eot_token=256, encode_ordinary_batch=encode_ordinary_batch)


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizers


def test_a_tokenizer_is_bytes_or_the_published_gpt2(gpt2):
    text = "na\u00efve \U0001f600\r\n\x00<|endoftext|>"
    assert BYTES.encode_ordinary(text) == list(text.encode())
    assert (BYTES.eot_token, BYTES.n_vocab) == (256, 257)
    assert BYTES.decode([*text.encode(), 256]) == text + data.END_OF_TEXT
    assert (gpt2.eot_token, gpt2.n_vocab) == (50256, 50257)
    assert gpt2.encode_ordinary("hello world") == [31373, 995]
    with pytest.raises(ValueError, match="bytes or gpt2"):
        data.get_tokenizer("gpt4")


@pytest.mark.parametrize("cache", ["empty", "damaged"])
def test_without_network_and_vocabulary_the_error_says_what_to_do(cache, gpt2_vocabulary, tmp_path, monkeypatch):
    for path in gpt2_vocabulary.iterdir() if cache == "damaged" else ():
        (tmp_path / path.name).write_bytes(path.read_bytes()[:1000])
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})  # forgets what this process has loaded
    for name in ("http_proxy", "https_proxy", "no_proxy"):  # no network, wherever the test runs
        for spelling in (name, name.upper()):
            monkeypatch.setenv(spelling, "" if name == "no_proxy" else "http://127.0.0.1:9")
    with refusal("TIKTOKEN_CACHE_DIR", "--tokenizer bytes", error=OSError):
        data.get_tokenizer("gpt2")


# ----------------------------------------------------------------------------------------------------------------------
# The ids of a text in pieces are those of the whole text, in bounded memory

# What may stand left or right of a cut and change how gpt2 splits a text there: every kind of white space, what only
# Python or only tiktoken takes for white space, contractions, letters with marks, and the name of the special token.
SNIPPETS = [
    *(" ", "  ", "   ", "\n", "\n\n", "\n\n\n", " \n", "\n ", "\t", "\r\n", "\r\n\r\n", "\r", " \t \n"),
    *("\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x1f", "\x85", "\xa0", "\u1680", "\u180e", "\u2003", "\u2028"),
    *("\u2029", "\u200b", "\u202f", "\u205f", "\u3000", "\ufeff", "\x00"),
    *("a", "the", "The end", "don't", "we'll", "'s", "'", "'re ", "''", "'S", "x's\n", "1", "1984", "\u0663", "\u00b2"),
    *("!", "...", "!!!", "-", "_", "==", "<|endoftext|>", "<|", "|>", "endoftext"),
    *("\u00e9", "e\u0301", "\u0301", "\ufb01", "\u4e2d\u6587", "\u0928\u092e\u0938\u094d\u0924\u0947", "\U0001d518"),
    *("\U0001f600", "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\U0001f3f3\ufe0f\u200d\U0001f308", "\u2764\ufe0f"),
]


def hostile_text(seed, n_snippets):
    return "".join(random.Random(seed).choices(SNIPPETS, k=n_snippets))


def assert_file_has_the_ids_of_the_whole(text, tokenizer, folder):
    (folder / "text.txt").write_bytes(text.encode())
    data.write_tokens([folder / "text.txt"], tokenizer, folder / "ids.npy")
    assert np.array_equal(np.load(folder / "ids.npy"), ids_of(text, tokenizer))


@pytest.mark.parametrize("block_bytes", [2, 3, 4, 5, 7, 11, 16, 31, 64, 257])
def test_hostile_texts_in_pieces_have_the_ids_of_the_whole(block_bytes, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(data, "N_THREADS", 64)  # wide batches, so few of them
    white = "\n \n" * 64
    for text in ("", "a" * block_bytes, "\ufeff" + CAT * 9, " \n\t\r\n  \n\n" * 40, " " * 131, white + CAT * 9 + white):
        assert_file_has_the_ids_of_the_whole(text, tokenizer, tmp_path)
    assert_file_has_the_ids_of_the_whole(hostile_text(block_bytes, 20_000), tokenizer, tmp_path)
    assert sum(1 for _ in data._pieces(tmp_path / "text.txt")) > 200  # as many cuts


def without_a_cut(alphabet):
    return "".join(random.Random(1).choices(alphabet, k=997)) * 900


@pytest.mark.parametrize(
    "text, is_taken",
    [
        (without_a_cut("abcdefgh"), True),
        (without_a_cut("\u0301\U0001f600\u200d"), True),
        (without_a_cut("\n \t"), True),
        ("a" + " " * 999_998 + "bcd", True),
        ("a" + " " * 999_999 + "b", False),
        (" \n\u3000\x85" * 250_000 + "\x1cb", False),
        ("a" + " " * 1_100_000, True),  # no text after them
        ("a" + "\x1c" * 1_100_000 + "b", True),  # Python takes these for white space, tiktoken does not
    ],
    ids=["letters", "marks", "white space", "spaces", "spaces too many", "all kinds too many", "at the end", "x1c"],
)
def test_a_text_without_a_place_to_cut_is_refused_only_where_tiktoken_fails(text, is_taken, gpt2, tmp_path):
    if is_taken:
        assert_file_has_the_ids_of_the_whole(text, gpt2, tmp_path)
        return
    with pytest.raises(BaseException, match="StackOverflow"):
        gpt2.encode_ordinary(text)
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    with refusal(str(path), "white-space"):
        load(path, gpt2)
    assert os.listdir(tmp_path) == ["text.txt"]


def test_each_of_several_files_ends_with_the_end_of_text_token_which_no_text_can_forge(tokenizer, tmp_path):
    texts = ["first\n", "one <|endoftext|> two<|endoftext|>", " third \n\n"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    n_tokens = data.write_tokens(sorted(tmp_path.glob("*.txt")), tokenizer, tmp_path / "all.npy")
    ids = load(tmp_path / "all.npy", tokenizer)
    assert ids == [id for text in texts for id in ids_of(text, tokenizer)]
    assert ids.count(tokenizer.eot_token) == 3 and n_tokens == len(ids)
    assert tokenizer.decode(ids) == "".join(text + data.END_OF_TEXT for text in texts)
    assert load(None, tokenizer) == ids_of(data.builtin_text(), tokenizer) and len(data.builtin_text()) > 400_000


def test_a_vocabulary_that_does_not_fit_uint16_is_refused_and_not_wrapped(corpus):
    # An id of 70,000 stored in 16 bits would become 4,464, and training would go on with garbage.
    ranks, special = {bytes([value]): value for value in range(256)}, {data.END_OF_TEXT: 70_000}
    wide = tiktoken.Encoding("wide", pat_str=r"(?s:.)", mergeable_ranks=ranks, special_tokens=special)
    with pytest.raises(ValueError, match="uint16"):
        data.write_tokens([corpus], wide, corpus.with_name("ids.npy"))
    assert load(None, wide)[-1] == 70_000


def test_the_memory_that_tokenizing_takes_does_not_grow_with_the_text(tokenizer, tmp_path, monkeypatch):
    # For bytes on one line, with more spaces than gpt2 could take.
    block = data.builtin_text().encode() if tokenizer.name == "gpt2" else b"x" + b" " * 1_100_000
    (tmp_path / "text.txt").write_bytes(block * 16)
    monkeypatch.setattr(data, "BLOCK_BYTES", 2**14)
    tracemalloc.start()
    try:
        n_tokens = data.write_tokens([tmp_path / "text.txt"], tokenizer, tmp_path / "ids.npy")
        assert tracemalloc.get_traced_memory()[1] < 4e6
    finally:
        tracemalloc.stop()
    assert n_tokens > 2e6


def test_tokenizing_that_takes_long_says_how_far_it_is(corpus, monkeypatch, capsys):
    clock = itertools.count()
    monkeypatch.setattr(data, "time", SimpleNamespace(monotonic=lambda: next(clock)))  # each block takes a second
    monkeypatch.setattr(data, "BLOCK_BYTES", 10**6)
    corpus.write_bytes(b"x" * 20 * 10**6)
    data.load_tokens(corpus, BYTES)
    pattern = re.escape(f"{corpus}: ") + r"(\d+) of 20 MB tokenized, 1\.0 MB/s, 0:00:(\d\d) left"
    seen = [re.fullmatch(pattern, line).groups() for line in capsys.readouterr().err.splitlines()]
    assert 2 <= len(seen) <= 5 and int(seen[0][0]) <= 5
    assert all(int(done) + int(left) == 20 for done, left in seen)
    clock = itertools.repeat(0)
    os.remove(f"{corpus}.bytes.npy")
    data.load_tokens(corpus, BYTES)
    assert capsys.readouterr() == ("", "")


def llm_c_header(n_tokens):
    return struct.pack("<3i", 20240520, 1, n_tokens % 2**31).ljust(1024, b"\0")


def resident_bytes():
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


@on_linux
@pytest.mark.parametrize("name", ["ids.npy", "ids.bin"])
def test_ten_gigabytes_of_ids_stay_on_disk(name, tmp_path, gpt2):
    path, n_tokens = tmp_path / name, 5 * 10**9
    with open(path, "wb") as file:
        if name == "ids.npy":
            np.lib.format.write_array_header_1_0(file, {"descr": "<u2", "fortran_order": False, "shape": (n_tokens,)})
        else:
            file.write(llm_c_header(n_tokens) + b"\1\0" * 10)
    os.truncate(path, (128 if name == "ids.npy" else 1024) + 2 * n_tokens)  # takes no room on disk
    before = resident_bytes()
    opened = data.open_corpus(path, "gpt2", 1024)
    opened.train_set.__getitems__([0, len(opened.train_set) // 2, len(opened.train_set) - 1])
    assert opened.tokenizer.name == "gpt2" and opened.hash == data.fingerprint(data.load_tokens(path, gpt2))
    assert resident_bytes() - before < 100e6
    assert (len(opened.train_set), len(opened.val_set)) == ((n_tokens - 10**6 - 1) // 1024, (10**6 - 1) // 1024)


# ----------------------------------------------------------------------------------------------------------------------
# The file beside a text: valid or made anew, whole or not there


def test_a_text_is_tokenized_once_for_each_tokenizer_also_if_its_folder_is_then_read_only(corpus, gpt2, monkeypatch):
    for tokenizer in (BYTES, gpt2):
        first = data.load_tokens(corpus, tokenizer)
        assert isinstance(first, np.memmap) and first.dtype == np.uint16
        assert first.tolist() == ids_of(CAT, tokenizer)
    assert sorted(os.listdir(corpus.parent)) == ["corpus.txt", "corpus.txt.bytes.npy", "corpus.txt.gpt2.npy"]
    refuse(monkeypatch, data, "open", errno.EROFS, is_writing)
    assert all(load(str(corpus), tokenizer) == ids_of(CAT, tokenizer) for tokenizer in (BYTES, gpt2))


@pytest.mark.parametrize("text, nanoseconds, is_seen", [("Fish.\n", 0, True), (DOG, -1, True), (DOG, 0, False)])
def test_a_text_is_tokenized_again_if_its_size_or_time_changed_as_documented(text, nanoseconds, is_seen, corpus):
    assert load(corpus) == ids_of(CAT, BYTES)
    stat = corpus.stat()
    corpus.write_text(text)
    os.utime(corpus, ns=(stat.st_atime_ns, stat.st_mtime_ns + nanoseconds))
    assert load(corpus) == ids_of(text if is_seen else CAT, BYTES)


def test_a_text_that_grows_while_it_is_tokenized_is_tokenized_again(corpus, gpt2):
    data.load_tokens(corpus, tokenizer_that(lambda: corpus.write_text(CAT + DOG)))
    assert load(corpus, gpt2) == ids_of(CAT + DOG, gpt2)


def npy(array, save=np.save):
    """What a `.npy` of an array holds."""
    file = io.BytesIO()
    save(file, array)
    return file.getvalue()


def test_a_torn_or_foreign_file_in_its_place_is_made_anew(corpus, gpt2):
    data.load_tokens(corpus, BYTES)
    data.load_tokens(corpus, gpt2)
    cache, other = Path(f"{corpus}.bytes.npy"), Path(f"{corpus}.gpt2.npy").read_bytes()
    whole = cache.read_bytes()
    torn = [whole[:size] for size in range(len(whole))]
    torn += [whole[:size].ljust(len(whole), b"\0") for size in range(0, len(whole), 7)]  # as a crash leaves blocks
    torn += [b"\0" * 64 + whole[64:], whole + b"\0", whole + whole]
    foreign = [
        other,
        npy(7, np.savez),
        CAT.encode() * 20,
        *map(npy, (np.arange(30), np.array(7), np.array([{}, None]))),
    ]
    foreign += [npy(np.ones(shape, dtype)) for shape in (0, 30, (5, 5)) for dtype in ("u2", "f8")]
    for content in torn + foreign:
        cache.write_bytes(content)
        assert load(corpus) == ids_of(CAT, BYTES), content
        assert cache.read_bytes() == whole


@pytest.mark.parametrize("locks", ["locks", "no locks", "no locks on this disk"])
def test_threads_that_tokenize_a_text_at_once_all_get_its_ids(locks, corpus, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    if locks == "no locks":  # as on Windows
        monkeypatch.setattr(data, "fcntl", None)
    elif locks == "no locks on this disk":
        monkeypatch.setattr(fcntl, "flock", lambda *_: os.stat("/no/such/file"))
    barrier, written, write_tokens = threading.Barrier(8), [], data.write_tokens
    monkeypatch.setattr(data, "write_tokens", lambda *args: (written.append(1), write_tokens(*args)))

    with ThreadPoolExecutor(8) as pool:
        for _ in range(10):
            Path(f"{corpus}.bytes.npy").unlink(missing_ok=True)
            assert list(pool.map(lambda _: (barrier.wait(), load(corpus))[1], range(8))) == [ids_of(CAT, BYTES)] * 8
    assert len(written) == 10 if locks == "locks" else len(written) >= 10
    assert sorted(os.listdir(corpus.parent)) == ["corpus.txt", "corpus.txt.bytes.npy"]


@on_linux
def test_of_processes_that_need_a_text_one_tokenizes_and_the_others_wait_until_its_end(corpus):
    (told, tell), (wait, go), children = os.pipe(), os.pipe(), []

    def tell_and_wait():
        os.write(tell, b"%8d" % os.getpid())
        os.read(wait, 1)  # until this test closes the other end

    def child():
        status = 1
        try:
            signal.alarm(100)  # whatever happens, it ends
            os.close(go)
            data.on_signals(data.end_quietly)
            status = int(load(corpus, tokenizer_that(tell_and_wait)) != [*CAT.encode(), 256])
        except SystemExit as error:
            status = error.code
        finally:
            os._exit(status)

    def others(n):
        """The children that wait for the lock, as soon as there are `n`."""
        while True:
            lines = [line for line in Path("/proc/locks").read_text().splitlines() if "->" in line]
            if len(waiting := [pid for pid in children if f" {pid} " in "".join(lines)]) == n:
                return waiting
            assert not select.select([told], [], [], 0.01)[0], "two tokenize at once"

    def end_of(pid, signum=0):
        os.kill(pid, signum)
        children.remove(pid)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    for _ in range(5):
        children.append(os.fork() or child())
    os.close(tell)
    first = int(os.read(told, 8))
    assert end_of(others(4)[0], signal.SIGTERM) == 128 + signal.SIGTERM
    assert len(others(3)) == 3 and end_of(first, signal.SIGKILL) == -signal.SIGKILL
    assert int(os.read(told, 8)) in children and len(others(2)) == 2  # the next one tokenizes
    os.close(go)
    assert [end_of(pid) for pid in list(children)] == [0, 0, 0]
    assert os.read(told, 8) == b""  # nobody else tokenized
    os.close(told)
    os.close(wait)
    assert Path(f"{corpus}.gpt2.npy").exists() and len(os.listdir(corpus.parent)) == 3  # kill -9 leaves a part


def refuse(monkeypatch, place, name, code, when):
    """Let a function fail as on a read-only or full disk: also for root, whom modes do not stop."""
    function = getattr(place, name, open)

    def refusing(*args, **options):
        if when(*args):
            raise OSError(code, os.strerror(code), str(args[0]))
        return function(*args, **options)

    monkeypatch.setattr(place, name, refusing, raising=False)


def is_writing(path, mode="r"):
    return "w" in mode


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
@pytest.mark.parametrize("place, name, when", [(data, "open", is_writing), (os, "replace", lambda *paths: True)])
def test_where_its_ids_cannot_be_written_an_error_names_the_way(place, name, when, code, tmp_path, monkeypatch, capsys):
    path, output = tmp_path / "the corpus.txt", tmp_path / "tokens.npy"
    path.write_text(CAT)
    with monkeypatch.context() as context, refusal(os.strerror(code), error=OSError) as caught:
        refuse(context, place, name, code, when)
        load(path)
    assert str(caught.value).startswith(f"cannot write {path}.bytes.npy") and ".tmp" not in str(caught.value)
    assert os.listdir(tmp_path) == ["the corpus.txt"]
    command = re.search(r"python data\.py (.+ --tokenizer bytes --output )tokens\.npy", str(caught.value))[1]
    assert call_main(monkeypatch, capsys, *shlex.split(command), output)[0] == 0
    assert load(output) == ids_of(CAT, BYTES)


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOENT])  # without permission, or gone since it was looked for
@pytest.mark.parametrize("place, name, file", [(data, "open", "c.txt"), (os, "open", "c.txt"), (np, "load", "c.npy")])
def test_a_file_that_cannot_be_read_is_named_and_nothing_else(place, name, file, code, tmp_path, monkeypatch):
    path = tmp_path / file
    path.write_bytes(npy(np.arange(30)))
    with monkeypatch.context() as context, refusal(str(path), os.strerror(code), error=OSError) as caught:
        refuse(context, place, name, code, lambda *args: str(args[0]) == str(path))
        load(path)
    assert not any(word in str(caught.value) for word in ("write", "--output", "damaged"))
    assert os.listdir(tmp_path) == [file]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, MemoryError, OSError])
def test_an_interruption_leaves_no_litter_and_the_earlier_file(interruption, corpus):
    def interrupt():
        assert len(os.listdir(corpus.parent)) == 3  # there is something to clean up
        raise interruption

    output = corpus.with_name("tokens.npy")
    data.write_tokens([corpus], BYTES, output)
    with pytest.raises(interruption):
        data.write_tokens([corpus], tokenizer_that(interrupt), output)
    assert sorted(os.listdir(corpus.parent)) == ["corpus.txt", "tokens.npy"] and load(output) == ids_of(CAT, BYTES)


# ----------------------------------------------------------------------------------------------------------------------
# Bad files and ready files


def first_bad_byte(content):
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start


def test_text_that_is_not_utf8_names_the_byte_that_decoding_the_whole_names(tokenizer, tmp_path, monkeypatch):
    contents = [
        b"\xff\xfeT\0h\0e\0",  # UTF-16 with a BOM, as Windows writes it
        b"caf\xe9 au lait",  # Latin-1
        *(b"1234567\xff", b"12345678\xff"),  # the last byte of a block of 8, and the first of the next
        *(b"1234567\xc3(", b"123456\xe2\x82("),  # cut by the border, then no continuation
        *(b"12345\xf0\x9f\x98", b"1234567\xf0\x9f", b"abc\xe2", b"ab \xe2\x82\xac" * 5 + b"\xe2\x82"),  # truncated
        *(b"ab\xed\xa0\x80", b"x" * 12_345 + b"\xff"),  # a surrogate; far behind
    ]
    draw = random.Random(2)
    for seed in range(150):
        content = bytearray(hostile_text(seed, 12).encode())
        content[draw.randrange(len(content))] = draw.randrange(256)
        contents.append(bytes(content))
    path, offsets = tmp_path / "bad.txt", [first_bad_byte(content) for content in contents]
    assert offsets[:12] == [0, 3, 7, 8, 7, 6, 5, 7, 3, 30, 2, 12_345] and len(set(offsets)) > 20
    for number, (content, offset) in enumerate(zip(contents, offsets)):
        monkeypatch.setattr(data, "BLOCK_BYTES", 8 if number < 12 else draw.randrange(1, 9))
        path.write_bytes(content)
        if offset is not None:
            with refusal(str(path), f"not UTF-8 text: byte {offset:,} ") as caught:
                load(path, tokenizer)
            if data.fcntl and caught.tb:  # who looks at an error does not hold the text, or would wait for itself
                data.Lock(path, wait=False)
            assert os.listdir(tmp_path) == ["bad.txt"]


DAMAGED = "no .npy file of token ids, or it is damaged"
BAD_FILES = {  # name: (content, or a function that makes it; reason)
    "empty.npy": (b"", "is empty"),
    "folder": (Path.mkdir, r"is a folder: .*python data\.py FILE\.\.\. --output tokens\.npy"),
    "missing.npy": (Path, "there is no file"),
    "dangling.txt": (lambda path: path.symlink_to("nowhere"), "there is no file"),
    "odd.bin": (bytes(33), r"uint16.* 33 bytes .*odd"),
    "header.bin": (llm_c_header(10)[:500], "uint16"),
    "odd after the header.bin": (llm_c_header(2) + b"abc", "uint16.* 1,027 bytes"),
    "wide.bin": (np.arange(2000, dtype="<u4").tobytes(), "ids of 32 bits"),
    "floats.npy": (npy(np.ones(30)), "whole numbers.* float64"),
    "durations.npy": (npy(np.ones(30, dtype="m8[s]")), "whole numbers.* timedelta"),
    "rows.npy": (npy(np.ones((6, 5), dtype=np.uint16)), r"one dimension.* \(6, 5\)"),
    "scalar.npy": (npy(np.uint16(3)), r"one dimension.* \(\)"),
    "objects.npy": (npy(np.array([{}, 1], dtype=object)), DAMAGED),
    "archive.npy": (npy(np.arange(30), np.savez), DAMAGED),
    "truncated.npy": (npy(np.arange(1000))[:1000], DAMAGED),
    "header.npy": (b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '<u2', 'shape': (\n".ljust(178), DAMAGED),
    "long.npy": (b"\x93NUMPY\x01\x00\x20\x4e" + b"{}".ljust(20_000), DAMAGED),  # of which numpy speaks in several lines
    "text.npy": (CAT.encode(), DAMAGED),
    "x" * 250: (
        b"text",
        r"cannot write .*python data\.py \S+ --tokenizer bytes --output tokens\.npy",
    ),  # too long a name
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused_in_one_line_that_names_it(name, tmp_path):
    path, (content, reason) = tmp_path / name, BAD_FILES[name]
    content(path) if callable(content) else path.write_bytes(content)
    with refusal(str(path), error=(ValueError, OSError)) as caught:
        load(path)
    assert re.search(reason, str(caught.value))
    assert os.listdir(tmp_path) in ([], [name])


def test_an_npy_of_any_integer_type_opens_as_it_is_with_the_same_fingerprint(tmp_path):
    path, expected = tmp_path / "ids.npy", data.fingerprint(np.arange(200))
    assert re.fullmatch("[0-9a-f]{12}", expected)
    for dtype in ("u1", "<u2", ">u2", "<i4", "<i8", ">i8", "<u8"):
        np.save(path, np.arange(200).astype(dtype))
        tokens = data.load_tokens(path, BYTES)
        assert isinstance(tokens, np.memmap) and (tokens.dtype, data.fingerprint(tokens)) == (dtype, expected)
        assert [ids.tolist() for ids in data.TokenDataset(tokens, 199, 257)[0]] == [[*range(199)], [*range(1, 200)]]
        assert os.listdir(tmp_path) == ["ids.npy"]


@pytest.mark.parametrize("header", [b"", llm_c_header(5003)], ids=["nanoGPT", "llm.c"])
@pytest.mark.parametrize("more", [[], [*range(5000)]])
def test_a_bin_is_read_as_little_endian_uint16(header, more, tmp_path, gpt2):
    (tmp_path / "ids.bin").write_bytes(header + b"\x01\x00\x50\xc4\x00\x01" + np.array(more, dtype="<u2").tobytes())
    tokens = data.load_tokens(tmp_path / "ids.bin", gpt2)
    assert isinstance(tokens, np.memmap) and tokens.tolist() == [1, 50256, 256, *more]
    assert data.fingerprint(tokens) == data.fingerprint(np.array([1, 50256, 256, *more]))


def test_ids_remember_the_tokenizer_that_made_them_and_foreign_files_say_nothing(corpus, gpt2):
    # All ids of bytes are valid for gpt2, so nothing else would show the mistake.
    output, foreign = corpus.with_name("tokens.npy"), corpus.with_name("foreign.npy")
    data.write_tokens([corpus], BYTES, output)
    for path in (output, Path(f"{corpus}.bytes.npy")):
        assert load(corpus) == load(path)
        with refusal(str(path), "--tokenizer bytes"):
            load(path, gpt2)
    foreign.write_bytes(npy(np.arange(30)) + b"checksum 1234\n\xff")
    assert load(foreign) == load(foreign, gpt2) == list(range(30))


# ----------------------------------------------------------------------------------------------------------------------
# Windows, their order, and how steps are made of them


def test_windows_follow_each_other_without_gap_or_overlap():
    for n_tokens, context_length in itertools.product(range(8, 30), (1, 2, 3, 4, 7)):
        dataset = data.TokenDataset(np.arange(n_tokens, dtype=np.uint16), context_length, n_tokens)
        starts = [start for start in range(0, n_tokens, context_length) if start + context_length < n_tokens]
        assert len(dataset) == len(starts)
        for (inputs, targets), begin in zip(dataset, starts):
            assert inputs.dtype == targets.dtype == torch.int64
            assert inputs.tolist() == list(range(begin, begin + context_length))
            assert targets.tolist() == list(range(begin + 1, begin + context_length + 1))

        # Each token but the first is a target once, up to a rest that fills no window.
        seen = [token for _, targets in dataset for token in targets.tolist()]
        assert seen == list(range(1, len(dataset) * context_length + 1))
        assert n_tokens - 1 - len(seen) < context_length
        with pytest.raises(IndexError):
            dataset[len(dataset)]


def test_a_loader_makes_contiguous_copies_of_the_windows_that_it_is_asked_for():
    tokens, order = np.arange(101), [5, 0, 9, 5, 7, 1]  # int64 already, so that a cast alone would not copy
    dataset = data.TokenDataset(tokens, 10, 101)
    assert np.shares_memory(dataset.windows, tokens)
    batches = list(DataLoader(dataset, batch_size=4, sampler=order))
    assert [inputs.shape for inputs, _ in batches] == [(4, 10), (2, 10)]
    assert all(ids.dtype == torch.int64 and ids.is_contiguous() for batch in batches for ids in batch)
    for index, inputs, targets in zip(order, *(torch.cat(parts) for parts in zip(*batches))):
        assert torch.equal(inputs, dataset[index][0]) and torch.equal(targets, dataset[index][1])
    dataset[0][0].zero_()
    assert tokens.tolist() == list(range(101))


@pytest.mark.parametrize("dtype, wrong", [("<u2", 257), ("<i8", 257), ("<i8", -1), ("<i2", -1), ("<u8", 2**64 - 1)])
@pytest.mark.parametrize("place", [0, 1, 499_999, 999_998, 999_999])
def test_an_id_outside_the_vocabulary_is_refused_at_once(dtype, wrong, place):
    tokens = np.zeros(1_000_000, dtype=dtype)
    tokens[0] = tokens[-1] = tokens[place - 1] = 256  # the largest id is none too many
    data.TokenDataset(tokens, 64, 257)
    tokens[place] = wrong
    with refusal(f"id {wrong},", "0 to 256", "--tokenizer"):
        data.TokenDataset(tokens, 64, 257)


def test_an_id_outside_the_vocabulary_that_no_start_looks_at_is_refused_when_it_is_fetched():
    tokens, window = np.zeros(4_000_000, dtype=np.uint16), 30_000 // 64
    tokens[30_000] = 257  # between the first two of 64 blocks
    dataset = data.TokenDataset(tokens, 64, 257)
    dataset.__getitems__([window - 1, window + 1])
    for fetch in (lambda: dataset[window], lambda: dataset.__getitems__([0, window])):
        with pytest.raises(ValueError, match="id 257"):
            fetch()
    data.TokenDataset(np.full(100, 65_535, dtype=np.uint16), 8, 70_000)  # no id of 16 bits is outside this vocabulary


def test_the_last_tenth_is_for_validation_and_shares_no_window_with_training():
    for n_tokens in (130, 1_000, 1_009, 5_003):
        sets = data.split_tokens(np.arange(n_tokens, dtype=np.uint16), 12, n_tokens)
        trained, validated = ({id for pair in ids for part in pair for id in part.tolist()} for ids in sets)
        cut = n_tokens - n_tokens // 10
        assert (min(trained), min(validated)) == (0, cut)
        assert cut - 12 <= max(trained) < cut and n_tokens - 12 <= max(validated)
    for n_tokens, n_val in [(9_999_990, 999_999), (10_000_010, 10**6), (30_000_000, 10**6)]:  # at most a million
        sets = data.split_tokens(np.broadcast_to(np.uint16(7), (n_tokens,)), 1, 257)
        assert [len(windows) for windows in sets] == [n_tokens - n_val - 1, n_val - 1]


def test_a_corpus_too_short_for_its_context_or_for_one_step_says_how_much_it_needs():
    for n_tokens in (0, 1, 9, 10, 649):
        with refusal(f"{n_tokens:,} tokens", "at least 650", "--data", "--context-length"):
            data.split_tokens(np.zeros(n_tokens, dtype=np.uint16), 64, 257)
    assert [len(windows) for windows in data.split_tokens(np.zeros(650, dtype=np.uint16), 64, 257)] == [9, 1]
    for n_windows, n_processes in itertools.product((0, 1, 5, 23), (1, 4)):
        with refusal(f"{n_windows} windows", "needs 24", "--data", "--global-batch-size", "--context-length"):
            data.plan_steps(n_windows, 24, 2, n_processes)


@pytest.mark.parametrize("n_skip", [0, 1, 4, 95, 96, 99, 100])
def test_skipped_windows_are_never_read(n_skip):
    dataset, read = data.TokenDataset(np.arange(1001), 10, 1001), []
    getitems = dataset.__getitems__
    dataset.__getitems__ = lambda indices: (read.extend(indices), getitems(indices))[1]
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(5))
    expected = torch.randperm(100, generator=torch.Generator().manual_seed(5)).tolist()[n_skip:]
    loader = DataLoader(dataset, batch_size=4, sampler=itertools.islice(sampler, n_skip, None))  # as the scripts do
    assert [int(inputs[0]) // 10 for batch, _ in loader for inputs in batch] == expected == read


@pytest.mark.parametrize("n_processes", [1, 2, 3, 4])
def test_the_random_and_the_distributed_sampler_deal_the_same_permutation_anew_each_epoch(n_processes):
    generator, n_full = torch.Generator(), 100 // n_processes  # whole rounds: what follows is padding, no step uses it
    single, orders = RandomSampler(range(100), generator=generator), []
    for seed, epoch in [(123, 0), (123, 1), (0, 7), (123, 0)]:
        samplers = [DistributedSampler(range(100), n_processes, rank, seed=seed) for rank in range(n_processes)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        generator.manual_seed(seed + epoch)
        orders.append(list(single))
        assert [i for dealt in [*zip(*samplers)][:n_full] for i in dealt] == orders[-1][: n_full * n_processes]
        assert sorted(orders[-1]) == list(range(100))
    assert orders[0] == orders[3] and orders[0] != orders[1] != orders[2] != orders[0]


def test_a_plan_shows_every_step_the_global_batch_in_the_largest_equal_parts():
    for global_batch_size, batch_size in itertools.product(range(1, 40), (1, 2, 3, 5, 8, 64)):
        for n_processes in (n for n in range(1, 41) if global_batch_size % n == 0):
            forward_batch, accumulation, n_steps = data.plan_steps(1000, global_batch_size, batch_size, n_processes)
            assert forward_batch * accumulation * n_processes == global_batch_size
            assert 1 <= forward_batch <= batch_size
            share = global_batch_size // n_processes
            assert not [n for n in range(forward_batch + 1, batch_size + 1) if n <= share and share % n == 0]
            assert n_steps == 1000 // global_batch_size
    assert [data.plan_steps(n_windows, 24, 8, 1)[2] for n_windows in (24, 47, 48)] == [1, 1, 2]
    defaults = [preset.global_batch_size for preset in gpt.PRESETS.values()]
    assert not any(size % n for size in defaults for n in (1, 2, 3, 4, 6, 8))


def test_processes_that_do_not_divide_the_batch_are_refused_with_values_that_work():
    for global_batch_size, n_processes in itertools.product(range(1, 50), range(1, 60)):
        if global_batch_size % n_processes:
            with refusal(f"{global_batch_size} sequences per step do not divide among {n_processes} proc") as caught:
                data.plan_steps(10_000, global_batch_size, 8, n_processes)
            named = re.search(r"--global-batch-size ([\d or]+), or ([\d, ]+) processes", str(caught.value))
            sizes, counts = ([int(n) for n in re.findall(r"\d+", part)] for part in named.groups())
            assert counts and abs(sizes[-1] - global_batch_size) < n_processes  # which is near
            for size, count in [*((size, n_processes) for size in sizes), *((global_batch_size, n) for n in counts)]:
                data.plan_steps(10_000, size, 8, count)


def test_any_token_of_a_corpus_up_to_a_million_changes_the_fingerprint():
    draw = np.random.default_rng(3)
    for n_tokens, n_places in [(1, 1), (2, 2), (500, 500), (16_385, 40), (100_001, 20), (1_000_000, 20)]:
        tokens = draw.integers(0, 50_257, n_tokens).astype(np.uint16)
        before = data.fingerprint(tokens)
        for place in {0, n_tokens - 1, *draw.choice(n_tokens, n_places, replace=False).tolist()}:
            tokens[place] ^= 1
            assert data.fingerprint(tokens) != before
            tokens[place] ^= 1
        assert data.fingerprint(tokens) == before
    for n_tokens in [*range(1, 50), 16_383, 16_384, 16_385, 32_769, 777_777, 999_999, 1_000_000, 2**20]:
        seen = np.zeros(n_tokens, dtype=bool)
        for block in data._spaced_blocks(np.arange(n_tokens)):
            seen[block] = True
        assert seen.all(), n_tokens


def test_the_fingerprint_knows_length_and_order_but_not_what_stands_between_the_blocks_as_documented():
    tokens = np.zeros(4_000_000, dtype=np.uint16)  # above a million tokens the blocks alone do not tell the length
    assert len({data.fingerprint(tokens[:n]) for n in (998, 999, 1000, 3_999_999, 4_000_000)}) == 5
    assert len({data.fingerprint(np.array(ids)) for ids in ([1, 2], [2, 1], [258])}) == 3
    before = data.fingerprint(tokens)
    for place, is_seen in [(30_000, False), (0, True), (16_383, True), (-16_384, True), (-1, True)]:
        tokens[place] = 1
        assert (data.fingerprint(tokens) != before) == is_seen
        tokens[place] = 0


# ----------------------------------------------------------------------------------------------------------------------
# python data.py


def call_main(monkeypatch, capsys, *args):
    """(status, stdout, stderr) of `python data.py` with these arguments, without the seconds that a launch takes."""
    monkeypatch.setattr(sys, "argv", ["data.py", *map(str, args)])
    monkeypatch.setattr(data, "on_signals", lambda handler: None)
    capsys.readouterr()
    try:
        status = data.main() or 0
    except SystemExit as error:
        status = error.code or 0
    return status, *capsys.readouterr()


def test_the_command_tokenizes_each_file_beside_it(monkeypatch, capsys, corpus, tokenizer):
    other = corpus.with_name("the other.txt")
    other.write_text(DOG)
    status, stdout, stderr = call_main(monkeypatch, capsys, corpus, other, "--tokenizer", tokenizer.name)
    assert (status, stderr) == (0, "")
    monkeypatch.setattr(data, "write_tokens", lambda *_: pytest.fail("a run would tokenize again"))
    for path, line in zip((corpus, other), stdout.splitlines()):
        expected = ids_of(path.read_text(), tokenizer)
        assert f"{path}: {len(expected):,} tokens" in line
        assert f"--data {shlex.quote(str(path))} --tokenizer {tokenizer.name}" in line
        assert load(path, tokenizer) == load(f"{path}.{tokenizer.name}.npy", tokenizer) == expected


def test_the_command_joins_files_and_takes_gpt2_unless_told_otherwise(monkeypatch, capsys, corpus, gpt2):
    other, output = corpus.with_name("other.txt"), corpus.with_name("tokens.npy")
    other.write_text(DOG)
    status, stdout, stderr = call_main(monkeypatch, capsys, corpus, other, "--output", output)
    assert (status, stderr) == (0, "") and f"--data {output} --tokenizer gpt2" in stdout
    assert load(output, gpt2) == ids_of(CAT, gpt2) + ids_of(DOG, gpt2)
    assert sorted(os.listdir(corpus.parent)) == ["corpus.txt", "other.txt", "tokens.npy"]
    status, stdout, stderr = call_main(monkeypatch, capsys, "--help")
    assert (status, stderr) == (0, "")
    assert all(word in stdout for word in ("FILE", "--tokenizer", "{bytes,gpt2}", "default: gpt2", "--output", "UTF-8"))


@pytest.mark.parametrize(
    "args, reason",
    [
        ("", "FILE"),
        ("{corpus} --tokenizer gpt4", "gpt4"),
        ("{corpus} --nonsense", "--nonsense"),
        ("{folder}/missing.txt", "missing.txt"),
        ("{corpus} {folder}/missing.txt", "missing.txt"),
        ("{folder} --output {folder}/t.npy", "folder"),
        ("{folder}/empty.txt --output {folder}/t.npy", "empty.txt"),
        ("{folder}/bad.txt --output {folder}/t.npy", "byte 3 "),
        ("{corpus} --output {folder}/t.bin", "t.bin must end in .npy"),
        ("{corpus} --output ''", "must end in .npy"),
        ("{corpus} --output {folder}/nowhere/t.npy", "cannot write {folder}/nowhere/t.npy: No such file"),
        ("{corpus} --output {corpus}/t.npy", "cannot write {corpus}/t.npy: Not a directory"),
        ("{corpus} --output {folder}/folder.npy", "cannot write {folder}/folder.npy: Is a directory"),
        ("{corpus} {folder}/text.npy --output {folder}/text.npy", "one of the files to read"),
        ("{corpus} --output {folder}/link.npy", "one of the files to read"),
    ],
)
def test_the_command_refuses_in_one_line_and_leaves_nothing(args, reason, monkeypatch, capsys, corpus):
    folder = corpus.parent
    (folder / "empty.txt").touch()
    (folder / "bad.txt").write_bytes(b"caf\xe9")
    (folder / "folder.npy").mkdir()
    (folder / "text.npy").write_text("text that has a strange name")
    (folder / "link.npy").symlink_to(corpus)

    def contents():
        return {path.name: path.is_file() and path.read_bytes() for path in folder.iterdir()}

    before, fill = contents(), {"folder": folder, "corpus": corpus}
    words = shlex.split(f"--tokenizer bytes {args.format(**fill)}")
    status, stdout, stderr = call_main(monkeypatch, capsys, *words)
    assert (status, stdout) == (2, "")
    assert re.fullmatch("error: .+\n", stderr) and reason.format(**fill) in stderr
    assert contents() == before


def test_a_launch_prints_one_line_for_the_file_it_makes(corpus):
    output = corpus.with_name("tokens.npy")
    status, stdout, stderr = run("data.py", corpus, "--tokenizer", "bytes", "--output", output)
    assert (status, stderr) == (0, "") and re.fullmatch(f"{output}: 25 tokens; .+\n", stdout)
    assert load(output) == ids_of(CAT, BYTES)


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_while_the_command_tokenizes_leaves_no_litter(signum, corpus, gpt2_vocabulary):
    corpus.write_text(data.builtin_text() * 60, encoding="utf-8")
    process, deadline = start("data.py", corpus), time.monotonic() + 120
    while not list(corpus.parent.glob("*.tmp")):
        assert process.poll() is None and time.monotonic() < deadline, "it wrote nothing"
        time.sleep(0.01)
    process.send_signal(signum)
    status, stdout, stderr = finish(process)
    assert (status, stdout) == (128 + signum, "") and re.fullmatch(r"(.+ MB tokenized, .+ left\n)*", stderr)
    assert os.listdir(corpus.parent) == ["corpus.txt"]


def test_nothing_here_knows_how_many_processes_train():
    assert "distributed" not in Path(data.__file__).read_text()
