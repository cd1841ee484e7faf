"""What a run costs before its first verdict, in CPU seconds, beside what pytest costs itself.

    python benchmarks/startup.py [--repeats 7] [--specs 1000] [--json FILE]

idle      one trivial test file, with the plugin and without; in turn, median of each
collect   ``--collect-only`` over 1,000 spec files, and over 1,000 items of one parametrized test; median of 3
first     the whole run of one tiny spec, and the bare export of its model in a script; median of 3

Other plugins that are installed are left out of all of them (``PYTEST_DISABLE_PLUGIN_AUTOLOAD``).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLUGIN = ("-p", "pytest_exportcheck.plugin")
ROWS = ("idle", "collect", "first")

SPEC = """\
exportcheck: 1
model: {factory: "models.py:build"}
observe:
  calls: [{forward: {input: "float32[2, 4]"}}, {forward: {input: "float32[3, 4]"}}]
matrix: {exporters: [torch-export]}
"""
MODELS = """\
import torch

def build():
    return torch.nn.Linear(4, 4)
"""
MANY = """\
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_trivial(number):
    pass
"""
BARE = """\
import torch
shapes = {"input": {0: torch.export.Dim.DYNAMIC}}
torch.export.export(torch.nn.Linear(4, 4), (), {"input": torch.rand(3, 4)}, dynamic_shapes=shapes)
"""


def cpu_seconds(command: list[str], folder: Path) -> float:
    """CPU seconds of a command and its children; it must succeed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def alternating(ours: list[str], base: list[str], folder: Path, repeats: int) -> dict[str, Any]:
    """Medians of two commands that are run in turn, without the first run of each, which fills caches."""
    found: dict[str, list[float]] = {"ours": [], "base": []}
    for _ in range(repeats + 1):
        for name, command in (("ours", ours), ("base", base)):
            found[name].append(cpu_seconds(command, folder))
    seconds = {name: statistics.median(values[1:]) for name, values in found.items()}
    return {
        "ours_cpu_s": round(seconds["ours"], 3),
        "base_cpu_s": round(seconds["base"], 3),
        "extra_cpu_s": round(seconds["ours"] - seconds["base"], 3),
        "ratio": round(seconds["ours"] / seconds["base"], 3),
    }


def measure(rows: Sequence[str] = ROWS, repeats: int = 7, specs: int = 1000) -> dict[str, dict[str, Any]]:
    """The rows by name, each as `alternating` returns it."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    check = [*pytest, *PLUGIN, "--exportcheck"]
    commands = {
        "idle": ([*pytest, *PLUGIN, "test_one.py"], [*pytest, "test_one.py"], repeats),
        "collect": (
            [*check, "--collect-only", "many"],
            [*pytest, "--collect-only", "test_many.py"],
            min(repeats, 3),
        ),
        "first": ([*check, "-k", "test_export", "one"], [sys.executable, "bare.py"], min(repeats, 3)),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part, count in (("one", 1), ("many", specs)):
            (folder / part).mkdir()
            (folder / part / "models.py").write_text(MODELS, encoding="utf-8")
            for number in range(count):
                (folder / part / f"spec{number:04}.yaml").write_text(SPEC, encoding="utf-8")
        (folder / "test_one.py").write_text("def test_trivial():\n    pass\n", encoding="utf-8")
        (folder / "test_many.py").write_text(MANY.format(count=specs), encoding="utf-8")
        (folder / "bare.py").write_text(BARE, encoding="utf-8")
        return {row: alternating(*commands[row][:2], folder, commands[row][2]) for row in rows}


def main() -> int:
    """Print the table; write it as JSON, where that is wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7, help="of the idle plugin")
    parser.add_argument("--specs", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = measure(ROWS, options.repeats, options.specs)
    print("| row | CPU s | of the base | ratio | extra CPU s |")
    print("| --- | --- | --- | --- | --- |")
    for row, found in rows.items():
        print(
            f"| {row} | {found['ours_cpu_s']} | {found['base_cpu_s']} | {found['ratio']} "
            f"| {found['extra_cpu_s']} |"
        )
    if options.json is not None:
        text = json.dumps({"benchmark": "startup", "rows": rows}, indent=1)
        options.json.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
