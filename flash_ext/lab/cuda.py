"""Kernels of a lesson on a GPU: NVRTC compiles them when they are needed, NVIDIA's cuda.core launches them on tensors.

NVRTC comes with a torch for CUDA. It needs no driver, so registers are known without a GPU, too.
"""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flash_ext.lab.lessons import FOLDER, LabError, Launch, Lesson, Variant

FLUSH_BYTES = 256 << 20  # more than the L2 cache of any card so far
COPY_BYTES = 512 << 20
CALLS = 20
QUEUE_CYCLES = 20_000_000  # about 10 ms, in which the host queues all calls


@dataclass(frozen=True)
class Compiled:
    """``code``: an ObjectCode of cuda.core."""

    code: Any
    registers: int
    shared: int  # bytes


def cuda_core() -> ModuleType:
    """The module, or a LabError that says how to get it."""
    if not torch.version.cuda:
        raise LabError("This torch is a build without CUDA; kernels are compiled by the NVRTC of one for CUDA.")
    major = torch.version.cuda.split(".")[0]
    try:
        import cuda.core
    except ImportError as error:
        raise LabError(f"cuda.core cannot be imported ({error}): pip install 'cuda-core[cu{major}]'.") from None
    return cuda.core


@cache
def build(text: str, defines: tuple[tuple[str, int], ...], arch: str) -> Compiled:
    """``arch``: "80" for compute capability 8.0. What the compiler refuses is a LabError with its words."""
    core = cuda_core()
    macros = [(name, str(value)) for name, value in defines] or None
    log = io.StringIO()
    try:
        options = core.ProgramOptions(
            arch=f"sm_{arch}", std="c++17", ptxas_options=["-v"], define_macro=macros, include_path=str(FOLDER),
            no_cache=True,  # what comes from NVRTC's cache on the disk comes without the words of ptxas
        )  # fmt: skip
        code = core.Program(text, "c++", options).compile("cubin", logs=log)
    except Exception as error:  # the errors of cuda.core have no base that is public
        raise LabError(f"NVRTC cannot compile the kernel: {error}") from None
    told = log.getvalue()
    registers, shared = re.search(r"Used (\d+) registers", told), re.search(r"(\d+) bytes smem", told)
    if registers is None:
        raise LabError(f"NVRTC says nothing of registers: {told!r}")
    return Compiled(code, int(registers[1]), int(shared[1]) if shared else 0)


def compiled(lesson: Lesson, variant: Variant, arch: str) -> Compiled:
    """Compiled once in a process."""
    return build(lesson.text(variant), tuple(variant.defines.items()), arch)


@cache
def missing() -> str:
    """Why nothing can be compiled here; empty, if it can."""
    try:
        build('extern "C" __global__ void nothing() {}', (), "80")
    except LabError as error:
        return str(error)
    return ""


class TorchStream:
    """The stream of torch, as cuda.core asks for one."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, torch.cuda.current_stream().cuda_stream


def kernel_call(lesson: Lesson, variant: Variant, launch: Launch, tensors: Sequence[Tensor]) -> Callable[[], None]:
    """What starts the kernel on the current stream, with contiguous tensors of the current device.

    What must be 0 before is set so in the same call, and timed.
    """
    core = cuda_core()
    device = core.Device(torch.cuda.current_device())
    device.set_current()  # torch's context: both use the device's primary one
    major, minor = torch.cuda.get_device_capability()
    kernel = compiled(lesson, variant, f"{major}{minor}").code.get_kernel(lesson.source(variant).kernel.name)
    config = core.LaunchConfig(grid=launch.grid, block=launch.block)
    memory = launch.memory("cuda")
    # a bare int would be passed as one of 8 bytes
    arguments = [*(x.data_ptr() for x in (*tensors, *memory)), *(np.int32(number) for number in launch.numbers)]

    def call() -> None:
        for tensor in memory:
            tensor.zero_()
        core.launch(TorchStream(), config, kernel, *arguments)

    return call


def seconds(call: Callable[[], object]) -> float:
    """Of one call on the GPU: the median of some, each with a cold L2 cache and queued before the GPU comes to it."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(CALLS)]
    torch.cuda.synchronize()
    torch.cuda._sleep(QUEUE_CYCLES)
    for begin, end in events:
        flush.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3


@cache
def copy_bytes_per_second(device: int) -> float:
    """What this card reads and writes together in a second when torch copies a large tensor."""
    source = torch.ones(COPY_BYTES // 4, device=f"cuda:{device}")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds(lambda: target.copy_(source))
