"""One self-contained page of a report: no network, no server, nothing beside the file.

The page is made by `html_page`; jinja2 and matplotlib, which it needs, come with ``pytest-exportcheck[html]``
and are imported only then.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

__all__ = ["html_page", "missing_packages"]


def missing_packages() -> list[str]:
    """What the page needs and is not installed; nothing is imported."""
    return [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]


def html_page(data: Mapping[str, Any]) -> str:
    """The page of the data that ``--exportcheck-report`` writes; `ImportError` if a package is missing."""
    from .page import render

    return render(data)
