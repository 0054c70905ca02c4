"""Promise: attn_implementation="flash_ext" gives what "eager" gives, in training and generation, for what is in
``transformers_models``, and builds no mask of queries and keys where a band, seen keys or lengths say it."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import MEASURES, floor_of, name_of
from torch import Tensor

import flash_ext
import flash_ext.integrations.transformers as ours
from flash_ext.integrations.transformers import attention_forward, register
from flash_ext.integrations.transformers_masks import BandMask, LengthsMask

transformers = pytest.importorskip("transformers")
from transformers_models import LENGTH, MODELS, ROWS, VOCABULARY, WINDOW, Wide, inputs_of, results_of, served  # noqa: E402

register()
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
NAMES = served()
DECODERS = [name for name in NAMES if MODELS[name].causal]
ONE_STACK = [name for name in DECODERS if MODELS[name].reads == "tokens"]
SLIDING = [name for name in ONE_STACK if "sliding_window" in MODELS[name].config]
# The chunks of llama4 are no band; before transformers 5.8, opt and gpt2 make a mask of all pairs themselves.
OF_THEIR_OWN = ["llama4"] if VERSION >= (5, 8) else ["llama4", "gpt2", "opt"]
PLAIN = [name for name in ONE_STACK if name not in SLIDING + OF_THEIR_OWN]
REDRAWS = 4


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The options of each call that reaches flash_ext; an error where a mask of queries and keys was built."""
    seen: list[dict[str, Any]] = []
    for name in ("attention", "attention_varlen", "attention_with_cache"):
        call = getattr(ours, name)

        def spy(*tensors: Tensor, call: Any = call, name: str = name, **options: Any) -> Any:
            seen.append(options | {"name": name, "shapes": [tuple(t.shape) for t in tensors]})
            mask = options.get("mask")
            assert mask is None or mask.shape[2] == 1 or mask.stride(2) == 0, "a mask of queries and keys"
            return call(*tensors, **options)

        monkeypatch.setattr(ours, name, spy)

    def built(self: Tensor) -> Tensor:
        raise AssertionError("a mask was built")

    monkeypatch.setattr(BandMask, "built", built)
    monkeypatch.setattr(LengthsMask, "built", built)
    yield seen
    assert seen


def test_architectures() -> None:
    """All of them with a new transformers; with an old one those that it had moved to its interface."""
    assert len(NAMES) >= 20 and (VERSION < (5, 20) or list(MODELS) == NAMES)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@pytest.mark.parametrize("name", NAMES)
def test_results_and_gradients(name: str, dtype: torch.dtype, padding: str, device: str) -> None:
    """At most twice the error of "sdpa", or of "eager" where the model has no other. Of a few inputs in the mean, where
    it is not so of the first: an input of which two roundings are far apart says little of one."""
    model = MODELS[name]
    has_sdpa = getattr(transformers, model.kind)._supports_sdpa
    peer = model.make("sdpa" if has_sdpa else "eager", dtype).to(device)
    truth_model = model.make("eager", dtype).to(device).double()
    mine = model.make("flash_ext", dtype).to(device)
    assert mine.config._attn_implementation == "flash_ext"

    draws: list[dict[str, dict[str, Tensor]]] = []
    broken: list[str] = []
    for seed in range(1 + REDRAWS):
        inputs = inputs_of(model, padding, device, seed)
        with Wide():
            truth = results_of(truth_model, inputs)
        draws.append({"got": results_of(mine, inputs), "truth": truth, "peer": results_of(peer, inputs)})
        broken = []
        for key in truth:
            errors = [[(draw[of][key].double() - draw["truth"][key]).cpu() for draw in draws] for of in ("got", "peer")]
            for measure, value_of in MEASURES.items():
                seen, theirs = (sum(map(value_of, of)) / len(of) for of in errors)
                limit = max(2 * theirs, floor_of(truth[key], dtype))
                if not seen <= limit:
                    broken.append(f"{key}: {measure} error {seen:.3g} is {seen / limit:.2f} of what the rule allows")
        if not broken:
            return
    raise AssertionError("\n".join(broken))


