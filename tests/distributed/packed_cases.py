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
from flash_ext.distributed.layout import BALANCES


def place_of(world: World, method: str) -> Any:
    return init_device_mesh(torch.device(world.device).type, (world.size // 2, 2)) if method == "usp" else world.group


def starts(world: World, *rows: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=world.device)


def packed_sequences(world: World) -> None:
    total = 53
    cu = starts(world, 0, 9, 9, 12, 40, 50)  # one is empty, and three rows are nobody's
    heads = {"query": 4, "key": 2, "value": 4}
    whole = {name: rand(total, h, 8).to(world.device).requires_grad_() for name, h in heads.items()}
    slopes, sinks, bias = (t.to(world.device) for t in (torch.rand(4), rand(4), rand(5, 4, 28, 28)))
    options: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
        "full": (("ulysses", "allgather", "ring", "usp", "auto"), {}),
        "causal": (("ulysses", "allgather", "ring", "usp"), {"causal": True, "softcap": 3.0}),
        "sinks": (("allgather", "ring", "usp"), {"causal": True, "sinks": sinks}),
        "window": (("ulysses", "allgather"), {"causal": True, "window": (4, None), "softcap": 2.0}),
        "slopes": (("ulysses", "allgather"), {"causal": True, "alibi_slopes": slopes, "sinks": sinks}),
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


def what_usp_does_not_take(world: World) -> None:
    cu, p, mesh = starts(world, 0, 6 * world.size), rand(6, 4, 8).to(world.device), place_of(world, "usp")
    slopes = torch.ones(4, device=world.device)
    for options, what in (
        (
            {"alibi_slopes": slopes},
            "method='usp' takes no mask, bias, dropout_p or alibi_slopes for packed sequences; use",
        ),
        (
            {"window": (3, None)},
            "method='usp' takes packed sequences with causal=True or without a band, and no window",
        ),
    ):

        def call(options: dict[str, Any] = options) -> Any:
            return fd.context_parallel_attention_varlen(p, p, p, cu, mesh, max_seqlen=24, causal=True, **options)

        refused(what, call)


def cases(size: int) -> dict[str, Callable[[World], None]]:
    return {f.__name__: f for f in (packed_sequences, sinks_of_packed_sequences, what_usp_does_not_take)}


if __name__ == "__main__":
    ranks.main(cases)
