"""What api/test_sharding.py runs in each of two processes: `python sharding_cases.py RANK FILE DEVICE`, a line a case.

A case is a function of a mesh; it compares with the same call on whole tensors, which all ranks compute from one seed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flash_ext

OPS = torch.ops.flash_ext
CASES: dict[str, Callable[..., None]] = {}
S0, S1, S2 = "S0", "S1", "S2"
R = "R"
Names = str | tuple[str, ...]


def case(function: Callable[..., None]) -> Callable[..., None]:
    CASES[function.__name__] = function
    return function


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def placed(names: Names) -> list[Any]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    names = (names,) if isinstance(names, str) else names
    kinds = {R: Replicate(), "P": Partial()}
    return [kinds[name] if name in kinds else Shard(int(name[1:])) for name in names]


def share(mesh: Any, tensor: Tensor, names: Names) -> Any:
    """A leaf that wants a gradient where the whole tensor does."""
    from torch.distributed.tensor import distribute_tensor

    tensor = tensor.to(mesh.device_type)
    return distribute_tensor(tensor.detach(), mesh, placed(names)).requires_grad_(tensor.requires_grad)


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor().cpu() if hasattr(tensor, "full_tensor") else tensor.cpu()


def compare(
    mesh: Any,
    call: Callable[..., Any],
    inputs: dict[str, tuple[Tensor, Names]],
    out: Names | None = None,
    grads: dict[str, Names] | None = None,
) -> Any:
    """The call on whole and on distributed tensors: results, gradients, and where they are placed."""
    tensors = {
        name: t.clone().requires_grad_(t.is_floating_point()) for name, (t, _) in inputs.items()
    }  # fmt: skip
    parts = {name: share(mesh, tensors[name], names) for name, (_, names) in inputs.items()}
    results = []
    for given in (parts, tensors):
        outputs = call(**given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        leaves = [t for t in given.values() if t.requires_grad]
        loss = sum(o.square().sum() for o in outputs)
        results.append((outputs, torch.autograd.grad(loss, leaves)))
    for got, right in zip(results[0][0] + results[0][1], results[1][0] + results[1][1], strict=True):
        assert got.shape == right.shape and got.stride() == right.stride(), (got.stride(), right.stride())
        torch.testing.assert_close(whole(got), right.detach().cpu())
    if out is not None:
        assert all(list(o.placements) == placed(out) for o in results[0][0]), results[0][0][0].placements
    leaves = [name for name, t in parts.items() if t.requires_grad]
    for name, names in (grads or {}).items():
        seen = results[0][1][leaves.index(name)].placements
        assert list(seen) == placed(names), f"the gradient of {name} is {seen}"
    return results[0][0][0]


def qkv(q: Names, k: Names, v: Names, heads: tuple[int, int, int] = (4, 4, 4), batch: int = 2) -> dict[str, Any]:
    shapes = [(batch, heads[0], 5, 8), (batch, heads[1], 6, 8), (batch, heads[2], 6, 3)]
    return {
        name: (rand(*shape), names)
        for name, shape, names in zip(("query", "key", "value"), shapes, (q, k, v), strict=True)
    }


def attention(**kwargs: Any) -> Any:
    return flash_ext.attention(causal=True, align="bottom_right", return_lse=True, **kwargs)


@case
def every_placement_of_three(mesh: Any) -> None:
    for q, k, v in product((S0, S1, R), repeat=3):
        out = next((p for p in (q, k, v) if p != R), R)
        compare(mesh, attention, qkv(q, k, v), out, dict.fromkeys(("query", "key", "value"), out))


@case
def partial_and_sequence_sharded_inputs_are_gathered(mesh: Any) -> None:
    compare(mesh, attention, qkv(S2, S2, S2), R, {"query": R, "key": R, "value": R})
    compare(mesh, attention, qkv("S3", S0, R), S0)


@case
def partial_sums_are_added_first(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor

    q, k, v = (t.to(mesh.device_type) for t, _ in qkv(R, R, R).values())
    half = DTensor.from_local(q / 2, mesh, placed("P"), run_check=False)
    got = flash_ext.attention(half, share(mesh, k, S1), share(mesh, v, S1))
    assert list(got.placements) == placed(S1)
    torch.testing.assert_close(whole(got), flash_ext.attention(q, k, v).cpu())


@case
def grouped_heads(mesh: Any) -> None:
    every = {"query": S1, "key": S1, "value": S1}
    compare(mesh, attention, qkv(S1, S1, S1, (8, 4, 2)), S1, every)
    compare(mesh, attention, qkv(S1, R, R, (8, 4, 2)), S1, every)
    compare(mesh, attention, qkv(S0, S1, R, (8, 4, 2)), S0, {"key": S0})
    # One key head is every rank's, and its gradient a sum.
    compare(mesh, attention, qkv(S1, R, R, (4, 1, 1)), S1, {"query": S1, "key": "P", "value": "P"})
    compare(mesh, attention, qkv(S1, R, S1, (4, 1, 2)), S1, {"query": S1, "key": "P", "value": S1})
    # Three key heads do not divide over two ranks.
    compare(mesh, attention, qkv(S1, S1, S1, (6, 3, 6)), R)


@case
def uneven_shards(mesh: Any) -> None:
    compare(mesh, attention, qkv(S0, S0, S0, batch=3), S0)
    compare(mesh, attention, qkv(S1, S1, R, (3, 3, 3)), S1)
    compare(mesh, attention, qkv(S0, S0, S0, batch=1), R)


@case
def strides_keep_their_order(mesh: Any) -> None:
    """As projections give them: (batch, length, heads, head dim), transposed."""

    def call(query: Tensor, key: Tensor) -> Tensor:
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        return flash_ext.attention(query, key, key)

    inputs = {"query": (rand(4, 5, 4, 8), S0), "key": (rand(4, 6, 2, 8), R)}
    assert compare(mesh, call, inputs, S0, {"query": S0, "key": S0}).transpose(1, 2).is_contiguous()


@case
def packed_sequences_by_heads(mesh: Any) -> None:
    lengths = torch.tensor([1, 4, 4, 9], dtype=torch.int32, device=mesh.device_type)

    def call(**tensors: Any) -> Any:
        tensors = {name: t.to(mesh.device_type) for name, t in tensors.items()}
        return flash_ext.attention_varlen(
            **tensors, cu_seqlens_q=lengths, max_q=5, causal=True, window=(3, 0), return_lse=True
        )

    def rows(q: Names, k: Names, v: Names, heads: tuple[int, int, int] = (4, 2, 4)) -> dict[str, Any]:
        shapes = [(10, heads[0], 8), (10, heads[1], 8), (10, heads[2], 3)]
        return {
            name: (rand(*shape), names)
            for name, shape, names in zip(("query", "key", "value"), shapes, (q, k, v), strict=True)
        }

    extra = {"bias": (rand(3, 4, 5, 5), S1), "mask": (rand(5) > -1, R), "alibi_slopes": (rand(4).float(), S0)}
    extra |= {"sinks": (rand(4), S0)}
    compare(mesh, call, rows(R, R, R), R, {"query": R, "key": R})
    for given in (rows(S1, S1, S1), rows(S1, R, R), rows(R, S1, R)):
        grads = {"query": S1, "key": S1, "value": S1, "bias": S1, "alibi_slopes": S0, "sinks": S0}
        out = compare(mesh, call, given | extra, None, grads)
        assert list(out.placements) == placed(S1)
    compare(mesh, call, rows(S1, R, R, (4, 1, 1)), None, {"key": "P", "value": "P"})
    compare(mesh, call, rows(S0, S0, S0), R)  # rows stay whole


@case
def masks_biases_and_slopes(mesh: Any) -> None:
    shapes: dict[Any, tuple[str, str]] = {  # the gradient's place for a result sharded in batch, in heads
        (2, 4, 5, 6): (S0, S1),
        (2, 1, 5, 6): (S0, "P"),
        (1, 4, 1, 6): ("P", S1),
        (4, 5, 1): ("P", S0),
        (6,): ("P", "P"),
    }
    for (shape, grads), (index, placement) in product(shapes.items(), enumerate((S0, S1))):
        bias = rand(*shape)
        extra = {"bias": (bias, R), "mask": (bias.roll(1, -1) > -1, R), "alibi_slopes": (rand(4).float(), R)}
        slopes = "P" if placement == S0 else S0
        compare(
            mesh, attention, qkv(placement, R, R) | extra, placement, {"bias": grads[index], "alibi_slopes": slopes}
        )
    extra = {"bias": (rand(2, 4, 5, 6), S1), "alibi_slopes": (rand(2, 4).float(), S0)}
    compare(mesh, attention, qkv(R, R, R) | extra, S1, {"bias": S1, "alibi_slopes": S1})
    compare(mesh, attention, qkv(S0, S0, S0) | extra, S0, {"bias": S0, "alibi_slopes": S0})


@case
def sinks(mesh: Any) -> None:
    for placement, grad in ((S0, "P"), (S1, S0)):
        for names in (R, S0):
            given = qkv(placement, R, R) | {"sinks": (rand(4), names)}
            compare(mesh, attention, given, placement, {"sinks": grad})
        compare(mesh, attention, qkv(placement, R, R) | {"sinks": (rand(2, 4), R)}, placement, {"sinks": placement})


@case
def of_e4m3(mesh: Any) -> None:
    def call(query: Any, key: Any, value: Any, per: str, **options: Any) -> Any:
        parts = [flash_ext.quantize_fp8(t, per=per) for t in (query, key, value)]
        assert all(x8.dtype == torch.float8_e4m3fn for x8, _ in parts)
        named = {f"{name}_descale": descale for name, (_, descale) in zip("qkv", parts, strict=True)}
        return flash_ext.attention(*(x8 for x8, _ in parts), **named, causal=True, **options)

    for per, names in product(("head", "token"), (R, S0, S1, S2)):
        inputs = {name: (t.bfloat16(), names) for name, (t, _) in qkv(R, R, R, (4, 2, 2)).items()}
        result = R if names == S2 else names
        compare(mesh, lambda per=per, **t: call(**t, per=per), inputs, result, {"query": result, "key": result})
    inputs = {name: (t.bfloat16(), R if name == "key" else S1) for name, (t, _) in qkv(R, R, R).items()}
    compare(mesh, lambda **t: call(**t, per="head", return_lse=True), inputs, S1, {"key": S1})


@case
def drop_in_shapes(mesh: Any) -> None:
    sdpa = flash_ext.scaled_dot_product_attention
    compare(mesh, sdpa, {"query": (rand(4, 5, 8), S0), "key": (rand(4, 6, 8), S0), "value": (rand(6, 8), R)}, S0)
    compare(mesh, sdpa, {name: (rand(5, 8), S0) for name in ("query", "key", "value")}, R)
    five = {"query": (rand(2, 3, 4, 5, 8), S1), "key": (rand(3, 4, 6, 8), S0), "value": (rand(2, 1, 1, 6, 8), R)}
    compare(mesh, sdpa, five, S1, {"query": S1, "key": S0, "value": "P"})
    compare(mesh, lambda **x: sdpa(enable_gqa=True, **x), qkv(S1, S1, S1, (4, 2, 2)), S1)
    compare(mesh, lambda q: flash_ext.FlashAttention.apply(q, q, q, True), {"q": (rand(2, 4, 5, 8), S1)}, S1)


@case
def under_enable(mesh: Any) -> None:
    before = flash_ext.enabled_calls()
    with flash_ext.enable():
        for placement in (S0, S1, R):
            compare(mesh, F.scaled_dot_product_attention, qkv(placement, placement, placement), placement)
        bias = {"attn_mask": (rand(4, 5, 6), R)}
        compare(mesh, F.scaled_dot_product_attention, qkv(S1, S1, S1) | bias, S1, {"attn_mask": S0})
    assert flash_ext.enabled_calls() == before + 8


@case
def without_gradients(mesh: Any) -> None:
    q, k, v = (t.to(mesh.device_type) for t, _ in qkv(R, R, R).values())
    expected = flash_ext.attention(q, k, v).cpu()
    for mode, names in product((torch.no_grad, torch.inference_mode), (S0, S1, R)):
        with mode():
            given = [share(mesh, t, names) for t in (q, k, v)]
            for call in (flash_ext.attention, flash_ext.scaled_dot_product_attention):
                got = call(*given)
                assert list(got.placements) == placed(names)
                torch.testing.assert_close(whole(got), expected)


def dropped(mesh: Any, names: str, seed: int) -> tuple[Tensor, Any]:
    """The map, (batch, heads, n, n), and the call's random state; the gradient sees the same map."""
    n = 16
    q = share(mesh, torch.zeros(2, 2, n, 8, dtype=torch.float64), names)
    v = share(mesh, torch.eye(n, dtype=torch.float64).repeat(2, 2, 1, 1).requires_grad_(), names)
    torch.manual_seed(seed)
    out, _, state = OPS.attention(q, q, v, dropout_p=0.5)
    cotangent = share(
        mesh, torch.randn(2, 2, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(3)), names
    )
    (grad,) = torch.autograd.grad(out, v, cotangent)
    torch.testing.assert_close(whole(grad), whole(out).mT @ whole(cotangent))
    return whole(out) > 0, state


