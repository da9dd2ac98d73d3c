"""Converted models in training: sharded, tensor-parallel, compiled, checkpointed, and in a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_actprune import ActivationPrunedLinear, convert, revert
from lightning_actprune.conversion import convert_layers
from lightning_actprune.conversion_options import ConversionOptions
from tests.conversion_models import deep, gradients, mlp


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one CPU process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("replicated", [False, True])
def test_fully_shard_before_conversion_trains_like_the_unsharded_pruned_model(mesh, replicated: bool):
    if replicated:  # shards in every group of processes
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicated", "sharded"))
    plain, x = mlp(), torch.randn(3, 5, 65)
    sharded = fully_shard(copy.deepcopy(plain), mesh=mesh)
    dense = gradients(plain, x)
    for model in (plain, sharded):
        report = convert(model, sparsity=0.6, block_size=8)
        assert [layer.fqn for layer in report.converted] == ["fc1", "fc2"]
    for _ in range(2):
        expected, found = gradients(plain, x), gradients(sharded, x)
        for name, grad in found.items():
            assert isinstance(grad, DTensor)
            torch.testing.assert_close(grad.full_tensor(), expected[name])
        for model in (plain, sharded):
            torch.optim.SGD(model.parameters(), lr=1e-3).step()
    assert not torch.allclose(gradients(plain, x)["fc1.weight"], dense["fc1.weight"], rtol=0.1)
    for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(q.full_tensor(), p.detach(), msg=lambda text, name=name: f"{name}: {text}")
    assert revert(sharded) == ["fc1", "fc2"]
    assert isinstance(sharded, FSDPModule)


def test_fully_sharded_leaf_is_skipped_by_its_type(mesh):
    model = mlp()
    fully_shard(model.fc1, mesh=mesh)
    report = convert(model)
    assert [layer.fqn for layer in report.converted] == ["fc2"]
    assert [(layer.fqn, layer.kind) for layer in report.skipped] == [("fc1", "FSDPLinear")]


def test_tensor_parallel_layer_is_skipped(mesh):
    model = parallelize_module(mlp(), mesh, {"fc1": ColwiseParallel()})
    report = convert(model)
    assert [layer.fqn for layer in report.converted] == ["fc2"]
    assert [layer.fqn for layer in report.skipped] == ["fc1"]
    assert "tensor-parallel DTensor" in report.skipped[0].reason
    assert type(model.fc1) is nn.Linear


def test_tensor_parallel_layer_in_a_fully_sharded_model_is_skipped(mesh):
    grid = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(mlp(), grid["tensor"], {"fc1": ColwiseParallel()})
    report = convert(fully_shard(model, mesh=grid["data"]))
    assert [layer.fqn for layer in report.converted] == ["fc2"]
    assert "tensor-parallel DTensor" in report.skipped[0].reason


def test_revert_keeps_a_layer_sharded_after_conversion(mesh):
    model, x = mlp(), torch.randn(3, 65)
    convert(model)
    fully_shard(model.fc1, mesh=mesh)
    y = model(x)
    assert revert(model) == ["fc1", "fc2"]
    assert not isinstance(model.fc1, ActivationPrunedLinear)
    assert isinstance(model.fc1, FSDPModule)
    assert torch.equal(model(x), y)


class Flattened(FullyShardedDataParallel):
    """What the wrapper leaves of a model between steps, without a process group: parts of one vector as parameters."""

    def __init__(self, model: nn.Module) -> None:
        nn.Module.__init__(self)
        self._fsdp_wrapped_module = model
        for module in model.modules():
            module._is_fsdp_managed_module = True
        for parameter in model.parameters():
            parameter.data = parameter.detach().flatten()[:7]


def test_what_was_converted_before_its_weights_were_flattened_is_found_again():
    model = mlp()
    (before,) = convert_layers(model, ConversionOptions(0.5, 8, include="fc1"), "owner").converted
    report = convert_layers(nn.Sequential(Flattened(model)), ConversionOptions(0.5, 8), "owner")
    assert report.converted == [replace(before, fqn="0.fc1")]
    assert before.in_features == 65
    assert [(layer.fqn, "flattens its weight" in layer.reason) for layer in report.skipped] == [("0.fc2", True)]
    assert revert(model) == ["fc1"]
    assert type(model.fc1) is nn.Linear


def test_what_was_partitioned_before_conversion_is_skipped():
    model = mlp()
    model.fc1.weight.ds_id = 0  # as deepspeed.zero.Init leaves it: empty until the layer is called
    model.fc1.weight.data = torch.empty(0)
    report = convert(model)
    assert [(layer.fqn, "was partitioned by DeepSpeed" in layer.reason) for layer in report.skipped] == [("fc1", True)]


def test_model_compiled_before_conversion_recompiles_once():
    model, x = mlp(), torch.randn(3, 5, 65)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    dense = gradients(compiled, x)["_orig_mod.fc1.weight"]
    assert counter.frame_count == 1
    convert(compiled, sparsity=0.6, block_size=8)
    pruned = [gradients(compiled, x)["_orig_mod.fc1.weight"] for _ in range(2)]
    assert counter.frame_count == 2
    torch.testing.assert_close(pruned[1], gradients(model, x)["fc1.weight"])
    assert not torch.allclose(pruned[1], dense, rtol=0.1)


@pytest.mark.parametrize("impl", list(CheckpointImpl), ids=str)
def test_checkpointed_block_has_the_same_gradients(impl):
    model, x = deep(), torch.randn(3, 5, 65, requires_grad=True)
    convert(model, sparsity=0.6, block_size=8)
    expected = gradients(model, x)
    model.blocks[0] = checkpoint_wrapper(model.blocks[0], checkpoint_impl=impl)
    found = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in gradients(model, x).items()}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_converted_layer_takes_its_input_by_keyword_as_linear_does():
    layer, x = nn.Linear(65, 33), torch.randn(3, 5, 65)
    y = layer(input=x)
    convert(layer)
    assert torch.equal(layer(input=x), y)


def test_converted_model_runs_on_the_meta_device():
    with torch.device("meta"):
        model, x = mlp(), torch.empty(3, 5, 65)
    convert(model, sparsity=0.6, block_size=8)
    y = model(x)
    assert (y.shape, y.device.type) == ((3, 5, 3), "meta")
    y.sum().backward()
    assert model.fc1.weight.grad.shape == (97, 65)


def test_zero_sparsity_gives_the_dense_gradients_exactly():
    model, x = deep(), torch.randn(3, 5, 65)
    dense = gradients(model, x)
    convert(model, sparsity=0.0, block_size=8)
    torch.testing.assert_close(gradients(model, x), dense, rtol=0, atol=0)


def test_pruning_changes_only_the_gradients_of_converted_weights():
    model, x = mlp(), torch.randn(3, 5, 65)
    dense = gradients(model, x)
    convert(model, sparsity=0.6, block_size=8, include="fc2")
    pruned = gradients(model, x)
    changed = [name for name in dense if not torch.equal(dense[name], pruned[name])]
    assert changed == ["fc2.weight"]
    revert(model)
    torch.testing.assert_close(gradients(model, x), dense, rtol=0, atol=0)


@pytest.mark.parametrize("scope", ["sample", "token"])
def test_plain_training_loop_lowers_the_loss(scope):
    x = torch.randn(128, 65)
    target = torch.sin(x[:, :3] * 2)
    model = mlp()
    convert(model, sparsity=0.5, block_size=8, scope=scope)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = F.mse_loss(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
