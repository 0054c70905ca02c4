"""The page of ``python -m flash_ext.profiling memory --html``: one HTML file with its data inside, no network.

A snapshot may have a million events, so the page gets layers instead: for each way to group allocations (line, phase,
single blocks) the largest groups and the rest, at BUCKETS points in time at most. Of the events in a bucket the one
with the most bytes is shown, so that the peak is on the page exactly. Layout and script are memory_page.html.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Hashable
from importlib import resources
from itertools import pairwise
from typing import Any

from flash_ext.profiling.memory import BEFORE, PHASES, Allocation, History, frame_text, is_python, summarise

BUCKETS, LAYERS, BLOCKS, STACK, ROWS = 1000, 24, 120, 64, 200
REST = "everything else"


def moments(history: History) -> list[int]:
    """The event shown for each bucket: the one with the most bytes."""
    count = len(history.totals)
    buckets = min(BUCKETS, count)
    edges = [count * i // buckets for i in range(buckets + 1)] if buckets else []
    return [max(range(a, b), key=history.totals.__getitem__) for a, b in pairwise(edges)]


def layers(
    history: History,
    events: list[int],
    key: Callable[[Allocation], Hashable],
    title: Callable[[Allocation], str],
    limit: int,
) -> list[dict[str, Any]]:
    """Allocations grouped by `key`: name, stack and bytes at each of the events.

    Chosen are those with the most bytes at the peak, then those with the most at any time.
    """
    groups: dict[Hashable, list[Allocation]] = {}
    for allocation in history.allocations:
        groups.setdefault(key(allocation), []).append(allocation)
    at_peak: Counter[Hashable] = Counter()
    for allocation in history.alive(history.peak_event):
        at_peak[key(allocation)] += allocation.size
    most = {group: _most_alive(members) for group, members in groups.items()}
    chosen = sorted(groups, key=lambda group: (at_peak[group], most[group]), reverse=True)[:limit]
    chosen.sort(key=lambda group: groups[group][0].line != BEFORE)  # what is always there lies at the bottom
    index = {group: i for i, group in enumerate(chosen)}
    changes = [Counter() for _ in events]  # at which of the events a layer gains or loses bytes
    ending = [Counter() for _ in events]
    place = _places(events, len(history.totals))
    for group, members in groups.items():
        layer = index.get(group, len(chosen))
        for allocation in members:
            first = place[max(allocation.begin, 0)] if events else 0
            last = place[allocation.end] if allocation.end is not None and events else len(events)
            if first < last:
                changes[first][layer] += allocation.size
                if last < len(events):
                    ending[last][layer] += allocation.size
    count = len(chosen) + (len(groups) > len(chosen))
    series = [[] for _ in range(count)]
    current = [0] * count
    for gained, lost in zip(changes, ending, strict=True):
        for layer, size in gained.items():
            current[layer] += size
        for layer, size in lost.items():
            current[layer] -= size
        for layer in range(count):
            series[layer].append(current[layer])
    result = []
    for layer in range(count):
        rest = layer == len(chosen)
        members = [] if rest else groups[chosen[layer]]
        first = max(members, key=lambda allocation: allocation.size, default=None)
        result.append(
            {
                "name": title(first) if first else REST,
                "stack": stack_of(first) if first else [],
                "bytes": series[layer],
            }
        )
    return result


def _most_alive(members: list[Allocation]) -> int:
    """The most bytes that are alive at a time."""
    changes = sorted(
        [(allocation.begin, allocation.size) for allocation in members]
        + [(allocation.end, -allocation.size) for allocation in members if allocation.end is not None]
    )
    most = current = 0
    for _, change in changes:
        current += change
        most = max(most, current)
    return most


def _places(events: list[int], count: int) -> list[int]:
    """For each event, the first of the shown ones that is not before it."""
    places, shown = [], 0
    for event in range(count + 1):
        while shown < len(events) and events[shown] < event:
            shown += 1
        places.append(shown)
    return places


def stack_of(allocation: Allocation) -> list[str]:
    """Innermost first, without the interpreter's own C functions."""
    frames = [frame for frame in allocation.frames if is_python(frame) or "::" in str(frame.get("name", ""))]
    return [frame_text(frame) for frame in frames[:STACK]]


def data(history: History, source: str) -> dict[str, Any]:
    """What the script reads."""
    events = moments(history)
    numbers = {id(allocation): i for i, allocation in enumerate(history.allocations)}
    summary = summarise(history, ROWS)
    phase_order = {phase: i for i, phase in enumerate(PHASES)}
    by_phase = layers(history, events, lambda a: a.phase, lambda a: a.phase, LAYERS)
    by_phase.sort(key=lambda layer: phase_order.get(layer["name"], -1))
    return {
        "source": source,
        "device": history.device,
        "peak": history.peak,
        "peakEvent": history.peak_event,
        "base": history.base,
        "reserved": history.reserved,
        "count": len(history.totals),
        "events": events,
        "times": [history.times[event] for event in events],
        "totals": [history.totals[event] for event in events],
        "modes": {
            "line": layers(history, events, lambda a: a.line, lambda a: a.line, LAYERS),
            "phase": by_phase,
            "block": layers(history, events, lambda a: numbers[id(a)], lambda a: a.line, BLOCKS),
        },
        "outOfMemory": history.out_of_memory,
        "byLine": summary.by_line,
        "byPhase": summary.by_phase,
        "largest": [
            {"size": a.size, "line": a.line, "phase": a.phase, "begin": a.begin, "end": a.end, "stack": stack_of(a)}
            for a in summary.largest
        ],
    }


def page(history: History, source: str) -> str:
    """The HTML."""
    template = (resources.files("flash_ext.profiling") / "memory_page.html").read_text()
    text = json.dumps(data(history, source), separators=(",", ":")).replace("<", "\\u003c")
    return template.replace("@DATA@", text)
