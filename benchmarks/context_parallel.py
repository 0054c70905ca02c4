#!/usr/bin/env python3
"""One sequence over several ranks, beside one rank: what each method of flash_ext.distributed makes of it.

    python benchmarks/context_parallel.py                      131,072 tokens on 2 GPUs (2,048 on CPUs), every method
    python benchmarks/context_parallel.py --ranks 2,4 --tokens 32768,131072 --heads 32 --kv-heads 8
    torchrun --nproc-per-node 8 benchmarks/context_parallel.py      on torchrun's ranks, also of several hosts

Each method runs forward and backward of attention of the whole sequence, which the ranks hold in zigzag; `one rank` is
flash_ext.attention of the whole on rank 0, while the others wait. A time is the slowest rank's and the least of
--repeats. `speed-up` is one rank's time over it. On GPUs `exposed` is the time in which a rank's GPU runs NCCL and
nothing else, in one profiled call, and `memory` the most that a call allocated beyond what was there, with its results.
`torch` is PyTorch's own context_parallel around F.scaled_dot_product_attention, on GPUs, where it takes the call.
Above the table stands what `auto` would take, and its estimates of forward and backward, beside which the times lie.
`yunchang` is that package's UlyssesAttention around the same, where the package is installed.
Ranks that share a CPU's cores also share their speed: there the table says that it runs, and little more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from figures import draw_context_parallel
from harness import (
    BenchmarkError,
    command_line,
    load_flash_ext,
    make_folder,
    pick_device,
    provenance,
    release_memory,
    run_main,
    stdout_console,
    synchronize,
    word,
)
from parallel import exposed_ms
from ranks import barrier, rank_here, ranks_to_start, rows_of_ranks, slowest
from tables import Table, csv_path, make_table, write_results
from torch import Tensor
from train_lm import list_of, whole
from tyro.conf import arg

METHODS = ("ulysses", "allgather", "ring", "torch", "yunchang")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOKENS = {"cpu": [2048], "cuda": [131072]}
WARMUP = 2
ONE = "one rank"


def methods_here() -> list[str]:
    """All but a package that is not installed."""
    return [method for method in METHODS if method != "yunchang" or find_spec("yunchang")]


@dataclass
class Args:
    """The command line."""

    # how many ranks to start, one table each; under torchrun they are its own
    ranks: Annotated[list[int] | None, list_of(partial(whole, least=2))] = None
    method: Annotated[list[str], list_of(METHODS)] = field(default_factory=methods_here)  # all that are here
    tokens: Annotated[list[int] | None, list_of(whole)] = None  # of the sequence (None: 131072, on CPUs 2048)
    batch: Annotated[int, word(whole, "N")] = 1
    heads: Annotated[int, word(whole, "N")] = 32
    kv_heads: Annotated[int, word(whole, "N")] = 8
    head_dim: Annotated[int, word(whole, "N")] = 128
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    causal: bool = True
    repeats: Annotated[int, word(whole, "N")] = 5
    device: Literal["auto", "cpu", "cuda"] = "auto"
    out: Annotated[Path, arg(metavar="DIR")] = Path(__file__).parent / "out"


def parse(argv: list[str] | None = None) -> Args:
    """Arguments with the device's defaults filled in."""
    args = command_line(Args, argv)
    args.device = pick_device(args.device)
    args.ranks = ranks_to_start(args.ranks)
    args.tokens = args.tokens or TOKENS[args.device]
    if args.heads % args.kv_heads:
        raise BenchmarkError(f"--kv-heads {args.kv_heads} does not divide --heads {args.heads}.")
    return args


def problem(args: Args, tokens: int) -> list[Tensor]:
    """query, key, value and the gradient of out, of the whole sequence, the same on every rank."""
    generator = torch.Generator(args.device).manual_seed(0)
    sizes = [(args.batch, heads, tokens, args.head_dim) for heads in (args.heads, args.kv_heads, args.kv_heads)]
    make = partial(torch.randn, generator=generator, device=args.device, dtype=DTYPES[args.dtype])
    return [make(size) for size in (*sizes, sizes[0])]


