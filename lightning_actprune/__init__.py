"""Cut the GPU memory of training by pruning what backward keeps.

Add two callbacks to a ``Trainer``::

    trainer = L.Trainer(callbacks=[ActivationPruning(sparsity=0.6, block_size=32), ActivationMemoryMonitor()])

or use ``convert`` / ``revert`` in a plain PyTorch loop. Importing this package initialises no CUDA.
"""

from lightning_actprune import functional as functional
from lightning_actprune import pictures as pictures
from lightning_actprune.callbacks import ActivationMemoryMonitor, ActivationPruning, ActivationSensitivity
from lightning_actprune.conversion import convert, revert
from lightning_actprune.conversion_report import ConversionReport, ConvertedLayer, FewBitConversion, SkippedLayer
from lightning_actprune.energy import EnergyProbe
from lightning_actprune.few_bit_saving import FewBitSaving
from lightning_actprune.holders import HolderProbe
from lightning_actprune.layer_settings import LayerSettings
from lightning_actprune.nn import ActivationPrunedLinear
from lightning_actprune.recomputed import RecomputationProbe
from lightning_actprune.schedules import (
    ConstantSchedule,
    CosineSchedule,
    CubicSchedule,
    LinearSchedule,
    SparsitySchedule,
    StepSchedule,
)
from lightning_actprune.sensitivity import measure_sensitivity
from lightning_actprune.sensitivity_grid import SensitivityGrid
from lightning_actprune.sensitivity_probe import SensitivityProbe
from lightning_actprune.sensitivity_report import LayerSensitivity, SensitivityReport
from lightning_actprune.step_recorder import StepMemoryRecorder

__version__ = "0.1.0"

__all__ = [
    "ActivationMemoryMonitor",
    "ActivationPrunedLinear",
    "ActivationPruning",
    "ActivationSensitivity",
    "ConstantSchedule",
    "ConversionReport",
    "ConvertedLayer",
    "CosineSchedule",
    "CubicSchedule",
    "EnergyProbe",
    "FewBitConversion",
    "FewBitSaving",
    "HolderProbe",
    "LayerSensitivity",
    "LayerSettings",
    "LinearSchedule",
    "RecomputationProbe",
    "SensitivityGrid",
    "SensitivityProbe",
    "SensitivityReport",
    "SkippedLayer",
    "SparsitySchedule",
    "StepMemoryRecorder",
    "StepSchedule",
    "convert",
    "functional",
    "measure_sensitivity",
    "pictures",
    "revert",
]
