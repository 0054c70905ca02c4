"""Promise: the tables of docs/learn/profiling.md are those of the files that its commands wrote."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("tyro")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def tutorial() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tutorial", ROOT / "benchmarks/tutorial.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_its_files_say(tutorial: ModuleType) -> None:
    page = tutorial.PAGE.read_text()
    assert len(tutorial.BLOCK.findall(page)) == page.count("<!-- end -->") >= 10
    assert tutorial.fill(page, tutorial.RESULTS) == page, "run python benchmarks/tutorial.py"


def test_a_changed_number_is_found(tutorial: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "a.md"
    report.write_text("# A\n\n## Phases\n\n| x | y |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n\n## Other\n\n| z |\n")
    (tmp_path / "b.txt").write_text("one\ntwo\nthree\n")
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- table: a.md, Phases, 1 rows -->\n<!-- end -->\n<!-- lines: b.txt, 2-3 -->\n<!-- end -->\n"
        "<!-- lines: c.txt, 1-2 -->\n<!-- end -->\n<!-- table: a.md, all -->\n<!-- end -->\n"
    )
    monkeypatch.setattr(tutorial, "PAGE", page)
    monkeypatch.setattr(tutorial, "RESULTS", tmp_path)
    tutorial.main()
    text = page.read_text()
    assert text.count("| 1 | 2 |") == 2 and text.count("| 3 | 4 |") == 1 and "| z |" in text
    assert "```\ntwo\nthree\n```" in text
    assert tutorial.MISSING in text
    tutorial.main(check=True)
    page.write_text(text.replace("| 1 | 2 |", "| 1 | 9 |", 1))
    with pytest.raises(SystemExit, match="is not what its files say"):
        tutorial.main(check=True)
