"""The exact selection on difficult keys: ties, extremes, and every number of blocks to keep."""

from __future__ import annotations

import pytest
import torch

from lightning_actprune.kernels import pack as kernels
from lightning_actprune.ops.geometry import RUN_BLOCKS, WORD_BLOCKS, ceil_div
from lightning_actprune.ops.reference import keep_mask, unpack_bits

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
    parts = kernels._parts(samples, blocks, device)
    bitmap = torch.full((samples, ceil_div(blocks, WORD_BLOCKS)), -1, dtype=torch.int32, device=device)
    offsets = torch.full((samples, ceil_div(blocks, RUN_BLOCKS)), -1, dtype=torch.int32, device=device)
    control = [torch.zeros(samples * kernels.CONTROL_WORDS, dtype=torch.int32, device=device)] if parts else []
    kernels._select(samples, blocks, keep, parts)(keys.to(device), bitmap, offsets, *control)
    return unpack_bits(bitmap, blocks).cpu(), offsets.cpu()


def check(keys: torch.Tensor, keep: int, device: torch.device) -> None:
    """Compare mask and offsets with those of a stable sort."""
    mask, offsets = select(keys, keep, device)
    assert torch.equal(mask, keep_mask(keys, keep)), f"keep={keep}"
    runs = [int(run.sum()) for sample in mask for run in sample.split(RUN_BLOCKS)]
    assert offsets.flatten().tolist() == [sum(runs[:i]) for i in range(len(runs))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [1, 7, 100, 500, 513, 1100])
def test_marks_the_same_blocks_as_a_stable_sort(kernel_device, blocks, kind):
    keys = distribution(kind, blocks)
    for keep in sorted({1, 2, blocks // 3, blocks // 2, blocks - 1, blocks} & set(range(1, blocks + 1))):
        check(keys, keep, kernel_device)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_selection_agrees(kernel_device, monkeypatch, kind):
    monkeypatch.setattr(kernels, "REGISTER_BLOCKS", 16)
    keys = distribution(kind, 600)
    for keep in (1, 200, 599, 600):
        check(keys, keep, kernel_device)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [16384, 16385, 30000, 450001])
def test_large_samples_on_the_gpu(blocks, kind):
    keys, device = distribution(kind, blocks), torch.device("cuda", 0)
    for keep in (1, blocks // 3, blocks - 1):
        check(keys, keep, device)
