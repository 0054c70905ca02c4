"""What a lesson is, and which there are.

A lesson is a folder with variants of one kernel, each a `.cu` file for any compiler of CUDA C++, and `lesson.py`, whose
LESSON says what they are given, what is right, and what to expect.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flash_ext.lab.source import Source, parse

LESSON_NAMES = ("add", "transpose", "bank_conflicts", "reduction", "scan", "block_size", "load_tile", "matmul")
LESSON_NAMES += ("tiny_flash", "swin")
FOLDER = Path(__file__).parent
LARGEST = 2**28  # elements of a tensor: 1 GiB, and the kernels count with int
GRID_Y = 65535  # blocks
COUNTED = 1 << 18  # threads


class LabError(Exception):
    """A user's mistake or a missing part, told in one sentence."""


@dataclass(frozen=True)
class Launch:
    """How a kernel starts; ``numbers`` follow the pointers among its arguments.

    ``zeros``: type and elements of what it takes behind the output, memory that is 0 before each launch.
    """

    grid: tuple[int, int]
    block: tuple[int, int]
    numbers: tuple[int, ...]
    zeros: tuple[tuple[torch.dtype, int], ...] = ()

    def memory(self, device: str = "cpu") -> tuple[Tensor, ...]:
        return tuple(torch.zeros(count, dtype=dtype, device=device) for dtype, count in self.zeros)


@dataclass(frozen=True)
class Peer:
    """What a library has for the same work, called with the inputs on a GPU."""

    name: str
    call: Callable[..., Tensor]


@dataclass(frozen=True)
class Variant:
    """One kernel: ``expect`` says in one sentence what is seen, and why."""

    name: str
    expect: str
    launch: Callable[[Sequence[int]], Launch]
    reference: Callable[..., Tensor]  # of the inputs
    file: str = ""  # without ".cu"; the name, if it is empty
    defines: Mapping[str, int] = field(default_factory=dict)
    peer: Peer | None = None  # whose speed it is compared with, instead of a copy's
    close: float | None = None  # how far from the reference, of its largest number; None: as torch allows


@dataclass(frozen=True)
class Call:
    """What a library has for the same work, timed on a GPU: a row beside those of the kernels, without counts.

    ``prepare`` takes the inputs on the GPU and gives what is timed; a LabError of it says why the row is left out.
    """

    name: str
    prepare: Callable[..., Callable[[], Tensor]]
    reference: Callable[..., Tensor]  # of the inputs
    close: float | None = None  # as a variant has it


@dataclass(frozen=True)
class Lesson:
    """Variants and what they share; ``sizes``: the names of the numbers of --size, each with its default."""

    name: str
    about: str
    variants: tuple[Variant, ...]
    sizes: Mapping[str, tuple[int, int]]  # without and with a GPU
    inputs: Callable[[Sequence[int]], tuple[Tensor, ...]]
    elements: Callable[[Sequence[int]], int]  # of the largest tensor
    moved: Callable[[Sequence[int]], int]  # bytes that must be read and written
    pictured: tuple[tuple[str, bool], ...]  # accesses of the picture: "global" or "shared", a store or not
    refusal: Callable[[Sequence[int]], str] = lambda size: ""  # why a size cannot be; empty, if it can
    flops: Callable[[Sequence[int]], int] | None = None  # where it is about arithmetic; then each variant has a peer
    counted: Callable[[Sequence[int]], int] = lambda size: COUNTED  # threads that the CPU executes; of more, a sample
    columns: Mapping[str, Callable[[Any, Sequence[int]], str]] = field(default_factory=dict)  # of a report.Row, a size
    beside: tuple[Call, ...] = ()
    of: str = "floats"  # what the sizes count; where they differ, all of them
    tables: Callable[[], Mapping[str, list[list[str]]]] = dict  # beside that of the variants, by title
    draw: Callable[[Sequence[Any], Path], None] | None = None  # another picture of report.Rows

    @property
    def peer(self) -> Peer | None:
        """With which most variants, and what is beside them, are compared."""
        return Counter(variant.peer for variant in self.variants).most_common(1)[0][0]

    def path(self, variant: Variant) -> Path:
        return FOLDER / self.name / f"{variant.file or variant.name}.cu"

    def text(self, variant: Variant) -> str:
        return self.path(variant).read_text()

    def source(self, variant: Variant) -> Source:
        return parse(self.text(variant), variant.defines)

    def variant(self, name: str) -> Variant:
        """By name, or a LabError."""
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise LabError(f"variant {name} of {self.name}: it has {', '.join(v.name for v in self.variants)}.")

    def checked(self, words: Sequence[str], gpu: bool) -> tuple[int, ...]:
        """The numbers of --size, one for all or one each, or the defaults; what can't be is a LabError."""
        if not words:
            return tuple(default[gpu] for default in self.sizes.values())
        given = f"--size {' '.join(words)}"
        for word in words:
            if not re.fullmatch(r"0*[1-9]\d{0,9}", word):
                raise LabError(f"{given}: {word} is not a whole number from 1 on.")
        size = [int(word) for word in words]
        if len(size) not in (1, len(self.sizes)):
            names = " ".join(name.upper() for name in self.sizes)
            raise LabError(f"{given}: {len(size)} numbers are given, {self.name} takes {names}.")
        full = tuple(size) if len(size) == len(self.sizes) else tuple(size) * len(self.sizes)
        if why := self.refusal(full):
            raise LabError(f"{given}: {why}")
        if (count := self.elements(full)) > LARGEST:
            raise LabError(f"{given}: a tensor has {count:,} elements, at most {LARGEST:,} are accepted.")
        if (blocks := max(variant.launch(full).grid[1] for variant in self.variants)) > GRID_Y:
            raise LabError(f"{given}: a kernel takes {blocks:,} blocks in y, at most {GRID_Y:,} are accepted.")
        return full


def lesson(name: str) -> Lesson:
    """By name, or a LabError."""
    if name not in LESSON_NAMES:
        raise LabError(f"lesson {name}: there are {', '.join(LESSON_NAMES)}.")
    return importlib.import_module(f"flash_ext.lab.{name}.lesson").LESSON


def lessons() -> list[Lesson]:
    """All, in the order in which they are learned."""
    return [lesson(name) for name in LESSON_NAMES]
