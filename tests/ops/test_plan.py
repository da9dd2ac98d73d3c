"""What plain eager mode looks up instead of working it out again: it must change no result and see every setting."""

from __future__ import annotations

import inspect
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_actprune import functional
from lightning_actprune.kernels import pack as packs
from lightning_actprune.ops import library, linear, plan
from lightning_actprune.ops.dispatch import force_backend
from lightning_actprune.ops.plan import Setting, input_plan
from lightning_actprune.ops.setting import BlockSetting
from lightning_actprune.ops.weight_grad import choose_method, force_method
from tests import oracle

HALF = 5 * 10**8

VIEWS = {
    "rows": lambda: torch.randn(6, 40),
    "turned-rows": lambda: torch.randn(40, 6).t(),
    "vector": lambda: torch.randn(40),
    "plain": lambda: torch.randn(3, 20, 33),
    "tokens": lambda: torch.randn(3, 20, 33).transpose(1, 2),
    "features": lambda: torch.randn(3, 24, 32).transpose(1, 2),
    "slice": lambda: torch.randn(3, 9, 40)[:, 2:],
    "every-other": lambda: torch.randn(3, 9, 40)[..., ::2],
    "batch-second": lambda: torch.randn(9, 3, 40).transpose(0, 1),
    "batch-second-tokens": lambda: torch.randn(20, 3, 33).permute(1, 2, 0),
    "channels-first": lambda: torch.randn(2, 12, 5, 7).permute(0, 2, 3, 1),
    "no-view": lambda: torch.randn(2, 5, 7, 12).transpose(1, 2),
    "expanded": lambda: torch.randn(1, 9, 40).expand(3, 9, 40),
    "unaligned": lambda: torch.randn(3 * 9 * 40 + 1)[1:].view(3, 9, 40),
    "empty": lambda: torch.randn(0, 9, 40),
}


