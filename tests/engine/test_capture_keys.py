"""What the key of a capture sees: one difference, wherever it is, and the capture is made anew."""

from __future__ import annotations

import functools
import io
import os
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch._inductor.runtime import cache_dir_utils
from torch.utils import _pytree

from pytest_exportcheck.cache_settings import CacheSettings
from pytest_exportcheck.exporters import capture_cache, surroundings
from pytest_exportcheck.exporters.codes import code_digest
from pytest_exportcheck.exporters.content import Content, Unreadable
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


# what was done to installed code


@pytest.fixture(scope="module")
def bert() -> torch.nn.Module:
    config = transformers.BertConfig(
        vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4
    )
    return transformers.BertModel(config)


def installed(model: torch.nn.Module) -> str:
    content = Content()
    content.add("model", model)
    surroundings.add_installed(content, [type(part) for part in model.modules()], Path("."))
    return content.hexdigest()


def constants(function: Any, old: Any, new: Any) -> Any:
    """Its code with another constant, under the same name and on the same line."""
    code = function.__code__
    assert old in code.co_consts
    return code.replace(co_consts=tuple(new if item == old else item for item in code.co_consts))


def other_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    function = transformers.activations.NewGELUActivation.forward
    monkeypatch.setattr(function, "__code__", constants(function, 0.044715, 0.05))


def other_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional.softmax, "__defaults__", (None, 5, None))


def other_default_of_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        transformers.models.bert.modeling_bert.BertSelfAttention.__init__, "__defaults__", (1, 2)
    )


def other_keyword_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional.silu, "__kwdefaults__", {"inplace": True})


def other_closure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper of torch's around a function of torch: around another one."""
    pool = torch.nn.functional.max_pool2d  # `boolean_dispatch`
    (cell,) = [
        cell
        for name, cell in zip(pool.__code__.co_freevars, pool.__closure__, strict=True)
        if name == "if_false"
    ]
    monkeypatch.setattr(cell, "cell_contents", torch.nn.functional._max_pool3d)


def other_wrapped_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, of a function that is only in the closure of its wrapper."""
    wrapped = transformers.BertModel.forward.__wrapped__
    while hasattr(wrapped, "__wrapped__"):
        wrapped = wrapped.__wrapped__
    monkeypatch.setattr(
        wrapped, "__code__", wrapped.__code__.replace(co_consts=(*wrapped.__code__.co_consts, 7))
    )


def other_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """``ACT2FN["gelu"]`` makes a new one each time: what it holds is a class, or a class and arguments."""
    monkeypatch.setitem(transformers.activations.ACT2FN, "gelu", torch.nn.Tanh)


def other_arguments_of_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    _, arguments = dict.__getitem__(transformers.activations.ACT2FN, "gelu_10")
    monkeypatch.setitem(arguments, "max", 6)


def other_class_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 3

    monkeypatch.setitem(transformers.activations.ACT2FN, "gelu", Mine)


def entry_of_a_dict_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(transformers.BertPreTrainedModel._can_record_outputs, "mine", 1)


def flag_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.models.bert.modeling_bert.BertPreTrainedModel, "_supports_sdpa", "no")


def function_under_a_decorator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outer function is torch's own, the inner one is not."""
    original = transformers.activations.GELUActivation.forward
    monkeypatch.setattr(
        transformers.activations.GELUActivation,
        "forward",
        torch.no_grad()(lambda self, x: original(self, x) * 2),
    )


CHANGES = [
    other_constant,
    other_defaults,
    other_default_of_a_method,
    other_keyword_defaults,
    other_closure,
    other_wrapped_function,
    other_entry,
    other_arguments_of_an_entry,
    other_class_of_the_users,
    entry_of_a_dict_of_a_class,
    flag_of_a_class,
    function_under_a_decorator,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_was_done_to_installed_code_counts_while_it_lasts(
    bert: torch.nn.Module, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    before = installed(bert)
    assert installed(bert) == before
    with pytest.MonkeyPatch.context() as monkeypatch:
        change(monkeypatch)
        changed = installed(bert)
        assert changed != before
        assert installed(bert) == changed
    assert installed(bert) == before


class Scaled:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def again(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@pytest.mark.parametrize(
    "holding",
    [
        Scaled,
        lambda factor: Scaled(factor).again,
        lambda factor: functools.partial(Scaled(factor)),
        lambda factor: torch.tensor([factor]),
        lambda factor: types.SimpleNamespace(factor=factor),
    ],
    ids=["object", "method", "partial", "tensor", "namespace"],
)
@pytest.mark.parametrize("place", ["module", "table"])
def test_objects_in_installed_modules_count_with_what_they_hold(
    bert: torch.nn.Module, place: str, holding: Callable[[float], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their class says the same of both."""
    found = {installed(bert)}
    for factor in (2.0, 3.0):
        value = holding(factor)
        if place == "module":
            monkeypatch.setattr(transformers.models.bert.modeling_bert, "apply_chunking_to_forward", value)
        else:
            monkeypatch.setitem(transformers.activations.ACT2FN, "gelu", value)
        changed = installed(bert)
        assert installed(bert) == changed
        found.add(changed)
    assert len(found) == 3


def test_a_list_of_a_class_counts_as_it_is_now(bert: torch.nn.Module) -> None:
    names = transformers.BertModel._no_split_modules
    before = installed(bert)
    names.append("Mine")
    try:
        assert installed(bert) != before
    finally:
        names.remove("Mine")
    assert installed(bert) == before


def test_code_has_a_digest_whatever_is_among_its_constants() -> None:
    """Python 3.14 has slices there, which the format of the digest does not know."""
    code = installed.__code__
    odd = [code.replace(co_consts=(*code.co_consts, item)) for item in (slice(1, 2), slice(1, 3))]
    assert len({code_digest(one) for one in (code, *odd)}) == 3
    assert code_digest(odd[0].replace()) == code_digest(odd[0])


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


def test_variables_that_libraries_write_say_what_ran_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    before = surroundings.variables(every=True)
    cache_dir_utils.cache_dir()
    assert "TORCHINDUCTOR_CACHE_DIR" in os.environ
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # transformers' pipelines
    assert surroundings.variables(every=True) == before


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
