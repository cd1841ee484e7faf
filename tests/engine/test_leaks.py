"""What an export leaves behind is named; ours leave nothing."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from pytest_exportcheck.checks.case_leaks import LeftBehindWarning
from pytest_exportcheck.checks.leaks import difference, snapshot
from pytest_exportcheck.patches.registry import load_patch_mode
from pytest_exportcheck.patches.scoped import entered, taken_back

from .helpers import make_run, verdict


def _texts(before: Any) -> list[str]:
    return [str(leak) for leak in difference(before)]


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 2))


def test_nothing_is_nothing(model: torch.nn.Module) -> None:
    before = snapshot(model)
    model(torch.ones(1, 2))
    assert difference(before) == []


def test_a_function_of_a_module_and_a_method(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    before = snapshot()
    monkeypatch.setattr(torch.nn.functional, "gelu", lambda x: x)
    monkeypatch.setattr(DynamicLayer, "update", lambda self, k, v: (k, v))
    # Inherited before, its own now: what restoring with setattr does.
    monkeypatch.setattr(DynamicSlidingWindowLayer, "reorder_cache", DynamicSlidingWindowLayer.reorder_cache)
    texts = _texts(before)
    inert = [leak.place for leak in difference(before) if leak.inert]
    assert inert == ["transformers.cache_utils.DynamicSlidingWindowLayer.reorder_cache"]
    assert any(text.startswith("torch.nn.functional.gelu was changed") for text in texts)
    assert any(text.startswith("transformers.cache_utils.DynamicLayer.update was changed") for text in texts)
    assert any(
        text.startswith("transformers.cache_utils.DynamicSlidingWindowLayer.reorder_cache was added")
        for text in texts
    )


def test_a_module_that_changed_once_is_still_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked at by itself from then on, the others all at once."""
    for _ in range(3):
        before = snapshot()
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "gelu", lambda x: x)
            patch.setattr(torch, "exportcheck_added", len, raising=False)
            places = [leak.place for leak in difference(before)]
            assert difference(snapshot()) == [], "what there is now is what counts for the next case"
        assert places == ["torch.exportcheck_added", "torch.nn.functional.gelu"]
        assert difference(before) == []


def test_attributes_and_buffers_of_the_model(model: torch.nn.Module) -> None:
    before = snapshot(model)
    model.forward = lambda x: x  # type: ignore[method-assign]
    model[0].register_buffer("seen", torch.ones(1))
    model[0].training = False
    assert [f"{leak.place} {leak.change}" for leak in difference(before)] == [
        "vars(0) _buffers['seen'] added",
        "vars(0) training changed",
        "vars(model) forward added",
    ]


def test_a_pytree_node_and_an_attention_function(model: torch.nn.Module) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    class Leaked:
        pass

    before = snapshot()
    _pytree._private_register_pytree_node(Leaked, lambda x: ([], None), lambda leaves, context: Leaked())
    ALL_ATTENTION_FUNCTIONS["leaked"] = len
    try:
        texts = _texts(before)
    finally:
        _pytree._deregister_pytree_node(Leaked)
        del ALL_ATTENTION_FUNCTIONS["leaked"]
    assert any("pytree node" in text and "Leaked was added" in text for text in texts)
    assert any("ALL_ATTENTION_FUNCTIONS['leaked'] was added" in text for text in texts)
    gc.collect()
    assert difference(before) == []


def test_kernels_and_decompositions_of_operators(model: torch.nn.Module) -> None:
    operator = torch.ops.aten.erfinv.default
    key = torch._C.DispatchKey.AutocastCPU
    decompositions = torch._decomp.global_decomposition_table["post_autograd"]
    decomposed = decompositions[operator]
    before = snapshot(model)
    library = torch.library.Library("aten", "IMPL")
    library.impl("erfc", lambda x: x, "AutocastCPU")
    operator.py_impl(key)(lambda x: x)
    decompositions[operator] = lambda x: x
    try:
        assert [f"{leak.place} {leak.change}" for leak in difference(before)] == [
            "decomposition (post_autograd) of aten.erfinv.default changed",
            f"kernel of aten.erfinv.default for {key} added",
            "operator kernel aten/erfc/AutocastCPU added",
        ]
    finally:
        decompositions[operator] = decomposed
        del operator.py_kernels[key]
        operator._dispatch_cache.clear()
        library._destroy()
    assert difference(before) == []


