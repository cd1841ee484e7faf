"""The speed of everything in one run, as ratios: each to another way of doing the same on the same cases.

    python benchmarks/speed.py [--rows script limit ...] [--json FILE] [SPEC ...]

SPEC are stems of model_specs, or files of specs; default all that are shipped. A row is made by the benchmark
that its line names, or by ``main_job.py``.

script        ours, over a script written by hand for the same cases
limit         ours, over the calls that cannot be avoided
transformers  ours with the exporter ``transformers-onnx``, over the exporter of transformers alone
diagnostic    ours, over ``onnx_diagnostic validate`` on one tiny llama; or why that does not run
workers       ``-n 2`` over ``-n 0``, in wall seconds: on two cores that do nothing else
cache         a second run with ``--exportcheck-cache`` over the first
collect       1,000 specs over 1,000 items of a parametrized test (``startup.py``)
idle          pytest with the plugin that is not used, over pytest without it (``startup.py``)
observer      a call under our observer over the same under that of torch (``observer_overhead.py``)
memory        the peak over 5, 10 and 20 specs, over that of one (``memory.py``)

A ratio above 1 is slower, or larger. A part that fails is told in its row, the others go on, and the exit
status is 1. ``exportcheck compare BEFORE AFTER`` compares two files of ``--json``.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import main_job
import memory
import startup

#: Row of the table -> its figures; ``ratio`` is what is shown, ``said`` a remark.
Rows = dict[str, dict[str, Any]]

#: What ``arnir0/Tiny-LLM`` is, which `onnx_diagnostic` builds without the hub.
DIAGNOSTIC_MODEL = "arnir0/Tiny-LLM"
DIAGNOSTIC_SPEC = """\
exportcheck: 1
model:
  type: llama
  auto_class: AutoModelForCausalLM
  config: {hidden_size: 192, head_dim: 96, intermediate_size: 1024, max_position_embeddings: 1024,
           num_attention_heads: 2, num_hidden_layers: 1, num_key_value_heads: 1, vocab_size: 32000}
observe:
  calls: [{generate: {input_ids: "int64[2, 30] < 32000", max_new_tokens: 3}}]
matrix: {exporters: [onnx-dynamo], patch_modes: [transformers]}
"""


class Main:
    """The main job over the wanted specs: prepared once, each of its rows run once.

    Parameters
    ----------
    names:
        Stems of model_specs, or files; none: all that are shipped.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder
        self._names = list(names)

    @functools.cache  # noqa: B019  one instance, for one run
    def folder(self, *exporters: str) -> Path:
        """Specs with the matrix of the main job, or with `exporters` and no patches; goldens accepted."""
        folder = self._folder / ("-".join(exporters) or "main")
        folder.mkdir()
        files = [Path(name) for name in self._names if name.endswith(".yaml")]
        source = main_job.ROOT / "model_specs"
        if files:
            source = folder / "given"
            source.mkdir()
            for file in files:
                # With what lies beside it: a factory may be there.
                for each in file.parent.iterdir():
                    if each.is_file() and (each.suffix != ".yaml" or each in files):
                        shutil.copy(each, source)
        stems = [Path(name).stem for name in self._names]
        modes = ["none"] if exporters else main_job.MODES
        if not main_job.prepare(folder, stems, source, exporters or main_job.EXPORTERS, modes):
            raise SystemExit(f"no spec is left of {', '.join(self._names)}")
        main_job.accept_shapes(folder)
        return folder

    @functools.cache  # noqa: B019  one instance, for one run
    def row(self, name: str, *exporters: str) -> dict[str, Any]:
        """A row of `main_job`."""
        return main_job.row(name, self.folder(*exporters))

    def over(self, ours: str, base: str, *exporters: str, figure: str = "cpu_s") -> dict[str, Any]:
        """Figures of one row over another."""
        # The base first: a second run is one after the first.
        other, one = self.row(base, *exporters), self.row(ours, *exporters)
        return {
            "ratio": round(one[figure] / other[figure], 3),
            "ours_cpu_s": one["cpu_s"],
            "base_cpu_s": other["cpu_s"],
            "said": f"{one['said']}; {other['said']}",
        }


