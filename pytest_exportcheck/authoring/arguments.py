"""Arguments that have a known shape by their name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .known import SIZES, Model, Plan

__all__ = ["named"]

#: Lengths of the two calls for what is as long as nothing else, and of audio in frames.
_OTHER_LENGTHS, _FRAMES = (5, 4), (64, 96)
#: Shapes of arguments by their names. ``{b}``: batch, ``{n}``: length, ``{m}``: another length, ``{i}``: how
#: many images, ``{size}``: of an image, other words: of the configuration.
_NAMED = {
    # series
    "past_values": "float32[{b}, {past}]",
    "past_observed_mask": "bool[{b}, {past}] = true",
    "past_time_features": "float32[{b}, {past}, {num_time_features}]",
    "past_values_padding": "int64[{b}, {past}] = 0",
    "future_values": "float32[{b}, {prediction_length}]",
    "future_time_features": "float32[{b}, {prediction_length}, {num_time_features}]",
    "freq": "int64[{b}, 1] = 0",
    # decisions
    "states": "float32[{b}, {n}, {state_dim}]",
    "actions": "float32[{b}, {n}, {act_dim}]",
    "rewards": "float32[{b}, {n}, 1]",
    "returns_to_go": "float32[{b}, {n}, 1]",
    "timesteps": "int64[{b}, {n}] < 16",
    # objects and prompts
    "visual_feats": "float32[{b}, {m}, {visual_feat_dim}]",
    "visual_pos": "float32[{b}, {m}, 4]",
    "qformer_input_ids": "int64[{b}, {m}] in 3..{high}",
    "qformer_attention_mask": "int64[{b}, {m}] = 1",
    "task_inputs": "int64[{b}, {task_seq_len}] in 3..{high}",
    "query_embeds": "float32[{b}, {m}, {hidden_size}]",
    "encoder_hidden_states": "float32[{b}, {n}, {encoder_hidden_size}]",
    "inputs_embeds": "float32[{b}, {n}, {hidden_size}]",
    "audio_mel": "float32[{b}, {frames}, {input_feat_size}]",
    "audio_mel_mask": "bool[{b}, {frames}] = false",
    "state": "float32[{b}, {max_state_dim}]",
    "latents": "float32[{b}, {hidden_size}, {n}]",
    # images
    "high_res_pixel_values": "float32[{i}, 3, {high_res}, {high_res}]",
    "prompt_pixel_values": "float32[{b}, 3, {size}, {size}]",
    "prompt_masks": "float32[{b}, 3, {size}, {size}]",
    "image_merge_sizes": "int64[{i}] = 1",
}
#: Those that are given although they are optional.
_WANTED = (
    "visual_feats",
    "visual_pos",
    "qformer_input_ids",
    "qformer_attention_mask",
    "future_values",
    "future_time_features",
)


def named(known: Model, plan: Plan, position: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments` with those that `_NAMED` knows by their name, and that `forward` needs.

    Without any that it needs (all are optional), with all that are known.
    """
    batch, length = SIZES[position]
    made = dict(arguments)
    for name in known.names:
        needed = (*known.required, *_WANTED, *(() if plan.blind else known.with_images))
        if name in made or name not in _NAMED or (arguments and name not in needed):
            continue
        form = _NAMED[name]
        sizes: dict[str, Any] = {
            "b": batch,
            "n": length,
            "m": _OTHER_LENGTHS[position],
            "i": plan.images_of(position),
            "size": plan.images[position],
            "frames": _FRAMES[position],
            "high_res": known.value("image_size", within=("high_res_vision_config",)),
            "high": known.highest_id,
        }
        used = re.findall(r"{(\w+)}", form)
        for key in used:
            if key not in sizes:
                sizes[key] = _past(known) if key == "past" else known.value(key)
        if all(sizes[key] is not None for key in used):
            made[name] = form.format(**sizes)
    series = known.value("num_input_channels")
    if isinstance(series, int):
        for name in ("past_values", "past_observed_mask"):
            if name in made:
                made[name] = made[name].replace("]", f", {series}]")
    return made


def _past(known: Model) -> int:
    """Length of a series: its lags come before what is looked at."""
    context = int(known.value("context_length") or known.value("prediction_length", default=8))
    lags: list[int] = known.value("lags_sequence", default=[0])
    return context + max(lags)
