"""Sensitivity: figures against training and an oracle, what a measurement leaves alone, and what it suggests."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import nullcontext
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import Keep, convert, measure_sensitivity
from lightning_actprune.analysis.sensitivity_grid import SensitivityGrid
from lightning_actprune.analysis.sensitivity_report import LayerSensitivity, SensitivityReport, grouped
from lightning_actprune.operators.attention import watchers
from tests.support.attention import Attending
from tests.support.conversion_models import Calls, deep, mlp

BITS = [None, 4, 2]

SMALL: dict[str, Any] = {"sparsities": [0.5], "bits": [None, 4]}


def square(model: nn.Module) -> Any:
    return lambda x: model(x).square().mean()


def token_mixing() -> nn.Module:
    forward = lambda model, x: model.mix(model.norm(x).transpose(1, 2)).transpose(1, 2)  # noqa: E731
    return Calls(forward, norm=nn.LayerNorm(70), mix=nn.Linear(40, 40))


def twice() -> nn.Module:
    """Return one layer called twice, and one of which only the first of two calls reaches the loss."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        out = model.once(model.shared(torch.tanh(model.shared(x))))
        model.once(out)
        return out

    return Calls(forward, shared=nn.Linear(66, 66), once=nn.Linear(66, 66))


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "three": (deep, (3, 5, 65)),
    "token mixing": (token_mixing, (3, 40, 70)),
    "called twice": (twice, (4, 3, 66)),
    "self-attention": (lambda: Attending(batch_first=True), (3, 6, 64)),
    "own weights": (lambda: Attending(crossed=True, kdim=64, vdim=64, bias=False, batch_first=True), (3, 6, 64)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(6, 8, 3, padding="same"), nn.Conv2d(8, 4, 2, 2)), (2, 6, 9, 8)),
}
"""Models and the shapes of their inputs."""


