"""Attention in the arithmetic of fused kernels: a second yardstick beside eager attention (docs/use/numerics.md).

`Fused` is a mode under which reference.attention computes, in float32 (float64 for float64), with

    products     half types: each factor rounded to its type. The sum is off by up to one unit in the last place. Tensor
                 cores: by so much too small, by three in float32, which takes three products and a factor in two parts
                 of 11 bits (csrc/gpu/fragments.cuh). In float16 dS is scaled to its range
    sums         of n steps of 8 numbers (half types: 16) are off by sqrt(n / 8) times that where n is above 8, in
                 backward over the heads of a group; others, of pairs, by one unit or, of n numbers, by sqrt(n / 64)
    scores       off by up to one unit in the last place, up to 4096: they are multiplied by scale * log2(e)
    tanh         off by up to two units in the last place
    P            off by up to one unit in the last place; in backward e^(s - lse), with lse off by as much
    delta        rowsum(dO * out), out as it was rounded
    dS           P * (dP - (delta - dlse))

lse is off by up to one unit. Rows of |lse| > `far` have the P of forward, because it is found again from their own
scores; where csrc/kernels/sm80/backward/renormalise.cuh does that, delta is rowsum(P * dP) / rowsum(P), too. Errors are
drawn for each number, or, where numbers are equal and so are rounded alike, one for all of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from helpers import HALF
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

# Rows of a larger |lse|, and calls of fewer keys, have P and delta from their own sums (renormalise.cuh). Half
# types: from there on the rounding of lse is that of P. float32: it is felt in the gradients.
FAR = {torch.bfloat16: 2.0**15, torch.float16: 2.0**12, torch.float32: 16.0, torch.float64: -1.0}
FEW_KEYS = {torch.bfloat16: 16, torch.float16: 16, torch.float32: 64, torch.float64: 0}

Outputs = Mapping[str, Tensor]  # out and, where asked for, lse


@dataclass
class Kind:
    """How a call is computed. exact: its scores are sums that every dtype has exactly. own_delta: of far rows. alike:
    equal numbers are rounded alike."""

    dtype: torch.dtype
    tensor_cores: bool
    far: float
    exact: bool
    own_delta: bool
    alike: bool = False
    group: int = 1  # query heads that share a head of key or value


def kind_of(
    dtype: torch.dtype, keys: int, *, kernels: bool, added: bool, wants: Collection[str], exact: bool = False,
    alike: bool = False, group: int = 1
) -> Kind:  # fmt: skip
    """kernels: those of a GPU; added: a bias or slopes are; wants: the inputs whose gradients are asked for."""
    measured = not kernels or keys < FEW_KEYS[dtype] or "alibi_slopes" in wants
    # A half type's P is divided by its sum where scores are more than scaled products.
    divided = measured and not (kernels and dtype in HALF and not added)
    return Kind(
        dtype,
        tensor_cores=kernels and dtype != torch.float64,
        far=-1.0 if divided else FAR[dtype],
        exact=exact,
        own_delta=measured or dtype not in HALF,
        alike=alike,
        group=group,
    )


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
                self._probabilities(args[0])
            return self.p if self.out is None else self.p_of_backward
        if func is aten._softmax_backward_data.default:
            return self._d_scores(*args[:2])
        if func is aten.sum.dim_IntList and args[0].is_floating_point():
            return self._sum(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        return self._off(result, 2 * result).clamp(-1, 1) if func is aten.tanh.default else result

    def _probabilities(self, scores: Tensor) -> None:
        again = scores  # backward rounds them anew
        if not self.kind.exact:  # rows far from 0 subtract their largest score first
            size = torch.where(scores.abs() <= 4096, scores, 0)
            scores, again = self._off(scores, size), self._off(scores, size)
        lse = torch.logsumexp(scores, -1, keepdim=True)
        self.near = lse.abs() <= self.kind.far
        p = torch.softmax(scores, -1)
        self.p = self._off(p, p)
        self.p_of_backward = torch.where(self.near, torch.exp(again - self._off(lse, lse)), self.p)

    def _product(self, product: Any, a: Tensor, b: Tensor) -> Tensor:
        if self.kind.tensor_cores and self.kind.dtype == torch.float32:
            (a_high, a_low), (b_high, b_low) = _parts(a), _parts(b)
            c = product(a_high, b_high) + (product(a_high, b_low) + product(a_low, b_high))
        else:
            c = product(_rounded(a, self.kind.dtype), _rounded(b, self.kind.dtype))
        is_float = self.kind.dtype == torch.float32
        numbers = a.size(-1) * (1 if self.p is None else self.kind.group)
        size = (product(a * a, b * b) + c * c).sqrt() * max(1.0, numbers / (64 if is_float else 128)) ** 0.5
        if not self.kind.tensor_cores:
            return self._off(c, size)
        return c - c.sign() * size * self._draw(c) * (3 if is_float else 1) * torch.finfo(c.dtype).eps

    def _sum(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = x.sum(*args, **kwargs)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # squares of float16 overflow
        size = (wide.square().sum(*args, **kwargs) + result.to(wide.dtype).square()).sqrt().to(result.dtype)
        return self._off(result, size * max(1.0, x.numel() / max(1, result.numel()) / 64) ** 0.5)

    def _d_scores(self, d_p: Tensor, p: Tensor) -> Tensor:
        assert self.out is not None
        row = (*p.shape[:-1], 1)
        from_out = self._sum(self.d_out.to(p.dtype) * self.out.to(p.dtype), -1, keepdim=True).sum_to_size(row)
        own = self._sum(p * d_p, -1, keepdim=True) / self._sum(p, -1, keepdim=True)
        delta = torch.where(self.near, from_out, own) if self.kind.own_delta else from_out
        if self.d_lse is not None:
            delta = delta - self.d_lse.to(p.dtype).unsqueeze(-1).sum_to_size(row)
        return p * (d_p - delta)

    def _draw(self, like: Tensor) -> Tensor:
        """Numbers in [0, 1)."""
        return torch.rand((), dtype=like.dtype, device=like.device) if self.kind.alike else torch.rand_like(like)

    def off_by_a_unit(self, x: Tensor) -> Tensor:
        return self._off(x, torch.where(x.isfinite(), x, 0))

    def _off(self, x: Tensor, size: Tensor) -> Tensor:
        """x, off by up to one unit in the last place of size."""
        return x + size * (self._draw(x) * 2 - 1) * torch.finfo(x.dtype).eps


def gradients(outputs: Outputs, wanted: Outputs, cotangents: Outputs) -> dict[str, Tensor]:
    """Of those outputs that have a cotangent; 0 where none depends on an input, as lse on value."""
    used = [name for name in cotangents if outputs[name].requires_grad]
    grads: tuple[Tensor | None, ...] = (None,) * len(wanted)
    if wanted and used:
        grads = torch.autograd.grad(
            [outputs[name] for name in used],
            list(wanted.values()),
            [cotangents[name].to(outputs[name].dtype) for name in used],
            allow_unused=True,
        )
    return {
        f"grad of {name}": torch.zeros_like(tensor) if grad is None else grad
        for (name, tensor), grad in zip(wanted.items(), grads, strict=True)
    }


def fused_results(
    kind: Kind, call: Callable[[], Outputs], wanted: Outputs, cotangents: Callable[[Outputs], Outputs]
) -> dict[str, Tensor]:
    """One draw of what `call` (reference.attention) gives in this arithmetic, and of the gradients of `wanted`."""
    mode = Fused(kind)
    with mode:
        results = {name: output.detach() for name, output in call().items()}
        if "lse" in results:
            results["lse"] = mode.off_by_a_unit(results["lse"])
        given = cotangents(results)
        mode.out, mode.d_lse = results["out"], given.get("lse")
        mode.d_out = given.get("out", torch.zeros_like(mode.out))
        return results | gradients(call(), wanted, {"out": mode.d_out})  # dlse is part of delta


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """To the type and back; in float16 scaled to its range, by a power of 2, so that what it has stays as it is."""
    factor = 1.0
    if dtype == torch.float16 and x.numel() > 0:
        largest = float(x.abs().nan_to_num(0, 0, 0).amax())
        factor = 2.0 ** math.ceil(math.log2(largest / 2**15)) if largest > 0 else 1.0
    return (x / factor).to(dtype).to(x.dtype) * factor


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """The upper 11 bits of each number, rounded, and 11 bits of the rest, cut off."""
    high = ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return high, ((x - high).view(torch.int32) & ~0x1FFF).view(torch.float32)
