"""Tables and pictures of the benchmarks from made-up records, and what happens without a GPU or without records."""

import json
import math

import pytest
import torch
from PIL import Image
from rich.console import Console

from examples.benchmarks import (
    activations,
    attention,
    bound,
    formats,
    kernels,
    norms,
    plots,
    summaries,
    tables,
    tune_formats,
)
from tests.examples.study_records import study_record

ENVIRONMENT = {"gpu": "GPU", "torch": "2", "triton": "3", "command": "python made_up.py", "elapsed_s": 61.2}
CASES = [[2, 4, 64, 128], [8, 16, 32, 64]]


def kernel_record(case, dtype, block_size, sparsity):
    """Return a record in which gathering takes 40 us at b = 32 and s = 0.6, unpacking 80, and dense 60 or 120."""
    gather = 100 * (1 - sparsity) * 32 / block_size
    backend = "gather" if block_size >= 32 else "unpack"
    times = {"gather_us": gather, "unpack_us": 80.0, "dense_us": 60.0 * (1 + CASES.index(case)), "copy_us": 5.0}
    ours = {"ours_us": times[f"{backend}_us"], "backend": backend, "pack_us": 12.0}
    head = {"case": case, "dtype": dtype, "block_size": block_size, "sparsity": sparsity}
    return {**head, **times, **ours, **ENVIRONMENT}


@pytest.fixture
def records():
    settings = [(16, 0.6), (32, 0.9), (32, 0.6)]
    return [kernel_record(case, dtype, *s) for dtype in ("bfloat16", "float32") for case in CASES for s in settings]


def step_record(method, mode, milliseconds):
    head = {"model": "net", "batch": 8, "precision": "32-true", "mode": mode, "method": method}
    memory = {"activations_mib": 10.0 * milliseconds, "peak_mib": 20.0 * milliseconds}
    return {**head, **memory, "ms_median": milliseconds, **ENVIRONMENT}


def test_weight_gradient_is_averaged_over_the_cases(records):
    summary = summaries.weight_gradient(records)
    assert len(summary.rows) == 6
    gathered, unpacked = summary.rows[2], summary.rows[0]
    mean = math.sqrt(60 / 40 * 120 / 40)
    assert gathered == ["bfloat16", "32", "0.6", f"{mean:.2f}", "1.50", "1.00", "gather 2"]
    assert unpacked[3:] == [f"{math.sqrt(60 / 80 * 120 / 80):.2f}", "0.75", "1.00", "unpack 2"]


def test_picks_are_compared_with_the_better_method(records):
    for record in records:
        if record["sparsity"] == 0.9:
            record |= {"backend": "unpack", "ours_us": record["unpack_us"]}
    first = summaries.by_case(records).rows[0]
    assert first == ["bfloat16", "(2, 4, 64) → 128", "60.0", "0.75 - 1.50", "8.00", "2 of 3"]


def test_pack_is_shown_at_one_setting(records):
    assert summaries.pack(records).rows[3] == ["float32", "(8, 16, 32) → 64", "5.0", "12.0", "+140 %"]
    assert summaries.pack(records[:1]).rows == []


def test_report_prints_the_tables_there_are_figures_for(records, capsys):
    kernels.report(records[:1], Console(width=140))
    printed = capsys.readouterr().out
    assert "geometric mean" in printed
    assert "within 10% of best" in printed
    assert "Pack" not in printed


def test_steps_are_one_row_per_model_and_mode():
    eager = [
        step_record(*r) for r in (("dense", "eager", 10.0), ("checkpoint", "eager", 14.0), ("pruned", "eager", 11))
    ]
    compiled = [step_record("dense", "compile", 8.0), step_record("pruned", "compile", 10.0)]
    rows = summaries.steps(eager + compiled).rows
    name = "net, 8 images, 32-true"
    assert rows[0] == [name, "eager", "10.00", "14.00 (+40 %)", "11.00 (+10 %)", "100 / 140 / 110", "200 / 280 / 220"]
    assert rows[1] == [name, "compile", "8.00", "-", "10.00 (+25 %)", "80 / - / 100", "160 / - / 200"]


