"""Fixtures of every test: where it runs (`device`) and which backend computes (`backend`).

A test that takes both runs once for each pair below. Inside the test `flash_ext.use_backend(backend)` is active, so
only that backend may answer. It may refuse only what REFUSALS grants it: such a refusal is a visible skip, any other
is a failure. A test marked `gpu` runs once for each backend of KERNELS. One that takes `combination` as well runs with
each combination of features that is tried with the backend (features.py).

What this machine or this build cannot run (`lacking`) is deselected before its fixtures are set up, and the summary
says in one line for each reason how many tests that were. pyproject.toml says what the markers mean.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import Any

import features
import hypothesis
import pytest
import torch
from commands import BENCHMARKS

import flash_ext

CUDA = flash_ext.build_info()["cuda"]
KERNELS = ("sm80", "sm90")  # the backends with CUDA kernels
PLACES = {
    "cpu": ("cpu", "chunked"),
    "cuda": (*KERNELS, "chunked") if CUDA["enabled"] else ("chunked",),
}

# What a backend may refuse: patterns of its reasons, of which one is enough. The CPU and the chunked backend refuse
# nothing.
REFUSALS = {
    "cpu": r"(?!)",
    "sm80": r"head_dim(_v)? \d+ is more than 256|a block needs [\d,]+ bytes of shared memory"
    r"|softcap \S+ is more than 4096|no support for float64|the bias of packed sequences is broadcast",
    "sm90": r"compute capability \d+\.\d is (less|more) than 9\.0|no support for (float32|float64)"
    r"|no support for (.* )?packed sequences"
    r"|head_dim(_v)? \d+ is (more than (128|256)|not a multiple of 8)"
    r"|(softcap|dropout_p|scale) \S+ is (less|more) than|len_[qk] \d+ is less than 65"
    r"|bias has rows that do not start at"
    # Of backward.
    r"|no support for (.* )?(a band of one key|the gradient of (alibi_slopes|a bias)|other heads of value than of key)"
    r"|no support for (.* )?(a softcap|deterministic results)"  # where a bias wants its gradient
    r"|all queries together see \d+ keys, fewer than 16|sequences have fewer than 16 keys in the mean"
    r"|a backward without grad_out is not supported"
    r"|the gradient of a broadcast (query|key|value) is not supported"
    r"|(query|key|value|grad_out) (has a last dimension|has a stride|does not start|repeats|has more than 2 batch)",
    "chunked": r"(?!)",
}

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("random", deadline=None, print_blob=True)
hypothesis.settings.load_profile("random" if os.environ.get("FLASH_EXT_FUZZ") == "random" else "ci")


# A file whose text says one of these asks what the build contains: all its tests are marked `build`, which .ci/run
# chooses for the build with kernels, but for those of a backend that is the same in every build.
ASKS_THE_BUILD = re.compile(r"build_info|explain|sm80|sm90")
IN_EVERY_BUILD = ("cpu", "chunked")

LEFT_OUT = pytest.StashKey[Counter[str]]()  # by the two halves of the sentence, which a "|" parts


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = Counter()
    if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
        # Otherwise each worker, and each process that it starts, has as many threads as there are cores, and all fight
        # for them.
        threads = max(1, (os.cpu_count() or 1) // int(workers))
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: a worker a core, also where two share one; few where they share the memory of a GPU."""
    return min(len(os.sched_getaffinity(0)), 4 if torch.cuda.is_available() else 8)


def parameter(item: pytest.Item, name: str) -> object:
    """What the test gets by that name, where it is parametrized."""
    return getattr(item, "callspec", SimpleNamespace(params={})).params.get(name)


