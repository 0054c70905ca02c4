"""Promise: a ring's calls see what one call sees, each key of a row once; causal, there is one call a step."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flash_ext import reference
from flash_ext.distributed import allgather, packed, packed_ring, ring
from flash_ext.distributed.layout import BALANCES, Band, Layout, even_layout, layout_of
from flash_ext.distributed.local import Options
from flash_ext.distributed.pairs import Matters, Pair

ALL = [Matters(), Matters(keys=True), Matters(keys=True, rows=True), Matters(distance=True)]


def positions(layout: Layout, rank: int) -> torch.Tensor:
    return torch.cat([torch.arange(segment.start, segment.end) for segment in layout.ranks[rank]])


def plan(rank: int, queries: Layout, keys: Layout, band: Band, matters: Matters = ALL[0]) -> ring.Plan:
    group: Any = SimpleNamespace(rank=rank, size=len(queries.ranks))
    return ring.plan(group, queries, keys, band, Options(), matters)


def counts(found: ring.Plan) -> list[int]:
    """Of calls, by step."""
    return [len(found.pairs[found.source(step)]) for step in range(found.group.size)]


def seen_by(found: ring.Plan, queries: Layout, keys: Layout, matters: Matters) -> torch.Tensor:
    """How often a row of the rank sees a key."""
    own = positions(queries, found.group.rank)
    seen = torch.zeros(queries.length, keys.length, dtype=torch.int64)
    touched = torch.zeros(len(own), dtype=torch.bool)

    def add(pair: Pair, source: int) -> None:
        rows, read = own[pair.call.rows], positions(keys, source)[pair.read]
        if matters.keys:  # a range of the columns of a mask
            assert torch.equal(read, torch.arange(pair.call.keys.start, pair.call.keys.stop))
        if matters.rows:
            assert torch.equal(rows, torch.arange(pair.call.queries.start, pair.call.queries.stop))
        window = pair.call.band["window_left"], pair.call.band["window_right"]
        align = "bottom_right" if pair.call.band["bottom_right"] else "top_left"
        assert all(side is None or side >= 0 for side in window)
        seen[rows.unsqueeze(1), read] += reference.band_mask(len(rows), len(read), window=window, align=align)
        assert pair.first == (not touched[pair.call.rows].any())
        touched[pair.call.rows] = True

    for step in range(found.group.size):
        for pair in found.pairs[found.source(step)]:
            add(pair, found.source(step))
    return seen


@pytest.mark.parametrize("matters", ALL, ids=["nothing", "keys", "rows", "distance"])
def test_what_is_seen(matters: Matters) -> None:
    rng = random.Random(1)
    for _ in range(600):
        ranks, balance = rng.randint(1, 4), rng.choice(BALANCES)
        same = [rng.randint(0, 9) for _ in range(ranks)]
        queries = layout_of(tuple(same), balance)
        keys = queries if rng.random() < 0.5 else layout_of(tuple(rng.randint(0, 9) for _ in same), balance)
        window = tuple(rng.choice([None, rng.randint(0, 12)]) for _ in "lr")
        causal, bottom_right = rng.random() < 0.5, rng.random() < 0.5
        band = Band.of(causal, window, bottom_right, queries.length, keys.length)
        align = "bottom_right" if bottom_right else "top_left"
        whole = reference.band_mask(queries.length, keys.length, causal=causal, window=window, align=align)
        for rank in range(ranks):
            found = plan(rank, queries, keys, band, matters)
            own = positions(queries, rank)
            assert torch.equal(seen_by(found, queries, keys, matters)[own], whole[own].long())


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_one_call_a_step(ranks: int, balance: str) -> None:
    """Causal or not, where each rank holds as many tokens as the others."""
    layout = even_layout(64 * ranks, ranks, balance)
    for band in (Band(None, 0, 0), Band(None, None, 0)):
        for rank in range(ranks):
            steps = counts(plan(rank, layout, layout, band))
            assert max(steps) == 1 and (balance == "contiguous" or min(steps) == 1)


def test_calls_of_two_ranks() -> None:
    """With what needs rows or keys side by side, too; so are both chunks of the last rank."""
    layout = even_layout(128, 2, "zigzag")
    expected = [([1, 1], [1, 1]), ([2, 1], [1, 1]), ([3, 1], [1, 1]), ([3, 1], [1, 1])]
    for matters, of_ranks in zip(ALL, expected, strict=True):
        assert tuple(counts(plan(rank, layout, layout, Band(None, 0, 0), matters)) for rank in range(2)) == of_ranks


def test_plans_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the same lengths, bands and options; also whether dropout has its map."""
    made: list[Any] = []

    def counted(do: Any) -> Any:
        return lambda *given: (made.append(do), do(*given))[1]

    for of, name in ((ring, "pairs_of"), (allgather, "pairs_of"), (ring.slopes, "parts_of")):
        monkeypatch.setattr(of, name, counted(getattr(of, name)))
    group: Any = SimpleNamespace(rank=1, size=4)
    counts = []
    for _ in range(2):
        layout, band = even_layout(32 * 4 * 3, 4, "zigzag"), Band(None, None, 0)
        ring.plan(group, layout, layout, band, Options(), Matters(distance=True))
        allgather.plan_by_distance(group, layout, layout, band, Options())
        assert ring.has_dropout_map(band, layout, layout, True)
        counts.append(len(made))
    assert counts[0] == counts[1] > 0


class _Clamps(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "clamp" in str(func)
        return func(*args, **(kwargs or {}))


def test_lengths_of_packed_sequences_are_made_once() -> None:
    """Of a ring's segments once each; of other ranks' calls nothing but what they read."""
    ranks = 8
    cu, group = torch.tensor([0, 9, 100, 256], dtype=torch.int32), SimpleNamespace(rank=3, size=ranks)
    layout = even_layout(256, ranks, "contiguous")
    with _Clamps() as clamps:
        packed_ring.plan(group, layout, Band(None, None, 0), cu, 256, Options(), False)  # type: ignore[arg-type]
    assert clamps.count == ranks
    own, other = (packed._calls(layout, 3, Band(None, 0, 0), given, 256) for given in (cu, None))
    assert [(c.rows, c.keys, c.queries) for c in own] == [(c.rows, c.keys, c.queries) for c in other]
    assert all(call.band == {} for call in other)
