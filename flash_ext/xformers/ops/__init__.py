"""What ``xformers.ops`` has of attention."""

from . import fmha
from .fmha import (
    AttentionBias,
    LowerTriangularMask,
    memory_efficient_attention,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
)

__all__ = [
    "AttentionBias",
    "LowerTriangularMask",
    "fmha",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
]
