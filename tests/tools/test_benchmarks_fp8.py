"""The suite fp8: what is quantised, counted and checked, which peers take e4m3, and cuDNN's graph."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import rows_of, start

import flash_ext

pytest.importorskip("tyro")
pytest.importorskip("pandas")
pytest.importorskip("matplotlib")
E4M3 = torch.float8_e4m3fn


def test_the_suite_is_16k_tokens_of_grouped_heads(bench: SimpleNamespace) -> None:
    cases = bench.suites.cases_of("fp8")
    assert {(c.d, c.h, c.hkv) for c in cases} == {(64, 64, 8), (128, 64, 8), (256, 32, 4)}
    assert {(c.b, c.sq) for c in cases} == {(8, 2048), (4, 4096), (2, 8192), (1, 16384)}
    assert len({(c.d, c.sq, c.causal) for c in cases}) == len(cases) == 24
    small = bench.suites.cases_of("fp8", most_flop=bench.attention.CPU_FLOP)
    assert {(c.d, c.causal) for c in small} == {(c.d, c.causal) for c in cases}


def test_inputs_are_those_of_bf16_quantised(bench: SimpleNamespace) -> None:
    case = bench.shapes.Case(2, 4, 30, 16, hkv=2, mask="float")
    x, wide = (bench.shapes.make_inputs(case, dtype, "cpu") for dtype in (E4M3, torch.bfloat16))
    assert [t.dtype for t in (x.query, x.key, x.value, x.mask)] == [E4M3] * 3 + [torch.bfloat16]
    assert [tuple(d.shape) for d in x.descales] == [(2, 4), (2, 2), (2, 2)] and not x.wanting_gradients()
    assert torch.equal(x.query.view(torch.uint8), flash_ext.quantize_fp8(wide.query)[0].detach().view(torch.uint8))
    again = x.dequantised(torch.float64)
    assert again.query.dtype == torch.float64 and not again.descales
    torch.testing.assert_close(again.query, wide.query.detach().double(), rtol=1 / 16, atol=0.01)
    assert torch.equal(again.value, x.value.double() * x.descales[2].double()[..., None, None])


def test_out_and_mask_count_as_bf16(bench: SimpleNamespace) -> None:
    case = bench.shapes.Case(2, 4, 30, 16, hkv=2, mask="float")
    rows = 2 * 30 * 16
    assert case.traffic("fwd", E4M3) == rows * (4 + 2 + 2) + 2 * rows * 4 + 2 * 4 * 30 * 30


@pytest.mark.parametrize("lengths", [(), (5, 1, 30)])
def test_err_is_about_what_e4m3_stands_for(bench: SimpleNamespace, lengths: tuple[int, ...]) -> None:
    case = bench.shapes.Case(2, 4, 40, 16, causal=True, hkv=2, lengths=lengths)
    x = bench.shapes.make_inputs(case, E4M3, "cpu")
    found = bench.accuracy.truth(case, x)
    assert found.exact[0].dtype == torch.float64 and len(found.exact) == 1
    wide = x.dequantised(torch.bfloat16)
    ours = {name: bench.our_peers.OUR_PEERS[name]() for name in ("flash_ext", "flash_ext-bf16")}
    for out in (ours["flash_ext"](case, x), ours["flash_ext-bf16"](case, wide)):
        assert out.dtype == torch.bfloat16 and bench.accuracy.err(case, found, [out], "fwd") < 1
        assert bench.accuracy.err(case, found, [out * 1.2], "fwd") > 1
    other = replace(x, descales=(*x.descales[:2], x.descales[2] * 1.2))
    assert bench.accuracy.err(case, found, [ours["flash_ext"](case, other)], "fwd") > 1


def test_softmax_in_e4m3_rounds_the_exponentials(bench: SimpleNamespace) -> None:
    scores = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    rounded, exact = bench.accuracy.softmax_e4m3(scores, dim=-1), scores.softmax(-1)
    error = ((rounded - exact).abs() / exact)[exact > exact.amax(-1, keepdim=True) / 64]  # what e4m3 has 4 digits for
    assert 1 / 64 < error.max() < 1 / 15
    steps = rounded / rounded.amax(-1, keepdim=True)  # the largest exponential is 1, which e4m3 has
    torch.testing.assert_close(steps.to(E4M3).float(), steps)


def test_peers_say_whether_they_take_e4m3(bench: SimpleNamespace) -> None:
    case = bench.shapes.Case(1, 2, 8, 16)
    x = bench.shapes.make_inputs(case, E4M3, "cpu")
    for name, dtype, words in (
        ("torch", E4M3, "takes no e4m3"),
        ("fa3", E4M3, "takes no e4m3"),
        ("flash_ext-padded", E4M3, "takes no e4m3"),
        ("flash_ext-bf16", torch.bfloat16, "takes e4m3 only"),
        ("cudnn-fp8", torch.float16, "takes e4m3 only"),
    ):
        with pytest.raises(RuntimeError, match=words):
            bench.our_peers.given_to(name, print, dtype)(case, x)
    for name, dtype in (("torch", torch.bfloat16), ("cudnn-fp8", E4M3), ("flash_ext", E4M3), ("flash_ext-bf16", E4M3)):
        assert bench.our_peers.given_to(name, print, dtype) is print


def test_on_a_cpu_beside_bf16(tmp_path: Any) -> None:
    chosen = ("--device", "cpu", "--quick", "--out", tmp_path)
    done = start("attention.py", "--suite", "fp8", *chosen)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "attention_fp8.csv")
    assert [row["peer"] for row in rows] == ["flash_ext-bf16", "flash_ext"] * 2
    assert {(row["dtype"], row["pass"]) for row in rows} == {("float8_e4m3fn", "fwd")}
    assert all(float(row["ms"]) > 0 and float(row["err"]) <= 1 for row in rows)
    assert (tmp_path / "attention_fp8.png").stat().st_size > 5000


def test_a_peer_of_16_bits_is_a_row_with_the_reason(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    chosen = ("--device", "cpu", "--quick", "--only", "causal", "--peers", "torch", "flash_ext", "--out", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["attention.py", "--suite", "fp8", *chosen])
    bench.attention.main()
    theirs, ours = rows_of(tmp_path / "attention_fp8.csv")
    assert (theirs["ms"], theirs["reason"], theirs["peer"]) == ("failed", "takes no e4m3", "torch")
    assert float(ours["ms"]) > 0


def test_backward_of_e4m3_is_refused(bench: SimpleNamespace) -> None:
    with pytest.raises(bench.harness.BenchmarkError, match="e4m3 is timed forward alone: --passes fwd"):
        bench.attention.parse(["--suite", "fp8", "--device", "cpu", "--passes", "fwd", "bwd"])


def test_without_its_package_cudnn_is_left_out(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)  # importing it fails
    peers = bench.attention.peers_of(bench.suites.SUITES["fp8"], on_gpu=True)
    assert peers == ["flash_ext-bf16", "flash_ext"]
    assert "Left out: The peer cudnn-fp8 cannot be imported" in capsys.readouterr().err


class Node:
    """A tensor of a graph; what is set on it is kept."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __getattr__(self, name: str) -> Any:
        def keep(value: Any) -> Node:
            self.options[name.removeprefix("set_")] = value
            return self

        return keep


