"""Encoder layers in float16, whose test of infinite values stops the export: cured by the mode
``rewrite``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pytest_exportcheck.patches.rewrite import locate
from tests.engine.helpers import make_run

from .float16_layers import BART_LIKE, FAMILIES, Layers, calls
from .helpers import verdict

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoder_layer_does_not_export(family: str) -> None:
    with pytest.raises(Exception, match="data-dependent") as caught, torch.no_grad():
        torch.export.export(
            Layers(family), calls()[0][0], dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), strict=False
        )
    site = locate(caught.value)
    assert site.place.file.endswith(f"modeling_{family}.py")
    line = Path(site.place.file).read_text(encoding="utf-8").splitlines()[site.place.line - 1]
    assert "isfinite" in line or "isinf" in line


@pytest.mark.parametrize("families", [list(FAMILIES)[:4], list(FAMILIES)[4:]], ids="-".join)
def test_encoder_layers_rewritten(families: list[str], tmp_path: Path) -> None:
    run = make_run(
        tmp_path,
        f"from tests.rewrite.float16_layers import Layers, calls\n\n\ndef build_model():\n    return "
        f"Layers(*{families})\n",
        "matrix: {exporters: [torch-export], patch_modes: [none], dtypes: [float16]}\n",
    )
    outputs = [dict(call.output_leaves()) for call in run.observe("cpu", "float16").calls]
    for family in set(families) & set(BART_LIKE):  # both branches are in the observed calls
        assert outputs[0][family].max() < 1
        assert outputs[1][family].max() == 64512  # 64504 in float16
    for exporter in ("torch-export", "onnx-dynamo"):
        stage, failure, record = verdict(run, exporter, "rewrite", "float16")
        assert stage == "pass", failure
        rewritten = record["patches"]["rewritten"]
        assert {name.split(".")[2] for name in rewritten} == set(families)
        assert {target for targets in rewritten.values() for target in targets} == {"torch.where"}
        assert set(rewritten) <= set(record["patches"]["nodes"])
        assert [one["path"] for one in record["outputs"]] == families
