"""Cases of context_cases.py: few heads, what counts at forward time, and what a group leaves behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from context_helpers import compare, rand, whole_problem
from packed_cases import place_of
from ranks import World
from torch import Tensor

import flash_ext
from flash_ext import distributed as fd
from flash_ext.distributed import agree, partial


def one_head_with_what_all_heads_have(world: World) -> None:
    """Most ranks of "ulysses" have no head then, and no part of the sinks, slopes, mask or bias."""
    whole = whole_problem(21, (1, 1))
    where = fd.positions(21, world.group)
    sinks, slopes, of_each = rand(1).requires_grad_(), torch.rand(1).requires_grad_(), torch.rand(2, 1)
    mask, bias = rand(2, 1, 21, 21) > -0.5, rand(1, 21, 21)
    of_one_row = rand(2, 1, 1, 21)
    methods = ("ulysses", "auto", "ring", "allgather", *(("usp",) if world.size == 4 else ()))
    for options in (
        {"sinks": sinks, "causal": True}, {"alibi_slopes": slopes, "causal": True}, {"alibi_slopes": of_each},
        {"mask": mask}, {"bias": bias}, {"bias": of_one_row}, {"mask": mask[:, :, :1], "sinks": sinks},
    ):  # fmt: skip
        for method in methods:

            def call(options: dict[str, Any] = options, **t: Tensor) -> Tensor:
                return flash_ext.attention(**t, **options)

            def on_shards(options: dict[str, Any] = options, method: str = method, **t: Tensor) -> Tensor:
                given = {
                    name: x[..., where, :] if name in ("mask", "bias") and x.shape[-2] == 21 else x
                    for name, x in options.items()
                }
                return fd.context_parallel_attention(**t, group=place_of(world, method), method=method, **given)

            compare(world, call, on_shards, whole)
    # Second derivatives of a ring are those of "ulysses".
    for method in ("ring", "allgather"):
        parts = [t.detach()[:, :, where].requires_grad_() for t in whole.values()]
        out = fd.context_parallel_attention(*parts, world.group, method=method, causal=True, sinks=sinks)
        grads = torch.autograd.grad(out.square().sum(), parts, create_graph=True)
        assert all(g.isfinite().all() for g in torch.autograd.grad(sum(g.square().sum() for g in grads), parts))


def one_head_of_packed_sequences(world: World) -> None:
    cu = torch.tensor([0, 5, 21], dtype=torch.int32)
    whole = {name: rand(21, 1, 8).requires_grad_() for name in ("query", "key", "value")}
    for options in (
        {"sinks": rand(1)}, {"alibi_slopes": torch.rand(1)}, {"alibi_slopes": torch.rand(2, 1)},
        {"bias": rand(1, 1, 16, 16)}, {"mask": rand(2, 1, 16, 16) > -0.5},
    ):  # fmt: skip
        for method in ("ulysses", "ring", *(("usp",) if world.size == 4 else ())):
            if method != "ulysses" and {"mask", "bias"} & options.keys():
                continue

            def call(options: dict[str, Any] = options, **t: Tensor) -> Tensor:
                return flash_ext.attention_varlen(**t, cu_seqlens_q=cu, max_q=16, causal=True, **options)

            def on_shards(options: dict[str, Any] = options, method: str = method, **t: Tensor) -> Tensor:
                return fd.context_parallel_attention_varlen(
                    **t, cu_seqlens=cu, group=place_of(world, method), max_seqlen=16, method=method, causal=True,
                    **options,
                )  # fmt: skip

            compare(world, call, on_shards, whole, dim=0)


def deterministic_is_that_of_forward(world: World) -> None:
    """The operator's backward is told what torch's switch was at forward time, as on one rank."""
    told: list[Any] = []
    backward = torch.ops.flash_ext.attention_backward

    def recorded(*args: Any, **options: Any) -> Any:
        told.append(options["deterministic"])
        return backward(*args, **options)

    cu = torch.tensor([0, 8 * world.size], dtype=torch.int32)
    for method in ("allgather", "ring"):
        for packed in (False, True):
            x = rand(*((8, 2, 8) if packed else (1, 2, 8, 8))).requires_grad_()
            given = {"method": method, "causal": True}
            for switched in (True, False):
                torch.use_deterministic_algorithms(switched)
                try:
                    out = (
                        fd.context_parallel_attention_varlen(x, x, x, cu, world.group, max_seqlen=8, **given)
                        if packed else fd.context_parallel_attention(x, x, x, world.group, **given)
                    )  # fmt: skip
                    torch.use_deterministic_algorithms(not switched)
                    torch.ops.flash_ext.attention_backward = recorded
                    torch.autograd.grad(out.sum(), x)
                finally:
                    torch.ops.flash_ext.attention_backward = backward
                    torch.use_deterministic_algorithms(False)
                assert told and set(told) == {switched}, (method, packed, switched, told)
                told.clear()


def bits_without_neighbours(world: World) -> None:
    """With ``batch_invariant`` a sequence has the same ones alone and beside others, forward and backward."""
    for method in ("auto", "ulysses", "allgather", "ring"):
        whole = [torch.randn(3, heads, 40 * world.size, 16).requires_grad_() for heads in (3, 1, 1)]
        found = []
        for batch in (slice(0, 3), slice(1, 2)):
            parts = [fd.shard_sequence(t[batch].detach(), world.group, 2).requires_grad_() for t in whole]
            given = {"method": method, "causal": True, "batch_invariant": True}
            out = fd.context_parallel_attention(*parts, world.group, **given)
            found.append((out, *torch.autograd.grad(out.square().sum(), parts)))
        for beside, alone in zip(*found, strict=True):
            assert torch.equal(beside[1:2], alone), method
    # Packed, "auto" takes the method that computes whole sequences, wherever they lie.
    size = world.size
    whole = [torch.randn(100 * size, heads, 16).requires_grad_() for heads in (3, 1, 1)]
    found = []
    for rows, starts in ((slice(0, 100 * size), [0, 30 * size, 100 * size]), (slice(30 * size, None), [0, 70 * size])):
        parts = [fd.shard_sequence(t[rows].detach(), world.group, 0).requires_grad_() for t in whole]
        cu = torch.tensor(starts, dtype=torch.int32)
        out = fd.context_parallel_attention_varlen(
            *parts, cu, world.group, max_seqlen=70 * size, causal=True, batch_invariant=True
        )  # fmt: skip
        own = (out, *torch.autograd.grad(out.square().sum(), parts))
        found.append([fd.unshard_sequence(t, world.group, 0) for t in own])
    for beside, alone in zip(*found, strict=True):
        assert torch.equal(beside[30 * size :], alone)


def sums_of_gradients_that_are_wanted(world: World) -> None:
    """Of query alone, or of key and value alone: no others are allocated, and a ring's do not travel."""
    given: list[tuple[bool, ...]] = []
    add = partial.Gradients.add

    def recorded(self: partial.Gradients, pair: Any, k: Tensor, v: Tensor, dk: Any, dv: Any) -> None:
        add(self, pair, k, v, dk, dv)
        given.append((self.dq is not None, dk is not None, dv is not None))

    parts = [fd.shard_sequence(t.detach(), world.group, 2) for t in whole_problem(16).values()]
    expected = {}
    for wanted in (range(3), (0,), (1, 2)):
        leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(parts)]
        out = fd.context_parallel_attention(*leaves, world.group, method="ring", causal=True)
        given.clear()
        partial.Gradients.add = recorded
        try:
            grads = torch.autograd.grad(out.square().sum(), [leaves[i] for i in wanted])
        finally:
            partial.Gradients.add = add
        assert set(given) == {(0 in wanted, 1 in wanted, 2 in wanted)}, (wanted, given)
        for i, grad in zip(wanted, grads, strict=True):
            assert torch.equal(grad, expected.setdefault(i, grad))


def nothing_is_left_of_a_group(world: World) -> None:
    """A group that was destroyed says nothing of a later one, which may have its name and its place in memory."""
    x, before = rand(1, 2, 4, 8), len(agree._seen)
    group = torch.distributed.new_group(list(range(world.size)))
    fd.context_parallel_attention(x, x, x, group, check=False)
    assert len(agree._seen) == before + 1
    torch.distributed.destroy_process_group(group)
    del group
    gc.collect()
    assert len(agree._seen) == before


PROMISES = (
    one_head_with_what_all_heads_have, one_head_of_packed_sequences, deterministic_is_that_of_forward,
    bits_without_neighbours, sums_of_gradients_that_are_wanted, nothing_is_left_of_a_group,
)  # fmt: skip


def cases(size: int) -> dict[str, Callable[[World], None]]:
    return {promise.__name__: promise for promise in PROMISES}
