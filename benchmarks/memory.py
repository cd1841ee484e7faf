"""Peak memory of a run over N specs beside that of one of them.

    python benchmarks/memory.py [--specs 5 10 20] [--mb 40] [--exporters onnx-dynamo ...] [--json FILE]

Synthetic specs, each a model of its own with `--mb` MiB of float32 weights: all are the largest. Every run is
a process of its own. The peak is the largest resident size that the run's records tell, and as a check the
largest that was seen from outside, every 20 ms. Exits 1 if a run over several specs needs more than 1.2 times
what one needs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 1.2

MODELS = """
import torch

class Stack(torch.nn.Module):
    def __init__(self, layers, wide):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(wide, wide, bias=False) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x)) * 0.5
        return x

build = Stack
"""

#: 4 MiB of float32.
WIDE = 1024


def write_specs(folder: Path, count: int, megabytes: int, exporters: list[str]) -> None:
    """`count` specs of models with `megabytes` MiB of weights each."""
    folder.mkdir()
    (folder / "models.py").write_text(MODELS, encoding="utf-8")
    for number in range(count):
        (folder / f"stack{number:02}.yaml").write_text(
            "exportcheck: 1\n"
            "model:\n"
            '  factory: "models.py:build"\n'
            f"  kwargs: {{layers: {max(1, megabytes // 4)}, wide: {WIDE}}}\n"
            f"  seed: {number}\n"
            "observe:\n"
            f'  calls: [{{forward: {{x: "float32[2, {WIDE}]"}}}}, {{forward: {{x: "float32[3, {WIDE}]"}}}}]\n'
            f"matrix: {{exporters: {json.dumps(exporters)}}}\n",
            encoding="utf-8",
        )


def resident_mb(pid: int) -> float:
    """Resident size of a process, MiB; 0 when it is gone, or where there is no ``/proc``."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / (1024 * 1024)


def measured(count: int, megabytes: int, exporters: list[str]) -> dict[str, Any]:
    """One run over `count` specs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_specs(folder / "specs", count, megabytes, exporters)
        command = [sys.executable, "-m", "pytest", "specs", "--exportcheck", "-q", "-p", "no:cacheprovider"]
        command += ["--no-confirm", "-k", "test_export", "--exportcheck-report", "report.json"]
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        with (folder / "output.txt").open("w+", encoding="utf-8") as output:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": paths},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            seen = 0.0
            while process.poll() is None:
                seen = max(seen, resident_mb(process.pid))
                time.sleep(0.02)
            if process.returncode != 0:
                output.seek(0)
                raise SystemExit(f"{' '.join(command)}: exit status {process.returncode}\n{output.read()}")
        cases = json.loads((folder / "report.json").read_text(encoding="utf-8"))["cases"]
    by_stage: dict[str, float] = {}
    for case in cases:
        for stage, peak in (case.get("peak_rss_by_stage_mb") or {}).items():
            by_stage[stage] = max(by_stage.get(stage, 0.0), peak)
    return {
        "specs": count,
        "cases": len(cases),
        "peak_mb": max(case["peak_rss_mb"] for case in cases),
        "seen_from_outside_mb": round(seen, 1),
        "peak_by_stage_mb": by_stage,
    }


def measure(counts: Sequence[int], megabytes: int, exporters: list[str]) -> list[dict[str, Any]]:
    """A run over one spec, and one for each of `counts`, with the ratio to the first."""
    runs: list[dict[str, Any]] = []
    for count in [1, *counts]:
        runs.append(measured(count, megabytes, exporters))
        runs[-1]["ratio"] = round(runs[-1]["peak_mb"] / runs[0]["peak_mb"], 3)
        print(runs[-1], file=sys.stderr, flush=True)
    return runs


def main() -> int:
    """Print the table; write it as JSON, where that is wanted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--specs", type=int, nargs="+", default=[5, 10, 20])
    parser.add_argument("--mb", type=int, default=40, help="MiB of weights of each model")
    parser.add_argument("--exporters", nargs="+", default=["onnx-dynamo"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs = measure(options.specs, options.mb, options.exporters)
    print("| specs | peak MiB | of one | seen from outside |")
    print("| --- | --- | --- | --- |")
    for run in runs:
        print(f"| {run['specs']} | {run['peak_mb']} | {run['ratio']} | {run['seen_from_outside_mb']} |")
    if options.json is not None:
        rows = {f"{run['specs']} specs": run for run in runs}
        text = json.dumps({"benchmark": "memory", "rows": rows}, indent=1)
        options.json.write_text(text, encoding="utf-8")
    return int(any(run["ratio"] > LIMIT for run in runs))


if __name__ == "__main__":
    sys.exit(main())
