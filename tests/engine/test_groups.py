"""Groups proposed from the structure of the calls."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from pytest_exportcheck.observe.groups import groups_as_yaml, propose_groups
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
    assert groups[1].reason == "cross attention computed"


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
