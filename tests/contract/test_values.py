"""Outputs are those of the dense module, and gradients are off by what the bits imply, without bias."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import BaseTorchDispatchMode

from lightning_actprune.analysis.second_backward import SecondBackward
from lightning_actprune.codec import formats
from lightning_actprune.codec.dispatch import force_backend
from lightning_actprune.config import Keep
from tests.support.cases import CASES, FUNCTIONS, Case, variants
from tests.support.measured import (
    ROUNDING,
    bound,
    exact_gradients,
    grad_of,
    gradients,
    kept_bytes,
    relative_error,
    run,
    same,
)


def check_gradients(case: Case, found: dict[str, Tensor], right: dict[str, Tensor], keep: Keep) -> None:
    assert found.keys() == right.keys()
    for name, grad in found.items():
        if keep.sparsity and case.dropped is None and not case.is_exact(name):
            continue  # it is not known here what of an input inside the module is dropped
        assert relative_error(grad, right[name]) <= bound(case, name, keep), name


def test_the_output_and_the_gradients(case: Case, device: torch.device):
    x = case.input(device)
    for keep in case.keeps:
        dense, ours = case.pair(keep, device)
        same(run(ours, x), run(copy.deepcopy(dense), x), case.rounds)
        found = gradients(ours, x)
        assert all(grad.dtype == torch.float32 for grad in found.values())
        check_gradients(case, found, exact_gradients(case, dense, x, keep), keep)


@pytest.mark.cases(lambda case: not case.inside and any(case is CASES[name] for name in FUNCTIONS))
@force_backend("triton")
def test_kernels_in_the_interpreter(case: Case, kernel_device: torch.device):
    """They do what plain torch does: the same codes, so that gradients agree far better than the bits are precise."""
    dense, ours = case.pair(device=kernel_device)
    x = case.input(kernel_device)
    same(run(ours, x), run(copy.deepcopy(dense), x), case.rounds)
    found = gradients(ours, x)
    check_gradients(case, found, exact_gradients(case, dense, x, case.keep), case.keep)
    assert kept_bytes(ours, x) == case.announced(case.keep, kept_bytes(dense, x))
    with BaseTorchDispatchMode():  # which ends plain eager mode
        right = gradients(ours, x)
    for name in right:
        assert relative_error(found[name], right[name]) < 1e-4, name


@pytest.mark.cases(lambda case: case.exact != ("*",))
def test_errors_are_unbiased(case: Case, device: torch.device):
    """Copies of a batch are stored with other dithers, so the average of their gradients is closer to the exact one."""
    copied, batch, keep = 64, case.batch, Keep(bits=2)
    dense, ours = case.pair(keep, device)
    x = case.input(device)
    many = torch.cat([x.detach()] * copied, batch).requires_grad_()
    grad = grad_of(run(copy.deepcopy(dense), x))
    right, once = exact_gradients(case, dense, x), gradients(ours, x)
    often = gradients(ours, many, grad=torch.cat([grad] * copied, batch))
    often["input"] = torch.stack(often["input"].chunk(copied, batch)).sum(0)
    for name in right:
        if not case.is_exact(name):
            # 1/8 of it is expected of 64 independent errors.
            error = relative_error(often[name] / copied, right[name])
            assert error < relative_error(once[name], right[name]) / 2.5 + 1e-4, name


@pytest.mark.cases(lambda case: case.exact != ("*",))
@torch.backends.cudnn.flags(deterministic=True)
def test_a_second_backward_errs_as_much_and_changes_nothing(case: Case, device: torch.device, monkeypatch):
    """In the mean of some: few values are random in a channel's sums."""
    dense, ours = case.pair(Keep(bits=4), device)
    x = torch.cat([case.input(device).detach()] * 16, case.batch).requires_grad_()
    found, right = gradients(ours, x), gradients(dense, x)
    leaves, predicted, actual, zero = {"input": x, **dict(ours.named_parameters())}, 0.0, 0.0, torch.zeros(())
    for seed in range(2):
        monkeypatch.setattr(formats, "OTHER", seed)
        y = run(ours, x)
        loss = (y * grad_of(y)).sum()
        second = SecondBackward(loss)
        loss.backward()
        second.close()
        for name, leaf in leaves.items():
            assert torch.equal(leaf.grad, found[name])
            predicted += second.squares.get(leaf, zero) / right[name].square().sum() / 2
            leaf.grad = None
    for name in leaves:
        actual += relative_error(found[name], right[name]) ** 2
    assert 0.65 < (predicted / actual) ** 0.5 < 1.5


