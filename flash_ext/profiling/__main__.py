"""The commands of flash_ext.profiling: ``python -m flash_ext.profiling nsys | memory | numerics``, each with --help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flash_ext.profiling import memory, nsys
from flash_ext.profiling.numerics import Row, numerics


def numerics_table(rows: list[Row]) -> str:
    """Markdown, which reads well on a terminal, too."""
    table = [("case", "values", "computed in", "result", "relative error", "why")]
    table.append(tuple("---" for _ in table[0]))
    for row in rows:
        error = "" if row.error is None else f"{row.error:.1e}"
        table.append((row.case, row.values, row.accumulator, row.result, error, row.why))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in table)


def run_numerics(args: argparse.Namespace) -> None:
    text = numerics_table(numerics(args.device))
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def parser() -> argparse.ArgumentParser:
    about = "Profiling of PyTorch programs; each command has --help."
    top = argparse.ArgumentParser(prog="python -m flash_ext.profiling", description=about)
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for name, what, add, run in (
        ("nsys", "run a program under Nsight Systems and report on it", nsys.add_arguments, nsys.main),
        ("memory", "show a memory snapshot", memory.add_arguments, memory.main),
        ("numerics", "where half precision loses accuracy", add_numerics_arguments, run_numerics),
    ):
        command = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        add(command)
        command.set_defaults(run=run)
    return top


def add_numerics_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="whose arithmetic (default cpu)")
    command.add_argument("--out", type=Path, metavar="FILE.md", help="write the table there, too")


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    try:
        args.run(args)
    except (nsys.NsysError, memory.SnapshotError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
