"""What test_training_wrappers.py runs on 2 and 4 ranks: `python training_cases.py SIZE STORE [CASE ...]`.

A case compares training on N ranks, a part of the batch each, with
one process that has all of it. Warnings are errors.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

sys.path.insert(0, str(Path(__file__).parents[1]))

import ranks
from ranks import World
from toy_models import Linear, Norm, RecomputedModel, TiedModel, ToyModel

from flash_ext import AttentionError
from flash_ext.distributed import DDP, FSDP, ShardedOptimizer

CASES: dict[str, Callable[[], None]] = {}
STEPS, BATCH = 4, 24  # sequences; a multiple of every number of ranks


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


# ---- the three wrappers behind functions, as a program that chooses between implementations has them ----


def get_ddp(module: nn.Module) -> nn.Module:
    return DDP(module)


def ddp_on_after_backward(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.finish_gradient_synchronization()


def get_fsdp(module: nn.Module, compute_dtype: torch.dtype | None = None) -> nn.Module:
    return FSDP(module, compute_dtype=compute_dtype)


def fsdp_on_after_backward(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.finish_gradient_synchronization()


def fsdp_gather_full_params(model: Any) -> dict[str, Tensor]:
    return model.gather_full_params()


def get_sharded_optimizer(params: Iterable[Any], kind: type, **kwargs: Any) -> torch.optim.Optimizer:
    return ShardedOptimizer(params, kind, **kwargs)


# ---- what is trained ----


def same_model(kind: type[nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of all ranks."""
    generator = torch.Generator().manual_seed(step)
    numbers = (torch.randint(37, (BATCH, 6), generator=generator, device="cpu") for _ in "xy")
    return tuple(each.to(torch.get_default_device()) for each in numbers)


def parts(step: int) -> list[tuple[Tensor, Tensor]]:
    """Those of each rank."""
    return list(zip(*(x.chunk(dist.get_world_size()) for x in batch(step)), strict=True))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def in_parts(model: nn.Module, step: int, call: Callable[[Tensor], Tensor] | None = None) -> None:
    """Sets the gradients in one process: the sum over parts, then the mean, as ranks compute it."""
    sums: dict[str, Tensor] = {}
    for tokens, targets in parts(step):
        model.zero_grad()
        loss_of((call or model)(tokens), targets).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                sums[name] = sums[name] + parameter.grad if name in sums else parameter.grad
    for name, parameter in model.named_parameters():
        parameter.grad = sums[name] / dist.get_world_size() if name in sums else None


def equal_on_all_ranks(tensor: Tensor) -> bool:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor.contiguous())
    return all(torch.equal(gathered[0], other) for other in gathered)


def assert_same(ours: dict[str, Tensor], theirs: Iterable[tuple[str, Tensor]], **tolerance: float) -> None:
    theirs = dict(theirs)
    assert ours.keys() == theirs.keys(), (ours.keys(), theirs.keys())
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor.detach(), **(tolerance or {"rtol": 0, "atol": 0}), msg=name)


# ---- DDP ----


def ddp_trains_as_one_process(kind: type[nn.Module]) -> None:
    alone, whole, ddp = same_model(kind), same_model(kind), get_ddp(same_model(kind, seed=dist.get_rank()))
    assert_same(ddp.module.state_dict(), alone.state_dict().items())  # rank 0's, buffers too
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (alone, whole, ddp)]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        in_parts(alone, step)
        loss_of(whole(batch(step)[0]), batch(step)[1]).backward()
        tokens, targets = parts(step)[dist.get_rank()]
        loss_of(ddp(tokens), targets).backward()
        assert len(ddp._works) == len(list(filter(lambda p: p.requires_grad, ddp.parameters())))  # sent in backward
        ddp_on_after_backward(ddp, optimizers[2])
        for optimizer in optimizers:
            optimizer.step()
        bits = {} if dist.get_world_size() == 2 else {"rtol": 1e-5, "atol": 1e-7}  # a sum of 4 has many orders
        assert_same(dict(ddp.module.named_parameters()), alone.named_parameters(), **bits)
        assert_same(dict(ddp.module.named_parameters()), whole.named_parameters(), rtol=1e-4, atol=1e-6)
        assert all(equal_on_all_ranks(p.detach()) for p in ddp.parameters())


@case
def ddp() -> None:
    ddp_trains_as_one_process(ToyModel)


