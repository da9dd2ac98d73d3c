"""What is kept for backward: as many bytes as announced, and only where a gradient needs it."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_actprune.config import Keep
from tests.support.cases import Case
from tests.support.measured import grad_of, gradients, kept_bytes, run, same
from tests.support.saving import saved_tensors


def test_as_many_bytes_as_announced(case: Case, device: torch.device):
    x = case.input(device)
    for keep in case.keeps.values():
        dense, ours = case.pair(keep, device)
        nbytes = kept_bytes(dense, x)
        assert kept_bytes(ours, x) == case.announced(keep, nbytes)
        assert case.announced(Keep(bits=8), nbytes) < nbytes


def test_nothing_without_gradients(case: Case, device: torch.device):
    dense, ours = case.pair(device=device)
    x = case.input(device)
    for training, mode in itertools.product((True, False), (torch.no_grad, torch.inference_mode)):
        dense.train(training), ours.train(training)
        with saved_tensors() as saved, mode():
            y = run(ours, x)
            same(y, run(dense, x), False)
        assert saved == []
        assert y.grad_fn is None
        for mine, right in zip(ours.buffers(), dense.buffers(), strict=True):
            assert torch.equal(mine, right)
    dense.train(), ours.train()
    ours.requires_grad_(False), dense.requires_grad_(False)
    x = case.input(device).detach()
    with saved_tensors() as saved:
        y = run(ours, x)
    assert saved == []
    assert not y.requires_grad
    same(y, run(dense, x), False)


def test_an_input_without_a_gradient(case: Case, device: torch.device):
    dense, ours = case.pair(Keep(bits=8), device)
    x = case.input(device)
    expected = gradients(ours, x)
    if not dict(ours.named_parameters()):
        assert kept_bytes(ours, x.detach()) == 0
        return
    found = gradients(ours, x.detach())
    assert kept_bytes(ours, x.detach()) <= case.announced(Keep(bits=8), kept_bytes(dense, x))
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name])


def test_frozen_parameters(case: Case, device: torch.device):
    """Where only the gradient of a weight needs the input, nothing of it is kept."""
    dense, ours = case.pair(Keep(bits=8), device)
    dense.requires_grad_(False), ours.requires_grad_(False)
    x = case.input(device)
    if case.operator in ("linear", "affine", "scale") and not case.inside:
        assert kept_bytes(ours, x) == 0
    assert kept_bytes(ours, x) <= kept_bytes(dense, x)
    trained = case.compressed(case.dense(device), Keep(bits=8))
    torch.testing.assert_close(gradients(ours, x)["input"], gradients(trained, x)["input"])


def test_evaluation_mode_with_gradients(case: Case, device: torch.device):
    """It is no reason to keep more; batch norms have an exact input gradient, and dropout does nothing."""
    dense, ours = case.pair(Keep(bits=8), device)
    for model in (dense, ours):
        run(model, case.input(device))
        model.eval()
    x = case.input(device)
    same(run(ours, x), run(copy.deepcopy(dense), x), case.rounds)
    assert kept_bytes(ours, x) <= kept_bytes(dense, x)
    if not case.seeded and not case.inside:
        assert kept_bytes(ours, x) <= case.announced(Keep(bits=8), kept_bytes(dense, x))
    right = gradients(dense, x)
    for name, grad in gradients(ours, x).items():
        torch.testing.assert_close(grad, right[name], rtol=0.05, atol=0.05 * float(right[name].abs().max()) + 1e-6)


@pytest.mark.cases(lambda case: not case.inside)
def test_the_input_may_be_changed_after_the_call(case: Case, device: torch.device):
    """Its memory is not kept, so that autograd neither reads nor misses it."""
    _, ours = case.pair(device=device)
    grads = []
    for change in (False, True):
        x = case.input(device)
        given = x * 1.0
        y = run(ours, given)
        if change:
            given.detach().zero_()
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y)
        grads.append(torch.autograd.grad(y, (x, *ours.parameters()), grad))
    for kept, changed in zip(*grads, strict=True):
        assert torch.equal(kept, changed)


class ReadsOnly(torch.autograd.Function):
    """A number made of a tensor, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def test_undefined_gradients_stay_so(case: Case, device: torch.device):
    """An optimizer with weight decay moves a weight whose gradient is 0, and leaves one alone that has none."""
    _, ours = case.pair(device=device)
    x = case.input(device)
    (ReadsOnly.apply(run(ours, x * 1.0)) + x.sum()).backward()
    assert [p.grad for p in ours.parameters()] == [None] * len(list(ours.parameters()))
    assert torch.equal(x.grad, torch.ones_like(x))
    run(ours, x).square().sum().backward()
    assert all(p.grad is not None for p in ours.parameters())


