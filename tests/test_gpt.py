"""gpt.py: the model against GPT-2 spelled out from the formulas, and everything around it that needs no process."""

import math
import os
import re
import shlex
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import data
import gpt

SMALL = gpt.GPTConfig(vocab_size=50, context_length=12, emb_dim=24, n_heads=3, n_layers=2)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads that share tensors this small mostly wait for each other."""
    torch.set_num_threads(1)


def random_model(config=SMALL, dtype=torch.float64, seed=0):
    """A model in which no parameter is 0 or 1, so that each of them matters, in evaluation mode."""
    torch.manual_seed(seed)
    model = gpt.GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.to(dtype).eval()


def random_ids(*shape, config=SMALL, seed=1):
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def layer_norm(x, parameters, name):
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred**2).mean(-1, keepdim=True)
    return centred / torch.sqrt(variance + 1e-5) * parameters[f"{name}.weight"] + parameters[f"{name}.bias"]


def linear(x, parameters, name):
    return x @ parameters[f"{name}.weight"].T + parameters.get(f"{name}.bias", 0.0)


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def attention(x, parameters, name, n_heads):
    n_tokens, emb_dim = x.shape[1:]
    head_dim = emb_dim // n_heads
    queries, keys, values = linear(x, parameters, f"{name}.qkv").split(emb_dim, dim=-1)
    is_future = torch.arange(n_tokens)[None, :] > torch.arange(n_tokens)[:, None]  # (query, key)
    heads = []
    for head in range(n_heads):
        part = slice(head * head_dim, (head + 1) * head_dim)
        scores = queries[..., part] @ keys[..., part].transpose(1, 2) / math.sqrt(head_dim)
        scores = torch.exp(scores.masked_fill(is_future, -math.inf))
        heads.append(scores / scores.sum(-1, keepdim=True) @ values[..., part])
    return linear(torch.cat(heads, dim=-1), parameters, f"{name}.out_proj")


def reference_logits(model, token_ids):
    """GPT-2's forward pass in float64, from the formulas of its papers."""
    parameters = {name: value.double() for name, value in model.state_dict().items()}
    x = parameters["tok_emb.weight"][token_ids] + parameters["pos_emb.weight"][: token_ids.shape[1]]
    for layer in range(model.config.n_layers):
        block = f"trf_blocks.{layer}"
        x = x + attention(layer_norm(x, parameters, f"{block}.norm1"), parameters, f"{block}.att", model.config.n_heads)
        expanded = gelu(linear(layer_norm(x, parameters, f"{block}.norm2"), parameters, f"{block}.ff.expand"))
        x = x + linear(expanded, parameters, f"{block}.ff.out_proj")
    return layer_norm(x, parameters, "final_norm") @ parameters["tok_emb.weight"].T


def reference_loss(logits, targets):
    probabilities = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
    return -torch.log(probabilities.gather(-1, targets[..., None])).mean()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("n_tokens", [1, 7, 12])
def test_logits_and_loss_are_those_of_gpt2_spelled_out(dtype, tolerance, qkv_bias, n_tokens):
    model = random_model(replace(SMALL, qkv_bias=qkv_bias), dtype)
    assert ("trf_blocks.0.att.qkv.bias" in model.state_dict()) == qkv_bias
    token_ids, targets = random_ids(3, n_tokens), random_ids(3, n_tokens, seed=2)
    expected = reference_logits(model, token_ids)
    assert expected.std() > 0.5  # so that the tolerance is a small part of what is compared
    logits, no_loss = model(token_ids)
    no_logits, loss = model(token_ids, targets)
    assert no_logits is None and no_loss is None
    assert logits.dtype == loss.dtype == dtype
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(loss.double(), reference_loss(expected, targets), rtol=0, atol=tolerance)


