"""Promise: models of timm and diffusers run here under enable(), with the results and gradients of PyTorch's math."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_ext

os.environ["HF_HUB_OFFLINE"] = "1"
timm, diffusers = pytest.importorskip("timm"), pytest.importorskip("diffusers")

Call = tuple[nn.Module, tuple[Tensor, ...], int]  # a model, what it reads, how many layers of attention it has


def vit() -> Call:
    model = timm.create_model("vit_tiny_patch16_224", img_size=48, depth=2, num_classes=5)
    return model, (torch.randn(2, 3, 48, 48),), 2


def swin() -> Call:
    """Windows that are shifted have a mask of their own, beside a bias that is learned."""
    timm.layers.set_fused_attn(True, experimental=True)  # otherwise it multiplies itself
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=56, depths=(2, 2), embed_dim=32, num_heads=(2, 4), num_classes=5
    )
    return model, (torch.randn(2, 3, 56, 56),), 4


def dit() -> Call:
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10, norm_type="ada_norm_zero",
    )  # fmt: skip
    return model, (torch.randn(2, 4, 8, 8), torch.tensor([1, 7]), torch.tensor([3, 4])), 2


def sd3() -> Call:
    """Texts and images attend together."""
    model = diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        caption_projection_dim=16, joint_attention_dim=32, pooled_projection_dim=32, out_channels=4,
    )  # fmt: skip
    return model, (torch.randn(2, 4, 16, 16), torch.randn(2, 7, 32), torch.randn(2, 32), torch.tensor([1, 7])), 2


def unet() -> Call:
    """Images attend to themselves and to texts."""
    model = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=16, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), cross_attention_dim=32, attention_head_dim=4,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), norm_num_groups=8,
    )  # fmt: skip
    return model, (torch.randn(2, 4, 16, 16), torch.tensor([1, 7]), torch.randn(2, 7, 32)), 8


def results_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    names = ("hidden_states", "timestep", "class_labels")
    dit_takes_names = isinstance(model, diffusers.DiTTransformer2DModel)
    out = model(**dict(zip(names, inputs, strict=True))) if dit_takes_names else model(*inputs)
    out = out if isinstance(out, Tensor) else out.sample
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(out.square().sum(), list(parameters.values()), allow_unused=True)
    return {"out": out.detach()} | {n: g for n, g in zip(parameters, grads, strict=True) if g is not None}


@pytest.mark.parametrize("make", [vit, swin, dit, sd3, unet], ids=lambda make: make.__name__)
def test_models_of_images(make: Callable[[], Call], device: str) -> None:
    model, inputs, layers = make()
    model = model.to(device).double().eval()
    with torch.no_grad():  # what starts at 0 is moved
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    inputs = tuple(x.to(device).double() if x.is_floating_point() else x.to(device) for x in inputs)
    with sdpa_kernel(SDPBackend.MATH):
        expected = results_of(model, inputs)
    before = flash_ext.enabled_calls()
    with flash_ext.enable():
        got = results_of(model, inputs)
    assert flash_ext.enabled_calls() - before == layers and got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-6, atol=1e-6 * (1 + float(value.abs().max())), msg=name)
