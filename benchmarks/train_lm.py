#!/usr/bin/env python3
"""A Transformer language model, end to end: trains it on real text, or measures what a step costs and where.

Training compares loss curves; two attentions differ only in rounding, so their curves must lie on each other:

    python benchmarks/train_lm.py --compare               flash_ext and PyTorch's SDPA, same seed, same batches
    python benchmarks/train_lm.py --compare sdpa naive    any two of flash_ext, sdpa, naive, compiled-naive
    python benchmarks/train_lm.py --data book.txt         one attention, a text of your own

    torchrun --nproc-per-node 2 benchmarks/train_lm.py --parallel fsdp      ddp, zero1, fsdp, tp, cp, fsdp+cp

The text is read byte by byte (vocabulary 256), so losses are in nats per byte: an untrained model has ln 256 = 5.55.
Without --data it is the Python standard library's own sources.

Measuring, which any of --mode, --warmup, --nvtx, --memory-snapshot, --torch-profiler or --time-budget asks for, times
forward, loss, backward and optimizer on random tokens (vocabulary 10,000). Lists with commas make one table:

    python benchmarks/train_lm.py --mode forward,train-step --size small,medium --attention naive,sdpa,flash_ext
    python benchmarks/train_lm.py --warmup 0,1,2,5         how many steps it takes to warm up; a new process for each
    python benchmarks/train_lm.py --mode train-step --precision fp32,tf32,bf16,fp16 --compile
    python -m flash_ext.profiling nsys -- python benchmarks/train_lm.py --mode train-step --nvtx

A setting that runs out of memory is a row "OOM". Progress goes to stderr, tables to stdout, CSV, Markdown, LaTeX and a
picture to --out.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

# Read by OpenMP when torch loads it: threads that wait spin shortly, then sleep. Without it a step next to other busy
# programs can take seconds (measured on 2 shared cores: mean 575 ms a step, 185 with it; 123 and 127 when left alone).
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

from data import load_text
from figures import draw_losses, draw_steps
from harness import (
    BenchmarkError,
    command_line,
    make_folder,
    pick_device,
    provenance,
    release_memory,
    run_main,
    stdout_console,
    word,
)
from limits import product_tflops
from model import ATTENTIONS, RECOMPUTE, SIZES
from stepping import PHASES, Setting, Tools, check_tools, measure, measure_in_new_process, row_of, step_table
from tables import csv_path, write_csv, write_results
from training import PRECISIONS, PROMPT, loss_rows, loss_table, train
from tyro.conf import arg

DEFAULTS = {  # a CPU gets a model that learns in a minute; a GPU the smallest of the real sizes
    "cpu": {"size": ["tiny"], "context": [128], "batch": 16, "measured batch": 4},
    "cuda": {"size": ["small"], "context": [512], "batch": 4, "measured batch": 4},
}
TRAINING_STEPS, MEASURED_STEPS, WARMUP = 300, 10, 5
MEASURING = ("mode", "warmup", "nvtx", "memory_snapshot", "torch_profiler", "time_budget")


def whole(text: str, least: int = 1) -> int:
    """An integer of at least so much."""
    if not text.isdecimal() or int(text) < least:
        raise ValueError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def seconds(text: str) -> float:
    """A number above 0."""
    value = float(text)
    if not value > 0:
        raise ValueError(f"{text!r} is not a number above 0")
    return value


def list_of(read: Callable[[str], Any] | Iterable[str]) -> Any:
    """To annotate an argument: values with commas between them, each by a function or one of the names."""

    def one(text: str) -> Any:
        if callable(read):
            return read(text)
        if text not in read:
            raise ValueError(f"invalid choice: {text!r} (choose from {', '.join(read)})")
        return text

    shown = "N" if callable(read) else f"{{{'|'.join(read)}}}"
    return word(lambda text: [one(part) for part in text.split(",")], f"{shown}[,...]")


@dataclass
class Args:
    """The command line, and what follows from it. To train, an argument that may have several values takes one."""

    size: Annotated[list[str] | None, list_of(SIZES)] = None  # None: tiny, on a GPU small
    attention: Annotated[list[str], list_of(ATTENTIONS)] = field(default_factory=["flash_ext"].copy)
    context: Annotated[list[int] | None, list_of(whole)] = None  # tokens per window (None: 128, on a GPU 512)
    # tf32: products of fp32; bf16 and fp16: autocast, fp16 with a GradScaler; weights are fp32
    precision: Annotated[list[str], list_of(PRECISIONS)] = field(default_factory=["fp32"].copy)
    batch: Annotated[int | None, word(whole, "N")] = None  # windows per step (None: 4; to train on a CPU 16)
    steps: Annotated[int | None, word(whole, "N")] = None  # None: 300 to train, 10 to measure
    compile: bool = False  # torch.compile of the Transformer block, once for all of them
    # what backward computes again instead of keeping it: each block, each group of sqrt(layers) blocks, or groups whose
    # blocks are again recomputed; measured, the peak of a step's memory stands beside what arithmetic says (None: none)
    checkpoint: Annotated[list[str] | None, list_of(RECOMPUTE)] = None
    seed: int = 0  # of weights, batches and sample
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the GPU when there is one
    # folder of train_lm.* or train_lm_steps.*, or FILE.csv, others beside it
    out: Annotated[Path, arg(metavar="DIR")] = Path(__file__).parent / "out"
    # train twice and compare two attentions; one name is compared with --attention; none means sdpa
    compare: Annotated[list[str] | None, arg(metavar="[NAME [NAME]]")] = None
    lr: float | None = None  # training: peak learning rate (None: one that suits the size)
    data: Annotated[Path | None, arg(metavar="FILE")] = None  # training: UTF-8 text (None: Python's own sources)
    sample: bool = True  # training: with --no-sample no text is generated at the end
    # training: on torchrun's ranks (none, ddp, zero1, fsdp, tp, cp, fsdp+cp), a table of what each rank does; --batch
    # is of all
    parallel: Annotated[str | None, arg(metavar="NAME")] = None
    # --parallel: folder of checkpoints; the run goes on from the newest one there
    resume: Annotated[Path | None, arg(metavar="DIR")] = None
    save_every: Annotated[int, word(whole, "N")] = 50  # --resume: steps between checkpoints
    mode: Annotated[list[str] | None, list_of(PHASES)] = None  # measuring (None: train-step); forward has no autograd
    # measuring: steps before those measured (None: 5); a list is a study, each in a new process
    warmup: Annotated[list[int] | None, list_of(partial(whole, least=0))] = None
    # measuring: start no setting after this
    time_budget: Annotated[float | None, word(seconds, "SECONDS")] = None
    # measuring: NVTX ranges for nsys (steps, phases, blocks, naive attention's parts); it records one setting, and with
    # --parallel all steps but the first two
    nvtx: bool = False
    # measuring: Chrome trace of the measured steps of one setting
    torch_profiler: Annotated[Path | None, arg(metavar="FILE")] = None
    # measuring: allocations in the steps of one setting, on a GPU, for python -m flash_ext.profiling memory
    memory_snapshot: Annotated[Path | None, arg(metavar="FILE")] = None

    asks: list[str] = field(init=False)  # what asks for measuring
    csv: Path = field(init=False)
    settings: list[Setting] = field(init=False)
    tools: Tools = field(init=False)
    attentions: list[str] = field(init=False)


def parse(argv: list[str] | None = None) -> Args:
    """Arguments with the device's defaults filled in."""
    args = command_line(Args, argv)
    asked = [name for name in MEASURING if getattr(args, name) not in (None, False)]
    if args.parallel and asked == ["nvtx"]:  # ranges of training on several ranks
        asked = []
    args.asks = [f"--{name.replace('_', '-')}" for name in asked]
    args.device = pick_device(args.device)
    defaults = DEFAULTS[args.device]
    args.size, args.context = args.size or defaults["size"], args.context or defaults["context"]
    args.batch = args.batch or defaults["measured batch" if args.asks else "batch"]
    args.steps = args.steps or (MEASURED_STEPS if args.asks else TRAINING_STEPS)
    name = "train_lm_steps" if args.asks else "train_lm_parallel" if args.parallel else "train_lm"
    args.csv = csv_path(args.out, name)
    (check_measuring if args.asks else check_training)(args)
    return args


