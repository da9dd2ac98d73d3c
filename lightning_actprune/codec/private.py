"""Private PyTorch APIs used here, and the fallback if one is missing.

torch 2.10 and 2.14 have all of these names; a later torch may drop any. Each is looked up once, when the package is
imported. A missing one has a stand-in, which takes longer or assumes what is safe to assume, or its feature is refused
with the reason. Nothing is computed wrongly. In ``torch._C`` unless said otherwise:

====================================== ================================= ==============================================
Name                                   Says                              Without it
====================================== ================================= ==============================================
``_are_functorch_transforms_active``   whether ``vmap``, ``grad`` and    the stack of transforms is asked; with no
                                       the like run                      such name either nothing is compressed
                                                                         (warning)
``_functorch``'s two ``is_...tensor``  whether a tensor is one of theirs whether it has no memory
``_len_torch_dispatch_stack``          whether dispatch modes are open   torch's list of them is asked; without that,
                                                                         no kernel runs: plain torch, slower
``_python_dispatch._get_current_...``  their names                       a fit is not warned of them
  (``torch.utils``)
``_DisableTorchDispatch``              hides one product from them       they see a product of empty matrices
``_is_tracing``                        whether ``torch.jit`` traces      ``torch.jit.is_tracing``
``torch.compiler._is_exporting_flag``  whether the compiler exports      ``torch.compiler.is_exporting``: true of more
                                                                         in some versions, which leaves layers dense
``torch.ops.aten._unsafe_view``        makes a view none, compiled       a copy
``_cuda_getCurrentRawStream``          the current stream's number       ``torch.cuda.current_stream``, slower
``torch.Tensor._fix_weakref``          revives what a reference found    nothing is shared between layers
``_dispatch_has_kernel_for_...``       what autocast computes in fp32    the operation is tried, slower
``_select_batch_norm_backend``,        how a batch norm's output lies    as the input where it has two
  ``_BatchNormBackend``                in memory on a GPU                dimensions, or else in order
``_autograd._pop_saved_...``,          take hooks off for the time of    they stay on, slower
  ``_push_saved_...``                  our functions
``_autograd._top_saved_...``           which saved-tensor hooks are open unknown ones are taken to be: nothing is taken
                                                                         off or reused; no ``SavedTensorCompression``
                                                                         (warning), no recorders (error)
``_autograd._saved_tensors_hooks_...`` whether any may be opened         it is tried
``_autograd._get_sequence_nr``,        which operation saves something   no ``SavedTensorCompression`` (warning)
  ``Node._sequence_nr``
``_current_autograd_node``             which operation reads something   the same, and no ``StepMemoryRecorder`` (error)
``_current_graph_task_id``             whether backward runs             whether an operation reads something; without
                                                                         that, as without ``_top_saved_...``
``_dynamo.eval_frame``'s strategies    keeps compilers out of hooks      they look for graphs there: slower, and
  of code                                                                warnings
``torch.utils._pytree``'s two          tensors in what a module returns  those in tuples, lists and dictionaries; what
                                                                         the dense model would keep is not known
``torch.utils._pytree``'s ``tree_...`` arguments of modules, and who     modules are not replayed from CUDA graphs
  ``flatten``, ``_storage_Use_Count``  holds results                       (that reason)
``torch.cuda._sleep``                  lets the GPU do nothing           waiting for Python seems shorter
``_cuda_clearCublasWorkspaces``        frees what products have taken    CUDA graphs hold some 64 MiB more
``torch._subclasses``' fake tensors    what the dense model would keep   it is not known (warning)
``TorchDispatchMode``,                 what a step would have in use     no step is simulated (error)
  ``_scoped_library``, both kinds of
  ``_scaled_dot_product_...``
  attention, ``_dispatch_keyset_...``,
  ``DispatchKey``
``torch.nn.modules.module``'s hooks    whether there are any for all     there may be: modules are not fused
``_inductor``'s and ``_functorch``'s   lets a pass see the joint graph   compiled layers keep what they do without it
  ``joint_custom_...`` and their kin   of forward and backward           (error where a pass is to be installed)
``seq_nr``, ``original_aten`` and      which operation of forward a node what no layer has marked stays as it is where
  ``partitioner_tag`` of graph nodes   of backward belongs to            a rule leaves a layer or an operation dense
``_inductor.lowering``'s and ``ir``'s  lets inductor's code call what    it calls operators, slower
                                       packs
====================================== ================================= ==============================================

Private attributes of tensors, storages and modules (``ATTRIBUTES``) are used where they are. Too much rests on those of
most: where one is missing, importing the package is an error. Others, ``OPTIONAL``, are asked for with care.

**Elsewhere** is what is no name of torch's, next to what it is for:

- ``operators.attention`` runs torch's attention in a copy of its namespace. It is tried before the first module is
  converted, and compared with the original: where it does not do the same, attention stays dense, with that reason.
- ``operators.saved`` and ``operators.hooks`` tell operations and callers by names of torch's nodes and modules. What is
  not known by its name is not packed.
- ``compiled.recompute`` reads, through ``torch._dynamo.comptime``, the graph that a compiler traces, and the bodies of
  checkpoints in it. Without, compiling a module that runs again is an error.
- ``kernels.launch`` passes arguments to Triton's native launcher itself, in the order that was recorded from Triton's
  own in Python. One that takes other parameters than those known is left to Triton, at several times the cost.
- ``callbacks.first_batch`` lets two public hooks of Lightning's strategy do something more. Without one of them, or if
  Lightning calls it no more, a tuner's trials are not probed, and the fit's first batch is. ``callbacks.pruning`` does
  so to a module's ``configure_model``.
- ``callbacks.memory`` reads the step that Lightning logs at, ``trainer.global_step`` in its place.
"""

