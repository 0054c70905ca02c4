"""Pictures of results, drawn from the rows of a CSV, so that report.py can draw them again without measuring.

Called through tables.write_results and by report.py. matplotlib is imported when a picture is drawn, not before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from shapes import Case

OURS = "flash_ext"
BAR = 0.8  # of the room that a group of bars has
MOST_PANELS = 24
GROWING = ("scaling", "flash", "grid", "fp8")  # suites whose cases differ in length
KIND = ["dtype", "D", "causal", "pass"]


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


def number(column: pd.Series) -> pd.Series:
    """Cells as numbers; NaN for what is none, such as "OOM"."""
    return pd.to_numeric(column, errors="coerce")


def wide(rows: pd.DataFrame, index: pd.Series, values: str) -> pd.DataFrame:
    """One column of figures: a row for each value of `index`, a column for each peer, both in order of appearance."""
    figures = number(rows[values]).groupby([index, rows["peer"]]).last().unstack()
    return figures.reindex(index=index.unique(), columns=rows["peer"].unique())


def case_name(row: pd.Series) -> str:
    """The case of a row of attention.py that is older than the column "name"."""
    b, h, sq, d, hkv, sk, dv = (int(row[column]) for column in ("B", "H", "Sq", "D", "Hkv", "Sk", "Ev"))
    options = {"causal": row["causal"] == "1", "mask": row["mask"], "dropout": float(row["dropout"])}
    return Case(b, h, sq, d, hkv=hkv, sk=sk, dv=dv, **options).name


def best_ratios(rows: pd.DataFrame) -> pd.Series:
    """Time of the fastest other peer over flash_ext's (the last peer's, where that is another), by case.

    Takes rows of one suite, dtype and pass.
    """
    times = wide(rows, rows["name"] if "name" in rows else rows.apply(case_name, axis=1), "ms")
    ours = times.pop(OURS if OURS in times else times.columns[-1])
    return times.min(axis=1) / ours


def draw_attention(rows: pd.DataFrame, path: Path) -> None:
    """Against the length where a suite's cases grow in it, else one bar a case."""
    (draw_growth if rows["suite"][0] in GROWING else draw_ratios)(rows, path)


def draw_growth(rows: pd.DataFrame, path: Path) -> None:
    """By length: milliseconds, and for the suite scaling what forward keeps for backward, where that was measured.

    One panel a kind of case, one line a peer, both axes logarithmic; a line ends where memory ran out.
    """
    kinds = list(rows.groupby(KIND, sort=False))
    panels = [(key, "ms", of_kind) for key, of_kind in kinds]
    if rows["suite"][0] == "scaling" and "saved_mib" in rows and rows["saved_mib"].any():
        panels += [(key, "saved_mib", of_kind) for key, of_kind in kinds if key[-1] == "bwd"]
    panels = panels[:MOST_PANELS]
    columns = min(4, len(panels))
    height = math.ceil(len(panels) / columns)
    colours = {peer: f"C{index}" for index, peer in enumerate(rows["peer"].unique())}
    with figure(path, height, columns, size=(3.6 * columns, 3 * height)) as axes:
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        for axis, ((dtype, d, causal, direction), column, of_panel) in zip(axes.flat, panels, strict=False):
            for peer, of_peer in of_panel.groupby("peer", sort=False):
                line = number(of_peer[column]).set_axis(number(of_peer["Sq"])).sort_index()
                axis.plot(line[line > 0], "o-", ms=3, lw=2.5 if peer == OURS else 1.2, color=colours[peer])
            axis.set_xscale("log", base=2)
            axis.set_yscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_major_formatter("{x:g}")
            what = direction if column == "ms" else "memory before backward"
            axis.set_title(f"{what}, {dtype}, D {d}{', causal' if causal == '1' else ''}", fontsize=9)
            axis.set(xlabel="sequence length", ylabel="ms" if column == "ms" else "MiB")
        lines = [axes[0][0].plot([], [], color=colour, label=peer)[0] for peer, colour in colours.items()]
        axes[0][0].legend(handles=lines, fontsize=7)


def draw_ratios(rows: pd.DataFrame, path: Path) -> None:
    """The fastest other peer's time over flash_ext's, one bar a case; above the line at 1 flash_ext is faster."""
    panels = {key: best_ratios(of_panel) for key, of_panel in rows.groupby(["dtype", "pass"], sort=False)}
    width = max(4.0, 0.22 * max(map(len, panels.values())))
    columns = rows["pass"].nunique()
    height = math.ceil(len(panels) / columns)
    with figure(path, height, columns, size=(width * columns, 2.4 * height + 1.5), sharex=True, sharey=True) as axes:
        for axis, ((dtype, direction), ratios) in zip(axes.flat, panels.items(), strict=False):
            places = range(len(ratios))
            axis.bar(places, ratios - 1, BAR, bottom=1, color=["C2" if ratio >= 1 else "C3" for ratio in ratios])
            axis.axhline(1, color="black", lw=1)
            axis.set_yscale("log", base=2)
            axis.yaxis.set_major_formatter("{x:g}")
            axis.set(title=f"{direction}, {dtype}", ylabel="best other / flash_ext")
            axis.set_xticks(places, ratios.index, rotation=90, fontsize=6)


