"""Models of the examples, built by name."""

from __future__ import annotations

from collections.abc import Callable

from examples.models.resmlp import ResMLP, resmlp_b24, resmlp_s12, resmlp_s24, resmlp_s36, resmlp_tiny

MODELS: dict[str, Callable[..., ResMLP]] = {
    "resmlp_tiny": resmlp_tiny,
    "resmlp_s12": resmlp_s12,
    "resmlp_s24": resmlp_s24,
    "resmlp_s36": resmlp_s36,
    "resmlp_b24": resmlp_b24,
}
"""Constructors by name; each takes `image_size`, `patch_size`, `in_channels` and `num_classes`."""


def build_model(name: str, **options: object) -> ResMLP:
    """Return the model called `name`, built with `options`."""
    if name not in MODELS:
        raise ValueError(f"`name` must be one of {sorted(MODELS)}, got {name!r}. HINT: pass one of these names.")
    return MODELS[name](**options)


__all__ = ["MODELS", "ResMLP", "build_model", "resmlp_b24", "resmlp_s12", "resmlp_s24", "resmlp_s36", "resmlp_tiny"]
