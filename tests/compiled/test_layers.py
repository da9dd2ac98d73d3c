"""Converted layers under a compiler that packs by itself: dense ones with marks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.compiled.scope import CompiledPacking
from lightning_actprune.config import Config
from lightning_actprune.convert import attached_saved, convert_layers, mark_layers, new_owner
from tests.compiled.support import Result, run, step


class Net(nn.Module):
    """Images to classes: convolutions with batch norm, a block with a norm, a GELU and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 2, 2)
        )
        self.norm, self.qkv, self.proj = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64)
        self.mlp = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).flatten(2).transpose(1, 2)
        q, k, v = (part.unflatten(-1, (2, 32)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return self.head((x + self.mlp(x)).mean(1))


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(2))


def made() -> Net:
    torch.manual_seed(0)
    return Net()


def prepared(model: nn.Module, rules: dict | None = None, weight_gradients: bool = False) -> nn.Module:
    """Return a model, converted, whose layers compilers see as dense ones."""
    owner = new_owner("a test")
    convert_layers(model, Config("balanced", rules=rules), owner)
    attached_saved(model, owner).min_values = 512
    mark_layers(model, owner, weight_gradients=weight_gradients)
    return model


def joined(found: Result) -> Tensor:
    return torch.cat([grad.flatten() for grad in found.grads.values()])


def test_a_step_is_that_of_the_dense_model_with_fewer_bytes():
    x = images(16)  # of so many rows that nothing is kept in more bits for being small
    model = prepared(made())
    dense, found, eager = step(made(), x), step(model, x), run(model, model, x, [], autocast=False)
    assert torch.equal(found.output, dense.output)
    error, allowed = ((joined(of) - joined(dense)).norm() for of in (found, eager))
    assert error < 1.2 * allowed
    assert not dense.rows
    assert sum(row.stored_bytes for row in found.rows) < 0.3 * sum(row.dense_bytes for row in found.rows)
    assert {"packed", "again"} <= {row.how for row in found.rows}


def test_without_gradients_no_mark_is_left_in_the_graph():
    model, seen = prepared(made()), []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend)(images())
    assert seen
    assert not any("mark" in target for target in seen)


@pytest.mark.integration
@pytest.mark.parametrize("weight_gradients", [True, False])
def test_what_a_rule_leaves_dense_keeps_its_input(weight_gradients):
    found = step(prepared(made(), {"proj": None}, weight_gradients), images())
    attended = [
        row for row in found.rows if any("attention" in reader for reader in row.readers) and len(row.readers) > 1
    ]
    assert [row.how for row in attended] == ["packed" if weight_gradients else "as it is"]


class Twice(nn.Module):
    """Reads what its activation function may have written to."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(64, 64), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        return self.act(x) + 2 * x


@pytest.mark.integration
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_what_works_in_place_writes_to_its_input_also_if_it_was_told_so_after_it_was_marked(after: bool):
    model, x = Twice(), torch.randn(32, 64)
    dense = copy.deepcopy(model)
    dense.act.inplace, model.act.inplace = True, not after
    prepared(model).act.inplace = True
    assert torch.equal(step(model, x).output, dense(x).detach())


class Padded(nn.Module):
    """A transformer's layer of tokens of which the last are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, src_key_padding_mask=torch.arange(x.shape[1]).expand(x.shape[:2]) > x.shape[1] - 4)


@pytest.mark.integration
def test_attention_with_padding_is_one_graph():
    model, x = Padded(), torch.randn(8, 32, 64)
    dense, found = step(copy.deepcopy(model), x), step(prepared(model), x)
    torch.testing.assert_close(found.output, dense.output)
    assert torch.cosine_similarity(joined(found), joined(dense), 0) > 0.999
    assert found.rows


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rnn, self.last = nn.Linear(64, 64), nn.GRU(64, 64, batch_first=True), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rnn(self.first(x).tanh())[0].square())


@pytest.mark.integration
def test_where_a_graph_breaks_a_compiler_looks_into_nothing_of_this_package():
    torch._dynamo.reset()
    model, counters = prepared(Broken()), torch._dynamo.utils.counters
    counters.clear()
    with CompiledPacking(), SavedTensorMeter(model):
        torch.compile(model, backend="aot_eager")(torch.randn(8, 32, 64)).sum().backward()
    breaks = {text.partition("\n")[0] for kind in ("graph_break", "unimplemented") for text in counters[kind]}
    assert breaks == {"Attempted to wrap RNN, GRU, or LSTM"}
