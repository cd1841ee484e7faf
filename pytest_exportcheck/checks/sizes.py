"""A program against eager on sizes nobody showed it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import BELOW_NOISE, ComparisonError, ExportCheckError, ObserveError, ResizeError
from ..exporters.guards import Comparison
from ..observe.observation import GraphObservation
from ..observe.relations import broken_example, broken_sizes, relation_note, without
from ..observe.resize import nearer_sizes, other_sizes, sizes_from_spec
from ..observe.shapes import GraphShapes, ThinRelation
from ..observe.variety import first_accepted, inputs_at
from ..plurals import counted
from ..pytrees import clone_tree, flatten_with_paths
from ..runtimes.base import Session
from ..spec import ModelSpec
from ..spec.names import suggest
from .captured import CapturedProgram
from .choices import offer_ties
from .compare import LeafComparison, Tolerances, table
from .numbers import Leaves, Ran, _inputs_by_path, _only_padding, _run, _summary, add_writes
from .offered import passing_lists
from .padding import rules_of_call
from .rounding import MovedEager, compare_rounded, note_rounding
from .shortage import MOST_TIMES, largest_of_eager, shortage
from .thresholds import Thresholds, decided_lines, decided_otherwise, find_thresholds, sizes_text
from .tight import too_tight
from .writes import WriteWatch

__all__ = ["check_other_sizes", "refuse_unknown_sizes"]

#: So much of eager's answers is kept for each graph.
_KEPT_BYTES = 64 * 2**20


def _wanted(
    spec: ModelSpec, graph: GraphObservation, comparisons: Sequence[Comparison]
) -> tuple[list[dict[str, int]], Thresholds]:
    """(sizes to try, those of them that are due to comparisons)."""
    example, listed = graph.example, _listed(spec, graph)

    def is_allowed(sizes: Mapping[str, int]) -> bool:
        return all(sizes[name] in (example.sizes[name], *given) for name, given in listed.items())

    first = sizes_from_spec(example, listed) if listed else []
    if example.sizes.keys() <= listed.keys():
        return first, Thresholds()
    # A list is about its own symbols: the others are tried as without it.
    others = [
        sizes
        for sizes in other_sizes(graph.shapes, example, graph.calls)
        if is_allowed(sizes) and sizes not in first
    ]
    observed = [sizes for sizes in graph.shapes.sizes.values() if sizes.keys() == example.sizes.keys()]
    known = [*observed, *first, *others]
    about = [comparison for comparison in comparisons if not listed.keys() >= {*comparison.names}]
    thresholds = find_thresholds(about, graph.shapes, example, known, is_allowed)
    return [*first, *others, *thresholds.sizes], thresholds


def _listed(spec: ModelSpec, graph: GraphObservation) -> Mapping[str, Sequence[int]]:
    """The sizes that the spec gives, by symbol of the graph."""
    given = spec.resize if isinstance(spec.resize, Mapping) else {}
    return {name: sizes for name, sizes in given.items() if name in graph.shapes.symbols}


def refuse_unknown_sizes(spec: ModelSpec, graphs: Sequence[GraphObservation]) -> None:
    """Whether the symbols whose sizes the spec lists are those of a graph: known before any export.

    Raises
    ------
    ObserveError
        No graph has such a symbol.
    """
    symbols = list(dict.fromkeys(name for graph in graphs for name in graph.shapes.symbols))
    given = spec.resize if isinstance(spec.resize, Mapping) else {}
    unknown = [name for name in given if name not in symbols]
    if unknown:
        line, column = spec.location("resize", unknown[0])
        named = ", ".join(name + suggest(name, symbols) for name in unknown)
        which = "graph" if len(graphs) == 1 else "graphs"
        raise ObserveError(
            f"{spec.relative}:{line}:{column}: resize names {named}, the symbols of the {which} are "
            f"{', '.join(symbols) or 'none'}"
        )


@dataclass(frozen=True)
class _Answer:
    """What eager says at some sizes.

    Attributes
    ----------
    by_eager:
        Path of an input that it writes to -> what is in it afterwards.
    refusal:
        Why it takes no such sizes, ``""`` if it does.
    short:
        Whether that is for want of memory.
    repeated:
        Why it takes them only where values are repeated, ``""`` if that is not so.
    """

    arguments: Mapping[str, Any]
    expected: Leaves = field(default_factory=list)
    by_eager: Mapping[str, torch.Tensor] = field(default_factory=dict)
    refusal: str = ""
    short: bool = False
    repeated: str = ""

    def nbytes(self) -> int:
        """Of all its tensors."""
        leaves = [leaf for _, leaf in self.expected] + list(_inputs_by_path(self.arguments).values())
        return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))


def _ask(
    graph: GraphObservation, sizes: Mapping[str, int], share: bool, shapes: GraphShapes | None = None
) -> _Answer:
    """Eager at `sizes`, asked once for all exporters; raises what making the inputs raises.

    Parameters
    ----------
    shapes:
        What the sizes are of, if not of the graph's own.
    """
    key = ("sizes", sizes_text(sizes))
    if share and key in graph.answers:
        known: _Answer = graph.answers[key]
        return known

    def call(arguments: Mapping[str, Any]) -> tuple[Leaves, Mapping[str, torch.Tensor]]:
        copies = clone_tree(dict(arguments))
        watch = WriteWatch(copies)
        return flatten_with_paths(clone_tree(graph.target.call(copies))), watch.written()

    inputs = inputs_at(graph.example, shapes or graph.shapes, sizes, graph.calls, graph.shapes)
    accepted, refusals = first_accepted(inputs, call)
    if accepted is None:
        # Eager's own limits (a fixed image size, a longest position) are no fault of the exporter.
        short = any(shortage(refusal) is not None for refusal in refusals)
        answer = _Answer({}, refusal=_line_of(refusals[-1]), short=short)
    else:
        made, (expected, written) = accepted
        repeated = _line_of(refusals[-1]) if refusals and made.values == "repeated" else ""
        answer = _Answer(made.arguments, expected, written, repeated=repeated)
    kept = sum(each.nbytes() for each in graph.answers.values() if isinstance(each, _Answer))
    # How much memory is left is another matter the next time.
    if share and not answer.short and kept + answer.nbytes() <= _KEPT_BYTES:
        graph.answers[key] = answer
    return answer


def _line_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), 'no message')}"


def check_other_sizes(
    spec: ModelSpec,
    graph: GraphObservation,
    session: Session,
    tolerances: Tolerances,
    record: dict[str, Any],
    comparisons: Sequence[Comparison] = (),
    captured: CapturedProgram | None = None,
    watched: Callable[[ThinRelation], Sequence[Comparison]] = lambda relation: (),
    share: bool = False,
) -> None:
    """Run the program and eager on sizes that no call had; sizes that eager refuses are listed, not judged.

    So are sizes of ours, not those of the spec, for which there is no memory: they say nothing of the
    program, unless it asks for far more at once than eager has in any tensor.

    Parameters
    ----------
    comparisons:
        What the capture decided by the sizes of its example: sizes on the other side are tried too.
    captured:
        The program before its conversion, to tell which of the two is wrong.
    watched:
        Gives the comparisons in the symbols of the shapes without a relation that may be chance.
    share:
        Eager need not be asked again what it was asked for another exporter.

    Compared are outputs and, of a program that can write to its inputs, what eager or the program writes to.

    Raises
    ------
    ResizeError
        The program fails, or differs from eager, at the first such size; or it differs where a relation that
        rests on two calls does not hold. (Where eager or the program refuses that, it is listed.)
    ComparisonError
        A comparison of the user's own judges nothing.
    """
    if spec.resize == "off":
        return
    listed = _listed(spec, graph)
    of_spec = sizes_from_spec(graph.example, listed) if listed else []
    wanted, thresholds = _wanted(spec, graph, comparisons)
    passed: list[str] = []
    taken: list[Mapping[str, int]] = []
    in_place_of: list[Mapping[str, int]] = []
    refused: list[str] = []
    noted: dict[str, Any] = {
        "passed": passed,
        "refused_by_eager": refused,
        "repeated": [],
        "no_memory": [],
        "relations": [],
        "thresholds": [sizes_text(sizes) for sizes in thresholds.sizes],
        "not_tried": thresholds.not_tried,
    }
    record["resize"] = noted

    def judge(answer: _Answer, ran: Ran, text: str) -> list[LeafComparison]:
        both = add_writes(session, answer.expected, ran, answer.arguments, answer.by_eager)
        eager = MovedEager(graph.target, functools.partial(dict, answer.arguments))
        return _judge(spec, session, tolerances, answer.arguments, *both, text, eager)

    def passes(sizes: Mapping[str, int]) -> bool:
        if sizes in taken:
            return True
        try:
            answer = _ask(graph, sizes, share)
            if answer.refusal:
                return False
            judge(answer, _run(session, answer.arguments, "them", ResizeError), "")
        except Exception:
            # The case has failed already: what raises, of whatever kind, is not offered.
            return False
        return True

    def lacks_memory(sizes: Mapping[str, int], why: str) -> None:
        """Not judged, and a size nearer to the example is tried, unless the size itself is the point."""
        noted["no_memory"].append(f"{sizes_text(sizes)}: {why}")
        noted.pop("failed", None)
        nearer = None
        if sizes not in thresholds.sizes:
            nearer = nearer_sizes(sizes, graph.example.sizes, graph.shapes)
        if nearer is not None:
            nearer |= {name: sizes[name] for name in listed}
            if nearer not in (*wanted, *graph.shapes.sizes.values()):
                wanted.append(nearer)
                in_place_of.append(nearer)

    by_noise: tuple[str, ExportCheckError] | None = None
    # Grows where there is no memory for a size.
    for sizes in wanted:
        text, is_ours = sizes_text(sizes), sizes not in of_spec
        try:
            answer = _ask(graph, sizes, share)
        except Exception as error:
            if is_ours and (short := shortage(error)) is not None:
                lacks_memory(sizes, f"for the inputs{short}")
                continue
            # A size of the spec that no memory holds.
            raise ResizeError(f"no inputs of sizes {text} can be made: {error}") from error
        if answer.short and is_ours:
            lacks_memory(sizes, f"for eager: {answer.refusal}")
            continue
        if answer.refusal:
            refused.append(f"{text}: {answer.refusal}")
            continue
        if answer.repeated:
            noted["repeated"].append(f"{text}: {answer.repeated}")
        arguments, expected = answer.arguments, answer.expected
        noted["failed"] = text
        ran = None
        try:
            ran = _run(session, arguments, f"sizes {text}, which eager accepts", ResizeError)
            note_rounding(record, judge(answer, ran, text), f"sizes {text}")
        except ComparisonError:
            raise
        except Exception as error:
            short = shortage(error) if is_ours else None
            if short is not None and ran is not None:
                lacks_memory(sizes, f"to compare{short}")
                continue
            if short is not None:
                largest = largest_of_eager(graph.target, arguments)
                if not short.is_absurd(largest):
                    lacks_memory(sizes, f"for {session.description}{short}")
                    continue
            if not isinstance(error, ExportCheckError):
                raise
            if short is not None:
                error.details.append(
                    f"no want of memory: the program asks for {short.asked} bytes at once, and "
                    f"eager's largest tensor here has {largest} (more than {MOST_TIMES} times as much is a "
                    "fault of the program)"
                )
            error.facts["sizes"] = dict(sizes)
            if BELOW_NOISE in error.facts:
                # What other sizes show may be the program's fault.
                by_noise = by_noise or (text, error)
                continue
            if captured is not None:
                error.details += captured.at(arguments, expected)
            said = [error.message, *error.details]
            error.details += decided_lines(comparisons, graph.example.sizes, sizes, said)
            if ran is None and sizes not in of_spec:
                error.details += _offer(spec, graph, wanted, passes)
            raise
        del noted["failed"]
        passed.append(text)
        taken.append(sizes)
    if by_noise is not None:
        noted["failed"], failure = by_noise
        raise failure
    for relation in graph.shapes.thin:
        if not listed.keys() & {relation.symbol, *relation.dim.names}:
            _break(spec, graph, session, tolerances, relation, watched(relation), record)
    if noted["no_memory"]:
        _warn_of_memory(noted["no_memory"], [sizes for sizes in in_place_of if sizes in taken], record)
    if of_spec and not any(sizes in of_spec for sizes in taken):
        # Sizes that a person wrote down and nothing was checked at: a mistake in the spec, no pass.
        raise ResizeError("eager refuses every size that resize lists: nothing was checked", details=refused)


def _warn_of_memory(
    lines: Sequence[str], instead: Sequence[Mapping[str, int]], record: dict[str, Any]
) -> None:
    which = f"{counted(len(lines), 'size')} {'is' if len(lines) == 1 else 'are'}"
    nearer = "; ".join(map(sizes_text, instead))
    record.setdefault("warnings", []).append(
        f"{which} not judged for want of memory: {lines[0]}{'; and more' if len(lines) > 1 else ''}"
        + (f" (judged in place of them, nearer to the example: {nearer})" if nearer else "")
    )


def _offer(
    spec: ModelSpec,
    graph: GraphObservation,
    wanted: Sequence[Mapping[str, int]],
    passes: Callable[[Mapping[str, int]], bool],
) -> list[str]:
    """How the spec says which sizes there are, where the program refuses one that eager takes.

    Not where it gives other numbers: nobody would notice.
    """
    example, listed = graph.example.sizes, _listed(spec, graph)
    candidates = {
        symbol: list(
            dict.fromkeys(
                [
                    *listed.get(symbol, ()),
                    *(sizes[symbol] for sizes in graph.shapes.sizes.values() if symbol in sizes),
                    *(sizes[symbol] for sizes in wanted if symbol not in listed),
                ]
            )
        )
        for symbol in example
    }
    found = passing_lists(example, candidates, passes)
    if not found:
        return []
    text = ", ".join(f"{symbol}: [{', '.join(map(str, sizes))}]" for symbol, sizes in found.items())
    return [
        f"if nobody gives such sizes, say in {spec.relative} which there are: resize: {{{text}}} (every "
        "combination of these was tried and passes; they and no others are tried then, with resize: off none)"
    ]


def _axis_text(axes: Sequence[tuple[str, int]]) -> str:
    (path, axis), more = axes[0], len(axes) - 1
    return f"axis {axis} of {path}" + (f" (and {more} more)" if more else "")


def _break(
    spec: ModelSpec,
    graph: GraphObservation,
    session: Session,
    tolerances: Tolerances,
    relation: ThinRelation,
    comparisons: Sequence[Comparison],
    record: dict[str, Any],
) -> None:
    """Sizes at which `relation` does not hold.

    A program that refuses them says so to whoever has such inputs: only other numbers are a failure. That it
    is bound to an equality, which may be chance, is a warning.
    """
    noted = record["resize"]
    shapes, example = without(graph.shapes, relation), broken_example(relation, graph.example)
    wanted = broken_sizes(relation, graph.example)
    known = [sizes for sizes in shapes.sizes.values() if sizes.keys() == example.sizes.keys()]
    about = [comparison for comparison in comparisons if relation.symbol in comparison.names]
    wanted += find_thresholds(about, shapes, example, [*known, *wanted]).sizes
    bound = False
    for sizes in wanted:
        # 1 is broadcast; and what keeps to the relation was tried before.
        if sizes[relation.symbol] in (0, 1, relation.dim.evaluate(sizes)):
            continue
        text = f"{sizes_text(sizes)} ({relation.symbol} is not {relation.dim})"
        answer = _ask(graph, sizes, False, shapes)
        if answer.short:
            noted["no_memory"].append(f"{text}: for eager: {answer.refusal}")
            continue
        if answer.refusal:
            noted["relations"].append(f"{text}: eager refuses: {answer.refusal}")
            continue
        if answer.repeated:
            noted["repeated"].append(f"{text}: {answer.repeated}")
        arguments, expected, by_eager = answer.arguments, answer.expected, answer.by_eager
        try:
            rules_of_call(spec, _inputs_by_path(arguments), expected, "resize")
        except ObserveError as error:
            # What the spec compares by wants the relation: nothing says what a right program answers here.
            noted["relations"].append(f"{text}: {error.message}")
            continue
        try:
            ran = _run(session, arguments, "them", ResizeError)
        except ResizeError as error:
            if (short := shortage(error)) is not None:
                # However much it asks for: what a program refuses where a relation breaks is no failure.
                noted["no_memory"].append(f"{text}: for {session.description}{short}")
                continue
            noted["relations"].append(f"{text}: {error.message}")
            if relation.like and not bound:
                bound = True
                record.setdefault("warnings", []).append(
                    f"{_axis_text(relation.axes)} must be {relation.dim}, as {_axis_text(relation.like)} is, "
                    f"in the program and not in eager, which takes {text}: {error.message}"
                )
            continue
        noted["failed"] = text
        both = add_writes(session, expected, ran, arguments, by_eager)
        eager = MovedEager(graph.target, functools.partial(dict, arguments))
        try:
            results = _judge(spec, session, tolerances, arguments, *both, text, eager)
        except ResizeError as error:
            if BELOW_NOISE in error.facts:
                raise
            decided = decided_otherwise(about, example.sizes, sizes)
            error.details += [
                *(f"decided where it holds, and otherwise here: {comparison}" for comparison in decided[:5]),
                relation_note(relation),
            ]
            raise
        note_rounding(record, results, f"sizes {text}")
        del noted["failed"]
        noted["relations"].append(f"{text}: agrees")


def _judge(
    spec: ModelSpec,
    session: Session,
    tolerances: Tolerances,
    arguments: Mapping[str, Any],
    expected: Leaves,
    got: Leaves,
    text: str,
    eager: MovedEager,
) -> list[LeafComparison]:
    inputs = _inputs_by_path(arguments)
    where = rules_of_call(spec, inputs, expected, "resize")
    results = compare_rounded(expected, got, tolerances, where, eager)
    if all(result.ok for result in results):
        return results
    details = table(results)
    tight = too_tight(results)
    padding = None if where or tight.text else _only_padding(expected, got, inputs, tolerances, eager)
    if padding:
        details.extend(padding.splitlines())
    if not tight.text:
        details += offer_ties(session, results, expected, got, inputs, tolerances, where)
    raise ResizeError(
        f"{tight.text}{_summary(results, tolerances)} ({session.description} against eager) at sizes {text}, "
        "which no observed call had",
        details=details,
        facts=tight.facts,
    )
