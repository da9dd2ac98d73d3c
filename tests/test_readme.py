"""What the README says is run: its Python, its commands; its figures are those of the records."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean

import pytest
from torch import nn

from examples.benchmarks import tables, trainings_page
from examples.benchmarks.study import evidence, results
from examples.benchmarks.summaries import groups, quickest
from tests.support.helpers import assert_plain
from tests.support.markdown import code_blocks

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PROSE = " ".join(re.sub(r"```.*?```", "", README, flags=re.DOTALL).split())


def blocks(language):
    return code_blocks(README, language)


def test_it_is_short():
    assert len(README.splitlines()) <= 200


def test_the_first_screen_has_the_line_to_add_and_what_it_saves():
    line, *_ = blocks("python")
    assert line.endswith('trainer = L.Trainer(callbacks=[ActivationPruning("max"), ActivationMemoryMonitor()])\n')
    head = README[: README.index("<!-- end table -->")].splitlines()
    assert len(head) < 36
    assert sum(row.startswith("| ") and "MiB" in row for row in head) == 5


def test_python_blocks_run_in_order_and_restore_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line, quickstart, plain, rules = blocks("python")
    namespace = {"__name__": "readme"}
    exec(compile(quickstart, "README.md", "exec"), namespace)
    model, pruning, monitor = (namespace[name] for name in ("model", "pruning", "monitor"))
    assert pruning.preset == "max"
    assert {"mlp.0", "mlp.1", "mlp.2", "mlp.3"} == {layer.fqn for layer in (*pruning.converted, *pruning.skipped)}
    assert {layer.operator for layer in pruning.converted} == {"norm", "linear", "activation"}
    assert monitor.report.saved_fraction > 0.5
    assert_plain(model)
    exec(compile(plain, "README.md", "exec"), namespace)
    assert {layer.fqn for layer in namespace["report"].converted} == {"0", "1", "2", "3"}
    assert [type(layer) for layer in namespace["network"]] == [nn.LayerNorm, nn.Linear, nn.GELU, nn.Linear]
    assert namespace["network"][1].weight.grad is not None
    exec(compile(rules, "README.md", "exec"), namespace)
    kept = {layer.fqn: layer.keep.bits for layer in namespace["pruning"].converted}
    assert (kept["mlp.0"], kept["mlp.1"]) == (8, 4)
    assert "mlp.3" not in kept
    assert_plain(model)
    exec(compile(line, "README.md", "exec"), namespace)
    assert [type(callback) for callback in namespace["trainer"].callbacks[:2]] == [type(pruning), type(monitor)]


def test_ci_runs_exactly_the_test_command():
    commands = [line for block in blocks("bash") for line in block.splitlines() if "pytest" in line]
    assert len(commands) == 1
    assert commands[0] in (ROOT / ".ci" / "run").read_text().splitlines()


def test_commands_name_files_that_exist():
    for block in blocks("bash"):
        for path in re.findall(r"examples/[\w/.]+", block):
            assert (ROOT / path).is_file()


def test_pictures_exist():
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", README)
    assert pictures
    for path in pictures:
        assert (ROOT / path).is_file()


def test_links_to_headings_lead_somewhere():
    headings = {re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in README.splitlines()}
    links = re.findall(r"\]\(#([^)]+)\)", README)
    assert links
    assert set(links) <= headings


@pytest.mark.parametrize("name", tables.TABLES)
def test_tables_are_generated_from_the_committed_figures(name):
    pages = tables.pages()
    (path,) = (path for path, text in pages.items() if f"<!-- table: {name} -->" in text)
    assert tables.rendered(pages)[path] == pages[path]


def test_figures_in_the_text_are_those_of_the_records():
    found = {(r["model"], r["method"]): r for r in tables.load("rivals")}
    median = {case: r["step_ms"] for case, r in found.items()}
    quick = {case: quickest(r) for case, r in found.items()}
    ours, theirs, by_median = (
        [100 * times[model, method] / times[model, "dense"] - 100 for model in tables.HEADLINE]
        for times, method in ((quick, "max"), (quick, "checkpoint"), (median, "max"))
    )
    assert f"between {-min(ours):.0f} % less and {max(ours):.0f} % more time" in PROSE
    assert f"up to {max(by_median):.0f} % more by the median" in PROSE
    assert f"its eager steps took {min(theirs):.0f} % to {max(theirs):.0f} % more time" in PROSE

    built = {(r["model"], r["method"]): r["step_ms"] for r in tables.load("compiled")}
    ours, theirs = (
        [100 * built[name, kind] / built[name, "dense"] - 100 for name, kind in built if kind == method]
        for method in ("max", "checkpoint")
    )
    assert f"{min(ours):.0f} % to {max(ours):.0f} %; checkpointed {min(theirs):.0f} % and more" in PROSE

    steps = tables.load("others")
    slow = {(r["model"], r["side"], r["method"]): r["ms_median"] for r in tables.load("side_by_side") if "model" in r}
    more = [
        f"{100 * slow[name, 'new', 'pruned'] / slow[name, 'old', 'dense'] - 100:.0f} %"
        for name in ("resmlp_12_224", "resnet50", "GPT2LMHeadModel", "vit_base_patch16_224")
    ]
    text = "ResMLP-12 took {} more time than dense, ResNet-50 {}, GPT-2 at batch 8 {} and ViT-B/16 {}."
    assert text.format(*more) in PROSE
    graphs = {(r["model"], r["method"]): r["ms_median"] for r in steps if r["mode"] == "graph"}
    less = [
        f"{100 - 100 * graphs[name, 'max, others, graph'] / graphs[name, 'dense, graph']:.0f} %"
        for name in ("resmlp_12_224", "resnet50", "GPT2LMHeadModel")
    ]
    assert "ResMLP-12 takes {} less time than dense, ResNet-50 {} and GPT-2 {}".format(*less) in PROSE

    fits = {(r["model"], r["method"]): r for r in tables.load("rivals_largest") if r["cap_gib"] == 24}
    llama, models = "LlamaForCausalLM, 1.1B", {name for name, _ in fits}
    assert (len(models), fits[llama, "dense"]["batch"]) == (10, 1)
    batches, speeds = (
        {method: [times_dense(fits, name, method, figure) for name in names] for method in ("max", "checkpoint")}
        for figure, names in (("batch", models), ("samples_per_s", models - {llama}))
    )
    assert f'{min(batches["max"]):.1f} to {max(batches["max"]):.1f} times as large as dense with `"max"`' in PROSE
    assert min(speeds["max"]) > 0.995
    faster, by = (100 * times_dense(fits, llama, name, "samples_per_s") - 100 for name in ("max", "checkpoint"))
    assert f"0 to {100 * max(speeds['max']) - 100:.0f} % more samples a second" in PROSE
    assert f"(a Llama's, which is 1 dense, at {faster:.0f} %, checkpointed {by:.0f} %)" in PROSE
    fewer = [100 - 100 * speed for speed in speeds["checkpoint"]]
    times = f"{min(batches['checkpoint']):.1f} to {max(batches['checkpoint']):.1f} times"
    assert f"checkpointed {times}, with {min(fewer):.0f} to {max(fewer):.0f} % fewer" in PROSE
    kept = [found["vit_base_patch16_224", name]["activations_mib"] for name in ("recompute", "checkpoint")]
    assert f"[{100 * kept[0] / kept[1]:.0f} %](docs/benchmarks.md#through-a-trainer) of what that keeps" in README

    long = trainings_page.of_one_size(tables.load("long"), tables.load("larger"))
    trainings = trainings_page.of_images(trainings_page.from_scratch(long))
    found = {name: [evidence.of_preset(name, study)[1] for study in trainings] for name in ("max", "paper")}
    lost = evidence.together(found["max"]).shown(2).replace("-", "")
    worst = -min(finding.difference for finding in found["paper"])
    assert f'`"max"` is {lost} points below dense, and sparsity 0.6, the paper\'s, up to {worst:.2f}' in PROSE
    (classes,) = (study for study in results.studies(long) if study[0].get("turned"))
    assert f"with 80 classes {-evidence.findings(classes)['pruned, s = 0.6, b = 32'].difference:.2f};" in PROSE
    assert "lost 0.3 points at most" in PROSE
    tuned = [study for study in results.studies(long) if study[0].get("start")]
    assert {bool(study[0].get("lora")) for study in tuned} == {False, True}
    of_tuned = {(s[0]["task"], bool(s[0].get("lora"))): evidence.of_preset("max", s) for s in tuned}
    assert all(of_tuned["vit", lora][0].endswith("s = 0.5") for lora in (False, True))
    apart = {kind: finding for kind, (_, finding) in of_tuned.items()}
    assert all(abs(apart["vit", lora].difference) < apart["vit", lora].seen for lora in (False, True))
    assert "a fine-tuned ViT shows no difference, with `sparsity=0.5` besides." in PROSE
    assert apart["gpt", False].difference > apart["gpt", False].seen
    dense = [-run["accuracy"] for study in tuned for run in study if run["task"] == "gpt" and run["method"] == "dense"]
    fine = 100 * apart["gpt", False].difference / mean(dense)
    text = evidence.main_study("gpt", long)
    losses = {method: mean(-r["accuracy"] for r in runs) for (method,), runs in groups(text, "method").items()}
    more = {method.removeprefix("preset:"): 100 * loss / losses["dense"] - 100 for method, loss in losses.items()}
    assert f"{more['paper']:.1f} % with the paper's sparsity" in PROSE
    small = 100 * lost_by_a_longer_context() - 100
    assert f'{more["max"]:.1f} % higher with `"max"` (a small GPT\'s up to {small:.1f} %, fine-tuned' in PROSE
    assert f"fine-tuned {fine:.1f} %), 2.5 %" in PROSE
    assert f'if {more["max"]:.1f} to {small:.0f} % of loss counts, take `"balanced"`' in PROSE
    shown = {name: evidence.of_preset(name, text)[1] for name in ("max", "paper", "balanced", "recompute")}
    assert [name for name, found in shown.items() if abs(found.difference) > found.seen] == ["max", "paper"]
    assert all(abs(finding.difference) <= 0.3 for finding in found["max"])


def test_what_is_said_of_larger_models_is_what_the_records_say():
    sizes = tables.load("larger")
    ours = [size for size in sizes if size["setting"] == "preset:max"]
    wider, deeper = (
        min(size["size"] / size["dense_size"] for size in ours if size["axis"] == axis) for axis in ("dim", "depth")
    )
    assert f"one {wider:.1f} times as wide or {deeper:.1f} times as deep trains" in PROSE
    long, better = tables.load("long"), {}
    for dense, *larger in groups(sizes, "task").values():
        assert dense["setting"] == "dense"
        (trained,) = trainings_page.of_size(dense, long)
        better |= {
            (size["axis"], size["setting"]): size for size in larger if is_better(best(size, long), trained.ours)
        }
    assert better.keys() == {("context", "preset:balanced"), ("context", "preset:max")}
    longest = better["context", "preset:max"]
    times = longest["size"] / longest["dense_size"]
    assert f"it learns less, a GPT of {times:.1f} times the context more" in PROSE


def times_dense(found, model, method, figure):
    """Return how many times the dense model's a figure of a method is."""
    return found[model, method][figure] / found[model, "dense"][figure]