def generated(model: Any, inputs: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """Tokens, and the logits that chose them."""
    inputs = {key: value for key, value in inputs.items() if not key.startswith("decoder")}
    options |= {"do_sample": False, "disable_compile": True, "return_dict_in_generate": True, "output_logits": True}
    out = model.generate(**inputs, max_new_tokens=LENGTH, **options)
    return out.sequences, torch.stack(out.logits)


# Before transformers 5, static caches have keys and values of one head dim.
STATIC = [name for name in DECODERS if VERSION >= (5, 0) or name != "deepseek_v3"]
if VERSION == (5, 17):  # which raises for any attention: create_chunked_causal_mask takes no block_sequence_ids
    STATIC.remove("llama4")
CACHES = [("dynamic", name) for name in DECODERS] + [("static", name) for name in STATIC]


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("cache, name", CACHES)
def test_generation(name: str, cache: str, padding: str, device: str) -> None:
    model, options = MODELS[name], {} if cache == "dynamic" else {"cache_implementation": "static"}
    inputs = inputs_of(model, padding, device)
    (expected, logits), (got, mine) = (
        generated(model.make(attention).to(device), inputs, **options) for attention in ("eager", "flash_ext")
    )
    assert torch.equal(got, expected)
    torch.testing.assert_close(mine, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in ("llama", "gemma2", "gpt_oss") if name in NAMES])
def test_a_static_cache_has_lengths(name: str, calls: list[dict[str, Any]], device: str) -> None:
    """Each token is a decode of a cache, whose unused rows are not read."""
    model = MODELS[name].make("flash_ext").to(device)
    tokens = torch.randint(3, VOCABULARY, (2, 9), device=device)
    expected, _ = generated(model, {"input_ids": tokens})
    calls.clear()
    options = {"max_new_tokens": LENGTH, "do_sample": False, "cache_implementation": "static"}
    got = model.generate(tokens, attention_mask=torch.ones_like(tokens), disable_compile=True, **options)
    assert torch.equal(got, expected)
    # Older versions hand on a mask that hides nothing, which would have to be read.
    assert [call["name"] for call in calls].count("attention_with_cache") == 2 * (LENGTH - 1) * (VERSION >= (5, 20))


# Old caches of a window take no tokens back.
WAYS = [(name, "num_beams") for name in ("llama", "mistral")] + [("llama", "prompt_lookup_num_tokens")]
WAYS += [("mistral", "prompt_lookup_num_tokens")] if VERSION >= (5, 20) else []


