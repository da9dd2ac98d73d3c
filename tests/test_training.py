"""Compressed models in training: sharded and tensor-parallel, with scaled losses in fp16, compiled, in a plain loop."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module
from torch.nn.utils import parametrizations

from examples.models.resmlp import ResMLP
from examples.models.resnet import ResNet
from examples.models.vit import ViT
from lightning_actprune import ActivationPrunedLinear, convert, revert
from lightning_actprune.config import Keep
from lightning_actprune.operators.norm import Affine
from tests.support.conversion_models import gradients, mlp

# In one process of a group.


def test_fully_shard_before_conversion_trains_like_the_unsharded_pruned_model(mesh):
    """With shards in every group of processes; see callbacks/test_ranks for a group of two."""
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicated", "sharded"))
    plain, x = mlp(), torch.randn(3, 5, 65)
    sharded = fully_shard(copy.deepcopy(plain), mesh=mesh)
    dense = gradients(plain, x)
    for model in (plain, sharded):
        assert [layer.fqn for layer in convert(model, sparsity=0.6, block_size=8).converted] == ["fc1", "fc2"]
    for _ in range(2):
        expected, found = gradients(plain, x), gradients(sharded, x)
        for name, grad in found.items():
            torch.testing.assert_close(grad.full_tensor(), expected[name])
        for model in (plain, sharded):
            torch.optim.SGD(model.parameters(), lr=1e-3).step()
    assert not torch.allclose(expected["fc1.weight"], dense["fc1.weight"], rtol=0.1)
    assert revert(sharded) == ["fc1", "fc2"]
    assert isinstance(sharded, FSDPModule)


class Flattened(FullyShardedDataParallel):
    """What the wrapper leaves of a model between steps, without a process group: parts of one vector as parameters."""

    def __init__(self, model: nn.Module) -> None:
        nn.Module.__init__(self)
        self._fsdp_wrapped_module = model
        for module in model.modules():
            module._is_fsdp_managed_module = True
        for parameter in model.parameters():
            parameter.data = parameter.detach().flatten()[:7]


def sharded_leaf(mesh: DeviceMesh) -> nn.Module:
    model = mlp()
    fully_shard(model.fc2, mesh=mesh)
    return model


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    model = nn.ModuleDict({"fc1": nn.Linear(65, 64), "affine": Affine(64)})
    return parallelize_module(model, mesh, {"fc1": ColwiseParallel(), "affine": SequenceParallel()})


def flattened(mesh: DeviceMesh) -> nn.Module:
    model = mlp()
    model.fc2 = Flattened(model.fc2)
    return model


def partitioned(mesh: DeviceMesh) -> nn.Module:
    model = mlp()
    model.fc2.weight.ds_id = 0  # as deepspeed.zero.Init leaves it: empty until the layer is called
    model.fc2.weight.data = torch.empty(0)
    return model


@pytest.mark.parametrize(
    ("make", "skipped", "reason"),
    [
        (sharded_leaf, "fc2", "FSDPLinear"),
        (tensor_parallel, "affine", "tensor-parallel DTensor"),
        (flattened, "fc2", "flattens its weight"),
        (partitioned, "fc2", "was partitioned by DeepSpeed"),
    ],
)
def test_layers_without_their_own_weights_are_skipped(mesh, make, skipped, reason):
    model = make(mesh)
    report = convert(model, rules={"type:linear": Keep(bits=4), "type:affine": Keep(bits=4), "*": None})
    assert [layer.fqn for layer in report.converted] == ["fc1"]
    [layer] = (layer for layer in report.skipped if layer.fqn == skipped)
    assert reason in f"{layer.kind}: {layer.reason}"
    assert revert(model) == ["fc1"]


@pytest.mark.parametrize("change", [fully_shard, parametrizations.weight_norm])
def test_revert_keeps_what_changed_the_class_after_conversion(mesh, change):
    model, x = mlp(), torch.randn(3, 65)
    convert(model, sparsity=0.6)
    change(model.fc1, **({"mesh": mesh} if change is fully_shard else {}))
    y = model(x)
    assert revert(model) == ["fc1", "fc2"]
    assert not isinstance(model.fc1, ActivationPrunedLinear)
    assert isinstance(model.fc1, FSDPModule) == (change is fully_shard)
    assert torch.equal(model(x), y)


# In one process.


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


# With scaled losses in fp16. Decisions are compared where an overflow shows in the gradients that are exact: a
# compressed layer sums the gradients of its weight and bias in fp32, so what overflows in such a sum alone, in fp16,
# overflows in the dense layer only.

SPARSITY, BLOCK = 0.9, 16


def train(
    model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], steps: int, scale: float
) -> tuple[list[float], list[bool]]:
    """Train with dynamic scaling; return the scale before each step and after the last, and which steps did nothing."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    optimizer, scales, skipped = torch.optim.Adam(model.parameters(), lr=1e-3), [scale], []
    for step in range(steps):
        before = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        after = model.state_dict()
        skipped.append(all(torch.equal(before[name], after[name]) for name in before))
        assert all(bool(torch.isfinite(value).all()) for value in after.values())
    return scales, skipped


