"""Loads what was built for the running torch, and registers what Python adds to its operators.

    libflash_kernels.so                    the kernels, which know no torch
    torch_2.11/libflash_ext.so             the operators, for one minor version of torch
    torch_2.11/_C.cpython-....so           the module of a Python, beside them
    torch_2.11/build_info.json

Reached by ``import flash_ext``; afterwards ``torch.ops.flash_ext`` holds every operator of ``csrc/torch/schemas.h``.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flash_ext.errors import AttentionError

_FOLDER = Path(__file__).parent
_MINOR = ".".join(torch.__version__.split(".")[:2])
_OF_TORCH = _FOLDER / f"torch_{_MINOR}"
LIBRARIES = [_FOLDER / "libflash_kernels.so", _OF_TORCH / "libflash_ext.so"]  # the second loads the first
_REBUILD = "run `pip install --no-build-isolation .` in the repository"


def build_info() -> dict[str, Any]:
    """How this installation was built: version, commit, torch, compiler, CUDA decision and its reason.

    Read from ``build_info.json`` beside the library; ``torch.ops.flash_ext.build_info()`` returns the same text.
    """
    file = _OF_TORCH / "build_info.json"
    if file.exists():
        return json.loads(file.read_text())
    others = sorted(folder.name.removeprefix("torch_") for folder in _FOLDER.glob("torch_*"))
    if not others:
        raise ImportError(f"flash_ext is not built: there is no {_OF_TORCH.name} beside the package; {_REBUILD}")
    raise ImportError(f"flash_ext was built for torch {' and '.join(others)}, not for torch {_MINOR}; {_REBUILD}")


def _check(info: dict[str, Any]) -> None:
    # NOTE: before the library is loaded: a library that does not fit would end in an undefined symbol, or worse.
    if bool(info["cxx11_abi"]) != bool(torch.compiled_with_cxx11_abi()):
        raise ImportError(
            f"flash_ext was built with cxx11_abi={info['cxx11_abi']}, but the running torch {torch.__version__} has "
            f"cxx11_abi={torch.compiled_with_cxx11_abi()}; {_REBUILD}"
        )
    kernels = json.loads((_FOLDER / "kernels_info.json").read_text())
    if kernels["interface"] != info["interface"]:
        raise ImportError(f"flash_ext has operators for torch {_MINOR} that are older than its kernels; {_REBUILD}")


def _load() -> ModuleType | None:
    _check(build_info())
    torch.ops.load_library(str(LIBRARIES[1]))
    files = [_OF_TORCH / f"_C{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    file = next((file for file in files if file.exists()), None)
    if file is None:  # built for another Python: the operators alone are enough
        return None
    spec = importlib.util.spec_from_file_location("flash_ext._C", file)
    assert spec is not None and spec.loader is not None
    sys.modules["flash_ext._C"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.set_error_class(AttentionError)
    return module


C = _load()
# The inputs that attention_backward has gradients of, in their order.
GRADIENTS = ("query", "key", "value", "bias", "alibi_slopes")


def new_library() -> torch.library.Library:
    """Holds what Python registers for the operators, in place of what an earlier import of this package registered."""
    place = vars(torch.ops.flash_ext)
    if earlier := place.pop("_library", None):
        earlier._destroy()
    place["_library"] = library = torch.library.Library("flash_ext", "FRAGMENT")
    return library


def require_c() -> ModuleType:
    """The module ``_C``, for what is not an operator."""
    if C is None:
        raise ImportError(
            "flash_ext._C was built for another Python; rebuild with `pip install --no-build-isolation .`"
        )
    return C
