"""Layers that scale each feature and prune their input: exact but for the gradient of the factors."""

from __future__ import annotations

import copy
import doctest
import io

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from lightning_actprune import convert, revert
from lightning_actprune.nn import ActivationPrunedAffine, Affine, affine
from lightning_actprune.nn.settings import PrunedLayer
from lightning_actprune.ops import formats
from lightning_actprune.ops.dispatch import force_backend
from tests.affine import (
    BLOCK,
    FEATURES,
    MAKERS,
    SPARSITY,
    TimmLayerScale,
    TimmResBlock,
    factors_gradient,
    pruned,
    scaling,
)
from tests.attention import saved_tensors
from tests.kernels.workload import launches
from tests.oracle import relative_error

each_kind = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def pair(make, device="cpu", value_format="same", sparsity=SPARSITY, block_size=BLOCK, **options):
    """Return a layer with random parameters, dense and converted."""
    dense = nn.Sequential(make()).to(device)
    for parameter in dense.parameters():
        nn.init.normal_(parameter)
    ours = copy.deepcopy(dense)
    report = convert(ours, sparsity, block_size, others=scaling(value_format), **options)
    operator = "affine" if len(list(dense.parameters())) > 1 else "scale"
    assert [(layer.fqn, layer.operator, layer.value_format) for layer in report.converted] == [
        ("0", operator, value_format)
    ]
    return dense, ours


def gradients(layer, x, grad_y):
    return torch.autograd.grad(layer(x), (x, *layer.parameters()), grad_y)


@each_kind
def test_layers_are_the_dense_ones_but_for_the_gradient_of_the_factors(make, device):
    dense, ours = pair(make, device)
    x = torch.randn(3, 5, FEATURES, device=device, requires_grad=True)
    y = ours(x)
    grad_y = torch.randn_like(y)
    assert torch.equal(y, dense(x))
    (dx, dw, *db), exact = gradients(ours, x, grad_y), gradients(dense, x, grad_y)
    assert torch.equal(dx, exact[0])
    assert [g.shape for g in (dw, *db)] == [g.shape for g in exact[1:]]
    for mine, right in zip(db, exact[2:], strict=True):
        torch.testing.assert_close(mine, right)
    assert relative_error(dw.flatten(), factors_gradient(pruned(x), grad_y)) < 1e-5
    assert relative_error(exact[1].flatten(), factors_gradient(pruned(x), grad_y)) > 0.01


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value_format", ["int4", "int2", "fp8"])
def test_all_of_the_input_in_few_bits(make, device, dtype, value_format):
    dense, ours = pair(make, device, value_format, 0.0, 32)
    x = torch.randn(3, 5, 70, device=device).to(dtype)
    given = [x.clone().requires_grad_() for _ in range(2)]
    with saved_tensors() as saved:
        y = ours(given[1])
    right = dense(given[0])
    assert y.dtype == right.dtype
    torch.testing.assert_close(y, right, rtol=3e-7, atol=3e-7)
    grad_y = torch.randn_like(y)
    right.backward(grad_y)
    y.backward(grad_y)
    torch.testing.assert_close(given[1].grad, given[0].grad, rtol=torch.finfo(dtype).eps, atol=1e-6)
    factors, *shifts = tuple(zip(ours.parameters(), dense.parameters(), strict=True))
    for mine, exact in shifts:
        torch.testing.assert_close(mine.grad, exact.grad)
    stored = formats.dequantize(saved[0].cpu(), 32, value_format, torch.float32).view(15, 96)[:, :70].double()
    near = (grad_y.double().cpu().view(15, 70) * stored).sum(0)
    torch.testing.assert_close(factors[0].grad.double().cpu().view(-1), near, rtol=1e-5, atol=1e-5)
    own = {parameter.data_ptr() for parameter in ours.parameters()}
    kept = sum(t.nbytes for t in saved if t.data_ptr() not in own)
    assert kept == 45 * formats.FORMATS[value_format].row_bytes(32, 4)


