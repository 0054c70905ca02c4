"""Rows whose keys come in several calls, each with a part of them, of which the results are joined.

    lse = log(sum over s of e^lse_s)        out = sum over s of e^(lse_s - lse) out_s        in float

P_s = e^(s - lse_s) of a part of a row's keys is w P_s in the whole row, w = e^(lse_s - lse). So with
delta = rowsum(dO out) - dlse of the whole row the operator's backward takes lse_s for a constant and gets

    dO_s = w dO        dlse_s = -w delta        dV_s = P_s^T dO_s        dS_s = P_s (dO_s V^T + dlse_s)

Forward keeps lse_s of each part. A part that has all keys of its rows is a call like any other, and so is one whose
bias or slopes want a gradient, from its own out_s, which is computed again: dlse_s = rowsum(dO_s out_s) - w delta.

Called by ring.py, and by allgather.py where slopes are of both sides of the diagonal. Packed tokens are a batch of one
here; each call has the lengths that are left of the sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flash_ext.distributed import local, slopes
from flash_ext.distributed.exchange import accumulate_dtype
from flash_ext.distributed.local import Call, Extras, Options
from flash_ext.distributed.pairs import Pair
from flash_ext.distributed.ulysses import Attend

ROWS = 2  # the dimension of query, key and value that has their rows


@dataclass(frozen=True)
class Setting:
    """What all calls have in common. ``owned``: of packed tokens, which of this rank's belong to a sequence."""

    options: Options
    owned: Tensor | None = None

    @property
    def packed(self) -> bool:
        return self.owned is not None


class Joined:
    """out and lse of the rows of ``q``, and in ``of_parts`` what backward needs of the parts."""

    def __init__(self, setting: Setting, extras: Extras, q: Tensor, columns: int) -> None:
        """``extras``: with slopes and sinks."""
        self.setting, self.extras, self.q = setting, extras, q
        out, lse = local.empty_results(q, columns, ROWS, None)
        self.out, self.dtypes = out.to(accumulate_dtype(q.dtype)), (q.dtype, lse.dtype)
        self.exact = lse.double()  # a number a row, of which backward's weights e^(lse_s - lse) are made
        self.of_parts: list[Tensor] = []

    def add(self, pair: Pair, keys: Tensor, values: Tensor) -> None:
        call = pair.call
        in_call = _slopes_in(self.setting, pair, self.extras, self.out.dtype)
        tensors = in_call.shown(rows_of(self.q, call.rows)), rows_of(keys, pair.read), rows_of(values, pair.read)
        out, lse = _forward(self.setting, tensors, in_call.extras, call)
        totals = rows_of(self.out, call.rows), rows_of(self.exact, call.rows)
        parts = in_call.shown(out), in_call.moved(lse, 1)
        if pair.first:
            for total, part in zip(totals, parts, strict=True):
                total.copy_(part)
        else:
            _join(*totals, *parts)
        if not pair.is_whole(self.extras.sinks):
            self.of_parts.append(lse)

    def finish(self) -> tuple[Tensor, Tensor]:
        if self.extras.sinks is not None:
            _join_sinks(self.out, self.exact, self.extras.sinks, self.setting.owned)
        return self.out.to(self.dtypes[0]), self.exact.to(self.dtypes[1])


class Gradients:
    """Those of query, bias (in float) and slopes (in double) where they are ``wanted``; those of keys and values are
    added to what is given. Pairs come in the order in which they were joined."""

    def __init__(
        self, setting: Setting, extras: Extras, of_results: tuple[Tensor | None, Tensor | None], q: Tensor,
        results: tuple[Tensor, Tensor, Tensor], of_parts: Sequence[Tensor], wanted: Sequence[bool],
    ) -> None:  # fmt: skip
        """``results``: out, lse, and lse in double."""
        self.setting, self.extras, self.q, self.wanted = setting, extras, q, wanted
        self.grad_out, self.grad_lse = of_results
        self.out, self.lse, self.exact = results
        self.of_parts = iter(of_parts)
        self.wide = accumulate_dtype(q.dtype)
        self.delta = _delta(self.grad_out, self.grad_lse, self.out, self.wide)
        of_all = (
            (q, self.wide, wanted[0]),
            (extras.bias, self.wide, wanted[3]),
            (extras.slopes, torch.float64, wanted[4]),
        )
        self.dq, self.dbias, self.dslopes = (
            torch.zeros_like(t, dtype=dtype) if want else None for t, dtype, want in of_all
        )

    def add(self, pair: Pair, keys: Tensor, values: Tensor, dk: Tensor | None, dv: Tensor | None) -> None:
        call, wanted = pair.call, self.wanted
        in_call = _slopes_in(self.setting, pair, self.extras, self.wide)
        tensors = in_call.shown(rows_of(self.q, call.rows)), rows_of(keys, pair.read), rows_of(values, pair.read)
        added = wanted[3] or wanted[4]
        of_grads = rows_of(self.grad_out, call.rows), rows_of(self.grad_lse, call.rows)
        exact = rows_of(self.exact, call.rows)
        results = rows_of(self.out, call.rows), in_call.moved(exact, -1).to(self.lse.dtype)
        is_whole = pair.is_whole(self.extras.sinks)
        if not is_whole:
            results = results[0], next(self.of_parts)
            own_lse = in_call.moved(results[1], 1)
            of_rows = in_call.shown(of_grads[0]), in_call.shown(rows_of(self.delta, call.rows))
            of_grads = _weighted(*of_rows, own_lse, exact)
            if added:
                results = _forward(self.setting, tensors, in_call.extras, call)
                of_grads = of_grads[0], of_grads[1] + _delta(of_grads[0], None, results[0], self.wide)
        grads = _backward(
            self.setting, of_grads, tensors, results, in_call.extras, call, in_call.wanted(wanted),
            constant_lse=not (is_whole or added),
        )  # fmt: skip
        if added:
            own_bias = self.extras.of_pairs(call.rows, call.keys).bias
            grads = in_call.gradients(grads, own_bias, of_grads[1], results[1])
        for total, rows, part, want in (
            (self.dq, call.rows, in_call.shown(grads[0]), wanted[0]),
            (dk, pair.read, grads[1], wanted[1]),
            (dv, pair.read, grads[2], wanted[2]),
        ):
            if want:
                rows_of(total, rows).add_(part)
        if self.dbias is not None:
            local.cut(local.cut(self.dbias, -2, call.rows), -1, call.keys).add_(grads[3])
        if self.dslopes is not None:
            self.dslopes += grads[4]


