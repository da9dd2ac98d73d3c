"""The table of operations: errors are as it says, and eager mode and compiled code store the same by it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_actprune.codec.outliers import CheckedQuantize
from lightning_actprune.codec.saved_ops import SAVED_OPS, Use, of_op
from lightning_actprune.compiled.install import CompiledPacking
from lightning_actprune.compiled.marks import Model
from lightning_actprune.config import Keep
from lightning_actprune.operators.readers import use_of
from lightning_actprune.operators.saved import SavedTensorCompression
from tests.compiled.support import Marked, mark, planned, uncached
from tests.support.conversion_models import Calls
from tests.support.marks import only
from tests.support.saving import nodes_of

Function = Callable[..., Tensor]

D = 0.01
"""Largest error of what was saved."""


def weights(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def bounded(slope: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the bound of a function whose derivative has that slope at most."""
    return lambda x, g: slope * D * g.abs()


def of_norm(dims: tuple[int, ...]) -> Callable[[Tensor, Tensor], Tensor]:
    def bound(x: Tensor, g: Tensor) -> Tensor:
        r = x.var(dims, correction=0, keepdim=True).add(1e-5).rsqrt()
        z = (x - x.mean(dims, keepdim=True)) * r
        return 2 * r * D * r * z.abs().amax(dims, keepdim=True) * g.abs().amax(dims, keepdim=True)

    return bound


def of_groups(x: Tensor, g: Tensor) -> Tensor:
    return of_norm((2,))(x.view(8, 1, 64), g.view(8, 1, 64)).view(4, 2, 1).repeat_interleave(4, 1)


