"""Verdict on numbers: two lists of (path, leaf), compared leaf by leaf; container types are ignored."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..pytrees.paths import same_constant
from .ties import Ties
from .tolerance import Tolerance, Tolerances

__all__ = [
    "LeafComparison",
    "Tolerance",
    "Tolerances",
    "as_tensor",
    "compare_leaf",
    "compare_leaves",
    "table",
    "unreadable",
]


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
    eager_moves:
        How far eager itself moves when its operators round otherwise (`rounding`); ``None`` if it was not
        asked: nothing is outside the tolerance, or no tolerance would help.
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
    eager_moves: float | None = None

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
            "eager_moves": self.eager_moves,
        }


def _shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) if len(shape) else "scalar"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex, str, bytes))


def as_tensor(value: Any) -> Any:
    """Numpy arrays and scalars as tensors: which of them a model returns is no matter of numbers."""
    numpy = sys.modules.get("numpy")
    if (
        numpy is not None
        and isinstance(value, (numpy.ndarray, numpy.generic))
        and value.dtype.kind in "biufc"
    ):
        return torch.from_numpy(numpy.array(value))
    return value


def unreadable(tensor: torch.Tensor) -> str:
    """Why the values of a tensor cannot be compared; empty if they can."""
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_nested:
        return "nested"
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    return "meta" if tensor.is_meta else ""


def compare_leaf(
    path: str,
    expected: Any,
    got: Any,
    tolerances: Tolerances,
    where: torch.Tensor | Ties | None = None,
    least: torch.Tensor | None = None,
) -> LeafComparison:
    """Compare one output.

    Parameters
    ----------
    where:
        Boolean tensor of the shape of `expected`: positions that count; the others are reported in the note.
        Or what the indices in the output select from: that is compared instead of the indices.
    least:
        Error of each element, of the shape of `expected`, that is allowed whatever the tolerance of a float.
    """
    expected, got = as_tensor(expected), as_tensor(got)
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        return _compare_scalars(path, expected, got)
    for tensor, owner in ((expected, "the model's"), (got, "the program's")):
        if why := unreadable(tensor):
            reason = f"{owner} is a {why} tensor, which is not compared: return a dense one"
            return LeafComparison(path, False, tuple(expected.shape), _name(expected.dtype), reason)
    # Views with a lazy conjugation or negation are not what their memory says.
    expected, got = (value.detach().to("cpu").resolve_conj().resolve_neg() for value in (expected, got))
    shape, dtype = tuple(expected.shape), _name(expected.dtype)
    if tuple(got.shape) != shape:
        reason = f"shape {_shape_text(got.shape)} instead of {_shape_text(shape)}"
        return LeafComparison(path, False, shape, dtype, reason)
    if got.dtype != expected.dtype:
        return LeafComparison(path, False, shape, dtype, f"dtype {_name(got.dtype)} instead of {dtype}")
    tolerance = tolerances.of(path, expected)
    if expected.numel() == 0:
        return LeafComparison(path, True, shape, dtype, atol=tolerance.atol, rtol=tolerance.rtol)
    if isinstance(where, Ties):
        return _compare_selected(path, expected, got, tolerances, where)
    if expected.is_floating_point() or expected.is_complex():
        return _compare_floats(path, expected, got, tolerance, where, tolerances.by_element, least)
    return _compare_exact(path, expected, got, where)


def _compare_selected(
    path: str, expected: torch.Tensor, got: torch.Tensor, tolerances: Tolerances, ties: Ties
) -> LeafComparison:
    """Indices by what they select: eager's scores at the indices of both sides."""
    shape, dtype = tuple(expected.shape), _name(expected.dtype)
    others = int((expected != got).sum())
    fault = ties.fault(expected, got) if others else None
    if fault is not None:
        flat, reason = fault
        return LeafComparison(
            path, False, shape, dtype, reason, at=_unravel(flat, shape), outside=others / expected.numel()
        )
    note = f"{others} other indices, compared by what they select from {ties.path}" if others else ""
    left, right = ties.selected(expected), ties.selected(got)
    result = compare_leaf(ties.path, left, right, _of_whole(tolerances, ties))
    reason = ""
    if not result.ok:
        at = result.at
        reason = (
            f"index {int(got[at])} instead of {int(expected[at])} selects {_scalar(right[at])} instead of "
            f"{_scalar(left[at])} from {ties.path}"
        )
    return replace(result, path=path, dtype=dtype, reason=reason, note=note)


