"""Python loops over a dynamic axis: which become scans, their numbers at unseen lengths, and which do not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch.utils import _pytree

from pytest_exportcheck.patches.rewrite import LoopProof, Rewriting, rewrite_for_export

from .loop_forms import LOOPS, REFUSED

pytestmark = pytest.mark.filterwarnings("ignore")

_DYNAMIC = torch.export.Dim.DYNAMIC
_SHAPES = ({0: _DYNAMIC, 1: _DYNAMIC},)


def x_of(batch: int, length: int) -> torch.Tensor:
    return torch.randn(batch, length, 4, generator=torch.Generator().manual_seed(batch * 100 + length))


def rewriting_of(model: torch.nn.Module) -> tuple[Rewriting, list[torch.export.ExportedProgram]]:
    programs = []

    def export() -> None:
        # As the exporter for ONNX does: a size of 1 is a size as any other.
        config: Any = torch.fx.experimental._config
        with config.patch(backed_size_oblivious=True):
            programs.append(torch.export.export(model, (x_of(2, 5),), dynamic_shapes=_SHAPES, strict=False))

    return rewrite_for_export(model, (x_of(2, 5),), calls=[((x_of(3, 7),), {})], export=export), programs


def fed(session: onnxruntime.InferenceSession, x: torch.Tensor) -> list[torch.Tensor]:
    (given,) = session.get_inputs()
    return [torch.as_tensor(one) for one in session.run(None, {given.name: x.numpy()})]


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_becomes_a_scan(name: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"onstrain|specialized"):
        torch.export.export(LOOPS[name]().eval(), (x_of(2, 5),), dynamic_shapes=_SHAPES, strict=False)
    rewriting, programs = rewriting_of(LOOPS[name]().eval())
    assert rewriting.refused is None, rewriting.refused
    assert rewriting.error is None, rewriting.error
    method = rewriting.methods[-1]
    assert "scan" in method.targets
    loops = [one for one in method.proof.branches if isinstance(one, LoopProof)]
    assert loops
    for proof in loops:
        assert proof.proven
        assert {1, 2, 3} <= {*proof.observed, *proof.made}
    assert "torch._higher_order_ops.scan(" in method.dump
    file = tmp_path / "model.onnx"
    torch.onnx.export(programs[0], verbose=False).save(file)
    session = onnxruntime.InferenceSession(file)
    fresh = LOOPS[name]().eval()
    for batch, length in ((2, 5), (1, 3), (4, 11), (3, 1)):
        x = x_of(batch, length)
        with torch.no_grad():
            expected = [torch.as_tensor(one) for one in _pytree.tree_leaves(fresh(x.clone()))]
        for got in (_pytree.tree_leaves(programs[0].module()(x.clone())), fed(session, x)):
            assert len(got) == len(expected)
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(torch.as_tensor(a), b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_a_loop_that_cannot_be_a_scan_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    rewriting, _ = rewriting_of(make().eval())
    assert rewriting.refused is not None
    assert re.search(message, rewriting.refused.message), rewriting.refused.message
    assert rewriting.refused.place is not None
    assert rewriting.refused.place.file.endswith("loop_forms.py")
