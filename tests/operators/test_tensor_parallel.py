"""Tensor-parallel layers, and modules that run again under DDP, FSDP and ``fully_shard``, in two processes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from lightning_actprune import Keep, Recompute, convert
from lightning_actprune.compiled.install import CompiledPacking
from lightning_actprune.config import Config
from lightning_actprune.convert import convert_layers, mark_layers, new_owner
from tests.callbacks.test_ranks import RANKS, Seen, fit_all
from tests.operators.test_recompute import ALONE, Net, cosine
from tests.support.compressed import compressed
from tests.support.saving import saved_tensors

WIDTH, HIDDEN, TOKENS = 80, 66, 6
EIGHT_BITS = {f"type:{operator}": Keep(bits=8) for operator in ("linear", "norm", "activation")}
BY_TOKENS = Shard(1)
Results = dict[str, Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.out, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(HIDDEN, WIDTH, bias=False)
        self.up, self.act = nn.Linear(WIDTH, HIDDEN), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.out(self.q(y) * self.k(y))
        return x + self.down(self.act(self.up(self.norm2(x))))


def plan(sequence: bool) -> dict[str, Any]:
    """Return how a block is split: its linear layers, and with ``sequence`` its norms' tokens too."""
    placement = BY_TOKENS if sequence else Replicate()
    columns = {name: ColwiseParallel(input_layouts=placement) for name in ("q", "k", "up")}
    rows = {name: RowwiseParallel(output_layouts=placement) for name in ("out", "down")}
    norms = {name: SequenceParallel(use_local_output=True) for name in ("norm1", "norm2")}
    return columns | rows | (norms if sequence else {})


def block(mesh: DeviceMesh, sequence: bool) -> nn.Module:
    torch.manual_seed(0)
    return parallelize_module(Block(), mesh, plan(sequence))


def inputs(sequence: bool) -> tuple[Tensor, Tensor]:
    """Return this process' input, and what its output is multiplied by."""
    torch.manual_seed(1)
    x, grad = torch.randn(2, 3, TOKENS, WIDTH)
    rank = dist.get_rank()
    return (x.chunk(RANKS, 1)[rank], grad.chunk(RANKS, 1)[rank]) if sequence else (x, grad)


def step(model: nn.Module, x: Tensor, grad: Tensor) -> Results:
    """Return output and gradients, those of DTensors as they lie and whole."""
    x = x.detach().clone().requires_grad_()
    y = model(x)
    y.backward(grad)
    results: Results = {"output": y.detach(), "input": x.grad}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter.grad, DTensor) == isinstance(parameter, DTensor), name
        results[name] = whole(parameter.grad)
        if isinstance(parameter.grad, DTensor):
            results[f"{name} lies"] = parameter.grad.placements
    return results


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(actual: Results, expected: Results, cosine: float = 1, placed: bool = True) -> None:
    """Compare tensors, bit for bit or by their cosines, and where DTensors lie."""
    assert not placed or actual.keys() == expected.keys()
    for name, right in expected.items():
        if isinstance(right, Tensor):
            near = torch.cosine_similarity(actual[name].flatten(), right.flatten(), 0)
            assert torch.equal(actual[name], right) if cosine == 1 else near > cosine, name
        else:
            assert not placed or actual[name] == right, name


def dense_where_nothing_is_left_out_and_near_in_few_bits(mesh: DeviceMesh) -> None:
    for sequence in (False, True):
        dense, ours = block(mesh, sequence), block(mesh, sequence)
        report = convert(ours, sparsity=0.0)
        assert [layer.fqn for layer in report.converted] == ["q", "k", "out", "down", "up"]
        expected = step(dense, *inputs(sequence))
        compare(step(ours, *inputs(sequence)), expected)
        report = convert(ours := block(mesh, sequence), rules=EIGHT_BITS)
        assert {layer.fqn for layer in report.converted} >= {"norm1", "norm2", "q", "out"}
        actual = step(ours, *inputs(sequence))
        compare(actual, expected, 0.999)
        assert not torch.equal(actual["q.weight"], expected["q.weight"])


