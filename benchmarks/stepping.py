"""Measures steps of the language model: forward, loss, backward and optimizer, each by itself, and what they cost.

Called by train_lm.py for --mode. Tokens are random, vocabulary 10,000. The step is timed by timeit's clock between two
waits for the device. Its phases are timed by the same clock on a CPU, and on a GPU by events in the stream, so that no
phase waits for the one before. MFU is the model's own arithmetic (products of the linear layers and kept pairs of
causal attention; backward twice the forward; nothing for recomputation) over what a matrix product reached in the run.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from timeit import default_timer
from typing import Any

import peak_memory
import torch
from harness import BenchmarkError, Reporter, is_out_of_memory, load_flash_ext, release_memory, synchronize
from limits import float32_products
from model import ATTENTIONS, SIZES, Size, TransformerLM, mark_ranges, named_range
from tables import Table, make_table
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import AdamW
from training import autocast, cross_entropy, make_optimizer, update

VOCAB = 10_000
PHASES = {
    "forward": ("forward",),
    "forward-backward": ("forward", "loss", "backward"),
    "train-step": ("forward", "loss", "backward", "optimizer"),
}


@dataclass(frozen=True)
class Setting:
    """One row of the table: a model, how it runs, and how it is measured."""

    size: str
    context: int
    attention: str
    precision: str
    mode: str
    warmup: int
    batch: int
    steps: int
    compiled: bool
    recompute: str
    device: str
    seed: int
    weigh: bool = False  # measure and predict the step's memory

    @property
    def name(self) -> str:
        return f"{self.size} {self.context} {self.attention} {self.precision} {self.mode}"


@dataclass(frozen=True)
class Tools:
    """Which profilers look at the measured steps."""

    nvtx: bool = False
    memory_snapshot: Path | None = None
    torch_profiler: Path | None = None

    def __bool__(self) -> bool:
        return bool(self.nvtx or self.memory_snapshot or self.torch_profiler)


@dataclass
class Measured:
    """Milliseconds of each measured step by phase and as a whole; none of either when memory ran out."""

    setting: Setting
    phases: list[dict[str, float]] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    peak_mib: float = math.nan  # GPU only
    step_mib: float = math.nan  # a step's peak beyond what was there before it, if it is weighed
    predicted_mib: float = math.nan
    out_of_memory: bool = False


def profiling() -> Any:
    """flash_ext.profiling, or a BenchmarkError."""
    load_flash_ext()
    import flash_ext.profiling

    return flash_ext.profiling


# ---- one step ----


class PhaseClock:
    """Times and names the phases of one step; read it after waiting for the device."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        self.marks: dict[str, tuple[Any, Any]] = {}

    def _mark(self) -> Any:
        if not self.on_gpu:
            return default_timer()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with named_range(name):
            begin = self._mark()
            yield
            self.marks[name] = begin, self._mark()

    def milliseconds(self) -> dict[str, float]:
        if self.on_gpu:
            return {name: begin.elapsed_time(end) for name, (begin, end) in self.marks.items()}
        return {name: (end - begin) * 1e3 for name, (begin, end) in self.marks.items()}


@dataclass
class Workload:
    """A model with its inputs; step() runs one step of the setting's mode."""

    setting: Setting
    model: TransformerLM
    tokens: Tensor  # [batch, context + 1]: inputs, and one ahead the targets
    optimizer: AdamW
    scaler: GradScaler

    def step(self) -> PhaseClock:
        mode, clock = self.setting.mode, PhaseClock(self.setting.device)
        inputs, targets = self.tokens[:, :-1], self.tokens[:, 1:]
        with torch.set_grad_enabled(mode != "forward"):
            with clock.phase("forward"), autocast(self.setting.precision, self.setting.device):
                logits = self.model(inputs)
            if mode != "forward":
                with clock.phase("loss"):
                    loss = cross_entropy(logits, targets)
                with clock.phase("backward"):
                    self.scaler.scale(loss).backward()
        if mode == "train-step":
            with clock.phase("optimizer"):
                update(self.model, self.optimizer, self.scaler)
        else:
            self.optimizer.zero_grad(set_to_none=True)
        return clock


