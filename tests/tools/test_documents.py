"""Promise: the documents' links, files and commands exist, their Python runs, and README and lessons stay short.

The bash commands are of three kinds: those that .ci/run runs as they stand, those whose program a test or .ci/run runs
with arguments of its own, and those that nobody runs. Of the last two kinds the files that they name are looked for.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
KEPT = [page for page in PAGES if ROOT / "docs/lab" not in page.parents]  # its files name what was there that day
SOURCES = ("csrc", "flash_ext", "tests", "benchmarks", "tools", "cmake", "examples")
SUFFIXES = (".h", ".cuh", ".cpp", ".cu", ".in", ".py", ".cmake", ".txt")
LESSONS = sorted((ROOT / "docs/learn").glob("[0-9]-*.md"))

# How a command begins, and what runs it.
AS_IT_STANDS = {
    "pip install -q uv && uv run python benchmarks/train_lm.py --compare": ".ci/run",
    "pip install -q uv && uv run pytest": ".ci/run",
}
WITH_OTHER_ARGUMENTS = {
    "python -m flash_ext.doctor": "tests/tools/test_doctor.py",
    "python -m flash_ext.lab": "tests/lab/test_commands.py",
    "python -m flash_ext.profiling": "tests/tools/test_profiling.py",
    "python benchmarks/communication.py": "tests/tools/test_communication.py",
    "python benchmarks/context_parallel.py": "tests/tools/test_context_parallel_benchmark.py",
    "python benchmarks/image_models.py": "tests/tools/test_image_models.py",
    "python benchmarks/lab_times.py": "tests/tools/test_lab_times.py",
    "python benchmarks/train_lm.py": "tests/tools/test_benchmarks.py",
    "torchrun --nproc-per-node 2 benchmarks/train_lm.py": "tests/tools/test_parallel.py",
    "python3 tools/try_dockerfile.py": ".ci/run",
    "python tests/foreign/flash_attention.py": "tests/tools/test_foreign.py",
    "uv run --no-sync python tools/reference.py": "tests/tools/test_release.py",
    "uv run --no-sync python tools/torch_versions.py": ".ci/run",
    "uv run --no-sync cmake": ".ci/run",
    "uv run --no-sync ctest": ".ci/run",
    "uv run tools/build_wheel.py": ".ci/run",
    "uv run tools/hub_layout.py": "tests/integrations/test_kernel_hub.py",
    "uv run tools/try_wheel.py": ".ci/run",
    "uv run pytest": ".ci/run",
    "uv run python benchmarks/again.py": "tests/tools/test_again.py",
    "uv run python benchmarks/attention.py": "tests/tools/test_benchmarks.py",
    "uv run python benchmarks/report.py": "tests/tools/test_report.py",
    "uv run python benchmarks/sweep.py": "tests/tools/test_sweep.py",
    "uv run python benchmarks/train_lm.py": "tests/tools/test_benchmarks.py",
}
NOT_RUN = ("docker ", "pip install setuptools", 'python -c "import flash_ext;', "bash .ci/run")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def unfenced(page: Path) -> str:
    """A page without fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """A page without fenced blocks and tables."""
    return "\n".join(line for line in unfenced(page).splitlines() if not line.startswith("|"))


