"""What the tests of the Hopper kernels share: bands, scores, and plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Inputs, rand
from torch import Tensor

import flash_ext

BANDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "bottom right": {"causal": True, "align": "bottom_right"},
    "window": {"window": (100, 30), "align": "bottom_right"},
    "sliding": {"causal": True, "window": (77, 0)},
}

KINDS = ("bool", "bias", "float32", "both", "both float32")


def assert_same_bits(got: tuple[Tensor, ...], expected: tuple[Tensor, ...], what: object) -> None:
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b), what


def aligned(bias: Tensor) -> Tensor:
    """Its values in rows that start at multiples of 16 bytes, as sm90 wants them up to head dim 128."""
    cols = bias.shape[-1]
    return torch.nn.functional.pad(bias.contiguous(), (0, -cols % 8), value=torch.nan)[..., :cols]


def scores_of(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, mean: float = 0.0) -> Inputs:
    """`mask` and `bias` of that shape, whose rows all keep a key."""
    found: Inputs = {}
    if kind == "bool" or kind.startswith("both"):
        found["mask"] = torch.rand(shape) > 0.3
        found["mask"][..., 0] = True
    if kind != "bool":
        found["bias"] = rand(*shape, dtype=torch.float32 if "float32" in kind else dtype, mean=mean)
    return {name: tensor.to(device) for name, tensor in found.items()}


# Of tests that look at plans, which need no GPU and are made for an H200 where there is none.
PLANS_ALONE = [pytest.mark.kernels("sm90"), pytest.mark.no_gpu]


def explain(query: Tensor, key: Tensor, value: Tensor | None = None, **options: Any) -> flash_ext.Explanation:
    return flash_ext.explain(query, key, key if value is None else value, device="cuda", **options)


def half(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def wanting(
    *names: str, shape: tuple[int, ...] = (2, 4, 256, 64), dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    return {name: half(*shape, dtype=dtype).requires_grad_(name in names) for name in ("query", "key", "value")}