def both(attend: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: list[Tensor]) -> Callable[[], Any]:
    """Forward and backward."""
    *inputs, grad = [t.detach() for t in tensors]
    for t in inputs:
        t.requires_grad_()

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(*inputs), inputs, grad)

    return call


def pytorch_attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, softmax_scale: float, **_: Any
) -> Tensor:  # fmt: skip
    """PyTorch's attention as yunchang calls one, in its layout (batch, tokens, heads, head dim)."""
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=causal, scale=softmax_scale, enable_gqa=grouped
    )  # fmt: skip
    return out.transpose(1, 2)


def yunchang_ulysses(causal: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """yunchang's exchange of heads, around PyTorch's attention in place of the package's own call of PyTorch's kernels.

    That one has no backward, and sends keys around a ring of all ranks when the exchange has been made already. Grouped
    heads need not be repeated: the exchange takes any number of key heads that the ranks divide, and so does attention.
    """
    from yunchang import UlyssesAttention
    from yunchang.kernels import AttnType

    layer = UlyssesAttention(sequence_process_group=dist.group.WORLD, attn_type=AttnType.TORCH_FLASH)
    layer.attn_fn = pytorch_attention
    return partial(layer, causal=causal)


@contextmanager
def prepared(method: str, args: Args, tokens: int) -> Iterator[Callable[[], Any]]:
    """Forward and backward of this rank's share, or for ONE of the whole; within it the call is right."""
    flash_ext = load_flash_ext()
    tensors = problem(args, tokens)
    with ExitStack() as stack:
        if method == ONE:
            attend = partial(flash_ext.attention, causal=args.causal)
        elif method == "torch":
            from torch.distributed.tensor.experimental import context_parallel

            mesh = dist.init_device_mesh(args.device, (dist.get_world_size(),))
            # The tensors are cut in place, and stay so: putting them together again is no part of the call.
            cut = context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 4, no_restore_buffers=set(tensors))
            stack.enter_context(cut)
            grouped = args.heads != args.kv_heads
            attend = partial(F.scaled_dot_product_attention, is_causal=args.causal, enable_gqa=grouped)
        elif method == "yunchang":
            attend = yunchang_ulysses(args.causal)
            ranks, rank = dist.get_world_size(), dist.get_rank()
            if tokens % ranks:
                raise RuntimeError(f"takes tokens that {ranks} ranks divide")
            tensors = [t.transpose(1, 2).chunk(ranks, 1)[rank].contiguous() for t in tensors]
        else:
            from flash_ext.distributed import context_parallel_attention, shard_sequence

            group = dist.group.WORLD
            attend = partial(context_parallel_attention, group=group, method=method, causal=args.causal)
            tensors = [shard_sequence(t, group, 2) for t in tensors]
        yield both(attend, tensors)


def measured(method: str, args: Args, tokens: int) -> dict[str, Any]:
    """A row, on every rank: of ONE rank 0's numbers, else those of the slowest and largest."""
    on_gpu = args.device == "cuda"
    times, memory, exposed = [0.0] * args.repeats, 0.0, 0.0
    if method != ONE or dist.get_rank() == 0:
        with prepared(method, args, tokens) as call:
            for repeat in range(-WARMUP, args.repeats):
                if method != ONE:
                    barrier(args.device)
                begin = perf_counter()
                call()
                synchronize(args.device)
                times[max(repeat, 0)] = perf_counter() - begin
            if on_gpu:
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                results = call()
                memory = (torch.cuda.max_memory_allocated() - before) / 2**20
                del results
                exposed = exposed_ms(call) if method != ONE else 0.0
    seconds = min(slowest(times, args.device))
    most, exposed = slowest([memory, exposed], args.device)
    release_memory(args.device)
    row = {"method": method, "ranks": dist.get_world_size(), "tokens": tokens, "batch": args.batch}
    row |= {"heads": args.heads, "kv_heads": args.kv_heads, "head_dim": args.head_dim, "dtype": args.dtype}
    row |= {"causal": args.causal, "repeats": args.repeats, "ms": f"{seconds * 1e3:.3f}"}
    return row | {
        "exposed_ms": f"{exposed:.3f}" if on_gpu else "", "memory_mib": f"{most:.1f}" if on_gpu else "", "failure": ""
    }  # fmt: skip


