"""Promise: attention of a sequence whose tokens are dealt over ranks is that of one rank, by the error rule.

context_parallel_cases.py runs once for each number of ranks, on gloo, and on two GPUs; each of its cases is a test.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import context_parallel_cases
import pytest
import ranks

pytestmark = pytest.mark.xdist_group("distributed")

SIZES = (2, 4, 8)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], dict[str, list[str]]]:
    """What the ranks said about each case, by their number and the kind of device."""
    file = context_parallel_cases.__file__
    return cache(lambda size, kind: ranks.run(file, size, tmp_path_factory.mktemp("store"), kind))


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size in SIZES for name in context_parallel_cases.cases(size)]
)
def test_case(said: Callable[[int, str], dict[str, list[str]]], size: int, name: str) -> None:
    assert set(said(size, "cpu")[name]) == {ranks.RIGHT}, said(size, "cpu")[name]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", context_parallel_cases.cases(2))
def test_case_on_two_gpus(said: Callable[[int, str], dict[str, list[str]]], name: str) -> None:
    assert set(said(2, "cuda")[name]) == {ranks.RIGHT}, said(2, "cuda")[name]
