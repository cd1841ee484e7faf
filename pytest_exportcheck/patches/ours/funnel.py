"""Funnel's relative positions as arithmetic instead of lists of Python integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..patch import Patch, module_loaded

__all__ = ["funnel_patches"]


@dataclass(frozen=True)
class _Positions:
    """``first, first + step, ...``, `count` of them; a size that is symbolic stays so."""

    first: int
    step: int
    count: Any

    def last(self) -> Any:
        return self.first + self.step * (self.count - 1)


def _pooled(positions: _Positions, config: Any, block: int) -> _Positions:
    """Every second position; a separate <cls> has its own in front, of the same progression."""
    if not config.separate_cls:
        return _Positions(positions.first, positions.step * 2, (positions.count + 1) // 2)
    left = positions.count - 2 if config.truncate_seq else positions.count - 1
    return _Positions(1 - 2**block, 2**block, (left + 1) // 2 + 1)


def _relative(positions: _Positions, stride: int, pooled: _Positions, shift: int, device: Any) -> Any:
    first = pooled.first - positions.first + shift * stride * pooled.count
    last = pooled.first - positions.last()
    # As torch.arange(first, last - 1, -stride): the number of steps down to last, both ends included.
    count = (first - last) // stride + 1
    steps = torch.arange(count, dtype=torch.long, device=device)
    return steps * -stride + first


def _by_arithmetic(original: Any) -> Any:
    def get_position_embeds(self: Any, seq_len: Any, dtype: torch.dtype, device: Any) -> Any:
        if self.config.attention_type == "factorized":
            return original(self, seq_len, dtype, device)
        width = self.config.d_model
        half = torch.arange(0, width // 2, 1, dtype=torch.int64, device=device).to(dtype)
        inverse = 1 / (10000 ** (half / (width // 2)))
        zero = seq_len * 2
        relative = torch.arange(4 * seq_len, dtype=torch.int64, device=device).to(dtype) - zero
        angles = relative[:, None] * inverse[None]
        table = torch.cat([self.sin_dropout(torch.sin(angles)), self.cos_dropout(torch.cos(angles))], dim=-1)

        def rows(positions: _Positions, stride: int, pooled: _Positions, shift: int) -> torch.Tensor:
            return table.index_select(0, _relative(positions, stride, pooled, shift, device) + zero)

        positions = pooled = _Positions(0, 1, seq_len)
        found = []
        for block in range(self.config.num_blocks):
            pooling = None
            if block:
                pooled = _pooled(positions, self.config, block)
                pooling = rows(positions, 2 ** (block - 1), pooled, 2)
            positions = pooled
            found.append([rows(positions, 2**block, positions, 1), pooling])
        return found

    return get_position_embeds


def funnel_patches(model: Any, target: str) -> list[Patch]:
    """A sequence length that stays a size."""
    patch = Patch(
        "transformers.models.funnel.modeling_funnel.FunnelAttentionStructure.get_position_embeds",
        _by_arithmetic,
        why="positions are a Python list of as many integers as the sequence is long, which fixes the length",
        versions=(("transformers", ">=5.24"),),
        wraps=True,
    )
    return [patch] if model is None or module_loaded(patch.target) else []
