"""What each patch mode cures: the families of `families.py` under every mode, through the whole pipeline.

    python benchmarks/patch_table.py --out table              # every family, onnx-dynamo, every mode
    python benchmarks/patch_table.py --out table llama t5 --modes none all rewrite
    python benchmarks/patch_table.py --out table --show       # the table and totals of what is there

A family's calls (``generate`` for generators, ``forward`` for the others) are put into as few graphs as can
serve them; a cell passes if every graph passes every stage, other sizes included. Where one graph of all
calls of a generator fails, prompts and single tokens are tried as two (``prefill``, ``decode``).
Each cell runs in a process of its own, forked from one that imported everything, and is written to
``OUT/<family>.json`` as soon as it is known: a second run does what is missing, and what died.

Prompts of decoders carry no padding, unless ``--padded``: positions that attend to nothing are 0 in torch and
something else in an ONNX graph (which the modes ``torch`` and ``all`` cure), and would hide everything else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
from families import FAMILIES, Family

from pytest_exportcheck.cases import CaseId
from pytest_exportcheck.errors import ExportCheckError
from pytest_exportcheck.goldens import write_atomically
from pytest_exportcheck.observe import InputObserver
from pytest_exportcheck.observe.groups import propose_groups
from pytest_exportcheck.pipeline import SpecRun, run_case
from pytest_exportcheck.pytrees import register_flattening_functions
from pytest_exportcheck.spec import load_spec

#: The modes that are ours, for "only one of ours cures".
OURS = ("torch", "transformers", "rewrite", "all")

#: What a spec cannot say: which family, with which masks. Read by `build` and `calls` in the child.
CHOSEN: list[Family] = []

Cell = dict[str, Any]


def family_of(name: str, padded: bool) -> Family:
    """The family; without padding in the prompts of decoders unless `padded`."""
    family = FAMILIES[name]()
    if family.kind == "decoder" and not padded:
        for kwargs in [*family.forward, *family.generate]:
            kwargs["attention_mask"] = torch.ones_like(kwargs["attention_mask"])
    return family


def build() -> torch.nn.Module:
    """The factory of the spec."""
    return CHOSEN[0].model


def calls(model: torch.nn.Module) -> None:
    """The calls of the spec."""
    CHOSEN[0].run()


def graphs_of(family: Family) -> list[dict[str, list[int]]]:
    """Which graphs to try, in order: name of a graph -> its calls."""
    observer = InputObserver()
    with register_flattening_functions():
        with observer(family.model, store_n_calls=20):
            family.run()
        assert observer.info.signature is not None
        found = observer.info.calls
        groups = propose_groups(found, observer.info.signature.defaults)
    tries = [{group.name: list(group.indices) for group in groups}]
    lengths = {
        call.index: ids.shape[1]
        for call in found
        if isinstance(ids := call.shapes().arguments.get("input_ids"), torch.Tensor)
    }
    decode = [index for index, length in lengths.items() if length == 1]
    if len(groups) == 1 and decode and len(decode) < len(lengths) == len(found):
        tries.append({"prefill": [index for index in lengths if index not in decode], "decode": decode})
    return tries


def measure(name: str, exporter: str, mode: str, padded: bool) -> Cell:
    """The outcome of one cell, graph by graph."""
    began = time.perf_counter()
    CHOSEN[:] = [family_of(name, padded)]
    cell: Cell = {}
    for graphs in graphs_of(CHOSEN[0]):
        before = cell
        cell = _outcome(name, exporter, mode, graphs)
        if all(one["verdict"] == "pass" for one in cell["graphs"].values()):
            break
        if before:
            cell["one_graph"] = before["graphs"][""]
    cell["seconds"] = round(time.perf_counter() - began, 1)
    return cell


def spec_run(folder: str, name: str, exporter: str, mode: str, graphs: dict[str, list[int]]) -> SpecRun:
    """The family of `CHOSEN` as a spec in `folder`."""
    split = f", graphs: {json.dumps(graphs)}" if len(graphs) > 1 else ""
    path = Path(folder, f"{name}.yaml")
    path.write_text(
        'exportcheck: 1\nmodel: {factory: "patch_table:build"}\n'
        f'observe: {{calls: "patch_table:calls", batch_dims: true{split}}}\n'
        f"matrix: {{exporters: [{exporter}], patch_modes: [{mode}]}}\n"
    )
    return SpecRun(load_spec(path, Path(folder)))


def _outcome(name: str, exporter: str, mode: str, graphs: dict[str, list[int]]) -> Cell:
    cell: Cell = {"graphs": {}, "calls": graphs}
    with tempfile.TemporaryDirectory() as folder:
        run = spec_run(folder, name, exporter, mode, graphs)
        for graph in run.spec.graph_names:
            record: dict[str, Any] = {}
            case = CaseId(run.spec.relative, exporter, mode, "cpu", "float32", graph)
            outcome: dict[str, Any] = {"verdict": "pass"}
            try:
                run_case(run, case, lambda stage: None, record)
            except ExportCheckError as error:
                outcome = {"verdict": error.stage, "message": error.message, "place": _place(error)}
            outcome["patches"] = (record.get("patches") or {}).get("called", {})
            cell["graphs"][graph or ""] = outcome
        run.close()
    return cell


def _place(error: ExportCheckError) -> str:
    """``modeling_mamba.py:345 in forward``: the last line of the model's own that the failure names."""
    for line in error.details:
        found = re.search(r"(?:at |File \")(\S+?\.py)\"?(?:, line |:)(\d+)(?:,? in (\w+))?", line)
        if found is not None and "/site-packages/torch/" not in found[1]:
            return f"{Path(found[1]).name}:{found[2]}" + (f" in {found[3]}" if found[3] else "")
    return ""


