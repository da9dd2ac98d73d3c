"""The zoo on stand-ins: what records say, what becomes of failures, how a run goes on; its names and its table."""

import importlib.metadata
import json
import os
import time
from functools import partial

import pytest
import torch
from torch import nn

from examples.benchmarks import summaries, tables, zoo, zoo_models
from examples.benchmarks.zoo_models import Sample
from lightning_actprune.config import Config
from tests.support.helpers import assert_plain

FACTS = {"gpu": "none", "torch": "2", "triton": "3", "command": "python zoo.py"}


class Net(nn.Module):
    """Layers of several kinds, on top of an embedding, with a buffer that each forward changes."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(32, 64), nn.BatchNorm1d(64)
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 64))

    def forward(self, tokens, extra):
        x = self.embedding(tokens) + extra
        return self.layers(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Raising(Net):
    """What no preset can do anything about."""

    def forward(self, tokens, extra):
        if any("Compressed" in type(module).__name__ for module in self.modules()):
            raise RuntimeError("no | good. HINT: none")
        return super().forward(tokens, extra)


def sample(make=Net):
    torch.manual_seed(0)
    tokens, extra = torch.randint(0, 32, (16, 8)), torch.randn(16, 8, 64)
    return Sample(make().train(), (tokens,), {"extra": extra}, lambda output: output.square().mean())


def not_there():
    raise ImportError("No module named 'timm'")


SAMPLES = {
    "torch/net": sample,
    "torch/raising": partial(sample, Raising),
    "torch/not_there": not_there,
    "torch/dies": partial(os._exit, 3),
    "torch/hangs": partial(time.sleep, 60),
}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(zoo, "SAMPLES", SAMPLES)
    monkeypatch.setattr(zoo, "LIMIT_S", 20)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_record_says_what_is_kept_and_how_close_gradients_are(folder):
    record = zoo.measure("torch/net")
    assert "error" not in record
    assert record["version"] == importlib.metadata.version("torch")
    assert 0.99 < record["noise"] <= 1
    for preset, least in (("balanced", 0.98), ("max", 0.8)):
        assert record[f"{preset}_kib"] < 0.5 * record["kib"]
        assert least < record[f"{preset}_cosine"] < 1
        assert record[f"{preset}_forward"] < 1e-5
        assert record[f"{preset}_layers"] == 5  # all but the embedding
        assert f"{preset}_left" not in record
    assert record["max_cosine"] < record["balanced_cosine"]
    assert 0.98 < record["bfloat16"] < 1
    assert len(json.dumps(record)) < 600
    assert list(zoo.problems([record])) == []


def test_a_gradient_may_be_off_by_as_much_as_rounding_makes_it():
    record = {"zoo": "torch", "model": "net", "noise": 0.999, "bfloat16": 0.95, "balanced_cosine": 0.96}
    assert list(zoo.problems([record])) == []
    assert list(zoo.problems([record | {"balanced_cosine": 0.94}])) == [
        "net, balanced: the gradient's cosine with the dense one is 0.94"
    ]
    assert len(list(zoo.problems([record | {"bfloat16": None}]))) == 1  # does not run so
    record = made_up("net", last_place=1e-5)
    assert list(zoo.problems([record | {"max_forward": 1.9e-5}])) == []
    assert list(zoo.problems([record | {"max_forward": 2.1e-5}])) == ["net, max: outputs differ by 2.1e-05"]


def test_steps_begin_alike_and_leave_nothing():
    training = zoo.Training(sample())
    first, again = training.step(), training.step()
    assert zoo.largest_difference(first.outputs, again.outputs) == 0
    assert zoo.cosine(first.grads, again.grads) == pytest.approx(1)
    assert first.dense_bytes == first.stored_bytes == again.stored_bytes
    before = zoo.traits(training.model)
    rounded = training.step_on(zoo.to_bfloat16)
    assert 0 < zoo.largest_difference(rounded.outputs, first.outputs) < 0.02
    assert 0 < zoo.largest_difference(training.step_on(zoo.next_number).outputs, first.outputs) < 1e-5
    with training.converted(Config("max")) as layers:
        assert layers == 5
        assert training.step().dense_bytes == first.dense_bytes
        assert zoo.traits(training.model) != before
    assert zoo.traits(training.model) == before
    assert_plain(training.model)


def test_what_a_conversion_leaves_is_found(folder, monkeypatch):
    def revert(model, owner):
        zoo_revert(model, owner)
        model.layers[0].register_forward_hook(lambda *args: None)
        model.layers[1].forgotten = 1
        model.layers[3].__class__ = type("Other", (nn.Linear,), {})

    zoo_revert = zoo.revert
    monkeypatch.setattr(zoo, "revert", revert)
    record = zoo.measure("torch/net")
    assert record["balanced_left"] == "hooks of 'layers.0', attributes of 'layers.1', class of 'layers.3'"
    assert next(zoo.problems([record])) == f"net, balanced, left: {record['balanced_left']}"


def test_models_that_fail_are_recorded_and_the_others_run(folder, capsys):
    names = [name for name in SAMPLES if name != "torch/hangs"]
    assert zoo.main(["--workers", "2", "--models", *names]) == 1
    net, raising, absent, dead = json.loads((folder / "zoo.json").read_text())
    assert net["balanced_cosine"] > 0.98
    assert raising["balanced_error"] == raising["max_error"] == "RuntimeError: no | good."
    assert raising["noise"] > 0.99
    assert absent["error"] == "ImportError: No module named 'timm'"
    assert dead["error"] == "Its process ended with status 3."
    assert FACTS.keys() <= net.keys() & dead.keys()
    printed = capsys.readouterr().out
    assert "torch/net: rounded inputs 1.0000, bfloat16 1.0000, balanced 0.99" in printed
    assert "dies: Its process ended with status 3." in printed
    assert "Models with the lowest cosine, max" in printed


def test_the_operator_that_makes_a_gradient_worse_is_found(folder, capsys):
    worst = {"zoo": "torch", "model": "net", "noise": 1.0, "balanced_cosine": 0.9, "max_cosine": 0.8}
    chaotic = worst | {"model": "dies", "noise": 0.1}
    (folder / "records.json").write_text(json.dumps([chaotic, worst]))
    assert zoo.main(["--causes", "records.json", "--out", "causes.json"]) == 0
    [record] = json.loads((folder / "causes.json").read_text())
    assert record["zoo_causes"] == "torch"
    assert record["balanced"] < record["linear"] < record["all"] > 0.9999
    assert record["balanced_kib"] < record["linear_kib"] < record["all_kib"]
    assert "torch/net" in capsys.readouterr().out


def test_a_model_that_hangs_is_ended(folder, monkeypatch):
    monkeypatch.setattr(zoo, "LIMIT_S", 0.5)
    [record] = zoo.run_all(zoo.measure, ["torch/hangs"], 4)
    assert record == {"zoo": "torch", "model": "hangs", "error": "It took over 0.5 s."}


def test_a_run_goes_on_where_it_was(folder):
    assert zoo.main(["--models", "n*", "--out", "some.json"]) == 1
    unfinished = folder / "some.jsonl"
    lines = unfinished.read_text().splitlines()
    assert [json.loads(text)["model"] for text in lines] == ["net", "not_there"]
    unfinished.write_text(lines[0] + "\n" + lines[1][:30])  # cut short
    assert zoo.main(["--models", "torch/n*", "raising", "--out", "some.json"]) == 1
    records = json.loads((folder / "some.json").read_text())
    assert [record["model"] for record in records] == ["net", "raising", "not_there"]
    assert records[0] == json.loads(lines[0])


def test_gradients_and_outputs_are_compared():
    ones, other = {"a": torch.ones(3)}, {"a": torch.tensor([1.0, 0, 0])}
    assert zoo.cosine(ones, other) == pytest.approx(3**-0.5)
    with pytest.raises(ValueError, match=r"gradients of b \(1 in all\)"):
        zoo.cosine(ones | {"b": torch.ones(1)}, ones)
    nan = torch.tensor([torch.nan, 2.0])
    assert zoo.largest_difference([nan], [nan.clone()]) == 0
    assert zoo.largest_difference([torch.tensor([4.0, 1.0])], [torch.tensor([4.0, 2.0])]) == 0.25
    for right in (torch.ones(2), torch.ones(2).half()):
        with pytest.raises(ValueError, match=r"Outputs are .* dense"):
            zoo.largest_difference([nan], [right])
    assert zoo.rounded(zoo.cosine({"a": torch.zeros(1)}, {"a": torch.ones(1)})) is None


def made_up(model, noise=1.0, **more):
    found = {"zoo": "timm", "model": model, "version": "1", "kib": 100.0, "noise": noise, "bfloat16": 0.996}
    for preset, kib, cosine in (("balanced", 25.0, 0.99), ("max", 20.0, 0.9)):
        found |= {f"{preset}_layers": 3, f"{preset}_kib": kib, f"{preset}_cosine": cosine}
        found |= {f"{preset}_forward": 0.0, f"{preset}_loss": 0.0}
    return {**found, "seconds": 1.0, **FACTS, **more}


def test_problems_are_those_of_models_that_are_not_chaotic():
    wrong = {"max_cosine": 0.2, "max_forward": 0.1}
    assert list(zoo.problems([made_up("net", noise=0.3, **wrong), made_up("good")])) == []
    assert list(zoo.problems([made_up("net", **wrong), made_up("nan", balanced_cosine=None)])) == [
        "net, max: outputs differ by 0.1",
        "net, max: the gradient's cosine with the dense one is 0.2",
        "nan, balanced: there is no gradient, or one that is not finite",
    ]


def test_the_page_shows_all_models_and_the_medians_of_those_with_gradients():
    failed = {"zoo": "transformers", "model": "Lost", "version": "5", "error": "ValueError: a | b <c>", **FACTS}
    records = [made_up("one"), made_up("two", noise=0.5, max_cosine=0.7, max_kib=30.0, max_forward=4e-7), failed]
    text = tables.zoo(records)
    assert "| timm 1 | 2 | 0.9900 | 0.8000 | 25.0 % | 25.0 % |" in text
    assert "| timm/one | 1.0000 | 0.9960 | 0.9900 | 0.9000 | 25.0 % | 20.0 % | 0 |  |" in text
    assert "| timm/two | 0.5000 | 0.9960 | 0.9900 | 0.7000 | 25.0 % | 30.0 % | 4e-07 | chaotic |" in text
    assert "| transformers/Lost | - | - | - | - | - | - | - | ValueError: a &#124; b &#60;c> |" in text
    lowest, most = summaries.zoo(records, most=1)
    assert lowest.rows == most.rows == [["timm/two", "0.5000", "0.9960", "0.9900", "0.7000", "25.0 %", "30.0 %"]]


def test_there_are_as_many_models_as_announced():
    assert len(zoo_models.TIMM) >= 150
    assert len(zoo_models.TRANSFORMERS) >= 80
    assert set(zoo.QUICK) <= set(zoo.SAMPLES)
    assert zoo.chosen(["timm/resnet1*", "Bert*LM"]) == [
        *(f"timm/{name}" for name in ("resnet10t", "resnet18")),
        "transformers/BertForMaskedLM",
    ]


def test_models_of_timm_are_there():
    timm = pytest.importorskip("timm")
    assert set(zoo_models.TIMM) <= set(timm.list_models())


@pytest.mark.slow
def test_models_of_transformers_are_there_and_one_is_tiny():
    transformers = pytest.importorskip("transformers")
    missing = [name for name in zoo_models.TRANSFORMERS if not hasattr(transformers, name)]
    assert missing == []
    made = zoo_models.transformers_sample("LlamaForCausalLM", zoo_models.TRANSFORMERS["LlamaForCausalLM"])
    assert sum(parameter.numel() for parameter in made.model.parameters()) < 1e6
    assert made.loss(made.model(**made.kwargs)).requires_grad
