"""The error of a gradient that a second backward measures; ``tests/contract/test_values.py`` goes through operators."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_actprune import Keep, Recompute, convert
from lightning_actprune.analysis.second_backward import SecondBackward
from lightning_actprune.codec import formats
from tests.support.oracle import mean_relative_error


class Doubled(torch.autograd.Function):
    """A function of a user, which must not run twice in a backward."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, _: str, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        Doubled.runs += 1
        return None, 2 * grad


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply("twice", x)


class Checkpoint(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


class Block(nn.Sequential):
    """Runs again from few bits."""


class Spectrum(nn.Module):
    """Filters by a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(33, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(Doubled.apply("twice", torch.fft.rfft(x) * self.filter), 64)


INSIDE = {
    "nothing": nn.Identity,
    "a function": Custom,
    "a checkpoint": lambda: Checkpoint(False),
    "a reentrant checkpoint": lambda: Checkpoint(True),
    "a block that runs again": lambda: Block(nn.Linear(64, 64), nn.Tanh()),
    "a spectrum": Spectrum,
    "an embedding": lambda: nn.Sequential(nn.Flatten(0), Looked()),
}
RULES = {"type:activation": Keep(bits=3), "type:linear": Keep(bits=3, min_rows_for_low_bits=0)}


class Looked(nn.Module):
    """Adds rows of a table, with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 64, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(0, (-1, 64))
        return x + self.table(torch.arange(len(x)) % 64)


def gradients(model: nn.Module, x: Tensor, measured: bool) -> tuple[list[Tensor], float]:
    torch.manual_seed(2)
    y = model(x)
    loss = (y * torch.randn_like(y)).mean()
    second = SecondBackward(loss)
    if not measured:
        second.close()
    loss.backward()
    second.close()
    grads = [p.grad.to_dense() for p in model.parameters()]
    return grads, second.relative_error(model.parameters())


@pytest.mark.parametrize("inside", INSIDE)
def test_training_is_the_same_and_errors_pass_through(inside):
    """Also where an operation cannot run twice: its result then errs by as much as its gradient."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(64, 64), INSIDE[inside](), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
    ours, again = copy.deepcopy(dense), copy.deepcopy(dense)
    for model in (ours, again):
        rules = {"1": Recompute(bits=8)} if isinstance(model[1], Block) else {}
        rules |= {"1.layer.*": None} if isinstance(model[1], Checkpoint) else {}
        convert(model, rules={**rules, **RULES, "*": None})
    x = torch.randn(2048, 64)
    right, _ = gradients(dense, x, measured=False)
    found, _ = gradients(ours, x, measured=False)
    Doubled.runs = 0
    measured, predicted = gradients(again, x, measured=True)
    assert Doubled.runs == (inside in ("a function", "a spectrum"))
    assert all(map(torch.equal, measured, found))
    assert 0.75 < predicted / mean_relative_error(zip(found, right, strict=True)) < 1.33


def test_errors_inside_a_block_do_not_cancel():
    """In memory, blocks are pixels of a few channels, whose gradients are alike."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(64, 64, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()), torch.randn(96, 64, 3, 3)
    stored = copy.deepcopy(model)
    convert(stored, rules={"*": Keep(bits=2, min_rows_for_low_bits=0)})
    right, _ = gradients(model, x, measured=False)
    found, predicted = gradients(stored, x, measured=True)
    assert predicted == pytest.approx(mean_relative_error(zip(found, right, strict=True)), rel=0.05)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_runs_again_may_come_before_all_errors(reentrant):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), Checkpoint(reentrant))
    convert(model, rules={"3.layer.*": None, "type:activation": Keep(bits=3), "*": None})
    assert gradients(model, torch.randn(2048, 64), measured=True)[1] > 0.01


@pytest.mark.parametrize("piece", [1, 300, 5000])
def test_values_are_read_in_pieces(piece, monkeypatch):
    """The same as the whole: blocks of 20 and of 7 values, whole runs of derivatives and one that is cut short."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.GELU(), nn.LayerNorm(20), nn.Linear(20, 7), nn.LayerNorm(7))
    convert(model, rules={"*": Keep(bits=3, min_rows_for_low_bits=0)})
    x, found = torch.randn(177, 20), []
    for size in (formats.PIECE, piece):
        monkeypatch.setattr(formats, "PIECE", size)
        found.append(gradients(model, x, measured=True)[1])
        model.zero_grad()
    assert found[0] == found[1] > 0


def test_nothing_is_measured_of_what_has_no_history():
    with SecondBackward(torch.ones((), requires_grad=True)) as second:
        pass
    assert second.relative_error([]) == 0
