"""The observation of one spec on one device and dtype: its recorded calls, grouped into graphs."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..dims import DimExpr, parse_dim
from ..errors import ExportCheckError, ObserveError
from ..plurals import counted
from ..pytrees import flatten_with_paths
from ..spec import CallPlan, ModelSpec, ObservedTarget, TensorSpec, resolve_tensor
from ..spec.names import choices, suggest
from ..tracebacks import one_line, user_lines
from .groups import CallGroup, groups_as_yaml, propose_groups, serve
from .infer import GraphShapes
from .observer import InputObserver, ObserverWarning, RecordedCall, is_pretrained
from .records import with_defaults
from .relations import equalities_of_chance, refused_by_eager, relation_note
from .resize import ExportExample, choose_example
from .signature import CallSignature
from .targets import Target, find_module, target_text

__all__ = ["GraphObservation", "Observation", "observe", "warn_of_spec"]


@dataclass
class GraphObservation:
    """The calls that one program must serve.

    Attributes
    ----------
    name:
        Name of the group, of the target, or ``target.group``; ``None`` if there is one of both.
    target:
        What was called, and is exported.
    calls:
        Recorded calls of the group.
    shapes:
        What the program must accept.
    seen:
        `calls` and those of which only the shapes were kept, in order.
    example:
        Arguments for the exporters.
    writes:
        Index of a call -> path of an input that eager writes to in place -> what is in it after the call.
    stateful:
        Labels of the parameters and buffers that eager itself changes.
    answers:
        What checks asked of eager once, for the exporters and patch modes that follow.
    """

    name: str | None
    target: Target
    calls: list[RecordedCall]
    shapes: GraphShapes
    example: ExportExample
    writes: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    stateful: frozenset[str] = frozenset()
    seen: Sequence[RecordedCall] = ()
    answers: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

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
        By name; the single key is ``None`` if the spec has one target and one group. Without those that are
        broken.
    failures:
        Why a graph is broken, by name: its calls cannot be served, no call reached its target, ... Empty if
        the spec has a single graph: then `observe` raises.
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
    failures: dict[str | None, ObserveError] = field(default_factory=dict)

    def graph(self, name: str | None) -> GraphObservation:
        """A graph by its name. Raises the `ObserveError` of one that is broken."""
        if name in self.failures:
            # A new one each time: pytest writes the traceback of a test into the exception it is given.
            failure = self.failures[name]
            raise ObserveError(failure.message, details=failure.details, facts=failure.facts)
        return self.graphs[name]

    def fail(self, name: str | None, error: ObserveError) -> None:
        """Note that a graph is broken. Raises `error` if the spec has no other graph."""
        if len(self.spec.graph_names) == 1:
            raise error
        self.graphs.pop(name, None)
        self.failures[name] = error


def warn_of_spec(spec: ModelSpec, note: str, graph: str | None = None) -> None:
    """An `ObserverWarning` of a graph, at the line of the spec that says what is called."""
    where = spec.relative + (f" ({graph})" if graph else "")
    line = spec.location("observe")[0]
    warnings.warn_explicit(f"{where}: {note}", ObserverWarning, str(spec.path), line)


@contextlib.contextmanager
def _stage_observe(what: str) -> Iterator[None]:
    try:
        yield
    except ExportCheckError:
        raise
    except (Exception, SystemExit) as error:
        raise ObserveError(f"{what}: {one_line(error)}", details=user_lines(error)) from error


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
        A call raised; or the only graph is broken. Where there are several, a broken one is in
        `Observation.failures`.
    """
    observation = Observation(spec, model, device, dtype, patch_mode, [])
    modules: dict[str | None, torch.nn.Module] = {}
    for name, observed in spec.observe.targets.items():
        with _only(observation, observed.graph_names):
            modules[name] = find_module(spec, observed, model)
    observers = {name: InputObserver() for name in modules}
    with contextlib.ExitStack() as watching:
        for name, module in modules.items():
            observed = spec.observe.targets[name]
            watching.enter_context(
                observers[name](
                    module,
                    store_n_calls=observed.store_n_calls,
                    method_name=observed.method,
                    keep="informative",
                    store=spec.observe.store,
                )
            )
        previous: Any = None
        # Without a target there is nothing to see.
        for plan in plans if modules else ():
            with _stage_observe(f"{plan.place}: the {plan.kind} call {plan.index} raised"):
                previous = plan.run(model, previous)
        with warnings.catch_warnings():
            # What they warn of on leaving is an error of one target here.
            warnings.simplefilter("ignore", ObserverWarning)
            watching.close()
    for name, module in modules.items():
        observed = spec.observe.targets[name]
        with _only(observation, observed.graph_names):
            _observe_target(observation, observed, module, observers[name])
    return observation


