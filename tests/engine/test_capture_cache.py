"""Captures of earlier runs: used where everything is the same, made anew where one thing differs."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.utils import _pytree

from pytest_exportcheck.cache_settings import CacheSettings
from pytest_exportcheck.exporters.fingerprint import program_lines
from pytest_exportcheck.exporters.serialized import NotSaveable, _read, from_json, to_json
from pytest_exportcheck.exporters.tables import shared_tables
from pytest_exportcheck.patches.hf import HfPatches
from pytest_exportcheck.patches.patch import MODELING
from pytest_exportcheck.spec_run import SpecRun

from .capture_runs import NET, Runs
from .helpers import verdict
from .test_conversions import judged

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each capture that torch is asked for."""
    made: list[str] = []
    export = torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append("torch.export.export")
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    return made


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two records say the same of a case, the patches it went through included."""
    apart = ("capture", "cache_notes")
    first, second = ({k: v for k, v in judged(record).items() if k not in apart} for record in (one, other))
    return first == second and one.get("patches") == other.get("patches")


@pytest.mark.parametrize("exporter", ["torch-export", "torch-export-strict", "onnx-dynamo"])
@pytest.mark.parametrize("mode", ["none", "torch"])
def test_a_second_run_captures_nothing(runs: Runs, captured: list[str], exporter: str, mode: str) -> None:
    alone = runs(exporter, mode, cache=False)
    first = runs(exporter, mode)
    assert len(captured) == 2
    second = runs(exporter, mode)
    assert (first["capture"], second["capture"]) == ("new", "cached")
    assert "capture" not in alone
    assert len(captured) == 2
    assert same(alone, first)
    assert same(first, second)
    assert second["outputs"], "the numbers were run again"
    assert second["resize"]["thresholds"] == alone["resize"]["thresholds"] != []


def test_fixes_of_a_mode_and_calls_by_the_conversion_are_in_the_record_of_both_runs(runs: Runs) -> None:
    """Nodes are counted as captured, before the fixes; patches are called by torch.onnx too."""
    alone, first, second = (runs("onnx-dynamo", "hf", cache=cache) for cache in (False, True, True))
    assert (first["capture"], second["capture"]) == ("new", "cached")
    assert alone["fx_nodes"] == first["fx_nodes"] == second["fx_nodes"]
    assert alone["patches"] == first["patches"] == second["patches"]
    assert first["patches"]["called"]


def test_an_entry_is_json_without_weights(runs: Runs) -> None:
    runs()
    (entry,) = runs.entries()
    with zipfile.ZipFile(entry) as archive:
        assert archive.namelist() == ["manifest.json", "program.json"]
        manifest, program = (json.loads(archive.read(name)) for name in archive.namelist())
    model = SpecRun(runs.spec).model("cpu", "float32")
    weight = dict(model.named_parameters())["linear.weight"]
    assert weight.detach().numpy().tobytes() not in entry.read_bytes()
    tensors = manifest["facts"]["tensors"]
    assert tensors["linear.weight"] == "linear.weight"
    assert [value["dtype"] for value in tensors.values() if isinstance(value, dict)] == ["float32"]
    assert program["graph_module"]["graph"]["nodes"]


def test_operators_of_others_are_not_kept(tmp_path: Path) -> None:
    source = NET.replace(
        "class Net(nn.Module):",
        "@torch.library.custom_op('mine_for_captures::twice', mutates_args=())\n"
        "    def twice(x: torch.Tensor) -> torch.Tensor:\n"
        "        return x * 2\n\n\n"
        "    @twice.register_fake\n"
        "    def _(x):\n"
        "        return torch.empty_like(x)\n\n\n"
        "    class Net(nn.Module):",
    ).replace("self.scale(x)", "twice(self.scale(x))")
    runs = Runs(tmp_path, source)
    record = runs()
    assert record["capture"] == "new"
    assert record["capture_not_kept"]
    assert not runs.entries()


@pytest.mark.parametrize(("exporter", "mode"), [("torch-export", "none"), ("onnx-dynamo", "hf")])
def test_operators_of_transformers_are_kept(
    tmp_path: Path, captured: list[str], exporter: str, mode: str
) -> None:
    pytest.importorskip("transformers.integrations.moe")
    source = NET.replace("import os\n", "import os\n    import transformers.integrations.moe\n", 1).replace(
        "self.scale(x)",
        "torch.ops.transformers.grouped_mm_fallback(self.scale(x), self.linear.weight[None], "
        "torch.full((1,), x.shape[0], dtype=torch.int32))",
    )
    runs = Runs(tmp_path, source)
    first, second = runs(exporter, mode), runs(exporter, mode)
    assert len(captured) == 1
    assert (first["capture"], second["capture"]) == ("new", "cached")
    assert second.get("conversion") == ("cached" if exporter == "onnx-dynamo" else None)
    assert second["fx_nodes"] == first["fx_nodes"]
    (entry,) = runs.entries()
    program = json.loads(zipfile.ZipFile(entry).read("program.json"))
    targets = [node["target"] for node in program["graph_module"]["graph"]["nodes"]]
    assert "torch.ops.transformers.grouped_mm_fallback.default" in targets


def test_a_capture_leaves_the_key_of_the_next_one_as_it_is(tmp_path: Path, captured: list[str]) -> None:
    """torch.export copies lists of a module, which then shares none; dynamo marks `Module` for good."""
    source = NET.replace(
        "self.steps = [1, 2]", "self.steps = [1, 2]; self.also = (self.steps, {'all': self.steps})"
    )
    runs = Runs(tmp_path, source)
    cases = [
        ("torch-export", "none"),
        ("torch-export-strict", "none"),
        ("torch-export", "torch"),
        ("onnx-dynamo", "none"),
    ]
    for wanted in ("new", "cached"):
        run = SpecRun(runs.spec, True, CacheSettings(runs.folder, 10**9))
        records = [verdict(run, *case)[2] for case in cases]
        run.close()
        assert [record["capture"] for record in records] == [wanted] * 4
        assert len(captured) == 4


def test_patches_of_other_models_are_no_part_of_the_key(runs: Runs, captured: list[str]) -> None:
    """transformers' own exporter imports all modules that it has patches for: then these are in place."""
    names = [MODELING.match(patch.target) for patch in HfPatches().patches(None, "torch")]
    others = {name.group(0) for name in names if name is not None} - sys.modules.keys()
    assert others, "everything is imported already"
    first = runs("torch-export", "hf")
    importlib.import_module(min(others))
    second = runs("torch-export", "hf")
    assert second["patches"]["active"] > first["patches"]["active"]
    assert (first["capture"], second["capture"]) == ("new", "cached")
    assert len(captured) == 1


