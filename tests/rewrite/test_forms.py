"""Each form of control flow: what it becomes, proven on both branches, and the program's numbers."""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch.utils import _pytree

from pytest_exportcheck.exporters.tables import shared_tables
from pytest_exportcheck.patches.rewrite import Rewriting, apply
from pytest_exportcheck.patches.rewrite.locate import _functions_at, functions_of, iterates
from pytest_exportcheck.patches.rewrite.values import Place

from .forms import CONVERTED, FORMS, NEGATIVE, POSITIVE
from .helpers import differences, rewriting_of
from .hostile import HOSTILE

pytestmark = pytest.mark.filterwarnings("ignore")


#: Name of a form -> its rewriting, and its programs.
Rewritten = Callable[[str], tuple[Rewriting, list[torch.export.ExportedProgram]]]


@pytest.fixture(scope="module")
def rewritten() -> Rewritten:
    """Each form is rewritten once."""
    return functools.cache(lambda name: rewriting_of(FORMS[name].make().eval()))


@pytest.mark.parametrize("name", FORMS)
def test_a_form_becomes_its_operators(rewritten: Rewritten, name: str) -> None:
    form = FORMS[name]
    rewriting, programs = rewritten(name)
    assert rewriting.refused is None
    assert rewriting.error is None
    assert tuple(target for method in rewriting.methods for target in method.targets) == form.targets
    for method in rewriting.methods:
        assert method.proof.complete
        assert method.proof.runs >= 2
        assert {branch.outcome for branch in method.proof.branches} == {True, False}
        assert method.dump.startswith("--- ")
    assert differences(form.make().eval(), programs[0], [*form.inputs, POSITIVE, NEGATIVE]) == []


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_form_is_right_or_refused(name: str) -> None:
    hostile = HOSTILE[name]
    rewriting, programs = rewriting_of(hostile.make().eval())
    if hostile.refused:
        assert rewriting.refused is not None
        assert re.search(hostile.refused, rewriting.refused.message), rewriting.refused.message
        assert rewriting.refused.place is not None
        assert rewriting.refused.place.file.endswith("hostile.py")
        return
    assert rewriting.refused is None, rewriting.refused
    assert rewriting.error is None
    assert rewriting.methods
    assert differences(hostile.make().eval(), programs[0], [*FORMS["Not"].inputs, POSITIVE, NEGATIVE]) == []


@pytest.mark.parametrize("name", CONVERTED)
def test_a_form_converts(rewritten: Rewritten, name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    _, programs = rewritten(name)
    with shared_tables():
        converted = torch.onnx.export(programs[0], verbose=False)
    assert converted is not None
    converted.save(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (given,) = session.get_inputs()
    for x in (*form.inputs, POSITIVE, NEGATIVE):
        with torch.no_grad():
            expected = _pytree.tree_leaves(form.make().eval()(x.clone()))
        for a, b in zip(session.run(None, {given.name: x.numpy()}), expected, strict=False):
            torch.testing.assert_close(torch.as_tensor(a), b, atol=1e-5, rtol=1e-5)


def test_the_function_of_the_model_is_rewritten_again_and_no_copy() -> None:
    """The code of a rewritten function is that of the function which was compiled for it, too."""

    class Twice(torch.nn.Module):
        def forward(self, x):  # type: ignore[no-untyped-def]
            if any(t > 3 for t in (x.sum(), x.max())):
                return x * 2
            return x

    rewriting, _ = rewriting_of(Twice())
    assert rewriting.refused is not None
    assert "no test in" in rewriting.refused.message
    assert rewriting.refused.place is not None
    assert rewriting.refused.place.file == __file__


def test_nobody_looks_for_functions_without_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among all objects of the process, for each size that a traced branch asks for: that takes seconds."""
    found = apply.functions_of
    searched: list[str] = []

    def counted(code):  # type: ignore[no-untyped-def]
        searched.append(code.co_name)
        return found(code)

    monkeypatch.setattr(apply, "functions_of", counted)
    rewriting, _ = rewriting_of(FORMS["EarlyReturn"].make().eval())
    assert (rewriting.refused, rewriting.error, searched) == (None, None, [])


def test_a_function_of_before_the_fork_is_found() -> None:
    """The process that forks for cases tells the collector to leave alone what there is."""
    function = FORMS["Not"].make().forward.__func__  # type: ignore[attr-defined]
    gc.freeze()
    try:
        assert functions_of(function.__code__) == [(function, function.__code__)]
        gc.freeze()
        assert apply._twins(function) == [function]
        gc.freeze()
        place = Place(function.__code__.co_filename, function.__code__.co_firstlineno + 1)
        assert _functions_at(place, "forward") == [(function, function.__code__)]
    finally:
        gc.unfreeze()


def test_code_that_iterates() -> None:
    def loop(x):  # type: ignore[no-untyped-def]
        for _ in range(x.shape[0]):
            x = x + 1
        return x

    def nested(x):  # type: ignore[no-untyped-def]
        return (lambda: [row + 1 for row in x])()

    def plain(x):  # type: ignore[no-untyped-def]
        while x.sum() > 0:
            x = x - 1
        return x

    assert [iterates(one.__code__) for one in (loop, nested, plain)] == [True, True, False]
