"""Selection and storage, by kernels and in plain torch, against the oracle; and what a compiler makes of it."""

from __future__ import annotations

import itertools

import pytest
import torch

from lightning_actprune.codec import blocks
from lightning_actprune.codec.blocks import ALL_BLOCKS, SELECTIONS
from lightning_actprune.codec.formats import PLANES
from lightning_actprune.codec.packed import (
    Dequantize,
    Packed,
    Quantize,
    dequantize,
    pack,
    pack_all,
    quantize,
    unpack,
    unpack_all,
)
from tests.support import oracle
from tests.support.marks import cover
from tests.support.packing import DTYPES, packed, unpacked

each_selection = pytest.mark.parametrize("selection", SELECTIONS)
each_random = pytest.mark.parametrize("selection", SELECTIONS[1:])
CASES = [
    ((2, 5, 40), 7, 0.9),
    ((20, 3, 70), 16, 0.4),
    ((1, 2, 3, 20), 16, 0.4),
    ((3, 9, 130), 128, 0.3),
    ((300, 33), 4, 0.5),
    ((17,), 4, 0.5),
    ((1, 1, 1), 1, 0.0),
    ((4, 4, 8), 64, 0.99),
    ((9, 7, 40), 7, 0.3),  # the last block of a row is cut off in the middle of 4 values
]


def mask_of(p: Packed, g: blocks.BlockGeometry) -> torch.Tensor:
    """Return which blocks are kept, by sample."""
    every = torch.ones(g.samples, g.blocks_per_sample, dtype=torch.bool)
    return blocks.unpack_bits(p.tensors[1], g.blocks_per_sample).cpu() if p.tensors[1].shape[1] else every


@pytest.mark.parametrize(("case", "dtype"), list(zip(CASES, itertools.cycle(DTYPES), strict=False)), ids=str)
def test_mask_values_and_bytes_equal_the_oracle(device, dtype, case):
    shape, block_size, sparsity = case
    x = oracle.integers(*shape, dtype=dtype, device=device)
    p, g = packed(x, block_size, sparsity)
    samples = oracle.as_samples(x)
    assert torch.equal(unpacked(x, p), oracle.pruned(samples, min(block_size, samples.shape[-1]), sparsity))
    assert int(mask_of(p, g).sum()) == g.kept_blocks == p.tensors[0].shape[0]
    assert sum(t.nbytes for t in p.tensors) == g.stored_bytes(x.element_size())
    (p, g), rows = packed(x, 5, 0.5, "token"), oracle.as_samples(x, "token")
    if g.length == rows.shape[-1]:
        assert mask_of(p, g).sum(1).tolist() == [g.keep] * len(rows)
        assert torch.equal(unpacked(x, p), oracle.pruned(rows, min(5, rows.shape[-1]), 0.5))


@pytest.mark.parametrize(
    ("bits", "sparsity", "dtype"),
    [(2, 0.5, torch.bfloat16), (3, 0.0, torch.float16), (4, 0.5, torch.float16), (8, 0.0, torch.float32)],
    ids=str,
)
def test_bytes_of_quantized_blocks_are_those_announced(device, bits, sparsity, dtype):
    x = oracle.integers(3, 5, 40, dtype=dtype, device=device)
    p, g = packed(x, 16, sparsity, bits=bits)
    assert sum(t.nbytes for t in p.tensors) == g.stored_bytes(x.element_size(), bits)
    assert p.tensors[1].shape[1] == (0 if sparsity == 0 else 1)
    mask = mask_of(p, g)
    assert int(mask.sum()) == g.kept_blocks
    kept = mask.view(15, 3).repeat_interleave(16, 1)[:, :40].view(x.shape)
    read = unpacked(x, p).cpu()
    assert read.dtype == dtype
    assert not read[~kept].any()
    assert (read - x.cpu())[kept].abs().max() <= 8.5 / (2**bits - 1)


