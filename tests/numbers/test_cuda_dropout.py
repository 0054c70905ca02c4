"""Promise: a GPU draws the CPU's dropout mask for the same rng_state, bit for bit, and gives the CPU's results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import DTYPES, check, dropped, keep_mask, make_inputs, name_of, rand, rng_state
from torch import Tensor

import flash_ext

pytestmark = pytest.mark.gpu

OPS = torch.ops.flash_ext
STATES = [(0, 0), (1, 4), (2**63 + 12345, 2**40 + 7), (2**64 - 1, 2**63 + 1)]
WINDOWS = [  # heads, rows, cols, first query, first key
    (1, 1, 1, 0, 0),
    (3, 16, 16, 0, 0),
    (2, 17, 33, 5, 11),
    (5, 127, 255, 15, 16),
    (1, 3, 1000, 1001, 999),
    (2, 300, 1, 2**20 + 3, 2**30 + 13),
    (2, 31, 65, 2**31 + 9, 2**31 - 100),
    (70_001, 3, 5, 1, 7),
]


@pytest.mark.parametrize("window", WINDOWS, ids=name_of)
@pytest.mark.parametrize("state", STATES, ids=name_of)
def test_mask_equals_the_cpus(state: tuple[int, int], window: tuple[int, ...], device: str, backend: str) -> None:
    heads, rows, cols, q0, k0 = window
    for p in (0.0, 0.001, 0.1, 0.5, 0.9, 1.0):
        expected = OPS.dropout_mask(rng_state(*state), p, heads, rows, cols, q0=q0, k0=k0)
        got = OPS.dropout_mask(rng_state(*state, device), p, heads, rows, cols, q0=q0, k0=k0)
        assert got.device.type == device and torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_kernels_use_the_cpus_bits(dtype: torch.dtype, head_dim: int, p: float, device: str, backend: str) -> None:
    """With equal scores out shows the forward mask and dv the backward mask, over several tiles of every kernel."""
    rows, keys = 270, head_dim
    state = rng_state(77, 2**33 + 5, device)
    keep = keep_mask(rng_state(77, 2**33 + 5), p, (2, 3), rows, keys)
    query = torch.zeros(2, 3, rows, head_dim, dtype=dtype, device=device)
    key = torch.zeros(2, 3, keys, head_dim, dtype=dtype, device=device)
    value = torch.eye(keys, dtype=dtype, device=device).expand(2, 3, keys, keys).clone().requires_grad_()
    out, _ = OPS.attention_with_rng_state(query, key, value, state, dropout_p=p)
    assert torch.equal((out > 0).cpu(), keep)
    for first in range(0, rows, keys):  # one row of grad_out a column of dv
        rows_here = min(keys, rows - first)
        grad = torch.zeros_like(out)
        grad[:, :, first : first + rows_here, :rows_here] = torch.eye(rows_here, dtype=dtype, device=device)
        (dv,) = torch.autograd.grad(out, value, grad, retain_graph=True)
        assert torch.equal((dv.mT[:, :, :rows_here] > 0).cpu(), keep[:, :, first : first + rows_here])


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "bottom_right": True},
    "window": {"window_left": 60, "window_right": 20, "softcap": 10.0},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_results_equal_the_cpu_backends(dtype: torch.dtype, option: str, device: str, backend: str) -> None:
    """The truth is the CPU backend in float64 with the same rng_state: out, lse and every gradient obey the rule."""
    p, options = 0.25, OPTIONS[option]
    shapes = (2, 4, 141, 64), (2, 2, 203, 64), (2, 1, 203, 48)
    inputs = make_inputs(*shapes, dtype=dtype, device=device)
    inputs["bias"] = rand(4, 141, 203, dtype=dtype, device=device)
    inputs["alibi_slopes"] = torch.rand(4).to(device)
    state = rng_state(1234567890123, 17)
    keep = keep_mask(state, p, (2, 4), 141, 203).to(device)

    def on(place: str, backend_name: str, tensors: dict[str, Any]) -> tuple[Tensor, Tensor]:
        moved = {name: x.to(place) if isinstance(x, Tensor) else x for name, x in tensors.items()}
        slopes = moved.pop("alibi_slopes").float()  # float32 by contract, also beside float64
        with flash_ext.use_backend(backend_name):
            return OPS.attention_with_rng_state(
                **moved, alibi_slopes=slopes, rng_state=state.to(place), dropout_p=p, gqa=True, return_lse=True
            )

    def on_the_cpu(**tensors: Any) -> tuple[Tensor, ...]:
        return tuple(result.to(device) for result in on("cpu", "cpu", tensors))

    def eager(query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
        window = (rest.pop("window_left", None), rest.pop("window_right", None))
        align = "bottom_right" if rest.pop("bottom_right", False) else "top_left"
        reference = dropped(keep, p, rounded=dtype.itemsize == 2)
        return reference(query=query, key=key, value=value, window=window, align=align, return_lse=True, **rest)

    check(lambda **tensors: on(device, backend, tensors), inputs, options, truth=on_the_cpu, eager=eager)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_drawn_state_is_the_cpus_mask(dtype: torch.dtype, device: str, backend: str) -> None:
    """The rng_state that a call draws on the GPU means the same mask on the CPU; seeds reproduce it."""
    query = torch.zeros(1, 2, 100, 32, dtype=dtype, device=device)
    value = torch.eye(32, dtype=dtype, device=device).expand(1, 2, 32, 32)
    key = torch.zeros_like(value)
    states = []
    for seed in (11, 11, 12):
        torch.manual_seed(seed)
        out, _, state = OPS.attention(query, key, value, dropout_p=0.4)
        assert state.device.type == device
        assert torch.equal((out > 0).cpu(), keep_mask(state.cpu(), 0.4, (1, 2), 100, 32))
        states.append(state.tolist())
    assert states[0] == states[1] != states[2]


def test_cpu_generator_is_left_alone(device: str, backend: str) -> None:
    inputs = make_inputs((1, 2, 40, 16), (1, 2, 50, 16), device=device)
    before = torch.get_rng_state()
    flash_ext.attention(**inputs, dropout_p=0.4)
    assert torch.equal(before, torch.get_rng_state())
