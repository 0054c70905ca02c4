"""Promise: what a release consists of agrees: its version, changes, how to cite it, a reference of what is public."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import flash_ext

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    pytest.importorskip("pdoc")
    spec = importlib.util.spec_from_file_location("reference", ROOT / "tools/reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_version_is_one() -> None:
    version = flash_ext.__version__
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()
    assert re.search(rf"^version: {re.escape(version)}$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert f"\n## {version} " in changes or f"itself {version} and" in changes.partition("## Unreleased")[2]


def test_the_citation_has_what_its_format_asks_for() -> None:
    citation = pytest.importorskip("yaml").safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "license", "version"} <= citation.keys()
    for entry in citation["references"]:
        assert {"type", "title", "authors", "year", "url"} <= entry.keys()
        assert all({"family-names", "given-names"} == author.keys() for author in entry["authors"])


def test_the_reference_has_all_that_is_public(reference: ModuleType, tmp_path: Path) -> None:
    assert reference.main(["--out", str(tmp_path)]) == 0  # warnings are errors
    for name in reference.MODULES:
        page = (tmp_path / f"{name.replace('.', '/')}.html").read_text()
        for member in getattr(importlib.import_module(name), "__all__", ()):
            assert f'id="{member}"' in page, f"{name}.{member}"


def test_what_has_no_docstring_is_an_error(
    reference: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(flash_ext.explain, "__doc__", None)
    assert reference.main(["--out", str(tmp_path)]) == 1
    assert "flash_ext.explain" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
