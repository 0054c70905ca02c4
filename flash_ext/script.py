"""TorchScript: what ``torch.jit.script`` compiles where a program calls flash_ext.

NOTE: no ``from __future__ import annotations``: the compiler of TorchScript reads the types.
"""

from typing import NoReturn, Optional

import torch
from torch import Tensor


def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,  # noqa: UP045
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,  # noqa: UP045
    enable_gqa: bool = False,
) -> Tensor:
    return torch.ops.flash_ext.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def drop_in():
    """The drop-in as TorchScript reads it: a call of its operator."""
    return _scaled_dot_product_attention


def refuse() -> NoReturn:
    """For functions whose result or arguments have no type of TorchScript."""
    raise RuntimeError(
        "torch.jit.script knows flash_ext.scaled_dot_product_attention and the operators of torch.ops.flash_ext only; "
        "for anything else use torch.export (or torch.jit.trace)"
    )
