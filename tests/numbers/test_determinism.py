"""Promise: deterministic results are bit-identical over runs, whatever runs beside them; nothing warns or raises."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import DTYPES, Results, evaluate, make_inputs, name_of, rand

import flash_ext

RUNS = 20


@pytest.fixture
def globally() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def case(dtype: torch.dtype, device: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Every gradient, with reductions over groups, over a broadcast bias and over slopes."""
    inputs = make_inputs((2, 4, 130, 32), (2, 2, 150, 32), (2, 1, 150, 32), dtype=dtype, device=device)
    inputs["bias"] = rand(1, 4, 1, 150, dtype=dtype, device=device)
    inputs["alibi_slopes"] = torch.rand(4).to(device)
    return inputs, {"causal": True, "align": "bottom_right", "return_lse": True}


def assert_identical(first: Results, other: Results) -> None:
    for name, tensor in first.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("how", ["argument", "global"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_bit_identical_over_runs(
    dtype: torch.dtype, how: str, device: str, backend: str, request: pytest.FixtureRequest
) -> None:
    if how == "global":
        request.getfixturevalue("globally")
    inputs, options = case(dtype, device)
    if how == "argument":
        options["deterministic"] = True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = evaluate(flash_ext.attention, inputs, options)
        for _ in range(RUNS - 1):
            assert_identical(first, evaluate(flash_ext.attention, inputs, options))


def test_bit_identical_beside_other_work(device: str, backend: str) -> None:
    """Other threads (and, on a GPU, other streams) compute meanwhile."""
    inputs, options = case(torch.float32, device)
    options["deterministic"] = True
    first = evaluate(flash_ext.attention, inputs, options)
    stop = threading.Event()

    def disturb() -> None:
        x = rand(256, 256, device=device)
        stream = torch.cuda.Stream() if device == "cuda" else None
        with torch.cuda.stream(stream):
            while not stop.is_set():
                x = (x @ x).tanh()

    threads = [threading.Thread(target=disturb) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(RUNS - 1):
            with torch.cuda.stream(torch.cuda.Stream() if device == "cuda" else None):
                other = evaluate(flash_ext.attention, inputs, options)
                if device == "cuda":
                    torch.cuda.synchronize()
            assert_identical(first, other)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_bit_identical_from_many_threads(device: str, backend: str) -> None:
    inputs, options = case(torch.float32, device)
    options["deterministic"] = True
    first = evaluate(flash_ext.attention, inputs, options)
    results: list[Results] = []

    def work() -> None:
        with flash_ext.use_backend(backend):
            results.extend(evaluate(flash_ext.attention, inputs, options) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20
    for other in results:
        assert_identical(first, other)


def test_deterministic_is_taken_at_forward_time(device: str, backend: str, globally: None) -> None:
    """The switch as it stood in forward decides for backward; the values obey the plain meaning."""
    inputs, options = case(torch.float32, device)
    strict = evaluate(flash_ext.attention, inputs, options)
    torch.use_deterministic_algorithms(False)
    loose = evaluate(flash_ext.attention, inputs, options | {"deterministic": False})
    for name, tensor in strict.items():
        torch.testing.assert_close(loose[name], tensor, atol=1e-4, rtol=1e-4)


def test_broadcast_reductions_are_deterministic(device: str, backend: str, globally: None) -> None:
    """Gradients of inputs whose leading dims are broadcast."""
    inputs = make_inputs((3, 4, 70, 32), (1, 4, 90, 32), (3, 1, 90, 32), device=device)
    inputs["attn_mask"] = rand(70, 90, device=device)
    first = evaluate(flash_ext.scaled_dot_product_attention, inputs)
    for _ in range(RUNS - 1):
        assert_identical(first, evaluate(flash_ext.scaled_dot_product_attention, inputs))


def test_dropout_is_deterministic_under_a_seed(device: str, backend: str, globally: None) -> None:
    inputs, options = case(torch.float32, device)
    runs = []
    for _ in range(3):
        torch.manual_seed(9)
        runs.append(evaluate(flash_ext.attention, inputs, options | {"dropout_p": 0.3}))
    assert_identical(runs[0], runs[1])
    assert_identical(runs[0], runs[2])
