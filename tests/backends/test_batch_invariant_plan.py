"""Promise: what a batch-invariant call runs follows from neither the size of the batch nor other sequences' lengths,
and `explain` says so; nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import DTYPES, HALF, name_of
from torch import Tensor

import flash_ext
from flash_ext.explain import Explanation, Plan

BATCHES = (1, 2, 3, 16, 100, 512)
LENGTHS = (1, 30, 64, 128, 500, 4096)
H200 = [pytest.mark.kernels("sm90"), pytest.mark.no_gpu]  # plans are made for it where no GPU is
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "align": "bottom_right"},
    "window": {"window": (100, 30)},
    "softcap": {"softcap": 5.0},
    "dropout": {"dropout_p": 0.1},
    "mask": {"mask": (torch.bool, ())},
    "bias": {"bias": (torch.float32, ("bias",))},
}


@pytest.fixture(params=[2, 7])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def nothing(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def plan_of(
    batch: int, length: int, packed: bool, kind: str, dtype: torch.dtype, head_dim: int, **more: Any
) -> Explanation:
    """Of as many sequences, the longest of that length. A bias lies in memory as the longest sequence makes it."""
    options = dict(KINDS[kind]) | more
    for name in ("mask", "bias"):
        if name in options:
            scores = nothing(batch, 8, length, length, dtype=options[name][0])
            options[name] = scores
    heads = (8, 2, 2)
    if packed:
        tensors = [nothing(batch * length, h, head_dim, dtype=dtype, grad=True) for h in heads]
        options |= {"cu_seqlens_q": nothing(batch + 1, dtype=torch.int32), "max_q": length}
    else:
        tensors = [nothing(batch, h, length, head_dim, dtype=dtype, grad=True) for h in heads]
    return flash_ext.explain(*tensors, **options)


def decides(plan: Plan) -> tuple[object, ...]:
    """What bits follow from."""
    return plan.backend, plan.kernel, plan.block_m, plan.block_n, plan.splits


def seen(kind: str, dtype: torch.dtype, head_dim: int, lengths: tuple[int, ...] = LENGTHS, **more: Any) -> set[object]:
    """Forwards of all sizes, dense and packed."""
    sizes = ((b, n, packed) for b in BATCHES for n in lengths for packed in (False, True))
    return {decides(plan_of(*size, kind, dtype, head_dim, **more).forward) for size in sizes}


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("named", [pytest.param(None, marks=H200), pytest.param("sm80", marks=H200)], ids=str)
def test_forward_of_a_gpu(named: str | None, dtype: torch.dtype, kind: str, head_dim: int) -> None:
    """One kernel and one size of tiles for all lengths and batches, packed and dense; keys are not split."""
    with flash_ext.use_backend(named):
        strict = seen(kind, dtype, head_dim, device="cuda", batch_invariant=True)
    assert len(strict) == 1
    ((backend, _, _, _, splits),) = strict
    assert backend == (named or "sm90") and splits == 1


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("named", [pytest.param(None, marks=H200), pytest.param("sm80", marks=H200)], ids=str)
def test_without_the_option_a_gpu_chooses_by_size(named: str | None, head_dim: int) -> None:
    with flash_ext.use_backend(named):
        assert len(seen("plain", torch.bfloat16, head_dim, device="cuda")) > 1


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
@pytest.mark.parametrize("named", [pytest.param(None, marks=H200), pytest.param("sm80", marks=H200)], ids=str)
def test_backward_of_a_gpu(named: str | None, dtype: torch.dtype, kind: str, head_dim: int) -> None:
    """Of a length one for all batches; of packed sequences one for all lengths, too."""
    options = {"device": "cuda", "batch_invariant": True}
    with flash_ext.use_backend(named):
        for length in LENGTHS:
            plans = {decides(plan_of(b, length, False, kind, dtype, head_dim, **options).backward) for b in BATCHES}
            assert len(plans) == 1, (length, plans)
        sizes = ((b, n) for b in BATCHES for n in LENGTHS)
        packed = {decides(plan_of(b, n, True, kind, dtype, head_dim, **options).backward) for b, n in sizes}
        assert len(packed) == 1, packed


@pytest.mark.parametrize("named", [pytest.param(None, marks=H200), pytest.param("sm80", marks=H200)], ids=str)
def test_a_bias_that_the_batch_shares_chooses_no_other_kernels(named: str | None) -> None:
    """For the gradients that are a batch element's own."""
    plans = set()
    with flash_ext.use_backend(named):
        for batch in BATCHES:
            q, k = nothing(batch, 8, 256, 64, grad=True), nothing(batch, 2, 256, 64, grad=True)
            bias = nothing(1, 8, 256, 256, grad=True)
            plan = flash_ext.explain(q, k, k, bias=bias, device="cuda", batch_invariant=True)
            plans.add(decides(plan.backward))
    assert len(plans) == 1


