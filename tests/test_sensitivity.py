"""Cosines and norm ratios of pruned weight gradients: what they are, of which layers, and that no trace is left."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_actprune import SensitivityGrid, SensitivityProbe, convert, functional, measure_sensitivity
from lightning_actprune.nn.attention import watchers
from tests import oracle
from tests.conversion_models import TwoNames, deep, mlp

FORMATS = ["same", "int4", "int2"]
SMALL: dict[str, Any] = {"sparsities": [0.5], "value_formats": ["same", "int4"]}


def square(model: nn.Module) -> Any:
    return lambda x: model(x).square().mean()


def compared(exact: Tensor, pruned: Tensor) -> tuple[float, float]:
    exact, pruned = exact.double().flatten(), pruned.double().flatten()
    return float(exact @ pruned / (exact.norm() * pruned.norm())), float(pruned.norm() / exact.norm())


class TokenMixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(70), nn.Linear(40, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, batch_first: bool, crossed: bool, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=batch_first, **options)
        self.crossed = crossed

    def forward(self, x: Tensor) -> Tensor:
        other = x.roll(1, 0) if self.crossed else x
        return self.attention(x, other, other, need_weights=False)[0]


class Twice(nn.Module):
    """One layer called twice, and one of which only the first of two calls reaches the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.once = nn.Linear(66, 66), nn.Linear(66, 66)

    def forward(self, x: Tensor) -> Tensor:
        y = self.shared(torch.tanh(self.shared(x)))
        out = self.once(y)
        self.once(out)
        return out


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body, self.reentrant = mlp(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x.requires_grad_(), use_reentrant=self.reentrant)


# Models with an input of theirs.
MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "two dimensions": (mlp, (6, 65)),
    "three": (deep, (3, 5, 65)),
    "token mixing": (TokenMixing, (3, 40, 70)),
    "two names": (TwoNames, (4, 3, 65)),
    "called twice": (Twice, (4, 3, 66)),
    "inplace": (lambda: nn.Sequential(nn.Linear(65, 70), nn.ReLU(inplace=True), nn.Linear(70, 5)), (4, 65)),
    "self-attention": (lambda: Attention(True, False), (3, 6, 64)),
    "cross-attention": (lambda: Attention(False, True), (3, 6, 64)),
    "own weights": (lambda: Attention(True, True, kdim=64, vdim=64, bias=False), (3, 6, 64)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(6, 8, 3, padding="same"), nn.Conv2d(8, 4, 2, 2)), (2, 6, 9, 8)),
}


def gradients(model: nn.Module, x: Tensor, autocast: bool) -> dict[str, Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        square(model)(x).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


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
    options = {"block_size": 16, "min_features": 0}

    def loss(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return square(model)(x)

    found = measure_sensitivity(
        model, loss, [x], sparsities=[0, 0.5], value_formats=FORMATS, convolutions=True, **options
    )
    assert found.skipped == []
    assert len(found.rows) == 6 * len({row.fqn for row in found.rows})
    exact = gradients(model, x, autocast)
    # Training rounds gradients of 16-bit products once more, to 8 bits: each value is off by 2^-9 at most, so the
    # cosine by half the square of that, and once for each of both gradients. In fp32 only sums differ in their order.
    tolerance = 2**-9 if autocast else 1e-5
    trained = {}
    for setting in {(row.sparsity, row.value_format) for row in found.rows} - {(0, "same")}:
        pruned_model = copy.deepcopy(model)
        others = {"convolution": setting[1]} if kind == "convolution" else False
        convert(pruned_model, setting[0], value_format=setting[1], others=others, **options)
        trained[setting] = gradients(pruned_model, x, autocast)
    for row in found.rows:
        if row.sparsity == 0 and row.value_format == "same":
            assert (row.cosine, row.norm_ratio, row.stored_share) == (pytest.approx(1), pytest.approx(1), 1)
            continue
        names = parameters_of(model, row.fqn)
        both = exact, trained[row.sparsity, row.value_format]
        expected = compared(*(torch.cat([grads[name].flatten() for name in names]) for grads in both))
        assert (row.cosine, row.norm_ratio) == pytest.approx(expected, abs=tolerance), row


@pytest.mark.parametrize("scope", ["sample", "token"])
def test_linear_layers_agree_with_the_oracle(scope):
    model, batches = mlp().double(), [torch.randn(3, 5, 65).double() for _ in range(2)]
    grid = {"sparsities": [0.3, 0.8], "value_formats": ["same"], "block_size": 16, "scope": scope}
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
    for row in measure_sensitivity(model, square(model), [x], sparsities=[0, 0.5], value_formats=FORMATS).rows:
        packed = functional.pack(x, sparsity=row.sparsity, value_format=row.value_format)
        dense = row.sparsity == 0 and row.value_format == "same"
        assert row.stored_share == (1 if dense else packed.nbytes / x.nbytes)
        kept = functional.pack(x, sparsity=row.sparsity).unpack().square().sum() / x.square().sum()
        assert row.dropped_energy == pytest.approx(1 - kept.item(), abs=1e-5)


@pytest.mark.parametrize("selection", ["swap", "unbiased"])
def test_random_selections_are_measured_and_repeat(selection):
    model, x = mlp(), torch.randn(6, 5, 65)
    grid = {"sparsities": [0.5], "block_size": 16, "block_selection": selection}
    first = measure_sensitivity(model, square(model), [x], **grid)
    assert first == measure_sensitivity(model, square(model), [x], **grid)
    assert first.rows != measure_sensitivity(model, square(model), [x], sparsities=[0.5], block_size=16).rows


def noisy() -> nn.Sequential:
    return nn.Sequential(nn.Linear(65, 70), nn.BatchNorm1d(70), nn.Dropout(0.5), nn.Linear(70, 3))


def state(model: nn.Module) -> Any:
    values = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), type(m), m.training) for m in model.modules()]
    return values, hooks, [p.grad for p in model.parameters()], torch.get_rng_state(), len(watchers)


