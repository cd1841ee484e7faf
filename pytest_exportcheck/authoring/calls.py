"""Calls that a model takes, guessed from the signature of its ``forward`` and from its configuration."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Call", "Unknown", "candidates"]

#: (batch, length) of the two calls: what varies is dynamic.
_SIZES = ((2, 9), (3, 6))
_TOKENS = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
#: Sub-configurations, in the order in which a value is looked for.
_TEXT = ("text_config", "llm_config", "language_config", "thinker_config", "decoder", "text_encoder")
_VISION = ("vision_config", "vit_config", "vision_encoder", "encoder", "backbone_config")
_AUDIO = ("audio_config", "audio_encoder", "speech_config", "encoder_config")
_IMAGE_TOKENS = ("image_token_id", "image_token_index", "media_placeholder_token_id")
_INPUTS = ("input_ids", "pixel_values", "pixel_values_videos", "input_values", "input_features")


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
    """

    masks: bool
    images: tuple[int, int]
    frames: tuple[int, int]
    generate: bool
    tiles: int = 0
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
    if known.takes("pixel_values") and known.takes("input_ids"):
        plans += [replace(plans[1], tiles=tiles) for tiles in (1, 3, 5)]
        if not generates and known.value(*_IMAGE_TOKENS) is None:
            plans = [*(replace(plan, apart=True) for plan in plans[:2]), *plans]
    elif known.takes("pixel_values"):
        plans.insert(0, replace(plans[0], oblong=True))
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
    if known.takes("pixel_values"):
        arguments |= _pixels(known, plan, position)
    elif known.takes("pixel_values_videos"):
        arguments |= _video(known, plan, position, "pixel_values_videos")
    audio = next((name for name in ("input_values", "input_features") if known.takes(name)), None)
    if audio and (known.main == audio or audio in known.required or not known.takes("input_ids")):
        arguments |= _audio(known, plan, position, audio)
    if text:
        arguments |= _text(known, plan, position, arguments)
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


def _text(known: _Model, plan: _Plan, position: int, others: Mapping[str, Any]) -> dict[str, Any]:
    batch, length = _SIZES[position]
    made: dict[str, Any] = {}
    images = _image_tokens(known, others, batch)
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
    text = [[draw.randrange(3, known.highest_id) for _ in range(length)] for _ in range(batch)]
    return [[row[0], *[token] * count, *row[1:]] for row in text]


def _image_tokens(known: _Model, others: Mapping[str, Any], batch: int) -> tuple[int, int] | None:
    """(id of the image token, how many stand for one image); ``None``: no tokens stand for images."""
    token = known.value(*_IMAGE_TOKENS)
    if "pixel_values" not in others or not isinstance(token, int):
        return None
    if "image_grid_thw" in others:
        merge = int(known.value("spatial_merge_size", within=_VISION, default=1))
        return token, _GRID * _GRID // merge**2
    features = getattr(known.model, "get_image_features", None)
    if features is None:
        return None
    return token, _count_features(known, features, others, batch)


def _count_features(known: _Model, features: Any, others: Mapping[str, Any], batch: int) -> int:
    import torch

    from ..spec import parse_tensor

    accepted = inspect.signature(features).parameters
    given: dict[str, Any] = {}
    for name, text in others.items():
        tensor = parse_tensor(text)
        shape = [int(dim.text) for dim in tensor.dims]
        if name == "image_sizes":
            given[name] = torch.full(shape, int(text.rpartition("=")[2]))
        elif name in accepted or name == "pixel_values":
            given[name] = torch.zeros(shape)
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
    if known.takes("image_grid_thw"):
        patch = int(known.value("patch_size", within=_VISION, default=14))
        frames = int(known.value("temporal_patch_size", within=_VISION, default=1))
        grid = [[1, _GRID, _GRID]] * batch
        return {
            "pixel_values": f"float32[{batch * _GRID * _GRID}, {channels * frames * patch * patch}]",
            "image_grid_thw": f"int64[{batch}, 3] values {grid}",
        }
    frames = known.value("num_frames")
    if isinstance(frames, int) and not known.takes("input_ids"):
        return _video(known, plan, position, "pixel_values")
    tiles = f"{plan.tiles}, " if plan.tiles else ""
    width = plan.images[1 - position] if plan.oblong else size
    made = {"pixel_values": f"float32[{batch}, {tiles}{channels}, {size}, {width}]"}
    tiled = known.value("image_grid_pinpoints") is not None or "image_sizes" in known.required
    if known.takes("image_sizes") and tiled:
        made["image_sizes"] = f"int64[{batch}, 2] = {size}"
    return made


def _video(known: _Model, plan: _Plan, position: int, name: str) -> dict[str, Any]:
    batch, size = _SIZES[position][0], plan.images[position]
    frames = int(known.value("num_frames", "frames_per_clip", within=_VISION, default=4))
    return {name: f"float32[{batch}, {frames}, {_channels(known)}, {size}, {size}]"}


# audio


def _frames(known: _Model) -> tuple[int, int]:
    positions = known.value("max_source_positions", within=_AUDIO)
    if known.main == "input_features" and isinstance(positions, int) and not known.takes("attention_mask"):
        return 2 * positions, 2 * positions
    if known.main == "input_features":
        return 64, 96
    return 3200, 4800


def _audio(known: _Model, plan: _Plan, position: int, name: str) -> dict[str, Any]:
    batch, length = _SIZES[position][0], plan.frames[position]
    mels = known.value(
        "num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", "input_dim", within=_AUDIO
    )
    mask = next(
        (key for key in ("input_features_mask", "attention_mask", "padding_mask") if known.takes(key)), None
    )
    if name == "input_values":
        channels = known.value("audio_channels")
        shape = f"{batch}, {channels}, {length}" if isinstance(channels, int) else f"{batch}, {length}"
        made = {name: f"float32[{shape}]"}
        if mask == "attention_mask" and plan.masks:
            made[mask] = f"int64[{batch}, {length}] padded right 400"
        return made
    bins = int(mels or 80)
    # Whisper and its heirs have the bins before the frames.
    whisper = known.value("max_source_positions", within=_AUDIO) is not None and known.value(
        "num_mel_bins", within=_AUDIO
    )
    made = {name: f"float32[{batch}, {bins}, {length}]" if whisper else f"float32[{batch}, {length}, {bins}]"}
    if mask and plan.masks and not (whisper and mask == "attention_mask"):
        kind = "bool" if mask == "input_features_mask" else "int64"
        made[mask] = f"{kind}[{batch}, {length}] = {'true' if kind == 'bool' else 1}"
    return made
