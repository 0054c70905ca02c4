"""Promise: explain tells what would run and why, runs nothing, and refuses what the call refuses."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from helpers import DTYPES, HALF, leaf, make_inputs, name_of, rand
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_ext
from flash_ext.explain import Candidate, Explanation, Plan

OPS = torch.ops.flash_ext
Q, K = (2, 4, 30, 64), (2, 2, 40, 64)
HAS_SM90 = "sm90" in flash_ext.build_info()["cuda"]["backends"]


def test_is_a_frozen_dataclass(device: str) -> None:
    plan = flash_ext.explain(**make_inputs(Q, K, device=device))
    assert dataclasses.is_dataclass(plan)
    for part, name in ((plan, "forward"), (plan.forward, "backend"), (plan.backward, "kernel")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, name, None)


def test_names_the_backend_of_each_pass(device: str, backend: str) -> None:
    plan = flash_ext.explain(**make_inputs(Q, K, device=device), causal=True)
    assert plan.forward.backend == backend and plan.backward.backend == backend
    assert plan.forward.scratch_bytes >= 0 and plan.forward.kernel and plan.backward.kernel


def test_prints_as_a_table(device: str) -> None:
    plan = flash_ext.explain(**make_inputs(Q, K, device=device))
    text = str(plan)
    assert len(text.splitlines()) >= 4
    for word in ("forward", "backward", plan.forward.backend, plan.forward.kernel):
        assert word in text


def test_refusals_name_backend_pass_and_reason() -> None:
    """Planned for a card, the CPU backend says in both passes why it stands aside."""
    plan = flash_ext.explain(**make_inputs(Q, K), device="cuda")
    assert plan.forward.backend != "cpu" and plan.backward.backend != "cpu"
    reasons = {(r.backend, r.pass_name): r.reason for r in plan.refusals}
    assert {("cpu", "forward"), ("cpu", "backward")} <= reasons.keys()
    assert "CPU" in reasons["cpu", "forward"]
    assert reasons["cpu", "forward"] in str(plan)


def test_a_named_backend_that_refuses_is_an_error() -> None:
    inputs = make_inputs(Q, K)
    with flash_ext.use_backend("cpu"), pytest.raises(flash_ext.AttentionError, match=r"cpu refuses: .*not on the CPU"):
        flash_ext.explain(**inputs, device="cuda")
    assert flash_ext.explain(**inputs, device="cuda").forward.backend != "cpu"


UNMERGED = "the leading dimensions do not merge into 4"


def unmerged(device: str) -> tuple[torch.Tensor, ...]:
    """Five leading dims before the heads of which no two merge: query holds them in reverse order."""
    q, k, v = make_inputs((2, 3, 2, 3, 2, 2, 5, 8), (2, 3, 2, 3, 2, 2, 7, 8), device=device).values()
    reverse = (4, 3, 2, 1, 0, 5, 6, 7)
    return q.permute(reverse).contiguous().permute(reverse), k, v


def test_leading_dims_that_do_not_merge_are_left_to_the_composite(device: str) -> None:
    inputs = unmerged(device)
    plan = flash_ext.explain(*inputs, sdpa=True)
    assert plan.forward.backend == plan.backward.backend == "chunked"
    assert {r.pass_name for r in plan.refusals if r.reason == UNMERGED} == {"forward", "backward"}
    out = flash_ext.scaled_dot_product_attention(*inputs)
    expected = torch.nn.functional.scaled_dot_product_attention(*(t.contiguous() for t in inputs))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_leading_dims_that_do_not_merge_are_refused_by_name(device: str, backend: str) -> None:
    """A backend that is asked for by name never hands over in silence a pass that it has."""
    inputs = unmerged(device)
    with flash_ext.use_backend("chunked"):
        out, lse, state = OPS.attention(*inputs, return_lse=True)
    calls = {
        "explain": lambda: flash_ext.explain(*inputs, sdpa=True),
        "forward": lambda: flash_ext.scaled_dot_product_attention(*inputs),
        "backward": lambda: OPS.attention_backward(out, None, *inputs, out, lse, state, backend=backend),
    }
    for call in calls.values():
        if backend == "chunked":
            call()
        else:
            with pytest.raises(RuntimeError, match=f"{backend} refuses: {UNMERGED}"):
                call()


@pytest.mark.kernels("sm80")
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("head_dim", [1, 32, 33, 64, 96, 128, 192, 256, 257, 264, 512, 520])
def test_plans_for_a_card_that_is_not_there(head_dim: int, dtype: torch.dtype) -> None:
    q, k, v = make_inputs((2, 4, 300, head_dim), (2, 2, 400, head_dim), dtype=dtype).values()
    plan = flash_ext.explain(q.to("meta"), k.to("meta"), v.to("meta"), device="cuda", causal=True)
    fast = HAS_SM90 and dtype in HALF and head_dim % 8 == 0 and head_dim <= 512
    expected = "sm90" if fast else "sm80" if head_dim <= 256 else "chunked"
    assert (plan.forward.backend, plan.backward.backend) == (expected, expected)
    for part in (plan.forward, plan.backward):
        assert part.on_chip_bytes <= part.on_chip_limit
        assert part.backend == "chunked" or (part.block_m > 0 and part.block_n > 0 and part.grid > 0)
    if head_dim == 257:
        reason = "head_dim 257 is more than 256"
        wider = {(r.backend, r.pass_name) for r in plan.refusals if r.reason == reason} - {("sm90", "forward")}
        assert wider == {("sm80", "forward"), ("sm80", "backward")}


@pytest.mark.kernels("sm80")
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_windows_have_a_kernel_of_their_own(dtype: torch.dtype) -> None:
    """Backward of sm80 up to 64 queries, keys and head dim, in 16 bits; its only scratch is a bias's gradient's."""

    def backward(queries: int, keys: int, head_dim: int, grad: bool = False, **options: float) -> Plan:
        bias = torch.empty(1, 3, queries, keys, device="meta", dtype=dtype, requires_grad=grad)
        shapes = ((640, 3, queries, head_dim), (640, 3, keys, head_dim))
        inputs = {name: leaf(tensor.to("meta")) for name, tensor in make_inputs(*shapes, dtype=dtype).items()}
        return flash_ext.explain(**inputs, bias=bias, device="cuda", **options).backward

    half = dtype in HALF
    for queries, keys, head_dim in ((49, 49, 32), (64, 64, 64), (1, 64, 8)):
        plain, summed = backward(queries, keys, head_dim), backward(queries, keys, head_dim, grad=True)
        assert (plain.kernel == summed.kernel == "sm80.backward.one_tile") == half
        if half:
            assert plain.scratch_bytes == 0 < summed.scratch_bytes
            assert summed.on_chip_bytes <= 99 * 1024 and 0 < summed.grid <= 640 * 3
    for other in (backward(65, 49, 32), backward(49, 65, 32), backward(49, 49, 65), backward(49, 49, 32, softcap=5.0)):
        assert other.kernel != "sm80.backward.one_tile"


def candidates(plan: Explanation, pass_name: str) -> dict[str, Candidate]:
    return {c.kernel: c for c in plan.candidates if c.pass_name == pass_name}


def test_the_cheapest_candidate_is_chosen(device: str, backend: str) -> None:
    """One of each pass runs unless the composite does; whoever could have, costs at least as much."""
    plan = flash_ext.explain(**make_inputs(Q, K, device=device))
    with flash_ext.use_backend("chunked"):
        composite = flash_ext.explain(**make_inputs(Q, K, device=device))
    for name in ("forward", "backward"):
        chosen = [c for c in plan.candidates if c.pass_name == name and c.chosen]
        assert [c.backend for c in chosen] == ([] if backend == "chunked" else [backend])
        assert not any(c.chosen for c in composite.candidates)
        assert all(c.reason == "" and getattr(plan, name).kernel.startswith(c.kernel) for c in chosen)


@pytest.mark.kernels("sm90")
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_who_serves_large_windows(dtype: torch.dtype) -> None:
    """Of 3,072 heads, who took least on an H200 (docs/lab/2026-12-01-windows-of-144.md)."""
    tile, dense = "sm80.{}.one_tile_144", "sm90.{}"
    for length, bias, grad, forward, backward in (
        (144, False, False, tile, tile),
        (144, True, True, tile, tile),
        (128, True, False, tile, "sm90.{}.scored"),
        (128, True, True, tile, "sm90.{}.scored, sm90.bias_gradient"),
        (100, False, False, None, dense),
        (100, True, True, tile, tile),
        (88, True, True, tile, tile),
    ):
        shape = (1024, 3, length, 32)
        inputs = {name: leaf(t.to("meta")) for name, t in make_inputs(shape, shape, dtype=dtype).items()}
        if bias:
            inputs["bias"] = torch.empty(3, length, length, device="meta", dtype=dtype, requires_grad=grad)
        plan = flash_ext.explain(**inputs, device="cuda")
        assert forward is None or plan.forward.kernel == forward.format("forward")
        assert plan.backward.kernel == backward.format("backward")
    for batch, queries, keys, forward in (
        (16, 48, 48, "sm80.forward.plain"),
        (16, 64, 96, "sm80.forward.plain"),
        (80, 60, 64, "sm80.forward.plain"),
        (1024, 60, 64, "sm80.forward.one_tile"),
    ):
        shapes = ((batch, 3, queries, 32), (batch, 3, keys, 32))
        inputs = {name: t.to("meta") for name, t in make_inputs(*shapes, dtype=dtype).items()}
        assert flash_ext.explain(**inputs, device="cuda").forward.kernel == forward


@pytest.mark.kernels("sm90")
@pytest.mark.parametrize("dtype", HALF, ids=name_of)
def test_who_is_faster_serves_unless_another_is_named(dtype: torch.dtype) -> None:
    """Up to 64 queries and keys it is sm80: forward up to head dim 128, backward by its kernel of one tile."""

    def planned(queries: int, keys: int, dim: int, dim_v: int, heads: int = 4, **options: bool) -> Explanation:
        shapes = (2, 4, queries, dim), (2, heads, keys, dim), (2, heads, keys, dim_v)
        tensors = [t.to("meta") for t in make_inputs(*shapes, dtype=dtype).values()]
        return flash_ext.explain(*tensors, device="cuda", **options)

    for sizes in ((49, 49, 32, 32), (64, 64, 64, 64), (1, 16, 8, 64), (64, 17, 64, 8)):
        plan = planned(*sizes, causal=sizes[0] == sizes[1])
        for name, chosen, other in (
            ("forward", "sm80.forward", "sm90.forward"),
            ("backward", "sm80.backward.one_tile", "sm90.backward"),
        ):
            rows = candidates(plan, name)
            assert rows[chosen].chosen and not rows[other].chosen
            assert not rows[other].reason and 0 < rows[chosen].cost_us < rows[other].cost_us
            assert f"{other} could run ({name}), at a cost of {rows[other].cost_us:.3g} us" in str(plan)
        with flash_ext.use_backend("sm90"):
            named = planned(*sizes, causal=sizes[0] == sizes[1])
        assert (named.forward.backend, named.backward.backend) == ("sm90", "sm90")
    for sizes in ((64, 64, 128, 64), (64, 64, 72, 128), (64, 64, 64, 64, 2)):
        plan = planned(*sizes)
        assert (plan.forward.backend, plan.backward.backend) == ("sm80", "sm90")
    for sizes in ((128, 128, 64, 64), (64, 128, 64, 64), (64, 64, 136, 64)):
        plan = planned(*sizes)
        assert (plan.forward.backend, plan.backward.backend) == ("sm90", "sm90")


@pytest.mark.kernels("sm90")
def test_a_kernel_may_be_named() -> None:
    """Its name means that kernel in its pass, and its backend in the other."""
    q = torch.empty(2, 4, 300, 64, device="meta", dtype=torch.bfloat16)
    with flash_ext.use_backend("sm80.backward"):
        plan = flash_ext.explain(q, q, q, device="cuda")
    assert (plan.forward.backend, plan.backward.kernel) == ("sm80", "sm80.backward.plain")
    with flash_ext.use_backend("sm90.forward"):
        plan = flash_ext.explain(q, q, q, device="cuda")
        assert (plan.forward.kernel, plan.backward.kernel) == ("sm90.forward", "sm90.backward")
        with pytest.raises(flash_ext.AttentionError, match=r"^sm90\.forward refuses: no support for dropout$"):
            flash_ext.explain(q, q, q, device="cuda", dropout_p=0.1)
    unknown = r'^backend is "sm90\.backwards"; this build has sm90, sm80, cpu, chunked'
    with pytest.raises(flash_ext.AttentionError, match=unknown), flash_ext.use_backend("sm90.backwards"):
        pass


@pytest.mark.kernels("sm90")
def test_the_gradient_of_a_bias_may_be_another_kernels() -> None:
    """Beside a mask, slopes, dropout or in float32 sm90 leaves it; not where every score has its own."""
    shape = (2, 4, 304, 64)
    q = torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True)
    mask, slopes = torch.ones(304, 304, dtype=torch.bool, device="meta"), torch.ones(4, device="meta")
    dtypes = {"float32": torch.float32}
    for name, options in {"mask": {"mask": mask}, "slopes": {"alibi_slopes": slopes}, "float32": {}}.items():
        bias = torch.empty(304, 304, device="meta", dtype=dtypes.get(name, torch.bfloat16), requires_grad=True)
        plan = flash_ext.explain(q, q, q, bias=bias, device="cuda", **options)
        assert plan.backward.kernel == "sm90.backward.scored, sm80.bias_gradient"
        assert candidates(plan, "backward")["sm90.backward.scored"].bias_gradient == "sm80.bias_gradient"
        whole = torch.empty(2, 4, 304, 304, device="meta", dtype=bias.dtype, requires_grad=True)
        plan = flash_ext.explain(q, q, q, bias=whole, device="cuda", **options)
        assert plan.backward.kernel == "sm80.backward.general"


@pytest.mark.kernels("sm80")
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_wide_softcaps_are_refused(dtype: torch.dtype) -> None:
    """The error of a tile's tanh is one of the cap; in 16 bits the composite takes its place."""
    q = torch.empty(2, 4, 300, 128, device="meta", dtype=dtype)
    for softcap in (4096.0, 4097.0):
        plan = flash_ext.explain(q, q, q, device="cuda", softcap=softcap)
        expected = "sm80"
        if dtype in HALF:
            expected = "chunked" if softcap > 4096 else "sm90" if HAS_SM90 else "sm80"
        assert (plan.forward.backend, plan.backward.backend) == (expected, expected)
        for name in ("forward", "backward"):
            wide = candidates(plan, name)[f"sm80.{name}"].reason == "softcap 4097 is more than 4096"
            assert wide == (expected == "chunked")


