"""SavedTensorCompression: what it packs and how exactly, what it leaves alone, what is shared, counted and refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from lightning_actprune.analysis.first_batch import RetentionProbe
from lightning_actprune.analysis.memory import SavedTensorMeter
from lightning_actprune.codec.pack_cache import StorageKey
from lightning_actprune.config import Keep
from lightning_actprune.convert import convert
from lightning_actprune.operators.regions import layout_of
from lightning_actprune.operators.saved import SavedTensorCompression
from tests.support.compression import (
    DENSE,
    SHAPE,
    STORED,
    Product,
    Runs,
    activation,
    attention,
    gradients,
    made,
    packed,
    read_back,
    typical,
)
from tests.support.marks import in_turn
from tests.support.oracle import half_a_step

BLOCK = 32
BITS = [8, 4, 3, 2]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "q of qkv": lambda x: x.reshape(4, 5, 4, 4, 16).permute(2, 0, 3, 1, 4)[1],
    "every other": lambda x: x[..., ::2],
    "channels_last": lambda x: x.reshape(2, 8, 16, 20).to(memory_format=torch.channels_last),
}


def in_blocks(values: Tensor, x: Tensor) -> Tensor:
    """Return ``values`` in the order of the addresses of ``x``, cut into blocks."""
    order = sorted(range(x.dim()), key=lambda dim: -x.stride(dim))
    return values.detach().permute(order).reshape(-1, BLOCK).double()


@pytest.mark.parametrize(
    ("lay_out", "dtype", "bits"),
    in_turn([*LAYOUTS, *["contiguous"] * 4], DTYPES, BITS),
    ids=str,
)
def test_backward_reads_values_within_half_a_step(lay_out: str, dtype: torch.dtype, bits: int, device: torch.device):
    x = LAYOUTS[lay_out](activation(dtype=dtype, device=device))
    blocks = in_blocks(x, x)
    most = half_a_step(blocks, bits)
    rounding = torch.finfo(dtype).eps * (blocks.abs() + most)
    error = in_blocks(read_back(x, bits), x) - blocks
    assert (error.abs() <= most + rounding).all()
    assert error.abs().max() > most.min() / 2  # it was not exact either


OPERATIONS = {
    "gamma": (lambda x, gamma: x * gamma, (64,)),
    "layer_norm": (lambda x, g, b: F.layer_norm(x, (64,), g, b), (64,), (64,)),
    "linear": (lambda x, w: F.linear(x, w), (48, 64)),
    "bmm": (lambda x, w: torch.bmm(x @ w, x.mT), (64, 64)),
    "conv": (lambda x, w: F.conv2d(x.reshape(4, 8, 10, 16).to(memory_format=torch.channels_last), w), (8, 8, 3, 3)),
    "attention": (attention, (64, 192)),
    "mlp": (lambda x, w: torch.tanh(F.gelu(x @ w)) * x[..., :32], (64, 32)),
}


FLASH, MATH = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH
ON_GPU = FLASH, MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION


def on(device: str, name: str = "attention") -> tuple[nn.Module, Tensor]:
    dtype, shape = (torch.float32, SHAPE) if device == "cpu" else (torch.bfloat16, (4, 256, 64))
    return Runs(*OPERATIONS[name]).to(device, dtype), activation(*shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("name", "backend", "device"),
    [
        *((name, FLASH, "cpu") for name in OPERATIONS),
        ("attention", MATH, "cpu"),
        *(pytest.param("attention", backend, "cuda", marks=pytest.mark.gpu) for backend in ON_GPU),
    ],
)
def test_gradients_are_close_and_the_output_exact(name: str, backend: SDPBackend, device: str):
    """Of the size of the step: no gradient depends on more than three quantized tensors."""
    model, x = on(device, name)
    rounding = 0 if device == "cpu" else 4 * torch.finfo(x.dtype).eps
    with sdpa_kernel(backend if device == "cuda" else [backend, MATH]):
        expected, y = gradients(model, x, lambda y: y.float().square().sum()), model(x)
        for bits in (8, 4):
            with SavedTensorCompression(model, Keep(bits=bits), min_values=256) as saving:
                made = gradients(model, x, lambda y: y.float().square().sum())
                torch.testing.assert_close(model(x), y, rtol=0, atol=0)
            assert saving.rows
            if name == "attention" and backend != MATH:  # keeps q, k, v and its result
                assert sum(row.count for row in saving.rows if row.shape == (4, 4, x.shape[1], 16)) == 8
            for gradient, exact in zip(made, expected, strict=True):
                assert (gradient - exact).norm() <= (3 * typical(bits) + rounding) * exact.norm()


def test_gradients_of_inputs_are_exact_where_they_need_weights_alone():
    """With masks, scales, parts and views of the weight, none of which is a parameter."""

    def run(x: Tensor, w: Tensor) -> Tensor:
        x = F.linear(x, w)
        x = x @ w.view(2, 32, 64)[1].mT.contiguous() @ w[:32] + x @ w.chunk(2)[0].to(x.dtype).t() @ w[32:]
        x = F.linear(x, w * (w > 0))
        return F.linear(x, w / w.norm(dim=1, keepdim=True)) @ w.t().contiguous()

    model, x = Runs(run, (64, 64)), activation()
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected = gradients(model, x)
            with SavedTensorCompression(model, Keep(bits=2), min_values=1) as saving:
                made = gradients(model, x)
        torch.testing.assert_close(made[0], expected[0], rtol=0, atol=0)
        assert {row.shape for row in saving.rows} <= {(80, 64), (80, 32), SHAPE}
        assert not torch.equal(made[1], expected[1])


ONES = torch.ones(64, requires_grad=True)
LEFT: dict[str, Any] = {
    "softmax": lambda x: x.softmax(-1),
    "loss": lambda x: F.cross_entropy(x.flatten(0, 1), torch.arange(80) % 64),
    "relu": lambda x: x.relu(),
    "exp": lambda x: x.exp(),
    "dropout": lambda x: F.dropout(x, 0.5, True),
    "detached": lambda x: x.detach() * ONES,
    "expanded": lambda x: x[:1].expand(SHAPE) * ONES,
    "one value a row": lambda x: x.mean(-1, keepdim=True) * ONES,
    "double": lambda x: x.double().square(),
    "complex": lambda x: torch.view_as_complex(x.view(4, 20, 32, 2)).square(),
    "sparse": lambda x: torch.sparse.mm(x[0].detach().to_sparse(), ONES.view(64, 1)),
    "leaf": lambda x: ONES.square(),
    "view of a leaf": lambda x: ONES.view(8, 8).square(),
    "nested": lambda x: torch.nested.nested_tensor([x[0].detach(), x[1].detach()], requires_grad=True).sin(),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_what_does_not_qualify_is_left_alone():
    for name, operation in LEFT.items():
        saved = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.dtype), lambda t: t)  # noqa: B023
        model = Runs(operation)
        with SavedTensorCompression(model, min_values=1) as saving, hooks:
            model(activation())
        assert saving.rows == [], name
        assert torch.uint8 not in saved, name


def test_few_values_and_no_gradient():
    model, x = Product(), activation()
    for values, recorded, count in ((x.numel(), True, 1), (x.numel() + 1, True, 0), (1, False, 0)):
        with SavedTensorCompression(model, min_values=values) as saving, torch.set_grad_enabled(recorded):
            model(x, torch.ones(64, requires_grad=True))
        assert len(saving.rows) == count


def test_views_of_one_region_are_packed_once_and_counted_once():
    def run(x: Tensor, w: Tensor) -> Tensor:
        return x * w + x.flatten(0, 1).mul(w).view_as(x) + x.mT.contiguous().mT * w + (x.mT * w[:, None]).mT

    model, x = Runs(run, (64,)), activation()
    expected = gradients(model, x)
    with SavedTensorCompression(model, min_values=256) as saving:
        made = gradients(model, x)
    assert sum(row.count for row in saving.rows) == 2  # the third is a copy
    stored = x.numel() // BLOCK * (BLOCK + 2)
    assert [(r.dense_bytes, r.stored_bytes) for r in saving.rows] == [(2 * x.nbytes, 2 * stored)]
    assert (made[1] - expected[1]).norm() <= typical(8) * expected[1].norm()


def test_another_version_region_or_type_is_packed_for_itself():
    def run(x: Tensor) -> Tensor:
        x = x.clone()
        y = (x * ONES).square()
        if saving.rows:
            x.mul_(2)  # also x[:2], a part of the same storage
        return y.sum() + (x * ONES).sum() + (x[:2] * ONES).sum()

    model = Runs(run)
    with SavedTensorCompression(model, min_values=256) as saving:
        model(activation())
        before = packed(saving)
        model(activation())
    assert packed(saving) - before == 4  # with the product


def test_a_pack_lives_as_long_as_its_graph():
    model, x, probe = Product(), activation(), torch.ones(SHAPE, requires_grad=True)
    with SavedTensorCompression(model, min_values=256) as saving:
        first, second = model(x, probe), model(x, probe)  # two forwards before backward
        assert [row.count for row in saving.rows] == [1]
        first.sum().backward(retain_graph=True, inputs=[probe])
        first.sum().backward(inputs=[probe])
        second.sum().backward(inputs=[probe])
        torch.testing.assert_close(probe.grad, 3 * x.detach(), rtol=0, atol=0.1)
        assert not saving._packed._storages
        model(x, probe)
        assert [row.count for row in saving.rows] == [2]
    saving.reset()
    assert saving.rows == []


def test_what_something_retains_as_it_is_stays_so():
    """ReLU and softmax keep their results, which the next layer would keep too."""
    for first in (torch.relu, lambda x: x.softmax(-1)):
        model = Runs(lambda x, w: F.linear(first(x), w), (48, 64))  # noqa: B023
        with SavedTensorCompression(model, min_values=256) as saving:
            y = model(activation())
            assert (80, 64) not in {row.shape for row in saving.rows}
        y.sum().backward()
        assert not saving._uncompressed._storages


@pytest.mark.parametrize("stays", ["packed", "waiting", "a result"])
def test_a_tensor_written_to_after_it_was_saved_is_right_or_an_error(stays: str):
    """An error while it waits for its operation to be known, and of results, which stay uncompressed."""
    probe, before, forwards = torch.ones(SHAPE, requires_grad=True), [], range(3)

    def run(x: Tensor) -> Tensor:
        kept = x.softmax(-1) if stays == "a result" else x.clone()
        loss = (kept * probe).square().sum() if stays == "packed" else (kept * probe).sum()
        before.append(kept.detach().clone())
        with torch.no_grad():
            kept.zero_()
        return loss

    model = Runs(run)
    with SavedTensorCompression(model, min_values=256):
        losses = [model(activation()) for _ in forwards]
    for forward in forwards:
        if stays == "packed" and forward:
            probe.grad = None
            losses[forward].backward()
            torch.testing.assert_close(probe.grad, 2 * before[forward].square(), rtol=0, atol=0.3)
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                losses[forward].backward()


class Rows(nn.Module):
    """Multiply by rows of the argument or of a parameter, which ``write`` may write to, or to their numbers."""

    def __init__(self, of: str, write: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.head, self.of, self.write = nn.Parameter(torch.randn(64, 32)), nn.Linear(32, 32), of, write

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        rows = (x if self.of == "argument" else self.weight)[numbers]
        self.write(rows, numbers)
        return rows * self.head(x[:1])


@pytest.mark.parametrize("of", ["argument", "parameter"])
@pytest.mark.parametrize("what", ["nothing", "rows", "numbers"])
def test_rows_that_are_written_to_are_not_selected_again(of: str, what: str):
    writes = {"rows": lambda rows, _: rows.detach().mul_(3), "numbers": lambda _, numbers: numbers.zero_()}
    model, x, found = Rows(of, writes.get(what, lambda *_: None)), torch.randn(64, 32, requires_grad=True), []
    for keep in (None, Keep(bits=8)):
        with nullcontext() if keep is None else SavedTensorCompression(model, keep, min_values=64):
            y = model(x * 1.0, torch.arange(64).repeat(2))
        found += torch.autograd.grad(y.square().sum(), model.head.weight)  # passes no selection
    assert (found[1] - found[0]).norm() < 0.02 * found[0].norm()


def test_what_readers_of_different_bits_save_is_stored_once_with_the_most_bits():
    """From the second forward on, where the one that takes fewer comes first."""
    for run, stored in ((lambda x, g: x * g + x.square(), [2, 1, 1]), (lambda x, g: x.square() + x * g, [1] * 3)):
        model, x = Runs(run, (64,)), activation()
        expected = gradients(model, x)
        with SavedTensorCompression(model, min_values=256, parameter_bits=4) as saving:
            for count in stored:
                before, nbytes = packed(saving), sum(row.stored_bytes for row in saving.rows)
                found = gradients(model, x)
                assert packed(saving) - before == count
            assert sum(row.stored_bytes for row in saving.rows) - nbytes == STORED
            resumed = SavedTensorCompression(model, min_values=256, parameter_bits=4)
            resumed.decisions.load_state_dict(saving.decisions.state_dict())
        with resumed:
            torch.testing.assert_close(gradients(model, x), found, rtol=0, atol=0)
        for gradient, exact in zip(found, expected, strict=True):
            assert (gradient - exact).norm() <= typical(8) * exact.norm()


def test_function_modes_do_not_see_packing():
    class Names(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    model, x, names = Runs(lambda x, g: (x * g).square() + x, (64,)), activation(), list[str]()
    with SavedTensorCompression(model, min_values=256) as saving:
        for _ in range(4):  # outliers are looked for in three of them
            with Names():
                model(x)
    assert packed(saving) > 0
    assert names == 4 * ["mul", "square", "add"]


def test_a_meter_counts_what_is_kept():
    model, x = made(), activation().detach()
    totals = []
    for saving in (nullcontext(), SavedTensorCompression(model, min_values=256)):
        with saving, SavedTensorMeter(model, x) as meter:
            model(x.clone().requires_grad_() * 1)
        totals.append(meter.report().stored_bytes)
    dense_bytes = sum(row.dense_bytes for row in saving.rows)
    stored_bytes = sum(row.stored_bytes for row in saving.rows)
    # The inputs of the norm, of the GELU and of the first layer; that of the second is kept by the ReLU.
    assert (dense_bytes, stored_bytes) == (3 * DENSE, 3 * STORED)
    assert totals[0] - totals[1] == dense_bytes - stored_bytes


def test_a_probe_sees_that_a_compressed_layer_shares_its_input_with_nothing_dense():
    """The norm keeps the same tensor, quantized: compressing the layer is worth it."""

    model = Runs(lambda x, w: (lambda y: model.layer(y) + F.layer_norm(y, (64,), w))(x.sin()), (64,))
    model.layer = nn.Linear(64, 64)
    assert len(convert(model, sparsity=0.6).converted) == 1
    for saving, retained in ((nullcontext(), ["layer"]), (SavedTensorCompression(model, min_values=256), [])):
        with saving, RetentionProbe(model) as probe:
            model(activation()).sum().backward()
        assert [skipped.fqn for skipped in probe.retained] == retained


def test_a_meter_credits_what_waits_to_the_module_that_saved_it():
    """Query, key and value of an attention wait until its projection is called, which keeps an input of its own."""

    def run(x: Tensor) -> Tensor:
        return block.proj(F.scaled_dot_product_attention(*block.qkv(x).unsqueeze(1).chunk(3, -1)).squeeze(1))

    block, x = Runs(run), activation()
    block.qkv, block.proj, model = nn.Linear(64, 192), nn.Linear(64, 64), nn.Sequential(block)
    convert(model, rules={"type:linear": Keep(bits=2, min_rows_for_low_bits=0), "*": None})
    for meter in (nullcontext(), SavedTensorMeter(model)):
        with SavedTensorCompression(model, min_values=256) as saving, meter:
            model(x)
        assert sum(row.stored_bytes for row in saving.rows) == 4 * STORED
    assert [(row.fqn, row.stored_bytes) for row in meter.report().rows] == [
        ("0.qkv", 80 * 2 * (8 + 2)),
        ("0.proj", 80 * 2 * (8 + 2)),
    ]


def test_compressed_layers_share_their_input_in_a_scope_too():
    model = Runs(lambda x: sum(layer(x) for layer in layers))
    layers = model.layers = nn.ModuleList(nn.Linear(64, 48) for _ in range(3))
    convert(model, sparsity=0.6)
    totals = []
    for saving in (SavedTensorCompression(nn.Linear(1, 1)), SavedTensorCompression(model, min_values=256)):
        with saving, SavedTensorMeter(model) as meter:
            model(activation())
        totals.append(meter.report().stored_bytes)
        assert saving.rows == []
    assert totals[0] == totals[1] < DENSE


def test_hooks_around_get_packed_values_once_and_all_else_as_it_is():
    model, x, sizes = Runs(lambda x, w: (x * w + x * w).relu(), (64,)), activation(), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: (t.clone(), sizes.append(t.nbytes))[0], lambda t: t)
    with SavedTensorCompression(model, min_values=256) as saving:
        expected = gradients(model, x)
        with hooks:
            torch.testing.assert_close(gradients(model, x), expected, rtol=0, atol=0)
        assert packed(saving) == 2
    assert sorted(sizes) == [256, 256, STORED, DENSE]


def test_masks_that_hooks_around_move_are_not_held():
    class Masks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = x > 0
            y, storage = x.masked_fill(mask, 0.0), StorageKey(mask.untyped_storage())
            del mask
            assert storage.expired()
            return y * y

    model, moves = Masks(), torch.autograd.graph.saved_tensors_hooks(torch.zeros_like, lambda moved: moved)
    with moves, SavedTensorCompression(model, min_values=64):
        model(torch.randn(64, 64, requires_grad=True) * 1.0)


def test_under_autocast_the_copies_that_layers_keep_are_packed_and_those_of_weights_are_not():
    model, x, dtype = made(), activation(), torch.bfloat16
    with torch.autocast("cpu", dtype):
        expected = gradients(model, x)
        with SavedTensorCompression(model, min_values=256) as saving:
            made_gradients = gradients(model, x)
    assert {(row.fqn, row.dtype) for row in saving.rows} >= {("0", torch.float32), ("2", dtype)}
    assert all(row.shape not in {(64, 48), (48, 64)} for row in saving.rows)
    for gradient, exact in zip(made_gradients, expected, strict=True):
        most = 3 * typical(8) + 4 * torch.finfo(dtype).eps
        assert (gradient - exact).norm() <= most * exact.norm()


@pytest.mark.gpu
def test_the_allocator_sees_what_is_counted():
    """What no row counts is the same with and without: the sum, logsumexp, the random state."""
    model, x = on("cuda")

    def left_allocated(saving: SavedTensorCompression | None) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        y = model(x * 1).sum()  # which keeps nothing of what it sums up
        torch.cuda.synchronize()
        grown = torch.cuda.memory_stats()["requested_bytes.all.current"] - before
        del y
        return grown

    with sdpa_kernel(FLASH):
        left_allocated(None)
        dense = left_allocated(None)
        with SavedTensorCompression(model) as saving:
            left_allocated(saving)
            saving.reset()
            packed = left_allocated(saving)
    dense_bytes = sum(row.dense_bytes for row in saving.rows)
    assert dense_bytes == 5 * x.nbytes  # x, q, k and v, and the result
    assert dense - packed == dense_bytes - sum(row.stored_bytes for row in saving.rows)


@pytest.mark.gpu
def test_backward_on_another_thread_and_with_values_moved_to_the_host():
    model, x = on("cuda")
    with SavedTensorCompression(model, min_values=256):
        expected = gradients(model, x)
        with save_on_cpu(pin_memory=True):
            actual = gradients(model, x)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# Regions of memory: tensors of any layout are read in the order of their addresses, and nothing is lost.


def numbers(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


WITHOUT_GAPS = {
    "contiguous": numbers(4, 6, 16),
    "odd": numbers(7, 11, 13),
    "transposed": numbers(4, 6, 16).transpose(1, 2),
    "channels_last": numbers(2, 8, 9, 10).to(memory_format=torch.channels_last),
    "one image": numbers(1, 8, 16, 16).to(memory_format=torch.channels_last),
    "one dimension": numbers(512),
    "offset": numbers(6, 128)[2:],
}
PARTS = {
    "q of qkv": numbers(2, 12, 3, 4, 16).permute(2, 0, 3, 1, 4)[1],
    "chunk": numbers(4, 6, 96).chunk(3, -1)[2],
    "short rows": numbers(4, 20, 40)[..., 3:11],
    "three dimensions": numbers(6, 8, 48)[:, 1:5, 8:40],
}
COPIED = {
    "every other": numbers(16, 64)[:, ::2],
    "four dimensions": numbers(6, 5, 7, 48)[:, :3, :2, :32],
    "tiny rows": numbers(64, 20)[:, :5],
    "rows that blocks would not fill": numbers(64, 20)[:, :9],
}
ALL = WITHOUT_GAPS | PARTS | COPIED


def restored(x: Tensor) -> Tensor:
    """Read ``x`` as a kernel does, and lay out what was read."""
    layout = layout_of(x.shape, x.stride(), 8)
    assert layout is not None
    if layout.copied:
        sizes, strides = zip(*layout.region, strict=True)
        source = x.as_strided(sizes, strides).contiguous().view(-1)
        read = source.as_strided(layout.shape, layout.strides)
    else:
        read = x.as_strided(layout.shape, layout.strides)
    assert layout.strides[-1] == 1
    return read.reshape(-1).as_strided(x.shape, layout.dense_strides)


@pytest.mark.parametrize("name", ALL)
def test_nothing_is_lost_or_moved(name: str):
    """Tensors without gaps are one region, parts are read where they are, and only the rest is copied."""
    x = ALL[name]
    torch.testing.assert_close(restored(x), x, rtol=0, atol=0)
    layout = layout_of(x.shape, x.stride(), 8)
    assert layout.copied == (name in COPIED)
    if name in WITHOUT_GAPS:
        assert layout.dense_strides == x.stride()
        assert layout.region == ((x.numel(), 1),)
    samples, rows, length = layout.shape
    assert samples * rows * length == x.numel()
    # Blocks are full but for a sixteenth.
    assert samples * rows * -(-length // layout.block) * layout.block <= x.numel() * 17 / 16


def test_what_has_no_sensible_rows_is_left():
    expanded, overlapping, prime = (
        torch.ones(8, 1).expand(8, 64),
        torch.arange(600.0).unfold(0, 16, 4),
        torch.ones(1299709),
    )
    for x in (expanded, overlapping, prime, torch.ones(0, 16), torch.ones(()), torch.ones(3)):
        assert layout_of(x.shape, x.stride(), 8) is None


def test_a_factor_that_products_alone_save_is_no_step_even_if_nothing_waited_for_one_of_them():
    """A part of a projection weighs an activation, another part is used before: a state space model does that."""

    def run(x: Tensor, weight: Tensor) -> Tensor:
        projected = x.mean(1) @ weight  # [samples, 1 + features]
        first = projected[:, :1] * projected[:, 1:2]
        return torch.bmm(x.sin(), projected[:, 1:, None]) + first[:, :, None]

    model = Runs(run, (64, 65))
    with SavedTensorCompression(model, min_values=512) as compression:
        model(activation(*SHAPE))
    assert [row.shape for row in compression.rows] == [SHAPE]
    assert "difference of sums" not in str(compression.left)
