"""Cases of context_cases.py, and of two GPUs: packed sequences, in float64 against the same call on the whole."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import ranks
from context_helpers import compare, rand, refused
from ranks import World
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import flash_ext
from flash_ext import distributed as fd
from flash_ext.distributed import packed_ring
from flash_ext.distributed.exchange import Group
from flash_ext.distributed.layout import BALANCES, Band, even_layout
from flash_ext.distributed.local import Options


def place_of(world: World, method: str) -> Any:
    return init_device_mesh(torch.device(world.device).type, (world.size // 2, 2)) if method == "usp" else world.group


def starts(world: World, *rows: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=world.device)


def packed_sequences(world: World) -> None:
    total = 53
    cu = starts(world, 0, 9, 9, 12, 40, 50)  # one is empty, and three rows are nobody's
    heads = {"query": 4, "key": 2, "value": 4}
    whole = {name: rand(total, h, 8).to(world.device).requires_grad_() for name, h in heads.items()}
    given = torch.rand(4), torch.rand(5, 4), rand(4), rand(5, 4, 28, 28)
    slopes, of_each, sinks, bias = (t.to(world.device) for t in given)
    options: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        "full": (("ulysses", "allgather", "ring", "usp", "auto"), {}),
        "causal": (("ulysses", "allgather", "ring", "usp"), {"causal": True, "softcap": 3.0}),
        "sinks": (("allgather", "ring", "usp"), {"causal": True, "sinks": sinks}),
        "window": (("ulysses", "allgather", "ring", "usp"), {"causal": True, "window": (4, None), "softcap": 2.0}),
        "wide window": (("ring", "usp"), {"causal": True, "window": (17, None), "sinks": sinks}),
        "both sides": (("ulysses", "ring", "usp"), {"window": (9, 3)}),
        "one side": (("ring",), {"window": (6, None)}),
        "the other side": (("ring", "usp"), {"window": (None, 11), "align": "bottom_right"}),
        "slopes": (("ulysses", "allgather", "ring", "usp"), {"causal": True, "alibi_slopes": slopes, "sinks": sinks}),
        "slopes of each": (("ring", "usp"), {"window": (14, 9), "alibi_slopes": of_each, "softcap": 3.0}),
        "every option": (("ulysses",), {"window": (4, 3), "alibi_slopes": slopes, "bias": bias}),
    }
    for methods, given in options.values():
        for method in methods:
            group = place_of(world, method)
            for balance in BALANCES:

                def call(given: dict[str, Any] = given, **t: Tensor) -> Tensor:
                    out, lse = flash_ext.attention_varlen(**t, cu_seqlens_q=cu, max_q=28, return_lse=True, **given)
                    return out + lse.mT.masked_fill(lse.mT.isinf(), 0.0).unsqueeze(-1)

                def on_shards(
                    given: dict[str, Any] = given, method: str = method, balance: str = balance, group: Any = group,
                    **t: Tensor,
                ) -> Tensor:  # fmt: skip
                    out, lse = fd.context_parallel_attention_varlen(
                        **t, cu_seqlens=cu, group=group, max_seqlen=28, method=method, balance=balance,
                        return_lse=True, **given,
                    )  # fmt: skip
                    return out + lse.mT.masked_fill(lse.mT.isinf(), 0.0).unsqueeze(-1)

                try:
                    compare(world, call, on_shards, whole, balance, dim=0)
                except AssertionError as error:
                    raise AssertionError(f"{method}, {balance}, {sorted(given)}: {error}") from None

    def in_context(**t: Tensor) -> Tensor:
        with fd.context_parallel(world.group):
            return packed(**t)

    def packed(**t: Tensor) -> Tensor:
        return flash_ext.attention_varlen(**t, cu_seqlens_q=cu, max_q=28, causal=True)

    compare(world, packed, in_context, whole, dim=0)


def sinks_of_packed_sequences(world: World) -> None:
    """Their gradient is the sum of the ranks' parts; rows of no sequence have none."""
    cu, sinks = starts(world, 0, 7, 31, 50), rand(4).to(world.device).requires_grad_()
    whole = [rand(53, 4, 8).to(world.device) for _ in range(4)]  # the last one is the gradient of out
    parts = [fd.shard_sequence(t, world.group, 0) for t in whole]
    out = flash_ext.attention_varlen(*whole[:3], cu_seqlens_q=cu, max_q=24, causal=True, sinks=sinks)
    (expected,) = torch.autograd.grad(out, sinks, whole[3])
    for method in ("ulysses", "allgather", "ring", "usp"):
        given = {"max_seqlen": 24, "method": method, "causal": True, "sinks": sinks}
        out = fd.context_parallel_attention_varlen(*parts[:3], cu, place_of(world, method), **given)
        (own,) = torch.autograd.grad(out, sinks, parts[3])
        torch.distributed.all_reduce(own, group=world.group)
        torch.testing.assert_close(own, expected)


