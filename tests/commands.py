"""The commands of benchmarks/ as a user starts them, and the CSVs that they write."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def start(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a benchmark without a terminal."""
    command = [sys.executable, str(BENCHMARKS / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def rows_of(path: Path) -> list[dict[str, str]]:
    """A CSV's rows."""
    with path.open() as file:
        return list(csv.DictReader(file))
