"""Promise: torch.compile(fullgraph=True) and fake tensors work without graph breaks, static and dynamic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import leaf, make_inputs, rand
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import flash_ext


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


Q, K = (2, 4, 17, 16), (2, 2, 23, 16)

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "native": lambda q, k, v, b: flash_ext.attention(q, k, v, bias=b, causal=True, return_lse=True),
    "drop_in": lambda q, k, v, b: flash_ext.scaled_dot_product_attention(q, k, v, b, enable_gqa=True),
    "options": lambda q, k, v, b: flash_ext.attention(
        q, k, v, window=(3, None), align="bottom_right", softcap=2.0, scale=0.3, mask=b > 0, batch_invariant=True
    ),
    "around": lambda q, k, v, b: flash_ext.attention(q.sin(), k * 2, v, bias=b).cos().sum(-1),
    "merge": lambda q, k, v, b: flash_ext.merge_attention(
        *flash_ext.attention(q, k, v, return_lse=True), *flash_ext.attention(q, v, k, return_lse=True)
    ),
}


def tensors(device: str, grow: int = 0) -> list[Tensor]:
    inputs = make_inputs((2, 4, 17 + grow, 16), (2, 2, 23 + 2 * grow, 16), device=device)
    bias = rand(4, 17 + grow, 23 + 2 * grow, device=device)
    return [leaf(t) for t in (*inputs.values(), bias)]


def results(call: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    outputs = call(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = torch.autograd.grad(sum(o.sin().sum() for o in outputs), inputs, allow_unused=True)
    return [*outputs, *(g for g in grads if g is not None)]


def check_compiled(function: Callable[..., Any], device: str, **compile_options: Any) -> None:
    compiled = torch.compile(function, fullgraph=True, **compile_options)
    for grow in (0, 3, 9) if compile_options.get("dynamic") else (0,):
        inputs = tensors(device, grow)
        for got, expected in zip(results(compiled, inputs), results(function, inputs), strict=True):
            assert got.shape == expected.shape and got.stride() == expected.stride()
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_aot_eager(name: str, dynamic: bool, device: str) -> None:
    check_compiled(FUNCTIONS[name], device, backend="aot_eager", dynamic=dynamic)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["native", "around"])
def test_inductor(name: str, dynamic: bool, device: str) -> None:
    check_compiled(FUNCTIONS[name], device, dynamic=dynamic)


def test_the_graph_holds_the_operator(device: str) -> None:
    """One call of the op, not its decomposition and not PyTorch's."""
    targets: list[str] = []

    def record(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    inputs = tensors(device)
    compiled = torch.compile(FUNCTIONS["native"], fullgraph=True, backend=aot_autograd(fw_compiler=record))
    results(compiled, inputs)
    assert sum(target.startswith("flash_ext.attention.") for target in targets) == 1
    assert sum(target.startswith("flash_ext.attention_backward") for target in targets) == 1
    assert not any("scaled_dot_product" in target or "bmm" in target for target in targets)


def test_dynamic_shapes_do_not_recompile(device: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(FUNCTIONS["native"], fullgraph=True, dynamic=True, backend=counter)
    compiled(*tensors(device))
    before = counter.frame_count
    for grow in (2, 5, 11):
        compiled(*tensors(device, grow))
    assert counter.frame_count == before > 0


def test_dropout_reproduces_when_compiled(device: str) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_ext.attention(q, k, v, dropout_p=0.5, deterministic=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    q, k, v, _ = tensors(device)
    seen = []
    for call in (compiled, compiled, step):
        torch.manual_seed(11)
        out = call(q, k, v)
        seen.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))
    assert not torch.equal(compiled(q, k, v), compiled(q, k, v))


def test_autocast_inside_the_graph(device: str) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            return flash_ext.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    q, k, v, _ = tensors(device)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, step(q, k, v))
    grads = torch.autograd.grad(got.sum(), (q, k, v))
    assert all(
        torch.equal(a, b) for a, b in zip(grads, torch.autograd.grad(step(q, k, v).sum(), (q, k, v)), strict=True)
    )


def test_activation_checkpoint_inside_the_graph(device: str) -> None:
    from torch.utils.checkpoint import checkpoint

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(lambda *x: flash_ext.attention(*x, causal=True).sin(), q, k, v, use_reentrant=False)

    inputs = tensors(device)[:3]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, expected in zip(results(compiled, inputs), results(step, inputs), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("transform", ["grad", "vmap", "vmap_grad"])
def test_torch_func_inside_the_graph(transform: str, device: str) -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_ext.attention(q, k, v, causal=True).sin().sum()

    call: Callable[..., Tensor] = {
        "grad": torch.func.grad(loss),
        "vmap": torch.func.vmap(lambda q, k, v: flash_ext.attention(q[None], k[None], v[None])),
        "vmap_grad": torch.func.vmap(torch.func.grad(lambda q, k, v: loss(q[None], k[None], v[None]))),
    }[transform]
    inputs = [t.detach() for t in tensors(device)[:3]]
    got = torch.compile(lambda *x: call(*x), fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(got, call(*inputs))


def test_symbolic_fake_tensors(device: str) -> None:
    """Shapes stay symbolic through the forward and the backward op."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = ((2, 4, 17, 16), (2, 2, 23, 16))
    q, k = (mode.from_tensor(rand(*s, device=device).requires_grad_(), static_shapes=False) for s in sizes)
    with mode:
        out, lse = flash_ext.attention(q, k, k, causal=True, return_lse=True)
        dq, dk = torch.autograd.grad(out.sum() + lse.sum(), (q, k))
    assert isinstance(out.shape[2], torch.SymInt)
    assert out.shape == q.shape and dq.shape == q.shape and dk.shape == k.shape
    assert lse.shape == q.shape[:-1]


def test_meta_tensors() -> None:
    q, k = torch.empty(2, 4, 17, 16, device="meta", requires_grad=True), torch.empty(2, 2, 23, 16, device="meta")
    out, lse = flash_ext.attention(q, k, k, dropout_p=0.5, return_lse=True)
    assert out.is_meta and out.shape == (2, 4, 17, 16) and lse.shape == (2, 4, 17)
    (dq,) = torch.autograd.grad(out, q, torch.empty_like(out))
    assert dq.shape == q.shape
