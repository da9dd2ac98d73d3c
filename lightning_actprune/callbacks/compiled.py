"""What compiled code keeps in a fit: layers say how, and a pass over the compiler's graphs packs it (``compiled``)."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_actprune.codec.private import splits_for_ddp
from lightning_actprune.compiled.report import Row
from lightning_actprune.compiled.scope import CompiledPacking, why_not
from lightning_actprune.convert import mark_layers, unmark_layers
from lightning_actprune.operators.hooks import eager_modules


class CompiledLayers:
    """Lets compilers that trace layers of a fit see dense ones with marks, while a pass is there that packs by them.

    Where no such pass runs, they see the operators that pack in eager mode.

    Args:
        owner: Who converts the layers.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._packing: CompiledPacking | None = None
        self._told = 0
        self.rows: list[Row] = []
        """How each value is kept that backward reads in the graphs that were compiled in this fit or the last."""

    def begin(self, model: pl.LightningModule) -> None:
        """Install the pass when a fit begins."""
        self.end()  # of a fit whose end it has not heard of
        reason = why_not()
        self.rows, self._told = [], 0
        if reason is None:
            self._packing = CompiledPacking().open()
            self.rows = self._packing.rows
        elif is_compiled(model):
            rank_zero_warn(
                f"{reason} Layers pack by themselves, and the compiler keeps all that other operations save."
            )

    def mark(self, model: pl.LightningModule, weight_gradients: bool) -> None:
        """Mark the layers, after each conversion.

        Args:
            model: The module that holds them.
            weight_gradients: See ``convert.mark_layers``.
        """
        if self._packing is not None:
            mark_layers(model, self._owner, weight_gradients=weight_gradients)

    def news(self, model: pl.LightningModule) -> list[Row]:
        """Return how values are kept of which it is not known yet, after a step.

        Should a compiler have left the marks in, layers are no longer marked, and the user is warned.
        """
        if self._packing is None:
            return []
        if self._packing.was_missed:
            self.end()
            unmark_layers(model, self._owner)
            rank_zero_warn(
                "A compiler of this fit runs no pass over the graphs of forward and backward. Layers pack by "
                "themselves in what it compiles from now on, and all that other operations save is kept. HINT: compile "
                'with backend="inductor", the default.'
            )
        found = self.rows[self._told :]
        self._told += len(found)
        return found

    def hints(self, trainer: pl.Trainer, news: list[Row]) -> list[str]:
        """Return what to say of how a fit compiles with its first ``news``."""
        if len(news) < len(self.rows) or not is_cut(trainer):
            return []
        return [
            "Activation pruning: for DDP, a compiler cuts a model into a piece for each bucket of gradients, and what "
            "lies between the pieces stays as it is. HINT: `torch._dynamo.config.optimize_ddp = False` before the fit "
            "compiles it in one piece, whose gradients are averaged when backward is over, no longer beside it."
        ]

    def end(self) -> None:
        """Take the pass out. Does nothing outside of a fit."""
        if self._packing is not None:
            self._packing.close()
            self._packing = None


def is_compiled(model: pl.LightningModule) -> bool:
    """Return whether something in it is compiled."""
    return bool(compiled_parts(model))


def is_cut(trainer: pl.Trainer) -> bool:
    """Return whether a compiler cuts a model at the buckets of DDP, as it does if more than one of them is compiled."""
    wrapped = trainer.strategy.model
    if not isinstance(wrapped, DistributedDataParallel) or not splits_for_ddp():
        return False
    return any(_trained_bytes(part) > wrapped.bucket_bytes_cap for part in compiled_parts(trainer.lightning_module))


def compiled_parts(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that are compiled."""
    eager = eager_modules(model)
    return [part for module in eager for part in module.children() if part not in eager] if eager else [model]


def _trained_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
