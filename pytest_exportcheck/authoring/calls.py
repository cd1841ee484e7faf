"""Calls that a model takes, guessed from the signature of its ``forward`` and from its configuration."""

from __future__ import annotations

import inspect
import random
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Call", "Unknown", "candidates", "takes"]

#: (batch, length) of the two calls: what varies is dynamic.
_SIZES = ((2, 9), (3, 6))
_TOKENS = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
#: Sub-configurations, in the order in which a value is looked for.
_TEXT = ("text_config", "llm_config", "language_config", "thinker_config", "decoder", "text_encoder")
_VISION = ("vision_config", "image_config", "vit_config", "vision_encoder", "encoder", "backbone_config")
_AUDIO = ("audio_config", "audio_encoder", "speech_config", "encoder_config")
_IMAGE_TOKENS = ("image_token_id", "image_token_index", "media_placeholder_token_id")
_INPUTS = ("input_ids", "pixel_values", "pixel_values_videos", "input_values", "input_features")


#: Shapes of arguments by their names. ``{b}``: batch, ``{n}``: length, other words: of the configuration.
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
    "visual_feats": "float32[{b}, 4, {visual_feat_dim}]",
    "visual_pos": "float32[{b}, 4, 4]",
    "qformer_input_ids": "int64[{b}, 5] in 3..{high}",
    "qformer_attention_mask": "int64[{b}, 5] = 1",
    "task_inputs": "int64[{b}, {task_seq_len}] in 3..{high}",
    "query_embeds": "float32[{b}, 4, {hidden_size}]",
    "encoder_hidden_states": "float32[{b}, {n}, {encoder_hidden_size}]",
    "inputs_embeds": "float32[{b}, {n}, {hidden_size}]",
    "audio_mel": "float32[{b}, 64, {input_feat_size}]",
    "audio_mel_mask": "bool[{b}, 64] = false",
    "state": "float32[{b}, {max_state_dim}]",
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


