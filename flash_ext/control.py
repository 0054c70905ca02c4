"""Which backend runs, and who: ``use_backend`` for this thread, ``enable`` for unchanged programs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from flash_ext import dynamo
from flash_ext.ops import require_c


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Within the context, in this thread, only backend ``name`` is asked, forward and backward.

    Its refusal is then the error, of backward also where its forward ran. What ``torch.utils.checkpoint`` computes
    again is asked of the backend of its forward. A compiled function is compiled again for another backend. Names:
    "cpu", "sm80" and "sm90" (in a build with CUDA) and "chunked"; or that of a kernel, e.g. "sm90.backward.scored" (see
    ``explain``), which means this one in its pass and its backend in the other. ``FLASH_EXT_BACKEND`` sets the same for
    a process.

    Raises:
        AttentionError: no backend and no kernel of that name is in this build.
    """
    c = require_c()
    before = c.set_backend(name)
    dynamo.choice_changed()
    try:
        yield
    finally:
        c.set_backend(before)


class _State:
    """Every ``enable()`` that has not ended, and what ``torch.backends.mha`` was set to before the first of them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.scopes: list[_Enabled] = []
        self.mha_fastpath = True


# One for the process, kept where the operators are: an enable() before the package was imported again can be ended.
_state: _State = vars(torch.ops.flash_ext).setdefault("_enabled", _State())


class _Here(threading.local):
    """What is chosen in Python for this thread alone."""

    enabled: bool | None = None  # whether an enable() is on; goes before the process's, None: the process's
    contexts: tuple[Any, ...] | None = None  # of context_parallel, the innermost last; None: none was entered here


here = _Here()


def is_enabled() -> bool:
    """Whether an ``enable()`` is on, or was in the forward of what a checkpoint computes again in this thread."""
    return bool(_state.scopes) if here.enabled is None else here.enabled


class Choice:
    """All that decides who computes attention in this thread, the arguments aside, as it stands when this is made."""

    def __init__(self) -> None:
        self._native = require_c().current_choice()
        self._enabled, self._contexts = is_enabled(), here.contexts or ()
        self._overrides = torch._C._get_torch_function_state()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within the context, in whichever thread, it stands as it did.

        A context_parallel is entered again, because torch carries its mode into no backward. One that was entered since
        is not asked.
        """
        c = require_c()
        before = c.set_choice(self._native), here.enabled, here.contexts, torch._C._get_torch_function_state()
        here.enabled, here.contexts = self._enabled, self._contexts[:-1]
        try:
            if self._contexts:
                torch._C._set_torch_function_state(self._overrides)
            with self._contexts[-1] if self._contexts else nullcontext():
                yield
        finally:
            native, here.enabled, here.contexts, overrides = before
            torch._C._set_torch_function_state(overrides)
            c.set_choice(native)


class _Enabled:
    """One ``enable()``: until its context is left, or ``disable()``."""

    as_flash = False  # also for calls for which PyTorch's flash attention was chosen

    def __init__(self) -> None:
        self.thread: int | None = None  # whose context it is; None for an enable() that is no context

    def __enter__(self) -> _Enabled:
        with _state.lock:
            self.thread = threading.get_ident()
            if self not in _state.scopes:
                _begin(self)
        return self

    def __exit__(self, *_: object) -> None:
        _end([self])


class _Activated(_Enabled):
    """What PyTorch's registry of flash attentions holds while we are active in it."""

    as_flash = True

    def remove(self) -> None:
        _end([self])


def _tell() -> None:
    require_c().set_enabled(bool(_state.scopes), any(scope.as_flash for scope in _state.scopes))


def _begin(scope: _Enabled) -> None:
    with _state.lock:
        require_c()  # its error comes before anything has changed
        if not _state.scopes:
            _state.mha_fastpath = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
        _state.scopes.append(scope)
        _tell()
    # The first one registers kernels, and what torch kept of the operator's former ones is out of date.
    torch.ops.aten.scaled_dot_product_attention.default._dispatch_cache.clear()
    dynamo.choice_changed()


def _end(scopes: list[_Enabled]) -> None:
    with _state.lock:
        if not _state.scopes:
            return
        _state.scopes[:] = [scope for scope in _state.scopes if scope not in scopes]
        _tell()
        if not _state.scopes:
            torch.backends.mha.set_fastpath_enabled(_state.mha_fastpath)


def enable() -> _Enabled:
    """Makes ``scaled_dot_product_attention`` of every caller in this process, Python or C++, run here.

    Until ``disable()``; as a context manager, until it is left. Contexts nest, and where those of several threads
    overlap it is on until the last one is left. What ``torch.utils.checkpoint`` computes again is computed as its
    forward was. A compiled function follows: it is compiled again where the choice is another one. Turns off
    ``torch.backends.mha``'s fast path, because MultiheadAttention and TransformerEncoder would bypass attention in
    evaluation (nested tensors of the strided layout need it there, and raise).

    ``torch.nn.attention.varlen.varlen_attn`` runs here, too, where torch has it, whenever it is imported.

    Left to PyTorch: nested tensors of the strided layout, other devices, unknown tensor subclasses,
    ``need_weights=True``, ``varlen_attn`` with caches, pages, splits or e4m3, and calls for which one of PyTorch's own
    kernels was chosen: inside ``sdpa_kernel(...)``, or where ``torch.backends.cuda.enable_*_sdp`` leave one. The first
    call that is left for such a choice warns, and ``why_not`` counts them.
    """
    scope = _Enabled()
    _begin(scope)
    return scope


def disable() -> None:
    """Ends every ``enable()``, but for the contexts that other threads are in; idempotent.

    What ``torch.nn.attention.activate_flash_attention_impl`` began ends with ``restore_flash_attention_impl``.
    """
    with _state.lock:
        ours = [scope for scope in _state.scopes if not scope.as_flash]
        _end([scope for scope in ours if scope.thread in (None, threading.get_ident())])


def _activate() -> _Activated:
    scope = _Activated()
    _begin(scope)
    return scope


def register_flash_attention() -> None:
    """Makes ``torch.nn.attention.activate_flash_attention_impl("FLASH_EXT")`` known to PyTorch, where it has that.

    It does what ``enable`` does, until ``restore_flash_attention_impl()`` or the activation of another one, and serves
    calls inside ``sdpa_kernel(...)`` as well, where that allows flash attention. Importing flash_ext registers it.
    """
    if register := getattr(torch.nn.attention, "register_flash_attention_impl", None):
        register("FLASH_EXT", register_fn=_activate)


class EnabledCalls(int):
    """Calls that ran here, a number; ``left`` is how many came through ``enable`` and went to PyTorch."""

    left: int


def enabled_calls() -> EnabledCalls:
    """Calls of PyTorch's attention that ran here so far, so that a test can prove it.

    Its attribute ``left`` counts those that reached us and went to PyTorch; ``why_not`` says for which reasons.
    """
    calls = EnabledCalls(require_c().enabled_calls())
    calls.left = sum(why_not().values())
    return calls


def why_not() -> dict[str, int]:
    """Why calls went to PyTorch though ``enable`` was on: each reason with its number of calls so far."""
    return dict(require_c().calls_left())
