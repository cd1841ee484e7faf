"""The `exportcheck` command: what can be done with specs without pytest."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .cli_patches import add_patches_command, run_patches_command
from .errors import SpecError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status (0 fine, 1 problems found, 2 wrong usage)."""
    parser = argparse.ArgumentParser(prog="exportcheck", description="Specs of pytest-exportcheck.")
    parser.add_argument("--version", action="version", version=f"pytest-exportcheck {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    lint = commands.add_parser("lint", help="check spec files; nothing is loaded or run")
    lint.add_argument("specs", nargs="+", type=Path, metavar="SPEC", help="a spec file, or a folder of them")
    commands.add_parser("schema", help="print the JSON Schema of the spec format, for editors")
    add_patches_command(commands)
    arguments = parser.parse_args(argv)
    if arguments.command == "patches":
        return run_patches_command(arguments)
    if arguments.command == "lint":
        return _lint(arguments.specs)
    from .spec.schema import schema_text

    print(schema_text(), end="")
    return 0


def _lint(paths: Sequence[Path]) -> int:
    from .expectations import expectation_problems
    from .registry import exporter_names, patch_mode_names
    from .spec import load_spec

    known = {"exporters": exporter_names(), "patch_modes": patch_mode_names()}
    root = Path.cwd()
    bad = 0
    files = [file for path in paths for file in _spec_files(path)]
    for file in files:
        try:
            problems = expectation_problems(load_spec(file.resolve(), root, known=known))
        except SpecError as error:
            problems = error.problems
        except OSError as error:
            print(f"{file}: {error.strerror or error}")
            bad += 1
            continue
        for problem in problems:
            print(problem)
        bad += bool(problems)
    print(f"{len(files)} specs, {bad} with problems", file=sys.stderr)
    return 1 if bad else 0


def _spec_files(path: Path) -> list[Path]:
    """`path`, or the spec files below it."""
    if not path.is_dir():
        return [path]
    from .goldens import FOLDER
    from .spec import is_spec_file

    files = (file for suffix in ("*.yaml", "*.yml") for file in path.rglob(suffix))
    return sorted(file for file in files if FOLDER not in file.parts and is_spec_file(file))
