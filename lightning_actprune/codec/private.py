"""Private PyTorch APIs used here, and the fallback if one is missing.

Torch 2.10 to 2.14 have all of these names, and tests run with both ends. A later torch may drop any of them. Each name
is looked up once, when the package is imported; names of compilers are looked up when a model is compiled. Without a
name, a slower way is taken, or the feature is left out with a warning, or it raises an error. No gradient is wrong.

====================================== ================================= ==============================================
Name, in ``torch._C`` or as given      What it tells or does             Without it
====================================== ================================= ==============================================
``_are_functorch_transforms_active``   Does ``vmap`` or ``grad`` run?    The stack of transforms is read. If that is
                                                                         missing too, nothing is compressed (warning).
``_functorch.is_..tensor`` (two)       Is it a tensor of a transform?    Does it have memory?
``_len_torch_dispatch_stack``          Are dispatch modes open?          Torch's list of modes is read. If that is
                                                                         missing too, no kernel runs (slower).
``torch.utils._python_dispatch``       Their names                       A fit does not warn about them.
  ``._get_current_...``
``_DisableTorchDispatch``              Hides a product from them         They see a product of empty matrices.
``DisableTorchFunction``               Hides packing from function modes  They see it; CUDA graphs start later.
``_is_tracing``                        Does ``torch.jit`` trace?         ``torch.jit.is_tracing``
``torch.compiler._is_exporting_flag``  Does the compiler export?         ``torch.compiler.is_exporting``. In some
                                                                         versions it leaves more layers dense.
``torch.ops.aten._unsafe_view``        Makes a result of a view          A copy
``_cuda_getCurrentRawStream``          Number of the current stream      ``torch.cuda.current_stream`` (slower)
``torch.Tensor._fix_weakref``          Revives a tensor that a weak      Layers do not share packed inputs.
                                       reference found
``_dispatch_has_kernel_for_...``       Does autocast use fp32?           The operation is tried (slower).
``_select_batch_norm_backend``,        Strides of a batch norm's output  The output has the strides of a two-dimensional
  ``_BatchNormBackend``                on a GPU                          input; others are contiguous.
``_autograd._pop_saved_...``,          Take hooks off while our          They stay (slower).
  ``_push_saved_...``                  functions run
``_autograd._top_saved_...``           Which saved-tensor hooks are      Foreign hooks are assumed: nothing is taken off
                                       open?                             or reused, ``SavedTensorCompression`` is off
                                                                         (warning), recorders raise an error.
``_autograd._saved_tensors_hooks_...`` May hooks be opened?              It is tried.
``_autograd._get_sequence_nr``,        Which operation saves a tensor?   ``SavedTensorCompression`` is off (warning).
  ``Node._sequence_nr``
``_current_autograd_node``             Which operation reads a tensor?   No ``StepMemoryRecorder`` (error)
``_current_graph_task_id``             Does backward run?                Does an operation read a tensor? If that is
                                                                         missing too: as without ``_top_saved_...``
``_dynamo.eval_frame`` (three)         Keep compilers out of hooks       Compilers trace hooks (slower, warnings).
``torch.utils._pytree`` (two)          Tensors in a module's results     Those in tuples, lists and dictionaries are
                                                                         found. Dense memory is not known.
``torch.utils._pytree`` (two more),    Arguments of modules, and who     No CUDA graphs (with this reason)
  ``_storage_Use_Count``               holds results
``torch.cuda._sleep``                  Lets the GPU wait                 Waiting for Python seems shorter.
``_cuda_clearCublasWorkspaces``        Frees workspaces                  CUDA graphs hold some 64 MiB more.
``torch._subclasses``' fake tensors    Dense memory                      It is not known (warning).
``TorchDispatchMode``,                 Memory of a simulated step        No step is simulated (error).
  ``_scoped_library``, two kinds of
  ``_scaled_dot_product_...``,
  ``_dispatch_keyset_...``,
  ``DispatchKey``
``torch.nn.modules.module`` (hooks)    Are there hooks for all modules?  There may be: modules are not fused.
``_inductor`` and ``_functorch``       Run a pass over the joint graph   Compiled layers stay dense (error where passes
  (``joint_custom_...`` and others)    of forward and backward           are installed).
``_inductor.lowering``, ``.ir``        Let code call packing directly    It calls operators (slower).
====================================== ================================= ==============================================

Metadata of graph nodes are read by the functions under "Joint graphs" below. Each graph is checked: without ``seq_nr``,
``original_aten`` or ``partitioner_tag``, tensors that no layer has marked stay uncompressed where a rule leaves a layer
or an operation dense. Without inputs named ``tangents``, nothing is packed, and a fit says so. Without ``ac_graph_id``
or ``example_value``, compiling a recomputed module is an error.

Private attributes of tensors, storages and modules (``ATTRIBUTES``) are read where they are needed. If one is missing,
importing the package is an error. Attributes in ``OPTIONAL`` may be missing.

These are not names of torch, and stand next to their use:

- ``operators.attention`` runs torch's attention in a copy of its namespace. It compares the result with the original's
  before the first module is converted. If they differ, attention stays dense with that reason.
- ``operators.saved`` and ``operators.hooks`` know operations and callers by the names of torch's nodes and modules. A
  tensor with an unknown operation is not packed.
- ``compiled.recompute`` reads the traced graph, and the bodies of checkpoints, through ``torch._dynamo.comptime``.
  Without it, compiling a recomputed module is an error.
- ``kernels.launch`` passes arguments to Triton's native launcher, in the order recorded from Triton's own in Python. A
  launcher with unknown parameters is called through Triton, which takes several times as long.
- ``callbacks.first_batch`` extends two public hooks of Lightning's strategy. If one is missing or not called, trials of
  a tuner are not probed, but the first batch of the fit is. ``callbacks.pruning`` extends ``configure_model``.
- ``callbacks.memory`` reads the step that Lightning logs at, or else ``trainer.global_step``.
"""

