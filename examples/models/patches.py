"""How an image is cut into patches, for the models whose tokens they are."""

from __future__ import annotations


def patch_count(image_size: int, patch_size: int) -> int:
    """Return the number of square patches of a square image.

    Raises:
        ValueError: If `image_size` is no multiple of `patch_size`.
    """
    if image_size % patch_size:
        raise ValueError(
            f"`image_size` must be a multiple of `patch_size`, got {image_size} and {patch_size}. "
            "HINT: 224 goes with patches of 16, 32 with 4, 8 with 1 or 2."
        )
    return (image_size // patch_size) ** 2
