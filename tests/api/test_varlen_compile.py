"""Promise: torch.compile(fullgraph=True), torch.export and AOTAutograd carry packed sequences of any lengths."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import leaf, rand
from packed import Heads, packed
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import flash_ext


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


varlen = flash_ext.attention_varlen

# Of query, key, value, cu_seqlens of both, a bias (heads, longest, longest), and the longest length.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "plain": lambda q, k, v, cq, ck, b, n: varlen(q, k, v, cq, ck, max_q=n),
    "bias": lambda q, k, v, cq, ck, b, n: varlen(q, k, v, cq, ck, max_q=n, bias=b, causal=True, return_lse=True),
    "options": lambda q, k, v, cq, ck, b, n: varlen(
        q, k, v, cq, ck, max_q=n, window=(3, None), align="bottom_right", softcap=2.0, scale=0.3, mask=b > 0,
        alibi_slopes=torch.full((4,), 0.25, device=q.device), seqused_k=ck[1:] - ck[:-1] - 1,
    ),
    "around": lambda q, k, v, cq, ck, b, n: varlen(q.sin(), k * 2, v, cq, ck, max_q=n, bias=b).cos().sum(-1),
}  # fmt: skip


def arguments(device: str, grow: int = 0, sequences: int = 3) -> list[Any]:
    """Longer by `grow`, in each of the sequences."""
    queries, keys = ([(start + 4 * i) % 9 + 2 + grow for i in range(sequences)] for start in (5, 3))
    call = packed(queries, keys, Heads(4, 2, 2, 16, 16), device=device)
    longest = max(*queries, *keys)
    inputs = [leaf(x) for x in (*call.inputs.values(), rand(4, longest, longest, device=device))]
    return [*inputs[:3], call.where["cu_seqlens_q"], call.where["cu_seqlens_k"], inputs[3], longest]


def results(function: Callable[..., Any], given: list[Any]) -> list[Tensor]:
    outputs = function(*given)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
    grads = torch.autograd.grad(sum(o.sin().sum() for o in outputs), wanted, allow_unused=True)
    return [*outputs, *(g for g in grads if g is not None)]


def same_as_eager(compiled: Callable[..., Any], function: Callable[..., Any], given: list[Any]) -> None:
    for got, expected in zip(results(compiled, given), results(function, given), strict=True):
        assert got.shape == expected.shape and got.stride() == expected.stride()
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("dynamic", [False, True, None])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_aot_eager(name: str, dynamic: bool | None, device: str) -> None:
    """Both passes, at several lengths and numbers of sequences where shapes may change."""
    function = FUNCTIONS[name]
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for grow, sequences in ((0, 3),) if dynamic is False else ((0, 3), (2, 3), (7, 5)):
        same_as_eager(compiled, function, arguments(device, grow, sequences))


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor(dynamic: bool, device: str) -> None:
    compiled = torch.compile(FUNCTIONS["around"], fullgraph=True, dynamic=dynamic)
    for grow in (0, 3) if dynamic else (0,):
        same_as_eager(compiled, FUNCTIONS["around"], arguments(device, grow))


@pytest.mark.parametrize("name", ["plain", "bias"])
def test_lengths_that_change_compile_again_once(name: str, device: str) -> None:
    """First for the lengths seen, then for any; max_q is an int that changes."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(FUNCTIONS[name], fullgraph=True, backend=counter)
    counts = []
    for grow in (0, 2, 5, 11, 3):
        compiled(*arguments(device, grow, 4))
        counts.append(counter.frame_count)
    assert counts[0] == 1 and counts[-1] <= 2, counts


