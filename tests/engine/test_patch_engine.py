"""Patches in place and taken back: all or none, nested, inherited, by name, in one thread."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pytest_exportcheck.errors import PatchError
from pytest_exportcheck.patches.edits import edited
from pytest_exportcheck.patches.engine import _Copies, applied
from pytest_exportcheck.patches.evidence import evidence
from pytest_exportcheck.patches.patch import Patch

_SOURCE = """
class Base:
    def method(self, x):
        return x + 1

    @staticmethod
    def static(x):
        return x + 1

    @classmethod
    def of_class(cls, x):
        return cls.__name__, x + 1

    @property
    def value(self):
        return 1


class Child(Base):
    pass


def function(x):
    return x + 1
"""


@pytest.fixture
def library() -> Iterator[Any]:
    """A module ``patched_library``, and one that imported its function by name and has a table of it."""
    module = types.ModuleType("patched_library")
    exec(compile(_SOURCE, "patched_library.py", "exec"), module.__dict__)
    user = types.ModuleType("user_of_library")
    user.function = module.function  # type: ignore[attr-defined]
    user.TABLE = {"own": module.function, "other": len}  # type: ignore[attr-defined]
    sys.modules.update(patched_library=module, user_of_library=user)
    module.user = user  # type: ignore[attr-defined]
    yield module
    del sys.modules["patched_library"], sys.modules["user_of_library"]


def _minus(x: Any) -> Any:
    return x - 1


def _method(self: Any, x: Any) -> Any:
    return x - 1


def test_a_function_is_replaced_where_it_was_imported_by_name_and_in_tables(library: Any) -> None:
    original = library.function
    with applied([Patch("patched_library.function", _minus)]) as activity:
        assert library.function(1) == library.user.function(1) == library.user.TABLE["own"](1) == 0
        assert library.user.TABLE["other"] is len
    assert library.function is library.user.function is library.user.TABLE["own"] is original
    assert activity.called() == {"patched_library.function": 3}


def test_one_look_at_all_modules_serves_all_patches(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    library.other = library.user.other = lambda x: x + 5
    looks: list[int] = []
    look = _Copies._look
    monkeypatch.setattr(_Copies, "_look", lambda self, wanted: (looks.append(1), look(self, wanted)))
    with applied([Patch("patched_library.function", _minus), Patch("patched_library.other", _minus)]):
        assert library.user.function(1) == library.user.other(1) == 0
    assert len(looks) == 1
    assert (library.user.function(1), library.user.other(1)) == (2, 6)


def test_what_an_earlier_patch_brought_or_took_is_seen(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    late = types.ModuleType("late_user_of_library")
    library.other = lambda x: x + 5

    def importing(original: Callable[..., Any]) -> Callable[..., Any]:
        # The import of a module that has the function of the next patch.
        late.other = library.other  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "late_user_of_library", late)
        return _minus

    def twice(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: 2 * original(x)

    first = Patch("patched_library.function", importing, wraps=True)
    named = Patch("user_of_library.function", twice, wraps=True, everywhere=False, name="named")
    patches = [first, Patch("patched_library.other", _minus), named]
    before = library.user.TABLE["own"]
    with applied(patches):
        assert late.other(1) == 0  # type: ignore[attr-defined]
        assert library.user.function(3) == 4, "twice what the first patch put there"
        assert library.function(3) == library.user.TABLE["own"](3) == 2
    assert late.other(1) == 6  # type: ignore[attr-defined]
    assert library.user.function is library.function is library.user.TABLE["own"] is before


def test_the_copy_that_an_earlier_patch_took_is_left_to_it(library: Any) -> None:
    named = Patch("user_of_library.function", lambda x: 10, everywhere=False, name="named")
    with applied([named, Patch("patched_library.function", _minus)]):
        assert library.user.function(1) == 10
        assert library.function(1) == library.user.TABLE["own"](1) == 0
    assert library.user.function(1) == library.function(1) == 2


def test_only_where_it_is_named_if_asked_so(library: Any) -> None:
    with applied([Patch("patched_library.function", _minus, everywhere=False)]):
        assert library.function(1) == 0
        assert library.user.function(1) == 2


def test_an_inherited_method_is_inherited_again(library: Any) -> None:
    with applied([Patch("patched_library.Child.method", _method)]):
        assert library.Child().method(1) == 0
        assert library.Base().method(1) == 2
    assert "method" not in vars(library.Child)
    assert library.Child().method(1) == 2


def test_a_base_and_its_child_are_both_restored(library: Any) -> None:
    """The child's original must not be the base's replacement."""
    base = vars(library.Base)["method"]
    patches = [Patch("patched_library.Base.method", _method), Patch("patched_library.Child.method", _method)]
    with applied(patches):
        assert library.Child().method(1) == 0
    assert vars(library.Base)["method"] is base
    assert "method" not in vars(library.Child)


@pytest.mark.parametrize("kind", ["static", "of_class", "value"])
def test_the_kind_of_attribute_is_kept(library: Any, kind: str) -> None:
    before = vars(library.Base)[kind]
    replacement: dict[str, Callable[..., Any]] = {
        "static": lambda x: x - 1,
        "of_class": lambda cls, x: (cls.__name__, x - 1),
        "value": lambda self: 7,
    }
    with applied([Patch(f"patched_library.Base.{kind}", replacement[kind])]):
        assert type(vars(library.Base)[kind]) is type(before)
        child = library.Child()
        got = child.value if kind == "value" else getattr(child, kind)(1)
        assert got == {"static": 0, "of_class": ("Child", 0), "value": 7}[kind]
    assert vars(library.Base)[kind] is before


def test_the_same_patch_twice_is_applied_once(library: Any) -> None:
    def doubled(original: Any) -> Any:
        return lambda x: 2 * original(x)

    patch = Patch("patched_library.function", doubled, wraps=True)
    original = library.function
    with applied([patch]) as outer:
        with applied([Patch("patched_library.function", doubled, wraps=True)]) as inner:
            assert library.function(1) == 4
        assert inner.called() == {patch.name: 1}
        assert library.function(1) == 4  # still in place after the inner block
    assert outer.called() == {patch.name: 2}
    assert library.function is original


class _Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, x: Any) -> Any:
        return x - 1


def test_a_replacement_need_not_be_hashable(library: Any) -> None:
    with applied([Patch("patched_library.function", _Unhashable())]):
        assert library.function(1) == 0
    assert library.function(1) == 2


def test_a_target_that_cannot_be_replaced(library: Any) -> None:
    patches = [Patch("patched_library.function", _minus), Patch("builtins.list.append", _minus)]
    with pytest.raises(PatchError, match=r"builtins\.list\.append: it cannot be replaced"), applied(patches):
        pass
    assert library.function(1) == 2


def test_two_patches_of_one_target_are_undone_in_reverse(library: Any) -> None:
    original = library.function
    with applied([Patch("patched_library.function", _minus)]):
        second = Patch("patched_library.function", lambda f: lambda x: 10 * f(x), wraps=True)
        with applied([second]):
            assert library.function(3) == 20
        assert library.function(3) == 2
    assert library.function is original


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_restored_after_an_error(library: Any, error: type[BaseException]) -> None:
    original = library.function
    with pytest.raises(error), applied([Patch("patched_library.function", _minus)]):
        raise error
    assert library.function is original


def test_restored_after_an_error_on_entry(library: Any) -> None:
    original = library.function

    def fails(function: Any) -> Any:
        raise ValueError("no such thing")

    patches = [
        Patch("patched_library.function", _minus),
        Patch("patched_library.Base.method", fails, wraps=True),
    ]
    message = r"patched_library\.Base\.method: its factory raises ValueError: no such thing"
    with pytest.raises(PatchError, match=message), applied(patches):
        pass
    assert library.function is original
    with applied([patches[0]]):  # and not taken for being in place
        assert library.function(1) == 0


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("patched_library.gone", r"patched_library has no 'gone': it was removed"),
        ("patched_library.functoin", r"patched_library has no 'functoin' \(did you mean 'function'\?\)"),
        ("patched_library.Bsae.method", r"no patched_library\.Bsae in .* \(did you mean 'Base'\?\)"),
        ("torch.nn.functionl.gelu", r"no torch\.nn\.functionl in torch .* \(did you mean 'functional'\?\)"),
        ("transfomers.f", r"there is no module transfomers \(did you mean 'transformers'\?\)"),
        ("patched_library.Gone.method", r"there is no patched_library\.Gone in patched_library"),
        ("no_such_package_at_all.f", r"there is no module no_such_package_at_all"),
    ],
)
def test_a_missing_target_is_an_error_or_rests(library: Any, target: str, message: str) -> None:
    with pytest.raises(PatchError, match=message), applied([Patch(target, _minus)]):
        pass
    with applied([Patch(target, _minus, optional=True)]) as activity:
        assert list(activity.resting) == [target]
        assert not activity.patches


def test_a_patch_for_other_versions_rests(library: Any) -> None:
    patch = Patch("patched_library.function", _minus, versions=(("torch", "<2.0"),))
    with applied([patch]) as activity:
        assert library.function(1) == 2
    assert activity.resting["patched_library.function"].startswith("for torch <2.0, installed 2.")


def test_a_scope_is_entered_with_the_model_and_left(library: Any) -> None:
    seen: list[Any] = []

    @contextlib.contextmanager
    def scope(model: Any) -> Iterator[None]:
        seen.append(model)
        yield
        seen.append("left")

    model = torch.nn.Linear(1, 1)
    with applied([Patch("a setting", scope=scope)], model):
        assert seen == [model]
    assert seen == [model, "left"]


def test_another_thread_waits_or_is_refused(library: Any) -> None:
    refused: list[str] = []
    went: list[int] = []
    entered = threading.Event()

    def export(patience: float) -> None:
        try:
            with applied([Patch("patched_library.function", _minus)], patience=patience):
                went.append(library.function(1))
        except PatchError as error:
            refused.append(error.message)
        entered.set()

    with applied([Patch("patched_library.Base.method", _method)]):
        impatient = threading.Thread(target=export, args=(0.01,))
        impatient.start()
        impatient.join()
        assert "MainThread has had patches in place for 0.01 s" in refused[0]
        entered.clear()
        patient = threading.Thread(target=export, args=(30.0,))
        patient.start()
        assert not entered.wait(0.05)
        assert library.function(1) == 2
    patient.join()
    assert went == [0]


class _Calls(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import patched_library  # type: ignore[import-not-found]

        return patched_library.function(x) * 3  # type: ignore[no-any-return]


def _two_operators(x: Any) -> Any:
    return torch.relu(x.sin())


@pytest.mark.parametrize("strict", [False, True])
def test_calls_and_nodes_are_counted(library: Any, strict: bool) -> None:
    patches = [
        Patch("patched_library.function", _two_operators),
        Patch("patched_library.Base.method", _method),
    ]
    with applied(patches) as activity:
        program = torch.export.export(_Calls(), (torch.ones(2),), strict=strict)
    assert evidence(activity, program) == {
        "active": 2,
        "called": {"patched_library.function": 1},
        "nodes": {"patched_library.function": 2},
    }


def test_the_nodes_of_a_replacement_called_elsewhere_are_not_counted(library: Any) -> None:
    class Both(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return library.function(x) + _two_operators(x)  # type: ignore[no-any-return]

    with applied([Patch("patched_library.function", _two_operators)]) as activity:
        program = torch.export.export(Both(), (torch.ones(2),))
    assert evidence(activity, program)["nodes"] == {"patched_library.function": 2}


def test_nodes_of_patches_that_share_a_line_or_a_function_are_told_apart(library: Any) -> None:
    class Three(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return library.function(library.Base.static(x)) + library.Child().method(x)  # type: ignore[no-any-return]

    one, two = (lambda x: x.sin(), lambda self, x: x.sin().cos())
    patches = [
        Patch("patched_library.function", one),
        Patch("patched_library.Base.static", one),
        Patch("patched_library.Base.method", two),
    ]
    with applied(patches) as activity:
        program = torch.export.export(Three(), (torch.ones(2),))
    assert evidence(activity, program)["nodes"] == {
        "patched_library.function": 1,
        "patched_library.Base.static": 1,
        "patched_library.Base.method": 2,
    }


def _to_edit(x: int) -> int:
    if x > 3:
        return 0
    return x


def test_an_edited_function_differs_where_it_says() -> None:
    function = edited(_to_edit, ("if x > 3:", "if x > limit:"), names={"limit": 10})
    assert [function(5), function(11), _to_edit(5)] == [5, 0, 0]


@pytest.mark.parametrize(
    ("function", "change", "message"),
    [
        (_to_edit, ("if x > 4:", ""), r"the line to change occurs 0 times and not once.*: if x > 4:"),
        (_to_edit, ("x", "y"), r"occurs \d+ times"),
        (len, ("a", "b"), r"is no plain function"),
        (torch.no_grad()(_to_edit), ("x > 3", "x > 4"), r"is no plain function"),
    ],
)
def test_an_edit_that_does_not_fit_is_an_error(function: Any, change: tuple[str, str], message: str) -> None:
    with pytest.raises(PatchError, match=message):
        edited(function, change)
