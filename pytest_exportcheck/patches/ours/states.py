"""Convolution states of hybrid models, filled without a test of the prompt's length."""

from __future__ import annotations

from typing import Any

import torch

from ..patch import Patch

__all__ = ["state_patches"]


def _padded_always(original: Any) -> Any:
    def update_conv_state(
        self: Any,
        conv_states: torch.Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if self.record_past or self.has_previous_state[state_idx]:
            full: torch.Tensor = original(self, conv_states, state_idx, conv_kernel_size, **kwargs)
            return full
        if not self.is_conv_states_initialized[state_idx]:
            self.lazy_initialization(
                conv_states=conv_states, state_idx=state_idx, conv_kernel_size=conv_kernel_size
            )
        self.has_previous_state[state_idx] = True
        size = self.conv_kernel_size[state_idx]
        # Zeros before the first token are what a causal convolution assumes there: models cut the outputs
        # back to the new tokens, so any number of them may be put in front.
        full = torch.nn.functional.pad(conv_states, (size, 0), value=0)
        self.conv_states[state_idx].copy_(full.narrow(-1, conv_states.shape[-1], size))
        return full

    return update_conv_state


def state_patches(model: Any, target: str) -> list[Patch]:
    """Prompts of any length."""
    return [
        Patch(
            "transformers.cache_utils.LinearAttentionLayer.update_conv_state",
            _padded_always,
            why="a prompt shorter than the kernel is padded, one that is not is not: a guard on its length",
            versions=(("transformers", ">=5.24"),),
            wraps=True,
        )
    ]
