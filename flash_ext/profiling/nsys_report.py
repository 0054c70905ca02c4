"""From the statistics of ``nsys stats`` to one Markdown report. Called by nsys.py; reads files, starts nothing.

Four CSV files are read: ``nvtx_gpu_proj_sum`` (each range, projected to the GPU), ``cuda_gpu_kern_sum`` (each kernel),
``nvtx_kern_sum`` (each kernel in each range that encloses its launch, so nested ranges count a kernel twice, and a sum
is only meaningful within one range) and, for what hides collectives, ``cuda_gpu_trace`` (each launch; may be missing).
Everything is told per measured step.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

REPORTS = ("nvtx_gpu_proj_sum", "cuda_gpu_kern_sum", "nvtx_kern_sum", "cuda_gpu_trace")
PHASES = ("forward", "loss", "backward", "optimizer")

# What a kernel's name says it does; the first that matches. Fused attention comes first, because its names contain
# those of matrix products and of softmax.
KINDS = {
    "fused attention": r"flash_ext::|flash_(fwd|bwd)|pytorch_flash|fmha|sdpa|flex_attention|_attention",
    "matmul": r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitK|wgmma|triton_tem_.*_mm",
    "softmax": r"softmax",
}


class StatsError(Exception):
    """A file that is missing or is not what nsys writes."""


@dataclass(frozen=True)
class Span:
    """One range name, over all its instances. Times in ns."""

    name: str
    instances: int
    gpu_span: float  # from its first operation's start to its last one's end
    cpu_time: float


@dataclass(frozen=True)
class Kernel:
    """One kernel name: in a range, or in all."""

    name: str
    instances: int
    time: float  # ns
    range: str = ""

    @property
    def kind(self) -> str:
        return next((kind for kind, words in KINDS.items() if re.search(words, self.name, re.IGNORECASE)), "rest")


@dataclass(frozen=True)
class Stats:
    """What the three files say."""

    spans: dict[str, Span]
    kernels: list[Kernel]
    by_range: dict[str, list[Kernel]]
    outside: list[Kernel]  # launched in no range
    collectives: dict[str, tuple[float, float]] = field(default_factory=dict)  # of each GPU: ns in all, and exposed

    @property
    def steps(self) -> int:
        """Measured steps: ranges named `step N`, or else how often `forward` was entered."""
        named = sum(1 for name in self.spans if re.fullmatch(r"step \d+", name))
        forward = self.spans.get("forward")
        return named or (forward.instances if forward else 1)

    def time(self, name: str) -> float:
        return total(self.by_range.get(name, []))


def total(kernels: Iterable[Kernel]) -> float:
    return sum(kernel.time for kernel in kernels)


def _plain(name: str) -> str:
    """Without the domain: nsys writes `domain:name`, and `:name` for the default domain."""
    return re.sub(r"^(flash_ext)?:", "", name)


def _rows(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    """The rows of a CSV file; a column is found by its name without the unit, "Total Time" for "Total Time (ns)"."""
    if not path.exists():
        raise StatsError(f"{path} does not exist; it must be what `nsys stats --format csv` writes")
    with path.open(newline="") as file:
        reader = csv.reader(file)
        header = [re.sub(r" \(.*\)$", "", cell.strip()) for cell in next(reader, [])]
        if not header:
            raise StatsError(f"{path} is empty: nsys found no such data in the report or could not compute it")
        missing = [column for column in columns if column not in header]
        if missing:
            raise StatsError(f"{path} has no column {missing[0]!r}; it must be what `nsys stats --format csv` writes")
        return [dict(zip(header, row, strict=True)) for row in reader if row]


def _file(folder: Path, report: str) -> Path:
    """`anything_REPORT.csv` or `REPORT.csv` in the folder."""
    found = sorted(folder.glob(f"*{report}.csv"))
    if not found:
        raise StatsError(f"{folder} has no file *{report}.csv; it must hold those of {', '.join(REPORTS)}")
    if len(found) > 1:
        raise StatsError(f"{folder} has {len(found)} files *{report}.csv; it must hold those of one run")
    return found[0]


def read_stats(folder: Path) -> Stats:
    """The three CSV files of one run.

    Raises:
        StatsError: one is missing, there are those of several runs, or it has other columns.
    """
    spans: dict[str, Span] = {}
    columns = ("Range", "Total Proj Time", "Total Range Time", "Range Instances")
    for row in _rows(_file(folder, REPORTS[0]), columns):
        name = _plain(row["Range"])
        gpu, cpu = float(row["Total Proj Time"]), float(row["Total Range Time"])
        spans[name] = Span(name, int(row["Range Instances"]), gpu, cpu)
    kernels = [
        Kernel(row["Name"], int(row["Instances"]), float(row["Total Time"]))
        for row in _rows(_file(folder, REPORTS[1]), ("Total Time", "Instances", "Name"))
    ]
    by_range: dict[str, list[Kernel]] = {}
    outside = []
    for row in _rows(_file(folder, REPORTS[2]), ("NVTX Range", "Kern Inst", "Total Time", "Kernel Name")):
        name = _plain(row["NVTX Range"])
        kernel = Kernel(row["Kernel Name"], int(row["Kern Inst"]), float(row["Total Time"]), name)
        (by_range.setdefault(name, []) if name else outside).append(kernel)
    return Stats(spans, kernels, by_range, outside, _collectives(folder))


def _collectives(folder: Path) -> dict[str, tuple[float, float]]:
    if not list(folder.glob(f"*{REPORTS[3]}.csv")):
        return {}
    spans: dict[str, tuple[list[tuple[float, float]], list[tuple[float, float]]]] = {}
    for row in _rows(_file(folder, REPORTS[3]), ("Start", "Duration", "Device", "Name")):
        begin = float(row["Start"])
        of_gpu = spans.setdefault(row["Device"], ([], []))
        of_gpu["nccl" not in row["Name"].lower()].append((begin, begin + float(row["Duration"])))
    return {
        gpu: (uncovered(nccl, []), uncovered(nccl, others)) for gpu, (nccl, others) in sorted(spans.items()) if nccl
    }


def uncovered(intervals: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """The length of the union of `intervals` that no interval of `others` covers."""
    marks = [(begin, 0, 1) for begin, _ in intervals] + [(end, 0, -1) for _, end in intervals]
    marks += [(begin, 1, 1) for begin, _ in others] + [(end, 1, -1) for _, end in others]
    running, total, before = [0, 0], 0.0, -math.inf
    for time, which, change in sorted(marks):
        if running[0] and not running[1]:
            total += time - before
        running[which] += change
        before = time
    return total


# ---- tables ---------------------------------------------------------------------------------------------------------


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" + "---:|" * (len(header) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def phase_times(stats: Stats) -> dict[str, float]:
    """Kernel time of each phase, ns over all steps.

    A `backward` whose kernels were launched by autograd's own thread encloses none of them: it is what is left.
    """
    times = {phase: stats.time(phase) for phase in PHASES if phase in stats.spans or phase in stats.by_range}
    if "forward" in times and not times.get("backward") and stats.outside:
        times["backward"] = total(stats.kernels) - sum(times.values())
    return {phase: times[phase] for phase in PHASES if phase in times}


def phase_table(stats: Stats) -> str:
    steps, whole = stats.steps, total(stats.kernels)
    rows = []
    for phase, time in phase_times(stats).items():
        span = stats.spans.get(phase)
        launched = sum(kernel.instances for kernel in stats.by_range.get(phase, []))
        rows.append(
            (
                phase,
                f"{time / steps / 1e6:.3f}",
                _percent(time, whole),
                f"{span.gpu_span / steps / 1e6:.3f}" if span else "-",
                f"{span.cpu_time / steps / 1e6:.3f}" if span else "-",
                f"{launched / steps:.0f}" if launched else "-",
            )
        )
    kernels = sum(kernel.instances for kernel in stats.kernels)
    rows.append(("full step", f"{whole / steps / 1e6:.3f}", "100.0 %", "-", "-", f"{kernels / steps:.0f}"))
    header = ("phase", "kernels, ms", "of the step", "first to last on the GPU, ms", "on the CPU, ms", "kernels run")
    return _table(header, rows)


def kind_table(stats: Stats) -> str:
    """Matrix products against softmax against the rest: in forward and in the full step."""
    scopes = {"forward": stats.by_range.get("forward", []), "full step": stats.kernels}
    scopes = {name: kernels for name, kernels in scopes.items() if kernels}
    rows = []
    for kind in (*KINDS, "rest"):
        cells = []
        for kernels in scopes.values():
            time = total(kernel for kernel in kernels if kernel.kind == kind)
            cells += [f"{time / stats.steps / 1e6:.3f}", _percent(time, total(kernels))]
        rows.append((kind, *cells))
    header = [cell for name in scopes for cell in (f"{name}, ms", "share")]
    return _table(("kernels", *header), rows)


def block_table(stats: Stats) -> str:
    """One row a Transformer block, empty without ranges `block N`."""
    numbers = sorted(int(name.split()[1]) for name in stats.by_range if re.fullmatch(r"block \d+", name))
    rows, sums = [], [0.0, 0.0]
    for number in numbers:
        times = [stats.time(f"block {number}"), stats.time(f"block {number} backward")]
        sums = [old + new for old, new in zip(sums, times, strict=True)]
        rows.append((f"block {number}", *(f"{time / stats.steps / 1e6:.3f}" if time else "-" for time in times)))
    if not rows:
        return ""
    mean = (f"{time / len(rows) / stats.steps / 1e6:.3f}" if time else "-" for time in sums)
    return _table(("block", "forward, ms", "backward, ms"), [("mean", *mean), *rows])


def other_table(stats: Stats) -> str:
    """Every other range: parts of attention, flash_ext's operators, the program's own."""
    known = re.compile(r"measured steps|warm-up|step \d+|block \d+( backward)?|" + "|".join(PHASES))
    names = [name for name in stats.by_range if not known.fullmatch(name)]
    rows = []
    for name in sorted(names, key=stats.time, reverse=True):
        span = stats.spans.get(name)
        count = f"{span.instances / stats.steps:g}" if span else "-"
        share = _percent(stats.time(name), total(stats.kernels))
        rows.append((name, f"{stats.time(name) / stats.steps / 1e6:.3f}", share, count))
    return _table(("range", "kernels, ms", "of the step", "times"), rows) if rows else ""


def collective_table(stats: Stats) -> str:
    """One row a GPU: how long it runs NCCL's kernels, and for how much of that nothing else; empty without any."""
    rows = []
    for gpu, (whole, exposed) in stats.collectives.items():
        cells = (f"{time / stats.steps / 1e6:.3f}" for time in (whole, exposed))
        rows.append((gpu, *cells, _percent(whole - exposed, whole)))
    return _table(("GPU", "collectives, ms", "exposed, ms", "hidden"), rows) if rows else ""


