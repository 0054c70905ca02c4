"""Whether a call of a random case is right: the error rule of helpers.py, and NaN and infinities where eager has them.

`judge(case, device, backend)` returns what is wrong, a sentence for each tensor, or a refusal. The truth and eager
attention (flash_ext/reference.py) run on the same device, and one transfer brings all that is asked of a case.

NaN and infinities: an element of ours must be of the kind (number, NaN, inf, -inf) that eager attention has in float64
or, where its own dtype underflows or overflows, in that. Eager attention multiplies what a mask or the band hides by
0, so that a NaN there shows; a kernel that never reads it does not show it. Where they differ, an attention that leaves
hidden pairs out (`_visible_only`) is asked as well.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from helpers import HALF, RESAMPLES, jittered, leaf
from torch import Tensor

import flash_ext
from flash_ext import reference
from fuzz.cases import DTYPES, Case, build, equal_number
from fuzz.fused import fused_results, gradients, kind_of

Tensors = dict[str, Tensor]
OPS = torch.ops.flash_ext
COTANGENTS = {"out": "grad", "lse": "grad_lse"}
NATIVE = {"is_causal": "causal", "attn_mask": "mask"}


@dataclass
class Verdict:
    wrong: list[str]
    refusal: str | None = None


# `chunked` multiplies the queries of a group of heads at once, eager attention those of each head: torch sums such
# products in different orders, and in float32 with few queries either may be the better one. Seen: 3.27 times the rule.
# Sums over the heads of a group are longer by so many: of 8 heads 6.64 times the rule was seen.
CHUNKED_FACTOR = 4.0


def judge(case: Case, device: str, backend: str | None) -> Verdict:
    inputs = build(case, device)
    try:
        got, keep = _ours(case, inputs, device, backend)
    except RuntimeError as error:  # autograd's threads raise the plain type
        text = str(error).splitlines()[0]
        if not isinstance(error, flash_ext.AttentionError) and " refuses: " not in text:
            raise
        return Verdict([], refusal=text)
    truth, rough = _truth(case, inputs, keep), _rough(case, inputs, keep)
    if got.keys() != truth.keys():
        return Verdict([f"results {sorted(got)}, expected {sorted(truth)}"])
    for name in got:
        if got[name].shape != truth[name].shape:
            return Verdict([f"{name}: shape {tuple(got[name].shape)}, expected {tuple(truth[name].shape)}"])
    kinds = {name: [truth[name], rough[name]] for name in got}
    counts = _transfer({name: _misplaced(got[name], kinds[name]) for name in got})
    if any(map(any, counts.values())):
        visible = _visible_only(case, inputs, keep)
        for name, also in visible.items():
            kinds[name].append(also)
            truth[name] = torch.where(truth[name].isfinite(), truth[name], also)
        if case.special is not None and case.special.tensor == "value" and case.dtype != "float64":
            kinds["out"].append(torch.where(_faint(case, inputs, keep), torch.nan, kinds["out"][0]))
        counts = _transfer({name: _misplaced(got[name], kinds[name]) for name in got})
    wrong = []
    for name, found in counts.items():
        if case.special is not None and name[:4] == "grad":
            found[2] = 0.0  # in gradients NaN may stand for an infinity
        shown = [
            f"{what} {int(count)}" for what, count in zip(("hidden", "added", "other"), found, strict=True) if count
        ]
        if shown:
            wrong.append(f"{name}: NaN and infinities: {', '.join(shown)} of {got[name].numel()}")
    names = [name for name in got if not any(counts[name]) or case.special is None]
    errors = _transfer({name: _errors(case, name, got[name], truth[name], rough[name]) for name in names})
    # What eager's error does not allow, that of a fused kernel's arithmetic may. Either is a random number; over a few
    # elements one draw may be luckily small: draw again before failing.
    limits = {name: errors[name][2:] for name in names}
    for again in range(4 * RESAMPLES + 1):
        if all(_holds(errors[name], limits[name]) for name in names):
            break
        other = inputs
        if again > 0:
            other = jittered(inputs) if case.numbers == "normal" else build(case, device, again)
        if case.special is not None:  # beside it numbers are as right as without it
            other = _without_special(case, other)
        if other is not inputs:
            rough, truth = _rough(case, other, keep), _truth(case, other, keep)
        fused = _fused(case, other, keep, device, backend)
        more = _transfer({name: _errors(case, name, fused[name], truth[name], rough[name]) for name in names})
        limits = {
            name: [max(limits[name][i], more[name][2 + i], 2 * more[name][i]) for i in range(2)] for name in names
        }
    if _is_chunked(case, device, backend) and case.dtype == "float32":
        factor = max(CHUNKED_FACTOR, _group(case))
        limits = {name: [factor * limit for limit in values] for name, values in limits.items()}
    for name in names:
        if not _holds(errors[name], limits[name]):
            text = ", ".join(
                f"{measure} {seen:.3g} is {seen / limit:.2f} of the limit"
                for measure, seen, limit in zip(("max", "rms"), errors[name], limits[name], strict=False)
                if not seen <= limit
            )
            wrong.append(f"{name}: {text}")
    return Verdict(wrong)


def _is_chunked(case: Case, device: str, backend: str | None) -> bool:
    """A GPU's kernels end at head dim 256."""
    return backend == "chunked" or (device == "cuda" and max(shape[-1] for shape in case.shapes) > 256)


