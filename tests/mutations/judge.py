"""Runs a mutant through the stages that a user's case goes through, and tells where it was caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import onnx
import onnx_ir
import torch

from pytest_exportcheck.cases import CaseId
from pytest_exportcheck.errors import ExportCheckError
from pytest_exportcheck.exporters.base import Exported, ExportRequest
from pytest_exportcheck.exporters.onnx_dynamo import OnnxDynamo
from pytest_exportcheck.exporters.registry import EXPORTERS
from pytest_exportcheck.pipeline import SpecRun, run_case
from pytest_exportcheck.pytrees import register_flattening_functions
from pytest_exportcheck.spec import load_spec

from .breaks import Subject
from .models import MODELS, SOURCE

__all__ = ["Judge", "judges", "table"]


class _Kept:
    """An exporter that exports once, and hands out what it was given."""

    name = "mutant"
    target = "onnx"

    def __init__(self) -> None:
        self.right: Exported | None = None
        self.given: Exported | None = None

    def export(self, request: ExportRequest) -> Exported:
        if self.right is None:
            made = OnnxDynamo().export(request)
            self.right = replace(made, program=onnx_ir.to_proto(made.program.model))
        return self.given or self.right


class Judge:
    """One model: exported when it is first asked for."""

    def __init__(self, name: str, folder: Path) -> None:
        spec = folder / f"{name}.yaml"
        spec.write_text(MODELS[name], encoding="utf-8")
        self.name = name
        self._run = SpecRun(load_spec(spec, folder))
        self._exporter = _Kept()
        self._shapes: dict[str, list[tuple[int, ...]]] = {}

    def verdict(self, given: Exported | None = None) -> tuple[str, str]:
        """(``pass`` or the stage that failed, the message)."""
        self._exporter.given = given
        EXPORTERS.register("mutant", self._exporter)
        try:
            case = CaseId(self._run.spec.relative, "mutant", "none", "cpu", "float32")
            run_case(self._run, case, lambda stage: None, {})
        except ExportCheckError as error:
            return error.stage, str(error)
        finally:
            EXPORTERS.unregister("mutant")
        return "pass", ""

    def mutant(self, mutate: Callable[[Subject], bool]) -> Exported | None:
        """A changed copy of the exported model; ``None`` if `mutate` does not apply to it."""
        right = self._exporter.right
        if right is None:
            stage, message = self.verdict()
            assert stage == "pass", f"the right model fails: {message}"
            right = self._exporter.right
            assert right is not None
            calls = self._run.observe("cpu", "float32").graphs[None].calls
            by_path: dict[str, list[tuple[int, ...]]] = {}
            with register_flattening_functions(None):
                leaves = [pair for call in calls for pair in call.output_leaves()]
            for path, leaf in leaves:
                if isinstance(leaf, torch.Tensor):
                    by_path.setdefault(path, []).append(tuple(leaf.shape))
            names = [value.name for value in right.program.graph.output]
            self._shapes = {
                name: by_path[path] for name, path in zip(names, right.output_paths, strict=True) if path
            }
        model = onnx.ModelProto()
        model.CopyFrom(right.program)
        names = [value.name for value in model.graph.output]
        subject = Subject(
            model,
            self._shapes,
            dict(zip(names, right.output_paths, strict=True)),
            list(right.output_paths),
        )
        if not mutate(subject):
            return None
        return replace(right, program=subject.model, output_paths=subject.output_paths)

    def judge(self, mutate: Callable[[Subject], bool]) -> tuple[str, str] | None:
        """The verdict on a mutant; ``None`` where there is none."""
        mutant = self.mutant(mutate)
        return None if mutant is None else self.verdict(mutant)

    def close(self) -> None:
        self._run.close()


@contextmanager
def judges(folder: Path) -> Iterator[dict[str, Judge]]:
    """A judge for each model, by name."""
    (folder / "models.py").write_text(SOURCE, encoding="utf-8")
    made = {name: Judge(name, folder) for name in MODELS}
    try:
        yield made
    finally:
        for judge in made.values():
            judge.close()


def table(verdicts: Mapping[tuple[str, str], str | None]) -> list[str]:
    """Lines of a table: mutations down, models across, the stage in each cell (``-``: does not apply)."""
    models = list(dict.fromkeys(model for _, model in verdicts))
    mutations = list(dict.fromkeys(mutation for mutation, _ in verdicts))
    width = max(map(len, mutations))
    lines = [" " * width + "".join(f"  {model:>9}" for model in models)]
    for mutation in mutations:
        cells = "".join(f"  {verdicts.get((mutation, model)) or '-':>9}" for model in models)
        lines.append(f"{mutation:<{width}}{cells}")
    return lines
