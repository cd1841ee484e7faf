"""Verdict on numbers: two lists of (path, leaf), compared leaf by leaf; container types are ignored."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..plurals import counted
from ..pytrees.paths import same_constant
from .leaf import (
    LeafComparison,
    aligned,
    as_floats,
    as_numbers,
    as_tensor,
    dtype_name,
    is_number,
    kind_text,
    scalar_text,
    shape_text,
    special_fault,
    special_positions,
    unravel,
    unreadable,
)
from .own import Own
from .own_leaves import Pending, gate, judge
from .ties import Ties
from .tolerance import Tolerance, Tolerances

__all__ = [
    "LeafComparison",
    "Tolerance",
    "Tolerances",
    "as_tensor",
    "compare_leaf",
    "compare_leaves",
    "rounded_up",
    "table",
    "unreadable",
]


def compare_leaf(
    path: str,
    expected: Any,
    got: Any,
    tolerances: Tolerances,
    where: torch.Tensor | Ties | None = None,
    least: torch.Tensor | None = None,
    excused: torch.Tensor | None = None,
) -> LeafComparison:
    """Compare one output.

    Parameters
    ----------
    where:
        Boolean tensor of the shape of `expected`: positions that count; the others are reported in the note.
        Or what the indices in the output select from: that is compared instead of the indices.
    least:
        Error of each element, of the shape of `expected`, that is allowed whatever the tolerance of a float.
    excused:
        Boolean tensor of the shape of `expected`: positions at which NaN and infinities may differ.
    """
    expected, got = as_tensor(expected), as_tensor(got)
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        return _compare_scalars(path, expected, got, tolerances)
    pair = aligned(path, expected, got)
    if isinstance(pair, LeafComparison):
        return pair
    expected, got = pair
    shape, dtype = tuple(expected.shape), dtype_name(expected.dtype)
    tolerance = tolerances.of(path, expected)
    if expected.numel() == 0:
        return LeafComparison(path, True, shape, dtype, atol=tolerance.atol, rtol=tolerance.rtol)
    if isinstance(where, Ties):
        return _compare_selected(path, expected, got, tolerances, where)
    if expected.is_floating_point() or expected.is_complex():
        return _compare_floats(path, expected, got, tolerance, where, tolerances.by_element, least, excused)
    return _compare_exact(path, expected, got, where)


def _compare_selected(
    path: str, expected: torch.Tensor, got: torch.Tensor, tolerances: Tolerances, ties: Ties
) -> LeafComparison:
    """Indices by what they select: eager's scores at the indices of both sides."""
    shape, dtype = tuple(expected.shape), dtype_name(expected.dtype)
    others = int((expected != got).sum())
    fault = ties.fault(expected, got) if others else None
    if fault is not None:
        flat, reason = fault
        return LeafComparison(
            path, False, shape, dtype, reason, at=unravel(flat, shape), outside=others / expected.numel()
        )
    note = f"{others} other indices, compared by what they select from {ties.path}" if others else ""
    left, right = ties.selected(expected), ties.selected(got)
    result = compare_leaf(ties.path, left, right, _of_whole(tolerances, ties))
    reason = ""
    if not result.ok:
        at = result.at
        reason = (
            f"index {int(got[at])} instead of {int(expected[at])} selects {scalar_text(right[at])} "
            f"instead of {scalar_text(left[at])} from {ties.path}"
        )
    return replace(result, path=path, dtype=dtype, reason=reason, note=note)


def _of_whole(tolerances: Tolerances, ties: Ties) -> Tolerances:
    """The tolerance of the scores as an output, fixed: a few selected ones have another size."""
    whole = tolerances.of(ties.path, ties.scores)
    return Tolerances(whole.atol, whole.rtol)


def _compare_scalars(path: str, expected: Any, got: Any, tolerances: Tolerances) -> LeafComparison:
    kind = type(expected).__name__
    if expected is None and got is None:
        return LeafComparison(path, True, None, "None")
    pair = as_floats(expected, got)
    if pair is not None:
        # What `.item()` gives is as exact as the tensor that it was taken from.
        result = compare_leaf(path, *pair, tolerances)
        reason = "" if result.ok else f"{pair[1].item()!r} instead of {pair[0].item()!r}"
        return replace(result, shape=None, dtype=kind, reason=reason)
    expected, got = as_numbers(expected, got)
    if is_number(expected) and is_number(got):
        same = type(expected) is type(got) and (
            expected == got or (isinstance(expected, float) and math.isnan(expected) and math.isnan(got))
        )
        return LeafComparison(path, same, None, kind, "" if same else f"{got!r} instead of {expected!r}")
    if expected is None or got is None or isinstance(expected, torch.Tensor) != isinstance(got, torch.Tensor):
        return LeafComparison(path, False, None, kind, f"{kind_text(got)} instead of {kind_text(expected)}")
    same = same_constant(expected, got)
    return LeafComparison(path, same, None, kind, "" if same else f"{got!r:.60} instead of {expected!r:.60}")


def _compare_exact(
    path: str, expected: torch.Tensor, got: torch.Tensor, where: torch.Tensor | None
) -> LeafComparison:
    differs = expected != got
    ignored = ""
    if where is not None:
        ignored = _ignored_note(int((differs & ~where).sum()))
        differs = differs & where
    shape, dtype = tuple(expected.shape), dtype_name(expected.dtype)
    count = int(differs.sum())
    if not count:
        return LeafComparison(path, True, shape, dtype, note=ignored)
    at = unravel(int(differs.flatten().nonzero()[0]), shape)
    reason = f"{got[at].item()!r} instead of {expected[at].item()!r}"
    worst, relative = 0.0, 0.0
    if expected.dtype != torch.bool:
        # Python integers: the difference of two int64 may not fit into one.
        pairs = list(zip(expected[differs].tolist(), got[differs].tolist(), strict=True))
        worst = float(max(abs(a - b) for a, b in pairs))
        relative = max(abs(a - b) / abs(a) if a else math.inf for a, b in pairs)
    return LeafComparison(
        path,
        False,
        shape,
        dtype,
        reason,
        max_abs=worst,
        max_rel=relative,
        at=at,
        outside=count / expected.numel(),
        note=ignored,
    )


