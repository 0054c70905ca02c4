"""torch.compile and the choice of who computes attention, by ``enable``, ``use_backend`` or ``FLASH_EXT_BACKEND``.

Compiled code is valid for one choice. In a process, Dynamo guards on it wherever it traces a call of attention, ours or
PyTorch's, so that another choice compiles again and both stay. Beyond, the choice and this build enter
``torch.compiler.config.cache_key_tag``, which is part of the keys of AOTAutograd's and Inductor's caches in memory and
on disk: none serves a graph of another choice or build, and a process without flash_ext never meets one of ours.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from typing import Any

import torch
import torch.nn.functional as F

from flash_ext import ops
from flash_ext.attention import allow_in_graph

_MARK = "|flash_ext:"
_unguarded = "torch._dynamo" in sys.modules  # functions may have been compiled before there was a guard


class _Choice:
    """What Dynamo guards on: an object that always tells the present choice of the thread that asks."""

    @property
    def text(self) -> str:
        return ops.require_c().choice_text()


_choice = _Choice()


@functools.cache
def _build() -> str:
    """Differs for every build of the libraries."""
    return hashlib.sha256(b"".join(library.read_bytes() for library in ops.LIBRARIES)).hexdigest()[:16]


def _tag_caches() -> None:
    config = torch.compiler.config
    tag = config.cache_key_tag
    wanted = tag.split(_MARK)[0] + f"{_MARK}{_build()}:{_choice.text}"  # what a user set stays in front
    if tag != wanted:
        config.cache_key_tag = wanted


def _note(_: Any, tx: Any, *__: Any, **___: Any) -> None:
    """Dynamo is about to trace a call of attention; None lets it go on as it would have."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource, GlobalSource

    name = tx.output.install_global_by_id("__flash_ext_choice", _choice)
    install_guard(AttrSource(GlobalSource(name), "text").make_guard(GuardBuilder.EQUALS_MATCH))
    _tag_caches()


def register() -> None:
    """Called when ``torch._dynamo`` has been imported; again where flash_ext is imported again."""
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    allow_in_graph()
    if ops.C is None:  # no choice can be made without _C
        return
    handlers = TorchInGraphFunctionVariable._get_handlers()
    aten, ours = torch.ops.aten, torch.ops.flash_ext
    for packet in (
        aten.scaled_dot_product_attention,
        ours.scaled_dot_product_attention,
        ours.attention,
        ours.attention_with_rng_state,
        ours.attention_backward,
        ours.attention_with_cache,
    ):
        handlers[packet] = handlers[packet.default] = _note
    # NOTE: the second stays one call in Dynamo's graph, and calls the first.
    handlers[F.scaled_dot_product_attention] = handlers[F.multi_head_attention_forward] = _note


def choice_changed() -> None:
    """Called after each change; the first one forgets what was compiled before there was a guard."""
    global _unguarded
    if _unguarded:
        _unguarded = False
        torch._dynamo.reset()
