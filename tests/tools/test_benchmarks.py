"""The benchmarks run, on a CPU and in seconds: model, data, timing arithmetic, and each command as a user starts it.

No test here reads a clock's value; what is measured is only required to be there.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from itertools import islice

import pytest
import torch
from commands import rows_of, start

pytest.importorskip("tyro")
pytest.importorskip("pandas")
pytest.importorskip("matplotlib")
COLUMNS = "peer,suite,B,H,Hkv,Sq,Sk,D,dtype,causal,pass,ms,tflops,gbs,err"


# ---- model and data ----


@pytest.mark.parametrize("attention", ["naive", "flash_ext"])
def test_every_attention_gives_the_same_logits_and_gradients(bench, attention):
    size = bench.model.Size(d_model=64, d_ff=96, layers=2, heads=2, lr=1e-3)
    tokens = torch.randint(256, (2, 37), generator=torch.Generator().manual_seed(0))
    results = []
    for name in ("sdpa", attention):
        torch.manual_seed(1)
        model = bench.model.TransformerLM(size, bench.model.ATTENTIONS[name](), context=48)
        logits = model(tokens)
        logits.square().mean().backward()
        results.append([logits.detach(), *(p.grad for p in model.parameters())])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_model_is_causal(bench):
    torch.manual_seed(0)
    model = bench.model.TransformerLM(bench.model.SIZES["tiny"], bench.model.ATTENTIONS["sdpa"](), context=32)
    tokens = torch.randint(256, (1, 32))
    changed = tokens.clone()
    changed[0, 20:] = (changed[0, 20:] + 1) % 256
    torch.testing.assert_close(model(tokens)[:, :20], model(changed)[:, :20], rtol=1e-4, atol=1e-5)


def test_generated_text_depends_on_the_seed_only(bench):
    torch.manual_seed(0)
    model = bench.model.TransformerLM(bench.model.SIZES["tiny"], bench.model.ATTENTIONS["sdpa"](), context=16)
    first = model.generate(b"def ", 20, seed=3)  # longer than the context
    assert len(first) == 20
    assert first == model.generate(b"def ", 20, seed=3)


def test_text_is_split_without_overlap_and_batches_repeat(bench, tmp_path):
    content = "".join(chr(97 + i % 26) for i in range(1000)) + "ä"
    (tmp_path / "text").write_text(content, encoding="utf-8")
    text = bench.data.load_text(tmp_path / "text", context=16)
    assert bytes(torch.cat((text.train, text.validation)).tolist()).decode() == content
    assert text.validation.numel() == int(1002 * bench.data.VALIDATION_SHARE)
    one, two = (list(islice(bench.data.batches(text.train, 3, 16, seed=5, device="cpu"), 4)) for _ in range(2))
    for (inputs, targets), (again, _) in zip(one, two, strict=True):
        assert inputs.shape == targets.shape == (3, 16)
        assert torch.equal(inputs, again)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_the_standard_library_is_enough_text(bench):
    assert bench.data.load_text(None, context=512).train.numel() > 1_000_000


def test_learning_rate_rises_to_its_peak_and_falls_to_a_tenth(bench):
    rates = [bench.training.learning_rate(step, 100, 1.0) for step in range(100)]
    assert max(rates) == 1.0
    assert rates[0] == pytest.approx(0.2)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


# ---- arithmetic of the attention benchmark ----


@pytest.mark.parametrize(("sq", "sk"), [(5, 5), (3, 7), (7, 3)])
def test_causal_pairs_are_counted_as_the_mask_keeps_them(bench, sq, sk):
    kept = torch.ones(sq, sk).tril().sum()
    assert bench.shapes.Case(1, 1, sq, 8, causal=True, sk=sk).pairs() == kept


@pytest.mark.parametrize(("s", "window"), [(8, 3), (8, 20), (5, 1)])
def test_pairs_of_a_window_are_counted_as_the_mask_keeps_them(bench, s, window):
    kept = torch.ones(s, s).tril().triu(-window).sum()
    assert bench.shapes.Case(1, 1, s, 8, causal=True, window=window).pairs() == kept


def test_flop_and_traffic_of_the_published_grid(bench):
    case = bench.shapes.Case(32, 32, 512, 64, causal=True, suite="grid")
    assert case.flop("bwd") / 0.4392e-3 / 1e12 == pytest.approx(195.6, abs=0.1)  # fa3's backward in the grid
    tensors = 4 * 32 * 32 * 512 * 64 * 2
    assert case.traffic("fwd", torch.bfloat16) == tensors
    biased = replace(case, mask="float_grad")  # read in both passes, and its gradient written
    assert biased.traffic("fwd", torch.bfloat16) == tensors + 32 * 512**2 * 2
    assert biased.traffic("bwd", torch.bfloat16) == 2 * tensors + 2 * 32 * 512**2 * 2


def test_every_suite_is_made_of_its_own_cases_and_of_known_names(bench):
    for name, suite in bench.suites.SUITES.items():
        cases, small = bench.suites.cases_of(name), bench.suites.cases_of(name, small=True)
        assert len({case.name for case in cases}) == len(cases), name
        assert {case.suite for case in cases} == {name}
        assert all(case.sq * case.sk <= 2**16 and case.b * case.h <= (16 if case.lengths else 4) for case in small)
        assert set(suite.peers) <= bench.attention.PEERS.keys()
        assert suite.peers[-1] == "flash_ext"
        assert set(suite.dtypes) <= bench.attention.DTYPES.keys() and set(suite.passes) <= {*bench.attention.PASSES}


def test_err_is_small_for_a_right_result_and_large_for_a_wrong_one(bench):
    for case in (c for suite in ("cpu", "masks", "extras", "varlen") for c in bench.suites.cases_of(suite, small=True)):
        if case.dropout:
            continue
        x = bench.shapes.make_inputs(case, torch.float32, "cpu")
        found = bench.accuracy.truth(case, x)
        out = bench.accuracy.eager_attention(case, x.query, x.key, x.value, x.mask, x.slopes)
        results = [out.detach(), *torch.autograd.grad(out, x.wanting_gradients(), x.grad_out)]
        for direction in ("fwd", "bwd"):
            assert bench.accuracy.err(case, found, results, direction) < 1, case.name
            wrong = [result * (1 + 1e-3) for result in results]
            assert bench.accuracy.err(case, found, wrong, direction) > 1, case.name
        assert bench.accuracy.err(case, found, [result * math.nan for result in results], "bwd") == math.inf


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_our_calls_and_flex_attentions_mean_the_same_as_eager(bench):
    from torch.nn.attention.flex_attention import flex_attention

    ours = bench.our_peers.our_peer()
    for case in (c for suite in ("masks", "extras", "varlen") for c in bench.suites.cases_of(suite, small=True)):
        if case.dropout:
            continue
        x = bench.shapes.make_inputs(case, torch.float32, "cpu")
        x.query, x.key, x.value = x.query.detach(), x.key.detach(), x.value.detach()  # flex has no backward on a CPU
        x.mask = x.mask if x.mask is None else x.mask.detach()
        expected = bench.accuracy.eager_attention(case, x.query, x.key, x.value, x.mask, x.slopes)
        for out in (ours(case, x), bench.gpu_peers.flex_call(case, x, flex_attention)()):
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5, msg=case.name)


def test_the_grid_has_every_cell_once_and_the_columns_that_its_readers_need(bench, tmp_path):
    cells = []
    limits = bench.limits.Limits({"bf16": 700.0}, 4300.0)
    for case in bench.suites.cases_of("grid"):
        for direction in ("fwd", "bwd"):
            for peer, timing in {
                "torch-cudnn": bench.harness.Timing((2e-3, 3e-3, 2e-3)),
                "torch-math": bench.harness.Timing((), "OOM"),
                "flash_ext": bench.harness.Timing((1e-3,) * 3),
            }.items():
                check = bench.attention.Check({direction: 0.5}, 450.0, 200.0)
                cells.append(bench.attention.Cell(peer, case, torch.bfloat16, direction, timing, check, limits))
    bench.tables.write_csv(tmp_path / "grid.csv", [cell.row() for cell in cells], bench.harness.provenance("cpu"))
    rows = rows_of(tmp_path / "grid.csv")
    assert ",".join(list(rows[0])[:15]) == COLUMNS
    ours = [row for row in rows if row["peer"] == "flash_ext"]
    assert len({(row["pass"], row["D"], row["causal"], row["Sq"]) for row in ours}) == len(ours) == 72
    assert {int(row["B"]) * int(row["Sq"]) for row in ours} == {16384}
    assert all(row["ms"] == "1.0000" and float(row["err"]) <= 1 and row["suite"] == "grid" for row in ours)
    first = ours[0]
    flop = 4 * 32 * 32 * 512 * 512 * 64
    assert float(first["tflops"]) == pytest.approx(flop / 1e9, rel=1e-3)
    assert (first["limit_gbs"], first["peak_mib"]) == ("4300", "450.0")
    assert float(first["percent_of_limit"]) == pytest.approx(100 * max(flop / 1e9 / 700, 268.4 / 4300), rel=1e-2)
    assert {(row["ms"], row["tflops"], row["reason"]) for row in rows if row["peer"] == "torch-math"} == {
        ("OOM", "", "OOM")
    }
    peers = ["torch-cudnn", "torch-math", "flash_ext"]
    assert bench.gpu_tables.to_best(cells[:3]) == 2
    assert bench.gpu_tables.gpu_table(cells, peers).row_count == 72
    assert bench.gpu_tables.gpu_summary(cells, peers).row_count == 6
    assert bench.gpu_tables.refusals(cells)[0].startswith("torch-math: OOM [16x16x1024x128;")


def test_a_table_is_the_same_in_markdown_and_latex(bench):
    table = bench.tables.make_table("a|b", right=["torch-\nflash"], title="50% of it")
    table.add_row("x_1", "[red]0.5[/]", end_section=True)
    table.add_row("y")
    expected = ["| a\\|b | torch-flash |", "|---|--:|", "| x_1 | 0.5 |", "| y |  |"]
    assert bench.tables.markdown(table).splitlines() == expected
    latex = bench.tables.latex(table)
    assert "\\caption{50\\% of it}" in latex
    assert "\\begin{tabular}{lr}" in latex
    assert "x\\_1 & 0.5 \\\\" in latex


def test_the_provenance_names_everything_that_a_figure_depends_on(bench):
    origin = bench.harness.provenance("cpu")
    names = "commit dirty library torch python cuda cudnn driver cpu gpu threads command".split()
    assert list(origin) == names
    assert origin["library"] == bench.harness.library_hash() != ""
    assert bench.harness.device_slug({**origin, "gpu": "NVIDIA H200"}) == "nvidia-h200"
    assert bench.harness.device_slug({**origin, "cpu": "AMD EPYC", "threads": "2"}) == "amd-epyc-2-threads"


def test_the_calls_of_a_cell_can_be_fixed(bench):
    count = {"a": 0, "b": 0}

    def call(name):
        count[name] += 1

    timings = bench.harness.interleave(
        {name: lambda name=name: call(name) for name in count}, "cpu", rounds=5, budget_s=1e-9, total_calls=10
    )
    assert count == {"a": 12, "b": 12}  # two warm-ups each
    assert all(len(timing.samples) == 5 and timing.calls == 2 for timing in timings.values())


def test_rounds_rotate_the_order_and_a_failing_peer_is_a_row(bench):
    order = []

    def failing():
        raise RuntimeError("head_dim 7 is refused\nand more")

    peers = {"a": lambda: order.append("a"), "b": lambda: order.append("b"), "c": failing}
    timings = bench.harness.interleave(peers, "cpu", rounds=2, sample_s=0.0)
    assert order == ["a", "a", "b", "b", "a", "b", "b", "a"]  # two warm-ups each, then the rounds
    assert [len(t.samples) for t in timings.values()] == [2, 2, 0]
    assert timings["c"].failure == "head_dim 7 is refused"
    assert math.isnan(timings["c"].median)


# ---- the commands ----


@pytest.mark.parametrize("name", ["train_lm", "attention", "report", "sweep"])
def test_help(bench, monkeypatch, capsys, name):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        getattr(bench, name).main()
    told = capsys.readouterr().out
    assert ("--page FILE" if name == "report" else "--out DIR") in told
    assert f"python benchmarks/{name}.py" in told


def test_train_lm_compares_two_attentions(tmp_path):
    small = ("--device", "cpu", "--steps", 3, "--batch", 2, "--context", 24)
    done = start("train_lm.py", "--compare", "sdpa", "naive", *small, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "max |difference|" in done.stdout
    assert "sdpa      3/3" in done.stderr
    rows = rows_of(tmp_path / "train_lm.csv")
    assert [(row["attention"], row["step"]) for row in rows] == [
        (a, str(s)) for a in ("sdpa", "naive") for s in (1, 2, 3)
    ]
    losses = [float(row["loss"]) for row in rows]
    assert losses[:3] == pytest.approx(losses[3:], abs=1e-3)
    assert losses[2] < losses[0]
    assert {"commit", "dirty", "torch", "cpu", "command"} <= rows[0].keys()
    assert (tmp_path / "train_lm.png").stat().st_size > 5000


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_train_lm_with_flash_ext_follows_sdpa_in_every_precision(tmp_path, precision):
    small = ("--device", "cpu", "--steps", 3, "--batch", 2, "--context", 24, "--no-sample", "--precision", precision)
    done = start("train_lm.py", "--compare", *small, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(row["loss"]) for row in rows_of(tmp_path / "train_lm.csv")]
    assert losses[:3] == pytest.approx(losses[3:], abs=1e-3 if precision == "fp32" else 0.05)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--size", "huge"), "invalid choice: 'huge'"),
        (("--steps", "0"), "not a whole number of at least 1"),
        (("--lr", "-1"), "--lr -1.0 must be a number above 0"),
        (("--data", "no/such/file"), "--data no/such/file cannot be read: No such file or directory."),
        (("--data", "."), "--data . cannot be read: Is a directory."),
        (("--data", "binary"), "--data binary is not UTF-8 text: byte 2 is wrong."),
        (("--data", "short", "--context", "100"), "--context 100 is too long for short of 1,000 bytes"),
        (("--compare", "sdpa", "sdpa"), "--compare takes two different names"),
        (("--compare", "sdpa", "other"), "--compare takes two different names"),
        (("--context", "16,32"), "--context 16,32: training takes one value; lists are for measuring, with --mode."),
        (("--mode", "backward"), "invalid choice: 'backward' (choose from forward, forward-backward, train-step)"),
        (("--warmup", "1,x"), "'x' is not a whole number of at least 0"),
        (("--time-budget", "0"), "'0' is not a number above 0"),
        (("--nvtx", "--data", "book"), "--data is for training, but --nvtx asks for measuring."),
        (("--memory-snapshot", "s.pickle"), "--memory-snapshot records what a GPU allocates, and this run is on a CPU"),
        (("--torch-profiler", "no/t.json"), "--torch-profiler no/t.json: there is no folder no."),
        (("--torch-profiler", "t", "--context", "8,16"), "--torch-profiler writes one file, but the lists ask for 2"),
    ],
)
def test_train_lm_tells_bad_arguments_in_one_sentence(bench, monkeypatch, capsys, tmp_path, arguments, words):
    (tmp_path / "binary").write_bytes(b"ok\xff" * 500)
    (tmp_path / "short").write_text("x" * 1000)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["train_lm.py", "--attention", "sdpa", "--device", "cpu", "--out", ".", *arguments]
    )
    with pytest.raises(SystemExit, match="2"):
        bench.harness.run_main(bench.train_lm.main)
    assert words in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--data", "."), "--data . cannot be read: Is a directory."),
        (
            ("--size", "huge"),
            "Error parsing --size: invalid choice: 'huge' (choose from tiny, small, medium, large, xl, 10B)",
        ),
        (("--device", "tpu"), "invalid choice 'tpu' for argument '--device'. Expected one of ('auto', 'cpu', 'cuda')."),
        (("--steps",), "Missing value for argument '--steps'. Expected 1 values."),
        (("--nobody", "1"), "Unrecognized options: --nobody, 1"),
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(tmp_path, arguments, sentence):
    done = start("train_lm.py", "--out", tmp_path / "out", *arguments)
    assert (done.returncode, done.stderr) == (2, f"train_lm.py: {sentence}\n")


def test_attention_prints_a_table_and_writes_the_grid_columns(tmp_path):
    chosen = ("--quick", "--dtypes", "fp32", "--case", "GQA", "--peers", "torch", "eager", "--out", tmp_path)
    done = start("attention.py", "--suite", "cpu", *chosen)
    assert done.returncode == 0, done.stderr
    assert "GQA 4/1" in done.stdout
    assert "Host time of one call" in done.stdout
    for name in ("attention_cpu", "host_overhead"):
        assert all((tmp_path / f"{name}{kind}").stat().st_size > 100 for kind in (".csv", ".md", ".tex", ".png"))
    rows = rows_of(tmp_path / "attention_cpu.csv")
    assert ",".join(list(rows[0])[:15]) == COLUMNS
    assert [(row["peer"], row["pass"]) for row in rows] == [(p, d) for d in ("fwd", "bwd") for p in ("torch", "eager")]
    assert all(float(row["ms"]) > 0 and float(row["err"]) <= 1 for row in rows)
    assert {row["peer"] for row in rows_of(tmp_path / "host_overhead.csv")} == {"aten op", "F.sdpa"}


def test_attention_names_the_cases_when_none_fits():
    done = start("attention.py", "--case", "nothing like this")
    assert done.returncode == 2
    assert "4x12x512x64" in done.stderr


def test_a_suite_for_gpus_runs_on_a_cpu_when_asked_within_its_budget(tmp_path):
    chosen = ("--device", "cpu", "--quick", "--dtypes", "fp32", "--peers", "torch", "eager", "flash_ext")
    budget = ("--only", "ALiBi|dropout|softcap", "--time-budget", "0.001", "--backend", "cpu")
    done = start("attention.py", "--suite", "masks", *chosen, *budget, "--out", tmp_path / "some.csv")
    assert done.returncode == 0, done.stderr
    assert "The time budget of 0.001 s is used up: 2 of 3 cases were not measured: fp32" in done.stderr
    assert f"Written to {tmp_path}: some.csv, some.md, some.tex, some.png" in done.stdout
    rows = rows_of(tmp_path / "some.csv")
    assert [row["name"] for row in rows] == ["1x4x256x128 dropout 0.1"] * 6
    assert all(float(row["ms"]) > 0 for row in rows)


@pytest.mark.parametrize(("suite", "passes"), [("deterministic", ["bwd"]), ("invariant", ["fwd", "bwd"])])
def test_what_the_same_bits_cost(tmp_path, suite, passes):
    chosen = ("--device", "cpu", "--quick", "--dtypes", "fp32", "--peers", f"flash_ext-{suite}", "flash_ext")
    done = start("attention.py", "--suite", suite, *chosen, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / f"attention_{suite}.csv")
    assert {row["peer"] for row in rows} == {f"flash_ext-{suite}", "flash_ext"}
    assert {row["pass"] for row in rows} == set(passes) and len(rows) % (2 * len(passes)) == 0
    assert all(float(row["ms"]) > 0 and float(row["err"] or 0) <= 1 for row in rows)


@pytest.mark.parametrize(
    ("suite", "case", "passes"),
    [("scaling", "8x1x256x16", ["fwd", "bwd"]), ("flash", "x128x16", ["fwd", "bwd", "e2e"])],
)
def test_suites_of_the_profiling_workflow_run_on_a_cpu(bench, monkeypatch, capsys, tmp_path, suite, case, passes):
    chosen = ("--peers", "eager", "torch", "flash_ext", "--dtypes", "fp32", "--calls", "2", "--device", "cpu")
    monkeypatch.setattr(
        sys, "argv", ["attention.py", "--suite", suite, "--case", case, *chosen, "--out", str(tmp_path)]
    )
    bench.attention.main()
    rows = rows_of(tmp_path / f"attention_{suite}.csv")
    assert [row["pass"] for row in rows] == [name for name in passes for _ in range(3)]
    assert all(float(row["ms"]) > 0 and row["calls"] == "2" and float(row["err"]) <= 1 for row in rows)
    shown = capsys.readouterr().out
    assert case in shown
    assert ("before" in shown) == (suite == "scaling")
    assert (tmp_path / f"attention_{suite}.png").stat().st_size > 5000


def test_a_cpu_gets_the_small_cases_and_the_peers_that_run_there(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = bench.attention.parse(["--suite", "scaling"])
    assert (args.device, args.peers) == ("cpu", ["eager", "compiled-eager", "torch", "flash_ext"])
    assert {case.sq for case in args.cases} == {256, 1024}
    assert bench.attention.parse(["--suite", "flash"]).peers == ["torch", "flash_ext"]
    assert len(bench.suites.cases_of("scaling")) == 20
    assert bench.suites.SUITES["scaling"].calls == 100


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--calls", "0"), "--calls 0 must be above 0."),
        (("--only", "("), "--only '(' is not a regular expression"),
        (("--only", "nothing"), "--only 'nothing' fits none of: 4x12x512x64;"),
        (("--backend", "cpu", "--peers", "torch", "eager"), "--backend cpu is flash_ext's, which is not among"),
        (("--time-budget", "0"), "--time-budget 0.0 must be above 0."),
        (("--rounds", "0"), "--rounds 0 must be above 0."),
        (("--backend", "nobody", "--suite", "extras", "--device", "cpu"), "nobody"),
    ],
)
def test_attention_tells_bad_arguments_in_one_sentence(bench, monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(sys, "argv", ["attention.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        bench.harness.run_main(bench.attention.main)
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_a_suite_for_gpus_says_that_it_needs_one(bench, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["attention.py", "--suite", "grid"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        bench.harness.run_main(bench.attention.main)
    assert capsys.readouterr().err == "attention.py: --suite grid needs a CUDA GPU, and PyTorch sees none here.\n"


@pytest.mark.gpu
def test_the_grid_runs_on_a_gpu(tmp_path):
    done = start("attention.py", "--suite", "grid", "--quick", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "attention_grid.csv")
    ours = [row for row in rows if row["peer"] == "flash_ext"]
    assert {(row["causal"], row["pass"]) for row in ours} == {(c, d) for c in "01" for d in ("fwd", "bwd")}
    assert all(float(row["ms"]) > 0 and float(row["err"]) <= 1 and float(row["peak_mib"]) > 0 for row in ours)
    assert all(row["gpu"] and row["driver"] and float(row["limit_gbs"]) > 0 for row in rows)
