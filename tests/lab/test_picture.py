"""Promise: a picture shows which thread of the first warp has which word, sector by sector or pass by pass."""

from __future__ import annotations

import pytest

np = pytest.importorskip("numpy")

from flash_ext.lab.lessons import lesson  # noqa: E402
from flash_ext.lab.measure import count  # noqa: E402
from flash_ext.lab.picture import NOBODY, bank_grid, sector_grid  # noqa: E402

LANES = np.arange(32)


def grid(name: str, variant: str, *size: int) -> np.ndarray:
    """Of the first load that the lesson's picture shows."""
    one = lesson(name)
    space, store = one.pictured[0]
    size = size or (64,) * len(one.sizes)
    inputs = one.inputs(size)
    counts = count(one, one.variant(variant), size, inputs, one.variant(variant).reference(*inputs)).counts
    return (sector_grid if space == "global" else bank_grid)(counts.of(space, store)[0])


def test_sectors() -> None:
    assert np.array_equal(grid("add", "row_major"), LANES.reshape(4, 8))
    late = np.full(40, NOBODY)
    late[1:33] = LANES
    assert np.array_equal(grid("add", "misaligned"), late.reshape(5, 8))
    rows = np.full((32, 8), NOBODY)
    rows[:, 0] = LANES
    assert np.array_equal(grid("add", "column_major"), rows)
    assert np.array_equal(grid("add", "float4"), np.repeat(LANES, 4).reshape(16, 8))


def test_a_word_that_all_want() -> None:
    expected = np.full((1, 8), NOBODY)
    expected[0, 0] = 0
    assert np.array_equal(grid("matmul", "column_is_x"), expected)


def test_a_chunk_of_which_a_part_is_copied() -> None:
    expected = np.repeat(LANES, 4).reshape(16, 8)
    expected[[7, 15], 6:] = NOBODY  # floats 62 and 63 of two rows
    assert np.array_equal(grid("load_tile", "cp_async", 32, 62, 64), expected)


def test_passes() -> None:
    assert np.array_equal(grid("bank_conflicts", "stride_1"), LANES[None])
    two = np.full((2, 32), NOBODY)
    two[:, ::2] = LANES.reshape(2, 16)
    assert np.array_equal(grid("bank_conflicts", "stride_2"), two)
    one_bank = np.full((32, 32), NOBODY)
    one_bank[:, 0] = LANES
    assert np.array_equal(grid("bank_conflicts", "stride_32"), one_bank)
    swapped = np.repeat(LANES ^ 1, 4).reshape(4, 32)  # thread t has the chunk of its neighbour
    assert np.array_equal(grid("bank_conflicts", "float4"), swapped)
    assert np.array_equal(grid("bank_conflicts", "padding"), LANES[None])
