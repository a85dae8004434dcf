"""gpt.py: the model against GPT-2 spelled out from the formulas, and everything around it that needs no process."""

import argparse
import ast
import io
import math
import os
import pickle
import re
import sys
from contextlib import contextmanager
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from torch import nn
from torch.nn import functional as F

import gpt

SMALL = gpt.GPTConfig(vocab_size=50, context_length=12, emb_dim=24, n_heads=3, n_layers=2)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads that share tensors this small mostly wait for each other."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


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


# ----------------------------------------------------------------------------------------------------------------------
# The model


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
    model = random_model(gpt.GPTConfig(**{**asdict(SMALL), "qkv_bias": qkv_bias}), dtype)
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


def test_a_later_token_moves_no_earlier_logit():
    model = random_model()
    token_ids = random_ids(2, SMALL.context_length)
    logits = model(token_ids).logits
    for j in range(SMALL.context_length):
        changed = token_ids.clone()
        changed[:, j] = (changed[:, j] + 1) % SMALL.vocab_size
        moved = (model(changed).logits != logits).any(dim=-1)  # (batch, n_tokens)
        assert not moved[:, :j].any(), f"token {j} is seen by an earlier one"
        assert moved[:, j:].all(), f"token {j} is not seen by itself or by a later one"


def test_one_sequence_of_a_batch_does_not_see_another():
    model = random_model()
    token_ids = random_ids(3, 8)
    together = model(token_ids).logits
    alone = torch.cat([model(row[None]).logits for row in token_ids])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 7), (4, 12), (1, 5), (1, 1)])
def test_the_loss_in_parts_has_the_value_and_the_gradients_of_one_piece(shape, monkeypatch):
    token_ids, targets = random_ids(*shape), random_ids(*shape, seed=2)
    model, in_one_piece = random_model(), random_model()
    monkeypatch.setattr(gpt, "LOGITS_AT_ONCE", 5 * model.config.vocab_size)
    loss = model(token_ids, targets).loss
    loss.backward()
    expected = F.cross_entropy(in_one_piece(token_ids).logits.flatten(0, 1), targets.flatten())
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    for (name, parameter), other in zip(model.named_parameters(), in_one_piece.parameters()):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=0, atol=1e-12, msg=name)


def test_no_more_than_a_part_of_the_logits_exists_at_once(monkeypatch):
    rows, real = [], F.cross_entropy

    def spy(logits, *args, **kwargs):
        rows.append(len(logits))
        return real(logits, *args, **kwargs)

    monkeypatch.setattr(F, "cross_entropy", spy)
    model = random_model()
    monkeypatch.setattr(gpt, "LOGITS_AT_ONCE", 20 * model.config.vocab_size)
    model(random_ids(4, 12), random_ids(4, 12))
    assert rows == [20, 20, 8]
    monkeypatch.setattr(gpt, "LOGITS_AT_ONCE", 1)
    model(random_ids(1, 2), random_ids(1, 2))
    assert rows == [20, 20, 8, 1, 1]


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


def on_meta(config):
    """The model without memory for its weights."""
    with torch.device("meta"):
        return gpt.GPT(config)


def count_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_the_gpt2_presets_have_the_published_numbers_of_parameters(preset, published):
    config = gpt.config_for(SimpleNamespace(**gpt.PRESETS[preset]._asdict()), 50257)
    assert config.vocab_size == 50304
    assert count_parameters(on_meta(gpt.GPTConfig(**{**asdict(config), "vocab_size": 50257}))) == published
    assert count_parameters(on_meta(config)) == published + 47 * config.emb_dim


def test_the_default_model_is_gpt2_124m():
    with torch.device("meta"):
        model = gpt.GPT()
    assert model.config == gpt.config_for(SimpleNamespace(**gpt.PRESETS["gpt2"]._asdict()), 50257)
    assert gpt.PRESETS["gpt2"].lr == 6e-4 and gpt.PRESETS["gpt2"].epochs == 5


@pytest.mark.parametrize("preset", gpt.PRESETS)
def test_every_preset_divides_among_the_usual_numbers_of_processes(preset):
    row = gpt.PRESETS[preset]
    on_meta(gpt.config_for(SimpleNamespace(**row._asdict()), 257))
    assert not [n for n in (1, 2, 3, 4, 6, 8) if row.global_batch_size % n]


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


def test_the_model_has_no_buffer_that_ranks_would_have_to_share():
    assert not list(gpt.GPT(SMALL).buffers())


def with_dropout(rate):
    return random_model(gpt.GPTConfig(**{**asdict(SMALL), "drop_rate": rate}))


