"""Stands in for `pytest_exportcheck.pipeline`, so that the tests of the plugin need no torch.

A spec says what happens to it in ``model.kwargs``:

``load``
    What happens when the model is observed.
``do``
    What happens to a case, by exporter, by ``exporter/mode`` or by graph.
``says``
    The details of the failures that `do` makes.
``refused``
    Sizes that eager refuses.
``shapes``
    The golden text that the observation proposes, or a mapping from dtype to text.

An action is the name of a stage (its error is raised there) or one of the other keys of `_act`.
"""

from __future__ import annotations

import ctypes
import io
import os
import signal
import subprocess
import sys
import time
import warnings

import pytest

from pytest_exportcheck.errors import ShapesError, error_class

DEFAULT_SHAPES = "inputs:\n  x: float32[batch, 4]\n"


class Observation:
    def __init__(self, spec, dtype):
        shapes = spec.model.kwargs.get("shapes", DEFAULT_SHAPES)
        self._text = shapes[dtype] if isinstance(shapes, dict) else shapes
        self.num_calls = 3

    def golden_text(self, display_path):
        return f"# {display_path}\n{self._text}"


class SpecRun:
    alive = 0

    def __init__(self, spec, share=True, cache=None):
        self.spec = spec
        self.observations = {}
        SpecRun.alive += 1
        kept = f", cache {cache.folder.name} {cache.limit}" if cache else ""
        _log(f"open {spec.name}" + ("" if share else ", nothing shared") + kept)

    def observe(self, device, dtype, mode="none", enter=lambda stage: None):
        key = (device, dtype)
        if key not in self.observations:
            _log(f"observe {self.spec.name} {device} {dtype}")
            action = self.spec.model.kwargs.get("load")
            try:
                enter("load")
                enter("observe")
                _act(action, enter)
                self.observations[key] = Observation(self.spec, dtype)
            except Exception as error:
                self.observations[key] = error
        if isinstance(self.observations[key], Exception):
            raise self.observations[key]
        return self.observations[key]

    def close(self):
        SpecRun.alive -= 1
        _log(f"close {self.spec.name}")


def check_shapes(observation, golden_text, golden_path):
    proposed = observation.golden_text(golden_path)
    if golden_text is None:
        raise ShapesError(f"no accepted shapes: {golden_path} is missing", details=proposed.splitlines())
    if golden_text != proposed:
        raise ShapesError(
            f"inferred dynamic shapes differ from {golden_path}",
            details=[f"- {golden_text.splitlines()[-1]}", f"+ {proposed.splitlines()[-1]}"],
        )


def facts_of(observation, golden):
    return {"calls": observation.num_calls}


def run_case(run, case, stage, record):
    run.observe(case.device, case.dtype, enter=stage)
    stage("patch")
    stage("export")
    do = run.spec.model.kwargs.get("do", {})
    keys = (f"{case.exporter}/{case.patch_mode}", case.exporter, case.graph)
    _act(next((do[key] for key in keys if key in do), None), stage, run.spec.model.kwargs.get("says"))
    for name in ("convert", "session", "run", "compare", "resize"):
        stage(name)
    record["nodes"] = 7
    record["resize"] = {"refused_by_eager": run.spec.model.kwargs.get("refused", [])}
    if do.get("huge"):
        record["huge"] = ["x" * 1000] * do["huge"]


#: How often an action that depends on history was done in this process.
_times = {}


def _hang():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open("hanging", "a") as file:
        file.write(f"{os.getpid()} {child.pid}\n")
    time.sleep(600)


def _print():
    for number in range(20_000):
        print(f"line {number} of many")
    os.write(2, b"straight to the descriptor\n")


def _break():
    """What ends a process without a verdict: nothing that it says to the pytest process can be written."""
    import pytest_exportcheck.fresh.server

    def to_plain(record):
        raise KeyError("a record of nobody")

    pytest_exportcheck.fresh.server.to_plain = to_plain
    sys.stderr = io.StringIO()


_HOSTILE = {
    "breaks": _break,
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": _hang,
    "print": _print,
    "closes": lambda: os.closerange(3, 4096),
    "warn": lambda: warnings.warn("odd things happen", UserWarning, stacklevel=1),
}


def _act(action, stage, details=None):
    if action is None:
        return
    if action == "sys.exit":
        sys.exit(3)
    if action == "os._exit":
        os._exit(3)
    if action == "skip":
        pytest.skip("the exporter skips")
    if action == "bug":
        raise KeyError("a bug")
    if action == "sleep":
        time.sleep(0.5)
        return
    if action in _HOSTILE:
        _HOSTILE[action]()
        return
    if action.startswith("second "):
        _times[action] = _times.get(action, 0) + 1
        if _times[action] < 2:
            return
        action = action.removeprefix("second ")
    if action.startswith("first ") and not _times.setdefault(action, 0):
        _times[action] += 1
        action = action.split()[1]
    elif action.startswith("first "):
        action = action.split()[2]
    if action.startswith("env "):
        if action.removeprefix("env ") not in os.environ:
            return
        action = "export"
    stage(action)
    message = f"{action} went wrong" if action != "run" else f"run went wrong at {id(stage)}"
    raise error_class(action)(message, details=details or ["first detail", "second detail"])


def _log(line):
    if "FAKE_LOG" in os.environ:
        with open(os.environ["FAKE_LOG"], "a") as file:
            file.write(f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')} {line}\n")
