"""Promise: what the CPU's scratch and results held before a call is never read: NaN there gives the bits of zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import DTYPES, Inputs, Results, evaluate, make_inputs, name_of, rand

import flash_ext

QUERIES = (1, 5, 17, 33, 130)
KEYS = (1, 8, 33, 129, 300)


def evaluate_over(byte: int, inputs: Inputs, options: dict[str, Any]) -> Results:
    """The results of a call whose memory is handed out full of `byte`."""

    def poisoned(**arguments: Any) -> Any:
        plan = flash_ext.explain(**{name: value for name, value in arguments.items() if name != "return_lse"})
        sizes = [plan.forward.scratch_bytes, plan.backward.scratch_bytes] + [t.nbytes for t in inputs.values()]
        blocks = [torch.full((size + 64,), byte, dtype=torch.uint8) for size in sizes for _ in range(2)]
        del blocks
        return flash_ext.attention(**arguments)

    return evaluate(poisoned, inputs, options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [8, 40, 160])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_old_memory_is_not_read(dtype: torch.dtype, head_dim: int, causal: bool) -> None:
    for queries in QUERIES:
        for keys in KEYS:
            inputs = make_inputs((1, 1, queries, head_dim), (1, 1, keys, head_dim), dtype=dtype)
            if (queries + keys) % 4 == 0:
                inputs["bias"] = rand(queries, keys, dtype=dtype)
            options = {"causal": causal, "return_lse": True}
            clean, dirty = (evaluate_over(byte, inputs, options) for byte in (0, 255))
            for name, tensor in clean.items():
                assert torch.equal(tensor, dirty[name]), (queries, keys, name)
