"""The kinds of layers that are not pruned but can keep in few bits what backward needs, and what they become.

Only exact types are converted: a subclass may do anything in its forward. How classes of other packages are known, and
what they become, is in ``nn.foreign``.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_actprune.arguments import OtherOperator
from lightning_actprune.nn.activations import ACTIVATION_CLASSES, TRANSFORMERS_ACTIVATIONS
from lightning_actprune.nn.affine import FewBitTimmResBlock
from lightning_actprune.nn.batch_norms import (
    FewBitBatchNorm1d,
    FewBitBatchNorm2d,
    FewBitBatchNorm3d,
    FewBitGroupNorm,
    FewBitTimmBatchNormAct2d,
    FewBitTimmGroupNorm,
    FewBitTimmGroupNormAct,
)
from lightning_actprune.nn.dropout import FewBitDropout
from lightning_actprune.nn.few_bit import FewBitLayer
from lightning_actprune.nn.foreign import ForeignClasses, ForeignName
from lightning_actprune.nn.gated import (
    FewBitGLU,
    FewBitLlamaMLP,
    FewBitPhi3MLP,
    FewBitTimmGluMlp,
    FewBitTimmSwiGLU,
)
from lightning_actprune.nn.norms import (
    FewBitLayerNorm,
    FewBitLlamaRMSNorm,
    FewBitRMSNorm,
    FewBitTimmLayerNorm,
    FewBitTimmLayerNorm2d,
)
from lightning_actprune.nn.residual import FewBitResNetBasicBlock, FewBitResNetBottleneck

TORCH_KINDS: dict[type[nn.Module], type[FewBitLayer]] = {
    **{cls.dense_class: cls for cls in ACTIVATION_CLASSES},
    nn.BatchNorm1d: FewBitBatchNorm1d,
    nn.BatchNorm2d: FewBitBatchNorm2d,
    nn.BatchNorm3d: FewBitBatchNorm3d,
    nn.Dropout: FewBitDropout,
    nn.GLU: FewBitGLU,
    nn.GroupNorm: FewBitGroupNorm,
    nn.LayerNorm: FewBitLayerNorm,
    nn.RMSNorm: FewBitRMSNorm,
}
"""Few-bit class of each class of torch."""

LLAMA_NORMS = {
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "glm4": "Glm4",
    "glm4_moe": "Glm4Moe",
    "granite": "Granite",
    "llama": "Llama",
    "ministral": "Ministral",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "mllama": "MllamaText",
    "phi3": "Phi3",
    "pixtral": "Pixtral",
    "qwen2": "Qwen2",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen2_moe": "Qwen2Moe",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "smollm3": "SmolLM3",
}
"""Models of transformers whose ``..RMSNorm`` has the forward of ``LlamaRMSNorm``, and what its name begins with."""

LLAMA_MLPS = {
    "aria": "AriaSharedExpertsMLP",
    "cohere": "CohereMLP",
    "cohere2": "Cohere2MLP",
    "deepseek_v2": "DeepseekV2MLP",
    "deepseek_v3": "DeepseekV3MLP",
    "diffllama": "DiffLlamaMLP",
    "gemma": "GemmaMLP",
    "gemma2": "Gemma2MLP",
    "gemma3": "Gemma3MLP",
    "glm4_moe": "Glm4MoeMLP",
    "granite": "GraniteMLP",
    "helium": "HeliumMLP",
    "jamba": "JambaMLP",
    "llama": "LlamaMLP",
    "ministral": "MinistralMLP",
    "mistral": "MistralMLP",
    "mllama": "MllamaTextMLP",
    "olmo": "OlmoMLP",
    "olmo2": "Olmo2MLP",
    "olmo3": "Olmo3MLP",
    "olmoe": "OlmoeMLP",
    "pixtral": "PixtralMLP",
    "qwen2": "Qwen2MLP",
    "qwen2_5_vl": "Qwen2MLP",
    "qwen2_moe": "Qwen2MoeMLP",
    "qwen2_vl": "Qwen2MLP",
    "qwen3": "Qwen3MLP",
    "qwen3_moe": "Qwen3MoeMLP",
    "qwen3_next": "Qwen3NextMLP",
    "smollm3": "SmolLM3MLP",
    "stablelm": "StableLmMLP",
}
"""Models of transformers, and their class that has the forward of ``LlamaMLP``."""

PHI3_MLPS = {"dia": "DiaMLP", "glm": "GlmMLP", "glm4": "Glm4MLP", "phi3": "Phi3MLP"}
"""The same of ``Phi3MLP``."""

FOREIGN_KINDS: dict[ForeignName, type[FewBitLayer]] = {
    ("timm.layers.mlp", "GluMlp"): FewBitTimmGluMlp,
    ("timm.layers.mlp", "SwiGLU"): FewBitTimmSwiGLU,
    ("timm.layers.norm", "LayerNorm"): FewBitTimmLayerNorm,
    ("timm.layers.norm", "LayerNorm2d"): FewBitTimmLayerNorm2d,
    ("timm.layers.norm", "GroupNorm"): FewBitTimmGroupNorm,
    ("timm.layers.norm", "GroupNorm1"): FewBitTimmGroupNorm,
    ("timm.layers.norm_act", "BatchNormAct2d"): FewBitTimmBatchNormAct2d,
    ("timm.layers.norm_act", "GroupNormAct"): FewBitTimmGroupNormAct,
    ("timm.models.mlp_mixer", "ResBlock"): FewBitTimmResBlock,
    ("torchvision.models.resnet", "BasicBlock"): FewBitResNetBasicBlock,
    ("torchvision.models.resnet", "Bottleneck"): FewBitResNetBottleneck,
    **{
        (f"transformers.models.{model}.modeling_{model}", f"{name}RMSNorm"): FewBitLlamaRMSNorm
        for model, name in LLAMA_NORMS.items()
    },
    **{
        (f"transformers.models.{model}.modeling_{model}", name): mixin
        for mixin, models in ((FewBitLlamaMLP, LLAMA_MLPS), (FewBitPhi3MLP, PHI3_MLPS))
        for model, name in models.items()
    },
    **{("transformers.activations", name): mixin for name, mixin in TRANSFORMERS_ACTIVATIONS.items()},
}
"""Of each class of other packages the mixin that replaces its forward; it comes first among the bases."""


LEFT_DENSE: dict[type[nn.Module], tuple[OtherOperator, str]] = {
    nn.SyncBatchNorm: ("norm", "finds its statistics together with other processes, by kernels of its own"),
}
"""What classes are that stay as they are, and why."""

_FOREIGN = ForeignClasses(__name__, "FewBit", "keeps what backward needs in few bits", FOREIGN_KINDS)


def few_bit_class(cls: type[nn.Module]) -> type[FewBitLayer] | None:
    """Return what a layer of exactly this class becomes, ``None`` if its forward is not known."""
    return TORCH_KINDS.get(cls) or _FOREIGN.derived(cls)


def operator_of(module: nn.Module) -> OtherOperator | None:
    """Return what kind of operator ``module`` is, also as a subclass of a known one, ``None`` if none of them."""
    if type(module) in LEFT_DENSE:
        return LEFT_DENSE[type(module)][0]
    found = _known(type(module))
    return None if found is None else found.operator


def stores(module: nn.Module) -> bool:
    """Return whether ``module``, of a known class or a subclass of one, keeps anything itself."""
    found = _known(type(module))
    return found is None or found.stores


def _known(cls: type[nn.Module]) -> type[FewBitLayer] | None:
    if issubclass(cls, FewBitLayer):
        return cls
    return next(filter(None, map(few_bit_class, cls.__mro__)), None)


def __getattr__(name: str) -> Any:
    """Return the few-bit class of that name: of another package's class in a model that is unpickled."""
    found = _FOREIGN.named(name)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
