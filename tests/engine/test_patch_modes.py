"""Patch modes: users' own, parts of them, what they must not change; and patches without the plugin."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import pytest_exportcheck
from pytest_exportcheck import (
    StaticAxisError,
    register_cache_serialization,
    register_class_serialization,
    torch_export_patches,
    torch_export_rewrite,
    unregister_cache_serialization,
    unregister_class_serialization,
)
from pytest_exportcheck.errors import PatchError
from pytest_exportcheck.patches.modes import PatchList
from pytest_exportcheck.patches.patch import Patch
from pytest_exportcheck.patches.registry import load_patch_mode
from pytest_exportcheck.patches.user import as_mode, as_patches
from pytest_exportcheck.pytrees.registration import registration_owner
from pytest_exportcheck.registry import PATCH_MODES
from pytest_exportcheck.spec import load_spec

from .helpers import make_run, verdict


class Layer(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


class PatchedLayer:
    """Computes the sine another way."""

    _PATCHED_CLASS_ = Layer
    _PATCHES_ = ("forward", None)
    _PATCHED_PR_ = "https://example.org/1"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cos(x - torch.pi / 2)


PATH = f"{Layer.__module__}.Layer.forward"


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Sets something."""
    Layer.setting = 1  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del Layer.setting  # type: ignore[attr-defined]


@contextlib.contextmanager
def _of_the_model(model: torch.nn.Module) -> Iterator[None]:
    model.setting = 1  # type: ignore[assignment]
    yield
    del model.setting


def _module() -> ModuleType:
    module = ModuleType("my_patches")
    module.PatchedLayer = PatchedLayer  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(
    "value",
    [
        {PATH: PatchedLayer.forward},
        PatchedLayer,
        [PatchedLayer],
        Patch(PATH, PatchedLayer.forward),
        _module(),
    ],
    ids=["dict", "class", "list", "patch", "module"],
)
def test_what_a_user_may_write_as_a_mode(value: Any) -> None:
    mode = as_mode("mine", value)
    assert mode.name == "mine"
    layer = Layer()
    with mode.apply(layer, "torch") as activity:
        assert layer(torch.zeros(1)).item() == pytest.approx(0.0, abs=1e-6)
    assert activity.called() == {PATH: 1}
    assert layer(torch.zeros(1)).item() == 0.0


def test_a_patched_class_tells_its_reason() -> None:
    (patch,) = as_patches(PatchedLayer)
    assert (patch.target, patch.why, patch.link) == (
        PATH, "Computes the sine another way.", "https://example.org/1",
    )  # fmt: skip


@pytest.mark.parametrize("scope", [_settings, _settings(), _of_the_model])
def test_a_context_manager_is_a_mode(scope: Any) -> None:
    layer = Layer()
    mode = as_mode("mine", scope)
    for _ in range(2):  # a mode is entered for the comparison, and for each export
        with mode.apply(layer, "torch"):
            assert layer.setting == 1
        assert not hasattr(layer, "setting")


class Inner(Layer):
    pass


class PatchedInner:
    _PATCHED_CLASS_ = Inner
    _PATCHES_ = ("forward",)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert __class__ is Inner  # type: ignore[name-defined]
        return super().forward(x) * 10  # type: ignore[misc]


def test_super_in_a_patched_class_is_that_of_the_class_it_patches() -> None:
    x = torch.ones(1)
    with as_mode("mine", PatchedInner).apply(Inner(), "torch"):
        assert torch.equal(Inner()(x), Layer()(x) * 10)
    assert torch.equal(Inner()(x), Layer()(x))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, r"mine: a int is no patches; expected a dict of dotted paths"),
        ({"forward": len}, r"mine: 'forward' is no dotted path"),
        ({PATH: 3}, r"is replaced by a int, no function"),
        (
            type("P", (), {"_PATCHED_CLASS_": Layer, "_PATCHES_": ["gone"]}),
            r"_PATCHES_ names 'gone', which P lacks",
        ),
        (type("P", (), {"_PATCHED_CLASS_": Layer}), r"P needs _PATCHES_, a list of names"),
        (type("P", (), {"_PATCHED_CLASS_": Layer, "_PATCHES_": "forward"}), r"P needs _PATCHES_"),
        (
            type("P", (), {"_PATCHED_CLASS_": "a.B", "_PATCHES_": []}),
            r"P\._PATCHED_CLASS_ is 'a\.B', neither a class nor None",
        ),
        (ModuleType("empty"), r"module empty has no class with _PATCHED_CLASS_"),
    ],
)
def test_what_is_no_mode_is_refused(value: Any, message: str) -> None:
    with pytest.raises(PatchError, match=message):
        as_mode("mine", value)


