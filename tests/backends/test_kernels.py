"""Promise: what explain says about a kernel is what a GPU is given, and nothing spills to local memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DTYPES, leaf, make_inputs, name_of, rand
from torch import Tensor

import flash_ext

pytestmark = [pytest.mark.gpu, pytest.mark.kernels("sm80")]

HEAD_DIMS = [32, 64, 96, 128, 192, 256]
LENGTHS = {"one tile": (50, 60), "many tiles": (300, 500)}
CASES: dict[str, Callable[..., dict[str, Any]]] = {
    "plain": lambda make: {"causal": True},
    "mask": lambda make: {"mask": make(1, 1) > 0},
    "bias": lambda make: {"bias": leaf(make(2, 4))},
    "bias gradient": lambda make: {"bias": leaf(make(1, 4))},
}
# Arrays that are indexed at run time lie in local memory; no register is spilled there. fp64 is simple, not fast; the
# kernel of a broadcast bias's gradient reads an array of its parameters.
ARRAYS_FP64 = {"forward": 16, "backward": 64}
ARRAYS_BIAS_GRADIENT = 32


@pytest.fixture(autouse=True)
def sm80() -> Iterator[None]:
    """The backend that asks the driver; what sm90 plans is fixed, and test_sm90_plan.py's."""
    with flash_ext.use_backend("sm80"):
        yield


def build(case: str, lengths: str, head_dim: int, dtype: torch.dtype, device: str) -> tuple[list[Tensor], dict]:
    len_q, len_k = LENGTHS[lengths]
    inputs = make_inputs((2, 4, len_q, head_dim), (2, 2, len_k, head_dim), dtype=dtype, device=device)
    options = CASES[case](lambda batch, heads: rand(batch, heads, len_q, len_k, dtype=dtype, device=device))
    return [leaf(tensor) for tensor in inputs.values()], options


def launches(call: Callable[[], object], folder: Path) -> list[dict[str, Any]]:
    """Every kernel that ran, with what the driver says about its launch."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("cat") == "kernel"]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_launch_is_as_planned(dtype: torch.dtype, case: str, lengths: str, device: str, tmp_path: Path) -> None:
    """Registers, shared memory (static and dynamic) and grid as the profiler saw them."""
    most = torch.cuda.get_device_properties(device).max_threads_per_multi_processor
    for head_dim in (64, 256):
        inputs, options = build(case, lengths, head_dim, dtype, device)
        explained = flash_ext.explain(*inputs, **options)
        out = flash_ext.attention(*inputs, **options)
        torch.autograd.grad(out.sum(), inputs)  # the first call may compile for the card

        def both(inputs: list[Tensor] = inputs, options: dict[str, Any] = options) -> None:
            wanted = [*inputs, *(option for option in options.values() if getattr(option, "requires_grad", False))]
            torch.autograd.grad(flash_ext.attention(*inputs, **options).sum(), wanted)

        events = launches(both, tmp_path)
        backward = "query_kernel" if dtype == torch.float64 else "backward_kernel"
        for plan, name in ((explained.forward, "forward_kernel"), (explained.backward, backward)):
            (seen,) = (event["args"] for event in events if name in event["name"])
            assert seen["registers per thread"] == plan.registers
            assert seen["shared memory"] == plan.on_chip_bytes + plan.static_bytes <= plan.on_chip_limit
            assert math.prod(seen["grid"]) == plan.grid
            assert plan.resident_blocks >= 1
            assert plan.occupancy == pytest.approx(plan.resident_blocks * math.prod(seen["block"]) / most, abs=1e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_registers_suffice(dtype: torch.dtype, head_dim: int, case: str, device: str) -> None:
    for lengths in LENGTHS:
        inputs, options = build(case, lengths, head_dim, dtype, device)
        explained = flash_ext.explain(*inputs, **options)
        assert explained.forward.registers > 0 and explained.backward.registers > 0
        for name, plan in (("forward", explained.forward), ("backward", explained.backward)):
            arrays = ARRAYS_BIAS_GRADIENT if case == "bias gradient" and name == "backward" else 0
            assert plan.local_bytes <= (ARRAYS_FP64[name] if dtype == torch.float64 else arrays)
            assert plan.static_bytes <= 1024  # what refusals and the choice of tiles reckon with


def test_numbers_of_the_kernel_are_printed(device: str) -> None:
    inputs, _ = build("plain", "many tiles", 64, torch.bfloat16, device)
    text = str(flash_ext.explain(*inputs))
    assert " a thread" in text and "a multiprocessor" in text and "% of its threads" in text
