"""Tests of data in Python whose branches can be taken together."""

from __future__ import annotations

from typing import Any

from ..edits import edited
from ..patch import Patch, module_loaded

__all__ = ["data_test_patches"]

_VERSIONS = (("transformers", ">=5.24"),)


def _always_replaces_zeros(original: Any) -> Any:
    return edited(
        original,
        (
            """            if (image_text_alignment_mask == 0).sum() != 0:
                image_text_alignment_mask[image_text_alignment_mask == 0] = 1  # Avoid divide by zero error
                logger.warning(
                    "Found 0 values in `image_text_alignment_mask`. Setting them to 1 to avoid divide-by-zero"
                    " error."
                )
""",
            "            no_word = image_text_alignment_mask == 0\n"
            "            image_text_alignment_mask = image_text_alignment_mask.masked_fill(no_word, 1)\n",
        ),
    )


def data_test_patches(model: Any, target: str) -> list[Patch]:
    """Where a test of data decides nothing that matters."""
    patches = [
        Patch(
            "transformers.models.visual_bert.modeling_visual_bert.VisualBertEmbeddings.forward",
            _always_replaces_zeros,
            why="whether any divisor is 0 is asked in Python; replacing none of them changes nothing",
            versions=_VERSIONS,
            wraps=True,
        ),
    ]
    return [patch for patch in patches if model is None or module_loaded(patch.target)]
