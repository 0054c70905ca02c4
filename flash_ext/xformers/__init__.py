"""xformers' ``memory_efficient_attention`` and its biases, computed by flash_ext.

    import sys, flash_ext
    sys.modules["xformers"] = flash_ext.xformers

makes programs that import ``xformers.ops`` run here. Names, order and defaults of arguments and layouts of tensors are
those of xformers 0.0.35 (https://github.com/facebookresearch/xformers). What is not here (other operators, biases of
gappy keys in pages, the backward by hand) is missing by name: importing it is an ImportError.
"""

__version__ = "0.0.35+flash.ext"  # programs compare it with the version that they need
