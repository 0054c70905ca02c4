"""Which backend runs, and who: ``use_backend`` for this thread, ``enable`` for unchanged programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flash_ext.ops import require_c


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the context, in this thread, only backend ``name`` is asked, forward and backward.

    Its refusal is then the error, of backward also where its forward ran. What ``torch.utils.checkpoint`` computes
    again runs in autograd's own thread for a GPU, where it is not asked for. Names: "cpu", "sm80" and "sm90" (in a
    build with CUDA) and "chunked". ``FLASH_EXT_BACKEND`` sets the same for a process.

    Raises:
        AttentionError: no backend of that name is in this build.
    """
    c = require_c()
    before = c.set_backend(name)
    try:
        yield
    finally:
        c.set_backend(before)


class _Enabled:
    """What ``enable`` returns: leaving it as a context restores what was before."""

    def __init__(self, before: bool) -> None:
        self._before = before

    def __enter__(self) -> _Enabled:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._before:
            disable()


_mha_fastpath = True


def enable() -> _Enabled:
    """Makes ``scaled_dot_product_attention`` of every caller in this process, Python or C++, run here.

    Idempotent; also a context manager, which nests. Turns off ``torch.backends.mha``'s fast path, because
    MultiheadAttention and TransformerEncoder would bypass attention in evaluation (nested tensors need it there, and
    raise). Left to PyTorch: nested tensors, other devices, unknown tensor subclasses, ``need_weights=True``, and calls
    inside ``sdpa_kernel(...)``. Models that were compiled before are not touched.
    """
    global _mha_fastpath
    before = require_c().set_enabled(True)
    if not before:
        _mha_fastpath = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
    return _Enabled(before)


def disable() -> None:
    """Undoes ``enable``; idempotent."""
    if require_c().set_enabled(False):
        torch.backends.mha.set_fastpath_enabled(_mha_fastpath)


def enabled_calls() -> int:
    """Calls of ``F.scaled_dot_product_attention`` that ran here so far, so that a test can prove it."""
    return require_c().enabled_calls()
