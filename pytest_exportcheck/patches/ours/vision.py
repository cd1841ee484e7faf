"""Vision towers over packed images: every loop over images written over patches instead."""

from __future__ import annotations

from typing import Any

import torch

from ..edits import edited
from ..patch import Patch, module_loaded

__all__ = ["vision_patches"]

_VERSIONS = (("transformers", ">=5.24"),)

_SPLITS = """        # Other implementations: Process each chunk separately
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        splits = [
            torch.split(tensor, lengths.tolist(), dim=2) for tensor in (query_states, key_states, value_states)
        ]

        attn_outputs = [
            attention_interface(
                self,
                q,
                k,
                v,
                attention_mask=None,
                scaling=self.scaling,
                dropout=0.0 if not self.training else self.attention_dropout,
                is_causal=False,
                **kwargs,
            )[0]
            for q, k, v in zip(*splits)
        ]
        attn_output = torch.cat(attn_outputs, dim=1)
"""  # noqa: E501

_ONE_CALL = """        attn_output = attention_interface(
            self,
            query_states,
            key_states,
            value_states,
            attention_mask=same_segment(self, cu_seqlens, query_states),
            scaling=self.scaling,
            dropout=0.0 if not self.training else self.attention_dropout,
            is_causal=False,
            **kwargs,
        )[0]
"""


def _same_segment(module: Any, cu_seqlens: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Mask [1, 1, n, n]: which patches are of one segment; added to the scores for eager attention."""
    positions = torch.arange(query.shape[2], device=query.device)
    # How many segments end at or before a position: empty ones count and separate nothing.
    segment = (positions[:, None] >= cu_seqlens[None, 1:]).sum(-1)
    same = (segment[:, None] == segment[None, :])[None, None]
    if module.config._attn_implementation == "sdpa":
        return same
    return torch.zeros(same.shape, dtype=query.dtype, device=query.device).masked_fill(
        ~same, torch.finfo(query.dtype).min
    )


def _one_attention(original: Any) -> Any:
    return edited(original, (_SPLITS, _ONE_CALL), names={"same_segment": _same_segment})


def _where_patches_are(grid: torch.Tensor, count: Any) -> tuple[torch.Tensor, ...]:
    """(image, place inside its frame, height, width) of each of `count` patches, by arithmetic alone."""
    sizes = grid.prod(-1)
    ends = sizes.cumsum(0)
    index = torch.arange(count, device=grid.device)
    image = (index[:, None] >= ends[None, :]).sum(-1).clamp(max=grid.shape[0] - 1)
    height, width = grid[image, 1], grid[image, 2]
    return image, (index - (ends - sizes)[image]) % (height * width), height, width


def _position_ids(grid: torch.Tensor, merge: int, count: Any) -> torch.Tensor:
    """Row and column of each patch [count, 2]; patches come in blocks of `merge` x `merge`."""
    _, place, _, width = _where_patches_are(grid, count)
    inside = place % (merge * merge)
    block = place // (merge * merge)
    across = width // merge
    rows = block // across * merge + inside // merge
    columns = block % across * merge + inside % merge
    return torch.stack([rows, columns], dim=-1)


def _frame_ends(grid: torch.Tensor, count: Any) -> torch.Tensor:
    """``cu_seqlens`` with one entry per patch and not per frame: the end of its frame.

    The number of frames is data, that of patches is a size; ends that repeat are empty segments.
    """
    _, place, height, width = _where_patches_are(grid, count)
    index = torch.arange(count, device=grid.device)
    ends = (index - place + height * width).to(torch.int32)
    return torch.nn.functional.pad(ends, (1, 0), value=0)


def _windows(
    grid: torch.Tensor, merge: int, window_size: int, patch_size: int, count: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """``window_index`` and ``cu_window_seqlens`` over `count` patches.

    Merged patches sorted by image, frame, window and place inside the window.
    """
    unit = merge * merge
    side = window_size // merge // patch_size
    merged = count // unit
    sizes = grid.prod(-1) // unit
    ends = sizes.cumsum(0)
    index = torch.arange(merged, device=grid.device)
    image = (index[:, None] >= ends[None, :]).sum(-1).clamp(max=grid.shape[0] - 1)
    height, width = grid[image, 1] // merge, grid[image, 2] // merge
    local = index - (ends - sizes)[image]
    place = local % (height * width)
    row, column = place // width, place % width
    across = (width + side - width % side) // side
    down = (height + side - height % side) // side
    window = (row // side) * across + column // side
    # One number per window: windows of earlier images and frames come first.
    per_frame = down * across
    frames = local // (height * width)
    grid_down = (grid[:, 1] // merge + side - (grid[:, 1] // merge) % side) // side
    grid_across = (grid[:, 2] // merge + side - (grid[:, 2] // merge) % side) // side
    per_image = grid[:, 0] * grid_down * grid_across
    first = (per_image.cumsum(0) - per_image)[image]
    key = first + frames * per_frame + window
    # Not a stable sort, which ONNX lacks: the place itself tells equal ones apart.
    ordered, window_index = torch.sort(key * merged + index)
    ordered = ordered // merged
    # The end of each patch's window, again one entry per patch.
    last = (ordered[:, None] >= ordered[None, :]).sum(-1) * unit
    return window_index, torch.nn.functional.pad(last.to(torch.int32), (1, 0), value=0)


def _precomputed(original: Any) -> Any:
    """The tower, given by keyword what it would compute in loops over images (transformers takes it so)."""

    def forward(self: Any, hidden_states: torch.Tensor, grid_thw: torch.Tensor, **kwargs: Any) -> Any:
        if self.config._attn_implementation not in ("sdpa", "eager"):
            return original(self, hidden_states, grid_thw, **kwargs)
        count, merge = hidden_states.shape[0], self.spatial_merge_size
        if kwargs.get("position_ids") is None:
            kwargs["position_ids"] = _position_ids(grid_thw, merge, count)
        if kwargs.get("cu_seqlens") is None:
            kwargs["cu_seqlens"] = _frame_ends(grid_thw, count)
        if hasattr(self, "fullatt_block_indexes") and kwargs.get("window_index") is None:
            kwargs["window_index"], kwargs["cu_window_seqlens"] = _windows(
                grid_thw, merge, self.window_size, self.patch_size, count
            )
        return original(self, hidden_states, grid_thw, **kwargs)

    return forward


def vision_patches(model: Any, target: str) -> list[Patch]:
    """The vision towers of qwen2_vl and qwen2_5_vl."""
    models = "transformers.models"
    attention = [
        f"{models}.qwen2_vl.modeling_qwen2_vl.VisionAttention.forward",
        f"{models}.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLVisionAttention.forward",
    ]
    towers = [
        f"{models}.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel.forward",
        f"{models}.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel.forward",
    ]
    patches = [
        *(
            Patch(
                path,
                _one_attention,
                why="the images are split by lengths that are data; one call with a block mask is the same",
                versions=_VERSIONS,
                wraps=True,
            )
            for path in attention
        ),
        *(
            Patch(
                path,
                _precomputed,
                why="positions and windows are made in a Python loop over the grid, which is data",
                versions=_VERSIONS,
                depends=tuple(
                    f"transformers.vision_utils.{name}"
                    for name in (
                        "get_vision_position_ids",
                        "get_vision_cu_seqlens",
                        "get_vision_window_index",
                    )
                ),
                wraps=True,
            )
            for path in towers
        ),
    ]
    return [patch for patch in patches if model is None or module_loaded(patch.target)]
