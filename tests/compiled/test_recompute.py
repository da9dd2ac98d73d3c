"""Modules that run again in backward, compiled: what is kept is their inputs, packed, and gradients are as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_actprune.compiled.scope import CompiledPacking
from lightning_actprune.config import Config, Keep, Recompute
from lightning_actprune.convert import convert_layers, mark_layers, new_owner, revert, unmark_layers
from tests.compiled.support import Result, run, step
from tests.support.compilers import planned
from tests.support.marks import only

Backend = str | Callable[..., Any]
WIDTH, VALUES = 64, 8 * 32 * 64
PACKED = VALUES + VALUES // 16  # two bytes for each block of 32 values


class Transformer(nn.Module):
    """Attention and an MLP, both residual."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.qkv, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 32)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.proj(attended))
        return x + self.dropout(self.fc2(F.gelu(self.fc1(self.norm2(x)))))


class Convolutions(nn.Module):
    """A residual block with running statistics that ends with a ReLU, of which backward reads the output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(8, 16, 16, 8)
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + x).view(8, 32, WIDTH)


class Mixed(nn.Module):
    """A residual block whose convolution reads, under autocast, a cast of what it is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Parameter(torch.ones(16, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(8, 16, 16, 8)
        return (x + self.scale * F.gelu(self.conv(x))).view(8, 32, WIDTH)


class Crossing(nn.Module):
    """Takes a tuple, which it hands on, and a tensor by name."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc, self.to_memory = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, both: tuple[Tensor, Tensor], *, scale: Tensor) -> tuple[Tensor, Tensor]:
        x, memory = both
        return x + scale * F.silu(self.fc(self.norm(x)) * self.to_memory(memory)), memory


class Net(nn.Module):
    """A stem, blocks and a head, of which the first and last are not run again."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if isinstance(self.blocks[0], Crossing):
            both, scale = (x, self.stem(x)), x.mean(-1, keepdim=True)
            for block in self.blocks:
                both = block(both, scale=scale)
            x = both[0] * both[0]
        else:
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x))


BLOCKS = {"transformer": Transformer, "convolutions": Convolutions, "crossing": Crossing}


def made(kind: str, *, count: int = 2, **options: float) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Net(*(BLOCKS[kind](**options) for _ in range(count))), torch.randn(8, 32, WIDTH)


def converted(model: nn.Module, bits: int | None = 8, **rules: Keep | Recompute | None) -> nn.Module:
    """Return a copy whose blocks run again, and whose compilers are told so."""
    model, owner = copy.deepcopy(model), new_owner("a test")
    rules = {"blocks.?": Recompute(bits), **rules}
    convert_layers(model, Config("balanced", rules=rules), owner)
    mark_layers(model, owner)
    for module in model.modules():  # tensors of a test are small
        if hasattr(module, "_recompute"):
            mark = module._recompute.mark.replace(str(2**16), "512")
            module._recompute = module._recompute._replace(mark=mark)
        if hasattr(module, "_state") and module._state.marks is not None:
            texts = (text.replace(str(2**16), "512") for text in module._state.marks[:2])
            object.__setattr__(module._state, "marks", (*texts, *module._state.marks[2:]))
    return model


def eager(model: nn.Module, x: Tensor) -> Result:
    model = converted(model)
    return run(model, model, x, [], autocast=False)


def cosine(found: Result, expected: Result) -> float:
    a, b = (
        torch.cat([grads[name].flatten() for name in expected.grads]).double()
        for grads in (found.grads, expected.grads)
    )
    return float(F.cosine_similarity(a, b, 0))


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("crossing", "aot_eager"),
        pytest.param("transformer", "aot_eager", marks=pytest.mark.integration),
        pytest.param("convolutions", planned, marks=pytest.mark.integration),
    ],
)
def test_gradients_are_those_of_eager_mode_and_inputs_are_all_that_is_kept(kind: str, backend: Backend):
    model, x = made(kind)
    other = converted(model)
    found = step(other, x, backend=backend)
    right = eager(model, x)
    dense = step(model, x, packs=False, backend=backend)
    torch.testing.assert_close(dict(other.named_buffers()), dict(model.named_buffers()))  # statistics move once
    assert torch.equal(found.output, dense.output)
    assert 1 - cosine(found, dense) < 1.2 * (1 - cosine(right, dense))
    inputs = [row for row in found.rows if row.name == "blocks.*"]
    assert {(row.how, row.bits, row.stored_bytes) for row in inputs} == {("packed", 8, PACKED)}
    assert len(inputs) == (3 if kind == "crossing" else 2)
    assert sum(tensor.nbytes >= PACKED for tensor in found.kept) <= len(inputs) + 3  # the batch, and what is outside


