"""A torch that has a private name no more: what stands in for it agrees with it, or a feature says that it is gone."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_actprune.codec import private
from lightning_actprune.codec.private import found, refusal, require
from lightning_actprune.compiled.scope import why_not
from tests.support.without import EVERYWHERE

C, AUTOGRAD, MODULE = "torch._C.", "torch._C._autograd.", "torch.nn.modules.module."
TOP, TASK, NODE = (
    AUTOGRAD + "_top_saved_tensors_default_hooks",
    C + "_current_graph_task_id",
    C + "_current_autograd_node",
)
TRANSFORMS, MODES = C + "_are_functorch_transforms_active", C + "_len_torch_dispatch_stack"
STACK, LIST = C + "_functorch.peek_interpreter_stack", "torch.utils._python_dispatch._get_current_dispatch_mode_stack"
MEASUREMENTS = "SavedTensorMeter", "StepMemoryRecorder", "SensitivityProbe", "RecomputationProbe"
RECORDERS = {"SavedTensorMeter", "StepMemoryRecorder"}
HOOKS, FAKES, NOTHING = (
    "Quantizing what no layer is known for",
    "Counting what the dense model",
    "Nothing is compressed",
)
WITHOUT: dict[tuple[str, ...], tuple[set[str], str]] = {
    **dict.fromkeys([(TRANSFORMS,), (MODES,), (STACK,), (LIST,), (TASK,)], (set(), "")),
    # Names that have nothing to do with each other are missing together.
    (C + "_functorch.is_functorch_wrapped_tensor", C + "_functorch.is_legacy_batchedtensor"): (set(), ""),
    (C + "_DisableTorchDispatch", "torch.library._scoped_library", "torch.Tensor._fix_weakref"): (set(), ""),
    (C + "_is_tracing",): (set(), ""),
    (C + "_is_tracing", "torch.jit.is_tracing"): (set(), ""),
    (
        "torch.compiler._is_exporting_flag",
        "torch.ops.aten._unsafe_view.default",
        "torch.ops.aten._scaled_dot_product_flash_attention",
        "torch.ops.aten._scaled_dot_product_efficient_attention",
    ): (set(), ""),
    ("torch.utils._python_dispatch.TorchDispatchMode",): (set(), ""),
    (C + "_cuda_getCurrentRawStream", C + "_dispatch_has_kernel_for_dispatch_key"): (set(), ""),
    (C + "_select_batch_norm_backend", C + "_BatchNormBackend.Native"): (set(), ""),
    (AUTOGRAD + "_pop_saved_tensors_default_hooks", AUTOGRAD + "_get_current_graph_task_keep_graph"): (set(), ""),
    (AUTOGRAD + "_push_saved_tensors_default_hooks",): (set(), ""),
    (AUTOGRAD + "_saved_tensors_hooks_is_enabled",): (set(), ""),
    (
        C + "_dynamo.eval_frame.set_code_exec_strategy",
        C + "_dynamo.eval_frame._FrameExecStrategy",
        C + "_dynamo.eval_frame._FrameAction",
    ): (set(), ""),
    ("torch.utils._pytree.tree_leaves",): (set(), ""),
    (
        f"{MODULE}_global_forward_hooks",
        f"{MODULE}_global_forward_pre_hooks",
        f"{MODULE}_global_backward_hooks",
        f"{MODULE}_global_backward_pre_hooks",
    ): (set(), ""),
    (TOP,): (RECORDERS, HOOKS),
    (AUTOGRAD + "_get_sequence_nr",): (set(), HOOKS),
    (C + "_functions.AccumulateGrad._sequence_nr",): (set(), HOOKS),
    (NODE,): ({"StepMemoryRecorder"}, HOOKS),
    ("torch.utils._pytree.tree_map_only",): (set(), FAKES),
    ("torch._subclasses.fake_tensor.FakeTensorMode",): (set(), FAKES),
    # What stands in for the one stands on the other.
    (NODE, TASK): (RECORDERS | {"SensitivityProbe", "RecomputationProbe"}, HOOKS),
    (TRANSFORMS, STACK): (set(), NOTHING),
    (MODES, LIST): (set(), ""),
}
"""Names that are missing, the measurements that cannot be made then, and what a warning says."""


def where(names: tuple[str, ...]) -> list[str]:
    """Return in what a step is tried without these names: what they could matter to."""
    if any(name.startswith((AUTOGRAD, NODE, TASK)) for name in names):
        return [name for name in EVERYWHERE if name not in ("autocast", "compiled")]
    if any(name.startswith(("torch.compiler", "torch.ops")) for name in names):
        return ["plain", "compiled"]
    if any("pytree" in name or "fake" in name for name in names):
        return ["plain", "measured"]
    return ["plain", "autocast"] if names else [*EVERYWHERE]


@pytest.fixture(scope="session")
def outcomes():
    """What becomes of a converted model without these names, and with all of them."""
    gone = [(), *WITHOUT]
    lines = "".join(json.dumps([names, where(names)]) + "\n" for names in gone)
    command = [sys.executable, "-m", "tests.support.without"]
    run = subprocess.run(
        command, input=lines, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    assert run.returncode == 0, run.stderr
    return dict(zip(gone, map(json.loads, run.stdout.splitlines()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("gone", [(), *WITHOUT], ids=lambda names: "+".join(name.rpartition(".")[2] for name in names))
def test_a_step_has_the_right_gradients_without(gone, outcomes):
    refused, warning = WITHOUT.get(gone, (set(), ""))
    outcome, usual = outcomes[gone], outcomes[()]
    assert "error" not in outcome
    assert outcome["losses"] == pytest.approx({name: usual["losses"][name] for name in outcome["losses"]}, rel=1e-4)
    exact = warning == NOTHING
    assert max(outcome["errors"].values()) < (0.02 if exact else 0.1)  # inputs of linear layers are kept in four bits
    assert outcome["converted"] == usual["converted"]
    measured = outcome["measured"]
    for name in MEASUREMENTS if measured else ():
        assert measured[name] == "" if name not in refused else measured[name].startswith(f"{name} needs {gone[0]}")
    if "kept" in measured and warning != FAKES:
        assert measured["kept"][0] == usual["measured"]["kept"][0]
        assert measured["kept"][1] >= usual["measured"]["kept"][1]
    assert len(outcome["warnings"]) == bool(warning), outcome["warnings"]
    assert all(warning in text and "HINT" in text for text in outcome["warnings"])


@pytest.mark.slow
def test_every_name_is_tried(outcomes):
    assert set(outcomes[()]["asked"]) == {name for names in WITHOUT for name in names}


def test_names_that_are_there_are_used():
    assert ([] if why_not() is None else ["torch._functorch.config.joint_custom_pass"]) == private.MISSING
    assert private.are_functorch_transforms_active is torch._C._are_functorch_transforms_active  # known to the compiler
    assert private.top_saved_tensors_hooks is torch._C._autograd._top_saved_tensors_default_hooks


def test_refusal_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(private, "MISSING", [])
    assert found("torch.no_such_thing._at_all", 3) == 3
    assert found("no_such_module.name") is None
    assert private.MISSING == ["torch.no_such_thing._at_all", "no_such_module.name"]
    assert refusal("It", ("torch.relu",)) is None
    require("It", ("torch.relu",))
    with pytest.raises(RuntimeError, match=r"It needs torch.no_such_thing._at_all, which torch .* has not. HINT"):
        require("It", ("torch.relu", "torch.no_such_thing._at_all"))


@pytest.mark.parametrize("name", ["_version", "_cdata", "_forward_hooks"])
def test_without_what_all_rests_on_the_import_fails(name):
    source = Path(private.__file__).read_text().replace(f'"{name}"', '"_of_old"')
    with pytest.raises(ImportError, match=r"lightning_actprune needs \w+\._of_old, which torch"):
        exec(compile(source, "private", "exec"), ModuleType("private").__dict__)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def inside(around):
    """Return what each of the questions answers in ``around``, and what stands in for it."""
    with around:
        return [
            (private.are_functorch_transforms_active(), private._any_transform()),
            (private.len_torch_dispatch_stack(), private._count_modes()),
            (len(private.dispatch_modes()), private._count_modes()),
            (private.saved_tensors_hooks_are_enabled(), private._may_open_hooks()),
            (private.is_tracing(), torch.jit.is_tracing()),
        ]


@pytest.mark.parametrize(
    "around",
    [nullcontext, Mode, torch.no_grad, lambda: torch.autograd.graph.disable_saved_tensors_hooks("none here")],
)
def test_stand_ins_agree_on_surroundings(around):
    assert all(real == ours for real, ours in inside(around()))


def test_stand_ins_agree_in_transforms_and_on_their_tensors():
    seen = []

    def look(x):
        seen.append((x, inside(nullcontext())))
        return (x * x).sum()

    torch.func.vmap(look)(torch.randn(3, 2))
    torch.func.grad(look)(torch.randn(3))
    torch.func.vmap(torch.func.grad(look))(torch.randn(3, 2))
    x = torch.randn(3, requires_grad=True)
    y = x * x
    y.register_hook(lambda grad: seen.append((grad, [])))
    torch.autograd.grad(y * 1, x, torch.eye(3), is_grads_batched=True)
    assert len(seen) == 4
    assert all(real == ours for _, answers in seen for real, ours in answers)
    for given in (*(tensor for tensor, _ in seen), torch.randn(3), torch.empty(0), torch.randn(4, 2)[1:, 1:], x):
        wrapped = private.is_functorch_wrapped_tensor(given) or private.is_legacy_batchedtensor(given)
        assert private._has_no_memory(given) == wrapped


def test_stand_ins_agree_on_autocast():
    for operator in private._NORMS:
        assert private._tried_in_fp32(operator, "cpu") == private._in_fp32(operator, "cpu")


@pytest.mark.gpu
def test_stand_ins_agree_on_a_gpu():
    for operator in private._NORMS:
        assert private._tried_in_fp32(operator, "cuda") == private._in_fp32(operator, "cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        assert private._raw_stream(0) == private.raw_stream(0) != 0
    assert private._raw_stream(0) == private.raw_stream(0)


def test_stand_in_agrees_on_whether_backward_runs():
    answers = []

    def ask(*_):
        answers.append((private.current_graph_task_id() != -1, private._task_of_node() != -1))

    x = torch.randn(3, requires_grad=True)
    x.register_post_accumulate_grad_hook(ask)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: ask() or t, lambda t: ask() or t):
        y = x.exp()
    y.register_hook(ask)
    y.sum().backward()
    assert answers == [(False, False)] + [(True, True)] * 3


def test_stand_ins_agree_on_trees_and_views():
    x, y = torch.randn(2, 3), torch.randn(4)
    for tree in (x, [x, {"a": y, "b": (x, None, 3)}], (), {"only": [y]}):
        assert [id(leaf) for leaf in private._leaves(tree)] == [id(leaf) for leaf in private.tree_leaves(tree)]
    view = x.view(3, 2)
    for made in (private.unsafe_view(view, view.shape), private._copied(view, view.shape)):
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