def test_dropout_acts_in_training_alone():
    model, token_ids = with_dropout(0.3), random_ids(2, 12)
    torch.testing.assert_close(model(token_ids).logits, reference_logits(model, token_ids), rtol=0, atol=1e-12)
    model.train()
    assert not torch.equal(model(token_ids).logits, model(token_ids).logits)
    assert torch.equal(*(random_model().train()(token_ids).logits for _ in range(2)))


@pytest.mark.parametrize("place", ["drop_emb", "att.dropout", "ff.dropout", "attention weights"])
def test_dropout_acts_at_each_of_its_four_places(place):
    model, token_ids = with_dropout(0.3).train(), random_ids(2, 12)
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and not name.endswith(place):
            module.p = 0.0
        if isinstance(module, gpt.MultiHeadAttention) and place != "attention weights":
            module.drop_rate = 0.0
    assert not torch.equal(model(token_ids).logits, model(token_ids).logits)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"vocab_size": 0}, ["vocab_size", "0"]),
        ({"context_length": -1}, ["context_length", "-1"]),
        ({"emb_dim": 0}, ["emb_dim", "0"]),
        ({"n_heads": 0}, ["n_heads", "0"]),
        ({"n_layers": 0}, ["n_layers", "0"]),
        ({"n_layers": 1.5}, ["n_layers", "1.5"]),
        ({"n_layers": math.nan}, ["n_layers", "nan"]),
        ({"emb_dim": 100, "n_heads": 3}, ["emb_dim 100", "n_heads 3"]),
        ({"drop_rate": 1.0}, ["drop_rate", "1.0"]),
        ({"drop_rate": -0.1}, ["drop_rate", "-0.1"]),
        ({"drop_rate": math.nan}, ["drop_rate", "nan"]),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused_with_its_value(wrong, words):
    with pytest.raises(ValueError) as refusal:
        gpt.GPTConfig(**wrong)
    assert all(word in str(refusal.value) for word in words), refusal.value


@pytest.mark.parametrize("module", ["gpt.py", "data.py"])
def test_the_modules_know_nothing_of_torch_distributed(module):
    source = (ROOT / module).read_text(encoding="utf-8")
    assert "distributed" not in source.lower()
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert "torch" in imported
    assert not [name for name in imported if re.search(r"\bdist|multiprocessing|^train_", name)]


# ----------------------------------------------------------------------------------------------------------------------
# What an optimizer and a run ask of a model


def test_every_parameter_is_in_exactly_one_weight_decay_group():
    model = gpt.GPT(SMALL)
    decayed, others = gpt.weight_decay_groups(model, 0.25)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.25, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    grouped = [[names[id(parameter)] for parameter in group["params"]] for group in (decayed, others)]
    assert sorted(grouped[0] + grouped[1]) == sorted(names.values())
    assert set(grouped[1]) == {name for name in names.values() if name.endswith("bias") or "norm" in name}


