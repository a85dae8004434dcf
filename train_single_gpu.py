"""Train a GPT on one device: the baseline, to which the two DDP scripts add the lines that they mark with "DDP".

python train_single_gpu.py                                            # a tiny model, text that comes with Python
python train_single_gpu.py --preset gpt2 --data corpus.txt --out runs/gpt2
python train_single_gpu.py --preset gpt2 --data corpus.txt --out runs/gpt2 --resume
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends each process without a traceback

import argparse
import math
import sys
import time
from functools import partial
from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, RandomSampler

import data
import gpt

WEIGHT_DECAY = 0.1
MAX_GRADIENT_NORM = 1.0
WARMUP_SHARE = 0.05  # of all steps
PROMPT = "The "
SAMPLE_TOKENS = 200


def train(args):
    """Train as `args` says; exits with 128 + a signal that ended it early."""
    device = torch.device(args.device)
    run = prepare(args)
    log = partial(print, flush=True)

    train_set = run.corpus.train_set
    sampler = RandomSampler(train_set, generator=torch.Generator())
    windows = data.SkipSampler(sampler)  # can begin in the middle of an epoch
    loader = DataLoader(train_set, batch_size=run.forward_batch, sampler=windows, pin_memory=device.type == "cuda")

    torch.manual_seed(args.seed)
    model = gpt.GPT(run.config).to(device, torch.float64 if args.dtype == "float64" else torch.float32)
    trained_model = torch.compile(model) if args.compile else model
    groups = gpt.weight_decay_groups(model, WEIGHT_DECAY)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16")
    autocast = gpt.autocast_for(args)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32

    step, metrics = gpt.restore(run.checkpoint, model, optimizer, scaler)
    log(gpt.describe(args, run, model, step))

    signals = []
    on_signal(lambda signum, frame: signals.append(signum))  # takes note; the loop acts at the next log step
    float_sum = torch.float32 if device.type == "mps" else torch.float64  # which mps does not have
    bad_step = torch.tensor(math.inf, dtype=float_sum, device=device)  # the first whose loss or gradient is not finite
    tokens_per_step = args.global_batch_size * args.context_length
    first_step, timed_steps, stop_signal = step + 1, 0, 0
    for step in range(first_step, run.total_steps + 1):
        epoch, step_of_epoch = divmod(step - 1, run.steps_per_epoch)
        if step == first_step or step_of_epoch == 0:
            sampler.generator.manual_seed(args.seed + epoch)
            windows.n_skip = step_of_epoch * run.forward_batch * run.accumulation
            batches = iter(loader)

        if args.drop_rate:  # the masks depend on the step, so that a resumed run repeats them
            torch.manual_seed(args.seed + 100_003 * step)
        lr = gpt.learning_rate(step, run.total_steps, args.lr, WARMUP_SHARE)
        for group in optimizer.param_groups:
            group["lr"] = lr
        step_loss = torch.zeros((), dtype=float_sum, device=device)
        for _ in range(run.accumulation):
            inputs, targets = (ids.to(device, non_blocking=True) for ids in next(batches))  # (forward_batch, T) each
            with autocast:
                loss = trained_model(inputs, targets).loss / run.accumulation
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
            losses, stop_signal, bad = [step_loss.item()], max(signals, default=0), bad_step.item()
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
                row["val_loss"] = evaluate(model, run, device, autocast, float_sum)
                log(f"step {step}: validation loss {row['val_loss']:.6f}")
                if not math.isfinite(row["val_loss"]):
                    stop(f"the validation loss is not finite after step {step}: try a lower --lr")
            metrics.append([row.get(name) for name in gpt.METRICS])
            if args.out and (evaluate_now or stop_signal):
                failure = gpt.save(run, model, optimizer, scaler, step, metrics)
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
        log(gpt.sample(model, run.corpus.tokenizer, PROMPT, SAMPLE_TOKENS, args.seed))
        log(f"written to {args.out}" if args.out else "nothing was written: --out DIR keeps a checkpoint")
    if stop_signal:
        sys.exit(128 + stop_signal)


def evaluate(model, run, device, autocast, float_sum):
    """The mean loss in nats per token over every validation window once, without dropout."""
    val_set = run.corpus.val_set
    loader = DataLoader(val_set, batch_size=run.forward_batch)
    loss_sum = torch.zeros((), dtype=float_sum, device=device)
    model.eval()
    with torch.no_grad(), autocast:
        for inputs, targets in loader:
            loss_sum += model(inputs.to(device), targets.to(device)).loss * len(inputs)
    model.train()
    return loss_sum.item() / len(val_set)


def stop(reason):
    """End a run that cannot go on; the last checkpoint stays."""
    sys.exit(f"error: {reason}")


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
    parser = argparse.ArgumentParser(description="Train a GPT on one device.")
    parser.error = refuse
    gpt.add_flags(parser)
    return parser.parse_args()


def main():
    on_signal(lambda signum, frame: sys.exit(128 + signum))
    args = parse_args()
    try:
        gpt.resolve_flags(args)
        prepare(args)
    except (ValueError, OSError) as error:
        refuse(error)
    train(args)


if __name__ == "__main__":
    main()
