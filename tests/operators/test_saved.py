"""SavedTensorCompression: what it packs and how exactly, what it leaves alone, what is shared, counted and refused."""

from __future__ import annotations

import copy
import gc
import io
import json
import math
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_actprune.analysis.first_batch import RetentionProbe
from lightning_actprune.analysis.memory import SavedTensorMeter, StepMemoryRecorder
from lightning_actprune.codec import autograd
from lightning_actprune.config import Keep
from lightning_actprune.convert import convert
from lightning_actprune.operators.regions import layout_of
from lightning_actprune.operators.saved import SavedTensorCompression, is_weight
from lightning_actprune.operators.sites import is_own_result
from tests.support.checkpointing import WAYS
from tests.support.compression import (
    DENSE,
    SHAPE,
    STORED,
    Product,
    Runs,
    activation,
    attention,
    bound,
    gradients,
    made,
    packed,
    read_back,
    top_hooks,
    typical,
)
from tests.support.helpers import Net, assert_plain, trainer

pytestmark = pytest.mark.filterwarnings("ignore:Please specify CheckpointImpl:FutureWarning")


BLOCK = 32
BITS = [8, 4, 3, 2]
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "q of qkv": lambda x: x.reshape(4, 5, 4, 4, 16).permute(2, 0, 3, 1, 4)[1],
    "every other": lambda x: x[..., ::2],
    "channels_last": lambda x: x.reshape(2, 8, 16, 20).to(memory_format=torch.channels_last),
}


def in_blocks(values: Tensor, x: Tensor) -> Tensor:
    """Return ``values`` in the order of the addresses of ``x``, cut into blocks."""
    order = sorted(range(x.dim()), key=lambda dim: -x.stride(dim))
    return values.detach().permute(order).reshape(-1, BLOCK).double()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lay_out", LAYOUTS.values(), ids=LAYOUTS)
def test_backward_reads_values_within_half_a_step(lay_out, dtype: torch.dtype, bits: int):
    x = lay_out(activation(dtype=dtype))
    blocks = in_blocks(x, x)
    most = bound(blocks, bits)
    rounding = torch.finfo(dtype).eps * (blocks.abs() + most)
    error = in_blocks(read_back(x, bits), x) - blocks
    assert (error.abs() <= most + rounding).all()
    assert error.abs().max() > most.min() / 2  # it was not exact either


