"""Classes whose forward is the same code as that of a supported class, and small differences that rule it out."""

from __future__ import annotations

import abc
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_actprune import convert, revert
from lightning_actprune.operators.norm import CompressedLlamaRMSNorm
from lightning_actprune.operators.registry import find_compressed_class, has_same_forward_code, operator_of

LLAMA = "transformers.models.llama.modeling_llama"
NORM = """
class LlamaRMSNorm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), eps

    def forward(self, hidden_states):
        wide = hidden_states.to(torch.float32)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (scale * wide).to(hidden_states.dtype)
"""
"""A stand-in for transformers' class, by its documented behaviour."""


def module_of(text: str, name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update({"torch": torch, "nn": nn, **names})
    exec(compile(text, f"{name}.py", "exec"), vars(module))
    return module


def copy_of(text: str = NORM, **names: Any) -> type[nn.Module]:
    return module_of(text.replace("LlamaRMSNorm", "OurNorm"), "ours", **names).OurNorm


@pytest.fixture
def original(monkeypatch: pytest.MonkeyPatch) -> type[nn.Module]:
    monkeypatch.setitem(sys.modules, LLAMA, module_of(NORM, LLAMA))
    return sys.modules[LLAMA].LlamaRMSNorm


def is_supported(cls: type[nn.Module]) -> bool:
    compressed = find_compressed_class(cls)
    assert compressed is None or issubclass(compressed, CompressedLlamaRMSNorm)
    return compressed is not None


def test_a_copy_becomes_what_the_original_does(original):
    copied = copy_of()
    model = nn.Sequential(original(96), copied(96))
    assert operator_of(copied(8)) == "norm"
    assert [row.fqn for row in convert(model, "balanced").converted] == ["0", "1"]
    assert is_supported(copied)  # its forward is that of the original, whose values others test
    assert isinstance(model[1], copied)
    assert revert(model) == ["0", "1"]
    assert [type(layer) for layer in model] == [original, copied]


def test_one_token_that_runs_and_differs_counts(original):
    for old, new, supported in (
        ("forward(self, hidden_states):", "forward(self, hidden_states: Tensor) -> 'Tensor':", True),
        ("        wide =", "        # In fp32.\n\n        wide =", True),
        ("self.weight * (scale", "(self.weight) * (\n            scale", True),
        ("-1", "-2", False),
        ("-1", "-1.0", False),
        ("keepdim=True", "keepdim=1", False),
        ("keepdim", "dim", False),
        (") + self", ") - self", False),
        ("scale * wide", "wide * scale", False),
        ("square", "abs", False),
        ("torch.rsqrt", "nn.rsqrt", False),
        ("torch.float32", "torch.float64", False),
        ("self.variance_epsilon)", "self.epsilon)", False),
        ("return self.weight", "return self.scale", False),
        ("return", "yield", False),
        ("(self, hidden_states)", "(self, hidden_states, /)", False),
        ("(self, hidden_states)", "(self, hidden_states, factor=1)", False),
        ("        wide", "        global wide\n        wide", False),
        ("def forward", "async def forward", False),
    ):
        assert old in NORM
        assert is_supported(copy_of(NORM.replace(old, new), Tensor=Tensor)) == supported, new


def with_attributes(**attributes: Any) -> Callable[[], type[nn.Module]]:
    return lambda: type("Ours", (copy_of(),), {"forward": forward(), **attributes})


def forward() -> Callable[..., Tensor]:
    return vars(copy_of())["forward"]


DIFFERENT: dict[str, Callable[[], type[nn.Module]]] = {
    "another torch": lambda: copy_of(torch=ModuleType("torch")),
    "a global": lambda: copy_of(mean=1),
    "a property": with_attributes(weight=property(lambda self: 2 * self.scale)),
    "a constant": with_attributes(variance_epsilon=1.0),
    "a call": with_attributes(__call__=lambda self, x: x),
    "an implementation of calls": with_attributes(_call_impl=lambda self, x: x),
    "missing attributes": with_attributes(__getattr__=lambda self, name: 1),
    "all attributes": with_attributes(__getattribute__=lambda self, name: 1),
    "what is set": with_attributes(__setattr__=lambda self, name, value: None),
    "subclasses": with_attributes(__init_subclass__=classmethod(lambda cls: None)),
    "a name of ours": with_attributes(bits=4),
    "a method of ours": with_attributes(keeps=lambda self, x: True),
    "an inherited forward": lambda: type("Ours", (copy_of(),), {}),
    "a wrapper": lambda: with_attributes(forward=functools.wraps(forward())(lambda self, x: 2 * x))(),
    "an object": lambda: with_attributes(forward=functools.partialmethod(forward()))(),
    "a metaclass": lambda: abc.ABCMeta("Ours", (nn.Module,), {"forward": forward()}),
}


def test_the_same_code_that_means_something_else_is_not_supported(original):
    assert is_supported(with_attributes()())
    for what, make in DIFFERENT.items():
        assert not is_supported(make()), what


HELPED = """
class Helped(nn.Module):
    def forward(self, x):
        return self.helped(x) + helper(x)

    def helped(self, x):
        return x
"""


def test_methods_and_functions_that_forward_calls_must_be_the_very_same(original):
    original = module_of(HELPED, "theirs", helper=abs).Helped
    copied = module_of(HELPED, "ours", helper=abs).Helped
    assert not has_same_forward_code(copied, original)  # a method of its own, if one that reads the same
    copied.helped = original.helped
    assert has_same_forward_code(copied, original)
    assert not has_same_forward_code(module_of(HELPED, "ours", helper=round).Helped, original)


def test_layers_that_hold_something_else_stay_dense_with_the_reason(original):
    copied = copy_of()
    rows, learned, whole = copied(8), copied(8), copied(8)
    rows.weight = nn.Parameter(torch.ones(4, 8))
    del learned.variance_epsilon
    learned.variance_epsilon = nn.Parameter(torch.tensor(1e-6))
    model = nn.ModuleList([rows, learned, whole, nn.Linear(64, 64)])
    report = convert(model, "balanced")
    reasons = {row.fqn: row.reason for row in report.skipped}
    assert "`weight`" in reasons["0"]
    assert "`variance_epsilon`" in reasons["1"]
    assert [row.fqn for row in report.converted] == ["2", "3"]


def test_a_forward_that_is_replaced_later_is_compared_again(original, monkeypatch):
    copied = copy_of()
    assert is_supported(copied)
    with monkeypatch.context() as patch:
        patch.setattr(copied, "forward", lambda self, x: x)
        assert not is_supported(copied)
    assert is_supported(copied)
    monkeypatch.setattr(original, "forward", lambda self, x: self.weight * x * self.variance_epsilon)
    assert not is_supported(type("Ours", (nn.Module,), {"forward": original.forward}))
    monkeypatch.setattr(sys.modules[LLAMA], "LlamaRMSNorm", copy_of())
    assert not is_supported(copy_of())