def gradients(model: nn.Module, x: Tensor, autocast: bool) -> dict[str, Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        square(model)(x).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def compared(exact: Tensor, pruned: Tensor) -> tuple[float, float]:
    exact, pruned = exact.double().flatten(), pruned.double().flatten()
    return float(exact @ pruned / (exact.norm() * pruned.norm())), float(pruned.norm() / exact.norm())


@pytest.mark.parametrize(
    ("kind", "autocast", "options"),
    [
        ("three", False, {}),
        ("three", False, {"topk_over": "token"}),
        ("three", False, {"selection": "swap"}),
        ("called twice", False, {"selection": "unbiased"}),
        ("token mixing", True, {}),
        ("own weights", True, {}),
        ("convolution", False, {}),
    ],
)
def test_what_is_measured_is_what_training_does(kind: str, autocast: bool, options: dict[str, str]):
    make, shape = MODELS[kind]
    model, options = make(), {"block_size": 16, **options}
    batches = [torch.randn(shape) for _ in range(1 if "selection" in options else 2)]

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return square(model)(x)

    def measure(**change: str) -> SensitivityReport:
        return measure_sensitivity(model, loss, batches, sparsities=[0, 0.5], bits=BITS, names="*", **options | change)

    found = measure()
    assert found.skipped == []
    assert found.batches == len(batches)
    assert len(found.rows) == 6 * len({row.fqn for row in found.rows})
    if "selection" in options:  # random, and the same again
        assert found == measure()
        assert found.rows != measure(selection="largest").rows
    # Training rounds gradients of 16-bit products once more, to 8 bits: each value is off by 2^-9 at most, so the
    # cosine by half the square of that, and once for each of both gradients. In fp32 only sums differ in their order.
    tolerance = 2**-9 if autocast else 1e-5
    exact, trained = [gradients(model, x, autocast) for x in batches], {}
    for setting in {(row.sparsity, row.bits) for row in found.rows} - {(0, None)}:
        pruned_model = copy.deepcopy(model)
        keep = Keep(sparsity=setting[0], bits=setting[1], min_rows_for_low_bits=0, **options)
        convert(pruned_model, rules={"type:linear": keep, "type:convolution": keep, "*": None})
        trained[setting] = [gradients(pruned_model, x, autocast) for x in batches]
    for row in found.rows:
        if row.sparsity == 0 and row.bits is None:
            assert (row.cosine, row.norm_ratio, row.stored_share) == (pytest.approx(1), pytest.approx(1), 1)
            continue
        parameters = model.get_submodule(row.fqn).named_parameters(recurse=False)
        names = [f"{row.fqn}.{name}" for name, _ in parameters if name.endswith("weight")]
        both = exact, trained[row.sparsity, row.bits]
        expected = compared(*(torch.cat([g[name].flatten() for g in grads for name in names]) for grads in both))
        assert (row.cosine, row.norm_ratio) == pytest.approx(expected, abs=tolerance), row


def test_a_batch_that_is_not_finite_does_not_count():
    model, good = mlp(), torch.randn(6, 65)
    bad = good.clone()
    bad[0, 0] = float("inf")
    alone = measure_sensitivity(model, square(model), [good], **SMALL).rows
    assert measure_sensitivity(model, square(model), [bad, good], **SMALL).rows == alone
    assert measure_sensitivity(model, square(model), [bad], **SMALL).rows == []


@pytest.mark.parametrize("kind", ["self-attention", "convolution"])
def test_pruned_models_are_measured_as_they_would_be_dense(kind):
    make, shape = MODELS[kind]
    dense, x = make(), torch.randn(shape)
    pruned, options = copy.deepcopy(dense), SMALL | {"names": "*"}
    keep = Keep(4, 0.7, min_rows_for_low_bits=0)
    convert(pruned, rules={"type:linear": keep, "type:convolution": keep, "*": None})
    kinds = [type(module) for module in pruned.modules()]
    expected = measure_sensitivity(dense, square(dense), [x], **options)
    found = measure_sensitivity(pruned, square(pruned), [x], **options)
    assert (found.skipped, len(found.rows)) == (expected.skipped, len(expected.rows))
    for row, other in zip(found.rows, expected.rows, strict=True):
        assert row == dataclasses.replace(other, cosine=row.cosine, norm_ratio=row.norm_ratio)
        # Input gradients of pruned convolutions and linear layers are those of the dense ones up to rounding.
        assert (row.cosine, row.norm_ratio) == pytest.approx((other.cosine, other.norm_ratio), abs=1e-5)
    assert [type(module) for module in pruned.modules()] == kinds


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"sparsities": []}, ValueError),
        ({"sparsities": 0.5}, TypeError),
        ({"sparsities": [1.0]}, ValueError),
        ({"bits": 4}, TypeError),
        ({"bits": [5]}, ValueError),
        ({"names": [3]}, TypeError),
        ({"names": "fc3"}, ValueError),
        ({"block_size": 4}, ValueError),
        ({"topk_over": "all"}, ValueError),
        ({"seed": 0.5}, TypeError),
        ({"batches": []}, ValueError),
        ({"loss": lambda x: 1.0}, TypeError),
        ({"loss": lambda x: x.sum()}, ValueError),
    ],
)
def test_errors_name_the_argument(options, error):
    model = mlp()
    given = {"loss": square(model), "batches": [torch.ones(2, 65)]} | options
    with pytest.raises(error, match=f"`{next(iter(options))}`"):
        measure_sensitivity(model, given.pop("loss"), given.pop("batches"), **given)
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
        measure_sensitivity(model, loss, [x], **SMALL)
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
    found = measure_sensitivity(model, lambda x: model(x), [torch.randn(4, 64)], **SMALL)
    assert {row.fqn for row in found.rows} == {"used"}
    reasons = {layer.fqn: layer.reason for layer in found.skipped}
    assert reasons["frozen"] == "its weight is frozen"
    assert reasons["idle"] == "it was not called"
    assert reasons["small"].startswith("has 8 input features, fewer than 64")
    assert reasons["wide"].startswith("its input is float64")
    assert reasons["zero"] == "its weight gradient was zero or not finite"
    assert measure_sensitivity(model, model, [torch.randn(4, 64)], bits=[None], names="wide").rows


