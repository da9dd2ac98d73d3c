"""What a report says that the dense model would keep is what the dense model keeps, byte for byte."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_actprune.analysis.first_batch import RetentionProbe
from lightning_actprune.analysis.memory import MemoryReport, SavedTensorMeter
from lightning_actprune.config import PRESETS, Keep
from lightning_actprune.convert import convert, revert
from lightning_actprune.operators.saved import SavedTensorCompression
from tests.support.copy_models import (
    ELEMENTS,
    MODELS,
    Base,
    CalledTwice,
    E,
    Leaf,
    LearnedQueries,
    Masked,
    Random,
    RegionPerLayer,
    SizedAttention,
    Tied,
    TwoRegions,
    bf16,
)
from tests.support.marks import cover
from tests.support.saving import bytes_saved


class Transformer(nn.Module):
    def __init__(self, width: int = 64, again: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2, self.gamma = nn.LayerNorm(width), nn.LayerNorm(width), nn.Parameter(torch.ones(width))
        self.qkv, self.proj, self.drop = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * width, width))
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.drop(self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        if self.again:
            return x + self.gamma * checkpoint(self.mlp, self.norm2(x), use_reentrant=False)
        return x + self.gamma * self.mlp(self.norm2(x))


class Residual(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.act1, self.act2 = nn.ReLU(inplace=True), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act2(self.norm2(self.conv2(self.act1(self.norm1(self.conv1(x))))) + x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm, self.last = nn.Linear(64, 64), nn.LSTM(64, 64, batch_first=True), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sigmoid(self.lstm(self.first(x))[0]))


def case(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    rows, images = torch.randn(2, 24, 64), torch.randn(2, 3, 12, 12)
    pooled = nn.Conv2d(3, 16, 3), nn.MaxPool2d(2)
    made: dict[str, tuple[nn.Module, Tensor]] = {
        "transformer": (nn.Sequential(nn.Linear(64, 64), Transformer(), Transformer(), nn.Linear(64, 8)), rows),
        "checkpointed": (nn.Sequential(nn.Linear(64, 64), Transformer(again=True), nn.Linear(64, 8)), rows),
        "residual": (nn.Sequential(*pooled, Residual(), Residual(), nn.Flatten(), nn.Linear(400, 8)), images),
        "recurrent": (Recurrent(), rows),
        "encoder": (nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation="gelu"), rows)
    }  # fmt: skip
    return made[name]


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
        ["transformer", "checkpointed", "residual", "recurrent", "encoder"],
        [name for name in PRESETS if name != "recompute"],  # which needs blocks
        [False, True],
    ),
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


def test_a_measured_forward_changes_neither_the_module_nor_its_randomness():
    model, x = case("residual")
    model.insert(4, nn.Dropout(0.5))
    hooked: list[nn.Module] = []
    model[2].norm1.register_forward_hook(lambda module, args, output: hooked.append(module))
    convert(model, preset="max")
    twin = copy.deepcopy(model)
    found = []
    for module, context in ((model, nullcontext()), (twin, SavedTensorMeter(twin, x))):
        torch.manual_seed(3)
        with context as meter:
            found.append((module(x), torch.get_rng_state(), *module.buffers()))
    assert meter.report().saved_bytes > 0
    assert all(map(torch.equal, *found))
    assert len(hooked) == 2  # once in each real forward


def check(
    model: nn.Module,
    x: Tensor,
    make_context: Callable[[], AbstractContextManager[Any]] = bf16,
    dense: tuple[str, ...] = (),
) -> MemoryReport:
    """Return the report of the compressed model, whose figures are what autograd keeps before and after ``convert``."""
    dense_bytes = bytes_saved(model, x, context=make_context())
    convert(model, rules={**dict.fromkeys(dense), "type:linear": Keep(sparsity=0.6, block_size=16), "*": None})
    stored_bytes = bytes_saved(model, x, context=make_context())
    with SavedTensorMeter(model, x) as meter, make_context():
        model(x)
    revert(model)
    report = meter.report()
    assert (report.dense_bytes, report.stored_bytes) == (dense_bytes, stored_bytes)
    assert report.saved_bytes == dense_bytes - stored_bytes
    return report


@pytest.mark.parametrize("make", [*MODELS, TwoRegions, RegionPerLayer])
def test_saved_is_what_the_dense_model_keeps_more(make):
    report = check(make(), torch.randn(3, 8, E))
    if make is not Masked:  # which saves the weight that it has made, too
        assert all(row.stored_bytes == row.accounted_bytes for row in report.rows)


@pytest.mark.parametrize(
    ("make", "dense"), [(LearnedQueries, ()), (LearnedQueries, ("a",)), (Leaf, ("b",)), (Leaf, ())]
)
def test_one_copy_of_a_leaf_that_several_layers_read(make, dense):
    for x in (torch.randn(3, 8, E), torch.randn(6, 8, E)[::2]):
        check(make(), x.requires_grad_(), dense=dense)


@pytest.mark.parametrize("make", [Base, SizedAttention, TwoRegions, RegionPerLayer])
def test_each_region_has_copies_of_its_own_and_without_autocast_there_are_none(make):
    check(make(), torch.randn(3, 8, E), nullcontext)


@pytest.mark.parametrize("copies", [1, 2])
def test_no_copy_is_kept_of_a_layer_whose_input_needs_no_gradient(copies: int):
    model = nn.Sequential(nn.Linear(E, 96), nn.GELU(), nn.Linear(96, E))
    check(model, torch.randn(3, 8, E, requires_grad=copies == 2))


def test_a_dense_layer_keeps_the_copy_of_the_weight_that_it_shares():
    assert check(Tied(), torch.randn(3, 8, E), dense=("b",)).saved_bytes > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_types_of_the_weights(dtype: torch.dtype):
    """No copy of a weight that is 16-bit already, and one for each call of one in the other 16-bit type."""
    model = CalledTwice()
    model.a.to(dtype)
    check(model, torch.randn(3, 8, E), dense=("norm", "b"))


@pytest.mark.parametrize("seed", range(12))
def test_random_models(seed: int):
    draw = random.Random(seed)
    model = Random(draw)
    dense = tuple(f"layers.{number}" for number in range(4) if draw.random() < 0.3 and number < len(model.layers))
    check(model, torch.randn(3, 8, E), (bf16, nullcontext)[seed % 2], dense=dense)


def test_measuring_does_not_change_autocast():
    model, x = Base(), torch.randn(3, 8, E)
    convert(model, sparsity=0.6)
    with torch.autocast("cpu", torch.float16), SavedTensorMeter(model, x):
        model(x)
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.float16
    with bf16(), SavedTensorMeter(model, x) as meter:
        model(x)
    assert not torch.is_autocast_enabled("cpu")
    assert meter.report().saved_bytes > 4 * ELEMENTS


def measure(model: nn.Module, batch: dict[str, Tensor]) -> MemoryReport:
    with SavedTensorMeter(model, batch) as meter:
        model(**batch)
    return meter.report()


@pytest.mark.foreign
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_gpt2_saves_what_is_announced_and_changes_no_other_gradient(autocast):
    import transformers

    sizes = {"vocab_size": 99, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
    drop = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drop, use_cache=False)).train()
    batch = dict.fromkeys(("input_ids", "labels"), torch.randint(99, (3, 32)))
    dense = copy.deepcopy(model)
    report = convert(model, rules={"type:linear": Keep(sparsity=0.6, block_size=16), "*": None})
    names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    layers = [f"transformer.h.{i}.{name}" for i in (0, 1) for name in names]
    assert [layer.fqn for layer in report.converted] == [*layers, "lm_head"]
    context = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with context, RetentionProbe(model, batch) as probe:
        model(**batch)
    retained = {layer.fqn: layer.reason for layer in probe.apply(report)}
    assert all("attn.c_proj" in fqn and "scaled_dot_product" in reason for fqn, reason in retained.items())
    with context:
        plain, found = measure(dense, batch), measure(model, batch)
    assert [row.fqn for row in found.rows if row.sparsity] == [layer.fqn for layer in report.converted]
    assert all(row.stored_bytes == row.accounted_bytes for row in found.rows)
    assert found.dense_bytes == plain.stored_bytes
    assert plain.stored_bytes - found.stored_bytes == found.saved_bytes > 0
    losses = [net(**batch).loss for net in (dense, model)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    weights = {f"{layer.fqn}.weight" for layer in report.converted} | {"transformer.wte.weight"}  # tied to the head
    for (name, ours), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad) == (name not in weights), name
        assert ours.grad.stride() == theirs.grad.stride()