def test_a_failure_is_never_kept(tmp_path: Path, captured: list[str]) -> None:
    runs = Runs(tmp_path, NET.replace("x.shape[0] <= 7", "x.sum() > 99"))
    for number in (1, 2):
        stage, _, record = runs.judge()
        assert stage == "export"
        assert len(captured) == number
        assert "capture" not in record
    assert not runs.entries()


def test_wrong_numbers_are_never_kept(tmp_path: Path) -> None:
    """The branch of the example is frozen into the ONNX model: other sizes show it."""
    runs = Runs(tmp_path, NET.replace("raise ValueError", "x = x + len"))
    texts = set()
    for _ in range(2):
        stage, error, record = runs.judge("onnx-dynamo")
        assert stage == "resize"
        assert record["capture"] == "new"
        texts.add(str(error))
    assert len(texts) == 1
    assert not runs.entries()


# what is there is not what is looked for


def rewritten(path: Path, change: Callable[[Any, Any], None], **how: Any) -> None:
    with zipfile.ZipFile(path) as archive:
        manifest, program = (json.loads(archive.read(name)) for name in ("manifest.json", "program.json"))
    change(manifest, program)
    data = json.dumps(program).encode()
    manifest["sha256"] = hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(path, "w", **how) as archive:
        archive.writestr("manifest.json", json.dumps(manifest))
        archive.writestr("program.json", data)


def graph_of(program: Any) -> Any:
    return program["graph_module"]["graph"]


def another_operator(manifest: Any, program: Any) -> None:
    for node in graph_of(program)["nodes"]:
        node["target"] = node["target"].replace("relu", "sigmoid")


