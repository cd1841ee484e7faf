"""Arguments by name, and back to a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_exportcheck.observe import CallSignature


def plain(a: Any, b: Any = 2, *, c: Any = 3) -> dict[str, Any]:
    return dict(locals())


def positional_only(a: Any, b: Any = 2, /, c: Any = 3) -> dict[str, Any]:
    return dict(locals())


def variadic(a: Any, b: Any = 2, *rest: Any, c: Any = 3) -> dict[str, Any]:
    return dict(locals())


def extras(a: Any, **more: Any) -> dict[str, Any]:
    return dict(locals())


def everything(a: Any, /, b: Any, *rest: Any, c: Any = 3, **more: Any) -> dict[str, Any]:
    return dict(locals())


CALLS = [
    (plain, (1,), {}),
    (plain, (1, 5), {"c": 7}),
    (plain, (), {"c": 7, "b": 5, "a": 1}),
    (plain, (1,), {"c": 7}),
    (positional_only, (1,), {}),
    (positional_only, (1, 5), {"c": 7}),
    (positional_only, (1, 5, 7), {}),
    (variadic, (1,), {}),
    (variadic, (1, 5, 6, 7), {"c": 8}),
    (variadic, (), {"a": 1, "c": 8}),
    (extras, (1,), {"z": 9, "y": 8}),
    (extras, (), {"z": 9, "a": 1}),
    (everything, (1, 2), {}),
    (everything, (1, 2, 3, 4), {"c": 5, "z": 6}),
    (everything, (1,), {"b": 2, "z": 6}),
    (extras, (1,), {"rest_0": 3}),
]


@pytest.mark.parametrize(("function", "args", "kwargs"), CALLS)
def test_call_is_the_inverse_of_bind(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    signature = CallSignature.of(function)
    bound = signature.bind(args, kwargs)
    again_args, again_kwargs = signature.call(bound)
    assert function(*again_args, **again_kwargs) == function(*args, **kwargs)
    # A positional-only default may have become explicit.
    assert bound.items() <= signature.bind(again_args, again_kwargs).items()


def test_names_and_order_do_not_depend_on_the_way_of_passing() -> None:
    signature = CallSignature.of(plain)
    ways = [((1, 5), {"c": 7}), ((1,), {"c": 7, "b": 5}), ((), {"c": 7, "b": 5, "a": 1})]
    assert {tuple(signature.bind(args, kwargs).items()) for args, kwargs in ways} == {
        (("a", 1), ("b", 5), ("c", 7))
    }


def test_variadic_arguments_get_names() -> None:
    assert CallSignature.of(variadic).bind((1, 2, 3, 4), {}) == {"a": 1, "b": 2, "rest_0": 3, "rest_1": 4}
    assert list(CallSignature.of(extras).bind((1,), {"z": 1, "b": 2})) == ["a", "b", "z"]


def test_the_old_name_of_the_cache_is_the_new_one() -> None:
    def forward(input_ids: Any, cache: Any = None, **kwargs: Any) -> Any: ...

    def older(input_ids: Any, past_key_values: Any = None, **kwargs: Any) -> Any: ...

    # Only methods of transformers rename it.
    assert CallSignature.of(forward).bind((1,), {"past_key_values": 2}) == {
        "input_ids": 1,
        "past_key_values": 2,
    }
    forward.__module__ = older.__module__ = "transformers.models.tiny"
    assert CallSignature.of(forward).bind((1,), {"past_key_values": 2}) == {"input_ids": 1, "cache": 2}
    both = {"past_key_values": 2, "cache": 3}
    assert CallSignature.of(forward).bind((1,), both) == {"input_ids": 1, **both}
    assert CallSignature.of(older).bind((1,), {"past_key_values": 2}) == {
        "input_ids": 1,
        "past_key_values": 2,
    }


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2, 3), {}), ((1,), {"a": 1}), ((1,), {"d": 1})])
def test_what_does_not_fit_is_a_type_error(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        CallSignature.of(plain).bind(args, kwargs)
