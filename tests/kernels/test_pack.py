"""Packing: the exact selection on difficult keys, what is stored of the blocks that it keeps, and the copy it makes."""

from __future__ import annotations

import itertools

import pytest
import torch

from lightning_actprune.codec import blocks as codec_blocks
from lightning_actprune.codec.blocks import RUN_BLOCKS, SELECTIONS, WORD_BLOCKS, ceil_div, keep_mask, unpack_bits
from lightning_actprune.codec.dispatch import force_backend
from lightning_actprune.kernels import pack as kernels
from tests.support import oracle
from tests.support.marks import cover
from tests.support.packing import (
    DTYPES,
    all_same,
    assert_same,
    each_strided,
    expected,
    expected_mask,
    launch_of,
    nearly_integers,
    on_kernels,
    packed,
    strided,
    tied_integers,
)

INFINITY_KEY = 0x7F800000
SAMPLES = 3


def distribution(kind: str, blocks: int) -> torch.Tensor:
    """Return int32 keys ``[SAMPLES, blocks]``."""
    floats = {
        "normal": torch.randn(SAMPLES, blocks).square() * 30,
        "tiny": torch.rand(SAMPLES, blocks) * 1e-40,
        "wide": torch.exp(20 * torch.randn(SAMPLES, blocks)),
        "few values": torch.randint(0, 4, (SAMPLES, blocks)).float(),
        "all equal": torch.full((SAMPLES, blocks), 2.5),
        "all zero": torch.zeros(SAMPLES, blocks),
        "one large": torch.zeros(SAMPLES, blocks).index_fill(1, torch.tensor([blocks - 1]), 3.0),
        "neighbours": 1.0 + torch.randint(0, 3, (SAMPLES, blocks)) * 2.0**-23,
    }
    if kind == "non-finite":
        keys = distribution("normal", blocks)
        keys[:, ::3] = INFINITY_KEY
        return keys
    return floats[kind].contiguous().view(torch.int32)


KINDS = [
    "normal", "tiny", "wide", "few values", "all equal", "all zero", "one large", "neighbours", "non-finite",
]  # fmt: skip


