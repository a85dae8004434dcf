"""Train a GPT with DistributedDataParallel (DDP), one process for each GPU, started by torch.multiprocessing.spawn.

    python train_ddp_spawn.py                                             # all GPUs of the machine, or 2 CPU processes
    python train_ddp_spawn.py --preset gpt2 --data corpus.txt --out runs/gpt2
    MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 python train_ddp_spawn.py --nnodes 2 --node-rank 0     # first of 2 machines

The lines that DDP adds to train_single_gpu.py are marked: 1 to 3 are needed to train on many GPUs, 4 to 8 to trust it.
    grep -n "# DDP [123]" train_ddp_spawn.py
"""

import argparse
import gc
import math
import os
import signal
import socket
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, active_children, spawn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import data
import gpt

WEIGHT_DECAY = 0.1
MAX_GRADIENT_NORM = 1.0
WARMUP_SHARE = 0.05  # of all steps
PROMPT = "The "
SAMPLE_TOKENS = 200
TIMEOUT = timedelta(minutes=10)  # how long a process waits for the others before it gives up


def setup(rank, world_size, device):
    """Join the group of `world_size` processes that train together; `rank` is this one's number in it."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    backend = dist.get_default_backend_for_device(device)  # nccl between GPUs, gloo between CPUs
    if sys.platform == "win32":  # has no nccl, and PyTorch there is built without libuv
        backend, os.environ["USE_LIBUV"] = "gloo", "0"
    device_id = device if device.type == "cuda" else None  # nccl need not guess the GPU
    dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=TIMEOUT, device_id=device_id)


def cleanup():
    """Leave the group. Garbage that still holds on to it can abort the process at its exit, so it goes first."""
    gc.collect()
    dist.destroy_process_group()


def train(local_rank, world_size, args):
    """Train as `args` says in process `local_rank` of this machine; exits with 128 + the signal that ended it early."""
    rank = args.node_rank * args.nproc + local_rank  # DDP 1: orders data and output; the local rank only picks the GPU
    device = pick_device(args.device, local_rank, args.nproc)  # DDP 1: a GPU of its own for each process
    setup(rank, world_size, device)  # DDP 1: from here on the processes can talk to each other
    run = prepare(args, world_size)  # DDP 1: a process shares no memory with its parent
    log = partial(print, flush=True) if rank == 0 else lambda line: None  # DDP 6: one process speaks for all

    sampler = DistributedSampler(  # DDP 2: deals each epoch's permutation to the ranks in turn, as equal shares
        run.train_set, num_replicas=world_size, rank=rank, shuffle=True, seed=args.seed, drop_last=True
    )
    windows = data.SkipSampler(sampler)
    loader = DataLoader(
        run.train_set, batch_size=run.forward_batch, sampler=windows, drop_last=True, pin_memory=device.type == "cuda"
    )

    torch.manual_seed(args.seed)
    model = gpt.GPT(run.config).to(device, torch.float64 if args.dtype == "float64" else torch.float32)
    # DDP 3: copies rank 0's weights to all ranks, and averages the gradients over them while backward() runs
    ddp_model = DDP(model, device_ids=[local_rank] if device.type == "cuda" else None, gradient_as_bucket_view=True)
    if args.compile:
        ddp_model = torch.compile(ddp_model)
    optimizer = torch.optim.AdamW(
        gpt.weight_decay_groups(model, WEIGHT_DECAY), lr=args.lr, betas=(0.9, 0.95), fused=True
    )
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16")
    half = args.dtype in ("bfloat16", "float16")
    autocast = torch.autocast(device.type, getattr(torch, args.dtype) if half else None, enabled=half)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32

    step, metrics = 0, []
    if run.checkpoint:
        model.load_state_dict(run.checkpoint["model"])
        optimizer.load_state_dict(run.checkpoint["optimizer"])
        scaler.load_state_dict(run.checkpoint["scaler"])
        step, metrics = run.checkpoint["step"], run.checkpoint["metrics"]
    describe(args, run, model, step, f"{device.type}, {world_size} processes over {dist.get_backend()}", log)
    check_start(run, step, rank, device)  # DDP 8: the ranks read the same corpus and start at the same step

    signals = []  # a handler only takes note; the loop acts on it at the next log step
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, frame: signals.append(signum))
    float_sum = torch.float32 if device.type == "mps" else torch.float64
    bad_step = torch.tensor(math.inf, dtype=float_sum, device=device)  # the first whose loss or gradient is not finite
    tokens_per_step = args.global_batch_size * args.context_length
    first_step, stop_signal = step + 1, 0
    for step in range(first_step, run.total_steps + 1):
        epoch, step_of_epoch = divmod(step - 1, run.steps_per_epoch)
        if step == first_step or step_of_epoch == 0:
            sampler.set_epoch(epoch)  # DDP 2: else every epoch has the order of the first
            windows.n_skip = step_of_epoch * run.forward_batch * run.accumulation
            batches = iter(loader)

        # Dropout as a function of the step: a resumed run repeats it.
        torch.manual_seed(args.seed + 100_003 * step + rank)  # DDP 3: ranks that drop alike would waste variety
        for group in optimizer.param_groups:
            group["lr"] = gpt.learning_rate(step, run.total_steps, args.lr, WARMUP_SHARE)
        step_loss = torch.zeros((), dtype=float_sum, device=device)
        for micro_step in range(run.accumulation):
            inputs, targets = (ids.to(device, non_blocking=True) for ids in next(batches))  # (forward_batch, T) each
            # DDP 4: only the last backward() of a step has to average; the forward decides, so it belongs inside too
            with nullcontext() if micro_step + 1 == run.accumulation else ddp_model.no_sync():
                with autocast:
                    loss = ddp_model(inputs, targets).loss / run.accumulation
                scaler.scale(loss).backward()
            step_loss += loss.detach()
        scaler.unscale_(optimizer)  # clipping must see the true gradient
        gradient_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        # A gradient that overflows float16 is no fault: the scaler skips such a step.
        finite = (step_loss if scaler.is_enabled() else step_loss + gradient_norm).isfinite()
        bad_step = torch.where(finite, bad_step, bad_step.clamp(max=step))

        if step == first_step:  # compiles and warms up, so the clock starts after it
            step_loss.item()
            timed_steps, clock = 0, time.perf_counter()
        else:
            timed_steps += 1
        logging, evaluating = (step % n == 0 or step == run.total_steps for n in (args.log_every, args.eval_every))
        if logging or evaluating:  # between these the host never waits for the device
            # DDP 5: each rank has a loss of its own, of other windows; the loss of the step is their mean
            report = torch.stack([step_loss, step_loss.new_tensor(max(signals, default=0)), bad_step])
            losses, stop_signals, bad_steps = gather(report).T.tolist()
            loss, stop_signal, bad = sum(losses) / world_size, int(max(stop_signals)), min(bad_steps)
            if bad <= step or (scaler.is_enabled() and scaler.get_scale() < 1):
                stop(f"the loss or its gradient is not finite at step {min(bad, step):.0f}{each_loss(losses)}", rank)
            now = time.perf_counter()
            row = {"step": step, "tokens": step * tokens_per_step, "learning_rate": group["lr"]}
            if logging:
                row["train_loss"] = loss
                row["tokens_per_second"] = timed_steps * tokens_per_step / (now - clock) if timed_steps else None
                log_step(run, epoch, row, each_loss(losses), gradient_norm.item(), model, log)
                timed_steps, clock = 0, now
            if evaluating:
                check_replicas(model, rank)  # DDP 8: before a save, too
                row["val_loss"] = evaluate(model, run, device, autocast, float_sum, rank)
                log(f"step {step}: validation loss {row['val_loss']:.6f}")
            metrics.append([row.get(name) for name in gpt.METRICS])
            if args.out and (evaluating or stop_signal):
                failure = save(args, run, model, optimizer, scaler, step, metrics) if rank == 0 else None  # DDP 6
                if gather(torch.tensor(bool(failure), device=device)).any():  # DDP 6: all learn whether it worked
                    stop(failure, rank)
            clock += time.perf_counter() - now
        if step_of_epoch + 1 == run.steps_per_epoch:
            log(f"Epoch {epoch + 1} completed")
        if stop_signal:
            saved = (
                f"saved in {args.out}, add --resume to go on" if args.out else "nothing was saved, for want of --out"
            )
            log(f"stopped by {signal.Signals(stop_signal).name} after step {step}: {saved}")
            break
    else:
        if rank == 0:  # DDP 6: with the raw module, which waits for nobody
            log(sample(model, run, device, autocast))
        log(
            f"written to {args.out}"
            if args.out
            else "nothing was written: --out DIR keeps a checkpoint and metrics.csv"
        )
    del model, ddp_model, optimizer  # DDP 1: cleanup() collects them
    cleanup()  # DDP 1: only here; after a failure it could wait for ranks that are gone
    if stop_signal:
        sys.exit(128 + stop_signal)


def pick_device(device_type, local_rank, local_world_size):
    """The device of process `local_rank`; CPU processes share the cores instead of fighting for them."""
    if device_type == "cpu":
        torch.set_num_threads(max(1, os.cpu_count() // local_world_size))
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_rank)
    return torch.device(device_type, local_rank)


def gather(tensor):
    """The `tensor` of every rank, on every rank: shape (world_size, *tensor.shape)."""
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor)
    return torch.stack(rows)


def each_loss(losses):
    """The ranks' own losses for the log. They differ, as their windows do; one that stands apart deserves a look."""
    if len(losses) <= 8:
        return " [" + ", ".join(f"rank {rank} {loss:.6f}" for rank, loss in enumerate(losses)) + "]"
    low, high = min(losses), max(losses)
    return f" [lowest rank {losses.index(low)} {low:.6f}, highest rank {losses.index(high)} {high:.6f}]"


