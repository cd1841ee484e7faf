"""Where a case runs, and what its failure is worth: it is confirmed in a process in which nothing ran before.

A failure that a fresh process does not confirm is reported as what it is, a verdict that depends on history.
A pass is not run again; `--isolate` gives every case a fresh process from the start.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .errors import ExportCheckError, HistoryError, ShapesError
from .fresh.messages import Failure, Work
from .fresh.work import perform

if TYPE_CHECKING:
    from .pipeline import SpecRun
    from .session import RunningCase, Session

__all__ = ["Confirmation", "ablation_of", "confirmation_of", "judge"]

#: What differs between two runs of one failure: addresses, counters, seconds, temporary names.
_NOISE = re.compile(rf"0x[0-9a-fA-F]+|{re.escape(tempfile.gettempdir())}\S+|\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")

#: How many of the cases that ran before are named.
_NAMED = 5


@dataclass(frozen=True)
class Confirmation:
    """What a fresh process says about a failure.

    Attributes
    ----------
    agrees:
        It fails at the same stage with the same class of error.
    failure:
        How it failed, ``None`` if it passed.
    same_message:
        Whether the messages are equal up to numbers.
    """

    agrees: bool
    failure: Failure | None
    same_message: bool


def confirmation_of(first: Failure, second: Failure | None) -> Confirmation:
    """Compare the failure of this process with that of a fresh one (``None``: it passed)."""
    if second is None:
        return Confirmation(False, None, False)
    agrees = (first.kind, first.stage, first.error) == (second.kind, second.stage, second.error)
    return Confirmation(agrees, second, _NOISE.sub("#", first.message) == _NOISE.sub("#", second.message))


def judge(session: Session, running: RunningCase, work: Work, run: Callable[[], SpecRun]) -> None:
    """Do `work`, fill the record of `running`, and raise the failure if there is one.

    Raises
    ------
    ExportCheckError
        The subclass of the stage that failed; `CrashError` or `StageTimeoutError` for a fresh process that
        gave no verdict; `HistoryError` for a failure that a fresh process does not confirm.
    """
    if session.options.isolate:
        _judge_isolated(session, running, work)
        return
    before = list(session.judged)
    session.judged.append(running.nodeid)
    try:
        perform(work, run, running.enter, running.record)
    except Exception as error:
        accepted = isinstance(error, ShapesError) and session.options.update
        if session.options.confirm and not accepted:
            _confirm(session, running, work, error, before)
        raise


def ablation_of(session: Session, work: Work) -> dict[str, Any]:
    """What the patches of a case are worth to it (`ablation.ablate`), found out in a fresh process.

    Nothing that goes wrong there reaches this process, or the verdict of the case.
    """
    limit = session.options.stage_limit
    try:
        outcome = session.fresh.run(replace(work, ablate=True, limit=limit), lambda stage: None, limit)
    except Exception as error:
        return {"not_done": f"{type(error).__name__}: {error}"}
    if outcome.failure is not None:
        return {"not_done": f"{_said(outcome.failure)}: {outcome.failure.message}"}
    return outcome.record


def _judge_isolated(session: Session, running: RunningCase, work: Work) -> None:
    running.enter("load")
    outcome = session.fresh.run(work, running.enter, session.options.stage_limit)
    running.record.update(outcome.record)
    running.record["isolated"] = True
    if session.fresh.why_no_fork is not None:
        running.record["why_no_fork"] = session.fresh.why_no_fork
    # For pytest's capture.
    sys.stdout.write(outcome.stdout)
    sys.stderr.write(outcome.stderr)
    if outcome.failure is not None:
        running.stage = outcome.failure.stage
        raise outcome.failure.exception()


def _confirm(session: Session, running: RunningCase, work: Work, error: Exception, before: list[str]) -> None:
    """Run the failed case again in a fresh process; returns if `error` may be reported as it is."""
    first = Failure.of(error, running.stage)
    began = time.perf_counter()
    key = _shared_by(work, first)
    confirmation = session.confirmations.get(key) if key is not None else None
    if confirmation is None:
        outcome = session.fresh.run(work, lambda stage: None, session.options.stage_limit)
        if outcome.set_up_failed:
            assert outcome.failure is not None
            running.record["confirmed"] = None
            _add(error, ["not confirmed:", outcome.failure.message, *outcome.failure.details])
            return
        confirmation = confirmation_of(first, outcome.failure)
        if key is not None:
            session.confirmations[key] = confirmation
    running.record["confirmed"] = confirmation.agrees
    running.record["confirm_s"] = round(time.perf_counter() - began, 3)
    second = confirmation.failure
    if confirmation.agrees:
        assert second is not None
        if not confirmation.same_message:
            running.record["message_in_fresh_process"] = second.message
            _add(error, [f"in a fresh process it fails at the same stage, but says: {second.message}"])
        return
    running.record["history"] = {
        "here": first.to_plain(),
        "fresh": second.to_plain() if second is not None else None,
        "before": before,
    }
    raise HistoryError(
        f"{_said(first)} in this process, {_said(second)} in a fresh one: the verdict depends on history",
        stage=first.stage,
        details=_both(first, second, before),
        facts=getattr(error, "facts", None),
    ) from error


def _shared_by(work: Work, failure: Failure) -> tuple[str | None, ...] | None:
    """What a failure of the model or of its calls, the same for every exporter, is known by."""
    if failure.stage not in ("load", "observe"):
        return None
    case = work.case
    return (work.spec, case.device, case.dtype, case.graph, failure.stage, failure.error, failure.message)


def _add(error: Exception, lines: list[str]) -> None:
    if isinstance(error, ExportCheckError):
        error.details += lines
    else:
        error.args = ("\n".join([str(error), *lines]),)


def _said(failure: Failure | None) -> str:
    if failure is None:
        return "passes"
    verb = {"crash": "crashes", "timeout": "hangs"}.get(failure.kind, "fails")
    return f"{verb} at {failure.stage}"


def _both(first: Failure, second: Failure | None, before: list[str]) -> list[str]:
    lines = ["in this process:", *_indented(first), "in a fresh process:"]
    lines += _indented(second) if second is not None else ["  it passes"]
    if not before:
        return [*lines, "no case was judged before it in this process: look at fixtures and other tests"]
    named = before[-_NAMED:]
    more = f", the last {_NAMED} of {len(before)}" if len(before) > _NAMED else ""
    return [*lines, f"judged before it in this process{more}:", *(f"  {nodeid}" for nodeid in named)]


def _indented(failure: Failure) -> list[str]:
    lines = [failure.message, *(f"  {line}" for detail in failure.details for line in detail.splitlines())]
    return [f"  {line}" for line in lines]
