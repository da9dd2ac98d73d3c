"""Compiled models in two processes, with DDP and ``fully_shard``: packed, and gradients as in eager mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.marks import needs_passes
from tests.support.ranks import STEPS, Case, Seen, fit_all

TOKENS = 512  # of 64 values: large enough to be packed in compiled code
CASES = [
    Case(strategy, "32-true", pruning, {}, compiled, TOKENS)
    for strategy in ("ddp", "fsdp2")
    for pruning in (None, {"preset": "max"})
    for compiled in (False, True)
]


def gradient(seen: Seen) -> Tensor:
    """Return that of the second step: the first runs eagerly with the callback, and is the same for all."""
    return torch.cat([grad.flatten() for grad in seen.gradients[1].values()])


@pytest.mark.slow
@needs_passes
def test_compiled_models_in_two_processes(tmp_path):
    found = dict(zip(map(repr, CASES), fit_all(CASES, "cpu", tmp_path), strict=True))
    for case in CASES:
        one, other = found[repr(case)]
        assert one.error is None, one.error
        assert len(one.gradients) == STEPS
        torch.testing.assert_close(one.gradients, other.gradients, rtol=0, atol=0)
        assert one.packed == other.packed
        eager, dense = found[repr(case._replace(compiled=False))][0], found[repr(case._replace(pruning=None))][0]
        assert list(one.state) == list(eager.state)
        assert one.left == dense.left
        if case.pruning is None:
            torch.testing.assert_close(gradient(one), gradient(eager))
        else:
            assert torch.cosine_similarity(gradient(one), gradient(dense), 0) > 0.98
            assert not torch.allclose(gradient(one), gradient(dense), rtol=1e-3)
        assert ("body.*" in one.packed) == (case.pruning is not None and case.compiled)
