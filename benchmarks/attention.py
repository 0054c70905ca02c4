#!/usr/bin/env python3
"""Times attention alone: flash_ext against its peers, in one process, forward and backward.

    python benchmarks/attention.py --suite cpu            the CPU's shapes in fp32, bf16 and fp16 on 2 threads
    python benchmarks/attention.py --suite cpu --quick    a minute, for CI
    python benchmarks/attention.py --case 2048x64 --dtypes bf16 --passes bwd --no-host
    python benchmarks/attention.py --suite scaling        time and memory as the length grows, against plain attention
    python benchmarks/attention.py --suite flash          one causal head, 128 to 65536 tokens
    python benchmarks/attention.py --suite grid --out grid.csv               on a GPU: bf16, 16k tokens, D 64 to 256
    python benchmarks/attention.py --suite fp8            e4m3 inputs against cuDNN, and against bf16; forward alone
    python benchmarks/attention.py --suite masks --backend sm80 --only 'bias|mask' --time-budget 300

The suites scaling, flash, short, decode and windows run on a CPU, too, on cases of at most 2 GFLOP and against peers
that run there, and varlen and fp8 on smaller cases of their kinds; the others take --device cpu with --quick.

Forward ("fwd") runs without gradients (with them where the mask wants one). Backward ("bwd") is torch.autograd.grad
alone, over and over on one graph that an untimed forward built and retain_graph keeps; "e2e" is a forward and its
backward. Ratios are a peer's median time over flash_ext's: above 1, flash_ext is faster. TFLOP/s count kept (query,
key) pairs only (half of all in the suite grid, when causal), GB/s the smallest possible traffic; the limits are
measured in the same run. err is the error over what the error rule allows, so at most 1. Peak memory is that of one
forward and backward (of a forward in suites that have no backward), inputs excluded; that before backward, too.

Packed sequences (suite varlen) count the pairs of each one's own length. Peers whose name ends in -padded are dense
calls of the same sequences, padded; neither to pad them nor to make FlexAttention's block mask is part of the time.

Inputs in e4m3 (suite fp8) are quantised with a descale for each head, and err is about the numbers that they stand for,
which the peer flash_ext-bf16 takes in bf16. To quantise them, or to make them bf16, is not part of the time.
"""

from __future__ import annotations

import math
import re
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from accuracy import Truth, err, score_elements, truth
from cpu_tables import cell_table, summary_table
from figures import draw_attention, draw_host_overhead
from gpu_peers import GPU_PEERS, OPTIONAL, Peer, eager_peer, padded_peer, sdpa_peer
from gpu_tables import gpu_summary, gpu_table, ratio_table, refusals, scaling_table
from harness import (
    BenchmarkError,
    Reporter,
    Timing,
    command_line,
    interleave,
    is_lost,
    load_flash_ext,
    make_folder,
    provenance,
    run_main,
    stdout_console,
)
from host_overhead import host_overhead, host_table
from limits import Limits, measure_limits
from our_peers import OUR_PEERS, given_to
from shapes import E4M3, Case, Inputs, make_inputs, pad, unpad
from suites import CUDNN_FP8, OURS, SUITES, WIDE, Suite, cases_of
from tables import Table, csv_path, write_csv, write_results
from torch import Tensor
from tyro.conf import arg

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": E4M3}
PASSES = ("fwd", "bwd", "e2e")
CPU_FLOP = 2.2e9  # of a forward: larger cases of suites for both devices are left to GPUs
CHECK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 30}  # larger samples of the score matrix are not checked


# name -> factory; a name costs nothing until it is asked for
PEERS: dict[str, Callable[[], Peer]] = {
    "torch": lambda: sdpa_peer(F.scaled_dot_product_attention),
    "torch-padded": lambda: padded_peer(sdpa_peer(F.scaled_dot_product_attention)),
    "eager": eager_peer,
    **GPU_PEERS,
    **OUR_PEERS,
}


