"""RecomputationProbe: what runs only inside an activation checkpoint, whatever made that, and nothing else."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu
from torch.utils.checkpoint import checkpoint

from lightning_actprune.analysis.first_batch import RecomputationProbe, RetentionProbe
from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.config import Keep
from lightning_actprune.convert import convert, revert
from tests.support.checkpointing import WAYS
from tests.support.marks import cover, in_turn
from tests.support.retention import converted

INSIDE = ["inside.fc1", "inside.fc2"]

pytestmark = pytest.mark.filterwarnings("ignore:Please specify CheckpointImpl:FutureWarning")


def made(way=lambda module: module, sparsity: float = 0.5) -> nn.Sequential:
    """Return a converted model with a linear layer before, two in, and one after what ``way`` checkpoints."""
    inside = nn.Sequential(OrderedDict(fc1=nn.Linear(64, 96), act=nn.GELU(), fc2=nn.Linear(96, 64)))
    parts = OrderedDict(stem=nn.Linear(64, 64), act=nn.GELU(), inside=inside, norm=nn.LayerNorm(64))
    model = nn.Sequential(parts | OrderedDict(head=nn.Linear(64, 8)))
    converted(model, sparsity)
    model.inside = way(model.inside)
    return model


def found(model: nn.Module, **options: bool) -> list[str]:
    """Return what one training step shows, by the names without the checkpoint's own module."""
    with RecomputationProbe(model, **options) as probe:
        model(torch.randn(2, 4, 64)).sum().backward()
    return [name.replace(".inner.", ".") for name in probe.recomputed]


@pytest.mark.parametrize(("way", "sparsity"), in_turn(WAYS, [0.5, 0.0]))
def test_layers_inside_a_checkpoint_are_found_whatever_makes_it(way: str, sparsity: float):
    assert found(made(WAYS[way], sparsity)) == INSIDE


def test_without_a_checkpoint_nothing_is_found():
    model = made()
    assert found(model) == []
    revert(model)
    assert found(model) == []
    with RecomputationProbe(WAYS["reentrant"](nn.Linear(64, 64))) as probe:
        pass
    assert probe.recomputed == []


@pytest.mark.parametrize("way", [WAYS["reentrant"], WAYS["non_reentrant"]])
def test_a_layer_that_runs_outside_too_saves_memory_there(way):
    inner = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    model = nn.Sequential(inner[0], nn.GELU(), inner)
    convert(model, sparsity=0.5)
    model[2] = way(inner)
    assert [name.rpartition(".")[2] for name in found(model)] == ["2"]


def test_layers_that_keep_nothing_are_not_found():
    model = made(WAYS["reentrant"])
    model.inside.inner.fc1.requires_grad_(False)
    assert found(model) == ["inside.fc2"]
    with RecomputationProbe(model) as probe, torch.no_grad():
        model(torch.randn(2, 64))
    assert (probe.recomputed, probe.ran) == ([], True)


@pytest.mark.parametrize(("reentrant", "need_weights", "batch_first"), cover(*[(False, True)] * 3))
def test_both_projections_of_attention_are_found(reentrant: bool, need_weights: bool, batch_first: bool):
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.outside = (nn.MultiheadAttention(64, 4, batch_first=batch_first) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            def attend(y: Tensor, layer: nn.Module) -> Tensor:
                return layer(y, y, y, need_weights=need_weights)[0]

            return attend(checkpoint(attend, x, self.inside, use_reentrant=reentrant), self.outside)

    model = nn.Sequential(nn.Linear(64, 64), Both())
    convert(model, sparsity=0.5)
    assert found(model) == ["1.inside", "1.inside.out_proj"]


def test_saved_tensors_moved_inside_a_checkpoint_are_kept_and_hooks_around_it_hide_nothing():
    class Offloaded(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with save_on_cpu():
                return super().forward(x)

    assert found(made(lambda inner: WAYS["non_reentrant"](Offloaded(inner)))) == []  # goes past the checkpoint
    with save_on_cpu():
        assert found(made(WAYS["non_reentrant"])) == INSIDE
    with disable_saved_tensors_hooks("none here"):
        assert found(made(WAYS["reentrant"])) == INSIDE


def test_a_forward_of_the_user_in_backward_and_second_derivatives_are_no_checkpoint():
    model, x = made(), torch.randn(2, 64, requires_grad=True)

    def again(grad: Tensor) -> None:
        with torch.enable_grad():
            model.head(grad.detach())

    with RecomputationProbe(model) as probe:
        y = model[:-1](x)
        y.register_hook(again)
        model.head(y).sum().backward()
    assert probe.recomputed == []
    model = made(sparsity=0.0)
    with RecomputationProbe(model) as probe:
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
    assert probe.recomputed == []


def test_compiled_modules_are_seen_only_while_they_run_eagerly():
    torch._dynamo.reset()
    model = made(WAYS["non_reentrant"], sparsity=0.0)
    model.inside.compile(backend="aot_eager")
    assert found(model) == []
    with RetentionProbe(model):
        assert found(model, eagerly=True) == INSIDE


class Shared(nn.Module):
    """Query, key and value of one tensor, and an output projection behind a ReLU, which retains its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.out(F.relu(self.q(y) * self.k(y) + self.v(y)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


def regions(
    make: Callable[[], nn.Module], way: Callable[[nn.Module], nn.Module] = lambda module: module
) -> nn.Sequential:
    """Return a pruned model of two regions between plain layers, the same for every ``way`` to checkpoint them."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), make(), nn.GELU(), make(), nn.GELU(), nn.Linear(64, 8))
    convert(model, rules={"type:linear": Keep(sparsity=0.6, block_size=16), "*": None})
    model[2], model[4] = way(model[2]), way(model[4])
    return model


def step(model: nn.Module, probed: bool = False) -> list[Tensor]:
    """Return loss and gradients of one training step, the first of a fit or a later one."""
    torch.manual_seed(2)
    model.zero_grad(set_to_none=True)
    x = torch.randn(3, 10, 64)
    with RetentionProbe(model, x) if probed else nullcontext():
        loss = model(x).square().mean()
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize(("way", "make"), in_turn(WAYS, [Shared, Attention]))
def test_gradients_in_the_probed_step(make, way: str):
    """The probe lets layers whose input is retained run dense, but not in one of the two runs of a region."""
    plain, checkpointed = regions(make), regions(make, WAYS[way])
    expected, found = step(plain), step(checkpointed, probed=True)
    names = ["", *(name for name, _ in plain.named_parameters())]
    differ = [name for name, ours, theirs in zip(names, found, expected, strict=True) if not torch.equal(ours, theirs)]
    assert differ == ["0.weight"]  # reads the batch, so that it ran dense
    torch.testing.assert_close(step(checkpointed), expected, rtol=0, atol=0)  # and later steps are pruned as before


@pytest.mark.parametrize("way", ["reentrant", "non_reentrant"])
def test_the_meter_does_not_count_what_runs_again_in_backward(way: str):
    model, x = regions(Shared, WAYS[way]), torch.randn(3, 10, 64)
    with SavedTensorMeter(model, x) as forward:
        loss = model(x).sum()
    with SavedTensorMeter(model, x) as both:
        model(x).sum().backward()
    loss.backward()
    assert forward.report() == both.report()
    assert [row.fqn for row in both.report().rows] == ["0", "6"]