def of_dense_and_pruned(model: nn.Module, *args: object) -> tuple[list[float], list[bool]]:
    """Return the decisions, which are the same for both models."""
    pruned = copy.deepcopy(model)
    convert(pruned, sparsity=SPARSITY, block_size=BLOCK)
    dense = train(model, *args)
    assert train(pruned, *args) == dense
    return dense


def test_decisions_are_the_dense_ones_with_overflows_injected_everywhere():
    x, y = torch.randn(8, 4, 10, 64), torch.randint(4, (8, 4))
    x[1, 2, 3, 5] = math.inf
    x[6, 0, 9, 63] = math.nan

    def loss_of(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            out = model(x[step])
        if step == 3:
            out.register_hook(lambda grad: grad.index_fill(0, torch.tensor([1]), math.inf))
        if step == 4:
            out.register_hook(lambda grad: grad * math.nan)
        return nn.functional.cross_entropy(out.float().mean(1), y[step])

    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 4))
    scales, skipped = of_dense_and_pruned(model, loss_of, 8, 1024.0)
    assert skipped == [step in (1, 3, 4, 6) for step in range(8)]
    # Never three good steps in a row, so that it does not grow.
    assert [b / a for a, b in pairwise(scales)] == [0.5 if without else 1.0 for without in skipped]


@pytest.mark.parametrize(("value", "place"), [(math.inf, (0, 0, 0)), (-math.inf, (3, 4, 16)), (math.nan, (2, 9, 63))])
def test_only_a_kept_block_can_show_an_input_that_is_not_finite(value: float, place: tuple[int, int, int]):
    """Its row has no gradient, so that 0 times the value is the only trace, and its block is zero but for it."""
    x = torch.randn(4, 10, 64)
    sample, row, column = place
    x[sample, row, column // BLOCK * BLOCK : (column // BLOCK + 1) * BLOCK] = 0
    x[place] = value
    weight = torch.ones(4, 10, 1)
    weight[sample, row] = 0

    def loss_of(model: nn.Module, step: int) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            out = model(x if step == 1 else torch.ones_like(x))
        return (out.float().nan_to_num(0, 0, 0) * weight).sum()

    decisions = of_dense_and_pruned(nn.Sequential(nn.Linear(64, 8, bias=False)), loss_of, 3, 16.0)
    assert decisions == ([16.0, 16.0, 8.0, 8.0], [False, True, False])


# On a GPU, under torch's own watch: a step with a fused optimizer waits for nothing.

CLASSES, IMAGE = 10, 64
MAKERS = {
    "resmlp": lambda: ResMLP(dim=192, depth=2, image_size=IMAGE, patch_size=8, num_classes=CLASSES),
    "vit": lambda: ViT(image_size=IMAGE, patch_size=8, dim=192, depth=2, num_classes=CLASSES),
    "resnet": lambda: ResNet(dim=32, depth=3, num_classes=CLASSES),
}


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [True, False], ids=["bf16-autocast", "fp32"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_training_step_waits_for_nothing(name, autocast):
    model = MAKERS[name]().cuda()
    converted = convert(model, "max") if name == "resnet" else convert(model, sparsity=0.6)
    assert len(converted.converted) >= 7
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    images, labels = torch.randn(8, 3, IMAGE, IMAGE).cuda(), torch.randint(CLASSES, (8,)).cuda()
    losses = []

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    step()  # compiles kernels and makes the optimizer's state
    with waiting_is_an_error():
        step()
        step()
    first, *_, last = torch.stack(losses).tolist()
    assert last < first  # it trained: the batch is always the same


@pytest.mark.gpu
def test_the_watch_sees_a_wait():
    x = torch.ones(1, device="cuda")
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchronizing"):
        x.item()
