"""``exportcheck patches``: the list, the diffs, and what the lock says when a target has changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_exportcheck.cli import main
from pytest_exportcheck.errors import PatchError
from pytest_exportcheck.patches.lock import LOCK, lint, lock_of, read_lock, write_lock
from pytest_exportcheck.patches.patch import Patch

if TYPE_CHECKING:
    from tests.warm_python import WarmPython


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Any]:
    """A module ``locked_library`` that can be written again."""

    class Library:
        def write(self, source: str) -> None:
            file = tmp_path / "locked_library.py"
            file.write_text(source, encoding="utf-8")
            module = types.ModuleType("locked_library")
            module.__file__ = str(file)
            exec(compile(source, str(file), "exec"), module.__dict__)
            sys.modules["locked_library"] = module
            import linecache

            linecache.clearcache()

    yield Library()
    sys.modules.pop("locked_library", None)


def _takes(x: Any, scale: Any) -> Any:
    return x


def _swallows(x: Any, **kwargs: Any) -> Any:
    return x


_BEFORE = "def attend(x, scale):\n    return x * scale\n"


def _lint(library: Any, after: str, replacement: Any = _takes, **options: Any) -> list[str]:
    library.write(_BEFORE)
    patches = [Patch("locked_library.attend", replacement, **options)]
    lock = lock_of([("mine", patches)])
    library.write(after)
    return [
        f"{finding.level}: {finding.message.split(' when the lock')[0]}"
        for finding in lint("mine", patches, lock)
    ]


def test_what_did_not_change_is_no_finding(library: Any) -> None:
    assert _lint(library, _BEFORE) == []


def test_a_target_that_is_gone_is_an_error(library: Any) -> None:
    assert _lint(library, "x = 1\n") == ["error: locked_library has no 'attend': it was removed or renamed"]


def test_another_body_is_a_warning_with_the_diff(library: Any) -> None:
    library.write(_BEFORE)
    patches = [Patch("locked_library.attend", _takes)]
    lock = lock_of([("mine", patches)])
    library.write(_BEFORE.replace("x * scale", "x / scale"))
    (finding,) = lint("mine", patches, lock)
    assert finding.level == "warning"
    assert "-    return x * scale" in finding.details
    assert "+    return x / scale" in finding.details


def _reordered(scale: Any, x: Any) -> Any:
    return x


def _by_name(x: Any, *, scale: Any) -> Any:
    return x


@pytest.mark.parametrize(
    ("replacement", "target", "message", "details"),
    [
        (
            _takes, "x, factor",
            "does not take factor",
            ["a call with `factor=...`: TypeError while the mode is active; "
             "by position it arrives as `scale`"],
        ),
        (
            _takes, "x, scale, *, bias=None",
            "does not take bias",
            ["a call with `bias=...`: TypeError while the mode is active"],
        ),
        (
            _by_name, "x, scale, bias=None",
            "does not take bias",
            ["a call that gives `scale` by position: TypeError; by its name it works",
             "a call with `bias=...`: TypeError while the mode is active"],
        ),
        (
            _reordered, "x, scale",
            "does not take x by position, scale by position",
            ["a call that gives `x` by position: it arrives as `scale`",
             "a call that gives `scale` by position: it arrives as `x`"],
        ),
    ],
)  # fmt: skip
def test_the_calls_that_break_are_said(
    library: Any, replacement: Any, target: str, message: str, details: list[str]
) -> None:
    library.write(f"def attend({target}):\n    return x\n")
    patches = [Patch("locked_library.attend", replacement)]
    findings = lint("mine", patches, read_lock(Path("no such file")))
    (error,) = [finding for finding in findings if finding.level == "error"]
    assert message in error.message
    assert list(error.details[2:]) == [
        *details, "where a model makes such a call, change the patch; elsewhere there is nothing to do",
    ]  # fmt: skip
    # Accepted with the lock that is written now.
    assert [one.level for one in lint("mine", patches, lock_of([("mine", patches)]))] == ["warning"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda lock, entry: lock.pop("versions"),
        lambda lock, entry: lock["modes"].update(mine=[]),
        lambda lock, entry: lock["modes"]["mine"].update({"locked_library.attend": "text"}),
        lambda lock, entry: entry.update(source="!!!"),
        lambda lock, entry: entry.update(sha256="0"),
        lambda lock, entry: entry.update(parameters=3),
        lambda lock, entry: entry.update(dropped=None),
        lambda lock, entry: entry.update(depends=[1]),
    ],
)
def test_a_damaged_lock_is_refused(library: Any, tmp_path: Path, damage: Any) -> None:
    library.write(_BEFORE)
    lock = json.loads(json.dumps(lock_of([("mine", [Patch("locked_library.attend", _takes)])])))
    damage(lock, lock["modes"]["mine"]["locked_library.attend"])
    (tmp_path / "lock.json").write_text(json.dumps(lock))
    with pytest.raises(PatchError, match=r"is no lock of patches: .*; delete it, and write"):
        read_lock(tmp_path / "lock.json")


@pytest.mark.parametrize("replacement", [_takes, _swallows])
def test_a_new_parameter_that_the_replacement_drops_is_an_error(library: Any, replacement: Any) -> None:
    """Also if ``**kwargs`` swallows it: the result is silently another one."""
    after = "def attend(x, scale, position_bias=None):\n    return x * scale\n"
    assert "error: the replacement does not take position_bias, which the target has" in _lint(
        library, after, replacement
    )


def test_a_parameter_that_was_dropped_from_the_start_is_an_error_without_a_lock(library: Any) -> None:
    library.write("def attend(x, scale, position_bias=None):\n    return x\n")
    findings = lint("mine", [Patch("locked_library.attend", _takes)], read_lock(Path("no such file")))
    assert [finding.level for finding in findings] == ["warning", "error"]


def test_a_replacement_that_takes_nothing_or_needs_more_is_an_error(library: Any) -> None:
    """No call of the target gets through, whatever the target calls its first parameter."""
    assert "error: the replacement does not take x, scale, which the target has" in _lint_new(
        library, lambda: 0
    )
    needs = _lint_new(library, lambda x, scale, more, *, other, given=1: 0)
    assert any(text.startswith("error: the replacement needs more, other, which") for text in needs)
    assert _lint_new(library, lambda y, scale, more=1: 0) == []


def _lint_new(library: Any, replacement: Any) -> list[str]:
    library.write(_BEFORE)
    found = lint("mine", [Patch("locked_library.attend", replacement)], {"modes": {}, "versions": {}})
    return [f"{each.level}: {each.message}" for each in found if each.level == "error"]


def test_a_factory_that_hands_on_is_no_error(library: Any) -> None:
    def handed_on(original: Any) -> Any:
        return lambda *args, **kwargs: original(*args, **kwargs)

    after = "def attend(x, scale, position_bias=None):\n    return x * scale\n"
    assert [text[:7] for text in _lint(library, after, handed_on, wraps=True)] == ["warning"]


def test_a_parameter_that_the_target_lost_is_an_error(library: Any) -> None:
    assert "error: the target no longer takes scale, which it did" in _lint(
        library, "def attend(x):\n    return x\n"
    )


def test_what_it_counts_on_is_locked_too(library: Any) -> None:
    helper = "def helper():\n    return 1\n"
    library.write(_BEFORE + helper)
    patches = [Patch("locked_library.attend", _takes, depends=("locked_library.helper",))]
    lock = lock_of([("mine", patches)])
    library.write(_BEFORE + helper.replace("1", "2"))
    (finding,) = lint("mine", patches, lock)
    assert finding.message.startswith("locked_library.helper, which it counts on, is another text")


def test_a_lock_is_read_as_it_was_written(library: Any, tmp_path: Path) -> None:
    library.write(_BEFORE)
    lock = lock_of([("mine", [Patch("locked_library.attend", _takes)])])
    write_lock(tmp_path / "lock.json", lock)
    assert read_lock(tmp_path / "lock.json") == lock
    (tmp_path / "lock.json").write_text("[]")
    with pytest.raises(PatchError, match=r"lock\.json is no lock of patches"):
        read_lock(tmp_path / "lock.json")


def test_the_lock_that_ships_fits_these_versions(capsys: pytest.CaptureFixture[str]) -> None:
    """Fails when torch or transformers change under a patch of ours: look, then write the lock again."""
    assert main(["patches", "--lint", "--mode", "torch", "--mode", "transformers"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "0 errors, 0 warnings" in err
    assert set(json.loads(LOCK.read_text())["modes"]) >= {"torch", "transformers", "hf"}


def test_the_list_and_the_diffs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patches", "--mode", "transformers", "--diff"]) == 0
    out = capsys.readouterr().out
    assert "transformers  transformers.cache_utils.DynamicSlidingWindowLayer.update\n" in out
    assert "    versions: transformers >=5.24\n" in out
    assert "    +    length = torch.sym_min(total, self.sliding_window - 1)" in out
    assert "no_word = image_text_alignment_mask == 0" in out


def test_a_mode_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        'import torch\n\npatches = {"torch.nn.functional.mish": lambda input: input}\n'
    )
    assert main(["patches", "--mode", "mine.py:patches", "--lint"]) == 1
    out, err = capsys.readouterr()
    assert "error: mine.py:patches: torch.nn.functional.mish: the replacement does not take inplace" in out
    assert "1 patch, 1 error, 1 warning" in err
    assert main(["patches", "--mode", "mine.py:patches", "--write-lock"]) == 0
    assert Path("patches.lock.json").is_file()
    assert main(["patches", "--mode", "mine.py:patches", "--lint"]) == 0
    assert main(["patches", "--mode", "mine.py:gone"]) == 2
    Path("lib").mkdir()
    Path("mine.py").rename("lib/mine.py")
    assert main(["patches", "--mode", "lib/mine.py:patches", "--update-lock"]) == 0
    assert Path("lib/patches.lock.json").is_file()
    assert main(["patches", "--mode", "lib/mine.py:patches", "--update-lock", "--lock", "other.json"]) == 0
    assert read_lock(Path("other.json"))["modes"] == read_lock(Path("lib/patches.lock.json"))["modes"]
    assert main(["patches", "--mode", "hff"]) == 2
    assert "did you mean 'hf'" in capsys.readouterr().err


_MINE = """
import target
from pytest_exportcheck import Patch