def lost_by_a_longer_context():
    """Return how many times the dense loss a small GPT with a longer context has with ``max``."""
    sizes = [size for size in tables.load("larger") if (size["axis"], size["setting"]) == ("context", "preset:max")]
    (trained,) = (each for size in sizes for each in trainings_page.of_size(size, tables.load("long")))
    ours, dense = (mean(run["accuracy"] for run in runs) for runs in (trained.ours, trained.dense))
    return ours / dense


def best(size, trainings):
    """Return the trainings of a size with the learning rate that is best for it."""
    runs = [each.ours for each in trainings_page.of_size(size, trainings) if each.ours]
    return max(runs, key=lambda of_rate: mean(run["accuracy"] for run in of_rate), default=[])


def is_better(ours, dense):
    """Return whether trainings are better than dense ones by so much that chance would seldom do it."""
    sign = results.score_of(dense[0]).sign
    return any(finding.difference * sign > finding.seen for finding in evidence.findings([*dense, *ours]).values())


def test_badges_say_what_the_package_needs():
    project = (ROOT / "pyproject.toml").read_text()
    badges = (ROOT / "docs" / "badges.svg").read_text()
    for name, bound in (("Python", 'requires-python = "'), ("PyTorch", '"torch'), ("Lightning", '"lightning')):
        least = re.search(rf"^ *{bound}>=([0-9.]+)", project, re.MULTILINE)[1]
        assert f"{name} {least}+" in badges
        assert f"{name} {least}+" in README
        assert f">{least}+</text>" in badges
    assert 'license = "Apache-2.0"' in project
    assert "licence Apache-2.0" in badges
