"""From a spec to graphs: which calls belong where, and what stands in for missing arguments."""

from __future__ import annotations

import warnings

import pytest
import torch

from pytest_exportcheck.errors import ObserveError
from pytest_exportcheck.observe import ObserverWarning
from pytest_exportcheck.pipeline import SpecRun
from pytest_exportcheck.spec import load_spec

from .helpers import rows, verdict

MODELS = """
import torch


class Masked(torch.nn.Module):
    def forward(self, x, mask=None):
        return x * 2 if mask is None else x * 2 + mask


class Loop(torch.nn.Module):
    def forward(self, x):
        return x + 1

    def generate(self, x, steps):
        for _ in range(steps):
            x = self(x)
        return x
"""


def observed(tmp_path, observe, model="Masked"):
    (tmp_path / "models.py").write_text(MODELS)
    path = tmp_path / "one.yaml"
    path.write_text(f'exportcheck: 1\nmodel: {{factory: "models.py:{model}"}}\nobserve:\n{observe}')
    return SpecRun(load_spec(path, tmp_path)).observe("cpu", "float32")


GENERATES = '  calls: [{generate: {x: "float32[2, 3]", steps: 4}}]\n'


def test_a_call_in_no_graph_is_an_error(tmp_path):
    with pytest.raises(
        ObserveError, match=r"4 calls were recorded \(0 to 3\), and no graph .* has calls 2, 3"
    ):
        observed(tmp_path, GENERATES + "  graphs: {first: [0, 1]}\n", "Loop")


def test_ignored_calls_are_left_out(tmp_path):
    seen = observed(tmp_path, GENERATES + "  graphs: {first: [0, 1]}\n  ignore_calls: [2, 3]\n", "Loop")
    assert [call.index for call in seen.graphs["first"].calls] == [0, 1]
    seen = observed(tmp_path, GENERATES + "  ignore_calls: [1]\n", "Loop")
    assert [call.index for call in seen.graphs[None].calls] == [0, 2, 3]
    with pytest.raises(ObserveError, match=r"ignore_calls names call 9, but 4 calls were recorded"):
        observed(tmp_path, GENERATES + "  ignore_calls: [9]\n", "Loop")


def test_calls_beyond_the_limit_are_said(tmp_path):
    said = r"one.yaml: 4 calls were made: the shapes of all count, the values of 2 are checked, 0, 1 \("
    with pytest.warns(ObserverWarning, match=said):
        observed(tmp_path, GENERATES + "  store_n_calls: 2\n", "Loop")


def test_calls_beyond_the_limit_count_by_their_shapes_and_stay_where_they_show_most(tmp_path):
    def calls(*shapes, more=""):
        made = "".join(f'    - {{forward: {{x: "float32{list(shape)}"}}}}\n' for shape in shapes)
        return f"  calls:\n{made}  store_n_calls: 2\n{more}"

    seen = observed(tmp_path, calls((2, 3), (2, 3), (2, 3), (4, 3)))
    assert [call.index for call in seen.graphs[None].calls] == [0, 3]
    assert rows(seen.graphs[None].shapes) == {"x": "float32[x_dim_0, 3]"}
    groups = "  graphs: {a: [0, 1, 2], b: [3]}\n"
    seen = observed(tmp_path, calls((2, 3), (2, 3), (2, 3), (4, 3), more=groups))
    assert [[call.index for call in graph.calls] for graph in seen.graphs.values()] == [[0], [3]]
    seen = observed(tmp_path, calls((2, 3), (4, 3), (2, 3, 1), more="  graphs: {a: [0, 1], b: [2]}\n"))
    assert list(seen.graphs) == ["a"]
    assert "the values of no call of this graph were kept (3 calls were made (0 to 2)): raise" in str(
        seen.failures["b"]
    )
    with pytest.raises(ObserveError, match=r"no graph of observe.graphs has call 2"):
        observed(tmp_path, calls((2, 3), (4, 3), (2, 3, 1), more="  graphs: {a: [0, 1]}\n"))
    with pytest.raises(ObserveError, match=r"argument x changes its rank: 2 in calls 0, 1; 3 in call 2"):
        observed(tmp_path, calls((2, 3), (4, 3), (2, 3, 1)))


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_values_that_are_kept_elsewhere_are_checked_all_the_same(tmp_path, place):
    seen = observed(tmp_path, GENERATES + f"  store: {place}\n", "Loop").graphs[None]
    plain = observed(tmp_path, GENERATES, "Loop").graphs[None]
    assert rows(seen.shapes) == rows(plain.shapes)
    for one, other in zip(seen.calls, plain.calls, strict=True):
        assert one.leaves().keys() == other.leaves().keys()
        assert all(torch.equal(value, other.leaves()[path]) for path, value in one.leaves().items())


