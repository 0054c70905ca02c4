"""Promise: what a tile of attention takes is computed as by hand, and flash_ext's own tiles are those of its plans."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from h100_plan import CALL, FORWARD

pytest.importorskip("numpy")

import flash_ext
from flash_ext.explain import Explanation
from flash_ext.lab.block_size import tiles
from flash_ext.lab.block_size.lesson import reversed_tiles
from flash_ext.lab.counts import LIMITS


def test_a_tile_by_hand() -> None:
    """128 queries and 64 keys of head dim 128, in bfloat16.

    Q has 128 x 128, K and V have 64 x 128 elements. A warp's S is 16 x 64, its O 16 x 128, over 32 threads. Of every
    key's 2 x 128 elements, 512 bytes, come 4 x 128 x 128 FLOPs. Two blocks of 65 KiB fit 164 KiB, three 228; but 112
    registers are 3584 a warp, 18 warps, in fours 16: two blocks of 8.
    """
    tile = tiles.Tile(128, 128, 2)
    assert (tile.threads, tile.shared, tile.registers) == (256, 65536, (32, 16, 64))
    assert tile.flops_a_byte == 4 * 128 * 128 / 512
    assert [tile.blocks(limits) for limits in LIMITS.values()] == [(2, "registers"), (2, "registers")]
    assert [tiles.Tile(128, 128, 4).blocks(limits) for limits in LIMITS.values()] == [(1, "shared memory")] * 2


def test_a_larger_head_dim_wants_a_smaller_tile() -> None:
    """The most queries of which a block fits 9.0: fewer at head dim 256, in 32 bits fewer still."""
    titles, *lines = tiles.computed()
    assert len(lines) == len(tiles.HEAD_DIMS) * len(tiles.ROWS) and {len(line) for line in lines} == {len(titles)}
    for at, expected in ((4, {"64": 192, "128": 192, "256": 128}), (7, {"64": 192, "128": 192, "256": 96})):
        fits = {line[0]: int(line[1]) for line in lines if not line[at].endswith("/ 0")}
        assert fits == expected


def test_the_tiles_of_a_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the plan says them; without kernels for GPUs there is no such table."""
    asked = []

    def explain(query: torch.Tensor, *others: torch.Tensor, device: str) -> Explanation:
        asked.append((query.shape[-1], query.dtype, device))
        if query.dtype == torch.float32:
            raise flash_ext.AttentionError("no")
        forward = dataclasses.replace(FORWARD, block_m=query.shape[-1])
        return Explanation(forward, forward, call=CALL)

    monkeypatch.setattr(flash_ext, "explain", explain)
    monkeypatch.setattr(flash_ext, "use_backend", contextlib.nullcontext)
    lines = tiles.chosen()
    assert len(asked) == 9 and {device for _, _, device in asked} == {"cuda"}
    assert lines[1] == ["64", "sm90", "bfloat16", "64 x 128", "2", "193.2"] and len(lines) == 1 + 6
    monkeypatch.setattr(tiles, "plan", lambda *call: None)
    assert list(tiles.tables()) == ["Computed: a tile of queries and 64 keys"]


def test_a_tile_of_halves_has_twice_the_rows_in_the_same_bytes() -> None:
    """256 floats are 512 halves, 8 rows of 64: tiles of 3, 3 and 2 of them."""
    halves = torch.arange(512).half()
    order = [2, 1, 0, 5, 4, 3, 7, 6]
    found = reversed_tiles(3, 64, torch.float16)(halves.view(torch.float32).view(1, 256))
    assert torch.equal(found.view(-1).view(torch.float16).view(8, 64), halves.view(8, 64)[order])
