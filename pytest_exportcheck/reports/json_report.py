"""The JSON report: one environment, one record per case, schema 1."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..goldens import write_atomically
from .record import json_ready, sort_key, to_plain

__all__ = ["SCHEMA", "environment", "package_versions", "write_data", "write_json"]

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
    """What the verdicts depend on. The GPU is named only if torch was imported anyway."""
    facts: dict[str, Any] = {
        "packages": package_versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "arguments": [str(argument) for argument in arguments],
        "variables": {
            name: os.environ[name]
            for name in ("CI", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES")
            if name in os.environ
        },
    }
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_available():
        facts["cuda"] = [cuda.get_device_name(index) for index in range(cuda.device_count())]
    return facts


def write_json(path: Path, facts: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
    """Write the report; `OSError` if that cannot be done, and then the old file is untouched."""
    write_data(path, {"schema": SCHEMA, "environment": facts, "cases": sorted(records, key=sort_key)})


def write_data(path: Path, data: Mapping[str, Any]) -> None:
    """Write the data of a report; `OSError` as above."""
    text = json.dumps(json_ready(to_plain(data)), indent=1, allow_nan=False, ensure_ascii=False)
    write_atomically(path, text + "\n")
