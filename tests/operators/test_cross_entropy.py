"""The last linear layer and its loss in one: values and gradients, what is never held, what is refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_actprune import convert, functional
from lightning_actprune.functional import linear_cross_entropy
from lightning_actprune.operators import cross_entropy
from lightning_actprune.operators.cross_entropy import chunk_rows
from tests.support.oracle import relative_error
from tests.support.saving import saved_tensors

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
each_device = pytest.mark.parametrize("device", DEVICES)
each_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
FEATURES, CLASSES = 24, 101
ROUNDING = {torch.float64: 2**-52, torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_VALUES", 7 * CLASSES)


def made(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, weight, labels, of which every fifth is ignored, and bias."""
    hidden = torch.randn(*shape, FEATURES).to(device, dtype).requires_grad_()
    weight = (0.3 * torch.randn(CLASSES, FEATURES)).to(device, dtype).requires_grad_()
    target = torch.randint(CLASSES, shape, device=device)
    target.view(-1)[::5] = -100
    return hidden, weight, target, torch.randn(CLASSES).to(device, dtype).requires_grad_()


def dense(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:
    """Return what the function is to return, of logits that are all there."""
    logits = F.linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(logits.reshape(-1, weight.shape[0]), target.reshape(-1), **options)
    return loss.view(target.shape) if options.get("reduction") == "none" else loss


def step(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    """Return the loss and the gradients for the leaves that need one, of a gradient that is not 1."""
    needed = [leaf for leaf in leaves if leaf.requires_grad]
    grad = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype, device=loss.device).view(loss.shape)
    return [loss.detach(), *torch.autograd.grad(loss, needed, grad)]


def oracle(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **options: Any) -> list[Tensor]:
    """Return loss and gradients in fp64."""
    leaves = [None if x is None else x.detach().double().cpu().requires_grad_() for x in (hidden, weight, bias)]
    loss = dense(leaves[0], leaves[1], target.cpu(), leaves[2], **options)
    return step(loss, *(leaf for leaf in leaves if leaf is not None))


def check(found: list[Tensor], right: list[Tensor], rounding: float) -> None:
    """Compare with fp64: a few roundings of the type of the products, of values of all sizes added up."""
    assert len(found) == len(right)
    for ours, theirs in zip(found, right, strict=True):
        assert relative_error(ours.double().cpu(), theirs) < 4 * rounding


@each_device
@each_reduction
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
def test_value_and_gradients(dtype, smoothing, reduction, device):
    hidden, weight, target, bias = made(3, 11, dtype=dtype, device=device)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    loss = linear_cross_entropy(hidden, weight, target, bias, **options)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.shape == (target.shape if reduction == "none" else ())
    found = step(loss, hidden, weight, bias)
    assert [x.dtype for x in found[1:]] == [dtype] * 3
    right = oracle(hidden, weight, target, bias, **options)
    check(found, right, ROUNDING[dtype])
    if dtype.itemsize > 2:  # whose loss has the roundings of fp32 alone
        check(found[:1], right[:1], ROUNDING[dtype])


@each_device
@each_reduction
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_decides_about_types_as_in_dense_code(given, dtype, reduction, device):
    hidden, weight, target, bias = made(3, 11, device=device)
    hidden = hidden.detach().to(given).requires_grad_()
    results = []
    with torch.autocast(device, dtype):
        for function in (linear_cross_entropy, dense):
            loss = function(hidden, weight, target, bias, reduction=reduction)
            results.append(step(loss, hidden, weight, bias))
    assert [x.dtype for x in results[0]] == [x.dtype for x in results[1]]
    # The losses are those of the same logits, and gradients the same products of values rounded elsewhere.
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-5)
    check(results[0], oracle(hidden, weight, target, bias, reduction=reduction), ROUNDING[dtype])
    loss = linear_cross_entropy(hidden.double(), weight.double(), target, bias.double())
    with torch.autocast(device, dtype):  # which leaves fp64 alone
        again = linear_cross_entropy(hidden.double(), weight.double(), target, bias.double())
    assert torch.equal(loss, again)


@each_device
@pytest.mark.parametrize("rows", [1, 6, 7, 8, 13, 14, 15])
@each_reduction
def test_chunks_that_are_full_or_not(rows, reduction, device):
    hidden, weight, target, bias = made(rows, device=device)
    assert chunk_rows(CLASSES) == 7
    if rows == 1:
        target.fill_(3)
    found = step(linear_cross_entropy(hidden, weight, target, bias, reduction=reduction), hidden, weight, bias)
    check(found, oracle(hidden, weight, target, bias, reduction=reduction), ROUNDING[torch.float32])


