"""RecomputationProbe and EnergyProbe: what runs again in checkpoints, and the energy that dropped blocks hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu

from lightning_actprune.analysis.first_batch import EnergyProbe, RecomputationProbe, RetentionProbe, dropped_energy
from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.codec.blocks import Blocks
from lightning_actprune.config import Keep
from lightning_actprune.convert import convert, revert
from lightning_actprune.operators.linear import ActivationPrunedLinear
from tests.support.attention import Attending
from tests.support.checkpointing import WAYS
from tests.support.compressed import converted, laid_out
from tests.support.marks import cover, in_turn
from tests.support.packing import packed, unpacked

INSIDE = ["inside.fc1", "inside.fc2"]

pytestmark = pytest.mark.filterwarnings("ignore:Please specify CheckpointImpl:FutureWarning")


def made(way=lambda module: module, sparsity: float = 0.5) -> nn.Sequential:
    """Return a converted model with a linear layer before, two in, and one after what ``way`` checkpoints."""
    inside = nn.Sequential(OrderedDict(fc1=nn.Linear(64, 96), act=nn.GELU(), fc2=nn.Linear(96, 64)))
    parts = OrderedDict(stem=nn.Linear(64, 64), act=nn.GELU(), inside=inside, norm=nn.LayerNorm(64))
    model = nn.Sequential(parts | OrderedDict(head=nn.Linear(64, 8)))
    converted(model, sparsity)
    model.inside = way(model.inside)
    return model


def found(model: nn.Module, **options: bool) -> list[str]:
    """Return what one training step shows, by the names without the checkpoint's own module."""
    with RecomputationProbe(model, **options) as probe:
        model(torch.randn(2, 4, 64)).sum().backward()
    return [name.replace(".inner.", ".") for name in probe.recomputed]


@pytest.mark.parametrize(("way", "sparsity"), in_turn(WAYS, [0.5, 0.0]))
def test_layers_inside_a_checkpoint_are_found_whatever_makes_it(way: str, sparsity: float):
    assert found(made(WAYS[way], sparsity)) == INSIDE


def test_without_a_checkpoint_nothing_is_found():
    model = made()
    assert found(model) == []
    revert(model)
    assert found(model) == []
    with RecomputationProbe(WAYS["reentrant"](nn.Linear(64, 64))) as probe:
        pass
    assert probe.recomputed == []


@pytest.mark.parametrize("way", [WAYS["reentrant"], WAYS["non_reentrant"]])
def test_a_layer_that_runs_outside_too_saves_memory_there(way):
    inner = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    model = nn.Sequential(inner[0], nn.GELU(), inner)
    convert(model, sparsity=0.5)
    model[2] = way(inner)
    assert [name.rpartition(".")[2] for name in found(model)] == ["2"]


def test_layers_that_keep_nothing_are_not_found():
    model = made(WAYS["reentrant"])
    model.inside.inner.fc1.requires_grad_(False)
    assert found(model) == ["inside.fc2"]
    with torch.no_grad(), RecomputationProbe(model) as probe:
        model(torch.randn(2, 64))
    assert (probe.recomputed, probe.ran) == ([], True)
    with RecomputationProbe(model) as probe:
        model(torch.randn(0, 64)).sum().backward()
    assert len(probe.idle) == 4  # nothing to keep, as in an expert without tokens


@pytest.mark.parametrize(
    ("way", "need_weights", "batch_first"), cover(["reentrant", "non_reentrant"], *[(False, True)] * 2)
)
def test_both_projections_of_attention_are_found(way: str, need_weights: bool, batch_first: bool):
    inside, outside = (Attending(need_weights=need_weights, batch_first=batch_first) for _ in range(2))
    model = nn.Sequential(nn.Linear(64, 64), inside, outside)
    convert(model, sparsity=0.5)
    model[1] = WAYS[way](inside)
    assert found(model) == ["1.attn", "1.attn.out_proj"]


