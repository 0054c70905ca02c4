"""The tables of attention.py, but for the suite cpu: every cell against all its peers, geometric means of the ratios.

A ratio is a peer's time over flash_ext's (the last peer's): above 1, flash_ext is faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from harness import geomean
from tables import Table, make_table

if TYPE_CHECKING:
    from attention import Cell


def coloured(value: float, goal: float, digits: str = ".2f") -> str:
    """A ratio in green when it meets its goal, in red when not; "-" for NaN."""
    if math.isnan(value):
        return "-"
    return f"[{'green' if value >= goal else 'red'}]{value:{digits}}[/]"


def groups(cells: Iterable[Cell], *keys: str) -> dict[tuple, list[Cell]]:
    """Cells by the named attributes, in order of appearance."""
    result: dict[tuple, list[Cell]] = {}
    for cell in cells:
        result.setdefault(tuple(getattr(cell, key) for key in keys), []).append(cell)
    return result


def _figure(value: float, digits: str) -> str:
    return "-" if math.isnan(value) else f"{value:{digits}}"


def milliseconds(cell: Cell) -> str:
    """The median, or why there is none: "OOM", or "-" for a peer that refuses (the reason stands below the table)."""
    if cell.timing.failure:
        return "OOM" if cell.timing.failure == "OOM" else "-"
    ms = cell.timing.median * 1e3
    return f"{ms:.4f}" if ms < 1 else f"{ms:.3f}"


def to_best(of_pass: list[Cell]) -> float:
    """Time of the fastest other peer over that of the last one; NaN without either."""
    *others, ours = of_pass
    times = [c.timing.median for c in others if not math.isnan(c.timing.median)]
    return min(times, default=math.nan) / ours.timing.median


def gpu_table(cells: list[Cell], peers: list[str]) -> Table:
    """One line a case, dtype and pass: every peer's milliseconds, then what the last one's time means."""
    title = f"median milliseconds of interleaved rounds; TFLOP/s to peak MiB are {peers[-1]}'s"
    headers = [peer.replace("-", "-\n") for peer in peers]
    ours = ("TFLOP/s", "GB/s", "% of\nlimit", "best /\nours", "err", "spread", "peak\nMiB", "best\nMiB")
    table = make_table("B x H x S x D", "dtype", "pass", right=(*headers, *ours), title=title)
    for (case, dtype, direction), of_pass in groups(cells, "case", "dtype", "direction").items():
        ours = of_pass[-1]
        table.add_row(
            case.name, str(dtype).removeprefix("torch."), direction, *map(milliseconds, of_pass),
            _figure(ours.tflops, ".1f"), _figure(ours.gbs, ".0f"), _figure(ours.percent, ".0f"),
            coloured(to_best(of_pass), 1.0), _figure(ours.err, ".2f"), _figure(ours.timing.spread, ".2f"),
            _figure(ours.peak_mib, ".0f"),
            _figure(min((c.peak_mib for c in of_pass[:-1] if not math.isnan(c.peak_mib)), default=math.nan), ".0f"),
        )  # fmt: skip
    return table


def scaling_table(cells: list[Cell]) -> Table:
    """One line a case, dtype and peer, in order of the length: milliseconds of each pass and what forward keeps."""
    passes = [direction for (direction,) in groups(cells, "direction")]
    title = "median milliseconds; memory in use before backward and at its peak"
    figures = (*passes, "before\nbackward\nMiB", "peak\nMiB")
    table = make_table("B x H x S x D", "dtype", "peer", right=figures, title=title)
    for (case, dtype), of_case in groups(cells, "case", "dtype").items():
        for (peer,), of_peer in groups(of_case, "peer").items():
            memory = (_figure(value, ".0f") for value in (of_peer[0].check.saved_mib, of_peer[0].check.peak_mib))
            name = str(dtype).removeprefix("torch.")
            table.add_row(case.name, name, peer, *map(milliseconds, of_peer), *memory)
        table.add_section()
    return table


def ratio_table(cells: list[Cell], peers: list[str]) -> Table:
    """One line a case, dtype and pass: the ratio to each peer, for suites whose cases have little in common."""
    headers = [name.replace("-", "-\n") for name in peers[:-1]]
    table = make_table("B x H x S x D", "dtype", "pass", right=headers, title=f"time of a peer / time of {peers[-1]}")
    for (case, dtype, direction), (*others, ours) in groups(cells, "case", "dtype", "direction").items():
        ratios = (coloured(other.timing.median / ours.timing.median, 1.0) for other in others)
        table.add_row(case.name, str(dtype).removeprefix("torch."), direction, *ratios)
    return table


def gpu_summary(cells: list[Cell], peers: list[str]) -> Table:
    """Per dtype, head dim and pass: geometric mean (lowest) of the ratios to each peer and to the best one."""
    title = f"time of a peer / time of {peers[-1]}: geometric mean (lowest)"
    others = [name.replace("-", "-\n") for name in (*peers[:-1], "best")]
    table = make_table("dtype", "D", "pass", "cells", right=others, title=title)
    for (dtype, d, direction), of_group in groups(cells, "dtype", "head_dim", "direction").items():
        by_case = list(groups(of_group, "case").values())
        columns = []
        for index in (*range(len(peers) - 1), None):
            ratios = [to_best(c) if index is None else c[index].timing.median / c[-1].timing.median for c in by_case]
            ratios = [ratio for ratio in ratios if not math.isnan(ratio)]
            columns.append(f"{coloured(geomean(ratios), 1.0, '.3f')} ({min(ratios):.2f})" if ratios else "-")
        table.add_row(str(dtype).removeprefix("torch."), str(d), direction, str(len(by_case)), *columns)
    return table


def refusals(cells: list[Cell]) -> list[str]:
    """One line a peer and reason: which cases it does not serve."""
    found: dict[tuple[str, str], set[str]] = {}
    for cell in cells:
        if cell.timing.failure:
            found.setdefault((cell.peer, cell.timing.failure), set()).add(cell.case.name)
    lines = []
    for (peer, reason), names in found.items():
        some = "; ".join(sorted(names)[:3])
        lines.append(f"{peer}: {reason} [{some}{f' and {len(names) - 3} more' if len(names) > 3 else ''}]")
    return lines
