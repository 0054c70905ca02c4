"""What every benchmark here shares: clocks, interleaved rounds, provenance, progress.

Timing: peers are measured in one process, in rounds; each round measures every peer once, and the order rotates from
round to round, so that drift and neighbours' load fall on all alike. The figure of a cell is the median over rounds. On
a GPU a round's sample is the median of calls that CUDA events enclose one by one, each after the L2 cache was flushed
and all queued ahead of the GPU, so that the host's time is not in it; on a CPU it is the mean over a few calls.
"""

from __future__ import annotations

import gc
import hashlib
import io
import math
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TypeVar

import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

CYCLES_PER_SECOND = 2e9  # about a GPU's clock; what it idles for need not be exact
GPU_CALLS = 20  # a sample's calls at most
COMPILING_S = 10.0  # a first call on a CPU that takes longer does not compile, it is slow
FLUSH_BYTES = 256 << 20  # larger than the L2 cache of every GPU so far (H200: 50 MB, B200: 126 MB)


class BenchmarkError(Exception):
    """A user's mistake or a missing part, told in one sentence; main() prints it and exits with 2."""


def load_flash_ext() -> ModuleType:
    """The package under test, or a BenchmarkError that says how to get it."""
    try:
        import flash_ext
    except ImportError as error:
        raise BenchmarkError(
            f"flash_ext cannot be imported ({error}); build it with `pip install --no-build-isolation .`."
        ) from None
    if not hasattr(flash_ext, "scaled_dot_product_attention"):  # a bare folder of that name on sys.path
        raise BenchmarkError("flash_ext is not built; build it with `pip install --no-build-isolation .`.")
    return flash_ext


def run_main(main: Callable[[], None]) -> None:
    """Runs a command; a BenchmarkError becomes one line on stderr and exit status 2, Ctrl-C status 130."""
    try:
        main()
    except BenchmarkError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


Args = TypeVar("Args")


def command_line(kind: type[Args], argv: list[str] | None = None) -> Args:
    """A command line as a dataclass, by tyro, whose comments are the help; a refusal is a BenchmarkError."""
    told = io.StringIO()
    try:
        with redirect_stderr(told):
            return tyro.cli(
                kind, prog=Path(sys.argv[0]).name, description=sys.modules[kind.__module__].__doc__, args=argv,
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone),
            )  # fmt: skip
    except SystemExit as end:
        if not end.code:  # --help
            raise
        # A box: its title, in ASCII a rule, what is wrong, and after a rule or an empty line how to get help
        box = [line.strip("│| ") for line in Text.from_ansi(told.getvalue()).plain.splitlines()[1:]]
        parts = groupby(box, lambda line: bool(line.strip("─-")))
        raise BenchmarkError(next(" ".join(lines) for has_words, lines in parts if has_words)) from None


def word(read: Callable[[str], Any], metavar: str) -> tyro.constructors.PrimitiveConstructorSpec:
    """To annotate an argument of one word that `read` understands; what it cannot is a ValueError."""
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1, metavar=metavar, instance_from_str=lambda words: read(words[0]), is_instance=lambda value: True,
        str_from_instance=lambda value: [",".join(map(str, value)) if isinstance(value, list) else str(value)],
    )  # fmt: skip


def pick_device(name: str) -> str:
    """The name, where "auto" is the GPU when there is one; a GPU that is not there is a BenchmarkError."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise BenchmarkError("--device cuda: PyTorch sees no CUDA GPU here.")
    return name


def is_lost(error: Exception) -> bool:
    """True when the CUDA context went with the error (an illegal address, say): then every later call fails, too."""
    if not isinstance(error, getattr(torch, "AcceleratorError", ())) or is_out_of_memory(error):
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def is_out_of_memory(error: Exception) -> bool:
    """True for CUDA's out-of-memory error and for the CPU allocator's, which has no type of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def synchronize(device: str) -> None:
    """Waits for the GPU; nothing on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def release_memory(device: str) -> None:
    """Gives a GPU's memory back that no tensor of the caller holds, so that the next peak is that of its own work."""
    gc.collect()
    if device == "cuda":
        _flush_buffer.cache_clear()
        torch.cuda.empty_cache()


# ---- timing ----


@lru_cache(maxsize=1)
def _flush_buffer() -> torch.Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")


def time_calls(call: Callable[[], Any], calls: int, device: str, queue_s: float = 0.0) -> float:
    """Seconds of one call: on a CPU the mean over `calls` calls, on a GPU the median, each from a flushed L2.

    The GPU first idles for as long as the host needs to queue all of them, `queue_s` seconds each, at most 50 ms.
    """
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls
    flush = _flush_buffer()
    torch.cuda._sleep(int(min(1.5 * calls * queue_s, 0.05) * CYCLES_PER_SECOND))
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
    for begin, end in events:
        flush.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) / 1e3