@case
def dropout(mesh: Any) -> None:
    for names in (S0, S1, R):
        kept, state = dropped(mesh, names, seed=7)
        assert 0.4 < kept.float().mean() < 0.6
        assert torch.equal(kept, dropped(mesh, names, seed=7)[0]) and not torch.equal(kept, dropped(mesh, names, 8)[0])
        # Replicas agree, also where the ranks' seeds do not; every (batch, head) has a map of its own.
        again = dropped(mesh, names, seed=mesh.get_local_rank(0))[0].to(mesh.device_type)  # NCCL has no CPU tensors
        heads = again.flatten(0, 1)
        assert not any(torch.equal(heads[i], heads[j]) for i in range(4) for j in range(i))
        everyone = [torch.empty_like(again) for _ in range(2)]
        torch.distributed.all_gather(everyone, again)
        assert torch.equal(*everyone)
        assert tuple(state.shape) == ((2,) if names == R else (4,))


@case
def a_whole_random_state_means_the_whole_map(mesh: Any) -> None:
    q, k, v = (t.to(mesh.device_type) for t, _ in qkv(R, R, R).values())
    state = torch.tensor([5, 6], device=mesh.device_type)
    expected = OPS.attention_with_rng_state(q, k, v, state, dropout_p=0.5)[0].cpu()
    for names in (S0, S1, R):
        given = [share(mesh, t, names) for t in (q, k, v)]
        got = OPS.attention_with_rng_state(*given, share(mesh, state, R), dropout_p=0.5)[0]
        torch.testing.assert_close(whole(got), expected)
        # What the drawing operator gives goes back into the other one, and into the map of its own shard.
        out, _, drawn = OPS.attention(*given, dropout_p=0.5)
        torch.testing.assert_close(whole(OPS.attention_with_rng_state(*given, drawn, dropout_p=0.5)[0]), whole(out))
    mask = OPS.dropout_mask(share(mesh, state, R), 0.5, 3, 4, 5)
    assert torch.equal(whole(mask), OPS.dropout_mask(state, 0.5, 3, 4, 5).cpu())


