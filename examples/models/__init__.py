"""Models of the examples, built by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from examples.models.gpt import GPT, gpt_6x384
from examples.models.resmlp import ResMLP, resmlp_b24, resmlp_s12, resmlp_s24, resmlp_s36, resmlp_tiny
from examples.models.resnet import ResNet, resnet_9x64
from examples.models.vit import ViT, vit_8x384

MODELS: dict[str, Callable[..., nn.Module]] = {
    "resmlp_tiny": resmlp_tiny,
    "resmlp_s12": resmlp_s12,
    "resmlp_s24": resmlp_s24,
    "resmlp_s36": resmlp_s36,
    "resmlp_b24": resmlp_b24,
    "vit_8x384": vit_8x384,
    "resnet_9x64": resnet_9x64,
}
"""Image classifiers by name; each takes `image_size`, `patch_size`, `in_channels` and `num_classes`."""

LANGUAGE_MODELS: dict[str, Callable[..., nn.Module]] = {"gpt_6x384": gpt_6x384}
"""Models of text by name; each takes `context`."""


def build_model(name: str, **options: object) -> nn.Module:
    """Return the model called `name`, built with `options`; every one takes `dim` and `depth` and has `blocks`."""
    known = MODELS | LANGUAGE_MODELS
    if name not in known:
        raise ValueError(f"`name` must be one of {sorted(known)}, got {name!r}. HINT: pass one of these names.")
    return known[name](**options)


__all__ = [
    "GPT",
    "LANGUAGE_MODELS",
    "MODELS",
    "ResMLP",
    "ResNet",
    "ViT",
    "build_model",
    "gpt_6x384",
    "resmlp_b24",
    "resmlp_s12",
    "resmlp_s24",
    "resmlp_s36",
    "resmlp_tiny",
    "resnet_9x64",
    "vit_8x384",
]
