"""Context parallel by gathering keys: each rank gets the keys and values that its queries see, and attends to them.

    out_r = attention(Q_r, K, V)        dK_o = sum over r of dK_r, in float

Heads go in chunks: while one is computed the next one's keys travel, and in backward the last one's gradients, so that
only two chunks of the whole K and V are in memory. Backward gathers again.

Called by ``context_parallel_attention`` and its packed form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flash_ext.distributed import local
from flash_ext.distributed.exchange import (
    Exchange,
    Group,
    Ranges,
    Transfer,
    accumulate_dtype,
    as_rows,
    merge_ranges,
)
from flash_ext.distributed.layout import Band, Layout, Segment
from flash_ext.distributed.local import Call, Extras, Options
from flash_ext.distributed.pairs import Matters, Pair, in_order, pairs_of
from flash_ext.distributed.partial import Gradients, Joined, Setting, differentiable
from flash_ext.distributed.ulysses import Attend

CHUNK_BYTES = 64 << 20  # of gathered keys and values: less is not worth a call of its own
MAX_CHUNKS = 8  # two are held at once, with their gradients in float


@dataclass(frozen=True)
class Plan:
    """What one call does on this rank; of packed sequences rows are dimension 0, else 2."""

    exchange: Exchange
    calls: list[Call]
    options: Options
    rows_dim: int
    length: int  # of the sequence
    parts: list[Pair] | None = None  # in place of calls, where a row's keys come in several
    again: Attend | None = None  # the same in differentiable operations, for a backward whose graph is wanted


def plan(group: Group, layout: Layout, calls: Sequence[list[Call]], options: Options, rows_dim: int) -> Plan:
    """``calls``: those of every rank, which say what it reads."""
    reads: list[Ranges] = [merge_ranges([call.keys for call in of_rank]) for of_rank in calls]
    return Plan(Exchange(group, layout, reads), calls[group.rank], options, rows_dim, layout.length)


def plan_by_distance(group: Group, queries: Layout, keys: Layout, band: Band, options: Options) -> Plan:
    """With slopes on both sides of the diagonal, which the operator has in parts of a row's keys alone."""
    parts = _by_distance(queries, keys.length, band, options.dropout_p > 0)
    found = plan(group, keys, [[pair.call for pair in of_rank] for of_rank in parts], options, 2)
    own = [replace(pair, read=found.exchange.place(pair.call.keys)) for pair in in_order(parts[group.rank])]
    return replace(found, calls=[], parts=own)


@lru_cache(maxsize=256)
def _by_distance(queries: Layout, keys: int, band: Band, drops: bool) -> list[list[Pair]]:
    every = (Segment(0, 0, keys),)
    return [pairs_of(band, held, every, Matters(rows=drops, distance=True)) for held in queries.ranks]


