"""How train_lm.py --parallel spreads a model over ranks: torch's own wrappers, and the arithmetic of each.

A strategy is a row of STRATEGIES. To add one, write a function from model to Job, and what a rank holds and sends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from harness import load_flash_ext
from model import TransformerLM
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

ADAMW = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}


@dataclass
class Job:
    """What is trained: `call` maps tokens to logits; `model` has the parameters that this rank holds.

    It is trained within `scope()`.
    """

    model: nn.Module
    call: Callable[[Tensor], Tensor]
    optimizer: Any
    scope: Callable[[], AbstractContextManager] = nullcontext


def adamw(model: nn.Module) -> AdamW:
    """AdamW; DTensors and tensors are groups of their own, because one fused kernel does not take both."""
    parameters = list(model.parameters())
    groups = [[p for p in parameters if isinstance(p, DTensor) == sharded] for sharded in (True, False)]
    return AdamW([{"params": group} for group in groups if group], **ADAMW)


def none(model: TransformerLM) -> Job:
    """One rank."""
    return Job(model, model, adamw(model))


def replicated(model: TransformerLM) -> nn.parallel.DistributedDataParallel:
    """Gradients lie in the buckets that travel, not beside them."""
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def ddp(model: TransformerLM) -> Job:
    """Everything on every rank, a part of the batch each; gradients are all-reduced in buckets during backward."""
    return Job(model, replicated(model), adamw(model))


def zero1(model: TransformerLM) -> Job:
    """DDP whose optimizer state is sharded; updated parameters are broadcast."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return Job(model, replicated(model), ZeroRedundancyOptimizer(model.parameters(), AdamW, **ADAMW))


def fsdp(model: TransformerLM) -> Job:
    """Parameters, gradients and state sharded; each block's weights are gathered before it runs."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return Job(model, model, adamw(model))


def regrouped(linear: nn.Linear, parts: int) -> None:
    """Orders the rows of a weight of `parts` stacked ones so that each rank's share has as many of every part."""
    ranks = dist.get_world_size()
    with torch.no_grad():
        rows = linear.weight.unflatten(0, (parts, ranks, -1)).transpose(0, 1)
        linear.weight.copy_(rows.flatten(0, 2))


def tp(model: TransformerLM) -> Job:
    """The heads of attention and the width of the MLP are split; activations are all-reduced twice a block and pass."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.device_mesh.init_device_mesh(model.head.weight.device.type, (dist.get_world_size(),))
    for block in model.blocks:
        regrouped(block.attention.qkv, 3)
        regrouped(block.mlp.gate_up, 2)
        first, second = ColwiseParallel(), RowwiseParallel()
        plan = {"attention.qkv": first, "attention.out": second, "mlp.gate_up": first, "mlp.down": second}
        parallelize_module(block, mesh, plan)
    return Job(model, model, adamw(model))


def over_tokens(job: Job, model: TransformerLM) -> Job:
    """The job on this rank's tokens of each sequence; attention is that of the whole one."""
    load_flash_ext()
    from flash_ext.distributed import context_parallel, positions

    group, call = dist.group.WORLD, job.call
    where = positions(model.context, group, device=model.cos.device)
    return Job(job.model, lambda tokens: call(tokens, where), job.optimizer, lambda: context_parallel(group))


def cp(model: TransformerLM) -> Job:
    """Each sequence is split by flash_ext.distributed.context_parallel; parameters are as in DDP."""
    return over_tokens(ddp(model), model)


def fsdp_cp(model: TransformerLM) -> Job:
    """Each sequence is split, and parameters, gradients and state are as in FSDP, over the same ranks."""
    return over_tokens(fsdp(model), model)


@dataclass(frozen=True)
class Sizes:
    """What the arithmetic of a strategy starts from, in bytes."""

    ranks: int
    weights: int  # all parameters
    split: int  # those of attention and MLP
    activations: int  # one tensor (batch, context, d_model)
    layers: int
    outside: int = 0  # kept for backward outside of attention and MLP, and within them, of the whole batch; in float32
    inside: int = 0
    angles: int = 0  # of the rotary embedding, kept as well
    casts_split: int = 0  # autocast's copies of weights that tensor parallelism splits
    casts_whole: int = 0  # and of the head's


