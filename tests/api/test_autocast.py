"""Promise: autocast casts q, k and v, leaves float64 alone, and hands gradients back in the caller's dtypes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import leaf, make_inputs, name_of, rand
from torch import Tensor

import flash_ext

LOW = [torch.bfloat16, torch.float16]
CALLS: dict[str, Callable[..., Tensor]] = {
    "drop_in": flash_ext.scaled_dot_product_attention,
    "native": flash_ext.attention,
    "function": lambda q, k, v: flash_ext.FlashAttention.apply(q, k, v, False),
}


def inputs_of(dtype: torch.dtype, device: str) -> list[Tensor]:
    return [leaf(t) for t in make_inputs((2, 2, 12, 16), (2, 2, 15, 16), dtype=dtype, device=device).values()]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("low", LOW, ids=name_of)
def test_casts_and_gradients_come_back(low: torch.dtype, call: str, device: str, backend: str) -> None:
    inputs = inputs_of(torch.float32, device)
    with torch.autocast(device, dtype=low):
        out = CALLS[call](*inputs)
    assert out.dtype == low
    grads = torch.autograd.grad(out.float().sin().sum(), inputs)
    assert [grad.dtype for grad in grads] == [torch.float32] * 3

    cast = [leaf(t.to(low)) for t in inputs]
    expected = CALLS[call](*cast)
    assert torch.equal(out, expected)
    for grad, other in zip(grads, torch.autograd.grad(expected.float().sin().sum(), cast), strict=True):
        assert torch.equal(grad, other.float())


def test_same_dtype_as_pytorch(device: str, backend: str) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        inputs = inputs_of(dtype, device)
        with torch.autocast(device, dtype=torch.bfloat16):
            mine, theirs = flash_ext.scaled_dot_product_attention(*inputs), F.scaled_dot_product_attention(*inputs)
        assert mine.dtype == theirs.dtype, dtype


def test_mixed_dtypes_meet_in_the_autocast_dtype(device: str, backend: str) -> None:
    q, k, v = inputs_of(torch.float32, device)
    mixed = [q, leaf(k.bfloat16()), leaf(v.half())]
    with torch.autocast(device, dtype=torch.bfloat16):
        out = flash_ext.scaled_dot_product_attention(*mixed)
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out.sum(), mixed)
    assert [grad.dtype for grad in grads] == [torch.float32, torch.bfloat16, torch.float16]


def test_float64_is_left_alone(device: str, backend: str) -> None:
    inputs = inputs_of(torch.float64, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out, lse = flash_ext.attention(*inputs, return_lse=True)
    assert out.dtype == torch.float64 and lse.dtype == torch.float64
    assert torch.equal(out, flash_ext.attention(*inputs))


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
def test_masks_keep_float32_and_the_result_dtype(bias_dtype: torch.dtype, device: str, backend: str) -> None:
    """A float32 mask is not rounded; one of a third dtype is cast; the gradient has the mask's own dtype."""
    inputs = inputs_of(torch.float32, device)
    bias = leaf((rand(12, 15, device=device) * 3).to(bias_dtype))
    with torch.autocast(device, dtype=torch.bfloat16):
        out = flash_ext.scaled_dot_product_attention(*inputs, attn_mask=bias)
    kept = bias if bias_dtype != torch.float16 else bias.bfloat16()
    expected = flash_ext.scaled_dot_product_attention(*(t.bfloat16() for t in inputs), attn_mask=kept)
    assert torch.equal(out, expected)
    (grad,) = torch.autograd.grad(out.float().sin().sum(), bias)
    assert grad.dtype == bias_dtype and grad.abs().sum() > 0
    mask = torch.rand(12, 15, device=device) > 0.5
    with torch.autocast(device, dtype=torch.bfloat16):
        assert flash_ext.scaled_dot_product_attention(*inputs, attn_mask=mask).dtype == torch.bfloat16


def test_slopes_and_lse_stay_float32(device: str, backend: str) -> None:
    inputs = inputs_of(torch.float32, device)
    slopes = leaf(torch.rand(2).to(device))
    with torch.autocast(device, dtype=torch.bfloat16):
        out, lse = flash_ext.attention(*inputs, alibi_slopes=slopes, return_lse=True)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    expected, _ = flash_ext.attention(*(t.bfloat16() for t in inputs), alibi_slopes=slopes, return_lse=True)
    assert torch.equal(out, expected)
    (grad,) = torch.autograd.grad(out.sum() + lse.sum(), slopes)
    assert grad.dtype == torch.float32


def test_backward_inside_the_region_is_the_same(device: str, backend: str) -> None:
    """Backward runs with autocast off wherever it is called."""
    inputs = inputs_of(torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        inside = torch.autograd.grad(flash_ext.attention(*inputs).float().sin().sum(), inputs)
        out = flash_ext.attention(*inputs)
    outside = torch.autograd.grad(out.float().sin().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(inside, outside, strict=True))


def test_disabled_region_casts_nothing(device: str, backend: str) -> None:
    inputs = inputs_of(torch.float32, device)
    with torch.autocast(device, dtype=torch.bfloat16), torch.autocast(device, enabled=False):
        out = flash_ext.scaled_dot_product_attention(*inputs)
    assert out.dtype == torch.float32
    assert torch.equal(out, flash_ext.scaled_dot_product_attention(*inputs))


def test_dropout_reproduces_under_autocast(device: str, backend: str) -> None:
    inputs = inputs_of(torch.float32, device)
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        with torch.autocast(device, dtype=torch.bfloat16):
            out = flash_ext.scaled_dot_product_attention(*inputs, dropout_p=0.5)
        results.append((out, *torch.autograd.grad(out.float().sum(), inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
