"""Every way to checkpoint activations that the tests try."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.support.conversion_models import Calls


class OwnFunction(torch.autograd.Function):
    """A reentrant checkpoint as other libraries write their own."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.run = run
        ctx.random, ctx.autocast = torch.get_rng_state(), torch.is_autocast_enabled("cpu")
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), torch.random.fork_rng(), torch.autocast("cpu", enabled=ctx.autocast):
            torch.set_rng_state(ctx.random)
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return None, x.grad, *[None] * (len(ctx.needs_input_grad) - 2)


def region(inner: nn.Module, run: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    """Return what runs ``inner`` in a checkpoint of one kind."""
    return Calls(lambda model, x: run(model.inner, x), inner=inner)


def _selective(inner: nn.Module, x: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.gelu.default])
    return checkpoint(inner, x, use_reentrant=False, context_fn=contexts)


def _early_stop_off(inner: nn.Module, x: Tensor) -> Tensor:
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        return checkpoint(inner, x, use_reentrant=False)


def _nested(module: nn.Module, x: Tensor, outer: bool, inner: bool) -> Tensor:
    return checkpoint(lambda y: checkpoint(module, y, use_reentrant=inner), x, use_reentrant=outer)


# The wrappers of FSDP and Hugging Face are among them or call one of them.
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "reentrant": lambda m: region(m, partial(checkpoint, use_reentrant=True)),
    "non_reentrant": lambda m: region(m, partial(checkpoint, use_reentrant=False)),
    "early_stop_off": lambda m: region(m, _early_stop_off),
    "nested": lambda m: region(m, partial(_nested, outer=False, inner=False)),
    "nested_reentrant": lambda m: region(m, partial(_nested, outer=True, inner=True)),
    "nested_mixed": lambda m: region(m, partial(_nested, outer=True, inner=False)),
    "selective": lambda m: region(m, _selective),
    "wrapper_reentrant": lambda m: checkpoint_wrapper(m, CheckpointImpl.REENTRANT),
    "wrapper": lambda m: checkpoint_wrapper(m, CheckpointImpl.NO_REENTRANT),
    "composable": composable,
    "own": lambda m: region(m, lambda inner, x: OwnFunction.apply(inner, x, *inner.parameters())),
}