@case
def with_a_cache(mesh: Any) -> None:
    """In heads, and whole; the caches are written to where they lie."""
    lengths = torch.tensor([3, 5], dtype=torch.int32)
    tensors = {"query": (2, 2, 8, 16), "key_cache": (2, 9, 4, 16), "value_cache": (2, 9, 4, 16)}
    tensors |= {"key": (2, 2, 4, 16), "value": (2, 2, 4, 16)}
    given = {name: rand(*sizes) for name, sizes in tensors.items()}
    slopes = torch.rand(8)
    alone = {name: t.clone() for name, t in given.items()} | {"alibi_slopes": slopes}
    expected = flash_ext.attention_with_cache(**alone, cache_seqlens=lengths, return_lse=True)
    for names in (S2, R):
        placed_tensors = {name: share(mesh, t.clone(), names) for name, t in given.items()}
        placed_tensors["alibi_slopes"] = share(mesh, slopes, S0 if names == S2 else R)
        got = flash_ext.attention_with_cache(
            **placed_tensors, cache_seqlens=lengths.to(mesh.device_type), return_lse=True
        )
        assert tuple(got[0].placements) == tuple(placed(names))
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(whole(one), other)
        for name in ("key_cache", "value_cache"):
            assert torch.equal(whole(placed_tensors[name]), alone[name])
    wrong = {name: share(mesh, t, S0 if name == "query" else R) for name, t in given.items()}
    try:
        flash_ext.attention_with_cache(**wrong, cache_seqlens=lengths.to(mesh.device_type))
    except RuntimeError as error:
        assert "attention_with_cache takes them alike" in str(error)
    else:
        raise AssertionError("no error")