def _holds(errors: list[float], limits: list[float]) -> bool:
    return errors[0] <= limits[0] and errors[1] <= limits[1]


def _transfer(values: Tensors) -> dict[str, Any]:
    """All of them as numbers, in one transfer."""
    if not values:
        return {}
    flat = torch.cat([value.double().reshape(-1) for value in values.values()]).tolist()
    result: dict[str, Any] = {}
    for name, value in values.items():
        part, flat = flat[: value.numel()], flat[value.numel() :]
        result[name] = part if value.dim() else part[0]
    return result


def _kind(x: Tensor) -> Tensor:
    """0 for a number, 1 for NaN, 2 and 3 for the infinities."""
    return x.isnan() * 1 + x.isposinf() * 2 + x.isneginf() * 3


def _misplaced(got: Tensor, references: list[Tensor]) -> Tensor:
    """How many elements are of a kind that no reference has: numbers, not numbers where all references have numbers,
    and others. The first reference is the truth, which may be too large for our dtype."""
    kind = _kind(got)
    bad, number = torch.ones_like(kind, dtype=torch.bool), torch.ones_like(kind, dtype=torch.bool)
    for reference_ in (references[0].to(got.dtype), *references):
        bad &= kind != _kind(reference_)
        number &= reference_.isfinite()
    return torch.stack(
        [(bad & (kind == 0)).sum(), (bad & (kind != 0) & number).sum(), (bad & (kind != 0) & ~number).sum()]
    )


def _without_special(case: Case, inputs: Tensors) -> Tensors:
    """The same call with 0 where it has NaN or an infinity; a bias keeps what hides a key."""
    assert case.special is not None
    name = _argument(case, case.special.tensor)
    tensor = inputs[name]
    odd = tensor.isnan() | tensor.isposinf()
    if case.low is None or case.special.tensor != "bias":
        odd = ~tensor.isfinite()
    return inputs | {name: tensor.masked_fill(odd, 0.0)}


