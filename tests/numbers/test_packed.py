"""Promise: `attention_varlen` is `attention` within each sequence, and rows of no sequence are never read."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from helpers import DTYPES, HALF, Results, check, evaluate, name_of, rand
from layouts import nothing_like
from packed import QKV, Heads, Packed, Side, packed
from torch import Tensor

import flash_ext
from flash_ext import reference

QUERIES, KEYS = (0, 1, 70, 5, 33, 2), (4, 1, 40, 0, 52, 65)
GROUPED = Heads(4, 2, 2)
LSE = {"return_lse": True}

# What a call adds to query, key and value: (dims of the scores that a mask or a bias has, ...).
MASKS = {"mask": (0, 1, 2, 3), "mask of keys": (0, 3), "mask of queries": (2,)}
BIASES = {
    "bias": (0, 1, 2, 3),
    "bias of the batch": (1, 2, 3),
    "bias of keys": (0, 3),
    "bias of queries": (0, 1, 2),
    "bias of heads": (1,),
    "float32 bias": (1, 2, 3),
}
SLOPES = {"slopes": (1,), "slopes of a batch": (0, 1)}

# name: (heads, names of what is added, options)
CASES: dict[str, tuple[Heads, tuple[str, ...], dict[str, Any]]] = {
    "plain": (Heads(), (), {}),
    "lse": (Heads(), (), {"return_lse": True}),
    "causal": (Heads(), (), {"causal": True}),
    "bottom right": (Heads(), (), {"causal": True, "align": "bottom_right", "return_lse": True}),
    "window": (Heads(), (), {"window": (9, 3), "return_lse": True}),
    "window of one side": (Heads(), (), {"window": (None, 2), "align": "bottom_right"}),
    "grouped": (GROUPED, (), {"causal": True, "return_lse": True}),
    "one head of keys": (Heads(4, 1, 1), (), {}),
    "other heads of value": (Heads(4, 4, 2), (), {"return_lse": True}),
    "narrow values": (Heads(dim_v=48), (), {"return_lse": True}),
    "wide values": (Heads(dim=32, dim_v=80), (), {"causal": True}),
    "softcap": (Heads(), (), {"softcap": 5.0, "return_lse": True}),
    "scale": (Heads(), (), {"scale": -0.07, "return_lse": True}),
    **{name: (Heads(), (name,), {"return_lse": True}) for name in MASKS},
    **{name: (Heads(), (name,), {"return_lse": True}) for name in BIASES},
    **{name: (Heads(), (name,), {"return_lse": True}) for name in SLOPES},
    "sinks": (GROUPED, ("sinks",), {"causal": True} | LSE),
    "sinks and more": (Heads(), ("sinks", "mask", "bias of keys"), {"softcap": 5.0} | LSE),
    "slopes at the bottom right": (Heads(), ("slopes",), {"align": "bottom_right", "causal": True}),
    "band and mask": (Heads(), ("mask",), {"window": (20, 5), "causal": True, "align": "bottom_right"}),
    "added": (GROUPED, ("mask", "bias", "slopes of a batch"), {"return_lse": True}),
    "everything": (
        Heads(4, 2, 1, 64, 48),
        ("mask of keys", "bias of the batch", "slopes"),
        {"causal": True, "window": (30, None), "align": "bottom_right", "softcap": 8.0, "scale": 0.2} | LSE,
    ),
}  # fmt: skip


def added(call: Packed, *names: str) -> Packed:
    """With a mask, a bias or slopes of the tables above, or sinks."""
    inputs, dtype = {}, call.inputs["query"].dtype
    for name in names:
        if name == "sinks":
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            inputs[name] = rand(call.scores[1], dtype=wide, device=str(call.device))
            continue
        dims = (MASKS | BIASES | SLOPES)[name]
        if name in SLOPES:
            shape = [call.scores[dim] for dim in dims]
            inputs["alibi_slopes"] = (2 ** -(8 * torch.rand(shape))).to(call.device)
            continue
        shape = [size if dim in dims else 1 for dim, size in enumerate(call.scores)]
        if name in MASKS:
            inputs["mask"] = (torch.rand(shape) > 0.3).to(call.device)
        else:
            wide = name == "float32 bias" and dtype in HALF
            inputs["bias"] = rand(*shape, dtype=torch.float32 if wide else dtype, device=str(call.device))
    return call.with_inputs(**inputs)


def case_of(name: str, dtype: torch.dtype, device: str, unused: int = 3, **more: Any) -> Packed:
    heads, names, options = CASES[name]
    return added(packed(QUERIES, KEYS, heads, dtype=dtype, device=device, unused=unused, **options | more), *names)


def without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}


def truth(call: Packed) -> Any:
    reads = Packed(call.q, call.k, call.inputs, without(call.options, "deterministic"))
    return reads.alone(reference.attention)


def close(got: Results, expected: Results, backend: str = "", bits: tuple[str, ...] = ()) -> None:
    """What `bits` names bit for bit on the CPU, all else nearly."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        if backend == "cpu" and name in bits:
            assert torch.equal(got[name], tensor), name
        else:
            tolerance = 2e-2 if tensor.dtype in HALF else 2e-5
            torch.testing.assert_close(
                got[name], tensor, atol=tolerance, rtol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


ALL = ("out", "lse", *(f"grad of {name}" for name in (*QKV, "bias", "alibi_slopes", "sinks")))


# ---- the meaning ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rule(dtype: torch.dtype, case: str, device: str, backend: str) -> None:
    """By the error rule, against each sequence alone in float64: results and every gradient; some rows see no key, and
    what belongs to no sequence is NaN."""
    call = case_of(case, dtype, device)
    got = check(call.call, call.inputs, truth=truth(call))
    for name, tensor in got.items():
        assert name == "lse" or tensor.isfinite().all(), name


@pytest.mark.parametrize("case", ["plain", "bottom right", "grouped", "softcap", "added", "everything"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_each_sequence_alone(dtype: torch.dtype, case: str, device: str, backend: str) -> None:
    """The same backend's `attention` of each; the same bits on a CPU."""
    call = case_of(case, dtype, device, deterministic=True)
    bits = without(dict.fromkeys(ALL), "grad of bias", "grad of alibi_slopes")
    close(
        evaluate(call.call, call.inputs), evaluate(call.alone(flash_ext.attention), call.inputs), backend, tuple(bits)
    )


@pytest.mark.parametrize("case", ["plain", "causal", "grouped", "mask", "bias of keys", "lse"])
def test_dropout_drops_what_the_padded_call_drops(case: str, device: str, backend: str) -> None:
    call = case_of(case, torch.float32, device, dropout_p=0.4)

    def seeded(function: Any) -> Any:
        def run(**arguments: Any) -> Any:
            torch.manual_seed(7)
            return function(**arguments)

        return run

    got = evaluate(seeded(call.call), call.inputs)
    close(got, evaluate(seeded(call.padded), call.inputs))
    whole = evaluate(call.call, call.inputs, {"dropout_p": 0.0})
    assert not torch.equal(got["out"], whole["out"])


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout_by_its_map(p: float, device: str, backend: str) -> None:
    """Where scores are equal the result shows what was kept: element (b, h, i, j) of the map of the padded batch."""
    call = packed((5, 0, 18, 1), (16, 3, 12, 16), Heads(2, 1, 1, 8, 16), device=device)
    query, value = torch.zeros_like(call.inputs["query"]), torch.zeros_like(call.inputs["value"])
    for rows in call.k.ranges:
        value[rows.start : rows.stop, 0] = torch.eye(16, device=device)[: len(rows)]
    state = torch.tensor([12345, 6], device=device)
    keep = torch.ops.flash_ext.dropout_mask(state, p, 4 * 2, 18, 16).view(4, 2, 18, 16)
    leaf = value.requires_grad_()
    where = call.where
    lengths = [where.pop(f"cu_seqlens_{side}") for side in "qk"]
    out, _ = torch.ops.flash_ext.attention_with_rng_state(
        query, call.inputs["key"] * 0, leaf, state, None, None, None, *lengths, dropout_p=p, gqa=True, **where
    )
    for b, (rows, keys) in enumerate(zip(call.q.ranges, call.k.ranges, strict=True)):
        for h in range(2):
            assert torch.equal(out[rows.start : rows.stop, h, : len(keys)] > 0, keep[b, h, : len(rows), : len(keys)])
    (grad,) = torch.autograd.grad(out.sum(), leaf)
    kept = [
        keep[b, :, :n, :keys].sum((0, 1))
        for b, (n, keys) in enumerate(zip(call.q.lengths, call.k.lengths, strict=True))
    ]
    assert torch.equal(grad[:, 0].amax(-1) > 0, torch.cat(kept) > 0)


def test_more_scores_than_the_composite_has_at_once(device: str, backend: str) -> None:
    """It takes queries in blocks, whose keys are others in each sequence."""
    options = {"window": (700, 10), "align": "bottom_right"} | LSE
    call = packed((1500, 300), (1000, 3000), Heads(2, 2, 2, 8, 8), device=device, unused=1, **options)
    call = added(call, "bias of keys")
    close(evaluate(call.call, call.inputs), evaluate(call.alone(flash_ext.attention), call.inputs))


# ---- rows of nobody -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["plain", "bottom right", "everything"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rows_of_no_sequence(dtype: torch.dtype, case: str, device: str, backend: str) -> None:
    """Their results are 0 and -inf, their gradients 0, also where grad_out is NaN there; and they change no others."""
    call = case_of(case, dtype, device, unused=2, return_lse=True, deterministic=True)
    leaves = {name: t.detach().requires_grad_(t.is_floating_point()) for name, t in call.inputs.items()}
    wanted = [t for t in leaves.values() if t.requires_grad]
    out, lse = call.call(**leaves)
    unused = call.q.unused
    assert (out[unused] == 0).all() and (lse[:, unused] == -torch.inf).all()
    cotangents = [torch.ones_like(out), torch.ones_like(lse)]
    expected = torch.autograd.grad((out, lse), wanted, cotangents, retain_graph=True)
    cotangents[0][unused] = torch.nan
    cotangents[1][:, unused] = torch.nan
    for got, other in zip(torch.autograd.grad((out, lse), wanted, cotangents), expected, strict=True):
        assert torch.equal(got, other) and got.isfinite().all()
    for grad, side in zip(expected, (call.q, call.k, call.k), strict=False):
        assert (grad[side.unused] == 0).all()


def test_seqused_beyond_a_sequence(device: str, backend: str) -> None:
    """More rows in use than there are means all, fewer than none means none."""
    call = packed((5, 9, 4), (7, 3, 6), device=device)
    more, none = call.ints([100, 9, 2**31 - 1]), call.ints([-1, -(2**31), 0])
    close(
        evaluate(call.call, call.inputs, {"seqused_q": more, "seqused_k": more}),
        evaluate(call.call, call.inputs),
        backend,
        ALL,
    )
    for name in ("seqused_q", "seqused_k"):
        got = evaluate(call.call, call.inputs, {name: none, "return_lse": True})
        assert all((tensor == (-torch.inf if name == "lse" else 0)).all() for name, tensor in got.items())


EMPTY: dict[str, tuple[Side, Side]] = {
    "no sequence": (Side(()), Side(())),
    "no sequence, but rows": (Side((), behind=4), Side((), behind=3)),
    "no rows": (Side((0, 0)), Side((0, 0))),
    "no queries": (Side((0, 0)), Side((3, 2))),
    "no keys": (Side((3, 2)), Side((0, 0))),
    "no keys in use": (Side((3, 2)), Side((0, 0), between=2)),
    "never both": (Side((3, 0, 2)), Side((0, 4, 0))),
}


@pytest.mark.parametrize("case", EMPTY)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_nothing_to_attend_to(dtype: torch.dtype, case: str, device: str, backend: str) -> None:
    """Zeros, with everything that can be added, and gradients of the inputs' shapes and dtypes."""
    q, k = EMPTY[case]
    call = packed(q, k, Heads(4, 2, 2, 8, 6), dtype=dtype, device=device, causal=True, softcap=3.0, return_lse=True)
    call = added(call, "mask", "bias", "slopes")
    got = evaluate(call.call, call.inputs)
    assert got["out"].shape == (q.rows, 4, 6) and got["lse"].shape == (4, q.rows)
    for name, tensor in got.items():
        assert (tensor == (-torch.inf if name == "lse" else 0)).all(), name
    for name in (*QKV, "bias", "alibi_slopes"):
        grad, given = got[f"grad of {name}"], call.inputs[name]
        assert (grad.shape, grad.dtype) == (given.shape, given.dtype)


def test_sequences_without_queries_or_keys_among_others(device: str, backend: str) -> None:
    """They change nothing for the others."""
    queries, keys = (6, 0, 8, 3, 0), (4, 5, 9, 0, 0)
    call = packed(queries, keys, device=device, causal=True, return_lse=True)
    got = evaluate(call.call, call.inputs)
    close(got, evaluate(truth(call), call.inputs))
    assert (got["grad of key"][4:9] == 0).all() and (got["out"][14:] == 0).all()


# ---- what changes nothing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["plain", "bottom right", "slopes", "grouped"])
@pytest.mark.parametrize("more", [{"max_q": 71}, {"max_k": 200}, {"max_q": 500, "max_k": 500}], ids=str)
def test_longer_than_the_longest(more: dict[str, int], case: str, device: str, backend: str) -> None:
    call = case_of(case, torch.float32, device, deterministic=True)
    bits = ("out", "lse", *(f"grad of {name}" for name in QKV))
    close(evaluate(call.call, call.inputs, more), evaluate(call.call, call.inputs), backend, bits)


@pytest.mark.parametrize("longest", [2**31, 2**32, 2**62])
def test_longer_than_any_tensor(longest: int) -> None:
    """On the CPU, which allocates nothing of that length."""
    call = packed((5, 9), (7, 3), causal=True, return_lse=True)
    got = evaluate(call.call, call.inputs, {"max_q": longest, "max_k": longest})
    close(got, evaluate(call.call, call.inputs), "cpu", ALL)


@pytest.mark.parametrize("case", ["plain", "bottom right", "grouped"])
def test_sequences_end_at_max(case: str, device: str, backend: str) -> None:
    """Rows behind it are as not in use."""
    call = case_of(case, torch.float32, device, deterministic=True)
    used = {f"seqused_{s}": call.ints(min(n, 30) for n in side.lengths) for s, side in (("q", call.q), ("k", call.k))}
    bits = ("out", "lse", *(f"grad of {name}" for name in QKV))
    got = evaluate(call.call, call.inputs, {"max_q": 30, "max_k": 30})
    close(got, evaluate(call.call, call.inputs, used), backend, bits)


def test_keys_are_where_queries_are(device: str, backend: str) -> None:
    """cu_seqlens_k and max_k of None are those of query."""
    side = Side((7, 0, 12), before=2, behind=1)
    call = packed(side, side, device=device, causal=True)
    others = without(call.where, "cu_seqlens_k", "max_k")
    got = flash_ext.attention_varlen(**call.inputs, causal=True, **others)
    assert torch.equal(got, call.call(**call.inputs))


def every_other_head(tensor: Tensor) -> Tensor:
    rows, heads, cols = tensor.shape
    return tensor.new_full((rows, 2 * heads, cols), nothing_like(tensor))[:, ::2].copy_(tensor)


def every_other_column(tensor: Tensor) -> Tensor:
    return tensor.new_full((*tensor.shape[:2], 2 * tensor.shape[2]), nothing_like(tensor))[..., ::2].copy_(tensor)


def heads_first(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def columns_first(tensor: Tensor) -> Tensor:
    return tensor.permute(2, 1, 0).contiguous().permute(2, 1, 0)


def of_a_projection(tensor: Tensor) -> Tensor:
    """One of three side by side in a row, one element behind an address of the allocator."""
    rows, heads, cols = tensor.shape
    buffer = tensor.new_full((rows * heads * cols * 3 + 1,), nothing_like(tensor))[1:]
    return buffer.view(rows, 3, heads, cols)[:, 1].copy_(tensor)


LAYOUTS = (every_other_head, every_other_column, heads_first, columns_first, of_a_projection)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_layouts(dtype: torch.dtype, layout: Any, device: str, backend: str) -> None:
    """Of query, key, value, grad_out; results have query's order of strides."""
    call = case_of("grouped", dtype, device, deterministic=True)
    views = {name: layout(tensor) for name, tensor in call.inputs.items()}

    def among(**arguments: Any) -> Any:
        out, lse = call.call(**arguments)
        out.register_hook(layout)
        return out, lse

    got = evaluate(among, views)
    scattered = views["query"].stride(-1) != 1  # few rows of those are multiplied otherwise
    close(got, evaluate(call.call, call.inputs), backend, () if scattered else ALL)
    assert got["out"].stride(-1) == 1
    if layout is heads_first:
        assert got["out"].stride() == views["query"].stride()


def test_heads_that_share_memory(device: str, backend: str) -> None:
    call = packed(QUERIES, KEYS, device=device, return_lse=True)
    shared = {name: tensor[:, :1].expand_as(tensor) for name, tensor in call.inputs.items()}
    close(
        evaluate(call.call, shared), evaluate(call.call, {n: t.contiguous() for n, t in shared.items()}), backend, ALL
    )


def test_lengths_of_any_strides(device: str, backend: str) -> None:
    """cu_seqlens and seqused that are columns of a table."""
    call = case_of("bottom right", torch.float32, device, unused=2, deterministic=True)
    lengths = {name: tensor for name, tensor in call.where.items() if isinstance(tensor, Tensor)}
    tables = {name: torch.stack((t, t.flip(0), t * 0 - 5), 1)[:, 0] for name, t in lengths.items()}
    assert len(tables) == 4 and not any(t.is_contiguous() for t in tables.values())
    close(evaluate(call.call, call.inputs, tables), evaluate(call.call, call.inputs), backend, ALL)


def test_deterministic_bits(device: str, backend: str) -> None:
    call = case_of("added", torch.float32, device, deterministic=True)
    first = evaluate(call.call, call.inputs)
    for _ in range(3):
        for name, tensor in evaluate(call.call, call.inputs).items():
            assert torch.equal(tensor, first[name]), name


# ---- any call -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_random(seed: int, device: str, backend: str) -> None:
    chance = random.Random(seed)
    sequences, longest = chance.randint(1, 9), chance.choice([3, 17, 40])
    sides = [
        Side(
            tuple(chance.choice([0, 1, chance.randint(0, longest), longest]) for _ in range(sequences)),
            *(chance.choice([0, 0, chance.randint(1, 9)]) for _ in range(3)),
        )
        for _ in range(2)
    ]
    heads = chance.choice([1, 2, 4, 6])
    group_k, group_v = (chance.choice([g for g in (1, 2, 3, 4, 6) if heads % g == 0]) for _ in range(2))
    dims = [chance.choice([1 + chance.randrange(40), 8, 16, 64]) for _ in range(2)]
    options: dict[str, Any] = {
        "align": chance.choice(["top_left", "bottom_right"]),
        "return_lse": chance.random() < 0.7,
    }
    if chance.random() < 0.5:
        options["causal"] = True
    if chance.random() < 0.4:
        options["window"] = tuple(chance.choice([None, chance.randint(0, 40)]) for _ in range(2))
    if chance.random() < 0.3:
        options["softcap"] = chance.choice([1.0, 20.0])
    if chance.random() < 0.3:
        options["scale"] = chance.choice([-0.2, 0.0, 0.05, 0.3])
    if chance.random() < 0.3:
        options["deterministic"] = True
    names = [chance.choice(list(group)) for group in (MASKS, BIASES, SLOPES) if chance.random() < 0.4]
    of = Heads(heads, heads // group_k, heads // group_v, *dims)
    call = added(packed(*sides, of, dtype=chance.choice(DTYPES), device=device, **options), *names)
    check(call.call, call.inputs, truth=truth(call), units=4.0 if dims[0] == 1 else 0.0)


@pytest.mark.parametrize("seed", range(12))
def test_wrong_lengths_stay_inside(seed: int, device: str, backend: str) -> None:
    """Whatever numbers lie in memory: results have their shapes, and rows that no range can mean are as nobody's."""
    chance = random.Random(seed)
    rows_q, rows_k, sequences = chance.randint(1, 30), chance.randint(1, 30), chance.randint(1, 6)
    call = packed(Side((rows_q,)), Side((rows_k,)), GROUPED, device=device, return_lse=True)

    def numbers(count: int) -> list[int]:
        kinds = ([0, 5, rows_q + 7], [-3, 2, 9, 40], [2**31 - 1, -(2**31), 4], list(range(20, -1, -4)))
        return [chance.choice(kinds[seed % 4]) for _ in range(count)]

    cu = {name: numbers(sequences + 1) for name in ("q", "k")}
    where: dict[str, Any] = {f"cu_seqlens_{name}": call.ints(values) for name, values in cu.items()}
    where |= {"max_q": chance.choice([1, 8, 40]), "max_k": chance.choice([1, 8, 40])}
    if seed % 3 == 0:
        where |= {"seqused_q": call.ints(numbers(sequences)), "seqused_k": call.ints(numbers(sequences))}
    before = {name: tensor.clone() for name, tensor in call.inputs.items()}
    got = evaluate(call.call, call.inputs, where)
    assert got["out"].shape == (rows_q, 4, 64) and got["lse"].shape == (4, rows_q)
    for name in QKV:
        assert got[f"grad of {name}"].shape == call.inputs[name].shape
        assert torch.equal(call.inputs[name], before[name])
    for name, rows in (("q", rows_q), ("k", rows_k)):
        inside = [min(max(value, 0), rows) for value in cu[name]]
        claimed = {row for first, last in itertools.pairwise(inside) for row in range(first, last)}
        nobodys = sorted(set(range(rows)) - claimed)
        for result in ("out", "grad of query") if name == "q" else ("grad of key", "grad of value"):
            assert (got[result][nobodys] == 0).all(), result
        if name == "q":
            assert (got["lse"][:, nobodys] == -torch.inf).all()
