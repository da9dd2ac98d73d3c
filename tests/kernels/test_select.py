"""The exact selection on difficult keys: ties, extremes, and every number of blocks to keep."""

from __future__ import annotations

import pytest
import torch

from lightning_actprune.kernels import pack as kernels
from lightning_actprune.ops.geometry import CHUNK_ROWS, WORD_ROWS, ceil_div
from lightning_actprune.ops.reference import keep_mask, unpack_bits

INT_MAX = 2**31 - 1
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
        keys[:, ::3] = INT_MAX
        return keys
    return floats[kind].contiguous().view(torch.int32)


KINDS = [
    "normal", "tiny", "wide", "few values", "all equal", "all zero", "one large", "neighbours", "non-finite",
]  # fmt: skip


def select(keys: torch.Tensor, columns: int, keep: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mask ``[R, NB]`` and the offsets that the kernel for this size writes."""
    samples, blocks = keys.shape
    rows = blocks // columns
    launch, control = kernels._select(samples, rows, columns, keep, device)
    scratch = torch.cat([keys.flatten(), torch.zeros(control, dtype=torch.int32)]).to(device)
    bitmap = torch.zeros(columns, ceil_div(samples * rows, WORD_ROWS), dtype=torch.int32, device=device)
    offsets = torch.zeros(columns * ceil_div(samples * rows, CHUNK_ROWS) + 1, dtype=torch.int32, device=device)
    launch(scratch, bitmap, offsets)
    return unpack_bits(bitmap, samples * rows).t().cpu(), offsets.cpu()


def check(keys: torch.Tensor, columns: int, keep: int, device: torch.device) -> None:
    """Compare mask and offsets with those of a stable sort."""
    mask, offsets = select(keys, columns, keep, device)
    expected = keep_mask(keys, keep).reshape(-1, columns)
    assert torch.equal(mask, expected), f"keep={keep}"
    runs = [column.sum() for column in expected.t() for column in column.split(CHUNK_ROWS)]
    assert torch.equal(offsets, torch.tensor([0, *runs]).cumsum(0).int())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (1, 7), (7, 1), (100, 5), (171, 3), (20, 55), (11, 100)], ids=str
)
def test_marks_the_same_blocks_as_a_stable_sort(kernel_device, rows, columns, kind):
    blocks = rows * columns
    keys = distribution(kind, blocks)
    for keep in sorted({1, 2, blocks // 3, blocks // 2, blocks - 1, blocks} & set(range(1, blocks + 1))):
        check(keys, columns, keep, kernel_device)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_selection_agrees(kernel_device, monkeypatch, kind):
    monkeypatch.setattr(kernels, "REGISTER_BLOCKS", 16)
    keys = distribution(kind, 600)
    for keep in (1, 200, 599, 600):
        check(keys, 3, keep, kernel_device)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(300, 100), (4097, 13), (50000, 9)], ids=str)
def test_programs_that_share_a_sample_agree(rows, columns, kind):
    blocks = rows * columns
    keys, device = distribution(kind, blocks), torch.device("cuda", 0)
    for keep in (1, blocks // 3, blocks - 1):
        check(keys, columns, keep, device)
