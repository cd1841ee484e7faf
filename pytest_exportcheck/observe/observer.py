"""`InputObserver`: record the calls of a model's method, infer export arguments and dynamic shapes."""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..pytrees import clone_tree, flatten_with_paths, register_flattening_functions
from .signature import CallSignature

__all__ = ["InputObserver", "InputObserverInfo", "ObserverWarning", "RecordedCall"]


class ObserverWarning(UserWarning):
    """A call could not be recorded; the call itself went on undisturbed."""


@dataclass
class RecordedCall:
    """One call, whole: nothing in it shares memory with the caller's tensors.

    Attributes
    ----------
    index:
        Position among the recorded calls.
    arguments:
        By name, in signature order, as they were *before* the call.
    outputs:
        What the call returned, cloned.
    duration:
        Seconds the call took.
    """

    index: int
    arguments: dict[str, Any]
    outputs: Any
    duration: float
    _leaves: dict[str, Any] | None = field(default=None, repr=False)

    def leaves(self) -> dict[str, Any]:
        """Leaf by path (``cache.layers.0.keys``), in flatten order. Needs the flattening functions."""
        if self._leaves is None:
            self._leaves = {
                path: leaf
                for name, value in self.arguments.items()
                for path, leaf in flatten_with_paths(value, name)
            }
        return self._leaves

    def output_leaves(self) -> list[tuple[str, Any]]:
        """(path, leaf) of the outputs, in flatten order."""
        return flatten_with_paths(self.outputs)


@dataclass
class InputObserverInfo:
    """What an observer recorded.

    Attributes
    ----------
    signature:
        Of the observed method; ``None`` until something was observed.
    calls:
        Recorded calls in order.
    seen:
        Calls made inside the blocks, recorded or not.
    lost:
        Calls within the limit that went well and could not be recorded (an `ObserverWarning` says why). A
        call that raised is none of them, nor is one that an export or a compilation inside the block made.
    """

    signature: CallSignature | None = None
    calls: list[RecordedCall] = field(default_factory=list)
    seen: int = 0
    lost: int = 0

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def inputs(self) -> list[dict[str, Any]]:
        """Arguments by name, one mapping per call."""
        return [call.arguments for call in self.calls]

    @property
    def flat_outputs(self) -> list[list[torch.Tensor]]:
        """Output tensors, one list per call."""
        return [
            [leaf for _, leaf in call.output_leaves() if isinstance(leaf, torch.Tensor)]
            for call in self.calls
        ]


def _is_tracing(leaves: Collection[Any]) -> bool:
    # An export or a compilation inside the block calls the method with fake tensors: no observation.
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or any(isinstance(leaf, (torch._subclasses.FakeTensor, torch.SymInt)) for leaf in leaves)
    )


