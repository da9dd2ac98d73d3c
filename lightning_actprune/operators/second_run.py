"""Make the second run of a module compute what its first run did, and detect when it does not.

A module that runs again in backward (``operators.recompute``) has to compute the same twice. ``FirstRun`` records the
state in which the first run starts, and restores it around the second run:

- Buffers, with their values before the first run, even if the module writes to them and reads them afterwards
  (codebooks, counters, running statistics) or something else writes to them between both runs. The second run gets
  copies, so the module's own buffers move once a step.
- Parameters that were exchanged for the first run (``torch.func.functional_call``), and ``training`` flags.
- The choice of attention kernels (``torch.nn.attention.sdpa_kernel``).
- The random generators of Python and NumPy. ``torch.utils.checkpoint`` restores torch's own, and autocast.
- What ``topk`` and ``argmax`` have chosen, such as the experts of a token. From inputs of few bits they would choose
  differently where two values are close, and gradients would go to experts that have not computed the output.

If a parameter is written to between both runs, the second run raises an error, as autograd does for the dense module.
It also raises one if a buffer is written to for the first time in a run that is not inspected, for lack of a copy.

A module may also depend on things that cannot be restored from outside: a cache of keys and values, a counter, an
attribute that another module writes. So one run of each module is compared with its second run. Both get the exact
inputs, and all tensors that they save for backward must be equal, up to rounding in kernels without a fixed order of
summation. The comparison keeps 64 sums of each tensor and not the tensor. Exact inputs take memory, so modules that
quantize their inputs take turns: two modules in a step, and none in the second step. A module inside one of torch's
checkpoints is not compared: it makes its first run twice, in forward and in backward, and has to store the same both
times.
"""

from __future__ import annotations

import pickle
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from math import inf
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.cuda import is_current_stream_capturing
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointError

from lightning_actprune.codec.private import len_torch_dispatch_stack, top_saved_tensors_hooks
from lightning_actprune.operators.hooks import explain

SUMS = 64
"""Number of sums that represent the values of a tensor."""
PART = 2**22
"""Values that are added up at once, in fp64."""
NOISE, NOISE_16 = 2**-13, 2**-6
"""Largest relative difference of two runs that the order of summation in kernels may cause, and the same if values in
16 bits are saved."""
FEW = 4
"""Most values of an integer tensor that is not compared: it may be the seed of attention without dropout, which is
uninitialised memory."""
MASKED, MASKED_SHARE = 1e4, 1e-3
"""Absolute value from which on a value counts as masking, and share of such values above which a tensor is a mask."""
EVERY = 128
"""Every run with a multiple of this number is inspected in full, beside the first, second, fourth, eighth, ... run."""
_CURES = (
    "HINT: let the module run once, by a rule of `None` for it. If its inputs decide shapes or branches, "
    "`Recompute(bits=None)` keeps them exactly. A cache of keys and values has to be off (`use_cache=False`)."
)


class RunHistory:
    """Results of earlier runs of a module in one training mode. Copies and pickles start empty.

    A full inspection takes as long as some kernel launches, so only some runs are inspected (see ``EVERY``).
    """

    def __init__(self) -> None:
        self.runs, self.modules = 0, 0
        self.draws_numbers, self.has_been_compared, self.chooses = False, False, False
        self.masks: set[int] = set()
        """Numbers of the arguments that were an additive mask in some run."""
        self.buffer_writers: set[int] = set()
        """Numbers of the inner modules whose buffers were written to before backward in some run."""

    def count_run(self, modules: int) -> bool:
        """Count a run of a module with ``modules`` inner modules, and return True if it is to be inspected in full."""
        self.runs += 1
        is_changed, self.modules = modules != self.modules, modules
        return is_changed or self.runs % EVERY == 0 or self.runs & (self.runs - 1) == 0

    def __reduce__(self) -> tuple[type[RunHistory], tuple[()]]:
        return RunHistory, ()


_CHOICES = torch.topk, Tensor.topk, torch.argmax, Tensor.argmax


class _Choices(TorchFunctionMode):
    """Notes the indices that a run chooses, or lets a second run choose the same.

    Args:
        noted: The indices of the first run, ``None`` to note them.
    """

    def __init__(self, noted: list[Tensor] | None = None) -> None:
        super().__init__()
        self.noted = [] if noted is None else noted
        self._repeated = None if noted is None else iter(noted)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in _CHOICES:
            return result
        indices = result if isinstance(result, Tensor) else result[1]
        if self._repeated is None:
            self.noted.append(indices.detach())
            return result
        first = next(self._repeated, None)
        if first is None:  # of a module that does more when it runs again, which is an error elsewhere
            return result
        indices.data.copy_(first)  # in place, since autograd has saved these
        if result is not indices:
            x, dim = args[0] if args else kwargs["input"], kwargs.get("dim", args[2] if len(args) > 2 else -1)
            result[0].data.copy_(x.detach().gather(dim, indices))
        return result


