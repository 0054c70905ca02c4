"""Promise: models in torch's tensor parallel and FSDP2, unchanged, run under ``enable()`` with one process's numbers.

parallel_models_cases.py runs once for each number of ranks, on gloo; each of its cases is a test here.
"""

from __future__ import annotations

from pathlib import Path

import parallel_models_cases
import pytest
import ranks

pytestmark = pytest.mark.xdist_group("distributed")


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return ranks.run(parallel_models_cases.__file__, request.param, Path(tmp_path_factory.mktemp("store")))


@pytest.mark.parametrize(
    ("said", "name"), [(size, name) for size in (2, 4) for name in parallel_models_cases.cases(size)], indirect=["said"]
)
def test_case(said: dict[str, list[str]], name: str) -> None:
    assert set(said[name]) == {ranks.RIGHT}, said[name]
