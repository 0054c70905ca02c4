"""Promise: communication.py measures collectives and three ways to average gradients, on ranks that it starts."""

from __future__ import annotations

import math

import pytest
from commands import rows_of, start

pytest.importorskip("tyro")
pytest.importorskip("pandas")
pytest.importorskip("matplotlib")


def test_the_bytes_that_a_rank_must_send(bench):
    share = bench.communication.share_sent
    assert [share(name, 4) for name in bench.communication.COLLECTIVES] == [1.5, 0.75, 0.75, 0.75]


@pytest.mark.parametrize(("latency", "bandwidth"), [(5e-6, 2e9), (0.0, 1e8)])
def test_the_fit_finds_latency_and_bandwidth(bench, latency, bandwidth):
    sent = [1e6, 4e6, 1.6e7, 1e9]
    found = bench.communication.fit(sent, [latency + x / bandwidth for x in sent])
    assert found == pytest.approx((latency, bandwidth), rel=1e-6, abs=1e-12)


def test_a_fit_through_noise_has_no_negative_latency(bench):
    assert bench.communication.fit([1.0, 2.0, 4.0], [1.0, 2.2, 5.0])[0] == 0
    assert all(map(math.isnan, bench.communication.fit([1.0], [1.0])))


def test_collectives_on_two_ranks(tmp_path):
    done = start("communication.py", "--device", "cpu", "--megabytes", "1,2", "--repeats", 2, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "communication.csv")
    names = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
    assert [(row["collective"], row["megabytes"]) for row in rows] == [(name, mb) for name in names for mb in "12"]
    for row in rows:
        assert row["ranks"] == "2" and float(row["ms"]) > 0 and float(row["fit_gbs"]) > 0 and row["commit"]
        most = int(row["megabytes"]) * 1e6
        assert int(row["sent_bytes"]) == (most if row["collective"] == "all-reduce" else most / 2)
        assert float(row["bus_gbs"]) == pytest.approx(int(row["sent_bytes"]) / float(row["ms"]) / 1e6, rel=1e-2)
    assert "bus GB/s" in done.stdout and "latency, us" in done.stdout
    assert (tmp_path / "communication.png").stat().st_size > 5000


def test_three_ways_to_average_gradients(tmp_path):
    small = ("--context", 16, "--batch", 1, "--repeats", 2, "--nvtx")
    done = start("communication.py", "--suite", "ddp", "--device", "cpu", *small, "--out", tmp_path / "ddp.csv")
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "ddp.csv")
    assert [row["way"] for row in rows] == ["none", "naive", "flat", "overlapped"]
    assert len({row["sent_bytes"] for row in rows[1:]}) == 1 and rows[0]["sent_bytes"] == "0"
    for row in rows:
        parts = sum(float(row[f"{name}_ms"]) for name in ("forward", "backward", "communication", "optimizer"))
        assert parts > 0 and float(row["step_ms"]) > 0 and float(row["tokens_s"]) > 0
    assert rows[0]["exposed_ms"] == "0.000"
    assert (tmp_path / "ddp.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ranks", "1"), "'1' is not a whole number of at least 2"),
        (("--collective", "gossip"), "invalid choice: 'gossip'"),
        (("--size", "huge"), "--size huge is none of tiny, small"),
    ],
)
def test_bad_arguments_are_told_in_one_sentence(bench, arguments, words):
    with pytest.raises(bench.harness.BenchmarkError, match=words):
        bench.communication.parse(["--device", "cpu", *arguments])


def test_ranks_are_torchruns_where_it_started_them(bench, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(bench.harness.BenchmarkError, match="torchrun started this one"):
        bench.communication.parse(["--device", "cpu", "--ranks", "2"])
