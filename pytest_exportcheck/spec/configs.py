"""transformers configurations from a spec, refusing what transformers would silently ignore.

The one module of this room that looks inside transformers' configuration classes (5.x: dataclasses whose
unknown keyword arguments become attributes).
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..lazy import large_imports
from .names import choices, suggest

__all__ = ["ConfigError", "build_config", "mentioned", "model_class"]

#: Keys that configurations accept although no field of theirs has that name.
_ALWAYS = frozenset({"model_type", "num_labels", "torch_dtype", "rope_theta", "rope_scaling"})


class ConfigError(Exception):
    """A configuration is wrong; `where` leads to the key below ``model``."""

    def __init__(self, message: str, where: tuple[str, ...]) -> None:
        super().__init__(message)
        self.message = message
        self.where = where


def build_config(model_type: str, values: Mapping[str, Any]) -> Any:
    """The configuration of `model_type` with `values`.

    Raises
    ------
    ConfigError
        The type is unknown, transformers refuses a value, or a key is one that no part of the class knows.
    """
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        hint = suggest(model_type, CONFIG_MAPPING.keys())
        raise ConfigError(f"transformers has no model type {model_type!r}{hint}", ("type",))
    config_class = CONFIG_MAPPING[model_type]
    config = config_class(**values)
    _check_keys(config, values, ("config",))
    return config


def _check_keys(config: Any, values: Mapping[str, Any], where: tuple[str, ...]) -> None:
    known = _known_keys(type(config))
    for key, value in values.items():
        # A key that a class takes away while it is built (an old spelling) does not end up in vars.
        if key in vars(config) and key not in known and not mentioned(type(config), key):
            names = sorted(name for name in known if not name.startswith("_"))
            raise ConfigError(
                f"{type(config).__name__} does not know {key!r}{suggest(key, names)}; transformers would "
                "ignore it",
                (*where, key),
            )
        if not isinstance(value, Mapping):
            # Not even looked at: what differs from layer to layer refuses to be read (gemma4's `head_dim`).
            continue
        inner = getattr(config, key, None)
        if hasattr(inner, "to_dict") and hasattr(type(inner), "model_type"):
            _check_keys(inner, value, (*where, key))


def _known_keys(config_class: type) -> set[str]:
    known = set(_ALWAYS) | set(getattr(config_class, "attribute_map", {}))
    known.update(getattr(config_class, "sub_configs", {}))
    if dataclasses.is_dataclass(config_class):
        known.update(field.name for field in dataclasses.fields(config_class))
    # Some composite configurations have no default; their fields are known.
    with contextlib.suppress(Exception):
        known.update(vars(config_class()))
    return known


def mentioned(cls: type, key: str, variable: str = "config") -> bool:
    """Whether the code of the model of `cls` reads `key` from the configuration anywhere.

    Some keys are no field and yet are read: ``getattr(config, "head_dim", None)`` in qwen3_moe, old
    spellings in `__post_init__`. A mistyped key is not.
    """
    import transformers.configuration_utils

    module = sys.modules.get(cls.__module__)
    if module is None or module.__file__ is None:
        return False
    word = re.compile(rf"""(?:\b{variable}\.|["']){re.escape(str(key))}\b""")
    shared = Path(transformers.configuration_utils.__file__)
    sources = [*Path(module.__file__).parent.glob("*.py"), shared]
    return any(word.search(source.read_text(encoding="utf-8")) for source in sources)


def model_class(name: str) -> Any:
    """The transformers class of that name; `ConfigError` with a suggestion if there is none."""
    with large_imports():
        import transformers

        found = getattr(transformers, name, None)
    if found is None or not hasattr(found, "from_pretrained"):
        names = [known for known in dir(transformers) if known[:1].isupper() and "Config" not in known]
        hint = suggest(name, names) or choices(name, ["AutoModel", "AutoModelForCausalLM", "..."])
        raise ConfigError(f"transformers has no model class {name!r}{hint}", ("auto_class",))
    return found
