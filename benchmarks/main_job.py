"""The main job beside what one would write by hand, and beside the calls that cannot be avoided.

    python benchmarks/main_job.py [--rows ours script ...] [--json FILE] [SPEC ...]

The shipped specs, or those that are named, with the exporters torch-export and onnx-dynamo under the modes
none, hf and transformers, in float32 on the CPU. Every row is a process of its own; its CPU seconds are those
of all its children; other plugins of pytest that are installed are left out. Failures are counted and not
confirmed in another process: a script does not either.

ours          ``pytest --exportcheck -n 0``
ours-unshared the same with ``--no-share``
ours-n2       the same with ``-n 2``: look at its wall time, on two cores that do nothing else
ours-first    ``--exportcheck-cache`` with an empty folder
ours-cached   the same again, with what the row before left there
script        for every case: build, observe, export, open a session, run and compare every call
limit         one build and one observation for each spec, and of every case only the bare calls
transformers  the exporter of transformers for every spec, as its users call it
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
EXPORTERS = ("torch-export", "onnx-dynamo")
MODES = ("none", "hf", "transformers")
ROWS = ("ours", "ours-unshared", "ours-first", "ours-cached", "ours-n2", "script", "limit", "transformers")
#: Rows that the others are ratios of.
BASES = ("script", "limit", "ours", "ours-first")
PLUGINS = ("-p", "xdist.plugin", "-p", "pytest_exportcheck.plugin")
PYTEST = (*PLUGINS, "--exportcheck", "-q", "-p", "no:cacheprovider", "--no-confirm")


def prepare(
    folder: Path,
    names: list[str],
    source: Path = ROOT / "model_specs",
    exporters: Sequence[str] = EXPORTERS,
    modes: Sequence[str] = MODES,
) -> list[Path]:
    """The specs of `source` with the matrix of this benchmark, in `folder`; `names` are stems, none: all."""
    specs = folder / "model_specs"
    shutil.copytree(source, specs)
    chosen = []
    for path in sorted(specs.glob("*.yaml")):
        if names and path.stem not in names:
            path.unlink()
            continue
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        content["matrix"] = {
            "exporters": list(exporters),
            "patch_modes": list(modes),
            "dtypes": ["float32"],
            "devices": ["cpu"],
        }
        content.pop("expect", None)
        path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
        chosen.append(path)
    return chosen


def accept_shapes(folder: Path) -> None:
    """Write the goldens of the specs in `folder`."""
    shapes = [
        sys.executable,
        "-m",
        "pytest",
        "model_specs",
        *PYTEST,
        "--update-shapes",
        "-k",
        "dynamic_shapes",
    ]
    os.environ["EXPORTCHECK_ALLOW_CI_UPDATE"] = "1"
    measured(shapes, folder)


def measured(command: list[str], folder: Path) -> dict[str, Any]:
    """CPU and wall seconds of a command and of all its children, and its last line."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode not in (0, 1) or not lines:
        raise SystemExit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return {
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "wall_s": round(time.perf_counter() - began, 1),
        "said": lines[-1].strip("= "),
    }


def row(name: str, folder: Path) -> dict[str, Any]:
    """One row of the table."""
    if not name.startswith("ours"):
        return measured([sys.executable, __file__, "--one", name, str(folder)], folder)
    more = {
        "ours": [],
        "ours-unshared": ["--no-share"],
        "ours-n2": ["-n", "2"],
        "ours-first": ["--exportcheck-cache", "conversions"],
        "ours-cached": ["--exportcheck-cache", "conversions"],
    }[name]
    if name == "ours-first":
        shutil.rmtree(folder / "conversions", ignore_errors=True)
    return measured([sys.executable, "-m", "pytest", "model_specs", *PYTEST, *more], folder)


