#!/usr/bin/env python3
"""Trains a small language model on real text with flash_ext's attention, and compares it with another attention.

    python benchmarks/train_lm.py --compare               flash_ext and PyTorch's SDPA, same seed, same batches
    python benchmarks/train_lm.py --compare sdpa naive    any two of flash_ext, sdpa, naive
    python benchmarks/train_lm.py --data book.txt         one attention, a text of your own

The text is read byte by byte (vocabulary 256), so losses are in nats per byte: an untrained model has ln 256 = 5.55.
Without --data it is the Python standard library's own sources. Progress goes to stderr, tables to stdout, loss curves
as CSV and PNG to --out. Two attentions differ only in rounding, so their curves must lie on each other.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

# Read by OpenMP when torch loads it: threads that wait spin shortly, then sleep. Without it a step next to other busy
# programs can take seconds (measured on 2 shared cores: mean 575 ms a step, 185 with it; 123 and 127 when left alone).
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import torch
import torch.nn.functional as F
from data import Text, batches, load_text
from harness import (
    BenchmarkError,
    Reporter,
    is_out_of_memory,
    make_folder,
    pick_device,
    provenance,
    run_main,
    stdout_console,
    synchronize,
    write_csv,
)
from model import ATTENTIONS, SIZES, TransformerLM
from rich.table import Table
from torch import Tensor

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULTS = {  # a CPU gets a model that learns in a minute; a GPU the smallest of the real sizes
    "cpu": {"size": "tiny", "batch": 16, "context": 128},
    "cuda": {"size": "small", "batch": 4, "context": 512},
}
VALIDATION_BATCHES = 8
PROMPT, SAMPLE_BYTES = b"def ", 200
CLIP = 1.0  # largest norm of the whole gradient


@dataclass
class Run:
    """What one training run leaves: nats per byte and milliseconds per step, and the final state."""

    attention: str
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    validation: float = math.nan
    peak_mib: float = math.nan  # GPU only
    sample: bytes = b""
    out_of_memory: bool = False


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first 5% of the steps, then a cosine down to a tenth of the peak."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def autocast(args: argparse.Namespace) -> AbstractContextManager:
    """The forward pass in --precision; weights, gradients and optimizer stay float32."""
    dtype = PRECISIONS[args.precision]
    return nullcontext() if dtype == torch.float32 else torch.autocast(args.device, dtype)


def loss_of(model: TransformerLM, batch: tuple[Tensor, Tensor], args: argparse.Namespace) -> Tensor:
    """Mean cross entropy in nats per byte, float32 scalar."""
    inputs, targets = batch
    with autocast(args):
        logits = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def validate(model: TransformerLM, text: Text, args: argparse.Namespace) -> float:
    """Mean loss on a few windows of the validation text, the same for every run."""
    stream = batches(text.validation, args.batch, args.context, args.seed, args.device)
    return statistics.fmean(loss_of(model, b, args).item() for b in islice(stream, VALIDATION_BATCHES))


def training_steps(model: TransformerLM, text: Text, args: argparse.Namespace) -> Iterator[tuple[float, float]]:
    """Trains in place; yields (loss, milliseconds) of each step. With fp16 the loss is scaled against underflow."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    scaler = torch.amp.GradScaler(args.device, enabled=args.precision == "fp16")
    stream = batches(text.train, args.batch, args.context, args.seed, args.device)
    for step, batch in enumerate(islice(stream, args.steps)):
        synchronize(args.device)
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        loss = loss_of(model, batch, args)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        synchronize(args.device)
        yield loss.item(), (time.perf_counter() - start) * 1e3


