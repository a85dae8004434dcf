"""Train a GPT with DistributedDataParallel (DDP), one process for each GPU, started by torchrun.

    torchrun --standalone --nproc_per_node=4 train_ddp_torchrun.py --preset gpt2 --data corpus.txt --out runs/gpt2

What DDP adds to train_single_gpu.py is marked. Marks 1 to 3 are needed to train on many GPUs, 4 saves time,
5 to 8 are needed to trust the result: grep -n "# DDP [123]" train_ddp_torchrun.py
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends each process without a traceback

import os
import sys
from contextlib import nullcontext
from datetime import timedelta
from itertools import islice

import torch
import torch.distributed as dist  # DDP 1
import torch.distributed.nn  # DDP 1: imported later, by DDP, its default arguments would keep the group alive
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP  # DDP 3
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler  # DDP 2

import data
import gpt


def setup(rank, world_size, device):  # DDP 1
    """Join the group of `world_size` processes that train together, as number `rank`."""
    data.on_signals(signal.SIG_DFL)  # a process that waits for the others could run no handler
    timeout = timedelta(minutes=10)  # for all that it ever waits for another
    # nccl between GPUs, which Windows lacks; gloo between CPUs
    backend = "gloo" if os.name == "nt" else dist.get_default_backend_for_device(device)
    gpu = device if device.type == "cuda" else None  # so that nccl need not guess it
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if rank == 0:
        data.say(f"{backend} waits for {world_size} ranks at {place}")
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
    # After a restart this still holds the addresses of processes that died: each attempt looks under keys of its own.
    store = dist.PrefixStore(f"restart{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    group = {"rank": rank, "world_size": world_size, "store": store, "timeout": timeout, "device_id": gpu}
    try:
        dist.init_process_group(backend, **group)  # DDP 1: waits until all ranks are here
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        sys.exit(f"error: not all {world_size} ranks came to {place}, look at the other machines ({reason})")


def cleanup():  # DDP 1
    """Leave the group."""
    dist.destroy_process_group()


def train(rank, world_size, args, run):
    """Train as `args` says, and exit with the status of the run."""
    local_rank = int(os.environ["LOCAL_RANK"])  # DDP 1: picks the GPU; the rank orders data and output
    device = gpt.pick_device(args, local_rank)  # DDP 1: a GPU of its own for each process
    on_gpu = device.type == "cuda"
    setup(rank, world_size, device)  # DDP 1: from here on the processes can talk to each other
    # DDP 8: with other flags or files a process would train on without an error, or let the others wait for ever
    run.check_same(gather(run.told), "start all with the same flags, files and versions")
    if run.problem:
        cleanup()
        sys.exit(run.finish())

    train_set = run.corpus.train_set
    # DDP 2: all ranks draw the same permutation of the windows; each takes every world_size-th of it, its own share
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
    for step in run.steps():
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
        losses = []  # of the micro-batches; their sum is the mean over all sequences of the step
        for _ in range(run.accumulation):
            inputs, targets = (ids.to(device, non_blocking=True) for ids in next(batches))  # (forward_batch, T) each
            # DDP 4: average once per step, in its last backward(); the forward sets this up, so it stands inside too
            with nullcontext() if len(losses) + 1 == run.accumulation else ddp_model.no_sync():
                with autocast:
                    loss = ddp_model(inputs, targets).loss / run.accumulation  # DDP 3: model() would not average
                scaler.scale(loss).backward()
            losses.append(loss.detach())
        scaler.unscale_(optimizer)  # clipping must see the true gradient
        gradient_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)  # DDP 4: else no_sync() adds up in tensors of its own beside the buckets

        run.note(losses, gradient_norm)
        if run.is_report_step:  # between these the host never waits for the device
            run.log(gather(run.report()), lr)  # DDP 5: a rank's loss is that of its windows, the step's is their mean
        if run.is_eval_step:
            run.log_validation(evaluate(model, run, device, autocast))
        if run.is_save_step:
            # DDP 8: replicas that start alike and average their gradients never differ, not by a bit
            run.check_same(gather({"the model": gpt.checksum(model)}), "a step did not average, or hardware failed")
            run.problem = gather(run.save() if rank == 0 else None)[0]  # DDP 6: one saves; if it cannot, all end
    if run.is_complete:
        run.print("sample: " + gpt.sample(model, run.corpus.tokenizer, args.seed))
    del ddp_model  # DDP 1: it refers to the group, whose threads end in cleanup() only if nobody does
    cleanup()  # DDP 1: not after an exception: it could wait for ever for a rank that died
    sys.exit(run.finish())


def gather(value):  # DDP 5: what every rank has, as a list, on every rank
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@torch.no_grad()
def evaluate(model, run, device, autocast):
    """The mean loss in nats per token over every validation window once, without dropout."""
    val_set, losses = run.corpus.val_set, []
    # DDP 7: each window once; DistributedSampler would repeat some, to give all ranks as many
    indices = range(dist.get_rank(), len(val_set), dist.get_world_size())
    model.eval()
    for inputs, targets in DataLoader(val_set, batch_size=run.forward_batch, sampler=indices):
        with autocast:
            losses.append(model(inputs.to(device), targets.to(device)).loss * len(inputs))
    model.train()
    return sum(gather(sum(loss.item() for loss in losses))) / len(val_set)  # DDP 7: the sum over all ranks


@record  # DDP 1: shows in torchrun's summary the exception that ended a process
def main():
    data.on_signals(data.end_quietly)
    needed = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not os.environ.get(name)]
    # DDP 6: all processes of a machine have the same flags, and one complains
    parser = gpt.make_parser(__doc__, quiet=not missing and os.environ["LOCAL_RANK"] != "0")
    args = parser.parse_args()
    if missing:  # DDP 1: torchrun counts the processes
        parser.error(
            f"no {', '.join(missing)}: torchrun --standalone --nproc_per_node=2 train_ddp_torchrun.py sets them"
        )
    rank, world_size, args.nproc = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    try:
        gpt.resolve_flags(args, for_ddp=True, by_torchrun=True)
        run = data.Run(args, world_size, quiet=rank > 0)  # DDP 6: one process speaks for all
    except (ValueError, OSError) as error:
        parser.error(error)
    train(rank, world_size, args, run)


if __name__ == "__main__":
    main()
