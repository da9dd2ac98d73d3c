"""Models as their libraries build them, without weights, and batches for them.

Images are 224 x 224, for convolutional networks with channels last; texts are 1024 tokens, BERT's 512. Losses are the
usual ones. ``resmlp_s12`` and ``UNet`` are of ``examples/models``, ``small`` too: for a CPU. ``BasicUNet, 3D`` and
the models behind it are of other fields; what they draw from other generators than torch's is off.
"""

from __future__ import annotations

import math
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
GRAPH_CLASSES = 47
Batch = tuple[Tensor, ...]


class Workload(NamedTuple):
    source: str  # distribution that the model is from
    batch: int
    build: Callable[..., nn.Module]
    data: Callable[[int], Batch]  # makes inputs and targets of so many samples
    loss: Callable[..., Tensor]  # of the model and the batch
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
    elif hasattr(model, "enable_gradient_checkpointing"):
        model.enable_gradient_checkpointing()
    else:
        for block in blocks_of(model):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that a model consists of."""
    names = {name for name, _ in model.named_modules()}
    known = ("blocks",), ("transformer.h",), ("model.layers",), ("encoder.layers",), ("bert.encoder.layer",)
    known += ("layer1", "layer2", "layer3", "layer4"), ("stages",), ("down", "up"), ("convs",)
    parts = next((parts for parts in known if names.issuperset(parts)), None)
    if parts is None:  # no lists of blocks, as in MONAI's U-Net
        return [block for block in model.children() if next(block.children(), None) is not None]
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


def _volume_unet(**sizes: Any) -> nn.Module:
    from monai.networks.nets import BasicUNet

    return BasicUNet(spatial_dims=3, in_channels=1, out_channels=3, **sizes)


def _video_transformer(**sizes: Any) -> nn.Module:
    from diffusers import LTXVideoTransformer3DModel

    return LTXVideoTransformer3DModel(**sizes).train()


def _graph_network(**sizes: Any) -> nn.Module:
    from torch_geometric.nn import GAT

    return GAT(out_channels=GRAPH_CLASSES, dropout=0.1, **sizes)


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


def _volumes(batch: int, size: int) -> Batch:
    return torch.randn(batch, 1, size, size, size), torch.randint(3, (batch, size, size, size))


def _videos(batch: int, size: tuple[int, int, int], channels: int, caption: tuple[int, int]) -> Batch:
    latents = torch.randn(2, batch, math.prod(size), channels)
    times = torch.linspace(0, 1, batch + 2)[1:-1]
    return latents[0], latents[1], torch.randn(batch, *caption), times, torch.tensor([size] * batch)


def _graph(nodes: int, features: int) -> Batch:
    return torch.randn(nodes, features), torch.randint(GRAPH_CLASSES, (nodes,)), torch.randint(nodes, (2, 10 * nodes))


def _scenes(batch: int, size: tuple[int, int], objects: int = 10) -> Batch:
    boxes = 0.25 + 0.5 * torch.rand(batch, objects, 4)
    return torch.randn(batch, 3, *size), torch.randint(91, (batch, objects)), boxes


def _sound(batch: int, seconds: float) -> Batch:
    return torch.randn(batch, int(16000 * seconds)), torch.randint(1, 32, (batch, int(10 * seconds)))


def _cross_entropy(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(x), labels)


def _noise_error(model: nn.Module, images: Tensor, noise: Tensor) -> Tensor:
    return F.mse_loss(model(images, torch.linspace(0, 1, len(images), device=images.device)), noise)


def _flow_error(model: nn.Module, clean: Tensor, noise: Tensor, caption: Tensor, times: Tensor, size: Tensor) -> Tensor:
    at = times[:, None, None]
    frames, height, width = size[0].tolist()
    mask = torch.ones(caption.shape[:2], device=caption.device)
    velocity = model(torch.lerp(clean, noise, at), caption, 1000 * times, mask, frames, height, width).sample
    return F.mse_loss(velocity, noise - clean)


def _graph_loss(model: nn.Module, features: Tensor, labels: Tensor, edges: Tensor) -> Tensor:
    return F.cross_entropy(model(features, edges), labels)


def _detection_loss(model: nn.Module, images: Tensor, classes: Tensor, boxes: Tensor) -> Tensor:
    labels = [{"class_labels": c, "boxes": b} for c, b in zip(classes, boxes, strict=True)]
    loss: Tensor = model(images, labels=labels).loss
    return loss


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
    "BasicUNet, 3D": Workload("monai", 2, _volume_unet, partial(_volumes, size=128), _cross_entropy),
    "LTXVideoTransformer3DModel": Workload(  # 8 of its 28 blocks, a video of 121 frames of 512 x 704
        "diffusers",
        1,
        partial(_video_transformer, num_layers=8),
        partial(_videos, size=(16, 16, 22), channels=128, caption=(128, 4096)),
        _flow_error,
    ),
    "GAT": Workload(  # a batch is counted in nodes of one graph
        "torch_geometric",
        100_000,
        partial(_graph_network, in_channels=128, hidden_channels=256, num_layers=3, heads=4),
        partial(_graph, features=128),
        _graph_loss,
    ),
    "DetrForObjectDetection": Workload(
        "transformers",
        4,
        partial(_transformers, "DetrForObjectDetection", "DetrConfig", num_labels=91),
        partial(_scenes, size=(800, 1066)),
        _detection_loss,
    ),
    "Wav2Vec2ForCTC": Workload(
        "transformers",
        8,
        partial(_transformers, "Wav2Vec2ForCTC", "Wav2Vec2Config", apply_spec_augment=False, layerdrop=0.0),
        partial(_sound, seconds=15),
        _own_loss,
    ),
    "MambaForCausalLM": Workload(  # few tokens: a loop over them in Python takes time that grows with their square
        "transformers",
        4,
        partial(_transformers, "MambaForCausalLM", "MambaConfig", num_hidden_layers=4, use_cache=False),
        partial(_text, length=256, vocabulary=50280),
        _own_loss,
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
