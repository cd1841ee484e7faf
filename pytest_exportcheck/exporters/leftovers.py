"""What an export leaves reachable from modules of torch and onnxscript: the last graph, and so its weights.

The one module that touches these internals (checked on torch 2.13, onnxscript 0.7); what is absent is left
alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["release_leftovers"]


def release_leftovers() -> None:
    """Let go of the graphs that earlier exports of this process left in tables of foreign modules."""
    for matcher in _matchers():
        # Each rewrite rule remembers the graph that it was last tried on, and with it the weights.
        if getattr(matcher, "_graph", None) is not None and hasattr(matcher, "_init_match"):
            matcher._graph = None
            matcher._init_match(getattr(matcher, "_verbose", 0))
    # The backend's module of a strict export, a global of the module with the frame that was traced. Its name
    # stays, as a hook may delete it.
    names = vars(sys.modules.get("torch._dynamo.functional_export", object))
    for name in [name for name in names if name.startswith("__compiled_fn_")]:
        setattr(sys.modules["torch._dynamo.functional_export"], name, None)
    # Nodes by the identity of fake tensors; torch clears it when the next trace ends.
    nodes = getattr(
        sys.modules.get("torch.fx.experimental.proxy_tensor"), "_FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT", None
    )
    if isinstance(nodes, dict):
        nodes.clear()


def _matchers() -> Iterator[Any]:
    rules = getattr(sys.modules.get("onnxscript.rewriter"), "_DEFAULT_REWRITE_RULES", ())
    waiting = list(rules)
    while waiting:
        rule = waiting.pop()
        waiting += getattr(rule, "rules", ())
        matcher = getattr(rule, "_matcher", None)
        if matcher is not None:
            yield matcher