def forked(name: str, exporter: str, mode: str, padded: bool, limit: int) -> Cell:
    """`measure` in a child process, whose state cannot reach the next cell.

    `limit`: CPU seconds, since what a crowded machine takes for a cell is no fact about the family.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, 1)
            os.dup2(devnull, 2)
            try:
                cell = measure(name, exporter, mode, padded)
            except Exception:
                cell = {"graphs": {}, "broken": traceback.format_exc().splitlines()[-12:]}
            with os.fdopen(writer, "wb") as stream:
                stream.write(json.dumps(cell).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        data = stream.read()
    _, status = os.waitpid(child, 0)
    if data:
        return dict(json.loads(data))
    return {"graphs": {}, "died": f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "no answer"}


def text_of(cell: Cell | None) -> str:
    """``pass``, ``export`` (the earliest stage that failed, with the graphs), ``died``, ``·`` if not run."""
    if cell is None:
        return "·"
    if not cell["graphs"]:
        return "died" if "died" in cell else "broken"
    failed = {graph: one["verdict"] for graph, one in cell["graphs"].items() if one["verdict"] != "pass"}
    if not failed:
        return "pass"
    return ", ".join(
        f"{stage} ({'+'.join(g for g in failed if failed[g] == stage)})" if len(cell["graphs"]) > 1 else stage
        for stage in dict.fromkeys(failed.values())
    )


def why(cell: Cell) -> str:
    """Stage, place and first line of the first failure."""
    for graph, one in cell["graphs"].items():
        if one["verdict"] != "pass":
            where = f" at {one['place']}" if one["place"] else ""
            return f"{one['verdict']}{where}{f' ({graph})' if graph else ''}: {one['message']}"
    return str(cell.get("died") or cell.get("broken") or "")


def show(rows: dict[str, dict[str, Cell]], exporters: list[str], modes: list[str]) -> None:
    """The tables, totals and lists."""
    for exporter in exporters:
        cells = {name: {mode: row.get(f"{exporter}/{mode}") for mode in modes} for name, row in rows.items()}
        print(f"\n| {exporter} | " + " | ".join(modes) + " |\n" + "| --- " * (len(modes) + 1) + "|")
        for name, row in cells.items():
            print(f"| {name} | " + " | ".join(text_of(row[mode]) for mode in modes) + " |")
        for mode in modes:
            ran = [text_of(row[mode]) for row in cells.values() if row[mode] is not None]
            stages: dict[str, int] = {}
            for text in ran:
                stages[text.split()[0].strip(",")] = stages.get(text.split()[0].strip(","), 0) + 1
            counts = ", ".join(
                f"{count} {stage}" for stage, count in sorted(stages.items()) if stage != "pass"
            )
            print(f"{mode}: {stages.get('pass', 0)} of {len(ran)} pass" + (f"; {counts}" if counts else ""))
        passed = {name: {m for m in modes if text_of(row[m]) == "pass"} for name, row in cells.items()}
        only_ours = [name for name, good in passed.items() if good and good <= set(OURS)]
        only_hf = [name for name, good in passed.items() if good == {"hf"}]
        lost = [
            f"{name} ({', '.join(m for m in modes if m not in good)})"
            for name, good in passed.items()
            if "none" in good and any(m not in good and cells[name][m] is not None for m in modes)
        ]
        print(f"only a mode of ours cures {len(only_ours)}: {', '.join(only_ours) or 'none'}")
        print(f"only hf cures {len(only_hf)}: {', '.join(only_hf) or 'none'}")
        print(f"pass under none, and not under a mode {len(lost)}: {', '.join(lost) or 'none'}")
        measured = {
            name: [cell for cell in row.values() if cell and cell["graphs"]] for name, row in cells.items()
        }
        no_answer = [
            f"{name} ({mode})"
            for name, row in cells.items()
            for mode, cell in row.items()
            if cell and not cell["graphs"]
        ]
        if no_answer:
            print(f"no verdict (out of time, or died) {len(no_answer)}: {', '.join(no_answer)}")
        uncured = [name for name, good in passed.items() if not good and measured[name]]
        print(f"no mode cures {len(uncured)}:")
        for name in uncured:
            best = cells[name].get("all")
            print(f"  {name}: {why(best if best and best['graphs'] else measured[name][-1])[:240]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", help="names; default all")
    parser.add_argument("--out", type=Path, required=True, help="folder of one JSON file per family")
    parser.add_argument(
        "--modes", nargs="+", help="columns; default none hf transformers torch (rewrite) all"
    )
    parser.add_argument("--exporters", nargs="+", default=["onnx-dynamo"])
    parser.add_argument("--padded", action="store_true", help="prompts of decoders with padding on the left")
    parser.add_argument("--limit", type=int, default=600, help="CPU seconds of a cell")
    parser.add_argument("--again", action="store_true", help="run what is there already, too")
    parser.add_argument("--show", action="store_true", help="run nothing")
    options = parser.parse_args()
    modes = options.modes or [
        "none", "hf", "transformers", "torch", "rewrite", "all"
    ]  # fmt: skip
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    options.out.mkdir(parents=True, exist_ok=True)
    # A spec's "module:callable" is this file under its own name.
    sys.modules["patch_table"] = sys.modules["__main__"]
    rows: dict[str, dict[str, Cell]] = {}
    for name in options.families or list(FAMILIES):
        path = options.out / f"{name}.json"
        with contextlib.suppress(FileNotFoundError):
            rows[name] = json.loads(path.read_text())
        row = rows.setdefault(name, {})
        for exporter in options.exporters:
            for mode in modes:
                known = row.get(f"{exporter}/{mode}")
                if options.show or (known and known["graphs"] and not options.again):
                    continue
                cell = row[f"{exporter}/{mode}"] = forked(name, exporter, mode, options.padded, options.limit)
                write_atomically(path, json.dumps(row, indent=1) + "\n")
                print(f"{name} {exporter} {mode}: {text_of(cell)} ({cell.get('seconds', '?')} s)", flush=True)
    show(rows, options.exporters, modes)


if __name__ == "__main__":
    main()
