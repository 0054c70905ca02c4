"""Calls of FlashAttention's interfaces: what is asked, what it means in float64, and how results are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from caches import ints, place, turned
from torch import Tensor

from flash_ext import reference

B, H, E = 3, 4, 16
# No kernel of a GPU has float64, which the composite would compute.
DTYPE = {"cpu": torch.float64, "cuda": torch.float32}
CLOSE = {torch.float64: {"rtol": 1e-9, "atol": 1e-10}, torch.float32: {"rtol": 1e-4, "atol": 1e-5}}

# What is asked, and what it means.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "left": ({"window_size": (3, -1)}, {"window": (3, None)}),
    "right": ({"window_size": (-1, 2)}, {"window": (None, 2)}),
    "both": ({"window_size": [2, 1]}, {"window": (2, 1)}),
    "of a tensor": ({"window_size": torch.tensor([2, 1])}, {"window": (2, 1)}),
    "causal window": ({"causal": True, "window_size": (2, 5)}, {"causal": True, "window": (2, 0)}),
    "softcap": ({"softcap": 2.0}, {"softcap": 2.0}),
    "no softcap": ({"softcap": -1.0}, {}),
    "scale": ({"softmax_scale": 0.7}, {"scale": 0.7}),
    "deterministic": ({"deterministic": True, "causal": True}, {"causal": True}),
}


def asked(name: str, slopes: str | None, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    given, meaning = OPTIONS[name]
    if slopes is None:
        return given, meaning
    numbers = torch.rand((H,) if slopes == "heads" else (B, H), device=device)
    return given | {"alibi_slopes": numbers}, meaning | {"alibi_slopes": numbers.double()}


ASKED = [*((name, None) for name in OPTIONS), ("causal", "heads"), ("left", "batch and heads")]


def compare(call: Callable[..., Any], truth: Callable[..., Any], tensors: list[Tensor]) -> None:
    """out, lse and gradients under the same cotangents; the truth in float64."""
    close = CLOSE[tensors[0].dtype]
    leaves, wide = (
        [tensor.to(dtype, copy=True).requires_grad_() for tensor in tensors]
        for dtype in (tensors[0].dtype, torch.float64)
    )
    out, lse, *rest = call(*leaves)
    assert rest in ([], [None]) and out.is_contiguous() and out.dtype == lse.dtype == tensors[0].dtype
    expected = truth(*wide)
    cotangents = [torch.randn_like(out), torch.randn_like(lse).masked_fill(lse == -torch.inf, 0.0)]
    grads = torch.autograd.grad((out, lse), leaves, cotangents)
    expected += torch.autograd.grad(expected, wide, [cotangent.double() for cotangent in cotangents])
    for got, exact in zip((out, lse, *grads), expected, strict=True):
        torch.testing.assert_close(got.double(), exact, **close)


def dense_truth(q: Tensor, k: Tensor, v: Tensor, **meaning: Any) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = reference.attention(q, k, v, align="bottom_right", return_lse=True, **meaning)
    return out.transpose(1, 2), lse


LENGTHS = (5, 0, 7), (4, 6, 0)  # of queries and of keys: nothing to attend with, and nothing to attend to


def starts(lengths: tuple[int, ...], device: str) -> Tensor:
    return torch.nn.functional.pad(ints(lengths, device).cumsum(0), (1, 0)).int()


def packed_truth(
    q: Tensor, k: Tensor, v: Tensor, lengths: Any, slopes: Tensor | None = None, **meaning: Any
) -> tuple[Tensor, Tensor]:
    """Each sequence alone."""
    outs, lses = [], []
    for b, rows in enumerate(zip(q.split(lengths[0]), k.split(lengths[1]), v.split(lengths[1]), strict=True)):
        alibi = {} if slopes is None else {"alibi_slopes": slopes if slopes.dim() == 1 else slopes[b]}
        out, lse = dense_truth(*(x[None] for x in rows), **meaning, **alibi)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, -1)


# ---- caches ----------------------------------------------------------------------------------------------------------

CACHES: dict[str, dict[str, Any]] = {
    "one query": {},
    "append": {"added": 1, "causal": True},
    "append 3 with 2 queries": {"queries": 2, "added": 3, "causal": True},
    "window": {"queries": 4, "added": 4, "window": (6, 2)},
    "softcap and scale": {"queries": 2, "softcap": 3.0, "scale": 0.4},
    "slopes": {"queries": 3, "slopes": True, "causal": True},
    "slots": {"queries": 2, "added": 2, "index": (4, 0, 2)},
    "rotary": {"queries": 2, "added": 2, "rotary": 16, "causal": True},
    "rotary, pairs side by side": {"queries": 3, "added": 2, "rotary": 8, "rotary_interleaved": True, "causal": True},
    "rotary, not causal": {"queries": 3, "added": 2, "rotary": 16},
    "rotary, window": {"queries": 2, "added": 2, "rotary": 16, "window": (9, 9)},
    "pages": {"queries": 2, "added": 3, "page": 16, "rotary": 16, "causal": True},
    "nothing at all": {"lengths": (0, 0, 0), "queries": 2},
}
NAMES = {
    "query": "q", "key": "k", "value": "v", "key_cache": "k_cache", "value_cache": "v_cache", "scale": "softmax_scale",
    "cache_batch_index": "cache_batch_idx",
}  # fmt: skip


def in_their_names(call: dict[str, Any]) -> dict[str, Any]:
    given = {NAMES.get(name, name): value for name, value in call.items() if name not in ("window", "causal")}
    given |= {"causal": True} if call["causal"] else {}
    given |= {"window_size": call["window"]} if "window" in call else {}
    if given.pop("rotary_interleaved", False) is False and "rotary_cos" in call:  # which is their default
        given["rotary_interleaved"] = False
    return given


def padded_left(call: dict[str, Any], first: list[int], caches: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """out and lse of a call of caches.py that has left `caches`, where sequence b begins with row `first[b]`."""
    expected_out, expected_lse = [], []
    for b, (length, pad) in enumerate(zip(call["cache_seqlens"].tolist(), first, strict=True)):
        total = length + (call["key"].shape[1] if "key" in call else 0)
        query = call["query"][b].cpu().double()
        if "rotary_cos" in call:
            moves = call["causal"] or "window" in call
            angles = [call[name].cpu().double() for name in ("rotary_cos", "rotary_sin")]
            at = [length + i * moves for i in range(len(query))]
            query = turned(query, *angles, at, call.get("rotary_interleaved", False))
        options = {name: call[name] for name in ("causal", "window", "softcap", "scale") if name in call}
        slopes = {"alibi_slopes": call["alibi_slopes"][b].cpu().double()} if "alibi_slopes" in call else {}
        at = tuple(torch.tensor([place(call, b, row) for row in range(pad, total)], dtype=torch.long).view(-1, 2).T)
        rows = (cache[at][None] for cache in caches)
        out, lse = dense_truth(query[None], *rows, **options, **slopes)
        expected_out.append(out[0])
        expected_lse.append(lse[0])
    return torch.stack(expected_out), torch.stack(expected_lse)
