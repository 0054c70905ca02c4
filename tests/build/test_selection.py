"""Promise: what a machine or a build cannot run is left out before any of it runs; a line for each reason says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import conftest
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
ALL = {"enabled": True, "backends": ["sm80", "sm90"], "reason": "FLASH_EXT_CUDA=ON"}
NONE = {"enabled": False, "backends": [], "reason": "AUTO sees no GPU here"}


class Item:
    """As much of a test as `lacking` looks at."""

    def __init__(self, *marks: pytest.MarkDecorator, **params: str) -> None:
        self.marks = [decorator.mark for decorator in marks]
        self.callspec = type("CallSpec", (), {"params": params})

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return [mark for mark in self.marks if mark.name == name]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(iter(self.iter_markers(name)), None)


MARK = pytest.mark
NO_GPU = "need a CUDA GPU|torch sees none here"
NO_KERNELS = "need CUDA kernels|this build has none, because AUTO sees no GPU here"


@pytest.mark.parametrize(
    ("item", "cuda", "capability", "expected"),
    [
        (Item(), NONE, None, None),
        (Item(backend="cpu"), NONE, None, None),
        (Item(MARK.gpu), ALL, None, NO_GPU),
        (Item(MARK.gpu(2)), ALL, None, NO_GPU),
        (Item(MARK.gpu(2)), ALL, (9, 0), "need 2 CUDA GPUs|torch sees 1 here"),
        (Item(MARK.gpu, MARK.kernels("sm80"), backend="sm80"), NONE, None, NO_GPU),
        (Item(MARK.gpu, backend="chunked"), NONE, (9, 0), None),
        (Item(MARK.gpu, backend="sm80"), NONE, (9, 0), NO_KERNELS),
        (Item(MARK.gpu, MARK.kernels("sm80")), NONE, (9, 0), NO_KERNELS),
        (Item(MARK.gpu, MARK.sm90), NONE, (9, 0), NO_KERNELS),
        (
            Item(MARK.gpu, MARK.sm90),
            ALL | {"backends": ["sm80"]},
            (8, 0),
            "need sm90 kernels|this build has none, because FLASH_EXT_CUDA=ON",
        ),
        (Item(MARK.gpu, MARK.sm90), ALL, (8, 0), "need a GPU of compute capability 9.0|the one here is of 8.0"),
        (Item(MARK.gpu, MARK.sm90), ALL, (9, 0), None),
        (Item(MARK.kernels("sm90"), MARK.no_gpu), ALL, None, None),
        (Item(MARK.kernels("sm90"), MARK.no_gpu), NONE, None, NO_KERNELS),
        (Item(MARK.kernels("sm90"), MARK.no_gpu), ALL, (9, 0), "are about a machine without a GPU|torch sees one here"),
    ],
)
def test_what_is_left_out(
    item: Any, cuda: dict, capability: tuple[int, int] | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "CUDA", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(capability is not None))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert conftest.lacking(item) == expected


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_gpu_that_is_asked_for_and_not_there(workers: str) -> None:
    """The run does not pretend: no test ran, which is an exit code of its own, and one line says why."""
    command = [sys.executable, "-m", "pytest", "-n", workers, "-m", "gpu", "tests/backends/test_kernels.py"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout + done.stderr
    line = "tests that need a CUDA GPU were left out: torch sees none here"
    assert [text.split(" ", 1)[1] for text in done.stdout.splitlines() if "left out" in text] == [line]
    assert "skipped" not in done.stdout and "error" not in done.stdout.lower()


def test_a_file_that_asks_the_build_is_marked(request: pytest.FixtureRequest) -> None:
    """... as this one does: it says sm90."""
    assert request.node.get_closest_marker("build")
