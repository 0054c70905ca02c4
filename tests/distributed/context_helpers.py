"""Problems and comparisons of the cases of context_cases.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ranks import World
from torch import Tensor

from flash_ext import AttentionError
from flash_ext import distributed as fd


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def whole_problem(rows: int = 64, heads: tuple[int, int] = (4, 2), device: str = "cpu") -> dict[str, Tensor]:
    return {name: rand(2, h, rows, 8).to(device).requires_grad_() for name, h in
            (("query", heads[0]), ("key", heads[1]), ("value", heads[1]))}  # fmt: skip


def compare(
    world: World, call: Callable[..., Tensor], on_shards: Callable[..., Tensor], whole: dict[str, Tensor],
    balance: str = "zigzag", dim: int = 2,
) -> None:  # fmt: skip
    """out and gradients of this rank's rows."""
    parts = {
        name: fd.shard_sequence(t, world.group, dim, balance).detach().requires_grad_() for name, t in whole.items()
    }
    expected = call(**whole)
    cotangent = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    cotangent = cotangent.to(expected.device)
    grads = torch.autograd.grad(expected, list(whole.values()), cotangent)
    got = on_shards(**parts)
    own = fd.shard_sequence(cotangent, world.group, dim, balance)
    own_grads = torch.autograd.grad(got, list(parts.values()), own)
    for mine, all_of_it in zip((got, *own_grads), (expected, *grads), strict=True):
        torch.testing.assert_close(mine, fd.shard_sequence(all_of_it, world.group, dim, balance))


def refused(text: str, call: Callable[[], Any], kinds: Any = AttentionError) -> None:
    try:
        call()
    except kinds as error:
        assert text in str(error), str(error)
        return
    raise AssertionError("no error")