from __future__ import annotations

import functools
import pkgutil
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_Function = TypeVar("_Function", bound=Callable[..., Any])

MISSING: list[str] = []
"""Names that this torch lacks."""


def look_up(name: str, fallback: Any = None) -> Any:
    """Return an object of torch by its name, or the fallback if torch lacks it."""
    try:
        return pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        MISSING.append(name)
        return fallback


def refusal(feature: str, names: tuple[str, ...]) -> str | None:
    """Return why a feature is unavailable, or ``None`` if torch has all ``names``, which have no fallback."""
    missing = [name for name in names if name in MISSING]
    if not missing:
        return None
    return (
        f"{feature} needs {' and '.join(missing)}, which torch {torch.__version__} does not have. HINT: use another "
        "version of torch, or a newer lightning_actprune."
    )


def require(feature: str, names: tuple[str, ...]) -> None:
    """Raise if a feature is unavailable."""
    reason = refusal(feature, names)
    if reason is not None:
        raise RuntimeError(reason)


def _raise_missing(name: str) -> Callable[..., Any]:
    """Return a function that raises, in place of one without a fallback."""

    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(refusal("This", (name,)))

    return call


# === Transforms and dispatch modes ====================================================================

_transforms = look_up("torch._C._functorch.peek_interpreter_stack")
_modes = look_up("torch.utils._python_dispatch._get_current_dispatch_mode_stack")


def _any_transform() -> bool:
    return _transforms is None or _transforms() is not None


def _count_modes() -> int:
    return 1 if _modes is None else len(_modes())


def _has_no_memory(x: Tensor) -> bool:
    """Return True for a tensor that wraps another one, as transforms do."""
    try:
        return x.numel() > 0 and x.data_ptr() == 0
    except (NotImplementedError, RuntimeError):
        return True


are_functorch_transforms_active: Callable[[], bool] = look_up(
    "torch._C._are_functorch_transforms_active", _any_transform
)
is_functorch_wrapped_tensor: Callable[[Tensor], bool] = look_up(
    "torch._C._functorch.is_functorch_wrapped_tensor", _has_no_memory
)
is_legacy_batchedtensor: Callable[[Tensor], bool] = look_up(
    "torch._C._functorch.is_legacy_batchedtensor", _has_no_memory
)
len_torch_dispatch_stack: Callable[[], int] = look_up("torch._C._len_torch_dispatch_stack", _count_modes)
dispatch_modes: Callable[[], list[Any]] = _modes or list
no_function_modes: Callable[[], AbstractContextManager[Any]] = look_up("torch._C.DisableTorchFunction", nullcontext)
no_dispatch_modes: Callable[[], AbstractContextManager[Any]] = look_up("torch._C._DisableTorchDispatch", nullcontext)
is_tracing: Callable[[], bool] = look_up("torch._C._is_tracing", look_up("torch.jit.is_tracing", lambda: False))