def test_saved_tensors_moved_inside_a_checkpoint_are_kept_and_hooks_around_it_hide_nothing():
    class Offloaded(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with save_on_cpu():
                return super().forward(x)

    assert found(made(lambda inner: WAYS["non_reentrant"](Offloaded(inner)))) == []  # goes past the checkpoint
    with save_on_cpu():
        assert found(made(WAYS["non_reentrant"])) == INSIDE
    with disable_saved_tensors_hooks("none here"):
        assert found(made(WAYS["reentrant"])) == INSIDE


def test_second_derivatives_are_no_checkpoint():
    model, x = made(sparsity=0.0), torch.randn(2, 64, requires_grad=True)
    with RecomputationProbe(model) as probe:
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
    assert probe.recomputed == []


def regions(way: Callable[[nn.Module], nn.Module] = lambda module: module) -> nn.Sequential:
    """Return a pruned model of two regions between plain layers, the same for every ``way`` to checkpoint them."""
    torch.manual_seed(1)
    one, other = (nn.TransformerEncoderLayer(64, 4, 128, dropout=0.2, batch_first=True) for _ in range(2))
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), one, nn.GELU(), other, nn.GELU(), nn.Linear(64, 8))
    convert(model, rules={"type:linear": Keep(bits=None, sparsity=0.6, block_size=16), "*": None})
    model[2], model[4] = way(one), way(other)
    return model


def step(model: nn.Module, probed: bool = False) -> list[Tensor]:
    """Return loss and gradients of one training step, the first of a fit or a later one."""
    torch.manual_seed(2)
    model.zero_grad(set_to_none=True)
    x = torch.randn(3, 10, 64)
    with RetentionProbe(model, x) if probed else nullcontext():
        loss = model(x).square().mean()
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("way", WAYS)
def test_gradients_in_the_probed_step(way: str):
    """The probe lets layers whose input is retained run dense, but not in one of the two runs of a region."""
    plain, checkpointed = regions(), regions(WAYS[way])
    expected, result = step(plain), step(checkpointed, probed=True)
    names = ["", *(name for name, _ in plain.named_parameters())]
    differ = [name for name, ours, theirs in zip(names, result, expected, strict=True) if not torch.equal(ours, theirs)]
    assert differ == ["0.weight"]  # reads the batch, so that it ran dense
    torch.testing.assert_close(step(checkpointed), expected, rtol=0, atol=0)  # and later steps are pruned as before


@pytest.mark.parametrize("way", ["reentrant", "non_reentrant"])
def test_the_meter_does_not_count_what_runs_again_in_backward(way: str):
    model, x = regions(WAYS[way]), torch.randn(3, 10, 64)
    with SavedTensorMeter(model, x) as forward:
        loss = model(x).sum()
    with SavedTensorMeter(model, x) as both:
        model(x).sum().backward()
    loss.backward()
    assert forward.report() == both.report()
    assert [row.fqn for row in both.report().rows] == ["0", "6"]


def spread_and_concentrated() -> nn.Sequential:
    """Return a layer whose input has equal blocks (of ones) and one behind a ReLU of which most blocks are zero."""
    model = nn.Sequential(nn.Linear(64, 128), nn.Softplus(beta=50), nn.Linear(128, 8))
    with torch.no_grad():
        model[0].bias.copy_(torch.where(torch.arange(128) < 32, 3.0, -3.0))
    return model


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("shape", "topk_over"), [((5, 64), "sample"), ((3, 7, 50), "token"), ((64, 1), "sample"), ((2, 3, 4, 33), "sample")]
)
def test_energy_is_what_the_unpacked_input_lacks(shape, topk_over, transposed):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if transposed:
        x = x.transpose(-1, -2)
    kept = unpacked(x, packed(x, 16, 0.4, topk_over)[0])
    dropped, total = dropped_energy(x, 0.4, Blocks(16, topk_over)).tolist()
    torch.testing.assert_close(torch.tensor(total), x.square().sum())
    torch.testing.assert_close(torch.tensor(total - dropped), kept.square().sum())


def test_energy_is_summed_in_fp32_or_wider():
    x = torch.full((4, 4096), 0.01, dtype=torch.float16)
    exact = x.double().square().sum().item()
    assert dropped_energy(x, 0.5, Blocks(32, "sample"))[1].item() == pytest.approx(exact, rel=1e-5)
    wide = torch.randn(3, 64, dtype=torch.float64)
    torch.testing.assert_close(dropped_energy(wide, 0.5, Blocks(32, "sample"))[1], wide.square().sum())


