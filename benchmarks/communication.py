#!/usr/bin/env python3
"""What collectives cost, and what is left of that where backward hides them.

    python benchmarks/communication.py                        all four collectives on 2 ranks that it starts itself
    python benchmarks/communication.py --ranks 2,4 --megabytes 1,4,16 --collective all-reduce,all-gather
    torchrun --nproc-per-node 8 benchmarks/communication.py   on torchrun's ranks, also of several hosts
    python benchmarks/communication.py --suite ddp            three ways to average gradients, side by side

A collective of S bytes (1 MB is 10^6), float32, on n ranks: all-reduce sums S bytes, all-gather ends with S on every
rank, reduce-scatter begins with S on every rank, all-to-all exchanges S / n with each. A time is the slowest rank's and
the least of --repeats. A rank must send, and receive, at least

    X = S (n - 1) / n,   for all-reduce twice that,

and X / time is the bus bandwidth, which can be compared with the link's whatever n and the collective. Latency and
bandwidth of `time = latency + X / bandwidth` are fitted by least squares of the relative errors over all sizes.

--suite ddp trains a Transformer of train_lm.py, a batch on each rank: `none` sends nothing (each rank for itself),
`naive` all-reduces each gradient after backward, `flat` all of them in one, `overlapped` (flash_ext.distributed.DDP)
each during backward. On a CPU communication takes the cores that backward computes with, so less is hidden.

gloo on CPUs, NCCL on GPUs. Tables go to stdout, CSV, Markdown, LaTeX and a picture to --out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from figures import draw_collectives, draw_ddp
from harness import (
    BenchmarkError,
    Reporter,
    command_line,
    load_flash_ext,
    make_folder,
    pick_device,
    provenance,
    run_main,
    stdout_console,
    synchronize,
    word,
)
from model import ATTENTIONS, SIZES, TransformerLM, mark_ranges, named_range
from ranks import barrier, rank_here, ranks_to_start, record_with_nsys, rows_of_ranks, slowest
from stepping import VOCAB, profiling
from tables import Table, csv_path, make_table, write_results
from torch import Tensor, nn
from train_lm import list_of, whole
from training import cross_entropy, make_optimizer
from tyro.conf import arg

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
WAYS = ("none", "naive", "flat", "overlapped")
MEGABYTES = {"cpu": [1, 4, 16, 64], "cuda": [1, 4, 16, 64, 256, 1000]}
MODEL = {"cpu": ("tiny", 128), "cuda": ("small", 512)}
WARMUP = 2
PARTS = ("forward", "backward", "communication", "optimizer")


@dataclass
class Args:
    """The command line."""

    suite: Literal["collectives", "ddp"] = "collectives"
    # how many ranks to start, one table each; under torchrun they are its own
    ranks: Annotated[list[int] | None, list_of(partial(whole, least=2))] = None
    collective: Annotated[list[str], list_of(COLLECTIVES)] = field(default_factory=lambda: list(COLLECTIVES))
    megabytes: Annotated[list[int] | None, list_of(whole)] = None  # None: 1 to 64, on GPUs 1 to 1000
    repeats: Annotated[int, word(whole, "N")] = 10  # of a collective, or steps of --suite ddp
    size: Annotated[str | None, arg(metavar="NAME")] = None  # --suite ddp: the model (None: tiny, on GPUs small)
    context: Annotated[int | None, word(whole, "N")] = None  # --suite ddp: tokens (None: 128, on GPUs 512)
    batch: Annotated[int, word(whole, "N")] = 4  # --suite ddp: sequences of a rank
    device: Literal["auto", "cpu", "cuda"] = "auto"
    nvtx: bool = False  # NVTX ranges for nsys around each collective and each part of a step
    out: Annotated[Path, arg(metavar="DIR")] = Path(__file__).parent / "out"


def parse(argv: list[str] | None = None) -> Args:
    """Arguments with the device's defaults filled in."""
    args = command_line(Args, argv)
    args.device = pick_device(args.device)
    args.ranks = ranks_to_start(args.ranks)
    args.megabytes = args.megabytes or MEGABYTES[args.device]
    size, context = MODEL[args.device]
    args.size, args.context = args.size or size, args.context or context
    if args.size not in SIZES:
        raise BenchmarkError(f"--size {args.size} is none of {', '.join(SIZES)}.")
    return args


# ---- collectives ----


def share_sent(collective: str, ranks: int) -> float:
    """Bytes that a rank must send, over the bytes of the collective."""
    return (2 if collective == "all-reduce" else 1) * (ranks - 1) / ranks


