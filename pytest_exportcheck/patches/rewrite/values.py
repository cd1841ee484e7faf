"""The values of this package: where a branch is, what was rewritten, what was proven, and the refusal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

from ...errors import PatchError

__all__ = [
    "BranchProof",
    "Export",
    "LoopProof",
    "Place",
    "Proof",
    "RewriteRefused",
    "Rewriting",
    "RewrittenMethod",
    "Site",
]


@dataclass(frozen=True)
class Place:
    """A place in a source file: `line` counts from 1, `column` from 0 (-1: unknown)."""

    file: str
    line: int
    column: int = -1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Site:
    """The expression at which an export stopped, and the function whose code it is in.

    Attributes
    ----------
    function:
        The function that can be replaced: the outermost one where the branch is in a nested function.
    code:
        The code object of the frame, of `function` or nested in it.
    """

    place: Place
    function: FunctionType
    code: CodeType
    message: str = ""


class RewriteRefused(PatchError):
    """A piece of control flow cannot be rewritten, or the rewriting could not be proven.

    Attributes
    ----------
    place:
        ``file:line`` of the construct; `None` where no line is to blame.
    construct:
        What stands there, in a few words.
    advice:
        The form that a person should write by hand.
    """

    def __init__(
        self, construct: str, advice: str, place: Place | None = None, *, details: Sequence[str] = ()
    ) -> None:
        self.place = place
        self.construct = construct
        self.advice = advice
        where = f"{place}: " if place is not None else ""
        super().__init__(f"{where}{construct}; {advice}", details=details)


@dataclass(frozen=True)
class BranchProof:
    """What is known about one outcome of one test.

    Attributes
    ----------
    how:
        ``observed``, ``made: ...``, ``forced``, or ``not reached: ...``.
    """

    place: Place
    test: str
    outcome: bool
    how: str

    @property
    def proven(self) -> bool:
        """Whether original and rewritten function were compared under this outcome."""
        return not self.how.startswith("not reached")

    def __str__(self) -> str:
        return f"{self.place}: `{self.test}` is {self.outcome}: {self.how}"


@dataclass(frozen=True)
class LoopProof:
    """The numbers of rounds of a loop under which original and rewritten function were compared.

    Attributes
    ----------
    observed, made:
        Of observed calls, and of calls whose tensors were made longer or shorter.
    raising:
        Numbers at which the original itself raises.
    """

    place: Place
    loop: str
    observed: tuple[int, ...]
    made: tuple[int, ...]
    raising: tuple[int, ...] = ()

    @property
    def proven(self) -> bool:
        """Whether two numbers of rounds were compared: one says nothing about the axis."""
        return len({*self.observed, *self.made}) > 1

    def __str__(self) -> str:
        parts = [("observed", self.observed), ("made", self.made), ("the original raises", self.raising)]
        text = "; ".join(f"{word}: {', '.join(map(str, numbers))}" for word, numbers in parts if numbers)
        return f"{self.place}: `{self.loop}`, rounds {text}"


@dataclass(frozen=True)
class Proof:
    """The comparison in eager of a rewritten function with its original, outcome by outcome.

    `runs` counts the calls of the function whose results, changed arguments and changed attributes were
    equal.
    """

    branches: tuple[BranchProof | LoopProof, ...]
    runs: int

    @property
    def complete(self) -> bool:
        """Whether every outcome of every rewritten test was proven."""
        return all(branch.proven for branch in self.branches)

    def __str__(self) -> str:
        return "\n".join(str(branch) for branch in self.branches)


@dataclass(frozen=True)
class RewrittenMethod:
    """A function with its control flow rewritten.

    Attributes
    ----------
    target:
        Dotted path of the original, ``module.Class.method``.
    original:
        The plain function whose code is replaced; decorators around it stay.
    func:
        The rewritten function: same globals, same closure cells, same defaults.
    code:
        Its source.
    dump:
        Unified diff of the sources.
    targets:
        What the branches became, in order: ``torch.where``, ``torch.cond``, ``torch.while_loop``,
        ``torch._assert_async``, ``torch._check``, ``scan``, ``tensor operators``, ``nothing`` (only a log
        message was in it).
    notes:
        What differs from the original on purpose (a dropped log message, a number that is now a tensor).
    """

    target: str
    original: FunctionType
    func: FunctionType
    code: str
    dump: str
    targets: tuple[str, ...]
    proof: Proof
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rewriting:
    """The rewritten methods of a model.

    Attributes
    ----------
    methods:
        In the order in which they were found.
    refused:
        Why the rewriting stopped; `None` when the model exports with `methods`.
    error:
        The export's last error where there is one.
    """

    methods: tuple[RewrittenMethod, ...]
    refused: RewriteRefused | None = None
    error: BaseException | None = field(default=None, compare=False)

    @property
    def dump(self) -> str:
        """The diffs of all methods."""
        return "\n".join(method.dump for method in self.methods)


#: Exports a model; raises what the exporter raises.
Export = Callable[[], Any]
