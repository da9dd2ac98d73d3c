"""Layers behind convolutions, in channels_last and not: gradients by the fp64 oracle, and what is kept to the byte."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, convert
from lightning_actprune.footprint import SavedTensorMeter
from lightning_actprune.ops.dispatch import force_backend
from lightning_actprune.ops.geometry import BlockGeometry
from tests import oracle
from tests.allocated import growth
from tests.helpers import Gradients, Net, assert_plain, trainer

BLOCK, SPARSITY = 16, 0.6
# Channels and pixels of a NCHW input: blocks fill up better along the channels of the first, the pixels of the second.
SIZES = [(64, 5, 7), (40, 6, 8)]

each_format = pytest.mark.parametrize(
    "memory_format", [torch.channels_last, torch.contiguous_format], ids=["channels_last", "nchw"]
)
each_size = pytest.mark.parametrize("size", SIZES, ids=str)


class Pointwise(nn.Module):
    """A convolution, and a linear layer on its channels as the last dimension, as in ConvNeXt."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1)
        self.fc = nn.Linear(channels, 24)

    def hidden(self, images: Tensor) -> Tensor:
        return self.conv(images).permute(0, 2, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.hidden(images)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """ConvNeXt's: depthwise convolution, norm, two pointwise layers, scale, residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc2(F.gelu(self.fc1(self.norm(self.conv(x).permute(0, 2, 3, 1)))))
        return x + (self.gamma * h).permute(0, 3, 1, 2)


def made(
    size: tuple[int, int, int], memory_format: torch.memory_format, dtype: torch.dtype
) -> tuple[Pointwise, Tensor]:
    """Return a dense model and images, both in the format."""
    channels, *pixels = size
    images = torch.randn(4, 3, *pixels, dtype=dtype).to(memory_format=memory_format)
    return Pointwise(channels).to(dtype).to(memory_format=memory_format), images


def along_pixels(size: tuple[int, int, int], memory_format: torch.memory_format) -> bool:
    return memory_format == torch.contiguous_format and size == SIZES[1]


def x_hat(x: Tensor, turned: bool, scope: str) -> Tensor:
    """Return the input ``[B, H, W, C]`` as the design prunes it."""
    rows = x.flatten(1, 2)
    rows = rows.transpose(1, 2) if turned else rows
    samples = rows.contiguous() if scope == "sample" else rows.reshape(-1, 1, rows.shape[-1])
    kept = oracle.pruned(samples, BLOCK, SPARSITY).reshape(rows.shape)
    return (kept.transpose(1, 2) if turned else kept).reshape(x.shape)


@each_format
@each_size
@pytest.mark.parametrize("scope", ["sample", "token"])
def test_all_but_the_weight_gradient_is_dense_and_that_is_the_oracles(size, memory_format, scope: str):
    dense, images = made(size, memory_format, torch.float64)
    pruned = copy.deepcopy(dense)
    convert(pruned, sparsity=SPARSITY, block_size=BLOCK, min_features=0, scope=scope)
    images.requires_grad_()
    y, expected = pruned(images), dense(images)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    assert y.stride() == expected.stride()
    grad_y = torch.randn_like(y)
    found = torch.autograd.grad(y, [images, *pruned.parameters()], grad_y)
    theirs = torch.autograd.grad(expected, [images, *dense.parameters()], grad_y)
    x = dense.hidden(images).detach()
    weight = torch.einsum("bohw,bhwi->oi", grad_y, x_hat(x, along_pixels(size, memory_format), scope))
    names = ["images", *dict(dense.named_parameters())]
    for name, ours, other in zip(names, found, theirs, strict=True):
        torch.testing.assert_close(ours, weight if name == "fc.weight" else other, rtol=1e-12, atol=1e-12)
        assert ours.stride() == other.stride(), name
    assert oracle.relative_error(found[3], theirs[3]) > 0.1


@each_format
@each_size
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_no_dense_copy_is_left(size, memory_format, backend: str, autocast: bool):
    model, images = made(size, memory_format, torch.float32)
    convert(model, sparsity=SPARSITY, block_size=BLOCK, min_features=0)
    channels, height, width = size
    rows = (channels, height * width) if along_pixels(size, memory_format) else (height * width, channels)
    packed = BlockGeometry.of(len(images), *rows, BLOCK, SPARSITY).stored_bytes(2 if autocast else 4)
    with torch.no_grad():
        hidden = model.hidden(images)

    def forward() -> Tensor:
        with force_backend(backend), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model.fc(-hidden)
        if backend == "triton":
            gc.collect()  # an interpreted launch leaves cycles behind
        return y

    forward()  # what is set up lazily
    y, nbytes = growth(forward)
    assert nbytes == y.nbytes + packed
    with SavedTensorMeter(model) as meter:
        forward().float().sum().backward()
    [row] = meter.report().rows
    assert (row.stored_bytes, row.accounted_bytes) == (packed, packed)
    assert row.dense_bytes == hidden.numel() * (2 if autocast else 4)


class Images(Net):
    """Two blocks of ConvNeXt on small images."""

    def make(self) -> None:
        self.stem = nn.Conv2d(3, 64, 2, stride=2)
        self.body = nn.Sequential(Block(64), Block(64))
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        layout = torch.channels_last if self.stem.weight.is_contiguous(memory_format=torch.channels_last) else None
        x = self.body(self.stem(x if layout is None else x.contiguous(memory_format=layout)))
        self.outputs_in_channels_last = x.is_contiguous(memory_format=torch.channels_last)
        return self.head(x.mean((2, 3)))

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(8, 3, 10, 14, generator=generator), torch.arange(8) % 4
        return DataLoader(TensorDataset(x, y), batch_size=4)

    val_dataloader = train_dataloader


@each_format
def test_a_model_moved_to_channels_last_through_the_callbacks(memory_format):
    noted, reports = [], []
    callback = ActivationPruning(sparsity=SPARSITY, block_size=BLOCK, verbose=False)
    for callbacks in ([], [callback]):
        torch.manual_seed(0)
        model = Images().to(memory_format=memory_format)
        monitor, gradients = ActivationMemoryMonitor(0, verbose=False), Gradients()
        layouts = [p.stride() for p in model.parameters()]
        trainer(*callbacks, monitor, gradients, limit_train_batches=1).fit(model)
        assert [p.stride() for p in model.parameters()] == layouts
        assert model.outputs_in_channels_last is (memory_format == torch.channels_last)
        assert_plain(model)
        noted.append(gradients.seen[0])
        reports.append(monitor.report)
    layers = [f"body.{i}.fc{j}" for i in (0, 1) for j in (1, 2)] + ["head"]
    assert [layer.fqn for layer in callback.converted] == layers
    for (name, _), ours, other in zip(model.named_parameters(), *noted[::-1], strict=True):
        same = oracle.relative_error(ours, other) < 1e-5
        assert same != (name in [f"{layer}.weight" for layer in layers]), name
    dense, pruned = reports
    pixels = 4 * 5 * 7
    assert pruned.dense_bytes == 4 * (2 * pixels * (64 + 128) + 4 * 64)
    assert pruned.stored_bytes == sum(row.accounted_bytes for row in pruned.rows)
    assert dense.total_bytes == pruned.total_bytes + pruned.saved_bytes
