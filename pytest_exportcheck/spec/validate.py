"""pydantic's errors as problems for people: placed in the file, in plain words, with suggestions."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeGuard

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from .model import When
from .names import choices, suggest
from .nodes import NodePath, Report
from .values import describe

__all__ = ["report_errors"]

_WRONG_TYPE = {
    "string_type",
    "int_type",
    "int_from_float",
    "float_type",
    "bool_type",
    "tuple_type",
    "dict_type",
    "model_type",
    "model_attributes_type",
}
_SINGULAR = {str: "text", int: "an integer", float: "a number", bool: "true or false"}
_PLURAL = {str: "texts", int: "integers", float: "numbers"}


def report_errors(error: ValidationError, top: type[BaseModel], report: Report) -> None:
    """Add one problem for each of pydantic's errors.

    Faults that `rules` and `values` have already reported at the same place are left out.
    """
    for item in error.errors(include_url=False, include_context=True):
        raw = item["loc"]
        is_key = "[key]" in raw
        where = tuple(part for part in raw if part != "[key]" and not _is_tag(part))
        kind, value, context = item["type"], item["input"], item.get("ctx", {})
        # A list whose only item is wrong counts as too short as well.
        if where in report.reported or (kind == "too_short" and value):
            continue
        annotation = _annotation(top, where)
        if kind == "extra_forbidden":
            fields = _fields(_annotation(top, where[:-1]))
            report.key(where, f"unknown key {where[-1]!r}{suggest(where[-1], fields) or _known(fields)}")
        elif kind == "missing":
            report.value(where[:-1], f"missing key {where[-1]!r}")
        elif is_key:
            report.key(where, _key_message(kind, value, context))
        elif kind == "literal_error":
            options = _literals(annotation)
            if isinstance(value, str) and isinstance(options[0], str):
                report.value(where, f"unknown value {describe(value)}{choices(value, options)}")
            else:
                shown = ", ".join(map(str, options))
                report.value(
                    where,
                    f"expected {shown if len(options) == 1 else 'one of ' + shown}, got {describe(value)}",
                )
        elif kind == "tuple_type" and _annotation(top, where[:-1]) is When:
            report.value(where, f"expected text or {_expected(annotation)}, got {describe(value)}")
        else:
            report.value(where, _message(kind, value, context, annotation, item["msg"]))


def _is_tag(part: object) -> bool:
    return isinstance(part, str) and part.startswith("<") and part.endswith(">")


def _known(fields: Mapping[str, object]) -> str:
    return f" (known: {', '.join(fields)})"


def _key_message(kind: str, value: object, context: Mapping[str, Any]) -> str:
    if kind == "exportcheck":
        return str(context["text"])
    if kind == "literal_error":
        options = [part.strip("'") for part in str(context["expected"]).replace(" or ", ", ").split(", ")]
        return f"unknown key {value!r}{choices(value, options)}"
    return f"expected text as a key, got {describe(value)}"


def _message(kind: str, value: object, context: Mapping[str, Any], annotation: Any, fallback: str) -> str:
    if kind == "exportcheck":
        return str(context["text"])
    if kind == "branch":
        return f"{fallback}, got {describe(value)}"
    if kind in _WRONG_TYPE:
        return f"expected {_expected(annotation)}, got {describe(value)}"
    if kind == "greater_than_equal":
        return f"must be at least {context['ge']:g}, got {value}"
    if kind == "less_than":
        return f"must be less than {context['lt']:g}, got {value}"
    if kind == "finite_number":
        return f"must be a finite number, got {value}"
    if kind == "too_short":
        return "must not be empty"
    return f"{fallback}, got {describe(value)}"


def _bare(annotation: Any) -> Any:
    """Without Annotated and Optional."""
    while True:
        if typing.get_origin(annotation) is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
        elif typing.get_origin(annotation) in (typing.Union, types.UnionType):
            branches = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
            if len(branches) > 1:
                return annotation
            annotation = branches[0]
        else:
            return annotation


def _annotation(top: Any, where: NodePath) -> Any:
    """The declared type at a path of the models; Any where the path leaves them."""
    current: Any = top
    for part in where:
        current = _step(_bare(current), part)
    return _bare(current)


def _is_model(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _fields(annotation: Any) -> Mapping[str, FieldInfo]:
    """Fields of a model, or of the one that a union has."""
    return next(
        branch.model_fields
        for branch in (annotation, *map(_bare, typing.get_args(annotation)))
        if _is_model(branch)
    )


def _step(current: Any, part: object) -> Any:
    if _is_model(current):
        field = current.model_fields.get(str(part))
        return field.annotation if field is not None else Any
    origin, args = typing.get_origin(current), typing.get_args(current)
    if origin is dict:
        return args[1]
    if origin is tuple:
        return args[0]
    if origin in (typing.Union, types.UnionType):
        wanted = tuple if isinstance(part, int) else dict
        for branch in map(_bare, args):
            if typing.get_origin(branch) is wanted or (wanted is dict and _is_model(branch)):
                return _step(branch, part)
    return Any


def _literals(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) is Literal:
        return typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for branch in map(_bare, typing.get_args(annotation)):
            if found := _literals(branch):
                return found
    return ()


def _expected(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is tuple:
        item = _bare(typing.get_args(annotation)[0])
        if literals := _literals(item):
            return f"a list of {', '.join(map(str, literals))}"
        return f"a list of {_PLURAL[item]}" if item in _PLURAL else "a list of mappings"
    if origin is dict or _is_model(annotation):
        return "a mapping"
    if literals := _literals(annotation):
        return f"one of {', '.join(map(str, literals))}"
    return _SINGULAR.get(annotation, "another type")
