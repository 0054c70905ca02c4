"""The commands of benchmarks/ and examples/ as a user starts them, and the CSVs that they write."""

from __future__ import annotations

import csv
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"


def load_example(name: str, arguments: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """examples/NAME.py as a module, whose main() sees these arguments."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments.split()])
    return module


def start(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a benchmark without a terminal."""
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def rows_of(path: Path) -> list[dict[str, str]]:
    """A CSV's rows."""
    with path.open() as file:
        return list(csv.DictReader(file))
