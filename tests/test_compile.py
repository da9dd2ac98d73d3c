"""Models under torch.compile: few compilations over a schedule, checkpoints, CUDA graphs.

Single layers are compiled in ``tests/contract/test_compile.py``.
"""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from examples.models.resmlp import resmlp_tiny
from examples.models.vit import ViT
from lightning_actprune import ActivationPrunedLinear
from lightning_actprune.config import Keep
from lightning_actprune.convert import convert
from lightning_actprune.operators.norm import Affine
from tests.support import oracle
from tests.support.checkpointing import WAYS
from tests.support.conversion_models import gradients
from tests.support.marks import only
from tests.support.measured import kept_bytes


@pytest.fixture(autouse=True)
def _forget_compilations() -> None:
    torch._dynamo.reset()
    counters.clear()


def resmlp() -> nn.Module:
    model = resmlp_tiny(64, 2, image_size=32, patch_size=8, num_classes=5)
    nn.init.normal_(model.head.weight)  # zero at first, and so would be all gradients
    return model


def pruned(model: nn.Module, device: str = "cpu") -> tuple[nn.Module, list[ActivationPrunedLinear], Tensor]:
    """Return the converted model, its pruned layers and a batch of images."""
    convert(model.to(device), rules={"type:linear": Keep(None, 0.5, block_size=16), "*": None})
    layers = [m for m in model.modules() if isinstance(m, ActivationPrunedLinear)]
    return model, layers, torch.randn(2, 3, 32, 32, device=device)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for a, b in zip(found.values(), expected.values(), strict=True):  # names of compiled modules have a prefix
        assert oracle.relative_error(a, b) < tolerance


@pytest.mark.integration
@pytest.mark.parametrize("preset", only(["paper", "max", "recompute"], "max"))
def test_more_blocks_than_the_compiler_compiles_anew_share_a_compilation(preset):
    counts, limit = [], 4
    for blocks in (2, limit + 2):
        torch._dynamo.reset()
        model = ViT(image_size=16, patch_size=4, dim=64, depth=blocks, num_classes=5)
        convert(model, preset)
        counter = CompileCounterWithBackend("eager")
        for block in model.blocks:
            block.compile(backend=counter)
        with torch._dynamo.config.patch(recompile_limit=limit):
            model(torch.randn(2, 3, 16, 16)).sum().backward()
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] >= 1


@pytest.mark.integration
def test_a_schedule_or_another_batch_size_is_one_more_compilation_and_equals_eager():
    """Also where each layer has a sparsity of its own."""
    model, layers, x = pruned(resmlp())
    for batches, schedule in (([2] * 5, [0.1, 0.29, 0.5, 2 / 3, 0.95]), ([2, 3, 5, 7], [0.5])):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        weight_grads = []
        for step, batch in enumerate(batches):
            for i, layer in enumerate(layers):
                layer.sparsity = schedule[(i + step) % len(schedule)]
            images = x[:1].repeat(batch, 1, 1, 1)
            found = gradients(compiled, images)
            assert_close(found, gradients(model, images), 1e-6)  # one block more or less is far beyond that
            weight_grads.append(torch.cat([layer.weight.grad.flatten() for layer in layers]))
        assert counter.frame_count <= 2
        assert all(not torch.equal(a, b) for a, b in pairwise(weight_grads))


@pytest.mark.integration
def test_a_checkpoint_inside_a_compiled_model():
    region = nn.Sequential(nn.Linear(96, 128), nn.GELU(), nn.Linear(128, 96), nn.GELU())
    plain, x = nn.Sequential(nn.Linear(64, 96), nn.GELU(), region, nn.Linear(96, 8)), torch.randn(4, 10, 64)
    model = copy.deepcopy(plain)
    model[2] = WAYS["non_reentrant"](model[2])
    for each in (plain, model):
        convert(each, rules={"type:linear": Keep(None, 0.6, block_size=16), "*": None})
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    assert_close(gradients(compiled, x), gradients(plain, x), 1e-6)
    assert counter.frame_count == 1
    # How much less is the compiler's choice: torch 2.11 takes no function with a backward of its own, such as our
    # layers, for a part of the checkpoint; 2.15 does, and keeps nothing but the region's input.
    kept = [kept_bytes(m, x, torch.compile(m, backend="aot_eager", fullgraph=True)) for m in (plain, model)]
    assert 2 * 40 * 96 * 4 <= kept[1] < kept[0]  # at least the stem's output and the region's input


class Mixed(nn.Module):
    """A layer of each other kind, with rows enough that many programs share every sum of them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Sequential(nn.Conv2d(3, 64, 3, stride=2), nn.BatchNorm2d(64), nn.ReLU())
        self.mix = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), Affine(64))
        self.head = nn.Linear(64, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.mix(self.patches(images).flatten(2).transpose(1, 2)).mean(1))


@pytest.mark.gpu
@pytest.mark.parametrize("make", [resmlp, Mixed])
def test_gpu_reduce_overhead_records_cuda_graphs(make):
    if make is resmlp:
        model, layers, x = pruned(make(), "cuda")
    else:
        model, layers, x = make().cuda(), [], torch.randn(64, 3, 32, 32, device="cuda")
        assert len(convert(model, rules={"*": Keep(bits=8), "type:saved": None}).converted) >= 8
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for sparsity in (0.5, 0.8, 0.9) if layers else (0.0,):
        for layer in layers:
            layer.sparsity = sparsity
        expected = gradients(model, x)
        for _ in range(4):  # the first runs of a graph warm up and record
            torch.compiler.cudagraph_mark_step_begin()
            assert_close(gradients(compiled, x), expected, 1e-2)
    assert counters["inductor"]["cudagraph_skips"] == 0
    if layers:
        assert counters["inductor"]["cudagraph_recorded_non_static_inputs"] >= 3  # the images, at each sparsity
