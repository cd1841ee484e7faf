"""The reference of the spec format, from its JSON Schema: ``python -m pytest_exportcheck.spec.reference``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from .schema import schema

__all__ = ["reference_text"]

_HEAD = """# Reference of the spec format

Every key of a spec file, its type, its default and its meaning. Generated from the JSON Schema that also
serves editors ([spec.schema.json](spec.schema.json)); do not edit:
`python -m pytest_exportcheck.spec.reference > docs/spec.reference.md`. [specs.md](specs.md) explains the
format with examples. A key that is not listed is an error, except below keys whose type is
"mapping of anything".
"""

#: Heading and place in the file of each section of the schema, in the order of the page.
_PLACES = {
    "Model": "`model`",
    "Observe": "`observe`",
    "TargetRules": "`observe.target.NAME`",
    "Matrix": "`matrix`",
    "Tolerance": "`tolerance`",
    "Bounds": "`tolerance.outputs.PATH`, `tolerance.devices.NAME`, `tolerance.dtypes.NAME`",
    "CompareRule": "`compare.PATH`",
    "Expectation": "`expect[]`",
    "When": "`expect[].when`",
}

_WORDS = {
    "string": "text",
    "integer": "integer",
    "number": "number",
    "boolean": "true or false",
    "null": "null",
}


def reference_text() -> str:
    """The content of ``docs/spec.reference.md``.

    Raises
    ------
    ValueError
        The schema has a section or a kind of type that this page has no words for.
    """
    whole = schema()
    sections = whole["$defs"]
    if unknown := sections.keys() ^ _PLACES.keys():
        raise ValueError(f"sections of the schema and of the reference differ: {', '.join(sorted(unknown))}")
    lines = [_HEAD, "## The file", "", *_table(whole)]
    for name, place in _PLACES.items():
        section = sections[name]
        lines += ["", f"## {place}", "", _sentence(section["description"])]
        lines += ["", *_table(section)]
    lines += ["", "## A call", "", *_calls(sections["Observe"]["properties"]["calls"])]
    return "\n".join(lines) + "\n"


def _table(section: Mapping[str, Any]) -> Iterator[str]:
    required = section.get("required", ())
    yield "| key | type | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for name, field in section["properties"].items():
        kind = "a list of [calls](#a-call), or a callable" if name == "calls" else _type(field)
        default = "required" if name in required else _default(field)
        yield f"| `{name}` | {_cell(kind)} | {_cell(default)} | {_cell(_sentence(field['description']))} |"


def _calls(field: Mapping[str, Any]) -> Iterator[str]:
    """The branches of one call; what they have in common after them."""
    several, callable_ = field["anyOf"]
    yield "One of these, each with an optional `dims`:"
    yield ""
    for branch in several["items"]["anyOf"]:
        (kind,) = branch["required"]
        yield f"* `{kind}`: {_sentence(branch['properties'][kind]['description'])}"
    dims = several["items"]["anyOf"][0]["properties"]["dims"]
    yield f"* `dims`: {_sentence(dims['description'])}"
    yield ""
    yield f"Instead of the list: {_sentence(callable_['description'])}"
    yield ""
    by_name = several["items"]["anyOf"][0]["properties"]["forward"]["anyOf"][0]
    argument = by_name["additionalProperties"]
    yield f"An argument is: {_sentence(argument['description'])}"
    yield ""
    for each in argument["anyOf"]:
        if "description" in each:
            yield f"* {_sentence(each['description'])}"


def _type(field: Mapping[str, Any]) -> str:
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{_anchor(_PLACES[name])})"
    for union in ("anyOf", "oneOf"):
        if union in field:
            branches = [each for each in field[union] if each.get("type") != "null"]
            return " or ".join(dict.fromkeys(_type(each) for each in branches))
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if field["type"] == "array":
        items = _type(field["items"])
        return f"list of ({items})" if " or " in items else f"list of {items}"
    if field["type"] == "object":
        values = field.get("additionalProperties", True)
        if values is True or values == {"type": "object", "additionalProperties": True}:
            return "mapping of anything"
        keys = _type({"enum": field["propertyNames"]["enum"]}) if "propertyNames" in field else "names"
        return f"mapping of {keys} to {_type(values)}"
    if str(field.get("description", "")).startswith("A tensor"):
        return "a tensor"
    least = field.get("minimum")
    return _WORDS[field["type"]] + (f" >= {least}" if least is not None else "")


def _default(field: Mapping[str, Any]) -> str:
    value = field.get("default")
    if value is None or value in ({}, [], ""):
        return ""
    return f"`{json.dumps(value)}`" if not isinstance(value, dict) else "see there"


def _anchor(heading: str) -> str:
    """As GitHub makes it: lower case, blanks to hyphens, everything else but word characters dropped."""
    kept = (char for char in heading.lower() if char.isalnum() or char in " -_")
    return "".join(kept).replace(" ", "-")


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text if text.endswith((".", "...")) else text + "."


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    print(reference_text(), end="")
