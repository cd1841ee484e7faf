"""After a failure: which step, which node, which submodule, and what is known about it."""

from __future__ import annotations

from .causes import CAUSES, Cause, known_causes
from .culprits import Culprit, CulpritSearch, find_culprits
from .diagnosis import Diagnosis, diagnose, diagnose_case
from .ladder import Ladder, Rung, climb
from .nodes import NodeError, NodeSearch, first_bad_node
from .pieces import ModelDiagnoseOutput
from .status import CustomOpStrategy, StatusExport, StatusExportCode
from .subject import Clock, Sample, Subject, subject_of
from .trace import trace_execution_piece_by_piece, trace_forward_execution

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
