"""Quantized blocks: kernels store the bytes of the reference and read the values of the reference, bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton

from lightning_actprune.codec import formats
from lightning_actprune.codec.blocks import ALL_BLOCKS, RUN_BLOCKS
from lightning_actprune.codec.dispatch import force_backend
from lightning_actprune.codec.formats import PLANES
from lightning_actprune.codec.packed import pack, unpack_batch
from lightning_actprune.kernels import pack as kernels
from lightning_actprune.kernels.formats import THREAD_VALUES
from lightning_actprune.kernels.launch import Launch
from lightning_actprune.kernels.places import choose_turns
from tests.kernels.agreement import check_launch
from tests.support.marks import cover
from tests.support.packing import (
    DTYPES,
    all_same,
    each_bits,
    expected,
    launch_of,
    nearly_integers,
    on_kernels,
    read,
    rounded,
    strided,
)

SIZES = (8, 16, 20, 32, 64, 100, 128)
each_number = pytest.mark.parametrize("all_blocks", [False, True], ids=["kept", "all"])
pytestmark = pytest.mark.usefixtures("by_kernels")


@pytest.fixture
def by_kernels():
    with force_backend("triton"):
        yield


def check(x, block_size, keep, bits):
    """Compare what is stored, and what is read of it, with the reference's."""
    stored, right = pack(x, block_size, keep, bits), expected(x, block_size, keep, bits)
    all_same(stored, right)
    dense = rounded(read(right, x.shape, block_size, bits), x.dtype, x.device)
    for features_first, wanted in ((False, dense), (True, dense.transpose(0, 1))):
        actual = unpack_batch(stored, tuple(x.shape), features_first, block_size, bits, x.dtype)
        all_same((actual,), (wanted,))
    return dense


@each_number
@on_kernels(
    "bits, dtype",
    [(bits, DTYPES[bits % 2]) for bits in PLANES] + [(3, torch.float16)],
    list(itertools.product(PLANES, DTYPES)),
)
def test_bytes_and_values_are_those_of_the_reference(kernel_device, bits, dtype, all_blocks):
    """Blocks of any size, the last of a row cut off; what it lacks counts as zeros."""
    for block_size in SIZES if kernel_device.type == "cuda" else (SIZES[2 * (bits % 3)],):
        length = 2 * block_size + block_size // 2 + 1
        x = (3 * torch.randn(2, 5, length) + 1).to(dtype).to(kernel_device)
        check(x, block_size, ALL_BLOCKS if all_blocks else 9, bits)


PLACES = [
    ((20, 3, 20), 8, 4),  # several samples a program
    ((1, 3, 5), 5, 2),  # a block cut to a row that is shorter than a byte of codes
    ((2, 40, 30), 8, 120),  # several runs a sample
    ((2, 40, 30), 8, 160),
    ((2, 40, 30), 8, ALL_BLOCKS),
    ((1, 2, 3), 3, 1),
    ((1, 1, 1), 1, ALL_BLOCKS),
    ((1, 3, 300), 300, 2),
    ((2, 2, 1500), 1024, 3),
    ((2, 1, 1500), 1024, ALL_BLOCKS),
]


@on_kernels(
    "place, bits",
    [(PLACES[0], 4), (PLACES[1], 3), (PLACES[2], 2), (PLACES[6], 3), (PLACES[9], 8)],
    list(zip(PLACES, itertools.cycle(PLANES), strict=False)),
)
def test_places_of_blocks_are_those_among_all_samples(kernel_device, place, bits):
    """Every row is the same, so that only the places of its blocks tell their codes apart."""
    shape, block_size, keep = place
    check(torch.randn(1, 1, shape[2], device=kernel_device).expand(shape), block_size, keep, bits)


@pytest.mark.parametrize("kind", ["slice", "batch-second", "expanded-rows"])
def test_strides(kernel_device, kind):
    check(strided(kind, kernel_device), 16, 40 if "expanded" in kind else ALL_BLOCKS, 4)


@pytest.mark.parametrize(("bits", "dtype", "all_blocks"), cover(list(PLANES), DTYPES[1:], (False, True)), ids=str)
def test_a_launch_that_casts_quantizes_the_rounded_copy(kernel_device, bits, dtype, all_blocks):
    x = nearly_integers(2, 14, 63, device=kernel_device)[:, 1:, 3:]
    check_launch(x, 16, ALL_BLOCKS if all_blocks else 30, bits=bits, cast=dtype)


def peculiar(dtype, device):
    """A sample of 12 blocks of 16 values: constants, extremes, not finite ones, and zeros of both signs among them.

    No subnormals of bf16 in the interpreter, which reads them wrongly.
    """
    most, least = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    least *= 2.0**20 if dtype == torch.bfloat16 and device.type == "cpu" else 2.0**-6
    x = torch.randn(12, 16)
    x[0], x[1], x[2] = 0.0, 1.7, -most
    x[3] *= least
    x[3, ::3] = 0.0
    x[4, ::2], x[4, 1::2] = most, -most  # further from each other than fp32 reaches, or not, in fp16
    x[5, ::2] = most
    x[6, 3], x[7, 4], x[8, 5] = float("nan"), float("inf"), -float("inf")
    x[9] = x[9].abs()
    x[9, ::2] = -0.0
    x[10, 1] = 1e-4 * least
    x[11] = -0.0
    return x.to(dtype).view(1, 3, 64).to(device)


