"""What a report says that the dense model would keep is what the dense model keeps, byte for byte."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

from lightning_actprune.analysis.memory import MemoryReport, SavedTensorMeter
from lightning_actprune.config import PRESETS, Keep, Recompute
from lightning_actprune.convert import convert, revert
from lightning_actprune.operators.saved import SavedTensorCompression
from tests.support.compressed import laid_out
from tests.support.compression import Runs
from tests.support.conversion_models import Calls, gpt2
from tests.support.marks import cover
from tests.support.saving import bytes_saved
from tests.support.stack import Transformer

E = 64


class Residual(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.act1, self.act2 = nn.ReLU(inplace=True), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act2(self.norm2(self.conv2(self.act1(self.norm1(self.conv1(x))))) + x)


def recurrent() -> nn.Module:
    forward = lambda model, x: model.last(torch.sigmoid(model.lstm(model.first(x))[0]))  # noqa: E731
    lstm = nn.LSTM(64, 64, batch_first=True)
    return Calls(forward, first=nn.Linear(64, 64), lstm=lstm, last=nn.Linear(64, 64))


def case(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    rows, images = torch.randn(2, 24, 64), torch.randn(2, 3, 12, 12)
    pooled, blocks = (nn.Conv2d(3, 16, 3), nn.MaxPool2d(2)), (Transformer(0.1, 0.2), Transformer(0.1, 0.2))
    made: dict[str, tuple[nn.Module, Tensor]] = {
        "transformer": (nn.Sequential(nn.Linear(64, 64), *blocks, nn.Linear(64, 8)), rows),
        "checkpointed": (nn.Sequential(nn.Linear(64, 64), Transformer(0.1, 0.2, again=True), nn.Linear(64, 8)), rows),
        "residual": (nn.Sequential(*pooled, Residual(), Residual(), nn.Flatten(), nn.Linear(400, 8)), images),
        "channels last": (nn.Sequential(*pooled, Residual(), nn.Flatten(), nn.Linear(400, 8)), laid_out(images, True)),
        "recurrent": (recurrent(), rows),
        "encoder": (nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation="gelu"), rows)
    }  # fmt: skip
    if name in made:
        return made[name]
    gpt = Runs(lambda x: gpt.model(x).logits)  # has transformers' Conv1D, and a head with the weight of the embedding
    gpt.model = gpt2().train()
    return gpt, torch.randint(99, (3, 32))


def measured(model: nn.Module, x: Tensor, autocast: bool) -> MemoryReport:
    """Return the report of a step that ends in a loss, which is part of it."""
    device = x.device.type
    with SavedTensorMeter(model, x) as meter, torch.autocast(device, torch.bfloat16) if autocast else nullcontext():
        loss = F.mse_loss(torch.tanh(model(x)).float(), torch.ones((), device=device))
    report = meter.report()
    loss.backward()
    return report


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("name", "preset", "autocast"),
    cover(
        ["transformer", "checkpointed", "residual", "channels last", "recurrent", "encoder"],
        [name for name in PRESETS if name != "recompute"],  # which needs blocks
        [False, True],
    )
    + [pytest.param("gpt2", "balanced", autocast, marks=pytest.mark.foreign) for autocast in (False, True)],
)
def test_the_dense_bytes_of_any_preset_are_those_of_the_dense_model(
    name: str, preset: str, autocast: bool, device: str
):
    model, x = case(name)
    model, x = model.to(device), x.to(device)
    dense = measured(model, x, autocast)
    assert dense.dense_bytes == dense.stored_bytes
    convert(model, preset=preset)
    with SavedTensorCompression(model, min_values=512) if preset != "paper" else nullcontext():
        report = measured(model, x, autocast)
    # On CPUs and in mixed precision, norms of torch keep statistics in 32 bits, but fake ones say 16.
    assert report.dense_bytes == pytest.approx(dense.stored_bytes, rel=0.005 if autocast else 0)
    if device == "cpu":  # on a GPU some layers read what a norm keeps quantized: nothing is accounted for these
        assert all(row.stored_bytes == row.accounted_bytes for row in report.rows)
    if preset != "paper":  # which would save in few of these layers, and is given no chance to find that out
        if name != "recurrent":  # where linear layers alone are covered
            assert report.other_dense_bytes > report.other_bytes
        assert 0 < report.saved_bytes == report.dense_bytes - report.stored_bytes


def lay_flat(layer: nn.Linear) -> None:
    """Let a layer run with views of one parameter as FSDP does."""
    flat = nn.Parameter(torch.cat([layer.weight.detach().flatten(), layer.bias.detach()]))
    weight, bias = flat.split([layer.weight.numel(), layer.bias.numel()])

    def put(module: nn.Module, _: object) -> None:
        for names in (vars(module), module._parameters):
            names.update(weight=weight.view(len(bias), -1), bias=bias)

    def take(module: nn.Module, *_: object) -> None:
        for name in ("weight", "bias"):
            vars(module).pop(name)

    layer.register_forward_pre_hook(put)
    layer.register_forward_hook(take)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_parts_of_a_flat_parameter_are_no_activations(autocast: bool):
    """FSDP puts views of a gathered parameter into the attributes of a module, and takes them away behind it."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), torch.randn(8, 64)
    expected = measured(model, x, autocast).dense_bytes
    convert(model, sparsity=0.5)
    for layer in (model[0], model[2]):
        lay_flat(layer)
    assert measured(model, x, autocast).dense_bytes == expected