@pytest.mark.kernels("sm80")
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_lengths_beyond_positions_are_refused(dtype: torch.dtype) -> None:
    """Kernels count positions in 32 bits; the composite has no such limit."""
    for len_q, len_k in ((1, 2**30), (2**30 + 1, 1), (1, 2**30 + 1)):
        q, k = (torch.empty(1, device="meta", dtype=dtype).expand(1, 1, n, 64) for n in (len_q, len_k))
        plan = flash_ext.explain(q, k, k, device="cuda")
        name, length = ("len_q", len_q) if len_q > len_k else ("len_k", len_k)
        assert plan.forward.backend == plan.backward.backend == ("sm80" if length == 2**30 else "chunked")
        too_long = f"{name} {length} is more than {2**30}"
        for row in plan.refusals:
            if row.backend == "sm80" and "one_tile" not in row.kernel:
                assert (too_long in row.reason) == (length > 2**30)


@pytest.mark.kernels("sm80")
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_plans_tf32_where_torch_allows_it(head_dim: int) -> None:
    """Only float32 on a GPU."""
    q, k, v = (t.to("meta") for t in make_inputs((2, 4, 520, head_dim), (2, 2, 600, head_dim)).values())

    def kernels(device: str, dtype: torch.dtype = torch.float32) -> list[str]:
        plan = flash_ext.explain(q.to(dtype), k.to(dtype), v.to(dtype), device=device)
        return [plan.forward.kernel, plan.backward.kernel]

    before = [kernels("cuda"), kernels("cuda", torch.float64), kernels("cpu")]
    for level in ("high", "medium"):
        torch.set_float32_matmul_precision(level)
        try:
            allowed = [kernels("cuda"), kernels("cuda", torch.float64), kernels("cpu")]
        finally:
            torch.set_float32_matmul_precision("highest")
        assert allowed == [[f"{name}.tf32" for name in before[0]], *before[1:]]
    assert kernels("cuda") == before[0]


