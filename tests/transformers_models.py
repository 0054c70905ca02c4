"""Small models of transformers, made from configs: nothing is downloaded, and no model has learned anything.

``MODELS`` has one line an architecture: the class, what its config differs in from ``SMALL``, and what it reads.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

os.environ["HF_HUB_OFFLINE"] = "1"
import transformers

VOCABULARY, ROWS, LENGTH, WINDOW = 61, 3, 12, 5

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]
IMAGES: dict[str, Any] = {
    "image_size": 12, "patch_size": 4, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip


@dataclass
class Model:
    """How a model is made and what it reads: "tokens", "both" (of an encoder and a decoder), "sound" or "image"."""

    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    reads: str = "tokens"
    causal: bool = True  # decodes
    base: dict[str, Any] = field(default_factory=lambda: SMALL)

    def make(self, attention: str, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
        """The same weights each time."""
        kind = getattr(transformers, self.kind)
        torch.manual_seed(1)
        made = kind.config_class(**self.base | self.config | config)
        model = kind._from_config(made, attn_implementation=attention)
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the default has no float64
        with torch.no_grad():  # what starts at 0 or 1 is moved, and logits get apart
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        return model.to(dtype).eval()


MODELS = {
    "bart": Model("BartForConditionalGeneration", {}, "both", base=ENCODER_DECODER),
    "bert": Model("BertForMaskedLM", causal=False),
    "clip": Model("CLIPVisionModel", {}, "image", False, IMAGES),
    "cohere": Model("CohereForCausalLM"),
    "deepseek_v3": Model(
        "DeepseekV3ForCausalLM",
        {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
        | {"v_head_dim": 6, "head_dim": 4, "first_k_dense_replace": 2},
    ),
    "distilbert": Model(
        "DistilBertForMaskedLM",
        {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "pad_token_id": 0},
        causal=False,
        base={},
    ),
    "gemma2": Model(
        "Gemma2ForCausalLM",
        {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4, "layer_types": LAYERS},
    ),
    "gemma3": Model("Gemma3ForCausalLM", {"sliding_window": WINDOW, "layer_types": LAYERS}),
    "gpt2": Model(
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        | {name: SMALL[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
        base={},
    ),
    "gpt_neox": Model("GPTNeoXForCausalLM", {"num_key_value_heads": 4}),
    "gpt_oss": Model(
        "GptOssForCausalLM",
        {"sliding_window": WINDOW, "layer_types": LAYERS, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
    "llama": Model("LlamaForCausalLM"),
    "llama4": Model(  # its chunks are no band
        "Llama4ForCausalLM",
        {"attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 48}
        | {"attn_temperature_tuning": False, "no_rope_layers": [1, 0]},
    ),
    "mistral": Model("MistralForCausalLM", {"sliding_window": WINDOW}),
    "modernbert": Model(
        "ModernBertForMaskedLM",
        {"local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
        causal=False,
    ),
    "olmo2": Model("Olmo2ForCausalLM"),
    "opt": Model("OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32, "num_key_value_heads": 4}),
    "phi3": Model("Phi3ForCausalLM", {"sliding_window": WINDOW}),
    "qwen2": Model("Qwen2ForCausalLM"),
    "qwen3": Model("Qwen3ForCausalLM"),
    "roberta": Model("RobertaForMaskedLM", causal=False),
    "siglip": Model("SiglipVisionModel", {}, "image", False, IMAGES),
    "starcoder2": Model("Starcoder2ForCausalLM", {"sliding_window": WINDOW}),
    "t5": Model(
        "T5ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        | {"decoder_start_token_id": 2, "eos_token_id": None, "pad_token_id": 0},
        "both",
        base={},
    ),
    "vit": Model("ViTModel", {}, "image", False, IMAGES),
    "whisper": Model(
        "WhisperForConditionalGeneration",
        {"num_mel_bins": 8, "max_source_positions": LENGTH, "max_target_positions": 64, "suppress_tokens": None}
        | {"begin_suppress_tokens": None},
        "sound",
        base=ENCODER_DECODER,
    ),
}


def served() -> list[str]:
    """The architectures of this version of transformers that ask for their attention by name."""
    names = []
    for name, model in MODELS.items():
        kind = getattr(transformers, model.kind, None)
        if kind is not None and hasattr(sys.modules[kind.__module__], "ALL_ATTENTION_FUNCTIONS"):
            names.append(name)
    if transformers.__version__.startswith("5.0."):
        names.remove("gpt_oss")  # its config refuses every name with "flash" in it
    return names


def inputs_of(model: Model, padding: str, device: str = "cpu", seed: int = 0) -> dict[str, Tensor]:
    """Three rows, of which one is padded, left or right, by 3 and one by 5 places, or none is."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)
    if model.reads == "image":
        return {"pixel_values": torch.randn(ROWS, 3, 12, 12, generator=generator).to(device)}
    if model.reads == "sound":
        sound = torch.randn(ROWS, 8, 2 * LENGTH, generator=generator)
        return {"input_features": sound.to(device), "decoder_input_ids": tokens.to(device)}
    seen = torch.ones_like(tokens)
    if padding != "none":
        for row, missing in ((1, 3), (2, 5)):
            seen[row, slice(None, missing) if padding == "left" else slice(LENGTH - missing, None)] = 0
        tokens = torch.where(seen == 1, tokens, 0)
    inputs = {"input_ids": tokens, "attention_mask": seen}
    if model.reads == "both":
        inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (ROWS, 7), generator=generator)
    return {name: x.to(device) for name, x in inputs.items()}


class Wide(TorchFunctionMode):
    """Models of float64 that round nothing to float32, as eager attention does with probabilities."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widened(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        function = Tensor.double if function is Tensor.float else function
        return function(*map(widened, args), **{name: widened(x) for name, x in (kwargs or {}).items()})


def results_of(model: Any, inputs: dict[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """What the model gives at places that are not padding, and the gradient of every parameter."""
    dtype = next(model.parameters()).dtype
    out = model(**{name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()})
    out = out.logits if hasattr(out, "logits") else out.last_hidden_state
    if "decoder_input_ids" not in inputs and "attention_mask" in inputs:
        out = out[inputs["attention_mask"].bool()]
    generator = torch.Generator().manual_seed(seed)
    cotangent = torch.randn(out.shape, generator=generator).to(torch.bfloat16).to(out)
    wanted = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(out, list(wanted.values()), cotangent, allow_unused=True)
    found = {f"grad of {name}": grad for name, grad in zip(wanted, grads, strict=True) if grad is not None}
    return {"out": out.detach()} | found
