"""Many GPUs, on torch.distributed: one sequence over many ranks.

Imported when it is first asked for: ``torch.distributed`` takes its time.
"""

from flash_ext.distributed.dense import context_parallel_attention

__all__ = [
    "context_parallel_attention",
]