def anchors(page: Path) -> set[str]:
    """The headings as GitHub links to them."""
    headings = re.findall(r"^#+ (.*)$", unfenced(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: Path) -> list[str]:
    """Each command of the page's bash blocks in one line, without comments."""
    found = []
    for block in blocks(page, "bash"):
        lines = re.sub(r" *\\\n *", " ", block).splitlines()
        found += [command for line in lines if (command := re.sub(r"\s*#.*", "", line).strip())]
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_exists(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        assert not anchor or anchor in anchors(target), f"{name_of(page)} links to {link}"


def test_every_page_is_reached_from_the_readme() -> None:
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page not in seen:
            seen.add(page)
            links = re.findall(r"\]\(([^)#\s]+\.md)", page.read_text())
            todo += [(page.parent / link).resolve() for link in links if not link.startswith("https://")]
    assert seen == set(PAGES)


@pytest.mark.parametrize("page", KEPT, ids=name_of)
def test_every_named_file_exists(page: Path) -> None:
    paths = re.findall(
        r"`((?:csrc|flash_ext|tests|benchmarks|tools|cmake|docs|examples|\.ci)/[^`\s<*]*)", unfenced(page)
    )
    for path in paths:
        if not path.startswith("benchmarks/out"):  # written when it runs
            assert (ROOT / path.partition(":")[0]).exists(), f"{name_of(page)} names {path}"


def test_every_file_that_a_comment_names_exists() -> None:
    sources = [path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    ours = re.compile(r"(?<!/)\bcsrc/[\w/]+\.(?:cuh?|cpp|h)\b")
    named = {(path, name) for path in sources for name in ours.findall(path.read_text())}
    assert len(named) > 10
    assert [f"{name_of(path)} names {name}" for path, name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_kernel_of_the_page_is_the_one_that_is_built() -> None:
    """By tests/cpp/new_kernel_test.cpp."""
    (shown,) = blocks(ROOT / "docs/contribute/add-a-kernel.md", "cpp")
    assert (ROOT / "examples/new_kernel/naive.h").read_text().endswith("\n\n" + shown)
    assert "examples/new_kernel/naive.h" in (ROOT / "tests/cpp/new_kernel_test.cpp").read_text()


def test_the_readme_and_the_lessons_are_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    assert len(LESSONS) == 5
    for page in LESSONS:
        assert len(prose(page).split()) <= 1200, name_of(page)


def test_commands_are_known_and_their_files_exist() -> None:
    found = [(page, command) for page in KEPT for command in commands(page)]
    known = (*AS_IT_STANDS, *WITH_OTHER_ARGUMENTS, *NOT_RUN)
    for begin in known:
        assert any(command.startswith(begin) for _, command in found), f"no page has the command {begin}"
    for page, command in found:
        assert command.startswith(known), f"{name_of(page)}: what runs this? {command}"
        for path in re.findall(r"(?<![\w/])((?:benchmarks|tests|tools|\.ci)/[\w./-]+)", command):
            assert (ROOT / path).exists() or path.startswith("benchmarks/out"), f"{name_of(page)}: {command}"


@pytest.mark.parametrize("command, where", WITH_OTHER_ARGUMENTS.items())
def test_programs_of_commands_are_run(command: str, where: str) -> None:
    """Where it is said to be run, its program is named."""
    program = command.removeprefix("uv run ").removeprefix("--no-sync ").split("/")[-1].split()[-1]
    assert program.removeprefix("flash_ext.") in (ROOT / where).read_text()


def test_the_commands_that_the_ci_takes_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    for pattern in re.findall(r'readme_command "([^"]+)"', (ROOT / ".ci/run").read_text()):
        assert re.search(rf"^pip install -q uv && uv run {pattern}", text, re.MULTILINE), pattern


USE = [ROOT / f"docs/use/{name}.md" for name in ("api", "decode", "flash-attn", "image-models", "packed", "xformers")]
NEEDED = {"image-models": ("diffusers", "timm")}  # where these are not installed, the page is not run
STAND_INS = ("flash_attn", "flash_attn_interface", "xformers")
RUN = [ROOT / "README.md", ROOT / "docs/learn/index.md", *USE, *LESSONS]


@pytest.fixture
def _other_packages_are_their_own() -> Iterator[None]:
    """Again, for the tests that follow."""
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in STAND_INS]:
        del sys.modules[name]


@pytest.mark.usefixtures("_other_packages_are_their_own")
@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_the_python_of_a_page_runs(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for package in NEEDED.get(page.stem, ()):
        pytest.importorskip(package)
    names: dict[str, object] = {}
    programs = blocks(page, "python")
    assert programs
    for program in programs:
        exec(compile(program, name_of(page), "exec"), names)


def test_the_use_of_the_readme_is_six_lines() -> None:
    (program,) = blocks(ROOT / "README.md", "python")
    assert len([line for line in program.splitlines()[1:] if line]) <= 6


def test_the_readme_says_where_its_chart_is_from() -> None:
    """The same commit, card and torch as the rows that the chart was drawn from (test_report.py has its numbers)."""
    header, row = (ROOT / "benchmarks/results/nvidia-h200/attention_grid.csv").read_text().splitlines()[:2]
    origin = dict(zip(header.split(","), row.split(","), strict=False))
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"{origin['gpu']}, commit {origin['commit']}, torch {origin['torch']}." in text