@pytest.mark.kernels("sm80")
def test_copies_of_what_has_scattered_columns() -> None:
    """Kernels on a GPU are given contiguous rows; broadcasts are not written out, and the CPU copies nothing."""
    inputs = {
        "query": rand(2, 4, 64, 30).mT,  # (2, 4, 30, 64)
        "key": rand(1, 2, 40, 128)[..., ::2].expand(2, 2, 40, 64),
        "value": rand(2, 2, 40, 1).expand(2, 2, 40, 64),  # one number a row
        "mask": torch.ones(2, 1, 40, 30, dtype=torch.bool).mT,
        "bias": rand(4, 30, 1),
    }
    plan = flash_ext.explain(**inputs, device="cuda")
    reason = "its last dimension is not contiguous"
    assert [(c.argument, c.bytes, c.reason) for c in plan.copies] == [
        ("query", 2 * 4 * 30 * 64 * 4, reason),
        ("key", 2 * 40 * 64 * 4, reason),
        ("mask", 2 * 40 * 30, reason),
    ]
    assert "copies key: 20,480 bytes, its last dimension is not contiguous" in str(plan)
    assert flash_ext.explain(**inputs).copies == ()
    drop_in = flash_ext.explain(
        *list(inputs.values())[:3], attn_mask=inputs["mask"], sdpa=True, enable_gqa=True, device="cuda"
    )
    assert [c.argument for c in drop_in.copies] == ["query", "key", "attn_mask"]


