"""Promise: attention of a sequence whose tokens are dealt over ranks is that of one rank, by the error rule.

context_parallel_cases.py runs once for each number of ranks, on gloo; each of its cases is a test here.
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
def said(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, list[str]]]:
    """What the ranks said about each case, by their number."""
    return cache(lambda size: ranks.run(context_parallel_cases.__file__, size, tmp_path_factory.mktemp("store")))


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size in SIZES for name in context_parallel_cases.cases(size)]
)
def test_case(said: Callable[[int], dict[str, list[str]]], size: int, name: str) -> None:
    assert set(said(size)[name]) == {ranks.RIGHT}, said(size)[name]
