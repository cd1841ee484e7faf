"""Parts of the JSON Schema that pydantic cannot derive: calls and tensors are a language of their own."""

from __future__ import annotations

from typing import Any

__all__ = ["CALLS", "MISSING"]

_TENSOR_HELP = (
    'A tensor, `dtype[dims] fill`: "int64[batch, seq] < 256", "float32[2, 3]", "int64[2, 9] = 1", '
    '"int64[2, 9] padded left 2", "float32[2] values [1, 2]", "float32[3] in -1..1", '
    '"int64[4] arange", "float32[2, 4] from data.npz:key", "float32[2, 4] by make.py:image"'
)
_REF: dict[str, Any] = {
    "type": "string",
    "pattern": "^[^:].*:[A-Za-z_][A-Za-z0-9_.]*$",
    "description": "`file_next_to_the_spec.py:callable` or `package.module:callable`",
}
_TENSOR: dict[str, Any] = {
    "type": "string",
    "pattern": r"^[a-z]+[0-9]*!?\[",
    "description": _TENSOR_HELP,
    "examples": ["int64[2, 9] < 256", "int64[2, 9] = 1", "float32[2, 3, 32, 32]"],
}
# Fragments are inlined one level deep rather than put in $defs: pydantic owns $defs. The items of lists
# and mappings inside an argument are therefore left open.
_ARGUMENT: dict[str, Any] = {
    "description": "A number, true, false, null, a tensor, an earlier output, or lists and mappings of these",
    "anyOf": [
        {"type": ["number", "boolean", "null"]},
        _TENSOR,
        {
            "type": "string",
            "pattern": r"^previous(\.[A-Za-z0-9_]+)*$",
            "description": "A field of the previous call's output: `previous.cache`",
        },
        {"type": "array"},
        {
            "type": "object",
            "description": 'A dict; `{str: "text"}` is text and `{tuple: [..]}` a tuple',
        },
    ],
}
_BY_NAME: dict[str, Any] = {"type": "object", "additionalProperties": _ARGUMENT}
_DIMS: dict[str, Any] = {
    "type": "object",
    "description": "Sizes of the declared dims in this call",
    "additionalProperties": {"type": "integer", "minimum": 0},
}


def _call(kind: str, content: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {kind: content, "dims": _DIMS},
        "required": [kind],
        "additionalProperties": False,
    }


CALLS: dict[str, Any] = {
    "anyOf": [
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "anyOf": [
                    _call(
                        "forward",
                        {
                            "description": "A call of the observed method: arguments by name (a mapping), by "
                            "position (a list), or both ({args: [..], kwargs: {..}})",
                            "anyOf": [_BY_NAME, {"type": "array", "items": _ARGUMENT}, {"type": "null"}],
                        },
                    ),
                    _call(
                        "generate",
                        {
                            "description": "A call of model.generate, arguments by name",
                            "anyOf": [_BY_NAME, {"type": "null"}],
                        },
                    ),
                    _call(
                        "call", {**_REF, "description": f"A callable given the model: {_REF['description']}"}
                    ),
                ]
            },
        },
        {
            **_REF,
            "description": "A callable that returns a list of (args, kwargs), or takes the model and makes "
            f"the calls itself: {_REF['description']}",
        },
    ]
}

MISSING: dict[str, Any] = {"type": "object", "additionalProperties": _TENSOR}