if are_functorch_transforms_active is _any_transform and _transforms is None:
    warnings.warn(f"{refusal('Compressing activations', tuple(MISSING))} Nothing is compressed.", stacklevel=2)

# === Compiling and exporting ==========================================================================

_has_flag = look_up("torch.compiler._is_exporting_flag") is not None


def _is_exporting() -> bool:
    # Inside code that torch 2.11 compiles, the function is always true; the flag is right.
    return torch.compiler._is_exporting_flag


is_exporting: Callable[[], bool] = _is_exporting if _has_flag else look_up("torch.compiler.is_exporting", lambda: True)
unsafe_view: Callable[[Tensor, torch.Size], Tensor] = look_up(
    "torch.ops.aten._unsafe_view.default", lambda y, shape: y.clone()
)

_STRATEGIES = "torch._C._dynamo.eval_frame."
_set_strategy, _strategy, _action = (
    look_up(_STRATEGIES + name) for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")
)


def unseen_by_compilers(function: _Function) -> _Function:
    """Let compilers run a function, and all that it calls, without tracing it; return the function.

    Where the graph of a model breaks, hooks are called outside it, and a compiler would look for graphs in them.
    """
    if None not in (_set_strategy, _strategy, _action):
        _set_strategy(function.__code__, _strategy(_action.SKIP, _action.SKIP))
    return function


def call_while_traced(function: Callable[[Any], None]) -> None:
    """Call ``function`` with the state of the compiler that traces this call; without a compiler, do nothing."""
    torch._dynamo.comptime.comptime(function)


def checkpoint_bodies(state: Any) -> dict[str, torch.fx.GraphModule]:
    """Return the graphs of checkpoints in the traced graph, by name."""
    output = state._i_will_not_complain_if_bc_breaks_InstructionTranslator().output
    bodies: dict[str, torch.fx.GraphModule] = output.nn_modules
    return bodies


# === Devices and autocast =============================================================================


def _raw_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


raw_stream: Callable[[int], int] = look_up("torch._C._cuda_getCurrentRawStream", _raw_stream)
"""Return the number of the current stream. ``torch.cuda.current_stream()`` takes 2 us longer."""

_sleep: Callable[[int], None] = look_up("torch.cuda._sleep", lambda cycles: None)


def delay(ms: float) -> None:
    """Let the current stream of a GPU wait for about ``ms`` milliseconds."""
    _sleep(int(ms * 1.8e6))  # cycles of a fast clock


clear_workspaces: Callable[[], None] = look_up("torch._C._cuda_clearCublasWorkspaces", lambda: None)
"""Free the workspaces that cuBLAS and cuDNN hold for each stream."""

_NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "group_norm": lambda x: F.group_norm(x, 1),
    "layer_norm": lambda x: F.layer_norm(x, (2,)),
    "rms_norm": lambda x: F.rms_norm(x, (2,)),
}
_has_kernel = look_up("torch._C._dispatch_has_kernel_for_dispatch_key")


def has_kernel(operator: str, key: str) -> bool:
    """Return True if torch has a rule for an operator (``"aten::softmax.int"``) and a key (``"AutocastCUDA"``)."""
    return _has_kernel is not None and bool(_has_kernel(operator, key))


_FP32_UNDER_AUTOCAST = frozenset(
    (operator, device)
    for operator in _NORMS
    for device in ("cpu", "cuda")
    if has_kernel(f"aten::{operator}", f"Autocast{device.upper()}")
)


def _is_in_fp32(operator: str, device: str) -> bool:
    return (operator, device) in _FP32_UNDER_AUTOCAST


def _try_in_fp32(operator: str, device: str) -> bool:
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        return _NORMS[operator](torch.ones(2, 2, dtype=torch.bfloat16, device=device)).dtype == torch.float32


autocast_computes_in_fp32: Callable[[str, str], bool] = _try_in_fp32 if _has_kernel is None else _is_in_fp32
"""Return True if autocast computes a norm in fp32 on a device; ``rms_norm`` on a GPU in torch 2.15, not in 2.11."""

_select_backend = look_up("torch._C._select_batch_norm_backend")
_NATIVE = look_up("torch._C._BatchNormBackend.Native")


def is_native_batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, eps: float) -> bool:
    """Return True if torch's own kernels normalize ``x`` on a GPU; their output has the strides of ``x``."""
    if weight is None or bias is None or x.dim() == 2:
        return True
    if None in (_select_backend, _NATIVE):
        return False
    # The function checks only whether there are running statistics; in evaluation there are, here stood for by weights.
    return bool(_select_backend(x, weight, bias, weight, bias, training, eps) == _NATIVE)


