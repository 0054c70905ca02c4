"""``ShardedWeight``: one parameter of FSDP, of which a rank keeps a part and which is whole while a layer uses it.

Between forward and backward it is a tensor without memory, to which the autograd graph may refer: its storage is given
back, and filled again before the layer's backward.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_a(layer: nn.Module | None, *names: str) -> bool:
    """Its class, or a base of it, has one of these names: torch's Linear or any other."""
    return any(base.__name__ in names for base in type(layer).__mro__)


class ShardedWeight:
    """A parameter of which this rank keeps ``shard``, flat; ``full`` has memory from ``gather`` to ``free``.

    ``full`` is the leaf that layers compute with. It shares the storage of ``buffer``, N equal parts (zeros behind the
    last element), but not its version counter: autograd need not know that the values were away.
    """

    def __init__(self, parameter: nn.Parameter, dtype: torch.dtype, group: dist.ProcessGroup | None) -> None:
        self.group, self.size = group, parameter.numel()
        self.world = dist.get_world_size(group)
        length = -(-self.size // self.world)
        self.buffer = parameter.new_zeros(length * self.world, dtype=dtype, requires_grad=False)
        self.full = nn.Parameter(self.buffer.data[: self.size].view(parameter.shape), parameter.requires_grad)
        self.gathering: tuple[dist.Work, Tensor] | None = None  # and what is read until then
        self.reducing: tuple[dist.Work, Tensor, Tensor] | None = None  # and result and input
        part = self.padded(parameter, parameter.dtype).view(self.world, length)[dist.get_rank(group)]
        self.shard = nn.Parameter(part.clone(), parameter.requires_grad)
        self.free()

    def padded(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """The values, flat, with the zeros of ``buffer`` behind them."""
        flat = values.detach().to(dtype).reshape(-1)
        return nn.functional.pad(flat, (0, self.buffer.numel() - self.size))

    def gather(self) -> None:
        """Begins to fill ``full``, unless it is or is being filled."""
        storage = self.buffer.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.buffer.numel() * self.buffer.element_size())
            part = self.shard.detach().to(self.buffer.dtype)
            work = dist.all_gather_into_tensor(self.buffer, part, group=self.group, async_op=True)
            self.gathering = work, part

    def wait(self) -> None:
        """``full`` has its values."""
        if self.gathering is not None:
            self.gathering[0].wait()
            self.gathering = None

    def free(self) -> None:
        """Gives the memory of ``full`` back."""
        self.wait()
        self.buffer.untyped_storage().resize_(0)

    def reduce(self) -> None:
        """Takes the gradient of ``full`` and begins to sum it over ranks."""
        whole = self.padded(self.full.grad, self.shard.dtype)
        self.full.grad = None
        part = torch.empty_like(self.shard, requires_grad=False)
        self.reducing = dist.reduce_scatter_tensor(part, whole, group=self.group, async_op=True), part, whole

    def finish_reducing(self) -> None:
        """Adds the mean over ranks to the gradient of ``shard``."""
        work, part, _ = self.reducing
        self.reducing = None
        work.wait()
        part.div_(self.world)
        self.shard.grad = part if self.shard.grad is None else self.shard.grad.add_(part)

    def gather_master(self) -> Tensor:
        """A whole copy of the parameter in the masters' dtype."""
        whole = self.shard.new_empty(self.buffer.numel(), requires_grad=False)
        dist.all_gather_into_tensor(whole, self.shard.detach(), group=self.group)
        return whole[: self.size].view(self.full.shape)
