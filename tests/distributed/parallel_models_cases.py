"""What test_parallel_models.py runs on 2 and 4 ranks: `python parallel_models_cases.py SIZE STORE [CASE ...]`.

The model is written for one process, with PyTorch's attention, and knows nothing of flash_ext. Every rank also trains
it alone on the whole batch; losses and parameters after three steps must be the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import ranks
from ranks import World
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import flash_ext

VOCABULARY, WIDTH, HEADS, GROUPS, DEPTH, BATCH, TOKENS, STEPS = 61, 64, 8, 4, 2, 4, 40, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, GROUPS * self.head_dim, bias=False) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # as many as there are here

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = self.heads(self.q(y)), self.heads(self.k(y)), self.heads(self.v(y))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(model: nn.Module, tokens: Tensor) -> list[float]:
    """Losses of a few steps on this rank's part of the batch."""
    # Of a tensor parallel model some parameters are DTensors and some are not. PyTorch's foreach, the default on GPUs,
    # takes no list of both.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for _ in range(STEPS):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, keeps_dtensors: bool) -> nn.Module:
    """Heads and hidden columns over the ranks; attention is given this rank's heads, plain or as DTensors."""
    split = ColwiseParallel(use_local_output=not keeps_dtensors)
    plan = {"q": split, "k": split, "v": split, "out": RowwiseParallel()}
    plan |= {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def kind(world: World) -> str:
    return torch.device(world.device).type


def compare(world: World, make: Callable[[nn.Module], nn.Module], parts: int, dtype: torch.dtype) -> None:
    """``make`` spreads the model; the batch is dealt over ``parts`` groups of ranks."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1)).to(world.device)
    alone, spread = (Model().to(world.device, dtype) for _ in range(2))
    spread.load_state_dict(alone.state_dict())
    expected = train(alone, tokens)
    spread = make(spread)
    own = tokens.chunk(parts)[world.rank // (world.size // parts)]
    before = flash_ext.enabled_calls()
    with flash_ext.enable():
        losses = train(spread, own)
    taken = flash_ext.enabled_calls() - before
    assert taken == STEPS * DEPTH, f"flash_ext served {taken} calls of {STEPS * DEPTH}"
    means = [sum(values) / world.size for values in zip(*world.everyone(losses), strict=True)]
    # NOTE: AdamW divides by the root of a gradient's square, so what a sum in another order changes grows where the
    # gradient is near 0; in float64 it stays far below.
    close = {torch.float64: 1e-9, torch.float32: 2e-3}[dtype]
    torch.testing.assert_close(torch.tensor(means), torch.tensor(expected), rtol=close, atol=close)
    for (name, got), (_, wanted) in zip(spread.named_parameters(), alone.named_parameters(), strict=True):
        message = partial("{}: {}".format, name)
        torch.testing.assert_close(whole(got.detach()), wanted.detach(), rtol=close, atol=close, msg=message)


def cases(size: int) -> dict[str, Callable[[World], None]]:
    found: dict[str, Callable[[World], None]] = {"batch and heads of DTensors": of_dtensors}
    for dtype in (torch.float64, torch.float32):
        name = str(dtype).removeprefix("torch.")
        found[f"FSDP2, {name}"] = partial(sharded, dtype=dtype)
        for keeps in (False, True):
            given = f"{'DTensors' if keeps else 'plain'}, {name}"
            found[f"tensor parallel, {given}"] = partial(split, dtype=dtype, keeps_dtensors=keeps)
            if size == 4:
                found[f"FSDP2 + tensor parallel, {given}"] = partial(both, dtype=dtype, keeps_dtensors=keeps)
    return found


def sharded(world: World, dtype: torch.dtype) -> None:
    mesh = init_device_mesh(kind(world), (world.size,))
    compare(world, lambda model: fsdp(model, mesh), world.size, dtype)


def split(world: World, dtype: torch.dtype, keeps_dtensors: bool) -> None:
    mesh = init_device_mesh(kind(world), (world.size,))
    compare(world, lambda model: tensor_parallel(model, mesh, keeps_dtensors), 1, dtype)


def both(world: World, dtype: torch.dtype, keeps_dtensors: bool) -> None:
    mesh = init_device_mesh(kind(world), (2, 2), mesh_dim_names=("data", "tensor"))
    compare(world, lambda model: fsdp(tensor_parallel(model, mesh["tensor"], keeps_dtensors), mesh["data"]), 2, dtype)


def fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def of_dtensors(world: World) -> None:
    """The drop-in on DTensors in each placement of batch and heads, beside the call on whole tensors."""
    mesh = init_device_mesh(kind(world), (world.size,))
    q, k, v = (torch.randn(4, heads, 24, 16, dtype=torch.float64).to(world.device) for heads in (8, 4, 4))
    for placement in (Replicate(), Shard(0), Shard(1)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        expected = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        expected.square().sum().backward()
        placed: list[Any] = [distribute_tensor(x, mesh, [placement]).requires_grad_() for x in (q, k, v)]
        with flash_ext.enable():
            out = F.scaled_dot_product_attention(*placed, is_causal=True, enable_gqa=True)
        out.square().sum().backward()
        torch.testing.assert_close(whole(out), expected)
        for got, wanted in zip(placed, leaves, strict=True):
            torch.testing.assert_close(whole(got.grad), wanted.grad)


if __name__ == "__main__":
    ranks.main(cases)
