"""The JSON report: one environment, one record per case, schema 1."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..goldens import write_atomically
from .record import json_ready, sort_key, to_plain

__all__ = ["SCHEMA", "environment", "package_versions", "report_data", "write_data"]

SCHEMA = 1

#: Packages whose version can change a verdict.
PACKAGES = (
    "pytest-exportcheck",
    "torch",
    "transformers",
    "onnx",
    "onnxscript",
    "onnx-ir",
    "onnxruntime",
    "onnxruntime-gpu",
    "numpy",
    "safetensors",
    "pytest",
    "pytest-xdist",
)


#: Environment variables that can change a verdict.
_VARIABLES = (
    "CI",
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "PYTEST_ADDOPTS",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)


def package_versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Installed versions, from metadata: nothing is imported."""
    found = {name: _version(name) for name in names}
    return {name: installed for name, installed in found.items() if installed is not None}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def environment(arguments: Sequence[str]) -> dict[str, Any]:
    """What the verdicts depend on, as far as this process knows it without importing anything."""
    return {
        "packages": package_versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "arguments": [str(argument) for argument in arguments],
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _cpu_name() -> str | None:
    """The model of the processor, which decides which kernels run; ``None`` where nothing tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or platform.processor() or None


def report_data(facts: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The report as it is written, and as it is read back."""
    data = {"schema": SCHEMA, "environment": facts, "cases": sorted(records, key=sort_key)}
    plain: dict[str, Any] = json_ready(to_plain(data))
    return plain


def write_data(path: Path, data: Mapping[str, Any]) -> None:
    """Write the data of a report; `OSError` if that cannot be done, and then the old file is untouched."""
    text = json.dumps(json_ready(to_plain(data)), indent=1, allow_nan=False, ensure_ascii=False)
    write_atomically(path, text + "\n")
