"""Where a kernel's values lie: memory, pointers to it, and what an access to it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flash_ext.lab.source import Node

WARP = 32
WORD = 4
WIDTHS = {"int": 4, "unsigned": 4, "float": 4, "float2": 8, "float4": 16}
Value = Any  # a number, an array of one row a thread, or a Pointer


@dataclass(frozen=True)
class Memory:
    """``data``: floats or ints; ``size`` of them belong to each tensor, block or thread, from ``base`` on."""

    name: str
    space: str  # "global", "shared" or "local"
    data: np.ndarray
    size: int
    base: np.ndarray | int = 0


@dataclass(frozen=True)
class Pointer:
    """``offset`` in bytes from where the memory begins; ``strides``: bytes of each index that is still to come."""

    memory: Memory
    offset: np.ndarray | int
    type: str
    strides: tuple[int, ...]

    def plus(self, index: Value) -> Pointer:
        return replace(self, offset=self.offset + np.asarray(index) * self.strides[0])


@dataclass(frozen=True)
class Access:
    """One instruction of all threads; ``addresses`` in bytes, of the threads that are ``active``, 32 to a warp."""

    site: Node
    memory: Memory
    store: bool
    width: int
    addresses: np.ndarray
    active: np.ndarray
    threads: np.ndarray  # place of each thread in its block, and of the block in the grid
    blocks: np.ndarray
    wanted: np.ndarray | None = None  # bytes that each thread takes, where it need not be the whole width
