"""What a report on the sensitivity of layers suggests is what ``convert`` takes."""

from __future__ import annotations

import torch
import yaml
from torch import nn

from lightning_actprune import LayerSettings, convert, measure_sensitivity, revert
from lightning_actprune.sensitivity_report import _number


def test_suggestions_are_settings_of_convert():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 10))
    batches = [(torch.randn(16, 64), torch.randint(10, (16,)))]

    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    report = measure_sensitivity(model, loss, batches, sparsities=[0, 0.3, 0.7], value_formats=["same", "int4"])
    sparsities = report.suggest(0.8, "int4")
    converted = convert(model, sparsities, value_format="int4").converted
    assert {layer.fqn: layer.sparsity for layer in converted} == sparsities
    revert(model)

    settings = report.suggest_layers(0.8)
    given = {pattern: LayerSettings(**own) for pattern, own in settings.items()}
    converted = convert(model, include=list(settings), layers=given).converted
    found = {layer.fqn: {"sparsity": layer.sparsity, "value_format": layer.value_format} for layer in converted}
    assert found == settings
    assert len({own["value_format"] for own in settings.values()} | set(sparsities.values())) > 1


def test_names_of_one_layer_share_a_pattern():
    model = nn.ModuleDict({"first": nn.Linear(64, 64), "out": nn.Linear(64, 64)})
    model["again"] = model["first"]

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model["out"](model["again"](model["first"](x)).relu()).square().sum()

    suggested = measure_sensitivity(model, loss, [torch.randn(8, 64)], sparsities=[0.5]).suggest(0.1)
    assert suggested == {"first": 0.5, "out": 0.5}
    assert len(convert(model, suggested).converted) == 2


def test_yaml_has_all_that_was_asked_for():
    model = nn.Sequential(nn.Conv1d(8, 16, 3), nn.Flatten(), nn.ReLU(), nn.Linear(32, 8))

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().sum()

    report = measure_sensitivity(
        model,
        loss,
        [torch.randn(8, 8, 4)],
        sparsities=[1 / 3],
        value_formats=["int8"],
        convolutions=True,
        min_features=0,
    )
    for layers in (False, True):
        given = yaml.safe_load(report.to_yaml(0.1, layers=layers))
        converted = convert(model, **given).converted
        assert [(layer.fqn, layer.sparsity, layer.value_format) for layer in converted] == [
            ("0", 1 / 3, "int8"),
            ("3", 1 / 3, "int8"),
        ]
        revert(model)
    assert [yaml.safe_load(_number(value)) for value in (0.0, 1e-5, 2 / 3)] == [0.0, 1e-5, 2 / 3]