from __future__ import annotations

import functools
import pkgutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_Function = TypeVar("_Function", bound=Callable[..., Any])

MISSING: list[str] = []
"""Names that this torch has not."""


def found(name: str, stand_in: Any = None) -> Any:
    """Return what torch has by that name, or the stand-in for it."""
    try:
        return pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        MISSING.append(name)
        return stand_in


def refusal(feature: str, names: tuple[str, ...]) -> str | None:
    """Return why ``feature``, for which nothing stands in for ``names``, is not there; ``None`` if it is."""
    gone = [name for name in names if name in MISSING]
    if not gone:
        return None
    return (
        f"{feature} needs {' and '.join(gone)}, which torch {torch.__version__} has not. HINT: use another version of "
        "torch, or a lightning_actprune that was made for this one."
    )


def require(feature: str, names: tuple[str, ...]) -> None:
    """Raise if ``feature`` is not there."""
    reason = refusal(feature, names)
    if reason is not None:
        raise RuntimeError(reason)


# Transforms and dispatch modes.

_transforms = found("torch._C._functorch.peek_interpreter_stack")
_modes = found("torch.utils._python_dispatch._get_current_dispatch_mode_stack")


def _any_transform() -> bool:
    return _transforms is None or _transforms() is not None


def _count_modes() -> int:
    return 1 if _modes is None else len(_modes())


def _has_no_memory(x: Tensor) -> bool:
    """Return whether ``x`` is a wrapper of another tensor, such as transforms make."""
    try:
        return x.numel() > 0 and x.data_ptr() == 0
    except (NotImplementedError, RuntimeError):
        return True


def _never() -> bool:
    return False


def _always() -> bool:
    return True


are_functorch_transforms_active: Callable[[], bool] = found("torch._C._are_functorch_transforms_active", _any_transform)
is_functorch_wrapped_tensor: Callable[[Tensor], bool] = found(
    "torch._C._functorch.is_functorch_wrapped_tensor", _has_no_memory
)
is_legacy_batchedtensor: Callable[[Tensor], bool] = found("torch._C._functorch.is_legacy_batchedtensor", _has_no_memory)
len_torch_dispatch_stack: Callable[[], int] = found("torch._C._len_torch_dispatch_stack", _count_modes)
dispatch_modes: Callable[[], list[Any]] = _modes or list
no_dispatch_modes: Callable[[], AbstractContextManager[Any]] = found("torch._C._DisableTorchDispatch", nullcontext)
is_tracing: Callable[[], bool] = found("torch._C._is_tracing", found("torch.jit.is_tracing", _never))

