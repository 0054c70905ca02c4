"""The state of dropout in a graph that is split into forward and backward.

With ``torch._functorch.config.activation_memory_budget`` below 1 (or activation checkpointing) the partitioner computes
parts of forward again in backward, and with a budget of 0 all of it, what draws random numbers included. It repeats a
random operator with the generator's state of its forward only where the operator is marked as one that may be computed
again; so the operator that draws the state of dropout is marked so wherever it is traced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _traced(mode: Any, *args: Any, **kwargs: Any) -> Tensor:
    from torch.fx.experimental.proxy_tensor import get_proxy_slot, proxy_call
    from torch.utils.checkpoint import CheckpointPolicy

    state = proxy_call(mode, torch.ops.flash_ext.draw_rng_state.default, mode.pre_dispatch, args, kwargs)
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
