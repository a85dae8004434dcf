"""GPT-2 as a PyTorch module, and what surrounds its training: flags, facts, checkpoints.

Nothing here talks to other processes: the same file serves one GPU and many.

    model = GPT(GPTConfig(vocab_size=50304))
    logits = model(token_ids).logits
    loss = model(token_ids, targets).loss
"""

import argparse
import csv
import io
import math
import os
import re
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

# The logits are the largest tensors of a training step: 3 GB at 32 x 1024 tokens in 16 bits, twice that in 32. With so
# many made at a time (1024 tokens of GPT-2), nothing of them outlives its part but the float32 softmax that backward()
# needs. Fewer would take longer: each part adds to the gradient of the whole token embedding.
LOGITS_AT_ONCE = 1024 * 50304


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT, in the names of the book LLMs-from-scratch. The defaults are GPT-2 124M, vocabulary padded.

    Raises ValueError for a shape that cannot be built.
    """

    vocab_size: int = 50304
    context_length: int = 1024
    emb_dim: int = 768
    n_heads: int = 12
    n_layers: int = 12
    drop_rate: float = 0.0
    qkv_bias: bool = True

    def __post_init__(self):
        for name in ("vocab_size", "context_length", "emb_dim", "n_heads", "n_layers"):
            value = getattr(self, name)
            if not (isinstance(value, int) and value >= 1):
                raise ValueError(f"{name} must be a whole number above 0, it is {value}")
        if self.emb_dim % self.n_heads:
            raise ValueError(f"emb_dim {self.emb_dim} must be a multiple of n_heads {self.n_heads}")
        if not 0 <= self.drop_rate < 1:
            raise ValueError(f"drop_rate must be at least 0 and below 1, it is {self.drop_rate}")


class Preset(NamedTuple):
    """A model and a recipe that suits it. Batch sizes count sequences, `lr` is the highest learning rate."""

    context_length: int
    emb_dim: int
    n_heads: int
    n_layers: int
    drop_rate: float
    tokenizer: str
    batch_size: int
    global_batch_size: int
    lr: float
    epochs: int


# Each global batch divides by 1, 2, 3, 4, 6 and 8 processes. The gpt2 rows are the sizes of the GPT-2 paper (Radford
# et al., 2019) with the learning rates of the GPT-3 paper (Brown et al., 2020, table 2.1) for models of their size.
PRESETS = {
    #                     context  width heads layers drop tokenizer batch global    lr  epochs
    "tiny": Preset(64, 128, 4, 4, 0.0, "bytes", 8, 24, 1e-3, 2),
    "small": Preset(256, 384, 6, 6, 0.2, "bytes", 48, 48, 1e-3, 20),
    "gpt2": Preset(1024, 768, 12, 12, 0.0, "gpt2", 8, 480, 6e-4, 5),
    "gpt2-medium": Preset(1024, 1024, 16, 24, 0.0, "gpt2", 8, 480, 3e-4, 5),
    "gpt2-large": Preset(1024, 1280, 20, 36, 0.0, "gpt2", 4, 480, 2.5e-4, 5),
    "gpt2-xl": Preset(1024, 1600, 25, 48, 0.0, "gpt2", 2, 480, 2e-4, 5),
}


class GPTOutput(NamedTuple):
    """What a forward pass returns: `logits` without targets, `loss` with them, and None for the other."""

    logits: torch.Tensor | None
    loss: torch.Tensor | None


class MultiHeadAttention(nn.Module):
    """Causal self-attention: each token looks at itself and at what stands before it."""

    def __init__(self, config):
        super().__init__()
        self.n_heads = config.n_heads
        self.drop_rate = config.drop_rate
        self.qkv = nn.Linear(config.emb_dim, 3 * config.emb_dim, bias=config.qkv_bias)
        self.out_proj = nn.Linear(config.emb_dim, config.emb_dim)
        self.dropout = nn.Dropout(config.drop_rate)

    def forward(self, x):
        batch, n_tokens, emb_dim = x.shape
        qkv = self.qkv(x).view(batch, n_tokens, 3, self.n_heads, emb_dim // self.n_heads)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, n_heads, n_tokens, head_dim)
        context = F.scaled_dot_product_attention(
            queries, keys, values, dropout_p=self.drop_rate if self.training else 0.0, is_causal=True
        )
        context = context.transpose(1, 2).reshape(batch, n_tokens, emb_dim)  # heads side by side again
        return self.dropout(self.out_proj(context))


class FeedForward(nn.Module):
    """The two-layer network of a block, four times as wide inside, with the tanh GELU of GPT-2."""

    def __init__(self, config):
        super().__init__()
        self.expand = nn.Linear(config.emb_dim, 4 * config.emb_dim)
        self.gelu = nn.GELU(approximate="tanh")
        self.out_proj = nn.Linear(4 * config.emb_dim, config.emb_dim)
        self.dropout = nn.Dropout(config.drop_rate)

    def forward(self, x):
        return self.dropout(self.out_proj(self.gelu(self.expand(x))))


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each behind a LayerNorm and added to what came in."""

    def __init__(self, config):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.emb_dim)
        self.att = MultiHeadAttention(config)
        self.norm2 = nn.LayerNorm(config.emb_dim)
        self.ff = FeedForward(config)

    def forward(self, x):
        x = x + self.att(self.norm1(x))
        return x + self.ff(self.norm2(x))


