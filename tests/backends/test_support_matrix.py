"""Promise: the tables of what is supported, in README.md and docs/use/support.md, are what explain says."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.mark.kernels("sm90", "sm80")
@pytest.mark.no_gpu
def test_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    tool = importlib.import_module("support_matrix")
    for path, table in tool.tables().items():
        text = path.read_text()
        assert tool.with_table(text, table) == text, f"{path.name}: run tools/support_matrix.py"
        assert text.count("| feature |") == 1