@pytest.mark.parametrize(("values", "rows"), [(1, 1), (64 * CLASSES, 64), (200 * CLASSES, 192), (63 * CLASSES, 63)])
def test_rows_of_a_chunk(values, rows, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_VALUES", values)
    assert chunk_rows(CLASSES) == rows


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 3, 4)])
@pytest.mark.parametrize("turned", [False, True])
def test_shapes_and_strides(shape, turned):
    hidden, weight, target, bias = made(*shape)
    target = target.clamp(min=0)
    if turned:
        hidden = hidden.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
        weight = weight.detach().t().contiguous().t().requires_grad_()
    for reduction in ("mean", "none"):
        loss = linear_cross_entropy(hidden, weight, target, bias, reduction=reduction)
        check(step(loss, hidden, weight, bias), oracle(hidden, weight, target, bias, reduction=reduction), 2**-23)


@each_reduction
@pytest.mark.parametrize("label", [-100, -1, 7, 2 * CLASSES])
def test_ignored_labels(label, reduction):
    hidden, weight, target, _ = made(23)
    target[target == -100] = label
    options = {"reduction": reduction, "ignore_index": label}
    loss = linear_cross_entropy(hidden, weight, target, **options)
    check(step(loss, hidden, weight), oracle(hidden, weight, target, None, **options), 2**-23)


@each_reduction
@pytest.mark.parametrize("rows", [0, 9])
def test_nothing_counts(rows, reduction):
    hidden, weight, target, bias = made(rows)
    target.fill_(-100)
    found, right = (
        step(function(hidden, weight, target, bias, reduction=reduction), hidden, weight, bias)
        for function in (linear_cross_entropy, dense)
    )
    for ours, theirs in zip(found, right, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert found[0].isnan().any() == (reduction == "mean")
    assert not any(grad.any() for grad in found[1:])


@each_reduction
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("row", [0, 3], ids=["ignored", "counted"])
def test_values_that_are_not_finite(row, value, reduction):
    hidden, weight, target, bias = made(9)
    with torch.no_grad():
        hidden[row, 2] = value
    results = [
        step(function(hidden, weight, target, bias, reduction=reduction), hidden, weight, bias)
        for function in (linear_cross_entropy, dense)
    ]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)


@each_reduction
def test_a_class_that_is_masked_out(reduction):
    hidden, weight, target, bias = made(9)
    target[target == 4] = 5
    with torch.no_grad():
        bias[4] = -float("inf")
    found = step(linear_cross_entropy(hidden, weight, target, bias, reduction=reduction), hidden, weight, bias)
    check(found, oracle(hidden, weight, target, bias, reduction=reduction), 2**-23)
    target[1] = 4
    assert linear_cross_entropy(hidden, weight, target, bias, reduction="none")[1] == float("inf")


@each_reduction
@pytest.mark.parametrize("trained", [(True, False), (False, True), (False, False)])
def test_frozen_parts(trained, reduction):
    hidden, weight, target, bias = made(23)
    for leaf, needed in zip((hidden, weight), trained, strict=True):
        leaf.requires_grad_(needed)
    found = step(linear_cross_entropy(hidden, weight, target, bias, reduction=reduction), hidden, weight, bias)
    loss, *grads = oracle(hidden, weight, target, bias, reduction=reduction)
    needed = [grad for grad, does in zip(grads, (*trained, True), strict=True) if does]
    check(found, [loss, *needed], 2**-23)
    bias.requires_grad_(False)
    loss = linear_cross_entropy(hidden, weight, target, bias, reduction=reduction)
    assert loss.requires_grad == any(trained)


@each_reduction
def test_without_gradients_nothing_is_kept(reduction):
    hidden, weight, target, bias = made(23)
    with torch.no_grad(), saved_tensors() as saved:
        loss = linear_cross_entropy(hidden, weight, target, bias, reduction=reduction)
    assert saved == []
    check([loss], oracle(hidden, weight, target, bias, reduction=reduction)[:1], 2**-23)


