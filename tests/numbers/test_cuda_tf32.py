"""Promise: on a GPU float32 is computed with TF32 products when PyTorch's matrix products are, and only then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import check, evaluate, make_inputs, rand

import flash_ext

pytestmark = pytest.mark.gpu

MATMUL = torch.backends.cuda.matmul
L, S = 528, 640  # lengths that cuBLAS takes with TF32 too: rows of whole 16 bytes


@pytest.fixture
def tf32() -> Iterator[None]:
    MATMUL.allow_tf32 = True
    yield
    MATMUL.allow_tf32 = False


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "align": "bottom_right"},
    "window": {"window": (100, 30)},
    "softcap": {"softcap": 20.0},
    "deterministic": {"causal": True, "deterministic": True},
}


@pytest.mark.parametrize("head_dim", [8, 40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("case", CASES)
def test_obeys_the_rule(case: str, head_dim: int, tf32: None, device: str, backend: str) -> None:
    """At most twice the error of eager attention, whose products are PyTorch's under the same setting."""
    inputs = make_inputs((2, 4, L, head_dim), (2, 2, S, head_dim), device=device)
    check(flash_ext.attention, inputs, CASES[case] | {"return_lse": True})


@pytest.mark.parametrize("kind", ["mask", "bias", "broadcast bias", "alibi"])
def test_score_modifications_obey_the_rule(kind: str, tf32: None, device: str, backend: str) -> None:
    inputs = make_inputs((2, 4, L, 64), (2, 4, S, 64), device=device)
    inputs |= {
        "mask": lambda: {"mask": (torch.rand(2, 1, L, S) > 0.2).to(device)},
        "bias": lambda: {"bias": rand(2, 4, L, S, device=device)},
        "broadcast bias": lambda: {"bias": rand(1, 4, 1, S, device=device)},
        "alibi": lambda: {"alibi_slopes": rand(4, device=device).abs() / 16},
    }[kind]()
    check(flash_ext.attention, inputs)


def test_other_means_obey_the_rule(tf32: None, device: str, backend: str) -> None:
    for mean in (0.5, 2.0):
        check(flash_ext.attention, make_inputs((1, 2, L, 64), (1, 2, S, 64), device=device, mean=mean))


@pytest.mark.parametrize("lengths", [(8, 8), (8, 103), (312, 408), (511, 1024), (1024, 8)])
def test_few_queries_or_keys_keep_float32(lengths: tuple[int, int], tf32: None, device: str, backend: str) -> None:
    """As in PyTorch's own matrix products of such sizes."""
    len_q, len_k = lengths
    inputs = make_inputs((2, 4, len_q, 16), (2, 4, len_k, 16), device=device, mean=0.5)
    assert not flash_ext.explain(**inputs).forward.kernel.endswith("tf32")
    check(flash_ext.attention, inputs)


def test_the_setting_decides(device: str, backend: str) -> None:
    """TF32 kernels while a switch is on, of whichever name; the very bits of before once it is off."""
    inputs = make_inputs((1, 2, L, 64), (1, 2, S, 64), device=device)
    before = evaluate(flash_ext.attention, inputs, {"deterministic": True})

    def kernels() -> list[str]:
        plan = flash_ext.explain(**inputs)
        return [plan.forward.kernel, plan.backward.kernel]

    plain = kernels()
    assert not any("tf32" in name for name in plain)
    for level in ("high", "medium"):
        torch.set_float32_matmul_precision(level)
        try:
            assert kernels() == [f"{name}.tf32" for name in plain]
            rounded = evaluate(flash_ext.attention, inputs, {"deterministic": True})
        finally:
            torch.set_float32_matmul_precision("highest")
        for name, tensor in before.items():
            error = (rounded[name] - tensor).abs().max()
            assert 0 < error < 0.02 * tensor.abs().max(), name
    assert kernels() == plain
    after = evaluate(flash_ext.attention, inputs, {"deterministic": True})
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_do_not_change(dtype: torch.dtype, device: str, backend: str) -> None:
    inputs = make_inputs((1, 2, L, 64), (1, 2, S, 64), dtype=dtype, device=device)
    before = evaluate(flash_ext.attention, inputs, {"deterministic": True})
    MATMUL.allow_tf32 = True
    try:
        after = evaluate(flash_ext.attention, inputs, {"deterministic": True})
    finally:
        MATMUL.allow_tf32 = False
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_rows_with_nothing_to_attend(tf32: None, device: str, backend: str) -> None:
    inputs = make_inputs((1, 2, L, 64), (1, 2, S, 64), device=device)
    inputs["mask"] = torch.zeros(L, S, dtype=torch.bool, device=device)
    results = evaluate(flash_ext.attention, inputs, {"return_lse": True})
    assert all((tensor == 0).all() for name, tensor in results.items() if name != "lse")
    assert (results["lse"] == -float("inf")).all()
