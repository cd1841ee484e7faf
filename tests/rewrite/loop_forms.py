"""Small models that loop over a dynamic axis, x [batch, time, 4], and those whose loop no scan can be."""

# ruff: noqa: PERF401 (the loops are what is tested)

from __future__ import annotations

from collections.abc import Callable

import torch

LOOPS: dict[str, type[torch.nn.Module]] = {}
REFUSED: dict[str, tuple[type[torch.nn.Module], str]] = {}


def loop(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    LOOPS[cls.__name__] = cls
    return cls


def refused(message: str) -> Callable[[type[torch.nn.Module]], type[torch.nn.Module]]:
    def register(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
        REFUSED[cls.__name__] = (cls, message)
        return cls

    return register


class Base(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))
        self.seen: list[int] = []


@loop
class OverRange(Base):
    def forward(self, x):
        h = torch.zeros(x.shape[0], 4)
        for i in range(x.shape[1]):
            h = torch.tanh(self.linear(x[:, i]) + h)  # a comment that stays where the line stays
        return h


@loop
class OverLength(Base):
    def forward(self, x):
        batch, length, _ = x.shape
        h = x.new_zeros(batch, 4)
        outs = []
        for t in range(length):
            h = h * 0.5 + x[:, t, :]
            outs.append(h)
        return torch.stack(outs, dim=1), h

    def scaled(self, h):
        return h * 0.25


@loop
class OverRows(Base):
    def forward(self, x):
        rows = x.transpose(0, 1)
        outs = []
        for row in rows:
            outs.append(self.linear(row))
        return torch.stack(outs)


@loop
class OverUnbind(Base):
    def forward(self, x):
        h = x[:, 0] * 0
        for row in x.unbind(1):
            h = torch.maximum(h, row)
        return h


@loop
class UnbindBefore(Base):
    def forward(self, x):
        total = torch.zeros(x.shape[0], 4)
        steps = torch.unbind(x, dim=1)
        for step in steps:
            total += step.abs()
        return total


@loop
class OverSplit(Base):
    def forward(self, x):
        outs = []
        for one in x.split(1, dim=1):
            outs.append(torch.tanh(one))
        return torch.cat(outs, dim=1)


@loop
class OverZip(Base):
    def forward(self, x):
        y = x.flip(1)
        h = torch.zeros(x.shape[0], 4)
        outs = []
        for a, b in zip(x.unbind(1), y.unbind(1), strict=True):
            h = a * h + b
            outs.append(h.sum(-1))
        return torch.stack(outs, -1)


@loop
class TwoLoopsWithOneName(Base):
    def forward(self, x):
        h = torch.zeros(x.shape[0], 4)
        firsts, seconds = [], []
        for row in x.unbind(1):
            h = torch.tanh(h + row)
            firsts.append(h)
        k = torch.ones(x.shape[0], 4)
        for row in x.flip(1).unbind(1):
            k = torch.tanh(k * row + h)
            seconds.append(k)
        return torch.stack(firsts, 1) + torch.stack(seconds, 1)


@loop
class BranchOnStateAndRow(Base):
    def forward(self, x):
        h = torch.zeros(x.shape[0], 4)
        for t in range(x.shape[1]):
            if h.sum() > 0:
                h = h * 0.5 + x[:, t]
            else:
                h = h - x[:, t]
        return h


@loop
class StartsExpandedAndTransposed(Base):
    def forward(self, x):
        h, k = self.total.expand(x.shape[0], -1), torch.ones(4, x.shape[0]).t()
        for row in x.unbind(1):
            h, k = torch.tanh(h + row), torch.tanh(k - row)
        return h, k


@loop
class OverEnumerate(Base):
    def forward(self, x):
        weights = torch.arange(x.shape[1]) + 1.0
        total = torch.zeros(x.shape[0], 4)
        for i, row in enumerate(x.unbind(1)):
            total = total + row * weights[i] * (i + 1)
        return total


@loop
class Backwards(Base):
    def forward(self, x):
        h = torch.zeros(x.shape[0], 4)
        outs = []
        for i in reversed(range(x.shape[1])):
            h = h * 0.9 + x[:, i]
            outs.append(h)
        return torch.stack(outs, 1)


@loop
class KeptAxis(Base):
    def forward(self, x):
        outs = []
        for i in range(x.shape[1]):
            outs.append(torch.tanh(x[:, i : i + 1]) + x[:, i, None, :2].sum())
        return torch.cat(outs, 1)


@loop
class StateInTuple(Base):
    def forward(self, x):
        state = (torch.zeros(x.shape[0], 4), torch.zeros(x.shape[0], 4))
        outs = []
        for row in x.unbind(1):
            state = self.step(row, state)
            outs.append(state[0])
        return torch.stack(outs, 1), state

    def step(self, row, state):
        h, c = state
        c = torch.sigmoid(self.linear(row)) * c + h
        return torch.tanh(c), c


@loop
class Numbers(Base):
    def forward(self, x):
        count, total = 0, 0.0
        for row in x.unbind(1):
            count += 1
            total = total + row.mean(-1).mean(-1)
        return total / count


@loop
class WrittenInto(Base):
    def forward(self, x):
        out = torch.zeros_like(x)
        for i in range(x.shape[1]):
            out[:, i] = x[:, i] * 2 + 1
        return out


@loop
class Comprehension(Base):
    def forward(self, x):
        return torch.stack([self.linear(row).relu() for row in x.unbind(1)], dim=1) + 1


@loop
class BranchOnDataInside(Base):
    def forward(self, x):
        h = torch.zeros(x.shape[0], 4)
        for row in x.unbind(1):
            if row.sum() > 0:
                h = h + row
            else:
                h = h - row
        return h


@loop
class TwoLoops(Base):
    def forward(self, x):
        h = torch.zeros(x.shape[0], 4)
        for layer in (self.linear, torch.tanh):
            outs = []
            for i in range(x.size(1)):
                h = layer(x[:, i]) + h
                outs.append(h)
            x = torch.stack(outs, dim=1)
        last = torch.zeros(x.shape[1], 4)
        for sample in x:
            last = last + sample
        return x, last


@loop
class BoundMethods(OverLength):
    def forward(self, x):
        outs, h = super().forward(x)
        scale = 2.0
        for row in outs.unbind(1):
            h = super().scaled(h) + row * scale
        return h


@loop
class FromTheSecond(Base):
    """No rounds for one element, for which `torch.arange` would raise."""

    def forward(self, x):
        h = x[:, 0]
        for t in range(1, x.shape[1] + 1):
            h = h * 0.5 + x[:, t - 1] * x[:, -t]
        return h


@loop
class FromTheEnd(Base):
    def forward(self, x):
        n = x.shape[1]
        out = torch.zeros_like(x)
        h = torch.zeros(x.shape[0], 4)
        for t in range(n):
            h = torch.tanh(h + x[:, -t - 1] + x[:, ~t] * x[:, n - 1 - t])
            out[:, -t - 1] = h
        return out


@loop
class NegativeCounter(Base):
    def forward(self, x):
        h = torch.zeros(x.shape[0], 4)
        for t in range(-x.shape[1], 0):
            h = torch.tanh(h + x[:, t])
        return h


@loop
class AddsIntoARow(Base):
    def forward(self, x):
        out = x.clone()
        for t in range(x.shape[1]):
            out[:, t] += out[:, t - 1] * 0.5
        return out


@loop
class ListWithAFirstValue(Base):
    def forward(self, x):
        h = x[:, 0] * 0
        outs, joined = [h], [h]
        for row in x.unbind(1):
            h = torch.tanh(h + row)
            outs.append(h)
            joined.append(h)
        return torch.stack(outs, dim=1), torch.cat(joined, -1)


@loop
class CountsDown(Base):
    """A number that starts as the size."""

    def forward(self, x):
        n = x.shape[1]
        h = torch.zeros(x.shape[0], 4)
        for t in range(n):
            h = h + x[:, t] * n
            n = n - 1
        return h


@refused(r"`break`.*torch.where")
class Breaks(Base):
    def forward(self, x):
        h = torch.zeros(x.shape[0], 4)
        for i in range(x.shape[1]):
            h = h + x[:, i]
            if self.training:
                break
        return h


@refused(r"`h`.*is float32\[2, 4\].* before and float64\[2, 4\].* after a round.*start `h` as a tensor")
class Widens(Base):
    def forward(self, x):
        h = torch.zeros(x.shape[0], 4)
        for row in x.unbind(1):
            h = h + row.double()
        return h


@refused(r"`h`.*is int 0 before and float32\[\d, 4\].* after a round.*torch.zeros")
class StartsAsNumber(Base):
    def forward(self, x):
        h = 0
        for row in x.unbind(1):
            h = h + row
        return h


@refused(r"`h`.*float32\[2, 1, 4\].* before and float32\[2, 2, 4\].* after a round")
class Grows(Base):
    def forward(self, x):
        h = x[:, :1]
        for i in range(x.shape[1]):
            h = torch.cat([h, x[:, i : i + 1]], 1)
        return h


@refused(r"`states`, which is no tensor.*one variable for each")
class ListOfStates(Base):
    def forward(self, x):
        states = [torch.zeros(x.shape[0], 4), torch.zeros(x.shape[0], 4)]
        for row in x.unbind(1):
            states[0] = states[0] + row
            states[1] = states[1] + states[0]
        return states[1]


@refused(r"write in place into `x`.*x.clone\(\).*before the loop")
class WritesIntoAnArgument(Base):
    def forward(self, x):
        for i in range(x.shape[1]):
            x[:, i] = x[:, i] * 2
        return x


@refused(r"write to `self.total`.*variable")
class WritesAnAttribute(Base):
    def forward(self, x):
        for row in x.unbind(1):
            self.total = self.total + row.sum(0)
        return self.total


@refused(r"for its effect.*append tensors to a list")
class Effect(Base):
    def forward(self, x):
        h = torch.zeros(x.shape[0], 4)
        for row in x.unbind(1):
            self.seen.append(1)
            h = h + row
        return h


@refused(r"`outs`.*is used as a list.*torch.stack\(outs\)")
class ReturnsTheList(Base):
    def forward(self, x):
        outs = []
        for row in x.unbind(1):
            outs.append(row * 2)
        return outs[0], len(outs)


@refused(r"needs the value of the counter `i`.*torch.where")
class TestsTheCounter(Base):
    def forward(self, x):
        h = torch.zeros(x.shape[0], 4)
        for i in range(x.shape[1]):
            if i > 0:
                h = h + x[:, i]
        return h


@refused(r"needs the value of the counter `i`")
class SlicesByTheCounter(Base):
    def forward(self, x):
        h = torch.zeros(x.shape[0], 4)
        for i in range(x.shape[1]):
            h = h + x[:, : i + 1].sum(1)
        return h


@refused(r"`row`, which every round binds, is read after the loop")
class ReadsTheLastRow(Base):
    def forward(self, x):
        h = torch.zeros(x.shape[0], 4)
        for row in x.unbind(1):
            h = h + row
        return h + row


@refused(r"`y` gets its value, and is used after it.*before the loop")
class BoundInside(Base):
    def forward(self, x):
        for row in x.unbind(1):
            y = row * 2
        return y


@refused(r"has more than one loop, or a test.*appends to a list")
class TestedComprehension(Base):
    def forward(self, x):
        return torch.stack([row for row in x.unbind(1) if self.linear is not None], 1)


@refused(r"`break` in the loop")
class BreaksInTheSecondLoop(Base):
    def forward(self, x):
        h = torch.zeros(x.shape[0], 4)
        for row in x.unbind(1):
            h = torch.tanh(h + row)
        for row in x.flip(1).unbind(1):
            h = torch.tanh(h * row)
            if self.linear is None:
                break
        return h


@refused(r"`outs` gets values that are no tensors")
class AppendsPairs(Base):
    def forward(self, x):
        outs = []
        for row in x.unbind(1):
            outs.append((row, row * 2))
        return torch.stack([a + b for a, b in outs])


class OverBlocks(Base):
    """Exports as it is: the number of blocks of the example is baked in, and no axis becomes a constant."""

    def forward(self, x):
        x = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 4))
        count = x.shape[1] // 4
        blocks = x.reshape(x.shape[0], count, 4, 4)
        out = torch.zeros_like(blocks)
        h = torch.zeros(x.shape[0], 4)
        for i in range(count):
            h = h * 0.5 + blocks[:, i].sum(1)
            out[:, i] = h[:, None] + blocks[:, i]
        return out


class OverBlocksByTheCounter(Base):
    """Exports as it is, and no scan can be made of it: it stays."""

    def forward(self, x):
        h = torch.zeros(x.shape[0], 4)
        for i in range((x.shape[1] + 3) // 4):
            h = h + x[:, i * 4 : i * 4 + 4].sum(1)
        return h
