"""``exportcheck new``: first specs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from .cli_common import Wrong, normal, write_file
from .plurals import counted

__all__ = ["check_source", "run_new", "run_new_all"]


def run_new(source: str, output: Path | None, auto_classes: Sequence[str], force: bool) -> int:
    """Write a first spec of `source`; 0 if its calls can be observed."""
    from .authoring.bulk import file_name
    from .authoring.new import draft

    check_source(source)
    path = output or _folder_of(source) / file_name(source)
    if path.exists() and not force:
        raise Wrong(f"{path} exists: give another file with -o, or --force")
    made = draft(source, path, auto_classes)
    for problem in made.problems:
        click.echo(problem, err=True)
    if made.text is None:
        click.echo(f"{source}: no spec could be made", err=True)
        return 1
    write_file(path, made.text)
    for warning in made.warnings:
        click.echo(f"{path}: warning: {warning}", err=True)
    if made.observed:
        click.echo(f"{path}: its calls are observed; next: pytest --exportcheck {path} --update-shapes")
        click.echo("what fails there is a finding about the export; docs/failures.md explains each stage")
        return 0
    click.echo(f"{path}: written, but its calls cannot be observed yet: correct them", err=True)
    return 1


def run_new_all(folder: Path, types: Sequence[str], jobs: int, seconds: float) -> int:
    """Write a first spec of every model type that can be observed, and a table of all."""
    from .authoring.bulk import draft_all, file_name, model_types, summary, write_table

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Wrong(f"{folder}: {error.strerror or error}") from None
    drafts = []
    for made in draft_all(list(types) or model_types(), folder, jobs, seconds):
        drafts.append(made)
        if made.observed and made.text is not None:
            path = folder / file_name(made.name)
            write_file(path, made.text)
            warned = f", {counted(len(made.warnings), 'warning')}" if made.warnings else ""
            click.echo(f"{made.name}: observed{warned}: {path}")
        else:
            reason = f": {made.problems[0]}" if made.problems else ""
            click.echo(f"{made.name}: {'builds' if made.builds else 'no model'}{reason}"[:200])
    drafts.sort(key=lambda made: made.name)
    table = folder / "new.json"
    write_table(drafts, table)
    click.echo("\n".join(summary(drafts)))
    click.echo(f"{table}: every type with its reasons and warnings")
    return 0


def check_source(source: str) -> None:
    """Raise `Wrong` for a model type that transformers does not have, and for a factory that is not there."""
    from .spec.references import missing_reference
    from .spec.values import REF

    path = Path(source)
    if REF.match(source):
        missing = missing_reference(source, Path.cwd(), "")
        if missing is not None:
            raise Wrong(missing)
        return
    if source and path.is_dir():
        return
    if path.suffix == ".py":
        raise Wrong(f"{source!r} names a file: name the factory in it too, {source}:CALLABLE")
    if path.suffix in (".yaml", ".yml"):
        raise Wrong(f"{source!r} is no model: for a spec there is pytest --exportcheck {source}")
    from transformers import CONFIG_MAPPING

    from .spec.names import suggest

    if source not in CONFIG_MAPPING:
        hint = suggest(source, CONFIG_MAPPING.keys())
        raise Wrong(
            f"{source!r} is no model type of transformers, no folder and no factory (module:callable){hint}"
        )


def _folder_of(source: str) -> Path:
    """Where the spec goes: a factory in a file is named relative to its spec."""
    file = Path(source.rpartition(":")[0])
    if file.suffix == ".py":
        return normal(file.parent)
    specs = Path("model_specs")
    return specs if specs.is_dir() else Path()
