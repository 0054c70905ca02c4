"""The table of a run: what was counted, and on a GPU what was timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from flash_ext.lab import cuda
from flash_ext.lab.counts import LIMITS, occupancy
from flash_ext.lab.lessons import Lesson, Variant
from flash_ext.lab.measure import Counted, Times
from flash_ext.lab.ncu import Measured

CAPABILITIES = " / ".join(LIMITS)


@dataclass(frozen=True)
class Row:
    """One variant; ``registers`` by compute capability, without a compiler none; ``seconds`` None without a GPU.

    ``peer_rate``: FLOP/s of the variant's peer, where it has one and a GPU is here.
    """

    variant: Variant
    threads: int  # of a block
    counted: Counted
    registers: dict[str, int]
    seconds: float | None = None
    peer_rate: float | None = None

    def part(self) -> float:
        """Of the grid that was executed."""
        return self.counted.blocks / self.counted.all_blocks

    def of_all(self, counted: int) -> float:
        """Of the whole grid; in proportion, where not all of it was executed."""
        return counted * self.counted.all_blocks / self.counted.blocks

    def requests(self) -> str:
        """Of the whole grid, where not all of it was executed in proportion."""
        number = f"{self.of_all(self.counted.counts.requests()):,.0f}"
        return number if self.part() == 1 else f"~{number}"


@dataclass(frozen=True)
class Timed:
    """What is beside the variants; ``peer_rate`` as a row has it."""

    seconds: float
    peer_rate: float | None


def row(
    lesson: Lesson,
    variant: Variant,
    threads: int,
    counted: Counted,
    seconds: float | None = None,
    peer_rate: float | None = None,
) -> Row:
    """With registers, where a compiler is here."""
    registers = {}
    if not cuda.missing():
        registers = {cc: cuda.compiled(lesson, variant, cc.replace(".", "")).registers for cc in LIMITS}
    return Row(variant, threads, counted, registers, seconds, peer_rate)


def short(number: float | None) -> str:
    """At most two digits behind the point; "-" for none."""
    return "-" if number is None else f"{round(number, 2):g}"


def percent(share: float) -> str:
    return f"{round(100 * share, 1):g}%"


def occupied(row: Row) -> list[tuple[float, str]]:
    """Share and limit, for each compute capability."""
    shared = sum(row.counted.counts.shared.values())
    return [occupancy(limits, row.threads, shared, row.registers.get(cc)) for cc, limits in LIMITS.items()]


def once(words: Iterable[str]) -> str:
    """Joined by a slash; one word for all, if they are the same."""
    return " / ".join(dict.fromkeys(words))


def traffic(lesson: Lesson, size: Sequence[int], copy_rate: float) -> dict[str, Callable[[Row | Timed], str]]:
    """Bytes that must be moved in a second, beside those of a copy."""
    moved = lesson.moved(size)
    return {
        "GB/s": lambda row: f"{moved / row.seconds / 1e9:.0f}",
        "of a copy": lambda row: f"{moved / row.seconds / copy_rate:.0%}",
    }


def arithmetic(lesson: Lesson, size: Sequence[int]) -> dict[str, Callable[[Row | Timed], str]]:
    """Additions and multiplications in a second, beside those of each variant's peer; the lesson's is the title."""
    flops = lesson.flops(size)
    return {
        "TFLOP/s": lambda row: f"{flops / row.seconds / 1e12:.2f}",
        f"of {lesson.peer.name}": lambda row: f"{flops / row.seconds / row.peer_rate:.1%}",
    }


def timed(lesson: Lesson, size: Sequence[int], copy_rate: float | None) -> dict[str, Callable[[Row | Timed], str]]:
    """What a GPU took, by title."""
    rates = arithmetic(lesson, size) if lesson.flops else traffic(lesson, size, copy_rate)
    return {"time, us": lambda row: f"{1e6 * row.seconds:.1f}"} | rates


def calls(lesson: Lesson, size: Sequence[int], times: Times) -> list[dict[str, str]]:
    """Of each call beside the variants: its cells by title."""
    titles = timed(lesson, size, times.copy_rate)
    found = {name: Timed(seconds, times.peer_rates.get(lesson.peer)) for name, seconds in times.beside.items()}
    return [{"variant": name} | {title: cell(one) for title, cell in titles.items()} for name, one in found.items()]


def columns(
    lesson: Lesson, size: Sequence[int], rows: Sequence[Row], copy_rate: float | None
) -> dict[str, Callable[[Row], str]]:
    """What to show, by title: only what some row has."""
    shown: dict[str, Callable[[Row], str]] = {"variant": lambda row: row.variant.name}
    if all(row.seconds is not None for row in rows):
        shown |= timed(lesson, size, copy_rate)
    shown |= {
        "sectors a load": lambda row: short(row.counted.counts.sectors(store=False)),
        "sectors a store": lambda row: short(row.counted.counts.sectors(store=True)),
        "their bytes used": lambda row: percent(row.counted.counts.used()),
    }
    if lesson.flops:
        flops = lesson.flops(size)
        shown["FLOP a byte"] = lambda row: short(flops * row.part() / row.counted.counts.bytes_moved())
    shown |= {
        "ways, shared load": lambda row: short(row.counted.counts.ways(store=False)),
        "ways, shared store": lambda row: short(row.counted.counts.ways(store=True)),
        "requests": Row.requests,
    }
    for title, cell in lesson.columns.items():
        shown[title] = partial(cell, size=size)
    if all(row.registers for row in rows):
        shown[f"registers {CAPABILITIES}"] = lambda row: once(map(str, row.registers.values()))
    shown[f"occupancy {CAPABILITIES}"] = lambda row: once(percent(share) for share, _ in occupied(row))
    shown["limited by"] = lambda row: once(limit for _, limit in occupied(row))
    return {title: cell for title, cell in shown.items() if any(cell(row) != "-" for row in rows)}


def both(row: Row, measured: Measured) -> dict[str, tuple[str, str]]:
    """By title: what was counted of a variant, and what Nsight Compute measured of it.

    A way is a pass for each whole warp, half or quarter that asks, and how many of these ask is what was counted.
    """
    counts, shown = row.counted.counts, {}
    for title, store in (("sectors a load", False), ("sectors a store", True)):
        key = "global", store
        found = measured.costs[key] / measured.requests[key] if measured.requests[key] else None
        shown[title] = short(counts.sectors(store)), short(found)
    for title, store in (("ways, shared load", False), ("ways, shared store", True)):
        key, sites = ("shared", store), counts.of("shared", store)
        parts = sum(site.parts for site in sites) / max(1, sum(site.requests for site in sites))
        known = measured.requests[key] and parts and key in measured.costs
        found = measured.costs[key] / measured.requests[key] / parts if known else None
        shown[title] = short(counts.ways(store)), short(found)
    return shown | {"requests": (row.requests(), f"{sum(measured.requests.values()):,}")}


def beside(rows: Sequence[Row], measured: Sequence[Measured]) -> list[list[str]]:
    """The table of what was counted and what was measured, with the titles first."""
    found = [both(row, of_row) for row, of_row in zip(rows, measured, strict=True)]
    titles = [title for title in found[0] if any(of_row[title] != ("-", "-") for of_row in found)]
    lines = [
        [row.variant.name, *(" / ".join(of_row[title]) for title in titles)]
        for row, of_row in zip(rows, found, strict=True)
    ]
    return [["variant", *titles], *lines]


def cells(
    shown: Mapping[str, Callable[[Row], str]], rows: Sequence[Row], beside: Sequence[Mapping[str, str]] = ()
) -> list[list[str]]:
    """With the titles first, and last what is beside the variants, which has cells of some titles."""
    lines = [[cell(row) for cell in shown.values()] for row in rows]
    return [list(shown), *lines, *([one.get(title, "-") for title in shown] for one in beside)]


def markdown(table: Sequence[Sequence[str]]) -> str:
    """The table for a page or a file."""
    lines = [f"| {' | '.join(line)} |" for line in table]
    return "\n".join([lines[0], "|---" + "|--:" * (len(table[0]) - 1) + "|", *lines[1:]]) + "\n"


def notes(rows: Sequence[Row], copy_rate: float | None) -> list[str]:
    """What the table does not say, a sentence each."""
    said = []
    if any(row.seconds is None for row in rows):
        said.append("There is no GPU here: times need a card, counts do not.")
    for peer, rate in {row.variant.peer: row.peer_rate for row in rows if row.peer_rate is not None}.items():
        compared = ", ".join(row.variant.name for row in rows if row.variant.peer == peer)
        said.append(f"{peer.name} does {rate / 1e12:.1f} TFLOP/s on this card; compared with it: {compared}.")
    if copy_rate is not None:
        said.append(f"A copy by torch reads and writes {copy_rate / 1e9:.0f} GB/s together on this card.")
    sampled = [row for row in rows if row.part() < 1]
    if sampled:
        part = max(row.part() for row in sampled)
        said.append(f"Of {len(sampled)} variants a part of the blocks was counted, at most {part:.2%}, evenly spread.")
    if why := cuda.missing():
        said.append(f"Registers are left out, of occupancy too: {why}")
    return said