# === Autograd =========================================================================================

_AUTOGRAD = "torch._C._autograd."
_TOP = _AUTOGRAD + "_top_saved_tensors_default_hooks"
_SEQUENCE = _AUTOGRAD + "_get_sequence_nr", "torch._C._functions.AccumulateGrad._sequence_nr"
_NODE, _TASK = "torch._C._current_autograd_node", "torch._C._current_graph_task_id"


def _may_open_hooks() -> bool:
    try:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            return True
    except RuntimeError:
        return False


def _leave_hooks(*pair: Any) -> None:
    """Do nothing, in place of taking hooks off the stack and of putting them back."""


def _task_of_node() -> int:
    return -1 if current_autograd_node() is None else 0


top_saved_tensors_hooks: Callable[[bool], tuple[Callable[..., Any], Callable[..., Any]] | None] = look_up(
    _TOP, lambda ignore_is_tracing: (id, id)
)
"""Return the innermost saved-tensor hooks. The fallback answers with hooks that are not ours."""
pop_saved_tensors_hooks: Callable[..., None] = look_up(_AUTOGRAD + "_pop_saved_tensors_default_hooks", _leave_hooks)
push_saved_tensors_hooks: Callable[..., None] = look_up(_AUTOGRAD + "_push_saved_tensors_default_hooks", _leave_hooks)
if _leave_hooks in (pop_saved_tensors_hooks, push_saved_tensors_hooks):
    pop_saved_tensors_hooks = push_saved_tensors_hooks = _leave_hooks
saved_tensors_hooks_are_enabled: Callable[[], bool] = look_up(
    _AUTOGRAD + "_saved_tensors_hooks_is_enabled", _may_open_hooks
)
get_sequence_nr: Callable[[], int] = look_up(_SEQUENCE[0], _raise_missing(_SEQUENCE[0]))
look_up(_SEQUENCE[1])  # an attribute of nodes, read elsewhere
current_autograd_node: Callable[[], Any] = look_up(_NODE, _raise_missing(_NODE))
current_graph_task_id: Callable[[], int] = look_up(_TASK, _raise_missing(_TASK) if _NODE in MISSING else _task_of_node)
fix_weakref: Callable[[Tensor], None] | None = look_up("torch.Tensor._fix_weakref")
"""Let a tensor that a weak reference found own its Python object again."""

FOR_BACKWARD = (_NODE, _TASK) if {_NODE, _TASK} <= set(MISSING) else ()
"""Names needed to know whether backward runs: either of two is enough."""
FOR_RECORDERS = (_TOP, *FOR_BACKWARD)
"""Names needed to know, in addition, which saved-tensor hooks are open."""
FOR_OPERATIONS = (*FOR_RECORDERS, *_SEQUENCE)
"""Names needed to know which operation saves a tensor."""
FOR_NODES = (*FOR_RECORDERS, _NODE)
"""Names needed to know which operation reads a tensor."""

# === Trees of tensors, and tensors without values =====================================================

FOR_FAKES = "torch.utils._pytree.tree_map_only", "torch._subclasses.fake_tensor.FakeTensorMode"
"""Names needed to know what a dense model would keep."""
FOR_REPLAYS = "torch.utils._pytree.tree_flatten", "torch.utils._pytree.tree_unflatten", "torch._C._storage_Use_Count"
"""Names needed to replay modules from CUDA graphs."""


def _list_leaves(tree: Any) -> list[Any]:
    if not isinstance(tree, dict | list | tuple):
        return [tree]
    return [leaf for part in (tree.values() if isinstance(tree, dict) else tree) for leaf in _list_leaves(part)]


class _NoFakeTensors:
    def __init__(self, **options: Any) -> None:
        require("A forward on fake tensors", FOR_FAKES)


tree_leaves: Callable[[Any], list[Any]] = look_up("torch.utils._pytree.tree_leaves", _list_leaves)
tree_map_only: Callable[..., Any] = look_up(FOR_FAKES[0], _raise_missing(FOR_FAKES[0]))
FakeTensorMode: Any = look_up(FOR_FAKES[1], _NoFakeTensors)
tree_flatten: Callable[[Any], tuple[list[Any], Any]] = look_up(FOR_REPLAYS[0], _raise_missing(FOR_REPLAYS[0]))
tree_unflatten: Callable[[list[Any], Any], Any] = look_up(FOR_REPLAYS[1], _raise_missing(FOR_REPLAYS[1]))
_storage_uses: Callable[[int], int] = look_up(FOR_REPLAYS[2], _raise_missing(FOR_REPLAYS[2]))


