"""torch.utils.checkpoint: what is computed again in backward is computed by the attention of its forward.

Backward may run outside the scope that chose (``enable``, ``use_backend``, PyTorch's ``sdpa_kernel``, the
``context_parallel`` of ``flash_ext.distributed``), and for a GPU in a thread of its own. So each checkpoint takes the
choice along from its forward. NOTE: both kinds are reached by their classes, so that names imported earlier and other
callers within torch are reached, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from flash_ext import ops
from flash_ext.control import Choice


def checkpoint_ops() -> set[torch._ops.OpOverload]:
    """The operators whose results selective activation checkpointing saves so that attention runs forward once a step.

    For the policy of ``torch.utils.checkpoint.create_selective_checkpoint_contexts``, under ``enable`` too: saving the
    results of ``attention`` (with dropout, of the two others) is saving out, lse and the state of dropout.
    """
    operators = torch.ops.flash_ext
    return {
        operators.attention.default,
        operators.attention_with_rng_state.default,
        operators.draw_rng_state.default,
    }


def _under(choice: Choice, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def again(*args: Any, **kwargs: Any) -> Any:
        with choice.again():
            return function(*args, **kwargs)

    return again


def _original(function: Any) -> Any:
    """What stood there before an earlier import of this package."""
    return getattr(function, "_flash_ext_original", function)


def register() -> None:
    """Called when ``torch.utils.checkpoint`` has been imported; again where flash_ext is imported again."""
    from torch.utils import checkpoint

    if ops.C is None:  # no choice can be made without _C
        return
    frame, function = checkpoint._CheckpointFrame, checkpoint.CheckpointFunction
    init, forward, backward = (_original(f) for f in (frame.__init__, function.forward, function.backward))

    @functools.wraps(init)
    def init_with_choice(self: Any, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        init(self, _under(Choice(), recompute_fn), *args, **kwargs)

    @functools.wraps(forward)
    def forward_with_choice(ctx: Any, *args: Any) -> Any:
        ctx.flash_ext_choice = Choice()
        return forward(ctx, *args)

    @functools.wraps(backward)
    def backward_with_choice(ctx: Any, *args: Any) -> Any:
        return _under(ctx.flash_ext_choice, backward)(ctx, *args)

    for wrapper, original in (
        (init_with_choice, init), (forward_with_choice, forward), (backward_with_choice, backward)
    ):  # fmt: skip
        wrapper._flash_ext_original = original  # type: ignore[attr-defined]
    frame.__init__ = init_with_choice
    function.forward, function.backward = staticmethod(forward_with_choice), staticmethod(backward_with_choice)
