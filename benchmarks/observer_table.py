"""The observer on many model families, beside `torch.onnx.InputObserver`: one row per family.

    python benchmarks/observer_table.py                      # every family, a Markdown table and totals
    python benchmarks/observer_table.py llama t5 --json out.json

Columns, for each observer: it observes the calls (``generate`` for generators, ``forward`` for the others);
it infers arguments and dynamic shapes; `torch.export.export` takes them; every recorded call replays in the
exported program with eager's numbers. Ours splits calls of different structure into groups, one program each.
Both run with the cache classes registered as pytree nodes, which torch's observer does not do itself. Each
family runs in a process of its own, forked from one that imported everything.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
from families import FAMILIES, Family

from pytest_exportcheck.checks.compare import Tolerances, compare_leaves
from pytest_exportcheck.exporters.base import dynamic_arguments, flat_forward, split_constants
from pytest_exportcheck.observe import InputObserver, choose_example, infer_shapes
from pytest_exportcheck.observe.groups import propose_groups
from pytest_exportcheck.pytrees import clone_tree, flatten_with_paths, register_flattening_functions

STEPS = ("observes", "infers", "exports", "replays")
LIMIT_SECONDS = 300

Steps = dict[str, str]


def _same(expected: Any, got: Any) -> bool:
    results = compare_leaves(flatten_with_paths(expected), flatten_with_paths(got), Tolerances())
    return all(result.ok for result in results)


@contextlib.contextmanager
def _step(steps: Steps, name: str):
    try:
        yield
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        steps[name] = f"{type(error).__name__}: {first}"[:160]
        raise
    steps.setdefault(name, "ok")


def ours(family: Family, steps: Steps) -> None:
    observer = InputObserver()
    with _step(steps, "observes"), observer(family.model, store_n_calls=20):
        family.run()
    signature = observer.info.signature
    assert signature is not None
    calls = observer.info.calls

    def accepts(arguments: dict[str, Any]) -> bool:
        args, kwargs = signature.call(clone_tree(arguments))
        try:
            with torch.no_grad():
                family.model(*args, **kwargs)
        except Exception:
            return False
        return True

    plans = []
    with _step(steps, "infers"):
        groups = propose_groups(calls, signature.defaults)
        assert groups, "no graph can serve some call"
        for group in groups:
            members = [call for call in calls if call.index in group.indices]
            shapes = infer_shapes(
                members, signature_order=signature.names, defaults=signature.defaults, batch_dims=True
            )
            plans.append((members, shapes, choose_example(members, shapes, accepts)))
    programs = []
    with _step(steps, "exports"):
        for _, shapes, example in plans:
            with (
                flat_forward(family.model, "forward", signature, example.arguments) as kwargs,
                torch.no_grad(),
            ):
                shapes_given = dynamic_arguments(kwargs, shapes)
                programs.append(torch.export.export(family.model, (), kwargs, dynamic_shapes=shapes_given))
    with _step(steps, "replays"):
        for (members, shapes, _), program in zip(plans, programs, strict=True):
            module = program.module()
            for call in members:
                tensors, _ = split_constants(shapes.complete(call))
                if not _same(call.outputs, module(**clone_tree(tensors))):
                    raise AssertionError(f"call {call.index} differs from eager")


def theirs(family: Family, steps: Steps) -> None:
    observer = torch.onnx.InputObserver()
    with _step(steps, "observes"), observer(family.model, store_n_calls=20):
        family.run()
    with _step(steps, "infers"):
        shapes = observer.infer_dynamic_shapes(set_batch_dimension_for=True)
        arguments = observer.infer_arguments()
    with _step(steps, "exports"), torch.no_grad():
        args, kwargs = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
        program = torch.export.export(
            family.model, args, copy.deepcopy(kwargs), dynamic_shapes=shapes, strict=False
        )
    with _step(steps, "replays"), torch.no_grad():
        module = program.module()
        for index, candidate in enumerate(observer.info.inputs):
            expected = family.model(*copy.deepcopy(candidate.args), **copy.deepcopy(candidate.kwargs))
            if not _same(expected, module(*copy.deepcopy(candidate.args), **copy.deepcopy(candidate.kwargs))):
                raise AssertionError(f"call {index} differs from eager")


def _measure(name: str, run: Callable[[Family, Steps], None]) -> Steps:
    steps: Steps = {}
    with contextlib.suppress(Exception), register_flattening_functions():
        run(FAMILIES[name](), steps)
    return steps


def _forked(name: str, run: Callable[[Family, Steps], None]) -> Steps:
    """`_measure` in a child process, whose state cannot reach the next family."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        status = 1
        try:
            signal.alarm(LIMIT_SECONDS)
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, 1)
            os.dup2(devnull, 2)
            os.write(writer, json.dumps(_measure(name, run)).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        data = stream.read()
    os.waitpid(child, 0)
    return json.loads(data) if data else {"observes": f"died, or took more than {LIMIT_SECONDS} s"}


def _cells(steps: Steps) -> list[str]:
    return ["yes" if steps.get(step) == "ok" else ("no" if step in steps else "·") for step in STEPS]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", help="names; default all")
    parser.add_argument("--json", type=Path, help="write every step with its error to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    names = options.families or list(FAMILIES)
    rows: dict[str, dict[str, Steps]] = {}
    print(
        "| family | ours: "
        + " | ".join(STEPS)
        + " | torch's: "
        + " | ".join(STEPS)
        + " | first refusal of ours |"
    )
    print("| --- " * (2 * len(STEPS) + 2) + "|")
    for name in names:
        rows[name] = {"ours": _forked(name, ours), "theirs": _forked(name, theirs)}
        refused = next((f"{step}: {text}" for step, text in rows[name]["ours"].items() if text != "ok"), "")
        cells = [
            name,
            *_cells(rows[name]["ours"]),
            *_cells(rows[name]["theirs"]),
            refused[:90].replace("|", "/"),
        ]
        print("| " + " | ".join(cells) + " |", flush=True)
    for who in ("ours", "theirs"):
        totals = [sum(row[who].get(step) == "ok" for row in rows.values()) for step in STEPS]
        print(
            f"{who}: "
            + ", ".join(f"{step} {count}" for step, count in zip(STEPS, totals, strict=True))
            + f" of {len(rows)}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