@case
def compiled(mesh: Any) -> None:
    for names in (S0, S1):
        compare(mesh, torch.compile(attention, backend="aot_eager", fullgraph=True), qkv(names, names, R), names)


@case
def counted(mesh: Any) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    given = [share(mesh, t, S0) for t, _ in qkv(S0, S0, S0).values()]
    with FlopCounterMode(display=False) as counter:
        flash_ext.attention(*given)
    assert counter.get_total_flops() > 0


@case
def a_plain_tensor_beside_dtensors_is_an_error(mesh: Any) -> None:
    from torch.distributed.tensor.experimental import implicit_replication

    q, k, v = (share(mesh, t, S0) for t, _ in qkv(S0, S0, S0).values())
    mask = torch.ones(5, 6, dtype=torch.bool, device=mesh.device_type)
    try:
        flash_ext.attention(q, k, v, mask=mask)
        raise AssertionError("no error")
    except RuntimeError as error:
        assert "mask is a torch.Tensor beside DTensors" in str(error)
    with implicit_replication():
        torch.testing.assert_close(whole(flash_ext.attention(q, k, v, mask=mask)), whole(flash_ext.attention(q, k, v)))


@case
def two_mesh_dimensions(mesh: Any) -> None:
    from torch.distributed.tensor import init_device_mesh

    tall = init_device_mesh(mesh.device_type, (2, 1))
    compare(tall, attention, qkv((S0, S1), (S0, S1), (S0, S1), (4, 2, 2)), (S0, S1), {"key": (S0, S1)})
    compare(tall, attention, qkv((R, S1), (S0, R), (R, R), (4, 1, 4)), (S0, S1), {"key": (S0, "P")})


def main() -> None:
    rank, file, device = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    assert not {"torch.distributed.tensor", "flash_ext.sharding"} & sys.modules.keys(), "import flash_ext imports it"
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    import torch.distributed as dist
    from torch.distributed.tensor import init_device_mesh

    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=2)
    mesh = init_device_mesh(device, (2,))
    for name, function in CASES.items():
        torch.manual_seed(0)
        try:
            function(mesh)
            print(f"{name}: right", flush=True)
        except Exception as error:
            print(f"{name}: {type(error).__name__} {' '.join(str(error).split())[:600]}", flush=True)
    dist.destroy_process_group()
    # NOTE: without the interpreter's own end. Threads of torch (gloo's, Inductor's) may still be there then; once, on a
    # busy machine, the process ended in std::terminate after its last case.
    os._exit(0)


if __name__ == "__main__":
    main()