@case
def ddp_with_tied_weights() -> None:
    ddp_trains_as_one_process(TiedModel)


class SomeUnused(nn.Module):
    """`everywhere` is used on every rank, `first` on rank 0, `nowhere` on none."""

    def __init__(self) -> None:
        super().__init__()
        self.everywhere, self.first, self.nowhere, self.also = (nn.Linear(5, 5) for _ in range(4))

    def forward(self, x: Tensor, use_first: bool) -> Tensor:
        y = self.also(self.everywhere(x))
        return y + self.first(x) if use_first else y


@case
def ddp_with_unused_parameters() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    alone, ddp = same_model(SomeUnused), get_ddp(same_model(SomeUnused))
    torch.manual_seed(1)
    x = torch.randn(ranks, 3, 5)
    for _ in range(2):  # the second time gradients are added to those of the first
        sum(alone(x[i], i == 0).square().mean() for i in range(ranks)).div(ranks).backward()
        ddp(x[rank], rank == 0).square().mean().backward()
        ddp.finish_gradient_synchronization()
        for (name, ours), theirs in zip(ddp.module.named_parameters(), alone.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None) == name.startswith("nowhere"), name
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad)
                assert equal_on_all_ranks(ours.grad)


def raises(error: type[Exception], words: str, call: Callable[[], object]) -> None:
    try:
        call()
    except error as told:
        assert words in str(told), told
    else:
        raise AssertionError(f"no {error.__name__}")


@case
def two_backwards_without_finishing_are_an_error() -> None:
    for wrap, model in ((get_ddp, nn.Linear(3, 3)), (get_fsdp, Norm(3))):
        model = wrap(model)
        model(torch.ones(2, 3)).sum().backward()
        raises(RuntimeError, "backward() ran twice without", model(torch.ones(2, 3)).sum().backward)
        model.finish_gradient_synchronization()
        model(torch.ones(2, 3)).sum().backward()
        model.finish_gradient_synchronization()


