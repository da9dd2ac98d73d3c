"""GPU time of a few launches, without the host in it and without a warm cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch


def gpu_us(calls: Sequence[Callable[[], Any]], repeats: int = 3, replays: int = 7, enough_ms: float = 30.0) -> float:
    """Return the median time of one call in microseconds.

    The calls do the same work on different data, together several times the L2 cache, so that none finds its inputs
    there; ``repeats`` rounds of them are captured in one CUDA graph, so that the host's launches do not count. Long
    calls vary little: from three replays on, it ends as soon as these took ``enough_ms``.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which may still be writing the data
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
        times: list[float] = []
        while len(times) < 3 or (len(times) < replays and sum(times) < enough_ms):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return statistics.median(times) * 1e3 / (repeats * len(calls))
