"""Sinks of calls with a cache: one more logit a head, which takes its part of each row's weight and gives no value.

With s the sink of a head (Xiao et al., arXiv:2309.17453, as a parameter), a row of scores x has

    lse' = log(exp(lse) + exp(s))        out' = exp(lse - lse') out        where lse and out are those without a sink

so that a call with sinks is the call without and this behind it. Other calls have sinks in their kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_ext.errors import AttentionError

_MINUS_INFINITY = float("-inf")


def check(sinks: Tensor, query: Tensor) -> None:
    """``query``: (..., Hq, L, E), or (rows, Hq, E)."""
    if not isinstance(sinks, Tensor):
        raise TypeError(f"sinks is of type {type(sinks).__name__}; it must be a torch.Tensor")
    heads = query.shape[1]
    if sinks.dim() != 1 or sinks.shape[0] != heads:
        raise AttentionError(
            f"sinks of shape {tuple(sinks.shape)} is not ({heads},), one number for each head of query"
        )
    if sinks.dtype not in (torch.float32, torch.float64) or (sinks.dtype == torch.float64 != query.dtype):
        raise AttentionError(f"sinks is of {sinks.dtype}; it must be of torch.float32, or torch.float64 if query is")
    if sinks.device != query.device:
        raise AttentionError(
            f"sinks is on {sinks.device}, but query is on {query.device}; all tensors must be on one device"
        )


def join(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """out (..., Hq, L, Ev) and lse (..., Hq, L) of a call without sinks become those of the call with them.

    sinks: (Hq,). A row without keys keeps out 0 and has the sink as its lse. Differentiable in all three.
    """
    # NOTE: a number for each row, in double: the gradient of a sink is a sum over all rows of both signs.
    sink = sinks.double().unsqueeze(-1)
    empty = lse == _MINUS_INFINITY
    # NOTE: filled before and after, or a row without keys has derivatives of 0 times infinity.
    of_keys = lse.double().masked_fill(empty, 0.0)
    share = torch.sigmoid(of_keys - sink).masked_fill(empty, 0.0).to(lse.dtype)
    joined = torch.where(empty, sink, torch.logaddexp(of_keys, sink)).to(lse.dtype)
    return (out * share.unsqueeze(-1)).to(out.dtype), joined
