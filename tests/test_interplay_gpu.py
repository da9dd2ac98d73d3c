"""Checkpoints, hooks that move tensors to the host and channels_last on a GPU, by the bytes of its allocator."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_actprune import ActivationPruning, HolderProbe, RecomputationProbe, convert, functional
from lightning_actprune.footprint import SavedTensorMeter
from tests.helpers import trainer
from tests.test_interplay_channels_last import Block, Pointwise

pytestmark = pytest.mark.gpu
WIDTH = 256


class Net(nn.Module):
    """A stem and a region of three projections of one tensor, which may be checkpointed."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stem, self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def region(self, x: Tensor) -> Tensor:
        h = torch.nn.functional.gelu(x)
        return self.q(h) * self.k(h) + self.v(h)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(-x)
        return self.region(h) if self.reentrant is None else checkpoint(self.region, h, use_reentrant=self.reentrant)


def made(reentrant: bool | None) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    model = Net(reentrant).cuda()
    convert(model, sparsity=0.6)
    return model, torch.randn(16, 196, WIDTH, device="cuda")


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def growth(call: Any) -> tuple[Any, int]:
    """Return the result of ``call`` and the bytes that it leaves allocated, without the allocator's rounding."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result = call()
    torch.cuda.synchronize()
    return result, torch.cuda.memory_stats()["requested_bytes.all.current"] - before


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_inside_a_checkpoint_and_the_probes_in_the_threads_of_backward(reentrant: bool):
    plain, x = made(None)
    model, _ = made(reentrant)
    expected = gradients(plain, x)
    torch.testing.assert_close(gradients(model, x), expected, rtol=0, atol=0)
    with HolderProbe(model) as holders, RecomputationProbe(model, eagerly=True) as recomputations:
        torch.testing.assert_close(gradients(model, x), expected, rtol=0, atol=0)
    assert recomputations.recomputed == ["q", "k", "v"]
    assert holders.held == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_outside_a_checkpoint_only_its_input_is_kept(reentrant: bool):
    model, x = made(reentrant)
    gradients(model, x)
    model.zero_grad(set_to_none=True)
    y, nbytes = growth(lambda: model(x))
    packed = functional.pack(x, sparsity=0.6).nbytes
    # Random states are on the host; the region's input and output have the size of the batch.
    assert nbytes == packed + x.nbytes + y.nbytes


@pytest.mark.parametrize("pin_memory", [False, True])
def test_save_on_cpu_leaves_nothing_on_the_gpu(pin_memory: bool):
    model, x = made(None)
    expected = gradients(model, x)
    for contexts in ((), (SavedTensorMeter,), (HolderProbe,)):
        model.zero_grad(set_to_none=True)

        def forward(contexts: Any = contexts) -> Tensor:
            with save_on_cpu(pin_memory=pin_memory):
                if not contexts:
                    return model(x)
                with contexts[0](model):
                    return model(x)

        y, nbytes = growth(forward)
        assert nbytes == y.nbytes
        y.square().mean().backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], expected, rtol=0, atol=0)


def test_a_fit_with_checkpoints_warns_once():
    class Fitted(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(False)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-6)

    data = DataLoader(torch.randn(8, 196, WIDTH), batch_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(ActivationPruning(0.6), accelerator="gpu", precision="16-mixed").fit(Fitted(), data)
    [text] = [str(w.message) for w in caught if "activation checkpoint" in str(w.message)]
    assert "net.q, net.k, net.v" in text


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize(("make", "channels"), [(Block, 96), (Pointwise, 3)])
def test_behind_a_convolution_is_kept_what_is_announced(
    make: Any, channels: int, memory_format: torch.memory_format, autocast: bool
):
    """Announced are inputs dense and pruned, and under autocast the dense layers' 16-bit copies of weights."""
    dense = make(96).cuda().to(memory_format=memory_format)
    pruned = copy.deepcopy(dense)
    convert(pruned, sparsity=0.6)
    x = torch.randn(16, channels, 28, 28, device="cuda").to(memory_format=memory_format)
    measured = []
    for model in (dense, pruned):

        def forward(model: nn.Module = model) -> Tensor:
            with torch.autocast("cuda", torch.float16, enabled=autocast):
                return model(x)

        forward().sum().backward()  # what is set up lazily
        model.zero_grad(set_to_none=True)
        _, nbytes = growth(forward)
        measured.append(nbytes)
    with SavedTensorMeter(pruned, x) as meter:
        pruned_output = forward()
    report = meter.report()
    pruned_output.sum().backward()
    copies = 2 * sum(m.weight.numel() for m in dense.modules() if isinstance(m, nn.Linear)) if autocast else 0
    assert report.weight_copy_bytes == copies
    assert measured[0] - measured[1] == report.saved_bytes
    assert report.stored_bytes == sum(row.accounted_bytes for row in report.rows) > 0
