"""The ladder: from eager to the runtime's answer, step by step; the first step that differs is guilty."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..checks.frozen import frozen_in_program, onnx_dims
from ..errors import ExportCheckError, SessionError
from ..exporters.base import Exported, ExportRequest
from ..exporters.broken_guards import broken_guards
from ..exporters.guards import CaptureWatch
from ..exporters.onnx_dynamo import OnnxDynamo, capture
from ..noise import quietly
from ..plurals import counted
from ..pytrees import flatten_with_paths
from ..runtimes.base import open_session
from ..runtimes.onnx_runtime import is_onnx, onnx_input_dims
from .onnx_models import (
    LEVELS,
    OPTIMIZERS,
    proto_of,
    reference_outputs,
    run_at_level,
)
from .programs import decompose, decomposition_table, interpret
from .rungs import Ladder, Rung, innermost, kind_of, rung_of
from .subject import Clock, Sample, Subject, first_line

__all__ = ["Ladder", "Rung", "climb"]

#: How an exporter is asked for the graph as it was converted, without its own optimization.
_UNOPTIMIZED: dict[str, dict[str, Any]] = {
    "onnx-dynamo": {"optimize": False},
    "transformers-onnx": {"optimize": False},
    "onnx-torchscript": {"do_constant_folding": False},
}

#: The reference evaluator is that much slower than ONNX Runtime, roughly.
_EVALUATOR = 300.0

Outputs = list[tuple[str, Any]]


def climb(subject: Subject, clock: Clock, *, sample: Sample | None = None) -> Ladder:
    """Walk the steps of an export and name the first that differs from eager on the same inputs.

    The model is exported again. For an exporter other than ``onnx-dynamo`` capture, decomposition and
    conversion cannot be told apart; its own options say what is conversion and what its optimizer.

    Parameters
    ----------
    sample:
        The inputs; default: the first observed call, or other sizes, where the program fails or differs.
    """
    with subject.active(), quietly():
        return _Climb(subject, clock, sample).run()


class _Climb:
    def __init__(self, subject: Subject, clock: Clock, sample: Sample | None) -> None:
        self.subject = subject
        self.clock = clock
        self.sample = sample
        self.ladder = Ladder()
        self.paths: list[str] = []
        self.watch = CaptureWatch()
        self.kept: torch.export.ExportedProgram | None = None

    def run(self) -> Ladder:
        ladder = self.ladder
        self.clock.begin("export")
        try:
            ladder.final, self.paths = self.subject.export(self.watch, self._keep)
        except (Exception, SystemExit) as error:
            ladder.error = error
        if ladder.error is None and self.sample is None:
            self.sample = self._failing_sample()
        if self.sample is None:
            # Nothing to compare on; a refusal is looked at with the first inputs there are.
            self.sample = next(self.subject.samples(), None) if ladder.error is not None else None
        if self.sample is None:
            return ladder
        ladder.sample, ladder.inputs = self.sample.label, self.sample
        ladder.broken = broken_guards(self.watch, self.subject.shapes, self.sample.arguments)
        for step in (self._patches, self._steps_of_export, self._optimizer, self._runtime):
            step()
            if ladder.guilty:
                break
        if not ladder.guilty and ladder.error is not None:
            self._name("export", f"{self.subject.exporter.name}: {first_line(ladder.error)}")
        if not ladder.guilty and self._over("the remaining steps"):
            ladder.what = "undecided: the time budget was used up"
        return ladder

    # bookkeeping

    def _keep(self, program: torch.export.ExportedProgram, run: Any = None) -> None:
        """The captured program need not be captured again, unless a patch mode may have changed it."""
        if self.subject.mode is None or self.subject.mode.name == "none":
            self.kept = program

    def _failing_sample(self) -> Sample | None:
        """The first inputs on which the program, as the check runs it, fails or differs."""
        assert self.ladder.final is not None
        self.clock.begin("the program as the check runs it")
        try:
            session = open_session(self.ladder.final, self.subject.device, self.paths)
        except SessionError:
            return next(self.subject.samples(), None)
        for sample in self.subject.samples():
            try:
                got = session.run(sample.tensors)
            except Exception:  # whatever it raises, these are the inputs to look at
                return sample
            if not all(result.ok for result in sample.compare(got, self.subject.tolerances)):
                return sample
            if self.clock.over:
                break
        return None

    def _name(self, guilty: str, what: str, workaround: str = "") -> None:
        self.ladder.guilty, self.ladder.what, self.ladder.workaround = guilty, what, workaround

    def _over(self, what: str) -> bool:
        if self.clock.over:
            self.ladder.rungs.append(Rung(what, "not run", note="the time budget was used up"))
            return True
        return False

    def _measure(self, name: str, step: Callable[[], Outputs]) -> Rung:
        """Run a step, compare its outputs with eager, keep the rung."""
        began = time.perf_counter()
        self.clock.begin(name)
        assert self.sample is not None
        try:
            results = self.sample.compare(step(), self.subject.tolerances)
        except (Exception, SystemExit) as error:
            self.ladder.error = error
            rung = Rung(
                name,
                "fails",
                note=f"{kind_of(error)}{first_line(error)}",
                seconds=time.perf_counter() - began,
            )
        else:
            rung = rung_of(name, results, time.perf_counter() - began)
        self.ladder.rungs.append(rung)
        return rung

    # steps

    def _patches(self) -> None:
        mode = self.subject.mode
        if mode is None or mode.name == "none":
            return
        target = self.subject.target
        assert self.sample is not None
        arguments = self.sample.arguments

        def patched() -> Outputs:
            with mode.apply(self.subject.model, self.subject.kind):
                return flatten_with_paths(target.eager(arguments))

        if self._measure(f"patch mode {mode.name} in eager", patched).bad:
            self._name(
                "patches",
                f"patch mode {mode.name}: the patched model itself gives other numbers in eager",
                "export without it, or leave the patch out that changes the outputs",
            )

    def _steps_of_export(self) -> None:
        exporter = self.subject.exporter
        if isinstance(exporter, OnnxDynamo):
            self._steps_of_dynamo(exporter)
        elif isinstance(getattr(self.ladder.final, "program", None), torch.export.ExportedProgram):
            self._captured(lambda request: self._final_program())
        elif self.ladder.final is not None and not is_onnx(self.ladder.final.program):
            self._whole(f"the program of {exporter.name}", f"{exporter.name}")
        elif self.ladder.final is not None:
            self._plain_of_exporter()
        elif exporter.name.startswith("torch-export"):
            error = self.ladder.error
            assert error is not None
            self.ladder.rungs.append(Rung("capture", "fails", note=f"{kind_of(error)}{first_line(error)}"))
            self._name("capture", f"torch.export refuses the model: {first_line(error)}")

    def _final_program(self) -> torch.export.ExportedProgram:
        assert self.ladder.final is not None
        program: torch.export.ExportedProgram = self.ladder.final.program
        return program

    def _captured(self, make: Callable[[ExportRequest], torch.export.ExportedProgram]) -> bool:
        """The captured program against eager; whether it is right."""
        ladder = self.ladder
        assert self.sample is not None
        sample = self.sample

        def outputs() -> Outputs:
            ladder.captured = self.kept
            if ladder.captured is None or not self.paths:
                with self.subject.request() as request:
                    ladder.captured = make(request)
                    self.paths = request.output_paths
            if isinstance(self.subject.exporter, OnnxDynamo):
                return interpret(ladder.captured, sample.tensors, self.paths)
            return open_session(Exported(ladder.captured), self.subject.device, self.paths).run(
                sample.tensors
            )

        rung = self._measure("capture", outputs)
        if not rung.bad:
            return True
        if ladder.captured is None:
            self._name("capture", f"torch.export refuses the model: {rung.note}")
        elif ladder.refused:
            self._name("capture", f"the captured program refuses these inputs: {ladder.broken[0]}")
        elif rung.status == "fails":
            self._name("capture", f"the captured program does not take these inputs: {rung.note}")
        else:
            self._name("capture", "torch.export: the captured program gives other numbers than eager")
        return False

    def _steps_of_dynamo(self, exporter: OnnxDynamo) -> None:
        if not self._captured(capture) or self._over("decomposition"):
            return
        ladder = self.ladder
        captured = ladder.captured
        assert captured is not None
        assert self.sample is not None
        sample = self.sample
        try:
            with self.subject.request(optimize=False) as request:
                ladder.plain = exporter.convert(request, captured)
            ladder.decomposed = getattr(ladder.plain.program, "exported_program", None)
        except (Exception, SystemExit) as error:
            self._refused_conversion(captured, error)
            return

        def decomposed() -> Outputs:
            if ladder.decomposed is None:
                ladder.decomposed = decompose(captured)
            return interpret(ladder.decomposed, sample.tensors, self.paths)

        if self._measure("decomposition", decomposed).bad:
            operator = self._guilty_decomposition(captured)
            self._name(
                "decomposition",
                f"run_decompositions: {operator or 'the decomposed program gives other numbers'}",
                "convert the operator before it is decomposed, by an entry of its own in "
                "custom_translation_table",
            )
            return
        self._conversion()

    def _refused_conversion(self, captured: torch.export.ExportedProgram, error: BaseException) -> None:
        ladder = self.ladder
        assert self.sample is not None
        sample = self.sample

        def decomposed() -> Outputs:
            ladder.decomposed = decompose(captured)
            return interpret(ladder.decomposed, sample.tensors, self.paths)

        if self._measure("decomposition", decomposed).bad:
            self._name("decomposition", f"run_decompositions: {ladder.rungs[-1].note or 'other numbers'}")
            return
        reason = innermost(error)
        ladder.error = error
        ladder.rungs.append(Rung("conversion", "fails", note=first_line(reason)))
        self._name("conversion", f"conversion to ONNX is refused: {first_line(reason)}")

    def _guilty_decomposition(self, captured: torch.export.ExportedProgram) -> str:
        """The operator whose decomposition alone changes the numbers."""
        assert self.sample is not None
        try:
            table = decomposition_table()
        except (ImportError, AttributeError):
            return ""
        used = {node.target for node in captured.graph.nodes if node.op == "call_function"}
        for operator in [operator for operator in table if operator in used]:
            if self.clock.over:
                return ""
            try:
                program = decompose(captured, {operator: table[operator]})
                results = self.sample.compare(
                    interpret(program, self.sample.tensors, self.paths), self.subject.tolerances
                )
            except Exception:  # an operator that cannot be decomposed alone
                continue
            if not all(result.ok for result in results):
                return f"the decomposition of {operator} changes the numbers"
        return ""

    def _frozen(self) -> bool:
        """Whether the program of the exporter fixes axes that are dynamic in the calls."""
        final, exporter = self.ladder.final, self.subject.exporter
        assert final is not None
        declared = onnx_input_dims(final.program)
        if declared is None:
            return False
        frozen = frozen_in_program(onnx_dims(declared, final.input_names), self.subject.shapes, {})
        if not frozen:
            return False
        what = f"{counted(len(frozen), 'dynamic axis', 'dynamic axes')} became constant: {frozen[0]}"
        self.ladder.rungs.append(Rung("input axes", "fails", note=what))
        self._name("export", f"{exporter.name}: {what}")
        return True

    def _plain_of_exporter(self) -> None:
        """An exporter of which only the result is known, with its optimization turned off if it has one."""
        ladder, exporter = self.ladder, self.subject.exporter
        if self._frozen():
            return
        off = _UNOPTIMIZED.get(exporter.name)
        if off is None:
            ladder.plain = ladder.final
        else:
            try:
                with self.subject.request(**off) as request:
                    ladder.plain = exporter.export(request)
            except (Exception, SystemExit) as error:
                note = f"without its optimization: {first_line(error)}"
                ladder.rungs.append(Rung("conversion", "not run", note=note))
                return
        self._conversion()

    def _whole(self, rung: str, what: str) -> None:
        assert self.sample is not None
        sample, final = self.sample, self.ladder.final
        assert final is not None
        run = self._measure(
            rung, lambda: open_session(final, self.subject.device, self.paths).run(sample.tensors)
        )
        if run.bad:
            self._name("export", f"{what}: its program {run.note or 'gives other numbers than eager'}")

    def _conversion(self) -> None:
        plain = self.ladder.plain
        assert plain is not None
        assert self.sample is not None
        sample = self.sample
        rung = self._measure(
            "conversion",
            lambda: self._timed(lambda: run_at_level(plain, sample.tensors, "DISABLE_ALL")),
        )
        if not rung.bad:
            return
        steps = "conversion" if self.ladder.captured is not None else f"{self.subject.exporter.name}"
        self._kernel_or(
            plain,
            rung,
            "conversion",
            f"{steps} to ONNX: "
            + (
                "the converted graph gives other numbers"
                if rung.status == "differs"
                else f"onnxruntime fails on the converted graph: {rung.note}"
            ),
            "give a function of your own for the operator in custom_translation_table",
        )

    def _timed(self, step: Callable[[], Outputs]) -> Outputs:
        began = time.perf_counter()
        outputs = step()
        self._ort_seconds = time.perf_counter() - began
        return outputs

    _ort_seconds = 1.0

    def _kernel_or(self, exported: Exported, rung: Rung, guilty: str, what: str, workaround: str) -> None:
        """Tell a wrong graph from a wrong kernel: the reference evaluator runs the same graph."""
        assert self.sample is not None
        sample = self.sample
        name = f"reference evaluator ({guilty})"
        nodes = len(proto_of(exported.program).graph.node)
        expected = self._ort_seconds * _EVALUATOR + nodes * 1e-3
        if expected > self.clock.left / 2:
            note = f"it would take about {expected:.0f} s, {self.clock.left:.0f} s are left"
            self.ladder.rungs.append(Rung(name, "not run", note=note))
            self._name(guilty, f"{what} (or a kernel: the reference evaluator was not run)", workaround)
            return
        error, self.ladder.error = self.ladder.error, None
        check = self._measure(name, lambda: reference_outputs(exported, sample.tensors))
        self.ladder.error = error
        if check.status == "fails":
            note = f"(or a kernel: the reference evaluator cannot run the graph: {check.note})"
            self._name(guilty, f"{what} {note}", workaround)
        elif check.status == "ok":
            problem = f"fails: {rung.note}" if rung.status == "fails" else "differs from it"
            self._name(
                "kernel",
                "a kernel of onnxruntime: the reference evaluator agrees with eager on the same graph, "
                f"onnxruntime without optimization {problem}",
                "write the operator in another way, or use another execution provider, and report it",
            )
        else:
            self._name(guilty, what, workaround)

    def _optimizer(self) -> None:
        """The exporter's own optimization of the ONNX graph."""
        ladder = self.ladder
        final, plain = ladder.final, ladder.plain
        if plain is None or final is plain or self.sample is None or self._over("onnx optimizer"):
            return
        sample = self.sample
        if final is None:
            # Exported without optimization, refused with it.
            assert ladder.error is not None
            ladder.rungs.append(Rung("onnx optimizer", "fails", note=first_line(ladder.error)))
            self._name(
                "onnx optimizer", f"onnxscript optimizer: {first_line(ladder.error)}", self._turn_off()
            )
            return
        rung = self._measure("onnx optimizer", lambda: run_at_level(final, sample.tensors, "DISABLE_ALL"))
        if rung.bad:
            what = "onnxscript optimizer" if self.subject.exporter.name != "onnx-torchscript" else "folding"
            problem = (
                f"onnxruntime fails on the optimized graph: {rung.note}"
                if rung.status == "fails"
                else "the optimized graph gives other numbers"
            )
            self._kernel_or(final, rung, "onnx optimizer", f"{what}: {problem}", self._turn_off())

    def _turn_off(self) -> str:
        off = _UNOPTIMIZED.get(self.subject.exporter.name, {})
        options = ", ".join(f"{key}: {str(value).lower()}" for key, value in off.items())
        return f"exporter_options: {{{self.subject.exporter.name}: {{{options}}}}}"

    def _runtime(self) -> None:
        """ONNX Runtime's own optimizations, then its provider."""
        final = self.ladder.final
        if final is None or self.sample is None or not is_onnx(final.program):
            return
        sample = self.sample
        lower = "DISABLE_ALL"
        for level in LEVELS[1:]:
            if self._over(f"onnxruntime {level}"):
                return
            rung = self._measure(f"onnxruntime {level}", partial(run_at_level, final, sample.tensors, level))
            if rung.bad:
                self._name(
                    f"onnxruntime {level}",
                    f"onnxruntime graph optimization (level {level.removeprefix('ENABLE_')})"
                    + (f": {rung.note}" if rung.status == "fails" else ""),
                    f"SessionOptions.graph_optimization_level = ORT_{lower}",
                )
                self._which_optimizer(level)
                return
            lower = level
        self._provider(final, sample)

    def _provider(self, final: Exported, sample: Sample) -> None:
        if self.subject.device == "cpu" or self._over("provider"):
            return
        rung = self._measure(
            "provider", lambda: open_session(final, self.subject.device, self.paths).run(sample.tensors)
        )
        if rung.bad:
            self._name(
                "provider",
                f"the execution provider for {self.subject.device}: on the CPU the same model agrees",
                "run the model on the CPU, and report it",
            )

    def _which_optimizer(self, level: str) -> None:
        """Name the single optimization of `level` without which the numbers are right."""
        final, sample = self.ladder.final, self.sample
        assert final is not None
        assert sample is not None

        def right(disabled: tuple[str, ...]) -> bool:
            with contextlib.suppress(ExportCheckError, RuntimeError):
                got = run_at_level(final, sample.tensors, level, disabled=disabled)
                return all(result.ok for result in sample.compare(got, self.subject.tolerances))
            return False

        suspects: tuple[str, ...] = OPTIMIZERS
        if not right(suspects):
            return
        while len(suspects) > 1:
            if self.clock.over:
                return
            half = len(suspects) // 2
            suspects = next(
                (part for part in (suspects[:half], suspects[half:]) if right(part)),
                (),
            )
        if suspects:
            self.ladder.what += f", {suspects[0]}"
            self.ladder.workaround = (
                f'InferenceSession(..., disabled_optimizers=["{suspects[0]}"]), or {self.ladder.workaround}'
            )
