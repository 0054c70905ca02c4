"""Promise: what the mask function says is what transformers' own mask shows, and a ``BandMask`` is that mask to all."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from flash_ext.integrations.transformers import attention_forward, register
from flash_ext.integrations.transformers_masks import BandMask, LengthsMask, read

transformers = pytest.importorskip("transformers")
from transformers import masking_utils  # noqa: E402

register()
BATCH = 2

# Queries, keys, place of the first query, place of the first key.
PLACES = {
    "no cache": (6, 6, 0, 0),
    "one query": (1, 6, 5, 0),
    "some queries": (3, 6, 3, 0),
    "one key": (1, 1, 0, 0),
    "an empty static cache": (3, 9, 0, 0),
    "a static cache": (3, 9, 2, 0),
    "one query at a static cache": (1, 9, 4, 0),
    "a cache of a window": (3, 5, 7, 5),
    "one query at a cache of a window": (1, 4, 9, 6),
    "queries behind the keys": (4, 4, 3, 1),
    "other queries than keys": (3, 7, 0, 0),
}
PADDINGS = ("none", "ones", "left", "right", "holes", "short")


def rules(place: tuple[int, int, int, int]) -> dict[str, tuple[Any, int | None]]:
    """Functions of indices and the window that models name beside them, for what this transformers has."""
    of, queries = masking_utils, place[0]
    window = of.sliding_window_causal_mask_function
    start = (torch.zeros(BATCH, dtype=torch.int64),)
    start *= "left_padding" in inspect.signature(of.chunked_causal_mask_function).parameters
    found = {
        "causal": (of.causal_mask_function, None),
        "window": (window(3), 3),
        "wide window": (window(20), 20),
        "chunks": (of.chunked_causal_mask_function(3, *start), 3),
    }
    if hasattr(of, "sliding_window_bidirectional_mask_function"):
        found["both sides"] = of.bidirectional_mask_function, None
        found["window of both sides"] = of.sliding_window_bidirectional_mask_function(2), 2
    if place[1:] == (queries, 0, 0) and queries > 3:
        ids = torch.arange(queries)[None] // torch.tensor([[2], [3]])
        found["packed"] = of.and_masks(window(2), of.packed_sequence_mask_function(ids)), 2
    return found


def padding_of(kind: str, end: int) -> Tensor | None:
    """(B, end) bool, of which "short" lacks what a static cache has not yet."""
    if kind == "none":
        return None
    padding = torch.ones(BATCH, end, dtype=torch.bool)
    if kind == "left":
        padding[1, : end // 2] = False
    if kind == "right":
        padding[1, end - end // 2 :] = False
    if kind == "holes":
        padding[:, 1::3] = False
    return padding[:, : end - end // 3] if kind == "short" else padding


def call_of(
    place: tuple[int, int, int, int], function: Any, padding: Tensor | None, window: int | None = None
) -> dict[str, Any]:
    queries, keys, q_offset, kv_offset = place
    call = {
        "local_size": window,
        "batch_size": BATCH,
        "kv_length": keys,
        "kv_offset": kv_offset,
        "mask_function": function,
    }
    call |= {"attention_mask": padding, "dtype": torch.float32, "config": None}
    if "cache_position" in inspect.signature(masking_utils.sdpa_mask).parameters:
        return call | {"cache_position": torch.arange(q_offset, q_offset + queries)}
    return call | {"q_length": queries, "q_offset": q_offset, "device": "cpu"}


def shown(mask: Tensor | None, place: tuple[int, int, int, int], causal: bool) -> Tensor:
    """The pairs that attention uses: all scores are equal, and each key has a value of its own."""
    queries, keys = place[:2]
    query, key = torch.zeros(BATCH, 1, queries, 8), torch.zeros(BATCH, 1, keys, 8)
    value = torch.eye(keys).expand(BATCH, 1, keys, keys)
    out, _ = attention_forward(torch.nn.Module(), query, key, value, mask, is_causal=causal)
    return out.transpose(1, 2) > 0


def made(call: dict[str, Any], causal: bool, skip: bool) -> Tensor | None:
    """As models call it, for causal and for other rules."""
    skips = {"allow_is_causal_skip": causal and skip}
    if not causal:
        skips["allow_is_bidirectional_skip"] = skip
    return transformers.AttentionMaskInterface()["flash_ext"](**call, **skips)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("where", PLACES)
def test_what_is_seen(where: str, padding: str) -> None:
    place = PLACES[where]
    queries, keys, q_offset, kv_offset = place
    for name, (function, window) in rules(place).items():
        causal = "both" not in name
        call = call_of(place, function, padding_of(padding, kv_offset + keys), window)
        expected = masking_utils.sdpa_mask(**call, allow_is_causal_skip=False).expand(BATCH, 1, queries, keys)
        # transformers allows to skip the mask of one query alone only where its place is the last key's.
        for skip in (True, False)[queries == 1 and q_offset + 1 != kv_offset + keys and causal :]:
            mask = made(call, causal, skip)
            assert torch.equal(shown(mask, place, causal), expected), (name, skip)
            if mask is not None:
                assert mask.shape == expected.shape and torch.equal(mask & True, expected), (name, skip)


@pytest.mark.parametrize("padding", ["none", "ones"])
def test_nothing_is_made_of_nothing(padding: str) -> None:
    """None is what "sdpa" gets, too."""
    for where in ("no cache", "one query", "one key"):
        place = PLACES[where]
        for name, (function, window) in rules(place).items():
            if name in ("causal", "wide window", "both sides"):
                call = call_of(place, function, padding_of(padding, place[1]), window)
                assert made(call, name != "both sides", True) is None
    call = call_of(PLACES["no cache"], masking_utils.causal_mask_function, None)
    assert isinstance(made(call, True, False), BandMask)


def test_only_known_functions_are_read() -> None:
    causal = masking_utils.causal_mask_function
    assert read(causal) and read(masking_utils.and_masks(causal, causal))
    assert read(masking_utils.sliding_window_causal_mask_function(3)).left == 2

    def causal_mask_function(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key <= query

    for unknown in (None, causal_mask_function, torch.nn.Linear(1, 1), masking_utils.or_masks(causal, causal)):
        assert read(unknown) is None
    assert read(masking_utils.and_masks(causal, causal_mask_function)) is None


def test_a_band_mask_is_a_mask_to_all() -> None:
    """Its shape costs nothing; what reads it gets the mask, once built."""
    call = call_of((6, 6, 0, 0), masking_utils.sliding_window_causal_mask_function(3), None)
    mask = made(call, True, True)
    expected = torch.ones(6, 6, dtype=torch.bool).tril().triu(-2).expand(BATCH, 1, 6, 6)
    assert isinstance(mask, BandMask) and mask.shape == (BATCH, 1, 6, 6) and mask.dtype == torch.bool
    assert mask.dim() == 4 and mask.device.type == "cpu" and not mask.requires_grad
    assert torch.equal(mask[..., :4], expected[..., :4]) and type(mask[..., :4]) is Tensor
    added = torch.zeros(6, 6).masked_fill(mask, 1.0)
    assert torch.equal(added, expected.float()) and torch.equal(torch.cat([mask, mask]), torch.cat([expected] * 2))
    query = torch.randn(BATCH, 2, 6, 8)
    got = torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
    torch.testing.assert_close(
        got, torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=expected)
    )
    assert mask.built() is mask.built()
    compiled = torch.compile(lambda x, mask: x.masked_fill(mask, 0.0), backend="eager")
    assert torch.equal(compiled(query[:, :1, :, :6], mask), query[:, :1, :, :6].masked_fill(expected, 0.0))


def test_a_mask_that_is_built_late() -> None:
    """A static cache counts its places in a tensor, in place."""
    call = call_of((3, 9, 2, 0), masking_utils.causal_mask_function, None)
    if "q_offset" in call:
        call["q_offset"] = torch.tensor(2)
    mask = made(call, True, True)
    call["q_offset" if "q_offset" in call else "cache_position"].add_(3)
    assert torch.equal(mask & True, torch.ones(3, 9, dtype=torch.bool).tril(2).expand(BATCH, 1, 3, 9))


def test_keys_that_are_not_those_of_the_mask() -> None:
    """As with a prefix that a model adds to its cache: the mask is built, and cut."""
    mask = made(call_of((3, 9, 6, 0), masking_utils.causal_mask_function, None), True, True)
    query, key = torch.randn(BATCH, 1, 3, 8), torch.randn(BATCH, 1, 8, 8)
    got, _ = attention_forward(torch.nn.Module(), query, key, key, mask)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, key, attn_mask=mask[..., :8])
    torch.testing.assert_close(got, expected.transpose(1, 2))


def test_lengths_of_a_static_cache() -> None:
    """One graph for all lengths; a plain mask where a gradient is wanted."""
    module = torch.nn.Module()
    query = torch.randn(BATCH, 4, 1, 8)
    key, value = (torch.randn(BATCH, 2, 9, 8) for _ in "kv")
    sinks = torch.randn(4, requires_grad=True)
    graphs = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention_forward, backend=graphs, fullgraph=True)
    for place in (2, 5, 8):
        mask = made(call_of((1, 9, place, 0), masking_utils.causal_mask_function, None), True, False)
        assert isinstance(mask, LengthsMask) and mask.shape == (BATCH, 1, 1, 9)
        seen = torch.arange(9) <= place
        assert torch.equal(mask & True, seen.expand(BATCH, 1, 1, 9))
        options = {"scaling": 0.3, "softcap": 5.0, "s_aux": sinks}
        expected, _ = attention_forward(module, query, key, value, seen[None, None, None], **options)
        with torch.no_grad():  # a cache counts as changed by each call, and autograd would complain
            for function in (attention_forward, compiled):
                got, _ = function(module, query, key.clone(), value.clone(), mask, **options)
                torch.testing.assert_close(got, expected)
        (grad,) = torch.autograd.grad(attention_forward(module, query, key, value, mask, **options)[0].sum(), sinks)
        torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), sinks)[0])
    assert graphs.frame_count == 1
