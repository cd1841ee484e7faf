"""`max_diff`: how far two nested results are apart, in one dict of numbers.

No verdict and no exception for a mismatch of structure: that is a difference of ``inf``. `compare` judges.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..pytrees.caches import flatten_cache, is_cache
from ..pytrees.make import CacheKeyValue
from ..pytrees.paths import same_constant

__all__ = ["max_diff", "string_diff"]

#: Thresholds of ``hist=True``.
_THRESHOLDS = (0.0, 0.0001, 0.001, 0.01, 0.1, 1.0, 10.0)

Diff = dict[str, Any]


def max_diff(
    expected: Any,
    got: Any,
    verbose: int = 0,
    begin: int = 0,
    end: int = -1,
    hist: bool | Sequence[float] | None = None,
    skip_none: bool = False,
    allow_unique_tensor_with_list_of_one_element: bool = True,
) -> Diff:
    """Compare two results: tensors, arrays, numbers, containers, model outputs, caches.

    Parameters
    ----------
    verbose:
        Print the difference of every pair of tensors.
    begin, end:
        The first and the last item (not included, -1: all of them) of the outermost sequences to be compared.
    hist:
        Thresholds (``True``: the usual ones): ``rep`` counts the elements whose difference exceeds each.
    skip_none:
        Leave out a ``None`` on one side and what it stands beside.
    allow_unique_tensor_with_list_of_one_element:
        Whether a tensor may be compared with a list or tuple that holds one.

    Returns
    -------
    dict
        ``abs`` and ``rel``: largest absolute and relative difference (``rel`` over elements that `expected`
        has nonzero); ``sum``: sum of absolute differences; ``n``: number of elements; ``dnan``: elements
        that are NaN on one side only (``abs`` is ``inf`` then). Of tensors also ``argm``: position of the
        largest difference, after the positions of its containers; ``dev``: pairs on different devices;
        ``rep``: see `hist`. ``ddtype`` is there where dtypes differ: in how many pairs.

    Raises
    ------
    TypeError
        ``None`` stands beside something else, without `skip_none`.
    """
    thresholds = _THRESHOLDS if hist is True else tuple(hist or ())
    walk = _Walk(verbose, thresholds, skip_none, allow_unique_tensor_with_list_of_one_element)
    return walk.compare(expected, got, (begin, end), ())


def _zero() -> Diff:
    return {"abs": 0.0, "rel": 0.0, "sum": 0.0, "n": 0, "dnan": 0}


def _infinite() -> Diff:
    return {"abs": math.inf, "rel": math.inf, "sum": math.inf, "n": 0, "dnan": 0}


def _merge(total: Diff, new: Diff) -> Diff:
    if "argm" in new and (new["abs"] > total["abs"] or "argm" not in total):
        total["argm"] = new["argm"]
    for key in ("abs", "rel"):
        total[key] = max(total[key], new[key])
    for key in ("sum", "n", "dnan"):
        total[key] += new[key]
    for key in ("dev", "ddtype"):
        if key in new:
            total[key] = total.get(key, 0) + new[key]
    if "rep" in new:
        counts = total.setdefault("rep", dict.fromkeys(new["rep"], 0))
        for name, count in new["rep"].items():
            counts[name] = counts.get(name, 0) + count
    return total


def _is_array(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray, np.generic))


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex))


def _as_tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, (np.ndarray, np.generic)):
        # A copy: a tensor must not share memory with an array that may be read-only.
        return torch.from_numpy(np.array(value))
    return torch.as_tensor(value)


def _numbers_only(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_numbers_only(item) for item in value)
    return _is_number(value)


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """(key, child) of a container, ``None`` for anything else."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if isinstance(value, CacheKeyValue):
        return list(enumerate(value.aslist()))
    if hasattr(value, "self_attention_cache"):
        return [(0, value.self_attention_cache), (1, value.cross_attention_cache)]
    if is_cache(value):
        return list(enumerate(flatten_cache(value)[0]))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def _is_cache(value: Any) -> bool:
    return is_cache(value) or isinstance(value, CacheKeyValue)


def _interleaved(value: Any) -> Any:
    """``k0, v0, k1, ...`` of ``(keys, values)``; any other value as it is."""
    if (
        isinstance(value, (list, tuple))
        and len(value) == 2
        and all(isinstance(x, (list, tuple)) for x in value)
    ):
        keys, values = value
        if len(keys) == len(values):
            return [tensor for pair in zip(keys, values, strict=True) for tensor in pair]
    return value


