"""Promise: a second compiler, clang, takes the code of the CPU without a warning: each header of csrc/core/ alone, and
each source of csrc/kernels/ that no CUDA toolkit compiles, for every instruction set that it is built for."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
CLANG = next(filter(None, map(shutil.which, ("clang++", *(f"clang++-{n}" for n in range(30, 13, -1))))), None)

pytestmark = pytest.mark.skipif(CLANG is None, reason="needs clang++ (Debian: clang)")


def instruction_sets() -> dict[str, list[str]]:
    """The compiler's options of each, as the build has them."""
    found: dict[str, list[str]] = {}
    text = (ROOT / "cmake" / "cpu_variants.cmake").read_text()
    for name, options in re.findall(r'set\(flags_(\w+) "?([^")]*)"?\)', text):
        found[name] = re.sub(r"\$\{flags_(\w+)\}", lambda match: " ".join(found[match[1]]), options).split()
    assert found.keys() >= {"baseline", "avx2", "avx512"}
    return found if platform.machine() == "x86_64" else {"baseline": []}


HEADERS = [f'#include "core/{path.name}"\n' for path in sorted((CSRC / "core").glob("*.h"))]
SOURCES = [
    pytest.param(path, [*options, f"-DFLASH_CPU_VARIANT={name}"] if name else [], id=f"{path.name} {name}".strip())
    for path in (*sorted((CSRC / "kernels").glob("*.cpp")), *sorted((CSRC / "kernels" / "cpu").glob("*.cpp")))
    for name, options in (instruction_sets() if path.stem == "vector_kernels" else {"": []}).items()
]


def complaints(*arguments: str, source: str | None = None) -> str:
    assert CLANG is not None
    command = [CLANG, "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{CSRC}", *arguments]
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr or f"ended with {done.returncode}"


@pytest.mark.parametrize("source", HEADERS, ids=lambda source: source.split('"')[1])
def test_a_header_compiles_alone(source: str) -> None:
    assert complaints("-x", "c++", "-", source=source) == ""


@pytest.mark.parametrize(("path", "options"), SOURCES)
def test_a_source_compiles(path: Path, options: list[str]) -> None:
    assert complaints(*options, str(path)) == ""


@pytest.mark.parametrize("fault", ["static int unused() { return 1; }", "int f(int x) {}", "std::vector<int> v;"])
def test_a_fault_is_found(fault: str) -> None:
    assert "error: " in complaints("-x", "c++", "-", source=HEADERS[0] + fault + "\n")
