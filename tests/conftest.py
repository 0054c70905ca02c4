"""Fixtures of every test: where it runs (`device`) and which backend computes (`backend`).

A test that takes both runs once for each pair below; a pair without its hardware skips and says so. Inside the test
`flash_ext.use_backend(backend)` is active, so only that backend may answer. It may refuse only what REFUSALS grants it:
such a refusal is a visible skip, any other is a failure. A test marked `gpu` runs once for each backend of KERNELS.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Generator, Iterator
from types import SimpleNamespace

import hypothesis
import pytest
import torch
from commands import BENCHMARKS

import flash_ext

HAS_KERNELS = flash_ext.build_info()["cuda"]["enabled"]
KERNELS = ("sm80", "sm90")  # the backends with CUDA kernels
PLACES = {
    "cpu": ("cpu", "chunked"),
    "cuda": (*KERNELS, "chunked") if HAS_KERNELS else ("chunked",),
}

# What a backend may refuse: patterns of its reasons. The CPU and the chunked backend refuse nothing.
REFUSALS = {
    "cpu": r"(?!)",
    "sm80": r"head_dim(_v)? \d+ (is more than 256|in .* needs [\d,]+ bytes of shared memory)"
    r"|a softcap above 4096 is not supported in fp16 and bf16",
    "sm90": r"compute capability \d+\.\d is not 9\.0|only fp16 and bf16 are supported"
    r"|head_dim(_v)? \d+ is (more than 256|not a multiple of 8)"
    r"|(a softcap above 4096|a softcap|a dropout_p that rounds to 1|dropout) is not supported|scale is not between"
    r"|a mask, bias, slopes, softcap or dropout of at most 64 queries by 64 keys are not supported"
    r"|bias has rows that do not start at"
    r"|(a mask is|a bias is|alibi_slopes are|a band of one key is) not supported in (deterministic )?backward"
    r"|the gradient of (alibi_slopes|a bias|a bias that is not broadcast) is not supported"
    r"|(other heads of value than of key|fewer than 16 keys) are not supported in backward"
    r"|a backward without (grad_out|the gradient of (query|key|value)) is not supported"
    r"|the gradient of a broadcast (query|key|value) is not supported"
    r"|(query|key|value|grad_out) (has a last dimension|has a stride|does not start|repeats|has more than 2 batch)",
    "chunked": r"(?!)",
}

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("random", deadline=None, print_blob=True)
hypothesis.settings.load_profile("random" if os.environ.get("FLASH_EXT_FUZZ") == "random" else "ci")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU; skips visibly where there is none")
    config.addinivalue_line("markers", "sm90: needs the Hopper kernels and a GPU that runs them; skips visibly without")
    config.addinivalue_line("markers", "slow: heavier than the rest; -m 'not slow' leaves it out")
    config.addinivalue_line("markers", "fuzz: many random examples")
    if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        # Otherwise each worker has as many threads as there are cores, and all fight for them.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(workers)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = metafunc.fixturenames
    places = {"cuda": KERNELS} if metafunc.definition.get_closest_marker("gpu") else PLACES
    if "backend" in names:
        pairs = [
            pytest.param(device, backend, marks=[pytest.mark.gpu] if device == "cuda" else [], id=f"{device}-{backend}")
            for device, backends in places.items()
            for backend in backends
        ]
        metafunc.parametrize(("device", "backend"), pairs, indirect=True)
    elif "device" in names:
        devices = [pytest.param(name, marks=[pytest.mark.gpu] if name == "cuda" else []) for name in places]
        metafunc.parametrize("device", devices, indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """'cpu' or 'cuda'."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    if request.node.get_closest_marker("sm90"):
        if "sm90" not in flash_ext.build_info()["cuda"]["backends"]:
            pytest.skip("this build has no sm90 kernels")
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs a GPU of compute capability 9.0")
    return request.param


@pytest.fixture
def backend(request: pytest.FixtureRequest, device: str) -> Iterator[str]:
    """The only backend that may answer during the test."""
    if request.param in KERNELS and request.param not in flash_ext.build_info()["cuda"]["backends"]:
        pytest.skip(f"this build has no {request.param} kernels")
    with flash_ext.use_backend(request.param):
        yield request.param


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The files of benchmarks/ as modules; they are scripts, not a package, so the names are removed again."""
    names = [path.stem for path in BENCHMARKS.glob("*.py")]
    before = {name: sys.modules.pop(name, None) for name in names}
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def is_granted_refusal(backend: str | None, error: Exception) -> bool:
    return backend in REFUSALS and bool(re.search(rf"{backend} refuses: ({REFUSALS[backend]})", str(error)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Turns a granted refusal into a skip with its reason."""
    try:
        return (yield)
    except RuntimeError as error:  # AttentionError, or through torch.ops the plain type
        params = getattr(getattr(item, "callspec", None), "params", {})
        if is_granted_refusal(params.get("backend"), error):
            pytest.skip(str(error))
        raise