@pytest.mark.parametrize("named", [pytest.param(None, marks=H200)], ids=str)
def test_float32_is_never_rounded_to_tf32(named: str | None) -> None:
    """Which a packed call would do by its longest sequence."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        loose = plan_of(2, 4096, True, "plain", torch.float32, 64, device="cuda")
        strict = plan_of(2, 4096, True, "plain", torch.float32, 64, device="cuda", batch_invariant=True)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert "tf32" in loose.forward.kernel and "tf32" not in strict.forward.kernel


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a_cpu(dtype: torch.dtype, kind: str, threads: int) -> None:
    """Its tiles are of a sequence's own length, and of no number of threads."""
    for length in LENGTHS:
        plans = [
            plan_of(b, length, packed, kind, dtype, 64, device="cpu", batch_invariant=True)
            for b in BATCHES
            for packed in (False, True)
        ]
        assert len({decides(plan.forward) for plan in plans}) == 1
        assert len({decides(plan.backward) for plan in plans}) == 1
        assert all(plan.forward.splits == plan.backward.splits == 1 for plan in plans)


def test_without_the_option_a_cpu_chooses_by_size() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(64)
    try:
        plans = [plan_of(b, 500, False, "plain", torch.float32, 64, device="cpu") for b in (1, 100)]
        assert len({decides(plan.forward) for plan in plans}) == 2
        assert len({decides(plan.backward) for plan in plans}) == 2
    finally:
        torch.set_num_threads(before)


def test_explain_says_what_it_means() -> None:
    for value in (False, True):
        plan = plan_of(2, 64, False, "plain", torch.float32, 64, device="cpu", batch_invariant=value)
        assert plan.batch_invariant == value
        assert ("batch-invariant: kernels and tiles are those of large calls" in str(plan)) == value


def test_a_packed_call_that_the_composite_would_pad_is_refused() -> None:
    """The host may not read the lengths, so that no sequence can be cut out. No kernel of a GPU takes head dim 300."""

    def forward(packed: bool, batch_invariant: bool) -> str:
        options = {"device": "cuda", "batch_invariant": batch_invariant}
        return plan_of(2, 64, packed, "plain", torch.float32, 300, **options).forward.backend

    assert forward(True, False) == forward(False, False) == forward(False, True) == "chunked"
    with pytest.raises(flash_ext.AttentionError, match="batch_invariant is True, but no kernel takes these packed"):
        forward(True, True)


@pytest.mark.parametrize("call", ["attention", "attention_varlen", "attention_with_cache", "explain"])
def test_it_is_a_flag(call: str) -> None:
    q = torch.zeros(1, 2, 3, 8)
    cu = torch.tensor([0, 3], dtype=torch.int32)
    calls = {
        "attention": lambda: flash_ext.attention(q, q, q, batch_invariant=1),
        "attention_varlen": lambda: flash_ext.attention_varlen(q[0], q[0], q[0], cu[:1], max_q=3, batch_invariant=1),
        "attention_with_cache": lambda: flash_ext.attention_with_cache(q, q, q, cache_seqlens=0, batch_invariant=1),
        "explain": lambda: flash_ext.explain(q, q, q, batch_invariant=1),
    }
    with pytest.raises(TypeError, match="batch_invariant is of type int; it must be a bool"):
        calls[call]()