def prepare(collective: str, elements: int, device: str) -> Callable[[], Any]:
    """The call, on float32 tensors of its own; `elements` is a multiple of the number of ranks."""
    every = torch.zeros(elements, device=device)
    if collective == "all-reduce":
        return lambda: dist.all_reduce(every)
    if collective == "all-to-all":
        other = torch.empty_like(every)
        return lambda: dist.all_to_all_single(other, every)
    part = torch.zeros(elements // dist.get_world_size(), device=device)
    if collective == "all-gather":
        return lambda: dist.all_gather_into_tensor(every, part)
    return lambda: dist.reduce_scatter_tensor(part, every)


def measure_collectives(args: Args) -> list[dict[str, Any]]:
    """On every rank: a row for each collective and size."""
    ranks, rows = dist.get_world_size(), []
    with ExitStack() as stack:
        if args.nvtx:
            stack.enter_context(mark_ranges(profiling().range))
            record_with_nsys(stack, args.device)
        progress = progress_of_rank_0(stack, f"{ranks} ranks", len(args.collective) * len(args.megabytes))
        for collective in args.collective:
            for megabytes in args.megabytes:
                elements = max(1, round(megabytes * 1e6 / 4 / ranks)) * ranks
                call, times = prepare(collective, elements, args.device), []
                for _ in range(WARMUP + args.repeats):
                    barrier(args.device)
                    begin = perf_counter()
                    with named_range(f"{collective} {megabytes} MB"):
                        call()
                        synchronize(args.device)
                    times.append(perf_counter() - begin)
                seconds = min(slowest(times[WARMUP:], args.device))
                sent = 4 * elements * share_sent(collective, ranks)
                rows.append(
                    {
                        "suite": "collectives", "ranks": ranks, "collective": collective, "megabytes": megabytes,
                        "ms": f"{seconds * 1e3:.4f}", "sent_bytes": round(sent),
                        "bus_gbs": f"{sent / seconds / 1e9:.4f}", "repeats": args.repeats,
                    }
                )  # fmt: skip
                progress(f"{collective} {megabytes} MB {seconds * 1e3:.2f} ms")
    for collective in args.collective:
        mine = [row for row in rows if row["collective"] == collective]
        latency, bandwidth = fit([row["sent_bytes"] for row in mine], [float(row["ms"]) / 1e3 for row in mine])
        for row in mine:
            row["fit_latency_us"] = "" if math.isnan(latency) else f"{latency * 1e6:.2f}"
            row["fit_gbs"] = "" if math.isnan(bandwidth) else f"{bandwidth / 1e9:.4f}"
    return rows


def fit(sent: list[float], seconds: list[float]) -> tuple[float, float]:
    """(latency in s, bandwidth in bytes/s) of seconds = latency + sent / bandwidth; latency is not below 0.

    Least squares of the relative errors, so that small and large collectives count alike. NaN of a single size.
    """
    if len(sent) < 2:
        return math.nan, math.nan
    x, t = np.array(sent, dtype=float), np.array(seconds)
    (latency, slope), *_ = np.linalg.lstsq(np.stack((1 / t, x / t), axis=1), np.ones(len(t)), rcond=None)
    if latency < 0:
        latency, slope = 0.0, (x / t).sum() / (x / t).dot(x / t)
    return float(latency), float(1 / slope) if slope > 0 else math.inf


# ---- three ways to average gradients ----


class Alone(nn.Module):
    """Each rank for itself: what a step costs without communication. The base of the two ways that follow backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor) -> Tensor:
        return self.module(tokens)

    def finish_gradient_synchronization(self) -> None:
        """Averages the gradients."""


class Naive(Alone):
    """One all-reduce a parameter, each waited for."""

    def finish_gradient_synchronization(self) -> None:
        for parameter in self.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())


class Flat(Alone):
    """One all-reduce of all gradients, copied into one tensor and back."""

    def finish_gradient_synchronization(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters()]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def wrapped(way: str, model: nn.Module) -> Any:
    """The model, whose finish_gradient_synchronization() makes the gradients means over ranks in this way."""
    if way == "overlapped":
        load_flash_ext()
        from flash_ext.distributed import DDP

        return DDP(model)
    return {"none": Alone, "naive": Naive, "flat": Flat}[way](model)


def step_parts(model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor, device: str) -> Iterator[str]:
    """One step; yields the name of each of PARTS when it has been done."""
    with named_range("forward"):
        loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        synchronize(device)
    yield "forward"
    with named_range("backward"):
        loss.backward()
        synchronize(device)
    yield "backward"
    with named_range("communication"):
        model.finish_gradient_synchronization()
        synchronize(device)
    yield "communication"
    with named_range("optimizer"):
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(device)
    yield "optimizer"


def measure_ddp(args: Args) -> list[dict[str, Any]]:
    """On every rank: a row for each way; steps of the ways take turns, so that a busy moment falls on all."""
    ranks = dist.get_world_size()
    works: dict[str, tuple[Any, Any]] = {}
    for way in WAYS:
        torch.manual_seed(0)
        with torch.device(args.device):
            model = TransformerLM(SIZES[args.size], ATTENTIONS["sdpa"](), args.context, VOCAB)
        works[way] = wrapped(way, model), make_optimizer(model, 1e-3, "fp32", args.device)[0]
    gradients = sum(4 * parameter.numel() for parameter in works["none"][0].parameters())
    tokens = torch.randint(VOCAB, (args.batch, args.context + 1), device=args.device)
    times: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    with ExitStack() as stack:
        if args.nvtx:
            stack.enter_context(mark_ranges(profiling().range))
        progress = progress_of_rank_0(stack, f"{ranks} ranks", WARMUP + args.repeats)
        for index in range(WARMUP + args.repeats):
            if index == WARMUP and args.nvtx:
                record_with_nsys(stack, args.device)
            for way in WAYS[index % len(WAYS) :] + WAYS[: index % len(WAYS)]:
                barrier(args.device)
                clock = [perf_counter()]
                with named_range(way):
                    clock += [perf_counter() for _ in step_parts(*works[way], tokens, args.device)]
                parts = [(end - begin) * 1e3 for begin, end in pairwise(clock)]
                times[way].append(slowest([*parts, (clock[-1] - clock[0]) * 1e3], args.device))
            progress()
    rows = []
    for way in WAYS:
        medians = [statistics.median(step) for step in zip(*times[way][WARMUP:], strict=True)]
        row = {"suite": "ddp", "ranks": ranks, "way": way, "size": args.size, "batch": args.batch}
        row |= {"context": args.context, "repeats": args.repeats}
        row |= {"sent_bytes": 0 if way == "none" else round(gradients * share_sent("all-reduce", ranks))}
        row |= {f"{name}_ms": f"{ms:.3f}" for name, ms in zip((*PARTS, "step"), medians, strict=True)}
        rows.append(row | {"tokens_s": f"{ranks * args.batch * args.context / medians[-1] * 1e3:.0f}"})
    for row in rows:
        row["exposed_ms"] = f"{float(row['step_ms']) - float(rows[0]['step_ms']):.3f}"
    return rows


def progress_of_rank_0(stack: ExitStack, title: str, total: int) -> Callable[..., None]:
    """What rank 0 calls to tell, and others for nothing, that one unit of work is done."""
    if dist.get_rank() != 0:
        return lambda note="": None
    return stack.enter_context(Reporter(title, total)).advance


# ---- what is shown and left ----


def collective_tables(rows: list[dict[str, Any]], device: str) -> list[Table]:
    """Times by size, and the fits."""
    times = make_table("ranks", "collective", right=("MB", "ms", "bus GB/s"), title=f"Collectives, {device}")
    fits = make_table("ranks", "collective", right=("latency, us", "GB/s"), title="time = latency + X / bandwidth")
    for row in rows:
        where = str(row["ranks"]), row["collective"]
        times.add_row(*where, str(row["megabytes"]), row["ms"], row["bus_gbs"])
        if row["megabytes"] == rows[0]["megabytes"]:
            fits.add_row(*where, row["fit_latency_us"], row["fit_gbs"])
    return [times, fits]


def ddp_tables(rows: list[dict[str, Any]], device: str) -> list[Table]:
    """Milliseconds of a step's parts, one line a way; exposed is what the step takes longer than without sending."""
    first = rows[0]
    title = f"Milliseconds of a step, median of {first['repeats']}, slowest rank, {device}: {first['size']}, "
    title += f"{first['batch']} x {first['context']} tokens a rank"
    headers = (*PARTS, "step", "exposed", "MB sent", "tokens/s")
    table = make_table("ranks", "gradients", right=headers, title=title)
    for row in rows:
        times = [row[f"{name}_ms"] for name in (*PARTS, "step", "exposed")]
        table.add_row(str(row["ranks"]), row["way"], *times, f"{row['sent_bytes'] / 1e6:.1f}", row["tokens_s"])
    return [table]


def main() -> None:
    """Measures on torchrun's ranks or on its own; rank 0 shows and writes."""
    args = parse()
    make_folder(args.out.parent if args.out.suffix == ".csv" else args.out)
    work = measure_collectives if args.suite == "collectives" else measure_ddp
    rows = rows_of_ranks(work, args)
    if rank_here() != 0:
        return
    origin = provenance(args.device)
    tables = (collective_tables if args.suite == "collectives" else ddp_tables)(rows, origin["gpu"] or origin["cpu"])
    for table in tables:
        stdout_console(width=160).print(table)
    picture = draw_collectives if args.suite == "collectives" else draw_ddp
    path = csv_path(args.out, "communication" if args.suite == "collectives" else "communication_ddp")
    print(write_results(path, rows, origin, tables, picture))


if __name__ == "__main__":
    run_main(main)
