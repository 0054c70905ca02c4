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

from flash_ext.distributed.exchange import Exchange, Group, Transfer, accumulate_dtype, as_rows, from_rows
from flash_ext.distributed.layout import Layout
from flash_ext.distributed.local import Extras, cut, part_of_heads

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


def _to_heads(every: Sequence[Places], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    operations, results = [], []
    for places, x in zip(every, tensors, strict=True):
        exchange = places.exchange
        shape = [*x.shape]
        shape[places.rows_dim], shape[places.heads_dim] = exchange.rows, places.own
        buffer = x.new_empty(exchange.rows, _columns(shape, places.rows_dim))

        def rows_for(rank: int, x: Tensor = x, places: Places = places) -> Tensor:
            return as_rows(places.part(x, rank), places.rows_dim).contiguous()

        operations += exchange.gather(rows_for, buffer)
        results.append(from_rows(buffer, shape, places.rows_dim))
    Transfer(operations).wait()
    return tuple(results)


class _Returning:
    """One tensor on its way back; heads that several ranks have are added up."""

    def __init__(self, x: Tensor, places: Places, heads: int) -> None:
        self.places, exchange = places, places.exchange
        self.shape = [*x.shape]
        self.shape[places.rows_dim], self.shape[places.heads_dim] = exchange.held, heads
        counts = [part.stop - part.start for part in places.heads]
        is_shared = sum(counts) > heads
        self.dtype = x.dtype
        self.total = x.new_zeros(self.shape, dtype=accumulate_dtype(x.dtype) if is_shared else x.dtype)
        self.buffer = as_rows(x, places.rows_dim).contiguous()
        before, behind = self.shape[: places.heads_dim], self.shape[places.heads_dim + 1 :]
        self.shapes = [[*before, count, *behind] for count in counts]
        columns = [_columns(shape, places.rows_dim) for shape in self.shapes]
        self.parts = [self.buffer.new_empty(exchange.held, count) for count in columns]
        self.operations = exchange.scatter(self.buffer, self.parts)

    def finish(self) -> Tensor:
        places, exchange = self.places, self.places.exchange
        own = exchange.group.rank
        for rows, read in zip(exchange.sent[own], exchange.received[own], strict=True):
            self.parts[own][rows] = self.buffer[read]
        for rank, part in enumerate(self.parts):  # in the order of the ranks, the same in each run
            places.part(self.total, rank).add_(from_rows(part, self.shapes[rank], places.rows_dim))
        return self.total.to(self.dtype)


def _to_rows(every: Sequence[Places], heads: Sequence[int], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    returning = [_Returning(*of_one) for of_one in zip(tensors, every, heads, strict=True)]
    Transfer([operation for one in returning for operation in one.operations]).wait()
    return tuple(one.finish() for one in returning)


def _filled(grads: Sequence[Tensor | None], call: Callable[[list[int]], tuple[Tensor, ...]]) -> tuple[Any, ...]:
    """What ``call`` gives for the places where there is a gradient; None elsewhere."""
    there = [i for i, grad in enumerate(grads) if grad is not None]
    results = dict(zip(there, call(there), strict=True)) if there else {}
    return tuple(results.get(i) for i in range(len(grads)))


class ToHeads(torch.autograd.Function):
    """All heads of this rank's rows -> this rank's heads of all rows; of all tensors in one batch."""

    @staticmethod
    def forward(ctx: Any, every: tuple[Places, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.every = every
        ctx.heads = tuple(x.shape[places.heads_dim] for places, x in zip(every, tensors, strict=True))
        ctx.set_materialize_grads(False)
        return _to_heads(every, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        def back(there: list[int]) -> tuple[Tensor, ...]:
            every, heads = (tuple(of[i] for i in there) for of in (ctx.every, ctx.heads))
            return ToRows.apply(every, heads, *(grads[i] for i in there))

        return None, *_filled(grads, back)


class ToRows(torch.autograd.Function):
    """The way back; heads that several ranks have are added up."""

    @staticmethod
    def forward(ctx: Any, every: tuple[Places, ...], heads: tuple[int, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.every = every
        ctx.set_materialize_grads(False)
        return _to_rows(every, heads, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        def there_again(there: list[int]) -> tuple[Tensor, ...]:
            return ToHeads.apply(tuple(ctx.every[i] for i in there), *(grads[i] for i in there))

        return None, None, *_filled(grads, there_again)


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
        return ToHeads.apply((places,), x.view(torch.uint8))[0].view(torch.bool)
    return ToHeads.apply((places,), x)[0]


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
        slopes=part_of_heads(extras.slopes, plan.own_heads),
        sinks=part_of_heads(extras.sinks, plan.own_heads),
        first_head=extras.first_head + plan.own_heads.start,
    )
    group = [heads // max(x.shape[1], 1) for x in (k, v)]
    of_keys = [key_heads(plan.heads, count) for count in group]
    to_heads = Places(plan.of_queries, plan.heads, dim, 1)
    every = (to_heads, *(Places(plan.of_keys, of_heads, dim, 1) for of_heads in of_keys))
    q_all, *gathered = ToHeads.apply(every, q, k, v)
    rank = plan.of_keys.group.rank
    k_all, v_all = (
        _repeated(x, repeats(plan.heads[rank], of_heads[rank], count))
        for x, of_heads, count in zip(gathered, of_keys, group, strict=True)
    )
    out, lse = call(q_all, k_all, v_all, own)
    at = q.dim() - 2
    return ToRows.apply((to_heads, Places(plan.of_queries, plan.heads, at, at - 1)), (heads, heads), out, lse)


def _repeated(x: Tensor, wanted: list[int] | None) -> Tensor:
    """Key heads so that the operator pairs them as in the whole call."""
    # NOTE: not by a list as an index, which is copied to a GPU while the host waits.
    return x if wanted is None else torch.cat([x.narrow(1, head, 1) for head in wanted], 1)
