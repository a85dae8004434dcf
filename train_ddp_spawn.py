"""Train a GPT with DistributedDataParallel (DDP), one process for each GPU, started by torch.multiprocessing.spawn.

    python train_ddp_spawn.py --preset gpt2 --data corpus.txt --out runs/gpt2

What DDP adds to train_single_gpu.py is marked. Needed to train on many GPUs: 1 processes, 2 data, 3 model. To save
time: 4. To trust the result: 5 losses, 6 output, 7 evaluation, 8 checks: grep -n "# DDP [123]" train_ddp_spawn.py
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends each process without a traceback

import logging
import os
import sys
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist  # DDP 1
import torch.distributed.nn  # DDP 1: later, DDP would import it, and its default arguments would hold the group
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.multiprocessing import ProcessExitedException, active_children, parent_process, spawn
from torch.nn.parallel import DistributedDataParallel as DDP  # DDP 3
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler  # DDP 2

import data
import gpt


def setup(rank, world_size, device):  # DDP 1
    """Join the group of `world_size` processes that train together, as number `rank`."""
    data.on_signals(signal.SIG_DFL)  # while it waits for the others, Python could run no handler of ours
    timeout = timedelta(minutes=10)  # the longest that it waits for another process, now or later
    # nccl connects GPUs, but not on Windows; gloo connects CPUs
    backend = "gloo" if os.name == "nt" else dist.get_default_backend_for_device(device)
    gpu = device if device.type == "cuda" else None  # so that nccl need not guess it
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # main() found the port
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if rank == 0:
        data.say(f"{backend} waits for {world_size} processes at {place}")
    try:  # DDP 1: init_process_group waits until all ranks are here
        dist.init_process_group(backend, rank=rank, world_size=world_size, timeout=timeout, device_id=gpu)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        sys.exit(f"error: not all {world_size} processes came to {place}, look there and at the others ({reason})")


def cleanup():  # DDP 1
    """Leave the group."""
    dist.destroy_process_group()


def train(local_rank, world_size, args):
    """Train as `args` says, and exit with the status of the run."""
    if not parent_process().is_alive():
        sys.exit(1)  # it died before torch could arrange that this process ends with it
    rank = args.node_rank * args.nproc + local_rank  # DDP 1: orders data and output; the local rank picks the GPU
    device = gpt.pick_device(args, local_rank)  # DDP 1: a GPU of its own for each process
    on_gpu = device.type == "cuda"
    setup(rank, world_size, device)  # DDP 1: from here on the processes can talk to each other
    run = data.Run(args, world_size, quiet=rank > 0)  # DDP 6: one process speaks for all
    # DDP 8: with other flags or files a process would train something else, or make the others wait for ever
    run.problem = data.difference(all_gather(run.must_agree), "start all with the same flags, files and versions")
    if run.problem:
        cleanup()
        sys.exit(run.finish())

    train_set = run.corpus.train_set
    # DDP 2: of one permutation each rank takes every world_size-th window, so a step has the windows it has on one GPU
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, shuffle=True, seed=args.seed)  # DDP 2

    torch.manual_seed(args.seed)
    dtype, autocast, scaler = gpt.number_formats(args)
    model = gpt.GPT(gpt.config_for(args, run.corpus.tokenizer.n_vocab)).to(device, dtype)
    # DDP 3: gives all ranks the weights of rank 0, and averages their gradients while backward() runs
    ddp_model = DDP(model, device_ids=[local_rank] if on_gpu else None, gradient_as_bucket_view=True)  # DDP 3
    ddp_model = torch.compile(ddp_model) if args.compile else ddp_model
    groups = gpt.weight_decay_groups(model, weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)

    run.start(model=model, optimizer=optimizer, scaler=scaler)  # restores them where a checkpoint is resumed
    for step in run.steps():  # until all are done, or a signal or a problem ends the run
        epoch, step_of_epoch = divmod(step - 1, run.steps_per_epoch)
        if step_of_epoch == 0 or step == run.first_step:  # a resumed run begins in the middle of an epoch
            sampler.set_epoch(epoch)  # DDP 2: without it every epoch has the order of the first
            indices = islice(sampler, step_of_epoch * run.forward_batch * run.accumulation, None)
            batches = iter(DataLoader(train_set, batch_size=run.forward_batch, sampler=indices, pin_memory=on_gpu))

        if args.drop_rate:  # the masks depend on the step, so that a resumed run repeats them
            torch.manual_seed(args.seed + 100_003 * step + rank)  # DDP 3: and on the rank, or all drop the same units
        lr = gpt.learning_rate(step, run.total_steps, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        losses = []  # of each forward pass; their sum is the mean over the windows of this process in this step
        for _ in range(run.accumulation):
            inputs, targets = (ids.to(device, non_blocking=True) for ids in next(batches))  # (forward_batch, T) each
            # DDP 4: only the last backward() of a step averages; the forward pass decides it, so both stand inside
            with nullcontext() if len(losses) + 1 == run.accumulation else ddp_model.no_sync():
                with autocast:
                    loss = ddp_model(inputs, targets).loss / run.accumulation  # DDP 3: model() would not average
                scaler.scale(loss).backward()
            losses.append(loss.detach())
        scaler.unscale_(optimizer)  # clipping must see the true gradient
        gradient_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)  # DDP 4: with None, no_sync() would make a second set of gradients

        run.end_step(losses, gradient_norm)
        # DDP 5: the loss of a step is the mean over all ranks; a signal to one stops all. To an all_gather() come all
        # ranks or none, else some would wait for ever.
        if run.is_report_step:  # only here does the host wait for the device
            run.log(all_gather(run.report()), lr)  # DDP 5
        if run.is_eval_step:
            run.log_validation(evaluate(model, run, device, autocast))
        if run.is_save_step:
            # DDP 8: with equal starts and averaged gradients all models stay equal, bit by bit
            run.problem = data.difference(all_gather({"model": gpt.checksum(model)}), "was each step averaged?")
            run.problem = run.problem or all_gather(run.save() if rank == 0 else None)[0]  # DDP 6: one saves for all
    if run.is_complete:
        run.print("sample: " + gpt.sample(model, run.corpus.tokenizer, args.seed))
    del ddp_model  # DDP 1: it holds the group, whose threads end in cleanup() only if nothing does
    cleanup()  # DDP 1: not after an exception: it could wait for ever for a rank that died
    sys.exit(run.finish())


def all_gather(value):  # DDP 5: a list with the value of every rank, on every rank
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@torch.no_grad()
def evaluate(model, run, device, autocast):
    """The mean loss in nats per token over every validation window once, without dropout."""
    val_set, losses = run.corpus.val_set, []
    # DDP 7: each window once (DistributedSampler would repeat some), by the raw model, as there is nothing to average
    indices = range(dist.get_rank(), len(val_set), dist.get_world_size())
    model.eval()
    for inputs, targets in DataLoader(val_set, batch_size=run.forward_batch, sampler=indices):
        with autocast:
            losses.append(model(inputs.to(device), targets.to(device)).loss * len(inputs))
    model.train()
    return sum(all_gather(sum(loss.item() for loss in losses))) / len(val_set)  # DDP 7: the sum over all ranks


def pass_on(signals, signum, frame):
    """Tell the processes, which agree where to stop. With none, or at a second Ctrl-C, end at once."""
    at_once = data.is_second_ctrl_c(signum, signals)
    for process in active_children():
        process.kill() if at_once else os.kill(process.pid, signum)
    if at_once or not active_children():
        sys.exit(128 + signum)


def main():
    data.on_signals(data.end_quietly)
    parser = gpt.make_parser(__doc__)
    flag, count = parser.add_argument, gpt.number(int, 1, 2**31)
    flag("--nproc", type=count, metavar="N", help="processes here (default: the number of GPUs, 2 on a CPU)")
    flag("--nnodes", type=count, default=1, metavar="N", help="machines, of --nproc processes each (default: 1)")
    flag("--node-rank", type=gpt.number(int, 0, 2**31), default=0, metavar="N", help="of this machine (default: 0)")
    args = parser.parse_args()
    try:
        gpt.resolve_flags(args, for_ddp=True)
        if args.node_rank >= args.nnodes or (args.nnodes > 1 and {"MASTER_ADDR", "MASTER_PORT"} - os.environ.keys()):
            raise ValueError("--nnodes needs a --node-rank below it, MASTER_ADDR of the first machine, and MASTER_PORT")
        world_size = args.nnodes * args.nproc  # DDP 1: processes on all machines
        data.Run(args, world_size, quiet=args.node_rank > 0)  # DDP 8: a trial: refuses or tokenizes before they start
    except (ValueError, OSError) as error:
        parser.error(error)
    os.environ.setdefault("MASTER_PORT", str(get_free_port()))  # DDP 1: so that two runs on one machine do not meet
    data.on_signals(partial(pass_on, []))
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # no warning for each that ends
    try:
        spawn(train, args=(world_size, args), nprocs=args.nproc, join=True)  # DDP 1: train(0, ...), train(1, ...), ...
    except ProcessExitedException as error:
        if error.signal_name not in (None, "SIGINT", "SIGTERM", "SIGHUP"):
            print(f"error: process {error.error_index} was ended by {error.signal_name}: add --resume", file=sys.stderr)
        sys.exit(error.exit_code if error.exit_code > 0 else 128 - error.exit_code)


if __name__ == "__main__":
    main()
