"""Models as their libraries build them, without weights, and batches for them.

Images are 224 x 224, for convolutional networks with channels last; texts are 1024 tokens, BERT's 512. Losses are the
usual ones. ``resmlp_s12`` and ``UNet`` are of ``examples/models``, ``small`` too: for a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.common import Record, version_of
from examples.models import build_model
from examples.models.unet import UNet

LABELS = 1000
Batch = tuple[Tensor, Tensor]


class Workload(NamedTuple):
    source: str  # distribution that the model is from
    batch: int
    build: Callable[..., nn.Module]
    data: Callable[[int], Batch]  # makes inputs and targets of so many samples
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    sizes: Mapping[str, tuple[str, int, int]] = {}
    """By axis (``depth``, ``width``): the argument of ``build``, its usual value, and the step between sizes."""


def describe(name: str, batches: float = 1) -> Record:
    """Return the fields that identify model and batch in a record."""
    source, batch = WORKLOADS[name][:2]
    return {"model": name, "source": source, "version": version_of(source), "batch": int(batches * batch)}


def checkpoint_blocks(model: nn.Module) -> None:
    """Let every block keep only its input and run again, by the switch of the library if there is one."""
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing()
    elif hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        for block in blocks_of(model):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that a model consists of."""
    names = {name for name, _ in model.named_modules()}
    known = ("blocks",), ("transformer.h",), ("model.layers",), ("encoder.layers",), ("bert.encoder.layer",)
    known += ("layer1", "layer2", "layer3", "layer4"), ("stages",), ("down", "up")
    parts = next(parts for parts in known if names.issuperset(parts))
    return [block for part in parts for block in model.get_submodule(part)]


# === Models ===========================================================================================


def _timm(name: str, **sizes: int) -> nn.Module:
    import timm

    return timm.create_model(name, **sizes)


def _transformers(name: str, config: str, **options: Any) -> nn.Module:
    import transformers

    model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**options))
    return model.train()


def _gpt2(**sizes: int) -> nn.Module:
    return _transformers("GPT2LMHeadModel", "GPT2Config", use_cache=False, **sizes)


def _llama(width: int, hidden: int, layers: int, heads: int, groups: int) -> nn.Module:
    sizes = {"hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": groups}
    return _transformers("LlamaForCausalLM", "LlamaConfig", use_cache=False, **sizes, **heads_of)


def _channels_last(build: Callable[[], nn.Module]) -> nn.Module:
    return build().to(memory_format=torch.channels_last)


# === Batches and losses ===============================================================================


def _images(batch: int, size: int = 224, labels: int = LABELS, layout: torch.memory_format | None = None) -> Batch:
    images = torch.randn(batch, 3, size, size)
    return images if layout is None else images.to(memory_format=layout), torch.randint(labels, (batch,))


def _noisy_images(batch: int) -> Batch:
    images, _ = _images(batch, 64, layout=torch.channels_last)
    return images, torch.randn(batch, 3, 64, 64)


def _text(batch: int, length: int, vocabulary: int) -> Batch:
    tokens = torch.randint(vocabulary, (batch, length))
    return tokens, tokens


def _cross_entropy(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(x), labels)


def _noise_error(model: nn.Module, images: Tensor, noise: Tensor) -> Tensor:
    return F.mse_loss(model(images, torch.linspace(0, 1, len(images), device=images.device)), noise)


def _own_loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = model(x, labels=labels).loss
    return loss


def _sized(depth: str, layers: int, width: str, features: int) -> dict[str, tuple[str, int, int]]:
    return {"depth": (depth, layers, 1), "width": (width, features, 192)}


# === Registry =========================================================================================


def _of_images(source: str, build: Callable[..., nn.Module], batch: int = 64, **more: Any) -> Workload:
    return Workload(source, batch, build, _images, _cross_entropy, **more)


def _of_text(build: Callable[..., nn.Module], batch: int, vocabulary: int, **more: Any) -> Workload:
    return Workload("transformers", batch, build, partial(_text, length=1024, vocabulary=vocabulary), _own_loss, **more)


WORKLOADS = {
    "vit_base_patch16_224": _of_images(
        "timm", partial(_timm, "vit_base_patch16_224"), sizes=_sized("depth", 12, "embed_dim", 768)
    ),
    "vit_small_patch16_224": _of_images("timm", partial(_timm, "vit_small_patch16_224"), 4),
    "resmlp_12_224": _of_images("timm", partial(_timm, "resmlp_12_224")),
    "resmlp_24_224": _of_images("timm", partial(_timm, "resmlp_24_224")),
    "convnext_tiny": _of_images("timm", partial(_timm, "convnext_tiny")),
    "resnet50": Workload(
        "torchvision",
        64,
        partial(_channels_last, torchvision.models.resnet50),
        partial(_images, layout=torch.channels_last),
        _cross_entropy,
    ),
    "GPT2LMHeadModel": _of_text(_gpt2, 8, 50257, sizes=_sized("n_layer", 12, "n_embd", 768)),
    "GPT2LMHeadModel, medium": _of_text(partial(_gpt2, n_embd=1024, n_layer=24, n_head=16), 4, 50257),
    "LlamaForCausalLM": _of_text(partial(_llama, 768, hidden=2048, layers=12, heads=12, groups=12), 8, 32000),
    "LlamaForCausalLM, 1.1B": _of_text(  # with the sizes of TinyLlama
        partial(_llama, 2048, hidden=5632, layers=22, heads=32, groups=4), 5, 32000
    ),
    "LlamaForCausalLM, small": _of_text(partial(_llama, 512, hidden=1408, layers=6, heads=8, groups=8), 1, 32000),
    "BertForSequenceClassification": Workload(
        "transformers",
        16,
        partial(_transformers, "BertForSequenceClassification", "BertConfig"),
        lambda batch: (torch.randint(30522, (batch, 512)), torch.randint(2, (batch,))),
        _own_loss,
    ),
    "UNet": Workload("lightning_actprune", 32, partial(_channels_last, UNet), _noisy_images, _noise_error),
    "resmlp_s12": _of_images(
        "lightning_actprune",
        partial(build_model, "resmlp_s12", image_size=224, patch_size=16, num_classes=LABELS),
        sizes=_sized("depth", 12, "dim", 384),
    ),
    "small": Workload(
        "lightning_actprune",
        2,
        partial(build_model, "vit_8x384", image_size=32, patch_size=2, num_classes=10, dim=64, depth=2),
        partial(_images, size=32, labels=10),
        _cross_entropy,
        {"depth": ("depth", 2, 1)},
    ),
}
TRAINED = (
    *("vit_base_patch16_224", "resmlp_12_224", "resmlp_24_224", "convnext_tiny", "resnet50", "UNet"),
    *("GPT2LMHeadModel", "GPT2LMHeadModel, medium", "LlamaForCausalLM, 1.1B", "BertForSequenceClassification"),
)
"""Models that the tables show."""
