"""Turn the linear layers of a model into pruned ones and back, in place.

A layer is converted by reassigning its ``__class__``. Parameters, hooks, shared references, the training flag, names
and ``state_dict`` stay the very same objects, which replacing the module cannot promise (a second name would keep the
dense layer, hooks would be lost, and ``fully_shard`` would be left with the old module). Settings are plain attributes;
nothing is registered, so no buffer or parameter appears.

Only ``type(layer) is nn.Linear`` is converted: a subclass may do anything in its forward. Every linear layer that is
not converted is listed with its reason.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_actprune.arguments import Scope, check_block_size, check_patterns, check_scope, check_sparsity
from lightning_actprune.nn.linear import ActivationPrunedLinear, PruningSettings

MIN_FEATURES = 64
"""Default of ``min_features``. Packing takes about as long for 16 as for 256 features (launches dominate), so each MiB
saved costs 2.7 ms of eager step time at 16, 1.2 at 48, 0.9 at 64, 0.1 at 768 (H200; small_layers.json)."""

WRAPPERS = re.compile(r"(^|\.)(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)(?=\.|$)")


@dataclass(frozen=True)
class ConversionOptions:
    """Which layers to convert, and with what settings.

    Args:
        sparsity: Fraction of blocks dropped, in [0, 1).
        block_size: Values per block, positive.
        scope: Within what blocks compete, ``"sample"`` or ``"token"``.
        include: Glob patterns on fully qualified names; a layer must match one.
        exclude: Glob patterns on fully qualified names; a layer must match none.
        min_features: Layers with fewer input features stay dense.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.
    """

    sparsity: float = 0.6
    block_size: int = 32
    scope: Scope = "sample"
    include: Sequence[str] | str = ("*",)
    exclude: Sequence[str] | str = ()
    min_features: int = MIN_FEATURES

    def __post_init__(self) -> None:
        object.__setattr__(self, "sparsity", check_sparsity(self.sparsity))
        object.__setattr__(self, "block_size", check_block_size(self.block_size))
        object.__setattr__(self, "scope", check_scope(self.scope))
        object.__setattr__(self, "include", check_patterns(self.include, "include"))
        object.__setattr__(self, "exclude", check_patterns(self.exclude, "exclude"))
        if isinstance(self.min_features, bool) or not isinstance(self.min_features, int):
            raise TypeError(
                f"`min_features` must be an int >= 0, got {self.min_features!r}. HINT: 0 converts every size."
            )
        if self.min_features < 0:
            raise ValueError(
                f"`min_features` must be an int >= 0, got {self.min_features}. HINT: 0 converts every size."
            )


@dataclass(frozen=True)
class ConvertedLayer:
    """A converted layer: its name, its former class, its sizes and its settings."""

    fqn: str
    kind: str
    in_features: int
    out_features: int
    sparsity: float
    block_size: int
    scope: Scope


@dataclass(frozen=True)
class SkippedLayer:
    """A linear layer that was left as it is, and why."""

    fqn: str
    kind: str
    reason: str


@dataclass
class ConversionReport:
    """What a conversion did: every linear layer of the model is in one of the two lists."""

    converted: list[ConvertedLayer] = field(default_factory=list)
    skipped: list[SkippedLayer] = field(default_factory=list)

    def describe_skipped(self) -> str:
        """Return the skipped layers with their reasons, one a line."""
        return "\n".join(f"  {s.fqn} ({s.kind}): {s.reason}" for s in self.skipped)


class LayerClaimedError(ValueError):
    """A layer is already converted by somebody else."""


def convert(
    model: nn.Module,
    sparsity: float = 0.6,
    block_size: int = 32,
    *,
    scope: Scope = "sample",
    include: Sequence[str] | str = ("*",),
    exclude: Sequence[str] | str = (),
    min_features: int = MIN_FEATURES,
) -> ConversionReport:
    """Convert the linear layers of ``model`` in place; ``revert`` undoes it.

    Args:
        model: Any module; parameters, hooks and names stay the same objects.
        sparsity: Fraction of blocks dropped, in [0, 1).
        block_size: Consecutive values per block, positive; cut to the row if larger.
        scope: ``"sample"``: all blocks of a sample compete; ``"token"``: those of a row.
        include: Glob patterns on fully qualified names, such as ``"blocks.*.fc1"``; a layer must match one.
        exclude: Glob patterns on fully qualified names; a layer must match none.
        min_features: Layers with fewer input features stay dense.

    Returns:
        Converted and skipped layers; the latter with reasons.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, a pattern matches no linear layer, no layer was converted, or a
            layer is already converted. The model is then as it was before the call.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
        >>> [layer.fqn for layer in convert(model, sparsity=0.6, block_size=32).converted]
        ['0', '2']
        >>> revert(model)
        ['0', '2']
    """
    options = ConversionOptions(sparsity, block_size, scope, include, exclude, min_features)
    owner = new_owner("convert()")
    report = convert_layers(model, options, owner)
    try:
        check_conversion(model, report, options)
    except ValueError:
        revert(model, owner)
        raise
    return report


def revert(model: nn.Module, owner: str | None = None) -> list[str]:
    """Turn converted layers of ``model`` back into ``nn.Linear`` and return their names.

    Args:
        model: A module that ``convert`` was called on, or any module.
        owner: Only revert the layers that this owner converted; ``None`` for all converted layers. Layers that were
            built as ``ActivationPrunedLinear`` stay.
    """
    names = []
    for fqns, layer in linear_layers(model):
        if isinstance(layer, ActivationPrunedLinear) and layer.owner is not None and owner in (None, layer.owner):
            del layer.__dict__["_pruning"]
            layer.__class__ = _dense_class(type(layer))  # type: ignore[assignment]
            names.append(fqns[0])
    return names


def new_owner(name: str) -> str:
    """Return a name for somebody who converts layers, unique also among those in a pickled model."""
    return f"{name} #{uuid.uuid4().hex[:8]}"


def convert_layers(model: nn.Module, options: ConversionOptions, owner: str) -> ConversionReport:
    """Convert what ``options`` select; layers that ``owner`` converted before are reported as converted again.

    Raises:
        LayerClaimedError: If another owner has converted a selected layer; nothing is converted then.
    """
    report = ConversionReport()
    chosen: list[tuple[str, nn.Linear]] = []
    sharded = _fsdp_sharded(model)
    for fqns, layer in linear_layers(model):
        kind = type(layer).__name__
        reason = _refusal(fqns, layer, options, owner, id(layer) in sharded)
        if reason is not None:
            report.skipped.append(SkippedLayer(fqns[0], kind, reason))
        else:
            chosen.append((fqns[0], layer))
    for fqn, layer in chosen:
        _convert_layer(layer, options, owner)
        size, settings = (layer.in_features, layer.out_features), (options.sparsity, options.block_size)
        report.converted.append(ConvertedLayer(fqn, "Linear", *size, *settings, options.scope))
    return report


def check_conversion(model: nn.Module, report: ConversionReport, options: ConversionOptions) -> None:
    """Raise ``ValueError`` if nothing was converted or a pattern matches no linear layer."""
    layers = [fqns for fqns, _ in linear_layers(model)]
    names = [fqn for fqns in layers for fqn in fqns]
    listing = ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no nn.Linear layers, so there is nothing to prune. HINT: pass the module that "
            "holds them."
        )
    for argument, patterns in (("include", options.include), ("exclude", options.exclude)):
        for pattern in patterns:
            if not any(fnmatchcase(fqn, pattern) for fqn in names):
                raise ValueError(
                    f"`{argument}` pattern {pattern!r} matches no linear layer. HINT: patterns match the whole name; "
                    f"the linear layers are: {listing}."
                )
    if not report.converted:
        raise ValueError(
            f"No layer was converted, so nothing would be saved:\n{report.describe_skipped()}\n"
            "HINT: widen `include`, narrow `exclude`, or lower `min_features`."
        )


def linear_layers(model: nn.Module) -> Iterator[tuple[list[str], nn.Linear]]:
    """Yield every linear layer once, with all its fully qualified names (wrapper prefixes removed)."""
    names: dict[nn.Linear, list[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            names.setdefault(module, []).append(WRAPPERS.sub("", fqn).removeprefix(".") or "(root)")
    for layer, fqns in names.items():
        yield fqns, layer


def _convert_layer(layer: nn.Linear, options: ConversionOptions, owner: str) -> None:
    layer.__class__ = ActivationPrunedLinear
    layer._pruning = PruningSettings(options.sparsity, options.block_size, options.scope, owner)  # type: ignore[assignment]


def _dense_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return ``cls`` with ``nn.Linear`` in place of the pruned class.

    ``parametrize`` and ``fully_shard`` put a class of their own on top of a layer's, made for it at run time.
    """
    if cls is ActivationPrunedLinear:
        return nn.Linear
    bases = tuple(_dense_class(base) if issubclass(base, ActivationPrunedLinear) else base for base in cls.__bases__)
    namespace = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls.__name__.replace("ActivationPrunedLinear", "Linear"), bases, namespace)


