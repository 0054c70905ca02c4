"""Promise: dropout follows one map of (seed, offset, head, query, key) on every backend, forward and backward."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import DTYPES, check, dropped, keep_mask, leaf, make_inputs, name_of, rand, rng_state
from torch import Tensor
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

import flash_ext

OPS = torch.ops.flash_ext
GOLDEN = Path(__file__).parents[1] / "golden" / "dropout_map.json"
WORD = (1 << 32) - 1


def philox_number(seed: int, offset: int, head: int, query: int, key: int) -> int:
    """The 16-bit number of one element, written from the definition in csrc/core/dropout.h (Philox4x32-7)."""
    lane = 4 * (query % 8) + (key % 8) // 2
    counter = [(key // 16 * 32 + lane) & WORD, (query // 16) & WORD, head & WORD, offset & WORD]
    key0, key1 = seed & WORD, (seed >> 32 ^ offset >> 32) & WORD
    for _ in range(7):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [second >> 32 ^ counter[1] ^ key0, second & WORD, first >> 32 ^ counter[3] ^ key1, first & WORD]
        key0, key1 = (key0 + 0x9E3779B9) & WORD, (key1 + 0xBB67AE85) & WORD
    word = counter[key % 16 // 8 * 2 + query % 16 // 8]
    return word >> (key % 2 * 16) & 0xFFFF


def with_state(state: Tensor, p: float) -> Any:
    """`attention` with a given random state, in the order of arguments that helpers.check uses."""

    def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, **options: Any) -> Any:
        out, lse = OPS.attention_with_rng_state(query, key, value, state, bias=bias, dropout_p=p, **options)
        return (out, lse) if options.get("return_lse") else out

    return call


def golden() -> Iterator[dict[str, Any]]:
    yield from (record for record in json.loads(GOLDEN.read_text()) if record["q"] < 2**31)


def test_golden_map(device: str) -> None:
    """The values that every released version draws; changing one changes every saved run."""
    seen = 0
    for record in golden():
        head, query, key = record["bh"], record["q"], record["k"]
        assert philox_number(record["seed"], record["offset"], head, query, key) == record["number"]
        if head < 64:
            state = rng_state(record["seed"], record["offset"], device)
            mask = OPS.dropout_mask(state, record["p"], head + 1, 1, 1, q0=query, k0=key)
            assert bool(mask[head, 0, 0]) is record["keep"], record
            seen += 1
    assert seen >= 20


@pytest.mark.parametrize("state", [(0, 0), (1, 4), (2**63 + 12345, 2**40 + 7), (2**64 - 1, 2**63)], ids=name_of)
def test_map_matches_its_definition(state: tuple[int, int], device: str) -> None:
    seed, offset = state
    for p in (0.1, 0.5):
        mask = OPS.dropout_mask(rng_state(seed, offset, device), p, 2, 21, 37, q0=3, k0=14).cpu()
        assert mask.dtype == torch.bool and mask.shape == (2, 21, 37)
        for head in range(2):
            for i in range(0, 21, 3):
                for j in range(0, 37, 2):
                    number = philox_number(seed, offset, head, 3 + i, 14 + j)
                    assert bool(mask[head, i, j]) is (number >= round(p * 65536))


def test_map_is_a_function_of_position(device: str) -> None:
    """A window into the map is the map: any tiling draws the same."""
    state = rng_state(99, 3, device)
    whole = OPS.dropout_mask(state, 0.3, 3, 50, 70)
    for q0, k0 in [(0, 0), (1, 1), (16, 32), (17, 33), (49, 69)]:
        part = OPS.dropout_mask(state, 0.3, 3, 50 - q0, 70 - k0, q0=q0, k0=k0)
        assert torch.equal(part, whole[:, q0:, k0:])
        assert torch.equal(OPS.dropout_mask(state, 0.3, 1, 50 - q0, 70 - k0, q0=q0, k0=k0, n0=2), part[2:])


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_rate(p: float, device: str) -> None:
    """0.001 is not rounded to nothing; the share of dropped elements is within five standard deviations."""
    mask = OPS.dropout_mask(rng_state(7, 0, device), p, 4, 500, 500)
    quantised = round(p * 65536) / 65536
    deviation = (quantised * (1 - quantised) / mask.numel()) ** 0.5
    assert abs(float((~mask).double().mean()) - quantised) < 5 * deviation
    assert not torch.equal(mask[0], mask[1])


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_map_at_the_ends(p: float, device: str) -> None:
    assert OPS.dropout_mask(rng_state(7, 0, device), p, 2, 40, 40).all().item() is (p == 0.0)


@pytest.mark.parametrize("p", [0.001, 0.2, 0.7])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_rule_with_dropout(dtype: torch.dtype, p: float, device: str, backend: str) -> None:
    """Outputs and gradients are those of the mask that dropout_mask shows, kept values scaled by 1 / (1 - p)."""
    inputs = make_inputs((2, 4, 45, 32), (2, 4, 70, 32), dtype=dtype, device=device)
    inputs["bias"] = rand(4, 45, 70, dtype=dtype, device=device)
    state = rng_state(1234567890123, 17, device)
    keep = keep_mask(state, p, (2, 4), 45, 70)
    options = {"causal": True, "return_lse": True}

    check(with_state(state, p), inputs, options, truth=dropped(keep, p), eager=dropped(keep, p, dtype.itemsize == 2))


def test_rule_with_dropout_and_groups(device: str, backend: str) -> None:
    """The map counts query heads of the result, also where heads are grouped or leading dims broadcast."""
    state = rng_state(5, 5, device)
    for shapes in (((2, 4, 20, 16), (2, 2, 30, 16), (2, 1, 30, 16)), ((1, 4, 20, 16), (3, 4, 30, 16), (3, 4, 30, 16))):
        batch = max(shape[0] for shape in shapes)
        keep = keep_mask(state, 0.4, (batch, 4), 20, 30)
        inputs = make_inputs(*shapes, device=device)
        gqa = {"gqa": True} if shapes[1][1] < 4 else {}

        def call(state: Tensor = state, gqa: dict[str, bool] = gqa, **arguments: Any) -> Any:
            return with_state(state, 0.4)(**arguments, **gqa)

        check(call, inputs, truth=dropped(keep, 0.4), eager=dropped(keep, 0.4))


def test_forward_and_backward_use_the_same_bits(device: str, backend: str) -> None:
    """With equal scores the output shows the forward mask and value's gradient the backward mask, bit for bit."""
    n, p = 64, 0.3
    state = rng_state(2024, 11, device)
    keep = keep_mask(state, p, (2, 3), n, n)
    q = torch.zeros(2, 3, n, 16, device=device)
    v = torch.eye(n, device=device).expand(2, 3, n, n).clone().requires_grad_()
    out, _ = OPS.attention_with_rng_state(q, q, v, state, dropout_p=p)
    assert torch.equal(out > 0, keep)
    (dv,) = torch.autograd.grad(out, v, torch.eye(n, device=device).expand(2, 3, n, n))
    assert torch.equal(dv.mT > 0, keep)
    torch.testing.assert_close(out[keep], torch.full_like(out[keep], 1 / (n * (1 - p))))