if are_functorch_transforms_active is _any_transform and _transforms is None:
    warnings.warn(f"{refusal('Compressing what layers keep', tuple(MISSING))} Nothing is compressed.", stacklevel=2)

# The compiler.

_has_flag = found("torch.compiler._is_exporting_flag") is not None


def _is_exporting() -> bool:
    # The function is always true where torch 2.11 compiles its caller.
    return torch.compiler._is_exporting_flag


is_exporting: Callable[[], bool] = _is_exporting if _has_flag else found("torch.compiler.is_exporting", _always)


def _copied(y: Tensor, shape: torch.Size) -> Tensor:
    return y.clone()


unsafe_view: Callable[[Tensor, torch.Size], Tensor] = found("torch.ops.aten._unsafe_view.default", _copied)

# Devices and autocast.


def _raw_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


raw_stream: Callable[[int], int] = found("torch._C._cuda_getCurrentRawStream", _raw_stream)
"""Return the number behind ``torch.cuda.current_stream()``, which takes 2 us to wrap it."""

_NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group_norm": lambda x: F.group_norm(x, 1),
    "layer_norm": lambda x: F.layer_norm(x, (2,)),
    "rms_norm": lambda x: F.rms_norm(x, (2,)),
}
_has_kernel = found("torch._C._dispatch_has_kernel_for_dispatch_key")
_FP32_UNDER_AUTOCAST = frozenset(
    (operator, device)
    for operator in _NORMS
    for device in ("cpu", "cuda")
    if _has_kernel is not None and _has_kernel(f"aten::{operator}", f"Autocast{device.upper()}")
)


def _in_fp32(operator: str, device: str) -> bool:
    return (operator, device) in _FP32_UNDER_AUTOCAST


def _tried_in_fp32(operator: str, device: str) -> bool:
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        return _NORMS[operator](torch.ones(2, 2, dtype=torch.bfloat16, device=device)).dtype == torch.float32


autocast_computes_in_fp32: Callable[[str, str], bool] = _tried_in_fp32 if _has_kernel is None else _in_fp32
"""Of a norm and a type of device; it depends on the version of torch: ``rms_norm`` on a GPU in 2.15, not in 2.11."""

_select_backend = found("torch._C._select_batch_norm_backend")
_NATIVE = found("torch._C._BatchNormBackend.Native")


def is_native_batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, eps: float) -> bool:
    """Return whether torch normalises ``x`` on a GPU by kernels of its own, whose output lies in memory as ``x``."""
    if weight is None or bias is None or x.dim() == 2:
        return True
    if None in (_select_backend, _NATIVE):
        return False
    # Of running statistics it asks whether there are any, of which a layer that does not train has some.
    return bool(_select_backend(x, weight, bias, weight, bias, training, eps) == _NATIVE)


# Autograd.

_AUTOGRAD = "torch._C._autograd."
_TOP = _AUTOGRAD + "_top_saved_tensors_default_hooks"
_SEQUENCE = _AUTOGRAD + "_get_sequence_nr", "torch._C._functions.AccumulateGrad._sequence_nr"
_NODE, _TASK = "torch._C._current_autograd_node", "torch._C._current_graph_task_id"


