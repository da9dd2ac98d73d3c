"""The pruned linear function against an fp64 oracle, on every backend."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_actprune import functional
from lightning_actprune.ops.geometry import BlockGeometry, input_geometry
from lightning_actprune.ops.weight_grad import force_method
from tests import oracle

METHODS = ["gather", "unpack"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def setup(device, *shape, outputs=24, dtype=torch.float32):
    x = torch.randn(*shape, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(outputs, shape[-1], dtype=dtype, device=device, requires_grad=True)
    bias = torch.randn(outputs, dtype=dtype, device=device, requires_grad=True)
    return x, weight, bias


def masked_input(x, sparsity, block_size, scope="sample"):
    """The pruned input as a kernel-independent tensor: packing was compared with the oracle elsewhere."""
    p = functional.pack(x.detach(), sparsity=sparsity, block_size=block_size, scope=scope)
    return p.unpack().reshape(x.shape)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("shape", "block_size", "outputs"),
    [
        ((3, 37, 70), 16, 24),
        ((2, 130, 96), 32, 33),
        ((300, 64), 64, 16),
        ((2, 3, 5, 40), 7, 1),
        ((3, 50, 130), 128, 48),
        ((20,), 8, 5),
    ],
    ids=str,
)
def test_gradients_within_twice_torchs_own_error(device, method, dtype, shape, block_size, outputs):
    x, weight, bias = setup(device, *shape, outputs=outputs, dtype=dtype)
    with force_method(method):
        y = functional.linear(x, weight, bias, sparsity=0.5, block_size=block_size)
        grad_y = torch.randn_like(y)
        grads = torch.autograd.grad(y, (x, weight, bias), grad_y)
    assert torch.equal(y, F.linear(x, weight, bias))
    dense_grads = torch.autograd.grad(F.linear(x, weight, bias), (x, bias), grad_y)
    assert torch.equal(grads[0], dense_grads[0])
    g, hat = grad_y.reshape(-1, outputs), masked_input(x, 0.5, block_size).reshape(-1, shape[-1])
    exact, torchs = g.double().t() @ hat.double(), g.t() @ hat
    floor = 4 * torch.finfo(dtype).eps
    assert oracle.relative_error(grads[1], exact) <= 2 * oracle.relative_error(torchs, exact) + floor
    assert (
        oracle.relative_error(grads[2], g.double().sum(0))
        <= 2 * oracle.relative_error(g.sum(0), g.double().sum(0)) + floor
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scope", ["sample", "token"])
@pytest.mark.parametrize(
    ("block_size", "along"),
    [(11, "tokens"), (8, "features"), (1, "features")],  # 20 rows of 33 against 33 of 22; 20 of 40, 33 of 24; a tie
)
def test_transposed_view_is_pruned_along_what_blocks_fill_up_better(device, block_size, along, scope, method):
    """A contiguous [B, D, T] tensor enters a linear layer over D as [B, T, D], as in ResMLP's token mixing."""
    x = oracle.integers(3, 20, 33, device=device).transpose(1, 2).requires_grad_()
    weight = torch.randn(9, 20, device=device, requires_grad=True)
    with force_method(method):
        y = functional.linear(x, weight, sparsity=0.5, block_size=block_size, scope=scope)
        grad_y = torch.randn_like(y)
        grads = torch.autograd.grad(y, (x, weight), grad_y)
    rows = x.detach() if along == "features" else x.detach().transpose(1, 2)
    hat = oracle.pruned(oracle.as_samples(rows, scope), block_size, 0.5).reshape(rows.shape)
    hat = hat if along == "features" else hat.transpose(1, 2)
    expected = torch.einsum("bto,btd->od", grad_y.double(), hat.double())
    assert torch.equal(y, F.linear(x, weight))
    assert oracle.relative_error(grads[0], grad_y.double() @ weight.detach().double()) < 1e-6
    assert oracle.relative_error(grads[1], expected) < 1e-6


