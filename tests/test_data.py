"""A corpus: text becomes the right ids, in bounded memory and a file that is never half there; ids become windows."""

import errno
import importlib.metadata
import os
import random
import re
import signal
import sys
import threading
import time
from math import lcm
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
from conftest import ROOT, finish, run, start
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

import data

ON_LINUX = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory use from /proc")
# Before 0.13 the time that tiktoken takes for a word grows with the square of its length.
TIKTOKEN_IS_QUADRATIC = tuple(map(int, importlib.metadata.version("tiktoken").split(".")[:2])) < (0, 13)


@pytest.fixture(scope="module", params=["bytes", "gpt2"])
def tokenizer(request, gpt2_vocabulary):
    return data.get_tokenizer(request.param)


@pytest.fixture(scope="module")
def bytes_tokenizer():
    return data.get_tokenizer("bytes")


@pytest.fixture(scope="module")
def gpt2_tokenizer(gpt2_vocabulary):
    return data.get_tokenizer("gpt2")


def ids_of(text, tokenizer):
    return [*tokenizer.encode_ordinary(text), tokenizer.eot_token]


def ids_in_pieces(folder, text, tokenizer):
    """The ids of a text that goes through a file, byte by byte as it is."""
    path = Path(folder, "text.txt")
    path.write_bytes(text.encode())
    data.write_tokens([path], tokenizer, Path(folder, "ids.npy"))
    return np.load(Path(folder, "ids.npy"))


def one_line(caught):
    """The message of an error caught by pytest.raises, which must fit on a line."""
    message = str(caught.value)
    assert message and "\n" not in message
    return message


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizers


def test_the_bytes_tokenizer_has_an_id_for_each_byte_and_one_for_the_end_of_a_text(bytes_tokenizer):
    text = "na\u00efve \U0001f600\r\n\x00<|endoftext|>"
    assert bytes_tokenizer.encode_ordinary(text) == list(text.encode())
    assert (bytes_tokenizer.eot_token, bytes_tokenizer.n_vocab) == (256, 257)
    assert bytes_tokenizer.decode([*text.encode(), 256]) == text + data.END_OF_TEXT


def test_the_gpt2_tokenizer_is_the_published_one(gpt2_tokenizer):
    assert (gpt2_tokenizer.eot_token, gpt2_tokenizer.n_vocab) == (50256, 50257)
    assert gpt2_tokenizer.encode_ordinary("hello world") == [31373, 995]


def test_another_tokenizer_is_refused():
    with pytest.raises(ValueError, match="bytes or gpt2"):
        data.get_tokenizer("gpt4")


@pytest.mark.parametrize("cache", ["empty", "damaged", "under another name"])
def test_without_network_and_vocabulary_the_error_says_what_to_do(cache, gpt2_vocabulary, tmp_path, monkeypatch):
    for path in gpt2_vocabulary.iterdir():
        if cache == "damaged":
            (tmp_path / path.name).write_bytes(path.read_bytes()[:1000])
        elif cache == "under another name":
            (tmp_path / f"{path.name}.bpe").write_bytes(path.read_bytes())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})  # forgets what this process has loaded
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # no network, wherever the test runs
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with pytest.raises(OSError) as caught:
        data.get_tokenizer("gpt2")
    message = one_line(caught)
    assert "TIKTOKEN_CACHE_DIR" in message and "--tokenizer bytes" in message


# ----------------------------------------------------------------------------------------------------------------------
# The ids of a text in pieces are those of the whole text

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


def count_pieces(path):
    return sum(1 for _ in data._pieces(path))


@pytest.mark.parametrize("block_bytes", [2, 3, 4, 5, 7, 11, 16, 31, 64, 257])
def test_hostile_texts_in_pieces_have_the_ids_of_the_whole(block_bytes, tokenizer, tmp_path, monkeypatch):
    text = hostile_text(seed=block_bytes, n_snippets=20_000)
    monkeypatch.setattr(data, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)  # wide batches, so few of them
    assert ids_in_pieces(tmp_path, text, tokenizer).tolist() == ids_of(text, tokenizer)
    assert count_pieces(tmp_path / "text.txt") > 200  # as many cuts


@pytest.mark.parametrize("left", ["a", "!", "'", "1", "\x1c", "\u3000", "\u0301", " ", "\n", "\r", "\x85", "don't"])
@pytest.mark.parametrize(
    "right", ["a", "!", "'s", " ", " a", "  a", "\n", "\n\n", "\r\n", "\x1c", "\x1f!", "\x85", "\xa0a"]
)
def test_no_cut_between_two_snippets_changes_the_ids(left, right, gpt2_tokenizer, tmp_path, monkeypatch):
    text = left + right
    for block_bytes in range(2, len(text.encode()) + 1):
        monkeypatch.setattr(data, "BLOCK_BYTES", block_bytes)
        path = tmp_path / "text.txt"
        path.write_bytes(text.encode())
        pieces = list(data._pieces(path))
        assert "".join(pieces) == text
        assert [id for piece in pieces for id in gpt2_tokenizer.encode_ordinary(piece)] == (
            gpt2_tokenizer.encode_ordinary(text)
        )