def test_without_dropped_blocks_one_pass_does_it_all(kernel_device):
    x = torch.randn(3, 5, FEATURES, device=kernel_device, requires_grad=True)
    found = {}
    for sparsity in (0.0, SPARSITY):
        _, ours = pair(MAKERS["affine"], kernel_device, "int4", sparsity)
        with force_backend("triton"), launches() as names:
            ours(x).sum().backward()
        found[sparsity] = [name.removesuffix("_kernel") for name in names]
    assert found[0.0] == ["normalize", "normalize_grad", "add_sets"]
    assert found[SPARSITY][-2:] == ["affine_grad", "add_sets"]
    assert "unpack" not in found[SPARSITY]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_block_scales_its_branches(device, dtype):
    """All gradients but those of the factors are as exact as sums in another order."""
    torch.manual_seed(0)
    dense = TimmResBlock(70).to(device)
    for factors in (dense.ls1, dense.ls2):
        nn.init.normal_(factors)
    ours = nn.Sequential(copy.deepcopy(dense))
    report = convert(ours, others={"scale": "int8"}, min_features=1000)
    assert [(layer.fqn, layer.kind, layer.operator) for layer in report.few_bit] == [("0", "ResBlock", "scale")]
    x = torch.randn(3, 5, 70, device=device, requires_grad=True)
    grads = []
    for module in (dense, ours):
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            y = module(x)
        y.backward(torch.ones_like(y), inputs=[x, *module.parameters()])
        grads.append([y, x.grad, *(p.grad for p in module.parameters())])
        x.grad = None
    eps, names = torch.finfo(dtype).eps, ["y", "x", *dict(dense.named_parameters())]
    for name, right, found in zip(names, *grads, strict=True):
        assert found.dtype == right.dtype
        near = 0.01 if name in ("ls1", "ls2") else 8 * eps  # int8: half a step of 8 standard deviations, over 15 rows
        assert (found - right).norm() <= near * right.norm(), name
    with torch.no_grad():
        assert torch.equal(ours(x), dense(x))


class Doubled(nn.Module):
    """In place of a path that is dropped."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.parametrize("path", ["plain", "hook", "module", "wide"])
def test_a_block_adds_its_branches_on_the_way_if_nothing_is_between(path, device):
    dense = TimmResBlock(70).to(device)
    if path == "module":
        dense.drop_path = Doubled()
    for factors in (dense.ls1, dense.ls2):
        nn.init.normal_(factors)
    ours = nn.Sequential(copy.deepcopy(dense))
    convert(ours, others={"scale": "int8"}, min_features=1000)
    seen = []
    if path == "hook":
        ours[0].drop_path.register_forward_hook(lambda module, args, y: seen.append(y))
    x = torch.randn(3, 5, 70, device=device)
    if path == "wide":
        for module in (dense, ours):
            module.register_forward_pre_hook(lambda module, args: args[0].double())
            module.to(torch.float32)
        dense.linear_tokens, ours[0].linear_tokens = (Single(m) for m in (dense.linear_tokens, ours[0].linear_tokens))
        dense.mlp_channels, ours[0].mlp_channels = (Single(m) for m in (dense.mlp_channels, ours[0].mlp_channels))
    right, y = dense(x), ours(x)
    names = {node.name() for node in nodes(y.grad_fn)}
    assert ("ScaledSumFunctionBackward" in names) == (path == "plain")
    assert len(seen) == (2 if path == "hook" else 0)
    assert y.dtype == right.dtype
    torch.testing.assert_close(y, right, rtol=1e-5, atol=1e-5)


class Single(nn.Module):
    """A branch that computes in fp32 whatever it is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.float())


def nodes(root) -> set:
    """Return all nodes of a graph of gradients."""
    found, left = set(), [root]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left.extend(parent for parent, _ in node.next_functions)
    return found


def test_a_compiled_block_is_one_graph_and_equal(device):
    dense = TimmResBlock(70).to(device)
    ours = nn.Sequential(dense)
    convert(ours, others={"scale": "int4"}, min_features=1000)
    x = torch.randn(3, 5, 70, device=device)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    grads = [torch.autograd.grad(model(x).square().sum(), list(ours.parameters())) for model in (ours, compiled)]
    for eager, other in zip(*grads, strict=True):
        torch.testing.assert_close(other, eager)


@each_kind
@pytest.mark.parametrize("sparsity", [0.0, SPARSITY])
@pytest.mark.parametrize("why", ["frozen", "no_grad", "eval and no_grad", "nothing to store"])
def test_the_dense_layer_where_nothing_is_packed(make, sparsity, why):
    value_format = "same" if why == "nothing to store" else "int4"
    dense, ours = pair(make, value_format=value_format, sparsity=sparsity)
    if why == "nothing to store":
        ours[0].sparsity = 0.0
    for module in (dense, ours):
        module.requires_grad_(why != "frozen")
        module.train(why != "eval and no_grad")
    x = torch.randn(3, 5, FEATURES, requires_grad=True)
    with torch.set_grad_enabled("no_grad" not in why), saved_tensors() as saved:
        y = ours(x)
    assert torch.equal(y, dense(x))
    if "no_grad" in why:
        assert saved == []
        assert not y.requires_grad
        return
    assert all(t.dtype == torch.float32 for t in saved)
    inputs = [(x, *(p for p in module.parameters() if p.requires_grad)) for module in (ours, dense)]
    grad_y = torch.randn_like(y)
    grads = [torch.autograd.grad(m(x), i, grad_y) for m, i in zip((ours, dense), inputs, strict=True)]
    assert all(torch.equal(mine, right) for mine, right in zip(*grads, strict=True))


