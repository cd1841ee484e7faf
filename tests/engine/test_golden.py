"""Accepted dynamic shapes as text, and back."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from pytest_exportcheck.checks.golden import (
    GoldenError,
    GoldenGraph,
    compare_goldens,
    load_dynamic_shapes,
    parse_golden,
    render_golden,
)
from pytest_exportcheck.observe import dynamic_shapes_for
from pytest_exportcheck.pytrees import clone_tree, register_flattening_functions

from .helpers import infer

DYNAMIC = torch.export.Dim.DYNAMIC
Pair = namedtuple("Pair", "left right")


def render(graph: GoldenGraph) -> str:
    return render_golden({None: graph}, "specs/__shapes__/a.yaml", "specs/a.yaml")


def body(text: str) -> list[str]:
    return [line for line in text.splitlines() if not line.startswith("#")]


def cache_paths(root: str, layers: int, text: str = "float32[batch, 2, past, 16]") -> dict[str, str]:
    return {f"{root}.layers.{k}.{name}": text for k in range(layers) for name in ("keys", "values")}


def test_the_text_is_one_line_per_tensor_with_equal_layers_folded() -> None:
    graph = GoldenGraph(
        {"input_ids": "int64[batch, seq]", **cache_paths("cache", 3)}, {"cache": "DynamicCache"}
    )
    text = render(graph)
    assert text.startswith("# specs/__shapes__/a.yaml -- accepted dynamic shapes of specs/a.yaml.\n")
    assert body(text) == [
        "inputs:",
        "  input_ids: int64[batch, seq]",
        "  cache:",
        "    layers 0-2:",
        "      key: float32[batch, 2, past, 16]",
        "      value: float32[batch, 2, past, 16]",
        "containers:",
        "  cache: DynamicCache",
    ]


def test_layers_that_differ_are_not_folded() -> None:
    inputs = cache_paths("cache", 4)
    inputs["cache.layers.2.keys"] = "float32[batch, 1, past, 16]"
    text = render(GoldenGraph(inputs))
    assert [line.strip() for line in body(text) if "layer" in line] == ["layers 0-1:", "layer 2:", "layer 3:"]
    assert parse_golden(text)[None].inputs == inputs


NAMES = [
    "yes", "no", "on", "null", "true", "n", "y", "1", "1.5", "-", "#", "a b", " a", "a ", "a: b",
    "é", "[x]", "", "key", "a/b", "'", '"', "\\", "layers 0", "none", "~", "0x1f", "1e3",
    "2024-01-01", "a#b", "=", "<<", "a\tb", "\U0001f600", "\x7f", "\x85", "\ufeff",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_any_name_survives(name: str) -> None:
    graph = GoldenGraph({f"x.{name}": "int64[2]", "z": "str = 'a: #b'"}, {f"x.{name}q": "tuple"})
    text = render(graph)
    assert parse_golden(text) == {None: graph}
    assert isinstance(yaml.safe_load(text), dict)


@pytest.mark.parametrize(
    "value",
    [
        "none",
        "int = 3",
        "bool = True",
        "str = 'yes'",
        "str = 'a\\nb'",
        "float = nan",
        "float32[]",
        "int64[0, past - 1]",
    ],
)
def test_any_value_survives(value: str) -> None:
    graph = GoldenGraph({"x": value, "y": value})
    assert parse_golden(render(graph))[None] == graph


def test_a_field_of_a_layer_that_is_called_key_stays_one() -> None:
    inputs = {f"x.layers.{k}.{name}": "int64[2]" for k in range(2) for name in ("key", "value", "keys")}
    graph = GoldenGraph({**inputs, **cache_paths("cache", 2)})
    text = render(graph)
    assert "layers 0-1:" in text, "the other cache is folded"
    assert parse_golden(text)[None] == graph


@pytest.mark.parametrize("name", ["no", "1", "a: b", "prefill"])
def test_any_name_of_a_graph_survives(name: str) -> None:
    graphs: dict[str | None, GoldenGraph] = {name: GoldenGraph({"x": "int64[2]"})}
    assert parse_golden(render_golden(graphs, "a.yaml", "b.yaml")) == graphs


def test_several_graphs() -> None:
    graphs: dict[str | None, GoldenGraph] = {
        "prefill": GoldenGraph({"x": "int64[batch]"}),
        "decode": GoldenGraph({"x": "int64[batch]", **cache_paths("cache", 2)}, {"cache": "DynamicCache"}),
    }
    text = render_golden(graphs, "p", "s")
    assert parse_golden(text) == graphs


def test_the_diff_is_empty_for_headers_and_shows_lines_otherwise() -> None:
    first = render(GoldenGraph({"x": "int64[batch, seq]", "y": "int64[2]"}))
    other = first.replace("specs/a.yaml", "elsewhere.yaml")
    assert compare_goldens(first, other) == []
    diff = compare_goldens(first, first.replace("[batch, seq]", "[batch, 30]"))
    assert "-   x: int64[batch, seq]" in diff
    assert "+   x: int64[batch, 30]" in diff
    assert not [line for line in diff if line.startswith("?")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "g.yaml:1:5: not YAML"),
        ("", "g.yaml: expected the keys"),
        ("- a", "g.yaml: expected the keys"),
        ("other: {}", "g.yaml: expected the keys"),
        ("inputs: 3", "graph None has no `inputs`"),
        ("graphs: {a: {}}", "graph 'a' has no `inputs`"),
        ("graphs: [1]", "g.yaml"),
        ("graphs:", "g.yaml"),
        ("inputs: {x: 'int64[a'", "not YAML"),
        ("inputs:\n  x: int64[2]\n  y: float32[batch, 8\n", "g.yaml:3: cannot read 'float32[batch, 8' of y"),
        ("inputs: {cache: {layers 0-1: {key: 3}}}", "g.yaml:1: cannot read '3' of cache.layers.0.keys"),
        ("inputs: {x: nothing}", "g.yaml:1: cannot read 'nothing' of x"),
    ],
)
def test_what_is_no_golden_is_one_error_with_the_file(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(GoldenError) as caught:
        parse_golden(text, "g.yaml")
    assert message in str(caught.value)
    (tmp_path / "g.yaml").write_text(text)
    with pytest.raises(GoldenError):
        load_dynamic_shapes(tmp_path / "g.yaml")


def test_loading_errors(tmp_path: Path) -> None:
    path = tmp_path / "g.yaml"
    with pytest.raises(GoldenError, match="cannot be read"):
        load_dynamic_shapes(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GoldenError, match="cannot be read"):
        load_dynamic_shapes(path)
    path.write_text("inputs: {x: 'int64[a*b]'}")
    with pytest.raises(GoldenError, match="not a dimension"):
        load_dynamic_shapes(path)
    path.write_text("graphs: {prefill: {inputs: {x: 'int64[2]'}}}")
    with pytest.raises(GoldenError, match="no graph None; it has prefill"):
        load_dynamic_shapes(path)
    assert load_dynamic_shapes(path, "prefill") == {"x": {}}
    path.write_text("inputs: {x: 'int64[2]'}")
    with pytest.raises(GoldenError, match="no graph 'decode', it has one graph"):
        load_dynamic_shapes(path, "decode")


# a golden is what torch.export.export takes


def f(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def cache(n: int, length: int) -> DynamicCache:
    made = DynamicCache()
    for layer in range(2):
        made.update(f(n, 1, length, 4), f(n, 1, length, 4), layer)
    return made


NESTED: dict[str, Any] = {
    "list": lambda n: [f(n, 2), f(2, n)],
    "list-of-one": lambda n: [f(n, 2)],
    "tuple": lambda n: (f(n, 2), [f(3), (f(n),)]),
    "dict": lambda n: {"b": f(n), "a": f(2)},
    "dict-int-keys": lambda n: {0: f(n), 1: f(2)},
    "dict-digit-keys": lambda n: {7: f(n)},
    "a-number-and-its-text": lambda n: {1: f(n), "1": f(2), "": f(n)},
    "text-of-a-number": lambda n: {"0": f(n), "1": f(2)},
    "keys-with-backslashes": lambda n: {"a\\": {"b": f(n)}, "a\\.b": f(2), "a": {"b": f(n)}},
    "keys-like-folded-layers": lambda n: {"layers": [{"k": f(n)}, {"k": f(n)}], "layers 0-1": {"k": f(2)}},
    "ordered-with-numbers": lambda n: OrderedDict([(3, f(n)), ("3", f(2))]),
    "dotted-keys": lambda n: {"a.b": f(n), "a": {"c": f(2)}},
    "keys-of-yaml": lambda n: {"yes": f(n), "no": f(2), "1.5": f(3)},
    "ordered": lambda n: OrderedDict(z=f(n), a=f(2)),
    "namedtuple": lambda n: Pair(f(n), [f(2)]),
    "none-inside": lambda n: [f(n), None, f(2)],
    "number-inside": lambda n: [f(n), 3, "s", f(2)],
    "empty-inside": lambda n: {"x": f(n), "e": [], "d": {}, "t": ()},
    "model-output": lambda n: BaseModelOutput(last_hidden_state=f(n, 2), hidden_states=(f(n), f(2))),
    "cache": lambda n: cache(n, n + 1),
    "encoder-decoder": lambda n: EncoderDecoderCache(cache(n, n + 1), cache(n, 7)),
    "cache-in-dict": lambda n: {"c": cache(n, n + 1), "x": f(n)},
}


class Sum(torch.nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(x) if isinstance(leaf, torch.Tensor)]
        return sum((leaf.sum() for leaf in leaves), y.sum())


@pytest.mark.parametrize("kind", NESTED)
def test_load_dynamic_shapes_gives_what_torch_export_takes(kind: str, tmp_path: Path) -> None:
    shapes, calls = infer(
        lambda x, y: torch.zeros(1), *(((), {"x": NESTED[kind](n), "y": f(n + 1)}) for n in (3, 5))
    )
    graph = GoldenGraph({path: str(leaf) for path, leaf in shapes.leaves.items()}, shapes.containers)
    path = tmp_path / "golden.yaml"
    path.write_text(render(graph))
    assert parse_golden(path.read_text())[None] == graph
    loaded = load_dynamic_shapes(path)
    with register_flattening_functions():
        direct = {name: dynamic_shapes_for(value, shapes, name) for name, value in calls[0].arguments.items()}
        program = torch.export.export(
            Sum(), (), kwargs=clone_tree(calls[0].arguments), dynamic_shapes=loaded, strict=False
        )
        assert float(program.module()(**clone_tree(calls[1].arguments))) > 0
        torch.export.export(
            Sum(), (), kwargs=clone_tree(calls[0].arguments), dynamic_shapes=direct, strict=False
        )
    assert str(list(loaded)) == "['x', 'y']"
    assert loaded["y"] == {0: DYNAMIC}


def test_constants_are_no_inputs_of_the_program(tmp_path: Path) -> None:
    path = tmp_path / "golden.yaml"
    path.write_text("inputs: {x: 'float32[batch, 4]', n: int = 3, m: {a: bool = True}, s: 'float32[]'}")
    assert load_dynamic_shapes(path) == {"x": {0: DYNAMIC}, "s": {}}
