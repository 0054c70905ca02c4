"""Promise: tools/try_pages.py runs what a page says, and fails with a page. .ci/run calls it with a wheel."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import try_pages

PAGE = """
```python
x = 2
```
and then
```python
>>> for _ in range(2):
...     x += 1
>>> print(x)
4
>>> assert x == EXPECTED
```
```bash
false
```
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(try_pages, "ROOT", tmp_path)
    monkeypatch.setattr(try_pages, "PAGES", [tmp_path / "page.md"])
    return tmp_path / "page.md"


def test_a_page_is_one_program(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page.write_text(PAGE.replace("EXPECTED", "4"))
    assert try_pages.main([]) == 0 and capsys.readouterr().out.split() == ["page", "ok"]


def test_a_page_that_fails(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page.write_text(PAGE.replace("EXPECTED", "5"))
    assert try_pages.main(["page"]) == 1 and "AssertionError" in capsys.readouterr().out


def test_an_unknown_page(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert try_pages.main(["other"]) == 2 and "there is no page other; there are page" in capsys.readouterr().out


def test_every_page_with_python_is_found() -> None:
    found = {try_pages.name_of(path) for path in try_pages.PAGES if try_pages.program_of(path)}
    assert {"README", "use/api", "use/transformers", "use/distributed", "learn/index", "learn/profiling"} <= found


def test_a_page_of_a_package_is_left_out_without_it(
    page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page.write_text(PAGE.replace("EXPECTED", "5"))
    monkeypatch.setattr(try_pages, "NEEDS", {"page": ("sys", "no_such_package")})
    assert try_pages.main([]) == 0 and "left out: no_such_package not installed" in capsys.readouterr().out
    assert try_pages.main(["page"]) == 1
