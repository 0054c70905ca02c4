"""A decoder-only Transformer language model whose attention can be swapped.

Blocks are x + Attention(RMSNorm(x)), then x + SwiGLU(RMSNorm(x)); positions are rotary (RoPE, Su et al. 2021); SwiGLU
is Shazeer 2020; RMSNorm is Zhang & Sennrich 2019. Called by training.py and stepping.py. Every attention in ATTENTIONS
means the same, causal softmax(q k^T / sqrt(D)) v on (B, H, S, D), so two models with the same seed differ in nothing
but rounding. Parts of the model carry names for profilers (named_range), which cost nothing without mark_ranges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from harness import load_flash_ext
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]
RECOMPUTE = ("none", "block", "nested", "sqrt")
BYTE_VOCAB = 256  # text is read byte by byte, so no tokenizer has to be fetched or trained


@dataclass(frozen=True)
class Size:
    """One row of the size table; `lr` is the peak learning rate that suits the width."""

    d_model: int
    d_ff: int
    layers: int
    heads: int
    lr: float


SIZES = {
    "tiny": Size(128, 384, 4, 4, 2e-3),
    "small": Size(768, 3072, 12, 12, 6e-4),
    "medium": Size(1024, 4096, 24, 16, 3e-4),
    "large": Size(1280, 5120, 36, 20, 2.5e-4),
    "xl": Size(2560, 10240, 32, 32, 1.6e-4),
    "10B": Size(4608, 12288, 50, 36, 1e-4),
}


_open_range: Callable[[str], AbstractContextManager] = nullcontext


@contextmanager
def mark_ranges(open_range: Callable[[str], AbstractContextManager]) -> Iterator[None]:
    """Within it every named_range is open_range(name), a profiler's context manager."""
    global _open_range
    before, _open_range = _open_range, open_range
    try:
        yield
    finally:
        _open_range = before


def named_range(name: str) -> AbstractContextManager:
    """Marks a part of a step by name for a profiler; nothing inside compiled code, where no part runs by itself."""
    return nullcontext() if torch.compiler.is_compiling() else _open_range(name)


def naive_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Textbook causal attention, (B, H, S, D) each: writes out the whole (B, H, S, S) score matrix, twice."""
    with named_range("computing attention scores"):
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    with named_range("computing softmax"):
        probabilities = scores.softmax(dim=-1).to(v.dtype)
    with named_range("final matmul"):
        return probabilities @ v


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's own fused attention, causal, (B, H, S, D) each."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def flash_ext_attention() -> AttentionFn:
    """This project's attention; imported here so that the other attentions work where it is not built."""
    sdpa = load_flash_ext().scaled_dot_product_attention
    return lambda q, k, v: sdpa(q, k, v, is_causal=True)