def _gone(name: str) -> Callable[..., Any]:
    """Return what is called in place of what nothing stands in for, by who has not asked for its ``refusal``."""

    def called(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(refusal("This", (name,)))

    return called


def _itself(x: Any) -> Any:
    return x


def _somebodys(ignore_is_tracing: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return hooks that are nobody's known, as if somebody else had opened some."""
    return id, id


def _may_open_hooks() -> bool:
    try:
        with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
            return True
    except RuntimeError:
        return False


def _leave_hooks(*pair: Any) -> None:
    """Do nothing, in place of both that take hooks off the stack and put them back."""


def _task_of_node() -> int:
    return -1 if current_autograd_node() is None else 0


top_saved_tensors_hooks: Callable[[bool], tuple[Callable[..., Any], Callable[..., Any]] | None] = found(
    _TOP, _somebodys
)
pop_saved_tensors_hooks: Callable[..., None] = found(_AUTOGRAD + "_pop_saved_tensors_default_hooks", _leave_hooks)
push_saved_tensors_hooks: Callable[..., None] = found(_AUTOGRAD + "_push_saved_tensors_default_hooks", _leave_hooks)
if _leave_hooks in (pop_saved_tensors_hooks, push_saved_tensors_hooks):
    pop_saved_tensors_hooks = push_saved_tensors_hooks = _leave_hooks
saved_tensors_hooks_are_enabled: Callable[[], bool] = found(
    _AUTOGRAD + "_saved_tensors_hooks_is_enabled", _may_open_hooks
)
get_sequence_nr: Callable[[], int] = found(_SEQUENCE[0], _gone(_SEQUENCE[0]))
found(_SEQUENCE[1])  # asked of nodes
current_autograd_node: Callable[[], Any] = found(_NODE, _gone(_NODE))
current_graph_task_id: Callable[[], int] = found(_TASK, _gone(_TASK) if _NODE in MISSING else _task_of_node)
_STRATEGIES = "torch._C._dynamo.eval_frame."
_set_strategy, _strategy, _action = (
    found(_STRATEGIES + name) for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")
)


def unseen_by_compilers(function: _Function) -> _Function:
    """Return a function that a compiler runs as it is, with all that it calls; without a compiler it costs no more.

    Where the graph of a model breaks, a compiler looks for graphs in hooks, too, which are called there.
    """
    if None not in (_set_strategy, _strategy, _action):
        _set_strategy(
            function.__code__,
            _strategy(_action.SKIP, _action.SKIP),
        )
    return function


def while_traced(function: Callable[[Any], None]) -> None:
    """Call ``function`` with the state of the compiler that traces this call; do nothing without one."""
    torch._dynamo.comptime.comptime(function)


def bodies_of(state: Any) -> dict[str, torch.fx.GraphModule]:
    """Return, by their names in the graph that is traced, the graphs that its checkpoints hold."""
    output = state._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
    bodies: dict[str, torch.fx.GraphModule] = output.nn_modules
    return bodies


fix_weakref: Callable[[Tensor], None] | None = found("torch.Tensor._fix_weakref")
"""Makes a tensor that a weak reference has found the owner of its Python object again."""

FOR_BACKWARD = (_NODE, _TASK) if {_NODE, _TASK} <= set(MISSING) else ()
"""What to know whether backward runs rests on: one of two, so none unless both are missing."""
FOR_RECORDERS = (_TOP, *FOR_BACKWARD)
"""What to know, besides, which saved-tensor hooks are open rests on."""
FOR_OPERATIONS = (*FOR_RECORDERS, *_SEQUENCE, _NODE)
"""What to know which operation saves a tensor, and which one reads it, rests on."""
FOR_NODES = (*FOR_RECORDERS, _NODE)
"""What to know which operation reads a tensor rests on."""

# Trees of tensors, and tensors without values.


def _leaves(tree: Any) -> list[Any]:
    return list(_walk(tree))


def _walk(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict | list | tuple):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _walk(part)
    else:
        yield tree


class _NoFakeTensors:
    def __init__(self, **options: Any) -> None:
        require("A forward on fake tensors", FOR_FAKES)


FOR_FAKES = "torch.utils._pytree.tree_map_only", "torch._subclasses.fake_tensor.FakeTensorMode"
"""What to know what a dense model would keep rests on."""
tree_leaves: Callable[[Any], list[Any]] = found("torch.utils._pytree.tree_leaves", _leaves)
tree_map_only: Callable[..., Any] = found(FOR_FAKES[0], _gone(FOR_FAKES[0]))
FOR_REPLAYS = "torch.utils._pytree.tree_flatten", "torch.utils._pytree.tree_unflatten", "torch._C._storage_Use_Count"
"""What replays from CUDA graphs rest on."""
tree_flatten: Callable[[Any], tuple[list[Any], Any]] = found(FOR_REPLAYS[0], _gone(FOR_REPLAYS[0]))
tree_unflatten: Callable[[list[Any], Any], Any] = found(FOR_REPLAYS[1], _gone(FOR_REPLAYS[1]))
_storage_uses: Callable[[int], int] = found(FOR_REPLAYS[2], _gone(FOR_REPLAYS[2]))


def storage_uses(tensor: Tensor) -> int:
    """Return how many refer to the storage of a tensor."""
    return _storage_uses(tensor.untyped_storage()._cdata)


_sleep: Callable[[int], None] = found("torch.cuda._sleep", lambda cycles: None)


def delay(ms: float) -> None:
    """Let the current stream of a GPU do nothing for about so long."""
    _sleep(int(ms * 1.8e6))  # cycles of a fast clock


clear_workspaces: Callable[[], None] = found("torch._C._cuda_clearCublasWorkspaces", lambda: None)
"""Frees the memory that libraries of products have taken for each stream."""
FakeTensorMode: Any = found(FOR_FAKES[1], _NoFakeTensors)

# Steps without values.

_MODE, _LIBRARY = "torch.utils._python_dispatch.TorchDispatchMode", "torch.library._scoped_library"
_FLASH = "torch.ops.aten._scaled_dot_product_flash_attention"
_EFFICIENT = "torch.ops.aten._scaled_dot_product_efficient_attention"
TorchDispatchMode: Any = found(_MODE, object)
scoped_library: Callable[..., AbstractContextManager[Any]] = found(_LIBRARY, _gone(_LIBRARY))
flash_attention: Callable[..., Any] = found(_FLASH, _gone(_FLASH))
efficient_attention: Callable[..., Any] = found(_EFFICIENT, _gone(_EFFICIENT))
_BELOW, _KEY = "torch._C._dispatch_keyset_full_after", "torch._C.DispatchKey"
_keys_below, _dispatch_key = found(_BELOW), found(_KEY)


def has_kernel(operator: str, key: str) -> bool:
    """Return whether torch has a rule for an operation ("aten::softmax.int") under that key ("AutocastCUDA")."""
    return _has_kernel is not None and bool(_has_kernel(operator, key))


def redispatch(operation: Any, keys: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    """Run what torch has for an operation below ``key``, of the dispatch keys of a call, as if nothing were there."""
    return operation.redispatch(keys & _keys_below(getattr(_dispatch_key, key)), *args, **kwargs)


FOR_SIMULATION = (_MODE, _LIBRARY, _BELOW, _KEY, _FLASH, _EFFICIENT, *FOR_FAKES, *FOR_NODES)
"""What simulating a step rests on."""

# Passes over the joint graph of a compiled region.


class JointPasses(NamedTuple):
    """Where passes over joint graphs are installed.

    Args:
        inductor: The configuration with ``joint_custom_post_pass``.
        functorch: That with ``joint_custom_pass``, for all backends, before inductor's own.
        base: The class of passes that inductor's caches know by their ``uuid``.
    """

    inductor: Any
    functorch: Any
    base: Any


_VIRTUALIZED, _OPERATIONS = "torch._inductor.virtualized.V", "torch._inductor.virtualized.ops"
FOR_JOINT_PASSES = (
    "torch._inductor.config.joint_custom_post_pass",
    "torch._functorch.config.joint_custom_pass",
    "torch._inductor.custom_graph_pass.CustomGraphPass",
    _VIRTUALIZED,
)
"""What a pass over joint graphs rests on; looked up when it is asked for, since importing inductor takes seconds."""


@functools.cache
def joint_passes() -> JointPasses:
    """Return where passes over joint graphs are installed; ``refusal("...", FOR_JOINT_PASSES)`` says if they cannot."""
    base = [found(name, object) for name in FOR_JOINT_PASSES][2]
    inductor, functorch = (found(name.rpartition(".")[0]) for name in FOR_JOINT_PASSES[:2])
    return JointPasses(inductor, functorch, base)


def sequence_number(node: Any) -> int | None:
    """Return the number of the autograd node that a node of a joint graph belongs to, in forward or in backward."""
    number: int | None = node.meta.get("seq_nr")
    return number


def original_operation(node: Any) -> str:
    """Return the name of the operation of which a node of a graph is a part: ``"aten.gelu"``, ``""`` if unknown."""
    return str(getattr(node.meta.get("original_aten"), "overloadpacket", ""))


def is_of_autograd(node: Any) -> bool:
    """Return whether a node of a joint graph is a part of the backward of one of torch's operations.

    Nodes of backward that a custom function has written are not: they have the numbers of any operations.
    """
    return bool(node.meta.get("partitioner_tag") == "is_backward")


class Lowering(NamedTuple):
    """What says how inductor writes operators as code.

    Args:
        lowerings: What each operator is replaced by.
        fallback_handler: What calls an operator.
        ir: Inductor's representation of code.
        quotient: Of an index and a number, rounded down.
        remainder: Of an index divided by one number, and of that divided by another.
    """

    lowerings: dict[Any, Any]
    fallback_handler: Callable[..., Any]
    ir: Any
    quotient: Callable[[Any, int], Any]
    remainder: Callable[[Any, int, int], Any]


_INDICES = "FloorDiv", "ModularIndexing"
FOR_CALLS = (
    "torch._inductor.lowering.lowerings",
    "torch._inductor.lowering.fallback_handler",
    "torch._inductor.ir",
    "torch._inductor.ir.ExternKernelAlloc",
    "torch._inductor.ir.ExternKernel.realize_input",
    "torch._inductor.ir.FixedLayout",
    "torch._inductor.ir.TensorBox.create",
    "torch._inductor.codegen.wrapper.PythonWrapperCodegen",
    "torch._inductor.ir.Pointwise.create",
    *(f"torch.utils._sympy.functions.{name}" for name in _INDICES),
    _VIRTUALIZED,
    _OPERATIONS,
)
"""What a call in inductor's code rests on; looked up when it is asked for."""


@functools.cache
def lowering() -> Lowering:
    """Return how inductor writes operators; ``refusal("...", FOR_CALLS)`` says if something is missing."""
    parts = {name: found(name) for name in FOR_CALLS}
    lowerings, fallback, ir = list(parts.values())[:3]
    return Lowering(lowerings, fallback, ir, *(parts[f"torch.utils._sympy.functions.{name}"] for name in _INDICES))


def virtualized() -> Any:
    """Return what says what inductor is at."""
    return found(_VIRTUALIZED)


def operations() -> Any:
    """Return what writes operations on single values."""
    return found(_OPERATIONS)


def inductor_runs() -> bool:
    """Return whether it is inductor that is compiling."""
    known = virtualized()
    return known is not None and isinstance(known.fake_mode, FakeTensorMode)


# Modules.

_GLOBAL_HOOKS = [
    found(f"torch.nn.modules.module.{name}", {None: None})
    for name in (
        *("_global_forward_hooks", "_global_forward_pre_hooks"),
        *("_global_backward_hooks", "_global_backward_pre_hooks"),
    )
]


def any_global_hook() -> bool:
    """Return whether hooks are called for all modules, or may be."""
    return any(_GLOBAL_HOOKS)


DYNAMO, COMPILED = "torch._dynamo", "torch._functorch."
"""The module that is there once something is compiled, and the prefix of those that run compiled regions. Under other
names, compiled modules run compiled where a probe wants to look into them, and their layers are not seen; and what
their operations save is known by no name that may be packed."""
ATTRIBUTES: dict[Any, tuple[str, ...]] = {
    Tensor: ("_base", "_is_view", "_version"),
    torch.UntypedStorage: ("_cdata",),
    nn.Module(): (
        *("_buffers", "_modules", "_non_persistent_buffers_set", "_parameters"),
        *("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks"),
        *("_forward_hooks_always_called", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"),
    ),
}
"""Attributes without which there is no package."""
OPTIONAL = (
    "_sequence_nr",  # of nodes, see above
    "_saved_exponent",  # of nodes: without these, what they save is not packed
    "_saved_ord",
    "_schema",  # of operations, by which a step is simulated
    "_check_input_dim",  # of batch norms: without it, they stay dense
    "_compiled_call_impl",  # of modules: hooks in compiled ones are added, and do nothing there
    "_cache_enabled",  # of parametrize: without it, nobody knows what dense modules would keep
)
"""Other attributes of what torch makes, which may be missing."""

_missing = [
    f"{getattr(owner, '__name__', 'Module')}.{name}"
    for owner, names in ATTRIBUTES.items()
    for name in names
    if not hasattr(owner, name)
]
if _missing:
    raise ImportError(
        f"lightning_actprune needs {' and '.join(_missing)}, which torch {torch.__version__} has not. HINT: use "
        "another version of torch, or a lightning_actprune that was made for this one."
    )
