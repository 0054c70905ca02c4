"""``python -m flash_ext.profiling memory SNAPSHOT [--html OUT]``: a PyTorch memory snapshot, as text and as a page.

Reads the pickle of ``torch.cuda.memory._dump_snapshot`` (``memory_snapshot`` writes one). Its trace is replayed: an
allocation lives from `alloc` to `free_completed`; what is freed or still alive at the end without having been seen was
there before. Bytes are told by the line that asked for them and by phase.
"""

from __future__ import annotations

import pickle
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flash_ext.profiling.saved import size_text

BEFORE = "before recording"
PHASES = ("forward", "loss", "backward", "optimizer")
_FRAMES_OF_PHASES = (  # where no annotation tells: the innermost frame that matches
    (
        re.compile(r"^(torch::autograd::(Engine|Node|generated)|.*Backward\d*::apply|backward$|run_backward)"),
        "backward",
    ),
    (re.compile(r"^(cross_entropy|nll_loss|mse_loss)$"), "loss"),
    (re.compile(r"^(forward|_call_impl)$"), "forward"),
)
_NODE = re.compile(r"(\w+Backward\d*)::apply")
_WRAPPERS = re.compile(r"measured steps|warm-up|step \d+")


class SnapshotError(Exception):
    """One sentence for the terminal."""


class _PlainUnpickler(pickle.Unpickler):
    """A snapshot is made of dicts, lists, strings and numbers; a file that asks for more is not one."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def load(path: Path) -> dict[str, Any]:
    """The snapshot in the file; runs nothing that the file asks for.

    Raises:
        SnapshotError: it cannot be read or is no snapshot.
    """
    try:
        with path.open("rb") as file:
            snapshot = _PlainUnpickler(file).load()
    except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise SnapshotError(f"{path} cannot be read as a memory snapshot: {error}") from None
    if not isinstance(snapshot, dict) or "device_traces" not in snapshot:
        raise SnapshotError(f"{path} is no memory snapshot: it must be a dict with device_traces")
    return snapshot


@dataclass
class Allocation:
    """One block of memory. `begin` and `end` count events; -1 and None: before the first, not freed."""

    size: int
    begin: int
    end: int | None
    time_us: int
    frames: list[dict[str, Any]]
    line: str = BEFORE
    phase: str = BEFORE


@dataclass
class History:
    """What one device's trace says: `totals[i]` bytes are alive after event i."""

    device: int
    allocations: list[Allocation]
    totals: list[int]
    times: list[int]  # us since the first event
    out_of_memory: list[tuple[int, int]]  # event, bytes asked for
    base: int  # alive before the first event
    reserved: int  # by the allocator, at the end

    @property
    def peak_event(self) -> int:
        return max(range(len(self.totals)), key=self.totals.__getitem__) if self.totals else -1

    @property
    def peak(self) -> int:
        return max([self.base, *self.totals])

    def alive(self, event: int) -> list[Allocation]:
        return [a for a in self.allocations if a.begin <= event and (a.end is None or a.end > event)]


# ---- names ----------------------------------------------------------------------------------------------------------


def is_python(frame: dict[str, Any]) -> bool:
    return str(frame.get("filename", "")).endswith(".py")


def frame_text(frame: dict[str, Any]) -> str:
    """`model.py:57 forward`; of C++ the function alone."""
    file, name = str(frame.get("filename", "")), str(frame.get("name", "?"))
    if not is_python(frame):
        return name if len(name) <= 160 else name[:157] + "..."
    return f"{'/'.join(Path(file).parts[-2:])}:{frame.get('line', 0)} {name}"


def line_of(frames: list[dict[str, Any]]) -> str:
    """Who asked: the innermost Python line outside torch, and the autograd node between it and the allocator."""
    node = ""
    inside = ""
    for frame in frames:
        file, name = str(frame.get("filename", "")), str(frame.get("name", ""))
        if not is_python(frame):
            found = _NODE.search(name)
            node = node or (found.group(1) if found else "")
        elif "/torch/" in file:
            inside = inside or frame_text(frame)
        else:
            return f"{node} in {frame_text(frame)}" if node else frame_text(frame)
    return node or inside or (frame_text(frames[-1]) if frames else "(no stack)")


def phase_of_frames(frames: list[dict[str, Any]]) -> str:
    for frame in frames:
        file, name = str(frame.get("filename", "")), str(frame.get("name", ""))
        if name == "step" and "optim" in file:
            return "optimizer"
        for words, phase in _FRAMES_OF_PHASES:
            if words.search(name):
                return phase
    return "other"


class Annotations:
    """The ranges of ``record_function`` (so of ``flash_ext.profiling.range``), as the phase at a time."""

    def __init__(self, events: Iterable[dict[str, Any]]) -> None:
        self.times: list[int] = []
        self.phases: list[str] = []
        open_ranges: list[str] = []
        for event in sorted(events, key=lambda event: event["time_us"]):
            name = str(event.get("name", ""))
            if str(event.get("stage", "")).upper() == "START":
                open_ranges.append(name)
            elif name in open_ranges:
                del open_ranges[len(open_ranges) - 1 - open_ranges[::-1].index(name)]
            named = [name for name in open_ranges if not _WRAPPERS.fullmatch(name)]
            known = [name for name in named if name in PHASES]
            self.times.append(int(event["time_us"]))
            self.phases.append((known or named or [""])[0])

    def phase(self, time_us: int) -> str:
        index = bisect_right(self.times, time_us) - 1
        return self.phases[index] if index >= 0 else ""


# ---- replay ---------------------------------------------------------------------------------------------------------


