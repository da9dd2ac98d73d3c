"""Turn activation functions and norms into layers that keep in few bits what they need, and back, in place.

As ``conversion`` does it with linear layers; what the layers are and what they become is in ``nn.few_bit_kinds``. What
no layer is known for is left to saved-tensor hooks (``few_bit_saving``), which the model carries while it is converted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_actprune.conversion_options import ConversionOptions
from lightning_actprune.conversion_report import ConversionReport, FewBitConversion, SkippedLayer
from lightning_actprune.few_bit_saving import FewBitSaving
from lightning_actprune.hooks import drop_idle_hooks
from lightning_actprune.nn.few_bit import FewBitLayer, FewBitSettings
from lightning_actprune.nn.few_bit_kinds import few_bit_class, operator_of, stores
from lightning_actprune.nn.settings import dense_class, torch_class
from lightning_actprune.selection import LayerClaimedError, other_layers, other_refusal

_SAVINGS = "_few_bit_savings"


class _Savings(dict[str, FewBitSaving]):
    """The attached hooks by owner, as an attribute of the model; a copy of the model has none, as it has no hooks."""

    def __deepcopy__(self, memo: Any) -> _Savings:
        return _Savings()

    def __reduce__(self) -> tuple[type[_Savings], tuple[()]]:
        return _Savings, ()


def attach_rest(model: nn.Module, options: ConversionOptions, owner: str) -> None:
    """Let hooks store in few bits what else is saved in ``model``, if that is wanted; anew for modules made since."""
    detach_rest(model, owner)
    value_format = options.other_formats.get("rest")
    if value_format is not None:
        savings = model.__dict__.setdefault(_SAVINGS, _Savings())
        scale, loss_inside = options.other_formats.get("scale"), hasattr(model, "training_step")
        savings[owner] = FewBitSaving(
            model,
            value_format,
            options.block_size,
            exclude=options.exclude,
            parameter_format=None if scale == "same" else scale,
            loss_inside=loss_inside,
        ).attach()


def detach_rest(model: nn.Module, owner: str | None) -> None:
    """Take the hooks of ``owner``, or all, off ``model`` and off what is in it, such as a model that it wraps."""
    for module in model.modules():
        savings = module.__dict__.get(_SAVINGS, {})
        for name in [name for name in savings if owner in (None, name)]:
            savings.pop(name).detach()
        if not savings:
            module.__dict__.pop(_SAVINGS, None)
        drop_idle_hooks(module)


def check_rest_is_free(model: nn.Module, options: ConversionOptions, owner: str) -> None:
    """Raise ``LayerClaimedError`` if hooks are wanted on ``model`` where another owner has some."""
    for module in model.modules() if "rest" in options.other_formats else ():
        for other in module.__dict__.get(_SAVINGS, {}):
            if other != owner:
                raise LayerClaimedError(
                    f"What else is saved in the model is already stored in few bits by {other}, and {owner} claims it "
                    "too. HINT: ask for 'rest' in `others` once, or revert the first."
                )


def chosen_others(
    model: nn.Module, options: ConversionOptions, owner: str, report: ConversionReport
) -> list[tuple[list[str], nn.Module]]:
    """Return the layers of other operators to convert, with their names; ``report`` gets those that are not.

    Raises:
        LayerClaimedError: If another owner has converted one of them.
    """
    chosen, not_called = [], _not_called(model, options, owner)
    for fqns, layer in other_layers(model):
        operator = operator_of(layer)
        assert operator is not None
        if not_called.issuperset(fqns):
            continue
        if operator not in options.other_formats:
            if not isinstance(layer, FewBitLayer):  # nor is one claimed that somebody else has converted
                report.left[operator] += stores(layer) and other_refusal(fqns, layer, options, owner) is None
            continue
        reason = other_refusal(fqns, layer, options, owner)
        if reason is None:
            chosen.append((fqns, layer))
        elif stores(layer):
            report.skipped.append(SkippedLayer(fqns[0], type(layer).__name__, reason))
    return chosen


def _not_called(model: nn.Module, options: ConversionOptions, owner: str) -> set[str]:
    """Return the names of activation functions that the layer around them computes itself once it is converted."""
    names = set[str]()
    for fqns, layer in other_layers(model):
        made = few_bit_class(torch_class(type(layer)))
        if made is None or made.replaced is None:
            continue
        if isinstance(layer, FewBitLayer) or other_refusal(fqns, layer, options, owner) is None:
            names.update(made.replaced if fqn == "(root)" else f"{fqn}.{made.replaced}" for fqn in fqns)
    return names


def convert_other(fqn: str, layer: nn.Module, options: ConversionOptions, owner: str) -> FewBitConversion:
    """Convert one layer, or set anew what ``owner`` converted before."""
    operator = operator_of(layer)
    assert operator is not None
    kind = torch_class(type(layer)).__name__
    if not isinstance(layer, FewBitLayer):
        layer.__class__ = few_bit_class(type(layer))  # type: ignore[assignment]
    settings = FewBitSettings(options.other_formats[operator], options.block_size, owner)
    layer._few_bit = settings  # type: ignore[assignment]
    return FewBitConversion(fqn, kind, operator, settings.value_format)


def revert_other(layer: nn.Module, chosen: Callable[[FewBitLayer], bool]) -> bool:
    """Turn a converted layer back if it is ``chosen``, and return whether it was."""
    if not isinstance(layer, FewBitLayer) or layer.owner is None or not chosen(layer):
        return False
    del layer.__dict__["_few_bit"]
    layer.__class__ = dense_class(type(layer))  # type: ignore[assignment]
    return True
