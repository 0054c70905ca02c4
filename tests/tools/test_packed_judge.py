"""Promise: the judge of random packed calls (tests/fuzz/sequences.py) has a second yardstick that is right in float64,
and finds faults that eager's error and it do not explain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fuzz import sequences
from helpers import evaluate, keep_mask
from packed import Packed

import flash_ext
from flash_ext import reference


def test_fused_arithmetic_in_float64_is_the_truth() -> None:
    seen: set[str] = set()
    for number in range(300):
        call = sequences.draw_packed(31, number, "cpu")
        if call.inputs["query"].dtype != torch.float64:
            continue
        p = call.options.get("dropout_p", 0.0)
        extra = {}
        if p > 0:
            state = sequences.STATE(*[torch.zeros(1, 1, 1, 8) for _ in range(3)], dropout_p=p)[2]
            extra["keep"] = keep_mask(state, p, call.scores[:2], *call.scores[2:])
        meaning = {name: value for name, value in call.options.items() if name != "deterministic"}
        truth = evaluate(Packed(call.q, call.k, call.inputs, meaning).alone(reference.attention), call.inputs, extra)
        fused = sequences.fused_alone(call, extra, kernels=True)(call.inputs)
        assert fused.keys() == truth.keys()
        for name, expected in truth.items():
            finite = expected.isfinite()
            assert torch.equal(fused[name].isfinite(), finite), name
            limit = torch.finfo(torch.float32).eps if name == "grad of alibi_slopes" else 1e-12
            size = expected[finite].abs().amax().clamp_min(1) if finite.any() else 1
            assert ((fused[name] - expected)[finite].abs() <= limit * size).all(), (number, name)
        seen |= {name for name, value in (call.options | call.inputs).items() if value is not None}
    assert seen >= {"causal", "window", "softcap", "bias", "mask", "alibi_slopes", "sinks", "dropout_p", "return_lse"}


@pytest.mark.parametrize("result", ["out", "value"])
def test_the_judge_finds_faults(result: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part in a thousand in float32, as one product of TF32 would be, in a result or a gradient."""
    original, found = flash_ext.attention_varlen, 0

    def changed(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        if result == "value":
            value = value + 1e-3 * (value - value.detach())
            return original(query, key, value, *args, **options)
        returned = original(query, key, value, *args, **options)
        out, *lse = returned if isinstance(returned, tuple) else (returned,)
        out = out + 1e-3 * out.detach()
        return (out, *lse) if lse else out

    for number in range(100):
        call = sequences.draw_packed(32, number, "cpu")
        if call.inputs["query"].dtype != torch.float32 or sum(call.q.lengths) < 64 or sum(call.k.lengths) < 64:
            continue
        monkeypatch.setattr(flash_ext, "attention_varlen", original)
        assert not sequences.run_packed(32, number, "cpu", None).wrong
        monkeypatch.setattr(flash_ext, "attention_varlen", changed)
        wrong = sequences.run_packed(32, number, "cpu", None).wrong
        if wrong:
            assert f"{'grad of ' if result == 'value' else ''}{result}: max error" in wrong[0], wrong
            found += 1
        if found == 4:
            return
    raise AssertionError(f"{found} of the faults were found")