def test_the_learning_rate_climbs_a_line_and_falls_half_a_cosine():
    rates = [gpt.learning_rate(step, 100, 2.0, warmup_share=0.1, final_share=0.25) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates[9:] == sorted(set(rates[9:]), reverse=True)
    assert rates[9] == 2.0 == max(rates)
    assert rates[54] == pytest.approx(2.0 * (1 + 0.25) / 2)  # half way down
    third = 0.25 + 0.75 * (1 + math.cos(math.pi / 3)) / 2
    assert rates[39] == pytest.approx(2.0 * third)
    assert rates[99] == pytest.approx(0.5)


def test_the_learning_rate_warms_up_for_a_twentieth_and_ends_at_a_tenth_by_default():
    rates = [gpt.learning_rate(step, 200, 1.0) for step in range(1, 201)]
    assert rates.index(max(rates)) == 9 and max(rates) == 1.0
    assert rates[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("total", [1, 2, 3, 7, 19, 40])
def test_a_short_run_has_a_learning_rate_at_every_step(total):
    rates = [gpt.learning_rate(step, total, 1.0) for step in range(1, total + 1)]
    assert max(rates) == 1.0 and all(0 < rate <= 1 for rate in rates)
    assert total == 1 or rates[-1] == pytest.approx(0.1)


def test_the_learning_rate_depends_on_nothing_but_its_arguments():
    rates = {step: gpt.learning_rate(step, 50, 3e-4) for step in range(1, 51)}
    for step in (50, 3, 17, 3, 1, 49):
        assert gpt.learning_rate(step, 50, 3e-4) == rates[step]
    assert gpt.learning_rate(60, 50, 3e-4) == rates[50]


def test_the_operations_of_a_token_are_those_of_its_matrix_products():
    width, layers, context = 768, 12, 1024
    matrices = layers * (12 * width**2 + 13 * width) + 2 * width + 50257 * width
    expected = 6 * matrices + 12 * layers * context * width
    assert gpt.flops_per_token(on_meta(gpt.GPTConfig(vocab_size=50257))) == expected == 855_166_464


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


def test_the_checksum_sees_two_parameters_that_changed_places():
    model = random_model()
    before = gpt.checksum(model)
    block = model.trf_blocks[0]
    block.norm1.weight, block.norm2.weight = block.norm2.weight, block.norm1.weight
    assert gpt.checksum(model) != before


# ----------------------------------------------------------------------------------------------------------------------
# Generation


def model_that_says(logits, context_length=4, drop_rate=0.0):
    """A model with these logits for the next token, whatever came before."""
    config = gpt.GPTConfig(len(logits), context_length, emb_dim=2, n_heads=1, n_layers=1, drop_rate=drop_rate)
    model = gpt.GPT(config)
    with torch.no_grad():
        model.final_norm.weight.zero_()
        model.final_norm.bias.copy_(torch.tensor([1.0, 0.0]))
        model.tok_emb.weight[:, 0] = torch.tensor(logits)
    return model


def drawn_shares(model, n_vocab, n=20_000, **options):
    """How often each id is drawn as the next one."""
    prompt = torch.zeros(n, 1, dtype=torch.int64)
    ids = gpt.generate(model, prompt, 1, n_vocab, generator=torch.Generator().manual_seed(3), **options)[:, 1]
    return torch.bincount(ids, minlength=model.config.vocab_size) / n


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"temperature": 5.0}, {"top_k": 3}, {"top_k": 8}])
def test_an_id_of_the_padding_is_never_drawn(options):
    shares = drawn_shares(model_that_says([1.0, 2.0, 0.5, 1.5, 0.0, 9.0, 9.0, 9.0]), n_vocab=5, **options)
    assert (shares[5:] == 0).all() and shares[:5].sum() == pytest.approx(1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_temperature_divides_the_logits(temperature):
    logits = [1.0, 2.0, 0.5, 1.5, 0.0]
    weights = torch.tensor([math.exp(logit / temperature) for logit in logits])
    shares = drawn_shares(model_that_says(logits), n_vocab=5, temperature=temperature)
    torch.testing.assert_close(shares, weights / weights.sum(), rtol=0, atol=0.02)


def test_top_k_keeps_the_k_likeliest_in_their_proportions():
    shares = drawn_shares(model_that_says([1.0, 2.0, 0.5, 1.5, 0.0]), n_vocab=5, top_k=2)
    assert (shares[[0, 2, 4]] == 0).all()
    assert shares[1] / shares[3] == pytest.approx(math.exp(2.0 - 1.5), rel=0.05)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1e-40}, {"top_k": 1}, {"temperature": 1e-3}])
def test_the_likeliest_id_is_taken_at_temperature_0_and_at_top_k_1(options):
    model = random_model(dtype=torch.float32)
    token_ids = random_ids(4, 3)
    expected = model(token_ids).logits[:, -1].argmax(dim=-1)
    assert torch.equal(gpt.generate(model, token_ids, 1, SMALL.vocab_size, **options)[:, -1], expected)


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
    model, prompt = random_model(), random_ids(1, 4)

    def generate(generator=None):
        return gpt.generate(model, prompt, 60, SMALL.vocab_size, generator=generator).tolist()

    assert generate(torch.Generator().manual_seed(7)) == generate(torch.Generator().manual_seed(7))
    assert generate(torch.Generator().manual_seed(7)) != generate(torch.Generator().manual_seed(8))
    one_generator = torch.Generator().manual_seed(7)
    assert generate(one_generator) != generate(one_generator)
    torch.manual_seed(0)
    without = generate()
    torch.manual_seed(0)
    assert generate() != without


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_generation_leaves_modes_and_the_global_random_state_alone(training, fails):
    model = with_dropout(0.5).train(training)
    model.trf_blocks[1].train(not training)  # a part in the other mode stays in it
    modes = [module.training for module in model.modules()]
    prompt = random_ids(1, 4)
    random_state = torch.get_rng_state()
    if fails:
        with pytest.raises(IndexError):
            gpt.generate(model, prompt + SMALL.vocab_size, 8, SMALL.vocab_size)
    else:
        ids = gpt.generate(model, prompt, 8, SMALL.vocab_size, temperature=0)
        assert torch.equal(ids, gpt.generate(model.eval(), prompt, 8, SMALL.vocab_size, temperature=0))  # no dropout
        for module, mode in zip(model.modules(), modes):
            module.training = mode
        gpt.generate(model, prompt, 8, SMALL.vocab_size)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random_state)


