"""What the CPU's allocator hands out: bytes that a call leaves allocated, to the byte, whoever holds them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def growth(call: Callable[[], T]) -> tuple[T, int]:
    """Return the result of ``call`` and the bytes allocated during it that are still so, the result's included."""
    gc.collect()  # what is freed during the call must have been allocated in it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the profiler
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            result = call()
    events = profile.profiler.kineto_results.events()
    return result, sum(event.nbytes() for event in events if event.name() == "[memory]")