@pytest.mark.parametrize(("block_size", "along"), [(7, "tokens"), (4, "features")])
def test_four_dimensional_channels_first_view(device, block_size, along):
    stored = oracle.integers(2, 12, 5, 7, device=device)
    weight = torch.randn(6, 12, device=device, requires_grad=True)
    y = functional.linear(stored.permute(0, 2, 3, 1), weight, sparsity=0.5, block_size=block_size)
    grad_y = torch.randn_like(y)
    (grad,) = torch.autograd.grad(y, weight, grad_y)
    rows = stored.flatten(2) if along == "tokens" else stored.flatten(2).transpose(1, 2)
    hat = oracle.pruned(rows, block_size, 0.5)
    hat = hat.transpose(1, 2) if along == "tokens" else hat
    expected = torch.einsum("bto,btd->od", grad_y.flatten(1, 2).double(), hat.double())
    assert oracle.relative_error(grad, expected) < 1e-6


class CountCopies(TorchDispatchMode):
    """Counts the operations that write as many values as ``like`` has, and the products."""

    def __init__(self, like):
        super().__init__()
        self.like, self.names = like.numel(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        copied = name in ("clone", "copy_", "_to_copy", "contiguous") and args[0].numel() == self.like
        if copied or name in ("mm", "addmm", "bmm"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("block_size", [11, 8], ids=["tokens", "features"])
def test_forward_copies_a_transposed_input_once_for_one_product(block_size, autocast):
    x = torch.randn(3, 20, 33).transpose(1, 2)
    weight, bias = torch.randn(9, 20, requires_grad=True), torch.randn(9, requires_grad=True)
    with CountCopies(x) as counted, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        functional.linear(x, weight, bias, sparsity=0.5, block_size=block_size)
    # Along the tokens the cast keeps the layout, as packing needs it, and the product its own copy.
    copies = ["_to_copy", "clone"] if block_size == 11 else ["_to_copy"]
    assert counted.names == [*(copies if autocast else ["clone"]), "addmm"]


def test_zero_sparsity_is_the_dense_layer(device):
    x, weight, bias = setup(device, 3, 5, 32)
    pruned, dense = functional.linear(x, weight, bias, sparsity=0.0), F.linear(x, weight, bias)
    grad_y = torch.randn_like(dense)
    for a, b in zip(*(torch.autograd.grad(y, (x, weight, bias), grad_y) for y in (pruned, dense)), strict=True):
        assert torch.equal(a, b)


def test_empty_batch(device):
    x, weight, bias = setup(device, 0, 5, 32)
    y = functional.linear(x, weight, bias, sparsity=0.5, block_size=8)
    y.sum().backward()
    assert y.shape == (0, 5, 24)
    assert x.grad.shape == x.shape
    assert not weight.grad.any()
    assert not bias.grad.any()


@pytest.mark.parametrize("shape", [(3, 0), (2, 3, 0)], ids=str)
def test_no_features(device, shape):
    x, weight, bias = setup(device, *shape)
    functional.linear(x, weight, bias, sparsity=0.5, block_size=8).sum().backward()
    assert x.grad.shape == x.shape
    assert weight.grad.shape == (24, 0)
    assert torch.equal(bias.grad, torch.full_like(bias, x.shape[:-1].numel()))


@pytest.mark.parametrize("method", METHODS)
def test_several_gradients_at_once_equal_them_one_by_one(device, method):
    """Vectorised jacobians: ``vmap`` hands the backward tensors without memory of their own."""
    x, weight, bias = setup(device, 3, 40, 32)
    with force_method(method):
        y = functional.linear(x, weight, bias, sparsity=0.5, block_size=16)
        grads = torch.randn(2, *y.shape, device=device)
        together = torch.autograd.grad(y, (x, weight, bias), grads, is_grads_batched=True, retain_graph=True)
        for i in range(2):
            alone = torch.autograd.grad(y, (x, weight, bias), grads[i], retain_graph=True)
            for a, b in zip(together, alone, strict=True):
                assert oracle.relative_error(a[i], b) < 1e-6


def test_non_finite_input_reaches_the_weight_gradient(device):
    x, weight, bias = setup(device, 2, 9, 32)
    with torch.no_grad():
        x[1, 4, 5] = float("inf")
    functional.linear(x, weight, bias, sparsity=0.9, block_size=8).sum().backward()
    assert not torch.isfinite(weight.grad).all()


@pytest.mark.parametrize("method", METHODS)
def test_non_contiguous_and_expanded_output_gradient(device, method):
    x, weight, _ = setup(device, 4, 40, 64)
    hat = masked_input(x, 0.5, 16).flatten(0, 1)
    for grad_y in (
        torch.randn(1, 1, 24, device=device).expand(4, 40, 24),
        torch.randn(24, 40, 4, device=device).permute(2, 1, 0),
    ):
        with force_method(method):
            (grad,) = torch.autograd.grad(functional.linear(x, weight, sparsity=0.5, block_size=16), weight, grad_y)
        assert oracle.relative_error(grad, grad_y.reshape(-1, 24).double().t() @ hat.double()) < 1e-6


def test_several_backward_passes_with_retain_graph(device):
    x, weight, bias = setup(device, 2, 9, 32)
    loss = functional.linear(x, weight, bias, sparsity=0.5, block_size=8).square().sum()
    first = torch.autograd.grad(loss, (x, weight, bias), retain_graph=True)
    second = torch.autograd.grad(loss, (x, weight, bias))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_in_place_change_of_the_input_afterwards_does_not_matter(device):
    """Packing copies: unlike the dense layer, the function does not need its input to stay as it was."""
    x = torch.randn(2, 9, 32, device=device)
    weight = torch.randn(4, 32, device=device, requires_grad=True)
    expected = torch.autograd.grad(functional.linear(x, weight, sparsity=0.5, block_size=8).sum(), weight)[0]
    y = functional.linear(x, weight, sparsity=0.5, block_size=8)
    x.zero_()
    assert torch.equal(torch.autograd.grad(y.sum(), weight)[0], expected)


def test_second_derivative_is_a_clear_error(device):
    x, weight, _ = setup(device, 2, 9, 32)
    y = functional.linear(x, weight, sparsity=0.5, block_size=8)
    with pytest.raises(RuntimeError, match="Second derivatives through a linear layer with pruned activations"):
        torch.autograd.grad(y.square().sum(), (x, weight), create_graph=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_packs_in_compute_dtype_and_returns_parameter_dtype(device, dtype):
    x, weight, bias = setup(device, 2, 40, 64)
    if device.type == "cpu":
        x.data = x.detach().to(dtype).float()  # Triton's interpreter cuts fp32 off to bf16 where a GPU rounds
    saved = []
    with (
        torch.autocast(device.type, dtype=dtype),
        torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
    ):
        y = functional.linear(x, weight, bias, sparsity=0.5, block_size=16)
        dense = F.linear(x, weight, bias)
    assert y.dtype == dtype
    assert torch.equal(y, dense)
    y.float().square().sum().backward()
    assert {t.grad.dtype for t in (x, weight, bias)} == {torch.float32}
    assert [t.dtype for t in saved[:4]] == [torch.float32, dtype, torch.int32, torch.int32]
    assert saved[0] is weight or saved[0].data_ptr() == weight.data_ptr()
    exact = (2 * y.double()).reshape(-1, 24).t() @ masked_input(x.detach().to(dtype), 0.5, 16).flatten(0, 1).double()
    assert oracle.relative_error(weight.grad, exact) < 2 * torch.finfo(dtype).eps


def test_fp64_on_the_reference():
    x, weight, bias = setup("cpu", 3, 7, 40, dtype=torch.float64)
    y = functional.linear(x, weight, bias, sparsity=0.5, block_size=16)
    grad_y = torch.randn_like(y)
    grads = torch.autograd.grad(y, (x, weight, bias), grad_y)
    expected = grad_y.flatten(0, 1).t() @ oracle.pruned(x.detach(), 16, 0.5).flatten(0, 1)
    torch.testing.assert_close(grads[1], expected, rtol=1e-12, atol=1e-12)


def test_exact_gradients_pass_gradcheck():
    x, weight, bias = setup("cpu", 2, 3, 8, outputs=4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x, b: functional.linear(x, weight, b, sparsity=0.5, block_size=4), (x, bias))


def test_saved_bytes_are_what_the_formula_says(device):
    x, weight, bias = setup(device, 4, 50, 72)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        functional.linear(x, weight, bias, sparsity=0.6, block_size=16)
    stored = [t for t in saved if t.data_ptr() != weight.data_ptr()]
    geometry = functional.pack(x, sparsity=0.6, block_size=16).geometry
    assert sum(t.untyped_storage().nbytes() for t in stored) == geometry.stored_bytes(4)


@pytest.mark.parametrize(("block_size", "samples"), [(11, (3, 20, 33)), (8, (3, 33, 20))], ids=["tokens", "features"])
def test_saved_bytes_of_a_transposed_view(device, block_size, samples):
    x = torch.randn(3, 20, 33, device=device).transpose(1, 2)
    weight, saved = torch.randn(9, 20, device=device, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        functional.linear(x, weight, sparsity=0.6, block_size=block_size)
    expected = BlockGeometry.of(*samples, block_size, 0.6).stored_bytes(4)
    assert input_geometry(x, block_size, 0.6, "sample").stored_bytes(4) == expected
    assert sum(t.untyped_storage().nbytes() for t in saved) == expected


def test_second_derivative_of_a_loss_linear_in_the_output_is_an_error_too():
    """Its output gradient is constant; asked for the input alone, autograd would run nothing of ours afterwards."""
    x, weight, bias = setup("cpu", 2, 9, 32)
    y = functional.linear(x, weight, bias, sparsity=0.5, block_size=8)
    with pytest.raises(RuntimeError, match="Second derivatives"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_mixed_types_without_autocast_are_an_error_as_in_the_dense_layer(x_dtype, weight_dtype):
    x, weight = torch.randn(2, 3, 32, dtype=x_dtype), torch.randn(4, 32, dtype=weight_dtype, requires_grad=True)
    for sparsity in (0.0, 0.5):
        with pytest.raises(RuntimeError, match="dtype"):
            functional.linear(x, weight, sparsity=sparsity, block_size=8)


def test_weight_may_change_in_place_where_the_input_needs_no_gradient():
    weight = torch.randn(4, 32, requires_grad=True)
    y = functional.linear(torch.randn(2, 3, 32), weight, sparsity=0.5, block_size=8)
    with torch.no_grad():
        weight.mul_(2)
    y.sum().backward()
    assert weight.grad.shape == weight.shape


@pytest.mark.gpu
def test_unaligned_tensors_on_the_gpu():
    """Compiled kernels rely on 16-byte alignment only where the tensors have it."""
    device = torch.device("cuda")
    flat = torch.randn(4 * 40 * 64 + 1, device=device, dtype=torch.bfloat16)
    weight = torch.randn(24, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad_flat = torch.randn(4 * 40 * 24 + 1, device=device, dtype=torch.bfloat16)

    def shifted(tensor):
        return torch.cat([tensor.flatten(), tensor.flatten()[:1]]).roll(1)[1:].view(tensor.shape)

    for offset in (0, 1):
        x, grad_y = flat[offset:][: 4 * 40 * 64].view(4, 40, 64), grad_flat[offset:][: 4 * 40 * 24].view(4, 40, 24)
        hat = masked_input(x, 0.5, 16).flatten(0, 1).double()
        for method in METHODS:
            with (
                force_method(method),
                torch.autograd.graph.saved_tensors_hooks(lambda t: t, shifted if offset else id_),
            ):
                y = functional.linear(x, weight, sparsity=0.5, block_size=16)
                (grad,) = torch.autograd.grad(y, weight, grad_y)
            assert oracle.relative_error(grad, grad_y.flatten(0, 1).double().t() @ hat) < 1e-2


def id_(tensor):
    return tensor
