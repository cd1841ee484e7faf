"""Every name is importable from the top of the package."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pytest_exportcheck


@pytest.mark.parametrize("name", sorted(pytest_exportcheck.__all__))
def test_a_public_name_resolves(name: str) -> None:
    assert getattr(pytest_exportcheck, name) is not None


def test_the_table_and_all_agree() -> None:
    assert set(pytest_exportcheck._PUBLIC) | {"__version__"} == set(pytest_exportcheck.__all__)


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, pytest_exportcheck; print({'torch', 'transformers', 'onnx'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
