"""Turn the layers of a model into pruned or few-bit ones, and back, in place.

A layer is converted by reassigning its ``__class__``. Parameters, hooks, shared references, the training flag, names
and ``state_dict`` stay the very same objects, which replacing the module cannot promise (a second name would keep the
dense layer, hooks would be lost, and ``fully_shard`` would be left with the old module). Settings are plain attributes;
nothing is registered, so no buffer or parameter appears.

An attention module is converted for its in-projection, for its output projection or for both: its code has to be told
of either (see ``nn.attention``). Convolutions and affine layers are pruned as linear layers are, on request. Activation
functions and norms are converted to keep in few bits what they need (``nn.few_bit_kinds``). Which layers are converted
is decided in ``selection``.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

from torch import nn

from lightning_actprune.arguments import BlockSelection, OtherOperator, Others, Scope, ValueFormatName, check_model
from lightning_actprune.conversion_options import MIN_FEATURES, ConversionOptions
from lightning_actprune.conversion_report import ConversionReport, ConvertedLayer, SkippedLayer
from lightning_actprune.layer_settings import LayerSettings, check_that_all_count, matches
from lightning_actprune.nn.attention import RoutedMultiheadAttention
from lightning_actprune.nn.few_bit import FewBitLayer
from lightning_actprune.nn.few_bit_kinds import stores
from lightning_actprune.nn.kinds import operator_kind, pruned_class
from lightning_actprune.nn.settings import PrunedLayer, PruningSettings, dense_class, torch_class
from lightning_actprune.other_layers import (
    attach_rest,
    check_rest_is_free,
    chosen_others,
    convert_other,
    detach_rest,
    revert_other,
)
from lightning_actprune.schedules import SparsitySchedule, highest_sparsity, sparsity_at
from lightning_actprune.selection import (
    WRAPPERS,
    Candidate,
    candidates,
    layers_at_ends,
    other_layers,
    prunable_layers,
    refusal,
)


def convert(
    model: nn.Module,
    sparsity: float | Mapping[str, float] = 0.6,
    block_size: int = 32,
    *,
    scope: Scope = "sample",
    include: Sequence[str] | str = ("*",),
    exclude: Sequence[str] | str = (),
    min_features: int = MIN_FEATURES,
    value_format: ValueFormatName = "same",
    block_selection: BlockSelection = "largest",
    others: Others = False,
    layers: Mapping[str, LayerSettings] | None = None,
    exclude_first: int = 0,
    exclude_last: int = 0,
) -> ConversionReport:
    """Convert the linear layers of ``model``, and others if they are asked for, in place; ``revert`` undoes it.

    Args:
        model: Any module; parameters, hooks and names stay the same objects.
        sparsity: Fraction of blocks dropped, in [0, 1), or a mapping from glob patterns to such, as
            ``{"blocks.*.fc1": 0.3, "*": 0.6}``: the first pattern that matches a layer counts, and layers that match
            none stay dense.
        block_size: Consecutive values per block, positive; cut to the row if larger.
        scope: ``"sample"``: all blocks of a sample compete; ``"token"``: those of a row.
        include: Glob patterns on fully qualified names, such as ``"blocks.*.fc1"``; a layer must match one.
        exclude: Glob patterns on fully qualified names; a layer must match none.
        min_features: Linear layers with fewer input features stay dense.
        value_format: How kept values are stored: ``"same"``, or in few bits: ``"int8"``, ``"int4"``, ``"int3"``,
            ``"int2"``, ``"fp8"`` (see ``functional.linear``).
        block_selection: Which blocks are kept: ``"largest"``, ``"swap"`` or ``"unbiased"`` (see ``functional.linear``).
        others: Whether other layers keep in few bits what they need: none, all that are known, or those of a mapping,
            such as ``{"activation": "int4", "norm": "int4", "rest": "int8"}``, in the formats it names. ``include`` and
            ``exclude`` hold for activation functions and norms too; the rest is whatever else autograd saves while a
            module runs that ``exclude`` does not match (see ``FewBitSaving``). A ``"convolution"``, an ``"affine"``
            layer and a layer ``"scale"`` are pruned as a linear layer is, and store what they keep in the format named
            here, ``"same"`` included.
        layers: Settings of layers by glob patterns on their names, as ``{"head": LayerSettings(sparsity=0.3)}``: the
            first pattern that matches a layer counts, and what it does not say is as for all other layers.
        exclude_first: So many layers stay dense: the first ones in the order of ``model.named_modules()``, of linear
            layers, and of convolutions, affine layers and layer scales if asked for; those that ``exclude`` names
            count.
        exclude_last: So many layers stay dense: the last ones.

    Returns:
        Converted and skipped layers; the latter with reasons.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, a pattern matches no linear layer, no layer was converted, a layer
            is already converted, or ``layers`` has a schedule. The model is then as it was before the call.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
        >>> [layer.fqn for layer in convert(model, sparsity=0.6, block_size=32).converted]
        ['0', '2']
        >>> revert(model)
        ['0', '2']
    """
    check_model(model)
    options = ConversionOptions(
        sparsity,
        block_size,
        scope=scope,
        include=include,
        exclude=exclude,
        min_features=min_features,
        value_format=value_format,
        block_selection=block_selection,
        others=others,
        layers=layers,
        exclude_first=exclude_first,
        exclude_last=exclude_last,
    )
    _check_no_schedule(options)
    owner = new_owner("convert()")
    report = convert_layers(model, options, owner)
    try:
        check_conversion(model, report, options)
    except ValueError:
        revert(model, owner)
        raise
    return report


def revert(model: nn.Module, owner: str | None = None) -> list[str]:
    """Turn converted layers of ``model`` back into what they were and return their names.

    Args:
        model: A module that ``convert`` was called on, or any module.
        owner: Only revert the layers that this owner converted; ``None`` for all converted layers. Layers that were
            built as ``ActivationPrunedLinear`` stay.
    """
    detach_rest(check_model(model), owner)
    return revert_layers(model, lambda layer: owner in (None, layer.owner))


def revert_layers(model: nn.Module, chosen: Callable[[PrunedLayer | FewBitLayer], bool]) -> list[str]:
    """Turn the converted layers of ``model`` that are ``chosen`` back, each by itself, and return their names."""
    names = []
    for fqns, layer in prunable_layers(model):
        if isinstance(layer, PrunedLayer) and layer.owner is not None and chosen(layer):
            del layer.__dict__["_pruning"]
            layer.__class__ = dense_class(type(layer))  # type: ignore[assignment]
            names.append(fqns[0])
    names += [fqns[0] for fqns, other in other_layers(model) if revert_other(other, chosen)]
    for module in model.modules():
        if isinstance(module, RoutedMultiheadAttention) and not _prunes(module):
            module.__class__ = dense_class(type(module))  # type: ignore[assignment]
    return names


def new_owner(name: str) -> str:
    """Return a name for somebody who converts layers, unique also among those in a pickled model."""
    return f"{name} #{uuid.uuid4().hex[:8]}"


class _Choice(NamedTuple):
    """A layer that is to be converted, with its settings."""

    candidate: Candidate
    settings: PruningSettings


def convert_layers(model: nn.Module, options: ConversionOptions, owner: str) -> ConversionReport:
    """Convert what ``options`` select; layers that ``owner`` converted before are reported as converted again.

    Raises:
        LayerClaimedError: If another owner has converted a selected layer; nothing is converted then.
        ValueError: If settings of a layer do not go together; nothing is converted then.
    """
    report = ConversionReport()
    choices = _choices(model, options, owner, report)
    others = chosen_others(model, options, owner, report)
    check_rest_is_free(model, options, owner)
    chosen = {choice.candidate.layer for choice in choices}
    # Layers taken out since an earlier conversion, or new names, can leave out one that was chosen then.
    own = [layer for _, layer in prunable_layers(model) if isinstance(layer, PrunedLayer) and layer.owner == owner]
    if not chosen.issuperset(own):
        revert_layers(model, set(own).difference(chosen).__contains__)
    for choice in choices:
        report.converted.append(_convert_layer(*choice))
    for fqns, layer in others:
        made = convert_other(fqns[0], layer, options, owner)
        report.few_bit += [made] if stores(layer) else []
    attach_rest(model, options, owner)
    report.rest = options.other_formats.get("rest")
    return report


def _choices(model: nn.Module, options: ConversionOptions, owner: str, report: ConversionReport) -> list[_Choice]:
    """Return the layers to prune; ``report`` gets those that are not."""
    choices, ends = [], layers_at_ends(model, options)
    for candidate in candidates(model):
        fqns, layer = candidate.fqns, candidate.layer
        if not options.asks_for(layer):
            if not isinstance(layer, PrunedLayer):  # nor is one claimed that somebody else has converted
                operator = cast(OtherOperator, operator_kind(layer))  # linear layers are always asked for
                report.left[operator] += refusal(candidate, options, owner) is None
            continue
        reason = refusal(candidate, options, owner, ends.get(layer))
        if reason is not None:
            report.skipped.append(SkippedLayer(fqns[0], type(layer).__name__, reason))
            continue
        sparsity = options.sparsity_of(fqns)
        assert sparsity is not None  # or it was refused
        highest = highest_sparsity(sparsity) if isinstance(sparsity, SparsitySchedule) else 0.0
        settings = PruningSettings(sparsity_at(sparsity, 0.0), options.blocks_of(fqns, layer), owner, highest)
        choices.append(_Choice(candidate, settings))
    return choices


def check_conversion(model: nn.Module, report: ConversionReport, options: ConversionOptions) -> None:
    """Raise ``ValueError`` if nothing was converted or a pattern matches no layer that could be."""
    layers = [found for found in prunable_layers(model) if options.asks_for(found[1])]
    layers += other_layers(model) if options.others else []
    names = [fqn for fqns, _ in layers for fqn in fqns]
    if "rest" in options.other_formats:  # which can leave out any module
        names += [WRAPPERS.sub("", fqn).removeprefix(".") for fqn, _ in model.named_modules() if fqn]
    names = list(dict.fromkeys(names))
    listing = ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")
    word, kinds = "linear layer", "nn.Linear, nn.MultiheadAttention or transformers' Conv1D"
    if options.others:
        word, kinds = "convertible layer", f"{kinds}, activation functions, affine layers, convolutions, norms"
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no {word}s ({kinds}), so there is nothing to prune. HINT: pass the module "
            "that holds them."
        )
    for argument, patterns in (("include", options.include), ("exclude", options.exclude)):
        for pattern in patterns:
            if not matches(names, pattern):
                raise ValueError(
                    f"`{argument}` pattern {pattern!r} matches no {word}. HINT: patterns match the whole name; the "
                    f"{word}s are: {listing}."
                )
    prunable = [fqns for fqns, layer in prunable_layers(model) if options.asks_for(layer)]
    if isinstance(options.sparsity, Mapping):
        check_that_all_count(list(options.sparsity), prunable, "sparsity")
    check_that_all_count(list(options.settings_by_name), prunable, "layers")
    if not report.converted and not report.few_bit and report.rest is None:
        raise ValueError(
            f"No layer was converted, so nothing would be saved:\n{report.describe_skipped()}\n"
            "HINT: widen `include`, narrow `exclude`, or lower `min_features`, `exclude_first` and `exclude_last`."
        )


def _convert_layer(candidate: Candidate, settings: PruningSettings) -> ConvertedLayer:
    layer, attention, blocks = candidate.layer, candidate.attention, settings.blocks
    features = candidate.features
    kind = torch_class(type(layer)).__name__
    layer._pruning = replace(settings, features=features)  # type: ignore[assignment]
    if not isinstance(layer, PrunedLayer):
        layer.__class__ = pruned_class(type(layer))  # type: ignore[assignment]
    if type(attention) is nn.MultiheadAttention:
        attention.__class__ = RoutedMultiheadAttention
    return ConvertedLayer(
        candidate.fqns[0],
        kind,
        *features,
        settings.sparsity,
        blocks.block_size,
        cast(Scope, blocks.scope),
        blocks.value_format,
        blocks.block_selection,
        operator_kind(layer),
    )


def _check_no_schedule(options: ConversionOptions) -> None:
    for pattern, settings in options.settings_by_name.items():
        if settings.schedule is not None:
            raise ValueError(
                f"`layers[{pattern!r}]` must have no `schedule` in convert(), which knows of no training, got "
                f"{settings.schedule!r}. HINT: use `ActivationPruning(layers=...)`, or give a `sparsity` here and set "
                "`layer.sparsity = schedule(step / steps)` of these layers in your loop."
            )


def _prunes(attention: RoutedMultiheadAttention) -> bool:
    """Return whether a projection of ``attention`` is a pruned layer."""
    return isinstance(attention, PrunedLayer) or isinstance(attention.out_proj, PrunedLayer)
