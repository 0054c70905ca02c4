"""``FSDP``: every rank keeps 1/N of each weight, of its gradient and of its optimizer state, and gathers it for use.

    forward    gather 1 | layer 1  | layer 2            | layer 3
                        | gather 2 | gather 3           |
    backward   gather 3 | layer 3  | layer 2            | layer 1  |
                        | gather 2 | gather 1, reduce 3 | reduce 2 | reduce 1

While a layer computes, the next one's weight travels: the one that followed it in the last forward, in backward the
one before it. What a layer used is given back at once; sharded_weight.py says how the graph can still refer to it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flash_ext.distributed.ddp import broadcast_module
from flash_ext.distributed.sharded_weight import ShardedWeight, is_a

IN_FLIGHT = 2  # gradients that are being reduced while backward goes on


class FSDP(nn.Module):
    """Wraps ``module`` and shards its Linear and Embedding layers over the ranks of ``group`` (default: all of them).

    Parameters and buffers of rank 0 count. What the optimizer gets from ``parameters()`` are this rank's parts, flat
    and padded to equal lengths, in the dtype that the weights had (the masters), and whole the parameters of all other
    modules (norms). With ``compute_dtype`` weights travel and layers compute in that dtype; inputs of sharded layers
    are cast to it. Gradients are summed in the masters' dtype. Call :meth:`finish_gradient_synchronization` between
    every ``backward()`` and the optimizer's ``step()``: gradients are then means over ranks.

    All ranks must have one model, else all raise an AttentionError, and run its layers in one order. A sharded weight
    may be used by its own module's forward only. Tied ones stay tied. What is recomputed is gathered once in backward.

    For P weights on N ranks, of c bytes to compute and m to keep, a rank sends (N - 1) / N * P * (2 c + m) bytes a step
    (gathers in forward and in backward, a reduce-scatter; no second gather of an Embedding), and for parameters that
    are whole what DDP sends. It holds m / N bytes of a weight, as many of its gradient, and the optimizer's state.

    Source: Zhao et al. 2023, "PyTorch FSDP"; Rajbhandari et al. 2020, "ZeRO" (stage 3).
    """

    def __init__(
        self, module: nn.Module, compute_dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.module, self.group, self.compute_dtype = module, group, compute_dtype
        broadcast_module(module, group, compute_dtype=compute_dtype)
        sharded = [layer for layer in module.modules() if is_a(layer, "Linear", "Embedding")]
        others = {p for layer in module.modules() if layer not in sharded for p in layer.parameters(recurse=False)}
        weights: dict[nn.Parameter, ShardedWeight] = {}
        self._weights: dict[nn.Module, dict[str, ShardedWeight]] = {}
        for layer in sharded:
            named = {name: p for name, p in layer.named_parameters(recurse=False) if p not in others}
            for parameter in named.values():
                if parameter not in weights:
                    weights[parameter] = ShardedWeight(parameter, compute_dtype or parameter.dtype, group)
            self._weights[layer] = {name: weights[parameter] for name, parameter in named.items()}
            self._show(layer, "shard")
            layer.register_forward_pre_hook(self._before_forward)
            layer.register_forward_hook(self._after_forward, always_call=True)
        self._unique = list(weights.values())
        for weight in filter(lambda weight: weight.shard.requires_grad, self._unique):
            weight.full.register_post_accumulate_grad_hook(lambda _, weight=weight: self._reduce(weight))
        for parameter in filter(lambda parameter: parameter.requires_grad, others):
            parameter.register_post_accumulate_grad_hook(self._all_reduce)
        self._all_reduced: dict[nn.Parameter, dist.Work] = {}
        self._reducing: list[ShardedWeight] = []
        self._after: dict[nn.Module, nn.Module] = {}  # the layer that ran next in the last forward
        self._before: dict[nn.Module, nn.Module] = {}
        self._last: nn.Module | None = None  # the layer that ran last in this forward
        self._in_backward = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        self._last, self._in_backward = None, False
        return self.module(*args, **kwargs)

    def _show(self, layer: nn.Module, which: str) -> None:
        """Makes "shard" or "full" of each weight the layer's parameter."""
        for name, weight in self._weights[layer].items():
            setattr(layer, name, getattr(weight, which))

    def _gather(self, layer: nn.Module | None) -> None:
        for weight in self._weights.get(layer, {}).values():
            weight.gather()

    def _before_forward(self, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        self._gather(layer)
        if not self._in_backward:  # else it is run again, for its backward
            if self._last is not None:
                self._after[self._last], self._before[layer] = layer, self._last
            self._last = layer
            self._gather(self._after.get(layer))
        for weight in self._weights[layer].values():
            weight.wait()
        self._show(layer, "full")
        dtype = self.compute_dtype
        return tuple(x.to(dtype) if dtype and isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)

    def _after_forward(self, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor | None) -> None:
        self._show(layer, "shard")
        if self._in_backward:
            return
        for weight in self._weights[layer].values():
            weight.free()
        if output is not None and output.requires_grad:  # None: forward raised
            output.register_hook(lambda _: self._before_backward(layer))

    def _before_backward(self, layer: nn.Module) -> None:
        """The gradient of the layer's output is there."""
        self._in_backward = True
        for wanted in (layer, self._before.get(layer)):
            if not is_a(wanted, "Embedding"):  # whose backward does not look at the weight
                self._gather(wanted)
        for weight in self._weights[layer].values():
            weight.wait()

    def _reduce(self, weight: ShardedWeight) -> None:
        weight.free()
        weight.reduce()
        self._reducing.append(weight)
        if len(self._reducing) > IN_FLIGHT:
            self._reducing.pop(0).finish_reducing()

    def _all_reduce(self, parameter: nn.Parameter) -> None:
        if parameter in self._all_reduced:
            raise RuntimeError("backward() ran twice without finish_gradient_synchronization() in between")
        self._all_reduced[parameter] = dist.all_reduce(parameter.grad, group=self.group, async_op=True)

    def finish_gradient_synchronization(self) -> None:
        """Waits until every gradient is the mean over ranks, and frees what is still gathered."""
        while self._reducing:
            self._reducing.pop(0).finish_reducing()
        for parameter, work in self._all_reduced.items():
            work.wait()
            parameter.grad.div_(dist.get_world_size(self.group))
        self._all_reduced.clear()
        self._in_backward = False
        for weight in self._unique:
            weight.free()

    @torch.no_grad()
    def gather_full_params(self) -> dict[str, Tensor]:
        """Every parameter of the module by its name, whole, in the masters' dtype; copies. All ranks call it."""
        weights = {weight.shard: weight for weight in self._unique}
        gathered = {p: weights[p].gather_master() if p in weights else p.clone() for p in self.module.parameters()}
        return {name: gathered[p] for name, p in self.module.named_parameters(remove_duplicate=False)}
