"""The suites of attention.py: which cases, and in which dtypes, passes and against which peers unless told.

SUITES maps a suite's name to its Suite; a new one is one function and one entry.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from shapes import Case

OURS = "flash_ext"
DETERMINISTIC = f"{OURS}-deterministic"
INVARIANT = f"{OURS}-invariant"
PADDED = f"{OURS}-padded"
WIDE = f"{OURS}-bf16"  # of e4m3 inputs: the same numbers in bf16
CUDNN_FP8 = "cudnn-fp8"
BY_NAME = tuple(f"{OURS}-{backend}" for backend in ("sm80", "sm90"))  # that backend alone
FUSED = ("torch-flash", "torch-cudnn", "torch-efficient")
PYTORCH = (*FUSED, "torch-math")
FLASH = ("fa3", "fa4")  # FlashAttention-3 and -4, where they can be imported
PACKED = ("torch-varlen", "torch-varlen-repeated", "flex", "fa3-varlen", "fa4-varlen")


@dataclass(frozen=True)
class Suite:
    """What --suite NAME stands for; the first peer is compared with the last one, which is flash_ext.

    `device` is where it runs unless told: "cpu", "cuda", or "both" with its smaller cases on a CPU. `calls`: how many
    timed calls a cell gets on a GPU, if that is part of what the suite means.
    """

    cases: Callable[[], list[Case]]
    peers: tuple[str, ...] = (*PYTORCH, OURS)
    dtypes: tuple[str, ...] = ("bf16",)
    passes: tuple[str, ...] = ("fwd", "bwd")
    device: str = "cuda"
    calls: int | None = None
    cpu_cases: Callable[[], list[Case]] | None = None  # on a CPU instead of those cases that are small enough there


def cpu_cases() -> list[Case]:
    """Eight listed shapes, then the odd lengths, widths and options that real models have."""
    listed = [
        Case(b, h, s, d, causal, group="listed")
        for b, h, s, d in ((4, 12, 512, 64), (1, 8, 2048, 64), (1, 8, 2048, 128), (1, 4, 8192, 64))
        for causal in (False, True)
    ]
    others = [
        Case(8, 12, 77, 64, causal=True),  # CLIP's text
        Case(8, 12, 197, 64),  # ViT's patches
        Case(2, 8, 1000, 64),
        Case(2, 8, 1000, 64, causal=True),
        Case(2, 8, 1024, 64, sk=77),  # diffusion's cross attention
        Case(2, 8, 1024, 32),
        Case(2, 8, 1024, 80),
        Case(2, 8, 1024, 96, causal=True),
        Case(2, 16, 1024, 64, causal=True, hkv=4),
        Case(4, 12, 512, 64, mask="bool"),
        Case(4, 12, 512, 64, mask="float"),
    ]
    math = [
        Case(4, 12, 512, 64, mask="float_grad", group="math"),
        Case(4, 12, 512, 64, dropout=0.1, group="math"),
        Case(4, 12, 512, 64, causal=True, dropout=0.1, group="math"),
        Case(2, 8, 1024, 64, dv=128, group="math"),
        Case(2, 8, 1024, 96, dv=64, causal=True, group="math"),
    ]
    return listed + others + math


def grid_cases() -> list[Case]:
    """16k tokens a batch, hidden size 2048: the table that attention libraries publish."""
    return [
        Case(16384 // s, 2048 // d, s, d, causal)
        for d in (64, 128, 256)
        for s in (512, 1024, 2048, 4096, 8192, 16384)
        for causal in (False, True)
    ]


def mask_cases() -> list[Case]:
    """Everything that is added to the scores, or drops them, on 4x16x4096x128; then Swin's windows."""
    plain = Case(4, 16, 4096, 128)
    return [
        plain,
        replace(plain, mask="float", mask_dims="1hqk"),
        replace(plain, mask="float_grad", mask_dims="1hqk"),
        replace(plain, mask="bool", mask_dims="11qk"),
        replace(plain, mask="bool"),
        replace(plain, mask="documents"),
        *(replace(plain, mask=m, mask_dims=d) for d in ("b11k", "h1k", "k") for m in ("float", "float_grad")),
        replace(plain, dropout=0.1),
        replace(plain, causal=True, alibi=True),
        replace(plain, causal=True, softcap=30.0),
        SWIN,
    ]


SWIN = Case(4096, 3, 49, 32, mask="float_grad", mask_dims="1hqk")  # (1, 3, 49, 49): a bias by relative position


def window_cases() -> list[Case]:
    """Swin's windows: 7x7 tokens at its first three resolutions, 12x12 tokens, and without bias or its gradient."""
    return [
        SWIN,
        replace(SWIN, mask="float"),
        replace(SWIN, mask="none", mask_dims=""),
        replace(SWIN, b=1024, h=6, hkv=6),
        replace(SWIN, b=256, h=12, hkv=12),
        replace(SWIN, b=1024, sq=144, sk=144),
    ]