def diagnostic(folder: Path) -> dict[str, Any]:
    """Ours over ``onnx_diagnostic validate``, which may not run."""
    if importlib.util.find_spec("onnx_diagnostic") is None:
        return {"said": "not installed"}
    folder = folder / "diagnostic"
    folder.mkdir()
    validate = [sys.executable, "-m", "onnx_diagnostic", "validate", "-m", DIAGNOSTIC_MODEL, "--run"]
    validate += ["--no-quiet", "--patch", "--export", "onnx-dynamo", "-o", "dump"]
    try:
        base = startup.cpu_seconds(validate, folder)
    except SystemExit as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return {"said": f"does not run: {lines[-1]}"}
    (folder / "tiny_llm.yaml").write_text(DIAGNOSTIC_SPEC, encoding="utf-8")
    ours = [sys.executable, "-m", "pytest", *main_job.PYTEST, "-k", "test_export", "tiny_llm.yaml"]
    spent = startup.cpu_seconds(ours, folder)
    return {
        "ratio": round(spent / base, 3),
        "ours_cpu_s": round(spent, 1),
        "base_cpu_s": round(base, 1),
        "said": DIAGNOSTIC_MODEL,
    }


def started(row: str, repeats: int) -> dict[str, Any]:
    """A row of `startup`."""
    return startup.measure([row], repeats)[row]


def observer(folder: Path, repeats: int) -> Rows:
    """Rows of `observer_overhead`, which imports torch: in a process of its own."""
    script, file = Path(__file__).with_name("observer_overhead.py"), folder / "observer.json"
    main_job.measured([sys.executable, str(script), "--repeats", str(repeats), "--json", str(file)], folder)
    found: Rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return {f"observer: {name}": figures for name, figures in found.items()}


def peaks(counts: Sequence[int]) -> Rows:
    """Rows of `memory`."""
    runs = memory.measure(counts, 40, ["onnx-dynamo"])
    limit = f"above the limit of {memory.LIMIT}"
    return {
        f"memory: {run['specs']} specs": {
            "ratio": run["ratio"],
            "peak_mb": run["peak_mb"],
            **({"failed": limit} if run["ratio"] > memory.LIMIT else {}),
        }
        for run in runs[1:]
    }


def parts(main: Main, folder: Path, repeats: int) -> dict[str, Callable[[], Rows]]:
    """Row of ``--rows`` -> what measures it."""
    return {
        "script": lambda: {"script": main.over("ours", "script")},
        "limit": lambda: {"limit": main.over("ours", "limit")},
        "transformers": lambda: {"transformers": main.over("ours", "transformers", "transformers-onnx")},
        "diagnostic": lambda: {"diagnostic": diagnostic(folder)},
        "workers": lambda: {"workers": main.over("ours-n2", "ours", figure="wall_s")},
        "cache": lambda: {"cache": main.over("ours-cached", "ours-first")},
        "collect": lambda: {"collect": started("collect", repeats)},
        "idle": lambda: {"idle": started("idle", repeats)},
        "observer": lambda: observer(folder, repeats),
        "memory": lambda: peaks([5, 10, 20]),
    }


ROWS = tuple(parts(Main(Path(), []), Path(), 1))


def measure(names: Sequence[str], specs: Sequence[str], repeats: int) -> Rows:
    """The wanted rows; one that cannot be measured says so under ``failed``."""
    rows: Rows = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        every = parts(Main(folder, specs), folder, repeats)
        for name in names:
            try:
                found = every[name]()
            except (SystemExit, Exception) as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                # The first says which command, the last what it raised.
                found = {
                    name: {"failed": " ... ".join(dict.fromkeys([*lines[:1], *lines[-1:]])) or repr(error)}
                }
            for row, figures in found.items():
                print(f"{row}: {figures}", file=sys.stderr, flush=True)
            rows.update(found)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, write it as JSON where that is wanted; 1 if a part failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "specs", nargs="*", metavar="SPEC", help="stems of model_specs, or files; default all"
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--repeats", type=int, default=7, help="of what takes less than a second")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = measure(options.rows, options.specs, options.repeats)
    print("| row | ratio | ours CPU s | base CPU s | |")
    print("| --- | --- | --- | --- | --- |")
    for row, found in rows.items():
        numbers = " | ".join(str(found.get(name, "-")) for name in ("ratio", "ours_cpu_s", "base_cpu_s"))
        remark = f"FAILED: {found['failed']}" if "failed" in found else found.get("said", "")
        print(f"| {row} | {numbers} | {remark} |")
    if options.json is not None:
        text = json.dumps({"benchmark": "speed", "rows": rows}, indent=1)
        options.json.write_text(text, encoding="utf-8")
    return int(any("failed" in found for found in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