@pytest.mark.parametrize("lay_out", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("bits", [8, 3])
def test_kernels_read_every_layout(lay_out, bits: int, device: torch.device):
    x = lay_out(activation(dtype=torch.bfloat16, device=device))
    blocks = in_blocks(x, x)
    error = in_blocks(read_back(x, bits), x) - blocks
    most = bound(blocks, bits)
    assert (error.abs() <= most + torch.finfo(x.dtype).eps * (blocks.abs() + most)).all()


def test_errors_are_without_bias():
    """Over many places, errors of equal values are uniform within a step: their mean is within 5 sigma of zero."""
    x = torch.linspace(-1, 1, BLOCK).repeat(4000, 1).requires_grad_() * 1
    error = (read_back(x, 2) - x.detach()).double()
    half = bound(x.detach()[:1], 2).item()
    assert error.abs().max() > half / 2
    assert (error.mean(0).abs() < 5 * half / 3**0.5 / 4000**0.5).all()


OPERATIONS = {
    "gamma": (lambda x, gamma: x * gamma, (64,)),
    "addcmul": (lambda x, gamma: torch.addcmul(x, x.sin(), gamma), (64,)),
    "layer_norm": (lambda x, g, b: F.layer_norm(x, (64,), g, b), (64,), (64,)),
    "linear": (lambda x, w: F.linear(x, w), (48, 64)),
    "bmm": (lambda x, w: torch.bmm(x @ w, x.mT), (64, 64)),
    "conv": (lambda x, w: F.conv2d(x.reshape(4, 8, 10, 16).to(memory_format=torch.channels_last), w), (8, 8, 3, 3)),
    "attention": (attention, (64, 192)),
    "mlp": (lambda x, w: torch.tanh(F.gelu(x @ w)) * x[..., :32], (64, 32)),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
@pytest.mark.parametrize("math", [False, True], ids=["fused", "math"])
def test_gradients_are_close_and_the_output_exact(operation, math: bool):
    """Of the size of the step: no gradient depends on more than three quantized tensors."""
    model, x = Runs(*operation), activation()
    backend = torch.nn.attention.SDPBackend.MATH if math else torch.nn.attention.SDPBackend.FLASH_ATTENTION
    with torch.nn.attention.sdpa_kernel([backend, torch.nn.attention.SDPBackend.MATH]):
        expected, y = gradients(model, x, lambda y: y.square().sum()), model(x)
        for bits in (8, 4):
            with SavedTensorCompression(model, Keep(bits=bits), min_values=256) as saving:
                made = gradients(model, x, lambda y: y.square().sum())
                torch.testing.assert_close(model(x), y, rtol=0, atol=0)
            assert saving.rows
            for gradient, exact in zip(made, expected, strict=True):
                assert (gradient - exact).norm() <= 3 * typical(bits) * exact.norm()


def test_gradients_of_inputs_are_exact_where_they_need_weights_alone():
    """With a mask, a norm and a scale of the weight, none of which is a parameter."""

    def run(x: Tensor, w: Tensor) -> Tensor:
        x = F.linear(x, w)
        x = F.linear(x, w * (w > 0))
        return F.linear(x, w / w.norm(dim=1, keepdim=True)) @ w.t().contiguous()

    model, x = Runs(run, (64, 64)), activation()
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected = gradients(model, x)
            with SavedTensorCompression(model, Keep(bits=2), min_values=1) as saving:
                made = gradients(model, x)
        torch.testing.assert_close(made[0], expected[0], rtol=0, atol=0)
        assert {row.shape for row in saving.rows} <= {(80, 64), SHAPE}
        assert not torch.equal(made[1], expected[1])


ONES = torch.ones(64, requires_grad=True)
LEFT: dict[str, Any] = {
    "softmax": lambda x: x.softmax(-1),
    "loss": lambda x: F.cross_entropy(x.flatten(0, 1), torch.arange(80) % 64),
    "relu": lambda x: x.relu(),
    "exp": lambda x: x.exp(),
    "dropout": lambda x: F.dropout(x, 0.5, True),
    "detached": lambda x: x.detach() * ONES,
    "expanded": lambda x: x[:1].expand(SHAPE) * ONES,
    "one value a row": lambda x: x.mean(-1, keepdim=True) * ONES,
    "double": lambda x: x.double().square(),
    "complex": lambda x: torch.view_as_complex(x.view(4, 20, 32, 2)).square(),
    "sparse": lambda x: torch.sparse.mm(x[0].detach().to_sparse(), ONES.view(64, 1)),
    "leaf": lambda x: ONES.square(),
    "view of a leaf": lambda x: ONES.view(8, 8).square(),
    "nested": lambda x: torch.nested.nested_tensor([x[0].detach(), x[1].detach()], requires_grad=True).sin(),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("operation", LEFT.values(), ids=LEFT)
def test_what_does_not_qualify_is_left_alone(operation):
    saved = []
    model = Runs(operation)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.dtype), lambda tensor: tensor)
    with SavedTensorCompression(model, min_values=1) as saving, hooks:
        model(activation())
    assert saving.rows == []
    assert torch.uint8 not in saved


def test_an_input_flattened_to_the_shape_of_a_weight_is_packed_and_a_flattened_weight_is_not():
    model, x = Runs(lambda x, w, conv: F.linear(x, w) @ (conv * 2).view(80, 24), (80, 64), (20, 4, 2, 12)), activation()
    expected = gradients(model, x)
    with SavedTensorCompression(model, min_values=256) as saving:
        made = gradients(model, x)
    assert [(row.shape, row.count) for row in saving.rows] == [((80, 64), 1), ((80, 80), 1)]
    torch.testing.assert_close(made[0], expected[0], rtol=0, atol=0)


def test_few_values_and_no_gradient():
    model, x = Product(), activation()
    for values, count in ((x.numel(), 1), (x.numel() + 1, 0)):
        with SavedTensorCompression(model, min_values=values) as saving:
            model(x, torch.ones(64, requires_grad=True))
        assert len(saving.rows) == count
    with SavedTensorCompression(model, min_values=1) as saving, torch.no_grad():
        model(x, x)
    assert saving.rows == []


def test_views_of_one_region_are_packed_once_and_counted_once():
    def run(x: Tensor, w: Tensor) -> Tensor:
        return x * w + x.flatten(0, 1).mul(w).view_as(x) + x.mT.contiguous().mT * w + (x.mT * w[:, None]).mT

    model, x = Runs(run, (64,)), activation()
    expected = gradients(model, x)
    with SavedTensorCompression(model, min_values=256) as saving:
        made = gradients(model, x)
    assert sum(row.count for row in saving.rows) == 2  # the third is a copy
    stored = x.numel() // BLOCK * (BLOCK + 2)
    assert [(r.dense_bytes, r.stored_bytes) for r in saving.rows] == [(2 * x.nbytes, 2 * stored)]
    assert (made[1] - expected[1]).norm() <= typical(8) * expected[1].norm()


def test_another_version_region_or_type_is_packed_for_itself():
    def run(x: Tensor) -> Tensor:
        ones = torch.ones(64, requires_grad=True)
        x = x.clone()
        y = (x * ones).square()
        if model.calls:
            x.mul_(2)  # also x[:2], a part of the same storage
        model.calls += 1
        return y.sum() + (x * ones).sum() + (x[:2] * ones).sum()

    model = Runs(run)
    model.calls = 0
    with SavedTensorCompression(model, min_values=256) as saving:
        model(activation())
        saving.reset()
        model(activation())
    assert sum(row.count for row in saving.rows) == 4  # with the product


def test_a_pack_lives_as_long_as_its_graph():
    model, x, probe = Product(), activation(), torch.ones(SHAPE, requires_grad=True)
    with SavedTensorCompression(model, min_values=256) as saving:
        first, second = model(x, probe), model(x, probe)  # two forwards before backward
        assert [row.count for row in saving.rows] == [1]
        first.sum().backward(retain_graph=True, inputs=[probe])
        first.sum().backward(inputs=[probe])
        second.sum().backward(inputs=[probe])
        torch.testing.assert_close(probe.grad, 3 * x.detach(), rtol=0, atol=0.1)
        assert not saving._packed._storages
        model(x, probe)
        assert [row.count for row in saving.rows] == [2]
    saving.reset()
    assert saving.rows == []


def test_what_something_retains_as_it_is_stays_so():
    """ReLU and softmax keep their results, which the next layer would keep too."""
    for first in (torch.relu, lambda x: x.softmax(-1)):
        model = Runs(lambda x, w: F.linear(first(x), w), (48, 64))  # noqa: B023
        with SavedTensorCompression(model, min_values=256) as saving:
            y = model(activation())
            assert (80, 64) not in {row.shape for row in saving.rows}
        assert saving.retained_twice_bytes == 0
        y.sum().backward()
        assert not saving._unchanged._storages


def test_what_is_retained_as_it_is_only_later_is_counted():
    model = Runs(lambda x, w: (x * w).sum() + (x.detach() * w).sum() + (x.detach() * w).sum(), (64,))
    x = activation()
    with SavedTensorCompression(model, min_values=256) as saving:
        model(x)
        assert saving.rows == []  # by the time that it was decided, it was known
        model(x)
    assert saving.retained_twice_bytes == x.numel() // BLOCK * (BLOCK + 2) == saving.rows[0].stored_bytes


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("decided", [True, False])
def test_a_tensor_written_to_after_it_was_saved_is_right_or_an_error(packed: bool, decided: bool):
    """An error in the first forward, in which it waits until its operation is known."""
    probe, before, writes = torch.ones(SHAPE, requires_grad=True), [], []

    def run(x: Tensor) -> Tensor:
        kept = x.clone() if packed else x.softmax(-1)  # a result is left as it is
        loss = (kept * probe).sum()
        before.append(kept.detach().clone())
        if writes:
            with torch.no_grad():
                kept.zero_()
        return loss

    model = Runs(run)
    with SavedTensorCompression(model, min_values=256):
        if decided:
            model(activation())
        writes.append(True)
        before.clear()
        loss = model(activation())
    if packed and decided:
        loss.backward()
        torch.testing.assert_close(probe.grad, before[0], rtol=0, atol=0.05)
    else:
        with pytest.raises(
            RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"
        ):
            loss.backward()


def test_a_parameter_written_to_before_backward_is_an_error():
    model = nn.Linear(64, 64)
    with SavedTensorCompression(model, min_values=256):
        y = model(activation())
    with torch.no_grad():
        model.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_rows_name_children_and_what_has_children():
    model = nn.Sequential(nn.Sequential(nn.LayerNorm(64), nn.GELU()), nn.SiLU())
    with SavedTensorCompression(model, Keep(bits=4), min_values=256) as saving:
        for _ in range(2):
            model(activation())
    stored = SHAPE[0] * SHAPE[1] * 2 * 18
    found = [(r.fqn, r.shape, r.dtype, r.count, r.dense_bytes, r.stored_bytes) for r in saving.rows]
    assert found == [
        ("0", SHAPE, torch.float32, 4, 4 * 4 * 80 * 64, 4 * stored),
        ("1", SHAPE, torch.float32, 2, 2 * 4 * 80 * 64, 2 * stored),
    ]


def test_what_is_saved_while_dense_modules_run_is_left_alone():
    model = nn.Sequential(nn.Sequential(nn.LayerNorm(64), nn.GELU()), nn.SiLU())
    with SavedTensorCompression(model, min_values=256, dense=lambda fqn: fqn in ("0.1", "1")) as saving:
        model(activation())
    assert [(row.fqn, row.count) for row in saving.rows] == [("0", 1)]


class Own(nn.Module):
    """Saves something itself, beside what its child does."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Sequential(nn.LayerNorm(64))

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x).square()


@pytest.mark.parametrize(("dense", "packed"), [("", {"child", "(root)"}), ("(root)", {"child"}), ("child", {"(root)"})])
def test_of_the_model_itself_what_it_saves_is_left_alone_and_not_what_is_in_it(dense: str, packed: set[str]):
    model = Own()
    with SavedTensorCompression(model, min_values=256, dense=dense.__eq__) as saving:
        model(activation())
    assert {row.fqn for row in saving.rows} == packed


def test_children_and_what_has_children_may_be_called_from_outside():
    model = nn.Sequential(nn.ModuleDict({"a": nn.Sequential(nn.Sequential(nn.GELU()))}), nn.SiLU())
    with SavedTensorCompression(model, min_values=256) as saving:
        for module in (model[1], model[0]["a"], model[0]["a"][0]):
            module(activation())
    assert [row.fqn for row in saving.rows] == ["1", "0.a.0"]
    assert saving.rows[1].count == 2


def test_modules_count_as_children_whatever_their_length_is():
    class Block(nn.Module):
        """Its only child is an empty list, which is false; its own length, once compiled, is an error."""

        def __init__(self) -> None:
            super().__init__()
            self.later = nn.ModuleList()

        def forward(self, x: Tensor) -> Tensor:
            return x.square()

    compiled = torch.compile(Block(), backend="eager")
    model = nn.ModuleDict({"compiled": nn.ModuleList([compiled]), "eager": nn.ModuleList([Block()])})
    with SavedTensorCompression(model, min_values=256) as saving:
        model["eager"][0](activation())
    assert [row.fqn for row in saving.rows] == ["eager.0"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"keep": Keep(sparsity=0.5)}, ValueError, r"`keep` must have `bits`.*HINT"),
        ({"keep": "int8"}, TypeError, r"`keep` must be a Keep, got 'int8'. HINT"),
        ({"parameter_bits": 5}, ValueError, r"`parameter_bits` must be 2, 3, 4, 8 or None, got 5"),
        ({"min_values": 0}, ValueError, r"`min_values` must be an int >= 1, got 0. HINT"),
        ({"min_values": 1.5}, TypeError, r"`min_values` must be an int >= 1, got 1.5. HINT"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        SavedTensorCompression(nn.Linear(8, 8), **arguments)


def gamma_first(x: Tensor, gamma: Tensor) -> Tensor:
    return gamma * x


FOR_A_PARAMETER = {
    "gamma * x": gamma_first,
    "x * gamma": lambda x, gamma: x * gamma,
    "view": lambda x, gamma: x * gamma.view(1, 1, -1),
    "addcmul": lambda x, gamma: torch.addcmul(x.sum(), gamma, x),
    "16 bits": lambda x, gamma: x.bfloat16() * gamma,
}
NOT_ALONE = {
    "layer_norm": lambda x, gamma: F.layer_norm(x, (64,), gamma),
    "of two activations": lambda x, gamma: x * (x + gamma),
}
AS_THEY_ARE = {
    "quotient": lambda x, gamma: x / gamma,
    "the other quotient": lambda x, gamma: gamma / (x.square() + 0.1),
    "clamp": lambda x, gamma: torch.clamp(x, max=gamma),
    "prelu": lambda x, gamma: F.prelu(x.transpose(1, 2), gamma),
    "maximum": torch.maximum,
    "lerp": lambda x, gamma: torch.lerp(x, x.sin(), gamma),
    "logaddexp": torch.logaddexp,
    "copysign": torch.copysign,
}


@pytest.mark.parametrize("name", [*FOR_A_PARAMETER, *NOT_ALONE, *AS_THEY_ARE])
def test_what_a_parameters_gradient_needs_alone_has_bits_of_its_own(name: str):
    model, x = Runs((FOR_A_PARAMETER | NOT_ALONE | AS_THEY_ARE)[name], (64,)), activation()
    expected = gradients(model, x)
    with SavedTensorCompression(model, Keep(bits=8), min_values=256, parameter_bits=2) as saving:
        for _ in range(2):  # the first decides
            actual = gradients(model, x)
    stored = {row.stored_bytes / row.count / math.prod(row.shape) for row in saving.rows}
    if name not in AS_THEY_ARE:
        assert stored == {0.25 + 2 / BLOCK} if name in FOR_A_PARAMETER else stored == {1 + 2 / BLOCK}
    if name not in NOT_ALONE and name not in ("the other quotient", "lerp"):  # whose other factors are packed
        torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=0)
    if name in AS_THEY_ARE:
        assert saving.left


def test_what_needs_more_bits_too_is_stored_again_and_what_needs_fewer_is_not():
    for run, stored in ((lambda x, g: x * g + x.square(), 2), (lambda x, g: x.square() + x * g, 1)):
        with SavedTensorCompression(Runs(run, (64,)), min_values=256, parameter_bits=4) as saving:
            saving._module(activation())
        assert sum(row.count for row in saving.rows) == stored


def test_fused_attention_keeps_its_result_quantized():
    model, x = Runs(attention, (64, 192)), activation()
    expected = gradients(model, x, lambda y: y.square().sum())
    with SavedTensorCompression(model, Keep(bits=8), min_values=256) as saving:
        actual = gradients(model, x, lambda y: y.square().sum())
    assert sum(row.count for row in saving.rows if row.shape == (4, 4, 20, 16)) == 4
    for gradient, exact in zip(actual, expected, strict=True):
        assert (gradient - exact).norm() <= 3 * typical(8) * exact.norm()


def test_a_learned_bias_of_attention_stays_as_it_is():
    def run(x: Tensor, qkv: Tensor) -> Tensor:
        q, k, v = (x @ qkv).reshape(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
        bias = (q @ k.mT).masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    model, x = Runs(run, (64, 192)), activation()
    with SavedTensorCompression(model, Keep(bits=8), min_values=256):
        assert all(gradient.isfinite().all() for gradient in gradients(model, x))


class Through(nn.Module):
    """A function of a linear layer's output, moved away from zero."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(64, 64), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.fc(x).relu().add(0.1))


NOT_KNOWN = {
    "pow": lambda x: x.pow(0.5),
    "pow with a tensor": lambda x: x.pow(torch.tensor([1.7])),
    "special_entr": torch.special.entr,
    "xlogy": lambda x: torch.xlogy(x, x),
    "lgamma": torch.lgamma,
    "special_zeta": lambda x: torch.special.zeta(torch.full_like(x, 2.0), x),
    "erfinv": lambda x: torch.erfinv(x / (x.detach().max() + 1)),
    "prod": lambda x: x.prod(-1),
    "cumprod": lambda x: x.cumprod(-1),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "atan2": lambda x: torch.atan2(x, x),
    "cdist": lambda x: torch.cdist(x, x, p=1.0),
    "linalg_vector_norm": lambda x: x.norm(p=0.5, dim=-1),
    "sin": lambda x: torch.sin(30 * x),
    "abs": lambda x: (x - 0.5).abs(),
    "amax": lambda x: x.amax(-1),
    "clamp": lambda x: x.clamp(max=0.5),
    "div": lambda x: x / (x.square() + 0.01),
    "var": lambda x: (x + 1000).var(-1),
    "mse_loss": lambda x: F.mse_loss(x + 1000, x.detach() + 1000, reduction="none"),
    "grid_sampler2_d": lambda x: F.grid_sample(
        torch.randn(1, 2, 128, 128), x.view(1, 256, 256, 2), align_corners=False
    ),
    "prelu_kernel": lambda x: F.prelu(x - 0.5, torch.tensor(0.25)),
}


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_what_an_operation_saves_that_is_not_known_stays_as_it_is_and_is_listed(name):
    x = torch.randn(32, 64, 64)
    dense, module = Through(NOT_KNOWN[name]), Through(NOT_KNOWN[name])
    module.load_state_dict(dense.state_dict())
    with SavedTensorCompression(module, min_values=256) as saving:
        gradients_of = []
        for net in (dense, module, module):
            net.zero_grad()
            torch.manual_seed(0)
            net(x).sum().backward()
            gradients_of.append(net.fc.weight.grad.clone())
    if name != "div":  # which squares a value, too
        assert all(torch.equal(gradients_of[0], other) for other in gradients_of[1:])
    found = {row.operation: row for row in saving.left}
    row = found[name.split(" ")[0]]
    assert row.count >= 2
    assert row.nbytes >= 2 * 4 * 32 * 64
    assert "not known to be right" in row.reason


def test_a_power_without_a_pole_is_packed():
    module = Through(lambda x: x.pow(2))
    with SavedTensorCompression(module, min_values=256) as saving:
        module(torch.randn(32, 64, 64)).sum().backward()
    assert (len(saving.rows), saving.left) == (1, [])


class Changing(nn.Module):
    """A module that does something else at the same place later on."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(64, 64), lambda x: x.mul(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_to(self.fc(x))

    def apply_to(self, x: Tensor) -> Tensor:
        return self.operation(x) if hasattr(self, "operation") else torch.square(x)


def test_another_operation_at_a_site_is_an_error_if_it_may_not_read_few_bits():
    module, x = nn.Sequential(Changing()), torch.randn(32, 64, 64)
    operations = [torch.square, torch.sin]
    with SavedTensorCompression(module, min_values=256) as saving:
        for module[0].operation in operations[:1] * 2:
            module(x).sum().backward()
        assert saving.rows[0].count == 2
        module[0].operation = operations[1]
        with pytest.raises(RuntimeError, match=r"SinBackward0 would read in few bits what module '0' saved.*HINT.*'0'"):
            module(x).sum().backward()


def test_operations_may_be_added_and_taken_out_by_name():
    x = torch.randn(32, 64, 64)
    for function, operations, rows in (
        (torch.sin, {"sin": 8}, 1),
        (torch.sin, {}, 0),
        (torch.square, {"pow": None}, 0),
        (torch.square, {"pow": 4}, 1),
    ):
        module = Through(function)
        with SavedTensorCompression(module, min_values=256, operations=operations) as saving:
            for _ in range(2):
                module(x).sum().backward()
        assert (len(saving.rows), len(saving.left)) == (rows, 1 - rows)
        if operations.get("pow") == 4:
            assert saving.rows[0].stored_bytes == 2 * 32 * 64 * 64 // BLOCK * (BLOCK // 2 + 2)
    with pytest.raises(ValueError, match="must be 2, 3, 4, 8 or None, got 5"):
        SavedTensorCompression(module, operations={"sin": 5})


class Quantizer(nn.Module):
    """A learned step: divided by it, rounded, multiplied by it."""

    def __init__(self, divide: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.divide, self.step = divide, nn.Parameter(torch.tensor([4 / 127]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.divide(x, self.step).clamp(-128, 127)
        return (y + (y.round() - y).detach()) * self.step


@pytest.mark.parametrize(
    "divide", [torch.div, lambda x, s: x * (1 / s), lambda x, s: x * s.reciprocal(), lambda x, s: x * s**-1]
)
def test_the_gradient_of_a_learned_step_is_exact(divide):
    x = torch.randn(512, 64)
    for bits in (8, 2):
        module = nn.Sequential(nn.Linear(64, 64), Quantizer(divide), nn.Linear(64, 8))
        (module(x).square().sum()).backward()
        expected, module[1].step.grad = module[1].step.grad, None
        with SavedTensorCompression(module, min_values=256, parameter_bits=bits) as saving:
            for _ in range(2):
                module(x).square().sum().backward()
                torch.testing.assert_close(module[1].step.grad, expected, rtol=0, atol=0)
                module[1].step.grad = None
        assert "difference of sums" in {row.operation: row.reason for row in saving.left}["mul"]


@pytest.mark.parametrize("fill", [-1e2, -1e4, -1e9, torch.finfo(torch.float32).min])
def test_masked_scores_stay_as_they_are(fill: float):
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.scale, self.out = nn.Linear(64, 192), nn.Parameter(torch.ones(4, 1, 1)), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
            later = torch.ones(64, 64, dtype=torch.bool).triu(1)
            scores = (q @ k.mT / 4).masked_fill(later, fill) * self.scale
            return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    module, x = nn.Sequential(Attention()), torch.randn(8, 64, 64, requires_grad=True)
    expected = gradients(module, x, lambda y: y.square().mean())
    with SavedTensorCompression(module, min_values=256, parameter_bits=4) as saving:
        for _ in range(2):
            made_gradients = gradients(module, x, lambda y: y.square().mean())
            for gradient, exact in zip(made_gradients[:2], expected, strict=False):  # of input and scale
                assert (gradient - exact).norm() <= 0.002 * exact.norm()
    assert "a mask has put values into it" in {row.reason for row in saving.left}.pop()


def test_what_a_mask_may_write_to_stays_as_it_is_before_it_does():
    scores = lambda x: x.masked_fill(mask, -1e9) * torch.full((64,), 2.0, requires_grad=True)  # noqa: E731
    module, mask, x = Through(scores), torch.zeros(64, 64, dtype=torch.bool), torch.randn(32, 64, 64).requires_grad_()
    with SavedTensorCompression(module, min_values=256) as saving:
        for _ in range(3):
            module(x).sum().backward()
    assert saving.rows == []
    assert "a mask has put values into it" in saving.left[0].reason


def with_outliers(x: Tensor) -> Tensor:
    return x.detach().index_fill(-1, torch.tensor([3]), -1e9).requires_grad_()


def test_outliers_that_come_later_are_found():
    module, x = Through(torch.square), torch.randn(32, 64, 64, requires_grad=True)
    masked = with_outliers(x)
    exact = [torch.autograd.grad(module(given).sum(), given)[0] for given in (x, masked)]
    with SavedTensorCompression(module, min_values=256) as saving:
        for _ in range(3):
            module(x).sum().backward()
        assert saving.left == []
        with pytest.warns(UserWarning, match="saves for 'pow' has outliers now.*HINT.*'operation:pow': None"):
            y = module(masked)  # the fourth
        assert torch.equal(torch.autograd.grad(y.sum(), masked)[0], exact[1])
        assert torch.equal(torch.autograd.grad(module(x).sum(), x)[0], exact[0])
        assert [(row.operation, row.count) for row in saving.left] == [("pow", 2)]
    ((_, operation, reason),) = saving.decided.state_dict()["sites"].values()
    assert operation == "pow"
    assert reason.startswith("an outlier takes all steps")


@pytest.mark.parametrize("forwards", [255, 256])
def test_outliers_are_looked_for_now_and_then(forwards: int):
    """And in the first forward of a resumed training, whose decisions are older."""
    module, x = Through(torch.square), torch.randn(4, 64, requires_grad=True)
    with SavedTensorCompression(module, min_values=256) as saving, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(forwards - 1):
            module(x)
        assert not caught
        module(with_outliers(x))
        assert len(caught) == (forwards == 256)
    if forwards == 255:
        with SavedTensorCompression(module, min_values=256) as resumed:
            resumed.decided.load_state_dict(saving.decided.state_dict())
            with pytest.warns(UserWarning, match="has outliers"):
                module(with_outliers(x))


def test_what_lies_behind_no_output_stays_as_it_is():
    kept: list[Tensor] = []

    def run(x: Tensor, w: Tensor) -> Tensor:
        kept.append(x * w)  # whoever reads it, no module returns it
        return x + 1

    model = Runs(run, (64,))
    with SavedTensorCompression(model, min_values=256) as saving:
        for _ in range(2):
            model(activation())
    assert saving.rows == []
    assert [(row.operation, row.count) for row in saving.left] == [("unknown", 2)]
    kept[0].sum().backward()


def test_what_is_read_before_its_module_returns_is_exact():
    class Penalty(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            loss = (x * x).sum()
            (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
            return loss + gradient.sum()

    x = activation().detach().requires_grad_()
    with SavedTensorCompression(nn.Sequential(Penalty()), min_values=256) as saving:
        saving._module(x).backward()
    torch.testing.assert_close(x.grad, 2 * x.detach(), rtol=0, atol=0)


def test_a_meter_counts_what_is_kept():
    model, x = made(), activation().detach()
    totals = []
    for saving in (None, SavedTensorCompression(model, min_values=256)):
        if saving is not None:
            saving.attach()
        with SavedTensorMeter(model, x) as meter, StepMemoryRecorder(model, x) as recorder:
            loss = model(x.clone().requires_grad_() * 1).sum()
        loss.backward()
        totals.append(meter.report().stored_bytes)
        if saving is not None:
            saving.detach()
    dense_bytes = sum(row.dense_bytes for row in saving.rows)
    stored_bytes = sum(row.stored_bytes for row in saving.rows)
    # The inputs of the norm, of the GELU and of the first layer; that of the second is kept by the ReLU.
    assert (dense_bytes, stored_bytes) == (3 * DENSE, 3 * STORED)
    assert totals[0] - totals[1] == dense_bytes - stored_bytes
    assert recorder.result() is not None


def test_a_probe_sees_that_a_compressed_layer_shares_its_input_with_nothing_dense():
    """The norm keeps the same tensor, quantized: compressing the layer is worth it."""

    def run(x: Tensor) -> Tensor:
        x = x.sin()
        return layer(x) + F.layer_norm(x, (64,), weight)

    layer, weight = nn.Linear(64, 64), nn.Parameter(torch.ones(64))
    model = Runs(run)
    model.layer = layer
    report = convert(model, sparsity=0.6)
    for saving, retained in ((None, ["layer"]), (SavedTensorCompression(model, min_values=256), [])):
        if saving is not None:
            saving.attach()
        with RetentionProbe(model) as probe:
            model(activation()).sum().backward()
        assert [skipped.fqn for skipped in probe.retained] == retained
    assert len(report.converted) == 1


def test_a_meter_credits_what_waits_to_the_module_that_saved_it():
    """Query, key and value of an attention wait until its projection is called, which keeps an input of its own."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.proj = nn.Linear(64, 192), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
            return self.proj(F.scaled_dot_product_attention(q, k, v).squeeze(1))

    model, x = nn.Sequential(Attention()), activation()
    convert(model, rules={"type:linear": Keep(bits=2), "*": None})
    for watched in (False, True):
        with SavedTensorCompression(model, min_values=256) as saving:
            if watched:
                with SavedTensorMeter(model) as meter:
                    model(x)
            else:
                model(x)
        assert sum(row.stored_bytes for row in saving.rows) == 4 * STORED
    assert [(row.fqn, row.stored_bytes) for row in meter.report().rows] == [
        ("0.qkv", 80 * 2 * (8 + 2)),
        ("0.proj", 80 * 2 * (8 + 2)),
    ]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Calls(nn.Sequential):
    """Computes its own loss, so that each of its children is a scope."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


def test_each_of_several_scopes_decides_in_its_own_first_forward():
    model = Calls(nn.Identity(), Scaled(), nn.Identity(), Scaled(), nn.Identity())
    with SavedTensorCompression(model, min_values=256, loss_inside=True) as saving:
        for count in (1, 2):
            model(activation()).backward()
            assert [(row.fqn, row.count) for row in saving.rows] == [("1", count), ("3", count)]
    assert saving.left == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_forward_that_ends_in_an_error_decides_nothing(error: type[BaseException]):
    class Failing(Scaled):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if self.fails:
                raise error
            return y

    model = Failing()
    with SavedTensorCompression(model, min_values=256) as saving:
        with pytest.raises(error):
            model(activation())
        model.fails = False
        model(activation())
        assert [(row.fqn, row.count) for row in saving.rows] == [("(root)", 1)]
    assert saving.left == []


def test_what_was_decided_before_a_checkpoint_is_not_decided_again():
    """Nor what is there for the first time: that is left as it is once, as in the training that was not stopped."""
    model, x = nn.Sequential(Scaled(), Scaled()), activation()
    x.data[0, 0, 0] = 1e6
    states = []
    for at_first in (x, activation()):
        with SavedTensorCompression(model, min_values=256) as saving:
            model(at_first)
            states.append(saving.decided.state_dict())
            assert len(saving.rows) == (0 if at_first is x else 2)
    assert states == json.loads(json.dumps(states))
    for state, count in zip(states, (0, 2), strict=True):
        with SavedTensorCompression(model, min_values=256) as saving:
            saving.decided.load_state_dict(state)
            model(activation())
            assert sum(row.count for row in saving.rows) == count
            assert saving.decided.state_dict() == state | {"settled": ["(root)"]}
    sites = {site: known for site, known in state["sites"].items() if site.startswith("0")}
    with SavedTensorCompression(model, min_values=256) as saving:
        saving.decided.load_state_dict({"sites": sites, "settled": ["(root)"]})
        for names in (["0"], ["0", "1"]):
            model(activation())
            assert [row.fqn for row in saving.rows] == names


def test_what_compressed_layers_return_is_packed():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU())
    convert(model, sparsity=0.5)
    with SavedTensorCompression(model, min_values=256) as saving:
        model(activation())
    assert [(row.fqn, row.shape) for row in saving.rows] == [("1", SHAPE)]


def test_compressed_layers_share_their_input_in_a_scope_too():
    model = Runs(lambda x: sum(layer(x) for layer in layers))
    layers = model.layers = nn.ModuleList(nn.Linear(64, 48) for _ in range(3))
    convert(model, sparsity=0.6)
    totals = []
    for saving in (SavedTensorCompression(nn.Linear(1, 1)), SavedTensorCompression(model, min_values=256)):
        with saving, SavedTensorMeter(model) as meter:
            model(activation())
        totals.append(meter.report().stored_bytes)
        assert saving.rows == []
    assert totals[0] == totals[1] < DENSE


def test_save_on_cpu_gets_the_packed_values():
    model, x = made(), activation()
    with SavedTensorCompression(model, min_values=256):
        expected = gradients(model, x)
        with save_on_cpu():
            made_gradients = gradients(model, x)
    torch.testing.assert_close(made_gradients, expected, rtol=0, atol=0)


def test_hooks_around_get_packed_values_once_and_all_else_as_it_is():
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor.detach().clone()

    def run(x: Tensor, w: Tensor) -> Tensor:
        return (x * w + x * w).relu()

    model, x = Runs(run, (64,)), activation()
    with SavedTensorCompression(model, min_values=256) as saving:
        expected = gradients(model, x)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            torch.testing.assert_close(gradients(model, x), expected, rtol=0, atol=0)
        assert packed(saving) == 2
    assert sorted(sizes) == [256, 256, STORED, DENSE]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_copies_that_layers_keep_are_packed_and_those_of_weights_are_not(dtype: torch.dtype):
    model, x = made(), activation()
    with torch.autocast("cpu", dtype):
        expected = gradients(model, x)
        with SavedTensorCompression(model, min_values=256) as saving:
            made_gradients = gradients(model, x)
    assert {(row.fqn, row.dtype) for row in saving.rows} >= {("0", torch.float32), ("2", dtype)}
    assert all(row.shape not in {(64, 48), (48, 64)} for row in saving.rows)
    for gradient, exact in zip(made_gradients, expected, strict=True):
        most = 3 * typical(8) + 4 * torch.finfo(dtype).eps
        assert (gradient - exact).norm() <= most * exact.norm()


def test_scopes_in_scopes():
    model = made()
    with (
        SavedTensorCompression(model, min_values=256) as outer,
        SavedTensorCompression(model[1], min_values=256) as inner,
    ):
        gradients(model, activation())
        assert packed(inner) == 1
        assert packed(outer) == 2
        assert top_hooks() is None


def test_two_scopes_on_one_module_leave_nothing_behind():
    model = Runs(lambda x, w: x * w, (64,))
    with SavedTensorCompression(model, min_values=256), SavedTensorCompression(model, min_values=256):
        for _ in range(3):
            gradients(model, activation())
            assert autograd._open.hooks == []
            assert top_hooks() is None


def test_layers_without_weights_yet_are_taken():
    model = nn.Sequential(nn.LazyLinear(48), nn.GELU())
    with SavedTensorCompression(model, min_values=256) as saving:
        model(activation())
    assert [row.fqn for row in saving.rows] == ["0", "1"]


def test_attaching_twice_is_once_and_detaching_leaves_no_trace():
    model = made()
    saving = SavedTensorCompression(model, min_values=256).attach().attach()
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1
    saving.detach()
    saving.detach()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._forward_hooks_always_called
    assert_plain(model)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_raises_leaves_no_hooks_open(error: type[BaseException]):
    """Torch runs no forward hooks after an interruption: what it leaves open, ``detach`` closes."""

    def run(x: Tensor) -> Tensor:
        raise error

    model = nn.Sequential(nn.GELU(), Runs(run))
    saving = SavedTensorCompression(model, min_values=256).attach()
    with pytest.raises(error):
        model(activation())
    assert (top_hooks() is None) == (error is ValueError)
    saving.detach()
    assert top_hooks() is None
    assert packed(saving) == 1


def test_a_hook_that_raises_before_ours_leaves_the_scope_closed_and_usable():
    model = made()
    handle = model.register_forward_pre_hook(lambda *_: 1 / 0)
    with SavedTensorCompression(model, min_values=256) as saving:
        with pytest.raises(ZeroDivisionError):
            model(activation())
        assert top_hooks() is None
        handle.remove()
        model(activation())
        assert packed(saving) == 3


def test_where_hooks_are_disabled_nothing_is_packed():
    model = made()
    with SavedTensorCompression(model, min_values=256) as saving:
        with disable_saved_tensors_hooks("none in here"):
            gradients(model, activation())
        assert saving.rows == []
        grads = torch.func.grad(lambda x: model(x).sum())(torch.randn(SHAPE))  # opened by the transform, outside
    assert grads.shape == SHAPE
    assert saving.rows == []


def test_copies_and_pickles_have_hooks_that_do_nothing():
    model = made()
    buffer = io.BytesIO()
    with SavedTensorCompression(model, min_values=256) as saving:
        torch.save(model, buffer)
        buffer.seek(0)
        for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
            other(activation()).sum().backward()
        assert saving.rows == []


def test_threads_have_scopes_of_their_own():
    model, seen = made(), []
    running, go_on = threading.Event(), threading.Event()

    def wait(module: nn.Module, args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            running.set()
            assert go_on.wait(60)

    def other() -> None:
        seen.append(gradients(copied, x))

    x = activation()
    copied = copy.deepcopy(model)
    with SavedTensorCompression(nn.ModuleList([model, copied]), min_values=256) as saving:
        expected = gradients(model, x)
        copied[1].register_forward_pre_hook(wait)
        thread = threading.Thread(target=other)
        thread.start()
        assert running.wait(60)
        assert top_hooks() is None  # of this thread, while the other one is in its scope
        again = gradients(model, x)
        go_on.set()
        thread.join()
    assert packed(saving) == 9
    torch.testing.assert_close(again, expected, rtol=0, atol=0)
    torch.testing.assert_close(seen[0], expected, rtol=0, atol=0)


def test_nothing_is_kept_alive_and_no_cycle_is_made():
    model = made()
    alive = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        alive.append(StorageWeakRef(output.untyped_storage()))

    for layer in model:
        layer.register_forward_hook(note)
    gc.collect()
    gc.disable()
    try:
        with SavedTensorCompression(model, min_values=256) as saving:
            loss = model(activation()).sum()
            del loss
        assert not saving._packed._storages
        assert not saving._unchanged._storages
        assert [storage.expired() for storage in alive] == [True] * len(model)
    finally:
        gc.enable()


def test_a_second_derivative_is_that_of_the_values_kept():
    model = Runs(lambda x: (x.sin() * x.cos()).sum())
    x = torch.randn(SHAPE, requires_grad=True)

    def second() -> Tensor:
        (first,) = torch.autograd.grad(model(x * 1), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    expected = second()
    with SavedTensorCompression(model, min_values=256) as saving:
        made_gradient = second()
    assert saving.rows
    assert (made_gradient - expected).norm() <= 6 * typical(8) * expected.norm()


def test_a_fit_whose_training_step_calls_children():
    model = Net()
    with SavedTensorCompression(model, Keep(bits=4), min_values=256) as saving:
        trainer().fit(model)
    assert {row.fqn.split(".")[0] for row in saving.rows} >= {"body"}
    assert sum(row.stored_bytes for row in saving.rows) * 4 < sum(row.dense_bytes for row in saving.rows)
    assert_plain(model)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("scope", ["around", "inside"])
def test_checkpoints_run_again_exactly_and_nothing_in_them_is_packed(way, scope: str):
    inner = nn.Sequential(nn.LayerNorm(64), nn.GELU())
    region = way(inner)
    attached = region if scope == "around" else inner
    x = activation()
    expected = gradients(region, x, lambda y: y.square().sum())
    with SavedTensorCompression(attached, min_values=256) as saving:
        made_gradients = gradients(region, x, lambda y: y.square().sum())
    torch.testing.assert_close(made_gradients, expected, rtol=0, atol=0)
    assert packed(saving) == 0
    assert top_hooks() is None


def test_what_is_beside_a_checkpoint_in_scope_is_packed():
    model = nn.Sequential(
        nn.LayerNorm(64), WAYS["non_reentrant"](nn.Sequential(nn.Linear(64, 64), nn.GELU())), nn.SiLU()
    )
    with SavedTensorCompression(model, min_values=256) as saving:
        gradients(model, activation())
    assert [(row.fqn, row.count) for row in saving.rows] == [("0", 1), ("2", 1)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "aot_eager_decomp_partition"])
@pytest.mark.parametrize("attached_first", [False, True])
def test_a_compiled_region_in_scope_is_left_alone(backend: str, attached_first: bool):
    torch._dynamo.reset()
    inner = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64))
    model = nn.Sequential(nn.SiLU(), torch.compile(inner, backend=backend))
    x = activation()
    expected = gradients(model, x)
    if attached_first:
        torch._dynamo.reset()
    with SavedTensorCompression(model, min_values=256) as saving:
        made_gradients = gradients(model, x)
    names = {row.fqn for row in saving.rows}
    if backend == "eager":  # plain operations, in a graph of Dynamo's
        assert names > {"0"}
    else:
        assert names == {"0"}
        torch.testing.assert_close(made_gradients[1:], expected[1:], rtol=0, atol=0)
    assert (made_gradients[0] - expected[0]).norm() <= 3 * typical(8) * expected[0].norm()


def test_a_whole_compiled_model_has_no_scope():
    torch._dynamo.reset()
    model = torch.compile(made(), backend="aot_eager")
    x = activation()
    expected = gradients(model, x)
    with SavedTensorCompression(model, min_values=256) as saving:
        torch.testing.assert_close(gradients(model, x), expected, rtol=0, atol=0)
    assert saving.rows == []


def test_a_scope_inside_a_compiled_region_does_nothing_and_breaks_no_graph():
    torch._dynamo.reset()
    inner = made()
    x = activation()
    with SavedTensorCompression(inner, min_values=256) as saving:
        compiled = torch.compile(inner.__call__, backend="aot_eager", fullgraph=True)
        compiled(x).sum().backward()
    assert saving.rows == []
    assert top_hooks() is None


WIDTH = 16


def asked(question: Callable[[Tensor], Any], run: Callable[[], Any]) -> list[tuple[int, Any]]:
    """Return the storage address of everything that ``run`` saves and has a history, with the answer to a question."""
    answers = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.grad_fn is not None:
            answers.append((tensor.untyped_storage().data_ptr(), question(tensor)))
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return answers


class KeepsAll(torch.autograd.Function):
    """Saves its input and its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * 2
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


RESULTS = {
    "relu": (torch.relu, [True]),
    "softmax": (lambda x: x.softmax(-1), [True]),
    "exp": (torch.exp, [True]),
    "tanh": (torch.tanh, [True]),
    "gelu": (F.gelu, [False]),
    "square": (lambda x: x * x, [False, False]),
    "norm": (lambda x: x.norm(dim=-1), [False, True]),
    "log_softmax": (lambda x: x.log_softmax(-1), [True]),
    "in place": (lambda x: x.clone().relu_(), [True]),
    "in place on a view": (lambda x: x.clone().view(-1).relu_(), [True]),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), [False] * 3 + [True]),
    "group norm": (lambda x: F.group_norm(x.flatten(0, 1), 2), [False, True, True]),
    "own function": (KeepsAll.apply, [False, True]),
    "softmax, then a product": (lambda x: x.softmax(-1) @ x.mT, [True, False, False]),
}