def test_zero_is_no_dropout(device: str, backend: str) -> None:
    q, k, v = make_inputs((2, 2, 9, 8), (2, 2, 12, 8), device=device).values()
    before = torch.get_rng_state()
    out, _, state = OPS.attention(q, k, v, dropout_p=0.0)
    assert state.numel() == 0 and state.dtype == torch.int64
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(out, flash_ext.attention(q, k, v))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_one_drops_everything(dtype: torch.dtype, device: str, backend: str) -> None:
    inputs = make_inputs((2, 2, 9, 8), (2, 2, 12, 8), dtype=dtype, device=device)
    leaves = {name: leaf(tensor) for name, tensor in inputs.items()}
    out = flash_ext.scaled_dot_product_attention(**leaves, dropout_p=1.0)
    assert (out == 0).all()
    for grad in torch.autograd.grad(out.sum(), list(leaves.values())):
        assert (grad == 0).all()


def test_manual_seed_reproduces(device: str, backend: str) -> None:
    inputs = [leaf(t) for t in make_inputs((2, 2, 40, 8), (2, 2, 50, 8), device=device).values()]

    def step(seed: int | None) -> tuple[Tensor, ...]:
        if seed is not None:
            torch.manual_seed(seed)
        out = flash_ext.attention(*inputs, dropout_p=0.5)
        return out, *torch.autograd.grad(out.sum(), inputs)

    first, second, other = step(3), step(3), step(None)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], other[0])