def explain(args: Args, tokens: int) -> None:
    """Shows what "auto" takes on these ranks and why, with its estimates; a collective, whose first call measures."""
    load_flash_ext()
    from flash_ext.distributed import context_parallel_attention, explain_context_parallel

    small = torch.zeros(1, 1, 1, args.head_dim, dtype=DTYPES[args.dtype], device=args.device)
    context_parallel_attention(small, small, small, dist.group.WORLD)
    rows = tokens // dist.get_world_size()
    sizes = [(args.batch, heads, rows, args.head_dim) for heads in (args.heads, args.kv_heads)]
    q, k = (torch.empty(size, dtype=DTYPES[args.dtype], device="meta") for size in sizes)
    text = str(explain_context_parallel(q, k, k, dist.group.WORLD, causal=args.causal))
    if dist.get_rank() == 0:
        print(f"auto, {tokens:,} tokens: {text}", flush=True)


def measure(args: Args) -> list[dict[str, Any]]:
    """On every rank: a row for each method and length."""
    rows = []
    for tokens in args.tokens:
        alone = measured(ONE, args, tokens)
        rows.append(alone | {"speed_up": ""})
        for method in args.method:
            try:
                if method == "torch" and args.device == "cpu":
                    raise NotImplementedError("PyTorch's context_parallel has no attention of CPUs")
                row = measured(method, args, tokens)
                row["speed_up"] = f"{float(alone['ms']) / float(row['ms']):.4g}"
            except Exception as error:  # every rank raises it, or torch's time-out ends them
                row = dict.fromkeys(alone, "") | {name: alone[name] for name in ("ranks", "tokens")}
                row |= {"method": method, "speed_up": "", "failure": f"{type(error).__name__}: {error}".splitlines()[0]}
            rows.append(row)
        explain(args, tokens)
    return rows


def table_of(rows: list[dict[str, Any]], device: str) -> Table:
    """One line a method."""
    first = rows[0]
    title = f"Forward and backward of attention, {device}: batch {first['batch']}, heads {first['heads']}"
    title += f"/{first['kv_heads']}, head dim {first['head_dim']}, {first['dtype']}"
    title += ", causal" if first["causal"] else ""
    right = ("ms", "speed-up", "exposed ms", "memory MiB")
    table = make_table("ranks", "tokens", "method", right=right, title=title)
    for row in rows:
        cells = [row[name] or "-" for name in ("ms", "speed_up", "exposed_ms", "memory_mib")]
        if row["failure"]:
            cells[0] = row["failure"][:40]
        table.add_row(str(row["ranks"]), f"{int(row['tokens']):,}", row["method"], *cells)
    return table


def main() -> None:
    """Measures on torchrun's ranks or on its own; rank 0 shows and writes."""
    args = parse()
    make_folder(args.out.parent if args.out.suffix == ".csv" else args.out)
    rows = rows_of_ranks(measure, args)
    if rank_here() != 0:
        return
    origin = provenance(args.device)
    table = table_of(rows, origin["gpu"] or origin["cpu"])
    stdout_console(width=160).print(table)
    print(write_results(csv_path(args.out, "context_parallel"), rows, origin, [table], draw_context_parallel))


if __name__ == "__main__":
    run_main(main)
