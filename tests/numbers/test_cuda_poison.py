"""Promise: nothing outside a tensor is read, and every element of a result is written, at every edge of a tile.

Inputs are interior slices of buffers of NaN: rows before and after, columns beyond the head dimension, other heads.
Memory that the allocator hands out (results, scratch) is NaN before a call writes it. Results obey the error rule.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import DTYPES, HALF, Inputs, check, make_inputs, name_of, rand
from torch import Tensor

import flash_ext

pytestmark = pytest.mark.gpu

LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257)
HEAD_DIMS = (1, 8, 33, 40, 64, 80, 96, 128, 160, 192, 256)
SMALL, LARGE = 1 << 20, 32 << 20  # bytes; torch keeps a pool for each


def poison_free_memory(device: str) -> None:
    """Fills what the caching allocator will hand out next with 0xFF, a NaN in every dtype."""
    blocks = [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in (SMALL,) * 32 + (LARGE,) * 4]
    del blocks


def interior(tensor: Tensor, pad: int) -> Tensor:
    """The same values inside a buffer of NaN: a head and a row on either side, `pad` columns on either side."""
    batch, heads, rows, cols = tensor.shape
    buffer = tensor.new_full((batch, heads + 2, rows + 2, cols + 2 * pad), torch.nan)
    return buffer[:, 1:-1, 1:-1, pad : pad + cols].copy_(tensor)


def poisoned_call(**arguments: Any) -> Any:
    poison_free_memory(str(arguments["query"].device))
    return flash_ext.attention(**arguments)


def check_poisoned(inputs: Inputs, options: dict[str, Any], pad: int) -> None:
    inside = {name: interior(t, pad) if name in ("query", "key", "value") else t for name, t in inputs.items()}
    # At head dim 1 eager attention's score is one product, rounded once; ours is a sum that was cut off (numerics.md).
    units = 4.0 if inputs["query"].shape[-1] == 1 and inputs["query"].dtype == torch.float32 else 0.0
    got = check(poisoned_call, inside, options | {"return_lse": True}, units=units)
    for name, tensor in got.items():
        assert not tensor.isnan().any(), name
        assert name == "lse" or tensor.isfinite().all(), name


def lengths_of(i: int) -> tuple[int, int]:
    """Queries and keys: every length as either, in other pairs."""
    return LENGTHS[i], LENGTHS[(5 * i + 3) % len(LENGTHS)]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_every_edge(dtype: torch.dtype, head_dim: int, device: str, backend: str) -> None:
    """Each length with each head dimension; another head_dim_v, grouped heads and causal by turns."""
    for i in range(len(LENGTHS)):
        queries, keys = lengths_of(i)
        head_dim_v = HEAD_DIMS[(HEAD_DIMS.index(head_dim) + i) % len(HEAD_DIMS)] if i % 2 else head_dim
        heads = (1, 2)[i % 2]
        shapes = (1, 2, queries, head_dim), (1, heads, keys, head_dim), (1, heads, keys, head_dim_v)
        inputs = make_inputs(*shapes, dtype=dtype, device=device)
        options = {"causal": True, "align": "bottom_right"} if i % 3 == 0 else {}
        # 16 bytes on either side keep the wide loads, an odd number of columns forbids them.
        check_poisoned(inputs, options, pad=16 // dtype.itemsize if i % 4 else 3)


@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_every_edge_with_every_feature(dtype: torch.dtype, head_dim: int, device: str, backend: str) -> None:
    """Bias, mask and slopes too, the first two as interior slices."""
    for i in range(len(LENGTHS)):
        queries, keys = lengths_of(i)
        shape = (2, 2, queries, head_dim), (2, 1, keys, head_dim)
        inputs = make_inputs(*shape, dtype=dtype, device=device)
        inputs["bias"] = interior(rand(1, 2, queries, keys, dtype=dtype, device=device), pad=(8, 1)[i % 2])
        inputs["mask"] = (torch.rand(2, 1, queries + 2, keys + 5) > 0.2).to(device)[:, :, 1:-1, 2:-3]
        inputs["alibi_slopes"] = torch.rand(2).to(device)
        window = (None, (100, 0), (20, 140))[i % 3]
        check_poisoned(inputs, {"window": window, "softcap": (0.0, 12.0)[i % 2], "align": "bottom_right"}, pad=8)


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_columns_beyond_the_head_dim(dtype: torch.dtype, device: str, backend: str) -> None:
    """Heads packed side by side, as a projection leaves them: the next columns belong to NaN heads."""
    for head_dim in HEAD_DIMS:
        inputs = {}
        for name, length in {"query": 130, "key": 70, "value": 70}.items():
            packed = torch.full((2, length, 3, 5, head_dim), torch.nan, dtype=dtype, device=device)
            mine = packed[:, :, 1, 1:4:2].transpose(1, 2)
            inputs[name] = mine.copy_(rand(2, 2, length, head_dim, dtype=dtype, device=device))
        check(poisoned_call, inputs, {"causal": True})


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_grad_out_inside_nan(dtype: torch.dtype, device: str, backend: str) -> None:
    """The gradient that arrives is an interior slice as well: gradients are those of a dense one, bit for bit."""
    for head_dim, queries, keys in [(33, 129, 65), (64, 65, 257), (96, 257, 127), (128, 15, 129)]:
        inputs = make_inputs((2, 3, queries, head_dim), (2, 3, keys, head_dim), dtype=dtype, device=device)
        leaves = [tensor.requires_grad_() for tensor in inputs.values()]
        grad = rand(2, 3, queries, head_dim, dtype=dtype, device=device)
        out = flash_ext.attention(*leaves, deterministic=True)
        expected = torch.autograd.grad(out, leaves, grad, retain_graph=True)
        for pad in (8, 3):
            poison_free_memory(device)
            got = torch.autograd.grad(out, leaves, interior(grad, pad), retain_graph=True)
            for a, b in zip(got, expected, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_inputs_stay_as_they_were(dtype: torch.dtype, device: str, backend: str) -> None:
    """Neither an input nor the NaN around it is written."""
    for head_dim, queries, keys in [(33, 129, 65), (64, 257, 255), (128, 17, 129)]:
        inputs = make_inputs((1, 2, queries, head_dim), (1, 2, keys, head_dim), dtype=dtype, device=device)
        inside = {name: interior(tensor, 8) for name, tensor in inputs.items()}
        buffers = [tensor._base for tensor in inside.values()]
        before = [buffer.view(torch.uint8).clone() for buffer in buffers]
        out = flash_ext.attention(**{name: t.detach().requires_grad_() for name, t in inside.items()})
        out.sum().backward()
        for buffer, bytes_before in zip(buffers, before, strict=True):
            assert torch.equal(buffer.view(torch.uint8), bytes_before)
