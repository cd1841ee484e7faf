"""The `exportcheck` command: what can be done with specs and reports without pytest."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import __version__
from .cli_common import File, Wrong, write_file
from .options import DEVICES, DIAGNOSIS_SECONDS, DTYPES
from .plurals import counted

if TYPE_CHECKING:
    from .spec import ModelSpec
    from .spec.nodes import Document

__all__ = ["main"]

_FILE = File()
_UNKNOWN = re.compile(r"unknown (exporter|patch mode|comparison) '([^']*)'")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="pytest-exportcheck %(version)s")
def cli() -> None:
    """Specs and reports of pytest-exportcheck.

    Exit status: 0 fine, 1 problems found, 2 wrong usage.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status (0 fine, 1 problems found, 2 wrong usage)."""
    try:
        arguments = None if argv is None else list(argv)
        status = cli.main(arguments, prog_name="exportcheck", standalone_mode=False)
    except click.BadParameter as error:
        print(f"exportcheck: {_one_line(error)}", file=sys.stderr)
        return error.exit_code
    except click.ClickException as error:
        # One line, whatever was wrong.
        print(f"exportcheck: {' '.join(error.format_message().split())}", file=sys.stderr)
        return error.exit_code
    except click.Abort:
        print("exportcheck: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1
    return int(status or 0)


def _one_line(error: click.BadParameter) -> str:
    """The message, with a near match where one of several values is expected."""
    from .spec.names import suggest

    kind = error.param.type if error.param is not None else None
    given = re.match(r"'([^']*)' is not one of", error.message)
    hint = suggest(given[1], kind.choices) if given and isinstance(kind, click.Choice) else ""
    return " ".join(error.format_message().split()) + hint


# Specs.


@cli.command()
@click.argument("specs", nargs=-1, required=True, type=_FILE)
def lint(specs: tuple[Path, ...]) -> int:
    """Check spec files, or the spec files of folders; nothing is loaded or run.

    Also whether the files and names that they refer to are there."""
    from .errors import SpecError
    from .expectations import expectation_problems
    from .filepaths import relative_text
    from .registry import comparison_names, exporter_names, patch_mode_names
    from .spec.references import reference_problems

    known = {
        "exporters": exporter_names(),
        "patch_modes": patch_mode_names(),
        "comparisons": comparison_names(),
    }
    root = Path.cwd()
    bad = 0
    files = [file for path in specs for file in _spec_files(path)]
    if not files:
        folders = ", ".join(map(str, specs))
        raise Wrong(f"no spec file in {folders}: a spec is a YAML file that begins with exportcheck: 1")
    for file in files:
        document: Document | None
        try:
            spec = _load(file, root, known)
            problems, document = expectation_problems(spec), spec.document
        except SpecError as error:
            problems, document = error.problems, error.document
        except OSError as error:
            click.echo(f"{file}: {error.strerror or error}")
            bad += 1
            continue
        if document is not None:
            # A callable that is missing is told with everything else, not once that is mended.
            missing = reference_problems(document, file.resolve().parent, relative_text(file.resolve(), root))
            told = {(problem.line, problem.column) for problem in problems}
            problems += (problem for problem in missing if (problem.line, problem.column) not in told)
        for problem in sorted(problems, key=lambda problem: (problem.line, problem.column)):
            click.echo(problem)
        bad += bool(problems)
    click.echo(f"{counted(len(files), 'spec')}, {bad} with problems", err=True)
    return 1 if bad else 0


def _load(file: Path, root: Path, known: Mapping[str, Sequence[str]]) -> ModelSpec:
    """The spec. An unknown exporter, patch mode or comparison that is no typo of a known one is only noted.

    It may be registered in a conftest.py, which nobody but pytest reads.
    """
    from .errors import SpecError
    from .spec import load_spec
    from .spec.names import is_typo

    everything = [name for names in known.values() for name in names]
    try:
        return load_spec(file.resolve(), root, known=known)
    except SpecError as error:
        for problem in error.problems:
            unknown = _UNKNOWN.match(problem.message)
            if unknown is None or is_typo(unknown[2], everything):
                raise
        for problem in error.problems:
            click.echo(f"{problem} - unless a conftest.py registers it", err=True)
    return load_spec(file.resolve(), root)


def _spec_files(path: Path) -> list[Path]:
    """`path`, or the files below it that are specs or are meant to be."""
    if not path.is_dir():
        return [path]
    from .goldens import FOLDER
    from .spec import is_spec_file, mistyped_key

    files = (file for suffix in ("*.yaml", "*.yml") for file in path.rglob(suffix))
    return sorted(
        file for file in files if FOLDER not in file.parts and (is_spec_file(file) or mistyped_key(file))
    )


@cli.command()
def schema() -> None:
    """Print the JSON Schema of the spec format, for editors."""
    from .spec.schema import schema_text

    click.echo(schema_text(), nl=False)


@cli.command()
@click.argument("spec", type=_FILE)
@click.option("--device", type=click.Choice(DEVICES), help="Default: the first of the matrix.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Default: the first of the matrix.")
@click.option("--cases", "cases_only", is_flag=True, help="The cases only: no model is built.")
def show(spec: Path, device: str | None, dtype: str | None, cases_only: bool) -> int:
    """What SPEC would run, and what its calls show: symbols and their sizes, the example, the shapes.

    Of a JSON report (SPEC ends in .json) the matrix, and what failed.
    """
    from .cli_show import run_show, run_show_report

    if spec.suffix == ".json":
        if device or dtype or cases_only:
            raise Wrong(f"{spec} is a report: --device, --dtype and --cases are for specs")
        return run_show_report(spec)
    return run_show(spec, device, dtype, cases_only)


@cli.command()
def doctor() -> int:
    """Versions, providers, devices, registrations, and what is known to go wrong with them."""
    from .cli_show import run_doctor

    return run_doctor()


@cli.command()
@click.option(
    "-m", "--model", required=True, help="A model type, a folder with a config.json, or module:callable."
)
@click.option(
    "--trained", is_flag=True, help="The weights of the folder, not a small random model of its type."
)
@click.option(
    "--calls",
    metavar="FACTORY",
    help="For a factory: a callable that returns the calls, or makes them, as observe.calls of a spec.",
)
@click.option(
    "--run", "run_only", is_flag=True, help="Make the calls and show what they tell; export nothing."
)
@click.option("--export", "exporters", multiple=True, metavar="NAME", help="An exporter (repeatable).")
@click.option(
    "--patch", "modes", multiple=True, metavar="MODE", help="A patch mode (repeatable; default: none)."
)
@click.option("--device", type=click.Choice(DEVICES), default="cpu", show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="float32",
    show_default=True,
)
@click.option("--opset", type=int, help="Opset of the ONNX exporters.")
@click.option("--optimize/--no-optimize", default=None, help="Whether the ONNX exporters optimize.")
@click.option(
    "--dynamic-shapes",
    "shapes",
    type=click.Choice(["inferred", "named", "none"]),
    default="inferred",
    show_default=True,
    help="What varied is dynamic; the first axis too; nothing.",
)
@click.option(
    "--inputs2/--no-inputs2", "other_sizes", default=True, help="Try sizes that no call had (default)."
)
@click.option("-o", "--output", type=_FILE, help="Keep the spec, the shapes, the report and artifacts there.")
@click.option("-v", "--verbose", type=int, default=0, help="1 or 2: as pytest's -v and -vv.")
def validate(
    model: str,
    trained: bool,
    calls: str | None,
    run_only: bool,
    exporters: tuple[str, ...],
    modes: tuple[str, ...],
    device: str,
    dtype: str,
    opset: int | None,
    optimize: bool | None,
    shapes: str,
    other_sizes: bool,
    output: Path | None,
    verbose: int,
) -> int:
    """Check one model without a spec file: the same stages, the same verdict.

    Exit status 0 if every case passes, 1 if one fails.
    """
    from .cli_validate import Wishes, run_validate

    if run_only == bool(exporters):
        raise click.UsageError("give --export NAME, or --run")
    return run_validate(
        Wishes(
            model,
            trained,
            exporters,
            modes or ("none",),
            device,
            dtype,
            opset,
            optimize,
            shapes,
            other_sizes,
            calls,
        ),
        output,
        verbose,
    )


@cli.command()
@click.argument("source", required=False)
@click.option(
    "-o", "--output", type=_FILE, help="The spec (default: NAME.yaml, in model_specs if it is there)."
)
@click.option("--auto-class", "auto_classes", multiple=True, metavar="NAME", help="What builds the model.")
@click.option("--force", is_flag=True, help="Write over a file that is there.")
@click.option("--all", "folder", type=_FILE, metavar="DIR", help="Specs of every model type, into DIR.")
@click.option("--type", "types", multiple=True, metavar="NAME", help="With --all: these model types only.")
@click.option("-j", "--jobs", type=click.IntRange(1), default=1, help="With --all: so many at a time.")
@click.option("--timeout", type=float, default=180.0, show_default=True, help="With --all: seconds per type.")
def new(
    source: str | None,
    output: Path | None,
    auto_classes: tuple[str, ...],
    force: bool,
    folder: Path | None,
    types: tuple[str, ...],
    jobs: int,
    timeout: float,
) -> int:
    """Write a first spec of SOURCE.

    SOURCE is a model type of transformers, which is made small, with random weights; a folder with a
    pretrained model; or a factory, module:callable. The calls are guessed from the task and the signature,
    and made once, to show that they can be observed. Exit status 1 where they cannot.
    """
    from .cli_new import run_new, run_new_all

    if (source is None) == (folder is None):
        raise click.UsageError("give a SOURCE, or --all DIR")
    if folder is not None:
        return run_new_all(folder, types, jobs, timeout)
    return run_new(str(source), output, auto_classes, force)


@cli.command()
@click.option(
    "--mode",
    "modes",
    multiple=True,
    metavar="NAME",
    help="A patch mode, or yours as file.py:name or package.module:name (repeatable; default: ours, hf).",
)
@click.option("--diff", is_flag=True, help="Show each patch as a diff against the original.")
@click.option("--lint", is_flag=True, help="Compare with the lock: exit status 1 on an error.")
@click.option(
    "--update-lock", "--write-lock", "write_lock", is_flag=True, help="Write the lock from what is installed."
)
@click.option(
    "--lock",
    type=_FILE,
    help="The lock (default: the one that ships; for a mode of yours patches.lock.json beside its file).",
)
@click.option(
    "--ablate",
    "specs",
    multiple=True,
    type=_FILE,
    metavar="SPEC",
    help="Say which patches the cases of a spec, or of the specs of a folder, need (repeatable).",
)
@click.option(
    "--exporter", "exporters", multiple=True, metavar="NAME", help="With --ablate: these exporters."
)
@click.option("--report", type=_FILE, help="With --ablate: write the records to this JSON file.")
@click.option("--pytrees", is_flag=True, help="Say which classes are pytree nodes, by whom, in which layout.")
def patches(
    modes: tuple[str, ...],
    diff: bool,
    lint: bool,
    write_lock: bool,
    lock: Path | None,
    specs: tuple[Path, ...],
    exporters: tuple[str, ...],
    report: Path | None,
    pytrees: bool,
) -> int:
    """List the patches of the patch modes, see if they are stale, and who needs them."""
    from . import cli_patches

    asked = {
        "--diff": diff,
        "--lint": lint,
        "--update-lock": write_lock,
        "--ablate": specs,
        "--pytrees": pytrees,
    }
    if len(both := [option for option, given in asked.items() if given]) > 1:
        raise Wrong(f"{' and '.join(both)} are runs of their own: give one at a time")
    if lock is not None and not (lint or write_lock):
        raise Wrong("--lock needs --lint or --update-lock")
    if specs:
        from .cli_ablate import run_ablation

        files = [file for path in specs for file in _spec_files(path)]
        return run_ablation(files, modes, exporters, report)
    if exporters or report is not None:
        raise Wrong("--exporter and --report need --ablate SPEC")
    if pytrees:
        return cli_patches.run_pytrees(modes)
    return cli_patches.run_patches(modes, diff, lint, write_lock, lock)


@cli.command()
@click.argument("spec", type=_FILE)
@click.option("--case", metavar="ID", help="Only this case: cpu-float32-onnx-dynamo-none, or its node id.")
@click.option(
    "--budget",
    type=click.FloatRange(min=0, max=1e9),
    default=DIAGNOSIS_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="After that long no new step of a diagnosis begins.",
)
@click.option(
    "-o", "--output", type=_FILE, help="Keep text, record and a script for each failure in this folder."
)
def diagnose(spec: Path, case: str | None, budget: float, output: Path | None) -> int:
    """Check the cases of SPEC, and name the guilty step, node and modules of those that fail."""
    from .cli_diagnose import run_diagnose

    return run_diagnose(spec, case, budget, output)


# Reports.


@cli.command()
@click.argument("reports", nargs=-1, required=True, type=_FILE)
@click.option("-o", "--output", required=True, type=_FILE, help="The merged report.")
def merge(reports: tuple[Path, ...], output: Path) -> int:
    """Put the JSON REPORTS of several shards together; a case that several ran keeps its worst verdict."""
    from .reports.json_report import write_data
    from .reports.read import ReportError, read_report
    from .reports.read import merge as union
    from .reports.totals import cases_text, shapes_text

    try:
        data, notes = union([read_report(path) for path in reports])
        write_data(output, data)
    except ReportError as error:
        raise Wrong(str(error)) from None
    except OSError as error:
        raise Wrong(f"{output}: {error.strerror or error}") from None
    for note in notes:
        click.echo(note, err=True)
    totals = "   ".join(filter(None, [cases_text(data["cases"]), shapes_text(data["cases"])]))
    click.echo(f"{output}, of {counted(len(reports), 'report')}: {totals or 'no case'}", err=True)
    if data["environment"]["left_out"]:
        click.echo(f"not a full run: {data['environment']['left_out']}", err=True)
    return 0


@cli.command()
@click.argument("before", type=_FILE)
@click.argument("after", type=_FILE)
@click.option(
    "--format", "kind", type=click.Choice(["text", "markdown", "json"]), default="text", show_default=True
)
@click.option("-o", "--output", type=_FILE, help="Write to this file instead of the terminal.")
def compare(before: Path, after: Path, kind: str, output: Path | None) -> int:
    """What changed between two JSON reports; exit status 1 if something got worse, 2 if no case is in common.

    Cases that got less far (by stage), that ran and are gone, or whose errors grew beyond noise are worse.
    Shapes, node counts, sizes and CPU seconds are shown where they changed beyond noise. Results of one
    benchmark (benchmarks/, --json) are compared too: ratios and seconds that grew beyond noise are worse.
    """
    from .reports import comparison
    from .reports.compare import compare as compare_reports
    from .reports.measurements import differences, differences_text, read_measurements
    from .reports.read import ReportError, read_report

    try:
        one, other = read_measurements(before), read_measurements(after)
        if one is not None and other is not None:
            changed = differences(one, other)
            click.echo(differences_text(changed), nl=False)
            return int(any(each.worse for each in changed))
        if one is not None or other is not None:
            raise Wrong(f"{before} and {after}: a benchmark with a report cannot be compared")
        found = compare_reports(read_report(before), read_report(after))
    except ReportError as error:
        raise Wrong(str(error)) from None
    write = {"text": comparison.as_text, "markdown": comparison.as_markdown, "json": comparison.as_json}
    text = write[kind](found)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_file(output, text)
    if not found.compared:
        click.echo(f"exportcheck: {before} and {after} have no case in common", err=True)
    return 1 if found.worse else 0 if found.compared else 2


@cli.command()
@click.argument("report", type=_FILE)
@click.option("-o", "--output", required=True, type=_FILE, help="The page.")
def html(report: Path, output: Path) -> int:
    """Make one self-contained page of a JSON REPORT; needs pytest-exportcheck[html]."""
    from .reports.html import html_page, missing_packages

    missing = missing_packages()
    if missing:
        raise Wrong(f"{' and '.join(missing)} not installed: pip install 'pytest-exportcheck[html]'")
    write_file(output, html_page(_read(report)))
    return 0


@cli.command()
@click.argument("report", type=_FILE)
@click.option("-o", "--output", type=_FILE, help="Write to this file instead of the terminal.")
@click.option("--limit", type=click.IntRange(min=1), metavar="BYTES", help="Leave out what is beyond it.")
def markdown(report: Path, output: Path | None, limit: int | None) -> int:
    """Show the matrix and the failures of a JSON REPORT as Markdown, for a pull request."""
    from .reports.markdown import markdown as as_markdown
    from .reports.record import sort_key

    data = _read(report)
    left_out = data["environment"].get("left_out")
    text = as_markdown(sorted(data["cases"], key=sort_key), limit=limit, left_out=left_out)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_file(output, text)
    return 0


def _read(path: Path) -> dict[str, Any]:
    from .reports.read import ReportError, read_report

    try:
        found = read_report(path)
    except ReportError as error:
        raise Wrong(str(error)) from None
    return {"environment": found.environment, "cases": found.cases}


if __name__ == "__main__":
    sys.exit(main())
