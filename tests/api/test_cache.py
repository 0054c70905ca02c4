"""Promise: `attention_with_cache` appends and attends as a plain loop does, and no length or page leads it astray."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from caches import HEADS, example, ints, place, plain
from caches import ROWS as S
from helpers import rand
from packed import Heads
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import flash_ext

Error = flash_ext.AttentionError


CASES: dict[str, dict[str, Any]] = {
    "one query": {},
    "append": {"added": 1},
    "append 3 with 2 queries": {"queries": 2, "added": 3},
    "5 queries": {"queries": 5, "added": 5},
    "40 queries, 18 new rows": {"queries": 40, "added": 18},
    "not causal": {"queries": 3, "added": 2, "causal": False},
    "window": {"queries": 4, "added": 4, "window": (6, 0), "causal": False},
    "softcap and scale": {"queries": 2, "softcap": 3.0, "scale": 0.4},
    "slopes": {"queries": 3, "slopes": True},
    "sinks": {"queries": 3, "added": 2, "sinks": True},
    "slots": {"queries": 2, "added": 2, "index": (4, 0, 2)},
    "one slot for all": {"queries": 2, "index": (3, 3, 3), "lengths": (9, 9, 9)},
    "slots and slopes": {"index": (1, 4, 0), "slopes": True},
    "rotary": {"queries": 2, "added": 2, "rotary": 16},
    "rotary of some columns": {"queries": 3, "added": 2, "rotary": 8, "rotary_interleaved": True},
    "rotary, not causal": {"queries": 3, "added": 2, "rotary": 16, "causal": False},
    "rotary, interleaved, window": {
        "queries": 2, "added": 2, "rotary": 16, "causal": False, "window": (9, 9), "rotary_interleaved": True,
    },
    **{f"pages of {n}": {"queries": 2, "added": 3, "page": n, "rotary": 16} for n in (1, 16, 64, 256)},
    "fp8": {"queries": 2, "fp8": True},
    "fp8, append": {"queries": 2, "added": 2, "fp8": True, "rotary": 8},
    "fp8, pages": {"queries": 2, "added": 2, "fp8": True, "page": 16},
    "fp8, slots": {"added": 2, "fp8": True, "index": (4, 0, 2)},
    "nothing at all": {"lengths": (0, 0, 0), "queries": 2},
    "full": {"lengths": (48, 47, 46), "queries": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_against_a_loop(name: str, device: str, backend: str) -> None:
    dtype = torch.float64 if device == "cpu" or backend == "chunked" else torch.float32
    rest = {"dtype": dtype, "device": device}
    if dtype == torch.float64 and "fp8" in CASES[name]:
        rest["dtype"] = torch.float32  # a new row in float64 is rounded to fp8 once, the reference's twice
    call = example(**CASES[name] | rest)
    expected = plain(call)
    out, lse = flash_ext.attention_with_cache(**call, return_lse=True)
    close = {"rtol": 1e-10, "atol": 1e-10} if rest["dtype"] == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    for got, truth in zip((out, lse), expected[:2], strict=True):
        torch.testing.assert_close(got.cpu().double(), truth, **close)
    for got, truth in zip((call["key_cache"], call["value_cache"]), expected[2:], strict=True):
        torch.testing.assert_close(got.cpu().double(), truth, equal_nan=True, **close)
    assert torch.equal(flash_ext.attention_with_cache(**call), out)  # what is there is written once more


LAYOUTS = {
    "contiguous": lambda x: x,
    "heads outside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of longer slots": lambda x: torch.cat((x, x * torch.nan), 1)[:, :S],
    "slots of an odd size": lambda x: torch.nn.functional.pad(x.flatten(1), (0, 3))[:, :-3].unflatten(1, x.shape[1:]),
    "columns outside": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
}


@pytest.mark.parametrize("index", [None, (4, 0, 2)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_are_no_obstacle(layout: str, index: tuple[int, ...] | None, device: str, backend: str) -> None:
    call = example(queries=2, added=2, index=index, slopes=True, dtype=torch.float32, device=device)
    laid = {name: LAYOUTS[layout](call[name].clone()) for name in ("key_cache", "value_cache")}
    out = flash_ext.attention_with_cache(**call)
    torch.testing.assert_close(flash_ext.attention_with_cache(**call | laid), out)
    for name, cache in laid.items():
        assert torch.equal(cache.nan_to_num(), call[name].nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page", [0, 16])
def test_append_is_as_a_cache_extended_by_hand(page: int, dtype: torch.dtype, device: str, backend: str) -> None:
    """Bit for bit."""
    call = example(queries=2, added=3, page=page, dtype=dtype, device=device)
    by_hand = {name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()}
    key, value = by_hand.pop("key"), by_hand.pop("value")
    for b, length in enumerate(call["cache_seqlens"].tolist()):
        for i in range(3):
            at = place(call, b, length + i)
            by_hand["key_cache"][at], by_hand["value_cache"][at] = key[b, i], value[b, i]
    by_hand["cache_seqlens"] += 3
    assert torch.equal(flash_ext.attention_with_cache(**call), flash_ext.attention_with_cache(**by_hand))
    for name in ("key_cache", "value_cache"):
        assert torch.equal(call[name].nan_to_num(), by_hand[name].nan_to_num())


HUGE = 2**31 - 1
# name: (of the example, wrong entries, places of the rows that are written by sequence)
GARBAGE: dict[str, tuple[dict[str, Any], dict[str, list[Any]], dict[int, list[int]]]] = {
    "negative": ({}, {"cache_seqlens": [-1, 4, 6]}, {1: [4, 5], 2: [6, 7]}),
    "most negative": ({}, {"cache_seqlens": [-HUGE - 1, 4, -2]}, {1: [4, 5]}),
    "beyond": ({}, {"cache_seqlens": [S, 4, S + 9]}, {1: [4, 5]}),
    "half beyond": ({}, {"cache_seqlens": [S - 1, 4, 6]}, {0: [S - 1], 1: [4, 5], 2: [6, 7]}),
    "huge": ({}, {"cache_seqlens": [HUGE, HUGE, HUGE]}, {}),
    "slots": ({"index": (4, 0, 2)}, {"cache_batch_index": [-1, 0, HUGE]}, {1: [0, 1]}),
    "pages": ({"page": 64}, {"block_table": [[HUGE], [1], [-5]]}, {1: [0, 1]}),
    "no page": ({"page": 64}, {"block_table": [[-1], [-1], [-1]]}, {}),
    "pages and length": ({"page": 64}, {"cache_seqlens": [-7, 64, 0]}, {2: [0, 1]}),
}  # fmt: skip


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_writes_nothing_elsewhere(name: str, device: str, backend: str) -> None:
    given, wrong, written = GARBAGE[name]
    call = example(queries=2, added=2, dtype=torch.float32, device=device, lengths=(0, 0, 0), rotary=16, **given)
    call["rotary_sin"], call["rotary_cos"] = call["rotary_sin"] * 0, call["rotary_cos"] * 0 + 1
    call |= {entry: ints(values, device) for entry, values in wrong.items()}
    for cache in ("key_cache", "value_cache"):
        call[cache] = rand(*call[cache].shape, device=device)
    before = {cache: call[cache].clone() for cache in ("key_cache", "value_cache")}
    out = flash_ext.attention_with_cache(**call)
    assert out.isfinite().all()
    for cache, fresh in (("key_cache", "key"), ("value_cache", "value")):
        for b, rows in written.items():
            for i, row in enumerate(rows):
                before[cache][place(call, b, row)] = call[fresh][b, i]
        torch.testing.assert_close(call[cache], before[cache], rtol=0, atol=0)
    for b, length in enumerate(call["cache_seqlens"].tolist()):
        index = call["cache_batch_index"][b] if "cache_batch_index" in call else b
        if length < 0 or not 0 <= index < call["key_cache"].shape[0]:
            assert not out[b].any()


# ---- errors ---------------------------------------------------------------------------------------------------------

RIGHT = example(queries=2, added=2, dtype=torch.float32)
TABLE = torch.zeros(3, 2, dtype=torch.int32)
ANGLES = torch.zeros(9, 8)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "query": ({"query": RIGHT["query"][0]}, Error, r"query of shape \(2, 4, 16\) has 3 dimensions; it needs 4"),
    "caches": ({"key_cache": RIGHT["key_cache"].half()}, Error, r"key_cache and value_cache are of torch.float16 and"),
    "rows": ({"value_cache": RIGHT["value_cache"][:, :9]}, Error, r"value_cache of shape .* the rows of key_cache"),
    "columns": ({"key_cache": RIGHT["key_cache"][..., :8]}, Error, r"key_cache .* head dimension 8, but query has 16"),
    "slots": ({"key_cache": RIGHT["key_cache"][:2], "value_cache": RIGHT["value_cache"][:2]}, Error, r"2 slots, fewer"),
    "heads": ({"query": RIGHT["query"][:, :, :3]}, Error, r"key_cache has 2 heads.*divide the 3"),
    "lengths": ({"cache_seqlens": RIGHT["cache_seqlens"].long()}, Error, r"cache_seqlens .*int64 is not \(3,\)"),
    "no lengths": ({"cache_seqlens": None}, TypeError, r"cache_seqlens is None"),
    "value": ({"value": None}, Error, r"key is given without value"),
    "new rows": ({"key": RIGHT["key"][:, :, :1]}, Error, r"key of shape \(3, 2, 1, 16\) .* is not \(3, 2, 2, 16\)"),
    "table": ({"block_table": TABLE[0]}, Error, r"block_table of shape \(2,\) .*is not \(3, pages of a sequence\)"),
    "both": ({"block_table": TABLE, "cache_batch_index": TABLE[:, 0]}, Error, r"cache_batch_index is given beside"),
    "sin": ({"rotary_cos": ANGLES}, Error, r"rotary_cos is given without rotary_sin"),
    "angles": ({"rotary_cos": ANGLES.T, "rotary_sin": ANGLES.T}, Error, r"rotary_cos of shape \(8, 9\).*at most"),
    "rotary": ({"rotary_cos": ANGLES, "rotary_sin": ANGLES, "key": None, "value": None}, Error, r"without key"),
    "descale": ({"k_descale": torch.ones(3, 2)}, Error, r"k_descale is given, but the caches are not"),
    "slopes": ({"alibi_slopes": torch.ones(3)}, Error, r"alibi_slopes of shape \(3,\)"),
    "softcap": ({"softcap": -1.0}, Error, r"softcap is -1"),
    "device": ({"cache_seqlens": RIGHT["cache_seqlens"].to("meta")}, Error, r"cache_seqlens is on meta"),
    "gradient": ({"query": RIGHT["query"].clone().requires_grad_()}, Error, r"query wants a gradient.*no_grad"),
    "window": ({"window": 3}, TypeError, r"window is 3"),
    "causal": ({"causal": 1}, TypeError, r"causal is of type int"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_sentence(name: str) -> None:
    """And nothing has been written."""
    before = RIGHT["key_cache"].clone()
    with pytest.raises(WRONG[name][1]) as caught:
        flash_ext.attention_with_cache(**RIGHT | WRONG[name][0])
    message = str(caught.value)
    assert type(caught.value) is WRONG[name][1] and re.search(WRONG[name][2], message), message
    assert "\n" not in message and torch.equal(before.nan_to_num(), RIGHT["key_cache"].nan_to_num())


CHECKED = """
import torch, flash_ext
ints = lambda x: torch.tensor(x, dtype=torch.int32)
def call(lengths, **more):
    x, cache = torch.zeros(2, 1, 2, 8), torch.zeros(4, 16, 2, 8)
    flash_ext.attention_with_cache(x, cache, cache, key=x, value=x, cache_seqlens=ints(lengths), **more)
