"""``memory_snapshot``: what the CUDA allocator did, in PyTorch's own format.

The file opens in PyTorch's memory_viz, and with ``python -m flash_ext.profiling memory FILE``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def memory_snapshot(path: str | Path, max_entries: int = 1_000_000) -> Iterator[None]:
    """Records every allocation inside, with stacks and ranges, and writes ``path`` when it is left.

    Also when it is left by an exception: an out-of-memory error is what one wants to look at. Recording always stops.

    Args:
        path: The pickle to write; its folder must exist.
        max_entries: How many events are kept; older ones are dropped first.

    Raises:
        RuntimeError: there is no CUDA device, whose allocator alone keeps such a history.
        FileNotFoundError: the folder of ``path`` does not exist.
    """
    path = Path(path)
    if not torch.cuda.is_available():
        raise RuntimeError(
            "memory_snapshot records the CUDA allocator, and torch sees no CUDA device; "
            "saved_tensors works on the CPU, too"
        )
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path is {str(path)!r}, whose folder does not exist; it must be in an existing one")
    memory = torch.cuda.memory
    # The annotations are the ranges of flash_ext.profiling.range and torch.profiler.record_function.
    memory._record_memory_history(max_entries=max_entries, clear_history=True, global_record_annotations=True)
    try:
        try:
            yield
        finally:
            memory._dump_snapshot(str(path))
    finally:
        memory._record_memory_history(enabled=None)
