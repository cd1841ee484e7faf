"""The result for one output, and what two values of an output are to a comparison."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "LeafComparison",
    "aligned",
    "as_floats",
    "as_numbers",
    "as_tensor",
    "dtype_name",
    "is_number",
    "kind_text",
    "scalar_text",
    "shape_text",
    "special_fault",
    "special_positions",
    "unravel",
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
        Largest errors over positions that are finite on both sides. The relative one is of positions where
        eager is not 0; infinite where one that is outside the tolerance is 0 in eager.
    at:
        Index of the worst element.
    outside:
        Share of elements outside the tolerance.
    would_need:
        The atol, rtol kept, with which it would pass; ``None`` if no tolerance would help.
    eager_moves:
        How far eager itself moves when its operators round otherwise (`rounding`); ``None`` if it was not
        asked: nothing is outside the tolerance, or no tolerance would help.
    crosses:
        A sentence on values that are finite in one program and not in the other, where eager itself has both
        when its operators round otherwise; part of `note`.
    below_noise:
        Where the spec gives the tolerance, if eager itself leaves it wherever the program does: each error
        outside is one that rounding explains, and eager's own moves are larger than the tolerance there.
    by:
        Name of the user's comparison that judged it, and decided `ok`: there are no numbers then.
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
    by: str = ""
    crosses: str = ""
    below_noise: str = ""

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
            "by": self.by,
        }


def shape_text(shape: Sequence[int]) -> str:
    """``2x3``."""
    return "x".join(map(str, shape)) if len(shape) else "scalar"


def dtype_name(dtype: torch.dtype) -> str:
    """Without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def is_number(value: Any) -> bool:
    """Whether it is a plain value: a Python number, or text."""
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


def kind_text(value: Any) -> str:
    """What it is, for messages."""
    return f"a {dtype_name(value.dtype)} tensor" if isinstance(value, torch.Tensor) else f"{value!r:.40}"


def unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Index of a position that is counted in a row."""
    index = []
    for size in reversed(shape):
        index.append(flat % size)
        flat //= size
    return tuple(reversed(index))


def scalar_text(value: torch.Tensor) -> str:
    """One element, three digits."""
    item = value.item()
    return f"{item:.3g}" if isinstance(item, float) else str(item)


def aligned(
    path: str, expected: torch.Tensor, got: torch.Tensor, judged: Collection[str] = ()
) -> LeafComparison | tuple[torch.Tensor, torch.Tensor]:
    """Both on the CPU, as what their values are; or the failure of tensors that cannot be compared.

    Parameters
    ----------
    judged:
        ``shape`` and ``dtype``, where a difference of them is somebody else's matter.
    """
    shape, dtype = tuple(expected.shape), dtype_name(expected.dtype)
    for tensor, owner in ((expected, "the model's"), (got, "the program's")):
        if why := unreadable(tensor):
            reason = f"{owner} is a {why} tensor, which is not compared: return a dense one"
            return LeafComparison(path, False, shape, dtype, reason)
    # Views with a lazy conjugation or negation are not what their memory says.
    expected, got = (value.detach().to("cpu").resolve_conj().resolve_neg() for value in (expected, got))
    if tuple(got.shape) != shape and "shape" not in judged:
        reason = f"shape {shape_text(got.shape)} instead of {shape_text(shape)}"
        return LeafComparison(path, False, shape, dtype, reason)
    if got.dtype != expected.dtype and "dtype" not in judged:
        return LeafComparison(path, False, shape, dtype, f"dtype {dtype_name(got.dtype)} instead of {dtype}")
    return expected, got


def as_numbers(expected: Any, got: Any) -> tuple[Any, Any]:
    """A program's 0-d tensor in the place of a Python number as a number: what exporters make of one."""
    if is_number(expected) and isinstance(got, torch.Tensor) and got.dim() == 0:
        if isinstance(expected, float) and got.is_floating_point():
            # 0.1 as float32 is the nearest float32, not 0.1.
            expected = float(torch.tensor(expected, dtype=got.dtype))
        got = got.item()
    return expected, got


def as_floats(expected: Any, got: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A Python float (or complex number) and the 0-d tensor that a program computes in its place, as two
    tensors of one dtype; ``None`` for all else: two Python numbers are compared exactly."""
    if not isinstance(got, torch.Tensor) or got.dim():
        return None
    alike = (isinstance(expected, float) and got.is_floating_point()) or (
        isinstance(expected, complex) and got.is_complex()
    )
    return (torch.tensor(expected, dtype=got.dtype), got.detach().to("cpu")) if alike else None


def special_positions(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where one of two floats (complex numbers) of one shape is not finite, and the other not the same."""
    both_finite = torch.isfinite(a) & torch.isfinite(b)
    if a.is_complex():
        # Part by part: a NaN beside 1 is not a NaN beside 2.
        parts = zip(torch.view_as_real(a).unbind(-1), torch.view_as_real(b).unbind(-1), strict=True)
        same = [_same_special(x, y) | (torch.isfinite(x) & torch.isfinite(y) & (x == y)) for x, y in parts]
        return ~both_finite & ~(same[0] & same[1])
    return ~both_finite & ~_same_special(a, b)


def _same_special(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where two floats are both NaN, or the same infinity."""
    return (torch.isnan(a) & torch.isnan(b)) | (torch.isinf(a) & (a == b))


def special_fault(
    special: torch.Tensor, expected: torch.Tensor, got: torch.Tensor
) -> tuple[tuple[int, ...], str]:
    """(first position, reason) where `special` has a position."""
    at = unravel(int(special.flatten().nonzero()[0]), tuple(special.shape))
    share = f"{int(special.sum())} of {special.numel()}"
    return at, f"{scalar_text(got[at])} instead of {scalar_text(expected[at])} in {share}"
