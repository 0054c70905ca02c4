"""The native call, with every option; partial results over disjoint keys joined; and the autograd function to read."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_ext import nested, ops, script
from flash_ext.arguments import Window, check_band, flag, number
from flash_ext.errors import AttentionError

_eager = ops.C.attention if ops.C else None
_operator = torch.ops.flash_ext.attention.default
_backward = torch.ops.flash_ext.attention_backward.default


def _differ(a: int, b: int) -> bool:
    """Whether two sizes are known to differ. The operator checks one that only the run knows, as a mask's kept rows."""
    if torch.compiler.is_compiling() or isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt):
        from torch.fx.experimental.symbolic_shapes import guard_or_true

        return not guard_or_true(a == b)
    return not isinstance(a, Tensor) and a != b  # torch.jit.trace records sizes as tensors


def check_native(query: Tensor, key: Tensor, value: Tensor, window: Window | None, align: str) -> Window:
    """What only the native call knows: 4 dimensions, and what ``check_band`` knows."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is of type {type(tensor).__name__}; it must be a torch.Tensor")
        if tensor.dim() != 4:
            raise AttentionError(
                f"{name} of shape {tuple(tensor.shape)} has {tensor.dim()} dimensions; "
                "attention takes 4: (batch, heads, length, head_dim)"
            )
    if _differ(query.shape[0], key.shape[0]) or _differ(query.shape[0], value.shape[0]):
        raise AttentionError(
            f"query, key and value have batch sizes {query.shape[0]}, {key.shape[0]} and {value.shape[0]}; "
            "they must be equal (expand a shared one)"
        )
    return check_band(window, align)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    align: str = "top_left",
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention with every option; all combine.

    Order: scale, softcap, + bias + alibi, masks, softmax, dropout. With offset 0 (``align="top_left"``) or S - L
    (``"bottom_right"``), query i stands at key i + offset.

    Args:
        query: (B, Hq, L, E), any strides; float16, bfloat16, float32, float64 or float8_e4m3fn, one dtype for all
            three.
        key: (B, Hk, S, E); Hk divides Hq, query head h reads key head h // (Hq / Hk).
        value: (B, Hv, S, Ev); Hv divides Hq and may differ from Hk.
        causal: key j is seen by query i when j <= i + offset.
        window: (left, right): key j is seen when i + offset - left <= j <= i + offset + right; None is unbounded.
        align: where the diagonal lies when L != S: "top_left" or "bottom_right".
        mask: bool, True = attend; broadcastable to (B, Hq, L, S). In large calls on a GPU, tiles that it hides are
            left out.
        bias: float32 or query's dtype, broadcastable to (B, Hq, L, S), added after softcap; with gradient.
        sinks: (Hq,) or (B, Hq) float32 (float64 beside float64), with gradient: one more logit in each row of a head,
            which takes its part of the softmax and gives no value. It is part of lse.
        softcap: c in c * tanh(score / c) on the scaled score; 0 is off.
        alibi_slopes: (Hq,) or (B, Hq) float32, with gradient; adds -slope * |i + offset - j| (Press et al.,
            arXiv:2108.12409).
        dropout_p: probability from 0 to 1.
        scale: factor of the scores; ``1 / sqrt(E)`` by default; any finite number.
        deterministic: bit-identical results over runs; None takes ``torch.are_deterministic_algorithms_enabled()``.
        batch_invariant: the bits of a batch element, of out, lse and gradients, depend on nothing else in the batch,
            and results are deterministic. Slower (docs/use/determinism.md says how much, and what is left out).
        return_lse: return (out, lse).
        q_descale, k_descale, v_descale: of float8_e4m3fn inputs, which mean ``query.float() * q_descale`` and so on:
            float32 without gradient, broadcastable to (B, heads) of that input, or, with 3 dimensions, to (B, heads,
            length), a number for each row; None is 1. See ``quantize_fp8`` and docs/use/fp8.md.
        out_dtype: of out beside float8_e4m3fn inputs: bfloat16 (the default; autocast's under autocast) or float16.

    Query, key and value may be nested tensors of the jagged layout, (B, H, j, E): see ``attention_varlen``, whose masks
    and biases they take; out and lse are then nested, too.

    Returns:
        out (B, Hq, L, Ev) in query's dtype (or out_dtype) and stride order; with ``return_lse`` also lse (B, Hq, L),
        the natural logarithm of the sum of exponentials of each row's scores, float32 (float64 for float64),
        differentiable. A row with nothing to attend to has out 0, lse -inf (or its sink) and gradients of 0.

    Raises:
        AttentionError: shapes, dtypes, devices or options that do not fit.
        TypeError: an argument of a wrong type.
    """
    if getattr(query, "is_nested", False):
        return nested.attention(
            query, key, value, causal=causal, window=window, align=align, mask=mask, bias=bias, sinks=sinks,
            softcap=softcap, alibi_slopes=alibi_slopes, dropout_p=dropout_p, scale=scale, deterministic=deterministic,
            batch_invariant=batch_invariant, return_lse=return_lse, q_descale=q_descale, k_descale=k_descale,
            v_descale=v_descale, out_dtype=out_dtype,
        )  # fmt: skip
    left, right = check_native(query, key, value, window, align)
    bottom_right = align == "bottom_right"
    if _eager is not None and not torch.compiler.is_compiling():
        result = _eager(
            query, key, value, mask, bias, alibi_slopes, None, None, None, None, sinks, q_descale, k_descale, v_descale,
            causal, left, right, bottom_right, softcap, dropout_p, scale, True, deterministic, None, 0, 0,
            batch_invariant, out_dtype, return_lse,
        )  # fmt: skip
        if result is not NotImplemented:
            return result
    softcap, dropout_p = number(softcap, "softcap"), number(dropout_p, "dropout_p")
    scale = None if scale is None else number(scale, "scale")
    flag(causal, "causal"), flag(return_lse, "return_lse"), flag(batch_invariant, "batch_invariant")
    deterministic = None if deterministic is None else flag(deterministic, "deterministic")
    out, lse, _ = _operator(
        query, key, value, mask, bias, alibi_slopes, sinks=sinks, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, causal=causal, window_left=left, window_right=right, bottom_right=bottom_right,
        softcap=softcap, dropout_p=dropout_p, scale=scale, gqa=True, deterministic=deterministic, return_lse=return_lse,
        batch_invariant=batch_invariant, out_dtype=out_dtype,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Joins two partial results over disjoint keys, exactly and differentiably.

    ``lse = log(exp(lse_a) + exp(lse_b))`` and ``out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b``, the recurrence
    of online softmax (Milakov and Gimelshein, arXiv:1805.02867). Where both lse are -inf: out 0, lse -inf, gradients 0.

    Args:
        out_a, out_b: (..., L, Ev), one dtype.
        lse_a, lse_b: (..., L), float32 (float64 for float64), as ``attention(..., return_lse=True)`` returns them.

    Returns:
        (out, lse), shapes and dtypes as given.
    """
    for name, out, lse in (("a", out_a, lse_a), ("b", out_b, lse_b)):
        if out.shape[:-1] != lse.shape:
            raise AttentionError(
                f"lse_{name} of shape {tuple(lse.shape)} does not fit out_{name} of shape {tuple(out.shape)}; "
                "it must be out's shape without the last dimension"
            )
    if out_a.shape != out_b.shape or out_a.dtype != out_b.dtype:
        raise AttentionError(
            f"out_a and out_b are {tuple(out_a.shape)}, {out_a.dtype} and {tuple(out_b.shape)}, {out_b.dtype}; "
            "they must have one shape and dtype"
        )
    highest = torch.maximum(lse_a, lse_b).detach()
    empty = highest == float("-inf")
    shift = highest.masked_fill(empty, 0.0)
    # NOTE: an empty side has exp(-inf - shift) = 0 with a derivative of 0, so no where is needed for one side alone.
    weight_a, weight_b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    total = (weight_a + weight_b).masked_fill(empty, 1.0)
    lse = (shift + torch.log(total)).masked_fill(empty, float("-inf"))
    out = (weight_a / total).unsqueeze(-1) * out_a + (weight_b / total).unsqueeze(-1) * out_b
    return out.to(out_a.dtype), lse


attention.__prepare_scriptable__ = merge_attention.__prepare_scriptable__ = script.refuse


class _OutAndLse(torch.autograd.Function):
    """What FlashAttention is: (q, k, v, is_causal) -> (out, lse)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        out, lse, _ = _operator(q, k, v, causal=is_causal, gqa=q.dim() > 3, return_lse=True)
        return out, lse

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, Tensor, Tensor, bool], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, ctx.is_causal = inputs
        ctx.save_for_backward(q, k, v, *output)
        ctx.set_materialize_grads(False)  # a gradient that nobody has is None, not a tensor of zeros

    @staticmethod
    def backward(ctx, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        rng_state = q.new_empty(0, dtype=torch.int64)  # nothing was drawn
        wanted = [*ctx.needs_input_grad[:3], False, False]
        grads = _backward(
            grad_out, grad_lse, q, k, v, out, lse, rng_state, causal=ctx.is_causal, gqa=q.dim() > 3, grad_mask=wanted
        )
        return *(grad if want else None for grad, want in zip(grads[:3], wanted[:3], strict=True)), None


class FlashAttention(_OutAndLse):
    """FlashAttention as a Python autograd function, made to be read.

    ``FlashAttention.apply(q, k, v, is_causal=False)``

    q (B, N, D) or (B, H, N, D); k and v alike, with the same number of heads or a divisor of it. Forward keeps q, k, v,
    out and lse (q's shape without the last dimension), never the N x N probabilities; backward recomputes them tile by
    tile from lse (Dao et al., arXiv:2205.14135, algorithm 4). No dropout. torch.func's grad, vjp and vmap work, and a
    second derivative; forward-mode AD is for ``attention``.
    """

    @staticmethod
    def apply(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        flag(is_causal, "is_causal")
        if q.dtype == torch.float8_e4m3fn:
            raise AttentionError(f"q is of {q.dtype}, which flash_ext.attention takes; FlashAttention takes wider ones")
        if torch.is_autocast_enabled(q.device.type):  # here, so that forward and backward read the same
            dtype = torch.get_autocast_dtype(q.device.type)
            q, k, v = (t if t.dtype == torch.float64 else t.to(dtype) for t in (q, k, v))
        out, _ = _OutAndLse.apply(q, k, v, is_causal)
        return out


def allow_in_graph() -> None:
    """Called when ``torch._dynamo`` has been imported, which would look past ``FlashAttention.apply`` otherwise."""
    torch.compiler.allow_in_graph(FlashAttention)