def storage_uses(tensor: Tensor) -> int:
    """Return the number of references to the storage of a tensor."""
    return _storage_uses(tensor.untyped_storage()._cdata)


# === Simulated steps ==================================================================================

_MODE, _LIBRARY = "torch.utils._python_dispatch.TorchDispatchMode", "torch.library._scoped_library"
_FLASH = "torch.ops.aten._scaled_dot_product_flash_attention"
_EFFICIENT = "torch.ops.aten._scaled_dot_product_efficient_attention"
TorchDispatchMode: Any = look_up(_MODE, object)
scoped_library: Callable[..., AbstractContextManager[Any]] = look_up(_LIBRARY, _raise_missing(_LIBRARY))
flash_attention: Callable[..., Any] = look_up(_FLASH, _raise_missing(_FLASH))
efficient_attention: Callable[..., Any] = look_up(_EFFICIENT, _raise_missing(_EFFICIENT))
_BELOW, _KEY = "torch._C._dispatch_keyset_full_after", "torch._C.DispatchKey"
_keys_below, _dispatch_key = look_up(_BELOW), look_up(_KEY)


def redispatch(operation: Any, keys: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    """Run torch's implementation of an operation below a dispatch key; ``keys`` are those of the call."""
    return operation.redispatch(keys & _keys_below(getattr(_dispatch_key, key)), *args, **kwargs)


FOR_SIMULATION = (_MODE, _LIBRARY, _BELOW, _KEY, _FLASH, _EFFICIENT, *FOR_FAKES, *FOR_NODES)
"""Names needed to simulate a step."""

# === Joint graphs of compiled regions =================================================================


class JointPasses(NamedTuple):
    """Where passes over joint graphs are installed.

    Args:
        inductor: The configuration with ``joint_custom_post_pass``.
        functorch: The configuration with ``joint_custom_pass``, for all backends, which runs before inductor's passes.
        base: Base class of passes that have a ``uuid`` for inductor's caches.
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
"""Names needed to run a pass over joint graphs. Importing inductor takes seconds, so they are looked up late."""


@functools.cache
def joint_passes() -> JointPasses:
    """Return where passes over joint graphs are installed; ``refusal(..., FOR_JOINT_PASSES)`` says if nowhere."""
    base = [look_up(name, object) for name in FOR_JOINT_PASSES][2]
    inductor, functorch = (look_up(name.rpartition(".")[0]) for name in FOR_JOINT_PASSES[:2])
    return JointPasses(inductor, functorch, base)


def sequence_number(node: Any) -> int | None:
    """Return the number of the autograd node that a node of a joint graph belongs to, in forward or in backward."""
    number: int | None = node.meta.get("seq_nr")
    return number


def original_operation(node: Any) -> str:
    """Return the name of the operation that a node of a graph is a part of: ``"aten.gelu"``, or ``""``."""
    return str(getattr(node.meta.get("original_aten"), "overloadpacket", ""))


def is_of_autograd(node: Any) -> bool:
    """Return True for a node of the backward of one of torch's operations.

    It is False for nodes of custom functions, whose sequence numbers may be those of other operations.
    """
    return bool(node.meta.get("partitioner_tag") == "is_backward")


def is_tangent(node: Any) -> bool:
    """Return True for an input of a joint graph that is a gradient of an output."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def place_in_half(node: Any, tag: str) -> None:
    """Tell the partitioner which half a node of a joint graph belongs to."""
    node.meta["partitioner_tag"] = tag


def checkpoint_number(node: Any) -> int | None:
    """Return the number of the checkpoint that computes a node of a joint graph again, or ``None``."""
    return node.meta["ac_graph_id"] if "recompute" in node.meta else None


def checkpoint_policy(node: Any) -> Any:
    """Return the ``CheckpointPolicy`` of a node of a joint graph, or ``None``."""
    return node.meta.get("recompute")


def set_checkpoint_policy(node: Any, policy: Any) -> None:
    """Set the ``CheckpointPolicy`` of a node of a joint graph; with ``None``, remove it."""
    if policy is None:
        node.meta.pop("recompute", None)
    else:
        node.meta["recompute"] = policy
        node.meta["ac_graph_id"] = 0


def traced_value(node: Any) -> Any:
    """Return the example of a value in a graph that a compiler is tracing."""
    return node.meta["example_value"]


# === Inductor's code ==================================================================================


class Lowering(NamedTuple):
    """How inductor writes operators as code.

    Args:
        lowerings: The lowering of each operator.
        fallback_handler: Returns a lowering that calls the operator.
        ir: Inductor's representation of code.
        quotient: Divides an index by a number, rounded down.
    """

    lowerings: dict[Any, Any]
    fallback_handler: Callable[..., Any]
    ir: Any
    quotient: Callable[[Any, int], Any]


_QUOTIENT = "torch.utils._sympy.functions.FloorDiv"
FOR_CALLS = (
    "torch._inductor.lowering.lowerings",
    "torch._inductor.lowering.fallback_handler",
    "torch._inductor.ir",
    "torch._inductor.ir.ExternKernelOut",
    "torch._inductor.ir.FallbackKernel",
    "torch._inductor.ir.ExternKernel.realize_input",
    "torch._inductor.ir.ExternKernel.require_exact_strides",
    "torch._inductor.ir.TensorBox.unwrap_view",
    "torch._inductor.ir.is_storage_and_layout",
    "torch._inductor.ir.FixedLayout",
    "torch._inductor.ir.TensorBox.create",
    "torch._inductor.codegen.wrapper.PythonWrapperCodegen",
    "torch._inductor.ir.Pointwise.create",
    _QUOTIENT,
    _VIRTUALIZED,
    _OPERATIONS,
)
"""Names needed to call packing in inductor's code; looked up late."""


@functools.cache
def lowering() -> Lowering:
    """Return how inductor writes operators; ``refusal(..., FOR_CALLS)`` says if something is missing."""
    parts = {name: look_up(name) for name in FOR_CALLS}
    lowerings, fallback, ir = list(parts.values())[:3]
    return Lowering(lowerings, fallback, ir, parts[_QUOTIENT])


def virtualized() -> Any:
    """Return the state of inductor."""
    return look_up(_VIRTUALIZED)


def operations() -> Any:
    """Return what writes operations on single values into inductor's kernels."""
    return look_up(_OPERATIONS)


def inductor_runs() -> bool:
    """Return True while inductor compiles."""
    state = virtualized()
    return state is not None and isinstance(state.fake_mode, FakeTensorMode)


# === Modules ==========================================================================================

_GLOBAL_HOOKS = [
    look_up(f"torch.nn.modules.module._global_{name}", {None: None})
    for name in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
]


def any_global_hook() -> bool:
    """Return True if hooks are called for all modules, or may be."""
    return any(_GLOBAL_HOOKS)


DYNAMO, COMPILED = "torch._dynamo", "torch._functorch."
"""The module that is imported once something is compiled, and the prefix of modules that run compiled regions. With
other names, probes do not look into compiled modules, and tensors that compiled regions save stay uncompressed."""
ATTRIBUTES: dict[Any, tuple[str, ...]] = {
    Tensor: ("_base", "_is_view", "_version"),
    torch.UntypedStorage: ("_cdata",),
    nn.Module(): (
        *("_buffers", "_modules", "_non_persistent_buffers_set", "_parameters"),
        *("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks"),
        *("_forward_hooks_always_called", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"),
    ),
}
"""Attributes that the package cannot do without."""
OPTIONAL = (
    "_sequence_nr",  # of nodes, see above
    "_saved_exponent",  # of nodes: without these two, the tensors that powers and norms save are not packed
    "_saved_ord",
    "_forward_cls",  # of nodes: without it, no function in Python runs its backward twice
    "_schema",  # of operations: needed to simulate a step
    "_check_input_dim",  # of batch norms: without it, they stay dense
    "_compiled_call_impl",  # of modules: without it, compiled modules get hooks that do nothing there
    "_cache_enabled",  # of parametrize: without it, dense memory is not known
)
"""Other attributes of torch's objects, which may be missing."""

_missing = [
    f"{getattr(owner, '__name__', 'Module')}.{name}"
    for owner, names in ATTRIBUTES.items()
    for name in names
    if not hasattr(owner, name)
]
if _missing:
    raise ImportError(
        f"lightning_actprune needs {' and '.join(_missing)}, which torch {torch.__version__} does not have. HINT: use "
        "another version of torch, or a newer lightning_actprune."
    )
