"""The stages of a case in a row: who is blamed, what the record holds, what the shapes check says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_exportcheck.cases import CaseId
from pytest_exportcheck.errors import STAGES, ExportCheckError, LoadError, ObserveError, ShapesError
from pytest_exportcheck.exporters.base import Exported, ExportRequest
from pytest_exportcheck.pipeline import check_shapes, run_case
from pytest_exportcheck.registry import EXPORTERS

from .helpers import make_run, verdict

pytestmark = pytest.mark.filterwarnings("ignore")

LINEAR = """
    def build_model():
        torch.manual_seed(0)
        return nn.Linear(4, 3)


    def calls():
        g = torch.Generator().manual_seed(0)
        return [((torch.randn(n, 4, generator=g),), {}) for n in (2, 5)]
"""


def source(forward: str, calls: str) -> str:
    """A model and its calls; `forward` is what follows ``def forward(self, ``."""
    body = "\n".join("        " + line for line in forward.strip().splitlines())
    return (
        f"class Net(nn.Module):\n    def forward(self, {body.strip()}\n\n\n"
        f"def build_model():\n    return Net()\n\n\ndef calls():\n    return {calls}\n"
    )


def test_stages_come_in_order_and_the_record_is_plain(tmp_path: Path) -> None:
    run = make_run(tmp_path, LINEAR)
    entered: list[str] = []
    record: dict[str, Any] = {}
    run_case(run, CaseId(run.spec.relative, "torch-export", "none", "cpu", "float32"), entered.append, record)
    assert entered[0] == "load"
    assert entered[-1] == "resize"
    order = [STAGES.index(stage) for stage in dict.fromkeys(entered)]
    assert order == sorted(order)
    again = json.loads(json.dumps(record))
    assert again["outputs"][0]["ok"] is True
    assert all(set(spent) == {"wall_s", "cpu_s"} for spent in again["durations"].values())


@pytest.mark.parametrize(
    ("text", "stage", "error"),
    [
        ("def build_model():\n    raise ValueError('no')", "load", LoadError),
        ("def build_model():\n    raise SystemExit(2)", "load", LoadError),
        ("def build_model():\n    return 3", "load", LoadError),
        (
            "def build_model():\n    return nn.Linear(2, 2)\n\n\ndef calls():\n    return 3",
            "observe",
            ObserveError,
        ),
        (
            "def build_model():\n    return nn.Linear(2, 2)\n\n\n"
            "def calls():\n    return [((torch.ones(3),), {})]",
            "observe",
            ObserveError,
        ),
        (
            "def build_model():\n    return nn.Linear(2, 2)\n\n\ndef calls(model):\n    return None",
            "observe",
            ObserveError,
        ),
    ],
)
def test_a_failure_before_the_export_is_the_same_for_every_case(
    text: str, stage: str, error: type[ExportCheckError], tmp_path: Path
) -> None:
    run = make_run(tmp_path, text)
    first, again = verdict(run, "torch-export"), verdict(run, "onnx-dynamo")
    assert first[0] == again[0] == stage
    assert type(first[1]) is type(again[1]) is error
    assert str(first[1]) == str(again[1])
    assert first[1] is not again[1], "a new exception each time: pytest keeps a traceback in it"


def test_an_unknown_patch_mode(tmp_path: Path) -> None:
    stage, error, _ = verdict(make_run(tmp_path, LINEAR), "torch-export", "nonne")
    assert stage == "patch"
    assert "did you mean 'none'?" in str(error)


def test_a_call_that_a_user_catches_is_no_failure(tmp_path: Path) -> None:
    text = """
    def build_model():
        return nn.Linear(2, 2)


    def calls(model):
        model(torch.ones(3, 2))
        try:
            model(torch.ones(3, 5))
        except RuntimeError:
            pass
        model(torch.ones(4, 2))
    """
    assert verdict(make_run(tmp_path, text), "torch-export")[0] == "pass"


def test_a_random_model_is_blamed_at_observe(tmp_path: Path) -> None:
    text = source("x):\nreturn x + torch.rand(x.shape)", "[((torch.ones(2, 2),), {})]")
    stage, error, _ = verdict(make_run(tmp_path, text), "torch-export")
    assert stage == "observe"
    assert "eager disagrees with itself on call 0" in str(error)


def test_hooks_of_the_model_itself_are_no_failure_of_an_exporter(tmp_path: Path) -> None:
    """They run around the recorded `forward`, and are part of what is exported."""
    text = """
    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)


    def build_model():
        net = nn.Linear(2, 2)
        net.register_forward_hook(lambda module, args, output: output * 2)
        return net


    def calls():
        return [((torch.ones(n, 2),), {}) for n in (3, 5)]
    """
    stage, error, _ = verdict(make_run(tmp_path, text), "torch-export")
    assert stage == "observe"
    assert "Linear has forward hooks of its own" in str(error)
    wrapped = make_run(tmp_path, text.replace("return net\n", "return Wrapped(net)\n"), name="wrapped")
    stage, error, _ = verdict(wrapped, "torch-export")
    assert stage == "pass", error


# stand-ins

MASKED = source(
    "x, mask=None):\nreturn x if mask is None else x * mask",
    "[((torch.ones(2, 3),), {}), ((torch.ones(4, 3),), {'mask': torch.zeros(4, 3)})]",
)


def test_a_stand_in_that_changes_the_answer_is_not_the_exporters_fault(tmp_path: Path) -> None:
    wrong = 'observe: {calls: "net.py:calls", value_if_missing: {mask: "float32[x_dim_0, 3] = 0"}}\n'
    stage, error, _ = verdict(make_run(tmp_path, MASKED, wrong), "torch-export")
    assert stage == "observe", error
    assert "call 0 lacks mask; with what stands in for it" in str(error)
    assert "eager itself answers differently" in str(error)


def test_a_stand_in_that_eager_refuses_is_not_the_exporters_fault(tmp_path: Path) -> None:
    refused = 'observe: {calls: "net.py:calls", value_if_missing: {mask: "float32[7, 3] = 1"}}\n'
    stage, error, _ = verdict(make_run(tmp_path, MASKED, refused), "onnx-dynamo")
    assert stage == "observe", error
    assert "eager" in str(error)


def test_a_stand_in_of_another_call_than_the_failing_one_is_blamed(tmp_path: Path) -> None:
    """The program is exported from call 1 with a wrong stand-in, and fails on call 0 already."""
    text = source(
        "x, mask=None):\nreturn x * (mask.shape[1] if mask is not None else 1)",
        "[((torch.ones(2, 3),), {'mask': torch.ones(2, 1)}), ((torch.ones(4, 5),), {})]",
    )
    wrong = (
        'observe: {calls: "net.py:calls", example: 1, value_if_missing: {mask: "float32[x_dim_0, 2] = 1"}}\n'
    )
    for exporter in ("torch-export", "onnx-dynamo"):
        stage, error, _ = verdict(make_run(tmp_path, text, wrong), exporter)
        assert stage == "observe", error
        assert "call 1 lacks mask" in str(error)


def test_a_right_stand_in_passes(tmp_path: Path) -> None:
    right = 'observe: {calls: "net.py:calls", value_if_missing: {mask: "float32[x_dim_0, 3] = 1"}}\n'
    for exporter in ("torch-export", "onnx-dynamo"):
        stage, error, _ = verdict(make_run(tmp_path, MASKED, right), exporter)
        assert stage == "pass", error


def test_groups_of_calls_are_programs_of_their_own(tmp_path: Path) -> None:
    groups = 'observe: {calls: "net.py:calls", batch_dims: true, graphs: {plain: [0], masked: [1]}}\n'
    run = make_run(tmp_path, MASKED, groups)
    for name in ("plain", "masked"):
        stage, error, record = verdict(run, "onnx-dynamo", graph=name)
        assert stage == "pass", error
        assert record["calls"] == 1
    text = run.observe("cpu", "float32").golden_text("p")
    assert "  plain:\n    inputs:\n" in text
    assert "  masked:\n    inputs:\n" in text
    wrong = 'observe: {calls: "net.py:calls", graphs: {plain: [7]}}\n'
    stage, error, _ = verdict(make_run(tmp_path, MASKED, wrong), "onnx-dynamo", graph="plain")
    assert stage == "observe"
    assert "observe.graphs.plain names call 7" in str(error)


# sizes


def test_sizes_of_the_spec(tmp_path: Path) -> None:
    _, _, record = verdict(make_run(tmp_path, LINEAR, "resize: {input_dim_0: [1, 9]}\n"), "torch-export")
    assert record["resize"]["passed"] == ["input_dim_0=1", "input_dim_0=9"]
    stage, error, _ = verdict(make_run(tmp_path, LINEAR, "resize: {batch: [1]}\n"), "torch-export")
    assert stage == "observe"  # before any export
    assert "resize names batch, the symbols of the graph are input_dim_0" in str(error)
    _, _, record = verdict(make_run(tmp_path, LINEAR, "resize: off\n"), "torch-export")
    assert "resize" not in record


def test_sizes_that_no_memory_holds(tmp_path: Path) -> None:
    for size in (10**14, 10**24):
        run = make_run(tmp_path, LINEAR, f"resize: {{input_dim_0: [{size}]}}\n")
        stage, error, _ = verdict(run, "torch-export")
        assert stage == "resize"
        assert f"no inputs of sizes input_dim_0={size} can be made" in str(error)


@pytest.mark.parametrize("refusal", ["ValueError", "SystemExit"])
def test_sizes_that_eager_refuses_are_listed_not_judged(refusal: str, tmp_path: Path) -> None:
    text = source(
        f"x):\nif x.shape[0] > 6:\n    raise {refusal}('too long')\nreturn x + 1",
        "[((torch.ones(n, 2),), {}) for n in (3, 5)]",
    )
    stage, error, record = verdict(make_run(tmp_path, text), "onnx-torchscript")
    assert stage == "pass", error
    assert record["resize"]["passed"]
    assert any("too long" in line for line in record["resize"]["refused_by_eager"])


def test_a_program_that_is_right_on_the_observed_sizes_only(tmp_path: Path) -> None:
    """The tracer bakes the number of rows: the calls agree, other sizes do not."""
    text = source(
        "x):\nreturn x * float(min(x.shape[0], 4) == 4)", "[((torch.ones(n, 2),), {}) for n in (4, 5)]"
    )
    stage, error, _ = verdict(make_run(tmp_path, text), "onnx-torchscript")
    assert stage == "resize", error
    assert "which no observed call had" in str(error)


@pytest.mark.parametrize("names", [("x", "attention_mask"), ("src", "src_mask"), ("labels", "x")])
def test_batches_of_inputs_of_any_name_are_resized_together(tmp_path: Path, names: tuple[str, str]) -> None:
    """Resized alone to 1, one of them would broadcast in eager, and the guard of the program be blamed."""
    first, second = names
    text = source(
        f"{first}, {second}):\nreturn {first} * {second}",
        "[((torch.ones(n, n + 3), torch.ones(n, n + 3)), {}) for n in (2, 4)]",
    )
    run = make_run(tmp_path, text)
    for exporter in ("torch-export", "onnx-dynamo"):
        stage, error, _ = verdict(run, exporter)
        assert stage == "pass", error
    assert "batch" in run.observe("cpu", "float32").graphs[None].shapes.symbols


def test_names_of_inputs_do_not_collide(tmp_path: Path) -> None:
    text = source(
        "x, x_0):\nreturn x[0] - 2 * x_0",
        "[(([torch.ones(n, 2)], torch.full((n, 2), 3.0)), {}) for n in (3, 5)]",
    )
    for exporter in ("onnx-torchscript", "onnx-dynamo"):
        stage, error, _ = verdict(make_run(tmp_path, text), exporter)
        assert stage == "pass", error


# padding


def test_a_difference_at_padded_positions_only_says_so(tmp_path: Path) -> None:
    from pytest_exportcheck.checks.compare import Tolerances
    from pytest_exportcheck.checks.numbers import _only_padding

    mask = torch.tensor([[0, 1, 1]])
    expected = torch.zeros(1, 3, 2)
    got = expected.clone()
    got[0, 0] = 5.0
    text = _only_padding([("y", expected)], [("y", got)], {"attention_mask": mask}, Tolerances())
    assert text is not None
    assert "only where attention_mask is 0" in text
    assert "compare: {y: {where: attention_mask}}" in text
    got[0, 1] = 5.0
    assert _only_padding([("y", expected)], [("y", got)], {"attention_mask": mask}, Tolerances()) is None


def test_a_mask_that_leaves_nothing_to_compare_is_no_pass(tmp_path: Path) -> None:
    text = source(
        "x, attention_mask):\nreturn x + attention_mask",
        "[((torch.ones(n, 3), torch.MASK(n, 3)), {}) for n in (2, 4)]",
    )
    extra = 'observe: {calls: "net.py:calls", batch_dims: true}\ncompare: {output: {where: attention_mask}}\n'
    stage, error, _ = verdict(make_run(tmp_path, text.replace("MASK", "zeros"), extra), "torch-export")
    assert stage == "observe"
    assert "nothing of output is compared: attention_mask" in str(error)
    assert verdict(make_run(tmp_path, text.replace("MASK", "ones"), extra), "torch-export")[0] == "pass"


# exporters that leave traces


def test_a_model_changed_by_an_exporter_is_not_held_against_the_next_one(tmp_path: Path) -> None:
    def weights(model: torch.nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.5)

    def refused(model: torch.nn.Module) -> None:
        model.half()
        raise ValueError("refused")

    vandals = {"weights": weights, "half": lambda model: model.half(), "refused": refused}
    run = make_run(tmp_path, LINEAR)
    for name, vandal in vandals.items():

        class Vandal:
            def export(self, request: ExportRequest, vandal: Any = vandal) -> Exported:
                vandal(request.model)
                return Exported(request.model)

        exporter = Vandal()
        exporter.name = name  # type: ignore[attr-defined]
        EXPORTERS.register(name, exporter)
        try:
            stage, error, _ = verdict(run, name)
        finally:
            EXPORTERS.unregister(name)
        assert stage == "export"
        assert ("refused" if name == "refused" else f"{name} changed the model in place") in str(error)
        stage, error, _ = verdict(run, "torch-export")
        assert stage == "pass", error


# shapes


def test_the_shapes_check(tmp_path: Path) -> None:
    observed = make_run(tmp_path, LINEAR).observe("cpu", "float32")
    with pytest.raises(ShapesError, match=r"g\.yaml does not exist") as caught:
        check_shapes(observed, None, "g.yaml")
    proposed = "\n".join(caught.value.details[1:]) + "\n"
    assert proposed == observed.golden_text("g.yaml")
    check_shapes(observed, proposed, "g.yaml")
    changed = proposed.replace("[input_dim_0, 4]", "[2, 4]")
    with pytest.raises(ShapesError, match=r"inferred dynamic shapes differ from g\.yaml") as caught:
        check_shapes(observed, changed, "g.yaml")
    assert "-   input: float32[2, 4]" in caught.value.details
    assert "+   input: float32[input_dim_0, 4]" in caught.value.details
    assert any(
        "axis 0 was 2, is now dynamic (sizes [2, 5] in 2 calls)" in line for line in caught.value.details
    )
    with pytest.raises(ShapesError, match="not YAML"):
        check_shapes(observed, "a: [", "g.yaml")


CACHED = """
    from transformers import DynamicCache


    class Net(nn.Module):
        def forward(self, x, cache):
            return x + sum(layer.keys.sum() for layer in cache.layers)


    def build_model():
        return Net()


    def calls():
        made = []
        for batch, length in BATCHES:
            cache = DynamicCache()
            if length:
                cache.update(torch.ones(batch, 1, length, 2), torch.ones(batch, 1, length, 2), 0)
            made.append(((), {"x": torch.ones(batch, 3), "cache": cache}))
        return made