@pytest.mark.parametrize(("shape", "parts"), [((4, 12), [20, 20, 8]), ((3, 7), [20, 1]), ((4, 5), [20]), ((1, 1), [1])])
def test_the_loss_in_parts_has_the_value_and_the_gradients_of_one_piece(shape, parts, monkeypatch):
    token_ids, targets, rows, cross_entropy = random_ids(*shape), random_ids(*shape, seed=2), [], F.cross_entropy
    model, in_one_piece = random_model(), random_model()
    expected = cross_entropy(in_one_piece(token_ids).logits.flatten(0, 1), targets.flatten())
    expected.backward()
    monkeypatch.setattr(F, "cross_entropy", lambda x, *y, **z: rows.append(len(x)) or cross_entropy(x, *y, **z))
    monkeypatch.setattr(gpt, "LOGITS_AT_ONCE", 20 * SMALL.vocab_size)
    loss = model(token_ids, targets).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    for (name, parameter), other in zip(model.named_parameters(), in_one_piece.parameters()):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=0, atol=1e-12, msg=name)
    assert rows == parts
    monkeypatch.setattr(gpt, "LOGITS_AT_ONCE", 1)
    model(token_ids[:1, :1], targets[:1, :1])
    assert rows == [*parts, 1]


@pytest.fixture
def process_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch._dynamo.reset()
    dist.destroy_process_group()


def test_the_compiler_cuts_the_model_in_as_many_pieces_at_each_batch_size(process_group, monkeypatch):
    pieces = []

    def backend(graph, example_inputs):
        pieces[-1] += 1
        return graph.forward

    config = gpt.GPTConfig(50304, context_length=16, emb_dim=8, n_heads=1, n_layers=2)  # the head has 1.6 MB
    monkeypatch.setattr(gpt, "LOGITS_AT_ONCE", config.vocab_size * config.context_length)
    ddp_model = DDP(gpt.GPT(config), bucket_cap_mb=1, gradient_as_bucket_view=True)
    for batch_size in (1, 2, 4, 8):
        torch._dynamo.reset()
        pieces.append(0)
        token_ids = torch.zeros(batch_size, config.context_length, dtype=torch.int64)
        torch.compile(ddp_model, backend=backend)(token_ids, token_ids).loss.backward()
    assert min(pieces) > 1 and len(set(pieces)) == 1, pieces


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_the_loss_is_summed_in_float32_where_the_logits_have_16_bits(weights):
    model, token_ids, targets = random_model(dtype=weights), random_ids(4, 12), random_ids(4, 12, seed=2)
    with torch.autocast("cpu", torch.bfloat16, enabled=weights is torch.float32):
        logits, loss = model(token_ids).logits, model(token_ids, targets).loss
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), reference_loss(logits.double(), targets), rtol=0, atol=1e-5)


def test_more_tokens_than_the_context_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"13 .*12"):
        random_model()(random_ids(1, 13))


def preset_config(name):
    return gpt.config_for(SimpleNamespace(**gpt.PRESETS[name]._asdict()), 50257)


def test_the_gpt2_presets_have_the_published_numbers_of_parameters():
    published = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}
    for name, expected in published.items():
        with torch.device("meta"):  # no memory for the weights
            parameters = gpt.GPT(preset_config(name)).parameters()
        padding = 47 * gpt.PRESETS[name].emb_dim
        assert sum(parameter.numel() for parameter in parameters) == expected + padding, name


def test_the_default_model_is_gpt2_124m_and_each_preset_divides_among_the_usual_numbers_of_processes():
    assert gpt.GPTConfig() == preset_config("gpt2") and gpt.PRESETS["gpt2"].lr == 6e-4
    for name, preset in gpt.PRESETS.items():
        assert not [n for n in (1, 2, 3, 4, 6, 8) if preset.global_batch_size % n], name


