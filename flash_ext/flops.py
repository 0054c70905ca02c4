"""FLOPs of the operators for ``torch.utils.flop_counter``, by torch's own rule for attention.

Forward: 2 Hq L S (E + Ev) a batch element; backward: 2 Hq L S (3 E + 2 Ev), which computes the scores again, whichever
gradients are wanted. Bands and masks are not known: a kept pair counts as much as one that is left out. What decomposes
(the drop-in, double backward, forward-mode AD) is counted by what it decomposes to.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

Shape = tuple[int, ...]


def _forward(query: Shape, key: Shape, value: Shape, *_: Any, out_shape: tuple[Shape, ...], **__: Any) -> int:
    rows = prod(out_shape[0][:-1])  # broadcast over batch and heads, as out is
    return 2 * rows * key[-2] * (query[-1] + value[-1])


def _backward(_: Any, __: Any, query: Shape, key: Shape, value: Shape, out: Shape, *___: Any, **____: Any) -> int:
    return 2 * prod(out[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def register() -> None:
    """Called when ``torch.utils.flop_counter`` has been imported; again where flash_ext is imported again."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    operators = torch.ops.flash_ext
    for formula, targets in (
        (_forward, (operators.attention, operators.attention_with_rng_state)),
        (_backward, (operators.attention_backward,)),
    ):
        for target in targets:
            flop_registry.pop(target, None)
            register_flop_formula(target)(formula)