class Unknown(Exception):
    """No call could be made up; the message says why.

    `arguments`: for each of the two calls what its arguments may be all the same, to be corrected by hand.
    """

    def __init__(self, message: str, arguments: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(message)
        self.arguments = arguments


@dataclass(frozen=True)
class Call:
    """One entry of ``observe.calls``: `kind` is ``forward`` or ``generate``; values as a spec has them."""

    kind: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class _Plan:
    """One way to call a model.

    Attributes
    ----------
    masks:
        Attention masks are given, with padding.
    images:
        Height and width of the images of the two calls, in pixels.
    tiles:
        Images (or tiles of one) for each prompt, in an axis of their own; 0: no such axis.
    apart:
        Another number of images than of texts: two towers have a batch each.
    oblong:
        Images are as wide as those of the other call are high: two sizes, and no square.
    frames:
        Length of the audio of the two calls: samples or frames.
    audio:
        Shape of the audio, of ``{b}`` and its length ``{n}``; empty: the likeliest.
    patches:
        How patches are given where a grid says of which image they are: one of `_PATCHES`.
    """

    masks: bool
    images: tuple[int, int]
    frames: tuple[int, int]
    generate: bool
    tiles: int = 0
    patches: str = "{n}, {w}"
    audio: str = ""
    apart: bool = False
    oblong: bool = False


class _Model:
    """What is known of a model: the parameters of its method, and values of its configuration."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.config: Any = getattr(model, "config", None)
        parameters = list(inspect.signature(model.forward).parameters.values())
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self.names = [parameter.name for parameter in named]
        self.required = [parameter.name for parameter in named if parameter.default is parameter.empty]
        self.main = str(getattr(model, "main_input_name", ""))
        #: The argument that says how many patches each image has, in time and on each side.
        self.grid = next((name for name in ("image_grid_thw", "grid_thw") if name in self.names), "")
        self.audio = next((name for name in ("input_values", "input_features") if name in self.names), "")
        self.is_seq2seq = bool(getattr(self.config, "is_encoder_decoder", False))

    def value(self, *names: str, within: Sequence[str] = (), default: Any = None) -> Any:
        """The first of `names` that the configuration has, in sub-configurations first."""
        configs = [getattr(self.config, key, None) for key in within]
        for config in [*(config for config in configs if config is not None), self.config]:
            for name in names:
                found = getattr(config, name, None)
                if found is not None:
                    return found
        return default

    def takes(self, name: str) -> bool:
        return name in self.names

    @property
    def highest_id(self) -> int:
        """Random token ids stay below: special ones are in the upper part of a small vocabulary."""
        return max(4, min(96, int(self.value("vocab_size", within=_TEXT, default=96))))


def candidates(model: torch.nn.Module, auto_class: str) -> Iterator[list[Call]]:
    """Ways to call `model`, from the one that shows most to the plainest; each has two calls.

    Raises
    ------
    Unknown
        The model needs an argument that nothing is known of.
    """
    known = _Model(model)
    generates = _generates(model, auto_class)
    size = _image_size(known)
    frames = _frames(known)
    plans = [
        _Plan(True, (size, 2 * size), frames, generates),
        _Plan(True, (size, size), frames, generates),
        _Plan(True, (size, size), (frames[0], frames[0]), generates),
        _Plan(False, (size, size), (frames[0], frames[0]), generates),
    ]
    if known.takes("pixel_values"):
        clip = known.value("num_frames", within=_VISION)
        numbers = (1, 3, 5) if known.takes("input_ids") else (2,)
        plans += [replace(plans[1], tiles=tiles) for tiles in numbers]
        if isinstance(clip, int) and known.takes("input_ids"):
            plans.append(replace(plans[1], tiles=clip))
    if known.audio:
        plans += [
            replace(plans[1], audio=audio, frames=lengths)
            for audio, lengths in _audio_forms(known)
            if (audio, lengths) != ("", frames)
        ]
    if known.grid:
        plans += [replace(plans[1], patches=patches) for patches in _PATCHES]
    elif known.takes("pixel_values"):
        plans.append(replace(plans[1], images=(2 * size, 2 * size)))
        given = known.value("input_size", within=_VISION)
        if isinstance(given, int) and given > 1:
            plans.append(replace(plans[1], images=(given, given)))
    if known.takes("pixel_values") and not known.grid:
        if not known.takes("input_ids"):
            plans.insert(0, replace(plans[0], oblong=True))
        elif not generates and known.value(*_IMAGE_TOKENS) is None:
            plans = [*(replace(plan, apart=True) for plan in plans[:2]), *plans]
    if generates:
        plans += [replace(plan, generate=False) for plan in plans]
    seen: list[list[Call]] = []
    unknown: Unknown | None = None
    for plan in plans:
        try:
            calls = [_call(known, plan, position) for position in range(len(_SIZES))]
        except Unknown as error:
            unknown = unknown or error
            continue
        if calls not in seen:
            seen.append(calls)
            yield calls
    if not seen and unknown is not None:
        raise unknown


def takes(model: torch.nn.Module, call: Call) -> bool:
    """Whether eager takes the tensors of `call`."""
    import torch

    from ..spec import parse_tensor, resolve_tensor

    given = {
        name: resolve_tensor(parse_tensor(value), {}, name, "cpu", torch.float32)
        if isinstance(value, str)
        else value
        for name, value in call.arguments.items()
    }
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(model, call.kind)(**given)
    except Exception:
        # A guess that eager refuses, in whatever way: the next one is tried.
        return False
    return True


def _generates(model: torch.nn.Module, auto_class: str) -> bool:
    can = getattr(model, "can_generate", None)
    return bool(can and can() and not auto_class.endswith(("AutoModel", "MaskedLM")))


def _call(known: _Model, plan: _Plan, position: int) -> Call:
    batch = _SIZES[position][0]
    arguments: dict[str, Any] = {}
    text = known.takes("input_ids") and not (
        known.main not in ("input_ids", "") and "pixel_values" not in known.names
    )
    if known.main in _INPUTS and known.main != "input_ids":
        text = text and not known.is_seq2seq and known.main.startswith("pixel")
    text = text or "input_ids" in known.required
    if known.takes("pixel_values") or (known.grid and known.takes("hidden_states")):
        arguments |= _pixels(known, plan, position)
    elif known.takes("pixel_values_videos"):
        arguments |= _video(known, plan, position, "pixel_values_videos")
    audio = known.audio
    if audio and (known.main == audio or audio in known.required or not known.takes("input_ids")):
        arguments |= _audio(known, plan, position, audio)
    if text:
        arguments |= _text(known, plan, position, arguments)
    arguments = _named(known, position, arguments)
    if not arguments:
        raise Unknown(f"nothing is known of the arguments of forward: {', '.join(known.names[:6])}")
    if not plan.generate:
        if known.is_seq2seq and known.takes("decoder_input_ids"):
            arguments["decoder_input_ids"] = f"int64[{batch}, {4 + position}] in 3..{known.highest_id}"
        for name in known.required:
            if name not in arguments:
                raise Unknown(f"forward needs {name!r}, of which nothing is known")
    else:
        arguments |= _TOKENS
    return Call("generate" if plan.generate else "forward", arguments)


def _named(known: _Model, position: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments` with those that `_NAMED` knows by their name, and that `forward` needs.

    Without any that it needs (all are optional), with all that are known.
    """
    batch, length = _SIZES[position]
    made = dict(arguments)
    for name in known.names:
        if name in made or name not in _NAMED or (arguments and name not in (*known.required, *_WANTED)):
            continue
        form = _NAMED[name]
        sizes: dict[str, Any] = {"b": batch, "n": length, "high": known.highest_id}
        for key in re.findall(r"{(\w+)}", form):
            if key not in sizes:
                sizes[key] = _past(known) if key == "past" else known.value(key)
        if all(size is not None for size in sizes.values()):
            made[name] = form.format(**sizes)
    series = known.value("num_input_channels")
    if isinstance(series, int):
        for name in ("past_values", "past_observed_mask"):
            if name in made:
                made[name] = made[name].replace("]", f", {series}]")
    return made


def _past(known: _Model) -> int:
    """Length of a series: its lags come before what is looked at."""
    context = int(known.value("context_length") or known.value("prediction_length", default=8))
    lags: list[int] = known.value("lags_sequence", default=[0])
    return context + max(lags)


def _text(known: _Model, plan: _Plan, position: int, others: Mapping[str, Any]) -> dict[str, Any]:
    batch, length = _SIZES[position]
    made: dict[str, Any] = {}
    images = _image_tokens(known, others, position)
    if images is not None:
        token, count = images
        rows = _rows_with_image(known, token, count, batch, length, position)
        length += count
        made["input_ids"] = f"int64[{batch}, {length}] values {rows}"
        if known.takes("mm_token_type_ids"):
            kinds = [[int(item == token) for item in row] for row in rows]
            made["mm_token_type_ids"] = f"int64[{batch}, {length}] values {kinds}"
        if known.takes("token_type_ids") and "token_type_ids" in known.required:
            made["token_type_ids"] = f"int64[{batch}, {length}] = 0"
    else:
        made["input_ids"] = f"int64[{batch}, {length}] in 3..{known.highest_id}"
    if known.takes("bbox"):
        made["bbox"] = f"int64[{batch}, {length}, 4] = 1"
    if plan.masks and known.takes("attention_mask"):
        side = "left" if plan.generate and not known.is_seq2seq else "right"
        # An image's tokens stand at the beginning: padding on the left would come before them.
        made["attention_mask"] = (
            f"int64[{batch}, {length}] = 1"
            if images is not None
            else f"int64[{batch}, {length}] padded {side} 2"
        )
    return made


def _rows_with_image(
    known: _Model, token: int, count: int, batch: int, length: int, position: int
) -> list[list[int]]:
    """Token ids of `batch` prompts: one of text, the image's, text."""
    draw = random.Random(position)
    special = _special(known.config)
    words = [word for word in range(3, known.highest_id) if word not in special] or [1]
    text = [[draw.choice(words) for _ in range(length)] for _ in range(batch)]
    return [[row[0], *[token] * count, *row[1:]] for row in text]


def _special(config: Any) -> set[int]:
    """Ids of tokens that stand for something else than text."""
    return {
        value
        for name, value in vars(config).items()
        if re.search(r"token_(id|index)$", name) and isinstance(value, int)
    }


def _image_tokens(known: _Model, others: Mapping[str, Any], position: int) -> tuple[int, int] | None:
    """(id of the image token, how many stand for one image); ``None``: no tokens stand for images."""
    batch = _SIZES[position][0]
    token = known.value(*_IMAGE_TOKENS)
    if "pixel_values" not in others or not isinstance(token, int):
        return None
    if "image_grid_thw" in others:
        merge = int(known.value("spatial_merge_size", within=_VISION, default=1))
        return token, _GRID * _GRID // merge**2
    features = getattr(known.model, "get_image_features", None)
    if features is None:
        return None
    return token, _count_features(known, features, _named(known, position, others), batch)


def _count_features(known: _Model, features: Any, others: Mapping[str, Any], batch: int) -> int:
    import torch

    from ..spec import parse_tensor, resolve_tensor

    accepted = inspect.signature(features).parameters
    given: dict[str, Any] = {}
    for name, text in others.items():
        if name in accepted or name in ("pixel_values", "image_sizes"):
            given[name] = resolve_tensor(parse_tensor(text), {}, name, "cpu", torch.float32)
    try:
        with torch.no_grad():
            found = features(**given)
    except Exception as error:
        first = str(error).splitlines()[0]
        raise Unknown(f"get_image_features refuses {', '.join(given)}: {first}") from error
    found = getattr(found, "pooler_output", found)
    width = known.value("hidden_size", within=_TEXT)
    tensors = [found] if isinstance(found, torch.Tensor) else list(found)
    total = sum(tensor.numel() for tensor in tensors) // int(width or tensors[0].shape[-1])
    return max(1, total // batch)


# images

#: Patches along each side of an image that is given as patches.
_GRID = 4
#: Shapes of patches: ``{n}`` of all images or ``{k}`` of each of ``{b}``; in one row (``{w}`` with the frames
#: that belong together, ``{s}`` of one, ``{d}`` of twice as many) or with channels ``{c}`` and sides ``{p}``.
_PATCHES = (
    "{n}, {s}",
    "{n}, {d}",
    "{b}, {k}, {w}",
    "{n}, {c}, {p}, {p}",
    "1, {n}, {c}, {p}, {p}",
    "1, {n}, {w}",
)


def _image_size(known: _Model) -> int:
    size = known.value("image_size", within=_VISION, default=64)
    if isinstance(size, Mapping):
        size = next(iter(size.values()))
    return int(size[0] if isinstance(size, (list, tuple)) else size)


def _channels(known: _Model) -> int:
    return int(known.value("num_channels", "in_channels", "in_chans", within=_VISION, default=3))


def _pixels(known: _Model, plan: _Plan, position: int) -> dict[str, Any]:
    batch, size, channels = _SIZES[position][0], plan.images[position], _channels(known)
    batch += 2 * plan.apart
    if known.grid or known.takes("spatial_shapes"):
        return _patches(known, plan, batch)
    frames = known.value("num_frames")
    if isinstance(frames, int) and not known.takes("input_ids"):
        return _video(known, plan, position, "pixel_values")
    tiles = f"{plan.tiles}, " if plan.tiles else ""
    width = plan.images[1 - position] if plan.oblong else size
    made = {"pixel_values": f"float32[{batch}, {tiles}{channels}, {size}, {width}]"}
    tiled = known.value("image_grid_pinpoints") is not None or "image_sizes" in known.required
    features = getattr(known.model, "get_image_features", None)
    sizes = inspect.signature(features).parameters.get("image_sizes") if features else None
    tiled = tiled or (sizes is not None and sizes.default is sizes.empty)
    if known.takes("image_sizes") and tiled:
        made["image_sizes"] = f"int64[{batch}, 2] = {size}"
    return made


def _patches(known: _Model, plan: _Plan, batch: int) -> dict[str, Any]:
    """Images as patches, each `_GRID` patches wide and high."""
    patch = known.value("patch_size", within=_VISION, default=14)
    side = int(patch if isinstance(patch, int) else patch[0])
    channels = _channels(known)
    frames = int(known.value("temporal_patch_size", within=_VISION, default=1))
    width, count = channels * frames * side * side, _GRID * _GRID
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
            known.grid: f"int64[{batch}, 3] values {[[1, _GRID, _GRID]] * batch}",
        }
        if "merge_sizes" in known.required:
            made["merge_sizes"] = f"int64[{batch}] = 1"
        return made
    made = {
        name: f"float32[{batch}, {count}, {width}]",
        "spatial_shapes": f"int64[{batch}, 2] = {_GRID}",
    }
    if known.takes("pixel_attention_mask"):
        made["pixel_attention_mask"] = f"int64[{batch}, {count}] = 1"
    return made


def _video(known: _Model, plan: _Plan, position: int, name: str) -> dict[str, Any]:
    batch, size = _SIZES[position][0], plan.images[position]
    frames = int(known.value("num_frames", "frames_per_clip", within=_VISION, default=4))
    return {name: f"float32[{batch}, {frames}, {_channels(known)}, {size}, {size}]"}


# audio

_MELS = ("num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", "input_dim")


def _frames(known: _Model) -> tuple[int, int]:
    positions = known.value("max_source_positions", within=_AUDIO)
    if known.main == "input_features" and isinstance(positions, int) and not known.takes("attention_mask"):
        return 2 * positions, 2 * positions
    if known.main == "input_features":
        return 64, 96
    return 3200, 4800


def _audio_forms(known: _Model) -> Iterator[tuple[str, tuple[int, int]]]:
    """(shape, lengths of the two calls) that audio may have, the likeliest first."""
    bins = known.value(*_MELS, within=_AUDIO)
    if known.audio == "input_values":
        # Encoders that take whole hops only.
        longest = known.value("max_length")
        if isinstance(bins, int) and isinstance(longest, int):
            yield f"{{b}}, {{n}}, {bins}", (longest, longest)
        hops = (3840, 7680)
        yield from (("{b}, 1, {n}", _frames(known)), ("", hops), ("{b}, 1, {n}", hops))
        return
    positions = known.value("max_source_positions", within=_AUDIO)
    lengths = [_frames(known), (200, 400)]
    if isinstance(positions, int):
        lengths.insert(0, (2 * positions, 2 * positions))
    stacked = known.value(
        "num_stacked_frames", "subsampling_factor", "stack_factor", within=_AUDIO, default=1
    )
    one = int(bins or 80)
    stacks = dict.fromkeys([1, stacked if isinstance(stacked, int) else 1, 2, 4])
    for each in lengths:
        yield "", each
        for width in dict.fromkeys([one, 128, *(one * count for count in stacks)]):
            yield f"{{b}}, {width}, {{n}}", each
            yield f"{{b}}, {{n}}, {width}", each


def _audio(known: _Model, plan: _Plan, position: int, name: str) -> dict[str, Any]:
    batch, length = _SIZES[position][0], plan.frames[position]
    mels = known.value(*_MELS, within=_AUDIO)
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
    whisper = known.value("max_source_positions", within=_AUDIO) is not None and known.value(
        "num_mel_bins", within=_AUDIO
    )
    shape = f"{batch}, {bins}, {length}" if whisper else f"{batch}, {length}, {bins}"
    made = {name: f"float32[{plan.audio.format(b=batch, n=length) or shape}]"}
    if mask and plan.masks and not (whisper and mask == "attention_mask"):
        kind = "bool" if mask == "input_features_mask" else "int64"
        made[mask] = f"{kind}[{batch}, {length}] = {'true' if kind == 'bool' else 1}"
    return made
