"""Arguments of a call by name, whatever way they were passed, and back to a call."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..keypaths import key_text, text_key

__all__ = ["CallSignature"]

#: Old name -> new name of an argument that transformers renamed (accepted under the old name until 5.40).
_RENAMED = {"past_key_values": "cache"}


def _of_transformers(method: Callable[..., Any]) -> bool:
    return str(getattr(inspect.unwrap(method), "__module__", "")).startswith("transformers.")


def _signature(method: Callable[..., Any]) -> inspect.Signature:
    if isinstance(method, torch.ScriptMethod):
        return _of_schema(method.schema)
    try:
        return inspect.signature(method)
    except (TypeError, ValueError, OSError) as error:
        raise ValueError(
            f"the signature of {method!r} cannot be read ({error}): observe a module whose forward names the "
            "arguments and calls this one"
        ) from error


def _of_schema(schema: Any) -> inspect.Signature:
    """Signature of a method of a scripted or traced module: Python sees a function without one."""
    parameters = []
    for argument in schema.arguments[1:]:  # without the module itself
        name = re.sub(r"\W", "_", argument.name)
        kind = (
            inspect.Parameter.KEYWORD_ONLY
            if argument.kwarg_only
            else inspect.Parameter.POSITIONAL_OR_KEYWORD
            if name == argument.name
            else inspect.Parameter.POSITIONAL_ONLY
        )
        default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name, kind, default=default))
    return inspect.Signature(parameters)


@dataclass(frozen=True)
class CallSignature:
    """The signature of an observed method.

    Attributes
    ----------
    names:
        Parameters in order, without variadic ones.
    positional_only:
        Those of `names` that can only be passed by position.
    defaults:
        Default values, of the parameters that have one.
    var_positional, var_keyword:
        Name of ``*args`` and ``**kwargs``, ``None`` if there is none.
    renames:
        Whether the method renames old names of arguments: methods of transformers do.
    """

    names: tuple[str, ...]
    positional_only: tuple[str, ...]
    defaults: Mapping[str, Any]
    var_positional: str | None
    var_keyword: str | None
    before_variadic: tuple[str, ...]
    source: inspect.Signature
    renames: bool = False

    @classmethod
    def of(cls, method: Callable[..., Any]) -> CallSignature:
        """Signature of a bound method (decorators that keep ``__wrapped__`` are looked through).

        Raises
        ------
        ValueError
            It cannot be read.
        """
        signature = _signature(method)
        names: list[str] = []
        positional_only: list[str] = []
        before: list[str] = []
        defaults: dict[str, Any] = {}
        var_positional = var_keyword = None
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                var_positional = parameter.name
                before = list(names)
            elif parameter.kind is parameter.VAR_KEYWORD:
                var_keyword = parameter.name
            else:
                names.append(parameter.name)
                if parameter.kind is parameter.POSITIONAL_ONLY:
                    positional_only.append(parameter.name)
                if parameter.default is not parameter.empty:
                    defaults[parameter.name] = parameter.default
        return cls(
            tuple(names),
            tuple(positional_only),
            defaults,
            var_positional,
            var_keyword,
            tuple(before),
            signature,
            _of_transformers(method),
        )

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name in signature order; ``*args`` become ``args_0``, ``args_1``; extras come last,
        as `extra_name` names them.

        Raises
        ------
        TypeError
            The arguments do not fit the signature.
        """
        if self.renames and self.var_keyword is not None:
            for old, new in _RENAMED.items():
                if old in kwargs and new in self.names and old not in self.names and new not in kwargs:
                    kwargs = {new if k == old else k: v for k, v in kwargs.items()}
        bound = self.source.bind(*args, **kwargs).arguments
        arguments: dict[str, Any] = {}
        for name in self.source.parameters:
            if name not in bound:
                continue
            if name == self.var_positional:
                arguments.update({self._item(i): value for i, value in enumerate(bound[name])})
            elif name == self.var_keyword:
                # In sorted order: the order of extra keywords is the caller's whim.
                arguments.update({self.extra_name(k): bound[name][k] for k in sorted(bound[name])})
            else:
                arguments[name] = bound[name]
        return arguments

    @property
    def _suffix(self) -> str:
        suffix = "_by_name"
        while any(name.endswith(suffix) for name in self.names):
            suffix += "_"
        return suffix

    def _clashes(self, name: str) -> bool:
        """Whether an extra keyword is called like what goes by position, or like another such keyword."""
        suffix = self._suffix
        while name.endswith(suffix):
            name = name.removesuffix(suffix)
        if self.var_positional is not None and re.fullmatch(rf"{self.var_positional}_\d+_*", name):
            return True
        return name in self.positional_only

    @property
    def clashing(self) -> bool:
        """Whether an extra keyword may be called like what goes by position."""
        return self.var_keyword is not None and bool(self.positional_only or self.var_positional)

    def extra_name(self, name: str) -> str:
        """Name, and root of paths, of a keyword that ``**kwargs`` catches; no two share one.

        ``a`` is ``a_by_name`` where a parameter ``a`` goes by position; a dot is none between parts of a
        path.
        """
        return name + self._suffix if self._clashes(name) else key_text(name)

    def by_name(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments under the names that `bind` gives them."""
        known = set(self.names) - set(self.positional_only)
        return {name if name in known else self.extra_name(name): value for name, value in kwargs.items()}

    def known_as(self, name: str) -> str:
        """The name that `bind` gives to what a person calls `name`."""
        return name if name in self.names or self._clashes(name) else key_text(name)

    def spelled(self, name: str) -> str:
        """The inverse of `extra_name`, for a name that `bind` gave."""
        if name in self.names:
            return name
        if self._clashes(name):
            return name.removesuffix(self._suffix)
        return str(text_key(name))

    def _item(self, index: int) -> str:
        """Name of one of ``*args``: ``args_0``, unless a parameter is called that."""
        name = f"{self.var_positional}_{index}"
        while name in self.names:
            name += "_"
        return name

    def positions(self, count: int) -> list[str]:
        """Names of the first `count` positions, fewer if there are fewer (keyword-only ones have none)."""
        names = [
            parameter.name
            for parameter in self.source.parameters.values()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        if self.var_positional is not None:
            names += [self._item(i) for i in range(count - len(names))]
        return names[:count]

    def call(self, arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inverse of `bind`: ``(args, kwargs)`` to call the method with.

        Raises
        ------
        TypeError
            A parameter that goes by position and has no default is missing before another one.
        """
        rest = dict(arguments)
        args: list[Any] = []
        for name in self.before(rest):
            if name not in rest and name not in self.defaults:
                raise TypeError(
                    f"missing a required argument: {name!r}, which can only be passed by position"
                )
            args.append(rest.pop(name) if name in rest else self.defaults[name])
        args.extend(rest.pop(name) for name in self.items(rest))
        return tuple(args), {self.spelled(name): value for name, value in rest.items()}

    def before(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """The parameters before ``*args`` that go by position in a call with `arguments`."""
        if self.items(arguments):
            # Once there are *args, everything before them is positional too.
            return self.before_variadic
        last = [place for place, name in enumerate(self.positional_only, 1) if name in arguments]
        # Ascending; dynamo (strict mode) does not trace `max(..., default=...)`.
        return self.positional_only[: last[-1] if last else 0]

    def items(self, arguments: Collection[str]) -> list[str]:
        """Names of what ``*args`` caught, in order."""
        if self.var_positional is None:
            return []
        stem = re.compile(rf"{self.var_positional}_(\d+)_*")
        found = {int(match[1]): name for name in arguments if (match := stem.fullmatch(name))}
        return [found[index] for index in sorted(found) if found[index] == self._item(index)]
