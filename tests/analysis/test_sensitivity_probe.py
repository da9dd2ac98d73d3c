"""Which calls of which layers a measurement of sensitivity sees, and that it leaves nothing behind."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_actprune import convert, measure_sensitivity
from lightning_actprune.analysis.sensitivity import SensitivityProbe
from lightning_actprune.analysis.sensitivity_grid import SensitivityGrid
from lightning_actprune.operators.attention import Projection, watchers
from tests.support.conversion_models import deep, mlp
from tests.support.sensitivity_models import SMALL, Checkpointed, Twice, gradients, square


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
    assert "_state" not in {name for module in model.modules() for name in vars(module)}


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
    assert reasons["idle"] == "it was not called"
    assert reasons["small"].startswith("has 8 input features, fewer than 64")
    assert reasons["wide"].startswith("its input is float64")
    assert reasons["zero"] == "its weight gradient was zero or not finite"
    assert measure_sensitivity(model, model, [torch.randn(4, 64)], bits=[None], names="wide").rows


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(reentrant):
    model, x, grid = Checkpointed(reentrant), torch.randn(6, 65), SensitivityGrid([0.5], [None], 16)
    with SensitivityProbe(model, grid) as probe:
        square(model)(x).backward()
    alone = {"sparsities": [0.5], "bits": [None], "block_size": 16}
    expected = measure_sensitivity(model.body, square(model.body), [x], **alone)
    assert [row.cosine for row in probe.report().rows] == pytest.approx([row.cosine for row in expected.rows])


def test_calls_that_show_nothing_have_the_reason():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reentrant, self.after, self.unrecorded, self.apart, self.empty = (nn.Linear(64, 64) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            y = self.after(checkpoint(self.reentrant, x, use_reentrant=True))
            with torch.no_grad():
                unrecorded = self.unrecorded(x)
            self.apart(x)
            return (y + unrecorded).square().sum() + self.empty(x[:0]).sum()

    model, x = Model(), torch.randn(4, 64, requires_grad=True)
    found = measure_sensitivity(model, model, [x], **SMALL)
    assert {row.fqn for row in found.rows} == {"after"}
    reasons = {layer.fqn: layer.reason for layer in found.skipped}
    assert reasons["reentrant"].startswith("it runs inside a reentrant activation checkpoint")
    assert reasons["unrecorded"] == "it was called only where no gradients are recorded"
    assert reasons["apart"] == "no gradient of its output came: the loss does not depend on it"
    assert reasons["empty"] == "its inputs were empty"
    with SensitivityProbe(model, SensitivityGrid(**SMALL)) as probe:
        model(x).backward()
    probe.add_up(lambda sums: sums)  # as other ranks, which measured nothing else
    assert {row.fqn for row in probe.report().rows} == {"after", "reentrant"}
    assert reasons["apart"] in {layer.reason for layer in probe.report().skipped}


@pytest.mark.parametrize("kind", ["convolution", "Conv1D"])
def test_an_output_that_is_a_view_may_be_changed_in_place(kind, conv1d):
    layer, x = (
        (nn.Conv2d(4, 6, 3), torch.randn(4, 9, 8)) if kind == "convolution" else (conv1d(6, 70), torch.randn(3, 5, 70))
    )
    assert layer(x)._is_view()
    grid = SMALL | {"names": "*"}
    found, expected = (
        measure_sensitivity(model, square(model), [x], **grid).rows
        for model in (nn.Sequential(layer, nn.ReLU(inplace=inplace)) for inplace in (True, False))
    )
    assert found == expected
    assert len(found) == 2


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


class Cut(torch.autograd.Function):
    """No gradient arrives behind it."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad_y):
        return None


def test_a_call_without_a_gradient_is_left_out():
    model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 8)])
    x = torch.randn(8, 64)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model[1](model[0](x) + Cut.apply(model[0](2 * x))).square().sum()

    def alone(x: torch.Tensor) -> torch.Tensor:
        return model[1](model[0](x) + model[0](2 * x).detach()).square().sum()

    found, wanted = (measure_sensitivity(model, each, [x], sparsities=[0.5]).rows for each in (loss, alone))
    assert [row.cosine for row in found] == [row.cosine for row in wanted]


def test_probes_that_close_in_any_order_leave_the_compiler_alone():
    first, second = (SensitivityProbe(nn.Sequential(nn.Linear(64, 8)), SensitivityGrid([0.5])) for _ in range(2))
    before = torch._dynamo.eval_frame._stance.stance
    for probe in (first, second):
        probe.__enter__()
    assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    for probe in (first, second):
        probe.close()
    assert torch._dynamo.eval_frame._stance.stance == before


def test_inputs_are_let_go_of_though_the_graph_lives():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    convert(model, sparsity=0.5)
    probe = SensitivityProbe(model, SensitivityGrid([0.5]))
    with probe:
        x = torch.randn(8, 64)
        y = model(x)
        seen = weakref.ref(x)
        del x
    assert seen() is None
    y.sum().backward()


def test_buffers_are_as_they_were():
    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 8)
            self.register_buffer("shared", torch.ones(1).expand(8))
            self.register_buffer("cache", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache = x.detach().mean()
            self.register_buffer("late", torch.ones(2), persistent=False)
            return self.layer(x) * self.shared

    model = Caching()
    measure_sensitivity(model, lambda x: model(x).square().sum(), [torch.randn(8, 64)], sparsities=[0.5])
    assert model.cache is None
    assert list(model._buffers) == ["shared", "cache"]
    assert not model._non_persistent_buffers_set


def test_attention_of_another_model_is_not_measured_nor_does_it_get_between(monkeypatch):
    """As it may in another thread, whose projections every probe is told of."""
    torch.manual_seed(0)
    model, other = (nn.MultiheadAttention(64, 2) for _ in range(2))
    x, grid = torch.randn(5, 4, 64), SensitivityGrid([0.5], [4], names=["(root)", "out_proj"])
    convert(other, sparsity=0.5)

    def rows() -> list[Any]:
        with SensitivityProbe(model, grid) as probe:
            model(x, x, x, need_weights=False)[0].square().sum().backward()
        return probe.report().rows

    alone = rows()
    own = Projection.linear

    def interrupted(self: Projection, *args: Any) -> Tensor:
        if self.layer not in other.modules():
            other(x, x, x)
        return own(self, *args)

    monkeypatch.setattr(Projection, "linear", interrupted)
    assert rows() == alone
    assert {row.fqn for row in alone} == {"(root)", "out_proj"}