def test_a_class_of_a_module_imported_meanwhile_is_no_leak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs of models of transformers are registered where they are defined."""
    (tmp_path / "registers_on_import.py").write_text(
        "from torch.utils import _pytree\n\n\nclass Output:\n    pass\n\n\n"
        "_pytree._private_register_pytree_node(\n"
        "    Output, lambda x: ([], None), lambda leaves, context: Output()\n)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = snapshot()
    import registers_on_import  # type: ignore[import-not-found]

    try:
        assert difference(before) == []
    finally:
        _pytree._deregister_pytree_node(registers_on_import.Output)


_LLAMA = """
import transformers as T


def build_model():
    torch.manual_seed(0)
    return T.MistralForCausalLM(T.MistralConfig(
        vocab_size=99, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=6,
    )).eval()


def calls():
    return [((), dict(input_ids=torch.randint(5, 90, size))) for size in ((2, 4), (3, 9))]
"""


@pytest.mark.parametrize("mode", ["none", "all", "hf"])
def test_a_case_leaves_nothing(tmp_path: Path, mode: str) -> None:
    run = make_run(tmp_path, _LLAMA)
    run.model("cpu", "float32")
    with load_patch_mode(mode).apply(run.model("cpu", "float32"), "onnx"):  # type: ignore[attr-defined]
        pass  # what is imported and filled lazily is there
    _, _, record = verdict(run, "torch-export", mode)
    assert "left_behind" not in record, record["left_behind"]
    before = snapshot(run.model("cpu", "float32"))
    verdict(run, "torch-export", mode)
    assert _texts(before) == []


_NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return nn.functional.relu(self.linear(x))


def build_model():
    return Net()


def calls():
    return [((torch.randn(n, 3),), {}) for n in (2, 5)]


from contextlib import contextmanager
from torch.utils import _pytree


class Registered:
    pass


def replaced(original):
    return lambda *args, **kwargs: original(*args, **kwargs)


def method():
    from transformers.cache_utils import DynamicLayer
    DynamicLayer.update = replaced(DynamicLayer.update)


def function():
    nn.functional.relu = replaced(nn.functional.relu)


def own_class():
    Net.extra_repr = lambda self: "Net"


def attention():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    ALL_ATTENTION_FUNCTIONS["leaked"] = len


def mask():
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    ALL_MASK_ATTENTION_FUNCTIONS["leaked"] = len


def defaults():
    nn.functional.silu.__defaults__ = (True,)


def code():
    nn.functional.silu.__code__ = nn.functional.mish.__code__


def activation():
    from transformers.activations import ACT2FN
    ACT2FN["gelu"] = nn.Tanh


def flag():
    from transformers.modeling_utils import PreTrainedModel
    PreTrainedModel._supports_sdpa = "leaked"


def listed():
    from transformers.modeling_utils import PreTrainedModel
    PreTrainedModel._skip_keys_device_placement.append("leaked")


def node():
    if Registered not in _pytree.SUPPORTED_NODES:
        _pytree._private_register_pytree_node(Registered, lambda x: ([], None), lambda xs, c: Registered())


LEAK = node


@contextmanager
def mode():
    LEAK()
    yield
"""