def blocks_of_each_shard(mesh: DeviceMesh) -> None:
    """A row-wise layer drops blocks of its own features, a column-wise one those of the whole input."""
    x, grad = inputs(False)
    layer = nn.Linear(WIDTH, 8)
    for style, features in ((ColwiseParallel(), WIDTH), (RowwiseParallel(input_layouts=Replicate()), WIDTH // RANKS)):
        ours = parallelize_module(nn.Sequential(copy.deepcopy(layer)), mesh, {"0": style})
        convert(ours, sparsity=0.5, block_size=8)
        grad_y, by_hand = grad[..., :8], []
        for shard in x.split(features, -1):
            part = compressed(nn.Linear(features, 8, bias=False), sparsity=0.5, block_size=8)
            part(shard).backward(grad_y)
            by_hand.append(part.weight.grad)
        y = ours(x)
        y.backward(grad_y if y.shape == grad_y.shape else grad_y.chunk(RANKS, -1)[dist.get_rank()])
        actual = whole(ours[0].weight.grad)
        torch.testing.assert_close(actual, torch.cat(by_hand, 1))
        assert not torch.allclose(actual, grad_y.flatten(0, 1).T @ x.flatten(0, 1), rtol=0.1)


def layers_that_read_one_tensor_keep_it_once(mesh: DeviceMesh) -> None:
    model, (x, _) = block(mesh, False), inputs(False)
    convert(model, sparsity=0.5, block_size=8)
    own = {part.to_local().untyped_storage().data_ptr() for part in (model.q.weight, model.k.weight)}
    y, storages = x * 1.0, []
    for read in ([model.q], [model.q, model.k]):
        with saved_tensors() as saved:
            outputs = [layer(y) for layer in read]
        storages.append({t.untyped_storage().data_ptr() for t in saved if type(t) is Tensor} - own)
        assert len(outputs) == len(read)
    assert len(storages[0]) == len(storages[1]) == 3  # values, which blocks they are, and where rows begin


def layers_are_dense_where_no_process_can_compute_its_part_alone(mesh: DeviceMesh) -> None:
    features, outputs, whole = [Shard(1)], [Shard(0)], [Replicate()]
    cases = (  # how input, weight and bias lie
        (features, whole, whole),
        ([Partial()], whole, whole),
        (whole, [Shard(1)], whole),
        (outputs, outputs, outputs),
        (whole, outputs, whole),
        (whole, whole, outputs),
        (features, [Shard(1)], outputs),
    )
    for of_x, *of_parameters in cases:
        for out in (RANKS, HIDDEN):  # with one output each, a bias that lies elsewhere would be broadcast
            x, layer = distribute_tensor(torch.randn(RANKS, WIDTH), mesh, whole), nn.Linear(WIDTH, out)
            for name, split in zip(("weight", "bias"), of_parameters, strict=True):
                parameter = distribute_tensor(getattr(layer, name).detach(), mesh, split)
                layer.register_parameter(name, nn.Parameter(parameter))
            x = DTensor.from_local(x.to_local(), mesh, of_x) if of_x == [Partial()] else x.redistribute(mesh, of_x)
            ours = compressed(layer, bits=4)
            results = []
            for model in (layer, ours):
                with warnings.catch_warnings(record=True) as caught:
                    y = model(x)
                messages = [str(each.message) for each in caught if "runs as the dense layer" in str(each.message)]
                assert len(messages) == (model is ours)
                y.full_tensor().square().sum().backward()
                results.append([y.full_tensor(), model.weight.grad.full_tensor(), model.bias.grad.full_tensor()])
            assert all(map(torch.equal, *results)), (of_x, of_parameters)
            with torch.no_grad(), warnings.catch_warnings(action="error"):
                ours(x)


def of_two_dimensions(mesh: DeviceMesh) -> None:
    """``fully_shard`` along one dimension of a mesh of two, tensor-parallel along the other."""
    grid = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("data", "tensor"))
    dense, ours = (fully_shard(block(grid["tensor"], True), mesh=grid["data"]) for _ in range(2))
    assert len(convert(ours, sparsity=0.0).converted) == 5
    compare(step(ours, *inputs(True)), step(dense, *inputs(True)))


def compiled(mesh: DeviceMesh) -> None:
    """A compiler packs what the shards keep, and its marks lie as what they mark does."""
    x = torch.randn(256, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2))
    dense, ours = block(mesh, False), block(mesh, False)
    convert(ours, rules=EIGHT_BITS)
    with CompiledPacking() as packing:
        mark_layers(ours, ours.q.owner, unmarked_layers=True)
        actual = step(torch.compile(ours, backend="aot_eager"), x, torch.ones_like(x))
    expected = step(torch.compile(dense, backend="aot_eager"), x, torch.ones_like(x))
    assert torch.equal(actual["output"], expected["output"])
    assert sum(row.stored_bytes < row.dense_bytes for row in packing.rows) >= 3
    compare(actual, expected, 0.999, placed=False)


