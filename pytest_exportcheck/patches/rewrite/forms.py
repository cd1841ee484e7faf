"""How a variable leaves a branch: as the tensor it is, as a tensor made of a number, or item by item."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .probe import Kind
from .tests_in import Branch, as_tensor
from .values import RewriteRefused

__all__ = ["Form", "has_number", "is_operand", "merged", "output", "selectable"]

_DTYPES = {"bool": "torch.bool", "int": "torch.int64", "float": "torch.float64"}


@dataclass(frozen=True)
class Form:
    """The common form of a variable in both branches.

    Attributes
    ----------
    kind:
        ``tensor``, ``number`` (a tensor of shape [] made of it), ``none``, ``container``.
    dtype:
        As source text, ``torch.float32``.
    contiguous, same_shape:
        Whether that was seen of all values; shapes may differ between the branches where it is `False`.
    items, type:
        Of a container: the forms by index or key, and its type.
    """

    kind: str
    dtype: str = ""
    contiguous: bool = True
    same_shape: bool = True
    items: tuple[tuple[Any, Form], ...] = ()
    type: str = ""


def merged(text: str, true: set[Kind], false: set[Kind], branch: Branch) -> Form:
    """The form of variable `text`; `RewriteRefused` where the branches do not agree on one."""
    both = true | false
    families = {kind.kind for kind in both}

    def refuse(advice: str) -> RewriteRefused:
        left = " or ".join(sorted({str(kind) for kind in true})[:3])
        right = " or ".join(sorted({str(kind) for kind in false})[:3])
        return RewriteRefused(
            f"`{text}` is {left} where `{branch.test}` is True, and {right} where it is False",
            advice,
            branch.place,
        )

    if families == {"tensor"}:
        if len({kind.dtype for kind in both}) > 1:
            raise refuse(f"give `{text}` one dtype in both branches, with `.to(...)`")
        if len({len(kind.shape or ()) for kind in both}) > 1:
            raise refuse(f"give `{text}` the same number of dimensions in both branches")
        shapes = {kind.shape for kind in true} == {kind.shape for kind in false}
        return Form("tensor", str(next(iter(both)).dtype), all(kind.contiguous for kind in both), shapes)
    if families == {"number"}:
        types = {kind.type for kind in both}
        if len(types) > 1:
            raise refuse(f"give `{text}` one type in both branches")
        return Form("number", _DTYPES[types.pop()])
    if families == {"tensor", "number"}:
        tensors = [kind for kind in both if kind.kind == "tensor"]
        if any(kind.shape for kind in tensors) or len({kind.dtype for kind in tensors}) > 1:
            raise refuse(
                f"let `{text}` be a tensor of the same shape and dtype in both, with torch.full_like"
            )
        return Form("number", str(tensors[0].dtype))
    if families == {"none"}:
        return Form("none")
    if families == {"container"}:
        keys = {tuple(key for key, _ in kind.items) for kind in both}
        types = {kind.type for kind in both}
        if len(keys) > 1 or len(types) > 1:
            raise refuse(f"give `{text}` the same structure in both branches")
        items = []
        for position, key in enumerate(keys.pop()):
            left, right = ({kind.items[position][1] for kind in side} for side in (true, false))
            inner = merged(f"{text}[{key!r}]", left, right, branch)
            if inner.kind == "none":
                raise refuse("leave None out of what the branches compute")
            items.append((key, inner))
        return Form("container", items=tuple(items), type=types.pop())
    raise refuse(
        "let both branches compute a tensor of the same shape and dtype"
        if "none" in families
        else "let the branches compute tensors only, and build the object after the `if`"
    )


def is_operand(kind: Kind) -> bool:
    """Whether a value can be an operand of `torch.cond`."""
    if kind.kind == "container":
        return bool(kind.items) and all(is_operand(item) for _, item in kind.items)
    return kind.kind == "tensor"


def selectable(form: Form) -> bool:
    """Whether `torch.where` can choose between two values."""
    return form.kind == "number" or (form.kind == "tensor" and form.same_shape)


def has_number(form: Form) -> bool:
    """Whether a Python number becomes a tensor."""
    return form.kind == "number" or any(has_number(item) for _, item in form.items)


def output(value: ast.expr, form: Form, finish: Callable[[ast.expr, Form], ast.expr]) -> ast.expr:
    """The expression for `value` in its form; `finish` is applied to each tensor."""
    if form.kind == "number":
        return finish(as_tensor(value, form.dtype), form)
    if form.kind == "container":
        items = [
            (key, output(ast.Subscript(value=value, slice=ast.Constant(key), ctx=ast.Load()), item, finish))
            for key, item in form.items
        ]
        if form.type == "dict":
            return ast.Dict(keys=[ast.Constant(key) for key, _ in items], values=[item for _, item in items])
        kind = ast.Tuple if form.type == "tuple" else ast.List
        return kind(elts=[item for _, item in items], ctx=ast.Load())
    return finish(value, form)
