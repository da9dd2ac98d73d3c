"""Selection and storage, on every backend, against the oracle."""

from __future__ import annotations

import pytest
import torch

from lightning_actprune import functional
from lightning_actprune.kernels import pack as kernels
from tests import oracle

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def packed(x, sparsity, block_size, scope="sample"):
    return functional.pack(x, sparsity=sparsity, block_size=block_size, scope=scope)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("shape", "block_size", "sparsity"),
    [
        ((3, 37, 70), 16, 0.6),
        ((2, 197, 96), 32, 0.5),
        ((130, 3, 64), 64, 0.5),
        ((3, 9, 130), 128, 0.3),
        ((2, 5, 40), 7, 0.9),
        ((300, 33), 4, 0.5),
        ((1, 2, 3, 20), 16, 0.4),
        ((17,), 4, 0.5),
        ((1, 1, 1), 1, 0.0),
        ((4, 4, 8), 64, 0.99),
        ((35, 41, 100), 16, 0.5),
        # Few blocks a sample, an even number of them a row, the last one cut off in the middle of 4 values.
        ((3, 9, 40), 11, 0.5),
        ((40, 3, 12), 11, 0.4),
        ((9, 7, 40), 7, 0.3),
        ((5, 60), 9, 0.2),
    ],
    ids=str,
)
def test_mask_values_and_bytes_equal_the_oracle(device, dtype, shape, block_size, sparsity):
    x = oracle.integers(*shape, dtype=dtype, device=device)
    p = packed(x, sparsity, block_size)
    samples = oracle.as_samples(x)
    expected = oracle.pruned(samples, min(block_size, samples.shape[-1]), sparsity)
    assert torch.equal(p.unpack(), expected)
    assert int(p.mask().sum()) == p.geometry.kept_blocks == p.values.shape[0]
    assert p.nbytes == p.geometry.stored_bytes(x.element_size())


def test_token_scope_keeps_k_blocks_in_every_row(device):
    x = oracle.integers(3, 5, 64, device=device)
    p = packed(x, 0.5, 16, "token")
    assert p.mask().sum(1).tolist() == [2] * 15
    assert torch.equal(p.unpack(), oracle.pruned(oracle.as_samples(x, "token"), 16, 0.5))


@pytest.mark.parametrize("sparsity", [0.0, 0.25, 0.5, 0.75, 0.9])
def test_kept_sets_are_nested_as_sparsity_grows(device, sparsity):
    x = torch.randn(2, 11, 48, device=device)
    more, fewer = packed(x, sparsity, 8).mask(), packed(x, min(sparsity + 0.09, 0.99), 8).mask()
    assert bool((more | ~fewer).all())


def test_ties_keep_the_lowest_indices(device):
    p = packed(torch.ones(2, 6, 32, device=device), 0.5, 8)
    expected = torch.zeros(2, 24, dtype=torch.bool, device=device)
    expected[:, :12] = True
    assert torch.equal(p.mask().reshape(2, 24), expected)


def test_all_zero_sample_stores_exactly_k_blocks(device):
    p = packed(torch.zeros(3, 5, 20, device=device), 0.6, 8)
    assert p.mask().reshape(3, -1).sum(1).tolist() == [p.geometry.keep] * 3
    assert not p.values.any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_non_finite_block_is_always_kept(device, dtype, value):
    x = torch.full((2, 9, 32), 100.0, dtype=dtype, device=device)
    x[1, 8, 30] = value
    p = packed(x, 0.97, 8)
    assert p.geometry.keep == 2
    assert p.mask().reshape(2, 36)[1].nonzero().flatten().tolist() == [0, 35]
    assert not torch.isfinite(p.unpack()[1, 8, 30])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_block_whose_square_overflows_counts_like_a_non_finite_one(device, dtype):
    x = torch.full((1, 4, 8), 1.0, dtype=dtype, device=device)
    x[0, 1:3], x[0, 3, 7] = 1e30, float("nan")
    assert packed(x, 0.5, 8).mask().flatten().tolist() == [False, True, True, False]
    assert packed(x, 0.25, 8).mask().flatten().tolist() == [False, True, True, True]


def test_many_keys_per_sample_take_the_shared_selection(device, monkeypatch):
    monkeypatch.setattr(kernels, "REGISTER_BLOCKS", 64)
    monkeypatch.setattr(kernels, "takes_one_launch", lambda *_: False)
    kernels.plan.cache_clear()
    for x in (oracle.integers(2, 21, 96, device=device), torch.randn(2, 21, 96, device=device)):
        assert torch.equal(packed(x, 0.55, 8).unpack(), oracle.pruned(x, 8, 0.55))


@pytest.mark.parametrize("shape", [(0, 5, 16), (0, 16), (3, 0, 16)], ids=str)
def test_empty_input(device, shape):
    p = packed(torch.zeros(shape, device=device), 0.5, 8)
    assert p.values.shape == (0, 8)
    assert p.unpack().numel() == 0


@pytest.mark.parametrize(
    "kind", ["slice", "expanded", "batch-second", "transposed", "transposed-features", "every-other"]
)
def test_non_contiguous_input_packs_like_its_stored_layout(device, kind):
    base = oracle.integers(5, 9, 48, device=device)
    channels_first = oracle.integers(5, 48, 9, device=device).transpose(1, 2)
    x, stored = {
        "slice": (base[:, 2:, 8:], base[:, 2:, 8:]),
        "expanded": (base[:1].expand(4, 9, 48), base[:1].expand(4, 9, 48)),
        "batch-second": (base.transpose(0, 1), base.transpose(0, 1)),
        "transposed": (base.transpose(1, 2), base),
        "transposed-features": (channels_first, channels_first),
        "every-other": (base[..., ::2], base[..., ::2]),
    }[kind]
    assert torch.equal(packed(x, 0.5, 8).unpack(), oracle.pruned(stored.contiguous(), 8, 0.5))


@pytest.mark.parametrize("length", [40, 36, 34, 33], ids=lambda length: f"multiple-of-{length & -length}")
@pytest.mark.parametrize("gap", [0, 1, 4])
def test_rows_of_any_alignment(device, length, gap):
    x = oracle.integers(3, 7, length + gap, dtype=torch.bfloat16, device=device)[..., :length]
    for view in (x, x.transpose(0, 1)):
        assert torch.equal(packed(view, 0.5, 16).unpack(), oracle.pruned(view.contiguous(), 16, 0.5))


@pytest.mark.parametrize("length", [48, 45])
def test_to_bsr_equals_torchs_own_bsr_of_the_masked_tensor(device, length):
    x = torch.rand(3, 7, length, device=device) + 0.1
    p = packed(x, 0.5, 16)
    masked = torch.nn.functional.pad(oracle.pruned(x, 16, 0.5), (0, -length % 16)).flatten(0, 1)
    expected, actual = masked.cpu().to_sparse_bsr((1, 16)), p.to_bsr().cpu()
    assert actual.shape == expected.shape
    for part in ("crow_indices", "col_indices", "values"):
        assert torch.equal(getattr(actual, part)(), getattr(expected, part)())


def test_fp64_takes_the_reference():
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    assert torch.equal(packed(x, 0.5, 8).unpack(), oracle.pruned(x, 8, 0.5))
