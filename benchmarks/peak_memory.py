"""The peak of a training step's memory by way of recomputation: measured, and predicted from what one block keeps.

Called by stepping.py for --checkpoint. Bytes are those beyond what is there before the step (weights, optimizer state,
tokens). With L blocks in groups of g = ceil(sqrt(L)), X bytes of a block's input and A of all else that it keeps:

    none     every block keeps everything                    L (X + A)
    block    every block keeps its input                     L X        then, one block at a time, A
    sqrt     every group keeps its input                     L / g X    then, one group at a time, g (X + A)
    nested   every group keeps its input, and within the     L / g X    then g X, and A of one block
             group that runs again every block does

The peak is the largest of three moments: the loss, with four tensors as large as the logits (the logits, their
log-softmax, and the gradients of both); the backward of the last block or group, with the logits; that of the first,
with the logits and every gradient. Temporaries inside a block's backward are not in it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from model import TransformerLM, group_size
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StoragePeak(TorchDispatchMode):
    """Within it: the largest sum of bytes of storages that operators made and that were alive together (a CPU's)."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                key = storage._cdata
                if key not in before and key not in self._known:
                    self._known[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._freed, key)
        return result

    def _freed(self, key: int) -> None:
        self.now -= self._known.pop(key)


def measured(step: Callable[[], Any], device: str) -> int:
    """Bytes at the peak of the step beyond those before it: the allocator's on a GPU, else of operators' results."""
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with StoragePeak() as counter:
        step()
    return counter.peak


def predicted(model: TransformerLM, tokens: Tensor, vocab: int, saved_tensors: Callable[..., Any]) -> int:
    """Bytes at the peak of a step on these tokens (B, S), as the head of this file says; float32.

    `saved_tensors` is flash_ext.profiling's: one block runs under it, once.
    """
    block, layers, batch, context = model.blocks[0], len(model.blocks), *tokens.shape
    x = torch.randn(batch, context, model.head.in_features, device=tokens.device, requires_grad=True)
    cos, sin = model.cos[:context], model.sin[:context]
    kept = saved_tensors(lambda: block(x, cos, sin)).total("activation")
    entry, logits = x.nbytes, 4 * batch * context * vocab
    group = group_size(layers)
    groups = math.ceil(layers / group)
    held, again = {
        "none": (layers * (entry + kept), 0),
        "block": (layers * entry, kept),
        "sqrt": (groups * entry, group * (entry + kept)),
        "nested": (groups * entry, group * entry + kept),
    }[model.recompute]
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    first = gradients + logits + (again or entry + kept)
    return max(held + 4 * logits, held + again + logits, first)
