"""The configuration that `reduce.py` made, until the model takes it."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..spec.configs import mentioned
from .known import Unknown
from .reduce import filled, likely, reduced, with_chained_widths, with_its_widths
from .smaller import shrunk

__all__ = ["LARGE", "PARAMETERS", "alternatives", "fitted", "model_classes", "other_classes"]

#: A model is small if it has at most so many parameters.
PARAMETERS = 5_000_000
#: One with more is taken where nothing smaller is found.
LARGE = 20_000_000
#: So many configurations are tried, and so many as what one that was refused leads to.
_TRIES, _EACH = 80, 40

_OF_THE_FILE = frozenset(
    {"model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "auto_map"}
)

#: Tasks, from the one that shows most of a model.
_TASKS = (
    ("AutoModelForSeq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM"), ("AutoModelForMaskedLM", "MASKED_LM"),
    ("AutoModelForImageTextToText", "IMAGE_TEXT_TO_TEXT"), ("AutoModelForSpeechSeq2Seq", "SPEECH_SEQ_2_SEQ"),
    ("AutoModelForCausalLM", "CAUSAL_LM"), ("AutoModelForMultimodalLM", "MULTIMODAL_LM"),
    ("AutoModelForCTC", "CTC"), ("AutoModelForZeroShotImageClassification", "ZERO_SHOT_IMAGE_CLASSIFICATION"),
    ("AutoModelForImageClassification", "IMAGE_CLASSIFICATION"),
    ("AutoModelForObjectDetection", "OBJECT_DETECTION"),
    ("AutoModelForSemanticSegmentation", "SEMANTIC_SEGMENTATION"),
    ("AutoModelForDepthEstimation", "DEPTH_ESTIMATION"),
    ("AutoModelForAudioClassification", "AUDIO_CLASSIFICATION"),
    ("AutoModelForVideoClassification", "VIDEO_CLASSIFICATION"),
)  # fmt: skip


def model_classes(model_type: str) -> list[str]:
    """Classes of transformers that make a model of `model_type`, the one that shows most first."""
    import transformers
    from transformers.models.auto import modeling_auto

    found = []
    for auto_class, task in _TASKS:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {})
        if model_type in mapping and hasattr(transformers, auto_class):
            found.append(auto_class)
    if model_type in modeling_auto.MODEL_MAPPING_NAMES:
        found.append("AutoModel")
    return found or other_classes(model_type)


def other_classes(model_type: str) -> list[str]:
    """Model classes of all tasks, for a type of which the common ones build nothing."""
    from transformers.models.auto import modeling_auto

    return sorted(
        {
            name
            for mapping, names in vars(modeling_auto).items()
            if mapping.startswith("MODEL_FOR_") and mapping.endswith("_MAPPING_NAMES")
            for name in _as_tuple(names.get(model_type, ()))
        }
    )


def _as_tuple(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def fitted(model_type: str, auto_class: str, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Values for the configuration of `model_type` with which `auto_class` builds a small model.

    Parameters
    ----------
    base:
        The configuration to make small; by default that of the type.

    Raises
    ------
    Unknown
        None was found; the message is that of the first refusal.
    """
    default = _default(model_type)
    values = _first(model_type, default, base)
    refused = _refusal(model_type, auto_class, values)
    if refused is None:
        return values
    found = _searched(model_type, auto_class, base or default, values, refused)
    if found is None:
        found = next(alternatives(model_type, auto_class, base), None)
    if found is None:
        raise Unknown(_first_line(refused)) from refused
    return found


