"""What torch says in its errors beside what happened: advice about its own logs and issues, dumps of graphs.

Left out where a person reads a failure for the first time. Only sentences and blocks that torch itself writes
are known here, word by word (torch 2.13): a message of the user's that looks like advice stays.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..plurals import counted

__all__ = ["left_out", "without_advice"]

#: Lines that stand alone.
_LINES = re.compile(
    "|".join(
        (
            r"consider using data-dependent friendly APIs such as guard_or_false, .*statically_known_true\.",
            r'For more information, run with TORCH_LOGS="\+?\w+"',
            r"For extended logs when we create symbols, also add TORCHDYNAMO_EXTENDED_DEBUG_CREATE_SYMBOL=.*",
            r"If you suspect the guard was triggered from C\+\+, add TORCHDYNAMO_EXTENDED_DEBUG_CPP=1",
            r"For more debugging help, see https://docs\.google\.com/document/d/\S+",
            r"For C\+\+ stack trace, run with TORCHDYNAMO_EXTENDED_DEBUG_CPP=1",
            r"The error above occurred when calling torch\.export\.export\. If you would like to view .*",
            r"Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace .*",
            r"For more details about this graph break, please visit: https://meta-pytorch\.github\.io/\S+",
            r"Use tlparse to see full graph\. \(https://github\.com/pytorch/tlparse\S*\)",
            r"Failed to (?:export the model with torch\.export|decompose the FX graph for ONNX compatibility|"
            r"convert the exported program to an ONNX model)\. This is step \d/\d of exporting the model .*",
            r"- Modify the model code for `torch\.export\.export` to succeed\. Refer to https://.*",
            r"- Debug `torch\.export\.export` and submit a PR to PyTorch\.",
            r"- Create an issue in the PyTorch GitHub repository against the .*",
            r"- Create an error report with `torch\.onnx\.export\(\.\.\., report=True\)`.*",
            r"- If there is a missing ONNX function, implement it and register it to the registry\.",
            r"- If there is an internal error during ONNX conversion, debug the error and submit a PR .*",
            r"## Exception summary",
            "\N{UPWARDS BLACK ARROW}\N{VARIATION SELECTOR-16}?",
            r"\(Refer to the full stack trace above for more information\.\)",
        )
    )
)

#: First line of a block -> its other lines.
_BLOCKS = (
    (
        re.compile(r"To fix the error, insert one of the following checks before this call:"),
        re.compile(r"\s+\d+\. torch\._check\(.*|\(These suggested fixes were derived by replacing .*"),
    ),
    (
        re.compile(r"(?:GraphModule: )?class (?:GraphModule|<lambda>)\(torch\.nn\.Module\):"),
        re.compile(r"\s.*"),
    ),
    (
        re.compile(r"Torch IR graph at exception: graph\(.*"),
        re.compile(r"\s.*|return \(%.*"),
    ),
)

#: What dynamo says of a graph break; nobody else writes the last line.
_EXPLANATION, _HINT, _CONTEXT = "  Explanation: ", "  Hint: ", "  Developer debug context: "


def without_advice(lines: Sequence[str]) -> list[str]:
    """`lines`, single ones in their order, without what torch adds."""
    hints = _hints(lines)
    kept: list[str] = []
    inside: re.Pattern[str] | None = None
    for number, line in enumerate(lines):
        if inside is not None and inside.fullmatch(line):
            continue
        inside = next((rest for first, rest in _BLOCKS if first.fullmatch(line.strip())), None)
        if inside is None and number not in hints and not _LINES.fullmatch(line.strip()):
            kept.append(line)
    return kept


def left_out(count: int) -> list[str]:
    """A line that says where the `count` lines are; none without any."""
    return [f"({counted(count, 'line')} of torch's own advice left out: -vv shows them)"] if count else []


def _hints(lines: Sequence[str]) -> set[int]:
    """Numbers of the lines that are hints of dynamo."""
    found: set[int] = set()
    for begin, line in enumerate(lines):
        if not line.startswith(_EXPLANATION):
            continue
        ends = (end for end in range(begin + 1, len(lines)) if lines[end].startswith(_CONTEXT))
        is_hint = False
        for number in range(begin + 1, next(ends, begin)):
            # The text of a hint goes on four deep.
            is_hint = lines[number].startswith(_HINT) or (is_hint and lines[number].startswith("    "))
            found |= {number} if is_hint else set()
    return found
