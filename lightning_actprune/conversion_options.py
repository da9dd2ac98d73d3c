"""With what settings layers are converted: those of all layers, and those that some have by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from lightning_actprune.arguments import (
    BlockSelection,
    OtherOperator,
    Others,
    Scope,
    ValueFormatName,
    check_count,
    check_others,
    check_patterns,
)
from lightning_actprune.layer_settings import LayerSettings, check_layers, check_sparsities, first_match
from lightning_actprune.nn.kinds import Layer, operator_kind
from lightning_actprune.ops.setting import BlockSetting
from lightning_actprune.schedules import SparsitySchedule, check_schedule, sparsity_at

MIN_FEATURES = 64
"""Default of ``min_features``. Packing takes about as long for 16 as for 256 features (launches dominate), so each MiB
saved costs 2.7 ms of eager step time at 16, 1.2 at 48, 0.9 at 64, 0.1 at 768 (H200; small_layers.json)."""


@dataclass(frozen=True)
class ConversionOptions:
    """Which layers to convert, and with what settings.

    Args:
        sparsity: Fraction of blocks dropped, in [0, 1), or a mapping from patterns to such; then layers that match
            none are not converted. Not used if there is a ``schedule``.
        block_size: Values per block, positive.
        scope: Within what blocks compete, ``"sample"`` or ``"token"``.
        include: Glob patterns on fully qualified names; a layer must match one.
        exclude: Glob patterns on fully qualified names; a layer must match none.
        min_features: Linear layers with fewer input features stay dense. Convolutions do not: few channels have many
            pixels as a rule, and all of a sample is cut into blocks; nor do affine layers, which are asked for by name.
        value_format: How the values of kept blocks are stored.
        block_selection: Which blocks are kept.
        others: What operators other than linear layers keep in few bits, and in which format; convolutions and affine
            layers are pruned as linear layers are.
        layers: Settings of layers by their names.
        schedule: Sparsity as a function of training progress.
        exclude_first: So many layers stay dense, the first ones of the model.
        exclude_last: So many layers stay dense, the last ones of the model.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.
    """

    sparsity: float | Mapping[str, float] = 0.6
    block_size: int = 32
    scope: Scope = "sample"
    include: Sequence[str] | str = ("*",)
    exclude: Sequence[str] | str = ()
    min_features: int = MIN_FEATURES
    value_format: ValueFormatName = "same"
    block_selection: BlockSelection = "largest"
    others: Others = False
    layers: Mapping[str, LayerSettings] | None = None
    schedule: SparsitySchedule | None = None
    exclude_first: int = 0
    exclude_last: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "sparsity", check_sparsities(self.sparsity))
        blocks = BlockSetting.checked(self.block_size, self.scope, self.value_format, self.block_selection)
        object.__setattr__(self, "block_size", blocks.block_size)
        object.__setattr__(self, "include", check_patterns(self.include, "include"))
        object.__setattr__(self, "exclude", check_patterns(self.exclude, "exclude"))
        object.__setattr__(self, "others", check_others(self.others, self.block_size))
        object.__setattr__(self, "layers", check_layers(self.layers))
        object.__setattr__(
            self, "min_features", check_count(self.min_features, "min_features", "0 converts every size.")
        )
        for end in ("first", "last"):
            hint = f"it is how many layers stay dense, the {end} ones of the model; 0 for none."
            name = f"exclude_{end}"
            object.__setattr__(self, name, check_count(getattr(self, name), name, hint))
        self._check_schedules()

    def _check_schedules(self) -> None:
        if check_schedule(self.schedule) is not None and isinstance(self.sparsity, Mapping):
            raise ValueError(
                f"`sparsity` must be a number or None beside a `schedule`, got {self.sparsity!r}. HINT: give the "
                "layers of a pattern a schedule of their own with "
                '`layers={"blocks.*.fc1": LayerSettings(schedule=...)}`.'
            )
        for schedule in self.schedules:
            sparsity_at(schedule, 0.0)

    @property
    def other_formats(self) -> Mapping[OtherOperator, ValueFormatName]:
        """What operators other than linear layers keep in few bits, and in which format."""
        return cast(Mapping[OtherOperator, ValueFormatName], self.others)

    @property
    def settings_by_name(self) -> Mapping[str, LayerSettings]:
        """Settings of layers by patterns on their names."""
        return cast(Mapping[str, LayerSettings], self.layers)

    @property
    def schedules(self) -> list[SparsitySchedule]:
        """All schedules, of which a model need not have layers."""
        own = [settings.schedule for settings in self.settings_by_name.values()]
        return [schedule for schedule in (self.schedule, *own) if schedule is not None]

    def sparsity_of(self, fqns: Sequence[str]) -> float | SparsitySchedule | None:
        """Return the sparsity, or the schedule, of a layer with these names; ``None`` if it has none."""
        own = self._own(fqns)
        for given in (own.schedule, own.sparsity, self.schedule):
            if given is not None:
                return given
        if not isinstance(self.sparsity, Mapping):
            return self.sparsity
        pattern = first_match(fqns, self.sparsity)
        return None if pattern is None else self.sparsity[pattern]

    def blocks_of(self, fqns: Sequence[str], layer: Layer) -> BlockSetting:
        """Return how inputs of ``layer`` are cut into blocks and stored.

        Those of convolutions and affine layers have formats of their own among ``others``.

        Raises:
            ValueError: If settings of the layer do not go with those of all layers.
        """
        own, operator = self._own(fqns), operator_kind(layer)
        value_format = self.value_format if operator == "linear" else self.other_formats[operator]
        try:
            return BlockSetting.checked(
                own.block_size or self.block_size,
                own.scope or self.scope,
                own.value_format or value_format,
                own.block_selection or self.block_selection,
            )
        except ValueError as error:
            raise ValueError(f"Layer {fqns[0]!r}, which has {own!r}: {error}") from error

    def _own(self, fqns: Sequence[str]) -> LayerSettings:
        pattern = first_match(fqns, self.settings_by_name)
        return LayerSettings() if pattern is None else self.settings_by_name[pattern]

    def asks_for(self, layer: Layer) -> bool:
        """Return whether a layer of this kind is to be converted: linear ones always, others if named."""
        operator = operator_kind(layer)
        return operator == "linear" or operator in self.other_formats
