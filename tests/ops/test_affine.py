"""The pruned affine layer against an fp64 oracle, on every backend."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing

from lightning_actprune import functional
from lightning_actprune.ops.affine import pruned_affine
from lightning_actprune.ops.geometry import BlockGeometry, sparsity_parts
from lightning_actprune.ops.setting import BlockSetting
from tests.affine import BLOCK, FEATURES, SPARSITY, factors_gradient, pruned
from tests.attention import saved_tensors
from tests.kernels.workload import launches
from tests.oracle import integers, relative_error

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
biased = pytest.mark.parametrize("biased", [True, False], ids=["affine", "layer scale"])


SHAPES = [(3, 5, FEATURES), (FEATURES,), (7, 33), (2, 3, 4, 96), (4, 9, 7), (2, 3, 1)]


def rounded(device, dtype):
    """Return by how much an exact gradient may be off: the interpreter rounds to bf16 in a way of its own."""
    return {"rtol": torch.finfo(dtype).eps if dtype == torch.bfloat16 and device.type == "cpu" else 0, "atol": 0}


def scale(x, weight, bias=None, sparsity=SPARSITY, block_size=BLOCK, scope="sample", **how):
    blocks = BlockSetting.checked(block_size, scope, how.get("value_format", "same"), how.get("selection", "largest"))
    return pruned_affine(x, weight, bias, sparsity_parts(sparsity), blocks)


def dense(x, weight, bias):
    return x * weight if bias is None else torch.addcmul(bias, weight, x)


def made(device="cpu", dtype=torch.float32, biased=True, shape=(3, 5, FEATURES)):
    """Return an input, factors and numbers to add."""
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    weight, bias = (torch.randn(shape[-1], device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    return x, weight, bias if biased else None


def gradients(y, leaves, grad_y):
    return torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], grad_y)


@biased
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_only_the_gradient_of_the_factors_is_approximate(device, shape, dtype, biased):
    leaves = x, *_ = made(device, dtype, biased, shape)
    y, right = scale(*leaves), dense(*leaves)
    grad_y = torch.randn_like(right)
    (dx, dw, *db), exact = gradients(y, leaves, grad_y), gradients(right, leaves, grad_y)
    assert torch.equal(y, right)
    torch.testing.assert_close(dx, exact[0], **rounded(device, dtype))
    assert [g.dtype for g in (dx, dw, *db)] == [dtype] * (2 + biased)
    # Rows are added in fp32 in any order, each product rounded once, and the sum to the type of the parameter.
    rows, eps = x.numel() // shape[-1], torch.finfo(dtype).eps
    near = {"rtol": eps, "atol": 4 * rows * torch.finfo(torch.float32).eps * 8}  # of products up to 8
    hat = pruned(x)
    torch.testing.assert_close(dw.double(), factors_gradient(hat.cpu(), grad_y.cpu()).to(device), **near)
    if biased:
        torch.testing.assert_close(db[0].double(), grad_y.double().reshape(rows, -1).sum(0), **near)


@pytest.mark.parametrize("scope", ["sample", "token"])
@pytest.mark.parametrize(
    ("sparsity", "value_format", "selection"),
    [
        (0.5, "int8", "largest"),
        (0.3, "fp8", "largest"),
        (0.5, "int4", "swap"),
        (0.5, "int2", "unbiased"),
        (0.9, "int3", "largest"),
    ],
)
def test_formats_and_selections_are_those_of_a_packed_input(device, sparsity, value_format, selection, scope):
    leaves = x, *_ = made(device)
    y = scale(*leaves, sparsity=sparsity, scope=scope, value_format=value_format, selection=selection)
    grad_y = torch.randn_like(y)
    dw = gradients(y, leaves, grad_y)[1]
    options = {"sparsity": sparsity, "block_size": BLOCK, "scope": scope}
    options |= {"value_format": value_format, "block_selection": selection}
    hat = functional.pack(x.detach(), **options).unpack().view(x.shape)
    assert relative_error(dw, factors_gradient(hat, grad_y)) < 1e-5


@biased
@pytest.mark.parametrize(
    "types", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
def test_autocast_packs_the_input_as_it_is(device, types, biased):
    """Nothing that is multiplied here is cast to 16 bits; ``addcmul`` may be widened."""
    x, weight, bias = made(device, biased=biased)
    x = integers(*x.shape, dtype=types[0], device=device).requires_grad_()
    weight, bias = (None if p is None else p.detach().to(types[1]).requires_grad_() for p in (weight, bias))
    leaves = x, weight, bias
    with torch.autocast(device.type, torch.bfloat16), saved_tensors() as saved:
        y = scale(*leaves)
    with torch.autocast(device.type, torch.bfloat16):
        right = dense(*leaves)
    assert y.dtype == right.dtype == torch.float32
    assert torch.equal(y, right)
    assert saved[0].dtype == types[0]
    grad_y = torch.randn_like(right)
    grads, exact = gradients(y, leaves, grad_y), gradients(right, leaves, grad_y)
    assert [grad.dtype for grad in grads] == [grad.dtype for grad in exact]
    torch.testing.assert_close(grads[0], exact[0], **rounded(device, types[0]))
    hat = pruned(x)
    assert relative_error(grads[1], factors_gradient(hat, grad_y)) < torch.finfo(types[1]).eps + 1e-6


@pytest.mark.parametrize("value_format", ["same", "int4"])
def test_nothing_but_packed_input_and_factors_is_saved(device, value_format):
    x, weight, bias = made(device)
    with saved_tensors() as saved:
        scale(x, weight, bias, value_format=value_format)
    own = [t for t in saved if t.data_ptr() != weight.data_ptr()]
    geometry = BlockGeometry.of(3, 5, FEATURES, BLOCK, SPARSITY)
    assert sum(t.nbytes for t in own) == geometry.stored_bytes(4, value_format)
    assert len(saved) == len(own) + 1
    with saved_tensors() as saved:
        scale(x.detach(), weight, bias)
    assert all(t.data_ptr() != weight.data_ptr() for t in saved)


GAPS = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "half of the features": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "every other feature": lambda x: torch.stack([x, x], -1)[..., 0],
    "every other sample": lambda x: torch.stack([x, x], 1)[:, 0],
    "expanded": lambda x: x[:1].expand_as(x),
    "unaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x),
}


@pytest.mark.parametrize("gaps", GAPS)
def test_inputs_of_any_layout(device, gaps):
    x, weight, bias = made(device)
    given = GAPS[gaps](x.detach()).requires_grad_()
    y, right = scale(given, weight, bias), dense(given, weight, bias)
    assert torch.equal(y, right)
    assert y.stride() == right.stride()
    # A gradient that lies as the output does.
    grad_y = torch.empty_like(right).copy_(torch.randn(right.shape))
    (dx, dw, _), exact = (gradients(out, (given, weight, bias), grad_y) for out in (y, right))
    assert torch.equal(dx, exact[0])
    assert relative_error(dw, factors_gradient(pruned(given.contiguous()), grad_y)) < 1e-5


def test_gradients_of_any_layout(device):
    x, weight, bias = made(device)
    y = scale(x, weight, bias)
    dense_grad = torch.randn_like(y)
    right = gradients(y, (x, weight, bias), dense_grad.clone())
    y = scale(x, weight, bias)
    turned = dense_grad.transpose(0, 2).contiguous().transpose(0, 2)
    for mine, first in zip(gradients(y, (x, weight, bias), turned), right, strict=True):
        assert torch.equal(mine, first)
    found = torch.autograd.grad(scale(x, weight, bias).sum(), (x, weight, bias))  # an expanded one
    torch.testing.assert_close(found[0], weight.detach().expand_as(x))
    torch.testing.assert_close(found[2], torch.full_like(bias, 15))


@pytest.mark.parametrize("frozen", ["x", "bias"])
def test_gradients_beside_which_another_is_not_wanted(device, frozen):
    leaves = dict(zip(("x", "weight", "bias"), made(device), strict=True))
    y = scale(**leaves)
    grad_y = torch.randn_like(y)
    everything = dict(zip(leaves, torch.autograd.grad(y, [*leaves.values()], grad_y), strict=True))
    leaves[frozen].requires_grad_(False)
    rest = [name for name in leaves if name != frozen]
    with launches() as names:
        found = torch.autograd.grad(scale(**leaves), [leaves[name] for name in rest], grad_y)
    for name, grad in zip(rest, found, strict=True):
        assert torch.equal(grad, everything[name])
    assert "unpack_kernel" not in names


def test_parameters_may_have_dimensions_of_their_own(device):
    x, weight, bias = made(device)
    y = scale(x, weight, bias)
    grad_y = torch.randn_like(y)
    right = gradients(y, (x, weight, bias), grad_y)
    wide = [p.detach().view(1, 1, -1).requires_grad_() for p in (weight, bias)]
    spaced = [torch.stack([p.detach()] * 2, 1)[:, 0].requires_grad_() for p in (weight, bias)]
    for others in (wide, spaced):
        for mine, first in zip(gradients(scale(x, *others), (x, *others), grad_y), right, strict=True):
            assert torch.equal(mine.flatten(), first.flatten())


def test_what_reads_one_tensor_packs_it_once(device):
    x, weight, bias = made(device)
    other = torch.randn(FEATURES, device=device, requires_grad=True)
    product = torch.randn(9, FEATURES, device=device, requires_grad=True)
    with saved_tensors() as saved:
        first, second = scale(x, weight, bias), scale(x, other)
        linear = functional.linear(x, product, sparsity=SPARSITY, block_size=BLOCK)
    weights = {t.data_ptr() for t in (weight, other, product)}
    assert len({t.data_ptr() for t in saved} - weights) == 3  # one pack
    grad_y, grad_linear = torch.randn_like(first), torch.randn_like(linear)
    hat = pruned(x)
    (dw,) = torch.autograd.grad(linear, product, grad_linear)
    assert relative_error(dw, grad_linear.flatten(0, 1).t().double() @ hat.flatten(0, 1).double()) < 1e-5
    for y, leaf in ((first, weight), (second, other)):
        (dw,) = torch.autograd.grad(y, leaf, grad_y)
        assert relative_error(dw, factors_gradient(hat, grad_y)) < 1e-5


def test_a_tensor_written_to_is_packed_again(device):
    x, weight, bias = (t.detach() for t in made(device))
    weight.requires_grad_()
    before = x.clone()
    first = scale(x, weight, bias)
    x.mul_(2).sub_(1)
    second = scale(x, weight, bias)
    grad_y = torch.randn_like(first)
    for y, given in ((first, before), (second, x)):
        (dw,) = torch.autograd.grad(y, weight, grad_y)
        assert relative_error(dw, factors_gradient(pruned(given), grad_y)) < 1e-5


@pytest.mark.parametrize("shape", [(0, 5, FEATURES), (3, 0, FEATURES), (3, 5, 0), (0, FEATURES)], ids=str)
@pytest.mark.parametrize("value_format", ["same", "int4"])
def test_empty_inputs(device, shape, value_format):
    leaves = x, weight, bias = made(device, shape=shape)
    y = scale(*leaves, value_format=value_format)
    grads = torch.autograd.grad(y.sum(), leaves)
    assert y.shape == shape
    assert [g.shape for g in grads] == [x.shape, weight.shape, bias.shape]
    assert not any(g.any() for g in grads[1:])


@pytest.mark.parametrize("value_format", ["same", "int4"])
def test_blocks_that_are_not_finite_are_kept(device, value_format):
    x, weight, bias = made(device)
    with torch.no_grad():
        x[0, 3, 1], x[1, 4, 69] = float("nan"), float("inf")
    y = scale(x, weight, bias, sparsity=0.9, value_format=value_format)
    (dw,) = torch.autograd.grad(y, weight, torch.ones_like(y))
    lost = [i for i in range(FEATURES) if not torch.isfinite(dw[i])]
    # In few bits all of a block is lost; the last one of a row has six values.
    assert lost == ([1, 69] if value_format == "same" else [*range(16), *range(64, 70)])


def test_fp64_is_pruned_as_it_is_but_not_quantised():
    leaves = x, *_ = made(dtype=torch.float64)
    y = scale(*leaves)
    dw = gradients(y, leaves, torch.ones_like(y))[1]
    torch.testing.assert_close(dw, factors_gradient(pruned(x), torch.ones_like(y)))
    with pytest.raises(TypeError, match="float64 values cannot be stored as 'int4'"):
        scale(*leaves, value_format="int4")


def test_exact_gradients_are_those_of_finite_differences():
    x, weight, bias = made(dtype=torch.float64, shape=(2, 3, 20))
    frozen = weight.detach()
    assert torch.autograd.gradcheck(lambda x, bias: scale(x, frozen, bias), (x, bias))
    # With a block of dropped values that are zero, so is that of the factors.
    with torch.no_grad():
        x[..., BLOCK:] = 0
    # Half of a sample's six blocks.
    assert torch.autograd.gradcheck(lambda weight: scale(x.detach(), weight, bias, sparsity=0.5), (weight,))


def test_second_derivatives_are_an_error():
    leaves = _, weight, _ = made()
    with pytest.raises(RuntimeError, match=r"Second derivatives through an affine layer .*HINT"):
        torch.autograd.grad(scale(*leaves).square().sum(), weight, create_graph=True)


def test_the_output_may_be_written_to():
    leaves = made()
    y = scale(*leaves)
    right = torch.relu(dense(*leaves))
    assert torch.equal(torch.relu_(y), right)
    torch.testing.assert_close(*(torch.autograd.grad(out.sum(), leaves[2])[0] for out in (y, right)))


@biased
@pytest.mark.parametrize("value_format", ["same", "int4"])
@pytest.mark.parametrize("turned", [False, True], ids=["contiguous", "transposed"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_to_one_graph_with_the_same_results(device, turned, value_format, biased):
    x, weight, bias = made(device, biased=biased)
    x = GAPS["transposed"](x.detach()).requires_grad_() if turned else x
    leaves = x, weight, bias

    def run(x):
        return scale(x, weight, bias, value_format=value_format)

    torch.compiler.reset()  # what other cases have compiled of this code counts towards a limit
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=False)
    eager, traced = run(x), compiled(x)
    grad_y = torch.randn_like(eager)
    assert torch.equal(eager, traced)
    for first, second in zip(*(gradients(y, leaves, grad_y) for y in (eager, traced)), strict=True):
        assert torch.equal(first, second)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_batches_of_all_sizes_compile_once():
    _, weight, bias = made()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend=counter, dynamic=None)
    def run(x):
        return scale(x, weight, bias)

    for batch in (2, 3, 5, 6):
        x = torch.randn(batch, 5, FEATURES, requires_grad=True)
        (grad,) = torch.autograd.grad(run(x).sum(), weight)
        (right,) = torch.autograd.grad(scale(x, weight, bias).sum(), weight)
        torch.testing.assert_close(grad, right)
    assert counter.frame_count == 2  # one size, then any
