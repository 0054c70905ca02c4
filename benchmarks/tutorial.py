#!/usr/bin/env python3
"""Writes the tables of docs/learn/profiling.md from the files that its commands wrote.

    python benchmarks/tutorial.py             fills in every block
    python benchmarks/tutorial.py --check     changes nothing; fails where the page and the files disagree

A block of the page stands between two comments. The first names its source in benchmarks/results/nvidia-h200/profiling:
`<!-- table: FILE.md, HEADING -->` is the table under a heading (`all`: all tables of the file), with `, N rows` at the
end only its first N;
`<!-- lines: FILE.txt, FIRST-LAST -->` are lines of text. The second is `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/learn/profiling.md"
RESULTS = ROOT / "benchmarks/results/nvidia-h200/profiling"
MISSING = "Not measured yet."
BLOCK = re.compile(r"(<!-- (table|lines): ([^,\n]+), ([^\n]+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def table(text: str, place: str) -> str:
    """The table under a heading; `place` is the heading and perhaps how many rows."""
    heading, rows = re.fullmatch(r"(.*?)(?:, (\d+) rows)?", place).groups()
    if heading != "all":
        section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        text = section.group(1) if section else ""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    if not lines:
        raise SystemExit(f"error: there is no table under the heading {heading!r}")
    return "\n".join(lines[: 2 + int(rows)] if rows else lines)


def lines(text: str, place: str) -> str:
    first, last = map(int, place.split("-"))
    return "```\n" + "\n".join(text.splitlines()[first - 1 : last]) + "\n```"


def fill(page: str, results: Path) -> str:
    """The page with every block as the files say; one whose file is missing says so."""

    def block(match: re.Match[str]) -> str:
        begin, kind, name, place, _, end = match.groups()
        file = results / name
        text = (table if kind == "table" else lines)(file.read_text(), place) if file.exists() else MISSING
        return f"{begin}\n{text}\n\n{end}"

    return BLOCK.sub(block, page)


def main(check: bool = False) -> None:
    """Writes, or with --check fails instead."""
    old = PAGE.read_text()
    new = fill(old, RESULTS)
    if check and new != old:
        sys.exit("error: docs/learn/profiling.md is not what its files say; run python benchmarks/tutorial.py")
    PAGE.write_text(new)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,))
