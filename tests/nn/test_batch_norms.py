"""Batch and group normalisation layers that keep their normalised input in few bits: those of torch and of timm."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import convert, revert
from lightning_actprune.nn.few_bit import FewBitSettings
from lightning_actprune.nn.few_bit_kinds import few_bit_class, operator_of
from tests import oracle
from tests.attention import saved_tensors


def timm_layer(name: str, module: str = "norm", **options) -> nn.Module:
    return getattr(pytest.importorskip(f"timm.layers.{module}"), name)(24, **options)


MADE = {
    "1d": (lambda: nn.BatchNorm1d(24), (40, 24)),
    "1d-sequence": (lambda: nn.BatchNorm1d(24), (5, 24, 9)),
    "2d": (lambda: nn.BatchNorm2d(24), (5, 24, 4, 3)),
    "2d-plain": (lambda: nn.BatchNorm2d(24, affine=False), (5, 24, 4, 3)),
    "2d-cumulative": (lambda: nn.BatchNorm2d(24, momentum=None, eps=1e-3), (5, 24, 4, 3)),
    "2d-untracked": (lambda: nn.BatchNorm2d(24, track_running_stats=False), (5, 24, 4, 3)),
    "3d": (lambda: nn.BatchNorm3d(24), (2, 24, 4, 3, 5)),
    "group": (lambda: nn.GroupNorm(4, 24), (5, 24, 4, 3)),
    "group-plain": (lambda: nn.GroupNorm(24, 24, affine=False), (5, 24, 9)),
    "timm": (lambda: timm_layer("BatchNormAct2d", "norm_act", act_layer=nn.ReLU), (5, 24, 4, 3)),
    "group-timm": (lambda: timm_layer("GroupNorm", num_groups=4), (5, 24, 4, 3)),
    "group-timm-one": (lambda: timm_layer("GroupNorm1"), (5, 24, 4, 3)),
    "group-timm-act": (lambda: timm_layer("GroupNormAct", "norm_act", num_groups=4), (5, 24, 4, 3)),
}
GROUPS = {"group": 20, "group-plain": 120, "group-timm": 20, "group-timm-one": 5, "group-timm-act": 20}
"""Of all five images."""
each_layer = pytest.mark.parametrize("name", list(MADE))


def made(name: str) -> nn.Module:
    torch.manual_seed(1)
    layer = MADE[name][0]()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 1.0)
    return layer


def converted(layer: nn.Module, value_format: str = "int8", block_size: int = 32) -> nn.Module:
    layer = copy.deepcopy(layer)
    layer.__class__ = few_bit_class(type(layer))
    layer._few_bit = FewBitSettings(value_format, block_size)
    return layer


def input_of(name: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return (2 * torch.randn(MADE[name][1]) + 1).to(device, dtype).requires_grad_()


def gradients(layer: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    grad_y = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y)
    return torch.autograd.grad(y, (x, *layer.parameters()), grad_y)


def compare(layer: nn.Module, dense: nn.Module, x: Tensor, ours: Tensor, right: Tensor) -> None:
    """Compare outputs, gradients and buffers of two layers."""
    assert ours.dtype == right.dtype
    eps = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours, right, rtol=2 * eps, atol=2e-5 if eps < 1e-6 else eps)
    for actual, expected in zip(gradients(layer, x, ours), gradients(dense, x, right), strict=True):
        assert actual.dtype == expected.dtype
        # int8: the errors of sums over as few as ten values, and those of torch's own sums in the type of x.
        assert oracle.relative_error(actual, expected) < 0.02 + 2 * torch.finfo(x.dtype).eps
    for actual, expected in zip(layer.buffers(), dense.buffers(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@each_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_output_gradients_and_buffers_are_those_of_the_dense_layer(name, dtype, autocast):
    dense = made(name)
    layer = converted(dense)
    for _ in range(2):  # running statistics move on from where they were
        x = input_of(name, dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            ours, right = layer(x), dense(x)
        compare(layer, dense, x, ours, right)
    assert operator_of(layer) == operator_of(dense) == "norm"


@pytest.mark.gpu
@each_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_on_the_gpu_too(name, dtype, autocast, last):
    dense = made(name).cuda()
    if name.startswith("group") and not autocast:
        dense = dense.to(dtype)  # torch's takes parameters of the type of its input only
    layer, x = converted(dense), input_of(name, dtype, "cuda")
    if last and x.dim() == 4:
        x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        compare(layer, dense, x, layer(x), dense(x))


@pytest.mark.gpu
def test_a_cuda_graph_replays_the_same_gradient_and_moves_the_statistics():
    layer = converted(made("2d").cuda(), "int4")
    x, grad = input_of("2d", device="cuda"), torch.randn(MADE["2d"][1], device="cuda")
    (expected,) = torch.autograd.grad(layer(x), x, grad)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.autograd.grad(layer(x), x, grad)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (found,) = torch.autograd.grad(layer(x), x, grad)
    before, batches = layer.running_mean.clone(), int(layer.num_batches_tracked)
    graph.replay()
    assert torch.equal(found, expected)
    assert not torch.equal(layer.running_mean, before)
    assert int(layer.num_batches_tracked) == batches + 1


@each_layer
def test_only_few_bits_are_kept(name):
    layer, x = converted(made(name), "int4"), input_of(name)
    with saved_tensors() as saved:
        layer(x)
    own = {p.data_ptr() for p in layer.parameters()}
    blocks, sets = -(-x.numel() // 32), GROUPS.get(name, 24)
    activated = x.numel() * 4 if name in ("timm", "group-timm-act") else 0  # by its ReLU, which is a layer of its own
    assert sum(t.nbytes for t in saved if t.data_ptr() not in own) == blocks * 18 + 12 * sets + activated


@each_layer
def test_the_plain_layer_where_nothing_needs_a_gradient(name):
    dense = made(name)
    dense(input_of(name))
    layer, x = converted(dense), input_of(name)
    with torch.no_grad():
        assert torch.equal(layer(x), dense(x))
    layer.requires_grad_(False), dense.requires_grad_(False)
    with saved_tensors() as saved:
        assert torch.equal(layer(x.detach()), dense(x.detach()))
    assert saved == []
    for actual, right in zip(layer.buffers(), dense.buffers(), strict=True):
        assert torch.equal(actual, right)


def in_eval_mode(name: str, dtype: torch.dtype, device: str = "cpu") -> tuple[nn.Module, nn.Module, Tensor]:
    """Return a converted layer and the dense one in eval mode, with statistics that are not those of the input."""
    dense = made(name).to(device)
    for _ in range(3):
        dense(input_of(name, device=device) * 0.5)
    return converted(dense).eval(), dense.eval(), input_of(name, dtype, device)


each_batch = pytest.mark.parametrize("name", [name for name in MADE if "group" not in name])


@each_batch
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_eval_mode_only_the_gradient_of_the_weight_is_off(device, name, dtype):
    layer, dense, x = in_eval_mode(name, dtype, device)
    compare(layer, dense, x, layer(x), dense(x))
    if name != "2d-untracked":  # which has no other statistics than those of the input
        (ours, *_), (right, *_) = (gradients(module, x, module(x)) for module in (layer, dense))
        assert oracle.relative_error(ours, right) < 2 * torch.finfo(dtype).eps
    with saved_tensors() as saved:
        layer(x)
    assert all(tensor.dtype == torch.uint8 or tensor.numel() <= 72 or name == "timm" for tensor in saved)


@each_batch
@pytest.mark.parametrize("with_bias", [False, True])
def test_with_frozen_weights_in_eval_mode_nothing_of_the_input_is_kept(name, with_bias):
    layer, dense, x = in_eval_mode(name, torch.bfloat16)
    if name in ("2d-untracked", "timm"):
        return  # has no constant statistics, or an activation function that keeps its result
    for module in (layer, dense):
        for parameter in module.parameters():
            parameter.requires_grad_(with_bias and parameter is module.bias)
    with saved_tensors() as saved:
        y = layer(x)
    assert torch.equal(y, dense(x))
    assert sum(tensor.numel() for tensor in saved) == 24
    wanted = [p for p in layer.parameters() if p.requires_grad]
    grad = torch.randn(x.shape).bfloat16()
    found = torch.autograd.grad(y, (x, *wanted), grad)
    right = torch.autograd.grad(dense(x), (x, *[p for p in dense.parameters() if p.requires_grad]), grad)
    for actual, expected in zip(found, right, strict=True):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-7 * len(actual) ** 0.5)


def test_second_derivatives_of_a_frozen_layer_are_torchs():
    layer, dense, _ = in_eval_mode("2d", torch.float64)
    seconds = []
    for module in (layer.requires_grad_(False).double(), dense.requires_grad_(False).double()):
        x = torch.linspace(-1, 1, 5 * 24 * 12, dtype=torch.float64).view(5, 24, 4, 3).requires_grad_()
        (grad,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), x)
        seconds.append(second)
    torch.testing.assert_close(*seconds)


@each_batch
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_eval_mode_compiles_to_one_graph(name, frozen):
    torch._dynamo.reset()
    layer, _, x = in_eval_mode(name, torch.float32)
    layer.requires_grad_(not frozen)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    grad = torch.randn(x.shape)
    wanted = [t for t in (x, *layer.parameters()) if t.requires_grad]
    for first, second in zip(
        torch.autograd.grad(layer(x), wanted, grad), torch.autograd.grad(compiled(x), wanted, grad), strict=True
    ):
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("frozen", ["weight", "input"])
def test_frozen_weights_or_input(frozen):
    dense = made("2d")
    dense.requires_grad_(frozen == "input")
    layer, x = converted(dense), input_of("2d").detach().requires_grad_(frozen == "weight")
    wanted = [t for t in (x, *layer.parameters()) if t.requires_grad]
    grad = torch.randn(x.shape)
    found = torch.autograd.grad(layer(x), wanted, grad)
    right = torch.autograd.grad(dense(x), [t for t in (x, *dense.parameters()) if t.requires_grad], grad)
    for actual, expected in zip(found, right, strict=True):
        assert oracle.relative_error(actual, expected) < 0.02


@each_layer
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_to_one_graph_with_the_same_results(name):
    torch._dynamo.reset()
    layer, x = converted(made(name), "int4"), input_of(name)
    other = copy.deepcopy(layer)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    eager, traced = layer(x), compiled(x)
    assert torch.equal(eager, traced)
    for first, second in zip(gradients(layer, x, eager), gradients(other, x, traced), strict=True):
        assert torch.equal(first, second)
    for first, second in zip(layer.buffers(), other.buffers(), strict=True):
        assert torch.equal(first, second)


@each_layer
def test_copies_pickles_and_what_is_printed(name):
    layer, x = converted(made(name), "int4", 16), input_of(name)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(layer), torch.load(buffer, weights_only=False)):
        assert type(other) is type(layer)
        assert torch.equal(other(x), copy.deepcopy(layer)(x))
    assert "value_format='int4', block_size=16" in repr(layer)
    assert isinstance(layer, layer.dense_class)
    assert list(layer.state_dict()) == list(made(name).state_dict())


def test_running_statistics_in_16_bits():
    dense = made("2d").bfloat16()
    layer, x = converted(dense), input_of("2d", torch.bfloat16)
    layer(x), dense(x)
    for actual, right in zip(layer.buffers(), dense.buffers(), strict=True):
        assert actual.dtype == right.dtype
        torch.testing.assert_close(actual, right, rtol=2**-7, atol=0)


def test_used_twice_before_backward():
    dense = made("2d")
    layer, x, other = converted(dense), input_of("2d"), input_of("2d")
    ours = torch.autograd.grad((layer(x) * layer(2 * other)).sum(), (x, other, layer.weight))
    right = torch.autograd.grad((dense(x) * dense(2 * other)).sum(), (x, other, dense.weight))
    for actual, expected in zip(ours, right, strict=True):
        assert oracle.relative_error(actual, expected) < 0.02
    assert layer.num_batches_tracked == 2


@pytest.mark.parametrize("last", [False, True])
def test_in_place_activation_functions_may_follow(last):
    def network() -> nn.Sequential:
        torch.manual_seed(3)
        first, second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3)
        body = first, nn.BatchNorm2d(16), nn.ReLU(True), second, nn.GroupNorm(4, 16), nn.ReLU(True)
        return nn.Sequential(*body, nn.Flatten(), nn.Linear(16 * 16, 64))

    dense, ours = network(), network()
    report = convert(ours, sparsity=0.0, others={"norm": "int8", "activation": "int8"})
    assert [layer.kind for layer in report.few_bit] == ["BatchNorm2d", "ReLU", "GroupNorm", "ReLU"]
    assert report.skipped == []
    x = torch.randn(6, 3, 8, 8)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    found, right = (torch.autograd.grad(net(x).square().sum(), [*net.parameters()]) for net in (ours, dense))
    for actual, expected in zip(found, right, strict=True):
        # A bias in front of a normalisation has a gradient of zero: what is found of it is error.
        assert (actual - expected).norm() < 0.02 * max(float(expected.norm()), 1.0)
    revert(ours)
    assert type(ours[1]) is nn.BatchNorm2d
    assert vars(ours[1]).keys() == vars(dense[1]).keys()


def test_what_torch_refuses_it_refuses_still():
    layer = converted(made("2d"))
    for shape, message in (((1, 24, 1, 1), "more than 1 value per channel"), ((3, 24, 4), "expected 4D input")):
        with pytest.raises(ValueError, match=message):
            layer(torch.randn(shape, requires_grad=True))
    with pytest.raises(RuntimeError, match="running_mean"):
        layer(torch.randn(3, 7, 4, 4, requires_grad=True))
    with pytest.raises(TypeError, match="float64 values cannot be stored as 'int8'"):
        layer.double()(torch.randn(3, 24, 4, 4, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r"divisible|Expected weight"):
        converted(made("group"))(torch.randn(3, 7, 4, requires_grad=True))


@pytest.mark.parametrize("name", ["2d", "group"])
def test_empty_inputs_are_left_to_torch(name):
    dense = made(name)
    layer, x = converted(dense), torch.empty(0, 24, 4, 4, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 24, 4, 4)
    assert torch.equal(layer.weight.grad, torch.zeros(24))


def test_a_training_converges_as_the_dense_one():
    """The same steps with noise of mean zero: losses stay close to each other."""
    losses = []
    for change in (lambda m: m, converted):
        torch.manual_seed(0)
        norms = [change(nn.BatchNorm1d(32)), change(nn.GroupNorm(4, 32))]
        net = nn.Sequential(nn.Linear(16, 32), norms[0], nn.ReLU(), nn.Linear(32, 32), norms[1], nn.Linear(32, 1))
        x = torch.randn(256, 16)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for _ in range(20):
            optimizer.zero_grad()
            loss = (net(x)[:, 0] - x.square().sum(1).sqrt()).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_other_batch_norms_are_left_as_they_are():
    class Other(nn.BatchNorm2d):
        pass

    assert few_bit_class(Other) is None
    assert operator_of(Other(8)) == "norm"
    assert few_bit_class(nn.LazyBatchNorm2d) is None
    net = nn.Sequential(nn.Linear(64, 64), nn.SyncBatchNorm(64), nn.BatchNorm1d(64))
    report = convert(net, others={"norm": "int4"})
    assert [layer.fqn for layer in report.few_bit] == ["2"]
    assert "SyncBatchNorm" in report.describe_skipped()
    assert "together with other processes" in report.describe_skipped()


def test_fast_norm_of_timm_is_left_alone():
    for name, module in (("GroupNorm", "norm"), ("GroupNormAct", "norm_act")):
        layer, x = converted(timm_layer(name, module, num_groups=4)), input_of("group")
        layer._fast_norm = True
        with saved_tensors() as saved:
            layer(x)
        assert any(tensor.data_ptr() == x.data_ptr() for tensor in saved)
