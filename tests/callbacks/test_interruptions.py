"""Whatever raises wherever in a fit: the model, torch and the callbacks are as before, and the next fit as any."""

from __future__ import annotations

import copy
import itertools
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from lightning_actprune import ActivationMemoryMonitor, ActivationPruning, ActivationSensitivity
from lightning_actprune.analysis import first_batch, memory, recorder, sensitivity, step_memory
from lightning_actprune.operators import attention, linear, regions, saved
from lightning_actprune.operators.hooks import backward_runs
from tests.support import everything
from tests.support.everything import Everything, assert_nothing_open
from tests.support.helpers import trainer
from tests.support.marks import one_in
from tests.support.ranks import all_traces

ERRORS = [RuntimeError, torch.OutOfMemoryError, KeyboardInterrupt]
AROUND = [
    *("setup", "on_fit_start", "on_validation_start", "on_validation_epoch_start", "on_validation_batch_start"),
    *("on_validation_batch_end", "on_validation_epoch_end", "on_validation_end", "on_train_start"),
    *("on_train_epoch_start", "on_save_checkpoint", "state_dict", "on_train_epoch_end", "on_train_end"),
    *("on_fit_end", "teardown"),
]
"""Hooks of callbacks and modules around the batches: every other one is tried in a module, the rest in a callback."""
IN_BATCHES = [
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end"),
]
"""Those in batches: all are tried in a callback, every other one in a module."""
OWN_AROUND = [
    *("configure_callbacks", "prepare_data", "configure_model", "configure_optimizers", "train_dataloader"),
    *("val_dataloader", "on_validation_model_eval", "on_validation_model_train", "on_validation_model_zero_grad"),
    *("validation_step", "train", "eval", "zero_grad"),
]
"""Hooks of modules alone."""
OWN_IN_BATCHES = [
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "forward", "training_step"),
    *("optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping", "clip_gradients"),
]


class Trap:
    """Raises an error once, in the first call that comes in a step of the training, or in any.

    Args:
        error: The error.
        step: The step, ``None`` for any call.
    """

    def __init__(self, error: type[BaseException], step: int | None = None) -> None:
        self.error, self.step, self.armed = error, step, True
        self.trainer: pl.Trainer | None = None
        self.undo: list[Callable[[], Any]] = []
        """What takes it away."""

    def __call__(self, *args: Any) -> None:
        made = self.trainer
        if self.armed and (self.step is None or (made.training and made.global_step == self.step)):
            self.armed = False
            raise self.error("CUDA out of memory.")  # which tuners know by these words

    def lay(self, at: Any, name: str) -> None:
        """Lie before a method of an object, or a function of a module."""
        own, original = name in vars(at), getattr(at, name)

        def trapped(*args: Any, **kwargs: Any) -> Any:
            self()
            return original(*args, **kwargs)

        setattr(at, name, trapped)
        self.undo.append(lambda: setattr(at, name, original) if own else delattr(at, name))


