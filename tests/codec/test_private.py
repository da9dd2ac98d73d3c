"""Private names of torch: those that are there are used, one that is gone says so, and stand-ins agree with them."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import BaseTorchDispatchMode

from lightning_actprune.codec import private
from lightning_actprune.codec.private import found, refusal, require


def test_refusal_says_what_is_missing(monkeypatch):
    assert private.MISSING == []
    monkeypatch.setattr(private, "MISSING", [])
    assert found("torch.no_such_thing._at_all", 3) == 3
    assert found("no_such_module.name") is None
    assert private.MISSING == ["torch.no_such_thing._at_all", "no_such_module.name"]
    assert refusal("It", ("torch.relu",)) is None
    require("It", ("torch.relu",))
    with pytest.raises(RuntimeError, match=r"It needs torch.no_such_thing._at_all.*HINT"):
        require("It", ("torch.relu", "torch.no_such_thing._at_all"))


STAND_INS = {
    "_any_transform": private.are_functorch_transforms_active,
    "_count_modes": private.len_torch_dispatch_stack,
    "_may_open_hooks": private.saved_tensors_hooks_are_enabled,
    "_task_of_node": private.current_graph_task_id,
}
"""Functions that stand in for a name that may be gone, and what they stand in for."""


def test_stand_ins_agree_wherever_they_are_asked():
    agree = []

    def look(x):
        answers = {name: (getattr(private, name)(), real()) for name, real in STAND_INS.items()}
        agree.append(all((a != -1) == (b != -1) if "task" in name else a == b for name, (a, b) in answers.items()))
        return (x * x).sum()

    x, no_hooks = torch.randn(3, 2), torch.autograd.graph.disable_saved_tensors_hooks("none here")
    for around in (nullcontext(), BaseTorchDispatchMode(), torch.no_grad(), no_hooks):
        with around:
            look(x)
    torch.func.vmap(look)(x)
    torch.func.vmap(torch.func.grad(look))(x)
    x.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: look(t) is t or t, lambda t: t):
        y = x.exp()
    y.register_hook(lambda grad: agree.append(look(grad) is not None))
    y.sum().backward()
    assert agree == [True] * len(agree)
    assert len(agree) >= 8


def test_wrapped_tensors_and_views_are_seen():
    seen = []
    torch.func.vmap(lambda x: seen.append(private.is_functorch_wrapped_tensor(x)) or x)(torch.randn(3, 2))
    x = torch.randn(3, requires_grad=True)
    y = x * x
    y.register_hook(lambda grad: seen.append(private.is_legacy_batchedtensor(grad)))
    torch.autograd.grad(y * 1, x, torch.eye(3), is_grads_batched=True)
    assert seen == [True, True]
    assert not private.is_functorch_wrapped_tensor(x)
    assert not private.is_legacy_batchedtensor(x)
    view = torch.randn(2, 3).view(3, 2)
    made = private.unsafe_view(view, view.shape)
    assert torch.equal(made, view)
    assert not made._is_view()