@pytest.mark.parametrize(
    ("leak", "place", "after"),
    [
        ("method", "transformers.cache_utils.DynamicLayer.update was changed", "put back"),
        ("function", "torch.nn.functional.relu was changed", "put back"),
        ("own_class", "Net.extra_repr was added", "put back"),
        ("attention", "ALL_ATTENTION_FUNCTIONS['leaked'] was added", "put back"),
        ("mask", "ALL_MASK_ATTENTION_FUNCTIONS['leaked'] was added", "put back"),
        ("defaults", "torch.nn.functional.silu.__defaults__ was changed (tuple to tuple)", "put back"),
        ("code", "torch.nn.functional.silu.__code__ was changed", "put back"),
        ("activation", "transformers.activations.ACT2FN['gelu'] was changed", "put back"),
        ("flag", "PreTrainedModel._supports_sdpa was changed (False to 'leaked')", "put back"),
        ("listed", "PreTrainedModel._skip_keys_device_placement was changed (list to list)", "put back"),
        ("node", "Registered was added", "still there"),
    ],
)
def test_what_a_mode_leaves_behind_is_named_and_put_back(
    tmp_path: Path, leak: str, place: str, after: str
) -> None:
    import transformers.masking_utils
    import transformers.modeling_utils  # noqa: F401  what a case imports is no leak

    source = _NET.replace("LEAK = node", f"LEAK = {leak}")
    run = make_run(tmp_path, source, 'matrix: {patch_modes: ["net.py:mode"]}')
    before = snapshot()
    try:
        stage, error, record = verdict(run, "torch-export", "net.py:mode")
        # The first export of a process sets up the compiler.
        left = [text for text in _texts(before) if not text.startswith("torch.compiler")]
    finally:
        for cls in [cls for cls in _pytree.SUPPORTED_NODES if cls.__name__ == "Registered"]:
            _pytree._deregister_pytree_node(cls)
    assert stage == "pass", error
    assert len(record["left_behind"]) == (2 if leak == "node" else 1), record["left_behind"]
    found = record["left_behind"][0]
    assert place in found
    assert found.endswith(after)
    assert any(found in warning for warning in record["warnings"])
    if after == "put back":
        assert left == []
        _, _, record = verdict(run, "torch-export")
        assert "left_behind" not in record


def test_a_hook_that_a_case_leaves_on_the_model_is_named(tmp_path: Path) -> None:
    source = _NET.replace(
        "LEAK()", "MADE[0].linear.register_forward_hook(lambda module, args, output: output)"
    ).replace("    return Net()", "    MADE.append(Net())\n    return MADE[-1]")
    run = make_run(tmp_path, source + "\n\nMADE = []\n", 'matrix: {patch_modes: ["net.py:mode"]}')
    with pytest.warns(LeftBehindWarning, match="_forward_hooks"):
        _, _, record = verdict(run, "torch-export", "net.py:mode")
    assert any("vars(linear) _forward_hooks" in text and "put back" in text for text in record["left_behind"])


_BRANCHING = """
from contextlib import contextmanager


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.calls = 1.0, 0

    def forward(self, x):
        return x * self.scale if self.scale == 1.0 else (x + x) * (self.scale / 2)


def build_model():
    return Net()


def calls():
    return [((torch.randn(n, 3),), {}) for n in (2, 5)]


@contextmanager
def forgets(model):
    model.scale = SCALE
    yield


@contextmanager
def restores(model):
    before, model.scale = model.scale, SCALE
    try:
        yield
    finally:
        model.scale = before
"""


@pytest.mark.parametrize(("scale", "stage"), [("1.5", "patch"), ("1", "pass")])
def test_an_attribute_that_a_mode_sets_and_forgets_changes_no_later_verdict(
    tmp_path: Path, scale: str, stage: str
) -> None:
    """The next case was judged on the changed model, and its exporter was blamed."""
    source = _BRANCHING + f"\n\nSCALE = {scale}\n"
    run = make_run(tmp_path, source, 'matrix: {patch_modes: ["net.py:forgets", "net.py:restores", none]}')
    with pytest.warns(LeftBehindWarning, match=r"vars\(model\) scale was changed .* by the patch .*forgets"):
        found, error, record = verdict(run, "torch-export", "net.py:forgets")
    assert found == stage, error
    assert any("scale was changed" in text and "put back" in text for text in record["left_behind"])
    found, _, record = verdict(run, "torch-export", "net.py:restores")
    assert found == stage
    assert "left_behind" not in record
    found, error, record = verdict(run, "torch-export")
    assert found == "pass", error
    assert "left_behind" not in record
    assert run.model("cpu", "float32").scale == 1.0


