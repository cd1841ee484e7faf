"""A tolerance of the spec below what rounding does to eager itself: a failure of nobody but the spec.

The verdict stays a failure, as the spec is a requirement; what changes is whom the message blames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import BELOW_NOISE
from .compare import LeafComparison, rounded_up

__all__ = ["Tight", "too_tight"]


@dataclass(frozen=True)
class Tight:
    """What a message says of such a failure; empty for every other one."""

    text: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def too_tight(results: Sequence[LeafComparison]) -> Tight:
    """Whether each output that fails does so by a tolerance that eager itself leaves."""
    failed = [result for result in results if not result.ok]
    if not failed or not all(result.below_noise for result in failed):
        return Tight()
    places = list(dict.fromkeys(result.below_noise for result in failed))
    moves = max(result.eager_moves or 0.0 for result in failed)
    needed = rounded_up(max(result.would_need or 0.0 for result in failed))
    one = len(places) == 1
    return Tight(
        f"the {'tolerance' if one else 'tolerances'} of {', '.join(places)} {'is' if one else 'are'} below "
        f"eager's own noise (eager moves by up to {moves:.1e} when its operators round otherwise), no "
        f"exporter is blamed for it: atol {needed} would pass here; ",
        {BELOW_NOISE: places},
    )
