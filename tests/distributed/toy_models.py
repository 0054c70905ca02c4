"""Models that training_cases.py trains: tied weights, frozen ones, recomputed blocks, sizes that no rank divides."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Linear(nn.Module):
    """Not torch's: a layer is known by its name."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class Norm(nn.Module):
    """RMS norm whose result has the dtype of what it gets."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * self.weight).to(x.dtype)


class ToyModel(nn.Module):
    """Tokens (B, S) -> logits (B, S, 37); no size of a weight but one is a multiple of 2."""

    tied, recompute = False, False

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 15)
        self.norm = Norm(15)
        self.up = nn.Linear(15, 23)
        self.frozen = nn.Linear(23, 23)
        self.frozen.requires_grad_(False)
        self.down = Linear(23, 15)
        self.head = nn.Linear(15, 37, bias=False)
        if self.tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(()) + 0.5)

    def block(self, x: Tensor) -> Tensor:
        return x + self.down(self.frozen(F.silu(self.up(self.norm(x)))))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)
        return self.head(x * self.scale.to(x.dtype))


class TiedModel(ToyModel):
    """The head has the embedding's weight."""

    tied = True


class RecomputedModel(ToyModel):
    """The block runs again in backward."""

    recompute = True
