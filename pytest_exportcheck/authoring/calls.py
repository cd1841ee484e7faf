"""Calls that a model takes, guessed from the signature of its ``forward`` and from its configuration."""

from __future__ import annotations

import inspect
import math
import random
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..tracebacks import one_line
from . import media
from .arguments import named
from .known import SIZES, TEXT, VISION, Call, Model, Plan, Unknown

if TYPE_CHECKING:
    import torch

__all__ = ["candidates", "refusal"]

_TOKENS = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
_IMAGE_TOKENS = ("image_token_id", "image_token_index", "media_placeholder_token_id")
_INPUTS = ("input_ids", "pixel_values", "pixel_values_videos", "input_values", "input_features")


def candidates(model: torch.nn.Module, auto_class: str) -> Iterator[list[Call]]:
    """Ways to call `model`, from the one that shows most to the plainest; each has two calls.

    A way in which each prompt has one image is followed by one in which both calls have as many.

    Raises
    ------
    Unknown
        The model needs an argument that nothing is known of.
    """
    known = Model(model)
    seen: list[list[Call]] = []
    unknown: Unknown | None = None
    for plan in _plans(known, _generates(model, auto_class)):
        try:
            calls = [_call(known, plan, position) for position in range(len(SIZES))]
            if _text_length(calls[0]) == _text_length(calls[1]):
                calls[1] = _call(known, replace(plan, longer=1), 1)
        except Unknown as error:
            unknown = unknown or error
            continue
        if calls not in seen:
            seen.append(calls)
            yield calls
    if not seen and unknown is not None:
        raise unknown


def _text_length(call: Call) -> str:
    found = re.match(r"int64\[\d+, (\d+)\]", str(call.arguments.get("input_ids")))
    return found[1] if found else ""


def _plans(known: Model, generates: bool) -> list[Plan]:
    """Ways to call a model, from the one that shows most to the plainest."""
    size = media.image_size(known)
    frames = media.frame_counts(known)
    plans = [
        Plan(True, (size, 2 * size), frames, generates),
        Plan(True, (size, size), frames, generates),
        Plan(True, (size, size), (frames[0], frames[0]), generates),
        Plan(False, (size, size), (frames[0], frames[0]), generates),
    ]
    images = known.takes("pixel_values")
    if images:
        clip = known.value("num_frames", within=VISION)
        numbers = (1, 3, 5) if known.takes("input_ids") else (2,)
        plans += [replace(plan, tiles=tiles) for tiles in numbers for plan in plans[:2]]
        if isinstance(clip, int) and known.takes("input_ids"):
            plans.append(replace(plans[1], tiles=clip))
    if known.audio:
        heard = [
            replace(plans[1], audio=form, frames=lengths)
            for form, lengths in media.audio_forms(known)
            if (form, lengths) != ("", frames)
        ]
        plans += heard
        if known.main != known.audio and known.takes("input_ids"):
            plans += [replace(plan, hears=True) for plan in (plans[0], *heard)]
    if known.grid:
        plans += [replace(plan, patches=patches) for patches in media.PATCHES for plan in plans[:2]]
    elif images:
        larger = replace(plans[0], images=(2 * size, 4 * size))
        plans += [replace(larger, oblong=True), larger, replace(plans[1], images=(2 * size, 2 * size))]
        given = known.value("input_size", within=VISION)
        if isinstance(given, int) and given > 1:
            plans.append(replace(plans[1], images=(given, given)))
    if (images or known.takes("pixel_values_videos")) and not known.grid:
        plans.insert(0, replace(plans[0], oblong=True))
        if images and known.takes("input_ids") and not generates and known.value(*_IMAGE_TOKENS) is None:
            plans = [*(replace(plan, apart=True) for plan in plans[:3]), *plans]
    if images and generates and known.value(*_IMAGE_TOKENS) is not None:
        plans = [each for plan in plans for each in (plan, replace(plan, spread=True))]
    if generates:
        plans += [replace(plan, generate=False) for plan in plans]
    if images and known.takes("input_ids") and "pixel_values" not in known.required:
        plans += [
            replace(plan, blind=True) for plan in plans if not plan.spread and plan.images == (size, size)
        ]
    return plans


