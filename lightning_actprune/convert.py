"""Convert the layers of a model into compressed ones, and back, in place.

A layer is converted by assigning another ``__class__``. Parameters, hooks, shared references, the training flag, names
and ``state_dict`` stay the same objects. Replacing the module could not promise that: a second name would keep the
dense layer, hooks would be lost, and ``fully_shard`` would hold the old module. The settings of a layer are one plain
attribute, so no buffer or parameter is added.

An attention module is converted for its in-projection, its output projection or both, since its code has to route
either of them (``operators.attention``). Saved-tensor hooks compress what other operations save (``operators.saved``);
the model carries these hooks while it is converted.
"""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_actprune.compiled.marks import RECOMPUTE, Mark, Model, general_name
from lightning_actprune.config import MIN_FEATURES, Config, Keep, Operator, PresetName, Rule, check_model
from lightning_actprune.operators import convolution
from lightning_actprune.operators.activation import CompressedActivation, ExactActivation
from lightning_actprune.operators.attention import RoutedMultiheadAttention
from lightning_actprune.operators.base import (
    OF_CONVERSION,
    CompressedLayer,
    Converted,
    LayerState,
    Marks,
    dense_class,
    is_quantized,
    torch_class,
)
from lightning_actprune.operators.convolution import Convolution
from lightning_actprune.operators.hooks import drop_idle_hooks
from lightning_actprune.operators.linear import CompressedLinear
from lightning_actprune.operators.recompute import RecomputedModule, RecomputeState, find_blocks
from lightning_actprune.operators.registry import (
    LEFT_DENSE,
    ROOT,
    enter_in_tables,
    find_compressed_class,
    find_known_class,
    layers,
    make_recomputed_class,
    operator_of,
    plain_name,
    weights_of,
)
from lightning_actprune.operators.saved import SavedTensorCompression
from lightning_actprune.report import BlockReport, ConversionReport, LayerReport
from lightning_actprune.schedules import SparsitySchedule, highest_sparsity, sparsity_at

_SAVED = "_saved_tensor_compressions"
_WATCHES = "_watches"
_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
_CELLS = nn.RNNCell, nn.LSTMCell, nn.GRUCell
_CLASSES = nn.Module, nn.Sequential, nn.Identity, nn.Flatten, nn.Embedding, nn.EmbeddingBag, nn.RNN, nn.LSTM, nn.GRU
_WITHOUT_OPERATIONS = frozenset(cls.forward for cls in (*_CLASSES, *_CELLS))
"""Forwards that call other modules, or whose own operations save nothing that could be compressed."""
_REPLACED = "its forward was replaced on the instance, so the one of the converted class would never run"


class LayerClaimedError(ValueError):
    """A layer is already converted by another owner."""


def convert(
    model: nn.Module,
    preset: PresetName | None = None,
    *,
    sparsity: float | None = None,
    block_size: int | None = None,
    rules: Mapping[str, Rule] | None = None,
    offload: bool = False,
) -> ConversionReport:
    """Compress what the layers of ``model`` keep for backward, in place; ``revert`` undoes it.

    Args:
        model: Any module; parameters, hooks and names stay the same objects.
        preset: ``"paper"``, ``"balanced"``, ``"max"`` or ``"recompute"`` (see ``config``). By default ``"paper"`` with
            a ``sparsity``, and ``"balanced"`` without.
        sparsity: Fraction of blocks to drop, in [0, 1), instead of the preset's.
        block_size: Consecutive values per block, positive, instead of the preset's; cut to the row if larger.
        rules: Settings by patterns on names or operators, in order. The first pattern that matches a layer counts,
            ``None`` keeps the layer dense, and the preset decides for all others:
            ``{"head": None, "blocks.*.fc1": Keep(sparsity=0.5, bits=4), "type:norm": Keep(bits=4)}``.
        offload: Whether packed tensors wait for backward in the memory of the host. Gradients do not change. On a CPU,
            and for tensors that keep their bits, it has no effect.

    Returns:
        Every supported layer, with its settings or the reason why it is dense.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, a pattern matches no layer, no layer was converted, a layer is
            already converted, or a sparsity is a schedule. The model is unchanged then.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
        >>> [layer.fqn for layer in convert(model, sparsity=0.6, block_size=32).converted]
        ['0', '2']
        >>> revert(model)
        ['0', '2']
    """
    check_model(model)
    config = Config(preset, sparsity, block_size, rules, offload)
    for keep in config.keeps:
        if isinstance(keep.sparsity, SparsitySchedule):
            raise ValueError(
                f"`sparsity` must be a number in convert(), which sees no training progress, got {keep.sparsity!r}. "
                "HINT: use ActivationPruning, or pass a number and set `layer.sparsity = schedule(step / steps)` in "
                "your loop."
            )
    return convert_and_check(model, config, new_owner("convert()"))


