"""Promise: the Hopper forward reads bool masks and float biases of every broadcast and dtype, alone and together, over
many tiles, and treats what is infinite, huge or not a number as eager attention does."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from helpers import HALF, Inputs, check, make_inputs, name_of
from layouts import poison_free_memory
from sm90_helpers import BANDS, KINDS, aligned, assert_same_bits, scores_of
from torch import Tensor

import flash_ext

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

HEAD_DIMS = (64, 96, 128, 192, 256)
B, H, L, S = 2, 4, 150, 203


def poisoned_call(**arguments: Any) -> Any:
    poison_free_memory("cuda")
    with flash_ext.use_backend("sm90"):
        return flash_ext.attention(**arguments)


def check_forward(inputs: Inputs, options: dict[str, Any] | None = None) -> dict[str, Tensor]:
    got = check(poisoned_call, inputs, (options or {}) | {"return_lse": True}, backward=False)
    for name, tensor in got.items():
        assert not tensor.isnan().any(), name
    return got


def forward(inputs: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    with flash_ext.use_backend("sm90"):
        return flash_ext.attention(**inputs, return_lse=True, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_broadcast(head_dim: int, kind: str, device: str) -> None:
    for i, shape in enumerate(product((1, B), (1, H), (1, L), (1, S))):
        dtype, band = HALF[i % 2], list(BANDS.values())[i % len(BANDS)]
        inputs = make_inputs((B, H, L, head_dim), (B, 2, S, head_dim), dtype=dtype, device=device)
        scores = scores_of(kind, shape, dtype, device)
        if head_dim <= 128 and "bias" in scores and shape[3] > 1:
            scores["bias"] = aligned(scores["bias"])
        if head_dim > 128 or shape[2] == 1 or shape[3] > 1 or kind == "bool":  # else sm80's: columns repeat
            check_forward(inputs | scores, band)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_many_tiles(head_dim: int, kind: str, device: str) -> None:
    """More tiles than multiprocessors, in turn and by a counter, and every head as in a call of its own."""
    for length, options in ((768, {}), (777, {}), (777, {"causal": True})):
        inputs = make_inputs((4, 20, length, head_dim), (4, 10, length, head_dim), dtype=HALF[0], device=device)
        inputs |= scores_of(kind, (1, 20, length, length), HALF[0], device)
        if "bias" in inputs:
            inputs["bias"] = aligned(inputs["bias"])
        assert flash_ext.explain(**inputs, **options).forward.kernel == "sm90.forward.scored"
        whole = forward(inputs, **options)
        for b, h in ((0, 0), (1, 13), (3, 19)):
            alone = {name: inputs[name][b : b + 1, h // 2 : h // 2 + 1] for name in ("key", "value")}
            alone["query"] = inputs["query"][b : b + 1, h : h + 1]
            alone |= {name: inputs[name][:, h : h + 1] for name in ("mask", "bias") if name in inputs}
            got = forward(alone, **options)
            assert_same_bits((whole[0][b, h], whole[1][b, h]), (got[0][0, 0], got[1][0, 0]), (length, b, h))


@pytest.mark.parametrize("kind", ["bool", "bias", "float32"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rows_without_keys(head_dim: int, kind: str, device: str) -> None:
    """By False or by -inf, with and without a band that leaves some rows nothing: 0 and -inf."""
    keep = torch.rand(2, 1, 300, 500, device=device) > 0.5
    keep[0, :, [0, 70, 299]] = False
    keep[1, :, 64:192] = False
    keep[:, :, 200, :490] = False
    for dtype in HALF:
        inputs = make_inputs((2, 3, 300, head_dim), (2, 3, 500, head_dim), dtype=dtype, device=device)
        if kind == "bool":
            inputs["mask"] = keep
        else:
            zeros = torch.zeros(keep.shape, dtype=torch.float32 if kind == "float32" else dtype, device=device)
            inputs["bias"] = aligned(zeros.masked_fill(~keep, -torch.inf))
        for options in ({}, {"window": (40, 10)}):
            got = check_forward(inputs, options)
            assert (got["out"][0, :, 70] == 0).all() and (got["lse"][1, :, 64:192] == -torch.inf).all()


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("bias_dtype", ["same", "float32"])
def test_finfo_min_is_an_ordinary_number(dtype: torch.dtype, bias_dtype: str, device: str) -> None:
    """A row full of it is the mean of value, on every tile; one that has another number ignores it."""
    wide = torch.float32 if bias_dtype == "float32" else dtype
    lowest = torch.finfo(wide).min
    for head_dim in HEAD_DIMS:
        inputs = make_inputs((1, 2, 200, head_dim), (1, 2, 400, head_dim), dtype=dtype, device=device)
        bias = torch.zeros(200, 400, dtype=wide)
        bias[0] = lowest
        bias[1, :300] = lowest
        bias[2, 1:] = lowest
        bias[3, ::2] = lowest
        bias[150, 50:] = lowest
        bias[4] = lowest / 2
        bias[5, :390] = lowest
        bias[5, 390:] = lowest / 2
        got = check_forward(inputs | {"bias": bias.to(device)})
        if wide != torch.float16:  # its lowest number is small enough to keep the scores' differences
            mean = inputs["value"].double().mean(-2)
            torch.testing.assert_close(got["out"][..., 0, :].double(), mean, atol=1e-2, rtol=1e-2)
            last = inputs["value"][..., 390:, :].double().mean(-2)
            torch.testing.assert_close(got["out"][..., 5, :].double(), last, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("special", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_nan_and_plus_infinity_show(dtype: torch.dtype, special: float, device: str) -> None:
    """In their own rows only, whichever tile they are in; a key that the mask removes hides its number."""
    for head_dim, wide in product(HEAD_DIMS, (dtype, torch.float32)):
        inputs = make_inputs((1, 2, 200, head_dim), (1, 2, 400, head_dim), dtype=dtype, device=device)
        bias = torch.zeros(200, 400, dtype=wide)
        bias[2, 5] = special
        bias[70, 399] = special
        bias[130] = special
        bias[131] = -torch.inf
        bias[140, 250] = special
        mask = torch.ones(200, 400, dtype=torch.bool)
        mask[140, 250] = False
        out, lse = forward(inputs | {"bias": bias.to(device), "mask": mask.to(device)})
        for row in range(200):
            bad = row in (2, 70, 130)
            assert out[:, :, row].isnan().all() if bad else out[:, :, row].isfinite().all(), row
            assert not (bad and lse[:, :, row].isfinite().any()), row
        assert (out[:, :, 131] == 0).all()


def test_who_computes_the_gradient_of_a_bias(device: str) -> None:
    """With a mask or in float sm80: that alone or, where the bias has an element for each score, all gradients."""
    for kind, whole in product(KINDS, (True, False)):
        inputs = make_inputs((2, 4, 150, 64), (2, 2, 208, 64), dtype=HALF[0], device=device)
        inputs |= scores_of(kind, (2, 4 if whole else 1, 150, 208), HALF[0], device)
        leaves = {name: t.requires_grad_(t.is_floating_point()) for name, t in inputs.items()}
        plan = flash_ext.explain(**leaves)
        assert (plan.forward.backend, plan.backward.backend) == (
            "sm90",
            "sm80" if whole and kind not in ("bool", "bias") else "sm90",
        )
        beside = {"bool": "", "bias": ", sm90.bias_gradient"}.get(kind, ", sm80.bias_gradient")
        assert plan.backward.backend == "sm80" or plan.backward.kernel == "sm90.backward.scored" + beside
        check(flash_ext.attention, inputs, {"return_lse": True})
