"""Loads ``libflash_ext.so``, checks that it fits the running torch, and registers what Python adds to its operators.

Reached by ``import flash_ext``; afterwards ``torch.ops.flash_ext`` holds every operator of ``csrc/torch/schemas.h``.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flash_ext.errors import AttentionError

_FOLDER = Path(__file__).parent
LIBRARIES = [_FOLDER / "libflash_kernels.so", _FOLDER / "libflash_ext.so"]  # the second loads the first


def build_info() -> dict[str, Any]:
    """How this installation was built: version, commit, torch, compiler, CUDA decision and its reason.

    Read from ``build_info.json`` beside the library; ``torch.ops.flash_ext.build_info()`` returns the same text.
    """
    file = _FOLDER / "build_info.json"
    if not file.exists():
        raise ImportError(
            "flash_ext is not built: build_info.json is missing beside the package; "
            "run `pip install --no-build-isolation .` in the repository"
        )
    return json.loads(file.read_text())


def _check_torch(info: dict[str, Any]) -> None:
    # NOTE: compared before the library is loaded; another torch would end in an undefined symbol.
    built, running = str(info["torch"]), torch.__version__
    if built.split("+")[0].split(".")[:2] != running.split("+")[0].split(".")[:2]:
        raise ImportError(
            f"flash_ext was built against torch {built}, but torch {running} is running; "
            "rebuild it with `pip install --no-build-isolation .`"
        )
    if bool(info["cxx11_abi"]) != bool(torch.compiled_with_cxx11_abi()):
        raise ImportError(
            f"flash_ext was built with cxx11_abi={info['cxx11_abi']}, but the running torch {running} has "
            f"cxx11_abi={torch.compiled_with_cxx11_abi()}; rebuild it with `pip install --no-build-isolation .`"
        )


def _load() -> ModuleType | None:
    _check_torch(build_info())
    torch.ops.load_library(str(LIBRARIES[1]))
    try:
        module = importlib.import_module("flash_ext._C")
    except ModuleNotFoundError:  # built for another Python: the operators alone are enough
        return None
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
