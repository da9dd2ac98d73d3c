"""Which version runs, and the cache of launches."""

from __future__ import annotations

import pytest
import torch

from lightning_actprune.codec.dispatch import (
    LaunchCache,
    as_operator,
    choose_backend,
    force_backend,
    forced_backend,
    in_operator,
    in_plain_eager_mode,
    is_aligned,
    kernel_refusals,
    may_keep_memory,
)

CPU = torch.device("cpu")


def test_a_launch_is_made_once_for_each_key_and_a_full_cache_is_emptied():
    made = []
    cache = LaunchCache(lambda *key: made.append(key) or (len(made) if key[0] < 5 else None), limit=3)
    assert [cache[0, "a"], cache[0, "a"], cache[0, "b"], cache[7, "a"], cache[7, "a"]] == [1, 1, 2, None, None]
    assert made == [(0, "a"), (0, "b"), (7, "a")]  # "not for the kernels" is kept too
    assert cache[1, "a"] == 4
    assert list(cache) == [(1, "a")]
    assert cache[0, "a"] == 5
    cache, x = LaunchCache(lambda *key: object()), torch.zeros(3, 4)
    assert cache[x.shape, x.stride(), x.dtype, x.device] is cache[(3, 4), (4, 1), torch.float32, CPU]


def test_the_choice_can_be_forced_and_the_kernels_refuse_with_reasons():
    wide = torch.zeros(2, 3, 8, dtype=torch.float64)
    assert choose_backend(wide.shape, wide.dtype, CPU, 8, 1) == "reference"
    refusals = kernel_refusals(torch.float64, CPU, 2048, 10**6)
    for reason, value in zip(refusals, ("float64", "2048", "1000000"), strict=False):
        assert value in reason
    x = torch.zeros(9)
    assert is_aligned(x[1:])  # alignment matters only where kernels may run
    with force_backend("triton"):
        assert forced_backend() == "triton"
        assert [is_aligned(x), is_aligned(x[1:])] == [True, False]
        with pytest.raises(RuntimeError, match="HINT"):
            choose_backend(wide.shape, wide.dtype, CPU, 8, 1)
        with force_backend("reference"):
            assert choose_backend(wide.shape, wide.dtype, CPU, 8, 1) == "reference"
    assert forced_backend() is None
    with pytest.raises(ValueError, match="backend"), force_backend("cuda"):
        pass


def test_plain_eager_mode_is_left_for_anybody_who_wants_to_see_what_is_done():
    class Subclass(torch.Tensor):
        pass

    x, seen = torch.randn(3), []
    assert in_plain_eager_mode(x)
    assert may_keep_memory(x)
    assert as_operator(lambda: (in_operator(), may_keep_memory(x)))() == (True, False)
    assert not in_operator()
    assert not in_plain_eager_mode(x.as_subclass(Subclass))
    assert not in_plain_eager_mode(x.to("meta"))
    assert not in_plain_eager_mode(torch.zeros(2, dtype=torch.complex64).conj().imag)
    torch.vmap(lambda one: seen.append(in_plain_eager_mode(one)) or one)(torch.randn(2, 3))
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        seen.append(in_plain_eager_mode(x))
    compiled = torch.compile(lambda t: t + (1 if in_plain_eager_mode(t) else 2), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), x + 2)
    assert seen == [False, False]