def code_as_an_operator(manifest: Any, program: Any) -> None:
    graph_of(program)["nodes"][0]["target"] = "torch.hub.load"


def code_as_a_guard(manifest: Any, program: Any) -> None:
    program["guards_code"] = ["__import__('os').mkdir('was_run') or True"]


def code_as_a_size(manifest: Any, program: Any) -> None:
    for meta in graph_of(program)["tensor_values"].values():
        for size in meta["sizes"]:
            if "as_expr" in size:
                size["as_expr"]["expr_str"] = "__import__('os').mkdir('was_run')"


def another_structure(manifest: Any, program: Any) -> None:
    program["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = "[1, {}]"


def no_graph(manifest: Any, program: Any) -> None:
    program["graph_module"] = {}


def another_key(manifest: Any, program: Any) -> None:
    manifest["key"]["content"] = "0" * 64


def another_weight(manifest: Any, program: Any) -> None:
    manifest["facts"]["tensors"]["linear.weight"] = "linear.bias"


def no_such_weight(manifest: Any, program: Any) -> None:
    manifest["facts"]["tensors"]["linear.weight"] = "../weight"


def no_facts(manifest: Any, program: Any) -> None:
    del manifest["facts"]["dims"]


HOSTILE = [
    another_operator,
    code_as_an_operator,
    code_as_a_guard,
    code_as_a_size,
    another_structure,
    no_graph,
    another_key,
    another_weight,
    no_such_weight,
    no_facts,
]


@pytest.mark.parametrize("damage", HOSTILE, ids=lambda damage: damage.__name__)
def test_a_forged_entry_changes_no_verdict_and_runs_no_code(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Any, Any], None]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    first = runs()
    rewritten(runs.entries()[0], damage)
    second = runs()
    assert second["capture"] == "new"
    notes = second.pop("cache_notes", []) + [
        second["warnings"].pop() for _ in second["warnings"][len(first["warnings"]) :]
    ]
    assert len(notes) == 1
    assert not list(Path.cwd().iterdir())
    assert same(first, second)
    assert runs()["capture"] == "cached", "the new one took its place"


def test_damage_is_ignored_with_a_word(runs: Runs) -> None:
    runs()
    (entry,) = runs.entries()
    entry.write_bytes(entry.read_bytes()[:-100])
    record = runs()
    assert record["capture"] == "new"
    assert record["cache_notes"][0].startswith(f"{entry} is ignored: it is damaged")


def test_only_what_comes_back_as_it_was_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 4)
    model = torch.nn.Linear(4, 4)
    shapes = {"input": {0: torch.export.Dim.DYNAMIC}}
    program = torch.export.export(model, (), {"input": x}, dynamic_shapes=shapes)
    spec = _pytree.treespec_dumps(_pytree.tree_structure(x))
    data = to_json(program, {"input": x}, spec)
    in_spec = _pytree.treespec_dumps(_pytree.tree_structure(((), {"input": x})))
    loaded = from_json(data, program.state_dict, program.constants, {"input": x}, in_spec, spec)
    other = torch.randn(7, 4)
    assert torch.equal(loaded.module()(input=other), model(other))
    with pytest.raises(AssertionError, match="Guard failed"):
        loaded.module()(input=torch.randn(7, 5))
    with pytest.raises(NotSaveable, match="another structure"):
        to_json(program, {"input": x}, "[1, {}]")
    program.graph_module.graph.find_nodes(op="output")[0].name = "another"
    program._guards_code = ["L['input'].size()[1] == 4", "L['input'].evil(1) == 4"]
    with pytest.raises(NotSaveable, match="evil"):
        to_json(program, {"input": x}, spec)


def test_torch_reads_the_same_from_a_file() -> None:
    from torch._export.serde import schema, serialize

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor, pair: list[torch.Tensor]) -> Any:
            y = torch.cond(x.sum() > 0, lambda t: t + 1.5, lambda t: t - 1, (x,))
            parts = torch.split(y, 2, dim=1)
            return {"a": parts[0].to(torch.float16), "b": [pair[0] * x.shape[0], None, 3]}

    x = torch.randn(3, 4)
    shapes = {"x": {0: torch.export.Dim.DYNAMIC}, "pair": [None]}
    program = torch.export.export(
        Net(), (), {"x": x, "pair": [torch.randn(1, 4)]}, dynamic_shapes=shapes, strict=False
    )
    written = serialize.ExportedProgramSerializer().serialize(program)
    plain = json.loads(serialize._to_json_bytes(written.exported_program))
    assert _read(schema.ExportedProgram, plain) == serialize._dict_to_dataclass(schema.ExportedProgram, plain)


