"""`InputCandidate`: the inputs of one call, and what an export with them would need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..pytrees import clone_tree, flatten_with_paths, register_flattening_functions
from .oblivious import needs_backed_size_oblivious

__all__ = ["InputCandidate"]


class InputCandidate:
    """Inputs that a model was called with.

    Parameters
    ----------
    args, kwargs:
        As passed, without the keyword constants.
    clone:
        Whether to keep copies of the tensors instead of the tensors themselves.
    cst_kwargs:
        Keyword arguments that are no tensors.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        clone: bool = False,
        cst_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        with register_flattening_functions(None):
            kept = (tuple(args), dict(kwargs))
            kept = clone_tree(kept) if clone else kept
        self._args: tuple[Any, ...] = kept[0]
        self._kwargs: dict[str, Any] = kept[1]
        self.cst_kwargs = dict(cst_kwargs or {})
        self._known: tuple[str, ...] = ()
        self._aligned: Sequence[str] | None = None
        self._copies = False
        #: A name of the record -> what the caller wrote.
        self._spelled: Callable[[str], str] = str

    @classmethod
    def _recorded(
        cls,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cst_kwargs: dict[str, Any],
        names: tuple[str, ...],
        aligned: Sequence[str] | None,
        spelled: Callable[[str], str],
    ) -> InputCandidate:
        """Of a record: every access gives copies, since the record must stay as it is."""
        made = cls(args, kwargs, False, {spelled(name): value for name, value in cst_kwargs.items()})
        made._known, made._aligned, made._copies, made._spelled = names, aligned, True, spelled
        return made

    def _give(self, value: Any) -> Any:
        if not self._copies:
            return value
        with register_flattening_functions(None):
            return clone_tree(value)

    @property
    def args(self) -> tuple[Any, ...]:
        """Positional arguments."""
        given: tuple[Any, ...] = self._give(self._args)
        return given

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments, without the constants."""
        given: dict[str, Any] = self._give(self._kwargs)
        return {self._spelled(name): value for name, value in given.items()}

    @property
    def _names(self) -> Sequence[str]:
        return self._known or [str(index) for index in range(len(self._args))]

    def _by_path(self) -> dict[str, torch.Tensor]:
        with register_flattening_functions(None):
            return {
                path: leaf
                for name, value in [*zip(self._names, self._args, strict=True), *self._kwargs.items()]
                for path, leaf in flatten_with_paths(value, name)
                if isinstance(leaf, torch.Tensor)
            }

    @property
    def flat_list(self) -> list[torch.Tensor]:
        """The tensors, in flatten order."""
        return [self._give(tensor) for tensor in self._by_path().values()]

    def __len__(self) -> int:
        return len(self._by_path())

    @property
    def aligned_flat_list(self) -> list[torch.Tensor | None] | None:
        """One entry per tensor of the inferred interface, ``None`` where this call has none.

        ``None`` altogether before an inference aligned the calls of an observer.
        """
        if self._aligned is None:
            return None
        found = self._by_path()
        return [self._give(found[path]) if path in found else None for path in self._aligned]

    @property
    def n_aligned_tensors(self) -> int:
        """Length of `aligned_flat_list`.

        Raises
        ------
        RuntimeError
            The inputs were not aligned.
        """
        if self._aligned is None:
            raise RuntimeError("This input was not aligned with the others.")
        return len(self._aligned)

    def str_obs(self) -> str:
        """One line about it, with shapes."""
        from ..pytrees.string_type import string_type

        parts = [
            f"{name}={string_type(value, with_shape=True)}"
            for name, value in (("args", self._args), ("kwargs", self._kwargs))
        ]
        return f"InputCandidate({', '.join(parts)}, cst_kwargs={self.cst_kwargs!r})"

    def needs_backed_size_oblivious(self, dynamic_shapes: Any) -> bool:
        """Whether a dynamic axis has size 0 or 1 here.

        `torch.export.export` takes such sizes for constants and refuses the dynamic axis, unless
        ``torch.fx.experimental._config.backed_size_oblivious`` is set (`torch.onnx.export` sets it).

        Raises
        ------
        RuntimeError
            `dynamic_shapes` has entries for what is no input, or names an axis that a tensor lacks.
        """
        with register_flattening_functions(None):
            return needs_backed_size_oblivious(
                self._args, self._kwargs, dynamic_shapes, self._known, self.cst_kwargs
            )
