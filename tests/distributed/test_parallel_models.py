"""Promise: models in torch's tensor parallel and FSDP2, unchanged, run under ``enable()`` with one process's numbers.

parallel_models_cases.py runs once for each number of ranks, on gloo; each of its cases is a test here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import parallel_models_cases
import pytest
import ranks

pytestmark = pytest.mark.xdist_group("distributed")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, list[str]]]:
    """What so many ranks said about each case."""
    file = parallel_models_cases.__file__
    return functools.cache(lambda size: ranks.run(file, size, Path(tmp_path_factory.mktemp("store"))))


@pytest.mark.parametrize(
    ("size", "name"), [(size, name) for size in (2, 4) for name in parallel_models_cases.cases(size)]
)
def test_case(said: Callable[[int], dict[str, list[str]]], size: int, name: str) -> None:
    assert said(size)[name] == [ranks.RIGHT] * size
