"""What is known of a model before any call: its signature, its configuration, the sizes of the two calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch

__all__ = ["AUDIO", "SIZES", "TEXT", "VISION", "Call", "Model", "Plan", "Unknown"]

#: (batch, length) of the two calls: what varies is dynamic.
SIZES = ((2, 9), (3, 6))
#: Sub-configurations, in the order in which a value is looked for.
TEXT = ("text_config", "llm_config", "language_config", "thinker_config", "decoder", "text_encoder")
VISION = ("vision_config", "image_config", "vit_config", "vision_encoder", "encoder", "backbone_config")
AUDIO = ("audio_config", "audio_encoder", "speech_config", "encoder_config")
#: Configurations of a whole multimodal model inside another one.
_WRAPPED = ("vlm_config", "thinker_config", "vl_config")


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
class Plan:
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
    spread:
        Both calls have the same number of images, the first one two in its first prompt: what holds one entry
        for each image (features in a list) has as many in both calls.
    hears:
        Audio is given though it is neither the main input nor needed.
    blind:
        No images are given.
    longer:
        How much longer the text of the second call is: where images made it as long as that of the first.
    frames:
        Length of the audio of the two calls: samples or frames.
    audio:
        Shape of the audio, of ``{b}`` and its length ``{n}``; empty: the likeliest.
    patches:
        How patches are given where a grid says of which image they are: one of `PATCHES`.
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
    spread: bool = False
    hears: bool = False
    blind: bool = False
    longer: int = 0

    def images_of(self, position: int) -> int:
        """How many images a call has."""
        return max(batch for batch, _ in SIZES) if self.spread else SIZES[position][0] + 2 * self.apart

    def size_of(self, position: int) -> tuple[int, int]:
        """Height and width of the images of a call, in pixels."""
        return self.images[position], self.images[1 - position if self.oblong else position]


class Model:
    """What is known of a model: the parameters of its method, and values of its configuration."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.config: Any = getattr(model, "config", None)
        parameters = list(inspect.signature(model.forward).parameters.values())
        named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        self.names = [parameter.name for parameter in named]
        self.required = [parameter.name for parameter in named if parameter.default is parameter.empty]
        # Some classes name the main input of the model that they are a part of.
        main = str(getattr(model, "main_input_name", ""))
        self.main = main if main in self.names else ""
        #: The argument that says how many patches each image has, in time and on each side.
        self.grid = next((name for name in ("image_grid_thw", "grid_thw") if name in self.names), "")
        self.audio = next((name for name in ("input_values", "input_features") if name in self.names), "")
        self.is_seq2seq = bool(getattr(self.config, "is_encoder_decoder", False))
        #: What makes features of images: a method of the model, or of the one that it is wrapped around.
        self.image_features: Callable[..., Any] | None = next(
            (cast(Any, part).get_image_features for part in model.modules() if _sees(part)), None
        )
        if self.image_features is not None and self.takes("pixel_values"):
            of_images = inspect.signature(self.image_features).parameters.values()
            needed = [p.name for p in of_images if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
            self.with_images = [name for name in needed if self.takes(name) and name != "pixel_values"]
        else:
            self.with_images = []

    def value(self, *names: str, within: Sequence[str] = (), default: Any = None) -> Any:
        """The first of `names` that the configuration has, in sub-configurations first."""
        owners = [self.config, *_wrapped(self.config)]
        configs = [getattr(owner, key, None) for owner in owners for key in within]
        for config in [*(config for config in configs if config is not None), *owners]:
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
        return max(4, min(96, int(self.value("vocab_size", within=TEXT, default=96))))


def _sees(part: torch.nn.Module) -> bool:
    return callable(getattr(type(part), "get_image_features", None))


def _wrapped(config: Any) -> list[Any]:
    """The configurations of models that the model is wrapped around: those that have parts themselves."""
    parts = [getattr(config, key, None) for key in _WRAPPED]
    return [part for part in parts if part is not None]