class _Large(Unknown):
    """The model has too many parameters; `shapes` are theirs."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__(f"{sum(map(math.prod, shapes)):,} parameters are left")
        self.shapes = shapes


def _searched(
    model_type: str, auto_class: str, config: Mapping[str, Any], values: dict[str, Any], refused: Exception
) -> dict[str, Any] | None:
    """`values` changed until they are taken; a change that leads to another refusal is built upon.

    Two values that belong together (layers that are counted twice) are refused one after the other.
    """
    waiting = [(values, refused)]
    seen = {_kind(refused)}
    tries = 0
    while waiting:
        values, refused = waiting.pop(0)
        for other in _changes(config, values, refused):
            tries += 1
            if tries > _TRIES:
                return None
            again = _refusal(model_type, auto_class, other)
            if again is None:
                return other
            if isinstance(again, _Large) or _kind(again) not in seen:
                seen.add(_kind(again))
                waiting.append((other, again))
    return None


def _changes(
    config: Mapping[str, Any], values: dict[str, Any], refused: Exception
) -> Iterator[dict[str, Any]]:
    """What to try where `values` were refused, the likeliest first."""
    if isinstance(refused, _Large):
        # Less that is made small is no smaller.
        other = shrunk(config, values, refused.shapes)
        if other is not None:
            yield other
        return
    if isinstance(refused, ImportError):
        return
    if "None" in str(refused) or "must be specified" in str(refused):
        yield from filled(config, values)
    lacking = re.search(r"'(\w+)' object has no attribute '(\w+)'", str(refused))
    if lacking:
        # Not a field of the class, and yet every pretrained model has it.
        yield from _given(config, values, lacking[1], lacking[2])
    if "tuple" in str(refused) and "list" in str(refused):
        yield _with_lists(config, values)
    # Without one of the values: those that the refusal names first.
    words = set(re.findall(r"\w+", str(refused)))
    paths = sorted(_keys(values), key=lambda path: path[-1] not in words)
    yield from (_without(values, path) for path in paths[:_EACH])


def _given(
    config: Mapping[str, Any], values: Mapping[str, Any], class_name: str, key: str
) -> Iterator[dict[str, Any]]:
    """`values` with `key` for the parts whose configuration is a `class_name`."""
    from transformers import CONFIG_MAPPING

    size = likely(key)
    name = config.get("model_type")
    if size is not None and name in CONFIG_MAPPING and CONFIG_MAPPING[name].__name__ == class_name:
        yield {**values, key: size}
    for part, inner in config.items():
        if isinstance(inner, Mapping) and "model_type" in inner:
            given = values.get(part, {})
            for made in _given(inner, given if isinstance(given, Mapping) else {}, class_name, key):
                yield {**values, part: {"model_type": inner["model_type"], **made}}


def _with_lists(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with every tuple of `config` as the list that YAML has for it: those given are lists too."""
    tuples = {key: list(value) for key, value in config.items() if isinstance(value, tuple)}
    return {**tuples, **values}


def _kind(refused: Exception) -> str:
    """A refusal without its numbers."""
    return re.sub(r"\d[\d,]*", "_", f"{type(refused).__name__}: {refused}")


