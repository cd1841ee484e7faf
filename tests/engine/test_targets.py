"""`observe.target`: a submodule, a method, or several, observed inside the calls of the whole model."""

from __future__ import annotations

import textwrap

import pytest
import torch

from pytest_exportcheck.checks.golden import load_dynamic_shapes, parse_golden
from pytest_exportcheck.errors import ObserveError
from pytest_exportcheck.observe import ObserverWarning
from pytest_exportcheck.pipeline import check_shapes
from pytest_exportcheck.plan import export_cases

from .helpers import make_run, verdict

MODEL = """
    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(4, 3)

        def forward(self, pixels, *, scale=1.0):
            return self.proj(pixels) * scale

        def features(self, pixels):
            return {"mean": self.proj(pixels).mean(1), "first": pixels[:, 0]}


    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.vision = Tower()
            self.text = nn.ModuleList([nn.Embedding(9, 3)])
            self.unused = nn.Linear(2, 2)

        def forward(self, ids, pixels=None):
            x = self.text[0](ids)
            if pixels is not None:
                # Data-dependent: the whole cannot be exported, its parts can.
                if pixels.sum() > 0:
                    pixels = -pixels
                x = x + self.vision(pixels, scale=2.0).mean(1, keepdim=True)
            return x

        def describe(self, pixels):
            return self.vision.features(pixels)


    def build_model():
        torch.manual_seed(0)
        return Both()
"""

CALLS = """
calls:
    - forward: {ids: "int64[batch, seq] < 9", pixels: "float32[batch, images, 4]"}
      dims: {batch: 2, seq: 5, images: 3}
    - forward: {ids: "int64[batch, seq] < 9", pixels: "float32[batch, images, 4]"}
      dims: {batch: 3, seq: 4, images: 6}
    - {forward: {ids: "int64[batch, seq] < 9"}, dims: {batch: 4, seq: 7}}
"""


def run_of(folder, target, more="", calls=CALLS, model=MODEL):
    body = textwrap.indent(f"dims: [batch, seq, images]\n{calls.strip()}\ntarget: {target}\n{more}", "  ")
    return make_run(folder, model, f"observe:\n{body}")


def leaves(graph):
    return {path: str(leaf) for path, leaf in graph.shapes.leaves.items()}


def test_a_submodule_is_observed_inside_the_calls_of_the_model(tmp_path):
    run = run_of(tmp_path, "vision")
    assert [case.label() for case in export_cases(run.spec)] == [
        "cpu-float32-torch-export-none",
        "cpu-float32-onnx-dynamo-none",
    ]
    graph = run.observe("cpu", "float32").graphs[None]
    assert graph.target.text == "vision (Tower.forward)"
    assert [call.index for call in graph.calls] == [0, 1]  # the third call has no image
    # Named by what was seen: the names of the spec belong to the arguments of the model.
    assert leaves(graph)["pixels"].startswith("float32[")
    assert "images" not in leaves(graph)["pixels"]
    torch.testing.assert_close(graph.eager(graph.calls[0].arguments), graph.calls[0].outputs)
    assert not graph.target.accepts({"pixels": torch.zeros(2, 3, 5)})
    assert verdict(run, "torch-export")[:2] == ("pass", None)
    assert verdict(run, "onnx-dynamo")[:2] == ("pass", None)


def test_the_whole_model_keeps_its_named_dims(tmp_path):
    run = run_of(tmp_path, "':forward'", "graphs: {image: [0, 1], plain: [2]}")
    graphs = run.observe("cpu", "float32").graphs
    assert leaves(graphs["image"]) == {
        "ids": "int64[batch, seq]",
        "pixels": "float32[batch, images, 4]",
    }