def test_readme_table_has_sparsities_across(records):
    text = tables.kernels(records)
    assert "| weight gradient | s = 0.6 | s = 0.9 |" in text
    assert "| bfloat16, b = 16 | -6 % (+33 %) | - |" in text
    assert "took 61 s" in text
    assert "](kernels_float32.png)" in text
    merged = [*records, {**records[0], "command": "python another.py"}]
    assert "took" not in tables.kernels(merged)


def test_sections_without_figures_are_left_alone(tmp_path):
    pages = tables.pages()
    assert tables.rendered(pages, results=tmp_path) == pages


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("", "0 markers for the table 'memory'"),
        ("{0}\n{0}", "2 markers for"),
        ("{0}<!-- table: new -->", "table 'new'"),
    ],
)
def test_each_table_has_one_place(tmp_path, changed, message):
    pages = tables.pages()
    path = next(path for path, text in pages.items() if "<!-- table: memory -->" in text)
    with pytest.raises(ValueError, match=message):
        tables.rendered(
            {**pages, path: changed.format(pages[path]) or pages[path].replace("table: memory", "-")}, tmp_path
        )


def test_check_says_which_page_is_not_what_the_figures_say(monkeypatch, capsys):
    pages = tables.pages()
    monkeypatch.setattr("sys.argv", ["tables.py", "--check"])
    assert tables.main() == 0
    monkeypatch.setattr(
        tables, "pages", lambda: {**pages, tables.README: pages[tables.README].replace("8273 MiB", "1 MiB")}
    )
    assert tables.main() == 1
    assert capsys.readouterr().err == "README.md is not what the figures say.\n"


def test_headline_is_in_percent_of_dense_with_the_accuracy_that_there_is():
    step = {"batch": 8, "gpu": "GPU", "activations_mib": 100.4, "peak_mib": 200.0, "step_ms": 10.0}
    steps = [{**step, "model": model, "method": "dense"} for model in tables.HEADLINE]
    for model in tables.HEADLINE:
        steps.append({**step, "model": model, "method": "checkpoint", "activations_mib": 10.0, "step_ms": 13.0})
        steps.append({**step, "model": model, "method": "max", "peak_mib": 90.0, "step_ms": 10.04})
    for r in steps:
        r["step_ms_rounds"] = [9.0, 11.08] if r["method"] == "max" else [r["step_ms"]]
    runs = list(enumerate([70.0, 71.0, 72.0]))
    trainings = [
        study_record((name,), seed, score - (lost if bits < 16 else 0.0), bits_per_value=bits, **more)
        for lost, more in ((1.0, {"task": "gpt", "depth": 12}), (0.5, {"task": "vit", "epochs": 90}))
        for name, bits in (("dense", 16.0), ("preset:max", 2.0))
        for seed, score in runs
    ]
    built = [{"model": name, "method": "dense", "step_ms": 5.0} for name in list(tables.HEADLINE)[:2]]
    built += [{**r, "method": method, "step_ms": ms} for r in built for method, ms in (("max", 5.5), ("checkpoint", 6))]
    lines = tables.headline(steps, built[:-1], trainings).splitlines()
    memory = "100 MiB: **0 %** (-90 %) | 200 MiB: **-55 %** (0 %)"
    times = "**-10 to 0 %** (+30 %) | **+10 %** (+20 %)"
    assert lines[2] == f"| ViT-B/16, batch 8 | {memory} | {times} | -0.50 ± 0.82 points |"
    assert lines[3].endswith("| **+10 %** | +1.0000 ± 0.8165 validation loss |")
    assert all(line.endswith("| not measured | not measured |") for line in lines[4:7])
    assert "(net, 90 epochs, 3 seeds; net, depth 12, 2 epochs, 3 seeds)" in " ".join(lines)
    assert "of the median of up to 2." in " ".join(lines)
    first, _, *others = tables.brief(steps, trainings).splitlines()[2:7]
    cells = "**0 %**<br>(-90 %) | **-55 %**<br>(0 %) | **-10 to 0 %**<br>(+30 %)"
    assert first == f"| ViT-B/16 | {cells} | -0.50 ± 0.82 points |"
    assert all(row.endswith("| not measured |") for row in others)