class GPT(nn.Module):
    """GPT-2 (Radford et al., 2019): learned positions, pre-LayerNorm blocks, output head tied to the token embedding.

    There are no buffers: DDP has nothing to broadcast before a forward pass, and one on rank 0 alone changes nothing.
    """

    def __init__(self, config=None):
        super().__init__()
        self.config = config = config or GPTConfig()
        self.tok_emb = nn.Embedding(config.vocab_size, config.emb_dim)
        self.pos_emb = nn.Embedding(config.context_length, config.emb_dim)
        self.drop_emb = nn.Dropout(config.drop_rate)
        self.trf_blocks = nn.Sequential(*[TransformerBlock(config) for _ in range(config.n_layers)])
        self.final_norm = nn.LayerNorm(config.emb_dim)
        self.apply(self._init_weights)
        # Each block adds twice to the residual stream; GPT-2 scales these layers so that its variance does not
        # grow with depth.
        for name, parameter in self.named_parameters():
            if name.endswith("out_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layers))

    @staticmethod
    def _init_weights(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, token_ids, targets=None):
        """Logits of shape (batch, n_tokens, vocab_size), or with targets their mean cross-entropy in nats.

        `token_ids` and `targets` are int64 of shape (batch, n_tokens), n_tokens at most `context_length`.
        """
        n_tokens = token_ids.shape[1]
        if n_tokens > self.config.context_length:  # a GPU would fail later, and name no reason
            raise ValueError(f"{n_tokens} tokens are more than the context_length {self.config.context_length}")
        positions = torch.arange(n_tokens, device=token_ids.device)
        x = self.drop_emb(self.tok_emb(token_ids) + self.pos_emb(positions))  # (batch, n_tokens, emb_dim)
        x = self.final_norm(self.trf_blocks(x))
        if targets is None:
            return GPTOutput(F.linear(x, self.tok_emb.weight), None)

        loss = 0.0
        x, targets = x.flatten(0, 1), targets.flatten()  # (batch * n_tokens, emb_dim), (batch * n_tokens,)
        n_at_once = max(1, LOGITS_AT_ONCE // self.config.vocab_size)  # tokens
        for x_part, targets_part in zip(x.split(n_at_once), targets.split(n_at_once)):
            logits = F.linear(x_part, self.tok_emb.weight)
            # A sum over a vocabulary needs float32 also where the logits have 16 bits.
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            loss = loss + F.cross_entropy(logits, targets_part, reduction="sum")
        return GPTOutput(None, loss / len(targets))


def weight_decay_groups(model, weight_decay):
    """Parameter groups for AdamW: matrices (and embeddings) decay, biases and LayerNorm gains do not.

    Each parameter is in exactly one group.
    """
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def learning_rate(step, total_steps, peak, warmup_share=0.05, final_share=0.1):
    """The learning rate of step 1, 2, ... `total_steps`: a line up to `peak`, then half a cosine.

    The first `warmup_share` of the steps climbs; the last step has `final_share * peak` (the schedule of Brown et al.,
    2020, appendix B). A pure function of the step, so a checkpoint needs no scheduler state.
    """
    warmup_steps = max(1, round(warmup_share * total_steps))
    if step <= warmup_steps:
        return peak * step / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return peak * (final_share + (1 - final_share) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


@torch.no_grad()
def generate(model, token_ids, max_new_tokens, n_vocab, temperature=1.0, top_k=None, generator=None):
    """Append `max_new_tokens` ids to `token_ids`, int64 of shape (batch, n_tokens), and return all of them.

    `n_vocab` is the tokenizer's vocabulary: the ids with which the model's is padded are never drawn. Temperature 0
    takes the likeliest id. Pass the raw module, not its DDP wrapper: one process can then generate alone. Random
    numbers come from `generator` (a fresh one if None), never from the global state. Raises ValueError for an empty
    start and for numbers out of range; the model's train/eval mode stays what it was.
    """
    if token_ids.shape[1] < 1:
        raise ValueError("generate needs at least one id to start from")
    if not 1 <= n_vocab <= model.config.vocab_size:
        raise ValueError(f"n_vocab must be from 1 to {model.config.vocab_size}, it is {n_vocab}")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be at least 0 and finite, it is {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, it is {top_k}")
    if generator is None:
        generator = torch.Generator(token_ids.device)
        generator.seed()
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        for _ in range(max_new_tokens):
            context = token_ids[:, -model.config.context_length :]
            logits = model(context).logits[:, -1, :n_vocab].float()  # (batch, n_vocab)
            if top_k is not None:
                kept = logits.topk(min(top_k, n_vocab))
                logits = torch.full_like(logits, -math.inf).scatter(1, kept.indices, kept.values)
            if temperature < 1e-6:  # 0, or so little that the division would overflow
                next_ids = logits.argmax(dim=-1, keepdim=True)  # (batch, 1)
            else:
                probabilities = torch.softmax(logits / temperature, dim=-1)
                next_ids = torch.multinomial(probabilities, num_samples=1, generator=generator)
            token_ids = torch.cat((token_ids, next_ids), dim=1)
    finally:
        for module in in_training:
            module.training = True
    return token_ids


def sample(model, tokenizer, prompt, n_tokens, seed):
    """A line with the text `prompt` and what the model writes after it, `n_tokens` tokens drawn with `seed`."""
    device = model.tok_emb.weight.device
    token_ids = torch.tensor([tokenizer.encode_ordinary(prompt)], device=device)  # (1, tokens of the prompt)
    generator = torch.Generator(device).manual_seed(seed)
    token_ids = generate(model, token_ids, n_tokens, tokenizer.n_vocab, temperature=0.8, generator=generator)
    return "sample: " + tokenizer.decode(token_ids[0].tolist())


def flops_per_token(model):
    """Floating-point operations of forward and backward for one token of a full context.

    6 N + 12 L T C, with N parameters (all but the positions, which are only looked up), L layers, T tokens of context
    and width C: Chowdhery et al., "PaLM", 2022, appendix B.
    """
    config = model.config
    n_parameters = sum(p.numel() for p in model.parameters()) - model.pos_emb.weight.numel()
    return 6 * n_parameters + 12 * config.n_layers * config.context_length * config.emb_dim


@torch.no_grad()
def checksum(model):
    """One int64 from the bits of all parameters, for telling whether two replicas are the same."""
    total = 0
    for index, parameter in enumerate(model.parameters()):
        bits = parameter.detach().view(torch.int32).sum(dtype=torch.int64)  # of integers: in any order the same
        total = total + (2 * index + 1) * bits
    return total.item()


# ----------------------------------------------------------------------------------------------------------------------
# What a run is told: flags, device, number format

HALF = ("bfloat16", "float16")  # the formats of 16 bits


def add_flags(parser):
    """Add the flags that the three scripts share to an `argparse.ArgumentParser`."""

    def number(kind, accepts, rule):
        def parse(text):
            value = kind(text)
            if not accepts(value):
                raise argparse.ArgumentTypeError(f"{text} {rule}")
            return value

        parse.__name__ = kind.__name__  # argparse names it where the text is no number
        return parse

    count = number(int, lambda value: 0 < value < 2**31, "is not a whole number above 0")
    rate = number(float, lambda value: 0 < value < math.inf, "is not a number above 0")
    share = number(float, lambda value: 0 <= value < 1, "is not from 0 to below 1")
    seed = number(int, lambda value: 0 <= value < 2**31, "is not from 0 to 2147483647")
    flag = parser.add_argument
    flag("--preset", choices=PRESETS, help="model and recipe (default: tiny on a CPU, small on a GPU)")
    flag("--data", metavar="FILE", help="UTF-8 text, or token ids as .npy or .bin (default: text that Python brings)")
    flag("--tokenizer", choices=("bytes", "gpt2"), help=f"(default: {_of_presets('tokenizer')})")
    flag(
        "--context-length",
        type=count,
        metavar="TOKENS",
        help=f"of a sequence (default: {_of_presets('context_length')})",
    )
    flag(
        "--drop-rate", type=share, metavar="SHARE", help=f"dropout, 0 to below 1 (default: {_of_presets('drop_rate')})"
    )
    flag(
        "--batch-size",
        type=count,
        metavar="SEQUENCES",
        help=f"per process and forward pass, at most (default: {_of_presets('batch_size')})",
    )
    flag(
        "--global-batch-size",
        type=count,
        metavar="SEQUENCES",
        help=f"per optimizer step, over all processes (default: {_of_presets('global_batch_size')})",
    )
    flag("--epochs", type=count, help=f"passes over the corpus, from step 0 (default: {_of_presets('epochs')})")
    flag("--max-steps", type=count, metavar="STEPS", help="from step 0, in place of --epochs (default: by --epochs)")
    flag("--lr", type=rate, metavar="RATE", help=f"highest learning rate (default: {_of_presets('lr')})")
    flag(
        "--seed",
        type=seed,
        metavar="NUMBER",
        default=123,
        help="of weights, data order and dropout (default: %(default)s)",
    )
    flag("--device", default="auto", help="auto, cpu, cuda or mps (default: the accelerator, if there is one)")
    flag(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16", "float64"),
        help="of matrix products (default: bfloat16 on a GPU that has it, float16 on an older one, float32 on a CPU)",
    )
    flag("--compile", action="store_true", help="torch.compile: faster steps after half a minute (default: off)")
    flag("--log-every", type=count, default=10, metavar="STEPS", help="print the loss (default: %(default)s)")
    flag("--eval-every", type=count, default=250, metavar="STEPS", help="evaluate and save (default: %(default)s)")
    flag("--out", metavar="DIR", help="keep checkpoint.pt and metrics.csv there (default: write nothing)")
    flag("--resume", action="store_true", help="go on from the checkpoint in --out, if there is one (default: off)")


def _of_presets(field):
    """The values of a field as help text, such as "8; 48 in small"."""
    values = {name: getattr(preset, field) for name, preset in PRESETS.items()}
    usual = values["gpt2"]
    return "; ".join([f"{usual}", *(f"{value} in {name}" for name, value in values.items() if value != usual)])


def resolve_flags(args, for_ddp=False):
    """Put the preset's values, the device and the dtype where the command line gave none; ValueError if they cannot be.

    `for_ddp` leaves out mps: a Mac has one GPU, and no backend averages gradients on it.
    """
    accelerator = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    if accelerator == "mps" and for_ddp:
        accelerator = "cpu"
    if args.device not in ("auto", "cpu", accelerator):
        has = "cpu" if accelerator == "cpu" else f"cpu and {accelerator}"
        raise ValueError(f"--device {args.device}: there is no such device to train on here, there is {has}")
    args.device = accelerator if args.device == "auto" else args.device
    args.dtype = _resolve_dtype(args.dtype, args.device)
    args.preset = args.preset or ("tiny" if args.device == "cpu" else "small")
    for name, value in PRESETS[args.preset]._asdict().items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    if args.resume and not args.out:
        raise ValueError("--resume needs --out DIR, the folder with the checkpoint")
    return args


def _resolve_dtype(name, device):
    if name == "auto":
        if device != "cuda":
            return "float32"
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if name == "float16" and device == "cpu":
        raise ValueError("--dtype float16 needs a GPU: on a CPU choose float32 or bfloat16")
    if name == "float64" and device == "mps":
        raise ValueError("--dtype float64 does not exist on mps: add --device cpu")
    return name


def config_for(args, n_vocab):
    """The model that resolved flags ask for, its vocabulary padded to whole tiles of a GPU's matrix units."""
    names = ("context_length", "emb_dim", "n_heads", "n_layers", "drop_rate")
    return GPTConfig(vocab_size=math.ceil(n_vocab / 64) * 64, **{name: getattr(args, name) for name in names})


def autocast_for(args):
    """A context: in it matrix products have `args.dtype` if that has 16 bits. The weights stay float32."""
    half = args.dtype in HALF
    return torch.autocast(args.device, getattr(torch, args.dtype) if half else None, enabled=half)


# ----------------------------------------------------------------------------------------------------------------------
# What a run shows

# Dense 16-bit peaks from the vendors' data sheets, in FLOP/s.
PEAK_FLOPS = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIE": 756e12,
    "A100": 312e12,
    "A100 PCIE": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L4": 121e12,
    "V100": 125e12,
    "V100 PCIE": 112e12,
    "T4": 65e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


def peak_flops(device_name):
    """Dense 16-bit FLOP/s of a GPU by the name that `torch.cuda.get_device_name` gives, or None if not known.

    Brand, socket and memory size do not matter; any other word, such as Laptop, Ti or MIG, can mean a slower chip.
    """
    words = re.split(r"[ -]", device_name.upper())
    neutral = re.compile(r"NVIDIA|TESLA|GEFORCE|SXM\d?|\d+GB|HBM\d\w?")
    return PEAK_FLOPS.get(" ".join(word for word in words if not neutral.fullmatch(word)))


def describe(args, run, model, step):
    """The facts of a run, as lines to print before its first step."""
    config, corpus = run.config, run.corpus
    n_parameters = sum(p.numel() for p in model.parameters())
    processes = "1 process" if run.n_processes == 1 else f"{run.n_processes} processes"
    lines = [
        f"preset {args.preset}: {config.n_layers} layers, {config.n_heads} heads, {config.emb_dim} wide, "
        f"{config.context_length} tokens of context, {n_parameters:,} parameters"
        + ("" if args.data else "; for the real thing: --preset gpt2 --data FILE"),
        f"device {args.device}, {processes}, {args.dtype}{', compiled' if args.compile else ''}, "
        f"torch {torch.__version__}",
        f"corpus {args.data or 'built into Python'}, hash {corpus.hash}, {args.tokenizer} tokens: "
        f"{len(corpus.train_set):,} windows to train on, {len(corpus.val_set):,} to validate",
        f"{args.global_batch_size} sequences per step = {run.forward_batch} per forward x {run.accumulation} "
        f"accumulated x {processes}; {run.steps_per_epoch:,} steps per epoch, {run.total_steps:,} in all",
    ]
    return "\n".join(lines + [f"resumed after step {step}"] * bool(step))


def describe_step(args, run, model, row, losses, gradient_norm):
    """One line about a step from its row of metrics, with the loss of each process where there are several.

    MFU is the share of the GPUs' peak that the model's arithmetic uses; it stands there where the peak is known.
    """
    step = row["step"]
    line = f"epoch {(step - 1) // run.steps_per_epoch + 1}  step {step}/{run.total_steps}  loss {row['train_loss']:.6f}"
    if 1 < len(losses) <= 8:
        line += " [" + ", ".join(f"rank {rank} {loss:.6f}" for rank, loss in enumerate(losses)) + "]"
    elif len(losses) > 8:
        low, high = min(losses), max(losses)
        line += f" [lowest rank {losses.index(low)} {low:.6f}, highest rank {losses.index(high)} {high:.6f}]"
    line += f"  norm {gradient_norm:.3f}  lr {row['learning_rate']:.2e}"
    if speed := row["tokens_per_second"]:
        line += f"  {speed:,.0f} tokens/s"
        if args.device == "cuda" and args.dtype in HALF and (peak := peak_flops(torch.cuda.get_device_name())):
            line += f"  MFU {speed * flops_per_token(model) / (peak * run.n_processes):.1%}"
        line += f"  {timedelta(seconds=round((run.total_steps / step - 1) * row['tokens'] / speed))} left"
    return line


# ----------------------------------------------------------------------------------------------------------------------
# What a run leaves

METRICS = ("step", "tokens", "learning_rate", "train_loss", "val_loss", "tokens_per_second")
CHECKPOINT_KEYS = {"model", "optimizer", "scaler", "step", "metrics", "config", "run"}


def open_run_folder(folder, resume, config, identity):
    """Make sure that a run can write to `folder`, and return the checkpoint there if `resume` is set and there is one.

    Refuses, as ValueError or OSError, a folder that cannot be written, a checkpoint that the run would overwrite, and
    one whose configuration or `identity` (what else decides the losses) is not the run's.
    """
    path = Path(folder, "checkpoint.pt")
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(f"cannot write to --out {folder}: {error.strerror}") from error
    if not path.exists():
        return None
    if not resume:
        raise ValueError(f"{path} exists: add --resume to go on from it, or choose another --out")
    checkpoint = load_checkpoint(path)
    saved = {**checkpoint["config"], **checkpoint["run"]}
    for name, value in {**identity, **asdict(config)}.items():
        if saved.get(name) != value:
            raise ValueError(
                f"{path} has {name} {saved.get(name)}, this run has {value}: give the same, or another --out"
            )
    return checkpoint


def load_checkpoint(path):
    """The dictionary that `save_checkpoint` wrote, its tensors on the CPU and read from disk only when used.

    `weights_only=True`: loading a file never runs code from it. Raises FileNotFoundError, or ValueError if the file is
    no checkpoint of this project.
    """
    can_replace_mapped_file = os.name != "nt"  # where it cannot, the next save would fail
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=can_replace_mapped_file)
        missing = CHECKPOINT_KEYS - checkpoint.keys()
    except FileNotFoundError:
        raise
    except Exception as error:  # torch.load fails in as many ways as a file can be broken
        reason = type(error).__name__  # its text may have many lines, and advise to load the file unsafely
        raise ValueError(
            f"{path} is no checkpoint of this project or is damaged ({reason}): move it away, or choose another --out"
        ) from error
    if missing:
        raise ValueError(
            f"{path} is no checkpoint of this project, it lacks {', '.join(sorted(missing))}: choose another --out"
        )
    return checkpoint


def restore(checkpoint, model, optimizer, scaler):
    """Go back to where `save` was called; returns the last step done and the rows of metrics up to it."""
    if checkpoint is None:
        return 0, []
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scaler.load_state_dict(checkpoint["scaler"])
    return checkpoint["step"], checkpoint["metrics"]


def save(run, model, optimizer, scaler, step, metrics):
    """Save what `restore` needs to go on after `step`; returns the reason if that fails, else None."""
    checkpoint = {
        "model": model.state_dict(),  # of the raw module: no prefix of a wrapper in its names
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "step": step,
        "metrics": metrics,
        "config": asdict(run.config),
        "run": run.identity,
    }
    try:
        save_checkpoint(run.folder, checkpoint)
    except OSError as error:
        return f"{error}: mend that, then --resume goes on from the last save"


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
            with suppress(OSError):
                temporary[path].unlink(missing_ok=True)
