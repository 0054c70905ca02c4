"""Attention of Hugging Face transformers, computed by flash_ext.

    import flash_ext.integrations.transformers
    flash_ext.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flash_ext")

An attention function and a mask function under one name. The mask function (``transformers_masks``) gives the attention
function a band, the keys that are seen, or lengths, where these say the mask; and a mask of every pair only elsewhere.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from flash_ext.attention import attention
from flash_ext.cache import attention_with_cache
from flash_ext.errors import AttentionError
from flash_ext.integrations.transformers_masks import Band, BandMask, LengthsMask, Packed, mask_function
from flash_ext.varlen import attention_varlen

_names: set[str] = set()


def register(name: str = "flash_ext") -> None:
    """Makes ``attn_implementation=name`` choose flash_ext, for models that are made before or after this call.

    Args:
        name: how models ask for it. A second call with the same name changes nothing.

    Raises:
        ImportError: transformers is not installed, or has no attention interface (older than 4.53).
        TypeError: name is not a string.
        AttentionError: name is one that transformers has already, such as "sdpa".
    """
    if not isinstance(name, str):
        raise TypeError(f"name is of type {type(name).__name__}; it must be a str")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(
            "flash_ext.integrations.transformers needs transformers 4.53 or newer: pip install 'transformers>=4.53'"
        ) from error
    if name in _names:
        return
    if name == "eager" or name in AttentionInterface().valid_keys():
        raise AttentionError(f"name is {name!r}, which transformers has already; it must be another, as 'flash_ext'")
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, functools.partial(mask_function, sdpa_mask))
    _names.add(name)
    if "flash" in name:
        _be_no_flash_attention()


def _be_no_flash_attention() -> None:
    """transformers 5 takes every name with "flash" in it for a kernel to download; this excepts the registered ones.

    NOTE: models import the function by its name, so it is replaced in each module that has it already.
    """
    from transformers.utils import generic

    asked = getattr(generic, "is_flash_attention_requested", None)
    if asked is None or hasattr(asked, "flash_ext"):
        return

    @functools.wraps(asked)
    def is_flash_attention_requested(
        config: Any = None, requested_attention_implementation: str | None = None, *args: Any, **kwargs: Any
    ) -> bool:
        wanted = requested_attention_implementation if config is None else config._attn_implementation
        if wanted in _names:
            return False
        return asked(config, requested_attention_implementation, *args, **kwargs)

    is_flash_attention_requested.flash_ext = True
    for module in list(sys.modules.values()):
        # Not getattr of the name: it makes lazy modules of transformers import what they have.
        if getattr(module, "__dict__", {}).get("is_flash_attention_requested") is asked:
            module.is_flash_attention_requested = is_flash_attention_requested


def _band_of_module(
    queries: int, keys: int, causal: bool, sliding_window: int | None, seen: Tensor | None, align: str
) -> Band:
    """Where the model made no mask, its attention modules say what is seen. One query sees all of a cache."""
    causal = causal and queries > 1
    window = None
    if sliding_window is not None and keys > sliding_window:
        window = (sliding_window - 1, None if causal or queries == 1 else sliding_window - 1)
        align = "bottom_right" if queries == 1 else align
    return Band(causal, window, align, keys, seen, None)


def _packed_of(arguments: dict[str, Any]) -> tuple[Packed, Packed] | None:
    """Sequences that the caller of the model gave, as collators without padding do."""
    sides = []
    for side in "qk":
        cu_seqlens, longest = arguments.get(f"cu_seq_lens_{side}"), arguments.get(f"max_length_{side}")
        if cu_seqlens is None or longest is None:
            return None
        longest = int(longest) if isinstance(longest, Tensor) else longest
        sides.append(Packed(cu_seqlens.to(torch.int32), longest))
    return sides[0], sides[1]


def _rows(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)


def _join(mask: Tensor, bias: Tensor | None) -> dict[str, Tensor | None]:
    if mask.dtype == torch.bool:
        return {"mask": mask, "bias": bias}
    return {"bias": mask if bias is None else mask + bias}


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers.

    Args:
        module: the layer; ``module.is_causal`` (True where it has none) counts where ``is_causal`` is None.
        query: (B, Hq, L, E); float16, bfloat16, float32 or float64, one dtype for all three.
        key: (B, Hk, S, E); Hk divides Hq.
        value: (B, Hk, S, Ev).
        attention_mask: what the mask function made; or bool (True = attend) or floating (added to the scores),
            broadcastable to (B, Hq, L, S); or (B, S), the padding alone; or None.
        dropout: probability from 0 to 1.
        scaling: factor of the scores; ``1 / sqrt(E)`` by default.
        is_causal, sliding_window: what is seen where there is no mask of queries and keys. Query i then stands at key
            i, one query alone at the last key; a window is of so many keys, the query's own included.
        softcap: c in c * tanh(score / c).
        s_aux: (Hq,), sinks, with gradient.
        position_bias: (B or 1, Hq, L, S), added to the scores, with gradient.
        kwargs: ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k`` of sequences that are packed
            in the rows of one batch element; ``output_attentions`` and ``head_mask``, which are refused. Others are
            not looked at.

    Returns:
        out (B, L, Hq, Ev), contiguous, in query's dtype; and None for the weights, which are never there.

    Raises:
        AttentionError: weights or a mask of heads are asked for, or shapes, dtypes or options do not fit.
    """
    if kwargs.get("output_attentions"):
        raise AttentionError('output_attentions is True; only attn_implementation="eager" has the weights')
    if kwargs.get("head_mask") is not None:
        raise AttentionError('head_mask is given; it must be None, or use attn_implementation="eager"')
    queries, keys = query.shape[2], key.shape[2]
    if query.shape[0] != key.shape[0]:  # queries that are learned are one for all
        query, key, value = (x.expand(max(query.shape[0], key.shape[0]), -1, -1, -1) for x in (query, key, value))
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if s_aux is not None:
        s_aux = s_aux.to(torch.float64 if query.dtype == torch.float64 else torch.float32)
    options: dict[str, Any] = {
        "scale": scaling, "dropout_p": dropout, "softcap": softcap or 0.0, "sinks": s_aux, "bias": position_bias
    }  # fmt: skip

    if isinstance(attention_mask, LengthsMask):
        tensors = (query, key, value, s_aux, position_bias)
        wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        if attention_mask.shape[2:] == (queries, keys) and not wanted and position_bias is None and dropout == 0:
            out = attention_with_cache(
                *(x.transpose(1, 2) for x in (query, key, value)), cache_seqlens=attention_mask.lengths,
                softcap=softcap or 0.0, sinks=s_aux, scale=scaling,
            )  # fmt: skip
            return out, None
        attention_mask = attention_mask.built()
    if isinstance(attention_mask, BandMask):
        band: Band | None = attention_mask.band
        as_made = attention_mask.shape[2:] == (queries, keys)
        if not as_made or (attention_mask.band.packed is not None and position_bias is not None):
            attention_mask, band = attention_mask.built(), None
    elif attention_mask is None:
        band = _band_of_module(queries, keys, is_causal, sliding_window, None, "top_left")
    elif attention_mask.dim() == 2:
        keys = min(keys, attention_mask.shape[1])
        seen = attention_mask[:, -keys:].bool()
        band = _band_of_module(queries, keys, is_causal, sliding_window, seen, "bottom_right")
    else:
        band = None
    if band is None:
        options |= _join(attention_mask[..., :keys], position_bias)
        out = attention(query, key, value, **options)
        return out.transpose(1, 2).contiguous(), None

    options |= {"causal": band.causal, "window": band.window, "align": band.align}
    packed = (band.packed, band.packed) if band.packed else None
    if band.keys is None and position_bias is None and (given := _packed_of(kwargs)):
        packed, options["align"] = given, "bottom_right"
    if packed is not None:
        q, k = packed
        del options["bias"]
        rows = attention_varlen(
            *map(_rows, (query, key, value)), q.cu_seqlens, k.cu_seqlens, max_q=q.longest, max_k=k.longest, **options
        )
        return rows.unflatten(0, (query.shape[0], queries)), None
    if band.end < key.shape[2]:
        key, value = key[:, :, : band.end], value[:, :, : band.end]
        options["bias"] = None if position_bias is None else position_bias[..., : band.end]
    if band.keys is not None:
        options["mask"] = band.keys[:, None, None, :]
    return attention(query, key, value, **options).transpose(1, 2).contiguous(), None