def check_start(run, step, rank, device):
    """Stop unless all ranks read the same corpus and start after the same step."""
    corpora, steps = gather(torch.tensor([int(run.identity["corpus"], 16), step], device=device)).T.tolist()
    if other := [r for r, corpus in enumerate(corpora) if corpus != corpora[0]]:
        reason = "give all the same --data (the built-in text differs between Python versions)"
        stop(f"the corpus of rank {', '.join(map(str, other))} is not that of rank 0: {reason}", rank)
    if other := [r for r, start in enumerate(steps) if start != steps[0]]:
        starts = f"rank {other[0]} starts after step {steps[other[0]]}, rank 0 after step {steps[0]}"
        stop(f"{starts}: --out must be a folder that all machines share", rank)


def check_replicas(model, rank):
    """Stop unless the parameters of all ranks are the same, bit by bit."""
    bits = [parameter.detach().view(torch.int32).sum(dtype=torch.int64) for parameter in model.parameters()]
    rows = gather(torch.stack(bits))  # (world_size, number of parameter tensors)
    if other := [r for r in range(len(rows)) if not rows[r].equal(rows[0])]:
        stop(f"the parameters of rank {', '.join(map(str, other))} differ from those of rank 0", rank)


def evaluate(model, run, device, autocast, float_sum, rank):
    """The mean loss in nats per token over every validation window once, without dropout."""
    model.eval()
    loss_sum = torch.zeros((), dtype=float_sum, device=device)
    with torch.no_grad(), autocast:
        share = range(rank, len(run.val_set), dist.get_world_size())  # DDP 7: a DistributedSampler would pad it
        for inputs, targets in DataLoader(run.val_set, batch_size=run.forward_batch, sampler=share):
            inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            loss_sum += model(inputs, targets).loss * len(inputs)
    model.train()
    dist.all_reduce(loss_sum)  # DDP 7: adds up over the ranks
    return loss_sum.item() / len(run.val_set)


