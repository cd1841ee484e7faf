"""Mixture of experts without an operator that has no ONNX function."""

from __future__ import annotations

from typing import Any

from ..patch import Patch

__all__ = ["experts_patches"]


def _batched(original: Any) -> Any:
    from transformers.integrations.moe import batched_mm_experts_forward

    return batched_mm_experts_forward


def experts_patches(model: Any, target: str) -> list[Patch]:
    """``grouped_mm`` experts computed as ``batched_mm`` on the way to ONNX."""
    return [
        Patch(
            "transformers.integrations.moe.grouped_mm_experts_forward",
            _batched,
            why="torch.onnx has no function for transformers.grouped_mm_fallback; batched_mm is the same sum",
            versions=(("transformers", ">=5.24"),),
            wraps=True,
            depends=("transformers.integrations.moe.batched_mm_experts_forward",),
            runtimes=("onnx", "torchscript"),
        )
    ]
