"""What the tests of the Hopper kernels share: bands, layouts that TMA reads, poisoned memory, and plans."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import HALF, Inputs, make_inputs, rand
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
SCORE_LAYOUTS = ("transposed", "every second column", "heads last", "off by one", "wide rows", "inside")


def poison_free_memory(device: str) -> None:
    """Fills what the caching allocator will hand out next with 0xFF, a NaN in every dtype."""
    blocks = [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in (1 << 20,) * 32 + (32 << 20,) * 4]
    del blocks


def inside_nan(tensor: Tensor) -> Tensor:
    """The same values in a buffer of NaN: a head and a row on either side, 16 bytes of columns on either side."""
    batch, heads, rows, cols = tensor.shape
    buffer = tensor.new_full((batch, heads + 2, rows + 2, cols + 16), torch.nan)
    return buffer[:, 1:-1, 1:-1, 8 : 8 + cols].copy_(tensor)


def assert_same_bits(got: tuple[Tensor, ...], expected: tuple[Tensor, ...], what: object) -> None:
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b), what


def random_layout(chance: random.Random, tensor: Tensor) -> Tensor:
    """One of the layouts that TMA reads, with the values of `tensor` [batch, heads, rows, cols]."""
    batch, heads, rows, cols = tensor.shape
    kind = chance.choice(["dense", "sequence first", "packed", "wide rows", "inside"])
    if kind == "sequence first":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "packed":
        buffer = tensor.new_full((batch, rows, 3, heads, cols), torch.nan)
        return buffer[:, :, chance.randrange(3)].transpose(1, 2).copy_(tensor)
    if kind == "wide rows":
        buffer = tensor.new_full((batch, heads, rows, cols + 8 * chance.randint(1, 3)), torch.nan)
        return buffer[..., :cols].copy_(tensor)
    return inside_nan(tensor) if kind == "inside" else tensor


def random_inputs(chance: random.Random, device: str) -> Inputs:
    """query, key and value of six query heads, of any shape, dtype and layout that both passes serve with scores."""
    batch, group, dtype = chance.randint(1, 3), chance.choice([1, 2, 3]), chance.choice(HALF)
    queries, keys = 65 + int(2 ** chance.uniform(0, 9)), 16 + int(2 ** chance.uniform(0, 10))
    head_dim = 8 * chance.randint(1, 16)
    shapes = (batch, 6, queries, head_dim), (batch, 6 // group, keys, head_dim)
    inputs = make_inputs(*shapes, dtype=dtype, device=device)
    return {name: random_layout(chance, tensor) for name, tensor in inputs.items()}


def random_options(chance: random.Random) -> dict[str, Any]:
    """A band, and sometimes a scale."""
    options: dict[str, Any] = {"align": chance.choice(["top_left", "bottom_right"])}
    if chance.random() < 0.4:
        options["causal"] = True
    if chance.random() < 0.3:
        options["window"] = tuple(chance.choice([None, chance.randint(0, 300)]) for _ in range(2))
    if chance.random() < 0.2:
        options["scale"] = 10 ** chance.uniform(-2, -0.5)
    return options


def sequence_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def wide_rows(tensor: Tensor) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, 8))[..., : tensor.shape[-1]]


LAYOUTS: list[Callable[[Tensor], Tensor]] = [sequence_first, wide_rows, inside_nan]


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


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values elsewhere; what lies around them is NaN, or False."""
    b, h, rows, cols = tensor.shape
    nothing = torch.nan if tensor.is_floating_point() else False
    if layout == "transposed":
        return tensor.mT.contiguous().mT
    if layout == "every second column":
        return tensor.new_full((b, h, rows, 2 * cols), nothing)[..., ::2].copy_(tensor)
    if layout == "heads last":
        return tensor.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    shift, pad = {"off by one": (1, 0), "wide rows": (0, 48), "inside": (3, 29)}[layout]
    buffer = tensor.new_full((b, h + 2, rows + 2, cols + shift + pad), nothing)
    return buffer[:, 1:-1, 1:-1, shift : shift + cols].copy_(tensor)


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
