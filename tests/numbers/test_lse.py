"""Promise: lse is the natural log-sum-exp, differentiable, and partial results join exactly through it."""

from __future__ import annotations

import pytest
import torch
from helpers import DTYPES, check, evaluate, leaf, make_inputs, name_of, rand
from torch import Tensor

import flash_ext
from flash_ext import reference


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_dtype_shape_and_value(dtype: torch.dtype, device: str, backend: str) -> None:
    q, k, v = make_inputs((2, 4, 33, 16), (2, 2, 50, 16), dtype=dtype, device=device).values()
    out, lse = flash_ext.attention(q, k, v, return_lse=True)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert lse.shape == (2, 4, 33) and lse.is_contiguous()
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT / 4
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
    assert torch.equal(out, flash_ext.attention(q, k, v))


@pytest.mark.parametrize("which", ["lse", "out"])
def test_gradient_of_one_output_alone(which: str, device: str, backend: str) -> None:
    """An undefined gradient of the other output is a zero, not an error."""
    inputs = {name: leaf(t) for name, t in make_inputs((1, 2, 9, 8), (1, 2, 12, 8), device=device).items()}
    inputs["bias"] = leaf(rand(9, 12, device=device))
    wanted = list(inputs.values())

    def gradients(call: object) -> tuple[Tensor | None, ...]:
        out, lse = call(**inputs, causal=True, return_lse=True)  # type: ignore[operator]
        return torch.autograd.grad((lse if which == "lse" else out).sin().sum(), wanted, allow_unused=True)

    for got, expected, name in zip(gradients(flash_ext.attention), gradients(reference.attention), inputs, strict=True):
        if expected is None:
            assert got is None or (got == 0).all()
        else:
            assert got is not None, name
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("keys", [1, 3, 40, 130])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_gradient_of_lse_alone_knows_no_value(dtype: torch.dtype, keys: int, device: str, backend: str) -> None:
    inputs = make_inputs((1, 2, 33, 16), (1, 2, keys, 16), dtype=dtype, device=device)
    inputs["bias"] = rand(33, 1, dtype=dtype, device=device)

    def gradients(value: float) -> tuple[Tensor, ...]:
        leaves = {name: leaf(tensor) for name, tensor in inputs.items()}
        leaves["value"] = torch.full_like(inputs["value"], value)
        lse = flash_ext.attention(**leaves, return_lse=True, deterministic=True)[1]
        return torch.autograd.grad(lse.sin().sum(), [leaves[name] for name in ("query", "key", "bias")])

    for got, expected in zip(gradients(torch.nan), gradients(0.0), strict=True):
        torch.testing.assert_close(got, expected, atol=0, rtol=0)


def test_lse_gradient_is_zero_on_empty_rows(device: str, backend: str) -> None:
    inputs = make_inputs((1, 2, 9, 8), (1, 2, 4, 8), device=device)
    got = check(flash_ext.attention, inputs, {"causal": True, "align": "bottom_right", "return_lse": True})
    assert (got["lse"][..., :5] == -torch.inf).all() and got["lse"][..., 5:].isfinite().all()
    assert (got["grad of query"][..., :5, :] == 0).all()


def test_lse_ignores_dropout(device: str, backend: str) -> None:
    q, k, v = make_inputs((1, 2, 9, 8), (1, 2, 12, 8), device=device).values()
    _, plain = flash_ext.attention(q, k, v, return_lse=True)
    _, dropped = flash_ext.attention(q, k, v, dropout_p=0.5, return_lse=True)
    torch.testing.assert_close(plain, dropped)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_merging_parts_gives_the_whole(dtype: torch.dtype, device: str, backend: str) -> None:
    """Attention over two halves of the keys, merged: outputs and gradients within the rule of the whole."""
    inputs = make_inputs((2, 2, 20, 16), (2, 2, 37, 16), dtype=dtype, device=device)

    def merged(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        first = flash_ext.attention(query, key[:, :, :13], value[:, :, :13], return_lse=True)
        rest = flash_ext.attention(query, key[:, :, 13:], value[:, :, 13:], return_lse=True)
        return flash_ext.merge_attention(*first, *rest)

    def whole(query: Tensor, key: Tensor, value: Tensor, **options: bool) -> object:
        return reference.attention(query, key, value, return_lse=True, **options)

    def eager(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        half = dtype.itemsize == 2
        first = reference.attention(query, key[:, :, :13], value[:, :, :13], return_lse=True, rounded=half)
        rest = reference.attention(query, key[:, :, 13:], value[:, :, 13:], return_lse=True, rounded=half)
        return reference.merge_attention(*first, *rest)

    check(merged, inputs, truth=whole, eager=eager)


def test_merge_is_differentiable_in_everything(device: str) -> None:
    parts = (rand(2, 3, 4, dtype=torch.float64), rand(2, 3, dtype=torch.float64)) * 2
    leaves = [leaf(part.clone().to(device)) for part in parts]
    assert torch.autograd.gradcheck(flash_ext.merge_attention, leaves)
    for got, expected in zip(flash_ext.merge_attention(*leaves), reference.merge_attention(*leaves), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("pattern", ["a", "b", "both"])
def test_merge_with_empty_rows(pattern: str, device: str) -> None:
    """One side -inf returns the other exactly; both give 0 and -inf with gradients 0, never NaN."""
    inputs = {
        "out_a": rand(2, 3, 4, device=device),
        "lse_a": rand(2, 3, device=device),
        "out_b": rand(2, 3, 4, device=device),
        "lse_b": rand(2, 3, device=device),
    }
    for side in "ab":
        if pattern in (side, "both"):
            inputs[f"out_{side}"][:, 1] = 0
            inputs[f"lse_{side}"][:, 1] = -torch.inf
    got = evaluate(flash_ext.merge_attention, inputs, backward=False)
    out, lse = got["out"][:, 1], got["lse"][:, 1]
    if pattern == "both":
        assert (out == 0).all() and (lse == -torch.inf).all()
    else:
        other = "b" if pattern == "a" else "a"
        assert torch.equal(out, inputs[f"out_{other}"][:, 1]) and torch.equal(lse, inputs[f"lse_{other}"][:, 1])
    leaves = [leaf(tensor) for tensor in inputs.values()]
    out, lse = flash_ext.merge_attention(*leaves)
    finite = lse.isfinite()
    grads = torch.autograd.grad(out.sum() + lse[finite].sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)
    if pattern == "both":
        assert all((grad[:, 1] == 0).all() for grad in grads)