class Language(nn.Module):
    """A model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(CLASSES, FEATURES), nn.Linear(FEATURES, FEATURES)

    def forward(self, tokens: Tensor, function: Any) -> Tensor:
        hidden = torch.tanh(self.body(self.embedding(tokens)))
        return function(hidden[:, :-1], self.embedding.weight, tokens[:, 1:])


def test_a_weight_shared_with_the_embedding():
    model, tokens = Language(), torch.randint(CLASSES, (3, 12))
    grads = [torch.autograd.grad(model(tokens, f), list(model.parameters())) for f in (linear_cross_entropy, dense)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_loss_inside_a_checkpoint_and_beside_packed_tensors():
    model, tokens = Language(), torch.randint(CLASSES, (3, 12))
    right = torch.autograd.grad(model(tokens, dense), list(model.parameters()))
    region = lambda: checkpoint(model, tokens, linear_cross_entropy, use_reentrant=False)  # noqa: E731
    for ours, theirs in zip(torch.autograd.grad(region(), list(model.parameters())), right, strict=True):
        torch.testing.assert_close(ours, theirs)
    convert(model, rules={"type:saved": {"bits": 2}, "*": None})  # whose hooks must leave the gradients alone
    loss = model(tokens, linear_cross_entropy)
    torch.testing.assert_close(torch.autograd.grad(loss, model.embedding.weight, retain_graph=True)[0], right[0])


@each_reduction
def test_backward_may_run_again(reduction):
    hidden, weight, target, bias = made(23)
    loss = linear_cross_entropy(hidden, weight, target, bias, reduction=reduction).sum()
    first = torch.autograd.grad(loss, (hidden, weight, bias), retain_graph=True)
    second = torch.autograd.grad(2 * loss, (hidden, weight, bias))
    for one, two in zip(first, second, strict=True):
        torch.testing.assert_close(2 * one, two)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, hidden)


@each_reduction
def test_second_derivatives_are_refused(reduction):
    hidden, weight, target, _ = made(5)
    loss = linear_cross_entropy(hidden, weight, target, reduction=reduction).sum()
    with pytest.raises(RuntimeError, match=r"Second derivatives through linear_cross_entropy.*HINT: compute `F\.cross"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_transforms_and_tracing_see_the_dense_loss():
    hidden, weight, target, _ = made(9)
    found = torch.func.grad(lambda x: linear_cross_entropy(x, weight.detach(), target))(hidden.detach())
    right = torch.autograd.grad(dense(hidden, weight, target), hidden)[0]
    torch.testing.assert_close(found, right)
    each = torch.func.vmap(lambda x: linear_cross_entropy(x, weight, target, reduction="none"))(hidden.detach()[None])
    torch.testing.assert_close(each[0], dense(hidden, weight, target, reduction="none"))
    frozen = weight.detach()  # which traced code has as a constant
    traced = torch.jit.trace(lambda x: linear_cross_entropy(x, frozen, target), hidden.detach())
    torch.testing.assert_close(traced(hidden), dense(hidden, weight, target))


@pytest.mark.slow
@each_reduction
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_it_is_the_same(autocast, reduction):
    hidden, weight, target, bias = made(3, 11)
    around = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    with around:
        found = compiled(hidden, weight, target, bias, reduction=reduction)
        right = linear_cross_entropy(hidden, weight, target, bias, reduction=reduction)
    for ours, theirs in zip(step(found, hidden, weight, bias), step(right, hidden, weight, bias), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class Live(TorchDispatchMode):
    """Notes the most values of a floating-point tensor that an operation returns, and the most bytes in use."""

    def __init__(self) -> None:
        super().__init__()
        self.values = self.bytes = 0
        self._sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for leaf in (leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)):
            self.values = max(self.values, leaf.numel() * leaf.is_floating_point())
            self._sizes[StorageWeakRef(leaf.untyped_storage())] = leaf.untyped_storage().nbytes()
        self._sizes = {key: nbytes for key, nbytes in self._sizes.items() if not key.expired()}
        self.bytes = max(self.bytes, sum(self._sizes.values()))
        return found


@each_reduction
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_no_tensor_has_a_value_for_each_row_and_class(smoothing, reduction):
    hidden, weight, target, bias = made(20, 50)
    with Live() as mode, torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, target, bias, reduction=reduction, label_smoothing=smoothing)
        step(loss, hidden, weight, bias)
    assert mode.values == hidden.numel()  # of weight and chunk are less
    # A chunk in fp32 and 16 bits. Hidden states and weight in 16 bits and their gradients, twice where they are scaled.
    chunk, inputs = 7 * CLASSES, hidden.numel() + weight.numel() + CLASSES
    assert mode.bytes < 6 * chunk + 10 * inputs + 64 * target.numel()
    assert mode.values < target.numel() * CLASSES / 4
    with Live() as mode:
        dense(hidden, weight, target, bias)
    assert mode.values == target.numel() * CLASSES  # the mode sees what it must judge
    assert mode.bytes > 8 * mode.values


@pytest.mark.parametrize(("autocast", "width"), [(False, 4), (True, 2)])
def test_what_is_kept(autocast, width):
    hidden, weight, target, bias = made(20, 50)
    with saved_tensors() as saved, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        linear_cross_entropy(hidden, weight, target, bias)
    assert sum(x.nbytes for x in saved) == width * hidden.numel() + 4 * (weight.numel() + bias.numel()) + 8
    with saved_tensors() as saved, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        linear_cross_entropy(hidden, weight, target, bias, reduction="none")
    given = {x.untyped_storage().data_ptr() for x in (hidden, weight, target, bias)}
    assert {x.untyped_storage().data_ptr() for x in saved} == given


@pytest.mark.gpu
@each_reduction
def test_peak_on_a_gpu(reduction, monkeypatch):
    rows, features, classes, chunk = 2**14, 256, 2**15, 2**24
    monkeypatch.setattr(cross_entropy, "CHUNK_VALUES", chunk)
    hidden = torch.randn(rows, features, device="cuda", requires_grad=True)
    weight = torch.randn(classes, features, device="cuda", requires_grad=True)
    target = torch.randint(classes, (rows,), device="cuda")

    def run() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = linear_cross_entropy(hidden, weight, target, reduction=reduction)
        loss.sum().backward()

    run()  # what libraries allocate once
    hidden.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    added = torch.cuda.max_memory_allocated() - before
    # A chunk in fp32 and in 16 bits; gradients, and weight and hidden states in 16 bits; some vectors.
    assert added < 6 * chunk + 8 * (weight.numel() + hidden.numel()) + 2**22
    assert added < rows * classes * 4 / 4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_over_many_chunks_are_as_exact_as_one_product(dtype):
    hidden, weight, target, bias = made(7 * 300, dtype=dtype, device="cuda")
    found = step(linear_cross_entropy(hidden, weight, target, bias), hidden, weight, bias)
    exact = oracle(hidden, weight, target, bias)
    torch_s = step(dense(hidden, weight, target, bias), hidden, weight, bias)
    for ours, theirs, right in zip(found[1:], torch_s[1:], exact[1:], strict=True):
        assert relative_error(ours.double().cpu(), right) < 2 * relative_error(theirs.double().cpu(), right)


def test_it_is_a_function_of_the_package():
    assert functional.linear_cross_entropy is linear_cross_entropy


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"target": torch.zeros(5, dtype=torch.int32)}, TypeError, r"`target` must hold classes in torch.int64, got t"),
        ({"target": torch.zeros(5, CLASSES)}, TypeError, "probabilities of classes are for F.cross_entropy"),
        ({"target": torch.zeros(4, dtype=torch.int64)}, ValueError, r"`target` must have a class for each row .*\[5\]"),
        ({"hidden": torch.zeros(5, FEATURES, dtype=torch.int64)}, TypeError, "must be floating-point tensors. HINT"),
        ({"hidden": torch.zeros(5, FEATURES).bfloat16()}, TypeError, "must be one unless autocast makes them one. HIN"),
        ({"hidden": torch.zeros(5, 3)}, ValueError, r"`weight` \[classes, features\], got \[5, 3\]"),
        ({"hidden": torch.zeros(())}, ValueError, r"`hidden` must be \[..., features\]"),
        ({"weight": torch.zeros(FEATURES)}, ValueError, "HINT: `weight` is that of an nn.Linear"),
        ({"bias": torch.zeros(3)}, ValueError, rf"`bias` must be \[classes\], \[{CLASSES}\], got \[3\]. HINT"),
        ({"reduction": "max"}, ValueError, '`reduction` must be "mean", "sum" or "none", got \'max\'. HINT'),
        ({"label_smoothing": 1.5}, ValueError, r"`label_smoothing` must be in \[0, 1\], got 1.5. HINT"),
    ],
)
def test_refusals(changes, error, text):
    hidden, weight, target, bias = made(5)
    given = {"hidden": hidden, "weight": weight, "target": target, "bias": bias} | changes
    with pytest.raises(error, match=text):
        linear_cross_entropy(**given)


def test_a_sharded_weight_is_refused(monkeypatch):
    class Sharded(Tensor):
        pass

    monkeypatch.setattr(cross_entropy, "DTensor", Sharded)
    hidden, weight, target, _ = made(5)
    assert issubclass(DTensor, Tensor)
    with pytest.raises(TypeError, match=r"`weight` must be a plain tensor, got a DTensor. HINT: .*full_tensor\(\)`"):
        linear_cross_entropy(hidden, weight.detach().as_subclass(Sharded), target)