@pytest.mark.parametrize(
    ("cells", "right"),
    [
        (["1.5", "-", "+3 %", "-12 %", "", "**-7 %**<br>(+2 %)", "12 of 37"], True),
        (["dense", "1.5"], False),
        (["0", "12 layers, which something else keeps for backward anyway"], False),
    ],
)
def test_figures_stand_to_the_right_and_words_to_the_left(cells, right):
    table = tables.markdown(["name", "what"], [["-", cell] for cell in cells])
    assert table.splitlines()[1] == ("| :-- | --: |" if right else "| :-- | :-- |")


def test_percentages_say_more_or_less():
    assert [summaries.percent(ratio) for ratio in (0.364, 0.998, 1.0, 1.004, 1.27, 4)] == [
        "-64 %",
        "0 %",
        "0 %",
        "0 %",
        "+27 %",
        "+300 %",
    ]


def test_names_that_begin_several_rows_get_one_of_their_own():
    summary = summaries.Summary("", ("model", "method", "ms"), [["a", "x", "1"], ["a", "y", "2"], ["b", "x", "3"]])
    found = tables.grouped(summary)
    assert found.header == ("method", "ms")
    assert found.rows == [["**a**", ""], ["x", "1"], ["y", "2"], ["**b**", ""], ["x", "3"]]


def test_brackets_of_wide_tables_get_a_line_of_their_own():
    assert tables.narrowed([["`max` (new)", "0.5 ± 0.1 (+0.2 ± 0.1)", "f(x)"]]) == [
        ["`max` (new)", "0.5 ± 0.1<br>(+0.2 ± 0.1)", "f(x)"]
    ]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_are_written_per_dtype(records, tmp_path, suffix):
    pytest.importorskip("matplotlib", reason="only pictures need it")
    paths = plots.write_pictures(records, tmp_path / "new" / f"kernels.{suffix}")
    assert [path.name for path in paths] == [f"kernels_bfloat16.{suffix}", f"kernels_float32.{suffix}"]
    assert all(1000 < path.stat().st_size < 200_000 for path in paths)
    if suffix == "png":
        width, height = Image.open(paths[0]).size
        assert width > height > 400


def test_throughput_counts_the_dense_operations():
    assert plots.tflops((64, 196, 768, 3072), 100.0) == pytest.approx(2 * 64 * 196 * 768 * 3072 / 100e-6 / 1e12)


def test_command_measures_writes_and_draws(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="only pictures need it")
    case = (2, 8, 64, 16)
    pairs = [(torch.randn(case[:3]), torch.randn(16, case[3])) for _ in range(2)]
    monkeypatch.setattr(kernels, "CASES", [case])
    monkeypatch.setattr(kernels, "require_gpu", lambda: None)
    monkeypatch.setattr(kernels, "inputs", lambda case, dtype: pairs)
    monkeypatch.setattr(kernels, "gpu_us", lambda calls, repeats=3: [call() for call in calls] and 10.0)
    monkeypatch.chdir(tmp_path)
    kernels.main(["--dtypes", "float32", "--blocks", "16", "32", "--sparsities", "0.5", "0.6"])
    records = json.loads((tmp_path / "kernels.json").read_text())
    assert [(r["block_size"], r["sparsity"]) for r in records] == [(16, 0.5), (16, 0.6), (32, 0.5), (32, 0.6)]
    measured = {"dense_us", "ours_us", "gather_us", "unpack_us", "pack_us", "copy_us", "backend", "elapsed_s"}
    assert all(measured | {"case", "dtype", "gpu", "torch", "triton", "command"} <= r.keys() for r in records)
    assert (tmp_path / "kernels_float32.png").is_file()
    assert "Pack at b = 32, s = 0.6" in capsys.readouterr().out


