"""Command-line options, their ini twins, and the checks that need nothing but their values."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

__all__ = [
    "DEVICES",
    "DTYPES",
    "Options",
    "add_options",
    "forgotten_flag",
    "refuse_options_without_flag",
    "unknown_name",
]

DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "float16", "bfloat16", "float64")

#: What a stage may take in a fresh process, in seconds.
STAGE_SECONDS = 600.0

#: Size of the cache of conversions, in megabytes.
CACHE_MB = 2000.0

#: What a diagnosis may take, in seconds.
DIAGNOSIS_SECONDS = 120.0

#: Destination and flag of the options that mean nothing without `--exportcheck`.
_NEEDS_FLAG = {
    "exportcheck_update": "--update-shapes",
    "exportcheck_prune": "--prune-shapes",
    "exportcheck_exporter": "--exporter",
    "exportcheck_patch_mode": "--patch-mode",
    "exportcheck_device": "--export-device",
    "exportcheck_dtype": "--export-dtype",
    "exportcheck_ablate": "--ablate-patches",
}


def add_options(parser: pytest.Parser) -> None:
    """Declare every option. Values stay plain strings: xdist sends them to the workers."""
    group = parser.getgroup("exportcheck", "model export checks (pytest-exportcheck)")
    group.addoption(
        "--exportcheck", action="store_true", help="collect spec files (YAML) and check what they describe"
    )
    group.addoption(
        "--update-shapes",
        action="store_true",
        dest="exportcheck_update",
        help="accept the inferred dynamic shapes: write the golden files under __shapes__",
    )
    group.addoption(
        "--prune-shapes",
        action="store_true",
        dest="exportcheck_prune",
        help="delete golden files whose spec is gone (full runs only)",
    )
    for flag, dest, metavar, what in (
        ("--exporter", "exportcheck_exporter", "NAME", "exporter"),
        ("--patch-mode", "exportcheck_patch_mode", "NAME", "patch mode"),
        ("--export-device", "exportcheck_device", "DEV", "device"),
        ("--export-dtype", "exportcheck_dtype", "DT", "dtype"),
    ):
        group.addoption(
            flag,
            action="append",
            default=[],
            dest=dest,
            metavar=metavar,
            help=f"run only the cases with this {what} (repeatable)",
        )
    group.addoption(
        "--require-device",
        action="append",
        default=[],
        dest="exportcheck_require_device",
        metavar="DEV",
        help="a case on this device is an error, not a skip, where the device is absent (repeatable)",
    )
    group.addoption(
        "--exportcheck-report",
        dest="exportcheck_report",
        metavar="PATH",
        help="write one JSON record per case to PATH",
    )
    group.addoption(
        "--exportcheck-html",
        dest="exportcheck_html",
        metavar="PATH",
        help="write one self-contained page to PATH (needs pytest-exportcheck[html])",
    )
    group.addoption(
        "--exportcheck-markdown",
        dest="exportcheck_markdown",
        metavar="PATH",
        help="write the matrix and the failures as Markdown to PATH",
    )
    group.addoption(
        "--baseline",
        dest="exportcheck_baseline",
        metavar="PATH",
        help="compare with the JSON report of an earlier run: exit status 1 if something got worse",
    )
    group.addoption(
        "--exportcheck-artifacts",
        dest="exportcheck_artifacts",
        metavar="DIR",
        help="keep what explains a failed case under DIR",
    )
    group.addoption(
        "--no-confirm",
        action="store_true",
        dest="exportcheck_no_confirm",
        help="report a failure at once: do not run the case again in a fresh process first",
    )
    group.addoption(
        "--isolate",
        action="store_true",
        dest="exportcheck_isolate",
        help="run every case in a fresh process of its own: a crash or a hang costs that case only",
    )
    group.addoption(
        "--stage-timeout",
        type=float,
        dest="exportcheck_stage_timeout",
        metavar="SECONDS",
        help="end a case whose stage takes longer (implies --isolate; 0: no limit; fresh processes have a "
        f"limit of {STAGE_SECONDS:g} unless told otherwise)",
    )
    group.addoption(
        "--workers-per-gpu",
        type=int,
        dest="exportcheck_workers_per_gpu",
        metavar="N",
        default=1,
        help="with -n: how many workers use one CUDA device at a time (default 1)",
    )
    group.addoption(
        "--no-share",
        action="store_true",
        dest="exportcheck_no_share",
        help="make anew for each case what is otherwise made once (slower; the verdicts are the same)",
    )
    group.addoption(
        "--exportcheck-cache",
        dest="exportcheck_cache",
        metavar="DIR",
        help="keep captures and conversions under DIR for later runs, which run the numbers again",
    )
    group.addoption(
        "--exportcheck-cache-size",
        type=float,
        dest="exportcheck_cache_size",
        metavar="MB",
        help=f"remove the entries that were not used for longest beyond that size (default {CACHE_MB:g})",
    )
    group.addoption(
        "--ablate-patches",
        action="store_true",
        dest="exportcheck_ablate",
        help="say which patches each case under a patch mode needs: run it again without each of them",
    )
    group.addoption(
        "--diagnose",
        action="store_true",
        dest="exportcheck_diagnose",
        help="say of each failed case which step, node and module is to blame, and what works around it",
    )
    group.addoption(
        "--diagnose-all",
        action="store_true",
        dest="exportcheck_diagnose_all",
        help="as --diagnose, of expected failures too",
    )
    group.addoption(
        "--diagnose-budget",
        type=float,
        dest="exportcheck_diagnose_budget",
        metavar="SECONDS",
        help=f"after that long no new step of a diagnosis begins (default {DIAGNOSIS_SECONDS:g})",
    )
    parser.addini(
        "exportcheck_diagnose", "off, failed (as --diagnose) or all (as --diagnose-all)", default="off"
    )
    parser.addini("exportcheck_diagnose_budget", "default of --diagnose-budget")
    parser.addini("exportcheck_cache", "default of --exportcheck-cache (relative to the rootdir)")
    parser.addini("exportcheck_cache_size", "default of --exportcheck-cache-size")
    parser.addini("exportcheck_confirm", "false: as --no-confirm", type="bool", default=True)
    parser.addini("exportcheck_isolate", "true: as --isolate", type="bool", default=False)
    parser.addini("exportcheck_stage_timeout", "default of --stage-timeout")
    parser.addini("exportcheck_report", "default of --exportcheck-report (relative to the rootdir)")
    parser.addini("exportcheck_html", "default of --exportcheck-html (relative to the rootdir)")
    parser.addini("exportcheck_markdown", "default of --exportcheck-markdown (relative to the rootdir)")
    parser.addini(
        "exportcheck_step_summary",
        "false: nothing is appended to the job summary of GitHub Actions",
        type="bool",
        default=True,
    )
    parser.addini("exportcheck_artifacts", "default of --exportcheck-artifacts (relative to the rootdir)")
    parser.addini("exportcheck_require_device", "added to --require-device", type="args", default=[])


def refuse_options_without_flag(config: pytest.Config) -> None:
    """Raise `pytest.UsageError` if an option was given that does nothing without `--exportcheck`."""
    given = [flag for dest, flag in _NEEDS_FLAG.items() if config.getoption(dest)]
    if given:
        raise pytest.UsageError(
            f"{', '.join(given)} needs --exportcheck: without it no spec file is collected"
        )


def forgotten_flag(config: pytest.Config) -> str | None:
    """What to say where a spec file is named on the command line and ``--exportcheck`` is not."""
    files = [argument.split("::")[0] for argument in config.args]
    named = [file for file in files if file.endswith((".yaml", ".yml"))]
    if config.getoption("exportcheck") or not named:
        return None
    from .spec.discover import is_spec_file

    spec = next((file for file in named if is_spec_file(Path(config.invocation_params.dir, file))), None)
    return f"{spec} is a spec, and specs need a flag: pytest --exportcheck {spec}" if spec else None


def unknown_name(kind: str, name: str, known: Sequence[str]) -> str:
    """The text for a name that nobody registered, with the valid ones and a near match."""
    from .spec.names import suggest

    return f"unknown {kind} {name!r}{suggest(name, known)}; known: {', '.join(known)}"


@dataclass(frozen=True)
class Options:
    """The values that hold for a run, command line over ini.

    Attributes
    ----------
    flag:
        ``--exportcheck`` was given.
    update, prune:
        ``--update-shapes`` and ``--prune-shapes``.
    exporters, patch_modes, devices, dtypes:
        What the axes are restricted to; empty: everything.
    require_devices:
        Devices whose absence is an error.
    report, html, markdown, baseline, artifacts:
        Absolute paths, or ``None``.
    step_summary:
        The file of the job summary of GitHub Actions, ``None`` elsewhere and where it is not wanted.
    confirm:
        A case that fails is run again in a fresh process before it is reported.
    isolate:
        Every case runs in a fresh process.
    stage_limit:
        Seconds that a stage may take in a fresh process, ``None``: any.
    share:
        What cases have in common is made once.
    cache, cache_mb:
        Where conversions are kept for other runs (``None``: nowhere), and the megabytes that they may take.
    ablate:
        After a case under a patch mode, find out which of the patches it needs.
    diagnose:
        Which failures are explained: ``off``, ``failed`` or ``all``, expected ones among them.
    diagnose_budget:
        Seconds after which no new step of a diagnosis begins.
    workers_per_gpu:
        How many xdist workers use one CUDA device at a time.
    """

    flag: bool
    update: bool
    prune: bool
    exporters: tuple[str, ...]
    patch_modes: tuple[str, ...]
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    require_devices: tuple[str, ...]
    report: Path | None
    artifacts: Path | None
    html: Path | None = None
    markdown: Path | None = None
    baseline: Path | None = None
    step_summary: Path | None = None
    confirm: bool = True
    isolate: bool = False
    stage_limit: float | None = STAGE_SECONDS
    share: bool = True
    cache: Path | None = None
    cache_mb: float = CACHE_MB
    ablate: bool = False
    diagnose: str = "off"
    diagnose_budget: float = DIAGNOSIS_SECONDS
    workers_per_gpu: int = 1

    @classmethod
    def from_config(cls, config: pytest.Config) -> Options:
        """Read the options of `config`; no check."""

        def path(name: str) -> Path | None:
            given = config.getoption(name)
            if given:
                return Path(config.invocation_params.dir, given)
            ini = config.getini(name)
            return Path(config.rootpath, ini) if ini else None

        seconds = _stage_timeout(config)
        baseline = config.getoption("exportcheck_baseline")
        summary = os.environ.get("GITHUB_STEP_SUMMARY")
        return cls(
            flag=bool(config.getoption("exportcheck")),
            update=bool(config.getoption("exportcheck_update")),
            prune=bool(config.getoption("exportcheck_prune")),
            exporters=tuple(config.getoption("exportcheck_exporter")),
            patch_modes=tuple(config.getoption("exportcheck_patch_mode")),
            devices=tuple(config.getoption("exportcheck_device")),
            dtypes=tuple(config.getoption("exportcheck_dtype")),
            require_devices=(
                *config.getini("exportcheck_require_device"),
                *config.getoption("exportcheck_require_device"),
            ),
            report=path("exportcheck_report"),
            artifacts=path("exportcheck_artifacts"),
            html=path("exportcheck_html"),
            markdown=path("exportcheck_markdown"),
            baseline=Path(config.invocation_params.dir, baseline) if baseline else None,
            step_summary=Path(summary) if summary and config.getini("exportcheck_step_summary") else None,
            confirm=bool(
                config.getini("exportcheck_confirm") and not config.getoption("exportcheck_no_confirm")
            ),
            isolate=bool(
                config.getoption("exportcheck_isolate")
                or config.getini("exportcheck_isolate")
                # A stage that hangs can only be ended from outside.
                or seconds
            ),
            stage_limit=STAGE_SECONDS if seconds is None else seconds or None,
            share=not config.getoption("exportcheck_no_share"),
            cache=path("exportcheck_cache"),
            cache_mb=_number(config, "exportcheck_cache_size", CACHE_MB, "megabytes"),
            ablate=bool(config.getoption("exportcheck_ablate")),
            diagnose=_diagnose(config),
            diagnose_budget=_number(config, "exportcheck_diagnose_budget", DIAGNOSIS_SECONDS),
            workers_per_gpu=config.getoption("exportcheck_workers_per_gpu"),
        )

    def check(self, exporters: Sequence[str], patch_modes: Sequence[str]) -> None:
        """Raise `pytest.UsageError` for names that nobody knows and for updates that CI must not do."""
        for kind, values, known in (
            ("exporter", self.exporters, exporters),
            ("patch mode", self.patch_modes, [*patch_modes, "own"]),
            ("device", (*self.devices, *self.require_devices), DEVICES),
            ("dtype", self.dtypes, DTYPES),
        ):
            for value in values:
                # ``file.py:name``: a mode of the user's, known to the specs that name it.
                if value not in known and not (kind == "patch mode" and ":" in value):
                    raise pytest.UsageError(unknown_name(kind, value, known))
        if self.workers_per_gpu < 1:
            raise pytest.UsageError(f"--workers-per-gpu {self.workers_per_gpu}: expected at least 1")
        self._check_ci()
        from .reports.html import missing_packages

        for flag, file in (
            ("--exportcheck-report", self.report),
            ("--exportcheck-html", self.html),
            ("--exportcheck-markdown", self.markdown),
        ):
            if file is not None:
                self._check_file(flag, file)
        if self.cache is not None and self.cache.exists() and not self.cache.is_dir():
            raise pytest.UsageError(f"--exportcheck-cache: {self.cache} is no directory")
        missing = missing_packages() if self.html is not None else []
        if missing:
            raise pytest.UsageError(
                f"--exportcheck-html: {' and '.join(missing)} not installed: "
                "pip install 'pytest-exportcheck[html]'"
            )

    def _check_ci(self) -> None:
        flag = "--update-shapes" if self.update else "--prune-shapes" if self.prune else None
        if flag and _is_set("CI") and not _is_set("EXPORTCHECK_ALLOW_CI_UPDATE"):
            raise pytest.UsageError(
                f"{flag} is refused because CI is set in the environment: accepted shapes are reviewed by a "
                "person and committed, a CI job only compares. Run it locally, or set "
                "EXPORTCHECK_ALLOW_CI_UPDATE=1"
            )

    @staticmethod
    def _check_file(flag: str, file: Path) -> None:
        # Before the run, which may take hours, rather than after it.
        if file.is_dir():
            raise pytest.UsageError(f"{flag}: {file} is a directory")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise pytest.UsageError(f"{flag}: cannot create {file.parent}: {error}") from None


def _stage_timeout(config: pytest.Config) -> float | None:
    """The seconds that were asked for, 0 for no limit, ``None`` if nothing was."""
    seconds: float | None = _number(config, "exportcheck_stage_timeout", None)
    return seconds


def _number(config: pytest.Config, name: str, default: Any, unit: str = "seconds") -> Any:
    """A number from the option `name` or its ini twin; `default` if neither says."""
    given: float | None = config.getoption(name)
    flag = f"--{(name if unit != 'seconds' else name.removeprefix('exportcheck_')).replace('_', '-')}"
    if given is None:
        ini = config.getini(name)
        if not ini:
            return default
        try:
            given = float(ini)
        except ValueError:
            raise pytest.UsageError(f"{name}: {ini!r} is not a number of {unit}") from None
        flag = name
    if not 0 <= given < float("inf"):
        no_limit = ", 0 for no limit" if default is None else ""
        raise pytest.UsageError(f"{flag} {given}: expected {unit}{no_limit}")
    return given


def _diagnose(config: pytest.Config) -> str:
    """Which failures are explained."""
    ini = str(config.getini("exportcheck_diagnose"))
    if ini not in ("off", "failed", "all"):
        raise pytest.UsageError(f"exportcheck_diagnose: {ini!r} is none of off, failed, all")
    if config.getoption("exportcheck_diagnose_all"):
        return "all"
    return "failed" if config.getoption("exportcheck_diagnose") and ini == "off" else ini


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "").lower() not in ("", "0", "false", "no")