class Model(Everything):
    """Drops out, and may run a part in an activation checkpoint."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        self.batch_size = 4

    def configure_model(self) -> None:
        pass

    def configure_callbacks(self) -> list[pl.Callback]:
        return []


def ours() -> list[pl.Callback]:
    """The first batch is probed, in the second small tensors, memory and sensitivity are measured, then nothing."""
    measured = ActivationMemoryMonitor(1, verbose=False), ActivationSensitivity([0.5], [4], batches=1, verbose=False)
    return [ActivationPruning("max", sparsity=0.5, verbose=False), *measured]


def fit(model: Model, callbacks: list[pl.Callback], folder: Path, trap: Trap | None = None) -> None:
    torch.manual_seed(1)
    save = ModelCheckpoint(folder, every_n_train_steps=2)
    made = trainer(*callbacks, save, enable_checkpointing=True, default_root_dir=folder, limit_val_batches=1)
    if trap is not None:
        trap.trainer = made
    made.fit(model)


def failed(model: Model, callbacks: list[pl.Callback], trap: Trap, folder: Path) -> Any:
    """Return what a fit that ends in the trap leaves: traces on the model, and the state of the generator."""
    with pytest.raises((trap.error, SystemExit)):
        fit(model, callbacks, folder, trap)
    assert not trap.armed
    for undo in reversed(trap.undo):
        undo()
    return surroundings(model), torch.get_rng_state().tolist()


def surroundings(model: Model) -> Any:
    hooked = [name for name, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    return all_traces(model), hooked, torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()


def outcome(model: Model, callbacks: list[pl.Callback]) -> Any:
    pruning, monitor, sensitivity = callbacks
    rows = pruning.report.to_rows(), pruning.spread, monitor.report.totals(), sensitivity.result.rows
    return rows, surroundings(model)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], Any]:
    """What a fit that nothing ends comes to."""
    model, callbacks = Model(), ours()
    fit(model, callbacks, tmp_path_factory.mktemp("whole"))
    return model.state_dict(), outcome(model, callbacks)


def assert_closed(callbacks: list[pl.Callback]) -> None:
    pruning, monitor, sensitivity = callbacks
    probes = pruning._probe._retention, pruning._probe._energy, pruning._probe._recomputations, pruning._small._probe
    assert {*probes, monitor._meter, monitor._recorder, sensitivity._probe} == {None}
    assert pruning._trials._undo == pruning._progress._layers == []
    assert_nothing_open()


Lay = Callable[[Model, Trap], Any]
"""Lays a trap in a model, or in a callback, which it returns."""


def assert_recovers(
    whole: Any, lay: Lay, error: type[BaseException], step: int | None, folder: Path, first: bool
) -> None:
    """A fit that fails leaves what it leaves without ours, and the next one comes to what any does.

    Args:
        whole: What any fit comes to.
        lay: Lays the trap.
        error: What is raised.
        step: In which step, ``None`` for the first call.
        folder: For checkpoints.
        first: Whether a callback that raises comes before ours.
    """
    left = []
    for callbacks in ([], ours()):
        model, trap = Model(), Trap(error, step)
        initial, other = copy.deepcopy(model.state_dict()), lay(model, trap)
        others = [] if other is None else [other]
        left.append(failed(model, others + callbacks if first else callbacks + others, trap, folder))
    assert left[1] == left[0]
    assert_next_is_as_any(whole, model, callbacks, initial, folder)


def assert_next_is_as_any(whole: Any, model: Model, callbacks: list[pl.Callback], initial: Any, folder: Path) -> None:
    """The fit after one that has failed, with the weights of before, comes to what any does."""
    assert_closed(callbacks)
    model.load_state_dict(initial)
    model.train()  # Lightning does not after a validation that failed
    fit(model, callbacks, folder)
    torch.testing.assert_close(model.state_dict(), whole[0], rtol=0, atol=0)
    assert outcome(model, callbacks) == whole[1]
    assert_closed(callbacks)


@pytest.fixture(autouse=True)
def _interrupts() -> Iterator[None]:
    """Lightning ignores Ctrl-C from an interrupt on."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


def in_module(name: str) -> Lay:
    return lambda model, trap: trap.lay(model, name)


def in_callback(name: str) -> Lay:
    def lay(model: Model, trap: Trap) -> pl.Callback:
        other = pl.Callback()
        trap.lay(other, name)
        return other

    return lay


STEPS = [(KeyboardInterrupt, 0), (torch.OutOfMemoryError, 1), (RuntimeError, 2)]
"""That is in the first, the second and the third batch (see ``ours``)."""


def taking_turns(names: Iterable[str], others: list[Any]) -> Iterable[tuple[str, Any]]:
    """Return each name with one of the others, in turn."""
    return zip(names, itertools.cycle(others), strict=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", AROUND[::2] + OWN_AROUND)
def test_in_a_hook_of_the_module_around_batches(whole, name: str, tmp_path: Path):
    assert_recovers(whole, in_module(name), KeyboardInterrupt, None, tmp_path, True)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "at"), list(taking_turns(IN_BATCHES[::2] + OWN_IN_BATCHES, STEPS)))
def test_in_a_hook_of_the_module_in_a_batch(whole, name: str, at: tuple[type[BaseException], int], tmp_path: Path):
    error, step = at
    assert_recovers(whole, in_module(name), error, step + (name == "on_train_batch_end"), tmp_path, True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*AROUND[1::2], "on_sanity_check_start", "on_sanity_check_end"])
def test_in_another_callback_around_batches(whole, name: str, tmp_path: Path):
    assert_recovers(whole, in_callback(name), torch.OutOfMemoryError, None, tmp_path, False)


@pytest.mark.parametrize(("name", "at"), list(taking_turns(IN_BATCHES, STEPS[::-1])))
def test_in_another_callback_in_a_batch(whole, name: str, at: tuple[type[BaseException], int], tmp_path: Path):
    error, step = at
    assert_recovers(whole, in_callback(name), error, step + (name == "on_train_batch_end"), tmp_path, step == 0)


def on_module(name: str, *, after: bool = False) -> Lay:
    """In a hook that was there before ours."""

    def lay(model: Model, trap: Trap) -> None:
        module = model.get_submodule(name)
        register = module.register_forward_hook if after else module.register_forward_pre_hook
        trap.undo.append(register(trap).remove)

    return lay


def on_gradient(name: str) -> Lay:
    """In backward, when it has the gradient of what a module returns."""

    def lay(model: Model, trap: Trap) -> None:
        def ask(module: Any, args: Any, output: Tensor) -> None:
            if output.requires_grad:  # not in a validation
                output.register_hook(trap)

        trap.undo.append(model.get_submodule(name).register_forward_hook(ask).remove)

    return lay


