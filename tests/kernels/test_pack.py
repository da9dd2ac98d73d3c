"""Packing: the exact selection on difficult keys, what is stored of the blocks that it keeps, and the copy it makes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
import torch

from lightning_actprune.codec import blocks as codec_blocks
from lightning_actprune.codec.blocks import (
    ALL_BLOCKS,
    RUN_BLOCKS,
    SELECTIONS,
    WORD_BLOCKS,
    ceil_div,
    keep_mask,
    unpack_bits,
)
from lightning_actprune.codec.formats import PLANES
from lightning_actprune.codec.packed import unpack_batch
from lightning_actprune.kernels import pack as kernels
from tests.kernels.agreement import check_launch
from tests.support import oracle
from tests.support.marks import cover
from tests.support.packing import (
    DTYPES,
    all_same,
    assert_same,
    each_strided,
    expected,
    launch_of,
    nearly_integers,
    on_kernels,
    read,
    strided,
    tied_integers,
)

SAMPLES = 3


KINDS = {
    "normal": lambda shape: torch.randn(shape).square() * 30,
    "tiny": lambda shape: torch.rand(shape) * 1e-40,
    "wide": lambda shape: torch.exp(20 * torch.randn(shape)),
    "few values": lambda shape: torch.randint(0, 4, shape).float(),
    "all equal": lambda shape: torch.full(shape, 2.5),
    "all zero": torch.zeros,
    "one large": lambda shape: torch.zeros(shape).index_fill(1, torch.tensor([shape[1] - 1]), 3.0),
    "neighbours": lambda shape: 1.0 + torch.randint(0, 3, shape) * 2.0**-23,
    "infinite": lambda shape: torch.rand(shape).where(torch.arange(shape[1]) % 3 > 0, torch.inf),
}
"""Keys, as fp32."""


def check_selected(kind: str, blocks: int, keeps: Iterable[int], device: torch.device) -> None:
    """Compare mask and offsets that the kernel for this size writes with those of a stable sort."""
    keys = KINDS[kind]((SAMPLES, blocks)).contiguous().view(torch.int32)
    programs = kernels._programs(SAMPLES, blocks, device)
    for keep in keeps:
        sizes = (SAMPLES, ceil_div(blocks, WORD_BLOCKS)), (SAMPLES, ceil_div(blocks, RUN_BLOCKS))
        bitmap, offsets = (torch.full(size, -1, dtype=torch.int32, device=device) for size in sizes)
        control = [torch.zeros(SAMPLES * kernels.CONTROL_WORDS, dtype=torch.int32, device=device)] if programs else []
        kernels._select_launch(SAMPLES, blocks, keep, programs)(keys.to(device), bitmap, offsets, *control)
        mask = unpack_bits(bitmap, blocks).cpu()
        assert torch.equal(mask, keep_mask(keys, keep)), f"keep={keep}"
        runs = [int(run.sum()) for sample in mask for run in sample.split(RUN_BLOCKS)]
        assert offsets.flatten().tolist() == [sum(runs[:i]) for i in range(len(runs))]


FEW = list(zip(itertools.cycle([7, 513]), KINDS, strict=False))


@on_kernels("blocks, kind", FEW, cover([1, 100, 1100, 16384, 16385, 30000, 450001], list(KINDS)))
def test_marks_the_same_blocks_as_a_stable_sort(kernel_device, blocks, kind):
    check_selected(kind, blocks, {1, ceil_div(blocks, 3), max(1, blocks - 1), blocks}, kernel_device)


@pytest.mark.parametrize("kind", ["few values", "infinite"])
def test_shared_selection_agrees(kernel_device, monkeypatch, kind):
    monkeypatch.setattr(kernels, "REGISTER_BLOCKS", 16)
    check_selected(kind, 300, (1, 100), kernel_device)


CASES = [
    ((20, 3, 20), 8, 4),  # several samples a program
    ((2, 19, 100), 7, 201),
    ((1, 3, 300), 300, 2),
    ((3, 122, 130), 16, 400),  # several runs a sample
    ((2, 61, 100), 7, 601),
    ((2, 300, 33), 1, 3000),
    ((70, 1, 9), 8, 1),
    ((2, 19, 900), 64, 51),
    ((1, 4, 1500), 1000, 3),
    ((1, 1, 5), 5, 1),
]


@on_kernels(
    "case, selection, dtype", cover(CASES[:3], list(SELECTIONS), DTYPES), cover(CASES, list(SELECTIONS), DTYPES)
)
def test_stores_what_the_reference_does(kernel_device, case, selection, dtype):
    shape, block_size, keep = case
    check_launch(oracle.integers(*shape, dtype=dtype, device=kernel_device), block_size, keep, selection)


@on_kernels(
    "bits, selection, dtype",
    [(3, "swap", torch.float16), (4, "unbiased", torch.float32), (8, "unbiased", torch.bfloat16)],
    cover((8, 4, 3, 2), SELECTIONS[1:], DTYPES),
)
def test_scaled_blocks_are_quantized(kernel_device, bits, selection, dtype):
    for shape, block_size, keep in (((2, 27, 70), 16, 90), ((5, 3, 20), 8, 4)):
        check_launch(oracle.integers(*shape, dtype=dtype, device=kernel_device), block_size, keep, selection, bits)


@on_kernels(
    "case, selection, dtype",
    [(CASES[0], "largest", torch.bfloat16), (CASES[1], "swap", torch.float16), (CASES[1], "unbiased", torch.bfloat16)],
    cover([*CASES, ((2, 19, 900), 32, 551), ((1, 1, 5), 8, 1)], list(SELECTIONS), DTYPES[1:]),
)
def test_a_launch_that_casts_selects_by_the_rounded_copy(kernel_device, case, selection, dtype):
    """Keys are those of the rounded values, and so is what is stored."""
    shape, block_size, keep = case
    check_launch(nearly_integers(*shape, device=kernel_device), block_size, keep, selection, 0, dtype)
    rows = nearly_integers(2, 22, 103, device=kernel_device)[:, 1:, 3:]
    check_launch(rows, 16, 70, selection, 4, dtype)


@each_strided
def test_strides(kernel_device, kind):
    x, modes = strided(kind, kernel_device), [("unbiased", None), ("swap", torch.float16), ("largest", torch.bfloat16)]
    selection, cast = modes[len(kind) % 3]
    # Sums of squares of what is not an integer would depend on the order in which they are added.
    check_launch(x if cast else x.round(), 16, 12, selection, 0, cast)


@on_kernels(
    "keep, selection, dtype",
    [(1, "largest", torch.float32), (9, "swap", torch.bfloat16), (9, "unbiased", torch.float16)],
    cover([1, 9, 24], list(SELECTIONS), DTYPES),
)
def test_peculiar_blocks(kernel_device, selection, keep, dtype):
    """Also sums of squares that are no normal numbers, or next to it, and priorities that overflow."""
    x = oracle.integers(3, 8, 24, dtype=dtype)
    most = min(torch.finfo(dtype).max, 1e18)
    x[0, 0], x[0, 1, 3], x[0, 2, 9], x[0, 3, 20] = 0.0, float("nan"), float("inf"), -float("inf")
    x[0, 4:6], x[0, 6] = most, 1e-6
    x[1] = 0.0
    x[1, 3, 10] = 1.0
    x[2, :, ::8], x[2, :, 1::8] = float("nan"), most
    x[:, :, 2::8] = -0.0
    for bits in (0, 4):
        check_launch(x.to(kernel_device), 8, keep, selection, bits)
    for scale in {"largest": (), "swap": (2.0**-66,), "unbiased": (2.0**-75, 2.0**60)}[selection]:
        check_launch(scale * oracle.integers(4, 3, 40, device=kernel_device), 8, 6, selection)


@pytest.mark.parametrize(
    ("value", "dtype"), [(float("nan"), DTYPES[1]), (-float("inf"), DTYPES[2]), (2.0**100, DTYPES[2])], ids=str
)
def test_values_that_are_not_finite_once_they_are_cast(kernel_device, value, dtype):
    x = nearly_integers(2, 20, 70, device=kernel_device)
    x[:, 10:, 65], x[1, 3, 5] = value, float("nan")
    check_launch(x, 8, 15, "largest", 0, dtype)


@pytest.mark.parametrize(("selection", "cast"), [*itertools.product(SELECTIONS, [None]), ("largest", torch.float16)])
def test_selection_by_several_programs(kernel_device, monkeypatch, selection, cast):
    monkeypatch.setattr(kernels, "REGISTER_BLOCKS", 64)
    monkeypatch.setattr(kernels, "MAX_TILE", 64)
    for keep in (1, 113):
        check_launch(oracle.integers(2, 21, 96, device=kernel_device), 8, keep, selection, 0, cast)


@on_kernels(
    "shape, block_size, keep",
    [((1, 260, 64), 4, 1664)],
    [((2, 700, 500), 16, 400), ((2, 70001, 500), 24, 735010), ((1, 131109, 512), 32, 2098)],
)
def test_thousands_of_blocks_with_ties(kernel_device, shape, block_size, keep):
    check_launch(tied_integers(*shape, device=kernel_device), block_size, keep)


@pytest.mark.parametrize("tile", [4, 4096])
def test_the_largest_dropped_key_is_found(kernel_device, monkeypatch, tile):
    monkeypatch.setattr(kernels, "MAX_TILE", tile)
    for samples, blocks in ((3, 40), (17, 5), (1, 1)):
        keys = torch.randint(0, 50, (samples, blocks), dtype=torch.int32)
        kept = torch.rand(samples, blocks) < 0.3
        right = torch.where(kept, 0, keys).amax(1)
        words = torch.cat([keys.flatten(), keys.flatten(), torch.zeros(samples, dtype=torch.int32)]).to(kernel_device)
        bitmap = codec_blocks.pack_bits(kept).to(kernel_device)
        kernels._largest_dropped_launch(samples, blocks, bitmap.shape[1])(words, bitmap)
        assert torch.equal(words[-samples:].cpu(), right)


@on_kernels("dtype", [torch.float16], [torch.bfloat16])  # Triton's interpreter cuts fp32 off to bf16
def test_every_value_is_rounded_as_torch_does(kernel_device, dtype):
    """Any 32 bits: NaN, subnormals, what 16 bits cannot hold, and in every other value a tie."""
    bits = torch.randint(-(2**31), 2**31, (2, 20, 130), dtype=torch.int32)
    bits[..., 0] = bits[..., 0] & ~0x7F800000  # no exponent
    tie = 0x8000 if dtype == torch.bfloat16 else 0x1000
    bits[..., ::2] = bits[..., ::2] & ~(2 * tie - 1) | tie
    x = bits.view(torch.float32).to(kernel_device)
    halfs = torch.randn(2, 20, 130).to(dtype).float().view(torch.int32) | tie
    for values in (x, halfs.view(torch.float32).to(kernel_device), torch.randn_like(x) * 2.0**-20):
        copy = torch.empty_like(values, dtype=dtype)
        launch_of(values, 16, 100, dtype)(values, copy)
        assert_same(copy, values.to(dtype))


def test_where_every_block_is_kept_nothing_is_selected_or_scaled(kernel_device):
    x = torch.randn(2, 5, 24, device=kernel_device)
    assert [launch_of(x, 8, 14, None, 0, name).keys for name in SELECTIONS] == [30, 30, 62]
    assert [launch_of(x, 8, 15, None, 0, name).keys for name in SELECTIONS] == [30, 30, 30]


LARGE = [((64, 196, 384), 32), ((130, 384, 196), 16), ((7, 211, 2000), 24), ((2, 3700, 1500), 16)]
LARGE += [((4000, 1, 384), 32), ((64, 196, 1536), 64), ((2, 37, 3000), 1000)]
MODES = [("largest", None), ("largest", torch.bfloat16), ("largest", torch.float16), ("swap", None), ("unbiased", None)]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "bits", "mode", "dtype"), cover(LARGE, (0, *PLANES), MODES, DTYPES), ids=str)
def test_large_samples_on_the_gpu(case, bits, mode, dtype):
    """Values whose sums of squares are exact, so that the reference keeps the same blocks."""
    (shape, block_size), (selection, cast) = case, mode
    x = (torch.randint(-64, 65, shape) / 8).to(torch.float32 if cast else dtype).cuda()
    blocks = shape[1] * ceil_div(shape[2], block_size)
    keeps = {max(1, blocks // 20), ceil_div(blocks, 2), blocks - blocks // 10}
    for keep in (*keeps, *([ALL_BLOCKS] if bits else [])):
        launch, copy = launch_of(x, block_size, keep, cast, bits, selection), None
        if cast:
            copy = torch.empty_like(x, dtype=cast)
        right = expected(x.to(cast or dtype), block_size, keep, bits, selection, x.device)
        for _ in range(3):  # a race need not show the first time
            stored = launch(x, copy)
            all_same(stored, right)
        assert copy is None or torch.equal(copy, x.to(cast))
        if bits:
            dense = unpack_batch(stored, shape, False, block_size, bits, dtype)
            assert torch.equal(dense, read(stored, shape, block_size, bits, x.device).to(dtype))


@pytest.mark.gpu
def test_addresses_beyond_32_bits():
    x = torch.zeros(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    view = x.as_strided((2, 256, 128), (2**31, 128, 1))
    view.copy_(oracle.integers(2, 256, 128, dtype=torch.bfloat16, device="cuda"))
    check_launch(view, 16, 800)
