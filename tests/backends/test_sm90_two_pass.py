"""Promise: the two-pass backward of sm90 obeys the error rule where some gradients alone are wanted, and takes no
scratch but what is planned. With what is added to scores, in one order: test_sm90_scores.py."""

from __future__ import annotations

import pytest
import torch
from helpers import HALF, leaf, make_inputs
from sm90_calls import added_of, check_passes

import flash_ext

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

SOME = (("query",), ("key",), ("value",), ("query", "key"), ("query", "value"), ("key", "value"))


@pytest.mark.parametrize("some", SOME, ids="+".join)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_some_gradients(head_dim: int, some: tuple[str, ...], device: str) -> None:
    """Those that nobody wants are not computed; where both gradients of a kernel are left out, nor is it."""
    for i, (kind, softcap, p) in enumerate((("", 0.0, 0.0), ("bias", 0.0, 0.0), ("bool", 5.0, 0.2))):
        if head_dim > 192 and kind:
            continue
        inputs = make_inputs((2, 4, 150, head_dim), (2, 2, 203, head_dim), dtype=HALF[i % 2], device=device)
        added = added_of(kind, (2, 4, 150, 203), HALF[i % 2], device)
        wanted = {name: inputs.pop(name) for name in some}
        features = () if some == ("value",) else ("lse",)  # lse has no gradient for it
        got = check_passes(wanted, inputs | added, {"causal": True, "softcap": softcap}, p, features)
        assert {name for name in got if name.startswith("grad")} == {f"grad of {name}" for name in some}


def test_scratch_is_the_plans(device: str) -> None:
    """No sum of dQ in float: 12 bytes a query, and 8 for what the mask leaves of a tile of queries and one of keys."""
    shape = (1, 8, 2048, 128)
    leaves = {name: leaf(t) for name, t in make_inputs(shape, shape, dtype=HALF[0], device=device).items()}
    mask = torch.rand(2048, 2048, device=device) > 0.2
    plan = flash_ext.explain(**leaves, mask=mask, deterministic=True).backward
    assert plan.kernel == "sm90.backward.two_pass.small_head_dim" and plan.scratch_bytes == 8 * (2048 * 12 + 2 * 32 * 8)
