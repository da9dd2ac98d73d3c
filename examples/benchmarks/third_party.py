"""Third-party models as their libraries build them, without weights: what ``models.py`` trains for a few steps.

``resmlp_s12`` is that of ``examples/models``, with modules of their own for affine layers and layer scales. The
``UNet`` is from there too, and finds the noise in images of 64 x 64.

Other images are 224 x 224, those of convolutional networks with their channels last in memory; a text is 1024 tokens
long, BERT's the 512 that it has positions for. Losses are the usual ones of each task, computed by the library where it
does that itself. Only ``LoRALinear`` is written here: a frozen layer with two small trainable ones beside it, named and
nested as PEFT does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from examples.models import build_model
from examples.models.unet import UNet

LABELS = 1000
Batch = tuple[Tensor, Tensor]


class Workload(NamedTuple):
    """A model and how it is trained.

    Args:
        source: Distribution that the model comes from.
        batch: Samples of a step.
        build: Makes the model.
        data: Makes inputs and targets of that many samples.
        loss: Maps model, inputs and targets to the loss.
    """

    source: str
    batch: int
    build: Callable[[], nn.Module]
    data: Callable[[int], Batch]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]


class LoRALinear(nn.Module):
    """A linear layer with a low-rank update: ``base(x) + scaling * B(A(x))``, of which ``A`` and ``B`` are trained."""

    def __init__(self, base_layer: nn.Linear, rank: int = 16, alpha: int = 32) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)
        self.scaling = alpha / rank
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * self.scaling


def add_lora(model: nn.Module, trained: str) -> nn.Module:
    """Freeze ``model`` and give its linear layers an update, but for the one called ``trained``, which is trained."""
    model.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and name != trained:
            model.set_submodule(name, LoRALinear(layer))
    model.get_submodule(trained).requires_grad_()
    return model


def checkpoint_blocks(model: nn.Module) -> None:
    """Let every block of a model of timm or torchvision, of GPT-2 or Llama keep only its input, and run it again."""
    for block in blocks_of(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that a model of timm or torchvision, GPT-2 or a Llama consists of."""
    names = {name for name, _ in model.named_modules()}
    known = ("blocks",), ("transformer.h",), ("model.layers",), ("encoder.layers",)
    known += ("layer1", "layer2", "layer3", "layer4"), ("down", "up")
    parts = next(parts for parts in known if names.issuperset(parts))
    return [block for part in parts for block in model.get_submodule(part)]


def _timm(name: str) -> nn.Module:
    import timm

    return timm.create_model(name)


def _torchvision(name: str) -> nn.Module:
    import torchvision

    return torchvision.models.get_model(name)


def _example(name: str) -> nn.Module:
    return build_model(name, image_size=224, patch_size=16, num_classes=LABELS)


def _channels_last(name: str) -> nn.Module:
    return _torchvision(name).to(memory_format=torch.channels_last)


def _transformers(name: str, config: str, **options: Any) -> nn.Module:
    import transformers

    model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**options))
    return model.train()


def _transformers_lora() -> nn.Module:
    return add_lora(_transformers("ViTForImageClassification", "ViTConfig", num_labels=LABELS), "classifier")


def _llama(width: int, hidden: int, layers: int, heads: int, groups: int) -> nn.Module:
    options = {"num_attention_heads": heads, "num_key_value_heads": groups, "use_cache": False}
    return _transformers(
        "LlamaForCausalLM",
        "LlamaConfig",
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        **options,
    )


def _unet() -> nn.Module:
    return UNet().to(memory_format=torch.channels_last)


def _gpt2(**sizes: int) -> nn.Module:
    return _transformers("GPT2LMHeadModel", "GPT2Config", use_cache=False, **sizes)


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True), 12)


def _images(batch: int) -> Batch:
    return torch.randn(batch, 3, 224, 224), torch.randint(LABELS, (batch,))


def _images_channels_last(batch: int) -> Batch:
    images, labels = _images(batch)
    return images.to(memory_format=torch.channels_last), labels


def _noisy_images(batch: int) -> Batch:
    images = torch.randn(batch, 3, 64, 64).contiguous(memory_format=torch.channels_last)
    return images, torch.randn(batch, 3, 64, 64)


def _text(batch: int, length: int, vocabulary: int) -> Batch:
    tokens = torch.randint(vocabulary, (batch, length))
    return tokens, tokens


def _labelled_text(batch: int, length: int, vocabulary: int, labels: int) -> Batch:
    return torch.randint(vocabulary, (batch, length)), torch.randint(labels, (batch,))


def _vectors(batch: int) -> Batch:
    return torch.randn(batch, 1024, 768), torch.randn(batch, 1024, 768)


def _cross_entropy(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def _squared_error(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(model(x), target)


def _noise_error(model: nn.Module, images: Tensor, noise: Tensor) -> Tensor:
    times = torch.linspace(0, 1, len(images), device=images.device)
    return F.mse_loss(model(images, times), noise)


def _own_loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = model(x, labels=labels).loss
    return loss


_TIMM = (
    "resmlp_12_224",
    "resmlp_24_224",
    "mixer_b16_224",
    "vit_base_patch16_224",
    "swin_tiny_patch4_window7_224",
    "convnext_tiny",
)
_BUILDERS = {
    "lightning_actprune": (_example, ("resmlp_s12",)),
    "timm": (_timm, _TIMM),
    "torchvision": (_torchvision, ("vit_b_16", "swin_t")),
}

WORKLOADS = {
    name: Workload(source, 64, partial(build, name), _images, _cross_entropy)
    for source, (build, names) in _BUILDERS.items()
    for name in names
} | {
    "resnet50": Workload("torchvision", 64, partial(_channels_last, "resnet50"), _images_channels_last, _cross_entropy),
    "GPT2LMHeadModel": Workload(
        "transformers",
        8,
        _gpt2,
        partial(_text, length=1024, vocabulary=50257),
        _own_loss,
    ),
    "GPT2LMHeadModel, medium": Workload(
        "transformers",
        4,
        partial(_gpt2, n_embd=1024, n_layer=24, n_head=16),
        partial(_text, length=1024, vocabulary=50257),
        _own_loss,
    ),
    "UNet": Workload("lightning_actprune", 32, _unet, _noisy_images, _noise_error),
    "BertForSequenceClassification": Workload(
        "transformers",
        16,
        partial(_transformers, "BertForSequenceClassification", "BertConfig"),
        partial(_labelled_text, length=512, vocabulary=30522, labels=2),
        _own_loss,
    ),
    "LlamaForCausalLM": Workload(
        "transformers",
        8,
        partial(_llama, 768, hidden=2048, layers=12, heads=12, groups=12),
        partial(_text, length=1024, vocabulary=32000),
        _own_loss,
    ),
    "LlamaForCausalLM, 1.1B": Workload(  # with the sizes of TinyLlama
        "transformers",
        5,
        partial(_llama, 2048, hidden=5632, layers=22, heads=32, groups=4),
        partial(_text, length=1024, vocabulary=32000),
        _own_loss,
    ),
    "ViTForImageClassification": Workload(
        "transformers",
        64,
        partial(_transformers, "ViTForImageClassification", "ViTConfig", num_labels=LABELS),
        _images,
        _own_loss,
    ),
    "ViTForImageClassification, LoRA": Workload("transformers", 64, _transformers_lora, _images, _own_loss),
    "TransformerEncoder": Workload("torch", 8, _encoder, _vectors, _squared_error),
}