def test_autocast(case: Case, device: torch.device):
    dense, ours = case.pair(Keep(bits=8), device)
    x = case.input(device)
    with torch.autocast(device.type, torch.bfloat16):
        y, right = run(ours, x), run(copy.deepcopy(dense), x)
        found, exact = gradients(ours, x), gradients(dense, x)
    assert y.dtype == right.dtype
    assert relative_error(y, right) < 2 * torch.finfo(y.dtype).eps + 1e-6
    for name, grad in found.items():
        assert grad.dtype == exact[name].dtype
        rounding = 4 * torch.finfo(torch.bfloat16).eps
        assert relative_error(grad, exact[name]) <= bound(case, name, Keep(bits=8)) + rounding, name


@pytest.mark.parametrize("batch", [0, 1])
def test_batches_of_none_and_of_one(case: Case, batch: int, device: torch.device):
    dense, ours = case.pair(device=device)
    x = case.input(device).detach().narrow(case.batch, 0, batch).requires_grad_()
    try:
        right = gradients(copy.deepcopy(dense), x)
    except (RuntimeError, ValueError) as error:
        with pytest.raises(type(error)):
            gradients(ours, x)
        return
    same(run(ours, x), run(dense, x), case.rounds)
    found = gradients(ours, x)
    assert {name: grad.shape for name, grad in found.items()} == {name: grad.shape for name, grad in right.items()}
    assert all(grad.isfinite().all() for grad in found.values())
    for name, grad in found.items():
        if batch == 0 or case.is_exact(name):
            torch.testing.assert_close(grad, right[name], rtol=1e-5, atol=1e-5)


LAYOUTS = {
    "turned": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "channels-last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "gaps": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    # Not over samples alone: equal ones have no variance, and a norm would enlarge the rounding of their mean.
    "expanded": lambda x: (x[:, :1] if x.dim() == 2 else x[:1]).expand_as(x),
}


def test_strides_of_the_input(case: Case, device: torch.device):
    for lay_out in LAYOUTS.values():
        dense, ours = case.pair(Keep(bits=8), device)
        x = lay_out(case.input(device).detach()).requires_grad_()
        try:
            right = run(copy.deepcopy(dense), x)
        except RuntimeError:  # transformers' Conv1D takes views of its input only
            assert type(dense.layer).__name__ == "Conv1D"
            continue
        same(run(ours, x), right, case.rounds)
        check_gradients(case, gradients(ours, x), exact_gradients(case, dense, x), Keep(bits=8))


def test_strides_of_the_gradient_and_several_at_once(case: Case, device: torch.device):
    _, ours = case.pair(device=device)
    x = case.input(device)
    y = run(ours, x)
    wanted, turned = (x, *ours.parameters()), torch.randn_like(y).movedim(0, -1).contiguous().movedim(-1, 0)
    for grad in (y.new_ones(()).expand_as(y), turned):
        right = torch.autograd.grad(y, wanted, grad.contiguous(), retain_graph=True)
        for strided in (grad, torch.stack([grad, -grad])):  # several at once have no memory of their own
            batched = strided.dim() > y.dim()
            found = torch.autograd.grad(y, wanted, strided, retain_graph=True, is_grads_batched=batched)
            for actual, expected in zip(found, right, strict=True):
                if batched:  # convolutions sum in another order then
                    assert relative_error(actual[0], expected) < ROUNDING
                else:
                    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


