"""HolderProbe's decision: every kind of holder, the rule of bytes."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_actprune import ActivationPrunedLinear, HolderProbe, convert
from lightning_actprune.footprint import SavedTensorMeter
from tests.helpers import assert_plain, pruned_layers
from tests.holder_models import BY, FREE, HELD, Block, Relu, Step, held, made


@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize(("make", "reason"), HELD)
def test_a_held_layer_becomes_dense_and_the_reason_names_the_holder(make, reason: str, backward_inside: bool):
    model, report, x = made(make)
    with HolderProbe(model, x) as probe:
        loss = model(x).sum()
        if backward_inside:
            loss.backward()
    returned = probe.apply(report)
    assert {layer.fqn: layer.reason for layer in returned} == {"in_": "its input is part of the batch", "fc": reason}
    assert type(model.fc) is nn.Linear
    assert report.skipped[-2:] == returned
    assert [layer.fqn for layer in report.converted] == pruned_layers(model) == []
    if not backward_inside:
        loss.backward()
    assert_plain(model)


@pytest.mark.parametrize("make", FREE)
def test_a_layer_whose_input_only_pruned_layers_keep_stays_pruned(make):
    model, report, x = made(make)
    with HolderProbe(model, x) as probe:
        loss = model(x).sum()
    assert [layer.fqn for layer in probe.apply(report)] == ["in_"]
    assert [layer.fqn for layer in report.converted] == pruned_layers(model) == list(dict(model.named_children()))[1:]
    loss.backward()


def test_a_batch_that_is_not_named_is_a_reference_in_python():
    model, _, x = made(Step)
    assert held(model, x) == {"in_": HELD[6][1]}
    assert held(model, x, batch={"image": [x[1:]]}) == {"in_": "its input is part of the batch"}


def test_layers_at_sparsity_0_are_judged_as_what_they_will_be():
    for make, reason in HELD:
        model, _, x = made(make, sparsity=0.0)
        with HolderProbe(model, x, sparsity=0.6) as probe:
            model(x).sum().backward()
        reasons = {layer.fqn: layer.reason for layer in probe.held}
        assert reasons == {"in_": "its input is part of the batch", "fc": reason}
    for make in FREE:
        model, _, x = made(make, sparsity=0.0)
        # Two sisters will share one pack of their input, which nobody has seen yet.
        assert held(model, x, batch=x, sparsity=0.6).keys() == {"in_"}
        assert held(model, x, batch=x) == {}


def test_a_copy_made_by_autocast_or_by_a_transposed_view_is_the_layers_own():
    model, _, x = made(Relu)
    with torch.autocast("cpu", torch.bfloat16):
        assert held(model, x, batch=x) == {"fc": BY + "relu"}  # the batch is copied, what autocast has made is not

    class Transposed(Step):
        def use(self, h):
            return self.fc(F.relu(h).transpose(1, 2))

    model = Transposed()
    convert(model, sparsity=0.6)
    assert "fc" not in held(model, torch.randn(3, 64, 64))


@pytest.mark.parametrize("small", [False, True])
def test_a_layer_called_twice_is_decided_by_bytes(small: bool):
    class Twice(Step):
        def use(self, h):
            return self.fc(F.relu(h)[:, : 1 + 15 * small]).mean() + self.fc(h[:, : 16 - 15 * small].exp().sin())

    model, _, x = made(Twice)
    found = held(model, x)
    if small:
        assert found["fc"].startswith(BY + "relu in 1 of 2 calls; packing would add")
    else:
        assert "fc" not in found


def test_sisters_are_turned_together_and_what_they_hold_then_too():
    class Family(nn.Module):
        """``q`` and ``k`` share ``h``; ``q`` is held by its larger second call, so it holds ``h`` against ``k``."""

        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, h: Tensor) -> Tensor:
            large = torch.relu(h.repeat(4, 1, 1))
            h = h.sin()
            return (self.q(h) * self.k(h)).sum() + self.q(large)

    model = Family()
    convert(model, sparsity=0.6)
    found = held(model, torch.randn(3, 16, 64, requires_grad=True))
    assert found["q"].startswith(BY + "relu in 1 of 2 calls")
    assert found["k"] == BY + "'q' (a linear layer that is not pruned)"


@pytest.mark.parametrize("order", list(itertools.permutations("qkv")))
def test_the_decision_does_not_depend_on_the_order(order: tuple[str, ...]):
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({name: nn.Linear(64, 64) for name in order})

        def forward(self, x: Tensor) -> Tensor:
            h = x * 2
            used = {name: h if name != "v" else F.relu(h) for name in order}
            return sum(layer(used[name]).sum() for name, layer in self.layers.items())

    model = Attention()
    convert(model, sparsity=0.6)
    assert held(model, torch.randn(3, 16, 64, requires_grad=True)) == {"layers.v": BY + "relu"}


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_in_a_checkpoint_are_not_judged_and_run_again_as_they_did(reentrant: bool):
    class Checkpointed(Step):
        def use(self, h):
            return checkpoint(super().use, F.relu(h), use_reentrant=reentrant)

    model, report, x = made(Checkpointed)
    with HolderProbe(model, x) as probe:
        loss = model(x).sum()
    assert [layer.fqn for layer in probe.apply(report)] == ["in_"]
    loss.backward()
    assert model.fc.weight.grad is not None


def test_layers_that_say_nothing_are_not_judged():
    model, _, x = made(Relu)
    assert held(model, x[:0]) == {}
    with torch.no_grad():
        assert held(model, x) == {}
    model.requires_grad_(False)
    assert held(model, x) == {}
    built = nn.Sequential(nn.ReLU(), ActivationPrunedLinear(64, 64, sparsity=0.5))
    assert held(built, x.requires_grad_()) == {}


def bytes_kept(model: nn.Module, x: Tensor) -> int:
    """Return the bytes of all distinct storages alive until backward beside parameters and the batch."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(x)
    for block in model:
        kept += block.kept
        block.kept.clear()
    own = {t.untyped_storage().data_ptr() for t in (x, *model.parameters())}
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return sum(nbytes for pointer, nbytes in found.items() if pointer not in own)


@pytest.mark.parametrize("sparsity", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("seed", range(25))
def test_a_model_never_keeps_more_than_the_dense_one(seed: int, sparsity: float):
    draw = random.Random(seed)
    names = draw.choices(Block.KINDS, k=draw.randint(1, 6))
    model = nn.Sequential(OrderedDict((f"{i}_{name}", Block(name)) for i, name in enumerate(names)))
    x = torch.randn(2, 8, 64, requires_grad=True)
    dense = bytes_kept(model, x)
    with SavedTensorMeter(model, x) as meter:
        model(x)
    counted = meter.report().total_bytes
    report = convert(model, sparsity=sparsity, block_size=16, exclude="*.dense")
    always = bytes_kept(model, x)
    with HolderProbe(model, x) as probe:
        model(x)
    for block in model:
        block.kept.clear()
    probe.apply(report)
    with SavedTensorMeter(model, x) as meter:
        model(x)
    for block in model:
        block.kept.clear()
    assert meter.report().total_bytes <= counted
    assert bytes_kept(model, x) <= min(dense, always)
