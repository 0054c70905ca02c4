"""flash_ext: exact attention for PyTorch, forward and backward, that never materialises the score matrix."""

from flash_ext import flops as _flops
from flash_ext import late as _late
from flash_ext import ops as _ops
from flash_ext import vmap as _vmap
from flash_ext.attention import FlashAttention, allow_in_graph, attention, merge_attention
from flash_ext.control import disable, enable, enabled_calls, use_backend
from flash_ext.errors import AttentionError
from flash_ext.explain import explain
from flash_ext.ops import build_info
from flash_ext.sdpa import scaled_dot_product_attention

_library = _ops.new_library()
_vmap.register(_library)
_late.when_imported("torch._dynamo", allow_in_graph)
_late.when_imported("torch.utils.flop_counter", _flops.register)

__version__ = build_info()["version"]
__all__ = [
    "AttentionError",
    "FlashAttention",
    "attention",
    "build_info",
    "disable",
    "enable",
    "enabled_calls",
    "explain",
    "merge_attention",
    "scaled_dot_product_attention",
    "use_backend",
]
