"""Which patches an export went through: their calls, and the nodes of the graph, by their stack traces."""

from __future__ import annotations

import re
from typing import Any

import torch

from .engine import Activity, frame_of
from .modes import PatchList

__all__ = ["diffs_of", "evidence", "nodes_through"]

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line \d+, in (?P<name>.+)')


def evidence(activity: Any, program: Any) -> dict[str, Any]:
    """What the record says of the patches of one export; empty for a mode that tells nothing.

    Parameters
    ----------
    activity:
        What the mode's block yielded.
    program:
        An ExportedProgram, or a program that has one (``torch.onnx.ONNXProgram``); nodes of others are not
        counted.
    """
    if not isinstance(activity, Activity):
        return {}
    found: dict[str, Any] = {"active": len(activity.patches), "called": activity.called()}
    exported = getattr(program, "exported_program", program)
    if isinstance(exported, torch.export.ExportedProgram):
        found["nodes"] = nodes_through(exported.graph_module, activity)
    rewritten = {
        name: list(patch.rewritten.targets)
        for name, patch in activity.patches.items()
        if patch.rewritten is not None
    }
    if rewritten:
        found["rewritten"] = rewritten
    if activity.resting:
        found["resting"] = dict(activity.resting)
    return found


def diffs_of(mode: Any, model: torch.nn.Module, target: str) -> dict[str, str]:
    """Name -> unified diff and notes of each method that the mode rewrites; empty for other modes."""
    if not isinstance(mode, PatchList):
        return {}
    patches = [patch for patch in mode.patches(model, target) if patch.rewritten is not None]
    return {
        patch.name: patch.rewritten.dump + "".join(f"# {note}\n" for note in patch.rewritten.notes)
        for patch in patches
    }


def nodes_through(module: torch.nn.Module, activity: Activity) -> dict[str, int]:
    """By name, how many nodes of a graph (subgraphs included) were made inside each patch."""
    # Of the wrapper, and not of the replacement: its code may be called elsewhere, or serve several patches.
    frames_of = {frame_of(name): name for name in activity.called()}
    # Rewritten code has a file of its own.
    own = {
        code.co_filename: name
        for name, patch in activity.patches.items()
        if patch.rewritten is not None
        for code in activity.codes[name]
    }
    counts: dict[str, int] = {}
    for part in module.modules():
        if not isinstance(part, torch.fx.GraphModule):
            continue
        for node in part.graph.nodes:
            trace = node.meta.get("stack_trace")
            if not trace:
                continue
            frames = [match.groups() for match in _FRAME.finditer(trace)]
            names = {frames_of[frame] for _, frame in frames if frame in frames_of}
            names |= {own[path] for path, _ in frames if path in own}
            for name in names:
                counts[name] = counts.get(name, 0) + 1
    return counts
