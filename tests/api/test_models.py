"""Promise: whole models under enable() give the losses and every gradient of PyTorch's math path."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import rand
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_ext

WIDTH, HEADS, LENGTH, BATCH, VOCAB = 32, 4, 12, 3, 40


class GptBlock(nn.Module):
    """Pre-norm, causal, as in GPT-2."""

    def __init__(self, query_heads: int = HEADS, key_heads: int = HEADS) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = query_heads, key_heads, WIDTH // query_heads
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, (query_heads + 2 * key_heads) * self.size)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        sizes = [n * self.size for n in (self.heads, self.key_heads, self.key_heads)]
        q, k, v = (
            part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).split(sizes, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.key_heads)
        x = x + self.proj(y.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    def __init__(self, key_heads: int = HEADS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.Sequential(*(GptBlock(key_heads=key_heads) for _ in range(2)))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


class LeftPadded(nn.Module):
    """A finfo.min mask over left padding, as language models build it: whole rows of finfo.min."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.block(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).tril()
        padded = torch.arange(LENGTH, device=x.device) < torch.tensor([0, 2, 5], device=x.device)[:, None]
        keep = visible & ~padded[:, None, None, :]
        mask = torch.zeros(keep.shape, dtype=x.dtype, device=x.device).masked_fill(~keep, torch.finfo(x.dtype).min)
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(-2)


def gradients(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    total = loss(model)
    total.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": total.detach(), **grads}


def tokens(device: str) -> Tensor:
    return torch.arange(BATCH * LENGTH).mul(7).remainder(VOCAB).view(BATCH, LENGTH).to(device)


def activations(device: str) -> Tensor:
    return rand(BATCH, LENGTH, WIDTH, dtype=torch.float64, device=device)


def language_loss(device: str) -> Callable[[nn.Module], Tensor]:
    batch = tokens(device)
    return lambda model: F.cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def attention_loss(device: str, **options: object) -> Callable[[nn.Module], Tensor]:
    x = activations(device)
    return lambda model: model(x, x, x, need_weights=False, **options)[0].sin().sum()


PADDING = torch.arange(LENGTH) >= torch.tensor([LENGTH, 7, 9])[:, None]


def masked_loss(device: str) -> Callable[[nn.Module], Tensor]:
    x, padding = activations(device), PADDING.to(device)
    return lambda model: model(x, src_key_padding_mask=padding)[~padding].sin().sum()


def plain_loss(device: str) -> Callable[[nn.Module], Tensor]:
    x = activations(device)
    return lambda model: model(x).sin().sum()


def encoder(layers: int = 2) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def decoder_loss(device: str) -> Callable[[nn.Module], Tensor]:
    x, memory = activations(device), activations(device).cos()
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=device, dtype=torch.float64)
    return lambda model: model(x, memory, tgt_mask=mask).sin().sum()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[str], Callable[[nn.Module], Tensor]]]] = {
    "gpt": (Gpt, language_loss),
    "gpt_grouped": (lambda: Gpt(2), language_loss),
    "left_padded": (LeftPadded, plain_loss),
    "multihead": (lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), attention_loss),
    "multihead_masked": (
        lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
        lambda device: attention_loss(device, key_padding_mask=PADDING.to(device)),
    ),
    "encoder": (encoder, plain_loss),
    "encoder_masked": (encoder, masked_loss),
    "decoder": (
        lambda: nn.TransformerDecoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True),
        decoder_loss,
    ),
}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", MODELS)
def test_every_gradient(name: str, mode: str, device: str, backend: str) -> None:
    make, make_loss = MODELS[name]
    model = make().double().to(device).train(mode == "train")
    loss = make_loss(device)
    with sdpa_kernel(SDPBackend.MATH):
        expected = gradients(model, loss)
    with flash_ext.enable():
        before = flash_ext.enabled_calls()
        got = gradients(model, loss)
        assert flash_ext.enabled_calls() > before
    assert got.keys() == expected.keys() and len(got) > 1
    for key, tensor in expected.items():
        torch.testing.assert_close(got[key], tensor, atol=1e-10, rtol=1e-8, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", ["multihead", "encoder", "encoder_masked"])
def test_inference_makes_calls(name: str, device: str, backend: str) -> None:
    """In eval mode without gradients PyTorch's fast path would make none."""
    make, make_loss = MODELS[name]
    model, loss = make().double().to(device).eval(), make_loss(device)
    with torch.inference_mode():
        expected = loss(model)
        with flash_ext.enable():
            before = flash_ext.enabled_calls()
            got = loss(model)
            assert flash_ext.enabled_calls() > before
    torch.testing.assert_close(got, expected)


def test_training_follows_pytorch(device: str, backend: str) -> None:
    """Twenty steps of AdamW: two loss curves on top of each other, and going down."""
    curves = []
    for enabled in (False, True):
        torch.manual_seed(1)
        model = Gpt().double().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        loss = language_loss(device)
        with flash_ext.enable() if enabled else torch.enable_grad():
            curve = []
            for _ in range(20):
                optimizer.zero_grad()
                total = loss(model)
                total.backward()
                optimizer.step()
                curve.append(total.item())
        curves.append(curve)
    torch.testing.assert_close(*(torch.tensor(curve) for curve in curves), atol=1e-7, rtol=1e-7)
    assert curves[1][-1] < 0.7 * curves[1][0]
