"""Promise: who computes attention is who was chosen: in overlapping scopes, beside PyTorch's flags, in compiled code
and its caches, in what a checkpoint computes again, and in what a partitioner does."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import leaf, make_inputs
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flash_ext

OPS = torch.ops.flash_ext


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    flash_ext.disable()


def qkv(device: str) -> list[Tensor]:
    return list(make_inputs((2, 3, 9, 8), (2, 3, 11, 8), device=device).values())


def calls_of(work: Callable[[], object]) -> int:
    before = flash_ext.enabled_calls()
    work()
    return flash_ext.enabled_calls() - before


def ran_here(work: Callable[[], object]) -> bool:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        work()
    return any("flash_ext" in event.key for event in seen.key_averages())


# ---- scopes ---------------------------------------------------------------------------------------------------------


def test_a_scope_stays_on_until_the_last_thread_leaves(device: str) -> None:
    q, k, v = qkv(device)
    other_is_in, leave = threading.Event(), threading.Event()

    def other() -> None:
        with flash_ext.enable():
            other_is_in.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with flash_ext.enable():
        thread.start()
        other_is_in.wait(10)
    assert calls_of(lambda: F.scaled_dot_product_attention(q, k, v)) == 1
    flash_ext.disable()  # ends what this thread began, not the other's context
    assert calls_of(lambda: F.scaled_dot_product_attention(q, k, v)) == 1
    leave.set()
    thread.join()
    assert calls_of(lambda: F.scaled_dot_product_attention(q, k, v)) == 0


def test_disable_ends_an_open_context_of_its_thread(device: str) -> None:
    q, k, v = qkv(device)
    with flash_ext.enable():
        flash_ext.disable()
        assert calls_of(lambda: F.scaled_dot_product_attention(q, k, v)) == 0


def test_gradients_while_another_thread_switches(device: str) -> None:
    done = threading.Event()
    wrong: list[object] = []

    def train() -> None:
        while not done.is_set():
            inputs = [leaf(t) for t in qkv(device)]
            F.scaled_dot_product_attention(*inputs).sum().backward()
            wrong.extend(t for t in inputs if t.grad is None)

    thread = threading.Thread(target=train)
    thread.start()
    for _ in range(2000):
        with flash_ext.enable():
            pass
    done.set()
    thread.join()
    assert not wrong


# ---- PyTorch's flags ------------------------------------------------------------------------------------------------

SWITCHES = ("flash", "mem_efficient", "math", "cudnn")


@pytest.fixture
def switch() -> Iterator[Callable[[str], None]]:
    def off(name: str) -> None:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(False)

    yield off
    for name in SWITCHES:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(True)


@pytest.mark.parametrize("name", SWITCHES)
def test_one_kernel_switched_off_is_no_choice(name: str, switch: Callable[[str], None], device: str) -> None:
    q, k, v = qkv(device)
    with flash_ext.enable():
        switch(name)
        assert calls_of(lambda: F.scaled_dot_product_attention(q, k, v)) == 1


@pytest.mark.parametrize("kept", ("flash", "math"))
def test_flags_that_leave_one_kernel_choose_it(kept: str, switch: Callable[[str], None]) -> None:
    q, k, v = qkv("cpu")
    for name in SWITCHES:
        if name != kept:
            switch(name)
    with flash_ext.enable():
        before = flash_ext.enabled_calls()
        F.scaled_dot_product_attention(q, k, v)
        after = flash_ext.enabled_calls()
    assert after == before and after.left == before.left + 1
    assert sum(count for reason, count in flash_ext.why_not().items() if "leave one" in reason) >= 1


def in_a_process(program: str, *, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], text=True, capture_output=True, timeout=200, cwd=cwd,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_the_first_call_that_goes_to_pytorch_says_why(tmp_path: Path) -> None:
    out = in_a_process(
        """
        import warnings
        import torch, flash_ext
        from torch.nn.attention import SDPBackend, sdpa_kernel
        q = torch.randn(1, 2, 8, 8)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with flash_ext.enable(), sdpa_kernel(SDPBackend.MATH):
                for _ in range(3):
                    torch.nn.functional.scaled_dot_product_attention(q, q, q)
        print(len(seen), seen[0].message)
        print(flash_ext.why_not(), flash_ext.enabled_calls(), flash_ext.enabled_calls().left)
        """,
        cwd=tmp_path,
        PYTHONPATH=str(Path(flash_ext.__file__).parents[1]),
    )
    warning, counts = out.splitlines()
    assert warning.startswith("1 flash_ext.enable()") and "sdpa_kernel" in warning
    assert "sdpa_kernel" in counts and counts.endswith(": 3} 0 3")


def test_pytorch_is_as_it_was_after_disable(device: str) -> None:
    """The kernels stay registered; without enable() they are PyTorch's composite."""
    inputs = [leaf(t) for t in qkv(device)]
    with flash_ext.enable():
        F.scaled_dot_product_attention(*inputs)
    with sdpa_kernel(SDPBackend.MATH):
        assert not ran_here(lambda: F.scaled_dot_product_attention(*inputs).sum().backward())
        batched = torch.vmap(F.scaled_dot_product_attention)(*inputs)
        with pytest.raises(RuntimeError, match="random"):
            torch.vmap(functools.partial(F.scaled_dot_product_attention, dropout_p=0.5))(*inputs)
        torch.testing.assert_close(batched, F.scaled_dot_product_attention(*inputs))
        program = torch.export.export(Attention(), tuple(t.detach() for t in inputs))
    assert "scaled_dot_product_attention" in str(program.graph) and "flash_ext" not in str(program.graph)


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