def extra_cases() -> list[Case]:
    """What real models add to the grid: a sliding window, grouped heads, other head dims, an odd length."""
    return [
        Case(4, 16, 4096, 128, causal=True, window=512),
        Case(4, 32, 4096, 128, causal=True, hkv=8),
        Case(4, 16, 4096, 80, causal=True),
        Case(4, 16, 4096, 96, causal=True),
        Case(4, 16, 4095, 128, causal=True),
        Case(4, 16, 4096, 128, causal=True),
    ]


def fp32_cases() -> list[Case]:
    """float32 at float32 accuracy."""
    return [Case(1, 16, 4096, d, causal=True) for d in (64, 128)]


def short_cases() -> list[Case]:
    """At most 2k tokens: launch, prologue and tails weigh most."""
    return [
        Case(8, 12, 77, 64, causal=True),  # CLIP's text
        Case(8, 12, 197, 64),  # ViT's patches
        *(
            Case(8, 16, s, d, causal)
            for d in (64, 128)
            for s in (128, 256, 512, 1024, 2048)
            for causal in (False, True)
        ),
        Case(8, 16, 1024, 64, sk=77),  # diffusion's cross attention
    ]


def choice_cases() -> list[Case]:
    """Where sm80 and sm90 meet: few queries and keys, few heads and many."""
    sizes = ((16, 16), (49, 49), (64, 64), (64, 128), (64, 256), (64, 1024), (128, 64), (128, 128), (256, 256))
    plain = [Case(b, 16, sq, d, sk=sk) for d in (32, 64, 128) for sq, sk in sizes for b in (1, 32, 512)]
    wide = [Case(b, 16, s, 256) for s in (64, 128, 256) for b in (1, 32)]
    lengths = (65, 96, 128, 144, 196, 256, 512)
    biased = [Case(b, 16, s, d, mask="float") for d in (32, 64, 128) for s in lengths for b in (1, 32, 128)]
    masked = [Case(b, 16, s, 64, mask="bool") for s in lengths for b in (1, 32, 128)]
    return plain + wide + biased + masked


def decode_cases() -> list[Case]:
    """One query of 32 heads, then eight, against long keys and values of 8: memory bound."""
    sizes = [(b, s) for b in (1, 16, 64) for s in (2048, 16384, 65536) if b * s <= 1 << 20]
    few = [Case(b, 32, 8, 128, hkv=8, sk=s) for b, s in ((1, 16384), (16, 2048), (16, 16384))]
    return [Case(b, 32, 1, 128, hkv=8, sk=s) for b, s in sizes] + few


def flash_cases() -> list[Case]:
    """One causal head, from a few tokens to long."""
    return [Case(1, 1, 2**n, d, causal=True) for d in (16, 32, 64, 128) for n in range(7, 17)]


def scaling_cases() -> list[Case]:
    """Batch 8, one head: how time and memory grow with the length, until plain attention runs out of memory."""
    return [Case(8, 1, s, d) for d in (16, 32, 64, 128) for s in (256, 1024, 4096, 8192, 16384)]


def log_normal(total: int, least: int, most: int, seed: int = 6) -> tuple[int, ...]:
    """Lengths that add up to `total`; `least` and `most` are two deviations from the median, and none lies outside.

    The last one is cut to fit.
    """
    draw, lengths = random.Random(seed), []
    while sum(lengths) < total:
        length = round(draw.lognormvariate(math.log(least * most) / 2, math.log(most / least) / 4))
        if least <= length <= most:
            lengths.append(length)
    lengths[-1] -= sum(lengths) - total
    return tuple(lengths)