# What stands across the borders of blocks is chosen here, not drawn.
BLOCK = 4096
WORDS = "It's the <|endoftext|> of what we'll say. " * (BLOCK // 20)
LONG_TEXTS = {
    "blank lines across a border": WORDS[: BLOCK - 5] + "\n" * 20 + WORDS,
    "spaces across a border": WORDS[: BLOCK - 5] + " " * 20 + WORDS,
    "a border between CR and LF": WORDS[: BLOCK - 4].rstrip().ljust(BLOCK - 1, ".") + "\r\n" * 10 + WORDS,
    "a border in a contraction": "a" * (BLOCK - 1) + "'ll go" + WORDS,
    "a border in the name of the end of text": WORDS[: BLOCK - 7] + "<|endoftext|>" + WORDS,
    "a border in an emoji": "x" + "\U0001f600" * (BLOCK // 4) + " \U0001f469\u200d\U0001f467" * (BLOCK // 6),
    "a border before a combining mark": "x" * (BLOCK - 1) + "e\u0301\u0301 " * BLOCK,
    "a BOM": "\ufeff" + WORDS * 2,
    "CRLF": "a line\r\n\r\n  and another\r\n" * (BLOCK // 5),
    "only white space": " \n\t\r\n  \n\n" * (BLOCK // 3),
    "only spaces": " " * (2 * BLOCK + 3),
    "white space at both ends": "\n \n" * BLOCK + WORDS + " \n " * BLOCK,
    "a block and no more": WORDS[:BLOCK],
}


@pytest.mark.parametrize("name", LONG_TEXTS)
def test_long_texts_in_pieces_have_the_ids_of_the_whole(name, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "BLOCK_BYTES", BLOCK)
    text = LONG_TEXTS[name]
    assert ids_in_pieces(tmp_path, text, tokenizer).tolist() == ids_of(text, tokenizer)


@pytest.mark.parametrize(
    "alphabet", ["abcdefgh", "\n \t", "\u0301\U0001f600\u200d"], ids=["letters", "white space", "marks"]
)
@pytest.mark.parametrize(
    "name, n_bytes",
    [
        ("bytes", 10 * 2**20),
        ("gpt2", 20_000 if TIKTOKEN_IS_QUADRATIC else 900_000),
        pytest.param("gpt2", 10 * 2**20, marks=pytest.mark.slow),
    ],
)
def test_megabytes_without_a_place_to_cut_have_the_ids_of_the_whole(name, n_bytes, alphabet, gpt2_vocabulary, tmp_path):
    if TIKTOKEN_IS_QUADRATIC and name == "gpt2" and n_bytes > 20_000:
        pytest.skip("takes this tiktoken a day")
    tokenizer = data.get_tokenizer(name)
    part = "".join(random.Random(1).choices(alphabet, k=997))
    text = part * (n_bytes // len(part.encode()) + 1)
    assert np.array_equal(ids_in_pieces(tmp_path, text, tokenizer), ids_of(text, tokenizer))


def test_a_million_spaces_before_a_word_are_refused_with_a_reason(gpt2_tokenizer, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("a" + " " * 999_999 + "b")
    with pytest.raises(ValueError) as caught:
        data.load_tokens(text, gpt2_tokenizer)
    assert str(text) in one_line(caught) and "white-space" in str(caught.value)
    assert os.listdir(tmp_path) == ["text.txt"]


def test_the_longest_run_of_spaces_that_tiktoken_takes_is_not_refused(gpt2_tokenizer, tmp_path):
    text = "a" + " " * 999_998 + "bcd"
    assert np.array_equal(ids_in_pieces(tmp_path, text, gpt2_tokenizer), ids_of(text, gpt2_tokenizer))


def test_bytes_take_any_run_of_spaces(bytes_tokenizer, tmp_path):
    text = "a" + " " * 1_100_000 + "b"
    assert np.array_equal(ids_in_pieces(tmp_path, text, bytes_tokenizer), ids_of(text, bytes_tokenizer))


def test_no_text_can_forge_the_end_of_a_document(tokenizer, tmp_path):
    ids = ids_in_pieces(tmp_path, "one <|endoftext|> two<|endoftext|>", tokenizer)
    assert np.flatnonzero(ids == tokenizer.eot_token).tolist() == [len(ids) - 1]
    assert tokenizer.decode(ids[:-1].tolist()) == "one <|endoftext|> two<|endoftext|>"


def test_each_of_several_files_ends_with_the_end_of_text_token(tokenizer, tmp_path):
    texts = ["first\n", "second", " third \n\n"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    n_tokens = data.write_tokens(sorted(tmp_path.glob("*.txt")), tokenizer, tmp_path / "all.npy")
    ids = data.load_tokens(tmp_path / "all.npy", tokenizer)
    assert ids.tolist() == [id for text in texts for id in ids_of(text, tokenizer)]
    assert n_tokens == len(ids)


def test_the_text_that_comes_with_python_has_its_own_ids(tokenizer):
    tokens = data.load_tokens(None, tokenizer)
    assert tokens.tolist() == ids_of(data.builtin_text(), tokenizer)
    assert len(data.builtin_text()) > 400_000


def test_a_vocabulary_that_does_not_fit_uint16_is_refused_and_not_wrapped(tmp_path):
    # Report: an id of 70,000 stored in 16 bits becomes 4,464, and training goes on with garbage.
    ranks = {bytes([value]): value for value in range(256)}
    wide = tiktoken.Encoding(
        "wide", pat_str=r"(?s:.)", mergeable_ranks=ranks, special_tokens={data.END_OF_TEXT: 70_000}
    )
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(ValueError, match="uint16"):
        data.write_tokens([tmp_path / "text.txt"], wide, tmp_path / "ids.npy")
    assert data.load_tokens(None, wide)[-1] == 70_000


# ----------------------------------------------------------------------------------------------------------------------
# Memory and time

MEASURE_TOKENIZING = """
import os, sys
import data

def memory(field):  # of this program alone: ru_maxrss starts with its parent's
    return int(next(line for line in open("/proc/self/status") if line.startswith(field)).split()[1]) * 1024

os.cpu_count = lambda: int(sys.argv[3])
tokenizer = data.get_tokenizer(sys.argv[1])
tokenizer.encode_ordinary("ready")
before = memory("VmRSS")
tokens = data.load_tokens(sys.argv[2], tokenizer)
print(memory("VmHWM") - before, len(tokens))  # the highest since the start
"""


@pytest.mark.slow
@ON_LINUX
@pytest.mark.parametrize("n_cores", [2, 128])
@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_tokenizing_200_megabytes_adds_less_than_300_megabytes_of_memory(name, n_cores, tmp_path, gpt2_vocabulary):
    block = data.builtin_text().encode()
    with open(tmp_path / "corpus.txt", "wb") as file:
        while file.tell() < 200e6:
            file.write(block)
    (tmp_path / "measure.py").write_text(MEASURE_TOKENIZING)
    flags = name, tmp_path / "corpus.txt", n_cores
    status, stdout, stderr = run("measure.py", *flags, folder=tmp_path, env={"PYTHONPATH": ROOT}, timeout=900)
    assert status == 0, stderr
    added, n_tokens = map(int, stdout.split())
    print(f"{name}, {n_cores} cores: {added / 1e6:.0f} MB added for {n_tokens:,} tokens")
    assert added < 300e6
    assert n_tokens > 200e6 / 6


def resident_bytes():
    return int(next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in x).split()[1]) * 1024


def quickest(function, tries=5):
    """The seconds of the quickest of some calls: the machine may be busy, the function is not."""
    seconds = []
    for _ in range(tries):
        begin = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def sparse_npy(path, n_tokens, stamp=b""):
    """A `.npy` of zeros that takes no room on disk."""
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<u2", "fortran_order": False, "shape": (n_tokens,)})
        file.seek(2 * n_tokens, os.SEEK_CUR)
        file.write(stamp)
        file.truncate()
    return path


def sparse_bin(path, n_tokens):
    path.touch()
    os.truncate(path, 2 * n_tokens)
    return path


@ON_LINUX
@pytest.mark.parametrize("make, name", [(sparse_npy, "ids.npy"), (sparse_bin, "ids.bin")])
def test_ten_gigabytes_of_ids_open_at_once_and_stay_on_disk(make, name, tmp_path, gpt2_tokenizer):
    path = make(tmp_path / name, 5 * 10**9)
    assert quickest(lambda: data.load_tokens(path, gpt2_tokenizer)) < 0.1

    def open_and_use():
        tokens = data.load_tokens(path, gpt2_tokenizer)
        data.fingerprint(tokens)
        train_set, val_set = data.split_tokens(tokens, 1024, gpt2_tokenizer.n_vocab)
        train_set.__getitems__([0, len(train_set) // 2, len(train_set) - 1])
        return train_set, val_set

    before = resident_bytes()
    train_set, val_set = open_and_use()
    assert resident_bytes() - before < 100e6
    assert (len(train_set), len(val_set)) == ((5 * 10**9 - 10**6 - 1) // 1024, (10**6 - 1) // 1024)
    assert quickest(open_and_use) < 1


def test_a_later_start_opens_the_ids_of_gigabytes_of_text_at_once(bytes_tokenizer, tmp_path, monkeypatch):
    text, n_bytes = tmp_path / "corpus.txt", 4 * 10**9
    text.touch()
    os.truncate(text, n_bytes)
    sparse_npy(tmp_path / "corpus.txt.bytes.npy", n_bytes + 1, data._stamp(bytes_tokenizer, text))
    monkeypatch.setattr(data, "write_tokens", lambda *_: pytest.fail("tokenizes again"))
    assert quickest(lambda: data.load_tokens(text, bytes_tokenizer)) < 0.1
    assert len(data.load_tokens(text, bytes_tokenizer)) == n_bytes + 1


# ----------------------------------------------------------------------------------------------------------------------
# The file beside a text: valid or made anew, whole or not there


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("The cat sat on the mat.\n")
    return path


def test_a_text_is_tokenized_once(corpus, tokenizer, monkeypatch):
    first = data.load_tokens(corpus, tokenizer)
    assert sorted(os.listdir(corpus.parent)) == ["corpus.txt", f"corpus.txt.{tokenizer.name}.npy"]
    assert isinstance(first, np.memmap) and first.dtype == np.uint16
    assert first.tolist() == ids_of(corpus.read_text(), tokenizer)
    monkeypatch.setattr(data, "write_tokens", lambda *_: pytest.fail("tokenizes again"))
    assert data.load_tokens(str(corpus), tokenizer).tolist() == first.tolist()


def test_each_tokenizer_has_its_own_file(corpus, bytes_tokenizer, gpt2_tokenizer):
    for _ in range(2):
        for tokenizer in (bytes_tokenizer, gpt2_tokenizer):
            assert data.load_tokens(corpus, tokenizer).tolist() == ids_of(corpus.read_text(), tokenizer)


def test_a_text_of_another_size_is_tokenized_again(corpus, bytes_tokenizer):
    data.load_tokens(corpus, bytes_tokenizer)
    times = corpus.stat().st_atime_ns, corpus.stat().st_mtime_ns
    corpus.write_text("Another text.\n")
    os.utime(corpus, ns=times)
    assert data.load_tokens(corpus, bytes_tokenizer).tolist() == ids_of("Another text.\n", bytes_tokenizer)


def test_a_text_of_another_modification_time_is_tokenized_again(corpus, bytes_tokenizer):
    data.load_tokens(corpus, bytes_tokenizer)
    stat = corpus.stat()
    corpus.write_text("The dog sat on the mat.\n")
    assert corpus.stat().st_size == stat.st_size
    os.utime(corpus, ns=(stat.st_atime_ns, stat.st_mtime_ns - 1))
    if corpus.stat().st_mtime_ns == stat.st_mtime_ns:
        pytest.skip("this file system keeps no nanoseconds")
    assert data.load_tokens(corpus, bytes_tokenizer).tolist() == ids_of("The dog sat on the mat.\n", bytes_tokenizer)


def test_a_change_that_keeps_size_and_modification_time_is_not_seen_as_documented(corpus, bytes_tokenizer):
    before = data.load_tokens(corpus, bytes_tokenizer).tolist()
    stat = corpus.stat()
    corpus.write_text("The dog sat on the mat.\n")
    os.utime(corpus, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert data.load_tokens(corpus, bytes_tokenizer).tolist() == before


def test_a_text_that_grows_while_it_is_tokenized_is_tokenized_again(corpus, bytes_tokenizer):
    class Meanwhile:
        name, n_vocab, eot_token = "bytes", 257, 256

        def encode_ordinary_batch(self, texts, num_threads):
            with open(corpus, "a") as file:
                file.write("More.\n")
            return [list(text.encode()) for text in texts]

    data.load_tokens(corpus, Meanwhile())
    assert corpus.read_text().endswith("mat.\nMore.\n")
    assert data.load_tokens(corpus, bytes_tokenizer).tolist() == ids_of(corpus.read_text(), bytes_tokenizer)


def test_a_file_torn_at_any_byte_is_made_anew(corpus, bytes_tokenizer):
    expected = data.load_tokens(corpus, bytes_tokenizer).tolist()
    cache = corpus.with_name("corpus.txt.bytes.npy")
    whole = cache.read_bytes()
    torn = [whole[:size] for size in range(len(whole))]
    torn += [whole[:size].ljust(len(whole), b"\0") for size in range(0, len(whole), 7)]  # as a crash leaves blocks
    torn += [b"\0" * 64 + whole[64:], whole + b"\0", whole + whole]
    for content in torn:
        cache.write_bytes(content)
        assert data.load_tokens(corpus, bytes_tokenizer).tolist() == expected
        assert cache.read_bytes() == whole


def test_a_file_made_with_another_tokenizer_is_made_anew(corpus, bytes_tokenizer, gpt2_tokenizer):
    data.load_tokens(corpus, bytes_tokenizer)
    os.replace(f"{corpus}.bytes.npy", f"{corpus}.gpt2.npy")
    assert data.load_tokens(corpus, gpt2_tokenizer).tolist() == ids_of(corpus.read_text(), gpt2_tokenizer)


def foreign_files(folder):
    """Files that others may have put where the ids of a text belong."""
    arrays = {
        "flat ids": np.arange(30, dtype=np.uint16),
        "no dimension": np.array(7, dtype=np.uint16),
        "two dimensions": np.ones((5, 5), dtype=np.uint16),
        "objects": np.array([{}, None], dtype=object),
        "floats": np.ones(30),
        "no ids": np.ones(0, dtype=np.uint16),
    }
    for name, array in arrays.items():
        np.save(folder / "foreign.npy", array, allow_pickle=True)
        yield name, (folder / "foreign.npy").read_bytes()
    with open(folder / "foreign.npy", "wb") as file:
        np.savez(file, np.arange(30))
    yield "an archive", (folder / "foreign.npy").read_bytes()
    yield "text", b"The cat sat on the mat.\n" * 20
    yield "nothing", b""


def test_a_foreign_file_in_its_place_is_not_taken_for_it(corpus, bytes_tokenizer, tmp_path_factory):
    for name, content in foreign_files(tmp_path_factory.mktemp("foreign")):
        Path(f"{corpus}.bytes.npy").write_bytes(content)
        assert data.load_tokens(corpus, bytes_tokenizer).tolist() == ids_of(corpus.read_text(), bytes_tokenizer), name


def test_threads_that_tokenize_the_same_file_at_once_all_get_its_ids(corpus, bytes_tokenizer):
    corpus.write_text(data.builtin_text()[:50_000])
    expected = ids_of(corpus.read_text(), bytes_tokenizer)
    barrier, results = threading.Barrier(8), []

    def load():
        barrier.wait()
        results.append(np.array_equal(data.load_tokens(corpus, bytes_tokenizer), expected))

    for _ in range(10):
        Path(f"{corpus}.bytes.npy").unlink(missing_ok=True)
        threads = [threading.Thread(target=load) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [True] * 80
    assert sorted(os.listdir(corpus.parent)) == ["corpus.txt", "corpus.txt.bytes.npy"]


TOKENIZE_TOGETHER = """
import os, sys
import data

path, n_rounds = sys.argv[1], int(sys.argv[2])
tokenizer = data.get_tokenizer("bytes")
expected = [*open(path, "rb").read(), 256]
for _ in range(n_rounds):
    begin, go = os.pipe()
    children = []
    for _ in range(6):
        if child := os.fork():
            children.append(child)
            continue
        os.close(go)
        os.read(begin, 1)  # until the parent closes its end
        os._exit(data.load_tokens(path, tokenizer).tolist() != expected)
    os.close(begin)
    os.close(go)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6
    assert sorted(os.listdir(os.path.dirname(path))) == ["corpus.txt", "corpus.txt.bytes.npy"]
    os.remove(path + ".bytes.npy")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="starts its processes with fork")
def test_processes_that_tokenize_the_same_file_at_once_all_get_its_ids(corpus, tmp_path_factory):
    corpus.write_text(data.builtin_text()[:200_000], encoding="utf-8")
    folder = tmp_path_factory.mktemp("script")
    (folder / "together.py").write_text(TOKENIZE_TOGETHER)
    status, _, stderr = run("together.py", corpus, 10, folder=folder, env={"PYTHONPATH": ROOT})
    assert status == 0, stderr


def refuse_writing(monkeypatch, code):
    """Let no file be made, as on a read-only disk: also for root, whom modes do not stop."""

    def open_(path, mode="r"):
        if "w" in mode or "x" in mode:
            raise OSError(code, os.strerror(code), str(path))
        return open(path, mode)

    monkeypatch.setattr(data, "open", open_, raising=False)


def refuse_renaming(monkeypatch, code):
    def replace(source, target):
        raise OSError(code, os.strerror(code), str(source), None, str(target))

    monkeypatch.setattr(os, "replace", replace)


@pytest.mark.parametrize("refuse", [refuse_writing, refuse_renaming])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_where_its_ids_cannot_be_written_the_error_names_the_other_way(
    refuse, code, corpus, bytes_tokenizer, monkeypatch, capsys
):
    with monkeypatch.context() as context:
        refuse(context, code)
        with pytest.raises(OSError) as caught:
            data.load_tokens(corpus, bytes_tokenizer)
    message = one_line(caught)
    assert f"cannot write {corpus}.bytes.npy" in message and os.strerror(code) in message
    assert ".tmp" not in message
    assert os.listdir(corpus.parent) == ["corpus.txt"]

    # What it names works.
    command = re.search(r"python data\.py (\S+ --tokenizer bytes --output )tokens\.npy", message)[1]
    output = corpus.with_name("tokens.npy")
    assert call_main(monkeypatch, capsys, *command.split(), output)[0] == 0
    assert data.load_tokens(output, bytes_tokenizer).tolist() == ids_of(corpus.read_text(), bytes_tokenizer)


def test_a_name_too_long_to_write_beside_gets_the_same_error(tmp_path, bytes_tokenizer):
    path = tmp_path / ("x" * 250)
    path.write_text("text")
    with pytest.raises(OSError, match=r"python data\.py \S+ --tokenizer bytes --output tokens\.npy"):
        data.load_tokens(path, bytes_tokenizer)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="modes do not stop root")
def test_a_text_in_a_read_only_folder_gets_the_error_that_names_the_other_way(corpus, bytes_tokenizer):
    corpus.parent.chmod(0o555)
    try:
        with pytest.raises(OSError, match=r"python data\.py \S+ --tokenizer bytes --output tokens\.npy"):
            data.load_tokens(corpus, bytes_tokenizer)
    finally:
        corpus.parent.chmod(0o755)


def test_ids_that_are_there_serve_a_folder_that_cannot_be_written(corpus, bytes_tokenizer, monkeypatch):
    data.load_tokens(corpus, bytes_tokenizer)
    refuse_writing(monkeypatch, errno.EROFS)
    assert data.load_tokens(corpus, bytes_tokenizer).tolist() == ids_of(corpus.read_text(), bytes_tokenizer)


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOENT])
def test_a_text_that_cannot_be_read_is_named_and_nothing_else(code, corpus, bytes_tokenizer, monkeypatch):
    def open_(path, mode="r"):
        if str(path) == str(corpus):  # without read permission, or gone since it was looked for
            raise OSError(code, os.strerror(code), str(path))
        return open(path, mode)

    monkeypatch.setattr(data, "open", open_, raising=False)
    with pytest.raises(OSError) as caught:
        data.load_tokens(corpus, bytes_tokenizer)
    message = one_line(caught)
    assert str(corpus) in message and os.strerror(code) in message
    assert "write" not in message and "--output" not in message
    assert os.listdir(corpus.parent) == ["corpus.txt"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, MemoryError])
def test_an_interruption_leaves_no_litter(interruption, corpus, monkeypatch):
    class Interrupted:
        name, n_vocab, eot_token = "bytes", 257, 256

        def encode_ordinary_batch(self, texts, num_threads):
            assert len(os.listdir(corpus.parent)) == 2  # there is something to clean up
            raise interruption

    with pytest.raises(interruption):
        data.load_tokens(corpus, Interrupted())
    assert os.listdir(corpus.parent) == ["corpus.txt"]


def test_a_failure_keeps_the_earlier_file(corpus, bytes_tokenizer):
    output = corpus.with_name("tokens.npy")
    data.write_tokens([corpus], bytes_tokenizer, output)
    before = output.read_bytes()
    corpus.with_name("bad.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError):
        data.write_tokens([corpus, corpus.with_name("bad.txt")], bytes_tokenizer, output)
    assert output.read_bytes() == before


# ----------------------------------------------------------------------------------------------------------------------
# Text that is not UTF-8


def first_bad_byte(content):
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start


def assert_names_byte(content, offset, folder, tokenizer):
    path = Path(folder, "bad.txt")
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        data.load_tokens(path, tokenizer)
    message = one_line(caught)
    assert str(path) in message and "UTF-8" in message
    assert f"byte {offset:,} " in message, content
    assert os.listdir(folder) == ["bad.txt"]


@pytest.mark.parametrize(
    "content, offset",
    [
        (b"\xff\xfeT\0h\0e\0", 0),  # UTF-16 with a BOM, as Windows writes it
        (b"caf\xe9 au lait", 3),  # Latin-1
        (b"1234567\xff", 7),  # the last byte of a block of 8
        (b"12345678\xff", 8),  # the first of the next
        (b"1234567\xc3(", 7),  # cut by the border, then no continuation
        (b"123456\xe2\x82(", 6),
        (b"12345\xf0\x9f\x98", 5),  # truncated at the end of the file, which is the end of a block
        (b"1234567\xf0\x9f", 7),  # the border stands inside what is truncated
        (b"abc\xe2", 3),
        (b"ab \xe2\x82\xac" * 5 + b"\xe2\x82", 30),
        (b"ab\xed\xa0\x80", 2),  # a surrogate
        (b"x" * 1_234_567 + b"\xff", 1_234_567),
    ],
)
def test_text_that_is_not_utf8_names_the_first_bad_byte(content, offset, bytes_tokenizer, tmp_path, monkeypatch):
    assert first_bad_byte(content) == offset
    monkeypatch.setattr(data, "BLOCK_BYTES", 8 if len(content) < 100 else data.BLOCK_BYTES)
    assert_names_byte(content, offset, tmp_path, bytes_tokenizer)


def test_any_damage_names_the_byte_that_decoding_the_whole_text_names(bytes_tokenizer, tmp_path, monkeypatch):
    draw = random.Random(2)
    n_damaged = 0
    for seed in range(150):
        content = bytearray(hostile_text(seed, 12).encode())
        for _ in range(2):
            content[draw.randrange(len(content))] = draw.randrange(256)
        offset = first_bad_byte(bytes(content))
        monkeypatch.setattr(data, "BLOCK_BYTES", draw.randrange(1, 9))
        if offset is not None:
            n_damaged += 1
            assert_names_byte(bytes(content), offset, tmp_path, bytes_tokenizer)
    assert n_damaged > 50


# ----------------------------------------------------------------------------------------------------------------------
# Bad files and ready files


def save_archive(path):
    with open(path, "wb") as file:
        np.savez(file, np.arange(30))


def save_truncated(path):
    np.save(path, np.arange(1000, dtype=np.uint16))
    os.truncate(path, 1000)


def save_pickled(path):
    import pickle

    path.write_bytes(pickle.dumps([1, 2, 3]))


def save_broken_header(path):
    path.write_bytes(b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': '<u2', 'shape': (\n".ljust(118) + bytes(60))


def save_long_header(path):  # of which numpy speaks in several lines
    path.write_bytes(b"\x93NUMPY\x01\x00" + (20_000).to_bytes(2, "little") + b"{}".ljust(20_000))


BAD_FILES = {
    "empty.txt": (lambda path: path.touch(), "is empty"),
    "empty.npy": (lambda path: path.touch(), "is empty"),
    "empty.bin": (lambda path: path.touch(), "is empty"),
    "folder": (lambda path: path.mkdir(), r"is a folder: .*python data\.py FILE\.\.\. --output tokens\.npy"),
    "folder.npy": (lambda path: path.mkdir(), "is a folder"),
    "missing.txt": (lambda path: None, "there is no file"),
    "missing.npy": (lambda path: None, "there is no file"),
    "dangling.txt": (lambda path: path.symlink_to("nowhere"), "there is no file"),
    "odd.bin": (lambda path: path.write_bytes(bytes(33)), r"uint16.* 33 bytes .*odd"),
    "floats.npy": (lambda path: np.save(path, np.ones(30)), "whole numbers.* float64"),
    "booleans.npy": (lambda path: np.save(path, np.ones(30, dtype=bool)), "whole numbers.* bool"),
    "durations.npy": (lambda path: np.save(path, np.ones(30, dtype="m8[s]")), "whole numbers.* timedelta"),
    "rows.npy": (lambda path: np.save(path, np.ones((6, 5), dtype=np.uint16)), r"one dimension.* \(6, 5\)"),
    "scalar.npy": (lambda path: np.save(path, np.uint16(3)), r"one dimension.* \(\)"),
    "objects.npy": (lambda path: np.save(path, np.array([{}, 1], dtype=object)), "no .npy file of token ids"),
    "pickled.npy": (save_pickled, "no .npy file of token ids"),
    "archive.npy": (save_archive, "no .npy file of token ids"),
    "truncated.npy": (save_truncated, "no .npy file of token ids, or it is damaged"),
    "header.npy": (save_broken_header, "no .npy file of token ids, or it is damaged"),
    "long.npy": (save_long_header, "no .npy file of token ids, or it is damaged"),
    "magic.npy": (lambda path: path.write_bytes(b"\x93NUMPY\x01\x00"), "no .npy file of token ids"),
    "text.npy": (lambda path: path.write_text("The cat sat on the mat.\n"), "no .npy file of token ids"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused_in_one_line_that_names_it(name, tmp_path, bytes_tokenizer):
    make, reason = BAD_FILES[name]
    make(tmp_path / name)
    with pytest.raises((ValueError, OSError)) as caught:
        data.load_tokens(tmp_path / name, bytes_tokenizer)
    assert str(tmp_path / name) in one_line(caught)
    assert re.search(reason, str(caught.value))
    assert os.listdir(tmp_path) in ([], [name])


def test_an_npy_without_read_permission_is_not_called_damaged(tmp_path, bytes_tokenizer, monkeypatch):
    np.save(tmp_path / "ids.npy", np.arange(30, dtype=np.uint16))

    def load(path, **_):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(np, "load", load)
    with pytest.raises(PermissionError) as caught:
        data.load_tokens(tmp_path / "ids.npy", bytes_tokenizer)
    assert "damaged" not in one_line(caught) and "ids.npy" in str(caught.value)


@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", "<i4", "<i8", "<u8"])
def test_an_npy_of_any_integer_type_opens_as_it_is(dtype, tmp_path, bytes_tokenizer):
    np.save(tmp_path / "ids.npy", np.arange(200).astype(dtype))
    tokens = data.load_tokens(tmp_path / "ids.npy", bytes_tokenizer)
    assert isinstance(tokens, np.memmap) and tokens.dtype == np.dtype(dtype)
    assert tokens.tolist() == list(range(200))
    inputs, targets = data.TokenDataset(tokens, 199, 257)[0]
    assert (inputs.dtype, inputs.tolist(), targets.tolist()) == (torch.int64, [*range(199)], [*range(1, 200)])
    assert os.listdir(tmp_path) == ["ids.npy"]


def test_a_raw_bin_is_read_as_little_endian_uint16(tmp_path, gpt2_tokenizer):
    (tmp_path / "ids.bin").write_bytes(b"\x01\x00\x50\xc4\x00\x01")
    tokens = data.load_tokens(tmp_path / "ids.bin", gpt2_tokenizer)
    assert isinstance(tokens, np.memmap) and tokens.tolist() == [1, 50256, 256]


def test_ids_remember_the_tokenizer_that_made_them(corpus, bytes_tokenizer, gpt2_tokenizer):
    # All ids of bytes are valid for gpt2, so nothing else would show the mistake.
    output = corpus.with_name("tokens.npy")
    data.write_tokens([corpus], bytes_tokenizer, output)
    data.load_tokens(corpus, bytes_tokenizer)
    for path in (output, corpus.with_name("corpus.txt.bytes.npy")):
        assert len(data.load_tokens(path, bytes_tokenizer)) == corpus.stat().st_size + 1
        with pytest.raises(ValueError) as caught:
            data.load_tokens(path, gpt2_tokenizer)
        assert str(path) in one_line(caught) and "--tokenizer bytes" in str(caught.value)


def test_bytes_behind_a_foreign_npy_are_no_reason_to_refuse_it(tmp_path, bytes_tokenizer):
    np.save(tmp_path / "ids.npy", np.arange(30, dtype=np.uint16))
    with open(tmp_path / "ids.npy", "ab") as file:
        file.write(b"checksum 1234\n\xff")
    assert data.load_tokens(tmp_path / "ids.npy", bytes_tokenizer).tolist() == list(range(30))


def test_a_corpus_too_short_for_its_context_says_how_many_tokens_it_needs():
    for n_tokens in (0, 1, 9, 10, 649):
        with pytest.raises(ValueError) as caught:
            data.split_tokens(np.zeros(n_tokens, dtype=np.uint16), 64, 257)
        message = one_line(caught)
        assert f"{n_tokens:,} tokens" in message and "at least 650" in message
        assert "--data" in message and "--context-length" in message
    train_set, val_set = data.split_tokens(np.zeros(650, dtype=np.uint16), 64, 257)
    assert (len(train_set), len(val_set)) == (9, 1)


def test_open_corpus_gives_what_a_run_needs_and_refuses_what_it_cannot_use(corpus, bytes_tokenizer):
    with pytest.raises(ValueError, match="--context-length"):
        data.open_corpus(corpus, "bytes", 16)
    corpus.write_text(data.builtin_text()[:1000])
    opened = data.open_corpus(corpus, "bytes", 16)
    tokens = data.load_tokens(corpus, bytes_tokenizer)
    assert opened.tokenizer.name == "bytes"
    assert opened.hash == data.fingerprint(tokens)
    assert opened.train_set[0][0].tolist() == tokens[:16].tolist()
    assert opened.val_set[0][0].tolist() == tokens[901:917].tolist()


# ----------------------------------------------------------------------------------------------------------------------
# Windows


@pytest.mark.parametrize("context_length", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("n_tokens", range(8, 30))
def test_windows_follow_each_other_without_gap_or_overlap(n_tokens, context_length):
    tokens = np.arange(n_tokens, dtype=np.uint16)
    dataset = data.TokenDataset(tokens, context_length, n_tokens)
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


def test_the_shortest_corpus_has_one_window():
    assert len(data.TokenDataset(np.arange(9), 8, 9)) == 1
    with pytest.raises(ValueError) as caught:
        data.TokenDataset(np.arange(8), 8, 9)
    assert "--context-length" in one_line(caught)


def test_a_batch_at_once_equals_its_windows_one_by_one():
    dataset = data.TokenDataset(np.random.default_rng(0).integers(0, 257, 1000, dtype=np.uint16), 16, 257)
    indices = [5, 0, len(dataset) - 1, 5]
    batch = dataset.__getitems__(indices)
    assert len(batch) == 4
    for (inputs, targets), index in zip(batch, indices):
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(inputs, dataset[index][0]) and torch.equal(targets, dataset[index][1])


def test_a_loader_makes_contiguous_batches_of_int64():
    dataset = data.TokenDataset(np.arange(101, dtype=np.uint16), 10, 101)
    batches = list(DataLoader(dataset, batch_size=4))
    assert [inputs.shape for inputs, _ in batches] == [(4, 10), (4, 10), (2, 10)]
    for inputs, targets in batches:
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.is_contiguous() and targets.is_contiguous()
    assert torch.cat([inputs for inputs, _ in batches]).flatten().tolist() == list(range(100))
    assert torch.cat([targets for _, targets in batches]).flatten().tolist() == list(range(1, 101))


def test_windows_are_views_of_one_flat_array():
    tokens = np.arange(1000, dtype=np.uint16)
    assert np.shares_memory(data.TokenDataset(tokens, 10, 1000).windows, tokens)


def test_changing_a_batch_leaves_the_corpus_as_it_is():
    tokens = np.arange(100)  # int64 already, so that a cast alone would not copy
    dataset = data.TokenDataset(tokens, 10, 100)
    dataset[0][0].zero_()
    assert tokens.tolist() == list(range(100))


@pytest.mark.parametrize("dtype, wrong", [("<u2", 257), ("<i8", 257), ("<i8", -1), ("<i2", -1), ("<u8", 2**64 - 1)])
@pytest.mark.parametrize("place", [0, 1, 499_999, 999_998, 999_999])
def test_an_id_outside_the_vocabulary_is_refused_at_once(dtype, wrong, place):
    tokens = np.zeros(1_000_000, dtype=dtype)
    tokens[0] = tokens[-1] = tokens[place - 1] = 256  # the largest id is none too many
    data.TokenDataset(tokens, 64, 257)
    tokens[place] = wrong
    with pytest.raises(ValueError) as caught:
        data.TokenDataset(tokens, 64, 257)
    message = one_line(caught)
    assert f"id {wrong}," in message and "0 to 256" in message and "--tokenizer" in message


def test_an_id_outside_the_vocabulary_that_no_start_looks_at_is_refused_when_it_is_fetched():
    tokens = np.zeros(4_000_000, dtype=np.uint16)
    tokens[30_000] = 257  # between the first two of 64 blocks
    dataset = data.TokenDataset(tokens, 64, 257)
    window = 30_000 // 64
    dataset.__getitems__([window - 1, window + 1])
    for fetch in (lambda: dataset[window], lambda: dataset.__getitems__([0, window])):
        with pytest.raises(ValueError, match="id 257"):
            fetch()


def test_a_narrow_type_has_no_id_outside_a_wide_vocabulary():
    data.TokenDataset(np.full(100, 65_535, dtype=np.uint16), 8, 70_000)


def test_the_last_tenth_is_for_validation_and_shares_no_window_with_training():
    for n_tokens in (130, 1_000, 1_009, 5_003):
        train_set, val_set = data.split_tokens(np.arange(n_tokens, dtype=np.uint16), 12, n_tokens)
        trained = {id for pair in train_set for ids in pair for id in ids.tolist()}
        validated = {id for pair in val_set for ids in pair for id in ids.tolist()}
        cut = n_tokens - n_tokens // 10
        assert max(trained) < cut <= min(validated)
        assert min(validated) == cut and min(trained) == 0
        assert cut - 1 - max(trained) < 12 and n_tokens - 1 - max(validated) < 12


def test_at_most_a_million_tokens_are_for_validation():
    for n_tokens, n_val in [(9_999_990, 999_999), (10_000_010, 1_000_000), (30_000_000, 1_000_000)]:
        tokens = np.broadcast_to(np.uint16(7), (n_tokens,))
        train_set, val_set = data.split_tokens(tokens, 1, 257)
        assert (len(train_set), len(val_set)) == (n_tokens - n_val - 1, n_val - 1)


def test_both_sides_of_the_split_have_document_borders(bytes_tokenizer, tmp_path):
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text(data.builtin_text()[number * 50 : number * 50 + 50])
    data.write_tokens(sorted(tmp_path.glob("*.txt")), bytes_tokenizer, tmp_path / "all.npy")
    tokens = data.load_tokens(tmp_path / "all.npy", bytes_tokenizer)
    for dataset in data.split_tokens(tokens, 10, 257):
        assert any(256 in inputs for inputs, _ in dataset)


# ----------------------------------------------------------------------------------------------------------------------
# Order, and how steps are made of windows


class Recorder(data.TokenDataset):
    """A dataset that notes which windows are read."""

    def __init__(self, *args):
        super().__init__(*args)
        self.read = []

    def __getitems__(self, indices):
        self.read += indices
        return super().__getitems__(indices)


def test_a_skipping_sampler_gives_what_follows_and_nothing_else():
    for n in (0, 1, 5):
        for n_skip in range(n + 3):
            sampler = data.SkipSampler(list(range(n)), n_skip)
            assert list(sampler) == list(range(n))[n_skip:]
            assert len(sampler) == len(list(sampler)) == max(0, n - n_skip)
    assert list(data.SkipSampler(range(3))) == [0, 1, 2]


@pytest.mark.parametrize("n_skip", [0, 1, 4, 8, 95, 96, 99, 100])
def test_skipped_windows_are_never_read(n_skip):
    dataset = Recorder(np.arange(1001), 10, 1001)
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(5))
    expected = torch.randperm(100, generator=torch.Generator().manual_seed(5)).tolist()[n_skip:]
    loader = DataLoader(dataset, batch_size=4, sampler=data.SkipSampler(sampler, n_skip))
    assert len(loader) == -(-(100 - n_skip) // 4)
    assert [int(inputs[0]) // 10 for batch, _ in loader for inputs in batch] == expected
    assert dataset.read == expected


@pytest.mark.parametrize("n_processes", [1, 2, 3, 4])
@pytest.mark.parametrize("seed, epoch", [(123, 0), (123, 1), (0, 7)])
def test_the_random_and_the_distributed_sampler_deal_the_same_permutation(n_processes, seed, epoch):
    dataset = data.TokenDataset(np.zeros(1001), 10, 1)  # 100 windows
    single = RandomSampler(dataset, generator=torch.Generator().manual_seed(seed + epoch))
    dealt = []
    for rank in range(n_processes):
        sampler = DistributedSampler(dataset, n_processes, rank, shuffle=True, seed=seed)
        sampler.set_epoch(epoch)
        dealt.append(list(sampler))
    n_full = 100 // n_processes  # whole rounds: what follows is padding, which no step uses
    together = [ids[i] for i in range(n_full) for ids in dealt]
    assert together == list(single)[: n_full * n_processes]
    assert sorted(single) == list(range(100))


def test_each_epoch_of_a_generator_seeded_anew_has_an_order_of_its_own():
    generator = torch.Generator()
    sampler = RandomSampler(range(100), generator=generator)
    orders = []
    for epoch in (0, 1, 0):
        generator.manual_seed(123 + epoch)
        orders.append(list(data.SkipSampler(sampler)))
    assert orders[0] == orders[2] != orders[1]


def test_a_plan_shows_every_step_the_global_batch_in_the_largest_equal_parts():
    for global_batch_size in range(1, 40):
        for batch_size in (1, 2, 3, 5, 8, 64):
            for n_processes in (n for n in range(1, 41) if global_batch_size % n == 0):
                plan = data.plan_steps(1000, global_batch_size, batch_size, n_processes)
                forward_batch, accumulation, steps_per_epoch = plan
                assert forward_batch * accumulation * n_processes == global_batch_size
                assert 1 <= forward_batch <= batch_size
                share = global_batch_size // n_processes
                assert not [n for n in range(forward_batch + 1, batch_size + 1) if n <= share and share % n == 0]
                assert steps_per_epoch == 1000 // global_batch_size


def test_an_epoch_is_the_whole_steps_that_its_windows_fill():
    assert data.plan_steps(24, 24, 8, 1)[2] == 1
    assert data.plan_steps(47, 24, 8, 1)[2] == 1
    assert data.plan_steps(48, 24, 8, 1)[2] == 2


def test_processes_that_do_not_divide_the_batch_are_refused_with_values_that_work():
    for global_batch_size in range(1, 50):
        for n_processes in (n for n in range(1, 60) if global_batch_size % n):
            with pytest.raises(ValueError) as caught:
                data.plan_steps(10_000, global_batch_size, 8, n_processes)
            message = one_line(caught)
            assert message.startswith(f"{global_batch_size} sequences per step do not divide among {n_processes} proc")
            named = re.search(r"--global-batch-size ([\d or]+), or ([\d, ]+) processes", message)
            sizes, counts = ([int(n) for n in re.findall(r"\d+", part)] for part in named.groups())
            assert sizes and counts
            for size in sizes:
                data.plan_steps(10_000, size, 8, n_processes)
            for count in counts:
                data.plan_steps(10_000, global_batch_size, 8, count)
            assert abs(sizes[-1] - global_batch_size) < n_processes  # and is near


def test_the_default_batches_divide_among_the_usual_numbers_of_processes():
    import gpt

    for preset in gpt.PRESETS.values():
        assert preset.global_batch_size % lcm(1, 2, 3, 4, 6, 8) == 0


@pytest.mark.parametrize("n_windows", [0, 1, 5, 23])
@pytest.mark.parametrize("n_processes", [1, 4])
def test_too_few_windows_for_one_step_are_refused_with_both_numbers(n_windows, n_processes):
    with pytest.raises(ValueError) as caught:
        data.plan_steps(n_windows, 24, 2, n_processes)
    message = one_line(caught)
    assert f"{n_windows} windows" in message and "needs 24" in message
    assert all(flag in message for flag in ("--data", "--global-batch-size", "--context-length"))


# ----------------------------------------------------------------------------------------------------------------------
# The fingerprint


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


def test_the_blocks_leave_no_token_out_of_a_corpus_up_to_a_million():
    for n_tokens in [*range(1, 50), 16_383, 16_384, 16_385, 32_769, 777_777, 999_999, 1_000_000, 2**20]:
        seen = np.zeros(n_tokens, dtype=bool)
        for block in data._spaced_blocks(np.arange(n_tokens)):
            seen[block] = True
        assert seen.all(), n_tokens


def test_the_fingerprint_knows_the_length_and_the_order():
    tokens = np.zeros(4_000_000, dtype=np.uint16)  # above a million tokens the blocks alone do not tell the length
    lengths = 998, 999, 1000, 3_999_999, 4_000_000
    assert len({data.fingerprint(tokens[:n]) for n in lengths}) == len(lengths)
    assert data.fingerprint(np.array([1, 2])) != data.fingerprint(np.array([2, 1]))
    assert data.fingerprint(np.array([258])) != data.fingerprint(np.array([2, 1]))


def test_the_fingerprint_depends_on_the_ids_and_not_on_how_they_are_stored(tmp_path, bytes_tokenizer):
    tokens = np.arange(250)
    expected = data.fingerprint(tokens)
    assert re.fullmatch("[0-9a-f]{12}", expected)
    for dtype in ("u1", "<u2", ">u2", "<i4", "<i8", ">i8", "<u8"):
        np.save(tmp_path / "ids.npy", tokens.astype(dtype))
        assert data.fingerprint(data.load_tokens(tmp_path / "ids.npy", bytes_tokenizer)) == expected
    tokens.astype("<u2").tofile(tmp_path / "ids.bin")
    assert data.fingerprint(data.load_tokens(tmp_path / "ids.bin", bytes_tokenizer)) == expected


def test_between_the_blocks_of_a_larger_corpus_a_change_is_not_seen_as_documented():
    tokens = np.zeros(4_000_000, dtype=np.uint16)
    before = data.fingerprint(tokens)
    tokens[30_000] = 1
    assert data.fingerprint(tokens) == before
    for place in (0, 16_383, -16_384, -1):
        tokens[place] = 1
        assert data.fingerprint(tokens) != before
        tokens[place] = 0


# ----------------------------------------------------------------------------------------------------------------------
# python data.py


@pytest.fixture(autouse=True)
def handlers_as_they_were():
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def call_main(monkeypatch, capsys, *args):
    """(status, stdout, stderr) of `python data.py` with these arguments, without the seconds that a launch takes."""
    monkeypatch.setattr(sys, "argv", ["data.py", *map(str, args)])
    capsys.readouterr()
    try:
        data.main()
        status = 0
    except SystemExit as error:
        status = error.code or 0
    return status, *capsys.readouterr()


def assert_refused(result):
    status, stdout, stderr = result
    assert (status, stdout) == (2, "")
    assert re.fullmatch("error: .+\n", stderr), stderr
    return stderr


def test_the_command_tokenizes_each_file_beside_it(monkeypatch, capsys, corpus, tokenizer):
    other = corpus.with_name("other.txt")
    other.write_text("Another.\n")
    status, stdout, stderr = call_main(monkeypatch, capsys, corpus, other, "--tokenizer", tokenizer.name)
    assert (status, stderr) == (0, "")
    for path, line in zip((corpus, other), stdout.splitlines()):
        n_tokens = len(ids_of(path.read_text(), tokenizer))
        assert f"{path}: {n_tokens:,} tokens" in line
        assert f"--data {path} --tokenizer {tokenizer.name}" in line
    assert sorted(p.name for p in corpus.parent.glob("*.npy")) == [
        f"corpus.txt.{tokenizer.name}.npy",
        f"other.txt.{tokenizer.name}.npy",
    ]
    monkeypatch.setattr(data, "write_tokens", lambda *_: pytest.fail("a run would tokenize again"))
    assert data.load_tokens(corpus, tokenizer).tolist() == ids_of(corpus.read_text(), tokenizer)


def test_the_command_joins_files_and_takes_gpt2_unless_told_otherwise(monkeypatch, capsys, corpus, gpt2_tokenizer):
    other, output = corpus.with_name("other.txt"), corpus.with_name("tokens.npy")
    other.write_text("Another.\n")
    status, stdout, stderr = call_main(monkeypatch, capsys, corpus, other, "--output", output)
    assert (status, stderr) == (0, "")
    assert f"--data {output} --tokenizer gpt2" in stdout
    expected = ids_of(corpus.read_text(), gpt2_tokenizer) + ids_of("Another.\n", gpt2_tokenizer)
    assert data.load_tokens(output, gpt2_tokenizer).tolist() == expected
    assert sorted(os.listdir(corpus.parent)) == ["corpus.txt", "other.txt", "tokens.npy"]


def test_the_help_names_every_flag(monkeypatch, capsys):
    status, stdout, stderr = call_main(monkeypatch, capsys, "--help")
    assert (status, stderr) == (0, "")
    assert all(word in stdout for word in ("FILE", "--tokenizer", "{bytes,gpt2}", "default: gpt2", "--output", "UTF-8"))


@pytest.mark.parametrize(
    "args, reason",
    [
        ([], "FILE"),
        (["{corpus}", "--tokenizer", "gpt4"], "gpt4"),
        (["{corpus}", "--nonsense"], "--nonsense"),
        (["{corpus}", "--output"], "--output"),
        (["{folder}/missing.txt"], "missing.txt"),
        (["{corpus}", "{folder}/missing.txt"], "missing.txt"),
        (["{corpus}", "{folder}/missing.txt", "--output", "{folder}/t.npy"], "missing.txt"),
        (["{folder}", "--output", "{folder}/t.npy"], "folder"),
        (["{folder}/empty.txt", "--output", "{folder}/t.npy"], "empty.txt"),
        (["{folder}/bad.txt", "--output", "{folder}/t.npy"], "byte 3 "),
        (["{corpus}", "--output", "{folder}/t.bin"], "t.bin must end in .npy"),
        (["{corpus}", "--output", ""], "must end in .npy"),
        (["{corpus}", "--output", "{folder}/nowhere/t.npy"], "cannot write {folder}/nowhere/t.npy: No such file"),
        (["{corpus}", "--output", "{corpus}/t.npy"], "cannot write {corpus}/t.npy: Not a directory"),
        (["{corpus}", "--output", "{folder}/folder.npy"], "cannot write {folder}/folder.npy: Is a directory"),
        (["{corpus}", "{folder}/text.npy", "--output", "{folder}/text.npy"], "one of the files to read"),
        (["{corpus}", "--output", "{folder}/link.npy"], "one of the files to read"),
    ],
)
def test_the_command_refuses_in_one_line_and_leaves_nothing(args, reason, monkeypatch, capsys, corpus):
    folder = corpus.parent
    (folder / "empty.txt").touch()
    (folder / "bad.txt").write_bytes(b"caf\xe9")
    (folder / "folder.npy").mkdir()
    (folder / "text.npy").write_text("text that has a strange name")
    (folder / "link.npy").symlink_to(corpus)
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    names = sorted(os.listdir(folder))
    fill = {"folder": folder, "corpus": corpus}
    args = ["--tokenizer", "bytes", *(arg.format(**fill) for arg in args)]
    stderr = assert_refused(call_main(monkeypatch, capsys, *args))
    assert reason.format(**fill) in stderr
    assert sorted(os.listdir(folder)) == names
    assert {path: path.read_bytes() for path in before} == before


def test_a_launch_prints_one_line_for_the_file_it_makes(corpus):
    output = corpus.with_name("tokens.npy")
    status, stdout, stderr = run("data.py", corpus, "--tokenizer", "bytes", "--output", output)
    assert (status, stderr) == (0, "")
    assert re.fullmatch(f"{output}: 25 tokens; .+\n", stdout)
    assert np.load(output).tolist() == [*corpus.read_bytes(), 256]


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_while_the_command_tokenizes_leaves_no_litter(signum, corpus, gpt2_vocabulary):
    corpus.write_text(data.builtin_text() * 60, encoding="utf-8")
    process, deadline = start("data.py", corpus), time.monotonic() + 120
    while not list(corpus.parent.glob("*.tmp")):
        assert process.poll() is None and time.monotonic() < deadline, "it wrote nothing"
        time.sleep(0.01)
    process.send_signal(signum)
    assert finish(process) == (128 + signum, "", "")
    assert os.listdir(corpus.parent) == ["corpus.txt"]


def test_nothing_here_knows_how_many_processes_train():
    assert "distributed" not in Path(data.__file__).read_text()