def select(keys: torch.Tensor, keep: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mask ``[S, N]`` and the offsets that the kernel for this size writes."""
    samples, blocks = keys.shape
    programs = kernels._programs(samples, blocks, device)
    bitmap = torch.full((samples, ceil_div(blocks, WORD_BLOCKS)), -1, dtype=torch.int32, device=device)
    offsets = torch.full((samples, ceil_div(blocks, RUN_BLOCKS)), -1, dtype=torch.int32, device=device)
    control = [torch.zeros(samples * kernels.CONTROL_WORDS, dtype=torch.int32, device=device)] if programs else []
    kernels._select_launch(samples, blocks, keep, programs)(keys.to(device), bitmap, offsets, *control)
    return unpack_bits(bitmap, blocks).cpu(), offsets.cpu()


def check_selected(keys: torch.Tensor, keep: int, device: torch.device) -> None:
    """Compare mask and offsets with those of a stable sort."""
    mask, offsets = select(keys, keep, device)
    assert torch.equal(mask, keep_mask(keys, keep)), f"keep={keep}"
    runs = [int(run.sum()) for sample in mask for run in sample.split(RUN_BLOCKS)]
    assert offsets.flatten().tolist() == [sum(runs[:i]) for i in range(len(runs))]


FEW = list(zip(itertools.cycle([7, 513]), KINDS, strict=False))


@on_kernels("blocks, kind", FEW, [case for case in itertools.product([1, 100, 1100], KINDS) if case not in FEW])
def test_marks_the_same_blocks_as_a_stable_sort(kernel_device, blocks, kind):
    keys = distribution(kind, blocks)
    for keep in sorted({1, 2, blocks // 3, blocks // 2, blocks - 1, blocks} & set(range(1, blocks + 1))):
        check_selected(keys, keep, kernel_device)


@pytest.mark.parametrize("kind", KINDS[3:5] + KINDS[7:])
def test_shared_selection_agrees(kernel_device, monkeypatch, kind):
    monkeypatch.setattr(kernels, "REGISTER_BLOCKS", 16)
    keys = distribution(kind, 600)
    for keep in (1, 200, 599):
        check_selected(keys, keep, kernel_device)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [16384, 16385, 30000, 450001])
def test_marks_the_same_blocks_of_large_samples(blocks, kind):
    keys, device = distribution(kind, blocks), torch.device("cuda", 0)
    for keep in (1, blocks // 3, blocks - 1):
        check_selected(keys, keep, device)


def check(x, block_size, keep, selection="largest", bits=0, cast=None):
    """Compare a launch with the reference, and the copy that it makes with torch's."""
    copy = None if cast is None else torch.empty(x.shape, dtype=cast, device=x.device)
    stored = launch_of(x, block_size, keep, cast, bits, selection)(x, copy)
    if copy is not None:
        assert_same(copy, x.to(cast))
    all_same(stored, expected(x.to(cast or x.dtype), block_size, keep, bits, selection))


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
    check(oracle.integers(*shape, dtype=dtype, device=kernel_device), block_size, keep, selection)


@on_kernels(
    "bits, selection, dtype",
    [(3, "swap", torch.float16), (4, "unbiased", torch.float32), (8, "unbiased", torch.bfloat16)],
    cover((8, 4, 3, 2), SELECTIONS[1:], DTYPES),
)
def test_scaled_blocks_are_quantized(kernel_device, bits, selection, dtype):
    for shape, block_size, keep in (((2, 40, 70), 16, 90), ((20, 3, 20), 8, 4), ((2, 5, 100), 20, 12)):
        check(oracle.integers(*shape, dtype=dtype, device=kernel_device), block_size, keep, selection, bits)


@on_kernels(
    "case, selection, dtype",
    [(CASES[0], "largest", torch.bfloat16), (CASES[1], "swap", torch.float16), (CASES[1], "unbiased", torch.bfloat16)],
    cover([*CASES, ((2, 19, 900), 32, 551), ((1, 1, 5), 8, 1)], list(SELECTIONS), DTYPES[1:]),
)
def test_a_launch_that_casts_selects_by_the_rounded_copy(kernel_device, case, selection, dtype):
    """Keys are those of the rounded values, and so is what is stored."""
    shape, block_size, keep = case
    check(nearly_integers(*shape, device=kernel_device), block_size, keep, selection, 0, dtype)
    rows = nearly_integers(3, 42, 103, device=kernel_device)[:, 1:, 3:]
    check(rows, 16, 150, selection, 4, dtype)


@each_strided
def test_strides(kernel_device, kind):
    x, modes = strided(kind, kernel_device), [("unbiased", None), ("swap", torch.float16), ("largest", torch.bfloat16)]
    selection, cast = modes[len(kind) % 3]
    # Sums of squares of what is not an integer would depend on the order in which they are added.
    check(x if cast else x.round(), 16, 12, selection, 0, cast)


@on_kernels(
    "keep, selection, dtype",
    [(1, "largest", torch.float32), (9, "swap", torch.bfloat16), (9, "unbiased", torch.float16)],
    cover([1, 9, 24], list(SELECTIONS), DTYPES),
)
def test_peculiar_blocks(kernel_device, selection, keep, dtype):
    x = oracle.integers(3, 8, 24, dtype=dtype)
    most = min(torch.finfo(dtype).max, 1e18)
    x[0, 0], x[0, 1, 3], x[0, 2, 9], x[0, 3, 20] = 0.0, float("nan"), float("inf"), -float("inf")
    x[0, 4:6], x[0, 6] = most, 1e-6
    x[1] = 0.0
    x[1, 3, 10] = 1.0
    x[2, :, ::8], x[2, :, 1::8] = float("nan"), most
    x[:, :, 2::8] = -0.0
    for bits in (0, 4):
        check(x.to(kernel_device), 8, keep, selection, bits)


@pytest.mark.parametrize(
    ("value", "dtype"), [(float("nan"), DTYPES[1]), (-float("inf"), DTYPES[2]), (2.0**100, DTYPES[2])], ids=str
)
def test_values_that_are_not_finite_or_will_not_be(kernel_device, value, dtype):
    x = nearly_integers(2, 40, 130, device=kernel_device)
    x[:, 20:, 65], x[1, 3, 5] = value, float("nan")
    check(x, 8, 30, "largest", 0, dtype)


@pytest.mark.parametrize("selection", SELECTIONS[1:])
def test_keys_at_the_ends_of_the_range(kernel_device, selection):
    """Sums of squares that are no normal numbers, or next to it, and priorities that overflow."""
    for scale in (2.0**-75, 2.0**-66, 2.0**60):
        check(scale * oracle.integers(12, 3, 40, device=kernel_device), 8, 6, selection)


@pytest.mark.parametrize(("selection", "cast"), [*itertools.product(SELECTIONS, [None]), ("largest", torch.float16)])
def test_selection_by_several_programs(kernel_device, monkeypatch, selection, cast):
    monkeypatch.setattr(kernels, "REGISTER_BLOCKS", 64)
    monkeypatch.setattr(kernels, "MAX_TILE", 64)
    for keep in (1, 113, 251):
        check(oracle.integers(2, 21, 96, device=kernel_device), 8, keep, selection, 0, cast)


@pytest.mark.parametrize("tile", [4, 4096])
def test_the_largest_dropped_key_is_found(kernel_device, monkeypatch, tile):
    monkeypatch.setattr(kernels, "MAX_TILE", tile)
    for samples, blocks in ((3, 100), (37, 5), (1, 1)):
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
    bits = torch.randint(-(2**31), 2**31, (2, 64, 130), dtype=torch.int32)
    bits[..., 0] = bits[..., 0] & ~0x7F800000  # no exponent
    tie = 0x8000 if dtype == torch.bfloat16 else 0x1000
    bits[..., ::2] = bits[..., ::2] & ~(2 * tie - 1) | tie
    x = bits.view(torch.float32).to(kernel_device)
    halfs = torch.randn(2, 64, 130).to(dtype).float().view(torch.int32) | tie
    for values in (x, halfs.view(torch.float32).to(kernel_device), torch.randn_like(x) * 2.0**-20):
        copy = torch.empty_like(values, dtype=dtype)
        launch_of(values, 16, 200, dtype)(values, copy)
        assert_same(copy, values.to(dtype))


def test_where_every_block_is_kept_nothing_is_selected_or_scaled(kernel_device):
    x = torch.randn(2, 5, 24, device=kernel_device)
    assert [launch_of(x, 8, 14, None, 0, name).keys for name in SELECTIONS] == [30, 30, 62]
    assert [launch_of(x, 8, 15, None, 0, name).keys for name in SELECTIONS] == [30, 30, 30]


def assert_exact(x, block_size, sparsity):
    p = packed(x, block_size, sparsity)
    mask = expected_mask(x, p.geometry.block_size, p.geometry.keep)
    blocks = codec_blocks.unpack_bits(p.bitmap, p.geometry.rows * p.geometry.blocks_per_row)
    assert torch.equal(blocks.view(mask.shape), mask)
    per_value = mask.repeat_interleave(p.geometry.block_size, 1)[:, : x.shape[2]]
    assert torch.equal(p.unpack(), torch.where(per_value.reshape(x.shape), x, 0))


@on_kernels("shape, block_size, sparsity", [((1, 517, 64), 4, 0.6)], [((2, 700, 500), 16, 0.99)])
def test_thousands_of_blocks_with_ties(kernel_device, shape, block_size, sparsity):
    with force_backend("triton"):
        assert_exact(tied_integers(*shape, device=kernel_device), block_size, sparsity)


@pytest.mark.gpu
@pytest.mark.parametrize("sparsity", [0.01, 0.6, 0.999])
@pytest.mark.parametrize("kind", ["integers", "all equal", "all zero", "one row"])
def test_over_a_million_blocks(kind, sparsity):
    assert_exact(tied_integers(2, 70001, 500, device="cuda"), 24, 0.5)
    shape = (1, 131072 + 37, 512)
    x = tied_integers(*shape, device="cuda")
    if kind == "all equal":
        x.fill_(3)
    elif kind == "all zero":
        x.zero_()
    elif kind == "one row":
        x[:, :-1] = 0
    assert_exact(x, 32, sparsity)


LARGE = [((64, 196, 384), 32), ((130, 384, 196), 16), ((7, 211, 2000), 24), ((2, 3700, 1500), 16)]
LARGE += [((4000, 1, 384), 32)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "bits", "selection", "dtype"), cover(LARGE, (0, 4), list(SELECTIONS), DTYPES), ids=str
)
def test_large_samples_on_the_gpu(case, bits, selection, dtype):
    """Values whose sums of squares are exact, so that the reference keeps the same blocks."""
    shape, block_size = case
    x = (torch.randint(-64, 65, shape) / 8).to(dtype).cuda()
    blocks = shape[1] * ceil_div(shape[2], block_size)
    for keep in {max(1, blocks // 20), ceil_div(blocks, 2), blocks - blocks // 10}:
        launch = launch_of(x, block_size, keep, None, bits, selection)
        right = expected(x, block_size, keep, bits, selection, x.device)
        for _ in range(3):  # a race need not show the first time
            all_same(launch(x), right)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "sparsity", "dtype"), cover(LARGE[:3], (0.1, 0.6, 0.97), DTYPES[1:]), ids=str)
def test_large_samples_that_are_cast_on_the_gpu(case, sparsity, dtype):
    """Random values: what is stored is bit for bit that of the copy, packed by a launch that does not cast."""
    shape, block_size = case
    x = torch.randn(shape, device="cuda")
    keep = round(shape[1] * ceil_div(shape[2], block_size) * (1 - sparsity))
    right = launch_of(x, block_size, keep)(x.to(dtype))
    launch, copy = launch_of(x, block_size, keep, dtype), torch.empty_like(x, dtype=dtype)
    for _ in range(3):
        all_same(launch(x, copy), right)
        assert torch.equal(copy, x.to(dtype))


@pytest.mark.gpu
def test_addresses_beyond_32_bits():
    x = torch.zeros(2**31 + 2**20, dtype=torch.bfloat16, device="cuda")
    view = x.as_strided((2, 256, 128), (2**31, 128, 1))
    view.copy_(oracle.integers(2, 256, 128, dtype=torch.bfloat16, device="cuda"))
    check(view, 16, 800)