def _faint(case: Case, inputs: Tensors, keep: Tensor | None) -> Tensor:
    """Where out meets an infinity of value by a probability below the normal numbers of float32, or below float16's
    least: tensor cores, ex2 and rounding take that for 0, and 0 times infinity is NaN, where eager attention, which
    keeps it, has infinity."""
    wide = {name: t.double() if t.is_floating_point() else t for name, t in _cast(case, inputs).items()}
    infinite, keys = wide["value"].isinf().double(), wide["value"].size(-2)
    wide["value"] = torch.eye(keys, dtype=torch.float64, device=infinite.device).expand(*infinite.shape[:-1], keys)
    options = tuple(dict(case.options, return_lse=True).items())
    returned = _reference(replace(case, options=options), _leaves(case, wide), keep)
    p, lse = returned["out"].detach(), returned["lse"].detach()
    if infinite.dim() > 2:
        infinite = infinite.repeat_interleave(p.size(-3) // infinite.size(-3), -3)
    least = 2.0**-23 if "float16" in (case.dtype, case.autocast) else 2.0**-125
    # float32 holds the pair's score and the largest to half a unit of each; the row's lse is as large as those.
    rounding = torch.where(lse.isfinite(), lse.abs() * 2.0**-22, 0.0).unsqueeze(-1)
    return (p < least * rounding.exp()).double() @ infinite > 0


def _errors(case: Case, name: str, got: Tensor, truth: Tensor, rough: Tensor) -> Tensor:
    """(max, rms) of the error where both are numbers, and what the rule allows for each (helpers.py)."""
    if truth.numel() == 0:
        return torch.zeros(4, dtype=torch.float64, device=truth.device)
    narrow = DTYPES[case.autocast] if case.autocast and got.dtype != torch.float32 else got.dtype
    if case.autocast and rough.dtype in HALF:
        narrow = rough.dtype
    finite = truth.isfinite() & got.isfinite()
    zero = torch.zeros((), dtype=torch.float64, device=truth.device)
    error = torch.where(finite, got.double() - truth, zero)
    eager = torch.where(finite & rough.isfinite(), rough.double() - truth, zero)
    largest = torch.where(finite, truth, zero).abs().amax()
    if narrow in HALF:
        # Half a unit; and what was summed in float32 may lie on the other side of a midpoint.
        floor = (largest * (torch.finfo(narrow).eps / 2) * (1 + 2**-8)).clamp_min(1e-6)
    else:
        floor = largest.clamp_min(1) * 1e-12 if narrow == torch.float64 else torch.full_like(largest, 1e-6)
    options = dict(case.options)
    if case.numbers == "equal" and name in ("grad of query", "grad of key"):
        floor = floor * equal_number(case)  # sums of it times numbers whose sum is 0
    if case.numbers == "integers" and name in ("grad of query", "grad of key"):
        floor = floor * max(1.0, abs(options.get("scale") or 1.0))  # the same: of the scale
    if case.special is not None and narrow == torch.float16:
        floor = floor * 4  # beside an infinity dS is not scaled to the range of float16
    capped = case.special is not None and case.special.tensor in ("query", "key") and options.get("softcap")
    if name == "lse" and (case.numbers == "integers" or capped):
        # Exact scores, as the softcap of infinite ones, make eager's lse exact but for its last rounding; ours has two
        # or three, and half types a coarser exponential.
        floor = torch.maximum(floor, largest * (2**-20 if DTYPES[case.autocast or case.dtype] in HALF else 2**-22))
    # Eager overflows: its error says nothing, and the result must be roughly right.
    overflows = (finite & ~rough.isfinite()).any()
    floor = torch.where(overflows, torch.maximum(floor, largest * 2**-7), floor)
    measures = [error.abs().amax(), error.square().mean().sqrt(), eager.abs().amax(), eager.square().mean().sqrt()]
    return torch.stack([*measures[:2], *(torch.maximum(2 * x, floor) for x in measures[2:])])


# ---- the calls ------------------------------------------------------------------------------------------------------


def _gradients(case: Case, outputs: dict[str, Tensor], leaves: Tensors, cotangents: Tensors) -> Tensors:
    """Outputs, and the gradients that the case wants, by name."""
    wanted = {name: leaves[_argument(case, name)] for name in case.wants}
    used = {name: cotangents[COTANGENTS[name]] for name in case.outputs}
    return {name: output.detach() for name, output in outputs.items()} | gradients(outputs, wanted, used)


def _argument(case: Case, name: str) -> str:
    return "attn_mask" if name == "bias" and case.entry == "drop_in" else name


def _leaves(case: Case, inputs: Tensors) -> Tensors:
    wanted = {_argument(case, name) for name in case.wants}
    return {name: leaf(tensor) if name in wanted else tensor for name, tensor in inputs.items() if name[:4] != "grad"}


def _ours(case: Case, inputs: Tensors, device: str, backend: str | None) -> tuple[Tensors, Tensor | None]:
    """What the package gives, and which probabilities dropout kept."""
    leaves, options = _leaves(case, inputs), dict(case.options)
    autocast = torch.autocast(device, DTYPES[case.autocast]) if case.autocast else nullcontext()
    with flash_ext.use_backend(backend) if backend else nullcontext():
        torch.manual_seed(case.number)
        with autocast:
            if case.entry == "drop_in":
                options["enable_gqa"] = _is_grouped(case)
                call = flash_ext.scaled_dot_product_attention
            else:
                call = flash_ext.attention
            returned = call(**leaves, dropout_p=case.dropout_p, **options)
        outputs = dict(zip(("out", "lse"), returned if isinstance(returned, tuple) else (returned,), strict=False))
        results = _gradients(case, outputs, leaves, inputs)
    keep = None
    if case.dropout_p > 0:
        # The state that the call drew: the same seed gives it again.
        torch.manual_seed(case.number)
        plain = [torch.zeros(1, 1, 1, 8, device=device) for _ in range(3)]
        state = OPS.attention(*plain, dropout_p=case.dropout_p)[2]
        scores = case.scores
        keep = OPS.dropout_mask(state, case.dropout_p, int(torch.Size(scores[:-2]).numel()), *scores[-2:]).view(scores)
    return results, keep


def _is_grouped(case: Case) -> bool:
    heads = {shape[-3] for shape in case.shapes if len(shape) > 2}
    return len(heads) > 1 and case.shapes[0][-3] == max(heads)


def _group(case: Case) -> int:
    """How many query heads share a head of key or value."""
    return case.scores[-3] // min(shape[-3] for shape in case.shapes[1:]) if len(case.scores) > 2 else 1


def _reference(case: Case, leaves: Tensors, keep: Tensor | None, **extra: Any) -> dict[str, Tensor]:
    options = {NATIVE.get(name, name): value for name, value in case.options if name != "deterministic"}
    arguments = dict(leaves)
    if "attn_mask" in arguments:
        mask = arguments.pop("attn_mask")
        arguments["mask" if mask.dtype == torch.bool else "bias"] = mask
    returned = reference.attention(**arguments, **options, dropout_p=case.dropout_p, keep=keep, **extra)
    return dict(zip(("out", "lse"), returned if isinstance(returned, tuple) else (returned,), strict=False))


def _cast(case: Case, inputs: Tensors) -> Tensors:
    """What autocast makes of them."""
    if not case.autocast:
        return inputs
    to = DTYPES[case.autocast]
    return {name: t.to(to) if name in ("query", "key", "value") else t for name, t in inputs.items()}


def _truth(case: Case, inputs: Tensors, keep: Tensor | None) -> Tensors:
    wide = {name: t.double() if t.is_floating_point() else t for name, t in _cast(case, inputs).items()}
    leaves = _leaves(case, wide)
    return _gradients(case, _reference(case, leaves, keep), leaves, wide)


def _rough(case: Case, inputs: Tensors, keep: Tensor | None) -> Tensors:
    """Eager attention in the dtype of the inputs, each intermediate of a half type rounded."""
    narrow = _cast(case, inputs)
    leaves = _leaves(case, narrow)
    outputs = _reference(case, leaves, keep, rounded=narrow["query"].dtype in HALF)
    return _gradients(case, outputs, leaves, inputs)


def _fused(case: Case, inputs: Tensors, keep: Tensor | None, device: str, backend: str | None) -> Tensors:
    """Attention with what fused kernels round otherwise than eager attention."""
    narrow = _cast(case, inputs)
    leaves = _leaves(case, narrow)
    kind = kind_of(
        narrow["query"].dtype,
        case.scores[-1],
        kernels=device == "cuda" and not _is_chunked(case, device, backend),
        added=case.bias is not None or case.slopes is not None,
        wants=case.wants,
        exact=case.numbers != "normal",
        alike=case.numbers == "equal",
        group=_group(case),
    )
    wanted = {name: leaves[_argument(case, name)] for name in case.wants}
    cotangents = {name: inputs[COTANGENTS[name]] for name in case.outputs}
    return fused_results(kind, lambda: _reference(case, leaves, keep), wanted, lambda _: cotangents)


def _visible_only(case: Case, inputs: Tensors, keep: Tensor | None, hide: Tensor | None = None) -> Tensors:
    """The truth with hidden pairs of query and key left out of every sum, whatever stands there.

    Small cases alone: it has an element for each query, key and column. hide: pairs that are hidden besides.
    """
    wide = {name: t.double() if t.is_floating_point() else t for name, t in _cast(case, inputs).items()}
    leaves = _leaves(case, wide)
    arguments, options = dict(leaves), {NATIVE.get(name, name): value for name, value in case.options}
    mask = arguments.pop("attn_mask", None)
    if mask is not None:
        arguments["mask" if mask.dtype == torch.bool else "bias"] = mask
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    queries, keys = query.size(-2), key.size(-2)
    band = {name: options[name] for name in ("causal", "window", "align") if name in options}
    visible = reference.band_mask(queries, keys, **band, device=query.device)
    if "mask" in arguments:
        visible = visible & arguments["mask"]
    visible = (visible if hide is None else visible & ~hide).expand(case.scores)
    if query.dim() > 2:
        heads = case.scores[-3]
        key, value = (t.repeat_interleave(heads // t.size(-3), -3) for t in (key, value))

    def shown(tensor: Tensor, seen: Tensor) -> Tensor:
        return torch.where(seen, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))

    pair = visible.unsqueeze(-1)
    s = (shown(query.unsqueeze(-2), pair) * shown(key.unsqueeze(-3), pair)).sum(-1)
    scale = options.get("scale")
    s = s * (query.size(-1) ** -0.5 if scale is None else scale)
    if options.get("softcap"):
        s = options["softcap"] * torch.tanh(s / options["softcap"])
    if "bias" in arguments:
        s = s + shown(arguments["bias"], visible)
    if "alibi_slopes" in arguments:
        offset = keys - queries if options.get("align") == "bottom_right" else 0
        rows = torch.arange(queries, device=query.device)[:, None] + offset
        away = (rows - torch.arange(keys, device=query.device)).abs()
        s = s - arguments["alibi_slopes"][..., None, None] * away
    s = s.masked_fill(~visible, -torch.inf)
    empty = (s == -torch.inf).all(-1, keepdim=True)
    if hide is None and empty.any():  # nor does anything of a row without keys
        return _visible_only(case, inputs, keep, empty)
    s = s.masked_fill(empty, 0.0)
    p = torch.softmax(s, -1).masked_fill(empty, 0.0)
    if case.dropout_p > 0:
        p = p * 0.0 if case.dropout_p >= 1 else p * keep / (1 - case.dropout_p)
    outputs = {"out": (p.unsqueeze(-1) * shown(value.unsqueeze(-3), pair)).sum(-2)}
    if options.get("return_lse"):
        outputs["lse"] = reference._logsumexp(s).masked_fill(empty.squeeze(-1), -torch.inf)
    return _gradients(case, outputs, leaves, wide)
