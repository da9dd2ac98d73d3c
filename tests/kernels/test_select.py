"""The exact selection on difficult keys: ties, extremes, and every number of blocks to keep."""

from __future__ import annotations

import pytest
import torch

from lightning_actprune.kernels import pack as kernels
from lightning_actprune.ops.reference import keep_mask

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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocks", [1, 7, 500, 513, 1100])
def test_keeps_the_same_blocks_as_a_stable_sort(kernel_device, blocks, kind):
    keys = distribution(kind, blocks)
    scratch = torch.cat([keys.flatten(), torch.empty(2 * SAMPLES + 1, dtype=torch.int32)]).to(kernel_device)
    for keep in sorted({1, 2, blocks // 3, blocks // 2, blocks - 1, blocks} & set(range(1, blocks + 1))):
        kernels._select(SAMPLES, blocks, keep)(scratch)
        threshold, cut = scratch[keys.numel() : -1].cpu().view(2, SAMPLES, 1)
        kept = (keys > threshold) | ((keys == threshold) & (torch.arange(blocks) <= cut))
        assert torch.equal(kept, keep_mask(keys, keep)), f"keep={keep}"
        assert scratch[-1] == 0


def test_streaming_selection_agrees(kernel_device, monkeypatch):
    monkeypatch.setattr(kernels, "REGISTER_BLOCKS", 16)
    for kind in KINDS:
        test_keeps_the_same_blocks_as_a_stable_sort(kernel_device, 200, kind)