def test_generation_builds_no_graph():
    assert torch.is_grad_enabled()
    logits = []
    model = random_model()
    model.register_forward_hook(lambda module, inputs, output: logits.append(output.logits))
    gpt.generate(model, random_ids(1, 2), 1, SMALL.vocab_size)
    assert not logits[0].requires_grad


@pytest.mark.parametrize(
    ("n_prompt", "n_vocab", "options", "words"),
    [
        (0, 50, {}, ["at least one id"]),
        (2, 0, {}, ["n_vocab", "0"]),
        (2, 51, {}, ["n_vocab", "51", "50"]),
        (2, 50, {"temperature": -1}, ["temperature", "-1"]),
        (2, 50, {"temperature": math.nan}, ["temperature", "nan"]),
        (2, 50, {"temperature": math.inf}, ["temperature", "inf"]),
        (2, 50, {"top_k": 0}, ["top_k", "0"]),
    ],
)
def test_generation_refuses_what_it_cannot_do(n_prompt, n_vocab, options, words):
    with pytest.raises(ValueError) as refusal:
        gpt.generate(random_model(), random_ids(1, n_prompt), 1, n_vocab, **options)
    assert all(word in str(refusal.value) for word in words), refusal.value


# ----------------------------------------------------------------------------------------------------------------------
# Flags


@pytest.fixture
def machine(monkeypatch):
    """Say which accelerator this machine has (None: a CPU alone), and whether it computes bfloat16."""

    def has(accelerator, bfloat16=True):
        device = torch.device(accelerator) if accelerator else None
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator is not None)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args: device)
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation=True: bfloat16 or including_emulation
        )

    has(None)
    return has


def make_parser():
    def error(message):
        raise ValueError(message)

    parser = argparse.ArgumentParser()
    gpt.add_flags(parser)
    parser.error = error
    return parser


def parse(*flags):
    return make_parser().parse_args(list(flags))


def resolve(*flags, **options):
    return gpt.resolve_flags(parse(*flags), **options)


def test_the_help_of_each_flag_names_its_default_and_each_number_its_unit():
    units = {"TOKENS", "SEQUENCES", "STEPS", "EPOCHS", "SHARE", "RATE", "NUMBER"}
    parser = make_parser()
    parser.format_help()
    flags = [action for action in parser._actions if action.dest != "help"]
    expected = (
        "preset data tokenizer context_length drop_rate batch_size global_batch_size epochs max_steps lr seed device "
        "dtype compile log_every eval_every out resume"
    )
    assert {flag.dest for flag in flags} == set(expected.split())
    for flag in flags:
        assert "(default: " in flag.help and "(default: )" not in flag.help, flag.dest
        if flag.type:
            assert (flag.metavar or flag.dest.upper()) in units, flag.dest


@pytest.mark.parametrize("field", ["tokenizer", "context_length", "drop_rate", "batch_size", "lr", "epochs"])
def test_the_help_gives_the_default_of_each_preset(field):
    text = next(action.help for action in make_parser()._actions if action.dest == field)
    for name, preset in gpt.PRESETS.items():
        value = getattr(preset, field)
        is_usual = value == getattr(gpt.PRESETS["gpt2"], field)
        assert (f"(default: {value}" if is_usual else f"{value} in {name}") in text


COUNTS = ("context-length", "batch-size", "global-batch-size", "epochs", "max-steps", "log-every", "eval-every")


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        *((flag, ["0", "-1", "1.5", "nan", "inf", "many", "99999999999"]) for flag in COUNTS),
        ("lr", ["0", "-1", "nan", "inf", "fast"]),
        ("drop-rate", ["-0.1", "1", "1.5", "nan", "inf"]),
        ("seed", ["-1", "1.5", "nan", "2147483648"]),
    ],
)
def test_a_number_out_of_range_is_refused_with_flag_and_value(flag, values):
    for value in values:
        with pytest.raises(ValueError) as refusal:
            parse(f"--{flag}", value)
        assert f"--{flag}" in str(refusal.value) and value in str(refusal.value)


def test_numbers_at_the_ends_of_their_ranges_are_taken():
    assert parse("--drop-rate", "0").drop_rate == 0 and parse("--seed", "0").seed == 0
    assert parse("--batch-size", "1").batch_size == 1 and parse("--lr", "1e-9").lr == 1e-9


