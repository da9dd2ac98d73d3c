"""Pack one sample of over two million blocks with an empty compile cache, and print seconds, spills and a digest.

Run in its own process with an empty TRITON_CACHE_DIR: ``python -m tests.kernels.long_sample``.
"""

from __future__ import annotations

import json
import time
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

from lightning_actprune import functional
from lightning_actprune.ops import reference

ROWS, FEATURES, BLOCK = 131072 + 37, 512, 32


def tied_integers(*shape: int, device: torch.device | str) -> Tensor:
    """Return bf16 integers from -4 to 4: sums of squares are exact in any order, and hundreds of blocks tie on each."""
    return torch.randint(-4, 5, shape, device=device, dtype=torch.int8).to(torch.bfloat16)


def expected_mask(x: Tensor, block_size: int, keep: int) -> Tensor:
    """Return which blocks of ``x [S, T, L]`` a stable sort keeps: ``[S * T, NB]``."""
    keys = reference.block_keys(reference.split_blocks(x, block_size))
    return reference.keep_mask(keys.flatten(1), keep).view(-1, keys.shape[2])


def main() -> None:
    """Print one JSON record."""
    loaded: list[CompiledKernel] = []
    load = CompiledKernel._init_handles

    def noting(self: CompiledKernel) -> Any:
        result = load(self)
        loaded.append(self)
        return result

    x = tied_integers(1, ROWS, FEATURES, device="cuda")
    torch.cuda.synchronize()
    with mock.patch.object(CompiledKernel, "_init_handles", noting):
        start = time.perf_counter()
        packed = functional.pack(x, sparsity=0.6, block_size=BLOCK)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    mask = expected_mask(x, BLOCK, packed.geometry.keep)
    hat = torch.where(mask.repeat_interleave(BLOCK, 1).view_as(x), x, 0)
    frames = {kernel.name: 4 * kernel.n_spills for kernel in loaded}
    equal = torch.equal(packed.mask(), mask), torch.equal(packed.unpack(), hat)
    print(json.dumps({"blocks": mask.numel(), "seconds": seconds, "frames": frames, "equal": equal}))


if __name__ == "__main__":
    main()
