"""Images, videos and audio of a call."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from .known import AUDIO, SIZES, VISION, Model, Plan

__all__ = ["GRID", "PATCHES", "audio", "audio_forms", "frame_counts", "grid", "image_size", "pixels", "video"]

# images

#: Patches along each side of an image that is given as patches; of one twice as wide, along its height.
GRID = 4
#: Shapes of patches: ``{n}`` of all images or ``{k}`` of each of ``{b}``; in one row (``{w}`` with the frames
#: that belong together, ``{s}`` of one, ``{d}`` of twice as many) or with channels ``{c}`` and sides ``{p}``.
PATCHES = (
    "{n}, {s}",
    "{n}, {d}",
    "{b}, {k}, {w}",
    "{n}, {c}, {p}, {p}",
    "1, {n}, {c}, {p}, {p}",
    "1, {n}, {w}",
)


def image_size(known: Model) -> int:
    size = known.value("image_size", within=VISION, default=64)
    if isinstance(size, Mapping):
        size = next(iter(size.values()))
    return int(size[0] if isinstance(size, (list, tuple)) else size)


def _channels(known: Model) -> int:
    return int(known.value("num_channels", "in_channels", "in_chans", within=VISION, default=3))


def pixels(known: Model, plan: Plan, position: int) -> dict[str, Any]:
    """The images of a call, and what says how large each is."""
    batch, channels = plan.images_of(position), _channels(known)
    if known.grid or known.takes("spatial_shapes") or _position_ids(known):
        return _patches(known, plan, position)
    frames = known.value("num_frames")
    if isinstance(frames, int) and not known.takes("input_ids"):
        return video(known, plan, position, "pixel_values")
    tiles = f"{plan.tiles}, " if plan.tiles else ""
    height, width = plan.size_of(position)
    made = {"pixel_values": f"float32[{batch}, {tiles}{channels}, {height}, {width}]"}
    tiled = known.value("image_grid_pinpoints") is not None or "image_sizes" in known.required
    features = known.image_features
    sizes = inspect.signature(features).parameters.get("image_sizes") if features else None
    tiled = tiled or (sizes is not None and sizes.default is sizes.empty)
    if known.takes("image_sizes") and tiled:
        fill = f"= {height}" if height == width else f"values {[[height, width]] * batch}"
        made["image_sizes"] = f"int64[{batch}, 2] {fill}"
    return made


def grid(plan: Plan, position: int) -> tuple[int, int]:
    """How many patches an image of a call is high and wide."""
    return GRID, GRID * plan.images[position] // min(plan.images)


def _position_ids(known: Model) -> str:
    """The argument that says where in its image each patch is."""
    return next((name for name in ("pixel_position_ids", "image_position_ids") if known.takes(name)), "")


def _patches(known: Model, plan: Plan, position: int) -> dict[str, Any]:
    """Images as patches."""
    batch = plan.images_of(position)
    patch = known.value("patch_size", within=VISION, default=14)
    side = int(patch if isinstance(patch, int) else patch[0])
    channels = _channels(known)
    frames = int(known.value("temporal_patch_size", within=VISION, default=1))
    high, wide = grid(plan, position)
    width, count = channels * frames * side * side, high * wide
    name = "pixel_values" if known.takes("pixel_values") else "hidden_states"
    if known.grid:
        shape = plan.patches.format(
            n=batch * count,
            b=batch,
            k=count,
            w=width,
            c=channels * frames,
            p=side,
            s=channels * side * side,
            d=2 * width,
        )
        made = {
            name: f"float32[{shape}]",
            known.grid: f"int64[{batch}, 3] values {[[1, high, wide]] * batch}",
        }
        if "merge_sizes" in known.required:
            made["merge_sizes"] = f"int64[{batch}] = 1"
        return made
    made = {name: f"float32[{batch}, {count}, {width}]"}
    places = _position_ids(known)
    if places:
        cells = [[column, row] for row in range(high) for column in range(wide)]
        made[places] = f"int64[{batch}, {count}, 2] values {[cells] * batch}"
        return made
    fill = f"= {high}" if high == wide else f"values {[[high, wide]] * batch}"
    made["spatial_shapes"] = f"int64[{batch}, 2] {fill}"
    if known.takes("pixel_attention_mask"):
        made["pixel_attention_mask"] = f"int64[{batch}, {count}] = 1"
    return made


def video(known: Model, plan: Plan, position: int, name: str) -> dict[str, Any]:
    """A video for each text."""
    batch, (height, width) = SIZES[position][0], plan.size_of(position)
    frames = int(known.value("num_frames", "frames_per_clip", within=VISION, default=4))
    return {name: f"float32[{batch}, {frames}, {_channels(known)}, {height}, {width}]"}


# audio

_MELS = ("num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", "input_dim")


def frame_counts(known: Model) -> tuple[int, int]:
    positions = known.value("max_source_positions", within=AUDIO)
    if known.main == "input_features" and isinstance(positions, int) and not known.takes("attention_mask"):
        return 2 * positions, 2 * positions
    if known.main == "input_features":
        return 64, 96
    return 3200, 4800


def audio_forms(known: Model) -> Iterator[tuple[str, tuple[int, int]]]:
    """(shape, lengths of the two calls) that audio may have, the likeliest first."""
    bins = known.value(*_MELS, within=AUDIO)
    if known.audio == "input_values":
        # Encoders that take whole hops only.
        longest = known.value("max_length")
        if isinstance(bins, int) and isinstance(longest, int):
            yield f"{{b}}, {{n}}, {bins}", (longest, longest)
        hops = (3840, 7680)
        yield from (("{b}, 1, {n}", frame_counts(known)), ("", hops), ("{b}, 1, {n}", hops))
        return
    positions = known.value("max_source_positions", within=AUDIO)
    lengths = [frame_counts(known), (200, 400)]
    if isinstance(positions, int):
        lengths.insert(0, (2 * positions, 2 * positions))
    stacked = known.value("num_stacked_frames", "subsampling_factor", "stack_factor", within=AUDIO, default=1)
    one = int(bins or 80)
    stacks = dict.fromkeys([1, stacked if isinstance(stacked, int) else 1, 2, 4])
    for each in lengths:
        yield "", each
        for width in dict.fromkeys([one, 128, *(one * count for count in stacks)]):
            yield f"{{b}}, {width}, {{n}}", each
            yield f"{{b}}, {{n}}, {width}", each


def audio(known: Model, plan: Plan, position: int, name: str) -> dict[str, Any]:
    batch, length = SIZES[position][0], plan.frames[position]
    mels = known.value(*_MELS, within=AUDIO)
    mask = next(
        (key for key in ("input_features_mask", "attention_mask", "padding_mask") if known.takes(key)), None
    )
    if name == "input_values":
        channels = known.value("audio_channels")
        shape = f"{batch}, {channels}, {length}" if isinstance(channels, int) else f"{batch}, {length}"
        shape = plan.audio.format(b=batch, n=length) or shape
        made = {name: f"float32[{shape}]"}
        if mask == "attention_mask" and plan.masks and "{n}, " not in plan.audio:
            made[mask] = f"int64[{batch}, {length}] padded right 400"
        return made
    bins = int(mels or 80)
    # Whisper and its heirs have the bins before the frames.
    whisper = known.value("max_source_positions", within=AUDIO) is not None and known.value(
        "num_mel_bins", within=AUDIO
    )
    shape = f"{batch}, {bins}, {length}" if whisper else f"{batch}, {length}, {bins}"
    made = {name: f"float32[{plan.audio.format(b=batch, n=length) or shape}]"}
    if mask and plan.masks and not (whisper and mask == "attention_mask"):
        kind = "bool" if mask == "input_features_mask" else "int64"
        made[mask] = f"{kind}[{batch}, {length}] = {'true' if kind == 'bool' else 1}"
    return made