def lacking(item: pytest.Item) -> str | None:
    """What a test needs and is not here, and why, parted by "|"; None where it can run."""
    gpu, sm90 = torch.cuda.is_available(), item.get_closest_marker("sm90")
    gpus = max((count for mark in item.iter_markers("gpu") for count in mark.args), default=1)
    needed = {name for mark in item.iter_markers("kernels") for name in mark.args}
    needed |= {parameter(item, "backend")} & set(KERNELS)
    needed |= {"sm90"} if sm90 else set()
    if item.get_closest_marker("gpu") and not gpu:
        return "need a CUDA GPU|torch sees none here"
    if gpus > 1 and torch.cuda.device_count() < gpus:
        return f"need {gpus} CUDA GPUs|torch sees {torch.cuda.device_count()} here"
    if absent := sorted(needed - set(CUDA["backends"])):
        kind = " and ".join(absent) if CUDA["enabled"] else "CUDA"
        return f"need {kind} kernels|this build has none, because {CUDA['reason']}"
    if sm90 and torch.cuda.get_device_capability() != (9, 0):
        return "need a GPU of compute capability 9.0|the one here is of {}.{}".format(
            *torch.cuda.get_device_capability()
        )
    if item.get_closest_marker("no_gpu") and gpu:
        return "are about a machine without a GPU|torch sees one here"
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    """Marks `build` before -m chooses; of what it chose, deselects what cannot run here."""
    asks = {path: bool(ASKS_THE_BUILD.search(path.read_text())) for path in {item.path for item in items}}
    for item in items:
        if asks[item.path] and parameter(item, "backend") not in IN_EVERY_BUILD:
            item.add_marker("build")
    yield
    reasons = {item: lacking(item) for item in items}
    left_out = [item for item in items if reasons[item]]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not reasons[item]]
        config.stash[LEFT_OUT].update(filter(None, reasons.values()))
    if hasattr(config, "workeroutput"):  # of xdist: the process that prints collects nothing itself
        config.workeroutput["left_out"] = dict(config.stash[LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every worker of xdist collects the same tests; what one of them says is kept."""
    node.config.stash[LEFT_OUT] = Counter(
        getattr(node, "workeroutput", {}).get("left_out", node.config.stash[LEFT_OUT])
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for reason, count in config.stash[LEFT_OUT].items():
        need, why = reason.split("|")
        terminalreporter.write_line(f"{count} tests that {need} were left out: {why}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = metafunc.fixturenames
    places = {"cuda": KERNELS} if metafunc.definition.get_closest_marker("gpu") else PLACES
    if "backend" in names:
        pairs = [
            (device, backend, [pytest.mark.gpu] if device == "cuda" else [], f"{device}-{backend}")
            for device, backends in places.items()
            for backend in backends
        ]
        if "combination" in names:
            params = [
                pytest.param(device, backend, combination, marks=marks, id=f"{where}-{combination}")
                for device, backend, marks, where in pairs
                for combination in features.tried(backend)
            ]
            metafunc.parametrize(("device", "backend", "combination"), params, indirect=["device", "backend"])
        else:
            params = [pytest.param(device, backend, marks=marks, id=where) for device, backend, marks, where in pairs]
            metafunc.parametrize(("device", "backend"), params, indirect=True)
    elif "device" in names:
        devices = [pytest.param(name, marks=[pytest.mark.gpu] if name == "cuda" else []) for name in places]
        metafunc.parametrize("device", devices, indirect=True)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """What nobody writes is NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """'cpu' or 'cuda'."""
    return request.param


@pytest.fixture
def backend(request: pytest.FixtureRequest, device: str) -> Iterator[str]:
    """The only backend that may answer during the test."""
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


@pytest.fixture(autouse=True)
def _gpu_memory() -> Iterator[None]:
    """What a test leaves in torch's cache is the card's again, which several workers share."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**29:
        torch.cuda.empty_cache()


def is_granted_refusal(backend: str | None, error: Exception) -> bool:
    return backend in REFUSALS and bool(re.search(rf"{backend} refuses: (.*, )?({REFUSALS[backend]})", str(error)))


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