@pytest.mark.parametrize(("operation", "expected"), RESULTS.values(), ids=RESULTS)
def test_results_are_told_from_inputs(operation: Callable[[Tensor], Tensor], expected: list[bool]):
    x = torch.rand(2, 3, 4, WIDTH, requires_grad=True) * 1
    assert [answer for _, answer in asked(is_own_result, lambda: operation(x))] == expected


class Weights(nn.Module):
    """Everything that a weight can be multiplied as."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH))
        self.register_buffer("mask", torch.rand(3 * WIDTH, WIDTH).round())

    def forward(self, x: Tensor) -> list[Tensor]:
        w = self.weight
        made = [F.linear(x, w), x @ w.t(), x @ w[:WIDTH], x @ w.chunk(3)[1].to(x.dtype).t(), F.linear(x, w * self.mask)]
        made += [x * w[0], x @ w.view(3, WIDTH, WIDTH)[2].mT.contiguous(), F.linear(x, w / w.norm(dim=1, keepdim=True))]
        return made


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_what_is_made_of_them_are_known(autocast: bool, dtype: torch.dtype):
    model, x = Weights(), torch.randn(5, 7, WIDTH, requires_grad=True).to(dtype) * 1
    model.to(dtype)
    shapes = {tuple(sorted(model.weight.shape))}
    saved = []

    def question(tensor: Tensor) -> bool:
        saved.append(tensor)
        return is_weight(tensor, shapes)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        answers = [answer for _, answer in asked(question, lambda: model(x))]
    for tensor, answer in zip(saved, answers, strict=True):
        if tensor.shape[-1] != 1:  # the norms
            assert answer == (tensor.numel() != x.numel()), tensor.shape
    assert True in answers
    assert False in answers


class Views(torch.autograd.Function):
    """Returns a view of what it computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 2).flatten().view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def test_a_view_that_a_function_returns_is_no_weight():
    made = Views.apply(torch.randn(5, WIDTH, requires_grad=True))
    assert made._base.is_leaf
    assert not is_weight(made, set())
    assert not is_weight(made.view(-1, 8), set())


