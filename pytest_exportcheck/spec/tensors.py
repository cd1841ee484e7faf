"""The one-line language for tensors: ``dtype[dims] fill``. Parsing and checking only; no torch here.

::

    int64[batch, seq] < 256            integers in [0, 256)
    int32[3] in 5..9                   integers in [5, 9)
    float32[2, 3] in -1..1             floats, uniform between -1 and 1
    float32[2, 3]                      floats from normal(0, 1); integers in [0, 10); booleans
    int64[batch, past + seq] = 1       one value everywhere: a number, true, false, inf, -inf, nan
    int64[6] arange                    0, 1, 2, ... in row-major order
    float32[2, 2] values [[1, 2], [3, 4]]
    int64[2, 9] padded left 2          ones, but row 0 begins with 2 zeros (`right`: ends with them)
    float32[2, 4] from data.npz:key    an array of a .npz or .safetensors file, next to the spec
    float32[2, 4] by make.py:image     a callable given `shape`, `dtype`, `generator` by keyword

`float32` and `float` mean "the dtype of the case", because one spec is checked with several dtypes and
the model is cast as well; ``float32![2, 3]`` stays float32. Every other dtype is taken as written. A dim
is an integer, a name, or a sum or difference of these; ``float32[]`` has no axis.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..plurals import counted
from .names import choices

__all__ = [
    "DTYPES",
    "Arange",
    "Below",
    "Between",
    "By",
    "Constant",
    "Dim",
    "Fill",
    "FromFile",
    "Padded",
    "Random",
    "TensorSpec",
    "TensorSyntaxError",
    "Values",
    "looks_like_tensor",
    "parse_tensor",
]

#: Integer dtypes and the first value that no longer fits.
_INTEGERS = {"int64": 2**63, "int32": 2**31, "int16": 2**15, "int8": 2**7, "uint8": 2**8}
_FLOATS = ("float", "float32", "float16", "bfloat16", "float64")

#: The dtypes that a description may name.
DTYPES = (*_FLOATS, *_INTEGERS, "bool", "complex64")

_HEAD = re.compile(r"(?P<dtype>[a-z]+[0-9]*)(?P<exact>!?)\[")
_NUMBER = r"[-+]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_TOKEN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[-+]")
_RANGE = re.compile(rf"({_NUMBER})\s*\.\.\s*({_NUMBER})\Z")
_FILLS = ("< high", "in low..high", "= value", "arange", "values [...]", "padded left|right N")
_FILL_HELP = f"a fill is one of: nothing, {', '.join(_FILLS)}, from FILE:KEY, by FILE.py:CALLABLE"

#: No axis of an example is this long; a typing mistake must not take the machine's memory.
_MAX_ELEMENTS = 2**31


class TensorSyntaxError(ValueError):
    """A description cannot be read. `offset` counts characters from the start of the text."""

    def __init__(self, message: str, offset: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.offset = offset


@dataclass(frozen=True)
class Dim:
    """The size of one axis: ``3``, ``seq``, ``past + seq``, ``seq - 1``.

    Attributes
    ----------
    text:
        As written, with single spaces around the signs.
    terms:
        Pairs of sign (1 or -1) and integer or name.
    offset:
        Where it stands in the description.
    """

    text: str
    terms: tuple[tuple[int, int | str], ...]
    offset: int = field(default=0, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The names in it, in order."""
        return tuple(term for _, term in self.terms if isinstance(term, str))

    def size(self, sizes: Mapping[str, int]) -> int:
        """Its value; `TensorSyntaxError` if a name has none, or the result is negative."""
        for name in self.names:
            if name not in sizes:
                raise TensorSyntaxError(f"dim {name!r} has no value", self.offset)
        total = sum(sign * (sizes[term] if isinstance(term, str) else term) for sign, term in self.terms)
        if total < 0:
            raise TensorSyntaxError(f"dim '{self.text}' is {total}: a size cannot be negative", self.offset)
        return total


@dataclass(frozen=True)
class Random:
    """Floats from normal(0, 1), integers uniform in [0, 10), booleans."""


@dataclass(frozen=True)
class Below:
    """Integers uniform in [0, high)."""

    high: int


@dataclass(frozen=True)
class Between:
    """Floats uniform between low and high, integers uniform in [low, high)."""

    low: float
    high: float


@dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float


@dataclass(frozen=True)
class Arange:
    """0, 1, 2, ... in row-major order."""


@dataclass(frozen=True)
class Values:
    """The values themselves, in row-major order."""

    values: tuple[float, ...]


@dataclass(frozen=True)
class Padded:
    """Ones, except `count` zeros on one side of row 0 along the last axis: a mask of a padded batch."""

    side: str
    count: int


@dataclass(frozen=True)
class FromFile:
    """An array of a .npz or .safetensors file."""

    file: str
    key: str


@dataclass(frozen=True)
class By:
    """Whatever a user's callable returns."""

    ref: str


Fill = Random | Below | Between | Constant | Arange | Values | Padded | FromFile | By