def test_the_weights_start_as_those_of_gpt2():
    config = gpt.GPTConfig(vocab_size=500, context_length=100, emb_dim=128, n_heads=4, n_layers=8)
    torch.manual_seed(0)
    for name, parameter in gpt.GPT(config).named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            std = 0.02 / math.sqrt(2 * 8) if name.endswith("out_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.05 * std, name
    assert not list(gpt.GPT(config).buffers())  # which ranks would have to share


@pytest.mark.parametrize("place", ["drop_emb", "att.dropout", "ff.dropout", "attention weights"])
def test_dropout_acts_in_training_alone_at_each_of_its_four_places(place):
    model, token_ids = random_model(replace(SMALL, drop_rate=0.3)), random_ids(2, 12)
    torch.testing.assert_close(model(token_ids).logits, reference_logits(model, token_ids), rtol=0, atol=1e-12)
    for name, module in model.train().named_modules():
        if isinstance(module, nn.Dropout) and not name.endswith(place):
            module.p = 0.0
        if isinstance(module, gpt.MultiHeadAttention) and place != "attention weights":
            module.drop_rate = 0.0
    assert not torch.equal(model(token_ids).logits, model(token_ids).logits)
    assert torch.equal(*(random_model().train()(token_ids).logits for _ in range(2)))


@pytest.mark.parametrize("value", [0, -1, 1.5, math.nan])
@pytest.mark.parametrize("name", ["vocab_size", "context_length", "emb_dim", "n_heads", "n_layers"])
def test_a_size_that_cannot_be_is_refused_with_its_value(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a whole number above 0, it is {value}"):
        gpt.GPTConfig(**{name: value})


@pytest.mark.parametrize("wrong", ["drop_rate=1.0", "drop_rate=-0.1", "drop_rate=nan", "emb_dim=100, n_heads=3"])
def test_a_shape_that_cannot_be_built_is_refused_with_its_values(wrong):
    with pytest.raises(ValueError, match=f"n_heads must divide emb_dim, .*{wrong}"):
        eval(f"gpt.GPTConfig({wrong})", {"gpt": gpt, "nan": math.nan})


@pytest.mark.parametrize("module", ["gpt.py", "data.py"])
def test_the_modules_know_nothing_of_other_processes(module):
    source = (ROOT / module).read_text(encoding="utf-8")
    assert "distributed" not in source.lower()
    assert not re.search(r"^\s*(from|import)\b.*(\bdist|multiprocessing|\btrain_)", source, re.MULTILINE)


def test_every_parameter_is_in_exactly_one_weight_decay_group():
    model = gpt.GPT(SMALL)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = gpt.weight_decay_groups(model, 0.25)
    decayed, others = ([names[id(parameter)] for parameter in group["params"]] for group in groups)
    assert [group["weight_decay"] for group in groups] == [0.25, 0.0]
    assert sorted(decayed + others) == sorted(names.values())
    assert set(others) == {name for name in names.values() if name.endswith("bias") or "norm" in name}


def test_the_learning_rate_climbs_a_line_and_falls_half_a_cosine():
    rates = [gpt.learning_rate(step, 100, 2.0, warmup_share=0.1, final_share=0.25) for step in range(1, 102)]
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates[9] == 2.0 and rates[9:100] == sorted(set(rates[9:100]), reverse=True)
    assert rates[39] == pytest.approx(2.0 * (0.25 + 0.75 * (1 + math.cos(math.pi / 3)) / 2))  # a third of the way
    assert rates[54] == pytest.approx(2.0 * (1 + 0.25) / 2)  # half way down
    assert rates[99] == rates[100] == pytest.approx(0.5)


@pytest.mark.parametrize("total", [1, 2, 3, 7, 19, 40, 200])
def test_the_learning_rate_warms_up_for_a_twentieth_and_ends_at_a_tenth_in_short_runs_too(total):
    rates = [gpt.learning_rate(step, total, 1.0) for step in range(1, total + 1)]
    assert max(rates) == 1.0 and all(0 < rate <= 1 for rate in rates)
    assert rates.index(1.0) == max(1, round(total / 20)) - 1
    assert total == 1 or rates[-1] == pytest.approx(0.1)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, torch.int32), (torch.float64, torch.int64)])
def test_the_checksum_sees_each_single_bit(dtype, bits):
    model = random_model(dtype=dtype)
    before = gpt.checksum(model)
    assert isinstance(before, int) and -(2**63) <= before < 2**63
    assert gpt.checksum(random_model(dtype=dtype)) == before
    seen = []
    for index, parameter in enumerate(model.parameters()):
        word = parameter.detach().view(bits).flatten()[index % parameter.numel()]  # shares the parameter's memory
        for bit in range(torch.iinfo(bits).bits):
            mask = torch.tensor(1, dtype=bits) << bit
            word ^= mask
            seen.append(gpt.checksum(model))
            word ^= mask
    assert before not in seen
    assert gpt.checksum(model) == before
    block = model.trf_blocks[0]
    block.norm1.weight, block.norm2.weight = block.norm2.weight, block.norm1.weight
    assert gpt.checksum(model) != before  # of parameters that changed places


def model_that_says(logits):
    """A model with these logits for the next token, whatever came before."""
    model = gpt.GPT(gpt.GPTConfig(len(logits), context_length=4, emb_dim=2, n_heads=1, n_layers=1))
    with torch.no_grad():
        model.final_norm.weight.zero_()
        model.final_norm.bias.copy_(torch.tensor([1.0, 0.0]))
        model.tok_emb.weight[:, 0] = logits
    return model


