"""Small models of the kinds that are in bug reports, whose verdict is known without running anything."""

from __future__ import annotations

import pytest
import torch

from pytest_exportcheck.checks.compare import Tolerances, compare_leaf

from .helpers import make_run, verdict

pytestmark = pytest.mark.filterwarnings("ignore")  # what exporters have to say about these models


@pytest.mark.parametrize("exporter", ["torch-export", "onnx-dynamo"])
def test_nested_dicts_with_keys_in_another_order_are_fed_by_path(tmp_path, exporter):
    """torch refuses a dict of unlike values in another order; of tensors alone it takes it."""
    run = make_run(
        tmp_path,
        """
        class Nested(nn.Module):
            def forward(self, batch):
                return batch["text"]["ids"] - 2 * batch["scale"] + batch["pair"][0]["b"]


        def build_model():
            return Nested()


        def calls():
            def t(n):
                return torch.randn(n, 3)

            first = {"text": {"ids": t(2), "mask": t(2)}, "scale": t(2), "pair": [{"a": [t(2)], "b": t(2)}]}
            second = {"pair": [{"b": t(5), "a": [t(5)]}], "scale": t(5), "text": {"mask": t(5), "ids": t(5)}}
            return [((first,), {}), ((second,), {})]
        """,
    )
    stage, error, _ = verdict(run, exporter)
    assert stage == "pass", error


def test_batch_normalization_left_in_train_mode_is_held_against_no_exporter(tmp_path):
    """An ONNX model normalizes by the running statistics: eager in train mode is what differs."""
    run = make_run(
        tmp_path,
        """
        class Stubborn(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.BatchNorm1d(3)

            def train(self, mode=True):
                return self

            def forward(self, x):
                return self.norm(x)


        def build_model():
            return Stubborn()


        def calls():
            return [((torch.randn(n, 3) * 3 + 1,), {}) for n in (4, 6)]
        """,
    )
    assert verdict(run, "torch-export")[0] == "pass"
    stage, error, _ = verdict(run, "onnx-dynamo")
    assert stage == "observe", error
    assert "`norm` is in train mode though eval() was called on the model" in error.message
    assert "buffer `norm.running_mean`" in error.message
    assert "no exporter is blamed" in error.message


@pytest.mark.parametrize("answer", ["None", "{'a': None, 'b': x[:0]}", "[]"])
def test_a_model_that_returns_nothing_is_no_pass(tmp_path, answer):
    run = make_run(
        tmp_path,
        f"""
        class Silent(nn.Module):
            def forward(self, x):
                x = x * 2
                return {answer}


        def build_model():
            return Silent()


        def calls():
            return [((torch.randn(n, 3),), {{}}) for n in (2, 4)]
        """,
    )
    stage, error, _ = verdict(run, "torch-export")
    assert stage == "observe", error
    assert "returns nothing that can be compared" in error.message


def test_what_is_written_into_inputs_is_something_to_compare(tmp_path):
    run = make_run(
        tmp_path,
        """
        class Write(nn.Module):
            def forward(self, x):
                x.mul_(2)


        def build_model():
            return Write()


        def calls():
            return [((torch.randn(n, 3),), {}) for n in (2, 4)]
        """,
    )
    stage, error, _ = verdict(run, "torch-export")
    assert stage == "pass", error


FUNCTIONS_OF_SIZES = [
    "int(x.shape[1] * 0.5)",
    "math.floor(x.shape[1] / 3)",
    "math.ceil(x.shape[1] / 2)",
    "math.trunc(x.shape[1] * 0.7)",
]


@pytest.mark.parametrize("size", FUNCTIONS_OF_SIZES)
def test_a_branch_on_a_real_function_of_a_size_is_found_from_the_other_side(tmp_path, size):
    """`F.interpolate` with a fractional scale computes sizes like these."""
    run = make_run(
        tmp_path,
        f"""
        import math


        class Branch(nn.Module):
            def forward(self, x):
                if {size} > 9:
                    return x * 2
                return x


        def build_model():
            return Branch()


        def calls():
            return [((torch.randn(n, 3 * n),), {{}}) for n in (2, 3)]
        """,
    )
    stage, error, record = verdict(run, "onnx-dynamo")
    assert stage == "resize", (error, record.get("resize"))
    assert "decided at" in str(error)
    assert f"if {size}" in str(error)


