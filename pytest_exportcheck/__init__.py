"""pytest-exportcheck: does a PyTorch model still export, and still give the right numbers?

Importing the package loads nothing heavy: the public names below are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy import importer

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
    "InputCandidate": "pytest_exportcheck.observe",
    "InputObserverInfo": "pytest_exportcheck.observe",
    "ObserverWarning": "pytest_exportcheck.observe",
    "max_diff": "pytest_exportcheck.checks.max_diff",
    "string_diff": "pytest_exportcheck.checks.max_diff",
    "string_type": "pytest_exportcheck.pytrees.string_type",
    "CacheKeyValue": "pytest_exportcheck.pytrees.make",
    "make_dynamic_cache": "pytest_exportcheck.pytrees.make",
    "make_static_cache": "pytest_exportcheck.pytrees.make",
    "make_encoder_decoder_cache": "pytest_exportcheck.pytrees.make",
    "make_dynamic_shapes_kv_cache": "pytest_exportcheck.pytrees.make",
    "torch_deepcopy": "pytest_exportcheck.pytrees.make",
    "flatten_object": "pytest_exportcheck.pytrees.make",
    "flatten_unflatten_for_dynamic_shapes": "pytest_exportcheck.pytrees.make",
    "replacement_before_exporting": "pytest_exportcheck.pytrees.make",
    "flatten_dynamic_cache": "pytest_exportcheck.pytrees.make",
    "flatten_with_keys_dynamic_cache": "pytest_exportcheck.pytrees.make",
    "unflatten_dynamic_cache": "pytest_exportcheck.pytrees.make",
    "flatten_static_cache": "pytest_exportcheck.pytrees.make",
    "flatten_with_keys_static_cache": "pytest_exportcheck.pytrees.make",
    "unflatten_static_cache": "pytest_exportcheck.pytrees.make",
    "flatten_encoder_decoder_cache": "pytest_exportcheck.pytrees.make",
    "flatten_with_keys_encoder_decoder_cache": "pytest_exportcheck.pytrees.make",
    "unflatten_encoder_decoder_cache": "pytest_exportcheck.pytrees.make",
    "flatten_base_model_output": "pytest_exportcheck.pytrees.make",
    "flatten_with_keys_base_model_output": "pytest_exportcheck.pytrees.make",
    "unflatten_base_model_output": "pytest_exportcheck.pytrees.make",
    "load_dynamic_shapes": "pytest_exportcheck.checks.golden",
    "CustomOpStrategy": "pytest_exportcheck.diagnose.status",
    "StatusExport": "pytest_exportcheck.diagnose.status",
    "StatusExportCode": "pytest_exportcheck.diagnose.status",
    "ModelDiagnoseOutput": "pytest_exportcheck.diagnose.pieces",
    "trace_execution_piece_by_piece": "pytest_exportcheck.diagnose.trace",
    "trace_forward_execution": "pytest_exportcheck.diagnose.trace",
    "Diagnosis": "pytest_exportcheck.diagnose.diagnosis",
    "diagnose_case": "pytest_exportcheck.diagnose.diagnosis",
    "register_class_flattening": "pytest_exportcheck.pytrees",
    "register_flattening_functions": "pytest_exportcheck.pytrees",
    "unregister_class_flattening": "pytest_exportcheck.pytrees",
    "register_class_serialization": "pytest_exportcheck.pytrees.registration",
    "unregister_class_serialization": "pytest_exportcheck.pytrees.registration",
    "register_cache_serialization": "pytest_exportcheck.pytrees.registration",
    "unregister_cache_serialization": "pytest_exportcheck.pytrees.registration",
    "Patch": "pytest_exportcheck.patches.patch",
    "StaticAxisError": "pytest_exportcheck.patches.stop_if_static",
    "torch_export_patches": "pytest_exportcheck.patches.api",
    "torch_export_rewrite": "pytest_exportcheck.patches.api",
}

__all__ = [
    "STAGES",
    "CacheKeyValue",
    "CaseId",
    "CustomOpStrategy",
    "Diagnosis",
    "ExportCheckError",
    "InputCandidate",
    "InputObserver",
    "InputObserverInfo",
    "ModelDiagnoseOutput",
    "ModelSpec",
    "ObserverWarning",
    "Patch",
    "SpecError",
    "StaticAxisError",
    "StatusExport",
    "StatusExportCode",
    "__version__",
    "assert_dynamic_shapes",
    "assert_export",
    "diagnose_case",
    "flatten_base_model_output",
    "flatten_dynamic_cache",
    "flatten_encoder_decoder_cache",
    "flatten_object",
    "flatten_static_cache",
    "flatten_unflatten_for_dynamic_shapes",
    "flatten_with_keys_base_model_output",
    "flatten_with_keys_dynamic_cache",
    "flatten_with_keys_encoder_decoder_cache",
    "flatten_with_keys_static_cache",
    "load_dynamic_shapes",
    "load_spec",
    "make_dynamic_cache",
    "make_dynamic_shapes_kv_cache",
    "make_encoder_decoder_cache",
    "make_static_cache",
    "max_diff",
    "register_cache_serialization",
    "register_class_flattening",
    "register_class_serialization",
    "register_flattening_functions",
    "replacement_before_exporting",
    "string_diff",
    "string_type",
    "torch_deepcopy",
    "torch_export_patches",
    "torch_export_rewrite",
    "trace_execution_piece_by_piece",
    "trace_forward_execution",
    "unflatten_base_model_output",
    "unflatten_dynamic_cache",
    "unflatten_encoder_decoder_cache",
    "unflatten_static_cache",
    "unregister_cache_serialization",
    "unregister_class_flattening",
    "unregister_class_serialization",
]

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .cases import CaseId
    from .checks.golden import load_dynamic_shapes
    from .checks.max_diff import max_diff, string_diff
    from .diagnose.diagnosis import Diagnosis, diagnose_case
    from .diagnose.pieces import ModelDiagnoseOutput
    from .diagnose.status import CustomOpStrategy, StatusExport, StatusExportCode
    from .diagnose.trace import trace_execution_piece_by_piece, trace_forward_execution
    from .errors import STAGES, ExportCheckError, SpecError
    from .observe import InputCandidate, InputObserver, InputObserverInfo, ObserverWarning
    from .patches.api import torch_export_patches, torch_export_rewrite
    from .patches.patch import Patch
    from .patches.stop_if_static import StaticAxisError
    from .pytrees import register_class_flattening, register_flattening_functions, unregister_class_flattening
    from .pytrees.make import (
        CacheKeyValue,
        flatten_base_model_output,
        flatten_dynamic_cache,
        flatten_encoder_decoder_cache,
        flatten_object,
        flatten_static_cache,
        flatten_unflatten_for_dynamic_shapes,
        flatten_with_keys_base_model_output,
        flatten_with_keys_dynamic_cache,
        flatten_with_keys_encoder_decoder_cache,
        flatten_with_keys_static_cache,
        make_dynamic_cache,
        make_dynamic_shapes_kv_cache,
        make_encoder_decoder_cache,
        make_static_cache,
        replacement_before_exporting,
        torch_deepcopy,
        unflatten_base_model_output,
        unflatten_dynamic_cache,
        unflatten_encoder_decoder_cache,
        unflatten_static_cache,
    )
    from .pytrees.registration import (
        register_cache_serialization,
        register_class_serialization,
        unregister_cache_serialization,
        unregister_class_serialization,
    )
    from .pytrees.string_type import string_type
    from .spec import ModelSpec, load_spec
    from .suite import assert_dynamic_shapes, assert_export


__getattr__ = importer(__name__, _PUBLIC)
