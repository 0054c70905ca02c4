"""Many random calls of attention, on a GPU or the CPU, each reproduced by its number alone (tests/fuzz/).

    python tests/fuzz_gpu.py --seed 1 --first 0 --cases 20000 --processes 16
    python tests/fuzz_gpu.py --seed 1 --first 4711 --cases 1          # case 4711 of it again
    python tests/fuzz_gpu.py --kind packed --cases 5000               # attention_varlen; cache: attention_with_cache

Prints progress, what fails as it comes, refusals by reason, the lines that reproduce what failed, and "N passed, M
failed".
A case draws its backend: mostly whichever serves the call, else one by name. One that was asked by name may refuse what
tests/conftest.py grants it; the case is then judged on whichever serves it, so that every case is judged. A lost
device, a crash and a hang are failures of the case that was running; another process goes on after it.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import multiprocessing
import queue
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from conftest import is_granted_refusal
from fuzz.cases import draw
from fuzz.judge import Verdict, judge
from fuzz.sequences import describe_cache, describe_packed, run_cache, run_packed

import flash_ext

# Of how many cases which backend is asked by name; the rest leave the choice to the package.
SHARES: dict[str, dict[str | None, float]] = {
    "cuda": {"sm80": 0.35, "sm90": 0.2, "chunked": 0.05},
    "cpu": {"chunked": 0.25},
}
HANGS_AFTER = 180.0  # seconds, the start of a process included
SHOWS_AFTER = 60.0  # seconds of one case, after which its process prints where it is


def backend_of(pick: float, device: str) -> str | None:
    built = flash_ext.build_info()["cuda"]["backends"] if device == "cuda" else []
    for name, share in SHARES[device].items():
        if pick < share:
            return name if name == "chunked" or name in built else None
        pick -= share
    return None


# kind: (what is wrong with a case on a backend, or a refusal; what a case is)
KINDS: dict[str, tuple[Callable[[int, int, str, str | None], Verdict], Callable[[int, int], str]]] = {
    "dense": (
        lambda seed, number, *where: judge(draw(seed, number), *where),
        lambda seed, number: draw(seed, number).describe(),
    ),
    "packed": (run_packed, describe_packed),
    "cache": (run_cache, describe_cache),
}


def run_case(seed: int, number: int, device: str, asked: str, kind: str = "dense") -> tuple[str, str]:
    """("passed" | "failed", what is wrong), and before it, joined by a line break, what was refused."""
    judged, describe = KINDS[kind]
    pick = draw(seed, number).pick
    backend = backend_of(pick, device) if asked == "mixed" else None if asked == "auto" else asked
    verdict = judged(seed, number, device, backend)
    refusal = ""
    if verdict.refusal is not None:
        if not is_granted_refusal(backend, RuntimeError(verdict.refusal)):
            return "failed", f"refused: {verdict.refusal} [{backend}] {describe(seed, number)}"
        refusal, backend = verdict.refusal, None
        verdict = judged(seed, number, device, None)
        if verdict.refusal is not None:
            return "failed", f"refused: {verdict.refusal} {describe(seed, number)}"
    if verdict.wrong:
        return "failed", f"{'; '.join(verdict.wrong)} [{backend or 'auto'}] {describe(seed, number)}"
    return "passed", refusal


def work(numbers: range, options: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    for number in numbers:
        faulthandler.dump_traceback_later(SHOWS_AFTER)
        try:
            outcome = run_case(options.seed, number, options.device, options.backend, options.kind)
        except Exception as error:
            outcome = (
                "failed",
                "".join(traceback.format_exception(error, limit=-3)) + KINDS[options.kind][1](options.seed, number),
            )
            results.put((number, *outcome))
            if "CUDA error" in str(error):
                results.close()
                results.join_thread()  # or what was put would be lost with the process
                sys.exit(3)
            continue
        results.put((number, *outcome))


class Worker:
    """A process, and the numbers that it has yet to do."""

    def __init__(self, numbers: range, options: argparse.Namespace) -> None:
        self.options, self.numbers = options, numbers
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.results = context.Queue()
        self.process = context.Process(target=work, args=(self.numbers, self.options, self.results), daemon=True)
        self.process.start()
        self.last = time.monotonic()

    def poll(self) -> list[tuple[int, str, str]]:
        """What came since; a dead or hanging process is a failure of its first unanswered case, and is replaced."""
        found = []
        alive = self.process.is_alive()
        while True:
            try:
                found.append(self.results.get_nowait() if alive else self.results.get(timeout=0.2))
            except queue.Empty:
                break
        if found:
            self.last = time.monotonic()
            self.numbers = self.numbers[len(found) :]
        if not self.numbers:
            return found
        hangs = time.monotonic() - self.last > HANGS_AFTER
        if hangs or not alive:
            self.process.kill()
            self.process.join()
            if self.process.exitcode != 3:  # which has told why
                text = "hangs" if hangs else f"the process ended with {self.process.exitcode}"
                case = KINDS[self.options.kind][1](self.options.seed, self.numbers[0])
                found.append((self.numbers[0], "failed", f"{text} {case}"))
                self.numbers = self.numbers[1:]
            if self.numbers:
                self.start()
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=tuple(KINDS), default="dense", help="of calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="mixed", help="mixed (a case draws it), auto, or a backend's name")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time")
    options = parser.parse_args()
    last = options.first + options.cases
    parts = [range(options.first + i, last, options.processes) for i in range(options.processes)]
    workers = [Worker(numbers, options) for numbers in parts if numbers]
    counts: collections.Counter[str] = collections.Counter()
    refusals: collections.Counter[str] = collections.Counter()
    failures: list[tuple[int, str]] = []
    start = shown = time.monotonic()
    while any(worker.numbers for worker in workers) and time.monotonic() - start < options.seconds:
        time.sleep(0.05)
        for worker in workers:
            for number, outcome, text in worker.poll() if worker.numbers else []:
                counts[outcome] += 1
                if outcome == "failed":
                    failures.append((number, text))
                    print(f"failed {number}: {text}", flush=True)
                elif text:
                    refusals[text.split(";")[0]] += 1
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{shown - start:5.0f} s  {counts.total()} of {options.cases}, {counts['failed']} failed", flush=True)
    for worker in workers:
        worker.process.kill() if worker.numbers else worker.process.join()
    for reason, count in refusals.most_common():
        print(f"refused {count:6d}  {reason}")
    for number, _ in sorted(failures):
        command = (
            f"python tests/fuzz_gpu.py --kind {options.kind} --device {options.device} --backend {options.backend}"
        )
        print(f"again: {command} --seed {options.seed} --first {number} --cases 1")
    print(f"{sum(refusals.values())} refused by the backend asked for, then served by another")
    took = time.monotonic() - start
    print(f"seed {options.seed}, cases {options.first} to {last - 1}, {took:.0f} s on {options.device}")
    print(f"{counts['passed']} passed, {counts['failed']} failed")
    return 1 if failures or counts.total() < options.cases else 0


if __name__ == "__main__":
    sys.exit(main())
