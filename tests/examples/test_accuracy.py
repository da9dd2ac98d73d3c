"""The accuracy study on tiny data on the CPU: what a run trains, what it records, and what an interruption leaves."""

import argparse
import json
import math
import shutil
import sys
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from PIL import Image

from examples.benchmarks import accuracy
from examples.benchmarks.study import results, settings, tasks, training
from examples.benchmarks.study.images import Images
from examples.benchmarks.study.settings import Setting, bits_of_all, parse_setting, prune
from examples.benchmarks.vocabulary import OTHERS, PRESETS
from examples.models import build_model
from lightning_actprune import convert, revert
from lightning_actprune.compiled.marks import Model
from lightning_actprune.operators import recompute
from lightning_actprune.operators.base import Converted
from tests.support.marks import needs_passes

SIZE = ["--dim", "32", "--depth", "1", "--epochs", "2", "--batch-size", "6", "--limit-batches", "3"]
RECIPE = ["--lr", "0.02", "--precision", "fp32", "--seeds", "0", "1"]
OPTIONS = {"resmlp": ["--patch-size", "2"], "vit": ["--patch-size", "2"], "resnet": [], "gpt": ["--context", "16"]}


@pytest.fixture(scope="session")
def source_folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    for name in ("one", "two"):
        (root / f"{name}.py").write_text(f"def {name}(x):\n    return x + 1\n" * 40)
    return root


@pytest.fixture
def study(image_folder, source_folder, tmp_path):
    """Run the study of a task with settings and more options."""

    def run(task, *more, runs=("dense", "0.5:8:same")):
        root = source_folder if task == "gpt" else image_folder
        command = ["--task", task, "--root", str(root), "--out", str(tmp_path / "accuracy.json")]
        return accuracy.main([*command, *SIZE, *RECIPE, *OPTIONS[task], *more, "--settings", *runs])

    return run


# Of the study as it was when its first records were made: final losses of dense and pruned with two seeds.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-3}
"""How products in 16 bits are rounded differs from torch 2.14 to 2.15, dense ones, too."""
BEFORE = {
    "fp32": [0.9492133458455404, 0.9524948596954346, 0.9293727080027262, 0.9385332266489664],
    "bf16": [0.9491587479909261, 0.9525732199350992, 0.9310600757598877, 0.9400317668914795],
}


@pytest.mark.parametrize("precision", BEFORE)
def test_resmlp_trains_as_it_always_did(study, precision):
    records = study("resmlp", "--depth", "2", "--precision", precision)
    assert [r["final_loss"] for r in records] == pytest.approx(BEFORE[precision], rel=TOLERANCE[precision])
    assert [r["accuracy"] for r in records] == [66.6667] * 4


@pytest.mark.parametrize("task", tasks.TASKS)
def test_every_task_records_what_it_did(study, task):
    records = study(task, runs=("dense", "0:8:same", "0.9:8:same"))
    runs = [(r["method"], r["sparsity"], r["block_size"], r["value_format"], r["seed"]) for r in records]
    expected = [("dense", None, None, None), ("pruned", 0.0, 8, "same"), ("pruned", 0.9, 8, "same")]
    assert runs == [(*setting, seed) for seed in (0, 1) for setting in expected]
    for r in records:
        assert (r["task"], r["model"], r["epochs"], r["batches"], r["batch"]) == (
            task,
            tasks.TASKS[task].model,
            2,
            3,
            6,
        )
        assert r["losses"] == pytest.approx([r["losses"][0], r["final_loss"]], abs=1e-5)
        assert {"dataset", "seconds", "gpu", "torch", "triton", "command"} <= r.keys()
        assert math.isfinite(r["accuracy"])
    dense, kept_all, pruned = records[:3]
    assert kept_all["losses"] == pytest.approx(dense["losses"], rel=1e-5)
    assert pruned["losses"] != pytest.approx(dense["losses"], rel=1e-3)
    assert (dense["bits_per_value"], kept_all["bits_per_value"]) == (32, 32)
    assert 0.1 * 32 < pruned["bits_per_value"] < 0.2 * 32
    # The attention keeps its output, which is the input of its projection.
    assert pruned["left_dense"] == (["attn.proj"] if task in ("vit", "gpt") else [])
    assert dense["left_dense"] == []


