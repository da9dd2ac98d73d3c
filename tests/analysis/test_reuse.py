"""Models whose linear layers behind norms keep nothing: gradients, what is counted, what is decided."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_actprune.analysis.first_batch import RetentionProbe
from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.config import Keep
from lightning_actprune.convert import convert, revert
from lightning_actprune.operators.base import CompressedLayer
from tests.support import oracle
from tests.support.allocated import growth
from tests.support.recorded import recorded_step


def counted(model: nn.Module, x: torch.Tensor, autocast: bool = False):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), SavedTensorMeter(model, x) as meter:
        y = model(x)
    return meter.report(), y


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_layers_behind_a_norm_keep_nothing_and_only_their_weight_gradients_tell(autocast):
    (reusing, x), results = attention(), []
    own, dense = copy.deepcopy(reusing), copy.deepcopy(reusing)
    revert(dense)
    for layer in own.modules():
        if isinstance(layer, CompressedLayer):
            layer._is_fsdp_managed_module = True
    for model in (dense, reusing, own):
        report, y = counted(model, x, autocast)
        y.float().square().sum().backward()
        results.append((report, {row.fqn: row.stored_bytes for row in report.rows}))
    (_, _), (report, reused), (own_report, packs) = results
    assert {fqn for fqn in packs if packs[fqn] and not reused[fqn]} == {"q", "out"}  # ``k`` and ``v`` share a pack
    assert own_report.stored_bytes - report.stored_bytes == packs["q"] + packs["out"]
    assert all(row.stored_bytes == row.accounted_bytes for row in (*report.rows, *own_report.rows))
    for (name, p), q, exact in zip(reusing.named_parameters(), own.parameters(), dense.parameters(), strict=True):
        if name in ("q.weight", "k.weight", "v.weight", "out.weight"):
            # Four bits are off by a fifth of two.
            errors = [oracle.relative_error(grad, exact.grad) for grad in (p.grad, q.grad)]
            assert errors[0] <= errors[1] + 0.01
        else:
            assert torch.equal(p.grad, q.grad), name


class Attention(nn.Module):
    """Query, key and value of one normalised input, as separate layers, and one that reads what is kept anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second = nn.LayerNorm(64), nn.LayerNorm(64)
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64) for _ in range(4))
        self.late = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        z = self.second(x + torch.nn.functional.gelu(self.q(y) * self.k(y) + self.v(y)))
        return self.out(z) + self.late(torch.relu(x))


def attention(**rules: Keep | None) -> tuple[nn.Module, torch.Tensor]:
    model = Attention()
    convert(model, rules={**rules, "type:linear": Keep(bits=2), "type:norm": Keep(bits=4), "*": None})
    return model, torch.randn(4, 16, 64).requires_grad_()


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_what_is_counted_is_what_is_allocated(autocast):
    model, x = attention()
    report, y = counted(model, x, autocast)
    assert {row.fqn: row.stored_bytes > 0 for row in report.rows} == dict.fromkeys("qkv", False) | {
        "out": False,
        "late": True,
    }
    del y
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, nbytes = growth(lambda: model(x))
    assert nbytes - y.untyped_storage().nbytes() == report.stored_bytes


class Reused(nn.Module):
    """A layer that reads the output of a norm, and seven tensors that something else keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [torch.relu(x + i) for i in range(7)]
        return sum(self.fc(one) for one in (*kept, self.norm(x)))


@pytest.mark.parametrize(("sparsity", "pays"), [(0.0, True), (0.01, False)])
def test_a_pack_that_is_not_made_counts_for_nothing_unless_a_schedule_will_drop_blocks(sparsity, pays):
    model, x = Reused(), torch.randn(4, 16, 64).requires_grad_()
    convert(model, rules={"type:linear": Keep(bits=4), "type:norm": Keep(bits=8), "*": None})
    with RetentionProbe(model, x, sparsity=sparsity) as probe:
        model(x).sum().backward()
    # Of 4 bytes a value freed once, seven packs of four bits add 3.9, and eight 4.5.
    assert [layer.fqn for layer in probe.retained] == ([] if pays else ["fc"])


def test_layers_that_keep_nothing_pay_unless_a_dense_layer_keeps_the_norms_output():
    for rules, names in (({}, {"late"}), ({"k": None}, {"q", "v", "late"})):
        model, x = attention(**rules)
        with RetentionProbe(model, x) as probe:
            model(x).sum().backward()
        reasons = {layer.fqn: layer.reason for layer in probe.retained}
        assert set(reasons) == names  # ReLU keeps the input of ``late``
    assert reasons["q"] == "its input is kept for backward by 'k' (a layer that is dense)"


def test_each_retainer_has_the_operation_that_takes_it_up():
    model, x = attention()
    step = recorded_step(model, x, torch.optim.SGD(model.parameters(), lr=0.1))
    labels = {group.label: group.count for group in step.groups(step.forward_end)}
    layers = " + ".join(f"{name} (linear_function)" for name in ("q", "k"))
    assert labels[f"norm (norm_function) + {layers} + 1 more"] == 1
    assert labels["second (norm_function) + out (linear_function)"] == 1
    assert step.peak_bytes > 0
