"""GPT-2 as a PyTorch module, with recipes to train it: presets, flags, learning rate, number formats.

Nothing here talks to other processes: the same file serves one GPU and many.

    model = GPT(GPTConfig(vocab_size=50304))
    logits = model(token_ids).logits
    loss = model(token_ids, targets).loss

A trained model writes from the command line:

    python gpt.py runs/gpt2 --prompt "Once upon a time"
"""

import argparse
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

# The logits are the largest tensors of a training step: 3 GB at 32 x 1024 tokens in 16 bits, twice that in 32. With so
# many made at a time (2048 tokens of GPT-2, 0.8 GB), nothing of them outlives its part but the float32 softmax that
# backward() needs. Fewer would take longer, and lose digits in bfloat16, in which the parts of the embedding's gradient
# are added up.
LOGITS_AT_ONCE = 2048 * 50304


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
            if not (isinstance(getattr(self, name), int) and getattr(self, name) >= 1):
                raise ValueError(f"{name} must be a whole number above 0, it is {getattr(self, name)}")
        if self.emb_dim % self.n_heads or not 0 <= self.drop_rate < 1:
            raise ValueError(f"n_heads must divide emb_dim, and drop_rate must be from 0 to below 1: {self}")


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
        # GPT-2 starts like this. Each block adds twice to the residual stream, by layers that begin smaller, so that
        # its variance does not grow with depth.
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" not in name:
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layers) if "out_proj" in name else 0.02)

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
        if torch.compiler.is_compiling():  # a compiled model keeps no float32 logits, and DDP would cut it at each part
            n_at_once = len(targets)
        for x_part, targets_part in zip(x.split(n_at_once), targets.split(n_at_once)):
            logits = F.linear(x_part, self.tok_emb.weight)
            # A sum over a vocabulary needs float32 also where the logits have 16 bits.
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            loss = loss + F.cross_entropy(logits, targets_part, reduction="sum")
        return GPTOutput(None, loss / len(targets))


