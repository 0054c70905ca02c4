#!/usr/bin/env python3
"""Times attention alone: flash_ext against its peers, in one process, forward and backward.

    python benchmarks/attention.py --suite cpu            the shapes of shapes.py in fp32, bf16 and fp16 on 2 threads
    python benchmarks/attention.py --suite cpu --quick    a minute, for CI
    python benchmarks/attention.py --case 2048 --dtypes bf16 --passes bwd --no-host

Ratios are PyTorch's median time over flash_ext's: above 1, flash_ext is faster. Forward runs without gradients (with
them where the mask wants one); backward is torch.autograd.grad alone, without its forward. TFLOP/s count kept (query,
key) pairs only, GB/s the smallest possible traffic; err is the error over what the error rule allows, so at most 1.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accuracy import Truth, eager_attention, err, score_elements, truth
from harness import (
    BenchmarkError,
    Reporter,
    Timing,
    geomean,
    interleave,
    load_flash_ext,
    make_folder,
    provenance,
    run_main,
    stdout_console,
    write_csv,
)
from host_overhead import host_overhead, host_table
from rich.table import Table
from shapes import SUITES, Case, Inputs, make_inputs, quick
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PASSES = ("fwd", "bwd")
OURS = "flash_ext"
CHECK_ELEMENTS = 1 << 24  # larger samples of the score matrix are not checked on a CPU
# Per group of shapes.py: the least that the geometric mean of a pass's ratios should be, and the least of any cell
GOALS = {
    "listed": {"fwd": 1.0, "bwd": 1.15, "cell": 0.9},
    "other": {"fwd": 1.0, "bwd": 1.15, "cell": 0.9},
    "math": {"fwd": 2.0, "bwd": 2.0, "cell": 2.0},
}

Peer = Callable[[Case, Inputs], Tensor]


def sdpa_peer(sdpa: Callable[..., Tensor]) -> Peer:
    """A function with the signature of F.scaled_dot_product_attention as a peer."""

    def run(case: Case, x: Inputs) -> Tensor:
        gqa = {"enable_gqa": True} if case.hkv != case.h else {}
        return sdpa(x.query, x.key, x.value, x.mask, case.dropout, case.causal, **gqa)

    return run


# name -> factory; a name costs nothing until it is asked for
PEERS: dict[str, Callable[[], Peer]] = {
    "torch": lambda: sdpa_peer(F.scaled_dot_product_attention),
    "eager": lambda: lambda case, x: eager_attention(case, x.query, x.key, x.value, x.mask),
    OURS: lambda: sdpa_peer(load_flash_ext().scaled_dot_product_attention),
}


@dataclass(frozen=True)
class Cell:
    """One peer's figures for one case, dtype and pass; `err` is NaN where it was not checked."""

    peer: str
    case: Case
    dtype: torch.dtype
    direction: str
    timing: Timing
    err: float

    def row(self) -> dict[str, Any]:
        """The CSV row; the first 15 columns are those of every suite."""
        c, t, s = self.case, self.timing, self.timing.median

        def figure(value: float, digits: str) -> str:
            return "" if math.isnan(value) else f"{value:{digits}}"

        return {
            "peer": self.peer, "suite": c.suite, "B": c.b, "H": c.h, "Hkv": c.hkv, "Sq": c.sq, "Sk": c.sk, "D": c.d,
            "dtype": str(self.dtype).removeprefix("torch."), "causal": int(c.causal), "pass": self.direction,
            "ms": ("OOM" if t.failure == "OOM" else "failed") if t.failure else f"{s * 1e3:.4f}",
            "tflops": figure(c.flop(self.direction) / s / 1e12, ".4f"),
            "gbs": figure(c.traffic(self.direction, self.dtype) / s / 1e9, ".2f"),
            "err": figure(self.err, ".3f"),
            "Ev": c.dv, "mask": c.mask, "dropout": c.dropout, "group": c.group,
            "best_ms": figure(t.best * 1e3, ".4f"), "spread": figure(t.spread, ".3f"), "rounds": len(t.samples),
        }  # fmt: skip


def forward_call(peer: Peer, case: Case, x: Inputs) -> Callable[[], Tensor]:
    """One forward as inference runs it; with autograd where the mask wants a gradient, which decides PyTorch's path."""

    def call() -> Tensor:
        with nullcontext() if case.mask == "float_grad" else torch.no_grad():
            return peer(case, x)

    return call