def short_name(kernel: str, limit: int = 90) -> str:
    """A kernel's name without its parameters, return type and most of its template arguments."""
    name = re.sub(r"\(\w+\)", "", kernel)  # casts of template arguments
    name = (
        re.sub(r"^void ", "", re.sub(r"\([^()]*\)$", "", name)).replace("<unnamed>::", "").replace("at::native::", "")
    )
    return (name if len(name) <= limit else name[: limit - 3] + "...").replace("|", "\\|")


def kernel_table(stats: Stats, top: int) -> str:
    whole = total(stats.kernels)
    rows = []
    for kernel in sorted(stats.kernels, key=lambda kernel: -kernel.time)[:top]:
        rows.append(
            (
                f"`{short_name(kernel.name)}`",
                kernel.kind,
                f"{kernel.time / stats.steps / 1e6:.3f}",
                _percent(kernel.time, whole),
                f"{kernel.instances / stats.steps:g}",
                f"{kernel.time / kernel.instances / 1e3:.1f}",
            )
        )
    return _table(("kernel", "kind", "ms", "of the step", "times", "mean, us"), rows)


def markdown(stats: Stats, title: str, command: str, top: int = 15) -> str:
    """The whole report."""
    steps = f"{stats.steps} measured steps" if stats.steps > 1 else "1 measured step"
    phases = ["## Phases", phase_table(stats)]
    if "backward" in stats.spans and not stats.time("backward") and "backward" in phase_times(stats):
        phases.append(
            "Backward's kernels were launched by another thread than its range's: it is what no other phase has."
        )
    parts = [
        f"# {title}",
        f"`{command}`" if command else "",
        f"GPU time by Nsight Systems, per step, over {steps}. Kernel times are sums over kernels.",
        *phases,
        "## Matrix products, softmax and the rest",
        kind_table(stats),
        "Kinds go by the kernels' names; a fused attention kernel contains its matrix products and its softmax, and "
        "the softmax of the loss counts as softmax.",
    ]
    tables = {
        "Blocks": block_table(stats),
        "Other ranges": other_table(stats),
        "Collectives": collective_table(stats),
    }
    for heading, table in tables.items():
        if table:
            parts += [f"## {heading}", table]
    parts += ["## Longest kernels", kernel_table(stats, top)]
    return "\n\n".join(part for part in parts if part) + "\n"
