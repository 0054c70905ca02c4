"""The error rule for a benchmark's outputs: how far a result is from fp64, over how far it may be.

A result is right when its largest and its rms error against fp64 are at most twice those of eager attention in the same
dtype (every intermediate rounded to it, gradients by autograd), with a floor of 1e-6 for float32 and of one rounding of
the largest element for half types. `err` is error over allowance, so at most 1. One key head and its query heads are
sampled, over the whole batch, or all heads where a mask's gradient is summed over them: the scores of that sample are
written out, so it must be small.

Of e4m3 inputs both take the numbers that these stand for: eager attention in float32 but that exp(score - largest score
of the row) is rounded to e4m3, and out to bf16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from shapes import E4M3, Case, Inputs
from torch import Tensor


def softmax_e4m3(scores: Tensor, dim: int) -> Tensor:
    """Softmax whose exponentials are rounded to e4m3 before they are divided by their sum."""
    weights = torch.exp(scores - scores.amax(dim, keepdim=True))
    return weights.to(E4M3).to(scores.dtype) / weights.sum(dim, keepdim=True)


def eager_attention(
    case: Case,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    slopes: Tensor | None = None,
    softmax: Callable[..., Tensor] = torch.softmax,
) -> Tensor:
    """softmax(q k^T / sqrt(D) + mask) v in plain tensor operations; key heads may be fewer than query heads."""
    if case.lengths:
        alone = replace(case, lengths=())
        parts = zip(*(t.split(case.lengths, dim=2) for t in (query, key, value)), strict=True)
        return torch.cat([eager_attention(alone, *part, mask, slopes, softmax) for part in parts], dim=2)
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    rows = torch.arange(query.shape[2], device=scores.device)[:, None]
    behind = rows - torch.arange(
        key.shape[2], device=scores.device
    )  # how far a key lies behind the query; below 0: ahead
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if slopes is not None:
        scores = scores - (slopes[:, None, None] * behind.abs()).to(scores.dtype)
    if case.causal:
        hidden = behind < 0 if not case.window else (behind < 0) | (behind > case.window)
        scores = scores.masked_fill(hidden, -math.inf)
    probabilities = softmax(scores, dim=-1)
    if case.dropout:
        probabilities = torch.dropout(probabilities, case.dropout, train=True)
    return probabilities @ value


@dataclass
class Truth:
    """On the sampled heads, for out and then each gradient: the fp64 value, and the allowed (max, rms) error."""

    exact: list[Tensor]
    allowed: list[tuple[float, float]]


def _all_heads(case: Case) -> bool:
    """Whether one head is no sample: a mask's gradient that is summed over heads."""
    return case.mask == "float_grad" and "h" not in case.mask_dims


def score_elements(case: Case) -> int:
    """Elements of the sample's score matrices, which the check writes out several times in fp64."""
    of_head = sum(length**2 for length in case.lengths) or case.b * case.sq * case.sk
    return of_head * (case.h if _all_heads(case) else case.h // case.hkv)


def _sample(case: Case, tensor: Tensor) -> Tensor:
    """The last key head of key-like tensors, its query heads of the others; head dims of 1 (padding masks) stay."""
    tensor = tensor[(None,) * (4 - tensor.dim())]  # a mask may have fewer dimensions
    heads = tensor.shape[1]
    if heads == 1 or _all_heads(case):
        return tensor
    return tensor[:, -1:] if heads == case.hkv else tensor[:, -(case.h // case.hkv) :]


def _results(case: Case, inputs: Inputs, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """Eager output and gradients of the sample, computed in `dtype`; of e4m3 inputs the output alone."""

    def leaf(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or tensor.dtype == torch.bool:
            return tensor if tensor is None else _sample(case, tensor)
        return _sample(case, tensor.detach()).to(dtype).requires_grad_(tensor.requires_grad)

    slopes = inputs.slopes if inputs.slopes is None else inputs.slopes[-(case.h // case.hkv) :]
    of = inputs.dequantised(dtype) if inputs.descales else inputs
    leaves = [leaf(t) for t in (of.query, of.key, of.value, of.mask)]
    if inputs.descales:
        return [eager_attention(case, *leaves, slopes, **options).detach()]
    out = eager_attention(case, *leaves, slopes)
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, wanted, _sample(case, inputs.grad_out).to(dtype))]


def _errors(result: Tensor, exact: Tensor) -> tuple[float, float]:
    difference = (result.double() - exact).abs()
    return difference.max().item(), difference.square().mean().sqrt().item()


def truth(case: Case, inputs: Inputs) -> Truth:
    """fp64 results and what the error rule allows around them."""
    dtype = inputs.query.dtype
    exact = _results(case, inputs, torch.float64)
    if dtype == E4M3:
        dtype = torch.bfloat16  # out's
        eager = [out.to(dtype) for out in _results(case, inputs, torch.float32, softmax=softmax_e4m3)]
    else:
        eager = _results(case, inputs, dtype)
    allowed = []
    for right, rounded in zip(exact, eager, strict=True):
        largest = right.abs().max().item()
        floor = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 2 * largest
        worst, rms = _errors(rounded, right)
        allowed.append((max(2 * worst, floor), max(2 * rms, floor)))
    return Truth(exact, allowed)


def err(case: Case, found: Truth, results: list[Tensor], direction: str) -> float:
    """Error over allowance of [out, *gradients] in full size: of out for "fwd", else of the worst gradient.

    For "fwd" the gradients may be missing.
    """
    worst = 0.0
    for index, (result, exact, allowed) in enumerate(
        zip(results, found.exact, found.allowed, strict=direction != "fwd")
    ):
        if (index == 0) == (direction == "fwd"):
            ratios = (e / a for e, a in zip(_errors(_sample(case, result), exact), allowed, strict=True))
            worst = max(worst, *(math.inf if math.isnan(r) else r for r in ratios))
    return worst