class _Buffer(NamedTuple):
    """A buffer before the first run.

    Args:
        tensor: The buffer itself.
        version: Autograd's count of writes to it.
        copy: Its values, if they were copied.
    """

    tensor: Tensor | None
    version: int
    copy: Tensor | None


class FirstRun:
    """Record the first run of a module, and make its second run compute the same.

    Args:
        module: The module.
        name: Its name in the model, for errors.
        histories: Histories of its earlier runs, by training mode; updated here.
        turn: Number of runs before the one that is compared with its second run, ``None`` to compare none.
    """

    def __init__(self, module: nn.Module, name: str, histories: dict[bool, RunHistory], turn: int | None) -> None:
        self._who = f"{name!r} ({type(module).__name__.removeprefix('Recomputed')})"
        self._modules = [module]
        for inner in self._modules:  # the list grows; torch's own walk takes ten times as long
            self._modules += [child for child in inner._modules.values() if child is not None]
        self._history = histories.setdefault(module.training, RunHistory())
        self._is_inspected = self._history.count_run(len(self._modules))
        is_due = turn is not None and not self._history.has_been_compared and self._history.runs > turn
        self.is_compared = is_due and _can_read_values()
        """True if the second run is compared with this one, so that both need the exact inputs."""
        self._training = [inner.training for inner in self._modules]
        self._buffers: list[tuple[int, nn.Module, dict[str, _Buffer]]] = []
        self._parameters: list[tuple[nn.Module, str, nn.Parameter, int]] = []
        self._attention = _attention_kernels()
        self._generators: tuple[Any, Any] | None = None
        self._sums: list[Tensor | None] = []
        self._choices: list[Tensor] = []
        self._saves_16_bits = False
        """True if a saved tensor has values in 16 bits."""

    def is_mask(self, number: int, x: Tensor) -> bool:
        """Return True if argument ``number``, now ``x``, was an additive mask in any run, like T5's biases.

        The large values of a mask would set the scale of their blocks, and all other values there would become equal.
        """
        masks = self._history.masks
        is_unknown = self._is_inspected and number not in masks and _can_read_values()
        if is_unknown and bool((x.detach().abs() >= MASKED).float().mean() > MASKED_SHARE):
            masks.add(number)
        return number in masks

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the first run, which the caller makes inside this context."""
        generators = python_generators() if self._is_inspected or self._history.draws_numbers else None
        self._record_buffers()
        pack, unpack = _hooks_of_checkpoint()
        with torch.autograd.graph.saved_tensors_hooks(
            self._add_sums(pack, self._sums) if self.is_compared else pack, self._name_errors(unpack)
        ):
            choices = _Choices() if self._is_inspected or self._history.chooses else None
            try:
                with choices or nullcontext():
                    yield
            except RuntimeError as error:
                explain(error)
                raise
        if choices is not None:
            self._choices = choices.noted
            self._history.chooses |= bool(self._choices)
        self._find_written_buffers()
        self._record_generators(generators)
        self._parameters = [
            (inner, name, parameter, parameter._version)
            for inner in self._modules
            for name, parameter in inner._parameters.items()
            if parameter is not None and type(parameter) in _PLAIN
        ]

    def run_again(self, run: Callable[[], Any]) -> Any:
        """Call ``run``, the second run, from the state in which the first one started, and return its result.

        Raises:
            RuntimeError: If the second run fails or computes something else. The text names the module.
        """
        with ExitStack() as stack:
            self._restore_training(stack)
            self._restore_parameters(stack)
            self._restore_buffers(stack)
            if self._generators is not None:
                stack.callback(set_python_generators, python_generators())
                set_python_generators(self._generators)
            if self._attention != _attention_kernels():
                stack.enter_context(sdpa_kernel(list(self._attention)))
            if self._choices:
                stack.enter_context(_Choices(self._choices))
            try:
                return self._run_and_compare(run) if self.is_compared else run()
            except Exception as error:
                self._raise_named(error)
                raise

    # === Comparison of both runs ==========================================================================

    def _run_and_compare(self, run: Callable[[], Any]) -> Any:
        """Call ``run`` and compare the tensors that it saves with those of the first run."""
        sums = list[Tensor | None]()
        pack, unpack = _hooks_of_checkpoint()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._add_sums(pack, sums), unpack):
                return run()
        finally:  # torch ends the second run with an exception
            self._compare(sums)

    def _compare(self, second: list[Tensor | None]) -> None:
        first, self.is_compared = self._sums, False
        if len(second) < len(first):  # torch raises an error, or the second run already has
            return
        noise = NOISE_16 if self._saves_16_bits else NOISE
        for one, other in zip(first, second, strict=False):
            are_equal = one is other or (one is not None and other is not None and torch.equal(one, other))
            if not are_equal and _difference(one, other) > noise:
                self._fail(
                    "computes something else when it runs again in backward: it depends on something that this run or "
                    "another module has changed since (a cache, an attribute, a counter, a random generator of its own)"
                )
        self._history.has_been_compared = True
        self._sums = []

    def _add_sums(self, pack: Callable[[Tensor], Any], sums: list[Tensor | None]) -> Callable[[Tensor], Any]:
        """Return the hook ``pack`` that also appends the sums of each saved tensor to ``sums``."""

        def pack_and_sum(tensor: Tensor) -> Any:
            sums.append(_sums_of(tensor))
            self._saves_16_bits |= tensor.dtype in (torch.float16, torch.bfloat16)
            return pack(tensor)

        # Other hooks recognise torch's checkpoint, which drops saved tensors, by this module name.
        pack_and_sum.__module__ = pack.__module__
        return pack_and_sum

    # === Errors ===========================================================================================

    def _name_errors(self, unpack: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the hook ``unpack`` with errors that name the module."""

        def unpack_or_name(holder: Any) -> Any:
            try:
                return unpack(holder)
            except Exception as error:
                self._raise_named(error)
                raise

        return unpack_or_name

    def _raise_named(self, error: Exception) -> None:
        """Raise an error that names the module in place of ``error``, unless torch needs ``error`` itself."""
        if isinstance(error, CheckpointError):
            reason = str(error).strip().partition("\n")[0].removeprefix("torch.utils.checkpoint: ").rstrip(".")
            self._fail(f"does not save the same tensors when it runs again in backward ({reason})", error)
        is_early_stop = type(error).__module__ == CheckpointError.__module__  # torch ends the second run with it
        if not is_early_stop and not isinstance(error, (SecondRunError, torch.OutOfMemoryError)):
            self._fail(f"fails when it runs again in backward: {error}", error)

    def _fail(self, reason: str, error: BaseException | None = None) -> NoReturn:
        raise SecondRunError(f"Module {self._who} {reason}. {_CURES}") from error

    # === Parameters and flags =============================================================================

    def _restore_training(self, stack: ExitStack) -> None:
        """Set the flags to those of the first run until ``stack`` closes."""
        for inner, training in zip(self._modules, self._training, strict=True):
            if inner.training != training:
                stack.callback(setattr, inner, "training", inner.training)
                inner.training = training

    def _restore_parameters(self, stack: ExitStack) -> None:
        """Put the parameters of the first run into the module until ``stack`` closes."""
        for inner, name, parameter, version in self._parameters:
            original = inner._parameters.get(name)
            if parameter._version != version:
                raise SecondRunError(
                    f"Parameter {name!r} of {type(inner).__name__} in module {self._who}, which runs again in "
                    "backward, has been modified by an inplace operation since its forward. HINT: call backward before "
                    "the optimizer steps, or before anything else that writes to weights."
                )
            if original is not parameter and type(original) in _PLAIN:
                stack.callback(inner._parameters.__setitem__, name, original)
                inner._parameters[name] = parameter

    # === Buffers ==========================================================================================

    def _record_buffers(self) -> None:
        """Record the buffers before the first run, with copies where they may be written to."""
        for number, inner in enumerate(self._modules):
            before = {}
            for name, tensor in inner._buffers.items():
                copies = type(tensor) is Tensor and (self._is_inspected or number in self._history.buffer_writers)
                copy = tensor.detach().clone() if copies and tensor is not None else None
                before[name] = _Buffer(tensor, 0 if tensor is None else tensor._version, copy)
            self._buffers.append((number, inner, before))

    def _find_written_buffers(self) -> None:
        """Note the inner modules whose buffers the first run has written to, so that later runs copy them too."""
        for number, inner, before in self._buffers:
            for name, buffer in before.items():
                if not _is_written(inner, name, before):
                    continue
                if buffer.copy is None:
                    self._fail(f"writes to its buffer {name!r} in run {self._history.runs}, and did not before")
                self._history.buffer_writers.add(number)
        self._buffers = [each for each in self._buffers if each[2] or each[1]._buffers]

    def _restore_buffers(self, stack: ExitStack) -> None:
        """Put the buffers that the first run started with into the module until ``stack`` closes."""
        for number, inner, before in self._buffers:
            buffers = {}
            for name, buffer in before.items():
                buffers[name] = buffer.tensor
                if not _is_written(inner, name, before):
                    continue
                if buffer.copy is None:
                    raise SecondRunError(
                        f"Buffer {name!r} of {type(inner).__name__} in module {self._who}, which runs again in "
                        "backward, has been modified by an inplace operation since its forward. HINT: write to it "
                        "after backward."
                    )
                self._history.buffer_writers.add(number)
                buffers[name] = buffer.copy.clone()
            if buffers.keys() != inner._buffers.keys() or any(
                buffers[name] is not tensor for name, tensor in inner._buffers.items()
            ):
                stack.callback(inner._buffers.update, dict(inner._buffers))
                stack.callback(inner._buffers.clear)  # called before the update
                inner._buffers.clear()
                inner._buffers.update(buffers)

    # === Generators of Python and NumPy ===================================================================

    def _record_generators(self, before: tuple[Any, Any] | None) -> None:
        """Store the states before the first run if the module draws random numbers."""
        history = self._history
        if before is not None and not history.draws_numbers:
            history.draws_numbers = pickle.dumps(before) != pickle.dumps(python_generators())
            if history.draws_numbers and history.runs > 1:
                warnings.warn(
                    f"Module {self._who} draws random numbers from a generator of Python or NumPy in its run "
                    f"{history.runs}, but drew none in the earlier runs that were inspected. If it drew some in "
                    "between, its second run drew other numbers, and those gradients were wrong. HINT: draw numbers "
                    "with torch, or keep the module from running again by a rule of `None`.",
                    stacklevel=2,
                )
        if history.draws_numbers:
            self._generators = before


