"""What a report on the sensitivity of layers suggests is what ``convert`` takes."""

from __future__ import annotations

import torch
from torch import nn

from lightning_actprune import LayerSettings, convert, measure_sensitivity, revert


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
