"""Cosines and norm ratios of pruned weight gradients: the figures, and what is asked for in a wrong way."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import Keep, convert, functional, measure_sensitivity
from lightning_actprune.analysis.sensitivity import SensitivityProbe
from lightning_actprune.analysis.sensitivity_grid import SensitivityGrid
from lightning_actprune.operators.attention import watchers
from tests.support import oracle
from tests.support.conversion_models import mlp
from tests.support.sensitivity_models import BITS, MODELS, SMALL, gradients, square


def compared(exact: Tensor, pruned: Tensor) -> tuple[float, float]:
    exact, pruned = exact.double().flatten(), pruned.double().flatten()
    return float(exact @ pruned / (exact.norm() * pruned.norm())), float(pruned.norm() / exact.norm())


def parameters_of(model: nn.Module, fqn: str) -> list[str]:
    layer = model.get_submodule(fqn)
    if isinstance(layer, nn.MultiheadAttention):
        return [f"{fqn}.{name}" for name, _ in layer.named_parameters(recurse=False) if name.endswith("weight")]
    return [f"{fqn}.weight"]


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16-autocast"])
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_measured_is_what_training_does(kind, autocast):
    make, shape = MODELS[kind]
    x, model = torch.randn(shape), make()

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return square(model)(x)

    found = measure_sensitivity(model, loss, [x], sparsities=[0, 0.5], bits=BITS, names="*", block_size=16)
    assert found.skipped == []
    assert len(found.rows) == 6 * len({row.fqn for row in found.rows})
    exact = gradients(model, x, autocast)
    # Training rounds gradients of 16-bit products once more, to 8 bits: each value is off by 2^-9 at most, so the
    # cosine by half the square of that, and once for each of both gradients. In fp32 only sums differ in their order.
    tolerance = 2**-9 if autocast else 1e-5
    trained = {}
    for setting in {(row.sparsity, row.bits) for row in found.rows} - {(0, None)}:
        pruned_model = copy.deepcopy(model)
        keep = Keep(sparsity=setting[0], bits=setting[1], block_size=16)
        convert(pruned_model, rules={"type:linear": keep, "type:convolution": keep, "*": None})
        trained[setting] = gradients(pruned_model, x, autocast)
    for row in found.rows:
        if row.sparsity == 0 and row.bits is None:
            assert (row.cosine, row.norm_ratio, row.stored_share) == (pytest.approx(1), pytest.approx(1), 1)
            continue
        names = parameters_of(model, row.fqn)
        both = exact, trained[row.sparsity, row.bits]
        expected = compared(*(torch.cat([grads[name].flatten() for name in names]) for grads in both))
        assert (row.cosine, row.norm_ratio) == pytest.approx(expected, abs=tolerance), row


@pytest.mark.parametrize("scope", ["sample", "token"])
def test_linear_layers_agree_with_the_oracle(scope):
    model, batches = mlp().double(), [torch.randn(3, 5, 65).double() for _ in range(2)]
    grid = {"sparsities": [0.3, 0.8], "bits": [None], "block_size": 16, "scope": scope}
    found = measure_sensitivity(model, square(model), batches, **grid)
    inputs, grads = [], []
    for x in batches:
        first = model.fc1(x)
        hidden = model.act(first)
        second = model.fc2(hidden)
        of_first, of_second = torch.autograd.grad(second.square().mean(), [first, second])
        inputs.append({"fc1": x, "fc2": hidden.detach()})
        grads.append({"fc1": of_first, "fc2": of_second})
    assert [row.fqn for row in found.rows] == ["fc1", "fc1", "fc2", "fc2"]
    assert found.batches == 2
    for row in found.rows:
        both: list[list[Tensor]] = [[], []]
        for x, g in zip(inputs, grads, strict=True):
            samples = oracle.as_samples(x[row.fqn], scope)
            kept = oracle.pruned(samples, 16, row.sparsity)
            for given, total in zip((samples, kept), both, strict=True):
                total.append(g[row.fqn].flatten(0, -2).T @ given.reshape(-1, given.shape[-1]))
        expected = compared(*(torch.stack(total) for total in both))
        assert (row.cosine, row.norm_ratio) == pytest.approx(expected, abs=1e-12)


def test_shares_are_those_of_the_packed_input():
    model, x = nn.Sequential(nn.Linear(80, 4)), torch.randn(3, 5, 80)
    for row in measure_sensitivity(model, square(model), [x], sparsities=[0, 0.5], bits=BITS).rows:
        packed = functional.pack(x, sparsity=row.sparsity, bits=row.bits)
        dense = row.sparsity == 0 and row.bits is None
        assert row.stored_share == (1 if dense else packed.nbytes / x.nbytes)
        kept = functional.pack(x, sparsity=row.sparsity).unpack().square().sum() / x.square().sum()
        assert row.dropped_energy == pytest.approx(1 - kept.item(), abs=1e-5)


@pytest.mark.parametrize("selection", ["swap", "unbiased"])
def test_random_selections_are_measured_and_repeat(selection):
    model, x = mlp(), torch.randn(6, 5, 65)
    blocks = {"block_size": 16, "selection": selection}
    grid = {"sparsities": [0.5], "bits": [4], **blocks}
    first = measure_sensitivity(model, square(model), [x], **grid)
    assert first == measure_sensitivity(model, square(model), [x], **grid)
    assert first.rows != measure_sensitivity(model, square(model), [x], **grid | {"selection": "largest"}).rows
    exact, trained = gradients(model, x, False), copy.deepcopy(model)
    convert(trained, rules={"type:linear": Keep(4, 0.5, **blocks), "*": None})
    made = gradients(trained, x, False)
    for row in first.rows:
        # On a CPU the choice and the rounding are those of training, bit for bit: sums in fp32 are left.
        expected = compared(exact[f"{row.fqn}.weight"], made[f"{row.fqn}.weight"])
        assert (row.cosine, row.norm_ratio) == pytest.approx(expected, abs=1e-5)


def test_a_batch_that_is_not_finite_does_not_count():
    model, good = mlp(), torch.randn(6, 65)
    bad = good.clone()
    bad[0, 0] = float("inf")
    alone = measure_sensitivity(model, square(model), [good], **SMALL).rows
    assert measure_sensitivity(model, square(model), [bad, good], **SMALL).rows == alone
    assert measure_sensitivity(model, square(model), [bad], **SMALL).rows == []


@pytest.mark.parametrize("kind", ["three", "called twice", "self-attention", "convolution"])
def test_pruned_models_are_measured_as_they_would_be_dense(kind):
    make, shape = MODELS[kind]
    dense, x = make(), torch.randn(shape)
    pruned, options = copy.deepcopy(dense), SMALL | {"names": "*"}
    keep = Keep(4, 0.7)
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
    ("options", "error", "message"),
    [
        ({"sparsities": []}, ValueError, "`sparsities` must name at least one"),
        ({"sparsities": 0.5}, TypeError, "`sparsities` must be a list"),
        ({"sparsities": [1.0]}, ValueError, r"`sparsities` must be in \[0, 1\)"),
        ({"bits": 4}, TypeError, "`bits` must be a list"),
        ({"bits": [5]}, ValueError, "`bits` must be 2, 3, 4, 8 or None"),
        ({"names": [3]}, TypeError, "`names` must be patterns"),
        ({"names": "type:norm"}, ValueError, "names no operator that drops blocks"),
        ({"block_size": 4}, ValueError, "`block_size` must be at least 8"),
        ({"scope": "all"}, ValueError, "`scope` must be"),
        ({"names": "fc3"}, ValueError, r"`names` pattern 'fc3' matches no .*fc1, fc2"),
        ({"seed": 0.5}, TypeError, "`seed` must be an int"),
        ({"batches": []}, ValueError, "`batches` must hold at least one"),
        ({"loss": lambda x: 1.0}, TypeError, "`loss` must return a tensor, got float"),
        ({"loss": lambda x: x.sum()}, ValueError, "`loss` must return one number that needs a gradient"),
    ],
)
def test_errors_name_the_argument(options, error, message):
    model = mlp()
    given = {"loss": square(model), "batches": [torch.ones(2, 65)]} | options
    with pytest.raises(error, match=message):
        measure_sensitivity(model, given.pop("loss"), given.pop("batches"), **given)
    assert not watchers


def test_ranks_report_what_any_of_them_has_measured():
    model, batches = mlp(), [torch.randn(6, 65) for _ in range(2)]
    ranks = [SensitivityProbe(model, SensitivityGrid(**SMALL)) for _ in batches]
    summed = torch.zeros(2, 2, 5, dtype=torch.float64)
    for probe, x in zip(ranks, batches, strict=True):
        with probe:
            square(model)(x).backward()
        probe.add_up(lambda sums: summed.add_(sums))
    ranks[0].add_up(lambda sums: summed)
    assert ranks[0].report().rows == ranks[1].report().rows
    assert ranks[0].report().rows == measure_sensitivity(model, square(model), batches, **SMALL).rows
    idle = SensitivityProbe(model, SensitivityGrid(**SMALL))
    idle.add_up(lambda sums: sums)
    assert idle.report().rows == []


def on_device(model: nn.Module, x: Tensor, grid: SensitivityGrid, mode: str) -> list[Any]:
    with SensitivityProbe(model, grid) as probe:
        torch.cuda.set_sync_debug_mode(mode)
        try:
            square(model)(x).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return probe.report().rows


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["three", "token mixing", "self-attention", "convolution"])
def test_on_a_gpu_nothing_waits_and_figures_are_those_of_the_cpu(kind):
    make, shape = MODELS[kind]
    model, x = make(), torch.randn(shape)
    grid = SensitivityGrid([0.5], [None, 4], block_size=16, names="*")
    with SensitivityProbe(model, grid) as probe:
        square(model)(x).backward()
    expected = probe.report().rows
    model, x = model.cuda(), x.cuda()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        on_device(model, x, grid, "default")  # sets up what is set up once
        found = on_device(model, x, grid, "error")
    assert [row.fqn for row in found] == [row.fqn for row in expected]
    for row, other in zip(found, expected, strict=True):
        # fp32 sums in another order. They may give a block another random error of four bits, all of which together
        # cost a cosine at most half the square of a step, a 15th of the range or of four deviations, over 12: .003.
        assert row.cosine == pytest.approx(other.cosine, abs=1e-4 if row.bits is None else 3e-3)
