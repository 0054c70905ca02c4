"""Promise: the Hopper kernels cap scores at every head dim under every band and alignment, in forward with whatever
else is added, and obey the error rule with it."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from helpers import HALF, Inputs, check, leaf, make_inputs, name_of
from layouts import interior, poison_free_memory
from sm90_helpers import BANDS, KINDS, aligned, scores_of

import flash_ext
from flash_ext import reference

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

HEAD_DIMS = (64, 96, 128, 192, 256)
CAPS = (0.5, 5.0, 30.0, 4096.0)


def attention(**arguments: Any) -> Any:
    """Forward and, as the graph keeps the name, backward are sm90's or an error."""
    poison_free_memory("cuda")
    with flash_ext.use_backend("sm90"):
        return flash_ext.attention(**arguments)


def check_finite(inputs: Inputs, options: dict[str, Any], **how: Any) -> None:
    for name, tensor in check(attention, inputs, {"return_lse": True} | options, **how).items():
        assert not tensor.isnan().any(), name


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_band(head_dim: int, cap: float, device: str) -> None:
    for band, dtype in product(BANDS.values(), HALF):
        inputs = make_inputs((2, 4, 150, head_dim), (2, 2, 203, head_dim), dtype=dtype, device=device)
        check_finite(inputs, band | {"softcap": cap})


@pytest.mark.parametrize("kind", [*KINDS, "slopes", "dropout"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_forward_with_what_else_is_added(head_dim: int, kind: str, device: str) -> None:
    for i, band in enumerate(BANDS.values()):
        dtype = HALF[i % 2]
        inputs = make_inputs((2, 4, 150, head_dim), (2, 2, 203, head_dim), dtype=dtype, device=device)
        options = band | {"softcap": CAPS[i % 3]}
        if kind == "dropout":
            torch.manual_seed(0)
            got = attention(**inputs, **options, dropout_p=0.3)
            torch.manual_seed(0)
            with flash_ext.use_backend("sm80"):
                other = flash_ext.attention(**inputs, **options, dropout_p=0.3)
            torch.testing.assert_close(got, other, atol=2e-2, rtol=2e-2)
            continue
        added = {"alibi_slopes": torch.rand(4, device=device)} if kind == "slopes" else {}
        if kind in KINDS:
            added = scores_of(kind, (2, 4, 150, 203), dtype, device)
        if "bias" in added:
            added["bias"] = aligned(added["bias"])

        def truth(added: Inputs = added, **arguments: Any) -> Any:
            is_wide = arguments["query"].dtype == torch.float64
            wide = {name: t.double() if is_wide and t.is_floating_point() else t for name, t in added.items()}
            return reference.attention(**arguments, **wide)

        def call(added: Inputs = added, **arguments: Any) -> Any:
            return attention(**arguments, **added)

        check(call, inputs, options | {"return_lse": True}, truth=truth, backward=False)


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_saturated_scores(head_dim: int, dtype: torch.dtype, device: str) -> None:
    """Far beyond the cap, where tanh is 1 and its derivative 0, and scales of their own."""
    for cap, scale in ((2.0, 3.0), (50.0, 20.0), (1e-3, 1.0), (30.0, 1e-3)):
        inputs = make_inputs((1, 2, 200, head_dim), (1, 2, 260, head_dim), dtype=dtype, device=device)
        check_finite(inputs, {"softcap": cap, "scale": scale, "causal": True})


@pytest.mark.parametrize("heads", [(4, 2), (8, 1), (6, 3)], ids=name_of)
def test_grouped_heads(heads: tuple[int, int], device: str) -> None:
    for head_dim, (i, band) in product((64, 128, 256), enumerate(BANDS.values())):
        shapes = (2, heads[0], 300, head_dim), (2, heads[1], 200, head_dim)
        check_finite(make_inputs(*shapes, dtype=HALF[i % 2], device=device), band | {"softcap": 5.0})


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
    """Beside a mask at head dim 256, and where slopes want a gradient."""
    for head_dim, added in (
        (256, {"mask": torch.rand(300, 208, device=device) > 0.2}),
        (64, {"alibi_slopes": torch.rand(4, device=device)}),
    ):
        inputs = make_inputs((2, 4, 300, head_dim), (2, 2, 208, head_dim), dtype=HALF[0], device=device) | added
        plan = flash_ext.explain(**{name: leaf(tensor) for name, tensor in inputs.items()}, softcap=5.0)
        assert (plan.forward.backend, plan.backward.backend) == ("sm90", "sm80")
        check(flash_ext.attention, inputs, {"return_lse": True, "softcap": 5.0})
