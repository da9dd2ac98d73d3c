"""Private names of torch: those that are there are used, one that is gone says so, and stand-ins agree with them."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_actprune.codec import private
from lightning_actprune.codec.private import found, refusal, require


def test_names_that_are_there_are_used():
    assert private.MISSING == []
    assert private.are_functorch_transforms_active is torch._C._are_functorch_transforms_active  # known to the compiler
    assert private.top_saved_tensors_hooks is torch._C._autograd._top_saved_tensors_default_hooks


def test_refusal_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(private, "MISSING", [])
    assert found("torch.no_such_thing._at_all", 3) == 3
    assert found("no_such_module.name") is None
    assert private.MISSING == ["torch.no_such_thing._at_all", "no_such_module.name"]
    assert refusal("It", ("torch.relu",)) is None
    require("It", ("torch.relu",))
    with pytest.raises(RuntimeError, match=r"It needs torch.no_such_thing._at_all.*HINT"):
        require("It", ("torch.relu", "torch.no_such_thing._at_all"))


@pytest.mark.parametrize("name", ["_version", "_cdata", "_forward_hooks"])
def test_without_what_all_rests_on_the_import_fails(name):
    source = Path(private.__file__).read_text().replace(f'"{name}"', '"_of_old"')
    with pytest.raises(ImportError, match=r"lightning_actprune needs \w+\._of_old"):
        exec(compile(source, "private", "exec"), ModuleType("private").__dict__)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


STAND_INS = {
    "_any_transform": lambda: private.are_functorch_transforms_active(),
    "_count_modes": lambda: private.len_torch_dispatch_stack(),
    "_may_open_hooks": lambda: private.saved_tensors_hooks_are_enabled(),
    "_task_of_node": lambda: private.current_graph_task_id() != -1,
}
"""Functions that stand in for a name that may be gone, and what they stand in for."""


def answers() -> list[tuple[object, object]]:
    """Return what each name answers here, and what stands in for it."""
    stand_ins = {name: getattr(private, name) for name in STAND_INS if hasattr(private, name)}
    return [
        (ask(), stand_in() != -1 if name == "_task_of_node" else stand_in())
        for name, stand_in in stand_ins.items()
        for ask in [STAND_INS[name]]
    ]


def test_stand_ins_agree_wherever_they_are_asked():
    seen = []

    def look(x):
        seen.append(answers())
        return (x * x).sum()

    no_hooks = torch.autograd.graph.disable_saved_tensors_hooks("none here")
    for around in (nullcontext(), Mode(), torch.no_grad(), no_hooks):
        with around:
            seen.append(answers())
    torch.func.vmap(look)(torch.randn(3, 2))
    torch.func.vmap(torch.func.grad(look))(torch.randn(3, 2))
    x = torch.randn(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(answers()) or t, lambda t: t):
        y = x.exp()
    y.register_hook(lambda grad: seen.append(answers()))
    y.sum().backward()
    assert len(seen) == 8
    assert all(real == ours for found in seen for real, ours in found)


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


def test_hooks_for_all_modules_are_seen():
    assert not private.any_global_hook()
    handles = [
        nn.modules.module.register_module_forward_pre_hook(lambda *_: None),
        nn.modules.module.register_module_forward_hook(lambda *_: None),
        nn.modules.module.register_module_full_backward_hook(lambda *_: None),
        nn.modules.module.register_module_full_backward_pre_hook(lambda *_: None),
    ]
    for handle in handles:
        assert private.any_global_hook()
        handle.remove()
    assert not private.any_global_hook()