def replay(snapshot: dict[str, Any], device: int) -> History:
    """One device's history."""
    trace = snapshot["device_traces"][device]
    annotations = Annotations(snapshot.get("external_annotations") or [])
    start = int(trace[0].get("time_us", 0)) if trace else 0
    alive: dict[int, Allocation] = {}
    allocations: list[Allocation] = []
    changes, times, out_of_memory = [], [], []
    names: dict[int, tuple[str, str]] = {}  # of a list of frames; the pickle shares equal ones
    base = 0
    for entry in trace:
        action, size = entry["action"], int(entry.get("size", 0))
        time = int(entry.get("time_us", start))
        if action == "alloc":
            frames = entry.get("frames") or []
            if id(frames) not in names:
                names[id(frames)] = line_of(frames), phase_of_frames(frames)
            line, phase = names[id(frames)]
            allocation = Allocation(size, len(changes), None, time - start, frames, line)
            allocation.phase = annotations.phase(time) or phase
            alive[int(entry["addr"])] = allocation
            allocations.append(allocation)
            changes.append(size)
        elif action in ("free_completed", "free"):
            allocation = alive.pop(int(entry["addr"]), None)
            if allocation is None:
                allocation = Allocation(size, -1, None, 0, [])
                allocations.append(allocation)
                base += size
            allocation.end = len(changes)
            changes.append(-allocation.size)
        elif action == "oom":
            out_of_memory.append((max(len(changes) - 1, 0), size))
            continue
        else:
            continue
        times.append(time - start)
    segments = [s for s in snapshot.get("segments", []) if int(s.get("device", 0)) == device]
    for segment in segments:
        address = int(segment["address"])
        for block in segment["blocks"]:
            at = int(block.get("address", address))
            if block["state"].startswith("active") and at not in alive:
                frames = block.get("frames") or []
                line = line_of(frames) if frames else BEFORE
                allocations.append(Allocation(int(block["size"]), -1, None, 0, frames, line))
                base += int(block["size"])
            address += int(block["size"])
    totals, total = [], base
    for change in changes:
        total += change
        totals.append(total)
    reserved = sum(int(segment["total_size"]) for segment in segments)
    return History(device, allocations, totals, times, out_of_memory, base, reserved)


def busiest_device(snapshot: dict[str, Any]) -> int:
    lengths = [len(trace) for trace in snapshot["device_traces"]]
    return lengths.index(max(lengths)) if lengths else 0


@dataclass(frozen=True)
class Summary:
    """The numbers of the terminal and of the page."""

    by_line: list[tuple[str, int, int]]  # line, bytes at the peak, blocks
    by_phase: list[tuple[str, int, int]]  # phase, bytes at the peak, bytes allocated in it over all
    largest: list[Allocation]


def summarise(history: History, top: int) -> Summary:
    at_peak = history.alive(history.peak_event)
    lines, blocks, phases, allocated = Counter(), Counter(), Counter(), Counter()
    for allocation in at_peak:
        lines[allocation.line] += allocation.size
        blocks[allocation.line] += 1
        phases[allocation.phase] += allocation.size
    for allocation in history.allocations:
        allocated[allocation.phase] += allocation.size
    known = {name: index for index, name in enumerate((BEFORE, *PHASES))}
    order = sorted(allocated, key=lambda name: (known.get(name, len(known)), -allocated[name]))
    return Summary(
        [(line, size, blocks[line]) for line, size in lines.most_common(top)],
        [(phase, phases[phase], allocated[phase]) for phase in order],
        sorted(history.allocations, key=lambda a: -a.size)[:top],
    )


def text(history: History, top: int = 20) -> str:
    """For the terminal."""
    summary = summarise(history, top)
    peak = history.peak
    when = f"after event {history.peak_event:,} of {len(history.totals):,}" if history.totals else "no events"
    result = [
        f"device {history.device}: peak {size_text(peak)} ({peak:,} bytes) {when}, "
        f"{size_text(history.base)} there before, {size_text(history.reserved)} reserved at the end",
        "",
        "bytes at the peak by phase (and allocated in it over all):",
    ]
    result += [f"  {size_text(live):>10}  {size_text(all_):>10}  {phase}" for phase, live, all_ in summary.by_phase]
    result += ["", "bytes at the peak by line (and how many blocks):"]
    result += [f"  {size_text(size):>10}  {count:>6}  {line}" for line, size, count in summary.by_line]
    result += ["", "largest allocations (size, how many of them, phase, line):"]
    alike = Counter((a.size, a.phase, a.line) for a in history.allocations)
    for key in sorted(alike, key=lambda key: -key[0])[:top]:
        result.append(f"  {size_text(key[0]):>10}  {alike[key]:>6}  {key[1]}, {key[2]}")
    result += [
        f"out of memory at event {event:,}: {size_text(size)} asked for" for event, size in history.out_of_memory
    ]
    return "\n".join(result)


# ---- command --------------------------------------------------------------------------------------------------------


def main(snapshot: Path, /, html: Path | None = None, device: int | None = None, top: int = 20) -> None:
    """Shows a memory snapshot: prints the numbers and writes the page.

    Args:
        snapshot: pickle of memory_snapshot or of torch.cuda.memory._dump_snapshot
        html: write the interactive page there: one file, works offline
        device: which GPU (None: the one with the most events)
        top: how many lines and allocations to list

    Raises:
        SnapshotError: one sentence.
    """
    from flash_ext.profiling.memory_page import page  # which imports this module

    content = load(snapshot)
    count = len(content["device_traces"])
    device = busiest_device(content) if device is None else device
    if not 0 <= device < count:
        raise SnapshotError(f"--device is {device}; the snapshot has devices 0 to {count - 1}")
    history = replay(content, device)
    print(text(history, top))
    if html:
        html.write_text(page(history, snapshot.name))
        print(f"\nwritten: {html}")
