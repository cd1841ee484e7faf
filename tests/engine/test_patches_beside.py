"""Targets of a user's patches in modules that lie beside the file of the patches, which is on no path."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_exportcheck.cases import CaseId
from pytest_exportcheck.cli import main
from pytest_exportcheck.pipeline import SpecRun, run_case
from pytest_exportcheck.spec import load_spec
from pytest_exportcheck.spec.imports import load_object, sibling_imports

if TYPE_CHECKING:
    from tests.warm_python import WarmPython

_FILES = {
    "helpers_beside.py": "def scale(x):\n    return x * 2\n",
    "net_beside.py": """
import torch
from helpers_beside import scale


class Net(torch.nn.Module):
    def forward(self, x):
        return scale(x)


def make():
    return Net()
""",
    "factory_beside.py": "from net_beside import Net\n\n\ndef make():\n    return Net()\n",
    "patches_beside.py": """
import contextlib
import torch
from net_beside import Net


def twice(x):
    return x + x


def forward(self, x):
    return x + x


function = {"helpers_beside.scale": twice}
method = {"net_beside.Net.forward": forward}
wrong = {"helpers_beside.scael": twice}
numbers = {"a": 1}


class Patched:
    _PATCHED_CLASS_ = Net
    _PATCHES_ = ["forward"]
    forward = forward


@contextlib.contextmanager
def settings():
    yield
""",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in _FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def _run(folder: Path, factory: str) -> SpecRun:
    (folder / "net.yaml").write_text(
        f'exportcheck: 1\nmodel: {{factory: "{factory}:make"}}\nobserve:\n  calls:\n'
        '    - forward: {x: "float32[2, 4]"}\n    - forward: {x: "float32[3, 4]"}\n'
        "matrix: {exporters: [torch-export]}\n"
    )
    return SpecRun(load_spec(folder / "net.yaml", folder))


@pytest.mark.parametrize("first", ["model", "mode"])
@pytest.mark.parametrize("factory", ["net_beside.py", "factory_beside.py"])
@pytest.mark.parametrize("mode", ["function", "method", "Patched"])
def test_the_patch_reaches_the_model(folder: Path, factory: str, mode: str, first: str) -> None:
    """One file is one module, whichever of the model and the patches is loaded first."""
    run = _run(folder, factory)
    path = list(sys.path)
    if first == "model":
        run.observe("cpu", "float32")
    record: dict[str, Any] = {}
    case = CaseId(run.spec.relative, "torch-export", f"patches_beside.py:{mode}", "cpu", "float32")
    run_case(run, case, lambda stage: None, record)
    target = "helpers_beside.scale" if mode == "function" else "net_beside.Net.forward"
    assert record["patches"]["called"] == {target: 1}
    assert sys.path == path
    assert not {"helpers_beside", "net_beside", "patches_beside"} & set(sys.modules)


def test_what_the_export_imports_lies_beside_the_spec_too(folder: Path) -> None:
    """Strict mode of torch imports the modules of the functions it inlines."""
    run = _run(folder, "factory_beside.py")
    case = CaseId(run.spec.relative, "torch-export-strict", "none", "cpu", "float32")
    run_case(run, case, lambda stage: None, {})


def test_a_file_that_changed_is_loaded_again_as_both(folder: Path) -> None:
    helpers = folder / "helpers_beside.py"
    before = load_object("helpers_beside.py:scale", folder)
    with sibling_imports(folder):
        import helpers_beside  # type: ignore[import-not-found]

        assert helpers_beside.scale is before
    helpers.write_text("def scale(x):\n    return x * 3.0\n")
    after = load_object("helpers_beside.py:scale", folder)
    assert (before(1), after(1)) == (2, 3.0)
    with sibling_imports(folder):
        import helpers_beside

        assert helpers_beside.scale is after


def test_a_package_of_an_environment_below_the_folder_is_no_sibling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / ".venv" / "lib"
    (packages / "lazy_beside").mkdir(parents=True)
    (packages / "lazy_beside" / "__init__.py").write_text("")
    (packages / "lazy_beside" / "part.py").write_text("")
    monkeypatch.syspath_prepend(packages)
    with sibling_imports(tmp_path):
        import lazy_beside.part  # type: ignore[import-not-found]
    assert sys.modules["lazy_beside.part"] is lazy_beside.part


def _patches(python: str, where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [python, "-c", "import sys; from pytest_exportcheck.cli import main; sys.exit(main())"]
    return subprocess.run(
        [*command, "patches", *arguments], cwd=where, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("where", [".", ".."])
def test_the_command_finds_what_a_run_finds(folder: Path, where: str, warm_python: WarmPython) -> None:
    python = warm_python.executable
    place = (folder / where).resolve()
    prefix = "" if where == "." else f"{folder.name}/"
    mode = ("--mode", f"{prefix}patches_beside.py:function")
    done = _patches(python, place, *mode, "--diff")
    assert done.returncode == 0, done.stderr
    assert "-    return x * 2\n" in done.stdout
    assert "+    return x + x\n" in done.stdout
    assert _patches(python, place, *mode, "--update-lock").returncode == 0
    assert all(json.loads((folder / "patches.lock.json").read_text())["modes"].values())
    assert _patches(python, place, *mode, "--lint").returncode == 0


def test_a_mistyped_target_has_a_suggestion(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    message = "helpers_beside has no 'scael' (did you mean 'scale'?)"
    for option, status in (("--lint", 1), ("--diff", 1), ("--update-lock", 1)):
        assert main(["patches", "--mode", "patches_beside.py:wrong", option]) == status
        shown = "".join(capsys.readouterr())
        assert message in shown, option
        assert shown.count("helpers_beside.scael") == 1


def test_a_mistyped_mode_is_compared_with_modes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["patches", "--mode", "patches_beside.py:nope"]) == 2
    assert capsys.readouterr().err == (
        "patch mode patches_beside.py:nope: patches_beside.py has no 'nope' "
        "(known: function, method, wrong, Patched, settings)\n"
    )
    assert main(["patches", "--mode", "patches_beside.py:setting"]) == 2
    assert "(did you mean 'settings'?)" in capsys.readouterr().err


def test_a_context_manager_is_named_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["patches", "--mode", "patches_beside.py:settings"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "patches_beside.py:settings  patches_beside.py:settings"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lint", "--diff"], "--diff and --lint are runs of their own"),
        (["--pytrees", "--update-lock"], "--update-lock and --pytrees are runs of their own"),
        (["--lock", "x.json"], "--lock needs --lint or --update-lock"),
        (["--mode", "mine.py"], "mine.py is a file: write mine.py:NAME"),
        (["--mode", "none"], "patch mode none (NoPatches) is no list of patches"),
    ],
)
def test_what_can_only_be_a_mistake_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["patches", *arguments]) == 2
    assert message in capsys.readouterr().err
