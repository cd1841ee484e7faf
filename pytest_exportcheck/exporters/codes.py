"""A digest of compiled code: where a function was given other code in place, its file tells the old one."""

from __future__ import annotations

import hashlib
import marshal
import types
from typing import Any

__all__ = ["code_digest"]

#: By identity, which is kept: code does not change, functions are given other code.
_codes: dict[int, tuple[types.CodeType, str]] = {}


def code_digest(code: types.CodeType) -> str:
    """Of all that compiled code says, its constants and inner functions included."""
    known = _codes.get(id(code))
    if known is None:
        try:
            # This format knows no references: how often an object is used elsewhere shows in later ones.
            data = marshal.dumps(code, 2)
        except ValueError:  # slices (Python 3.14), and whatever somebody put among the constants
            data = repr(_plain_code(code)).encode("utf-8", "backslashreplace")
        known = _codes[id(code)] = code, hashlib.sha256(data).hexdigest()[:32]
    return known[1]


def _plain_code(code: types.CodeType) -> list[Any]:
    return [
        *(code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags),
        *(code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount, code.co_exceptiontable),
        *(code.co_filename, code.co_qualname, code.co_firstlineno, code.co_linetable),
        *(
            _plain_code(item)
            if isinstance(item, types.CodeType)
            else sorted(map(repr, item))
            if isinstance(item, frozenset)
            else repr(item)
            for item in code.co_consts
        ),
    ]
