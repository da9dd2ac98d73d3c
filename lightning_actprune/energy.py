r"""How much of a layer's input its dropped blocks hold: where that is much, quantise the input, but do not prune it.

With ``q_n`` the sum of squares of block ``n`` of an input, the share of its energy that a sparsity drops is ::

    e = sum_{n dropped} q_n / sum_n q_n

A dropped block is lost for the weight gradient, again and again where the same features have the smallest norms, while
the error of quantisation has mean zero and cancels over rows and steps. So pruning belongs where energy is
concentrated: behind an activation function, say. Behind a LayerNorm all blocks look alike, and half of them hold nearly
half of the energy: for independent normal values and blocks of 32 values ``e`` is .41 at a sparsity of .5.

Shares at a sparsity of .5 at the start of training (b = 32): ResMLP-S12 .16 (token mixing), .21 (fc1), .17 (fc2); ViT
.41 (qkv), .41 (fc1), .34 (fc2); GPT .40, .40, .34 (``ablation_start.json``). The cosine between pruned and exact weight
gradient in the middle of training follows: .99, .86, .94 (ResMLP), .77, .84, .90 (ViT), .90, .88, .86 (GPT); with two
bits for every value instead it is .97 to .99, .92 to .98, .98 to .99 (``ablation_fidelity.json``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_actprune.arguments import check_share, check_sparsity
from lightning_actprune.conversion import revert_layers
from lightning_actprune.conversion_report import ConversionReport, SkippedLayer
from lightning_actprune.following import PrunedCallFollower
from lightning_actprune.hooks import backward_runs
from lightning_actprune.nn.kinds import Layer
from lightning_actprune.nn.settings import PrunedLayer
from lightning_actprune.ops.geometry import block_and_keep, sparsity_parts, stored_view
from lightning_actprune.ops.reference import split_blocks
from lightning_actprune.ops.setting import BlockSetting
from lightning_actprune.selection import prunable_layers

__all__ = ["EnergyProbe"]


def dropped_energy(x: Tensor, sparsity: float, blocks: BlockSetting) -> Tensor:
    """Return the energy of the blocks of ``x`` that ``sparsity`` drops and of all blocks, ``[2]`` in fp32 or fp64.

    Args:
        x: Input of a layer, ``[..., features]``.
        sparsity: Fraction of blocks dropped, in [0, 1).
        blocks: How ``x`` is cut into blocks.
    """
    with torch.no_grad():
        stored, _ = stored_view(x, blocks.block_size, blocks.scope)
        block, keep = block_and_keep(stored, blocks.block_size, sparsity_parts(sparsity), "same")
        # Sums in fp32 without a copy in fp32, which would be what is largest in a step.
        wide = torch.promote_types(stored.dtype, torch.float32)
        norms = torch.linalg.vector_norm(split_blocks(stored, block), dim=-1, dtype=wide)
        energies = norms.square().flatten(1)
        kept, total = energies.topk(keep, dim=1).values.sum(), energies.sum()
        return torch.stack([total - kept, total])


class EnergyProbe(PrunedCallFollower):
    """Find, in one real training forward, the pruned layers whose dropped blocks hold much of their input's energy.

    Not judged is a layer that keeps nothing (a frozen one), was not called, or got only zeros or values that are not
    finite. The step is not disturbed.

    Args:
        model: The module that ``convert`` was called on.
        limit: Largest share of the energy that dropped blocks may hold, in [0, 1].
        sparsity: Least sparsity to judge layers at, where you will raise it; layers at 0 are judged only then. Those
            with a schedule in ``ActivationPruning`` are judged at its highest sparsity in any case.
        eagerly: Whether compiled modules run eagerly in this context, as they do inside ``HolderProbe``. Otherwise
            nothing inside them is seen.

    Raises:
        TypeError: If ``limit`` or ``sparsity`` is no number.
        ValueError: If ``limit`` or ``sparsity`` is out of range.

    Example:
        >>> from lightning_actprune import convert
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
        >>> report = convert(model, sparsity=0.5, block_size=32, value_format="int4")
        >>> with EnergyProbe(model, 0.2) as probe:
        ...     loss = model(torch.ones(16, 64)).sum()
        >>> probe.shares["0"]  # of two equal blocks one is dropped
        0.5
        >>> probe.apply(report)[0], model[0].sparsity
        ('0', 0.0)
    """

    def __init__(self, model: nn.Module, limit: float, *, sparsity: float = 0.0, eagerly: bool = False) -> None:
        super().__init__(model, eagerly=eagerly)
        self._limit, self._sparsity = check_share(limit, "limit"), check_sparsity(sparsity)
        self._sums: dict[Layer, Tensor] = {}

    def add_up(self, over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Let all ranks of a distributed training judge by the same shares.

        Args:
            over_ranks: Returns the sum of a tensor over the ranks; called once, on each of them with as many values.
        """
        layers = [layer for _, layer in prunable_layers(self._model) if layer in self._layers]
        if not layers:
            return
        device = next((sums.device for sums in self._sums.values()), next(layers[0].parameters()).device)
        found = [self._sums.get(layer, torch.zeros(2)).to(device) for layer in layers]
        self._sums = dict(zip(layers, over_ranks(torch.stack(found)), strict=True))

    @property
    def shares(self) -> dict[str, float]:
        """Share of the energy that would be dropped, by the name of the layer, over all its calls."""
        named = [(fqns[0], layer) for fqns, layer in prunable_layers(self._model) if layer in self._sums]
        sums = [(name, *self._sums[layer].tolist()) for name, layer in named]
        return {name: dropped / total for name, dropped, total in sums if total > 0}

    @property
    def spread(self) -> dict[str, float]:
        """The shares above the limit."""
        return {name: share for name, share in self.shares.items() if share > self._limit}

    def apply(self, report: ConversionReport) -> list[str]:
        """Drop no block of the layers above the limit; call it when the context was left.

        Those with a ``value_format`` of few bits keep all their blocks in it, at sparsity 0; the others are dense
        again, and are then in ``report.skipped`` with the reason.

        Returns:
            The names of these layers.
        """
        return keep_blocks(self._model, report, self.spread)

    def _see(self, layer: Layer, weight: Tensor, x: Any, blocks: BlockSetting) -> None:
        if not isinstance(layer, PrunedLayer) or layer.owner is None or backward_runs():
            return
        sparsity = max(layer.highest_sparsity, self._sparsity)
        if sparsity == 0 or not (torch.is_grad_enabled() and weight.requires_grad):
            return
        if isinstance(x, Tensor) and x.layout == torch.strided and x.numel() > 0:
            sums = dropped_energy(x.detach(), sparsity, blocks)
            self._sums[layer] = self._sums[layer] + sums if layer in self._sums else sums


def keep_blocks(model: nn.Module, report: ConversionReport, shares: Mapping[str, float]) -> list[str]:
    """Drop no block of the converted layers that ``shares`` names; see ``EnergyProbe.apply``."""
    layers = {fqns[0]: layer for fqns, layer in prunable_layers(model)}
    chosen = [made for made in report.converted if made.fqn in shares]
    for made in chosen:
        layer, place = layers[made.fqn], report.converted.index(made)
        assert isinstance(layer, PrunedLayer)
        if made.value_format != "same":
            layer.drop_nothing()
            report.converted[place] = replace(made, sparsity=0.0)
            continue
        revert_layers(model, {layer}.__contains__)
        del report.converted[place]
        reason = f"the blocks that would be dropped hold {shares[made.fqn]:.0%} of its input's energy"
        report.skipped.append(SkippedLayer(made.fqn, made.kind, reason))
    return [made.fqn for made in chosen]