# What it suggests and shows.

SETTINGS = [(None, 0.0), (None, 0.5), (None, 0.8), (4, 0.0), (4, 0.5)]


COSINES = {"fc1": (1, 0.92, 0.7, 0.98, 0.91), "fc2": (1, 0.99, 0.95, 0.99, 0.98), "head": (1, 0.5, 0.2, 0.97, 0.5)}


def test_what_keeps_the_fewest_bytes_and_is_good_enough():
    names = [*(f"blocks.{n}.{name}" for n in range(3) for name in ("fc1", "fc2")), "head"]
    rows = [
        LayerSensitivity(fqn, "Linear", sparsity, bits, cosine, cosine, sparsity, (0.3 if bits else 1) * (1 - sparsity))
        for fqn in names
        for (bits, sparsity), cosine in zip(SETTINGS, COSINES[fqn.split(".")[-1]], strict=True)
    ]
    grid = SensitivityGrid([0, 0.5, 0.8], [None, 4])
    found = SensitivityReport(rows, [], 2, grid, {name: name for name in names})
    half, all_blocks = (Keep(4, sparsity, 32, "sample", "largest", 1.0, 0) for sparsity in (0.5, 0.0))
    assert found.suggest() == {"blocks.*.fc1": half, "blocks.*.fc2": half, "head": all_blocks}
    assert found.suggest(0.96) == {"blocks.*.fc1": all_blocks, "blocks.*.fc2": half, "head": all_blocks}
    assert found.suggest(1.0) == {"blocks.*.fc1": None, "blocks.*.fc2": None, "head": None}


@pytest.mark.parametrize(
    ("wanted", "patterns"),
    [
        ({"b.0.x": 1, "b.1.x": 1, "b.10.x": 1, "c": 1}, {"b.*.x": 1, "c": 1}),
        ({"b.0.x": 1, "b.1.x": 2, "b.2.x": 1}, {"b.0.x": 1, "b.1.x": 2, "b.2.x": 1}),
        ({"b.0.x": 1, "b.1.x": None}, {"b.0.x": 1}),
        ({"b.0.x": 1, "b.1.x": 1, "b.1.y.x": 2}, {"b.0.x": 1, "b.1.x": 1, "b.1.y.x": 2}),  # a star matches b.1.y.x
        ({"s.0.b.0.x": 1, "s.0.b.1.x": 1, "s.1.b.0.x": 2}, {"s.0.b.*.x": 1, "s.1.b.0.x": 2}),
        ({"s.0.b.0.x": 1, "s.1.b.0.x": 1, "s.0.b.1.x": 2, "s.1.b.1.x": 2}, {"s.*.b.0.x": 1, "s.*.b.1.x": 2}),
        ({"0": 1, "2": 1}, {"0": 1, "2": 1}),  # no star alone, which matches everything
        ({"b[0].1": 1, "b[0].2": 1}, {"b[[]0].*": 1}),
        ({}, {}),
    ],
)
def test_patterns_say_what_was_wanted(wanted, patterns):
    assert grouped(wanted, [name for name, value in wanted.items() if value is not None]) == patterns
    for name, value in wanted.items():
        assert {found for pattern, found in patterns.items() if fnmatchcase(name, pattern)} <= {value} - {None} or {}
        assert value is None or any(fnmatchcase(name, pattern) for pattern in patterns)


def test_suggestions_are_rules_of_convert():
    model = nn.ModuleDict({"first": nn.Linear(64, 64), "out": nn.Linear(64, 64)})
    model["again"] = model["first"]

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model["out"](model["again"](model["first"](x)).relu()).square().sum()

    rules = measure_sensitivity(model, loss, [torch.randn(8, 64)], sparsities=[0.5], bits=[4]).suggest(0.1)
    assert list(rules) == ["first", "out"]
    assert {layer.fqn: layer.keep for layer in convert(model, rules=rules).converted} == rules