@contextlib.contextmanager
def _only(observation: Observation, names: Iterable[str | None]) -> Iterator[None]:
    """What goes wrong inside breaks these graphs, and no others."""
    try:
        with _stage_observe("the target cannot be observed"):
            yield
    except ObserveError as error:
        for name in names:
            observation.fail(name, error)


def _observe_target(
    observation: Observation, observed: ObservedTarget, module: torch.nn.Module, observer: InputObserver
) -> None:
    """Add the graphs of one target, or why they are broken."""
    spec, model = observation.spec, observation.model
    text = target_text(observed.path, module, observed.method)
    recorded = _recorded(spec, observed, text, module, observer)
    signature = observer.info.signature
    assert signature is not None
    observation.calls += recorded.calls
    target = Target(text, module, observed.method, signature)
    # What calls give names to are arguments of the whole model.
    called = module is model and observed.method == spec.observe.method
    with _about(observed.name, target):
        stand_ins = _stand_ins(spec, observed, signature, observation.device, observation.dtype)
        groups = _groups(observed, recorded)
    broken: dict[str | None, ObserveError] = {}
    splits: dict[str | None, list[CallGroup]] = {}
    for group, indices in groups.items():
        name = observed.graph_name(group)
        splits[group] = [CallGroup(group or "", tuple(indices), "")]
        try:
            with _about(observed.name, target), _stage_observe("the recorded calls cannot be read"):
                mine = _calls_of(observed, group, indices, recorded)
                graph = _graph(spec, observed, group, target, mine, stand_ins, called)
            observation.graphs[name] = graph
        except ObserveError as error:
            broken[group] = ObserveError(error.message, details=error.details, facts=error.facts)
            splits[group] = getattr(error, "groups", None) or splits[group]
    _add_proposal(observed, broken, splits)
    for group, failure in broken.items():
        observation.fail(observed.graph_name(group), failure)


@dataclass(frozen=True)
class _Recorded:
    """Calls of one target, or of a group of it; their index is their position among all calls made.

    Attributes
    ----------
    calls:
        Those whose values were kept.
    shapes:
        Those beyond the limit that showed something new: their shapes count, and they are not run.
    made:
        How many calls were made.
    """

    calls: list[RecordedCall]
    shapes: list[RecordedCall]
    made: int

    @property
    def all(self) -> list[RecordedCall]:
        """Both, in order."""
        return sorted([*self.calls, *self.shapes], key=lambda call: call.index)

    @property
    def text(self) -> str:
        """``4 calls were recorded (0 to 3)``."""
        what = "recorded" if self.made == len(self.calls) else "made"
        made = f"{counted(self.made, 'call')} {'was' if self.made == 1 else 'were'}"
        return f"{made} {what} (0 to {self.made - 1})"


def _recorded(
    spec: ModelSpec, observed: ObservedTarget, text: str, module: torch.nn.Module, observer: InputObserver
) -> _Recorded:
    """The calls that an observer of a target holds."""
    info = observer.info
    if info.lost:
        raise ObserveError(
            f"{info.lost} of {counted(info.seen, 'call')} of {text} could not be recorded, see the warnings"
        )
    if observer.is_empty():
        place = "" if spec.observe.target is None else f"{spec.place(*observed.named)}: "
        why = (
            "an exporter or compiler inside the calls traced it"
            if info.seen
            else "the calls of the spec do not reach it"
        )
        raise ObserveError(f"{place}no call of {text} was recorded: {why}")
    assert info.signature is not None
    if info.seen > len(info.calls) == observed.store_n_calls:
        what = "" if spec.observe.target is None else f" of {text}"
        warn_of_spec(
            spec,
            f"{info.seen} calls{what} were made: the shapes of all count, the values of "
            f"{len(info.calls)} are checked, {_listed([call.number for call in info.calls])} "
            "(observe.store_n_calls)",
        )
    made = [call.edited(index=call.number) for call in [*info.calls, *info.shape_calls]]
    made = _with_config_defaults(made, module, info.signature)
    return _Recorded(made[: len(info.calls)], made[len(info.calls) :], info.seen)


class _WrongStandIn(ObserveError):
    """A stand-in cannot be made: no grouping mends that."""


class _Unserved(ObserveError):
    """The calls of a graph cannot be served by one; `groups` could."""

    groups: list[CallGroup]


