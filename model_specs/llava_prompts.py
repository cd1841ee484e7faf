"""Prompts with a picture in them."""

from __future__ import annotations

import torch

#: As in the config of llava.yaml: the token that stands for a patch, and how many patches a picture has.
IMAGE_TOKEN, PATCHES = 95, 16


def with_image(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Three words (the first two of a row may be padding), the picture, then words."""
    ids = torch.randint(5, 90, shape, generator=generator)
    ids[:, 3 : 3 + PATCHES] = IMAGE_TOKEN
    return ids
