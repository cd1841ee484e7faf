"""`InputObserver`: record the calls of a model's method, infer export arguments and dynamic shapes."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from ..plurals import counted
from ..pytrees import clone_tree, register_flattening_functions
from .attach import attached, has_forward_hooks
from .candidate import InputCandidate
from .interface import InferenceError, Interface, infer_interface, warn
from .placement import PLACES, Place
from .recorder import Recorder
from .records import InputObserverInfo, ObserverWarning, RecordedCall
from .signature import CallSignature

__all__ = [
    "InferenceError",
    "InputCandidate",
    "InputObserver",
    "InputObserverInfo",
    "ObserverWarning",
    "RecordedCall",
]


_UNREACHED = (
    "no call reached {} inside the block: another method or module was called, or a compiled or scripted "
    "module around it, which runs without it; observe what is called"
)


def _innermost(model: torch.nn.Module) -> torch.nn.Module:
    """The module behind `torch.compile` and DataParallel, whose signature names the arguments."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        elif isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
            model = model.module
        else:
            return model


def is_pretrained(model: torch.nn.Module) -> bool:
    """Whether the class is one of transformers, which read flags that a call leaves out from their config."""
    return any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__)


def _config_flags(model: torch.nn.Module) -> dict[str, bool]:
    """Flags that ``generate`` passes though the config says the same: no constants of the calls.

    ``**kwargs`` catches them, and torch.export takes no dynamic shapes for a call with such an argument.
    """
    config = getattr(model, "config", None) if is_pretrained(model) else None
    names = ("use_cache", "return_dict", "output_attentions", "output_hidden_states")
    values = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in values.items() if isinstance(value, bool)}


