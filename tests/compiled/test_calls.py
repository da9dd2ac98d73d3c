"""What inductor's code calls to pack: objects in place of operators, which compute the same."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from lightning_actprune.codec import private
from lightning_actprune.compiled import calls
from lightning_actprune.compiled.scope import CompiledPacking
from tests.compiled.support import Marked, mark
from tests.support.compilers import uncached

KINDS = {"Quantize": "", "Dequantize": ", torch.float32"}
OPERATORS = torch.ops.actprune.quantize.default, torch.ops.actprune.dequantize.default


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(48, 96), nn.Linear(96, 64), nn.Linear(64, 40)]
    return nn.Sequential(*(Marked(layer, mark("linear", bits)) for layer, bits in zip(layers, (8, 3, 4), strict=True)))


def compiled_step(samples: tuple[int, ...]) -> tuple[list[Tensor], str]:
    """Return the gradients of steps on so many samples each, and the code they ran."""
    torch._dynamo.reset()
    model, grads = net(), []

    def steps() -> None:
        compiled = torch.compile(model, fullgraph=True, dynamic=len(samples) > 1)
        for count in samples:
            x = torch.randn(count, 30, 48, generator=torch.Generator().manual_seed(count))
            compiled(x).square().mean().backward()
        grads.extend(p.grad for p in model.parameters())

    with uncached(), CompiledPacking():
        _, code = run_and_get_code(steps)
    return grads, "\n".join(code)


@pytest.mark.integration
def test_objects_are_called_in_place_of_operators():
    _, code = compiled_step((40,))
    assert not re.search(r"= torch\.ops\.actprune", code)
    made = re.findall(r"^actprune_\w+ = (\w+\(.*\))$", code, re.MULTILINE)
    wanted = (f"{name}(32, {bits}{more})" for bits in (3, 4) for name, more in KINDS.items())
    assert sorted(text for text in made if "Report" not in text) == sorted(wanted)
    assert len(re.findall(r"^ +actprune_report\(\)$", code, re.MULTILINE)) == 1
    for name in KINDS:
        assert len(re.findall(rf"= actprune_{name}_32_\w+\(", code)) == 2  # nobody packs the batch


@pytest.mark.integration
@pytest.mark.parametrize(("bits", "dtype"), [(4, "bfloat16"), (8, "float32")])
def test_what_no_product_reads_is_unpacked_in_bf16_if_it_has_few_bits(bits, dtype):
    """What products read is unpacked as what they multiply, see above."""
    torch._dynamo.reset()
    model, x = Marked(nn.LayerNorm(64), mark("norm", bits)), torch.randn(4, 32, 64, requires_grad=True)

    def norm(x: Tensor) -> None:
        torch.compile(model, fullgraph=True)(x).square().mean().backward()

    with uncached(), CompiledPacking():
        _, code = run_and_get_code(norm, x)
    assert re.findall(r"^actprune_\w+ = Dequantize\((.*)\)$", code[-1], re.MULTILINE) == [f"32, {bits}, torch.{dtype}"]
    found, model.layer.weight.grad = model.layer.weight.grad, None
    model.layer(x).square().mean().backward()
    assert nn.functional.cosine_similarity(found, model.layer.weight.grad, dim=0) > 0.99


@pytest.mark.integration
def test_they_compute_what_operators_do(monkeypatch):
    found, _ = compiled_step((40, 56))
    calls.let_inductor_call()
    for operator in OPERATORS:  # inductor as it is without what this package has told it
        monkeypatch.delitem(private.lowering().lowerings, operator)
    expected, code = compiled_step((40, 56))
    assert re.search(r"= torch\.ops\.actprune", code)
    for grad, right in zip(found, expected, strict=True):
        assert torch.equal(grad, right)
