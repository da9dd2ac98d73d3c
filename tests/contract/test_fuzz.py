"""Random layers in random circumstances: the outputs of the dense layer, and gradients within bounds of each element.

A run draws the same cases wherever the same modules are loaded; with ``EXPLORE=1`` in the environment, new ones.

A stored value is off by half a step at most (``codec.formats``). A step is at most 9/8 of what its block needs, and no
block needs more than the whole tensor, zero included. ``error`` is that, and ``u`` a few roundings of the layer's type.

=============  ========================================================================================================
products       ``grad_w`` is linear in the input: the gradient of absolute values, of ``error + u |x|`` in place of x
derivatives    ``|g|`` times half a step of the range of the derivative
norms          ``x^`` is off by ``e``, so ``grad_w`` by ``sum |g| e`` and ``grad_x`` by
               ``rstd (e mean(|g w| (|x^| + e)) + |x^| mean(|g w|) e)``
=============  ========================================================================================================
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given
from torch import Tensor, nn

from lightning_actprune.codec.dispatch import force_backend, forced_backend
from lightning_actprune.config import Keep
from lightning_actprune.convert import convert
from lightning_actprune.operators.norm import Affine
from tests.support import measured
from tests.support.cases import cut_features, cut_memory
from tests.support.compressed import whole
from tests.support.measured import grad_of

PLACES = [
    pytest.param("reference", 100, marks=pytest.mark.integration, id="few"),
    pytest.param("reference", 300, marks=pytest.mark.nightly, id="many"),
    pytest.param("interpreter", 16, marks=pytest.mark.nightly),
    pytest.param("cuda", 150, marks=pytest.mark.gpu),
]
"""How many cases of each kind of layer: in plain torch, with kernels in Triton's interpreter and on a GPU."""

hypothesis.settings.register_profile(
    "fuzz", deadline=None, database=None, derandomize="EXPLORE" not in os.environ, print_blob=True
)

Named = dict[str, Tensor]
ROUNDINGS = 16
SIZES = st.sampled_from([0, 1, 2, 3, 5])
WIDTHS = st.sampled_from([1, 2, 3, 8, 31, 32, 33, 64, 72])


@dataclass(frozen=True)
class Drawn:
    """A layer and the shape of its input."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    operator: str
    bounds: Callable[[Step], Named]  # by how much each gradient may be off
    equal: bool = True  # whether the output is that of the dense layer bit for bit
    cut: Callable[[Tensor, Keep], Tensor] | None = None  # the input without the blocks that are dropped


@dataclass(frozen=True)
class Step:
    """What bounds are computed from: the dense layer, its input and the gradient of its output, all in fp64."""

    layer: nn.Module
    x: Tensor
    grad: Tensor
    keep: Keep
    u: float

    def error(self, stored: Tensor) -> float:
        """Return by how much a value of ``stored`` may be off once it is read again."""
        if self.keep.bits is None or not stored.numel():
            return 0.0
        high, low = max(float(stored.max()), 0.0), min(float(stored.min()), 0.0)
        need = max((high - low) * 32 / 31, max(high, -low) * 32 / 63) / (2**self.keep.bits - 1)
        return 9 / 16 * need * (1 + self.u)


# Bounds.


def of_products(step: Step) -> Named:
    absolute = copy.deepcopy(step.layer)
    for parameter in absolute.parameters():
        parameter.data.abs_()
    sizes = gradients(absolute, step.x.abs(), step.grad.abs())
    off = gradients(absolute, step.error(step.x) + step.u * step.x.abs(), step.grad.abs())
    bounds = {name: off[name] if name == "weight" else step.u * size for name, size in sizes.items()}
    return bounds | {"output": step.u * absolute(step.x.abs()).detach()}


def of_derivative(extent: float) -> Callable[[Step], Named]:
    """Return the bound of a derivative that is stored in the given range; of one in a bit, the range is 0."""

    half_a_step = lambda step: extent * 1.01 / 2 / (2 ** (step.keep.bits or 2) - 1)  # noqa: E731
    return lambda step: {"input": step.grad.abs() * (half_a_step(step) + step.u)}  # the output is equal


def of_gate(step: Step) -> Named:
    """``y = a s(b)``, of which ``s(b)`` and ``a s'(b)`` are stored, since gradients are products with these."""
    dim = step.layer.dim
    a, b = step.x.chunk(2, dim)
    gate = b.sigmoid()
    both = torch.stack([gate, a * gate * (1 - gate)])
    off, g = step.error(both), step.grad.abs()
    inputs = torch.cat([g * (off + step.u), g * (off + step.u * (1 + a.abs()))], dim)
    # Kernels compute exp(b) as 2 ** (b log2(e)), whose exponent is off by a rounding of itself, and of log2(e).
    return {"input": inputs, "output": step.u * (1 + b.abs() / ROUNDINGS) * (a * gate).abs()}


