"""Which files are collected, as what, and what a user sees when they cannot be."""

from __future__ import annotations


def test_node_ids(project):
    project.spec("llama", exporters=("torch-export", "onnx-dynamo"), matrix=", patch_modes: [none, hf]")
    result = project.run("--collect-only", "-q")
    result.stdout.fnmatch_lines(
        [
            "specs/llama.yaml::test_dynamic_shapes[[]cpu-float32[]]",
            "specs/llama.yaml::test_export[[]cpu-float32-torch-export-none[]]",
            "specs/llama.yaml::test_export[[]cpu-float32-torch-export-hf[]]",
            "specs/llama.yaml::test_export[[]cpu-float32-onnx-dynamo-none[]]",
            "specs/llama.yaml::test_export[[]cpu-float32-onnx-dynamo-hf[]]",
        ]
    )
    assert result.ret == 0


def test_graphs_are_cases_of_their_own(project):
    project.spec("whisper", observe="  graphs: {prefill: [0], decode: [1]}\n")
    result = project.run("--collect-only", "-q")
    result.stdout.fnmatch_lines(
        [
            "*::test_export[[]cpu-float32-torch-export-none-prefill[]]",
            "*::test_export[[]cpu-float32-torch-export-none-decode[]]",
        ]
    )


def test_an_exporter_with_its_own_patches_runs_once(project):
    project.spec("m", exporters=("transformers-onnx",), matrix=", patch_modes: [none, hf]")
    result = project.run("--collect-only", "-q")
    result.stdout.fnmatch_lines(
        ["*::test_export[[]cpu-float32-transformers-onnx-own[]]", "", "2 tests collected*"]
    )


def test_without_the_flag_yaml_is_left_alone(project):
    project.spec("llama")
    result = project.run(flag=False)
    assert result.ret == 5
    result.stdout.no_fnmatch_line("*exportcheck:*")


def test_other_yaml_and_goldens_are_left_alone(project):
    project.spec("llama")
    (project.pytester.path / "specs" / "other.yml").write_text("a: 1\n")
    result = project.run("--collect-only", "-q")
    result.stdout.fnmatch_lines(["2 tests collected*"])


def test_a_named_file_that_is_no_spec_is_an_error(project):
    project.spec("llama")
    (project.pytester.path / "other.yaml").write_text("a: 1\n")
    result = project.run("other.yaml", "specs/__shapes__/llama.yaml")
    result.stdout.fnmatch_lines(
        [
            "other.yaml is not a spec: its first key must be 'exportcheck: 1'",
            "specs/__shapes__/llama.yaml is a file of accepted shapes*",
        ]
    )
    assert result.ret != 0


def test_a_file_of_a_folder_that_mistypes_the_key_is_an_error(any_project):
    any_project.spec("good")
    typo = any_project.spec("typo")
    typo.write_text(typo.read_text().replace("exportcheck", "exportchek", 1))
    result = any_project.run()
    result.stdout.fnmatch_lines(
        ["specs/typo.yaml is not a spec: it begins with 'exportchek', the first key must be 'exportcheck: 1'"]
    )
    result.stdout.no_fnmatch_line("*obsolete*")
    assert result.ret != 0


def test_a_bad_spec_tells_every_problem_and_stops_nothing(any_project):
    any_project.spec("good")
    any_project.spec("bad", exporters=("onnx-dinamo",), more="tolerence: 3\n")
    result = any_project.run()
    result.stdout.fnmatch_lines(
        [
            "*ERROR collecting specs/bad.yaml*",
            "specs/bad.yaml:*:*: *onnx-dinamo*onnx-dynamo*",
            "specs/bad.yaml:*:*: *tolerence*tolerance*",
        ]
    )
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*collection.py*")
    result.assert_outcomes(passed=2, errors=1)
    assert result.ret == 1


def test_full_trace_does_not_show_our_frames_for_a_bad_spec(project):
    project.spec("bad", more="nonsense: 1\n")
    result = project.run("--full-trace")
    result.stdout.no_fnmatch_line("*collection.py*")


def test_python_functions_of_the_user_does_not_hide_the_suite(project):
    project.spec("llama")
    project.pytester.makeini("[pytest]\npython_functions = check_*\n")
    project.run().assert_outcomes(passed=2)