@pytest.mark.parametrize("exporter", ["torch-export", "onnx-dynamo"])
def test_sizes_of_a_fractional_scale_are_compared(tmp_path, exporter):
    run = make_run(
        tmp_path,
        """
        class Upsample(nn.Module):
            def forward(self, x):
                return nn.functional.interpolate(x, scale_factor=1.5, mode="nearest")


        def build_model():
            return Upsample()


        def calls():
            return [((torch.randn(n, 3, 2 * n, 6),), {}) for n in (2, 3)]
        """,
    )
    stage, error, record = verdict(run, exporter)
    assert stage in ("pass", "resize"), error
    assert record["resize"]["passed"]


def transform(imaginary):
    """Real and imaginary parts of a transform; those of a symmetric signal are zero but for rounding."""
    torch.manual_seed(0)
    return torch.stack([torch.randn(3, 40) * 5, torch.randn(3, 40) * imaginary], -1)


def test_a_slice_that_is_zero_but_for_rounding_may_round_otherwise():
    expected = transform(2e-7)
    got = expected + torch.randn(3, 40, 2) * torch.tensor([0.0, 3e-7])
    assert compare_leaf("output", expected, got, Tolerances()).ok
    assert not compare_leaf("output", expected, got + torch.tensor([0.0, 3e-5]), Tolerances()).ok


def test_a_small_slice_that_is_no_rounding_keeps_its_own_tolerance():
    expected = transform(1e-4)
    assert not compare_leaf("output", expected, expected + torch.tensor([0.0, 1e-6]), Tolerances()).ok


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nn.Sequential(nn.LazyLinear(5))", "a model whose 0.weight has no shape yet: call it once"),
        ("torch.jit.script(nn.Linear(3, 3))", "TorchScript can neither be observed nor captured"),
    ],
)
def test_a_model_that_cannot_be_observed_is_refused_with_what_to_do(tmp_path, model, message):
    run = make_run(
        tmp_path,
        f"""
        def build_model():
            return {model}


        def calls():
            return [((torch.randn(n, 3),), {{}}) for n in (2, 4)]
        """,
    )
    stage, error, _ = verdict(run, "torch-export")
    assert stage == "load", error
    assert message in error.message


def test_an_output_that_is_zero_but_for_rounding_may_round_otherwise(tmp_path):
    run = make_run(
        tmp_path,
        """
        class Cancels(nn.Module):
            def forward(self, x):
                probabilities = x.softmax(-1)
                return nn.functional.layer_norm(x, (64,)).mean(-1), probabilities.sum(-1) - 1


        def build_model():
            return Cancels()


        def calls():
            torch.manual_seed(1)
            return [((torch.randn(n, 64),), {}) for n in (20, 30)]
        """,
    )
    stage, error, record = verdict(run, "onnx-dynamo")
    assert stage == "pass", error
    assert max(row["max_abs"] for row in record["outputs"]) > 0, (
        "the runtimes round otherwise, or nothing is shown"
    )


@pytest.mark.parametrize(("size", "error"), [(1e-7, 1e-6), (1e-6, 1e-7), (1e-4, 1e-6)])
def test_a_small_output_keeps_a_small_tolerance(size, error):
    expected = torch.linspace(0.1, 1.0, 30) * size
    assert not compare_leaf("output", expected, expected + error, Tolerances()).ok


def test_half_precision_has_small_outputs_that_are_no_rounding():
    expected = (torch.linspace(0.1, 1.0, 30) * 1e-3).half()
    assert not compare_leaf("output", expected, expected * 2, Tolerances()).ok


@pytest.mark.parametrize("exporter", ["torch-export", "onnx-dynamo"])
def test_a_float_that_a_model_computes_rounds_as_its_tensor(tmp_path, exporter):
    """`item()` gives eager a Python number, and an ONNX model an output that it sums in another order."""
    run = make_run(
        tmp_path,
        """
        class Mean(nn.Module):
            def forward(self, x):
                return x * 2, x.mean().item()


        def build_model():
            return Mean()


        def calls():
            torch.manual_seed(0)
            return [((torch.randn(n, 37),), {}) for n in (20, 50)]
        """,
    )
    stage, error, record = verdict(run, exporter)
    assert stage == "pass", error
    assert record["outputs"][1]["dtype"] == "float"
