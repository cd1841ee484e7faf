"""Small models of the kinds that are in bug reports, whose verdict is known without running anything."""

from __future__ import annotations

import pytest

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
