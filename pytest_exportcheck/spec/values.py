"""The argument language of calls: YAML values -> tensors to build, previous outputs, plain Python values.

===================  ==================================================================
``3``, ``1.5``, ...  integers, floats, true, false, null as they are
``"int64[2, 3]"``    a tensor, see `tensors`
``previous.cache``   that field of the previous call's output
``{str: "text"}``    text (a bare string is refused: it is nearly always a mistyped tensor)
``{tuple: [..]}``    a tuple; lists and other mappings are lists and dicts
===================  ==================================================================
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .names import suggest
from .nodes import NodePath, Report
from .tensors import TensorSpec, TensorSyntaxError, looks_like_tensor, parse_tensor

__all__ = [
    "CALL_KINDS",
    "REF",
    "CallSpec",
    "Previous",
    "check_ref",
    "describe",
    "parse_calls",
    "parse_missing",
]

#: The keys that say what a call is.
CALL_KINDS = ("forward", "generate", "call")

#: ``file.py:callable`` or ``package.module:callable``.
REF = re.compile(r"(?P<module>[^:].*):(?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*)\Z")

_PREVIOUS = re.compile(r"previous(?:\.(?:[A-Za-z_][A-Za-z0-9_]*|[0-9]+))*\Z")


@dataclass(frozen=True)
class Previous:
    """A field of the previous call's output: ``previous.cache.layers.0.keys``."""

    text: str

    @property
    def path(self) -> tuple[str | int, ...]:
        """Names and indices behind ``previous``."""
        return tuple(int(part) if part.isdigit() else part for part in self.text.split(".")[1:])


@dataclass(frozen=True)
class CallSpec:
    """One call of ``observe.calls``.

    Attributes
    ----------
    kind:
        ``forward``, ``generate`` or ``call``.
    args, kwargs:
        Arguments; tensors are `TensorSpec`, earlier outputs `Previous`.
    dims:
        Sizes of the declared dims in this call.
    ref:
        For ``call``: the callable that is given the model.
    """

    kind: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)
    ref: str | None = None


