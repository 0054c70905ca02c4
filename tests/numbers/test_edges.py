"""Promise: every combination of features obeys the error rule at every edge of a tile, reads nothing outside of a
tensor, and writes every element of its results.

Inputs and grad_out lie inside buffers of NaN. Memory that the allocator hands out is NaN before both passes.
"""

from __future__ import annotations

from functools import partial

from features import Combination
from layouts import interior
from problems import at_edges, problem


def test_every_edge(combination: Combination, device: str, backend: str) -> None:
    for turn, sizes, pad in at_edges(combination, backend):
        inside, dense = partial(interior, pad=pad), problem(turn, sizes, device, backend)
        views = dense.with_views(lambda _, tensor, inside=inside: inside(tensor) if tensor.dim() == 4 else tensor)
        views.check(views.among_nan(device, inside))
