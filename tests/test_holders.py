"""HolderProbe: every kind of holder, the rule of bytes, and that the probed step is the step it would have been."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import random
import weakref
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_actprune import ActivationPrunedLinear, HolderProbe, convert
from lightning_actprune.footprint import SavedTensorMeter
from tests.helpers import assert_plain, pruned_layers


class Step(nn.Module):
    """A layer ``fc`` whose input is made, and used otherwise too, in a way of its own; ``in_`` makes it a result."""

    def __init__(self) -> None:
        super().__init__()
        self.in_, self.fc = nn.Linear(64, 64), nn.Linear(64, 64)
        self.features: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.use(F.gelu(self.in_(x)))

    def use(self, h: Tensor) -> Tensor:
        return self.fc(h)


class Relu(Step):
    def use(self, h):
        return self.fc(F.relu(h))


class ReluModule(Step):
    def __init__(self):
        super().__init__()
        self.block = nn.ModuleDict({"act": nn.ReLU()})

    def use(self, h):
        return self.fc(self.block["act"](h))


class View(Step):
    def use(self, h):
        return self.fc(h.relu()[1:].unsqueeze(1))


class Sdpa(Step):
    def use(self, h):
        q, k, v = (t.unflatten(2, (2, 32)).transpose(1, 2) for t in (h, h.sin(), h.cos()))
        return self.fc(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class NormReadsResidual(Step):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)

    def use(self, h):
        h = h + 1
        return self.fc(h) + self.norm(h)


class DenseSister(Step):
    def __init__(self):
        super().__init__()
        self.k = nn.Linear(64, 64)

    def use(self, h):
        return self.fc(h) * self.k(h)


class KeptFeatures(Step):
    def use(self, h):
        self.features.append(h)
        return self.fc(h)


class Parameter(Step):
    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(16, 64))

    def use(self, h):
        return self.fc(self.queries).mean() + h


class LeakyRelu(Step):
    def use(self, h):
        return self.fc(F.leaky_relu(h))


class Residual(Step):
    def use(self, h):
        h = h + 1
        return h + self.fc(h)


class Sisters(Step):
    """All pruned: they do not hold their input against each other."""

    def __init__(self):
        super().__init__()
        self.k = nn.Linear(64, 64)

    def use(self, h):
        return self.fc(h) * self.k(h)


BY = "its input is kept for backward by "
HELD = [
    (Relu, BY + "relu"),
    (ReluModule, BY + "'block.act' (relu)"),
    (View, BY + "relu"),
    (Sdpa, BY + "scaled_dot_product_attention"),
    (NormReadsResidual, BY + "'norm' (layer_norm)"),
    (DenseSister, BY + "'k' (a linear layer that is not pruned)"),
    (KeptFeatures, "its input is kept alive by a Python reference outside autograd (such as a list of features)"),
    (Parameter, "its input is a parameter or buffer"),
]
FREE = [Step, LeakyRelu, Residual, Sisters]


def made(make, sparsity=0.6):
    model = make()
    exclude = ["k"] if make is DenseSister else []
    return model, convert(model, sparsity=sparsity, exclude=exclude), torch.randn(3, 16, 64)


def held(model, x, **options):
    """Return the held layers with the reasons, from one forward; the batch is not said to be one."""
    with HolderProbe(model, **options) as probe:
        model(x).sum()
    return {layer.fqn: layer.reason for layer in probe.held}


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


@pytest.mark.parametrize("make", [Relu, Sdpa, Parameter])
def test_the_probed_step_is_exact_and_packs_nothing_that_was_kept_before(make):
    model, _, x = made(make)
    dense = make()
    dense.load_state_dict(model.state_dict())
    with SavedTensorMeter(dense, x) as meter:
        expected = dense(x).square().sum()
    before = meter.report().total_bytes
    state = torch.get_rng_state()
    with HolderProbe(model, x), SavedTensorMeter(model, x) as meter:
        loss = model(x).square().sum()
    assert torch.equal(torch.get_rng_state(), state)
    report = meter.report()
    assert report.total_bytes == before
    assert report.stored_bytes == report.dense_bytes
    grads = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(loss, expected, rtol=0, atol=0)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, list(dense.parameters())), rtol=0, atol=0)
    assert model.fc.sparsity == model.in_.sparsity == 0.6


@pytest.mark.parametrize("make", [KeptFeatures, NormReadsResidual])
def test_a_holder_that_comes_later_changes_the_weight_gradient_of_the_step_alone(make):
    model, _, x = made(make)
    dense = make()
    dense.load_state_dict(model.state_dict())
    with HolderProbe(model, x):
        loss = model(x).square().sum()
    expected = dense(x).square().sum()
    expected.backward()
    loss.backward()
    assert torch.equal(loss, expected)
    for (name, ours), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad) == (name != "fc.weight"), name


def test_nothing_is_kept_alive():
    model, _, x = made(Step)
    with HolderProbe(model, x) as probe:
        h = F.gelu(model.in_(x))
        alive = weakref.ref(h)
        storage = torch.multiprocessing.reductions.StorageWeakRef(h.untyped_storage())
        out = model.fc(h)
        del h
        gc.disable()
        try:
            assert alive() is None
            assert storage.expired()
        finally:
            gc.enable()
    del out
    batch = weakref.ref(x)
    del x
    assert batch() is None
    assert probe.ran
    assert [layer.fqn for layer in probe.held] == ["in_"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_a_layer_leaves_all_as_it_was(error: type[BaseException]):
    def fail(*args):
        raise error

    model, _, x = made(Relu)
    handle = model.fc.register_forward_hook(fail)
    with pytest.raises(error), HolderProbe(model, x):
        model(x)
    handle.remove()
    assert model.fc.sparsity == model.in_.sparsity == 0.6
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.overrides._get_current_function_mode() is None
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        model(x).sum().backward()
    assert packed


def test_a_module_that_takes_no_hooks_leaves_none_on_the_others():
    class Refusing(nn.Identity):
        def register_forward_pre_hook(self, *args, **kwargs):
            raise RuntimeError("no hooks")

    model, _, x = made(Step)
    model.refusing = Refusing()
    with pytest.raises(RuntimeError, match="no hooks"):
        HolderProbe(model, x).__enter__()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.overrides._get_current_function_mode() is None


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_probes_and_meters_see_the_same_and_close_in_any_order(order: tuple[int, ...]):
    model, _, x = made(Relu)
    alone = SavedTensorMeter(model, x)
    contexts = [HolderProbe(model, x), SavedTensorMeter(model, x), HolderProbe(model, x)]
    for context in contexts:
        context.__enter__()
    model(x).sum()
    for number in order:
        contexts[number].__exit__(None, None, None)
    assert [len(contexts[number].held) for number in (0, 2)] == [2, 2]
    for layer in (model.in_, model.fc):  # as the probes had them run
        layer.sparsity = 0.0
    with alone:
        model(x).sum()
    assert contexts[1].report().total_bytes == alone.report().total_bytes
    assert torch.overrides._get_current_function_mode() is None
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_copied_or_pickled_in_the_probed_step_takes_no_hook_along():
    model, _, x = made(Relu)
    with HolderProbe(model, x):
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for module in copies:
        assert not any("HolderProbe" in repr(vars(m)) for m in module.modules())
        module(x).sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")
def test_scripted_modules_take_no_hooks_and_need_none():
    scripted = torch.jit.trace(nn.GELU(), torch.randn(3, 64))
    model = nn.Sequential(scripted, nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    convert(model, sparsity=0.6)
    assert held(model, torch.randn(3, 64)) == {"3": BY + "'2' (relu)"}


class Block(nn.Module):
    """One of many ways to get to the next layer."""

    KINDS = ("relu", "gelu", "sdpa", "norm", "residual", "list", "view", "sisters", "dense")

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.fc, self.k, self.v, self.dense = (nn.Linear(64, 64) for _ in range(4))
        self.norm = nn.LayerNorm(64)
        self.kept: list[Tensor] = []

    def forward(self, h: Tensor) -> Tensor:
        match self.kind:
            case "relu":
                return self.fc(F.relu(h))
            case "gelu":
                return self.fc(F.gelu(h))
            case "sdpa":
                q, k, v = (f(h).unflatten(2, (2, 32)).transpose(1, 2) for f in (self.dense, self.k, self.v))
                return self.fc(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            case "norm":
                return self.fc(self.norm(h))
            case "residual":
                return h + self.fc(h)
            case "list":
                self.kept.append(h)
                return self.fc(h)
            case "view":
                return self.fc(h[:, :5]).repeat(1, 4, 1)[:, : h.shape[1]]
            case "sisters":
                return self.fc(h) * self.k(h) + self.v(h)
        return self.dense(h) - self.fc(h)


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