def test_draws_and_allocates_nothing(device: str) -> None:
    q = torch.empty(1, device=device).expand(64, 64, 1 << 20, 64)
    state = torch.get_rng_state()
    flash_ext.explain(q, q, q, dropout_p=0.5, causal=True)
    assert torch.equal(state, torch.get_rng_state())


def test_takes_meta_and_fake_tensors() -> None:
    real = flash_ext.explain(**make_inputs(Q, K), causal=True)
    meta = {name: tensor.to("meta") for name, tensor in make_inputs(Q, K).items()}
    assert flash_ext.explain(**meta, causal=True) == real
    with FakeTensorMode():
        fake = make_inputs(Q, K)
        assert flash_ext.explain(**fake, causal=True) == real


def test_drop_in_arguments(device: str) -> None:
    q, k, v = make_inputs((4, 30, 64), (4, 40, 64), device=device).values()
    plan = flash_ext.explain(q, k, v, attn_mask=rand(30, 40, device=device), sdpa=True)
    assert plan.forward.backend
    assert flash_ext.explain(q, k, v, is_causal=True, sdpa=True).forward.backend == plan.forward.backend


def test_refuses_what_the_call_refuses(device: str) -> None:
    q, k, v = make_inputs(Q, K, device=device).values()
    bad = {
        "scale": {"scale": float("nan")},
        "softcap": {"softcap": -1.0},
        "mask": {"mask": torch.ones(3, 3, dtype=torch.bool, device=device)},
        "window": {"window": (-1, 0)},
    }
    for name, options in bad.items():
        messages = []
        for call in (flash_ext.explain, flash_ext.attention):
            with pytest.raises(flash_ext.AttentionError, match=name) as caught:
                call(q, k, v, **options)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