def test_what_cannot_run_without_values_counts_uncompressed():
    model, x = case("residual")
    reports = []
    for momentum in (0.1, None):  # without one, a norm looks at how many batches it has seen
        model[2].norm1.momentum = momentum
        ours = copy.deepcopy(model)
        convert(ours, preset="balanced")
        reports.append(measured(ours, x, False))
    assert reports[0].stored_bytes == reports[1].stored_bytes
    assert 0 < reports[0].dense_bytes - reports[1].dense_bytes < 4 * 2 * 16 * 5 * 5  # it keeps some, dense its input


class Messages(nn.Module):
    """A layer of a graph network: edges from a node to itself are dropped, so numbers of rows depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(E, E)

    def forward(self, x: Tensor, edges: Tensor, weights: Tensor) -> Tensor:
        others = edges[0] != edges[1]
        edges, weights = edges[:, others], weights[others]
        edges -= 1  # a copy of what the caller has
        return x.index_add(0, edges[1], torch.tanh(self.fc(x)[edges[0]]) * weights[:, None])


def test_what_integers_decide_is_known_of_a_block_that_runs_again():
    x, edges, weights = torch.randn(20, E), torch.randint(1, 21, (2, 90)), torch.randn(90)
    given, run = edges.clone(), lambda model, x: model.b(model.a(x, edges, weights), edges, weights)
    model = Calls(run, a=Messages(), b=Messages())
    dense = measured(model, x, False)
    convert(model, rules={"a": Recompute(), "b": Recompute(), "*": None})
    report = measured(model, x, False)
    assert report.dense_bytes == dense.stored_bytes
    assert report.stored_bytes < dense.stored_bytes / 2
    assert torch.equal(edges, given)


def test_rows_that_are_selected_again_count_as_rows():
    class Selects(nn.Module):
        def forward(self, x: Tensor, rows: Tensor) -> Tensor:
            return x[rows].sin() * x[rows]

    model = Calls(lambda model, x: model.select(model.norm(x), rows), norm=nn.LayerNorm(E), select=Selects())
    x, rows = torch.randn(96, E), torch.arange(96).repeat(4)
    dense = measured(model, x, False)
    with SavedTensorCompression(model, min_values=512) as compression:
        report = measured(model, x, False)
    assert compression.rows
    assert report.dense_bytes == dense.stored_bytes


def test_measuring_changes_neither_the_module_nor_randomness_nor_autocast():
    model, x = case("residual")
    model.insert(4, nn.Dropout(0.5))
    hooked: list[nn.Module] = []
    model[2].norm1.register_forward_hook(lambda module, args, output: hooked.append(module))
    convert(model, preset="max")
    twin = copy.deepcopy(model)
    result = []
    for module, context in ((model, nullcontext()), (twin, SavedTensorMeter(twin, x))):
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.float16), context as meter:
            y = module(x)
            assert torch.is_autocast_enabled("cpu")
            assert torch.get_autocast_dtype("cpu") == torch.float16
        assert not torch.is_autocast_enabled("cpu")
        grads = torch.autograd.grad(y.float().square().sum(), list(module.parameters()))
        result.append((y, torch.get_rng_state(), *module.buffers(), *grads))
    assert meter.report().saved_bytes > 0
    assert all(map(torch.equal, *result))
    assert len(hooked) == 2  # once in each real forward


# Copies of weights that autocast makes.


def bf16(**options: Any) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, **options)


class Base(nn.Module):
    """Two layers ``a`` and ``b`` on inputs that need a gradient, of which the first is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(E)
        self.a, self.b = nn.Linear(E, 96), nn.Linear(E, 96)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.norm(x))

    def use(self, h: Tensor) -> Tensor:
        return self.a(h).exp() * self.b(h.sin()) * self.a(h.cos())