def refusal(model: torch.nn.Module, calls: Sequence[Call]) -> str | None:
    """What eager says to the tensors of the first of `calls` that it refuses; ``None``: it takes them all."""
    import torch

    from ..spec import parse_tensor, resolve_tensor

    for number, call in enumerate(calls):
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
        except Exception as error:
            # A guess that eager refuses, in whatever way: the next one is tried.
            return f"the {call.kind} call {number} raised: {one_line(error)}"
    return None


def _generates(model: torch.nn.Module, auto_class: str) -> bool:
    can = getattr(model, "can_generate", None)
    return bool(can and can() and not auto_class.endswith(("AutoModel", "MaskedLM")))


def _call(known: Model, plan: Plan, position: int) -> Call:
    batch = SIZES[position][0]
    arguments: dict[str, Any] = {}
    text = known.takes("input_ids") and not (
        known.main not in ("input_ids", "") and "pixel_values" not in known.names
    )
    if known.main in _INPUTS and known.main != "input_ids":
        text = text and not known.is_seq2seq and known.main.startswith("pixel")
    text = text or "input_ids" in known.required
    if plan.blind:
        pass
    elif known.takes("pixel_values") or (known.grid and known.takes("hidden_states")):
        arguments |= media.pixels(known, plan, position)
    elif known.takes("pixel_values_videos"):
        arguments |= media.video(known, plan, position, "pixel_values_videos")
    if known.audio and (
        plan.hears
        or known.main == known.audio
        or known.audio in known.required
        or not known.takes("input_ids")
    ):
        arguments |= media.audio(known, plan, position, known.audio)
    if text:
        arguments |= _text(known, plan, position, arguments)
    arguments = named(known, plan, position, arguments)
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


def _text(known: Model, plan: Plan, position: int, others: Mapping[str, Any]) -> dict[str, Any]:
    batch, length = SIZES[position]
    length += plan.longer if position else 0
    made: dict[str, Any] = {}
    images = _image_tokens(known, plan, others, position)
    if images is not None:
        token, count = images
        # All images beyond one for each prompt are in the first.
        each = [1 + (plan.images_of(position) - batch if row == 0 else 0) for row in range(batch)]
        rows = _rows_with_images(known, token, count, each, length, position)
        length = len(rows[0])
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


def _rows_with_images(
    known: Model, token: int, count: int, each: Sequence[int], length: int, position: int
) -> list[list[int]]:
    """Token ids of prompts: a word, an image's tokens, ..., text; `each`: how many images a prompt has."""
    draw = random.Random(position)
    special = _special(known.config)
    words = [word for word in range(3, known.highest_id) if word not in special] or [1]
    text = [[draw.choice(words) for _ in range(length)] for _ in each]
    rows = []
    for row, images in zip(text, each, strict=True):
        # Where there are fewer images, there is more text.
        row += [draw.choice(words) for _ in range((max(each) - images) * count)]
        placed = [part for word in row[:images] for part in (word, *[token] * count)]
        rows.append([*placed, *row[images:]])
    return rows


def _special(config: Any) -> set[int]:
    """Ids of tokens that stand for something else than text."""
    return {
        value
        for name, value in vars(config).items()
        if re.search(r"token_(id|index)$", name) and isinstance(value, int)
    }


def _image_tokens(
    known: Model, plan: Plan, others: Mapping[str, Any], position: int
) -> tuple[int, int] | None:
    """(id of the image token, how many stand for one image); ``None``: no tokens stand for images."""
    token = known.value(*_IMAGE_TOKENS)
    if "pixel_values" not in others or not isinstance(token, int):
        return None
    images = plan.images_of(position)
    given = named(known, plan, position, others)
    if "image_grid_thw" in others:
        try:
            return token, _count_features(known, given, images)
        except Unknown:
            # It may want what only `forward` makes.
            merge = int(known.value("spatial_merge_size", within=VISION, default=1))
            return token, math.prod(media.grid(plan, position)) // merge**2
    if known.image_features is None:
        return None
    return token, _count_features(known, given, images)


def _count_features(known: Model, others: Mapping[str, Any], images: int) -> int:
    import torch

    from ..spec import parse_tensor, resolve_tensor

    features = known.image_features
    assert features is not None
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
    width = known.value("hidden_size", within=TEXT)
    tensors = [found] if isinstance(found, torch.Tensor) else list(found)
    total = sum(tensor.numel() for tensor in tensors) // int(width or tensors[0].shape[-1])
    return max(1, total // images)
