"""Which of our patch modes replaces the code that a failure names: what a guard of it may be cured by."""

from __future__ import annotations

import inspect
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import PatchError
from .modes import PatchList
from .patch import Patch, module_loaded, resolve
from .registry import load_patch_mode

__all__ = ["cure_lines"]

#: Modes with patches of ours. ``rewrite`` makes its own for each graph, ``hf`` brings those of transformers.
_OURS = ("torch", "transformers")

#: ``net.py:12``, as messages name a line of code: the whole path, or from site-packages on.
_PLACE = re.compile(r"(?<![\w./\\-])((?:[A-Za-z]:)?[\w./\\-]+\.py):(\d+)\b")


def cure_lines(texts: Iterable[str], mode: str, target: str) -> list[str]:
    """For the details of a failure: the modes that replace code at the lines which `texts` name.

    Parameters
    ----------
    mode:
        The patch mode of the case, which does not cure it.
    target:
        What is exported to, ``onnx`` or ``torch``.
    """
    places = {(path, int(line)) for text in texts for path, line in _PLACE.findall(text)}
    if not places or mode == "all":
        return []
    found = []
    for name in _OURS:
        if name == mode or name not in sys.modules:
            continue
        replaced = [patch.name for patch in _patches(name, target) if _replaces(patch, places)]
        if replaced:
            names = ", ".join(dict.fromkeys(replaced))
            found.append(
                f"patch mode {name} replaces code named above ({names}) and may cure it: "
                f"patch_modes: [{mode}, {name}]"
            )
    return found


def _patches(name: str, target: str) -> Iterator[Patch]:
    mode = load_patch_mode(name)
    if isinstance(mode, PatchList):
        # Of a module that nobody has imported no line can be named.
        yield from (patch for patch in mode.patches(None, target) if module_loaded(patch.target))


def _replaces(patch: Patch, places: set[tuple[str, int]]) -> bool:
    try:
        original: Any = resolve(patch.target, patch.owner)[2]
        original = inspect.unwrap(getattr(original, "fget", None) or getattr(original, "__func__", original))
        code = original.__code__
        lines, first = inspect.getsourcelines(original)
    except (PatchError, AttributeError, OSError, TypeError):
        return False
    return any(
        first <= line < first + len(lines) and _is_file(code.co_filename, path) for path, line in places
    )


def _is_file(filename: str, shown: str) -> bool:
    """Whether messages name the file `shown`: whole, or from where packages or the run are."""
    roots = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], os.getcwd())
    return shown == filename or any(os.path.join(root, shown) == filename for root in roots)
