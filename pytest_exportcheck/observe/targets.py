"""What is observed and exported: a method of the model, or of one of its submodules."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ObserveError
from ..pytrees import clone_tree
from ..spec import ModelSpec, ObservedTarget
from ..spec.names import choices
from .attach import has_forward_hooks
from .signature import CallSignature

__all__ = ["Target", "find_module", "target_text"]

#: How many submodules a message lists.
_MOST_NAMES = 12


@dataclass(frozen=True, eq=False)
class Target:
    """A method of a module, as the observed calls called it.

    Attributes
    ----------
    text:
        As messages name it: ``model.vision_tower (CLIPVisionModel.forward)``.
    module:
        The model or a submodule of it, in eval mode.
    """

    text: str
    module: torch.nn.Module
    method: str
    signature: CallSignature

    def eager(self, arguments: Mapping[str, Any]) -> Any:
        """Call the method with (copies of) `arguments`; outputs are the module's own."""
        return self.call(clone_tree(dict(arguments)))

    def call(self, arguments: Mapping[str, Any]) -> Any:
        """Call the method with `arguments` themselves, which it may write into."""
        args, kwargs = self.signature.call(dict(arguments))
        with torch.no_grad():
            return getattr(self.module, self.method)(*args, **kwargs)

    def accepts(self, arguments: Mapping[str, Any]) -> bool:
        """Whether eager takes `arguments`."""
        try:
            self.eager(arguments)
        except Exception:
            # Whatever eager raises is its way of refusing these sizes.
            return False
        return True


def target_text(path: str, module: torch.nn.Module, method: str) -> str:
    """``LlamaModel.forward``, after the path of a submodule."""
    name = f"{type(module).__name__}.{method}"
    return f"{path} ({name})" if path else name


def find_module(spec: ModelSpec, observed: ObservedTarget, model: torch.nn.Module) -> torch.nn.Module:
    """The module of a target of `spec`.

    Raises
    ------
    ObserveError
        There is no such submodule or method, or hooks of the module's own would be left out.
    """
    path, method, place = observed.path, observed.method, spec.place(*observed.named)
    module = _submodule(model, path, place) if path else model
    if not callable(getattr(module, method, None)):
        if spec.observe.target is None:
            raise ObserveError(f"{type(model).__name__} has no method {method!r} (observe.method)")
        methods = [key for key in vars(type(module)) if not key.startswith("_")]
        raise ObserveError(
            f"{place}: {type(module).__name__} has no method {method!r}{choices(method, methods)}"
        )
    if method == "forward" and has_forward_hooks(module):
        raise ObserveError(
            f"{path or type(model).__name__} has forward hooks of its own: they run around the observed "
            "`forward`, and an exporter puts them into the program",
            details=["wrap it: a module whose forward calls this one has the hooks inside"],
        )
    return module


def _submodule(model: torch.nn.Module, path: str, place: str) -> torch.nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        pass
    names = [name for name, _ in model.named_modules() if name]
    # The same last part somewhere else first: prefixes are what one remembers wrongly.
    last = path.rpartition(".")[2]
    near = [name for name in names if name.rpartition(".")[2] == last]
    near += [name for name in difflib.get_close_matches(path, names, n=3, cutoff=0.6) if name not in near]
    if near:
        listed = "did you mean " + " or ".join(map(repr, near[:3])) + "?"
    else:
        # The names of one level: a large model has thousands.
        parent = path
        while parent not in names and parent:
            parent = parent.rpartition(".")[0]
        children = [name for name in names if name.rpartition(".")[0] == parent]
        more = f" and {len(children) - _MOST_NAMES} more" if len(children) > _MOST_NAMES else ""
        listed = f"{parent or 'it'} has {', '.join(children[:_MOST_NAMES]) or 'none'}{more}"
    raise ObserveError(f"{place}: {type(model).__name__} has no submodule {path!r} ({listed})")
