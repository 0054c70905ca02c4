"""``ShardedOptimizer``: every rank updates a part of the parameters and keeps the state of that part only (ZeRO-1).

    rank 0   update parameters a, d | broadcast a, d ->    <- b | <- c
    rank 1   update b               |  <- a, d       b ->       | <- c
    rank 2   update c               |  <- a, d    <- b       c ->

AdamW keeps two numbers for each parameter, in fp32 twice the parameters' own bytes; here a rank keeps 1/N of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from flash_ext.distributed.agree import agree_once


class ShardedOptimizer(Optimizer):
    """An ``optimizer_cls(params, **kwargs)`` whose state is sharded over the ranks of ``group`` (default: all).

    A parameter belongs to one rank as a whole: in the order given, each goes to the rank that has the fewest elements
    so far. So shares differ by the largest parameter at most, and every rank finds the same owners without asking. It
    works for optimizers that treat parameters one by one, which of torch.optim's are all but LBFGS.

    Gradients must be equal on all ranks before :meth:`step` (DDP makes them so). ``param_groups`` has every parameter,
    and options that are changed there, as schedulers do, count. ``state`` and ``state_dict()`` are this rank's part.

    For P bytes of parameters on N ranks, a rank sends its P / N bytes to all and receives the other (N - 1) / N * P,
    after DDP's 2 (N - 1) / N * P of gradients.

    :raises AttentionError: on every rank, where the optimizer, its options or the parameters differ between ranks.
    :raises ValueError: from ``load_state_dict`` for the part of another rank or of another number of ranks.

    Source: Rajbhandari et al. 2020, "ZeRO" (stage 1).
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        optimizer_cls: type[Optimizer],
        *,
        group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        self._group, self._rank = group, dist.get_rank(group)
        self._load = [0] * dist.get_world_size(group)  # elements of each rank
        self._owner: dict[Tensor, int] = {}
        self._local: Optimizer | None = None  # the optimizer of this rank's parameters
        super().__init__(params, dict(kwargs))
        self._agree(self.param_groups, {"optimizer_cls": optimizer_cls.__name__})
        self._local = optimizer_cls([self._mine(entry) for entry in self.param_groups], **kwargs)
        self.defaults = self._local.defaults
        for whole, mine in zip(self.param_groups, self._local.param_groups, strict=True):
            whole.update((name, option) for name, option in mine.items() if name not in whole)
        self.state = self._local.state

    def _agree(self, groups: list[dict[str, Any]], options: dict[str, str]) -> None:
        """Raises on every rank where they differ; of options, numbers and words alone."""
        named = {}
        for i, group in enumerate(groups):
            named |= {f"parameter {j} of group {i}": parameter for j, parameter in enumerate(group["params"])}
            plain = {name: str(x) for name, x in group.items() if isinstance(x, (int, float, str, tuple, type(None)))}
            options = options | {f"{name} of group {i}": text for name, text in plain.items()}
        agree_once(self._group, named.items(), options)

    def _mine(self, param_group: dict[str, Any]) -> dict[str, Any]:
        """The group with this rank's parameters alone."""
        options = {name: option for name, option in param_group.items() if name not in ("params", "param_names")}
        return options | {"params": [p for p in param_group["params"] if self._owner[p] == self._rank]}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, which get owners like those before."""
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        for parameter in added["params"]:
            owner = self._load.index(min(self._load))
            self._owner[parameter] = owner
            self._load[owner] += parameter.numel()
        if self._local is not None:
            self._agree([added], {})
            self._local.add_param_group(self._mine(added))

    def _copy_options(self) -> None:
        """What was changed in ``param_groups``, a learning rate for one, to the optimizer of this rank's part."""
        for whole, mine in zip(self.param_groups, self._local.param_groups, strict=True):
            mine.update((name, option) for name, option in whole.items() if name not in ("params", "param_names"))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's parameters and broadcasts them; returns what the closure, if any, returns.

        The closure runs on every rank and must leave equal gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._copy_options()
        self._local.step()
        works = [
            dist.broadcast(parameter.detach(), group=self._group, group_src=owner, async_op=True)
            for parameter, owner in self._owner.items()
            if parameter.requires_grad
        ]
        for work in works:
            work.wait()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state dict of this rank's parameters, and under "shard" (rank, ranks)."""
        self._copy_options()
        return self._local.state_dict() | {"shard": (self._rank, len(self._load))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what ``state_dict()`` gave on the same rank of as many ranks; options count for all parameters."""
        here, there = (self._rank, len(self._load)), tuple(state_dict.get("shard", ()))
        if there != here:
            raise ValueError(f"state_dict of shard {there} does not fit rank {here[0]} of {here[1]}, shard {here}")
        self._local.load_state_dict({name: part for name, part in state_dict.items() if name != "shard"})
        self.state = self._local.state
        for whole, mine in zip(self.param_groups, self._local.param_groups, strict=True):
            whole.update((name, option) for name, option in mine.items() if name != "params")
