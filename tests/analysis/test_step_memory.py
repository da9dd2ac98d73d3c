"""StepMemory against brute force over random steps, and its recorder: what autograd keeps, byte for byte, for whom."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from lightning_actprune.analysis.first_batch import RetentionProbe
from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.analysis.plots import epochs_picture, layers_picture, step_picture
from lightning_actprune.analysis.recorder import unpack_listeners
from lightning_actprune.analysis.step_memory import (
    PHASES,
    MemoryMoment,
    Retained,
    Retainer,
    StepMemory,
    StepMemoryRecorder,
)
from lightning_actprune.config import Keep
from lightning_actprune.convert import convert
from tests.support.marks import cover
from tests.support.stack import WIDTH, Residual


def random_step(seed: int, measured: bool) -> StepMemory:
    """A step of 30 moments with 20 storages, which may be freed late, never or before the next moment."""
    rng = random.Random(seed)
    retained = []
    for _ in range(20):
        born = rng.randrange(30)
        freed = rng.choice([None, born, rng.randrange(born, 31)])
        names = [
            Retainer(f"block.{rng.randrange(3)}", rng.choice(["gelu", "mul", None])) for _ in range(rng.choice([1, 2]))
        ]
        retained.append(Retained(rng.randrange(1000), rng.random() < 0.3, born, freed, names))
    moments = []
    for i in range(30):
        peak = 40_000 + rng.randrange(5_000) if measured else None
        known = rng.randrange(100), rng.randrange(100)
        moments.append(MemoryMoment(PHASES[i // 12], f"m{i}", None, *known, peak, peak))
    return StepMemory(rng.randrange(100), rng.randrange(100), moments, retained)


def kept(step: StepMemory, index: int, packed: bool | None = None) -> int:
    return sum(h.nbytes for h in step.retained if h.is_kept_at(index) and packed in (None, h.packed))


def recorded_step(
    model: nn.Module,
    x: Tensor,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x).square().mean(),
) -> StepMemory:
    """Return the record of a step that frees the gradients of the one before when its forward is over."""
    with StepMemoryRecorder(model, x, [optimizer]) as recorder:
        value = loss(model, x)
        recorder.moment()
        optimizer.zero_grad()
        recorder.mark("backward")
        value.backward()
        recorder.mark("optimizer")
        optimizer.step()
    return recorder.result()


@pytest.mark.parametrize(("seed", "measured"), [(0, True), (1, False), (2, True)])
def test_against_brute_force(seed: int, measured: bool):
    step = random_step(seed, measured)
    indices = range(30)
    assert step.measured is measured
    assert step.activation_bytes == [kept(step, i) for i in indices]
    assert step.packed_bytes == [kept(step, i, packed=True) for i in indices]
    constant = step.parameter_bytes + step.batch_bytes
    counted = [constant + m.gradient_bytes + m.optimizer_bytes + kept(step, i) for i, m in enumerate(step.moments)]
    assert step.interval_bytes == ([moment.peak_bytes for moment in step.moments] if measured else counted)
    assert step.peak_bytes == max(step.interval_bytes)
    for phase in PHASES:
        inside = [step.interval_bytes[i] for i in indices if step.moments[i].phase == phase]
        assert step.interval_bytes[step.peak_in(phase)] == max(inside)
        assert step.moments[step.peak_in(phase)].phase == phase
    for i in indices:
        assert sum(step.parts(i).values()) == step.interval_bytes[i]
        assert min(step.parts(i).values()) >= 0
        assert sum(group.nbytes for group in step.groups(i)) == step.activation_bytes[i]
        assert sum(group.count for group in step.groups(i)) == sum(h.is_kept_at(i) for h in step.retained)
    assert [sum(column) for column in zip(*step.series(operators=1).values(), strict=True)] == counted
    # The peak falls as activations go, and stops at what is not theirs.
    peaks = [step.peak_without(tenths / 10) for tenths in range(11)]
    assert peaks[0] == step.peak_bytes
    assert peaks == sorted(peaks, reverse=True)
    for i, left in enumerate(step.bytes_without(1.0)):
        least = min(kept(step, max(i - 1, 0)), kept(step, i)) if measured else kept(step, i)
        assert left == step.interval_bytes[i] - least
    assert measured or peaks[-1] == StepMemory(step.parameter_bytes, step.batch_bytes, step.moments).peak_bytes


@pytest.mark.parametrize("fraction", [-0.1, 50, "half"])
def test_arguments_are_checked(fraction):
    step = random_step(0, True)
    for without in (step.bytes_without, step.peak_without):
        with pytest.raises((ValueError, TypeError), match=r"`fraction` .*HINT"):
            without(fraction)
    with pytest.raises(ValueError, match=r"`phase` .*'fwd'. HINT"):
        step.peak_in("fwd")


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 128, dropout=0.0, batch_first=True)


def blocks() -> nn.Module:
    return nn.Sequential(Residual(), Residual(), nn.Linear(WIDTH, 4))


def batch() -> Tensor:
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(0))


KEEPS = [None, Keep(bits=None, sparsity=0.5, block_size=16), Keep(bits=3, sparsity=0.5), Keep(bits=4)]


@pytest.mark.parametrize(("make", "keep", "autocast"), cover([blocks, attention], KEEPS, [False, True]))
def test_the_end_of_the_forward_is_what_the_meter_counts(make, keep: Keep | None, autocast: bool):
    model, x = make(), batch()
    if keep is not None:
        convert(model, rules={"type:linear": keep, "*": None})

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x).float()
        return y.square().mean()

    with SavedTensorMeter(model, x) as meter:
        loss(model, x)
    report = meter.report()
    step = recorded_step(model, x, torch.optim.SGD(model.parameters(), 0.1), loss)
    end = step.forward_end
    assert step.activation_bytes[end] == report.stored_bytes == max(step.activation_bytes)
    assert step.packed_bytes[end] == (sum(row.stored_bytes for row in report.rows) if keep is not None else 0)
    assert all(row.stored_bytes == row.accounted_bytes for row in report.rows if keep is not None)
    assert step.activation_bytes[-1] == 0
    assert all(storage.freed is not None for storage in step.retained)
    assert all(retainer.operator for storage in step.retained for retainer in storage.retainers)


def test_parameters_gradients_state_and_batch():
    model, x = blocks(), batch()
    model.register_buffer("steps", torch.zeros(7))
    model.append(nn.Linear(4, 4, bias=False))
    model.append(nn.Linear(4, 4, bias=False)).append(nn.Linear(4, 4, bias=False).requires_grad_(False))
    model[4].weight = model[3].weight
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    trained = sum(parameter.nbytes for parameter in model.parameters()) - 64
    first, second = recorded_step(model, x, optimizer), recorded_step(model, x, optimizer)
    state = 2 * trained + 4 * (len([*model.parameters()]) - 1)  # two moments, and a step in fp32 each
    assert (first.parameter_bytes, first.batch_bytes) == (trained + 64 + 28, x.nbytes)
    for step, before in ((first, 0), (second, 1)):
        begin, end = step.moments[0], step.moments[-1]
        assert (begin.gradient_bytes, begin.optimizer_bytes) == (before * trained, before * state)
        assert (end.gradient_bytes, end.optimizer_bytes) == (trained, state)
        gradients = [moment.gradient_bytes for moment in step.moments if moment.phase == "backward"]
        assert gradients == sorted(gradients)
    # The gradients of the step before are there until the forward is over.
    assert second.moments[second.forward_end - 1].gradient_bytes == trained
    assert second.moments[second.forward_end].gradient_bytes == 0


def test_backward_lets_go_in_turn_and_a_storage_goes_with_its_last_retainer():
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))), batch()
    step = recorded_step(model, x, torch.optim.SGD(model.parameters(), 0.1))
    falling = [kept for kept, m in zip(step.activation_bytes, step.moments, strict=True) if m.phase == "backward"]
    assert falling == sorted(falling, reverse=True)
    assert len(set(falling)) == 5  # four outputs of tanh, each the input of the next layer too, and nothing
    groups = {group.label: (group.count, group.nbytes) for group in step.groups(step.forward_end)}
    assert groups["*.* (tanh) + *.* (addmm)"] == (3, 3 * 3 * 5 * WIDTH * 4)
    order = dict.fromkeys((moment.fqn, moment.operator) for moment in step.moments if moment.operator)
    assert [*order][1:] == [(f"{i}.{j}", name) for i in (3, 2, 1, 0) for j, name in ((1, "tanh"), (0, "addmm"))][:-1]


def test_what_is_not_covered_is_listed_with_its_bytes():
    class Uncovered(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            first, normed, norm, pool, head = self
            return head(F.dropout(pool(norm(normed(F.relu(first(x))))), 0.1).flatten(1))

    layers = nn.Conv2d(3, 8, 3, padding=1), weight_norm(nn.Conv2d(8, 8, 3, padding=1)), nn.BatchNorm2d(8)
    model, x = Uncovered(*layers, nn.MaxPool2d(2), nn.Linear(8 * 64, 10)), torch.randn(64, 3, 16, 16)
    report = convert(model, "balanced")
    assert [(layer.fqn, "ParametrizedConv2d" in (layer.reason or "")) for layer in report.skipped] == [("1", True)]
    for _ in range(2):
        with StepMemoryRecorder(model, x) as recorder:
            model(x).square().mean().backward()
    step = recorder.result()
    result = {group.label: group.nbytes for group in step.groups(step.forward_end) if not group.packed}
    assert result["(root) (relu) + * (convolution)"] == 4 * 64 * 8 * 256  # the convolution's input, kept once
    assert result["* (max_pool2_dwith_indices)"] == 8 * 64 * 8 * 64  # its indices
    assert result["(root) (mul)"] == 4 * 64 * 8 * 64  # the mask of the dropout, in fp32 on a CPU


def test_a_second_backward_and_a_graph_that_is_dropped():
    model, x = blocks(), batch()
    with StepMemoryRecorder(model, x) as recorder:
        loss = model(x).square().mean()
        recorder.mark("backward")
        for again in (True, False):
            loss.backward(retain_graph=again)
            recorder.moment()
        loss = model(x).square().mean()
        recorder.moment()
        del loss
    step = recorder.result()
    assert step.activation_bytes.count(step.activation_bytes[step.forward_end]) >= 2  # after the first backward, too
    assert {retainer.operator for storage in step.retained[-3:] for retainer in storage.retainers} == {None}
    assert step.activation_bytes[-1] == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_keeps_its_input_alone(reentrant: bool):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Residual()), batch()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(model[1], model[0](x), use_reentrant=reentrant).square().mean()

    step = recorded_step(model, x, torch.optim.SGD(model.parameters(), 0.1), loss)
    assert [phase for phase, _ in groupby(step.moments, lambda moment: moment.phase)] == list(PHASES)
    # Its input; the loss keeps its output.
    assert sum(group.nbytes for group in step.groups(step.forward_end)) == 2 * x.nbytes
    assert step.activation_bytes[-1] == 0


def test_a_compiled_model():
    model, x = blocks(), batch()
    with SavedTensorMeter(model, x) as meter:
        model(x).square().mean().backward()
    compiled = torch.compile(model, backend="aot_eager")
    step = recorded_step(compiled, x, torch.optim.SGD(model.parameters(), 0.1))
    assert 0 < step.activation_bytes[step.forward_end] <= meter.report().stored_bytes
    assert step.activation_bytes[-1] == 0


def test_nothing_is_left_after_an_exception_or_kept_alive():
    model, x = blocks(), batch()
    with suppress(KeyError), StepMemoryRecorder(model, x) as recorder:
        output = model(x)
        twin = copy.deepcopy(model)
        before = len(recorder.result().moments)
        twin(x).sum().backward()
        raise KeyError
    assert {moment.phase for moment in recorder.result().moments[:before]} == {"forward"}
    assert unpack_listeners == []
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in (*model.parameters(), *twin.parameters()))
    assert recorder.result().activation_bytes[-1] > 0
    seen = weakref.ref(output)
    output.sum().backward()
    del output
    recorder.close()
    gc.collect()
    assert seen() is None


MIB = 2**20


def test_pictures_show_the_bytes_they_are_given(tmp_path):
    sizes = {"a": (4, 1), "b": (1, 3), "c": (0, 2), "d": (5, 5)} | {f"layer.{i}": (2, 1) for i in range(57)}
    rows = [{"fqn": name, "dense_bytes": d * MIB, "stored_bytes": s * MIB} for name, (d, s) in sizes.items()]
    (axes,) = layers_picture(rows, "a title").axes
    bars = [[(p.get_x(), p.get_width()) for p in c.patches][:4] for c in axes.containers]
    assert bars == [  # stored, saved, stored beyond dense
        [(0, 1), (0, 1), (0, 0), (0, 5)],
        [(1, 3), (1, 0), (0, 0), (5, 0)],
        [(4, 0), (1, 2), (0, 2), (5, 0)],
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == [*sizes][:60]
    history = [
        {"epoch": 3 + i, "dense_bytes": 8 * MIB, "stored_bytes": (8 - i) * MIB, "sparsity": i / 8} for i in range(4)
    ]
    figure = epochs_picture(history, "a title")
    upper, lower = figure.axes
    assert [list(line.get_ydata()) for line in upper.get_lines()] == [[8.0] * 4, [8.0 - i for i in range(4)]]
    (sparsity,) = lower.get_lines()
    assert [*zip(sparsity.get_xdata(), sparsity.get_ydata(), strict=True)] == [(3 + i, i / 8) for i in range(4)]
    panels = step_picture({"dense": random_step(0, True), "pruned": random_step(1, False)}).get_axes()
    assert [len(axes.get_lines()) for axes in panels] == [4, 3]  # a line a phase, and the allocator's
    figure.savefig(tmp_path / "epochs.png")
    for picture in (layers_picture, epochs_picture):
        with pytest.raises(ValueError, match="HINT"):
            picture([])


WIDE = 256


def mlp(outputs: int) -> nn.Module:
    layers = nn.LayerNorm(WIDE), nn.Linear(WIDE, 4 * WIDE), nn.GELU(), nn.Linear(4 * WIDE, WIDE)
    return nn.Sequential(*(copy.deepcopy(layer) for _ in range(6) for layer in layers), nn.Linear(WIDE, outputs))


def autocast_loss(model, x):
    with torch.autocast("cuda", torch.bfloat16):
        return model(x).float().square().mean()


def plain_step(model, x, optimizer):
    loss = autocast_loss(model, x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def slack(step):
    """Return by how much bytes in use may differ: a cached block is handed out whole if less than 1 MiB is left."""
    return 2**20 * sum(storage.nbytes >= 2**20 for storage in step.retained)


@pytest.mark.gpu
@pytest.mark.parametrize(("sparsity", "outputs"), [(None, 8192), (0.6, 16), (0.6, 8192)])
def test_peak_and_parts(sparsity: float | None, outputs: int):
    torch.manual_seed(0)
    model, x = mlp(outputs).cuda(), torch.randn(16, 196, WIDE, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    if sparsity is not None:
        report = convert(model, sparsity=sparsity)
        with RetentionProbe(model, x) as probe:
            model(x).sum().backward()
        probe.apply(report)
    for _ in range(3):
        plain_step(model, x, optimizer)
    gc.collect()  # tensors of other tests would go at any moment
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    plain_step(model, x, optimizer)
    plain = torch.cuda.max_memory_allocated()
    step = recorded_step(model, x, optimizer, autocast_loss)
    assert step.measured
    assert abs(step.peak_bytes - plain) <= slack(step)
    for index, moment in enumerate(step.moments):
        assert moment.peak_bytes >= moment.used_bytes
        assert sum(step.parts(index).values()) == step.interval_bytes[index]
    first, last = step.moments[0], step.moments[step.forward_end]
    start, end = (
        sum(nbytes for name, nbytes in step.parts(index).items() if name != "other") for index in (0, step.forward_end)
    )
    assert abs(last.used_bytes - first.used_bytes - (end - start)) <= slack(step)
    assert step.activation_bytes[-1] == 0
    assert None not in map(step.peak_in, PHASES)
    # A wide head makes the gradient of its output the peak, which fewer activations move only so far.
    if outputs == 8192:
        assert step.moments[step.peak_in()].phase == "backward"
    assert step.peak_without(1.0) < step.peak_without(0.5) < step.peak_bytes


@pytest.mark.gpu
def test_the_peak_of_the_optimizer_step():
    """With little kept for backward the temporary tensors of a foreach optimizer are the peak."""
    model, x = mlp(16).cuda(), torch.randn(1, 8, WIDE, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        plain_step(model, x, optimizer)
    step = recorded_step(model, x, optimizer, autocast_loss)
    index = step.peak_in()
    assert step.moments[index].phase == "optimizer"
    assert step.parts(index)["other"] > 0
    assert step.peak_without(1.0) == step.peak_bytes
