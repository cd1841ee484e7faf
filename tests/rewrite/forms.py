"""Small models, one for each form of control flow, with inputs that take both branches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

POSITIVE = torch.linspace(0.1, 2.0, 12).reshape(3, 4)
NEGATIVE = -POSITIVE


@dataclass(frozen=True)
class Form:
    """A model, what its branches must become, and inputs of other sizes that together take both branches."""

    make: Callable[[], torch.nn.Module]
    targets: tuple[str, ...]
    inputs: tuple[torch.Tensor, ...]


FORMS: dict[str, Form] = {}


def wide(value: float, rows: int = 5) -> torch.Tensor:
    """A tensor of other sizes than the example's."""
    return torch.full((rows, 4), value) + torch.arange(4) * 0.01


BOTH = (wide(1.0), wide(-1.0, 7), wide(-3.0, 2), wide(0.01, 6))


def form(*targets: str, inputs: tuple[torch.Tensor, ...] = BOTH) -> Callable[[type], type]:
    def register(cls: type) -> type:
        FORMS[cls.__name__] = Form(cls, targets, inputs)
        return cls

    return register


class Base(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)
        self.flag = True
        self.register_buffer("total", torch.zeros(4))

    def shift(self, x):
        return x + 1


@form("torch.where")
class IfAssign(Base):
    def forward(self, x):
        y = x * 2
        if y.sum() > 0:
            y = torch.clamp(y, min=0.5)  # a comment that stays where the line stays
        return y + 1


@form("torch.where")
class Not(Base):
    def forward(self, x):
        if not (x > 0).all():
            x = x.abs()
        return x * 3


@form("torch.where", "torch.where", "torch.where", "torch.cond")
class AndOr(Base):
    def forward(self, x):
        if (x.sum() > 0 and x.max() < 100) or (x < -2).any():
            x = x * 2
        return x


@form("torch.where")
class PythonPartFirst(Base):
    def forward(self, x, mask=None):
        if x.dtype == torch.float32 and not torch.isfinite(x).all():
            limit = torch.finfo(x.dtype).max - 1000
            x = torch.clamp(x, min=-limit, max=limit)
        return x


@form("torch.where")
class IsNotNone(Base):
    def forward(self, x, mask=None):
        if mask is not None or x.sum() > 0:
            x = x + 1
        else:
            x = x - 1
        return x


@form("torch.where", "torch.where")
class Elif(Base):
    def forward(self, x):
        if x.sum() > 10:
            y = x * 2
        elif x.sum() > 0:
            y = x * 3
        else:
            y = -x
        return y


@form("torch.cond")
class EarlyReturn(Base):
    def forward(self, x):
        if x.sum() > 0:
            return self.linear(x)
        y = x * 2
        return y - 1


@form("torch.cond", "torch.cond")
class EarlyReturns(Base):
    def forward(self, x):
        if x.sum() > 10:
            return self.linear(x), x * 1
        x = x + 1
        if x.min() < -1:
            return x * 2, self.linear(x)
        return x * 3, x - 1


@form("torch.where")
class ConditionalExpression(Base):
    def forward(self, x):
        return (x * 2 if x.sum() > 0 else x / 2) + 1


@form("torch.where")
class ConditionalNumber(Base):
    def forward(self, x):
        scale = 2.5 if x.mean() > 0 else 0.1
        return x * scale


@form("torch.cond")
class InPlaceSlice(Base):
    def forward(self, x):
        y = x * 2
        if y.sum() > 0:
            y[:, 0] = 0
        return y


@form("torch.where")
class AugmentedOnAView(Base):
    def forward(self, x):
        y = x * 2
        view = y[:, :2]
        if x.sum() > 0:
            view *= 10
        return y


@form("torch.where")
class Counter(Base):
    def forward(self, x):
        n = 0
        if x.sum() > 0:
            n += 1
        return x * n, n


@form("torch.cond")
class OneBranchOnly(Base):
    def forward(self, x):
        y = x * 2
        if x.sum() > 0:
            y = self.linear(y)
            z = y * 2
            y = z + y
        return y


@form("torch.cond")
class TupleInBranch(Base):
    def forward(self, x):
        pair = (x * 1, x * 2)
        if x.sum() > 0:
            pair = (self.linear(x), pair[0])
        return pair[0] + pair[1]


@form("torch.where")
class Swap(Base):
    def forward(self, x):
        a, b = x * 2, x * 3
        if x.sum() > 0:
            c = a
            a = b
            b = c
        return a, b


@form("torch.where", "torch.cond")
class Nested(Base):
    def forward(self, x):
        y = x * 1
        if x.sum() > 0:
            y = self.linear(x)
            if y.max() > 0.5:
                y = y * 2
        return y


@form("torch.cond")
class NestedPythonIf(Base):
    def forward(self, x):
        if x.sum() > 0:
            if self.flag:
                x = self.linear(x)
            else:
                x = x * 5
        return x + 1


@form("torch.cond")
class SuperAndSelf(Base):
    def forward(self, x):
        if x.sum() > 0:
            x = super().shift(self.linear(x))
        return x * 1

    def shift(self, x):
        return x + 100


def doubled(function):
    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        return function(self, *args, **kwargs) * 2

    return wrapper


def with_offset(offset):
    def decorate(function):
        return function

    def forward(self, x):
        if x.sum() > 0:
            x = x + offset
        return x

    return decorate(forward)


