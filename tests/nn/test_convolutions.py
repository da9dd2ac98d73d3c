"""``ActivationPrunedConv1d``, ``2d`` and ``3d`` against the convolutions of torch."""

from __future__ import annotations

import copy
import doctest
import io

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from lightning_actprune.nn import ActivationPrunedConv1d, ActivationPrunedConv2d, ActivationPrunedConv3d, convolutions
from tests.attention import saved_tensors
from tests.convolutions import BLOCK, CASES, SPARSITY, laid_out, pruned, weight_gradient
from tests.oracle import relative_error

CLASSES = {1: ActivationPrunedConv1d, 2: ActivationPrunedConv2d, 3: ActivationPrunedConv3d}


def pair(name="3x3", **settings):
    """Return a dense and a pruned layer with equal parameters."""
    case = CASES[name]
    dense = case.layer()
    settings = {"sparsity": SPARSITY, "block_size": BLOCK, **settings}
    ours = CLASSES[case.dims](case.shape[1], case.outputs, case.kernel, **case.options, **settings)
    ours.load_state_dict(dense.state_dict())
    return dense, ours


def gradients(layer, x, grad_y):
    return torch.autograd.grad(layer(x), (x, *layer.parameters()), grad_y)


@pytest.mark.parametrize("name", ["strided", "grouped", "dilated", "1d", "3d"])
def test_layers_are_those_of_torch_but_for_the_weight_gradient(name):
    (dense, ours), case = pair(name), CASES[name]
    x = case.input(False)
    y = ours(x)
    grad_y = torch.randn_like(y)
    (dx, dw, db), exact = gradients(ours, x, grad_y), gradients(dense, x, grad_y)
    assert torch.equal(y, dense(x))
    assert torch.equal(dx, exact[0])
    assert torch.equal(db, exact[2])
    right = weight_gradient(case, pruned(x, False).double(), dense.weight, grad_y)
    assert relative_error(dw, right) < 1e-5
    assert relative_error(exact[1], right) > 0.01


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_padding_by_name(padding):
    dense = nn.Conv2d(16, 4, (3, 5), dilation=(2, 1), padding=padding)
    ours = ActivationPrunedConv2d(16, 4, (3, 5), dilation=(2, 1), padding=padding, sparsity=0.0, value_format="int8")
    ours.load_state_dict(dense.state_dict())
    x = torch.randn(2, 16, 9, 9, requires_grad=True)
    assert torch.equal(ours(x), dense(x))
    grad_y = torch.randn_like(dense(x))
    assert torch.equal(gradients(ours, x, grad_y)[0], gradients(dense, x, grad_y)[0])


@pytest.mark.parametrize("options", [{"padding": 1, "padding_mode": "circular"}, {"padding": "same"}], ids=str)
def test_padding_that_torch_keeps_a_copy_of_is_refused(options):
    with pytest.raises(ValueError, match=r"`padding` is .* keeps a padded copy.*HINT"):
        ActivationPrunedConv1d(8, 8, 4, sparsity=0.5, **options)


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"`sparsity` must be in \[0, 1\), got 1"):
        ActivationPrunedConv2d(8, 8, 3, sparsity=1)
    with pytest.raises(ValueError, match="`block_size` must be at least 8"):
        ActivationPrunedConv2d(8, 8, 3, sparsity=0.5, block_size=4, value_format="int4")


