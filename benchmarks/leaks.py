"""What an export leaves behind, by patch mode: changed functions, registrations, attributes of the model.

    python benchmarks/leaks.py                      # six families, every mode, and transformers' own exporter
    python benchmarks/leaks.py llama t5 --modes all hf

A model is exported once under ``none``, so that what torch and ONNX Runtime set up once does not count; then
the process is remembered (`checks.leaks.snapshot`), the model is exported under the mode, and what is not as
it was is listed. ``own`` is the exporter of transformers (`transformers-onnx`), which applies the patches of
``hf`` itself, ``alone`` that exporter without this package around it.
Each cell runs in a process of its own. Exit status 1 if a mode of ours leaves anything.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import re
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import transformers

sys.path.insert(0, str(Path(__file__).parent))
import patch_table

from pytest_exportcheck.cases import CaseId
from pytest_exportcheck.checks.leaks import difference, snapshot
from pytest_exportcheck.errors import ExportCheckError
from pytest_exportcheck.pipeline import OWN, SpecRun, run_case

FAMILIES = ("llama", "mistral", "mamba", "mixtral", "t5", "vit")

#: The exporter of transformers as its users call it.
ALONE = "alone"

#: Shown of what one cell leaves.
SHOWN = 8


def _export(run: SpecRun, exporter: str, mode: str) -> str:
    """``pass``, or the stages that failed: a failed export must leave nothing either."""
    failed = []
    for graph in run.spec.graph_names:
        case = CaseId(run.spec.relative, exporter, mode, "cpu", "float32", graph)
        try:
            run_case(run, case, lambda stage: None, {})
        except ExportCheckError as error:
            failed.append(error.stage)
    return ", ".join(failed) or "pass"


def _export_alone(run: SpecRun) -> str:
    from transformers.exporters import OnnxConfig, OnnxExporter

    kwargs = copy.deepcopy(patch_table.CHOSEN[0].forward[0])
    try:
        OnnxExporter().export(run.model("cpu", "float32"), kwargs, OnnxConfig())
    except Exception as error:
        return type(error).__name__
    return "exported"


def measure(name: str, mode: str) -> tuple[str, list[str]]:
    """The outcome of one cell, and what it leaves."""
    patch_table.CHOSEN[:] = [patch_table.family_of(name, padded=False)]
    graphs = patch_table.graphs_of(patch_table.CHOSEN[0])[0]
    with tempfile.TemporaryDirectory() as folder:
        run = patch_table.spec_run(folder, name, "onnx-dynamo", "none", graphs)
        _export(run, "onnx-dynamo", "none")
        before = snapshot(run.model("cpu", "float32"))
        if mode == ALONE:
            outcome = _export_alone(run)
            return outcome, [str(leak) for leak in difference(before)]
        outcome = _export(run, "transformers-onnx" if mode == OWN else "onnx-dynamo", mode)
        return outcome, [str(leak) for leak in difference(before)]


def forked(name: str, mode: str) -> tuple[str, list[str]]:
    """`measure` in a child process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, 1)
            os.dup2(devnull, 2)
            try:
                found: object = measure(name, mode)
            except Exception as error:
                found = ("broken", traceback.format_exception_only(error))
            with os.fdopen(writer, "wb") as stream:
                stream.write(json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        data = stream.read()
    os.waitpid(child, 0)
    if not data:
        return "died", ["nothing is known"]
    outcome, leaks = json.loads(data)
    return outcome, leaks


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--modes", nargs="+")
    options = parser.parse_args()
    ours = ["none", "torch", "transformers", "rewrite", "all"]
    modes = options.modes or [*ours, "hf", OWN, ALONE]
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    left: dict[str, dict[str, list[str]]] = {}
    for mode in modes:
        for name in options.families:
            outcome, leaks = forked(name, mode)
            left.setdefault(mode, {})[name] = leaks
            print(f"{mode} {name}: {len(leaks)} left ({outcome})", flush=True)
    print(f"\n| mode | {' | '.join(options.families)} | what |")
    print("| --- " * (len(options.families) + 2) + "|")
    for mode, cells in left.items():
        # The same thing on every layer is one thing.
        kinds = dict.fromkeys(re.sub(r"\b\d+\b", "N", leak) for leaks in cells.values() for leak in leaks)
        what = "; ".join(list(kinds)[:SHOWN]) + (f"; {len(kinds) - SHOWN} more" if len(kinds) > SHOWN else "")
        counts = " | ".join(str(len(leaks)) for leaks in cells.values())
        print(f"| {mode} | {counts} | {what.replace('|', '/') or 'nothing'} |")
    return 1 if any(leaks for mode in ours for leaks in left.get(mode, {}).values()) else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