@pytest.mark.integration
@pytest.mark.parametrize("backend", only(["aot_eager", planned], planned))
def test_a_block_that_reads_a_cast_of_its_input_keeps_it_packed(backend: Backend):
    torch.manual_seed(0)
    model, x = Net(*(Mixed() for _ in range(3))), torch.randn(8, 32, WIDTH)
    dense = step(model, x, packs=False, backend=backend, autocast=True)
    found = step(converted(model), x, backend=backend, autocast=True)
    assert torch.equal(found.output, dense.output)
    assert cosine(found, dense) > 0.999
    inputs = [row for row in found.rows if row.name == "blocks.*"]
    assert [(row.how, row.bits, row.stored_bytes) for row in inputs] == [("packed", 8, PACKED)] * 3
    assert sum(tensor.nbytes == PACKED for tensor in found.kept) == 3 + 1  # the head's, which are few rows
    assert sum(tensor.nbytes > PACKED for tensor in found.kept) == 1  # the batch


@pytest.mark.integration
@pytest.mark.parametrize("backend", only(["aot_eager", "inductor"], "aot_eager"))
def test_dropout_is_that_of_the_first_run(backend: str):
    model, x = made("transformer", count=1, dropout=0.5)
    torch.manual_seed(1)
    dense = step(model, x, packs=False, backend=backend)
    torch.manual_seed(1)
    found = step(converted(model), x, backend=backend)
    assert torch.equal(found.output, dense.output)
    assert cosine(found, dense) > 0.9995
    masks = [tensor for tensor in found.kept if tensor.dtype == torch.bool]
    assert len(masks) == (2 if backend == "aot_eager" else 0)  # inductor draws them again from a seed


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["convolutions", "crossing"])
def test_blocks_compiled_one_by_one_keep_their_inputs_packed(kind: str):
    model, x = made(kind)
    dense, other = step(model, x, packs=False), converted(model)
    torch._dynamo.reset()
    for block in other.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    with CompiledPacking() as packing:
        found = run(other, other, x, packing.rows, autocast=False)
    torch.testing.assert_close(found.output, dense.output)  # the norm and the head are not compiled
    assert 1 - cosine(found, dense) < 1.2 * (1 - cosine(eager(model, x), dense))
    handed_on = {("as it is", 0)} if kind == "crossing" else set()  # which is an output, too
    assert {(row.how, row.bits) for row in found.rows if row.name == "blocks.*"} == {("packed", 8)} | handed_on


@pytest.mark.integration
def test_what_is_outside_is_kept_by_its_own_rule():
    model, x = made("transformer")
    found = step(converted(model, norm=Keep(bits=4)), x)
    (row,) = (row for row in found.rows if row.name == "norm")
    assert (row.how, row.bits) == ("packed", 4)


@pytest.mark.integration
@pytest.mark.parametrize("reverted", [True, False])
def test_without_marks_blocks_are_torchs_checkpoints_or_dense(reverted):
    model, x = made("transformer", count=1)
    other = converted(model)
    revert(other) if reverted else unmark_layers(other, other.blocks[0]._recompute.owner)
    found = step(other, x)
    assert not [row for row in found.rows if reverted or row.name == "blocks.*"]
    assert cosine(found, step(model, x, packs=False)) > 0.999


@pytest.mark.integration
def test_a_checkpoint_of_the_users_own_is_left_alone():
    model, x = made("transformer")
    other = converted(model)
    dense = step(model, x, packs=False)
    last, forward = other.blocks[1], Transformer.forward
    revert(last)
    last.forward = lambda x: checkpoint(forward, last, x, use_reentrant=False)
    found = step(other, x)
    assert len([row for row in found.rows if row.name == "blocks.*"]) == 1
    assert cosine(found, dense) > 0.9995
