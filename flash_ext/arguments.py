"""Numbers, flags and bands of a call, for where Python checks them; the eager entry of ``_C`` has the same rules and
texts.

PyTorch takes a 0-d tensor for a number where it wants no gradient, and so do we. One that wants a gradient would
silently get none.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from flash_ext.errors import AttentionError

Window = tuple[int | None, int | None]
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)  # NOTE: Dynamo of torch 2.9 knows no union in isinstance


def _wants_gradient(tensor: Tensor) -> bool:
    if tensor.requires_grad or torch.compiler.is_compiling():
        return tensor.requires_grad
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def number(value: Any, name: str) -> float:
    """``value`` as a number; a TypeError of one sentence for what is none."""
    if isinstance(value, _NUMBERS):
        return value
    if isinstance(value, Tensor):
        if _wants_gradient(value):
            instead = "multiply the query by it instead" if name == "scale" else f"pass {name}.item()"
            raise TypeError(f"{name} is a tensor that wants a gradient, which a number does not get; {instead}")
        if value.dim() != 0:
            raise TypeError(f"{name} is a tensor of {value.dim()} dimensions; it must be a number")
        if not (value.is_cpu or value.is_meta or torch.compiler.is_compiling()):
            warnings.warn(
                f"{name} is a tensor on {value.device}; reading it waits for the device (pass a number)", stacklevel=3
            )
    if isinstance(value, Tensor) or hasattr(type(value), "__float__"):  # the latter: numpy's numbers
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            pass
    raise TypeError(f"{name} is of type {type(value).__name__}; it must be a number")


def flag(value: Any, name: str) -> bool:
    """``value`` where it is True or False; a TypeError of one sentence otherwise."""
    if isinstance(value, bool):
        return value
    raise TypeError(f"{name} is of type {type(value).__name__}; it must be a bool")


def check_band(window: Window | None, align: str) -> Window:
    """The form of ``window``, whose sides it returns, and the two alignments."""
    if align not in ("top_left", "bottom_right"):
        raise AttentionError(f'align is {align!r}; it must be "top_left" or "bottom_right"')
    if window is None:
        return None, None
    sides = tuple(window) if isinstance(window, (tuple, list)) else ()  # torch 2.9's Dynamo does not know tuple | list
    if len(sides) != 2 or not all(side is None or (type(side) is int) for side in sides):
        raise TypeError(f"window is {window!r}; it must be (left, right), each None or a number of keys")
    return sides