def test_plain_settings_prune_the_convolutions_of_a_resnet_and_others_the_rest_too(study, monkeypatch):
    reports = []
    monkeypatch.setattr(
        settings, "convert", lambda *args, **more: reports.append(convert(*args, **more)) or reports[-1]
    )
    runs = "0.5:8:same", "0.5:8:int2+others"
    records = study("resnet", "--depth", "3", "--seeds", "0", runs=runs)
    names = {f"blocks.{i}.conv{j}" for i in range(3) for j in (1, 2)} | {"blocks.1.shortcut", "blocks.2.shortcut"}
    operators = {"activation"}, {"activation", "norm"}
    for report, bits, others in zip(reports, (None, 2), operators, strict=True):
        pruned = [layer for layer in report.converted if layer.operator in ("linear", "convolution")]
        assert {layer.fqn for layer in pruned} == names
        assert {layer.keep.bits for layer in pruned} == {bits}
        assert {layer.operator for layer in report.converted} - {"linear", "convolution"} == others
    assert [report.saved and report.saved.bits for report in reports] == [None, 8]
    assert records[1]["bits_per_value"] < 0.2 * records[0]["bits_per_value"]


def test_probing_and_counting_leave_batch_norms_as_they_were(image_folder):
    torch.manual_seed(0)
    model = build_model("resnet_9x64", dim=8, depth=1, num_classes=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    images = Images(image_folder, torch.device("cpu"))
    batch = images.batch(images.draw(1, 6, torch.Generator().manual_seed(0))[0])
    prune(model, parse_setting("0.5:8:same"), batch, "fp32")
    settings.kept_rows(model, batch, "fp32")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    settings.training_loss(model, batch, "fp32")
    assert model.norm.num_batches_tracked == 1


def test_bits_per_value_are_those_of_the_storage(study):
    # Of 1/(1 - s) values of 16 bits, one bit per block and one int32 per 128 blocks; each sample has 16 rows of four
    # blocks or, behind fc1, of 16: 64 and 256 blocks, so that no part of 128 is cut but that of the small inputs.
    *_, record = study("vit", "--precision", "bf16", runs=("0.75:8:same",))
    blocks = {"qkv": 16 * 4, "fc1": 16 * 4, "fc2": 16 * 16}
    stored = sum(n / 4 * 8 * 16 + n + 32 * math.ceil(n / 128) for n in blocks.values())
    assert record["bits_per_value"] == pytest.approx(stored / (8 * sum(blocks.values())), abs=1e-4)


def test_runs_already_recorded_are_skipped(study, tmp_path, capsys):
    records = study("resmlp")
    assert json.loads((tmp_path / "accuracy.json").read_text()) == records
    capsys.readouterr()
    assert study("resmlp") == records
    assert capsys.readouterr().out.count("already in") == 4
    assert len(study("resmlp", "--lr", "0.01", runs=("dense",))) == 6


def test_records_of_other_texts_are_not_mixed(study, source_folder, tmp_path):
    first = study("gpt", runs=("dense",))
    added = source_folder / "three.py"
    added.write_text("pass\n")
    try:
        records = study("gpt", runs=("dense",))
    finally:
        added.unlink()
    assert len(records) == 2 * len(first) == 4
    assert len({(r["dataset"], r["bytes"], r["sha256"]) for r in records}) == 2
    assert len(results.studies(records)) == 2


def test_records_of_images_say_what_the_images_are(image_folder, tmp_path):
    cpu = torch.device("cpu")
    facts = Images(image_folder, cpu).facts
    shape = facts["train_images"], facts["test_images"], facts["image_size"], facts["classes"]
    assert shape == (24, 12, 8, 3)
    elsewhere = shutil.copytree(image_folder, tmp_path / "c")
    assert Images(elsewhere, cpu).facts == facts
    (elsewhere / "train" / "cat" / "07.png").rename(elsewhere / "train" / "dog" / "00_.png")
    relabelled = Images(elsewhere, cpu).facts
    Image.new("RGB", (8, 8)).save(elsewhere / "test" / "cat" / "00.png")
    assert len({facts["sha256"], relabelled["sha256"], Images(elsewhere, cpu).facts["sha256"]}) == 3


def test_an_interruption_leaves_what_was_done(study, tmp_path, monkeypatch):
    whole, started = accuracy.train_and_score, []

    def interrupted(*args):
        started.append(args)
        if len(started) == 2:
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(accuracy, "train_and_score", interrupted)
    with pytest.raises(KeyboardInterrupt):
        study("resmlp")
    assert len(json.loads((tmp_path / "accuracy.json").read_text())) == 1
    assert len(study("resmlp")) == 4
    assert len(started) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["accuracy.json"]


def test_study_keeps_to_its_time_budget(study, capsys):
    assert study("resmlp", "--time-budget-s", "0") == []
    assert capsys.readouterr().out.count("would exceed the time budget") == 4


@pytest.mark.parametrize("task", tasks.TASKS)
def test_a_run_that_is_cut_short_goes_on_as_if_nothing_had_been(study, task, tmp_path, monkeypatch, capsys):
    whole = study(task, "--epochs", "3", "--seeds", "0")
    (tmp_path / "accuracy.json").unlink()
    more = ["--epochs", "3", "--seeds", "0", "--states", str(tmp_path / "states")]
    until_of = accuracy.until_of
    monkeypatch.setattr(accuracy, "until_of", lambda *args: replace(until_of(*args), end=0.0))  # an epoch at a time
    records = study(task, *more, runs=("0.5:8:same",))
    assert (records, "cut short" in capsys.readouterr().out) == ([], True)
    assert len(list((tmp_path / "states").iterdir())) == 1
    assert study(task, *more, runs=("0.5:8:same",)) == []
    [record] = study(task, *more, runs=("0.5:8:same",))
    assert (record["losses"], record["accuracy"]) == (whole[1]["losses"], whole[1]["accuracy"])
    assert list((tmp_path / "states").iterdir()) == []


def test_strong_augmentation_trains_on_shares_of_classes_and_is_part_of_the_record(study):
    strong, plain = (study("resmlp", *more, "--seeds", "0", runs=("dense",))[-1] for more in (("--strong",), ()))
    assert (strong["augmentation"], plain["augmentation"]) == ("RandAugment and mixup", None)
    assert strong["losses"] != plain["losses"]
    assert "RandAugment and mixup" in results.study_title(strong)


@pytest.mark.parametrize("strong", [False, True])
def test_turned_images_are_as_many_in_eight_times_the_classes(study, image_folder, strong):
    [record] = study("resmlp", "--turned", "--seeds", "0", *["--strong"] * strong, runs=("dense",))
    plain, turned = (Images(image_folder, torch.device("cpu"), 0, strong, turned=turned) for turned in (False, True))
    assert (record["turned"], record["classes"]) == (True, turned.classes)
    assert torch.equal(turned.labels // 8, plain.labels)
    assert turned.labels.unique().numel() > plain.classes
    choices = torch.tensor([[0, 5, 7], [0] * 3, [0] * 3, [0] * 3] + [[0] * 3] * 4 * strong + [[1000] * 3] * strong)
    images = [data.batch(choices)[0] for data in (plain, turned)]
    for each, right, found in zip(choices[0], *images, strict=True):
        way = turned.labels[each] % 8
        assert way == each % 8
        right = right.rot90(int(way) % 4, (1, 2)) * plain.std + plain.mean
        right = 255 - right if way >= 4 else right
        torch.testing.assert_close(found * turned.std + turned.mean, right)


@pytest.mark.parametrize("lora", [False, True])
def test_fine_tuning_begins_with_what_another_run_has_saved(study, lora, tmp_path):
    weights = tmp_path / "weights.pt"
    one = "--seeds", "0"
    [first] = study("vit", *one, "--part", "first", "--save", str(weights), runs=("dense",))
    more = "--part", "second", "--start", str(weights), *(["--lora"] if lora else [])
    before, *tuned = study("vit", *one, *more, runs=("dense", "0.5:8:same"))
    assert before == first
    assert first["classes"] == 1
    weights.unlink()
    with pytest.raises(SystemExit, match=r"not made again\. HINT"):
        study("vit", *one, "--part", "first", "--save", str(weights), runs=("dense",))
    assert [r["classes"] for r in tuned] == [2, 2]
    assert all(r["lora"] == (lora or None) and len(r["start"]) == 16 for r in tuned)
    *_, scratch = study("vit", *one, "--part", "second", runs=("dense",))
    assert (scratch["start"], scratch["losses"] != tuned[0]["losses"]) == (None, True)
    assert "fine-tuned from" in results.study_title(tuned[0])
    assert tuned[0]["losses"] != tuned[1]["losses"]


def test_a_model_that_is_fine_tuned_keeps_all_but_its_head(study, image_folder, tmp_path):
    weights = tmp_path / "weights.pt"
    study("vit", "--seeds", "0", "--part", "first", "--save", str(weights), runs=("dense",))
    saved = torch.load(weights, weights_only=True)
    command = ["--task", "vit", "--root", str(image_folder), *SIZE, "--patch-size", "2", "--settings", "dense"]
    opened = tasks.open_study(accuracy.parse([*command, "--part", "second", "--start", str(weights), "--lora"]))
    model = opened.build(0)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if "lora_" in name or name.startswith("head.")}
    weight = model.blocks[0].fc1.base_layer.weight
    assert torch.equal(weight, saved["blocks.0.fc1.weight"])
    assert not model.head.weight.any()


@pytest.mark.parametrize(
    "more",
    [
        ["--strong"],
        ["--packages", "--root", "."],
        ["--part", "first"],
        ["--turned"],
        ["--lora"],
        ["--save", "a.pt"],
        ["--save", "no/a.pt"],
    ],
)
def test_options_of_the_other_kind_of_task_are_refused(more, capsys):
    seeds = ["--seeds", "0"] if "no/a.pt" in more else []
    with pytest.raises(SystemExit):
        accuracy.parse(["--task", "gpt", "--settings", "dense", *seeds, *more])
    assert more[0] in capsys.readouterr().err


def test_settings_are_read_as_they_are_printed():
    assert parse_setting("dense") == Setting("dense")
    assert parse_setting("0.5:16:same") == Setting("pruned", 0.5, 16, "same")
    assert [str(parse_setting(text)) for text in ("dense", "0:32:int4", "0.25:8:int8")] == [
        "dense",
        "0:32:int4",
        "0.25:8:int8",
    ]


def test_settings_may_name_a_preset_a_selection_or_a_limit():
    assert parse_setting("max") == parse_setting("0:32:int2") == parse_setting("0:32:int2:largest")
    assert parse_setting("0.5:32:int2:0.2") == parse_setting("0.5:32:int2:largest:0.2")
    assert parse_setting("paper") == parse_setting("0.6:32:same")
    assert str(parse_setting("0.8:32:same:unbiased")) == "0.8:32:same:unbiased"
    assert parse_setting("0.8:32:same:unbiased:0.3").max_dropped_energy == 0.3


def test_a_preset_of_the_package_may_come_with_rules():
    setting = parse_setting(text := "preset:max+others=attn.qkv:int8,linear:int3,norm:int2")
    assert str(setting) == text
    model = build_model("gpt_6x384", dim=64, depth=1, context=16)
    prune(model, setting, (torch.randint(256, (2, 16)), torch.randint(256, (2, 16))), "fp32")
    block = model.blocks[0]
    assert [layer.bits for layer in (block.attn.qkv, block.fc1, model.head, block.norm1)] == [8, 3, 3, 2]
    assert block.fc1.sparsity == 0


def test_a_preset_of_the_package_may_come_with_a_sparsity():
    setting = parse_setting(text := "preset:paper:0.3+others=fc1:int4")
    assert str(setting) == text
    model = build_model("gpt_6x384", dim=64, depth=1, context=16)
    prune(model, setting, (torch.randint(256, (2, 16)), torch.randint(256, (2, 16))), "fp32")
    fc1, fc2 = model.blocks[0].fc1, model.blocks[0].fc2
    assert [(layer.keep.bits, layer.sparsity) for layer in (fc1, fc2)] == [(4, 0.0), (None, 0.3)]
    assert results.kept(asdict(parse_setting("preset:max:0.5"))) == "`max`, every layer, s = 0.5"


def test_spread_layers_keep_their_blocks():
    torch.manual_seed(0)
    model = build_model("gpt_6x384", dim=64, depth=1, context=16)
    batch = torch.randint(256, (2, 16)), torch.randint(256, (2, 16))
    assert prune(model, parse_setting("0.5:8:int4:0.4"), batch, "fp32") == ["attn.proj"]
    block = model.blocks[0]
    assert [layer.sparsity for layer in (block.attn.qkv, block.fc1, block.fc2)] == [0.5, 0.5, 0.5]
    revert(model)
    prune(model, parse_setting("0.5:8:int4:0.2"), batch, "fp32")
    assert [layer.sparsity for layer in (block.attn.qkv, block.fc1, block.fc2)] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0.5",
        "0.5:16",
        "1:16:same",
        "-0.5:16:same",
        "0.5:0:same",
        "0.5:16:int5",
        "s:b:same",
        "0.5:16:same:mean",
        "preset:big",
        "preset:max:2",
        "dense:0.5",
        "preset:max+others",
        "preset:max+others=linear:int5",
        "preset:big+others=linear:int4",
    ],
)
def test_settings_that_mean_nothing_are_refused(text):
    with pytest.raises(
        argparse.ArgumentTypeError,
        match=r"must be `dense`, a preset \(paper, .*\), `preset:` and .*, or `sparsity:block_size",
    ):
        parse_setting(text)


