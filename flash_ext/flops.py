"""FLOPs of the operators for ``torch.utils.flop_counter``, by torch's own rule for attention.

Forward: 2 Hq L S (E + Ev) a batch element; backward: 2 Hq L S (3 E + 2 Ev), which computes the scores again, whichever
gradients are wanted. Of packed sequences L S is the sum over them, whose lengths are read; fake and meta tensors have
none, and all are the longest then, as in torch's own rule. Bands and masks are not known: a kept pair counts as much as
one that is left out. What decomposes (the drop-in, double backward, forward-mode AD) is counted by what it decomposes
to.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor


def _has_no_data(tensor: Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, (FakeTensor, FunctionalTensor))


def _lengths(cu_seqlens: Tensor, used: Tensor | None, longest: int) -> list[int]:
    if _has_no_data(cu_seqlens):
        return [longest] * (cu_seqlens.size(0) - 1)
    return (cu_seqlens.diff() if used is None else used).tolist()


def _pairs(call: dict[str, Any], out: Tensor) -> int:
    """Pairs of a query and a key, over all heads of query."""
    if call.get("cu_seqlens_q") is None:
        return prod(out.shape[:-1]) * call["key"].shape[-2]  # broadcast over batch and heads, as out is
    cu_q, cu_k = call["cu_seqlens_q"], call.get("cu_seqlens_k")
    queries = _lengths(cu_q, call.get("seqused_q"), call["max_q"])
    keys = _lengths(cu_q if cu_k is None else cu_k, call.get("seqused_k"), call["max_k"])
    return out.shape[1] * sum(q * k for q, k in zip(queries, keys, strict=True))


def _call(target: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in target._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def _forward_of(target: Any) -> Callable[..., int]:
    def flops(*args: Any, out_val: tuple[Tensor, ...], **kwargs: Any) -> int:
        call = _call(target, args, kwargs)
        return 2 * _pairs(call, out_val[0]) * (call["query"].shape[-1] + call["value"].shape[-1])

    return flops


def _with_cache(*args: Any, out_val: tuple[Tensor, ...], **kwargs: Any) -> int:
    call = _call(torch.ops.flash_ext.attention_with_cache.default, args, kwargs)
    query, key, table = call["query"], call.get("key"), call.get("block_table")
    rows = call["key_cache"].shape[1] * (1 if table is None else table.shape[1])
    added = 0 if key is None else key.shape[1]
    lengths = [rows] * query.shape[0] if _has_no_data(call["cache_seqlens"]) else call["cache_seqlens"].tolist()
    keys = sum(min(n + added, rows) for n in lengths if n >= 0)
    return 2 * query.shape[1] * query.shape[2] * keys * (query.shape[3] + call["value_cache"].shape[3])


def _backward_of(target: Any) -> Callable[..., int]:
    def flops(*args: Any, out_val: Any, **kwargs: Any) -> int:
        call = _call(target, args, kwargs)
        return 2 * _pairs(call, call["out"]) * (3 * call["query"].shape[-1] + 2 * call["value"].shape[-1])

    return flops


def register() -> None:
    """Called when ``torch.utils.flop_counter`` has been imported; again where flash_ext is imported again."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    operators = torch.ops.flash_ext
    for formula_of, targets in (
        (_forward_of, (operators.attention, operators.attention_with_rng_state)),
        (_backward_of, (operators.attention_backward,)),
    ):
        for target in targets:
            flop_registry.pop(target, None)
            register_flop_formula(target, get_raw=True)(formula_of(target.default))
    flop_registry.pop(operators.attention_with_cache, None)
    register_flop_formula(operators.attention_with_cache, get_raw=True)(_with_cache)