class _Gathered:
    """Keys and values of some heads, side by side in the rows of one buffer."""

    def __init__(self, plan: Plan, k: Tensor, v: Tensor) -> None:
        self.plan, self.shapes = plan, (k.shape, v.shape)
        rows = torch.cat((as_rows(k, plan.rows_dim), as_rows(v, plan.rows_dim)), 1)
        self.buffer = rows.new_empty(plan.exchange.rows, rows.shape[1])
        self._transfer = Transfer(plan.exchange.gather(lambda reader: rows, self.buffer))

    def wait(self) -> tuple[Tensor, Tensor]:
        self._transfer.wait()
        return self.views(self.buffer)

    def views(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Key and value in the rows of a buffer like this one, of any length."""
        dim = self.plan.rows_dim
        others = [[size for i, size in enumerate(shape) if i != dim] for shape in self.shapes]
        parts = rows.split([math.prod(sizes) for sizes in others], 1)
        k, v = (part.unflatten(1, sizes).movedim(0, dim) for part, sizes in zip(parts, others, strict=True))
        return k, v


class _Summed:
    """Gradients of gathered keys and values on their way to the ranks that hold them, where they are added up."""

    def __init__(self, plan: Plan, gathered: _Gathered, grads: Tensor) -> None:
        self.plan, self.gathered, self.grads = plan, gathered, grads
        group, exchange = plan.exchange.group, plan.exchange
        self.parts = [
            grads.new_empty(exchange.held, grads.shape[1]) if rank != group.rank and exchange.sent[rank] else None
            for rank in range(group.size)
        ]
        self._transfer = Transfer(exchange.scatter(grads, self.parts))

    def wait(self) -> tuple[Tensor, Tensor]:
        self._transfer.wait()
        exchange = self.plan.exchange
        total = self.grads.new_zeros(exchange.held, self.grads.shape[1])
        for rank, part in enumerate(self.parts):  # in the order of the ranks, the same in each run
            own = rank == exchange.group.rank
            for rows, read in zip(
                exchange.sent[rank], exchange.received[rank] if own else exchange.sent[rank], strict=True
            ):
                total[rows] += self.grads[read] if own else part[read]
        return self.gathered.views(total)


def chunk_count(units: int, gathered: int) -> int:
    """Of heads that divide into ``units``, with the bytes of all keys and values."""
    count = max(1, min(units, MAX_CHUNKS, gathered // CHUNK_BYTES))
    while units % count:
        count -= 1
    return count


def _chunks(plan: Plan, q: Tensor, k: Tensor, v: Tensor, all_heads: bool) -> list[tuple[slice, slice, slice]]:
    """Heads of query, key and value that are computed at once; the same on every rank."""
    units = math.gcd(k.shape[1], v.shape[1])
    columns = sum(math.prod(t.shape) // max(t.shape[plan.rows_dim], 1) for t in (k, v))
    if plan.options.batch_invariant and plan.rows_dim != 0:
        columns //= max(k.shape[0], 1)
    count = 1 if all_heads else chunk_count(units, plan.length * columns * k.element_size())
    sizes = [t.shape[1] // count for t in (q, k, v)]
    chunks = [[slice(i * size, (i + 1) * size) for size in sizes] for i in range(count)]
    return [(q_heads, k_heads, v_heads) for q_heads, k_heads, v_heads in chunks]


def _heads(tensor: Tensor, part: slice) -> Tensor:
    return tensor[:, part]


def _rows(tensor: Tensor, dim: int, part: slice) -> Tensor:
    return tensor.narrow(dim, part.start, part.stop - part.start)


class AllGather(torch.autograd.Function):
    """(q, k, v, bias, slopes, sinks) of this rank -> (out, lse) of its rows."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, extras: Extras, q: Tensor, k: Tensor, v: Tensor,
        bias: Tensor | None, slopes: Tensor | None, sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        extras = replace(extras, bias=bias, slopes=slopes, sinks=sinks)
        ctx.plan, ctx.mask, ctx.state = plan, extras.mask, extras.state
        ctx.all_heads = bias is not None and ctx.needs_input_grad[5]
        dim, of_lse = plan.rows_dim, q.dim() - 2
        out, lse = local.empty_results(q, v.shape[-1], dim, sinks)
        chunks = _chunks(plan, q, k, v, ctx.all_heads)
        of_parts: list[Tensor] = []
        following = _Gathered(plan, _heads(k, chunks[0][1]), _heads(v, chunks[0][2]))
        for i, (heads, _, _) in enumerate(chunks):
            keys, values = following.wait()
            if i + 1 < len(chunks):
                following = _Gathered(plan, _heads(k, chunks[i + 1][1]), _heads(v, chunks[i + 1][2]))
            of_heads = extras.of_heads(heads)
            if plan.parts is not None:
                joined = Joined(Setting(plan.options), of_heads, _heads(q, heads), v.shape[-1])
                for pair in plan.parts:
                    joined.add(pair, keys, values)
                for total, part in zip((out, lse), joined.finish(), strict=True):
                    _heads(total, heads).copy_(part)
                of_parts += [joined.exact, *joined.of_parts]
            for call in plan.calls:
                read = plan.exchange.place(call.keys)
                out_part, lse_part = local.forward(
                    _rows(_heads(q, heads), dim, call.rows), _rows(keys, dim, read), _rows(values, dim, read),
                    of_heads.of_pairs(call.rows, call.keys), call, plan.options,
                )  # fmt: skip
                _rows(_heads(out, heads), dim, call.rows).copy_(out_part)
                _rows(lse.narrow(of_lse - 1, heads.start, heads.stop - heads.start), of_lse, call.rows).copy_(lse_part)
        ctx.save_for_backward(q, k, v, bias, slopes, sinks, out, lse, *of_parts)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, bias, slopes, sinks, out, lse, *of_parts = ctx.saved_tensors
        if torch.is_grad_enabled():
            bare, inputs = Extras(ctx.mask, state=ctx.state), (q, k, v, bias, slopes, sinks)
            of_results = grad_out, grad_lse
            return None, None, *differentiable(ctx.plan.again, bare, of_results, inputs, ctx.needs_input_grad[2:])
        extras = Extras(ctx.mask, bias, slopes, sinks, ctx.state)
        grads = gradients(
            ctx.plan, extras, (grad_out, grad_lse), (q, k, v), (out, lse), ctx.needs_input_grad[2:], ctx.all_heads,
            of_parts,
        )  # fmt: skip
        return None, None, *grads


def gradients(
    plan: Plan, extras: Extras, of_results: tuple[Tensor | None, Tensor | None], inputs: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor], needed: Sequence[bool], all_heads: bool = False, of_parts: Sequence[Tensor] = (),
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Those of (q, k, v, bias, slopes, sinks) that are needed; ``all_heads``: of all heads at once; ``of_parts``: what
    forward kept where it joined parts."""
    grad_out, grad_lse = of_results
    (q, k, v), (out, lse) = inputs, results
    bias, slopes, sinks = extras.bias, extras.slopes, extras.sinks
    *wanted, of_sinks = needed
    dim, of_lse = plan.rows_dim, q.dim() - 2
    travels = wanted[1] or wanted[2]
    wide = accumulate_dtype(q.dtype)
    dq, dk, dv = (torch.zeros_like(t) if want else None for t, want in zip((q, k, v), wanted[:3], strict=True))
    dbias = _zeros_of_bias(bias, wide) if wanted[3] else None
    dslopes = torch.zeros_like(slopes) if wanted[4] else None

    def deliver(summed: _Summed, chunk: tuple[slice, slice, slice]) -> None:
        for total, part, heads in zip((dk, dv), summed.wait(), chunk[1:], strict=True):
            if total is not None:
                _heads(total, heads).copy_(part)

    chunks = _chunks(plan, q, k, v, all_heads)
    following = _Gathered(plan, _heads(k, chunks[0][1]), _heads(v, chunks[0][2]))
    summed, of_chunks = None, iter(of_parts)
    for i, chunk in enumerate(chunks):
        heads = chunk[0]
        gathered = following
        keys, values = gathered.wait()
        if i + 1 < len(chunks):
            following = _Gathered(plan, _heads(k, chunks[i + 1][1]), _heads(v, chunks[i + 1][2]))
        of_heads = extras.of_heads(heads)
        sums = gathered.buffer.new_zeros(gathered.buffer.shape, dtype=wide) if travels else None
        if plan.parts is not None:
            grads_of, out_of = ([None if t is None else _heads(t, heads) for t in two] for two in (of_results, results))
            found = Gradients(
                Setting(plan.options), of_heads, (grads_of[0], grads_of[1]), _heads(q, heads),
                (*out_of, next(of_chunks)), of_chunks, wanted,
            )  # fmt: skip
            of_keys = (None, None) if sums is None else gathered.views(sums)
            for pair in plan.parts:
                found.add(pair, keys, values, *of_keys)
            if dq is not None:
                _heads(dq, heads).copy_(found.dq)
            if dbias is not None:
                dbias += found.dbias
            if dslopes is not None:
                local.cut(dslopes, -1, heads).add_(found.dslopes)
        for call in plan.calls:
            read = plan.exchange.place(call.keys)
            of_rows = [None if t is None else _rows(_heads(t, heads), dim, call.rows) for t in (grad_out, q, out)]
            of_lses = [
                None if t is None else
                _rows(t.narrow(of_lse - 1, heads.start, heads.stop - heads.start), of_lse, call.rows)
                for t in (grad_lse, lse)
            ]  # fmt: skip
            grads = local.backward(
                (of_rows[0], of_lses[0]), of_rows[1], _rows(keys, dim, read), _rows(values, dim, read), of_rows[2],
                of_lses[1], of_heads.of_pairs(call.rows, call.keys), call, plan.options, wanted,
            )  # fmt: skip
            if dq is not None:
                _rows(_heads(dq, heads), dim, call.rows).copy_(grads[0])
            if sums is not None:
                for total, part, want in zip(gathered.views(sums), grads[1:3], wanted[1:3], strict=True):
                    if want:
                        _rows(total, dim, read).add_(part)
            if dbias is not None:
                local.cut(local.cut(dbias, -2, call.rows), -1, call.keys).add_(grads[3])
            if dslopes is not None:
                local.cut(dslopes, -1, heads).add_(grads[4])
        if summed is not None:
            deliver(summed, chunks[i - 1])
        summed = _Summed(plan, gathered, sums) if sums is not None else None
    if summed is not None:
        deliver(summed, chunks[-1])
    dsinks = (
        torch.ops.flash_ext.sinks_gradient(grad_out, grad_lse, out, lse, sinks, packed=dim == 0)
        if of_sinks else None
    )  # fmt: skip
    dbias = None if dbias is None else dbias.to(bias.dtype)
    return dq, dk, dv, dbias, dslopes, dsinks


def _zeros_of_bias(bias: Tensor, wide: torch.dtype) -> Tensor:
    """In float where several calls add to the same numbers."""
    shared = bias.dim() < 2 or bias.shape[-2] == 1
    return torch.zeros_like(bias, dtype=wide if shared else bias.dtype)


def attend(
    plan: Plan, again: Attend | None, extras: Extras, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse of this rank's rows; ``again``: see ``Plan``, None below autograd."""
    bare = replace(extras, bias=None, slopes=None, sinks=None)
    return AllGather.apply(replace(plan, again=again), bare, q, k, v, extras.bias, extras.slopes, extras.sinks)
