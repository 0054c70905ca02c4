"""decode.py: what its cases ask for, what it counts, and what it says without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import start

import flash_ext

KEYS = ("query", "key_cache", "value_cache")


def test_bases_are_cases_before_them(bench: SimpleNamespace) -> None:
    names: list[str] = []
    for case in bench.decode.CASES:
        assert not case.base or case.base in names
        names.append(case.name)
    assert len(set(names)) == len(names)


def test_bytes_are_those_of_the_rows_that_there_are(bench: SimpleNamespace) -> None:
    case = bench.decode.Case("", 3, 40, heads=(4, 2), cols=16)
    assert bench.decode.bytes_of(case) == 3 * 40 * 2 * 16 * 2 * 2
    lengths = bench.decode.lengths_of(bench.decode.Case("", 9, 4000, lengths="log-normal"))
    assert (
        lengths.dtype == torch.int32 and lengths.unique().numel() > 4 and 64 <= lengths.min() <= lengths.max() <= 4000
    )
    assert bench.decode.bytes_of(bench.decode.Case("", 9, 4000, fp8=True, lengths="log-normal")) == lengths.sum() * 2048


@pytest.mark.parametrize(
    "options", [{}, {"page": 8}, {"fp8": True}, {"added": 1, "rotary": True, "page": 8}, {"queries": 3}]
)
def test_arguments_are_those_of_a_call(options: dict[str, object], bench: SimpleNamespace) -> None:
    call = bench.decode.arguments_of(bench.decode.Case("", 2, 32, heads=(4, 2), cols=16, **options), "cpu")
    out = flash_ext.attention_with_cache(**call)
    assert out.shape == (2, options.get("queries", 1), 4, 16) and out.isfinite().all()
    assert int(call["cache_seqlens"][0]) + options.get("added", 0) == 32


@pytest.mark.no_gpu
def test_without_a_gpu_it_says_so() -> None:
    done = start("decode.py")
    assert done.returncode == 2 and "decode.py needs a CUDA GPU" in done.stderr


def test_rows(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speed from the bytes of the cache; a case over the one it is compared with."""
    seconds = iter((1e-3, 2e-3, 1.5e-3))

    def interleave(calls: dict[str, Any], *rest: Any) -> dict[str, Any]:
        return {name: bench.harness.Timing((next(seconds),)) for name in calls}

    monkeypatch.setattr(bench.decode, "interleave", interleave)
    monkeypatch.setattr(bench.decode, "arguments_of", lambda case, device: dict.fromkeys(KEYS, torch.empty(1, 1, 1, 1)))
    args, times = bench.decode.Args(peers=("flash_ext", "torch-cudnn")), {}
    plain = bench.decode.Case("plain", 4, 1000, heads=(4, 2), cols=64)
    rows = bench.decode.rows_of(plain, args, 100.0, times)
    rows += bench.decode.rows_of(bench.decode.Case("four", 4, 1000, queries=4, base="plain"), args, 100.0, times)
    assert [(row["case"], row["peer"], row["us"]) for row in rows] == [
        ("plain", "flash_ext", "1000.0"), ("plain", "torch-cudnn", "2000.0"), ("four", "flash_ext", "1500.0"),
    ]  # fmt: skip
    assert [row["over_base"] for row in rows] == ["", "", "1.500"]
    assert (rows[0]["gbs"], rows[0]["of_copy"]) == ("2", "0.020")  # 4 x 1000 rows, 2 heads of 64, K and V of 2 bytes
    lines = bench.tables.markdown(bench.decode.shown(rows))
    assert "| four | flash_ext | 1500.0 |" in lines
