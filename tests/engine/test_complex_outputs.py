"""A complex output fails for one reason, that ONNX has none, and no step of the export is blamed for it."""

from __future__ import annotations

import pytest
import torch

from pytest_exportcheck.checks.compare import Tolerances, compare_leaves
from pytest_exportcheck.checks.complex_parts import given_in_parts
from pytest_exportcheck.diagnose.causes import causes_of_text

from .helpers import make_run, verdict

pytestmark = pytest.mark.filterwarnings("ignore")  # what exporters have to say about these models


@pytest.mark.parametrize(
    ("exporter", "returns", "stage", "names", "cause"),
    [
        ("onnx-dynamo", "(torch.complex(x, x * 2), x + 1)", "compare", "1 output is complex (0)", "output"),
        ("onnx-torchscript", "torch.complex(x, x * 2)", "export", "", "numbers"),
    ],
)
def test_one_cause(tmp_path, exporter, returns, stage, names, cause):
    run = make_run(
        tmp_path,
        f"""
        class Net(nn.Module):
            def forward(self, x):
                return {returns}


        def build_model():
            return Net()


        def calls():
            return [((torch.randn(n, 4),), {{}}) for n in (2, 3)]
        """,
    )
    found, error, _ = verdict(run, exporter)
    assert found == stage
    assert error.message.startswith(names)
    if stage == "compare":
        assert "as torch.view_as_real does" in error.message
        assert error.facts == {"complex_output": ["0"]}
    assert not any("to blame" in line for line in error.details)
    text = "\n".join([error.message, *error.details])
    (known,) = causes_of_text(text, found, "float32", True)
    assert known.name == f"complex {cause}"
    assert "torch.view_as_real" in known.remedy


def given(expected, got):
    left, right = [("y", expected), ("z", torch.ones(2))], [("y", got), ("z", torch.ones(2))]
    results = compare_leaves(left, right, Tolerances())
    return given_in_parts(results, left, right, Tolerances())


def test_only_right_parts_are_parts():
    y = torch.randn(2, 3, dtype=torch.complex64)
    parts = torch.view_as_real(y)
    assert given(y, parts) == ["y"]
    assert given(y.conj(), torch.view_as_real(y.conj().resolve_conj())) == ["y"]
    wrong = parts.clone()
    wrong[1, 2, 1] += 1e-2
    nan = parts.clone()
    nan[0, 0, 0] = float("nan")
    others = [wrong, nan, parts.flip(-1), parts.double(), parts[:1], y.real, y + 1, parts.int()]
    for other in others:
        assert given(y, other) == []
    assert given(torch.ones(2, 3), torch.ones(2, 3, 2)) == [], "a real output has no parts"


def test_another_output_that_fails_is_a_reason_of_its_own():
    y = torch.randn(2, 3, dtype=torch.complex64)
    left, right = [("y", y), ("z", torch.ones(2))], [("y", torch.view_as_real(y)), ("z", torch.zeros(2))]
    results = compare_leaves(left, right, Tolerances())
    assert given_in_parts(results, left, right, Tolerances()) == []