def assert_same(now: Any, then: Any) -> None:
    torch.testing.assert_close(now[0], then[0], rtol=0, atol=0)
    assert now[1] == then[1]
    assert all(a is b for a, b in zip(now[2], then[2], strict=True))
    assert torch.equal(now[3], then[3])
    assert now[4] == then[4]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails):
    model = nn.Sequential(noisy(), nn.Linear(3, 64), nn.TransformerEncoderLayer(64, 2, 70, batch_first=True))
    x = torch.randn(4, 65)
    square(model)(x).backward()
    model[0][1].eval()
    before = state(model)
    values = [p.grad.clone() for p in model.parameters()]

    def loss(x: Tensor) -> Tensor:
        model.train()
        found = square(model)(x)
        if fails:
            raise KeyError("mine")
        return found

    if fails:
        with pytest.raises(KeyError, match="mine"):
            measure_sensitivity(model, loss, [x], **SMALL)
    else:
        measure_sensitivity(model, loss, [x], **SMALL)
    assert_same(state(model), before)
    torch.testing.assert_close([p.grad for p in model.parameters()], values, rtol=0, atol=0)
    assert "_pruning" not in {name for module in model.modules() for name in vars(module)}


def test_global_random_numbers_are_put_back_and_do_not_matter():
    model, x = noisy(), torch.randn(6, 65)
    torch.manual_seed(1)
    first = measure_sensitivity(model, square(model), [x], **SMALL)
    one = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), one)
    assert measure_sensitivity(model, square(model), [x], **SMALL) == first
    assert measure_sensitivity(model, square(model), [x], seed=1, **SMALL) != first


def test_layers_that_cannot_be_measured_are_listed_with_the_reason():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.frozen, self.idle = (nn.Linear(64, 64) for _ in range(3))
            self.small, self.wide, self.zero = nn.Linear(8, 64), nn.Linear(64, 4).double(), nn.Linear(64, 64)
            self.frozen.weight.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.frozen(self.used(x)) + self.small(x[..., :8])
            return y.sum() + self.wide(y.double()).sum() + self.zero(y * 0).square().sum() * 0

    model = Model()
    found = measure_sensitivity(model, lambda x: model(x), [torch.randn(4, 64)], **SMALL)
    assert {row.fqn for row in found.rows} == {"used"}
    reasons = {layer.fqn: layer.reason for layer in found.skipped}
    assert reasons["frozen"] == "its weight is frozen"
    assert reasons["idle"].startswith("was not called")
    assert reasons["small"].startswith("in_features=8 is below min_features=64")
    assert reasons["wide"].startswith("its input is float64")
    assert reasons["zero"] == "its weight gradient was zero or not finite"
    assert measure_sensitivity(model, model, [torch.randn(4, 64)], value_formats=["same"], include="wide").rows


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
    pruned, options = copy.deepcopy(dense), SMALL | {"convolutions": True}
    others = {"convolution": "same"} if kind == "convolution" else False
    convert(pruned, 0.7, value_format="int4", others=others)
    kinds = [type(module) for module in pruned.modules()]
    expected = measure_sensitivity(dense, square(dense), [x], **options)
    found = measure_sensitivity(pruned, square(pruned), [x], **options)
    assert (found.skipped, len(found.rows)) == (expected.skipped, len(expected.rows))
    for row, other in zip(found.rows, expected.rows, strict=True):
        assert row == dataclasses.replace(other, cosine=row.cosine, norm_ratio=row.norm_ratio)
        # Input gradients of pruned convolutions and linear layers are those of the dense ones up to rounding.
        assert (row.cosine, row.norm_ratio) == pytest.approx((other.cosine, other.norm_ratio), abs=1e-5)
    assert [type(module) for module in pruned.modules()] == kinds


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(reentrant):
    model, x, grid = Checkpointed(reentrant), torch.randn(6, 65), SensitivityGrid([0.5], ["same"], 16)
    with SensitivityProbe(model, grid) as probe:
        square(model)(x).backward()
    alone = {"sparsities": [0.5], "value_formats": ["same"], "block_size": 16}
    expected = measure_sensitivity(model.body, square(model.body), [x], **alone)
    assert [row.cosine for row in probe.report().rows] == pytest.approx([row.cosine for row in expected.rows])