def test_a_single_call_is_said(tmp_path):
    with pytest.warns(ObserverWarning, match="only one call was observed") as caught:
        observed(tmp_path, '  calls: [{forward: {x: "float32[2, 3]"}}]\n')
    # What there is to change is in the spec.
    (warning,) = caught
    assert warning.filename == str(tmp_path / "one.yaml")
    assert (tmp_path / "one.yaml").read_text().splitlines()[warning.lineno - 1] == "observe:"


TWO = (
    "  dims: [batch]\n"
    "  calls:\n"
    '    - {forward: {x: "float32[batch, 3]", mask: "float32[batch, 3] = 0"}, dims: {batch: 2}}\n'
    '    - {forward: {x: "float32[batch, 3]"}, dims: {batch: 4}}\n'
)


def test_a_stand_in_has_the_sizes_of_its_call(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        seen = observed(tmp_path, TWO + '  value_if_missing: {mask: "float32[batch, 3] = 0"}\n')
    graph = seen.graphs[None]
    assert str(graph.shapes.leaves["mask"]) == "float32[batch, 3]"
    assert graph.shapes.complete(graph.calls[1])["mask"].shape == (4, 3)


def test_an_unknown_dim_of_a_stand_in_is_named(tmp_path):
    with pytest.raises(
        ObserveError, match=r"one.yaml:8: unknown dim 'bacth' .*did you mean 'batch'.* batch=4"
    ):
        observed(tmp_path, TWO + '  value_if_missing: {mask: "float32[bacth, 3] = 0"}\n')


def test_a_stand_in_for_no_argument_is_an_error(tmp_path):
    with pytest.raises(
        ObserveError, match=r"one.yaml:8: the model has no argument 'masc' \(did you mean 'mask'\?\)"
    ):
        observed(tmp_path, TWO + '  value_if_missing: {masc: "float32[batch, 3] = 0"}\n')


def test_none_that_a_call_says_is_not_the_default(tmp_path):
    source = (
        "import torch\n\n\nclass Flag(torch.nn.Module):\n"
        "    def forward(self, x, flag=True):\n        return x * 2 if flag else x\n"
    )
    calls = '  calls: [{forward: {x: "float32[2, 3]"}}, {forward: {x: "float32[4, 3]", flag: null}}]\n'
    (tmp_path / "flag.py").write_text(source)
    path = tmp_path / "one.yaml"
    path.write_text(f'exportcheck: 1\nmodel: {{factory: "flag.py:Flag"}}\nobserve:\n{calls}')
    with pytest.raises(
        ObserveError, match=r"flag is a constant that differs .*True in call 0; None in call 1"
    ):
        SpecRun(load_spec(path, tmp_path)).observe("cpu", "float32")


FLAGS = (
    "  calls:\n"
    '    - {forward: {x: "float32[2, 3]"}}\n'
    '    - {forward: {x: "float32[4, 3]", k: 2}}\n'
    '    - {forward: {x: "float32[5, 3]", k: 3}}\n'
    '    - {forward: {x: "float32[6, 3]", k: 2}}\n'
)


def flagged(tmp_path, rules):
    (tmp_path / "flag.py").write_text(
        "import torch\n\n\nclass Flag(torch.nn.Module):\n"
        "    def forward(self, x, k=1):\n        return x * k + (torch.rand(1) if k == 3 else 0)\n"
    )
    path = tmp_path / "one.yaml"
    path.write_text(f'exportcheck: 1\nmodel: {{factory: "flag.py:Flag"}}\nobserve:\n{FLAGS}{rules}')
    return SpecRun(load_spec(path, tmp_path))


def test_a_broken_group_leaves_the_others(tmp_path):
    run = flagged(tmp_path, "  graphs: {mixed: [0, 1, 3], odd: [2]}\n")
    seen = run.observe("cpu", "float32")
    assert not seen.graphs
    assert "k is a constant that differs" in seen.failures["mixed"].message
    assert "eager disagrees with itself on call 2 (odd)" in seen.failures["odd"].message
    # What is proposed for one keeps the other.
    line = seen.failures["mixed"].details[1].strip()
    assert line == "observe: {graphs: {mixed: [0], mixed_2: [1, 3], odd: [2]}}"
    run = flagged(tmp_path, f"  {line.removeprefix('observe: {')[:-1]}\n")
    assert list(run.observe("cpu", "float32").graphs) == ["mixed", "mixed_2"]
    assert verdict(run, "torch-export", graph="mixed_2")[:2] == ("pass", None)
    stage, error, _ = verdict(run, "torch-export", graph="odd")
    assert (stage, error.message) == ("observe", seen.failures["odd"].message)


def test_a_call_that_nothing_serves_gets_no_proposal(tmp_path):
    with pytest.raises(ObserveError, match="unknown dim 'q'") as failure:
        observed(tmp_path, TWO + '  value_if_missing: {mask: "float32[q + r, 3] = 0"}\n')
    assert not any("graphs" in line for line in failure.value.details)
