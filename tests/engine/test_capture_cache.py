"""Captures of earlier runs: used where everything is the same, made anew where one thing differs."""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils import _pytree

from pytest_exportcheck.cache_settings import CacheSettings
from pytest_exportcheck.exporters import capture_cache, surroundings
from pytest_exportcheck.exporters.content import Content, Unreadable
from pytest_exportcheck.exporters.serialized import NotSaveable, _read, from_json, to_json
from pytest_exportcheck.patches.registry import load_patch_mode
from pytest_exportcheck.spec import load_spec
from pytest_exportcheck.spec_run import SpecRun

from .helpers import make_run, verdict
from .test_conversions import judged

pytestmark = pytest.mark.filterwarnings("ignore")

NET = """
    import os

    OFFSET = 3.0


    def scaled(factor):
        def scale(x):
            return x * factor

        return scale


    class Net(nn.Module):
        gain = 2.0

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.steps = [1, 2]
            self.scale = scaled(1.5)

        def forward(self, x):
            if x.shape[0] <= 7:
                raise ValueError("too short")
            for step in self.steps:
                x = torch.relu(self.linear(x)) * step
            return self.scale(x) * self.gain + OFFSET + torch.tensor([1.0, 2.0]).sum()


    def build_model():
        return Net()


    def calls():
        return [((torch.randn(9, 6),), {}), ((torch.randn(12, 6),), {})]
"""


class Runs:
    """Runs one spec again and again, with a new `SpecRun` each time as another pytest run would."""

    def __init__(self, folder: Path, source: str = NET, extra: str = "") -> None:
        self.spec = make_run(folder, source, extra).spec
        self.folder = folder / "cache"

    def __call__(
        self, exporter: str = "torch-export", mode: str = "none", cache: bool = True
    ) -> dict[str, Any]:
        """The record of the case, which must pass."""
        stage, error, record = self.judge(exporter, mode, cache)
        assert stage == "pass", error
        return record

    def judge(
        self, exporter: str = "torch-export", mode: str = "none", cache: bool = True
    ) -> tuple[str, Any, dict[str, Any]]:
        run = SpecRun(self.spec, True, CacheSettings(self.folder, 10**9) if cache else None)
        try:
            return verdict(run, exporter, mode)
        finally:
            run.close()

    def change(self, old: str, new: str) -> None:
        """Another line in the factory's file."""
        path = self.spec.path.with_suffix(".py")
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")
        self.spec = load_spec(self.spec.path, self.spec.path.parent)

    def entries(self) -> list[Path]:
        return sorted(self.folder.glob("*/*.capture"))


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


# one difference is enough


