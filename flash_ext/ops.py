"""Loads what was built for the running torch, and registers what Python adds to its operators.

    libflash_kernels.so                    the kernels, which know no torch
    torch_2.11/libflash_ext.so             the operators, for one minor version of torch
    torch_2.11/_C.cpython-....so           the module of a Python, beside them
    torch_2.11/build_info.json

A build from source has one such folder, the wheel of ``tools/build_wheel.py`` one for each torch, with several _C.

Reached by ``import flash_ext``; afterwards ``torch.ops.flash_ext`` holds every operator of ``csrc/torch/schemas.h``.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import json
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from flash_ext.errors import AttentionError

_FOLDER = Path(__file__).parent
_MINOR = ".".join(torch.__version__.split(".")[:2])
_OF_TORCH = _FOLDER / f"torch_{_MINOR}"
LIBRARIES = [_FOLDER / "libflash_kernels.so", _OF_TORCH / "libflash_ext.so"]  # the second loads the first
_REBUILD = "run `pip install --no-build-isolation -e .` in the repository"


def _listed(versions: set[str]) -> str:
    """2.9, 2.10 and 2.11"""
    *first, last = sorted(versions, key=lambda version: [int(number) for number in version.split(".")])
    return f"{', '.join(first)} and {last}" if first else last


def build_info() -> dict[str, Any]:
    """How this installation was built: version, commit, torch, compiler, CUDA decision and its reason.

    Read from ``build_info.json`` beside the library; ``torch.ops.flash_ext.build_info()`` returns the same text.
    """
    file = _OF_TORCH / "build_info.json"
    if file.exists():
        return json.loads(file.read_text())
    others = {folder.name.removeprefix("torch_") for folder in _FOLDER.glob("torch_*")}
    if not others:
        raise ImportError(
            f"flash_ext is not built: there is no {_OF_TORCH.name} beside the package in {_FOLDER}; {_REBUILD}, "
            "or, where it is installed elsewhere, run Python in another folder"
        )
    raise ImportError(f"flash_ext was built for torch {_listed(others)}, not for torch {_MINOR}; {_REBUILD}")


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


def _driver_version() -> int:
    """12080: the driver is for CUDA 12.8; 0: there is none. Loads the driver's library and makes no context."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def _warn_of_old_driver(cuda: dict[str, Any]) -> None:
    # NOTE: only where torch is of an older CUDA than the kernels, and may run with a driver that they cannot run with.
    # Elsewhere torch itself refuses the driver.
    if not cuda["enabled"] or torch.version.cuda is None:
        return
    needed = int(cuda["toolkit"].split(".")[0])
    if int(torch.version.cuda.split(".")[0]) >= needed:
        return
    driver = _driver_version()
    if 0 < driver < 1000 * needed:
        warnings.warn(
            f"flash_ext's GPU kernels need a driver for CUDA {needed}.0 or later, and this one is for CUDA "
            f"{driver // 1000}.{driver % 1000 // 10}: calls with CUDA tensors will fail until it is updated",
            RuntimeWarning,
            stacklevel=2,
        )


def _load() -> ModuleType | None:
    info = build_info()
    _check(info)
    _warn_of_old_driver(info["cuda"])
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
        others = {"3." + file.name.split("-")[1].removeprefix("3") for file in _OF_TORCH.glob("_C.cpython-3*")}
        raise ImportError(
            f"flash_ext has no module _C for Python {sys.version_info[0]}.{sys.version_info[1]}, "
            f"{f'only for {_listed(others)}' if others else 'nor for another'}, and this call needs it; {_REBUILD}"
        )
    return C
