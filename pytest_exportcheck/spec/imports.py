"""Callables and folders that a spec names: files next to it, modules, installed packages."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ..tracebacks import one_line, user_lines
from ..user_files import module_name_of
from .names import choices
from .values import REF

__all__ = [
    "UserCodeError",
    "call_user",
    "load_callable",
    "load_object",
    "package_folder",
    "sibling_imports",
    "siblings_of",
]

#: Path of a file next to a spec -> its mtime and size when it was loaded, and the module.
_LOADED: dict[Path, tuple[tuple[int, int], ModuleType]] = {}

#: Folder -> the modules that files in it have imported from it, see `sibling_imports`.
_SIBLINGS: dict[str, dict[str, ModuleType]] = {}


class UserCodeError(Exception):
    """Code named in a spec is missing or failed.

    Attributes
    ----------
    message:
        One line.
    details:
        What was raised, and the frames of the user.
    """

    def __init__(self, message: str, details: list[str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.details = details or []


@contextmanager
def sibling_imports(folder: Path) -> Iterator[None]:
    """Let code in `folder` import its siblings, without one spec's ``helpers.py`` becoming another's.

    Modules imported from the folder meanwhile are put aside afterwards, and put back the next time. A file
    that was loaded by its name (``model.py:make``) and is imported as a sibling is one module: patches of the
    one would not reach the other.
    """
    root = str(folder.resolve())
    if root in sys.path:
        yield
        return
    siblings = _SIBLINGS.setdefault(root, {})
    shadowed = {name: sys.modules[name] for name in siblings if name in sys.modules}
    before = set(sys.modules) - set(siblings)
    sys.modules.update(siblings)
    # Files that were written since it was last listed, within one tick of the clock, are in no cache.
    sys.path_importer_cache.pop(root, None)
    sys.path.insert(0, root)
    try:
        yield
    finally:
        if root in sys.path:
            sys.path.remove(root)
        for name in _found_in(root, set(sys.modules) - before, before):
            siblings[name] = module = sys.modules.pop(name)
            if (path := _file_of(module)) is not None and path.is_file():
                _LOADED.setdefault(path, (_stamp(path), module))
        sys.modules.update(shadowed)


def siblings_of(folder: Path) -> Collection[str]:
    """Names of the modules that were imported from `folder` as siblings."""
    return _SIBLINGS.get(str(folder.resolve()), {}).keys()


def _found_in(root: str, names: Collection[str], before: Collection[str]) -> list[str]:
    """Those of the new modules `names` that were found through `root`: no package of an environment below it,
    and no part of a package that was there before.
    """
    try:
        entries = {entry.removesuffix(".py") for entry in os.listdir(root)}
    except OSError:
        return []
    found = []
    for name in names:
        top = name.partition(".")[0]
        if top in entries and top not in before:
            module = sys.modules[name]
            file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
            place = os.path.join(root, top)
            if (os.path.realpath(file) + os.sep).startswith((place + os.sep, place + ".py" + os.sep)):
                found.append(name)
    return found


def _file_of(module: ModuleType | None) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def load_callable(ref: str, folder: Path) -> Callable[..., Any]:
    """The callable that `ref` names, files being looked up in `folder`; `UserCodeError` if there is none."""
    found = load_object(ref, folder)
    if not callable(found):
        raise UserCodeError(f"{ref} is not callable, it is a {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def load_object(ref: str, folder: Path, what_may_be: Callable[[ModuleType], list[str]] | None = None) -> Any:
    """The object that `ref` names, files being looked up in `folder`; `UserCodeError` if there is none.

    `what_may_be` gives the names in a module among which the nearest is suggested; all of them by default.
    """
    match = REF.match(ref)
    if match is None:
        raise UserCodeError(f"{ref!r} is not 'file.py:callable' or 'package.module:callable'")
    module_name, name = match["module"], match["name"]
    if module_name.endswith(".py"):
        module = _load_file(folder / module_name, folder, module_name)
    else:
        module = _load_module(module_name, folder, name)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            names = [known for known in getattr(found, "__dict__", ()) if not known.startswith("_")]
            if found is module and what_may_be is not None:
                names = what_may_be(module)
            raise UserCodeError(f"{module_name} has no {part!r}{choices(part, names[:20])}")
        found = getattr(found, part)
    return found


def _load_module(module_name: str, folder: Path, name: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        beside = folder / f"{module_name}.py"
        hint = f" (for the file next to the spec write {beside.name}:{name})" if beside.is_file() else ""
        raise UserCodeError(
            f"cannot import {module_name}: {one_line(error)}{hint}", user_lines(error)
        ) from error


def _load_file(path: Path, folder: Path, shown: str) -> ModuleType:
    path = path.resolve()
    try:
        stamp = _stamp(path)
    except OSError:
        names = [item.name for item in sorted(path.parent.glob("*.py"))] if path.parent.is_dir() else []
        raise UserCodeError(
            f"there is no file {shown} next to the spec{choices(path.name, names[:20])}"
        ) from None
    if path not in _LOADED and _file_of(imported := sys.modules.get(path.stem)) == path:
        assert imported is not None
        _LOADED[path] = (stamp, imported)
    loaded = _LOADED.get(path)
    if loaded is not None and loaded[0] == stamp:
        return loaded[1]
    # One name per file: two specs' factory.py must not be one module. Registered, because dataclasses
    # and pickle look a class's module up.
    module_name = module_name_of(path)
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None or module_spec.loader is None:
        raise UserCodeError(f"{shown} cannot be loaded as Python")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module
    try:
        with sibling_imports(path.parent), sibling_imports(folder), _also_a_sibling(path, module):
            module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(module_name, None)
        raise UserCodeError(f"{shown} cannot be imported: {one_line(error)}", user_lines(error)) from error
    _LOADED[path] = (stamp, module)
    return module


@contextmanager
def _also_a_sibling(path: Path, module: ModuleType) -> Iterator[None]:
    """`module` is what ``import`` of the file at `path` finds, where it finds that file."""
    name = path.stem
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None or not found.origin or Path(found.origin).resolve() != path:
        yield
        return
    sys.modules[name] = module
    try:
        yield
    except BaseException:
        sys.modules.pop(name, None)
        raise


def call_user(function: Callable[..., Any], ref: str, folder: Path, /, *args: Any, **kwargs: Any) -> Any:
    """Call a user's callable; `UserCodeError` if it raises or exits. KeyboardInterrupt passes."""
    try:
        with sibling_imports(folder):
            return function(*args, **kwargs)
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"{ref} raised {one_line(error)}", user_lines(error)) from error


def package_folder(reference: str) -> Path:
    """The folder that ``package:NAME/sub/folder`` names. The package is found, not imported."""
    name, _, rest = reference.removeprefix("package:").partition("/")
    if not name.isidentifier():
        raise UserCodeError(
            f"{reference!r}: expected package:NAME/sub/folder, NAME being a top-level package"
        )
    found = importlib.util.find_spec(name)
    if found is None:
        raise UserCodeError(f"package {name!r} is not installed")
    for location in found.submodule_search_locations or ():
        folder = Path(location, rest).resolve()
        if folder.is_dir() and folder.is_relative_to(Path(location).resolve()):
            return folder
    raise UserCodeError(f"package {name!r} has no folder {rest!r}")
