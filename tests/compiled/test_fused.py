"""Packed values that inductor's kernels take apart: the same as unpacked ones, and only where that pays."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from lightning_actprune.codec import packed
from lightning_actprune.compiled import calls, fused
from lightning_actprune.compiled.scope import CompiledPacking
from tests.compiled.support import Marked, mark
from tests.support.compilers import uncached

SHAPES = [(32, 24, 96), (64, 9, 64), (8, 7, 64), (96, 5, 192)]
"""Block size, rows and length. Blocks of 8 values are no whole words in two or three bits, long ones many in eight."""
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CALL = r"= (?:actprune_Dequantize_|torch\.ops\.actprune\.dequantize)"


def values(rows: int, length: int, device: str) -> Tensor:
    """Return values with what is not usual among them: NaN, Inf, zeros, a block of equal ones, large and tiny ones."""
    torch.manual_seed(rows)
    x = 3 * torch.randn(1, rows, length, device=device) + 1
    x[0, 0, 0], x[0, 1, 5], x[0, 2] = torch.nan, torch.inf, 0
    x[0, 3], x[0, 4, :8] = 5, 1e30
    x[0, -1] *= 1e-39
    return x


def compiled(function, *inputs: Tensor) -> tuple[list[Tensor], str]:
    torch._dynamo.reset()
    calls.let_inductor_call()
    with uncached():
        found, code = run_and_get_code(torch.compile(function, fullgraph=True), *inputs)
    return found, "\n".join(code)


@pytest.mark.integration
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [3, 8])
def test_values_are_those_that_are_unpacked(bits, device):
    stored = [packed.quantize(values(rows, length, device), block, bits) for block, rows, length in SHAPES]

    def doubled(*stored: Tensor) -> list[Tensor]:
        return [
            torch.ops.actprune.dequantize(of, rows, length, block, bits, torch.float32).mul(2)
            for of, (block, rows, length) in zip(stored, SHAPES, strict=True)
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "is_read_by_pointwise", lambda node: True)
        found, code = compiled(doubled, *stored)
    apart = sum(fused.may_be_fused(length, block, bits) for block, _, length in SHAPES)
    assert len(re.findall(CALL, code)) == len(SHAPES) - apart
    assert apart == (2 if bits == 8 else 3)
    for one, of, (block, rows, length) in zip(found, stored, SHAPES, strict=True):
        expected = 2 * packed.dequantize(of, rows, length, block, bits, torch.float32)
        assert torch.equal(one.isnan(), expected.isnan())
        assert torch.equal(one.nan_to_num(), expected.nan_to_num())


def test_rows_are_whole_blocks_and_blocks_few_whole_words():
    may = {(96, 32, 3), (96, 16, 2), (96, 8, 8), (128, 64, 4)}
    may_not = {(100, 32, 3), (96, 16, 3), (33, 3, 8), (128, 64, 8)}
    assert {case for case in may | may_not if fused.may_be_fused(*case)} == may


@pytest.mark.integration
def test_what_an_activation_function_reads_is_not_unpacked_and_what_a_norm_reads_is():
    """And what a product reads. Of three inputs of linear layers, two are computed again."""
    torch._dynamo.reset()
    layers = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)
    operators = "linear", "norm", "linear", "activation", "linear"
    marked = (Marked(layer, mark(operator, 4)) for layer, operator in zip(layers, operators, strict=True))
    model, x = nn.Sequential(nn.Softsign(), *marked), torch.randn(4, 32, 64)

    def steps() -> None:
        torch.compile(model, fullgraph=True)(x).square().mean().backward()

    with uncached(), CompiledPacking() as packing:
        _, code = run_and_get_code(steps)
    packs = sum(row.how == "packed" for row in packing.rows)
    called = re.findall(CALL, "\n".join(code))
    assert len(called) == packs - 1 == 2
    loaded = re.findall(r"torch\.ops\.aten\.view\.dtype\(", "\n".join(code))
    assert len(loaded) == 2  # codes of four bits, and headers
