"""Promise: the tables of docs/learn/lab.md are what a run counts and what a GPU took, and its pictures are there.

A table's mark names its lesson, and its size where it is not the one for a machine without a GPU. Times come from
benchmarks/results/<device>/lab/, where benchmarks/lab_times.py writes them; without a file there are none.
``python tests/lab/test_page.py`` writes the tables anew.
"""

from __future__ import annotations

import csv
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

for name in ("numpy", "matplotlib"):
    pytest.importorskip(name)

from flash_ext.lab import report  # noqa: E402
from flash_ext.lab.block_size import tiles  # noqa: E402
from flash_ext.lab.lessons import LESSON_NAMES, Lesson, lesson  # noqa: E402
from flash_ext.lab.measure import count  # noqa: E402

ROOT = Path(__file__).parents[2]
PAGE, RESULTS = ROOT / "docs/learn/lab.md", ROOT / "benchmarks/results"
OF_THE_COMPILER = ("registers", "occupancy", "limited")


PLACE = re.compile(r"(<!-- table: (.*?) -->\n\n)(.*?)(<!-- end -->)", re.DOTALL)  # before, mark, table, after


def timed(name: str, mark: str, results: Path) -> dict[str, list[dict[str, str]]]:
    """Rows of a table, by the card on which they were timed; each file has all tables of a lesson."""
    found: dict[str, list[dict[str, str]]] = {}
    for path in sorted(results.glob(f"*/lab/{name}.csv")):
        with path.open() as file:
            if of_mark := [row for row in csv.DictReader(file) if row["table"] == mark]:
                found[of_mark[0]["gpu"]] = of_mark
    return found


def times(one: Lesson, rows: list[dict[str, str]]) -> dict[str, Callable[[report.Row], str]]:
    """Columns of what one card took; all of the lesson's kernels, as they are now, have a row."""
    by_name = {row["variant"]: row for row in rows}
    assert list(by_name) == [variant.name for variant in one.variants], "run benchmarks/lab_times.py again"
    kind, title = ("tflops", "TFLOP/s") if one.flops else ("gbs", "GB/s")
    limit = one.variants[0].peer.name if one.flops else "a copy"

    def share(row: report.Row) -> str:
        return f"{float(by_name[row.variant.name]['percent_of_limit']):.{1 if one.flops else 0}f}%"

    return {
        "time, us": lambda row: f"{float(by_name[row.variant.name]['us']):.1f}",
        title: lambda row: f"{float(by_name[row.variant.name][kind]):.{2 if one.flops else 0}f}",
        f"of {limit}": share,
    }


def origin(rows: list[dict[str, str]]) -> str:
    """Where times come from, in one sentence below a table."""
    row, changed = rows[0], " with changes" if rows[0]["dirty"] == "1" else ""
    kind, unit = ("limit_tflops", "TFLOP/s") if row["limit_tflops"] else ("limit_gbs", "GB/s")
    limits = [
        f"{name} at {float(rate):,.4g} {unit}" for name, rate in {row["limit"]: row[kind] for row in rows}.items()
    ]
    words = [f"Times: {row['gpu']}, {row['size']} {row['of']}", *limits, f"commit {row['commit']}{changed}"]
    return textwrap.fill(f"{'; '.join(words)}, torch {row['torch']}, driver {row['driver']}.", 120)


def table(mark: str, results: Path = RESULTS) -> str:
    """What the addresses alone decide, and what was timed."""
    name, *words = mark.split()
    one = lesson(name)
    size = one.checked(words, gpu=False)
    inputs = one.inputs(size)
    rows = []
    for variant in one.variants:
        counted = count(one, variant, size, inputs, variant.reference(*inputs).contiguous())
        rows.append(report.Row(variant, 256, counted, {}))
    columns = report.columns(one, size, rows, None)
    shown = {title: cell for title, cell in columns.items() if not title.startswith(OF_THE_COMPILER)}
    cards = timed(name, mark, results)
    for card, of_card in cards.items():
        beside = f", {card}" if len(cards) > 1 else ""
        shown |= {f"{title}{beside}": cell for title, cell in times(one, of_card).items()}
    return "\n".join(
        [report.markdown(report.cells(shown, rows)), *(f"{origin(of_card)}\n" for of_card in cards.values())]
    )


MARKS = {mark: shown for _, mark, shown, _ in PLACE.findall(PAGE.read_text())}
COUNTED = [mark for mark in MARKS if not mark.startswith("block_size ")]


def other_tables() -> dict[str, str]:
    """By their marks. Those of flash_ext's own tiles are there where its kernels are."""
    own = tiles.chosen()
    found = {"block_size computed": report.markdown(tiles.computed())}
    return found | ({"block_size used": report.markdown(own)} if len(own) > 1 else {})


@pytest.mark.parametrize("mark", COUNTED)
def test_the_page_has_what_is_counted(mark: str) -> None:
    assert MARKS[mark] == table(mark) + "\n"


def test_the_page_has_what_is_computed() -> None:
    assert MARKS["block_size computed"] == report.markdown(tiles.computed()) + "\n"


@pytest.mark.kernels("sm80", "sm90")
@pytest.mark.no_gpu
def test_the_page_has_the_tiles_of_flash_ext() -> None:
    assert MARKS["block_size used"] == report.markdown(tiles.chosen()) + "\n"


@pytest.mark.parametrize("name", LESSON_NAMES)
def test_the_page_has_every_lesson(name: str) -> None:
    text = PAGE.read_text()
    assert name in MARKS and f"\n## {name}: " in text
    picture = PAGE.parent / f"lab/{name}.png"
    assert f"](lab/{name}.png)" in text and 1000 < picture.stat().st_size < 60_000


if __name__ == "__main__":
    new = other_tables() | {mark: table(mark) for mark in COUNTED}
    PAGE.write_text(
        PLACE.sub(lambda found: f"{found[1]}{new.get(found[2], found[3][:-1])}\n{found[4]}", PAGE.read_text())
    )
