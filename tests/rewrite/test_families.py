"""Encoder layers in float16, whose test of infinite values stops the export: cured by rewriting."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest
import torch

from pytest_exportcheck.exporters.tables import shared_tables
from pytest_exportcheck.patches.rewrite import locate, rewrite_for_export

from .float16_layers import BART_LIKE, FAMILIES, Layers, calls

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoder_layer(family: str) -> None:
    model = Layers(family)
    inputs = [args[0] for args, _ in calls()]
    programs: list[torch.export.ExportedProgram] = []

    def export() -> None:
        shapes = ({0: torch.export.Dim.DYNAMIC},)
        with torch.no_grad():
            programs.append(torch.export.export(model, (inputs[0],), dynamic_shapes=shapes, strict=False))

    with pytest.raises(Exception, match="data-dependent") as caught:
        export()
    place = locate(caught.value).place
    assert place.file.endswith(f"modeling_{family}.py")
    line = Path(place.file).read_text(encoding="utf-8").splitlines()[place.line - 1]
    assert "isfinite" in line or "isinf" in line

    found = rewrite_for_export(
        model, (inputs[0],), error=caught.value, calls=[((inputs[1],), {})], export=export
    )
    assert found.refused is None
    (method,) = found.methods
    assert set(method.targets) == {"torch.where"}
    assert method.proof.complete

    with torch.no_grad():
        expected = [model(x)[family] for x in inputs]
    if family in BART_LIKE:  # both branches are in these
        assert expected[0].max() < 1
        assert expected[1].max() == 64512  # 64504 in float16
    (program,) = programs
    with shared_tables(), torch.no_grad():
        onnx_program = torch.onnx.export(program, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(
        onnx_program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    for x, right in zip(inputs, expected, strict=True):
        torch.testing.assert_close(program.module()(x)[family], right)
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), right, atol=2e-2, rtol=2e-3)
