"""StepMemoryRecorder on the CPU: byte for byte what autograd keeps, when, and for whom."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_actprune import convert
from lightning_actprune.footprint import SavedTensorMeter
from lightning_actprune.saved import unpack_listeners
from lightning_actprune.step_recorder import StepMemoryRecorder, operator_name
from tests.recorded import recorded_step

WIDTH = 64


class Block(nn.Module):
    """A residual block with parallel heads that read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 128, dropout=0.0, batch_first=True)


def blocks() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 4))


def batch() -> Tensor:
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("make", [blocks, attention])
@pytest.mark.parametrize("sparsity", [None, 0.5])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_end_of_the_forward_is_what_the_meter_counts(make, sparsity: float | None, autocast: bool):
    torch.manual_seed(0)
    model, x = make(), batch()
    if sparsity is not None:
        convert(model, sparsity=sparsity, block_size=16)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x).float()
        return y.square().mean()

    with SavedTensorMeter(model, x) as meter:
        loss(model, x)
    report = meter.report()
    step = recorded_step(model, x, torch.optim.SGD(model.parameters(), 0.1), loss)
    end = step.forward_end
    assert step.activation_bytes[end] == report.total_bytes == max(step.activation_bytes)
    assert step.packed_bytes[end] == sum(row.stored_bytes for row in report.rows if row.sparsity > 0)
    assert step.activation_bytes[-1] == 0
    assert all(holding.freed is not None for holding in step.holdings)
    assert all(holder.operator for holding in step.holdings for holder in holding.holders)


def test_nothing_else_in_the_step_changes():
    gradients = []
    for record in (False, True):
        torch.manual_seed(0)
        model, x = blocks(), batch()
        convert(model, sparsity=0.5, block_size=16)
        if record:
            recorded_step(model, x, torch.optim.SGD(model.parameters(), 0.0))
        else:
            model(x).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_parameters_gradients_state_and_batch():
    model, x = blocks(), batch()
    model.register_buffer("steps", torch.zeros(7))
    optimizer = torch.optim.AdamW(model.parameters())
    trained = sum(parameter.nbytes for parameter in model.parameters())
    first, second = recorded_step(model, x, optimizer), recorded_step(model, x, optimizer)
    state = 2 * trained + sum(4 for _ in model.parameters())  # two moments, and a step in fp32 each
    assert (first.parameter_bytes, first.batch_bytes) == (trained + 28, x.nbytes)
    for step, before in ((first, 0), (second, 1)):
        begin, end = step.moments[0], step.moments[-1]
        assert (begin.gradient_bytes, begin.optimizer_bytes) == (before * trained, before * state)
        assert (end.gradient_bytes, end.optimizer_bytes) == (trained, state)
        kept = [moment.gradient_bytes for moment in step.moments if moment.phase == "backward"]
        assert kept == sorted(kept)
    # The gradients of the step before are there until the forward is over.
    assert second.moments[second.forward_end - 1].gradient_bytes == trained
    assert second.moments[second.forward_end].gradient_bytes == 0


def test_backward_lets_go_in_turn():
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))), batch()
    step = recorded_step(model, x, torch.optim.SGD(model.parameters(), 0.1))
    falling = [kept for kept, m in zip(step.activation_bytes, step.moments, strict=True) if m.phase == "backward"]
    assert falling == sorted(falling, reverse=True)
    assert len(set(falling)) == 5  # four outputs of tanh, each the input of the next layer too, and nothing
    names = [(moment.fqn, moment.operator) for moment in step.moments if moment.operator]
    order = [name for i, name in enumerate(names) if name not in names[:i]]
    assert order[1:] == [(f"{i}.{j}", name) for i in (3, 2, 1, 0) for j, name in ((1, "tanh"), (0, "addmm"))][:-1]


def test_a_storage_with_several_holders_goes_with_the_last():
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4)), batch()
    step = recorded_step(model, x, torch.optim.SGD(model.parameters(), 0.1))
    groups = {group.label: (group.count, group.nbytes) for group in step.groups(step.forward_end)}
    assert groups["* (relu) + * (addmm)"] == (1, 3 * 5 * WIDTH * 4)
    [shared] = [holding for holding in step.holdings if len(holding.holders) == 2]
    assert [(holder.fqn, holder.operator) for holder in shared.holders] == [("1", "relu"), ("2", "addmm")]


def test_what_is_packed_once_is_counted_once():
    torch.manual_seed(0)
    model, x = Block(), batch()
    convert(model, sparsity=0.5, block_size=16)
    step = recorded_step(nn.Sequential(model), x, torch.optim.SGD(model.parameters(), 0.1))
    packed = [holding for holding in step.holdings if holding.packed]
    names = [tuple(holder.fqn for holder in holding.holders) for holding in packed]
    assert sorted(names) == [("0.down",)] * 3 + [("0.gate", "0.up")] * 3