def weight_decay_groups(model, weight_decay):
    """Parameter groups for AdamW: matrices (and embeddings) decay, biases and LayerNorm gains do not."""
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
    start and for numbers out of range.
    """
    if token_ids.shape[1] == 0:
        raise ValueError("the prompt is empty, it needs at least one token")
    if not (1 <= n_vocab <= model.config.vocab_size and 0 <= temperature < math.inf and (top_k is None or top_k >= 1)):
        raise ValueError(f"n_vocab {n_vocab}, temperature {temperature} or top_k {top_k} is out of range")
    if generator is None:
        generator = torch.Generator(token_ids.device)
        generator.seed()
    was_training = model.training
    model.eval()
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
    model.train(was_training)
    return token_ids


def sample(model, tokenizer, seed, prompt="The ", n_tokens=200, temperature=0.8, top_k=None):
    """The text `prompt` and what the model writes after it, `n_tokens` tokens drawn with `seed`.

    Control characters, of which a terminal would take some for commands, are replaced by U+FFFD.
    """
    device = model.tok_emb.weight.device
    token_ids = torch.tensor([tokenizer.encode_ordinary(prompt)], dtype=torch.int64, device=device)  # (1, n_prompt)
    generator = torch.Generator(device).manual_seed(seed)
    token_ids = generate(model, token_ids, n_tokens, tokenizer.n_vocab, temperature, top_k, generator)
    text = tokenizer.decode(token_ids[0].tolist())
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


@torch.no_grad()
def checksum(model):
    """One int64 from the bits of all parameters, for telling whether two replicas are the same."""
    total = 0
    for index, parameter in enumerate(model.parameters()):
        bits = parameter.detach().view(torch.int32).sum(dtype=torch.int64)  # of integers: in any order the same
        total = total + (2 * index + 1) * bits
    return total.item()


# ----------------------------------------------------------------------------------------------------------------------
# What a run is told: presets, flags, number formats


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


DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def number(kind, low, below=math.inf):
    """For argparse: a number of this `kind`, int or float, that is at least `low` and below `below`."""

    def parse(text):
        value = kind(text)
        if not low <= value < below:
            raise argparse.ArgumentTypeError(f"{text} is not from {low} to below {below}")
        return value

    parse.__name__ = kind.__name__  # argparse names it where the text is no number
    return parse


def path(text):
    """For argparse: a path, in which ~ is the home folder also where no shell replaced it."""
    if not text:  # an unset variable of the shell, perhaps
        raise argparse.ArgumentTypeError("the path is empty")
    return os.path.expanduser(text)


def make_parser(description, quiet=False):
    """A parser of the flags that the scripts share. It refuses with one line (none if `quiet`) and status 2."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda reason: parser.exit(2, "" if quiet else f"error: {reason}\n")
    flag, count, of_preset = parser.add_argument, number(int, 1, 2**31), "(default: the preset's)"
    flag("--preset", choices=PRESETS, help="model and recipe (default: tiny on a CPU, small on a GPU)")
    flag("--data", type=path, metavar="FILE", help="text, or token ids as .npy or .bin (default: text within Python)")
    flag("--tokenizer", choices=("bytes", "gpt2"), help=of_preset)
    flag("--context-length", type=count, metavar="TOKENS", help=f"of a sequence {of_preset}")
    flag("--drop-rate", type=number(float, 0, 1), metavar="SHARE", help=f"dropout, 0 to below 1 {of_preset}")
    flag("--batch-size", type=count, metavar="SEQUENCES", help=f"per process and forward pass, at most {of_preset}")
    flag("--global-batch-size", type=count, metavar="SEQUENCES", help=f"per step, over all processes {of_preset}")
    flag("--epochs", type=count, help=f"passes over the corpus, from step 0 {of_preset}")
    flag("--max-steps", type=count, metavar="STEPS", help="from step 0, in place of --epochs (default: by --epochs)")
    flag("--lr", type=number(float, 1e-9), metavar="RATE", help=f"highest learning rate {of_preset}")
    flag("--seed", type=number(int, 0, 2**31), default=123, help="of weights, order, dropout (default: %(default)s)")
    flag("--device", default="auto", help="auto, cpu, cuda or mps (default: the accelerator, if there is one)")
    flag("--dtype", default="auto", choices=DTYPES, help="of matrix products (default: 16 bits on a GPU, else 32)")
    flag("--compile", action="store_true", help="torch.compile: faster steps after half a minute (default: off)")
    flag("--log-every", type=count, default=10, metavar="STEPS", help="print the loss (default: %(default)s)")
    flag("--eval-every", type=count, default=250, metavar="STEPS", help="evaluate and save (default: %(default)s)")
    flag("--out", type=path, metavar="DIR", help="keep checkpoint.pt and metrics.csv there (default: write nothing)")
    flag("--resume", action="store_true", help="go on from the checkpoint in --out, if there is one (default: off)")
    return parser


