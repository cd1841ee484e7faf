"""Control flow that depends on tensors, rewritten so that it exports, and proven in eager."""

from __future__ import annotations

from .apply import rewrite_for_export, rewrite_until_exported, rewritten_in_place
from .locate import locate
from .patches import patches_for
from .transform import rewrite_function, transform_method
from .values import BranchProof, LoopProof, Place, Proof, RewriteRefused, Rewriting, RewrittenMethod, Site

__all__ = [
    "BranchProof",
    "LoopProof",
    "Place",
    "Proof",
    "RewriteRefused",
    "Rewriting",
    "RewrittenMethod",
    "Site",
    "locate",
    "patches_for",
    "rewrite_for_export",
    "rewrite_function",
    "rewrite_until_exported",
    "rewritten_in_place",
    "transform_method",
]
