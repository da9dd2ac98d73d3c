"""Signs, a bit each: of any number of values, as an operator and in inductor's code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from lightning_actprune.compiled import calls
from lightning_actprune.compiled.signs import signs
from tests.support.compilers import uncached
from tests.support.marks import only

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
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dynamic", only([False, True], True))
def test_inductor_writes_the_same_bytes(dynamic, device):
    """Also of values that are computed on the way, each once."""
    torch._dynamo.reset()
    calls.let_inductor_call()
    inputs = [numbers(count, torch.float32, device) for count in COUNTS[1:]]

    def joined(*inputs: Tensor) -> list[Tensor]:
        return [torch.ops.actprune.signs(x.sin()) for x in inputs]

    with uncached():
        found, code = run_and_get_code(torch.compile(joined, dynamic=dynamic, fullgraph=True), *inputs)
    assert "= torch.ops.actprune" not in "\n".join(code)
    for one, x in zip(found, inputs, strict=True):
        assert one.tolist() == signs(x.sin()).tolist()
