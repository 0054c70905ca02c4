"""decode.py: what its cases ask for, what it counts, and what it says without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from commands import start

import flash_ext


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
