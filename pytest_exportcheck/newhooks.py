"""The hooks that pytest-exportcheck offers to a `conftest.py` or to another plugin."""

from __future__ import annotations

import pytest


@pytest.hookspec
def pytest_exportcheck_exporters(config: pytest.Config) -> dict[str, object]:  # type: ignore[empty-body]
    """Return exporters to add, by the name that specs use.

    A value is an exporter, its class, or a string ``"package.module:Class"``, which is imported only when
    a case needs it. The result is merged over the entry points of the group
    ``pytest_exportcheck.exporters``.
    """


@pytest.hookspec
def pytest_exportcheck_patch_modes(config: pytest.Config) -> dict[str, object]:  # type: ignore[empty-body]
    """Return patch modes to add, by the name that specs use. Values as in `pytest_exportcheck_exporters`."""


@pytest.hookspec
def pytest_exportcheck_comparisons(config: pytest.Config) -> dict[str, object]:  # type: ignore[empty-body]
    """Return comparisons of outputs to add, by the name that specs use (``compare: {boxes: {by: iou}}``).

    A value is a function of (expected, got, tolerance), a class whose instances are called that way, or a
    string as in `pytest_exportcheck_exporters`; see `pytest_exportcheck.checks.own.Comparison`.
    """