def test_what_cannot_be_stored_is_refused():
    for keep in (3, ALL_BLOCKS):
        with pytest.raises(TypeError, match=r"float64 .* 4 bits"):
            pack(torch.zeros(1, 2, 16, dtype=torch.float64), 8, keep, 4)
    with pytest.raises(ValueError, match="`block_size` than 1"):
        pack(torch.empty(1, 1, 1).expand(2**31, 1, 1), 1, 1)
    x = torch.randn(2, 5, 32, dtype=torch.float64)  # which is stored without being quantized
    assert torch.equal(unpacked(x, packed(x, 8, 0.5)[0]), oracle.pruned(x, 8, 0.5))


def test_what_has_no_finite_key_is_kept_first(device):
    for dtype in DTYPES[:2]:  # the square of the second and third block overflows
        x = torch.full((1, 4, 8), 1.0, dtype=dtype, device=device)
        x[0, 1:3], x[0, 3, 7] = 1e30, float("nan")
        assert mask_of(*packed(x, 8, 0.5)).flatten().tolist() == [False, True, True, False]
        assert mask_of(*packed(x, 8, 0.25)).flatten().tolist() == [False, True, True, True]


@each_selection
def test_nothing_to_keep(device, selection):
    for shape in ((0, 5, 16), (3, 0, 16)):
        p, _ = packed(x := torch.zeros(shape, device=device), 8, 0.5, selection=selection)
        assert p.tensors[0].shape == (0, 8)
        assert unpacked(x, p).numel() == 0
    values, bitmap, offsets = pack(torch.randn(2, 5, 16, device=device), 8, 0, 0, selection)
    assert values.shape == (0, 8)
    assert not bitmap.any()
    assert not offsets.any()


@pytest.mark.parametrize(
    "kind", ["slice", "expanded", "batch-second", "transposed", "transposed-features", "every-other", "odd-rows"]
)
def test_non_contiguous_input_packs_like_its_stored_layout(device, kind):
    base = oracle.integers(5, 9, 48, device=device)
    x = {
        "slice": base[:, 2:, 8:],
        "expanded": base[:1].expand(4, 9, 48),
        "batch-second": base.transpose(0, 1),
        "transposed": base.transpose(1, 2),
        "transposed-features": oracle.integers(5, 48, 9, device=device).transpose(1, 2),
        "every-other": base[..., ::2],
        "odd-rows": oracle.integers(3, 7, 34, dtype=torch.bfloat16, device=device)[..., :33].transpose(0, 1),
    }[kind]
    stored = base if kind == "transposed" else x.contiguous()
    assert torch.equal(unpacked(x, packed(x, 8, 0.5)[0]), oracle.pruned(stored, 8, 0.5))


@each_random
def test_the_same_input_gives_the_same_choice_and_another_one_another(device, selection):
    x = oracle.integers(2, 40, 32, device=device)
    state = torch.get_rng_state()
    first = pack(x, 8, 60, 0, selection)
    assert torch.equal(torch.get_rng_state(), state)
    for other in (x.clone(), x.transpose(0, 1).contiguous().transpose(0, 1)):
        assert all(map(torch.equal, pack(other, 8, 60, 0, selection), first))
    assert not torch.equal(pack(2 * x, 8, 60, 0, selection)[1], first[1])
    # A sample at another place in the batch.
    assert not torch.equal(pack(x.flip(0), 8, 60, 0, selection)[1].flip(0), first[1])
    for bits in (0, 3):  # and where all blocks are kept there is no choice
        assert all(map(torch.equal, pack(x, 8, 160, bits, selection), pack(x, 8, 160, bits)))


@each_selection
@pytest.mark.parametrize("keep", [1, 2, 5])
def test_zeros_are_kept_last_and_in_order(device, selection, keep):
    x = torch.zeros(3, 10, 8, device=device)
    x[:, 7], x[:, 4] = 1e-22, 3.0  # the square of the first one is no normal number
    values, bitmap, _ = pack(x, 8, keep, 0, selection)
    assert values.isfinite().all()
    if keep >= 2:
        mask = blocks.unpack_bits(bitmap, 10).cpu()
        assert [row.nonzero().flatten().tolist() for row in mask] == [sorted([4, 7, *range(keep - 2)])] * 3
        assert torch.equal(values.view(3, keep, 8).sum(1), x.sum(1))


