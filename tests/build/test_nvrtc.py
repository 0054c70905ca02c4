"""Promise: each header of a kernel compiles alone, at run time, for 8.0 and 9.0: it needs no host code and no standard
library but what csrc/gpu/nvrtc stands for; and so do kernels with a user's function of a score in the place of the
softcap (tests/cpp/emulated runs such). Needs what torch's wheels bring, NVRTC and cuda_fp16.h; no GPU."""

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
SHARED = (
    "band",
    "bias_gradient_plan",
    "decode",
    "dropout",
    "elements",
    "online_softmax",
    "score_kind",
    "score_mod",
    "sequences",
)
HEADERS = [
    *(CSRC / "core" / f"{name}.h" for name in (*SHARED, "tile_schedule")),
    *sorted((CSRC / "gpu").glob("*.h")),
    *sorted((CSRC / "gpu").rglob("*.cuh")),
    *sorted(path for path in (CSRC / "kernels").rglob("*.cuh") if not path.name.startswith(HOST)),
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
def include() -> Path:
    """Where cuda_fp16.h lies: in one of torch's own packages, else in the toolkit of nvcc."""
    places = [path for wheel in of_wheels() for path in wheel.glob("*/include")]
    if (nvcc := shutil.which("nvcc")) is not None:
        places.append(Path(nvcc).resolve().parent.parent / "include")
    for place in places:
        if (place / "cuda_fp16.h").exists():
            return place
    raise FileNotFoundError("no package of the CUDA toolkit is installed")


def compile_at_run_time(source: str, arch: str, *kernels: str) -> str:
    """What the compiler says of an error, or "". ``kernels``: instances that it compiles."""
    library, program = nvrtc(), ctypes.c_void_p()
    folders = [CSRC, CSRC / "gpu" / "nvrtc", include()]
    options = [f"-arch=sm_{arch}", "-std=c++20", "-default-device", *(f"-I{folder}" for folder in folders)]
    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"header.cu", 0, None, None)
    for kernel in kernels:
        library.nvrtcAddNameExpression(program, kernel.encode())
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


DECODE = ("__nv_bfloat16", "64", "decode::kFewRows"), ("decode::Fp8", "128", "decode::kManyRows")


@pytest.mark.parametrize("parameters", DECODE, ids=lambda parameters: parameters[0])
def test_a_decode_kernel_compiles(parameters: tuple[str, ...]) -> None:
    source = '#include "kernels/decode/kernel.cuh"\nusing namespace flash_ext;\n'
    for arch in ("80", "90a"):
        assert not compile_at_run_time(source, arch, f"decode::decode_kernel<decode::Traits<{', '.join(parameters)}>>")


# A bias of relative places that no option of a call has, and its derivative by the score.
FUNCTION = """
struct Function {
  static __device__ float value(float score, float distance) { return score + 0.5f * tanhf(distance); }
  static __device__ float slope(float, float) { return 1.f; }
};
template <class Base>
struct Sm80 : Base {
  using Mods = typename Base::Mods::template With<Function>;
};
template <class Base>
struct Sm90 : Base {
  using Function = ::Function;
};
using namespace flash_ext;
"""
TWO_PASS = "Sm90<sm90::TwoPassTraits<__half, 128, ScoreKind::kScores>>"
WITH_FUNCTION = {
    "sm80/forward/kernel.cuh": "sm80::forward_kernel<Sm80<sm80::ForwardTraits<Bf16, 64, false, false>>>",
    "sm80/backward/kernel.cuh": "sm80::backward_kernel<Sm80<sm80::BackwardTraits<Bf16, 64, false, ScoreKind::kAny>>>",
    "sm90/forward/kernel.cuh": "sm90::forward_kernel<Sm90<"
    "sm90::ForwardTraits<__half, 128, sm90::forward_shape(128, sm90::Tiles::kScored)>>>",
    "sm90/backward_two_pass/keys.cuh": f"sm90::keys_kernel<{TWO_PASS}>",
    "sm90/backward_two_pass/queries.cuh": f"sm90::queries_kernel<{TWO_PASS}>",
}


@pytest.mark.parametrize("header", WITH_FUNCTION)
def test_a_function_of_scores_compiles_into_a_kernel(header: str) -> None:
    source = f'#include "kernels/{header}"\n{FUNCTION}'
    for arch in ("90a",) if header.startswith("sm90") else ("80", "90a"):
        assert not compile_at_run_time(source, arch, WITH_FUNCTION[header])
    broken = source.replace("slope(float, float)", "derivative(float, float)")
    assert "ScoreFunction" in compile_at_run_time(broken, "90a", WITH_FUNCTION[header])
