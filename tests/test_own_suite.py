"""How the tests of the project themselves are run."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import _pytest.pytester
import numpy
import pytest


def test_the_files_that_come_first_exist(request: pytest.FixtureRequest) -> None:
    root = request.config.rootpath
    plugin = request.config.pluginmanager.get_plugin(str(root / "conftest.py"))
    assert [file for file in plugin._LONG if not (root / "tests" / file).is_file()] == []


def test_what_registers_operators_is_imported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytester forgets what is imported in its tests; an operator cannot be registered again."""
    snapshot = _pytest.pytester.SysModulesSnapshot(preserve=lambda name: False)
    registers = ModuleType("torch.registers_operators")
    for name, module in (
        (registers.__name__, registers),
        ("of_a_test", ModuleType("of_a_test")),
        ("torch.in_place_of_one", SimpleNamespace()),
        ("numpy", ModuleType("numpy")),
    ):
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    snapshot.restore()
    assert sys.modules["torch.registers_operators"] is registers
    assert "of_a_test" not in sys.modules
    assert "torch.in_place_of_one" not in sys.modules
    assert sys.modules["numpy"] is numpy