def test_a_part_of_a_mode() -> None:
    mode = PatchList(
        "two", [lambda model, target: [Patch("torch.sin", torch.cos), Patch("torch.cos", torch.sin)]]
    )
    with mode.subset(["torch.sin"]).apply(None, "torch"):
        assert torch.sin(torch.zeros(1)).item() == 1.0
        assert torch.cos(torch.zeros(1)).item() == 1.0
    with pytest.raises(PatchError, match=r"has no patch 'torch.sim' .did you mean 'torch.sin'"):
        mode.subset(["torch.sim"]).patches(None, "torch")


def test_all_holds_the_others() -> None:
    def names(mode: str) -> set[str]:
        return {patch.name for patch in load_patch_mode(mode).patches(None, "onnx")}  # type: ignore[attr-defined]

    assert names("all") >= names("torch") | names("transformers")
    assert names("torch")
    assert names("transformers")
    assert not names("torch") & names("transformers")


_NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def step(self, x):
        return x.sin()

    def forward(self, x):
        return self.step(self.linear(x))


def build_model():
    torch.manual_seed(0)
    return Net()


def calls():
    return [((torch.rand(2, 4),), {}), ((torch.rand(3, 4),), {})]


def _net():
    import sys
    return sys.modules[__name__].Net


def same(self, x):
    return torch.cos(x - torch.pi / 2)


def other(self, x):
    return x.sin() + 1e-2


def longer(self, x):
    return torch.cat([x, x])


class Same:
    _PATCHED_CLASS_ = Net
    _PATCHES_ = ["step"]
    step = same


class Other:
    _PATCHED_CLASS_ = Net
    _PATCHES_ = ["step"]
    step = other


class Longer:
    _PATCHED_CLASS_ = Net
    _PATCHES_ = ["step"]
    step = longer


harmless_and_harmful = [{"torch.nn.functional.linear": lambda x, w, b=None: x @ w.T + b}, Other]
"""


def test_a_users_mode_is_named_in_a_spec_by_its_file(tmp_path: Path) -> None:
    run = make_run(
        tmp_path, _NET, extra='matrix: {exporters: [torch-export], patch_modes: [none, "net.py:Same"]}\n'
    )
    known = {"exporters": ["torch-export"], "patch_modes": ["none"]}
    load_spec(tmp_path / "net.yaml", tmp_path, known=known)
    stage, error, record = verdict(run, "torch-export", "net.py:Same")
    assert (stage, error) == ("pass", None)
    (name,) = record["patches"]["called"]
    assert name == "net.Net.step"
    assert record["patches"] == {"active": 1, "called": {name: 1}, "nodes": {name: 2}}


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("net.py:Gone", r"net\.py:Gone: net\.py has no 'Gone'"),
        ("nothere.py:Same", r"there is no file nothere\.py next to the spec"),
        ("net.py:calls", r"which is no context manager"),
    ],
)
def test_a_users_mode_that_cannot_be_loaded(tmp_path: Path, mode: str, message: str) -> None:
    stage, error, _ = verdict(make_run(tmp_path, _NET), "torch-export", mode)
    assert stage == "patch"
    assert error is not None
    with pytest.raises(PatchError, match=message):
        raise error


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("net.py:Other", r"Net\.step changes what the model computes on call 0: 1 of 1 output differ"),
        ("net.py:Longer", r"Net\.step changes what the model computes on call 0: 1 of 1 output differ"),
        (
            "net.py:harmless_and_harmful",
            r"^stage patch: patch \S+\.Net\.step changes what the model computes",
        ),
    ],
)
def test_a_patch_that_changes_a_result_fails_by_name(tmp_path: Path, mode: str, message: str) -> None:
    stage, error, _ = verdict(make_run(tmp_path, _NET), "torch-export", mode)
    assert stage == "patch"
    assert error is not None
    with pytest.raises(PatchError, match=message):
        raise error
    assert [name.rpartition(".")[2] for name in error.facts["patches"]["changes"]] == ["step"]  # type: ignore[index]


def test_two_patches_that_change_a_result_are_both_named(tmp_path: Path) -> None:
    source = (
        _NET
        + """

