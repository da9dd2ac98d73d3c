"""Modules that run again in backward, in two processes: DDP, FSDP and ``fully_shard``, on CPUs."""

from __future__ import annotations

import copy
import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_actprune import Recompute, convert
from lightning_actprune.config import Config
from lightning_actprune.convert import convert_layers, new_owner
from tests.operators.test_recompute import ALONE, Net, cosine

RANKS = 2
STRATEGIES = ("ddp", "static ddp", "fsdp", "fsdp2")


def again(model: nn.Module) -> None:
    convert(model, rules={"*blocks.?": Recompute(8), **ALONE})


def wrapped(model: nn.Module, strategy: str, after: bool) -> nn.Module:
    """Return the model as a strategy wraps it, converted before or after that."""
    if not after:
        again(model)
    if strategy == "fsdp2":
        mesh = init_device_mesh("cpu", (RANKS,))
        for part in (*model.blocks, model):  # type: ignore[misc]
            fully_shard(part, mesh=mesh)
        made = model
    elif strategy == "fsdp":
        policy = ModuleWrapPolicy({type(model.blocks[0])})  # type: ignore[index]
        device = torch.device("cpu")
        made = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=device)
    else:
        made = DistributedDataParallel(model, static_graph=strategy.startswith("static"))
    if after:
        again(model)
    return made


def set_again(model: nn.Module) -> nn.Module:
    """Return the model as of a callback: converted before and after ``fully_shard``, which derives classes."""
    config, owner = Config("recompute", rules={"head": None}), new_owner("test")
    convert_layers(model, config, owner)
    mesh = init_device_mesh("cpu", (RANKS,))
    for part in (*model.blocks, model):  # type: ignore[misc]
        fully_shard(part, mesh=mesh)
    for _ in range(3):
        report = convert_layers(model, config, owner)
        assert [block.fqn for block in report.recomputed] == ["blocks.0", "blocks.1", "blocks.2"]
    assert len({type(block) for block in model.blocks}) == 1  # type: ignore[union-attr]
    return model


def gradient(model: nn.Module) -> Tensor:
    """Return the gradient of all parameters, in the order of their names."""
    found = {name.replace("_fsdp_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for _, grad in sorted(found.items())]
    return torch.cat([grad.flatten() for grad in whole if grad is not None])


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    loss = model(x).square().mean()
    loss.backward()
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return loss.detach(), gradient(model)
    return loss.detach(), gradient(model)


def run(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(RANKS, 4, 32, 16)[rank]
    seen = {"dense": step(DistributedDataParallel(copy.deepcopy(model)), x)}
    seen["preset, set again"] = step(set_again(copy.deepcopy(model)), x)
    for strategy in STRATEGIES:
        for after in (False, True)[: 1 if strategy == "fsdp" else 2]:
            seen[f"{strategy}, {after}"] = step(wrapped(copy.deepcopy(model), strategy, after), x)
    torch.save(seen, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.integration
def test_strategies_run_blocks_again(tmp_path):
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    mp.spawn(run, (port, tmp_path), RANKS)
    for rank in range(RANKS):
        seen = torch.load(tmp_path / f"{rank}.pt")
        loss, exact = seen.pop("dense")
        assert len(seen) == 8
        for found, gradients in seen.values():
            assert torch.equal(found, loss)
            assert 0.9999 < cosine(gradients, exact) <= 1 + 1e-9