def test_what_needs_no_gradient_is_no_weight():
    assert not is_weight(torch.ones(3, 4), {(3, 4)})
    assert is_weight(torch.ones(3, 4, requires_grad=True), set())
    assert not is_weight(nn.Embedding(9, 4)(torch.zeros(5, dtype=torch.long)), {(4, 9)})


CUT = 8


def numbers(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


WITHOUT_GAPS = {
    "contiguous": numbers(4, 6, 16),
    "odd": numbers(7, 11, 13),
    "transposed": numbers(4, 6, 16).transpose(1, 2),
    "channels_last": numbers(2, 8, 9, 10).to(memory_format=torch.channels_last),
    "one image": numbers(1, 8, 16, 16).to(memory_format=torch.channels_last),
    "one dimension": numbers(512),
    "offset": numbers(6, 128)[2:],
}
PARTS = {
    "q of qkv": numbers(2, 12, 3, 4, 16).permute(2, 0, 3, 1, 4)[1],
    "chunk": numbers(4, 6, 96).chunk(3, -1)[2],
    "short rows": numbers(4, 20, 40)[..., 3:11],
    "three dimensions": numbers(6, 8, 48)[:, 1:5, 8:40],
}
COPIED = {
    "every other": numbers(16, 64)[:, ::2],
    "four dimensions": numbers(6, 5, 7, 48)[:, :3, :2, :32],
    "tiny rows": numbers(64, 20)[:, :5],
    "rows that blocks would not fill": numbers(64, 20)[:, :9],
}
ALL = WITHOUT_GAPS | PARTS | COPIED
cases = pytest.mark.parametrize("x", ALL.values(), ids=ALL)


def restored(x: Tensor) -> Tensor:
    """Read ``x`` as a kernel does, and lay out what was read."""
    layout = layout_of(x.shape, x.stride(), CUT)
    assert layout is not None
    if layout.copied:
        sizes, strides = zip(*layout.region, strict=True)
        source = x.as_strided(sizes, strides).contiguous().view(-1)
        read = source.as_strided(layout.shape, layout.strides)
    else:
        read = x.as_strided(layout.shape, layout.strides)
    assert layout.strides[-1] == 1
    return read.reshape(-1).as_strided(x.shape, layout.dense_strides)


@cases
def test_nothing_is_lost_or_moved(x: Tensor):
    torch.testing.assert_close(restored(x), x, rtol=0, atol=0)


@pytest.mark.parametrize("x", WITHOUT_GAPS.values(), ids=WITHOUT_GAPS)
def test_what_has_no_gaps_keeps_its_strides_and_is_one_region(x: Tensor):
    layout = layout_of(x.shape, x.stride(), CUT)
    assert layout.dense_strides == x.stride()
    assert layout.region == ((x.numel(), 1),)
    assert not layout.copied


@pytest.mark.parametrize("x", PARTS.values(), ids=PARTS)
def test_parts_are_read_where_they_lie_and_written_without_gaps_in_the_same_order(x: Tensor):
    layout = layout_of(x.shape, x.stride(), CUT)
    assert not layout.copied
    made = torch.empty_strided(x.shape, layout.dense_strides)
    assert made.untyped_storage().nbytes() == x.nbytes
    order = sorted(range(x.dim()), key=x.stride().__getitem__)
    assert order == sorted(range(x.dim()), key=made.stride().__getitem__)


@pytest.mark.parametrize("x", COPIED.values(), ids=COPIED)
def test_the_others_are_copied(x: Tensor):
    assert layout_of(x.shape, x.stride(), CUT).copied


@cases
def test_blocks_are_full_but_for_a_sixteenth_or_where_rows_are_shorter(x: Tensor):
    layout = layout_of(x.shape, x.stride(), CUT)
    samples, rows, length = layout.shape
    assert samples * rows * length == x.numel()
    taken = samples * rows * -(-length // layout.block) * layout.block
    assert taken <= x.numel() * 17 / 16


def test_views_of_one_region_are_known_as_such():
    x = numbers(4, 6, 16)
    views = [x, x.transpose(0, 2), x.flatten(), x.view(8, 48).t(), x.unsqueeze(1)]
    assert len({layout_of(view.shape, view.stride(), CUT).region for view in views}) == 1
    assert layout_of(x[..., :8].shape, x.stride(), CUT).region != layout_of(x.shape, x.stride(), CUT).region


def test_a_run_without_a_divisor_is_cut_as_the_kernels_can_count():
    longest = CUT * 65535
    even, odd = layout_of((3 * longest + 3,), (1,), CUT), layout_of((1299709,), (1,), CUT)  # a prime
    assert even.shape[2] <= longest
    assert even.shape[2] * even.shape[1] == 3 * longest + 3
    assert odd is None


@pytest.mark.parametrize(
    "x",
    [
        torch.ones(8, 1).expand(8, 64),
        torch.arange(600.0).unfold(0, 16, 4),
        torch.ones(0, 16),
        torch.ones(()),
        torch.ones(3),
    ],
    ids=["expanded", "overlapping", "empty", "number", "few"],
)
def test_what_has_no_sensible_rows_is_left(x: Tensor):
    assert layout_of(x.shape, x.stride(), CUT) is None
