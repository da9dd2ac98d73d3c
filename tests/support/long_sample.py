"""Pack one sample of over two million blocks with an empty compile cache, and print seconds, spills and a digest.

Run in its own process with an empty TRITON_CACHE_DIR: ``python -m tests.support.long_sample``.
"""

from __future__ import annotations

import json
import time
from typing import Any
from unittest import mock

import torch
from triton.compiler import CompiledKernel

from tests.support.packing import expected_mask, packed, tied_integers

ROWS, FEATURES, BLOCK = 131072 + 37, 512, 32


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
        p = packed(x, BLOCK, 0.6)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    mask = expected_mask(x, BLOCK, p.geometry.keep)
    hat = torch.where(mask.repeat_interleave(BLOCK, 1).view_as(x), x, 0)
    frames = {kernel.name: 4 * kernel.n_spills for kernel in loaded}
    equal = torch.equal(p.mask(), mask), torch.equal(p.unpack(), hat)
    print(json.dumps({"blocks": mask.numel(), "seconds": seconds, "frames": frames, "equal": equal}))


if __name__ == "__main__":
    main()
