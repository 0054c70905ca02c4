"""Calls of `attention_with_cache`: how one is made, and what it means, by a loop over sequences and rows in float64.

Every row of a cache that no sequence has is NaN, as whatever a program leaves there may be.
"""

from __future__ import annotations

from typing import Any

import torch
from helpers import rand
from packed import Heads
from torch import Tensor

from flash_ext import reference

FP8 = torch.float8_e4m3fn
HEADS = Heads(4, 2, 2, 16, 8)
ROWS = 48  # that a sequence has room for


def ints(values: Any, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def example(
    queries: int = 1, added: int | None = None, lengths: tuple[int, ...] = (5, 0, 30), page: int = 0,
    index: tuple[int, ...] | None = None, rotary: int = 0, fp8: bool = False, slopes: bool = False,
    sinks: bool = False, heads: Heads = HEADS, rows: int = ROWS, dtype: torch.dtype = torch.float64,
    device: str = "cpu", **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of a call. index: of `slots`, two more than there are sequences."""
    batch, slots = len(lengths), len(lengths) + 2 if index else len(lengths)
    columns = -(-rows // page) if page else 0
    shape = (2 + batch * columns, page) if page else (slots, rows)
    call: dict[str, Any] = {"query": rand(batch, queries, heads.q, heads.dim, dtype=dtype, device=device)}
    for name, cols in (("key_cache", heads.dim), ("value_cache", heads.dim_v)):
        call[name] = torch.full((*shape, heads.k, cols), torch.nan, dtype=dtype, device=device)
    if page:
        order = torch.randperm(shape[0])[: batch * columns].view(batch, columns)
        call["block_table"] = order.to(device, torch.int32)
    if index:
        call["cache_batch_index"] = ints(index, device)
    for b, length in enumerate(lengths):
        for name in ("key_cache", "value_cache") if length else ():
            where = [
                torch.tensor(x, device=device) for x in zip(*(place(call, b, i) for i in range(length)), strict=True)
            ]
            call[name][tuple(where)] = rand(length, *call[name].shape[2:], dtype=dtype, device=device)
    if added is not None:
        call |= {"key": rand(batch, added, heads.k, heads.dim, dtype=dtype, device=device)}
        call |= {"value": rand(batch, added, heads.k, heads.dim_v, dtype=dtype, device=device)}
    if rotary:
        angles = torch.rand(rows, rotary // 2, device=device) * 6
        call |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    if fp8:
        for name, scale in (("key_cache", "k_descale"), ("value_cache", "v_descale")):
            call[name] = call[name].to(FP8)
            call[scale] = torch.rand(batch, heads.k, device=device) + 0.5
    if slopes:
        call["alibi_slopes"] = torch.rand(batch, heads.q, device=device)
    if sinks:
        call["sinks"] = rand(heads.q, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=device)
    return call | {"cache_seqlens": ints(lengths, device)} | options


def place(call: dict[str, Any], b: int, row: int) -> tuple[int, int]:
    if "block_table" in call:
        page = call["key_cache"].shape[1]
        return int(call["block_table"][b, row // page]), row % page
    return int(call["cache_batch_index"][b]) if "cache_batch_index" in call else b, row


def turned(x: Tensor, cos: Tensor, sin: Tensor, positions: list[int], interleaved: bool) -> Tensor:
    """x (rows, heads, cols) in float64, column by column; positions beyond the tables are the last one."""
    result, half = x.clone(), cos.shape[1]
    for row, position in enumerate(min(p, len(cos) - 1) for p in positions):
        for c in range(half):
            i, j = (2 * c, 2 * c + 1) if interleaved else (c, c + half)
            result[row, :, i] = x[row, :, i] * cos[position, c] - x[row, :, j] * sin[position, c]
            result[row, :, j] = x[row, :, i] * sin[position, c] + x[row, :, j] * cos[position, c]
    return result


def _wide(call: dict[str, Any]) -> dict[str, Any]:
    on_cpu = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in call.items()}
    is_number = lambda x: isinstance(x, Tensor) and x.is_floating_point()  # noqa: E731
    return {name: x.double() if is_number(x) else x for name, x in on_cpu.items()}


def _scales(wide: dict[str, Any], b: int) -> list[Tensor]:
    one = torch.ones(len(wide["query"]), wide["key_cache"].shape[2], dtype=torch.float64)
    return [wide.get(name, one)[b][:, None] for name in ("k_descale", "v_descale")]


def appended(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Both caches behind a call, as numbers that are not yet scaled."""
    wide, dtype = _wide(call), call["key_cache"].dtype
    caches = wide["key_cache"].clone(), wide["value_cache"].clone()
    for b, length in enumerate(call["cache_seqlens"].tolist() if "key" in call else ()):
        key, value = wide["key"][b], wide["value"][b]
        if "rotary_cos" in call:
            at = [length + i for i in range(len(key))]
            key = turned(key, wide["rotary_cos"], wide["rotary_sin"], at, call.get("rotary_interleaved", False))
        for i in range(len(key)):
            slot, row = place(wide, b, length + i)
            for cache, x, scale in zip(caches, (key[i], value[i]), _scales(wide, b), strict=True):
                x = (x / scale).clamp(-448, 448) if dtype == FP8 else x
                cache[slot, row] = x.to(dtype).double()
    return caches


def attended(call: dict[str, Any], k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of a call that has left these caches, in float64."""
    wide, outs, lses = _wide(call), [], []
    options = {name: call[name] for name in ("causal", "window", "softcap", "scale") if name in call}
    options["causal"] = options.get("causal", True)
    moves = options["causal"] or any(edge is not None for edge in options.get("window") or ())
    for b, length in enumerate(call["cache_seqlens"].tolist()):
        query, total = wide["query"][b], length + (call["key"].shape[1] if "key" in call else 0)
        if "rotary_cos" in call:
            at = [length + i * moves for i in range(len(query))]
            query = turned(query, wide["rotary_cos"], wide["rotary_sin"], at, call.get("rotary_interleaved", False))
        rows = [place(wide, b, row) for row in range(total)]
        k, v = (
            torch.stack([cache[at] * s for at in rows]) if rows else cache[0, :0]
            for cache, s in zip((k_cache, v_cache), _scales(wide, b), strict=True)
        )
        slopes = wide.get("alibi_slopes")
        out, lse = reference.attention(
            *(x.transpose(0, 1)[None] for x in (query, k, v)), **options, align="bottom_right", return_lse=True,
            alibi_slopes=None if slopes is None else slopes[b], sinks=wide.get("sinks"),
        )  # fmt: skip
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.stack(outs), torch.stack(lses)


def plain(call: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, lse and both caches."""
    caches = appended(call)
    return *attended(call, *caches), *caches