@pytest.mark.parametrize(
    ("command", "message"),
    [("--task vit", "--root must be a folder of images"), ("--task gpt --model vit_8x384", "one of --task gpt")],
)
def test_options_that_do_not_fit_the_task_are_refused(command, message, capsys):
    with pytest.raises(SystemExit):
        accuracy.parse([*command.split(), "--settings", "dense"])
    assert message in capsys.readouterr().err


def test_more_images_than_there_are_cannot_be_a_batch(image_folder):
    args = accuracy.parse(["--root", str(image_folder), "--batch-size", "25", "--settings", "dense"])
    with pytest.raises(ValueError, match=r"`--batch-size` must be at most .* got 25 for 24 images"):
        tasks.open_study(args)


def test_value_formats_are_passed_on(study, monkeypatch):
    asked = []

    def recorded(model, rules):
        keep = rules["type:linear"]
        asked.append((keep.sparsity, keep.block_size, keep.bits))
        return convert(model, rules=rules)

    monkeypatch.setattr(settings, "convert", recorded)
    records = study("vit", runs=("0.5:8:int2", "0.5:8:same"))
    assert asked == [(0.5, 8, 2), (0.5, 8, None)] * 2
    assert [r["value_format"] for r in records] == ["int2", "same"] * 2


def test_images_are_cut_into_windows_and_mirrored(image_folder):
    images = Images(image_folder, torch.device("cpu"), padding=2)
    choices = images.draw(2, 9, torch.Generator().manual_seed(0))
    assert choices.shape == (2, 4, 9)
    assert len(choices[:, 0].unique()) == 18
    batch, labels = images.batch(choices[1])
    for image, label, (index, top, left, mirrored) in zip(batch, labels, choices[1].T.tolist(), strict=True):
        window = images.padded[index, :, top : top + 8, left : left + 8]
        expected = images.normalise(window.flip(-1) if mirrored else window)
        torch.testing.assert_close(image, expected)
        assert label == images.labels[index]


