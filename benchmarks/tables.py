"""What every benchmark shows and leaves: tables; with --out rows as CSV, tables as Markdown and LaTeX, and a picture.

A table is rich's, of cells that may have its markup; Markdown and LaTeX are made of its cells.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table
from rich.text import Text


def make_table(*left: str, right: Iterable[str] = (), title: str = "") -> Table:
    """A table without rows: columns set to the left, then columns of figures, set to the right."""
    table = Table(*left, title=title)
    for header in right:
        table.add_column(header, justify="right")
    return table


def frame(table: Table) -> pd.DataFrame:
    """The cells without markup, under headers of one line: what was split behind a hyphen is one word."""
    headers = [str(column.header).replace("-\n", "-").replace("\n", " ") for column in table.columns]
    columns = [[Text.from_markup(str(cell)).plain for cell in column.cells] for column in table.columns]
    return pd.DataFrame(list(zip(*columns, strict=True)), columns=headers)


def markdown(table: Table) -> str:
    """Without the title. DataFrame.to_markdown pads cells to the longest, so that one figure would change all lines."""
    cells = frame(table)
    lines = [[cell.replace("|", r"\|") for cell in line] for line in (cells.columns, *cells.values)]
    head, *body = [f"| {' | '.join(line)} |" for line in lines]
    rule = "".join("|--:" if column.justify == "right" else "|---" for column in table.columns)
    return "\n".join([head, f"{rule}|", *body])


def latex(table: Table) -> str:
    """A tabular for the package booktabs with the title as its caption."""
    alignment = "".join(column.justify[0] for column in table.columns)
    caption = re.sub(r"([%&#_$])", r"\\\1", str(table.title)) or None
    return frame(table).to_latex(index=False, escape=True, column_format=alignment, caption=caption)


def csv_path(out: Path, name: str) -> Path:
    """Where --out puts the rows: into the folder as `name`.csv, or where it says itself when it ends in .csv."""
    return out if out.suffix == ".csv" else out / f"{name}.csv"


def write_csv(path: Path, rows: list[dict[str, Any]] | pd.DataFrame, origin: Mapping[str, str]) -> None:
    """Writes rows with the provenance columns after them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).assign(**origin).to_csv(path, index=False)


def read_csv(path: Path) -> pd.DataFrame:
    """The rows of a file that write_csv wrote, every cell as the text that stands there."""
    return pd.read_csv(path, dtype=str, keep_default_na=False)


def write_results(
    path: Path,
    rows: list[dict[str, Any]] | pd.DataFrame,
    origin: Mapping[str, str],
    tables: list[Table],
    picture: Callable[[pd.DataFrame, Path], None] | None,
) -> str:
    """Writes `path` (a .csv) and beside it .md, .tex and, with a picture, .png; returns one line that names them.

    `picture` gets the rows as they stand in the CSV and the .png's path, so that it can be drawn again from the file.
    """
    write_csv(path, rows, origin)
    blocks = [f"**{table.title}**\n\n{markdown(table)}" if table.title else markdown(table) for table in tables]
    source = ", ".join(f"{name} {value}" for name, value in origin.items() if value)
    path.with_suffix(".md").write_text("\n\n".join([*blocks, source]) + "\n")
    path.with_suffix(".tex").write_text("\n".join(map(latex, tables)))
    kinds = ["csv", "md", "tex"]
    if picture is not None:
        picture(read_csv(path), path.with_suffix(".png"))
        kinds.append("png")
    return f"Written to {path.parent}: {', '.join(f'{path.stem}.{kind}' for kind in kinds)}"
