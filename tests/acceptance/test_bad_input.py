"""Whatever goes wrong in one spec has its message and its stage, and the other specs run on."""

from __future__ import annotations

import os

import pytest


def test_factories_and_calls_that_fail(project):
    project.simple("good")
    project.simple("raises", "raises")
    project.simple("no_module", "no_module")
    project.simple("leaves", "leaves")
    project.spec(
        "generates",
        'exportcheck: 1\nmodel: {factory: "models.py:Generates"}\n'
        "observe: {calls: [{generate: {max_new_tokens: 3}}]}\nmatrix: {exporters: [torch-export]}\n",
    )
    project.run("--update-shapes", "specs/good.yaml")
    result = project.run("--exportcheck-report=report.json")
    assert project.verdicts() == {
        "good[shapes-None]": "pass",
        "good[torch-export-none]": "pass",
        "raises[shapes-None]": "fail load",
        "raises[torch-export-none]": "fail load",
        "no_module[shapes-None]": "fail load",
        "no_module[torch-export-none]": "fail load",
        "leaves[shapes-None]": "fail load",
        "leaves[torch-export-none]": "fail load",
        "generates[shapes-None]": "fail observe",
        "generates[torch-export-none]": "fail observe",
    }
    text = result.stdout.str()
    for words in ("no weights here", "no prompt given", "specs/generates.yaml:3", "int"):
        assert words in text, words


EXPORTERS = """
import os, sys
class Base:
    def export(self, request):
        return self.act(request)
class Raises(Base):
    name = "raises"
    def act(self, request): raise RuntimeError("cannot do this model")
class Leaves(Base):
    name = "leaves"
    def act(self, request): sys.exit(0)
class Prints(Base):
    name = "prints"
    def act(self, request):
        print("noise" * 1000); sys.stderr.write("more noise"); os.write(1, b"raw noise")
        raise ValueError("after the noise")
class Junk(Base):
    name = "junk"
    def act(self, request): return {"not": "a program"}
class Skips(Base):
    name = "skips"
    def act(self, request):
        import pytest
        pytest.skip("I would rather not")
def pytest_exportcheck_exporters(config):
    return {cls.name: cls for cls in (Raises, Leaves, Prints, Junk, Skips)}
"""


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_exporters_that_misbehave(project, workers):
    project.pytester.makeconftest(EXPORTERS)
    project.simple("one", exporters="[raises, leaves, prints, junk, skips, torch-export]")
    project.run("--update-shapes", "-k", "dynamic_shapes")
    result = project.run(workers, "--exportcheck-report=report.json")
    assert project.verdicts() == {
        "one[shapes-None]": "pass",
        "one[raises-none]": "fail export",
        "one[leaves-none]": "fail export",
        "one[prints-none]": "fail export",
        "one[junk-none]": "fail export",
        "one[skips-none]": "fail export",
        "one[torch-export-none]": "pass",
    }
    text = result.stdout.str()
    for words in ("cannot do this model", "after the noise", "sys.exit(0)", "not an Exported"):
        assert words in text, words
    assert result.ret == 1


def test_a_frozen_dimension_is_named(project):
    spec = project.simple("loop", "Frozen")
    spec.write_text(spec.read_text().replace("float32[3, 4]", "float32[3, 6]"))
    project.run("--update-shapes", "-k", "dynamic_shapes")
    result = project.run()
    result.stdout.fnmatch_lines(["E   stage export: torch-export refuses the model: *"])
    assert "x" in result.stdout.str()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere: a folder in the way is tested below")
def test_an_unwritable_golden_folder_by_permission(project):
    project.simple("one")
    (project.folder / "__shapes__").mkdir(mode=0o500)
    result = project.run("--update-shapes", "-k", "dynamic_shapes")
    assert result.ret != 0


def test_an_unwritable_golden_folder(project):
    project.simple("one")
    project.simple("two")
    # A file where the folder should be: nobody can write into it, root included.
    (project.folder / "__shapes__").write_text("in the way")
    result = project.run("--update-shapes", "-k", "dynamic_shapes")
    assert result.ret != 0
    assert "__shapes__" in result.stdout.str()
    assert (project.folder / "__shapes__").read_text() == "in the way"
    assert sorted(p.name for p in project.folder.iterdir() if not p.name.startswith("__pycache__")) == [
        "__shapes__",
        "models.py",
        "one.yaml",
        "two.yaml",
    ]
