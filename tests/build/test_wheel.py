"""Promise: a wheel for several torch and Python asks for nothing new, and what it lacks is told in one sentence.

The wheel itself is built and tried by tools/build_wheel.py and tools/try_wheel.py, which .ci/run calls.
"""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from flash_ext import ops

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import build_wheel  # noqa: E402
import old_glibc  # noqa: E402
import try_wheel  # noqa: E402

needs_compiler = pytest.mark.skipif(
    not all(map(shutil.which, ("cc", "c++", "readelf"))), reason="needs a C++ compiler and binutils"
)


SYMBOLS = """
    12: 0000000000030000   186 FUNC    GLOBAL DEFAULT   15 dlopen@@GLIBC_2.34
    13: 0000000000030000   186 FUNC    GLOBAL DEFAULT   15 dlopen@GLIBC_2.2.5
    14: 0000000000040000    90 IFUNC   GLOBAL DEFAULT   15 exp@@GLIBC_2.29
    15: 0000000000041000    90 IFUNC   GLOBAL DEFAULT   15 exp@GLIBC_2.2.5
    16: 0000000000050000    90 FUNC    WEAK   DEFAULT   15 moved_twice@@GLIBC_2.32
    17: 0000000000050000    90 FUNC    GLOBAL DEFAULT   15 moved_twice@GLIBC_2.3.4
    18: 0000000000050000    90 FUNC    GLOBAL DEFAULT   15 moved_twice@GLIBC_2.2.5
    19: 0000000000060000    90 FUNC    GLOBAL DEFAULT   15 only_new@@GLIBC_2.33
    20: 0000000000060000    90 FUNC    GLOBAL DEFAULT   15 old@@GLIBC_2.17
    21: 0000000000070000     1 OBJECT  GLOBAL DEFAULT   15 __libc_single_threaded@@GLIBC_2.32
"""


@pytest.mark.parametrize(
    ("ceiling", "names", "whole", "expected"),
    [
        ((2, 28), ".+", False, {"dlopen": "2.2.5", "exp": "2.2.5", "moved_twice": "2.3.4"}),
        ((2, 28), "exp", False, {"exp": "2.2.5"}),
        ((2, 28), "exp", True, {"exp": "2.2.5", "old": "2.17"}),
        ((2, 34), ".+", False, {}),
    ],
)
def test_of_a_function_that_is_too_new_the_newest_version_that_is_not_is_taken(
    ceiling: tuple[int, ...], names: str, whole: bool, expected: dict[str, str]
) -> None:
    assert old_glibc.bindings(SYMBOLS, ceiling, re.compile(names), whole) == expected


PROGRAM = """
#include <cmath>
#include <dlfcn.h>
#include <memory>
#include <pthread.h>
#include <vector>

std::shared_ptr<int> kept;
extern "C" double probe(double x, int n) {
  auto* power = reinterpret_cast<double (*)(double, double)>(dlsym(dlopen("libm.so.6", RTLD_NOW), "pow"));
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, [] { kept = std::make_shared<int>(3); });
  const std::shared_ptr<int> copy = kept;
  const std::vector<double> ones(n, 1.0);
  return std::exp(x) + std::log(x) + std::tanh(x - 1) + power(x, 2) + *copy + ones[n - 1];
}
"""