def save(args, run, model, optimizer, scaler, step, metrics):
    """Save all that a resumed run needs; returns the reason if that fails, else None."""
    checkpoint = {
        "model": model.state_dict(),  # of the raw module: its names carry no prefix of a wrapper
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "step": step,
        "metrics": metrics,
        "config": asdict(run.config),
        "run": run.identity,
    }
    try:
        gpt.save_checkpoint(args.out, checkpoint)
    except OSError as error:
        return str(error)


def sample(model, run, device, autocast):
    """Text that the model writes after PROMPT."""
    prompt = torch.tensor([run.tokenizer.encode_ordinary(PROMPT)], device=device)  # (1, n_tokens)
    generator = torch.Generator(device).manual_seed(run.identity["seed"])
    with autocast:
        ids = gpt.generate(model, prompt, SAMPLE_TOKENS, run.tokenizer.n_vocab, temperature=0.8, generator=generator)
    return f"sample: {run.tokenizer.decode(ids[0].tolist())}"


def describe(args, run, model, step, where, log):
    """Print the facts of a run before its first step."""
    config, n_parameters = run.config, sum(p.numel() for p in model.parameters())
    log(
        f"preset {args.preset}: {config.n_layers} layers, {config.n_heads} heads, {config.emb_dim} wide, "
        f"{config.context_length} tokens of context, {n_parameters:,} parameters"
        + ("" if args.data else " (for the real thing: --preset gpt2 --data FILE)")
    )
    log(f"device {where}, {args.dtype}{', compiled' if args.compile else ''}, torch {torch.__version__}")
    log(
        f"corpus {args.data or 'built into Python'}, hash {run.identity['corpus']}: {args.tokenizer} tokens in "
        f"{len(run.train_set):,} windows to train on, {len(run.val_set):,} to validate"
    )
    log(
        f"{args.global_batch_size} sequences per step = {run.forward_batch} per forward x {run.accumulation} accumulated "
        f"x {run.n_processes} processes; {run.steps_per_epoch:,} steps per epoch, {run.total_steps:,} in all"
    )
    if step:
        log(f"resumed from {args.out} after step {step}")


