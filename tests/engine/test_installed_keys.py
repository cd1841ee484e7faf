"""What was done to installed code while the process ran, and what installed modules hold, is in a key."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pytest_exportcheck.exporters import surroundings
from pytest_exportcheck.exporters.content import Content

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def bert() -> torch.nn.Module:
    config = transformers.BertConfig(
        vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4
    )
    return transformers.BertModel(config).eval()


def installed(model: torch.nn.Module) -> str:
    content = Content()
    content.add("model", model)
    surroundings.add_installed(content, [type(part) for part in model.modules()], Path("."))
    return content.hexdigest()


def constants(function: Any, old: Any, new: Any) -> Any:
    """Its code with another constant, under the same name and on the same line."""
    code = function.__code__
    assert old in code.co_consts
    return code.replace(co_consts=tuple(new if item == old else item for item in code.co_consts))


def other_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    function = transformers.activations.NewGELUActivation.forward
    monkeypatch.setattr(function, "__code__", constants(function, 0.044715, 0.05))


def other_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional.softmax, "__defaults__", (None, 5, None))


def other_default_of_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        transformers.models.bert.modeling_bert.BertSelfAttention.__init__, "__defaults__", (1, 2)
    )


def other_keyword_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional.silu, "__kwdefaults__", {"inplace": True})


def other_closure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper of torch's around a function of torch: around another one."""
    pool = torch.nn.functional.max_pool2d  # `boolean_dispatch`
    (cell,) = [
        cell
        for name, cell in zip(pool.__code__.co_freevars, pool.__closure__, strict=True)
        if name == "if_false"
    ]
    monkeypatch.setattr(cell, "cell_contents", torch.nn.functional._max_pool3d)


def other_wrapped_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, of a function that is only in the closure of its wrapper."""
    wrapped = transformers.BertModel.forward.__wrapped__
    while hasattr(wrapped, "__wrapped__"):
        wrapped = wrapped.__wrapped__
    monkeypatch.setattr(
        wrapped, "__code__", wrapped.__code__.replace(co_consts=(*wrapped.__code__.co_consts, 7))
    )


def other_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """``ACT2FN["gelu"]`` makes a new one each time: what it holds is a class, or a class and arguments."""
    monkeypatch.setitem(transformers.activations.ACT2FN, "gelu", torch.nn.Tanh)


def other_arguments_of_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    _, arguments = dict.__getitem__(transformers.activations.ACT2FN, "gelu_10")
    monkeypatch.setitem(arguments, "max", 6)


def other_class_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 3

    monkeypatch.setitem(transformers.activations.ACT2FN, "gelu", Mine)


def entry_of_a_dict_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(transformers.BertPreTrainedModel._can_record_outputs, "mine", 1)


def flag_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.models.bert.modeling_bert.BertPreTrainedModel, "_supports_sdpa", "no")


def function_under_a_decorator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outer function is torch's own, the inner one is not."""
    original = transformers.activations.GELUActivation.forward
    monkeypatch.setattr(
        transformers.activations.GELUActivation,
        "forward",
        torch.no_grad()(lambda self, x: original(self, x) * 2),
    )


def attribute_of_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    method = transformers.models.bert.modeling_bert.BertSelfAttention.forward
    monkeypatch.setattr(method, "is_fast", True, raising=False)


def attribute_of_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional.softmax, "is_fast", True, raising=False)


def attribute_of_a_wrapped_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.BertModel.forward.__wrapped__, "is_fast", True, raising=False)


def other_attributes_altogether(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional.softmax, "__dict__", {"is_fast": True})


CHANGES = [
    attribute_of_a_method,
    attribute_of_a_function,
    attribute_of_a_wrapped_function,
    other_attributes_altogether,
    other_constant,
    other_defaults,
    other_default_of_a_method,
    other_keyword_defaults,
    other_closure,
    other_wrapped_function,
    other_entry,
    other_arguments_of_an_entry,
    other_class_of_the_users,
    entry_of_a_dict_of_a_class,
    flag_of_a_class,
    function_under_a_decorator,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_was_done_to_installed_code_counts_while_it_lasts(
    bert: torch.nn.Module, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    before = installed(bert)
    assert installed(bert) == before
    with pytest.MonkeyPatch.context() as monkeypatch:
        change(monkeypatch)
        changed = installed(bert)
        assert changed != before
        assert installed(bert) == changed
    assert installed(bert) == before


class Scaled:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def again(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@pytest.mark.parametrize(
    "holding",
    [
        Scaled,
        lambda factor: Scaled(factor).again,
        lambda factor: functools.partial(Scaled(factor)),
        lambda factor: torch.tensor([factor]),
        lambda factor: types.SimpleNamespace(factor=factor),
    ],
    ids=["object", "method", "partial", "tensor", "namespace"],
)
@pytest.mark.parametrize("place", ["module", "table"])
def test_objects_in_installed_modules_count_with_what_they_hold(
    bert: torch.nn.Module, place: str, holding: Callable[[float], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their class says the same of both."""
    found = {installed(bert)}
    for factor in (2.0, 3.0):
        value = holding(factor)
        if place == "module":
            monkeypatch.setattr(transformers.models.bert.modeling_bert, "apply_chunking_to_forward", value)
        else:
            monkeypatch.setitem(transformers.activations.ACT2FN, "gelu", value)
        changed = installed(bert)
        assert installed(bert) == changed
        found.add(changed)
    assert len(found) == 3


def test_an_attribute_of_an_installed_function_counts_with_what_it_holds(
    bert: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {installed(bert)}
    for value in (1, 2, [1], [2], {"a": 1}, Scaled(2.0), Scaled(3.0)):
        monkeypatch.setattr(torch.nn.functional.softmax, "mine", value, raising=False)
        changed = installed(bert)
        assert installed(bert) == changed
        found.add(changed)
    assert len(found) == 8
    value = torch.nn.functional.softmax.mine = [1]
    assert installed(bert) in found
    value.append(3)
    assert installed(bert) not in found


def test_what_torch_notes_on_a_function_while_it_captures_does_not_count(bert: torch.nn.Module) -> None:
    before = installed(bert)
    ids = torch.ones(2, 3, dtype=torch.int64)
    torch.export.export(bert, (ids,), strict=False)
    assert installed(bert) == before


def test_a_list_of_a_class_counts_as_it_is_now(bert: torch.nn.Module) -> None:
    names = transformers.BertModel._no_split_modules
    before = installed(bert)
    names.append("Mine")
    try:
        assert installed(bert) != before
    finally:
        names.remove("Mine")
    assert installed(bert) == before
