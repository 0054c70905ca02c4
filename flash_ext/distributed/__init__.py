"""Many GPUs, on torch.distributed: one sequence over many ranks.

Imported when it is first asked for: ``torch.distributed`` takes its time.
"""

from flash_ext.distributed.dense import context_parallel_attention, explain_context_parallel
from flash_ext.distributed.mode import context_parallel
from flash_ext.distributed.packed import context_parallel_attention_varlen
from flash_ext.distributed.shards import positions, shard_sequence, unshard_sequence

__all__ = [
    "context_parallel",
    "context_parallel_attention",
    "context_parallel_attention_varlen",
    "explain_context_parallel",
    "positions",
    "shard_sequence",
    "unshard_sequence",
]
