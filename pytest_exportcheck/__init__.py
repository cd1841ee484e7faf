"""pytest-exportcheck: does a PyTorch model still export, and still give the right numbers?

Importing the package loads nothing heavy: the public names below are resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

#: Public name -> module that defines it. Resolved lazily (PEP 562), so that `import pytest_exportcheck`
#: in a pytest run that does not use the plugin costs nothing.
_PUBLIC = {
    "CaseId": "pytest_exportcheck.cases",
    "ExportCheckError": "pytest_exportcheck.errors",
    "STAGES": "pytest_exportcheck.errors",
    "SpecError": "pytest_exportcheck.errors",
    "load_spec": "pytest_exportcheck.spec",
    "ModelSpec": "pytest_exportcheck.spec",
    "assert_dynamic_shapes": "pytest_exportcheck.suite",
    "assert_export": "pytest_exportcheck.suite",
    "InputObserver": "pytest_exportcheck.observe",
    "load_dynamic_shapes": "pytest_exportcheck.checks.golden",
    "register_class_flattening": "pytest_exportcheck.pytrees",
    "register_flattening_functions": "pytest_exportcheck.pytrees",
    "unregister_class_flattening": "pytest_exportcheck.pytrees",
}

__all__ = [
    "STAGES",
    "CaseId",
    "ExportCheckError",
    "InputObserver",
    "ModelSpec",
    "SpecError",
    "__version__",
    "assert_dynamic_shapes",
    "assert_export",
    "load_dynamic_shapes",
    "load_spec",
    "register_class_flattening",
    "register_flattening_functions",
    "unregister_class_flattening",
]

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .cases import CaseId
    from .checks.golden import load_dynamic_shapes
    from .errors import STAGES, ExportCheckError, SpecError
    from .observe import InputObserver
    from .pytrees import register_class_flattening, register_flattening_functions, unregister_class_flattening
    from .spec import ModelSpec, load_spec
    from .suite import assert_dynamic_shapes, assert_export


def __getattr__(name: str) -> object:
    try:
        module = _PUBLIC[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(import_module(module), name)
