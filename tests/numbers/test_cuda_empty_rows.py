"""Promise: rows of finfo.min, of -inf and without keys are right over many tiles, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import DTYPES, Inputs, check, make_inputs, name_of, rand
from torch import Tensor

import flash_ext

pytestmark = pytest.mark.gpu

B, H, L, S = 3, 2, 300, 300
PADDING = (0, 150, 299)  # keys on the left that hold no token, of each sequence
HEAD_DIMS = [32, 64, 128, 192]


def problem(dtype: torch.dtype, device: str, head_dim: int = 64, lengths: tuple[int, int] = (L, S)) -> Inputs:
    return make_inputs((B, H, lengths[0], head_dim), (B, H, lengths[1], head_dim), dtype=dtype, device=device)


def visible_tokens(device: str) -> Tensor:
    """Bool (B, 1, L, S): causal, without the padding on the left. The rows of the padding see nothing."""
    keys = torch.arange(S, device=device)
    real = keys >= torch.tensor(PADDING, device=device)[:, None]
    return (real[:, None, :] & (keys <= torch.arange(L, device=device)[:, None]))[:, None]


def check_finite(inputs: Inputs, **options: Any) -> dict[str, Tensor]:
    got = check(flash_ext.attention, inputs, options)
    assert all(tensor.isfinite().all() for name, tensor in got.items() if name != "lse")
    return got


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_left_padding_by_the_lowest_number(dtype: torch.dtype, head_dim: int, device: str, backend: str) -> None:
    """As transformers builds it: a padded row is full of finfo.min, so it is the mean of value."""
    inputs = problem(dtype, device, head_dim)
    lowest = torch.finfo(dtype).min
    bias = torch.zeros(B, 1, L, S, dtype=dtype, device=device).masked_fill(~visible_tokens(device), lowest)
    got = check_finite(inputs | {"bias": bias})
    if dtype != torch.float16:  # its lowest number keeps the differences of the scores
        mean = inputs["value"][2].double().mean(-2)
        torch.testing.assert_close(got["out"][2, :, 7].double(), mean, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("shape", [(B, 1, 1, S), (1, H, L, 1), (S,), (1, 1, L, S)], ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_lowest_numbers_in_whole_tiles(dtype: torch.dtype, shape: tuple[int, ...], device: str, backend: str) -> None:
    """Tiles full of finfo.min before, between and after ordinary ones; float32 biases of half types too."""
    for bias_dtype in (dtype,) if dtype.itemsize > 2 else (dtype, torch.float32):
        bias = rand(*shape, dtype=bias_dtype)
        lowest = torch.finfo(bias_dtype).min
        if shape[-1] == S:
            bias[..., :130] = lowest
            bias[..., 200:270] = lowest
        else:
            bias[..., 64:200, :] = lowest
        check_finite(problem(dtype, device) | {"bias": bias.to(device)})


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rows_of_minus_infinity(dtype: torch.dtype, head_dim: int, device: str, backend: str) -> None:
    """Bool mask and -inf alike: out 0, lse -inf, gradients 0 for rows without a token, the others untouched."""
    visible = visible_tokens(device)
    bias = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill(~visible, -torch.inf)
    for extra in ({"mask": visible}, {"bias": bias}, {"mask": visible, "bias": bias}):
        got = check_finite(problem(dtype, device, head_dim) | extra, return_lse=True)
        for sequence, padding in enumerate(PADDING):
            assert (got["out"][sequence, :, :padding] == 0).all()
            assert (got["lse"][sequence, :, :padding] == -torch.inf).all()
            assert (got["grad of query"][sequence, :, :padding] == 0).all()
            assert (got["grad of key"][sequence, :, :padding] == 0).all()
            assert (got["grad of value"][sequence, :, :padding] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_keys_that_come_late(dtype: torch.dtype, device: str, backend: str) -> None:
    """A row sees two keys, wherever they lie: tiles before, between and after them are all -inf.

    NOTE: with one key ds is 0 as a difference of two sums, which eager attention alone computes exactly.
    """
    rows = torch.arange(L, device=device)
    visible = torch.zeros(L, S, dtype=torch.bool, device=device)
    visible[rows, 7 * rows % S] = visible[rows, (7 * rows + 140) % S] = True
    visible[[5, 140, 299]] = False
    bias = torch.zeros(L, S, dtype=dtype, device=device).masked_fill(~visible, -torch.inf)
    for extra in ({"mask": visible}, {"bias": bias}):
        got = check_finite(problem(dtype, device) | extra, return_lse=True)
        assert (got["out"][:, :, [5, 140, 299]] == 0).all()


BANDS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "causal, more queries": ((330, 70), {"causal": True, "align": "bottom_right"}),
    "window past the keys": ((400, 90), {"window": (20, 20)}),
    "window before the keys": ((400, 90), {"window": (20, 5), "align": "bottom_right"}),
    "window of two": ((257, 257), {"window": (1, 0)}),
    "causal window, few queries": ((17, 300), {"causal": True, "window": (3, None), "align": "bottom_right"}),
    "top left, more keys": ((65, 513), {"causal": True}),
}


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rows_and_keys_outside_the_band(dtype: torch.dtype, band: str, device: str, backend: str) -> None:
    """Rows without keys and keys that nobody sees: whole tiles of either are zero, never NaN."""
    lengths, options = BANDS[band]
    inputs = problem(dtype, device, lengths=lengths)
    check_finite(inputs, return_lse=True, **options)
    inputs["bias"] = rand(1, H, *lengths, dtype=dtype, device=device)
    inputs["alibi_slopes"] = torch.rand(H).to(device)
    check_finite(inputs, return_lse=True, softcap=10.0, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_everything_is_masked(dtype: torch.dtype, device: str, backend: str) -> None:
    inputs = problem(dtype, device)
    nothing = torch.zeros(1, 1, 1, S, dtype=torch.bool, device=device)
    for extra in ({"mask": nothing}, {"bias": torch.full((S,), -torch.inf, dtype=dtype, device=device)}):
        got = check_finite(inputs | extra, return_lse=True, deterministic=True)
        assert all((tensor == 0).all() for name, tensor in got.items() if name != "lse")
        assert (got["lse"] == -torch.inf).all()


SINGLE_KEYS: dict[str, tuple[tuple[int, int], str, dict[str, Any]]] = {
    "one key": ((1000, 1), "column", {}),
    "a window of one key": ((300, 300), "column", {"causal": True, "window": (0, 0)}),
    "rows of one key": ((130, 200), "row and mask", {"window": (0, 63)}),
    "one key and a softcap": ((70, 1), "column", {"softcap": 15.0}),
}


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kind", SINGLE_KEYS)
def test_the_lowest_number_beside_a_single_key(
    kind: str, dtype: torch.dtype, head_dim: int, device: str, backend: str
) -> None:
    """P is 1 there, so the sum by which it is divided does not show that lse is far from 0."""
    lengths, what, options = SINGLE_KEYS[kind]
    inputs = problem(dtype, device, head_dim, lengths)
    for bias_dtype in (dtype,) if dtype.itemsize > 2 else (dtype, torch.float32):
        lowest = torch.finfo(bias_dtype).min
        if what == "column":
            inputs["bias"] = torch.full((lengths[0], 1), lowest, dtype=bias_dtype, device=device)
        else:
            row = torch.full((lengths[1],), lowest, dtype=bias_dtype, device=device)
            inputs["bias"] = row.expand(1, 1, *lengths)
            mask = torch.zeros(lengths, dtype=torch.bool)
            mask[torch.arange(lengths[0]), torch.arange(lengths[0])] = True  # one of those in the window
            mask[::3] = True
            inputs["mask"] = mask.to(device)
        call = options if "softcap" in options else options | {"return_lse": True}
        got = check_finite(inputs, **call)
        assert got["grad of value"].abs().max() > 0.1
