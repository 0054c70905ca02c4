"""Promise: the judge of random calls (tests/fuzz/) allows what docs/use/numerics.md says, and finds larger faults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from fuzz import fused as arithmetic
from fuzz import judge as judging
from fuzz.cases import Case, build, draw
from fuzz.fused import Fused, Kind
from torch import Tensor


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: others would wait in loops."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def cases(dtype: str) -> Iterator[Case]:
    """Small ones of finite numbers and, mostly, every gradient."""
    for number in range(1500):
        case = replace(draw(3, number), special=None, low=None, numbers="normal", autocast=None, mean=0.0)
        if case.entry == "attention" and number % 3 == 0:
            case = replace(case, options=(*(pair for pair in case.options if pair[0] != "softcap"), ("softcap", 3.0)))
        if case.dtype == dtype and 16 <= case.scores[-1] < 70 and 1 < case.scores[-2] < 70 and len(case.wants) >= 3:
            yield case


def kept(case: Case) -> Tensor | None:
    generator = torch.Generator().manual_seed(case.number)
    return torch.rand(case.scores, generator=generator) >= case.dropout_p if case.dropout_p > 0 else None


@pytest.mark.parametrize("far", [-1.0, float("inf")], ids=["own_sums", "lse_and_out"])
def test_fused_arithmetic_in_float64_is_the_truth(far: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every option, and either way to have P and delta."""
    monkeypatch.setattr(arithmetic, "FAR", {torch.float64: far})
    seen: set[str] = set()
    for case in cases("float64"):
        inputs, keep = build(case, "cpu"), kept(case)
        truth = judging._truth(case, inputs, keep)
        fused = judging._fused(case, inputs, keep, "cuda", None)
        assert fused.keys() == truth.keys()
        for name, expected in truth.items():
            finite = expected.isfinite()
            # Slopes are float32, and so is their gradient.
            limit = torch.finfo(torch.float32).eps if name == "grad of alibi_slopes" else 1e-12
            size = expected[finite].abs().amax().clamp_min(1) if finite.any() else 1
            assert ((fused[name] - expected)[finite].abs() <= limit * size).all(), (name, case.describe())
        seen |= {name for name, value in case.options if value}
        seen |= {name for name in ("bias", "mask", "slopes", "dropout_p") if getattr(case, name)}
        seen |= {f"of {name}" for name in case.outputs}
    assert seen >= {"causal", "window", "softcap", "bias", "mask", "slopes", "dropout_p", "of out", "of lse"}


def test_products_of_two_parts() -> None:
    """Two factors lack up to 2^-23 each, lo lo 2^-22, and what is added up loses three."""
    a, b = torch.randn(1000, 1), torch.randn(1, 1000)
    mode = Fused(Kind(torch.float32, tensor_cores=True, far=16.0, exact=False, own_delta=True))
    exact = a.double() @ b.double()
    error = (mode._product(torch.mm, a, b) - exact).abs() / exact.abs()
    assert 2**-24 < error.max() <= 2**-22 + (2 + 3 * 2**0.5 + 1) * 2**-23


def test_a_row_without_keys_keeps_its_lse() -> None:
    lse = torch.tensor([-torch.inf, 1.0, torch.nan])
    for _ in range(20):
        off = Fused(Kind(torch.float32, tensor_cores=True, far=16.0, exact=False, own_delta=True)).off_by_a_unit(lse)
        assert off[0] == -torch.inf and abs(off[1] - 1) <= 2**-23 and off[2].isnan()


FAULTS = {
    "a_part_in_a_thousand": lambda x: x * 1.001,
    "another_row": lambda x: torch.cat((x[..., 1:2, :], x[..., 1:, :]), -2),
    "a_row_of_zeros": lambda x: torch.cat((torch.zeros_like(x[..., :1, :]), x[..., 1:, :]), -2),
}


@pytest.mark.parametrize(
    ("dtype", "fault"),
    [("float32", "a_part_in_a_thousand")]
    + [(dtype, fault) for dtype in ("float32", "float16", "bfloat16") for fault in ("another_row", "a_row_of_zeros")],
)
def test_the_judge_finds_faults(dtype: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each result by itself, by the limits of a GPU's kernels."""
    ours, fused = judging._ours, judging._fused
    monkeypatch.setattr(judging, "RESAMPLES", 1)
    monkeypatch.setattr(judging, "_fused", lambda case, inputs, keep, *_: fused(case, inputs, keep, "cuda", None))
    found = 0
    for case in list(islice(cases(dtype), 4)):
        # No sink, beside which a row's numbers may all be small.
        wants = tuple(name for name in case.wants if name != "sinks")
        case = replace(case, dropout_p=0.0, mask=None, sinks=None, wants=wants, options=(), outputs=("out",))
        got, _ = ours(case, build(case, "cpu"), "cpu", None)
        for name in got.keys() & {"out", "grad of query", "grad of key", "grad of value"}:
            changed = got | {name: FAULTS[fault](got[name])}
            monkeypatch.setattr(judging, "_ours", lambda *_, changed=changed: (changed, None))
            wrong: Any = judging.judge(case, "cpu", None).wrong
            assert len(wrong) == 1 and wrong[0].startswith(f"{name}:"), (name, wrong, case.describe())
            found += 1
    assert found >= 12