def slopes_of_packed_sequences(world: World) -> None:
    """Their gradient, of all or of each sequence, is the sum of the ranks' parts; with and without a window."""
    cu = starts(world, 0, 7, 7, 31, 50)
    whole = [rand(53, 4, 8).to(world.device) for _ in range(4)]  # the last one is the gradient of out
    parts = [fd.shard_sequence(t, world.group, 0) for t in whole]
    of_all, of_each = torch.rand(4), torch.rand(4, 4)
    for slopes in (of_all, of_each):
        for given in ({"causal": True}, {"window": (11, 6)}, {}):
            slopes = slopes.to(world.device).requires_grad_()
            options = {"alibi_slopes": slopes, **given}
            out, lse = flash_ext.attention_varlen(*whole[:3], cu_seqlens_q=cu, max_q=24, return_lse=True, **options)
            own_rows = [fd.positions(53, world.group).to(world.device)]
            (expected,) = torch.autograd.grad([out, lse[:, :50]], slopes, [whole[3], torch.ones_like(lse[:, :50])])
            for method in ("ring", "usp"):
                out, lse = fd.context_parallel_attention_varlen(
                    *parts[:3], cu, place_of(world, method), max_seqlen=24, method=method, return_lse=True, **options
                )
                of_lse = (own_rows[0] < 50).to(lse.dtype).expand_as(lse)
                (own,) = torch.autograd.grad([out, lse], slopes, [parts[3], of_lse])
                torch.distributed.all_reduce(own, group=world.group)
                torch.testing.assert_close(own, expected, atol=1e-6, rtol=1e-6)  # slopes are of float32


