"""Which exporters exist, by name: the façade of `pytest_exportcheck.registry` for this room."""

from __future__ import annotations

from ..registry import EXPORTERS, brings_patches, exporter_names, load_exporter, register_exporter

__all__ = ["EXPORTERS", "brings_patches", "exporter_names", "load_exporter", "register", "register_exporter"]

register = register_exporter
