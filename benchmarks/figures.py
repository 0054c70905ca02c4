"""Pictures of results, drawn from the rows of a CSV, so that report.py can draw them again without measuring.

Called through tables.write_results and by report.py. matplotlib is imported when a picture is drawn, not before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shapes import Case

Rows = list[dict[str, str]]
OURS = "flash_ext"
BAR = 0.8  # of the room that a group of bars has
MOST_PANELS = 24
GROWING = ("scaling", "flash", "grid")  # suites whose cases differ in length
KIND = ("dtype", "D", "causal", "pass")


@contextmanager
def figure(path: Path, rows: int, columns: int, size: tuple[float, float], **options: Any) -> Iterator[Any]:
    """A grid of axes, always two-dimensional; written to `path` at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    drawing, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, **options)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    try:
        yield axes
        drawing.tight_layout()
        drawing.savefig(path, dpi=110)
    finally:
        plt.close(drawing)


def number(text: str) -> float:
    """A cell as a number; NaN for what is none, such as "OOM"."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def grouped(rows: Rows, *names: str) -> dict[tuple[str, ...], Rows]:
    """Rows by the named columns, in order of appearance."""
    result: dict[tuple[str, ...], Rows] = {}
    for row in rows:
        result.setdefault(tuple(row[name] for name in names), []).append(row)
    return result


def case_name(row: dict[str, str]) -> str:
    """The case of a row of attention.py; made from its columns where a file is older than the column "name"."""
    if "name" in row:
        return row["name"]
    b, h, sq, d, hkv, sk, dv = (int(row[column]) for column in ("B", "H", "Sq", "D", "Hkv", "Sk", "Ev"))
    options = {"causal": row["causal"] == "1", "mask": row["mask"], "dropout": float(row["dropout"])}
    return Case(b, h, sq, d, hkv=hkv, sk=sk, dv=dv, **options).name


def by_case(rows: Rows) -> dict[str, Rows]:
    """Rows of one suite, dtype and pass by case: {name: rows}."""
    result: dict[str, Rows] = {}
    for row in rows:
        result.setdefault(case_name(row), []).append(row)
    return result


def draw_attention(rows: Rows, path: Path) -> None:
    """Against the length where a suite's cases grow in it, else one bar a case."""
    (draw_growth if rows[0]["suite"] in GROWING else draw_ratios)(rows, path)


def draw_growth(rows: Rows, path: Path) -> None:
    """By length: milliseconds, and for the suite scaling what forward keeps for backward, where that was measured.

    One panel a kind of case, one line a peer, both axes logarithmic; a line ends where memory ran out.
    """
    kinds = grouped(rows, *KIND)
    panels = [(key, "ms", of_kind) for key, of_kind in kinds.items()]
    if rows[0]["suite"] == "scaling" and any(row.get("saved_mib") for row in rows):
        panels += [(key, "saved_mib", of_kind) for key, of_kind in kinds.items() if key[-1] == "bwd"]
    panels = panels[:MOST_PANELS]
    columns = min(4, len(panels))
    height = math.ceil(len(panels) / columns)
    colours = {peer: f"C{index}" for index, (peer,) in enumerate(grouped(rows, "peer"))}
    with figure(path, height, columns, size=(3.6 * columns, 3 * height)) as axes:
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        for axis, ((dtype, d, causal, direction), column, of_panel) in zip(axes.flat, panels, strict=False):
            for (peer,), of_peer in grouped(of_panel, "peer").items():
                points = sorted((int(row["Sq"]), number(row[column])) for row in of_peer)
                lengths = [length for length, value in points if value > 0]
                values = [value for _, value in points if value > 0]
                axis.plot(lengths, values, "o-", ms=3, lw=2.5 if peer == OURS else 1.2, color=colours[peer])
            axis.set_xscale("log", base=2)
            axis.set_yscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_major_formatter("{x:g}")
            what = direction if column == "ms" else "memory before backward"
            axis.set_title(f"{what}, {dtype}, D {d}{', causal' if causal == '1' else ''}", fontsize=9)
            axis.set(xlabel="sequence length", ylabel="ms" if column == "ms" else "MiB")
        lines = [axes[0][0].plot([], [], color=colour, label=peer)[0] for peer, colour in colours.items()]
        axes[0][0].legend(handles=lines, fontsize=7)


def draw_ratios(rows: Rows, path: Path) -> None:
    """The fastest other peer's time over flash_ext's, one bar a case; above the line at 1 flash_ext is faster."""
    panels = grouped(rows, "dtype", "pass")
    cases = max(len(by_case(of_panel)) for of_panel in panels.values())
    width = max(4.0, 0.22 * cases)
    columns = len(grouped(rows, "pass"))
    height = math.ceil(len(panels) / columns)
    with figure(path, height, columns, size=(width * columns, 2.4 * height + 1.5), sharex=True, sharey=True) as axes:
        for axis, ((dtype, direction), of_panel) in zip(axes.flat, panels.items(), strict=False):
            ratios = [best_ratio(of_case) for of_case in by_case(of_panel).values()]
            names = list(by_case(of_panel))
            colours = ["C2" if ratio >= 1 else "C3" for ratio in ratios]
            axis.bar(range(len(names)), [ratio - 1 for ratio in ratios], BAR, bottom=1, color=colours)
            axis.axhline(1, color="black", lw=1)
            axis.set_yscale("log", base=2)
            axis.yaxis.set_major_formatter("{x:g}")
            axis.set(title=f"{direction}, {dtype}", ylabel="best other / flash_ext")
            axis.set_xticks(range(len(names)), names, rotation=90, fontsize=6)