@case
def ranks_that_disagree() -> None:
    """One sentence on every rank, before anything of the model travels, and the group works afterwards."""
    last = dist.get_rank() == dist.get_world_size() - 1

    def told(words: str, call: Callable[[], object]) -> None:
        raises(AttentionError, words, call)

    for wrap in (get_ddp, get_fsdp):
        told("weight is torch.float32 of shape (3, 3) on rank 0 and torch.float32 of shape (4, 3) on rank",
             lambda wrap=wrap: wrap(nn.Linear(3, 4 if last else 3)))  # fmt: skip
        told("weight is torch.float32 of shape (3, 3) on rank 0 and torch.float64 of shape (3, 3) on rank",
             lambda wrap=wrap: wrap(nn.Linear(3, 3, dtype=torch.float64 if last else torch.float32)))  # fmt: skip
        told("the number of tensors is 2 on rank 0 and 1 on rank",
             lambda wrap=wrap: wrap(nn.Linear(3, 3, bias=not last)))  # fmt: skip
        told("weight is torch.float32 of shape (3, 3) on rank 0 and torch.float32 of shape (3, 3), without gradient",
             lambda wrap=wrap: wrap(nn.Linear(3, 3).requires_grad_(not last)))  # fmt: skip
    told("compute_dtype is None on rank 0 and torch.float16 on rank",
         lambda: get_fsdp(nn.Linear(3, 3), torch.float16 if last else None))  # fmt: skip

    def sharded(kind: type = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
        return get_sharded_optimizer([torch.ones(3, requires_grad=True)], kind, **options)

    told("lr of group 0 is 0.1 on rank 0 and 0.2 on rank", lambda: sharded(lr=0.2 if last else 0.1))
    told("betas of group 0 is (0.9, 0.9) on rank 0 and (0.9, 0.8)", lambda: sharded(betas=(0.9, 0.8 if last else 0.9)))
    told("optimizer_cls is AdamW on rank 0 and SGD on rank",
         lambda: sharded(torch.optim.SGD if last else torch.optim.AdamW))  # fmt: skip
    optimizer, added = sharded(), torch.ones(2 if last else 3, requires_grad=True)
    told("parameter 0 of group 0 is torch.float32 of shape (3,) on rank 0 and torch.float32 of shape (2,)",
         lambda: optimizer.add_param_group({"params": [added]}))  # fmt: skip
    get_ddp(nn.Linear(3, 3))


@case
def nothing_to_train() -> None:
    ddp = get_ddp(nn.Linear(3, 3).requires_grad_(False))
    ddp(torch.ones(2, 3))
    ddp.finish_gradient_synchronization()


# ---- ShardedOptimizer ----


def optimizer_trains_as_the_whole_one(kind: type[torch.optim.Optimizer], **options: Any) -> None:
    models = same_model(TiedModel), same_model(TiedModel)
    whole = kind([{"params": [models[0].head.weight], "lr": 0.02}, {"params": [models[0].norm.weight]}], **options)
    ours = get_sharded_optimizer(
        [{"params": [models[1].head.weight], "lr": 0.02}, {"params": [models[1].norm.weight]}], kind, **options
    )
    for optimizer, model in zip((whole, ours), models, strict=True):
        later = [*model.up.parameters(), *model.frozen.parameters(), *model.down.parameters()]
        optimizer.add_param_group({"params": later, "lr": 0.003})
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in (whole, ours)]
    for step in range(8):
        for model, optimizer in zip(models, (whole, ours), strict=True):
            optimizer.zero_grad()

            def closure(model: nn.Module = model, step: int = step) -> Tensor:
                loss = loss_of(model(batch(step)[0]), batch(step)[1])
                loss.backward()
                return loss

            assert torch.is_tensor(optimizer.step(closure))
        for schedule in schedules:
            schedule.step()
        if step == 3:  # a new optimizer goes on with the old one's state
            saved = ours.state_dict()
            groups = [{**group, "lr": 1.0} for group in ours.param_groups]
            ours = get_sharded_optimizer(groups, kind, **options)
            ours.load_state_dict(saved)
            schedules[1].optimizer = ours
            wrong = saved | {"shard": (dist.get_rank() + 1, dist.get_world_size())}
            raises(ValueError, "does not fit rank", partial(ours.load_state_dict, wrong))
        assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in whole.param_groups]
        assert_same(dict(models[1].named_parameters()), models[0].named_parameters())
    held = sum(x.numel() for state in ours.state.values() for x in state.values() if torch.is_tensor(x) and x.dim())
    every = sum(x.numel() for state in whole.state.values() for x in state.values() if torch.is_tensor(x) and x.dim())
    total = torch.tensor(held)
    dist.all_reduce(total)
    assert total == every and 0 < held < every, (held, total, every)


@case
def sharded_adamw() -> None:
    optimizer_trains_as_the_whole_one(torch.optim.AdamW, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95))


@case
def sharded_fused_adamw() -> None:
    optimizer_trains_as_the_whole_one(torch.optim.AdamW, lr=0.01, fused=True)


@case
def sharded_sgd_with_momentum() -> None:
    optimizer_trains_as_the_whole_one(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)


@case
def sharded_optimizer_of_fewer_parameters_than_ranks() -> None:
    ours, whole = (nn.Parameter(torch.arange(5.0)) for _ in "ab")
    optimizers = get_sharded_optimizer([ours], torch.optim.AdamW, lr=0.1), torch.optim.AdamW([whole], lr=0.1)
    for _ in range(3):
        for parameter, optimizer in zip((ours, whole), optimizers, strict=True):
            parameter.grad = parameter.detach().clone()
            optimizer.step()
    assert torch.equal(ours, whole) and len(optimizers[0].state) == (dist.get_rank() == 0)


# ---- FSDP ----


