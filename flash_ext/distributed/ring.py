"""Context parallel in a ring (Liu et al., arXiv:2310.01889): keys go from rank to rank while each rank computes.

    step s: rank r has the keys of rank r - s, and sends them on while it attends to them
    lse = log(sum over s of e^lse_s)        out = sum over s of e^(lse_s - lse) out_s        in float

Backward goes around again, and the gradients of the keys follow them, in float, each rank adding its own, until they
are home. P_s = e^(s - lse_s) of a part of a row's keys is w P_s in the whole row, w = e^(lse_s - lse). So with
delta = rowsum(dO out) - dlse of the whole row the operator's backward takes lse_s for a constant and gets

    dO_s = w dO        dlse_s = -w delta        dV_s = P_s^T dO_s        dS_s = P_s (dO_s V^T + dlse_s)

Forward keeps lse_s of each part. A part that has all keys of its rows is a call like any other, and so is one whose
bias or slopes want a gradient, from its own out_s, which is computed again: dlse_s = rowsum(dO_s out_s) - w delta.

Packed tokens go around as a batch of one; each call has the lengths that are left of the sequences.

Called by ``context_parallel_attention`` and its packed form; inside Ulysses it is ``usp``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flash_ext.distributed import local, slopes
from flash_ext.distributed.allgather import refuse_second_derivative
from flash_ext.distributed.exchange import Group, Transfer, accumulate_dtype, as_rows
from flash_ext.distributed.layout import Band, Layout, Segment
from flash_ext.distributed.local import Call, Extras, Options
from flash_ext.distributed.pairs import Matters, Pair, pairs_of

DROPOUT_STEP = 16  # positions at which a part of the map of dropout may begin
ROWS = 2  # the dimension of query, key and value that the ring goes along


@dataclass(frozen=True)
class Plan:
    group: Group
    keys: Layout
    pairs: list[list[Pair]]  # of each rank's keys
    options: Options
    owned: Tensor | None = None  # of packed tokens: which of this rank's belong to a sequence

    @property
    def packed(self) -> bool:
        return self.owned is not None

    def source(self, step: int) -> int:
        return (self.group.rank - step) % self.group.size


def plan(
    group: Group, queries: Layout, keys: Layout, band: Band, options: Options, matters: Matters
) -> Plan:  # fmt: skip
    pairs = [pairs_of(band, queries.ranks[group.rank], of_rank, matters) for of_rank in keys.ranks]
    return plan_of(group, keys, pairs, options)


def plan_of(
    group: Group, keys: Layout, pairs: list[list[Pair]], options: Options, owned: Tensor | None = None
) -> Plan:  # fmt: skip
    """Of calls, of which it is found out here whose rows see no other keys, and whose saw none before."""
    found = Plan(group, keys, [[] for _ in pairs], options, owned)
    every = [(source, pair) for source in map(found.source, range(group.size)) for pair in pairs[source]]
    for i, (source, pair) in enumerate(every):
        rows = pair.call.rows
        same = [
            j for j, (_, other) in enumerate(every)
            if j != i and rows.start < other.call.rows.stop and other.call.rows.start < rows.stop
        ]  # fmt: skip
        found.pairs[source].append(replace(pair, alone=not same, first=not same or min(same) > i))
    return found


def has_dropout_map(band: Band, queries: Layout, keys: Layout, by_distance: bool) -> bool:
    """Whether all calls of all ranks, by gathered keys and in a ring, begin where a part of the map may."""
    segments = [segment for held in (*keys.ranks, (Segment(0, 0, keys.length),)) for segment in held]
    every = ((rows, of_keys) for held in queries.ranks for rows in held for of_keys in segments)
    parts = [part for rows, of_keys in every for part in slopes.parts_of(band, rows, of_keys, by_distance)]
    return all(start % DROPOUT_STEP == 0 for part in parts for start in (part.queries.start, part.keys.start))


def _size(part: slice) -> int:
    return part.stop - part.start


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


def _rows(tensor: Tensor | None, part: slice) -> Tensor | None:
    return None if tensor is None else tensor.narrow(ROWS, part.start, part.stop - part.start)


def _weight(lse: Tensor, total: Tensor) -> Tensor:
    """e^(lse - total), 0 where there is nothing; (..., rows, 1)."""
    return torch.exp(lse - total).masked_fill(lse == local.MINUS_INFINITY, 0.0).unsqueeze(-1)


class Ring(torch.autograd.Function):
    """(q, k, v, bias, slopes, sinks) of this rank -> (out, lse) of its rows."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, extras: Extras, q: Tensor, k: Tensor, v: Tensor,
        bias: Tensor | None, alibi_slopes: Tensor | None, sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.plan, ctx.extras = plan, extras
        extras = replace(extras, bias=bias)
        out, lse = local.empty_results(q, v.shape[-1], ROWS, None)
        out = out.to(accumulate_dtype(q.dtype))
        exact = lse.double()  # a number a row, of which backward's weights e^(lse_s - lse) are made
        keys = _Keys(plan, k, v)
        of_parts = []
        for step in range(plan.group.size):
            keys.send_on(step)
            k_all, v_all = keys.views(keys.buffer)
            for pair in plan.pairs[plan.source(step)]:
                call = pair.call
                of_part = _of_pair(plan, pair, extras, alibi_slopes, out.dtype)
                tensors = of_part.shown(_rows(q, call.rows)), _rows(k_all, pair.read), _rows(v_all, pair.read)
                out_part, lse_part = _forward(plan, tensors, of_part.extras, call)
                totals, parts = (
                    (_rows(out, call.rows), _rows(exact, call.rows)),
                    (of_part.shown(out_part), of_part.moved(lse_part, 1)),
                )
                if pair.first:
                    for total, part in zip(totals, parts, strict=True):
                        total.copy_(part)
                else:
                    _join(*totals, *parts)
                if not pair.is_whole(sinks):
                    of_parts.append(lse_part)
            keys.step()
        if sinks is not None:
            _join_sinks(out, exact, sinks, plan.owned)
        out, lse = out.to(q.dtype), exact.to(lse.dtype)
        ctx.save_for_backward(q, k, v, bias, alibi_slopes, sinks, out, lse, exact, *of_parts)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        refuse_second_derivative("ring")
        plan: Plan = ctx.plan
        q, k, v, bias, alibi_slopes, sinks, out, lse, exact, *of_parts = ctx.saved_tensors
        following = iter(of_parts)
        extras = replace(ctx.extras, bias=bias)
        _, _, *wanted, of_sinks = ctx.needs_input_grad
        wide = accumulate_dtype(q.dtype)
        delta = _delta(grad_out, grad_lse, out, wide)
        dq = torch.zeros_like(q, dtype=wide)
        dbias, dslopes = (
            torch.zeros_like(t, dtype=dtype) if want else None
            for t, dtype, want in ((bias, wide, wanted[3]), (alibi_slopes, torch.float64, wanted[4]))
        )
        travels = wanted[1] or wanted[2]
        keys = _Keys(plan, k, v)
        arriving, transfer = None, Transfer([])
        for step in range(plan.group.size):
            keys.send_on(step)
            k_all, v_all = keys.views(keys.buffer)
            sums = keys.buffer.new_zeros(keys.buffer.shape, dtype=wide)
            dk, dv = keys.views(sums)
            for pair in plan.pairs[plan.source(step)]:
                call = pair.call
                of_part = _of_pair(plan, pair, extras, alibi_slopes, wide)
                tensors = of_part.shown(_rows(q, call.rows)), _rows(k_all, pair.read), _rows(v_all, pair.read)
                added = wanted[3] or wanted[4]
                of_grads = _rows(grad_out, call.rows), _rows(grad_lse, call.rows)
                results = _rows(out, call.rows), of_part.moved(_rows(exact, call.rows), -1).to(lse.dtype)
                is_whole = pair.is_whole(sinks)
                if not is_whole:
                    results = results[0], next(following)
                    own_lse = of_part.moved(results[1], 1)
                    of_rows = of_part.shown(of_grads[0]), of_part.shown(_rows(delta, call.rows))
                    of_grads = _of_part(*of_rows, own_lse, _rows(exact, call.rows))
                    if added:
                        results = _forward(plan, tensors, of_part.extras, call)
                        of_grads = of_grads[0], of_grads[1] + _delta(of_grads[0], None, results[0], wide)
                grads = _backward(
                    plan, of_grads, tensors, results, of_part.extras, call, of_part.wanted(wanted),
                    constant_lse=not (is_whole or added),
                )  # fmt: skip
                if added:
                    own_bias = extras.of_pairs(call.rows, call.keys).bias
                    grads = of_part.gradients(grads, own_bias, of_grads[1], results[1])
                for total, part, want in (
                    (_rows(dq, call.rows), of_part.shown(grads[0]), wanted[0]),
                    (_rows(dk, pair.read), grads[1], wanted[1]),
                    (_rows(dv, pair.read), grads[2], wanted[2]),
                ):
                    if want:
                        total.add_(part)
                if dbias is not None:
                    local.cut(local.cut(dbias, -2, call.rows), -1, call.keys).add_(grads[3])
                if dslopes is not None:
                    dslopes += grads[4]
            if travels:
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
        return (
            None, None, dq.to(q.dtype) if wanted[0] else None, dk.to(k.dtype) if wanted[1] else None,
            dv.to(v.dtype) if wanted[2] else None, dbias.to(bias.dtype) if dbias is not None else None,
            dslopes.to(alibi_slopes.dtype) if dslopes is not None else None, dsinks,
        )  # fmt: skip


