"""Train a GPT on one device: the baseline, to which the two DDP scripts add the lines that they mark with "DDP".

python train_single_gpu.py --preset gpt2 --data corpus.txt --out runs/gpt2
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends each process without a traceback

import sys
from itertools import islice

import torch
from torch.utils.data import DataLoader, RandomSampler

import data
import gpt


def train(args, run):
    """Train as `args` says, and exit with the status of `run`."""
    device = gpt.pick_device(args)
    on_gpu = device.type == "cuda"

    train_set = run.corpus.train_set
    sampler = RandomSampler(train_set, generator=torch.Generator())  # seeded in each epoch

    torch.manual_seed(args.seed)
    dtype, autocast, scaler = gpt.number_formats(args)
    model = gpt.GPT(gpt.config_for(args, run.corpus.tokenizer.n_vocab)).to(device, dtype)
    trained_model = torch.compile(model) if args.compile else model
    groups = gpt.weight_decay_groups(model, weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)

    run.start(model=model, optimizer=optimizer, scaler=scaler)  # restores them where a checkpoint is resumed
    for step in run.steps():  # until all are done, or a signal or a problem ends the run
        epoch, step_of_epoch = divmod(step - 1, run.steps_per_epoch)
        if step_of_epoch == 0 or step == run.first_step:  # a resumed run begins in the middle of an epoch
            sampler.generator.manual_seed(args.seed + epoch)
            indices = islice(sampler, step_of_epoch * run.forward_batch * run.accumulation, None)
            batches = iter(DataLoader(train_set, batch_size=run.forward_batch, sampler=indices, pin_memory=on_gpu))

        if args.drop_rate:  # the masks depend on the step, so that a resumed run repeats them
            torch.manual_seed(args.seed + 100_003 * step)
        lr = gpt.learning_rate(step, run.total_steps, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        losses = []  # of each forward pass; their sum is the mean over the windows of this process in this step
        for _ in range(run.accumulation):
            inputs, targets = (ids.to(device, non_blocking=True) for ids in next(batches))  # (forward_batch, T) each
            with autocast:
                loss = trained_model(inputs, targets).loss / run.accumulation
            scaler.scale(loss).backward()
            losses.append(loss.detach())
        scaler.unscale_(optimizer)  # clipping must see the true gradient
        gradient_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

        run.end_step(losses, gradient_norm)
        if run.is_report_step:  # only here does the host wait for the device
            run.log([run.report()], lr)
        if run.is_eval_step:
            run.log_validation(evaluate(model, run, device, autocast))
        if run.is_save_step:
            run.problem = run.save()
    if run.is_complete:
        run.print("sample: " + gpt.sample(model, run.corpus.tokenizer, args.seed))
    sys.exit(run.finish())


@torch.no_grad()
def evaluate(model, run, device, autocast):
    """The mean loss in nats per token over every validation window once, without dropout."""
    val_set, losses = run.corpus.val_set, []
    model.eval()
    for inputs, targets in DataLoader(val_set, batch_size=run.forward_batch):
        with autocast:
            losses.append(model(inputs.to(device), targets.to(device)).loss * len(inputs))
    model.train()
    return sum(loss.item() for loss in losses) / len(val_set)


def main():
    data.on_signals(data.end_quietly)
    parser = gpt.make_parser(__doc__)
    args = parser.parse_args()
    try:
        gpt.resolve_flags(args)
        run = data.Run(args)
    except (ValueError, OSError) as error:
        parser.error(error)
    train(args, run)


if __name__ == "__main__":
    main()
