"""Promise: with enable(), PyTorch's own sample inputs of attention and of its modules are computed as well as without.

The samples are those of PyTorch's tests (torch.testing._internal: OpInfo, ModuleInfo), without dropout, which draws
other numbers here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import DTYPES, MEASURES, floor_of, name_of
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import flash_ext

pytest.importorskip("expecttest", reason="torch's own test modules import it")
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

OPS = ("nn.functional.scaled_dot_product_attention", "nn.functional.multi_head_attention_forward")
MODULES = ("MultiheadAttention", "TransformerEncoder", "TransformerEncoderLayer", "TransformerDecoderLayer")


def tensors_of(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def widened(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        return leaf.detach().double().requires_grad_(leaf.requires_grad)
    return leaf


def results(call: Callable[..., Any], args: Any, kwargs: Any) -> list[Tensor | None]:
    """Outputs, and gradients of the inputs and of a module's parameters."""
    outputs = [output for output in tensors_of(call(*args, **kwargs)) if output.is_floating_point()]
    inputs = tensors_of((args, kwargs)) + (list(call.parameters()) if isinstance(call, nn.Module) else [])
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    grads: list[Tensor | None] = []
    if wanted and any(output.requires_grad for output in outputs):
        loss = sum((o * torch.linspace(-1, 1, o.numel(), device=o.device).reshape(o.shape)).sum() for o in outputs)
        grads = list(torch.autograd.grad(loss, wanted, allow_unused=True))
    return [output.detach() for output in outputs] + grads


def compare(call: Callable[..., Any], args: Any, kwargs: Any, dtype: torch.dtype) -> None:
    theirs = results(call, args, kwargs)
    with flash_ext.enable():
        ours = results(call, args, kwargs)
    wide = copy.deepcopy(call).double() if isinstance(call, nn.Module) else call
    truths = results(wide, tree_map(widened, args), tree_map(widened, kwargs))
    assert len(ours) == len(theirs) == len(truths) > 0
    for our, their, truth in zip(ours, theirs, truths, strict=True):
        if our is None or their is None or truth is None:
            assert our is their is truth is None
            continue
        assert our.shape == their.shape and our.dtype == their.dtype
        seen = truth.isfinite()  # a row that sees no key is NaN in PyTorch's math path, and 0 here
        error, allowed = (MEASURES["rms"](x.double()[seen] - truth[seen]) for x in (our, their))
        # Twice the rule, which takes the mean of many: scores reach 200, and one query in a row has all the error.
        assert error <= 4 * allowed + 2 * floor_of(truth, dtype)


def samples(op: Any, device: str, dtype: torch.dtype) -> Iterator[Any]:
    for sample in op.sample_inputs(device, dtype, requires_grad=True):
        if not sample.kwargs.get("dropout_p"):
            yield sample
            yield sample.noncontiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("name", OPS)
def test_function(name: str, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    (op,) = (op for op in op_db if op.name == name)
    count = 0
    for sample in samples(op, device, dtype):
        compare(op.op, (sample.input, *sample.args), sample.kwargs, dtype)
        count += 1
    assert count >= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=name_of)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_module(name: str, training: bool, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    (info,) = (info for info in module_db if info.name == f"nn.{name}")
    count = 0
    for sample in info.module_inputs_func(info, device=device, dtype=dtype, requires_grad=True, training=training):
        made, called = sample.constructor_input, sample.forward_input
        module = info.module_cls(*made.args, **made.kwargs).to(device, dtype).train(training)
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
            if isinstance(part, nn.MultiheadAttention):
                part.dropout = 0.0
        compare(module, called.args, called.kwargs, dtype)
        count += 1
    assert count >= 4
