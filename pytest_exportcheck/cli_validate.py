"""``exportcheck validate``: one model, without a spec file; the run itself is pytest's."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml

from .cli_common import Wrong, write_file
from .cli_new import check_source

__all__ = ["Wishes", "run_validate"]


@dataclass(frozen=True)
class Wishes:
    """What the options of the command say.

    Attributes
    ----------
    model:
        A model type, a folder, or a factory.
    trained:
        The weights of the folder, and not a small random model of its type.
    calls:
        A callable that returns the calls of a factory's model, or makes them.
    exporters, patch_modes:
        Names; no exporter: the calls are run and nothing is exported.
    opset, optimize:
        Options of the ONNX exporters; ``None``: theirs.
    shapes:
        ``inferred`` (what varied between the calls is dynamic), ``named`` (the first axis too, whether or not
        it varied) or ``none`` (one call, every axis fixed).
    other_sizes:
        Sizes that no call had are tried.
    """

    model: str
    trained: bool
    exporters: Sequence[str]
    patch_modes: Sequence[str]
    device: str
    dtype: str
    opset: int | None
    optimize: bool | None
    shapes: str
    other_sizes: bool
    calls: str | None = None


def run_validate(wishes: Wishes, output: Path | None, verbose: int) -> int:
    """Draft a spec, run it, print the stages; 0 if every case passed.

    With `output` the spec, the shapes, the report and what explains a failure stay there.
    """
    with contextlib.ExitStack() as stack:
        folder = output or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="exportcheck-")))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Wrong(f"{folder}: {error.strerror or error}") from None
        spec = folder / _file_name(wishes.model)
        text = _spec(wishes, spec, moved=output is not None)
        if text is None:
            return 1
        write_file(spec, text)
        if not wishes.exporters:
            from .cli_show import run_show

            return run_show(spec, wishes.device, wishes.dtype, cases_only=False)
        status = _run(folder, spec, wishes.device, verbose)
        for line in _stage_lines(folder / "report.json"):
            click.echo(line)
        if output is not None:
            click.echo(f"written to {output}: {', '.join(sorted(each.name for each in output.iterdir()))}")
        return status


def _file_name(model: str) -> str:
    """Of the spec, and so the name of its cases: `compare` takes those of two models for two."""
    from .authoring.bulk import file_name

    return file_name(Path(model).resolve().name if Path(model).is_dir() else model)


def _spec(wishes: Wishes, path: Path, moved: bool) -> str | None:
    from .authoring.new import draft, reference

    check_source(wishes.model)
    _check_names(wishes)
    factory = ":" in wishes.model
    if wishes.calls is not None:
        if not factory:
            raise Wrong(f"--calls is for a factory (file.py:callable), and {wishes.model!r} is none")
        check_source(wishes.calls)
        spec = path if moved else None
        data = {
            "exportcheck": 1,
            "model": {"factory": reference(wishes.model, spec)},
            "observe": {"calls": reference(wishes.calls, spec)},
        }
        return _with_wishes(data, wishes)
    folder = Path(wishes.model)
    source, base = wishes.model, None
    if folder.is_dir() and not wishes.trained:
        source, base = _type_of(folder)
    elif wishes.trained and not folder.is_dir():
        raise Wrong(f"--trained needs a folder with weights, and {wishes.model!r} is none")
    made = draft(source, path, base=base, moved=moved)
    for problem in made.problems:
        click.echo(problem, err=True)
    if made.text is None or not made.observed:
        file = wishes.model.rpartition(":")[0]
        given = f"name a callable that returns its calls (--calls {file}:CALLABLE), or " if factory else ""
        next_step = f"{given}write a spec (exportcheck new {wishes.model})"
        click.echo(f"{wishes.model}: no calls could be made up that the model takes; {next_step}", err=True)
        return None
    return _with_wishes(yaml.safe_load(made.text), wishes)


def _check_names(wishes: Wishes) -> None:
    """Raise `Wrong`: nobody but us and installed packages registers anything here, no conftest.py is read."""
    from .options import unknown_name
    from .registry import exporter_names, patch_mode_names

    for name in wishes.exporters:
        if name not in exporter_names():
            raise Wrong(unknown_name("exporter", name, exporter_names()))
    for name in wishes.patch_modes:
        if name not in patch_mode_names() and ":" not in name:
            raise Wrong(unknown_name("patch mode", name, patch_mode_names()))


def _type_of(folder: Path) -> tuple[str, dict[str, Any]]:
    """(model type, configuration) of a folder."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise Wrong(f"{folder}: {str(error).splitlines()[0]}") from None
    return config.model_type, config.to_dict()


def _with_wishes(data: dict[str, Any], wishes: Wishes) -> str:
    data["matrix"] = {
        **({"exporters": list(wishes.exporters)} if wishes.exporters else {}),
        "patch_modes": list(wishes.patch_modes),
        "devices": [wishes.device],
        "dtypes": [wishes.dtype],
    }
    options = {}
    if wishes.opset is not None:
        options["opset_version"] = wishes.opset
    if wishes.optimize is not None:
        options["optimize"] = wishes.optimize
    if options:
        data["exporter_options"] = {name: dict(options) for name in wishes.exporters if "onnx" in name}
    if not wishes.other_sizes:
        data["resize"] = "off"
    if wishes.shapes == "named":
        data["observe"]["batch_dims"] = True
    elif wishes.shapes == "none":
        data["observe"] |= _one_call(data["observe"])
        data["resize"] = "off"
    return yaml.safe_dump(data, sort_keys=False, width=100_000)


def _one_call(observe: Mapping[str, Any]) -> dict[str, Any]:
    """The first call alone; of a ``generate`` the first call of ``forward`` alone."""
    if isinstance(observe["calls"], str):
        raise Wrong("--dynamic-shapes none takes one of the calls, which is not known of --calls")
    first = observe["calls"][0]
    made: dict[str, Any] = {"calls": [first], "graphs": "one"}
    if "generate" in first:
        # Every token is a call.
        arguments = {**first["generate"], "max_new_tokens": 1, "min_new_tokens": 1}
        made["calls"] = [{"generate": arguments}]
    return made


def _run(folder: Path, spec: Path, device: str, verbose: int) -> int:
    """pytest on `spec` alone, in a process of its own and without anybody's configuration."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(spec),
        "--exportcheck",
        f"--rootdir={folder}",
        f"-c{os.devnull}",
    ]
    command += ["-p", "no:cacheprovider", "--update-shapes", f"--exportcheck-report={folder / 'report.json'}"]
    command += [f"--exportcheck-artifacts={folder / 'artifacts'}", "--no-header"]
    command += ["-" + "v" * verbose] if verbose else ["-q"]
    # The one device that was asked for: to skip it would say that the model passed.
    command += [f"--require-device={device}"]
    # The shapes are written for this run alone: CI may do that as well.
    environment = {**os.environ, "EXPORTCHECK_ALLOW_CI_UPDATE": "1"}
    return 1 if subprocess.run(command, env=environment, check=False).returncode else 0


def _stage_lines(report: Path) -> Iterator[str]:
    """The stages of each case with their times."""
    from .reports.read import ReportError, read_report

    try:
        cases = read_report(report).cases
    except ReportError:
        return
    for case in cases:
        if case.get("exporter") is None:
            continue
        times = case.get("durations") or {}
        stages = ", ".join(f"{stage} {spent['wall_s']:.2f} s" for stage, spent in times.items())
        yield f"{case['exporter']} {case['patch_mode']}: {case['verdict']} ({stages})"