def drawn_shares(model, n_vocab, n=20_000, **options):
    """How often each id is drawn as the next one."""
    generator = torch.Generator().manual_seed(3)
    ids = gpt.generate(model, torch.zeros(n, 1, dtype=torch.int64), 1, n_vocab, generator=generator, **options)
    return torch.bincount(ids[:, 1], minlength=model.config.vocab_size) / n


@pytest.mark.parametrize(("kept", "top_k"), [([0, 1, 2, 3, 4], None), ([0, 1, 2, 3, 4], 8), ([1, 3], 2), ([1], 1)])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 5.0])
def test_the_temperature_divides_the_logits_of_the_k_likeliest_and_no_padding_is_drawn(temperature, kept, top_k):
    logits, weights = torch.tensor([1.0, 2.0, 0.5, 1.5, 0.0, 9.0, 9.0, 9.0]), torch.zeros(8)
    weights[kept] = (logits[kept] / temperature).exp()
    shares = drawn_shares(model_that_says(logits), 5, temperature=temperature, top_k=top_k)
    torch.testing.assert_close(shares, weights / weights.sum(), rtol=0, atol=0.02)
    assert (shares[weights == 0] == 0).all()


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1e-40}, {"top_k": 1}, {"temperature": 1e-3}])
def test_the_likeliest_id_is_taken_at_temperature_0_and_at_top_k_1(options):
    model, token_ids = random_model(dtype=torch.float32), random_ids(4, 3)
    for n_vocab in (3, SMALL.vocab_size):
        expected = model(token_ids).logits[:, -1, :n_vocab].argmax(dim=-1)
        assert torch.equal(gpt.generate(model, token_ids, 1, n_vocab, **options)[:, -1], expected)


@pytest.mark.parametrize("n_prompt", [1, 11, 12, 20])
def test_generation_goes_on_past_the_context_with_the_latest_tokens(n_prompt):
    model, prompt = random_model(), random_ids(2, n_prompt)
    expected = prompt
    for _ in range(16):
        next_ids = reference_logits(model, expected[:, -SMALL.context_length :])[:, -1].argmax(dim=-1)
        expected = torch.cat([expected, next_ids[:, None]], dim=1)
    generated = gpt.generate(model, prompt, 16, SMALL.vocab_size, temperature=0)
    assert generated.dtype == torch.int64 and torch.equal(generated, expected)
    assert torch.equal(gpt.generate(model, prompt, 0, SMALL.vocab_size), prompt)


def test_generation_repeats_with_its_generator_and_with_nothing_else():
    def generate(*seeds):
        generator = torch.Generator().manual_seed(*seeds) if seeds else None
        torch.manual_seed(0)
        prompt = random_ids(1, 4)
        return [gpt.generate(model, prompt, 60, SMALL.vocab_size, generator=generator).tolist() for _ in range(2)]

    model = random_model()
    assert generate(7) == generate(7)
    drawn = [*generate(7), *generate(8), *generate()]
    assert all(drawn.count(ids) == 1 for ids in drawn)


@pytest.mark.parametrize("training", [True, False])
def test_generation_leaves_the_mode_and_the_global_random_state_alone_and_builds_no_graph(training):
    model, prompt, has_graph = random_model(replace(SMALL, drop_rate=0.5)).train(training), random_ids(1, 4), []
    random_state = torch.get_rng_state()
    model.register_forward_hook(lambda module, inputs, output: has_graph.append(output.logits.requires_grad))
    first, second = (gpt.generate(model, prompt, 8, SMALL.vocab_size, temperature=0) for _ in range(2))
    gpt.generate(model, prompt, 8, SMALL.vocab_size)
    assert torch.equal(first, second)  # no dropout
    assert {module.training for module in model.modules()} == {training}
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.is_grad_enabled() and has_graph == [False] * 24


def test_generation_refuses_what_it_cannot_do():
    for bad in ("n_vocab 0", "n_vocab 51", "top_k 0", "temperature -1.0", "temperature nan", "temperature inf"):
        name, value = bad.split()
        options = {"n_vocab": 50, name: float(value) if name == "temperature" else int(value)}
        with pytest.raises(ValueError, match=f"{bad}.* is out of range"):
            gpt.generate(random_model(), random_ids(1, 2), 1, **options)
    with pytest.raises(ValueError, match=r"prompt is empty, .*at least one token"):
        gpt.generate(random_model(), random_ids(1, 0), 1, 50)