_FORGETFUL = """
from contextlib import contextmanager
from types import SimpleNamespace
import torch
from torch import nn


class Net(nn.Module):
    kind = "plain"

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(kind="plain")
        self.table = {"kind": "plain"}
        self.part = nn.Identity()

    def forward(self, x):
        return self.part(x) * 2


class Same(nn.Module):
    def forward(self, x):
        return x


def build_model():
    return Net()


def calls():
    return [((torch.ones(2, 3),), {}), ((torch.ones(4, 5),), {})]


def config(model):
    model.config.kind = "other"


def table(model):
    model.table["kind"] = "other"


def constant(model):
    Net.kind = "other"


def part(model):
    model.part = Same()


def hook(model):
    nn.modules.module.register_module_forward_hook(lambda module, args, output: None)


@contextmanager
def mode(model):
    LEAK(model)
    yield
"""


@pytest.mark.parametrize(
    ("leak", "place"),
    [
        ("config", "vars(model) config.kind was changed ('plain' to 'other')"),
        ("table", "vars(model) table.kind was changed ('plain' to 'other')"),
        ("constant", "Net.kind was changed ('plain' to 'other')"),
        ("part", "vars(model) _modules.part was changed (Identity to Same)"),
        ("hook", "torch.nn.modules.module._global_forward_hooks["),
    ],
)
def test_what_a_mode_forgets_that_shows_in_no_number_is_put_back(
    tmp_path: Path, leak: str, place: str
) -> None:
    """The next case passed, or failed, with the code that the mode had chosen."""
    run = make_run(
        tmp_path,
        _FORGETFUL.replace("LEAK(model)", f"{leak}(model)"),
        'matrix: {patch_modes: ["net.py:mode"]}',
    )
    stage, error, record = verdict(run, "torch-export", "net.py:mode")
    assert stage == "pass", error
    assert record["left_behind"], record
    assert all(place in text and text.endswith("put back") for text in record["left_behind"])
    model = run.model("cpu", "float32")
    assert [model.kind, model.config.kind, model.table, type(model.part)] == [
        "plain",
        "plain",
        {"kind": "plain"},
        torch.nn.Identity,
    ]
    assert not torch.nn.modules.module._global_forward_hooks


def test_what_dynamo_compiled_is_its_own(tmp_path: Path) -> None:
    """Strict captures put functions among the names of the model's module, and a reset takes them away."""
    run = make_run(tmp_path, _NET)
    for reset in (False, True):
        if reset:
            torch._dynamo.reset()
        stage, error, record = verdict(run, "torch-export-strict")
        assert stage == "pass", error
        assert "left_behind" not in record, record["left_behind"]


class _Odd:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


def test_what_dynamo_marks_once_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thing that it compiles marks some twenty functions of torch; it would not do so again."""
    monkeypatch.setattr(torch.jit, "trace", torch.jit.trace)
    leak = "setattr(torch.jit, 'trace', torch._dynamo.disable(torch.jit.trace, reason='no'))"
    run = make_run(tmp_path, _NET.replace("LEAK()", leak), 'matrix: {patch_modes: ["net.py:mode"]}')
    _, _, record = verdict(run, "torch-export", "net.py:mode")
    assert "left_behind" not in record, record["left_behind"]
    assert hasattr(torch.jit.trace, "_torchdynamo_disable_msg")


def test_what_dynamo_puts_around_the_making_of_modules_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in a process: taken back, it would never come again, and a case would be blamed for it."""
    from torch._dynamo import mutation_guard

    for name in ("__init__", "__setstate__"):
        monkeypatch.setattr(torch.nn.Module, name, getattr(torch.nn.Module, name))
    monkeypatch.setattr(torch.nn.Module, "___needs_generation_tag_patch", True, raising=False)
    before = snapshot()
    mutation_guard.install_generation_tagging_init()
    assert torch.nn.Module.__init__.__module__ == mutation_guard.__name__
    assert _texts(before) == []


