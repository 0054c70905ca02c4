"""Trains the language model on the ranks of torchrun: what each rank takes, sends and keeps, by torch's own wrappers.

Called by train_lm.py for --parallel, with a strategy of strategies.py. The loss curve of each is that of one rank with
the whole batch, up to rounding. Bytes that a rank should hold stand beside what it holds.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from timeit import default_timer
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from data import Text, batches, load_text
from figures import draw_ranks
from harness import BenchmarkError, Reporter, make_folder, provenance, stdout_console, synchronize
from limits import float32_products
from model import ATTENTIONS, BYTE_VOCAB, SIZES, TransformerLM, mark_ranges, named_range
from ranks import barrier, joined, record_with_nsys, same_on_all_ranks, slowest
from stepping import profiling
from strategies import STRATEGIES, Job, Sizes, kept_sizes, none
from tables import Table, make_table, write_results
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from training import CLIP, autocast, cross_entropy, learning_rate

if TYPE_CHECKING:
    from train_lm import Args

PARTS = ("forward", "backward", "optimizer")
KINDS = ("parameters", "gradients", "optimizer state")
UNRECORDED_STEPS = 2  # before nsys records, with --nvtx
ALONE_STEPS = 3  # steps without communication, after one of warm-up


# ---- what fits ----


def check(args: Args) -> None:
    """A BenchmarkError where the ranks, the model or other arguments do not fit --parallel."""
    ranks, size = dist.get_world_size(), SIZES[args.size]
    if args.parallel == "none" and ranks > 1:
        raise BenchmarkError(f"--parallel none is one rank's, but torchrun started {ranks}.")
    splits = STRATEGIES[args.parallel].splits
    if splits == "batch" and args.batch % ranks:
        raise BenchmarkError(f"--batch {args.batch} is not a multiple of {ranks} ranks.")
    if splits == "tokens" and args.context % ranks:
        raise BenchmarkError(f"--context {args.context} is not a multiple of {ranks} ranks.")
    if splits == "tokens" and args.attention != "flash_ext":
        raise BenchmarkError(f"--attention {args.attention} knows one rank's tokens alone; cp takes flash_ext.")
    if args.parallel == "tp" and (size.heads % ranks or size.d_ff % ranks):
        raise BenchmarkError(f"--size {args.size} has {size.heads} heads, which {ranks} ranks do not divide evenly.")


# ---- one step ----


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip_(parameters: Iterable[nn.Parameter]) -> None:
    """Scales all gradients so that their norm is CLIP at most; parts of DTensors are summed over ranks."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    zero = local(gradients[0]).new_zeros(())
    parts = sum((local(g).square().sum() for g in gradients if isinstance(g, DTensor)), zero)
    dist.all_reduce(parts)
    wholes = sum((g.square().sum() for g in gradients if not isinstance(g, DTensor)), zero)
    scale = (CLIP / ((parts + wholes).sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local(gradient).mul_(scale)


@contextmanager
def timed(times: dict[str, float], name: str, device: str) -> Iterator[None]:
    """Adds the part's milliseconds; the device has nothing to do before and after."""
    begin = default_timer()
    with named_range(name):
        yield
        synchronize(device)
    times[name] = (default_timer() - begin) * 1e3


def step(job: Job, batch: tuple[Tensor, Tensor], args: Args) -> tuple[Tensor, dict[str, float], list[int]]:
    """One step: the loss of this rank's batch, milliseconds of its parts, and bytes of KINDS where all are there."""
    times: dict[str, float] = {}
    with timed(times, "forward", args.device):
        with autocast(args.precision, args.device):
            logits = job.call(batch[0])
        loss = cross_entropy(logits, batch[1])
    with timed(times, "backward", args.device):
        loss.backward()
    with timed(times, "optimizer", args.device):
        clip_(job.model.parameters())
        job.optimizer.step()
    held = bytes_held(job)
    job.optimizer.zero_grad(set_to_none=True)
    return loss.detach(), times, held


def bytes_held(job: Job) -> list[int]:
    """Of parameters, of gradients and of optimizer state on this rank."""
    parameters = list(job.model.parameters())
    state = getattr(job.optimizer, "optim", job.optimizer).state.values()  # ZeroRedundancyOptimizer's own part
    moments = [x for entry in state for x in entry.values() if isinstance(x, Tensor) and x.dim()]
    kinds = parameters, [p.grad for p in parameters if p.grad is not None], moments
    return [sum(local(x).numel() * local(x).element_size() for x in tensors) for tensors in kinds]


def bytes_saved(job: Job, tokens: Tensor, args: Args) -> int:
    """What autograd keeps for backward on this rank, each storage once, without parameters."""
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        base = tensor._base if tensor._is_view() else tensor
        if not isinstance(base, nn.Parameter):
            storage = local(tensor.detach()).untyped_storage()
            seen[storage.data_ptr()] = storage
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, autocast(args.precision, args.device):
        logits = job.call(tokens)
    logits.sum().mul(0).backward()  # the wrappers expect a backward
    job.optimizer.zero_grad(set_to_none=True)
    return sum(storage.nbytes() for storage in seen.values())


# ---- what is exposed ----


def exposed_ms(call: Callable[[], Any]) -> float:
    """Milliseconds of one call in which the GPU runs NCCL's kernels and no other.

    Ranks begin together: the first kernels are a barrier's, behind the start of the profiler, and do not count.
    """
    from flash_ext.profiling.nsys_report import uncovered

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        barrier("cuda")
        call()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    begin = min((event.time_range.end for event in events if "nccl" in event.name), default=0.0)
    spans: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    for event in events:
        if event.time_range.start >= begin:
            spans["nccl" not in event.name].append((event.time_range.start, event.time_range.end))
    return uncovered(*spans) / 1e3


def time_alone(args: Args, batch: tuple[Tensor, Tensor]) -> float:
    """Milliseconds of a step of this rank's batch on a model that sends nothing, while all ranks do the same."""
    job = none(make_model(args))
    times = []
    for _ in range(1 + ALONE_STEPS):
        barrier(args.device)
        times.append(sum(step(job, batch, args)[1].values()))
    return statistics.median(times[1:])


# ---- checkpoints ----


def optimizer_state(job: Job) -> dict[str, Any]:
    """The optimizer's state under keys that no two ranks share unless their values are equal or parts of DTensors."""
    optimizer = getattr(job.optimizer, "optim", job.optimizer)
    sharded = optimizer is not job.optimizer
    prefix = f"rank {dist.get_rank()} " if sharded else ""
    return {
        f"{prefix}{group} {index} {name}": optimizer.state[parameter][name]
        for group, entry in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(entry["params"])
        for name in optimizer.state[parameter]
    }


def settings_of(args: Args) -> dict[str, Any]:
    """What a run that goes on must have in common with the one before."""
    names = ("parallel", "size", "attention", "context", "precision", "batch", "steps", "lr", "seed")
    return {name: getattr(args, name) for name in names} | {"ranks": dist.get_world_size()}


def saved_steps(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    return sorted(path.parent for path in folder.glob("step-*/.metadata"))


def save(job: Job, args: Args, done: int) -> None:
    """Writes what the step after `done` steps starts from; the two newest checkpoints stay."""
    from torch.distributed import checkpoint

    if dist.get_rank() == 0:  # before: a checkpoint is complete when the last file of save() is there
        make_folder(args.resume)
        (args.resume / "settings.json").write_text(json.dumps(settings_of(args)))
    state = {"model": job.model.state_dict(), "optimizer": optimizer_state(job)}
    checkpoint.save(state, checkpoint_id=args.resume / f"step-{done:08d}")
    if dist.get_rank() == 0:
        for old in saved_steps(args.resume)[:-2]:
            shutil.rmtree(old)


def resume(job: Job, args: Args) -> int:
    """Loads the newest checkpoint of --resume, if there is one; returns how many steps it had done."""
    from torch.distributed import checkpoint

    found = saved_steps(args.resume)
    if not found:
        return 0
    before = json.loads((args.resume / "settings.json").read_text())
    for name, value in settings_of(args).items():
        if before[name] != value:
            raise BenchmarkError(f"--resume {args.resume}: it was written with {name} {before[name]}, not {value}.")
    for group in job.optimizer.param_groups:  # a step that changes nothing makes the state that is loaded into
        group["lr"] = 0.0
    for parameter in job.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=True)
    state = {"model": job.model.state_dict(), "optimizer": optimizer_state(job)}
    checkpoint.load(state, checkpoint_id=found[-1])
    job.model.load_state_dict(state["model"])
    return int(found[-1].name.removeprefix("step-"))


# ---- a run ----


@dataclass
class Trained:
    """What a run leaves on every rank."""

    start: int = 0  # steps that an earlier run had done
    losses: list[float] = field(default_factory=list)
    times: list[dict[str, float]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    saved: int = 0  # bytes for backward
    exposed_ms: float = math.nan
    peak: int | None = None  # bytes that PyTorch had allocated on a GPU at once, in the last step


def make_model(args: Args) -> TransformerLM:
    """The model with the seed's weights, the same on every rank."""
    torch.manual_seed(args.seed)
    with torch.device(args.device):
        return TransformerLM(SIZES[args.size], ATTENTIONS[args.attention](), args.context, recompute=args.checkpoint)


def run(args: Args, text: Text) -> Trained:
    """Trains on this rank; the losses are those of the whole batch."""
    strategy, result = STRATEGIES[args.parallel], Trained()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    job = strategy.make(make_model(args))

    def part(x: Tensor) -> Tensor:
        if strategy.splits == "tokens":
            from flash_ext.distributed import shard_sequence

            return shard_sequence(x, dist.group.WORLD, 1)
        return x.chunk(ranks)[rank] if strategy.splits == "batch" else x

    if args.resume:
        result.start = resume(job, args)
    stream = batches(text.train, args.batch, args.context, args.seed, args.device)
    with ExitStack() as stack:
        stack.enter_context(float32_products(args.precision))
        stack.enter_context(job.scope())
        progress = stack.enter_context(Reporter(args.parallel, args.steps - result.start)) if rank == 0 else None
        if args.nvtx:
            stack.enter_context(mark_ranges(profiling().range))
            # In the thread that calls it, backward launches its kernels inside the range "backward"
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        for index, (inputs, targets) in enumerate(islice(stream, result.start, args.steps), result.start):
            if args.nvtx and index == result.start + UNRECORDED_STEPS:
                record_with_nsys(stack, args.device)
            mine = part(inputs), part(targets)
            if index == result.start:
                result.saved = bytes_saved(job, mine[0], args)
            for group in job.optimizer.param_groups:
                group["lr"] = learning_rate(index, args.steps, args.lr)
            barrier(args.device)
            if args.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            loss, times, result.held = step(job, mine, args)
            result.peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else None
            dist.all_reduce(loss)
            result.losses.append(loss.item() / ranks)
            result.times.append(times)
            if args.resume and (index + 1) % args.save_every == 0:
                save(job, args, index + 1)
            if progress:
                progress.advance(f"loss {result.losses[-1]:.3f}")
        if not result.losses:
            return result
        if args.device == "cuda" and not args.nvtx:  # which torch's profiler cannot share
            result.exposed_ms = exposed_ms(lambda: step(job, mine, args))
        elif args.device == "cpu" and strategy.splits == "batch" and ranks > 1:
            own = statistics.median(sum(times.values()) for times in result.times)
            result.exposed_ms = own - time_alone(args, mine)
    return result


# ---- what is shown and left ----


def sizes_of(args: Args, model: TransformerLM) -> Sizes:
    """For the arithmetic; weights are float32."""
    size, ranks = SIZES[args.size], dist.get_world_size()
    split = size.layers * (4 * size.d_model**2 + 3 * size.d_model * size.d_ff)
    weights = sum(parameter.numel() for parameter in model.parameters())
    single = args.precision in ("fp32", "tf32")
    activations = args.batch * args.context * size.d_model * (4 if single else 2)
    # Attention that keeps scores, and what is computed again, has no arithmetic here.
    known = args.checkpoint == "none" and args.attention in ("flash_ext", "sdpa")
    shape = size.layers, size.heads, size.d_model, size.d_ff, args.batch, args.context, BYTE_VOCAB, not single
    return Sizes(ranks, 4 * weights, 4 * split, activations, size.layers, **(kept_sizes(*shape) if known else {}))


def rank_rows(args: Args, result: Trained, sizes: Sizes) -> list[dict[str, Any]]:
    """On every rank: a row for each rank, measured beside what the arithmetic says."""
    strategy = STRATEGIES[args.parallel]
    parameters, gradients, state = strategy.held(sizes)
    should = dict(zip(KINDS, (parameters, gradients, 2 * state), strict=True))
    row: dict[str, Any] = {"parallel": args.parallel, "ranks": sizes.ranks, "rank": dist.get_rank(), "size": args.size}
    row |= {"precision": args.precision, "batch": args.batch, "context": args.context, "steps": len(result.losses)}
    for name in PARTS:
        row[f"{name}_ms"] = f"{statistics.median(times[name] for times in result.times):.3f}"
    row["exposed_ms"] = "" if math.isnan(result.exposed_ms) else f"{result.exposed_ms:.3f}"
    row["sent_bytes"] = round(strategy.sent(sizes))
    for kind, held in zip(KINDS, result.held, strict=True):
        name = kind.replace(" ", "_")
        row |= {f"{name}_bytes": held, f"{name}_should": round(should[kind])}
    row |= {"saved_bytes": result.saved, "saved_should": round(strategy.kept(sizes)) if sizes.inside else ""}
    row["peak_bytes"] = "" if result.peak is None else result.peak
    rows: list[Any] = [None] * sizes.ranks
    dist.all_gather_object(rows, row)
    return rows


def rank_table(rows: list[dict[str, Any]], device: str) -> Table:
    """One line a rank: medians of the parts, and MB (10^6 bytes) held / what the arithmetic says."""
    first = rows[0]
    title = "{parallel}, {ranks} ranks, {size}, {precision}, batch {batch} x {context}".format(**first)
    headers = (*(f"{name} ms" for name in PARTS), "exposed ms", "MB to send", *KINDS, "saved for backward", "peak")
    table = make_table("rank", right=headers, title=f"{title}, {device}")
    for row in rows:
        held = [(row[f"{k.replace(' ', '_')}_bytes"], row[f"{k.replace(' ', '_')}_should"]) for k in KINDS]
        pairs = [f"{ours / 1e6:.2f} / {should / 1e6:.2f}" for ours, should in held]
        times = [row[f"{name}_ms"] for name in PARTS]
        sent, saved = f"{row['sent_bytes'] / 1e6:.2f}", f"{row['saved_bytes'] / 1e6:.2f}"
        saved += f" / {row['saved_should'] / 1e6:.2f}" if row["saved_should"] else ""
        peak = f"{row['peak_bytes'] / 1e6:.2f}" if row["peak_bytes"] else "-"
        table.add_row(str(row["rank"]), *times, row["exposed_ms"] or "-", sent, *pairs, saved, peak)
    return table


def train_parallel(args: Args) -> None:
    """Trains on torchrun's ranks, without torchrun on one."""
    with joined(args.device):
        train_on_ranks(args)


def train_on_ranks(args: Args) -> None:
    """On every rank: trains; rank 0 shows and writes the table and the curve."""
    others = {"device": args.device, "checkpoint": args.checkpoint, "nvtx": args.nvtx}
    same_on_all_ranks(settings_of(args) | others | {"resume": args.resume is not None, "save_every": args.save_every})
    check(args)
    text = load_text(args.data, args.context)
    result = run(args, text)
    if not result.losses:
        print(f"--resume {args.resume} has done all {args.steps} steps already.", file=sys.stderr)
        return
    with torch.device("meta"):
        sizes = sizes_of(args, TransformerLM(SIZES[args.size], ATTENTIONS["sdpa"](), args.context))
    rows = rank_rows(args, result, sizes)
    total = slowest([statistics.median(sum(times.values()) for times in result.times)], args.device)[0]
    if dist.get_rank() != 0:
        return
    origin = provenance(args.device)
    table = rank_table(rows, origin["gpu"] or origin["cpu"])
    console = stdout_console(width=160)
    console.print(table)
    console.print(f"{total:.1f} ms a step, {args.batch * args.context / total * 1e3:,.0f} tokens/s on all ranks")
    curve = [
        {"parallel": args.parallel, "ranks": sizes.ranks, "step": result.start + index + 1, "nats": f"{loss:.6f}"}
        for index, loss in enumerate(result.losses)
    ]
    print(write_results(args.csv.with_name(f"{args.csv.stem}_curve.csv"), curve, origin, [], None))
    print(write_results(args.csv, rows, origin, [table], draw_ranks))