def test_a_layer_used_twice_adds_up(case: Case, device: torch.device):
    """What one call keeps is its own."""
    _, ours = case.pair(device=device)
    first, second = case.input(device), (case.input(device) * 0.5).detach().requires_grad_()
    alone = gradients(ours, first), gradients(ours, second)
    y = [run(ours, x) for x in (first, second)]
    grad = torch.randn(y[0].shape, generator=torch.Generator().manual_seed(4)).to(y[0])
    parameters = dict(ours.named_parameters())
    found = torch.autograd.grad(y, [first, second, *parameters.values()], [grad, grad])
    assert torch.equal(found[0], alone[0]["input"])
    assert torch.equal(found[1], alone[1]["input"])
    for name, both in zip(parameters, found[2:], strict=True):
        torch.testing.assert_close(both, alone[0][name] + alone[1][name])


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_an_activation_checkpoint(case: Case, reentrant: bool, device: torch.device):
    """What is run again in backward keeps the same, so that gradients are those without a checkpoint."""
    model, checkpointed = (case.compressed(case.dense(device)) for _ in range(2))
    # Norms move their running statistics twice, in which reentrant or not they do as dense ones do.
    expected = gradients(model, case.input(device))
    x = case.input(device)
    found = (
        gradients(checkpointed, x, lambda x: checkpoint(checkpointed, x, use_reentrant=False)) if not reentrant else {}
    )
    if reentrant:
        y = run(lambda x: checkpoint(checkpointed, x, use_reentrant=True), x)
        y.backward(grad_of(y))
        found = {"input": x.grad} | {name: p.grad for name, p in checkpointed.named_parameters()}
    for name, grad in found.items():
        assert torch.equal(grad, expected[name]), name


def test_what_hooks_of_others_hold_is_enough(case: Case, device: torch.device):
    """They may move what is saved elsewhere and bring it back as another tensor, aligned in another way."""
    _, model = case.pair(device=device)
    x = case.input(device)
    expected = gradients(model, x)

    def elsewhere(t: Tensor) -> Tensor:
        if not t.numel() or not t.is_contiguous():
            return t.clone()
        before = max(1, 4 // t.element_size())  # as much as no allocation of torch is off by
        return torch.cat([t.new_zeros(before), t.flatten()])[before:].view(t.shape)

    for opened in (save_on_cpu(), saved_tensors_hooks(lambda t: t, elsewhere)):

        def call(x: Tensor, opened: Any = opened) -> Tensor:
            with opened:
                return model(x)

        for name, grad in gradients(model, x, call).items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_the_allocator_grows_by_what_is_kept(case: Case):
    """Bytes that autograd holds without telling hooks would show here."""
    _, model = case.pair(device="cuda")
    given = case.input("cuda") * 1.0

    def requested() -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_stats()["requested_bytes.all.current"]

    run(model, given).sum().backward(retain_graph=True)  # what is set up lazily
    model.zero_grad(set_to_none=True)
    with saved_tensors() as saved:
        y = run(model, given)
    own = {t.untyped_storage().data_ptr() for t in (given, *model.parameters(), *model.buffers())}
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*saved, y)}
    expected = sum(nbytes for pointer, nbytes in kept.items() if pointer not in own)
    del saved, kept, y
    before = requested()
    y = run(model, given)
    assert requested() - before == expected
    del y
