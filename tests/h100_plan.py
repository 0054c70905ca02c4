"""A plan for an H100 that needs neither the card nor its kernels: what csrc/kernels/sm90/rows.cpp plans for CALL.
Costs and scratch of backward are made up."""

from __future__ import annotations

from dataclasses import replace

from flash_ext.explain import Candidate, Explanation, Plan
from flash_ext.explain_tiles import Call

CALL = Call(
    batch=1,
    heads_q=32,
    heads_k=8,
    heads_v=8,
    len_q=4096,
    len_k=4096,
    head_dim=128,
    head_dim_v=128,
    dtype="bfloat16",
    causal=True,
    window=(None, None),
    align="top_left",
    packed=False,
    added=(),
    batch_invariant=False,
)
FORWARD = Plan(
    backend="sm90",
    kernel="sm90.forward",
    schedule="overlap, tiles by a counter",
    block_m=128,
    block_n=128,
    stages=2,
    on_chip=(("q", 65536), ("k", 65536), ("v", 65536), ("barriers and alignment", 1248)),
    on_chip_limit=232448,
    scratch_bytes=64,
    grid=132,
    waves=1024 / 132,
    registers=240,
    producer_registers=24,
    local_bytes=0,
    static_bytes=0,
    resident_blocks=1,
    occupancy=384 / 2048,
    l2_section=8,
    splits=1,
    split_keys=0,
)
BACKWARD = replace(
    FORWARD,
    kernel="sm90.backward",
    schedule="a tile of keys a block",
    block_m=64,
    on_chip=(
        *((use, 32768) for use in ("k", "v", "q", "d_out", "ds", "dq staging")),
        ("lse and delta", 1568),
        ("barriers and alignment", 1296),
    ),
    scratch_bytes=68157440,
    grid=256,
    waves=256 / 132,
    l2_section=4,
)
CANDIDATES = (
    Candidate("sm90.forward", "sm90", "forward", "", 211.0, "", True),
    Candidate("sm80.forward", "sm80", "forward", "", 430.0, "", False),
    Candidate("cpu.forward", "cpu", "forward", "the tensors are not on the CPU", 0.0, "", False),
    Candidate("sm90.backward", "sm90", "backward", "", 560.0, "", True),
)
PLAN = Explanation(FORWARD, BACKWARD, CANDIDATES, call=CALL)
