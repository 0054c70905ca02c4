"""Promise: on a GPU deterministic gradients of every broadcast of a bias, and those of thousands of blocks, are the
same bits in 20 runs on any stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import Results, evaluate, make_inputs, name_of, rand
from torch import Tensor

pytestmark = pytest.mark.gpu

OPS = torch.ops.flash_ext
RUNS = 20
BIASES = {  # shapes of a bias that is broadcast: its gradient is a sum
    "batch": (1, 8, 500, 600),
    "heads": (3, 1, 500, 600),
    "rows": (3, 1, 1, 600),
    "everything": (600,),
    "columns": (8, 500, 1),
}


def with_state(**arguments: Any) -> tuple[Tensor, Tensor]:
    state = torch.tensor([2024, 7], device=arguments["query"].device)
    return OPS.attention_with_rng_state(
        **arguments, rng_state=state if arguments.get("dropout_p") else state[:0], gqa=True, deterministic=True,
        return_lse=True,
    )  # fmt: skip


def assert_stable(inputs: dict[str, Tensor], options: dict[str, Any]) -> None:
    first = evaluate(with_state, inputs, options)
    side = torch.cuda.Stream()
    for run in range(RUNS - 1):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if run % 2 else torch.cuda.current_stream()):
            other = evaluate(with_state, inputs, options)
        torch.cuda.current_stream().wait_stream(side)
        assert_identical(first, other)


def assert_identical(first: Results, other: Results) -> None:
    for name, tensor in first.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=name_of)
def test_every_reduction_of_a_bias(dtype: torch.dtype, bias: str, device: str, backend: str) -> None:
    shapes = (3, 8, 500, 64), (3, 2, 600, 64), (3, 4, 600, 64)
    inputs = make_inputs(*shapes, dtype=dtype, device=device)
    inputs["alibi_slopes"] = torch.rand(8).to(device)
    inputs["bias"] = rand(*BIASES[bias], dtype=dtype, device=device)
    assert_stable(inputs, {"causal": True, "dropout_p": 0.2})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_more_blocks_than_run_at_once(dtype: torch.dtype, device: str, backend: str) -> None:
    """Thousands of blocks, whose order on the card differs from run to run."""
    inputs = make_inputs((4, 16, 2048, 64), (4, 4, 2048, 64), dtype=dtype, device=device)
    assert_stable(inputs, {"causal": True})