def best_ratio(of_case: Rows) -> float:
    """Time of the fastest other peer over flash_ext's (the last peer's, where that is another), for one case."""
    times = {row["peer"]: number(row["ms"]) for row in of_case}
    ours = times.pop(OURS if OURS in times else of_case[-1]["peer"])
    return min((ms for ms in times.values() if not math.isnan(ms)), default=math.nan) / ours


def draw_host_overhead(rows: Rows, path: Path) -> None:
    """Microseconds of one call: one group of bars a pass and arguments, one bar a peer."""
    groups = grouped(rows, "pass", "arguments")
    peers = list(grouped(rows, "peer"))
    with figure(path, 1, 1, size=(8, 3.5)) as axes:
        axis = axes[0][0]
        for index, (peer,) in enumerate(peers):
            places = [place + BAR * (index / len(peers) - 0.5) for place in range(len(groups))]
            values = [next(number(row["us"]) for row in of if row["peer"] == peer) for of in groups.values()]
            axis.bar(places, values, BAR / len(peers), align="edge", label=peer)
        axis.set_xticks(range(len(groups)), [" ".join(filter(None, key)) for key in groups], fontsize=7)
        axis.set(ylabel="microseconds")
        axis.legend(fontsize=8)


def draw_steps(rows: Rows, path: Path) -> None:
    """One bar a setting, its phases stacked, the step's standard deviation at its end; "OOM" where memory ran out."""
    names = ("size", "batch", "context", "attention", "precision", "mode", "warmup", "compile", "checkpoint")
    shown = [name for name in names if len(grouped(rows, name)) > 1] or ["attention"]
    labels = [
        ", ".join(f"{name} {row[name]}" if row[name].isdecimal() else row[name] for name in shown) for row in rows
    ]
    with figure(path, 1, 1, size=(9, 1.4 + 0.35 * len(rows))) as axes:
        axis, starts = axes[0][0], [0.0] * len(rows)
        for phase in ("forward", "loss", "backward", "optimizer"):
            widths = [0.0 if math.isnan(number(row[f"{phase}_ms"])) else number(row[f"{phase}_ms"]) for row in rows]
            if any(widths):
                axis.barh(range(len(rows)), widths, BAR, left=starts, label=phase)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        for place, row in enumerate(rows):
            if row["status"] == "OOM":
                axis.text(0, place, " OOM", va="center", color="C3")
            elif row["step_std"]:
                axis.errorbar(number(row["step_ms"]), place, xerr=number(row["step_std"]), color="black", capsize=3)
        axis.set_yticks(range(len(rows)), labels, fontsize=8)
        axis.invert_yaxis()
        axis.set(xlabel="milliseconds of a step")
        axis.legend(fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))


def draw_losses(rows: Rows, path: Path) -> None:
    """The loss curves in one picture; for two runs their |difference| below them, on a log axis."""
    curves: dict[str, list[float]] = {}
    for row in rows:
        curves.setdefault(row["attention"], []).append(number(row["loss"]))  # NaN, which is not drawn, for OOM
    pair = len(curves) == 2
    size = (8, 6) if pair else (8, 4.5)
    with figure(path, 1 + pair, 1, size=size, sharex=True, height_ratios=[3, 1][: 1 + pair]) as axes:
        top, bottom = axes[0][0], axes[-1][0]
        for (name, losses), style in zip(
            curves.items(), ({"lw": 4, "alpha": 0.45}, {"lw": 1.2, "ls": "--", "color": "black"}), strict=False
        ):
            top.plot(range(1, len(losses) + 1), losses, label=name, **style)
        top.set(title="{size}, {precision}, {batch} x {context} bytes".format(**rows[0]))
        top.set(ylabel="training loss (nats per byte)")
        top.legend()
        if pair:
            below = [max(abs(a - b), 1e-9) for a, b in zip(*curves.values(), strict=False)]
            bottom.semilogy(range(1, len(below) + 1), below, lw=1, color="tab:red")
            bottom.set(ylabel="|difference|")
        bottom.set(xlabel="step")


DRAWINGS: dict[str, Callable[[Rows, Path], None]] = {  # by a column that only that kind of CSV has
    "each_step_ms": draw_steps,
    "Sq": draw_attention,
    "us": draw_host_overhead,
    "loss": draw_losses,
}


def picture_of(rows: Rows) -> Callable[[Rows, Path], None] | None:
    """The drawing that fits the columns of a benchmark's CSV; None for columns of something else."""
    return next((drawing for column, drawing in DRAWINGS.items() if column in rows[0]), None)