def packed_on_uneven_ranks(world: World) -> None:
    """The first rank holds nothing, the others more and more."""
    cu, weights = starts(world, 0, 9, 12, 40, 50), world.size * (world.size - 1) // 2
    lengths = [53 * rank // weights for rank in range(world.size)]
    lengths[-1] += 53 - sum(lengths)
    whole = [rand(53, 4, 8).to(world.device).requires_grad_() for _ in range(3)]
    cotangent, slopes = rand(53, 4, 8).to(world.device), torch.rand(4).to(world.device)
    for given in ({"causal": True}, {"causal": True, "window": (13, None), "alibi_slopes": slopes}, {"window": (9, 7)}):
        expected = flash_ext.attention_varlen(*whole, cu_seqlens_q=cu, max_q=28, **given)
        of_whole = expected, *torch.autograd.grad(expected, whole, cotangent)
        for balance in BALANCES:
            held = fd.positions(lengths, world.group, balance).to(world.device)
            parts = [t.detach()[held].requires_grad_() for t in whole]
            out = fd.context_parallel_attention_varlen(
                *parts, cu, world.group, max_seqlen=28, method="ring", balance=balance, **given
            )
            for mine, all_of_it in zip((out, *torch.autograd.grad(out, parts, cotangent[held])), of_whole, strict=True):
                torch.testing.assert_close(mine, all_of_it[held])


def another_sequence_is_not_read(world: World) -> None:
    """Whatever it holds. A window's rows may be of the next one."""
    cu = starts(world, 0, 20, 53)
    whole = [rand(53, 4, 8).to(world.device) for _ in range(4)]
    for bad, good in ((slice(0, 20), slice(20, 53)), (slice(20, 53), slice(0, 20))):
        broken = [t.clone() for t in whole]
        for t in broken[:3]:
            t[bad] = float("nan")
        leaves = [t.clone().requires_grad_() for t in whole[:3]]
        out = flash_ext.attention_varlen(*leaves, cu_seqlens_q=cu, max_q=33, window=(15, 9))
        expected = out, *torch.autograd.grad(out, leaves, whole[3])
        parts = [fd.shard_sequence(t, world.group, 0) for t in broken]
        leaves = [t.requires_grad_() for t in parts[:3]]
        out = fd.context_parallel_attention_varlen(
            *leaves, cu, world.group, max_seqlen=33, method="ring", window=(15, 9)
        )
        got = out, *torch.autograd.grad(out, leaves, parts[3])
        held = fd.positions(53, world.group).to(world.device)
        kept = (held >= good.start) & (held < good.stop)
        for mine, all_of_it in zip(got, expected, strict=True):
            torch.testing.assert_close(mine[kept], all_of_it[held][kept])


def calls_of_packed_sequences(world: World) -> None:
    """One a step, causal or without a band, where ranks hold as many tokens as each other."""
    total = 16 * world.size
    layout, cu = even_layout(total, world.size, "zigzag"), starts(world, 0, 9, total)
    for band in (Band(None, 0, 0), Band(None, None, 0)):
        plan = packed_ring.plan(Group(world.group), layout, band, cu, total, Options(), False)
        assert [len(of_rank) for of_rank in plan.pairs] == [1] * world.size


def what_usp_does_not_take(world: World) -> None:
    cu, p, mesh = starts(world, 0, 6 * world.size), rand(6, 4, 8).to(world.device), place_of(world, "usp")
    refused(
        "method='usp' takes no mask, bias or dropout_p for packed sequences; use",
        lambda: fd.context_parallel_attention_varlen(
            p, p, p, cu, mesh, max_seqlen=24, method="usp", causal=True, dropout_p=0.5
        ),
    )


def packed_ranks_that_disagree(world: World) -> None:
    """One sentence on every rank, also of what is wrong on one alone, and the group works afterwards."""
    last, total = world.rank == world.size - 1, 6 * world.size
    cu, p = starts(world, 0, 4, total), rand(6, 4, 8).to(world.device)

    def call(tensor: Tensor = p, bounds: Tensor = cu, **options: Any) -> Any:
        options = {"max_seqlen": total} | options
        return fd.context_parallel_attention_varlen(tensor, tensor, tensor, bounds, world.group, **options)

    for text, differs in (
        (f"max_seqlen is {total} on rank 0 and {total - 1} on rank", {"max_seqlen": total - 1}),
        ("causal is False on rank 0 and True on rank", {"causal": True}),
        ("cu_seqlens is ('torch.int32', 3) on rank 0 and ('torch.int32', 2)", {"bounds": starts(world, 0, total)}),
        ("the heads and columns of query is (4, 8) on rank 0 and (2, 8)", {"tensor": p[:, :2]}),
        ("the dtype of query is torch.float64 on rank 0 and torch.float32", {"tensor": p.float()}),
        ("method is 'best'; it must be", {"method": "best"}),
    ):
        refused(text, lambda differs=differs: call(**(differs if last else {})))
    refused("the call is context_parallel_attention on rank 0 and context_parallel_attention_varlen on rank",
            lambda: call() if last else fd.context_parallel_attention(p[None], p[None], p[None], world.group)
            )  # fmt: skip
    assert call().shape == p.shape


PROMISES = (
    packed_sequences, sinks_of_packed_sequences, slopes_of_packed_sequences, packed_on_uneven_ranks,
    another_sequence_is_not_read, calls_of_packed_sequences, what_usp_does_not_take,
    packed_ranks_that_disagree,
)  # fmt: skip


def cases(size: int) -> dict[str, Callable[[World], None]]:
    return {promise.__name__: promise for promise in PROMISES}


if __name__ == "__main__":
    ranks.main(cases)