"""


@pytest.mark.parametrize(
    ("kept", "lengths"), [(4, [3, 4, 5]), (1, [3, 4])]
)  # the last call shows nothing new
def test_the_note_on_a_leaf_of_a_cache_counts_the_calls_that_have_it(
    tmp_path: Path, kept: int, lengths: list[int]
) -> None:
    source = CACHED.replace("BATCHES", "[(2, 0), (2, 3), (2, 4), (2, 5)]")
    observe = f'observe: {{calls: "net.py:calls", store_n_calls: {kept}}}\n'
    observed = make_run(tmp_path, source, observe).observe("cpu", "float32")
    golden = observed.golden_text("g.yaml")
    key = next(line for line in golden.splitlines() if line.strip().startswith("key:"))
    for was, now, note in (
        ("[2, ", "[batch, ", f"axis 0 was dynamic, is now 2 (sizes {[2] * len(lengths)} in"),
        (", past, ", ", 3, ", f"axis 2 was 3, is now dynamic (sizes {lengths} in {len(lengths)} calls)"),
    ):
        accepted = key.replace(was, now)
        assert accepted != key
        with pytest.raises(ShapesError) as caught:
            check_shapes(observed, golden.replace(key, accepted), "g.yaml")
        assert f"cache.layers.0.keys: {note}" in "\n".join(caught.value.details)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_an_axis_that_froze_may_be_accepted_or_observed_at_another_size(tmp_path: Path, count: int) -> None:
    source = f"""
        class Net(nn.Module):
            def forward(self, **parts):
                return sum(part.sum() for part in parts.values())


        def build_model():
            return Net()


        def calls():
            return [((), {{f"x{{k}}": torch.ones(n, 6) for k in range({count})}}) for n in (2, 3)]
    """
    observed = make_run(tmp_path, source).observe("cpu", "float32")
    golden = observed.golden_text("g.yaml")
    with pytest.raises(ShapesError) as caught:
        check_shapes(observed, golden.replace(", 6]", ", seq]"), "g.yaml")
    said, remedy = caught.value.details[-2:]
    names = {1: "x0", 2: "x0, x1", 5: "x0, x1, x2 and 2 more"}[count]
    assert said == f"{names}: axis 1 was dynamic, is now 6 (sizes [6, 6] in 2 calls)"
    axes = ", ".join(f"axis 1 of x{k}" for k in range(min(count, 3))) + (" and 2 more" if count == 5 else "")
    it, size = ("it", "size") if count == 1 else ("they", "size each")
    assert remedy.startswith(f"if {it} shall stay dynamic, observe another size: ")
    assert remedy.endswith(f"let a call of net.yaml:3 give {axes} another {size}")
    with pytest.raises(ShapesError) as caught:
        check_shapes(observed, re.sub(r"\[\w+, 6\]", "[2, 6]", golden), "g.yaml")
    assert not any("another size" in line for line in caught.value.details), "nothing froze"


SPOILING = (
    LINEAR
    + """

    from pytest_exportcheck.patches.modes import PatchList

    class Spoils(PatchList):
        def prepared(self, observed):
            with torch.no_grad():
                next(observed.module.parameters()).add_(1)
            return self

    mode = Spoils("spoils", [])
"""
)


def test_a_mode_that_changes_the_model_while_it_is_made_fails_every_case_and_reaches_none(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path, SPOILING)
    before = run.model("cpu", "float32").state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    for exporter in ("torch-export", "torch-export-strict"):
        stage, error, _ = verdict(run, exporter, "net.py:mode")
        assert stage == "patch", error
        assert "changed the model" in str(error)
    stage, error, _ = verdict(run, "torch-export")
    assert stage == "pass", error
    assert all(torch.equal(run.model("cpu", "float32").state_dict()[name], before[name]) for name in before)
