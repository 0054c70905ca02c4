"""Runs cases on N ranks of gloo in one go. A case is a function of a World.

A file of cases is a program, `python cases.py SIZE STORE [CASE ...]`, which imports torch once and forks a process a
rank (``main``); each rank prints a line a case. Tests start it with ``run``.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RIGHT = "right"


@dataclass
class World:
    """What a case is given: this rank, how many there are, and their group."""

    rank: int
    size: int
    group: Any
    device: str = "cpu"

    def everyone(self, value: Any) -> list[Any]:
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


def run(
    file: str, size: int, folder: Path, device: str = "cpu", only: Sequence[str] = ()
) -> dict[str, list[str]]:  # fmt: skip
    """What the ranks said about each case, or about those in ``only``.

    device: "cuda" gives each rank a GPU, and NCCL beside gloo.
    """
    # NOTE: a process that has asked CUDA's runtime for its devices may not fork; NVML may be asked.
    on_device = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    process = subprocess.run(
        [sys.executable, "-W", "ignore", file, str(size), str(folder / f"store{size}"), *only],
        capture_output=True, text=True, timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "RANKS_DEVICE": device} | on_device,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-4000:]
    said: dict[str, list[str]] = {}
    for name, _, text in (line.partition(": ") for line in process.stdout.splitlines()):
        said.setdefault(name, []).append(text)
    return said


def start(rank: int, size: int, store: str, seconds: float = 20) -> World:
    torch.set_num_threads(1)
    device, backend = "cpu", "gloo"
    if os.environ.get("RANKS_DEVICE") == "cuda":
        device, backend = f"cuda:{rank}", "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=seconds)
    )
    return World(rank, size, dist.group.WORLD, device)


def fork(size: int, work: Callable[[int], None]) -> list[int]:
    """A process a rank; the exit status of each."""
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                work(rank)
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)  # NOTE: without the interpreter's own end, in which gloo's threads may still be there
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main(cases: Callable[[int], dict[str, Callable[[World], None]]]) -> None:
    size, store = int(sys.argv[1]), sys.argv[2]
    only = sys.argv[3:]

    def work(rank: int) -> None:
        world = start(rank, size, store)
        for name, case in cases(size).items():
            if only and name not in only:
                continue
            torch.manual_seed(0)
            try:
                case(world)
                text = RIGHT
            except Exception as error:
                text = f"{type(error).__name__} {' '.join(str(error).split())[:600]}"
            os.write(1, f"{name}: {text}\n".encode())
            dist.barrier()

    sys.exit(max(fork(size, work)))
