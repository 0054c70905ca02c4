"""``DDP``: the same model on every rank, each with its own part of the batch, gradients averaged during backward.

    rank 0  backward: | layer 3 | layer 2 | layer 1 |              | optimizer
            network:            | all-reduce 3 | all-reduce 2 | 1 |

A gradient is sent as soon as it is complete, while backward computes those of earlier layers. What remains exposed is
the part that the network needs longer than backward, and the last gradient.

Every rank must issue the same collectives in the same order, or they wait for each other forever. Backward need not
finish gradients in the same order everywhere: a parameter may be used on one rank and not on another. So the order is
fixed: the parameters' own, last one first, which is about that of backward. A gradient that is complete early waits
for those before it in that order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flash_ext.distributed.agree import agree_once


def broadcast_module(module: nn.Module, group: dist.ProcessGroup | None, **options: Any) -> None:
    """Overwrites every parameter and buffer by that of the group's rank 0; they must fit, and options be the same."""
    named = (*module.named_parameters(), *module.named_buffers())
    agree_once(group, named, {name: str(value) for name, value in options.items()})
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), group=group, group_src=0)


class DDP(nn.Module):
    """Wraps ``module`` for data-parallel training on the ranks of ``group`` (default: all of them).

    Parameters and buffers of rank 0 are broadcast. Then train as on one rank, with a part of the batch each, and call
    :meth:`finish_gradient_synchronization` between every ``backward()`` and the optimizer's ``step()``: gradients are
    then the mean over ranks, which for equal parts and a mean loss is the gradient of the whole batch.

    Tied weights are one parameter and are sent once. A parameter that this rank's backward did not reach counts as
    zeros; one that no rank reached keeps the gradient None, as on one rank.

    For P bytes of gradients on N ranks, each rank sends and receives 2 (N - 1) / N * P bytes a step (a ring all-reduce
    is a reduce-scatter and an all-gather). It holds everything: parameters, gradients and optimizer state.

    :raises AttentionError: on every rank, where parameters or buffers differ between ranks in number, name, shape or
        dtype.
    :raises RuntimeError: where backward runs twice without ``finish_gradient_synchronization()`` in between.

    Source: Li et al. 2020, "PyTorch Distributed" (section 3.2), with a bucket for each parameter.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.module, self.group = module, group
        self._world = dist.get_world_size(group)
        broadcast_module(module, group)
        self._order = [parameter for parameter in module.parameters() if parameter.requires_grad][::-1]
        self._ready: set[nn.Parameter] = set()  # gradient is complete on this rank
        self._works: list[dist.Work] = []  # all-reduces so far, in the order of self._order
        for parameter in self._order:
            parameter.register_post_accumulate_grad_hook(self._gradient_is_ready)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        return self.module(*args, **kwargs)

    def _gradient_is_ready(self, parameter: nn.Parameter) -> None:
        if parameter in self._ready:
            raise RuntimeError("backward() ran twice without finish_gradient_synchronization() in between")
        self._ready.add(parameter)
        while len(self._works) < len(self._order) and self._order[len(self._works)] in self._ready:
            self._send(self._order[len(self._works)])

    def _send(self, parameter: nn.Parameter) -> None:
        self._works.append(dist.all_reduce(parameter.grad, group=self.group, async_op=True))

    def finish_gradient_synchronization(self) -> None:
        """Sends what backward did not reach, waits for every all-reduce, and makes means of the sums."""
        if not self._order:
            return
        missing = {parameter for parameter in self._order if parameter.grad is None}
        for parameter in missing:
            parameter.grad = torch.zeros_like(parameter)
        for parameter in self._order[len(self._works) :]:
            self._send(parameter)
        reached = torch.tensor([parameter in self._ready for parameter in self._order], dtype=torch.uint8)
        reached = reached.to(self._order[0].device)
        dist.all_reduce(reached, dist.ReduceOp.MAX, group=self.group)
        for parameter, work in zip(self._order, self._works, strict=True):
            work.wait()
            parameter.grad.div_(self._world)
        if missing:  # else the host need not wait for a GPU to know what was reached
            for parameter, anywhere in zip(self._order, reached.tolist(), strict=True):
                if not anywhere and parameter in missing:
                    parameter.grad = None
        self._ready.clear()
        self._works.clear()
