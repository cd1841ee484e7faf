"""Comparisons of the user's own (``compare: {boxes: {by: compare.py:same_boxes}}``), loaded and called.

They judge values. Missing and additional outputs, tensors that cannot be read, shapes, dtypes, NaN and
infinities stay ours, unless a comparison says that it judges them itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from ..errors import ComparisonError
from ..registry import load_comparison
from ..spec import ModelSpec
from ..spec.imports import UserCodeError, call_user
from ..tracebacks import one_line, user_lines

__all__ = ["JUDGED", "Comparison", "Own", "load_own", "own_comparisons"]

#: What a comparison may say, in ``judges``, that it judges beside values.
JUDGED = ("shape", "dtype", "nonfinite")

#: Of the sentences that a comparison returns, so many are shown.
_MOST_SENTENCES = 5

_RETURNS = "it returns a list of sentences that say what differs, an empty one where nothing does"


@runtime_checkable
class Comparison(Protocol):
    """What a spec names as ``by``: a function, or a class that is made once, without arguments.

    It may have two attributes:

    * ``together = True``: it is given all outputs of a call that its pattern matches at once, as dicts by
      path, and is called once; otherwise it is called for each output;
    * ``judges``: which of `JUDGED` it judges itself. ``nonfinite``: NaN and infinities; without it, they must
      stand where eager has them.
    """

    def __call__(self, expected: Any, got: Any, tolerance: Any, /) -> Sequence[str]:
        """What differs, in sentences; nothing: an empty list.

        Parameters
        ----------
        expected, got:
            Eager's output and the program's: a tensor on the CPU (a copy), of one shape and dtype, or a
            Python number; with ``together`` a dict of them by path, the same paths in both.
        tolerance:
            `Tolerance` (``atol``, ``rtol``) of the output by the spec, or the default of its dtype, scaled to
            the output; with ``together`` a dict of them by path.
        """
        ...


@dataclass(frozen=True, eq=False)
class Own:
    """A comparison for outputs of one call.

    Attributes
    ----------
    name:
        As the spec names it.
    place:
        Of the rule: ``model_specs/detector.yaml:14``.
    stage:
        Which runs: what goes wrong in the comparison is a failure of that stage.
    together, judges:
        See `Comparison`.
    """

    name: str
    place: str
    function: Comparison
    folder: Path
    stage: str
    together: bool = False
    judges: frozenset[str] = frozenset()

    def differences(self, what: str, expected: Any, got: Any, tolerance: Any) -> list[str]:
        """What the comparison says about `what` (paths of outputs, for messages).

        Raises
        ------
        ComparisonError
            It raises, or returns something else than a list of sentences.
        """
        called = f"{self.place}: comparison {self.name} on {what}"
        try:
            with torch.no_grad():
                said = call_user(self.function, "it", self.folder, expected, got, tolerance)
        except UserCodeError as error:
            raise self._broken(f"{called}: {error.message}", error.details) from error
        except BaseException as error:
            # A skip of pytest's, which is no `Exception`, must not end the case as one.
            if type(error).__name__ not in ("Skipped", "XFailed", "Exit"):
                raise
            said = f"it raised {one_line(error)}"
            raise self._broken(f"{called}: {said}", user_lines(error)) from error
        if not isinstance(said, list | tuple) or not all(isinstance(each, str) for each in said):
            kinds = sorted({type(each).__name__ for each in said} if isinstance(said, list | tuple) else ())
            kind = type(said).__name__ + (f" of {', '.join(kinds)}" if kinds else "")
            raise self._broken(f"{called}: it returned {said!r:.60} (a {kind})", [_RETURNS])
        shown = [" ".join(each.split()) or "differs" for each in said[:_MOST_SENTENCES]]
        more = len(said) - _MOST_SENTENCES
        return [*shown, *([f"and {more} more"] if more > 0 else [])]

    def _broken(self, message: str, details: Sequence[str]) -> ComparisonError:
        return ComparisonError(
            message,
            stage=self.stage,
            details=[*details, "nothing was judged by it: mend the comparison, no exporter is blamed"],
        )


def load_own(spec: ModelSpec) -> None:
    """Load every comparison of the spec, before anything runs.

    Raises
    ------
    ComparisonError
        One cannot be loaded, or is none.
    """
    for pattern, rule in spec.compare.items():
        if rule.by:
            _own(spec, pattern, rule.by, "load")


def own_comparisons(spec: ModelSpec, outputs: Sequence[tuple[str, Any]], stage: str) -> dict[str, Own]:
    """Path of an output -> the comparison that judges it; one object for all outputs of one rule."""
    found: dict[str, Own] = {}
    made: dict[str, Own] = {}
    for path, _ in outputs:
        pattern = next((each for each in spec.compare if fnmatchcase(path, each)), None)
        name = spec.compare[pattern].by if pattern is not None else None
        if pattern is not None and name is not None:
            if pattern not in made:
                made[pattern] = _own(spec, pattern, name, stage)
            found[path] = made[pattern]
    return found


def _own(spec: ModelSpec, pattern: str, name: str, stage: str) -> Own:
    place = spec.place("compare", pattern, "by")
    what = f"{place}: comparison {name}"

    def broken(message: str, details: Sequence[str] = ()) -> ComparisonError:
        return ComparisonError(f"{what} {message}", stage=stage, details=details)

    try:
        function = load_comparison(name, spec.folder)
    except UserCodeError as error:
        raise broken(f"cannot be loaded: {error.message}", error.details) from None
    except LookupError as error:
        raise broken(f"cannot be loaded: {error}") from None
    except (Exception, SystemExit) as error:
        said = one_line(error)
        raise broken(f"cannot be loaded: {said}", user_lines(error)) from error
    if not callable(function):
        raise broken(f"is a {type(function).__name__}, no function of (expected, got, tolerance)")
    judges = getattr(function, "judges", ())
    if not isinstance(judges, list | tuple | set | frozenset) or not all(each in JUDGED for each in judges):
        raise broken(f"says judges = {judges!r}; known: {', '.join(JUDGED)}, in a tuple")
    together = getattr(function, "together", False)
    if not isinstance(together, bool):
        raise broken(f"says together = {together!r}, not True or False")
    return Own(name, place, function, spec.folder, stage, together, frozenset(judges))
