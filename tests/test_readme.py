"""The README against the code: what it says to type runs, what it quotes stands there, what it counts adds up.

bash      commands, one per line; after <!-- runs on a CPU --> they are run (by a slow test)
python    a program, after the same comment; it is run
text      lines that a program of the project prints, up to their numbers; ... stands for what is left out
diff      lines of train_single_gpu.py (-) that train_ddp_spawn.py has not, or the other way round (+)
mermaid   a flowchart of the files, a gantt of a step, or an xychart of numbers in the table of its section
"""

import argparse
import ast
import contextlib
import functools
import gc
import importlib
import io
import os
import pkgutil
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import ROOT, SCRIPTS, SINGLE, SPAWN, TORCHRUN, call_main, free_port, popen, read_metrics
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.run import get_args_parser
from torch.nn.parallel import DistributedDataParallel

import data
import gpt

FILES = ("gpt.py", "data.py", *SCRIPTS)
SOURCE = {name: (ROOT / name).read_text(encoding="utf-8") for name in FILES}
README = (ROOT / "README.md").read_text(encoding="utf-8")
CI = (ROOT / ".ci" / "run").read_text() + (ROOT / ".github" / "workflows" / "ci.yml").read_text()

Block = namedtuple("Block", "marker language text")  # the marker is what the comment line before it says
FENCED = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [Block(*(group or "" for group in match.groups())) for match in FENCED.finditer(README)]
PROSE = FENCED.sub("", README)
FLAT = " ".join(README.split())
CODE = re.findall(r"`([^`]+)`", PROSE)


def blocks(language):
    return [block for block in BLOCKS if block.language == language]


def section(title):
    return re.split("^## ", README.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


def table(text):
    """The rows of the first Markdown table in a text, as lists of cells; the header is the first row."""
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if not line.startswith("|---")]


def rounds_to(value, text):  # to as many digits as the text has
    return f"{value:,.{len(text.partition('.')[2])}f}".replace(",", "") == text.replace(",", "")


def test_every_block_is_of_a_kind_that_a_test_checks_and_its_commands_are_good_shell():
    assert README.count("```") == 2 * len(BLOCKS), "a fence is not closed, or is indented"
    assert not re.search(r"^(?: {4}|\t)", PROSE, re.MULTILINE), "code without a fence"
    markers = {"bash": "|runs on a CPU", "python": "runs on a CPU.*", "text": "", "diff": "", "mermaid": ""}
    for block in BLOCKS:
        assert re.fullmatch(markers[block.language], block.marker), block
    subprocess.run(["bash", "-n"], input="".join(block.text for block in blocks("bash")), text=True, check=True)
    assert "<!--" not in PROSE, "a comment that stands before no block marks nothing"


def test_every_figure_says_where_it_was_measured_and_the_whole_is_short_enough_to_be_read():
    assert "@@" not in README
    for title in ("What it prints", "Proof", "Speed"):
        assert re.search(r"torch \d\.\d+", section(title)), f"{title} names no version of torch"
        assert re.search(r"\bcores?\b|\b[AH]\d00\b|\bT4", section(title)), f"{title} names no machine"
    assert README.count("\n") <= 420 and len(README.split()) <= 3800