class Masked(Base):
    """``torch.nn.utils.prune`` makes the weight anew before each call, and saves that, too."""

    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.a, "weight", amount=0.5)


def parametrized() -> nn.Module:
    nn.utils.parametrizations.weight_norm((model := Base()).a)
    return model


class Checkpointed(Base):
    def use(self, h: Tensor) -> Tensor:
        return checkpoint(self.a, h, use_reentrant=False) * self.a(h.sin())


class SizedAttention(Base):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, 2, kdim=40, vdim=24, batch_first=True)

    def use(self, h: Tensor) -> Tensor:
        return self.attention(h, h.sin()[..., :40], h.cos()[..., :24])[0]


class LearnedQueries(Base):
    """A parameter that three layers and a function read: autocast makes one copy of it for all."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(8, E))

    def use(self, h: Tensor) -> Tensor:
        q = self.queries
        return (self.a(q) * self.b(q)).sum() + F.linear(q, self.b.weight) + self.a(h)


class Leaf(Base):
    """Layers that read the input itself."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.b(x) + self.a(x.transpose(0, 1)).transpose(0, 1)


class Regions(Base):
    """Two layers with one weight, which a function reads too, in regions of autocast of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.b.weight = self.a.weight

    def use(self, h: Tensor) -> Tensor:
        y = (self.a(h) + F.linear(h.sin(), self.a.weight)).float()
        for number, options in enumerate(({"cache_enabled": False}, {"enabled": False}, {}, {"cache_enabled": False})):
            with bf16(**options):
                inner = self.norm(h.float() + number)
                y = y + self.b(inner).float() * self.a(inner.cos()).float() + F.linear(inner, self.b.weight).float()
        return y


def check(
    model: nn.Module,
    x: Tensor,
    make_context: Callable[[], AbstractContextManager[Any]] = bf16,
    dense: tuple[str, ...] = (),
) -> MemoryReport:
    """Return the report of the compressed model, whose figures are what autograd keeps before and after ``convert``."""
    dense_bytes = bytes_saved(model, x, context=make_context())
    convert(model, rules={**dict.fromkeys(dense), "type:linear": Keep(None, 0.6, block_size=16), "*": None})
    stored_bytes = bytes_saved(model, x, context=make_context())
    with SavedTensorMeter(model, x) as meter, make_context():
        model(x)
    revert(model)
    report = meter.report()
    assert (report.dense_bytes, report.stored_bytes) == (dense_bytes, stored_bytes)
    assert report.saved_bytes == dense_bytes - stored_bytes
    return report


@pytest.mark.parametrize(
    ("make", "context", "dense"),
    [
        (Masked, bf16, ()),
        (parametrized, nullcontext, ()),
        (parametrized, parametrize.cached, ()),
        (Checkpointed, bf16, ()),
        (SizedAttention, bf16, ()),
        (SizedAttention, nullcontext, ()),
        (LearnedQueries, bf16, ()),
        (LearnedQueries, bf16, ("a",)),
        (Leaf, bf16, ()),
        (Leaf, bf16, ("b",)),
        *((Regions, context, dense) for context in (bf16, nullcontext) for dense in ((), ("a",), ("b",))),
    ],
)
def test_saved_is_what_the_dense_model_keeps_more(make, context, dense):
    leaves = torch.randn(3, 8, E, requires_grad=True), torch.randn(6, 8, E)[::2].requires_grad_()
    for x in (torch.randn(3, 8, E), *leaves):
        report = check(make(), x, context, dense)
        if make is not Masked:
            assert all(row.stored_bytes == row.accounted_bytes for row in report.rows if row.fqn not in dense)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_types_of_the_weights(dtype: torch.dtype):
    """No copy of a weight that is 16-bit already, and one for each call of one in the other 16-bit type."""
    model = Base()
    model.a.to(dtype)
    check(model, torch.randn(3, 8, E), dense=("norm", "b"))