def train(attention: str, text: Text, args: argparse.Namespace, sample: bool) -> Run:
    """One run from the seed to the sample of generated text; running out of memory is a result, not a crash."""
    run = Run(attention)
    attend = ATTENTIONS[attention]()
    torch.manual_seed(args.seed)
    try:
        with torch.device(args.device):
            model = TransformerLM(SIZES[args.size], attend, args.context)
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with Reporter(f"{attention:9}", args.steps) as progress:
            for loss, ms in training_steps(model, text, args):
                run.losses.append(loss)
                run.step_ms.append(ms)
                progress.advance(f"loss {loss:.3f}  {tokens_per_second(run, args):,.0f} tokens/s")
        if args.device == "cuda":
            run.peak_mib = torch.cuda.max_memory_allocated() / 2**20
        run.validation = validate(model, text, args)
        with autocast(args):
            run.sample = model.generate(PROMPT, SAMPLE_BYTES, seed=args.seed) if sample else b""
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        run.out_of_memory = True
    return run


def tokens_per_second(run: Run, args: argparse.Namespace) -> float:
    """From the median step, so that a slow first step does not count."""
    return args.batch * args.context / statistics.median(run.step_ms) * 1e3 if run.step_ms else math.nan


def loss_table(runs: list[Run], text: Text, args: argparse.Namespace) -> Table:
    """Losses at eleven steps, the validation loss, speed and, for two runs, every |difference| and the largest."""
    title = f"{args.size} on {args.device}, {args.precision}, batch {args.batch} x {args.context} bytes of {text.name}"
    table = Table("loss in nats per byte", *(run.attention for run in runs), title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    pair = len(runs) == 2
    if pair:
        table.add_column("|difference|", justify="right")

    def add(label: str, values: list[float], text: str = ".4f", end: bool = False) -> None:
        difference = [f"{abs(values[0] - values[1]):.1e}"] if pair else []
        table.add_row(label, *(f"{v:{text}}" for v in values), *difference, end_section=end)

    finished = min(len(run.losses) for run in runs)
    shown = sorted({round(i * (finished - 1) / 10) for i in range(11)}) if finished else []
    for step in shown:
        add(f"step {step + 1}", [run.losses[step] for run in runs], end=step == shown[-1])
    add("validation", [run.validation for run in runs], end=True)
    table.add_row("tokens/s", *(f"{tokens_per_second(run, args):,.0f}" for run in runs))
    table.add_row("ms per step", *(f"{statistics.median(r.step_ms):.1f}" if r.step_ms else "-" for r in runs))
    if args.device == "cuda":
        table.add_row("peak MiB", *(f"{run.peak_mib:,.0f}" for run in runs))
    if any(run.out_of_memory for run in runs):
        table.add_row("out of memory", *("OOM" if run.out_of_memory else "" for run in runs))
    if pair and finished:
        table.add_row("max |difference| of the curves", "", "", f"{max(differences(runs)):.1e}", style="bold")
    return table


def differences(runs: list[Run]) -> list[float]:
    """|loss - loss| of two runs at each step that both reached."""
    return [abs(a - b) for a, b in zip(runs[0].losses, runs[1].losses, strict=False)]


def draw(runs: list[Run], title: str, path: Path) -> None:
    """The loss curves in one picture; for two runs their |difference| below them, on a log axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    pair = len(runs) == 2
    figure, axes = plt.subplots(
        1 + pair, 1, figsize=(8, 6 if pair else 4.5), sharex=True, squeeze=False, height_ratios=[3, 1][: 1 + pair]
    )
    top = axes[0][0]
    for run, style in zip(runs, ({"lw": 4, "alpha": 0.45}, {"lw": 1.2, "ls": "--", "color": "black"}), strict=False):
        top.plot(range(1, len(run.losses) + 1), run.losses, label=run.attention, **style)
    top.set(title=title, ylabel="training loss (nats per byte)")
    top.grid(alpha=0.3)
    top.legend()
    if pair:
        below = differences(runs)
        axes[1][0].semilogy(range(1, len(below) + 1), [max(d, 1e-9) for d in below], lw=1, color="tab:red")
        axes[1][0].set(ylabel="|difference|")
        axes[1][0].grid(alpha=0.3)
    axes[-1][0].set(xlabel="step")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def write_results(runs: list[Run], args: argparse.Namespace) -> None:
    """Loss curves as train_lm.csv and train_lm.png in --out; columns of args that the user chose come along."""
    chosen = {"size": args.size, "precision": args.precision, "batch": args.batch, "context": args.context}
    rows = [
        {"attention": run.attention, "step": i + 1, "loss": f"{loss:.6f}", "ms": f"{ms:.3f}", **chosen}
        for run in runs
        for i, (loss, ms) in enumerate(zip(run.losses, run.step_ms, strict=True))
    ]
    if rows:
        write_csv(args.out / "train_lm.csv", rows, provenance(args.device))
        draw(runs, f"{args.size}, {args.precision}, {args.device}", args.out / "train_lm.png")
        print(f"Curves: {args.out / 'train_lm.png'}  {args.out / 'train_lm.csv'}")


def positive(text: str) -> int:
    """argparse type: an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Arguments with the device's defaults filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    names = ", ".join(ATTENTIONS)
    add("--attention", choices=ATTENTIONS, default="flash_ext", help="attention to train with (default flash_ext)")
    add(
        "--compare", nargs="*", metavar="NAME", default=None,
        help=f"train twice and compare: two of {names}; one name is compared with --attention; none means sdpa",
    )  # fmt: skip
    add("--size", choices=SIZES, help="model size (default tiny on a CPU, small on a GPU)")
    add("--precision", choices=PRECISIONS, default="fp32", help="fp32, or autocast to bf16 or fp16 (default fp32)")
    add("--steps", type=positive, default=300, help="training steps (default 300)")
    add("--batch", type=positive, help="windows per step (default 16 on a CPU, 4 on a GPU)")
    add("--context", type=positive, help="bytes per window (default 128 on a CPU, 512 on a GPU)")
    add("--lr", type=float, help="peak learning rate (default: one that suits the size)")
    add("--seed", type=int, default=0, help="seed of weights, batches and sample (default 0)")
    add("--data", type=Path, metavar="FILE", help="UTF-8 text (default: Python's standard library sources)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: the GPU when there is one")
    add("--out", type=Path, metavar="DIR", default=Path(__file__).parent / "out", help="default: benchmarks/out")
    add("--no-sample", dest="sample", action="store_false", help="do not generate text at the end")
    args = parser.parse_args(argv)
    args.device = pick_device(args.device)
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.lr = SIZES[args.size].lr if args.lr is None else args.lr
    if not 0 < args.lr < math.inf:
        raise BenchmarkError(f"--lr {args.lr} must be a number above 0.")
    args.attentions = attentions_of(args)
    return args


def attentions_of(args: argparse.Namespace) -> list[str]:
    """The attentions to train, in order: one, or the two of --compare."""
    if args.compare is None:
        return [args.attention]
    names = list(args.compare) or ["flash_ext" if args.attention == "sdpa" else "sdpa"]
    names = [args.attention, *names] if len(names) == 1 else names
    if len(set(names)) != 2 or len(names) != 2 or not set(names) <= set(ATTENTIONS):
        known = ", ".join(ATTENTIONS)
        raise BenchmarkError(f"--compare takes two different names of {known}, but got {' '.join(names)}.")
    return names


def main() -> None:
    """Trains once or twice, prints the table and a sample, writes the curves."""
    args = parse()
    args.out = make_folder(args.out)
    text = load_text(args.data, args.context)
    for name in args.attentions:  # one that cannot be had is told before anything is trained
        ATTENTIONS[name]()
    print(f"{text.train.numel():,} bytes of {text.name} to train on, {args.steps} steps", file=sys.stderr)
    runs = [train(name, text, args, args.sample and index == 0) for index, name in enumerate(args.attentions)]
    console = stdout_console()
    console.print(loss_table(runs, text, args))
    if runs[0].sample:
        console.print(f"\nWhat the {runs[0].attention} model writes after {PROMPT.decode()!r}:", style="bold")
        sample = (PROMPT + runs[0].sample).decode("utf-8", errors="replace")
        print("".join(c if c.isprintable() or c == "\n" else "?" for c in sample) + "\n", flush=True)
    write_results(runs, args)


if __name__ == "__main__":
    run_main(main)