class Graph:
    """What cudnn.pygraph is asked for."""

    def __init__(self, **options: Any) -> None:
        self.asked: dict[str, Any] = {}
        self.runs: list[dict[Node, torch.Tensor]] = []

    def tensor(self, **options: Any) -> Node:
        return Node(**options)

    def sdpa_fp8(self, **options: Any) -> list[Node]:
        self.asked = options
        return [Node() for _ in range(4)]

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, given: dict[Node, torch.Tensor], workspace: torch.Tensor, handle: str) -> None:
        self.runs.append(given)

    def __getattr__(self, name: str) -> Any:
        assert name in ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans")
        return lambda *plans: None


def test_the_graph_of_cudnn_has_the_tensors_of_the_case(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[Graph] = []
    cudnn = SimpleNamespace(
        data_type=SimpleNamespace(FP8_E4M3="e4m3", FLOAT="float"),
        heur_mode=SimpleNamespace(A="a", FALLBACK="fallback"),
        create_handle=lambda: "handle",
        set_stream=lambda handle, stream: None,
        pygraph=lambda **options: graphs.append(Graph(**options)) or graphs[-1],
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    case = bench.shapes.Case(2, 4, 30, 16, causal=True, hkv=2)
    x = bench.shapes.make_inputs(case, E4M3, "cpu")
    call = bench.gpu_peers.cudnn_fp8_call(cudnn, case, x)
    outs = [call(), call()]
    assert outs[0] is not outs[1] and (outs[0].shape, outs[0].dtype) == ((2, 4, 30, 16), E4M3)
    (graph,) = graphs
    given, asked = graph.runs[0], graph.asked
    assert len(graph.runs) == 2 and asked["attn_scale"] == 0.25 and asked["use_causal_mask"]
    for name, tensor in (("q", x.query), ("k", x.key), ("v", x.value)):
        assert given[asked[name]] is tensor
        assert asked[name].options == {"dim": [*tensor.shape], "stride": [*tensor.stride()], "data_type": "e4m3"}
    for name, descale in zip(("descale_q", "descale_k", "descale_v"), x.descales, strict=True):
        assert given[asked[name]].shape == (1, 1, 1, 1) and given[asked[name]].item() == descale[0, 0]
    made = [node.options for node in given if node.options.get("output")]
    assert [node["dim"] for node in made] == [[2, 4, 30, 16], [2, 4, 30, 1], [1] * 4, [1] * 4]
    assert [node["stride"] for node in made[:2]] == [[1920, 480, 16, 1], [120, 30, 1, 1]]


def test_cudnn_says_what_it_does_not_serve(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace())
    peer = bench.attention.PEERS["cudnn-fp8"]()
    case = bench.shapes.Case(1, 2, 8, 16, causal=True)
    x = bench.shapes.make_inputs(case, E4M3, "cpu")
    for options, words in (({"softcap": 5.0}, "no mask, dropout, window, softcap"), ({}, "runs on a GPU only")):
        with pytest.raises(RuntimeError, match=words):
            peer(replace(case, **options), x)


@pytest.mark.gpu
def test_on_a_gpu_beside_what_is_there(tmp_path: Any) -> None:
    done = start("attention.py", "--suite", "fp8", "--quick", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "attention_fp8.csv")
    ours = [row for row in rows if row["peer"].startswith("flash_ext")]
    assert {row["peer"] for row in ours} == {"flash_ext", "flash_ext-bf16"} and {row["causal"] for row in ours} == {
        *"01"
    }
    assert all(float(row["ms"]) > 0 and float(row["err"]) <= 1 and float(row["peak_mib"]) > 0 for row in ours)
    assert all(row["err"] == "" for row in rows if row["peer"] == "cudnn-fp8")
