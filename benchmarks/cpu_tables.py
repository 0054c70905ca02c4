"""The tables of a run on a CPU: milliseconds of every peer, and the first one's time over the last one's with goals."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from gpu_tables import coloured, groups
from harness import geomean
from tables import Table, make_table

if TYPE_CHECKING:
    from attention import Args, Cell

# Per group of the suite cpu: the least that the geometric mean of a pass's ratios should be, and that of any cell
GOALS = {
    "listed": {"fwd": 1.0, "bwd": 1.15, "cell": 0.9},
    "other": {"fwd": 1.0, "bwd": 1.15, "cell": 0.9},
    "math": {"fwd": 2.0, "bwd": 2.0, "cell": 2.0},
}


def ratio(cells: list[Cell], best: bool = False) -> float:
    """Time of the first peer over that of the last, for the cells of one case, dtype and pass; NaN if one failed."""
    theirs, ours = cells[0].timing, cells[-1].timing
    return theirs.best / ours.best if best else theirs.median / ours.median


def cell_table(cells: list[Cell], dtype: torch.dtype, args: Args) -> Table:
    """One line a case: milliseconds of every peer, ratio of medians (of bests in brackets) and err, for each pass."""
    title = f"{str(dtype).removeprefix('torch.')}, median milliseconds of interleaved rounds, {args.device}"
    headers = [f"{direction}\n{name}" for direction in args.passes for name in (*args.peers, "ratio\n(best)", "err")]
    table = make_table("B x H x S x D", "options", right=headers, title=title)
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


def summary_table(cells: list[Cell], args: Args) -> Table:
    """Geometric means of the ratios per dtype, pass and group of cases, and the lowest ratio of each."""
    title = f"{args.peers[0]} time / {args.peers[-1]} time"
    table = make_table("dtype", "pass", "group", "cells", right=("geomean", "of bests", "goal", "lowest"), title=title)
    table.add_column("in")
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
