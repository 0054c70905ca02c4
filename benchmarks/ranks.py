"""The ranks of a benchmark on torch.distributed: begun by torchrun or by the benchmark itself. NCCL on GPUs, else gloo.

Called by communication.py, context_parallel.py and parallel.py.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import BenchmarkError, synchronize
from torch import Tensor


def under_torchrun() -> bool:
    """True where torchrun, or a launcher that sets what it sets, began this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def rank_here() -> int:
    """This process's rank under torchrun; 0 without."""
    return int(os.environ["RANK"]) if under_torchrun() else 0


@contextmanager
def joined(device: str, rank: int | None = None, ranks: int | None = None, store: Path | None = None) -> Iterator[None]:
    """Within it the process is one of the ranks: of `ranks` that meet at the file `store`, of torchrun's, or alone."""
    local = int(os.environ.get("LOCAL_RANK", rank or 0))
    if device == "cuda":
        if local >= torch.cuda.device_count():
            raise BenchmarkError(f"rank {local} has no GPU: PyTorch sees {torch.cuda.device_count()} here.")
        torch.cuda.set_device(local)
    backend = "nccl" if device == "cuda" else "gloo"
    if store is not None:
        dist.init_process_group(backend, store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
    elif under_torchrun():
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()))
    try:
        yield
    finally:
        dist.destroy_process_group()


def _rank(rank: int, ranks: int, device: str, folder: Path, work: Callable[..., Any], arguments: tuple) -> None:
    with joined(device, rank, ranks, folder / "store"):
        result = work(*arguments)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))


def spawn(work: Callable[..., Any], ranks: int, device: str, *arguments: Any) -> Any:
    """Runs `work(*arguments)` on so many new ranks of this machine; what rank 0 returned, by way of JSON."""
    if device == "cuda" and ranks > torch.cuda.device_count():
        raise BenchmarkError(f"{ranks} ranks need {ranks} GPUs, but PyTorch sees {torch.cuda.device_count()} here.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.multiprocessing.spawn(_rank, (ranks, device, folder, work, arguments), nprocs=ranks)
        return json.loads((folder / "result.json").read_text())


def ranks_to_start(asked: list[int] | None) -> list[int]:
    """How many ranks a benchmark starts, one run each: two where nobody asks. Under torchrun nobody may."""
    if under_torchrun() and asked:
        raise BenchmarkError("--ranks is for ranks that are started here, but torchrun started this one.")
    return asked or [2]


def same_on_all_ranks(arguments: dict[str, Any]) -> None:
    """A BenchmarkError on every rank where one was given other arguments, as on another host it may be."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, {name: str(value) for name, value in arguments.items()})
    for rank, other in enumerate(every):
        for name, value in every[0].items():
            if other[name] != value:
                option = f"--{name.replace('_', '-')}"
                raise BenchmarkError(f"{option} is {value} on rank 0 and {other[name]} on rank {rank}.")


def rows_of_ranks(work: Callable[[Any], list[dict[str, Any]]], args: Any) -> list[dict[str, Any]]:
    """What `work(args)` gives on torchrun's ranks, else on those that are started here, `args.ranks` one by one."""
    if under_torchrun():
        with joined(args.device):
            same_on_all_ranks({name: value for name, value in vars(args).items() if name != "out"})
            return work(args)
    return [row for ranks in args.ranks for row in spawn(work, ranks, args.device, args)]


def record_with_nsys(stack: ExitStack, device: str) -> None:
    """On a GPU nsys --capture-range=cudaProfilerApi records from here until the stack closes, the same on all ranks."""
    if device == "cuda":
        barrier(device)
        torch.cuda.profiler.start()
        stack.callback(torch.cuda.profiler.stop)
        stack.callback(barrier, device)


def slowest(values: list[float], device: str) -> list[float]:
    """Each value's largest over ranks, on every rank."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def barrier(device: str) -> None:
    """Every rank has come here, and its device has nothing left to do."""
    synchronize(device)
    token: Tensor = torch.zeros((), device=device)
    dist.all_reduce(token)
    synchronize(device)
