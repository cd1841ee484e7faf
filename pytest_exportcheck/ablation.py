"""Which patches of a mode a case needs: it goes through its stages without each of them, and with each alone.

Knows nothing of pytest, and says nothing about the verdict of the case itself. Shared by all these runs: the
model, the observation, and the outcome of a run wherever another one must come out the same, because a patch
that it lacks was not called, or because the captured program is the same one. Each run has a process of its
own where that is possible, forked after the model was observed and before anything was exported.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from .cases import CaseId
from .errors import ExportCheckError
from .exporters.base import Exporter, target_of
from .exporters.fingerprint import fingerprint
from .exporters.guards import CaptureWatch
from .observe.observation import GraphObservation
from .patches.modes import PatchList
from .pipeline import OWN, SpecRun, run_case
from .plurals import counted
from .registry import load_exporter

__all__ = ["ablate", "one_thread"]

#: Part of the time that a stage may take: the process that waits for ours must not lose its patience first.
_SHARE = 0.9


@dataclass(frozen=True)
class Outcome:
    """How the case ends with some of the patches.

    Attributes
    ----------
    verdict:
        ``pass``, or the stage that failed, ``crash STAGE``, ``timeout STAGE``.
    message:
        Of the failure.
    kept:
        The patches that were there.
    used:
        Those that were called, in eager or in the export, or whose calls cannot be counted.
    eager:
        Those that were called in eager calls.
    late:
        Those that were called after the capture, or may have been.
    program:
        Fingerprint of what was captured, ``""`` where nothing was.
    changes:
        Those that change what the model computes.
    same_as:
        The captured program is that of the run with these patches, whose outcome holds.
    """

    verdict: str
    message: str = ""
    kept: frozenset[str] = frozenset()
    used: frozenset[str] = frozenset()
    eager: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()
    program: str = ""
    changes: tuple[str, ...] = ()
    same_as: frozenset[str] | None = None


@dataclass
class _Runs:
    """The runs of one case, each made once.

    Attributes
    ----------
    limit:
        Seconds that a stage may take, ``None``: any.
    observed_with:
        The patches that were called while the calls were observed under the whole mode.
    made, by_calls, by_graph:
        How many runs were made; how many were spared because a patch was not called, and how many ended at
        the capture because the program was known.
    """

    run: SpecRun
    case: CaseId
    mode: PatchList
    enter: Callable[[str], None]
    limit: float | None
    observed_with: frozenset[str]
    known: dict[frozenset[str], Outcome] = field(default_factory=dict)
    made: int = 0
    by_calls: int = 0
    by_graph: int = 0

    def outcome(self, kept: Iterable[str]) -> Outcome:
        """The outcome with the patches `kept`."""
        wanted = frozenset(kept)
        if wanted in self.known:
            return self.known[wanted]
        for other in self.known.values():
            # What was not called in a run changes nothing when it is not there.
            if other.used <= wanted <= other.kept and not other.verdict.startswith(("crash", "timeout")):
                self.by_calls += 1
                return self._note(wanted, replace(other, kept=wanted))
        found = self._made(wanted)
        self.made += 1
        if found.same_as is not None:
            self.by_graph += 1
            other = self.known[found.same_as]
            late = other.late & wanted
            found = replace(
                found,
                verdict=other.verdict,
                message=other.message,
                used=found.used | late,
                eager=other.eager & wanted,
                late=late,
                program=other.program,
            )
        return self._note(wanted, found)

    def _note(self, kept: frozenset[str], found: Outcome) -> Outcome:
        self.known[kept] = found
        return found

    def _made(self, kept: frozenset[str]) -> Outcome:
        def work(enter: Callable[[str], None]) -> Outcome:
            return _run(self, kept, enter)

        if _may_fork(self.case.device):
            return _forked(work, kept, self.enter, self.limit)
        return work(self.enter)


class _Known(BaseException):
    """The captured program is known; no `Exception`, so that no exporter takes it for its own."""

    def __init__(self, kept: frozenset[str]) -> None:
        super().__init__()
        self.kept = kept


def _run(runs: _Runs, kept: frozenset[str], enter: Callable[[str], None]) -> Outcome:
    """One run of the case with the patches `kept`."""
    run, case, mode = runs.run, runs.case, runs.mode
    name = (
        f"{mode.name} with {counted(len(kept), 'patch', 'patches')}"
        if kept
        else f"{mode.name} without its patches"
    )
    part = mode.subset(kept, name)
    run.modes[name] = part
    # Observed without what this run lacks, or it was not called: the inputs are the same.
    if mode.observed_under_itself and runs.observed_with <= kept:
        run.share_observation(case.device, case.dtype, str(case.patch_mode), name)
    captured: dict[str, Any] = {}

    def probe(
        program: torch.export.ExportedProgram, watch: CaptureWatch, graph: GraphObservation, activity: Any
    ) -> None:
        if "program" in captured:
            return
        captured["program"] = fingerprint(program, watch, graph.shapes)
        captured["calls"] = activity.so_far()
        for other in runs.known.values():
            lacks = other.kept - kept
            if (
                captured["program"] == other.program
                and kept < other.kept
                # What it lacks must matter for the capture only: not for the conversion, nor for eager.
                and not lacks & (other.late | (other.eager if mode.observed_under_itself else frozenset()))
            ):
                raise _Known(other.kept)

    verdict, message, changes, same_as = "pass", "", [], None
    record: dict[str, Any] = {}
    try:
        run_case(run, replace(case, patch_mode=name), enter, record, probe)
    except _Known as found:
        same_as = found.kept
    except ExportCheckError as error:
        verdict, message = error.stage, error.message
        changes = dict(error.facts.get("patches") or {}).get("changes", [])  # type: ignore[call-overload]
    finally:
        run.drop_mode(name)
    used = frozenset().union(*part.used.values()) if part.used else frozenset()
    calls = captured.get("calls", {})
    late = {
        patch
        for patch, count in (record.get("patches") or {}).get("called", {}).items()
        if count > calls.get(patch, 0)
    }
    return Outcome(
        verdict,
        message,
        kept,
        used,
        frozenset(part.used.get("eager", ())),
        # What cannot be counted may have been there.
        frozenset(late) | (used - set(calls)),
        captured.get("program", ""),
        tuple(changes),
        same_as,
    )


def ablate(
    run: SpecRun,
    case: CaseId,
    enter: Callable[[str], None] = lambda stage: None,
    limit: float | None = None,
) -> dict[str, Any]:
    """What each patch is worth to a case, as plain builtins for its record.

    Parameters
    ----------
    run:
        Of this process; its mode is used, its model should not have been exported yet.
    enter:
        Called with the stages of every run.
    limit:
        Seconds that a stage may take, where runs have processes of their own.

    Returns
    -------
    dict
        ``not_done``: why there is nothing to say. Otherwise ``with`` (the verdict with all patches), ``base``
        (without those that harm or change results, where there are such), ``without_any``, ``patches`` (name
        -> ``kind``, ``without``, ``message`` of the failure without it, and ``alone``, the verdict with it
        alone, where ``with`` and ``without_any`` differ), ``never_called``, and how many runs it took.

        The kinds: ``needed`` (fails without it), ``alternative`` (neutral, and so is another, but not both at
        once), ``neutral`` (passes without it too), ``failing`` (fails with and without it),
        ``harmful`` (passes without it), ``changing`` (eager computes something else with it).
    """
    began = time.perf_counter()
    name = str(case.patch_mode)
    try:
        loaded = run.mode(name)
        if name in ("none", OWN):
            return {}
        if not isinstance(loaded, PatchList):
            return {"not_done": f"patch mode {name} ({type(loaded).__name__}) does not tell its patches"}
        # One of our own: what it notes as used is of this case.
        mode = loaded.subset(_names(loaded, run, case), name)
        if mode.observed_under_itself:
            # Anew: which patches are called meanwhile decides what runs without them may share.
            run.drop_mode(name)
            run.modes[name] = mode
        observation = run.observe(
            case.device, case.dtype, name if mode.observed_under_itself else "none", enter
        )
        observation.graph(case.graph)
        made = run.prepared(case, mode, observation, _target(case))
        if made is not mode:
            # Methods were rewritten for this graph: they are patches like the others.
            assert isinstance(made, PatchList)
            mode = made.subset(_names(made, run, case), name)
    except ExportCheckError as error:
        return {"not_done": f"fails at {error.stage}: {error.message}"}
    except LookupError as error:
        return {"not_done": str(error)}  # an unknown exporter
    finally:
        run.modes.pop(name, None)
    runs = _Runs(run, case, mode, enter, limit, frozenset(mode.used.get("eager", ())))
    found = _judge_all(runs)
    return {
        **found,
        "runs": runs.made,
        "shared": {"calls": runs.by_calls, "graph": runs.by_graph},
        "seconds": round(time.perf_counter() - began, 2),
    }


def _names(mode: PatchList, run: SpecRun, case: CaseId) -> list[str]:
    patches = mode.patches(run.model(case.device, case.dtype), _target(case))
    return [patch.name for patch in patches if not patch.rests()]


def _target(case: CaseId) -> str:
    exporter: Any = load_exporter(str(case.exporter))
    assert isinstance(exporter, Exporter)
    return target_of(exporter)


def _judge_all(runs: _Runs) -> dict[str, Any]:
    """Leave one out, only one, none, and all neutral ones at once.

    What changes results and what harms is left out first: it hides what the others are worth.
    """
    assert runs.mode.only is not None
    everything = present = frozenset(runs.mode.only)
    whole = base = runs.outcome(present)
    changing: set[str] = set()
    while base.verdict == "patch" and set(base.changes) - changing:
        changing.update(base.changes)
        present = everything - changing
        base = runs.outcome(present)
    # Before the run with none at all, which comes out the same if no other patch is called in its place.
    runs.outcome(present - base.used)
    bare = runs.outcome(())
    kinds = {name: ("changing", everything - {name}) for name in changing}
    while harmful := _harmful(runs, present, base):
        kinds |= {name: ("harmful", present - {name}) for name in harmful}
        present -= harmful
        base = runs.outcome(present)
    called = sorted(present & base.used)
    for name in called:
        without = runs.outcome(present - {name})
        kinds[name] = (_kind(base, without), present - {name})
        # In the place of this one another may be called.
        called += sorted((present & without.used).difference(called))
    neutral = frozenset(name for name, (kind, _) in kinds.items() if kind == "neutral")
    for name in _together(runs, present, base, neutral):
        kinds[name] = ("alternative", present - {name})
    # Where the case ends in the same way without any patch, that it does so with only one says nothing more.
    alone = bare.verdict != whole.verdict
    return {
        "with": whole.verdict,
        **({"base": base.verdict} if base is not whole else {}),
        **({"message": whole.message} if whole.message else {}),
        "without_any": bare.verdict,
        "patches": {
            name: {
                "kind": kind,
                "without": runs.outcome(kept).verdict,
                **({"alone": runs.outcome({name}).verdict} if alone else {}),
                **({"message": message} if (message := runs.outcome(kept).message) else {}),
            }
            for name, (kind, kept) in sorted(kinds.items())
        },
        "never_called": sorted(everything - set(kinds)),
    }


def _kind(base: Outcome, without: Outcome) -> str:
    if base.verdict != "pass":
        return "failing"
    return "neutral" if without.verdict == "pass" else "needed"


def _harmful(runs: _Runs, present: frozenset[str], base: Outcome) -> frozenset[str]:
    """The patches without which a failing case passes; several, if it takes their absence altogether."""
    if base.verdict == "pass":
        return frozenset()
    called = present & base.used
    single = frozenset(name for name in called if runs.outcome(present - {name}).verdict == "pass")
    if single or runs.outcome(present - called).verdict != "pass":
        return single
    return frozenset(_able(runs, present, base, called))


def _together(runs: _Runs, present: frozenset[str], base: Outcome, neutral: frozenset[str]) -> Sequence[str]:
    """Those of the neutral patches that are so only as long as the others are there."""
    if base.verdict != "pass" or runs.outcome(present - neutral).verdict == "pass":
        return []
    return _able(runs, present, base, neutral)


def _able(runs: _Runs, present: frozenset[str], base: Outcome, group: frozenset[str]) -> Sequence[str]:
    """Those of a group that do by themselves what the whole group does; if none does, those of a smallest
    part that does it, and those that can stand for one of these.
    """

    def does(part: frozenset[str]) -> bool:
        return runs.outcome(present - (group - part)).verdict == base.verdict

    able = [name for name in group if does(frozenset({name}))]
    if able:
        return able
    part = group
    for name in sorted(group):
        if does(part - {name}):
            part -= {name}
    others = [name for name in sorted(group - part) if any(does(part - {one} | {name}) for one in part)]
    return [*part, *others]


# processes


def _may_fork(device: str) -> bool:
    """Whether a process of its own is possible: neither CUDA nor other threads survive a fork."""
    if not sys.platform.startswith("linux") or device != "cpu" or torch.get_num_threads() > 1:
        return False
    return threading.active_count() == 1


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes in one thread inside the block: a pool of OpenMP threads does not survive a fork."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _forked(
    work: Callable[[Callable[[str], None]], Outcome],
    kept: frozenset[str],
    enter: Callable[[str], None],
    limit: float | None,
) -> Outcome:
    """`work` in a child process; a crash or a hang of it is an outcome."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            with os.fdopen(writer, "w", encoding="utf-8") as stream:

                def entered(stage: str) -> None:
                    print(json.dumps(stage), file=stream, flush=True)

                print(json.dumps(_to_plain(work(entered))), file=stream, flush=True)
            status = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)  # The other one may be silenced.
        finally:
            # Neither exit handlers nor destructors: they belong to the process that was forked.
            os._exit(status)
    os.close(writer)
    stage, found = _followed(child, reader, enter, None if limit is None else limit * _SHARE)
    _, status = os.waitpid(child, 0)
    if found is not None:
        return found
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and limit is not None:
        return Outcome(f"timeout {stage}", f"had not ended after {limit:g} s", kept, kept, kept, kept)
    how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
    return Outcome(f"crash {stage}", f"the process ended with {how}", kept, kept, kept, kept)


def _followed(
    child: int, reader: int, enter: Callable[[str], None], limit: float | None
) -> tuple[str, Outcome | None]:
    """The stage that the child entered last, and its outcome if it has sent one; kills it at its limit."""
    stage, rest = "load", b""
    with os.fdopen(reader, "rb", buffering=0) as source:
        deadline = None if limit is None else time.monotonic() + limit
        while True:
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([source], [], [], wait)[0]:
                os.kill(child, signal.SIGKILL)
                return stage, None
            block = source.read(1 << 16)
            if not block:
                return stage, None
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if isinstance(message, dict):
                    return stage, _from_plain(message)
                stage = message
                enter(stage)
                deadline = None if limit is None else time.monotonic() + limit


def _to_plain(outcome: Outcome) -> dict[str, Any]:
    return {
        key: sorted(value) if isinstance(value, frozenset) else value
        for key, value in asdict(outcome).items()
    }


def _from_plain(data: dict[str, Any]) -> Outcome:
    sets = {name: frozenset(data[name]) for name in ("kept", "used", "eager", "late")}
    same = data["same_as"]
    return Outcome(
        **{
            **data,
            **sets,
            "changes": tuple(data["changes"]),
            "same_as": None if same is None else frozenset(same),
        }
    )
