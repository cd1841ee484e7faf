"""Does a verdict depend on what ran before it? Every case in several random orders, with -n 0 and -n 2.

    python benchmarks/orders.py                          # tests/cases and model_specs, three orders
    python benchmarks/orders.py --orders 2 --isolate model_specs/bert.yaml cases:17 cases:43

An argument is a spec file, a folder of them, ``cases`` (the models of tests/cases, as specs) or ``cases:NN``.
Failures are not confirmed in these runs, so that what history does is seen. Prints the cases whose verdicts
differ; the exit status is 1 if there are any, or if a run lacks a case.

This file is also the plugin of its own runs: it shuffles the specs, and the cases of each, by the seed in
``EXPORTCHECK_ORDER``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT / "tests" / "cases" / "models"
SEED = "EXPORTCHECK_ORDER"

#: Cells of a case that a run lacks.
ABSENT = "-"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffle whole spec files, and the tests of each; the same in every xdist worker."""
    seed = os.environ.get(SEED)
    if seed is None:
        return
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    generator = random.Random(int(seed))
    names = sorted(files)
    generator.shuffle(names)
    for name in names:
        files[name].sort(key=lambda item: item.nodeid)
        generator.shuffle(files[name])
    items[:] = [item for name in names for item in files[name]]


@dataclass(frozen=True)
class Run:
    """One run of all cases: the seed of its order, xdist's workers, and whether each case is on its own."""

    seed: int
    workers: int
    isolate: bool = False

    def __str__(self) -> str:
        return "isolated" if self.isolate else f"order {self.seed}, -n {self.workers}"


def specs_of(arguments: list[str], folder: Path) -> list[Path]:
    """The spec files and folders to run; specs of tests/cases are written to `folder`."""
    paths = []
    for argument in arguments:
        kind, _, number = argument.partition(":")
        if kind != "cases":
            paths.append(Path(argument).resolve())
            continue
        models = sorted(CASES.glob(f"{number or '[0-9]*'}*.py"))
        if not models:
            raise SystemExit(f"{argument}: no model in {CASES}")
        for model in models:
            shutil.copy(model, folder)
            spec = folder / f"{model.stem}.yaml"
            spec.write_text(
                "exportcheck: 1\n"
                f'model: {{factory: "{model.name}:build_model"}}\n'
                f'observe: {{calls: "{model.name}:calls"}}\n'
                "matrix: {exporters: [torch-export, onnx-dynamo]}\n",
                encoding="utf-8",
            )
            paths.append(spec)
    return paths


def verdicts_of(run: Run, paths: list[Path], folder: Path) -> dict[str, str]:
    """Case -> verdict of one run."""
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    environment = {**os.environ, SEED: str(run.seed)}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    command = [sys.executable, "-m", "pytest", "-p", "orders", "-p", "no:cacheprovider", "-q", "--no-header"]
    command += ["--exportcheck", "--no-confirm", f"--exportcheck-report={report}", "--tb=no", "--no-summary"]
    command += [f"--rootdir={ROOT}", f"-n{run.workers}", *(["--isolate"] if run.isolate else [])]
    finished = subprocess.run(
        [*command, *map(str, paths)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if not report.exists():
        raise SystemExit(f"{run}: no report\n{finished.stdout.decode(errors='replace')[-5000:]}")
    cases: list[dict[str, Any]] = json.loads(report.read_text(encoding="utf-8"))["cases"]
    verdicts = {f"{case['spec']}::{case['nodeid'].rpartition('::')[2]}": case["verdict"] for case in cases}
    if len(verdicts) < len(cases):
        raise SystemExit(f"{run}: {len(cases)} records of {len(verdicts)} cases")
    return verdicts


def table(runs: list[Run], found: list[dict[str, str]]) -> list[str]:
    """One block for each case whose verdicts differ."""
    lines = []
    for case in sorted(set().union(*found)):
        verdicts = [verdicts.get(case, ABSENT) for verdicts in found]
        if len(set(verdicts)) > 1:
            lines.append(case)
            lines += [f"  {run!s:<16} {verdict}" for run, verdict in zip(runs, verdicts, strict=True)]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("specs", nargs="*", default=["cases", "model_specs"])
    parser.add_argument("--orders", type=int, default=3, help="how many random orders (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first order")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], metavar="N", help="values of -n")
    parser.add_argument("--isolate", action="store_true", help="one run more, each case in a fresh process")
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.orders)
    runs = [Run(seed, workers) for workers in options.workers for seed in seeds]
    if options.isolate:
        runs.append(Run(options.seed, options.workers[-1], isolate=True))
    found = []
    # Inside the root directory: pytest's node ids name no file outside of it.
    with tempfile.TemporaryDirectory(prefix=".orders-", dir=ROOT) as name:
        folder = Path(name)
        paths = specs_of(options.specs, folder)
        for run in runs:
            began = time.perf_counter()
            found.append(verdicts_of(run, paths, folder))
            counts: dict[str, int] = {}
            for verdict in found[-1].values():
                counts[verdict.split()[0]] = counts.get(verdict.split()[0], 0) + 1
            shown = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))
            print(f"{run!s:<16} {time.perf_counter() - began:6.0f} s  {shown}", flush=True)
    different = table(runs, found)
    cases = len(set().union(*found))
    if not cases:
        parser.error(
            f"no case in {' '.join(options.specs)}: name spec files, folders of them, cases or cases:NN"
        )
    print(*different, sep="\n")
    print(f"{cases} cases, {len(runs)} runs: {'verdicts differ' if different else 'every verdict the same'}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
