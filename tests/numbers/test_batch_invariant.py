"""Promise: with `batch_invariant` a sequence has the same bits beside any others, and in any place among them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import DTYPES, check, name_of, rand
from torch import Tensor

import flash_ext

OPS = torch.ops.flash_ext
QKV = ("query", "key", "value")
REGROUPINGS = 200  # of each kind of call, over all of its cases
Results = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _several_threads() -> Iterator[None]:
    """Work is split among them, by the size of the batch where nobody forbids it."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Case:
    heads: tuple[int, int, int] = (4, 4, 4)
    dims: tuple[int, int] = (64, 64)
    added: tuple[str, ...] = ()  # mask, bias, slopes
    options: tuple[tuple[str, Any], ...] = ()


def case(*added: str, heads: tuple[int, ...] = (4, 4, 4), dims: tuple[int, int] = (64, 64), **options: Any) -> Case:
    return Case(heads, dims, added, tuple(options.items()))


CASES = {
    "plain": case(),
    "grouped": case(heads=(4, 2, 2), causal=True, align="bottom_right"),
    "one head of keys": case(heads=(3, 1, 1)),
    "window": case(window=(20, 9), heads=(2, 2, 2), dims=(64, 48)),
    "mask": case("mask", causal=True),
    "bias": case("bias", heads=(2, 2, 2)),
    "everything": case("mask", "bias", "slopes", heads=(4, 2, 2), softcap=8.0, scale=0.2, causal=True),
    "softcap": case(softcap=5.0, dims=(128, 128), heads=(2, 2, 2)),
    "slopes": case("slopes", heads=(4, 1, 1), align="bottom_right"),
    "wide": case(dims=(160, 160), heads=(2, 1, 1), causal=True),
    "narrow values": case(dims=(192, 128), heads=(2, 1, 1), causal=True),
}
# What sm90's backward refuses is left out there: fewer than 16 keys, and with a mask or the like fewer than 65 tokens.
LENGTHS = ((1, 1), (1, 200), (5, 3), (33, 40), (70, 200), (130, 130), (300, 64), (257, 300))


def lengths_of(backend: str) -> tuple[tuple[int, int], ...]:
    return tuple(n for n in LENGTHS if backend != "sm90" or (max(n) > 64 and n[1] > 15))


def sequence(of: Case, lengths: tuple[int, int], dtype: torch.dtype, device: str) -> Results:
    """Tensors of one sequence without a batch dimension, (heads, rows, cols), and its cotangents."""
    (hq, hk, hv), (e, ev), (rows, keys) = of.heads, of.dims, lengths
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shapes = {"query": (hq, rows, e), "key": (hk, keys, e), "value": (hv, keys, ev), "grad_out": (hq, rows, ev)}
    result = {name: rand(*shape, dtype=dtype, device=device) for name, shape in shapes.items()}
    result["grad_lse"] = rand(hq, rows, dtype=wide, device=device)
    if "mask" in of.added:
        result["mask"] = (torch.rand(hq, rows, keys) > 0.3).to(device)
    if "bias" in of.added:
        result["bias"] = rand(hq, rows, keys, dtype=dtype, device=device)
    if "slopes" in of.added:
        result["alibi_slopes"] = (2 ** -(8 * torch.rand(hq))).to(device)
    return result


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.dtype.itemsize])


def differing(got: Results, expected: Results, names: Any = None) -> set[str]:
    names = expected.keys() if names is None else names
    return {name for name in names if not torch.equal(bits(got[name]), bits(expected[name]))}