# ---- compiled code and its caches -----------------------------------------------------------------------------------

CALLS: dict[str, Callable[..., Tensor]] = {
    "functional": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "operator": lambda q, k, v: torch.ops.aten.scaled_dot_product_attention(q, k, v),
    "overload": lambda q, k, v: torch.ops.aten.scaled_dot_product_attention.default(q, k, v),
    "multihead": lambda q, k, v: F.multi_head_attention_forward(
        *(t[0].transpose(0, 1) for t in (q, k, v)), 8, 2, torch.ones(24, 8), None, None, None, False, 0.0,
        torch.ones(8, 8), None, need_weights=False,
    )[0],
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_function_follows_enable(name: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(CALLS[name], backend=counter, fullgraph=True)
    q, k, v = qkv("cpu")
    for _ in range(2):
        assert not ran_here(lambda: compiled(q, k, v))
        with flash_ext.enable():
            assert ran_here(lambda: compiled(q, k, v))
    assert counter.frame_count == 2


def test_a_compiled_function_follows_use_backend() -> None:
    """Seen by what a backend says in its refusal: `sm80` and `sm90` refuse CPU tensors, where they are built."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v: flash_ext.scaled_dot_product_attention(q, k, v), backend=counter)
    q, k, v = qkv("cpu")
    for _ in range(2):
        for backend in ("cpu", "chunked"):
            with flash_ext.use_backend(backend):
                # Blocks of queries are torch's own products; the CPU backend's kernels are not torch's operators.
                with profile(activities=[ProfilerActivity.CPU]) as seen:
                    compiled(q, k, v)
                products = any(event.key.startswith("aten::") and "mm" in event.key for event in seen.key_averages())
                assert products == (backend == "chunked")
    assert counter.frame_count == 2


def test_what_was_compiled_before_the_import_follows(tmp_path: Path) -> None:
    out = in_a_process(
        """
        import torch
        import torch.nn.functional as F
        compiled = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), backend="aot_eager")
        q = torch.randn(1, 2, 8, 8)
        compiled(q)
        import flash_ext
        with flash_ext.enable():
            compiled(q)
            print(int(flash_ext.enabled_calls()) > 0)
        """,
        cwd=tmp_path,
        PYTHONPATH=str(Path(flash_ext.__file__).parents[1]),
    )
    assert out == "True"


CACHED = """
import sys
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
torch.manual_seed(0)
q = torch.randn(1, 2, 16, 32)
if sys.argv[1] != "none":
    import flash_ext
    if sys.argv[1] == "enable":
        flash_ext.enable()
compiled = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q))
compiled(q)
with profile(activities=[ProfilerActivity.CPU]) as seen:
    compiled(q)
