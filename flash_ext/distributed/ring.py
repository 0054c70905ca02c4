"""Context parallel in a ring (Liu et al., arXiv:2310.01889): keys go from rank to rank while each rank computes.

    step s: rank r has the keys of rank r - s, and sends them on while it attends to them

What a step gives is joined as in partial.py. Backward goes around again, and the gradients of the keys follow them, in
float, each rank adding its own, until they are home.

Packed tokens go around as a batch of one.

Called by ``context_parallel_attention`` and its packed form; inside Ulysses it is ``usp``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flash_ext.distributed import slopes
from flash_ext.distributed.exchange import Group, Transfer, as_rows
from flash_ext.distributed.layout import Band, Layout, Segment
from flash_ext.distributed.local import DROPOUT_STEP, Extras, Options
from flash_ext.distributed.pairs import Matters, Pair, in_order, pairs_of
from flash_ext.distributed.partial import ROWS, Gradients, Joined, Setting, batched, differentiable, packed
from flash_ext.distributed.ulysses import Attend


@dataclass(frozen=True)
class Plan:
    group: Group
    keys: Layout
    pairs: Sequence[Sequence[Pair]]  # of each rank's keys
    setting: Setting
    again: Attend | None = None  # the same in differentiable operations, for a backward whose graph is wanted

    def source(self, step: int) -> int:
        return (self.group.rank - step) % self.group.size


def plan(
    group: Group, queries: Layout, keys: Layout, band: Band, options: Options, matters: Matters
) -> Plan:  # fmt: skip
    return Plan(group, keys, _pairs(group.rank, queries, keys, band, matters), Setting(options))


@lru_cache(maxsize=256)
def _pairs(rank: int, queries: Layout, keys: Layout, band: Band, matters: Matters) -> Sequence[Sequence[Pair]]:
    return by_source(rank, [pairs_of(band, queries.ranks[rank], of_rank, matters) for of_rank in keys.ranks])


def by_source(rank: int, pairs: Sequence[Sequence[Pair]]) -> Sequence[Sequence[Pair]]:
    """The pairs of each rank's keys, with what they know of each other in the order of the steps."""
    every = [(source, pair) for step in range(len(pairs)) for source in [(rank - step) % len(pairs)]
             for pair in pairs[source]]  # fmt: skip
    found: list[list[Pair]] = [[] for _ in pairs]
    for (source, _), pair in zip(every, in_order([pair for _, pair in every]), strict=True):
        found[source].append(pair)
    return found


@lru_cache(maxsize=256)
def has_dropout_map(band: Band, queries: Layout, keys: Layout, by_distance: bool) -> bool:
    """Whether all calls of all ranks, by gathered keys and in a ring, begin where a part of the map may."""
    segments = [segment for held in (*keys.ranks, (Segment(0, 0, keys.length),)) for segment in held]
    every = ((rows, of_keys) for held in queries.ranks for rows in held for of_keys in segments)
    parts = [
        part for rows, of_keys in every for part in slopes.parts_of(band, rows, of_keys, by_distance, DROPOUT_STEP)
    ]
    return all(start % DROPOUT_STEP == 0 for part in parts for start in (part.queries.start, part.keys.start))


