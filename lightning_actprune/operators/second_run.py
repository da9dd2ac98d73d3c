"""What makes the second run of a module compute what its first run did, and what finds out that it does not.

A module that runs again in backward (``operators.recompute``) has to compute the same twice. ``FirstRun`` notes what
the first run began with, and puts it back around the second run:

- buffers, with the values that they had before the first run, also if the module writes to them and reads them
  afterwards (codebooks, counters, running statistics), or somebody else does between both runs. The second run gets
  copies, so the module's own buffers move once a step;
- parameters that somebody exchanged for the first run (``torch.func.functional_call``), and ``training`` flags;
- the choice of attention kernels (``torch.nn.attention.sdpa_kernel``);
- the generators of Python and NumPy. ``torch.utils.checkpoint`` restores torch's own, and autocast.

Somebody may write to a parameter between both runs. Then the second run raises an error, as autograd does for the dense
module. So it does where buffers are written to for the first time in a run that is not looked at: there is no copy.

A module may also depend on what nothing here can put back: a cache of keys and values, an attribute that another module
writes, a counter. So one run of each module is compared with its second run. Both get the exact inputs, and all tensors
that they save for backward must be equal, up to rounding in kernels without a fixed order of summation. 64 sums stand
for the values of each tensor, so the comparison keeps no tensor. Exact inputs take memory, so the modules that quantize
them take turns, two in a step, and none in the second. A module inside of one of torch's checkpoints is not compared:
it runs first in forward and in backward, and has to store the same both times.
"""

from __future__ import annotations

import functools
import pickle
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import inf
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.cuda import is_current_stream_capturing
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointError

from lightning_actprune.codec.private import len_torch_dispatch_stack, top_saved_tensors_hooks
from lightning_actprune.operators.hooks import explain

SUMS = 64
"""Sums that stand for the values of a tensor."""
PART = 2**22
"""Values that are added up at once, in fp64."""
NOISE, NOISE_16 = 2**-13, 2**-6
"""Largest difference of two runs, relative to the values, for which the order of summation in kernels may account; with
values in 16 bits."""
FEW = 4
"""Integers up to which a tensor may be the seed of an attention without dropout, which is memory as it was found."""
MASKED, MASKED_SHARE = 1e4, 1e-3
"""Least size of a value that masks what it is added to, and least share of such values in a mask."""
EVERY = 128
"""Besides the first, second, fourth, ... run, one run in so many is looked at in full."""
_CURES = (
    "HINT: let the module run once, by a rule of `None` for it. If its inputs decide shapes or branches, "
    "`Recompute(bits=None)` keeps them exactly. A cache of keys and values has to be off (`use_cache=False`)."
)


class Habits:
    """What runs of a module have shown of it, in one training mode; a copy or a pickle of it has seen nothing.

    Looking at everything takes as long as some launches. It is done in the first, second, fourth, ... run and in every
    128th one.
    """

    def __init__(self) -> None:
        self.runs, self.modules = 0, 0
        self.draws, self.compared = False, False
        self.masks: set[int] = set()
        """Numbers of arguments that have held an additive mask."""
        self.writers: set[int] = set()
        """Numbers of modules in it whose buffers are written to before backward, perhaps only every other time."""

    def looks(self, modules: int) -> bool:
        """Count a run of a module that has so many inside, and return whether it is looked at in full."""
        self.runs += 1
        changed, self.modules = modules != self.modules, modules
        return changed or self.runs % EVERY == 0 or self.runs & (self.runs - 1) == 0

    def __reduce__(self) -> tuple[type[Habits], tuple[()]]:
        return Habits, ()


class _Buffer(NamedTuple):
    """A buffer before the first run.

    Args:
        tensor: The buffer itself.
        version: How often it was written to.
        values: A copy, if one was made.
    """

    tensor: Tensor | None
    version: int
    values: Tensor | None


class _Parameter(NamedTuple):
    """A parameter after the first run."""

    tensor: Tensor
    version: int


