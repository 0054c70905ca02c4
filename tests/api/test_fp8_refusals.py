"""Promise: a gradient of e4m3 inputs is handed on in 16 bits or more or refused in one sentence, never rounded."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from helpers import rand

from flash_ext import AttentionError, attention, quantize_fp8, reference

Q = rand(1, 2, 20, 16)
BIAS = rand(20, 20)


def test_a_tangent_beside_inputs_that_want_a_gradient() -> None:
    small, descale = quantize_fp8(Q.clone().requires_grad_())
    with forward_ad.dual_level():
        bias = forward_ad.make_dual(BIAS, torch.ones_like(BIAS))
        with pytest.raises(AttentionError, match=r"^query is of .* and wants a gradient beside a tangent"):
            attention(small, small, small, bias=bias, q_descale=descale)
        fixed = small.detach()
        out = forward_ad.unpack_dual(attention(fixed, fixed, fixed, bias=bias)).tangent
        assert out is not None and out.isfinite().all()
        with pytest.raises(AttentionError, match=r"^q_descale wants a gradient"):
            attention(fixed, fixed, fixed, bias=bias, q_descale=torch.ones(2, requires_grad=True))


def test_third_derivatives() -> None:
    leaf = Q.clone().requires_grad_()
    small, descale = quantize_fp8(leaf)
    loss = attention(small, small, small, q_descale=descale).float().square().sum()
    (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="wants a gradient beside a third derivative"):
        torch.autograd.grad(grad.square().sum(), leaf, create_graph=True)


def test_other_dtypes_beside_e4m3() -> None:
    small, _ = quantize_fp8(Q.clone().requires_grad_())
    wide = Q.to(torch.bfloat16).requires_grad_() * 2
    with pytest.raises(AttentionError, match=r"are of torch\.float8_e4m3fn, torch\.bfloat16"):
        attention(small, wide, wide)


def test_other_dtypes_beside_e4m3_and_a_tangent() -> None:
    """An error, and nothing is written to what the caller has."""
    small, wide, bias = Q.to(torch.float8_e4m3fn), Q.to(torch.bfloat16), rand(Q.shape[-2], Q.shape[-2])
    before = wide.clone()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(bias, torch.ones_like(bias))
        with pytest.raises(AttentionError, match=r"are of torch\.float8_e4m3fn, torch\.bfloat16"):
            attention(small, wide, wide, bias=dual, k_descale=torch.tensor(2.0))
    assert torch.equal(wide, before)


def test_nested_tensors_that_want_a_gradient() -> None:
    rows = rand(8, 2, 16).to(torch.float8_e4m3fn)
    nested = torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 3, 8])).transpose(1, 2).requires_grad_()
    with pytest.raises(AttentionError, match=r"^query is a nested tensor of torch.float8_e4m3fn that wants a gradient"):
        attention(nested, nested, nested)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_rotation_is_not_rounded_under_autocast(dtype: torch.dtype) -> None:
    x = 1000 + rand(2, 3, 64)
    small, descale = quantize_fp8(x, hadamard=True)
    with torch.autocast("cpu", dtype=dtype):
        other, of_autocast = quantize_fp8(x, hadamard=True)
    assert torch.equal(descale, of_autocast) and torch.equal(small.float(), other.float())


@pytest.mark.parametrize("factor", [0.0, -1.0, 2.0**-149])
def test_descales_that_are_0_or_negative(factor: float, device: str, backend: str) -> None:
    q, k, v = (rand(2, 2, n, 64, device=device).to(torch.float8_e4m3fn) for n in (150, 300, 300))
    descale = torch.tensor([factor, 1.0], device=device)
    out, lse = attention(q, k, v, q_descale=descale, causal=True, return_lse=True)
    wide = (q.double() * descale.double()[:, None, None], k.double(), v.double())
    true, true_lse = reference.attention(*wide, causal=True, return_lse=True)
    assert (out - true).abs().max() < 0.05 * true.abs().max() and (lse - true_lse).abs().max() < 0.02
