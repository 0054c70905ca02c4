"""Promise: context_parallel.py times every method of context parallel beside one rank, on ranks that it starts."""

from __future__ import annotations

import pytest
from commands import rows_of, start

pytest.importorskip("tyro")
pytest.importorskip("pandas")
pytest.importorskip("matplotlib")

SMALL = ("--device", "cpu", "--tokens", 64, "--heads", 4, "--kv-heads", 2, "--head-dim", 16, "--repeats", 2)


def test_every_method_on_two_ranks(tmp_path):
    done = start("context_parallel.py", *SMALL, "--dtype", "fp32", "--out", tmp_path)
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