def test_a_method_of_a_submodule(tmp_path):
    calls = """
calls:
    - {forward: {pixels: "float32[2, 3, 4]"}}
    - {forward: {pixels: "float32[4, 3, 4]"}}
method: describe
"""
    run = run_of(tmp_path, "vision:features", calls=calls)
    graph = run.observe("cpu", "float32").graphs[None]
    assert graph.target.method == "features"
    assert [path for path, _ in graph.calls[0].output_leaves()] == ["mean", "first"]
    assert verdict(run, "torch-export")[:2] == ("pass", None)
    assert verdict(run, "onnx-dynamo")[:2] == ("pass", None)
    assert "forward" not in vars(graph.target.module)


SEVERAL = "{vision: vision, projection: vision.proj, words: text.0}"


def test_several_targets_are_graphs(tmp_path):
    run = run_of(tmp_path, SEVERAL)
    assert [case.label() for case in export_cases(run.spec)][:3] == [
        "cpu-float32-torch-export-none-vision",
        "cpu-float32-torch-export-none-projection",
        "cpu-float32-torch-export-none-words",
    ]
    seen = run.observe("cpu", "float32")
    assert {name: len(graph.calls) for name, graph in seen.graphs.items()} == {
        "vision": 2,
        "projection": 2,
        "words": 3,
    }
    assert len(seen.calls) == 7
    for name in seen.graphs:
        for exporter in ("torch-export", "onnx-dynamo"):
            assert verdict(run, exporter, graph=name)[:2] == ("pass", None), (name, exporter)


def test_a_golden_has_a_section_for_each_target(tmp_path):
    seen = run_of(tmp_path, SEVERAL).observe("cpu", "float32")
    text = seen.golden_text("golden.yaml")
    assert list(parse_golden(text)) == ["vision", "projection", "words"]
    check_shapes(seen, text, "golden.yaml")
    (tmp_path / "golden.yaml").write_text(text)
    shapes = load_dynamic_shapes(tmp_path / "golden.yaml", "vision")
    assert list(shapes["pixels"]) == [0, 1]


def test_the_whole_fails_where_its_parts_pass(tmp_path):
    run = run_of(tmp_path, "{whole: ':forward', words: text.0}", calls=CALLS.rsplit("\n    -", 1)[0])
    assert verdict(run, "torch-export", graph="whole")[0] == "export"
    assert verdict(run, "torch-export", graph="words")[0] == "pass"
    # The next case finds the model as it was.
    assert verdict(run, "onnx-dynamo", graph="words")[0] == "pass"


def test_a_patched_method_is_gone_afterwards(tmp_path):
    seen = run_of(tmp_path, SEVERAL).observe("cpu", "float32")
    assert not any("forward" in vars(module) for module in seen.model.modules())


def test_a_target_that_disagrees_with_itself_is_no_exporters_fault(tmp_path):
    model = MODEL.replace("return self.proj(pixels) * scale", "return self.proj(pixels) + torch.rand(1)")
    run = run_of(tmp_path, SEVERAL, model=model)
    with pytest.raises(ObserveError, match=r"eager disagrees with itself on call 0 \(vision\)"):
        run.observe("cpu", "float32").graph("vision")
    assert verdict(run, "torch-export", graph="vision")[0] == "observe"
    assert verdict(run, "torch-export", graph="projection")[0] == "pass"


