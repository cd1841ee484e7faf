"""What code asks for that no digest of it tells: files, the command line, the clock, modules yet to come."""

from __future__ import annotations

import collections
import dis
import importlib.util
import types
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["ASKS", "OPAQUE", "OUTSIDE", "imports_of"]

#: What code calls whose result no digest of the code knows of.
OPAQUE = {"open", "eval", "exec", "compile", "__import__", "input", "globals", "locals", "vars"}
#: Modules of the standard library that are asked for something outside the process, or that changes.
OUTSIDE = {
    *("random", "time", "datetime", "socket", "subprocess", "urllib", "sqlite3", "secrets", "uuid"),
    *("importlib", "pickle", "shelve", "tempfile", "glob", "ctypes", "multiprocessing", "requests", "http"),
}

#: Attributes and functions, under whatever name, that ask for files or for the command line.
ASKS = {
    *(
        "read_text",
        "read_bytes",
        "argv",
        "orig_argv",
        "exists",
        "is_file",
        "is_dir",
        "isfile",
        "isdir",
        "stat",
    ),
    *(
        "listdir",
        "scandir",
        "iterdir",
        "rglob",
        "walk",
        "getmtime",
        "getsize",
        "fromfile",
        "from_file",
        "memmap",
    ),
    *(
        "load",
        "load_file",
        "loadtxt",
        "genfromtxt",
        "safe_open",
        "load_state_dict_from_url",
        "getpid",
        "urandom",
    ),
    *("cpu_count", "access", "lstat", "popen", "getlines", "getline", "get_data"),
}


def imports_of(code: types.CodeType, namespace: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(absolute name, what is taken from it) of each module that `code` imports."""
    constants: collections.deque[Any] = collections.deque(maxlen=2)
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_CONST":
            constants.append(step.argval)
        elif step.opname == "IMPORT_NAME":
            level, wanted = constants
            name = step.argval
            if level:
                package = str(namespace.get("__package__") or namespace.get("__name__", ""))
                name = importlib.util.resolve_name("." * level + name, package)
            yield name, tuple(wanted or ())