@pytest.mark.parametrize("name, way", WAYS)
def test_other_ways_to_generate(name: str, way: str, device: str) -> None:
    """Beams that change places in the cache; guesses, whose queries are several, and which are taken back."""
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]], device=device)}
    options = {way: 3, "max_new_tokens": 16, "do_sample": False, "eos_token_id": 2}
    expected, got = (
        MODELS[name].make(attention).to(device).generate(**inputs, **options) for attention in ("eager", "flash_ext")
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", PLAIN)
def test_causal_masks_are_never_built(name: str, calls: list[dict[str, Any]], device: str) -> None:
    """Training, prefill and decode without padding: causal or nothing, and keys are not repeated."""
    model = MODELS[name].make("flash_ext").to(device)
    inputs = inputs_of(MODELS[name], "none", device)
    results_of(model, inputs)
    assert all(call["causal"] and call["window"] is None and call.get("mask") is None for call in calls)
    heads = model.config.num_attention_heads, getattr(model.config, "num_key_value_heads", None)
    for call in calls:
        assert (call["shapes"][0][1], call["shapes"][1][1]) == (heads[0], heads[1] or heads[0])
    calls.clear()
    generated(model, inputs)
    assert all(call.get("mask") is None for call in calls)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", [*SLIDING, *PLAIN, *(name for name in NAMES if not MODELS[name].causal)])
def test_bands_and_padding_are_not_multiplied(
    name: str, padding: str, calls: list[dict[str, Any]], device: str
) -> None:
    """A window is a band; padding is one row of keys for all queries."""
    results_of(MODELS[name].make("flash_ext").to(device), inputs_of(MODELS[name], padding, device))
    if name in SLIDING:
        assert any(call["window"] == (WINDOW - 1, 0) or call["window"] == (WINDOW - 1, None) for call in calls)
    if padding != "none" and MODELS[name].reads == "tokens":
        assert all(call["mask"].shape[0] == ROWS for call in calls)


def packed_places(lengths: list[int], device: str) -> Tensor:
    return torch.cat([torch.arange(length, device=device) for length in lengths])[None]


@pytest.mark.parametrize("name", [name for name in ("llama", "mistral", "gemma2", "gemma3", "qwen3") if name in NAMES])
def test_packed_sequences(name: str, calls: list[dict[str, Any]], device: str) -> None:
    """Places that begin again, or lengths of a collator: each sequence as it is alone, by lengths."""
    model, lengths = MODELS[name].make("flash_ext").to(device), [7, 1, 11, 5]
    tokens = torch.randint(3, VOCABULARY, (1, sum(lengths)), device=device)
    alone = [model(input_ids=part, use_cache=False).logits for part in tokens.split(lengths, 1)]
    places = packed_places(lengths, device)
    calls.clear()
    got = model(input_ids=tokens, position_ids=places, use_cache=False).logits
    torch.testing.assert_close(got, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)
    assert {call["name"] for call in calls} == {"attention_varlen"} and {call["max_q"] for call in calls} == {11}

    ends = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    given = {f"cu_seq_lens_{side}": ends for side in "qk"} | {f"max_length_{side}": 12 for side in "qk"}
    calls.clear()
    got = model(input_ids=tokens, position_ids=places, use_cache=False, **given).logits
    torch.testing.assert_close(got, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)
    assert {call["max_q"] for call in calls} == {12}


def test_packed_sequences_of_several_rows(calls: list[dict[str, Any]], device: str) -> None:
    model = MODELS["mistral"].make("flash_ext").to(device)
    tokens = torch.randint(3, VOCABULARY, (2, 12), device=device)
    places = torch.cat([packed_places([12], device), packed_places([3, 9], device)])
    got = model(input_ids=tokens, position_ids=places, use_cache=False).logits
    parts = [tokens[:1], tokens[1:, :3], tokens[1:, 3:]]
    whole, *halves = (model(input_ids=part, use_cache=False).logits for part in parts)
    torch.testing.assert_close(got, torch.cat([whole, torch.cat(halves, 1)]), rtol=1e-4, atol=1e-4)
    assert [call["name"] for call in calls][:2] == ["attention_varlen"] * 2


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_a_prompt_in_parts(name: str, calls: list[dict[str, Any]], device: str) -> None:
    """Several queries at a cache end with its last key."""
    model = MODELS[name].make("flash_ext").to(device)
    tokens = torch.randint(3, VOCABULARY, (2, 17), device=device)
    whole = model(input_ids=tokens).logits
    cache, parts = None, []
    for part in tokens.split([4, 9, 3, 1], 1):
        out = model(input_ids=part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_training_with_dropout(reentrant: bool | None, device: str) -> None:
    """Dropout in training alone, one seed one loss; with checkpointing, the second forward drops what the first did."""
    model = MODELS["llama"].make("flash_ext", attention_dropout=0.3).to(device)
    inputs = inputs_of(MODELS["llama"], "left", device)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)

    def step() -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        loss = model(**inputs, labels=labels, use_cache=False).loss
        loss.backward()
        return loss.detach(), model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    resting, _ = step()
    model.train()
    loss, grad = step()
    assert loss.isfinite() and grad.isfinite().all() and abs(loss - resting) > 1e-3
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    again, grad_again = step()
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(grad_again, grad)


@pytest.mark.parametrize("name", [name for name in ("llama", "mistral", "bert", "gpt_oss") if name in NAMES])
def test_compiled(name: str, device: str) -> None:
    """Without graph breaks, with padding and without; the mask is then what "sdpa" gets."""
    model = MODELS[name].make("flash_ext").to(device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=name != "gpt_oss")  # its experts break
    for padding in ("none", "left"):
        inputs = inputs_of(MODELS[name], padding, device)
        keep = inputs["attention_mask"].bool()
        with torch.no_grad():
            expected, got = (m(**inputs).logits[keep] for m in (model, compiled))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_mask_of_four_dimensions_is_taken_as_it_is(device: str) -> None:
    mine, eager = (MODELS["llama"].make(attention).to(device) for attention in ("flash_ext", "eager"))
    tokens = torch.randint(3, VOCABULARY, (2, 9), device=device)
    seen = (torch.rand(2, 1, 9, 9, device=device) < 0.5) | torch.eye(9, dtype=torch.bool, device=device)
    added = torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, torch.finfo(torch.float32).min)
    expected = eager(input_ids=tokens, attention_mask=added).logits
    for mask in (seen, added):
        torch.testing.assert_close(mine(input_ids=tokens, attention_mask=mask).logits, expected, rtol=1e-4, atol=1e-4)