@pytest.mark.parametrize("bits", [4, None])
def test_layers_with_spread_inputs_keep_all_blocks_or_are_dense_again_where_nothing_is_quantized(bits: int | None):
    model = spread_and_concentrated()
    report = convert(model, rules={"type:linear": Keep(bits=bits, sparsity=0.5, max_dropped_energy=0.2), "*": None})
    with EnergyProbe(model) as probe:
        model(torch.ones(4, 64)).sum().backward()
    assert probe.shares["0"] == 0.5
    assert probe.shares["2"] < 0.01
    assert probe.apply(report) == ["0"]
    kept = [("0", 0.0), ("2", 0.5)] if bits else [("2", 0.5)]
    assert [(layer.fqn, layer.sparsity) for layer in report.converted] == kept
    assert type(model[0]) is (ActivationPrunedLinear if bits else nn.Linear)
    assert model[2].sparsity == 0.5
    if bits:
        assert (model[0].sparsity, model[0].bits) == (0.0, 4)
    else:
        assert ["50%" in layer.reason for layer in report.skipped if layer.fqn == "0"] == [True]
    assert revert(model) == [name for name, _ in kept]


def test_shares_are_of_all_calls_and_the_sparsity_of_a_schedule_to_come_is_judged():
    model = nn.Sequential(nn.Linear(64, 64))
    report = converted(model, 0.0, rules={"*": Keep(sparsity=0.5, max_dropped_energy=0.2)})
    with EnergyProbe(model) as now, EnergyProbe(model, sparsity=0.5) as later:
        model(torch.ones(1, 64))
        model(torch.cat([torch.full((1, 32), 1.5), torch.ones(1, 32)], 1))
    assert now.shares == {}
    assert later.shares["0"] == pytest.approx((32 + 32) / (64 + 32 * (1 + 1.5**2)))
    assert later.apply(report) == ["0"]


def test_inputs_without_a_share_and_layers_without_a_backward_are_not_judged():
    for value in (0.0, float("nan"), float("inf")):
        model = nn.Sequential(nn.Linear(64, 8))
        report = convert(model, rules={"*": Keep(sparsity=0.5, max_dropped_energy=0.0)})
        with EnergyProbe(model) as probe:
            model(torch.full((2, 64), value))
        assert probe.apply(report) == []
        assert len(report.converted) == 1
    frozen = nn.Sequential(nn.Linear(64, 64).requires_grad_(False), ActivationPrunedLinear(64, 8, sparsity=0.5))
    convert(frozen, sparsity=0.5, block_size=32)
    with EnergyProbe(frozen) as probe:
        frozen(torch.ones(1, 64, requires_grad=True))
    assert probe.shares == {}


def test_attention_is_judged_by_the_input_of_its_projections():
    attention = nn.MultiheadAttention(64, 2, batch_first=True)
    report = convert(attention, sparsity=0.5, rules={"type:linear": Keep(4, 0.5, max_dropped_energy=0.2)})
    with EnergyProbe(attention) as probe:
        attention(*[torch.ones(2, 5, 64)] * 3, need_weights=True)
    names = [layer.fqn for layer in report.converted]
    assert probe.shares[names[0]] == pytest.approx(0.5)
    assert names[0] in probe.apply(report)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_convolutions_are_judged_by_blocks_in_the_order_of_memory(last: bool):
    model, x = nn.Sequential(nn.Conv2d(32, 8, 3)), torch.ones(2, 32, 8, 8)
    convert(model, rules={"type:convolution": Keep(bits=4, sparsity=0.5)})
    x[:, :, :4] = 0  # half of the rows, whichever way blocks run
    for images, share in ((x, 0.0), (torch.ones_like(x), 0.5)):
        with EnergyProbe(model) as probe:
            model(laid_out(images, last)).sum()
        assert probe.shares == {"0": share}


def test_each_layer_has_a_limit_of_its_own():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    half, none = Keep(bits=4, sparsity=0.5, max_dropped_energy=0.4), Keep(bits=4, sparsity=0.5)
    report = convert(model, rules={"0": half, "1": none, "2": Keep(bits=4, sparsity=0.5, max_dropped_energy=0.6)})
    with EnergyProbe(model) as probe:
        for layer in model:
            layer(torch.ones(4, 64))
    assert probe.shares == {"0": 0.5, "1": 0.5, "2": 0.5}
    assert probe.apply(report) == ["0"]
    assert [layer.sparsity for layer in model] == [0.0, 0.5, 0.5]
