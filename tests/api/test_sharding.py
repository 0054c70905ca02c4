"""Promise: the operators run on DTensors, sharded in batch or heads, and give the whole call's numbers.

sharding_cases.py runs once, in two processes; each of its cases is a test here.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sharding_cases
import torch

import flash_ext  # noqa: F401

pytestmark = pytest.mark.xdist_group("sharding")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    """For a device, what both ranks said about each case."""
    seen: dict[str, dict[str, list[str]]] = {}
    for device in ("cpu", "cuda") if torch.cuda.device_count() > 1 else ("cpu",):
        arguments = [str(tmp_path_factory.mktemp("store") / "file"), device]
        script = str(Path(sharding_cases.__file__))
        ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", script, str(rank), *arguments],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        seen[device] = {}
        for rank in ranks:
            out, errors = rank.communicate(timeout=300)
            assert rank.returncode == 0, errors
            for name, _, said in (line.partition(": ") for line in out.splitlines()):
                seen[device].setdefault(name, []).append(said)
    return seen


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(2))])
@pytest.mark.parametrize("name", sharding_cases.CASES)
def test_case(results: dict[str, dict[str, list[str]]], name: str, kind: str) -> None:
    assert results[kind][name] == ["right", "right"]


def test_dtensor_may_be_imported_first() -> None:
    """The cases import it second, and see that flash_ext alone does not import it, which takes seconds."""
    script = """
import torch.distributed.tensor, flash_ext
from torch._library.simple_registry import singleton
rules = singleton.find("flash_ext::attention").torch_dispatch_rules
assert rules.find(torch.distributed.tensor.DTensor)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