def test_what_it_says_is_what_runs(device: str, backend: str) -> None:
    """The plan of a case that the named backend takes is that backend; the call then agrees with it."""
    inputs = make_inputs(Q, K, device=device)
    assert flash_ext.explain(**inputs).forward.backend == backend
    flash_ext.attention(**inputs)


def test_build_info_is_there() -> None:
    info = flash_ext.build_info()
    assert info["version"] == flash_ext.__version__
    assert str(info["torch"]).split("+")[0] == torch.__version__.split("+")[0]
    assert "cuda" in info


def test_backward_keeps_the_name_of_the_backend() -> None:
    """The operator's own argument: its text is gone when backward runs."""
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    rng_state = torch.empty(0, dtype=torch.long)
    name = "".join(["c", "p", "u"])
    out, _ = torch.ops.flash_ext.attention_with_rng_state(q, k, v, rng_state, backend=name)
    del name
    gc.collect()
    junk = ["x" * 3 for _ in range(1000)]
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(torch.isfinite(grad).all() for grad in grads) and len(junk) == 1000


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("wants", [False, True])
def test_no_queries(batch: int, wants: bool, device: str) -> None:
    """Fewer heads than threads are cut finer: of nothing, too. It divided by a tile without rows."""
    query = torch.empty(batch, 2, 0, 64, device=device, requires_grad=wants)
    key = torch.empty(batch, 2, 1024, 64, device=device)
    for causal in (False, True):
        assert flash_ext.explain(query, key, key, causal=causal).forward.kernel
