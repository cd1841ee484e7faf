"""References of a spec, looked up without running anything."""

from __future__ import annotations

import pytest

from pytest_exportcheck.spec import load_spec
from pytest_exportcheck.spec.references import reference_problems

NETS = """
import os as system
from torch import *  # noqa
"""

CODE = """
import os as system
from pathlib import Path
raise RuntimeError("never run")

class Net: pass
def build(width): ...
async def later(): ...
first, (second, *third) = 1, (2, 3)
annotated: int = 3
if first:
    def under_if(): ...
else:
    under_else = 1
try:
    import torch as t
except ImportError as error:
    in_handler = None
with open("x") as opened:
    pass
for looped in (): ...
match first:
    case 1: matched = 2
"""

SPEC = """exportcheck: 1
model: {factory: "%s"}
observe: {calls: %s}
%s
"""

CALLS = '[{forward: {x: "float32[2]"}}]'


@pytest.fixture
def problems(tmp_path):
    (tmp_path / "nets.py").write_text(CODE)
    (tmp_path / "star.py").write_text(NETS)
    (tmp_path / "late.py").write_text("def __getattr__(name): ...\n")
    (tmp_path / "made.py").write_text("globals().update(x=1)\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "data.npz").write_bytes(b"")

    def problems(factory="nets.py:Net", calls=CALLS, more=""):
        path = tmp_path / "a.yaml"
        path.write_text(SPEC % (factory, calls, more))
        document = load_spec(path, tmp_path).document
        return [str(problem) for problem in reference_problems(document, tmp_path, "a.yaml")]

    return problems


BOUND = (
    "system Path Net build later first second third annotated under_if under_else t in_handler opened looped "
    "matched Net.anything"
)


@pytest.mark.parametrize("name", BOUND.split())
def test_every_way_to_bind_a_name(problems, name):
    assert problems(f"nets.py:{name}") == []


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("nets.py:buidl", "nets.py has no 'buidl' (did you mean 'build'?)"),
        ("nets.py:zzz", "nets.py has no 'zzz' (known: system, Path, Net, build, *)"),
        ("net.py:Net", "there is no file net.py next to the spec (did you mean 'nets.py'?)"),
        ("no/such.py:Net", "there is no file no/such.py next to the spec"),
        ("nets:Net", "for the file next to the spec write nets.py:Net"),
        ("json:lods", "json has no 'lods' (did you mean 'loads'?)"),
        ("json.decoder:JSONDecodr", "json.decoder has no 'JSONDecodr' (did you mean 'JSONDecoder'?)"),
        ("broken.py:f", "broken.py cannot be imported: line 1: *"),
    ],
)
def test_what_is_not_there(problems, factory, message):
    import fnmatch

    (found,) = problems(factory)
    assert fnmatch.fnmatchcase(found, f"a.yaml:2:18: {message}".replace("[", "[[]"))


@pytest.mark.parametrize(
    "factory",
    ["star.py:Linear", "late.py:x", "made.py:x", "no_such_package.x:f", "json.no_such:f", "math:sin"],
)
def test_what_only_running_tells_is_no_problem(problems, factory):
    assert problems(factory) == []


def test_every_place(problems):
    assert problems(
        calls='[{call: "nets.py:bild"}, {forward: {x: "float32[2] from dat.npz:k", '
        'y: "int64[2] by nets.py:b", z: {str: "int64[2] by nets.py:b"}}}]',
        more='compare: {y: {by: "nets.py:cmp"}}\nmatrix: {patch_modes: ["own.py:m"]}',
    ) == [
        "a.yaml:3:26: nets.py has no 'bild' (did you mean 'build'?)",
        "a.yaml:3:57: there is no dat.npz next to the spec (did you mean 'data.npz'?)",
        "a.yaml:3:89: nets.py has no 'b' (known: system, Path, Net, build, later, first, second, third, "
        "annotated, under_else, under_if, in_handler, t, opened, looped, matched)",
        "a.yaml:4:19: nets.py has no 'cmp' (known: system, Path, Net, build, later, first, second, third, "
        "annotated, under_else, under_if, in_handler, t, opened, looped, matched)",
        "a.yaml:5:24: there is no file own.py next to the spec (did you mean 'broken.py'?)",
    ]
    assert problems(calls='"nets.py:cals"')[0].startswith("a.yaml:3:18: nets.py has no 'cals'")


def test_nothing_is_imported(problems):
    import sys

    before = set(sys.modules)
    problems("json.tool:main")
    assert not any(name.startswith("_exportcheck_nets") for name in set(sys.modules) - before)