def kept_sizes(
    layers: int, heads: int, d_model: int, d_ff: int, batch: int, context: int, vocab: int, half: bool
) -> dict[str, int]:
    """Bytes that model.TransformerLM keeps for backward, with attention that keeps no scores.

    A token keeps in a norm its input, the normed one, the result and a factor: 3 d + 1, in two norms a block and one
    before the head; in attention the projection (3 d), query and key turned, out twice, and a log-sum-exp a head:
    7 d + heads; in the MLP 4 d_ff; and its number, of 8 bytes. All are float32, or with ``half`` what autocast has in
    16 bits: the results of norms, and all but the log-sum-exp in attention and in the MLP. Autocast keeps its copies of
    the weights as well.
    """
    width, tokens = 2 if half else 4, batch * context
    norm = (8 + width) * d_model + 4
    return {
        "outside": tokens * ((2 * layers + 1) * norm + 8),
        "inside": tokens * layers * (width * (7 * d_model + 4 * d_ff) + 4 * heads),
        "angles": 4 * context * d_model // heads,
        "casts_split": 2 * layers * (4 * d_model**2 + 3 * d_model * d_ff) * half,
        "casts_whole": 2 * d_model * vocab * half,
    }


@dataclass(frozen=True)
class Strategy:
    """How a model becomes a Job; shares held are of parameters, gradients and the state of one parameter."""

    make: Callable[[TransformerLM], Job]
    held: Callable[[Sizes], tuple[float, float, float]]
    sent: Callable[[Sizes], float]  # bytes a step and rank
    splits: Literal["batch", "tokens", "nothing"] = "batch"  # what of a batch a rank gets a part of

    def kept(self, s: Sizes) -> float:
        """Bytes of activations that a rank keeps for backward.

        Of split tokens 2 d a block and token less where `ulysses` exchanges heads: then value is no view of the
        projection.
        """
        if self.splits == "nothing":
            return s.outside + (s.inside + s.casts_split) / s.ranks + s.angles + s.casts_whole
        angles = s.angles / s.ranks if self.splits == "tokens" else s.angles
        return (s.outside + s.inside) / s.ranks + angles + s.casts_split + s.casts_whole


def _ring(s: Sizes) -> float:
    return (s.ranks - 1) / s.ranks


def _tp_held(s: Sizes) -> tuple[float, float, float]:
    return (s.weights - s.split + s.split / s.ranks,) * 3


def _exchanged(s: Sizes) -> float:
    """Query, key, value and out between tokens and heads, there and in backward back (ulysses)."""
    return 8 * s.layers * _ring(s) * s.activations / s.ranks


STRATEGIES = {
    "none": Strategy(none, lambda s: (s.weights,) * 3, lambda s: 0.0),
    "ddp": Strategy(ddp, lambda s: (s.weights,) * 3, lambda s: 2 * _ring(s) * s.weights),
    "zero1": Strategy(zero1, lambda s: (s.weights, s.weights, s.weights / s.ranks), lambda s: 3 * _ring(s) * s.weights),
    "fsdp": Strategy(fsdp, lambda s: (s.weights / s.ranks,) * 3, lambda s: 3 * _ring(s) * s.weights),
    "tp": Strategy(tp, _tp_held, lambda s: 4 * s.layers * 2 * _ring(s) * s.activations, "nothing"),
    "cp": Strategy(cp, lambda s: (s.weights,) * 3, lambda s: 2 * _ring(s) * s.weights + _exchanged(s), "tokens"),
    "fsdp+cp": Strategy(
        fsdp_cp, lambda s: (s.weights / s.ranks,) * 3, lambda s: 3 * _ring(s) * s.weights + _exchanged(s), "tokens"
    ),
}