def on_parameter(accumulated: bool) -> Lay:
    """In backward, when it has the gradient of a parameter."""

    def lay(model: Model, trap: Trap) -> None:
        weight = model.first.weight
        register = weight.register_post_accumulate_grad_hook if accumulated else weight.register_hook
        trap.undo.append(register(trap).remove)

    return lay


def on_recomputation(use_reentrant: bool) -> Lay:
    """In the forward that an activation checkpoint runs in backward."""

    def lay(model: Model, trap: Trap) -> None:
        part = model.spread
        forward = part.forward
        part.forward = lambda x: checkpoint(forward, x, use_reentrant=use_reentrant)
        trap.undo.append(lambda: delattr(part, "forward"))
        trap.undo.append(part[1].register_forward_hook(lambda *_: trap() if backward_runs() else None).remove)

    return lay


def on_optimizer(model: Model, trap: Trap) -> None:
    trap.undo.append(register_optimizer_step_pre_hook(trap).remove)


INSIDE: dict[str, Lay] = {
    "a layer": on_module("late"),
    "behind a layer": on_module("first", after=True),
    "a part": on_module("spread"),
    "a layer in a part": on_module("spread.1"),
    "behind a part": on_module("convolution", after=True),
    "attention": on_module("attention"),
    "the loss": on_module("", after=True),
    "backward": on_gradient("late"),
    "backward of a part": on_gradient("spread"),
    "the gradient of a parameter": on_parameter(accumulated=False),
    "the gradient of a parameter is there": on_parameter(accumulated=True),
    "a reentrant checkpoint": on_recomputation(use_reentrant=True),
    "a checkpoint": on_recomputation(use_reentrant=False),
    "the optimizer": on_optimizer,
    "the loader": lambda model, trap: trap.lay(everything, "sample"),
}


@pytest.mark.parametrize(("name", "at"), one_in(3, taking_turns(INSIDE, STEPS[1:] + STEPS[:1])))
@pytest.mark.filterwarnings("ignore:.*run only inside an activation checkpoint:UserWarning")  # as two of them do
def test_inside_of_a_step(whole, name: str, at: tuple[type[BaseException], int], tmp_path: Path):
    assert_recovers(whole, INSIDE[name], *at, tmp_path, True)


OURS = {
    "conversion": (sys.modules["lightning_actprune.convert"], "_convert_layer", None),
    "attaching": (saved.SavedTensorCompression, "attach", None),
    "restoring": (ActivationPruning, "_restore", None),
    "packing": (linear, "pack_blocks", 0),
    "packing later": (linear, "pack_blocks", 2),
    "packing what is saved": (regions, "pack", 1),
    "packing what is saved later": (regions, "pack", 2),
    "unpacking what was saved": (regions, "unpack", 1),
    "unpacking what was saved later": (regions, "unpack", 2),
    "a projection": (attention.Projection, "linear", 0),
    "a projection while it is measured": (attention.Projection, "linear", 1),
    "opening": (recorder.SavedTensorRecorder, "_follow", 0),
    "opening the second": (recorder.SavedTensorRecorder, "_follow", 1),
    "opening a watcher": (recorder.CallWatcher, "__enter__", 0),
    "opening a meter of a step": (step_memory.StepMemoryRecorder, "moment", 1),
    "seeing what is saved": (recorder.SavedTensorRecorder, "see", 0),
    "seeing what is saved while it is counted": (recorder.SavedTensorRecorder, "see", 1),
    "seeing a call": (recorder.SavedTensorRecorder, "_enter_module", 0),
    "seeing a call end": (recorder.SavedTensorRecorder, "_leave_module", 0),
    "judging energy": (first_batch, "dropped_energy", 0),
    "looking for references": (first_batch.RetentionProbe, "check_alive", 0),
    "deciding": (first_batch.RetentionProbe, "apply", 1),
    "adding up": (first_batch.EnergyProbe, "add_up", 1),
    "the dense forward": (memory, "_dense_forward", 1),
    "a report": (memory.SavedTensorMeter, "report", 1),
    "a result": (step_memory.StepMemoryRecorder, "result", 2),
    "taking up": (step_memory.StepMemoryRecorder, "_on_unpack", 1),
    "selecting": (sensitivity.SensitivityProbe, "_select", 1),
    "measuring": (sensitivity.MeasuredLayer, "measure", 1),
}
"""Where code of this package may run out of memory or be interrupted, with a step in which it runs."""


