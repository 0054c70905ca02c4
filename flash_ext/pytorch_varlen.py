"""torch.nn.attention.varlen under ``enable()``: kernels for its two operators, which ask whether a call is ours.

Arguments are bound by the names of the operator's schema, because torch's versions differ: 2.10 has no scale and no
window, later ones add grouped heads, lengths in use, caches and pages. The fake implementations stay torch's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_ext import ops

# NOTE: who computed a forward must be seen in backward without a look at the device, also where enable() has ended or a
# compiled function has called it: torch's rng_state of two zeros begins its memory, ours lies behind a
# multiple of 16 unused bytes, which tells the backend that was asked for: autograd's thread has no choice of its own.
_MARK = 2
_asked: list[str | None] = [None]
_OURS = {"is_causal", "scale", "window_size", "enable_gqa", "seqused_k", "backend"}  # options that we know


def _bind(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every argument by its name, also those that were not given."""
    arguments = operator._opoverload._schema.arguments
    given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
    return {a.name: a.default_value for a in arguments} | given


def _is_served(operator: Any, given: dict[str, Any]) -> bool:
    """Unknown options are at their defaults, and what the fake implementation promises is what we return."""
    options = (a for a in operator._opoverload._schema.arguments if a.has_default_value())
    if any(given[a.name] != a.default_value for a in options if a.name not in _OURS):
        return False
    if given["cu_seq_k"] is None or given["key"].dim() != 3 or given["query"].dtype.itemsize < 2:
        return False
    return given["query"].shape[-1] == given["value"].shape[-1] or "backend" in given


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """Of ``torch.ops.flash_ext.attention``; -1 is an open side of the window, and the diagonal ends bottom right."""
    left, right = (None if side < 0 else side for side in given.get("window_size") or (-1, -1))
    return {
        "cu_seqlens_q": given["cu_seq_q"],
        "cu_seqlens_k": given["cu_seq_k"],
        "seqused_k": given.get("seqused_k"),
        "max_q": given["max_q"],
        "max_k": given["max_k"],
        "causal": given["is_causal"],
        "window_left": left,
        "window_right": right,
        "bottom_right": True,
        "scale": given.get("scale"),
        "gqa": True,
    }


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """With the strides that the fake implementation promises."""
    if tensor.shape != like.shape or tensor.stride() == torch.empty_like(like, device="meta").stride():
        return tensor
    return torch.empty_like(like).copy_(tensor)


def _attend(given: dict[str, Any], backend: str | None = None) -> tuple[Tensor, Tensor]:
    tensors = (given[name] for name in ("query", "key", "value"))
    out, lse, _ = torch.ops.flash_ext.attention.default(
        *tensors, **_options(given), return_lse=True, backend=backend
    )  # fmt: skip
    return out, lse


def _forward(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    query = given["query"]
    out, lse = _attend(given)
    backend = ops.require_c().requested_backend()
    if backend not in _asked:
        _asked.append(backend)
    unused = _MARK * (1 + _asked.index(backend))
    rng_state = torch.zeros(unused + 2, dtype=torch.uint64, device=query.device)[unused:]
    return _laid_out(out, query), lse.float(), rng_state


def _backend(given: dict[str, Any]) -> str | None:
    """That of forward; any where the mark is gone, see _was_ours."""
    unused = given["rng_state"].storage_offset()
    return _asked[unused // _MARK - 1] if unused else None


def _backward(given: dict[str, Any]) -> tuple[Tensor, ...]:
    tensors = [given[name] for name in ("query", "key", "value")]
    out, lse = given["out"], given["lse"]
    if tensors[0].dtype == torch.float64:  # whose lse is float64, and was rounded to torch's float32
        out, lse = _attend(given, _backend(given))
    grads = torch.ops.flash_ext.attention_backward.default(
        given["grad_out"], None, *tensors, out, lse, torch.empty(0, dtype=torch.int64, device=out.device),
        **_options(given), grad_mask=[True, True, True, False, False],
        backend=_backend(given),
    )  # fmt: skip
    return tuple(_laid_out(grad, tensor) for grad, tensor in zip(grads[:3], tensors, strict=True))


def _was_ours(given: dict[str, Any]) -> bool:
    """Also where a hook on saved tensors has copied the mark away, of a forward that PyTorch does not have."""
    query = given["query"]
    return given["rng_state"].storage_offset() > 0 or not query.is_cuda or query.dtype.itemsize != 2


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    given = _bind(sys.modules["torch.nn.attention.varlen"]._varlen_attn_backward, inputs, {})
    names = ("grad_out", "query", "key", "value")
    ctx.was_ours, ctx.number = _was_ours(given), len(inputs)
    ctx.options = _options(given) | {"backend": _backend(given) if ctx.was_ours else None}
    ctx.places = [list(given).index(name) for name in names]
    ctx.save_for_backward(*(given[name] for name in names))


def _second(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of gradients: forward once more, differentiated twice."""
    if not ctx.was_ours:
        raise RuntimeError("torch's varlen_attn has no second derivative; call it within flash_ext.enable()")
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        out, *_ = torch.ops.flash_ext.attention.default(*leaves[1:], **ctx.options)
        first = torch.autograd.grad(out, leaves[1:], leaves[0], create_graph=True)
    result: list[Tensor | None] = [None] * ctx.number
    for place, grad in zip(ctx.places, torch.autograd.grad(first, leaves, cotangents), strict=True):
        result[place] = grad
    return tuple(result)


def register() -> None:
    """Called when ``torch.nn.attention.varlen`` has been imported; again where flash_ext is imported again."""
    module = sys.modules["torch.nn.attention.varlen"]
    forward, backward = (getattr(module, name, None) for name in ("_varlen_attn", "_varlen_attn_backward"))
    if forward is None or backward is None or ops.C is None:
        return
    takes_call = ops.C.takes_varlen_call

    def kernel(
        operator: Any, ours: Callable[..., Any], is_ours: Callable[[dict[str, Any]], bool]
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = _bind(operator, args, kwargs)
            if not is_ours(given):
                return operator._init_fn(*args, **kwargs)
            with torch.autocast(given["query"].device.type, enabled=False):  # these operators take no part in it
                return ours(given)

        return call

    for device in ("cpu", "cuda"):
        forward.register_kernel(device, kernel(forward, _forward, lambda given: takes_call(_is_served(forward, given))))
        backward.register_kernel(device, kernel(backward, _backward, _was_ours))
    backward.register_autograd(_second, setup_context=_save)
