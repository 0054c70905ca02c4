"""One variant, executed: on the CPU its addresses are counted, on a GPU it is timed. Both are compared with torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from flash_ext.lab import cuda, simt
from flash_ext.lab.counts import Counts
from flash_ext.lab.lessons import Call, LabError, Lesson, Peer, Variant
from flash_ext.lab.memory import Access


@dataclass(frozen=True)
class Counted:
    """``blocks`` of ``all_blocks`` were executed."""

    counts: Counts
    out: Tensor  # NaN where nobody wrote
    blocks: int
    all_blocks: int
    work: simt.Work


@dataclass(frozen=True)
class Times:
    """Of a lesson on this GPU: seconds of each variant by name, and what they are compared with."""

    seconds: Mapping[str, float]
    peer_rates: Mapping[Peer | None, float]  # FLOP/s
    copy_rate: float | None  # bytes read and written in a second; None where it is about arithmetic
    beside: Mapping[str, float] = field(default_factory=dict)  # seconds of each call beside the variants, by name
    left_out: tuple[str, ...] = ()  # why others of these calls have none, a sentence each


def chosen(count: int, threads: int, at_most: int) -> np.ndarray:
    """Blocks to execute: all, or a spread with the first and the last."""
    most = max(2, at_most // threads)
    return np.arange(count) if count <= most else np.unique(np.linspace(0, count - 1, most).astype(np.int64))


def count(
    lesson: Lesson,
    variant: Variant,
    size: Sequence[int],
    inputs: Sequence[Tensor],
    expected: Tensor,
    at_most: int | None = None,
    record: Callable[[Access], None] = lambda access: None,
) -> Counted:
    """Executes the source on the CPU, about ``at_most`` of its threads, or as many as the lesson says.

    ``record`` is told every access, too. A wrong result is a LabError.
    """
    launch, source, counts = variant.launch(size), lesson.source(variant), Counts()
    out = torch.full(expected.shape, torch.nan)
    names = [name for name, _ in source.kernel.parameters]
    arrays = [tensor.contiguous().view(-1).numpy() for tensor in (*inputs, out, *launch.memory())]
    all_blocks = launch.grid[0] * launch.grid[1]
    blocks = chosen(all_blocks, launch.block[0] * launch.block[1], at_most or lesson.counted(size))

    def both(access: Access) -> None:
        counts.record(access)
        record(access)

    tensors = dict(zip(names, arrays, strict=False))
    work = simt.run(source, launch.grid, launch.block, tensors, launch.numbers, both, blocks)
    if len(blocks) == all_blocks:
        require_equal(lesson, variant, out, expected)
    else:
        written = ~out.isnan()
        require_equal(lesson, variant, out[written], expected[written])
    return Counted(counts, out, len(blocks), all_blocks, work)


def require_equal(lesson: Lesson, variant: Variant | Call, out: Tensor, expected: Tensor) -> None:
    """A LabError where a kernel is not what torch says."""
    try:
        if variant.close is None:
            torch.testing.assert_close(out, expected)
        else:
            torch.testing.assert_close(out, expected, rtol=0, atol=variant.close * float(expected.abs().max()))
    except AssertionError as error:
        raise LabError(f"{lesson.name} {variant.name} differs from torch: {error}") from None


def measure(lesson: Lesson, variant: Variant, size: Sequence[int], inputs: Sequence[Tensor], expected: Tensor) -> float:
    """Seconds of the kernel on the current GPU, after its result was compared; inputs and expected lie there."""
    out = torch.full(expected.shape, torch.nan, device="cuda")
    call = cuda.kernel_call(lesson, variant, variant.launch(size), (*inputs, out))
    call()
    require_equal(lesson, variant, out, expected)
    return cuda.seconds(call)


def references(lesson: Lesson, inputs: Sequence[Tensor]) -> dict[Callable[..., Tensor], Tensor]:
    """What is right, by the function that says it."""
    return {of: of(*inputs).contiguous() for of in {variant.reference for variant in lesson.variants}}


def time_beside(
    lesson: Lesson, inputs: Sequence[Tensor], right: Mapping[Callable[..., Tensor], Tensor], device: str = "cuda"
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Seconds of each call that a lesson has beside its variants, by name, and why others are left out."""
    on_device = tuple(tensor.to(device) for tensor in inputs)
    seconds, left_out = {}, []
    for call in lesson.beside:
        try:
            timed = call.prepare(*on_device)
        except LabError as error:
            left_out.append(str(error))
            continue
        expected = right[call.reference] if call.reference in right else call.reference(*inputs)
        require_equal(lesson, call, timed(), expected.to(device))
        seconds[call.name] = cuda.seconds(timed)
    return seconds, tuple(left_out)


def time_all(
    lesson: Lesson, size: Sequence[int], inputs: Sequence[Tensor], right: Mapping[Callable[..., Tensor], Tensor]
) -> Times:
    """Every variant, its peer, a copy and what is beside, on the current GPU; ``right``: references of the inputs."""
    on_gpu = tuple(tensor.cuda() for tensor in inputs)
    peers = {variant.peer for variant in lesson.variants if variant.peer}
    beside, left_out = time_beside(lesson, inputs, right)
    return Times(
        peer_rates={peer: lesson.flops(size) / cuda.seconds(functools.partial(peer.call, *on_gpu)) for peer in peers},
        seconds={
            variant.name: measure(lesson, variant, size, on_gpu, right[variant.reference].cuda())
            for variant in lesson.variants
        },
        copy_rate=None if lesson.flops else cuda.copy_bytes_per_second(torch.cuda.current_device()),
        beside=beside,
        left_out=left_out,
    )