def check_measuring(args: Args) -> None:
    """Fills in what measuring needs: `args.settings`, one a row, and `args.tools`."""
    for name in ("compare", "lr", "data", "parallel", "resume"):
        if getattr(args, name) is not None:
            raise BenchmarkError(f"--{name} is for training, but {args.asks[0]} asks for measuring.")
    args.mode, args.warmup = args.mode or ["train-step"], args.warmup or [WARMUP]
    weigh = args.checkpoint is not None
    for wrong in (name for name in args.precision if weigh and name not in ("fp32", "tf32")):
        raise BenchmarkError(f"--checkpoint predicts memory for fp32 and tf32, not for --precision {wrong}.")
    lists = (args.size, args.context, args.attention, args.precision, args.mode, args.warmup)
    rest = (args.batch, args.steps, args.compile)
    args.settings = [
        Setting(*choice, *rest, recompute, args.device, args.seed, weigh)
        for *choice, recompute in itertools.product(*lists, args.checkpoint or ["none"])
    ]
    args.tools = Tools(args.nvtx, args.memory_snapshot, args.torch_profiler)
    check_tools(args.tools, args.settings)


def check_training(args: Args) -> None:
    """Makes single values of the lists, and fills in `args.lr` and `args.attentions`."""
    args.checkpoint = args.checkpoint or ["none"]
    for name in ("size", "context", "attention", "precision", "checkpoint"):
        values = getattr(args, name)
        if len(values) > 1:
            shown = ",".join(map(str, values))
            raise BenchmarkError(f"--{name} {shown}: training takes one value; lists are for measuring, with --mode.")
        setattr(args, name, values[0])
    args.lr = SIZES[args.size].lr if args.lr is None else args.lr
    if not 0 < args.lr < math.inf:
        raise BenchmarkError(f"--lr {args.lr} must be a number above 0.")
    args.attentions = attentions_of(args)
    if args.parallel is not None:
        check_parallel(args)
    elif args.resume:
        raise BenchmarkError(f"--resume {args.resume} is for --parallel.")


