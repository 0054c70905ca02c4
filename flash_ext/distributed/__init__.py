"""Training on many ranks of torch.distributed, in implementations that are short enough to read."""

from flash_ext.distributed.ddp import DDP
from flash_ext.distributed.fsdp import FSDP
from flash_ext.distributed.optimizer import ShardedOptimizer

__all__ = ["DDP", "FSDP", "ShardedOptimizer"]