@dataclass(frozen=True)
class Timing:
    """Seconds per call, one sample a round; none when the call failed: `failure` is then "OOM" or a message."""

    samples: tuple[float, ...]
    failure: str = ""
    calls: int = 1  # that make one sample

    @property
    def median(self) -> float:
        return statistics.median(self.samples) if self.samples else math.nan

    @property
    def best(self) -> float:
        return min(self.samples, default=math.nan)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median of the rounds: how noisy the machine was."""
        return (max(self.samples) - min(self.samples)) / self.median if self.samples else math.nan


def interleave(
    peers: Mapping[str, Callable[[], Any]],
    device: str,
    rounds: int = 7,
    sample_s: float = 0.03,
    budget_s: float = 3.0,
    total_calls: int | None = None,
) -> dict[str, Timing]:
    """Times the peers against each other: {name: Timing}, in the order given.

    One untimed call each, and a second one that sets how many calls make a sample of `sample_s` seconds; then up to
    `rounds` rounds with rotated order. After `budget_s` seconds a cell gets no more than three rounds, and none at all
    when one round alone takes longer than that: its figure is then that of the warm-up, so that slow cells end, too.
    With `total_calls` a peer gets that many timed calls, spread over the rounds, however long they take.
    A peer that raises has no samples but the message; a CUDA context that is lost ends the program.
    """
    start = time.perf_counter()
    if total_calls is not None:
        rounds, budget_s = min(rounds, total_calls), math.inf
    failures: dict[str, str] = {}
    once: dict[str, float] = {}
    queue: dict[str, float] = {}  # the host's share of `once`

    def attempt(name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # a peer may raise anything
            reason = (str(error) or type(error).__name__).splitlines()[0]
            if is_lost(error):
                raise BenchmarkError(f"{name} broke the CUDA context: {reason}") from None
            failures[name] = "OOM" if is_out_of_memory(error) else reason

    def warm_up(name: str) -> None:
        for _ in range(2):
            synchronize(device)
            begin = time.perf_counter()
            peers[name]()
            queue[name] = time.perf_counter() - begin
            synchronize(device)
            once[name] = time.perf_counter() - begin
            if once[name] > COMPILING_S and device == "cpu":  # a GPU's first call may compile for longer
                break

    def sample(name: str) -> None:
        samples[name].append(time_calls(peers[name], calls[name], device, queue[name]))

    for name in peers:
        attempt(name, partial(warm_up, name))
    names = [name for name in peers if name not in failures]
    most = 10_000 if device == "cpu" else GPU_CALLS
    calls = {name: max(1, min(most, int(sample_s / max(once[name], 1e-7)))) for name in names}
    if total_calls is not None:
        calls = dict.fromkeys(names, math.ceil(total_calls / rounds))
    round_s = sum(calls[name] * once[name] for name in names)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds if round_s <= budget_s else 0):
        if index >= 3 and time.perf_counter() - start + round_s > budget_s:
            break
        shift = index % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            if name not in failures:
                attempt(name, partial(sample, name))

    def timing(name: str) -> Timing:
        if name in failures:
            return Timing((), failures[name])
        return Timing(tuple(samples[name]), calls=calls[name]) if samples[name] else Timing((once[name],))

    return {name: timing(name) for name in peers}


def geomean(values: Iterable[float]) -> float:
    """Geometric mean; NaN of nothing."""
    values = list(values)
    return statistics.geometric_mean(values) if values else float("nan")


# ---- provenance ----


def _output(*command: str) -> str:
    """What a command prints, stripped; empty when it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str) -> str:
    return _output("git", "-C", str(Path(__file__).parent), *arguments)


def library_hash() -> str:
    """First 12 hex digits of the SHA-256 of the loaded libraries; empty when flash_ext was not used."""
    package = sys.modules.get("flash_ext")
    for folder in getattr(package, "__path__", []):
        if libraries := sorted(Path(folder).glob("libflash_*.so")):
            return hashlib.sha256(b"".join(library.read_bytes() for library in libraries)).hexdigest()[:12]
    return ""


def cpu_name() -> str:
    """The CPU's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def provenance(device: str) -> dict[str, str]:
    """Where a figure comes from; the same on every row of a CSV: commit, library, versions, hardware, command."""
    on_gpu = device == "cuda"
    commit = _git("rev-parse", "--verify", "--short=12", "HEAD")
    dirty = bool(_git("status", "--porcelain", "--", ":/", ":(top,exclude)benchmarks/results"))  # results are no source
    if not commit and "flash_ext" in sys.modules:  # a copy without its history: what the library was built from
        info = load_flash_ext().build_info()
        commit, dirty = (info.get("git_commit") or "")[:12], bool(info.get("git_dirty"))
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else ""
    return {
        "commit": commit,
        "dirty": str(int(dirty)),
        "library": library_hash(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": (torch.version.cuda or "") if on_gpu else "",
        "cudnn": str(torch.backends.cudnn.version() or "") if on_gpu else "",
        "driver": driver.split("\n")[0],
        "cpu": cpu_name(),
        "gpu": torch.cuda.get_device_name() if on_gpu else "",
        "threads": str(torch.get_num_threads()),
        "command": shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
    }


def device_slug(origin: Mapping[str, str]) -> str:
    """The folder of benchmarks/results that a row belongs to: "nvidia-h200", "amd-epyc-2-threads"."""
    name = origin["gpu"] or f"{origin['cpu']} {origin['threads']} threads"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def make_folder(path: Path) -> Path:
    """Creates the folder of --out before the work starts, so that a bad name costs nothing."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchmarkError(f"--out {path} cannot be made: {error.strerror or error}.") from None
    return path


# ---- progress and output ----


def stdout_console(width: int = 120) -> Console:
    """Tables go to stdout; a pipe or a file gets a width that does not wrap them."""
    return Console() if sys.stdout.isatty() else Console(width=width)


class Reporter:
    """Progress on stderr: a rich bar on a terminal, elsewhere a line about every tenth of the work."""

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total, self.done = title, total, 0
        self.console = Console(stderr=True)

    def __enter__(self) -> Reporter:
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=self.console, transient=True)
            self.bar.start()
            self.task = self.bar.add_task(self.title, total=self.total, note="")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.console.is_terminal:
            self.bar.stop()

    def advance(self, note: str = "") -> None:
        """One unit of work is done; `note` is shown behind the bar."""
        self.done += 1
        if self.console.is_terminal:
            self.bar.update(self.task, completed=self.done, note=note)
        elif self.done == 1 or self.done * 10 // self.total > (self.done - 1) * 10 // self.total:
            print(f"{self.title} {self.done}/{self.total} {note}".rstrip(), file=sys.stderr, flush=True)
