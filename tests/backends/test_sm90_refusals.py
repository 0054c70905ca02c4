"""Promise: explain names why the Hopper kernels stand aside, and by name they refuse with the same words; nothing here
needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import name_of
from sm90_helpers import PLANS_ALONE, explain, half, wanting
from torch import Tensor

import flash_ext

pytestmark = PLANS_ALONE


def refusal(*tensors: Tensor, **options: Any) -> str:
    plan = explain(*tensors, **options)
    assert plan.forward.backend != "sm90"
    with flash_ext.use_backend("sm90"), pytest.raises(flash_ext.AttentionError) as caught:
        explain(*tensors, **options)
    reason = str(caught.value).removeprefix("sm90 refuses: ")
    assert reason in {c.reason for c in plan.refusals if (c.backend, c.pass_name) == ("sm90", "forward")}
    return reason


def backward_refusal(*tensors: Tensor, **options: Any) -> str:
    """Of a call that forward serves: by name, too, because it may need no gradients."""
    plan = explain(*tensors, **options)
    assert (plan.forward.backend, plan.backward.backend) == ("sm90", "sm80")
    with flash_ext.use_backend("sm90"):
        named = explain(*tensors, **options)
    assert (named.forward.backend, named.backward.backend) == ("sm90", "none")
    assert named.forward == plan.forward
    reason = named.backward.kernel.removeprefix("none: sm90 refuses: ")
    assert reason in {c.reason for c in plan.refusals if (c.backend, c.pass_name) == ("sm90", "backward")}
    assert reason in str(named)
    return reason


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "softcap": ({"softcap": 4097.0}, "softcap 4097 is more than 4096"),
    "dropout of all": ({"dropout_p": 1.0}, "dropout_p 1 is more than 0.99999"),
    "zero": ({"scale": 0.0}, "scale 0 is less than 1e-30"),
    "negative": ({"scale": -1.0}, "scale -1 is less than 1e-30"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_refused_options(name: str) -> None:
    options, reason = OPTIONS[name]
    q = half(2, 4, 256, 64)
    assert explain(q, q).forward.backend == "sm90"
    assert refusal(q, q, **options) == reason


def test_small_scores_are_refused() -> None:
    """sm80 is faster there; one query more, or eight keys, and it is its cost that tells."""

    def call(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        q, k = half(2, 4, queries, 64), half(2, 4, keys, 64)
        return q, k, k, {"bias": half(4, queries, keys)}

    *tensors, options = call(64, 64)
    reason = "len_q 64 is less than 65"
    assert refusal(*tensors, **options) == refusal(*tensors, dropout_p=0.1) == reason
    assert refusal(*tensors, softcap=5.0) == reason
    for lengths in ((65, 64), (64, 72), (1, 4096)):
        *tensors, options = call(*lengths)
        with flash_ext.use_backend("sm90"):
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


ALL = ("query", "key", "value")


MIXED = "the gradient of a bias beside a mask, alibi_slopes or dropout or in another dtype than query"

BACKWARD: dict[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
    "bias gradient": (
        wanting(*ALL),
        {"bias": half(2, 4, 256, 256, dtype=torch.float32).requires_grad_()},
        f"no support for {MIXED}",
    ),
    "bias gradient beside dropout": (
        wanting(*ALL),
        {"bias": half(2, 4, 256, 256).requires_grad_(), "dropout_p": 0.1},
        f"no support for {MIXED}",
    ),
    "slopes gradient": (
        wanting(*ALL),
        {"alibi_slopes": half(4, dtype=torch.float32).requires_grad_()},
        "no support for the gradient of alibi_slopes",
    ),
    "one key": (wanting(), {"window": (0, 0)}, "no support for a band of one key"),
    "own key": (wanting(), {"window": (0, None), "causal": True}, "no support for a band of one key"),
    "few keys": (
        {"query": half(2, 4, 4096, 64), "key": half(2, 4, 15, 64), "value": half(2, 4, 15, 64)},
        {},
        "all queries together see 15 keys, fewer than 16",
    ),
    "value heads": (
        wanting() | {"value": half(2, 2, 256, 64)},
        {},
        "no support for other heads of value than of key",
    ),
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


MASK = half(256, 256).bool()
SLOPES = half(4, dtype=torch.float32)
TWO_PASS: dict[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
    "mask in order": (wanting(*ALL), {"mask": MASK, "deterministic": True}, ".small_head_dim"),
    "bias in order": (wanting(*ALL), {"bias": half(256, 256), "deterministic": True}, ".small_head_dim"),
    "slopes in order": (wanting(*ALL), {"alibi_slopes": SLOPES, "deterministic": True}, ".small_head_dim"),
    "dropout in order": (wanting(*ALL), {"dropout_p": 0.1, "deterministic": True}, ".small_head_dim"),
    "softcap in order": (wanting(*ALL), {"softcap": 5.0, "deterministic": True}, ".small_head_dim"),
    "softcap beside a mask": (wanting(*ALL, shape=(2, 4, 256, 128)), {"softcap": 5.0, "mask": MASK}, ".small_head_dim"),
    "wide mask": (wanting(*ALL, shape=(2, 4, 256, 136)), {"mask": MASK}, ".scored"),
    "wide dropout": (wanting(*ALL, shape=(2, 4, 256, 192)), {"dropout_p": 0.1}, ".scored"),
    "wide bias": (wanting(*ALL, shape=(2, 4, 256, 256)), {"bias": half(256, 256), "softcap": 5.0}, ".scored"),
    "wide softcap": (wanting(*ALL, shape=(2, 4, 256, 256)), {"softcap": 5.0}, ".softcap"),
    "large mask": (wanting(*ALL, shape=(2, 4, 256, 384)), {"mask": MASK}, ".scored.large_head_dim"),
    "large softcap": (wanting(*ALL, shape=(2, 4, 256, 512)), {"softcap": 5.0}, ".scored.large_head_dim"),
    "wide": (wanting(*ALL, shape=(2, 4, 256, 256)), {}, ""),
    "no dq": (wanting("key", "value"), {}, ".small_head_dim"),
    "no dk": (wanting("query", "value"), {}, ".small_head_dim"),
    "only dq": (wanting("query"), {"mask": MASK}, ".small_head_dim"),
    "no dv": (wanting("query", "key", shape=(2, 4, 256, 256)), {}, ""),
}


@pytest.mark.parametrize("name", TWO_PASS)
def test_the_two_pass_backward_serves(name: str) -> None:
    tensors, options, kind = TWO_PASS[name]
    with flash_ext.use_backend("sm90"):
        backward = explain(*tensors.values(), **options).backward
    assert (backward.backend, backward.kernel) == ("sm90", "sm90.backward.two_pass" + kind)
    runs = [name in backward.schedule for name in ("a tile of keys", "a tile of queries")]
    wanted = {name for name, tensor in tensors.items() if tensor.requires_grad}
    assert runs == [bool(wanted & {"key", "value"}), "query" in wanted]


@pytest.mark.parametrize("name", BACKWARD)
def test_refused_in_backward(name: str) -> None:
    tensors, options, reason = BACKWARD[name]
    assert backward_refusal(*tensors.values(), **options) == reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
def test_refused_dtypes(dtype: torch.dtype) -> None:
    q = half(2, 4, 256, 64, dtype=dtype)
    assert refusal(q, q) == f"no support for {str(dtype)[6:]}"


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
