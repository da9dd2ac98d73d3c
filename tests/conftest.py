"""Shared set-up: the Triton interpreter where there is no GPU, and fixed seeds."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel is decorated, so it must be set before the first import of a kernel module.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def device() -> torch.device:
    """The device that kernels run on here: the GPU, or the CPU through the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
