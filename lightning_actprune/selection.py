"""Which layers of a model are converted, and why the others are not.

What a linear layer is, and which types are known, is in ``nn.kinds``. The output projection of an attention module is
a layer under its own name, which prunes only if the attention module is one whose code is known, since that uses the
weight without calling the layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_actprune.conversion_options import ConversionOptions
from lightning_actprune.layer_settings import matches
from lightning_actprune.nn.affine import affine_refusal
from lightning_actprune.nn.convolutions import padding_refusal
from lightning_actprune.nn.few_bit import FewBitLayer
from lightning_actprune.nn.few_bit_kinds import LEFT_DENSE, few_bit_class, operator_of
from lightning_actprune.nn.kinds import Layer, is_affine, kind_of, operator_kind, pruned_class, weights_of
from lightning_actprune.nn.settings import PrunedLayer

WRAPPERS = re.compile(r"(^|\.)(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)(?=\.|$)")


_SHARDED = "was given to fully_shard itself before conversion; convert it first (the callback does, in setup)"
_FLATTENED = (
    "was wrapped by FullyShardedDataParallel before conversion, which flattens its weight; make it in __init__ or in "
    "configure_model"
)
_PARTITIONED = "its weight was partitioned by DeepSpeed (stage 3) before conversion; make the layer in __init__"
_REPLACED = "its forward was replaced on the instance, so the one of the converted class would never run"


class LayerClaimedError(ValueError):
    """A layer is already converted by somebody else."""


@dataclass(frozen=True)
class Candidate:
    """A layer that may be converted, and what decides whether it is, beside its own type.

    Args:
        fqns: All its names.
        layer: The layer.
        attention: The module whose output projection it is.
        sharded: Whether ``fully_shard`` gathers its parameters to plain tensors before the forward.
        flattened: Whether ``FullyShardedDataParallel`` has made one of its parameters and others.
    """

    fqns: list[str]
    layer: Layer
    attention: nn.MultiheadAttention | None
    sharded: bool
    flattened: bool

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Its weights, of a linear layer ``[OUT, IN]``: one, or those of query, key and value if these differ."""
        return weights_of(self.layer)

    @property
    def features(self) -> tuple[int, int]:
        """Sizes of its input and its output, of an in-projection those of the query and of all three outputs."""
        if isinstance(self.layer, _ConvNd):
            return self.layer.in_channels, self.layer.out_channels
        if isinstance(self.layer, PrunedLayer) and self.layer._pruning.features is not None:
            return self.layer._pruning.features
        weights = self.weights
        if is_affine(self.layer):
            return weights[0].numel(), weights[0].numel()
        return weights[0].shape[1], sum(weight.shape[0] for weight in weights)


def prunable_layers(model: nn.Module) -> Iterator[tuple[list[str], Layer]]:
    """Yield every layer that can be pruned once, with all its fully qualified names (wrapper prefixes removed)."""
    return _named(model, lambda module: kind_of(module) is not None)


def other_layers(model: nn.Module) -> Iterator[tuple[list[str], nn.Module]]:
    """Yield every layer of another operator that is known, as ``prunable_layers`` does."""
    return _named(model, lambda module: operator_of(module) is not None)