class FirstRun:
    """The first run of a module, and what its second run needs to compute the same.

    Args:
        module: The module.
        name: Its name in the model, for errors.
        habits: What its runs have shown before, by training mode.
        turn: How many runs come before the one that is compared, ``None`` if none is to be.
    """

    def __init__(self, module: nn.Module, name: str, habits: dict[bool, Habits], turn: int | None) -> None:
        self._who = f"{name!r} ({type(module).__name__.removeprefix('Recomputed')})"
        self._modules = [module]
        for inner in self._modules:  # the list grows; torch's own walk takes ten times as long
            self._modules += [child for child in inner._modules.values() if child is not None]
        self._habits = habits.setdefault(module.training, Habits())
        self._looks = self._habits.looks(len(self._modules))
        waits = turn is None or self._habits.compared or self._habits.runs <= turn
        self.compares = not waits and _may_look_at_values()
        """Whether the second run is compared with this one, for which both must have the exact inputs."""
        self._training = [inner.training for inner in self._modules]
        self._buffers: list[tuple[int, nn.Module, dict[str, _Buffer]]] = []
        self._parameters: list[tuple[nn.Module, str, _Parameter]] = []
        self._attention = _attention_kernels()
        self._generators: tuple[Any, Any] | None = None
        self._sums: list[Tensor | None] = []
        self._narrow = False
        """Whether values in 16 bits are saved."""

    def is_mask(self, number: int, x: Tensor) -> bool:
        """Return whether argument ``number``, which is ``x`` now, has ever held an additive mask, as T5's biases do.

        Its large values would take all steps of their blocks, and leave none for what is not masked.
        """
        masks = self._habits.masks
        asks = self._looks and number not in masks and _may_look_at_values()
        if asks and bool((x.detach().abs() >= MASKED).float().mean() > MASKED_SHARE):
            masks.add(number)
        return number in masks

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Run the module for the first time in here."""
        generators = python_generators() if self._looks or self._habits.draws else None
        self._note_buffers()
        pack, unpack = _hooks_of_checkpoint()
        with torch.autograd.graph.saved_tensors_hooks(
            self._summing(pack, self._sums) if self.compares else pack, self._naming(unpack)
        ):
            try:
                yield
            except RuntimeError as error:
                explain(error)
                raise
        self._find_written_buffers()
        self._note_generators(generators)
        self._parameters = [
            (inner, name, _Parameter(parameter, parameter._version))
            for inner in self._modules
            for name, parameter in inner._parameters.items()
            if parameter is not None and type(parameter) in _PLAIN
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Run the module again in here."""
        with ExitStack() as stack:
            stack.callback(self._restore_training())
            stack.callback(self._exchange_parameters())
            stack.callback(self._exchange_buffers())
            if self._generators is not None:
                stack.callback(set_python_generators, python_generators())
                set_python_generators(self._generators)
            if self._attention != _attention_kernels():
                stack.enter_context(sdpa_kernel(list(self._attention)))
            yield

    def run_again(self, run: Callable[[], Any]) -> Any:
        """Return what ``run`` does: the second run, from the state of the first.

        Raises:
            RuntimeError: If the second run fails or does not compute the same; it names the module.
        """
        with self.restored():
            try:
                return self._compared(run) if self.compares else run()
            except Exception as error:
                self._name(error)
                raise

    # === Comparison of both runs ==========================================================================

    def _compared(self, run: Callable[[], Any]) -> Any:
        """Return what ``run`` does, which keeps tensors for backward, and compare these with those of the first run."""
        sums = list[Tensor | None]()
        pack, unpack = _hooks_of_checkpoint()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._summing(pack, sums), unpack):
                return run()
        finally:  # torch ends the second run with an exception
            self._compare(sums)

    def _compare(self, second: list[Tensor | None]) -> None:
        first, self.compares = self._sums, False
        if len(second) < len(first):  # torch raises an error, or the second run has
            return
        noise = NOISE_16 if self._narrow else NOISE
        for one, other in zip(first, second, strict=False):
            if not _are_equal(one, other) and _difference(one, other) > noise:
                self._refuse(
                    "computes something else when it runs again in backward: it depends on what this run, or another "
                    "module, has changed since (a cache, an attribute, a counter, a random generator of its own)"
                )
        self._habits.compared = True
        self._sums = []

    def _summing(self, pack: Callable[[Tensor], Any], sums: list[Tensor | None]) -> Callable[[Tensor], Any]:
        """Return a hook that notes sums of each saved tensor before ``pack``."""

        def noting(tensor: Tensor) -> Any:
            sums.append(_sums_of(tensor))
            self._narrow |= tensor.dtype in (torch.float16, torch.bfloat16)
            return pack(tensor)

        # Others tell by its module that torch's checkpoint keeps nothing of what is saved.
        noting.__module__ = pack.__module__
        return noting

    # === Errors ===========================================================================================

    def _naming(self, unpack: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the hook ``unpack``, whose errors name the module."""

        def naming(holder: Any) -> Any:
            try:
                return unpack(holder)
            except Exception as error:
                self._name(error)
                raise

        return naming

    def _name(self, error: Exception) -> None:
        """Raise an error that names the module in place of ``error``, where torch does not need ``error`` itself."""
        if isinstance(error, CheckpointError):
            self._refuse(f"does not save the same tensors when it runs again in backward ({_first_line(error)})", error)
        ends = type(error).__module__ == CheckpointError.__module__  # torch ends the second run with an exception
        if not ends and not isinstance(error, (NamedError, torch.OutOfMemoryError)):
            self._refuse(f"fails when it runs again in backward: {error}", error)

    def _refuse(self, reason: str, error: BaseException | None = None) -> NoReturn:
        raise NamedError(f"Module {self._who} {reason}. {_CURES}") from error

    # === Parameters and flags =============================================================================

    def _restore_training(self) -> Callable[[], None]:
        changed = [
            (inner, inner.training)
            for inner, training in zip(self._modules, self._training, strict=True)
            if inner.training != training
        ]
        for inner, training in changed:
            inner.training = not training

        def undo() -> None:
            for inner, training in changed:
                inner.training = training

        return undo

    def _exchange_parameters(self) -> Callable[[], None]:
        """Have the module compute with the parameters of its first run; return how to undo that."""
        exchanged = []
        for inner, name, (parameter, version) in self._parameters:
            now = inner._parameters.get(name)
            if parameter._version != version:
                raise NamedError(
                    f"Parameter {name!r} of {type(inner).__name__} in module {self._who}, which runs again in "
                    "backward, has been modified by an inplace operation since its forward. HINT: call backward before "
                    "the optimizer steps, or whatever else writes to weights."
                )
            if now is not parameter and type(now) in _PLAIN:
                exchanged.append((inner, name, now))
                inner._parameters[name] = parameter  # type: ignore[assignment]

        def undo() -> None:
            for inner, name, now in exchanged:
                inner._parameters[name] = now

        return undo

    # === Buffers ==========================================================================================

    def _note_buffers(self) -> None:
        """Note the buffers before the first run, with copies of all, or where some were written to before."""
        for number, inner in enumerate(self._modules):
            before = {}
            for name, buffer in inner._buffers.items():
                copies = type(buffer) is Tensor and (self._looks or number in self._habits.writers)
                values = buffer.detach().clone() if copies and buffer is not None else None
                before[name] = _Buffer(buffer, 0 if buffer is None else buffer._version, values)
            self._buffers.append((number, inner, before))

    def _find_written_buffers(self) -> None:
        """Have copies made of the buffers that the first run has written to, in later runs too."""
        for number, inner, before in self._buffers:
            for name, noted in before.items():
                if not _is_written(inner, name, before):
                    continue
                if noted.values is None:
                    self._refuse(f"writes to its buffer {name!r} in run {self._habits.runs}, and did not before")
                self._habits.writers.add(number)
        self._buffers = [noted for noted in self._buffers if noted[2] or noted[1]._buffers]

    def _exchange_buffers(self) -> Callable[[], None]:
        """Have the module begin with the buffers of its first run; return how to undo that."""
        exchanged = []
        for number, inner, before in self._buffers:
            buffers = {}
            for name, noted in before.items():
                buffers[name] = noted.tensor
                if not _is_written(inner, name, before):
                    continue
                if noted.values is None:
                    raise NamedError(
                        f"Buffer {name!r} of {type(inner).__name__} in module {self._who}, which runs again in "
                        "backward, has been modified by an inplace operation since its forward. HINT: write to it "
                        "after backward."
                    )
                self._habits.writers.add(number)
                buffers[name] = noted.values.clone()
            if buffers.keys() != inner._buffers.keys() or any(
                buffers[name] is not now for name, now in inner._buffers.items()
            ):
                exchanged.append((inner, dict(inner._buffers)))
                inner._buffers.clear()
                inner._buffers.update(buffers)

        def undo() -> None:
            for inner, now in exchanged:
                inner._buffers.clear()
                inner._buffers.update(now)

        return undo

    # === Generators of Python and NumPy ===================================================================

    def _note_generators(self, before: tuple[Any, Any] | None) -> None:
        """Keep the states before the first run if it has drawn numbers."""
        habits = self._habits
        if before is not None and not habits.draws and pickle.dumps(before) != pickle.dumps(python_generators()):
            habits.draws = True
            if habits.runs > 1:
                warnings.warn(
                    f"Module {self._who} draws random numbers from a generator of Python or NumPy in its run "
                    f"{habits.runs}, and did not in those before that were looked at. Where it did in between, its "
                    "second run in backward drew others, and gradients were off. HINT: draw in torch, or keep it from "
                    "running again by a rule of `None`.",
                    stacklevel=2,
                )
        if habits.draws:
            self._generators = before


class NamedError(RuntimeError):
    """The second run of a module cannot be its first one over again; the text names the module."""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].removeprefix("torch.utils.checkpoint: ").rstrip(".")


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _difference(one: Tensor | None, other: Tensor | None) -> float:
    """Return the size of the difference of two tensors, by their sums, relative to ``one``; infinity without sums."""
    if one is None or other is None:
        return inf
    return float(((one - other)[:-1].norm() / one[-1]).nan_to_num(inf))


_PLAIN = (Tensor, nn.Parameter)
"""Types of parameters that autograd knows by themselves; a strategy exchanges others as it likes."""


def _is_written(module: nn.Module, name: str, before: dict[str, _Buffer]) -> bool:
    """Return whether a buffer has been written to.

    Torch does not count that of running statistics, but that of their counter, where there is one.
    """
    running = name in ("running_mean", "running_var")
    if running and module.training and getattr(module, "track_running_stats", False):
        return before[name].tensor is not None
    counted = [before[name], *([before["num_batches_tracked"]] if running and "num_batches_tracked" in before else [])]
    return any(each.tensor is not None and each.tensor._version != each.version for each in counted)


_count_modes = functools.partial(len_torch_dispatch_stack)
"""The number of dispatch modes; a simulation hides its own from who asks by the usual name."""


def _may_look_at_values() -> bool:
    """Return whether there are values: not in a simulation, nor where a CUDA graph is made, and nobody may wait."""
    captured = torch.cuda.is_initialized() and is_current_stream_capturing()  # type: ignore[no-untyped-call]
    return not captured and _count_modes() == 0


def _hooks_of_checkpoint() -> tuple[Callable[..., Any], Callable[..., Any]]:
    hooks = top_saved_tensors_hooks(False)
    assert hooks is not None  # torch's checkpoint has put them there
    return hooks


def _sums_of(tensor: Tensor) -> Tensor | None:
    """Return sums of the values of ``tensor`` by their place modulo ``SUMS``, and its norm; ``None`` of what has none.

    Values that are not finite count as zero.
    """
    if type(tensor) not in _PLAIN or tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        return None
    if not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= FEW:
        return None
    values = tensor.detach().resolve_conj()
    for dim, (size, stride) in enumerate(zip(values.shape, values.stride(), strict=True)):
        if stride == 0 and size > 1:  # one value in many places
            values = values.narrow(dim, 0, 1)
    if values.is_complex():
        values = torch.view_as_real(values)
    if values.is_floating_point() and values.itemsize == 1:
        values = values.view(torch.uint8)
    sums, squares = values.new_zeros(SUMS, dtype=torch.float64), values.new_zeros(1, dtype=torch.float64)
    for part in torch.split(values.reshape(-1), PART):
        part = part.double().nan_to_num(0.0, 0.0, 0.0)
        whole = part.numel() // SUMS * SUMS
        sums += part[:whole].view(-1, SUMS).sum(0)
        sums[: part.numel() - whole] += part[whole:]
        squares += part.square_().sum()
    return torch.cat([sums, squares.sqrt()])


def _attention_kernels() -> tuple[SDPBackend, ...]:
    """Return the kernels that attention may choose from."""
    cuda: Any = torch.backends.cuda
    allowed = (
        (SDPBackend.FLASH_ATTENTION, cuda.flash_sdp_enabled()),
        (SDPBackend.EFFICIENT_ATTENTION, cuda.mem_efficient_sdp_enabled()),
        (SDPBackend.MATH, cuda.math_sdp_enabled()),
        (SDPBackend.CUDNN_ATTENTION, cuda.cudnn_sdp_enabled()),
    )
    return tuple(kernel for kernel, enabled in allowed if enabled)


def python_generators() -> tuple[Any, Any]:
    """Return the states of the random generators of Python and of NumPy."""
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else numpy.get_state()


def set_python_generators(states: tuple[Any, Any]) -> None:
    """Let the random generators of Python and of NumPy go on from what ``python_generators`` has returned."""
    own, other = states
    random.setstate(own)
    if other is not None:
        sys.modules["numpy.random"].set_state(other)
