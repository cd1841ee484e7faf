"""Dimensions: text to expression and back."""

from __future__ import annotations

import pytest

from pytest_exportcheck.dims import DimExpr, parse_dim


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("4", "4"),
        ("0", "0"),
        ("batch", "batch"),
        ("past + seq", "past + seq"),
        ("past+seq", "past + seq"),
        ("  past  +  seq ", "past + seq"),
        ("seq - 1", "seq - 1"),
        ("past + seq + 2", "past + seq + 2"),
        ("a - b", "a - b"),
        ("-a + b", "-a + b"),
        ("x_1", "x_1"),
        ("2 + 3", "5"),
    ],
)
def test_text_round_trips(text: str, shown: str) -> None:
    dim = parse_dim(text)
    assert str(dim) == shown
    assert parse_dim(str(dim)) == dim


@pytest.mark.parametrize("text", ["", " ", "a b", "a +", "a *", "2a", "a ++ b", "a.b", "a*b", "(a)", "é!"])
def test_other_text_is_refused_with_the_text_in_the_message(text: str) -> None:
    with pytest.raises(ValueError, match="not a dimension") as caught:
        parse_dim(text)
    assert repr(text) in str(caught.value)


def test_a_size_is_an_int_and_a_name_an_expression() -> None:
    assert parse_dim("7") == 7
    assert parse_dim("batch") == DimExpr.symbol("batch")
    assert parse_dim("seq") != parse_dim("past")


def test_evaluation() -> None:
    dim = parse_dim("past + seq - 1")
    assert isinstance(dim, DimExpr)
    assert dim.names == ("past", "seq")
    assert dim.evaluate({"past": 5, "seq": 3}) == 7
    with pytest.raises(KeyError, match="seq"):
        dim.evaluate({"past": 5})
