"""``python -m flash_ext.doctor``: what is installed and found here, and whether attention is right on every backend.

One line a finding, with what to do where something is missing. Exit status 1 if a backend of this machine gives wrong
numbers or fails, else 0: a tool that is not found is no fault.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flash_ext
from flash_ext import ops, reference
from flash_ext.lab.ncu import find_ncu
from flash_ext.profiling.nsys import NsysError, find_nsys

OK, ABSENT, WRONG = "ok", "absent", "WRONG"
SHAPES = {"query": (2, 4, 150, 64), "key": (2, 2, 203, 64), "value": (2, 2, 203, 64)}
# Of the largest number of each result: a few times what rounding takes from this problem.
ALLOWED = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
BACKENDS: dict[str, dict[str, tuple[torch.dtype, ...]]] = {
    "cpu": {"cpu": tuple(ALLOWED), "chunked": (torch.float32,)},
    "cuda": {"sm80": tuple(ALLOWED), "sm90": (torch.bfloat16, torch.float16), "chunked": (torch.float32,)},
}


@dataclass(frozen=True)
class Finding:
    """``state``: "ok", "absent" or "WRONG"; ``remedy``: what to do, if anything."""

    name: str
    state: str
    text: str
    remedy: str = ""


def libraries() -> Iterator[Finding]:
    """Python, torch, flash_ext's library and why it was taken."""
    yield Finding("Python", OK, f"{platform.python_version()}, {platform.machine()}")
    cuda = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield Finding("torch", OK, f"{torch.__version__}, {cuda}")
    info = flash_ext.build_info()
    dirty = " and changes" if info["git_dirty"] else ""
    commit = info["git_commit"][:12] or "unknown"
    built = f"{info['version']}, commit {commit}{dirty}, {info['compiler']}"
    folders = sorted(folder.name for folder in ops.LIBRARIES[0].parent.glob("torch_*"))
    taken = f"{ops.LIBRARIES[1].parent.name} of {', '.join(folders)}"
    yield Finding("flash_ext", OK, f"{built}; library {taken}, as torch is")
    if ops.C is None:
        remedy = "build for this Python; until then a call takes some microseconds more, and enable() is not there"
        yield Finding("module of this Python", ABSENT, f"none beside {ops.LIBRARIES[1]}", remedy)
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith("FLASH_EXT_")}
    yield Finding("settings", OK, ", ".join(f"{name}={value}" for name, value in settings.items()) or "none")


def devices() -> Iterator[Finding]:
    """The driver, the cards and the kernels for them."""
    cuda = flash_ext.build_info()["cuda"]
    if cuda["enabled"]:
        text = (
            f"{', '.join(cuda['backends'])}, CUDA {cuda['toolkit']}, for {', '.join(map(str, cuda['architectures']))}"
        )
        yield Finding("GPU kernels", OK, text)
    else:
        remedy = "build with FLASH_EXT_CUDA=ON where nvcc is" if torch.version.cuda else ""
        yield Finding("GPU kernels", ABSENT, f"not in this build: {cuda['reason']}", remedy)
    driver = ops._driver_version()
    if driver:
        yield Finding("driver", OK, f"for CUDA {driver // 1000}.{driver % 1000 // 10}")
    else:
        yield Finding("driver", ABSENT, "libcuda.so.1 is not found", "install NVIDIA's driver, if there is a GPU")
    if not torch.cuda.is_available():
        yield Finding("GPU", ABSENT, "torch sees none", remedy_for_no_gpu(driver))
        return
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        text = f"{card.name}, compute capability {card.major}.{card.minor}, {card.total_memory / 2**30:.0f} GiB"
        yield Finding(f"GPU {index}", OK, text)


def remedy_for_no_gpu(driver: int) -> str:
    if not driver:
        return "none is needed: attention runs on the CPU; for a GPU, begin with its driver"
    if not torch.version.cuda:
        return "install a torch for CUDA"
    return "see whether nvidia-smi lists one and CUDA_VISIBLE_DEVICES hides none; a container needs --gpus all"