patches = [
    Patch("target.attend", lambda x, scale: x * scale),
    Patch("target.gone", lambda x: x),
    Patch("target.grown", lambda x, **kwargs: x),
]
"""
_TARGET = "def attend(x, scale):\n    return x * scale\n\n\ndef grown(x):\n    return x\n"


def test_what_drifted_since_the_lock_of_a_users_mode(tmp_path: Path, warm_python: WarmPython) -> None:
    """Written with one version of a package, read with another: a process each."""

    def run(*arguments: str) -> tuple[int, str, str]:
        mode = ["patches", "--mode", "mine.py:patches"]
        command = [warm_python.executable, "-m", "pytest_exportcheck.cli", *mode]
        path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
        done = subprocess.run(
            [*command, *arguments], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    (tmp_path / "mine.py").write_text(_MINE)
    (tmp_path / "target.py").write_text(_TARGET + "\n\ndef gone(x):\n    return x\n")
    assert run("--update-lock")[0] == 0
    assert run("--lint") == (0, "", "3 patches, 0 errors, 0 warnings\n")
    (tmp_path / "target.py").write_text(
        _TARGET.replace("x * scale", "scale * x").replace("grown(x)", "grown(x, bias=None)")
    )
    status, out, err = run("--lint")
    assert status == 1
    assert "error: mine.py:patches: target.gone: target has no 'gone' (did you mean 'grown'?)" in out
    assert (
        "error: mine.py:patches: target.grown: the replacement does not take bias, which the target has"
        in out
    )
    assert "warning: mine.py:patches: target.attend: the target is another text than when the lock" in out
    assert "    -    return x * scale\n    +    return scale * x\n" in out
    assert "3 patches, 2 errors, 2 warnings" in err
    status, _, err = run("--update-lock")
    assert status == 1
    assert "mine.py:patches: not written, the target is gone: target.gone: " in err


def test_all_is_linted_as_what_it_is_made_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["patches", "--lint", "--mode", "all"]) == 0
    assert capsys.readouterr().out == ""