def test_padding_of_two_dimensions(device: str) -> None:
    """As models hand it to kernels that read lengths."""
    module = torch.nn.Module()
    query, key, value = (torch.randn(2, 4, 6, 8, device=device) for _ in "qkv")
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], device=device)
    options = {"causal": True, "window": (2, 0), "mask": padding[:, None, None].bool()}
    got, weights = attention_forward(module, query, key, value, padding, sliding_window=3)
    assert weights is None and got.is_contiguous()
    torch.testing.assert_close(got, flash_ext.attention(query, key, value, **options).transpose(1, 2))
    short = attention_forward(module, query[:, :, :2], key, value, padding[:, :5])[0]  # one key is not in use yet
    options = {"causal": True, "align": "bottom_right", "mask": padding[:, None, None, :5].bool()}
    expected = flash_ext.attention(query[:, :, :2], key[:, :, :5], value[:, :, :5], **options)
    torch.testing.assert_close(short, expected.transpose(1, 2))


def test_one_query_for_all(device: str) -> None:
    """Learned queries have batch size 1; a bias of places has its gradient."""
    module = torch.nn.Module()
    query = torch.randn(1, 2, 3, 8, device=device)
    key, value = (torch.randn(4, 2, 5, 8, device=device) for _ in "kv")
    bias = torch.randn(1, 2, 3, 5, device=device, requires_grad=True)
    got, _ = attention_forward(module, query, key, value, None, is_causal=False, position_bias=bias)
    weights = (query @ key.mT / 8**0.5 + bias).softmax(-1)
    torch.testing.assert_close(got, (weights @ value).transpose(1, 2))
    got.sum().backward()
    assert bias.grad.shape == bias.shape


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.zeros(1, 2, 3, 8)
    module = torch.nn.Module()
    with pytest.raises(flash_ext.AttentionError, match='output_attentions is True; only attn_implementation="eager"'):
        attention_forward(module, query, query, query, None, output_attentions=True)
    with pytest.raises(flash_ext.AttentionError, match="head_mask is given; it must be None"):
        attention_forward(module, query, query, query, None, head_mask=torch.ones(2))
    with pytest.raises(TypeError, match="name is of type int; it must be a str"):
        register(3)
    for name in ("sdpa", "eager"):
        with pytest.raises(flash_ext.AttentionError, match=f"name is '{name}', which transformers has already"):
            register(name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers 4\.53 or newer: pip install 'transformers>=4\.53'"):
        register()


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call changes nothing; another name is another; "flash" in it makes no kernel to be downloaded."""
    of_masks = transformers.AttentionMaskInterface()
    before = of_masks["flash_ext"]
    register()
    assert of_masks["flash_ext"] is before
    register("another")
    model = MODELS["llama"].make("another")
    if VERSION >= (5, 0):
        model.set_attn_implementation("flash_ext")
        assert model.config._attn_implementation == "flash_ext"
    generic = importlib.import_module("transformers.utils.generic")
    if hasattr(generic, "is_flash_attention_requested"):
        asked = generic.is_flash_attention_requested
        names = ["flash_ext", "sdpa", "flash_attention_2"]
        assert [asked(requested_attention_implementation=name) for name in names] == [False, False, True]
        assert not asked(model.config)


def test_the_page() -> None:
    """Five lines to copy, which run as they stand; and what else the page shows."""
    page = (Path(__file__).parents[2] / "docs/use/transformers.md").read_text()
    programs = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len([line for line in programs[0].splitlines() if line]) <= 5
    names: dict[str, Any] = {}
    for program in programs:
        exec(compile(program, "transformers.md", "exec"), names)
    assert names["model"].config._attn_implementation == "fext"
