"""What a case leaves behind in its process: found, put back where that is possible, and named."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from ..patches.scoped import taken_back
from .leaks import Leak, difference, snapshot

__all__ = ["LeftBehindWarning", "Leftovers"]

#: So many a warning names; the record has all.
_SHOWN = 4

#: What these keep of a trace is theirs: tables that they fill on first use.
_OWN_STATE = ("torch._dynamo", "torch._functorch", "torch._inductor", "torch.compiler")

#: Registries of a model's parts whose entries are its state, which is looked at elsewhere.
_STATE = ("_parameters", "_buffers", "_modules")


class LeftBehindWarning(UserWarning):
    """A case changed something in the process that runs it, and did not put it back."""


class Leftovers:
    """Made before the first patch of a case is in place.

    Parameters
    ----------
    module:
        The whole model: methods and hooks of its parts, and functions of the modules that their classes come
        from, are watched with those of torch and transformers.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        modules = {cls.__module__ for part in module.modules() for cls in type(part).__mro__}
        self._before = snapshot(module, modules=sorted(modules - {"builtins"}))

    @contextlib.contextmanager
    def noted(self, record: dict[str, Any]) -> Iterator[None]:
        """Put back at the end, and say so in the record (``left_behind``) and as a warning of the case."""
        taken_back()
        try:
            yield
        except BaseException:
            # The failure is what counts, also where warnings are errors.
            with contextlib.suppress(LeftBehindWarning):
                self._note(record)
            raise
        self._note(record)

    def _note(self, record: dict[str, Any]) -> None:
        left = self.put_back()
        if left:
            record["left_behind"] = [text for text, _ in left]
        found = [text for text, matters in left if matters]
        if found:
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            text = (
                "the case left behind, for all that runs after it in the process: "
                f"{'; '.join(found[:_SHOWN])}{more}"
            )
            record.setdefault("warnings", []).append(text)
            warnings.warn(text, LeftBehindWarning, stacklevel=2)

    def put_back(self) -> list[tuple[str, bool]]:
        """Undo what can be undone.

        Returns
        -------
        list
            A sentence for each (``torch.nn.functional.gelu was changed (...): put back``), and whether it
            matters: an attribute of a class that is what it inherits changes nothing.
        """
        found = [(text, True) for text in taken_back()]
        for leak in difference(self._before):
            if not _counts(leak):
                continue
            done = False
            if leak.undo is not None:
                with contextlib.suppress(TypeError, AttributeError, KeyError):
                    leak.undo()
                    done = True
            found.append((f"{leak}: {'put back' if done else 'still there'}", not leak.inert))
        return found


def _counts(leak: Leak) -> bool:
    if leak.place.startswith(_OWN_STATE):
        return False
    if leak.place.rpartition(".")[2].startswith("__") and _is_of_a_module(leak):
        # Dynamo puts what it compiled (``__compiled_fn_1``) among the names of the model's module, and takes
        # it away.
        return False
    if leak.place.startswith("vars("):
        # Attributes that are no functions are a model's state, and one that is gone is a change of the model.
        name = leak.place.partition(") ")[2]
        function = callable(leak.value) and not isinstance(leak.value, torch.nn.Module)
        return function and not name.startswith(_STATE)
    # A lazy module gets a name when it is first asked for.
    origin = str(getattr(leak.value, "__module__", None))
    same = origin.partition(".")[0] == leak.place.partition(".")[0]
    return not (leak.change == "added" and same and _is_of_a_module(leak))


def _is_of_a_module(leak: Leak) -> bool:
    return leak.place.rpartition(".")[0] in sys.modules