class InputObserver:
    """Records what a model is called with.

    Parameters
    ----------
    value_if_missing:
        Argument (name, or position where ``None`` is passed) -> value that stands in for it in calls that
        lack it. It counts as an observation (so its axes can become dynamic) and is never passed to the
        model.

    Examples
    --------
    >>> observer = InputObserver()
    >>> with observer(model):
    ...     model(torch.randn(2, 4)); model(torch.randn(3, 4))
    >>> observer.infer_dynamic_shapes()
    ({0: _DimHint(...)},)
    """

    def __init__(self, value_if_missing: Mapping[str | int, Any] | None = None) -> None:
        with register_flattening_functions(None):
            given = (value_if_missing or {}).items()
            self.value_if_missing = {key: clone_tree(value) for key, value in given}
        self.info = InputObserverInfo()
        self._removed: set[str] = set()
        self._recorder = Recorder(self.info, self._check_stand_ins)
        self._open = 0  # blocks
        self._unreached = ""  # why no call of the latest block was seen
        self._observed: tuple[weakref.ref[torch.nn.Module], str] | None = None

    def num_obs(self) -> int:
        """Number of recorded calls."""
        return len(self.info)

    def is_empty(self) -> bool:
        """True before any call was recorded."""
        return not self.info.calls

    _infer_dynamic_dimensions = staticmethod(InputObserverInfo._infer_dynamic_dimensions)

    # recording

    @contextlib.contextmanager
    def __call__(
        self,
        model: torch.nn.Module,
        store_n_calls: int = 3,
        method_name: str = "forward",
        keep: Literal["first", "informative"] = "first",
        store: Place = "device",
    ) -> Iterator[InputObserver]:
        """Record calls of ``model.method_name`` made inside the block.

        What such a call calls itself is part of it. Copies of the model made inside the block are plain:
        their calls are not recorded. Nor are calls that a compiler or exporter traces, and those under
        ``torch.func.vmap``, of which a warning tells once.

        Parameters
        ----------
        store_n_calls:
            How many calls are kept, with inputs and outputs. Of further calls only shapes are kept, and only
            where they show something new. 0: shapes only, which is enough for `infer_dynamic_shapes`.
        keep:
            ``"first"``: the first `store_n_calls` calls. ``"informative"``: a later call with a new argument
            or a new size takes the place of a call that shows nothing that the others do not.
        store:
            Where the values are kept: ``"device"``, that of the caller's tensors; ``"cpu"``, host memory;
            ``"disk"``, unnamed memory-mapped files in the folder for temporary files. What is handed out is
            on the caller's device again.

        Raises
        ------
        ValueError
            The model has no such method, or its signature cannot be read; or `keep` or `store` is none of
            the above.
        RuntimeError
            The observer holds calls of another model or method: they cannot be mixed.
        """
        for name, value, known in (("keep", keep, ("first", "informative")), ("store", store, PLACES)):
            if value not in known:
                raise ValueError(f"{name}={value!r} is none of {', '.join(known)}")
        inner = _innermost(model)
        if not callable(getattr(inner, method_name, None)):
            raise ValueError(f"{type(inner).__name__} does not have a method {method_name!r}")
        observed = (weakref.ref(inner), method_name)
        if (self.info.calls or self.info.shape_calls or self._open) and self._observed != observed:
            raise RuntimeError(
                "this observer holds calls of another model or method, or waits for them: use one observer "
                "for each"
            )
        self._observed = observed
        self.info.signature = CallSignature.of(getattr(inner, method_name))
        self.info.config_flags = _config_flags(inner)
        target = model if method_name == "forward" or not hasattr(model, "_orig_mod") else inner
        if not hasattr(target, method_name):
            target = inner  # a method that DataParallel does not have
        attribute = method_name
        if method_name == "forward" and getattr(target, "_compiled_call_impl", None) is not None:
            # After `model.compile()` a call does not reach `forward` but through a trace, which is no
            # observation.
            attribute = "_compiled_call_impl"
        info, seen = self.info, self.info.seen
        observed_method = self._recorder.wrap(getattr(target, attribute), store_n_calls, keep, store)
        hooked = has_forward_hooks(inner)
        self._open += 1
        try:
            with attached(target, attribute, observed_method), register_flattening_functions(None):
                yield self
        finally:
            self._open -= 1
        what, made = f"{type(inner).__name__}.{method_name}", info.seen - seen
        self._unreached = "" if made else _UNREACHED.format(what)
        hooked = method_name == "forward" and (hooked or has_forward_hooks(inner))
        for problem in self._problems(what, made, hooked, store_n_calls):
            warnings.warn(problem, ObserverWarning, stacklevel=3)

    def _problems(self, what: str, made: int, hooked: bool, limit: int) -> Iterator[str]:
        """Why the calls of a block may not be what was meant."""
        if self._unreached:
            yield self._unreached
        if made and limit and self.is_empty() and not self.info.lost:
            yield (
                f"{made} calls were made and none was recorded: they raised, or an exporter or compiler "
                "traced them (observe the compiled module itself)"
            )
        if made and hooked:
            yield (
                f"forward hooks run around {what}: what they change is not in the arguments and outputs that "
                "were recorded, and an exporter puts them into the program; observe a module whose forward "
                "calls this one"
            )

    def _check_stand_ins(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], arguments: dict[str, Any]
    ) -> None:
        """A stand-in that no call can need is a mistake in the user's script: said in the first call."""
        signature = self.info.signature
        assert signature is not None
        for key in self.value_if_missing:
            if isinstance(key, bool) or not isinstance(key, (str, int)):
                raise TypeError(
                    f"Unexpected type {type(key)} for {key!r} in value_if_missing: a name or a position"
                )
            if isinstance(key, str):
                if key not in signature.names and signature.var_keyword is None:
                    raise ValueError(f"Unexpected keyword argument {key!r} in value_if_missing")
            elif not 0 <= key < len(signature.positions(key + 1)):
                raise ValueError(
                    f"Unexpected keyword argument {key} in value_if_missing: there is no such position"
                )
            elif key >= len(args) and signature.positions(key + 1)[key] not in arguments:
                raise NotImplementedError(
                    f"Unexpected keyword argument {key} in value_if_missing: the call has only {len(args)} "
                    "positions; pass None there, or give the argument by name"
                )

    # inference

    def _interface(self, batch: bool | Collection[int | str] | None, values: bool = True) -> Interface:
        if self.is_empty() and (values or not self.info.shape_calls):
            raise RuntimeError(f"No inputs were captured. {self._unreached}".rstrip())
        return infer_interface(self.info, batch or False, self.value_if_missing, self._removed)

    def infer_dynamic_shapes(
        self,
        set_batch_dimension_for: bool | Collection[int | str] | None = None,
        dim_names: bool | Mapping[str | int, Mapping[int, Any]] | None = None,
    ) -> Any:
        """Dynamic shapes as `torch.export.export` takes them, ``Dim.DYNAMIC`` on every axis that varied.

        Parameters
        ----------
        set_batch_dimension_for:
            ``True``: axis 0 of every tensor is dynamic; names or positions: only of these arguments.
        dim_names:
            Labels instead of ``Dim.DYNAMIC``, as `torch.onnx.export` takes them (`torch.export.export` does
            not; give it `torch.export.Dim` objects as labels). ``{name or position: {axis: label}}``, the
            other dynamic axes becoming ``NAME_dim_AXIS``. ``True``: axes that had the same sizes in every
            call share a label. That is a suggestion for people: equal sizes do not prove one dimension.

        Returns
        -------
        tuple or dict
            A tuple if every call was positional, otherwise a dict by argument name, in signature order. What
            ``*args`` and ``**kwargs`` caught is grouped under their names. A constant is ``None``. An
            instance of a class registered as a pytree node becomes the list of its children.

        Raises
        ------
        RuntimeError
            Nothing was recorded.
        InferenceError
            The calls cannot be served by one graph (an `ObserveError` and a `RuntimeError`).
        """
        with register_flattening_functions(None):
            interface = self._interface(set_batch_dimension_for, values=False)
            for note in interface.notes():
                warn(note)
            return interface.dynamic_shapes(dim_names)

    def infer_arguments(
        self,
        index_or_args_or_kwargs: int | tuple[Any, ...] | dict[str, Any] | None = None,
        flat: bool = False,
        as_args_kwargs: bool = False,
        export_safe: bool = False,
        set_batch_dimension_for: bool | Collection[int | str] | None = None,
    ) -> Any:
        """Arguments for an export, as copies.

        Parameters
        ----------
        index_or_args_or_kwargs:
            ``None``: the first recorded call that has every tensor. A number: that call, completed. A tuple
            or dict of inputs: these, completed. What is missing becomes ``value_if_missing``, else a tensor
            of length 0 on its last dynamic axis.
        flat:
            Return the list of tensors in flatten order.
        as_args_kwargs:
            Return ``(tuple, dict)``; needed where the signature has ``*args`` or positional-only parameters
            and keywords were passed as well.
        export_safe:
            Instead of the first complete call, the one whose sizes suit `torch.export` best, resized so that
            no dynamic axis has size 0, 1 or that of another one; if the model refuses the new sizes, the call
            as it was, with a warning. The model is called.
        set_batch_dimension_for:
            With `export_safe`: as given to `infer_dynamic_shapes`.

        Returns
        -------
        tuple or dict
            As for `infer_dynamic_shapes`, but the names of ``**kwargs`` stay at the top level.

        Raises
        ------
        RuntimeError
            Nothing was recorded; or one tuple or dict cannot hold the arguments.
        ValueError
            `index_or_args_or_kwargs` is of another type, or names an argument that neither the signature nor
            a call has.
        IndexError
            There is no such call.
        """
        given = index_or_args_or_kwargs
        with register_flattening_functions(None):
            interface = self._interface(set_batch_dimension_for)
            if given is None and export_safe:
                arguments = interface.export_safe(self._accepts)
            elif given is None:
                call = interface.first_complete()
                if call is None:
                    call = interface.fullest()
                arguments = interface.complete(call.arguments, call)
                risky = interface.risky_sizes(arguments)
                if risky:
                    warn(
                        f"call {call.index} has size 0 or 1 on a dynamic axis ({', '.join(risky[:4])}): "
                        "torch.export needs backed_size_oblivious for it; or take export_safe=True"
                    )
            elif isinstance(given, int) and not isinstance(given, bool):
                if not -len(interface.calls) <= given < len(interface.calls):
                    raise IndexError(
                        f"there is no call {given}, of {counted(len(interface.calls), 'recorded call')}"
                    )
                call = interface.calls[given]
                arguments = interface.complete(call.arguments, call)
            else:
                arguments = interface.complete(interface.by_name(given))
            return interface.arrange(arguments, as_args_kwargs, flat)

    def _accepts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the model takes arguments."""
        assert self._observed is not None
        model = self._observed[0]()
        if model is None:
            raise RuntimeError("the observed model is gone: export_safe needs to call it")
        self._recorder.quiet = True
        # A call in train mode, or a counter, leaves something behind that is the user's.
        buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
        try:
            with torch.no_grad():
                getattr(model, self._observed[1])(*args, **kwargs)
        except Exception:  # whatever it raises is its way of refusing these sizes
            return False
        finally:
            self._recorder.quiet = False
            with torch.no_grad():
                for buffer, before in buffers.values():
                    buffer.copy_(before)
        return True

    def needs_backed_size_oblivious(
        self,
        dynamic_shapes: Any,
        index_or_args_or_kwargs: int | tuple[Any, ...] | dict[str, Any] | None = None,
    ) -> bool:
        """`InputCandidate.needs_backed_size_oblivious` for the arguments that `infer_arguments` returns."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ObserverWarning)
            args, kwargs = self.infer_arguments(index_or_args_or_kwargs, as_args_kwargs=True)
        return InputCandidate(args, kwargs).needs_backed_size_oblivious(dynamic_shapes)

    def remove_inputs(self, names: Sequence[str]) -> int:
        """Leave arguments out of what is inferred.

        Returns
        -------
        int
            How many of `names` were arguments of a recorded call.

        Raises
        ------
        RuntimeError
            Nothing was recorded.
        ValueError
            A name is that of ``*args`` or ``**kwargs``.
        """
        if self.is_empty():
            raise RuntimeError("No input was captured: there is nothing to remove.")
        signature = self.info.signature
        assert signature is not None
        known = {signature.known_as(name) for name in names}
        for name in names:
            if name in (signature.var_positional, signature.var_keyword):
                raise ValueError(f"Cannot remove variadic argument {name!r}: name what it caught")
        present = {
            name
            for call in [*self.info.calls, *self.info.shape_calls]
            for name in call.shapes().arguments
            if name not in self._removed
        }
        removed = present & known
        self._removed |= known
        return len(removed)

    def check_discrepancies(
        self,
        onnx_model: Any,
        atol: float = 1e-4,
        rtol: float = 0.1,
        hist: Sequence[float] = (0.1, 0.01),
        progress_bar: bool = False,
        include_io: bool = True,
        skip_none: bool = True,
    ) -> list[dict[str, Any]]:
        """Run an ONNX model on every recorded call and compare with what the model returned.

        See `pytest_exportcheck.checks.discrepancies.check_discrepancies` for the rows.
        """
        from ..checks.discrepancies import check_discrepancies

        if self.is_empty():
            raise RuntimeError(f"No inputs were captured. {self._unreached}".rstrip())
        with register_flattening_functions(None), warnings.catch_warnings():
            warnings.simplefilter("ignore", ObserverWarning)
            interface = self._interface(None)
            rows: list[dict[str, Any]] = check_discrepancies(
                interface,
                onnx_model,
                atol=atol,
                rtol=rtol,
                hist=hist,
                progress_bar=progress_bar,
                include_io=include_io,
                skip_none=skip_none,
            )
            return rows