WRITES = {
    "whole": lambda y: y.add_(1.5),
    "part": lambda y: (y[..., :2].add_(1.5), y)[1],
    "turned": lambda y: (y.transpose(0, -1).mul_(2), y)[1],
    "rectified": lambda y: y.relu_(),
}


def test_the_output_may_be_written_to(case: Case, device: torch.device):
    """Wherever that of the dense module may be: gradients are those of a copy. Dispatch modes end plain eager mode."""
    dense, ours = case.pair(device=device)
    x = case.input(device)

    def of(model: nn.Module, write: Callable[[Tensor], Tensor], copied: bool = False) -> dict[str, Tensor]:
        return gradients(model, x, lambda x: write(model(x).clone() if copied else model(x)))

    for context, (name, write) in itertools.product((nullcontext, BaseTorchDispatchMode), WRITES.items()):
        with context():
            try:
                found = of(ours, write)
            except RuntimeError:  # something in it needs its own output, as ReLU does in torch
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    of(dense, write)
                continue
            for parameter, expected in of(ours, write, copied=True).items():
                assert torch.equal(found[parameter], expected), (name, parameter)


def test_what_is_not_finite_reaches_the_gradients(case: Case, device: torch.device):
    for value in (torch.nan, torch.inf):
        dense, ours = case.pair(device=device)
        x = case.input(device).detach()
        x.view(-1)[7] = value
        x.requires_grad_()
        found, right = gradients(ours, x), gradients(dense, x)
        for name in right:
            assert not (~right[name].isfinite() & found[name].isfinite()).any(), (name, value)


@pytest.mark.gpu
@pytest.mark.cases(
    lambda case: case.operator in ("activation", "norm", "affine") and not case.inside and not case.seeded
)
def test_a_cuda_graph_replays_the_step(case: Case):
    """With the same gradients, and running statistics that move on."""
    _, model = case.pair(device="cuda")
    x, other = case.input("cuda"), copy.deepcopy(model)
    for _ in range(3):
        right = gradients(other, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    grad = grad_of(run(model, x))
    with torch.cuda.stream(stream):
        gradients(model, x, grad=grad)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(model(x), [x, *model.parameters()], grad)
    graph.replay()
    torch.testing.assert_close(list(found), list(right.values()), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(list(model.buffers()), list(other.buffers()))


@force_backend(None)  # kernels do not take fp64
@pytest.mark.parametrize("autocast", [False, True])
def test_fp64(case: Case, device: torch.device, autocast: bool):
    """What is stored as it is, or exactly in a bit, may be fp64, which autocast leaves alone; few bits are refused."""
    keep = Keep(sparsity=0.5) if case.drops else case.keep
    dense = case.dense(device)
    ours, dense = case.compressed(dense, keep).double(), dense.double()
    x = case.input(device).detach().double().requires_grad_()
    if not case.wide:
        with pytest.raises(TypeError, match=r"(?s)float64.*HINT"):
            run(ours, x)
        with torch.no_grad():
            same(run(ours, x), run(dense, x), False)
        return
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        same(run(ours, x), run(dense, x), False)
        found, right = gradients(ours, x), gradients(dense, x)
    for name in right:
        assert found[name].dtype == torch.float64
        assert relative_error(found[name], right[name]) < 1e-14 or not case.is_exact(name)
    if case.drops:
        with pytest.raises(ValueError, match=r"(?s)float64.*HINT"):
            case.compressed(dense, Keep(bits=8))


@pytest.mark.foreign
def test_variants_of_classes():
    """Copies of a class, and other arguments."""
    tested = 0
    for case in variants():
        try:
            dense, ours = case.pair(Keep(bits=8))
        except (pytest.skip.Exception, ModuleNotFoundError):  # another version of transformers
            continue
        assert type(ours.layer) is not type(dense.layer)
        for x in (case.input(), LAYOUTS["channels-last"](case.input().detach()).requires_grad_()):
            same(run(ours, x), run(copy.deepcopy(dense), x), case.rounds)
            check_gradients(case, gradients(ours, x), exact_gradients(case, dense, x), Keep(bits=8))
        tested += 1
    assert tested > 15