@pytest.mark.parametrize("preset", gpt.PRESETS)
def test_a_preset_fills_in_what_the_command_line_left_out(machine, preset):
    args = vars(resolve("--preset", preset))
    assert {name: args[name] for name in gpt.Preset._fields} == gpt.PRESETS[preset]._asdict()


def test_what_the_command_line_gives_wins_over_the_preset(machine):
    flags = {"context_length": 32, "drop_rate": 0.0, "batch_size": 3, "global_batch_size": 6, "lr": 0.5, "epochs": 9}
    args = resolve("--preset", "small", *(f"--{name.replace('_', '-')}={value}" for name, value in flags.items()))
    assert {name: vars(args)[name] for name in flags} == flags
    assert (args.emb_dim, args.tokenizer) == (gpt.PRESETS["small"].emb_dim, "bytes")


def test_compiling_resuming_and_writing_are_off_by_default():
    args = parse()
    assert not args.compile and not args.resume and args.out is None and args.max_steps is None


@pytest.mark.parametrize(
    ("accelerator", "bfloat16", "for_ddp", "expected"),
    [
        (None, True, False, ("cpu", "float32", "tiny")),
        ("cuda", True, True, ("cuda", "bfloat16", "small")),
        ("cuda", False, False, ("cuda", "float16", "small")),
        ("mps", True, False, ("mps", "float32", "small")),
        ("mps", True, True, ("cpu", "float32", "tiny")),
    ],
)
def test_device_dtype_and_preset_suit_the_machine(machine, accelerator, bfloat16, for_ddp, expected):
    machine(accelerator, bfloat16)
    args = resolve(for_ddp=for_ddp)
    assert (args.device, args.dtype, args.preset) == expected


def test_a_cpu_can_be_chosen_beside_a_gpu(machine):
    machine("cuda")
    args = resolve("--device", "cpu", "--dtype", "bfloat16")
    assert (args.device, args.dtype, args.preset) == ("cpu", "bfloat16", "tiny")


@pytest.mark.parametrize(
    ("accelerator", "flags", "words"),
    [
        (None, "--device cuda", ["--device cuda", "there is cpu"]),
        (None, "--device tpu", ["--device tpu", "there is cpu"]),
        ("cuda", "--device mps", ["--device mps", "cpu and cuda"]),
        (None, "--dtype float16", ["--dtype float16", "bfloat16"]),
        ("cuda", "--device cpu --dtype float16", ["--dtype float16", "float32"]),
        ("mps", "--dtype float64", ["--dtype float64", "--device cpu"]),
        (None, "--resume", ["--resume", "--out"]),
    ],
)
def test_flags_that_cannot_be_are_refused_with_the_way_out(machine, accelerator, flags, words):
    machine(accelerator)
    with pytest.raises(ValueError) as refusal:
        resolve(*flags.split())
    assert all(word in str(refusal.value) for word in words) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(("n_vocab", "padded"), [(257, 320), (50257, 50304), (64, 64)])
def test_the_vocabulary_is_padded_to_a_multiple_of_64(machine, n_vocab, padded):
    config = gpt.config_for(resolve("--preset", "tiny", "--context-length", "16", "--drop-rate", "0.5"), n_vocab)
    assert config == gpt.GPTConfig(padded, 16, 128, 4, 4, 0.5)


# ----------------------------------------------------------------------------------------------------------------------
# What a run shows


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA A10G", 70),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("Tesla T4", 65),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-16GB", 112),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 4090", 165),
    ],
)
def test_the_peak_of_a_gpu_is_known_by_its_name(name, teraflops):
    assert gpt.peak_flops(name) == teraflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 5090",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA L40",
        "NVIDIA A40",
        "NVIDIA H20",
        "NVIDIA H800",
        "NVIDIA GB200",
        "Tesla V100S-PCIE-32GB",
        "NVIDIA RTX 4000 Ada Generation",
        "AMD Instinct MI300X",
        "NVIDIA",
        "",
    ],
)
def test_a_gpu_that_is_not_known_has_no_peak(name):
    assert gpt.peak_flops(name) is None


def a_run(**changes):
    corpus = SimpleNamespace(hash="0123456789ab", train_set=range(12_345), val_set=range(678))
    values = {
        "corpus": corpus,
        "config": SMALL,
        "n_processes": 2,
        "forward_batch": 8,
        "accumulation": 3,
        "steps_per_epoch": 257,
        "total_steps": 1285,
    }
    return SimpleNamespace(**{**values, **changes})


