"""Cases of context_cases.py: what "auto" measures of a group's links, and what it makes of that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from context_helpers import rand
from ranks import World

import flash_ext
from flash_ext import distributed as fd
from flash_ext.distributed import links
from flash_ext.distributed.exchange import Group
from flash_ext.distributed.links import Link, Links

FLOPS = 1e14


def like(heads: int, rows: int = 65536) -> torch.Tensor:
    return torch.empty(1, heads, rows, 128, dtype=torch.bfloat16, device="meta")


@contextmanager
def counted() -> Iterator[list[Any]]:
    calls: list[Any] = []
    measure = links._measure

    def instead(*args: Any) -> Links:
        calls.append(args)
        return measure(*args)

    links._measure = instead
    try:
        yield calls
    finally:
        links._measure = measure


def links_are_measured_once(world: World) -> None:
    """For a group, in its first call of "auto"; all ranks have the same figures and take the same method."""
    group = dist.new_group(list(range(world.size)))
    with counted() as calls:
        for method in ("ulysses", "allgather", "ring"):
            fd.context_parallel_attention(*[rand(2, 4, 6, 8)] * 3, group, method=method)
        assert not calls
        for rows in (6, 9):
            fd.context_parallel_attention(*[torch.ones(2, 4, rows, 8)] * 3, group)
        with fd.context_parallel(group):
            flash_ext.attention(*[torch.ones(2, 4, 5, 8)] * 3)
        cu = torch.tensor([0, 5 * world.size], dtype=torch.int32)
        fd.context_parallel_attention_varlen(*[torch.ones(5, 4, 8)] * 3, cu, group, max_seqlen=20)
        chosen = fd.explain_context_parallel(like(32), like(8), like(8), group, causal=True)
        assert len(calls) == 1
        text = str(chosen)
    assert "GB/s" in text and "ms exposed" in text and str(chosen.links) in text
    assert set(world.everyone(text)) == {text}


def links_take_no_random_numbers(world: World) -> None:
    state = torch.get_rng_state()
    assert links.links_of(Group(dist.new_group(list(range(world.size)))), torch.device("cpu")) is not None
    assert torch.equal(torch.get_rng_state(), state)


def links_decide(world: World) -> None:
    """A ring hides what it sends; with fast links, where that is little, bytes decide, as without a group."""
    group = dist.new_group(list(range(world.size)))
    q, k = like(4), like(1)
    plain = fd.explain_context_parallel(q, k, k, world.size, causal=True)
    assert plain.links is None and plain.method == "allgather"
    methods = {}
    for bandwidth in (2.0**30, 2.0**38):
        link = Link(1e-5, bandwidth)
        links._measured[group] = {"cpu": Links(link, link, FLOPS)}
        chosen = fd.explain_context_parallel(q, k, k, group, causal=True)
        methods[bandwidth] = chosen.method
        assert f"{bandwidth / 1e9:.3g} GB/s" in str(chosen)
    assert methods == {2.0**30: "ring", 2.0**38: "allgather"}
    # What a method refuses it refuses with any links; without enough memory it is not taken.
    slow = Link(1e-5, 2.0**30)
    links._measured[group] = {"cpu": Links(slow, slow, FLOPS)}
    odd = like(4, 65537)
    refused = fd.explain_context_parallel(odd, odd, odd, group, dropout_p=0.5)
    assert refused.method == "ulysses" and set(refused.seconds) == {"ulysses"}
    large = like(128, 1 << 20)
    assert "allgather" not in fd.explain_context_parallel(like(129, 1 << 20), *[large[:, :43]] * 2, group).seconds


def links_are_not_measured_in_a_graph(world: World) -> None:
    """Nor while torch.compile traces: then bytes decide, and a later call measures."""
    group = Group(dist.new_group(list(range(world.size))))
    before = links._is_captured
    links._is_captured = lambda device: True
    try:
        assert links.links_of(group, torch.device("cpu")) is None
    finally:
        links._is_captured = before
    assert links.links_of(group, torch.device("cpu")) is not None


PROMISES = (
    links_are_measured_once, links_take_no_random_numbers, links_decide, links_are_not_measured_in_a_graph,
)  # fmt: skip


def cases(size: int) -> dict[str, Callable[[World], None]]:
    return {promise.__name__: promise for promise in PROMISES}