def test_evaluation_mode_with_gradients_packs_all_the_same():
    _, ours = pair(MAKERS["affine"])
    x = torch.randn(3, 5, FEATURES, requires_grad=True)
    with saved_tensors() as saved:
        ours.eval()(x)
    assert all(t.data_ptr() != x.data_ptr() for t in saved)


def test_a_layer_used_twice_adds_up():
    _, ours = pair(MAKERS["affine"])
    x = torch.randn(3, 5, FEATURES)
    weight = ours[0].weight
    inner = ours(x)
    y = ours(inner)
    grad_y = torch.randn_like(y)
    twice = torch.autograd.grad(y, weight, grad_y, retain_graph=True)[0]
    (through,) = torch.autograd.grad(y, inner, grad_y)
    alone = factors_gradient(pruned(inner), grad_y) + factors_gradient(pruned(x), through)
    assert relative_error(twice, alone) < 1e-5


def test_sparsity_may_change_between_steps():
    _, ours = pair(MAKERS["affine"])
    x = torch.randn(3, 5, FEATURES, requires_grad=True)
    grad_y = torch.randn_like(x)
    for sparsity in (0.0, 0.25, 0.75):
        ours[0].sparsity = sparsity
        dw = gradients(ours, x, grad_y)[1]
        assert relative_error(dw, factors_gradient(pruned(x, sparsity=sparsity), grad_y)) < 1e-5


