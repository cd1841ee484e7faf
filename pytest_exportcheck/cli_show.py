"""``exportcheck show``: what a spec would run, and what is seen of its model; ``exportcheck doctor``."""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .cli_common import Wrong
from .errors import ExportCheckError, SpecError
from .plurals import counted

if TYPE_CHECKING:
    from .observe.infer import GraphShapes
    from .pipeline import CheckedObservation
    from .spec import ModelSpec

__all__ = ["known_bad", "run_doctor", "run_show", "run_show_report"]

#: The oldest versions that the project was run with.
_LEAST = {"torch": "2.13", "transformers": "5.20", "onnxscript": "0.6", "onnx": "1.20", "onnxruntime": "1.24"}


def run_show(path: Path, device: str | None, dtype: str | None, cases_only: bool) -> int:
    """Print the cases of a spec and what its observation infers; 1 if the calls cannot be observed."""
    from .plan import export_cases, shape_cases
    from .spec import load_spec, missing_requirements

    try:
        spec = load_spec(path.resolve(), Path.cwd())
    except SpecError as error:
        for problem in error.problems:
            click.echo(problem, err=True)
        return 1
    click.echo(f"{spec.relative}: {_model_text(spec)}")
    absent = missing_requirements(spec)
    if absent:
        click.echo(f"  skipped: {absent}")
    cases = [*shape_cases(spec), *export_cases(spec)]
    click.echo(f"\n{counted(len(cases), 'test')}")
    for case in cases:
        test = "test_dynamic_shapes" if case.exporter is None else "test_export"
        click.echo(f"  {test}[{case.label()}]")
    if cases_only or absent:
        return 0
    return _show_observation(spec, device or spec.matrix.devices[0], dtype or spec.matrix.dtypes[0])


def run_show_report(path: Path) -> int:
    """Print the matrix of a JSON report and what failed; 0 whatever the verdicts are, they are old."""
    from .reports.matrix import Matrix
    from .reports.read import ReportError, case_key, case_name, read_report
    from .reports.record import sort_key
    from .reports.terminal import matrix_lines
    from .reports.totals import cases_text, shapes_text

    try:
        report = read_report(path)
    except ReportError as error:
        raise Wrong(f"{error} (show takes a spec, or a report)") from None
    records = sorted(report.cases, key=sort_key)
    began, left_out = report.environment.get("started"), report.environment.get("left_out")
    partial = f"; not a full run: {left_out}" if left_out else ""
    click.echo(f"{path}: {counted(len(records), 'record')}{f' of {began}' if began else ''}{partial}")
    width = shutil.get_terminal_size().columns
    for line in matrix_lines(Matrix.of(records), width, every_row=True) if records else ():
        click.echo("".join(piece.text for piece in line).rstrip())
    totals = "   ".join(filter(None, [cases_text(records), shapes_text(records)]))
    if totals:
        click.echo(totals)
    for record in records:
        if record["verdict"].split()[0] in ("fail", "crash", "timeout", "xpass"):
            message = (str(record.get("message") or "").splitlines() or [""])[0]
            click.echo(f"{case_name(case_key(record))}: {record['verdict']}{message and f': {message}'}")
    click.echo(f"every case in detail: exportcheck html {path} -o {path.with_suffix('.html')}")
    return 0


def _model_text(spec: ModelSpec) -> str:
    model = spec.model
    if model.type:
        return f"{model.type}, built by {model.auto_class} with random weights"
    return f"pretrained {model.pretrained}" if model.pretrained else f"built by {model.factory}"


def _show_observation(spec: ModelSpec, device: str, dtype: str) -> int:
    from .goldens import golden_of
    from .pipeline import SpecRun

    run = SpecRun(spec)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are listed below
            observation = run.observe(device, dtype)
        model = run.model(device, dtype)
        count = sum(parameter.numel() for parameter in model.parameters())
        click.echo(f"\n{type(model).__name__}, {counted(count, 'parameter')}, {device} {dtype}")
        click.echo(f"{counted(len(observation.calls), 'observed call')}")
        for name, graph in observation.graphs.items():
            click.echo(
                f"\n{f'graph {name}: ' if name else ''}calls {_ranges([c.number for c in graph.seen])}"
            )
            for line in _graph_lines(graph.shapes):
                click.echo(f"  {line}")
            sizes = ", ".join(f"{symbol} = {size}" for symbol, size in graph.example.sizes.items())
            made = " (resized)" if graph.example.resized else ""
            click.echo(f"  exported from call {graph.example.call}{made}: {sizes or 'no dynamic size'}")
            for warning in graph.shapes.warnings:
                click.echo(f"  warning: {warning}")
        return _golden(observation, golden_of(spec).path)
    except ExportCheckError as error:
        click.echo(f"\n{error}", err=True)
        return 1
    finally:
        run.close()