def test_what_comes_after_the_probe_was_closed_does_not_count():
    model, x = mlp(), torch.randn(6, 65)
    with SensitivityProbe(model, SensitivityGrid(**SMALL)) as probe:
        loss = square(model)(x)
    loss.backward()
    assert probe.report().rows == []
    with probe:
        loss = square(model)(x)
        loss.backward(retain_graph=True)
        loss.backward()
    assert probe.report().rows == measure_sensitivity(model, square(model), [x], **SMALL).rows


def test_steps_inside_the_probe_are_those_without_it():
    model, x = deep(), torch.randn(4, 3, 65)
    expected = gradients(model, x, False)
    model.blocks[0].fc1.register_forward_hook(lambda module, args, y: y * 1.0)
    with SensitivityProbe(model, SensitivityGrid(**SMALL)) as probe:
        found = gradients(model, x, False)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    first = probe.report()
    gradients(model, x, False)  # outside
    assert probe.report() == first
    assert first.rows == measure_sensitivity(model, square(model), [x], **SMALL).rows


def test_compiled_modules_run_eagerly_for_the_time_being():
    model, x = Twice(), torch.randn(4, 3, 66)
    expected = measure_sensitivity(model, square(model), [x], **SMALL).rows
    graphs: list[Any] = []
    compiled = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    assert measure_sensitivity(compiled, square(compiled), [x], **SMALL).rows == expected
    assert graphs == []
    compiled(x)
    assert len(graphs) == 1


def test_unused_calls_and_no_grad_calls_do_not_keep_a_layer_waiting():
    model, x = mlp(), torch.randn(6, 65)

    def loss(x: Tensor) -> Tensor:
        with torch.no_grad():
            model(x)
        return square(model)(x)

    expected = measure_sensitivity(model, square(model), [x], **SMALL).rows
    assert measure_sensitivity(model, loss, [x], **SMALL).rows == expected


def test_empty_batches_keyword_inputs_and_conv1d(conv1d):
    model = nn.Sequential(conv1d(4, 70))
    assert measure_sensitivity(model, lambda x: model(x).sum(), [torch.ones(0, 70)]).rows == []
    layer = nn.Linear(70, 4)
    layer.load_state_dict({"weight": model[0].weight.T, "bias": model[0].bias})
    given = torch.randn(5, 3, 70)
    linear = measure_sensitivity(layer, lambda x: layer(input=x).square().mean(), [given], **SMALL)
    turned = measure_sensitivity(model, square(model), [given], **SMALL)
    assert [row.fqn for row in turned.rows] == ["0"] * 2
    assert [row.fqn for row in linear.rows] == ["(root)"] * 2
    assert [row.cosine for row in turned.rows] == pytest.approx([row.cosine for row in linear.rows])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sparsities": []}, ValueError, "`sparsities` must name at least one"),
        ({"sparsities": 0.5}, TypeError, "`sparsities` must be a list"),
        ({"sparsities": [1.0]}, ValueError, r"`sparsities` must be in \[0, 1\)"),
        ({"value_formats": "int4"}, TypeError, "`value_formats` must be a list"),
        ({"value_formats": ["int5"]}, ValueError, "`value_format` must be one of"),
        ({"block_size": 4}, ValueError, "`block_size` must be at least 8"),
        ({"scope": "all"}, ValueError, "`scope` must be"),
        ({"include": "fc3"}, ValueError, "`include` pattern 'fc3' matches no layer.*fc1, fc2"),
        ({"exclude": ["fc1", "fc2"]}, ValueError, "(?s)No layer of Sequential can be measured.*HINT"),
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
    grid = SensitivityGrid([0.5], ["same", "int4"], block_size=16, min_features=0, convolutions=True)
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
        assert row.cosine == pytest.approx(other.cosine, abs=1e-4 if row.value_format == "same" else 3e-3)
