"""One line of text for any value: ``dict(ids:T7s2x5,cache:DynamicCache(key_cache=#1[T1s2x1x3x8],...))``.

``T`` is a torch tensor and ``A`` a numpy array, followed by the number of the ONNX element type (1 float32,
7 int64, 10 float16, 16 bfloat16) and ``s`` with the shape or ``r`` with the rank. ``#3[...]`` is a list of 3.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from .caches import is_cache

__all__ = ["string_type"]

#: torch dtype name -> onnx.TensorProto.DataType.
_ONNX = {
    "float32": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7, "str": 8, "bool": 9,
    "float16": 10, "float64": 11, "uint32": 12, "uint64": 13, "complex64": 14, "complex128": 15,
    "bfloat16": 16, "float8_e4m3fn": 17, "float8_e4m3fnuz": 18, "float8_e5m2": 19, "float8_e5m2fnuz": 20,
}  # fmt: skip

#: Containers with at least this many items show the first only.
_LONG = 20

_NAMES = {bool: "bool", int: "int", float: "float", complex: "complex", str: "str"}


@dataclasses.dataclass(frozen=True)
class _Style:
    shape: bool
    min_max: bool
    device: bool


def string_type(
    value: Any, with_shape: bool = False, with_min_max: bool = False, with_device: bool = False
) -> str:
    """Describe `value`; never raises, whatever it holds.

    Parameters
    ----------
    with_shape:
        Shapes of tensors (``T1s2x6``) instead of ranks (``T1r2``).
    with_min_max:
        Values of numbers (``int=5``), and ``[min,max:Amean]`` after tensors, ``N1nans`` added for NaN.
    with_device:
        Prefix ``C`` (CPU) or ``G`` before torch tensors.
    """
    return _text(value, _Style(with_shape, with_min_max, with_device))


def _text(value: Any, style: _Style) -> str:
    try:
        return _of(value, style)
    except Exception:  # a description that raises hides the error it was made for
        return type(value).__name__


def _of(value: Any, style: _Style) -> str:
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return _tensor(value, style)
    if isinstance(value, (np.ndarray, np.generic)):
        return _array(np.asarray(value), style)
    kind = type(value)
    if kind in _NAMES:
        return f"{_NAMES[kind]}={value}" if style.min_max and kind is not str else _NAMES[kind]
    if kind is slice:
        return "slice"
    if isinstance(value, type) and not isinstance(value, torch.export.Dim):
        return value.__name__
    dim = _dim(value)
    if dim:
        return dim
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"{kind.__name__}"
    return _container(value, style)


def _container(value: Any, style: _Style) -> str:
    kind = type(value)
    if kind.__name__ == "CacheKeyValue":
        return _keys_and_values(kind.__name__, value.key_cache or [], value.value_cache or [], style)
    if hasattr(value, "self_attention_cache"):
        names = ("self_attention_cache", "cross_attention_cache")
        return f"{kind.__name__}({', '.join(f'{n}={_text(getattr(value, n), style)}' for n in names)})"
    if is_cache(value):
        return _cache(value, style)
    if isinstance(value, (set, frozenset)):
        return "{" + ",".join(sorted(_text(item, style) for item in value)) + "}"
    if hasattr(value, "_fields") and isinstance(value, tuple):
        items = zip(getattr(value, "_fields"), value, strict=True)  # noqa: B009
        return f"{kind.__name__}({','.join(f'{name}:{_text(item, style)}' for name, item in items)})"
    if isinstance(value, tuple):
        return _sequence(value, "()", style)
    if isinstance(value, list):
        return _sequence(value, "[]", style)
    if isinstance(value, dict):
        return _dict(value, style)
    if dataclasses.is_dataclass(value):
        fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
        return f"{kind.__name__}({','.join(f'{n}:{_text(v, style)}' for n, v in fields if v is not None)})"
    if kind.__name__ == "OrtValue":
        return _ort_value(value, style)
    return kind.__name__


def _shape(dtype: str, shape: Any, style: _Style) -> str:
    code = _ONNX.get(dtype, dtype)
    return f"{code}s{'x'.join(map(str, shape))}" if style.shape else f"{code}r{len(shape)}"


def _tensor(value: torch.Tensor, style: _Style) -> str:
    prefix = ("C" if value.device.type == "cpu" else "G") if style.device else ""
    fake = isinstance(value, torch._subclasses.FakeTensor)
    text = (
        f"{prefix}{'F' if fake else 'T'}{_shape(str(value.dtype).removeprefix('torch.'), value.shape, style)}"
    )
    if not style.min_max or fake or value.device.type == "meta":
        return text
    if value.is_complex():
        value = value.abs()
    return text + _range(value.detach().cpu().to(torch.float64).numpy())


def _array(value: np.ndarray[Any, Any], style: _Style) -> str:
    name = "str" if value.dtype.kind in "US" else str(value.dtype)
    text = f"A{_shape(name, value.shape, style)}"
    if not style.min_max or value.dtype.kind not in "biufc":
        return text
    return text + _range((np.abs(value) if value.dtype.kind == "c" else value).astype(np.float64))


def _range(numbers: np.ndarray[Any, Any]) -> str:
    if numbers.size == 0:
        return "[empty]"
    nans = int(np.isnan(numbers).sum())
    numbers = numbers[~np.isnan(numbers)]
    tail = f"N{nans}nans" if nans else ""
    if numbers.size == 0:
        return f"[{tail}]"
    with np.errstate(invalid="ignore"):
        return f"[{float(numbers.min())},{float(numbers.max())}:A{float(numbers.mean())}{tail}]"


def _dim(value: Any) -> str:
    name = type(value).__name__
    if name == "_DimHint":
        return str(value.type.name)
    if name in ("_DerivedDim", "DerivedDim") or (
        isinstance(value, torch.export.Dim) and hasattr(value, "root")
    ):
        return "DerivedDim"
    return f"Dim({value.__name__})" if isinstance(value, torch.export.Dim) else ""


def _sequence(value: Any, brackets: str, style: _Style) -> str:
    if len(value) >= _LONG:
        return f"#{len(value)}{brackets[0]}{_text(value[0], style)},...{brackets[1]}"
    items = ",".join(_text(item, style) for item in value)
    if brackets == "[]":
        return f"#{len(value)}[{items}]"
    return f"({items},)" if len(value) == 1 else f"({items})"


def _dict(value: dict[Any, Any], style: _Style) -> str:
    kind = type(value)
    if not value and kind is dict:
        return "{}"
    if kind is dict and all(
        isinstance(key, int) and not isinstance(key, bool) and (isinstance(item, str) or _dim(item))
        for key, item in value.items()
    ):
        # The dynamic shape of one tensor.
        rows = (f"{k}:DYN({v})" if isinstance(v, str) else f"{k}:{_dim(v)}" for k, v in value.items())
        return "{" + ",".join(rows) + "}"
    name = "dict" if kind is dict else kind.__name__
    return f"{name}({','.join(f'{key}:{_text(item, style)}' for key, item in value.items())})"


def _keys_and_values(name: str, keys: Any, values: Any, style: _Style) -> str:
    def row(tensors: Any) -> str:
        return f"#{len(tensors)}[{','.join(_text(tensor, style) for tensor in tensors)}]"

    return f"{name}(key_cache={row(keys)}, value_cache={row(values)})"


def _cache(cache: Any, style: _Style) -> str:
    name, layers = type(cache).__name__, getattr(cache, "layers", ())
    if isinstance(layers, dict):
        parts = [f"{key}:{_layer(layer, style)}" for key, layer in layers.items()]
    elif all(type(layer).__name__ in ("DynamicLayer", "StaticLayer") for layer in layers):
        filled = [layer for layer in layers if isinstance(layer.keys, torch.Tensor)]
        if hasattr(cache, "layers"):
            rest = _held(cache, ("layers",), style)
            text = _keys_and_values(name, [x.keys for x in filled], [x.values for x in filled], style)
            return f"{text[:-1]}{''.join(f', {part}' for part in rest)})"
        parts = []
    else:
        parts = [_layer(layer, style) for layer in layers]
    return f"{name}({', '.join([*parts, *_held(cache, ('layers',), style)])})"


def _layer(layer: Any, style: _Style) -> str:
    parts = [
        _text(getattr(layer, name), style)
        for name in ("keys", "values")
        if isinstance(getattr(layer, name, None), torch.Tensor)
    ]
    rest = _held(layer, ("keys", "values"), style)
    return f"{type(layer).__name__}({', '.join([*parts, *rest])})"


def _held(value: Any, but: tuple[str, ...], style: _Style) -> list[str]:
    """``name=text`` of the attributes that hold tensors, counters aside."""
    return [
        f"{name}={_text(item, style)}"
        for name, item in vars(value).items()
        if name not in but and _has_tensor(item)
    ]


def _has_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() > 1
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(_has_tensor(item) for item in value)


def _ort_value(value: Any, style: _Style) -> str:
    if hasattr(value, "_ortvalue"):
        value = value._ortvalue
    if not value.has_value():
        return "OV(<novalue>)"
    if not value.is_tensor():
        return "OV(NOTENSOR)"
    if style.min_max:
        return f"OV({_array(value.numpy(), style)})"
    code, shape = value.element_type(), list(value.shape())
    return f"OV{code}s{'x'.join(map(str, shape))}" if style.shape else f"OV{code}r{len(shape)}"
