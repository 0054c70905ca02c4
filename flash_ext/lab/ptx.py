"""What `ptx.cuh` has, for the threads of `simt`: asynchronous copies, and a product of small matrices by a warp.

From the begin of a copy until its thread has waited for it, its place in shared memory is NaN: on a GPU it may be
written at any moment between. So a missing wait is seen, and a copy to where somebody has yet to read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from flash_ext.lab.memory import WARP, WORD, Memory, Pointer, Value
from flash_ext.lab.source import Node, SourceError
from flash_ext.lab.warp import require_whole_warps

if TYPE_CHECKING:
    from flash_ext.lab.simt import Threads


@dataclass
class Copy:
    """One instruction of all threads; those in ``open`` have not waited for it, and it is in this ``group`` of each."""

    memory: Memory
    words: np.ndarray
    values: np.ndarray
    group: np.ndarray
    open: np.ndarray


@dataclass
class Copies:
    """Those under way; ``groups``: how many each thread has committed."""

    groups: np.ndarray
    open: list[Copy] = field(default_factory=list)

    def wait(self, mask: np.ndarray, most: Value) -> None:
        """Until at most so many groups of the threads in the mask are under way."""
        for copy in self.open:
            done = copy.open & mask & (copy.group < self.groups - most)
            copy.memory.data[copy.words[done]] = copy.values[done]
            copy.open = copy.open & ~done
        self.open = [copy for copy in self.open if copy.open.any()]


def begin(threads: Threads, node: Node, to: Pointer, source: Pointer, size: Value, kind: str) -> None:
    """A copy of one ``kind`` a thread, of which ``size`` bytes are read."""
    if (source.memory.space, to.memory.space) != ("global", "shared"):
        raise SourceError(f"line {node.line}: cp_async copies from global to shared memory only")
    mask, parts = threads.mask, 4 if kind == "float4" else 1
    size = np.broadcast_to(size, len(mask))
    if ((size < 0) | (size > parts * WORD))[mask].any():
        raise SourceError(f"line {node.line}: cp_async reads 0 to {parts * WORD} bytes")
    values = np.zeros((len(mask), parts), np.float32)
    threads.mask = mask & (size > 0)
    if threads.mask.any():
        words = threads.words(node, source.memory, source.offset, kind, False, size).reshape(-1, parts)
        read = source.memory.data[np.minimum(words, source.memory.data.size - 1)]
        values = np.where(threads.mask[:, None] & (WORD * np.arange(parts) < size[:, None]), read, values)
    threads.mask = mask
    words = threads.words(node, to.memory, to.offset, kind, True).reshape(-1, parts)
    to.memory.data[words[mask]] = np.nan
    threads.copies.open.append(Copy(to.memory, words, values, threads.copies.groups, mask))


def cp_async_4(threads: Threads, node: Node, to: Pointer, source: Pointer, size: Value) -> None:
    begin(threads, node, to, source, size, "float")


def cp_async_16(threads: Threads, node: Node, to: Pointer, source: Pointer, size: Value) -> None:
    begin(threads, node, to, source, size, "float4")


def cp_async_commit(threads: Threads, node: Node) -> None:
    threads.copies.groups = threads.copies.groups + threads.mask


def cp_async_wait(threads: Threads, node: Node, most: Value) -> None:
    if int(most) not in (0, 1):
        raise SourceError(f"line {node.line}: cp_async_wait({int(most)}): 0 or 1 group may be under way")
    threads.copies.wait(threads.mask, most)


def to_tf32(threads: Threads, node: Node, value: Value) -> Value:
    """Rounded to 10 bits behind the first, away from zero in the middle."""
    bits = np.atleast_1d(np.asarray(value, np.float32)).view(np.uint32)
    return ((bits + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)


def mma_tf32(threads: Threads, node: Node, c: Pointer, a: Pointer, b: Pointer) -> None:
    """Of each warp; axes: warp, g and t of the lane, then what its numbers stand for."""
    require_whole_warps(threads, node, "multiplies")

    def numbers(of: Pointer, *shape: int) -> np.ndarray:
        loaded = [threads.load(node, of.memory, of.offset + WORD * i, "float") for i in range(int(np.prod(shape)))]
        return np.stack(loaded, axis=1).reshape(-1, WARP // 4, 4, *shape)

    def seen(of: np.ndarray) -> np.ndarray:
        return (of.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)

    left = seen(numbers(a, 2, 2)).transpose(0, 4, 1, 3, 2).reshape(-1, 16, 8)  # upper or lower rows, g; half, t
    right = seen(numbers(b, 2)).transpose(0, 3, 2, 1).reshape(-1, 8, 8)  # half, t; g
    old = numbers(c, 2, 2).transpose(0, 3, 1, 2, 4).reshape(-1, 16, 8)  # upper or lower rows, g; t, one of two
    new = (old + left @ right).astype(np.float32).reshape(-1, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(-1, 4)
    for i in range(4):
        threads.store(node, c.memory, c.offset + WORD * i, "float", new[:, i])


FUNCTIONS = {
    function.__name__: function
    for function in (cp_async_4, cp_async_16, cp_async_commit, cp_async_wait, to_tf32, mma_tf32)
}
