"""The blocks of torchvision's ResNets: those of the dense model, with one pass for batch normalisation and ReLU."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import convert, revert
from lightning_actprune.ops.dispatch import force_backend
from tests.kernels.workload import launches

resnet = pytest.importorskip("torchvision.models.resnet")
OTHERS = {"norm": "int4", "activation": "int8"}


@pytest.fixture(params=["basic", "basic-down", "bottleneck", "bottleneck-down"])
def block(request: pytest.FixtureRequest) -> nn.Module:
    kind, *down = request.param.split("-")
    cls = {"basic": resnet.BasicBlock, "bottleneck": resnet.Bottleneck}[kind]
    planes = 16 // cls.expansion
    made = cls(16, planes, 2, nn.Sequential(nn.Conv2d(16, 16, 1, 2), nn.BatchNorm2d(16))) if down else cls(16, planes)
    for parameter in made.parameters():
        nn.init.normal_(parameter, 0.5, 0.5)
    return made


@pytest.fixture
def _kernels() -> Iterator[None]:
    with force_backend("triton"):
        yield


def converted(block: nn.Module, **options) -> nn.Module:
    block = copy.deepcopy(block)
    convert(block, sparsity=0.0, others=OTHERS, **options)
    return block


def input_of(last: bool = False, device: torch.device | str = "cpu") -> Tensor:
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.randn(3, 16, 6, 4).to(device, memory_format=layout).requires_grad_()


def results(block: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Return output, gradients and buffers."""
    y = block(x)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)
    grads = torch.autograd.grad(y, (x, *block.parameters()), grad)
    return y.detach(), *grads, *block.buffers()


def separate(block: nn.Module) -> nn.Module:
    """Return the block with a hook on its ReLU, which therefore is called."""
    block = copy.deepcopy(block)
    block.relu.register_forward_hook(lambda module, arguments, y: None)
    return block


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "last"])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.usefixtures("_kernels")
def test_one_pass_or_two_bit_for_bit(kernel_device, block, last, autocast):
    ours = converted(block).to(kernel_device)
    two, x = separate(ours), input_of(last, kernel_device)
    with torch.autocast(kernel_device.type, torch.float16, enabled=autocast):
        with launches() as fused:
            found = results(ours, x)
        with launches() as called:
            right = results(two, x)
    norms = 1 if isinstance(block, resnet.BasicBlock) else 2
    assert called.count("activate_kernel") - fused.count("activate_kernel") == norms
    assert called.count("activation_grad_kernel") - fused.count("activation_grad_kernel") == norms
    assert fused.count("normalize_lines_kernel") == called.count("normalize_lines_kernel")
    for actual, expected in zip(found, right, strict=True):
        assert torch.equal(actual, expected)


def test_the_block_computes_what_the_dense_one_does(device, block):
    dense, x = block.to(device), input_of(device=device)
    ours = converted(dense, value_format="int8")
    y, right = ours(x), dense(x)
    torch.testing.assert_close(y, right, rtol=0, atol=1e-5)
    for actual, expected in zip(ours.buffers(), dense.buffers(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    dense.load_state_dict(ours.state_dict())
    with torch.no_grad():
        assert torch.equal(ours.eval()(x), dense.eval()(x))


@pytest.mark.usefixtures("_kernels")
def test_both_are_called_where_somebody_may_see_it(block):
    ours, x = converted(block), input_of()

    def fused(changed: nn.Module) -> int:
        with launches() as names:
            changed(x)
        return (
            3 - names.count("activate_kernel")
            if isinstance(block, resnet.Bottleneck)
            else 2 - names.count("activate_kernel")
        )

    most = 2 if isinstance(block, resnet.Bottleneck) else 1
    assert fused(ours) == most
    assert fused(separate(ours)) == 0
    hooked = copy.deepcopy(ours)
    hooked.bn1.register_forward_pre_hook(lambda module, arguments: None)
    assert fused(hooked) == most - 1
    excluded = converted(block, exclude=["bn1"])
    assert fused(excluded) == most - 1
    handle = nn.modules.module.register_module_forward_hook(lambda module, arguments, y: None)
    try:
        assert fused(ours) == 0
    finally:
        handle.remove()
    assert fused(copy.deepcopy(ours).eval()) == 0


def test_an_excluded_activation_function_is_torchs(block):
    ours, x = converted(block, exclude=["relu"]), input_of()
    assert type(ours.relu) is nn.ReLU
    torch.testing.assert_close(ours(x), block(x), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_to_one_graph(block):
    torch._dynamo.reset()
    ours, x = converted(block), input_of()
    compiled = torch.compile(copy.deepcopy(ours), fullgraph=True, backend="aot_eager")
    for actual, right in zip(results(compiled, x), results(ours, x), strict=True):
        torch.testing.assert_close(actual, right, rtol=1e-5, atol=1e-5)


def test_copies_pickles_and_the_way_back(block):
    ours, x = converted(block), input_of()
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(ours), torch.load(buffer, weights_only=False)):
        assert type(other) is type(ours)
        assert torch.equal(other(x), copy.deepcopy(ours)(x))
    assert isinstance(ours, type(block))
    assert list(ours.state_dict()) == list(block.state_dict())
    revert(ours)
    assert type(ours) is type(block)
    assert vars(ours).keys() == vars(block).keys()


@pytest.mark.usefixtures("_kernels")
def test_a_block_used_twice(block):
    if block.downsample is not None:
        pytest.skip("its output is no input of its own")
    ours, x = converted(block), input_of()
    two = separate(ours)
    found = (torch.autograd.grad(b(b(x)).square().sum(), (x, *b.parameters())) for b in (ours, two))
    for actual, right in zip(*found, strict=True):
        assert torch.equal(actual, right)


def test_blocks_are_not_listed_and_count_for_nothing():
    frozen = pytest.importorskip("torchvision.ops").FrozenBatchNorm2d

    def model() -> nn.Module:
        return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], norm_layer=frozen)

    with pytest.raises(ValueError, match="No layer was converted"):
        convert(model(), 0.0, value_format="int4", others={"norm": "int4"}, exclude=["fc"])
    made = resnet.resnet18()
    norms = sum(isinstance(m, nn.BatchNorm2d) for m in made.modules())
    assert convert(made, 0.5).left["norm"] == norms == 20
    assert len(convert(resnet.resnet18(), 0.5, others={"norm": "int4"}).few_bit) == norms
