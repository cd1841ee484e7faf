"""Registries of exporters, patch modes and comparisons: built-in, from entry points, and added at run time.

Names are read from entry-point metadata; nothing is imported before it is loaded by name, so that pytest can
list and check names during collection without torch. This is one module beside the rooms, and not in them,
because importing `patches.registry` first imports the package `patches`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

__all__ = [
    "COMPARISONS",
    "EXPORTERS",
    "PATCH_MODES",
    "Registry",
    "brings_patches",
    "comparison_names",
    "exporter_names",
    "load_comparison",
    "load_exporter",
    "load_patch_mode",
    "patch_mode_names",
    "register_comparison",
    "register_exporter",
    "register_patch_mode",
]


class Registry:
    """Names and how to load what they stand for.

    Attributes
    ----------
    kind:
        What the names are names of, for messages.
    group:
        Entry-point group of the objects that other packages bring.
    builtin:
        Name -> ``"module:attribute"`` of ours, which must be found without distribution metadata too.
    """

    def __init__(self, kind: str, group: str, builtin: Mapping[str, str]) -> None:
        self.kind = kind
        self.group = group
        self.builtin = dict(builtin)
        self._added: dict[str, object] = {}
        self._points: dict[str, EntryPoint] | None = None
        self._loaded: dict[str, object] = {}

    def names(self) -> list[str]:
        """Every known name: the built-in ones in their order, then the others sorted."""
        others = sorted({*self._entry_points(), *self._added} - set(self.builtin))
        return [*self.builtin, *others]

    def register(self, name: str, value: object) -> None:
        """Add `value` (an object, a class, or ``"module:attribute"``); it wins over an entry point."""
        self._added[name] = value
        self._loaded.pop(name, None)

    def unregister(self, name: str) -> None:
        """Forget a name added by `register`; nothing if there is none."""
        self._added.pop(name, None)
        self._loaded.pop(name, None)

    def registered(self, name: str) -> object | None:
        """What was added under `name` at run time."""
        return self._added.get(name)

    def load(self, name: str) -> object:
        """The object called `name`; a class is instantiated once. `LookupError` if the name is unknown."""
        if name not in self._loaded:
            value = self._find(name)
            # A class that says what it patches is a list of patches, and no mode.
            plain = not isinstance(value, type) or hasattr(value, "_PATCHED_CLASS_")
            self._loaded[name] = value if plain else value()  # type: ignore[operator]
        return self._loaded[name]

    def _find(self, name: str) -> object:
        value = self._added.get(name)
        if value is not None:
            return _import(value) if isinstance(value, str) else value
        if name in self.builtin:
            return _import(self.builtin[name])
        point = self._entry_points().get(name)
        if point is not None:
            return point.load()
        from .spec.names import suggest

        hint = suggest(name, self.names())
        raise LookupError(f"unknown {self.kind} {name!r}{hint}; known: {', '.join(self.names()) or 'none'}")

    def _entry_points(self) -> dict[str, EntryPoint]:
        if self._points is None:
            self._points = {point.name: point for point in entry_points(group=self.group)}
        return self._points


def _import(path: str) -> object:
    module, _, attribute = path.partition(":")
    value: object = import_module(module)
    for part in attribute.split("."):
        value = getattr(value, part)
    return value


EXPORTERS = Registry(
    kind="exporter",
    group="pytest_exportcheck.exporters",
    # Also in pyproject.toml; repeated here for a source tree that is on sys.path without being installed.
    builtin={
        "torch-export": "pytest_exportcheck.exporters.torch_export:TorchExport",
        "torch-export-strict": "pytest_exportcheck.exporters.torch_export:TorchExportStrict",
        "onnx-dynamo": "pytest_exportcheck.exporters.onnx_dynamo:OnnxDynamo",
        "onnx-torchscript": "pytest_exportcheck.exporters.onnx_torchscript:OnnxTorchScript",
        "transformers-onnx": "pytest_exportcheck.exporters.transformers_onnx:TransformersOnnx",
    },
)

#: Exporters that apply their own patches: they run once per spec and not once per patch mode.
_OWN_PATCHES = frozenset({"transformers-onnx"})


def exporter_names() -> list[str]:
    """Every known name, in a fixed order: the built-in ones, then the others by name."""
    return EXPORTERS.names()


def load_exporter(name: str) -> object:
    """The exporter called `name`, imported and instantiated; `LookupError` if nobody registered it."""
    return EXPORTERS.load(name)


def register_exporter(name: str, exporter: object) -> None:
    """Add an exporter (instance, class or ``"module:attribute"``) for this process."""
    EXPORTERS.register(name, exporter)


def brings_patches(name: str) -> bool:
    """Whether the exporter applies its own patches. Decided without importing it.

    True for ``transformers-onnx``, for a name in the entry-point group ``pytest_exportcheck.own_patches``,
    and for an exporter registered at run time as an object whose ``brings_patches`` is true.
    """
    if name in _OWN_PATCHES or bool(getattr(EXPORTERS.registered(name), "brings_patches", False)):
        return True
    return name in _declared_own_patches()


@cache
def _declared_own_patches() -> frozenset[str]:
    # Reading the metadata of every installed distribution takes milliseconds, and is asked for every spec.
    return frozenset(point.name for point in entry_points(group="pytest_exportcheck.own_patches"))


PATCH_MODES = Registry(
    kind="patch mode",
    group="pytest_exportcheck.patch_modes",
    # Also in pyproject.toml; repeated here for a source tree that is on sys.path without being installed.
    builtin={
        "none": "pytest_exportcheck.patches.none:NoPatches",
        "torch": "pytest_exportcheck.patches.modes:TorchPatches",
        "transformers": "pytest_exportcheck.patches.modes:TransformersPatches",
        "rewrite": "pytest_exportcheck.patches.modes:RewritePatches",
        "all": "pytest_exportcheck.patches.modes:AllPatches",
        "hf": "pytest_exportcheck.patches.hf:HfPatches",
    },
)


def patch_mode_names() -> list[str]:
    """Every known name, in a fixed order: the built-in ones, then the others by name."""
    return PATCH_MODES.names()


def load_patch_mode(name: str, folder: Path | None = None) -> object:
    """The patch mode called `name`, imported and instantiated; `LookupError` if nobody registered it.

    ``file.py:name`` is looked up in `folder`, the spec's; `PatchError` if it cannot be loaded.
    """
    from .patches.user import as_mode, load_mode

    if ":" in name and name not in PATCH_MODES.names():
        return load_mode(name, folder or Path.cwd())
    return as_mode(name, PATCH_MODES.load(name))


def register_patch_mode(name: str, mode: object) -> None:
    """Add a patch mode (instance, class or ``"module:attribute"``) for this process."""
    PATCH_MODES.register(name, mode)


#: We bring none: what is ours needs no name.
COMPARISONS = Registry(kind="comparison", group="pytest_exportcheck.comparisons", builtin={})


def comparison_names() -> list[str]:
    """Every known name, sorted."""
    return COMPARISONS.names()


def load_comparison(name: str, folder: Path) -> object:
    """The comparison called `name`, imported, a class instantiated; `LookupError` if nobody registered it.

    ``file.py:name`` is looked up in `folder`, the spec's; `UserCodeError` if it cannot be loaded.
    """
    from .spec.imports import load_object

    if ":" in name and name not in COMPARISONS.names():
        value = load_object(name, folder)
        return value() if isinstance(value, type) else value
    return COMPARISONS.load(name)


def register_comparison(name: str, comparison: object) -> None:
    """Add a comparison (function, class or ``"module:attribute"``) for this process."""
    COMPARISONS.register(name, comparison)
