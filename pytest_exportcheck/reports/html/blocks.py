"""What is shown of a case, as plain data: a list of blocks, which `blocks.js` builds when the case is opened.

A block is ``[kind, ...]`` and a kind a name of ours, never a word of the report: all texts of a report are
texts of a block, and the script makes text nodes of them.

    ["h3", text]  ["h4", text]  ["headline", text]  ["lines", [text]]  ["diff", text]  ["guilty", text]
    ["command", text, label]  ["hint", text]  ["value", value]  ["cause", name, text, link]
    ["folded", summary, [block]]  ["beside", [block]]  ["figures", [block]]  ["plot", title, svg]
    ["facts", [[label, value]], class]
    ["table", [[title, class]], [row], [number of a row that is marked]]

A value is text, a list of values or ``{"facts": [[label, value]]}``; a cell is text or ``[text, columns]``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...plurals import counted
from ..diagnosis import causes, culprits, error_profile, first_node, guilty_line, left_over, rungs

__all__ = ["Block", "Plots", "case_blocks", "size_text", "value"]

Record = Mapping[str, Any]
Block = list[Any]

_EMPTY: tuple[Any, ...] = (None, "", [], {})
_NOTHING = "\N{EN DASH}"

#: Fields of "More", in their order, and what they are called there.
_MORE = {
    "nodeid": "test",
    "seed": "seed",
    "expected": "expected",
    "confirmed": "confirmed in a fresh process",
    "history": "history",
    "observed_under": "observed under",
    "same_graph_as": "same graph as",
    "conversion": "conversion",
    "example": "exported with",
    "specialised": "became constants",
    "unused_inputs": "unused inputs",
    "uniform_inputs": "inputs of one value",
    "resize": "other sizes",
    "rounding": "agrees by rounding",
    "captured": "captured program",
    "warnings": "warnings",
    "message_in_fresh_process": "message in a fresh process",
    "left_behind": "left behind",
    "cache_notes": "cache",
    "nodes": "nodes",
    "opset": "opset",
    "model_bytes": "model size",
    "nodes_by_provider": "nodes by provider",
    "peak_rss_mb": "peak memory of the process, MiB",
    "peak_rss_by_stage_mb": "peak memory by stage, MiB",
}

#: Fields with a place of their own on the page, and those that say nothing more to a reader.
_ELSEWHERE = frozenset((
    "spec", "exporter", "patch_mode", "device", "dtype", "graph", "verdict", "stage", "message",
    "details", "accept", "reproduce", "durations", "outputs", "shapes", "accepted", "exported_shapes",
    "patches", "rewritten", "diagnosis", "causes", "operators",
    "facts", "confirm_s", "isolated", "why_no_fork", "calls", "graphs", "broken", "golden_exists",
    "golden", "capture", "capture_not_kept", "fx_nodes", "providers", "onnx_inputs",
))  # fmt: skip

_MARKED_KINDS = ("fail", "crash", "timeout")


@dataclass(frozen=True)
class Plots:
    """The plots of one case, as SVG.

    Attributes
    ----------
    time:
        Time by stage.
    others:
        (title, plot).
    """

    time: str | None
    others: Sequence[tuple[str, str]]


def case_blocks(record: Record, shapes: Sequence[Record], plots: Plots | None) -> list[Block]:
    """The blocks of `record` below its title; `plots` is ``None`` where none were drawn."""
    return [
        *_failure(record),
        *_stages(record, plots),
        *_outputs(record),
        *_shapes(shapes),
        *_patches(record),
        *_diagnosis(record),
        *_plots(plots),
        *_more(record),
    ]


def value(item: Any) -> Any:
    """`item` as a value of a block: what is empty goes, numbers and words are text.

    A mapping is a list of pairs: the keys of an object of JavaScript have an order of their own.
    """
    if isinstance(item, Mapping):
        pairs = [[str(key), value(inner)] for key, inner in item.items() if inner not in _EMPTY]
        return {"facts": pairs} if pairs else _NOTHING
    if isinstance(item, list | tuple):
        return [value(inner) for inner in item] or _NOTHING
    if isinstance(item, bool):
        return "yes" if item else "no"
    return _NOTHING if item in _EMPTY else str(item)


def size_text(count: Any) -> str:
    """A number of bytes, in words."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _number(item: Any, digits: str = ".1e") -> str:
    """A number that a report has may be missing, or ``nan`` as text."""
    return format(item, digits) if isinstance(item, int | float) else "" if item is None else str(item)


def _facts(pairs: Iterable[tuple[str, Any]], style: str = "") -> list[Block]:
    told = [[label, value(item)] for label, item in pairs if item not in _EMPTY]
    return [["facts", told, style]] if told else []


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]], marked: Iterable[bool] = ()) -> Block:
    """A title that begins with ``#`` is of numbers, one with ``~`` of prose."""
    styles = {"#": "number", "~": "wide"}
    heads = [[title.lstrip("#~"), styles.get(title[:1], "")] for title in columns]
    return ["table", heads, rows, [at for at, mark in enumerate(marked) if mark]]


