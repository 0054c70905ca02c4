"""``python -m flash_ext.profiling plan``: the plan of a call of given sizes, as text and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from flash_ext.errors import AttentionError
from flash_ext.explain import explain


class PlanError(RuntimeError):
    """Why there is no plan."""


def main(
    queries: int = 4096,
    keys: int | None = None,
    batch: int = 1,
    heads: int = 32,
    key_heads: int | None = None,
    head_dim: int = 128,
    dtype: Literal["float16", "bfloat16", "float32", "float64"] = "bfloat16",
    device: Literal["cpu", "cuda"] = "cpu",
    causal: bool = False,
    window: tuple[int, int] | None = None,
    align: Literal["top_left", "bottom_right"] = "top_left",
    html: Path | None = None,
) -> None:
    """Shows what a call of attention runs, and why. Nothing is computed; the device need not be there.

    Args:
        queries: of a head
        keys: of a head; as many as queries by default
        batch: elements
        heads: of query
        key_heads: of key and value; as many as heads by default
        head_dim: numbers of a query, key or value
        dtype: of the tensors
        device: whose plan
        causal: a query sees no later key
        window: keys to the left and to the right that a query sees
        align: where positions count from
        html: FILE.html, to draw the plan there, too

    Raises:
        PlanError: the call itself would be wrong.
    """
    query = torch.empty(batch, heads, queries, head_dim, dtype=getattr(torch, dtype), device="meta")
    key = query.new_empty(batch, key_heads or heads, queries if keys is None else keys, head_dim)
    try:
        plan = explain(query, key, key, causal=causal, window=window, align=align, device=device)
    except AttentionError as error:
        raise PlanError(error) from error
    print(plan)
    if html:
        plan.show(html)