class Conditional(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda t: self.linear(t) + 1.5, lambda t: t - 1, (x,))


class Looping(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        start = (torch.tensor(0), x)
        return while_loop(lambda i, t: i < 3, lambda i, t: (i + 1, t * 1.5), start)[1]


class Scanning(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return scan(lambda carry, row: (carry + row, carry * 2), x[0] * 0.0, x)[1]


@pytest.mark.parametrize("kind", [Conditional, Looping, Scanning])
def test_a_program_with_inner_graphs_comes_back_as_it_was(kind: type[torch.nn.Module]) -> None:
    """Their operands were read back as lists, which is another program: nothing of them was ever kept."""
    model, x = kind().eval(), torch.randn(3, 4)
    shapes = {"x": {0: torch.export.Dim.DYNAMIC}}
    program = torch.export.export(model, (), {"x": x}, dynamic_shapes=shapes, strict=False)
    specs = [_pytree.treespec_dumps(_pytree.tree_structure(tree)) for tree in (((), {"x": x}), model(x))]
    data = to_json(program, {"x": x}, specs[1])
    loaded = from_json(data, program.state_dict, program.constants, {"x": x}, *specs)
    assert [*program_lines(loaded, inner=False)] == [*program_lines(program, inner=False)]
    assert loaded.graph_module.code == program.graph_module.code
    for rows in (2, 5):
        for sign in (1, -1):
            other = sign * torch.rand(rows, 4)
            assert torch.equal(loaded.module()(x=other), model(other))
    plain = json.loads(data)
    plain["containers"] = {path: {} for path in plain["containers"]}
    with pytest.raises(ValueError, match="shorter"):
        from_json(json.dumps(plain).encode(), program.state_dict, program.constants, {"x": x}, *specs)


def test_an_onnx_model_of_a_program_with_inner_graphs_is_the_same() -> None:
    model, x = Conditional().eval(), torch.randn(3, 4)
    program = torch.export.export(model, (), {"x": x}, strict=False)
    specs = [_pytree.treespec_dumps(_pytree.tree_structure(tree)) for tree in (((), {"x": x}), model(x))]
    data = to_json(program, {"x": x}, specs[1])
    loaded = from_json(data, program.state_dict, program.constants, {"x": x}, *specs)
    with shared_tables():
        made = [torch.onnx.export(each, dynamo=True, verbose=False) for each in (program, loaded)]
    assert made[0] is not None
    assert made[1] is not None
    first, second = (without_notes(each.model_proto) for each in made)
    assert first == second


def without_notes(model: Any) -> bytes:
    """Its bytes, without where in the source its nodes come from: a kept program does not know."""
    graphs = [model.graph, *model.functions]
    while graphs:
        graph = graphs.pop()
        for node in graph.node:
            del node.metadata_props[:]
            graphs += [attribute.g for attribute in node.attribute if attribute.HasField("g")]
        for value in graph.value_info:
            del value.metadata_props[:]
    return bytes(model.SerializeToString())


LOOP = """
    class Net(nn.Module):
        def forward(self, x):
            total = x[0] * 0.0
            if x.sum() > 100:
                total = total + 1
            for row in x:
                total = total * 0.5 + torch.tanh(row)
            return total


    def build_model():
        return Net()


    def calls():
        return [((torch.randn(n, 4),), {}) for n in (9, 12)]
"""


@pytest.mark.parametrize("exporter", ["torch-export", "onnx-dynamo"])
def test_a_rewritten_model_is_captured_once(tmp_path: Path, captured: list[str], exporter: str) -> None:
    runs = Runs(tmp_path, LOOP)
    first = runs(exporter, "rewrite")
    assert "capture_not_kept" not in first
    second = runs(exporter, "rewrite")
    assert (first["capture"], second["capture"]) == ("new", "cached")
    assert same(first, second)
    assert second["patches"]["rewritten"]
