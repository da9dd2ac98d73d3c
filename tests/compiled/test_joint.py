"""What the pass over joint graphs makes of models: forward bit for bit, gradients, and bytes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_actprune.codec.blocks import ALL_BLOCKS, sparsity_parts
from lightning_actprune.codec.packed import pack, unpack
from lightning_actprune.compiled.install import CompiledPacking
from lightning_actprune.compiled.marks import Model
from lightning_actprune.operators.norm import Affine
from tests.compiled.support import (
    MODEL,
    Block,
    Marked,
    Result,
    Scheduled,
    mark,
    nbytes,
    planned,
    run,
    step,
    uncached,
    worst_cosine,
)
from tests.support.conversion_models import Calls
from tests.support.marks import only

HALF = sparsity_parts(0.5)
SQUARES = [(4, 3, size, size) for size in (16, 24, 32)]


def transformer() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(Marked(nn.Linear(8, 64), None), Block()), torch.randn(4, 16, 8)


def mlp() -> tuple[nn.Module, Tensor]:
    layers = [
        Marked(nn.Linear(32, 64), mark("linear", 4)),
        Marked(nn.LayerNorm(64), mark("norm", 4)),
        Marked(nn.Linear(64, 96), mark("linear", 4)),
        Marked(nn.GELU(), mark("activation", 4)),
        Marked(nn.Linear(96, 8), mark("linear", 4)),
    ]
    return nn.Sequential(*layers), torch.randn(64, 32)


def convolutions(channels: int = 16) -> tuple[nn.Module, Tensor]:
    layers = [
        Marked(nn.Conv2d(3, channels, 3, padding=1, bias=False), mark("convolution", 4)),
        Marked(nn.BatchNorm2d(channels), mark("norm", 4)),
        nn.ReLU(),
        nn.MaxPool2d(2),
        Marked(nn.Conv2d(channels, 32, 3, padding=1, bias=False), mark("convolution", 4)),
        Marked(nn.BatchNorm2d(32), mark("norm", 4)),
        nn.ReLU(),
        Marked(nn.Conv2d(32, 16, 3, padding=1), mark("convolution", 4)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ]
    return nn.Sequential(*layers), torch.randn(4, 3, 16, 16)


def pair(model: nn.Module, x: Tensor, **options: object) -> tuple[Result, Result]:
    """Return what a dense step gives and one that packs, whose outputs are equal."""
    dense, found = step(model, x, packs=False, **options), step(model, x, **options)
    assert torch.equal(found.output.nan_to_num(), dense.output.nan_to_num())
    assert torch.equal(found.output.isnan(), dense.output.isnan())
    return dense, found


def recounted(rows) -> int:
    return sum(row.stored_bytes for row in rows)


@pytest.mark.parametrize(
    ("make", "autocast"),
    only([(transformer, True), (mlp, False), (convolutions, True)], (convolutions, True), rest="integration"),
)
def test_forward_is_dense_and_gradients_are_close(make, autocast):
    model, x = make()
    dense, found = pair(model, x, autocast=autocast)
    assert worst_cosine(found, dense) > 0.98
    assert all(torch.isfinite(grad).all() for grad in found.grads.values())
    assert any(not torch.equal(found.grads[name], grad) for name, grad in dense.grads.items())
    # What is kept is what the report says, and besides that small tensors, integers and the batch.
    stays = [row for row in found.rows if row.how == "uncompressed"]
    reported = [tensor for tensor in found.kept if tensor.dtype == torch.uint8]
    assert nbytes(reported) == recounted(found.rows) - recounted(stays)
    others = [t for t in found.kept if t.is_floating_point() and t.numel() >= 1024 and t.numel() != x.numel()]
    assert nbytes(others) == recounted(stays)
    assert nbytes(found.kept) < 0.5 * nbytes(dense.kept)
    copies = [[t for t in of.kept if t.numel() == x.numel() and t.dtype == torch.bfloat16] for of in (dense, found)]
    assert [len(of_batch) for of_batch in copies] == [autocast, 0]


def gelus(model: nn.Module, x: Tensor) -> Tensor:
    """Run a block, and what no layer is known for, which the compiler computes again but for one of four values."""
    x = model.fc(model.block(x))
    for _ in range(3):
        x = F.gelu(x.cos(), approximate="tanh")
    return x.sum(1)


@pytest.mark.integration
@pytest.mark.parametrize("backend", only([planned, "inductor"], planned))
def test_inductor_keeps_the_same_which_is_what_it_saves_byte_for_byte(backend):
    torch.manual_seed(0)
    model = Calls(gelus, block=Block(), fc=Marked(nn.Linear(64, 64), mark("linear", 4)))
    x = torch.randn(4, 32, 64)
    eager = step(model, x, autocast=True)
    dense, found = pair(model, x, autocast=True, backend=backend)
    assert worst_cosine(found, dense) > 0.98
    packed = (
        [(row.how, row.stored_bytes) for row in of.rows if row.how in ("packed", "signs")] for of in (found, eager)
    )
    assert next(packed) == next(packed) != []
    if backend == "inductor":  # whose code says what it computes again
        held = [tensor for tensor in found.kept if tensor.numel() >= MODEL.min_values and tensor.numel() != x.numel()]
        held += [tensor for tensor in found.kept if tensor.numel() == x.numel()][1:]  # without the batch
        assert recounted(found.rows) == nbytes(held)
        assert "the compiler computes it again" in {row.reason for row in found.rows}


def test_a_transformer_block_is_kept_as_its_rules_say():
    model, x = transformer()
    rows = step(model, x, autocast=True).rows
    hows = {(row.name, row.readers[-1].removeprefix("aten."), row.how, row.bits) for row in rows}
    assert hows == {
        ("norm", "native_layer_norm_backward", "packed", 4),
        ("linear", "mm", "again", 0),
        ("linear", "mm", "packed", 8),  # of the projection, since attention asks for eight bits
        ("activation", "gelu_backward", "packed", 4),
        ("aten.unbind", "_scaled_dot_product_flash_attention_for_cpu_backward", "packed", 8),
        ("aten.unbind", "_scaled_dot_product_flash_attention_for_cpu_backward", "packed", 4),
        ("aten.addmm", "mul", "packed", 8),
    }


def test_bits_of_a_value_are_neither_those_of_a_query_nor_of_a_key():
    """Its own gradient needs query and key alone, which are kept as they are."""

    def attend(model: nn.Module, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*model.qkv(x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4).unbind(0))

    model = Calls(attend, qkv=Marked(nn.Linear(64, 192), mark("linear", 8, Model(value=2, min_values=1024))))
    dense, found = (of.grads["qkv.weight"] for of in pair(model, torch.randn(4, 16, 64)))
    torch.testing.assert_close(found[128:], dense[128:])
    assert not torch.allclose(found[:128], dense[:128], rtol=0.01)


@pytest.mark.integration
def test_a_convolution_behind_the_relu_of_a_batch_norm_keeps_signs_alone():
    """What it reads is computed again from what the norm keeps."""
    norm = Marked(nn.BatchNorm2d(32), mark("norm", 4))
    conv = Marked(nn.Conv2d(32, 16, 3, padding=1, bias=False), mark("convolution", 2))
    model = Calls(lambda model, x: model.conv(model.norm(x.sin()).relu()), norm=norm, conv=conv)
    x = torch.randn(8, 32, 16, 16)
    x[0, 0, 0, 0] = torch.nan
    for batch in (x, x.nan_to_num()):
        dense, found = pair(model, batch, backend="aot_eager_decomp_partition", autocast=True)
        (row,) = (row for row in found.rows if row.name == "convolution")
        assert (row.how, row.stored_bytes) == ("again", x.numel() // 8)
    assert torch.cosine_similarity(*(s.grads["conv.weight"].flatten() for s in (found, dense)), 0) > 0.9999


@pytest.mark.nightly
def test_the_budget_of_the_compiler_takes_less_of_what_is_packed():
    """Its share is of what is saved without it, so of packed values; gradients are those from packed values."""
    model, x = nn.Sequential(Marked(nn.Linear(8, 64), None), Block(), Block()), torch.randn(8, 32, 8)
    whole = step(model, x)
    with torch._functorch.config.patch(activation_memory_budget=0.4):
        found, dense = step(model, x), step(model, x, packs=False)
    assert torch.equal(found.output, dense.output)
    assert worst_cosine(found, whole) > 1 - 1e-6
    assert nbytes(found.kept) < 0.8 * min(nbytes(whole.kept), nbytes(dense.kept))


@pytest.mark.parametrize(("rows", "backend"), [(8, "aot_eager"), (9, planned)])
def test_signs_are_exact(rows, backend):
    """Also of a number of values that eight does not divide, and of NaN; in the order in which they lie."""
    first = Marked(nn.Linear(33, 35), mark("linear", 8, Model(saved=8, min_values=64)))
    model = Calls(lambda model, x: model.first(x).transpose(0, 1).relu().cumsum(0), first=first)
    x = torch.randn(rows, 33)
    x[0, 0] = torch.nan
    dense, found = pair(model, x, backend=backend)
    assert [row.stored_bytes for row in found.rows if row.how == "signs"] == [-(-rows * 35 // 8)]
    bias = "first.bias"  # whose gradient is what relu lets through
    torch.testing.assert_close(found.grads[bias], dense.grads[bias], rtol=0, atol=0, equal_nan=True)


@pytest.mark.integration
def test_relu_needs_signs_and_pooling_a_shape():
    model, x = convolutions()
    found = step(model, x)
    assert [(row.how, row.readers) for row in found.rows if row.how in ("signs", "shape")] == [
        ("signs", ("aten.threshold_backward", "aten.max_pool2d_with_indices_backward"))
    ]
    both = next(row for row in found.rows if "aten.threshold_backward" in row.readers and row.how == "packed")
    values = both.dense_bytes // 4
    assert both.stored_bytes == values // 32 * 18 + values // 8


@pytest.mark.parametrize(
    ("bits", "topk_over", "parts"),
    [(8, "sample", 0), (0, "sample", HALF), (4, "sample", HALF), (4, "token", HALF), (2, "sample", HALF)],
)
def test_a_weight_gradient_is_that_of_the_packed_bytes_and_dropped_blocks_those_of_eager(bits, topk_over, parts):
    layer, block = nn.Linear(64, 96), 16 if parts else 32
    model = nn.Sequential(
        nn.Softsign(), Marked(layer, mark("linear", bits, topk_over=topk_over, block_size=block), parts)
    )
    found = step(model, x := torch.randn(4, 16, 64))
    stored = F.softsign(x) if topk_over == "sample" else F.softsign(x).view(64, 1, 64)
    stored, count = (stored, stored.shape[1] * 4 // 2) if parts else (stored.view(1, -1, 32), ALL_BLOCKS)
    packed = pack(stored, block, count, bits)
    read = unpack(*packed, *((64, 64) if parts else (128, 32)), block, bits, x.dtype).view_as(x)
    assert nbytes([t for t in packed if t is not None]) == recounted(found.rows) == nbytes(found.kept)
    grad = F.linear(F.softsign(x), layer.weight, layer.bias).detach() * 2 / (64 * 96)
    expected = grad.flatten(0, -2).t() @ read.flatten(0, -2)
    torch.testing.assert_close(found.grads["1.weight"], expected, rtol=1e-4, atol=1e-6)


def turned() -> nn.Module:
    """Return patches as tokens: what the norm reads lies with its tokens side by side, what it returns does not."""
    patches, norm = Marked(nn.Conv2d(3, 64, 4, 4), mark("convolution", 4)), Marked(nn.LayerNorm(64), mark("norm", 4))
    rows = Calls(lambda model, x: model.patches(x).flatten(2).transpose(1, 2), patches=patches)
    return nn.Sequential(rows, norm, Marked(nn.Linear(64, 8), mark("linear", 4)))


def cut() -> nn.Module:
    """Return a layer scale over 196 of every 200 features, as inductor cuts a product that it has padded."""
    layer, scale = Marked(nn.Linear(64, 200), mark("linear", 4)), nn.Parameter(torch.ones(196))
    return Calls(lambda model, x: model.layer(x)[..., :196] * model.scale, layer=layer, scale=scale)


def behind_affine() -> nn.Module:
    layers = Marked(Affine(64), mark("affine", 4)), Marked(nn.Linear(64, 64), mark("linear", 2))
    return nn.Sequential(nn.Softsign(), *layers)


def behind_norm() -> nn.Module:
    """Return a norm that needs no input in backward, which is not kept for the layer behind it either."""
    return nn.Sequential(nn.LayerNorm(64, elementwise_affine=False), Marked(nn.Linear(64, 64), mark("linear", 2)))


def gated(bits: int) -> nn.Module:
    """Return a layer whose input is a product; backward keeps both factors in eight bits, for each other's gradient."""
    layers = {name: Marked(nn.Linear(64, 64), mark("linear", 4)) for name in ("gate", "up")}
    layers["act"] = Marked(nn.SiLU(), mark("activation", 4))

    def run(model: nn.Module, x: Tensor) -> Tensor:
        x = x.sin()
        return model.down(model.act(model.gate(x)) * model.up(x))

    return Calls(run, down=Marked(nn.Linear(64, 8), mark("linear", bits)), **layers)


