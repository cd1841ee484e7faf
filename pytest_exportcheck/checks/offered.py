"""The ``resize`` that a spec may say where a program refuses sizes that eager takes: sizes known to pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

__all__ = ["MOST_RUNS", "passing_lists"]

#: So many combinations of sizes are run to find out which may be offered.
MOST_RUNS = 48

Sizes = Mapping[str, int]


def passing_lists(
    example: Sizes, candidates: Mapping[str, Sequence[int]], passes: Callable[[Sizes], bool]
) -> dict[str, list[int]]:
    """For each symbol the sizes of which every combination passes, the most important ones first.

    A spec that lists them has every combination run, so every combination must pass.

    Parameters
    ----------
    example:
        Sizes to begin with; if they do not pass, nothing is known to.
    candidates:
        By symbol, the sizes to try; those in front are tried first.
    passes:
        Whether the program passes at sizes of all symbols: asked for `MOST_RUNS` combinations at most.

    Returns
    -------
    dict
        Sorted sizes by symbol; empty where the example does not pass.
    """
    known: dict[tuple[tuple[str, int], ...], bool] = {}

    def all_pass(combinations: Sequence[Sizes]) -> bool:
        keys = [tuple(sorted(sizes.items())) for sizes in combinations]
        if len(known) + len({*keys} - known.keys()) > MOST_RUNS:
            return False
        for key, sizes in zip(keys, combinations, strict=True):
            if key not in known:
                known[key] = passes(sizes)
            if not known[key]:
                return False
        return True

    if not all_pass([example]):
        return {}
    found = {name: [size] for name, size in example.items()}
    # In turn, so that no symbol takes all the runs.
    for row in itertools.zip_longest(*(candidates.get(name, ()) for name in found)):
        for name, size in zip(found, row, strict=True):
            if size is None or size in found[name]:
                continue
            pools = [[size] if other == name else sizes for other, sizes in found.items()]
            combinations = [dict(zip(found, pick, strict=True)) for pick in itertools.product(*pools)]
            if all_pass(combinations):
                found[name].append(size)
    return {name: sorted(sizes) for name, sizes in found.items()}
