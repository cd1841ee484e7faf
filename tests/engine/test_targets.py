"""`observe.target`: a submodule, a method, or several, observed inside the calls of the whole model."""

from __future__ import annotations

import re
import textwrap

import pytest
import torch

from pytest_exportcheck.checks.golden import load_dynamic_shapes, parse_golden, render_golden
from pytest_exportcheck.errors import ObserveError, ShapesError
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
        ObserverWarning, match=r"3 calls of text.0 \(Embedding.forward\) were made: the shapes of all"
    ):
        run_of(tmp_path, SEVERAL, "store_n_calls: 2").observe("cpu", "float32")


# several targets, each with rules of its own

RULES = """
        class Part(nn.Module):
            def __init__(self):
                super().__init__()
                self.proj = nn.Linear(4, 4)

            def forward(self, x, bias=None, scale=1.0):
                x = self.proj(x) * scale
                return x if bias is None else x + bias

        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.two, self.three = Part(), Part(), Part()
                self.same = self.three

            def forward(self, x, first=True):
                # `one` is called twice a call, with a constant that differs; `two` lacks its bias once.
                x = self.one(x, scale=2.0) + self.one(x, scale=3.0)
                x = self.two(x, torch.ones(len(x), 1, 4)) if first else self.two(x)
                return self.same(self.three(x))

        def build_model():
            torch.manual_seed(0)
            return Twice()
"""

RULES_CALLS = """
calls:
    - {forward: {x: "float32[2, 3, 4]"}}
    - {forward: {x: "float32[4, 5, 4]", first: false}}
"""

FULL = """
    one: {path: one, graphs: {double: [0, 2], triple: [1, 3]}, example: {double: 2}}
    two: {path: two, value_if_missing: {bias: "float32[x_dim_0, 1, 4] = 0"}, example: 0}
    three: {path: three, ignore_calls: [3], batch_dims: [x], store_n_calls: 4}
"""


def rules_of(folder, target=FULL, more=""):
    return run_of(folder, target, more, RULES_CALLS, RULES)


def test_each_target_has_rules_of_its_own(tmp_path):
    run = rules_of(tmp_path)
    assert [case.label() for case in export_cases(run.spec)][:4] == [
        "cpu-float32-torch-export-none-one.double",
        "cpu-float32-torch-export-none-one.triple",
        "cpu-float32-torch-export-none-two",
        "cpu-float32-torch-export-none-three",
    ]
    seen = run.observe("cpu", "float32")
    assert {name: [call.index for call in graph.calls] for name, graph in seen.graphs.items()} == {
        "one.double": [0, 2],
        "one.triple": [1, 3],
        "two": [0, 1],
        "three": [0, 1, 2],
    }
    assert seen.graphs["one.double"].example.call == 2
    assert seen.graphs["two"].example.call == 0
    assert leaves(seen.graphs["two"])["bias"] == "float32[x_dim_0, 1, 4]"
    assert leaves(seen.graphs["three"])["x"] == "float32[batch, x_dim_1, 4]"
    for graph in seen.graphs:
        for exporter in ("torch-export", "onnx-dynamo"):
            assert verdict(run, exporter, graph=graph)[:2] == ("pass", None), (graph, exporter)


def test_a_golden_has_a_section_for_each_group_of_a_target(tmp_path):
    seen = rules_of(tmp_path).observe("cpu", "float32")
    text = seen.golden_text("golden.yaml")
    assert list(parse_golden(text)) == ["one.double", "one.triple", "two", "three"]
    check_shapes(seen, text, "golden.yaml")
    (tmp_path / "golden.yaml").write_text(text)
    assert list(load_dynamic_shapes(tmp_path / "golden.yaml", "one.triple")) == ["x"]


