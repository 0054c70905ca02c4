"""Promise: the combinations of features that tests try are served by the backend that they are tried with, every two
features that can are tried together, and what is left out is refused; nothing here needs a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from features import (
    GROUP_OF,
    UNSERVED,
    Combination,
    Sizes,
    alone,
    is_left_out,
    pairs,
    pairs_of,
    tried,
)  # fmt: skip
from problems import Problem, at_edges, problem

import flash_ext

PLANNED = ("sm80", "sm90")
PLANS_ALONE = [pytest.mark.kernels("sm80", "sm90"), pytest.mark.no_gpu]


def refusal(call: Problem, by: str) -> str:
    """Why a backend does not serve the call or its backward; "" where it does."""
    with flash_ext.use_backend(by):
        try:
            plan = call.plan()
        except flash_ext.AttentionError as error:
            return str(error)
    return "no backward" if call.combination.wants and plan.backward.backend != by else ""


@pytest.mark.parametrize("by", UNSERVED)
def test_every_two_features_meet(by: str) -> None:
    together = {pair for combination in pairs(by) for pair in pairs_of(combination.names)}
    for pair in itertools.combinations(GROUP_OF, 2):
        if GROUP_OF[pair[0]] != GROUP_OF[pair[1]] and frozenset(pair) not in together:
            assert is_left_out(by, Combination.of(*pair).names), pair
            assert is_left_out(by, Combination.of("forward alone", *pair).names), pair
    assert not any(is_left_out(by, combination.names) for combination in (*alone(by), *pairs(by)))


@pytest.mark.parametrize("by", [pytest.param(by, marks=PLANS_ALONE) for by in PLANNED])
def test_what_is_tried_is_served(by: str) -> None:
    """At every tenth edge, another one for each combination."""
    with torch.device("meta"):
        for number, combination in enumerate(tried(by)):
            for turn, sizes, _ in itertools.islice(at_edges(combination, by), number % 10, None, 10):
                assert not refusal(problem(turn, sizes, "meta", by), by), (turn, sizes)


@pytest.mark.parametrize("by", [pytest.param(by, marks=PLANS_ALONE) for by in PLANNED])
def test_what_is_left_out_is_refused(by: str) -> None:
    """Beside the defaults, so that a feature that a backend learns is tried from then on."""
    for rule in UNSERVED[by]:
        for names in itertools.product(*rule):
            with torch.device("meta"):
                call = problem(Combination.of(*names), Sizes(150, 203), "meta", by)
            assert refusal(call, by), names
