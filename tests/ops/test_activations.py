"""Derivatives of activation functions in few bits: bounds, errors, bytes, NaN, against fp64."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_actprune.ops import activations
from lightning_actprune.ops.activations import ACTIVATIONS, check_kept, encode, multiply
from tests.activations import EXACT, FORMATS, ORACLES, SMOOTH, inputs, kept_of, oracle

each_format = pytest.mark.parametrize("value_format", FORMATS)
each_smooth = pytest.mark.parametrize("name", SMOOTH)


def read(x: torch.Tensor, kept: activations.Kept) -> torch.Tensor:
    """Return the derivatives that are read back, in fp32."""
    return multiply(torch.ones(len(x)), encode(x, kept), kept, torch.float32)


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_bounds_are_bounds_and_reached(name):
    _, derivative = oracle(name, torch.linspace(-40, 40, 400_001, dtype=torch.float64))
    low, high = kept_of(name).bounds
    assert low - 1e-7 <= derivative.min() <= low + 1e-5
    assert high - 1e-5 <= derivative.max() <= high + 1e-7


@each_format
@each_smooth
def test_an_error_is_at_most_half_a_step_and_uniform(name, value_format):
    x, kept = inputs(20_003), kept_of(name, value_format)
    _, step = kept.start_and_step
    error = (read(x, kept) - oracle(name, x)[1]) / step
    assert error.abs().max() <= 0.5 + 1e-3  # roundings of fp32 in a step of 1/255 of the range
    # Neighbours have evenly spread dithers, so that the mean varies less than of independent ones.
    assert abs(error.mean()) <= 4 * math.sqrt(1 / 12 / len(x))
    assert error.square().mean() == pytest.approx(1 / 12, rel=0.04)


@pytest.mark.parametrize("value", [-30.0, -0.7, 0.0, 1.3, 30.0])
@each_format
@pytest.mark.parametrize("name", ["gelu", "silu", "sigmoid"])
def test_equal_values_are_unbiased_over_positions(name, value_format, value):
    """Also in the tails, where the derivative is exactly zero or one."""
    x, kept = torch.full((8 * 4096,), value), kept_of(name, value_format)
    error = (read(x, kept) - oracle(name, x)[1]) / kept.start_and_step[1]
    assert abs(error.mean()) <= 4 * math.sqrt(1 / 12 / len(x))
    columns = error.view(-1, 64).mean(0)  # what sums over rows of 64 features see
    assert columns.abs().max() <= 5 * math.sqrt(1 / 12 / (len(x) // 64))


def test_dithers_of_rows_are_independent():
    u = activations.dither(8 * 2**15, 4, torch.device("cpu")).view(-1, 8) - 0.5
    rows = u[:, 3]
    for distance in (1, 2, 48, 96, 384):
        correlation = (rows[distance:] * rows[:-distance]).mean() * 12
        assert abs(correlation) <= 4 / math.sqrt(len(rows))
    assert abs(rows.mean()) <= 4 * math.sqrt(1 / 12 / len(rows))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", EXACT)
def test_two_values_are_exact(name, dtype):
    x = inputs(1003, dtype)
    grad = torch.randn(len(x), dtype=dtype)
    kept = kept_of(name)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(ORACLES[name](x), x, grad)
    found = multiply(grad, encode(x.detach(), kept), kept, dtype)
    if name == "hardsigmoid" and dtype == torch.float64:
        torch.testing.assert_close(found, expected, rtol=2**-24, atol=0)  # the sixth is one of fp32
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("count", [0, 1, 8, 9, 256, 257, 2000])
def test_bytes(count):
    for value_format in FORMATS:
        kept, bits = kept_of("gelu", value_format), int(value_format[3:])
        assert kept.stored_bytes(count) == math.ceil(count / 8) * bits + math.ceil(count / 256)
        assert len(encode(torch.zeros(count), kept)) == kept.stored_bytes(count)
    assert kept_of("relu").stored_bytes(count) == math.ceil(count / 8)


def test_codes_lie_as_documented():
    """Codes of int4 by hand, from the dithers and the definition."""
    kept, x = kept_of("gelu"), inputs(20)
    start, step = kept.start_and_step
    u = activations.dither(24, 4, x.device)[:20]
    codes = ((oracle("gelu", x)[1] - start) / step + u).floor().int().tolist()
    stored = encode(x, kept).tolist()
    for e, code in enumerate(codes):
        assert stored[e // 2] >> (4 * (e % 2)) & 15 == code


@each_smooth
def test_what_is_not_finite_is_read_as_nan_with_its_run(name):
    """Whatever makes torch's gradient NaN makes that of its 256 neighbours NaN, even where ``g`` is zero."""
    kept = kept_of(name)
    for value in (math.nan, math.inf, -math.inf):
        x = inputs(600)
        x[300] = value
        codes = encode(x, kept)
        found = multiply(torch.zeros(600), codes, kept, torch.float32)
        expected = oracle(name, x)[1]
        assert found[:256].isfinite().all()
        assert found[512:].isfinite().all()
        if expected.isnan()[300]:
            assert found[256:512].isnan().all()
        else:
            assert found.isfinite().all()


@pytest.mark.parametrize("name", EXACT)
def test_a_nan_gradient_goes_where_torch_lets_it_in_one_bit(name):
    x, kept = inputs(64).requires_grad_(), kept_of(name)
    grad = torch.tensor([math.nan, math.inf]).repeat(32)
    (expected,) = torch.autograd.grad(ORACLES[name](x), x, grad)
    found = multiply(grad, encode(x.detach(), kept), kept, torch.float32)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gleu", (), "int4"), r"`function` must be one of 'gelu', .*, got 'gleu'"),
        (("softplus", (1.0,), "int4"), r"'softplus' has 2 parameters \(beta, threshold\), got \(1.0,\)"),
        (("gelu", (1.0,), "int4"), r"'gelu' has 0 parameters \(none\)"),
        (("gelu", (), "fp8"), r"`value_format` of an activation function must be one of 'int8', .*, got 'fp8'. HINT"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_kept(*arguments)
