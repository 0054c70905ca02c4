"""Promise: the Hopper backward reads the bool masks and float biases that its forward reads, of every broadcast and
dtype, obeys the error rule with them, and gives rows without keys, finfo.min and loss scales what they are due. The
gradient of a bias itself: test_sm90_bias_gradient.py."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from helpers import HALF, Inputs, check, leaf, make_inputs, name_of
from layouts import interior, poison_free_memory
from sm90_helpers import BANDS, KINDS, aligned, assert_same_bits, scores_of
from torch import Tensor

import flash_ext
from flash_ext import reference

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

HEAD_DIMS = (64, 96, 128)
B, H, L, S = 2, 4, 150, 203


def attention(**arguments: Any) -> Any:
    """Forward and, as the graph keeps the name, backward are sm90's or an error."""
    with flash_ext.use_backend("sm90"):
        return flash_ext.attention(**arguments)


def check_gradients(
    inputs: Inputs, scores: Inputs, options: dict[str, Any] | None = None, return_lse: bool = True
) -> dict[str, Tensor]:
    """Of query, key and value, and with lse's own gradient or without, with free memory full of NaN before both
    passes."""

    def call(**arguments: Any) -> Any:
        poison_free_memory("cuda")
        returned = attention(**arguments, **scores)
        out = returned[0] if return_lse else returned

        def arrives(grad: Tensor) -> Tensor:
            grad = interior(grad)
            poison_free_memory("cuda")
            return grad

        out.register_hook(arrives)
        return returned

    def truth(**arguments: Any) -> Any:
        is_wide = arguments["query"].dtype == torch.float64
        wide = {name: t.double() if is_wide and t.is_floating_point() else t for name, t in scores.items()}
        return reference.attention(**arguments, **wide)

    got = check(call, inputs, (options or {}) | {"return_lse": return_lse}, truth=truth)
    for name, tensor in got.items():
        assert not tensor.isnan().any(), name
    return got


def read_by_sm90(scores: Inputs) -> Inputs:
    """A bias of several rows in rows that start at multiples of 16 bytes."""
    if "bias" in scores and scores["bias"].shape[2] > 1:
        scores["bias"] = aligned(scores["bias"])
    return scores


