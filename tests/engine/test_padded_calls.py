"""A failure of the padded calls alone: said where it is the mask, and where it is not, nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_exportcheck.diagnose.causes import causes_of_text
from pytest_exportcheck.errors import ExportCheckError

from .helpers import make_run, verdict

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations inside the exporters

NET = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x, {name}):
            mask = {name}
            {body}


    def build_model():
        torch.manual_seed(0)
        return Net().eval()


    def ones(n, m):
        return torch.ones(n, m)


    def padded(n, m):
        mask = ones(n, m)
        mask[0, :2] = 0
        return mask


    def calls():
        g = torch.Generator().manual_seed(0)
        sizes = ((2, 7), (4, 9), (3, 5))
        made = zip(sizes, ({masks}))
        return [((torch.randn(n, m, 4, generator=g), mask(n, m)), {{}}) for (n, m), mask in made]
"""

LINE = (
    "the calls with zeros in {} differ ({} of 3), those with ones only agree ({} of 3), "
    "and call {} agrees too with ones there"
)

#: A sum over positions: masked ones are not among the outputs.
READS = "return self.lin(x * mask.unsqueeze(-1)).sum(1)"
CAPTURE = f"if torch.compiler.is_exporting():\n    return self.lin(x).sum(1)\n{READS}"
TRACED = f"if torch.onnx.is_in_onnx_export():\n    return self.lin(x).sum(1) + 0 * mask.sum()\n{READS}"
OTHERWISE = f"if torch.compiler.is_exporting():\n    mask = mask * 2 - 1\n{READS}"


def net(body: str, masks: str, name: str = "attention_mask") -> str:
    return NET.format(body=("\n" + " " * 12).join(body.splitlines()), masks=masks, name=name)


def told(error: ExportCheckError | None) -> list[str]:
    assert error is not None
    starts = ("the calls with zeros in ", "all 3 calls have zeros in ", "the only call has zeros in ")
    return [line for line in error.details if line.startswith(starts)]


def causes(error: ExportCheckError | None) -> list[str]:
    assert error is not None
    text = "\n".join([error.message, *error.details])
    return [cause.name for cause in causes_of_text(text, error.stage, "float32", fresh=True)]


@pytest.mark.parametrize(
    ("exporter", "body", "stage"),
    [
        ("torch-export", CAPTURE, "compare"),
        ("onnx-dynamo", CAPTURE, "export"),
        ("onnx-dynamo", OTHERWISE, "export"),
        ("onnx-torchscript", TRACED, "compare"),
    ],
    ids=["capture", "capture for ONNX", "otherwise", "trace"],
)
@pytest.mark.parametrize(
    ("masks", "differ", "first"), [("ones, padded, padded", 2, 2), ("padded, ones, ones", 1, 1)]
)
def test_calls_that_a_mask_tells_apart(
    tmp_path: Path, exporter: str, body: str, stage: str, masks: str, differ: int, first: int
) -> None:
    found, error, _ = verdict(make_run(tmp_path, net(body, masks)), exporter)
    assert found == stage, error
    assert told(error) == [LINE.format("attention_mask", differ, 3 - differ, first)]
    assert causes(error) == ["mask not read"]


ALL = "all 3 calls have zeros in {} and differ; call 1 agrees with ones there"


@pytest.mark.parametrize(
    ("exporter", "body", "stage"),
    [
        ("torch-export", CAPTURE, "compare"),
        (
            "torch-export",
            f"if torch.compiler.is_exporting():\n    mask = torch.ones_like(mask)\n{READS}",
            "compare",
        ),
        ("onnx-dynamo", CAPTURE, "export"),
        ("onnx-torchscript", TRACED, "compare"),
    ],
    ids=["capture", "ones", "capture for ONNX", "trace"],
)
def test_all_calls_are_padded(tmp_path: Path, exporter: str, body: str, stage: str) -> None:
    found, error, _ = verdict(make_run(tmp_path, net(body, "padded, padded, padded")), exporter)
    assert found == stage, error
    assert told(error) == [ALL.format("attention_mask")]
    assert causes(error) == ["mask not read"]


def test_the_only_call_is_padded(tmp_path: Path) -> None:
    made = net(CAPTURE, "padded,").replace("sizes = ((2, 7), (4, 9), (3, 5))", "sizes = ((2, 7),)")
    found, error, _ = verdict(make_run(tmp_path, made), "torch-export")
    assert found == "compare", error
    assert told(error) == ["the only call has zeros in attention_mask and differs; it agrees with ones there"]
    assert causes(error) == ["mask not read"]


