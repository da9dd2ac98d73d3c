"""GPU time of a few launches, without the host in it and without a warm cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch


def gpu_us(calls: Sequence[Callable[[], Any]], repeats: int = 3, replays: int = 7) -> float:
    """Return the median time of one call in microseconds.

    The calls do the same work on different data, together several times the L2 cache, so that none finds its inputs
    there; ``repeats`` rounds of them are captured in one CUDA graph, so that the host's launches do not count.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                for call in calls:
                    call()
        graph.replay()
        times = []
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / (repeats * len(calls)))
    return statistics.median(times)
