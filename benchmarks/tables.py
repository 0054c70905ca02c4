"""Tables, console and progress of the benchmarks: rich's where it is installed, plain text where it is not.

The plain classes do what the benchmarks use of rich and no more: columns, rows, sections, a title; markup is dropped.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Any

try:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table

    def progress_bar(console: Console) -> Progress:
        """A bar with a description, a count, the time left and a note."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        return Progress(*columns, TextColumn("{task.fields[note]}"), console=console, transient=True)
except ModuleNotFoundError:

    @dataclass
    class Column:
        """A header of one or more lines, and how the cells below it are set."""

        header: str
        justify: str = "left"

    class Table:
        """Rows under a header, as rich.table.Table takes them; str() sets them."""

        def __init__(self, *headers: str, title: str = "", **_: Any) -> None:
            self.title, self.columns, self.rows = title, [Column(h) for h in headers], []

        def add_column(self, header: str, justify: str = "left", **_: Any) -> None:
            self.columns.append(Column(header, justify))

        def add_row(self, *cells: str, end_section: bool = False, **_: Any) -> None:
            texts = [re.sub(r"\[/?[a-z ]*\]", "", cell) for cell in cells]
            self.rows.append(texts + [""] * (len(self.columns) - len(texts)))
            if end_section:
                self.add_section()

        def add_section(self) -> None:
            self.rows.append([])  # an empty row is a line

        def __str__(self) -> str:
            headers = [column.header.split("\n") for column in self.columns]
            height = max(map(len, headers), default=0)
            top = [[h[i] if i < len(h) else "" for h in headers] for i in range(height)]
            lines = [*top, [], *self.rows]
            widths = [max(len(line[i]) for line in lines if line) for i in range(len(self.columns))]

            def set_line(line: list[str]) -> str:
                cells = zip(line, widths, self.columns, strict=True)
                return "  ".join(t.rjust(w) if c.justify == "right" else t.ljust(w) for t, w, c in cells).rstrip()

            rule = "-" * (sum(widths) + 2 * len(widths) - 2)
            return "\n".join(filter(None, [self.title, *(set_line(line) if line else rule for line in lines)]))

    class Console:
        """print() of strings and tables; never a terminal, for there are no bars without rich."""

        def __init__(self, stderr: bool = False, **_: Any) -> None:
            self.file, self.is_terminal = (sys.stderr if stderr else sys.stdout), False

        def print(self, content: object = "", **_: Any) -> None:
            print(f"{content}\n" if isinstance(content, Table) else content, file=self.file, flush=True)

    def progress_bar(console: Console) -> Any:
        """Not reached: the console is no terminal."""
        raise NotImplementedError