def revert(model: nn.Module, owner: str | None = None) -> list[str]:
    """Make converted layers of ``model`` dense again and return their names.

    Args:
        model: A module that ``convert`` was called on, or any module.
        owner: Only revert the layers that this owner converted; ``None`` for all converted layers. Layers that were
            built compressed stay.
    """
    _detach_hooks(check_model(model), owner)
    blocks = _stop_recompute(model, owner)
    return blocks + revert_layers(model, lambda layer: owner in (None, layer.owner))


def revert_layers(model: nn.Module, should_revert: Callable[[CompressedLayer], bool]) -> list[str]:
    """Make the converted layers of ``model`` dense again for which ``should_revert`` is true; return their names."""
    names = []
    for fqns, layer in layers(model):
        if is_converted(layer) and layer.owner is not None and should_revert(layer):
            is_listed = _is_listed(layer)  # type: ignore[arg-type]
            del layer.__dict__["_state"]
            layer.__class__ = dense_class(type(layer))  # type: ignore[assignment, arg-type]
            names += [fqns[0]] if is_listed else []
    for module in model.modules():
        if type(module) is RoutedMultiheadAttention and not isinstance(module.out_proj, CompressedLinear):
            module.__class__ = dense_class(type(module))  # type: ignore[assignment]
    return names


def convert_and_check(model: nn.Module, config: Config, owner: str) -> ConversionReport:
    """Convert a model as ``convert`` does, with its errors and warnings."""
    report = convert_layers(model, config, owner)
    try:
        check_conversion(model, report, config)
    except ValueError:
        revert(model, owner)
        raise
    if idle := describe_idle(model, report):
        warnings.warn(idle, stacklevel=3)
    return report


def convert_layers(model: nn.Module, config: Config, owner: str) -> ConversionReport:
    """Convert the layers that ``config`` covers, and convert those of the same owner again.

    Raises:
        LayerClaimedError: If another owner has converted a covered layer; nothing is converted then.
    """
    report = ConversionReport()
    blocks = _plan_blocks(model, config, owner)
    with _without_recompute(model, owner):
        selected = _choose_layers(model, config, owner, blocks, report)
        report.saved = config.keep_of_all("saved")
        if report.saved is not None:
            _check_saved_is_free(model, owner)
    # Since an earlier conversion, layers may have been removed or renamed: revert those that are no longer selected.
    still_selected = set[Any](selected)
    revert_layers(model, lambda layer: layer.owner == owner and layer not in still_selected)
    for candidate, keep in selected.values():
        _convert_layer(candidate, keep, owner)
    _start_recompute(blocks, owner)
    _attach_saved(model, config, owner)  # last, since modules that run again take no hooks
    report.blocks = list(blocks.values())
    return report


def new_owner(name: str) -> str:
    """Return a unique name for an owner of conversions, also unique among owners in a pickled model."""
    return f"{name} #{uuid.uuid4().hex[:8]}"


def _name_owner(owner: str | None) -> str:
    """Return the name of an owner, without the part that makes it unique."""
    return str(owner).partition(" #")[0]


def is_converted(layer: Any) -> TypeGuard[CompressedLayer]:
    """Return True if ``layer`` itself is compressed; attention may be routed for its output projection alone."""
    return isinstance(layer, CompressedLayer) and "_state" in layer.__dict__


