"""The suite varlen: how packed sequences are counted, padded and checked, and which peers take them."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from commands import rows_of, start

pytest.importorskip("tyro")
pytest.importorskip("pandas")
pytest.importorskip("matplotlib")


def test_packed_sequences_count_the_pairs_and_rows_of_each_ones_own_length(bench):
    case = bench.shapes.Case(0, 6, 0, 8, causal=True, hkv=2, lengths=(5, 1, 7))
    kept = torch.block_diag(*(torch.ones(n, n).tril() for n in case.lengths)).sum()
    assert (case.b, case.sq, case.sk, case.rows, case.pairs()) == (3, 7, 7, 13, kept)
    assert case.flop("fwd") == 4 * 6 * kept * 8
    assert case.traffic("fwd", torch.float32) == 4 * 13 * (6 + 2 + 2 + 6) * 8
    assert case.name == "3x6x7x8 causal, GQA 6/2, packed 1 to 7, median 5, 13 in all"
    for wrong in ({"causal": False}, {"dropout": 0.1}, {"mask": "bool"}):
        with pytest.raises(ValueError, match="not a case of packed sequences"):
            replace(case, **wrong)


def test_the_lengths_of_the_suite_varlen_are_what_it_promises(bench):
    by_heads = {(case.h, case.hkv, case.d, case.causal): case.lengths for case in bench.suites.varlen_cases()}
    for heads, d in ((32, 64), (16, 128)):
        assert by_heads[heads, heads, d, False] == by_heads[heads, heads, d, True] == (1024,) * 16
    spread = by_heads[32, 8, 128, True]
    assert by_heads[32, 32, 128, True] == spread == bench.suites.log_normal(16384, 64, 8192)
    assert sum(spread) == 16384 and 64 <= min(spread) < 128 and 4096 < max(spread) <= 8192
    assert by_heads[8, 8, 128, True] == (8,) * 4095 + (65536,)
    small = bench.suites.cases_of("varlen", most_flop=bench.attention.CPU_FLOP)
    assert len(small) == 7 and all(case.flop("fwd") < bench.attention.CPU_FLOP for case in small)


def test_padded_sequences_come_back_packed_and_give_the_same(bench):
    case = bench.shapes.Case(0, 4, 0, 8, causal=True, hkv=2, lengths=(5, 1, 7))
    x = bench.shapes.make_inputs(case, torch.float64, "cpu")
    padded = bench.shapes.pad(case, x)
    assert padded.query.shape == (3, 4, 7, 8) and padded.query.is_contiguous()
    assert torch.equal(bench.shapes.unpad(case, padded.key), x.key)
    alone = replace(case, lengths=())
    results = []
    for which, inputs in ((case, x), (alone, padded)):
        out = bench.accuracy.eager_attention(which, inputs.query, inputs.key, inputs.value, None)
        gradients = torch.autograd.grad(out, inputs.wanting_gradients(), inputs.grad_out)
        results.append([bench.shapes.unpad(case, t) for t in (out, *gradients)])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two)


def test_sequences_that_take_too_much_room_are_not_padded(bench, monkeypatch):
    monkeypatch.setattr(bench.shapes, "MOST_PADDED_GIB", 1e-6)
    case = bench.shapes.Case(0, 4, 0, 8, causal=True, lengths=(5, 1, 7))
    x = bench.shapes.make_inputs(case, torch.float32, "cpu")
    with pytest.raises(RuntimeError, match="padded, its query would take"):
        bench.gpu_peers.padded_peer(bench.gpu_peers.eager_peer())(case, bench.shapes.pad(case, x))


def test_packed_sequences_beside_padded_ones(tmp_path):
    chosen = ("--device", "cpu", "--quick", "--dtypes", "fp32", "--out", tmp_path)
    done = start("attention.py", "--suite", "varlen", *chosen)
    assert done.returncode == 0, done.stderr
    assert "causal, GQA 4/1, packed" in done.stdout
    rows = rows_of(tmp_path / "attention_varlen.csv")
    assert [row["peer"] for row in rows] == ["torch-padded", "flash_ext-padded", "flash_ext"] * (len(rows) // 3)
    assert all(float(row["ms"]) > 0 for row in rows)
    assert all(float(row["err"]) <= 1 for row in rows if row["peer"].startswith("flash_ext"))
    assert {row["causal"] for row in rows} == {"0", "1"}


def test_peers_of_packed_sequences_that_cannot_serve_say_why(bench):
    case = bench.shapes.Case(0, 4, 0, 8, causal=True, lengths=(5, 1, 7))
    x = bench.shapes.make_inputs(case, torch.bfloat16, "cpu")
    for name in ("torch", "torch-varlen", "torch-varlen-repeated"):
        with pytest.raises(RuntimeError, match="packed sequences"):
            bench.attention.PEERS[name]()(case, x)
    for name in ("torch-padded", "flash_ext-padded"):
        with pytest.raises(RuntimeError, match="pads packed sequences only"):
            bench.attention.PEERS[name]()(replace(case, lengths=()), x)


def test_a_peer_that_is_not_installed_is_left_out_with_a_line(bench, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # importing it fails
    peers = bench.attention.peers_of(bench.suites.SUITES["varlen"], on_gpu=True)
    assert "fa4-varlen" not in peers and peers[-3:] == ["torch-padded", "flash_ext-padded", "flash_ext"]
    assert "Left out: The peer fa4-varlen cannot be imported" in capsys.readouterr().err
