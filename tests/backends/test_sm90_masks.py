"""Promise: the Hopper kernels read bool masks and float biases of every broadcast and dtype, alone and together, over
many tiles, treat what is infinite, huge or not a number as eager attention does, and give rows without keys, finfo.min
and loss scales the gradients that they are due. The gradient of a bias itself: test_sm90_bias_gradient.py."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from helpers import HALF, check, leaf, make_inputs, name_of
from sm90_calls import BOTH, HEAD_DIMS, added_of, attention, check_passes, gradients, of_head
from sm90_helpers import BANDS, KINDS, aligned, assert_same_bits, scores_of

import flash_ext

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

B, H, L, S = 2, 4, 150, 203
HEADS = ((0, 0), (1, 13), (3, 19))  # of many


def passes_of(head_dim: int, *features: str) -> tuple[str, ...]:
    """Both where backward has that head dim."""
    return features if head_dim in BOTH else (*features, "forward alone")


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
            check_passes(inputs, scores, band, features=passes_of(head_dim, "lse"))


@pytest.mark.parametrize("kind", KINDS[2:])
@pytest.mark.parametrize("head_dim", BOTH)
def test_the_gradient_of_every_broadcast(head_dim: int, kind: str, device: str) -> None:
    """Of a bias in float or beside a mask; in fp16 and bf16, under bands, with grouped heads and lse's own gradient."""
    for i, shape in enumerate(product((1, B), (1, H), (1, L), (1, 208))):
        if shape == (B, H, L, 208) or (shape[2] > 1 and shape[3] == 1):  # sm80's
            continue
        dtype, band = HALF[i % 2], list(BANDS.values())[i % len(BANDS)]
        inputs = make_inputs((B, H, L, head_dim), (B, 2, 208, head_dim), dtype=dtype, device=device)
        inputs |= scores_of(kind, shape, dtype, device)
        check(attention, inputs, band | {"return_lse": True})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_many_tiles(head_dim: int, kind: str, device: str) -> None:
    """More tiles than multiprocessors, in turn and by a counter, and every head as in a call of its own."""
    for length, options in ((768, {}), (777, {}), (777, {"causal": True})):
        inputs = make_inputs((4, 20, length, head_dim), (4, 10, length, head_dim), dtype=HALF[0], device=device)
        inputs |= added_of(kind, (1, 20, length, length), HALF[0], device)
        assert flash_ext.explain(**inputs, **options).forward.kernel == "sm90.forward.scored"
        out, lse = attention(**inputs, return_lse=True, **options)
        for b, h in HEADS:
            got = attention(**of_head(inputs, b, h, group=2), return_lse=True, **options)
            assert_same_bits((out[b, h], lse[b, h]), (got[0][0, 0], got[1][0, 0]), (length, b, h))


