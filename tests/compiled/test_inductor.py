"""What inductor's code packs and unpacks: objects in place of operators, or its kernels, which compute the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from lightning_actprune.codec import packed, private
from lightning_actprune.compiled import fused, inductor_lowering
from lightning_actprune.compiled.install import CompiledPacking
from lightning_actprune.compiled.signs import signs
from tests.compiled.support import Marked, mark, uncached
from tests.support.marks import only

KINDS = {"Quantize": "", "Dequantize": ", torch.float32"}
OPERATORS = torch.ops.actprune.quantize.default, torch.ops.actprune.dequantize.default
UNPACKS = r"= (?:Dequantize\(|torch\.ops\.actprune\.dequantize)"
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
SHAPES = [(32, 24, 96), (64, 9, 64), (8, 7, 64), (96, 5, 192)]
"""Block size, rows and length. Blocks of 8 values are no whole words in three bits; 96 is no power of two."""


def result_and_code(function: Callable[..., Any], *inputs: Tensor, **options: bool) -> tuple[Any, str]:
    """Compile a function, run it, and return its result and the code that inductor has written for it."""
    torch._dynamo.reset()
    inductor_lowering.register_lowerings()
    with uncached():
        result, code = run_and_get_code(torch.compile(function, fullgraph=True, **options), *inputs)
    return result, "\n".join(code)


def steps(model: nn.Module, *batches: Tensor) -> tuple[list[Tensor], str, int]:
    """Return the gradients of steps on these batches, the code they ran and how many tensors it packs."""
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=len(batches) > 1)

    def run() -> None:
        for x in batches:
            compiled(x).square().mean().backward()

    model.zero_grad()
    with uncached(), CompiledPacking() as packing:
        _, code = run_and_get_code(run)
    packs = sum(row.how == "packed" for row in packing.rows)
    return [p.grad.clone() for p in model.parameters()], "\n".join(code), packs


def net() -> nn.Module:
    layers = [nn.Linear(48, 96), nn.Linear(96, 64), nn.Linear(64, 40)]
    return nn.Sequential(*(Marked(layer, mark("linear", bits)) for layer, bits in zip(layers, (8, 3, 4), strict=True)))


@pytest.mark.integration
def test_objects_are_called_in_place_of_operators():
    _, code, _ = steps(net(), torch.randn(40, 30, 48))
    assert not re.search(r"= torch\.ops\.actprune", code)
    made = re.findall(r"^(actprune_buf\d+) = (\w+\(.*\))  # of ", code, re.MULTILINE)
    wanted = (f"{name}(32, {bits}{more})" for bits in (3, 4) for name, more in KINDS.items())
    assert sorted(text for _, text in made) == sorted(wanted)  # nobody packs the batch
    assert len(re.findall(r"^ +actprune_decisions\(\)$", code, re.MULTILINE)) == 1
    assert re.findall(r"^ +(actprune_buf\d+)\(.*, out=buf\d+\)$", code, re.MULTILINE) == [name for name, _ in made]


@pytest.mark.integration
def test_objects_compute_what_operators_do(monkeypatch):
    model, batches = net(), [torch.randn(count, 30, 48) for count in (40, 56)]
    found, _, _ = steps(model, *batches)
    for operator in OPERATORS:  # inductor as it is without what this package has told it
        monkeypatch.delitem(private.lowering().lowerings, operator)
    expected, code, _ = steps(model, *batches)
    assert re.search(r"= torch\.ops\.actprune", code)
    assert all(map(torch.equal, found, expected))


@pytest.mark.integration
@pytest.mark.parametrize(("bits", "dtype"), [(4, "bfloat16"), (8, "float32")])
def test_what_no_product_reads_is_unpacked_in_bf16_if_it_has_few_bits(bits, dtype):
    """What products read is unpacked as what they multiply, see above."""
    model, x = Marked(nn.LayerNorm(64), mark("norm", bits)), torch.randn(4, 32, 64, requires_grad=True)
    (found, _), code, _ = steps(model, x)
    assert re.findall(r"= Dequantize\((.*)\)  # of ", code) == [f"32, {bits}, torch.{dtype}"]
    model.zero_grad()
    model.layer(x).square().mean().backward()
    assert nn.functional.cosine_similarity(found, model.layer.weight.grad, dim=0) > 0.99


@pytest.mark.integration
def test_what_an_activation_function_reads_is_not_unpacked_and_what_a_norm_reads_is():
    """And what a product reads. Of three inputs of linear layers, two are computed again."""
    layers = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)
    operators = "linear", "norm", "linear", "activation", "linear"
    marked = (Marked(layer, mark(operator, 4)) for layer, operator in zip(layers, operators, strict=True))
    _, code, packs = steps(nn.Sequential(nn.Softsign(), *marked), torch.randn(4, 32, 64))
    assert len(re.findall(UNPACKS, code)) == packs - 1 == 2
    assert re.findall(r"\.view\(torch\.(\w+)\)", code) == ["int32", "int16"]  # codes, and headers


class Summed(nn.Module):
    """A norm of a sum, which nothing but the norm and packing reads, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm = Marked(nn.LayerNorm(64), mark("norm", 4))

    def forward(self, x: Tensor) -> Tensor:
        added = self.first(x) + nn.functional.dropout(self.second(x).abs())
        return self.norm(added.transpose(0, 1))


