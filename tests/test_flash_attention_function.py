"""Promise: FlashAttention is a readable Python autograd.Function over the two operators and saves five tensors."""

from __future__ import annotations

import pytest
import torch
from helpers import DTYPES, check, leaf, make_inputs, name_of
from torch import Tensor

import flash_ext
from flash_ext import reference


def apply(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    return flash_ext.FlashAttention.apply(query, key, value, is_causal)


def truth(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, **options: bool) -> Tensor:
    return reference.scaled_dot_product_attention(query, key, value, is_causal=is_causal, **options)


@pytest.mark.parametrize("lead", [(3,), (2, 3)], ids=["BND", "BHND"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rule(dtype: torch.dtype, is_causal: bool, lead: tuple[int, ...], device: str, backend: str) -> None:
    inputs = make_inputs((*lead, 33, 16), (*lead, 40, 16), dtype=dtype, device=device, mean=0.5)
    check(apply, inputs, {"is_causal": is_causal}, truth=truth)


def test_it_is_a_python_function() -> None:
    assert issubclass(flash_ext.FlashAttention, torch.autograd.Function)


@pytest.mark.parametrize("lead", [(3,), (2, 3)], ids=["BND", "BHND"])
def test_saves_exactly_five_tensors(lead: tuple[int, ...], device: str, backend: str) -> None:
    """q, k, v, out and lse, whose shape is q's without the last dim."""
    q, k, v = (leaf(t) for t in make_inputs((*lead, 9, 8), (*lead, 9, 8), device=device).values())
    out = flash_ext.FlashAttention.apply(q, k, v)
    saved = out.grad_fn.saved_tensors
    assert len(saved) == 5
    assert {t.data_ptr() for t in (q, k, v, out)} <= {t.data_ptr() for t in saved}
    lse = [t for t in saved if t.shape == q.shape[:-1]]
    assert len(lse) == 1 and lse[0].dtype == torch.float32
    torch.testing.assert_close(lse[0], (q @ k.mT / 8**0.5).logsumexp(-1))


def test_causal_is_positional_and_optional(device: str, backend: str) -> None:
    q, k, v = make_inputs((2, 9, 8), (2, 9, 8), device=device).values()
    assert torch.equal(flash_ext.FlashAttention.apply(q, k, v), flash_ext.FlashAttention.apply(q, k, v, False))
    expected = flash_ext.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(flash_ext.FlashAttention.apply(q, k, v, True), expected)


def test_gradients_equal_the_operators(device: str, backend: str) -> None:
    inputs = [leaf(t) for t in make_inputs((2, 3, 20, 16), (2, 3, 20, 16), device=device).values()]
    mine = torch.autograd.grad(flash_ext.FlashAttention.apply(*inputs, True).sin().sum(), inputs)
    theirs = torch.autograd.grad(flash_ext.attention(*inputs, causal=True).sin().sum(), inputs)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_compiles(device: str) -> None:
    torch._dynamo.reset()
    inputs = [leaf(t) for t in make_inputs((2, 9, 8), (2, 9, 8), device=device).values()]
    compiled = torch.compile(lambda q, k, v: flash_ext.FlashAttention.apply(q, k, v, True), backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), flash_ext.FlashAttention.apply(*inputs, True))
    grads = torch.autograd.grad(compiled(*inputs).sin().sum(), inputs)
    expected = torch.autograd.grad(flash_ext.FlashAttention.apply(*inputs, True).sin().sum(), inputs)
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b)
