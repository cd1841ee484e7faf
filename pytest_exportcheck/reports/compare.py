"""What changed between two runs: which cases got less far, which numbers got worse.

Verdicts are ranked by the stage that was reached. Numbers, sizes and times are ratios, flagged beyond a
noise band that is stated with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import COMPARISON, STAGES, TEST
from ..plurals import counted
from .read import CaseKey, Report, case_key, case_name
from .selection import Filter

__all__ = ["ERROR_BAND", "NODES_BAND", "SIZE_BAND", "TIME_BAND", "Change", "Comparison", "compare"]

#: An error counts as grown beyond this ratio, and only if it is more than `_ERROR_SHARE` of what is allowed:
#: runs of one model on one machine differ by less, another order of a sum by 2 to 3.
ERROR_BAND = 4.0
_ERROR_SHARE = 0.01

#: Ratios of node counts, of model sizes and of CPU seconds beyond which they are shown. Times of a shared
#: machine vary by half. The first case of a process pays for the imports (2 s), for the first capture and the
#: first conversion (1.5 s each), and which one it is changes with the selection, the order and the workers: a
#: difference of up to `_START_SECONDS` says nothing of a case.
NODES_BAND = 1.05
SIZE_BAND = 1.05
TIME_BAND = 1.5
_START_SECONDS = 5.0

#: A ratio to a time below this says nothing, and is left out.
_LEAST_SECONDS = 0.5

#: Of operators whose number changed, so many are named.
_MOST_OPERATORS = 4

#: What a test of the user demands comes after every stage.
_RANKS = (*STAGES, TEST)

#: Rank of a case that came to its end.
_END = len(_RANKS)


@dataclass(frozen=True)
class Change:
    """One thing that is not as before.

    Attributes
    ----------
    case:
        As `case_name` writes it.
    kind:
        ``verdict``, ``shapes``, ``outputs``, ``error``, ``nodes``, ``size`` or ``time``.
    effect:
        ``worse``, ``better`` or ``other``. Only what a user would call a regression is worse: a verdict, a
        case that ran and is gone, an error that grew. More nodes or seconds are ``other``.
    text:
        From what to what.
    before, after:
        The two values; ``None`` where a case was not run.
    """

    case: str
    kind: str
    effect: str
    text: str
    before: Any = None
    after: Any = None


@dataclass(frozen=True)
class Comparison:
    """Two runs compared.

    Attributes
    ----------
    packages:
        ``torch 2.12.0 -> 2.13.0``, for each package that differs.
    changes:
        In the order of the cases.
    unchanged, compared:
        Cases without any change, and cases that both runs have.
    only_before, only_after:
        Names of cases that one run does not have.
    not_run:
        Of `only_before` those that a filter of the second run left out, and which one: no regression.
    """

    before: str
    after: str
    packages: Sequence[str]
    changes: Sequence[Change]
    unchanged: int
    compared: int
    only_before: Sequence[str] = ()
    only_after: Sequence[str] = ()
    not_run: Mapping[str, str] = field(default_factory=dict)
    bands: Mapping[str, float] = field(
        default_factory=lambda: {
            "error": ERROR_BAND,
            "nodes": NODES_BAND,
            "size": SIZE_BAND,
            "time": TIME_BAND,
        }
    )

    def of(self, effect: str) -> list[Change]:
        """The changes of one effect."""
        return [change for change in self.changes if change.effect == effect]

    @property
    def worse(self) -> bool:
        """Whether anything got worse."""
        return bool(self.of("worse"))

    def moved(self) -> tuple[str, str] | None:
        """A case of each run that are one case under two folders, where the runs have none in common."""
        if self.compared:
            return None
        after = {name.rpartition("/")[2]: name for name in self.only_after}
        pairs = ((name, after.get(name.rpartition("/")[2])) for name in self.only_before)
        return next(((name, other) for name, other in pairs if other is not None), None)


def compare(before: Report, after: Report) -> Comparison:
    """Compare two runs case by case. A case that a filter of the run after left out is not judged."""
    old, new = before.by_key(), after.by_key()
    changes: list[Change] = []
    unchanged = 0
    for key in old.keys() & new.keys():
        found = list(_changes(key, old[key], new[key]))
        changes += found
        unchanged += not found
    not_run: dict[str, str] = {}
    left_out = Filter(after.environment)
    for key in sorted(old.keys() - new.keys(), key=str):
        verdict = old[key]["verdict"]
        if (why := left_out.why(old[key])) is not None:
            not_run[case_name(key)] = why
        elif verdict != "skip":  # nobody looked at that one before either
            text = f"{verdict} -> not in {after.name}: nobody checks it any more"
            changes.append(Change(case_name(key), "verdict", "worse", text, verdict))
    changes.sort(key=lambda change: change.case)
    return Comparison(
        before.name,
        after.name,
        _packages(before, after),
        changes,
        unchanged,
        len(old.keys() & new.keys()),
        sorted(case_name(key) for key in old.keys() - new.keys()),
        sorted(case_name(key) for key in new.keys() - old.keys()),
        not_run,
    )


def _packages(before: Report, after: Report) -> list[str]:
    old, new = before.environment.get("packages") or {}, after.environment.get("packages") or {}
    return [
        f"{name} {old.get(name, 'none')} -> {new.get(name, 'none')}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


def _reached(record: Mapping[str, Any]) -> int | None:
    """How far a case got, as the rank of its stage; ``None`` if it was skipped."""
    kind, _, stage = record["verdict"].partition(" ")
    if kind == "skip":
        return None
    if kind in ("pass", "xpass"):
        return _END
    if stage == COMPARISON:
        # It says nothing of the program, which got as far as the stage that asked for it.
        stage = str(record.get("stage"))
    return _RANKS.index(stage) if stage in _RANKS else 0


def _changes(key: CaseKey, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    name = case_name(key)
    assert case_key(new) == key
    if old["verdict"] != new["verdict"]:
        yield Change(
            name,
            "verdict",
            _effect(old, new),
            f"{old['verdict']} -> {new['verdict']}" + (_first_line(new) or _first_line(old, "; it was")),
            old["verdict"],
            new["verdict"],
        )
    yield from _shapes(name, old, new)
    yield from _outputs(name, old, new)
    yield from _ratio(name, "nodes", old.get("nodes"), new.get("nodes"), NODES_BAND, _operators(old, new))
    yield from _ratio(name, "size", old.get("model_bytes"), new.get("model_bytes"), SIZE_BAND)
    yield from _ratio(name, "time", _seconds(old), _seconds(new), TIME_BAND)


def _effect(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    was, now = _reached(old), _reached(new)
    if was is None or now is None:
        # Skipped: nobody looked. A case that passed and is not looked at any more is a loss.
        return "worse" if now is None and was == _END else "other"
    if was != now:
        return "worse" if now < was else "better"
    # The same stage: what was expected to fail and is not expected any more, or the reverse.
    bad = ("fail", "crash", "timeout", "xpass")
    kinds = [record["verdict"].split()[0] in bad for record in (old, new)]
    return {(False, True): "worse", (True, False): "better"}.get((kinds[0], kinds[1]), "other")


def _first_line(record: Mapping[str, Any], prefix: str = "") -> str:
    lines = str(record.get("message") or "").strip().splitlines()
    return f"{prefix}: {lines[0]}" if lines and record["verdict"] != "pass" else ""


def _shapes(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    before, after = old.get("shapes"), new.get("shapes")
    if not isinstance(before, dict) or not isinstance(after, dict):
        return
    for graph in dict.fromkeys([*before, *after]):
        was, now = before.get(graph) or {}, after.get(graph) or {}
        prefix = f"{graph}." if graph else ""
        renamed = _renamed(was, now)
        for root, other in renamed.items():
            count = len(_below(was, root))
            text = (
                f"input {prefix}{root} is now {prefix}{other} (the same shapes in {counted(count, 'place')})"
            )
            yield Change(name, "shapes", "other", text, root, other)
        known = {*renamed, *renamed.values()}
        for path in dict.fromkeys([*was, *now]):
            if was.get(path) != now.get(path) and _root(path) not in known:
                text = f"{prefix}{path}: {was.get(path, 'absent')} -> {now.get(path, 'absent')}"
                yield Change(name, "shapes", "other", text, was.get(path), now.get(path))


def _root(path: str) -> str:
    return path.partition(".")[0]


def _below(leaves: Mapping[str, Any], root: str) -> dict[str, Any]:
    """What is below `root`, by the rest of its path."""
    return {path.removeprefix(root): value for path, value in leaves.items() if _root(path) == root}


def _renamed(was: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Arguments or outputs that are gone, and the new one that has the same leaves with the same values.

    Only of those with several leaves (a cache), and only where one old name and one new name can be meant:
    two tensors of one shape are not told apart.
    """
    gone = {_root(path) for path in was} - {_root(path) for path in now}
    gone = {root for root in gone if len(_below(was, root)) > 1}
    come = {_root(path) for path in now} - {_root(path) for path in was}
    found = {root: [other for other in come if _below(now, other) == _below(was, root)] for root in gone}
    meant = [others[0] for others in found.values() if len(others) == 1]
    return {
        root: others[0]
        for root, others in sorted(found.items())
        if len(others) == 1 and meant.count(others[0]) == 1
    }


