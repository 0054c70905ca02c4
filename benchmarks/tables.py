"""What every benchmark shows and leaves: tables; with --out rows as CSV, tables as Markdown and LaTeX, and a picture.

A Table is set once and rendered four times: by rich where that is installed, as plain text where it is not, as
Markdown, and as LaTeX through pandas. CSV and Markdown need nothing installed; what LaTeX and pictures need is in the
extra `bench`, and a machine without it gets a line that says what was left out.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table as RichTable

    def progress_bar(console: Console) -> Progress:
        """A bar with a description, a count, the time left and a note."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        return Progress(*columns, TextColumn("{task.fields[note]}"), console=console, transient=True)
except ModuleNotFoundError:

    class Console:
        """print() of strings and tables; never a terminal, for there are no bars without rich."""

        def __init__(self, stderr: bool = False, **_: Any) -> None:
            self.file, self.is_terminal = (sys.stderr if stderr else sys.stdout), False

        def print(self, content: object = "", **_: Any) -> None:
            print(f"{content}\n" if isinstance(content, Table) else plain(str(content)), file=self.file, flush=True)

    def progress_bar(console: Console) -> Any:
        """Not reached: the console is no terminal."""
        raise NotImplementedError


def plain(text: str) -> str:
    """Text without rich's markup, such as [green]1.5[/]."""
    return re.sub(r"\[/?[a-z ]*\]", "", text)


@dataclass
class Column:
    """A header of one or more lines, and how the cells below it are set."""

    header: str
    justify: str = "left"


class Table:
    """Rows of strings, which may have rich's markup, under a header; an empty row is a line between sections."""

    def __init__(self, *headers: str, title: str = "") -> None:
        self.title, self.columns, self.rows = title, [Column(h) for h in headers], []

    def add_column(self, header: str, justify: str = "left") -> None:
        self.columns.append(Column(header, justify))

    def add_row(self, *cells: str, end_section: bool = False) -> None:
        self.rows.append([*cells, *[""] * (len(self.columns) - len(cells))])
        if end_section:
            self.add_section()

    def add_section(self) -> None:
        self.rows.append([])

    @property
    def headers(self) -> list[str]:
        """Each header in one line; what was split behind a hyphen is one word."""
        return [column.header.replace("-\n", "-").replace("\n", " ") for column in self.columns]

    @property
    def cells(self) -> list[list[str]]:
        """The rows without sections and markup."""
        return [[plain(cell) for cell in row] for row in self.rows if row]

    def __rich__(self) -> RichTable:
        table = RichTable(title=self.title or None)
        for column in self.columns:
            table.add_column(column.header, justify=column.justify)
        for row in self.rows:
            table.add_row(*row) if row else table.add_section()
        return table

    def __str__(self) -> str:
        headers = [column.header.split("\n") for column in self.columns]
        height = max(map(len, headers), default=0)
        top = [[h[i] if i < len(h) else "" for h in headers] for i in range(height)]
        lines = [*top, [], *([plain(cell) for cell in row] for row in self.rows)]
        widths = [max(len(line[i]) for line in lines if line) for i in range(len(self.columns))]

        def set_line(line: list[str]) -> str:
            cells = zip(line, widths, self.columns, strict=True)
            return "  ".join(t.rjust(w) if c.justify == "right" else t.ljust(w) for t, w, c in cells).rstrip()

        rule = "-" * (sum(widths) + 2 * len(widths) - 2)
        return "\n".join(filter(None, [self.title, *(set_line(line) if line else rule for line in lines)]))

    def markdown(self) -> str:
        """A Markdown table, without the title."""

        def line(cells: Iterable[str]) -> str:
            return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

        rule = "".join("|--:" if column.justify == "right" else "|---" for column in self.columns)
        return "\n".join([line(self.headers), f"{rule}|", *map(line, self.cells)])

    def latex(self) -> str:
        """A LaTeX tabular for the package booktabs, by pandas, with the title as its caption."""
        import pandas

        alignment = "".join("r" if column.justify == "right" else "l" for column in self.columns)
        titled = pandas.DataFrame(self.cells, columns=self.headers)
        caption = re.sub(r"([%&#_$])", r"\\\1", self.title) or None
        return titled.to_latex(index=False, escape=True, column_format=alignment, caption=caption)


def csv_path(out: Path, name: str) -> Path:
    """Where --out puts the rows: into the folder as `name`.csv, or where it says itself when it ends in .csv."""
    return out if out.suffix == ".csv" else out / f"{name}.csv"


def write_csv(path: Path, rows: list[dict[str, Any]], origin: Mapping[str, str]) -> None:
    """Writes rows (the columns of the first row) with the provenance columns after them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *origin], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **origin} for row in rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a file that write_csv wrote."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_results(
    path: Path,
    rows: list[dict[str, Any]],
    origin: Mapping[str, str],
    tables: Iterable[Table],
    picture: Callable[[list[dict[str, str]], Path], None] | None,
) -> str:
    """Writes `path` (a .csv) and beside it .md, .tex and, with a picture, .png; returns one line that names them.

    `picture` gets the rows as they stand in the CSV and the .png's path, so that it can be drawn again from the file.
    """
    write_csv(path, rows, origin)
    written, left_out = [path.name, path.with_suffix(".md").name], []
    blocks = [f"**{table.title}**\n\n{table.markdown()}" if table.title else table.markdown() for table in tables]
    source = ", ".join(f"{name} {value}" for name, value in origin.items() if value)
    path.with_suffix(".md").write_text("\n\n".join([*blocks, source]) + "\n")
    works: dict[str, tuple[tuple[str, ...], Callable[[Path], Any]]] = {
        ".tex": (("pandas", "jinja2"), lambda to: to.write_text("\n".join(table.latex() for table in tables))),
    }
    if picture is not None:
        works[".png"] = ("matplotlib",), lambda to: picture(read_csv(path), to)
    for suffix, (packages, write) in works.items():
        missing = [package for package in packages if find_spec(package) is None]
        if missing:
            left_out.append(f"; {suffix} needs {' and '.join(missing)}")
        else:
            write(path.with_suffix(suffix))
            written.append(path.with_suffix(suffix).name)
    return f"Written to {path.parent}: {', '.join(written)}{''.join(left_out)}"
