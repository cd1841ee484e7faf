"""pytest-xdist: which distribution, what workers are told, and what a worker's death costs.

Nothing here imports xdist at module level; the two classes are registered only where xdist runs.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .crashes import StageMarkers
from .failures import representation, reproduce_command, reproduce_line
from .reports.record import case_fields, to_plain

if TYPE_CHECKING:
    from .controller import Controller
    from .session import Session

__all__ = ["ControllerSide", "WorkerSide", "choose_distribution", "worker_number"]

_INPUT = "exportcheck"


#: More than there are cases that crash: each restart is paid for by one.
_MANY_RESTARTS = 100_000


def worker_number(name: str) -> int:
    """0 for ``gw0``: which CUDA device a worker uses follows from it."""
    return int("".join(char for char in name if char.isdigit()) or 0)


def choose_distribution(config: pytest.Config) -> None:
    """With ``-n`` and no ``--dist``, keep each spec in one worker: ``loadscope``.

    Called before xdist replaces its default ``no`` by ``load``, so that a ``--dist`` of the user, on the
    command line or in ``addopts``, is still recognised.
    """
    option = config.option
    if not getattr(option, "numprocesses", None) or option.dist != "no" or option.distload:
        return
    option.dist = "loadscope"
    if option.maxworkerrestart is None:
        # A dead worker costs its own case; xdist's limit of 4 for each worker would cost all the others.
        option.maxworkerrestart = str(_MANY_RESTARTS)
    # Our order of the specs, longest first, is better than xdist's, most tests first.
    option.loadscopereorder = False
    option.exportcheck_chosen_dist = "loadscope"


class ControllerSide:
    """Registered in the controller of a distributed run."""

    def __init__(self, session: Session, controller: Controller) -> None:
        self._session = session
        self._controller = controller
        self._directory = Path(tempfile.mkdtemp(prefix="exportcheck-stages-"))
        session.stages_of_workers = self._directory
        # Fixed now: a worker that replaces a dead one must order its tests as the others did.
        self._remembered = controller.remembered()
        self._durations = controller.stored_durations()

    def pytest_unconfigure(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[_INPUT] = {"stages": str(self._directory), "durations": self._remembered}

    @pytest.hookimpl(optionalhook=True, trylast=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        # trylast, and registered before xdist's own: a scheduler of the user's still wins.
        if config.getoption("dist") != "loadscope":
            return None
        from .xdist_scheduler import SpecScheduling

        options = self._session.options
        exporters = self._session.exporters
        return SpecScheduling(config, log, self._durations, exporters, options.workers_per_gpu)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._controller.announce_collection(ids)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        output = getattr(node, "workeroutput", None) or {}
        self._controller.selection.leave_out(output.get("exportcheck_left_out", ()))
        deselected = output.get("exportcheck_deselected")
        if deselected is None:
            self._controller.note_partial("a worker died")
        elif deselected:
            self._controller.note_partial(f"{deselected} deselected")

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        worker = report.node.gateway.id
        marker = StageMarkers(self._directory, worker).read()
        if marker is None or marker.nodeid != crashitem:
            return
        message = f"worker {worker} died in stage {marker.stage} of {marker.case}"
        lines = [message, reproduce_line(self._session.config, crashitem)]
        report.longrepr = representation(marker.file, marker.line, "crash", lines)
        report.location = (marker.file, marker.line - 1, crashitem.partition("::")[2])
        record = {
            **case_fields(marker.case),
            "nodeid": crashitem,
            "verdict": f"crash {marker.stage}",
            "stage": marker.stage,
            "durations": {},
            "message": message,
            "reproduce": reproduce_command(self._session.config, crashitem),
        }
        report.exportcheck = to_plain(record)  # type: ignore[attr-defined]


class WorkerSide:
    """Registered in a worker."""

    def __init__(self, session: Session, workerinput: dict[str, Any]) -> None:
        self._session = session
        self._deselected = 0
        self._left_out: list[dict[str, Any]] = []
        told = workerinput.get(_INPUT, {})
        worker = str(workerinput["workerid"])
        session.worker = worker_number(worker)
        session.remembered = told.get("durations", {})
        if "stages" in told:
            session.markers = StageMarkers(Path(told["stages"]), worker)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._deselected += len(items)
        planned = filter(None, map(self._session.case_of, items))
        self._left_out += (case_fields(each.case) for each in planned)

    def pytest_sessionfinish(self) -> None:
        output: dict[str, Any] = self._session.config.workeroutput  # type: ignore[attr-defined]
        output["exportcheck_deselected"] = self._deselected
        output["exportcheck_left_out"] = to_plain(self._left_out)
