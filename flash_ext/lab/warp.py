"""What a lesson's kernel may call of CUDA: shuffles and votes of a warp, atomicAdd, the fence, min, max and expf.

A function takes the threads that call it, the place of the call and the arguments. Shuffles and votes are those of
whole warps. Blocks go in step and memory is never stale, so a fence has nothing to do, and a missing one is not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from flash_ext.lab.memory import WARP
from flash_ext.lab.source import Node, SourceError

if TYPE_CHECKING:
    from flash_ext.lab.memory import Pointer
    from flash_ext.lab.simt import Threads

ALL = 0xFFFFFFFF


def require_whole_warps(threads: Threads, node: Node, does: str, lanes: Any = ALL) -> None:
    running = threads.mask.reshape(-1, WARP)
    if int(lanes) != ALL or (running.any(1) != running.all(1)).any():
        raise SourceError(f"line {node.line}: the lab {does} whole warps only, with a mask of all 32 threads")


def shuffle(source: Callable[[np.ndarray, Any], Any]) -> Callable[..., np.ndarray]:
    """The value of the lane that ``source`` says for each lane; a thread's own, where the warp has no such lane."""

    def call(threads: Threads, node: Node, lanes: Any, value: Any, by: Any) -> np.ndarray:
        require_whole_warps(threads, node, "shuffles", lanes)
        every = np.arange(len(threads.mask))
        wanted = source(every % WARP, by)
        other = np.where((wanted >= 0) & (wanted < WARP), every // WARP * WARP + wanted, every)
        return np.broadcast_to(value, len(every))[other]

    return call


def ballot(threads: Threads, node: Node, lanes: Any, value: Any) -> np.ndarray:
    """A bit for each lane: whether its value is not 0."""
    require_whole_warps(threads, node, "shuffles", lanes)
    votes = np.broadcast_to(np.asarray(value) != 0, len(threads.mask)).reshape(-1, WARP)
    return np.repeat((votes << np.arange(WARP)).sum(1), WARP)


def first_bit(threads: Threads, node: Node, value: Any) -> Any:
    """The place of the lowest bit, counted from 1; 0 if there is none."""
    lowest = np.asarray(value) & -np.asarray(value)
    return np.where(lowest == 0, 0, np.log2(np.maximum(lowest, 1)).astype(np.int64) + 1)


def atomic_add(threads: Threads, node: Node, pointer: Pointer, value: Any) -> np.ndarray:
    """What was there, thread after thread; told as one store."""
    words = threads.words(node, pointer.memory, pointer.offset, pointer.type, store=True)
    data, added = pointer.memory.data, np.broadcast_to(value, len(words))
    before = np.zeros(len(words), data.dtype)
    for thread in np.flatnonzero(threads.mask):
        before[thread] = data[words[thread]]
        data[words[thread]] += added[thread]
    return before if before.dtype.kind == "f" else before.astype(np.int64)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": lambda threads, node, a, b: np.minimum(a, b),
    "max": lambda threads, node, a, b: np.maximum(a, b),
    "expf": lambda threads, node, x: np.exp(np.asarray(x, np.float32)),
    "__shfl_sync": shuffle(lambda lane, other: other + 0 * lane),
    "__shfl_up_sync": shuffle(lambda lane, by: lane - by),
    "__shfl_down_sync": shuffle(lambda lane, by: lane + by),
    "__shfl_xor_sync": shuffle(lambda lane, bits: lane ^ bits),
    "__ballot_sync": ballot,
    "__any_sync": lambda threads, node, lanes, value: ballot(threads, node, lanes, value) != 0,
    "__ffs": first_bit,
    "__threadfence": lambda threads, node: 0,
    "atomicAdd": atomic_add,
}
