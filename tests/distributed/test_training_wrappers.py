"""Promise: DDP, ShardedOptimizer and FSDP train as one process does, bit for bit where sums have one order.

training_cases.py runs once in 2 and once in 4 processes that talk by gloo; each of its cases is a test here.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import training_cases

RANKS = (2, 4)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, list[str]]]:
    """For a number of ranks, what each of them said about each case."""
    seen: dict[int, dict[str, list[str]]] = {}
    for ranks in RANKS:
        arguments = [str(ranks), str(tmp_path_factory.mktemp("store") / "file")]
        script = str(Path(training_cases.__file__))
        processes = [
            subprocess.Popen(
                [sys.executable, script, str(rank), *arguments],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        seen[ranks] = {}
        for process in processes:
            out, errors = process.communicate(timeout=900)
            assert process.returncode == 0, errors
            for name, _, said in (line.partition(": ") for line in out.splitlines()):
                seen[ranks].setdefault(name, []).append(said)
    return seen


@pytest.mark.xdist_group("training_wrappers")
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", training_cases.CASES)
def test_case(results: dict[int, dict[str, list[str]]], name: str, ranks: int) -> None:
    assert results[ranks].get(name, ["not run, because one before it failed"]) == ["right"] * ranks


@pytest.mark.parametrize("name", ["ddp", "optimizer", "fsdp", "sharded_weight"])
def test_they_are_short_enough_to_read(name: str) -> None:
    file = Path(__file__).resolve().parents[2] / f"flash_ext/distributed/{name}.py"
    assert len(file.read_text().splitlines()) <= 150
