"""When a linear layer behind a norm in few bits keeps an input of its own all the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests import oracle
from tests.derived import activation, few_bit, linear, own_pack


def other_tensor(norm, x):
    return norm(x).clone()


def some_rows(norm, x):
    return norm(x)[:, 1:]


def modified(norm, x):
    return norm(x).mul_(2)


def modified_through_a_view(norm, x):
    y = norm(x)
    y[:, 0].zero_()
    return y


def after_a_change_of_the_scale(norm, x):
    y = norm(x)
    with torch.no_grad():
        norm.weight.mul_(2)
    return y


def after_a_change_of_the_shift(norm, x):
    y = norm(x)
    with torch.no_grad():
        norm.bias.add_(1)
    return y


READ_OTHERWISE = [
    other_tensor,
    some_rows,
    modified,
    modified_through_a_view,
    after_a_change_of_the_scale,
    after_a_change_of_the_shift,
]


@pytest.mark.parametrize("read", READ_OTHERWISE)
def test_other_tensors_are_packed(read):
    norm, layer, x = few_bit(), linear(value_format="int8"), activation()
    norm._few_bit = type(norm._few_bit)("int8")
    y = read(norm, x)
    z = layer(y)
    assert own_pack(z)
    g = torch.randn_like(z)
    (grad,) = torch.autograd.grad(z, layer.weight, g)
    expected = g.flatten(0, 1).t() @ y.detach().flatten(0, 1)
    assert oracle.relative_error(grad, expected) < 0.02  # int8: 0.005 of normal values


SETTINGS = {
    "fewer bits there": ("int2", {"value_format": "int3"}, True),
    "as many bits": ("int3", {"value_format": "int3"}, True),
    "more bits there": ("int8", {"value_format": "fp8"}, False),
    "errors with a mean there": ("fp8", {"value_format": "int4"}, True),
    "larger blocks there": ("int4", {"value_format": "int3", "block_size": 16}, True),
    "smaller blocks there": ("int4", {"value_format": "int3", "block_size": 64}, False),
    "dropped blocks": ("int4", {"value_format": "int3", "sparsity": 0.5}, True),
    "values as they are": ("int4", {"value_format": "same", "sparsity": 0.5}, True),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_layer_that_asks_for_as_many_bits_or_drops_blocks_packs_its_own(case):
    there, asked, packs = SETTINGS[case]
    y = few_bit(value_format=there)(activation())
    assert own_pack(linear(**asked)(y)) is packs


def test_what_computes_in_fp16_packs_its_own():
    """Values of the input that y makes small, or products before these are scaled, may be too large for fp16."""
    y = few_bit(dtype=torch.float16)(activation().half())
    assert own_pack(linear(dtype=torch.float16)(y))
    y = few_bit()(activation())
    with torch.autocast("cpu", torch.float16):
        assert own_pack(linear()(y))


@pytest.mark.parametrize("changed", ["output", "weight", "bias"])
def test_other_memory_by_way_of_data_is_noticed(changed):
    norm, x = few_bit(), activation()
    y = norm(x)
    replaced = {"output": y, "weight": norm.weight, "bias": norm.bias}[changed]
    replaced.data = torch.ones_like(replaced)
    assert own_pack(linear()(y))


def test_backward_finds_out_that_parameters_were_modified():
    norm, layer = few_bit(), linear()
    z = layer(norm(activation()))
    with torch.no_grad():
        norm.bias.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(z.sum(), layer.weight)


def test_hooks_that_say_what_is_kept_end_it():
    norm, layer, x = few_bit(), linear(), activation()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        z = layer(norm(x))
    assert own_pack(z)
    z.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True], ids=["linear layer", "both"])
def test_an_activation_checkpoint_finds_the_same_when_it_runs_again(reentrant, whole):
    norm, layer, x = few_bit(value_format="int8"), linear(), activation()
    z = checkpoint(nn.Sequential(norm, layer), x, use_reentrant=reentrant) if whole else None
    z = checkpoint(layer, norm(x), use_reentrant=reentrant) if z is None else z
    g = torch.randn_like(z)
    z.backward(g)
    expected = g.flatten(0, 1).t() @ norm(x).detach().flatten(0, 1)
    assert oracle.relative_error(layer.weight.grad, expected) < 0.5  # int2: 0.44 of normal values, int8 far less


def test_layers_whose_parameters_fsdp_gathers_pack_their_own():
    norm, layer = few_bit(), linear()
    layer._is_fsdp_managed_module = True  # as `fully_shard` marks them
    assert own_pack(layer(norm(activation())))
