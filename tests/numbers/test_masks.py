"""Promise: masks of every broadcast shape are right, with gradients; finfo.min is a number; NaN shows."""

from __future__ import annotations

import pytest
import torch
from helpers import DTYPES, HALF, check, check_drop_in, evaluate, leaf, make_inputs, math_path, name_of, rand

import flash_ext

B, H, L, S = 2, 3, 11, 14
SHAPES = [
    (S,),
    (1,),
    (1, S),
    (L, 1),
    (L, S),
    (1, L, S),
    (H, 1, S),
    (H, L, 1),
    (H, L, S),
    (1, 1, 1, 1),
    (B, 1, 1, S),
    (B, 1, L, 1),
    (1, H, L, S),
    (B, 1, L, S),
    (B, H, 1, S),
    (B, H, L, S),
]


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_bool_mask(shape: tuple[int, ...], device: str, backend: str) -> None:
    inputs = make_inputs((B, H, L, 8), (B, H, S, 8), device=device)
    inputs["attn_mask"] = (torch.rand(shape) > 0.3).to(device)
    check_drop_in(inputs)


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_float_mask_and_its_gradient(dtype: torch.dtype, shape: tuple[int, ...], device: str, backend: str) -> None:
    """The gradient is summed over exactly the broadcast dims and has the mask's shape and dtype."""
    inputs = make_inputs((B, H, L, 8), (B, H, S, 8), dtype=dtype, device=device)
    inputs["bias"] = rand(*shape, dtype=dtype, device=device)
    got = check(flash_ext.attention, inputs)
    assert got["grad of bias"].shape == shape
    assert got["grad of bias"].dtype == dtype
    inputs["attn_mask"] = inputs.pop("bias")
    dropped_in = evaluate(flash_ext.scaled_dot_product_attention, inputs)
    assert torch.equal(dropped_in["grad of attn_mask"], got["grad of bias"])


@pytest.mark.parametrize("shape", [(S,), (L, 1), (B, 1, L, S), (1, H, 1, 1)], ids=name_of)
def test_mask_when_leading_dims_broadcast(shape: tuple[int, ...], device: str, backend: str) -> None:
    inputs = make_inputs((1, H, L, 8), (B, 1, S, 8), (B, H, S, 8), device=device)
    inputs["attn_mask"] = rand(*shape, device=device)
    # On AVX2, with scores of the very bits of eager's, 4.9 units; eager's error was luckily small in all 16 draws.
    check_drop_in(inputs, units=6.0 if backend == "chunked" else 0.0)


def test_mask_with_2d_inputs(device: str, backend: str) -> None:
    for shape in [(S,), (L, S), (1, S)]:
        inputs = make_inputs((L, 8), (S, 8), device=device)
        inputs["attn_mask"] = rand(*shape, device=device)
        check_drop_in(inputs)


def test_mask_with_5d_inputs(device: str, backend: str) -> None:
    for shape in [(2, 1, H, L, S), (3, 1, 1, S), (L, 1)]:
        inputs = make_inputs((2, 3, H, L, 8), (2, 3, H, S, 8), device=device)
        inputs["attn_mask"] = rand(*shape, device=device)
        check_drop_in(inputs)


