"""Promise: the tables of docs/learn/lab.md are what a run counts, and its pictures are there.

``python tests/lab/test_page.py`` writes the tables anew.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

for name in ("numpy", "matplotlib"):
    pytest.importorskip(name)

from flash_ext.lab import report  # noqa: E402
from flash_ext.lab.lessons import LESSON_NAMES, lesson  # noqa: E402
from flash_ext.lab.measure import count  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs/learn/lab.md"
OF_THE_COMPILER = ("registers", "occupancy", "limited")


def place(name: str) -> re.Pattern[str]:
    """Before, the table, after."""
    return re.compile(rf"(<!-- table: {name} -->\n\n)(.*?)(<!-- end -->)", re.DOTALL)


def table(name: str) -> str:
    """What the addresses alone decide, at the size for a machine without a GPU."""
    one = lesson(name)
    size = one.checked((), gpu=False)
    inputs = one.inputs(size)
    rows = []
    for variant in one.variants:
        counted = count(one, variant, size, inputs, variant.reference(*inputs).contiguous())
        rows.append(report.Row(variant, 256, counted, {}))
    columns = report.columns(one, size, rows, None)
    shown = {title: cell for title, cell in columns.items() if not title.startswith(OF_THE_COMPILER)}
    return report.markdown(report.cells(shown, rows))


@pytest.mark.parametrize("name", LESSON_NAMES)
def test_the_page_has_what_is_counted(name: str) -> None:
    text = PAGE.read_text()
    ((_, shown, _),) = place(name).findall(text)
    assert shown == table(name) + "\n"
    picture = PAGE.parent / f"lab/{name}.png"
    assert f"](lab/{name}.png)" in text and 1000 < picture.stat().st_size < 60_000


if __name__ == "__main__":
    page = PAGE.read_text()
    for name in LESSON_NAMES:
        page = place(name).sub(rf"\1{table(name)}\n\3", page)
    PAGE.write_text(page)