def alternatives(
    model_type: str, auto_class: str, base: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Values by other rules than those of `fitted`, for a model that can be built but takes no call.

    A model may have up to `LARGE` parameters.
    """
    default = _default(model_type)
    config = base or default
    values = _first(model_type, default, base)
    plain = _with_sections(config, reduced(config))
    seen: list[dict[str, Any]] = []
    for tried in (
        values,
        plain,
        *filled(config, values),
        _stated(model_type, values),
        with_chained_widths(config, values),
        with_its_widths(config, values),
    ):
        tried = tried if base or tried is plain else _with_own(default, tried)
        if tried not in seen:
            seen.append(tried)
            if _refusal(model_type, auto_class, tried, LARGE) is None:
                yield tried


def _default(model_type: str) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING

    try:
        made: dict[str, Any] = CONFIG_MAPPING[model_type]().to_dict()
    except Exception as error:
        raise Unknown(f"the default configuration is refused: {_first_line(error)}") from error
    return made


def _first(model_type: str, default: Mapping[str, Any], base: Mapping[str, Any] | None) -> dict[str, Any]:
    values = _with_sections(base or default, reduced(base or default))
    return _with_own(default, values) if base is None else _merged(_difference(base, default), values)


def _with_own(config: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with what the parts of `config` have otherwise than parts of their type have by default.

    A part that is given is built anew: what is not given becomes the default of its own type. What its class
    does not know (its own configuration works it out) cannot be given.
    """
    made = dict(values)
    for key, small in values.items():
        part = config.get(key)
        if isinstance(part, Mapping) and isinstance(small, Mapping) and "model_type" in part:
            if part["model_type"] != small.get("model_type"):
                continue
            known = {name: value for name, value in small.items() if _knows(part["model_type"], name)}
            made[key] = {**_otherwise(part, known), **_with_own(part, known)}
    return made


def _knows(model_type: str, key: str) -> bool:
    from transformers import CONFIG_MAPPING

    fields = _fields(model_type)
    if not fields or key in fields or key == "model_type":
        return True
    cls = CONFIG_MAPPING[model_type]
    return key in getattr(cls, "attribute_map", {}) or mentioned(cls, key)


def _otherwise(part: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    fields = _fields(part["model_type"])
    if not fields:
        return {}
    default = _default(part["model_type"])
    return {
        key: value
        for key, value in part.items()
        if (key in fields or key == "out_features")
        and key not in small
        and key not in _OF_THE_FILE
        and isinstance(value, (bool, int, float, str, list, tuple))
        and value != default.get(key)
    }


def _fields(model_type: str) -> dict[str, Any]:
    """Fields of the configuration class of `model_type`, each with its default."""
    from transformers import CONFIG_MAPPING

    # The mapping loads lazily: its `get` finds nothing.
    cls = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else object  # noqa: SIM401
    if not dataclasses.is_dataclass(cls):
        return {}
    return {field.name: field.default for field in dataclasses.fields(cls)}


def _stated(model_type: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` without those that a configuration class works out from others."""
    fields = _fields(model_type)
    made: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and "model_type" in value:
            made[key] = {"model_type": value["model_type"], **_stated(value["model_type"], value)}
        elif not isinstance(value, int) or not fields or fields.get(key) is not None:
            made[key] = value
    return made


def _refusal(
    model_type: str, auto_class: str, values: Mapping[str, Any], most: int = PARAMETERS
) -> Exception | None:
    """Why there is no small model with `values`; ``None`` if there is one."""
    try:
        shapes = _shapes(model_type, auto_class, values)
    except Exception as error:
        return error
    return None if sum(map(math.prod, shapes)) <= most else _Large(shapes)


def _difference(base: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    """What `base` has otherwise than `default`, without what tells of the file it was in."""
    made: dict[str, Any] = {}
    for key, value in base.items():
        if key in _OF_THE_FILE or key.startswith("_") or value == default.get(key):
            continue
        if isinstance(value, Mapping) and "model_type" in value:
            known = default.get(key)
            inner = _difference(value, known if isinstance(known, Mapping) else {})
            made[key] = {"model_type": value["model_type"], **inner}
        else:
            made[key] = value
    return made


def _merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(values)
    for key, value in over.items():
        below = made.get(key)
        made[key] = (
            _merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
        )
    return made


def _with_sections(config: Mapping[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """`values` with the parts of M-RoPE that the code has for the head size it takes for granted."""
    for key, inner in config.items():
        if isinstance(inner, Mapping) and "model_type" in inner:
            small = _with_sections(inner, dict(values.get(key, {"model_type": inner["model_type"]})))
            if small.keys() - {"model_type"}:
                values[key] = small
    rope = config.get("rope_parameters")
    if (
        "rope_parameters" in config
        and "num_attention_heads" in config
        and not (rope and "mrope_section" in rope)
    ):
        from transformers import CONFIG_MAPPING

        name = config.get("model_type")
        if name in CONFIG_MAPPING and mentioned(CONFIG_MAPPING[name], "mrope_section"):
            rope = {"rope_type": "default", "rope_theta": 10000.0, **(rope or {}), "mrope_section": [2, 1, 1]}
            values["rope_parameters"] = rope
    return values


def _keys(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        if key == "model_type":
            continue
        if isinstance(value, Mapping) and "model_type" in value:
            yield from _keys(value, (*above, key))
        else:
            yield (*above, key)


def _without(values: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    made = copy.deepcopy(values)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return made


def _shapes(model_type: str, auto_class: str, values: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Shapes of the parameters of the model; it is built without storage."""
    import torch

    from ..spec.configs import build_config, model_class

    cls = model_class(auto_class)
    with torch.device("meta"):
        config = build_config(model_type, copy.deepcopy(values))
        model = (getattr(cls, "from_config", None) or cls._from_config)(config)
    return [tuple(parameter.shape) for parameter in model.parameters()]


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2]) if lines else ""
    return text if isinstance(error, Unknown) else f"{type(error).__name__}: {text}"[:300]