@pytest.mark.parametrize(("name", "error"), one_in(6, taking_turns(OURS, [torch.OutOfMemoryError, KeyboardInterrupt])))
def test_inside_of_ours(whole, name: str, error: type[BaseException], tmp_path: Path):
    at, method, step = OURS[name]
    model, callbacks, trap = Model(), ours(), Trap(error, step)
    initial = copy.deepcopy(model.state_dict())
    trap.lay(at, method)
    (traces, *others), _ = failed(model, callbacks, trap, tmp_path)
    expected, *same = whole[1][1]
    traces[""] = expected[""]  # which says how far Lightning came
    assert (traces, others) == (expected, same)
    assert_next_is_as_any(whole, model, callbacks, initial, tmp_path)


IN_TRIALS = ["transfer_batch_to_device", "forward", "on_before_backward", "backward", "on_after_backward"]
"""Hooks in the parts of a trial: before a step, in forward, between the two, in backward and after it."""


@pytest.mark.parametrize("name", [*IN_TRIALS, "optimizer_step", "on_train_batch_end"])
@pytest.mark.slow
def test_a_trial_of_a_tuner_that_runs_out_of_memory(whole, name: str, tmp_path: Path, monkeypatch):
    """The fit goes on with what a later batch shows."""
    monkeypatch.chdir(tmp_path)  # where tuners write
    model, callbacks, trap = Model(), ours(), Trap(torch.OutOfMemoryError, int(name == "on_train_batch_end"))
    initial = copy.deepcopy(model.state_dict())
    trap.lay(model, name)
    fit(model, [BatchSizeFinder(steps_per_trial=2, init_val=4, max_trials=2), *callbacks], tmp_path, trap)
    assert not trap.armed
    trap.undo[0]()
    found, expected = outcome(model, callbacks), whole[1]
    assert [row["fqn"] for row in found[0][0] if row["converted"]]
    assert found[1] == expected[1]
    assert_next_is_as_any(whole, model, callbacks, initial, tmp_path)


@pytest.mark.parametrize(
    ("name", "error"),
    list(taking_turns(["forward", "on_before_backward", "on_after_backward", "on_train_batch_end"], ERRORS)),
)
def test_a_trial_of_a_tuner_that_fails(whole, name: str, error: type[BaseException], tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, callbacks, trap = Model(), ours(), Trap(error, int(name == "on_train_batch_end"))
    initial = copy.deepcopy(model.state_dict())
    trap.lay(model, name)
    failed(model, [LearningRateFinder(num_training_steps=3), *callbacks], trap, tmp_path)
    assert_next_is_as_any(whole, model, callbacks, initial, tmp_path)


@pytest.mark.parametrize("name", ["load_state_dict", "on_load_checkpoint"])
def test_in_another_callback_that_loads_a_checkpoint(whole, name: str, tmp_path: Path):
    class Stateful(pl.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"some": "state"}

    model, callbacks = Model(), ours()
    initial, before = copy.deepcopy(model.state_dict()), surroundings(Model())
    fit(model, [*callbacks, Stateful()], tmp_path)
    other, trap = Stateful(), Trap(RuntimeError)
    trap.lay(other, name)
    resumed = Model()
    with pytest.raises(RuntimeError, match="memory"):
        trainer(*callbacks, other, max_epochs=2).fit(resumed, ckpt_path=tmp_path / "epoch=0-step=4.ckpt")
    assert [found[0] for found in surroundings(resumed)[0].values()] == [found[0] for found in before[0].values()]
    assert_next_is_as_any(whole, model, callbacks, initial, tmp_path)


@pytest.mark.parametrize("step", range(3))
def test_a_callback_that_keeps_the_exception_from_ours(whole, step: int, tmp_path: Path):
    """Lightning then tells no other callback that the fit is over; the next one puts in order what that has left.

    Where sensitivity is measured, its callback comes first, as what that has converted is nobody else's.
    """
    model, callbacks, other = Model(), ours(), pl.Callback()
    initial, traps = copy.deepcopy(model.state_dict()), [Trap(RuntimeError, step), Trap(KeyError)]
    traps[0].lay(model, "on_before_backward")
    traps[1].lay(other, "on_exception")
    with pytest.raises(KeyError):
        fit(model, [other, *reversed(callbacks)], tmp_path, traps[0])
    for trap in traps:
        trap.undo[0]()
    model.load_state_dict(initial)
    fit(model, callbacks[::-1], tmp_path)
    torch.testing.assert_close(model.state_dict(), whole[0], rtol=0, atol=0)
    assert outcome(model, callbacks) == whole[1]
    assert_closed(callbacks)


def test_every_hook_of_a_fit_is_tried():
    hooks = {name for name in dir(pl.Callback) if name.startswith("on_") and "test" not in name}
    others = {"on_exception", "on_load_checkpoint", "on_sanity_check_start", "on_sanity_check_end"}
    assert {name for name in hooks if "predict" not in name} - others == {
        name for name in AROUND + IN_BATCHES if name.startswith("on_")
    }
