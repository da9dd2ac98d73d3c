"""One table of every module that can be compressed: how to build it, call it, and what it may keep for backward.

The contract suite (``tests/contract``) runs over it. Bytes are written out here from the definition of the formats,
independently of the package: blocks of 32 values with a header of two bytes, codes of ``bits`` bits, and the positions
of kept blocks where blocks are dropped.
"""

from __future__ import annotations

import copy
import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_actprune.config import Keep
from lightning_actprune.convert import convert
from lightning_actprune.operators.attention import RoutedMultiheadAttention
from lightning_actprune.operators.norm import Affine
from tests.support import oracle
from tests.support.compressed import whole

BLOCK = 32
Key = type[nn.Module] | tuple[str, str]
Announced = Callable[[Keep, int], int]

# How much is kept.


def stored(blocks: int, keep: Keep, size: int = BLOCK) -> int:
    """Bytes of so many blocks of ``size`` values: the codes, filled up to an even number of bytes, and a header."""
    if keep.bits is None:
        return blocks * size * 4
    codes = math.ceil(size * keep.bits / 8)
    return blocks * (codes + codes % 2 + 2)


def rows(count: int, length: int) -> int:
    """Blocks of ``count`` rows, of which the last block may be cut short."""
    return count * math.ceil(length / BLOCK)


def packed(samples: int, blocks: int, keep: Keep) -> int:
    """Bytes of ``blocks`` blocks per sample of which a fraction is dropped, with a bit and 1/128 offset for each."""
    kept = samples * (blocks - math.floor(blocks * keep.sparsity))
    positions = 4 * samples * (math.ceil(blocks / 32) + math.ceil(blocks / 128))
    return stored(kept, keep) + (0 if keep.bits and not keep.sparsity else positions)


def derivative(values: int, keep: Keep) -> int:
    """Bytes of the derivative of an activation function: rows of eight codes, and a byte for each 256 values."""
    return math.ceil(values / 8) * keep.bits + math.ceil(values / 256)


def bits_of(values: int, keep: Keep) -> int:
    """Bytes of one bit a value."""
    return math.ceil(values / 8)


# Cases.