@pytest.mark.parametrize("clip", [None, 0.25])
def test_gradients_are_made_smaller_where_they_shall_be(source_folder, monkeypatch, clip):
    more = [] if clip is None else ["--clip", str(clip)]
    command = ["--task", "gpt", "--root", str(source_folder), *SIZE, *RECIPE, *OPTIONS["gpt"], *more]
    study = tasks.open_study(accuracy.parse([*command, "--settings", "dense"]))
    step, norms = training.TrainStep(study.build(seed=0), study.data, study.recipe), []

    def stepped():
        norms.append(torch.stack([p.grad.norm() for p in step.model.parameters()]).norm().item())

    monkeypatch.setattr(step.optimizer, "step", stepped)
    monkeypatch.setattr(step, "graph", None)
    step(training.first_choices(study.data, study.recipe), 1e-3)
    assert study.describe()["clip"] == clip
    assert norms == [pytest.approx(clip, rel=1e-4)] if clip else norms[0] > 0.5


@needs_passes
@pytest.mark.slow
@pytest.mark.parametrize("task", ["gpt", "resnet"])
def test_compiled_blocks_train_like_eager_ones(study, task, monkeypatch):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    whole = training.compile_blocks
    monkeypatch.setattr(training, "compile_blocks", lambda model, backend: whole(model, counter))
    # Nothing of these models is large enough to be packed otherwise.
    monkeypatch.setattr(sys.modules["lightning_actprune.convert"], "Model", partial(Model, min_values=16))
    eager, compiled = (study(task, "--depth", "3", *more) for more in ((), ("--compile", "aot_eager")))
    assert len(compiled) == 2 * len(eager) == 8
    for one, other in zip(eager, compiled[4:], strict=True):
        assert (one["compile"], other["compile"]) == (None, "aot_eager")
        # Of what a pruned layer shares with another reader, a compiler keeps one form for both, and eager mode two.
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-4 if one["method"] == "dense" else 2e-2)
        if one["method"] == "dense":
            assert other["accuracy"] == pytest.approx(one["accuracy"], rel=1e-3)
        assert "packs" not in one
        assert (other["packs"] > 0) == (other["method"] != "dense")
    # Once per run, whatever the number of blocks; each stage of the ResNet has a block of its own kind.
    assert counter.frame_count == (12 if task == "resnet" else 4)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [None, "inductor"])