def differentiable(
    again: Attend, extras: Extras, of_results: tuple[Tensor | None, Tensor | None], inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of (q, k, v, bias, slopes, sinks) in a backward whose own graph is wanted (create_graph=True):
    those of ``again``, the same call in operations that have derivatives of every order."""
    # NOTE: views, because one tensor may be several of them.
    q, k, v, bias, slopes, sinks = own = [None if t is None else t.view_as(t) for t in inputs]
    results = again(q, k, v, replace(extras, bias=bias, slopes=slopes, sinks=sinks))
    there = [(result, grad) for result, grad in zip(results, of_results, strict=True) if grad is not None]
    wanted = [t for t, need in zip(own, needed, strict=True) if need]
    found = torch.autograd.grad([of[0] for of in there], wanted, [of[1] for of in there], create_graph=True)
    grads = iter(found)
    return tuple(next(grads) if need else None for need in needed)


def rows_of(tensor: Tensor | None, part: slice) -> Tensor | None:
    return None if tensor is None else tensor.narrow(ROWS, part.start, part.stop - part.start)


def _weight(lse: Tensor, total: Tensor) -> Tensor:
    """e^(lse - total), 0 where there is nothing; (..., rows, 1)."""
    return torch.exp(lse - total).masked_fill(lse == local.MINUS_INFINITY, 0.0).unsqueeze(-1)


def packed(tensor: Tensor) -> Tensor:
    """(1, heads, tokens, columns) -> (tokens, heads, columns), as the operator has packed sequences."""
    return tensor.squeeze(0).transpose(0, 1)


def batched(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).unsqueeze(0)


def _forward(setting: Setting, tensors: tuple[Tensor, ...], extras: Extras, call: Call) -> tuple[Tensor, Tensor]:
    if not setting.packed:
        return local.forward(*tensors, extras, call, setting.options)
    out, lse = local.forward(*map(packed, tensors), extras, call, setting.options)
    return batched(out), lse.unsqueeze(0)


def _backward(
    setting: Setting, grads: tuple[Tensor | None, Tensor | None], tensors: tuple[Tensor, ...],
    results: tuple[Tensor, Tensor], extras: Extras, call: Call, wanted: Sequence[bool], constant_lse: bool,
) -> Sequence[Tensor]:  # fmt: skip
    if not setting.packed:
        return local.backward(grads, *tensors, *results, extras, call, setting.options, wanted, constant_lse)
    of_out, of_lse = grads
    of_results = None if of_out is None else packed(of_out), None if of_lse is None else of_lse.squeeze(0)
    found = local.backward(
        of_results, *map(packed, tensors), packed(results[0]), results[1].squeeze(0), extras, call, setting.options,
        wanted, constant_lse,
    )  # fmt: skip
    of_inputs = (batched(grad) if want else grad for grad, want in zip(found, wanted[:3], strict=False))
    return [*of_inputs, *found[3:]]


def _slopes_in(setting: Setting, pair: Pair, extras: Extras, wide: torch.dtype) -> slopes.InCall:
    call = pair.call
    bare = replace(extras, slopes=None, sinks=None)
    if setting.packed:
        return replace(slopes.in_sequence(bare, extras.slopes, pair.between, wide), hidden=pair.hidden)
    own = bare.of_pairs(call.rows, call.keys)
    sizes = [part.stop - part.start for part in (call.rows, call.keys)]
    return slopes.in_part(own, extras.slopes, pair.diagonal, *sizes, wide)


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


def _weighted(grad_out: Tensor | None, delta: Tensor, lse: Tensor, total: Tensor) -> tuple[Tensor | None, Tensor]:
    """The gradients of out and lse that a part of the rows' keys is given, beside lse for a constant."""
    weight = _weight(lse, total).to(delta.dtype)
    grad = None if grad_out is None else torch.mul(weight, grad_out, out=torch.empty_like(grad_out))
    return grad, -weight.squeeze(-1) * delta
