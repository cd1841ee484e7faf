"""Sliding-window caches whose window is one branch for every length."""

from __future__ import annotations

from typing import Any

import torch

from ..patch import Patch

__all__ = ["sliding_window_patches"]


def _update(original: Any) -> Any:
    def update(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        # A window of 1 keeps everything (`[-0:]`); a layer that records its past is for assisted decoding.
        if self.record_past or self.sliding_window < 2:
            return original(self, key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        keys = torch.cat([self.keys, key_states], dim=-2)
        values = torch.cat([self.values, value_states], dim=-2)
        total = keys.shape[-2]
        length = torch.sym_min(total, self.sliding_window - 1)  # type: ignore[no-untyped-call]
        # Not a slice: that asks whether the view is contiguous, a guard on its length being 1. And the length
        # is a minimum, whose range is known where that of a difference is not.
        kept = torch.arange(length, device=keys.device) + (total - length)
        self.keys, self.values = keys.index_select(2, kept), values.index_select(2, kept)
        return keys, values

    return update


def _get_mask_sizes(original: Any) -> Any:
    def get_mask_sizes(self: Any, query_length: int) -> tuple[Any, Any]:
        if self.record_past or self.sliding_window < 2:
            sizes: tuple[Any, Any] = original(self, query_length)
            return sizes
        # What is kept is the smaller of what was seen and the window, and has a size: no test, and no minimum
        # of sizes, which the ONNX exporter makes a scalar where a shape is wanted.
        kept = self.keys.shape[-2] if self.is_initialized and self.keys.dim() > 1 else 0
        return kept + query_length, self.cumulative_length - kept

    return get_mask_sizes


def _mask_of_what_is_kept(original: Any) -> Any:
    def _preprocess_mask_arguments(
        config: Any,
        inputs_embeds: torch.Tensor,
        attention_mask: Any,
        cache: Any,
        position_ids: Any,
        layer_idx: int | None,
        encoder_hidden_states: Any = None,
    ) -> tuple[Any, ...]:
        found: tuple[Any, ...] = original(
            config, inputs_embeds, attention_mask, cache, position_ids, layer_idx, encoder_hidden_states
        )
        done, mask, packed, q_length, kv_length, _, _ = found
        if done or layer_idx is None or not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return found
        from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

        # Eager knows how much was dropped, a trace does not: there the mask is as long as all that was seen,
        # and its last columns are for what is kept. Chunks count from the first token: not known either.
        if not torch.compiler.is_exporting() or getattr(config, "attention_chunk_size", None) is not None:
            return found
        if type(cache) is not DynamicCache or type(cache.layers[layer_idx]) is not DynamicSlidingWindowLayer:
            return found
        total = mask.shape[-1]
        columns = torch.arange(kv_length, device=mask.device) + (total - kv_length)
        return done, mask.index_select(1, columns), packed, q_length, kv_length, kv_length - q_length, 0

    return _preprocess_mask_arguments


def sliding_window_patches(model: Any, target: str) -> list[Patch]:
    """One graph on both sides of the window."""
    why = (
        "whether the window is full is decided in Python: a trace guards on the side of its example, or "
        "keeps that side for every length where sizes 0 and 1 are not special"
    )
    layer = "transformers.cache_utils.DynamicSlidingWindowLayer"
    versions = (("transformers", ">=5.24"),)
    runtimes = ("torch", "onnx")  # sizes are tensors under torch.jit.trace, which has no minimum of them
    link = "https://github.com/huggingface/transformers/pull/49542"
    return [
        Patch(
            f"{layer}.update", _update, why=why, versions=versions, link=link, wraps=True, runtimes=runtimes
        ),
        Patch(
            f"{layer}.get_mask_sizes",
            _get_mask_sizes,
            why=why,
            versions=versions,
            link=link,
            wraps=True,
            runtimes=runtimes,
        ),
        Patch(
            "transformers.masking_utils._preprocess_mask_arguments",
            _mask_of_what_is_kept,
            why="past the window a trace does not know how much was dropped, and masks the wrong columns",
            versions=versions,
            wraps=True,
            runtimes=runtimes,
        ),
    ]