def of_norm(sets: Callable[[Tensor], Tensor], back: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Step], Named]:
    """Return the bound of a norm over the last dimension of ``sets(x)``; ``back(y, x)`` lays that out as x again."""

    def bounds(step: Step) -> Named:
        layer, x = step.layer, sets(step.x)
        given = not layer.training and getattr(layer, "running_mean", None) is not None
        mean, variance = statistics(layer, x, given)
        scale = (variance + (layer.eps or 1e-6)).rsqrt()
        # A mean is off by roundings of what it is the mean of.
        normal, shift = (x - mean) * scale, torch.maximum(mean.abs(), average(x.abs())) * scale
        u = step.u * (1 + shift)
        e = step.error(normal) + u * (normal.abs() + 1)
        weight, bias = (spread(layer, getattr(layer, name, None), step.x) for name in ("weight", "bias"))
        weight = torch.ones_like(step.x) if weight is None else weight.expand_as(step.x)
        g = sets((step.grad * weight).abs())
        of_x = u * g
        if not given:
            of_x = of_x + u * average(g) + e * average(g * (normal.abs() + e)) + normal.abs() * average(g * e)
            of_x = of_x + u * normal.abs() * average(g * normal.abs())
        size = back(normal.abs() + shift, step.x) * weight.abs() + (0 if bias is None else bias.abs())
        found = {"input": back(scale * of_x, step.x), "output": step.u * size}
        plain = sets(step.grad.abs())
        if layer.weight is not None:
            found["weight"] = to_weight(layer, back(plain * e, step.x))
        if bias is not None:
            found["bias"] = to_weight(layer, step.u * step.grad.abs())
        return found

    return bounds


def average(v: Tensor) -> Tensor:
    """Return the mean of each set, of which an empty tensor has none."""
    return v.mean(-1, keepdim=True) if v.numel() else v


def statistics(layer: nn.Module, x: Tensor, given: bool) -> tuple[Tensor, Tensor]:
    """Return mean and variance of each set, or those that are given."""
    if given:
        return layer.running_mean[:, None], layer.running_var[:, None]
    if isinstance(layer, nn.RMSNorm):
        return torch.zeros(len(x), 1), x.square().mean(-1, keepdim=True)
    return x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)


def spread(layer: nn.Module, parameter: Tensor | None, x: Tensor) -> Tensor | None:
    """Return a parameter in a shape that multiplies ``x``."""
    if parameter is None or isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return parameter
    return parameter.reshape(-1, *[1] * (x.dim() - 2))


def to_weight(layer: nn.Module, terms: Tensor) -> Tensor:
    """Return the sums of what each weight multiplies."""
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return terms.reshape(-1, *layer.weight.shape).sum(0)
    return terms.transpose(0, 1).reshape(len(layer.weight), -1).sum(1)


