"""By what kept blocks are multiplied, if they were selected without bias; the maths is that of ``ops.block_selection``.

One more launch, after the selection, finds the largest key that each sample drops. What copies or quantises a block
then works out its factor from that and from the block's sum of squares. All of these are int32 words of one tensor, for
``S`` samples of ``N`` blocks: keys ``[S, N]``, sums of squares ``[S, N]`` (as bits) and the largest dropped keys
``[S]``, zero before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_actprune.kernels.keys import INFINITY_KEY
from lightning_actprune.kernels.launch import Launch
from lightning_actprune.kernels.select import WORD
from lightning_actprune.ops.geometry import ceil_div

MAX_TILE = 4096
"""Most keys of a program: 32 a thread at 4 warps."""
ONE = tl.constexpr(0x3F800000)
FP16_MAX = tl.constexpr(65504.0)


@triton.jit
def largest_dropped_kernel(
    keys_ptr, bitmap_ptr, samples, blocks, words, GROUP: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Find the largest dropped key among ``BLOCKS`` of each of ``GROUP`` samples: a maximum, in whatever order."""
    parts = tl.cdiv(blocks, BLOCKS)
    s = tl.program_id(0) // parts * GROUP + tl.arange(0, GROUP)
    n = tl.program_id(0) % parts * BLOCKS + tl.arange(0, BLOCKS)
    inside = (s < samples)[:, None] & (n < blocks)[None, :]
    keys = tl.load(keys_ptr + s.to(tl.int64)[:, None] * blocks + n[None, :], mask=inside, other=0)
    word = tl.load(bitmap_ptr + s.to(tl.int64)[:, None] * words + (n // WORD)[None, :], mask=inside, other=-1)
    dropped = ((word >> (n % WORD)[None, :]) & 1) == 0
    largest = tl.max(tl.where(dropped, keys, 0), axis=1)
    target = keys_ptr + 2 * tl.cast(samples, tl.int64) * blocks + s
    tl.atomic_max(target, largest, mask=s < samples, sem="relaxed")


@triton.jit
def block_factors(keys_ptr, s, n, exist, samples, blocks):
    """Return by what the blocks ``n`` of samples ``s`` are multiplied if they are kept."""
    size = tl.cast(samples, tl.int64) * blocks
    square = tl.load(keys_ptr + size + s.to(tl.int64) * blocks + n, mask=exist, other=0)
    largest = tl.load(keys_ptr + 2 * size + s, mask=exist, other=0)
    scaled = (square > 0) & (square < INFINITY_KEY)
    ratio = tl.div_rn(largest.to(tl.float32, bitcast=True), tl.where(scaled, square, ONE).to(tl.float32, bitcast=True))
    return tl.where(scaled, tl.maximum(tl.sqrt_rn(ratio), 1.0), 1.0)


@triton.jit
def rescaled(x, factors):
    """Return blocks ``x [R, BLOCK]`` times ``factors [R]``, rounded to their own type, and as they are by 1."""
    # Not a product, which a compiler could fuse with a difference that follows, and then not round.
    wide = tl.fma(x.to(tl.float32), factors[:, None], 0.0)
    if x.dtype == tl.float16:
        # Values of other types are below 2^64, or their block's sum of squares overflows, and factors 2^24 at most.
        wide = tl.minimum(tl.maximum(wide, -FP16_MAX), FP16_MAX)
    return tl.where((factors > 1.0)[:, None], wide.to(x.dtype), x)


def largest_dropped(samples: int, blocks: int, words: int) -> Launch:
    """Return the launch for so many blocks in each sample, to be called with keys and bitmap."""
    tile = min(MAX_TILE, triton.next_power_of_2(blocks))
    group = max(1, min(MAX_TILE // tile, triton.next_power_of_2(samples)))
    grid = (ceil_div(samples, group) * ceil_div(blocks, tile),)
    return Launch(largest_dropped_kernel, grid, samples, blocks, words, group, tile, num_warps=4)