def check_parallel(args: Args) -> None:
    """A BenchmarkError for what --parallel does not know or take."""
    from strategies import STRATEGIES  # here, because it loads DTensors, which takes seconds

    if args.parallel not in STRATEGIES:
        raise BenchmarkError(f"--parallel {args.parallel} is none of {', '.join(STRATEGIES)}.")
    if args.precision == "fp16":
        raise BenchmarkError("--precision fp16 scales the loss, which --parallel does not; it takes fp32, tf32, bf16.")
    if args.compare is not None or args.compile:
        raise BenchmarkError(f"--{'compile' if args.compile else 'compare'} is not for --parallel.")
    args.attention = args.attentions[0]


def attentions_of(args: Args) -> list[str]:
    """The attentions to train, in order: one, or the two of --compare."""
    if args.compare is None:
        return [args.attention]
    names = list(args.compare) or ["flash_ext" if args.attention == "sdpa" else "sdpa"]
    names = [args.attention, *names] if len(names) == 1 else names
    if len(set(names)) != 2 or len(names) != 2 or not set(names) <= set(ATTENTIONS):
        known = ", ".join(ATTENTIONS)
        raise BenchmarkError(f"--compare takes two different names of {known}, but got {' '.join(names)}.")
    return names


def train_all(args: Args) -> None:
    """Trains once or twice, prints the table and a sample, writes the curves."""
    text = load_text(args.data, args.context)
    for name in args.attentions:  # one that cannot be had is told before anything is trained
        ATTENTIONS[name]()
    print(f"{text.train.numel():,} bytes of {text.name} to train on, {args.steps} steps", file=sys.stderr)
    runs = [train(name, text, args, args.sample and index == 0) for index, name in enumerate(args.attentions)]
    table = loss_table(runs, text, args)
    console = stdout_console()
    console.print(table)
    if runs[0].sample:
        console.print(f"\nWhat the {runs[0].attention} model writes after {PROMPT.decode()!r}:")
        sample = (PROMPT + runs[0].sample).decode("utf-8", errors="replace")
        print("".join(c if c.isprintable() or c == "\n" else "?" for c in sample) + "\n", flush=True)
    print(write_results(args.csv, loss_rows(runs, args), provenance(args.device), [table], draw_losses))


def measure_all(args: Args) -> None:
    """Measures every setting that the time budget allows, one at least; prints the table and writes it."""
    begin = time.monotonic()
    for name in args.attention:
        ATTENTIONS[name]()
    origin = provenance(args.device)
    peaks = {precision: product_tflops(precision, args.device) for precision in args.precision}
    release_memory(args.device)
    run = measure_in_new_process if len(args.warmup) > 1 else measure
    rows: list[dict[str, Any]] = []
    for setting in args.settings:
        if rows and time.monotonic() - begin > (args.time_budget or math.inf):
            left = f"{len(args.settings) - len(rows)} of {len(args.settings)} settings were not measured"
            print(f"The time budget of {args.time_budget:g} s is used up: {left}.", file=sys.stderr)
            break
        rows.append(row_of(run(setting, args.tools), peaks[setting.precision]))
        write_csv(args.csv, rows, origin)  # kept if what follows does not end
    table = step_table(rows, origin["gpu"] or origin["cpu"])
    stdout_console(width=160).print(table)
    print(write_results(args.csv, rows, origin, [table], draw_steps))


def main() -> None:
    """Trains or measures, as the arguments ask."""
    args = parse()
    make_folder(args.csv.parent)
    if args.parallel:
        from parallel import train_parallel

        train_parallel(args)
    else:
        (measure_all if args.asks else train_all)(args)


if __name__ == "__main__":
    run_main(main)