def resolve_flags(args, for_ddp=False, by_torchrun=False):
    """Put the preset's values, the device and the dtype where the command line gave none; ValueError if they cannot be.

    `for_ddp`: `args.nproc` processes train on this machine, each on a GPU of its own. That leaves out mps, on which
    none can average. `by_torchrun`: the script is one that torchrun starts.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and not by_torchrun:
        raise ValueError("start this script with python: of the three, torchrun starts train_ddp_torchrun.py alone")
    accelerator = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    accelerator = "cpu" if accelerator == "mps" and for_ddp else accelerator
    args.device = accelerator if args.device == "auto" else args.device
    if args.device not in ("cpu", accelerator):
        raise ValueError(f"--device {args.device}: there is no such device to train on here, there is {accelerator}")
    if args.device not in ("cpu", "cuda", "mps"):
        raise ValueError(f"nothing here was written for {args.device}: add --device cpu")
    n_gpus = 0 if args.device == "cpu" else torch.accelerator.device_count()
    args.nproc = (args.nproc or n_gpus or 2) if for_ddp else 1
    if n_gpus and args.nproc > n_gpus:
        raise ValueError(
            f"{args.nproc} processes on this machine need a GPU each, this one sees {n_gpus}: start fewer, or let each "
            "see all GPUs (Slurm: --gpus-per-node, not --gpus-per-task), or add --device cpu"
        )
    if args.dtype == "auto":
        has_bfloat16 = args.device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        args.dtype = "bfloat16" if has_bfloat16 else "float16" if args.device == "cuda" else "float32"
    if (args.dtype, args.device) in (("float16", "cpu"), ("float64", "mps")):
        raise ValueError(f"--dtype {args.dtype} does not train on {args.device}: choose float32, or another --device")
    compilers = ("CXX", "g++", "clang++", "cl") if args.device == "cpu" else ("CC", "gcc", "clang", "cl")
    if args.compile and not any(shutil.which(os.environ.get(name, name)) for name in compilers):
        raise ValueError("--compile needs a C compiler, and none is here: install g++, or leave --compile out")
    args.preset = args.preset or ("tiny" if args.device == "cpu" else "small")
    for name, value in PRESETS[args.preset]._asdict().items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    if args.resume and not args.out:
        raise ValueError("--resume needs --out DIR, the folder with the checkpoint")
    return args


def pick_device(args, index=0):
    """The device of process `index` of this machine: a GPU of its own, or of the CPU its share of the cores."""
    if args.device == "cpu":
        chosen = os.environ.get("OMP_NUM_THREADS")
        if chosen is None or (
            chosen == "1" and "TORCHELASTIC_RUN_ID" in os.environ
        ):  # torchrun sets 1, where nobody chose
            # Slurm, taskset or a container may allow fewer cores than there are.
            n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
            torch.set_num_threads(max(1, n_cores // args.nproc))  # else each process takes a thread for every core
        return torch.device("cpu")
    torch.accelerator.set_device_index(index)
    return torch.device(args.device, index)


def config_for(args, n_vocab):
    """The model that resolved flags ask for, its vocabulary padded to whole tiles of a GPU's matrix units."""
    names = ("context_length", "emb_dim", "n_heads", "n_layers", "drop_rate")
    return GPTConfig(vocab_size=math.ceil(n_vocab / 64) * 64, **{name: getattr(args, name) for name in names})


def number_formats(args):
    """(dtype of the weights, autocast to 16 bits for matrix products, scaler of the gradients) for resolved flags."""
    if args.device == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
    half = getattr(torch, args.dtype) if args.dtype in ("bfloat16", "float16") else None
    return (
        torch.float64 if args.dtype == "float64" else torch.float32,
        torch.autocast(args.device, half, enabled=half is not None),
        torch.amp.GradScaler(args.device, enabled=half is torch.float16),
    )


def main():
    import data  # here alone: the model itself needs no tokenizer

    data.on_signals(data.end_quietly)
    parser = argparse.ArgumentParser(description="Let a trained model write on from a prompt.")
    parser.error = lambda reason: parser.exit(2, f"error: {reason}\n")
    flag, count = parser.add_argument, number(int, 1, 2**31)
    flag("folder", type=path, metavar="DIR", help="what --out of the training was")
    flag("--prompt", default="The ", metavar="TEXT", help="the beginning (default: %(default)r)")
    flag("--tokens", type=count, default=200, metavar="N", help="how many to write (default: %(default)s)")
    flag("--temperature", type=number(float, 0), default=0.8, help="0 takes the likeliest (default: %(default)s)")
    flag("--top-k", type=count, metavar="K", help="draw from the K likeliest tokens (default: from all)")
    flag("--seed", type=number(int, 0, 2**31), default=123, help="of the draws (default: %(default)s)")
    args = parser.parse_args()
    try:
        checkpoint = data.load_checkpoint(Path(args.folder, "checkpoint.pt"))
        tokenizer = data.get_tokenizer(checkpoint["run"]["tokenizer"])
        model = GPT(GPTConfig(**checkpoint["config"]))
        model.load_state_dict(checkpoint["model"])
        model.to(torch.accelerator.current_accelerator(check_available=True) or "cpu")
        text = sample(model, tokenizer, args.seed, args.prompt, args.tokens, args.temperature, args.top_k)
    except (ValueError, OSError) as error:
        parser.error(error)
    data.say(text)


if __name__ == "__main__":
    main()
