"""Promise: each header of a kernel compiles alone, at run time, for 8.0 and 9.0: it needs no host code and no standard
library but what csrc/gpu/nvrtc stands for. Needs NVRTC, which torch brings, and the toolkit's headers; no GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.kernels("sm80"), pytest.mark.no_gpu]

CSRC = Path(__file__).parents[2] / "csrc"
# Host code: what plans and launches.
HOST = ("run", "instance")
HEADERS = [
    *(CSRC / "core" / f"{name}.h" for name in ("band", "bias_gradient_plan", "dropout", "online_softmax", "score_mod")),
    CSRC / "core" / "tile_schedule.h",
    *sorted((CSRC / "gpu").rglob("*.cuh")),
    *sorted(path for path in (CSRC / "kernels").glob("sm*/**/*.cuh") if not path.name.startswith(HOST)),
]


def of_wheels() -> list[Path]:
    """Where PyPI's packages of the CUDA toolkit lie."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(place) for place in spec.submodule_search_locations or []] if spec else []


@cache
def nvrtc() -> ctypes.CDLL:
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    found = [path for place in of_wheels() for path in place.rglob(name)]
    return ctypes.CDLL(str(found[0]) if found else name)


@cache
def includes() -> list[Path]:
    """Of the toolkit that has libcu++: the one of nvcc, else a package's."""
    places = [path for wheel in of_wheels() for path in wheel.glob("*/include")]
    if (nvcc := shutil.which("nvcc")) is not None:
        places.insert(0, Path(nvcc).resolve().parent.parent / "include")
    for place in places:
        for libcu in (place, place / "cccl"):
            if (libcu / "cuda" / "std" / "cstdint").exists() and (place / "cuda_fp16.h").exists():
                return [place, libcu]
    raise FileNotFoundError("no CUDA toolkit with libcu++ is installed")


def compile_at_run_time(source: str, arch: str) -> str:
    """What the compiler says of an error, or ""."""
    library, program = nvrtc(), ctypes.c_void_p()
    folders = [CSRC, CSRC / "gpu" / "nvrtc", *includes()]
    options = [f"-arch=sm_{arch}", "-std=c++20", "-default-device", *(f"-I{folder}" for folder in folders)]
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"header.cu", 0, None, None)
    try:
        if library.nvrtcCompileProgram(program, len(options), arguments) == 0:
            return ""
        size = ctypes.c_size_t()
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        return log.value.decode()
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: str(path.relative_to(CSRC)))
def test_a_header_compiles_alone(header: Path) -> None:
    name = header.relative_to(CSRC)
    for arch in ("90a",) if "sm90" in name.parts else ("80", "90a"):
        assert not compile_at_run_time(f'#include "{name}"\n', arch)


def test_the_compiler_says_what_is_wrong() -> None:
    assert "no_such.cuh" in compile_at_run_time('#include "no_such.cuh"\n', "80")