# name -> factory, so that a name costs nothing (an import, a compilation) until it is chosen
ATTENTIONS: dict[str, Callable[[], AttentionFn]] = {
    "flash_ext": flash_ext_attention,
    "sdpa": lambda: sdpa_attention,
    "naive": lambda: naive_attention,
    "compiled-naive": lambda: torch.compile(naive_attention),
}


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; computed in float32, returned in x's dtype."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), d_model -> d_ff -> d_model."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(d_model, 2 * d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def rope_table(context: int, head_dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """cos and sin of position * base^(-2i/D), (context, D/2) each, float32."""
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(context, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies RoPE to x (B, H, S, D) with tables (S, D/2): coordinate i is paired with i + D/2."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class SelfAttention(nn.Module):
    """Projects (B, S, d_model) to q, k, v of (B, H, S, D), rotates q and k, attends, projects back."""

    def __init__(self, size: Size, attention: AttentionFn) -> None:
        super().__init__()
        self.head_dim = size.d_model // size.heads
        self.attention = attention
        self.qkv = nn.Linear(size.d_model, 3 * size.d_model, bias=False)
        self.out = nn.Linear(size.d_model, size.d_model, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, -1, self.head_dim).permute(2, 0, 3, 1, 4)  # a rank may have some heads only
        y = self.attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One Transformer layer, (B, S, d_model) -> (B, S, d_model)."""

    def __init__(self, size: Size, attention: AttentionFn) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(size.d_model), RMSNorm(size.d_model)
        self.attention, self.mlp = SelfAttention(size, attention), SwiGLU(size.d_model, size.d_ff)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class BackwardRanges:
    """Names the backward of each block by hooks on what lies between blocks.

    A gradient that arrives there ends the range of the later block and opens that of the earlier one. Ranges nest as
    they should only if backward runs in the thread that opened the range around it.
    """

    def __init__(self) -> None:
        self.stack = ExitStack()

    def mark(self, x: Tensor, name: str = "") -> None:
        """`x` came out of the block `name`; no name: out of what is before all blocks."""

        def switch(_: Tensor) -> None:
            self.stack.close()
            if name:
                self.stack.enter_context(named_range(f"{name} backward"))

        if x.requires_grad and _open_range is not nullcontext:
            x.register_hook(switch)


def group_size(layers: int) -> int:
    """Blocks of a group that is recomputed as a whole: about as many as there are groups."""
    return math.ceil(math.sqrt(layers))


def checkpointed(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same call, which backward runs again instead of keeping what it computes."""
    return partial(checkpoint, run, use_reentrant=False) if torch.is_grad_enabled() else run


class TransformerLM(nn.Module):
    """Tokens (B, S) int64 -> logits (B, S, vocab), S <= context.

    `recompute` is one of RECOMPUTE, what backward computes again instead of keeping it: nothing, each block, each group
    of about sqrt(layers) blocks, or such groups whose blocks keep only their inputs while the group runs again.
    """

    def __init__(
        self, size: Size, attention: AttentionFn, context: int, vocab: int = BYTE_VOCAB, recompute: str = "none"
    ) -> None:
        super().__init__()
        self.context, self.recompute = context, recompute
        self.embedding = nn.Embedding(vocab, size.d_model)
        self.blocks = nn.ModuleList(Block(size, attention) for _ in range(size.layers))
        self.norm = RMSNorm(size.d_model)
        self.head = nn.Linear(size.d_model, vocab, bias=False)
        cos, sin = rope_table(context, size.d_model // size.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:  # what writes into the residual stream starts smaller, as in GPT-2
                residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * size.layers) if residual else 0.02)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """`positions` (S,): where the tokens stand in a sequence of which they are a part; None: from 0 on."""
        where = slice(tokens.shape[1]) if positions is None else positions
        cos, sin = self.cos[where], self.sin[where]
        x = self.embedding(tokens)
        backward = BackwardRanges()
        backward.mark(x)
        layers = len(self.blocks)
        size = group_size(layers) if self.recompute in ("sqrt", "nested") else layers
        run = checkpointed(self.run_blocks) if size < layers else self.run_blocks
        for first in range(0, layers, size):
            x = run(range(first, min(first + size, layers)), x, cos, sin, backward)
        return self.head(self.norm(x))

    def run_blocks(self, indices: range, x: Tensor, cos: Tensor, sin: Tensor, backward: BackwardRanges) -> Tensor:
        """x (B, S, d_model) through some blocks in order."""
        for index in indices:
            block = self.blocks[index]
            run = checkpointed(block) if self.recompute in ("block", "nested") else block
            with named_range(f"block {index}"):
                x = run(x, cos, sin)
            backward.mark(x, f"block {index}")
        return x

    def compile_blocks(self) -> None:
        """Compiles one block; the others, which differ in weights only, share its code, and their ranges stay."""
        for block in self.blocks:
            block.compile()

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, temperature: float = 0.7, seed: int = 0) -> bytes:
        """Continues `prompt` by `length` sampled bytes; there is no K/V cache, every byte runs the whole window."""
        generator = torch.Generator().manual_seed(seed)
        tokens = list(prompt)
        for _ in range(length):
            window = torch.tensor([tokens[-self.context :]], device=self.head.weight.device)
            probabilities = (self(window)[0, -1].float().cpu() / temperature).softmax(dim=-1)
            tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        return bytes(tokens[len(prompt) :])