def test_the_facts_of_a_run_name_what_decides_it(machine):
    args = resolve("--data", "book.txt", "--global-batch-size", "48", "--compile")
    facts = gpt.describe(args, a_run(), gpt.GPT(SMALL), step=0)
    for fact in (
        "preset tiny",
        f"{count_parameters(gpt.GPT(SMALL)):,} parameters",
        "device cpu, 2 processes, float32, compiled",
        "book.txt, hash 0123456789ab",
        "12,345 windows to train on, 678 to validate",
        "48 sequences per step = 8 per forward x 3 accumulated x 2 processes",
        "257 steps per epoch, 1,285 in all",
    ):
        assert fact in facts
    assert "resumed" not in facts and "--preset gpt2" not in facts
    args = resolve()
    facts = gpt.describe(args, a_run(n_processes=1), gpt.GPT(SMALL), step=40)
    assert "1 process," in facts and "compiled" not in facts
    assert "built into Python" in facts and "--preset gpt2 --data FILE" in facts and "resumed after step 40" in facts


def describe_step(args, losses, run=None, **changes):
    row = {"step": 257, "tokens": 257 * 576, "learning_rate": 3e-4, "train_loss": 2.5, "tokens_per_second": 5760.0}
    return gpt.describe_step(args, run or a_run(), gpt.GPT(SMALL), {**row, **changes}, losses, 0.125)


def test_a_step_shows_epoch_loss_norm_rate_speed_and_time_left(machine):
    args = resolve()
    line = describe_step(args, [2.5])
    for part in ("epoch 1 ", "step 257/1285", "loss 2.500000", "norm 0.125", "lr 3.00e-04", "5,760 tokens/s"):
        assert part in line
    assert "0:01:43 left" in line  # (1285 - 257) * 576 / 5760 = 102.8 s
    assert "rank" not in line and "MFU" not in line
    assert "epoch 2 " in describe_step(args, [2.5], step=258)
    line = describe_step(args, [2.5], tokens_per_second=None)  # the first step has no speed
    assert "tokens/s" not in line and "left" not in line


def test_a_step_shows_the_loss_of_each_rank_or_of_the_two_outermost(machine):
    args = resolve()
    assert "[rank 0 2.000000, rank 1 3.000000]" in describe_step(args, [2.0, 3.0])
    line = describe_step(args, [2.0, 2.1, 2.2, 1.5, 2.4, 2.5, 2.6, 3.5, 2.8])
    assert "[lowest rank 3 1.500000, highest rank 7 3.500000]" in line


@pytest.mark.parametrize(
    ("name", "dtype", "shown"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", True),
        ("NVIDIA A100-SXM4-80GB", "float32", False),
        ("GTX 1", "float16", False),
    ],
)
def test_the_share_of_the_peak_is_shown_where_the_peak_is_known(machine, monkeypatch, name, dtype, shown):
    machine("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *args: name)
    args = resolve("--dtype", dtype)
    flops = gpt.flops_per_token(gpt.GPT(SMALL))
    line = describe_step(args, [2.0, 3.0], tokens_per_second=0.4 * 2 * 312e12 / flops)  # two GPUs at 40 %
    assert ("MFU 40.0%" in line) == ("MFU" in line) == shown


# ----------------------------------------------------------------------------------------------------------------------
# What a run leaves

IDENTITY = {"tokenizer": "bytes", "corpus": "0123456789ab", "seed": 123, "global_batch_size": 24}


def a_checkpoint(step=3):
    """What a script saves after `step` steps."""
    torch.manual_seed(step)
    model = gpt.GPT(SMALL)
    optimizer = torch.optim.AdamW(gpt.weight_decay_groups(model, 0.1), lr=1e-3)
    model(random_ids(2, 8), random_ids(2, 8)).loss.backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": torch.amp.GradScaler("cpu", enabled=False).state_dict(),
        "step": step,
        "metrics": [[1, 192, 1e-3, 3.9, None, None], [step, 576, 0.1 + 0.2, 3.7, 3.8, 1234.5]],
        "config": vars(SMALL),
        "run": IDENTITY,
    }


