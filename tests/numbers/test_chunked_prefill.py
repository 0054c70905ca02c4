"""Promise: with `batch_invariant` a prompt that comes in chunks has the bits of one that comes at once, where chunks
are whole tiles of queries (`explain` says how many) and the last one, which need not be, has more than a few."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers import DTYPES, name_of, rand
from torch import Tensor

import flash_ext

FEW = 24  # queries, up to which a CPU multiplies otherwise


def prefill(tensors: list[Tensor], chunks: list[int], **options: Any) -> tuple[Tensor, Tensor]:
    """out (B, S, Hq, E) and lse (B, Hq, S) of a prompt, by calls that append."""
    query, key, value = tensors
    caches = [torch.full_like(t, torch.nan) for t in (key, value)]
    outs, lses, done = [], [], 0
    for n in chunks:
        fresh = {name: t[:, done : done + n] for name, t in (("query", query), ("key", key), ("value", value))}
        query_rows = fresh.pop("query")
        out, lse = flash_ext.attention_with_cache(
            query_rows, *caches, **fresh, cache_seqlens=done, return_lse=True, batch_invariant=True, **options
        )
        outs.append(out)
        lses.append(lse)
        done += n
    assert done == query.shape[1]
    return torch.cat(outs, 1), torch.cat(lses, 2)


def tile_of(query: Tensor, key: Tensor, **options: Any) -> int:
    """Queries of a tile, as `explain` says."""
    rows = torch.empty(query.shape[1:], dtype=query.dtype, device="meta")
    keys = torch.empty(key.shape[1:], dtype=key.dtype, device="meta")
    cu = torch.tensor([0, len(rows)], dtype=torch.int32, device="meta")
    plan = flash_ext.explain(
        rows, keys, keys, cu_seqlens_q=cu, max_q=len(rows), align="bottom_right", batch_invariant=True,
        device=query.device, **options,
    )  # fmt: skip
    return plan.forward.block_m


BANDS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": (100, 0)},
    "not causal": {"causal": False, "window": (300, 0)},
    "softcap": {"causal": True, "softcap": 9.0},
}


@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_whole_tiles(dtype: torch.dtype, band: str, head_dim: int, device: str, backend: str) -> None:
    if backend == "chunked" or (device == "cuda" and dtype == torch.float64):
        return  # the composite has no tiles, and no kernel takes float64 packed
    options, chance, length = BANDS[band], random.Random(head_dim), 1000
    tensors = [rand(2, length, heads, head_dim, dtype=dtype, device=device) for heads in (2, 1, 1)]
    tile = tile_of(*tensors[:2], **options)
    whole = prefill(tensors, [length], **options)
    for _ in range(3):
        chunks, left = [], length
        while left > tile + FEW:
            chunks.append(tile * chance.randint(1, max(1, (left - FEW - 1) // tile // 2)))
            left -= chunks[-1]
        for got, expected in zip(prefill(tensors, [*chunks, left], **options), whole, strict=True):
            assert torch.equal(got, expected), chunks


def test_other_chunks_may_differ() -> None:
    """One query at a time is another kernel on a CPU: what the promise leaves out is not the same."""
    tensors = [rand(1, 300, heads, 64) for heads in (4, 2, 2)]
    with flash_ext.use_backend("cpu"):
        whole, chunked = prefill(tensors, [300]), prefill(tensors, [297, 1, 1, 1])
    assert torch.equal(chunked[0][:, :297], whole[0][:, :297])
    torch.testing.assert_close(chunked, whole)
    assert not torch.equal(chunked[0], whole[0])