def backward_call(peer: Peer, case: Case, x: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """One backward over a graph that the first, untimed call builds."""
    forward = cache(lambda: peer(case, x))
    wanted = x.wanting_gradients()
    return lambda: torch.autograd.grad(forward(), wanted, x.grad_out, retain_graph=True)


def checked(peer: Peer, case: Case, x: Inputs, found: Truth | None, direction: str) -> float:
    """err of one peer; NaN where there is nothing to compare with, infinity where the peer fails."""
    if found is None:
        return math.nan
    try:
        out = peer(case, x)
        return err(case, found, [out.detach(), *torch.autograd.grad(out, x.wanting_gradients(), x.grad_out)], direction)
    except RuntimeError:
        return math.inf


def measure(case: Case, dtype: torch.dtype, peers: dict[str, Peer], args: argparse.Namespace) -> list[Cell]:
    """All peers and passes of one case in one dtype."""
    x = make_inputs(case, dtype, args.device)
    small = args.device != "cpu" or score_elements(case) <= CHECK_ELEMENTS
    found = truth(case, x) if args.check and small and not case.dropout else None
    cells = []
    for direction in args.passes:
        make = forward_call if direction == "fwd" else backward_call
        calls = {name: make(peer, case, x) for name, peer in peers.items()}
        for name, timing in interleave(calls, args.device, args.rounds, budget_s=args.seconds).items():
            if timing.failure and timing.failure != "OOM":
                print(f"{name} fails on {case.name} {dtype} {direction}: {timing.failure}", file=sys.stderr)
            cells.append(Cell(name, case, dtype, direction, timing, checked(peers[name], case, x, found, direction)))
    return cells


def ratio(cells: list[Cell], best: bool = False) -> float:
    """Time of the first peer over that of the last, for the cells of one case, dtype and pass; NaN if one failed."""
    theirs, ours = cells[0].timing, cells[-1].timing
    return theirs.best / ours.best if best else theirs.median / ours.median


def groups(cells: list[Cell], *keys: str) -> dict[tuple, list[Cell]]:
    """Cells by the named attributes, in order of appearance."""
    result: dict[tuple, list[Cell]] = {}
    for cell in cells:
        result.setdefault(tuple(getattr(cell, key) for key in keys), []).append(cell)
    return result


def coloured(value: float, goal: float, digits: str = ".2f") -> str:
    """A ratio in green when it meets its goal, in red when not; "-" for NaN."""
    if math.isnan(value):
        return "-"
    return f"[{'green' if value >= goal else 'red'}]{value:{digits}}[/]"


def cell_table(cells: list[Cell], dtype: torch.dtype, args: argparse.Namespace) -> Table:
    """One line a case: milliseconds of every peer, ratio of medians (of bests in brackets) and err, for each pass."""
    title = f"{str(dtype).removeprefix('torch.')}, median milliseconds of interleaved rounds, {args.device}"
    table = Table("B x H x S x D", "options", title=title)
    for direction in args.passes:
        for name in args.peers:
            table.add_column(f"{direction}\n{name}", justify="right")
        table.add_column("ratio\n(best)", justify="right")
        table.add_column("err", justify="right")
    kind = ""
    for (case,), of_case in groups([c for c in cells if c.dtype == dtype], "case").items():
        if kind and kind != case.group:
            table.add_section()
        kind = case.group
        line = [f"{case.b}x{case.h}x{case.sq}x{case.d}", case.options]
        for of_pass in groups(of_case, "direction").values():
            for cell in of_pass:
                failure = "OOM" if cell.timing.failure == "OOM" else "failed"
                line.append(failure if cell.timing.failure else f"{cell.timing.median * 1e3:.2f}")
            goal = GOALS[case.group]["cell"]
            line.append(f"{coloured(ratio(of_pass), goal)} ({ratio(of_pass, best=True):.2f})")
            line.append("-" if math.isnan(of_pass[-1].err) else f"{of_pass[-1].err:.2f}")
        table.add_row(*line)
    return table


def summary_table(cells: list[Cell], args: argparse.Namespace) -> Table:
    """Geometric means of the ratios per dtype, pass and group of cases, and the lowest ratio of each."""
    table = Table("dtype", "pass", "group", "cells", title=f"{args.peers[0]} time / {args.peers[-1]} time")
    for name in ("geomean", "of bests", "goal", "lowest"):
        table.add_column(name, justify="right")
    table.add_column("in", no_wrap=True)
    for (dtype, direction), of_pass in groups(cells, "dtype", "direction").items():
        for group, goals in GOALS.items():
            of_group = groups([c for c in of_pass if c.case.group == group], "case")
            ratios = {case: ratio(of_case) for (case,), of_case in of_group.items()}
            ratios = {case: value for case, value in ratios.items() if not math.isnan(value)}
            if not ratios:
                continue
            lowest = min(ratios, key=ratios.__getitem__)
            bests = geomean(ratio(of_group[case,], best=True) for case in ratios)
            table.add_row(
                str(dtype).removeprefix("torch."), direction, group, f"{len(ratios)}/{len(of_group)}",
                coloured(geomean(ratios.values()), goals[direction], ".3f"), f"{bests:.3f}", f"{goals[direction]:.2f}",
                coloured(ratios[lowest], goals["cell"]), lowest.name,
            )  # fmt: skip
    return table


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Arguments, checked and with their cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--suite", choices=SUITES, default="cpu", help="set of cases (default cpu)")
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="default: fp32 bf16 fp16")
    add("--passes", nargs="+", choices=PASSES, default=list(PASSES), help="default: fwd bwd")
    add("--peers", nargs="+", choices=PEERS, default=["torch", OURS], help="ratios are of the first to the last one")
    add("--case", metavar="TEXT", default="", help="only cases whose name has this text, such as 2048x64 or dropout")
    add("--threads", type=int, default=2, help="CPU threads of PyTorch (default 2)")
    add("--rounds", type=int, default=7, help="interleaved rounds of a cell (default 7)")
    add("--seconds", type=float, default=3.0, help="time after which a cell takes at most 3 rounds (default 3)")
    add("--quick", action="store_true", help="one small case of each kind, 3 rounds: a minute, for CI")
    add("--no-check", dest="check", action="store_false", help="do not compute err")
    add("--no-host", dest="host", action="store_false", help="skip the host time of tiny calls")
    add("--out", type=Path, metavar="DIR", help="write attention_SUITE.csv and host_overhead.csv here")
    args = parser.parse_args(argv)
    args.device = "cpu"  # of every suite so far
    for name in ("threads", "rounds", "seconds"):
        if not 0 < getattr(args, name) < math.inf:
            raise BenchmarkError(f"--{name} {getattr(args, name)} must be above 0.")
    if len(set(args.peers)) < len(args.peers) or len(args.peers) < 2:
        raise BenchmarkError(f"--peers takes two or more different names of {', '.join(PEERS)}.")
    cases = SUITES[args.suite]()
    cases = quick(cases) if args.quick else cases
    args.cases = [case for case in cases if args.case in case.name]
    if not args.cases:
        raise BenchmarkError(f"--case {args.case!r} fits none of: {'; '.join(case.name for case in cases)}.")
    if args.quick:
        args.rounds, args.seconds = min(args.rounds, 3), min(args.seconds, 0.3)
    return args


