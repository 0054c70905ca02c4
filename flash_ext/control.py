"""Which backend runs, and who: ``use_backend`` for this thread, ``enable`` for unchanged programs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flash_ext import dynamo
from flash_ext.ops import require_c


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the context, in this thread, only backend ``name`` is asked, forward and backward.

    Its refusal is then the error, of backward also where its forward ran. What ``torch.utils.checkpoint`` computes
    again is asked of the backend of its forward. A compiled function is compiled again for another backend. Names:
    "cpu", "sm80" and "sm90" (in a build with CUDA) and "chunked". ``FLASH_EXT_BACKEND`` sets the same for a process.

    Raises:
        AttentionError: no backend of that name is in this build.
    """
    c = require_c()
    before = c.set_backend(name)
    dynamo.choice_changed()
    try:
        yield
    finally:
        c.set_backend(before)


_lock = threading.RLock()
_scopes: list[_Enabled] = []  # every enable() that has not ended
_mha_fastpath = True


class _Enabled:
    """One ``enable()``: until its context is left, or ``disable()``."""

    def __init__(self) -> None:
        self.thread: int | None = None  # whose context it is; None for an enable() that is no context

    def __enter__(self) -> _Enabled:
        with _lock:
            self.thread = threading.get_ident()
            if self not in _scopes:
                _begin(self)
        return self

    def __exit__(self, *_: object) -> None:
        _end([self])


def _begin(scope: _Enabled) -> None:
    global _mha_fastpath
    with _lock:
        if not _scopes:
            _mha_fastpath = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            require_c().set_enabled(True)
        _scopes.append(scope)
    # The first one registers kernels, and what torch kept of the operator's former ones is out of date.
    torch.ops.aten.scaled_dot_product_attention.default._dispatch_cache.clear()
    dynamo.choice_changed()


def _end(scopes: list[_Enabled]) -> None:
    with _lock:
        before = bool(_scopes)
        _scopes[:] = [scope for scope in _scopes if scope not in scopes]
        if before and not _scopes:
            require_c().set_enabled(False)
            torch.backends.mha.set_fastpath_enabled(_mha_fastpath)


def enable() -> _Enabled:
    """Makes ``scaled_dot_product_attention`` of every caller in this process, Python or C++, run here.

    Until ``disable()``; as a context manager, until it is left. Contexts nest, and where those of several threads
    overlap it is on until the last one is left. What ``torch.utils.checkpoint`` computes again is computed as its
    forward was. A compiled function follows: it is compiled again where the choice is another one. Turns off
    ``torch.backends.mha``'s fast path, because MultiheadAttention and TransformerEncoder would bypass attention in
    evaluation (nested tensors need it there, and raise).

    Left to PyTorch: nested tensors, other devices, unknown tensor subclasses, ``need_weights=True``, and calls for
    which one of PyTorch's own kernels was chosen: inside ``sdpa_kernel(...)``, or where
    ``torch.backends.cuda.enable_*_sdp`` leave one. The first call that is left for such a choice warns, and ``why_not``
    counts them.
    """
    scope = _Enabled()
    _begin(scope)
    return scope


def disable() -> None:
    """Ends every ``enable()``, but for the contexts that other threads are in; idempotent."""
    with _lock:
        _end([scope for scope in _scopes if scope.thread in (None, threading.get_ident())])


class EnabledCalls(int):
    """Calls that ran here, a number; ``left`` is how many came through ``enable`` and went to PyTorch."""

    left: int


def enabled_calls() -> EnabledCalls:
    """Calls of ``F.scaled_dot_product_attention`` that ran here so far, so that a test can prove it.

    Its attribute ``left`` counts those that reached us and went to PyTorch; ``why_not`` says for which reasons.
    """
    calls = EnabledCalls(require_c().enabled_calls())
    calls.left = sum(why_not().values())
    return calls


def why_not() -> dict[str, int]:
    """Why calls went to PyTorch though ``enable`` was on: each reason with its number of calls so far."""
    return dict(require_c().calls_left())
