"""What the links of a group carry and how fast attention is, measured once for a group, of which "auto" estimates.

Each of two patterns, an exchange in which a rank sends to all others and a step in which it sends to the next one, is
timed with a small and a large message; time = latency + bytes / bandwidth. Attention is timed by one call. The least of
some repeats counts, then the slowest rank's, so that all ranks have the same figures. They are rounded to powers of
two, so that small differences between runs do not show.

Called by ``context_parallel_attention`` and ``explain_context_parallel``; a collective where it measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from flash_ext.distributed.exchange import Group, Transfer

_ops = torch.ops.flash_ext
SMALL, LARGE = 64 << 10, 8 << 20  # bytes that a rank sends
REPEATS = 5
_measured: WeakKeyDictionary[dist.ProcessGroup, dict[str, Links]] = WeakKeyDictionary()


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


def links_of(group: Group, device: torch.device) -> Links | None:
    """Those of a group, measured where they were not yet; None where nothing may be waited for or there is one rank."""
    of_group = _measured.setdefault(group.pg, {})
    if device.type not in of_group:
        if group.size == 1 or torch.compiler.is_compiling() or _is_captured(device):
            return None
        of_group[device.type] = _measure(group, device)
    return of_group[device.type]


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _measure(group: Group, device: torch.device) -> Links:
    # NOTE: not by ``context_parallel``, which sees calls of torch; zeros, so that no generator is asked.
    with torch._C.DisableTorchFunction(), torch.no_grad():
        times = [
            _least(lambda pattern=pattern, size=size: pattern(group, device, size), device)
            for pattern in (_exchange, _step)
            for size in (SMALL, LARGE)
        ]
        work, call = _attention(device)
        times.append(_least(lambda: call, device))
        slowest = torch.tensor(times, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group.pg)
    *of_links, of_call = slowest.tolist()
    exchange, neighbour = (_link(*of_links[i : i + 2]) for i in (0, 2))
    return Links(exchange, neighbour, _rounded(work / of_call))


def _link(small: float, large: float) -> Link:
    bandwidth = _rounded((LARGE - SMALL) / max(large - small, 1e-9))
    return Link(_rounded(max(small - SMALL / bandwidth, 1e-7)), bandwidth)


def _rounded(value: float) -> float:
    return 2.0 ** round(math.log2(value))


def _least(prepare: Callable[[], Callable[[], object]], device: torch.device) -> float:
    call, seconds = prepare(), math.inf
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


def _exchange(group: Group, device: torch.device, size: int) -> Callable[[], None]:
    others = [rank for rank in range(group.size) if rank != group.rank]
    sent, received = torch.zeros(2, len(others), size // len(others), dtype=torch.uint8, device=device)

    def call() -> None:
        sends = [group.send(sent[i], rank) for i, rank in enumerate(others)]
        Transfer(sends + [group.receive(received[i], rank) for i, rank in enumerate(others)]).wait()

    return call


def _step(group: Group, device: torch.device, size: int) -> Callable[[], None]:
    sent, received = torch.zeros(2, size, dtype=torch.uint8, device=device)
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    return lambda: Transfer([group.send(sent, after), group.receive(received, before)]).wait()


def _attention(device: torch.device) -> tuple[float, Callable[[], object]]:
    """The work of a call and the call: large enough for its device to be about as fast as it gets."""
    heads, rows, columns, dtype = (
        (16, 4096, 128, torch.bfloat16) if device.type == "cuda" else (2, 512, 64, torch.float)
    )
    q = torch.zeros(1, heads, rows, columns, dtype=dtype, device=device)
    return 4.0 * heads * rows * rows * columns, lambda: _ops.attention(q, q, q)