def draw_host_overhead(rows: pd.DataFrame, path: Path) -> None:
    """Microseconds of one call: one group of bars a pass and arguments, one bar a peer."""
    calls = wide(rows, (rows["pass"] + " " + rows["arguments"]).str.strip(), "us")
    with figure(path, 1, 1, size=(8, 3.5)) as axes:
        calls.plot.bar(ax=axes[0][0], width=BAR, rot=0, fontsize=7, grid=True, xlabel="", ylabel="microseconds")
        axes[0][0].legend(fontsize=8)


def draw_steps(rows: pd.DataFrame, path: Path) -> None:
    """One bar a setting, its phases stacked, the step's standard deviation at its end; "OOM" where memory ran out."""
    names = ["size", "batch", "context", "attention", "precision", "mode", "warmup", "compile", "checkpoint"]
    shown = [name for name in names if rows[name].nunique() > 1] or ["attention"]
    words = rows[shown].apply(lambda column: (column.name + " " + column).where(column.str.isdecimal(), column))
    phases = ["forward", "loss", "backward", "optimizer"]
    times = rows[[f"{phase}_ms" for phase in phases]].apply(number).fillna(0).set_axis(phases, axis=1)
    with figure(path, 1, 1, size=(9, 1.4 + 0.35 * len(rows))) as axes:
        axis = axes[0][0]
        times.set_axis(words.agg(", ".join, axis=1)).plot.barh(ax=axis, stacked=True, width=BAR, fontsize=8, grid=True)
        for place, row in enumerate(rows.to_dict("records")):
            if row["status"] == "OOM":
                axis.text(0, place, " OOM", va="center", color="C3")
            elif row["step_std"]:
                axis.errorbar(float(row["step_ms"]), place, xerr=float(row["step_std"]), color="black", capsize=3)
        axis.invert_yaxis()
        axis.set(xlabel="milliseconds of a step", ylabel="")
        axis.legend(fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))


def draw_losses(rows: pd.DataFrame, path: Path) -> None:
    """The loss curves in one picture; for two runs their |difference| below them, on a log axis."""
    losses = number(rows["loss"]).groupby(rows["attention"], sort=False)
    curves = {name: of_run.tolist() for name, of_run in losses}  # NaN, which is not drawn, for OOM
    pair = len(curves) == 2
    size = (8, 6) if pair else (8, 4.5)
    with figure(path, 1 + pair, 1, size=size, sharex=True, height_ratios=[3, 1][: 1 + pair]) as axes:
        top, bottom = axes[0][0], axes[-1][0]
        for (name, losses), style in zip(
            curves.items(), ({"lw": 4, "alpha": 0.45}, {"lw": 1.2, "ls": "--", "color": "black"}), strict=False
        ):
            top.plot(range(1, len(losses) + 1), losses, label=name, **style)
        top.set(title="{size}, {precision}, {batch} x {context} bytes".format(**rows.iloc[0]))
        top.set(ylabel="training loss (nats per byte)")
        top.legend()
        if pair:
            below = [max(abs(a - b), 1e-9) for a, b in zip(*curves.values(), strict=False)]
            bottom.semilogy(range(1, len(below) + 1), below, lw=1, color="tab:red")
            bottom.set(ylabel="|difference|")
        bottom.set(xlabel="step")


def draw_collectives(rows: pd.DataFrame, path: Path) -> None:
    """Bus bandwidth over size, a curve for each collective and number of ranks."""
    with figure(path, 1, 1, size=(7, 4)) as axes:
        axis = axes[0][0]
        for (ranks, collective), of_curve in rows.groupby(["ranks", "collective"], sort=False):
            label = f"{collective}, {ranks} ranks"
            axis.plot(number(of_curve["megabytes"]), number(of_curve["bus_gbs"]), marker="o", label=label)
        axis.set_xscale("log")
        axis.set(xlabel="MB", ylabel="bus bandwidth, GB/s", ylim=(0, None))
        axis.legend(fontsize=8)


def draw_ddp(rows: pd.DataFrame, path: Path) -> None:
    """One bar for each way to average gradients and number of ranks, the parts of a step stacked."""
    parts = ["forward", "backward", "communication", "optimizer"]
    times = rows[[f"{part}_ms" for part in parts]].apply(number).set_axis(parts, axis=1)
    with figure(path, 1, 1, size=(8, 1.4 + 0.35 * len(rows))) as axes:
        bars = times.set_axis(rows["way"] + ", " + rows["ranks"] + " ranks")
        bars.plot.barh(ax=axes[0][0], stacked=True, width=BAR, fontsize=8, grid=True)
        axes[0][0].invert_yaxis()
        axes[0][0].set(xlabel="milliseconds of a step", ylabel="")
        axes[0][0].legend(fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))


