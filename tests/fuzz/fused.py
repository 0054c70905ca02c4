"""Attention in the arithmetic of fused kernels: a second yardstick beside eager attention (docs/use/numerics.md).

`Fused` is a mode under which reference.attention computes, in float32 (float64 for float64), with

    products     half types: each factor rounded to its type. The sum is off by up to one unit in the last place. Tensor
                 cores: by so much too small, and a float32 factor in two parts of 11 bits (sm80/fragments.cuh)
    tanh         off by up to two units in the last place
    P            off by up to one unit in the last place; in backward e^(s - lse), with lse off by as much
    delta        rowsum(dO * out), out as it was rounded
    dS           P * (dP - (delta - dlse))

Rows of |lse| > `far` have the P of forward, because it is found again from their own scores; where they are measured
(csrc/kernels/sm80/measure.cuh), delta is rowsum(P * dP) / rowsum(P), too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


@dataclass
class Kind:
    """How a call is computed. exact: its scores are sums that every dtype has exactly. own_delta: of far rows."""

    dtype: torch.dtype
    tensor_cores: bool
    far: float
    exact: bool
    own_delta: bool


class Fused(TorchDispatchMode):
    """For two runs of a call: forward, and, once `out`, `d_out` and `d_lse` are set, forward again and backward."""

    out: Tensor | None = None
    d_out: Tensor
    d_lse: Tensor | None = None
    p: Tensor | None = None

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.mm.default, aten.bmm.default) and not (self.kind.exact and self.p is None):
            return self._product(func, *args)
        if func is aten._softmax.default:
            if self.p is None:
                self._probabilities(args[0], func(*args))
            return self.p if self.out is None else self.p_of_backward
        if func is aten._softmax_backward_data.default:
            return self._d_scores(*args[:2])
        result = func(*args, **(kwargs or {}))
        return _off(result, 2 * result).clamp(-1, 1) if func is aten.tanh.default else result

    def _probabilities(self, scores: Tensor, p: Tensor) -> None:
        lse = torch.logsumexp(scores, -1, keepdim=True)
        self.near = lse.abs() <= self.kind.far
        self.p = _off(p, p)
        self.p_of_backward = torch.where(self.near, torch.exp(scores - _off(lse, lse)), self.p)

    def _product(self, product: Any, a: Tensor, b: Tensor) -> Tensor:
        if self.kind.tensor_cores and self.kind.dtype == torch.float32:
            (a_high, a_low), (b_high, b_low) = _parts(a), _parts(b)
            c = product(a_high, b_high) + (product(a_high, b_low) + product(a_low, b_high))
        else:
            c = product(*(x.to(self.kind.dtype).to(x.dtype) for x in (a, b)))
        size = (product(a * a, b * b) + c * c).sqrt()
        if not self.kind.tensor_cores:
            return _off(c, size)
        return c - c.sign() * size * torch.rand_like(c) * torch.finfo(c.dtype).eps

    def _d_scores(self, d_p: Tensor, p: Tensor) -> Tensor:
        assert self.out is not None
        terms, row = self.d_out.to(p.dtype) * self.out.to(p.dtype), (*p.shape[:-1], 1)
        from_out = _off(terms.sum(-1, keepdim=True), terms.square().sum(-1, keepdim=True).sqrt()).sum_to_size(row)
        own = (p * d_p).sum(-1, keepdim=True) / p.sum(-1, keepdim=True)
        delta = torch.where(self.near, from_out, own) if self.kind.own_delta else from_out
        if self.d_lse is not None:
            delta = delta - self.d_lse.to(p.dtype).unsqueeze(-1).sum_to_size(row)
        return p * (d_p - delta)


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """The upper 11 bits of each number, rounded, and 11 bits of the rest, cut off."""
    high = ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return high, ((x - high).view(torch.int32) & ~0x1FFF).view(torch.float32)


def _off(x: Tensor, size: Tensor) -> Tensor:
    """x, off by up to one unit in the last place of size."""
    return x + size * (torch.rand_like(x) * 2 - 1) * torch.finfo(x.dtype).eps
