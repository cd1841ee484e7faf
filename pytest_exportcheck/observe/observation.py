"""The observation of one spec on one device and dtype: its recorded calls, grouped into graphs."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..dims import DimExpr, parse_dim
from ..errors import ExportCheckError, ObserveError
from ..spec import CallPlan, ModelSpec, TensorSpec, resolve_tensor
from ..spec.names import choices, suggest
from .groups import groups_as_yaml, propose_groups
from .infer import GraphShapes, infer_shapes
from .observer import InputObserver, ObserverWarning, RecordedCall
from .resize import ExportExample, choose_example
from .signature import CallSignature
from .targets import Target, find_targets, target_text

__all__ = ["GraphObservation", "Observation", "last_lines", "observe"]


@dataclass
class GraphObservation:
    """The calls that one program must serve.

    Attributes
    ----------
    name:
        Name of the group or of the target, ``None`` if there is one of both.
    target:
        What was called, and is exported.
    calls:
        Recorded calls of the group.
    shapes:
        What the program must accept.
    example:
        Arguments for the exporters.
    writes:
        Index of a call -> path of an input that eager writes to in place -> what is in it after the call.
    stateful:
        Labels of the parameters and buffers that eager itself changes.
    """

    name: str | None
    target: Target
    calls: list[RecordedCall]
    shapes: GraphShapes
    example: ExportExample
    writes: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    stateful: frozenset[str] = frozenset()

    def eager(self, arguments: Mapping[str, Any]) -> Any:
        """Call the target with (copies of) `arguments`; outputs are its own."""
        return self.target.eager(arguments)


@dataclass
class Observation:
    """Everything that was seen of a model.

    Attributes
    ----------
    model:
        The model, in eval mode on `device`.
    calls:
        Recorded calls of every target.
    graphs:
        By the name of the group or of the target; the single key is ``None`` if there is one of both.
    patch_mode:
        The mode that was active while observing.
    """

    spec: ModelSpec
    model: torch.nn.Module
    device: str
    dtype: str
    patch_mode: str
    calls: list[RecordedCall]
    graphs: dict[str | None, GraphObservation] = field(default_factory=dict)


def last_lines(error: BaseException, count: int = 12) -> list[str]:
    """The error and the end of its traceback, for the details of a failure."""
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip().splitlines()
    return lines[-count:]


@contextlib.contextmanager
def _stage_observe(what: str) -> Iterator[None]:
    try:
        yield
    except ExportCheckError:
        raise
    except (Exception, SystemExit) as error:
        raise ObserveError(f"{what}: {type(error).__name__}: {error}", details=last_lines(error)) from error


def observe(
    spec: ModelSpec,
    model: torch.nn.Module,
    plans: Sequence[CallPlan],
    device: str,
    dtype: str,
    patch_mode: str = "none",
) -> Observation:
    """Run the calls of `spec`, each target under an `InputObserver`, and infer what each graph must accept.

    The caller keeps `register_flattening_functions` and the patches of `patch_mode` active.

    Raises
    ------
    ObserveError
        A call raised, nothing was recorded, eager disagrees with itself, or the calls of a group cannot be
        served by one graph.
    """
    targets = find_targets(spec, model)
    limit = spec.observe.store_n_calls
    observers = {name: InputObserver() for name in targets}
    with contextlib.ExitStack() as watching:
        for name, (_, module, method) in targets.items():
            watching.enter_context(observers[name](module, store_n_calls=limit, method_name=method))
        previous: Any = None
        for plan in plans:
            with _stage_observe(f"{spec.relative}:{plan.line}: the {plan.kind} call {plan.index} raised"):
                previous = plan.run(model, previous)
    observation = Observation(spec, model, device, dtype, patch_mode, [])
    for name, (path, module, method) in targets.items():
        text = target_text(path, module, method)
        recorded = _recorded(spec, name, text, module, observers[name])
        signature = observers[name].info.signature
        assert signature is not None
        observation.calls += recorded
        target = Target(text, module, method, signature)
        # What calls give names to are arguments of the whole model.
        called = module is model and method == spec.observe.method
        with _about(name, target):
            stand_ins = _stand_ins(spec, signature, device, dtype)
            for group, calls in _groups(spec, recorded) if name is None else [(name, recorded)]:
                observation.graphs[group] = _graph(spec, group, target, calls, stand_ins, called)
    return observation


def _recorded(
    spec: ModelSpec, name: str | None, text: str, module: torch.nn.Module, observer: InputObserver
) -> list[RecordedCall]:
    """The calls that an observer of a target holds."""
    info = observer.info
    if info.lost:
        raise ObserveError(
            f"{info.lost} of {info.seen} calls of {text} could not be recorded, see the warnings"
        )
    if observer.is_empty():
        place = "" if spec.observe.target is None else f"{spec.place('observe', 'target', *_key(name))}: "
        raise ObserveError(f"{place}no call of {text} was recorded: the calls of the spec do not reach it")
    assert info.signature is not None
    limit = spec.observe.store_n_calls
    if info.seen > len(info.calls) == limit:
        what = "" if spec.observe.target is None else f" of {text}"
        warnings.warn(
            f"{spec.relative}: {info.seen} calls{what} were made and the first {limit} are checked "
            "(observe.store_n_calls)",
            ObserverWarning,
            stacklevel=3,
        )
    return _with_config_defaults(info.calls, module, info.signature)


def _graph(
    spec: ModelSpec,
    name: str | None,
    target: Target,
    calls: list[RecordedCall],
    stand_ins: Callable[[str, Mapping[str, int] | None], Any],
    called: bool,
) -> GraphObservation:
    """What one program must accept; `called`: the calls of the spec are calls of the target itself."""
    signature, batch_dims = target.signature, spec.observe.batch_dims
    several = spec.observe.target if isinstance(spec.observe.target, dict) else {}
    with _with_proposal(calls, signature, several.get(name) if name else None):
        _refuse_two_cross_attentions(calls)
        shapes = infer_shapes(
            calls,
            signature_order=signature.names,
            defaults=signature.defaults,
            batch_dims=batch_dims if isinstance(batch_dims, bool) else set(batch_dims),
            value_if_missing=stand_ins,
            declared=_declared_axes(spec, signature, called),
        )
        for call in calls:
            shapes.complete(call)  # one that lacks an argument can be fed to no program
    for warning in shapes.warnings:
        where = f"{spec.relative}" + (f" ({name})" if name else "")
        warnings.warn(f"{where}: {warning}", ObserverWarning, stacklevel=3)
    example = choose_example(calls, shapes, target.accepts, _preferred(spec, name))
    return GraphObservation(name, target, calls, shapes, example)


def _key(name: str | None) -> list[str]:
    return [name] if name is not None else []


@contextlib.contextmanager
def _about(name: str | None, target: Target) -> Iterator[None]:
    """Say which of several targets a refusal is about."""
    try:
        yield
    except ObserveError as error:
        if name is None:
            raise
        raise ObserveError(
            f"target {name}, {target.text}: {error.message}", details=error.details, facts=error.facts
        ) from error


@contextlib.contextmanager
def _with_proposal(
    calls: Sequence[RecordedCall], signature: CallSignature, path: str | None
) -> Iterator[None]:
    """Add to a refusal the groups that the structure of the calls suggests.

    `path`: of one of several targets, which has no groups of its own.
    """
    try:
        yield
    except ObserveError as error:
        groups = propose_groups(calls, signature.defaults)
        if len(groups) > 1:
            error.details = [
                "pin what differs in the calls, or give calls of one structure a graph each"
                + (":" if path is None else f", in a spec of its own for this target (target: {path}):"),
                f"  {groups_as_yaml(groups)}",
                *(f"  {group.name}: {group.reason}" for group in groups if group.reason),
            ]
        raise


def _refuse_two_cross_attentions(calls: Sequence[RecordedCall]) -> None:
    """A cross attention that is computed and one that is read from the cache are two branches of the code."""
    for name in dict.fromkeys(name for call in calls for name in call.arguments):
        computed: dict[bool, list[int]] = {}
        for call in calls:
            updated = getattr(call.arguments.get(name), "is_updated", None)
            if updated is not None:
                computed.setdefault(any(updated.values()), []).append(call.index)
        if len(computed) > 1:
            raise ObserveError(
                f"argument {name}: the cross attention is computed in calls {_listed(computed[False])} and "
                f"read from the cache in calls {_listed(computed[True])}: two branches of the model, "
                "one graph has one of them"
            )


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))


def _groups(spec: ModelSpec, calls: list[RecordedCall]) -> list[tuple[str | None, list[RecordedCall]]]:
    graphs, ignored = spec.observe.graphs, set(spec.observe.ignore_calls)
    last = f"{len(calls)} calls were recorded (0 to {len(calls) - 1})"
    wrong = sorted(index for index in ignored if index >= len(calls))
    if wrong:
        raise ObserveError(f"observe.ignore_calls names call {wrong[0]}, but {last}")
    if graphs == "one":
        kept = [call for call in calls if call.index not in ignored]
        if not kept:
            raise ObserveError(f"observe.ignore_calls leaves no call: {last}")
        return [(None, kept)]
    groups: list[tuple[str | None, list[RecordedCall]]] = []
    for name, indices in graphs.items():
        wrong = [index for index in indices if index >= len(calls)]
        if wrong:
            raise ObserveError(f"observe.graphs.{name} names call {wrong[0]}, but {last}")
        groups.append((name, [calls[index] for index in indices]))
    grouped = {index for indices in graphs.values() for index in indices}
    left = [call.index for call in calls if call.index not in grouped | ignored]
    if left:
        # A call that no program serves is a call that nobody checks.
        raise ObserveError(
            f"{last}, and no graph of observe.graphs has "
            f"{'call' if len(left) == 1 else 'calls'} {_listed(left)}: "
            f"add them to a graph, or leave them out with `ignore_calls: [{_listed(left)}]` "
            "(a generate of n tokens makes n calls)"
        )
    return groups


def _preferred(spec: ModelSpec, group: str | None) -> int | None:
    example = getattr(spec.observe, "example", None)
    if isinstance(example, Mapping):
        return example.get(group)
    return example


def _with_config_defaults(
    calls: Sequence[RecordedCall], model: torch.nn.Module, signature: CallSignature
) -> list[RecordedCall]:
    """Make flags explicit that transformers reads from the config when a call does not pass them.

    ``generate`` passes ``use_cache=True`` and ``return_dict=True`` where a plain call leaves them to
    ``model.config``: the same graph, which a comparison of constants must not split.
    """
    config = getattr(model, "config", None)
    flags = {}
    for flag in ("use_cache", "return_dict", "output_attentions", "output_hidden_states"):
        value = getattr(config, flag, None)
        if isinstance(value, bool) and any(call.arguments.get(flag) is not None for call in calls):
            flags[flag] = value
    recorded = []
    for call in calls:
        arguments = dict(call.arguments)
        for flag, value in flags.items():
            if arguments.get(flag) is None:
                if flag in signature.names:
                    arguments[flag] = value
            elif arguments[flag] == value and flag not in signature.names:
                del arguments[flag]
        recorded.append(RecordedCall(call.index, arguments, call.outputs, call.duration))
    return recorded


def _declared_axes(spec: ModelSpec, signature: CallSignature, called: bool) -> dict[tuple[str, int], DimExpr]:
    """(path, axis) -> expression, for the arguments that the spec describes with named dims."""
    described: dict[str, Any] = dict(spec.observe.value_if_missing)
    for call in () if isinstance(spec.observe.calls, str) or not called else spec.observe.calls:
        if call.kind == "forward":
            described.update(zip(signature.names, call.args, strict=False))
            described.update(call.kwargs)
    axes = {}
    for name, value in described.items():
        if isinstance(value, TensorSpec):
            for axis, dim in enumerate(value.dims):
                expression = parse_dim(dim.text)
                if isinstance(expression, DimExpr):
                    axes[name, axis] = expression
    return axes


def _stand_ins(
    spec: ModelSpec, signature: CallSignature, device: str, dtype: str
) -> Callable[[str, Mapping[str, int] | None], Any]:
    described = dict(spec.observe.value_if_missing)
    if signature.var_keyword is None:
        for name in described:
            if name not in signature.names:
                raise ObserveError(
                    f"{spec.place('observe', 'value_if_missing', name)}: "
                    f"{'the model' if spec.observe.target is None else 'the target'} has no argument {name!r}"
                    f"{choices(name, signature.names)}"
                )
    cache: dict[tuple[str, tuple[tuple[str, int], ...]], Any] = {}

    def value(name: str, sizes: Mapping[str, int] | None) -> Any:
        if name not in described:
            return None
        tensor = described[name]
        known = dict(sizes or {})
        unknown = [symbol for symbol in tensor.names if symbol not in known]
        if unknown and sizes is None:
            # The symbols are named once the calls themselves have been looked at.
            return None
        if unknown:
            shown = ", ".join(f"{symbol}={size}" for symbol, size in known.items()) or "none"
            place = spec.place("observe", "value_if_missing", name)
            raise ObserveError(
                f"{place}: unknown dim {unknown[0]!r} in '{tensor.text}'{suggest(unknown[0], known)}; "
                f"the dims of a call that lacks {name}: {shown}"
            )
        key = (name, tuple(sorted(known.items())))
        if key not in cache:
            cache[key] = resolve_tensor(tensor, known, f"value_if_missing.{name}", device, dtype)
        return cache[key]

    return value
