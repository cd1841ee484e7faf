"""How the tests of the project themselves are run."""

from __future__ import annotations

import pytest


def test_the_files_that_come_first_exist(request: pytest.FixtureRequest) -> None:
    root = request.config.rootpath
    plugin = request.config.pluginmanager.get_plugin(str(root / "conftest.py"))
    assert [file for file in plugin._LONG if not (root / "tests" / file).is_file()] == []