def _fsdp_sharded(model: nn.Module) -> set[int]:
    """Return the ids of modules whose parameters ``fully_shard`` gathers to plain tensors before their forward."""
    return {id(inner) for outer in model.modules() if isinstance(outer, FSDPModule) for inner in outer.modules()}


def _refusal(fqns: list[str], layer: nn.Linear, options: ConversionOptions, owner: str, sharded: bool) -> str | None:
    """Return why ``layer`` is not converted, or ``None`` if it is."""
    if isinstance(layer, ActivationPrunedLinear) and layer.owner is None:
        return "was built as ActivationPrunedLinear and keeps its own settings"
    if not any(fnmatchcase(fqn, pattern) for fqn in fqns for pattern in options.include):
        return f"matches no `include` pattern ({', '.join(options.include)})"
    for pattern in options.exclude:
        if any(fnmatchcase(fqn, pattern) for fqn in fqns):
            return f"matches the `exclude` pattern {pattern!r}"
    if isinstance(layer, ActivationPrunedLinear):
        if layer.owner != owner:
            raise LayerClaimedError(
                f"Layer {fqns[0]!r} is already pruned by {layer.owner}, and {owner} claims it too. HINT: give each its "
                "own layers with `include` and `exclude`, or revert the first."
            )
        return None
    return _type_refusal(layer, options, sharded)


def _type_refusal(layer: nn.Linear, options: ConversionOptions, sharded: bool) -> str | None:
    if type(layer) is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return "nn.MultiheadAttention uses its weight without calling its forward, so pruning it would save nothing"
    if isinstance(layer, nn.LazyLinear):
        return "is not initialised yet; convert after the first forward"
    if isinstance(layer, FSDPModule):
        return "was given to fully_shard itself before conversion; convert it first (the callback does, in setup)"
    if type(layer) is not nn.Linear:
        return f"is a {type(layer).__module__}.{type(layer).__qualname__}, whose forward is not known to be nn.Linear's"
    if isinstance(layer.weight, DTensor) and not (sharded and layer.weight.device_mesh.ndim == 1):
        return "its weight is a tensor-parallel DTensor; choosing blocks on one shard is a different method"
    if "forward" in layer.__dict__:
        return "its forward was replaced on the instance, so the pruned one would never run"
    if not layer.weight.is_floating_point():
        return f"its weight is {layer.weight.dtype}; only floating-point layers can be pruned"
    if layer.in_features < options.min_features:
        return (
            f"in_features={layer.in_features} is below min_features={options.min_features}: below 64, each MiB "
            "saved cost over 1 ms of step time (H200, eager)"
        )
    return None