def test_formats_and_selections_are_measured_beside_unquantised_blocks(monkeypatch, tmp_path, capsys):
    case = (2, 8, 64, 16)
    pairs = [(torch.randn(case[:3]), torch.randn(16, case[3])) for _ in range(2)]
    times = iter(range(10, 1000))
    monkeypatch.setattr(formats, "CASES", [case])
    monkeypatch.setattr(formats, "require_gpu", lambda: None)
    monkeypatch.setattr(formats, "inputs", lambda case, dtype: pairs)
    monkeypatch.setattr(formats, "gpu_us", lambda calls: [call() for call in calls] and float(next(times)))
    out = tmp_path / "formats.json"
    formats.main(["--cases", "0", "--sparsities", "0.5", "--out", str(out)])
    records = json.loads(out.read_text())
    names = ["same", "int8", "int4", "int3", "int2", "swap", "unbiased"]
    assert [formats.name_of(record) for record in records] == names
    assert [record["pack_us"] for record in records] == list(range(10, 24, 2))
    sizes = {formats.name_of(record): record["stored_bytes"] for record in records}
    assert sizes["same"] == sizes["swap"] > sizes["int8"] > sizes["int4"] > sizes["int3"] > sizes["int2"]
    shown = formats.summary(records, "pack_us", "")
    assert shown.rows[0][1:3] == ["10.0", "12.0 (1.20)"]
    capsys.readouterr()


def test_activation_functions_are_measured_beside_those_of_torch(monkeypatch, tmp_path, capsys):
    times = iter(range(10, 1000))
    monkeypatch.setattr(activations, "SHAPES", [(4, 100)])
    monkeypatch.setattr(activations, "require_gpu", lambda: None)
    monkeypatch.setattr(activations, "inputs", lambda shape, dtype: [torch.randn(2, *shape).unbind() for _ in range(2)])
    monkeypatch.setattr(activations, "gpu_us", lambda calls: [call() for call in calls] and float(next(times)))
    out = tmp_path / "activations.json"
    activations.main(["--shapes", "0", "--dtypes", "float32", "--functions", "silu", "relu", "--out", str(out)])
    records = json.loads(out.read_text())
    assert [r["kept_bytes"] for r in records] == [4, 1.005, 0.505, 0.38, 0.255, 4, 0.125]
    shown = activations.summary(records, "backward_us", "").rows
    assert shown[0][1:4] == ["11.0 (1.00)", "13.0 (1.18)", "15.0 (1.36)"]
    assert shown[1][1:4] == ["21.0 (1.00)", "-", "23.0 (1.10)"]
    capsys.readouterr()


def test_norms_are_measured_beside_those_of_torch(monkeypatch, tmp_path, capsys):
    cases, times = [("layer_norm", 8, 64, "float32"), ("layer_norm", 8, 64, "bfloat16")], iter(range(10, 1000))

    def inputs(case):
        x, grad_y = torch.randn(2, 8, 64, dtype=getattr(torch, case[3]))
        weight, bias = torch.ones(2, 64, dtype=x.dtype)
        return [x], [grad_y], (weight, bias)

    for name, stand_in in (
        ("CASES", cases),
        ("require_gpu", lambda: None),
        ("inputs", inputs),
        ("host_us", lambda case, value_format: 1.0),
        ("gpu_us", lambda calls: [call() for call in calls] and float(next(times))),
    ):
        monkeypatch.setattr(norms, name, stand_in)
    norms.main(["--cases", "0", "1", "--out", str(tmp_path / "norms.json")])
    records = json.loads((tmp_path / "norms.json").read_text())
    assert [r["value_format"] for r in records] == list(norms.FORMATS) * 2
    assert [r["kept_bytes"] for r in records[:4]] == [2112, 8 * 68 + 32, 8 * 36 + 32, 8 * 20 + 32]
    assert [r["forward_us"] for r in records] == list(range(10, 26, 2))
    assert "11.0 (1.00)" in capsys.readouterr().out


