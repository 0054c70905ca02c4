"""The state of dropout in a graph that is split into forward and backward.

With ``torch._functorch.config.activation_memory_budget`` below 1 the partitioner computes parts of forward again in
backward, and with a budget of 0 all of it, what draws random numbers included. It repeats a random operator with the
generator's state of its forward only where the operator is marked as one that may be computed again; so the operator
that draws the state of dropout is marked so where it is traced under such a budget. NOTE: nowhere else, because on a
GPU a marked operator draws from a generator of the graph's own, which ``torch.manual_seed`` does not reach.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _may_compute_again() -> bool:
    config = torch._functorch.config
    return config.activation_memory_budget < 1 or config.aggressive_recomputation


def _traced(mode: Any, *args: Any, **kwargs: Any) -> Tensor:
    from torch.fx.experimental.proxy_tensor import get_proxy_slot, proxy_call
    from torch.utils.checkpoint import CheckpointPolicy

    state = proxy_call(mode, torch.ops.flash_ext.draw_rng_state.default, mode.pre_dispatch, args, kwargs)
    if not _may_compute_again():
        return state
    meta = get_proxy_slot(state, mode.tracer).proxy.node.meta
    # What the user's own policy says goes first. A graph of its own (ac_graph_id) that no checkpoint has.
    meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)
    meta.setdefault("ac_graph_id", -1)
    meta.setdefault("has_backward_hook", False)
    return state


def register() -> None:
    """Called when ``torch.fx.experimental.proxy_tensor`` has been imported; again where flash_ext is imported again."""
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

    operator = torch.ops.flash_ext.draw_rng_state.default
    operator.python_key_table.pop(ProxyTorchDispatchMode, None)
    operator.py_impl(ProxyTorchDispatchMode)(_traced)
