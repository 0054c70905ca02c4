"""Profiling of PyTorch programs, with or without flash_ext's attention in them: ranges, memory, what autograd keeps.

``python -m flash_ext.profiling --help`` lists the commands (nsys, memory, numerics, plan); they need the extra
``profiling``, all else torch alone.
"""

from flash_ext.profiling.numerics import numerics
from flash_ext.profiling.ranges import range
from flash_ext.profiling.saved import SavedTensor, SavedTensors, saved_tensors
from flash_ext.profiling.snapshot import memory_snapshot

__all__ = ["SavedTensor", "SavedTensors", "memory_snapshot", "numerics", "range", "saved_tensors"]
