"""flash_ext: exact attention for PyTorch, forward and backward, that never materialises the score matrix."""

import importlib as _importlib

from flash_ext import checkpoint as _checkpoint
from flash_ext import control as _control
from flash_ext import dynamo as _dynamo
from flash_ext import flops as _flops
from flash_ext import late as _late
from flash_ext import nested as _nested
from flash_ext import ops as _ops
from flash_ext import partitioner as _partitioner
from flash_ext import pytorch_varlen as _pytorch_varlen
from flash_ext import vmap as _vmap
from flash_ext.attention import FlashAttention, attention, merge_attention
from flash_ext.cache import attention_with_cache
from flash_ext.checkpoint import checkpoint_ops
from flash_ext.control import disable, enable, enabled_calls, use_backend, why_not
from flash_ext.errors import AttentionError
from flash_ext.explain import explain
from flash_ext.fp8 import quantize_fp8
from flash_ext.ops import build_info
from flash_ext.sdpa import scaled_dot_product_attention
from flash_ext.varlen import attention_varlen

_library = _ops.new_library()
_vmap.register(_library)
_late.when_imported("torch._dynamo", _dynamo.register)
_late.when_imported("torch.fx.experimental.proxy_tensor", _partitioner.register)
_late.when_imported("torch.utils.checkpoint", _checkpoint.register)
_late.when_imported(
    "torch.distributed.tensor", lambda: _importlib.import_module("flash_ext.sharding").register(_library)
)
_late.when_imported("torch.nested._internal.ops", _nested.register)
_late.when_imported("torch.nn.attention", _control.register_flash_attention)
_late.when_imported("torch.nn.attention.varlen", _pytorch_varlen.register)
_late.when_imported("torch.utils.flop_counter", _flops.register)

__version__ = build_info()["version"]


def __getattr__(name: str) -> object:
    """Modules that are imported when they are first asked for."""
    if name in ("distributed", "flash_attn", "flash_attn_3", "integrations", "profiling", "xformers"):
        return _importlib.import_module(f"flash_ext.{name}")
    raise AttributeError(f"module 'flash_ext' has no attribute {name!r}")


__all__ = [
    "AttentionError",
    "FlashAttention",
    "attention",
    "attention_varlen",
    "attention_with_cache",
    "build_info",
    "checkpoint_ops",
    "disable",
    "enable",
    "enabled_calls",
    "explain",
    "merge_attention",
    "quantize_fp8",
    "scaled_dot_product_attention",
    "use_backend",
    "why_not",
]
