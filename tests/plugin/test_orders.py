"""`benchmarks/orders.py`: the table of differing verdicts, and the order that a seed gives."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "orders.py"


@pytest.fixture
def orders(monkeypatch):
    spec = importlib.util.spec_from_file_location("orders", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "orders", module)
    spec.loader.exec_module(module)
    return module


def test_only_what_differs_is_in_the_table(orders):
    runs = [orders.Run(0, 0), orders.Run(1, 2), orders.Run(0, 2, isolate=True)]
    same = {"a": "pass", "b": "fail export"}
    assert orders.table(runs, [same, same, same]) == []
    lines = orders.table(runs, [same, {**same, "b": "fail run"}, {"a": "pass"}])
    assert lines == [
        "b",
        "  order 0, -n 0    fail export",
        "  order 1, -n 2    fail run",
        "  isolated         -",
    ]


def test_a_seed_gives_an_order_of_its_own(project, orders, monkeypatch):
    for name in ("a", "b", "c"):
        project.spec(name, exporters=("torch-export", "onnx-dynamo", "onnx-torchscript"))
    monkeypatch.syspath_prepend(SCRIPT.parent)
    seen = {}
    for seed in ("0", "1", "0 again", None):
        if seed is None:
            monkeypatch.delenv(orders.SEED)
        else:
            monkeypatch.setenv(orders.SEED, seed.split()[0])
        result = project.run("-p", "orders", "--collect-only", "-q")
        seen[seed] = [line for line in result.outlines if "::" in line]
        assert sorted(seen[seed]) == sorted(seen["0"])
    assert seen["0"] == seen["0 again"]
    assert seen["0"] != seen["1"]
    assert seen[None] not in (seen["0"], seen["1"])
    # Specs stay together: each is observed once.
    files = [line.split("::")[0] for line in seen["0"]]
    assert len([1 for left, right in itertools.pairwise(files) if left != right]) == 2


@pytest.mark.parametrize(("argument", "count"), [("cases", 24), ("cases:17", 1)])
def test_the_models_of_the_cases_become_specs(orders, tmp_path, argument, count):
    paths = orders.specs_of([argument], tmp_path)
    assert len(paths) == count
    assert all(path.read_text(encoding="utf-8").startswith("exportcheck: 1") for path in paths)
    assert {path.with_suffix(".py").name for path in paths} <= {path.name for path in tmp_path.iterdir()}


def test_a_case_that_is_not_there_is_refused(orders, tmp_path):
    with pytest.raises(SystemExit, match="cases:99: no model"):
        orders.specs_of(["cases:99"], tmp_path)
