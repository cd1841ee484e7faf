"""A function with a few lines of its source changed: a patch that says only what differs.

An edit whose text is not in the source (any more) is an error: such a patch cannot go stale unnoticed.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from ..errors import PatchError

__all__ = ["edited"]


def edited(
    original: Any,
    *changes: tuple[str, str],
    names: Mapping[str, Any] | None = None,
    drop_decorators: bool = False,
) -> Callable[..., Any]:
    """`original` compiled again from its source with each ``(old, new)`` of `changes` made once.

    Parameters
    ----------
    original:
        A plain function, without variables of an enclosing function, and without decorators unless they are
        dropped: then the function that they wrap (`inspect.unwrap`).
    changes:
        Text as in the source, without the indentation that the whole function has.
    names:
        Globals for the new text, beside those of `original`.

    Raises
    ------
    PatchError
        There is no source, it is decorated, or an old text does not occur exactly once.
    """
    where = f"{getattr(original, '__module__', '?')}.{getattr(original, '__qualname__', original)}"
    if not isinstance(original, FunctionType) or hasattr(original, "__wrapped__") or original.__closure__:
        raise PatchError(f"{where} is no plain function: its source cannot be edited")
    try:
        source = textwrap.dedent(inspect.getsource(original))
    except OSError as error:
        raise PatchError(f"{where} has no source to edit: {error}") from error
    for old, new in changes:
        count = source.count(old)
        if count != 1:
            raise PatchError(
                f"{where}: the line to change occurs {count} times and not once, its source is another one "
                f"than the patch was written for: {old.strip().splitlines()[0]}"
            )
        source = source.replace(old, new)
    file = f"<{where}, patched>"
    tree = ast.parse(source)
    definition = tree.body[0]
    assert isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef))
    if definition.decorator_list and not drop_decorators:
        raise PatchError(f"{where} is decorated: its source cannot be edited")
    definition.decorator_list = []
    # Tracebacks and the stack traces of graph nodes show the edited lines.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope = dict(original.__globals__) | dict(names or {})
    exec(compile(tree, file, "exec"), scope)
    made = scope[original.__name__]
    # Globals are looked up where they change: in the module, not in a copy of it.
    function = FunctionType(
        made.__code__,
        original.__globals__ if not names else scope,
        original.__name__,
        original.__defaults__,
        original.__closure__,
    )
    function.__kwdefaults__ = original.__kwdefaults__
    function.__module__ = original.__module__
    function.__qualname__ = original.__qualname__
    function.__doc__ = original.__doc__
    return function
