"""Promise: FlashAttention is a readable Python autograd.Function over the two operators and saves five tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import DTYPES, check, leaf, make_inputs, name_of, rand
from torch import Tensor
from torch.func import grad, jacrev, jvp, vjp, vmap

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


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("whole", [False, True])
def test_compiles(whole: bool, compiler: str, device: str) -> None:
    torch._dynamo.reset()
    inputs = [leaf(t) for t in make_inputs((2, 9, 8), (2, 9, 8), device=device).values()]
    call = flash_ext.FlashAttention.apply if whole else lambda q, k, v, c: flash_ext.FlashAttention.apply(q, k, v, c)
    graph = torch.compile(call, backend=compiler, fullgraph=not whole)

    def compiled(*tensors: Tensor) -> Tensor:
        return graph(*tensors, True)

    torch.testing.assert_close(compiled(*inputs), flash_ext.FlashAttention.apply(*inputs, True))
    grads = torch.autograd.grad(compiled(*inputs).sin().sum(), inputs)
    expected = torch.autograd.grad(flash_ext.FlashAttention.apply(*inputs, True).sin().sum(), inputs)
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b)


# ---- torch.func -----------------------------------------------------------------------------------------------------


def qkv(device: str, *lead: int) -> list[Tensor]:
    return list(make_inputs((*lead, 2, 2, 5, 8), (*lead, 2, 1, 6, 8), dtype=torch.float64, device=device).values())


def grouped(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    if call is truth:
        return lambda *tensors: truth(*tensors, is_causal=True, enable_gqa=True)
    return lambda *tensors: call(*tensors, True)


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor], list[Tensor]], Any]] = {
    "grad": lambda f, x: grad(lambda *a: f(*a).sin().sum(), (0, 1, 2))(*x),
    "vjp": lambda f, x: vjp(f, *x)[1](f(*x).cos()),
    "jacrev": lambda f, x: jacrev(f, (0, 1, 2))(*x),
    "jacrev of jacrev": lambda f, x: jacrev(jacrev(lambda q: f(q, *x[1:]).sin().sum()))(x[0]),
    "one gradient": lambda f, x: grad(lambda k: f(x[0], k, x[2]).sin().sum())(x[1]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func(name: str, device: str) -> None:
    tensors = qkv(device)
    results = [TRANSFORMS[name](grouped(call), tensors) for call in (apply, truth)]
    torch.testing.assert_close(*results, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 1, 0), (2, 4, -1)])
def test_vmap(in_dims: tuple[int | None, ...], device: str) -> None:
    """Alone, of a gradient, and a gradient of it."""
    mapped = [
        x if d is None else torch.stack([x, x.sin(), x * 2]).movedim(0, d)
        for x, d in zip(qkv(device), in_dims, strict=True)
    ]
    results = []
    for call in (grouped(apply), grouped(truth)):

        def loss(*tensors: Tensor, call: Callable[..., Tensor] = call) -> Tensor:
            return call(*tensors).sin().sum()

        outside = grad(lambda *a, call=call: vmap(call, in_dims=in_dims)(*a).sin().sum(), (0, 1, 2))(*mapped)
        results.append((vmap(call, in_dims=in_dims)(*mapped), vmap(grad(loss), in_dims=in_dims)(*mapped), outside))
    torch.testing.assert_close(*results, atol=1e-10, rtol=1e-10)


def test_second_derivative(device: str) -> None:
    inputs = [leaf(t) for t in make_inputs((1, 4, 3), (1, 4, 3), dtype=torch.float64, device=device).values()]
    assert torch.autograd.gradgradcheck(lambda *a: flash_ext.FlashAttention.apply(*a, True), inputs)


def test_forward_mode_is_an_error_never_a_zero(device: str) -> None:
    tensors = tuple(qkv(device))
    with pytest.raises(NotImplementedError, match="jvp"):
        jvp(grouped(apply), tensors, tensors)


def test_autocast_casts_once(device: str) -> None:
    """Forward and backward read the same tensors; gradients come back in the caller's dtype."""
    inputs = [leaf(rand(1, 2, 9, 8, device=device)) for _ in "qkv"]
    with torch.autocast(device, dtype=torch.bfloat16):
        out = flash_ext.FlashAttention.apply(*inputs)
    saved = out.grad_fn.saved_tensors
    assert out.dtype == torch.bfloat16 and [t.dtype for t in saved] == [torch.bfloat16] * 4 + [torch.float32]
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(out.float().sum(), inputs))


def test_the_flag_is_a_bool() -> None:
    q = rand(2, 5, 8)
    with pytest.raises(TypeError, match="is_causal is of type int; it must be a bool"):
        flash_ext.FlashAttention.apply(q, q, q, 1)
