"""Sensitivity: predictions against training, what a measurement leaves alone, and what it suggests."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import Keep, convert, measure_sensitivity
from lightning_actprune.analysis import sensitivity
from lightning_actprune.analysis.sensitivity import LayerSensitivity, SensitivityReport, allocate
from lightning_actprune.operators.attention import watchers
from tests.support.attention import Attending
from tests.support.conversion_models import Calls, deep, mlp


def square(model: nn.Module) -> Any:
    return lambda x: model(x).square().mean()


def token_mixing() -> nn.Module:
    forward = lambda model, x: model.mix(model.norm(x).transpose(1, 2)).transpose(1, 2)  # noqa: E731
    return Calls(forward, norm=nn.LayerNorm(70), mix=nn.Linear(64, 64))


def twice() -> nn.Module:
    """Return one layer called twice, and one of which only the first of two calls reaches the loss."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        out = model.once(model.shared(torch.tanh(model.shared(x))))
        model.once(out)
        return out

    return Calls(forward, shared=nn.Linear(66, 66), once=nn.Linear(66, 66))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(6, 32, 3, padding="same"), nn.Conv2d(32, 32, 2, 2, groups=2))


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "three": (deep, (16, 5, 65)),
    "token mixing": (token_mixing, (16, 64, 70)),
    "called twice": (twice, (16, 3, 66)),
    "self-attention": (lambda: Attending(batch_first=True), (16, 6, 64)),
    "own weights": (lambda: Attending(crossed=True, kdim=64, vdim=64, bias=False, batch_first=True), (16, 6, 64)),
    "convolution": (convolutions, (16, 6, 9, 8)),
}
"""Models and the shapes of their inputs."""


def gradients(model: nn.Module, x: Tensor, autocast: bool) -> dict[str, Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        square(model)(x).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def weights_in(model: nn.Module, fqn: str) -> set[str]:
    """Return the names of the weights of a layer, without those of its children."""
    named = model.get_submodule(fqn).named_parameters(fqn, recurse=False)
    return {name for name, parameter in named if parameter.dim() > 1}


def errors(exact: list[dict[str, Tensor]], stored: list[dict[str, Tensor]], weights: list[str]) -> tuple[float, float]:
    """Return the squared norms of error and gradient of these weights, over all batches."""
    pairs = [(a[name], b[name]) for a, b in zip(exact, stored, strict=True) for name in weights]
    return float(sum((a - b).square().sum() for a, b in pairs)), float(sum(a.square().sum() for a, _ in pairs))


@pytest.mark.parametrize(
    ("kind", "bits", "autocast"),
    [
        ("three", 2, False),
        ("called twice", 3, False),
        ("token mixing", 2, True),
        ("self-attention", 4, False),
        ("own weights", 2, True),
        ("convolution", 3, False),
    ],
)
def test_what_is_predicted_is_the_error_of_training(kind, bits, autocast, monkeypatch):
    monkeypatch.setattr(sensitivity, "CHUNK", 900)  # so that inputs are cut into pieces
    make, shape = MODELS[kind]
    model, batches = make(), [torch.randn(shape) for _ in range(24)]

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return square(model)(x)

    found = measure_sensitivity(model, loss, batches)
    assert found.skipped == []
    stored_model, exact = copy.deepcopy(model), [gradients(model, x, autocast) for x in batches]
    keep = Keep(bits=bits, min_rows_for_low_bits=0)
    convert(stored_model, rules={"type:linear": keep, "type:convolution": keep, "*": None})
    stored = [gradients(stored_model, x, autocast) for x in batches]
    rows = [row for row in found.rows if row.bits == bits]
    weights = {row.fqn: [name for name in exact[0] if name in weights_in(model, row.fqn)] for row in rows}
    values = sum(grad.numel() for grad in exact[0].values())
    for row in rows:
        error, own = errors(exact, stored, weights[row.fqn])
        assert row.error == pytest.approx((error / own) ** 0.5, rel=0.05), row
        count = sum(exact[0][name].numel() for name in weights[row.fqn])
        assert row.share == pytest.approx((error / own * count / values) ** 0.5, rel=0.05), row
        assert row.nbytes < next(other.nbytes for other in found.rows if other.fqn == row.fqn and other.bits is None)


@pytest.mark.parametrize("kind", ["self-attention", "convolution"])
def test_converted_models_are_measured_as_dense_ones(kind):
    make, shape = MODELS[kind]
    dense, x = make(), torch.randn(shape)
    pruned = copy.deepcopy(dense)
    convert(pruned, "max", rules={"type:convolution": Keep(4, 0.7)})
    kinds = [type(module) for module in pruned.modules()]
    found = measure_sensitivity(pruned, square(pruned), [x])
    assert found.rows == measure_sensitivity(dense, square(dense), [x]).rows
    assert [type(module) for module in pruned.modules()] == kinds


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"batches": []}, ValueError),
        ({"loss": lambda x: 1.0}, TypeError),
        ({"loss": lambda x: x.sum()}, ValueError),
    ],
)
def test_errors_name_the_argument(options, error):
    model = mlp()
    with pytest.raises(error, match=f"`{next(iter(options))}`"):
        measure_sensitivity(model, **{"loss": square(model), "batches": [torch.ones(2, 65)]} | options)
    assert not watchers


# What a measurement sees, and leaves alone.


