"""Promise: twenty runs of a call give the same bits, on any stream: of every result where the call is deterministic, of
the others that are summed in one order."""

from __future__ import annotations

import torch
from features import Combination, Sizes
from problems import Problem, problem

RUNS = 20
SIZES = {"cpu": Sizes(33, 70), "cuda": Sizes(500, 600, heads=4)}


def assert_stable(call: Problem, device: str, backend: str) -> None:
    first = call.evaluate()
    side = torch.cuda.Stream() if device == "cuda" else None
    for run in range(RUNS - 1):
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if run % 2 else None):
            other = call.evaluate()
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
        for name, tensor in first.items():
            assert not call.is_ordered(name, backend) or torch.equal(tensor, other[name]), (name, run)


def test_twenty_runs(combination: Combination, device: str, backend: str) -> None:
    assert_stable(problem(combination, SIZES[device], device, backend), device, backend)