def build(setting: Setting) -> Workload:
    """The model with random weights and one batch of random tokens."""
    if setting.compiled or setting.attention == "compiled-naive":
        torch.compiler.reset()  # what an earlier setting left would make this one compile for dynamic shapes
    torch.manual_seed(setting.seed)
    size, attend = SIZES[setting.size], ATTENTIONS[setting.attention]()
    with torch.device(setting.device):
        model = TransformerLM(size, attend, setting.context, VOCAB, setting.recompute)
        tokens = torch.randint(VOCAB, (setting.batch, setting.context + 1))
    if setting.compiled:
        model.compile_blocks()
    optimizer, scaler = make_optimizer(model, size.lr, setting.precision, setting.device)
    return Workload(setting, model, tokens, optimizer, scaler)


# ---- measuring ----


@contextmanager
def observed(tools: Tools, device: str) -> Iterator[None]:
    """The profilers' view of the measured steps: what --nvtx, --memory-snapshot and --torch-profiler ask for."""
    with ExitStack() as stack:
        if tools.memory_snapshot:
            stack.enter_context(profiling().memory_snapshot(tools.memory_snapshot))
        if tools.torch_profiler:
            profiler = torch.profiler.profile(acc_events=True)
            stack.callback(lambda: profiler.export_chrome_trace(str(tools.torch_profiler)))
            stack.enter_context(profiler)
        if tools.nvtx and device == "cuda":  # nsys --capture-range=cudaProfilerApi records from here to the end
            torch.cuda.profiler.start()
            stack.callback(torch.cuda.profiler.stop)
        yield


def run_steps(setting: Setting, tools: Tools, result: Measured) -> None:
    """Warms up and measures; fills `result`. Its own function, so that an OOM leaves no frame that holds tensors."""
    work = build(setting)
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with Reporter(setting.name, setting.warmup + setting.steps) as progress:
        with named_range("warm-up"):
            for _ in range(setting.warmup):
                work.step()
                progress.advance("warm-up")
            synchronize(setting.device)
        with observed(tools, setting.device), named_range("measured steps"):
            for index in range(setting.steps):
                with named_range(f"step {index}"):
                    begin = default_timer()
                    clock = work.step()
                    synchronize(setting.device)
                    result.step_ms.append((default_timer() - begin) * 1e3)
                result.phases.append(clock.milliseconds())
                progress.advance(f"{result.step_ms[-1]:.1f} ms")
    if setting.device == "cuda":
        result.peak_mib = torch.cuda.max_memory_allocated() / 2**20
    if setting.weigh:
        result.step_mib = peak_memory.measured(work.step, setting.device) / 2**20
        saved_tensors = profiling().saved_tensors
        result.predicted_mib = peak_memory.predicted(work.model, work.tokens[:, 1:], VOCAB, saved_tensors) / 2**20


def measure(setting: Setting, tools: Tools) -> Measured:
    """The measured steps of one setting; running out of memory is a result, not a crash."""
    result = Measured(setting)
    with ExitStack() as stack:
        stack.enter_context(float32_products(setting.precision))
        if tools:
            stack.enter_context(mark_ranges(profiling().range))
            # In the thread that calls it, backward launches its kernels inside the range "backward"
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        try:
            run_steps(setting, tools, result)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            result = Measured(setting, out_of_memory=True)
    release_memory(setting.device)
    return result


