"""Promise: explain says what the Hopper kernels would run and why they stand aside; nothing here needs a GPU.

Plans are for an H200 where no GPU is there. The builds that are narrowed to a few head dimensions leave those out.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers import HALF, name_of
from torch import Tensor

import flash_ext

HAS_SM90 = "sm90" in flash_ext.build_info()["cuda"]["backends"]
pytestmark = [
    pytest.mark.skipif(not HAS_SM90, reason="needs a build with sm90 kernels"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="plans for the card that is there"),
]

MULTIPROCESSORS = 132  # of the H200


def explain(query: Tensor, key: Tensor, value: Tensor | None = None, **options: Any) -> flash_ext.Explanation:
    plan = flash_ext.explain(query, key, key if value is None else value, device="cuda", **options)
    for refused in plan.refusals:
        narrowed = r"this build has no .*kernels|is more than (64|96|192)|more than 128$|more than 64 in backward"
        if refused.backend == "sm90" and re.search(narrowed, refused.reason):
            pytest.skip(refused.reason)
    return plan


def reason_of(plan: flash_ext.Explanation, pass_name: str) -> str:
    (reason,) = (r.reason for r in plan.refusals if (r.backend, r.pass_name) == ("sm90", pass_name))
    return reason


def refusal(*tensors: Tensor, **options: Any) -> str:
    plan = explain(*tensors, **options)
    assert plan.forward.backend != "sm90"
    reason = reason_of(plan, "forward")
    with flash_ext.use_backend("sm90"), pytest.raises(flash_ext.AttentionError) as caught:
        explain(*tensors, **options)
    assert str(caught.value) == f"sm90 refuses: {reason}"
    return reason


def backward_refusal(*tensors: Tensor, **options: Any) -> str:
    """Of a call that forward serves: by name, too, because it may need no gradients."""
    plan = explain(*tensors, **options)
    assert (plan.forward.backend, plan.backward.backend) == ("sm90", "sm80")
    with flash_ext.use_backend("sm90"):
        named = explain(*tensors, **options)
    assert (named.forward.backend, named.backward.backend) == ("sm90", "none")
    assert named.forward == plan.forward
    assert reason_of(named, "backward") == reason_of(plan, "backward")
    assert f"sm90 refuses (backward): {reason_of(plan, 'backward')}" in str(named)
    return reason_of(plan, "backward")


def half(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 500, 1024, 2048, 4096, 16384])
def test_plan(length: int, causal: bool, head_dim: int, dtype: torch.dtype) -> None:
    q, k = half(2, 16, length, head_dim, dtype=dtype), half(2, 4, max(length, 65), head_dim, dtype=dtype)
    plan = explain(q, k, causal=causal, align="bottom_right")
    forward = plan.forward
    assert (forward.backend, forward.kernel) == ("sm90", "sm90.forward")
    assert forward.block_m in (128, 192, 256) and forward.block_n % 16 == 0 and forward.stages in (2, 3, 4)
    assert dict(forward.on_chip).keys() == {"q", "k", "v", "barriers and alignment"}
    assert forward.on_chip_bytes <= forward.on_chip_limit == 227 * 1024
    warpgroups = forward.block_m // 64
    assert 128 * (forward.producer_registers + warpgroups * forward.registers) <= 65536
    assert forward.splits == 1
    # One query of a group's heads are queries of one head.
    tiles = 2 * (4 if length == 1 else 16) * -(-length // forward.block_m)
    assert forward.waves == pytest.approx(tiles / MULTIPROCESSORS, abs=1e-6)
    assert forward.grid == min(tiles, MULTIPROCESSORS)
    assert 1 <= forward.l2_section <= 8
    counted = forward.schedule.endswith(", tiles by a counter")
    assert counted or forward.schedule.endswith(", tiles in turn")
    assert forward.scratch_bytes == (64 if counted else 0)
    assert forward.schedule in str(plan) and f"{forward.producer_registers} to load" in str(plan)


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 96, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [16, 500, 1024, 16384])
def test_backward_plan(length: int, causal: bool, head_dim: int, dtype: torch.dtype) -> None:
    q, k = half(2, 16, length, head_dim, dtype=dtype), half(2, 4, length, head_dim, dtype=dtype)
    plan = explain(q, k, causal=causal)
    backward = plan.backward
    assert (backward.backend, backward.kernel) == ("sm90", "sm90.backward")
    assert backward.block_m % 64 == 0 and backward.block_n % 64 == 0 and backward.stages >= 1
    uses = {"k", "v", "q", "d_out", "ds", "dq staging", "lse and delta", "barriers and alignment"}
    assert dict(backward.on_chip).keys() == uses and all(size > 0 for _, size in backward.on_chip)
    assert backward.on_chip_bytes <= backward.on_chip_limit == 227 * 1024
    assert (backward.registers, backward.producer_registers) == (240, 24)
    tiles = 2 * 4 * -(-length // backward.block_n)
    assert backward.waves == pytest.approx(tiles / MULTIPROCESSORS, abs=1e-6)
    ordered = length <= 512 and not causal
    persistent = ordered or (causal and length <= 1024)
    assert backward.schedule.startswith("dq in order, ") == ordered
    assert backward.schedule.endswith("persistent") == persistent
    assert backward.grid == (min(tiles, MULTIPROCESSORS) if persistent else tiles)
    assert 1 <= backward.l2_section <= 8
    heads, width = 2 * 16, 64 if head_dim <= 64 else 128
    padded = -(-length // backward.block_m) * backward.block_m
    assert heads * length * head_dim * 4 <= backward.scratch_bytes <= heads * padded * (width + 2) * 4 + 4096
    with flash_ext.use_backend("sm90"):
        assert explain(q, k, causal=causal).backward == backward


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("head_dim", [136, 192, 256])
@pytest.mark.parametrize("length", [16, 500, 16384])
def test_wide_backward_plan(length: int, head_dim: int, dtype: torch.dtype) -> None:
    """Two kernels, whose sums have an order: they serve the deterministic mode, too."""
    q, k = half(2, 16, length, head_dim, dtype=dtype), half(2, 4, length, head_dim, dtype=dtype)
    backward = explain(q, k, deterministic=True).backward
    assert (backward.backend, backward.kernel) == ("sm90", "sm90.backward.wide")
    assert (backward.block_m, backward.block_n, backward.stages) == (64, 64, 2)
    assert dict(backward.on_chip).keys() == {"k", "v", "q", "d_out", "p", "lse and delta", "barriers and alignment"}
    assert backward.on_chip_bytes <= backward.on_chip_limit == 227 * 1024
    assert backward.grid == 2 * 4 * -(-length // 64)
    assert backward.scratch_bytes <= 2 * 16 * 2 * (length + 127) * 4 + 4096


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [16, 500, 1024, 16384])
def test_deterministic_backward_plan(length: int, causal: bool, head_dim: int, dtype: torch.dtype) -> None:
    """The same tiles; four bytes more for each tile of queries, and four for the counter of tiles of keys."""
    q, k = half(2, 16, length, head_dim, dtype=dtype), half(2, 4, length, head_dim, dtype=dtype)
    strict, loose = (explain(q, k, causal=causal, deterministic=value).backward for value in (True, False))
    assert (strict.backend, strict.kernel) == ("sm90", "sm90.backward")
    assert strict.on_chip == loose.on_chip and strict.block_m == loose.block_m
    tiles = 2 * 4 * -(-length // strict.block_n)
    assert strict.schedule == "dq in order, persistent"
    assert strict.grid == min(tiles, MULTIPROCESSORS)
    turns = 4 * (2 * 16 * -(-length // strict.block_m) + 1)
    more = 0 if loose.schedule == strict.schedule else -(-turns // 128) * 128
    assert strict.scratch_bytes - loose.scratch_bytes == more


def test_short_causal_columns_are_persistent() -> None:
    """In backward, where tiles of keys differ by the queries that see them."""

    def schedule(length: int, **options: Any) -> str:
        q = half(1, 16, length, 64)
        return explain(q, q, **options).backward.schedule

    assert schedule(1024, causal=True) == "persistent"
    assert schedule(1024) == schedule(16384, causal=True) == "a tile of keys a block"


def test_tiles_that_differ_are_counted() -> None:
    def schedule(length: int, **options: Any) -> str:
        q = half(4, 16, length, 128)
        return explain(q, q, **options).forward.schedule

    assert schedule(1024).endswith("in turn") and schedule(1000).endswith("by a counter")
    assert schedule(1024, causal=True).endswith("by a counter")
    assert schedule(100).endswith("in turn")
    one = half(1, 16, 1024, 128)  # 128 tiles: a block each
    assert explain(one, one, causal=True).forward.schedule.endswith("in turn")


def test_few_keys_have_smaller_tiles() -> None:
    def tile(length: int, head_dim: int, **options: Any) -> tuple[int, int]:
        q = half(8, 16, length, head_dim)
        forward = explain(q, q, **options).forward
        return forward.block_m, forward.block_n

    assert tile(1024, 128) == tile(16384, 128, window=(512, 0)) == tile(2048, 128, causal=True) == (128, 128)
    assert tile(2048, 128) == tile(4096, 128, causal=True) == (192, 80)
    assert tile(512, 64) == tile(1024, 64, causal=True) == (256, 64) and tile(1024, 64) == (192, 128)
    assert tile(1024, 256) == tile(16384, 256)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_keys_are_split_where_tiles_are_few(head_dim: int) -> None:
    def plan(batch: int, heads: int, queries: int, keys: int, **options: Any) -> tuple[int, int]:
        q, k = half(batch, heads, queries, head_dim), half(batch, heads // 4 or 1, keys, head_dim)
        whole = explain(q, k, **options)
        forward = whole.forward
        split = forward.splits > 1
        assert forward.kernel == ("sm90.forward.split" if split else "sm90.forward")
        assert (f"{forward.splits} parts of {forward.split_keys:,} keys" in str(whole)) == split
        if split:
            assert forward.scratch_bytes == 4 * forward.splits * batch * heads * queries * (head_dim + 1)
            assert (forward.splits - 1) * forward.split_keys < keys <= forward.splits * forward.split_keys
        return forward.splits, forward.grid

    splits, grid = plan(1, 32, 1, 16384)
    assert splits * 8 == grid and 100 < grid <= 132  # a tile is the four heads of a group
    assert plan(16, 32, 1, 16384) == (1, 128) and plan(64, 32, 1, 16384) == (1, 132)
    assert plan(1, 1, 8192, 8192, causal=True)[0] > 1
    assert plan(4, 16, 4096, 4096)[0] == 1
    assert plan(1, 32, 1, 65)[0] == 1
    # Few queries of 32 heads on 8: a tile of a group, as for one query.
    assert plan(1, 32, 8, 16384) == (splits, grid) and plan(16, 32, 8, 16384) == (1, 128)
    shared = "heads of a group share tiles"
    assert shared in explain(half(1, 32, 8, head_dim), half(1, 8, 16384, head_dim)).forward.schedule
    assert shared not in explain(half(1, 32, 8, head_dim), half(1, 32, 16384, head_dim)).forward.schedule
    # The last keys that one query sees, of many.
    assert plan(1, 32, 1, 65536, window=(100, 0), align="bottom_right")[0] == 1


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("length", [72, 504, 4096])
def test_plan_with_scores(length: int, head_dim: int, dtype: torch.dtype) -> None:
    """One tile for each head dimension, which leaves room for those of a bias and a mask."""
    q, k = half(2, 16, length, head_dim, dtype=dtype), half(2, 4, length, head_dim, dtype=dtype)
    scores = {
        "mask": {"mask": half(2, 1, 1, length).bool()},
        "bias": {"bias": half(16, length, length, dtype=dtype)},
        "both": {"mask": half(2, 1, 1, length).bool(), "bias": half(16, length, length, dtype=torch.float32)},
    }
    plans = [explain(q, k, **options) for options in scores.values()]
    assert plans[0].forward == plans[1].forward == plans[2].forward
    forward = plans[0].forward
    assert (forward.backend, forward.kernel) == ("sm90", "sm90.forward.scored")
    assert dict(forward.on_chip).keys() == {"q", "k", "v", "bias and mask", "barriers and alignment"}
    assert forward.on_chip_bytes <= forward.on_chip_limit == 227 * 1024
    assert forward.block_m == (192 if head_dim <= 128 else 128)
    assert 128 * (forward.producer_registers + forward.block_m // 64 * forward.registers) <= 65536
    assert dict(forward.on_chip)["bias and mask"] >= forward.block_m * forward.block_n * 5
    assert forward.grid == min(2 * 16 * -(-length // forward.block_m), MULTIPROCESSORS)
    with flash_ext.use_backend("sm90"):
        assert explain(q, k, **scores["both"]).forward == forward


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 96, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [72, 504, 1024, 4096])
def test_backward_plan_with_scores(length: int, causal: bool, head_dim: int, dtype: torch.dtype) -> None:
    """The tiles of the kernel without, one stage of dS less, and 4 bytes a query of scratch more."""
    tensors = wanting("query", "key", "value", shape=(2, 16, length, head_dim), dtype=dtype)
    scores = {
        "mask": {"mask": half(2, 1, 1, length).bool()},
        "bias": {"bias": half(16, length, length, dtype=dtype)},
        "both": {"mask": half(2, 1, 1, length).bool(), "bias": half(16, length, length, dtype=torch.float32)},
    }
    plans = [explain(**tensors, causal=causal, **options) for options in scores.values()]
    assert plans[0].backward == plans[1].backward == plans[2].backward
    backward, plain = plans[0].backward, explain(**tensors, causal=causal).backward
    assert (backward.backend, backward.kernel) == ("sm90", "sm90.backward.scored")
    assert (backward.block_m, backward.block_n, backward.stages) == (plain.block_m, plain.block_n, plain.stages)
    assert dict(backward.on_chip).keys() == dict(plain.on_chip).keys() | {"bias and mask"}
    assert 2 * dict(backward.on_chip)["ds"] == dict(plain.on_chip)["ds"]
    assert backward.on_chip_bytes <= backward.on_chip_limit == 227 * 1024
    # Of 64 queries: a bias in float, a mask in bits.
    assert dict(backward.on_chip)["bias and mask"] >= 64 * backward.block_n * 4 + 64 * backward.block_n // 8
    assert 128 * (backward.producer_registers + 2 * backward.registers) <= 65536
    assert backward.schedule == ("persistent" if causal and length <= 1024 else "a tile of keys a block")
    tiles = 2 * 16 * -(-length // backward.block_n)
    assert backward.grid == (min(tiles, MULTIPROCESSORS) if backward.schedule == "persistent" else tiles)
    if plain.schedule == backward.schedule:
        padded = -(-length // backward.block_m) * backward.block_m
        assert backward.scratch_bytes - plain.scratch_bytes == -(-2 * 16 * padded * 4 // 128) * 128


def test_scattered_columns_are_no_obstacle() -> None:
    """They are gathered before the kernels see them."""
    q = half(2, 4, 64, 256).transpose(-1, -2)
    plan = explain(q, half(2, 4, 256, 64))
    assert (plan.forward.backend, plan.backward.backend) == ("sm90", "sm90")
    assert [copy.argument for copy in plan.copies] == ["query"]


def test_an_l2_section_holds_what_the_cache_does() -> None:
    """16 MiB: K and V of a head of 16,384 x 64 take 4. Tiles in turn go head by head."""
    q = half(4, 16, 16384, 64)
    assert explain(q, q, causal=True).forward.l2_section == 4
    q = half(4, 16, 1024, 128)
    assert explain(q, q).forward.l2_section == 1


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "softcap": ({"softcap": 5.0}, "a softcap is not supported"),
    "dropout": ({"dropout_p": 0.1}, "dropout is not supported"),
    "zero": ({"scale": 0.0}, "scale is not between 1e-30 and 1e30"),
    "negative": ({"scale": -1.0}, "scale is not between 1e-30 and 1e30"),
    "slopes": ({"alibi_slopes": torch.empty(4, device="meta")}, "alibi_slopes are not supported"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_refused_options(name: str) -> None:
    options, reason = OPTIONS[name]
    q = half(2, 4, 256, 64)
    assert explain(q, q).forward.backend == "sm90"
    assert refusal(q, q, **options) == reason


def test_small_scores_are_refused() -> None:
    """sm80 is faster there; one query more, or eight keys, and it is not."""

    def call(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        q, k = half(2, 4, queries, 64), half(2, 4, keys, 64)
        return q, k, k, {"bias": half(4, queries, keys)}

    *tensors, options = call(64, 64)
    assert refusal(*tensors, **options) == "a mask or bias of at most 64 queries by 64 keys is not supported"
    for lengths in ((65, 64), (64, 72), (1, 4096)):
        *tensors, options = call(*lengths)
        assert explain(*tensors, **options).forward.backend == "sm90"


def test_a_bias_of_unaligned_rows() -> None:
    """Up to head dim 128 sm80 is faster; one row for all queries is no obstacle."""
    for head_dim, backend in ((64, "sm80"), (128, "sm80"), (192, "sm90"), (256, "sm90")):
        q, k = half(1, 2, 300, head_dim), half(1, 2, 301, head_dim)
        assert explain(q, k, bias=half(300, 301)).forward.backend == backend
        assert explain(q, k, bias=half(300, 302).T.contiguous().T[:, :301]).forward.backend == backend
        assert explain(q, k, bias=half(300, 304)[:, :301]).forward.backend == "sm90"
        assert explain(q, k, bias=half(301)).forward.backend == "sm90"
        assert explain(q, k, mask=half(300, 301).bool()).forward.backend == "sm90"
    for head_dim in (64, 128):
        query, key = half(1, 2, 300, head_dim).requires_grad_(), half(1, 2, 301, head_dim).requires_grad_()
        value = half(1, 2, 301, head_dim).requires_grad_()
        for options, backend in (
            ({"bias": half(300, 301)}, "sm80"),
            ({"bias": half(300, 304)[:, :301]}, "sm90"),
            ({"bias": half(301)}, "sm90"),
            ({"mask": half(300, 301).bool()}, "sm90"),
        ):
            assert explain(query, key, value, **options).backward.backend == backend
    q = half(1, 2, 300, 64)
    reason = "bias has rows that do not start at multiples of 16 bytes or are not contiguous"
    assert refusal(q, q, bias=half(300, 300)) == reason


def wanting(
    *names: str, shape: tuple[int, ...] = (2, 4, 256, 64), dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    return {name: half(*shape, dtype=dtype).requires_grad_(name in names) for name in ("query", "key", "value")}


ALL = ("query", "key", "value")


BACKWARD: dict[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
    "bias gradient": (
        wanting(*ALL),
        {"bias": half(2, 4, 256, 256, dtype=torch.float32).requires_grad_()},
        "the gradient of a bias that is not broadcast is not supported beside a mask or in float32",
    ),
    "wide mask": (
        wanting(*ALL, shape=(2, 4, 256, 136)),
        {"mask": half(256, 256).bool()},
        "a mask is not supported in backward above head dim 128",
    ),
    "wide bias": (
        wanting(*ALL, shape=(2, 4, 256, 256)),
        {"bias": half(256, 256)},
        "a bias is not supported in backward above head dim 128",
    ),
    "mask in order": (
        wanting(*ALL),
        {"mask": half(256, 256).bool(), "deterministic": True},
        "a mask is not supported in deterministic backward",
    ),
    "bias in order": (
        wanting(*ALL),
        {"bias": half(256, 256), "deterministic": True},
        "a bias is not supported in deterministic backward",
    ),
    "one key": (wanting(), {"window": (0, 0)}, "a band of one key is not supported in backward"),
    "own key": (wanting(), {"window": (0, None), "causal": True}, "a band of one key is not supported in backward"),
    "few keys": (
        {"query": half(2, 4, 256, 64), "key": half(2, 4, 15, 64), "value": half(2, 4, 15, 64)},
        {},
        "fewer than 16 keys are not supported in backward",
    ),
    "value heads": (
        wanting() | {"value": half(2, 2, 256, 64)},
        {},
        "other heads of value than of key are not supported in backward",
    ),
    "no dq": (wanting("key", "value"), {}, "a backward without the gradient of query is not supported"),
    "no dk": (wanting("query", "value"), {}, "a backward without the gradient of key is not supported"),
    "only dq": (wanting("query"), {}, "a backward without the gradient of key is not supported"),
    "no dv": (wanting("query", "key"), {}, "a backward without the gradient of value is not supported"),
    "broadcast query": (
        wanting() | {"query": half(4, 256, 64)},
        {"sdpa": True},
        "the gradient of a broadcast query is not supported",
    ),
    "broadcast key": (
        wanting() | {"key": half(1, 4, 256, 64)},
        {"sdpa": True},
        "the gradient of a broadcast key is not supported",
    ),
    "broadcast value": (
        wanting() | {"value": half(1, 4, 256, 64)},
        {"sdpa": True},
        "the gradient of a broadcast value is not supported",
    ),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_refused_in_backward(name: str) -> None:
    tensors, options, reason = BACKWARD[name]
    assert backward_refusal(*tensors.values(), **options) == reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
def test_refused_dtypes(dtype: torch.dtype) -> None:
    q = half(2, 4, 256, 64, dtype=dtype)
    assert refusal(q, q) == "only fp16 and bf16 are supported"


def test_refused_head_dims() -> None:
    q = half(2, 4, 256, 60)
    assert refusal(q, q) == "head_dim 60 is not a multiple of 8"
    q, v = half(2, 4, 256, 64), half(2, 4, 256, 33)
    assert refusal(q, q, v) == "head_dim_v 33 is not a multiple of 8"


def test_refused_layouts() -> None:
    q = half(2, 4, 256, 64)
    assert refusal(half(2, 4, 256, 65)[..., :64], q) == "query has a stride that is not a multiple of 16 bytes"
    assert refusal(q, q, half(2, 4, 256, 72)[..., 1:65]) == "value does not start at a multiple of 16 bytes"
    assert refusal(q, q, half(2, 4, 1, 64).expand(2, 4, 256, 64)) == "value repeats one row"
    turned = half(3, 2, 2, 4, 256, 64).permute(2, 1, 0, 3, 4, 5)
    other = half(2, 2, 3, 4, 256, 64)
    assert "batch dimensions that do not merge" in refusal(turned, other, sdpa=True)


def test_the_start_of_a_real_tensor_counts_too() -> None:
    """explain looks at meta copies, which start where the tensor does in its storage."""
    buffer = torch.empty(4 * 256 * 64 + 8, dtype=torch.bfloat16)
    for offset, backend in ((0, "sm90"), (8, "sm90"), (3, "sm80")):
        q = buffer[offset : offset + 4 * 256 * 64].view(1, 4, 256, 64)
        assert explain(q, q).forward.backend == backend


ACCEPTED: dict[str, tuple[Tensor, Tensor]] = {
    "packed heads": (half(2, 256, 3, 4, 64)[:, :, 0].transpose(1, 2), half(2, 256, 3, 4, 64)[:, :, 1].transpose(1, 2)),
    "columns of a wider one": (half(2, 4, 256, 128)[..., 64:], half(2, 4, 256, 128)[..., :64]),
    "broadcast heads": (half(2, 4, 256, 64), half(2, 1, 256, 64).expand(2, 4, 256, 64)),
    "broadcast batch": (half(2, 4, 256, 64), half(1, 4, 256, 64).expand(2, 4, 256, 64)),
    "one row": (half(2, 4, 1, 64), half(2, 4, 256, 64)),
    "one head of an odd stride": (half(2, 4, 256, 64), half(40000).as_strided((2, 1, 256, 64), (16384, 3, 64, 1))),
    "one row of an odd stride": (half(1000).as_strided((2, 4, 1, 64), (256, 64, 5, 1)), half(2, 4, 256, 64)),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_layouts(name: str) -> None:
    plan = explain(*ACCEPTED[name])
    assert (plan.forward.backend, plan.backward.backend) == ("sm90", "sm90")
