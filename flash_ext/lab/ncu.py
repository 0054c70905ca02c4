"""What the lab counts from addresses, as NVIDIA Nsight Compute measures it on a GPU.

``ncu`` profiles a process that launches each variant of a lesson once, and leaves a CSV of its raw page: a row of
names, one of units, then one for each launch. Global memory is counted in the stage that looks for sectors, shared
memory in wavefronts, which are the passes over its banks. Copies by cp.async (ldgsts) are among the loads of global
memory there. Of shared memory they are requests of their own, whose wavefronts also move what comes: no passes then.
"""

from __future__ import annotations

import csv
import glob
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from flash_ext.lab.lessons import LabError, Lesson

PLACES = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute*/ncu", "/opt/nvidia/nsight-compute/*/ncu")
LIMIT = 600  # seconds
GLOBAL, WAVEFRONTS = "l1tex__t_{}_pipe_lsu_mem_global_op_{}", "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{}"
EXECUTED = "smsp__inst_executed_op_{}_pred_on_any"  # by a warp of which some thread is active
KINDS = {
    ("global", False): ("ld",),
    ("global", True): ("st", "atom", "red"),
    ("shared", False): ("ld",),
    ("shared", True): ("st",),
}
COPIES = EXECUTED.format("ldgsts")


@dataclass(frozen=True)
class Measured:
    """Of one launch: sums by space and whether it is a store; ``costs`` are sectors, or passes if they are known."""

    requests: dict[tuple[str, bool], int]
    costs: dict[tuple[str, bool], int]


def find_ncu() -> str | None:
    """The program, on PATH or where NVIDIA's packages leave it: there the newest."""
    found = (path for place in PLACES for path in sorted(glob.glob(place), reverse=True))
    return shutil.which("ncu") or next(found, None)


def needed() -> str:
    """The program, or a LabError that says what is missing."""
    if not torch.cuda.is_available():
        raise LabError("--ncu: Nsight Compute measures on a GPU, and there is none here; leave --ncu out.")
    if found := find_ncu():
        return found
    raise LabError(
        "--ncu: ncu is neither on PATH nor in the usual places; install NVIDIA Nsight Compute, or leave --ncu out."
    )


def request_metric(space: str, kind: str) -> str:
    if space == "global":
        return GLOBAL.format("requests", kind)
    return EXECUTED.format(f"shared_{kind}")


def cost_metric(space: str, kind: str) -> str:
    return GLOBAL.format("sectors", kind) if space == "global" else WAVEFRONTS.format(kind)


def pattern() -> str:
    """All metrics as one regular expression: of those that a card does not have, ncu says nothing."""
    names = [
        of(space, kind) for (space, _), kinds in KINDS.items() for kind in kinds for of in (request_metric, cost_metric)
    ]
    return rf"regex:^({'|'.join([*names, COPIES])})\.sum$"


def command(ncu: str, lesson: Lesson, size: Sequence[int], log: Path) -> list[str]:
    """Profiles the lesson's kernels in a process of ``flash_ext.lab.launch``, and nothing else of it."""
    kernels = dict.fromkeys(lesson.source(variant).kernel.name for variant in lesson.variants)
    return [
        *(ncu, "--target-processes", "all", "--clock-control", "none", "--kernel-name-base", "function"),
        *("--kernel-name", f"regex:^({'|'.join(kernels)})$", "--metrics", pattern()),
        *("--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)),
        *(sys.executable, "-m", "flash_ext.lab.launch", lesson.name, *map(str, size)),
    ]


def rows(text: str) -> list[dict[str, str]]:
    """The launches of a raw page, by the names of its columns."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    return list(csv.DictReader(lines))[1:]  # behind the units


def number(row: dict[str, str], metric: str) -> int:
    """Of a metric; a LabError where the card has none."""
    word = row.get(f"{metric}.sum", "").replace(",", "")
    if not re.fullmatch(r"\d+(\.0*)?", word):
        raise LabError(f"--ncu: this ncu and this card have no {metric}.sum; leave --ncu out.")
    return int(float(word))


def measured(row: dict[str, str]) -> Measured:
    requests = {key: sum(number(row, request_metric(key[0], kind)) for kind in kinds) for key, kinds in KINDS.items()}
    costs = {key: sum(number(row, cost_metric(key[0], kind)) for kind in kinds) for key, kinds in KINDS.items()}
    if copies := number(row, COPIES):
        requests["shared", True] += copies
        del costs["shared", True]
    return Measured(requests, costs)


def refusal(text: str, status: int) -> str:
    """Why there are no counters, from what ncu says."""
    if "ERR_NVGPUCTRPERM" in text:
        return (
            "--ncu: the driver shows the card's counters to root alone; run this as root, in a container also with "
            "--cap-add SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0."
        )
    said = [line.removeprefix("==ERROR== ") for line in text.splitlines() if line.startswith("==ERROR==")]
    return f"--ncu: ncu ended with status {status}: {' '.join(said) or text.strip() or 'it says nothing'}"


def measure(lesson: Lesson, size: Sequence[int]) -> list[Measured]:
    """One for each variant, of the present GPU."""
    ncu = needed()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        try:
            done = subprocess.run(command(ncu, lesson, size, log), capture_output=True, text=True, timeout=LIMIT)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LabError(f"--ncu: {error}") from None
        told = log.read_text() if log.exists() else ""
    found = rows(told)
    if done.returncode or len(found) != len(lesson.variants):
        raise LabError(refusal("\n".join((told, done.stdout, done.stderr)), done.returncode))
    return [measured(row) for row in found]
