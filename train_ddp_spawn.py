"""Train a GPT with DistributedDataParallel (DDP), one process for each GPU, started by torch.multiprocessing.spawn.

    python train_ddp_spawn.py                                             # all GPUs of the machine, or 2 CPU processes
    python train_ddp_spawn.py --preset gpt2 --data corpus.txt --out runs/gpt2
    MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 python train_ddp_spawn.py --nnodes 2 --node-rank 0     # first of 2 machines

What DDP adds to train_single_gpu.py is marked. Marks 1 to 3 are needed to train on many GPUs, 4 saves time,
5 to 8 are needed to trust the result:

    grep -n "# DDP [123]" train_ddp_spawn.py
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends each process without a traceback

import argparse
import logging
import math
import os
import socket
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist  # DDP 1
import torch.distributed.nn  # DDP 1: imported later, by DDP, its default arguments would keep the group alive
from torch.multiprocessing import ProcessExitedException, active_children, spawn
from torch.nn.parallel import DistributedDataParallel as DDP  # DDP 3
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler  # DDP 2

import data
import gpt

WEIGHT_DECAY = 0.1
MAX_GRADIENT_NORM = 1.0
WARMUP_SHARE = 0.05  # of all steps
PROMPT = "The "
SAMPLE_TOKENS = 200
TIMEOUT = timedelta(minutes=10)  # for a process that waits for another


def setup(rank, world_size, device):  # DDP 1
    """Join the group of `world_size` processes that train together, as number `rank`."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    backend = dist.get_default_backend_for_device(device)  # nccl between GPUs, gloo between CPUs
    if sys.platform == "win32":  # PyTorch has neither nccl nor libuv there
        backend, os.environ["USE_LIBUV"] = "gloo", "0"
    gpu = device if device.type == "cuda" else None  # so that nccl need not guess it
    dist.init_process_group(  # DDP 1: waits until all ranks are here
        backend, rank=rank, world_size=world_size, timeout=TIMEOUT, device_id=gpu
    )


def cleanup():  # DDP 1
    """Leave the group."""
    dist.destroy_process_group()