call([3, 15]), call([3, 31], block_table=ints([[3, -1], [0, 1]])), call([3, 15], cache_batch_index=ints([3, 1]))
for arguments, sentence in (
    ("[3, 16]", "cache_seqlens has 16 at entry 1; it must be from 0 to 15, rows of a sequence that leave room"),
    ("[-1, 0]", "cache_seqlens has -1 at entry 0"),
    ("[3, 32], block_table=ints([[3, -1], [0, 1]])", "from 0 to 31, rows of a sequence's pages in block_table"),
    ("[3, 31], block_table=ints([[3, -1], [0, 4]])", "block_table has 4 at entry (1, 1); it must be from 0 to 3"),
    ("[3, 5], cache_batch_index=ints([0, 4])", "cache_batch_index has 4 at entry 1; it must be from 0 to 3"),
):
    try:
        eval("call(" + arguments + ")")
    except flash_ext.AttentionError as error:
        assert sentence in str(error), str(error)
    else:
        raise AssertionError(arguments)
"""


def test_entries_are_checked_where_it_is_asked_for() -> None:
    checked = os.environ | {"FLASH_EXT_CHECK": "1"}
    done = subprocess.run([sys.executable, "-c", CHECKED], capture_output=True, text=True, env=checked)
    assert done.returncode == 0, done.stderr


# ---- as other functions of PyTorch ----------------------------------------------------------------------------------


def test_one_length_for_all_and_autocast(device: str) -> None:
    call = example(lengths=(7, 7, 7), dtype=torch.bfloat16, device=device)
    expected = flash_ext.attention_with_cache(**call)
    assert torch.equal(flash_ext.attention_with_cache(**call | {"cache_seqlens": 7}), expected)
    with torch.autocast(device, dtype=torch.float16):  # the cache decides
        assert torch.equal(flash_ext.attention_with_cache(**call | {"query": call["query"].float()}), expected)


def test_autocast_casts_rotary_tables(device: str) -> None:
    """To float32, where they are of another dtype than the cache: a table of 16 bits has the same numbers there."""
    call = example(added=2, queries=2, rotary=16, dtype=torch.bfloat16, device=device)
    for name in ("rotary_cos", "rotary_sin"):
        call[name] = call[name].half()
    wide = {name: x.clone() for name, x in call.items()}
    wide |= {name: call[name].float() for name in ("rotary_cos", "rotary_sin")}
    expected = flash_ext.attention_with_cache(**wide)
    with torch.autocast(device, dtype=torch.float16):
        assert torch.equal(flash_ext.attention_with_cache(**call), expected)
    with pytest.raises(Error, match=r"^rotary_cos of shape"):
        flash_ext.attention_with_cache(**call)


def test_slots_of_more_rows_than_32_bits_count() -> None:
    """Slots that overlap, so that memory has them: those of the sequences alone are copied."""
    slots, rows, cols = 70000, 40000, 8
    heads = Heads(2, 1, 1, cols, cols)
    small = example(lengths=(7, 30), heads=heads, rows=S, dtype=torch.float32)
    expected = flash_ext.attention_with_cache(**small)
    for name in ("key_cache", "value_cache"):
        memory = torch.full((slots * 12 + rows * 16 + cols,), torch.nan)
        huge = memory.as_strided((slots, rows, 1, cols), (12, 16, cols, 1))
        for slot, which in ((slots - 1, 0), (0, 1)):
            huge[slot, :30] = small[name][which, :30]
        small[name] = huge
    small["cache_batch_index"] = ints((slots - 1, 0))
    torch.testing.assert_close(flash_ext.attention_with_cache(**small), expected)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("name", ["one query", "append", "slots", "pages of 16", "rotary"])
def test_vmap(name: str, return_lse: bool, device: str) -> None:
    """Each sample is a call, and appends to its own part of the caches."""
    samples = [example(**CASES[name] | {"dtype": torch.float32, "device": device}) for _ in range(3)]
    mapped = {n: torch.stack([s[n] for s in samples]) for n in samples[0] if n != "cache_seqlens"}
    lengths = samples[0]["cache_seqlens"]

    def run(mapped: dict[str, Tensor]) -> Any:
        return flash_ext.attention_with_cache(**mapped, cache_seqlens=lengths, return_lse=return_lse)

    got = torch.vmap(run)(mapped)
    for i, sample in enumerate(samples):
        expected = flash_ext.attention_with_cache(**sample, return_lse=return_lse)
        pairs = zip(got, expected, strict=True) if return_lse else [(got, expected)]
        assert all(torch.equal(one[i], other) for one, other in pairs)
        for cache in ("key_cache", "value_cache"):
            assert torch.equal(mapped[cache][i].nan_to_num(), sample[cache].nan_to_num())


def test_vmap_of_shared_caches() -> None:
    """Read by all samples; a write that each would make elsewhere is refused."""
    call = example(dtype=torch.float32)
    rest = {n: call[n] for n in call if n != "query"}
    queries = torch.stack([call["query"], call["query"] * 2])
    outs = torch.vmap(lambda query: flash_ext.attention_with_cache(query, **rest))(queries)
    for out, query in zip(outs, queries, strict=True):
        assert torch.equal(out, flash_ext.attention_with_cache(query, **rest))
    fresh = {n: torch.zeros(3, 1, 2, call[f"{n}_cache"].shape[-1]) for n in ("key", "value")}
    with pytest.raises(RuntimeError, match=r"^vmap: key_cache and value_cache are written to in place"):
        torch.vmap(lambda query: flash_ext.attention_with_cache(query, **rest, **fresh))(queries)


def test_flops_are_those_of_the_rows_that_there_are() -> None:
    with FlopCounterMode(display=False) as counter:
        flash_ext.attention_with_cache(**example(queries=2, added=3, page=16))
    assert counter.get_total_flops() == 2 * 2 * HEADS.q * (8 + 3 + 33) * (HEADS.dim + HEADS.dim_v)


@pytest.mark.gpu
def test_a_cuda_graph_is_replayed_with_other_lengths(device: str, backend: str) -> None:
    call = example(added=1, page=16, dtype=torch.bfloat16, device=device)
    other = {name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()}
    flash_ext.attention_with_cache(**call)  # what is made once is made before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_ext.attention_with_cache(**call)
    for lengths in ((5, 0, 30), (2, 1, 47), (-1, 48, 17)):
        for given in (call, other):
            given["cache_seqlens"].copy_(ints(lengths))
        graph.replay()
        assert torch.equal(out.nan_to_num(), flash_ext.attention_with_cache(**other).nan_to_num())
        assert torch.equal(call["key_cache"].nan_to_num(), other["key_cache"].nan_to_num())


def test_autograd_sees_the_write() -> None:
    call = example(added=1, dtype=torch.float32)
    version = call["key_cache"]._version
    flash_ext.attention_with_cache(**call)
    assert call["key_cache"]._version > version


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("page", [0, 16])
def test_compile(page: int, dynamic: bool, device: str) -> None:
    torch._dynamo.reset()
    call = example(queries=2, added=2, page=page, rotary=16, dtype=torch.float32, device=device)
    other = {name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()}
    step = torch.compile(flash_ext.attention_with_cache, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert torch.equal(step(**call), flash_ext.attention_with_cache(**other))
    for name in ("key_cache", "value_cache"):
        assert torch.equal(call[name].nan_to_num(), other[name].nan_to_num())


@pytest.mark.parametrize("name", ["append", "slots", "pages of 16", "rotary", "slopes"])
def test_opcheck_and_fake_tensors(name: str, device: str) -> None:
    call = example(**CASES[name], dtype=torch.float32, device=device)
    for cache in ("key_cache", "value_cache"):
        call[cache] = call[cache].nan_to_num()
    torch.library.opcheck(torch.ops.flash_ext.attention_with_cache.default, (), call)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in call.items()}
        out, lse = flash_ext.attention_with_cache(**fake, return_lse=True)
    real = flash_ext.attention_with_cache(**call, return_lse=True)
    for seen, x in zip((out, lse), real, strict=True):
        assert (seen.shape, seen.stride(), seen.dtype) == (x.shape, x.stride(), x.dtype)


# ---- attention_varlen over pages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 16, 64])
def test_varlen_reads_pages(page: int, device: str, backend: str) -> None:
    """As the same rows packed; poison in the others."""
    call = example(page=page, dtype=torch.float32, device=device)
    lengths, queries = call["cache_seqlens"], rand(7, HEADS.q, HEADS.dim, device=device)
    rows = [place(call, b, row) for b, n in enumerate(lengths.tolist()) for row in range(n)]
    k, v = (torch.stack([call[name][at] for at in rows]) for name in ("key_cache", "value_cache"))
    cu_q, cu_k = ints([0, 3, 4, 7], device), torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    more: dict[str, Any] = {"max_q": 3, "causal": True, "align": "bottom_right", "return_lse": True}
    expected = flash_ext.attention_varlen(queries, k, v, cu_q, cu_k, max_k=30, **more)
    pages = {"block_table": call["block_table"], "seqused_k": lengths}
    got = flash_ext.attention_varlen(queries, call["key_cache"], call["value_cache"], cu_q, **pages, **more)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


PAGED = {"key": torch.zeros(4, 8, 2, 16), "value": torch.zeros(4, 8, 2, 16), "cu_seqlens_q": ints([0, 1, 2, 3])}
PAGED |= {"query": torch.zeros(3, 4, 16), "block_table": TABLE, "seqused_k": ints([1, 2, 3]), "max_q": 1}
WRONG_PAGES: dict[str, tuple[dict[str, Any], str]] = {
    "used": ({"seqused_k": None}, r"seqused_k is None; with block_table it must say"),
    "cu": ({"cu_seqlens_k": PAGED["cu_seqlens_q"]}, r"cu_seqlens_k is given beside block_table"),
    "rows": ({"key": PAGED["key"][0]}, r"key of shape \(8, 2, 16\) has 3 dimensions; it needs 4: with block_table"),
    "table": ({"block_table": TABLE.long()}, r"block_table .*int64 is not \(3, pages of a sequence\) of torch.int32"),
    "batch": ({"block_table": TABLE[:2]}, r"block_table of shape \(2, 2\)"),
    "value": ({"value": PAGED["value"][:3]}, r"value .* does not have the pages of key"),
    **{
        name: ({name: PAGED[name].clone().requires_grad_()}, rf"{name} wants a gradient, which attention_varlen with")
        for name in ("query", "key", "value")
    },
}


@pytest.mark.parametrize("name", WRONG_PAGES)
def test_sentence_of_pages(name: str) -> None:
    flash_ext.attention_varlen(**PAGED)
    with pytest.raises(Error, match=WRONG_PAGES[name][1]):
        flash_ext.attention_varlen(**PAGED | WRONG_PAGES[name][0])


def test_opcheck_of_pages(device: str) -> None:
    tensors = [PAGED[name].to(device) for name in ("query", "key", "value", "block_table", "seqused_k")]
    torch.library.opcheck(torch.ops.flash_ext.gather_pages.default, tuple(tensors))
    torch._dynamo.reset()
    call = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in PAGED.items()}
    step = torch.compile(flash_ext.attention_varlen, fullgraph=True, backend="aot_eager")
    assert torch.equal(step(**call), flash_ext.attention_varlen(**call))


EMPTY: dict[str, dict[str, Any]] = {
    "heads": {"heads": Heads(0, 2, 2, 64, 64)},
    "all heads": {"heads": Heads(0, 0, 0, 64, 64)},
    "queries": {"queries": 0},
    "batch": {"lengths": ()},
    "rows": {"rows": 0, "lengths": (0, 0)},
}


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", EMPTY)
def test_nothing_to_attend_with(name: str, sinks: bool, device: str) -> None:
    case = {"heads": Heads(4, 2, 2, 64, 64), "sinks": sinks, "dtype": torch.bfloat16} | EMPTY[name]
    call = example(**case, device=device)
    out, lse = flash_ext.attention_with_cache(**call, return_lse=True)
    assert out.shape == call["query"].shape and not out.any()
    expected = call["sinks"][None, :, None].expand(lse.shape) if sinks else torch.full_like(lse, -torch.inf)
    assert torch.equal(lse, expected)


@pytest.mark.parametrize(
    ("sinks", "sentence"),
    [
        (torch.zeros(3), r"sinks of shape \(3,\) is (neither|not) \(4,\)"),
        (torch.zeros(3, 4), r"sinks of shape \(3, 4\) is (neither|not) \(4,\)"),
        (torch.zeros(4).half(), r"sinks is of torch.float16; it must be of torch.float32"),
        (torch.zeros(4, device="meta"), r"sinks is on meta, but query is on cpu"),
        (torch.zeros(4, requires_grad=True), r"sinks wants a gradient, which attention_with_cache does not"),
    ],
)
def test_bad_sinks(sinks: Tensor, sentence: str) -> None:
    """And nothing was written to the cache."""
    call = example(heads=Heads(4, 2, 2, 64, 64), added=1, lengths=(1, 2, 3), dtype=torch.bfloat16)
    before = call["key_cache"].clone()
    with pytest.raises(Error, match=f"^{sentence}"):
        flash_ext.attention_with_cache(**call, sinks=sinks)
    assert torch.equal(call["key_cache"].view(torch.int16), before.view(torch.int16))