def log_step(run, epoch, row, details, gradient_norm, model, log):
    """Print one line about a step. MFU is the share of the GPUs' peak that the model's arithmetic uses."""
    line = f"epoch {epoch + 1}  step {row['step']}/{run.total_steps}  loss {row['train_loss']:.6f}{details}"
    line += f"  norm {gradient_norm:.3f}  lr {row['learning_rate']:.2e}"
    if speed := row["tokens_per_second"]:
        line += f"  {speed:,.0f} tokens/s"
        if run.peak_flops:
            line += f"  MFU {speed * gpt.flops_per_token(model) / (run.peak_flops * run.n_processes):.1%}"
        seconds = (run.total_steps - row["step"]) * row["tokens"] / row["step"] / speed
        line += f"  {timedelta(seconds=round(seconds))} left"
    log(line)


def stop(reason, rank):
    cleanup()  # all ranks come here together
    sys.exit(f"error: {reason}" if rank == 0 else 1)  # DDP 6


def refuse(reason):
    """End with one line and status 2: nothing has begun, and what is wrong can be mended on the command line."""
    print(f"error: {reason}", file=sys.stderr)
    sys.exit(2)


def prepare(args, n_processes):
    """Make ready what a run needs. All that can be refused is refused here, as ValueError or OSError."""
    tokenizer = data.get_tokenizer(args.tokenizer)
    config = gpt.GPTConfig(
        vocab_size=math.ceil(tokenizer.n_vocab / 64) * 64,  # whole tiles for the GPU's matrix units
        context_length=args.context_length,
        emb_dim=gpt.PRESETS[args.preset].emb_dim,
        n_heads=gpt.PRESETS[args.preset].n_heads,
        n_layers=gpt.PRESETS[args.preset].n_layers,
        drop_rate=args.drop_rate,
    )
    forward_batch, accumulation = data.batch_plan(args.global_batch_size, args.batch_size, n_processes)
    tokens = data.load_tokens(args.data, tokenizer)
    train_set, val_set = data.split_tokens(tokens, args.context_length, tokenizer.n_vocab)
    steps_per_epoch = len(train_set) // args.global_batch_size
    if not steps_per_epoch:
        raise ValueError(
            f"the corpus has {len(train_set):,} windows of {args.context_length} tokens to train on, one step needs "
            f"{args.global_batch_size}: give a longer --data, or a smaller --global-batch-size or --context-length"
        )
    identity = {
        "tokenizer": args.tokenizer,
        "corpus": data.fingerprint(tokens),
        "seed": args.seed,
        "global_batch_size": args.global_batch_size,
    }
    half = args.device == "cuda" and args.dtype in ("bfloat16", "float16")
    return SimpleNamespace(
        tokenizer=tokenizer,
        config=config,
        identity=identity,
        train_set=train_set,
        val_set=val_set,
        n_processes=n_processes,
        forward_batch=forward_batch,
        accumulation=accumulation,
        steps_per_epoch=steps_per_epoch,
        total_steps=args.max_steps or args.epochs * steps_per_epoch,
        peak_flops=gpt.peak_flops(torch.cuda.get_device_name()) if half else None,
        checkpoint=gpt.open_run_folder(args.out, args.resume, config, identity) if args.out else None,
    )