def fsdp_trains_as_one_process(
    kind: type[nn.Module], dtype: torch.dtype | None = None, optimizer: type = torch.optim.SGD, **options: Any
) -> None:
    alone, whole = same_model(kind), same_model(kind)
    alone.recompute = whole.recompute = False
    fsdp = get_fsdp(same_model(kind, seed=dist.get_rank()), compute_dtype=dtype)

    def cast(tokens: Tensor) -> Tensor:
        kinds = {name for name, m in alone.named_modules() if isinstance(m, (nn.Linear, nn.Embedding, Linear))}
        names = dict(alone.named_parameters())
        state = {n: p.to(dtype) for n, p in names.items() if n.rpartition(".")[0] in kinds}
        return functional_call(alone, state, tokens, tie_weights=True)

    optimizers = [optimizer(m.parameters(), lr=0.05, **options) for m in (alone, whole, fsdp)]
    for step in range(STEPS):
        for each in optimizers:
            each.zero_grad()
        in_parts(alone, step, cast if dtype else None)
        loss_of(whole(batch(step)[0]), batch(step)[1]).backward()
        tokens, targets = parts(step)[dist.get_rank()]
        with torch.no_grad():  # evaluating in between changes nothing
            before = loss_of(fsdp(tokens), targets)
        loss = loss_of(fsdp(tokens), targets)
        assert torch.equal(loss, before)
        loss.backward()
        fsdp_on_after_backward(fsdp, optimizers[2])
        for name, parameter in fsdp.module.named_parameters():
            assert (parameter.grad is not None) == parameter.requires_grad, name
            if parameter.grad is not None:
                assert parameter.grad.shape == parameter.shape and parameter.grad.dtype == parameter.dtype, name
        assert equal_on_all_ranks(fsdp.module.norm.weight.grad)
        for each in optimizers:
            each.step()
        gathered = fsdp_gather_full_params(fsdp)
        reference = alone.named_parameters(remove_duplicate=False)
        bits = {} if dist.get_world_size() == 2 else {"rtol": 1e-5, "atol": 1e-7}
        assert_same(gathered, reference, **({"rtol": 1e-4, "atol": 1e-4} if dtype else bits))
        if dtype is None:
            every = whole.named_parameters(remove_duplicate=False)
            assert_same(gathered, every, rtol=1e-4, atol=1e-6)
        assert all(equal_on_all_ranks(p) for p in gathered.values())
        assert all(weight.buffer.untyped_storage().nbytes() == 0 for weight in fsdp._unique)


@case
def fsdp() -> None:
    fsdp_trains_as_one_process(ToyModel, momentum=0.9)


@case
def fsdp_with_tied_weights() -> None:
    fsdp_trains_as_one_process(TiedModel)


@case
def fsdp_with_recomputed_blocks() -> None:
    fsdp_trains_as_one_process(RecomputedModel, momentum=0.9)


@case
def fsdp_in_fp16() -> None:
    fsdp_trains_as_one_process(ToyModel, torch.float16)


@case
def fsdp_in_bf16() -> None:
    fsdp_trains_as_one_process(ToyModel, torch.bfloat16)


@case
def fsdp_in_bf16_with_tied_weights() -> None:
    fsdp_trains_as_one_process(TiedModel, torch.bfloat16)


@case
def fsdp_in_bf16_with_recomputed_blocks() -> None:
    fsdp_trains_as_one_process(RecomputedModel, torch.bfloat16)


@case
def fsdp_holds_a_part() -> None:
    model = same_model(ToyModel)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    fsdp = get_fsdp(model)
    for name, parameter in model.named_parameters():
        ranks = 1 if name == "norm.weight" else dist.get_world_size()
        assert parameter.numel() == -(-sizes[name] // ranks), name
    held: list[int] = []
    for layer in fsdp._weights:
        layer.register_forward_pre_hook(
            lambda *_: held.append(sum(w.buffer.untyped_storage().nbytes() > 0 for w in fsdp._unique))
        )
    for _ in range(3):
        held.clear()
        loss_of(fsdp(batch(0)[0]), batch(0)[1]).backward()
        fsdp.finish_gradient_synchronization()
    # Weights and biases of each layer and of the next, which is under way already:
    assert held == [3, 4, 3, 2, 1], held
    assert isinstance(model.up.weight, nn.Parameter) and model.up.weight.dim() == 1


@case
def fsdp_shows_its_parts_after_a_failure() -> None:
    fsdp = get_fsdp(same_model(ToyModel))
    raises(RuntimeError, "", lambda: fsdp.module.up(torch.ones(2, 3)))
    assert fsdp.module.up.weight.dim() == 1
    assert fsdp.module.up(torch.ones(2, 15)).shape == (2, 23)


def cases(size: int) -> dict[str, Callable[[World], None]]:
    return {name: partial(strictly, function) for name, function in CASES.items()}


def strictly(function: Callable[[], None], world: World) -> None:
    """Warnings are errors, and torch is deterministic."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.use_deterministic_algorithms(True)
        if world.device != "cpu":
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it cuBLAS may take any order
            torch.set_default_device(world.device)
        function()


if __name__ == "__main__":
    ranks.main(cases)
