"""Outputs that a comparison of the user's own judges: what it is not asked, then what it says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .leaf import (
    LeafComparison,
    aligned,
    as_numbers,
    as_tensor,
    dtype_name,
    is_number,
    special_fault,
    special_positions,
)
from .own import Own
from .tolerance import Tolerance, Tolerances

__all__ = ["Pending", "gate", "judge"]


@dataclass(frozen=True, eq=False)
class Pending:
    """An output of which shape, dtype and so on are right: its values are for the comparison.

    Attributes
    ----------
    expected, got:
        Tensors on the CPU, or Python numbers.
    """

    path: str
    expected: Any
    got: Any
    own: Own

    def result(self, ok: bool, reason: str = "") -> LeafComparison:
        """As the comparison decided."""
        if isinstance(self.expected, torch.Tensor):
            shape, dtype = tuple(self.expected.shape), dtype_name(self.expected.dtype)
            return LeafComparison(self.path, ok, shape, dtype, reason, by=self.own.name)
        return LeafComparison(self.path, ok, None, type(self.expected).__name__, reason, by=self.own.name)

    @property
    def empty(self) -> bool:
        """Whether neither side has a value."""
        sides = (self.expected, self.got)
        return all(isinstance(side, torch.Tensor) and not side.numel() for side in sides)

    def tolerance(self, tolerances: Tolerances) -> Tolerance:
        """That of the output."""
        return tolerances.of(self.path, torch.as_tensor(self.expected))

    def copies(self) -> tuple[Any, Any]:
        """What a comparison may do with as it likes."""
        expected, got = (
            side.clone() if isinstance(side, torch.Tensor) else side for side in (self.expected, self.got)
        )
        return expected, got


def gate(path: str, expected: Any, got: Any, own: Own) -> LeafComparison | Pending | None:
    """What is decided without the comparison (a failure), or what it is to judge; ``None``: not its matter.

    It judges tensors and Python numbers; text, ``None`` and other objects are compared as ever.
    """
    expected, got = as_tensor(expected), as_tensor(got)
    if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
        pair = aligned(path, expected, got, own.judges)
        if isinstance(pair, LeafComparison):
            return pair
        fault = None if "nonfinite" in own.judges else _nonfinite_fault(*pair)
        if fault is not None:
            at, reason = fault
            return LeafComparison(
                path, False, tuple(expected.shape), dtype_name(expected.dtype), reason, at=at
            )
        return Pending(path, *pair, own)
    expected, got = as_numbers(expected, got)
    if not _numeric(expected) or not _numeric(got):
        return None
    if type(expected) is not type(got) and "dtype" not in own.judges:
        return None
    if "nonfinite" not in own.judges and _nonfinite_fault(torch.tensor(expected), torch.tensor(got)):
        return None
    return Pending(path, expected, got, own)


def _numeric(value: Any) -> bool:
    return is_number(value) and not isinstance(value, str | bytes)


def _nonfinite_fault(expected: torch.Tensor, got: torch.Tensor) -> tuple[tuple[int, ...], str] | None:
    """NaN and infinities: by position; where the shapes differ, which of them there are."""
    if expected.shape != got.shape:
        was, now = _nonfinite(expected), _nonfinite(got)
        if was == now:
            return None
        return (), f"holds {_listed(now)}, eager's {_listed(was)}"
    kind = torch.complex128 if expected.is_complex() or got.is_complex() else torch.float64
    special = special_positions(got.to(kind), expected.to(kind))
    return special_fault(special, expected, got) if bool(special.any()) else None


def _nonfinite(tensor: torch.Tensor) -> set[str]:
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not values.is_floating_point():
        return set()
    found = values[~torch.isfinite(values)].tolist()
    return {"nan" if math.isnan(each) else str(each) for each in found}


def _listed(kinds: set[str]) -> str:
    return ", ".join(sorted(kinds)) if kinds else "finite values only"


def judge(
    results: Sequence[LeafComparison | Pending], rules: dict[str, Own], tolerances: Tolerances
) -> list[LeafComparison]:
    """Ask the comparisons, those of several outputs once for all of them.

    Parameters
    ----------
    rules:
        Path of an output -> its comparison, of those too that failed before it was asked.

    Raises
    ------
    ComparisonError
        A comparison raises, or returns no list of sentences.
    """
    judged: list[LeafComparison] = []
    together: dict[Own, dict[str, LeafComparison]] = {}
    for result in results:
        if isinstance(result, LeafComparison):
            judged.append(result)
        elif not result.own.together:
            judged.append(_alone(result, tolerances))
        else:
            if result.own not in together:
                group = [other for other in results if rules.get(other.path) is result.own]
                together[result.own] = _together(result.own, group, tolerances)
            judged.append(together[result.own][result.path])
    return judged


def _alone(pending: Pending, tolerances: Tolerances) -> LeafComparison:
    if pending.empty:
        return pending.result(True)
    said = pending.own.differences(pending.path, *pending.copies(), pending.tolerance(tolerances))
    return pending.result(not said, "; ".join(said))


def _together(
    own: Own, group: Sequence[LeafComparison | Pending], tolerances: Tolerances
) -> dict[str, LeafComparison]:
    """By path. All of them fail or none: what is wrong is between them."""
    pending = [each for each in group if isinstance(each, Pending)]
    failed = next((each for each in group if isinstance(each, LeafComparison) and not each.ok), None)
    paths = [each.path for each in pending]
    if failed is not None:
        return {each.path: each.result(False, f"not judged: {failed.path} fails") for each in pending}
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        return {each.path: each.result(False, f"not judged: two outputs are {twice}") for each in pending}
    if all(each.empty for each in pending):
        return {each.path: each.result(True) for each in pending}
    copies = {each.path: each.copies() for each in pending}
    said = own.differences(
        ", ".join(paths[:4]) + (" and more" if len(paths) > 4 else ""),
        {path: expected for path, (expected, _) in copies.items()},
        {path: got for path, (_, got) in copies.items()},
        {each.path: each.tolerance(tolerances) for each in pending},
    )
    others = f"judged with {paths[0]}" if said else ""
    return {
        each.path: each.result(not said, others if number else "; ".join(said))
        for number, each in enumerate(pending)
    }
