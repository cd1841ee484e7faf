"""What is suggested for a name that nobody knows."""

from __future__ import annotations

import pytest

from pytest_exportcheck.options import DEVICES, DTYPES
from pytest_exportcheck.registry import exporter_names, patch_mode_names
from pytest_exportcheck.spec.names import choices, is_typo, suggest


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        ("onnx", exporter_names(), "'onnx-dynamo' or 'onnx-torchscript'"),
        ("dynamo", exporter_names(), "'onnx-dynamo'"),
        ("torchscript", exporter_names(), "'onnx-torchscript'"),
        ("jit", exporter_names(), "'onnx-torchscript'"),
        ("onnx_dynamo", exporter_names(), "'onnx-dynamo'"),
        ("ONNX-Dynamo", exporter_names(), "'onnx-dynamo'"),
        ("torch", exporter_names(), "'torch-export' or 'torch-export-strict'"),
        ("transformer", patch_mode_names(), "'transformers'"),
        ("rewriting", patch_mode_names(), "'rewrite'"),
        ("gpu", DEVICES, "'cuda'"),
        ("fp16", DTYPES, "'float16'"),
        ("half", DTYPES, "'float16'"),
        ("bf16", DTYPES, "'bfloat16'"),
        ("double", DTYPES, "'float64'"),
        ("opset", ["optimize", "opset_version"], "'opset_version'"),
        ("modl", ["model", "matrix"], "'model'"),
    ],
)
def test_suggestions(name, known, said):
    assert suggest(name, known) == f" (did you mean {said}?)"
    assert choices(name, known) == suggest(name, known)


@pytest.mark.parametrize("name", ["x", "qq", "", "no such thing"])
def test_nothing_is_made_up(name):
    assert suggest(name, exporter_names()) == ""
    assert choices(name, ["a", "b"]) == " (known: a, b)"


def test_a_part_of_a_name_is_no_typo():
    assert not is_typo("onnx", exporter_names())
    assert not is_typo("torch-deferred", exporter_names())
    assert is_typo("torch-exprt", exporter_names())