def two():
    raise AssertionError


both = [Other, {"torch.nn.functional.linear": lambda x, w, b=None: x @ w.T + b + 1}]
"""
    )
    _, error, _ = verdict(make_run(tmp_path, source), "torch-export", "net.py:both")
    assert error is not None
    assert error.message.startswith("patch mode net.py:both changes what the model computes")
    assert len(error.facts["patches"]["changes"]) == 2  # type: ignore[index]


def test_a_patch_under_which_eager_raises_fails_by_name(tmp_path: Path) -> None:
    source = (
        _NET
        + """

def refuses(self, x):
    raise RuntimeError("not while eager")


class Refuses:
    _PATCHED_CLASS_ = Net
    _PATCHES_ = ["step"]
    step = refuses
"""
    )
    stage, error, _ = verdict(make_run(tmp_path, source), "torch-export", "net.py:Refuses")
    assert stage == "patch"
    assert error is not None
    assert (
        "Net.step changes what the model computes: eager raises RuntimeError: not while eager"
        in error.message
    )


_ITSELF = (
    _NET
    + """

from pytest_exportcheck.patches.modes import PatchList
from pytest_exportcheck.patches.user import as_patches


def under_itself(*values):
    patches = as_patches(values)
    return PatchList("under-itself", [lambda model, target: patches], observed_under_itself=True)