def test_dynamic_shapes_do_not_compile_again(device: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(FUNCTIONS["bias"], fullgraph=True, dynamic=True, backend=counter)
    compiled(*arguments(device, 0, 4))  # no two sizes are equal by chance, which the compiler would take for a rule
    before = counter.frame_count
    for grow, sequences in ((2, 5), (5, 7), (11, 2)):
        compiled(*arguments(device, grow, sequences))
    assert counter.frame_count == before > 0


def test_other_lengths_of_the_same_sum_do_not_compile_again(device: str) -> None:
    """What cu_seqlens holds is data, no part of a graph."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(FUNCTIONS["plain"], fullgraph=True, dynamic=False, backend=counter)
    given = arguments(device)
    for cut in (1, 4, 9):
        given[3] = given[3].clone()
        given[3][1] = cut
        torch.testing.assert_close(compiled(*given), FUNCTIONS["plain"](*given))
    assert counter.frame_count == 1


def test_a_longest_length_that_the_graph_reads(device: str) -> None:
    """max_q from the data of cu_seqlens, which no one knows while compiling."""

    def step(q: Tensor, k: Tensor, v: Tensor, cq: Tensor, ck: Tensor) -> Tensor:
        queries, keys = (int((cu[1:] - cu[:-1]).max().item()) for cu in (cq, ck))
        return varlen(q, k, v, cq, ck, max_q=queries, max_k=keys, causal=True)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for grow in (0, 4):
            same_as_eager(compiled, step, arguments(device, grow)[:5])


def test_the_graph_holds_the_operator(device: str) -> None:
    """One call of it in each pass, and no loop over sequences."""
    targets: list[str] = []

    def record(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    compiled = torch.compile(FUNCTIONS["bias"], fullgraph=True, backend=aot_autograd(fw_compiler=record))
    results(compiled, arguments(device))
    ours = [target.split(".")[1] for target in targets if target.startswith("flash_ext.")]
    assert ours == ["attention", "attention_backward"]


def test_dropout_reproduces_when_compiled(device: str) -> None:
    def step(*given: Any) -> Tensor:
        q, k, v, cq, ck, _, n = given
        return varlen(q, k, v, cq, ck, max_q=n, dropout_p=0.5, deterministic=True)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    given, seen = arguments(device), []
    for call in (compiled, compiled, step):
        torch.manual_seed(11)
        seen.append(results(call, given))
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))
    assert not torch.equal(compiled(*given), compiled(*given))


def test_autocast_and_checkpoint_inside_the_graph(device: str) -> None:
    from torch.utils.checkpoint import checkpoint

    def step(*given: Any) -> Tensor:
        q, k, v, cq, ck, _, n = given
        with torch.autocast(device, dtype=torch.bfloat16):
            return checkpoint(lambda *x: varlen(*x, cq, ck, max_q=n, causal=True).sin(), q, k, v, use_reentrant=False)

    given = arguments(device)
    same_as_eager(torch.compile(step, fullgraph=True, backend="aot_eager"), step, given)
    assert step(*given).dtype == torch.bfloat16


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_torch_func_inside_the_graph(transform: str, device: str) -> None:
    q, k, v, cq, ck, _, n = (x.detach() if isinstance(x, Tensor) else x for x in arguments(device))

    def loss(x: Tensor) -> Tensor:
        return varlen(x, k, v, cq, ck, max_q=n, causal=True).sin().sum()

    call = torch.func.grad(loss) if transform == "grad" else torch.func.vmap(loss)
    x = q if transform == "grad" else torch.stack((q, q.cos()))
    got = torch.compile(lambda y: call(y), fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(got, call(x))


# ---- export ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """max_q is the length of a table, as a program that is exported has no other number that changes."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cq: Tensor, ck: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return varlen(
            q, k, v, cq, ck, max_q=bias.shape[1], max_k=bias.shape[2], bias=bias, causal=True, return_lse=True
        )


def exported(device: str, strict: bool) -> torch.export.ExportedProgram:
    dims = {name: torch.export.Dim(name, min=2, max=4096) for name in ("rows", "keys", "lengths", "longest")}
    dynamic = ({0: dims["rows"]}, {0: dims["keys"]}, {0: dims["keys"]}, *({0: dims["lengths"]},) * 2,
               {1: dims["longest"], 2: dims["longest"]})  # fmt: skip
    return torch.export.export(Block(), tuple(arguments(device)[:6]), dynamic_shapes=dynamic, strict=strict)


def assert_same_as_eager(call: Callable[..., Any], device: str) -> None:
    for grow, sequences in ((0, 3), (4, 2), (1, 6)):
        given = arguments(device, grow, sequences)[:6]
        torch.testing.assert_close(call(*given), Block()(*given))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool, device: str) -> None:
    """With other rows, sequences and lengths; saved, loaded and decomposed."""
    program = exported(device, strict)
    assert [str(node.target) for node in program.graph.nodes].count("flash_ext.attention.default") == 1
    assert_same_as_eager(program.module(), device)
    assert_same_as_eager(program.run_decompositions().module(), device)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    assert_same_as_eager(torch.export.load(buffer).module(), device)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_trace(device: str) -> None:
    """torch.jit.trace records the lengths that it saw as tensors, max_q as a number."""
    given = [x.detach() if isinstance(x, Tensor) else x for x in arguments(device)]

    def step(*x: Tensor) -> Tensor:
        return varlen(*x, max_q=given[6], causal=True)

    traced = torch.jit.trace(step, given[:5])
    torch.testing.assert_close(traced(*given[:5]), step(*given[:5]))


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_a_wrong_call_is_the_same_sentence_in_a_graph(device: str) -> None:
    given = arguments(device)
    compiled = torch.compile(lambda *x: varlen(*x[:3], x[3].long(), max_q=x[6]), fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match=r"cu_seqlens_q of shape \(4,\) and torch\.int64 is not"):
        compiled(*given)
