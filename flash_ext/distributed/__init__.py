"""Many ranks of torch.distributed: one sequence over them, and training in implementations short enough to read.

Imported when it is first asked for: ``torch.distributed`` takes its time.
"""

from flash_ext.distributed.ddp import DDP
from flash_ext.distributed.dense import context_parallel_attention, explain_context_parallel
from flash_ext.distributed.fsdp import FSDP
from flash_ext.distributed.mode import context_parallel
from flash_ext.distributed.optimizer import ShardedOptimizer
from flash_ext.distributed.packed import context_parallel_attention_varlen
from flash_ext.distributed.shards import positions, shard_sequence, unshard_sequence

__all__ = [
    "DDP",
    "FSDP",
    "ShardedOptimizer",
    "context_parallel",
    "context_parallel_attention",
    "context_parallel_attention_varlen",
    "explain_context_parallel",
    "positions",
    "shard_sequence",
    "unshard_sequence",
]