good = under_itself(Same)
bad = under_itself(Same, {"torch.nn.functional.linear": lambda x, w, b=None: x @ w.T})
"""
)


def test_a_mode_observed_under_itself_is_compared_with_plain_calls(tmp_path: Path) -> None:
    run = make_run(tmp_path, _ITSELF)
    stage, error, record = verdict(run, "torch-export", "net.py:good")
    assert (stage, error) == ("pass", None)
    assert record["observed_under"] == "net.py:good"
    stage, error, _ = verdict(run, "torch-export", "net.py:bad")
    assert stage == "patch"
    assert error is not None
    assert error.message.startswith(
        "patch torch.nn.functional.linear changes what the model computes on call 0"
    )


def test_the_record_of_a_failed_export_has_its_patches(tmp_path: Path) -> None:
    source = _NET.replace("return self.step(self.linear(x))", "return self.step(x) if x.sum() > 0 else x")
    stage, _, record = verdict(make_run(tmp_path, source), "torch-export", "net.py:Same")
    assert stage == "export"
    assert record["patches"]["active"] == 1
    assert "nodes" not in record["patches"]


@pytest.mark.parametrize("value", [{PATH: PatchedLayer.forward}, PatchedLayer, _settings])
def test_what_a_hook_or_an_entry_point_may_hold(value: Any) -> None:
    PATCH_MODES.register("held", value)
    try:
        mode = load_patch_mode("held")
        assert mode.name == "held"  # type: ignore[attr-defined]
        layer = Layer()
        with mode.apply(layer, "torch") as activity:  # type: ignore[attr-defined]
            layer(torch.zeros(1))
            assert len(activity.patches) == 1
    finally:
        PATCH_MODES.unregister("held")


class _Branches(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 4:
            return x
        return x + 1


@pytest.mark.parametrize("strict", [False, True])
def test_stop_if_static_names_the_line(strict: bool) -> None:
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    with torch_export_patches(stop_if_static=1) as prepare, pytest.raises(StaticAxisError) as raised:
        torch.export.export(_Branches(), prepare((torch.ones(4, 3),)), dynamic_shapes=shapes, strict=strict)
    error = raised.value
    assert error.value == 4
    assert error.symbol in str(error)
    file, _, line = error.place.rpartition(":")
    assert Path(file) == Path(__file__)
    assert Path(__file__).read_text().splitlines()[int(line) - 1].strip() == "if x.shape[0] == 4:"


def test_stop_if_static_lets_others_pass() -> None:
    with torch_export_patches(stop_if_static=1):
        torch.export.export(Layer(), (torch.ones(4, 3),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))


def test_torch_export_patches_applies_what_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    import transformers.cache_utils as caches

    sdpa, update = torch.nn.functional.scaled_dot_product_attention, caches.DynamicSlidingWindowLayer.update
    with torch_export_patches(patch_torch=True, patch_transformers=True, verbose=1):
        assert torch.nn.functional.scaled_dot_product_attention is not sdpa
        assert caches.DynamicSlidingWindowLayer.update is not update
        assert registration_owner(caches.DynamicCache) == "pytest_exportcheck"
    assert "[torch_export_patches] torch.repeat_interleave: " in capsys.readouterr().out
    assert torch.nn.functional.scaled_dot_product_attention is sdpa
    assert caches.DynamicSlidingWindowLayer.update is update
    assert registration_owner(caches.DynamicCache) is None
    with torch_export_patches(
        patch_torch=True, patch_transformers=True, custom_patches=PatchedLayer, patch=False
    ):
        assert torch.nn.functional.scaled_dot_product_attention is sdpa
        assert registration_owner(caches.DynamicCache) == "pytest_exportcheck"
        assert Layer()(torch.ones(1)).item() == torch.ones(1).sin().item()
    with torch_export_patches(patch_torch=False, custom_patches={PATH: PatchedLayer.forward}):
        assert torch.nn.functional.scaled_dot_product_attention is sdpa
        assert Layer.forward is not PatchedLayer.forward


class _NeedsBoth(torch.nn.Module):
    """Does not export: first for what a patch cures, then for a branch."""

    def layer(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(torch.tensor(x.tolist()).sum() * 0 + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        if x.sum() > 0:
            return x + 1
        return x - 1


def test_what_is_rewritten_is_found_with_the_patches_in_place() -> None:
    x = torch.ones(3)
    path = f"{__name__}._NeedsBoth.layer"
    with torch_export_patches(
        rewrite=_NeedsBoth(),
        custom_patches={path: lambda self, x: x * 1.0},
        calls=[((x,), {}), ((-x,), {})],
        stop_if_static=1,
    ):
        program = torch.export.export(_NeedsBoth(), (x,))
    for sign in (1, -1):
        assert torch.equal(program.module()(x * sign), _NeedsBoth()(x * sign))


def test_rewriting_needs_calls() -> None:
    for manager in (torch_export_patches(rewrite=[Layer]), torch_export_rewrite([Layer])):
        with pytest.raises(PatchError, match="give `calls="), manager:
            pass


def test_serialization_under_its_older_names() -> None:
    from transformers.cache_utils import DynamicCache, StaticCache

    undo = register_cache_serialization()
    assert registration_owner(DynamicCache) == registration_owner(StaticCache) == "pytest_exportcheck"
    again = register_cache_serialization()
    unregister_cache_serialization(undo)
    unregister_cache_serialization(undo)  # the second time undoes nothing
    assert registration_owner(DynamicCache) == "pytest_exportcheck"
    unregister_cache_serialization(again)
    assert registration_owner(DynamicCache) is None

    class Pair:
        pass

    functions: Any = (lambda pair: ([], None), lambda leaves, context: Pair(), lambda pair: ([], None))
    assert register_class_serialization(Pair, *functions) is True
    assert register_class_serialization(Pair, *functions) is False
    unregister_class_serialization(Pair)
    assert registration_owner(Pair) is None


def test_public_names() -> None:
    for name in ("torch_export_patches", "torch_export_rewrite", "Patch", "StaticAxisError"):
        assert name in pytest_exportcheck.__all__
        assert getattr(pytest_exportcheck, name)