def _graph(
    spec: ModelSpec,
    observed: ObservedTarget,
    group: str | None,
    target: Target,
    recorded: _Recorded,
    stand_ins: Callable[[str, Mapping[str, int] | None], Any],
    called: bool,
) -> GraphObservation:
    """What one program must accept; `called`: the calls of the spec are calls of the target itself."""
    signature, batch_dims = target.signature, observed.batch_dims

    def serves(some: Sequence[RecordedCall]) -> GraphShapes:
        return serve(
            some,
            signature_order=signature.names,
            defaults=signature.defaults,
            batch_dims=batch_dims if isinstance(batch_dims, bool) else set(batch_dims),
            value_if_missing=stand_ins,
            declared=_declared_axes(spec, observed, signature, called),
        )

    try:
        shapes = serves(recorded.all)
    except _WrongStandIn:
        raise
    except ObserveError as error:
        unserved = _Unserved(error.message, details=error.details, facts=error.facts)
        unserved.groups = propose_groups(recorded.all, signature.defaults, serves, observed.value_if_missing)
        raise unserved from error
    name = observed.graph_name(group)
    calls = recorded.calls
    if not calls:
        raise ObserveError(
            f"the values of no call of this graph were kept ({recorded.text}): raise observe.store_n_calls, "
            f"which is {observed.store_n_calls}"
        )
    example = choose_example(calls, shapes, target.accepts, _preferred(spec, observed, group, calls))
    shapes.thin = [
        relation
        for relation in shapes.thin
        if not refused_by_eager(relation, shapes, example, calls, target.accepts)
    ] + equalities_of_chance(shapes, example, calls, target.accepts)
    shapes.warnings += [relation_note(relation) for relation in shapes.thin]
    for warning in shapes.warnings:
        warn_of_spec(spec, warning, name)
    return GraphObservation(name, target, calls, shapes, example, seen=recorded.all)


@contextlib.contextmanager
def _about(name: str | None, target: Target) -> Iterator[None]:
    """Say which of several targets a refusal is about."""
    try:
        yield
    except ObserveError as error:
        if name is None:
            raise
        error.message = f"target {name}, {target.text}: {error.message}"
        raise


def _add_proposal(
    observed: ObservedTarget,
    broken: Mapping[str | None, ObserveError],
    splits: Mapping[str | None, list[CallGroup]],
) -> None:
    """Add to the refusals of a target the groups, of all its calls, that would not be refused."""
    proposed: list[CallGroup] = []
    for group, parts in splits.items():
        for part in parts:
            # A group that is split keeps its name for the first of its parts.
            name = part.name if group is None else group
            taken = {other.name for other in proposed} | {
                other for other in splits if other != group and other
            }
            unique = next(
                n for k in itertools.count(1) if (n := name if k == 1 else f"{name}_{k}") not in taken
            )
            proposed.append(CallGroup(unique, part.indices, part.reason))
    examples = observed.example.values() if isinstance(observed.example, Mapping) else [observed.example]
    text = groups_as_yaml(proposed, [index for index in examples if index is not None])
    if observed.name is None:
        text = f"observe: {{{text}}}"
    else:
        path = observed.path + (
            "" if observed.method == "forward" and observed.path else f":{observed.method}"
        )
        text = f"{observed.name}: {{path: {path!r}, {text}}}"
    for group, error in broken.items():
        if len(splits.get(group, ())) > 1:
            error.details = [
                "pin what differs in the calls, or give calls of one structure a graph each:",
                f"  {text}",
                *(f"  {part.name}: {part.reason}" for part in proposed if part.reason),
            ]


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))


def _groups(observed: ObservedTarget, recorded: _Recorded) -> dict[str | None, list[int]]:
    """Group -> indices of its calls."""
    ignored = set(observed.ignore_calls)
    where, last = _rules_text(observed), recorded.text
    wrong = sorted(index for index in ignored if index >= recorded.made)
    if wrong:
        raise ObserveError(f"{where}.ignore_calls names call {wrong[0]}, but {last}")
    if isinstance(observed.graphs, str):
        kept = [call.index for call in recorded.all if call.index not in ignored]
        if not kept:
            raise ObserveError(f"{where}.ignore_calls leaves no call: {last}")
        return {None: kept}
    grouped = {index for indices in observed.graphs.values() for index in indices}
    left = [call.index for call in recorded.all if call.index not in grouped | ignored]
    if left:
        for name, indices in observed.graphs.items():
            _calls_of(observed, name, indices, recorded)
        # A call that no program serves is a call that nobody checks.
        raise ObserveError(
            f"{last}, and no graph of {where}.graphs has "
            f"{'call' if len(left) == 1 else 'calls'} {_listed(left)}: "
            f"add them to a graph, or leave them out with `ignore_calls: [{_listed(left)}]` "
            "(a generate of n tokens makes n calls)"
        )
    return {name: list(indices) for name, indices in observed.graphs.items()}


def _rules_text(observed: ObservedTarget) -> str:
    return ".".join(map(str, observed.rules))


def _calls_of(
    observed: ObservedTarget, group: str | None, indices: Sequence[int], recorded: _Recorded
) -> _Recorded:
    """The calls of a group. Raises `ObserveError` for one that was not made."""
    wrong = [index for index in indices if index >= recorded.made]
    if wrong:
        raise ObserveError(
            f"{_rules_text(observed)}.graphs.{group} names call {wrong[0]}, but {recorded.text}"
        )
    return _Recorded(
        [call for call in recorded.calls if call.index in indices],
        [call for call in recorded.shapes if call.index in indices],
        recorded.made,
    )


