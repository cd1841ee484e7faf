"""What torch adds to its errors is left out, word by word; what a user wrote stays, whatever it is like."""

from __future__ import annotations

import pytest
import torch

from pytest_exportcheck.failures import error_lines
from pytest_exportcheck.foreign_errors import refusal
from pytest_exportcheck.reports.markdown import markdown
from pytest_exportcheck.reports.torch_advice import without_advice


class Branch(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Item(torch.nn.Module):
    def forward(self, x):
        n = x.sum().int().item()
        return x if n > 3 else -x


class Bessel(torch.nn.Module):
    def forward(self, x):
        return torch.special.i1e(x)


def failure(model: torch.nn.Module, strict: bool = False) -> list[str]:
    """Details of what torch says today."""
    try:
        program = torch.export.export(model, (torch.ones(2, 3),), strict=strict)
        torch.onnx.export(program, dynamo=True, verbose=False)
    except Exception as error:
        return refusal(error, "export", "refused").details
    raise AssertionError("torch takes it now: find another model")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "strict", "kept"),
    [
        (Branch(), False, "The following call raised this error:"),
        (Branch(), True, "  Developer debug context: "),
        (Item(), False, "Caused by: ("),
        (Bessel(), False, "Error when translating node "),
    ],
)
def test_what_torch_says_today_is_known(model, strict, kept):
    lines = failure(model, strict)
    shown = without_advice(lines)
    assert any(line.startswith(kept) for line in shown)
    assert shown[-1] == lines[-1], "where it was raised"
    text = "\n".join(shown)
    for advice in (
        "To fix the error",
        "torch._check",
        "TORCH_LOGS",
        "TORCHDYNAMO_",
        "Hint: ",
        "PR to PyTorch",
        "GitHub",
        "draft_export",
        "consider using",
    ):
        assert advice not in text
    assert len(shown) < len(lines)
    assert set(shown) <= set(lines)


USERS = [
    "To fix the error, pad your inputs:",
    "  1. pad them",
    "  2. torch._check(x) is no help",
    "To fix the error, insert one of the following checks",
    "For more information, run the notebook",
    "Hint: give a mask",
    "  Hint: give a mask",
    "  Explanation: there is none",
    "  Hint: give another mask",
    "    with four rows",
    "class Net(torch.nn.Module):",
    "    def forward(self, x):",
    "        return x",
    "- Create an issue in our GitHub repository",
    "consider using a mask",
    "Suggested fixes:",
    "  batch = 2",
    "set TORCH_LOGS if you like",
    "",
]


def test_what_a_user_wrote_stays():
    assert without_advice(USERS) == USERS


def test_a_dump_ends_where_its_indentation_does():
    lines = [
        "no kernel",
        "While executing %add : [num_users=1] = call_function[target=torch.ops.aten.add.Tensor]",
        "GraphModule: class GraphModule(torch.nn.Module):",
        '    def forward(self, x: "f32[2, 3]"):',
        "         # File: net.py:3 in forward, code: return x + 1",
        "        return (add,)",
        "Original traceback:",
        "  File net.py, line 3",
    ]
    assert without_advice(lines) == [*lines[:2], *lines[6:]]


def test_checks_that_torch_proposes_and_what_follows():
    lines = [
        "To fix the error, insert one of the following checks before this call:",
        "  1. torch._check(n > 3)",
        "  2. torch._check(n <= 3)",
        "(These suggested fixes were derived by replacing `u0` with n in u0 > 3 and its negation.)",
        "  3. give a mask",
        "at net.py:3 in forward: if n > 3:",
    ]
    assert without_advice(lines) == lines[4:]


def test_it_is_left_out_of_markdown_and_counted():
    advice = 'For more information, run with TORCH_LOGS="dynamic"'
    record = {
        "spec": "a.yaml",
        "exporter": "torch-export",
        "patch_mode": "none",
        "device": "cpu",
        "dtype": "float32",
        "graph": None,
        "nodeid": "a.yaml::test_export[x]",
        "verdict": "fail export",
        "message": "refused",
        "details": ["why", advice, "where"],
    }
    text = markdown([record])
    assert "why" in text
    assert advice not in text
    assert "(1 line of torch's own advice left out: the JSON report has them)" in text
    assert "advice" not in markdown([{**record, "details": ["why", "where"]}])


def test_all_of_it_on_demand():
    advice = "Use tlparse to see full graph. (https://github.com/pytorch/tlparse?tab=readme-ov-file#a)"
    error = refusal(RuntimeError(f"no kernel\nhere\n{advice}"), "export", "refused")
    assert f"  {advice}" in error_lines(error)
    short = error_lines(error, advice=False)
    assert f"  {advice}" not in short
    assert short[-1] == "  (1 line of torch's own advice left out: -vv shows them)"