def main() -> None:
    """Measures every cell, prints the tables, writes the CSVs."""
    args = parse()
    torch.set_num_threads(args.threads)
    if args.out is not None:
        make_folder(args.out)
    peers = {name: PEERS[name]() for name in args.peers}
    console = stdout_console()
    cells: list[Cell] = []
    with Reporter(f"suite {args.suite}", len(args.cases) * len(args.dtypes)) as progress:
        for name in args.dtypes:
            for case in args.cases:
                cells += measure(case, DTYPES[name], peers, args)
                progress.advance(f"{name} {case.name}")
    for name in args.dtypes:
        console.print(cell_table(cells, DTYPES[name], args))
    console.print(summary_table(cells, args))
    host_rows: list[dict[str, Any]] = []
    if args.host:
        ours = load_flash_ext().scaled_dot_product_attention if OURS in peers else None
        host_rows = host_overhead(ours, args.device, rounds=5 if args.quick else 15)
        console.print(host_table(host_rows))
    if args.out is not None:
        origin = provenance(args.device)
        write_csv(args.out / f"attention_{args.suite}.csv", [cell.row() for cell in cells], origin)
        if host_rows:
            write_csv(args.out / "host_overhead.csv", host_rows, origin)
        print(f"Written to {args.out}")


if __name__ == "__main__":
    run_main(main)