@pytest.mark.parametrize("benchmark", [kernels, bound], ids=["kernels", "bound"])
def test_a_machine_without_a_gpu_gets_a_hint(benchmark, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    for version, hint in (
        (None, "built without CUDA; https://pytorch.org/get-started"),
        ("13.0", "check `nvidia-smi`"),
    ):
        monkeypatch.setattr(torch.version, "cuda", version)
        with pytest.raises(SystemExit, match="needs an NVIDIA GPU, and torch finds none") as error:
            benchmark.main([])
        assert hint in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_an_old_gpu_gets_a_hint(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Turing")
    with pytest.raises(SystemExit, match=r"8\.0 \(Ampere\) or newer; Turing has 7\.5"):
        kernels.main([])


@pytest.mark.slow
def test_sweep_of_formats_measures_every_candidate_beside_values_as_they_are(monkeypatch, tmp_path, capsys):
    """On the CPU, in fp32: the interpreter cuts 16-bit values off."""
    monkeypatch.setattr(tune_formats, "CASES", [(2, 9, 80, 16)])
    monkeypatch.setattr(tune_formats, "DTYPE", torch.float32)
    monkeypatch.setattr(tune_formats, "ROTATED_BYTES", 1)
    monkeypatch.setattr(tune_formats, "require_gpu", lambda: None)
    monkeypatch.setattr(tune_formats, "gpu_us", lambda calls, **_: [call() for call in calls] and 10.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    turns = [tune_formats.Turns(4, 1, 2), tune_formats.Turns(16, 2, 1)]
    monkeypatch.setattr(tune_formats, "candidates", lambda block_size, sparsity: turns)
    out = tmp_path / "tune_formats.json"
    options = ["--blocks", "16", "--sparsities", "0.6", "--formats", "int4", "int2", "--workers", "0"]
    tune_formats.main([*options, "--out", str(out)])
    records = json.loads(out.read_text())
    assert [r["value_format"] for r in records] == ["same", "int4", "int4", "int2", "int2"]
    assert [(r["tile"], r["warps"], r["parts"]) for r in records[1:]] == [*turns, *turns]
    assert all(r["right"] for r in records[1:])
    assert "best: pack_us 10.0 (1.00) with (4, 1, 2)" in capsys.readouterr().out


def test_sweep_of_formats_leaves_no_program_without_blocks():
    for block_size, sparsity in ((16, 0.1), (32, 0.6), (64, 0.9), (256, 0.5)):
        found = tune_formats.candidates(block_size, sparsity)
        assert found
        for tile, _, parts in found:
            assert tile * parts <= 128
            assert (parts - 1) * tile < 128 * (1 - sparsity) <= 4 * tile * parts


def test_attentions_gradients_are_compared_with_exact_ones(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(attention, "CASES", [("small", 2, 2, 16, 32, True)])
    monkeypatch.setattr(attention, "LOGIT_STDS", (1.0,))
    attention.main(["--out", str(tmp_path / "attention.json")])
    records = json.loads((tmp_path / "attention.json").read_text())
    errors = {(r["value_format"], r["stored"]): r["error"] for r in records}
    stored = {(bits, ", ".join(names)) for bits, several in attention.STORED.items() for names in several}
    assert set(errors) == {("dense", ""), *stored}
    (eight,) = (error for (bits, _), error in errors.items() if bits == "int8")
    assert errors["dense", ""] < eight < errors["int4", "value"] < errors["int3", "value"] < 0.5
    assert "int4 of query, key" in capsys.readouterr().out
