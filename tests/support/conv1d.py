"""A stand-in for transformers' ``Conv1D``, by its documented behaviour, and models that are made of such layers."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

MODULE = "transformers.pytorch_utils"


class Conv1D(nn.Module):
    """``nf`` outputs of ``nx`` inputs, the weight as ``[nx, nf]``."""

    __module__ = MODULE

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(0.02 * torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        return torch.addmm(self.bias, rows, self.weight).view(*x.shape[:-1], self.nf)


def imported(monkeypatch: pytest.MonkeyPatch) -> type[nn.Module]:
    """Return ``Conv1D``, imported: the real one where there is one, else the stand-in for the time of a test."""
    if importlib.util.find_spec("transformers") is not None:
        return importlib.import_module(MODULE).Conv1D
    for name in ("transformers", MODULE):
        module = ModuleType(name)
        module.__spec__, module.Conv1D = ModuleSpec(name, None), Conv1D
        monkeypatch.setitem(sys.modules, name, module)
    return Conv1D