# === A dense view of a converted model ================================================================================
class DenseView:
    """Shows the modules that an owner has converted as dense modules while it is open.

    Their classes, attributes and forwards are those of dense modules.
    """

    def __init__(self) -> None:
        self._dense: list[tuple[nn.Module, type[nn.Module], dict[str, Any]]] = []
        self._paused: SavedTensorCompression | None = None

    def open(self, model: nn.Module, owner: str) -> None:
        """Make the modules of ``model`` dense that ``owner`` has converted, unless they already are."""
        for module in model.modules():
            if not isinstance(module, Converted):
                continue
            names = [name for name in OF_CONVERSION if name in vars(module)]
            # Attention that is routed for its output alone, and modules that are replayed, belong to every owner.
            if all(getattr(vars(module)[name], "owner", owner) == owner for name in names):
                attributes = {name: vars(module).pop(name) for name in names}
                self._dense.append((module, type(module), attributes))
                module.__class__ = torch_class(dense_class(type(module)))  # type: ignore[assignment]
        self._paused = find_hooks(model, owner) or self._paused
        if self._paused is not None:
            self._paused.paused = True

    def close(self) -> None:
        """Convert them again; does nothing if the view is closed."""
        while self._dense:
            module, cls, attributes = self._dense.pop()
            module.__class__ = cls
            vars(module).update(attributes)
        if self._paused is not None:
            self._paused.paused = False
            self._paused = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(DenseView())  # a copy is closed


# === Which layers are converted =======================================================================================
@dataclass(frozen=True)
class Candidate:
    """A layer that may be converted, with what decides it besides its type.

    Args:
        fqns: All its names.
        layer: The layer.
        operator: Its operator.
        attention: The module whose output projection it is.
        sharded: Whether ``fully_shard`` gathers its parameters to plain tensors before the forward.
        flattened: Whether ``FullyShardedDataParallel`` has merged its parameters with others.
    """

    fqns: list[str]
    layer: nn.Module
    operator: Operator
    attention: nn.MultiheadAttention | None
    sharded: bool
    flattened: bool


