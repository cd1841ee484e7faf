"""Indices in the body of a `torch.while_loop`: the counter is a tensor there, and its value is not known."""

from __future__ import annotations

import ast
import copy
from typing import Any

from .names import loads
from .tests_in import assign, expression, name

__all__ = ["IndexByTensor"]


class IndexByTensor(ast.NodeTransformer):
    """``x[i]`` with `torch.index_select`, ``x[i] = v`` with `torch.index_copy`.

    Parameters
    ----------
    promoted:
        Names of numbers that the loop carries as tensors.
    negative:
        Those of them that may be negative: they count from the end, as what is computed from them may.
    """

    def __init__(self, promoted: set[str], negative: set[str] | None = None) -> None:
        self.promoted = promoted
        self.negative = negative or set()

    def visit_Assign(self, node: ast.Assign) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id in self.promoted:
            self.promoted |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        target = node.targets[0] if len(node.targets) == 1 else None
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            found = self._dimension(target)
            if found is not None:
                dimension, index = found
                text = f"x.index_copy({dimension}, torch.as_tensor(i).reshape(1), v.unsqueeze({dimension}))"
                index = self._from_the_front(name(target.value.id), dimension, index)
                value = expression(text, x=name(target.value.id), i=index, v=self.visit(node.value))
                return assign(target.value.id, value)
        return self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        if isinstance(node.target, ast.Subscript) and self._dimension(node.target) is not None:
            read = copy.copy(node.target)
            read.ctx = ast.Load()
            value = ast.BinOp(left=read, op=node.op, right=node.value)
            return self.visit(ast.copy_location(ast.Assign(targets=[node.target], value=value), node))
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        found = self._dimension(node) if isinstance(node.ctx, ast.Load) else None
        if found is None:
            return self.generic_visit(node)
        dimension, index = found
        text = f"x.index_select({dimension}, i.reshape(1)).squeeze({dimension})"
        value = self.visit(node.value)
        return expression(text, x=value, i=self._from_the_front(value, dimension, index))

    def _from_the_front(self, tensor: ast.expr, dimension: int, index: ast.expr) -> ast.expr:
        """`torch.index_select` and `torch.index_copy` take no negative index."""
        if isinstance(index, ast.Name) and index.id not in self.negative:
            return index
        if not isinstance(tensor, (ast.Name, ast.Attribute)):
            return index
        return expression(f"torch.where(i < 0, i + x.shape[{dimension}], i)", i=index, x=tensor)

    def _dimension(self, node: ast.Subscript) -> tuple[int, ast.expr] | None:
        """Which dimension a counter indexes, where all others are taken whole."""
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        places = [k for k, item in enumerate(items) if loads(item) & self.promoted]
        if len(places) != 1 or isinstance(items[places[0]], ast.Slice):
            return None
        others = [item for k, item in enumerate(items) if k != places[0]]
        whole = all(isinstance(o, ast.Slice) and not (o.lower or o.upper or o.step) for o in others)
        return (places[0], items[places[0]]) if whole else None
