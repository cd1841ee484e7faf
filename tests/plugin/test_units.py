"""Small parts of the plugin by themselves: registry, stage markers, planning."""

from __future__ import annotations

import pytest

from pytest_exportcheck.cases import CaseId
from pytest_exportcheck.crashes import StageMarker, StageMarkers
from pytest_exportcheck.expectations import expectation_for, expectation_problems
from pytest_exportcheck.plan import export_cases, marker, marker_names
from pytest_exportcheck.registry import EXPORTERS, PATCH_MODES, Registry, brings_patches
from pytest_exportcheck.spec import load_spec

CASE = CaseId("s.yaml", "onnx-dynamo", "none", "cpu", "float32", "decode")


def test_registry_finds_loads_and_forgets():
    registry = Registry("thing", "no.such.group", {"path": "pathlib:PurePath", "value": "math:pi"})
    assert registry.names() == ["path", "value"]
    registry.register("extra", "collections:OrderedDict")
    registry.register("another", [1])
    assert registry.names() == ["path", "value", "another", "extra"]
    assert registry.load("extra") == {}
    assert registry.load("another") == [1]
    assert registry.load("path") is registry.load("path")
    assert registry.load("value") > 3
    registry.unregister("extra")
    with pytest.raises(LookupError, match=r"'pat' \(did you mean 'path'\?\); known: path, value"):
        registry.load("pat")


def test_entry_points_and_built_ins_agree():
    from importlib.metadata import entry_points

    for registry in (EXPORTERS, PATCH_MODES):
        points = {point.name: point.value for point in entry_points(group=registry.group)}
        assert {name: points.get(name, path) for name, path in registry.builtin.items()} == registry.builtin


def test_who_brings_patches():
    assert brings_patches("transformers-onnx")
    assert not brings_patches("onnx-dynamo")


def test_stage_markers_are_replaced_read_and_cleared(tmp_path):
    markers = StageMarkers(tmp_path, "gw0")
    assert markers.read() is None
    for stage in ("load", "export"):
        markers.write(StageMarker("s.yaml::t", CASE, stage, "s.yaml", 2))
    assert markers.read() == StageMarker("s.yaml::t", CASE, "export", "s.yaml", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["gw0"]
    markers.clear()
    assert markers.read() is None
    (tmp_path / "gw0").write_text('{"nodeid": 1}')
    assert markers.read() is None
    StageMarkers(tmp_path / "gone", "gw0").write(StageMarker("s.yaml::t", CASE, "load", "s.yaml", 2))


def test_marker_names():
    assert marker_names(CASE) == ["exporter_onnx_dynamo", "patch_none", "device_cpu", "dtype_float32"]
    assert marker("exporter", "my.exporter/2") == "exporter_my_exporter_2"


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ("decoder", ["decoder.prefill", "decoder.decode"]),
        ("decoder.prefill", ["decoder.prefill"]),
        ("[tower, decoder.decode]", ["tower", "decoder.decode"]),
    ],
)
def test_an_expectation_names_a_target_or_a_graph_of_it(tmp_path, graph, expected):
    path = tmp_path / "a.yaml"
    path.write_text(
        "exportcheck: 1\nmodel: {factory: 'a:b'}\n"
        "observe: {calls: [forward: {}], target: {tower: t, decoder: {path: d, graphs: {prefill: [0], "
        "decode: [1]}}}}\n"
        "matrix: {exporters: [torch-export]}\n"
        f"expect: [{{when: {{graph: {graph}}}, fails: export, reason: r}}]\n"
    )
    spec = load_spec(path, tmp_path)
    assert expectation_problems(spec) == []
    cases = export_cases(spec)
    assert [case.graph for case in cases] == ["tower", "decoder.prefill", "decoder.decode"]
    assert [case.graph for case in cases if expectation_for(spec, case)] == expected


@pytest.mark.parametrize(("given", "kept"), [(None, "100000"), ("2", "2")])
def test_restarts_are_unlimited_unless_the_user_limits_them(given, kept):
    from types import SimpleNamespace

    from pytest_exportcheck.xdist_support import choose_distribution

    option = SimpleNamespace(numprocesses=2, dist="no", distload=False, maxworkerrestart=given)
    choose_distribution(SimpleNamespace(option=option))
    assert option.maxworkerrestart == kept
    assert option.dist == "loadscope"
