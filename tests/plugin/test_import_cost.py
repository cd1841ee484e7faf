"""What a pytest run pays for the plugin being installed: nothing measurable, and no torch in collection."""

from __future__ import annotations

import contextlib
import gc
import sys
import textwrap

import pytest

from pytest_exportcheck.lazy import large_imports

HEAVY = {"torch", "transformers", "onnx", "onnxscript", "onnxruntime"}

#: Runs pytest, then prints the top-level packages and our modules that were imported.
SCRIPT = """
import sys
import pytest
status = pytest.main({args!r})
print("STATUS", int(status))
print("PACKAGES", *sorted({{name.partition(".")[0] for name in sys.modules}}))
print("OURS", *sorted(name for name in sys.modules if name.startswith("pytest_exportcheck")))
"""


def imported(pytester: pytest.Pytester, *args: str) -> tuple[set[str], set[str]]:
    script = pytester.makepyfile(run=textwrap.dedent(SCRIPT.format(args=[*args, "-p", "no:cacheprovider"])))
    result = pytester.run(sys.executable, script)
    lines = dict(line.partition(" ")[::2] for line in result.outlines if line)
    assert lines["STATUS"] in ("0", "4", "5")
    return set(lines["PACKAGES"].split()), set(lines["OURS"].split())


def test_without_the_flag(pytester):
    pytester.makepyfile("def test_it(): pass")
    (pytester.path / "a.yaml").write_text("exportcheck: 1\n")
    packages, ours = imported(pytester)
    assert not packages & (HEAVY | {"yaml", "pydantic"})
    assert ours == {
        "pytest_exportcheck",
        "pytest_exportcheck.fixtures",
        "pytest_exportcheck.lazy",
        "pytest_exportcheck.newhooks",
        "pytest_exportcheck.options",
        "pytest_exportcheck.plugin",
    }


def test_the_hint_at_the_flag_reads_no_yaml(pytester):
    (pytester.path / "a.yaml").write_text("exportcheck: 1\n")
    packages, ours = imported(pytester, "a.yaml")
    assert not packages & (HEAVY | {"yaml", "pydantic"})
    assert "pytest_exportcheck.spec.discover" in ours
    assert not ours & {"pytest_exportcheck.session", "pytest_exportcheck.collection"}


def test_no_trace_when_disabled(pytester):
    pytester.makepyfile("def test_it(): pass")
    _, ours = imported(pytester, "-p", "no:exportcheck")
    assert ours <= {"pytest_exportcheck", "pytest_exportcheck.plugin"}
    result = pytester.runpytest_subprocess("-p", "no:exportcheck", "--markers")
    result.stdout.no_fnmatch_line("*exportcheck*")


def test_collection_imports_no_torch(project):
    project.pytester.makeconftest("")
    project.spec(
        "a", exporters=("torch-export", "onnx-dynamo", "transformers-onnx"), matrix=", devices: [cuda]"
    )
    project.spec("b", more="expect:\n  - fails: export\n    when: {torch: '>=2'}\n    reason: r\n")
    project.spec("c", more="nonsense: 1\n")
    for args in (["specs/a.yaml"], ["specs", "--exporter=torch-export", "--ignore=specs/c.yaml"]):
        packages, _ = imported(project.pytester, "--exportcheck", "--collect-only", *args)
        assert not packages & HEAVY


def test_many_specs_are_collected(project):
    for number in range(200):
        project.spec(f"s{number}", exporters=("torch-export", "onnx-dynamo"), accepted=False)
    result = project.run("--collect-only", "-q")
    result.stdout.fnmatch_lines(["600 tests collected in *"])


def test_registered_markers_and_help(pytester):
    result = pytester.runpytest_subprocess("--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.exportcheck(path, ...): *"])
    result = pytester.runpytest_subprocess("--markers", "--exportcheck")
    result.stdout.fnmatch_lines(["@pytest.mark.exporter_onnx_dynamo: *", "@pytest.mark.device_cuda: *"])
    result = pytester.runpytest_subprocess("--help")
    result.stdout.fnmatch_lines(["model export checks*", "*--exportcheck *", "*--require-device=DEV*"])


@pytest.mark.parametrize("enabled", [True, False])
def test_large_imports_leave_the_collector_as_they_found_it(enabled: bool) -> None:
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        seen = []
        with contextlib.suppress(ImportError), large_imports():
            seen.append(gc.isenabled())
            raise ImportError
        assert seen == [False]
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()