class Parts:
    """CPU seconds of the parts of a row."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.process_time()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - began


def by_hand(folder: Path, *, anew: bool) -> str:
    """Rows ``script`` (everything `anew` for each case) and ``limit``; returns counts and the parts."""
    parts = Parts()
    with parts("import"):
        from pytest_exportcheck.pipeline import SpecRun
        from pytest_exportcheck.plan import export_cases
        from pytest_exportcheck.spec import load_spec
    passed = failed = 0
    for path in sorted((folder / "model_specs").glob("*.yaml")):
        spec = load_spec(path, folder)
        run = SpecRun(spec)
        eager: dict[Any, Any] = {}
        for case in export_cases(spec):
            if anew:
                run, eager = SpecRun(spec), {}
            try:
                agrees = _one_case(run, case, parts, eager)
            except Exception:
                agrees = False
            passed += agrees
            failed += not agrees
    seconds = {name: round(value, 1) for name, value in parts.seconds.items()}
    return f"{passed} agree, {failed} do not; {json.dumps(seconds)}"


def _one_case(run: Any, case: Any, parts: Parts, eager: dict[Any, Any]) -> bool:
    import numpy
    import onnxruntime
    import torch

    from pytest_exportcheck import max_diff, register_flattening_functions
    from pytest_exportcheck.exporters.base import dynamic_arguments, flat_forward, named_arguments
    from pytest_exportcheck.exporters.onnx_dynamo import match_inputs
    from pytest_exportcheck.pytrees import flatten_with_paths

    with parts("build and observe"):
        observation = run.observe(case.device, case.dtype, "none")
        graph = observation.graph(case.graph)
    target, mode, onnx = graph.target, run.mode(case.patch_mode), case.exporter == "onnx-dynamo"
    with parts("eager"):
        for number, call in enumerate(graph.calls):
            if (case.graph, number) not in eager:
                outputs = [leaf for _, leaf in flatten_with_paths(graph.eager(call.arguments))]
                eager[case.graph, number] = [leaf for leaf in outputs if isinstance(leaf, torch.Tensor)]
    with (
        register_flattening_functions(None),
        mode.apply(observation.model, "onnx" if onnx else "torch"),
        flat_forward(target.module, target.method, target.signature, graph.example.arguments) as kwargs,
        torch.no_grad(),
    ):
        with parts("capture"):
            patch = torch.fx.experimental._config.patch(backed_size_oblivious=onnx)  # type: ignore[attr-defined]
            with patch:
                program = torch.export.export(
                    target.module,
                    (),
                    kwargs=kwargs,
                    dynamic_shapes=dynamic_arguments(kwargs, graph.shapes),
                    strict=False,
                )
        if onnx:
            with parts("convert"):
                table = mode.before_convert(program)
                options = {"custom_translation_table": table} if table else {}
                converted = torch.onnx.export(
                    program, dynamic_shapes=named_arguments(kwargs, graph.shapes), verbose=False, **options
                )
                mode.after_convert(converted)
            with parts("session"):
                data = converted.model_proto.SerializeToString()
                session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()] if onnx else []
    module = None if onnx else program.module()
    good = True
    for number, call in enumerate(graph.calls):
        with parts("run and compare"), torch.no_grad():
            arguments = graph.shapes.complete(call)
            leaves = dict(flatten_with_paths(arguments))
            if onnx:
                tensors = {name: value for name, value in leaves.items() if isinstance(value, torch.Tensor)}
                matched = match_inputs(program, list(tensors), names)
                feeds = {matched[at]: numpy.asarray(tensors[at]) for at in matched}
                found = [torch.from_numpy(value) for value in session.run(None, feeds)]
            else:
                assert module is not None
                with register_flattening_functions(None):
                    given = {name: value for name, value in arguments.items() if name in kwargs}
                    answer = [leaf for _, leaf in flatten_with_paths(module(**given))]
                found = [leaf for leaf in answer if isinstance(leaf, torch.Tensor)]
            wanted = eager[case.graph, number]
            good &= len(found) == len(wanted) and max_diff(wanted, found)["abs"] < 1e-3
    return good


def of_transformers(folder: Path) -> str:
    """Row ``transformers``: `OnnxExporter` on the example of every graph."""
    import torch
    from transformers.exporters import OnnxConfig, OnnxExporter

    from pytest_exportcheck.pipeline import SpecRun
    from pytest_exportcheck.plan import export_cases
    from pytest_exportcheck.spec import load_spec

    done, refused, last = 0, 0, ""
    for path in sorted((folder / "model_specs").glob("*.yaml")):
        spec = load_spec(path, folder)
        run = SpecRun(spec)
        for name in dict.fromkeys(case.graph for case in export_cases(spec)):
            graph = run.observe("cpu", "float32", "none").graph(name)
            try:
                with torch.no_grad():
                    OnnxExporter().export(
                        graph.target.module, dict(graph.example.arguments), OnnxConfig(dynamic=True)
                    )
                done += 1
            except Exception as error:
                refused += 1
                last = f"{type(error).__name__}: {error}"
    if not done:
        # No time that anything can be compared with.
        raise SystemExit(f"the exporter of transformers exports no graph; the last refusal: {last}")
    return f"{done} graphs exported, {refused} refused"


def one(name: str, folder: Path) -> None:
    """Entry of the process of a row that is not pytest."""
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        said = of_transformers(folder) if name == "transformers" else by_hand(folder, anew=name == "script")
    print(said)


def main() -> int:
    """Print the table; write it as JSON, where that is wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("specs", nargs="*", help="stems of model_specs; default all")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("ROW", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one(options.one[0], Path(options.one[1]))
        return 0
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not prepare(folder, options.specs):
            parser.error("no spec is left")
        accept_shapes(folder)
        for wanted in options.rows:
            rows[wanted] = row(wanted, folder)
            print(f"{wanted}: {rows[wanted]}", file=sys.stderr, flush=True)
    base = {key: rows[key]["cpu_s"] for key in BASES if key in rows}
    print("| row | CPU s | of script | of limit | of ours | of ours-first | wall s | |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for wanted, found in rows.items():
        ratios = " | ".join(f"{found['cpu_s'] / base[key]:.2f}" if key in base else "-" for key in BASES)
        print(f"| {wanted} | {found['cpu_s']} | {ratios} | {found['wall_s']} | {found['said']} |")
    if options.json is not None:
        for found in rows.values():
            found.update({f"of_{key}": round(found["cpu_s"] / value, 3) for key, value in base.items()})
        text = json.dumps({"benchmark": "main job", "rows": rows}, indent=1)
        options.json.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
