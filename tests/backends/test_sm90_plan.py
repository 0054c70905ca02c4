"""Promise: explain says what the Hopper kernels would run; nothing here needs a GPU.

The builds that are narrowed to a few head dimensions leave those out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import HALF, name_of
from sm90_helpers import PLANS_ALONE, explain, half, wanting
from torch import Tensor

import flash_ext

pytestmark = PLANS_ALONE

MULTIPROCESSORS = 132  # of the H200


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("head_dim", [8, 40, 64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 500, 1024, 2048, 4096, 16384])
def test_plan(length: int, causal: bool, head_dim: int, dtype: torch.dtype) -> None:
    q, k = half(2, 16, length, head_dim, dtype=dtype), half(2, 4, max(length, 129), head_dim, dtype=dtype)
    with flash_ext.use_backend("sm90"):
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
    stored = length <= 128
    ordered = length <= 512 and not causal and not stored
    persistent = ordered
    assert backward.schedule.startswith("dq in order, ") == ordered
    assert backward.schedule.startswith("dq stored at once, ") == stored
    assert backward.schedule.endswith("persistent") == persistent
    assert backward.grid == (min(tiles, MULTIPROCESSORS) if persistent else tiles)
    assert 1 <= backward.l2_section <= 8
    heads, width = 2 * 16, 0 if stored else 64 if head_dim <= 64 else 128
    padded = -(-length // backward.block_m) * backward.block_m
    least = 0 if stored else heads * length * head_dim * 4
    assert least <= backward.scratch_bytes <= heads * padded * (width + 3) * 4 + 4096
    with flash_ext.use_backend("sm90"):
        assert explain(q, k, causal=causal).backward == backward


@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("head_dim", [136, 192, 256])
@pytest.mark.parametrize("length", [16, 500, 16384])
def test_two_pass_backward_plan(length: int, head_dim: int, dtype: torch.dtype) -> None:
    """Two kernels, whose sums have an order: they serve the deterministic mode, too."""
    q, k = half(2, 16, length, head_dim, dtype=dtype), half(2, 4, length, head_dim, dtype=dtype)
    backward = explain(q, k, deterministic=True).backward
    assert (backward.backend, backward.kernel) == ("sm90", "sm90.backward.two_pass")
    assert (backward.block_m, backward.block_n, backward.stages) == (64, 64, 3 if head_dim <= 192 else 2)
    assert dict(backward.on_chip).keys() == {"k", "v", "q", "d_out", "p", "lse and delta", "barriers and alignment"}
    assert backward.on_chip_bytes <= backward.on_chip_limit == 227 * 1024
    assert backward.grid == 2 * 4 * -(-length // 64)
    assert backward.scratch_bytes <= 2 * 16 * 3 * (length + 127) * 4 + 4096


def test_two_pass_backward_of_fewer_columns_of_values() -> None:
    """Tiles of V and dO have 128 columns beside 192 of K and Q, but where scores are added to."""
    q, v = half(2, 16, 500, 192), half(2, 16, 500, 128)
    for options, columns in (({}, 128), ({"deterministic": True}, 128), ({"softcap": 5.0}, 192)):
        backward = explain(q, q, v, **options).backward
        on_chip = dict(backward.on_chip)
        assert backward.backend == "sm90" and on_chip["k"] == 64 * 192 * 2 and on_chip["v"] == 64 * columns * 2
        assert on_chip["d_out"] * 192 == on_chip["q"] * columns
    q, v = half(2, 16, 500, 192), half(2, 16, 500, 136)
    assert dict(explain(q, q, v).backward.on_chip)["v"] == 64 * 192 * 2


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
    if length <= 128:
        assert strict == loose and strict.schedule == "dq stored at once, a tile of keys a block"
        return
    assert strict.schedule == "dq in order, persistent"
    assert strict.grid == min(tiles, MULTIPROCESSORS)
    turns = 4 * (2 * 16 * -(-length // strict.block_m) + 1)
    more = 0 if loose.schedule == strict.schedule else -(-turns // 128) * 128
    assert strict.scratch_bytes - loose.scratch_bytes == more


def test_dq_of_one_tile_of_keys_is_stored() -> None:
    """Where all tiles of queries meet it; dropout, a softcap, and scores above head dim 64 sum dq in float."""

    def stored(queries: int, keys: int, head_dim: int = 64, batch: int = 8, **options: Any) -> str:
        q, k = half(batch, 16, queries, head_dim), half(batch, 16, keys, head_dim)
        with flash_ext.use_backend("sm90"):
            return explain(q, k, **options).backward.schedule

    assert stored(1024, 128) == stored(1024, 77) == "dq stored at once, a tile of keys a block"
    assert stored(1024, 128, batch=32) == stored(128, 128, 128, batch=64) == "dq stored at once, persistent"
    assert stored(128, 128, causal=True).startswith("dq stored")
    assert stored(1024, 77, mask=torch.ones(1024, 77, dtype=torch.bool, device="meta")).startswith("dq stored")
    for others in (
        stored(1024, 129),
        stored(1024, 77, dropout_p=0.1),
        stored(1024, 77, softcap=30.0),
        stored(1024, 77, 128, mask=torch.ones(1024, 77, dtype=torch.bool, device="meta")),
        stored(1024, 77, window=(16, 16)),
    ):
        assert not others.startswith("dq stored")


def test_many_short_causal_columns_are_persistent() -> None:
    """In backward, where tiles of keys differ by the queries that see them, and a block gets eight or more."""

    def schedule(batch: int, length: int, **options: Any) -> str:
        q = half(batch, 16, length, 64)
        return explain(q, q, **options).backward.schedule

    assert schedule(9, 1024, causal=True) == "persistent"
    others = schedule(9, 1024), schedule(9, 16384, causal=True), schedule(8, 1024, causal=True)
    assert set(others) == {"a tile of keys a block"}


def test_many_short_tiles_run_in_order() -> None:
    """dq is then not filled with zeros; with few of them, or longer ones, waiting for a turn costs more."""

    def in_order(batch: int, length: int, head_dim: int, **options: Any) -> bool:
        q = half(batch, 16, length, head_dim)
        return explain(q, q, **options).backward.schedule == "dq in order, persistent"

    for options in ({"causal": True}, {"window": (100, 0)}):
        assert in_order(8, 500, 64, **options) and not in_order(7, 500, 64, **options)
    for options in ({}, {"causal": True}, {"window": (100, 0)}):
        assert in_order(4, 1024, 128, **options) and not in_order(3, 1024, 128, **options)
        longest = 2048 if options else 1024  # where all tiles of keys see as many queries
        assert in_order(2 if options else 4, longest, 128, **options) and not in_order(8, longest + 1, 128, **options)
        assert not in_order(8, 1024, 64, **options)
    assert in_order(1, 500, 64) and not in_order(8, 600, 64)


def test_packed_sequences_in_one_order() -> None:
    """In deterministic mode, and where dense calls of the mean length would; each kernel by its name."""

    def backward(batch: int, length: int, head_dim: int = 64, longest: int | None = None, **options: Any) -> Any:
        rows = half(batch * length, 16, head_dim).requires_grad_()
        cu = torch.empty(batch + 1, dtype=torch.int32, device="meta")
        return explain(rows, rows, cu_seqlens_q=cu, max_q=longest or length, **options).backward

    in_order, in_any = "sm90.backward.packed.in_order", "sm90.backward.packed"
    for head_dim in (64, 128):
        assert backward(16, 1024, head_dim, causal=True).kernel == in_order
        assert backward(16, 1024, head_dim, causal=True, longest=3000).kernel == in_order
        for others in (
            backward(16, 1024, head_dim),
            backward(3, 1024, head_dim, causal=True),
            backward(16, 1024, head_dim, causal=True, longest=3100),
        ):
            assert others.kernel == in_any and others.schedule == "a tile of keys a block"
        for options in ({"deterministic": True}, {"batch_invariant": True}):
            for length in (256, 1024, 8192):
                strict, loose = backward(4, length, head_dim, **options), backward(4, length, head_dim)
                assert (strict.kernel, strict.schedule) == (in_order, "dq in order, persistent")
                assert strict.block_m == loose.block_m and strict.grid <= MULTIPROCESSORS
        assert backward(100, 8, head_dim, deterministic=True).backend == "sm80"
        assert backward(100, 8, head_dim, batch_invariant=True).kernel == in_order
        mask = torch.empty(4, 1, 1, 1024, dtype=torch.bool, device="meta")
        for options in ({"mask": mask}, {"dropout_p": 0.1}):
            assert backward(4, 1024, head_dim, **options).kernel == in_any
            assert backward(4, 1024, head_dim, deterministic=True, **options).backend == "sm80"
    assert backward(4, 1024, 160, deterministic=True).backend == "sm80"
    for kernel in (in_order, in_any):
        with flash_ext.use_backend(kernel):
            assert backward(16, 1024, causal=True).kernel == backward(16, 1024).kernel == kernel


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


def test_narrow_values_have_tiles_of_more_keys() -> None:
    def tile(head_dim: int, head_dim_v: int, **options: Any) -> tuple[int, int]:
        q, v = half(2, 16, 4096, head_dim), half(2, 16, 4096, head_dim_v)
        forward = explain(q, q, value=v, **options).forward
        assert forward.kernel == "sm90.forward" and forward.on_chip_bytes <= forward.on_chip_limit
        return forward.block_m, forward.block_n

    assert tile(192, 128) == tile(136, 8) == tile(192, 128, batch_invariant=True) == (128, 128)
    assert tile(192, 136) == tile(128, 192) == (128, 96)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_keys_are_split_where_tiles_are_few(head_dim: int) -> None:
    def plan(batch: int, heads: int, queries: int, keys: int, **options: Any) -> tuple[int, int]:
        q, k = half(batch, heads, queries, head_dim), half(batch, heads // 4 or 1, keys, head_dim)
        with flash_ext.use_backend("sm90"):
            whole = explain(q, k, **options)
        forward = whole.forward
        split = forward.splits > 1
        assert forward.kernel == ("sm90.forward.split" if split else "sm90.forward")
        assert (f"{forward.splits} parts of {forward.split_keys:,} keys" in str(whole)) == split
        if split:
            assert forward.scratch_bytes == 4 * forward.splits * batch * heads * queries * (head_dim + 2)
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
        "slopes": {"alibi_slopes": half(16, dtype=torch.float32)},
        "dropout": {"dropout_p": 0.1},
    }
    with flash_ext.use_backend("sm90"):  # a short call may cost sm80 less
        plans = [explain(q, k, **options) for options in scores.values()]
    forward = plans[0].forward
    ranges = 8 * 2 * 16 * -(-length // forward.block_m)  # of a mask, core/mask_ranges.h
    for options, plan in zip(scores.values(), plans, strict=True):
        counter = plans[-1].forward.scratch_bytes
        assert plan.forward.scratch_bytes == (64 + ranges if "mask" in options else counter)
        assert replace(plan.forward, scratch_bytes=0) == replace(forward, scratch_bytes=0)
    assert (forward.backend, forward.kernel) == ("sm90", "sm90.forward.scored")
    assert dict(forward.on_chip).keys() == {"q", "k", "v", "bias and mask", "barriers and alignment"}
    assert forward.on_chip_bytes <= forward.on_chip_limit == 227 * 1024
    assert forward.block_m == (192 if head_dim <= 128 else 128)
    assert 128 * (forward.producer_registers + forward.block_m // 64 * forward.registers) <= 65536
    assert dict(forward.on_chip)["bias and mask"] >= forward.block_m * forward.block_n * 5
    assert forward.grid == min(2 * 16 * -(-length // forward.block_m), MULTIPROCESSORS)
    if length == 4096:
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
        "slopes": {"alibi_slopes": half(16, dtype=torch.float32)},
        "dropout": {"dropout_p": 0.1},
    }
    plans = [explain(**tensors, causal=causal, **options) for options in scores.values()]
    if length <= 128 and head_dim <= 64:  # one tile of keys: but with dropout dq is stored at once, which needs less
        stored, summed = plans[0].backward, plans[-1].backward
        assert stored.schedule.startswith("dq stored at once") and stored.scratch_bytes < summed.scratch_bytes
        plans, scores = plans[-1:], {"dropout": scores["dropout"]}
    backward, plain = plans[-1].backward, explain(**tensors, causal=causal).backward
    ranges = 8 * 2 * 16 * -(-length // backward.block_n)
    for options, plan in zip(scores.values(), plans, strict=True):
        more = ranges if "mask" in options else 0
        assert plan.backward == replace(backward, scratch_bytes=backward.scratch_bytes + more)
    assert (backward.backend, backward.kernel) == ("sm90", "sm90.backward.scored")
    assert (backward.block_m, backward.block_n, backward.stages) == (plain.block_m, plain.block_n, plain.stages)
    assert dict(backward.on_chip).keys() == dict(plain.on_chip).keys() | {"bias, mask and dropout"}
    assert 2 * dict(backward.on_chip)["ds"] == dict(plain.on_chip)["ds"]
    assert backward.on_chip_bytes <= backward.on_chip_limit == 227 * 1024
    # Of 64 queries: a bias in float, a mask in bits.
    assert dict(backward.on_chip)["bias, mask and dropout"] >= 64 * backward.block_n * 4 + 64 * backward.block_n // 8
    assert 128 * (backward.producer_registers + 2 * backward.registers) <= 65536
    assert backward.schedule == "a tile of keys a block"
    assert backward.grid == 2 * 16 * -(-length // backward.block_n)
    if plain.schedule == backward.schedule:
        assert backward.scratch_bytes == plain.scratch_bytes  # the third number of a query is there without scores, too


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