@dataclass(frozen=True)
class Check:
    """What one untimed forward and backward tells; NaN where it was not checked or measured. MiB without inputs."""

    errors: dict[str, float]  # by pass
    peak_mib: float = math.nan
    saved_mib: float = math.nan  # held between forward and backward


@dataclass(frozen=True)
class Cell:
    """One peer's figures for one case, dtype and pass."""

    peer: str
    case: Case
    dtype: torch.dtype
    direction: str
    timing: Timing
    check: Check
    limits: Limits

    @property
    def err(self) -> float:
        return self.check.errors.get(self.direction, math.nan)

    @property
    def peak_mib(self) -> float:
        return self.check.peak_mib

    @property
    def head_dim(self) -> int:
        return self.case.d

    @property
    def tflops(self) -> float:
        return self.case.flop(self.direction) / self.timing.median / 1e12

    @property
    def gbs(self) -> float:
        return self.case.traffic(self.direction, self.dtype) / self.timing.median / 1e9

    @property
    def percent(self) -> float:
        """Of the nearer limit: the matrix product's in this dtype or the copy's."""
        return 100 * max(self.tflops / self.limits.of(self.dtype), self.gbs / self.limits.gbs)

    def row(self) -> dict[str, Any]:
        """The CSV row; the first 15 columns are those of every suite."""
        c, t = self.case, self.timing

        def figure(value: float, digits: str) -> str:
            return "" if math.isnan(value) else f"{value:{digits}}"

        return {
            "peer": self.peer, "suite": c.suite, "B": c.b, "H": c.h, "Hkv": c.hkv, "Sq": c.sq, "Sk": c.sk, "D": c.d,
            "dtype": str(self.dtype).removeprefix("torch."), "causal": int(c.causal), "pass": self.direction,
            "ms": ("OOM" if t.failure == "OOM" else "failed") if t.failure else f"{t.median * 1e3:.4f}",
            "tflops": figure(self.tflops, ".4f"), "gbs": figure(self.gbs, ".2f"), "err": figure(self.err, ".3f"),
            "Ev": c.dv, "mask": c.mask, "dropout": c.dropout, "group": c.group,
            "best_ms": figure(t.best * 1e3, ".4f"), "spread": figure(t.spread, ".3f"), "rounds": len(t.samples),
            "calls": len(t.samples) * t.calls,
            "name": c.name, "reason": t.failure, "percent_of_limit": figure(self.percent, ".1f"),
            "limit_tflops": figure(self.limits.of(self.dtype), ".1f"), "limit_gbs": figure(self.limits.gbs, ".0f"),
            "peak_mib": figure(self.check.peak_mib, ".1f"), "saved_mib": figure(self.check.saved_mib, ".1f"),
        }  # fmt: skip


def forward_call(peer: Peer, case: Case, x: Inputs) -> Callable[[], Tensor]:
    """One forward as inference runs it; with autograd where the mask wants a gradient, which decides PyTorch's path."""

    def call() -> Tensor:
        with nullcontext() if case.mask == "float_grad" else torch.no_grad():
            return peer(case, x)

    return call