def test_kept_for_a_second_backward():
    model, x = blocks(), batch()
    with StepMemoryRecorder(model, x) as recorder:
        loss = model(x).square().mean()
        recorder.mark("backward")
        loss.backward(retain_graph=True)
        recorder.moment()
        loss.backward()
    step = recorder.result()
    end = step.activation_bytes[step.forward_end]
    assert end in step.activation_bytes[len(step.moments) // 2 :]
    assert step.activation_bytes[-1] == 0


def test_a_graph_that_is_dropped():
    model, x = blocks(), batch()
    with StepMemoryRecorder(model, x) as recorder:
        loss = model(x).square().mean()
        recorder.moment()
        del loss
        recorder.moment()
    step = recorder.result()
    assert step.activation_bytes[-3] > 0
    assert step.activation_bytes[-2:] == [0, 0]
    assert {holder.operator for holding in step.holdings for holder in holding.holders} == {None}


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_keeps_its_input_alone(reentrant: bool):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block()), batch()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(model[1], model[0](x), use_reentrant=reentrant).square().mean()

    step = recorded_step(model, x, torch.optim.SGD(model.parameters(), 0.1), loss)
    assert {moment.phase for moment in step.moments} == {"forward", "backward", "optimizer"}
    phases = [moment.phase for moment in step.moments]
    assert phases == sorted(phases, key=["forward", "backward", "optimizer"].index)
    kept = step.groups(step.forward_end)
    # Its input; the loss keeps its output.
    assert sum(group.nbytes for group in kept) == 2 * x.nbytes
    assert step.activation_bytes[-1] == 0


@pytest.mark.parametrize("marked", [True, False])
def test_several_forwards_in_a_step(marked: bool):
    model, x = blocks(), batch()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with StepMemoryRecorder(model, x, [optimizer]) as recorder:
        for _ in range(2):
            loss = model(x).square().mean()
            if marked:
                recorder.mark("backward")
            loss.backward()
            if marked:
                recorder.mark("optimizer")
            optimizer.step()
    step = recorder.result()
    phases = [moment.phase for moment in step.moments]
    changes = [phase for i, phase in enumerate(phases) if i == 0 or phases[i - 1] != phase]
    one = ["forward", "backward", "optimizer"] if marked else ["forward", "backward"]
    assert changes == one * 2
    assert step.activation_bytes[-1] == 0


def test_the_order_of_recorders_does_not_matter():
    model, x = blocks(), batch()
    with SavedTensorMeter(model, x) as meter, StepMemoryRecorder(model, x) as recorder, SavedTensorMeter(model) as late:
        loss = model(x).square().mean()
    loss.backward()
    step = recorder.result()
    assert step.activation_bytes[-1] == meter.report().total_bytes
    assert late.report().total_bytes == step.activation_bytes[-1] + x.nbytes


def test_a_compiled_model():
    torch.manual_seed(0)
    model, x = blocks(), batch()
    with SavedTensorMeter(model, x) as meter:
        loss = model(x).square().mean()
    loss.backward()
    compiled = torch.compile(model, backend="aot_eager")
    step = recorded_step(compiled, x, torch.optim.SGD(model.parameters(), 0.1))
    assert 0 < step.activation_bytes[step.forward_end] <= meter.report().total_bytes
    assert step.activation_bytes[-1] == 0
    assert torch.compile(model, backend="aot_eager")(x).shape == (3, 5, 4)


def test_everything_is_undone_after_an_exception():
    model, x = blocks(), batch()
    recorder, outputs = StepMemoryRecorder(model, x), []

    def step() -> None:
        with recorder:
            outputs.append(model(x))
            raise RuntimeError("in the step")

    with pytest.raises(RuntimeError, match="in the step"):
        step()
    assert unpack_listeners == []
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert recorder.result().activation_bytes[-1] > 0
    outputs.pop().sum().backward()
    recorder.close()


def test_no_tensor_is_kept_alive():
    model, x = blocks(), batch()
    with StepMemoryRecorder(model, x) as recorder:
        out = model(x)
        seen = weakref.ref(out)
        del out
    gc.collect()
    assert seen() is None
    assert recorder.result().holdings


def test_a_model_copied_meanwhile():
    model, x = blocks(), batch()
    with StepMemoryRecorder(model, x) as recorder:
        twin = copy.deepcopy(model)
        before = len(recorder.result().moments)
        twin(x).sum().backward()
        phases = {moment.phase for moment in recorder.result().moments[:before]}
    assert phases == {"forward"}
    assert not any(parameter._post_accumulate_grad_hooks for parameter in twin.parameters())


def test_frozen_and_shared_parameters():
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), batch()
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    step = recorded_step(model, x, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1))
    weight, bias = WIDTH * WIDTH * 4, WIDTH * 4
    assert step.parameter_bytes == 2 * weight + 3 * bias
    assert step.moments[-1].gradient_bytes == weight + 2 * bias


def test_operator_names():
    assert operator_name("NativeLayerNormBackward0") == "native_layer_norm"
    assert operator_name("AddmmBackward0") == "addmm"
    assert operator_name("PrunedLinearFunctionBackward") == "pruned_linear_function"
    assert (
        operator_name("ScaledDotProductFlashAttentionForCpuBackward0") == "scaled_dot_product_flash_attention_for_cpu"
    )
    assert operator_name("UpsampleBilinear2DBackward0") == "upsample_bilinear2_d"
