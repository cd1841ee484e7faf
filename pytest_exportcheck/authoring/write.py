"""The text of a spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from .known import Call

__all__ = ["spec_text"]


class _Block(dict[str, Any]):
    """A mapping of which each value has a line of its own."""


class _Dumper(yaml.SafeDumper):
    """Without anchors: two calls with equal values are written out twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    _Block,
    lambda dumper, data: dumper.represent_mapping("tag:yaml.org,2002:map", data.items(), flow_style=False),
)


def spec_text(
    model: Mapping[str, Any],
    calls: Sequence[Call],
    graphs: str | None = None,
    compare: Mapping[str, Any] | None = None,
    description: str = "",
    comments: Sequence[str] = (),
    batch_dims: bool | Sequence[str] = False,
) -> str:
    """A spec for `model` with `calls`.

    Parameters
    ----------
    model:
        The mapping ``model``.
    graphs:
        What ``observe`` says of its groups, as one line of YAML in flow style.
    compare:
        The mapping ``compare``.
    comments:
        Lines for the beginning of the file.
    batch_dims:
        Axis 0 of every input is a batch, or of those named.
    """
    observe: dict[str, Any] = {"calls": [{call.kind: _Block(_plain(call.arguments))} for call in calls]}
    if batch_dims:
        observe["batch_dims"] = batch_dims if batch_dims is True else [*batch_dims]
    if graphs:
        observe |= yaml.safe_load(graphs)
    data: dict[str, Any] = {"exportcheck": 1}
    if description:
        data["description"] = description
    data |= {
        "model": _Block(_plain(model)),
        "observe": _Block(observe),
        "matrix": {"exporters": ["torch-export", "onnx-dynamo"]},
    }
    if compare:
        data["compare"] = _Block(_plain(compare))
    text = yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, width=100_000, default_flow_style=None, allow_unicode=True
    )
    return "".join(f"# {line}\n" for line in comments) + text


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
