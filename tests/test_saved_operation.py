"""What one operation saves, together: formats of what a parameter's gradient needs alone, and of fused attention."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_actprune.few_bit_saving import FewBitSaving
from tests.few_bit_saving import Runs, activation, attention, gradients, typical

BLOCK = 32


def gamma_first(x: Tensor, gamma: Tensor) -> Tensor:
    return gamma * x


FOR_A_PARAMETER = {
    "gamma * x": gamma_first,
    "x * gamma": lambda x, gamma: x * gamma,
    "view": lambda x, gamma: x * gamma.view(1, 1, -1),
    "addcmul": lambda x, gamma: torch.addcmul(x.sum(), gamma, x),
    "quotient": lambda x, gamma: x / gamma,
    "16 bits": lambda x, gamma: x.bfloat16() * gamma,
}
NOT_ALONE = {
    "layer_norm": lambda x, gamma: F.layer_norm(x, (64,), gamma),
    "prelu": lambda x, gamma: F.prelu(x.mT, gamma[:20]),
    "of two activations": lambda x, gamma: x * (x + gamma),
    "lerp": lambda x, gamma: torch.lerp(x, x.sin(), gamma),
    "distance": lambda x, gamma: F.mse_loss(x[0, :16].flatten(), gamma, reduction="none"),
}


@pytest.mark.parametrize("name", [*FOR_A_PARAMETER, *NOT_ALONE])
def test_what_a_parameters_gradient_needs_alone_has_a_format_of_its_own(name: str):
    run = (FOR_A_PARAMETER | NOT_ALONE)[name]
    model, x = Runs(run, (1024 if name == "distance" else 64,)), activation()
    if name == "prelu":
        model = nn.Sequential(nn.PReLU(20))
    expected = gradients(model, x)
    with FewBitSaving(model, "int8", min_values=256, parameter_format="int2") as saving:
        actual = gradients(model, x)
    stored = {row.stored_bytes / row.count / math.prod(row.shape) for row in saving.rows}
    assert stored == {0.25 + 2 / BLOCK} if name in FOR_A_PARAMETER else stored == {1 + 2 / BLOCK}
    if name in FOR_A_PARAMETER:  # and the input gradient is exact
        torch.testing.assert_close(actual[0], expected[0], rtol=0, atol=0)


def test_what_needs_more_bits_too_is_stored_again_and_what_needs_fewer_is_not():
    for run, stored in ((lambda x, g: x * g + x.sin(), 2), (lambda x, g: x.sin() + x * g, 1)):
        with FewBitSaving(Runs(run, (64,)), "int8", min_values=256, parameter_format="int4") as saving:
            saving._module(activation())
        assert sum(row.count for row in saving.rows) == stored


def test_fused_attention_keeps_its_result_in_few_bits():
    model, x = Runs(attention, (64, 192)), activation()
    expected = gradients(model, x, lambda y: y.square().sum())
    with FewBitSaving(model, "int8", min_values=256) as saving:
        actual = gradients(model, x, lambda y: y.square().sum())
    assert sum(row.count for row in saving.rows if row.shape == (4, 4, 20, 16)) == 4
    for gradient, exact in zip(actual, expected, strict=True):
        assert (gradient - exact).norm() <= 3 * typical("int8") * exact.norm()


def test_a_learned_bias_of_attention_stays_as_it_is():
    def run(x: Tensor, qkv: Tensor) -> Tensor:
        q, k, v = (x @ qkv).reshape(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
        bias = (q @ k.mT).masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    model, x = Runs(run, (64, 192)), activation()
    with FewBitSaving(model, "int8", min_values=256):
        assert all(gradient.isfinite().all() for gradient in gradients(model, x))
