"""The README against the code: what it says to type runs, what it quotes stands there, what it counts adds up.

It holds blocks of five kinds, and each has its test here:

    bash      commands, one per line; after <!-- runs on a CPU --> they are run (by a slow test)
    python    a program, after the same comment; it is run
    text      lines that a program of the project prints, up to their numbers; ... stands for what is left out
    diff      from train_single_gpu.py to train_ddp_spawn.py, or after <!-- in SCRIPT --> to that script
    mermaid   a flowchart of the files, or an xychart of numbers that stand in a table of its section
"""

import argparse
import ast
import contextlib
import functools
import importlib
import inspect
import io
import math
import os
import pkgutil
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from conftest import ROOT, SCRIPTS, SINGLE, SPAWN, TORCHRUN, free_port
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.run import get_args_parser
from torch.nn.parallel import DistributedDataParallel

import data
import gpt

FILES = ("gpt.py", "data.py", *SCRIPTS)
SOURCE = {name: (ROOT / name).read_text(encoding="utf-8") for name in FILES}
README = (ROOT / "README.md").read_text(encoding="utf-8")


class Block(NamedTuple):
    marker: str  # what the comment line before it says
    language: str
    text: str

    @property
    def runs_on_a_cpu(self):
        return self.marker.startswith("runs on a CPU")


FENCED = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [Block(*(group or "" for group in match.groups())) for match in FENCED.finditer(README)]
PROSE = FENCED.sub("", README)
FLAT = " ".join(README.split())
CODE = re.findall(r"`([^`]+)`", PROSE)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads that share tensors this small mostly wait for each other."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


def blocks(*languages):
    return [block for block in BLOCKS if block.language in languages]


def section(title):
    """The text under a heading of any level, up to the next one of the same."""
    (match,) = re.finditer(rf"^(#+) {re.escape(title)}$", README, re.MULTILINE)
    return re.split(rf"^{match[1]} ", README[match.end() :], flags=re.MULTILINE)[0]


def table(text):
    """The rows of the first Markdown table in a text, as lists of cells; the header is the first row."""
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if not line.startswith("|---")]


def rounds_to(value, text):
    """Whether `text` is `value`, rounded to as many digits as the text has."""
    return f"{value:,.{len(text.partition('.')[2])}f}".replace(",", "") == text.replace(",", "")


# ----------------------------------------------------------------------------------------------------------------------
# Nothing escapes


def test_every_block_is_of_a_kind_that_a_test_checks():
    assert README.count("```") == 2 * len(BLOCKS), "a fence is not closed, or is indented"
    assert not re.search(r"^(?: {4}|\t)", PROSE, re.MULTILINE), "code without a fence"
    assert {block.language for block in BLOCKS} <= {"bash", "python", "text", "diff", "mermaid"}
    assert all(block.runs_on_a_cpu for block in blocks("python"))
    markers = {
        "bash": "|runs on a CPU.*",
        "python": "runs on a CPU.*",
        "diff": f"|in ({'|'.join(SCRIPTS)})",
    }
    for block in BLOCKS:
        assert re.fullmatch(markers.get(block.language, ""), block.marker), block
    assert "<!--" not in PROSE, "a comment that stands before no block marks nothing"


def test_every_figure_is_there_and_says_where_it_was_measured():
    assert not re.findall(r"@@\w*@@", README)
    for title in ("Proof", "Speed"):
        measured = section(title).split("\n### ")[0]
        assert "```bash" in measured, f"{title} names no command"
        if re.search(r"^\|", measured, re.MULTILINE):
            assert re.search(r"torch \d\.\d+", measured), f"{title} names no version of torch"
            assert re.search(r"\bcores?\b|\b[AH]\d00\b|\bT4", measured), f"{title} names no machine"


# ----------------------------------------------------------------------------------------------------------------------
# Commands