def commands():
    """Every command of the README and of the docstrings, where it stands first."""
    found = [line for block in blocks("bash") for line in block.text.splitlines()]
    found += [span for span in CODE if re.match(r"(python|torchrun|grep) .*\.py\b", span)]
    for path in (*map(ROOT.joinpath, FILES), ROOT / "tests" / "benchmark.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        found += re.findall(r"(?:^ *(?:[A-Z_]+=\S+ )*(?=python|torchrun)|(?<=: )(?=grep )).*", docstring, re.MULTILINE)
    return list(dict.fromkeys(line.strip() for line in found))


@functools.cache
def parser_of(program):
    """The parser that a program of the project really uses."""
    found = mock.Mock(side_effect=SystemExit)
    parse = mock.patch.object(argparse.ArgumentParser, "parse_args", lambda parser: found(parser))
    with mock.patch("signal.signal"), parse, pytest.raises(SystemExit):
        importlib.import_module(Path(program).stem).main()
    return found.call_args.args[0]


def check_training(script, flags, **env):
    """Fail where main() of the script would refuse these flags, with any corpus and on a machine with a compiler."""

    def planned(args, n_processes=1, quiet=False):
        assert args.data or not args.preset.startswith("gpt2"), "the text that comes with Python is too short"
        data.plan_steps(10**9, args.global_batch_size, args.batch_size, n_processes)

    with mock.patch("data.Run", planned), mock.patch("shutil.which", lambda name: name):
        status, _, stderr = call_main(script, *flags, **{"MASTER_ADDR": None, "MASTER_PORT": None, **env})
    assert status == 99, stderr


def check_torchrun(words):
    launch = get_args_parser().parse_args(words)
    assert launch.rdzv_backend == "static" or "node_rank" not in "".join(words), "only the static rendezvous heeds it"
    nproc, nnodes = int(launch.nproc_per_node), int(launch.nnodes.split(":")[-1])
    env = {"MASTER_ADDR": launch.master_addr, "MASTER_PORT": launch.master_port or 29500}
    check_training(
        launch.training_script, launch.training_script_args, LOCAL_WORLD_SIZE=nproc, WORLD_SIZE=nproc * nnodes, **env
    )


@pytest.mark.parametrize("line", commands(), ids=lambda line: line[:80])
@mock.patch.object(argparse.ArgumentParser, "_get_option_tuples", lambda *_: [])  # takes no abbreviation
def test_a_command_is_one_that_the_programs_take(line):
    for part in line.split(" && "):
        words, env = shlex.split(re.sub(r"\$\w+", "2", part), comments=True), {}
        while words and re.fullmatch(r"[A-Z_]+=\S+", words[0]):
            name, env[name] = words.pop(0).split("=", 1)
        match words:
            case []:
                assert part.startswith(("#!/bin/bash", "#SBATCH --", "# "))
            case ["pip", "install", "-r", path] | ["python", "-m", "pytest", path]:
                assert (ROOT / path).exists()
            case ["grep", "-n", pattern, file]:
                assert re.search(pattern, SOURCE[file])
            case ["python", program, *flags] if program in (SINGLE, SPAWN):
                check_training(program, flags, **env)
            case ["python", ("data.py" | "gpt.py" | "tests/benchmark.py") as program, *flags]:
                parser_of(program).parse_args(flags)
            case ["torchrun", *rest] | ["srun", _, "torchrun", *rest]:
                check_torchrun(rest)
            case ["host=$(scontrol", *_]:
                pass
            case _:
                pytest.fail(f"no rule for {words}")


def test_the_command_for_the_tests_and_the_versions_of_python_are_those_of_ci():
    (pattern,) = re.findall(r"grep -m 1 -E '(.*)' README\.md", CI)
    (line,) = [line for line in README.splitlines() if re.search(pattern, line)]
    assert line in [block.text.strip() for block in blocks("bash")] and "bash .ci/run" in CI
    (versions,) = re.findall(r"Python (3\.\d+) to (3\.\d+)", FLAT)
    assert re.findall(r'"(3\.\d+)"', re.search(r"python: \[(.*)\]", CI)[1]) == list(versions)


def test_the_variables_of_a_training_operator_are_read_by_torchrun(monkeypatch):
    for name in (names := set(re.findall(r"\bPET_\w+", README))):
        monkeypatch.setenv(name, "7")
    launch = get_args_parser().parse_args([TORCHRUN])
    assert names and all(str(getattr(launch, name.removeprefix("PET_").lower())) == "7" for name in names)


@pytest.mark.slow
def test_the_commands_for_a_cpu_run_as_printed_and_in_order(tmp_path):
    for name in (*FILES, "README.md", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    torchrun, pip = f"exec '{sys.executable}' -m torch.distributed.run", "true"  # what pip would install is there
    for name, program in {"python": f"exec '{sys.executable}'", "torchrun": torchrun, "pip": pip}.items():
        (tmp_path / name).write_text(f'#!/bin/sh\n{program} "$@"\n')
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # another slow test may run beside this one

    for block in [block for block in blocks("bash") if block.marker]:
        command = ["bash", "-euc", text := block.text.replace("/tmp/", f"{tmp_path}/")]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
        if text.endswith("train_single_gpu.py\n"):
            last_loss = re.findall(r"validation loss (\S+)", done.stdout)[-1]
            assert float(last_loss) <= 1.95 and "sample: The " in done.stdout, "with no flags it learns English"
        if "--dtype float64" in text:
            losses, n_runs = re.findall(r"step \d+/\d+  loss \S+|validation loss \S+", done.stdout), text.count("\n")
            assert losses and losses == losses[: len(losses) // n_runs] * n_runs
        for prompt in re.findall(r'--prompt "(.*)"', text):
            assert len(done.stdout.split(f"\n{prompt}")[-1]) > 100, "what the model writes comes last"


PRINTED = (
    r"preset \S+: \d+ layers, \d+ heads, [\d,]+ wide, [\d,]+ tokens of context, [\d,]+ parameters"
    r"(; for the real thing: --preset gpt2 --data FILE)?",
    r"device \w+, \d+ process(es)?, \w+(, compiled)?, torch \S+",
    r"corpus \S+( into Python)?, hash \w{12}, \w+ tokens: [\d,]+ windows to train on, [\d,]+ to validate",
    r"\d+ sequences per step = \d+ per forward x \d+ accumulated x \d+ process(es)?; "
    r"[\d,]+ steps per epoch, [\d,]+ in all",
    r"resumed after step \d+",
    r"epoch \d+  step \d+/\d+  loss \d+\.\d{6}( \[.*rank \d+ \d+\.\d{6}\])?  norm \d+\.\d{3}  lr \d\.\d\de-\d\d"
    r"(  [\d,]+ tokens/s  \S.* left)?",
    r"step \d+: validation loss \d+\.\d{6}",
    r"Epoch \d+ completed",
    r"stopped by SIG\w+ after step \d+: (saved in \S+; --resume goes on|nothing was saved without --out)",
    r"sample: The .*",
    r"written to \S+",
)
ELSEWHERE = {
    SPAWN: r"\w+ waits for \d+ processes at \S+",
    "data.py": "nothing was written: --out DIR keeps a checkpoint",
}


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """A run that was interrupted at its first report and resumed: (its folder, its output)."""
    folder, printed = tmp_path_factory.mktemp("readme"), io.StringIO()
    corpus, out = folder / "corpus.txt", folder / "resumable"
    corpus.write_text("All work and no play makes Jack a dull boy. " * 40)
    flags = f"--device cpu --data {corpus} --global-batch-size 6 --epochs 2 --log-every 3 --out {out} --resume".split()
    script = importlib.import_module("train_single_gpu")
    interrupt = lambda handler: handler == data.end_quietly or handler(signal.SIGINT, None)  # noqa: E731
    for on_signals in (interrupt, mock.Mock()):
        patches = mock.patch("data.on_signals", on_signals), mock.patch("sys.argv", [SINGLE, *flags])
        with patches[0], patches[1], contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            script.main()
        gc.collect()  # the run lets go of its folder
    return out, printed.getvalue()


def test_a_text_block_shows_what_a_run_prints(short_run):
    lines = short_run[1].splitlines()
    for pattern in PRINTED:
        assert any(re.fullmatch(pattern, line) for line in lines), pattern
    (sampled,) = [number for number, line in enumerate(lines) if line.startswith("sample: ")]
    shown = [line for block in blocks("text") for line in block.text.splitlines() if line != "..."]
    for line in (*lines[:sampled], lines[-1], *shown):
        assert any(re.fullmatch(pattern, line) for pattern in (*PRINTED, *ELSEWHERE.values())), line
    for name, pattern in ELSEWHERE.items():
        assert re.search(re.sub(r"\\.\+", r"{.*}", pattern), SOURCE[name]), pattern


def test_batch_arithmetic_adds_up():
    shown = re.findall(r"(\d+) sequences per step = (\d+) per forward x (\d+) accumulated x (\d+) process", FLAT)
    for whole, forward, accumulated, n in [map(int, line) for line in shown]:
        presets = [preset for preset in gpt.PRESETS.values() if preset.global_batch_size == whole]
        plans = [data.plan_steps(10**9, whole, preset.batch_size, n)[:2] for preset in presets]
        assert whole == forward * accumulated * n and (not plans or (forward, accumulated) in plans)


def test_the_script_of_your_own_runs_bare_and_under_torchrun(tmp_path):
    (block,) = [block for block in blocks("python") if "spawn(" in block.text]
    program = tmp_path / "mine.py"
    program.write_text(block.text.replace("29500", str(free_port())))
    started = {}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    for name, words in {"bare": [], "torchrun": torchrun}.items():
        (tmp_path / name).mkdir()
        options = {"stdout": subprocess.PIPE, "text": True, "cwd": tmp_path / name}
        started[name] = popen([sys.executable, *words, program], {"CUDA_VISIBLE_DEVICES": ""}, **options)
    for name, process in started.items():
        printed, _ = process.communicate(timeout=300)
        losses = [float(loss) for loss in re.findall(r"^epoch \d: last loss (\S+)$", printed, re.MULTILINE)]
        assert process.returncode == 0 and len(losses) == 5 and losses[-1] < losses[0] / 3, printed
        assert "0.weight" in torch.load(tmp_path / name / "model.pt", weights_only=True), "a name of the raw model"


def test_the_curve_is_plotted_as_printed(short_run):
    pytest.importorskip("matplotlib").use("agg")
    (block,) = [block for block in blocks("python") if "matplotlib" in block.marker]
    exec(block.text.replace("/tmp/resumable", str(short_run[0])), names := {})
    assert (short_run[0] / "loss.png").read_bytes().startswith(b"\x89PNG")
    (train, validation), rows = names["plt"].gca().lines, read_metrics(short_run[0])
    assert list(train.get_xydata()[:, 1]) == [row["train_loss"] for row in rows]
    assert validation.get_xydata()[-1].tolist() == [rows[-1]["step"], rows[-1]["val_loss"]]


def lines_of(script):
    """The lines of a script without what leads them, each with its comment and without."""
    lines = [line.strip() for line in SOURCE[script].splitlines()]
    return {*lines, *(line.split("  # ")[0] for line in lines)}


def test_a_diff_quotes_the_scripts():
    old, new = lines_of(SINGLE), lines_of(SPAWN)
    for line in [line for block in blocks("diff") for line in block.text.splitlines()]:
        sign, code = line[:1], line[1:].strip()
        assert sign in ("-", "+") and code and (code in old, code in new) == (sign == "-", sign == "+"), line


def test_each_mark_of_the_scripts_is_explained_once_in_their_order():
    assert re.findall(r"^(?:\*\*(?=[1-3]))?(\d)\. ", README, re.MULTILINE) == list("12345678")
    for script in (SPAWN, TORCHRUN):
        assert set(re.findall(r"# DDP (\d)", SOURCE[script])) == set("12345678")
        assert len(re.findall(r"^.*# DDP [123].*$", SOURCE[script], re.MULTILINE)) <= 25


def chart(kind):
    """The lines of the Mermaid chart of a kind, without what says how it looks."""
    charts = [re.sub(r"^%%\{.*\}%%\n", "", block.text).split("\n    ") for block in blocks("mermaid")]
    assert [lines[0].split()[0] for lines in charts] == ["flowchart", "gantt", "xychart-beta"], "a test for each kind"
    (lines,) = [lines[1:] for lines in charts if lines[0].startswith(kind)]
    return [line.strip() for line in lines if not re.match(r"(title|y-axis|dateFormat|axisFormat) \S", line)]


def test_the_flowchart_shows_what_imports_what():
    *nodes, arrows = chart("flowchart")
    files = dict(re.fullmatch(r'(\w+)\["<b>(\w+\.py)</b><br>[^"]*"\]', node).groups() for node in nodes)
    tails, heads = (end.split(" & ") for end in arrows.split(" --> "))
    imports = {(a, b) for a in FILES for b in FILES if re.search(rf"^import {b[:-3]}$", SOURCE[a], re.MULTILINE)}
    assert set(files.values()) == set(FILES)
    assert {(files[a], files[b]) for a in tails for b in heads} == imports


def test_the_gantt_shows_that_gradients_are_averaged_while_backward_runs():
    first, *rest = "\n".join(chart("gantt")).removeprefix("section Rank 0\n").split("\nsection ")
    bars = [re.findall(r"^(\w+(?: \d)?) *: (?:crit, )?(\d\d), (\d\d)$", text, re.MULTILINE) for text in (first, *rest)]
    rank, reduced, other = [{task: (int(start), int(end)) for task, start, end in lines} for lines in bars]
    assert [text.splitlines()[0] for text in rest] == ["All-reduce", "Rank 1"] and rank == other
    (_, begun), *parts, (stepped, _) = rank.values()
    assert list(rank) == ["forward", *(f"backward {n}" for n in range(len(parts), 0, -1)), "step"] and len(parts) > 1
    assert [start for start, _ in parts] == [begun, *(end for _, end in parts[:-1])]
    assert [start for start, _ in reduced.values()] == [end for _, end in parts], "each as its part is ready"
    assert [task[-1] for task in reduced] == [task[-1] for task in rank if task.startswith("backward")]
    assert stepped == max(end for _, end in reduced.values())


def test_the_curves_are_those_of_the_table_and_the_proof_shows_equal_losses_for_each_command():
    labels, *curves = [re.findall(r"[\d.]+", line) for line in chart("xychart")]
    (header, *rows), (proof,) = table(section("Proof")), [b.text for b in blocks("bash") if "--dtype float64" in b.text]
    *equal, broken = [losses for _, *losses in rows]
    assert len(equal) == len(proof.splitlines()) and all(losses == equal[0] for losses in equal)
    assert header == ["step", *labels, "validation"] and not set(broken) & set(equal[0])
    assert curves == [*[equal[0][:-1]] * 3, broken[:-1]], "1, 2 and 3 processes, and the broken one"


def test_every_name_of_the_code_exists():
    words = {"NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", *re.findall(r"\w+", "".join(SOURCE.values()))}
    words.update(*map(dir, (torch.nn, torch.nn.SyncBatchNorm, DistributedDataParallel, default_hooks)))
    for span in CODE:
        for name in re.findall(r"\btorch(?:\.\w+)+", span):
            assert pkgutil.resolve_name(name), name
        for name in (*re.findall(r"\b([A-Za-z_]\w*)\(", span), *re.findall(r"^\w*[A-Z_]\w*$", span)):
            assert name in words or name.startswith("PET_"), name


def test_every_file_and_heading_that_is_named_exists():
    kept = set(re.findall(r'Path\(folder, "(.*)"\)', SOURCE["data.py"]))
    named = {name for span in CODE for name in re.findall(r"[\w./]*\w\.(?:py|txt|md|sh|npy|pt|csv)\b", span)}
    assert {name for name in named if not (ROOT / name).exists()} == {*kept, "corpus.txt", "corpus.txt.gpt2.npy"}
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall("\n#+ (.*)", PROSE)}
    links = re.findall(r"\]\(([^)\s]*)\)", PROSE)
    assert links and all(link[1:] in anchors for link in links if not link.startswith("https://"))


def test_every_flag_that_is_named_exists():
    parsers = [*map(parser_of, (*SCRIPTS, "gpt.py", "data.py")), get_args_parser()]
    known = {option.replace("_", "-") for p in parsers for action in p._actions for option in action.option_strings}
    named = {flag.replace("_", "-") for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", PROSE)}
    assert named - known == {"--pid", "--gpus-per-node", "--gpus-per-task"}, "py-spy's and Slurm's"


@functools.cache
def model_of(preset):
    """The model of a preset, without memory, and how many parameters it has."""
    args = gpt.resolve_flags(parser_of(SINGLE).parse_args(["--device", "cpu", "--preset", preset]))
    with torch.device("meta"):
        model = gpt.GPT(gpt.config_for(args, data.get_tokenizer(args.tokenizer).n_vocab))
    return model, sum(parameter.numel() for parameter in model.parameters())


def test_the_table_of_presets_is_that_of_the_code():
    _, *rows = table(section("Your own text"))
    assert [row[0] for row in rows] == [f"`{name}`" for name in gpt.PRESETS]
    for (_, shape, sizes, *recipe), (name, p) in zip(rows, gpt.PRESETS.items()):
        assert shape == f"{p.n_layers} x {p.emb_dim:,}, {p.n_heads}, {p.context_length:,}"
        batches, rates = f"{p.batch_size}, {p.global_batch_size}", f"{p.lr:.5f}".rstrip("0") + f", {p.epochs}"
        assert recipe == [batches, rates, f"{p.tokenizer}, {p.drop_rate or 0}"]
        # weights; with gradients and two moments of AdamW, in float32
        for value, size in zip((model_of(name)[1], 16 * model_of(name)[1]), sizes.split("; "), strict=True):
            number, unit = size.split()
            assert rounds_to(value / {"M": 1e6, "MB": 1e6, "GB": 1e9}[unit], number), f"{name}: {size} is {value:,}"
    assert gpt.resolve_flags(parser_of(SINGLE).parse_args(["--device", "cpu"])).preset == "tiny"


def figures():
    """(what stands around a number of the README, what the number must be)."""
    recipe, (model, n), tokens, hour = gpt.PRESETS["gpt2"], model_of("gpt2"), 10**10, 3600
    # forward and backward for one token (Chowdhery et al., "PaLM", 2022, appendix B); peaks as the maker states them
    attention = 12 * recipe.n_layers * recipe.context_length * recipe.emb_dim
    flops, a100, h100, t4 = 6 * (n - model.pos_emb.weight.numel()) + attention, 312e12, 989e12, 65e12
    tokens_per_step, sent = recipe.global_batch_size * recipe.context_length, 2 * (8 - 1) / 8 * 4 * n
    forward_batch, accumulation, _ = data.plan_steps(10**9, recipe.global_batch_size, recipe.batch_size, 8)
    for share, which in ((0.4, r"(\d+) to \d+"), (0.3, r"\d+ to (\d+)")):
        yield rf"`gpt2` {which} hours on one A100", tokens * flops / (share * a100) / hour
        yield rf"A100, {which} on one H100", tokens * flops / (share * h100) / hour
        yield rf"H100, {which} minutes on eight \(computed for 30 to 40 %", tokens * flops / (share * h100 * 8) / 60
    backward = 2 / 3 * flops * forward_batch * recipe.context_length  # two thirds of the operations
    (minutes,) = set(re.findall(r" timeout = timedelta\(minutes=(\d+)\)", SOURCE[SPAWN] + SOURCE[TORCHRUN]))
    yield from {
        r"step of the gpt2 presets is ([\d,]+) tokens": tokens_per_step,
        r"10 billion are 20,345 steps, `--max-steps (\d+)`": tokens // tokens_per_step,
        r"a step takes (\d+) s \(computed for a quarter of their peak\)": tokens_per_step * flops / (2 * t4 / 4),
        r"sends ([\d.]+) GB in a step of `gpt2`": sent / 1e9,
        r"(\d+) ms over NVLink at 450 GB/s": sent / 450e9 * 1e3,
        r"(\d+) ms over PCIe at 25 GB/s": sent / 25e9 * 1e3,
        r"takes (\d+) ms on an H100 at 40 %": backward / (0.4 * h100) * 1e3,
        r"the preset does, (\d+) times over 8 GPUs": accumulation,
        r"embedding's (\d+) MB": 4 * model.tok_emb.weight.numel() / 1e6,
        r"every GPU, (\d+) bytes per parameter": 4 * 4,
        r"writes (\d+) bytes per parameter": 3 * 4,
        r"([\d.]+) GB for `gpt2` and": 12 * n / 1e9,
        r"(\d+) GB for `gpt2-xl`": 12 * model_of("gpt2-xl")[1] / 1e9,
        r"every (\d+) steps, the default": parser_of(SINGLE).get_default("eval_every"),
        r"after (\d+) minutes \(`timeout` in `setup`;": int(minutes),
        r"`tiny`, a model of ([\d.]+) million": model_of("tiny")[1] / 1e6,
        r"vocabulary of ([\d,]+)": data.get_tokenizer("gpt2").n_vocab,
    }.items()


def test_numbers_that_follow_from_others_are_right():
    for pattern, value in figures():
        (found,) = re.findall(pattern, FLAT)
        assert rounds_to(value, found), f"{pattern}: {found} is {value}"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_the_top_level_holds_what_the_design_lists_and_nothing_else():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    others = {"README.md", "requirements.txt", "tests", ".gitignore", ".ci", ".github", ".ruff.toml"}
    assert {name.split("/")[0] for name in tracked} == {*FILES, *others}


def test_the_requirements_are_three_packages_with_lower_bounds():
    lines = (ROOT / "requirements.txt").read_text().split()
    assert sorted(re.fullmatch(r"([a-z]+)>=[\d.]+", line)[1] for line in lines) == ["numpy", "tiktoken", "torch"]
    assert (ROOT / "tests" / "requirements.txt").read_text().startswith("-r ../requirements.txt\n")


@pytest.mark.parametrize("name", FILES)
def test_every_module_and_in_the_two_modules_every_public_name_is_documented(name):
    module = ast.parse(SOURCE[name])
    public = [node for node in module.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and name not in SCRIPTS]
    for node in [module, *(node for node in public if node.name[0] != "_" and node.name != "main")]:
        assert ast.get_docstring(node), f"{getattr(node, 'name', 'the module')} has no docstring"