ENDS = torch.tensor([8, 8, 20, 32], dtype=torch.int32)
LINEAR: dict[str, tuple[Any, ...]] = {
    "mul": (lambda x, w: x * w, (8, 16)),
    "mm": (lambda x, w: x[0] @ w, (16, 3)),
    "bmm": (torch.bmm, (4, 16, 3)),
    "addmm": (lambda x, b, w: torch.addmm(b, x[0], w), (3,), (16, 3)),
    "baddbmm": (lambda x, b, w: torch.baddbmm(b, x, w), (8, 3), (4, 16, 3)),
    "addbmm": (lambda x, b, w: torch.addbmm(b, x, w), (8, 3), (4, 16, 3)),
    "addmv": (lambda x, b, w: torch.addmv(b, x[0], w), (8,), (16,)),
    "mv": (lambda x, w: x[0] @ w, (16,)),
    "dot": (lambda x, w: torch.dot(x.flatten(), w), (512,)),
    "addr": (lambda x, b, w: torch.addr(b, x.flatten(), w), (512, 3), (3,)),
    "addcmul": (lambda x, b, w: torch.addcmul(b, x, w), (16,), (16,)),
    "convolution": (F.conv1d, (3, 8, 3)),
    "pow": (torch.square,),
    "linalg_vector_norm": (lambda x: 2 * torch.linalg.vector_norm(x, dim=0),),
    "_grouped_mm": (lambda x, w: F.grouped_mm(x.view(32, 16), w.float(), offs=ENDS), (4, 16, 8)),
}
"""Functions, and shapes of parameters: gradients are linear in each tensor saved, so errors of mean zero stay so."""
NOT_LINEAR: dict[str, tuple[Function, Callable[[Tensor, Tensor], Tensor]]] = {
    "pow": (lambda x: x.pow(3), lambda x, g: 3 * (2 * x.abs() * D + D**2) * g.abs()),
    "gelu": (F.gelu, bounded(0.80)),
    "gelu, tanh": (lambda x: F.gelu(x, approximate="tanh"), bounded(0.80)),
    "silu": (F.silu, bounded(0.50)),
    "mish": (F.mish, bounded(0.65)),
    "softplus": (F.softplus, bounded(0.25)),
    "native_layer_norm": (lambda x: F.layer_norm(x, (16,)), of_norm((2,))),
    "native_group_norm": (lambda x: F.group_norm(x, 2), of_groups),
    "native_batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), of_norm((0, 2))),
}
SHAPE_ALONE: dict[str, Function] = {
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "avg_pool3d": lambda x: F.avg_pool3d(x.view(-1, 4, 4, 4), 2),
    "_adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 3),
    "_adaptive_avg_pool3d": lambda x: F.adaptive_avg_pool3d(x.view(-1, 4, 4, 4), 2),
    "max_pool2d_with_indices": lambda x: F.max_pool2d(x, 2),
    "max_pool3d_with_indices": lambda x: F.max_pool3d(x.view(-1, 4, 4, 4), 2),
    "reflection_pad1d": lambda x: F.pad(x.view(-1, 4, 4), [1] * 2, "reflect"),
    "reflection_pad2d": lambda x: F.pad(x.view(-1, 4, 4), [1] * 4, "reflect"),
    "reflection_pad3d": lambda x: F.pad(x.view(-1, 4, 4, 4), [1] * 6, "reflect"),
    "replication_pad1d": lambda x: F.pad(x.view(-1, 4, 4), [1] * 2, "replicate"),
    "replication_pad2d": lambda x: F.pad(x.view(-1, 4, 4), [1] * 4, "replicate"),
    "replication_pad3d": lambda x: F.pad(x.view(-1, 4, 4, 4), [1] * 6, "replicate"),
    "index_add": lambda x: torch.zeros_like(x).index_add(0, torch.arange(len(x)) // 2, x),
}
ELSEWHERE = {"linear", "cudnn_batch_norm", "_fused_rms_norm"}
"""Operations of other devices, types or builds of torch."""


def disturbed_gradient(name: str, example: tuple[Any, ...], x: Tensor, noise: Tensor | None) -> Tensor:
    """Return the gradient of ``x`` if what is saved of it is off by ``noise``; the node of that row reads it."""
    readers: list[str] = []

    def unpack(kept: tuple[Tensor, bool]) -> Tensor:
        tensor, is_x = kept
        if not is_x:
            return tensor
        readers.append(torch._C._current_autograd_node().name())
        return tensor + noise.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    leaf, (function, *shapes) = x.clone().requires_grad_(), example
    address = leaf.untyped_storage()._cdata
    mark = lambda tensor: (tensor.detach(), noise is not None and tensor.untyped_storage()._cdata == address)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(mark, unpack):
        y = function(leaf, *(weights(*shape).to(x.dtype).requires_grad_() for shape in shapes))
    torch.manual_seed(5)
    outer = torch.randn(y.shape, dtype=y.dtype)
    others = [node.variable for node in nodes_of(y) if hasattr(node, "variable")]
    torch.autograd.backward([y], [outer], inputs=others)
    found = [leaf.grad, *(other.grad for other in others if other is not leaf)]
    assert noise is None or readers[0] in of_op(f"aten.{name.split(',')[0]}").node_names
    return torch.cat([grad.flatten() for grad in found if grad is not None])


@pytest.mark.parametrize("name", LINEAR)
def test_linear_gradients_are_right_on_average(name: str):
    dtype, near = (torch.float32, 1e-5) if name == "_grouped_mm" else (torch.float64, 1e-12)
    x, noise = weights(4, 8, 16).to(dtype), (D * weights(4, 8, 16).sin()).to(dtype)
    exact, up, down = (disturbed_gradient(name, LINEAR[name], x, n) for n in (None, noise, -noise))
    assert not torch.equal(up, exact)
    torch.testing.assert_close((up + down) / 2, exact, rtol=near, atol=near)


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_other_gradients_are_off_by_no_more_than_is_said(name: str):
    function, bound = NOT_LINEAR[name]
    x = 2 * weights(4, 8, 16)
    exact = disturbed_gradient(name, (function,), x, None)
    torch.manual_seed(5)
    outer = torch.randn(4, 8, 16, dtype=torch.float64)
    for seed in range(5):
        noise = D * (2 * torch.rand(4, 8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) - 1)
        error = (disturbed_gradient(name, (function,), x, noise) - exact).view(4, 8, 16).abs()
        assert error.max() > 0
        assert (error <= 1.001 * bound(x, outer)).all()


@pytest.mark.parametrize("name", SHAPE_ALONE)
def test_no_value_is_read(name: str):
    x = weights(2, 4, 4, 4)
    exact, made = (disturbed_gradient(name, (SHAPE_ALONE[name],), x, n) for n in (None, torch.full_like(x, 1e30)))
    assert torch.equal(made, exact)


def test_every_row_is_tested_and_names_nodes_and_arguments_of_backward_that_torch_has():
    tested = {name.split(",")[0] for name in (*LINEAR, *NOT_LINEAR, *SHAPE_ALONE)} | ELSEWHERE
    assert tested == {row.name for row in SAVED_OPS if row.inputs in (Use.LINEAR, Use.BOUNDED, Use.SHAPE)}
    names = {Use.QUERY: "query", Use.KEY: "key", Use.VALUE: "value", Use.ATTENDED: "out", Use.BOUNDED: "self, input"}
    names[Use.SHAPE] = "self"
    for row in SAVED_OPS:
        assert all(hasattr(torch._C._functions, node) for node in row.node_names), row
        for backward, uses in row.backward.items():
            for place, name in [(place, names[use]) for place, use in uses.items() if use in names]:
                assert getattr(torch.ops.aten, backward).default._schema.arguments[place].name in name, row


def test_some_powers_and_norms_may_not():
    x = torch.rand(8, requires_grad=True)
    for y in (x.pow(2), x.pow(3), torch.linalg.vector_norm(x), F.gelu(x)):
        assert use_of(y.grad_fn) is not Use.EXACT
    for y in (x.pow(0.5), x.pow(-1), x.pow(4), x.pow(x), torch.linalg.vector_norm(x, 3), torch.sin(x), x / x):
        assert use_of(y.grad_fn) is Use.EXACT


# Eager mode and compiled code.

MODEL = Model(saved=8, query=8, key=8, value=4, attention_out=8, parameter=2, min_values=64, unmarked_layers=True)


def attention(x: Tensor) -> Tensor:
    query, key, value = (x.roll(place, 0).unflatten(-1, (2, 8)).transpose(1, 2) for place in range(3))
    return 2 * F.scaled_dot_product_attention(query, key, value)


def quantized(divide: Function) -> Function:
    """Return a function that divides by a learned step, rounds, and multiplies by the step."""

    def quantize(x: Tensor, step: Tensor) -> Tensor:
        y = divide(x, step).clamp(-128, 127)
        return (y + (y.round() - y).detach()) * step

    return quantize


OTHERS: dict[str, tuple[Any, ...]] = {
    "two activations": (16, lambda x: x[:2] * x[2:]),
    "a square": (16, lambda x, g: x * (x + g), (16,)),
    "gate": (8, lambda x: x * x.mean(1, keepdim=True).sigmoid()),
    "few rows": (16, lambda x: x.flatten(0, 1) @ x.roll(1, 0)[0, :4].T),
    "gamma first": (2, lambda x, g: g * x, (16,)),
    "view of gamma": (2, lambda x, g: x * g.view(1, 1, -1), (16,)),
    "1 + gamma": (2, lambda x, g: x * (1 + g), (16,)),
    "bf16 gamma": (2, lambda x, g: x * g.bfloat16(), (16,)),
    "exp gamma": (2, lambda x, g: x * g.exp(), (16,)),
    "gamma twice": (4, lambda x, g: (x * g).sin() * g, (16,)),
    "sum + gamma x": (2, lambda x, g: torch.addcmul(x.sum(), g, x), (16,)),
    "linear": (2, F.linear, (3, 16)),
    "einsum": (2, lambda x, w: torch.einsum("bnc,co->bno", x, w), (16, 3)),
    "masked": (0, lambda x, g: torch.cat([x.masked_fill(x.detach() > 1, -1e4), x])[:, :4] * g, (16,)),
    "step": (0, quantized(torch.div), (1,)),
    "step, inverted": (0, quantized(lambda x, s: x * (1 / s)), (1,)),
    "step, as a power": (0, quantized(lambda x, s: x * s**-1), (1,)),
    "quotient": (0, torch.div, (16,)),
    "lerp": (0, lambda x, g: torch.lerp(x, x.sin(), g), (16,)),
    "maximum": (0, torch.maximum, (16,)),
    "norm of all": (8, lambda x: torch.linalg.vector_norm(x).expand(4)),
    "cube norm": (0, lambda x: torch.linalg.vector_norm(x, 3, dim=0)),
    "sin": (0, torch.sin),
    "relu": (0, F.relu),
    "attention": (28, attention),
    "softmax": (24, lambda x: (x @ x.roll(1, 0).mT).softmax(-1) @ x.roll(2, 0)),
}
"""Bits that eager mode stores of all values that it packs, functions, and shapes of parameters."""
EXAMPLES = {name: example for name, (_, *example) in OTHERS.items()} | LINEAR
EXAMPLES |= {name: (f,) for name, (f, _) in NOT_LINEAR.items()} | {name: (f,) for name, f in SHAPE_ALONE.items()}
DIFFERENT = (
    {"relu": 1, "softmax": 32, "a square": 8}
    | dict.fromkeys(SHAPE_ALONE, 0)
    | dict.fromkeys(("bmm", "baddbmm", "addbmm"), 8)
)
"""Bits that compiled code stores, where these are not those of eager mode; of a square it computes a factor again."""
DECOMPOSED = "mv", "addmv", "addr", "addcmul"
"""Products in whose parts, by the version of inductor, it may not show that they sum over samples."""


def packed_by(name: str, backend: Any, model: Model = MODEL) -> tuple[float, float, list[list[Tensor]]]:
    """Return the bits of all that eager mode and compiled code pack, and gradients: dense, eager and compiled."""
    function, *shapes = EXAMPLES[name]
    layer, parameters = nn.Linear(16, 16), [nn.Parameter(weights(*shape).float() + 0.5) for shape in shapes]
    dense, marked = (
        Calls(lambda model, x: function(model.layer(x), *parameters), layer=of, parameters=nn.ParameterList(parameters))
        for of in (layer, Marked(layer, mark("linear", 16, model)))
    )

    def gradients(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        x = weights(4, 8, 16).float().requires_grad_()
        y = call(x)
        return list(torch.autograd.grad(y, [x, *dense.parameters()], weights(*y.shape).to(y.dtype)))

    exact = gradients(dense)
    with SavedTensorCompression(dense, Keep(bits=8), min_values=64, parameter_bits=2, attention={"value": 4}) as saving:
        eager = gradients(dense)
    torch._dynamo.reset()
    with uncached(), CompiledPacking() as packing:
        compiled = gradients(torch.compile(marked, backend=backend, fullgraph=True))
    by_eager = sum(
        (row.stored_bytes / row.dense_bytes * 8 * row.dtype.itemsize - 0.5) * row.count for row in saving.rows
    )
    by_compiled = sum(1 if row.how == "signs" else row.bits for row in packing.rows)
    return by_eager, by_compiled, [exact, eager, compiled]


def of_each_use(names: Iterable[str], *backends: Any) -> list[Any]:
    cases = [(name, backend) for backend in backends for name in names if name != "_grouped_mm"]  # of 16 bits alone
    chosen = "mul", "gelu", "avg_pool2d", "relu", "attention", "softmax", "sin", "masked", "step", "exp gamma"
    return only(cases, *((name, backends[0]) for name in chosen), rest="integration")


@pytest.mark.parametrize(("name", "backend"), of_each_use(EXAMPLES, "aot_eager", planned))
def test_eager_mode_and_compiled_code_store_the_same(name: str, backend: Any):
    by_eager, by_compiled, (exact, eager, compiled) = packed_by(name, backend)
    may_differ = name in DIFFERENT or (name in DECOMPOSED and backend is planned and by_compiled != by_eager)
    assert by_compiled == (DIFFERENT.get(name, 8) if may_differ else by_eager)
    assert by_eager == (OTHERS[name][0] if name in OTHERS else by_eager)
    for gradient, other, right in zip(compiled, eager, exact, strict=True):
        if may_differ:
            assert (gradient - right).norm() <= 0.02 * right.norm()
        else:
            assert (gradient - other).norm() <= 0.05 * (other - right).norm() + 1e-6 * right.norm()
    if by_eager in (0, 2):  # errors reach the parameters alone
        assert all(torch.equal(gradient, right) for gradient, right in zip(eager[:3], exact, strict=False))


@pytest.mark.parametrize("name", only(["gelu", "mm", "convolution", "native_group_norm"], "mm", rest="integration"))
def test_compiled_code_stores_what_may_be_the_input_of_a_dense_layer_exactly(name: str):
    for model in (replace(MODEL, unmarked_layers=False), replace(MODEL, saved=0, parameter=0)):
        assert packed_by(name, planned, model)[1] == 0


@pytest.mark.parametrize("backend", only(["aot_eager", "inductor"], "aot_eager", rest="integration"))
def test_compiled_code_warns_of_outliers(backend: str):
    layer, peak = Marked(nn.Linear(16, 16), mark("linear", 16, MODEL)), torch.tensor([1e4] + 15 * [0.0])
    torch._dynamo.reset()
    with uncached(), CompiledPacking(), pytest.warns(UserWarning, match="'operation:mul': None"):
        torch.compile(lambda x: layer(x).add(peak) * x.sum(), backend=backend)(
            weights(4, 8, 16).float().requires_grad_()
        )


def test_it_looks_for_outliers_in_its_first_runs_and_in_some_later_ones():
    quantize, x = CheckedQuantize(32, 8, "mul"), weights(1, 2, 64).float().index_fill(-1, torch.tensor([3]), -1e9)
    for runs, count in ((2, 2), (6, 2), (118, 3), (1, 1)):
        with warnings.catch_warnings(record=True, action="always") as caught:
            for _ in range(runs):
                quantize(x, out=torch.empty(4, 34, dtype=torch.uint8))
        assert len(caught) == count