def train(local_rank, world_size, args):
    """Train as `args` says, as process `local_rank` of this machine; exits with 128 + a signal that ended it early."""
    rank = args.node_rank * args.nproc + local_rank  # DDP 1: orders data and output; the local rank picks the GPU
    device = pick_device(args.device, local_rank, args.nproc)  # DDP 1: a GPU of its own for each process
    setup(rank, world_size, device)  # DDP 1: from here on the processes can talk to each other
    run = prepare(args, world_size)
    log = partial(print, flush=True) if rank == 0 else lambda line: None  # DDP 6: one process speaks for all

    train_set = run.corpus.train_set
    # DDP 2: all ranks draw the same permutation of the windows; each takes every world_size-th of it, its own share
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, shuffle=True, seed=args.seed)  # DDP 2
    windows = data.SkipSampler(sampler)  # can begin in the middle of an epoch
    loader = DataLoader(train_set, batch_size=run.forward_batch, sampler=windows, pin_memory=device.type == "cuda")

    torch.manual_seed(args.seed)
    model = gpt.GPT(run.config).to(device, torch.float64 if args.dtype == "float64" else torch.float32)
    # DDP 3: gives all ranks the weights of rank 0, and averages their gradients while backward() runs
    gpus = [local_rank] if device.type == "cuda" else None
    ddp_model = DDP(model, device_ids=gpus, gradient_as_bucket_view=True)  # DDP 3
    ddp_model = torch.compile(ddp_model) if args.compile else ddp_model
    groups = gpt.weight_decay_groups(model, WEIGHT_DECAY)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16")
    autocast = gpt.autocast_for(args)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32

    step, metrics = gpt.restore(run.checkpoint, model, optimizer, scaler)
    log(gpt.describe(args, run, model, step) + f"\nbackend {dist.get_backend()}")
    # DDP 8: ranks that read different files would train on without an error
    check_same("corpus", run.corpus.hash, "give all the same --data; the text built into Python differs by version")
    check_same("first step", step + 1, "--out must be one folder that all machines share")

    signals = []
    on_signal(lambda signum, frame: signals.append(signum))  # takes note; the loop acts at the next log step
    float_sum = torch.float32 if device.type == "mps" else torch.float64  # which mps does not have
    bad_step = torch.tensor(math.inf, dtype=float_sum, device=device)  # the first whose loss or gradient is not finite
    tokens_per_step = args.global_batch_size * args.context_length
    first_step, timed_steps, stop_signal = step + 1, 0, 0
    for step in range(first_step, run.total_steps + 1):
        epoch, step_of_epoch = divmod(step - 1, run.steps_per_epoch)
        if step == first_step or step_of_epoch == 0:
            sampler.set_epoch(epoch)  # DDP 2: without it every epoch has the order of the first
            windows.n_skip = step_of_epoch * run.forward_batch * run.accumulation
            batches = iter(loader)

        if args.drop_rate:  # the masks depend on the step, so that a resumed run repeats them
            torch.manual_seed(args.seed + 100_003 * step + rank)  # DDP 3: and on the rank, or all drop the same units
        lr = gpt.learning_rate(step, run.total_steps, args.lr, WARMUP_SHARE)
        for group in optimizer.param_groups:
            group["lr"] = lr
        step_loss = torch.zeros((), dtype=float_sum, device=device)
        for micro_step in range(run.accumulation):
            inputs, targets = (ids.to(device, non_blocking=True) for ids in next(batches))  # (forward_batch, T) each
            # DDP 4: average once per step, in its last backward(); the forward sets this up, so it stands inside too
            with nullcontext() if micro_step + 1 == run.accumulation else ddp_model.no_sync():
                with autocast:
                    loss = ddp_model(inputs, targets).loss / run.accumulation  # DDP 3: model() would not average
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

        timed_steps += 1
        if step == first_step:  # compiles and warms up, so the clock starts after it
            step_loss.item()
            timed_steps, clock = 0, time.perf_counter()
        log_now, evaluate_now = (step % n == 0 or step == run.total_steps for n in (args.log_every, args.eval_every))
        if log_now or evaluate_now:  # between these the host never waits for the device
            # DDP 5: a rank's loss is that of its own windows; the loss of the step is the mean over the ranks
            reports = gather((step_loss.item(), max(signals, default=0), bad_step.item()))
            losses, stop_signals, bad_steps = zip(*reports)
            stop_signal, bad = max(stop_signals), min(bad_steps)
            if bad <= step or (scaler.is_enabled() and scaler.get_scale() < 1):
                stop(f"the loss or its gradient is not finite at step {min(bad, step):.0f}: try a lower --lr")
            now = time.perf_counter()
            row = {"step": step, "tokens": step * tokens_per_step, "learning_rate": lr}
            if log_now:
                row["train_loss"] = sum(losses) / len(losses)
                row["tokens_per_second"] = timed_steps * tokens_per_step / (now - clock) if timed_steps else None
                log(gpt.describe_step(args, run, model, row, losses, gradient_norm.item()))
                timed_steps, clock = 0, now
            if evaluate_now:
                # DDP 8: replicas that start alike and average their gradients never differ, not by a bit
                check_same("model", gpt.checksum(model), "look for a step without averaging, or faulty hardware")
                row["val_loss"] = evaluate(model, run, device, autocast, float_sum)
                log(f"step {step}: validation loss {row['val_loss']:.6f}")
                if not math.isfinite(row["val_loss"]):
                    stop(f"the validation loss is not finite after step {step}: try a lower --lr")
            metrics.append([row.get(name) for name in gpt.METRICS])
            if args.out and (evaluate_now or stop_signal):
                failure = gpt.save(run, model, optimizer, scaler, step, metrics) if rank == 0 else None  # DDP 6
                failure = gather(failure)[0]  # DDP 6: all stop if rank 0 must
                if failure:
                    stop(failure)
            clock += time.perf_counter() - now
        if step_of_epoch + 1 == run.steps_per_epoch:
            log(f"Epoch {epoch + 1} completed")
        if stop_signal:
            saved = f"saved in {args.out}; --resume goes on" if args.out else "nothing was saved without --out"
            log(f"stopped by {signal.Signals(stop_signal).name} after step {step}: {saved}")
            break
    else:
        if rank == 0:  # DDP 6: the raw module waits for no other rank
            log(gpt.sample(model, run.corpus.tokenizer, PROMPT, SAMPLE_TOKENS, args.seed))
        log(f"written to {args.out}" if args.out else "nothing was written: --out DIR keeps a checkpoint")
    del ddp_model  # DDP 1: it refers to the group, whose threads end in cleanup() only if nobody does
    cleanup()  # DDP 1: not after an exception: it could wait for ever for a rank that died
    if stop_signal:
        sys.exit(128 + stop_signal)


