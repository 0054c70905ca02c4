"""Promise: on a GPU the decode kernel reads a cache where it lies, gives what float64 gives, and is what runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import rand
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import flash_ext
from flash_ext import reference

pytestmark = [pytest.mark.gpu, pytest.mark.kernels("sm80")]
FP8 = torch.float8_e4m3fn
HALF = (torch.bfloat16, torch.float16)


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def ran(call: Callable[[], Any], kernel: str = "decode_kernel") -> tuple[Any, bool]:
    """What a call returns, and whether the kernel was launched in it."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        result = call()
        torch.cuda.synchronize()
    return result, any(kernel in event.name for event in profiler.events())


def places(call: dict[str, Any], b: int, length: int, page: int) -> tuple[Tensor, Tensor]:
    """Slots or pages of a sequence's rows, and where in them."""
    row = torch.arange(max(length, 0), device="cuda")
    if page:
        return call["block_table"][b].long()[row // page], row % page
    slot = int(call["cache_batch_index"][b]) if "cache_batch_index" in call else b
    return torch.full_like(row, slot), row


def example(
    lengths: tuple[int, ...] = (200, 0, 77), heads: tuple[int, int] = (8, 2), queries: int = 1, cols: int = 128,
    rows: int = 256, page: int = 0, index: tuple[int, ...] | None = None, fp8: bool = False, slopes: bool = False,
    dtype: torch.dtype = torch.bfloat16, magnitude: float = 1.0, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of a call, poison in every row that no sequence has."""
    batch, columns = len(lengths), -(-rows // page) if page else 0
    shape = (batch * columns + 2, page) if page else (batch + 2 if index else batch, rows)
    call: dict[str, Any] = {"query": rand(batch, queries, heads[0], cols, dtype=dtype, device="cuda") * magnitude}
    if page:
        call["block_table"] = torch.randperm(shape[0])[: batch * columns].view(batch, columns).int().cuda()
    if index:
        call["cache_batch_index"] = ints(index)
    used = torch.zeros(shape, dtype=torch.bool, device="cuda")
    for b, length in enumerate(lengths):
        used[places(call, b, length, page)] = True
    for name, factor in (("key_cache", magnitude), ("value_cache", 1.0)):
        x = rand(*shape, heads[1], cols, device="cuda") * factor
        call[name] = x.masked_fill(~used[..., None, None], torch.nan).to(FP8 if fp8 else dtype)
    if page:  # behind a sequence's last page there is anything
        for b, length in enumerate(lengths):
            call["block_table"][b, -(-max(length, 0) // page) :] = (-1, 2**31 - 1)[b % 2]
    if fp8:
        for name in ("k_descale", "v_descale"):
            call[name] = torch.rand(batch, heads[1], device="cuda") + 0.5
    if slopes:
        call["alibi_slopes"] = torch.rand(batch, heads[0], device="cuda") * 0.1
    return call | {"cache_seqlens": ints(lengths)} | options


def plain(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """out and lse in float64, sequence by sequence."""
    outs, lses = [], []
    page = call["key_cache"].shape[1] if "block_table" in call else 0
    options = {name: call[name] for name in ("window", "softcap", "scale") if name in call}
    slopes = call.get("alibi_slopes")
    for b, length in enumerate(call["cache_seqlens"].tolist()):
        at = places(call, b, length, page)
        k, v = (call[name].float()[at].double() for name in ("key_cache", "value_cache"))
        if "k_descale" in call:
            k, v = k * call["k_descale"][b][:, None], v * call["v_descale"][b][:, None]
        out, lse = reference.attention(
            *(x.double().transpose(0, 1)[None].cpu() for x in (call["query"][b], k, v)), **options,
            causal=call.get("causal", True), align="bottom_right", return_lse=True,
            alibi_slopes=None if slopes is None else slopes[b].double().cpu(),
        )  # fmt: skip
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.stack(outs), torch.stack(lses)


def check(call: dict[str, Any], out: Tensor, lse: Tensor) -> None:
    """A number of out is off by a rounding of the largest number and what 16-bit probabilities lose, at most."""
    truth, truth_lse = plain(call)
    assert out.isfinite().all() and torch.equal(lse.cpu() == -torch.inf, truth_lse == -torch.inf)
    largest = truth.abs().max().item()
    error = (out.cpu().double() - truth).abs().max().item()
    assert error <= (2**-7 if out.dtype == torch.bfloat16 else 2**-9) * largest, (error, largest)
    torch.testing.assert_close(lse.cpu().double(), truth_lse, rtol=3e-4, atol=3e-5)


CASES: dict[str, dict[str, Any]] = {
    "one query": {},
    "fp16": {"dtype": torch.float16},
    **{f"head dim {n}": {"cols": n, "queries": 2} for n in (64, 256)},
    **{f"head dim {n}, many rows": {"cols": n, "queries": 9} for n in (64, 128, 256)},
    "one head a group": {"heads": (3, 3), "queries": 5},
    "groups of 3": {"heads": (6, 2), "queries": 7},
    "16 heads a group": {"heads": (16, 1), "queries": 3},
    "two tiles of rows": {"queries": 30},
    "more queries than keys": {"lengths": (3, 1, 20), "queries": 14},
    "not causal": {"queries": 4, "causal": False},
    "window": {"queries": 6, "window": (40, 0), "causal": False},
    "window of the right": {"queries": 3, "window": (0, 4), "causal": False},
    "window that hides all": {"lengths": (9, 2, 5), "queries": 12, "window": (1, 0)},
    "softcap and scale": {"queries": 2, "softcap": 3.0, "scale": 0.4},
    "slopes": {"queries": 3, "slopes": True},
    "slots": {"index": (4, 0, 2), "queries": 2},
    "one slot for all": {"index": (3, 3, 3), "lengths": (9, 9, 9)},
    **{f"pages of {n}": {"page": n, "queries": 2} for n in (1, 7, 16, 64)},
    "fp8": {"fp8": True},
    "fp8, fp16": {"fp8": True, "dtype": torch.float16, "queries": 2},
    **{f"fp8, head dim {n}": {"fp8": True, "cols": n, "queries": 3} for n in (64, 256)},
    **{f"fp8, head dim {n}, many rows": {"fp8": True, "cols": n, "queries": 11} for n in (64, 128, 256)},
    "fp8, pages": {"fp8": True, "page": 16, "queries": 2, "slopes": True},
    "fp8, large queries": {"fp8": True, "magnitude": 20.0},
    "large scores": {"magnitude": 60.0, "queries": 2},
    "nothing at all": {"lengths": (0, 0, 0), "queries": 2},
    "negative lengths": {"lengths": (-1, 5, -(2**31)), "queries": 2},
    "full": {"lengths": (256, 255, 254), "queries": 3},
    "many sequences": {"lengths": tuple(range(0, 210, 3)), "heads": (4, 2), "page": 16},
    "long": {"lengths": (8000, 17, 3000), "rows": 8192, "queries": 2},
    "long, alone": {"lengths": (8000,), "rows": 8192, "heads": (2, 1)},
}


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str) -> None:
    call = example(**CASES[name])
    (out, lse), by_kernel = ran(lambda: flash_ext.attention_with_cache(**call, return_lse=True))
    assert by_kernel
    check(call, out, lse)
    assert torch.equal(flash_ext.attention_with_cache(**call), out)  # the same bits again


APPENDS: dict[str, dict[str, Any]] = {
    "one row": {"added": 1},
    "rotary": {"added": 3, "queries": 3, "rotary": 128},
    "rotary of some columns, interleaved": {"added": 2, "queries": 2, "rotary": 32, "rotary_interleaved": True},
    "rotary, not causal": {"added": 2, "queries": 4, "rotary": 64, "causal": False},
    "rotary of the dtype": {"added": 2, "queries": 2, "rotary": 64, "angles": torch.bfloat16},
    "pages": {"added": 4, "queries": 4, "rotary": 128, "page": 16},
    "pages of 1, fp16": {"added": 2, "page": 1, "dtype": torch.float16},
    "slots": {"added": 2, "rotary": 64, "index": (4, 0, 2)},
    "slots that are not there": {"added": 2, "rotary": 64, "index": (4, 0, 2), "wrong": (4, -1, 9)},
    "fp8": {"added": 2, "fp8": True, "rotary": 64},
    "fp8, pages, fp16": {"added": 2, "fp8": True, "page": 64, "dtype": torch.float16},
    "no place": {"added": 3, "queries": 3, "lengths": (255, -1, 256), "rotary": 64},
    "no page": {"added": 3, "lengths": (255, -1, 63), "page": 64},
    "prefill": {"added": 90, "queries": 90, "lengths": (5, 100, 200), "rotary": 128},
}


@pytest.mark.parametrize("name", APPENDS)
def test_new_rows_are_those_of_the_composite(name: str) -> None:
    """Bit for bit in the caches; a backend by name has the composite."""
    options = dict(APPENDS[name])
    added, rotary, angles = options.pop("added"), options.pop("rotary", 0), options.pop("angles", None)
    wrong = options.pop("wrong", None)
    call = example(**options)
    if wrong is not None:
        call["cache_batch_index"] = ints(wrong)
    dtype, batch = call["query"].dtype, call["query"].shape[0]
    for cache in ("key_cache", "value_cache"):
        x = rand(*call[cache].shape, device="cuda") * 3
        call[cache] = x.to(call[cache].dtype)
        call[cache[:-6]] = rand(batch, added, 2, 256, dtype=dtype, device="cuda")[..., ::2] * 400
    if rotary:
        turns = torch.rand(240, rotary // 2, device="cuda") * 6  # the last positions share the last angle
        call |= {
            "rotary_cos": turns.cos().to(angles or torch.float32),
            "rotary_sin": turns.sin().to(angles or torch.float32),
        }
    other = {name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()}
    out, by_kernel = ran(lambda: flash_ext.attention_with_cache(**call), "append_kernel")
    assert by_kernel
    with flash_ext.use_backend("sm80"):
        expected, by_kernel = ran(lambda: flash_ext.attention_with_cache(**other), "append_kernel")
    assert not by_kernel
    for cache in ("key_cache", "value_cache"):
        assert torch.equal(call[cache].float().nan_to_num(), other[cache].float().nan_to_num())
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item())


LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "heads outside": (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), True),
    "part of longer slots": (lambda x: torch.cat((x, x), 1)[:, : x.shape[1]], True),
    "one layer of two": (lambda x: torch.stack((x * torch.nan, x), 1)[:, 1], True),
    "columns outside": (lambda x: x.transpose(2, 3).contiguous().transpose(2, 3), False),
    "rows of an odd size": (lambda x: torch.nn.functional.pad(x, (0, 3))[..., :-3], False),
    "from an odd address": (lambda x: torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape), False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout: str) -> None:
    """Whatever the kernel cannot read is computed all the same."""
    lay, taken = LAYOUTS[layout]
    call = example(queries=2)
    call |= {name: lay(call[name]) for name in ("key_cache", "value_cache")}
    call["query"] = call["query"].transpose(1, 2).contiguous().transpose(1, 2)
    (out, lse), by_kernel = ran(lambda: flash_ext.attention_with_cache(**call, return_lse=True))
    assert by_kernel == taken
    check(call, out, lse)


@pytest.mark.parametrize("name", CASES)
def test_batch_invariant_against_float64(name: str) -> None:
    call = example(**CASES[name], batch_invariant=True)
    (out, lse), by_kernel = ran(lambda: flash_ext.attention_with_cache(**call, return_lse=True))
    assert by_kernel
    check(call, out, lse)


def of_sequence(call: dict[str, Any], b: int) -> dict[str, Any]:
    """The call of one sequence of a call with slots of its own."""
    return call | {name: call[name][b : b + 1] for name in ("query", "key_cache", "value_cache", "cache_seqlens")}


@pytest.mark.parametrize("queries", [1, 4, 16, 40])
@pytest.mark.parametrize(
    "options", [{}, {"window": (700, 0)}, {"cols": 64}, {"cols": 256, "dtype": torch.float16}], ids=str
)
def test_batch_invariant_bits(options: dict[str, Any], queries: int) -> None:
    """Of one piece, of some and of most; the merge of few rows, and that of many."""
    lengths = (1, 255, 257, 4096, 4097, 20000, 40000)
    call = example(lengths=lengths, rows=40000, queries=queries, batch_invariant=True, **options)
    alone = []
    for b in range(len(lengths)):
        result, by_kernel = ran(lambda b=b: flash_ext.attention_with_cache(**of_sequence(call, b), return_lse=True))
        assert by_kernel
        alone.append(result)
    for count in (7, 40, 700):
        which = torch.randint(len(lengths), (count,))
        other = call | {"query": call["query"][which], "cache_seqlens": call["cache_seqlens"][which]}
        other["cache_batch_index"] = which.int().cuda()
        out, lse = flash_ext.attention_with_cache(**other, return_lse=True)
        for b, index in enumerate(which.tolist()):
            assert torch.equal(out[b], alone[index][0][0]), (count, lengths[index])
            assert torch.equal(lse[b], alone[index][1][0]), (count, lengths[index])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_invariant_bits_of_any_strides(layout: str) -> None:
    """What the kernel cannot read is copied for it."""
    call = example(queries=2, batch_invariant=True)
    expected = flash_ext.attention_with_cache(**call)
    call |= {name: LAYOUTS[layout][0](call[name]) for name in ("key_cache", "value_cache")}
    out, by_kernel = ran(lambda: flash_ext.attention_with_cache(**call))
    assert by_kernel and torch.equal(out, expected)


def test_many_sequences_against_float64() -> None:
    """The kernel tells the merge where parts are."""
    call = example(lengths=tuple(range(300)), rows=300, heads=(2, 1), cols=64)
    out, lse = flash_ext.attention_with_cache(**call, return_lse=True)
    check(call, out, lse)


NOT_TAKEN: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "head dim 80": {"cols": 80},
    "long prefill": {"queries": 100},
}


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_what_it_does_not_take_is_computed(name: str) -> None:
    call = example(**NOT_TAKEN[name])
    (out, lse), by_kernel = ran(lambda: flash_ext.attention_with_cache(**call, return_lse=True))
    assert not by_kernel
    check(call, out, lse)


def test_values_of_other_columns_are_computed() -> None:
    call = example(queries=2)
    whole = flash_ext.attention_with_cache(**call)
    out, by_kernel = ran(
        lambda: flash_ext.attention_with_cache(**call | {"value_cache": call["value_cache"][..., :64].contiguous()})
    )
    assert not by_kernel
    torch.testing.assert_close(out, whole[..., :64], rtol=2e-2, atol=2e-2)


def test_wrong_pages_and_slots_are_not_followed() -> None:
    call = example(lengths=(100, 3, 60), page=16)
    for name in ("key_cache", "value_cache"):
        call[name] = rand(*call[name].shape, dtype=torch.bfloat16, device="cuda")
    call["block_table"] = torch.full_like(call["block_table"], 2**31 - 1)
    call["block_table"][1] = -(2**31)
    assert flash_ext.attention_with_cache(**call).isfinite().all()
    call = example(index=(0, 1, 2)) | {"cache_batch_index": ints((-1, 5, 2**31 - 1))}
    out, lse = flash_ext.attention_with_cache(**call, return_lse=True)
    assert not out.any() and (lse == -torch.inf).all()


def test_a_cuda_graph_is_replayed_with_other_lengths() -> None:
    call = example(lengths=(4096, 0, 17), rows=4096, queries=2, page=64)
    for name in ("key_cache", "value_cache"):
        call[name] = rand(*call[name].shape, dtype=torch.bfloat16, device="cuda")
    call["block_table"] = call["block_table"].clamp(0, call["key_cache"].shape[0] - 1)
    flash_ext.attention_with_cache(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_ext.attention_with_cache(**call, return_lse=True)
    for lengths in ((5, 4096, 30), (4096, 4096, 4096), (-1, 0, 1), (4096, 0, 17)):
        call["cache_seqlens"].copy_(ints(lengths))
        graph.replay()
        check(call, out, lse)