print(any("flash_ext" in event.key for event in seen.key_averages()))
"""


@pytest.mark.slow
def test_a_cache_on_disk_is_not_for_another_choice(tmp_path: Path) -> None:
    environment = {
        "PYTHONPATH": str(Path(flash_ext.__file__).parents[1]),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    for who in ("enable", "none", "plain", "enable"):
        program = CACHED.replace("sys.argv[1]", repr(who))
        assert in_a_process(program, cwd=tmp_path, **environment) == str(who == "enable"), who


def test_the_choice_and_the_build_are_in_the_key_of_caches() -> None:
    tags = set()
    config = torch.compiler.config
    before, config.cache_key_tag = config.cache_key_tag, "mine"
    try:
        for backend in ("cpu", "chunked"):
            with flash_ext.use_backend(backend), flash_ext.enable():
                q, k, v = qkv("cpu")
                torch.compile(CALLS["functional"], backend="eager")(q, k, v)
                tags.add(config.cache_key_tag)
                torch._dynamo.reset()
    finally:
        config.cache_key_tag = before
    assert len(tags) == 2 and all(tag.startswith("mine|flash_ext:") for tag in tags)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def scope_of(name: str) -> Any:
    return {
        "enable": flash_ext.enable,
        "backend": lambda: flash_ext.use_backend("chunked"),
        "pytorch": lambda: sdpa_kernel(SDPBackend.MATH),
    }[name]()


@pytest.mark.parametrize("outside", [None, "enable"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("name", ["enable", "backend", "pytorch"])
def test_computed_again_as_in_forward(name: str, p: float, reentrant: bool, outside: str | None, device: str) -> None:
    """Backward runs outside the forward's scope, or inside another one, which may not matter."""
    call = flash_ext.scaled_dot_product_attention if name == "backend" else F.scaled_dot_product_attention
    q, k, v = qkv(device)

    def gradient(block: Callable[[Tensor], Tensor], where: str | None) -> tuple[Tensor, Tensor]:
        x = leaf(q)
        torch.manual_seed(5)
        with scope_of(name):
            out = block(x)
        if where is None:
            out.square().sum().backward()
        else:
            with scope_of(where):
                out.square().sum().backward()
        assert x.grad is not None
        return out.detach(), x.grad

    def attend(x: Tensor) -> Tensor:
        return call(x * 2, k, v, dropout_p=p)

    expected = gradient(attend, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = gradient(lambda x: checkpoint(attend, x, use_reentrant=reentrant), outside)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


class Forwards(TorchDispatchMode):
    """Counts the operators that compute attention forward."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (OPS.attention.default, OPS.attention_with_rng_state.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("how", ["direct", "enable"])
def test_selective_checkpointing_runs_attention_once(how: str, p: float, device: str) -> None:
    seen: list[str] = []

    def policy(_: object, operator: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        saves = operator in flash_ext.checkpoint_ops()
        if operator.namespace == "flash_ext" and not saves:
            seen.append(str(operator))
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    call = flash_ext.scaled_dot_product_attention if how == "direct" else F.scaled_dot_product_attention
    q, k, v = qkv(device)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def attend(x: Tensor) -> Tensor:
        return call(x * 2, k, v, dropout_p=p).sin()

    def gradient(block: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
        x = leaf(q)
        torch.manual_seed(5)
        with flash_ext.enable(), Forwards() as forwards:
            block(x).square().sum().backward()
        assert x.grad is not None
        return x.grad, forwards.count

    expected, once = gradient(attend)
    got, again = gradient(lambda x: checkpoint(attend, x, use_reentrant=False, context_fn=contexts))
    torch.testing.assert_close(got, expected)
    _, twice = gradient(lambda x: checkpoint(attend, x, use_reentrant=False))
    assert not seen and (once, again, twice) == (1, 1, 2)


# ---- partitioner ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("how", ["direct", "enable", "native"])
def test_dropout_is_drawn_once_under_a_memory_budget(how: str, budget: float, device: str) -> None:
    """Values are the identity: out shows forward's map, the gradient of the values backward's."""
    n = 16
    call: Callable[..., Tensor] = {
        "direct": flash_ext.scaled_dot_product_attention,
        "enable": F.scaled_dot_product_attention,
        "native": flash_ext.attention,
    }[how]
    q, k = (torch.randn(1, 1, n, 16, device=device) for _ in "qk")
    v = torch.eye(n, device=device)[None, None].requires_grad_()
    with flash_ext.enable(), torch._functorch.config.patch(activation_memory_budget=budget):
        step = torch.compile(lambda: call(q, k, v, dropout_p=0.5) * 1.0, backend="aot_eager_decomp_partition")
        out = step()
        (grad,) = torch.autograd.grad(out, v, torch.eye(n, device=device)[None, None])
    assert torch.equal(out.detach() != 0, grad.mT != 0)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_of_grad_with_dropout(randomness: str, device: str) -> None:
    """The state of each sample: out and gradient of one sample are of one map."""
    n = 16
    q = torch.randn(3, 1, 1, n, 8, device=device)
    v = torch.eye(n, device=device)[None, None]

    def sample(x: Tensor) -> Tensor:
        return torch.func.grad(lambda v: flash_ext.attention(x, x, v, dropout_p=0.5).diagonal(0, -2, -1).sum())(v)

    grads = torch.func.vmap(sample, randomness=randomness)(q)
    maps = (grads.diagonal(0, -2, -1) != 0).flatten(1)
    assert bool((maps[0] == maps[1]).all()) == (randomness == "same")