@pytest.mark.parametrize(
    ("target", "broken", "message"),
    [
        ("one: {path: one}\n    two: two.proj", ["one"], "target one, one .*: argument scale is a constant"),
        (
            "one: {path: one, graphs: {a: [0, 1], b: [2], c: [3]}}\n    two: two.proj",
            ["one.a"],
            "argument scale is a constant that differs",
        ),
        (
            "one: {path: one, graphs: {a: [0], b: [2]}}\n    two: two.proj",
            ["one.a", "one.b"],
            r"no graph of observe.target.one.graphs has calls 1, 3",
        ),
        (
            "one: {path: one, graphs: {a: [0, 2], b: [1, 3], c: [9]}}\n    two: two.proj",
            ["one.c"],
            r"observe.target.one.graphs.c names call 9, but 4 calls were recorded \(0 to 3\)",
        ),
        ("one: {path: one.proj, ignore_calls: [7]}\n    two: two.proj", ["one"], "ignore_calls names call 7"),
        (
            "one: {path: one.proj, example: 7}\n    two: two.proj",
            ["one"],
            r"net.yaml:9: example: there is no call 7 in this graph, which has 0, 1, 2, 3",
        ),
        (
            'one: {path: one.proj, value_if_missing: {inptu: "float32[1]"}}\n    two: two.proj',
            ["one"],
            r"net.yaml:9: the target has no argument 'inptu' \(did you mean 'input'\?\)",
        ),
        (
            'one: {path: two, value_if_missing: {bias: "float32[q + r, 1, 4]"}}\n    two: two.proj',
            ["one"],
            r"net.yaml:9: unknown dim 'q'",
        ),
        (
            'one: {path: two, value_if_missing: {bias: "float32[4] from none.npz:k"}}\n    two: two.proj',
            ["one"],
            r"net.yaml:9: \w+: .*none.npz",
        ),
        ("one: {path: four}\n    two: two.proj", ["one"], r"net.yaml:9: Twice has no submodule 'four'"),
        (
            "one: {path: three.proj:extra_repr}\n    two: two.proj",
            ["one"],
            r"no call of three.proj .* was recorded",
        ),
    ],
)
def test_a_broken_graph_fails_alone(tmp_path, target, broken, message):
    run = rules_of(tmp_path, f"\n    {target}\n")
    seen = run.observe("cpu", "float32")
    assert list(seen.failures) == broken
    assert "two" in seen.graphs
    for name in broken:
        stage, error, _ = verdict(run, "torch-export", graph=name)
        assert stage == "observe"
        assert re.search(message, error.message), error
    for name in seen.graphs:
        assert verdict(run, "torch-export", graph=name)[:2] == ("pass", None), name


def test_what_is_proposed_for_a_group_is_about_all_calls_of_the_target(tmp_path):
    one = "{path: one, graphs: {first: [0, 1, 2], rest: [3]}, example: {first: 1}}"
    target = f"\n    one: {one}\n    two: two.proj"
    failure = rules_of(tmp_path, target).observe("cpu", "float32").failures["one.first"]
    proposal = failure.details[1].strip()
    assert proposal == (
        "one: {path: 'one', graphs: {first: [0, 2], first_2: [1], rest: [3]}, example: {first_2: 1}}"
    )
    seen = rules_of(tmp_path, f"\n    {proposal}\n    two: two.proj").observe("cpu", "float32")
    assert list(seen.graphs) == ["one.first", "one.first_2", "one.rest", "two"]


BROKEN = "\n    one: one\n    two: two.proj\n    three: three.proj\n"
WHOLE = BROKEN.replace("one: one", "one: {path: one, graphs: {double: [0, 2], triple: [1, 3]}}")