def gradients(
    attend: Any, inputs: Results, cotangents: list[Tensor], *, backward: bool = True, **options: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    leaves = {name: t.detach().requires_grad_(backward and t.is_floating_point()) for name, t in inputs.items()}
    out, lse = attend(**leaves, return_lse=True, **{"batch_invariant": True} | options)
    wanted = {name: t for name, t in leaves.items() if t.requires_grad}
    grads = torch.autograd.grad((out, lse), list(wanted.values()), cotangents) if backward else ()
    return out.detach(), lse.detach(), dict(zip(wanted, grads, strict=True))


def dense(of: Case, sequences: list[Results], **more: Any) -> list[Results]:
    """Results of one dense call of sequences of the same lengths, by sequence."""
    stacked = {name: torch.stack([s[name] for s in sequences]) for name in sequences[0]}
    cotangents = [stacked.pop("grad_out"), stacked.pop("grad_lse")]
    out, lse, grads = gradients(flash_ext.attention, stacked, cotangents, **dict(of.options) | more)
    return [
        {"out": out[b], "lse": lse[b]} | {f"grad of {name}": grad[b] for name, grad in grads.items()}
        for b in range(len(sequences))
    ]


def padded_scores(sequences: list[Results], name: str, longest: tuple[int, int]) -> Tensor:
    first = sequences[0][name]
    whole = first.new_zeros(len(sequences), first.shape[0], *longest)
    for b, one in enumerate(sequences):
        whole[b, :, : one[name].shape[1], : one[name].shape[2]] = one[name]
    return whole


def packed(
    of: Case, sequences: list[Results], chance: random.Random | None = None, *, backward: bool = True
) -> list[Results]:
    """The same of one packed call; by chance with rows of nobody, which are NaN, and room for longer sequences."""

    def gap() -> int:
        return chance.choice([0, 0, 1, 7, 40]) if chance else 0

    device = str(sequences[0]["query"].device)
    lengths = [(s["query"].shape[1], s["key"].shape[1]) for s in sequences]
    longest = tuple(max(n) + gap() for n in zip(*lengths, strict=True))
    starts, ends, where = {}, {}, {}
    for side, name in enumerate("qk"):
        starts[name], at = [], gap()
        for n in lengths:
            starts[name].append(at)
            at += n[side] + gap()
        ends[name] = at
        where[f"cu_seqlens_{name}"] = torch.tensor([*starts[name], at], dtype=torch.int32, device=device)
        used = torch.tensor([n[side] for n in lengths], dtype=torch.int32, device=device)
        where |= {f"seqused_{name}": used, f"max_{name}": longest[side]}

    def rows(name: str, side: str) -> Tensor:
        heads, _, *cols = sequences[0][name].shape
        whole = sequences[0][name].new_full((ends[side], heads, *cols), torch.nan)
        for start, s in zip(starts[side], sequences, strict=True):
            whole[start : start + s[name].shape[1]] = s[name].transpose(0, 1)
        return whole

    inputs = {"query": rows("query", "q"), "key": rows("key", "k"), "value": rows("value", "k")}
    for name in ("mask", "bias"):
        if name in sequences[0]:
            inputs[name] = padded_scores(sequences, name, longest)
    if "alibi_slopes" in sequences[0]:
        inputs["alibi_slopes"] = torch.stack([s["alibi_slopes"] for s in sequences])
    cotangents = [rows("grad_out", "q"), rows("grad_lse", "q").mT.contiguous()]
    out, lse, grads = gradients(
        flash_ext.attention_varlen, inputs, cotangents, backward=backward, **where, **dict(of.options)
    )
    results = []
    for b, (n, keys) in enumerate(lengths):
        q = slice(starts["q"][b], starts["q"][b] + n)
        k = slice(starts["k"][b], starts["k"][b] + keys)
        one = {"out": out[q].transpose(0, 1), "lse": lse[:, q]}
        for name, grad in grads.items():
            own = {"bias": (b, slice(None), slice(n), slice(keys)), "alibi_slopes": (b,), "query": (q,)}.get(name, (k,))
            one[f"grad of {name}"] = grad[own].transpose(0, 1) if name in QKV else grad[own]
        results.append(one)
    return results


def nested(of: Case, sequences: list[Results]) -> list[Results]:
    """The same of nested tensors, which have no bias or mask of their own here."""
    leaves = {
        name: torch.nested.nested_tensor(
            [s[name].transpose(0, 1) for s in sequences], layout=torch.jagged, requires_grad=True
        )
        for name in QKV
    }
    heads_first = {name: tensor.transpose(1, 2) for name, tensor in leaves.items()}
    out, lse = flash_ext.attention(**heads_first, return_lse=True, batch_invariant=True, **dict(of.options))
    total = sum((part * s["grad_out"]).sum() for part, s in zip(out.unbind(), sequences, strict=True)) + sum(
        (part * s["grad_lse"]).sum() for part, s in zip(lse.unbind(), sequences, strict=True)
    )
    grads = torch.autograd.grad(total, list(leaves.values()))
    parts = {f"grad of {name}": grad.unbind() for name, grad in zip(QKV, grads, strict=True)}
    return [
        {"out": o.detach(), "lse": x.detach()} | {name: part[b].transpose(0, 1) for name, part in parts.items()}
        for b, (o, x) in enumerate(zip(out.unbind(), lse.unbind(), strict=True))
    ]


# Packed sequences' name of a kernel that dense calls have, too.
DENSE_NAMES = {"sm90.backward.packed.in_order": "sm90.backward"}


def names_of_same_kernels(of: Case, one: Results) -> list[str]:
    """What a packed call has as the dense one: all on a CPU; on a GPU gradients where one kernel makes both in one way
    (dQ of a single tile of keys is no sum in a dense call), but not of a bias, which may have its own dtype there."""
    names = ["out", "lse", *(f"grad of {name}" for name in (*QKV, "bias", "alibi_slopes") if name in one)]
    if one["query"].is_cpu:
        return names
    scores = {name: one[name][None] for name in ("mask", "bias") if name in one}
    tensors = {name: one[name][None] for name in QKV} | scores
    rows = {name: one[name].transpose(0, 1) for name in QKV}
    slopes = {"alibi_slopes": one["alibi_slopes"]} if "alibi_slopes" in one else {}
    options = dict(of.options) | {"batch_invariant": True, "device": one["query"].device}
    cu = {f"cu_seqlens_{s}": torch.tensor([0, one[name].shape[1]], dtype=torch.int32, device="meta")
          for s, name in (("q", "query"), ("k", "key"))}  # fmt: skip
    longest = {"max_q": one["query"].shape[1], "max_k": one["key"].shape[1]}
    alone = flash_ext.explain(**tensors, **slopes, **options).backward
    among = flash_ext.explain(**rows, **scores, **slopes, **cu, **longest, **options).backward
    kernel = DENSE_NAMES.get(among.kernel, among.kernel)
    same = (alone.kernel, alone.block_m, alone.block_n) == (kernel, among.block_m, among.block_n)
    stored = "sm90" in kernel and one["key"].shape[1] <= among.block_n
    return names[:5] if same and not stored else names[:2]


def is_served(dtype: torch.dtype, device: str, backend: str) -> bool:
    """Packed calls that the composite would pad are refused on a GPU, float64 among them."""
    return device == "cpu" or (backend != "chunked" and dtype != torch.float64)


def regroupings(cases: int) -> int:
    return -(-REGROUPINGS // (cases * len(DTYPES)))


# ---- dense ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_dense(dtype: torch.dtype, name: str, device: str, backend: str) -> None:
    """A batch element has the bits that it has alone, in any place of a batch of any size."""
    of, chance = CASES[name], random.Random(name)
    for _ in range(regroupings(len(CASES))):
        lengths = chance.choice(lengths_of(backend))
        pool = [sequence(of, lengths, dtype, device) for _ in range(3)]
        alone = [dense(of, [one])[0] for one in pool]
        chosen = [chance.randrange(3) for _ in range(chance.choice([2, 3, 8, 17]))]
        for place, (got, which) in enumerate(zip(dense(of, [pool[i] for i in chosen]), chosen, strict=True)):
            assert not differing(got, alone[which]), (lengths, chosen, place, differing(got, alone[which]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("dims", [(0, 1, 2, 3), (1, 2, 3), (0, 3), (1,), (0, 1, 2), ()], ids=str)
def test_a_bias_of_any_shape(dims: tuple[int, ...], dtype: torch.dtype, device: str, backend: str) -> None:
    """What is not shared with other batch elements: results, the other gradients, and that of a bias of its own."""
    of, chance = case(heads=(4, 2, 2)), random.Random(3)
    for count in (2, 9):
        pool = [sequence(of, (70, 96), dtype, device) for _ in range(count)]
        sizes = (count, 4, 70, 96)
        bias = rand(*(size if dim in dims else 1 for dim, size in enumerate(sizes)), dtype=dtype, device=device)

        def run(elements: list[int], bias: Tensor = bias, pool: list[Results] = pool) -> list[Results]:
            chosen = bias[elements] if bias.shape[0] > 1 else bias
            stacked = {n: torch.stack([pool[b][n] for b in elements]) for n in (*QKV, "grad_out", "grad_lse")}
            cotangents = [stacked.pop("grad_out"), stacked.pop("grad_lse")]
            out, lse, grads = gradients(flash_ext.attention, stacked | {"bias": chosen}, cotangents)
            if bias.shape[0] == 1:
                del grads["bias"]
            named = {"out": out, "lse": lse} | grads
            return [{n: t[i] for n, t in named.items()} for i in range(len(elements))]

        order = list(range(count))
        chance.shuffle(order)
        for got, which in zip(run(order), order, strict=True):
            assert not differing(got, run([which])[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_dropout_knows_places_but_no_neighbours(dtype: torch.dtype, device: str, backend: str) -> None:
    """Its map counts batch elements, so that a sequence has other bits in another place."""
    of, state = case(heads=(4, 2, 2), causal=True), torch.tensor([5, 9], device=device)

    def run(sequences: list[Results]) -> list[Results]:
        stacked = {name: torch.stack([s[name] for s in sequences]) for name in sequences[0]}
        leaves = [stacked[name].requires_grad_() for name in QKV]
        options = {"causal": True, "dropout_p": 0.3, "gqa": True, "return_lse": True, "batch_invariant": True}
        out, lse = OPS.attention_with_rng_state(*leaves, state, **options)
        grads = torch.autograd.grad((out, lse), leaves, (stacked["grad_out"], stacked["grad_lse"]))
        named = {"out": out, "lse": lse} | {f"grad of {n}": g for n, g in zip(QKV, grads, strict=True)}
        return [{n: t.detach()[b] for n, t in named.items()} for b in range(len(sequences))]

    pool = [sequence(of, (130, 150), dtype, device) for _ in range(6)]
    first = run(pool[:2])
    assert not differing(run([pool[0], *pool[2:]])[0], first[0])
    assert not differing(run([pool[5], pool[1], *pool[2:4]])[1], first[1])
    assert "out" in differing(run([pool[1], pool[0]])[1], first[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_samples_of_a_vmap(dtype: torch.dtype, device: str, backend: str) -> None:
    """Become batch elements."""
    of = case(heads=(4, 2, 2))
    pool = [sequence(of, (70, 90), dtype, device) for _ in range(5)]
    stacked = [torch.stack([s[name] for s in pool])[:, None] for name in QKV]
    outs = torch.vmap(lambda q, k, v: flash_ext.attention(q, k, v, causal=True, batch_invariant=True))(*stacked)
    for b in range(len(pool)):
        alone = flash_ext.attention(*(t[b] for t in stacked), causal=True, batch_invariant=True)
        assert torch.equal(bits(outs[b]), bits(alone))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_error_rule(dtype: torch.dtype, name: str, device: str, backend: str) -> None:
    of = CASES[name]
    for lengths in ((1, 200), (33, 70), (257, 300)):
        one = sequence(of, lengths, dtype, device)
        inputs = {n: t[None] for n, t in one.items() if not n.startswith("grad_")}
        check(flash_ext.attention, inputs, dict(of.options) | {"batch_invariant": True, "return_lse": True})


@pytest.mark.parametrize("name", ["plain", "grouped", "mask", "everything"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_more_batch_dimensions(dtype: torch.dtype, name: str, device: str, backend: str) -> None:
    """An element of the operator's (2, 3, heads, rows, cols) has the bits that it has alone."""
    of = CASES[name]
    options = dict(of.options) | {"gqa": True}
    options["bottom_right"] = options.pop("align", "") == "bottom_right"
    pool = [sequence(of, (70, 90), dtype, device) for _ in range(6)]
    stacked = {n: torch.stack([s[n] for s in pool]).unflatten(0, (2, 3)) for n in pool[0]}
    cotangents = [stacked.pop("grad_out"), stacked.pop("grad_lse")]
    out, lse, grads = gradients(lambda **call: OPS.attention(**call)[:2], stacked, cotangents, **options)
    whole = {"out": out, "lse": lse} | {f"grad of {n}": grad for n, grad in grads.items()}
    for number, one in enumerate(pool):
        assert not differing({n: t.flatten(0, 1)[number] for n, t in whole.items()}, dense(of, [one])[0])


# ---- packed, nested -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_packed(dtype: torch.dtype, name: str, backward: bool, device: str, backend: str) -> None:
    """A sequence has the bits that it has alone, packed and as `attention` gives them, between any others."""
    of, chance = CASES[name], random.Random(name)
    if not is_served(dtype, device, backend):
        with pytest.raises(flash_ext.AttentionError, match=r"batch_invariant is True, but no kernel|no support"):
            packed(of, [sequence(of, (5, 3), dtype, device)])
        return
    every = lengths_of(backend) if backward else LENGTHS
    pool = [sequence(of, lengths, dtype, device) for lengths in every]
    alone = [packed(of, [one], backward=backward)[0] for one in pool]
    for one, expected in zip(pool, alone, strict=True):
        names = names_of_same_kernels(of, one) if backward else None
        got = differing(dense(of, [one], backward=backward)[0], expected, names)
        assert not got, (one["query"].shape, one["key"].shape, got)
    for _ in range(regroupings(len(CASES))):
        chosen = [chance.randrange(len(pool)) for _ in range(chance.choice([1, 2, 5, 12]))]
        groups = packed(of, [pool[i] for i in chosen], chance, backward=backward)
        for got, which in zip(groups, chosen, strict=True):
            assert not differing(got, alone[which]), (every[which], chosen, differing(got, alone[which]))


@pytest.mark.parametrize("name", ["plain", "grouped", "window", "softcap", "wide"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_nested(dtype: torch.dtype, name: str, device: str, backend: str) -> None:
    of, chance, every = CASES[name], random.Random(name), lengths_of(backend)
    if not is_served(dtype, device, backend):
        return
    pool = [sequence(of, lengths, dtype, device) for lengths in every]
    alone = [packed(of, [one])[0] for one in pool]
    for _ in range(regroupings(5)):
        chosen = [chance.randrange(len(pool)) for _ in range(chance.choice([1, 2, 5]))]
        for got, which in zip(nested(of, [pool[i] for i in chosen]), chosen, strict=True):
            assert not differing(got, alone[which]), (every[which], chosen, differing(got, alone[which]))


# ---- with a cache ---------------------------------------------------------------------------------------------------


def decode(sequences: list[Results], layout: str, chance: random.Random, **options: Any) -> list[tuple[Tensor, Tensor]]:
    """out and lse of each, whose last queries attend to all of its keys in a cache of a random capacity."""
    count, device = len(sequences), sequences[0]["query"].device
    lengths = [s["key"].shape[1] for s in sequences]
    capacity = max(lengths) + chance.choice([0, 5, 64])
    slots = list(range(count + 2))
    chance.shuffle(slots)
    page = chance.choice([16, 21])
    columns = -(-capacity // page)
    pages = torch.randperm(count * columns).view(count, columns)
    call: dict[str, Any] = {"query": torch.stack([s["query"].transpose(0, 1) for s in sequences])}
    for name in ("key", "value"):
        heads, _, cols = sequences[0][name].shape
        shape = (count * columns, page) if layout == "pages" else (len(slots) if layout == "slots" else count, capacity)
        cache = sequences[0][name].new_full((*shape, heads, cols), torch.nan)
        for b, s in enumerate(sequences):
            rows = s[name].transpose(0, 1)
            if layout == "pages":
                at = torch.arange(lengths[b])
                cache[pages[b, at // page].to(device), (at % page).to(device)] = rows
            else:
                cache[slots[b] if layout == "slots" else b, : lengths[b]] = rows
        call[f"{name}_cache"] = cache
    ints = {"dtype": torch.int32, "device": device}
    if layout == "slots":
        call["cache_batch_index"] = torch.tensor(slots[:count], **ints)
    if layout == "pages":
        call["block_table"] = pages.to(**ints)
    out, lse = flash_ext.attention_with_cache(
        **call, cache_seqlens=torch.tensor(lengths, **ints), return_lse=True, batch_invariant=True, **options
    )
    return [(out[b].transpose(0, 1), lse[b]) for b in range(count)]


@pytest.mark.parametrize("queries", [1, 3, 40])
@pytest.mark.parametrize("layout", ["dense", "slots", "pages"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_decode(dtype: torch.dtype, layout: str, queries: int, device: str, backend: str) -> None:
    """Of any other sequences, slots, pages and capacities; and what `attention` gives of the sequence alone."""
    of, chance = case(heads=(4, 2, 2), dims=(64, 64)), random.Random(queries)
    if not is_served(dtype, device, backend):
        return
    pool = [sequence(of, (queries, keys), dtype, device) for keys in (1, 40, 70, 200, 333)]
    for number in range(-(-REGROUPINGS // 36)):
        options = {"window": (50, 0)} if number % 2 else {}
        same = options | {"align": "bottom_right", "causal": True, "return_lse": True, "batch_invariant": True}
        alone = [flash_ext.attention(**{n: one[n][None] for n in QKV}, **same) for one in pool]
        chosen = [chance.randrange(len(pool)) for _ in range(chance.choice([1, 2, 5, 16]))]
        for (out, lse), which in zip(decode([pool[i] for i in chosen], layout, chance, **options), chosen, strict=True):
            assert torch.equal(bits(out), bits(alone[which][0][0])), (chosen, which)
            assert torch.equal(bits(lse), bits(alone[which][1][0])), (chosen, which)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("layout", ["dense", "slots", "pages"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
def test_decode_by_whom_it_may_be(dtype: torch.dtype, layout: str, queries: int, device: str) -> None:
    """No backend is named: a kernel for decoding alone, where there is one, has bits of its own, of no neighbour."""
    of, chance = case(heads=(8, 2, 2), dims=(64, 64)), random.Random(queries)
    pool = [sequence(of, (queries, keys), dtype, device) for keys in (5, 40, 333, 2000)]
    alone = [decode([one], layout, chance)[0] for one in pool]
    for _ in range(6):
        chosen = [chance.randrange(len(pool)) for _ in range(chance.choice([2, 7, 40]))]
        for got, which in zip(decode([pool[i] for i in chosen], layout, chance), chosen, strict=True):
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, alone[which], strict=True)), (chosen, which)


# ---- that it can fail -----------------------------------------------------------------------------------------------


def test_without_it_something_differs() -> None:
    """On a CPU with threads: sums over the queries of a few heads are split among them."""
    of = case(heads=(4, 1, 1))
    pool = [sequence(of, (700, 64), torch.float32, "cpu") for _ in range(9)]
    with flash_ext.use_backend("cpu"):
        loose, strict = (dense(of, pool, batch_invariant=value)[0] for value in (False, True))
        assert {"grad of key", "grad of value"} & differing(loose, dense(of, pool[:1], batch_invariant=False)[0])
        assert not differing(strict, dense(of, pool[:1])[0])
