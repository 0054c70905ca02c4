"""Promise: every option of `attention` means what sdpa.md says, alone and with every other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers import DTYPES, HALF, check, evaluate, make_inputs, name_of, rand

import flash_ext
from flash_ext import reference

WINDOWS = [(None, None), (0, 0), (3, 0), (0, 3), (5, 2), (None, 2), (2, None), (100, 100), (None, 0)]


@pytest.mark.parametrize("length", [(12, 12), (7, 19), (19, 7)], ids=name_of)
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=name_of)
def test_bands(
    window: tuple[int | None, int | None],
    causal: bool,
    align: str,
    length: tuple[int, int],
    device: str,
    backend: str,
) -> None:
    """causal, window and alignment, with empty rows where the band leaves the keys."""
    inputs = make_inputs((1, 2, length[0], 8), (1, 2, length[1], 8), device=device)
    options = {"causal": causal, "window": window, "align": align, "return_lse": True}
    got = check(flash_ext.attention, inputs, options)
    band = reference.band_mask(*length, causal=causal, window=window, align=align)
    for i in range(length[0]):
        keys = [
            j
            for j in range(length[1])
            for offset in [length[1] - length[0] if align == "bottom_right" else 0]
            if (not causal or j <= i + offset)
            and (window[0] is None or j >= i + offset - window[0])
            and (window[1] is None or j <= i + offset + window[1])
        ]
        assert band[i].nonzero().flatten().tolist() == keys
        assert bool(got["lse"][0, 0, i] == -torch.inf) is (not keys)


@pytest.mark.parametrize("window", [(17, 0), (40, 33), (None, 5), (0, 64)], ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_bands_over_many_tiles(
    window: tuple[int | None, int | None], dtype: torch.dtype, device: str, backend: str
) -> None:
    inputs = make_inputs((1, 2, 200, 32), (1, 1, 260, 32), dtype=dtype, device=device)
    check(flash_ext.attention, inputs, {"window": window, "align": "bottom_right", "return_lse": True})


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0, 4000.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_softcap(dtype: torch.dtype, softcap: float, device: str, backend: str) -> None:
    inputs = make_inputs((1, 2, 40, 32), (1, 2, 50, 32), dtype=dtype, device=device, mean=0.5)
    check(flash_ext.attention, inputs, {"softcap": softcap, "return_lse": True})


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float16], ids=name_of)
def test_softcap_far_above_the_scores(dtype: torch.dtype, device: str, backend: str) -> None:
    """Eager attention in fp16 has NaN in its gradients there."""
    inputs = make_inputs((1, 2, 40, 32), (1, 2, 50, 32), dtype=dtype, device=device, mean=0.5)
    check(flash_ext.attention, inputs, {"softcap": 1e6, "return_lse": True})


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_softcap_of_infinite_scores(dtype: torch.dtype, device: str, backend: str) -> None:
    """Their derivative is 0. Lengths that no tile is a multiple of: 0 times infinity is NaN in what fills it up."""
    inputs = make_inputs((1, 2, 17, 16), (1, 2, 33, 16), dtype=dtype, device=device)
    inputs["key"][:, 1, 5, 3] = torch.inf
    got = evaluate(flash_ext.attention, inputs, {"softcap": 1.0})
    expected = evaluate(reference.attention, inputs, {"softcap": 1.0})
    if backend == "sm80" and dtype == torch.float32:  # three products of TF32 make NaN of gradients (numerics.md)
        expected = {"out": expected["out"]}
    for name, tensor in expected.items():
        assert torch.equal(got[name].isfinite(), tensor.isfinite()), name


@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=name_of)
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_alibi_with_gradient(dtype: torch.dtype, align: str, shape: tuple[int, ...], device: str, backend: str) -> None:
    inputs = make_inputs((2, 4, 21, 16), (2, 2, 34, 16), dtype=dtype, device=device)
    inputs["alibi_slopes"] = torch.rand(shape).to(device)
    got = check(flash_ext.attention, inputs, {"align": align, "causal": True, "return_lse": True})
    assert got["grad of alibi_slopes"].dtype == torch.float32
    assert got["grad of alibi_slopes"].shape == shape


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_alibi_of_either_sign(dtype: torch.dtype, head_dim: int, causal: bool, device: str, backend: str) -> None:
    """With a negative slope far keys count most; lengths that are no multiple of a tile, keys on both sides."""
    inputs = make_inputs((1, 3, 200, head_dim), (1, 3, 333, head_dim), dtype=dtype, device=device)
    slopes = torch.tensor([0.02, 0.7, -1.5], device=device)
    check(flash_ext.attention, inputs, {"alibi_slopes": slopes, "causal": causal, "return_lse": True})


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("keys", [2, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_alibi_of_keys_far_away(dtype: torch.dtype, keys: int, align: str, device: str, backend: str) -> None:
    """The distances of a row are nearly equal, and so what they are multiplied by all but cancels."""
    inputs = make_inputs((1, 4, 150, 64), (1, 2, keys, 64), dtype=dtype, device=device)
    inputs["alibi_slopes"] = torch.rand(4).to(device)
    check(flash_ext.attention, inputs, {"align": align, "return_lse": True})
    options = {"align": align, "return_lse": True, "scale": 0.0}  # P is nearly 1 / 2, which no type rounds
    check(flash_ext.attention, inputs, options)


def test_alibi_equals_its_bias(device: str, backend: str) -> None:
    """bias -slope * |i + offset - j|, also right of the diagonal."""
    q, k, v = make_inputs((1, 2, 6, 8), (1, 2, 10, 8), device=device).values()
    slopes = torch.tensor([0.25, 0.5], device=device)
    rows, cols = torch.arange(6, device=device)[:, None], torch.arange(10, device=device)
    bias = -slopes[:, None, None] * (rows + 4 - cols).abs()
    expected = flash_ext.attention(q, k, v, bias=bias)
    torch.testing.assert_close(flash_ext.attention(q, k, v, alibi_slopes=slopes, align="bottom_right"), expected)


def test_order_is_scale_softcap_bias_mask(device: str, backend: str) -> None:
    """A bias larger than the cap is not capped; scale comes before the cap."""
    q, k, v = make_inputs((1, 1, 3, 8), (1, 1, 4, 8), device=device).values()
    bias = rand(3, 4, device=device) * 20
    scores = 2.0 * torch.tanh(q @ k.mT * 0.7 / 2.0) + bias
    scores = scores.masked_fill(~torch.ones(3, 4, dtype=torch.bool, device=device).tril(), -torch.inf)
    expected = torch.softmax(scores, -1) @ v
    got = flash_ext.attention(q, k, v, bias=bias, softcap=2.0, scale=0.7, causal=True)
    torch.testing.assert_close(got, expected)


FLAGS = ("causal", "window", "softcap", "alibi", "bias", "mask", "gqa", "scale")


COMBINATIONS = list(itertools.product([False, True], repeat=len(FLAGS)))


@pytest.mark.parametrize("flags", COMBINATIONS, ids=lambda flags: "".join("01"[flag] for flag in flags))
def test_every_combination(flags: tuple[bool, ...], device: str, backend: str) -> None:
    """All 256 combinations of options, dtypes in turn."""
    on = dict(zip(FLAGS, flags, strict=True))
    index = sum(bit << i for i, bit in enumerate(flags))
    dtype = DTYPES[index % 3 if index % 7 else 3]
    keys = (2, 2, 25, 16) if on["gqa"] else (2, 4, 25, 16)
    inputs = make_inputs((2, 4, 19, 16), keys, dtype=dtype, device=device)
    options: dict[str, Any] = {"return_lse": True, "align": ("top_left", "bottom_right")[index % 2]}
    if on["causal"]:
        options["causal"] = True
    if on["window"]:
        options["window"] = (6, 4)
    if on["softcap"]:
        options["softcap"] = 3.0
    if on["scale"]:
        options["scale"] = 0.4
    if on["alibi"]:
        inputs["alibi_slopes"] = torch.rand(4).to(device)
    if on["bias"]:
        inputs["bias"] = rand(2, 1, 19, 25, dtype=dtype, device=device)
    if on["mask"]:
        inputs["mask"] = (torch.rand(4, 19, 25) > 0.3).to(device)
    check(flash_ext.attention, inputs, options)


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_float32_bias_with_half_inputs(dtype: torch.dtype, device: str, backend: str) -> None:
    inputs = make_inputs((1, 2, 20, 16), (1, 2, 30, 16), dtype=dtype, device=device)
    inputs["bias"] = rand(2, 20, 30, device=device)
    got = check(flash_ext.attention, inputs)
    assert got["grad of bias"].dtype == torch.float32
    assert got["out"].dtype == dtype


def test_native_call_defaults_to_plain_attention(device: str, backend: str) -> None:
    q, k, v = make_inputs((2, 4, 20, 16), (2, 4, 30, 16), device=device).values()
    native = flash_ext.attention(q, k, v)
    assert isinstance(native, torch.Tensor)
    assert torch.equal(native, flash_ext.scaled_dot_product_attention(q, k, v))


def test_causal_and_mask_combine(device: str, backend: str) -> None:
    """The native call takes both, where the drop-in refuses."""
    inputs = make_inputs((1, 2, 9, 8), (1, 2, 9, 8), device=device)
    mask = (torch.rand(9, 9) > 0.4).to(device)
    q, k, v = inputs.values()
    both = flash_ext.attention(q, k, v, causal=True, mask=mask)
    assert torch.equal(both, flash_ext.attention(q, k, v, mask=mask & torch.ones_like(mask).tril()))
