"""What is kept for backward: as many bytes as announced, and only where a gradient needs it."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_actprune.config import Keep
from tests.support.cases import Case
from tests.support.measured import grad_of, gradients, kept_bytes, run, same
from tests.support.saving import saved_tensors, storage_bytes


def test_as_many_bytes_as_announced(case: Case, device: torch.device):
    x = case.input(device)
    for keep in case.keeps:
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


def test_what_no_gradient_needs_is_not_kept(case: Case, device: torch.device):
    dense, ours = case.pair(Keep(bits=8), device)
    x = case.input(device)
    expected, announced = gradients(ours, x), case.announced(Keep(bits=8), kept_bytes(dense, x))
    # An input without a gradient.
    assert kept_bytes(ours, x.detach()) <= (announced if list(ours.parameters()) else 0)
    for name, grad in gradients(ours, x.detach()).items() if list(ours.parameters()) else ():
        torch.testing.assert_close(grad, expected[name])
    # Frozen parameters.
    dense.requires_grad_(False), ours.requires_grad_(False)
    if case.operator in ("linear", "affine", "scale") and not case.inside:
        assert kept_bytes(ours, x) == 0
    assert kept_bytes(ours, x) <= kept_bytes(dense, x)
    torch.testing.assert_close(gradients(ours, x)["input"], expected["input"])


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
    x = case.input(device)
    expected = gradients(ours, x, lambda x: ours(x * 1.0))
    given = x * 1.0
    y = run(ours, given)
    given.detach().zero_()
    found = torch.autograd.grad(y, (x, *ours.parameters()), grad_of(y))
    for grad, right in zip(found, expected.values(), strict=True):
        assert torch.equal(grad, right)


class ReadsOnly(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.sum())
    backward = staticmethod(lambda ctx, grad: None)


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
    _, ours = case.pair(device=device)
    inputs = case.input(device), (case.input(device) * 0.5).detach().requires_grad_()
    alone = [list(gradients(ours, x).values()) for x in inputs]
    y = [run(ours, x) for x in inputs]
    found = torch.autograd.grad(y, [*inputs, *ours.parameters()], list(map(grad_of, y)))
    assert torch.equal(found[0], alone[0][0])
    assert torch.equal(found[1], alone[1][0])
    for both, first, second in zip(found[2:], alone[0][1:], alone[1][1:], strict=True):
        torch.testing.assert_close(both, first + second)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_an_activation_checkpoint(case: Case, reentrant: bool, device: torch.device):
    (dense, checkpointed), (_, model) = case.pair(device=device), case.pair(device=device)
    expected, x = gradients(model, case.input(device)), case.input(device)
    for module in (dense, checkpointed):
        x.grad = None
        y = run(lambda x: checkpoint(module, x, use_reentrant=reentrant), x)  # noqa: B023
        y.backward(grad_of(y))
    found = {"input": x.grad} | {name: p.grad for name, p in checkpointed.named_parameters()}
    for name, grad in expected.items():
        assert torch.equal(found[name], grad), name
    # The running statistics of norms move twice, as those of dense norms do.
    torch.testing.assert_close(list(checkpointed.buffers()), list(dense.buffers()))


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
        with opened:
            y = run(model, x)
        found = torch.autograd.grad(y, (x, *model.parameters()), grad_of(y))
        torch.testing.assert_close(list(found), list(expected.values()), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_the_allocator_grows_by_what_is_kept(case: Case):
    """Bytes that autograd holds without telling hooks would show here."""
    _, model = case.pair(device="cuda")
    given = case.input("cuda") * 1.0
    run(model, given).sum().backward(retain_graph=True)  # what is set up lazily
    model.zero_grad(set_to_none=True)
    with saved_tensors() as saved:
        y = run(model, given)
    expected = storage_bytes((*saved, y), but=(given, *model.parameters(), *model.buffers()))
    del saved, y
    requested = []
    for call in (lambda: None, lambda: run(model, given)):
        y = call()
        torch.cuda.synchronize()
        requested.append(torch.cuda.memory_stats()["requested_bytes.all.current"])
    assert requested[1] - requested[0] == expected
    del y
