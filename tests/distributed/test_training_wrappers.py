"""Promise: DDP, ShardedOptimizer and FSDP train as one process does, bit for bit where sums have one order.

training_cases.py runs once for each number of ranks, on gloo; each of its cases is a test here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import ranks
import training_cases

pytestmark = pytest.mark.xdist_group("distributed")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, list[str]]]:
    """What so many ranks said about each case."""
    file = training_cases.__file__
    return functools.cache(lambda size: ranks.run(file, size, Path(tmp_path_factory.mktemp("store"))))


@pytest.mark.parametrize("size", (2, 4))
@pytest.mark.parametrize("name", training_cases.CASES)
def test_case(said: Callable[[int], dict[str, list[str]]], size: int, name: str) -> None:
    assert said(size)[name] == [ranks.RIGHT] * size


@pytest.mark.gpu(2)
def test_cases_on_two_gpus(tmp_path: Path) -> None:
    told = ranks.run(training_cases.__file__, 2, tmp_path, "cuda")
    assert told == {name: [ranks.RIGHT] * 2 for name in training_cases.CASES}


@pytest.mark.parametrize("name", ["ddp", "optimizer", "fsdp", "sharded_weight"])
def test_they_are_short_enough_to_read(name: str) -> None:
    file = Path(__file__).resolve().parents[2] / f"flash_ext/distributed/{name}.py"
    assert len(file.read_text().splitlines()) <= 150
