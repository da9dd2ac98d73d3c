"""The pruned convolution against an fp64 oracle, on every backend."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F

from lightning_actprune import functional
from lightning_actprune.ops.convolution import Windows, pruned_convolution
from lightning_actprune.ops.convolution_plan import input_rows, without_gaps
from lightning_actprune.ops.dispatch import MAX_COLUMNS
from lightning_actprune.ops.geometry import BlockGeometry, sparsity_parts
from lightning_actprune.ops.setting import BlockSetting
from tests.attention import saved_tensors
from tests.convolutions import BLOCK, CASES, SPARSITY, in_memory, laid_out, pruned, weight_gradient
from tests.oracle import integers, relative_error

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
each_case = pytest.mark.parametrize("name", CASES)


def convolve(case, x, weight, bias=None, sparsity=SPARSITY, block_size=BLOCK, scope="sample", **how):
    blocks = BlockSetting.checked(block_size, scope, how.get("value_format", "same"), how.get("selection", "largest"))
    windows = case if isinstance(case, Windows) else case.windows
    return pruned_convolution(x, weight, bias, windows, sparsity_parts(sparsity), blocks)


def made(name, last, device="cpu", dtype=torch.float32):
    case = CASES[name]
    layer = case.layer(device=device, dtype=dtype)
    return case, case.input(last, device=device, dtype=dtype), layer.weight, layer.bias


@LAYOUTS
@each_case
def test_only_the_weight_gradient_is_approximate(device, name, last):
    case, x, weight, bias = made(name, last, device)
    y, right = convolve(case, x, weight, bias), case.convolve(x, weight, bias)
    grad_y = torch.randn_like(right)
    grads, exact = (torch.autograd.grad(out, (x, weight, bias), grad_y) for out in (y, right))
    assert torch.equal(y, right)
    assert y.stride() == right.stride()
    assert grads[0].stride() == exact[0].stride()
    # On a GPU the vendor's library may take another algorithm for the same convolution.
    near = {"rtol": 0, "atol": 0} if device.type == "cpu" else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close((grads[0], grads[2]), (exact[0], exact[2]), **near)
    # Torch's own gradient for the pruned input has the same products, and may have another order of summation.
    hat = laid_out(pruned(x, last), last)
    oracle = weight_gradient(case, hat.double(), weight, grad_y)
    floor = 4 * torch.finfo(torch.float32).eps
    assert (
        relative_error(grads[1], oracle)
        <= 2 * relative_error(weight_gradient(case, hat, weight, grad_y), oracle) + floor
    )


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["3x3", "depthwise", "1d"])
def test_16_bits(device, name, dtype):
    case, x, weight, bias = made(name, True, device, dtype)
    y, right = convolve(case, x, weight, bias), case.convolve(x, weight, bias)
    grad_y = torch.randn_like(right)
    grads, exact = (torch.autograd.grad(out, (x, weight, bias), grad_y) for out in (y, right))
    assert torch.equal(y, right)
    assert torch.equal(grads[0], exact[0])
    assert torch.equal(grads[2], exact[2])
    hat = laid_out(pruned(x, True), True)
    oracle = weight_gradient(case, hat.double(), weight, grad_y)
    torchs = relative_error(weight_gradient(case, hat, weight, grad_y), oracle)
    assert relative_error(grads[1], oracle) <= 2 * torchs + 4 * torch.finfo(dtype).eps


@LAYOUTS
@pytest.mark.parametrize(
    ("sparsity", "value_format", "selection"),
    [(0.0, "int8", "largest"), (0.0, "fp8", "largest"), (0.5, "int4", "swap"), (0.5, "int2", "unbiased")],
)
def test_formats_and_selections_are_those_of_a_packed_input(device, sparsity, value_format, selection, last):
    case, x, weight, _ = made("3x3", last, device)
    y = convolve(case, x, weight, sparsity=sparsity, value_format=value_format, selection=selection)
    grad_y = torch.randn_like(y)
    (grad,) = torch.autograd.grad(y, weight, grad_y)
    rows = in_memory(x.detach(), last).view(x.shape[0], -1, BLOCK)
    options = {"sparsity": sparsity, "block_size": BLOCK, "value_format": value_format, "block_selection": selection}
    hat = functional.pack(rows, **options).unpack()
    channels, *spatial = x.shape[1:]
    hat = hat.view(-1, *spatial, channels).movedim(-1, 1) if last else hat.view(x.shape)
    # The same values in the same layout: torch's own gradient, to the order of summation.
    expected = weight_gradient(case, hat.double(), weight, grad_y)
    assert relative_error(grad, expected) < 1e-5


@pytest.mark.parametrize("value_format", ["same", "int4"])
def test_autocast_packs_what_torch_would_keep(device, value_format):
    case, x, weight, bias = made("3x3", True, device)
    with torch.no_grad():
        x.copy_(integers(*x.shape))  # the interpreter rounds others to bf16 in a way of its own
    with torch.autocast(device.type, torch.bfloat16):
        y, right = convolve(case, x, weight, bias, value_format=value_format), case.convolve(x, weight, bias)
    grad_y = torch.randn_like(right)
    grads, exact = (torch.autograd.grad(out, (x, weight, bias), grad_y) for out in (y, right))
    assert torch.equal(y, right)
    assert [grad.dtype for grad in grads] == [torch.float32] * 3
    assert torch.equal(grads[0], exact[0])
    assert torch.equal(grads[2], exact[2])
    if value_format == "same":
        hat = laid_out(pruned(x.bfloat16(), True), True)
        oracle = weight_gradient(case, hat.double(), weight.bfloat16(), grad_y)
        assert relative_error(grads[1], oracle) < 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@LAYOUTS
def test_nothing_but_packed_input_and_weight_is_saved(device, last, autocast):
    case, x, weight, bias = made("3x3", last, device)
    with saved_tensors() as saved, torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        convolve(case, x, weight, bias)
    own = [t for t in saved if t.data_ptr() != weight.data_ptr()]
    geometry = BlockGeometry.of(3, x[0].numel() // BLOCK, BLOCK, BLOCK, SPARSITY)
    assert sum(t.nbytes for t in own) == geometry.stored_bytes(2 if autocast else 4)
    assert len(saved) == len(own) + 1


def halves(x):
    """Return every other of twice as many channels."""
    return torch.stack([x, torch.zeros_like(x)], 2).flatten(1, 2)[:, ::2]


GAPS = {
    "half of the channels": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "half of the last channels": lambda x: laid_out(torch.cat([x, x], 1), True)[:, : x.shape[1]],
    "every other channel": halves,
    "turned": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "cropped": lambda x: F.pad(x, (1, 2, 1, 1))[..., 1:-1, 1:-2],
}


@pytest.mark.parametrize("gaps", GAPS)
def test_inputs_with_gaps_are_those_without(device, gaps):
    case, x, weight, bias = made("3x3", False, device)
    given = GAPS[gaps](x.detach()).requires_grad_()
    assert torch.equal(given, x)
    last = gaps == "half of the last channels"
    plain = laid_out(x.detach(), last).requires_grad_()
    outs = convolve(case, given, weight, bias), convolve(case, plain, weight, bias)
    grad_y = torch.randn_like(outs[0])
    ours, right = (torch.autograd.grad(y, (i, weight, bias), grad_y) for y, i in zip(outs, (given, plain), strict=True))
    torch.testing.assert_close(outs[0], outs[1])
    for mine, expected in zip(ours, right, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


def test_what_reads_one_tensor_packs_it_once(device):
    case, x, weight, _ = made("3x3", True, device)
    shortcut = torch.randn(4, 16, 1, 1, device=device, requires_grad=True)
    pointwise = case._replace(kernel=(1, 1), options={"stride": 2})
    linear = torch.randn(5, x.shape[-1], device=device, requires_grad=True)
    with saved_tensors() as saved:
        first, second = convolve(case, x, weight), convolve(pointwise, x, shortcut)
        other = functional.linear(x, linear, sparsity=SPARSITY, block_size=BLOCK)
    weights = {t.data_ptr() for t in (weight, shortcut, linear)}
    packed = {t.data_ptr(): t.nbytes for t in saved if t.data_ptr() not in weights}
    assert len(packed) == 6  # of two packs, one of them for both convolutions
    hat = pruned(x, True)
    for y, leaf, how in ((first, weight, case), (second, shortcut, pointwise)):
        (grad,) = torch.autograd.grad(y.sum(), leaf)
        assert relative_error(grad, weight_gradient(how, hat.double(), leaf, torch.ones_like(y))) < 1e-5
    other.sum().backward()


def test_empty_batch(device):
    case, _, weight, bias = made("3x3", False, device)
    x = torch.randn(0, *case.shape[1:], device=device, requires_grad=True)
    for value_format in ("same", "int4"):
        y = convolve(case, x, weight, bias, value_format=value_format)
        grads = torch.autograd.grad(y.sum(), (x, weight, bias))
        assert y.shape == (0, 8, 9, 6)
        assert grads[0].shape == x.shape
        assert not any(grad.any() for grad in grads[1:])


def test_blocks_that_are_not_finite_are_kept(device):
    case, x, weight, _ = made("pointwise", True, device)
    with torch.no_grad():
        x[0, 3, 1, 1], x[1, 20, 0, 0] = float("nan"), float("inf")
    y = convolve(case, x, weight, sparsity=0.9)
    (grad,) = torch.autograd.grad(y, weight, torch.ones_like(y))
    finite = torch.isfinite(grad).all(0).flatten()
    assert [i for i in range(24) if not finite[i]] == [3, 20]


def test_tokens_are_pixels_or_lines(device):
    for last in (False, True):
        case, x, weight, _ = made("3x3", last, device)
        y = convolve(case, x, weight, sparsity=0.5, block_size=3, scope="token")
        grad_y = torch.randn_like(y)
        (grad,) = torch.autograd.grad(y, weight, grad_y)
        rows = (x.detach().movedim(1, -1) if last else x.detach()).flatten(0, -2)
        hat = pruned(rows, False, 3, 0.5)  # every row a sample
        hat = hat.view(3, 9, 6, 16).movedim(-1, 1) if last else hat.view(x.shape)
        assert relative_error(grad, weight_gradient(case, hat.double(), weight, grad_y)) < 1e-5


def test_fp64_is_pruned_as_it_is_but_not_quantised():
    case, x, weight, _ = made("3x3", True, dtype=torch.float64)
    y = convolve(case, x, weight)
    (grad,) = torch.autograd.grad(y.sum(), weight)
    assert relative_error(grad, weight_gradient(case, pruned(x, True), weight, torch.ones_like(y))) < 1e-12
    with pytest.raises(TypeError, match="float64 values cannot be stored as 'int4'"):
        convolve(case, x, weight, value_format="int4")


def test_second_derivatives_are_an_error():
    case, x, weight, _ = made("3x3", True)
    with pytest.raises(RuntimeError, match=r"Second derivatives through a convolution .*HINT"):
        torch.autograd.grad(convolve(case, x, weight).square().sum(), weight, create_graph=True)


@LAYOUTS
@pytest.mark.parametrize("value_format", ["same", "int4"])
@pytest.mark.parametrize("name", ["3x3", "ragged", "1d"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_to_one_graph_with_the_same_results(name, value_format, last):
    case, x, weight, bias = made(name, last)
    windows = case.windows

    def run(x):
        return convolve(windows, x, weight, bias, value_format=value_format)

    torch.compiler.reset()  # what other cases have compiled of this code counts towards a limit
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=False)
    eager, traced = run(x), compiled(x)
    grad_y = torch.randn_like(eager)
    assert torch.equal(eager, traced)
    for first, second in zip(
        *(torch.autograd.grad(y, (x, weight, bias), grad_y) for y in (eager, traced)), strict=True
    ):
        assert torch.equal(first, second)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_batches_of_all_sizes_compile_once():
    case, _, weight, bias = made("3x3", True)
    windows, shape = case.windows, case.shape[1:]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter, dynamic=None)
    def run(x):
        return convolve(windows, x, weight, bias)

    for batch in (2, 3, 5, 6):
        x = laid_out(torch.randn(batch, *shape), True).requires_grad_()
        (grad,) = torch.autograd.grad(run(x).sum(), weight)
        (right,) = torch.autograd.grad(convolve(windows, x, weight, bias).sum(), weight)
        torch.testing.assert_close(grad, right)
    assert counter.frame_count == 2  # one size, then any


def rows_of(*shape, block_size=32, scope="sample", last=True):
    x = laid_out(torch.empty(shape, device="meta"), last)
    return tuple(input_rows(x, block_size, scope).shape)


def test_rows_follow_memory():
    assert rows_of(4, 64, 56, 56) == rows_of(4, 64, 56, 56, last=False) == (4, 64 * 56 * 56 // 32, 32)
    assert rows_of(4, 3, 224, 224) == (4, 3 * 224 * 224 // 32, 32)
    assert rows_of(4, 3, 5, 7) == (4, 1, 105)
    assert rows_of(4, 3, 5, 7, scope="token") == (4, 35, 3)
    assert rows_of(4, 3, 5, 7, scope="token", last=False) == (4, 15, 7)
    long = 32 * MAX_COLUMNS + 1
    assert rows_of(2, 3, long, 1) == (2, long, 3)
    assert rows_of(2, 3, long, last=False) == (2, 3, long)


def test_a_view_is_taken_wherever_one_exists():
    for x in (torch.randn(2, 8, 4, 4), laid_out(torch.randn(2, 8, 4, 4), True), torch.randn(2, 9, 5).transpose(1, 2)):
        assert without_gaps(x) is x
        assert input_rows(x, 8, "sample").data_ptr() == x.data_ptr()
