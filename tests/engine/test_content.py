"""The digest of what objects hold: of values and not of places, and none of what cannot be read."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pytest_exportcheck.exporters.codes import code_digest
from pytest_exportcheck.exporters.content import Content, Unreadable


def digest(value: Any) -> str:
    content = Content()
    content.add("value", value)
    return content.hexdigest()


def test_content_is_of_values_and_not_of_places() -> None:
    assert digest({"a": [1, (2.0, None)]}) == digest({"a": [1, (2.0, None)]})
    assert digest([1]) != digest([True])
    assert digest([1, 2]) != digest([[1], 2])
    assert digest({"a", "b", "c"}) == digest({"c", "b", "a"})
    assert digest(torch.zeros(2)) != digest(torch.zeros(2).to(torch.float64))
    assert digest(torch.zeros(2, 3)) != digest(torch.zeros(3, 2).t())
    shared = [0]
    assert digest([shared, shared]) != digest([[0], [0]])
    shared.append(shared)  # type: ignore[arg-type]
    assert digest(shared)


def plain(x: Any) -> Any:
    return x


def test_attributes_of_functions_count_and_addresses_among_them_do_not() -> None:
    """The wrapper is torch's own code, around another function each time."""
    first, second, third = (torch.no_grad()(plain) for _ in range(3))
    assert digest(first) == digest(second)
    second.flag, third.flag = 1, 2  # type: ignore[attr-defined]
    assert len({digest(first), digest(second), digest(third)}) == 3
    assert "_torchdynamo_wrapper_id" in vars(torch.compiler.disable(plain))
    assert digest(torch.compiler.disable(plain)) == digest(torch.compiler.disable(plain))


def hidden() -> Iterator[Any]:
    yield iter([1])
    yield io.BytesIO()
    yield (number for number in range(2))
    yield memoryview(b"x")
    yield torch.zeros(2, device="meta")


@pytest.mark.parametrize("value", list(hidden()), ids=lambda value: type(value).__name__)
def test_what_cannot_be_told_has_no_digest(value: Any) -> None:
    with pytest.raises(Unreadable, match=r"value\.here"):
        digest({"here": value})


def test_tensors_in_the_same_memory_are_not_those_apart() -> None:
    values = torch.zeros(4)
    assert digest([values[:2], values[:2]]) != digest([torch.zeros(2), torch.zeros(2)])


def test_a_table_of_a_class_that_others_register_in(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = digest(ALL_ATTENTION_FUNCTIONS)
    monkeypatch.setitem(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, "mine", lambda x: x)
    assert digest(ALL_ATTENTION_FUNCTIONS) != before


def test_hooks_and_methods_of_an_instance_count() -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Linear(2, 2)

    plain, hooked, replaced = model(), model(), model()
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    assert digest(plain) == digest(model())
    assert len({digest(plain), digest(hooked), digest(replaced)}) == 3


def test_code_has_a_digest_whatever_is_among_its_constants() -> None:
    """Python 3.14 has slices there, which the format of the digest does not know."""
    code = digest.__code__
    odd = [code.replace(co_consts=(*code.co_consts, item)) for item in (slice(1, 2), slice(1, 3))]
    assert len({code_digest(one) for one in (code, *odd)}) == 3
    assert code_digest(odd[0].replace()) == code_digest(odd[0])