def test_of_two_masks_the_one_that_is_not_read(tmp_path: Path) -> None:
    made = net(CAPTURE, "padded, padded, padded")
    made = made.replace("(self, x, attention_mask)", "(self, x, attention_mask, head_mask)")
    made = made.replace("mask = attention_mask", "mask, x = attention_mask, x * head_mask")
    made = made.replace("mask(n, m)), {})", "mask(n, m), torch.tensor([1.0, 0, 1, 1])), {})")
    found, error, _ = verdict(make_run(tmp_path, made), "torch-export")
    assert found == "compare", error
    assert told(error) == [ALL.format("attention_mask")]


@pytest.mark.parametrize(
    "body",
    [
        f"{READS} + (1 if torch.compiler.is_exporting() else 0)",
        # 1 means "left out": of ones nothing is left that could be wrong.
        "scale = 2 if torch.compiler.is_exporting() else 1\n"
        "return x.sum(1) + (self.lin(x) * scale * (1 - mask).unsqueeze(-1)).sum(1)",
        # Read, and right with ones.
        OTHERWISE,
        # Eager does not read it either.
        "return self.lin(x).sum(1) + 0 * mask.sum() + (1 if torch.compiler.is_exporting() else 0)",
    ],
    ids=["offset", "ones leave out", "otherwise", "of no use"],
)
@pytest.mark.parametrize("exporter", ["torch-export", "onnx-dynamo"])
def test_all_calls_are_padded_and_the_fault_is_another(tmp_path: Path, exporter: str, body: str) -> None:
    found, error, _ = verdict(make_run(tmp_path, net(body, "padded, padded, padded")), exporter)
    assert found in ("export", "compare"), error
    assert told(error) == []
    assert "mask not read" not in causes(error)


@pytest.mark.parametrize("exporter", ["torch-export", "onnx-dynamo"])
def test_a_right_model_of_padded_calls_passes(tmp_path: Path, exporter: str) -> None:
    found, error, _ = verdict(make_run(tmp_path, net(READS, "padded, padded, padded")), exporter)
    assert (found, error) == ("pass", None)


@pytest.mark.parametrize(
    ("body", "masks"),
    [
        # Of another size beside, which is what is baked in.
        (
            "n = 9 if torch.compiler.is_exporting() else x.shape[1]\n"
            "return self.lin(x * mask.unsqueeze(-1)).sum(1) / n",
            "padded, ones, padded",
        ),
        # A padded call that agrees.
        (
            "k = mask.sum() if torch.compiler.is_exporting() else mask.sum().clamp(min=13)\n"
            "return self.lin(x).sum(1) / k",
            "padded, padded, ones",
        ),
    ],
    ids=["sizes", "not all of them"],
)
@pytest.mark.parametrize("exporter", ["torch-export", "onnx-dynamo"])
def test_what_proves_nothing_is_not_said(tmp_path: Path, exporter: str, body: str, masks: str) -> None:
    found, error, _ = verdict(make_run(tmp_path, net(body, masks)), exporter)
    assert found in ("export", "compare"), error
    assert told(error) == []
    assert "mask not read" not in causes(error)


@pytest.mark.parametrize("name", ["attention_mask", "padding_mask"])
@pytest.mark.parametrize("exporter", ["torch-export", "onnx-dynamo"])
def test_differences_at_padded_positions_only_are_another_matter(
    tmp_path: Path, exporter: str, name: str
) -> None:
    """The mask is read: what is left where nothing counts differs."""
    body = (
        "y = self.lin(x * mask.unsqueeze(-1))\n"
        "return y + (1 - mask.unsqueeze(-1)) if torch.compiler.is_exporting() else y"
    )
    found, error, _ = verdict(make_run(tmp_path, net(body, "ones, padded, padded", name)), exporter)
    assert found in ("export", "compare"), error
    assert told(error) == []


def test_a_rule_of_the_spec_leaves_padded_positions_out(tmp_path: Path) -> None:
    body = (
        "weights = torch.ones_like(mask) if torch.compiler.is_exporting() else mask\n"
        "return self.lin(x) - self.lin(x * weights.unsqueeze(-1)).sum(1, keepdim=True)"
    )
    extra = "compare: {output: {where: attention_mask}}\n"
    found, error, _ = verdict(make_run(tmp_path, net(body, "ones, padded, ones"), extra), "torch-export")
    assert found == "compare", error
    assert told(error) == [LINE.format("attention_mask", 1, 2, 2)]


def test_an_input_of_zeros_and_ones_is_a_mask_by_its_name(tmp_path: Path) -> None:
    for number, (name, line) in enumerate((("pixel_mask", 1), ("flags", 0))):
        run = make_run(tmp_path, net(CAPTURE, "ones, padded, padded", name), name=f"net{number}")
        _, error, _ = verdict(run, "torch-export")
        assert len(told(error)) == line


def test_rows_without_a_position_are_another_cause() -> None:
    text = "y  FAIL nan instead of 0.5\n" + LINE.format("attention_mask", 1, 2, 2)
    assert "mask not read" not in [each.name for each in causes_of_text(text, "compare", "float32", True)]
