"""Promise: which method "auto" takes does not depend on the batch where results may not, and counts what a rank has to
do; a group's links are measured with messages that a GPU's transport likes.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flash_ext import distributed as fd
from flash_ext import reference
from flash_ext.distributed import allgather, choose, estimate, links
from flash_ext.distributed.choose import Facts
from flash_ext.distributed.layout import BALANCES, Band, busiest, even_layout
from flash_ext.distributed.links import Link, Links

LINK = Link(1e-5, 2.0**34)
FIGURES = Links(LINK, LINK, 1e14)


def facts(**other: Any) -> Facts:
    given = {"ranks": (3,), "batch": 1, "heads": (4, 4, 4), "columns": (128, 128), "lengths": (1 << 18,) * 2}
    return Facts(**(given | {"itemsize": 2} | other))


def test_batch_invariant_methods_do_not_depend_on_the_batch() -> None:
    for heads in ((4, 4, 4), (6, 1, 1), (6, 6, 6), (1, 1, 1)):
        taken = {
            choose.choose("auto", facts(batch=batch, heads=heads, batch_invariant=True)).method
            for batch in (1, 2, 7, 64, 1024)
        }
        assert len(taken) == 1, heads
    assert choose.choose("auto", facts(batch=1)).method == "allgather"
    assert choose.choose("auto", facts(batch=64)).method == "ring"
    # What is packed is the batch: cuts and sums of ranks would go by it.
    packed = facts(packed=True, batch_invariant=True)
    for tokens in (1 << 10, 1 << 24):
        for heads in ((4, 4, 4), (6, 1, 1)):
            assert choose.choose("auto", replace(packed, heads=heads, lengths=(tokens,) * 2)).method == "ulysses"
    q = torch.empty(64, 4, 1 << 16, 128, dtype=torch.bfloat16, device="meta")
    assert fd.explain_context_parallel(q, q, q, 3).method == "ring"
    assert fd.explain_context_parallel(q, q, q, 3, batch_invariant=True).method == "allgather"


def test_batch_invariant_chunks_do_not_depend_on_the_batch() -> None:
    counts = {}
    for invariant in (False, True):
        plan: Any = SimpleNamespace(
            rows_dim=2, length=1 << 16, options=SimpleNamespace(batch_invariant=invariant)
        )  # fmt: skip
        x = [torch.empty(batch, 8, 5, 8, device="meta") for batch in (1, 3, 64)]
        counts[invariant] = {len(allgather._chunks(plan, t, t, t, False)) for t in x}
    assert len(counts[False]) > 1 and len(counts[True]) == 1


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_busiest_rank(ranks: int, balance: str) -> None:
    """Under a causal band the last of contiguous ranks has (2 N - 1) / N of the mean."""
    length = 128 * ranks
    layout = even_layout(length, ranks, balance)
    for window, causal in (((None, None), True), ((None, None), False), ((40, None), True), ((70, 30), False)):
        keep = reference.band_mask(length, length, causal=causal, window=window)
        work = [sum(float(keep[s.start : s.end].sum()) for s in held) for held in layout.ranks]
        found = busiest(Band.of(causal, window, False, length, length), layout, length)
        assert found == pytest.approx(max(work) * ranks / sum(work), rel=0.1)
    causal_share = busiest(Band(None, 0, 0), layout, length)
    assert causal_share == pytest.approx(1.0 if balance == "zigzag" else (2 * ranks - 1) / ranks, rel=0.01)
    assert busiest(Band(None, 0, 0), even_layout(0, ranks, balance), 0) == 1.0


def test_the_busiest_rank_is_estimated() -> None:
    fast = Links(Link(0.0, 2.0**80), Link(0.0, 2.0**80), 1e14)
    for method in ("allgather", "ring"):
        even, uneven = (
            estimate.seconds(method, facts(busiest=share), fast, (1, 2), 1)[0] for share in (1.0, 1.75)
        )  # fmt: skip
        assert uneven == pytest.approx(1.75 * even)
    slow = choose.choose("auto", facts(ranks=(4,), heads=(4, 1, 1), busiest=1.75), FIGURES)
    assert slow.method == "ulysses" and choose.choose("auto", facts(ranks=(4,), heads=(4, 1, 1))).method == "allgather"


def test_what_is_refused_names_another_way() -> None:
    for method, ranks, other in (
        ("ring", (2,), "; use 'ulysses'"), ("allgather", (2,), "; use 'ulysses'"),
        ("usp", (2, 2), "; use a group of one dimension and 'ulysses'"),
    ):  # fmt: skip
        for refused in (facts(ranks=ranks, dropout_has_map=False), facts(ranks=ranks, packed=True, scores=True)):
            assert (choose.refusal(method, refused) or "").endswith(other)


def test_bytes_of_both_passes_count() -> None:
    """Two H200, 16,384 tokens, 32 heads of keys: allgather, which sends as much in forward, took 1.39 times as long."""
    for heads, method in (((32, 32, 32), "ulysses"), ((32, 16, 16), "ulysses"), ((32, 8, 8), "allgather")):
        taken = choose.choose("auto", facts(ranks=(2,), heads=heads, lengths=(1 << 14,) * 2))
        assert taken.method == method, heads


def test_no_heads_are_estimated() -> None:
    for method in ("ulysses", "allgather", "ring"):
        assert estimate.seconds(method, facts(heads=(0, 4, 4)), FIGURES, (8, 8), 1)[0] >= 0


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8, 64, 200])
def test_messages_are_aligned(size: int) -> None:
    """What is sent to a rank begins where NCCL reads whole words, and is counted as it is."""

    def message(tensor: torch.Tensor, rank: int) -> Any:
        return SimpleNamespace(tensor=tensor)

    group: Any = SimpleNamespace(size=size, rank=1, send=message, receive=message)
    buffers = torch.zeros(2, links.LARGE["cpu"], dtype=torch.uint8)
    for count in (links.SMALL, links.LARGE["cpu"]):
        sizes = set()
        for operation in links._exchange(group, buffers, count):
            assert operation.tensor.storage_offset() % 512 == 0
            sizes.add(operation.tensor.numel())
        assert len(sizes) == 1 and min(sizes) > 0