def _failure(record: Record) -> list[Block]:
    found: list[Block] = []
    if record.get("message"):
        found.append(["headline", str(record["message"])])
    found += _causes(record)
    if record.get("message") and record.get("details"):
        found.append(["lines", [str(line) for line in record["details"]]])
    if guilty := guilty_line(record):
        found.append(["guilty", guilty])
    for field, label in (("accept", "accept these shapes:"), ("reproduce", "reproduce:")):
        if record.get(field):
            found.append(["command", str(record[field]), label])
    return found


def _stages(record: Record, plots: Plots | None) -> list[Block]:
    durations = record.get("durations") or {}
    if not durations:
        return []
    rows = [
        [stage, _number(spent.get("wall_s"), ".3f"), _number(spent.get("cpu_s"), ".3f")]
        for stage, spent in durations.items()
    ]
    failed = record["verdict"].split()[0] in _MARKED_KINDS
    table = _table(
        ("stage", "#wall s", "#CPU s"), rows, [failed and stage == record.get("stage") for stage in durations]
    )
    drawn: list[Block] = [["plot", "Time by stage", plots.time]] if plots and plots.time else []
    return [["h3", "Stages"], ["beside", [table, *drawn]]]


def _outputs(record: Record) -> list[Block]:
    outputs = record.get("outputs")
    if not outputs:
        return []
    columns = (
        "output",
        "shape",
        "dtype",
        "#max abs",
        "at",
        "#max rel",
        "#outside",
        "#allowed",
        "#would need",
        "~",
    )
    rows = [_output(output) for output in outputs]
    return [
        ["h3", "Outputs against eager"],
        _table(columns, rows, [not output.get("ok") for output in outputs]),
    ]


def _output(output: Record) -> list[Any]:
    shape = output.get("shape")
    if output.get("by"):
        # Another comparison judged it, and there are no numbers.
        judged: list[Any] = [[f"by {output['by']}", 5]]
    else:
        judged = [
            _number(output.get("max_abs")),
            str(output.get("at")),
            _number(output.get("max_rel")),
            _number(output.get("outside"), ".1%"),
            f"{_number(output.get('atol'))} + {_number(output.get('rtol'))} r",
        ]
    told = ("ok" if output.get("ok") else "FAIL", output.get("reason") or "", output.get("note") or "")
    return [
        str(output.get("path")),
        "" if shape is None else "x".join(map(str, shape)),
        str(output.get("dtype")),
        *judged,
        _number(output.get("would_need")),
        " ".join(filter(None, told)),
    ]


def _shapes(shapes: Sequence[Record]) -> list[Block]:
    if not shapes:
        return []
    rows = [
        [row["path"], *(row[key] or _NOTHING for key in ("accepted", "inferred", "exported")),
         "differs" if row["differs"] else row["news"]]
        for row in shapes
    ]  # fmt: skip
    columns = ("input", "golden", "inferred", "exported", "~")
    return [["h3", "Shapes"], _table(columns, rows, [row["differs"] for row in shapes])]


def _patches(record: Record) -> list[Block]:
    found: list[Block] = []
    if record.get("patches"):
        found += [["h3", "Patches"], *_facts(record["patches"].items())]
    if record.get("rewritten"):
        found += [["h3", "Rewritten"], *(["diff", str(diff)] for diff in record["rewritten"].values())]
    return found


def _plots(plots: Plots | None) -> list[Block]:
    if plots is None:
        return [["hint", "No plots: only the first cases have them, failed ones before others."]]
    if not plots.others:
        return []
    return [["h3", "Plots"], ["figures", [["plot", title, plot] for title, plot in plots.others]]]


def _more(record: Record) -> list[Block]:
    told = {label: record.get(field) for field, label in _MORE.items()}
    told["model size"] = size_text(record["model_bytes"]) if record.get("model_bytes") else None
    # Of exporters and tests of a user's, and of later versions.
    told |= {key: item for key, item in record.items() if key not in _MORE and key not in _ELSEWHERE}
    found = [["h3", "More"], *_facts(told.items())]
    operators = record.get("operators")
    if operators:
        often = sorted(operators.items(), key=lambda item: -item[1])
        table = _table(("operator", "#nodes"), [[name, str(count)] for name, count in often])
        found.append(["folded", counted(len(operators), "operator"), [table]])
    return found


# A diagnosis.


def _diagnosis(record: Record) -> list[Block]:
    told = record.get("diagnosis")
    if not isinstance(told, dict):
        return []
    reproduction = told.get("reproduction")
    lines = reproduction if isinstance(reproduction, list) else [reproduction] if reproduction else []
    found: list[Block] = [["h3", "Diagnosis"], *_rungs(record), *_first_node(record), *_profile(record)]
    found += _culprits(record)
    if lines:
        found += [["h4", "Reproduction"], ["diff", "\n".join(map(str, lines))]]
    if told.get("notes"):
        found.append(["value", value(told["notes"])])
    if told.get("seconds") is not None:
        found.append(["hint", f"It took {_number(told['seconds'], '.1f')} s."])
    if more := left_over(record):
        found.append(["folded", "More of the diagnosis", _facts(more.items())])
    return found


