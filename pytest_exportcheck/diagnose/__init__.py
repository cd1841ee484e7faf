"""After a failure: which step, which node, which submodule, and what is known about it.

Imported on first use: the table of known causes is asked by runs that have no need of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import importer

_PUBLIC = {
    "CAUSES": "causes",
    "Cause": "causes",
    "Clock": "subject",
    "Culprit": "culprits",
    "CulpritSearch": "culprits",
    "CustomOpStrategy": "status",
    "Diagnosis": "diagnosis",
    "Ladder": "ladder",
    "ModelDiagnoseOutput": "pieces",
    "NodeError": "nodes",
    "NodeSearch": "nodes",
    "Rung": "ladder",
    "Sample": "subject",
    "StatusExport": "status",
    "StatusExportCode": "status",
    "Subject": "subject",
    "climb": "ladder",
    "diagnose": "diagnosis",
    "diagnose_case": "diagnosis",
    "find_culprits": "culprits",
    "first_bad_node": "nodes",
    "known_causes": "causes",
    "subject_of": "subject",
    "trace_execution_piece_by_piece": "trace",
    "trace_forward_execution": "trace",
}

__all__ = [
    "CAUSES",
    "Cause",
    "Clock",
    "Culprit",
    "CulpritSearch",
    "CustomOpStrategy",
    "Diagnosis",
    "Ladder",
    "ModelDiagnoseOutput",
    "NodeError",
    "NodeSearch",
    "Rung",
    "Sample",
    "StatusExport",
    "StatusExportCode",
    "Subject",
    "climb",
    "diagnose",
    "diagnose_case",
    "find_culprits",
    "first_bad_node",
    "known_causes",
    "subject_of",
    "trace_execution_piece_by_piece",
    "trace_forward_execution",
]

if TYPE_CHECKING:
    from .causes import CAUSES, Cause, known_causes
    from .culprits import Culprit, CulpritSearch, find_culprits
    from .diagnosis import Diagnosis, diagnose, diagnose_case
    from .ladder import Ladder, Rung, climb
    from .nodes import NodeError, NodeSearch, first_bad_node
    from .pieces import ModelDiagnoseOutput
    from .status import CustomOpStrategy, StatusExport, StatusExportCode
    from .subject import Clock, Sample, Subject, subject_of
    from .trace import trace_execution_piece_by_piece, trace_forward_execution


__getattr__ = importer(__name__, _PUBLIC)