GATED = [("packed", bits, 16 * 32 * 2 * size) for bits, size in ((4, 18), (4, 18), (8, 34), (8, 34))]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("make", "shape", "rows", "batches"),
    [
        (partial(gated, 4), (16, 32, 64), [*GATED, ("again", 0, 0)], 0),
        (
            partial(gated, 8),
            (16, 32, 64),
            [*GATED, ("packed", 8, 16 * 32 * 2 * 34)],
            0,
        ),  # from both it would be rougher
        (behind_affine, (16, 32, 64), [("packed", 4, 16 * 32 * 64 // 32 * 18), ("again", 0, 0)], 0),
        (turned, (4, 3, 16, 16), [("packed", 4, 4 * 64 * 16 // 32 * 18), ("again", 0, 0)], 1),
        (cut, (8, 16, 64), [("packed", 8, 8 * 16 * 196 // 32 * 34)], 1),  # copied, since it makes no rows where it lies
        (behind_norm, (4, 16, 64), [("packed", 2, 4 * 16 * 64 // 32 * 10)], 0),
    ],
)
def test_how_little_is_kept(make, shape, rows, batches: int):
    x = torch.randn(shape)
    dense, found = pair(make(), x)
    assert worst_cosine(found, dense) > (0.98 if make is not behind_norm else 0.9)
    assert [(row.how, row.bits, row.stored_bytes) for row in found.rows if make is not cut or row.bits == 8] == rows
    held = [t.numel() for t in found.kept if t.is_floating_point() and t.numel() >= MODEL.min_values]
    assert held == [x.numel()] * batches
    if "down.weight" in dense.grads:  # four bits of the product are .999 of it
        assert torch.cosine_similarity(*(of.grads["down.weight"].flatten() for of in (found, dense)), 0) > 0.9999


@pytest.mark.integration
def test_a_schedule_compiles_twice():
    model, x = Scheduled(0), torch.randn(4, 16, 64)
    model.act = nn.Identity()  # or the second layer would read what that keeps
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    with CompiledPacking():
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        for sparsity in (0.25, 0.5, 0.75):
            model.set(sparsity_parts(sparsity))
            kept = run(compiled, model, x, [], False).kept
            assert nbytes(kept) == x.nbytes + nbytes(list(pack(x, 32, round(32 * (1 - sparsity)), 4)))
    assert counter.frame_count == 2


def test_an_output_stays():
    first, second = (Marked(nn.Linear(64, 64), mark("linear", 4)) for _ in range(2))

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = first(x)
        return hidden, second(hidden)

    torch._dynamo.reset()
    with CompiledPacking() as packing:
        sum(torch.compile(both, backend="aot_eager", fullgraph=True)(torch.randn(4, 16, 64))).sum().backward()
    assert [row.reason for row in packing.rows] == [
        "it is an output, or shares the memory of one, so it stays in memory"
    ]


@pytest.mark.integration
def test_an_input_that_gets_a_gradient_is_packed_and_a_parameter_is_not():
    layer = Marked(nn.Linear(64, 64), mark("linear", 4))
    x, table = torch.randn(4, 16, 64), nn.Parameter(torch.randn(4, 16, 64))
    for of, expected in ((x.clone().requires_grad_() * 1, ["packed"]), (table, []), (x, [])):
        torch._dynamo.reset()
        with CompiledPacking() as packing:
            torch.compile(layer, backend="aot_eager", fullgraph=True)(of).square().mean().backward()
        assert [row.how for row in packing.rows if row.name == "linear"] == expected


class Moving(nn.Module):
    """Reads a buffer before it writes to it: as it is, and as autocast's copy."""

    def __init__(self, writes: bool, copied: bool) -> None:
        super().__init__()
        self.first, self.last = (Marked(nn.Linear(64, 64), mark("linear", 8)) for _ in range(2))
        self.act, self.writes, self.copied = Marked(nn.GELU(), mark("activation", 8)), writes, copied
        self.register_buffer("mean", torch.full((64,), 5.0))
        self.register_buffer("matrix", torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        output, y = self.last(y - self.mean), self.act(y)
        output = output + (F.linear(y, self.matrix) if self.copied else y)
        if self.writes:
            with torch.no_grad():
                self.mean.neg_()
                self.matrix.neg_()
        return output


@pytest.mark.parametrize(("backend", "autocast"), [("aot_eager", True), (planned, False)])
def test_backward_reads_what_was_there_before_forward_wrote_to_it(backend, autocast):
    torch.manual_seed(0)
    model, x = Moving(True, autocast), torch.randn(4, 16, 64)
    fixed = Moving(False, autocast)
    fixed.load_state_dict(model.state_dict())
    found = step(model, x, backend=backend, autocast=autocast)
    expected = step(fixed, x, packs=False, backend=backend, autocast=autocast)
    assert torch.equal(found.output, expected.output)
    assert worst_cosine(found, expected) > 0.999


@pytest.mark.integration
@pytest.mark.parametrize(("autocast", "backend"), [(False, "aot_eager"), (True, planned)])
def test_what_a_norm_makes_of_an_input_without_gradient_is_made_again_exactly(autocast, backend):
    given = Marked(nn.LayerNorm(64), mark("norm", 4)), Marked(nn.Linear(64, 64), mark("linear", 2))
    model = nn.Sequential(*given, Marked(nn.Linear(64, 8), mark("linear", 2)))
    x = torch.randn(4, 16, 64)
    found, dense = (step(model, x, packs=packs, backend=backend, autocast=autocast) for packs in (True, False))
    behind = next(row for row in found.rows if row.readers == ("aten.mm",) and row.shape[-1] == 64 and not row.bits)
    assert (behind.how, behind.stored_bytes) == ("again", 0)
    torch.testing.assert_close(found.grads["1.weight"], dense.grads["1.weight"], rtol=1e-4, atol=1e-6)
    assert all(t.dtype == torch.uint8 or t.numel() < 1024 or t is x or t.shape == x.shape for t in found.kept)
    assert sum(t.shape == x.shape and t.is_floating_point() for t in found.kept) == 1  # the batch


class Cast(torch.autograd.Function):
    """Lets gradients pass where ``x`` is above 1, by a cast to whole numbers in backward."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.to(torch.int32).bool()


@pytest.mark.integration
def test_a_cast_to_whole_numbers_passes_no_values_on():
    first, last = (Marked(nn.Linear(64, 64), mark("linear", 2)) for _ in range(2))
    model = Calls(lambda model, x: Cast.apply(y := model.first(x) * 2) + model.last(y), first=first, last=last)
    dense, found = pair(model, torch.randn(4, 16, 64))
    for name in ("first.weight", "first.bias"):  # that of the mask, and of a layer whose input is the batch
        torch.testing.assert_close(found.grads[name], dense.grads[name])


@pytest.mark.integration
@pytest.mark.parametrize(
    ("make", "backend", "shapes", "packs"),
    [
        (mlp, "aot_eager", [(4, count, 32) for count in (16, 24, 32)], True),
        (partial(convolutions, 32), planned, SQUARES, True),
        # Where channels do not lie side by side no dimension makes rows of blocks.
        pytest.param(partial(convolutions, 32), "aot_eager", SQUARES, False, marks=pytest.mark.nightly),
    ],
)
def test_tokens_height_and_width_may_be_symbols(make, backend, shapes, packs):
    model, _ = make()
    form = torch.channels_last if packs and shapes is SQUARES else torch.contiguous_format
    model.to(memory_format=form)
    torch._dynamo.reset()
    with CompiledPacking(), uncached():
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for shape in shapes:
            x = torch.randn(shape).contiguous(memory_format=form)
            found = run(compiled, model, x, [], False)
    dense = step(model, x, packs=False, backend=backend)
    assert worst_cosine(found, dense) > 0.98
    kept, of_dense = (nbytes([t for t in of.kept if t.dtype != torch.int64]) for of in (found, dense))
    assert packs == (kept < 0.5 * of_dense)


def test_a_graph_without_marks_is_left_alone():
    codes: list[str] = []

    def look(module: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        codes.append(module.code)
        return module

    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
    x = torch.randn(32, 64)
    with torch._functorch.config.patch(joint_custom_pass=look):
        step(model, x, packs=False)
    with CompiledPacking() as packing:
        packs = torch._functorch.config.joint_custom_pass
        with torch._functorch.config.patch(joint_custom_pass=lambda *of: look(packs(*of), of[1])):
            step(model, x, packs=False)
    assert packing.rows == []
    assert codes[0] == codes[1]