def _preferred(
    spec: ModelSpec, observed: ObservedTarget, group: str | None, calls: Sequence[RecordedCall]
) -> int | None:
    """Index of the call that the spec wants to export from."""
    example = observed.example
    index = example.get(group or "") if isinstance(example, Mapping) else example
    if index is not None and all(call.index != index for call in calls):
        place = spec.place(*observed.rules, "example")
        raise ObserveError(
            f"{place}: example: there is no call {index} in this graph, which has "
            f"{_listed([call.index for call in calls])}"
        )
    return index


def _with_config_defaults(
    calls: Sequence[RecordedCall], model: torch.nn.Module, signature: CallSignature
) -> list[RecordedCall]:
    """Make flags explicit that transformers reads from the config when a call does not pass them.

    ``generate`` passes ``use_cache=True`` and ``return_dict=True`` where a plain call leaves them to
    ``model.config``: the same graph, which a comparison of constants must not split.
    """
    config = getattr(model, "config", None) if is_pretrained(model) else None
    flags = {}
    for flag in ("use_cache", "return_dict", "output_attentions", "output_hidden_states"):
        value = getattr(config, flag, None)
        if isinstance(value, bool) and any(c.shapes().arguments.get(flag) is not None for c in calls):
            flags[flag] = value
    recorded = []
    for call in calls:
        arguments = call.shapes().arguments
        unset = {flag: value for flag, value in flags.items() if arguments.get(flag) is None}
        caught = [flag for flag in flags if flag not in signature.names and flag not in unset]
        recorded.append(
            call.edited(
                [flag for flag in caught if arguments[flag] == flags[flag]],
                {flag: value for flag, value in unset.items() if flag in signature.names},
            )
        )
    return with_defaults(recorded, signature.defaults)


def _declared_axes(
    spec: ModelSpec, observed: ObservedTarget, signature: CallSignature, called: bool
) -> dict[tuple[str, int], DimExpr]:
    """(path, axis) -> expression, for the tensors that the spec describes with named dims.

    What one call takes from the output of another (``previous.cache``) keeps the names that a call gave it.
    """
    calls = () if isinstance(spec.observe.calls, str) or not called else spec.observe.calls
    described = [observed.value_if_missing] + [
        {**dict(zip(signature.names, call.args, strict=False)), **call.kwargs}
        for call in calls
        if call.kind == "forward"
    ]
    tensors = {
        path: leaf
        for arguments in described
        for name, value in arguments.items()
        for path, leaf in flatten_with_paths(value, name)
        if isinstance(leaf, TensorSpec)
    }
    axes = {}
    for path, tensor in tensors.items():
        for axis, dim in enumerate(tensor.dims):
            expression = parse_dim(dim.text)
            if isinstance(expression, DimExpr):
                axes[path, axis] = expression
    return axes


def _stand_ins(
    spec: ModelSpec, observed: ObservedTarget, signature: CallSignature, device: str, dtype: str
) -> Callable[[str, Mapping[str, int] | None], Any]:
    described = dict(observed.value_if_missing)
    if signature.var_keyword is None:
        for name in described:
            if name not in signature.names:
                raise ObserveError(
                    f"{spec.place(*observed.rules, 'value_if_missing', name)}: "
                    f"{'the model' if spec.observe.target is None else 'the target'} has no argument {name!r}"
                    f"{choices(name, signature.names)}"
                )
    cache: dict[tuple[str, tuple[tuple[str, int], ...]], Any] = {}

    def value(name: str, sizes: Mapping[str, int] | None) -> Any:
        if name not in described:
            return None
        tensor = described[name]
        known = dict(sizes or {})
        place = spec.place(*observed.rules, "value_if_missing", name)
        unknown = [symbol for symbol in tensor.names if symbol not in known]
        if unknown and sizes is None:
            # The symbols are named once the calls themselves have been looked at.
            return None
        if unknown:
            shown = ", ".join(f"{symbol}={size}" for symbol, size in known.items()) or "none"
            raise _WrongStandIn(
                f"{place}: unknown dim {unknown[0]!r} in '{tensor.text}'{suggest(unknown[0], known)}; "
                f"the dims of a call that lacks {name}: {shown}"
            )
        key = (name, tuple(sorted(known.items())))
        if key not in cache:
            try:
                cache[key] = resolve_tensor(tensor, known, f"value_if_missing.{name}", device, dtype)
            except Exception as error:
                raise _WrongStandIn(f"{place}: {one_line(error)}") from error
        return cache[key]

    return value