def test_random_state_is_a_tensor_of_querys_device(device: str, backend: str) -> None:
    q, k, v = make_inputs((2, 2, 9, 8), (2, 2, 12, 8), device=device).values()
    out, lse, state = OPS.attention(q, k, v, dropout_p=0.25)
    assert state.dtype == torch.int64 and state.shape == (2,) and state.device == q.device
    assert lse.numel() == 0
    again, _ = OPS.attention_with_rng_state(q, k, v, state, dropout_p=0.25)
    assert torch.equal(out, again)
    assert torch.Tag.nondeterministic_seeded in OPS.attention.default.tags
    assert torch.Tag.nondeterministic_seeded not in OPS.attention_with_rng_state.default.tags


@pytest.mark.parametrize("requires_grad", [False, True])
def test_applied_whenever_asked(requires_grad: bool, device: str, backend: str) -> None:
    """No training flag: dropout_p > 0 drops, with and without gradients."""
    q, k, v = (t.requires_grad_(requires_grad) for t in make_inputs((2, 9, 8), (2, 12, 8), device=device).values())
    plain = flash_ext.scaled_dot_product_attention(q, k, v)
    assert not torch.allclose(plain, flash_ext.scaled_dot_product_attention(q, k, v, dropout_p=0.5))


def test_mean_over_draws_is_the_plain_result(device: str, backend: str) -> None:
    q, k, v = make_inputs((1, 64, 8), (1, 64, 8), device=device, mean=0.5).values()
    plain = flash_ext.attention(q[None], k[None], v[None])
    draws = torch.stack([flash_ext.attention(q[None], k[None], v[None], dropout_p=0.2) for _ in range(200)])
    deviation = draws.std(0) / 200**0.5
    assert ((draws.mean(0) - plain).abs() < 6 * deviation).all()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_reproduces(use_reentrant: bool, device: str, backend: str) -> None:
    inputs = [leaf(t) for t in make_inputs((2, 2, 20, 8), (2, 2, 30, 8), device=device).values()]

    def block(*tensors: Tensor) -> Tensor:
        return flash_ext.scaled_dot_product_attention(*tensors, dropout_p=0.5).sin()

    torch.manual_seed(5)
    direct = torch.autograd.grad(block(*inputs).sum(), inputs)
    torch.manual_seed(5)
    total = checkpoint(block, *inputs, use_reentrant=use_reentrant).sum()
    with torch.autograd.set_multithreading_enabled(False):  # the thread that names the backend computes it again
        total.backward()
    for tensor, expected in zip(inputs, direct, strict=True):
        assert torch.equal(tensor.grad, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_backends_draw_the_same(dtype: torch.dtype, device: str, backend: str) -> None:
    """Each backend's bits equal those of the chunked composite, with ragged lengths and several tiles."""
    n, p = 150, 0.25
    q = torch.zeros(1, 2, n, 16, dtype=dtype, device=device)
    v = torch.eye(n, dtype=dtype, device=device).expand(1, 2, n, n).clone()
    state = rng_state(31337, 2, device)
    mine, _ = OPS.attention_with_rng_state(q, q, v, state, dropout_p=p)
    other, _ = OPS.attention_with_rng_state(q, q, v, state, dropout_p=p, backend="chunked")
    assert torch.equal(mine > 0, other > 0)
    assert torch.equal(mine > 0, keep_mask(state, p, (1, 2), n, n))


def test_a_batch_invariant_element_draws_its_own_mask() -> None:
    """The composite draws no other element's, and what it takes does not follow from the size of the batch."""
    leaves = [torch.randn(16, 2, 24, 8) for _ in range(3)]
    with flash_ext.use_backend("chunked"), profile(record_shapes=True, acc_events=True) as profiler:
        OPS.attention(*leaves, dropout_p=0.5, batch_invariant=True)
    drawn = [event.concrete_inputs[2] for event in profiler.events() if event.name == "flash_ext::dropout_mask"]
    assert drawn == [2] * 16