def candidates(model: nn.Module) -> Iterator[Candidate]:
    """Yield every supported layer."""
    sharded, flattened = _find_ids_inside(model, FSDPModule), _find_ids_inside(model, FullyShardedDataParallel)
    attentions = {id(m.out_proj): m for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    for fqns, layer in layers(model):
        managed = id(layer) in flattened and "_is_fsdp_managed_module" in vars(layer)  # not one of `ignored_modules`
        operator = operator_of(layer)
        assert operator is not None
        yield Candidate(fqns, layer, operator, attentions.get(id(layer)), id(layer) in sharded, managed)


def _find_ids_inside(model: nn.Module, wrapper: type[Any]) -> set[int]:
    """Return the ids of all modules inside modules of a class."""
    return {id(inner) for outer in model.modules() if isinstance(outer, wrapper) for inner in outer.modules()}


def _choose_layers(
    model: nn.Module,
    config: Config,
    owner: str,
    blocks: Mapping[nn.Module, BlockReport],
    report: ConversionReport,
) -> dict[nn.Module, tuple[Candidate, Keep]]:
    """Return the layers to convert, and add a row to ``report`` for each layer that is or is not converted."""
    options = list(candidates(model))
    config = _fit_config(config, options)
    not_called = _find_uncalled(options, config, owner)
    rerun = [module for module, row in blocks.items() if row.recompute is not None and config.preset == "recompute"]
    dense = {layer for module in rerun for layer in module.modules()}
    selected: dict[nn.Module, tuple[Candidate, Keep]] = {}
    for candidate in options:
        if not_called.issuperset(candidate.fqns):
            continue
        if candidate.layer in dense and config.rule_of(candidate.fqns, candidate.operator) is None:
            continue
        keep, reason = config.keep_of(candidate.fqns, candidate.operator), refusal(candidate, config, owner)
        if reason is None and keep is not None:
            selected[candidate.layer] = candidate, keep
            if _is_listed(candidate.layer):
                report.layers.append(_make_row(candidate, keep))
        elif keep is None and config.rule_of(candidate.fqns, candidate.operator) is None:
            if not is_converted(candidate.layer):  # nor converted by another owner
                report.uncovered[candidate.operator] += _is_listed(candidate.layer)
        elif _is_listed(candidate.layer):
            report.layers.append(_make_row(candidate, None, reason))
    return selected


def _fit_config(config: Config, options: list[Candidate]) -> Config:
    """Adapt ``config`` to a model with these layers."""
    classes = [find_known_class(type(candidate.layer)) for candidate in options]
    smooth = [k for k in classes if k is not None and issubclass(k, CompressedActivation)]
    return config.fitted(
        sum(isinstance(candidate.layer, _BATCH_NORMS) for candidate in options),
        sum(not issubclass(k, ExactActivation) for k in smooth),
    )


def _find_uncalled(options: list[Candidate], config: Config, owner: str) -> set[str]:
    """Return the names of modules that the layer around them computes itself once it is converted."""
    names = set[str]()
    for candidate in options:
        cls = find_compressed_class(torch_class(type(candidate.layer)))
        if cls is None or cls.replaced is None:
            continue
        if is_converted(candidate.layer) or refusal(candidate, config, owner) is None:
            child = cls.replaced
            names.update(child if fqn == ROOT else f"{fqn}.{child}" for fqn in candidate.fqns)
    return names


def _is_listed(layer: nn.Module) -> bool:
    """Return True if a report lists the layer: it keeps something, unlike dropout with ``p=0``."""
    cls = find_known_class(type(layer))
    return cls is None or (cls.stores and not (isinstance(layer, nn.Dropout) and layer.p == 0))


def check_conversion(model: nn.Module, report: ConversionReport, config: Config) -> None:
    """Raise ``ValueError`` if nothing was converted or a pattern matches no layer."""
    named_layers = [(candidate.fqns, candidate.operator) for candidate in candidates(model)]
    saves = bool(report.converted or report.recomputed) or (report.saved is not None and _has_other_operations(model))
    if not named_layers and not saves:
        raise ValueError(
            f"{type(model).__name__} has no supported layers (linear layers, convolutions, activation functions, "
            "norms, layer scales), so nothing would be saved. HINT: recurrent layers are not covered."
        )
    if config.preset == "recompute" and not report.blocks:
        raise ValueError(
            f"{type(model).__name__} has no class of blocks that is repeated in a ModuleList or Sequential, so preset "
            "'recompute' has nothing to run again. HINT: name modules with rules, as "
            "`rules={\"encoder.*\": Recompute(bits=8)}`, or use preset 'max', which runs nothing again."
        )
    modules = [plain_name(fqn) for fqn, _ in model.named_modules()]
    config.check_that_rules_count(named_layers, modules)
    if not saves:
        hint = "cover more layers with `rules`, or use a preset that does ('balanced' and 'max' cover every operator)."
        uncovered = ", ".join(f"{count} of type {operator!r}" for operator, count in report.uncovered.items() if count)
        also = f"\nNot covered by the preset: {uncovered}." if uncovered else ""
        raise ValueError(
            f"No layer was converted, so nothing would be saved:\n{report.describe_skipped()}{also}\nHINT: {hint}"
        )
    for fqns, layer in layers(model):
        is_double = any(parameter.dtype == torch.float64 for parameter in layer.parameters(recurse=False))
        if is_double and is_converted(layer) and layer.keep.bits:
            raise ValueError(
                f"Layer {fqns[0]!r} is in float64, whose values cannot be kept in few bits. HINT: train in float32 or "
                "16 bits, or use preset 'paper', which only drops blocks."
            )


def describe_idle(model: nn.Module, report: ConversionReport) -> str:
    """Return a warning if no layer was converted, so that at most other operations are compressed."""
    if report.converted or report.recomputed:
        return ""
    reasons = f"\n{report.describe_skipped()}\n" if report.refused else " "
    return (
        f"No layer of {type(model).__name__} was converted, so at most the saved tensors of other operations are "
        f"compressed.{reasons}HINT: linear layers, convolutions, activation functions and norms can be converted; "
        "recurrent layers cannot."
    )


def _has_other_operations(model: nn.Module) -> bool:
    """Return True if a module runs operations of its own whose saved tensors may be compressed."""
    for module in model.modules():
        own = type(module).forward not in _WITHOUT_OPERATIONS or "forward" in vars(module)
        if (own or hasattr(module, "training_step")) and operator_of(module) is None:
            return True
    return False


# === Why a layer stays dense ==========================================================================================
def refusal(candidate: Candidate, config: Config, owner: str) -> str | None:
    """Return why a layer is not converted, or ``None`` if it is.

    Raises:
        LayerClaimedError: If another owner has converted it.
    """
    fqns, layer, operator = candidate.fqns, candidate.layer, candidate.operator
    if is_converted(layer) and layer.owner is None:
        return f"was built as {type(layer).__name__} and keeps its own settings"
    keep = config.keep_of(fqns, operator)
    if keep is None:
        return config.why_dense(fqns, operator)
    cls = find_known_class(type(layer))
    if cls is not None and not cls.drops_blocks and keep.bits is None:
        return "drops no blocks, so bits=None would keep its whole input uncompressed"
    if is_converted(layer):
        if layer.owner != owner:
            raise LayerClaimedError(
                f"Layer {fqns[0]!r} is already converted by {_name_owner(layer.owner)}, and {_name_owner(owner)} "
                "claims it too. HINT: call `revert(model)` first, or give each its own layers with `rules`."
            )
        return None
    return _forward_refusal(layer, candidate.attention) or _weight_refusal(candidate, config)


def _forward_refusal(layer: nn.Module, attention: nn.MultiheadAttention | None) -> str | None:
    """Return why the compressed forward cannot replace the layer's own."""
    if type(layer) is NonDynamicallyQuantizableLinear and (attention is None or _forward_refusal(attention, None)):
        return "nn.MultiheadAttention uses its weight without calling its forward, so compressing it would save nothing"
    if isinstance(layer, LazyModuleMixin):
        return "is not initialised yet; convert after the first forward"
    if isinstance(layer, FSDPModule):
        return "was given to fully_shard itself before conversion; convert it first (the callback does, in setup)"
    if type(layer) in LEFT_DENSE:
        return LEFT_DENSE[type(layer)][1]
    if convolution.is_transposed(layer):
        return "is a transposed convolution, whose input stays uncompressed"
    cls = find_compressed_class(type(layer))
    if cls is None and not is_converted(layer):
        if is_quantized(layer):
            return "its weight is frozen and quantized, so it keeps no input"
        name = f"{type(layer).__module__}.{type(layer).__qualname__}"
        return f"is a {name}, whose forward is not known to be that of its base class"
    if "forward" in layer.__dict__:
        return _REPLACED
    return None if cls is None else cls.refusal(layer)


def _weight_refusal(candidate: Candidate, config: Config) -> str | None:
    """Return why the input of the layer cannot, or should not, be compressed."""
    weights = weights_of(candidate.layer)
    shards = [weight for weight in weights if isinstance(weight, DTensor)]
    is_whole = candidate.sharded and all(map(_is_whole_in_forward, shards))
    if shards and not (is_whole or _can_take_shards(candidate.layer)):
        return "its weight is a tensor-parallel DTensor; only linear layers and norms run on shards"
    if candidate.operator not in ("linear", "convolution"):
        return None
    if candidate.flattened:
        return (
            "was wrapped by FullyShardedDataParallel before conversion, which flattens its weight; make it in __init__ "
            "or in configure_model"
        )
    if any(hasattr(weight, "ds_id") for weight in weights):
        return "its weight was partitioned by DeepSpeed (stage 3) before conversion; make the layer in __init__"
    if not weights[0].is_floating_point():
        return f"its weight is {weights[0].dtype}; only inputs of floating-point layers can be compressed"
    narrow = candidate.operator == "linear" and min(weight.shape[1] for weight in weights) < MIN_FEATURES
    if narrow and config.rule_of(candidate.fqns, candidate.operator) is None:
        features = min(weight.shape[1] for weight in weights)
        return (
            f"has {features} input features, fewer than {MIN_FEATURES}, which saves too little for its time; name it "
            "in a rule to compress it"
        )
    return None


def _can_take_shards(layer: nn.Module) -> bool:
    """Return True if the converted layer runs on shards; weights that a hook computes from parameters do not count."""
    cls, own = find_compressed_class(type(layer)), set(map(id, layer.parameters(recurse=False)))
    return cls is not None and cls.takes_shards and all(id(weight) in own for weight in weights_of(layer))


def _is_whole_in_forward(weight: DTensor) -> bool:
    """Return True if only ``fully_shard`` has split a weight: it does so in the last dimension of a mesh alone."""
    *others, _ = weight.placements
    return len(others) <= 1 and all(placement.is_replicate() for placement in others)


# === One layer: its row and its conversion ============================================================================
def _make_row(candidate: Candidate, keep: Keep | None, reason: str | None = None) -> LayerReport:
    layer, kind = candidate.layer, torch_class(type(candidate.layer)).__name__
    has_sizes = keep is not None and candidate.operator in ("linear", "convolution")
    inputs, outputs = _find_features(layer) if has_sizes else (None, None)
    cls = find_known_class(type(layer))
    sparsity = 0.0 if keep is None or cls is None or not cls.drops_blocks else sparsity_at(keep.sparsity, 0.0)
    one_bit = cls is not None and cls.one_bit
    frozen = has_sizes and not any(weight.requires_grad for weight in weights_of(layer))
    return LayerReport(
        candidate.fqns[0], kind, candidate.operator, inputs, outputs, keep, sparsity, reason, one_bit, frozen
    )


def _find_features(layer: nn.Module) -> tuple[int, int]:
    """Return the input and output sizes of a layer; for an in-projection, those of the query and all three outputs."""
    if isinstance(layer, Convolution):
        return layer.in_channels, layer.out_channels
    if isinstance(layer, CompressedLayer) and is_converted(layer) and layer._state.features is not None:
        return layer._state.features
    weights = weights_of(layer)
    return weights[0].shape[1], sum(weight.shape[0] for weight in weights)


def _convert_layer(candidate: Candidate, keep: Keep, owner: str) -> None:
    """Convert a layer, or update the settings of one that ``owner`` has converted."""
    layer, attention = candidate.layer, candidate.attention
    features = _find_features(layer) if candidate.operator in ("linear", "convolution") else None
    cls: type[Any] | None = type(layer) if is_converted(layer) else find_compressed_class(type(layer))
    assert cls is not None
    sparsity = sparsity_at(keep.sparsity, 0.0) if cls.drops_blocks else 0.0
    has_schedule = cls.drops_blocks and isinstance(keep.sparsity, SparsitySchedule)
    highest = highest_sparsity(keep.sparsity) if has_schedule else 0.0
    layer._state = LayerState(keep, sparsity, owner, highest, features)  # type: ignore[assignment]
    if type(layer) is not cls:
        layer.__class__ = cls
        enter_in_tables(cls)
    if type(attention) is nn.MultiheadAttention:
        attention.__class__ = RoutedMultiheadAttention


# === Modules that run again in backward ===============================================================================
def _plan_blocks(model: nn.Module, config: Config, owner: str) -> dict[nn.Module, BlockReport]:
    """Return the modules that should run again in backward: the outermost ones that ``config`` names.

    Raises:
        LayerClaimedError: If one of them, or a module inside or around it, runs again for another owner.
    """
    if not config.recomputes:
        return {}
    blocks = [plain_name(name) for name in find_blocks(model)] if config.preset == "recompute" else []
    names: dict[nn.Module, list[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(plain_name(fqn))
    claimed = [other for other in names if isinstance(other, RecomputedModule) and other._recompute.owner != owner]
    rows, inside = dict[nn.Module, BlockReport](), set[nn.Module]()
    for module, fqns in names.items():
        keep = None if module in inside else config.recompute_of(fqns, blocks)
        if keep is None:
            continue
        reason = _recompute_refusal(model, module)
        within = set(module.modules())
        if module is not model and type(module).forward is not nn.Module.forward:
            inside |= within  # children of the model itself, or of a list, can still run again
        for other in claimed if reason is None else ():
            if other in within or module in set(other.modules()):
                raise LayerClaimedError(
                    f"Module {names[other][0]!r} already runs again in backward for "
                    f"{_name_owner(other._recompute.owner)}, and {_name_owner(owner)} claims {fqns[0]!r} too. HINT: "
                    "call `revert(model)` first, or name it once in `rules`."
                )
        kind = torch_class(type(module)).__name__
        rows[module] = BlockReport(fqns[0], kind, keep if reason is None else None, reason)
    return rows


def _recompute_refusal(model: nn.Module, module: nn.Module) -> str | None:
    """Return why a module cannot run again in backward, or ``None`` if it can."""
    if module is model:
        return "is the model itself: its batch needs no gradient, and the whole model would run twice"
    alone = next(module.children(), None) is None
    if alone and operator_of(module) is not None:
        return "is a single layer; use `Keep`, which needs no second run"
    if alone or type(module).forward is nn.Module.forward:
        return "calls no modules itself: it has none, or it is a list"
    if "forward" in module.__dict__ or isinstance(module, torch.jit.ScriptModule):
        return _REPLACED
    wrappers = [other for other in model.modules() if "_checkpoint_wrapped_module" in other._modules]
    if any(module in set(other.modules()) or other in set(module.modules()) for other in wrappers):
        return "is inside an activation checkpoint, or around one; use one of the two"
    if any(getattr(other, "gradient_checkpointing", False) for other in module.modules()):
        return "checkpoints itself (`gradient_checkpointing`); use one of the two"
    return None


def _start_recompute(blocks: dict[nn.Module, BlockReport], owner: str) -> None:
    """Let modules run again in backward as planned."""
    modules = [(module, row) for module, row in blocks.items() if row.recompute is not None]
    for number, (module, row) in enumerate(modules):
        assert row.recompute is not None
        pair = number // 2
        turn = pair + (pair > 0)  # no exact inputs in the second step, which a memory budget measures
        module._recompute = RecomputeState(row.recompute, owner, "", row.fqn, turn, {})  # type: ignore[assignment]
        module.__class__ = make_recomputed_class(type(module))


def _stop_recompute(model: nn.Module, owner: str | None) -> list[str]:
    """Stop running the modules of ``owner``, or all, again in backward; return their names."""
    modules = _find_recomputed(model, owner)
    for _, module in modules:
        del module.__dict__["_recompute"]
        module.__class__ = dense_class(type(module))  # type: ignore[arg-type, assignment]
    return [plain_name(fqn) for fqn, _ in modules]


def _find_recomputed(model: nn.Module, owner: str | None) -> list[tuple[str, RecomputedModule]]:
    """Return the modules of ``owner``, or all, that run again in backward, with their names."""
    modules = [(fqn, module) for fqn, module in model.named_modules() if isinstance(module, RecomputedModule)]
    return [(fqn, module) for fqn, module in modules if owner in (None, module._recompute.owner)]


@contextmanager
def _without_recompute(model: nn.Module, owner: str) -> Iterator[None]:
    """Suspend recomputation for the modules of ``owner``, so that their own classes are seen.

    An error restores it.
    """
    states: dict[Any, RecomputeState] = {module: module._recompute for _, module in _find_recomputed(model, owner)}
    _stop_recompute(model, owner)
    try:
        yield
    except BaseException:
        for module, state in states.items():
            module._recompute = state
            module.__class__ = make_recomputed_class(type(module))
        raise


# === Marks for compilers ==============================================================================================
def mark_layers(model: nn.Module, owner: str, *, unmarked_layers: bool = False) -> None:
    """Show compilers the layers of ``owner`` as dense ones with marks that say how to keep their inputs.

    Call it again whenever layers or rules have changed. What rules leave dense stays dense. For other operations this
    holds for the whole model, since a compiler does not say which module an operation is in.

    Args:
        model: The converted model.
        owner: Who converted it.
        unmarked_layers: Whether inputs of unconverted layers may be compressed like tensors of other operations; not
            if a rule leaves such a layer dense.
    """
    saved = find_hooks(model, owner)
    of_model = Model() if saved is None else replace(saved.for_compilers(), unmarked_layers=unmarked_layers)
    for fqns, layer in layers(model):
        if is_converted(layer) and layer.owner == owner:
            layer._state = replace(layer._state, marks=_make_marks(layer, general_name(fqns[0]), of_model))
    for fqn, module in _find_recomputed(model, owner):
        keep = module.recompute
        settings = keep.bits or 0, keep.block_size
        mark = Mark(RECOMPUTE, general_name(plain_name(fqn)), *settings, offload=keep.offload, model=of_model)
        module._recompute = module._recompute._replace(mark=mark.text)


def unmark_layers(model: nn.Module, owner: str) -> None:
    """Show compilers the layers of ``owner`` without marks, so that the layers pack by themselves."""
    for _, layer in layers(model):
        if is_converted(layer) and layer.owner == owner:
            layer._state = replace(layer._state, marks=None)
    for _, module in _find_recomputed(model, owner):
        module._recompute = module._recompute._replace(mark="")


def _make_marks(layer: CompressedLayer, name: str, of_model: Model) -> Marks | None:
    """Return the marks that tell a compiler how to keep the inputs of a layer, ``None`` without marks."""
    if layer.traced == "own":
        return None
    if layer.traced == "dense":
        return "", "", 0, False
    keep = layer.keep
    settings = keep.stored_bits, keep.block_size, keep.topk_over, keep.selection, keep.offload
    mark = Mark(layer.operator_of(layer), name, *settings, of_model)
    min_rows_for_low_bits = keep.min_rows_for_low_bits if 0 < keep.stored_bits < 8 else 0
    # With averaging over processes, a compiler may cut the graph wherever gradients of weights fill a bucket.
    averaged = torch.distributed.is_available() and torch.distributed.is_initialized()
    cut = averaged and mark.operator in ("linear", "convolution")
    return mark.text, replace(mark, bits=8).text, min_rows_for_low_bits, cut


# === Hooks for saved tensors of other operations ======================================================================
class _Attached(dict[str, Any]):
    """The attached hooks by owner, an attribute of the model; copies of a model have no hooks."""

    def __deepcopy__(self, memo: Any) -> _Attached:
        return _Attached()

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[()]]:
        return dict, ()  # no class of this package


def detach_with_revert(model: nn.Module, watch: Any) -> None:
    """Let ``revert``, called without an owner, call ``watch.detach``."""
    watches = vars(model)[_WATCHES] = _Attached(vars(model).get(_WATCHES, {}))
    watches[new_owner(type(watch).__name__)] = watch


def _attach_saved(model: nn.Module, config: Config, owner: str) -> None:
    """Attach hooks that compress tensors of other operations, if ``config`` covers them."""
    _detach_hooks(model, owner)
    keep = config.keep_of_all("saved")
    if keep is None or keep.bits is None:
        return
    scale, loss_inside = config.keep_of_all("scale"), hasattr(model, "training_step")
    # What attention saves outside its projections has rules of its own.
    dense = {
        fqn
        for candidate in candidates(model)
        if not [*candidate.layer.children()] and config.is_dense_by_rule(candidate.fqns, candidate.operator)
        for fqn in candidate.fqns
    }
    attached = model.__dict__[_SAVED] = _Attached(model.__dict__.get(_SAVED, {}))
    attached[owner] = SavedTensorCompression(
        model,
        keep,
        dense=lambda fqn: fqn in dense or config.keep_of([fqn], "saved") is None,
        parameter_bits=None if scale is None else scale.bits,
        operations=config.operations,
        attention=config.attention,
        loss_inside=loss_inside,
    ).attach()


def _detach_hooks(model: nn.Module, owner: str | None) -> None:
    """Remove the hooks of ``owner``, or all, from ``model`` and the modules in it."""
    for module in model.modules():
        for attribute in (_SAVED, _WATCHES):
            attached = module.__dict__.get(attribute, {})
            for name in [name for name in attached if owner in (None, name)]:
                attached.pop(name).detach()
            if not attached:
                module.__dict__.pop(attribute, None)
        drop_idle_hooks(module)


def find_hooks(model: nn.Module, owner: str) -> SavedTensorCompression | None:
    """Return the hooks of ``owner`` on ``model``, ``None`` without any."""
    attached: Mapping[str, SavedTensorCompression] = model.__dict__.get(_SAVED, {})
    return attached.get(owner)


def _check_saved_is_free(model: nn.Module, owner: str) -> None:
    """Raise ``LayerClaimedError`` if another owner has hooks on ``model``."""
    for module in model.modules():
        for other in module.__dict__.get(_SAVED, {}):
            if other != owner:
                raise LayerClaimedError(
                    f"Saved tensors of other operations are already kept compressed by {_name_owner(other)}, and "
                    f"{_name_owner(owner)} claims them too. HINT: call `revert(model)` first, or cover them once "
                    "(`rules={'type:saved': None}` in the other)."
                )
