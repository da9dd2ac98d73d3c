"""FewBitSaving: what it packs and how exactly, what it leaves alone, what is shared, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_actprune.few_bit_saving import FewBitSaving
from tests.few_bit_saving import SHAPE, Product, Runs, activation, attention, bound, gradients, read_back, typical

BLOCK = 32
FORMATS = ["fp8", "int8", "int4", "int3", "int2"]
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


@pytest.mark.parametrize("value_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lay_out", LAYOUTS.values(), ids=LAYOUTS)
def test_backward_reads_values_within_half_a_step(lay_out, dtype: torch.dtype, value_format: str):
    x = lay_out(activation(dtype=dtype))
    blocks = in_blocks(x, x)
    most = bound(blocks, value_format)
    rounding = torch.finfo(dtype).eps * (blocks.abs() + most)
    error = in_blocks(read_back(x, value_format), x) - blocks
    assert (error.abs() <= most + rounding).all()
    assert error.abs().max() > most.min() / 2  # it was not exact either


@pytest.mark.parametrize("lay_out", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("value_format", ["int8", "int3"])
def test_kernels_read_every_layout(lay_out, value_format: str, device: torch.device):
    x = lay_out(activation(dtype=torch.bfloat16, device=device))
    blocks = in_blocks(x, x)
    error = in_blocks(read_back(x, value_format), x) - blocks
    most = bound(blocks, value_format)
    assert (error.abs() <= most + torch.finfo(x.dtype).eps * (blocks.abs() + most)).all()


def test_errors_are_without_bias():
    """Over many places, errors of equal values are uniform within a step: their mean is within 5 sigma of zero."""
    x = torch.linspace(-1, 1, BLOCK).repeat(4000, 1).requires_grad_() * 1
    error = (read_back(x, "int2") - x.detach()).double()
    half = bound(x.detach()[:1], "int2").item()
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
    """Of the size of the step: no gradient depends on more than three tensors in few bits."""
    model, x = Runs(*operation), activation()
    backend = torch.nn.attention.SDPBackend.MATH if math else torch.nn.attention.SDPBackend.FLASH_ATTENTION
    with torch.nn.attention.sdpa_kernel([backend, torch.nn.attention.SDPBackend.MATH]):
        expected, y = gradients(model, x, lambda y: y.square().sum()), model(x)
        for value_format in ("int8", "int4"):
            with FewBitSaving(model, value_format, min_values=256) as saving:
                made = gradients(model, x, lambda y: y.square().sum())
                torch.testing.assert_close(model(x), y, rtol=0, atol=0)
            assert saving.rows
            for gradient, exact in zip(made, expected, strict=True):
                assert (gradient - exact).norm() <= 3 * typical(value_format) * exact.norm()


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
            with FewBitSaving(model, "int2", min_values=1) as saving:
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
    with FewBitSaving(model, min_values=1) as saving, hooks:
        model(activation())
    assert saving.rows == []
    assert torch.uint8 not in saved


def test_an_input_flattened_to_the_shape_of_a_weight_is_packed_and_a_flattened_weight_is_not():
    model, x = Runs(lambda x, w, conv: F.linear(x, w) @ (conv * 2).view(80, 24), (80, 64), (20, 4, 2, 12)), activation()
    expected = gradients(model, x)
    with FewBitSaving(model, min_values=256) as saving:
        made = gradients(model, x)
    assert [(row.shape, row.count) for row in saving.rows] == [((80, 64), 1), ((80, 80), 1)]
    torch.testing.assert_close(made[0], expected[0], rtol=0, atol=0)


def test_few_values_and_no_gradient():
    model, x = Product(), activation()
    for values, packed in ((x.numel(), 1), (x.numel() + 1, 0)):
        with FewBitSaving(model, min_values=values) as saving:
            model(x, torch.ones(64, requires_grad=True))
        assert len(saving.rows) == packed
    with FewBitSaving(model, min_values=1) as saving, torch.no_grad():
        model(x, x)
    assert saving.rows == []


def test_views_of_one_region_are_packed_once_and_counted_once():
    def run(x: Tensor, w: Tensor) -> Tensor:
        return x * w + x.flatten(0, 1).mul(w).view_as(x) + x.mT.contiguous().mT * w + (x.mT * w[:, None]).mT

    model, x = Runs(run, (64,)), activation()
    expected = gradients(model, x)
    with FewBitSaving(model, min_values=256) as saving:
        made = gradients(model, x)
    assert sum(row.count for row in saving.rows) == 2  # the third is a copy
    stored = x.numel() // BLOCK * (BLOCK + 2)
    assert [(r.dense_bytes, r.stored_bytes) for r in saving.rows] == [(2 * x.nbytes, 2 * stored)]
    assert (made[1] - expected[1]).norm() <= typical("int8") * expected[1].norm()


def test_another_version_region_or_type_is_packed_for_itself():
    def run(x: Tensor) -> Tensor:
        ones = torch.ones(64, requires_grad=True)
        x = x.clone()
        y = (x * ones).square()  # which saves something: what was saved before is stored now
        x.mul_(2)  # also x[:2], a part of the same storage
        return y.sum() + (x * ones).sum() + (x[:2] * ones).sum()

    model = Runs(run)
    with FewBitSaving(model, min_values=256) as saving:
        model(activation())
    assert sum(row.count for row in saving.rows) == 4  # with the product


def test_a_pack_lives_as_long_as_its_graph():
    model, x, probe = Product(), activation(), torch.ones(SHAPE, requires_grad=True)
    with FewBitSaving(model, min_values=256) as saving:
        first, second = model(x, probe), model(x, probe)  # two forwards before backward
        assert [row.count for row in saving.rows] == [1]
        first.sum().backward(retain_graph=True, inputs=[probe])
        first.sum().backward(inputs=[probe])
        second.sum().backward(inputs=[probe])
        torch.testing.assert_close(probe.grad, 3 * x.detach(), rtol=0, atol=0.1)
        assert saving._stored == {}
        model(x, probe)
        assert [row.count for row in saving.rows] == [2]
    saving.reset()
    assert saving.rows == []


def test_what_somebody_holds_as_it_is_stays_so():
    """ReLU and softmax keep their results, which the next layer would keep too."""
    for first in (torch.relu, lambda x: x.softmax(-1)):
        model = Runs(lambda x, w: F.linear(first(x), w), (48, 64))  # noqa: B023
        with FewBitSaving(model, min_values=256) as saving:
            y = model(activation())
            assert (80, 64) not in {row.shape for row in saving.rows}
        assert saving.held_twice_bytes == 0
        y.sum().backward()
        assert saving._dense == {}


def test_what_is_held_as_it_is_only_later_is_counted():
    model = Runs(lambda x, w: (x * w).sum() + (x.detach() * w).sum() + (x.detach() * w).sum(), (64,))
    x = activation()
    with FewBitSaving(model, min_values=256) as saving:
        model(x)
    assert saving.held_twice_bytes == x.numel() // BLOCK * (BLOCK + 2) == saving.rows[0].stored_bytes


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("settled", [True, False])
def test_a_tensor_written_to_after_it_was_saved_is_right_or_an_error(packed: bool, settled: bool):
    """An error if it was still waiting for the end of its operation."""
    probe, before = torch.ones(SHAPE, requires_grad=True), []

    def run(x: Tensor) -> Tensor:
        kept = x.clone() if packed else x.softmax(-1)  # a result is left as it is
        loss = (kept * probe).sum()
        if settled:
            probe.square()
        before.append(kept.detach().clone())
        with torch.no_grad():
            kept.zero_()
        return loss

    model = Runs(run)
    with FewBitSaving(model, min_values=256):
        loss = model(activation())
    if packed and settled:
        loss.backward()
        torch.testing.assert_close(probe.grad, before[0], rtol=0, atol=0.05)
    else:
        with pytest.raises(
            RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"
        ):
            loss.backward()


def test_a_parameter_written_to_before_backward_is_an_error():
    model = nn.Linear(64, 64)
    with FewBitSaving(model, min_values=256):
        y = model(activation())
    with torch.no_grad():
        model.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_rows_name_children_and_what_has_children():
    model = nn.Sequential(nn.Sequential(nn.LayerNorm(64), nn.GELU()), nn.SiLU())
    with FewBitSaving(model, "int4", min_values=256) as saving:
        for _ in range(2):
            model(activation())
    stored = SHAPE[0] * SHAPE[1] * 2 * 18
    found = [(r.fqn, r.shape, r.dtype, r.count, r.dense_bytes, r.stored_bytes) for r in saving.rows]
    assert found == [
        ("0", SHAPE, torch.float32, 4, 4 * 4 * 80 * 64, 4 * stored),
        ("1", SHAPE, torch.float32, 2, 2 * 4 * 80 * 64, 2 * stored),
    ]


def test_children_and_what_has_children_may_be_called_from_outside():
    model = nn.Sequential(nn.ModuleDict({"a": nn.Sequential(nn.Sequential(nn.GELU()))}), nn.SiLU())
    with FewBitSaving(model, min_values=256) as saving:
        for module in (model[1], model[0]["a"], model[0]["a"][0]):
            module(activation())
    assert [row.fqn for row in saving.rows] == ["1", "0.a.0"]
    assert saving.rows[1].count == 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"value_format": "same"}, ValueError, r'`value_format` must be "fp8", .*, got "same". HINT'),
        ({"value_format": "int5"}, ValueError, r"`value_format` must be one of .*, got 'int5'"),
        ({"block_size": 4}, ValueError, r"`block_size` must be at least 8 .*got 4"),
        ({"block_size": "32"}, TypeError, r"`block_size` must be a positive int, got '32'"),
        ({"min_values": 0}, ValueError, r"`min_values` must be a positive int, got 0. HINT"),
        ({"min_values": 1.5}, TypeError, r"`min_values` must be a positive int, got 1.5 of type float"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        FewBitSaving(nn.Linear(8, 8), **arguments)
