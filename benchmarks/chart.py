"""The chart of the README: how many times faster than cuDNN and FlashAttention-2, from the suite grid of one GPU.

    ratio = time of the other / time of flash_ext, of the same case and pass

A bar is the geometric mean over head dims and masks at one sequence length; a dot is one case, so that a case below 1
is seen. Called by report.py. Invariant: the picture carries the table that it was drawn from, so that
`report.py --check` can compare it with the CSV.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from figures import OURS, number
from harness import geomean

SUITE = "grid"
RIVALS = {"torch-cudnn": "cuDNN", "torch-flash": "FlashAttention-2"}
PASSES = {"fwd": "forward", "bwd": "backward"}
CASE = ["dtype", "D", "causal", "Sq", "pass"]
Ratios = dict[tuple[str, str], dict[int, list[float]]]


def ratios_of(rows: pd.DataFrame) -> Ratios:
    """{(pass, peer): {sequence length: the ratio of every case}} for the rivals that were measured."""
    times = rows.assign(ms=number(rows["ms"]), Sq=rows["Sq"].astype(int)).pivot(index=CASE, columns="peer", values="ms")
    result: Ratios = {}
    for way in PASSES:
        for peer in filter(times.columns.__contains__, RIVALS):
            ratios = (times[peer] / times[OURS]).dropna()
            ratios = ratios[ratios.index.get_level_values("pass") == way]
            if len(ratios):
                result[way, peer] = {length: list(of_length) for length, of_length in ratios.groupby(level="Sq")}
    return result


def length_name(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def chart_table(rows: pd.DataFrame) -> str:
    """The numbers of the chart in Markdown: geometric mean, and in brackets the lowest case; last, all lengths."""
    ratios = ratios_of(rows)
    lengths = sorted({length for of_line in ratios.values() for length in of_line})
    header = ["pass", "compared with", *(f"S = {length_name(length)}" for length in lengths), "all"]
    lines = [header, ["---", "---", *["--:"] * (len(lengths) + 1)]]
    for (way, peer), of_line in ratios.items():
        of_all = [ratio for of_length in of_line.values() for ratio in of_length]
        cells = [*(of_line.get(length, []) for length in lengths), of_all]
        shown = [f"{geomean(values):.2f} ({min(values):.2f})" if values else "-" for values in cells]
        lines.append([PASSES[way], RIVALS[peer], *shown])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw_chart(rows: pd.DataFrame, caption: str, path: Path) -> None:
    """One panel a pass: a group of bars a sequence length, one bar a rival."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    ratios = ratios_of(rows)
    passes = [(way, title) for way, title in PASSES.items() if any(key[0] == way for key in ratios)]
    drawing, axes = plt.subplots(1, len(passes), figsize=(4.6 * len(passes), 3.4), sharey=True, squeeze=False)
    for axis, (way, title) in zip(axes.flat, passes, strict=True):
        lengths = sorted({length for key, of_line in ratios.items() if key[0] == way for length in of_line})
        for index, (peer, name) in enumerate(RIVALS.items()):
            of_line = ratios.get((way, peer), {})
            for place, length in enumerate(lengths):
                values, middle = of_line.get(length, []), place + 0.4 * (index - 0.5)
                if values:
                    axis.bar(middle, geomean(values), 0.38, color=f"C{index}", label=None if place else name)
                    axis.plot([middle] * len(values), values, ".", color="black", ms=3)
        axis.axhline(1, color="black", lw=1)
        axis.set_xticks(range(len(lengths)), [length_name(length) for length in lengths])
        axis.set(title=title, xlabel="sequence length")
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    axes[0][0].set_ylabel("times faster")
    axes[0][-1].legend(fontsize=8, loc="upper right")
    axes[0][0].set_ylim(top=1.15 * axes[0][0].get_ylim()[1])
    drawing.text(0.5, 0.01, caption, ha="center", fontsize=6)
    drawing.tight_layout(rect=(0, 0.03, 1, 1))
    drawing.savefig(path, dpi=120, metadata={"Description": chart_table(rows)})
    plt.close(drawing)


def drawn_from(path: Path) -> str:
    """The table that a chart was drawn from; empty where there is no such picture."""
    from PIL import Image  # matplotlib brings it

    if not path.is_file():
        return ""
    with Image.open(path) as picture:
        return picture.info.get("Description", "")