@on_kernels(
    "bits, dtype", list(zip(PLANES, itertools.cycle(DTYPES), strict=False)), list(itertools.product(PLANES, DTYPES))
)
def test_peculiar_blocks(kernel_device, bits, dtype):
    for keep in (12, ALL_BLOCKS):
        values = check(peculiar(dtype, kernel_device), 16, keep, bits).view(12, 16)
        # Blocks of NaN, and of what is too far apart or from zero.
        lost = [6, 7, 8, *([] if dtype == torch.float16 else [2, 4, 5])]
        assert values[lost].isnan().all()
        assert values[[0, 1, 3, 9, 10, 11]].isfinite().all()
        assert not values[[0, 11]].any()


@on_kernels(
    "bits, dtype",
    list(zip(PLANES, itertools.cycle(DTYPES[1:]), strict=False)),
    list(itertools.product(PLANES, DTYPES[1:])),
)
def test_whole_blocks_of_16_bits(kernel_device, bits, dtype):
    """Two values at a time, in rows that follow each other and in others; a tile is longer than a row."""
    x = peculiar(dtype, kernel_device).repeat(2, 2, 2)
    x[1] = torch.randn(6, 128, device=kernel_device)
    for part in (x, x[:, ::2, 32:], x.transpose(0, 1)):
        check(part, 32, ALL_BLOCKS, bits)


@pytest.mark.gpu
@pytest.mark.parametrize("warps", [1, 2, 4, 8])
@pytest.mark.parametrize("tile", [32, 64, 128])
def test_codes_that_are_no_whole_words(warps, tile, monkeypatch):
    """How a compiler arranges the stores of single bytes depends on both."""

    def launch(kernel, grid, *numbers, num_warps):
        *constants, old, encoded = numbers
        return Launch(kernel, (triton.cdiv(grid[0] * old, tile),), *constants, tile, encoded, num_warps=warps)

    monkeypatch.setattr(kernels, "Launch", launch)
    for dtype in DTYPES:
        x = peculiar(dtype, torch.device("cuda")).repeat(2, 3, 1)
        for part in (x, x.transpose(0, 1)):
            check_launch(part, 24, ALL_BLOCKS, bits=3)


def test_tensors_without_positions_share_one_that_autograd_may_save(kernel_device):
    x = torch.randn(3, 4, 16, device=kernel_device)
    launch = launch_of(x, 8, ALL_BLOCKS, None, 4)
    with torch.inference_mode():
        _, bitmap, offsets = launch(x)
    assert bitmap is offsets is launch(x)[1]
    assert not bitmap.is_inference()
    first, second = torch.ops.actprune.pack(x, 8, ALL_BLOCKS, 4)[1:]  # operators must return new tensors
    assert first is not second


@each_bits
def test_unpack_reads_codes_of_any_bits_and_what_is_not_finite(kernel_device, bits):
    """Any bytes, among them headers of no scale, of the largest, and of NaN."""
    row = formats.row_bytes(32, bits, 0)
    _, bitmap, offsets = expected(torch.randn(2, 20, 70), 32, 40, bits)
    values = torch.randint(0, 256, (80, row), dtype=torch.uint8)
    headers = values.flatten()[-160:].view(torch.int16)
    headers[17], headers[18], headers[19] = -512 | 511, -512, 510
    right = read((values, bitmap, offsets), (2, 20, 70), 32, bits)
    assert right.isnan().any()
    stored = values.to(kernel_device), bitmap.to(kernel_device), offsets.to(kernel_device)
    all_same((unpack_batch(stored, (2, 20, 70), False, 32, bits, torch.float32),), (right,))


def test_two_tiles_a_program_cover_what_a_run_keeps_on_average():
    for block, kept in itertools.product([8, 32, 64, 128, 1024], [0.0, 1.0, 12.8, 51.2, 128.0]):
        turns = choose_turns(block, kept)
        assert all(number == triton.next_power_of_2(number) for number in turns)
        assert kept / 2 <= turns.tile * turns.parts <= RUN_BLOCKS
        assert turns.parts == 1 or turns.tile * turns.parts < kept
        assert turns.tile * block <= max(block, THREAD_VALUES * 32 * turns.warps)


@pytest.mark.gpu
def test_planes_beyond_32_bits():
    """Over 2^31 bytes of codes: the last blocks, all before them zero."""
    rows = 2**21 + 2**12
    x = torch.zeros(1, rows, 1024, dtype=torch.bfloat16, device="cuda")
    x[0, -50:] = torch.randn(50, 1024, device="cuda")
    stored = pack(x, 1024, rows, 8)
    codes, headers = stored[0].view(-1)[: rows * 1024], stored[0].view(-1)[rows * 1024 :].view(torch.int16)
    assert not codes[: -50 * 1024].any()
    assert not headers[:-50].any()
    dense = unpack_batch(stored, (1, rows, 1024), False, 1024, 8, torch.bfloat16)
    scale = (((headers[-50:].int() & 511) + formats.SCALE_CODES) << 20).view(torch.float32)[:, None]
    assert scale.max() < 10 / 255
    error = (dense[0, -50:].float() - x[0, -50:].float()).abs()
    assert (error <= scale * (0.5 + 2**-10) + (x[0, -50:].abs() + scale) * 2**-8).all()
    assert not dense[0, :-50].any()
