"""Promise: the Hopper kernels add ALiBi slopes in forward and backward, alone, with a mask and with a bias, under every
band and alignment, and obey the error rule with them; the slopes' own gradient is sm80's."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from helpers import HALF, Inputs, check, leaf, make_inputs, name_of
from layouts import poison_free_memory
from sm90_helpers import BANDS, KINDS, aligned, scores_of
from torch import Tensor

import flash_ext
from flash_ext import reference

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

BOTH = (64, 96, 128)  # head dims that backward has
FORWARD = (*BOTH, 192, 256)


def attention(**arguments: Any) -> Any:
    """Forward and, as the graph keeps the name, backward are sm90's or an error."""
    poison_free_memory("cuda")
    with flash_ext.use_backend("sm90"):
        return flash_ext.attention(**arguments)


def check_passes(inputs: Inputs, added: Inputs, options: dict[str, Any] | None = None, *, backward: bool) -> None:
    """Of query, key and value; what is `added` to the scores wants no gradient."""

    def truth(**arguments: Any) -> Any:
        is_wide = arguments["query"].dtype == torch.float64
        wide = {name: t.double() if is_wide and t.is_floating_point() else t for name, t in added.items()}
        return reference.attention(**arguments, **wide)

    got = check(
        lambda **arguments: attention(**arguments, **added),
        inputs,
        (options or {}) | {"return_lse": True},
        truth=truth,
        backward=backward,
    )
    for name, tensor in got.items():
        assert not tensor.isnan().any(), name


def slopes_of(*shape: int) -> Tensor:
    """Those of the paper are 2^-8 to 1/2."""
    return (2 ** -(8 * torch.rand(shape))).cuda()


def gradients(inputs: Inputs, grad: Tensor, **options: Any) -> tuple[Tensor, ...]:
    leaves = {name: leaf(inputs[name]) for name in ("query", "key", "value")}
    out = attention(**(inputs | leaves), **options)
    return (out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad))


@pytest.mark.parametrize("kind", ["alone", *KINDS])
@pytest.mark.parametrize("head_dim", FORWARD)
def test_every_band_and_broadcast(head_dim: int, kind: str, device: str) -> None:
    for i, (band, shape) in enumerate(product(BANDS.values(), ((4,), (2, 4)))):
        dtype = HALF[i % 2]
        inputs = make_inputs((2, 4, 150, head_dim), (2, 2, 203, head_dim), dtype=dtype, device=device)
        added = {} if kind == "alone" else scores_of(kind, (2, 4, 150, 203), dtype, device)
        if "bias" in added:
            added["bias"] = aligned(added["bias"])
        check_passes(inputs, added | {"alibi_slopes": slopes_of(*shape)}, band, backward=head_dim in BOTH)


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("head_dim", BOTH)
def test_steep_and_negative_slopes(head_dim: int, dtype: torch.dtype, device: str) -> None:
    """Steep ones leave most keys nothing and, where the diagonal is far away, rows an lse far from 0."""
    slopes = torch.tensor([0.0, -0.25, 3.0, 500.0], device=device)
    for keys, options in ((400, {}), (400, {"causal": True}), (400, {"align": "bottom_right"}), (20, {})):
        inputs = make_inputs((1, 4, 300, head_dim), (1, 2, keys, head_dim), dtype=dtype, device=device)
        check_passes(inputs, {"alibi_slopes": slopes}, options, backward=True)


def test_a_scale_of_its_own(device: str) -> None:
    for scale, dtype in product((0.02, 3.0), HALF):
        inputs = make_inputs((1, 2, 200, 64), (1, 2, 200, 64), dtype=dtype, device=device)
        check_passes(inputs, {"alibi_slopes": slopes_of(2)}, {"scale": scale, "causal": True}, backward=True)


@pytest.mark.parametrize("kind", ["alone", "bool", "bias"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_tiles(head_dim: int, kind: str, device: str) -> None:
    """More tiles than multiprocessors and grouped heads; out, dk and dv of a head as in a call of its own."""
    for options in ({}, {"causal": True}):
        inputs = make_inputs((4, 20, 777, head_dim), (4, 20, 777, head_dim), dtype=HALF[0], device=device)
        added = {} if kind == "alone" else scores_of(kind, (1, 20, 777, 777), HALF[0], device)
        if "bias" in added:
            added["bias"] = aligned(added["bias"])
        slopes = slopes_of(4, 20)
        grad = torch.randn(4, 20, 777, head_dim, device=device, dtype=HALF[0])
        whole = gradients(inputs | added, grad, alibi_slopes=slopes, **options)
        for b, h in ((0, 0), (1, 13), (3, 19)):
            alone = {name: tensor[b : b + 1, h : h + 1] for name, tensor in inputs.items()}
            alone |= {name: tensor[:, h : h + 1] for name, tensor in added.items()}
            got = gradients(alone, grad[b : b + 1, h : h + 1], alibi_slopes=slopes[b : b + 1, h : h + 1], **options)
            for i in (0, 2, 3):
                assert torch.equal(got[i][0, 0], whole[i][b, h]), (b, h, i)
            torch.testing.assert_close(got[1][0, 0], whole[1][b, h], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("heads", [(4, 2), (8, 1), (6, 3)], ids=name_of)
def test_grouped_heads(heads: tuple[int, int], device: str) -> None:
    for head_dim, (i, band) in product((64, 128), enumerate(BANDS.values())):
        shapes = (2, heads[0], 300, head_dim), (2, heads[1], 200, head_dim)
        inputs = make_inputs(*shapes, dtype=HALF[i % 2], device=device)
        check_passes(inputs, {"alibi_slopes": slopes_of(2, heads[0])}, band, backward=True)


def test_who_computes_the_gradient_of_slopes(device: str) -> None:
    """sm80, with all the others, from sm90's out and lse."""
    inputs = make_inputs((2, 4, 300, 64), (2, 2, 208, 64), dtype=HALF[0], device=device)
    inputs["alibi_slopes"] = slopes_of(4)
    for wanted, backend in ((True, "sm80"), (False, "sm90")):
        leaves = {name: t.requires_grad_(wanted or name != "alibi_slopes") for name, t in inputs.items()}
        plan = flash_ext.explain(**leaves)
        assert (plan.forward.backend, plan.backward.backend) == ("sm90", backend)
    check(flash_ext.attention, inputs, {"return_lse": True, "causal": True})