class SecondRunError(RuntimeError):
    """The second run of a module fails or differs from the first. The text names the module."""


def _difference(one: Tensor | None, other: Tensor | None) -> float:
    """Return the norm of the difference of the sums, relative to the norm of ``one``; infinity without sums."""
    if one is None or other is None:
        return inf
    return float(((one - other)[:-1].norm() / one[-1]).nan_to_num(inf))


_PLAIN = (Tensor, nn.Parameter)
"""Types of parameters that are restored and compared; a strategy may exchange parameters of other types itself."""


def _is_written(module: nn.Module, name: str, before: dict[str, _Buffer]) -> bool:
    """Return True if a buffer was written to since ``before``.

    torch does not count writes to running statistics; the counter beside them, if any, is read instead.
    """
    running = name in ("running_mean", "running_var")
    if running and module.training and getattr(module, "track_running_stats", False):
        return before[name].tensor is not None
    counters = [before[name], *([before["num_batches_tracked"]] if running and "num_batches_tracked" in before else [])]
    return any(each.tensor is not None and each.tensor._version != each.version for each in counters)


def _can_read_values() -> bool:
    """Return False in a simulation, which has no values, and while a CUDA graph is captured, which cannot wait."""
    is_capturing = torch.cuda.is_initialized() and is_current_stream_capturing()  # type: ignore[no-untyped-call]
    return not is_capturing and len_torch_dispatch_stack() == 0


def _hooks_of_checkpoint() -> tuple[Callable[..., Any], Callable[..., Any]]:
    hooks = top_saved_tensors_hooks(False)
    assert hooks is not None  # this is called inside torch's checkpoint
    return hooks


def _sums_of(tensor: Tensor) -> Tensor | None:
    """Return sums of a tensor's values, by their positions modulo ``SUMS``, and its norm: ``[SUMS + 1]`` in fp64.

    Values that are not finite count as zero. The result is ``None`` for a tensor without values to compare.
    """
    if type(tensor) not in _PLAIN or tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        return None
    if not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= FEW:
        return None
    values = tensor.detach().resolve_conj()
    for dim, (size, stride) in enumerate(zip(values.shape, values.stride(), strict=True)):
        if stride == 0 and size > 1:  # an expanded dimension repeats one value
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
    """Return the states of the random generators of Python and NumPy."""
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else numpy.get_state()


def set_python_generators(states: tuple[Any, Any]) -> None:
    """Set the random generators of Python and NumPy to states that ``python_generators`` returned."""
    own, other = states
    random.setstate(own)
    if other is not None:
        sys.modules["numpy.random"].set_state(other)