def peculiar(tokens, dtype):
    """Blocks of zeros, far from zero, huge ones, and such as are not finite."""
    x = torch.randn(6, tokens, 72)
    x[0, 0], x[1, 0, 3], x[2, 0, 3], x[3, 0] = 0.0, float("inf"), float("nan"), x[3, 0] * 1e6
    x[4, 0] = x[4, 0] * 1e-3 + 5
    x[5, 0, ::2] = -0.0
    return x.to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("bits", "dtype", "block_size"), cover(list(PLANES), DTYPES, (16, 32, 24)), ids=str)
def test_inductors_kernels_store_and_read_what_ours_do(dtype, bits, block_size):
    torch._dynamo.reset()
    x = torch.cat([peculiar(50, dtype), torch.randn(600, 50, 72).to(dtype) * 3 + 1]).cuda()
    values = torch.compile(pack_all, fullgraph=True)(x, block_size, bits)
    keep, length = (ALL_BLOCKS, 72)
    right, *positions = pack(x.flatten(0, 1)[None], block_size, keep, bits)
    assert torch.equal(values, right)
    read = torch.compile(unpack_all, fullgraph=True)(values, 606 * 50, length, block_size, bits, dtype)
    wanted = torch.ops.actprune.unpack(right, *positions, 606 * 50, length, block_size, bits, dtype)
    torch.testing.assert_close(read, wanted, rtol=0, atol=0, equal_nan=True)


def test_packing_is_opaque_to_a_compiler():
    """One operator each way, with symbols for sizes, even where all blocks are quantized."""
    torch._dynamo.reset()

    def there_and_back(x, kept):
        keep = ALL_BLOCKS if kept is None else kept.shape[0]
        stored = torch.ops.actprune.pack(x, 8, keep, 4, "largest")
        return torch.ops.actprune.unpack(*stored, x.shape[0] * x.shape[1], x.shape[2], 8, 4, x.dtype)

    compiled = torch.compile(there_and_back, backend="aot_eager", fullgraph=True, dynamic=True)
    for samples, kept in itertools.product((3, 5), (torch.zeros(4), torch.zeros(6), None)):
        x = torch.randn(samples, 2, 40)
        assert torch.equal(compiled(x, kept), there_and_back(x, kept))


@pytest.mark.parametrize(("keep", "bits"), [(4, 0), (4, 3), (ALL_BLOCKS, 3)])
def test_operators_are_sound(device, keep, bits):
    x = torch.randn(2, 3, 20, device=device)
    stored = pack(x, 8, keep, bits)
    values, operators, read = stored[0], torch.ops.actprune, (6, 20, 8, bits, torch.float32)
    calls = [(operators.pack, (x, 8, keep, bits)), (operators.unpack, (*stored, *read))]
    sizes, grad = (2, 3, 20, False, torch.float32, 8, bits), torch.randn(6, 5, device=device)
    calls.append((operators.weight_grad, (grad, *stored, *sizes)))
    if keep == ALL_BLOCKS:  # operators of whole tensors have one result
        calls += [(operators.quantize, (x, 8, bits)), (operators.dequantize, (values, *read))]
        assert torch.equal(operators.quantize(x, 8, bits), values)
        assert torch.equal(operators.dequantize(values, *read), unpack(*stored, *read))
    for operator, given in calls:
        torch.library.opcheck(operator.default, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(("bits", "dtype"), list(zip(PLANES, itertools.cycle(DTYPES), strict=False)), ids=str)
def test_objects_for_compiled_code_do_what_operators_do(device, dtype, bits):
    store, read = Quantize(8, bits), Dequantize(8, bits, dtype)
    cut, turned = torch.randn(2, 3, 60, device=device)[:, :, 20:40], torch.randn(2, 20, 3, device=device).mT
    for x in (cut.contiguous(), torch.randn(1, 5, 8, device=device), cut, turned, cut.contiguous() + 1, cut[:0]):
        x = x.to(dtype)
        stored, (rows, length) = quantize(x, 8, bits), x.flatten(0, 1).shape
        expected = dequantize(stored, rows, length, 8, bits, dtype)
        values, dense = torch.empty_like(stored), torch.empty_like(expected)
        for _ in range(2):  # by address, the second time
            store(x, *x.shape, *x.stride(), out=values.zero_())
            read(values, rows, length, out=dense.zero_())
            assert torch.equal(values, stored)
            assert torch.equal(dense, expected)
