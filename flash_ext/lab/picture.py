"""The picture of a run: which thread of the first warp touches which word, as a coloured grid for each access.

Global memory is drawn in rows of one sector, 8 words; grey is what comes along unused. Shared memory is drawn in
columns of one bank, a row for each pass; the more rows, the longer the warp waits.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flash_ext.lab.counts import BANKS, SECTOR, Site
from flash_ext.lab.lessons import Lesson
from flash_ext.lab.memory import WARP, WORD
from flash_ext.lab.report import Row

NOBODY = -1
WORDS = SECTOR // WORD
ROWS_WITH_NUMBERS = 16
COLOURS = 64  # of the file: those of the threads and the edges of letters


def sector_grid(site: Site) -> np.ndarray:
    """A row for each sector of the first request, in order: which thread has each word, the first of several."""
    addresses, active = site.first
    lanes = np.flatnonzero(active)
    sectors = {number: row for row, number in enumerate(sorted(set((addresses[lanes] // SECTOR).tolist())))}
    grid = np.full((len(sectors), WORDS), NOBODY)
    for lane in reversed(lanes):
        taken = site.width if site.wanted is None else site.wanted[lane]
        for word in range(addresses[lane] // WORD, (addresses[lane] + taken) // WORD):
            grid[sectors[word // WORDS], word % WORDS] = lane
    return grid


def bank_grid(site: Site) -> np.ndarray:
    """A row for each pass of the first request: which thread has the word of each bank, the first of several."""
    addresses, active = site.first
    lanes_of_part = WARP * WORD // site.width
    rows: list[np.ndarray] = []
    for first in range(0, WARP, lanes_of_part):
        passes: list[np.ndarray] = []
        served: set[int] = set()
        for lane in filter(active.__getitem__, range(first, first + lanes_of_part)):
            for word in range(addresses[lane] // WORD, (addresses[lane] + site.width) // WORD):
                if word in served:
                    continue
                served.add(word)
                free = next((row for row in passes if row[word % BANKS] == NOBODY), None)
                if free is None:
                    free = np.full(BANKS, NOBODY)
                    passes.append(free)
                free[word % BANKS] = lane
        rows += passes
    return np.stack(rows)


def draw(axes: Any, grid: np.ndarray, title: str, across: str) -> None:
    """One grid, with the threads' numbers where there is room."""
    axes.set_facecolor("0.85")
    colours = np.ma.masked_equal(grid, NOBODY)
    axes.imshow(colours, cmap="turbo", vmin=0, vmax=WARP - 1, aspect="auto", interpolation="nearest")
    axes.set_title(title, fontsize=7)
    axes.set_xlabel(across, fontsize=6)
    axes.set_xticks(np.arange(grid.shape[1] + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(grid) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=0.5)
    axes.tick_params(which="both", length=0, labelsize=6)
    axes.set_yticks([0, len(grid) - 1] if len(grid) > 1 else [0])
    axes.set_xticks([0, grid.shape[1] - 1])
    if grid.shape[1] == WORDS and len(grid) <= ROWS_WITH_NUMBERS:
        for row, column in zip(*np.nonzero(grid != NOBODY), strict=True):
            lane = grid[row, column]
            colour = "white" if lane < 5 or lane > 27 else "black"  # on the dark ends of the colours
            axes.text(column, row, str(lane), ha="center", va="center", fontsize=5, color=colour)


def grid_of(site: Site) -> tuple[np.ndarray, str, str]:
    """The grid of a site, what is counted along it, and what lies across."""
    if site.space == "global":
        grid = sector_grid(site)
        return grid, f"{len(grid)} sectors", "word of the sector"
    grid = bank_grid(site)
    return grid, f"{len(grid)} pass{'es' if len(grid) > 1 else ''}", "bank"


def subplots(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, np.ndarray]:
    """A figure, and its axes in rows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")


def write(figure: Any, path: Path) -> None:
    """A PNG of few colours."""
    from matplotlib import pyplot
    from PIL import Image  # of matplotlib

    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110)
    pyplot.close(figure)
    Image.open(drawn).convert("RGB").quantize(COLOURS).save(path, optimize=True)


def save(lesson: Lesson, rows: Sequence[Row], path: Path) -> None:
    """A column for each variant, a row for each kind of access that the lesson wants to be seen; or what it draws."""
    if lesson.draw:
        lesson.draw(rows, path)
        return
    shape = len(lesson.pictured), len(rows)
    size = 1.6 * len(rows), 0.5 + 2.3 * len(lesson.pictured)
    figure, axes = subplots(*shape, size)
    for column, row in enumerate(rows):
        for down, (space, store) in enumerate(lesson.pictured):
            sites, place = row.counted.counts.of(space, store), axes[down, column]
            kind = f"{space} {'store' if store else 'load'}"
            if sites:
                grid, counted, across = grid_of(sites[0])
                draw(place, grid, f"{kind}: {counted}", across)
            else:
                place.set_axis_off()
                place.set_title(f"no {kind}", fontsize=7)
        first = axes[0, column]
        first.set_title(f"{row.variant.name}\n{first.get_title()}", fontsize=7)
    title = f"{lesson.name}: the first warp. A colour is a thread, from 0 (dark blue) to 31 (dark red)."
    figure.suptitle(title, fontsize=8)
    write(figure, path)