def _named(model: nn.Module, chosen: Callable[[nn.Module], bool]) -> Iterator[tuple[list[str], nn.Module]]:
    names: dict[nn.Module, list[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        if chosen(module):
            names.setdefault(module, []).append(WRAPPERS.sub("", fqn).removeprefix(".") or "(root)")
    for layer, fqns in names.items():
        yield fqns, layer


def candidates(model: nn.Module) -> Iterator[Candidate]:
    """Yield every layer that can be pruned with what decides whether it is converted."""
    sharded, flattened = _inside(model, FSDPModule), _inside(model, FullyShardedDataParallel)
    attentions = {id(m.out_proj): m for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    for fqns, layer in prunable_layers(model):
        managed = id(layer) in flattened and "_is_fsdp_managed_module" in vars(layer)  # not one of `ignored_modules`
        yield Candidate(fqns, layer, attentions.get(id(layer)), id(layer) in sharded, managed)


def _inside(model: nn.Module, wrapper: type[Any]) -> set[int]:
    """Return the ids of all modules in modules of this class."""
    return {id(inner) for outer in model.modules() if isinstance(outer, wrapper) for inner in outer.modules()}


def layers_at_ends(model: nn.Module, options: ConversionOptions) -> dict[Layer, str]:
    """Return the layers that ``exclude_first`` and ``exclude_last`` leave dense, with the reason."""
    layers = [layer for _, layer in prunable_layers(model) if options.asks_for(layer)]
    first, last = options.exclude_first, options.exclude_last
    reasons = dict.fromkeys(layers[-last:] if last else (), _end_reason("last", last))
    return reasons | dict.fromkeys(layers[:first], _end_reason("first", first))


def _end_reason(end: str, count: int) -> str:
    among = f"is the {end} layer" if count == 1 else f"is one of the {end} {count} layers"
    return f"{among} (exclude_{end}={count})"


def refusal(candidate: Candidate, options: ConversionOptions, owner: str, end: str | None = None) -> str | None:
    """Return why a layer is not converted, or ``None`` if it is.

    Args:
        candidate: The layer.
        options: Which layers are to be converted.
        owner: Who wants to convert it.
        end: Why its place in the model leaves it dense, ``None`` if that does not.

    Raises:
        LayerClaimedError: If another owner has converted it.
    """
    layer = candidate.layer
    if isinstance(layer, PrunedLayer) and layer.owner is None:
        return f"was built as {type(layer).__name__} and keeps its own settings"
    unwanted = _pattern_refusal(candidate.fqns, options) or end or _sparsity_refusal(candidate.fqns, options)
    if unwanted is not None:
        return unwanted
    if isinstance(layer, PrunedLayer):
        _check_claim(candidate.fqns[0], layer.owner, owner)
        return None
    return _forward_refusal(layer, candidate.attention) or _weight_refusal(candidate, options)


def other_refusal(fqns: list[str], layer: nn.Module, options: ConversionOptions, owner: str) -> str | None:
    """Return why a layer of another operator is not converted, or ``None`` if it is.

    Raises:
        LayerClaimedError: If another owner has converted it.
    """
    if isinstance(layer, FewBitLayer) and layer.owner is None:
        return f"was built as {type(layer).__name__} and keeps its own settings"
    unwanted = _pattern_refusal(fqns, options)
    if unwanted is not None:
        return unwanted
    if isinstance(layer, FewBitLayer):
        _check_claim(fqns[0], layer.owner, owner)
        return None
    if options.other_formats.get(operator_of(layer)) == "same":  # type: ignore[arg-type]
        return "drops no blocks, so that 'same' would store all of its input as it is"
    if isinstance(layer, FSDPModule):
        return _SHARDED
    if type(layer) in LEFT_DENSE:
        return LEFT_DENSE[type(layer)][1]
    made = few_bit_class(type(layer))
    if made is None:
        name = f"{type(layer).__module__}.{type(layer).__qualname__}"
        return f"is a {name}, whose forward may be another than that of the class it derives from"
    return _REPLACED if "forward" in layer.__dict__ else made.refusal(layer)


def _pattern_refusal(fqns: list[str], options: ConversionOptions) -> str | None:
    """Return why a layer with these names is not wanted."""
    if not any(matches(fqns, pattern) for pattern in options.include):
        return f"matches no `include` pattern ({', '.join(options.include)})"
    for pattern in options.exclude:
        if matches(fqns, pattern):
            return f"matches the `exclude` pattern {pattern!r}"
    return None


def _sparsity_refusal(fqns: list[str], options: ConversionOptions) -> str | None:
    """Return why a layer with these names has no sparsity."""
    if options.sparsity_of(fqns) is not None:
        return None
    assert isinstance(options.sparsity, dict)
    return f"matches no `sparsity` pattern ({', '.join(options.sparsity)})"


def _check_claim(fqn: str, former: str | None, owner: str) -> None:
    """Raise if a converted layer is not ``owner``'s."""
    if former != owner:
        raise LayerClaimedError(
            f"Layer {fqn!r} is already converted by {former}, and {owner} claims it too. HINT: give each its own "
            "layers with `include` and `exclude`, or revert the first."
        )


def _forward_refusal(layer: Layer, attention: nn.MultiheadAttention | None) -> str | None:
    """Return why the pruned forward cannot stand for the layer's own."""
    if type(layer) is NonDynamicallyQuantizableLinear and (attention is None or _forward_refusal(attention, None)):
        return "nn.MultiheadAttention uses its weight without calling its forward, so pruning it would save nothing"
    if isinstance(layer, LazyModuleMixin):
        return "is not initialised yet; convert after the first forward"
    if isinstance(layer, FSDPModule):
        return _SHARDED
    if isinstance(layer, _ConvTransposeNd):
        return "is a transposed convolution, whose input is kept as it is"
    if pruned_class(type(layer)) is None and not isinstance(layer, PrunedLayer):
        name = f"{type(layer).__module__}.{type(layer).__qualname__}"
        return f"is a {name}, whose forward is not known to be {kind_of(layer)}'s"
    if "forward" in layer.__dict__:
        return _REPLACED
    if is_affine(layer):
        return affine_refusal(layer)
    padding = padding_refusal(layer) if isinstance(layer, _ConvNd) else None
    return None if padding is None else f"its padding {padding}"


def _whole_in_forward(weight: DTensor) -> bool:
    """Return whether ``fully_shard`` alone has split a weight: it does so in one dimension of a mesh, the last."""
    *others, _ = weight.placements
    return len(others) <= 1 and all(placement.is_replicate() for placement in others)


def _weight_refusal(candidate: Candidate, options: ConversionOptions) -> str | None:
    """Return why the layer's input cannot, or should not, be pruned."""
    if candidate.flattened:
        return _FLATTENED
    weights = candidate.weights
    if any(hasattr(weight, "ds_id") for weight in weights):
        return _PARTITIONED
    split = [weight for weight in weights if isinstance(weight, DTensor)]
    if split and not (candidate.sharded and all(map(_whole_in_forward, split))):
        return "its weight is a tensor-parallel DTensor; choosing blocks on one shard is a different method"
    if not weights[0].is_floating_point():
        return f"its weight is {weights[0].dtype}; only floating-point layers can be pruned"
    if operator_kind(candidate.layer) != "linear":
        return None
    in_features = min(weight.shape[1] for weight in weights)
    if in_features < options.min_features:
        return (
            f"in_features={in_features} is below min_features={options.min_features}: below 64, each MiB "
            "saved cost over 1 ms of step time (H200, eager)"
        )
    return None
