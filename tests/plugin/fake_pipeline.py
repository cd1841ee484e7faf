"""Stands in for `pytest_exportcheck.pipeline`, so that the tests of the plugin need no torch.

A spec says what happens to it in ``model.kwargs``:

``load``
    What happens when the model is observed.
``do``
    What happens to a case, by exporter, by ``exporter/mode`` or by graph.
``refused``
    Sizes that eager refuses.
``shapes``
    The golden text that the observation proposes, or a mapping from dtype to text.

An action is the name of a stage (its error is raised there) or one of the other keys of `_act`.
"""

from __future__ import annotations

import os
import sys
import time

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

    def __init__(self, spec):
        self.spec = spec
        self.observations = {}
        SpecRun.alive += 1
        _log(f"open {spec.name}")

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


def facts_of(observation):
    return {"calls": observation.num_calls}


def run_case(run, case, stage, record):
    run.observe(case.device, case.dtype, enter=stage)
    stage("patch")
    stage("export")
    do = run.spec.model.kwargs.get("do", {})
    keys = (f"{case.exporter}/{case.patch_mode}", case.exporter, case.graph)
    _act(next((do[key] for key in keys if key in do), None), stage)
    for name in ("convert", "session", "run", "compare", "resize"):
        stage(name)
    record["nodes"] = 7
    record["resize"] = {"refused_by_eager": run.spec.model.kwargs.get("refused", [])}


def _act(action, stage):
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
    stage(action)
    raise error_class(action)(f"{action} went wrong", details=["first detail", "second detail"])


def _log(line):
    if "FAKE_LOG" in os.environ:
        with open(os.environ["FAKE_LOG"], "a") as file:
            file.write(f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')} {line}\n")