@pytest.mark.parametrize("task", tasks.TASKS)
@pytest.mark.parametrize("setting", ["dense", "0.6:32:same"])
def test_captured_step_trains_like_the_eager_one(image_folder, source_folder, task, setting, compiled):
    root = source_folder if task == "gpt" else image_folder
    # Above 4096 bytes a batch, the gradient of the embedding takes another way.
    batch_size = 512 if task == "gpt" else 8
    options = ["--root", str(root), "--depth", "2", "--dim", "128", "--batch-size", str(batch_size)]
    study = tasks.open_study(accuracy.parse(["--task", task, *OPTIONS[task], *options, "--settings", setting]))
    losses = []
    for captured in (True, False):
        model = study.build(seed=0)
        batch = study.data.batch(training.first_choices(study.data, study.recipe))
        settings.prune(model, parse_setting(setting), batch, "bf16")
        if compiled and captured:
            training.compile_blocks(model, compiled)
        step = training.TrainStep(model, study.data, study.recipe)
        if not captured:
            step.graph = None
        for choices in 4 * list(study.data.draw(3, batch_size, torch.Generator().manual_seed(1))):
            step(choices, 1e-3)
        losses.append(step.loss_sum.item() / 12)
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert losses[0] < math.log(256 if task == "gpt" else 3)


