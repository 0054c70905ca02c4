"""Promise: programs in torch's own context_parallel, unchanged, are right under ``enable()``, by the error rule.

pytorch_context_cases.py runs once for each number of ranks, on gloo, and on two GPUs; each of its cases is a test.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import pytorch_context_cases
import ranks

pytestmark = pytest.mark.xdist_group("distributed")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], dict[str, list[str]]]:
    """What so many ranks said about each case, on a kind of device."""
    file = pytorch_context_cases.__file__
    return functools.cache(lambda size, kind: ranks.run(file, size, tmp_path_factory.mktemp("store"), kind))


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size in (2, 4) for name in pytorch_context_cases.cases(size, on_gpus=False)]
)
def test_case(said: Callable[[int, str], dict[str, list[str]]], size: int, name: str) -> None:
    assert said(size, "cpu")[name] == [ranks.RIGHT] * size


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", pytorch_context_cases.cases(2, on_gpus=True))
def test_case_on_two_gpus(said: Callable[[int, str], dict[str, list[str]]], name: str) -> None:
    assert said(2, "cuda")[name] == [ranks.RIGHT] * 2
