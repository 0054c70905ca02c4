"""Host time of one call: attention on tensors so small that only the way to the kernel is left to measure.

Called by attention.py; its figures are microseconds per call, median over interleaved rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from harness import interleave
from tables import Table, make_table
from torch import Tensor

TENSORS = {"cpu": ((1, 2, 4, 16), torch.float32), "cuda": ((1, 8, 128, 64), torch.bfloat16)}  # (B, H, S, D), dtype
OURS, NATIVE, FUNCTIONAL = "flash_ext", "aten op", "F.sdpa"
PASSES = ("no grad", "with grad", "fwd + bwd")


def calls_of_pass(sdpa: Callable[..., Tensor], direction: str, device: str, causal: bool) -> Callable[[], Any]:
    """A closure that makes one call in the given way."""
    shape, dtype = TENSORS[device]
    wanted = direction != "no grad"
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=wanted) for _ in range(3))
    grad = torch.randn(shape, dtype=dtype, device=device)
    options = {"is_causal": True} if causal else {}
    if direction == "fwd + bwd":
        return lambda: torch.autograd.grad(sdpa(q, k, v, **options), (q, k, v), grad)
    return lambda: sdpa(q, k, v, **options)


def host_overhead(ours: Callable[..., Tensor] | None, device: str, rounds: int) -> list[dict[str, Any]]:
    """One row a (pass, arguments, peer): {"tensors", "pass", "arguments", "peer", "us", "best_us"}."""
    peers = {NATIVE: torch.ops.aten.scaled_dot_product_attention.default, FUNCTIONAL: F.scaled_dot_product_attention}
    if ours is not None:
        peers[OURS] = ours
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # waking a second thread would cost more than everything that is measured here
    shape, dtype = TENSORS[device]
    tensors = f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
    rows = []
    for direction in PASSES:
        for causal in (False, True):
            calls = {name: calls_of_pass(sdpa, direction, device, causal) for name, sdpa in peers.items()}
            # "cpu": the host's clock, also for calls that launch on a GPU
            timings = interleave(calls, "cpu", rounds=rounds, sample_s=0.01)
            for name, t in timings.items():
                arguments = "is_causal" if causal else ""
                row = {"tensors": tensors, "pass": direction, "arguments": arguments, "peer": name}
                rows.append({**row, "us": f"{t.median * 1e6:.2f}", "best_us": f"{t.best * 1e6:.2f}"})
    torch.set_num_threads(threads)
    return rows


def host_table(rows: list[dict[str, Any]]) -> Table:
    """Microseconds per call, one line a (pass, arguments), and ours over each of PyTorch's."""
    names = list(dict.fromkeys(row["peer"] for row in rows))
    others = [name for name in names if name != OURS] if OURS in names else []
    title = "Host time of one call, microseconds (median)"
    table = make_table("tensors", "pass", "arguments", right=(*names, *(f"ours / {n}" for n in others)), title=title)
    for key, of_line in pd.DataFrame(rows).groupby(["tensors", "pass", "arguments"], sort=False):
        us = of_line.set_index("peer")["us"].astype(float)
        table.add_row(*key, *(f"{us[n]:.2f}" for n in names), *(f"{us[OURS] / us[n]:.2f}" for n in others))
    return table