def _rungs(record: Record) -> list[Block]:
    steps = rungs(record)
    if not steps:
        return []
    ladder = record["diagnosis"].get("ladder")
    sample = ladder.get("sample") if isinstance(ladder, dict) else None
    rows = [
        [
            *(str(step.get(key) or "") for key in ("name", "status")),
            *(_number(step.get(key)) for key in ("max_abs", "max_rel")),
            *(str(step.get(key) or "") for key in ("worst", "note")),
        ]
        for step in steps
    ]
    marked = [step.get("status") in ("differs", "fails") for step in steps]
    columns = ("step", "status", "#max abs", "#max rel", "worst output", "~")
    title = "Step by step against eager" + (f", on {sample}" if sample else "")
    return [["h4", title], _table(columns, rows, marked)]


_NODE_KINDS = {
    "jump": "jump: this node alone computes something else",
    "drift": "drift: small errors add up, no node is wrong on its own",
}


def _first_node(record: Record) -> list[Block]:
    node = first_node(record)
    if node is None:
        facts = _facts([("node", record["diagnosis"].get("node"))])
    else:
        operator, shape, kernel = node.get("operator"), node.get("shape"), node.get("kernel")
        shown = ", ".join(map(str, shape)) if shape is not None else ""
        compared = node.get("compared")
        facts = _facts(
            [
                ("node", f"%{node.get('name')}" + (f" = {operator}" if operator else "")),
                ("kind", _NODE_KINDS.get(str(node.get("kind")), node.get("kind"))),
                ("in ONNX", node.get("onnx_nodes")),
                ("in the model", node.get("module")),
                ("source", node.get("source")),
                ("value", None if shape is None else f"{node.get('dtype') or ''}[{shown}]"),
                *_how_far(node),
                ("to blame", None if kernel is None else _blamed(kernel)),
                ("compared", f"{compared} of {node.get('nodes')} values" if compared else None),
                ("left out", node.get("note")),
            ]
        )
    return [["h4", "First wrong node"], *facts] if facts else []


def _how_far(node: Record) -> list[tuple[str, Any]]:
    if node.get("reason"):
        return [("differs by", node["reason"])]
    labels = {"max_abs": "max abs", "error": "relative to its size", "own_error": "its own error"}
    return [(label, _number(node.get(key))) for key, label in labels.items()]


def _blamed(kernel: Any) -> str:
    return "the kernel of the runtime" if kernel else "the conversion"


def _profile(record: Record) -> list[Block]:
    profile = error_profile(record)
    if not profile:
        return []
    node = first_node(record)
    rows = [[name, _number(error), _number(own)] for name, error, own in profile]
    marked = [node is not None and node.get("name") == name for name, _, _ in profile]
    return [["folded", "Error along the graph", [_table(("node", "#error", "#its own"), rows, marked)]]]


def _culprits(record: Record) -> list[Block]:
    told = record["diagnosis"]
    pieces = told.get("pieces")
    searched = pieces.get("note") if isinstance(pieces, dict) else None
    found = [block for culprit in culprits(record) for block in _culprit(culprit)]
    if searched:
        found.append(["hint", str(searched)])
    return [["h4", "Smallest modules that fail"], *found] if found else _facts([("at", told.get("line"))])


def _culprit(culprit: Record) -> list[Block]:
    kind, exports = culprit.get("kind"), culprit.get("parent_exports")
    place = culprit.get("site") or culprit.get("path")
    if exports is None:
        parent = None
    elif exports:
        parent = "exports with it replaced by a custom op"
    else:
        parent = f"does not export with it replaced either: {culprit.get('parent_reason') or ''}"
    own = "its own: it fails with its children replaced by custom ops too"
    return _facts(
        [
            (
                "perhaps" if culprit.get("only_alone") else "module",
                f"{place}" + (f" ({kind})" if kind else ""),
            ),
            ("why", culprit.get("reason")),
            ("at", culprit.get("line")),
            ("called with", culprit.get("inputs")),
            ("dynamic shapes", culprit.get("dynamic_shapes")),
            ("whose code", own if culprit.get("own_code") else None),
            (str(culprit.get("parent") or "its parent"), parent),
            ("not tried, alike", culprit.get("alike")),
        ],
        "culprit",
    )


def _causes(record: Record) -> list[Block]:
    return [
        [
            "cause",
            str(cause.get("name")),
            str(cause.get("sentence")) + (f". Remedy: {cause['remedy']}" if cause.get("remedy") else ""),
            str(cause.get("link") or ""),
        ]
        for cause in causes(record)
    ]