def _packed(tensor: Tensor) -> Tensor:
    """(1, heads, tokens, columns) -> (tokens, heads, columns), as the operator has packed sequences."""
    return tensor.squeeze(0).transpose(0, 1)


def _batched(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).unsqueeze(0)


def _forward(plan: Plan, tensors: tuple[Tensor, ...], extras: Extras, call: Call) -> tuple[Tensor, Tensor]:
    if not plan.packed:
        return local.forward(*tensors, extras, call, plan.options)
    out, lse = local.forward(*map(_packed, tensors), extras, call, plan.options)
    return _batched(out), lse.unsqueeze(0)


def _backward(
    plan: Plan, grads: tuple[Tensor | None, Tensor | None], tensors: tuple[Tensor, ...],
    results: tuple[Tensor, Tensor], extras: Extras, call: Call, wanted: Sequence[bool], constant_lse: bool,
) -> Sequence[Tensor]:  # fmt: skip
    if not plan.packed:
        return local.backward(grads, *tensors, *results, extras, call, plan.options, wanted, constant_lse)
    of_out, of_lse = grads
    of_results = None if of_out is None else _packed(of_out), None if of_lse is None else of_lse.squeeze(0)
    found = local.backward(
        of_results, *map(_packed, tensors), _packed(results[0]), results[1].squeeze(0), extras, call, plan.options,
        wanted, constant_lse,
    )  # fmt: skip
    of_inputs = (_batched(grad) if want else grad for grad, want in zip(found, wanted[:3], strict=False))
    return [*of_inputs, *found[3:]]