@pytest.mark.parametrize(
    ("text", "others"),
    [
        ("max", None),
        ("max+others", settings.in_words(PRESETS["max"].others)),
        ("0.5:32:int4+others", settings.in_words(OTHERS)),
        ("max+others=activation:int2,rest:int8", "activation:int2,rest:int8"),
    ],
)
def test_a_setting_says_how_other_operators_are_stored(text: str, others: str | None):
    setting = settings.parse_setting(text)
    assert setting.others == others
    assert settings.parse_setting(str(setting)) == setting
    assert ",".join(map(":".join, setting.other_formats.items())) == (others or "")


@pytest.mark.parametrize("text", ["dense+others", "max+others=gate:int4", "max+others=rest", "max+others,"])
def test_a_setting_that_names_other_operators_wrongly_is_an_error(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="must be `dense`"):
        settings.parse_setting(text)


@pytest.mark.parametrize("preset", ["balanced", "max", "recompute"])
def test_presets_of_the_package_convert_the_whole_model(preset, monkeypatch):
    monkeypatch.setattr(recompute, "checkpoint", recompute.checkpoint)  # which is replaced
    model = build_model("gpt_6x384", context=32, dim=64, depth=2).train()
    batch = torch.randint(256, (64, 32)), torch.randint(256, (64, 32))
    setting = parse_setting(f"preset:{preset}")
    assert prune(model, setting, batch, "fp32") == []
    assert any(isinstance(layer, Converted) for layer in model.modules())
    assert any(isinstance(layer, Converted) for name, layer in model.named_modules() if not name.startswith("blocks"))
    assert 0 < bits_of_all(model, batch, "bf16") < 16
    assert results.kept(asdict(setting)) == f"`{preset}`, every layer"