def assert_same(left, right):
    """Two checkpoints are equal in structure, types and bits."""
    assert type(left) is type(right)
    if isinstance(left, dict):
        assert list(left) == list(right)
        left, right = list(left.values()), list(right.values())
    if isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for pair in zip(left, right):
            assert_same(*pair)
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and torch.equal(left, right)
    else:
        assert left == right


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path):
    saved = a_checkpoint()
    gpt.save_checkpoint(tmp_path, saved)
    loaded = gpt.load_checkpoint(tmp_path / "checkpoint.pt")
    assert_same({**loaded, "model": dict(loaded["model"])}, {**saved, "model": dict(saved["model"])})
    model = gpt.GPT(gpt.GPTConfig(**loaded["config"]))
    model.load_state_dict(loaded["model"])
    assert set(loaded["model"]) == {name for name, _ in model.named_parameters()}  # no prefix, no buffer, one head
    torch.optim.AdamW(gpt.weight_decay_groups(model, 0.1)).load_state_dict(loaded["optimizer"])
    assert set(contents(tmp_path)) == {"checkpoint.pt", "metrics.csv"}


def test_the_table_of_metrics_has_full_precision_and_empty_fields(tmp_path):
    gpt.save_checkpoint(tmp_path, a_checkpoint())
    assert (tmp_path / "metrics.csv").read_bytes() == (
        b"step,tokens,learning_rate,train_loss,val_loss,tokens_per_second\n"
        b"1,192,0.001,3.9,,\n"
        b"3,576,0.30000000000000004,3.7,3.8,1234.5\n"
    )


def test_a_later_save_replaces_both_files_and_what_a_kill_left(tmp_path):
    gpt.save_checkpoint(tmp_path, a_checkpoint(3))
    (tmp_path / "checkpoint.pt.tmp").write_bytes(b"half a checkp" * 100_000)
    (tmp_path / "metrics.csv.tmp").write_bytes(b"step,tok")
    gpt.save_checkpoint(tmp_path, a_checkpoint(4))
    assert gpt.load_checkpoint(tmp_path / "checkpoint.pt")["step"] == 4
    assert (tmp_path / "metrics.csv").read_text().splitlines()[-1].startswith("4,")
    assert set(contents(tmp_path)) == {"checkpoint.pt", "metrics.csv"}