def _of_pair(plan: Plan, pair: Pair, extras: Extras, alibi_slopes: Tensor | None, wide: torch.dtype) -> slopes.OfPart:
    call = pair.call
    if plan.packed:
        return replace(slopes.of_sequence(extras, alibi_slopes, pair.between, wide), hidden=pair.hidden)
    own = extras.of_pairs(call.rows, call.keys)
    return slopes.of_part(own, alibi_slopes, pair.diagonal, _size(call.rows), _size(call.keys), wide)


def _join(total: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Adds a part to what there is, in place and in float; the sum of exponentials in double."""
    joined = torch.logaddexp(total_lse, lse.double())
    total.mul_(_weight(total_lse, joined)).add_(out * _weight(lse, joined).to(total.dtype))
    total_lse.copy_(joined)


def _join_sinks(total: Tensor, total_lse: Tensor, sinks: Tensor, owned: Tensor | None) -> None:
    """One more logit in each row of a head, without a value; in place, once behind all parts. Tokens that belong to no
    sequence have none."""
    of_rows = sinks.double().unsqueeze(-1).expand_as(total_lse)
    if owned is not None:
        of_rows = of_rows.masked_fill(~owned, local.MINUS_INFINITY)
    joined = torch.logaddexp(total_lse, of_rows)
    total.mul_(_weight(total_lse, joined))
    total_lse.copy_(joined)


def _delta(grad_out: Tensor | None, grad_lse: Tensor | None, out: Tensor, wide: torch.dtype) -> Tensor:
    """rowsum(dO out) - dlse of the whole rows."""
    delta = out.new_zeros(out.shape[:-1], dtype=wide)
    if grad_out is not None:  # head by head: all products at once are twice as large as out
        for of_head, x, y in zip(delta.unbind(1), grad_out.unbind(1), out.unbind(1), strict=True):
            torch.sum(x.to(wide) * y, -1, out=of_head)
    return delta if grad_lse is None else delta - grad_lse


def _of_part(grad_out: Tensor | None, delta: Tensor, lse: Tensor, total: Tensor) -> tuple[Tensor | None, Tensor]:
    """The gradients of out and lse that a part of the rows' keys is given, beside lse for a constant."""
    weight = _weight(lse, total).to(delta.dtype)
    grad = None if grad_out is None else torch.mul(weight, grad_out, out=torch.empty_like(grad_out))
    return grad, -weight.squeeze(-1) * delta


def attend(plan: Plan, extras: Extras, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's rows, differentiable once."""
    bare = replace(extras, bias=None, slopes=None, sinks=None)
    if not plan.packed:
        return Ring.apply(plan, bare, q, k, v, extras.bias, extras.slopes, extras.sinks)
    out, lse = Ring.apply(plan, bare, *map(_batched, (q, k, v)), extras.bias, extras.slopes, extras.sinks)
    return _packed(out), lse.squeeze(0)
