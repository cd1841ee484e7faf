"""Complex outputs, which ONNX has not: a program gives their real and imaginary parts on one more axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .compare import LeafComparison, Tolerances, as_tensor, compare_leaf

__all__ = ["given_in_parts"]


def given_in_parts(
    results: Sequence[LeafComparison],
    expected: Sequence[tuple[str, Any]],
    got: Sequence[tuple[str, Any]],
    tolerances: Tolerances,
) -> list[str]:
    """Paths of the outputs that fail, if all of them are right but for that; else none."""
    left, right = dict(expected), dict(got)
    failed = [result.path for result in results if not result.ok]
    alike = (_is_in_parts(path, left.get(path), right.get(path), tolerances) for path in failed)
    return failed if all(alike) else []


def _is_in_parts(path: str, expected: Any, got: Any, tolerances: Tolerances) -> bool:
    expected, got = as_tensor(expected), as_tensor(got)
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        return False
    if not expected.is_complex() or got.is_complex() or tuple(got.shape) != (*expected.shape, 2):
        return False
    parts = torch.view_as_real(expected.detach().resolve_conj())
    return compare_leaf(path, parts, got, tolerances).ok
