"""Promise: every combination of features obeys the error rule when query, key, value and bias have means of 0.5, 2 and
8: scores are large in one direction, maxima grow slowly, and sums all but cancel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from features import Combination, Sizes
from helpers import DTYPES, MEANS, Inputs, check, make_inputs, name_of, rand
from problems import problem

import flash_ext

B, H, L, S, E = 2, 4, 70, 83, 32
LENGTHS = {"cpu": (33, 50), "cuda": (300, 500)}


def everything(dtype: torch.dtype, device: str, mean: float) -> tuple[Inputs, dict[str, Any]]:
    inputs = make_inputs((B, H, L, E), (B, 2, S, E), dtype=dtype, device=device, mean=mean)
    inputs["bias"] = rand(1, 1, L, S, device=device, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    inputs["alibi_slopes"] = torch.rand(B, H).to(device)
    inputs["mask"] = (torch.rand(B, 1, 1, S) > 0.2).to(device)
    return inputs, {"window": (20, 30), "softcap": 5.0, "scale": 0.1, "align": "bottom_right", "return_lse": True}


def test_means(combination: Combination, device: str, backend: str) -> None:
    """A saturated softcap leaves gradients that are below the rule's floor."""
    for mean in MEANS[:2] if "softcap" in combination else MEANS:
        problem(combination, Sizes(*LENGTHS[device], mean=mean), device, backend).check()


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_capped_scores(dtype: torch.dtype, mean: float, device: str, backend: str) -> None:
    """Beside what else there is, with a scale that keeps the cap from hiding all."""
    inputs, options = everything(dtype, device, mean)
    check(flash_ext.attention, inputs, options)
