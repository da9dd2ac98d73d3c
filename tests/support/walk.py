"""Count the files that a reader opens to follow a layer's input, and the switches between them."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor, nn

import lightning_actprune
from lightning_actprune import convert
from lightning_actprune.codec.dispatch import force_backend
from lightning_actprune.operators.base import CompressedLayer

PACKAGE = str(Path(lightning_actprune.__file__).parent)


class WatchedBlock(nn.Sequential):
    """A block of layers that notes the files of all frames that start in the package while one of them runs."""

    def __init__(self, *layers: nn.Module, at: int) -> None:
        super().__init__(*layers)
        self.at, self.files = at, list[str]()

    def forward(self, x: Tensor) -> Tensor:
        self.files.clear()
        for number, layer in enumerate(self):
            sys.setprofile(self._note if number == self.at else None)
            try:
                x = layer(x)
            finally:
                sys.setprofile(None)
        return x

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        file, function = frame.f_code.co_filename, frame.f_code.co_qualname
        # Not callbacks of weak references, nor the note of a first launch, which each one is for the interpreter.
        if event == "call" and file.startswith(PACKAGE) and not function.endswith(("<lambda>", "Compilation.add")):
            self.files.append(file.removeprefix(PACKAGE))


def walk(*layers: nn.Module, at: int, x: Tensor) -> tuple[int, int]:
    """Return files and switches in the third training forward of ``layers[at]``, on the kernels' path, with ``max``.

    A switch is a frame that starts in another file than the frame before. Kernels themselves do not count.
    """
    block = WatchedBlock(*layers, at=at)
    model = nn.Sequential(block).train()
    convert(model, "max")
    assert isinstance(block[at], CompressedLayer)
    with force_backend("triton"):
        for _ in range(3):
            model(x.clone().requires_grad_()).square().sum().backward()
    files = [file for file in block.files if "kernels" not in file]
    return len(set(files)), sum(one != other for one, other in pairwise(files))