def test_a_single_sample_is_a_batch_of_one():
    _, ours = pair()
    x = CASES["3x3"].input(True).detach()[0].requires_grad_()
    single, batch = ours(x), ours(x.unsqueeze(0))
    grad_y = torch.randn_like(single)
    assert torch.equal(single, batch[0])
    for one, other in zip(gradients(ours, x, grad_y), gradients(ours, x, grad_y), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("why", ["no sparsity", "no_grad", "frozen", "eval and no_grad"])
def test_torchs_own_convolution_where_nothing_is_packed(why):
    dense, ours = pair(sparsity=0.0 if why == "no sparsity" else 0.5)
    x = CASES["3x3"].input(True)
    if why == "frozen":
        dense.weight.requires_grad_(False), ours.weight.requires_grad_(False)
    ours.train(why != "eval and no_grad")
    with torch.set_grad_enabled("no_grad" not in why), saved_tensors() as saved:
        y = ours(x)
    assert torch.equal(y, dense(x))
    if "no_grad" in why:
        assert saved == []
        return
    assert any(t.data_ptr() == x.data_ptr() for t in saved)
    inputs = [x, ours.bias] if why == "frozen" else [x, ours.weight, ours.bias]
    expected = [x, dense.bias] if why == "frozen" else [x, dense.weight, dense.bias]
    grad_y = torch.randn_like(y)
    for mine, right in zip(
        torch.autograd.grad(y, inputs, grad_y), torch.autograd.grad(dense(x), expected, grad_y), strict=True
    ):
        assert torch.equal(mine, right)


def test_evaluation_mode_with_gradients_packs_all_the_same():
    _, ours = pair()
    x = CASES["3x3"].input(True)
    with saved_tensors() as saved:
        ours.eval()(x)
    assert all(t.data_ptr() != x.data_ptr() for t in saved)


def test_a_layer_used_twice_adds_up():
    layer = ActivationPrunedConv2d(16, 16, 3, padding=1, sparsity=0.5, block_size=8)
    x = laid_out(torch.randn(2, 16, 6, 6), True)
    inner = layer(x)
    y = layer(inner)
    grad_y = torch.randn_like(y)
    twice = torch.autograd.grad(y, layer.weight, grad_y, retain_graph=True)[0]
    (through,) = torch.autograd.grad(y, inner, grad_y)
    second = copy.deepcopy(layer)
    leaf = inner.detach()
    alone = torch.autograd.grad(second(leaf), second.weight, grad_y)[0]
    alone = alone + torch.autograd.grad(second(x), second.weight, through)[0]
    torch.testing.assert_close(twice, alone)


def test_sparsity_may_change_between_steps():
    _, ours = pair(sparsity=0.0)
    x = CASES["3x3"].input(True)
    grad_y = torch.randn_like(ours(x))
    for sparsity in (0.0, 0.25, 0.75):
        ours.sparsity = sparsity
        (_, dw, _) = gradients(ours, x, grad_y)
        hat = pruned(x, True, sparsity=sparsity)
        assert relative_error(dw, weight_gradient(CASES["3x3"], hat.double(), ours.weight, grad_y)) < 1e-5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_schedule_compiles_twice():
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    _, ours = pair()
    _, eager = pair()
    eager.load_state_dict(ours.state_dict())
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    x = CASES["3x3"].input(True)
    for sparsity in (0.2, 0.3, 0.4, 0.5):
        ours.sparsity = eager.sparsity = sparsity
        y = compiled(x)
        grad_y = torch.randn_like(y)
        traced = torch.autograd.grad(y, (x, *ours.parameters()), grad_y)
        for mine, right in zip(traced, gradients(eager, x, grad_y), strict=True):
            torch.testing.assert_close(mine, right)
    assert counter.frame_count == 2


def test_copies_pickles_and_what_is_printed():
    dense, ours = pair(value_format="int4")
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    x = CASES["3x3"].input(True)
    grad_y = torch.randn_like(ours(x))
    for other in (copy.deepcopy(ours), torch.load(buffer, weights_only=False)):
        assert type(other) is ActivationPrunedConv2d
        for mine, right in zip(gradients(other, x, grad_y), gradients(ours, x, grad_y), strict=True):
            assert torch.equal(mine, right)
    assert list(ours.state_dict()) == list(dense.state_dict())
    assert "padding=(1, 1), sparsity=0.6, block_size=8, scope='sample', value_format='int4'" in repr(ours)


def test_inputs_that_cannot_be_packed_are_refused():
    _, ours = pair()
    with pytest.raises(TypeError, match="`x` must be a floating-point tensor"):
        ours(torch.ones(2, 16, 9, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match="`x` must be a dense tensor"):
        ours(torch.randn(2, 16, 9, 6).to_sparse())
    with pytest.raises(RuntimeError, match="channels"):
        ours(torch.randn(2, 15, 9, 6))


def test_dtensors_are_refused(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        _, ours = pair()
        x = DTensor.from_local(torch.randn(2, 16, 9, 6), mesh, [Replicate()])
        with pytest.raises(TypeError, match=r"cannot take DTensors.*HINT"):
            ours(x)
    finally:
        dist.destroy_process_group()


def test_examples_of_the_docstrings():
    assert doctest.testmod(convolutions).failed == 0


@pytest.mark.gpu
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_under_autocast(name, last):
    (dense, ours), case = (layer.cuda() for layer in pair(name)), CASES[name]
    x = case.input(last, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        y, right = ours(x), dense(x)
    grad_y = torch.randn_like(right)
    (dx, dw, db), exact = (
        torch.autograd.grad(out, (x, *layer.parameters()), grad_y) for out, layer in ((y, ours), (right, dense))
    )
    eps = torch.finfo(torch.bfloat16).eps
    assert y.stride() == right.stride()
    assert dx.stride() == exact[0].stride()
    # The library may choose another algorithm from call to call: two roundings of each result.
    torch.testing.assert_close(y, right, rtol=2 * eps, atol=eps)
    assert relative_error(dx, exact[0]) < 2 * eps
    assert relative_error(db, exact[2]) < 2 * eps
    hat = laid_out(pruned(x.bfloat16(), last), last)
    assert relative_error(dw, weight_gradient(case, hat.double(), dense.weight, grad_y)) < 4 * eps


@pytest.mark.gpu
def test_a_captured_step_is_the_eager_one():
    ours = pair(value_format="int4")[1].cuda()
    x = laid_out(torch.randn(3, 16, 9, 6, device="cuda"), True)
    grad_y = torch.randn_like(ours(x))

    def step():
        return torch.autograd.grad(ours(x), ours.weight, grad_y)[0]

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
    torch.testing.assert_close(captured, expected, rtol=1e-4, atol=1e-4)