def rerun(model: nn.Module) -> nn.Module:
    convert(model, rules={"*blocks.?": Recompute(8), **ALONE})
    return model


def wrap(model: nn.Module, strategy: str, mesh: DeviceMesh) -> nn.Module:
    if strategy == "fsdp2":
        for part in (*model.blocks, model):  # type: ignore[misc]
            fully_shard(part, mesh=mesh)
        return model
    if strategy == "fsdp":
        policy, device = ModuleWrapPolicy({type(model.blocks[0])}), torch.device("cpu")  # type: ignore[index]
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=device)
    return DistributedDataParallel(model, static_graph=strategy == "static ddp")


def convert_for_fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Return the model as of a callback: converted before and after ``fully_shard``, which derives classes."""
    config, owner = Config("recompute", rules={"head": None}), new_owner("test")
    convert_layers(model, config, owner)
    wrap(model, "fsdp2", mesh)
    for _ in range(3):
        report = convert_layers(model, config, owner)
        assert [block.fqn for block in report.recomputed] == ["blocks.0", "blocks.1", "blocks.2"]
    assert len({type(block) for block in model.blocks}) == 1  # type: ignore[union-attr]
    return model


def loss_and_gradient(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and the gradient of all parameters, in the order of their names."""
    loss = model(x).square().mean()
    loss.backward()
    sharded = isinstance(model, FullyShardedDataParallel)
    with FullyShardedDataParallel.summon_full_params(model, with_grads=True) if sharded else nullcontext():
        grads = {name.replace("_fsdp_wrapped_module.", ""): whole(p.grad) for name, p in model.named_parameters()}
        return loss.detach(), torch.cat([grad.flatten() for _, grad in sorted(grads.items())])


def strategies_run_blocks_again(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(RANKS, 4, 32, 16)[dist.get_rank()]
    copied = lambda: copy.deepcopy(model)  # noqa: E731
    loss, exact = loss_and_gradient(wrap(copied(), "ddp", mesh), x)
    models = [convert_for_fsdp(copied(), mesh)]
    models += [wrap(rerun(copied()), strategy, mesh) for strategy in ("ddp", "static ddp", "fsdp", "fsdp2")]
    models += [rerun(wrap(copied(), strategy, mesh)) for strategy in ("ddp", "static ddp", "fsdp2")]
    for ours in models:
        actual, gradient = loss_and_gradient(ours, x)
        assert torch.equal(actual, loss)
        assert 0.9999 < cosine(gradient, exact) <= 1 + 1e-9


CHECKS = (
    dense_where_nothing_is_left_out_and_near_in_few_bits, blocks_of_each_shard,
    layers_that_read_one_tensor_keep_it_once, layers_are_dense_where_no_process_can_compute_its_part_alone,
    of_two_dimensions, compiled, strategies_run_blocks_again,
)  # fmt: skip
"""What both processes do."""


def in_process(check: Callable[[DeviceMesh], None], folder: Path) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    check(init_device_mesh("cpu", (RANKS,)))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[Seen | None]]:
    """What went wrong in each process; one pair of them does all checks, since starting it takes longer."""
    checks = [partial(in_process, check) for check in CHECKS]
    return dict(zip(CHECKS, fit_all(checks, "cpu", tmp_path_factory.mktemp("shards")), strict=True))


@pytest.mark.integration
@pytest.mark.parametrize("check", CHECKS)
def test_in_two_processes(check: Callable[[DeviceMesh], None], outcomes: dict[Any, list[Seen | None]]):
    for rank, failed in enumerate(outcomes[check]):
        assert failed is None, f"in process {rank}: {failed.error}"
