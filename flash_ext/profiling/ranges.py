"""``range``: a named part of a program, for whichever profiler looks.

An NVTX tool (Nsight Systems, Nsight Compute) sees it in the domain ``flash_ext``, where the operators' own ranges are;
torch's profiler and its memory history see it as a ``record_function``. Where nobody looks it costs one call into C++.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from flash_ext import ops

_NOTHING = nullcontext()
_NVTX, _TORCH = 1, 2  # the bits of _C.listeners()


class _Range:
    """One range that somebody looks at; it may be entered once at a time."""

    __slots__ = ("_listeners", "_name", "_record")

    def __init__(self, name: str, listeners: int) -> None:
        self._name = name
        self._listeners = listeners
        self._record = torch.profiler.record_function(name) if listeners & _TORCH else None

    def __enter__(self) -> None:
        if self._record is not None:
            self._record.__enter__()
        if self._listeners & _NVTX:
            ops.C.nvtx_push(self._name)

    def __exit__(self, *error: object) -> None:
        if self._listeners & _NVTX:
            ops.C.nvtx_pop()
        if self._record is not None:
            self._record.__exit__(*error)


def range(name: str) -> AbstractContextManager[None]:
    """``with range("forward"): ...`` marks what runs inside, on this thread.

    ``name`` becomes a registered string, once; keep the number of different names small. Compiled code
    (``torch.compile``) leaves it out.

    NOTE: kernels of ``loss.backward()`` on a GPU are launched by autograd's own thread, and Nsight Systems counts them
    for ranges of that thread only. ``with torch.autograd.set_multithreading_enabled(False):`` around both makes the
    calling thread launch them, so that a range around ``backward()`` contains them.
    """
    if torch.compiler.is_compiling() or ops.C is None:
        return nullcontext()
    listeners = ops.C.listeners()
    return _Range(name, listeners) if listeners else _NOTHING
