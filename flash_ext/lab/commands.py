"""The lab's commands; flash_ext.lab.__main__ starts them where what they need is installed."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from flash_ext.lab import cuda, lessons, picture, report
from flash_ext.lab import ncu as profiler
from flash_ext.lab.lessons import LabError
from flash_ext.lab.measure import Times, count, references, time_all
from flash_ext.lab.source import SourceError

TABLE_WIDTH = 132
MEASURED = "Counted from addresses / measured by Nsight Compute"


def list_lessons() -> None:
    """Lists the lessons and their variants."""
    for lesson in lessons.lessons():
        print(f"{lesson.name} (--size {' '.join(name.upper() for name in lesson.sizes)}): {lesson.about}")
        for variant in lesson.variants:
            print(f"    {variant.name:18}{variant.expect}")
    print("\npython -m flash_ext.lab run NAME counts, and times on a GPU; show NAME [VARIANT] prints the kernels.")


def show_source(name: str, variants: Positional[tuple[str, ...]] = ()) -> None:
    """Prints kernels of a lesson, with their notes, and the instructions that they include.

    Args:
        name: of the lesson
        variants: of it; all, if none is named
    """

    lesson = lessons.lesson(name)
    chosen = [lesson.variant(variant) for variant in variants] or lesson.variants
    seen: set[Path] = set()
    for one in chosen:
        defines = "".join(f" -D{macro}={value}" for macro, value in one.defines.items())
        print(f"// ---- {lesson.name} {one.name}{defines}: {one.expect}")
        if (path := lesson.path(one)) not in seen:
            print(path.read_text())
        seen.add(path)
    if any('#include "ptx.cuh"' in path.read_text() for path in seen):
        print(f"// ---- ptx.cuh\n{(lessons.FOLDER / 'ptx.cuh').read_text()}")


def run_lesson(name: str, size: tuple[str, ...] = (), out: Path | None = None, ncu: bool = False) -> None:
    """Runs a lesson: compares each variant with torch, counts what its addresses cost and, on a GPU, times it.

    Args:
        name: of the lesson
        size: a whole number for each that the lesson has, or one for all; without it what suits the machine
        out: a folder for NAME.md, the table, and NAME.png, the picture; without it no files are written, or on a
            machine without a GPU the picture alone, in the present folder
        ncu: shows beside what is counted what NVIDIA Nsight Compute measures on this GPU
    """

    gpu, lesson = torch.cuda.is_available(), lessons.lesson(name)
    numbers = lesson.checked(size, gpu)
    if ncu:
        profiler.needed()
    if out:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LabError(f"--out {out}: it cannot be made: {error.strerror or error}.") from None
    if gpu and cuda.missing():
        raise LabError(cuda.missing())
    inputs = lesson.inputs(numbers)
    right = references(lesson, inputs)
    times = time_all(lesson, numbers, inputs, right) if gpu else Times({}, {}, None)
    rows = []
    for variant in lesson.variants:
        threads = math.prod(variant.launch(numbers).block)
        counted = count(lesson, variant, numbers, inputs, right[variant.reference])
        seconds, peer_rate = times.seconds.get(variant.name), times.peer_rates.get(variant.peer)
        rows.append(report.row(lesson, variant, threads, counted, seconds, peer_rate))
    columns = report.columns(lesson, numbers, rows, times.copy_rate)
    table = report.cells(columns, rows, report.calls(lesson, numbers, times))
    measured = {MEASURED: report.beside(rows, profiler.measure(lesson, numbers))} if ncu else {}
    title = f"{lesson.name}, {' x '.join(map(str, numbers))} {lesson.of}"
    print_table(title, table)
    text = [f"# {title}", "", report.markdown(table)]
    for about, beside in (measured | lesson.tables()).items():
        print_table(about, beside)
        text += [f"## {about}", "", report.markdown(beside)]
    notes = [*report.notes(rows, times.copy_rate), *times.left_out]
    print("\n".join(notes))
    if out:
        (out / f"{name}.md").write_text("\n".join([*text, *notes]) + "\n")
    if out or not gpu:
        file = (out or Path()) / f"{name}.png"
        picture.save(lesson, rows, file)
        print(f"Picture: {file}")


def print_table(title: str, table: Sequence[Sequence[str]]) -> None:
    """On a terminal as wide as that, elsewhere TABLE_WIDTH."""
    shown = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, header in enumerate(table[0]):
        shown.add_column(header, justify="right" if index else "left", overflow="fold", no_wrap=index == 0)
    for line in table[1:]:
        shown.add_row(*line)
    (Console() if sys.stdout.isatty() else Console(width=TABLE_WIDTH)).print(shown)


def later(command: Callable[..., None]) -> Callable[..., Any]:
    """The same arguments, but the call is returned: within tyro a ValueError would pass for a wrong argument."""
    return functools.wraps(command)(lambda *args, **options: functools.partial(command, *args, **options))


def run(argv: Sequence[str]) -> None:
    """One command line; a mistake ends the program with one sentence."""
    config = (tyro.conf.DisallowNone, tyro.conf.PositionalRequiredArgs)
    commands = {"list": later(list_lessons), "run": later(run_lesson), "show": later(show_source)}
    about, prog = "Small kernels that differ in one access pattern.", "python -m flash_ext.lab"
    command = tyro.extras.subcommand_cli_from_dict(commands, args=argv, prog=prog, description=about, config=config)
    try:
        command()
    except (LabError, SourceError) as error:
        sys.exit(f"error: {error}")