def state(model: nn.Module) -> Any:
    values = [value.clone() for value in (*model.state_dict().values(), *(p.grad for p in model.parameters()))]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), type(m), m.training) for m in model.modules()]
    return [*values, torch.get_rng_state()], hooks, [id(p.grad) for p in model.parameters()], len(watchers)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails):
    noisy = nn.Sequential(nn.Linear(65, 70), nn.BatchNorm1d(70), nn.Dropout(0.5), nn.Linear(70, 3))
    model = nn.Sequential(noisy, nn.Linear(3, 64), nn.TransformerEncoderLayer(64, 2, 70, batch_first=True))
    x = torch.randn(4, 65)
    square(model)(x).backward()
    model[0][1].eval()
    before = state(model)

    def loss(x: Tensor) -> Tensor:
        model.train()
        found = square(model)(x)
        if fails:
            raise KeyError("mine")
        return found

    with pytest.raises(KeyError, match="mine") if fails else nullcontext():
        measure_sensitivity(model, loss, [x])
    after = state(model)
    assert all(map(torch.equal, after[0], before[0]))
    assert after[1:] == before[1:]
    assert "_state" not in {name for module in model.modules() for name in vars(module)}


def test_layers_that_cannot_be_measured_are_listed_with_the_reason():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = model.frozen(model.used(x)) + model.small(x[..., :8])
        return y.sum() + model.wide(y.double()).sum() + model.zero(y * 0).square().sum() * 0

    layers = {name: nn.Linear(64, 64) for name in ("used", "frozen", "idle", "zero")}
    model = Calls(loss, **layers, small=nn.Linear(8, 64), wide=nn.Linear(64, 4).double())
    model.frozen.weight.requires_grad_(False)
    found = measure_sensitivity(model, lambda x: model(x), [torch.randn(4, 64)])
    assert {row.fqn for row in found.rows} == {"used"}
    assert measure_sensitivity(model, lambda x: model(x), [torch.full((4, 64), float("inf"))]).rows == []
    reasons = {layer.fqn: layer.reason for layer in found.skipped}
    assert reasons["frozen"].startswith("its weight is frozen")
    assert reasons["idle"] == "it was not called"
    assert reasons["small"].startswith("has 8 input features, fewer than 64")
    assert reasons["wide"].startswith("its input is no tensor that can be quantized")
    assert reasons["zero"].startswith("no finite gradient")


# What it suggests.


def rows_of(energies: dict[str, float], nbytes: dict[str, int]) -> list[LayerSensitivity]:
    """Return rows in which a bit more divides the square of an error by four, from ``energies`` at two bits on."""
    rows = [
        LayerSensitivity(fqn, "Linear", bits, 0.0, (energies[fqn] * 4.0 ** (2 - bits)) ** 0.5, size * bits)
        for fqn, size in nbytes.items()
        for bits in (2, 3, 4, 8)
    ]
    return rows + [LayerSensitivity(fqn, "Linear", None, 0.0, 0.0, size * 16) for fqn, size in nbytes.items()]


def test_bits_go_where_the_error_falls_most_a_byte():
    """No other choice with as few bytes has a smaller error: the errors of these layers are convex in their bytes."""
    energies = {"fc1": 0.01, "fc2": 0.0004, "head": 0.04}
    rows = rows_of(energies, {"fc1": 4, "fc2": 4, "head": 1})
    options = [[row for row in rows if row.fqn == fqn] for fqn in energies]
    every = [(sum(r.nbytes for r in some), sum(r.share**2 for r in some)) for some in itertools.product(*options)]
    assert {row.bits for row in allocate(rows, 0.1, -1.0).values()} == {2}
    assert {row.bits for row in allocate(rows, 0.0).values()} == {None}
    for bound in (0.2, 0.1, 0.05, 0.02):
        chosen = allocate(rows, bound).values()
        nbytes, error = sum(row.nbytes for row in chosen), sum(row.share**2 for row in chosen)
        assert error <= bound**2
        assert error <= min(e for n, e in every if n <= nbytes) * (1 + 1e-9)
    report = SensitivityReport(rows, [])
    two, three = (Keep(bits, 0.0, 32, "sample", "largest", 1.0, 0) for bits in (2, 3))
    assert report.suggest(0.15) == {"fc1": two, "fc2": two, "head": three}
    assert report.suggest(0.0) == dict.fromkeys(energies)
    assert report.table().row_count == 3
    with pytest.raises(ValueError, match="`max_error`"):
        report.suggest(2.0)
    rows[0] = dataclasses.replace(rows[0], error=0.4)  # fc1 at two bits
    assert [row.bits for row in allocate(rows, 0.1, -1.0).values()] == [3, 2, 2]
    assert [row.bits for row in allocate(rows, 0.2, -1.0).values()] == [2, 2, 2]


def test_suggestions_are_rules_of_convert():
    model = nn.ModuleDict({"first": nn.Linear(64, 64), "out": nn.Linear(64, 64)})
    model["again"] = model["first"]

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model["out"](model["again"](model["first"](x)).relu()).square().sum()

    rules = measure_sensitivity(model, loss, [torch.randn(8, 64)]).suggest(1.0)
    assert list(rules) == ["first", "out"]
    assert {layer.fqn: layer.keep for layer in convert(model, rules=rules).converted} == rules