@pytest.mark.parametrize("kind", [*KINDS, "slopes", "bool and slopes", "bias and slopes"])
@pytest.mark.parametrize("head_dim", BOTH)
def test_gradients_of_many_tiles(head_dim: int, kind: str, device: str) -> None:
    """A block each and walked; dq is added up in any order."""
    for options in ({}, {"causal": True}):
        inputs = make_inputs((4, 20, 777, head_dim), (4, 20, 777, head_dim), dtype=HALF[0], device=device)
        inputs |= added_of(kind, (1, 20, 777, 777), HALF[0], device)
        grad = torch.randn(4, 20, 777, head_dim, device=device, dtype=HALF[0])
        out, dq, dk, dv = gradients(inputs, grad, **options)
        for b, h in HEADS:
            got = [t[0, 0] for t in gradients(of_head(inputs, b, h), grad[b : b + 1, h : h + 1], **options)]
            assert_same_bits((got[0], *got[2:]), (out[b, h], dk[b, h], dv[b, h]), (b, h))
            torch.testing.assert_close(got[1], dq[b, h], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["bool", "bias", "float32"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rows_without_keys(head_dim: int, kind: str, device: str) -> None:
    """By False or by -inf, with and without a band that leaves some rows nothing: 0 and -inf, and a dq of 0; so dk and
    dv of keys that nobody sees."""
    keep = torch.rand(2, 1, 300, 500, device=device) > 0.5
    keep[0, :, [0, 70, 299]] = False
    keep[1, :, 64:192] = False
    keep[:, :, 200, :490] = False
    keep[..., 130:260] = False
    for dtype, options in product(HALF, ({}, {"window": (40, 10)})):
        inputs = make_inputs((2, 3, 300, head_dim), (2, 3, 500, head_dim), dtype=dtype, device=device)
        scores = {"mask": keep}
        if kind != "bool":
            zeros = torch.zeros(keep.shape, dtype=torch.float32 if kind == "float32" else dtype, device=device)
            scores = {"bias": aligned(zeros.masked_fill(~keep, -torch.inf))}
        got = check_passes(inputs, scores, options, features=passes_of(head_dim, "lse"))
        assert (got["out"][0, :, 70] == 0).all() and (got["lse"][1, :, 64:192] == -torch.inf).all()
        if head_dim in BOTH:
            assert (got["grad of query"][0, :, 70] == 0).all() and (got["grad of query"][1, :, 64:192] == 0).all()
            assert all((got[f"grad of {name}"][:, :, 130:260] == 0).all() for name in ("key", "value"))


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("bias_dtype", ["same", "float32"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_finfo_min_is_an_ordinary_number(head_dim: int, bias_dtype: str, dtype: torch.dtype, device: str) -> None:
    """A row full of it is the mean of value, on every tile; one that has another number ignores it. Its lse, a float,
    does not say how many keys there are. Nor does that of the truth, a double, whose own gradient is left out
    therefore."""
    wide = torch.float32 if bias_dtype == "float32" else dtype
    lowest = torch.finfo(wide).min
    bias = torch.zeros(200, 400, dtype=wide)
    bias[0] = lowest
    bias[1, :300] = lowest
    bias[2, 1:] = lowest
    bias[3, ::2] = lowest
    bias[4] = lowest / 2
    bias[5, :390] = lowest
    bias[5, 390:] = lowest / 2
    bias[150, 50:] = lowest
    inputs = make_inputs((1, 2, 200, head_dim), (1, 2, 400, head_dim), dtype=dtype, device=device)
    got = check_passes(inputs, {"bias": bias.to(device)}, {}, features=("lse", "forward alone"))
    if wide != torch.float16:  # its lowest number is small enough to keep the scores' differences
        mean = inputs["value"].double().mean(-2)
        torch.testing.assert_close(got["out"][..., 0, :].double(), mean, atol=1e-2, rtol=1e-2)
        last = inputs["value"][..., 390:, :].double().mean(-2)
        torch.testing.assert_close(got["out"][..., 5, :].double(), last, atol=1e-2, rtol=1e-2)
    bias[70] = 40000
    bias[130:140] = lowest
    mask = torch.rand(1, 1, 200, 400) > 0.3
    mask[..., 0] = True
    for added, options in (({}, {}), ({}, {"causal": True, "align": "bottom_right"}), ({"mask": mask.to(device)}, {})):
        inputs = make_inputs((1, 2, 200, head_dim), (1, 1, 400, head_dim), dtype=dtype, device=device)
        check_passes(inputs, added | {"bias": bias.to(device)}, options, features=passes_of(head_dim))


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
        out, lse = attention(**inputs, bias=bias.to(device), mask=mask.to(device), return_lse=True)
        for row in range(200):
            bad = row in (2, 70, 130)
            assert out[:, :, row].isnan().all() if bad else out[:, :, row].isfinite().all(), row
            assert not (bad and lse[:, :, row].isfinite().any()), row
        assert (out[:, :, 131] == 0).all()


@pytest.mark.parametrize(("dtype", "wide"), [(HALF[0], HALF[0]), *((dtype, torch.float32) for dtype in HALF)])
@pytest.mark.parametrize("head_dim", BOTH)
def test_a_row_of_finfo_min_is_one_of_zeros(head_dim: int, dtype: torch.dtype, wide: torch.dtype, device: str) -> None:
    """Where it is too large for scores to change it: the dq of such rows and all of dv are those of queries of 0."""
    rows = [0, 5, 63, 64, *range(130, 140), 199]
    inputs = make_inputs((1, 2, 200, head_dim), (1, 1, 400, head_dim), dtype=dtype, device=device)
    grad = torch.randn(1, 2, 200, head_dim, device=device, dtype=dtype)
    bias = torch.randn(200, 400, device=device).to(wide)
    bias[rows] = torch.finfo(wide).min
    _, dq, _, dv = gradients(inputs | {"bias": bias}, grad, causal=True, align="bottom_right")
    bias[rows] = 0
    inputs["query"][:, :, rows] = 0
    _, dq_of_zeros, _, dv_of_zeros = gradients(inputs | {"bias": bias}, grad, causal=True, align="bottom_right")
    torch.testing.assert_close(dq[:, :, rows], dq_of_zeros[:, :, rows], rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(dv, dv_of_zeros, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["bias", "both"])
@pytest.mark.parametrize("loss_scale", [65536.0, 2.0**-8])
@pytest.mark.parametrize("head_dim", BOTH)
def test_loss_scales(head_dim: int, loss_scale: float, kind: str, device: str) -> None:
    """Gradients of fp16 follow a power of two, as long as they are representable."""
    inputs = make_inputs((1, 2, 300, head_dim), (1, 2, 400, head_dim), dtype=torch.float16, device=device)
    inputs |= scores_of(kind, (1, 2, 300, 400), torch.float16, device)
    grad = torch.randn(1, 2, 300, head_dim, device=device) / 64
    plain = gradients(inputs, grad.half())[1:]
    scaled = gradients(inputs, (grad.half().float() * loss_scale).half())[1:]
    for a, b in zip(scaled, plain, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a.float() / loss_scale, b.float(), rtol=2e-2, atol=2e-3 * float(b.abs().max()))


def test_who_computes_the_gradient_of_a_bias(device: str) -> None:
    """With a mask or in float sm80: that alone or, where the bias has an element for each score, all gradients."""
    for kind, whole in product(KINDS, (True, False)):
        inputs = make_inputs((2, 4, 150, 64), (2, 2, 208, 64), dtype=HALF[0], device=device)
        inputs |= scores_of(kind, (2, 4 if whole else 1, 150, 208), HALF[0], device)
        plan = flash_ext.explain(**{name: leaf(tensor) for name, tensor in inputs.items()})
        assert (plan.forward.backend, plan.backward.backend) == (
            "sm90",
            "sm80" if whole and kind not in ("bool", "bias") else "sm90",
        )
        beside = {"bool": "", "bias": ", sm90.bias_gradient"}.get(kind, ", sm80.bias_gradient")
        assert plan.backward.backend == "sm80" or plan.backward.kernel == "sm90.backward.scored" + beside
        check(flash_ext.attention, inputs, {"return_lse": True})