def call_layer(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def attend(layer: nn.Module, x: Tensor) -> Tensor:
    """Call attention of a sequence with itself, without the attention weights.

    By products of matrices, whose result nothing keeps: whether fused kernels do differs from device to device.
    """
    with sdpa_kernel(SDPBackend.MATH):
        return layer(x, x, x, need_weights=False)[0]


class Holder(nn.Module):
    """A model of one layer, whose name is ``layer``."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


@dataclass(frozen=True)
class Case:
    covers: tuple[Key, ...]  # registered classes that this module is made of
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    operator: str
    # Given what the dense module keeps: bytes kept of an input of ``shape`` in fp32, without parameters and buffers.
    announced: Announced
    exact: tuple[str, ...] = ()  # gradients that stay exact, "input" among them, or "*"
    call: Callable[[nn.Module, Tensor], Tensor] = call_layer
    rounds: bool = False  # whether the output may differ from that of the dense module by rounding
    slack: float = 1.0  # by how much more than one stored tensor several may put gradients off
    inside: bool = False  # whether layers inside, which stay dense, keep tensors of their own
    seeded: bool = False  # whether the forward draws random numbers
    wide: bool = False  # whether inputs in fp64 are taken, since what is kept is exact
    dropped: Callable[[Tensor, Keep], Tensor] | None = None  # the input without its dropped blocks

    @property
    def drops(self) -> bool:
        """Whether blocks can be dropped."""
        return self.operator in ("linear", "convolution")

    @property
    def batch(self) -> int:
        """The dimension of samples in the input."""
        return 1 if self.call is attend else 0

    @property
    def keeps(self) -> list[Keep]:
        """The ways of keeping that a test of values or bytes goes through."""
        pruned = [Keep(None, 0.5), Keep(bits=4, sparsity=0.5)] if self.drops else [Keep(bits=3), Keep(bits=4)]
        return [*pruned, Keep(bits=2), Keep(bits=8)]

    @property
    def keep(self) -> Keep:
        """The way of keeping where it does not matter."""
        return Keep(bits=4, sparsity=0.5 if self.drops else 0.0)

    def dense(self, device: torch.device | str = "cpu") -> Holder:
        """Return the dense model, with parameters that are neither 0 nor 1."""
        torch.manual_seed(1)
        layer = self.make()
        for parameter in layer.parameters():
            scale = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 1.0
            nn.init.normal_(parameter, std=scale)
        return Holder(layer, self.call).to(device)

    def compressed(self, dense: Holder, keep: Keep | None = None) -> Holder:
        model = copy.deepcopy(dense)
        convert(model, rules={f"type:{self.operator}": whole(keep or self.keep), "*": None})
        return model

    def pair(self, keep: Keep | None = None, device: torch.device | str = "cpu") -> tuple[Holder, Holder]:
        """Return the dense model and a converted copy."""
        dense = self.dense(device)
        return dense, self.compressed(dense, keep)

    def input(self, device: torch.device | str = "cpu") -> Tensor:
        """Return an input that needs a gradient, always the same values."""
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(2)).to(device).requires_grad_()

    def is_exact(self, name: str) -> bool:
        return self.exact == ("*",) or name in self.exact


def cut_features(x: Tensor, keep: Keep) -> Tensor:
    """Drop blocks along the features; all those of a sample compete."""
    return oracle.pruned(oracle.as_samples(x.detach()), keep.block_size, keep.sparsity).view(x.shape)


def cut_memory(x: Tensor, keep: Keep) -> Tensor:
    """Drop blocks of each sample as it lies in memory."""
    return oracle.pruned(x.detach().flatten(1).unsqueeze(1), keep.block_size, keep.sparsity).view(x.shape)


FEATURES = (3, 5, 72)
"""A batch of sequences; the last block of a row is cut short."""
PIXELS = (4, 24, 5, 3)

# Linear layers and convolutions.

EXACT = "input", "layer.bias"
LINEAR = {
    "linear": Case(
        (nn.Linear,), lambda: nn.Linear(72, 40), FEATURES, "linear",
        lambda keep, dense: packed(3, 15, keep), EXACT, wide=True, dropped=cut_features,
    ),
    "attention": Case(
        (nn.MultiheadAttention, RoutedMultiheadAttention, NonDynamicallyQuantizableLinear),
        lambda: nn.MultiheadAttention(72, 4), (5, 3, 72), "linear",
        lambda keep, dense: dense - 2 * 4 * 15 * 72 + 2 * packed(3, 15, keep),
        ("input", "layer.in_proj_bias", "layer.out_proj.bias"), attend, wide=True, inside=True,
    ),
    "conv1d": Case(
        (nn.Conv1d,), lambda: nn.Conv1d(12, 7, 3, padding=1), (3, 12, 20), "convolution",
        lambda keep, dense: packed(3, 8, keep), EXACT, wide=True, dropped=cut_memory,
    ),
    "conv2d": Case(
        (nn.Conv2d,), lambda: nn.Conv2d(24, 7, 3, stride=2), PIXELS, "convolution",
        lambda keep, dense: packed(4, 12, keep), EXACT, wide=True, dropped=cut_memory,
    ),
    "conv3d": Case(
        (nn.Conv3d,), lambda: nn.Conv3d(8, 6, (2, 3, 3)), (2, 8, 3, 4, 5), "convolution",
        lambda keep, dense: packed(2, 15, keep), EXACT, wide=True, dropped=cut_memory,
    ),
}  # fmt: skip

# Activation functions.


def activation(make: Callable[[], nn.Module], *covers: Key, exact: bool = False) -> Case:
    bytes_of = bits_of if exact else derivative
    announced: Announced = lambda keep, dense: bytes_of(math.prod(FEATURES), keep)  # noqa: E731
    return Case(covers, make, FEATURES, "activation", announced, ("*",) if exact else (), wide=exact)


ACTIVATIONS = {
    "gelu": activation(nn.GELU, nn.GELU),
    "gelu-tanh": activation(lambda: nn.GELU(approximate="tanh"), nn.GELU),
    "silu": activation(nn.SiLU, nn.SiLU),
    "mish": activation(nn.Mish, nn.Mish),
    "tanh": activation(nn.Tanh, nn.Tanh),
    "elu": activation(lambda: nn.ELU(0.5), nn.ELU),
    "hardswish": activation(nn.Hardswish, nn.Hardswish),
    "relu": activation(nn.ReLU, nn.ReLU, exact=True),
    "relu6": activation(nn.ReLU6, nn.ReLU6, exact=True),
    "hardtanh": activation(lambda: nn.Hardtanh(-0.5, 2.0), nn.Hardtanh, exact=True),
    "leaky-relu": activation(lambda: nn.LeakyReLU(0.1), nn.LeakyReLU, exact=True),
    "hardsigmoid": activation(nn.Hardsigmoid, nn.Hardsigmoid, exact=True),
    "dropout": Case(
        (nn.Dropout,), lambda: nn.Dropout(0.3), FEATURES, "activation",
        lambda keep, dense: bits_of(math.prod(FEATURES), keep), ("*",), seeded=True, wide=True,
    ),
    "glu": Case(
        (nn.GLU,), nn.GLU, FEATURES, "activation",
        lambda keep, dense: 2 * stored(rows(15, 36), keep), rounds=True,
    ),
}  # fmt: skip

# Norms and scales.


def rows_norm(make: Callable[[], nn.Module], *covers: Key, length: int = 72) -> Case:
    count = math.prod(FEATURES) // length
    announced: Announced = lambda keep, dense: stored(rows(count, length), keep) + 4 * count  # noqa: E731
    return Case(covers, make, FEATURES, "norm", announced, ("layer.bias",), rounds=True)


def channel_norm(
    make: Callable[[], nn.Module], *covers: Key, sets: int = 24, shape: tuple[int, ...] = PIXELS, acts: bool = False
) -> Case:
    """Return a norm of ``sets`` means over channels; one that ``acts`` ends with a dense ReLU that keeps its result."""
    values = math.prod(shape)
    announced: Announced = lambda keep, dense: stored(math.ceil(values / BLOCK), keep) + 12 * sets + 4 * values * acts  # noqa: E731
    return Case(covers, make, shape, "norm", announced, ("layer.bias",), rounds=True, slack=1.5, inside=acts)


NORMS = {
    "layer-norm": rows_norm(lambda: nn.LayerNorm(72), nn.LayerNorm),
    "layer-norm-two": rows_norm(lambda: nn.LayerNorm((5, 72)), nn.LayerNorm, length=360),
    "rms-norm": rows_norm(lambda: nn.RMSNorm(72), nn.RMSNorm),
    "rms-norm-plain": rows_norm(lambda: nn.RMSNorm(72, elementwise_affine=False), nn.RMSNorm),
    "batch-norm-1d": channel_norm(lambda: nn.BatchNorm1d(24), nn.BatchNorm1d, shape=(10, 24)),
    "batch-norm-2d": channel_norm(lambda: nn.BatchNorm2d(24), nn.BatchNorm2d),
    "batch-norm-3d": channel_norm(lambda: nn.BatchNorm3d(24, momentum=None), nn.BatchNorm3d, shape=(2, 24, 3, 2, 3)),
    "group-norm": channel_norm(lambda: nn.GroupNorm(4, 24), nn.GroupNorm, sets=16),
    "affine": Case(
        (Affine,), lambda: Affine(72), FEATURES, "affine",
        lambda keep, dense: stored(rows(15, 72), keep), EXACT, rounds=True,
    ),
}  # fmt: skip


# Classes of other packages.


def foreign(like: Case, module: str, name: str, *arguments: Any, **changes: Any) -> Case:
    """Return a case for a class of another package; its tests are skipped if the installed version has none."""

    def make() -> nn.Module:
        found = getattr(importlib.import_module(module), name, None)
        if found is None:
            pytest.skip(f"this version of the package has no {name}")
        return found(*arguments)

    return replace(like, covers=((module, name),), make=make, **changes)


class Config(SimpleNamespace):
    """The configuration of a transformers model of any kind: what is not given is ``False``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return False


def config(function: str = "silu") -> Config:
    ones = dict.fromkeys(("n_shared_experts", "moe_num_shared_experts", "logits_scaling", "pretraining_tp"), 1)
    return Config(hidden_size=72, intermediate_size=40, hidden_act=function, hidden_activation=function, **ones)


def gated(out: str = "down_proj") -> Case:
    """Return the case of an MLP ``72 -> 40 -> 72`` whose dense layers keep input and product."""
    announced: Announced = lambda keep, dense: 4 * 15 * (72 + 40) + 2 * stored(rows(15, 40), keep)  # noqa: E731
    exact = f"layer.{out}.weight", f"layer.{out}.bias"
    return Case((), nn.Identity, FEATURES, "activation", announced, exact, rounds=True, slack=1.5, inside=True)


def residual(*channels: int) -> Case:
    """Return the case of a block of torchvision's ResNets, of which only the norms are compressed."""

    def announced(keep: Keep, dense: int) -> int:
        """The dense norm keeps its input, of which the convolution before keeps nothing, and two statistics."""
        pixels, total = 6 * 6 * 4, dense
        for width in channels:
            total += stored(math.ceil(width * pixels / BLOCK), keep) + 12 * width - 4 * width * pixels - 8 * width
        return total

    shape, exact = (6, channels[-1], 6, 4), (f"layer.bn{len(channels)}.bias",)
    return Case((), nn.Identity, shape, "norm", announced, exact, rounds=True, slack=8.0, inside=True)


TIMM_NORM, TIMM_ACT, MIXER = "timm.layers.norm", "timm.layers.norm_act", "timm.models.mlp_mixer"
RESNET, HF = "torchvision.models.resnet", "transformers.activations"
LLAMA = "transformers.models.llama.modeling_llama"
CASES_OF_PACKAGES = {
    "transformers-conv1d": foreign(LINEAR["linear"], "transformers.pytorch_utils", "Conv1D", 40, 72),
    "timm-affine": foreign(NORMS["affine"], MIXER, "Affine", 72, exact=("input", "layer.beta")),
    "timm-layer-scale": foreign(
        NORMS["affine"], "timm.layers.layer_scale", "LayerScale", 72, operator="scale", exact=("input",),
    ),
    "timm-res-block": foreign(  # two branches, of which the ends are scaled
        NORMS["affine"], MIXER, "ResBlock", 72, 5, operator="scale", exact=(), inside=True,
        announced=lambda keep, dense: dense - 2 * 4 * 15 * 72 + 2 * stored(rows(15, 72), keep),
    ),
    "timm-layer-norm": foreign(NORMS["layer-norm"], TIMM_NORM, "LayerNorm", 72),
    "timm-layer-norm-2d": foreign(  # over the channels of each pixel; blocks are cut to them
        NORMS["layer-norm"], TIMM_NORM, "LayerNorm2d", 24, shape=PIXELS,
        announced=lambda keep, dense: stored(60, keep, 24) + 240,
    ),
    "timm-group-norm": foreign(NORMS["group-norm"], TIMM_NORM, "GroupNorm", 24, 4),
    "timm-group-norm-1": foreign(channel_norm(nn.Identity, sets=4), TIMM_NORM, "GroupNorm1", 24),
    "timm-batch-norm-act": foreign(channel_norm(nn.Identity, acts=True), TIMM_ACT, "BatchNormAct2d", 24),
    "timm-group-norm-act": foreign(channel_norm(nn.Identity, sets=16, acts=True), TIMM_ACT, "GroupNormAct", 24, 4),
    "timm-glu-mlp": foreign(gated("fc2"), "timm.layers.mlp", "GluMlp", 72, 80),
    "timm-swiglu": foreign(gated("fc2"), "timm.layers.mlp", "SwiGLU", 72, 40),
    "basic-block": foreign(residual(8, 8), RESNET, "BasicBlock", 8, 8),
    "bottleneck": foreign(residual(8, 8, 32), RESNET, "Bottleneck", 32, 8),
    "llama-norm": foreign(NORMS["layer-norm"], LLAMA, "LlamaRMSNorm", 72),
    "llama-mlp": foreign(gated(), LLAMA, "LlamaMLP", config()),
    "phi3-mlp": foreign(gated(), "transformers.models.phi3.modeling_phi3", "Phi3MLP", config()),
    **{
        f"transformers-{name}": foreign(ACTIVATIONS["gelu"], HF, name)
        for name in (
            "GELUActivation", "NewGELUActivation", "AccurateGELUActivation", "GELUTanh", "PytorchGELUTanh",
            "FastGELUActivation", "QuickGELUActivation", "SiLUActivation", "MishActivation",
        )
    },
    **{
        f"timm-{name}": foreign(ACTIVATIONS["gelu"], "timm.layers.activations", name)
        for name in ("GELU", "GELUTanh", "QuickGELU")
    },
}  # fmt: skip


def tables(name: str) -> dict[Any, Any]:
    """Return all tables of that name, ``CLASSES`` or ``FOREIGN``, in ``operators/*.py`` as one."""
    package = importlib.import_module("lightning_actprune.operators")
    found: dict[Any, Any] = {}
    for module in pkgutil.iter_modules(package.__path__):
        found |= getattr(importlib.import_module(f"{package.__name__}.{module.name}"), name, {})
    return found


COPIES = {
    "llama-norm": """
        glm4_moe.Glm4MoeRMSNorm mistral.MistralRMSNorm mixtral.MixtralRMSNorm mllama.MllamaTextRMSNorm phi3.Phi3RMSNorm
        qwen2.Qwen2RMSNorm qwen2_5_vl.Qwen2_5_VLRMSNorm qwen3.Qwen3RMSNorm smollm3.SmolLM3RMSNorm
    """,
    "llama-mlp": """
        aria.AriaSharedExpertsMLP deepseek_v3.DeepseekV3MLP gemma2.Gemma2MLP gemma3.Gemma3MLP glm4_moe.Glm4MoeMLP
        mistral.MistralMLP olmo.OlmoMLP qwen2_vl.Qwen2MLP qwen3.Qwen3MLP stablelm.StableLmMLP
    """,
    "phi3-mlp": "dia.DiaMLP glm.GlmMLP",
}
"""Classes of transformers whose forward is that of a class with a case."""
GATED = {
    "GluMlp": [
        (72, 80, None, nn.GELU, nn.LayerNorm),
        (72, 80, None, nn.SiLU, None, True, 0.0, False, False),  # the gate first
        (72, 80, None, nn.Sigmoid, None, True, 0.0, True),  # of images
    ],
    "SwiGLU": [(72, 40, None, nn.SiLU, nn.LayerNorm)],
}
"""Other arguments of timm's classes."""


def variants() -> Iterator[Case]:
    """Yield cases of these classes, of whose modules no more than the values is tested."""
    for original, names in COPIES.items():
        like, argument = CASES[original], 72 if original == "llama-norm" else config()
        for model, _, name in (copied.partition(".") for copied in names.split()):
            yield foreign(like, f"transformers.models.{model}.modeling_{model}", name, argument)
    yield foreign(gated(), LLAMA, "LlamaMLP", config("gelu_pytorch_tanh"))
    for name, calls in GATED.items():
        for arguments in calls:
            case = foreign(gated("fc2"), "timm.layers.mlp", name, *arguments)
            yield replace(case, shape=(2, 72, 5, 6)) if arguments[-1] is True else case


OWN = {**LINEAR, **ACTIVATIONS, **NORMS}
"""Cases of torch and of this package."""
CASES = OWN | CASES_OF_PACKAGES
FUNCTIONS = ["linear", "attention", "conv2d", "gelu", "relu", "glu", "layer-norm", "batch-norm-2d", "affine"]
"""A case of each autograd function, and attention, whose projections are one."""