def draw_ranks(rows: pd.DataFrame, path: Path) -> None:
    """One bar for each rank of train_lm.py --parallel: the parts of a step, and what is held until backward."""
    parts = {name: number(rows[f"{name}_ms"]) for name in ("forward", "backward", "optimizer")}
    kinds = ("parameters", "gradients", "optimizer_state", "saved")
    held = {name.replace("_", " "): number(rows[f"{name}_bytes"]) / 1e9 for name in kinds}
    held["saved for backward"] = held.pop("saved")
    labels = rows["parallel"] + ", rank " + rows["rank"].astype(str)
    with figure(path, 1, 2, size=(12, 1.6 + 0.35 * len(rows)), sharey=True) as axes:
        for axis, columns, title in zip(axes[0], (parts, held), ("milliseconds of a step", "GB"), strict=True):
            bars = pd.DataFrame(columns).set_axis(labels)
            bars.plot.barh(ax=axis, stacked=True, width=BAR, fontsize=8, grid=True)
            axis.set(xlabel=title, ylabel="")
            axis.legend(fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))
        axes[0][0].invert_yaxis()


def draw_context_parallel(rows: pd.DataFrame, path: Path) -> None:
    """One bar for each method, length and number of ranks: milliseconds of forward and backward."""
    rows = rows[rows["ms"] != ""]
    with figure(path, 1, 1, size=(8, 1.2 + 0.35 * len(rows))) as axes:
        labels = rows["method"] + ", " + rows["tokens"].astype(str) + " tokens, " + rows["ranks"].astype(str) + " ranks"
        number(rows["ms"]).set_axis(labels).plot.barh(ax=axes[0][0], width=BAR, fontsize=8, grid=True)
        axes[0][0].invert_yaxis()
        axes[0][0].set(xlabel="milliseconds, forward and backward", ylabel="")


def draw_image_models(rows: pd.DataFrame, path: Path) -> None:
    """PyTorch's time over flash_ext's: a group of bars a model, a bar a pass; above the line at 1 ours is less."""
    ratios = (number(rows["torch_ms"]) / number(rows["flash_ext_ms"])).groupby([rows["model"], rows["pass"]]).last()
    bars = ratios.unstack().reindex(index=rows["model"].unique(), columns=rows["pass"].unique())
    with figure(path, 1, 1, size=(8, 3.5)) as axes:
        axis = axes[0][0]
        (bars - 1).plot.bar(ax=axis, width=BAR, rot=0, fontsize=8, grid=True, bottom=1)
        axis.axhline(1, color="black", lw=1)
        axis.set(xlabel="", ylabel="PyTorch / flash_ext")
        axis.legend(fontsize=8)


def draw_lab_times(rows: pd.DataFrame, path: Path) -> None:
    """What each kernel of a lesson reaches of its limit: a panel for each table, the line is the limit."""
    panels = list(rows.groupby("table", sort=False))
    height = max(len(of_panel) for _, of_panel in panels)
    with figure(path, 1, len(panels), size=(2 + 4 * len(panels), 1.4 + 0.3 * height)) as axes:
        for axis, (_, of_panel) in zip(axes[0], panels, strict=True):
            shares = number(of_panel["percent_of_limit"])
            shares.set_axis(of_panel["variant"]).plot.barh(ax=axis, width=BAR, fontsize=8, grid=True)
            axis.axvline(100, color="black", lw=1)
            axis.invert_yaxis()
            axis.set_title("{size} {of}".format(**of_panel.iloc[0]), fontsize=9)
            axis.set(xlabel=f"% of {' or '.join(of_panel['limit'].unique())}", ylabel="")


DRAWINGS: dict[str, Callable[[pd.DataFrame, Path], None]] = {  # by a column that only that kind of CSV has
    "each_step_ms": draw_steps,
    "flash_ext_ms": draw_image_models,
    "of": draw_lab_times,
    "Sq": draw_attention,
    "us": draw_host_overhead,
    "loss": draw_losses,
    "bus_gbs": draw_collectives,
    "speed_up": draw_context_parallel,
    "saved_bytes": draw_ranks,
    "exposed_ms": draw_ddp,
}


def picture_of(rows: pd.DataFrame) -> Callable[[pd.DataFrame, Path], None] | None:
    """The drawing that fits the columns of a benchmark's CSV; None for columns of something else."""
    return next((drawing for column, drawing in DRAWINGS.items() if column in rows), None)