def gradients(inputs: Inputs, grad: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """(dq, dk, dv)"""
    leaves = {name: leaf(inputs[name]) for name in ("query", "key", "value")}
    return torch.autograd.grad(attention(**(inputs | leaves), **options), list(leaves.values()), grad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_broadcast(head_dim: int, kind: str, device: str) -> None:
    for i, shape in enumerate(product((1, B), (1, H), (1, L), (1, S))):
        dtype, band = HALF[i % 2], list(BANDS.values())[i % len(BANDS)]
        inputs = make_inputs((B, H, L, head_dim), (B, 2, S, head_dim), dtype=dtype, device=device)
        scores = scores_of(kind, shape, dtype, device)
        if "bias" in scores and shape[3] > 1:
            scores["bias"] = aligned(scores["bias"])
        if shape[2] == 1 or shape[3] > 1 or kind == "bool":  # else sm80's: columns repeat
            check_gradients(inputs, scores, band)


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_gradient_of_every_broadcast(head_dim: int, kind: str, device: str) -> None:
    """Of a bias; in fp16 and bf16, under bands, with grouped heads and lse's own gradient."""
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
    """More tiles than multiprocessors, a block each and walked, and every head as in a call of its own."""
    for options in ({}, {"causal": True}):
        inputs = make_inputs((4, 20, 777, head_dim), (4, 20, 777, head_dim), dtype=HALF[0], device=device)
        scores = read_by_sm90(scores_of(kind, (1, 20, 777, 777), HALF[0], device))
        grad = torch.randn(4, 20, 777, head_dim, device=device, dtype=HALF[0])
        whole = gradients(inputs | scores, grad, **options)
        for b, h in ((0, 0), (1, 13), (3, 19)):
            alone = {name: tensor[b : b + 1, h : h + 1] for name, tensor in inputs.items()}
            alone |= {name: tensor[:, h : h + 1] for name, tensor in scores.items()}
            got = gradients(alone, grad[b : b + 1, h : h + 1], **options)
            assert_same_bits(tuple(t[0, 0] for t in got[1:]), tuple(t[b, h] for t in whole[1:]), (b, h))
            torch.testing.assert_close(got[0][0, 0], whole[0][b, h], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["bool", "both"])
@pytest.mark.parametrize("heads", [(4, 2), (8, 1), (6, 3)], ids=name_of)
def test_grouped_heads(heads: tuple[int, int], kind: str, device: str) -> None:
    for head_dim, (i, band) in product((64, 128), enumerate(BANDS.values())):
        shapes = (2, heads[0], 300, head_dim), (2, heads[1], 200, head_dim)
        inputs = make_inputs(*shapes, dtype=HALF[i % 2], device=device)
        check_gradients(inputs, read_by_sm90(scores_of(kind, (2, heads[0], 300, 200), HALF[i % 2], device)), band)


@pytest.mark.parametrize("kind", ["bool", "bias", "float32"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rows_without_keys(head_dim: int, kind: str, device: str) -> None:
    """By False or by -inf, with and without a band that leaves some rows nothing: a dq of 0; so dk and dv of keys that
    nobody sees."""
    keep = torch.rand(2, 1, 300, 500, device=device) > 0.5
    keep[0, :, [0, 70, 299]] = False
    keep[1, :, 64:192] = False
    keep[:, :, 200, :490] = False
    keep[..., 130:260] = False
    for dtype in HALF:
        inputs = make_inputs((2, 3, 300, head_dim), (2, 3, 500, head_dim), dtype=dtype, device=device)
        if kind == "bool":
            scores = {"mask": keep}
        else:
            zeros = torch.zeros(keep.shape, dtype=torch.float32 if kind == "float32" else dtype, device=device)
            scores = {"bias": aligned(zeros.masked_fill(~keep, -torch.inf))}
        for options in ({}, {"window": (40, 10)}):
            got = check_gradients(inputs, scores, options)
            assert (got["grad of query"][0, :, 70] == 0).all() and (got["grad of query"][1, :, 64:192] == 0).all()
            assert all((got[f"grad of {name}"][:, :, 130:260] == 0).all() for name in ("key", "value"))


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("bias_dtype", ["same", "float32"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_finfo_min_is_an_ordinary_number(head_dim: int, bias_dtype: str, dtype: torch.dtype, device: str) -> None:
    """A row full of it sees every key alike; its lse, a float, does not say how many there are. Nor does that of the
    truth, a double, whose own gradient is left out therefore."""
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
    bias[70] = 40000
    bias[130:140] = lowest
    bias[150, 50:] = lowest
    mask = torch.rand(1, 1, 200, 400) > 0.3
    mask[..., 0] = True
    for options in ({}, {"causal": True, "align": "bottom_right"}, {"mask": mask}):
        inputs = make_inputs((1, 2, 200, head_dim), (1, 1, 400, head_dim), dtype=dtype, device=device)
        scores = {"bias": bias.to(device)} | {name: t.to(device) for name, t in options.items() if name == "mask"}
        check_gradients(inputs, scores, {name: value for name, value in options.items() if name != "mask"}, False)


@pytest.mark.parametrize(("dtype", "wide"), [(HALF[0], HALF[0]), *((dtype, torch.float32) for dtype in HALF)])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_row_of_finfo_min_is_one_of_zeros(head_dim: int, dtype: torch.dtype, wide: torch.dtype, device: str) -> None:
    """Where it is too large for scores to change it: the dq of such rows and all of dv are those of queries of 0."""
    rows = [0, 5, 63, 64, *range(130, 140), 199]
    inputs = make_inputs((1, 2, 200, head_dim), (1, 1, 400, head_dim), dtype=dtype, device=device)
    grad = torch.randn(1, 2, 200, head_dim, device=device, dtype=dtype)
    bias = torch.randn(200, 400, device=device).to(wide)
    bias[rows] = torch.finfo(wide).min
    got = gradients(inputs | {"bias": bias}, grad, causal=True, align="bottom_right")
    bias[rows] = 0
    inputs["query"][:, :, rows] = 0
    expected = gradients(inputs | {"bias": bias}, grad, causal=True, align="bottom_right")
    torch.testing.assert_close(got[0][:, :, rows], expected[0][:, :, rows], rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(got[2], expected[2], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", ["bias", "both"])
@pytest.mark.parametrize("loss_scale", [65536.0, 2.0**-8])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_loss_scales(head_dim: int, loss_scale: float, kind: str, device: str) -> None:
    """Gradients of fp16 follow a power of two, as long as they are representable."""
    inputs = make_inputs((1, 2, 300, head_dim), (1, 2, 400, head_dim), dtype=torch.float16, device=device)
    inputs |= scores_of(kind, (1, 2, 300, 400), torch.float16, device)
    grad = torch.randn(1, 2, 300, head_dim, device=device) / 64
    plain = gradients(inputs, grad.half())
    scaled = gradients(inputs, (grad.half().float() * loss_scale).half())
    for a, b in zip(scaled, plain, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a.float() / loss_scale, b.float(), rtol=2e-2, atol=2e-3 * float(b.abs().max()))
