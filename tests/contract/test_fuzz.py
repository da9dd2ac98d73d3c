"""Random layers in random circumstances: the outputs of the dense layer, and gradients within their bounds.

A run draws the same cases wherever the same modules are loaded; with ``EXPLORE=1`` in the environment, new ones.
"""

from __future__ import annotations

import copy
import os
from functools import partial

import hypothesis
import pytest
import torch
from hypothesis import assume, given
from torch import Tensor

from lightning_actprune.codec.dispatch import force_backend, forced_backend
from tests.support.fuzzed import (
    LAYERS,
    ROUNDINGS,
    Circumstances,
    Drawn,
    Model,
    Step,
    build,
    circumstances,
    gradients,
    keep_of,
    values_of,
)

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


def grad_of(y: Tensor) -> Tensor:
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64).to(y)


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
        expected["weight"] = gradients(layer, drawn.cut(read, keep), grad)["weight"]
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
