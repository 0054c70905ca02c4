#!/usr/bin/env python3
"""Times the kernels of the memory-access lab (python -m flash_ext.lab) on this GPU, for docs/learn/lab/.

    python benchmarks/lab_times.py --out benchmarks/results/nvidia-h200/lab      all lessons, NAME.csv each
    python benchmarks/lab_times.py transpose --out benchmarks/results/nvidia-h200/lab
    python tests/lab/test_page.py                                                shows them on the pages

A row is a kernel at the size that a lesson has on a GPU, with a cold L2 cache, beside the limit of this card: what a
copy by torch moves, or what a library does for the same product. Below a lesson's kernels are the calls that it has
beside them; one that this machine cannot make is left out, with a sentence. A wrong result ends the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from figures import draw_lab_times
from harness import (
    BenchmarkError,
    Reporter,
    command_line,
    load_flash_ext,
    make_folder,
    provenance,
    run_main,
    stdout_console,
)
from tables import Table, make_table, write_results
from tyro.conf import Positional

from flash_ext.lab import lessons
from flash_ext.lab.lessons import LESSON_NAMES, LabError, Lesson
from flash_ext.lab.measure import Times, references, time_all

# Tables of the page beside a lesson's first: the same rows on a GPU, with a head dim and a stride of that kind
OTHER_SIZES = {"load_tile": {"load_tile 256 64 64": (1 << 18, 128, 128), "load_tile 256 62 63": (1 << 18, 126, 127)}}


@dataclass
class Args:
    lessons: Positional[tuple[str, ...]] = LESSON_NAMES
    out: Path | None = None  # folder for NAME.csv, .md, .tex and .png (None: only shown)


def rows_of(lesson: Lesson, table: str, size: Sequence[int], times: Times) -> list[dict[str, Any]]:
    """One a variant, then one a call beside them; ``table`` is the page's mark of that table."""
    rows = []
    found = [(variant.name, times.seconds[variant.name], variant.peer) for variant in lesson.variants]
    found += [(name, seconds, lesson.peer) for name, seconds in times.beside.items()]
    for name, seconds, peer in found:
        kind, scale = "gbs", 1e9
        work, limit, rate = lesson.moved(size), "a copy", times.copy_rate
        if lesson.flops:
            kind, scale = "tflops", 1e12
            work, limit, rate = lesson.flops(size), peer.name, times.peer_rates[peer]
        row = {"table": table, "size": " x ".join(map(str, size)), "of": lesson.of, "variant": name}
        row |= {
            "us": f"{1e6 * seconds:.3f}",
            "gbs": "",
            "tflops": "",
            "limit": limit,
            "limit_gbs": "",
            "limit_tflops": "",
        }
        row |= {kind: f"{work / seconds / scale:.4g}", f"limit_{kind}": f"{rate / scale:.5g}"}
        rows.append(row | {"percent_of_limit": f"{100 * work / seconds / rate:.1f}"})
    return rows


def measured(lesson: Lesson, table: str, size: Sequence[int]) -> list[dict[str, Any]]:
    """The rows of one of the page's tables."""
    inputs = lesson.inputs(size)
    times = time_all(lesson, size, inputs, references(lesson, inputs))
    print(*times.left_out, sep="\n", end="\n" if times.left_out else "")
    return rows_of(lesson, table, size, times)


def shown(rows: Sequence[dict[str, Any]]) -> Table:
    """A table of rows that have one size."""
    first = rows[0]
    title = f"{first['table'].split()[0]}, {first['size']} {first['of']}"
    table = make_table(
        "variant", right=("us", "TFLOP/s" if first["tflops"] else "GB/s", "limit", "% of limit"), title=title
    )
    for row in rows:
        table.add_row(row["variant"], row["us"], row["tflops"] or row["gbs"], row["limit"], row["percent_of_limit"])
    return table


def measure_all(chosen: Sequence[Lesson], out: Path | None, origin: dict[str, str]) -> tuple[list[Table], list[str]]:
    """The tables, and what was written: a lesson's files as soon as it is measured."""
    todo = [
        (lesson, {lesson.name: lesson.checked((), gpu=True)} | OTHER_SIZES.get(lesson.name, {})) for lesson in chosen
    ]
    tables: list[Table] = []
    written: list[str] = []
    with Reporter("lab", sum(len(sizes) for _, sizes in todo)) as progress:
        for lesson, sizes in todo:
            found = []
            for table, size in sizes.items():
                found.append(measured(lesson, table, size))
                progress.advance(table)
            of_lesson = list(map(shown, found))
            tables += of_lesson
            if out:
                rows = [row for rows in found for row in rows]
                written.append(write_results(out / f"{lesson.name}.csv", rows, origin, of_lesson, draw_lab_times))
    return tables, written


def main() -> None:
    """Command line; see the top of this file."""
    args = command_line(Args)
    load_flash_ext()
    if not torch.cuda.is_available():
        raise BenchmarkError("the lab's kernels are timed on a GPU, and PyTorch sees none here.")
    out, origin = args.out and make_folder(args.out), provenance("cuda")
    try:
        tables, written = measure_all(list(map(lessons.lesson, args.lessons)), out, origin)
    except LabError as error:
        raise BenchmarkError(str(error)) from None
    for table in tables:
        stdout_console().print(table)
    print(*written, sep="\n", end="\n" if written else "")


if __name__ == "__main__":
    run_main(main)
