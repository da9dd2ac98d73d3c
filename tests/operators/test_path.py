"""The way of one tensor: how many files a layer's forward passes, from its input to stored bytes."""

from __future__ import annotations

import gc
import itertools
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import lightning_actprune
from lightning_actprune.codec.dispatch import force_backend
from lightning_actprune.kernels.launch import Launch
from tests.support.compressed import compressed

PACKAGE = str(Path(lightning_actprune.__file__).parent)
LAYERS = {
    "linear": (nn.Linear(64, 16), (4, 8, 64), {"operator": "linear", "sparsity": 0.5}),
    "linear in 4 bits": (nn.Linear(64, 16), (4, 8, 64), {"operator": "linear", "bits": 4}),
    "GELU": (nn.GELU(), (4, 8, 64), {"operator": "activation", "bits": 4}),
    "BatchNorm": (nn.BatchNorm2d(8), (4, 8, 6, 6), {"operator": "norm", "bits": 4}),
}


def files_called(layer: nn.Module, x: torch.Tensor) -> list[str]:
    """Return the file of every function of the package that is called, in order."""
    called: list[str] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            called.append(name.removeprefix(PACKAGE))

    sys.setprofile(note)
    try:
        layer(x)
    finally:
        sys.setprofile(None)
    return called


@pytest.mark.skipif(torch.cuda.is_available(), reason="counted where kernels are interpreted")
@pytest.mark.parametrize("name", LAYERS)
def test_the_forward_of_a_layer_passes_few_files(name, monkeypatch):
    dense, shape, settings = LAYERS[name]
    with force_backend("triton"):
        layer = compressed(dense, **settings)
        x = torch.randn(shape, requires_grad=True)
        layer(x)  # all caches are filled
        # By type, since `isinstance` fails for a weak proxy whose object is gone.
        for launch in [found for found in gc.get_objects() if issubclass(type(found), Launch)]:
            monkeypatch.setattr(launch, "_run", lambda tensors: None)  # kernel bodies do not count
        called = files_called(layer, torch.randn(shape, requires_grad=True))
    switches = sum(before != after for before, after in itertools.pairwise(called))
    assert len(set(called)) <= 7, called
    assert switches <= 11, called