def parse_args():
    def positive(text):
        value = int(text)
        if value < 1:
            raise argparse.ArgumentTypeError(f"{text} must be at least 1")
        return value

    def positive_float(text):
        value = float(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} must be above 0")
        return value

    parser = argparse.ArgumentParser(
        description="Train a GPT with DDP.", epilog="What has no default here has it from the preset."
    )
    parser.error = refuse
    flag = parser.add_argument
    flag("--preset", choices=gpt.PRESETS, help="model and recipe (default: tiny on a CPU, small on a GPU)")
    flag("--data", metavar="FILE", help="UTF-8 text, or token ids as .npy or .bin (default: text that Python brings)")
    flag("--tokenizer", choices=("bytes", "gpt2"))
    flag("--context-length", type=positive, metavar="TOKENS", help="length of a sequence")
    flag("--drop-rate", type=float, metavar="SHARE", help="dropout, from 0 to below 1")
    flag("--batch-size", type=positive, metavar="SEQUENCES", help="per process and forward pass, at most")
    flag("--global-batch-size", type=positive, metavar="SEQUENCES", help="per optimizer step, over all processes")
    flag("--epochs", type=positive, help="passes over the corpus, counted from step 0 also with --resume")
    flag("--max-steps", type=positive, metavar="STEPS", help="optimizer steps in all, in place of --epochs")
    flag("--lr", type=positive_float, metavar="RATE", help="highest learning rate")
    flag("--nproc", type=positive, help="processes on this machine (default: one for each GPU, or 2 on a CPU)")
    flag("--nnodes", type=positive, default=1, help="machines, each with --nproc processes (default: %(default)s)")
    flag("--node-rank", type=int, default=0, help="number of this machine, from 0 to NNODES - 1 (default: %(default)s)")
    flag("--seed", type=int, default=123, help="of weights, data order and dropout (default: %(default)s)")
    flag("--device", default="auto", help="auto, cpu or cuda (default: the accelerator if there is one)")
    flag("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16", "float64"))
    flag("--compile", action="store_true", help="torch.compile: faster steps, half a minute later")
    flag("--log-every", type=positive, default=10, metavar="STEPS", help="default: %(default)s")
    flag("--eval-every", type=positive, default=250, metavar="STEPS", help="evaluate and save (default: %(default)s)")
    flag("--out", metavar="DIR", help="keep checkpoint.pt and metrics.csv there (default: write nothing)")
    flag("--resume", action="store_true", help="go on from the checkpoint in --out, if there is one")
    args = parser.parse_args()
    if args.resume and not args.out:
        parser.error("--resume needs --out DIR, the folder with the checkpoint")
    try:
        args.device = gpt.pick_device(args.device, for_ddp=True)
        args.dtype = gpt.pick_dtype(args.dtype, args.device)
    except ValueError as error:
        parser.error(error)
    args.preset = args.preset or ("tiny" if args.device == "cpu" else "small")
    for name, value in gpt.PRESETS[args.preset]._asdict().items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    return args


def find_free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def main():
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, frame: sys.exit(128 + signum))
    args = parse_args()
    n_devices = 0 if args.device == "cpu" else torch.accelerator.device_count()
    args.nproc = args.nproc or n_devices or 2
    if n_devices and args.nproc > n_devices:
        refuse(f"--nproc {args.nproc} is more than the {n_devices} GPUs here: choose at most that, or --device cpu")
    if not 0 <= args.node_rank < args.nnodes:
        refuse(f"--node-rank {args.node_rank} must be from 0 to {args.nnodes - 1}, one less than --nnodes")
    if args.nnodes > 1 and not os.environ.keys() >= {"MASTER_ADDR", "MASTER_PORT"}:
        refuse("--nnodes above 1 needs MASTER_ADDR and MASTER_PORT set, to an address and a free port of machine 0")
    world_size = args.nnodes * args.nproc  # DDP 1
    try:
        prepare(args, world_size)  # tokenizes, if need be, before any process waits for another
    except (ValueError, OSError) as error:
        refuse(error)

    # DDP 1: a port of our own, so that two runs on one machine never meet
    os.environ.setdefault("MASTER_PORT", str(find_free_port()))
    signals = []

    def pass_on(signum, frame):
        signals.append(signum)
        for child in active_children():
            child.terminate()

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, pass_on)  # DDP 1: the processes decide together when to stop; join waits for them
    try:
        spawn(train, args=(world_size, args), nprocs=args.nproc, join=True)  # DDP 1: calls train(0, ...), train(1, ...)
    except ProcessExitedException as error:
        if error.exit_code < 0 and not signals:
            print(f"error: process {error.error_index} was ended by {error.signal_name}", file=sys.stderr)
        if not signals:
            sys.exit(max(1, error.exit_code))
    if signals:
        sys.exit(128 + signals[0])


if __name__ == "__main__":
    main()
