"""``context_parallel``: a context in which attention takes query, key and value for shards of a sequence.

The context is a torch function mode. It sees the calls of this thread, also by names that were imported before:

    torch.ops.flash_ext.attention                      of flash_ext.attention and attention_varlen
    torch.ops.flash_ext.scaled_dot_product_attention   of the drop-in
    F.scaled_dot_product_attention                     while an enable() is on; else it stays PyTorch's

and not those that C++ makes (``at::scaled_dot_product_attention``, or a compiled graph). Torch calls its own functions
of Python with the mode off, and ``F.multi_head_attention_forward`` looks its attention up in ``F``; so that name stands
for a function that asks this thread's context while any context is entered.

NOTE: torch runs backward with the mode off, too, and for a GPU in another thread. For what a checkpoint computes again
there, ``control.Choice`` enters its forward's context again.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flash_ext.control import here, is_enabled
from flash_ext.distributed.dense import check_method, context_parallel_attention, groups_of
from flash_ext.distributed.layout import check_balance
from flash_ext.distributed.packed import context_parallel_attention_varlen
from flash_ext.errors import AttentionError

_ops = torch.ops.flash_ext
_ATTENTION = (_ops.attention.default, _ops.attention)
_DROP_IN = (_ops.scaled_dot_product_attention.default, _ops.scaled_dot_product_attention)
_SDPA = F.scaled_dot_product_attention
_lock, _count = threading.Lock(), 0
_NATIVE = [argument.name for argument in _ops.attention.default._schema.arguments]


class context_parallel(TorchFunctionMode):
    """Within the context, in this thread, attention takes query, key and value for this rank's tokens of a sequence.

    That is ``flash_ext.attention``, ``attention_varlen`` (with the cu_seqlens of the whole), the drop-in and, while
    ``flash_ext.enable()`` is on, ``F.scaled_dot_product_attention`` as Python calls it, in modules of torch too. Masks
    and biases are this rank's rows against all keys. Backward may run inside or outside, in any thread; what
    ``torch.utils.checkpoint`` computes again is sharded as its forward was. ``FlashAttention`` is refused. Every torch
    call in the context passes through Python once more, some microseconds each.

    Args:
        mesh: a ProcessGroup, or a DeviceMesh of one or two dimensions.
        method, balance, check: as in :func:`context_parallel_attention`.

    Raises:
        AttentionError: a method or balance that there is not; from calls, what ``context_parallel_attention`` raises.
    """

    def __init__(self, mesh: Any, *, method: str = "auto", balance: str = "zigzag", check: bool | None = None) -> None:
        super().__init__()
        groups_of(mesh), check_method(method), check_balance(balance)
        self.mesh = mesh
        self.how: dict[str, Any] = {"method": method, "balance": balance, "check": check}

    def __enter__(self) -> context_parallel:
        global _count
        super().__enter__()
        here.contexts = (*(here.contexts or ()), self)
        with _lock:
            _count += 1
            F.scaled_dot_product_attention = _ask_the_context
        return self

    def __exit__(self, *error: Any) -> None:
        global _count
        with _lock:
            _count -= 1
            if _count == 0:
                F.scaled_dot_product_attention = _SDPA
        assert here.contexts is not None
        here.contexts = here.contexts[:-1]
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if here.contexts is not None and self not in here.contexts[-1:]:  # the forward of a checkpoint was not in it
            return func(*args, **kwargs)
        if func in _ATTENTION:
            if "deterministic" not in kwargs and not torch.is_grad_enabled() and any(t.requires_grad for t in args[:3]):
                raise AttentionError(
                    "FlashAttention is called in context_parallel, and its backward would be of this rank alone; "
                    "use flash_ext.attention"
                )
            return self._native(**(dict(zip(_NATIVE, args, strict=False)) | kwargs))
        if func in _DROP_IN or (func is _SDPA and is_enabled()):
            return self._drop_in(*args, **kwargs)
        return func(*args, **kwargs)

    def _native(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
        window_left: int | None = None, window_right: int | None = None, bottom_right: bool = False,
        return_lse: bool = False, max_q: int = 0, max_k: int = 0, gqa: bool = False, backend: str | None = None,
        q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
        out_dtype: torch.dtype | None = None, **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        if q_descale is not None or k_descale is not None or v_descale is not None or out_dtype is not None:
            raise AttentionError(
                "q_descale, k_descale, v_descale or out_dtype is given in context_parallel, which takes no e4m3 inputs"
            )
        options |= {"window": (window_left, window_right), "align": "bottom_right" if bottom_right else "top_left"}
        if cu_seqlens_q is None:
            out, lse = context_parallel_attention(query, key, value, self.mesh, **self.how, **options, return_lse=True)
        else:
            if cu_seqlens_k is not None or seqused_q is not None or seqused_k is not None or max_q != max_k:
                raise AttentionError(
                    "cu_seqlens_k, seqused_q, seqused_k, block_table or another max_k is given in context_parallel; "
                    "packed sequences have one cu_seqlens of queries and keys there"
                )
            out, lse = context_parallel_attention_varlen(
                query, key, value, cu_seqlens_q, self.mesh, max_seqlen=max_q, **self.how, **options, return_lse=True
            )
        return out, lse, query.new_empty(0, dtype=torch.int64)

    def _drop_in(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if attn_mask is not None and is_causal:
            raise AttentionError("attn_mask is given together with is_causal=True; only one of the two may be set")
        if not enable_gqa and not query.shape[-3:-2] == key.shape[-3:-2] == value.shape[-3:-2]:
            raise AttentionError(
                f"query, key and value of shapes {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)} "
                "have different numbers of heads; context_parallel takes that with enable_gqa=True"
            )
        is_bool = attn_mask is not None and attn_mask.dtype == torch.bool
        lacking = 4 - query.dim() if query.dim() < 4 else 0
        query, key, value = (t[(None,) * lacking] for t in (query, key, value))
        out = context_parallel_attention(
            query, key, value, self.mesh, **self.how, causal=is_causal, mask=attn_mask if is_bool else None,
            bias=None if is_bool else attn_mask, dropout_p=dropout_p, scale=scale,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out[(0,) * lacking]


def _ask_the_context(*args: Any, **kwargs: Any) -> Tensor:
    """``F.scaled_dot_product_attention`` while a context is entered, in this thread or another one."""
    if here.contexts and is_enabled():
        return here.contexts[-1]._drop_in(*args, **kwargs)
    return _SDPA(*args, **kwargs)