def measure_in_new_process(setting: Setting, tools: Tools) -> Measured:
    """The same where nothing has run before: what the first steps cost is gone once any step ran in the process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, setting, tools).result()


# ---- what is shown and left ----


def forward_flop(size: Size, batch: int, context: int) -> float:
    """Floating point operations of one forward."""
    weights = size.layers * (4 * size.d_model**2 + 3 * size.d_model * size.d_ff) + VOCAB * size.d_model
    pairs = context * (context + 1) // 2
    return 2 * batch * context * weights + 4 * size.layers * batch * pairs * size.d_model


def row_of(result: Measured, peak_tflops: float) -> dict[str, Any]:
    """The CSV row: the setting, mean and standard deviation of each phase and of the step, and what follows."""
    s = result.setting
    row: dict[str, Any] = {
        "size": s.size, "batch": s.batch, "context": s.context, "attention": s.attention, "precision": s.precision,
        "mode": s.mode, "compile": int(s.compiled), "checkpoint": s.recompute, "warmup": s.warmup,
        "steps": s.steps, "status": "OOM" if result.out_of_memory else "ok",
    }  # fmt: skip
    for phase in PHASES["train-step"]:
        row.update(_mean_and_deviation(phase, [step[phase] for step in result.phases if phase in step]))
    row.update(_mean_and_deviation("step", result.step_ms))
    mean = statistics.fmean(result.step_ms) / 1e3 if result.step_ms else math.nan
    flop = forward_flop(SIZES[s.size], s.batch, s.context) * (1 if s.mode == "forward" else 3)
    row["tokens_s"] = _figure(s.batch * s.context / mean, ".0f")
    row["mfu_percent"] = _figure(100 * flop / mean / 1e12 / peak_tflops, ".2f")
    row["peak_tflops"] = _figure(peak_tflops, ".3f")
    row["peak_mib"] = _figure(result.peak_mib, ".0f")
    row["step_mib"], row["predicted_mib"] = _figure(result.step_mib, ".1f"), _figure(result.predicted_mib, ".1f")
    row["each_step_ms"] = " ".join(f"{ms:.3f}" for ms in result.step_ms)
    return row


def _figure(value: float, digits: str) -> str:
    return "" if math.isnan(value) else f"{value:{digits}}"


def _mean_and_deviation(name: str, values: list[float]) -> dict[str, str]:
    mean = statistics.fmean(values) if values else math.nan
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return {f"{name}_ms": _figure(mean, ".3f"), f"{name}_std": _figure(deviation, ".3f")}


SETTING_COLUMNS = ("size", "batch", "context", "attention", "precision", "mode", "compile", "checkpoint", "warmup")


def varying(rows: list[dict[str, Any]]) -> list[str]:
    """The columns of a setting in which the rows differ."""
    return [name for name in SETTING_COLUMNS if len({str(row[name]) for row in rows}) > 1]


def step_table(rows: list[dict[str, Any]], device: str) -> Table:
    """One line a setting: what differs, then mean ± standard deviation; what is the same in all stands in the title."""
    different = varying(rows)
    same = [f"{name} {rows[0][name]}" for name in SETTING_COLUMNS if name not in different]
    title = f"Milliseconds, mean ± standard deviation of {rows[0]['steps']} steps, {device}: {', '.join(same)}"
    phases = [name for name in PHASES["train-step"] if any(row[f"{name}_ms"] for row in rows)]
    costs = {"tokens_s": "tokens/s", "mfu_percent": "MFU %", "peak_mib": "peak MiB"}
    if any(row["step_mib"] for row in rows):
        costs |= {"step_mib": "step's own MiB", "predicted_mib": "predicted MiB"}
    headers = (*phases, "step", *costs.values())
    table = make_table(*different, right=headers, title=title)
    for row in rows:
        times = [_shown(row[f"{name}_ms"], row[f"{name}_std"]) for name in (*phases, "step")]
        if row["status"] == "OOM":
            times[-1] = "OOM"
        table.add_row(*(str(row[name]) for name in different), *times, *(row[name] or "-" for name in costs))
    return table


def _shown(mean: str, deviation: str) -> str:
    if not mean:
        return "-"
    return f"{float(mean):.2f} ± {float(deviation):.2f}" if deviation else f"{float(mean):.2f}"


def check_tools(tools: Tools, settings: list[Setting]) -> None:
    """A BenchmarkError where a profiler's file could not be written: without a GPU, or for several settings."""
    for option, path in (("memory-snapshot", tools.memory_snapshot), ("torch-profiler", tools.torch_profiler)):
        if path and len(settings) > 1:
            raise BenchmarkError(f"--{option} writes one file, but the lists ask for {len(settings)} settings.")
        if path and not path.parent.is_dir():
            raise BenchmarkError(f"--{option} {path}: there is no folder {path.parent}.")
    if tools.memory_snapshot and settings[0].device != "cuda":
        raise BenchmarkError("--memory-snapshot records what a GPU allocates, and this run is on a CPU.")
