"""vmap of the operators: the mapped dimension becomes one more leading dimension, by strides and without a loop.

The operators broadcast their leading dimensions, so a rule only moves the mapped dimension to the front. There are
exceptions, in which each sample is a call of its own. Dropout's map counts (batch, head); samples have random states of
their own (``randomness="different"``) or one for all (``"same"``). Packed sequences have no leading dimensions, e4m3
inputs have descales, and a cache has places, to which each sample appends in its own part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ops = torch.ops.flash_ext
_NO_RANDOMNESS = (
    "vmap: called a random operation (attention with dropout_p > 0) while in randomness error mode; "
    "pass randomness='different' or randomness='same' to vmap"
)
_Dims = tuple[int | None, ...]


def _pad(values: tuple, count: int) -> list:
    """Trailing optional arguments may be left out of a call."""
    return [*values, *[None] * (count - len(values))]


def _front(tensor: Tensor | None, dim: int | None, rank: int, batch: int | None = None) -> Tensor | None:
    """A tensor of ``rank`` logical dimensions with the mapped one in front; ``batch`` also expands an unmapped one."""
    if tensor is None or (dim is None and batch is None):
        return tensor
    tensor = tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
    tensor = tensor.reshape(tensor.shape[:1] + (1,) * (rank + 1 - tensor.dim()) + tensor.shape[1:])
    return tensor if dim is not None else tensor.expand(batch, *tensor.shape[1:])


def _logical_rank(qkv: list[Tensor], dims: _Dims) -> int:
    return max(t.dim() - (d is not None) for t, d in zip(qkv, dims, strict=True))


# Of attention: query, key, value, mask, bias, alibi_slopes, four of packed sequences, sinks, and three descales.
_INPUTS = 14
_CU_SEQLENS_Q = 6
_CACHE_INPUTS, _NEW_KEY = 14, 4  # of attention_with_cache; query, the caches and their lengths are before key


def _ranks(rank: int) -> list[int]:
    """Logical dimensions of the inputs in a dense call of ``rank``, which has none of the four of packed sequences."""
    return [rank] * 5 + [rank - 2] + [1] * 4 + [rank - 2] + [1] * 3


def _is_a_loop(inputs: list) -> bool:
    """Packed sequences have no leading dimensions; how many a descale has says what it means."""
    return inputs[_CU_SEQLENS_Q] is not None or inputs[0].dtype == torch.float8_e4m3fn


def _sample(values: list, dims: _Dims, index: int) -> list:
    return [v if d is None else v.select(d, index) for v, d in zip(values, dims, strict=True)]


def _stack(results: list[tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0,) * len(results[0])


def _forward_inputs(batch: int, inputs: list, dims: _Dims) -> list:
    """The inputs in front form; query is expanded where only a mask is mapped."""
    rank = _logical_rank(inputs[:3], dims[:3])
    fronted = [_front(t, d, r) for t, d, r in zip(inputs, dims, _ranks(rank), strict=True)]
    if all(d is None for d in dims[:3]):
        fronted[0] = _front(inputs[0], None, rank, batch)
    return fronted


def _attention(info: Any, in_dims: _Dims, *args: Any, **options: Any) -> tuple:
    inputs, dims = _pad(args, _INPUTS), _pad(in_dims, _INPUTS)
    lse_dim = 0 if options.get("return_lse", False) else None
    if options.get("dropout_p", 0.0) > 0:
        if info.randomness == "error":
            raise RuntimeError(_NO_RANDOMNESS)
        if info.randomness == "different":
            return _stack([_ops.attention(*_sample(inputs, dims, i), **options) for i in range(info.batch_size)])
        first = _ops.attention(*_sample(inputs, dims, 0), **options)
        state = first[2]
        rest = [_with_state(_sample(inputs, dims, i), state, options) for i in range(1, info.batch_size)]
        (out, lse), _ = _stack([first[:2], *rest])
        return (out, lse, state), (0, 0, None)
    if _is_a_loop(inputs):
        results = [_ops.attention(*_sample(inputs, dims, i), **options) for i in range(info.batch_size)]
        lse = results[0][1] if lse_dim is None else torch.stack([result[1] for result in results])
        return (torch.stack([result[0] for result in results]), lse, results[0][2]), (0, lse_dim, None)
    result = _ops.attention(*_forward_inputs(info.batch_size, inputs, dims), **options)
    return result, (0, lse_dim, None)


def _with_state(inputs: list, state: Tensor, options: dict) -> tuple[Tensor, Tensor]:
    return _ops.attention_with_rng_state(*inputs[:3], state, *inputs[3:], **options)


def _attention_with_rng_state(info: Any, in_dims: _Dims, *args: Any, **options: Any) -> tuple:
    args, in_dims = _pad(args, 1 + _INPUTS), _pad(in_dims, 1 + _INPUTS)
    state, state_dim = args.pop(3), in_dims.pop(3)
    lse_dim = 0 if options.get("return_lse", False) else None
    if options.get("dropout_p", 0.0) > 0 or _is_a_loop(args):
        results = []
        for i in range(info.batch_size):
            one = state if state_dim is None else state.select(state_dim, i)
            results.append(_with_state(_sample(args, in_dims, i), one, options))
        (out, lse), _ = _stack(results)
        return (out, results[0][1] if lse_dim is None else lse), (0, lse_dim)
    state = state if state_dim is None else state.select(state_dim, 0)
    result = _with_state(_forward_inputs(info.batch_size, args, in_dims), state, options)
    return result, (0, lse_dim)


def _attention_backward(info: Any, in_dims: _Dims, *args: Any, **options: Any) -> tuple:
    args, dims = _pad(args, 5 + _INPUTS), _pad(in_dims, 5 + _INPUTS)
    inputs = [*args[2:5], *args[8:]]
    if options.get("dropout_p", 0.0) > 0 or _is_a_loop(inputs):
        return _stack([_ops.attention_backward(*_sample(args, dims, i), **options) for i in range(info.batch_size)])
    rank = _logical_rank(args[2:5], dims[2:5])
    # Every sample has gradients of its own, so inputs that are shared between samples are expanded, not summed over.
    ranks = [rank, rank - 1, rank, rank, rank, rank, rank - 1, 1, *_ranks(rank)[3:]]
    state = args[7] if dims[7] is None else args[7].select(dims[7], 0)
    fronted = [_front(t, d, r, info.batch_size) for t, d, r in zip(args, dims, ranks, strict=True)]
    fronted[7] = state
    grads = _ops.attention_backward(*fronted, **options)
    result, out_dims = [], []
    for grad, index in zip(grads, (2, 3, 4, 9, 10), strict=True):
        wanted = args[index] is not None and grad.shape[:1] == (info.batch_size,) and grad.dim() > 1
        if wanted:
            logical = args[index].shape if dims[index] is None else args[index].select(dims[index], 0).shape
            grad = grad.reshape(info.batch_size, *logical)
        result.append(grad)
        out_dims.append(0 if wanted else None)
    return tuple(result), tuple(out_dims)


def _sinks_gradient(info: Any, in_dims: _Dims, *args: Any, **options: Any) -> tuple[Tensor, int]:
    if options.get("packed", False):
        results = [_ops.sinks_gradient(*_sample(list(args), in_dims, i), **options) for i in range(info.batch_size)]
        return torch.stack(results), 0
    rank = args[2].dim() - (in_dims[2] is not None)
    ranks = (rank, rank - 1, rank, rank - 1, rank - 2)
    fronted = [_front(t, d, r, info.batch_size) for t, d, r in zip(args, in_dims, ranks, strict=True)]
    logical = args[4].shape if in_dims[4] is None else args[4].select(in_dims[4], 0).shape
    return _ops.sinks_gradient(*fronted, **options).reshape(info.batch_size, *logical), 0


def _quantize_fp8(info: Any, in_dims: _Dims, x: Tensor, descale: Tensor) -> tuple[Tensor, int]:
    rank = max(t.dim() - (d is not None) for t, d in ((x, in_dims[0]), (descale, in_dims[1])))
    fronted = [_front(t, d, rank, info.batch_size) for t, d in zip((x, descale), in_dims, strict=True)]
    return _ops.quantize_fp8(*fronted), 0


def _descale_fp8(info: Any, in_dims: _Dims, x: Tensor, dim: list[int]) -> tuple[Tensor, int]:
    rank = x.dim() - 1
    for d in dim:
        if not -rank <= d < rank:
            raise IndexError(f"dim has {d}; x of {rank} dimensions takes {-rank} to {rank - 1}")
    return _ops.descale_fp8(x.movedim(in_dims[0], 0), [d if d < 0 else d - rank for d in dim]), 0


def _draw_rng_state(info: Any, in_dims: _Dims, *args: Any) -> tuple[Tensor, int | None]:
    """One state for each sample, or one for all; the tensors only say for which device, and that samples there are."""
    args, dims = _pad(args, 6), _pad(in_dims, 6)
    if info.randomness == "error":
        raise RuntimeError(_NO_RANDOMNESS)
    if info.randomness == "same":
        return _ops.draw_rng_state(*_sample(args, dims, 0)), None
    return torch.stack([_ops.draw_rng_state(*_sample(args, dims, i)) for i in range(info.batch_size)]), 0


def _dropout_mask(info: Any, in_dims: _Dims, *args: Any, **options: Any) -> tuple:
    masks = [_ops.dropout_mask(*_sample(list(args), in_dims, i), **options) for i in range(info.batch_size)]
    return torch.stack(masks), 0


def _attention_with_cache(info: Any, in_dims: _Dims, *args: Any, **options: Any) -> tuple:
    args, dims = _pad(args, _CACHE_INPUTS), _pad(in_dims, _CACHE_INPUTS)
    if args[_NEW_KEY] is not None and (dims[1] is None or dims[2] is None):
        raise RuntimeError(
            "vmap: key_cache and value_cache are written to in place, so with key and value both must be mapped; "
            "expand and clone them first"
        )
    results = [_ops.attention_with_cache(*_sample(args, dims, i), **options) for i in range(info.batch_size)]
    (out,), _ = _stack([result[:1] for result in results])
    if not options.get("return_lse", False):
        return (out, results[0][1]), (0, None)
    return (out, torch.stack([result[1] for result in results])), (0, 0)


def register(library: torch.library.Library) -> None:
    """Registers the rules; called when the operators have been loaded, again where flash_ext is imported again."""
    torch.library.register_vmap("flash_ext::draw_rng_state", _draw_rng_state, lib=library)
    torch.library.register_vmap("flash_ext::attention", _attention, lib=library)
    torch.library.register_vmap("flash_ext::attention_with_rng_state", _attention_with_rng_state, lib=library)
    torch.library.register_vmap("flash_ext::attention_with_cache", _attention_with_cache, lib=library)
    torch.library.register_vmap("flash_ext::attention_backward", _attention_backward, lib=library)
    torch.library.register_vmap("flash_ext::sinks_gradient", _sinks_gradient, lib=library)
    torch.library.register_vmap("flash_ext::dropout_mask", _dropout_mask, lib=library)
    torch.library.register_vmap("flash_ext::quantize_fp8", _quantize_fp8, lib=library)
    torch.library.register_vmap("flash_ext::descale_fp8", _descale_fp8, lib=library)
