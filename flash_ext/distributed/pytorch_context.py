"""The operators on shards of a sequence that PyTorch's own ``context_parallel`` has cut.

That context (``torch.distributed.tensor.experimental``) makes DTensors of a call's shards, sharded in their rows, and
has handlers of PyTorch's kernels attend around a ring. Under ``enable()`` the call comes here instead. As DTensors the
shards stand for a sequence in the order of the ranks, which is not the sequence's own where its load balancer dealt it:
head and tail, our "zigzag". So keys are gathered by position, as ``allgather.py`` does.

Called by ``flash_ext/sharding.py``, below autograd. Backward goes by what forward gave, so it needs no context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from flash_ext.distributed import allgather, local, ring
from flash_ext.distributed.exchange import Group
from flash_ext.distributed.layout import Band, layout_of
from flash_ext.distributed.local import Extras, Options

CONTEXT = "torch's context_parallel"
_REFUSED = ("mask", "bias", "alibi_slopes", "sinks", "dropout_first_query", "dropout_first_key", "dropout_heads")


def _inputs(values: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's query, key and value, where the call is one that this file computes."""
    if given := [name for name in _REFUSED if isinstance(values.get(name), Tensor) or values.get(name)]:
        raise RuntimeError(
            f"{given[0]} is given in {CONTEXT}, which has none; flash_ext.distributed.context_parallel takes it"
        )
    tensors = {name: values[name] for name in ("query", "key", "value")}
    for name, tensor in tensors.items():
        if isinstance(tensor, AsyncCollectiveTensor):
            tensors[name] = tensor.wait()
        elif type(tensor) not in (Tensor, nn.Parameter):  # what is traced has nothing to send
            raise RuntimeError(
                f"{name} is a {type(tensor).__name__} in {CONTEXT}; a compiled function that calls attention in it is "
                "refused while flash_ext.enable() is on, and sdpa_kernel(...) leaves such a call to PyTorch"
            )
    query, key, value = tensors.values()
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise RuntimeError(f"query, key and value have different batch sizes in {CONTEXT}; they must be equal")
    heads = query.shape[1]
    for name, count in (("key", key.shape[1]), ("value", value.shape[1])):
        if count == 0 or heads % count or (count not in (1, heads) and not values.get("gqa", False)):
            raise RuntimeError(f"{name} has {count} heads and query {heads}; with enable_gqa=True they must divide it")
    return query, key, value


def _plan(query: Tensor, key: Tensor, values: dict[str, Any], group: Any, balance: str) -> allgather.Plan:
    ranks = Group(group)
    queries, keys = (layout_of((t.shape[2],) * ranks.size, balance) for t in (query, key))
    sides = values.get("window_left"), values.get("window_right")
    bottom_right = values.get("bottom_right", False)
    band = Band.of(values.get("causal", False), sides, bottom_right, queries.length, keys.length)
    options = Options(
        values.get("softcap", 0.0), values.get("dropout_p", 0.0), values.get("scale"), values.get("deterministic"),
        values.get("batch_invariant", False), query.shape[1], values.get("backend"),
    )  # fmt: skip
    if options.dropout_p > 0 and not ring.has_dropout_map(band, queries, keys, by_distance=False):
        raise RuntimeError(
            f"dropout_p in {CONTEXT} takes chunks of the ranks that begin at multiples of 16 tokens, and no window "
            "to the right"
        )
    calls = [local.calls_of(band, held, keys.length, False, options.dropout_p > 0) for held in queries.ranks]
    return allgather.plan(ranks, keys, calls, options, 2)


def forward(values: dict[str, Any], state: Tensor | None, group: Any, balance: str) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's rows; ``values``: the operator's arguments, with this rank's shards."""
    query, key, value = _inputs(values)
    plan = _plan(query, key, values, group, balance)
    return allgather.attend(plan, None, Extras(state=state), query, key, value)


def backward(
    values: dict[str, Any], state: Tensor | None, group: Any, balance: str, wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of this rank's query, key and value, of those that are ``wanted``."""
    query, key, value = _inputs(values)
    plan = _plan(query, key, values, group, balance)
    of_results = values.get("grad_out"), values.get("grad_lse")
    results = values["out"], values["lse"]
    needed = (*wanted[:3], False, False, False)
    return allgather.gradients(plan, Extras(state=state), of_results, (query, key, value), results, needed)[:3]