class InputObserver:
    """Records what a model is called with.

    Parameters
    ----------
    value_if_missing:
        Argument name -> value that stands in for it in calls that lack it. It counts as an observation (so
        its axes can become dynamic) and is never passed to the model.

    Examples
    --------
    >>> observer = InputObserver()
    >>> with observer(model):
    ...     model(torch.randn(2, 4)); model(torch.randn(3, 4))
    >>> observer.infer_dynamic_shapes()
    ({0: _DimHint(...)},)
    """

    def __init__(self, value_if_missing: Mapping[str, Any] | None = None) -> None:
        self.value_if_missing = dict(value_if_missing or {})
        self.info = InputObserverInfo()
        self._positional = True
        self._observed: tuple[weakref.ref[torch.nn.Module], str] | None = None

    def num_obs(self) -> int:
        """Number of recorded calls."""
        return len(self.info)

    def is_empty(self) -> bool:
        """True before any call was recorded."""
        return not self.info.calls

    @contextlib.contextmanager
    def __call__(
        self, model: torch.nn.Module, store_n_calls: int = 3, method_name: str = "forward"
    ) -> Iterator[InputObserver]:
        """Record the first `store_n_calls` calls of ``model.method_name`` made inside the block.

        Raises
        ------
        ValueError
            The model has no such method.
        RuntimeError
            The observer holds calls of another model or method: they cannot be mixed.
        """
        if not callable(getattr(model, method_name, None)):
            raise ValueError(f"{type(model).__name__} does not have a method {method_name!r}")
        observed = (weakref.ref(model), method_name)
        if self.info.calls and self._observed != observed:
            raise RuntimeError(
                "this observer holds calls of another model or method: use one observer for each"
            )
        self._observed = observed
        had = method_name in vars(model)
        original = getattr(model, method_name)
        self.info.signature = CallSignature.of(original)
        setattr(model, method_name, self._wrap(original, store_n_calls))
        try:
            with register_flattening_functions():
                yield self
        finally:
            if had:
                setattr(model, method_name, original)
            else:
                # Left on the instance it would shadow every later patch of the class.
                delattr(model, method_name)

    def _wrap(self, original: Callable[..., Any], limit: int) -> Callable[..., Any]:
        info = self.info

        @functools.wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            info.seen += 1
            if len(info.calls) >= limit:
                return original(*args, **kwargs)
            arguments, problem = self._record_arguments(args, kwargs)
            begin = time.perf_counter()
            outputs = original(*args, **kwargs)
            duration = time.perf_counter() - begin
            if arguments is not None:
                problem = self._record(arguments, outputs, duration, bool(kwargs))
            if problem is not None:
                info.lost += 1
                warnings.warn(f"a call was not recorded: {problem}", ObserverWarning, stacklevel=2)
            return outputs

        return observed

    def _record_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any] | None, str | None]:
        """(copies of the arguments or ``None``, why they could not be copied or ``None``)."""
        assert self.info.signature is not None
        try:
            arguments = self.info.signature.bind(args, kwargs)
            leaves = [leaf for _, leaf in flatten_with_paths(arguments)]
            if _is_tracing(leaves):
                return None, None
            return clone_tree(arguments), None
        except Exception as error:  # the user's call must not fail because of the recording
            return None, f"{type(error).__name__}: {error}"

    def _record(self, arguments: dict[str, Any], outputs: Any, duration: float, by_name: bool) -> str | None:
        """Keep a call; returns why that was not possible."""
        try:
            kept = clone_tree(outputs)
        except Exception as error:  # as above
            return f"{type(error).__name__}: {error}"
        self.info.calls.append(RecordedCall(len(self.info.calls), arguments, kept, duration))
        if by_name:
            self._positional = False
        return None

    def _shapes(self, batch: bool | Collection[int | str]) -> Any:
        from .infer import infer_shapes

        if self.is_empty():
            raise RuntimeError("No inputs were captured.")
        assert self.info.signature is not None
        names = self.info.signature.names
        batch_names: bool | set[str]
        if isinstance(batch, bool):
            batch_names = batch
        else:
            batch_names = {names[item] if isinstance(item, int) else item for item in batch}
        return infer_shapes(
            self.info.calls,
            signature_order=names,
            defaults=self.info.signature.defaults,
            batch_dims=batch_names,
            value_if_missing=lambda name, _: self.value_if_missing.get(name),
        )

    def infer_dynamic_shapes(
        self, set_batch_dimension_for: bool | Collection[int | str] | None = None
    ) -> Any:
        """Dynamic shapes as `torch.export.export` takes them, ``Dim.DYNAMIC`` on every axis that varied.

        Parameters
        ----------
        set_batch_dimension_for:
            ``True``: axis 0 of every tensor is dynamic; names or positions: only of these arguments.

        Returns
        -------
        tuple or dict
            A tuple if every call was positional, otherwise a dict by argument name.

        Raises
        ------
        RuntimeError
            Nothing was recorded.
        ObserveError
            The calls cannot be served by one graph.
        """
        from .dynamic import dynamic_shapes_for

        with register_flattening_functions():
            shapes = self._shapes(set_batch_dimension_for or False)
            example = self._example(shapes)
            by_name = {name: dynamic_shapes_for(value, shapes, name) for name, value in example.items()}
        return tuple(by_name.values()) if self._positional else by_name

    def infer_arguments(self, index: int | None = None) -> Any:
        """Arguments for an export: the first call that has all of them, or call `index` completed.

        Returns
        -------
        tuple or dict
            As for `infer_dynamic_shapes`. Tensors are copies.
        """
        with register_flattening_functions():
            shapes = self._shapes(False)
            if index is None:
                arguments = self._example(shapes)
            else:
                arguments = shapes.complete(self.info.calls[index])
            arguments = clone_tree(arguments)
        return tuple(arguments.values()) if self._positional else arguments

    def _example(self, shapes: Any) -> dict[str, Any]:
        complete = [call for call in self.info.calls if not shapes.missing(call)]
        call = complete[0] if complete else max(self.info.calls, key=lambda c: len(c.leaves()))
        result: dict[str, Any] = call.arguments if complete else shapes.complete(call)
        return result
