"""Groups proposed from the structure of the calls."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.utils._pytree import tree_structure
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutputWithPooling

from pytest_exportcheck.errors import ObserveError
from pytest_exportcheck.observe.groups import groups_as_yaml, item_counts, propose_groups, serve
from pytest_exportcheck.observe.records import RecordedCall
from pytest_exportcheck.pytrees import register_flattening_functions


@pytest.fixture(autouse=True)
def _flattening():
    with register_flattening_functions():
        yield


def call(index, **arguments):
    return RecordedCall(index, arguments, None, 0.0)


def cache(length=0):
    made = DynamicCache()
    if length:
        keys = torch.zeros(2, 2, length, 4)
        made.update(keys, keys.clone(), 0)
    return made


def cross(length=0):
    return EncoderDecoderCache(cache(length), cache(length))


def test_calls_of_one_structure_need_no_groups():
    calls = [call(0, x=torch.ones(2)), call(1, x=torch.ones(3))]
    assert [group.indices for group in propose_groups(calls)] == [(0, 1)]


def test_an_empty_cache_is_served_by_the_graph_of_filled_ones():
    calls = [call(0, x=torch.ones(2), cache=cache()), call(1, x=torch.ones(1), cache=cache(2))]
    assert [group.indices for group in propose_groups(calls)] == [(0, 1)]


def test_the_cross_attention_splits_prefill_from_decode():
    calls = [call(0, cache=cross()), call(1, cache=cross(2)), call(2, cache=cross(3)), call(3, cache=cross())]
    groups = propose_groups(calls)
    assert groups_as_yaml(groups) == "graphs: {prefill: [0, 3], decode: [1, 2]}"
    assert groups[1].reason == "cross attention read from the cache"
    later = propose_groups([call(0, cache=cross(2)), call(1, cache=cross(3)), call(2, cache=cross())])
    assert groups_as_yaml(later) == "graphs: {decode: [0, 1], prefill: [2]}"
    assert later[1].reason == "cross attention computed"


def test_constants_split_unless_they_are_the_default():
    calls = [call(0, x=torch.ones(2), k=1), call(1, x=torch.ones(2)), call(2, x=torch.ones(2), k=4)]
    assert [group.indices for group in propose_groups(calls)] == [(0,), (1,), (2,)]
    groups = propose_groups(calls, {"k": 1})
    assert [group.indices for group in groups] == [(0, 1), (2,)]
    assert groups[1].reason == "k=4"


def test_arguments_that_some_calls_lack_split():
    calls = [
        call(0, x=torch.ones(2)),
        call(1, x=torch.ones(2), mask=torch.ones(2)),
        call(2, x=torch.ones(2), mask=None),
    ]
    groups = propose_groups(calls)
    assert [group.indices for group in groups] == [(0, 2), (1,)]
    assert groups[1].reason == "mask given"


# Proposals hold: what is proposed is not refused again.

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Options:
    scale: int


def tensor(rank=2, dtype=torch.float32, size=2):
    return torch.zeros([size] * rank, dtype=dtype)


def layers(count, length):
    made = DynamicCache()
    for layer in range(count):
        made.update(torch.zeros(2, 2, length, 4), torch.zeros(2, 2, length, 4), layer)
    return made


#: Argument -> values that calls give it; ``None`` stands for a call without it.
VALUES = {
    "mask": [None, tensor(), tensor(size=3)],
    "mixed": [tensor(), tensor(3), tensor(dtype=torch.int64), 3, [tensor()]],
    "scale": [None, 1, 1.0, 2, "a"],
    "options": [Options(1), Options(2)],
    "images": [
        None,
        [],
        [tensor()],
        [tensor(), tensor()],
        (tensor(), tensor()),
        [tensor(), None],
        [None, tensor()],
    ],
    "sizes": [[1, 2], [1, 2, 3], [1, 3]],
    "features": [
        None,
        {},
        {"a": tensor()},
        {"a": tensor(), "b": tensor()},
        {"a": None, "b": tensor()},
        {"a": tensor(), "b": 4},
        OrderedDict(a=tensor()),
    ],
    "output": [
        None,
        {"image": BaseModelOutputWithPooling(tensor(), (tensor(), tensor()))},
        {"image": BaseModelOutputWithPooling(tensor(), (tensor(),))},
        {"image": BaseModelOutputWithPooling(tensor())},
        {"image": BaseModelOutputWithPooling(tensor(), tensor(), (None, tensor()))},
    ],
    "point": [Point(tensor(), 1), Point(tensor(), 2), Point(tensor(), None), (tensor(), 1)],
    "cache": [None, layers(0, 0), layers(1, 2), layers(1, 3), layers(2, 2), cross(), cross(2), cross(3)],
}


def check_proposal(calls, **options):
    groups = propose_groups(calls, **options)
    assert sorted(index for group in groups for index in group.indices) == [call.index for call in calls]
    assert len({group.name for group in groups}) == len(groups)
    by_index = {call.index: call for call in calls}
    for position, group in enumerate(groups):
        serve([by_index[index] for index in group.indices], defaults=options.get("defaults", {}))
        assert bool(group.reason) == (position > 0)
    return groups


def same_containers(first, second):
    """Whether torch.export sees the same containers, where both calls have some."""
    both = isinstance(first, (list, tuple, dict)) and isinstance(second, (list, tuple, dict))
    return not both or tree_structure(first) == tree_structure(second)


@pytest.mark.parametrize("name", VALUES)
def test_what_is_proposed_is_served(name):
    """Every pair of values, then all of them at once."""
    values = VALUES[name]
    for pair in itertools.product(values, repeat=2):
        calls = [call(k, x=tensor(), **{name: value}) for k, value in enumerate(pair)]
        groups = check_proposal(calls)
        try:
            serve(calls)
            served = True
        except ObserveError:
            served = False
        assert len(groups) == (1 if served and same_containers(*pair) else 2), pair
    check_proposal([call(k, x=tensor(), **{name: value}) for k, value in enumerate([*values, *values])])


@pytest.mark.parametrize("seed", range(20))
def test_what_is_proposed_is_served_however_much_differs(seed):
    choose = random.Random(seed)
    names = choose.sample(list(VALUES), 3)
    calls = []
    for index in range(6):
        arguments = {name: choose.choice(VALUES[name][:4]) for name in names if choose.random() < 0.8}
        calls.append(call(index, x=tensor(), **arguments))
    check_proposal(calls, defaults=choose.choice([{}, {"scale": 1, "mask": None}]))


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ({"mm": {"image": BaseModelOutputWithPooling(tensor())}}, {}, "no mm"),
        (
            {"mm": {"image": BaseModelOutputWithPooling(tensor())}},
            {"mm": {"image": BaseModelOutputWithPooling(tensor(), tensor())}},
            "mm.image.pooler_output given",
        ),
        (
            {"mm": {"image": BaseModelOutputWithPooling(tensor(), (tensor(),))}},
            {"mm": {"image": BaseModelOutputWithPooling(tensor(), (tensor(), tensor()))}},
            "mm.image.pooler_output holds 2",
        ),
        ({"mm": {"a": tensor(), "b": tensor()}}, {"mm": {"a": tensor()}}, "no mm.b"),
        ({"y": tensor()}, {"y": tensor(3)}, "y has rank 3"),
        ({"y": tensor()}, {"y": tensor(dtype=torch.int64)}, "y is int64"),
        ({"k": 4}, {"k": 1}, "k=1"),
        ({"mm": {"k": 4, "t": tensor()}}, {"mm": {"k": 1, "t": tensor()}}, "mm.k=1"),
        ({"k": 4}, {}, "k=7"),
        ({"k": 4}, {"k": None}, "k=None"),
        ({"mm": [tensor()], "k": 1}, {"mm": (tensor(),), "k": 1}, "mm is of class tuple"),
        ({"mm": {"a": tensor()}}, {"mm": {"a": tensor(), "b": None}}, "mm has the keys a, b"),
        ({"o": Options(1)}, {"o": Options(2)}, "not as in graph_0"),
        ({f"a{k}": tensor() for k in range(5)}, {}, "no a0, no a1, no a2 and 2 more"),
        # What one graph serves is no reason.
        ({"cache": layers(0, 0), "mm": tensor()}, {"cache": layers(1, 2)}, "no mm"),
        ({"cache": cross()}, {"cache": cross(2)}, "cross attention read from the cache"),
    ],
)
def test_reasons_are_short_and_look_inside(first, second, reason):
    _, group = check_proposal(
        [call(0, x=tensor(), **first), call(1, x=tensor(), **second)], defaults={"k": 7}
    )
    assert group.reason == reason


def test_a_stand_in_is_no_reason_for_a_group():
    calls = [call(0, x=tensor(), mask=tensor(), k=1), call(1, x=tensor(), k=1), call(2, x=tensor(), k=2)]

    def serves(some):
        return serve(some, value_if_missing=lambda name, sizes: tensor() if name == "mask" else None)

    groups = propose_groups(calls, {}, serves, ["mask"])
    assert [(group.indices, group.reason) for group in groups] == [((0, 1), ""), ((2,), "k=2")]


def test_names_are_not_given_twice():
    calls = [
        call(0, images=[tensor()], cache=cache()),
        call(1, cache=cache(2)),
        call(2, images=[tensor(), tensor()], cache=cache()),
        call(3, images=[tensor()], cache=cache()),
    ]
    groups = check_proposal(calls)
    assert groups_as_yaml(groups, [3]) == (
        "graphs: {prefill: [0, 3], decode: [1], prefill_2: [2]}, example: {prefill: 3}"
    )


def test_a_varying_number_of_tensors_is_said():
    calls = [call(0, images=[tensor()]), call(1, images=[tensor(), tensor()]), call(2, images=[tensor()])]
    assert item_counts(calls) == {"images": {1: [0, 2], 2: [1]}}
    with pytest.raises(
        ObserveError, match=r"images holds a varying number of items \(1 in calls 0, 2; 2 in call 1\)"
    ):
        serve(calls)