def _ignored_note(count: int) -> str:
    return f"{counted(count, 'differing element')} outside `where` ignored" if count else ""


def _compare_floats(
    path: str,
    expected: torch.Tensor,
    got: torch.Tensor,
    tolerance: Tolerance,
    where: torch.Tensor | None,
    by_element: Callable[[str, torch.Tensor, Tolerance], torch.Tensor | float],
    least: torch.Tensor | None,
    excused: torch.Tensor | None,
) -> LeafComparison:
    shape, dtype = tuple(expected.shape), dtype_name(expected.dtype)
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = got.to(wide), expected.to(wide)
    both_finite = torch.isfinite(a) & torch.isfinite(b)
    special = special_positions(a, b)
    if excused is not None:
        special = special & ~excused
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
    at = unravel(int(error.flatten().argmax()), shape)
    at_zero = outside & both_finite & (size == 0)
    max_rel = _max_rel(error, size)
    if bool(at_zero.any()):
        note = "; ".join(filter(None, [note, _at_zero_note(int(at_zero.sum()), outside, max_rel)]))
        max_rel = math.inf
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
        at, reason = special_fault(special, expected, got)
    else:
        # A little more than the difference: rounding must not make the suggested tolerance fail, neither its
        # own nor that of a small difference of large numbers.
        needed = float((error - tolerance.rtol * size).max()) * (1 + 1e-9)
        needed += 4 * torch.finfo(torch.float64).eps * float(error.max())
        if not outside[at]:
            at = unravel(int(excess.where(outside, -math.inf).flatten().argmax()), shape)
            worst = f"{scalar_text(got[at])} instead of {scalar_text(expected[at])} at {list(at)}"
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


def _max_rel(error: torch.Tensor, size: torch.Tensor) -> float:
    """The largest relative error where eager is not 0."""
    there = size > 0
    return float((error[there] / size[there]).max()) if bool(there.any()) else 0.0


def _at_zero_note(count: int, outside: torch.Tensor, max_rel: float) -> str:
    return (
        f"{count} of {counted(int(outside.sum()), 'element')} outside {'is' if count == 1 else 'are'} 0 in "
        f"eager, where any error is infinitely large beside it (elsewhere max rel {max_rel:.1e})"
    )


def rounded_up(value: float) -> str:
    """Two digits, never less than `value`: people copy it into a spec."""
    text = f"{value:.1e}"
    if math.isfinite(value) and float(text) < value:
        mantissa, _, exponent = text.partition("e")
        text = f"{float(f'{float(mantissa) + 0.1:.1f}e{exponent}'):.1e}"
    return text


def compare_leaves(
    expected: Sequence[tuple[str, Any]],
    got: Sequence[tuple[str, Any]],
    tolerances: Tolerances,
    where: Mapping[str, torch.Tensor | Ties | Own] | None = None,
) -> list[LeafComparison]:
    """Compare outputs by path, in the order of `expected`.

    Leaves of one path (keys ``1`` and ``"1"`` of a dict) are matched in turn.
    A ``None`` that the exporter left out is no difference; any other missing or additional output is one.
    """
    results: list[LeafComparison | Pending] = []
    have: dict[str, list[Any]] = {}
    for path, leaf in got:
        have.setdefault(path, []).append(leaf)
    for path, leaf in expected:
        if have.get(path):
            rule, other = (where or {}).get(path), have[path].pop(0)
            if isinstance(rule, Own):
                results.append(gate(path, leaf, other, rule) or compare_leaf(path, leaf, other, tolerances))
            else:
                results.append(compare_leaf(path, leaf, other, tolerances, rule))
        elif leaf is not None:
            results.append(LeafComparison(path, False, None, "", f"missing, expected {kind_text(leaf)}"))
    for path, leaves in have.items():
        results += [
            LeafComparison(path, False, None, "", f"additional output, {kind_text(leaf)}")
            for leaf in leaves
            if leaf is not None
        ]
    own = {path: rule for path, rule in (where or {}).items() if isinstance(rule, Own)}
    return judge(results, own, tolerances)


def table(results: Sequence[LeafComparison]) -> list[str]:
    """The comparison as lines of text; failures first when there are many rows."""
    rows = [("output", "shape", "dtype", "max abs", "at", "max rel", "outside", "would need", "")]
    shown = list(results)
    if len(shown) > 12:
        failing = [r for r in shown if not r.ok]
        shown = failing[:12] or shown[:12]
    for r in shown:
        numbers = not r.by and (not r.reason or r.max_abs > 0)
        rows.append(
            (
                r.path,
                "" if r.shape is None else shape_text(r.shape),
                r.dtype,
                f"{r.max_abs:.1e}" if numbers else "",
                str(list(r.at)) if r.at else "",
                f"{r.max_rel:.1e}" if numbers else "",
                f"{r.outside:.1%}" if r.outside else "" if r.by else "0%",
                f"atol {rounded_up(r.would_need)}" if r.would_need is not None else "",
                ("ok" if r.ok else f"FAIL {r.reason}".rstrip()) + (f" (by {r.by})" if r.by else ""),
            )
        )
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    if len(shown) < len(results):
        lines.append(f"... and {counted(len(results) - len(shown), 'more output')}")
    lines.extend(f"{r.path}: {r.note}" for r in shown if r.note)
    return lines
