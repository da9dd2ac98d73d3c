"""What the dispatcher calls as an operator (``torch.ops.actprune.*``), and kernels called directly do not heed.

A compiler with CUDA graphs (``mode="reduce-overhead"``) runs operators in memory that it takes back, and raises if
somebody holds on to some. And all results of an operator have to be new tensors.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Running(threading.local):
    operators: int = 0


_running = _Running()


def as_operator(implementation: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return ``implementation`` as the dispatcher is to call it."""

    @functools.wraps(implementation)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        _running.operators += 1
        try:
            return implementation(*args, **kwargs)
        finally:
            _running.operators -= 1

    return called


def in_operator() -> bool:
    """Return whether an operator runs that the dispatcher has called."""
    return _running.operators > 0


def may_keep_memory(x: Tensor) -> bool:
    """Return whether a buffer where ``x`` is may be kept for the next call on the same stream."""
    return not in_operator() and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
