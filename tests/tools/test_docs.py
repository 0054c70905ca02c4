"""Promise: the tables of docs/learn/5-shared-memory.md follow from that page's words (tests/cpp asks the code)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

DOC = (Path(__file__).resolve().parents[2] / "docs/learn/5-shared-memory.md").read_text()
ROWS = 32
CHUNK, LINE = 16, 128

Layout = Callable[[int, int, int], int]  # pitch, row, byte of the row -> byte of the tile
Place = tuple[int, int]  # row, byte of the row
Access = Callable[[int], Iterator[list[Place]]]  # pitch -> the 32 places of each instruction


def xor_chunk(key: int, pitch: int, row: int, byte: int) -> int:
    return row * pitch + (byte // CHUNK ^ key) * CHUNK + byte % CHUNK


def swizzled(pitch: int, row: int, byte: int) -> int:
    return xor_chunk(row % 8 if pitch % LINE == 0 else row // 2 % 4, pitch, row, byte)


def swizzled_for_floats(pitch: int, row: int, byte: int) -> int:
    b0, b1, b2 = row % 2, row // 2 % 2, row // 4 % 2
    return xor_chunk(4 * b1 + 2 * (b0 ^ b2) + b2, pitch, row, byte)


LAYOUTS: list[Layout] = [
    lambda pitch, row, byte: row * pitch + byte,
    lambda pitch, row, byte: row * (pitch + CHUNK) + byte,
    swizzled,
    swizzled_for_floats,
]


def copy(size: int) -> Access:
    def access(pitch: int) -> Iterator[list[Place]]:
        places = [(row, byte) for row in range(ROWS) for byte in range(0, pitch, size)]
        for first in range(0, len(places), 32):
            yield places[first : first + 32]

    return access


def matrices(order: list[Place]) -> Access:
    """ldmatrix.x4 of 16 rows by 2 chunks; `order` is (8-row half, chunk) of each of the four matrices."""

    def access(pitch: int) -> Iterator[list[Place]]:
        for row in range(0, ROWS, 16):
            for byte in range(0, pitch, 2 * CHUNK):
                yield [(row + 8 * half + i, byte + CHUNK * chunk) for half, chunk in order for i in range(8)]

    return access


def pairs(element: int) -> Access:
    def access(pitch: int) -> Iterator[list[Place]]:
        for row in range(0, ROWS, 8):
            for byte in range(0, pitch, 8 * element):
                yield [(row + g, byte + 2 * t * element) for g in range(8) for t in range(4)]

    return access


def floats(first_rows: list[int], step: int) -> Access:
    def access(pitch: int) -> Iterator[list[Place]]:
        for row in (block + first for block in range(0, ROWS, 8) for first in first_rows):
            for byte in range(0, pitch, 32):
                yield [(row + step * t, byte + 4 * g) for g in range(8) for t in range(4)]

    return access


ACCESSES: dict[str, tuple[int, Access]] = {  # bytes a lane
    "`cp.async` of 16 bytes": (16, copy(16)),
    "`cp.async` of 4 bytes": (4, copy(4)),
    "`ldmatrix.x4` of A, `.trans` of V": (16, matrices([(0, 0), (1, 0), (0, 1), (1, 1)])),
    "`ldmatrix.x4` of B, `.trans` of A": (16, matrices([(0, 0), (0, 1), (1, 0), (1, 1)])),
    "store of 2-byte pairs": (4, pairs(2)),
    "store of float pairs": (8, pairs(4)),
    "load of floats, rows r + t": (4, floats([0, 4], 1)),
    "load of floats, rows r + 2t": (4, floats([0, 1], 2)),
}


def extra_passes(addresses: list[int], size: int) -> int:
    lanes = LINE // size
    extra = 0
    for first in range(0, len(addresses), lanes):
        words = {(address + part) // 4 for address in addresses[first : first + lanes] for part in range(0, size, 4)}
        extra += max(Counter(word % 32 for word in words).values()) - 1
    return extra


def tables() -> Iterator[tuple[list[str], list[list[str]]]]:
    """Each table of the page: its header and its rows, as cells."""
    for block in DOC.split("\n\n"):
        if block.startswith("| "):
            header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
            yield header, rows


def test_bank_conflict_tables() -> None:
    seen = set()
    for header, rows in tables():
        if header[0] != "access":
            continue
        pitches = [int(cell.removesuffix(" B")) for cell in header[2:]]
        for name, passes, *cells in rows:
            seen.add(name)
            size, access = ACCESSES[name]
            assert int(passes) == size // 4, name
            for pitch, cell in zip(pitches, cells, strict=True):
                shown = [int(count) for count in cell.split("/")]
                assert len(shown) == (4 if "float" in name else 3), name
                for count, layout in zip(shown, LAYOUTS[: len(shown)], strict=True):
                    instructions = ([layout(pitch, *place) for place in places] for places in access(pitch))
                    assert count == max(extra_passes(lanes, size) for lanes in instructions), (name, pitch, cell)
    assert seen == set(ACCESSES)


def test_bytes_of_the_example_tile() -> None:
    (rows,) = (rows for header, rows in tables() if header[0] == "head dim")
    assert rows == [
        [str(d), f"{384 * d * 2 // 1024} KiB", f"{384 * d * 4 // 1024} KiB"] for d in (32, 64, 96, 128, 192, 256)
    ]