def test_batch_dims_are_for_every_target(tmp_path):
    calls = '\ncalls: [{forward: {ids: "int64[2, 5] < 9", pixels: "float32[2, 3, 4]"}}]\nbatch_dims: true\n'
    seen = run_of(tmp_path, SEVERAL, calls=calls).observe("cpu", "float32")
    assert [leaf for graph in seen.graphs.values() for leaf in leaves(graph).values() if "[" in leaf] == [
        "float32[batch, 3, 4]",
        "float32[batch, 3, 4]",
        "int64[batch, 5]",
    ]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("visoin", r"net.yaml:11: Both has no submodule 'visoin' \(did you mean 'vision'\?\)"),
        ("tower.proj", r"has no submodule 'tower.proj' \(did you mean 'vision.proj'\?\)"),
        ("vision.qqqqqqqqqq", r"has no submodule 'vision.qqqqqqqqqq' \(vision has vision.proj\)"),
        ("qqqqqqqq", r"no submodule 'qqqqqqqq' \(it has vision, text, unused\)"),
        ("text.1", r"no submodule 'text.1' \(did you mean 'text.0' or 'text'\?\)"),
        ("vision:feature", r"Tower has no method 'feature' \(did you mean 'features'\?\)"),
        ("{a: vision, b: visio}", r"net.yaml:11: Both has no submodule 'visio' "),
        ("unused", r"net.yaml:11: no call of unused \(Linear.forward\) was recorded: the calls"),
        ("{a: vision, b: unused}", r"net.yaml:11: no call of unused \(Linear.forward\) was recorded"),
        ("vision:features", r"no call of vision \(Tower.features\) was recorded"),
    ],
)
def test_what_cannot_be_observed_is_named(tmp_path, target, message):
    run = run_of(tmp_path, target)
    with pytest.raises(ObserveError, match=message):
        run.observe("cpu", "float32").graph("b")
    if target.startswith("{"):
        assert verdict(run, "torch-export", graph="b")[0] == "observe"
        assert verdict(run, "torch-export", graph="a")[0] == "pass"


def test_a_module_with_hooks_is_refused(tmp_path):
    model = MODEL.replace(
        "return Both()", "model = Both(); model.vision.register_forward_hook(print); return model"
    )
    with pytest.raises(ObserveError, match="vision has forward hooks of its own"):
        run_of(tmp_path, "vision", model=model).observe("cpu", "float32")


def test_what_one_program_cannot_serve_names_the_target(tmp_path):
    model = MODEL.replace("scale=2.0", "scale=float(len(ids))")
    seen = run_of(tmp_path, SEVERAL, model=model).observe("cpu", "float32")
    assert list(seen.graphs) == ["projection", "words"]
    with pytest.raises(ObserveError, match=r"target vision, .*scale") as failure:
        seen.graph("vision")
    proposal = failure.value.details[1].strip()
    assert proposal == "vision: {path: 'vision', graphs: {graph_0: [0], graph_1: [1]}}"
    # And what is proposed works.
    run = run_of(tmp_path, SEVERAL.replace("vision: vision", proposal), model=model)
    with pytest.warns(ObserverWarning, match="only one call"):
        graphs = run.observe("cpu", "float32").graphs
    assert list(graphs) == ["vision.graph_0", "vision.graph_1", "projection", "words"]


def test_one_target_has_stand_ins_and_ignored_calls(tmp_path):
    model = MODEL.replace("scale=1.0", "bias=None").replace("* scale", "+ (0 if bias is None else bias)")
    model = model.replace("scale=2.0", "**({'bias': torch.zeros(1, 3)} if len(ids) == 2 else {})")
    more = 'value_if_missing: {bias: "float32[1, 3] = 0"}'
    run = run_of(tmp_path, "vision", more, model=model)
    assert leaves(run.observe("cpu", "float32").graphs[None])["bias"] == "float32[1, 3]"
    assert verdict(run, "torch-export")[:2] == ("pass", None)
    with pytest.raises(ObserveError, match="the target has no argument 'ids'"):
        run_of(tmp_path, "vision", more.replace("bias", "ids"), model=model).observe("cpu", "float32")
    with pytest.warns(ObserverWarning, match="only one call"):
        seen = run_of(tmp_path, "vision", "ignore_calls: [1]", model=model).observe("cpu", "float32")
    assert [call.index for call in seen.graphs[None].calls] == [0]


def test_calls_beyond_the_limit_name_the_target(tmp_path):
    with pytest.warns(
        ObserverWarning, match=r"3 calls of text.0 \(Embedding.forward\) were made and the first 2"
    ):
        run_of(tmp_path, SEVERAL, "store_n_calls: 2").observe("cpu", "float32")
