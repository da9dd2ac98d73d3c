"""Pruned layers inside activation checkpoints: the gradients without one bit for bit, and its memory to the byte."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_actprune import ActivationPruning, HolderProbe, convert
from lightning_actprune.footprint import SavedTensorMeter
from tests.allocated import growth
from tests.checkpointing import WAYS, Region
from tests.helpers import FEATURES, Net, trainer

pytestmark = pytest.mark.filterwarnings("ignore:Please specify CheckpointImpl:FutureWarning")
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
each_form = pytest.mark.parametrize("reentrant", [False, True])


class Shared(nn.Module):
    """Query, key and value of one tensor, and an output projection behind a ReLU, which holds its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.out(F.relu(self.q(y) * self.k(y) + self.v(y)))


class Attention(nn.Module):
    """``nn.MultiheadAttention`` on one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 96), nn.Dropout(0.4), nn.GELU(), nn.Linear(96, 64), nn.Dropout(0.1))


def torch_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 96, batch_first=True)


INNER = [Shared, Attention, dropout, torch_layer]


def made(make: Callable[[], nn.Module], way=lambda module: module) -> nn.Sequential:
    """Return a pruned model of two regions between plain layers, the same for every ``way`` to checkpoint them."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), make(), nn.GELU(), make(), nn.GELU(), nn.Linear(64, 8))
    convert(model, sparsity=0.6, block_size=16)
    model[2], model[4] = way(model[2]), way(model[4])
    return model


def step(model: nn.Module, probed: bool = False, autocast: bool = False) -> list[Tensor]:
    """Return loss and gradients of one training step, the first of a fit or a later one."""
    torch.manual_seed(2)
    model.zero_grad(set_to_none=True)
    x = torch.randn(3, 10, 64)
    with HolderProbe(model, x) if probed else nullcontext():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x).float().square().mean()
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@every_way
@pytest.mark.parametrize("make", INNER)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_gradients_are_those_without_a_checkpoint(make, way, autocast: bool):
    plain, checkpointed = made(make), made(make, way)
    expected = step(plain, autocast=autocast)
    torch.testing.assert_close(step(checkpointed, autocast=autocast), expected, rtol=0, atol=0)
    assert all(bool(grad.any()) for grad in expected)


@every_way
@pytest.mark.parametrize("make", [Shared, Attention])
def test_gradients_in_the_probed_step(make, way):
    """The probe lets held layers run dense, but not in one of the two runs of a region."""
    plain, checkpointed = made(make), made(make, way)
    expected = step(plain)
    found = step(checkpointed, probed=True)
    held = "0.weight"  # reads the batch, so that it ran dense
    for (name, _), ours, theirs in zip(plain.named_parameters(), found[1:], expected[1:], strict=True):
        assert torch.equal(ours, theirs) == (name != held), name
    torch.testing.assert_close(step(checkpointed), expected, rtol=0, atol=0)  # and later steps are pruned as before


@each_form
def test_regions_within_a_region_in_fp64(reentrant: bool):
    inner = made(Shared).double()
    x = torch.randn(3, 10, 64, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(inner(x).square().sum(), [x, *inner.parameters()])
    inner.zero_grad()
    for number in (2, 4):
        inner[number] = WAYS["reentrant" if reentrant else "non_reentrant"](inner[number])
    outer = Region(inner, lambda module, y: checkpoint(module, y, use_reentrant=reentrant))
    outer(x).square().sum().backward()
    torch.testing.assert_close((x.grad, *(p.grad for p in inner.parameters())), expected, rtol=0, atol=0)


def test_a_retained_graph_runs_the_region_again_for_each_backward():
    plain, checkpointed = made(Shared), made(Shared, WAYS["non_reentrant"])
    grads = []
    for model in (plain, checkpointed):
        loss = model(torch.ones(3, 10, 64)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


@pytest.mark.parametrize("measured", [False, True])
@each_form
def test_outside_the_region_only_its_input_is_kept(reentrant: bool, measured: bool):
    region = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 8))
    convert(region, sparsity=0.5)
    x = torch.randn(5, 7, 64, requires_grad=True)
    meter = SavedTensorMeter(region, x)

    def forward() -> Tensor:
        h = -x  # saves nothing, so that the region alone holds it
        with meter if measured else nullcontext():
            return checkpoint(region, h, use_reentrant=reentrant, preserve_rng_state=False)

    forward()  # what is set up lazily
    y, nbytes = growth(forward)
    assert nbytes == x.nbytes + y.nbytes
    if measured:
        report = meter.report()
        assert (report.rows, report.other_bytes) == ([], 2 * x.nbytes)  # of the two forwards
    y.sum().backward()
    assert x.grad is not None


@each_form
def test_the_meter_does_not_count_what_runs_again_in_backward(reentrant: bool):
    model, x = made(Shared, WAYS["reentrant" if reentrant else "non_reentrant"]), torch.randn(3, 10, 64)
    totals = []
    for backward_inside in (False, True):
        with SavedTensorMeter(model, x) as meter:
            loss = model(x).sum()
            if backward_inside:
                loss.backward()
        totals.append(meter.report())
    assert totals[0] == totals[1]
    assert [row.fqn for row in totals[1].rows] == ["0", "6"]


@each_form
@pytest.mark.filterwarnings("ignore:.*run only inside an activation checkpoint")
def test_a_fit_with_checkpoints_ends_where_one_without_does(reentrant: bool):
    class Checkpointed(Net):
        checkpointed = True

        def forward(self, x: Tensor) -> Tensor:
            h = F.gelu(self.stem(F.layer_norm(x, (FEATURES,))))
            h = checkpoint(self.body, h, use_reentrant=reentrant) if self.checkpointed else self.body(h)
            return self.head(h).mean(1)

        def make(self) -> None:
            super().make()
            self.stem = nn.Linear(FEATURES, FEATURES)

    weights = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = Checkpointed(lr=0.5)
        model.checkpointed = checkpointed
        callback = ActivationPruning(sparsity=0.7, verbose=False)
        trainer(callback, max_epochs=2).fit(model)
        assert callback.skipped == []  # or the two would differ in what they prune
        weights.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)