def change_line(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.change("torch.relu(", "torch.tanh(")


def change_comment(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.change("gain = 2.0", "gain = 2.0  # and one more word")


def change_attribute(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.change("self.steps = [1, 2]", "self.steps = [1, 3]")


def change_class_attribute(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.change("gain = 2.0", "gain = 2.5")


def change_global(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.change("OFFSET = 3.0", "OFFSET = 4.0")


def change_closure(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.change("scaled(1.5)", "scaled(1.25)")


def change_weight(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    path = runs.spec.path
    path.write_text(path.read_text().replace('build_model"', 'build_model", seed: 7'))
    runs.spec = load_spec(path, path.parent)


def change_calls(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.change("torch.randn(12, 6)", "torch.randn(13, 6)")


def change_options(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    path = runs.spec.path
    option = "prefer_deferred_runtime_asserts_over_guards: true"
    path.write_text(path.read_text() + f"exporter_options: {{torch-export: {{{option}}}}}\n")
    runs.spec = load_spec(path, path.parent)


def change_variable(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_MODEL_IS_FAST", "1")


def change_function_of_torch(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: linear(*args))


def change_method_of_a_library(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = torch.nn.Linear.forward

    def mine(self: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", mine)


def swap_functions_of_torch(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "silu", torch.nn.functional.gelu)


def change_code_in_place(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def silu(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
        return input

    monkeypatch.setattr(torch.nn.functional.silu, "__code__", silu.__code__)


def swap_code_in_place(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    other = torch.nn.functional.leaky_relu.__code__
    monkeypatch.setattr(torch.nn.functional.silu, "__code__", other)


def change_operator_of_tensors(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: matmul(a, b))


def change_function_of_linalg(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = torch.linalg.norm
    monkeypatch.setattr(torch.linalg, "norm", lambda *args: norm(*args))


def change_hooks_of_every_module(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    monkeypatch.setitem(hooks, 10**6, lambda module, args: None)


def change_einsum(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.opt_einsum, "enabled", not torch.backends.opt_einsum.enabled)


def change_flattening(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    node = _pytree.SUPPORTED_NODES[dict]
    theirs = node._replace(flatten_fn=lambda d: node.flatten_fn(d))
    monkeypatch.setitem(_pytree.SUPPORTED_NODES, dict, theirs)


def change_versions(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_cache, "process_digest", lambda: "another torch")


DIFFERENCES = [
    change_line,
    change_comment,
    change_attribute,
    change_class_attribute,
    change_global,
    change_closure,
    change_weight,
    change_calls,
    change_options,
    change_variable,
    change_function_of_torch,
    change_method_of_a_library,
    swap_functions_of_torch,
    change_code_in_place,
    swap_code_in_place,
    change_operator_of_tensors,
    change_function_of_linalg,
    change_hooks_of_every_module,
    change_einsum,
    change_flattening,
    change_versions,
]


@pytest.mark.parametrize("change", DIFFERENCES, ids=lambda change: change.__name__)
def test_one_difference_is_enough(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, change: Callable[[Runs, pytest.MonkeyPatch], None]
) -> None:
    runs()
    assert runs()["capture"] == "cached", "without the change it is reused"
    change(runs, monkeypatch)
    record = runs()
    assert record["capture"] == "new"
    assert "cache_notes" not in record, "it is nobody's fault"


@pytest.mark.parametrize("name", ["use_duck_shape", "no_data_dependent_graph_break"])
def test_a_flag_of_torch_counts_while_it_is_set(runs: Runs, name: str) -> None:
    config = torch.fx.experimental._config
    runs()
    with config.patch({name: not getattr(config, name)}):
        assert runs()["capture"] == "new"
    assert runs()["capture"] == "cached"


def test_a_patch_of_the_users_is_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from pytest_exportcheck.patches.modes import PatchList\n"
        "from pytest_exportcheck.patches.patch import Patch\n\n\n"
        "def relu(x):\n    return x.clamp(min=0)\n\n\n"
        'mode = PatchList("mine", [lambda model, target: [Patch("torch.relu", relu)]])\n'
    )
    runs = Runs(tmp_path)

    def once() -> dict[str, Any]:
        run = SpecRun(runs.spec, True, CacheSettings(runs.folder, 10**9))
        run.modes["mine"] = load_patch_mode("mine.py:mode", tmp_path)
        stage, error, record = verdict(run, "torch-export", "mine")
        assert stage == "pass", error
        return record

    first, second = once(), once()
    assert (first["capture"], second["capture"]) == ("new", "cached")
    assert first["patches"] == second["patches"]
    assert first["patches"]["called"] == {"torch.relu": 2}
    text = (tmp_path / "mine.py").read_text()
    (tmp_path / "mine.py").write_text(text.replace("clamp(min=0)", "clamp_min(0)"))
    assert once()["capture"] == "new"


# what cannot be read


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("self.scale(x)", "self.scale(x) * len(open(__file__).readline() or 'x') ** 0", "calls open()"),
        (
            "self.steps = [1, 2]",
            "self.steps = [1, 2]; self.lines = iter([1])",
            "holds a builtins.list_iterator",
        ),
        ("import os", "import os\n    import time", ""),
        ("if x.shape[0] <= 7", "import time\n            if x.shape[0] <= 7", "imports time"),
        (
            "if x.shape[0] <= 7",
            "if x.shape[0] < 0:\n                import beside_it\n            if x.shape[0] <= 7",
            "imports beside_it, which was not imported yet",
        ),
        ("self.scale(x)", "self.scale(x) * len(os.sys.argv) ** 0", "asks for argv"),
        ("self.scale(x)", "self.scale(x) * os.path.exists(__file__)", "asks for exists"),
        ("self.gain + OFFSET", "self.gain + OFFSET * THERE('.')", "is exists"),
    ],
    ids=["file", "iterator", "unused module", "inner import", "late import", "argv", "exists", "alias"],
)
def test_what_cannot_be_read_is_not_reused(tmp_path: Path, old: str, new: str, reason: str) -> None:
    source = NET.replace("OFFSET = 3.0", "OFFSET = 3.0\n    THERE = os.path.exists")
    runs = Runs(tmp_path, source.replace(old, new))
    records = [runs(), runs()]
    if reason:
        assert [record["capture"] for record in records] == ["new", "new"]
        assert all(reason in record["capture_not_kept"] for record in records)
        assert not runs.entries()
    else:
        assert [record["capture"] for record in records] == ["new", "cached"]


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


# the pieces


def digest(value: Any) -> str:
    content = Content()
    content.add("value", value)
    return content.hexdigest()


def test_content_is_of_values_and_not_of_places() -> None:
    assert digest({"a": [1, (2.0, None)]}) == digest({"a": [1, (2.0, None)]})
    assert digest([1]) != digest([True])
    assert digest([1, 2]) != digest([[1], 2])
    assert digest({"a", "b", "c"}) == digest({"c", "b", "a"})
    assert digest(torch.zeros(2)) != digest(torch.zeros(2).to(torch.float64))
    assert digest(torch.zeros(2, 3)) != digest(torch.zeros(3, 2).t())
    shared = [0]
    assert digest([shared, shared]) != digest([[0], [0]])
    shared.append(shared)  # type: ignore[arg-type]
    assert digest(shared)


def hidden() -> Iterator[Any]:
    yield iter([1])
    yield io.BytesIO()
    yield (number for number in range(2))
    yield memoryview(b"x")
    yield torch.zeros(2, device="meta")


@pytest.mark.parametrize("value", list(hidden()), ids=lambda value: type(value).__name__)
def test_what_cannot_be_told_has_no_digest(value: Any) -> None:
    with pytest.raises(Unreadable, match=r"value\.here"):
        digest({"here": value})


def test_tensors_in_the_same_memory_are_not_those_apart() -> None:
    values = torch.zeros(4)
    assert digest([values[:2], values[:2]]) != digest([torch.zeros(2), torch.zeros(2)])


def test_a_table_of_a_class_that_others_register_in(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = digest(ALL_ATTENTION_FUNCTIONS)
    monkeypatch.setitem(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, "mine", lambda x: x)
    assert digest(ALL_ATTENTION_FUNCTIONS) != before


def test_hooks_and_methods_of_an_instance_count() -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Linear(2, 2)

    plain, hooked, replaced = model(), model(), model()
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    assert digest(plain) == digest(model())
    assert len({digest(plain), digest(hooked), digest(replaced)}) == 3


def test_variables_of_a_run_count_only_where_code_reads_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_RUN_ID", "1")
    monkeypatch.setenv("TIMM_FUSED_ATTN", "0")
    few, every = surroundings.variables(every=False), surroundings.variables(every=True)
    assert "TIMM_FUSED_ATTN" in few
    assert "GITHUB_RUN_ID" not in few
    assert "GITHUB_RUN_ID" in every
    assert "PYTEST_CURRENT_TEST" not in every


@pytest.mark.parametrize(
    "name",
    [
        *(
            "PWD",
            "SHELL",
            "TERM_PROGRAM",
            "KITTY_WINDOW_ID",
            "WT_SESSION",
            "SSH_CONNECTION",
            "LANG",
            "COLORFGBG",
        ),
        *("BASH_VERSION", "HISTFILE", "PS1", "XDG_SESSION_ID", "DESKTOP_SESSION", "SUDO_USER", "WSLENV"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "_CE_CONDA", "UV", "UV_CACHE_DIR", "PIP_INDEX_URL", "TOX_ENV_NAME"),
        *("CI_JOB_ID", "CIRCLE_BUILD_NUM", "RUNNER_TEMP", "ImageVersion", "KUBERNETES_SERVICE_HOST"),
        *("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"),
    ],
)
def test_what_a_terminal_or_a_package_manager_sets_does_not_count(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    assert name not in surroundings.variables(every=False)


@pytest.mark.parametrize(
    "name",
    ["PATH", "HOME", "CI", "OMP_NUM_THREADS", "TORCH_LOGS", "PYTHONHASHSEED", "HF_HOME", "MY_MODEL_WIDTH"],
)
def test_what_may_reach_a_capture_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert surroundings.variables(every=False)[name] == "1"


def test_of_what_torch_and_transformers_read_little_is_left_out() -> None:
    """Where caches lie, names and colours in messages, compilers: none of it reaches a capture."""
    access = re.compile(
        r"""(?:environ(?:\.get)?|getenv)\s*[(\[]\s*["'](\w+)["']|["'](\w+)["'] in os\.environ"""
    )
    read = set()
    for package in (torch, transformers):
        for file in Path(package.__file__).parent.rglob("*.py"):
            text = file.read_text(encoding="utf-8", errors="replace")
            if ("environ" in text or "getenv" in text) and "test" not in file.as_posix().partition("site-")[
                2
            ]:
                read |= {one or other for one, other in access.findall(text)}
    assert {"CI", "TORCHINDUCTOR_CACHE_DIR", "TRANSFORMERS_VERBOSITY"} <= read
    counted = surroundings._OF_A_TEST.fullmatch, surroundings._OF_A_RUN.fullmatch
    assert {name for name in read if any(left_out(name) for left_out in counted)} <= {
        *(
            "XDG_CACHE_HOME",
            "XDG_CONFIG_DIRS",
            "XDG_CONFIG_HOME",
            "XDG_DATA_DIRS",
            "XDG_DATA_HOME",
            "XDG_STATE_HOME",
        ),
        *("CONDA_EXE", "CONDA_PREFIX", "VIRTUAL_ENV", "NO_COLOR", "USER", "USERNAME", "VSCODE_PID"),
        "PIP_DISABLE_PIP_VERSION_CHECK",
    }


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
