"""Promise: each lesson has a page in docs/learn/lab/, whose tables are what a run counts and what a GPU took.

And its picture is there. A table's mark names its lesson, and its size where it is not the one for a machine without a
GPU. Times come from benchmarks/results/<device>/lab/, where benchmarks/lab_times.py writes them; without a file there
are none, and a kernel that came later has "-".
``python tests/lab/test_page.py`` writes the tables anew.
"""

from __future__ import annotations

import csv
import re
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

for name in ("numpy", "matplotlib"):
    pytest.importorskip(name)

from flash_ext.lab import report  # noqa: E402
from flash_ext.lab.block_size import tiles  # noqa: E402
from flash_ext.lab.lessons import LESSON_NAMES, Lesson, Peer, lesson  # noqa: E402
from flash_ext.lab.measure import count  # noqa: E402

ROOT = Path(__file__).parents[2]
INDEX, RESULTS = ROOT / "docs/learn/lab.md", ROOT / "benchmarks/results"
PAGES = {name: ROOT / f"docs/learn/lab/{name}.md" for name in LESSON_NAMES}
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


def times(one: Lesson, rows: list[dict[str, str]]) -> dict[str, Callable[[str], str]]:
    """Columns of what one card took, by title, of a kernel's or a call's name; "-" where it was not timed.

    A share is shown if it is one of what the lesson compares with now.
    """
    by_name = {row["variant"]: row for row in rows}
    assert by_name.keys() <= limits_of(one).keys(), "run benchmarks/lab_times.py again"
    kind, title = ("tflops", "TFLOP/s") if one.flops else ("gbs", "GB/s")

    def number(key: str, digits: int, name: str) -> str:
        return f"{float(by_name[name][key]):.{digits}f}" if name in by_name else "-"

    def share(name: str) -> str:
        digits, there = 1 if one.flops else 0, name in by_name and by_name[name]["limit"] == limits_of(one)[name]
        return f"{number('percent_of_limit', digits, name)}%" if there else "-"

    columns = {"time, us": partial(number, "us", 1), title: partial(number, kind, 2 if one.flops else 0)}
    return columns | ({f"of {limit_of(one, one.peer)}": share} if any(share(name) != "-" for name in by_name) else {})


def limit_of(one: Lesson, peer: Peer | None) -> str:
    return peer.name if one.flops else "a copy"


def limits_of(one: Lesson) -> dict[str, str]:
    """With what each kernel is compared, and each call beside them, by name."""
    of_kernels = {variant.name: limit_of(one, variant.peer) for variant in one.variants}
    return of_kernels | {call.name: limit_of(one, one.peer) for call in one.beside}


def origin(one: Lesson, rows: list[dict[str, str]]) -> str:
    """Where times come from, in one sentence below a table."""
    row, changed = rows[0], " with changes" if rows[0]["dirty"] == "1" else ""
    kind, unit = ("limit_tflops", "TFLOP/s") if row["limit_tflops"] else ("limit_gbs", "GB/s")
    rates = {row["limit"]: row[kind] for row in rows if row["limit"] == limits_of(one)[row["variant"]]}
    limits = [f"{name} at {float(rate):,.4g} {unit}" for name, rate in rates.items()]
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
    cards, of_name = timed(name, mark, results), {}
    for card, of_card in cards.items():
        beside = f", {card}" if len(cards) > 1 else ""
        of_name |= {f"{title}{beside}": cell for title, cell in times(one, of_card).items()}
    shown |= {title: lambda row, cell=cell: cell(row.variant.name) for title, cell in of_name.items()}
    there = {row["variant"] for of_card in cards.values() for row in of_card}
    names = [call.name for call in one.beside if call.name in there]
    calls = [{"variant": name} | {title: cell(name) for title, cell in of_name.items()} for name in names]
    return "\n".join(
        [report.markdown(report.cells(shown, rows, calls)), *(f"{origin(one, rows)}\n" for rows in cards.values())]
    )


MARKS = {mark: shown for page in PAGES.values() for _, mark, shown, _ in PLACE.findall(page.read_text())}
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
def test_every_lesson_has_its_page(name: str) -> None:
    """With its own tables, its command and its picture; the index names what it is about."""
    text = PAGES[name].read_text()
    about = re.match(rf"# {name}: (.*)\n", text)[1]
    assert f"| [{name}](lab/{name}.md) | {about} |\n" in INDEX.read_text()
    assert {mark.split()[0] for _, mark, _, _ in PLACE.findall(text)} == {name} and name in MARKS
    assert f"```bash\npython -m flash_ext.lab run {name}\n```\n" in text
    assert f"]({name}.png)" in text and 1000 < PAGES[name].with_suffix(".png").stat().st_size < 60_000


def test_pages_follow_each_other() -> None:
    found = [re.findall(r"^Next: \[(\w+)\]\(\1\.md\)\.$", page.read_text(), re.MULTILINE) for page in PAGES.values()]
    assert found == [*([name] for name in LESSON_NAMES[1:]), []]
    assert re.findall(r"^\| \[(\w+)\]", INDEX.read_text(), re.MULTILINE) == list(LESSON_NAMES)


if __name__ == "__main__":
    new = other_tables() | {mark: table(mark) for mark in COUNTED}
    for page in PAGES.values():
        page.write_text(
            PLACE.sub(lambda found: f"{found[1]}{new.get(found[2], found[3][:-1])}\n{found[4]}", page.read_text())
        )
