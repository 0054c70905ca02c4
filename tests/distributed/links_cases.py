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
from flash_ext.ops import require_c

FLOPS = 1e14


def like(heads: int, rows: int = 65536, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(1, heads, rows, 128, dtype=dtype, device="meta")


def new_group(world: World) -> Any:
    return dist.new_group(list(range(world.size)))


def figures(bandwidth: float, dtype: torch.dtype = torch.bfloat16) -> dict[Any, Links]:
    link = Link(1e-5, bandwidth)
    return {("cpu", dtype): Links(link, link, FLOPS)}


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


@contextmanager
def replaced(name: str, instead: Any) -> Iterator[None]:
    before = getattr(links, name)
    setattr(links, name, instead)
    try:
        yield
    finally:
        setattr(links, name, before)


def links_are_measured_once(world: World) -> None:
    """For a group and a dtype, in its first call of "auto"; all ranks have the same figures and take one method."""
    group = new_group(world)
    with counted() as calls:
        for method in ("ulysses", "allgather", "ring"):
            fd.context_parallel_attention(*[torch.ones(2, 4, 6, 8)] * 3, group, method=method)
        for fixed in ({"deterministic": True}, {"batch_invariant": True}):
            fd.context_parallel_attention(*[torch.ones(2, 4, 6, 8)] * 3, group, **fixed)
        assert not calls
        for rows in (6, 9):
            fd.context_parallel_attention(*[torch.ones(2, 4, rows, 8)] * 3, group)
        with fd.context_parallel(group):
            flash_ext.attention(*[torch.ones(2, 4, 5, 8)] * 3)
        cu = torch.tensor([0, 5 * world.size], dtype=torch.int32)
        fd.context_parallel_attention_varlen(*[torch.ones(5, 4, 8)] * 3, cu, group, max_seqlen=20)
        assert len(calls) == 1
        chosen = fd.explain_context_parallel(
            *[like(heads, dtype=torch.float) for heads in (32, 8, 8)], group, causal=True
        )  # fmt: skip
        fd.context_parallel_attention(*[rand(2, 4, 6, 8)] * 3, group)
        assert [dtype for _, _, dtype in calls] == [torch.float, torch.double]
        text = str(chosen)
    assert "GB/s" in text and "ms exposed" in text and str(chosen.links) in text
    assert set(world.everyone(text)) == {text}


def links_take_no_random_numbers(world: World) -> None:
    state = torch.get_rng_state()
    assert links.links_of(Group(new_group(world)), torch.device("cpu"), torch.float) is not None
    assert torch.equal(torch.get_rng_state(), state)


def links_are_of_no_choice_of_the_caller(world: World) -> None:
    seen: list[Any] = []
    attention = links._attention

    def asked(device: torch.device, dtype: torch.dtype) -> Any:
        work, call = attention(device, dtype)
        seen.append((require_c().requested_backend(), call()[0].dtype))
        return work, call

    with replaced("_attention", asked), flash_ext.use_backend("chunked"), torch.autocast("cpu", torch.bfloat16):
        links.links_of(Group(new_group(world)), torch.device("cpu"), torch.float)
        assert require_c().requested_backend() == "chunked"
    assert seen == [(None, torch.float)]


def a_rank_that_cannot_measure(world: World) -> None:
    """Says so, and bytes decide on all; it is not asked again."""
    group, attention = new_group(world), links._attention

    def fails(*given: Any) -> Any:
        if world.rank == world.size - 1:
            raise torch.OutOfMemoryError("no memory is left")
        return attention(*given)

    x = torch.ones(2, 4, 6, 8, device=world.device)
    with counted() as calls, replaced("_attention", fails):
        for _ in range(2):
            assert fd.context_parallel_attention(x, x, x, group).shape == x.shape
        assert len(calls) == 1
    assert fd.explain_context_parallel(x, x, x, group).links is None


def one_rank_may_ask_alone(world: World) -> None:
    """``explain_context_parallel`` measures nothing, on no device; it says so."""
    x, group = torch.ones(2, 4, 6, 8), new_group(world)
    available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
    try:
        with counted() as calls:
            if world.rank == 0:
                for q in (x, like(4)):
                    assert "measured   nothing; the first call" in str(fd.explain_context_parallel(q, q, q, group))
                for fixed in ({"deterministic": True}, {"batch_invariant": True}, {"method": "ring"}):
                    assert "measured" not in str(fd.explain_context_parallel(x, x, x, group, **fixed))
            assert not calls
    finally:
        torch.cuda.is_available = available
    fd.context_parallel_attention(x, x, x, group)
    for q in (x, like(4, dtype=torch.float)):
        assert fd.explain_context_parallel(q, q, q, group).links is not None
    for fixed in ({"deterministic": True}, {"batch_invariant": True}):
        assert fd.explain_context_parallel(x, x, x, group, **fixed).links is None


def links_decide(world: World) -> None:
    """Heads that do not divide are uneven work, and less to send; with fast links bytes decide, as without a group."""
    group, ranks = new_group(world), world.size
    q = like(5)
    plain = fd.explain_context_parallel(q, q, q, ranks, causal=True)
    assert plain.links is None and plain.method == "allgather"
    methods = {}
    for bandwidth in (2.0**26, 2.0**60):
        links._measured[group] = figures(bandwidth)
        chosen = fd.explain_context_parallel(q, q, q, group, causal=True)
        methods[bandwidth] = chosen.method
        assert f"{bandwidth / 1e9:.3g} GB/s" in str(chosen)
    assert methods == {2.0**26: "ulysses", 2.0**60: "allgather"}
    # A ring is neither taken nor left by its estimate, which is shown.
    slow, fast = Link(1e-5, 2.0**30), Link(1e-5, 2.0**40)
    links._measured[group] = {("cpu", torch.bfloat16): Links(slow, fast, FLOPS)}
    few = fd.explain_context_parallel(like(4), like(1), like(1), group, causal=True)
    assert few.method == "allgather" and few.seconds["ring"][0] < 0.9 * few.seconds["allgather"][0]
    many = like(129, 1 << 20)
    ring = fd.explain_context_parallel(many, many, many, group)
    assert ring.method == "ring" == fd.explain_context_parallel(many, many, many, ranks).method
    # What a method refuses it refuses with any links; without enough memory it is not taken.
    odd = like(4, 65537)
    refused = fd.explain_context_parallel(odd, odd, odd, group, dropout_p=0.5)
    assert refused.method == "ulysses" and set(refused.seconds) == {"ulysses"}
    assert "allgather" not in ring.seconds


def links_are_not_measured_in_a_graph(world: World) -> None:
    """Nor while torch.compile traces: then bytes decide, and a later call measures."""
    group = Group(new_group(world))
    asked = group, torch.device("cpu"), torch.float
    with replaced("_is_captured", lambda device: True):
        assert links.links_of(*asked) is None
    compiling, torch.compiler.is_compiling = torch.compiler.is_compiling, lambda: True
    try:
        assert links.links_of(*asked) is None
    finally:
        torch.compiler.is_compiling = compiling
    assert links.links_of(*asked) is not None


def no_heads_of_query(world: World) -> None:
    """The estimate has nothing to divide by."""
    q, k = torch.ones(1, 0, 6, 8), torch.ones(1, 2, 6, 8)
    group = new_group(world)
    assert fd.context_parallel_attention(q, k, k, group).shape == q.shape
    assert fd.context_parallel_attention(q, k, k, group, causal=True).shape == q.shape


PROMISES = (
    links_are_measured_once, links_take_no_random_numbers, links_are_of_no_choice_of_the_caller,
    a_rank_that_cannot_measure, one_rank_may_ask_alone, links_decide, links_are_not_measured_in_a_graph,
    no_heads_of_query,
)  # fmt: skip


def cases(size: int) -> dict[str, Callable[[World], None]]:
    return {promise.__name__: promise for promise in PROMISES}
