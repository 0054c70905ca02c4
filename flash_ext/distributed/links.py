"""What the links of a group carry and how fast attention is, measured once for a group, of which "auto" estimates.

Each of two patterns, an exchange in which a rank sends to all others and a step in which it sends to the next one, is
timed with a small and a large message; time = latency + bytes / bandwidth. Attention is timed by one call, in the dtype
of the first call of "auto" that has it. The least of some repeats counts, then the slowest rank's, so that all ranks
have the same figures. They are rounded to powers of two: runs differ less then, but still where a figure lies at the
edge between two.

Called by ``context_parallel_attention`` and its packed form; a collective where it measures. Invariant: a rank that
cannot measure says so before any data travels, and then no rank has figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from flash_ext.distributed.exchange import Group, Transfer
from flash_ext.ops import require_c

_ops = torch.ops.flash_ext
SMALL, LARGE = 64 << 10, {"cpu": 8 << 20, "cuda": 64 << 20}  # bytes that a rank sends
ALIGNED = 512  # what is sent to one rank begins at a multiple of it
REPEATS = 5
_measured: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, torch.dtype], Links | None]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Link:
    """Of a message: seconds, and bytes a second that a rank sends."""

    latency: float
    bandwidth: float

    def time(self, count: float) -> float:
        return self.latency + count / self.bandwidth


@dataclass(frozen=True)
class Links:
    """``flops``: a second, of attention's forward."""

    exchange: Link
    neighbour: Link
    flops: float

    def __str__(self) -> str:
        parts = [
            f"{link.bandwidth / 1e9:.3g} GB/s and {link.latency * 1e6:.3g} us {what}"
            for link, what in ((self.exchange, "in an exchange"), (self.neighbour, "to the next rank"))
        ]
        return f"{', '.join(parts)}, attention {self.flops / 1e12:.3g} TFLOP/s"


def links_of(group: Group, device: torch.device, dtype: torch.dtype) -> Links | None:
    """Those of a group, measured where they were not yet; None where nothing may be waited for, a rank could not
    measure, or there is one rank."""
    of_group = _measured.setdefault(group.pg, {})
    kind = device.type, dtype
    if kind not in of_group:
        if group.size == 1 or torch.compiler.is_compiling() or _is_captured(device):
            return None
        of_group[kind] = _measure(group, device, dtype)
    return of_group[kind]


def known_links(group: Group, device: torch.device, dtype: torch.dtype) -> Links | None:
    """Those that were measured; for tensors without memory on a GPU, else on a CPU."""
    of_group = _measured.get(group.pg, {})
    kinds = ("cuda", "cpu") if device.type == "meta" else (device.type,)
    return next((found for kind in kinds if (found := of_group.get((kind, dtype)))), None)


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextmanager
def _without_choices(device: torch.device) -> Iterator[None]:
    """Not by ``context_parallel``, which sees calls of torch, nor seen by dispatch modes (selective checkpointing would
    keep what is measured), and in nothing else that the caller chose.
    """
    c = require_c()
    before = c.set_backend(None)
    unseen, precision = _disable_current_modes(), torch.autocast(device.type, enabled=False)
    try:
        with torch._C.DisableTorchFunction(), unseen, torch.no_grad(), precision:
            yield
    finally:
        c.set_backend(before)


def _measure(group: Group, device: torch.device, dtype: torch.dtype) -> Links | None:
    with _without_choices(device):
        of_call, buffers = math.inf, None
        try:  # whatever it is: the other ranks are waiting
            buffers = torch.zeros(2, LARGE[device.type], dtype=torch.uint8, device=device)  # no generator is asked
            work, call = _attention(device, dtype)
            of_call = _least(call, device)
        except Exception:
            buffers = None
        of_call = _slowest([of_call], group, device)[0]
        if buffers is None or math.isinf(of_call):
            return None
        counts, times = [], []
        for pattern in (_exchange, _step):
            for size in (SMALL, LARGE[device.type]):
                operations = pattern(group, buffers, size)
                counts.append(sum(operation.tensor.numel() for operation in operations) // 2)
                times.append(_least(lambda operations=operations: Transfer(operations).wait(), device))
        times = _slowest(times, group, device)
    exchange, neighbour = (_link(counts[i : i + 2], times[i : i + 2]) for i in (0, 2))
    return Links(exchange, neighbour, _rounded(work / of_call))


def _slowest(seconds: list[float], group: Group, device: torch.device) -> list[float]:
    of_all = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(of_all, op=dist.ReduceOp.MAX, group=group.pg)
    return of_all.tolist()


def _link(counts: list[int], seconds: list[float]) -> Link:
    """Of a small and a large message."""
    bandwidth = _rounded((counts[1] - counts[0]) / max(seconds[1] - seconds[0], 1e-9))
    return Link(_rounded(max(seconds[0] - counts[0] / bandwidth, 1e-7)), bandwidth)


def _rounded(value: float) -> float:
    return 2.0 ** round(math.log2(value))


def _least(call: Callable[[], object], device: torch.device) -> float:
    seconds = math.inf
    for _ in range(1 + REPEATS):  # the first connects, and allocates
        _wait(device)
        start = perf_counter()
        call()
        _wait(device)
        seconds = min(seconds, perf_counter() - start)
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _exchange(group: Group, buffers: Tensor, size: int) -> list[dist.P2POp]:
    sent, received = buffers
    others = [rank for rank in range(group.size) if rank != group.rank]
    each = max(size // len(others) // ALIGNED, 1) * ALIGNED
    parts = [slice(i * each, (i + 1) * each) for i in range(len(others))]
    sends = [group.send(sent[part], rank) for part, rank in zip(parts, others, strict=True)]
    return sends + [group.receive(received[part], rank) for part, rank in zip(parts, others, strict=True)]


def _step(group: Group, buffers: Tensor, size: int) -> list[dist.P2POp]:
    sent, received = buffers[:, :size]
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    return [group.send(sent, after), group.receive(received, before)]


def _attention(device: torch.device, dtype: torch.dtype) -> tuple[float, Callable[[], object]]:
    """The work of a call and the call."""
    heads, rows, columns = (16, 8192 // dtype.itemsize, 128) if device.type == "cuda" else (2, 512, 64)
    q = torch.zeros(1, heads, rows, columns, dtype=dtype, device=device)
    return 4.0 * heads * rows * rows * columns, lambda: _ops.attention(q, q, q)
