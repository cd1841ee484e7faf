"""Each form of control flow: what it becomes, proven on both branches, and the program's numbers."""

from __future__ import annotations

import re

import pytest
import torch

from .forms import FORMS, NEGATIVE, POSITIVE
from .helpers import ROWS, differences, rewriting_of
from .hostile import HOSTILE

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", FORMS)
def test_a_form_becomes_its_operators(name: str) -> None:
    form = FORMS[name]
    rewriting, programs = rewriting_of(form.make().eval())
    assert rewriting.refused is None
    assert rewriting.error is None
    assert tuple(target for method in rewriting.methods for target in method.targets) == form.targets
    for method in rewriting.methods:
        assert method.proof.complete
        assert method.proof.runs >= 2
        assert {branch.outcome for branch in method.proof.branches} == {True, False}
        assert method.dump.startswith("--- ")
    assert differences(form.make().eval(), programs[0], [*form.inputs, POSITIVE, NEGATIVE]) == []


@pytest.mark.parametrize("name", ["EarlyReturn", "While", "Elif", "Raise"])
def test_a_form_does_not_export_as_it_is(name: str) -> None:
    with pytest.raises(Exception, match="data-dependent"):
        torch.export.export(FORMS[name].make().eval(), (POSITIVE,), dynamic_shapes=ROWS)


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
