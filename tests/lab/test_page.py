"""Promise: the tables of docs/learn/lab.md are what a run counts, and its pictures are there.

A table's mark names its lesson, and its size where it is not the one for a machine without a GPU.
``python tests/lab/test_page.py`` writes the tables anew.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

for name in ("numpy", "matplotlib"):
    pytest.importorskip(name)

from flash_ext.lab import report  # noqa: E402
from flash_ext.lab.block_size import tiles  # noqa: E402
from flash_ext.lab.lessons import LESSON_NAMES, lesson  # noqa: E402
from flash_ext.lab.measure import count  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs/learn/lab.md"
OF_THE_COMPILER = ("registers", "occupancy", "limited")


PLACE = re.compile(r"(<!-- table: (.*?) -->\n\n)(.*?)(<!-- end -->)", re.DOTALL)  # before, mark, table, after


def table(mark: str) -> str:
    """What the addresses alone decide."""
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
    return report.markdown(report.cells(shown, rows))


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
