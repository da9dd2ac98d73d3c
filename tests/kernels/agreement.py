"""Compare the kernels of a layer that keeps its input quantized with plain torch: output, what is stored, gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor

from lightning_actprune.codec.dispatch import force_backend
from tests.support import oracle
from tests.support.packing import all_same, assert_same, expected, launch_of
from tests.support.saving import saved_tensors
from tests.support.workload import launches

FP32 = torch.finfo(torch.float32).eps


def eps(dtype: torch.dtype) -> float:
    """Two units in the last place: Triton's interpreter cuts off to bf16 where torch rounds."""
    return 2 * torch.finfo(dtype).eps


@contextmanager
def small_tiles(operators: ModuleType, kernels: ModuleType, **sizes: object) -> Iterator[None]:
    """Let programs have several tiles, one that is not full, or none."""
    caches = operators._launches, operators._grad_launches
    with mock.patch.multiple(kernels, multiprocessors=lambda device: 3, **sizes):
        for cache in caches:
            cache.clear()
        yield
    for cache in caches:
        cache.clear()


def check_launch(x, block_size, keep, selection="largest", bits=0, cast=None):
    """Compare what a launch packs of ``x`` with the reference, and the copy that it makes with torch's."""
    copy = None if cast is None else torch.empty(x.shape, dtype=cast, device=x.device)
    stored = launch_of(x, block_size, keep, cast, bits, selection)(x, copy)
    if copy is not None:
        assert_same(copy, x.to(cast))
    all_same(stored, expected(x.to(cast or x.dtype), block_size, keep, bits, selection))


def compare(call: Callable[..., Tensor], inputs: Sequence[Tensor | None]) -> None:
    """Compare ``call(*given)`` by kernels and in plain torch; the first of ``given`` is normalised and stored."""
    inputs = [None if t is None else t.detach().requires_grad_() for t in inputs]
    leaves = [t for t in inputs if t is not None]
    calls = []
    for backend in ("triton", "reference"):
        with force_backend(backend), launches() as names, saved_tensors() as saved:  # type: ignore[arg-type]
            calls.append((call(*inputs), saved))
        assert bool(names) == (backend == "triton")
    (y, saved), (right, expected) = calls
    assert y.dtype == right.dtype
    torch.testing.assert_close(y.nan_to_num(), right.nan_to_num(), rtol=eps(y.dtype), atol=1e-5)
    assert saved[0].shape == expected[0].shape
    # Where values differ in the last places, a code does, or a header with its whole block.
    assert (saved[0] != expected[0]).float().mean() <= 0.02
    for mine, theirs in zip(saved[1:], expected[1:], strict=False):
        if mine.dtype == torch.float32:
            torch.testing.assert_close(mine, theirs, rtol=16 * FP32, atol=4 * FP32, equal_nan=True)
    grad_y, grads = torch.randn_like(y), []
    for backend in ("triton", "reference"):
        with force_backend(backend), launches() as names:  # type: ignore[arg-type]
            grads.append(torch.autograd.grad(y, leaves, grad_y, retain_graph=True))
        assert bool(names) == (backend == "triton")
    for actual, wanted in zip(*grads, strict=True):
        assert actual.dtype == wanted.dtype
        assert torch.equal(actual.isnan(), wanted.isnan())
        assert oracle.relative_error(actual.nan_to_num(), wanted.nan_to_num()) < max(1e-5, eps(actual.dtype))