def test_attributes_that_a_scope_changes_adds_and_removes_are_put_back(model: torch.nn.Module) -> None:
    odd = _Odd()
    model.kept, model.gone = odd, 1  # type: ignore[assignment]

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        model.kept, model.new = _Odd(), 2  # type: ignore[assignment]
        del model.gone
        yield

    taken_back()
    with entered(scope(), model, "mine"):
        pass
    assert model.kept is odd
    assert model.gone == 1
    assert not hasattr(model, "new")
    assert sorted(taken_back()) == [
        "vars(model) gone was removed by the patch mine: put back",
        "vars(model) kept was changed (_Odd to _Odd) by the patch mine: put back",
        "vars(model) new was added by the patch mine: put back",
    ]


def test_keyword_defaults_and_containers_that_are_changed_in_place_are_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = ModuleType("exportcheck_one")
    source = (
        "def f(*, a=1):\n    return a\n\nclass A:\n    names = ['a']\n    sizes = {'a': 1}\n    seen = {1}\n"
        "    flag = True\n    @property\n    def p(self):\n        return 1\n"
    )
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, "exportcheck_one", module)
    before = snapshot(modules=["exportcheck_one"], packages=())
    module.f.__kwdefaults__["a"] = 2
    module.A.names[0] = "b"
    module.A.sizes["b"] = 2
    module.A.seen.clear()
    module.A.flag = False
    module.A.p.fget.__code__ = module.f.__code__.replace(co_kwonlyargcount=0, co_argcount=1)
    leaks = difference(before)
    assert [leak.place.removeprefix("exportcheck_one.") for leak in leaks] == [
        *("A.flag", "A.names", "A.p.__code__", "A.seen", "A.sizes", "f.__kwdefaults__")
    ]
    for leak in leaks:
        leak.undo()  # type: ignore[misc]
    assert difference(before) == []
    assert (module.A.names, module.A.sizes, module.A.seen, module.f()) == (["a"], {"a": 1}, {1}, 1)
    assert module.A().p == 1


def test_a_table_with_methods_of_its_own_is_read_as_it_is() -> None:
    """``ACT2FN["gelu"]`` is a new module each time: what is in the table is compared."""
    from transformers.activations import ACT2FN

    before = snapshot()
    ACT2FN["leaked"] = (torch.nn.Tanh, {})
    (leak,) = [leak for leak in difference(before) if "ACT2FN" in leak.place]
    assert str(leak) == "transformers.activations.ACT2FN['leaked'] was added (tuple)"
    leak.undo()  # type: ignore[misc]
    assert "leaked" not in ACT2FN
    assert difference(before) == []


def test_a_table_of_several_modules_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"fast": len}
    for name in ("exportcheck_one", "exportcheck_two"):
        module = ModuleType(name)
        module.TABLE = table  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    before = snapshot(modules=["exportcheck_one", "exportcheck_two"], packages=())
    assert difference(before) == []
    table["fast"] = repr
    (leak,) = difference(before)
    assert leak.place == "exportcheck_one.TABLE['fast']"
    leak.undo()  # type: ignore[misc]
    assert difference(before) == []


def test_an_entry_that_moves_to_the_next_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a module holds is compared at once: where it is must count too."""
    module: Any = ModuleType("exportcheck_one")
    exec("class A:\n    pass\n\nclass B:\n    pass\n\nA.last = lambda self: 1\n", vars(module))
    monkeypatch.setitem(sys.modules, "exportcheck_one", module)
    before = snapshot(modules=["exportcheck_one"], packages=())
    function = module.A.last
    del module.A.last
    module.B.last = function
    places = {leak.place: leak.change for leak in difference(before)}
    assert places == {"exportcheck_one.A.last": "removed", "exportcheck_one.B.last": "added"}
