"""Forms that are easy to rewrite wrongly: each must be right, or refused with its place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .forms import Base

LOG: list[object] = []
STATE = {"n": 0}
TOTAL = torch.zeros(())
TWO = torch.tensor(2.0)


@dataclass(frozen=True)
class Hostile:
    """A model, and what its refusal says; empty: it is rewritten, and right."""

    make: Callable[[], torch.nn.Module]
    refused: str


HOSTILE: dict[str, Hostile] = {}


def right(cls: type) -> type:
    HOSTILE[cls.__name__] = Hostile(cls, "")
    return cls


def refused(text: str) -> Callable[[type], type]:
    def register(cls: type) -> type:
        HOSTILE[cls.__name__] = Hostile(cls, text)
        return cls

    return register


@refused("is a generator")
class Generator(Base):
    def parts(self, x) -> Iterator[torch.Tensor]:
        if x.sum() > 0:
            yield x * 2
        yield x + 1

    def forward(self, x):
        return sum(self.parts(x))


@refused("no variable of the function")
class NonlocalCounter(Base):
    def forward(self, x):
        n = 1

        def step(y):
            nonlocal n
            if y.sum() > 0:
                n = n + 1
            return y * 2

        y = step(x)
        return y * n


@refused("inside `try`")
class RaiseThatIsCaught(Base):
    def forward(self, x):
        try:
            if x.sum() > 0:
                raise ValueError("positive")
            y = x * 2
        except ValueError:
            y = x * 3
        return y


@refused("`return` inside `try`")
class ReturnInTry(Base):
    def forward(self, x):
        try:
            if x.sum() > 0:
                return x * 2
        finally:
            x = x + 1
        return x


@right
class BranchInTryFinally(Base):
    def forward(self, x):
        y = x * 1
        try:
            if x.sum() > 0:
                y = y * 2
        finally:
            y = y + 1
        return y


@right
class BranchInWith(Base):
    def forward(self, x):
        with torch.no_grad():
            if x.sum() > 0:
                y = self.linear(x)
            else:
                y = x * 2
        return y


@refused("`return` inside `with`")
class ReturnInWith(Base):
    def forward(self, x):
        with torch.no_grad():
            if x.sum() > 0:
                return self.linear(x)
        return x * 2


@refused(r"aten\.equal\.default gives a Python value.*`\(a == b\)\.all\(\)`")
class AsksTorchWhetherEqual(Base):
    def forward(self, x):
        if torch.equal(x, x.abs()):
            return x * 2
        return x


@right
class Walrus(Base):
    def forward(self, x):
        if (s := x.sum()) > 0:
            x = x * 2
        return x + s


@right
class Starred(Base):
    def forward(self, x):
        first, *rest = x * 2, x * 3, x * 4
        if x.sum() > 0:
            first, *rest = self.linear(x), x * 5, x * 6
        return first + rest[0] + rest[1]


def scaled(by):
    def decorate(function):
        @functools.wraps(function)
        def wrapper(self, *args, **kwargs):
            if args[0].sum() < -1:
                return function(self, *args, **kwargs) * by
            return function(self, *args, **kwargs)

        return wrapper

    return decorate


@right
class BranchInADecorator(Base):
    @scaled(3)
    def forward(self, x):
        if x.sum() > 0:
            x = x + 1
        return x


@right
class Property(Base):
    @property
    def shifted(self):
        if self.total.sum() > 0:
            return self.total * 2
        return self.total - 1

    def forward(self, x):
        self.total = x.sum(0)
        return x + self.shifted


@right
class PrivateName(Base):
    def __init__(self):
        super().__init__()
        self.__scale = 3.0

    def __grow(self, x):
        return x * self.__scale

    def forward(self, x):
        if x.sum() > 0:
            x = self.__grow(x) + self.__scale
        return x


@right
class DefaultArguments(Base):
    def forward(self, x, scale=TWO, *, offset=3):
        if x.sum() > 0:
            x = x * scale + offset
        return x


@refused("`return` out of a loop")
class ReturnInLoop(Base):
    def forward(self, x):
        for i in range(3):
            if x[:, i].sum() > 0:
                return x * i
        return x


@right
class InPlaceOnTheInput(Base):
    def forward(self, x):
        if x.sum() > 0:
            x.mul_(2)
        return x + 1


@right
class InPlaceOnAnAlias(Base):
    def forward(self, x):
        y = x * 2
        z = y
        if x.sum() > 0:
            z.add_(5)
        return y + z


@refused("differs from the original")
class AliasMadeInTheBranch(Base):
    def forward(self, x):
        y = x * 2
        if x.sum() > 0:
            z = y
            z.add_(5)
        return y


@refused("give `y` one dtype")
class OtherDtype(Base):
    def forward(self, x):
        if x.sum() > 0:
            y = x.to(torch.float64)
        else:
            y = x * 2
        return y


@refused("same number of dimensions")
class OtherRank(Base):
    def forward(self, x):
        if x.sum() > 0:
            y = x.sum(0)
        else:
            y = x * 2
        return y


@right
class BufferInOneBranch(Base):
    def forward(self, x):
        if x.sum() > 0:
            self.total.add_(1.0)
        return x + self.total


@refused("writes to `self.inner.total`")
class BufferOfASubmodule(Base):
    def __init__(self):
        super().__init__()
        self.inner = Base()

    def forward(self, x):
        if x.sum() > 0:
            self.inner.total = self.inner.total + 1.0
        return x + self.inner.total


@refused("effect")
class Append(Base):
    def forward(self, x):
        seen = []
        if x.sum() > 0:
            seen.append(x * 2)
        return x + len(seen)


@refused("effect")
class AppendToAGlobal(Base):
    def forward(self, x):
        if x.sum() > 0:
            LOG.append(1)
        return x * 2


@right
class Print(Base):
    def forward(self, x):
        if x.sum() > 0:
            print("positive")
            x = x * 2
        return x


@refused("writes to")
class GlobalTable(Base):
    def forward(self, x):
        if x.sum() > 0:
            STATE["n"] += 1
        return x * 2


@refused("writes to")
class GlobalTensor(Base):
    def forward(self, x):
        if x.sum() > 0:
            TOTAL.add_(1)
        return x * 2


class Counting(Base):
    def __init__(self):
        super().__init__()
        self.count = 0

    def step(self, x):
        self.count = self.count + 1
        return x * 2


@refused("differs from the original")
class EffectOfAMethod(Counting):
    def forward(self, x):
        if x.sum() > 0:
            x = self.step(x)
        return x + self.count


@refused("differs from the original")
class PopInAnExpression(Base):
    def forward(self, x):
        rest = [x * 2, x * 3]
        y = x * 1
        if x.sum() > 0:
            y = rest.pop()
        return y + len(rest)


@refused("out=")
class OutArgument(Base):
    def forward(self, x):
        y = x * 2
        if x.sum() > 0:
            z = torch.add(x, 1, out=y)
            y = z * 2
        return y


@refused("inplace=")
class InplaceArgument(Base):
    def forward(self, x):
        y = x * 2
        if x.sum() < 0:
            z = torch.nn.functional.relu(y, inplace=True)
            return y + z
        return y


@refused("differs from the original")
class HelperThatWrites(Base):
    def helper(self, y):
        y += 100
        return y * 1

    def forward(self, x):
        y = x * 2
        if x.sum() > 0:
            z = self.helper(y)
        else:
            z = y * 3
        return y + z


@right
class CapturedLater(Base):
    def forward(self, x):
        scale = x.sum() * 0 + 1

        def inner(y):
            return y * scale

        if x.sum() > 0:
            scale = scale * 5
        return inner(x)


@right
class LambdaInTheBranch(Base):
    def forward(self, x):
        y = x * 1
        if x.sum() > 0:
            double = lambda t: t * 2  # noqa: E731
            y = self.linear(double(x))
        return y


@right
class ComprehensionInTheBranch(Base):
    def forward(self, x):
        y = x * 1
        if x.sum() > 0:
            y = torch.stack([x[:, i] * i for i in range(4)], 1)
        return y


@refused("no test in|comprehension")
class ConditionInAComprehension(Base):
    def forward(self, x):
        return torch.stack([column * 2 for column in x.unbind(1) if column.sum() > -100]).sum(0)


@right
class NanInTheOtherBranch(Base):
    def forward(self, x):
        y = x * 1
        if (x > 0).all():
            y = torch.log(x)
        return y


@refused("no call could be run")
class IndexThatOnlyExistsSometimes(Base):
    def forward(self, x):
        y = x * 1
        if x.sum() > 1e6:
            y = x[:, 7:8].expand(-1, 4) + x[17]
        return y


@refused("has no value where")
class UnboundAfterwards(Base):
    def forward(self, x):
        if x.sum() > 0:
            y = x * 2
        return y if x.shape[0] < 0 else x


@refused("`delete` under the test")
class DeletedInTheBranch(Base):
    def forward(self, x):
        y = x * 2
        if x.sum() > 0:
            x = y * 2
            del y
        return x


@refused("NoneType where")
class NoneInOneBranch(Base):
    def forward(self, x):
        y = None
        if x.sum() > 0:
            y = x * 2
        return x if y is None else y


@right
class NumberUsedAsASize(Base):
    def forward(self, x):
        n = 2
        if x.sum() > 0:
            n = 3
        return x * n + n


@refused("differs from the original")
class Match(Base):
    def forward(self, x):
        match bool(x.sum() > 0):
            case True:
                return x * 2
            case _:
                return x * 3


@right
class RandomInTheBranch(Base):
    def forward(self, x):
        y = x * 1
        if x.sum() > 0:
            y = y + torch.rand_like(x) * 0
        return y


@right
class ElseOfALoop(Base):
    def forward(self, x):
        for i in range(3):
            if x[:, i].sum() > 0:
                x = x * 2
                break
        else:
            x = x - 1
        return x


@right
class TwoTestsOfOneTensor(Base):
    def forward(self, x):
        positive = x.sum() > 0
        if positive:
            x = x * 2
        y = self.linear(x) if not positive else x - 1
        return x + y


@refused("`found`, a dict, is changed")
class DictInPlace(Base):
    def forward(self, x):
        found = {"a": x * 1}
        if x.sum() > 0:
            found["a"] = x * 2
            found["b"] = x * 3
        return sum(found.values())


@right
class MaskedWrite(Base):
    def forward(self, x):
        y = x * 2
        if (y > 1).any():
            y[y > 1] = 1.0
        return y


@right
class ViewWrittenThroughItsBase(Base):
    def forward(self, x):
        y = x * 2
        view = y[0]
        if x.sum() > 0:
            y[:, 1] = 7.0
        return view + y.sum()


@refused("no call could be run")
class ExceptionAsControl(Base):
    def forward(self, x):
        try:
            y = x * 2
            if x.sum() > 0:
                y = y.other
        except AttributeError:
            y = x * 9
        return y
