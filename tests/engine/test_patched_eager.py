"""Patched eager against eager, by the rules of the spec's ``compare``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_exportcheck.patches.none import NoPatches
from pytest_exportcheck.registry import PATCH_MODES

from .helpers import make_run, verdict

NET = """
    class Net(nn.Module):
        def forward(self, x, attention_mask):
            return {"hidden": x * 2, "best": x.sum(-1).topk(2, -1).indices, "scores": x.sum(-1)}


    def build_model():
        return Net()


    def calls():
        torch.manual_seed(0)
        made = []
        for rows, n in ((2, 4), (3, 5)):
            x = torch.randn(rows, n, 3)
            x[:, 1] = x[:, 0] = 5.0  # The two best are a tie.
            mask = torch.ones(rows, n, dtype=torch.int64)
            mask[0, -1] = 0
            made.append(((x, mask), {}))
        return made
"""

RULES = {
    "where": "compare: {hidden: {where: attention_mask}}\n",
    "ties": "compare: {best: {ties: scores}}\n",
    "none": "",
}


class Changing(NoPatches):
    """Eager with other numbers in one output."""

    name = "changing"
    #: (output, what becomes of it, given the mask)
    change: tuple[str, Any] = ("", None)

    @contextlib.contextmanager
    def apply(self, model: torch.nn.Module, target: str) -> Iterator[None]:
        kind = type(model)
        plain = kind.forward
        name, change = self.change

        def forward(self: Any, x: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            out = plain(self, x, attention_mask)
            return {**out, name: change(out[name], attention_mask)}

        kind.forward = forward
        try:
            yield
        finally:
            kind.forward = plain


@pytest.fixture
def changing() -> Iterator[type[Changing]]:
    made = type("Made", (Changing,), {})
    PATCH_MODES.register("changing", made)
    yield made
    PATCH_MODES.unregister("changing")


CHANGES = {
    "padding": ("hidden", lambda y, mask: y + (1 - mask)[..., None]),
    "positions that count": ("hidden", lambda y, mask: y + mask[..., None]),
    "order of a tie": ("best", lambda y, mask: y.flip(-1)),
    "another index": ("best", lambda y, mask: (y + 1) % 4),
}

PASSES = {("where", "padding"), ("ties", "order of a tie")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("under_itself", [False, True])
def test_a_patch_is_judged_by_the_rules(
    tmp_path: Path, changing: type[Changing], rule: str, change: str, under_itself: bool
) -> None:
    changing.change = CHANGES[change]
    changing.observed_under_itself = under_itself
    stage, error, _ = verdict(
        make_run(tmp_path, NET, RULES[rule] + "resize: off\n"), "torch-export", "changing"
    )
    if (rule, change) in PASSES:
        assert stage == "pass", error
    else:
        assert stage == "patch", error
        assert CHANGES[change][0] in str(error)