def _graph_lines(shapes: GraphShapes) -> Iterator[str]:
    """Each symbol with the sizes that were seen."""
    for symbol in shapes.symbols:
        seen = sorted({sizes[symbol] for sizes in shapes.sizes.values() if symbol in sizes})
        limit = f", at most {shapes.limits[symbol]}" if symbol in shapes.limits else ""
        yield f"{symbol}: seen {', '.join(map(str, seen))}{limit}"


def _ranges(numbers: list[int]) -> str:
    """``0-2, 5``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _golden(observation: CheckedObservation, path: Path) -> int:
    """The inferred shapes, as a golden says them."""
    broken = observation.failures
    for name, error in broken.items():
        click.echo(f"\n{f'graph {name}: ' if name else ''}{error}", err=True)
    if not broken:
        state = "accepted" if path.exists() else "not accepted yet"
        click.echo(f"\ninferred shapes ({path.name}, {state}):\n")
        for line in observation.golden_text(path.name).splitlines():
            if not line.startswith("#"):
                click.echo(f"  {line}")
    return 1 if broken else 0


# doctor


def run_doctor() -> int:
    """Print what this installation has, and what is known to go wrong with it; 1 if something is."""
    from .reports.json_report import package_versions

    for name, version in package_versions().items():
        click.echo(f"{name:<20} {version}")
    problems = known_bad(package_versions())
    for lines in (_torch_lines(problems), _onnx_lines(problems), _registered_lines(problems)):
        click.echo()
        for line in lines:
            click.echo(line)
    click.echo()
    for problem in problems:
        click.echo(f"problem: {problem}")
    if not problems:
        click.echo("no known problem")
    return 1 if problems else 0


def _torch_lines(problems: list[str]) -> Iterator[str]:
    import torch

    yield f"torch threads        {torch.get_num_threads()}"
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield f"cuda:{index}               {torch.cuda.get_device_name(index)}"
    else:
        built = "built without CUDA" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
        yield f"cuda                 none ({built}); cases on cuda are skipped"


def _onnx_lines(problems: list[str]) -> Iterator[str]:
    import torch

    try:
        import onnxruntime
    except ImportError as error:
        problems.append(f"onnxruntime cannot be imported: {error}")
        return
    providers = onnxruntime.get_available_providers()
    yield f"onnxruntime          {', '.join(providers)}"
    if torch.cuda.is_available() and "CUDAExecutionProvider" not in providers:
        problems.append(
            "there is a CUDA device, but this onnxruntime runs on the CPU only: ONNX cases on cuda fail at "
            "session; install onnxruntime-gpu in its place"
        )
    for name in ("onnx", "onnxscript"):
        with contextlib.suppress(ImportError):
            __import__(name)
            continue
        problems.append(f"{name} cannot be imported: every ONNX exporter fails")


def _registered_lines(problems: list[str]) -> Iterator[str]:
    """Who flattens the cache classes: what was registered before us, by an import, comes first."""
    import transformers.cache_utils as caches
    from torch.utils import _pytree

    from .pytrees.layouts import describe_layout
    from .registry import comparison_names, exporter_names, patch_mode_names

    yield f"exporters            {', '.join(exporter_names())}"
    yield f"patch modes          {', '.join(patch_mode_names())}"
    if comparison_names():
        yield f"comparisons          {', '.join(comparison_names())}"
    found = [cls for cls in vars(caches).values() if isinstance(cls, type) and cls in _pytree.SUPPORTED_NODES]
    for cls in found:
        registration = describe_layout(cls, _pytree.SUPPORTED_NODES[cls].flatten_fn)
        yield f"registered           {registration}"
        if registration.breaks_onnx:
            problems.append(f"{registration}: unregister it, or do not import what registers it")
    if not found:
        yield "registered           no cache class; each run registers ours and takes them away again"


def known_bad(versions: dict[str, str]) -> list[str]:
    """Combinations of versions that are known to fail, in a sentence each."""
    from packaging.version import Version

    found = []
    for name, least in _LEAST.items():
        if name in versions and Version(versions[name]) < Version(least):
            found.append(f"{name} {versions[name]} is older than {least}, the oldest that was tried")
    if "onnxruntime" in versions and "onnxruntime-gpu" in versions:
        found.append(
            "onnxruntime and onnxruntime-gpu are both installed and write over each other: remove both"
        )
    return found