class _Keys:
    """Keys and values on their way around: those of ``source(step)`` while the next ones are received."""

    def __init__(self, plan: Plan, k: Tensor, v: Tensor) -> None:
        self.plan, self.shapes = plan, [[s for i, s in enumerate(t.shape) if i != ROWS] for t in (k, v)]
        self.columns = [math.prod(shape) for shape in self.shapes]
        self.buffer = torch.cat((as_rows(k, ROWS), as_rows(v, ROWS)), 1)

    def send_on(self, step: int) -> None:
        """Sends the keys of this step to the next rank, and receives those of the next step."""
        group = self.plan.group
        self.next, self.transfer = self.buffer, Transfer([])
        if step + 1 < group.size:
            rows = self.plan.keys.size(self.plan.source(step + 1))
            self.next = self.buffer.new_empty(rows, sum(self.columns))
            self.transfer = pass_on(group, self.buffer, self.next)

    def step(self) -> None:
        self.transfer.wait()
        self.buffer = self.next

    def views(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        parts = rows.split(self.columns, 1)
        k, v = (part.unflatten(1, shape).movedim(0, ROWS) for part, shape in zip(parts, self.shapes, strict=True))
        return k, v


def pass_on(group: Group, sent: Tensor, received: Tensor) -> Transfer:
    operations = [group.send(sent, (group.rank + 1) % group.size)] if sent.numel() else []
    if received.numel():
        operations.append(group.receive(received, (group.rank - 1) % group.size))
    return Transfer(operations)


class Ring(torch.autograd.Function):
    """(q, k, v, bias, slopes, sinks) of this rank -> (out, lse) of its rows."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, extras: Extras, q: Tensor, k: Tensor, v: Tensor,
        bias: Tensor | None, alibi_slopes: Tensor | None, sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.plan, ctx.extras = plan, extras
        extras = replace(extras, bias=bias, slopes=alibi_slopes, sinks=sinks)
        joined = Joined(plan.setting, extras, q, v.shape[-1])
        keys = _Keys(plan, k, v)
        for step in range(plan.group.size):
            keys.send_on(step)
            of_keys = keys.views(keys.buffer)
            for pair in plan.pairs[plan.source(step)]:
                joined.add(pair, *of_keys)
            keys.step()
        out, lse = joined.finish()
        ctx.save_for_backward(q, k, v, bias, alibi_slopes, sinks, out, lse, joined.exact, *joined.of_parts)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        plan: Plan = ctx.plan
        q, k, v, bias, alibi_slopes, sinks, out, lse, exact, *of_parts = ctx.saved_tensors
        _, _, *wanted, of_sinks = ctx.needs_input_grad
        if torch.is_grad_enabled():
            inputs, needed = (q, k, v, bias, alibi_slopes, sinks), ctx.needs_input_grad[2:]
            return None, None, *differentiable(plan.again, ctx.extras, (grad_out, grad_lse), inputs, needed)
        gradients = Gradients(
            plan.setting, replace(ctx.extras, bias=bias, slopes=alibi_slopes, sinks=sinks), (grad_out, grad_lse), q,
            (out, lse, exact), of_parts, wanted,
        )  # fmt: skip
        travels = wanted[1] or wanted[2]
        keys = _Keys(plan, k, v)
        arriving, transfer = None, Transfer([])
        for step in range(plan.group.size):
            keys.send_on(step)
            of_keys = keys.views(keys.buffer)
            sums = keys.buffer.new_zeros(keys.buffer.shape, dtype=gradients.wide) if travels else None
            of_sums = (None, None) if sums is None else keys.views(sums)
            for pair in plan.pairs[plan.source(step)]:
                gradients.add(pair, *of_keys, *of_sums)
            if sums is not None:
                transfer.wait()
                if arriving is not None:
                    sums += arriving
                arriving = sums.new_empty(plan.keys.size(plan.source(step + 1)), sums.shape[1])
                if plan.group.size > 1:
                    transfer = pass_on(plan.group, sums, arriving)
                else:
                    arriving = sums
            keys.step()
        dk = dv = None
        if travels:
            transfer.wait()
            dk, dv = keys.views(arriving)
        dsinks = torch.ops.flash_ext.sinks_gradient(grad_out, grad_lse, out, lse, sinks) if of_sinks else None
        dq, dbias, dslopes = gradients.dq, gradients.dbias, gradients.dslopes
        return (
            None, None, dq.to(q.dtype) if dq is not None else None, dk.to(k.dtype) if wanted[1] else None,
            dv.to(v.dtype) if wanted[2] else None, dbias.to(bias.dtype) if dbias is not None else None,
            dslopes.to(alibi_slopes.dtype) if dslopes is not None else None, dsinks,
        )  # fmt: skip


def attend(
    plan: Plan, again: Attend, extras: Extras, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse of this rank's rows."""
    bare = replace(extras, bias=None, slopes=None, sinks=None)
    if not plan.setting.packed:
        plan = replace(plan, again=again)
        return Ring.apply(plan, bare, q, k, v, extras.bias, extras.slopes, extras.sinks)

    def batched_again(q: Tensor, k: Tensor, v: Tensor, own: Extras) -> tuple[Tensor, Tensor]:
        out, lse = again(*map(packed, (q, k, v)), own)
        return batched(out), lse.unsqueeze(0)

    plan = replace(plan, again=batched_again)
    out, lse = Ring.apply(plan, bare, *map(batched, (q, k, v)), extras.bias, extras.slopes, extras.sinks)
    return packed(out), lse.squeeze(0)
