"""The `exportcheck` command: what can be done with specs and reports without pytest."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from . import __version__
from .options import DIAGNOSIS_SECONDS

if TYPE_CHECKING:
    from .spec import ModelSpec

__all__ = ["main"]

_FILE = click.Path(path_type=Path)
_UNKNOWN = re.compile(r"unknown (exporter|patch mode) '([^']*)'")

#: From this likeness on, an unknown name is a mistyped one: a lost letter leaves 0.9 of a long name, while
#: `torch-deferred`, a good name for an exporter of somebody's own, has 0.6 of `torch-export`.
_TYPO = 0.8


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


# Specs.


@cli.command()
@click.argument("specs", nargs=-1, required=True, type=_FILE)
def lint(specs: tuple[Path, ...]) -> int:
    """Check spec files, or the spec files of folders; nothing is loaded or run."""
    from .errors import SpecError
    from .expectations import expectation_problems
    from .registry import exporter_names, patch_mode_names

    known = {"exporters": exporter_names(), "patch_modes": patch_mode_names()}
    root = Path.cwd()
    bad = 0
    files = [file for path in specs for file in _spec_files(path)]
    for file in files:
        try:
            problems = expectation_problems(_load(file, root, known))
        except SpecError as error:
            problems = error.problems
        except OSError as error:
            click.echo(f"{file}: {error.strerror or error}")
            bad += 1
            continue
        for problem in problems:
            click.echo(problem)
        bad += bool(problems)
    click.echo(f"{len(files)} specs, {bad} with problems", err=True)
    return 1 if bad else 0


def _load(file: Path, root: Path, known: Mapping[str, Sequence[str]]) -> ModelSpec:
    """The spec. An unknown exporter or patch mode that is no typo of a known one is only noted.

    It may be registered in a conftest.py, which nobody but pytest reads.
    """
    from .errors import SpecError
    from .spec import load_spec
    from .spec.names import suggest

    everything = [name for names in known.values() for name in names]
    try:
        return load_spec(file.resolve(), root, known=known)
    except SpecError as error:
        for problem in error.problems:
            unknown = _UNKNOWN.match(problem.message)
            if unknown is None or suggest(unknown[2], everything, _TYPO):
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
@click.option(
    "--mode",
    "modes",
    multiple=True,
    metavar="NAME",
    help="A patch mode, or yours as file.py:name or package.module:name (repeatable; default: ours, hf).",
)
@click.option("--diff", is_flag=True, help="Show each patch as a diff against the original.")
@click.option("--lint", is_flag=True, help="Compare with the lock: exit status 1 on an error.")
@click.option("--write-lock", is_flag=True, help="Write the lock from what is installed.")
@click.option(
    "--lock",
    type=_FILE,
    help="The lock (default: the one that ships, or patches.lock.json here for a mode of yours).",
)
def patches(modes: tuple[str, ...], diff: bool, lint: bool, write_lock: bool, lock: Path | None) -> int:
    """List the patches of the patch modes, and see if they are stale."""
    from .cli_patches import run_patches

    return run_patches(modes, diff, lint, write_lock, lock)


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
    from .reports.matrix import counts
    from .reports.read import ReportError, read_report
    from .reports.read import merge as union

    try:
        data, notes = union([read_report(path) for path in reports])
        write_data(output, data)
    except ReportError as error:
        raise _Wrong(str(error)) from None
    except OSError as error:
        raise _Wrong(f"{output}: {error.strerror or error}") from None
    for note in notes:
        click.echo(note, err=True)
    cases = data["cases"]
    click.echo(f"{output}: {len(cases)} cases of {len(reports)} reports: {counts(cases)}", err=True)
    return 0


@cli.command()
@click.argument("before", type=_FILE)
@click.argument("after", type=_FILE)
@click.option(
    "--format", "kind", type=click.Choice(["text", "markdown", "json"]), default="text", show_default=True
)
@click.option("-o", "--output", type=_FILE, help="Write to this file instead of the terminal.")
def compare(before: Path, after: Path, kind: str, output: Path | None) -> int:
    """What changed between two JSON reports; exit status 1 if something got worse.

    Cases that got less far (by stage), that passed and are gone, or whose errors grew beyond noise are worse.
    Shapes, node counts, sizes and CPU seconds are shown where they changed beyond noise.
    """
    from .reports import comparison
    from .reports.compare import compare as compare_reports
    from .reports.read import ReportError, read_report

    try:
        found = compare_reports(read_report(before), read_report(after))
    except ReportError as error:
        raise _Wrong(str(error)) from None
    write = {"text": comparison.as_text, "markdown": comparison.as_markdown, "json": comparison.as_json}
    text = write[kind](found)
    if output is None:
        click.echo(text, nl=False)
    else:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise _Wrong(f"{output}: {error.strerror or error}") from None
    return 1 if found.worse else 0


class _Wrong(click.ClickException):
    """Wrong input: the exit status of wrong usage."""

    exit_code = 2


if __name__ == "__main__":
    sys.exit(main())
