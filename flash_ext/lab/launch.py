"""``python -m flash_ext.lab.launch NAME NUMBER...``: launches each variant of a lesson once, for a profiler to look."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from flash_ext.lab import cuda, lessons
from flash_ext.lab.lessons import Lesson


def launch(lesson: Lesson, size: Sequence[int]) -> None:
    """In their order, on the current GPU."""
    inputs = lesson.inputs(size)
    shapes = {reference: reference(*inputs).shape for reference in {variant.reference for variant in lesson.variants}}
    on_gpu = tuple(tensor.cuda() for tensor in inputs)
    for variant in lesson.variants:
        out = torch.empty(shapes[variant.reference], device="cuda")
        cuda.kernel_call(lesson, variant, variant.launch(size), (*on_gpu, out))()
        torch.cuda.synchronize()


if __name__ == "__main__":
    chosen = lessons.lesson(sys.argv[1])
    launch(chosen, chosen.checked(sys.argv[2:], gpu=True))
