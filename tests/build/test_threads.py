"""Promise: calls from many threads do not disturb each other, and use_backend belongs to its thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import evaluate, make_inputs, rand

import flash_ext


def together(*works: Callable[[], None]) -> None:
    """Runs all at once; the first exception of any is raised."""
    with ThreadPoolExecutor(len(works)) as pool:
        for future in [pool.submit(work) for work in works]:
            future.result()


def chosen_backend(device: str) -> str:
    q = torch.empty(1, 1, 8, 8, device=device)
    return flash_ext.explain(q, q, q).forward.backend


def test_concurrent_calls_of_different_shapes(device: str, backend: str) -> None:
    cases = []
    for i in range(4):
        inputs = make_inputs((1, 2, 20 + 13 * i, 16), (1, 1 + i % 2, 30 + 7 * i, 16), device=device)
        inputs["bias"] = rand(20 + 13 * i, 1, device=device)
        cases.append(inputs)
    expected = [evaluate(flash_ext.attention, inputs, {"return_lse": True}) for inputs in cases]

    def work(i: int) -> None:
        with flash_ext.use_backend(backend):
            for _ in range(10):
                got = evaluate(flash_ext.attention, cases[i], {"return_lse": True})
                for name, tensor in expected[i].items():
                    torch.testing.assert_close(got[name], tensor)

    together(*(lambda i=i: work(i) for i in range(4)))


def test_use_backend_is_thread_local(device: str) -> None:
    default = chosen_backend(device)
    other = "chunked"
    inside, done = threading.Event(), threading.Event()

    def holder() -> None:
        with flash_ext.use_backend(other):
            inside.set()
            assert done.wait(60)
            assert chosen_backend(device) == other

    def observer() -> None:
        assert inside.wait(60)
        try:
            assert chosen_backend(device) == default
        finally:
            done.set()

    together(holder, observer)
    assert chosen_backend(device) == default


def test_use_backend_nests_and_restores(device: str) -> None:
    default = chosen_backend(device)
    with flash_ext.use_backend("chunked"):
        with flash_ext.use_backend(default):
            assert chosen_backend(device) == default
        assert chosen_backend(device) == "chunked"
        with pytest.raises(KeyError), flash_ext.use_backend(default):
            raise KeyError
        assert chosen_backend(device) == "chunked"
    assert chosen_backend(device) == default


def test_backward_keeps_the_backend_of_forward(device: str) -> None:
    """The backend that forward was told answers backward, wherever and whenever that is called."""
    inputs = make_inputs((1, 2, 30, 300), (1, 2, 40, 300), device=device)
    q = inputs["query"].requires_grad_()
    with flash_ext.use_backend("chunked"):
        out = flash_ext.attention(**inputs)
        expected = torch.autograd.grad(out.sum(), q, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out.sum(), q)[0], expected)


def test_backward_from_another_thread(device: str, backend: str) -> None:
    inputs = [t.requires_grad_() for t in make_inputs((1, 2, 30, 16), (1, 2, 40, 16), device=device).values()]
    out = flash_ext.attention(*inputs, causal=True)
    expected = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    results = []
    together(lambda: results.extend(torch.autograd.grad(out.sum(), inputs)))
    for got, want in zip(results, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_environment_variable_names_the_backend() -> None:
    import subprocess
    import sys

    code = (
        "import torch, flash_ext; q = torch.zeros(1, 1, 4, 8); "
        "print(flash_ext.explain(q, q, q).forward.backend); "
        "inner = flash_ext.use_backend('cpu'); inner.__enter__(); print(flash_ext.explain(q, q, q).forward.backend)"
    )
    import os

    environment = os.environ | {"FLASH_EXT_BACKEND": "chunked"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["chunked", "cpu"], done.stderr[-2000:]
    environment["FLASH_EXT_BACKEND"] = "turbo"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "turbo" in done.stderr
