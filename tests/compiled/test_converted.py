"""Converted models under a compiler that packs by itself: layers as dense ones, and blocks that run again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.compiled import graphs, readers
from lightning_actprune.compiled.install import CompiledPacking
from lightning_actprune.config import Config, Keep, Recompute
from lightning_actprune.convert import convert_layers, find_hooks, mark_layers, new_owner, revert, unmark_layers
from tests.compiled.support import Result, planned, run, step
from tests.support.conversion_models import Calls
from tests.support.marks import only
from tests.support.stack import Transformer

Backend = str | Callable[..., Any]
WIDTH, VALUES = 64, 8 * 32 * 64
PACKED = VALUES + VALUES // 16  # two bytes for each block of 32 values


class Convolutions(nn.Module):
    """A residual block with running statistics that ends with a ReLU, of which backward reads the output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 16, 16, 8)
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + x).view(-1, 32, WIDTH)


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


class Routed(nn.Module):
    """Experts of which each token chooses two."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)
        self.experts = nn.Parameter(torch.randn(8, WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        logits = self.router(y)
        values, indices = logits.topk(2)
        gates = torch.zeros_like(logits).scatter(-1, indices, values.softmax(-1))
        return x + torch.einsum("bte,btd,edf->btf", gates, y, self.experts)


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


BLOCKS = {
    "transformer": Transformer,
    "convolutions": Convolutions,
    "mixed": Mixed,
    "crossing": Crossing,
    "routed": Routed,
}
AGAIN: dict[str, Keep | Recompute | None] = {"blocks.?": Recompute(8)}


def made(*kinds: str, **options: float) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Net(*(BLOCKS[kind](**options) for kind in kinds)), torch.randn(8, 32, WIDTH)


def converted(model: nn.Module, rules: dict[str, Keep | Recompute | None], unmarked_layers: bool = False) -> nn.Module:
    """Return a copy whose layers compilers see as dense ones, and of which small tensors are packed, too."""
    model, owner = copy.deepcopy(model), new_owner("a test")
    convert_layers(model, Config("balanced", rules=rules), owner)
    find_hooks(model, owner).min_values = 512
    mark_layers(model, owner, unmarked_layers=unmarked_layers)
    return model


def eager(model: nn.Module, x: Tensor, autocast: bool = False) -> Result:
    """Return the fourth step: in the first ones blocks that run again have exact inputs, to be compared."""
    return [run(model, model, x, [], autocast) for _ in range(4)][-1]


def cosine(*results: Result) -> float:
    """Return the cosine of the angle between all gradients of two steps."""
    found, expected = (torch.cat([grad.flatten() for grad in of.grads.values()]).double() for of in results)
    return float(F.cosine_similarity(found, expected, 0))


# Layers.


def test_a_step_is_that_of_the_dense_model_with_fewer_bytes():
    model, _ = made("convolutions", "transformer")
    other, x = converted(model, {}), torch.randn(32, 32, WIDTH)  # few rows would be kept in more bits
    dense, found = step(model, x, packs=False), step(other, x)
    assert torch.equal(found.output, dense.output)
    assert 1 - cosine(found, dense) < 1.2 * (1 - cosine(eager(other, x), dense))
    assert not dense.rows
    assert sum(row.stored_bytes for row in found.rows) < 0.3 * sum(row.dense_bytes for row in found.rows)
    assert {"packed", "again"} <= {row.how for row in found.rows}


def test_without_gradients_no_mark_is_left_in_the_graph():
    (model, x), seen = made("transformer"), []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(converted(model, {}), backend=backend)(x)
    assert seen
    assert not any("mark" in target for target in seen)


@pytest.mark.integration
@pytest.mark.parametrize("unmarked_layers", [True, False])
def test_what_a_rule_leaves_dense_keeps_its_input(unmarked_layers: bool):
    model, x = made("transformer")
    rows = step(converted(model, {"blocks.0.proj": None}, unmarked_layers), x).rows
    attended = [row.how for row in rows if len(row.readers) > 1 and any("attention" in name for name in row.readers)]
    assert attended == ["packed" if unmarked_layers else "uncompressed"]


@pytest.mark.parametrize("named", [True, pytest.param(False, marks=pytest.mark.integration)])
@pytest.mark.parametrize(
    ("rules", "forward", "packed"),
    [
        ({}, lambda model, x: (y := model.fc(x)) * y.mean(-1, keepdim=True).sigmoid(), True),
        ({"operation:mul": None}, lambda model, x: (y := model.fc(x)) * y.mean(-1, keepdim=True).sigmoid(), False),
        ({"operation:sin": Keep(bits=8)}, lambda model, x: model.fc(x).sin(), True),
        ({"norm": None}, lambda model, x: model.norm(model.fc(x)), False),
    ],
)
def test_operations_are_known_where_inductor_decomposes_them(rules, forward, packed: bool, named: bool, monkeypatch):
    """Without the names of operations in the graph's metadata what may be another one's stays as it is."""
    if not named:
        monkeypatch.setattr(graphs, "is_of_autograd", lambda node: False)
        monkeypatch.setattr(readers, "original_operation", lambda node: "")
    model = converted(Calls(forward, fc=nn.Linear(64, 64), norm=nn.GroupNorm(8, 32, affine=False)), rules)
    rows = step(model, torch.randn(8, 32, 64), backend=planned).rows
    assert [row.how for row in rows if row.name == "aten.addmm"] == ["packed" if packed and named else "uncompressed"]


@pytest.mark.integration
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_what_works_in_place_writes_to_its_input_also_if_it_was_told_so_after_it_was_marked(after: bool):
    forward = lambda model, x: model.act(y := model.fc(x)) + 2 * y  # noqa: E731
    model, x = Calls(forward, fc=nn.Linear(64, 64), act=nn.SiLU()), torch.randn(32, 64)
    dense = copy.deepcopy(model)
    dense.act.inplace, model.act.inplace = True, not after
    model = converted(model, {})
    model.act.inplace = True
    assert torch.equal(step(model, x).output, dense(x).detach())


@pytest.mark.integration
def test_attention_with_padding_is_one_graph():
    padding = torch.arange(32).expand(8, 32) > 28  # a mask of the last tokens of each sample
    layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True)
    model = Calls(lambda model, x: model.layer(x, src_key_padding_mask=padding), layer=layer)
    x = torch.randn(8, 32, 64)
    dense, found = step(model, x, packs=False), step(converted(model, {}), x)
    torch.testing.assert_close(found.output, dense.output)
    assert cosine(found, dense) > 0.999
    assert found.rows


@pytest.mark.integration
def test_where_a_graph_breaks_a_compiler_looks_into_nothing_of_this_package():
    torch._dynamo.reset()
    forward = lambda model, x: model.last(model.rnn(model.first(x).tanh())[0].square())  # noqa: E731
    layers = {"first": nn.Linear(64, 64), "rnn": nn.GRU(64, 64, batch_first=True), "last": nn.Linear(64, 8)}
    model, counters = converted(Calls(forward, **layers), {}), torch._dynamo.utils.counters
    counters.clear()
    with CompiledPacking(), SavedTensorMeter(model):
        torch.compile(model, backend="aot_eager")(torch.randn(8, 32, 64)).sum().backward()
    breaks = {text.partition("\n")[0] for kind in ("graph_break", "unimplemented") for text in counters[kind]}
    assert breaks == {"Attempted to wrap RNN, GRU, or LSTM"}


# Blocks that run again in backward.


@pytest.mark.parametrize(
    ("kinds", "backend", "autocast"),
    [
        (("crossing",) * 2, "aot_eager", False),
        pytest.param(("transformer",) * 2, "aot_eager", False, marks=pytest.mark.integration),
        pytest.param(("convolutions",) * 2, planned, False, marks=pytest.mark.integration),
        pytest.param(("mixed",) * 3, planned, True, marks=pytest.mark.integration),
        pytest.param(("mixed",) * 3, "aot_eager", True, marks=pytest.mark.nightly),
    ],
)
def test_gradients_are_those_of_eager_mode_and_inputs_are_all_that_is_kept(kinds, backend: Backend, autocast: bool):
    model, x = made(*kinds)
    other, again = (converted(model, AGAIN) for _ in range(2))
    found, dense = (step(of, x, packs=of is other, backend=backend, autocast=autocast) for of in (other, model))
    torch.testing.assert_close(dict(other.named_buffers()), dict(model.named_buffers()))  # statistics move once
    assert torch.equal(found.output, dense.output)
    assert 1 - cosine(found, dense) < 1.2 * (1 - cosine(eager(again, x, autocast), dense))
    inputs = [row for row in found.rows if row.name == "blocks.*"]
    assert {(row.how, row.bits, row.stored_bytes) for row in inputs} == {("packed", 8, PACKED)}
    assert len(inputs) == (3 if "crossing" in kinds else len(kinds))
    # Besides the batch and what is outside, which is small under autocast.
    assert sum(tensor.nbytes >= PACKED for tensor in found.kept) <= len(inputs) + (2 if autocast else 3)


@pytest.mark.integration
@pytest.mark.parametrize("backend", only(["aot_eager", "inductor"], "aot_eager"))
def test_dropout_is_that_of_the_first_run(backend: str):
    model, x = made("transformer", dropout=0.5, inside=0.5)
    torch.manual_seed(1)
    dense = step(model, x, packs=False, backend=backend)
    torch.manual_seed(1)
    found = step(converted(model, AGAIN), x, backend=backend)
    assert torch.equal(found.output, dense.output)
    assert cosine(found, dense) > 0.9995
    masks = [tensor for tensor in found.kept if tensor.dtype == torch.bool]
    assert len(masks) == (3 if backend == "aot_eager" else 0)  # inductor draws them again from a seed


@pytest.mark.parametrize("backend", only(["aot_eager", "inductor"], "aot_eager"))
def test_a_token_has_the_same_experts_again(backend: str):
    model, x = made("routed")
    dense = step(model, x, packs=False, backend=backend)
    found = step(converted(model, AGAIN | {"blocks.?": Recompute(2)}), x, backend=backend)
    assert torch.equal(found.output, dense.output)
    experts = [result.grads["blocks.0.experts"].flatten() for result in (found, dense)]
    assert F.cosine_similarity(*experts, 0) > 0.95  # .89 with the experts that two bits choose


@pytest.mark.integration
@pytest.mark.parametrize("kind", ["convolutions", "crossing"])
def test_blocks_compiled_one_by_one_keep_their_inputs_packed(kind: str):
    model, x = made(kind, kind)
    dense, other = step(model, x, packs=False), converted(model, AGAIN)
    torch._dynamo.reset()
    for block in other.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    with CompiledPacking() as packing:
        found = run(other, other, x, packing.rows, autocast=False)
    torch.testing.assert_close(found.output, dense.output)  # the norm and the head are not compiled
    assert 1 - cosine(found, dense) < 1.2 * (1 - cosine(eager(converted(model, AGAIN), x), dense))
    handed_on = {("uncompressed", 0)} if kind == "crossing" else set()  # which is an output, too
    assert {(row.how, row.bits) for row in found.rows if row.name == "blocks.*"} == {("packed", 8)} | handed_on


@pytest.mark.integration
@pytest.mark.parametrize("reverted", [True, False])
def test_without_marks_blocks_are_torchs_checkpoints_or_dense(reverted: bool):
    model, x = made("crossing")
    other = converted(model, {**AGAIN, "type:linear": None, "type:norm": None})  # which take long to compile
    revert(other) if reverted else unmark_layers(other, other.blocks[0]._recompute.owner)
    found = step(other, x)
    assert not [row for row in found.rows if reverted or row.name == "blocks.*"]
    assert cosine(found, step(model, x, packs=False)) > 0.999


@pytest.mark.integration
def test_a_checkpoint_of_the_users_own_is_left_alone_and_what_is_outside_is_kept_by_its_own_rule():
    model, x = made("transformer", "transformer")
    dense, other = step(model, x, packs=False), converted(model, {**AGAIN, "norm": Keep(bits=4)})
    last, forward = other.blocks[1], Transformer.forward
    revert(last)
    last.forward = lambda x: checkpoint(forward, last, x, use_reentrant=False)
    found = step(other, x)
    assert len([row for row in found.rows if row.name == "blocks.*"]) == 1
    assert [(row.how, row.bits) for row in found.rows if row.name == "norm"] == [("packed", 4)]
    assert cosine(found, dense) > 0.9995