@dataclasses.dataclass
class _Walk:
    verbose: int
    thresholds: tuple[float, ...]
    skip_none: bool
    unwrap: bool

    def compare(self, expected: Any, got: Any, limits: tuple[int, int], path: tuple[Any, ...]) -> Diff:
        if expected is None and got is None:
            return _zero()
        if expected is None or got is None:
            if self.skip_none:
                return _zero()
            there = got if expected is None else expected
            raise TypeError(
                f"None beside a {type(there).__name__}{f' at {path}' if path else ''}: see skip_none"
            )
        if (_is_array(expected) or _is_number(expected)) and (_is_array(got) or _is_number(got)):
            return self._arrays(expected, got, path)
        if _is_array(expected) and isinstance(got, (list, tuple)):
            return self._array_and_list(expected, got, limits, path, False)
        if _is_array(got) and isinstance(expected, (list, tuple)):
            return self._array_and_list(got, expected, limits, path, True)
        if _is_cache(expected) != _is_cache(got):
            expected, got = _interleaved(expected), _interleaved(got)
        first, second = _items(expected), _items(got)
        if first is None or second is None:
            same = first is None and second is None and same_constant(expected, got)
            return _zero() if same else _infinite()
        return self._containers(expected, got, first, second, limits, path)

    def _containers(
        self,
        expected: Any,
        got: Any,
        first: list[tuple[Any, Any]],
        second: list[tuple[Any, Any]],
        limits: tuple[int, int],
        path: tuple[Any, ...],
    ) -> Diff:
        if isinstance(expected, Mapping) and isinstance(got, Mapping):
            found = dict(second)
            if self.skip_none:
                first = [
                    (key, item) for key, item in first if item is not None and found.get(key) is not None
                ]
            elif {key for key, _ in first} != set(found):
                return _infinite()
            second = [(key, found[key]) for key, _ in first]
        elif self.skip_none and len(first) != len(second):
            first = [(key, item) for key, item in first if item is not None]
            second = [(key, item) for key, item in second if item is not None]
        if len(first) != len(second):
            return _infinite()
        begin, end = limits
        stop = len(first) if end == -1 else end
        total = _zero()
        pairs = list(zip(first, second, strict=True))[begin:stop]
        for (key, one), (_, other) in pairs:
            _merge(total, self.compare(one, other, (0, -1), (*path, key)))
        return total

    def _array_and_list(
        self, array: Any, items: Any, limits: tuple[int, int], path: tuple[Any, ...], swapped: bool
    ) -> Diff:
        if self.unwrap and len(items) == 1 and not _is_number(items[0]):
            pair = (items[0], array) if swapped else (array, items[0])
            return self.compare(*pair, limits, path)
        if not _numbers_only(items):
            return _infinite()
        try:
            tensor = torch.as_tensor(items)
        except (TypeError, ValueError):
            # Rows of different lengths.
            return _infinite()
        # A list of numbers has no dtype of its own to compare.
        tensor = tensor.to(_as_tensor(array).dtype)
        return self._arrays(tensor, array, path) if swapped else self._arrays(array, tensor, path)

    def _arrays(self, expected: Any, got: Any, path: tuple[Any, ...]) -> Diff:
        a, b = _as_tensor(expected), _as_tensor(got)
        if a.shape != b.shape:
            return _infinite()
        found = _zero()
        found["dev"] = int(a.device != b.device and _is_array(expected) and _is_array(got))
        if _is_array(expected) and _is_array(got) and a.dtype != b.dtype:
            found["ddtype"] = 1
        a, b = a.cpu(), b.cpu()
        found["n"] = a.numel()
        if a.numel():
            self._numbers(a, b, found, path)
        elif self.thresholds:
            found["rep"] = {f">{threshold}": 0 for threshold in self.thresholds}
        if self.verbose:
            print(f"[max_diff] {path or ''} {string_diff(found)}")
        return found

    def _numbers(self, a: torch.Tensor, b: torch.Tensor, found: Diff, path: tuple[Any, ...]) -> None:
        wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
        # A difference of large integers is not that of their float64.
        exact = not (a.is_floating_point() or a.is_complex() or b.is_floating_point() or b.is_complex())
        different = a != b if exact and a.dtype == b.dtype else None
        a, b = a.to(wide), b.to(wide)
        nan_a, nan_b = torch.isnan(a), torch.isnan(b)
        one_nan = nan_a ^ nan_b
        same = (a == b) | (nan_a & nan_b)
        error = torch.where(same, torch.zeros((), dtype=torch.float64), (a - b).abs())
        if different is not None:
            error = torch.where(different & (error == 0), torch.ones((), dtype=torch.float64), error)
        error = torch.nan_to_num(error, nan=math.inf, posinf=math.inf)
        size = a.abs()
        relative = error / torch.where(size > 0, size, torch.ones((), dtype=torch.float64))
        relative = torch.where(
            (size > 0) | torch.isinf(error), relative, torch.zeros((), dtype=torch.float64)
        )
        # inf / inf: an expected infinity that is not met.
        relative = torch.nan_to_num(relative, nan=math.inf, posinf=math.inf)
        worst = int(error.flatten().argmax())
        position = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), a.shape)) if a.dim() else ()
        found.update(
            abs=float(error.max()),
            rel=float(relative.max()),
            sum=float(error.sum()),
            dnan=int(one_nan.sum()),
            argm=(*path, *position),
        )
        if self.thresholds:
            found["rep"] = {f">{limit}": int((error > limit).sum()) for limit in self.thresholds}


def string_diff(diff: Mapping[str, Any], ratio: bool = False) -> str:
    """One line for the result of `max_diff`.

    Parameters
    ----------
    ratio:
        Show the counts of ``rep`` as shares of ``n``.
    """
    parts = [f"abs={diff['abs']:.6g}", f"rel={diff['rel']:.6g}"]
    if diff.get("n"):
        parts.append(f"n={diff['n']}")
    parts += [f"{name}={diff[name]}" for name in ("dnan", "ddtype", "dev") if diff.get(name)]
    if diff.get("argm"):
        parts.append(f"argm={diff['argm']}")
    for name, count in diff.get("rep", {}).items():
        if count:
            parts.append(
                f"{name}: {count / diff['n']:.3g}" if ratio and diff.get("n") else f"{name}: {count}"
            )
    return ", ".join(parts)
