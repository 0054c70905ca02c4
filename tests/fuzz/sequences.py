"""Random calls of `attention_varlen` and `attention_with_cache`, each reproduced by its number alone.

`run_packed(seed, number, device, backend)` and `run_cache` return what is wrong, or the sentence of a refusal. What is
rare in programs and has broken kernels is drawn often: lengths of 0 and 1 and around a tile, rows of nobody, more room
than rows, pages of odd sizes, slots in any order, caches that are nearly full. Rows of nobody are NaN.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from caches import appended, attended, example
from helpers import Results, Yardstick, check, cotangents_of, keep_mask, leaf, rand
from packed import Heads, Packed, Side, packed
from torch import Tensor

import flash_ext
from flash_ext import reference
from fuzz.cases import DTYPES
from fuzz.fused import fused_results, kind_of
from fuzz.judge import Verdict

LENGTHS = (0, 0, 1, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 127, 128, 129, 200, 257)
MOST_PAIRS = 120_000  # of a packed call: queries * keys * heads of all sequences
HEADS = ((1, 1, 1), (2, 2, 2), (4, 2, 2), (4, 1, 1), (6, 3, 3), (8, 2, 2), (4, 4, 2), (3, 1, 3))
DIMS = (8, 16, 32, 40, 64, 64, 64, 72, 96, 128, 128, 128, 160, 256)
STATE = torch.ops.flash_ext.attention


def generator(kind: str, seed: int, number: int) -> random.Random:
    torch.manual_seed(1_000_003 * seed + number)
    return random.Random(f"{kind}:{seed}:{number}")


def asked_for(backend: str | None) -> AbstractContextManager[Any]:
    return flash_ext.use_backend(backend) if backend else nullcontext()


def judged(run: Callable[[], list[str]]) -> Verdict:
    try:
        return Verdict(run())
    except AssertionError as error:
        return Verdict([str(error).replace("\n", "; ")])
    except RuntimeError as error:  # autograd's threads raise the plain type
        text = str(error).splitlines()[0]
        if not isinstance(error, flash_ext.AttentionError) and " refuses: " not in text:
            raise
        return Verdict([], refusal=text)


# ---- packed ---------------------------------------------------------------------------------------------------------


def draw_packed(seed: int, number: int, device: str) -> Packed:
    rng = generator("packed", seed, number)
    chance = lambda p: rng.random() < p  # noqa: E731
    hq, hk, hv = rng.choice(HEADS)
    dim = rng.choice(DIMS)
    heads = Heads(hq, hk, hv, dim, dim if chance(0.8) else rng.choice(DIMS))
    dtype = DTYPES[rng.choice(("bfloat16", "bfloat16", "bfloat16", "float16", "float16", "float32", "float64"))]
    lengths: list[tuple[int, int]] = []
    left, same = MOST_PAIRS, chance(0.5)
    for _ in range(rng.choice((1, 1, 2, 3, 5, 9, 20))):
        q = rng.choice(LENGTHS) if chance(0.8) else rng.randint(0, 300)
        k = q if same else rng.choice(LENGTHS)
        if q * k * hq <= left:
            lengths.append((q, k))
            left -= q * k * hq
    lengths = lengths or [(1, 1)]

    def side(which: int) -> Side:
        gaps = [rng.choice((0, 0, 0, 1, 5, 70)) for _ in range(3)]
        return Side(tuple(pair[which] for pair in lengths), *gaps)

    options: dict[str, Any] = {"return_lse": chance(0.5), "causal": chance(0.5), "deterministic": chance(0.3)}
    options |= {"align": "bottom_right"} if chance(0.4) else {}
    options |= {"window": tuple(rng.choice((None, 0, 1, 9, 64, 150)) for _ in range(2))} if chance(0.25) else {}
    options |= {"softcap": rng.choice((1.0, 5.0, 30.0))} if chance(0.15) else {}
    options |= {"scale": rng.choice((0.02, 0.3, -0.1))} if chance(0.15) else {}
    options |= {"dropout_p": rng.choice((0.1, 0.5))} if chance(0.12) else {}
    call = packed(side(0), side(1), heads, dtype=dtype, device=device, **options)
    inputs: dict[str, Tensor] = {}
    shape = [size if chance(0.7) else 1 for size in call.scores]
    if chance(0.2):
        inputs["mask"] = (torch.rand(shape) > rng.choice((0.1, 0.6))).to(device)
    if chance(0.25):
        wide = torch.float32 if chance(0.3) and dtype != torch.float64 else dtype
        inputs["bias"] = rand(*[s if chance(0.8) else 1 for s in call.scores], dtype=wide, device=device)
    if chance(0.15):
        per = call.scores[:2] if chance(0.5) else call.scores[1:2]
        inputs["alibi_slopes"] = (2 ** -(8 * torch.rand(per))).to(device)
    if chance(0.15):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        inputs["sinks"] = rand(call.scores[1], dtype=wide, device=device)
    return call.with_inputs(**inputs)


def fused_alone(call: Packed, extra: Mapping[str, Tensor], kernels: bool) -> Yardstick:
    """What fused arithmetic may give: each sequence by itself, as judge.py has it for a dense call."""
    meaning = {name: value for name, value in call.options.items() if name != "deterministic"} | dict(extra)
    dtype, heads = call.inputs["query"].dtype, call.inputs["query"].shape[1]
    group = heads // min(call.inputs[name].shape[1] for name in ("key", "value"))

    def yardstick(inputs: Mapping[str, Tensor]) -> Results:
        leaves = {name: leaf(t) for name, t in inputs.items()}
        wanted = {name: t for name, t in leaves.items() if t.requires_grad}
        wide = torch.promote_types(dtype, torch.float32)
        query, width = leaves["query"], leaves["value"].shape[2]
        empty = {"out": query.new_zeros(call.q.rows, heads, width)}
        if meaning.get("return_lse"):
            empty["lse"] = query.new_full((heads, call.q.rows), -torch.inf, dtype=wide)
        given = dict(zip(empty, cotangents_of(empty.values(), dtype), strict=True))
        results = {name: t.detach() for name, t in empty.items()}
        results |= {f"grad of {name}": torch.zeros_like(t) for name, t in wanted.items()}
        for b, rows in enumerate(call.q.ranges):
            if len(rows) == 0:
                continue
            at = slice(rows.start, rows.stop)
            of_b = {name: t[at].transpose(0, 1)[None] if name == "out" else t[None, :, at] for name, t in given.items()}
            kind = kind_of(
                dtype, call.k.lengths[b], kernels=kernels, added=bool({"bias", "alibi_slopes"} & inputs.keys()),
                wants=wanted, group=group,
            )  # fmt: skip

            def attend(b: int = b) -> Results:
                returned = reference.attention(**call.cut(meaning | leaves, b))
                return dict(zip(empty, returned if isinstance(returned, tuple) else (returned,), strict=True))

            for name, t in fused_results(kind, attend, wanted, lambda _, of_b=of_b: of_b).items():
                if name == "out":
                    results[name][at] = t[0].transpose(0, 1)
                elif name == "lse":
                    results[name][:, at] = t[0]
                else:
                    results[name] += t
        return results

    return yardstick


def run_packed(seed: int, number: int, device: str, backend: str | None) -> Verdict:
    call = draw_packed(seed, number, device)
    p = call.options.get("dropout_p", 0.0)
    extra: dict[str, Tensor] = {}
    if p > 0:  # the state that the call draws: the same seed gives it again
        torch.manual_seed(number)
        state = STATE(*[torch.zeros(1, 1, 1, 8, device=device) for _ in range(3)], dropout_p=p)[2]
        extra["keep"] = keep_mask(state, p, call.scores[:2], *call.scores[2:])

    def ours(**arguments: Any) -> Any:
        torch.manual_seed(number)
        with asked_for(backend):
            return call.call(**arguments)

    meaning = {name: value for name, value in call.options.items() if name != "deterministic"}

    def run() -> list[str]:
        got = check(
            ours,
            call.inputs,
            truth=Packed(call.q, call.k, call.inputs, meaning).alone(reference.attention),
            extra=extra,
            fused=fused_alone(call, extra, device == "cuda" and backend != "chunked"),
        )
        odd = [name for name, x in got.items() if name != "lse" and not x.isfinite().all()]
        unused = [name for name in ("out", "grad of query") if name in got and got[name][call.q.unused].any()]
        unused += [f"grad of {n}" for n in ("key", "value") if got[f"grad of {n}"][call.k.unused].any()]
        return [f"{name} is not finite" for name in odd] + [f"{name} is not 0 in rows of nobody" for name in unused]

    return judged(run)


def describe_packed(seed: int, number: int) -> str:
    call = draw_packed(seed, number, "cpu")
    shapes = {name: tuple(x.shape) for name, x in call.inputs.items()}
    return f"packed {call.inputs['query'].dtype} {shapes} {call.q} {call.k} {call.options}"


# ---- caches ---------------------------------------------------------------------------------------------------------


def draw_cache(seed: int, number: int) -> dict[str, Any]:
    """The arguments of `caches.example`."""
    rng = generator("cache", seed, number)
    chance = lambda p: rng.random() < p  # noqa: E731
    hq, hk, _ = rng.choice(HEADS)
    dim, dtype = rng.choice(DIMS), DTYPES[rng.choice(("bfloat16",) * 4 + ("float16",) * 3 + ("float32",))]
    batch, rows = rng.choice((1, 1, 2, 3, 6, 17)), rng.choice((8, 48, 130, 300))
    queries = rng.choice((1, 1, 1, 1, 2, 3, 4, 7, 8, 16, 17, 40, 65))
    added = rng.choice((None, 1, 1, 2, queries))
    room = rows - (added or 0)
    if room < 0:
        added, room = None, rows
    lengths = tuple(rng.choice((0, min(1, room), room, room // 2, rng.randint(0, room))) for _ in range(batch))
    case: dict[str, Any] = {
        "queries": queries, "added": added, "lengths": lengths, "rows": rows, "dtype": dtype,
        "heads": Heads(hq, hk, hk, dim, dim if chance(0.85) else rng.choice(DIMS)),
        "fp8": chance(0.25), "slopes": chance(0.15), "sinks": chance(0.15), "causal": chance(0.8),
    }  # fmt: skip
    if chance(0.5):
        case["page"] = rng.choice((1, 3, 7, 16, 16, 64, 128))
    elif chance(0.3):
        case["index"] = tuple(rng.sample(range(batch + 2), batch))
    if added is not None and chance(0.4):
        case |= {"rotary": rng.choice((8, dim)) // 2 * 2, "rotary_interleaved": chance(0.5)}
    if chance(0.2):
        case["window"] = (rng.choice((None, 0, 5, 100)), rng.choice((None, 0, 3)))
    case |= {"softcap": rng.choice((2.0, 30.0))} if chance(0.15) else {}
    case |= {"scale": rng.choice((0.02, 0.4))} if chance(0.15) else {}
    return case


def run_cache(seed: int, number: int, device: str, backend: str | None) -> Verdict:
    """Results within a few units of their type, of the largest that a value has; new rows within one."""
    case = draw_cache(seed, number)
    call = example(**case, device=device)
    expected = appended(call)
    unit = torch.finfo(case["dtype"]).eps if case["dtype"] != torch.float32 else 2.0**-16
    turned = 2.0 if "rotary" in case else 1.0

    def run() -> list[str]:
        wrong = []
        with asked_for(backend):
            out, lse = flash_ext.attention_with_cache(**call, return_lse=True)
        left = [call[name].cpu().double() for name in ("key_cache", "value_cache")]
        for name, got, right in zip(("key_cache", "value_cache"), left, expected, strict=True):
            # Of a new row; one that is turned is a difference of numbers as large as those of query.
            least = 2.0**-9 if case["fp8"] else 4 * unit if "rotary" in case else 0.0
            allowed = (0.13 if case["fp8"] else 2 * unit) * right.abs().nan_to_num() + least
            if not torch.equal(got.isnan(), right.isnan()):
                wrong.append(f"{name} is written elsewhere")
            elif not ((got - right).abs().nan_to_num() <= allowed).all():
                wrong.append(f"{name} has other new rows")
        true_out, true_lse = attended(call, *left)
        largest = max([x.abs().nan_to_num().max().item() for x in left[1:]] + [1e-3]) * (1.5 if case["fp8"] else 1.0)
        errors = {"out": ((out.cpu().double() - true_out).abs().max() / largest).item()}
        seen = true_lse.isfinite()
        if not torch.equal(seen, lse.cpu().isfinite()):
            wrong.append("lse is -inf elsewhere")
        scores = true_lse[seen].abs().max().item() + 8 if seen.any() else 8.0
        errors["lse"] = ((lse.cpu().double() - true_lse)[seen].abs().max() / scores).item() if seen.any() else 0.0
        for name, error in errors.items():
            if not error <= 4 * turned * unit:
                wrong.append(f"{name}: error {error:.3g} of the largest, {error / unit:.1f} units")
        return wrong

    return judged(run)


def describe_cache(seed: int, number: int) -> str:
    return f"cache {draw_cache(seed, number)}"
