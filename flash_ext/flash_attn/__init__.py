"""FlashAttention 2's public Python interface, computed by flash_ext.

    import sys, flash_ext
    sys.modules["flash_attn"] = flash_ext.flash_attn

makes programs that import ``flash_attn`` run here, also its modules ``flash_attn_interface``, ``bert_padding`` and
``layers.rotary``. Names, order and defaults of arguments and layouts of tensors are those of version 2.8 of that
package (Dao, arXiv:2307.08691; https://github.com/Dao-AILab/flash-attention). What is not here, as its models, fused
layers and the functions of its extension module, is missing by name: importing it is an ImportError.
"""

from flash_ext.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__version__ = "2.8.4+flash.ext"  # programs compare it with the version that they need

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
