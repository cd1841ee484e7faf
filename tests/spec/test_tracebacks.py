"""Which frames of a traceback are shown: the user's, the model's innermost, and the one that raised."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from pytest_exportcheck.tracebacks import is_machinery, one_line, user_lines

CODE = """
import torch

def build():
    return halves()

def halves():
    return torch.nn.Linear(3, 4)(torch.ones(2, 2))

def deep(n):
    return deep(n - 1) if n else halves()

def says_much():
    raise ValueError("\\n".join(f"line {n}" for n in range(40)))
"""


@pytest.fixture
def code(tmp_path):
    # The name of the folder is no reason to hide the frames.
    path = tmp_path / "torch" / "nets.py"
    path.parent.mkdir()
    path.write_text(CODE)
    spec = importlib.util.spec_from_file_location("nets_of_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def raised(function, *args):
    with pytest.raises(Exception) as caught:
        function(*args)
    # Without the frame of this test.
    return caught.value.with_traceback(caught.value.__traceback__.tb_next)


def test_what_raises_inside_torch_shows_the_users_lines(code):
    lines = user_lines(raised(code.build))
    assert lines[:2] == [
        f"at {code.__file__}:5 in build: return halves()",
        f"at {code.__file__}:8 in halves: return torch.nn.Linear(3, 4)(torch.ones(2, 2))",
    ]
    # Of torch the frame that raised, and no other.
    assert len(lines) == 3
    assert lines[2].startswith(f"at {torch.nn.modules.linear.__file__}:")


def test_a_deep_recursion_keeps_the_innermost_frames(code):
    lines = user_lines(raised(code.deep, 50))
    assert f"at {code.__file__}:8 in halves: return torch.nn.Linear(3, 4)(torch.ones(2, 2))" in lines
    assert len(lines) == 7


def test_a_long_message_does_not_push_the_frames_away(code):
    error = raised(code.says_much)
    assert one_line(error) == "ValueError: line 0"
    lines = user_lines(error)
    assert lines[:2] == ["ValueError: line 0", "line 1"]
    assert lines[12] == "and 28 more lines"
    assert lines[-1].startswith(f"at {code.__file__}:14 in says_much: ")


def test_machinery(tmp_path):
    import transformers

    for name in (torch.__file__, pytest.__file__, importlib.util.__file__, "<frozen importlib._bootstrap>"):
        assert is_machinery(name), name
    for name in (str(tmp_path / "torch" / "nets.py"), transformers.modeling_utils.__file__):
        assert not is_machinery(name), name