def test_a_sample_begins_with_the_prompt_and_gives_a_terminal_no_commands():
    tokenizer = data.get_tokenizer("bytes")
    config = gpt.GPTConfig(320, context_length=8, emb_dim=8, n_heads=2, n_layers=1)
    model = random_model(config, torch.float32)
    text = gpt.sample(model, tokenizer, seed=5, prompt="\x1b[2J Once\n", n_tokens=300)
    assert text.startswith("\ufffd[2J Once\n") and len(text) > 100
    assert all(char.isprintable() or char in "\n\t" for char in text)
    assert gpt.sample(model, tokenizer, 5, "\x1b[2J Once\n", 300) == text != gpt.sample(model, tokenizer, 6, "a", 300)
    assert gpt.sample(model, tokenizer, 5, "Once", 300, top_k=1) == gpt.sample(model, tokenizer, 6, "Once", 300, 0)


# ----------------------------------------------------------------------------------------------------------------------
# Flags


@pytest.fixture
def machine(monkeypatch):
    """Say which accelerator this machine has (None: a CPU alone; else four), and whether it computes bfloat16."""

    def has(kind, bfloat16=True):
        device = torch.device(kind) if kind else None
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: bool(kind))
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args, **kwargs: device)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation or bfloat16
        )

    has(None)
    return has


def parse(*flags):
    return gpt.make_parser("").parse_args([str(flag) for flag in flags])


def resolve(*flags, nproc=None, for_ddp=False):
    args = parse(*flags)
    args.nproc = nproc
    return gpt.resolve_flags(args, for_ddp)


def refusal(capsys, function, *arguments):
    """The line with which a parser refuses."""
    with pytest.raises(SystemExit) as end:
        function(*arguments)
    stdout, stderr = capsys.readouterr()
    assert end.value.code == 2 and stdout == "" and re.fullmatch(r"error: [^\n]+\n", stderr), (end.value.code, stderr)
    return stderr


def test_the_help_of_each_flag_names_its_default_and_each_value_its_unit():
    parser = gpt.make_parser("What it does.")
    assert "What it does." in parser.format_help()
    flags = {flag.dest: flag for flag in parser._actions if flag.dest != "help"}
    assert " ".join(flags) == (
        "preset data tokenizer context_length drop_rate batch_size global_batch_size epochs max_steps lr seed device "
        "dtype compile log_every eval_every out resume"
    )
    units = {"TOKENS", "SEQUENCES", "STEPS", "EPOCHS", "SHARE", "RATE", "SEED", "FILE", "DIR"}
    for name, flag in flags.items():
        assert "(default: " in flag.help and flag.help.endswith("preset's)") == (name in gpt.Preset._fields), name
        assert not flag.type or (flag.metavar or name.upper()) in units, name


COUNTS = ("context-length", "batch-size", "global-batch-size", "epochs", "max-steps", "log-every", "eval-every")
OUT_OF_RANGE = dict.fromkeys(COUNTS, "0 -1 1.5 nan inf many 99999999999")
OUT_OF_RANGE |= {"lr": "0 -1 nan inf fast", "drop-rate": "-0.1 1 1.5 nan inf", "seed": "-1 1.5 nan 2147483648"}
OUT_OF_RANGE |= {"dtype": "float8", "preset": "gpt3", "tokenizer": "words"}