def pick_device(device_type, local_rank, local_world_size):  # DDP 1: a device for each process
    if device_type == "cpu":
        torch.set_num_threads(max(1, os.cpu_count() // local_world_size))  # else each takes a thread per core
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_rank)
    return torch.device(device_type, local_rank)


def gather(value):  # DDP 5: what every rank has, as a list, on every rank
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_same(what, value, hint):  # DDP 8: stops all ranks where one differs
    values = gather(value)
    if different := [str(rank) for rank, other in enumerate(values) if other != values[0]]:
        stop(f"the {what} of rank {', '.join(different)} is not that of rank 0: {hint}")


def evaluate(model, run, device, autocast, float_sum):
    """The mean loss in nats per token over every validation window once, without dropout."""
    val_set = run.corpus.val_set
    # DDP 7: each window once; DistributedSampler would repeat some, to give all ranks as many
    share = range(dist.get_rank(), len(val_set), dist.get_world_size())
    loader = DataLoader(val_set, batch_size=run.forward_batch, sampler=share)
    loss_sum = torch.zeros((), dtype=float_sum, device=device)
    model.eval()
    with torch.no_grad(), autocast:
        for inputs, targets in loader:
            loss_sum += model(inputs.to(device), targets.to(device)).loss * len(inputs)
    model.train()
    dist.all_reduce(loss_sum)  # DDP 7: the sum over all ranks
    return loss_sum.item() / len(val_set)


def stop(reason):
    """End a run that cannot go on; the last checkpoint stays."""
    if dist.get_rank() == 0:
        print(f"error: {reason}", file=sys.stderr, flush=True)
    dist.barrier()  # DDP 6: all ranks come here together, and none ends before the reason is out
    os._exit(1)  # DDP 1: at once: an orderly exit can hang where a DDP model still refers to the group


def prepare(args, n_processes=1):
    """Make ready what a run needs. All that can be refused is refused here, as ValueError or OSError."""
    corpus = data.open_corpus(args.data, args.tokenizer, args.context_length)
    run = SimpleNamespace(corpus=corpus, n_processes=n_processes, folder=args.out)
    run.forward_batch, run.accumulation, run.steps_per_epoch = data.plan_steps(
        len(corpus.train_set), args.global_batch_size, args.batch_size, n_processes
    )
    run.total_steps = args.max_steps or args.epochs * run.steps_per_epoch
    run.config = gpt.config_for(args, corpus.tokenizer.n_vocab)
    # What else decides the losses: a checkpoint goes on only where it is the same.
    run.identity = {"tokenizer": args.tokenizer, "corpus": corpus.hash, "seed": args.seed}
    run.identity["global_batch_size"] = args.global_batch_size
    run.checkpoint = gpt.open_run_folder(args.out, args.resume, run.config, run.identity) if args.out else None
    return run


def on_signal(handler):
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, handler)


def refuse(reason):
    """End with one line and status 2: nothing has begun yet."""
    print(f"error: {reason}", file=sys.stderr)
    sys.exit(2)


def parse_args():
    parser = argparse.ArgumentParser(description="Train a GPT with DDP, from processes that this script spawns.")
    parser.error = refuse
    gpt.add_flags(parser)
    flag = parser.add_argument
    flag("--nproc", type=int, metavar="N", help="processes on this machine (default: its number of GPUs, 2 on a CPU)")
    flag("--nnodes", type=int, default=1, metavar="N", help="machines, each with --nproc processes (default: 1)")
    flag("--node-rank", type=int, default=0, metavar="N", help="of this machine, 0 to NNODES - 1 (default: 0)")
    return parser.parse_args()


def resolve_processes(args):  # DDP 1: how many processes, and where they meet
    n_gpus = 0 if args.device == "cpu" else torch.accelerator.device_count()
    args.nproc = (n_gpus or 2) if args.nproc is None else args.nproc
    if args.nproc < 1 or (n_gpus and args.nproc > n_gpus):
        raise ValueError(f"--nproc {args.nproc} must be at least 1, and on GPUs at most their number, {n_gpus} here")
    if not 0 <= args.node_rank < args.nnodes:
        raise ValueError(f"--node-rank {args.node_rank} must be from 0 to --nnodes - 1, which is {args.nnodes - 1}")
    if args.nnodes > 1 and not os.environ.keys() >= {"MASTER_ADDR", "MASTER_PORT"}:
        raise ValueError("--nnodes needs MASTER_ADDR and MASTER_PORT set, to the first machine and a free port on it")
    if "MASTER_PORT" not in os.environ:  # a port of its own, so that two runs on one machine do not meet
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    return args.nnodes * args.nproc


def main():
    signals = []
    on_signal(lambda signum, frame: sys.exit(128 + signum))
    args = parse_args()
    try:
        gpt.resolve_flags(args, for_ddp=True)
        world_size = resolve_processes(args)
        prepare(args, world_size)  # DDP 1: tokenizes, if need be, before any process waits for another
    except (ValueError, OSError) as error:
        refuse(error)

    def pass_on(signum, frame):
        signals.append(signum)
        processes = active_children()
        for process in processes:
            os.kill(process.pid, signum)
        if not processes:  # it came before the first one started
            sys.exit(128 + signum)

    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # no warning of each that it has to end
    on_signal(pass_on)  # the processes agree where to stop, and spawn waits for them
    try:
        spawn(train, args=(world_size, args), nprocs=args.nproc, join=True)  # DDP 1: train(0, ...), train(1, ...), ...
    except ProcessExitedException as error:
        if error.signal_name and not signals:
            print(f"error: process {error.error_index} was ended by {error.signal_name}: add --resume", file=sys.stderr)
        sys.exit(128 + signals[0] if signals else max(1, error.exit_code))


if __name__ == "__main__":
    main()
