"""Decoding with a cache on a GPU: time, bandwidth, and what pages, fp8, more queries and new rows cost.

    python benchmarks/decode.py                      every case, bf16
    python benchmarks/decode.py --case 'pages|fp8'   those whose name a regular expression finds
    python benchmarks/decode.py --peers flash_ext composite torch-cudnn --out benchmarks/results/nvidia-h200

GB/s counts the keys and values that the sequences have, once; the limit is a copy's, read and written, in this run.
`composite` is the way of a call with a backend by name, which packs, gathers and converts; torch-cudnn is PyTorch's
scaled_dot_product_attention, for cases that it can express: no lengths, pages, fp8 or new rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from harness import (
    BenchmarkError,
    Reporter,
    command_line,
    interleave,
    load_flash_ext,
    make_folder,
    provenance,
    run_main,
    stdout_console,
)
from limits import COPY_BYTES
from tables import Table, make_table, write_results
from torch.nn.attention import SDPBackend, sdpa_kernel

PEERS = ("flash_ext", "composite", "torch-cudnn")
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """One call. `base`: the case whose time it is compared with."""

    name: str
    batch: int
    rows: int
    heads: tuple[int, int] = (32, 8)  # of queries, of keys
    cols: int = 128
    queries: int = 1
    page: int = 0
    fp8: bool = False
    added: int = 0
    rotary: bool = False
    lengths: Literal["full", "log-normal"] = "full"
    base: str = ""


LONG, SOME = "b64 s16k", "b16 s16k"
CASES = (
    Case("b1 s2k 64/8", 1, 2048, heads=(64, 8)),
    Case(LONG, 64, 16384),
    Case("b1 s131k", 1, 131072),
    Case(SOME, 16, 16384),
    *(Case(f"{SOME} q{n}", 16, 16384, queries=n, base=SOME) for n in (2, 4, 8, 16)),
    *(Case(f"{LONG} pages of {n}", 64, 16384, page=n, base=LONG) for n in (1, 16, 64, 256)),
    Case(f"{LONG} fp8", 64, 16384, fp8=True, base=LONG),
    Case(f"{LONG} fp8 pages of 64", 64, 16384, fp8=True, page=64, base=f"{LONG} fp8"),
    Case(f"{LONG} append", 64, 16384, added=1, base=LONG),
    Case(f"{LONG} append rotary", 64, 16384, added=1, rotary=True, base=LONG),
    Case("b64 log-normal", 64, 16384, lengths="log-normal"),
    Case("b256 s1k", 256, 1024),
    Case("b64 s16k D64", 64, 16384, cols=64),
    Case("b64 s8k D256", 64, 8192, cols=256),
    *(Case(f"b8 s8k q{n}", 8, 8192, queries=n) for n in (32, 64, 128)),
    *(Case(f"b8 s8k q{n} pages of 64", 8, 8192, queries=n, page=64) for n in (32, 64, 128)),
)


@dataclass
class Args:
    """Times attention_with_cache."""

    case: str = ""  # a regular expression that a case's name contains; none: all
    peers: tuple[Literal[PEERS], ...] = ("flash_ext",)
    rounds: int = 5
    seconds: float = 0.05  # of a sample
    out: Path | None = None  # folder for cache.csv, .md and .tex (None: only shown)


def lengths_of(case: Case) -> torch.Tensor:
    """Rows of each sequence after the new ones, int32 (batch,), on the CPU."""
    if case.lengths == "full":
        return torch.full((case.batch,), case.rows, dtype=torch.int32)
    numbers = torch.randn(case.batch, generator=torch.Generator().manual_seed(0))
    return (numbers * 0.9 + 8).exp().clamp(64, case.rows).int()


def bytes_of(case: Case) -> int:
    """Of the keys and values that the sequences have."""
    return int(lengths_of(case).sum()) * case.heads[1] * case.cols * 2 * (1 if case.fp8 else 2)


def arguments_of(case: Case, device: str) -> dict[str, Any]:
    """Those of attention_with_cache."""
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    pages = case.batch * case.rows // case.page if case.page else 0
    shape = (pages, case.page) if case.page else (case.batch, case.rows)
    call = {"query": torch.randn(case.batch, case.queries, case.heads[0], case.cols, **options)}
    for name in ("key", "value"):
        cache = torch.randn(*shape, case.heads[1], case.cols, **options)
        call[f"{name}_cache"] = cache.to(FP8) if case.fp8 else cache
        if case.fp8:
            call[f"{name[0]}_descale"] = torch.ones(case.batch, case.heads[1], device=device)
        if case.added:
            call[name] = torch.randn(case.batch, case.added, case.heads[1], case.cols, **options)
    if case.page:
        order = torch.randperm(pages, device=device)
        call["block_table"] = order.int().view(case.batch, -1)
    if case.rotary:
        angles = torch.rand(case.rows, case.cols // 2, device=device)
        call |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    return call | {"cache_seqlens": lengths_of(case).to(device) - case.added}


def peer_calls(case: Case, peers: tuple[str, ...], call: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """A closure a peer that can make the call."""
    package = load_flash_ext()

    def composite() -> Any:
        with package.use_backend("sm80" if torch.cuda.get_device_capability()[0] != 9 else "sm90"):
            return package.attention_with_cache(**call)

    def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    found: dict[str, Callable[[], Any]] = {}
    if "flash_ext" in peers:
        found["flash_ext"] = partial(package.attention_with_cache, **call)
    if "composite" in peers:
        found["composite"] = composite
    plain = not (case.page or case.fp8 or case.added or case.lengths != "full" or case.queries > 1)
    if "torch-cudnn" in peers and plain:
        found["torch-cudnn"] = partial(
            cudnn, *(call[name].transpose(1, 2) for name in ("query", "key_cache", "value_cache"))
        )
    return found


def copy_gbs(rounds: int) -> float:
    """GB/s of an elementwise kernel that reads and writes."""
    source = torch.randn(COPY_BYTES // 2, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    timing = interleave({"copy": partial(torch.neg, source, out=target)}, "cuda", rounds, 0.02)["copy"]
    return 2 * COPY_BYTES / timing.median / 1e9


def chosen_cases(pattern: str) -> list[Case]:
    """Those in whose name the regular expression is found."""
    try:
        cases = [case for case in CASES if re.search(pattern, case.name)]
    except re.error as error:
        raise BenchmarkError(f"--case {pattern!r} is not a regular expression: {error}.") from None
    if not cases:
        raise BenchmarkError(f"--case {pattern!r} fits none of: {'; '.join(case.name for case in CASES)}.")
    return cases


def rows_of(case: Case, args: Args, limit: float, times: dict[tuple[str, str], float]) -> list[dict[str, Any]]:
    """One a peer. `times`: seconds by case and peer of the cases before, to which these are added."""
    rows, calls = [], peer_calls(case, args.peers, arguments_of(case, "cuda"))
    for peer, timing in interleave(calls, "cuda", args.rounds, args.seconds).items():
        row = {"case": case.name, "peer": peer, "us": "", "gbs": "", "of_copy": "", "over_base": ""}
        row |= {"copy_gbs": f"{limit:.0f}", "failure": timing.failure}
        if not timing.failure:
            times[case.name, peer] = timing.median
            gbs, base = bytes_of(case) / timing.median / 1e9, times.get((case.base, peer))
            row |= {"us": f"{timing.median * 1e6:.1f}", "gbs": f"{gbs:.0f}", "of_copy": f"{gbs / limit:.3f}"}
            row["over_base"] = f"{timing.median / base:.3f}" if base else ""
        rows.append(row)
    return rows


def shown(rows: list[dict[str, Any]]) -> Table:
    """The table of all cases."""
    title = f"Decoding with a cache, bf16; a copy reaches {rows[0]['copy_gbs']} GB/s"
    table = make_table("case", "peer", right=("us", "GB/s", "of a copy", "over base"), title=title)
    for row in rows:
        first = row["failure"][:40] or row["us"]
        table.add_row(row["case"], row["peer"], first, row["gbs"], row["of_copy"], row["over_base"])
    return table


def main() -> None:
    """Measures the cases, prints a table and writes it."""
    args = command_line(Args)
    if not torch.cuda.is_available():
        raise BenchmarkError("decode.py needs a CUDA GPU, and PyTorch sees none here.")
    cases, out, origin = chosen_cases(args.case), args.out and make_folder(args.out), provenance("cuda")
    limit, rows = copy_gbs(args.rounds), []
    times: dict[tuple[str, str], float] = {}
    with Reporter("decode", len(cases)) as progress, torch.no_grad():
        for case in cases:
            rows += rows_of(case, args, limit, times)
            torch.cuda.empty_cache()
            progress.advance(case.name)
    stdout_console().print(shown(rows))
    if out:
        print(write_results(out / "cache.csv", rows, origin, [shown(rows)], None))


if __name__ == "__main__":
    run_main(main)
