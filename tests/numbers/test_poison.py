"""Promise: with every combination of features, neither an input nor what lies around it is written; what lies beside a
head is not read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from features import Combination, Sizes
from helpers import HALF, check, name_of, rand
from layouts import interior, poison_free_memory
from problems import problem
from torch import Tensor

import flash_ext

LENGTHS = {"cpu": [(17, 33)], "cuda": [(129, 65), (257, 255), (17, 129)]}


def test_inputs_stay_as_they_were(combination: Combination, device: str, backend: str) -> None:
    for lengths in LENGTHS[device]:
        dense = problem(combination, Sizes(*lengths), device, backend)
        buffers: list[Tensor] = []

        def inside(name: str, tensor: Tensor, buffers: list[Tensor] = buffers) -> Tensor:
            view = interior(tensor) if tensor.dim() == 4 else tensor
            buffers.append(view if view._base is None else view._base)
            return view

        views = dense.with_views(inside)
        before = [buffer.view(torch.uint8).clone() for buffer in buffers]
        views.evaluate(views.among_nan(device, interior))
        for buffer, bytes_before in zip(buffers, before, strict=True):
            assert torch.equal(buffer.view(torch.uint8), bytes_before)


def poisoned_call(**arguments: Any) -> Any:
    poison_free_memory("cuda")
    return flash_ext.attention(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_columns_beyond_the_head_dim(dtype: torch.dtype, device: str, backend: str) -> None:
    """Heads packed side by side, as a projection leaves them: the next columns belong to NaN heads."""
    for head_dim in (1, 8, 33, 40, 64, 80, 96, 128, 160, 192, 256):
        inputs = {}
        for name, length in {"query": 130, "key": 70, "value": 70}.items():
            packed = torch.full((2, length, 3, 5, head_dim), torch.nan, dtype=dtype, device=device)
            mine = packed[:, :, 1, 1:4:2].transpose(1, 2)
            inputs[name] = mine.copy_(rand(2, 2, length, head_dim, dtype=dtype, device=device))
        check(poisoned_call, inputs, {"causal": True})