@pytest.mark.parametrize("value_format", ["same", "int4"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_schedule_compiles_twice(value_format):
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    _, ours = pair(MAKERS["affine"], value_format=value_format)
    eager = copy.deepcopy(ours)
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    x = torch.randn(3, 5, FEATURES, requires_grad=True)
    grad_y = torch.randn_like(x)
    for sparsity in (0.2, 0.3, 0.4, 0.5):
        ours[0].sparsity = eager[0].sparsity = sparsity
        traced = torch.autograd.grad(compiled(x), (x, *ours.parameters()), grad_y)
        for mine, right in zip(traced, gradients(eager, x, grad_y), strict=True):
            torch.testing.assert_close(mine, right)
    assert counter.frame_count == 2


@each_kind
def test_a_compiled_layer_in_few_bits_is_one_graph_and_equal(make):
    torch.compiler.reset()
    _, ours = pair(make, value_format="int4", sparsity=0.0)
    x = torch.randn(4, 5, FEATURES, requires_grad=True)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    grads = [torch.autograd.grad(model(x).square().sum(), list(ours.parameters())) for model in (ours, compiled)]
    for eager, other in zip(*grads, strict=True):
        torch.testing.assert_close(other, eager)


@each_kind
def test_copies_and_what_is_printed(make):
    dense, ours = pair(make, value_format="int4")
    x = torch.randn(3, 5, FEATURES, requires_grad=True)
    grad_y = torch.randn_like(x)
    other = copy.deepcopy(ours)
    assert type(other[0]) is type(ours[0])
    for mine, right in zip(gradients(other, x, grad_y), gradients(ours, x, grad_y), strict=True):
        assert torch.equal(mine, right)
    assert list(ours.state_dict()) == list(dense.state_dict())
    assert "sparsity=0.6, block_size=16, scope='sample', value_format='int4')" in repr(ours[0])


def test_a_saved_layer_is_loaded_as_it_was():
    layer = ActivationPrunedAffine(FEATURES, sparsity=0.5, value_format="int8", scale=0.5)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    other = torch.load(buffer, weights_only=False)
    assert type(other) is ActivationPrunedAffine
    assert (other.sparsity, other.value_format) == (0.5, "int8")
    assert repr(Affine(8)) == "Affine(8, bias=True)"
    assert repr(ActivationPrunedAffine(8, False, sparsity=0.5)) == (
        "ActivationPrunedAffine(8, bias=False, sparsity=0.5, block_size=32, scope='sample')"
    )


@each_kind
def test_layers_go_back_to_what_they_were(make):
    dense, ours = pair(make)
    assert isinstance(ours[0], type(dense[0]))
    assert isinstance(ours[0], PrunedLayer)
    assert revert(ours) == ["0"]
    assert type(ours[0]) is type(dense[0])
    assert ours[0].__dict__.keys() == dense[0].__dict__.keys()


def test_scaling_in_place_is_left_to_timm():
    ours = nn.Sequential(TimmLayerScale(FEATURES, inplace=True), nn.Linear(FEATURES, FEATURES))
    report = convert(ours, others=scaling("int4"))
    assert {s.fqn: s.reason for s in report.skipped} == {"0": "scales in place, of which torch keeps a copy"}
    assert type(ours[0]) is TimmLayerScale
    later = nn.Sequential(TimmLayerScale(FEATURES))
    convert(later, others=scaling("int4"))
    later[0].inplace = True
    x = torch.randn(2, FEATURES)
    with torch.no_grad():
        assert later(x) is x


def test_inputs_that_are_not_packed_are_left_to_torch():
    """What torch multiplies all the same: other numbers, values that are expanded, and fewer dimensions."""
    for make, x in (
        (MAKERS["affine"], torch.ones(2, FEATURES, dtype=torch.int64)),
        (MAKERS["affine"], torch.randn(2, 1)),
        (MAKERS["affine"], torch.randn(())),
        (MAKERS["timm affine"], torch.randn(2, FEATURES)),
    ):
        dense, ours = pair(make)
        y, right = ours(x), dense(x)
        assert torch.equal(y, right)
        found, exact = (torch.autograd.grad(o.sum(), list(m.parameters())) for o, m in ((y, ours), (right, dense)))
        assert all(torch.equal(mine, other) for mine, other in zip(found, exact, strict=True))


def test_timms_affine_takes_more_dimensions():
    dense, ours = pair(MAKERS["timm affine"])
    x = torch.randn(2, 3, 4, FEATURES, requires_grad=True)
    grad_y = torch.randn_like(x)
    (dx, dw, _), exact = gradients(ours, x, grad_y), gradients(dense, x, grad_y)
    assert torch.equal(ours(x), dense(x))
    assert torch.equal(dx, exact[0])
    assert relative_error(dw.flatten(), factors_gradient(pruned(x), grad_y)) < 1e-5


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_what_cannot_be_stored_is_refused(sparsity):
    _, ours = pair(MAKERS["affine"], value_format="int4", sparsity=sparsity)
    with pytest.raises(TypeError, match=r"float64 values cannot be stored as 'int4'.* HINT"):
        ours.double()(torch.randn(2, FEATURES, dtype=torch.float64))


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"`sparsity` must be in \[0, 1\), got 1"):
        ActivationPrunedAffine(8, sparsity=1)
    with pytest.raises(ValueError, match="`block_size` must be at least 8"):
        ActivationPrunedAffine(8, sparsity=0.5, block_size=4, value_format="int4")


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_dtensors_are_refused(tmp_path, sparsity):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        _, ours = pair(MAKERS["affine"], value_format="int4", sparsity=sparsity)
        x = DTensor.from_local(torch.randn(2, 5, FEATURES), mesh, [Replicate()])
        with pytest.raises(TypeError, match=r"cannot take DTensors.*HINT"):
            ours(x)
    finally:
        dist.destroy_process_group()


def test_examples_of_the_docstrings():
    assert doctest.testmod(affine).failed == 0


@pytest.mark.gpu
@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_under_autocast(make, dtype):
    dense, ours = pair(make, "cuda")
    x = torch.randn(3, 5, FEATURES, device="cuda", dtype=dtype, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y, right = ours(x), dense(x)
    assert y.dtype == right.dtype
    assert torch.equal(y, right)
    grad_y = torch.randn_like(right)
    (dx, dw, *db), exact = (
        torch.autograd.grad(out, (x, *layer.parameters()), grad_y) for out, layer in ((y, ours), (right, dense))
    )
    assert torch.equal(dx, exact[0])
    for mine, other in zip(db, exact[2:], strict=True):
        torch.testing.assert_close(mine, other)
    assert relative_error(dw.flatten(), factors_gradient(pruned(x), grad_y)) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("value_format", ["same", "int4"])
def test_a_captured_step_is_the_eager_one(value_format):
    ours = pair(MAKERS["affine"], "cuda", value_format)[1]
    x = torch.randn(3, 5, FEATURES, device="cuda")
    grad_y = torch.randn_like(x)

    def step():
        return torch.autograd.grad(ours(x), list(ours.parameters()), grad_y)

    expected = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert all(torch.equal(mine, right) for mine, right in zip(captured, expected, strict=True))


@pytest.mark.parametrize("sparsity", [0.0, SPARSITY])
def test_the_output_has_the_widest_type(sparsity):
    layer = ActivationPrunedAffine(FEATURES, sparsity=sparsity, block_size=BLOCK, value_format="int8").bfloat16()
    layer.bias = nn.Parameter(torch.zeros(FEATURES))
    assert layer(torch.randn(2, 3, FEATURES, dtype=torch.bfloat16)).dtype == torch.float32
