"""Promise: sm90 adds slopes, masks and biases to the scores, caps them and drops probabilities, each alone and all
together, under every band, with grouped heads, in any order of sums and in one, and obeys the error rule. The gradient
of slopes is sm80's."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from helpers import HALF, check, leaf, make_inputs, name_of
from layouts import interior
from sm90_calls import ADDED, BOTH, GROUPS, HEAD_DIMS, added_of, attention, call_of, check_passes
from sm90_helpers import BANDS

import flash_ext

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

ORDERED = (40, 64, 128, 136, 192, 256)
CAPS = (0.5, 5.0, 30.0, 4096.0)


@pytest.mark.parametrize("drops", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("kind", ADDED)
@pytest.mark.parametrize(
    ("head_dim", "deterministic"), [*product(HEAD_DIMS, [False]), *product(ORDERED, [True])], ids=name_of
)
def test_every_call_and_band(
    head_dim: int, deterministic: bool, kind: str, softcap: float, drops: bool, device: str
) -> None:
    """Scores of several kinds, and all in one order, are the two passes'."""
    things = sum((bool(kind), softcap > 0, drops))
    two_pass = head_dim > 128 or (things > 0 and deterministic) or (things > 1 and softcap > 0)
    for i, band in enumerate(BANDS.values()):
        dtype, p = HALF[i % 2], (0.1, 0.5)[i // 2 % 2] if drops else 0.0
        inputs = make_inputs((2, 4, 150, head_dim), (2, 2, 203, head_dim), dtype=dtype, device=device)
        added = added_of(kind, (2, 4, 150, 203), dtype, device)
        if i % 2 and "alibi_slopes" in added:
            added["alibi_slopes"] = added["alibi_slopes"][0]
        options = band | {"softcap": softcap, "deterministic": deterministic}
        with flash_ext.use_backend("sm90"):
            kernel = call_of(inputs, added, options, p).plan().backward.kernel
        assert kernel.startswith("sm90.backward") and ("two_pass" in kernel) == two_pass
        check_passes(inputs, added, options, p)


@pytest.mark.parametrize("heads", GROUPS, ids=name_of)
@pytest.mark.parametrize("what", ["bool", "both", "slopes", "dropout", "softcap"])
def test_grouped_heads(what: str, heads: tuple[int, int], device: str) -> None:
    for head_dim, (i, band) in product((64, 128, 256), enumerate(BANDS.values())):
        shapes = (2, heads[0], 300, head_dim), (2, heads[1], 200, head_dim)
        inputs = make_inputs(*shapes, dtype=HALF[i % 2], device=device)
        added = added_of(what if what in ADDED else "", (2, heads[0], 300, 200), HALF[i % 2], device)
        options = band | ({"softcap": 5.0} if what == "softcap" else {})
        check_passes(inputs, added, options, 0.1 if what == "dropout" else 0.0)


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("head_dim", BOTH)
def test_steep_and_negative_slopes(head_dim: int, dtype: torch.dtype, device: str) -> None:
    """Steep ones leave most keys nothing and, where the diagonal is far away, rows an lse far from 0."""
    slopes = torch.tensor([0.0, -0.25, 3.0, 500.0], device=device)
    for keys, options in ((400, {}), (400, {"causal": True}), (400, {"align": "bottom_right"}), (20, {})):
        inputs = make_inputs((1, 4, 300, head_dim), (1, 2, keys, head_dim), dtype=dtype, device=device)
        check_passes(inputs, {"alibi_slopes": slopes}, options)


def test_slopes_beside_a_scale(device: str) -> None:
    for scale, dtype in product((0.02, 3.0), HALF):
        inputs = make_inputs((1, 2, 200, 64), (1, 2, 200, 64), dtype=dtype, device=device)
        check_passes(inputs, added_of("slopes", (1, 2), dtype, device), {"scale": scale, "causal": True})


def test_who_computes_the_gradient_of_slopes(device: str) -> None:
    """sm80, with all the others, from sm90's out and lse."""
    inputs = make_inputs((2, 4, 300, 64), (2, 2, 208, 64), dtype=HALF[0], device=device)
    inputs["alibi_slopes"] = torch.rand(4, device=device)
    for wanted, backend in ((True, "sm80"), (False, "sm90")):
        leaves = {name: t.requires_grad_(wanted or name != "alibi_slopes") for name, t in inputs.items()}
        plan = flash_ext.explain(**leaves)
        assert (plan.forward.backend, plan.backward.backend) == ("sm90", backend)
    check(flash_ext.attention, inputs, {"return_lse": True, "causal": True})


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_cap(head_dim: int, cap: float, device: str) -> None:
    for band, dtype in product(BANDS.values(), HALF):
        inputs = make_inputs((2, 4, 150, head_dim), (2, 2, 203, head_dim), dtype=dtype, device=device)
        check_passes(inputs, {}, band | {"softcap": cap})


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_saturated_scores(head_dim: int, dtype: torch.dtype, device: str) -> None:
    """Far beyond the cap, where tanh is 1 and its derivative 0, and scales of their own."""
    for cap, scale in ((2.0, 3.0), (50.0, 20.0), (1e-3, 1.0), (30.0, 1e-3)):
        inputs = make_inputs((1, 2, 200, head_dim), (1, 2, 260, head_dim), dtype=dtype, device=device)
        check_passes(inputs, {}, {"softcap": cap, "scale": scale, "causal": True})


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_nothing_outside_is_read(head_dim: int, device: str) -> None:
    """Neither NaN around the tensors nor in keys that no query sees."""
    inputs = make_inputs((1, 2, 130, head_dim), (1, 2, 300, head_dim), dtype=HALF[0], device=device)
    expected = attention(**inputs, causal=True, softcap=5.0)
    inputs = {name: interior(tensor) for name, tensor in inputs.items()}
    for name in ("key", "value"):
        inputs[name][..., 130:, :] = torch.nan if name == "key" else 0.0
    assert torch.equal(attention(**inputs, causal=True, softcap=5.0), expected)


def test_backward_of_sm80_reads_the_same_lse(device: str) -> None:
    """Of capped scores, where slopes want a gradient."""
    for head_dim in (64, 256):
        inputs = make_inputs((2, 4, 300, head_dim), (2, 2, 208, head_dim), dtype=HALF[0], device=device)
        inputs["alibi_slopes"] = torch.rand(4, device=device)
        plan = flash_ext.explain(**{name: leaf(tensor) for name, tensor in inputs.items()}, softcap=5.0)
        assert (plan.forward.backend, plan.backward.backend) == ("sm90", "sm80")
        check(flash_ext.attention, inputs, {"return_lse": True, "softcap": 5.0})