def _of_whole(tolerances: Tolerances, ties: Ties) -> Tolerances:
    """The tolerance of the scores as an output, fixed: a few selected ones have another size."""
    whole = tolerances.of(ties.path, ties.scores)
    return Tolerances(whole.atol, whole.rtol)


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


def _same_special(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where two floats are both NaN, or the same infinity."""
    return (torch.isnan(a) & torch.isnan(b)) | (torch.isinf(a) & (a == b))


def _compare_floats(
    path: str,
    expected: torch.Tensor,
    got: torch.Tensor,
    tolerance: Tolerance,
    where: torch.Tensor | None,
    by_element: Callable[[str, torch.Tensor, Tolerance], torch.Tensor | float],
    least: torch.Tensor | None,
) -> LeafComparison:
    shape, dtype = tuple(expected.shape), _name(expected.dtype)
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = got.to(wide), expected.to(wide)
    both_finite = torch.isfinite(a) & torch.isfinite(b)
    if expected.is_complex():
        # Part by part: a NaN beside 1 is not a NaN beside 2.
        parts = zip(torch.view_as_real(a).unbind(-1), torch.view_as_real(b).unbind(-1), strict=True)
        same = [_same_special(x, y) | (torch.isfinite(x) & torch.isfinite(y) & (x == y)) for x, y in parts]
        same_special = same[0] & same[1]
    else:
        same_special = _same_special(a, b)
    special = ~both_finite & ~same_special
    zero = torch.zeros((), dtype=torch.float64)
    error = torch.where(both_finite, (a - b).abs(), zero)
    size = torch.where(both_finite, b.abs(), zero)
    atol = torch.as_tensor(by_element(path, expected, tolerance), dtype=torch.float64).broadcast_to(
        error.shape
    )
    allowed = atol + tolerance.rtol * size
    excess = error - (allowed if least is None else allowed.maximum(least))
    outside = (excess > 0) | special
    note = ""
    if where is not None:
        note = _ignored_note(int((outside & ~where).sum()))
        outside, special = outside & where, special & where
        error = torch.where(where, error, zero)
    at = _unravel(int(error.flatten().argmax()), shape)
    relative = error / size.clamp_min(torch.finfo(torch.float64).tiny)
    max_rel = float(relative[size > 0].max()) if bool((size > 0).any()) else 0.0
    base: dict[str, Any] = {
        "shape": shape,
        "dtype": dtype,
        "max_abs": float(error.max()),
        "max_rel": max_rel,
        "rtol": tolerance.rtol,
    }
    count = int(outside.sum())
    if not count:
        return LeafComparison(path, True, at=at, note=note, atol=tolerance.atol, **base)
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
        if not outside[at]:
            at = _unravel(int(excess.where(outside, -math.inf).flatten().argmax()), shape)
            worst = f"{_scalar(got[at])} instead of {_scalar(expected[at])} at {list(at)}"
            note = "; ".join(filter(None, [note, f"{worst}, larger errors are within their tolerance"]))
    return LeafComparison(
        path,
        False,
        reason=reason,
        at=at,
        outside=count / expected.numel(),
        would_need=needed,
        note=note,
        atol=float(atol[at]),
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
    where: Mapping[str, torch.Tensor | Ties] | None = None,
) -> list[LeafComparison]:
    """Compare outputs by path, in the order of `expected`.

    Leaves of one path (keys ``1`` and ``"1"`` of a dict) are matched in turn.
    A ``None`` that the exporter left out is no difference; any other missing or additional output is one.
    """
    results = []
    have: dict[str, list[Any]] = {}
    for path, leaf in got:
        have.setdefault(path, []).append(leaf)
    for path, leaf in expected:
        if have.get(path):
            results.append(compare_leaf(path, leaf, have[path].pop(0), tolerances, (where or {}).get(path)))
        elif leaf is not None:
            results.append(LeafComparison(path, False, None, "", f"missing, expected {_kind(leaf)}"))
    for path, leaves in have.items():
        results += [
            LeafComparison(path, False, None, "", f"additional output, {_kind(leaf)}")
            for leaf in leaves
            if leaf is not None
        ]
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