class Watched(TorchDispatchMode):
    """Any dispatch mode ends plain eager mode."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def run(x, weight, bias, scope):
    x = x.detach().requires_grad_()
    y = functional.linear(x, weight, bias, sparsity=0.6, block_size=11, scope=scope)
    torch.manual_seed(1)
    return [y.detach(), *torch.autograd.grad(y, (x, weight, bias), torch.randn_like(y))]


@pytest.mark.parametrize("scope", ["sample", "token"])
@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_plain_eager_mode_gives_what_the_operators_give(backend, kind, scope):
    x = VIEWS[kind]()
    weight = torch.randn(5, x.shape[-1], requires_grad=True)
    bias = torch.randn(5, requires_grad=True)
    with force_backend(backend):
        assert library.in_plain_eager_mode(x)
        found = run(x, weight, bias, scope)
        with Watched():
            assert not library.in_plain_eager_mode(x)
            expected = run(x, weight, bias, scope)
    assert torch.equal(found[0], F.linear(x, weight, bias))
    assert [torch.equal(a, b) for a, b in zip(found[:3], expected[:3], strict=True)] == [True] * 3
    torch.testing.assert_close(
        found[3], expected[3]
    )  # the bias gradient, which kernel and torch add up in other orders


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_product_and_kernels_read_the_same_copy(autocast):
    x = torch.randn(3, 24, 32).transpose(1, 2)
    weight, read = torch.randn(5, 24, requires_grad=True), []

    def spied(*args):
        found = input_plan(*args)
        return found._replace(launch=lambda rows: read.append(rows) or found.launch(rows))

    with (
        force_backend("triton"),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        mock.patch.object(linear, "input_plan", spied),
        mock.patch.object(F, "linear", wraps=F.linear) as product,
    ):
        functional.linear(x, weight, sparsity=0.5, block_size=8)
    assert read[0].is_contiguous()
    assert product.call_args.args[0].data_ptr() == read[0].data_ptr() != x.data_ptr()


def test_a_plan_is_one_object_per_layout_and_setting():
    x, same = torch.randn(2, 8, 32), BlockSetting(8, "sample")
    with force_backend("triton"):
        first = input_plan(x, Setting(HALF, None, same))
        assert input_plan(torch.randn(2, 8, 32), Setting(HALF, None, same)) is first
        others = [
            input_plan(x, Setting(6 * 10**8, None, same)),
            input_plan(x, Setting(HALF, None, BlockSetting(16, "sample"))),
            input_plan(x, Setting(HALF, None, BlockSetting(8, "token"))),
            input_plan(x, Setting(HALF, None, BlockSetting(8, "sample", "int4"))),
            input_plan(x, Setting(HALF, None, BlockSetting(8, "sample", block_selection="swap"))),
            input_plan(x.half(), Setting(HALF, None, same)),
            input_plan(x, Setting(HALF, torch.float16, same)),
            input_plan(x, Setting(HALF, torch.bfloat16, same)),
            input_plan(torch.randn(2, 32, 8).transpose(1, 2), Setting(HALF, None, same)),
            input_plan(torch.randn(2 * 8 * 32 + 1)[1:].view(2, 8, 32), Setting(HALF, None, same)),
        ]
    assert len({id(plan) for plan in [first, *others]}) == len(others) + 1
    with force_backend("reference"):
        assert input_plan(x, Setting(HALF, None, same)) is None
    assert input_plan(x, Setting(HALF, None, same)) is None  # on a CPU the reference is the automatic choice


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["plain", "cast"])
def test_the_kernels_are_told_format_and_selection(autocast):
    x, blocks = torch.randn(2, 8, 48), BlockSetting(16, "sample", "int4", "unbiased")
    plan.plan_of_layout.cache_clear()
    with force_backend("triton"), mock.patch.object(packs, "plan", wraps=packs.plan) as asked:
        input_plan(x, Setting(HALF, autocast, blocks))
    arguments = inspect.signature(packs.plan.__wrapped__).bind(*asked.call_args.args, **asked.call_args.kwargs)
    assert (arguments.arguments["value_format"], arguments.arguments["block_selection"]) == ("int4", "unbiased")


def test_a_forced_backend_that_cannot_be_is_refused_as_before():
    x, weight = torch.randn(2, 8, 32, dtype=torch.float64), torch.randn(4, 32, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        with force_backend("triton"), pytest.raises(RuntimeError, match=r"cannot take a \(2, 8, 32\) tensor.*float64"):
            functional.linear(x, weight, sparsity=0.5, block_size=8)


def test_method_follows_what_is_forced_and_the_precision_of_products():
    grad_y, values = torch.empty(12544, 1536), torch.empty(5018 * 12, 32)
    before = torch.get_float32_matmul_precision()
    try:
        for precision, expected in (("highest", "gather"), ("high", "unpack"), ("highest", "gather")):
            torch.set_float32_matmul_precision(precision)
            with force_backend("triton"):
                assert choose_method(grad_y, values, 384, transposed=False, block_size=values.shape[1]) == expected
                assert choose_method(grad_y, values, 384, transposed=True, block_size=values.shape[1]) == "unpack"
                for method in ("gather", "unpack"):
                    with force_method(method):
                        assert (
                            choose_method(grad_y, values, 384, transposed=False, block_size=values.shape[1]) == method
                        )
            assert choose_method(grad_y, values, 384, transposed=False, block_size=values.shape[1]) == "reference"
    finally:
        torch.set_float32_matmul_precision(before)


def test_symbolic_sizes_never_reach_the_plans():
    weight = torch.randn(5, 32, requires_grad=True)

    @torch.compile(backend="aot_eager", dynamic=True, fullgraph=True)
    def loss(x):
        return functional.linear(x, weight, sparsity=0.5, block_size=8).square().sum()

    before = plan.plan_of_layout.cache_info()
    for batch in (2, 3):
        loss(torch.randn(batch, 8, 32)).backward()
    assert plan.plan_of_layout.cache_info() == before


def test_tensor_that_a_transform_left_behind():
    left = []
    torch.func.grad(lambda x: left.append(x) or x.square().sum())(torch.randn(2, 8, 32))
    weight = torch.randn(5, 32, requires_grad=True)
    assert not library.in_plain_eager_mode(left[0])
    with force_backend("triton"):
        (found,) = torch.autograd.grad(functional.linear(left[0], weight, sparsity=0.5, block_size=8).sum(), weight)
        x = left[0].detach().clone()
        (expected,) = torch.autograd.grad(functional.linear(x, weight, sparsity=0.5, block_size=8).sum(), weight)
    assert oracle.relative_error(found, expected) == 0