@pytest.mark.parametrize("flag", OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_with_flag_and_value(flag, capsys):
    for value in OUT_OF_RANGE[flag].split():
        said = refusal(capsys, parse, f"--{flag}", value)
        assert f"--{flag}" in said and value in said
        with pytest.raises(SystemExit, match="2"):
            gpt.make_parser("", quiet=True).parse_args([f"--{flag}", value])
        assert capsys.readouterr() == ("", "")


def test_values_at_the_ends_of_their_ranges_are_taken_and_switches_are_off_by_default():
    assert parse("--drop-rate", "0").drop_rate == 0 and parse("--seed", "0").seed == 0
    assert parse("--batch-size", "1").batch_size == 1 and parse("--lr", "1e-9").lr == 1e-9
    assert parse("--seed", 2**31 - 1).seed == parse("--epochs", 2**31 - 1).epochs == 2**31 - 1
    assert (parse().compile, parse().resume, parse().out, parse().max_steps) == (False, False, None, None)


@pytest.mark.parametrize("flag", ["--data", "--out"])
def test_a_path_may_begin_with_the_home_folder_and_is_not_empty(flag, monkeypatch, capsys):
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setenv("USERPROFILE", "/home/ann")
    assert vars(parse(flag, "~/a~b"))[flag[2:]] == "/home/ann/a~b"
    assert vars(parse(flag, "a/~b"))[flag[2:]] == "a/~b"
    assert flag in (said := refusal(capsys, parse, flag, "")) and "empty" in said


def test_a_preset_fills_in_what_the_command_line_left_out_and_nothing_else(machine):
    given = {"context_length": 32, "drop_rate": 0.0, "batch_size": 3, "global_batch_size": 6, "lr": 0.5, "epochs": 9}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    for name, preset in gpt.PRESETS.items():
        assert vars(resolve("--preset", name)).items() >= preset._asdict().items()
        assert vars(resolve("--preset", name, *flags)).items() >= {**preset._asdict(), **given}.items()


@pytest.mark.parametrize(
    ("accelerator", "bfloat16", "for_ddp", "flags", "expected"),
    [
        (None, True, False, "", ("cpu", "float32", "tiny", 1)),
        (None, True, True, "", ("cpu", "float32", "tiny", 2)),
        ("cuda", True, True, "", ("cuda", "bfloat16", "small", 4)),
        ("cuda", False, False, "", ("cuda", "float16", "small", 1)),
        ("cuda", True, True, "--device cpu --dtype bfloat16", ("cpu", "bfloat16", "tiny", 2)),
        ("cuda", True, False, "--device cuda --dtype float64 --preset gpt2", ("cuda", "float64", "gpt2", 1)),
        ("mps", False, False, "", ("mps", "float32", "small", 1)),
        ("mps", True, True, "", ("cpu", "float32", "tiny", 2)),
        ("xpu", True, True, "--device cpu", ("cpu", "float32", "tiny", 2)),
    ],
)
def test_device_dtype_preset_and_processes_suit_the_machine(machine, accelerator, bfloat16, for_ddp, flags, expected):
    machine(accelerator, bfloat16)
    args = resolve(*flags.split(), for_ddp=for_ddp)
    assert (args.device, args.dtype, args.preset, args.nproc) == expected
    for n in (1, 3, 4) if for_ddp else ():  # as many processes as were asked for
        assert resolve(*flags.split(), nproc=n, for_ddp=True).nproc == n


@pytest.mark.parametrize(
    ("accelerator", "flags", "nproc", "words"),
    [
        (None, "--device cuda", None, "--device cuda: .* there is cpu"),
        ("cuda", "--device cuda:0", None, "--device cuda:0: .* there is cuda"),
        ("mps", "--device mps", 2, "--device mps: .* there is cpu"),
        ("xpu", "", None, "nothing here was written for xpu: add --device cpu"),
        ("cuda", "", 5, "5 processes .* GPU each, this one sees 4: .* --device cpu"),
        ("cuda", "--device cpu --dtype float16", None, "--dtype float16 .* cpu: choose float32"),
        ("mps", "--dtype float64", None, "--dtype float64 .* mps: .* --device"),
        (None, "--compile", None, "--compile needs a C compiler, .* install g[+][+]"),
        (None, "--resume", None, "--resume needs --out DIR"),
    ],
)
def test_flags_that_cannot_be_are_refused_with_the_way_out(machine, accelerator, flags, nproc, words, monkeypatch):
    monkeypatch.setenv("PATH", "")  # without a compiler
    machine(accelerator)
    with pytest.raises(ValueError, match=words) as refused:
        resolve(*flags.split(), nproc=nproc, for_ddp=nproc is not None)
    assert "\n" not in str(refused.value)


def test_the_vocabulary_is_padded_to_a_multiple_of_64(machine):
    args = resolve("--preset", "tiny", "--context-length", "16", "--drop-rate", "0.5")
    for n_vocab, padded in ((257, 320), (50257, 50304), (64, 64)):
        assert gpt.config_for(args, n_vocab) == gpt.GPTConfig(padded, 16, 128, 4, 4, 0.5)


@pytest.mark.parametrize(
    ("n_cores", "nproc", "omp", "torchrun", "threads"),
    [
        (8, 1, None, False, [8]),
        (8, 3, None, True, [2]),
        (2, 5, None, False, [1]),
        (8, 2, "1", False, []),
        (8, 2, "1", True, [4]),  # torchrun's choice, nobody's own
        (8, 2, "3", True, []),
    ],
)
def test_processes_of_a_cpu_share_its_cores_unless_told_otherwise(n_cores, nproc, omp, torchrun, threads, monkeypatch):
    chosen, args = [], SimpleNamespace(device="cpu", nproc=nproc)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(n_cores)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 60)
    for name, value in (("OMP_NUM_THREADS", omp), ("TORCHELASTIC_RUN_ID", "1" if torchrun else None)):
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    assert gpt.pick_device(args, nproc - 1) == torch.device("cpu") and chosen == threads
    monkeypatch.delattr(os, "sched_getaffinity")  # as on a Mac
    gpt.pick_device(args)
    assert chosen == threads + [60 // nproc for _ in threads]


def test_each_process_has_a_gpu_of_its_own_and_leaves_the_threads_alone(monkeypatch):
    chosen, args = [], SimpleNamespace(device="cuda", nproc=4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    assert gpt.pick_device(args, 3) == torch.device("cuda", 3) and gpt.pick_device(args) == torch.device("cuda", 0)
    assert chosen == [3, 0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_dtype_decides_weights_autocast_and_scaler(device, dtype, monkeypatch):
    precisions, is_half = [], dtype.itemsize == 2
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions.append)
    monkeypatch.setattr(torch, "autocast", lambda device, dtype, enabled: (device, dtype, enabled))
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device, enabled: (device, enabled))
    formats = gpt.number_formats(SimpleNamespace(device=device, dtype=str(dtype).removeprefix("torch.")))
    autocast, scaler = (device, dtype if is_half else None, is_half), (device, dtype is torch.float16)
    assert formats == (torch.float32 if is_half else dtype, autocast, scaler)
    assert precisions == (["high"] if device == "cuda" else [])  # TF32


@pytest.fixture
def trained(tmp_path):
    """The folder of a run with a model of bytes."""
    config = gpt.GPTConfig(320, context_length=16, emb_dim=8, n_heads=2, n_layers=1)
    parts = {"optimizer": {}, "scaler": {}, "step": 1, "metrics": [], "run": {"tokenizer": "bytes"}}
    model = random_model(config, torch.float32)
    data.save_checkpoint(tmp_path, {**parts, "model": model.state_dict(), "config": asdict(config)})
    return SimpleNamespace(folder=str(tmp_path), model=model)


def test_the_command_prints_what_the_model_writes(trained, machine, monkeypatch, capsys):
    flags = ["--prompt", "Caf\u00e9 ", "--tokens", "30", "--seed", "7", "--top-k", "3", "--temperature", "2"]
    options = {"prompt": "Caf\u00e9 ", "n_tokens": 30, "seed": 7, "top_k": 3, "temperature": 2.0}
    for given, expected in (([], {"seed": 123}), (flags, options)):
        monkeypatch.setattr(sys, "argv", ["gpt.py", trained.folder, *given])
        gpt.main()
        text = gpt.sample(trained.model, data.get_tokenizer("bytes"), **expected)
        assert capsys.readouterr() == (text + "\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "DIR"),
        ("'' --seed 1", "DIR: the path is empty"),
        ("FOLDER/none", "there is no file FOLDER/none/checkpoint.pt"),
        ("FOLDER/other", "FOLDER/other/checkpoint.pt is no checkpoint of this project"),
        ("FOLDER --prompt ''", "the prompt is empty"),
        *((f"FOLDER {bad}", bad.split()[0]) for bad in ("--tokens 0", "--temperature nan", "--top-k 0", "--seed -1")),
    ],
)
def test_the_command_refuses_in_one_line(arguments, words, trained, machine, monkeypatch, capsys, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "checkpoint.pt").write_text("step,tokens\n")
    arguments = shlex.split(arguments.replace("FOLDER", trained.folder))
    monkeypatch.setattr(sys, "argv", ["gpt.py", *arguments])
    assert words.replace("FOLDER", trained.folder) in refusal(capsys, gpt.main)
