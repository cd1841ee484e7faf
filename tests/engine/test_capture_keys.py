"""What the key of a capture sees: one difference, wherever it is, and the capture is made anew."""

from __future__ import annotations

import sys
import sysconfig
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from pytest_exportcheck.cache_settings import CacheSettings
from pytest_exportcheck.exporters import capture_cache, surroundings
from pytest_exportcheck.patches.registry import load_patch_mode
from pytest_exportcheck.spec import load_spec
from pytest_exportcheck.spec.imports import load_object, sibling_imports
from pytest_exportcheck.spec_run import SpecRun

from .capture_runs import NET, Runs
from .helpers import verdict

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


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


def change_defaults_in_place(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional.leaky_relu, "__defaults__", (0.5, False))


def change_attribute_of_a_function(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.Linear.forward, "is_fast", True, raising=False)


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
    change_defaults_in_place,
    change_attribute_of_a_function,
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


def test_files_that_only_other_specs_name_do_not_count(tmp_path: Path) -> None:
    """Whether they were imported says what ran before; what the files of the spec import counts."""
    for name, text in (
        ("own", "import helper\n\n\nmake = 1\n"),
        ("helper", "make = 1\n"),
        ("other", "import theirs\n\n\nmake = 2\n"),
        ("theirs", "import helper\n"),
        ("any", "import importlib\n\n\nmake = 3\n"),
    ):
        (tmp_path / f"{name}.py").write_text(text)

    def files(named: str | None, met: tuple[str, ...] = ()) -> set[str]:
        outside = surroundings._outside(tmp_path, named, met)
        return {Path(file).stem for _, file in outside if Path(file).parent == tmp_path}

    spec = 'model: {factory: "own.py:make"}'
    load_object("own.py:make", tmp_path)
    with sibling_imports(tmp_path):
        before = files(spec)
    load_object("other.py:make", tmp_path)
    load_object("any.py:make", tmp_path)
    with sibling_imports(tmp_path):
        assert files(spec) == before == {"own", "helper"}
        assert files("{factory: other:make}") == {"other", "theirs", "helper"}
        assert files("", (str(tmp_path / "theirs.py"),)) == {"theirs", "helper"}
        everything = {"own", "helper", "other", "theirs", "any"}
        assert files("any.py:make") == files(None) == everything, "it may import anything"


def test_the_command_of_pytest_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A worker of xdist finds what a run of one process kept."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    before = list(surroundings._outside(tmp_path, None, ()))
    main.__file__ = str(Path(sysconfig.get_paths()["scripts"], "pytest"))
    assert list(surroundings._outside(tmp_path, None, ())) == before
    main.__file__ = str(tmp_path / "run_pytest.py")
    assert ("__main__", main.__file__) in surroundings._outside(tmp_path, None, ())


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