def _number(value: Any) -> float | None:
    """A float of a report, in which ``inf`` is text; ``None`` for ``nan``, which is no number."""
    try:
        number = None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
    return None if number is None or math.isnan(number) else number


def _outputs(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    """Outputs that came, went or have another name, and errors that grew."""
    known = {output["path"]: output for output in old.get("outputs") or ()}
    outputs = {output["path"]: output for output in new.get("outputs") or ()}
    if not known or not outputs:
        # A run that got nowhere near a comparison, unless it says that it passed.
        if known and old["verdict"] == new["verdict"] == "pass":
            text = f"no output is compared, {counted(len(known), 'output')} before"
            yield Change(name, "outputs", "worse", text, list(known), [])
        return
    renamed = _renamed(*({path: _kind(each) for path, each in side.items()} for side in (known, outputs)))
    for root, other in renamed.items():
        count = len(_below(known, root))
        text = f"output {root} is now {other} (the same leaves, {count})"
        yield Change(name, "outputs", "other", text, root, other)
        known |= {other + rest: output for rest, output in _below(known, root).items()}
    gone = [path for path in known if path not in outputs and _root(path) not in renamed]
    come = [path for path in outputs if path not in known]
    for word, paths in (("gone", gone), ("new", come)):
        if paths:
            shown = ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
            yield Change(name, "outputs", "other", f"{word}: output {shown}", gone, come)
    for path, output in outputs.items():
        if path in known:
            by = [side.get("by") or "exportcheck" for side in (known[path], output)]
            if by[0] != by[1] and known[path].get("ok") and output.get("ok"):
                text = f"{path}: compared by {by[1]}, was by {by[0]}"
                yield Change(name, "outputs", "other", text, *by)
            elif by == ["exportcheck", "exportcheck"]:
                yield from _error(name, known[path], output)


def _kind(output: Mapping[str, Any]) -> tuple[Any, int]:
    """(dtype, rank): the sizes are those of the worst call, which may be another one in each run."""
    return output.get("dtype"), len(output.get("shape") or ())


def _error(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    was, now = _number(old.get("max_abs")), _number(new.get("max_abs"))
    if was is None or now is None:
        # NaN, or none: nobody can say how far off it is. What was known got lost, and that is worse.
        if (was is None) != (now is None):
            shown = " -> ".join("no number" if each is None else f"{each:.1e}" for each in (was, now))
            effect = "worse" if now is None else "other"
            yield Change(name, "error", effect, f"{new['path']}: max abs {shown}", was, now)
        return
    allowed = _number(new.get("atol")) or 0.0
    # What rounding explains differs from run to run by as much as it moves eager.
    moves = _number(new.get("eager_moves")) if new.get("ok") else None
    floor = max(_ERROR_SHARE * allowed, moves or 0.0)
    if was == now or math.isinf(floor):
        return
    ratio = max(now, floor) / max(was, floor) if max(was, floor) else float("inf")
    if ratio > ERROR_BAND or ratio < 1 / ERROR_BAND:
        text = f"{new['path']}: max abs {was:.1e} -> {now:.1e} ({ratio:.2g}x, atol {allowed:.1e})"
        yield Change(name, "error", "worse" if ratio > 1 else "better", text, was, now)


def _operators(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """``: +8 Concat, +4 Add, -1 Cast``: the operators whose number changed most."""
    was, now = old.get("operators") or {}, new.get("operators") or {}
    changed = {key: now.get(key, 0) - was.get(key, 0) for key in {*was, *now}}
    most = sorted((key for key in changed if changed[key]), key=lambda key: (-abs(changed[key]), key))
    shown = [f"{changed[key]:+d} {key}" for key in most[:_MOST_OPERATORS]]
    more = (
        [f"and {counted(len(most) - _MOST_OPERATORS, 'other operator')}"]
        if len(most) > _MOST_OPERATORS
        else []
    )
    return f": {', '.join([*shown, *more])}" if was and now and shown else ""


def _ratio(name: str, kind: str, was: Any, now: Any, band: float, more: str = "") -> Iterator[Change]:
    old, new = _number(was), _number(now)
    if old is None or new is None or old == new:
        return
    if kind == "time" and abs(new - old) <= _START_SECONDS:
        return
    ratio = new / old if old else float("inf")
    if ratio > band or ratio < 1 / band:
        unit = {"size": " bytes", "time": " CPU s"}.get(kind, "")
        shown = f"{old:.1f} -> {new:.1f}" if kind == "time" else f"{old:.0f} -> {new:.0f}"
        short = kind == "time" and min(old, new) < _LEAST_SECONDS
        times = "" if short or not old else f" ({ratio:.2f}x)"
        yield Change(name, kind, "other", f"{kind} {shown}{unit}{times}{more}", was, now)


def _seconds(record: Mapping[str, Any]) -> float | None:
    """CPU seconds of a case that came to its end; how long a failure took says little."""
    if record["verdict"] != "pass":
        return None
    spent = (record.get("durations") or {}).values()
    return sum(float(stage.get("cpu_s") or 0.0) for stage in spent) or None
