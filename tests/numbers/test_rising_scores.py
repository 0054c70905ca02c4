"""Promise: scores that rise from tile to tile, by any amount, have the result that they have in any order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import DTYPES, check, make_inputs, name_of

import flash_ext

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "align": "bottom_right"},
    "window": {"causal": True, "align": "bottom_right", "window": (250, 0)},
}


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_it(dtype: torch.dtype, kind: str, head_dim: int, device: str, backend: str) -> None:
    """By 15 in all, which every type of P holds, by 120 and by more than float holds; forward alone, because
    gradients of such calls are ill-conditioned."""
    for rise in (15.0, 120.0, 900.0):
        inputs = make_inputs((1, 2, 300, head_dim), (1, 2, 700, head_dim), dtype=dtype, device=device)
        inputs["query"][..., 0] = 8
        inputs["key"][..., 0] = torch.linspace(rise, 0, 700, dtype=torch.float64).mul(head_dim**0.5 / 8).to(dtype)
        check(flash_ext.attention, inputs, KINDS[kind] | {"return_lse": True}, backward=False)
        packed = {name: x[0].transpose(0, 1).contiguous() for name, x in inputs.items()}
        ends = {
            f"cu_seqlens_{of}": torch.tensor([0, n], dtype=torch.int32, device=device)
            for of, n in (("q", 300), ("k", 700))
        }
        out = flash_ext.attention_varlen(**packed, **ends, max_q=300, max_k=700, **KINDS[kind])
        dense = flash_ext.attention(**inputs, **KINDS[kind])
        tolerance = 2 * torch.finfo(dtype).eps if dtype != torch.float64 else 1e-12
        torch.testing.assert_close(out.transpose(0, 1)[None], dense, atol=4 * tolerance, rtol=tolerance)
