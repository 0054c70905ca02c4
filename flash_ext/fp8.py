"""Tensors quantised to e4m3 (``torch.float8_e4m3fn``), for ``attention`` and ``attention_varlen``."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_ext.arguments import flag
from flash_ext.errors import AttentionError

_quantize = torch.ops.flash_ext.quantize_fp8.default
_descale = torch.ops.flash_ext.descale_fp8.default
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _rotated(x: Tensor) -> Tensor:
    """Rows times the orthonormal Walsh-Hadamard matrix of Sylvester's order, in float32 or more."""
    size = x.shape[-1]
    if size < 1 or size & (size - 1) != 0:
        raise AttentionError(f"hadamard is True, but x has a head dimension of {size}; it must be a power of 2")
    x = x if x.dtype == torch.float64 else x.float()
    half = 1
    while half < size:  # no matrix product, which autocast and TF32 would round
        first, second = x.unflatten(-1, (size // (2 * half), 2, half)).unbind(-2)
        x = torch.stack((first + second, first - second), -2).flatten(-3)
        half *= 2
    return x * size**-0.5


def _is_empty(x: Tensor) -> bool:
    return any(isinstance(size, int) and size == 0 for size in x.shape)


def quantize_fp8(
    x: Tensor, *, per: str = "head", hadamard: bool = False, packed: bool = False
) -> tuple[Tensor, Tensor]:
    """``x`` in e4m3 and the factor that gives it back: ``x8.float() * descale``, per head, is ``x`` but for rounding.

    The gradient that ``attention`` has of ``x8`` goes to ``x`` in x's dtype (straight through: rounding counts as the
    identity). So ``x8`` itself must be what ``attention`` is given, with its ``descale``.

    Args:
        x: (..., heads, length, head_dim), or with ``packed`` (rows, heads, head_dim); float16, bfloat16, float32 or
            float64.
        per: "head": one descale for each head; "token": one for each row of each head.
        hadamard: rotate rows before, by the orthonormal Walsh-Hadamard matrix, which spreads outliers over a row
            (FlashAttention-3, arXiv:2407.08608, section 3.3, without its random signs). The head dimension is a power
            of 2. Rotate query and key alike, and their scores stay; not value.
        packed: x is of packed sequences, as ``attention_varlen`` has them.

    Returns:
        (x8, descale): x8 like x; descale float32 without gradient, the largest magnitude over 448: (..., heads) or
        (..., heads, length), with ``packed`` (heads,) or (1, heads, rows). Where all is 0 it is 1. NaN stays NaN and
        counts for no descale; an infinity does not, either, and becomes the largest magnitude that there is, 448 times
        the descale.

    Raises:
        AttentionError: a shape, dtype or option that does not fit.
        TypeError: an argument of a wrong type.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x is of type {type(x).__name__}; it must be a torch.Tensor")
    if per not in ("head", "token"):
        raise AttentionError(f'per is {per!r}; it must be "head" or "token"')
    if x.dtype not in _DTYPES:
        raise AttentionError(
            f"x is of {x.dtype}; it must be of torch.float16, torch.bfloat16, torch.float32 or torch.float64"
        )
    if x.dim() != 3 if flag(packed, "packed") else x.dim() < 3:
        wanted = "3: (rows, heads, head_dim)" if packed else "3 or more: (..., heads, length, head_dim)"
        raise AttentionError(f"x of shape {tuple(x.shape)} has {x.dim()} dimensions; quantize_fp8 takes {wanted}")
    if flag(hadamard, "hadamard"):
        x = _rotated(x)
    of_rows = -3 if packed else -2
    dims = (-1,) if per == "token" else (of_rows, -1)
    if _is_empty(x):
        sizes = [1 if dim - x.dim() in dims else size for dim, size in enumerate(x.shape)]
        descale = x.new_ones(sizes, dtype=torch.float32)
    else:
        descale = _descale(x.detach(), dims)
    x8 = _quantize(x, descale)
    if not packed:
        return x8, descale.squeeze(-1) if per == "token" else descale.flatten(-3)
    return x8, descale.flatten() if per == "head" else descale.squeeze(-1).transpose(0, 1).unsqueeze(0)