def packed_cases(equal: int, spread: tuple[int, ...], width: int, heads: int, short: int, long: int) -> list[Case]:
    """16 sequences of one length and hidden size `width`, some of all lengths, many of 8 tokens and a long one."""

    def packed(lengths: tuple[int, ...], h: int, d: int, causal: bool = True, hkv: int = 0) -> Case:
        return Case(len(lengths), h, max(lengths), d, causal, hkv, lengths=lengths)

    return [
        *(packed((equal,) * 16, width // d, d, causal) for d in (64, 128) for causal in (False, True)),
        packed(spread, heads, 128, hkv=heads // 4),
        packed(spread, heads, 128),
        packed((*(8,) * short, long), 8, 128),
    ]


def varlen_cases() -> list[Case]:
    """Packed sequences, 16k tokens and more."""
    return packed_cases(1024, log_normal(16384, 64, 8192), width=2048, heads=32, short=4095, long=65536)


def cpu_varlen_cases() -> list[Case]:
    """The same kinds, of 500 to 2000 tokens."""
    return packed_cases(128, log_normal(1024, 8, 512), width=512, heads=8, short=63, long=512)


def large_head_dim_cases() -> list[Case]:
    """Above 256, where PyTorch has one kernel with a fused softmax."""
    sizes = [(2, 8, 4096, 320), (2, 8, 4096, 384), (2, 8, 4096, 512), (1, 8, 16384, 512), (8, 8, 1024, 512)]
    cases = [Case(b, h, s, d, causal) for b, h, s, d in sizes for causal in (False, True)]
    return [*cases, Case(1, 16, 8192, 512, causal=True, hkv=2), Case(1, 2, 2048, 512, causal=True)]


def field_cases() -> list[Case]:
    """What others publish and large models have: grouped heads, values narrower than keys, a window of 128."""
    grouped = [
        Case(b, 64, s, 128, causal, hkv=8) for b, s in ((16, 2048), (4, 8192), (2, 16384)) for causal in (False, True)
    ]
    narrow = [Case(1, 128, 8192, 192, causal, dv=128) for causal in (False, True)]
    return [
        *grouped,
        Case(1, 32, 16384, 256, causal=True, hkv=2),
        *narrow,
        Case(1, 128, 16384, 64, causal=True, window=128),
    ]


def fp8_cases() -> list[Case]:
    """16k tokens a batch with 8 query heads for each key head; at head dim 128 as cuDNN publishes it."""
    return [
        Case(16384 // s, h, s, d, causal, hkv=h // 8)
        for d, h in ((64, 64), (128, 64), (256, 32))
        for s in (2048, 4096, 8192, 16384)
        for causal in (False, True)
    ]


def cpu_fp8_cases() -> list[Case]:
    """The same kinds, of 512 tokens."""
    return [Case(1, 8, 512, d, causal, hkv=1) for d in (64, 128, 256) for causal in (False, True)]


def invariant_cases() -> list[Case]:
    """Full cards, few queries and packed sequences: who chooses by the batch, and by what."""
    return [*grid_cases(), *decode_cases(), *varlen_cases()]


def quick(cases: list[Case]) -> list[Case]:
    """One small case of each kind, for CI: one batch of 4 heads, at most 256 queries and keys."""
    seen, chosen = set(), []
    for case in cases:
        option = (
            case.mask,
            case.mask_dims,
            case.dropout > 0,
            case.window,
            case.softcap,
            case.alibi,
            len({*case.lengths}),
        )
        kind = (*option, case.hkv != case.h, case.dv != case.d, case.causal, case.sq == 1)
        if kind not in seen:
            seen.add(kind)
            small = {"b": 1, "h": 4, "hkv": 4 if case.hkv == case.h else 1}
            sizes = {"sq": min(case.sq, 256), "sk": min(case.sk, 256), "window": min(case.window, 64)}
            lengths = tuple(min(length, 128) for length in case.lengths[-4:])
            chosen.append(replace(case, **small, **sizes, lengths=lengths))
    return chosen


SUITES: dict[str, Suite] = {
    "cpu": Suite(cpu_cases, ("torch", OURS), ("fp32", "bf16", "fp16"), device="cpu"),
    "grid": Suite(grid_cases, (*PYTORCH, *FLASH, OURS)),
    "masks": Suite(mask_cases, (*PYTORCH, "flex", OURS)),
    "windows": Suite(window_cases, (*PYTORCH, "flex", OURS), device="both"),
    "extras": Suite(extra_cases, (*FUSED, "flex", *FLASH, OURS)),
    "fp32": Suite(fp32_cases, dtypes=("fp32",)),
    "field": Suite(field_cases, (*FUSED, "flex", *FLASH, OURS)),
    "large-head-dims": Suite(large_head_dim_cases, ("torch-efficient", "torch-math", OURS)),
    "short": Suite(short_cases, (*PYTORCH, *FLASH, OURS), device="both"),
    "choice": Suite(choice_cases, (*BY_NAME, OURS)),
    "decode": Suite(decode_cases, ("torch-flash", "torch-cudnn", "torch-math", OURS), passes=("fwd",), device="both"),
    "flash": Suite(flash_cases, (*FUSED, OURS), ("bf16", "fp32"), ("fwd", "bwd", "e2e"), device="both"),
    "deterministic": Suite(grid_cases, (DETERMINISTIC, OURS), passes=("bwd",)),
    "invariant": Suite(invariant_cases, (INVARIANT, OURS), device="both", cpu_cases=cpu_cases),
    "varlen": Suite(varlen_cases, (*PACKED, "torch-padded", PADDED, OURS), device="both", cpu_cases=cpu_varlen_cases),
    "fp8": Suite(fp8_cases, (CUDNN_FP8, WIDE, OURS), ("e4m3",), ("fwd",), device="both", cpu_cases=cpu_fp8_cases),
    "scaling": Suite(scaling_cases, ("eager", "compiled-eager", "torch", OURS), ("fp32",), device="both", calls=100),
}


def cases_of(name: str, small: bool = False, most_flop: float = math.inf) -> list[Case]:
    """The cases of a suite of at most so much work, each with the suite's name; --quick's small ones if asked."""
    suite = SUITES[name]
    cases = suite.cpu_cases if suite.cpu_cases and most_flop < math.inf else suite.cases
    cases = [replace(case, suite=name) for case in cases() if case.flop("fwd") <= most_flop]
    return quick(cases) if small else cases
