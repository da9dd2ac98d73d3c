"""Regions of memory: tensors of any layout are read in the order of their addresses, and nothing is lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_actprune.operators.regions import layout_of

CUT = 8


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
    layout = layout_of(x.shape, x.stride(), CUT)
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
    layout = layout_of(x.shape, x.stride(), CUT)
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
        assert layout_of(x.shape, x.stride(), CUT) is None