def tools() -> Iterator[Finding]:
    """nsys, ncu and NVRTC."""
    try:
        yield Finding("nsys", OK, str(find_nsys()))
    except NsysError as error:
        text, _, remedy = str(error).partition("; ")
        yield Finding("nsys", ABSENT, text, remedy)
    ncu = find_ncu()
    remedy = "" if ncu else "install Nsight Compute, for what a kernel waits for"
    yield Finding("ncu", OK if ncu else ABSENT, ncu or "not on PATH nor in the usual places", remedy)
    wheels = [Path(place) / "nvidia" for place in sys.path if place]
    folders = [
        *(lib for wheel in wheels for lib in wheel.glob("*/lib")),
        *map(Path, glob.glob("/usr/local/cuda*/lib64")),
    ]
    nvrtc = next((file for folder in folders for file in sorted(folder.glob("libnvrtc.so*"))), None)
    remedy = "" if nvrtc else "it comes with a torch for CUDA"
    yield Finding("NVRTC", OK if nvrtc else ABSENT, str(nvrtc or "no libnvrtc.so"), remedy)


def results_of(call: Callable[..., Any], inputs: dict[str, Tensor]) -> list[Tensor]:
    """out, lse and the gradients of query, key and value."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    out, lse = call(**leaves, causal=True, align="bottom_right", return_lse=True)
    cotangents = [
        torch.linspace(-1, 1, x.numel(), dtype=torch.float64, device=x.device).view(x.shape) for x in (out, lse)
    ]
    grads = torch.autograd.grad(
        (out, lse), list(leaves.values()), [c.to(x.dtype) for c, x in zip(cotangents, (out, lse), strict=True)]
    )
    return [out.detach(), lse.detach(), *grads]


def largest_error(dtype: torch.dtype, device: str) -> float:
    """Of flash_ext.attention and its gradients against float64, over what is allowed; NaN counts as infinite."""
    generator = torch.Generator().manual_seed(0)
    inputs = {name: torch.randn(shape, generator=generator).to(dtype).to(device) for name, shape in SHAPES.items()}
    exact = results_of(reference.attention, {name: x.double() for name, x in inputs.items()})
    worst = 0.0
    for got, true in zip(results_of(flash_ext.attention, inputs), exact, strict=True):
        error = ((got.double() - true).abs().max() / true.abs().max()).item() / ALLOWED[dtype]
        worst = max(worst, error if error == error else float("inf"))
    return worst


def backends() -> Iterator[Finding]:
    """A small attention, forward and backward, on every backend that this machine can ask."""
    built = {"cpu", "chunked", *flash_ext.build_info()["cuda"]["backends"]}
    for device, names in BACKENDS.items():
        if device == "cuda" and not torch.cuda.is_available():
            continue
        for name in filter(built.__contains__, names):
            yield backend_finding(name, device, names[name])


def backend_finding(name: str, device: str, dtypes: tuple[torch.dtype, ...]) -> Finding:
    where = f"attention, {name}" + (" on the GPU" if device == "cuda" and name == "chunked" else "")
    right, wrong, refused = [], [], []
    with flash_ext.use_backend(name):
        for dtype in dtypes:
            word = str(dtype).removeprefix("torch.")
            try:
                error = largest_error(dtype, device)
            except flash_ext.AttentionError as reason:
                refused.append(f"{word}: {reason}")
            except RuntimeError as failure:
                wrong.append(f"{word}: {str(failure).splitlines()[0]}")
            else:
                (right if error <= 1 else wrong).append(
                    word if error <= 1 else f"{word}: {error:.3g} of what is allowed"
                )
    if wrong:
        remedy = "please report this, with all lines above; FLASH_EXT_BACKEND=chunked computes without the kernels"
        return Finding(where, WRONG, "; ".join(wrong), remedy)
    if refused and not right:
        return Finding(where, ABSENT, refused[0], "none is needed: other backends serve this machine")
    return Finding(where, OK, ", ".join(right))


def examine() -> list[Finding]:
    """Every finding, in the order of the report."""
    return [finding for part in (libraries, devices, tools, backends) for finding in part()]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flash_ext.doctor", description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="a list of findings, for programs")
    args = parser.parse_args(argv)
    findings = examine()
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            print(f"{finding.state:7}{finding.name:{width}}  {finding.text}")
            if finding.remedy:
                print(f"{'':7}{'':{width}}  -> {finding.remedy}")
    return int(any(finding.state == WRONG for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