@dataclass(frozen=True)
class TensorSpec:
    """One parsed description.

    Attributes
    ----------
    text:
        As written.
    dtype:
        One of `DTYPES`.
    follows_case:
        Whether the tensor is cast to the dtype of the case (``float`` and ``float32`` without ``!``).
    dims:
        One per axis.
    fill:
        Where the values come from.
    folder:
        The spec's folder, against which files are resolved.
    """

    text: str
    dtype: str
    follows_case: bool
    dims: tuple[Dim, ...]
    fill: Fill
    folder: Path = field(default=Path(), compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The dim names used, each once, in order."""
        return tuple(dict.fromkeys(name for dim in self.dims for name in dim.names))

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape for these sizes; `TensorSyntaxError` if a name has none or a size is negative."""
        shape = tuple(dim.size(sizes) for dim in self.dims)
        if math.prod(shape) > _MAX_ELEMENTS:
            raise TensorSyntaxError(f"{math.prod(shape)} elements are too many")
        self._check_fill(shape)
        return shape

    def _check_fill(self, shape: tuple[int, ...]) -> None:
        count = math.prod(shape)
        shown = "[" + ", ".join(map(str, shape)) + "]"
        match self.fill:
            case Values(values) if len(values) != count:
                raise TensorSyntaxError(
                    f"{counted(len(values), 'value')} for shape {shown}, which has "
                    f"{counted(count, 'element')}"
                )
            case Padded(_, zeros) if not shape or not shape[0]:
                raise TensorSyntaxError(f"'padded' needs at least one row, the shape is {shown}")
            case Padded(_, zeros) if zeros > shape[-1]:
                raise TensorSyntaxError(f"'padded' by {zeros} does not fit the last axis of {shown}")
            case Arange() if count > _INTEGERS.get(self.dtype, count):
                raise TensorSyntaxError(f"arange of {counted(count, 'element')} does not fit {self.dtype}")
            case _:
                pass


def looks_like_tensor(text: str) -> bool:
    """Whether `text` is meant as a tensor description (it may still be wrong)."""
    return _HEAD.match(text) is not None


def parse_tensor(text: str, folder: Path = Path()) -> TensorSpec:
    """Read one description; `TensorSyntaxError` tells the first fault and where it is."""
    head = _HEAD.match(text)
    if head is None:
        raise TensorSyntaxError(f"not a tensor description: {text!r} (expected dtype[dims] fill)")
    dtype, exact = head["dtype"], bool(head["exact"])
    if dtype not in DTYPES:
        raise TensorSyntaxError(f"unknown dtype {dtype!r}{choices(dtype, DTYPES)}")
    if exact and dtype == "float":
        raise TensorSyntaxError("'float' is the dtype of the case: write float32! for exactly float32")
    close = text.find("]", head.end())
    if close < 0:
        raise TensorSyntaxError("']' is missing after the dims", len(text))
    dims = _parse_dims(text[head.end() : close], head.end())
    rest = text[close + 1 :]
    start = close + 1 + len(rest) - len(rest.lstrip())
    fill = _parse_fill(rest.strip(), start, dtype)
    spec = TensorSpec(text, dtype, dtype in ("float", "float32") and not exact, dims, fill, folder)
    if not spec.names:
        spec.shape({})
    return spec


def _parse_dims(text: str, start: int) -> tuple[Dim, ...]:
    if not text.strip():
        return ()
    dims = []
    for part in text.split(","):
        dims.append(_parse_dim(part, start))
        start += len(part) + 1
    return tuple(dims)


def _parse_dim(text: str, start: int) -> Dim:
    begin = start + len(text) - len(text.lstrip())
    if not text.strip():
        raise TensorSyntaxError("a dim is missing between the commas", start)
    terms: list[tuple[int, int | str]] = []
    sign: int | None = 1
    position = 0
    while position < len(text.rstrip()):
        if text[position].isspace():
            position += 1
            continue
        token = _TOKEN.match(text, position)
        word = token.group() if token else ""
        if word in ("+", "-") and (sign is None or not terms):
            sign = 1 if word == "+" else -1
        elif word and word not in ("+", "-") and sign is not None:
            terms.append((sign, int(word) if word.isdigit() else word))
            sign = None
        else:
            raise TensorSyntaxError(
                f"{text.strip()!r} is not a dim: expected an integer, a name or a sum like 'past + seq'",
                start + position,
            )
        position += len(word)
    if sign is not None:
        raise TensorSyntaxError(f"dim {text.strip()!r} ends with a sign", begin)
    shown = "".join(f" {'+' if s > 0 else '-'} {t}" for s, t in terms)
    shown = shown[3:] if shown.startswith(" + ") else "-" + shown[3:]
    return Dim(shown, tuple(terms), begin)


def _parse_fill(text: str, start: int, dtype: str) -> Fill:
    if not text:
        return Random()
    for symbol in ("<", "="):
        if text.startswith(symbol):
            word, rest = symbol, text[1:]
            break
    else:
        match = re.match(r"[A-Za-z]+", text)
        word, rest = (match.group(), text[match.end() :]) if match else (text, "")
    at = start + len(word) + len(rest) - len(rest.lstrip())
    rest = rest.strip()
    if word == "<":
        return _parse_below(rest, at, start, dtype)
    if word == "=":
        return Constant(_number(rest, at, dtype))
    if word == "in":
        return _parse_between(rest, at, start, dtype)
    if word == "values":
        return _parse_values(rest, at, dtype)
    if word == "padded":
        return _parse_padded(rest, at)
    if word == "arange":
        if rest:
            raise TensorSyntaxError(f"unexpected {rest!r} after 'arange'", at)
        if dtype == "bool":
            raise TensorSyntaxError("'arange' is for numbers, not for bool", start)
        return Arange()
    if word == "from":
        file, colon, key = rest.rpartition(":")
        if not colon or not file or not key or not file.endswith((".npz", ".safetensors")):
            raise TensorSyntaxError("expected FILE.npz:KEY or FILE.safetensors:KEY after 'from'", at)
        return FromFile(file, key)
    if word == "by":
        file, colon, name = rest.rpartition(":")
        if not colon or not file or not name.isidentifier():
            raise TensorSyntaxError("expected FILE.py:CALLABLE or PACKAGE.MODULE:CALLABLE after 'by'", at)
        return By(rest)
    raise TensorSyntaxError(f"unknown fill {text!r}: {_FILL_HELP}", start)


def _parse_below(rest: str, at: int, start: int, dtype: str) -> Below:
    if dtype not in _INTEGERS:
        raise TensorSyntaxError(f"'< high' is for integers: for {dtype} write 'in low..high'", start)
    if not re.fullmatch(r"[0-9]{1,20}", rest) or not int(rest):
        raise TensorSyntaxError(f"expected a positive integer after '<', got {rest!r}", at)
    if int(rest) > _INTEGERS[dtype]:
        raise TensorSyntaxError(f"{rest} does not fit {dtype}", at)
    return Below(int(rest))


def _parse_between(rest: str, at: int, start: int, dtype: str) -> Between:
    if dtype in ("bool", "complex64"):
        raise TensorSyntaxError(f"'in low..high' is for integers and floats, not for {dtype}", start)
    match = _RANGE.match(rest)
    if match is None:
        raise TensorSyntaxError(f"expected low..high after 'in', got {rest!r}", at)
    low, high = _number(match[1], at, dtype), _number(match[2], at + match.start(2), dtype, end=True)
    if not low < high:
        raise TensorSyntaxError(f"the range {rest!r} is empty", at)
    return Between(low, high)


def _parse_padded(rest: str, at: int) -> Padded:
    match = re.match(r"(left|right)\s+([0-9]+)\Z", rest)
    if match is None:
        raise TensorSyntaxError(f"expected 'left N' or 'right N' after 'padded', got {rest!r}", at)
    return Padded(match[1], int(match[2]))


def _parse_values(rest: str, at: int, dtype: str) -> Values:
    if not rest.startswith("[") or not rest.endswith("]"):
        raise TensorSyntaxError(f"expected a list in brackets after 'values', got {rest!r}", at)
    depth, values, expects = 0, [], True
    # Brackets only group values for the reader; the dims give the shape.
    for token in re.finditer(r"[\[\],]|[^\[\],\s]+", rest):
        word, offset = token.group(), at + token.start()
        if word == "[":
            depth += 1
            expects = True
        elif word == "]":
            depth -= 1
            expects = False
            if depth < 0 or (depth == 0 and token.end() != len(rest)):
                raise TensorSyntaxError("unbalanced brackets after 'values'", offset)
        elif word == ",":
            if expects:
                raise TensorSyntaxError("a value is missing before ','", offset)
            expects = True
        else:
            if not expects:
                raise TensorSyntaxError("',' is missing between two values", offset)
            values.append(_number(word, offset, dtype))
            expects = False
    if depth:
        raise TensorSyntaxError("unbalanced brackets after 'values'", at)
    return Values(tuple(values))


def _number(text: str, at: int, dtype: str, end: bool = False) -> float:
    """A number that `dtype` can hold; `end` is for the end of a half-open range."""
    if dtype == "bool":
        if text not in ("true", "false"):
            raise TensorSyntaxError(f"expected true or false for bool, got {text!r}", at)
        return text == "true"
    if text in ("inf", "-inf", "nan"):
        if dtype in _INTEGERS:
            raise TensorSyntaxError(f"{dtype} cannot hold {text}", at)
        return float(text)
    if not re.fullmatch(_NUMBER, text):
        raise TensorSyntaxError(f"expected a number, got {text!r}", at)
    if dtype not in _INTEGERS:
        return float(text)
    if not re.fullmatch(r"[-+]?[0-9]+", text):
        raise TensorSyntaxError(f"expected an integer for {dtype}, got {text!r}", at)
    if len(text) > 20:
        raise TensorSyntaxError(f"{text} does not fit {dtype}", at)
    value, limit = int(text), _INTEGERS[dtype]
    if value >= limit + end or value < (0 if dtype == "uint8" else -limit):
        raise TensorSyntaxError(f"{text} does not fit {dtype}", at)
    return value