def test_the_shapes_of_the_other_graphs_are_compared(tmp_path):
    good = rules_of(tmp_path, WHOLE).observe("cpu", "float32")
    golden = good.golden_text("golden.yaml")
    seen = rules_of(tmp_path, BROKEN).observe("cpu", "float32")
    # The sections of another grouping are obsolete, whatever is broken.
    with pytest.raises(ShapesError, match=r"differ from golden.yaml; graph one is broken \(1 of 3\)"):
        check_shapes(seen, golden, "golden.yaml")
    sections = parse_golden(golden)
    for name in ("one", None):
        kept = {n: sections["one.double" if n == "one" else n] for n in ("one", "two", "three") if n != name}
        accepted = render_golden(kept, "golden.yaml", "net.yaml")
        with pytest.raises(ObserveError, match=r"graph one is broken \(1 of 3\)") as failure:
            check_shapes(seen, accepted, "golden.yaml")
        assert failure.value.details[0] == "the other graphs have the shapes of golden.yaml"
        assert failure.value.details[1].startswith("one: target one, one (Part.forward): argument scale")
        assert "one: {path: 'one', graphs: {graph_0: [0, 2], graph_1: [1, 3]}}" in str(failure.value)
        changed = accepted.replace("float32[input_dim_0, input_dim_1, 4]", "float32[2, input_dim_1, 4]", 1)
        assert changed != accepted
        with pytest.raises(ShapesError, match=r"differ from golden.yaml; graph one is broken"):
            check_shapes(seen, changed, "golden.yaml")


def test_no_golden_is_made_of_a_part(tmp_path):
    seen = rules_of(tmp_path, BROKEN).observe("cpu", "float32")
    with pytest.raises(ObserveError, match="graph one is broken") as failure:
        seen.golden_text("golden.yaml")
    assert failure.value.details[0] == "golden.yaml is not written: it would lack a graph"
    with pytest.raises(ObserveError, match="graph one is broken") as failure:
        check_shapes(seen, None, "golden.yaml")
    text = str(failure.value)
    assert "golden.yaml does not exist, and is not written before every graph of it is there" in text
    assert "proposed content, so far:" in text
    assert "  two:\n    inputs:\n      input: float32[" in text


def test_a_call_that_raises_fails_every_graph(tmp_path):
    run = run_of(tmp_path, BROKEN, calls=RULES_CALLS.replace("[4, 5, 4]", "[4, 5, 7]"), model=RULES)
    for graph in ("one", "two", "three"):
        stage, error, _ = verdict(run, "torch-export", graph=graph)
        assert stage == "observe"
        assert "the forward call 1 raised" in str(error)


# targets that meet


def test_two_paths_of_one_module_see_the_calls_of_both(tmp_path):
    """A shared submodule called at two sites: each program serves every call of the module."""
    run = rules_of(tmp_path, "{three: three, same: same, inside: three.proj}")
    seen = run.observe("cpu", "float32")
    for name in ("three", "same", "inside"):
        assert [tuple(call.outputs.shape) for call in seen.graphs[name].calls] == [
            (2, 3, 4), (2, 3, 4), (4, 5, 4), (4, 5, 4)
        ]  # fmt: skip
        assert verdict(run, "torch-export", graph=name)[:2] == ("pass", None)
    calls = seen.graphs["three"].calls
    torch.testing.assert_close(calls[0].outputs, calls[1].arguments["x"])
    assert not any("forward" in vars(module) for module in seen.model.modules())


def test_inputs_that_a_target_changes_in_place_are_those_before_the_call(tmp_path):
    model = RULES.replace("x = self.proj(x) * scale", "x.mul_(0.5); x = self.proj(x) * scale")
    model = model.replace("self.same(self.three(x))", "self.same(self.three(x)) + x")
    run = run_of(
        tmp_path,
        "{two: two, three: three, proj: three.proj}",
        calls=RULES_CALLS.rsplit("\n    -", 1)[0],
        model=model,
    )
    seen = run.observe("cpu", "float32")
    inner, outer = seen.graphs["proj"].calls[0], seen.graphs["three"].calls[0]
    torch.testing.assert_close(inner.arguments["input"], outer.arguments["x"] * 0.5)
    torch.testing.assert_close(seen.graphs["three"].eager(outer.arguments), outer.outputs)
    for name in ("three", "proj"):
        assert verdict(run, "torch-export", graph=name)[:2] == ("pass", None)


def test_an_example_that_is_not_observed_is_an_error(tmp_path):
    run = rules_of(tmp_path, "three", "ignore_calls: [2]\nexample: 9")
    with pytest.raises(
        ObserveError, match=r"net.yaml:10: example: there is no call 9 in this graph, which has 0, 1, 3"
    ):
        run.observe("cpu", "float32")
