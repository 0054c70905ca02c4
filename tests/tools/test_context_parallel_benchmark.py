"""Promise: context_parallel.py times every method of context parallel beside one rank, on ranks that it starts."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import BENCHMARKS, rows_of, start

pytest.importorskip("tyro")
pytest.importorskip("pandas")
pytest.importorskip("matplotlib")

SMALL = ("--device", "cpu", "--tokens", 64, "--heads", 4, "--kv-heads", 2, "--head-dim", 16, "--repeats", 2)


def test_every_method_on_two_ranks(tmp_path):
    methods = "ulysses,allgather,ring,torch"
    done = start("context_parallel.py", *SMALL, "--dtype", "fp32", "--method", methods, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "context_parallel.csv")
    assert [row["method"] for row in rows] == ["one rank", "ulysses", "allgather", "ring", "torch"]
    for row in rows[:-1]:
        assert row["ranks"] == "2" and row["tokens"] == "64" and float(row["ms"]) > 0 and row["failure"] == ""
    for row in rows[1:-1]:
        assert float(row["speed_up"]) == pytest.approx(float(rows[0]["ms"]) / float(row["ms"]), rel=1e-2)
    assert "has no attention of CPUs" in rows[-1]["failure"] and rows[-1]["ms"] == ""  # and the table goes on
    assert "speed-up" in done.stdout
    assert (tmp_path / "context_parallel.png").stat().st_size > 5000


def test_heads_that_do_not_fit(tmp_path):
    done = start("context_parallel.py", "--heads", 5, "--kv-heads", 2, "--out", tmp_path)
    assert done.returncode == 2 and "--kv-heads 2 does not divide --heads 5." in done.stderr


def test_a_package_that_is_not_installed_is_left_out(bench):
    every = list(bench.context_parallel.METHODS)
    assert bench.context_parallel.parse([]).method == (every if find_spec("yunchang") else every[:-1])
    assert bench.context_parallel.parse(["--method", "yunchang"]).method == ["yunchang"]


def test_yunchang_says_that_it_is_not_installed_or_is_timed(tmp_path):
    done = start("context_parallel.py", *SMALL, "--dtype", "fp32", "--method", "yunchang", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    row = rows_of(tmp_path / "context_parallel.csv")[1]
    if find_spec("yunchang"):
        assert row["failure"] == "" and float(row["ms"]) > 0
    else:
        assert "No module named 'yunchang'" in row["failure"] and row["ms"] == ""


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_yunchang_attends_to_the_whole_sequence(tmp_path, kv_heads):
    pytest.importorskip("yunchang")
    script = str(Path(__file__).with_name("yunchang_ranks.py"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, str(BENCHMARKS), str(kv_heads)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == "right"