def commands():
    """Every command of the README and of the docstrings, where it stands first."""
    found = [line for block in blocks("bash") for line in block.text.replace("\\\n", "").splitlines()]
    found += [span for span in CODE if re.match(r"(python|torchrun|grep) .*\.py\b", span)]
    for path in (*map(ROOT.joinpath, FILES), ROOT / "tests" / "benchmark.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        lines = docstring.replace("\\\n", "").splitlines()
        found += [line.strip() for line in lines if re.match(r"\s*([A-Z_]+=\S+ )*(python|torchrun|grep) ", line)]
    return list(dict.fromkeys(line for line in found if line))


@functools.cache
def parser_of(program):
    """The parser that a program of the project really uses; it takes no abbreviation and fails the test at an error."""

    class Found(BaseException):
        pass

    def found(parser, *_):
        raise Found(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", found), mock.patch("signal.signal"):
        module = importlib.import_module(Path(program).stem)
        with pytest.raises(Found) as caught:
            module.main()
    return strict(caught.value.args[0])


def strict(parser):
    parser.allow_abbrev, parser.error = False, pytest.fail
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                strict(subparser)
    return parser


def check_training(script, flags, n_processes=1):
    """Fail for flags that the script would refuse on a machine with enough GPUs."""
    args = gpt.resolve_flags(parser_of(script).parse_args(flags), for_ddp=script != SINGLE)
    assert args.data or not args.preset.startswith("gpt2"), "the text that comes with Python is too short"
    if script == SPAWN:
        with mock.patch("torch.accelerator.device_count", lambda: 8):
            n_processes = importlib.import_module("train_ddp_spawn").resolve_processes(args)
    data.plan_steps(10**9, args.global_batch_size, args.batch_size, n_processes)


def check_torchrun(words):
    launch = strict(get_args_parser()).parse_args(words)
    assert launch.training_script == TORCHRUN
    if launch.rdzv_backend != "static":
        assert launch.node_rank == 0 and "node_rank" not in "".join(words), "only the static rendezvous heeds it"
    n_machines = int(launch.nnodes.split(":")[-1])
    check_training(TORCHRUN, launch.training_script_args, n_machines * int(launch.nproc_per_node))


@pytest.mark.parametrize("line", commands(), ids=lambda line: line[:80])
@mock.patch.dict(os.environ)
def test_a_command_is_one_that_the_programs_take(line):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    for part in line.replace(" ... ", " ").split(" && "):
        words = shlex.split(re.sub(r"\$\w+", "2", part), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S+", words[0]):
            name, value = words.pop(0).split("=", 1)
            os.environ[name] = value
        match words:
            case []:
                assert part.startswith(("#!/bin/bash", "#SBATCH --"))
            case ["pip", "install", "-r", file]:
                assert (ROOT / file).is_file()
            case ["python", "-m", "pytest", folder]:
                assert (ROOT / folder).is_dir()
            case ["grep", "-n", pattern, file]:
                assert re.search(pattern, SOURCE[file])
            case ["python", program, *flags] if program in (SINGLE, SPAWN):
                check_training(program, flags)
            case ["python", ("data.py" | "tests/benchmark.py") as program, *flags]:
                parser_of(program).parse_args(flags)
            case ["torchrun", *rest]:
                check_torchrun(rest)
            case ["srun", *rest]:
                check_torchrun(rest[rest.index("torchrun") + 1 :])
            case ["host=$(scontrol", *_]:
                pass
            case _:
                pytest.fail(f"no rule for {words}")


@pytest.mark.parametrize("block", blocks("bash"), ids=lambda block: block.text.splitlines()[0])
def test_a_block_of_commands_is_good_shell(block):
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)


def test_the_command_for_the_tests_is_the_one_that_ci_takes_from_here():
    script = (ROOT / ".ci" / "run").read_text()
    (pattern,) = re.findall(r"grep -m 1 -E '(.*)' README\.md", script)
    (line,) = [line for line in README.splitlines() if re.search(pattern, line)]
    assert line in [block.text.strip() for block in blocks("bash")]
    assert "bash .ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_the_variables_of_a_training_operator_are_read_by_torchrun(monkeypatch):
    names = set(re.findall(r"\bPET_\w+", README))
    assert names
    for name in names:
        monkeypatch.setenv(name, "7")
    launch = get_args_parser().parse_args([TORCHRUN])
    for name in names:
        assert str(getattr(launch, name.removeprefix("PET_").lower())) == "7", name


@pytest.mark.slow
def test_the_commands_for_a_cpu_run_as_printed_and_in_order(tmp_path):
    folder, programs = tmp_path / "checkout", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    for name in (*FILES, "README.md", "requirements.txt"):
        shutil.copy(ROOT / name, folder)
    for name, program in (
        ("python", f'exec "{sys.executable}" "$@"'),
        ("torchrun", f'exec "{sys.executable}" -m torch.distributed.run "$@"'),
        ("pip", "exit 0"),  # what it would install is there
    ):
        (programs / name).write_text(f"#!/bin/sh\n{program}\n")
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # another slow test may run beside this one

    ready = [block for block in BLOCKS if block.runs_on_a_cpu]
    assert ready
    for block in ready:
        text = block.text.replace("/tmp/", f"{tmp_path}/")
        (folder / "printed.py").write_text(text)  # in a file, since processes that it spawns import it
        command = ["bash", "-euc", text] if block.language == "bash" else ["python", "printed.py"]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
        if text.endswith("train_single_gpu.py\n"):
            last_loss = re.findall(r"validation loss (\S+)", done.stdout)[-1]
            assert float(last_loss) <= 1.95, "with no flags it learns English"
            assert "sample: The " in done.stdout
        if "--dtype float64" in text:
            losses = re.findall(r"step \d+/\d+  loss \S+|validation loss \S+", done.stdout)
            n_runs = len(text.splitlines())
            assert losses and losses == losses[: len(losses) // n_runs] * n_runs


# ----------------------------------------------------------------------------------------------------------------------
# What a run prints, and a program that uses it

PRINTED = (
    r"preset \S+: \d+ layers, \d+ heads, [\d,]+ wide, [\d,]+ tokens of context, [\d,]+ parameters"
    r"(; for the real thing: --preset gpt2 --data FILE)?",
    r"device \w+, \d+ process(es)?, \w+(, compiled)?, torch \S+",
    r"corpus \S+( into Python)?, hash \w{12}, \w+ tokens: [\d,]+ windows to train on, [\d,]+ to validate",
    r"\d+ sequences per step = \d+ per forward x \d+ accumulated x \d+ process(es)?; "
    r"[\d,]+ steps per epoch, [\d,]+ in all",
    r"resumed after step \d+",
    r"epoch \d+  step \d+/\d+  loss \d+\.\d{6}( \[.*rank \d+ \d+\.\d{6}\])?  norm \d+\.\d{3}  lr \d\.\d\de-\d\d"
    r"(  [\d,]+ tokens/s(  MFU \d+\.\d%)?  \S.* left)?",
    r"step \d+: validation loss \d+\.\d{6}",
    r"Epoch \d+ completed",
    r"stopped by SIG\w+ after step \d+: (saved in \S+; --resume goes on|nothing was saved without --out)",
    r"sample: The .*",
    r"written to \S+",
)
PRINTED_ELSEWHERE = {  # and where
    SPAWN: r"backend \w+",
    SINGLE: r"nothing was written: --out DIR keeps a checkpoint",
    "data.py": r"\S+: [\d,]+ tokens; train with --data \S+ --tokenizer \w+",
}


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """A run that was interrupted after an epoch of three steps and resumed for three more: (its folder, its output)."""
    folder = tmp_path_factory.mktemp("readme")
    corpus, out, printed = folder / "corpus.txt", folder / "resumable", io.StringIO()
    corpus.write_text("All work and no play makes Jack a dull boy. " * 40)
    flags = f"--device cpu --data {corpus} --global-batch-size 6 --epochs 2 --log-every 3 --out {out} --resume".split()
    args = gpt.resolve_flags(parser_of(SINGLE).parse_args(flags))
    script = importlib.import_module("train_single_gpu")
    with contextlib.redirect_stdout(printed), torch.random.fork_rng():
        for on_signal in (lambda handler: handler(signal.SIGINT, None), lambda handler: None):
            with mock.patch.object(script, "on_signal", on_signal), contextlib.suppress(SystemExit):
                script.train(args)
    return out, printed.getvalue()


def test_the_lines_that_a_text_block_may_hold_are_those_that_a_run_prints(short_run):
    lines = short_run[1].splitlines()
    for pattern in PRINTED:
        assert any(re.fullmatch(pattern, line) for line in lines), pattern
    last, sampled = lines.pop(), [number for number, line in enumerate(lines) if line.startswith("sample: ")]
    for line in (*lines[: sampled[0]], last):
        assert any(re.fullmatch(pattern, line) for pattern in PRINTED), line
    for name, pattern in PRINTED_ELSEWHERE.items():
        assert re.search(re.sub(r"\\S\+|\[\\d,\]\+|\\w\+", r"{.*}", pattern), SOURCE[name]), pattern


def test_a_text_block_shows_what_a_run_prints():
    lines = [line for block in blocks("text") for line in block.text.splitlines() if line not in ("", "...")]
    assert lines
    for line in lines:
        assert any(re.fullmatch(pattern, line) for pattern in (*PRINTED, *PRINTED_ELSEWHERE.values())), line


def test_batch_arithmetic_adds_up():
    shown = re.findall(r"(\d+) sequences per step = (\d+) per forward x (\d+) accumulated x (\d+) process", FLAT)
    assert shown
    for line in shown:
        whole, forward, accumulated, processes = map(int, line)
        assert whole == forward * accumulated * processes
    batches = {(p.global_batch_size, p.batch_size) for p in gpt.PRESETS.values()}
    for whole, forward, accumulated, processes in [tuple(map(int, line)) for line in shown]:
        plans = [data.plan_steps(10**9, *batch, processes)[:2] for batch in batches if batch[0] == whole]
        assert not plans or (forward, accumulated) in plans, "no preset comes to this by itself"


def test_the_script_of_your_own_runs_bare_and_under_torchrun(tmp_path):
    (block,) = [block for block in blocks("python") if "spawn(" in block.text]
    program = tmp_path / "mine.py"
    program.write_text(block.text.replace("29500", str(free_port())))
    launchers = {"bare": [], "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]}
    started = {}
    for name, words in launchers.items():
        (tmp_path / name).mkdir()
        started[name] = subprocess.Popen(
            [sys.executable, *words, program],
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path / name,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
    for name, process in started.items():
        printed, _ = process.communicate(timeout=300)
        losses = [float(loss) for loss in re.findall(r"^epoch \d: last loss (\S+)$", printed, re.MULTILINE)]
        assert process.returncode == 0 and len(losses) == 5 and losses[-1] < losses[0] / 3, printed
        assert "0.weight" in torch.load(tmp_path / name / "model.pt", weights_only=True), "a name of the raw model"


@pytest.mark.parametrize("block", [block for block in blocks("python") if "load_checkpoint" in block.text])
def test_a_program_runs_as_printed(block, short_run):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(block.text.replace("/tmp/resumable", str(short_run[0])), {})
    (prompt,) = re.findall(r'encode_ordinary\("(.*)"\)', block.text)
    assert printed.getvalue().startswith(prompt)


# ----------------------------------------------------------------------------------------------------------------------
# Quotes and names


def lines_of(script):
    """The lines of a script without what leads them, each with its comment about DDP and without."""
    lines = [line.strip() for line in SOURCE[script].splitlines()]
    return {*lines, *(re.sub(r"  # DDP \d.*", "", line) for line in lines)}


@pytest.mark.parametrize("block", blocks("diff"), ids=lambda block: block.text.splitlines()[0][1:].strip())
def test_a_diff_quotes_the_scripts(block):
    old, new = lines_of(SINGLE), lines_of(block.marker.removeprefix("in ") or SPAWN)
    for line in block.text.splitlines():
        sign, code = line[:1], line[1:].strip()
        assert sign in ("-", "+") and code, line
        closes = not re.search(r"\w", code)  # a bracket alone may stand in both
        assert (code in old) == (sign == "-") or closes, line
        assert (code in new) == (sign == "+"), line


def test_each_mark_of_the_scripts_is_explained_once_in_their_order():
    assert re.findall(r"^(?:### |\*\*)(\d)\. ", README, re.MULTILINE) == list("12345678")
    for script in (SPAWN, TORCHRUN):
        assert set(re.findall(r"# DDP (\d)", SOURCE[script])) == set("12345678")
        assert len(re.findall(r"^.*# DDP [123].*$", SOURCE[script], re.MULTILINE)) <= 25


def test_the_flowchart_shows_what_imports_what():
    (chart,) = [block.text for block in blocks("mermaid") if block.text.startswith("flowchart")]
    files = dict(re.findall(r'(\w+)\["(\w+\.py)', chart))
    arrows = {(files[a], files[b]) for a, bs in re.findall(r"(\w+) --> (.*)", chart) for b in bs.split(" & ")}
    imports = {(a, b) for a in FILES for b in FILES if re.search(rf"^import {b[:-3]}$", SOURCE[a], re.MULTILINE)}
    assert set(files.values()) == set(FILES)
    assert arrows == imports


def test_other_charts_show_numbers_of_their_section():
    charts = [block.text for block in blocks("mermaid") if not block.text.startswith("flowchart")]
    assert charts
    for chart in charts:
        assert chart.startswith("xychart")
        text = next(text for text in re.split(r"^## ", README, flags=re.MULTILINE) if chart in text)
        stated = [float(number) for number in re.findall(r"(?<=\| )-?\d+\.\d+(?= \|)", text)]
        (labels,) = re.findall(r"^\s*x-axis [^\[\n]*\[(.*)\]", chart, re.MULTILINE)
        series = re.findall(r"^\s*(?:line|bar) [^\[\n]*\[(.*)\]", chart, re.MULTILINE)
        assert series
        for values in series:
            assert values.count(",") == labels.count(",")
            for value in values.split(", "):
                assert any(rounds_to(number, value) for number in stated), f"{value} stands in no table"


def test_the_proof_shows_equal_losses_for_each_way_to_run_its_commands():
    proof = section("Proof")
    (commands,) = [block.text for block in blocks("bash") if block.text in proof and block.runs_on_a_cpu]
    header, *rows = table(proof)
    assert rows and len(header) == 1 + len(commands.splitlines())
    for step, *losses in rows:
        assert len(losses) == len(header) - 1 and len(set(losses)) == 1, step


def test_every_name_of_the_code_exists():
    words = set(re.findall(r"\w+", "".join(SOURCE.values())))
    words |= {"NCCL_DEBUG", "NCCL_SOCKET_IFNAME", *inspect.signature(DistributedDataParallel).parameters}
    words.update(dir(torch.nn), dir(torch.nn.SyncBatchNorm), dir(DistributedDataParallel), dir(default_hooks))
    for span in CODE:
        for name in re.findall(r"\btorch(?:\.\w+)+", span):
            assert pkgutil.resolve_name(name), name
        called = re.findall(r"\b([A-Za-z_]\w*)\(", span)
        alone = re.findall(r"^\w*[A-Z_]\w*$", span)
        for name in (*called, *alone):
            assert name in words or name.startswith("PET_"), name


def test_every_file_that_is_named_exists():
    examples = {"corpus.txt", "corpus.txt.gpt2.npy", "tokens.npy", "train.sh"}
    named = {
        name.removeprefix("/tmp/")
        for span in CODE
        for name in re.findall(r"[\w./]*\w\.(?:py|txt|md|sh|npy|pt|csv)\b", span)
    }
    assert {name for name in named if name not in examples and not (ROOT / name).exists()} == {
        "checkpoint.pt",
        "metrics.csv",
    }
    for name in ("checkpoint.pt", "metrics.csv"):
        assert f'"{name}"' in SOURCE["gpt.py"]


def test_links_resolve():
    anchors = {}
    for heading in re.findall(r"^#+ (.*)$", PROSE, re.MULTILINE):  # as GitHub makes them
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        anchors[anchor] = anchors.get(anchor, -1) + 1
    anchors = {f"{anchor}-{n}".removesuffix("-0") for anchor, last in anchors.items() for n in range(last + 1)}
    links = re.findall(r"\]\(([^)\s]*)\)", PROSE)
    assert links
    for link in links:
        if link.startswith("#"):
            assert link[1:] in anchors, link
        else:
            assert link.startswith("https://") or (ROOT / link).exists(), link


# ----------------------------------------------------------------------------------------------------------------------
# Flags, defaults and figures


def flag_table():
    """{flag: what the README says of it}."""
    return {flag: text for cell, text in table(section("Flags"))[1:] for flag in re.findall(r"--[\w-]+", cell)}


def options_of(script):
    return {option: action for action in parser_of(script)._actions for option in action.option_strings}


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_flags_of_the_table_are_those_of_the_script(script):
    documented = {flag for flag, text in flag_table().items() if script == SPAWN or not text.startswith("spawn only")}
    assert documented == {option for option in options_of(script) if option.startswith("--")} - {"--help"}


def test_every_flag_that_is_named_exists():
    known = {option for script in SCRIPTS for option in options_of(script)}
    known |= {option for action in get_args_parser()._actions for option in action.option_strings}
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", PROSE)) - known <= {"--help", "--output", "--pid"}


def test_the_table_of_flags_states_the_defaults_of_the_code():
    says, options, presets = flag_table(), options_of(SINGLE), gpt.PRESETS
    for flag in ("--log-every", "--eval-every"):
        assert says[flag].endswith(f", {options[flag].default}")
    for flag in ("--tokenizer", "--dtype"):
        assert set(re.findall(r"`(\w+)`", says[flag])) == set(options[flag].choices)
    dropped = {name: preset.drop_rate for name, preset in presets.items() if preset.drop_rate}
    ((name, rate),) = dropped.items()
    assert f"0 in all presets but `{name}` ({rate})" in says["--drop-rate"]
    of_gpt2 = {preset.epochs for name, preset in presets.items() if name.startswith("gpt2")}
    epochs = f"{presets['tiny'].epochs} (`tiny`), {presets['small'].epochs} (`small`), {of_gpt2.pop()} (gpt2 presets)"
    assert epochs in says["--epochs"] and not of_gpt2
    (share,) = re.findall(r"first (\d+) %", says["--lr"])
    for script in SCRIPTS:
        module = importlib.import_module(Path(script).stem)
        assert int(share) / 100 == module.WARMUP_SHARE
    assert "falls to a tenth by the last" in says["--lr"] and math.isclose(gpt.learning_rate(99, 99, 1.0), 0.1)
    by_default = gpt.resolve_flags(parser_of(SINGLE).parse_args(["--device", "cpu"]))
    assert f"`{by_default.preset}` on a CPU" in says["--preset"]


@functools.cache
def model_of(preset):
    args = gpt.resolve_flags(parser_of(SINGLE).parse_args(["--device", "cpu", "--preset", preset]))
    with torch.device("meta"):
        return gpt.GPT(gpt.config_for(args, data.get_tokenizer(args.tokenizer).n_vocab))


def n_parameters(preset):
    return sum(parameter.numel() for parameter in model_of(preset).parameters())


def test_the_table_of_presets_is_that_of_the_code():
    rows = {row[0].strip("`"): row[1:] for row in table(section("Your own text"))[1:]}
    assert list(rows) == list(gpt.PRESETS)
    units, wrong = {"M": 1e6, "MB": 1e6, "GB": 1e9}, []
    for name, (shape, parameters, context, memory, batches) in rows.items():
        preset = gpt.PRESETS[name]
        assert shape == f"{preset.n_layers} x {preset.emb_dim:,}, {preset.n_heads}"
        assert context == f"{preset.context_length:,}"
        assert batches == f"{preset.batch_size}, {preset.global_batch_size}"
        # weights, gradients and two moments of AdamW, in float32
        for value, cell in ((n_parameters(name), parameters), (4 * 4 * n_parameters(name), memory)):
            number, unit = cell.split()
            if not rounds_to(value / units[unit], number):
                wrong.append(f"{name}: {cell} is {value:,}")
    assert not wrong


def figures():
    """(what stands around a number of the README, what the number must be)."""
    gpt2 = gpt.PRESETS["gpt2"]
    tokens_per_step, tokens = gpt2.global_batch_size * gpt2.context_length, 10**10
    share, flops = 0.4, gpt.flops_per_token(model_of("gpt2"))

    def hours(gpu, n=1):
        return tokens * flops / (share * gpt.PEAK_FLOPS[gpu] * n) / 3600

    def accumulation(preset, n=8):
        return data.plan_steps(10**9, gpt.PRESETS[preset].global_batch_size, gpt.PRESETS[preset].batch_size, n)[1]

    return [
        (r"gpt2 presets is ([\d,]+) sequences", gpt2.global_batch_size),
        (r"sequences of ([\d,]+) tokens", gpt2.context_length),
        (r"sequences of [\d,]+ tokens, ([\d,]+) tokens", tokens_per_step),
        (r"10 billion are ([\d,]+) steps", tokens // tokens_per_step),
        (r"steps, `--max-steps (\d+)`", tokens // tokens_per_step),
        (r"computed for (\d+) % MFU", 100 * share),
        (r"one A100 (\d+) hours", hours("A100")),
        (r"one H100 (\d+) hours", hours("H100")),
        (r"eight H100s (\d+) minutes", 60 * hours("H100", 8)),
        (r"at (\d+) % of an H100", 100 * share),
        (r"an H100's (\d+) TFLOP/s", gpt.PEAK_FLOPS["H100"] / 1e12),
        (r"accumulates ([\w ]+) times over 8 GPUs \(`gpt2`\)", accumulation("gpt2")),
        (r"\(`gpt2`\), (\d+) times \(`gpt2-xl`\)", accumulation("gpt2-xl")),
        (r"recipe of (\d+) sequences accumulates", gpt2.global_batch_size),
        (r"on every GPU, (\d+) bytes per parameter", 4 * 4),
        (r"`tiny`, a model of ([\d.]+) million", n_parameters("tiny") / 1e6),
        (r"preset `small` \(([\d.]+) million", n_parameters("small") / 1e6),
        (r"vocabulary of ([\d,]+)", data.get_tokenizer("gpt2").n_vocab),
    ]


def test_numbers_that_follow_from_others_are_right():
    stated = {pattern: (re.findall(pattern, FLAT), value) for pattern, value in figures()}
    assert not {
        pattern: (found, value)
        for pattern, (found, value) in stated.items()
        if len(found) != 1 or not rounds_to(value, found[0])
    }


def test_the_table_of_the_all_reduce_is_computed_right():
    text = section("What the all-reduce costs, on paper")
    (n,) = map(int, re.findall(r"N = (\d+)", text))
    header, *rows = table(text)
    bits, wrong = {"GB/s": 8e9, "Gbit/s": 1e9}, []
    links = [re.search(r"([\d.]+) (G\w+/s)", cell) for cell in header[3:-1]]
    assert rows and len(links) == 3
    for name, gradients, sent, *seconds, backward in rows:
        preset, forward_batch, context = re.fullmatch(r"`(\S+)`, (\d+) x ([\d,]+) tokens", name).groups()
        model, recipe = model_of(preset), gpt.PRESETS[preset]
        n_bytes = 4 * n_parameters(preset)
        assert context == f"{recipe.context_length:,}"
        planned_batch, _, _ = data.plan_steps(10**9, recipe.global_batch_size, recipe.batch_size, n)
        if int(forward_batch) != planned_batch:
            wrong.append(f"{name}: {planned_batch} sequences")
        expected = [(gradients, "GB", n_bytes / 1e9), (sent, "GB", 2 * (n - 1) / n * n_bytes / 1e9)]
        for link, cell in zip(links, seconds, strict=True):
            bytes_per_second = float(link[1]) * bits[link[2]] / 8
            expected.append((cell, "ms", 2 * (n - 1) / n * n_bytes / bytes_per_second * 1e3))
        # a backward pass takes two thirds of the operations
        flops = 2 / 3 * gpt.flops_per_token(model) * int(forward_batch) * recipe.context_length
        expected.append((backward, "ms", flops / (0.4 * gpt.PEAK_FLOPS["H100"]) * 1e3))
        for cell, unit, value in expected:
            if not (cell.endswith(f" {unit}") and rounds_to(value, cell.split()[0])):
                wrong.append(f"{name}: {cell} is {value:.4g} {unit}")
    assert not wrong


def test_the_time_out_is_that_of_the_scripts():
    assert "After ten minutes (`TIMEOUT` in the scripts)" in FLAT
    for script in (SPAWN, TORCHRUN):
        assert importlib.import_module(Path(script).stem).TIMEOUT.total_seconds() == 600


def test_the_versions_of_python_are_those_that_ci_runs():
    stated = re.findall(r"Python (3\.\d+) to (3\.\d+)", FLAT)
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert stated == [tuple(re.findall(r'"(3\.\d+)"', re.search(r"python: \[(.*)\]", workflow)[1]))]


# ----------------------------------------------------------------------------------------------------------------------
# The project as a whole


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_the_top_level_holds_what_the_design_lists_and_nothing_else():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {name.split("/")[0] for name in tracked} == {
        *FILES,
        "README.md",
        "requirements.txt",
        "tests",
        ".gitignore",
        ".ci",
        ".github",
        ".ruff.toml",
    }


def test_the_requirements_are_three_packages_with_lower_bounds():
    lines = (ROOT / "requirements.txt").read_text().split()
    assert all(re.fullmatch(r"[a-z]+>=[\d.]+", line) for line in lines)
    assert {line.split(">=")[0] for line in lines} == {"torch", "tiktoken", "numpy"}
    assert (ROOT / "tests" / "requirements.txt").read_text().startswith("-r ../requirements.txt\n")


@pytest.mark.parametrize("name", FILES)
def test_every_module_and_in_the_two_modules_every_public_name_is_documented(name):
    module = ast.parse(SOURCE[name])
    assert ast.get_docstring(module)
    if name in SCRIPTS:
        return
    public = [node for node in module.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    public = [node for node in public if not node.name.startswith("_") and node.name != "main"]
    assert len(public) > 5
    for node in public:
        assert ast.get_docstring(node), f"{node.name} has no docstring"