def test_expanded_and_strided_masks(device: str, backend: str) -> None:
    """A mask is read through its strides, whatever they are."""
    inputs = make_inputs((B, H, L, 8), (B, H, S, 8), device=device)
    wide = rand(B, H, S, 2 * L, device=device)
    for mask in (
        rand(L, 1, device=device).expand(L, S),
        wide.mT[..., ::2, :],
        rand(1, 1, 1, S, device=device).expand(B, H, L, S),
        wide[..., :L].mT > 0,
        (rand(S, device=device) > 0).expand(B, H, L, S),
    ):
        inputs["attn_mask"] = mask
        check_drop_in(inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("mask_dtype", ["same", "float32"])
def test_finfo_min_is_an_ordinary_number(dtype: torch.dtype, mask_dtype: str, device: str, backend: str) -> None:
    """Left-padded models: a row full of finfo.min is the mean of value, partly filled ones ignore those keys."""
    inputs = make_inputs((B, H, L, 8), (B, H, S, 8), dtype=dtype, device=device)
    bias_dtype = dtype if mask_dtype == "same" else torch.float32
    if dtype == torch.float64:
        bias_dtype = torch.float64
    lowest = torch.finfo(bias_dtype).min
    bias = torch.zeros(L, S, dtype=bias_dtype)
    bias[0] = lowest
    bias[1, :5] = lowest
    bias[2, 1:] = lowest
    bias[3, ::2] = lowest
    bias[4] = lowest / 2
    inputs["bias"] = bias.to(device)
    got = check(flash_ext.attention, inputs)
    mean = inputs["value"].double().mean(-2)
    if bias_dtype != torch.float16:  # its lowest number is small enough to keep the scores' differences
        torch.testing.assert_close(got["out"][..., 0, :].double(), mean, atol=2e-2, rtol=2e-2)
    assert all(tensor.isfinite().all() for tensor in got.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rows_of_only_minus_infinity(dtype: torch.dtype, device: str, backend: str) -> None:
    """Output 0, lse -inf, gradients 0, for bool and float masks alike, and neighbours untouched."""
    base = make_inputs((B, H, L, 8), (B, H, S, 8), dtype=dtype, device=device)
    keep = torch.rand(B, 1, L, S) > 0.3
    keep[0, :, 3] = False
    keep[1, :, [0, L - 1]] = False
    bias = torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, -torch.inf)
    for extra in ({"mask": keep.to(device)}, {"bias": bias.to(device)}):
        got = check(flash_ext.attention, base | extra, {"return_lse": True})
        assert (got["out"][0, :, 3] == 0).all() and (got["lse"][0, :, 3] == -torch.inf).all()
        assert (got["grad of query"][1][:, [0, L - 1]] == 0).all()
        assert not any(tensor.isnan().any() for tensor in got.values())


def test_a_mask_that_removes_everything(device: str, backend: str) -> None:
    inputs = make_inputs((B, H, L, 8), (B, H, S, 8), device=device)
    for extra in (
        {"mask": torch.zeros(L, S, dtype=torch.bool, device=device)},
        {"mask": torch.zeros(1, dtype=torch.bool, device=device)},
        {"bias": torch.full((S,), -torch.inf, device=device)},
    ):
        got = check(flash_ext.attention, inputs | extra, {"return_lse": True})
        assert all((got[name] == 0).all() for name in got if name != "lse")


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF], ids=name_of)
def test_nan_and_plus_infinity_show(dtype: torch.dtype, special: float, device: str, backend: str) -> None:
    """NaN or +inf in a float mask gives what the math path gives, never hidden; other rows stay clean."""
    inputs = make_inputs((B, H, L, 8), (B, H, S, 8), dtype=dtype, device=device)
    mask = torch.zeros(L, S, dtype=dtype)
    mask[2, 5] = special
    mask[7, :] = special
    mask[4, :] = -torch.inf
    inputs["attn_mask"] = mask.to(device)
    got = flash_ext.scaled_dot_product_attention(**inputs)
    expected = math_path(**{name: t.double() for name, t in inputs.items()})
    assert torch.equal(got.isnan(), expected.isnan())
    assert got[..., [2, 7], :].isnan().all()
    assert not got[..., [0, 1, 3, 4, 5, 6, 8, 9, 10], :].isnan().any()


def test_nan_in_an_input_shows(device: str, backend: str) -> None:
    for name in ("query", "key", "value"):
        inputs = make_inputs((1, 1, 5, 8), (1, 1, 6, 8), device=device)
        inputs[name][0, 0, 2, 3] = torch.nan
        got = flash_ext.scaled_dot_product_attention(**inputs)
        assert torch.equal(got.isnan(), math_path(**inputs).isnan()), name


def test_gradient_of_a_mask_with_infinities(device: str, backend: str) -> None:
    """Where the mask removes a key its gradient is 0, not NaN."""
    inputs = make_inputs((B, H, L, 8), (B, H, S, 8), device=device)
    bias = rand(H, L, S).masked_fill(torch.rand(H, L, S) > 0.6, -torch.inf)
    inputs["bias"] = bias.to(device)
    got = check(flash_ext.attention, inputs)
    assert (got["grad of bias"][inputs["bias"] == -torch.inf] == 0).all()


def test_masks_that_want_no_gradient_get_none(device: str, backend: str) -> None:
    inputs = {name: leaf(t) for name, t in make_inputs((1, 1, 5, 8), (1, 1, 6, 8), device=device).items()}
    mask = rand(5, 6, device=device)
    flash_ext.scaled_dot_product_attention(**inputs, attn_mask=mask).sum().backward()
    assert mask.grad is None
    assert all(tensor.grad is not None for tensor in inputs.values())


def test_only_the_mask_wants_a_gradient(device: str, backend: str) -> None:
    inputs = make_inputs((B, H, L, 8), (B, H, S, 8), device=device)
    mask = rand(L, S, device=device).requires_grad_()
    (got,) = torch.autograd.grad(flash_ext.scaled_dot_product_attention(**inputs, attn_mask=mask).sin().sum(), mask)
    (expected,) = torch.autograd.grad(math_path(**inputs, attn_mask=mask).sin().sum(), mask)
    torch.testing.assert_close(got, expected)
