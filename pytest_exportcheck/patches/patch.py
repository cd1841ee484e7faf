"""One patch as a value: what it replaces, by what, why, and for which versions.

A patch knows nothing of being applied; `engine.applied` does that.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ..errors import PatchError
from ..spec.names import suggest
from ..tracebacks import one_line

__all__ = [
    "LOADED",
    "MISSING",
    "MODELING",
    "Patch",
    "Source",
    "module_loaded",
    "name_of",
    "nearest",
    "resolve",
]

#: No attribute of that name.
MISSING: Any = object()

#: Given to a source in the place of a model: whatever models the process has imported.
LOADED: Any = object()


@dataclass(frozen=True)
class Patch:
    """A replacement of one function, method or attribute while exporting.

    Attributes
    ----------
    target:
        Dotted path of what is replaced, ``package.module.Class.method`` or ``package.module.function``. A
        patch with a `scope` and no replacement says in words what it changes.
    replacement:
        What takes its place; with `wraps` a factory ``original -> replacement``.
    why, link:
        The reason, and where it is discussed.
    versions:
        Pairs of distribution and specifier (``("transformers", ">=5.24")``); elsewhere the patch rests.
    wraps:
        Whether `replacement` is given the original.
    runtimes:
        The exporter targets it is for (``torch``, ``onnx``, ``torchscript``); empty: all of them.
    everywhere:
        A function of a module is also replaced in the modules that imported it by name, and in tables of
        functions (attention, masks, experts).
    optional:
        A target that is absent is no error (a registry that is not ours).
    scope:
        A context manager, made from the model, for what is no replacement of an attribute.
    name:
        How a subset of a mode names it; the target by default.
    owner:
        The class or module that has the attribute, where the path of the target cannot be imported (a class
        made in a function).
    depends:
        Dotted paths of what the replacement counts on beside its target: their source is in the lock too.
    rewritten:
        A method whose control flow was rewritten (`RewrittenMethod`); the `scope` puts it in place.
    """

    target: str
    replacement: Any = None
    why: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    link: str = ""
    wraps: bool = False
    runtimes: tuple[str, ...] = ()
    everywhere: bool = True
    optional: bool = False
    scope: Callable[[Any], AbstractContextManager[Any]] | None = None
    name: str = ""
    owner: Any = None
    depends: tuple[str, ...] = ()
    rewritten: Any = None

    def __post_init__(self) -> None:
        if not self.name:
            # A file next to a spec is imported under a name with a digest of its path.
            object.__setattr__(
                self, "name", re.sub(r"^_exportcheck_(\w+)_[0-9a-f]{12}\.", r"\1.", self.target)
            )
        if self.scope is None and "." not in self.target:
            raise PatchError(f"patch {self.target!r}: the target is a dotted path, package.module.name")

    def __hash__(self) -> int:
        # A replacement may be a constant, or an object that cannot be hashed.
        return hash((self.target, self.name))

    def rests(self) -> str:
        """Why the installed versions do not need it, ``""`` where they do."""
        from packaging.specifiers import SpecifierSet

        for package, wanted in self.versions:
            try:
                found = version(package)
            except PackageNotFoundError:
                return f"{package} is not installed"
            if not SpecifierSet(wanted).contains(found, prereleases=True):
                return f"for {package} {wanted}, installed {found}"
        return ""

    def versions_text(self) -> str:
        """``torch >=2.13, transformers >=5.24``."""
        return ", ".join(f"{package} {wanted}" for package, wanted in self.versions)


#: What a mode is made of: the patches for a model on the way to a runtime. For a list of them the model is
#: ``None``: all there are.
Source = Callable[[Any, str], "list[Patch]"]


#: The module of a model of transformers that a dotted path leads into.
MODELING = re.compile(r"transformers\.models\.\w+\.\w+")


def module_loaded(target: str) -> bool:
    """False for a target in a model's module that nothing has imported: no model can reach it."""
    match = MODELING.match(target)
    return match is None or match.group(0) in sys.modules


def resolve(target: str, owner: Any = None) -> tuple[Any, str, Any]:
    """(owner, attribute, current value) of a dotted path; the value is `MISSING` where the owner lacks it.

    `owner` is looked up in the path unless it is given.

    Raises
    ------
    PatchError
        The owner cannot be imported; says which part is missing.
    """
    path, _, attribute = target.rpartition(".")
    if owner is not None:
        return owner, attribute, getattr(owner, attribute, MISSING)
    parts = path.split(".")
    try:
        owner = sys.modules.get(parts[0]) or importlib.import_module(parts[0])
    except ModuleNotFoundError as error:
        if error.name != parts[0]:
            raise PatchError(f"patch {target}: importing {parts[0]} fails: {error}") from error
        near = suggest(parts[0], (module.name for module in pkgutil.iter_modules()))
        raise PatchError(f"patch {target}: there is no module {parts[0]}{near}") from error
    except (Exception, SystemExit) as error:
        raise PatchError(f"patch {target}: importing {parts[0]} fails: {one_line(error)}") from error
    for index, part in enumerate(parts[1:], 1):
        found = inspect.getattr_static(owner, part, MISSING)
        if inspect.ismodule(owner):
            name = ".".join(parts[: index + 1])
            try:
                # The submodule, even where a package has an attribute of the same name.
                found = sys.modules.get(name) or importlib.import_module(name)
            except ModuleNotFoundError as error:
                if error.name != name:
                    raise PatchError(f"patch {target}: importing {name} fails: {error}") from error
                found = getattr(owner, part, MISSING)
            except (Exception, SystemExit) as error:
                raise PatchError(f"patch {target}: importing {name} fails: {one_line(error)}") from error
        if found is MISSING:
            raise PatchError(
                f"patch {target}: there is no {'.'.join(parts[: index + 1])} in {_distribution(parts[0])}"
                f"{nearest(owner, part)}"
            )
        owner = found
    return owner, attribute, getattr(owner, attribute, MISSING)


def name_of(owner: Any) -> str:
    """What has an attribute, in messages."""
    return str(getattr(owner, "__qualname__", None) or getattr(owner, "__name__", owner))


def nearest(owner: Any, name: str) -> str:
    """`` (did you mean 'forward'?)``: the attribute or submodule of `owner` that looks like `name`; else
    ``: it was removed or renamed``.
    """
    paths = getattr(owner, "__path__", None) if inspect.ismodule(owner) else None
    parts = [module.name for module in pkgutil.iter_modules(paths)] if paths else []
    return suggest(name, dict.fromkeys([*dir(owner), *parts])) or ": it was removed or renamed"


def _distribution(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package
