"""Trains the language model on text, once or with two attentions that are compared: losses, speed, a sample of text.

Called by train_lm.py; stepping.py measures with the same parts of a step. Losses are in nats per byte.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from data import Text, batches
from harness import Reporter, is_out_of_memory, release_memory, synchronize
from limits import float32_products
from model import ATTENTIONS, SIZES, TransformerLM
from tables import Table, make_table
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import AdamW

if TYPE_CHECKING:
    from train_lm import Args

PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
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


# ---- the parts of a step ----


def autocast(precision: str, device: str) -> AbstractContextManager:
    """The forward pass in a precision; weights, gradients and optimizer stay float32."""
    dtype = PRECISIONS[precision]
    return nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of (B, S, vocab) logits in nats per token, float32 scalar."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def make_optimizer(model: TransformerLM, lr: float, precision: str, device: str) -> tuple[AdamW, GradScaler]:
    """AdamW on the float32 weights; with fp16 the loss is scaled against underflow, else the scaler does nothing."""
    optimizer = AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return optimizer, GradScaler(device, enabled=precision == "fp16")


def update(model: TransformerLM, optimizer: AdamW, scaler: GradScaler) -> None:
    """Clips the gradients, changes the weights, frees the gradients."""
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first 5% of the steps, then a cosine down to a tenth of the peak."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


# ---- training ----


def loss_of(model: TransformerLM, batch: tuple[Tensor, Tensor], args: Args) -> Tensor:
    """Mean cross entropy of a batch of (inputs, targets), float32 scalar."""
    inputs, targets = batch
    with autocast(args.precision, args.device):
        logits = model(inputs)
    return cross_entropy(logits, targets)


@torch.no_grad()
def validate(model: TransformerLM, text: Text, args: Args) -> float:
    """Mean loss on a few windows of the validation text, the same for every run."""
    stream = batches(text.validation, args.batch, args.context, args.seed, args.device)
    return statistics.fmean(loss_of(model, b, args).item() for b in islice(stream, VALIDATION_BATCHES))


def training_steps(model: TransformerLM, text: Text, args: Args) -> Iterator[tuple[float, float]]:
    """Trains in place; yields (loss, milliseconds) of each step."""
    optimizer, scaler = make_optimizer(model, args.lr, args.precision, args.device)
    stream = batches(text.train, args.batch, args.context, args.seed, args.device)
    for step, batch in enumerate(islice(stream, args.steps)):
        synchronize(args.device)
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        loss = loss_of(model, batch, args)
        scaler.scale(loss).backward()
        update(model, optimizer, scaler)
        synchronize(args.device)
        yield loss.item(), (time.perf_counter() - start) * 1e3


def train(attention: str, text: Text, args: Args, sample: bool) -> Run:
    """One run from the seed to the sample of generated text; running out of memory is a result, not a crash."""
    run = Run(attention)
    release_memory(args.device)
    attend = ATTENTIONS[attention]()
    torch.manual_seed(args.seed)
    try:
        with torch.device(args.device):
            model = TransformerLM(SIZES[args.size], attend, args.context, recompute=args.checkpoint)
        if args.compile:
            model.compile_blocks()
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with Reporter(f"{attention:9}", args.steps) as progress, float32_products(args.precision):
            for loss, ms in training_steps(model, text, args):
                run.losses.append(loss)
                run.step_ms.append(ms)
                progress.advance(f"loss {loss:.3f}  {tokens_per_second(run, args):,.0f} tokens/s")
        if args.device == "cuda":
            run.peak_mib = torch.cuda.max_memory_allocated() / 2**20
        run.validation = validate(model, text, args)
        with autocast(args.precision, args.device):
            run.sample = model.generate(PROMPT, SAMPLE_BYTES, seed=args.seed) if sample else b""
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        run.out_of_memory = True
    return run


# ---- what is shown and left ----


def tokens_per_second(run: Run, args: Args) -> float:
    """From the median step, so that a slow first step does not count."""
    return args.batch * args.context / statistics.median(run.step_ms) * 1e3 if run.step_ms else math.nan


def loss_table(runs: list[Run], text: Text, args: Args) -> Table:
    """Losses at eleven steps, the validation loss, speed and, for two runs, every |difference| and the largest."""
    title = f"{args.size} on {args.device}, {args.precision}, batch {args.batch} x {args.context} bytes of {text.name}"
    pair = len(runs) == 2
    headers = [*(run.attention for run in runs), *(["|difference|"] if pair else [])]
    table = make_table("loss in nats per byte", right=headers, title=title)

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
        worst = max(abs(a - b) for a, b in zip(runs[0].losses, runs[1].losses, strict=False))
        table.add_row("[bold]max |difference| of the curves[/]", "", "", f"[bold]{worst:.1e}[/]")
    return table


def loss_rows(runs: list[Run], args: Args) -> list[dict[str, Any]]:
    """The CSV: one row a run and step, the last one "OOM" where memory ran out."""
    chosen = {name: getattr(args, name) for name in ("size", "precision", "batch", "context", "lr", "seed")}
    rows = []
    for run in runs:
        steps = [(f"{loss:.6f}", f"{ms:.3f}") for loss, ms in zip(run.losses, run.step_ms, strict=True)]
        steps += [("OOM", "")] if run.out_of_memory else []
        for index, (loss, ms) in enumerate(steps):
            rows.append({"attention": run.attention, "step": index + 1, "loss": loss, "ms": ms, **chosen})
    return rows