@form("torch.where")
class Decorated(Base):
    @doubled
    def forward(self, x):
        if x.sum() > 0:
            x = x + 1
        return x


@form("torch.where")
class Closure(Base):
    forward = with_offset(3)


@form("torch.where")
class NestedFunction(Base):
    def forward(self, x):
        def inner(y):
            if y.sum() > 0:
                y = y * 4
            return y

        return inner(x) + 1


@form("torch.where")
class AttributeWrite(Base):
    def forward(self, x):
        if x.sum() > 0:
            self.total = self.total + x.mean(0)
        return x + self.total


@form("torch.while_loop")
class While(Base):
    def forward(self, x):
        n = 0
        while x.abs().max() > 0.5:
            x = x / 2
            n += 1
        return x, n


@form("torch.where", "torch.while_loop")
class WhileBreak(Base):
    def forward(self, x):
        n = 0
        while n < 20:
            if x.abs().max() < 0.3:
                break
            x = x * 0.7
            n += 1
        return x


@form("torch.where", "torch.where")
class ForBreak(Base):
    def forward(self, x):
        for _ in range(3):
            if x.sum() > 5:
                break
            x = x + 1
        return x


@form("torch.where")
class ForContinue(Base):
    def forward(self, x):
        y = x * 1
        for i in range(3):
            if x.sum() > 0:
                continue
            y = y + i
        return y


@form("torch.cond", "torch.while_loop")
class RowsBreak(Base):
    def forward(self, x):
        h = torch.zeros(4)
        for i in range(x.shape[0]):
            if h.sum() > 10:
                break
            h = h + x[i]
        return h


@form("torch.cond")
class Accumulator(Base):
    def forward(self, x):
        total = torch.zeros(())
        for i in range(3):
            if x[:, i].sum() > 0:
                total = total + x[:, i].mean()
        return total


@form("torch.cond")
class Item(Base):
    def forward(self, x):
        n = (x > 0).sum().item()
        if n > 3:
            x = self.linear(x)
        return x + 1


@form("tensor operators", "torch.where")
class BoolVariable(Base):
    def forward(self, x):
        found = bool((x > 0).any())
        if found:
            x = x * 2
        return x


@form("torch.where")
class ChainedComparison(Base):
    def forward(self, x):
        if 0 < x.mean() < 5:
            x = x * 2
        return x


@form("torch._assert_async")
class Assert(Base):
    def forward(self, x):
        assert (x < 1e6).all(), "too large"
        return x * 2


@form("torch._assert_async")
class Raise(Base):
    def forward(self, x):
        if torch.isnan(x).any():
            raise ValueError(f"nan in an input of {x.shape[0]} rows")
        return x * 2


@form("torch._assert_async", "torch.cond")
class RaiseInBranch(Base):
    def forward(self, x):
        y = x * 1
        if x.sum() > 0:
            if (x > 1e6).any():
                raise ValueError("too large")
            y = self.linear(x)
        return y


@form("torch.cond")
class OtherSizes(Base):
    def forward(self, x):
        y = x * 1
        if x.sum() > 0:
            y = x[:, :2] * 2
        return y.sum()


@form("torch.cond")
class Transposed(Base):
    def forward(self, x):
        y = self.linear(x)
        if x.sum() > 0:
            y = self.linear(x).t().contiguous().t()
        return y


@form("torch.where", "torch.while_loop", inputs=(wide(1.0), wide(-1.0, 7), wide(2.0, 9)))
class RowsReboundInTheLoop(Base):
    """What a loop runs over is computed once."""

    def forward(self, x):
        s = x[0] * 0
        for row in x:
            s = s + row
            x = self.linear(x)
            if s.sum() > 6:
                break
        return s, x


@form("torch.where", "torch.cond", "torch.where")
class LayersBreak(Base):
    """Whether the loop was left is a boolean, which ONNX Runtime selects with no ``Where``."""

    def forward(self, x):
        for layer in (self.linear, self.linear):
            x = layer(x)
            if x.mean() > 0.1:
                x = x * 10
                break
        else:
            x = x - 5
        return x


@form("torch.cond")
class WritesByTwoIndices(Base):
    def forward(self, x):
        y = torch.zeros_like(x)
        view = y[0]
        if x.sum() > 0:
            y[0, 1] = 3
            y[-1] = x[0]
            y[..., 2] = 7
            y[0, :2] = 9
        return y, view


@form("torch.cond", "torch.where", "torch.cond", "torch.where", "torch.where")
class NumbersInNestedBranches(Base):
    def forward(self, x):
        s, k = x.sum(), 0
        if s > 0:
            k = 1
            if x.max() > 1.5:
                k = k + 10
            else:
                x = self.linear(x)
        elif s < -10:
            k = 2
            x = x.abs()
        if k == 0 and not s > 0:
            x = x + 100
        return x * (k + 1)


@form("torch.while_loop", "torch.where")
class EndlessForInfinity(Base):
    """The proof tries infinite values to reach the second test; the loop does not end for them."""

    def forward(self, x):
        while x.abs().max() > 0.5:
            x = x * 0.7
        if x.min() > 0.45:
            x = x + 1
        return x


#: Forms that convert to ONNX too: what is special about them shows there.
CONVERTED = (
    "RowsReboundInTheLoop", "LayersBreak", "WritesByTwoIndices", "NumbersInNestedBranches",
)  # fmt: skip