def backward_call(peer: Peer, case: Case, x: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """One backward over a graph that the first, untimed call builds."""
    forward = cache(lambda: peer(case, x))
    wanted = x.wanting_gradients()
    return lambda: torch.autograd.grad(forward(), wanted, x.grad_out, retain_graph=True)


def end_to_end_call(peer: Peer, case: Case, x: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """One forward and its backward."""
    return lambda: torch.autograd.grad(peer(case, x), x.wanting_gradients(), x.grad_out)


CALLS = {"fwd": forward_call, "bwd": backward_call, "e2e": end_to_end_call}


def checked(peer: Peer, case: Case, x: Inputs, found: Truth | None, args: Args) -> Check:
    """Errors of each pass, infinite where the peer fails, and on a GPU the memory."""
    on_gpu = args.device == "cuda"

    def mib(read: Callable[[], int]) -> float:
        return read() / 2**20 if on_gpu else math.nan

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = mib(torch.cuda.memory_allocated)
    try:
        out, gradients = forward_call(peer, case, x)(), ()
        peak, saved = mib(torch.cuda.max_memory_allocated) - before, math.nan
        if set(args.passes) != {"fwd"}:
            inference, out = out.detach(), None
            if on_gpu:  # of this forward, whose out is not the one above
                torch.cuda.reset_peak_memory_stats()
                before = mib(torch.cuda.memory_allocated)
            out = peer(case, x)
            saved = mib(torch.cuda.memory_allocated) - before
            gradients = torch.autograd.grad(out, x.wanting_gradients(), x.grad_out)
            peak, out = mib(torch.cuda.max_memory_allocated) - before, inference
        if found is None:
            return Check({}, peak, saved)
        results = [unpad(case, result) for result in (out.detach(), *gradients)]
        errors = {name: err(case, found, results, name) for name in args.passes}
        return Check(errors, peak, saved)
    except Exception as error:  # a peer may raise anything
        if is_lost(error):
            raise BenchmarkError(f"A peer broke the CUDA context: {error}") from None
        return Check(dict.fromkeys(args.passes, math.inf))


def truth_of(case: Case, x: Inputs) -> Truth | None:
    """The fp64 results, if their scores fit on this GPU."""
    try:
        return truth(case, x)
    except torch.OutOfMemoryError:
        print(f"{case.name} is not checked: its fp64 scores do not fit", file=sys.stderr)
        return None


def measure(case: Case, dtype: torch.dtype, peers: dict[str, Peer], args: Args) -> list[Cell]:
    """All peers and passes of one case in one dtype."""
    x = make_inputs(case, dtype, args.device)
    small = score_elements(case) <= CHECK_ELEMENTS[args.device]
    found = truth_of(case, x) if args.check and small and not case.dropout else None
    padded = pad(case, x) if case.lengths and dtype != E4M3 else x
    wide = x.dequantised(torch.bfloat16) if dtype == E4M3 and WIDE in peers else x
    given = {name: padded if name.endswith("-padded") else wide if name == WIDE else x for name in peers}
    peers = {name: given_to(name, peer, dtype) for name, peer in peers.items()}
    timings: dict[tuple[str, str], Timing] = {}
    for direction in args.passes:
        calls = {name: CALLS[direction](peer, case, given[name]) for name, peer in peers.items()}
        of_pass = interleave(calls, args.device, args.rounds, args.sample, args.seconds, args.calls)
        timings.update({(direction, name): timing for name, timing in of_pass.items()})
        del calls  # and the graphs in them
    checks = {}
    found_by = {name: None if name == CUDNN_FP8 else found for name in peers}
    for name, peer in peers.items():
        failures = {timings[direction, name].failure for direction in args.passes} - {""}
        lost = failures and args.device == "cuda"
        checks[name] = Check({}) if lost else checked(peer, case, given[name], found_by[name], args)
        for failure in failures - {"OOM"} if args.suite == "cpu" else ():  # elsewhere the tables tell it
            print(f"{name} fails on {case.name} {dtype}: {failure}", file=sys.stderr)
    return [
        Cell(name, case, dtype, direction, timings[direction, name], checks[name], args.limits)
        for direction in args.passes
        for name in peers
    ]


@dataclass
class Args:
    """The command line, and what follows from it."""

    suite: Literal[tuple(SUITES)] = "cpu"  # set of cases
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the suite's, for some the GPU when there is one
    dtypes: tuple[Literal[tuple(DTYPES)], ...] = ()  # none: the suite's (cpu: fp32 bf16 fp16)
    passes: tuple[Literal[PASSES], ...] = ()  # none: the suite's (mostly fwd bwd)
    peers: tuple[Literal[tuple(PEERS)], ...] = ()  # ratios are of the others to the last one; none: the suite's
    backend: str | None = None  # flash_ext's backend, such as sm90 (None: its own choice)
    case: str = ""  # only cases whose name has this text, such as 2048x64 or dropout
    only: str = ""  # only cases in whose name this regular expression is found
    threads: int = 2  # CPU threads of PyTorch
    rounds: int | None = None  # interleaved rounds of a cell (None: 7, on a GPU 5; other suites on a CPU 3)
    # time after which a cell takes at most 3 rounds (None: 3, on a GPU 10; other suites on a CPU 0.5)
    seconds: float | None = None
    calls: int | None = None  # exactly so many timed calls a cell (None: what fits; suite scaling on a GPU 100)
    time_budget: Annotated[float, arg(metavar="SECONDS")] = math.inf  # start no case after this
    quick: bool = False  # one small case of each kind, 3 rounds: a minute, for CI
    check: bool = True  # with --no-check no err is computed
    host: bool = True  # with --no-host the host time of tiny calls is not taken (suites cpu and short)
    # folder of attention_SUITE and host_overhead, each .csv, .md, .tex, .png; or FILE.csv, others beside it
    out: Annotated[Path | None, arg(metavar="DIR")] = None

    sample: float = field(init=False)
    cases: list[Case] = field(init=False)
    limits: Limits = field(init=False)
    csv: Path | None = field(init=False)
    host_csv: Path = field(init=False)


def parse(argv: list[str] | None = None) -> Args:
    """Arguments, checked and with their suite's defaults and cases."""
    args = command_line(Args, argv)
    suite = SUITES[args.suite]
    args.device = device_of(args, suite)
    on_gpu = args.device == "cuda"
    args.sample = 0.02 if on_gpu else 0.03
    hurried = not on_gpu and suite.device != "cpu"
    args.rounds = args.rounds if args.rounds is not None else 5 if on_gpu else 3 if hurried else 7
    args.seconds = args.seconds if args.seconds is not None else 10.0 if on_gpu else 0.5 if hurried else 3.0
    args.calls = args.calls if args.calls is not None else suite.calls if on_gpu and not args.quick else None
    args.dtypes, args.passes = args.dtypes or list(suite.dtypes), args.passes or list(suite.passes)
    args.peers = list(args.peers) or peers_of(suite, on_gpu)
    for name in ("threads", "rounds", "seconds", "calls", "time_budget"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise BenchmarkError(f"--{name.replace('_', '-')} {value} must be above 0.")
    if len(set(args.peers)) < len(args.peers) or len(args.peers) < 2:
        raise BenchmarkError(f"--peers takes two or more different names of {', '.join(PEERS)}.")
    if args.backend and OURS not in args.peers:
        raise BenchmarkError(f"--backend {args.backend} is {OURS}'s, which is not among the peers.")
    if "e4m3" in args.dtypes and list(args.passes) != ["fwd"]:
        raise BenchmarkError("--dtypes e4m3 is timed forward alone: --passes fwd.")
    args.cases = chosen_cases(args)
    if args.quick:
        args.rounds, args.seconds = min(args.rounds, 3), min(args.seconds, 0.3)
    args.csv = None
    if args.out is not None:
        args.csv = csv_path(args.out, f"attention_{args.suite}")
        name = f"{args.csv.stem}_host_overhead" if args.csv == args.out else "host_overhead"
        args.host_csv = args.csv.with_name(f"{name}.csv")
    return args


def device_of(args: Args, suite: Suite) -> str:
    """--device, or the suite's: a suite for both takes the GPU when there is one."""
    device = suite.device if args.device == "auto" else args.device
    if device == "both":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise BenchmarkError(f"--suite {args.suite} needs a CUDA GPU, and PyTorch sees none here.")
    return device


def peers_of(suite: Suite, on_gpu: bool) -> list[str]:
    """The suite's peers that are here; on a CPU PyTorch's own choice for its GPU backends."""
    if on_gpu:
        return [name for name in suite.peers if name not in OPTIONAL or is_here(name)]
    others = [p for p in suite.peers if p not in GPU_PEERS or p == "compiled-eager"]
    return others if {"torch", "torch-padded", WIDE} & {*others} else ["torch", *others]


def is_here(peer: str) -> bool:
    """Whether a peer's package can be imported; a line says so where it cannot."""
    try:
        PEERS[peer]()
    except BenchmarkError as error:
        print(f"Left out: {error}", file=sys.stderr)
        return False
    return True


def chosen_cases(args: Args) -> list[Case]:
    """The suite's cases that --case and --only leave."""
    hurried = args.device == "cpu" and SUITES[args.suite].device == "both"
    cases = cases_of(args.suite, args.quick, CPU_FLOP if hurried else math.inf)
    try:
        chosen = [case for case in cases if args.case in case.name and re.search(args.only, case.name)]
    except re.error as error:
        raise BenchmarkError(f"--only {args.only!r} is not a regular expression: {error}.") from None
    if not chosen:
        flag, text = ("--only", args.only) if args.only else ("--case", args.case)
        raise BenchmarkError(f"{flag} {text!r} fits none of: {'; '.join(case.name for case in cases)}.")
    return chosen


def measure_all(peers: dict[str, Peer], origin: dict[str, str], args: Args) -> list[Cell]:
    """Every cell that the time budget allows, one case at least; the CSV is written after each, so that it is kept."""
    start = time.monotonic()
    todo = [(name, case) for name in args.dtypes for case in args.cases]
    cells: list[Cell] = []
    left_out: list[str] = []
    with Reporter(f"suite {args.suite}", len(todo)) as progress:
        for name, case in todo:
            if cells and time.monotonic() - start > args.time_budget:
                left_out.append(f"{name} {case.name}")
                continue
            cells += measure(case, DTYPES[name], peers, args)
            if args.device == "cuda":
                torch.cuda.empty_cache()  # so that one case's blocks do not make another run out of memory
            if args.csv is not None:
                write_csv(args.csv, [cell.row() for cell in cells], origin)
            progress.advance(f"{name} {case.name}")
    if left_out:
        print(
            f"The time budget of {args.time_budget:g} s is used up: {len(left_out)} of {len(todo)} cases were not "
            f"measured: {'; '.join(left_out)}.", file=sys.stderr
        )  # fmt: skip
    return cells


def tables_of(cells: list[Cell], args: Args) -> list[Table]:
    """The suite cpu's tables have goals; the others' have every peer, limits and memory."""
    if args.suite == "cpu" and args.device == "cpu":
        return [*(cell_table(cells, DTYPES[name], args) for name in args.dtypes), summary_table(cells, args)]
    first = scaling_table(cells) if args.suite == "scaling" else gpu_table(cells, args.peers)
    by_case = [ratio_table(cells, args.peers)] if args.suite == "varlen" else []
    return [first, *by_case, gpu_summary(cells, args.peers)]


def main() -> None:
    """Measures every cell, prints the tables, writes the CSVs."""
    args = parse()
    torch.set_num_threads(args.threads)
    if args.csv is not None:
        make_folder(args.csv.parent)
    peers = {name: OUR_PEERS[name](args.backend) if name in OUR_PEERS else PEERS[name]() for name in args.peers}
    if args.suite != "cpu":
        warnings.simplefilter("ignore", UserWarning)  # PyTorch tells there why a backend refuses; so do the tables
    args.limits = measure_limits() if args.device == "cuda" else Limits()
    origin = provenance(args.device)
    cells = measure_all(peers, origin, args)
    tables = tables_of(cells, args)
    console = stdout_console(width=120 if args.suite == "cpu" else 220)
    for table in tables:
        console.print(table)
    if args.suite != "cpu":
        print(*refusals(cells), *([args.limits] if args.limits.tflops else []), sep="\n")
    if args.csv is not None:
        print(write_results(args.csv, [cell.row() for cell in cells], origin, tables, draw_attention))
    if args.host and args.suite in ("cpu", "short"):
        ours = load_flash_ext().scaled_dot_product_attention if OURS in peers else None
        host_rows = host_overhead(ours, args.device, rounds=5 if args.quick else 15)
        console.print(host_table(host_rows))
        if args.csv is not None:
            print(write_results(args.host_csv, host_rows, origin, [host_table(host_rows)], draw_host_overhead))


if __name__ == "__main__":
    run_main(main)