def describe(value: object) -> str:
    """A YAML value as a person would call it, for the end of a message."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, Mapping):
        return "a mapping"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def check_ref(value: object, where: NodePath, report: Report) -> bool:
    """Whether `value` names a callable; reports it if not."""
    if isinstance(value, str) and REF.match(value):
        return True
    report.value(where, f"expected 'file.py:callable' or 'package.module:callable', got {describe(value)}")
    return False


class _Reader:
    """Reads the arguments of one call; every fault goes to the report."""

    def __init__(
        self,
        report: Report,
        folder: Path,
        declared: set[str] | None,
        sizes: Mapping[str, int] | None,
        index: int,
    ) -> None:
        self.report = report
        self.folder = folder
        self.declared = declared
        #: None: not known (they are wrong, or come later), so that shapes are not checked.
        self.sizes = sizes
        self.index = index

    def value(self, raw: Any, where: NodePath) -> Any:
        if isinstance(raw, str):
            return self.text(raw, where)
        if isinstance(raw, list):
            return [self.value(item, (*where, i)) for i, item in enumerate(raw)]
        if isinstance(raw, dict):
            return self.mapping(raw, where)
        return raw

    def mapping(self, raw: dict[Any, Any], where: NodePath) -> Any:
        if set(raw) == {"str"}:
            if not isinstance(raw["str"], str):
                self.report.value((*where, "str"), f"expected text, got {describe(raw['str'])}")
            return raw["str"]
        if set(raw) == {"tuple"}:
            items = raw["tuple"]
            if not isinstance(items, list):
                self.report.value((*where, "tuple"), f"expected a list, got {describe(items)}")
                return ()
            return tuple(self.value(item, (*where, "tuple", i)) for i, item in enumerate(items))
        return {key: self.value(item, (*where, key)) for key, item in raw.items()}

    def text(self, raw: str, where: NodePath) -> Any:
        if looks_like_tensor(raw):
            return self.tensor(raw, where)
        if _PREVIOUS.match(raw):
            if self.index == 0:
                self.report.value(where, f"{raw!r} in the first call: there is no previous output")
            return Previous(raw)
        self.report.value(
            where,
            f"{raw!r} is neither a tensor ('int64[2, 3] < 256') nor 'previous.NAME'; "
            f"for text write {{str: {raw!r}}}",
        )
        return None

    def tensor(self, raw: str, where: NodePath) -> TensorSpec | None:
        try:
            spec = parse_tensor(raw, self.folder)
            if self.declared is not None and self.sizes is not None:
                if not self._check_names(spec, where, self.declared, self.sizes):
                    return None
                spec.shape(self.sizes)
        except TensorSyntaxError as error:
            self.report.value(where, error.message, error.offset)
            return None
        return spec

    def _check_names(
        self, spec: TensorSpec, where: NodePath, declared: set[str], sizes: Mapping[str, int]
    ) -> bool:
        for dim in spec.dims:
            for name in dim.names:
                if name in sizes:
                    continue
                if name in declared:
                    message = f"dim {name!r} has no value in this call: give it in 'dims: {{{name}: ...}}'"
                else:
                    hint = suggest(name, declared) or ": declare it in observe.dims"
                    message = f"unknown dim {name!r}{hint}"
                self.report.value(where, message, dim.offset)
                return False
        return True


def parse_calls(
    raw: object, where: NodePath, declared: set[str], folder: Path, report: Report
) -> tuple[CallSpec, ...] | str:
    """``observe.calls``: a list of calls, or the name of a callable."""
    if isinstance(raw, str):
        check_ref(raw, where, report)
        return raw
    if not isinstance(raw, list):
        report.value(where, f"expected a list of calls or 'file.py:callable', got {describe(raw)}")
        return ()
    if not raw:
        report.value(where, "at least one call is needed")
    return tuple(
        _parse_call(item, (*where, index), index, declared, folder, report) for index, item in enumerate(raw)
    )


def _parse_call(
    raw: object, where: NodePath, index: int, declared: set[str], folder: Path, report: Report
) -> CallSpec:
    if not isinstance(raw, dict):
        report.value(where, f"expected a call such as 'forward: {{...}}', got {describe(raw)}")
        return CallSpec("forward")
    kinds = [key for key in raw if key in CALL_KINDS]
    unknown = [key for key in raw if key not in (*CALL_KINDS, "dims")]
    for key in unknown:
        report.key((*where, key), f"unknown key {key!r}{suggest(key, (*CALL_KINDS, 'dims'))}")
    if len(kinds) > 1:
        report.key(
            (*where, kinds[1]), f"one call has both {kinds[0]!r} and {kinds[1]!r}: make them two calls"
        )
    if not kinds:
        if not unknown:
            report.value(where, "a call needs one of the keys forward, generate, call")
        return CallSpec("forward")
    kind = kinds[0]
    dims = _parse_sizes(raw.get("dims"), (*where, "dims"), declared, report)
    content, here = raw[kind], (*where, kind)
    if kind == "call":
        return CallSpec(kind, dims=dims or {}, ref=content if check_ref(content, here, report) else None)
    reader = _Reader(report, folder, declared, dims, index)
    args, kwargs = _parse_arguments(content, here, reader)
    if kind == "generate" and args:
        report.value(here, "generate takes its arguments by name: write a mapping")
    return CallSpec(kind, args, kwargs, dims or {})


def _parse_arguments(raw: object, where: NodePath, reader: _Reader) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if raw is None:
        return (), {}
    if isinstance(raw, list):
        return tuple(reader.value(item, (*where, i)) for i, item in enumerate(raw)), {}
    if not isinstance(raw, dict):
        reader.report.value(
            where, f"expected arguments by name (a mapping) or by position (a list), got {describe(raw)}"
        )
        return (), {}
    if raw and set(raw) <= {"args", "kwargs"}:
        args, kwargs = raw.get("args") or [], raw.get("kwargs") or {}
        if not isinstance(args, list):
            reader.report.value((*where, "args"), f"expected a list, got {describe(args)}")
            args = []
        if not isinstance(kwargs, dict):
            reader.report.value((*where, "kwargs"), f"expected a mapping, got {describe(kwargs)}")
            kwargs = {}
        return (
            tuple(reader.value(item, (*where, "args", i)) for i, item in enumerate(args)),
            _by_name(kwargs, (*where, "kwargs"), reader),
        )
    return (), _by_name(raw, where, reader)


def _by_name(raw: dict[Any, Any], where: NodePath, reader: _Reader) -> dict[str, Any]:
    kwargs = {}
    for key, value in raw.items():
        if not isinstance(key, str) or not key.isidentifier():
            reader.report.key((*where, key), f"{key!r} is not an argument name")
        else:
            kwargs[key] = reader.value(value, (*where, key))
    return kwargs


def _parse_sizes(raw: object, where: NodePath, declared: set[str], report: Report) -> dict[str, int] | None:
    """The sizes that a call gives to the declared dims, None if any is wrong."""
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        report.value(where, f"expected a mapping such as {{batch: 2}}, got {describe(raw)}")
        return None
    sizes: dict[str, int] = {}
    wrong = False
    for name, size in raw.items():
        if name not in declared:
            hint = suggest(name, declared) or ": declare it in observe.dims"
            report.key((*where, name), f"unknown dim {name!r}{hint}")
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            report.value((*where, name), f"expected a size (an integer, 0 or more), got {describe(size)}")
            wrong = True
        else:
            sizes[name] = size
    return None if wrong else sizes


def parse_missing(raw: object, where: NodePath, folder: Path, report: Report) -> dict[str, TensorSpec]:
    """``observe.value_if_missing``: argument name -> tensor. Its dims are resolved call by call, later."""
    if not isinstance(raw, dict):
        report.value(where, f"expected a mapping of argument names to tensors, got {describe(raw)}")
        return {}
    reader = _Reader(report, folder, None, None, 0)
    found = {}
    for name, text in raw.items():
        here = (*where, name)
        if not isinstance(name, str) or not name.isidentifier():
            report.key(here, f"{name!r} is not an argument name")
        elif not isinstance(text, str) or not looks_like_tensor(text):
            report.value(here, f"expected a tensor such as 'int64[batch, seq] = 1', got {describe(text)}")
        elif (tensor := reader.tensor(text, here)) is not None:
            found[name] = tensor
    return found
