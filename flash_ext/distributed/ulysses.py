"""Context parallel by heads (Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509): two exchanges around one whole call.

    (all heads, this rank's rows)  ->  (this rank's heads, all rows)  ->  attention  ->  back

Rank r computes query heads Hq r / N to Hq (r + 1) / N. A key head that several ranks' query heads read goes to each of
them, and its gradients are added up in float. Made of differentiable exchanges, so it has what the call inside has.

Called by ``context_parallel_attention`` and its packed form; around a ring it is ``usp``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flash_ext.distributed.exchange import Exchange, Group, accumulate_dtype, as_rows, from_rows
from flash_ext.distributed.layout import Layout
from flash_ext.distributed.local import Extras, cut

Heads = tuple[slice, ...]  # of each rank
Attend = Callable[[Tensor, Tensor, Tensor, Extras], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Places:
    """Where a tensor has rows and heads, and which heads go to which rank."""

    exchange: Exchange
    heads: Heads
    rows_dim: int
    heads_dim: int

    def part(self, tensor: Tensor, rank: int) -> Tensor:
        heads = self.heads[rank]
        return tensor.narrow(self.heads_dim, heads.start, heads.stop - heads.start)

    @property
    def own(self) -> int:
        heads = self.heads[self.exchange.group.rank]
        return heads.stop - heads.start


def _columns(shape: Sequence[int], rows_dim: int) -> int:
    return math.prod(size for dim, size in enumerate(shape) if dim != rows_dim)


def _to_heads(x: Tensor, places: Places) -> Tensor:
    exchange = places.exchange
    shape = [*x.shape]
    shape[places.rows_dim], shape[places.heads_dim] = exchange.rows, places.own
    buffer = x.new_empty(exchange.rows, _columns(shape, places.rows_dim))
    exchange.gather(lambda rank: as_rows(places.part(x, rank), places.rows_dim).contiguous(), buffer).wait()
    return from_rows(buffer, shape, places.rows_dim)


def _to_rows(x: Tensor, places: Places, heads: int) -> Tensor:
    """Heads that several ranks have are added up."""
    exchange, group = places.exchange, places.exchange.group
    shape = [*x.shape]
    shape[places.rows_dim], shape[places.heads_dim] = exchange.held, heads
    counts = [part.stop - part.start for part in places.heads]
    is_shared = sum(counts) > heads
    total = x.new_zeros(shape, dtype=accumulate_dtype(x.dtype) if is_shared else x.dtype)
    buffer = as_rows(x, places.rows_dim).contiguous()
    shapes = [[*shape[: places.heads_dim], count, *shape[places.heads_dim + 1 :]] for count in counts]
    parts = [buffer.new_empty(exchange.held, _columns(part, places.rows_dim)) for part in shapes]
    transfer = exchange.scatter(buffer, parts)
    for rows, read in zip(exchange.sent[group.rank], exchange.received[group.rank], strict=True):
        parts[group.rank][rows] = buffer[read]
    transfer.wait()
    for rank, part in enumerate(parts):  # in the order of the ranks, the same in each run
        places.part(total, rank).add_(from_rows(part, shapes[rank], places.rows_dim))
    return total.to(x.dtype)


class ToHeads(torch.autograd.Function):
    """All heads of this rank's rows -> this rank's heads of all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Places) -> Tensor:
        ctx.places, ctx.heads = places, x.shape[places.heads_dim]
        return _to_heads(x, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ToRows.apply(grad, ctx.places, ctx.heads), None


class ToRows(torch.autograd.Function):
    """The way back; heads that several ranks have are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Places, heads: int) -> Tensor:
        ctx.places = places
        return _to_rows(x, places, heads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ToHeads.apply(grad, ctx.places), None, None


def key_heads(of_queries: Heads, group: int) -> Heads:
    """The heads of key that some heads of query read, ``group`` of which read one."""
    return tuple(slice(q.start // group, max(q.start // group, -(-q.stop // group))) if q.stop > q.start
                 else slice(0, 0) for q in of_queries)  # fmt: skip


def repeats(q: slice, k: slice, group: int) -> list[int] | None:
    """For each of a rank's query heads, which of its key heads it reads; None where h // (Hq / Hk) says so there."""
    wanted = [head // group - k.start for head in range(q.start, q.stop)]
    count, of_keys = q.stop - q.start, k.stop - k.start
    if of_keys == 0 or (count % of_keys == 0 and wanted == [head // (count // of_keys) for head in range(count)]):
        return None
    return wanted


@dataclass(frozen=True)
class Plan:
    """The exchanges of the queries' and of the keys' rows, and the query heads of each rank."""

    of_queries: Exchange
    of_keys: Exchange
    heads: Heads
    rows_dim: int

    @property
    def own_heads(self) -> slice:
        return self.heads[self.of_queries.group.rank]


def plan(group: Group, queries: Layout, keys: Layout, heads: int, rows_dim: int) -> Plan:
    parts = tuple(slice(heads * r // group.size, heads * (r + 1) // group.size) for r in range(group.size))
    return Plan(_whole(group, queries), _whole(group, keys), parts, rows_dim)


def _whole(group: Group, layout: Layout) -> Exchange:
    return Exchange(group, layout, [(slice(0, layout.length),)] * group.size)


def _scores_to_heads(plan: Plan, x: Tensor | None, has_rows: bool) -> Tensor | None:
    """A mask or bias (..., heads or 1, rows or 1, keys): this rank's heads of all rows."""
    if x is None:
        return None
    x = x[(None,) * (4 - x.dim())]
    if not has_rows:
        return cut(x, -3, plan.own_heads)
    heads = plan.heads if x.shape[1] != 1 else (slice(0, 1),) * len(plan.heads)
    places = Places(plan.of_queries, heads, 2, 1)
    if x.dtype == torch.bool:  # which not every transport knows
        return ToHeads.apply(x.view(torch.uint8), places).view(torch.bool)
    return ToHeads.apply(x, places)


def attend(
    plan: Plan, extras: Extras, has_rows: dict[str, bool], q: Tensor, k: Tensor, v: Tensor, call: Attend
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's rows; ``call`` computes this rank's heads of all rows.

    ``has_rows``: whether the mask and the bias have rows of their own, or one for all.
    """
    heads, dim = q.shape[1], plan.rows_dim
    own = replace(
        extras,
        mask=_scores_to_heads(plan, extras.mask, has_rows["mask"]),
        bias=_scores_to_heads(plan, extras.bias, has_rows["bias"]),
        slopes=cut(extras.slopes, -1, plan.own_heads),
        sinks=cut(extras.sinks, -1, plan.own_heads),
        first_head=plan.own_heads.start,
    )
    q_all = ToHeads.apply(q, Places(plan.of_queries, plan.heads, dim, 1))
    out, lse = call(q_all, _keys_to_heads(plan, k, heads), _keys_to_heads(plan, v, heads), own)
    at = q.dim() - 2
    return (
        ToRows.apply(out, Places(plan.of_queries, plan.heads, dim, 1), heads),
        ToRows.apply(lse, Places(plan.of_queries, plan.heads, at, at - 1), heads),
    )


def _keys_to_heads(plan: Plan, x: Tensor, heads: int) -> Tensor:
    """This rank's heads of all rows of key or value, so that the operator pairs them as in the whole call."""
    group = heads // max(x.shape[1], 1)
    of_keys = key_heads(plan.heads, group)
    gathered = ToHeads.apply(x, Places(plan.of_keys, of_keys, plan.rows_dim, 1))
    rank = plan.of_keys.group.rank
    wanted = repeats(plan.heads[rank], of_keys[rank], group)
    # NOTE: not by a list as an index, which is copied to a GPU while the host waits.
    return gathered if wanted is None else torch.cat([gathered.narrow(1, head, 1) for head in wanted], 1)
