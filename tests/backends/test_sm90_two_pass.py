"""Promise: the two-pass backward of sm90 serves scores of all kinds together, in one order, above head dim 128, and the
gradients of some inputs alone; it obeys the error rule and takes no scratch but what is planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import HALF, Inputs, check, keep_mask, leaf, make_inputs, rng_state
from layouts import interior, poison_free_memory
from sm90_helpers import BANDS, aligned, scores_of
from torch import Tensor

import flash_ext
from flash_ext import reference

pytestmark = [pytest.mark.gpu, pytest.mark.sm90]

OPS = torch.ops.flash_ext
STATE = (2**63 + 12345, 2**40 + 7)
B, HEADS, GROUPS, L, S = 2, 4, 2, 150, 203
# What is added to the scores, a softcap, dropout_p, and whether the call is deterministic; above head dim 128 always.
CALLS: dict[str, tuple[str, float, float, bool]] = {
    "mask": ("bool", 0.0, 0.0, True),
    "bias": ("bias", 0.0, 0.0, True),
    "float bias and mask": ("both float32", 0.0, 0.0, True),
    "slopes": ("slopes", 0.0, 0.0, True),
    "dropout": ("", 0.0, 0.1, True),
    "softcap": ("", 5.0, 0.0, True),
    "softcap and bias": ("bias", 5.0, 0.0, False),
    "softcap and mask": ("bool", 5.0, 0.0, False),
    "softcap and dropout": ("", 5.0, 0.5, True),
    "everything": ("both and slopes", 5.0, 0.2, True),
}


def added_of(kind: str, dtype: torch.dtype, device: str, shape: tuple[int, ...] = (B, HEADS, L, S)) -> Inputs:
    added: Inputs = {}
    if "slopes" in kind:
        added["alibi_slopes"] = torch.rand(shape[1], device=device)
    if kind not in ("", "slopes"):
        added |= scores_of(kind.removesuffix(" and slopes"), shape, dtype, device)
    if "bias" in added:
        added["bias"] = aligned(added["bias"])
    return added


def call_of(added: Inputs, softcap: float, p: float, deterministic: bool, device: str) -> Any:
    """The call, which only sm90 may serve, and its truth, of `query`, `key` and `value` [B, HEADS or GROUPS, ...]."""
    state = rng_state(*STATE, device) if p > 0 else torch.empty(0, dtype=torch.int64, device=device)

    def call(**arguments: Any) -> Any:
        left, right = arguments.pop("window", (None, None))
        arguments |= {"window_left": left, "window_right": right}
        arguments["bottom_right"] = arguments.pop("align", "top_left") == "bottom_right"
        poison_free_memory(device)
        with flash_ext.use_backend("sm90"):
            out, lse = OPS.attention_with_rng_state(
                **arguments, **added, rng_state=state, dropout_p=p, softcap=softcap, gqa=True,
                deterministic=deterministic, return_lse=True,
            )  # fmt: skip

        def arrives(grad: Tensor) -> Tensor:
            poison_free_memory(device)
            return interior(grad)

        out.register_hook(arrives)
        return out, lse

    def truth(**arguments: Any) -> Any:
        query, key = arguments["query"], arguments["key"]
        is_wide = query.dtype == torch.float64
        wide = {name: t.double() if is_wide and t.is_floating_point() else t for name, t in added.items()}
        dropout: dict[str, Any] = {}
        if p > 0:
            dropout = {"dropout_p": p, "keep": keep_mask(state, p, query.shape[:-2], query.shape[-2], key.shape[-2])}
        return reference.attention(**arguments, **wide, **dropout, softcap=softcap, return_lse=True)

    return call, truth


@pytest.mark.parametrize("head_dim", [40, 64, 128, 136, 192])
@pytest.mark.parametrize("name", CALLS)
def test_every_call_and_band(name: str, head_dim: int, device: str) -> None:
    kind, softcap, p, deterministic = CALLS[name]
    for i, band in enumerate(BANDS.values()):
        dtype = HALF[i % 2]
        inputs = make_inputs((B, HEADS, L, head_dim), (B, GROUPS, S, head_dim), dtype=dtype, device=device)
        added = added_of(kind, dtype, device)
        call, truth = call_of(added, softcap, p, deterministic, device)
        wanted = {name: leaf(tensor) for name, tensor in inputs.items()}
        plan = flash_ext.explain(**wanted, **added, **band, softcap=softcap, dropout_p=p, deterministic=deterministic)
        assert plan.backward.kernel.startswith("sm90.backward.two_pass")
        for result, tensor in check(call, inputs, band, truth=truth).items():
            assert not tensor.isnan().any(), result


SOME = (("query",), ("key",), ("value",), ("query", "key"), ("query", "value"), ("key", "value"))


@pytest.mark.parametrize("some", SOME, ids="+".join)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_some_gradients(head_dim: int, some: tuple[str, ...], device: str) -> None:
    """Those that nobody wants are not computed; where both gradients of a kernel are left out, nor is it."""
    for i, (kind, softcap, p) in enumerate((("", 0.0, 0.0), ("bias", 0.0, 0.0), ("bool", 5.0, 0.2))):
        if head_dim > 192 and kind:
            continue
        dtype = HALF[i % 2]
        inputs = make_inputs((B, HEADS, L, head_dim), (B, GROUPS, S, head_dim), dtype=dtype, device=device)
        call, truth = call_of(added_of(kind, dtype, device), softcap, p, False, device)
        rest = {name: tensor for name, tensor in inputs.items() if name not in some}

        def part(call: Any = call, rest: Inputs = rest, **arguments: Any) -> Any:
            out, lse = call(**arguments, **rest)
            return out if some == ("value",) else (out, lse)  # lse has no gradient for it

        def of_part(truth: Any = truth, rest: Inputs = rest, **arguments: Any) -> Any:
            dtype = next(arguments[name].dtype for name in some)
            out, lse = truth(**arguments, **{name: tensor.to(dtype) for name, tensor in rest.items()})
            return out if some == ("value",) else (out, lse)

        got = check(part, {name: inputs[name] for name in some}, {"causal": True}, truth=of_part)
        assert {name for name in got if name.startswith("grad")} == {f"grad of {name}" for name in some}


def test_scratch_is_the_plans(device: str) -> None:
    """No sum of dQ in float: 12 bytes a query."""
    shape = (1, 8, 2048, 128)
    leaves = {name: leaf(t) for name, t in make_inputs(shape, shape, dtype=HALF[0], device=device).items()}
    mask = torch.rand(2048, 2048, device=device) > 0.2
    plan = flash_ext.explain(**leaves, mask=mask, deterministic=True).backward
    assert plan.kernel == "sm90.backward.two_pass.narrow" and plan.scratch_bytes == 8 * 2048 * 12
