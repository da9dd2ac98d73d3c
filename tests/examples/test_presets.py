"""The benchmark of presets on a small model on the CPU: what it prunes, its records, and how its cases take turns."""

from __future__ import annotations

import io
import json
import sys

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from examples.benchmarks import models, presets, summaries, third_party, turns
from examples.benchmarks.vocabulary import PRESETS
from lightning_actprune import ActivationPruning
from tests.examples.stand_ins import Blocks, counted, vectors
from tests.support.helpers import trainer

CPU = torch.device("cpu")


class Trained(pl.LightningModule):
    """The same training as a LightningModule."""

    def __init__(self, training: models.Training) -> None:
        super().__init__()
        self.training_of, self.net = training, training.model
        self.at_the_end: dict[str, float | None] = {}

    def training_step(self, batch, batch_idx):
        return self.training_of.workload.loss(self.net, *batch)

    def on_train_end(self):
        self.at_the_end = sparsity_by_layer(self.net)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def sparsity_by_layer(model):
    """Return the sparsity of each linear layer, `None` if it is dense."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    return {name: getattr(layer, "sparsity", None) for name, layer in layers.items()}


@pytest.fixture
def small(monkeypatch):
    workload = third_party.Workload("torch", 4, Blocks, vectors, third_party._cross_entropy)
    monkeypatch.setattr(models, "WORKLOADS", {"small": workload})
    monkeypatch.setattr(presets, "allocated", counted)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return workload


@pytest.mark.parametrize("name", PRESETS)
def test_layers_are_pruned_as_the_callback_does_it(small, name):
    ours = presets.prepare("small", name, CPU)
    plain = models.Training("small", None, CPU)
    module = Trained(plain)
    data = DataLoader(TensorDataset(*plain.batch), batch_size=small.batch)
    trainer(ActivationPruning(preset=name), max_epochs=1).fit(module, data)
    found = sparsity_by_layer(ours.model)
    assert found == module.at_the_end
    kinds = [found["blocks.1.1"], found["blocks.1.3"]]  # spread and concentrated inputs
    assert kinds == {"paper": [0.6, 0.6], "balanced": [0.0, 0.0], "max": [0.0, 0.0]}[name]
    facts = presets.facts(ours, name)
    assert facts["dropping"] == sum(bool(sparsity) for sparsity in found.values())


def test_a_checkpointed_model_keeps_less_and_has_the_same_gradients(small):
    kept, gradients = {}, {}
    for method in ("dense", "checkpoint"):
        training = presets.prepare("small", method, CPU)
        kept[method] = counted(training)["activations_mib"]
        gradients[method] = torch.autograd.grad(training.forward(), list(training.model.parameters()))
    assert kept["checkpoint"] < 0.5 * kept["dense"]
    for dense, checkpointed in zip(*gradients.values(), strict=True):
        torch.testing.assert_close(checkpointed, dense)


def test_blocks_of_a_gpt2_are_checkpointed():
    transformers = pytest.importorskip("transformers", reason="the model is its")
    config = transformers.GPT2Config(vocab_size=40, n_positions=16, n_embd=32, n_layer=2, n_head=2, use_cache=False)
    model = transformers.GPT2LMHeadModel(config).train()
    tokens = torch.randint(40, (2, 16))
    calls = []
    model.transformer.h[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    third_party.checkpoint_blocks(model)
    third_party._own_loss(model, tokens, tokens).backward()
    assert len(calls) == 2  # forward, and again in backward
    assert all(p.grad is not None for p in model.parameters())


def test_blocks_of_a_resnet_are_checkpointed():
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.ResNet(torchvision.models.resnet.Bottleneck, [1, 1, 1, 1], width_per_group=8)
    calls = []
    for layer in (model.layer1[0].conv1, model.layer4[0].conv3):
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
    third_party.checkpoint_blocks(model)
    third_party._cross_entropy(model, torch.randn(2, 3, 32, 32), torch.tensor([0, 1])).backward()
    assert len(calls) == 4  # forward, and again in backward
    assert all(p.grad is not None for p in model.parameters())


def test_a_resnet_has_its_channels_last():
    torchvision = pytest.importorskip("torchvision")
    workload = third_party.WORKLOADS["resnet50"]
    images, labels = workload.data(2)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert labels.shape == (2,)
    with torch.device("meta"):
        model = workload.build()
    assert isinstance(model, torchvision.models.ResNet)
    assert model.layer1[0].conv2.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
def test_one_command_measures_every_method_side_by_side(small, monkeypatch, tmp_path, capsys):
    def one_after_the_other(commands, rounds):
        figures = []
        for command in commands:
            capsys.readouterr()
            monkeypatch.setattr(sys, "stdin", io.StringIO("go\n" * rounds))
            presets.serve(*command[-2:], steps=2, device=CPU)
            facts, *answers = map(json.loads, capsys.readouterr().out.splitlines())
            assert [len(times) for times, *_ in answers] == [2] * rounds
            figures.append({**facts, "ms_median": answers[0][0][0], "host_ms": answers[0][1]})
        return figures

    for name in ("GROUP", "ISSUED"):
        monkeypatch.setattr(turns, name, 1)  # kernels are interpreted
    monkeypatch.setattr(turns, "WARM_SECONDS", 0.0)
    monkeypatch.setattr(presets, "require_gpu", lambda: None)
    monkeypatch.setattr(presets, "MODELS", ("small",))
    monkeypatch.setattr(turns, "take_turns", one_after_the_other)
    out = tmp_path / "presets.json"
    presets.main(["--rounds", "1", "--out", str(out)])
    records = json.loads(out.read_text())
    assert [r["method"] for r in records[:5]] == ["dense", "checkpoint", "paper", "balanced", "max"]
    assert [(r["method"], r["others"]) for r in records[4:]] == [
        ("max", False),
        ("balanced, others", True),
        ("max, others", True),
    ]
    assert [(r["sparsity"], r["value_format"]) for r in records[1:4]] == [(None, None), (0.6, "same"), (0.0, "int4")]
    by_method = {r["method"]: r["activations_mib"] for r in records}
    assert by_method["checkpoint"] < by_method["dense"]
    assert by_method["max"] < by_method["balanced"] < by_method["paper"] < by_method["dense"]
    assert by_method["max, others"] < by_method["balanced, others"] < 0.5 * by_method["max"]
    assert all({"gpu", "torch", "triton", "command", "peak_mib", "converted", "batch"} <= r.keys() for r in records)
    assert f"small, batch {4 * presets.BATCHES}" in capsys.readouterr().out


def case(times, host, cold=9.0):
    """Return the command of a process that answers with these figures whenever it is asked."""
    facts, answer = json.dumps({"converted": 3}), json.dumps([times, host, cold])
    code = f"import sys\nprint({facts!r}, flush=True)\nfor _ in sys.stdin: print({answer!r}, flush=True)"
    return [sys.executable, "-c", code]


def test_times_are_medians_over_all_turns():
    first, second = turns.take_turns([case([3.0, 5.0], 1.5), case([4.0], 2.0)], rounds=2)
    assert first == {"converted": 3, "ms_median": 4.0, "ms_min": 3.0, "ms_max": 5.0, "host_ms": 1.5, "ms_cold": 9.0}
    assert (second["ms_median"], second["host_ms"]) == (4.0, 2.0)


def test_a_case_that_ends_early_is_named():
    with pytest.raises(RuntimeError, match=r"a case ended before it had answered: .*broken"):
        turns.take_turns([case([3.0], 1.0), [sys.executable, "-c", "'broken'"]], rounds=1)


def test_table_compares_with_dense_of_the_same_model():
    def record(method, scale, **more):
        mode = "compiled" if "compiled" in method else "eager"
        head = {"model": "net", "batch": 8, "mode": mode, "method": method, "converted": 0, "dropping": 0}
        return (
            head
            | {"activations_mib": 400 * scale, "peak_mib": 800 * scale, "ms_median": 10 * scale, "host_ms": 4.25}
            | more
        )

    compiled = [record("dense, compiled", 0.8), record("max, others, compiled", 0.2, peak_mib=None)]
    rows = summaries.presets([record("dense", 1), record("max", 0.5, converted=9, dropping=4), *compiled]).rows
    assert rows[0] == ["net, batch 8", "dense", "-", "400", "800", "10.00", "4.2"]
    assert rows[1] == ["net, batch 8", "max", "4 of 9", "200 (-50 %)", "400 (-50 %)", "5.00 (-50 %)", "4.2"]
    assert rows[3][3:] == ["80 (-75 %)", "-", "2.00 (-75 %)", "4.2"]