def test_a_user_test_gets_the_cases_of_the_specs_it_names(any_project):
    any_project.spec("a", exporters=("torch-export", "onnx-dynamo"))
    any_project.spec("b")
    any_project.pytester.makepyfile(
        """
        import pytest
        from pytest_exportcheck import assert_dynamic_shapes, assert_export

        @pytest.mark.exportcheck("specs/a.yaml", "specs/b.yaml")
        def test_export(export_case, model_spec):
            assert export_case.spec is model_spec
            assert_export(export_case)

        @pytest.mark.exportcheck("specs/a.yaml")
        def test_shapes(observed_inputs):
            assert observed_inputs.num_calls == 3
            assert_dynamic_shapes(observed_inputs)

        @pytest.mark.exportcheck("specs/b.yaml")
        def test_both(export_case, observed_inputs):
            assert export_case.case.dtype == observed_inputs.case.dtype

        @pytest.mark.exportcheck("specs/a.yaml")
        def test_spec(model_spec):
            assert model_spec.name == "a"
        """
    )
    result = any_project.run("-v", "--exportcheck-report=report.json", ".", flag=False)
    result.stdout.fnmatch_lines_random(
        [
            "*::test_export[[]a-cpu-float32-torch-export-none[]] *",
            "*::test_export[[]b-cpu-float32-torch-export-none[]] *",
            "*::test_shapes[[]a-cpu-float32[]] *",
            "*::test_both[[]b-cpu-float32-torch-export-none[]] *",
            "*::test_spec[[]a[]] *",
            "a * pass *",
        ]
    )
    result.assert_outcomes(passed=6)
    # `test_both` exports nothing: that it passes is no verdict on the case.
    assert len(any_project.report()) == 4
    assert not any("test_both" in record["nodeid"] for record in any_project.report())


def test_a_spec_may_be_named_relative_to_the_test_file(project):
    project.spec("a")
    (project.pytester.path / "specs" / "test_it.py").write_text(
        "import pytest\n@pytest.mark.exportcheck('a.yaml')\ndef test_it(model_spec):\n    pass\n"
    )
    project.run("specs/test_it.py", flag=False).assert_outcomes(passed=1)


def test_errors_of_marked_tests(project):
    project.spec("bad", more="nonsense: 1\n")
    test = "def test_it(export_case): pass\n"
    project.pytester.makepyfile(
        test_missing=f"import pytest\n@pytest.mark.exportcheck('no.yaml')\n{test}",
        test_bad=f"import pytest\n@pytest.mark.exportcheck('specs/bad.yaml')\n{test}",
        test_empty=f"import pytest\n@pytest.mark.exportcheck\n{test}",
        test_unmarked=test,
    )
    result = project.run("--continue-on-collection-errors", ".", flag=False)
    result.stdout.fnmatch_lines_random(
        [
            "*test_missing.py::test_it: no spec file 'no.yaml' *",
            "specs/bad.yaml:*nonsense*",
            "*test_empty.py::test_it: @pytest.mark.exportcheck takes the paths of spec files",
            "*'export_case' needs to know a spec*@pytest.mark.exportcheck(*",
        ]
    )
    result.assert_outcomes(errors=4)


def test_a_user_can_override_the_fixtures(project):
    project.fake(
        """
import pytest

@pytest.fixture
def export_case(export_case, tmp_path, model_spec):
    export_case.record["seen"] = model_spec.name
    return export_case
"""
    )
    project.spec("a")
    project.run("--exportcheck-report=report.json").assert_outcomes(passed=2)
    assert project.report()[1]["seen"] == "a"


def test_marks_select_cases(project):
    project.spec("a", exporters=("torch-export", "onnx-dynamo"), more="marks: [slow]\n")
    project.spec("b", exporters=("onnx-dynamo",))
    for expression, number in (
        ("exporter_onnx_dynamo", 2),
        ("slow", 3),
        ("slow and patch_none and device_cpu and dtype_float32", 2),
    ):
        result = project.run("--collect-only", "-q", "-m", expression, "specs")
        result.stdout.fnmatch_lines([f"{number}/5 tests collected*"])


def test_the_rest_of_pytest_works_on_specs(project):
    project.spec("a", kwargs={"do": {"onnx-dynamo": "export"}}, exporters=("torch-export", "onnx-dynamo"))
    project.run("-k", "torch and a", "specs").assert_outcomes(passed=1, deselected=2)
    project.run("specs/a.yaml::test_export[cpu-float32-torch-export-none]").assert_outcomes(passed=1)
    project.run().assert_outcomes(passed=2, failed=1)
    project.run("--lf", "specs").assert_outcomes(failed=1)
    project.run("--sw", "specs").assert_outcomes(passed=2, failed=1)
    project.run("--junitxml=junit.xml").assert_outcomes(passed=2, failed=1)
    junit = (project.pytester.path / "junit.xml").read_text()
    assert 'classname="specs.a.yaml"' in junit
    assert 'message="stage export: export went wrong"' in junit


def test_two_endings_would_share_one_golden(project):
    path = project.spec("net")
    path.with_suffix(".yml").write_text(path.read_text())
    result = project.run()
    result.stdout.fnmatch_lines(["*specs/net.yml:1:1: net.yml and net.yaml would share one golden*"])
    result.assert_outcomes(passed=2, errors=1)
