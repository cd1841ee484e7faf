"""Verdict on numbers: two lists of (path, leaf), compared leaf by leaf; container types are ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from ..pytrees.paths import same_constant

__all__ = ["LeafComparison", "Tolerance", "Tolerances", "compare_leaf", "compare_leaves", "table"]

#: dtype -> (atol, rtol). For floats, atol is relative to the largest absolute value of the output (see
#: `Tolerances`): tiny random models have tiny outputs, and a fixed atol would hide every error in them. Over
#: 500 float32 runs of 57 families every right one was below 5e-6, the smallest real error was 1.5e-3.
_DEFAULTS: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-9, 1e-9),
    torch.float32: (1e-5, 1e-4),
    torch.float16: (4e-3, 1e-2),
    torch.bfloat16: (3e-2, 5e-2),
    torch.complex64: (1e-5, 1e-4),
    torch.complex128: (1e-9, 1e-9),
}

#: The default atol is not scaled below this share, nor above this multiple, of the value in `_DEFAULTS`. The
#: lower end leaves room for outputs that would be zero but for rounding.
_SCALE = (1e-3, 1e3)


@dataclass(frozen=True)
class Tolerance:
    """``|a - b| <= atol + rtol * |b|``."""

    atol: float
    rtol: float


@dataclass(frozen=True)
class Tolerances:
    """What a spec asks for.

    Attributes
    ----------
    atol, rtol:
        For every float output; ``None``: the default of its dtype, atol scaled to the size of the output.
    outputs:
        Pattern of paths (``logits``, ``cache.*``) -> ``{"atol": ..., "rtol": ...}``; the first match wins.
    computed_in:
        The dtype of the case. An output of a finer dtype was cast to it at the end (``logits.float()``) and
        is as exact as what it was computed from.
    """

    atol: float | None = None
    rtol: float | None = None
    outputs: Mapping[str, Mapping[str, float | None]] | None = None
    computed_in: torch.dtype | None = None

    def of(self, path: str, expected: torch.Tensor) -> Tolerance:
        """The tolerance for one output."""
        atol, rtol = self.atol, self.rtol
        for pattern, given in (self.outputs or {}).items():
            if fnmatchcase(path, pattern):
                atol = atol if given.get("atol") is None else given["atol"]
                rtol = rtol if given.get("rtol") is None else given["rtol"]
                break
        if not (expected.is_floating_point() or expected.is_complex()):
            return Tolerance(0.0, 0.0)
        known = [_DEFAULTS[dtype] for dtype in (expected.dtype, self.computed_in) if dtype in _DEFAULTS]
        default_atol, default_rtol = max(known, default=(1e-5, 1e-4))
        if atol is None:
            atol = default_atol * min(max(_size_of(expected), _SCALE[0]), _SCALE[1])
        return Tolerance(atol, default_rtol if rtol is None else rtol)


#: Elements beyond this multiple of the small ones are fill values (the -3e38 of masked logits), not the size
#: of the output: scaled by them, the tolerance would hide every error.
_FILL = 1e3

#: Elements that the size of an output is estimated from.
_SAMPLE = 100_000


def _size_of(tensor: torch.Tensor) -> float:
    """Largest absolute value of `tensor`, infinities, NaN and fill values left out; 0 if there is none."""
    flat = tensor.detach().flatten().abs()
    flat = flat.to(torch.float64)
    flat = flat[torch.isfinite(flat) & (flat > 0)]
    if not flat.numel():
        return 0.0
    # A fill value may be nearly everything (all but the top k): then the small ones below are no sample.
    while True:
        top = flat.max()
        below = flat[flat < top]
        if not below.numel() or top <= _FILL * below.max():
            break
        flat = below
    sample = flat[:: max(flat.numel() // _SAMPLE, 1)]
    small = sample.kthvalue(max(sample.numel() // 10, 1)).values
    return float(flat[flat <= _FILL * small].max())


@dataclass(frozen=True)
class LeafComparison:
    """Result for one output.

    Attributes
    ----------
    ok:
        Whether it is within the tolerance.
    reason:
        Why not, where it is no matter of numbers: ``shape 2x3 instead of 2x4``.
    max_abs, max_rel:
        Largest errors over positions that are finite on both sides.
    at:
        Index of the worst element.
    outside:
        Share of elements outside the tolerance.
    would_need:
        The atol, rtol kept, with which it would pass; ``None`` if no tolerance would help.
    """

    path: str
    ok: bool
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    reason: str = ""
    max_abs: float = 0.0
    max_rel: float = 0.0
    at: tuple[int, ...] = ()
    outside: float = 0.0
    would_need: float | None = None
    atol: float = 0.0
    rtol: float = 0.0
    note: str = ""

    def to_record(self) -> dict[str, Any]:
        """Plain builtins for the report."""
        return {
            "path": self.path,
            "ok": self.ok,
            "shape": list(self.shape) if self.shape is not None else None,
            "dtype": self.dtype,
            "reason": self.reason,
            "max_abs": self.max_abs,
            "max_rel": self.max_rel,
            "at": list(self.at),
            "outside": self.outside,
            "would_need": self.would_need,
            "atol": self.atol,
            "rtol": self.rtol,
            "note": self.note,
        }


def _shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) if len(shape) else "scalar"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex, str, bytes))


def compare_leaf(
    path: str, expected: Any, got: Any, tolerances: Tolerances, where: torch.Tensor | None = None
) -> LeafComparison:
    """Compare one output.

    Parameters
    ----------
    where:
        Boolean tensor of the shape of `expected`: positions that count; the others are reported in the note.
    """
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        return _compare_scalars(path, expected, got)
    expected, got = expected.detach().to("cpu"), got.detach().to("cpu")
    shape, dtype = tuple(expected.shape), _name(expected.dtype)
    if tuple(got.shape) != shape:
        reason = f"shape {_shape_text(got.shape)} instead of {_shape_text(shape)}"
        return LeafComparison(path, False, shape, dtype, reason)
    if got.dtype != expected.dtype:
        return LeafComparison(path, False, shape, dtype, f"dtype {_name(got.dtype)} instead of {dtype}")
    tolerance = tolerances.of(path, expected)
    if expected.numel() == 0:
        return LeafComparison(path, True, shape, dtype, atol=tolerance.atol, rtol=tolerance.rtol)
    if expected.is_floating_point() or expected.is_complex():
        return _compare_floats(path, expected, got, tolerance, where)
    return _compare_exact(path, expected, got, where)


def _compare_scalars(path: str, expected: Any, got: Any) -> LeafComparison:
    kind = type(expected).__name__
    if expected is None and got is None:
        return LeafComparison(path, True, None, "None")
    # A 0-d tensor of the same value is what an exporter makes of a Python number.
    if _is_number(expected) and isinstance(got, torch.Tensor) and got.dim() == 0:
        if isinstance(expected, float) and got.is_floating_point():
            # 0.1 as float32 is the nearest float32, not 0.1.
            expected = float(torch.tensor(expected, dtype=got.dtype))
        got = got.item()
    if _is_number(expected) and _is_number(got):
        same = type(expected) is type(got) and (
            expected == got or (isinstance(expected, float) and math.isnan(expected) and math.isnan(got))
        )
        return LeafComparison(path, same, None, kind, "" if same else f"{got!r} instead of {expected!r}")
    if expected is None or got is None or isinstance(expected, torch.Tensor) != isinstance(got, torch.Tensor):
        return LeafComparison(path, False, None, kind, f"{_kind(got)} instead of {_kind(expected)}")
    same = same_constant(expected, got)
    return LeafComparison(path, same, None, kind, "" if same else f"{got!r:.60} instead of {expected!r:.60}")


def _kind(value: Any) -> str:
    return f"a {_name(value.dtype)} tensor" if isinstance(value, torch.Tensor) else f"{value!r:.40}"


def _unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        index.append(flat % size)
        flat //= size
    return tuple(reversed(index))


def _compare_exact(
    path: str, expected: torch.Tensor, got: torch.Tensor, where: torch.Tensor | None
) -> LeafComparison:
    differs = expected != got
    ignored = ""
    if where is not None:
        ignored = _ignored_note(int((differs & ~where).sum()))
        differs = differs & where
    shape, dtype = tuple(expected.shape), _name(expected.dtype)
    count = int(differs.sum())
    if not count:
        return LeafComparison(path, True, shape, dtype, note=ignored)
    at = _unravel(int(differs.flatten().nonzero()[0]), shape)
    reason = f"{got[at].item()!r} instead of {expected[at].item()!r}"
    worst = 0.0
    if expected.dtype != torch.bool:
        # Python integers: the difference of two int64 may not fit into one.
        pairs = zip(expected[differs].tolist(), got[differs].tolist(), strict=True)
        worst = float(max(abs(a - b) for a, b in pairs))
    return LeafComparison(
        path,
        False,
        shape,
        dtype,
        reason,
        max_abs=worst,
        at=at,
        outside=count / expected.numel(),
        note=ignored,
    )


def _ignored_note(count: int) -> str:
    return f"{count} differing elements outside `where` ignored" if count else ""


def _compare_floats(
    path: str, expected: torch.Tensor, got: torch.Tensor, tolerance: Tolerance, where: torch.Tensor | None
) -> LeafComparison:
    shape, dtype = tuple(expected.shape), _name(expected.dtype)
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = got.to(wide), expected.to(wide)
    nan_a, nan_b = torch.isnan(a), torch.isnan(b)
    both_finite = torch.isfinite(a) & torch.isfinite(b)
    same_special = (nan_a & nan_b) | (~both_finite & ~nan_a & ~nan_b & (a == b))
    special = ~both_finite & ~same_special
    error = torch.where(both_finite, (a - b).abs(), torch.zeros((), dtype=torch.float64))
    size = torch.where(both_finite, b.abs(), torch.zeros((), dtype=torch.float64))
    outside = (error > tolerance.atol + tolerance.rtol * size) | special
    note = ""
    if where is not None:
        note = _ignored_note(int((outside & ~where).sum()))
        outside, special = outside & where, special & where
        error = torch.where(where, error, torch.zeros((), dtype=torch.float64))
    at = _unravel(int(error.flatten().argmax()), shape)
    relative = error / size.clamp_min(torch.finfo(torch.float64).tiny)
    max_rel = float(relative[size > 0].max()) if bool((size > 0).any()) else 0.0
    base: dict[str, Any] = {
        "shape": shape,
        "dtype": dtype,
        "max_abs": float(error.max()),
        "max_rel": max_rel,
        "atol": tolerance.atol,
        "rtol": tolerance.rtol,
    }
    count = int(outside.sum())
    if not count:
        return LeafComparison(path, True, at=at, note=note, **base)
    reason, needed = "", None
    if bool(special.any()):
        at = _unravel(int(special.flatten().nonzero()[0]), shape)
        share = f"{int(special.sum())} of {special.numel()}"
        reason = f"{_scalar(got[at])} instead of {_scalar(expected[at])} in {share}"
    else:
        # A little more than the difference: rounding must not make the suggested tolerance fail, neither its
        # own nor that of a small difference of large numbers.
        needed = float((error - tolerance.rtol * size).max()) * (1 + 1e-9)
        needed += 4 * torch.finfo(torch.float64).eps * float(error.max())
    return LeafComparison(
        path,
        False,
        reason=reason,
        at=at,
        outside=count / expected.numel(),
        would_need=needed,
        note=note,
        **base,
    )


def _rounded_up(value: float) -> str:
    """Two digits, never less than `value`: people copy it into a spec."""
    text = f"{value:.1e}"
    if math.isfinite(value) and float(text) < value:
        mantissa, _, exponent = text.partition("e")
        text = f"{float(f'{float(mantissa) + 0.1:.1f}e{exponent}'):.1e}"
    return text


def _scalar(value: torch.Tensor) -> str:
    item = value.item()
    return f"{item:.3g}" if isinstance(item, float) else str(item)


def compare_leaves(
    expected: Sequence[tuple[str, Any]],
    got: Sequence[tuple[str, Any]],
    tolerances: Tolerances,
    where: Mapping[str, torch.Tensor] | None = None,
) -> list[LeafComparison]:
    """Compare outputs by path, in the order of `expected`.

    A ``None`` that the exporter left out is no difference; any other missing or additional output is one.
    """
    results = []
    have: dict[str, Any] = dict(got)
    for path, leaf in expected:
        if path in have:
            results.append(compare_leaf(path, leaf, have.pop(path), tolerances, (where or {}).get(path)))
        elif leaf is not None:
            results.append(LeafComparison(path, False, None, "", f"missing, expected {_kind(leaf)}"))
    for path, leaf in have.items():
        if leaf is not None:
            results.append(LeafComparison(path, False, None, "", f"additional output, {_kind(leaf)}"))
    return results


def table(results: Sequence[LeafComparison]) -> list[str]:
    """The comparison as lines of text; failures first when there are many rows."""
    rows = [("output", "shape", "dtype", "max abs", "at", "max rel", "outside", "would need", "")]
    shown = list(results)
    if len(shown) > 12:
        failing = [r for r in shown if not r.ok]
        shown = failing[:12] or shown[:12]
    for r in shown:
        numbers = not r.reason or r.max_abs > 0
        rows.append(
            (
                r.path,
                "" if r.shape is None else _shape_text(r.shape),
                r.dtype,
                f"{r.max_abs:.1e}" if numbers else "",
                str(list(r.at)) if r.at else "",
                f"{r.max_rel:.1e}" if numbers else "",
                f"{r.outside:.1%}" if r.outside else "0%",
                f"atol {_rounded_up(r.would_need)}" if r.would_need is not None else "",
                "ok" if r.ok else f"FAIL {r.reason}".rstrip(),
            )
        )
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    if len(shown) < len(results):
        lines.append(f"... and {len(results) - len(shown)} more outputs")
    lines.extend(f"{r.path}: {r.note}" for r in shown if r.note)
    return lines
