#!/usr/bin/env python3
"""Models of timm and diffusers as their users run them: PyTorch's attention beside the same under flash_ext.enable().

    python benchmarks/image_models.py                       every model at a usual size, on a GPU in bfloat16
    python benchmarks/image_models.py --models vit swin --device cpu       small ones in float32, to see that it runs
    python benchmarks/image_models.py --out benchmarks/results/nvidia-h200/image-models

A row is a model and a pass: `forward` under no_grad, or a `step`, forward and backward of every weight.
Weights are random. `calls` is how many calls of attention flash_ext served in one forward. MiB, torch's and ours, is
the most that a call allocated beyond what was there. Swin's attention needs timm's set_fused_attn(True,
experimental=True): without it timm multiplies by itself, and neither PyTorch nor flash_ext is asked; that is the row
`swin, timm's own`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from figures import draw_image_models
from harness import (
    BenchmarkError,
    Reporter,
    command_line,
    interleave,
    load_flash_ext,
    make_folder,
    pick_device,
    provenance,
    release_memory,
    run_main,
    stdout_console,
    synchronize,
)
from tables import Table, make_table, write_results
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
try:
    import diffusers
    import timm
except ModuleNotFoundError as error:
    raise SystemExit(f"image_models.py: {error.name} is not installed; pip install timm diffusers") from None

flash_ext = load_flash_ext()
NAMES = ("vit", "swin", "swin, timm's own", "dit", "sd3", "unet")
PASSES = ("forward", "step")
Call = tuple[nn.Module, dict[str, Tensor], str]  # a model, what it reads, its size in words


@dataclass
class Args:
    models: tuple[str, ...] = NAMES
    device: Annotated[Literal["cpu", "cuda", "auto"], tyro.conf.arg(help="cpu: small models in float32")] = "auto"
    batch: int | None = None  # images (None: 64 of timm's models, 8 of the others, 2 on a CPU)
    rounds: int = 7
    out: Path | None = None  # folder for image_models.csv, .md, .tex and .png (None: only shown)


def vit(batch: int, small: bool) -> Call:
    name, image = ("vit_tiny_patch16_224", 48) if small else ("vit_base_patch16_224", 224)
    model = timm.create_model(name, img_size=image, num_classes=10, **({"depth": 2} if small else {}))
    return model, {"x": torch.randn(batch, 3, image, image)}, f"{name}, {image} x {image}"


def swin(batch: int, small: bool) -> Call:
    name, image = "swin_tiny_patch4_window7_224", 56 if small else 224
    sizes = {"depths": (2, 2), "embed_dim": 32, "num_heads": (2, 4)} if small else {}
    model = timm.create_model(name, img_size=image, num_classes=10, **sizes)
    return model, {"x": torch.randn(batch, 3, image, image)}, f"{name}, {image} x {image}"


def dit(batch: int, small: bool) -> Call:
    layers, heads, cols, latent = (2, 2, 16, 8) if small else (28, 16, 72, 32)
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=heads, attention_head_dim=cols, in_channels=4, num_layers=layers, sample_size=latent,
        patch_size=2, num_embeds_ada_norm=1000, norm_type="ada_norm_zero",
    )  # fmt: skip
    inputs = {"timestep": torch.arange(batch), "class_labels": torch.arange(batch)}
    images = {"hidden_states": torch.randn(batch, 4, latent, latent)}
    return model, images | inputs, f"DiT, {layers} layers, {heads} x {cols}, latents of {latent} x {latent}"


def sd3(batch: int, small: bool) -> Call:
    layers, heads, latent, texts = (2, 2, 16, 7) if small else (12, 24, 128, 154)
    model = diffusers.SD3Transformer2DModel(
        sample_size=latent, patch_size=2, in_channels=16, num_layers=layers, attention_head_dim=64,
        num_attention_heads=heads, caption_projection_dim=64 * heads, joint_attention_dim=64, pooled_projection_dim=32,
        out_channels=16,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(batch, 16, latent, latent),
        "encoder_hidden_states": torch.randn(batch, texts, 64),
        "pooled_projections": torch.randn(batch, 32),
        "timestep": torch.arange(batch),
    }
    return model, inputs, f"SD3, {layers} layers, {heads} x 64, latents of {latent} x {latent}, {texts} texts"


def unet(batch: int, small: bool) -> Call:
    channels, latent, texts = ((32, 64), 16, 7) if small else ((320, 640, 1280), 64, 77)
    model = diffusers.UNet2DConditionModel(
        block_out_channels=channels, layers_per_block=1 if small else 2, sample_size=latent, cross_attention_dim=64,
        attention_head_dim=4 if small else 8, norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D",) * (len(channels) - 1) + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * (len(channels) - 1),
    )  # fmt: skip
    inputs = {
        "sample": torch.randn(batch, 4, latent, latent),
        "timestep": torch.arange(batch),
        "encoder_hidden_states": torch.randn(batch, texts, 64),
    }
    return model, inputs, f"UNet, channels {channels}, latents of {latent} x {latent}, {texts} texts"


MAKERS = {"vit": vit, "swin": swin, "swin, timm's own": swin, "dit": dit, "sd3": sd3, "unet": unet}


@contextmanager
def fused_windows(wanted: bool) -> Iterator[None]:
    """Whether Swin calls F.scaled_dot_product_attention: asked when the model is made."""
    timm.layers.set_fused_attn(True, experimental=wanted)
    try:
        yield
    finally:
        timm.layers.set_fused_attn(True, experimental=False)


def forward_of(model: nn.Module, inputs: dict[str, Tensor]) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        out = model(**inputs)
        return out if isinstance(out, Tensor) else out.sample

    return forward


def pass_of(model: nn.Module, forward: Callable[[], Tensor], direction: str) -> Callable[[], Any]:
    """What is timed."""

    def only() -> None:
        with torch.no_grad():
            forward()

    def step() -> None:
        forward().float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    return step if direction == "step" else only


def enabled(call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        with flash_ext.enable():
            call()

    return run


def peak_mib(call: Callable[[], Any], device: str) -> str:
    """The most that a call allocates; "" on a CPU."""
    if device == "cpu":
        return ""
    call()
    synchronize(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    synchronize(device)
    return f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f}"


def rows_of(name: str, device: str, batch: int | None, rounds: int) -> Iterator[dict[str, Any]]:
    """One a pass, as it is measured."""
    small = device == "cpu"
    images = batch or (2 if small else 64 if name in ("vit", "swin", "swin, timm's own") else 8)
    dtype = torch.float32 if small else torch.bfloat16
    torch.manual_seed(0)
    with fused_windows(name == "swin"):
        model, inputs, size = MAKERS[name](images, small)
    model = model.to(device, dtype).eval()
    inputs = {key: x.to(device, dtype if x.is_floating_point() else None) for key, x in inputs.items()}
    forward = forward_of(model, inputs)
    before = flash_ext.enabled_calls()
    enabled(pass_of(model, forward, "forward"))()
    served = flash_ext.enabled_calls() - before
    for direction in PASSES:
        call = pass_of(model, forward, direction)
        peers = {"torch": call, "flash_ext": enabled(call)}
        times = interleave(peers, device, rounds, sample_s=0.2, budget_s=20.0)
        row = {"model": name, "size": size, "images": images, "dtype": str(dtype).removeprefix("torch."),
               "pass": direction, "calls": served}  # fmt: skip
        for peer, timing in times.items():
            if timing.failure:
                raise BenchmarkError(f"{name}, {direction}, {peer}: {timing.failure}")
            row |= {f"{peer}_ms": f"{1e3 * timing.median:.3f}", f"{peer}_mib": peak_mib(peers[peer], device)}
        yield row
    del model
    release_memory(device)


def measure_all(args: Args, device: str) -> list[dict[str, Any]]:
    rows = []
    with Reporter("image models", len(PASSES) * len(args.models)) as progress:
        for name in args.models:
            for row in rows_of(name, device, args.batch, args.rounds):
                rows.append(row)
                progress.advance(f"{name}, {row['pass']}")
    return rows


def shown(rows: list[dict[str, Any]]) -> Table:
    right = ("images", "pass", "calls", "torch, ms", "flash_ext, ms", "speed-up", "MiB")
    table = make_table("model", "size", right=right, title="Models of timm and diffusers")
    for row in rows:
        speed_up = float(row["torch_ms"]) / float(row["flash_ext_ms"])
        memory = f"{row['torch_mib']}, {row['flash_ext_mib']}" if row["torch_mib"] else "-"
        numbers = (row["torch_ms"], row["flash_ext_ms"], f"{speed_up:.3f}", memory)
        table.add_row(row["model"], row["size"], str(row["images"]), row["pass"], str(row["calls"]), *numbers)
    return table


def main() -> None:
    """Command line; see the top of this file."""
    args = command_line(Args)
    if unknown := set(args.models) - set(NAMES):
        raise BenchmarkError(f"--models: {sorted(unknown)[0]} is none of {', '.join(NAMES)}.")
    device = pick_device(args.device)
    out, origin = args.out and make_folder(args.out), provenance(device)
    rows = measure_all(args, device)
    stdout_console().print(shown(rows))
    if out:
        print(write_results(out / "image_models.csv", rows, origin, [shown(rows)], draw_image_models))


if __name__ == "__main__":
    run_main(main)