def gradients(layer: nn.Module, x: Tensor, grad: Tensor) -> Named:
    """Return the gradients by name, ``"input"`` among them."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return measured.gradients(layer.requires_grad_(), leaf, lambda x: layer(x * 1.0), grad)


# Layers.


@st.composite
def linear(draw: st.DrawFn) -> Drawn:
    width, out, bias = draw(WIDTHS), draw(st.sampled_from([1, 3, 16, 40])), draw(st.booleans())
    shape = *draw(st.lists(SIZES, max_size=3)), width
    return Drawn(lambda: nn.Linear(width, out, bias), shape, "linear", of_products, cut=cut_features)


@st.composite
def convolution(draw: st.DrawFn) -> Drawn:
    dims, groups, stride = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([1, 2]))
    options: dict[str, Any] = {
        "stride": stride, "padding": draw(st.sampled_from([0, 1, "same"] if stride == 1 else [0, 1])),
        "dilation": draw(st.sampled_from([1, 2])), "groups": groups, "bias": draw(st.booleans()),
        "padding_mode": draw(st.sampled_from(["zeros", "zeros", "zeros", "circular", "reflect"])),
    }  # fmt: skip
    channels, out = groups * draw(st.sampled_from([1, 3, 8])), groups * draw(st.sampled_from([1, 4]))
    kernel = draw(st.sampled_from([1, 2, 3]))
    shape = draw(SIZES), channels, *[draw(st.sampled_from([1, 4, 5, 8])) for _ in range(dims)]
    make = lambda: (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](channels, out, kernel, **options)  # noqa: E731
    return Drawn(make, shape, "convolution", of_products, cut=cut_memory)


ACTIVATIONS: dict[str, tuple[Callable[..., nn.Module], float]] = {
    "gelu": (lambda inplace: nn.GELU(), 1.26), "gelu-tanh": (lambda inplace: nn.GELU(approximate="tanh"), 1.26),
    "tanh": (lambda inplace: nn.Tanh(), 1.0),
    "silu": (nn.SiLU, 1.2), "mish": (nn.Mish, 1.21), "hardswish": (nn.Hardswish, 2.0), "elu": (nn.ELU, 1.0),
    "elu-2": (lambda inplace: nn.ELU(2.0, inplace), 2.0), "relu": (nn.ReLU, 0.0), "relu6": (nn.ReLU6, 0.0),
    "hardtanh": (lambda inplace: nn.Hardtanh(-0.5, 2.0, inplace), 0.0), "hardsigmoid": (nn.Hardsigmoid, 0.0),
    "leaky": (lambda inplace: nn.LeakyReLU(0.1, inplace), 0.0),
    **{f"dropout {p}": (lambda inplace, p=p: nn.Dropout(p, inplace), 0.0) for p in (0.0, 0.3, 1.0)},
}  # fmt: skip
"""Activation functions, most of which can write to their input, and the ranges of their derivatives."""


@st.composite
def activation(draw: st.DrawFn) -> Drawn:
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 7, 40]), max_size=4)))
    make, extent = ACTIVATIONS[draw(st.sampled_from(list(ACTIVATIONS)))]
    inplace = draw(st.booleans())
    return Drawn(lambda: make(inplace=inplace), shape, "activation", of_derivative(extent))


@st.composite
def gate(draw: st.DrawFn) -> Drawn:
    dim = draw(st.sampled_from([-1, 1, -2]))
    shape = [draw(SIZES), draw(st.sampled_from([2, 3, 6])), draw(st.sampled_from([2, 6, 7, 64]))]
    return Drawn(lambda: nn.GLU(dim), tuple(shape), "activation", of_gate, False)


@st.composite
def row_norm(draw: st.DrawFn) -> Drawn:
    cut = tuple(draw(st.lists(st.sampled_from([1, 2, 5, 32, 72]), min_size=1, max_size=2)))
    shape = *draw(st.lists(SIZES, max_size=2)), *cut
    affine, eps = draw(st.booleans()), draw(st.sampled_from([1e-5, 1e-3]))
    kind, options = draw(st.sampled_from([(nn.RMSNorm, ()), (nn.LayerNorm, (True,)), (nn.LayerNorm, (False,))]))
    bounds = of_norm(lambda x: x.reshape(-1, torch.Size(cut).numel()), lambda y, x: y.reshape(x.shape))
    return Drawn(lambda: kind(cut, eps, affine, *options), shape, "norm", bounds, False)


@st.composite
def batch_norm(draw: st.DrawFn) -> Drawn:
    dims, channels = draw(st.integers(0, 3)), draw(st.sampled_from([1, 3, 8, 24]))
    options = {
        "affine": draw(st.booleans()), "track_running_stats": draw(st.sampled_from([True, True, False])),
        "momentum": draw(st.sampled_from([0.1, None])), "eps": draw(st.sampled_from([1e-5, 1e-2])),
    }  # fmt: skip
    shape = draw(SIZES), channels, *[draw(st.sampled_from([1, 2, 4])) for _ in range(dims)]
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims]
    back = lambda y, x: y.reshape(x.transpose(0, 1).shape).transpose(0, 1)  # noqa: E731
    bounds = of_norm(lambda x: x.transpose(0, 1).reshape(channels, -1), back)
    return Drawn(lambda: kind(channels, **options), shape, "norm", bounds, False)


@st.composite
def group_norm(draw: st.DrawFn) -> Drawn:
    groups, each, affine = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 3, 8])), draw(st.booleans())
    shape = draw(SIZES), groups * each, *draw(st.lists(st.sampled_from([1, 2, 4]), max_size=3))
    sets = lambda x: x.reshape(len(x) * groups, x[0].numel() // groups if len(x) else 1)  # noqa: E731
    bounds = of_norm(sets, lambda y, x: y.reshape(x.shape))
    return Drawn(lambda: nn.GroupNorm(groups, groups * each, affine=affine), shape, "norm", bounds, False)


@st.composite
def affine(draw: st.DrawFn) -> Drawn:
    width = draw(WIDTHS)
    return Drawn(lambda: Affine(width), (*draw(st.lists(SIZES, max_size=3)), width), "affine", of_products, False)


LAYERS = {
    "linear": linear, "convolution": convolution, "activation": activation, "gate": gate, "row norm": row_norm,
    "batch norm": batch_norm, "group norm": group_norm, "affine": affine,
}  # fmt: skip


# Circumstances.


@dataclass(frozen=True)
class Circumstances:
    """How a layer is called."""

    dtype: torch.dtype
    autocast: bool  # to bfloat16
    layout: str  # in FORMS
    values: str  # in VALUES
    leaf: bool  # to which nothing may be written
    trained: bool
    frozen: frozenset[str]  # parameters that need no gradient, and "input"
    shared: int  # how many layers read the input, or 0 for one layer that is called twice
    keep: Keep
    seed: int


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "turned": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 2 else x,
    "gaps": lambda x: torch.stack([x, x + 1], -1)[..., 0],
    "last, gaps": lambda x: FORMS["gaps"](x.movedim(1, -1)).movedim(-1, 1) if x.dim() > 2 else x,
    "offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "expanded": lambda x: x[:1].expand_as(x) if x.dim() else x,
}
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "shifted": lambda x: x + 3,
    "small": lambda x: x * 1e-3,
    "large": lambda x: x * 30,
    "integers": lambda x: x.round(),
    "zeros": lambda x: x * 0,
    "constant": lambda x: x * 0 + 0.7,
    "outlier": lambda x: x.masked_fill(torch.arange(x.numel()).view(x.shape) == 5, 500),
    "nan": lambda x: x.masked_fill(torch.arange(x.numel()).view(x.shape) == 1, torch.nan),
    "inf": lambda x: x.masked_fill(torch.arange(x.numel()).view(x.shape) == 1, torch.inf),
}


@st.composite
def circumstances(draw: st.DrawFn) -> Circumstances:
    bits = draw(st.sampled_from([None, 2, 3, 4, 8]))
    block = draw(st.sampled_from([32, 32, 8, 16, 48, 128] if bits else [32, 32, 1, 5, 16, 64]))
    return Circumstances(
        dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64])),
        autocast=draw(st.sampled_from([False, False, True])),
        layout=draw(st.sampled_from(["dense", *FORMS])),
        values=draw(st.sampled_from(["normal", *VALUES])),
        leaf=draw(st.booleans()),
        trained=draw(st.sampled_from([True, True, False])),
        frozen=frozenset(draw(st.lists(st.sampled_from(["input", "weight", "bias"]), max_size=2))),
        shared=draw(st.sampled_from([1, 1, 2, 0])),
        keep=Keep(bits=bits, sparsity=draw(st.sampled_from([0.0, 0.0, 0.3, 0.6, 0.95])), block_size=block),
        seed=draw(st.integers(0, 999)),
    )


class Model(nn.Module):
    """Some layers that read one tensor, or one that is called twice; the output is the sum of theirs."""

    def __init__(self, layer: nn.Module, shared: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer, *(copy.deepcopy(layer) for _ in range(shared - 1))])
        self.twice = shared == 0

    def forward(self, x: Tensor, leaf: bool = True) -> Tensor:
        layers = [self.layers[0]] * 2 if self.twice else list(self.layers)
        # A layer that writes to its input gets one of its own if there are several.
        outputs = [layer(x if leaf else x * 1.0) for layer in layers]
        return outputs[0] if len(outputs) == 1 else outputs[0] + outputs[1]


def keep_of(drawn: Drawn, given: Circumstances) -> Keep:
    """Return how the layer keeps its tensor: only some layers drop blocks, the others need bits."""
    without_drops = Keep(bits=given.keep.bits or 4, block_size=max(given.keep.block_size, 8))
    return without_drops if drawn.cut is None else given.keep


def build(drawn: Drawn, given: Circumstances, device: str) -> tuple[Model, Model]:
    """Return the dense model, and a copy of it that is converted."""
    torch.manual_seed(given.seed)
    layer = drawn.make().to(given.dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 1.0)
        if getattr(layer, "running_var", None) is not None:
            layer.running_var.uniform_(0.5, 2)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name not in given.frozen)
    dense = Model(layer.train(given.trained), given.shared).to(device)
    ours = copy.deepcopy(dense)
    convert(ours, rules={f"type:{drawn.operator}": whole(keep_of(drawn, given)), "*": None})
    return dense, ours


def values_of(drawn: Drawn, given: Circumstances, device: str) -> Tensor:
    x = torch.randn(drawn.shape, generator=torch.Generator().manual_seed(given.seed), dtype=torch.float64)
    return FORMS[given.layout](VALUES[given.values](x).to(given.dtype).to(device))


# Comparison.


class Outcome:
    """The output and gradients of a model or the error that it raised, its buffers and the state of the generator."""

    def __init__(self, model: Model, x: Tensor, given: Circumstances) -> None:
        self.error: Exception | None = None
        self.output: Tensor | None = None
        self.gradients: dict[str, Tensor | None] = {}
        torch.manual_seed(given.seed)
        try:
            self.run(model, x, given)
        except Exception as error:
            self.error = error
        self.random = torch.get_rng_state()
        self.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def run(self, model: Model, x: Tensor, given: Circumstances) -> None:
        leaf = x.detach().requires_grad_("input" not in given.frozen and x.is_floating_point())
        autocast = torch.autocast(x.device.type, torch.bfloat16, enabled=given.autocast)
        with autocast:
            y = model(leaf, given.leaf)
        self.output = y.detach().clone()
        if y.requires_grad:
            wanted = {name: p for name, p in (("input", leaf), *model.named_parameters()) if p.requires_grad}
            backward = partial(torch.autograd.grad, y, list(wanted.values()), grad_of(y), allow_unused=True)
            self.gradients = dict(zip(wanted, backward(retain_graph=True), strict=True))
            for first, second in zip(self.gradients.values(), backward(), strict=True):
                assert (first is None) == (second is None)
                if first is not None and not first.is_cuda:
                    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


def check(drawn: Drawn, given: Circumstances, device: str) -> None:
    """Compare a model with its dense form."""
    try:
        dense, ours = build(drawn, given, device)
    except ValueError as error:
        assume("HINT" not in str(error))  # nothing of the layer is compressed, as padding that is no zeros
        raise
    x = values_of(drawn, given, device)
    wide = copy.deepcopy(dense).double()
    in_fp64 = Outcome(copy.deepcopy(wide), x.double(), given).output
    # torch 2.15's oneDNN leaves outputs in 16 bits unwritten on some CPUs. 2.14's reads what is not there, and ends the
    # process, where one value a row is padded and convolved in strides with a weight of one, channels last.
    in_16_bits = given.autocast or given.dtype.itemsize == 2
    unsafe = drawn.operator == "convolution" and (in_16_bits or drawn.shape[-1] == 1)
    with torch.backends.mkldnn.flags(enabled=not unsafe):
        right, found = (Outcome(model, x.clone(memory_format=torch.preserve_format), given) for model in (dense, ours))
    if given.dtype == torch.float64 and isinstance(found.error, TypeError) and "HINT" in str(found.error):
        return  # kernels and codes are of fp32, which is said
    # Autocast to bf16 refuses fp16 where it takes the wider type of two, which layers do not ask it to that see both.
    assume("autocast::prioritize" not in str(right.error))
    assert type(found.error) is type(right.error), (found.error, right.error)
    if right.error is not None:
        return
    assert torch.equal(found.random, right.random)
    u = ROUNDINGS * torch.finfo(torch.bfloat16 if given.autocast else given.dtype).eps
    check_form(found, right, in_fp64)
    if drawn.equal and forced_backend() == "reference":  # kernels round in their own way
        torch.testing.assert_close(found.output, right.output, rtol=0, atol=0, equal_nan=True)
    check_gradients(found, right)
    if x.isfinite().all() and right.output.isfinite().all():
        # Torch's group norm of channels-last fp32 loses digits on CPUs: it subtracts a squared mean. What 16 bits round
        # to zero, fp64 does not.
        loses = drawn.operator == "norm" and given.dtype == torch.float32 and not given.autocast
        check_values(drawn, given, wide, x, (found, in_fp64 if loses else right.output), u)


def check_form(found: Outcome, right: Outcome, in_fp64: Tensor | None) -> None:
    """Compare the form of outputs, whether there is a NaN, and buffers bit for bit.

    Torch's GELU of fp32 on CPUs turns infinity into NaN, in fp64 and kernels it does not: kernels may have a NaN where
    either has. A running mean with an infinity in it may be infinite or NaN, depending on the order of the sum.
    """
    ours, dense = found.output, right.output
    assert (ours.dtype, ours.shape) == (dense.dtype, dense.shape)
    known = [dense] if forced_backend() == "reference" or in_fp64 is None else [dense, in_fp64]
    assert ours.isnan().any() in [output.isnan().any() for output in known]
    if dense.numel():
        strides = [[step for step, size in zip(y.stride(), y.shape, strict=True) if size > 1] for y in (ours, dense)]
        assert strides[0] == strides[1]
    for name, buffer in right.buffers.items():
        actual, exact = found.buffers[name], {"rtol": 0, "atol": 0}
        if forced_backend() != "reference":
            exact = {}
            actual, buffer = (
                b.where(b.isfinite(), torch.nan) if b.is_floating_point() else b for b in (actual, buffer)
            )
        torch.testing.assert_close(actual, buffer, equal_nan=True, **exact)


def check_gradients(found: Outcome, right: Outcome) -> None:
    """Compare which gradients there are, their form, and that none hides what is not finite."""
    assert found.gradients.keys() == right.gradients.keys()
    for name, expected in right.gradients.items():
        actual = found.gradients[name]
        assert (actual is None) == (expected is None), name
        if actual is not None:
            assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), name
            assert not (~expected.isfinite() & actual.isfinite()).any(), name


def check_values(
    drawn: Drawn, given: Circumstances, wide: Model, x: Tensor, outputs: tuple[Outcome, Tensor], u: float
) -> None:
    """Compare outputs, and gradients with those of fp64, of the input without its dropped blocks if some were."""
    found, right = outputs
    # Of contiguous values: torch's own batch normalisation has wrong gradients for one image of one pixel's height.
    layer, exact = copy.deepcopy(wide.layers[0]).cpu(), x.detach().double().cpu().contiguous()
    if any(isinstance(m, torch.nn.Dropout) and 0 < m.p < 1 and m.training for m in layer.modules()):
        return  # draws other numbers in fp64; that its gradients are those of its output is the contract suite's
    grad, keep, times = grad_of(found.output).double().cpu(), keep_of(drawn, given), 2 if given.shared in (0, 2) else 1
    bounds = drawn.bounds(Step(layer, exact, grad, keep, u))
    if "output" in bounds:
        assert_within(found.output, right, times * bounds["output"])
    expected = gradients(layer, exact, grad)
    cut, as_it_is = keep.sparsity > 0, given.layout in ("dense", "offset")
    if cut and as_it_is and "weight" in expected:
        read = exact.to(torch.bfloat16).double() if given.autocast and given.dtype != torch.float64 else exact
        expected["weight"] = gradients(layer, drawn.cut(read, keep) if x.numel() else read, grad)["weight"]
    for name, actual in found.gradients.items():
        kind = name.rpartition(".")[2]
        if actual is None or (cut and kind == "weight" and not as_it_is):
            continue  # which way blocks of other layouts run, the operators' own tests know
        count = times if name == "input" or given.shared == 0 else 1
        # Below the smallest normal number a rounding is a step of all of these, whatever is rounded.
        step = torch.finfo(actual.dtype).smallest_normal * torch.finfo(actual.dtype).eps
        assert_within(
            actual, count * expected[kind], count * (bounds[kind] + u * expected[kind].abs() + step) + 1e-6 * u
        )


def assert_within(actual: Tensor, expected: Tensor, allowed: Tensor) -> None:
    off = (actual.double().cpu() - expected.double().cpu()).abs()
    assert (off <= allowed).all(), (actual, expected, allowed)


@pytest.mark.parametrize(("place", "count"), PLACES)
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_in_any_circumstances(kind: str, place: str, count: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)

    @hypothesis.settings(hypothesis.settings.get_profile("fuzz"), max_examples=count)
    @given(LAYERS[kind](), circumstances())
    def run(drawn: Drawn, given: Circumstances) -> None:
        assume(place == "reference" or given.dtype != torch.float64)  # which kernels do not take
        check(drawn, given, "cuda" if place == "cuda" else "cpu")

    with force_backend("reference" if place == "reference" else "triton"):
        run()
