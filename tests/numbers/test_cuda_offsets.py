"""Promise: offsets are computed in 64 bits, and no size of a grid limits batch, heads or lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import DTYPES, HALF, check, evaluate, make_inputs, name_of, rand
from torch import Tensor

import flash_ext

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("gpu memory")]  # one at a time

GIB = 1 << 30
FAR = 2**31 + 64  # elements
ROWS = 140  # rows of FAR_ROW elements reach beyond 2**32 elements
FAR_ROW = 2**25 + 64


def require_memory(size: int) -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < size:
        pytest.skip(f"needs {size / GIB:.0f} GiB of GPU memory, {free / GIB:.0f} are free")


@pytest.fixture
def buffer(device: str) -> Iterator[Tensor]:
    """9 GiB of NaN in bytes; a view of any dtype is taken from it."""
    require_memory(12 * GIB)
    yield torch.full((ROWS * FAR_ROW * 2,), 255, dtype=torch.uint8, device=device)
    torch.cuda.empty_cache()


# (batch, heads, rows) strides of tensors (2, 2, rows, 64) that lie beside each other, in elements
STRIDES = {
    "batch": (FAR, 64 * 128 * 8, 64),
    "head": (64 * 128 * 8, FAR, 64),
    "row": (256, 128, FAR_ROW),
}


@pytest.mark.parametrize("option", ["causal", "general"])
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("far", STRIDES)
def test_strides_over_two_to_the_31(
    far: str, dtype: torch.dtype, option: str, buffer: Tensor, device: str, backend: str
) -> None:
    """q, k, v and grad_out as views of one buffer of NaN: the results are the bits of contiguous inputs."""
    memory, lengths = buffer.view(dtype), {"query": ROWS, "key": ROWS - 9, "value": ROWS - 9, "grad": ROWS}
    step = 512 if far == "row" else 64 * 160
    small = {name: rand(2, 2, length, 64, dtype=dtype, device=device) for name, length in lengths.items()}
    views = {
        name: memory.as_strided(tensor.shape, (*STRIDES[far], 1), step * i).copy_(tensor)
        for i, (name, tensor) in enumerate(small.items())
    }
    options: dict[str, Any] = {"causal": True, "deterministic": True}
    if option == "general":
        options |= {"softcap": 10.0, "alibi_slopes": torch.rand(2).to(device), "window": (50, None)}

    def step_of(tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        q, k, v = (tensors[name].detach().requires_grad_() for name in ("query", "key", "value"))
        out = flash_ext.attention(q, k, v, **options)
        return out, *torch.autograd.grad(out, (q, k, v), tensors["grad"])

    for got, expected in zip(step_of(views), step_of(small), strict=True):
        assert expected.isfinite().all()
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
def test_strides_over_two_to_the_31_bytes(dtype: torch.dtype, buffer: Tensor, device: str, backend: str) -> None:
    memory, far = buffer.view(dtype), buffer.numel() // dtype.itemsize // 2 - 4096
    inputs = make_inputs((2, 1, 100, 32), (2, 1, 90, 32), dtype=dtype, device=device)
    views = {
        name: memory.as_strided(tensor.shape, (far, 32, 32, 1), 32 * 128 * i).copy_(tensor)
        for i, (name, tensor) in enumerate(inputs.items())
    }
    options = {"causal": True, "deterministic": True, "return_lse": True}
    got = evaluate(flash_ext.attention, views, options)
    for name, expected in evaluate(flash_ext.attention, inputs, options).items():
        assert torch.equal(got[name], expected), name


@pytest.mark.parametrize("kind", ["bias", "mask"])
def test_far_strides_of_a_mask(kind: str, buffer: Tensor, device: str, backend: str) -> None:
    """Rows of a bias or mask that lie gigabytes apart; the gradient is dense."""
    inputs = make_inputs((2, 2, ROWS, 64), (2, 2, 150, 64), dtype=torch.bfloat16, device=device)
    small = rand(1, 2, ROWS, 150, dtype=torch.bfloat16, device=device)
    small = small > -0.5 if kind == "mask" else small
    memory = buffer.view(small.dtype)
    far = memory.as_strided(small.shape, (0, 1024, FAR_ROW, 1)).copy_(small)
    got = evaluate(flash_ext.attention, inputs | {kind: far}, {"deterministic": True})
    for name, expected in evaluate(flash_ext.attention, inputs | {kind: small}, {"deterministic": True}).items():
        assert torch.equal(got[name], expected), name


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_results_of_more_than_two_to_the_31_elements(dtype: torch.dtype, device: str, backend: str) -> None:
    """B * H = 65,600 heads of 513 x 64: the last heads equal a call of their own, and so do heads in between."""
    require_memory(60 * GIB)
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (1025, 64, 513, 64)
    inputs = [torch.randn(shape, dtype=dtype, device=device, generator=generator).requires_grad_() for _ in range(3)]
    grad = torch.randn(shape, dtype=dtype, device=device, generator=generator)
    out = flash_ext.attention(*inputs, causal=True, deterministic=True)
    got = [out.detach(), *torch.autograd.grad(out, inputs, grad)]
    for i in (0, 511, 512, 1024):
        # Eight times, so that there are enough tiles for their keys not to be split over blocks.
        part = [tensor.detach()[i : i + 1].repeat(8, 1, 1, 1).requires_grad_() for tensor in inputs]
        expected = flash_ext.attention(*part, causal=True, deterministic=True)
        grads = torch.autograd.grad(expected, part, grad[i : i + 1].repeat(8, 1, 1, 1))
        for whole, own in zip(got, [expected, *grads], strict=True):
            assert torch.equal(whole[i : i + 1], own[5:6])
    del inputs, grad, out, got
    torch.cuda.empty_cache()


@pytest.mark.parametrize("batch_heads", [(70_001, 1), (1, 70_001), (700, 101)], ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_more_heads_than_65535(dtype: torch.dtype, batch_heads: tuple[int, int], device: str, backend: str) -> None:
    """Every head is right, with a bias and dropout of its own and slopes summed over the batch."""
    batch, heads = batch_heads
    inputs = make_inputs((batch, heads, 5, 8), (batch, heads, 7, 8), dtype=dtype, device=device)
    inputs["bias"] = rand(batch, heads, 1, 7, dtype=dtype, device=device)
    inputs["alibi_slopes"] = torch.rand(heads).to(device)
    check(flash_ext.attention, inputs, {"causal": True, "return_lse": True})

    state, p = torch.tensor([5, 6], device=device), 0.5
    query, key = torch.zeros_like(inputs["query"]), torch.zeros_like(inputs["key"])
    value = torch.eye(7, 8, dtype=dtype, device=device).expand(batch, heads, 7, 8)
    out, _ = torch.ops.flash_ext.attention_with_rng_state(query, key, value, state, dropout_p=p)
    keep = torch.ops.flash_ext.dropout_mask(state, p, batch * heads, 5, 7)
    assert torch.equal(out[..., :7] > 0, keep.view(batch, heads, 5, 7))


@pytest.mark.parametrize("lengths", [(4_300_001, 5), (5, 4_300_001)], ids=name_of)
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_more_tiles_than_65535(dtype: torch.dtype, lengths: tuple[int, int], device: str, backend: str) -> None:
    inputs = make_inputs((1, 1, lengths[0], 8), (1, 1, lengths[1], 8), dtype=dtype, device=device)
    check(flash_ext.attention, inputs)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_sums_over_very_many_queries(softcap: float, device: str, backend: str) -> None:
    """dk and dv of four query heads of a key head, whose value heads differ in size: fp16 scales dS anew for each."""
    inputs = make_inputs((1, 4, 300_001, 40), (1, 1, 7, 40), (1, 2, 7, 40), dtype=torch.float16, device=device)
    inputs["value"][:, 1] *= 64
    check(flash_ext.attention, inputs, {"softcap": softcap})


def test_groups_of_many_heads(device: str, backend: str) -> None:
    """70,000 query heads over 7 key heads: the sums of dk and dv over a group."""
    inputs = make_inputs((1, 70_000, 3, 16), (1, 7, 4, 16), dtype=torch.bfloat16, device=device)
    check(flash_ext.attention, inputs)
