"""The checker is checked: every broken model is caught, at the right stage, and no harmless change is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .breaks import BREAKS, HARMLESS
from .judge import Judge, judges
from .models import MODELS

pytestmark = pytest.mark.filterwarnings("ignore")  # what exporters have to say about these models

#: Stages at which a mutation may be caught, where it is not ``compare``.
STAGES = {
    "weight": {"compare", "resize"},  # a row of a table that no observed call looks up
    "drop Where": {"compare", "run"},  # a branch of another shape
    "swap inputs": {"compare", "run"},  # a dtype or a shape that no node takes
    "freeze axis": {"convert"},
    "bake batch": {"run", "compare"},
    "conv pads": {"run"},
    "concat axis": {"session", "run", "compare"},
    "drop output": {"session"},
    "add output": {"session"},
    "truncate": {"resize"},
    "transpose output": {"run", "compare"},
}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Judge]]:
    with judges(tmp_path_factory.mktemp("mutations")) as found:
        yield found


@pytest.mark.parametrize("model", MODELS)
def test_every_break_is_caught(made: dict[str, Judge], model: str) -> None:
    wrong, tried = [], 0
    for mutation, change in BREAKS.items():
        found = made[model].judge(change)
        if found is None:
            continue
        tried += 1
        stage, message = found
        allowed = STAGES.get(mutation, {"compare"})
        if stage not in allowed:
            wrong.append(f"{mutation}: {stage}, not {' or '.join(sorted(allowed))} {message[:300]}")
    assert not wrong, "\n".join(wrong)
    assert tried >= 12


@pytest.mark.parametrize("model", MODELS)
def test_no_harmless_change_is(made: dict[str, Judge], model: str) -> None:
    verdicts = {name: made[model].judge(change) for name, change in HARMLESS.items()}
    assert [(name, found) for name, found in verdicts.items() if found not in (None, ("pass", ""))] == []
    assert sum(found is not None for found in verdicts.values()) >= 5


def test_every_break_applies_somewhere(made: dict[str, Judge]) -> None:
    """One that never does checks nothing."""
    idle = [name for name, change in BREAKS.items() if not any(made[m].mutant(change) for m in MODELS)]
    assert idle == []
