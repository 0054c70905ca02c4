"""Which tokens a rank holds: dealing a sequence over ranks, and putting it together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flash_ext.distributed.agree import agree
from flash_ext.distributed.dense import flat_rank, groups_of
from flash_ext.distributed.exchange import Exchange, Group
from flash_ext.distributed.layout import Layout, check_balance, even_layout, layout_of, outer_layout, within
from flash_ext.distributed.ulysses import Places, ToHeads
from flash_ext.errors import AttentionError


def _dealt(length: int | Sequence[int], ranks: int, balance: str) -> Layout:
    check_balance(balance)
    if isinstance(length, int):
        return even_layout(length, ranks, balance)
    if len(length) != ranks:
        raise AttentionError(f"length has {len(length)} numbers; it must be one, or one for each of {ranks} ranks")
    return layout_of(tuple(length), balance)


def _ranks(groups: Sequence[Group]) -> int:
    return groups[0].size * (groups[1].size if len(groups) == 2 else 1)


def positions(
    length: int | Sequence[int], mesh: Any, balance: str = "zigzag", *, device: torch.device | str | None = None
) -> Tensor:
    """The positions in the sequence of the tokens that this rank holds, in its order: for rotary embeddings and labels.

    Args:
        length: that of the whole sequence, dealt as ``shard_sequence`` deals it; or how many tokens each rank holds.
        mesh: a ProcessGroup, or a DeviceMesh of one or two dimensions, whose ranks count row by row.
        balance: "zigzag" or "contiguous".

    Returns:
        int64 (tokens of this rank,). Nothing is communicated.
    """
    groups = groups_of(mesh)
    held = _dealt(length, _ranks(groups), balance).ranks[flat_rank(groups)]
    return torch.cat([torch.arange(segment.start, segment.end, device=device) for segment in held])


def shard_sequence(x: Tensor, mesh: Any, dim: int, balance: str = "zigzag") -> Tensor:
    """This rank's tokens of ``x``, which every rank has whole: (..., length, ...) to (..., tokens of this rank, ...).

    The first ``length % ranks`` ranks hold one token more. Nothing is communicated. Differentiable: x gets the gradient
    of this rank's tokens, and 0 elsewhere.

    Raises:
        AttentionError: a balance that there is not.
    """
    groups = groups_of(mesh)
    held = _dealt(x.shape[dim], _ranks(groups), balance).ranks[flat_rank(groups)]
    return torch.cat([x.narrow(dim, segment.start, segment.size) for segment in held], dim)


def unshard_sequence(x: Tensor, mesh: Any, dim: int, balance: str = "zigzag") -> Tensor:
    """The whole sequence on every rank, from the tokens that each holds: the inverse of ``shard_sequence``.

    A collective. Ranks may hold different numbers of tokens. Differentiable, also twice: a token's gradient is the sum
    of what the ranks have for it, in float, so a loss that all of them compute from the whole counts once a rank.

    Raises:
        AttentionError: shapes that differ between ranks in another dimension than ``dim``, dtypes that differ; on every
            rank.
    """
    groups = groups_of(mesh)
    ranks = _ranks(groups)

    def describe() -> dict[str, Any]:
        check_balance(balance)
        at = dim % x.dim()
        others = [size for i, size in enumerate(x.shape) if i != at]
        equal = {"the call": "unshard_sequence", "dim": at, "the shape of x without dim": others, "balance": balance}
        equal["the dtype of x"], equal["whether x wants a gradient"] = str(x.dtype), x.requires_grad
        return {"equal": equal, "own": {"length": x.shape[dim]}}

    owned = agree(groups, x.device, describe, None)
    at = dim % x.dim()
    layout = layout_of(tuple(own["length"] for own in owned), balance)
    whole = x.unsqueeze(0)  # the one "head" of all ranks
    if len(groups) == 1:
        return _gathered(whole, groups[0], layout, at).squeeze(0)
    across, inside = groups
    whole = _gathered(whole, inside, within(layout, across.rank, inside.size), at)
    assert ranks == len(layout.ranks)
    return _gathered(whole, across, outer_layout(layout, across.size, inside.size), at).squeeze(0)


def _gathered(x: Tensor, group: Group, layout: Layout, dim: int) -> Tensor:
    exchange = Exchange(group, layout, [(slice(0, layout.length),)] * group.size)
    (whole,) = ToHeads.apply((Places(exchange, (slice(0, 1),) * group.size, dim + 1, 0),), x)
    return whole