@pytest.mark.integration
def test_a_value_is_computed_once_for_its_readers_and_to_be_packed():
    torch._dynamo.reset()
    compiled, x = torch.compile(Summed(), fullgraph=True), torch.randn(24, 32, 64)
    with uncached(), CompiledPacking() as packing:
        _, (forward, *_) = run_and_get_code(lambda: compiled(x))
    assert any(row.how == "packed" for row in packing.rows)
    assert len(re.findall(r"^ +cpp_fused_\w*abs\w*\(", forward, re.MULTILINE)) == 1


@pytest.mark.integration
def test_a_softmax_is_packed_and_unpacked_in_fp16():
    layers, x = nn.ModuleList([Marked(nn.Linear(64, 64), mark("linear", 4)) for _ in range(3)]), torch.randn(4, 64, 64)

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (layer(x) for layer in self.layers)
            return (q @ k.mT * 0.1).softmax(-1) @ v

    _, code, _ = steps(Attending(), x)
    assert "= Dequantize(32, 8, torch.float16)" in code


def values(rows: int, length: int, device: str) -> Tensor:
    """Return values with what is not usual among them: NaN, Inf, zeros, a block of equal ones, large and tiny ones."""
    torch.manual_seed(rows)
    x = 3 * torch.randn(1, rows, length, device=device) + 1
    x[0, 0, 0], x[0, 1, 5], x[0, 2] = torch.nan, torch.inf, 0
    x[0, 3], x[0, 4, :8] = 5, 1e30
    x[0, -1] *= 1e-39
    return x


@pytest.mark.integration
@each_device
@pytest.mark.parametrize("bits", [3, 8])
def test_values_that_kernels_take_apart_are_those_that_are_unpacked(bits, device, monkeypatch):
    stored = [packed.quantize(values(rows, length, device), block, bits) for block, rows, length in SHAPES]

    def doubled(*stored: Tensor) -> list[Tensor]:
        return [
            torch.ops.actprune.dequantize(of, rows, length, block, bits, torch.float32).mul(2)
            for of, (block, rows, length) in zip(stored, SHAPES, strict=True)
        ]

    monkeypatch.setattr(inductor_lowering, "is_read_by_pointwise", lambda node: True)
    found, code = result_and_code(doubled, *stored)
    apart = sum(fused.may_be_fused(length, block, bits) for block, _, length in SHAPES)
    assert len(re.findall(UNPACKS, code)) == len(SHAPES) - apart
    assert apart == (3 if bits == 8 else 2)
    assert "xindex %" not in code  # rows and columns are one loop
    for one, of, (block, rows, length) in zip(found, stored, SHAPES, strict=True):
        expected = 2 * packed.dequantize(of, rows, length, block, bits, torch.float32)
        torch.testing.assert_close(one, expected, rtol=0, atol=0, equal_nan=True)


def test_rows_are_whole_blocks_and_blocks_whole_words():
    may = {(96, 32, 3), (96, 16, 2), (96, 8, 8), (128, 64, 8)}
    may_not = {(100, 32, 3), (96, 16, 3), (33, 3, 8), (192, 96, 4)}
    assert {case for case in may | may_not if fused.may_be_fused(*case)} == may


# Signs, a bit each.

COUNTS = [0, 1, 7, 8, 64, 1000, 1003]


def oracle(x: Tensor) -> list[int]:
    """Return the bytes, value by value."""
    values, size = x.tolist(), -(-x.numel() // 8)
    bits = [not value <= 0 for value in values] + [False] * (8 * size - len(values))
    return [sum(bits[byte + place * size] << place for place in range(8)) for byte in range(size)]


def numbers(count: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    x = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(device, dtype)
    for at, value in enumerate([0.0, torch.nan, -0.0, torch.inf, -torch.inf]):
        x[at : at + 1] = value
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_bit_says_whether_a_value_is_not_below_or_equal_to_zero(dtype):
    for count in COUNTS:
        x = numbers(count, dtype)
        assert signs(x).tolist() == oracle(x)


@pytest.mark.integration
@each_device
@pytest.mark.parametrize("dynamic", only([False, True], True))
def test_inductor_writes_the_same_bytes(dynamic, device):
    """Also of values that are computed on the way, each once."""
    inputs = [numbers(count, torch.float32, device) for count in COUNTS[1:]]

    def joined(*inputs: Tensor) -> list[Tensor]:
        return [torch.ops.actprune.signs(x.sin()) for x in inputs]

    found, code = result_and_code(joined, *inputs, dynamic=dynamic)
    assert "= torch.ops.actprune" not in code
    for one, x in zip(found, inputs, strict=True):
        assert one.tolist() == signs(x.sin()).tolist()