@needs_compiler
def test_a_library_linked_with_the_flags_asks_for_no_newer_glibc_and_runs(tmp_path: Path) -> None:
    source, library = tmp_path / "probe.cpp", tmp_path / "probe.so"
    source.write_text(PROGRAM)
    flags = old_glibc.link_flags(build_wheel.GLIBC, tmp_path / "link")
    subprocess.run(["c++", "-O2", "-fPIC", "-shared", *flags, source, "-o", library], check=True)
    needs = subprocess.run(["readelf", "-V", "-W", library], capture_output=True, text=True, check=True).stdout
    versions = [old_glibc.parse(version) for version in re.findall(r"Name: GLIBC_([\d.]+)", needs)]
    assert versions and max(versions) <= old_glibc.parse(build_wheel.GLIBC), needs
    code = (
        "import ctypes; f = ctypes.CDLL('./probe.so').probe; f.restype = ctypes.c_double; "
        "f.argtypes = [ctypes.c_double, ctypes.c_int]; print(f(1.0, 4))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert float(result.stdout) == pytest.approx(2.718281828459045 + 0 + 1 + 3 + 1)


def wheel_tag(monkeypatch: pytest.MonkeyPatch, built: str | None) -> tuple[str, str, str]:
    """Of setup.py's wheel."""
    if built is None:
        monkeypatch.delenv("FLASH_EXT_BUILT", raising=False)
    else:
        monkeypatch.setenv("FLASH_EXT_BUILT", built)
    commands = {}
    monkeypatch.setattr("setuptools.setup", lambda **options: commands.update(options))
    runpy.run_path(str(ROOT / "setup.py"))
    from setuptools import Distribution, Extension

    command = commands["cmdclass"]["bdist_wheel"](Distribution({"ext_modules": [Extension("flash_ext._C", [])]}))
    command.ensure_finalized()
    return command.get_tag()


def test_the_tag_names_a_python_only_where_one_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wheel_tag(monkeypatch, "somewhere")[:2] == ("py3", "none")
    cpython = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert wheel_tag(monkeypatch, None)[:2] == (cpython, cpython)


def test_the_platform_is_named_after_the_glibc() -> None:
    assert build_wheel.PLATFORM == "manylinux_2_28_x86_64" and build_wheel.GLIBC == "2.28"


def test_this_python_is_at_hand_and_one_that_is_not_is_left_out() -> None:
    assert build_wheel.find_python(f"{sys.version_info[0]}.{sys.version_info[1]}") == Path(sys.executable)
    assert build_wheel.find_python("3.99") is None


def test_what_is_tried_is_python(monkeypatch: pytest.MonkeyPatch) -> None:
    compile(try_wheel.CHECK, "CHECK", "exec")
    compile(try_wheel.TIME_IMPORT, "TIME_IMPORT", "exec")


def test_versions_are_listed_by_number() -> None:
    assert ops._listed({"2.9", "2.11", "2.10"}) == "2.9, 2.10 and 2.11"
    assert ops._listed({"2.9", "2.10"}) == "2.9 and 2.10"
    assert ops._listed({"2.10"}) == "2.10"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["_C.cpython-310-x86_64-linux-gnu.so", "_C.cpython-39-x86_64-linux-gnu.so"], ", only for 3.9 and 3.10, and"),
        ([], ", nor for another, and this call needs it; run `pip install"),
    ],
)
def test_a_call_that_needs_the_module_of_this_python_names_those_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], words: str
) -> None:
    for name in names:
        (tmp_path / name).touch()
    monkeypatch.setattr(ops, "_OF_TORCH", tmp_path)
    monkeypatch.setattr(ops, "C", None)
    with pytest.raises(ImportError, match="flash_ext has no module _C for Python 3") as error:
        ops.require_c()
    assert words in str(error.value)


class FakeDriver:
    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 12080
        return 0


def test_the_driver_is_asked_for_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.ctypes, "CDLL", lambda name: FakeDriver())
    assert ops._driver_version() == 12080


def test_without_a_driver_there_is_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ops.ctypes, "CDLL", absent)
    assert ops._driver_version() == 0


CUDA_13 = {"enabled": True, "toolkit": "13.0.88"}


@pytest.mark.parametrize(
    ("cuda", "of_torch", "driver", "seen"),
    [
        (CUDA_13, "12.8", 12080, "need a driver for CUDA 13.0 or later, and this one is for CUDA 12.8: calls with"),
        (CUDA_13, "12.8", 13000, None),
        (CUDA_13, "12.8", 0, None),
        (CUDA_13, "13.0", 12080, None),  # torch says it
        (CUDA_13, None, 12080, None),
        ({"enabled": False, "toolkit": ""}, "12.8", 12080, None),
    ],
)
def test_a_driver_that_serves_torch_and_not_the_kernels_is_told_at_import(
    monkeypatch: pytest.MonkeyPatch, cuda: dict[str, object], of_torch: str | None, driver: int, seen: str | None
) -> None:
    monkeypatch.setattr(torch.version, "cuda", of_torch)
    monkeypatch.setattr(ops, "_driver_version", lambda: driver)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ops._warn_of_old_driver(cuda)
    assert [str(warning.message) for warning in told if seen is None or seen not in str(warning.message)] == []
    assert len(told) == (seen is not None)
