"""Follow the calls of a model's pruned layers through a step, by plain forward hooks that are gone afterwards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import Self

from lightning_actprune.hooks import ForwardHook, eager_modules
from lightning_actprune.nn.attention import Projection, watchers
from lightning_actprune.nn.kinds import Layer, as_cut, weight_of_call
from lightning_actprune.nn.settings import PrunedLayer
from lightning_actprune.ops.setting import BlockSetting
from lightning_actprune.selection import prunable_layers


class PrunedCallFollower(ABC):
    """A context that sees each call of a pruned layer when it begins, those of attention's projections too.

    Args:
        model: The module that holds the layers.
        eagerly: Whether compiled modules run eagerly in this context, as they do inside ``HolderProbe``. Otherwise
            nothing inside them is seen.
    """

    def __init__(self, model: nn.Module, *, eagerly: bool = False) -> None:
        self._model = model
        self._eagerly = eagerly
        self._layers: set[Layer] = set()
        self._handles: list[RemovableHandle] = []
        self._active = False
        self.ran = False
        """Whether one of the layers was called, or there is none whose calls are seen."""

    def __enter__(self) -> Self:
        seen = set(self._model.modules()) if self._eagerly else eager_modules(self._model)
        pruned = [layer for _, layer in prunable_layers(self._model) if isinstance(layer, PrunedLayer)]
        layers = [layer for layer in pruned if layer in seen]
        self._layers = set(layers)
        self.ran = not layers
        self._active = True
        watchers.append(self)
        for layer in layers:
            if weight_of_call(layer) is not None:
                self._handles.append(layer.register_forward_pre_hook(ForwardHook(self._see_layer)))
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stop following; what was found stays. Closing twice does nothing."""
        if self._active:
            self._active = False
            watchers.remove(self)
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def enter_projection(self, projection: Projection, x: Tensor) -> None:
        """Take note of a projection inside an attention module as the call of a layer, which it is not."""
        if projection.layer in self._layers:
            self.ran = True
            self._see(projection.layer, projection.weight, projection.with_samples(x), projection.blocks)

    def leave_projection(self, projection: Projection, y: Tensor | None) -> None:  # noqa: B027  # nothing is the default on purpose
        """Do nothing: a call counts when it begins."""

    def _see_layer(self, layer: Layer, args: Any) -> None:
        weight = weight_of_call(layer)
        assert weight is not None
        self.ran = True
        if isinstance(layer, PrunedLayer):  # not reverted meanwhile
            x = args[0] if args else None
            self._see(layer, weight, as_cut(layer, x) if isinstance(x, Tensor) else x, layer._pruning.blocks)

    @abstractmethod
    def _see(self, layer: Layer, weight: Tensor, x: Any, blocks: BlockSetting) -> None:
        """Look at a call with its first argument, and how that is cut into blocks."""