def test_files_are_complete_and_on_disk_before_they_take_their_names(tmp_path, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace

    def record_fsync(fd):
        events.append("fsync")
        return fsync(fd)

    def record_replace(source, target):
        if target.name == "checkpoint.pt":
            assert gpt.load_checkpoint(source)["step"] == 3
        events.append(target.name)
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    gpt.save_checkpoint(tmp_path, a_checkpoint())
    # The checkpoint comes last: a kill in between leaves a table that the next save writes again.
    assert events == ["fsync", "fsync", "metrics.csv", "checkpoint.pt"]


@contextmanager
def full_disk(n_bytes):
    """Let no file of this process grow beyond `n_bytes`; lifted before pytest writes its own output again."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_full_disk_leaves_the_earlier_files_and_says_why(tmp_path, share):
    gpt.save_checkpoint(tmp_path, a_checkpoint(3))
    before = contents(tmp_path)
    next_checkpoint = a_checkpoint(4)
    with full_disk(int(share * len(before["checkpoint.pt"]))), pytest.raises(OSError) as failure:
        gpt.save_checkpoint(tmp_path, next_checkpoint)
    message = str(failure.value)
    assert str(tmp_path) in message and "File too large" in message and "\n" not in message
    assert contents(tmp_path) == before
    assert gpt.load_checkpoint(tmp_path / "checkpoint.pt")["step"] == 3


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("name", ["checkpoint.pt", "metrics.csv"])
def test_neither_file_is_replaced_where_one_of_them_cannot_be_written(tmp_path, name):
    gpt.save_checkpoint(tmp_path, a_checkpoint(3))
    before = contents(tmp_path)
    (tmp_path / f"{name}.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match=rf"{name}.*No space left"):
        gpt.save_checkpoint(tmp_path, a_checkpoint(4))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("error", [OSError("no"), KeyboardInterrupt()])
def test_a_save_that_is_broken_off_leaves_no_temporary_file(tmp_path, monkeypatch, error):
    gpt.save_checkpoint(tmp_path, a_checkpoint(3))
    before = contents(tmp_path)

    def replace(source, target):
        raise error

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(type(error)):
        gpt.save_checkpoint(tmp_path, a_checkpoint(4))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("folder", ["gone", "file", "file/below"])
def test_a_folder_that_is_none_is_named_in_the_error(tmp_path, folder):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=re.escape(str(tmp_path / folder))):
        gpt.save_checkpoint(tmp_path / folder, a_checkpoint())


def test_a_checkpoint_of_a_gpu_loads_without_one(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
        gpt.save_checkpoint(tmp_path, a_checkpoint())
    with pytest.raises((RuntimeError, AssertionError)):  # so that the test is one
        torch.load(tmp_path / "checkpoint.pt", map_location=None, weights_only=True)
    model = gpt.load_checkpoint(tmp_path / "checkpoint.pt")["model"]
    assert {tensor.device.type for tensor in model.values()} == {"cpu"}


class RunsCode:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def as_checkpoint(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def broken_files(folder):
    """Contents that are no checkpoint, by name."""
    whole = as_checkpoint(a_checkpoint())
    evil = RunsCode(folder / "code_ran")
    cut = {f"cut at {n}": whole[:n] for n in (1, 4, 100, len(whole) // 2, len(whole) - 100, len(whole) - 1)}
    return {
        "empty": b"",
        "text": b"step,tokens\n1,2\n",
        **cut,
        "pickle": pickle.dumps({"model": {}}),
        "pickle that runs code": pickle.dumps(evil),
        "checkpoint that runs code": as_checkpoint({**a_checkpoint(), "run": evil}),
        "a tensor": as_checkpoint(torch.ones(3)),
        "weights alone": as_checkpoint(a_checkpoint()["model"]),
        "a foreign checkpoint": as_checkpoint({"model": {}, "optimizer": {}, "epoch": 3}),
    }


def test_what_is_no_checkpoint_is_refused_by_name_and_runs_no_code(tmp_path):
    for number, (kind, content) in enumerate(broken_files(tmp_path).items()):
        path = tmp_path / f"{number}.pt"
        path.write_bytes(content)
        with pytest.raises(ValueError) as refusal:
            gpt.load_checkpoint(path)
        message = str(refusal.value)
        assert str(path) in message and "no checkpoint" in message and "\n" not in message, (kind, message)
        assert "weights_only" not in message, kind  # torch's own text advises to load the file unsafely
        assert not (tmp_path / "code_ran").exists(), kind
    pickle.loads(pickle.dumps(RunsCode(tmp_path / "code_ran")))
    assert (tmp_path / "code_ran").exists()  # it would have run


def test_a_checkpoint_that_lacks_something_is_refused_with_what_it_lacks(tmp_path):
    path = tmp_path / "part.pt"
    for key in gpt.CHECKPOINT_KEYS:
        torch.save({name: value for name, value in a_checkpoint().items() if name != key}, path)
        with pytest.raises(ValueError, match=rf"lacks {key}\b"):
            gpt.load_checkpoint(path)


def test_a_checkpoint_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "none.pt"))):
        gpt.load_checkpoint(tmp_path / "none.pt")


def open_folder(folder, resume=True, config=SMALL, **changes):
    return gpt.open_run_folder(str(folder), resume, config, {**IDENTITY, **changes})


@pytest.mark.parametrize("resume", [False, True])
def test_a_new_run_makes_its_folder_and_starts(tmp_path, resume):
    folder = tmp_path / "runs" / "first"
    assert open_folder(folder, resume) is None
    assert folder.is_dir() and not contents(folder)
    assert open_folder(folder, resume) is None


def test_a_checkpoint_is_gone_on_from_and_never_overwritten(tmp_path):
    gpt.save_checkpoint(tmp_path, a_checkpoint(5))
    before = contents(tmp_path)
    assert open_folder(tmp_path)["step"] == 5
    with pytest.raises(ValueError) as refusal:
        open_folder(tmp_path, resume=False)
    assert str(tmp_path / "checkpoint.pt") in str(refusal.value) and "--resume" in str(refusal.value)
    assert "--out" in str(refusal.value)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(("name", "value"), [*asdict(SMALL).items(), *IDENTITY.items()])
def test_a_checkpoint_of_another_run_is_refused_with_both_values(tmp_path, name, value):
    gpt.save_checkpoint(tmp_path, a_checkpoint())
    other = {"drop_rate": 0.5, "qkv_bias": False, "tokenizer": "gpt2", "corpus": "ba9876543210"}.get(name, 2 * 123)
    other = 48 if name == "emb_dim" else 6 if name == "n_heads" else other
    with pytest.raises(ValueError, match=rf"{name} {re.escape(str(value))}, .* {re.escape(str(other))}\b"):
        if name in IDENTITY:
            open_folder(tmp_path, **{name: other})
        else:
            open_folder(tmp_path, config=gpt.GPTConfig(**{**asdict(SMALL), name: other}))


def test_a_checkpoint_that_is_damaged_is_refused_before_the_run(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "checkpoint.pt"))):
        open_folder(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="knows unwritable folders of Linux alone")
@pytest.mark.parametrize("folder", ["file", "file/below", "/proc/self"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_run(tmp_path, folder):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write to --out"):
        open_folder(tmp_path / folder)
