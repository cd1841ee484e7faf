"""Which distributions a spec needs and does not find. Asks package metadata only; imports none of them."""

from __future__ import annotations

from .model import ModelSpec

__all__ = ["missing_requirements"]


def missing_requirements(spec: ModelSpec) -> list[str]:
    """The entries of ``requires`` that are not installed, or not in that version, as the spec writes them.

    An entry whose environment marker does not hold here (``; python_version < '3.9'``) is not needed.
    """
    from importlib.metadata import PackageNotFoundError, version

    from packaging.requirements import Requirement

    missing = []
    for text in spec.requires:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            missing.append(text)
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            missing.append(text)
    return missing
