"""Failures that are known: how to recognise one, what it means, what to do, where it is discussed.

A table. A failure that matches no row is shown as it is. To add one: the pattern of the message, or a test of
what was found; a sentence that says what happened in the model; what to do about it; a link that was read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

__all__ = ["CAUSES", "Cause", "Evidence", "causes_of_text", "known_causes"]


@dataclass(frozen=True)
class Evidence:
    """What is known of a failure.

    Attributes
    ----------
    text:
        Messages and details, as they are.
    stage:
        Of the pipeline, where it failed.
    dtype:
        Of the case.
    guilty:
        The guilty step of the ladder, empty if there is none.
    differs:
        Whether that step gave numbers that differ, rather than raising.
    other_sizes:
        Whether it fails only at sizes that no observed call had.
    masked_rows:
        Whether a mask among the inputs has rows without a single position; ``None``: that is not known.
    operators:
        Operators of torch in the captured program, empty if there is none.
    fresh:
        It fails in a process in which nothing ran before, too.
    example_too:
        The captured program differs on the inputs that it was made of, too.
    """

    text: str
    stage: str = ""
    dtype: str = ""
    guilty: str = ""
    differs: bool = False
    other_sizes: bool = False
    masked_rows: bool | None = None
    operators: Sequence[str] = ()
    fresh: bool = False
    example_too: bool = False


@dataclass(frozen=True)
class Cause:
    """One row of the table.

    Attributes
    ----------
    name:
        Short, unique.
    sentence:
        What happened, for somebody who has not seen the message before.
    remedy:
        What to do.
    link:
        Where to read on; empty if there is no page that was read.
    pattern:
        Regular expression, searched in the text; case matters.
    test:
        What must hold beside it.
    """

    name: str
    sentence: str
    remedy: str
    link: str = ""
    pattern: str = ""
    test: Callable[[Evidence], bool] = field(default=lambda evidence: True)

    def matches(self, evidence: Evidence) -> bool:
        """Whether the row describes the failure."""
        found = not self.pattern or re.search(self.pattern, evidence.text, re.DOTALL) is not None
        return found and self.test(evidence)

    def lines(self) -> list[str]:
        """As shown to a person."""
        shown = [f"known cause ({self.name}): {self.sentence}", f"  remedy: {self.remedy}"]
        return [*shown, f"  see {self.link}"] if self.link else shown

    def to_record(self) -> dict[str, str]:
        """Plain builtins."""
        return {"name": self.name, "sentence": self.sentence, "remedy": self.remedy, "link": self.link}


def _masked_nan(evidence: Evidence) -> bool:
    """NaN on one side where the mask is 0, and nowhere else: all that a message can show of masked rows."""
    return "attention_mask is 0" in evidence.text and re.search(_NAN, evidence.text) is not None


def _infinite(evidence: Evidence) -> bool:
    """Infinity on one side; NaN may have other reasons."""
    return re.search(r"(?<![\w])-?inf instead of|instead of -?inf\b", evidence.text) is not None


#: A line that says where sizes became constants, of a loop or a comprehension.
_FROZEN = r"(?:became a constant|the program fixes it to \d+|and otherwise here): "
_FROZEN_LOOP = re.compile(_FROZEN + r"[^\n]*\.py:\d+: [^\n]*\b(?:for\b[^\n]*\bin\b|while\b)")


def _loops(evidence: Evidence) -> bool:
    """Whether sizes became constants in loops and nowhere else."""
    lines = [line for line in evidence.text.splitlines() if re.search(_FROZEN, line)]
    return bool(lines) and all(map(_FROZEN_LOOP.search, lines))


#: Code that a message shows with its place.
_CODE = re.compile(r"\.py:\d+(?: in [\w.<>]+)?: ([^\n]*)")

#: A tensor is made of a size, to be read again: ``int(torch.tensor(x.shape[1]))``.
_OF_SIZE = re.compile(
    r"\b(?:torch\.(?:tensor|as_tensor|scalar_tensor|(?:Long|Int|Float)Tensor)|new_tensor)\("
    r"[^\n]*(?:\.shape\b|\.size\(|\blen\()"
)
_READ = re.compile(r"\b(?:int|float|range)\(|\.(?:item|tolist)\(\)")


def _through_tensor(evidence: Evidence) -> bool:
    """Whether what is refused or became constant are sizes that came back out of a tensor.

    Not in a branch: with the size itself it would still decide for one side.
    """
    lines = [line for line in evidence.text.splitlines() if re.search(_FROZEN, line)]
    if not lines and not re.search(rf"{_DATA_DEPENDENT}|{_KEPT}", evidence.text):
        return False
    if lines:
        return all(map(_comes_back, lines))
    return any(map(_comes_back, evidence.text.splitlines()))


def _comes_back(line: str) -> bool:
    found = _CODE.search(line)
    if found is None or re.match(r"(?:if|elif|while|assert)\b", found[1]):
        return False
    return _OF_SIZE.search(found[1]) is not None and _READ.search(found[1]) is not None


#: What an ONNX model of TorchScript is told to have.
_KEPT = r"the trace keeps what the example decided: "

_DATA_DEPENDENT = (
    r"(?:Could not guard on data-dependent|GuardOnDataDependentSymNode|"
    r"Could not extract specialized integer from data-dependent|[Dd]ata-dependent branching|"
    r"Data dependent variable|DataDependentOutputException|aten\._local_scalar_dense)"
)

_NAN = r"\bnan instead of|instead of nan\b"

_COMPLEX_BY_TORCHSCRIPT = (
    r"Exporting the operator 'aten::(?:complex|polar|view_as_complex|view_as_real|real|imag|fft_\w+)' to ONNX"
)

CAUSES: tuple[Cause, ...] = (
    Cause(
        "0/1 specialisation",
        "a dynamic axis had size 0 or 1 in the example, and torch.export makes constants of these sizes",
        "let the example have sizes of at least 2 on every dynamic axis (observe such a call, or name one as "
        "observe.example); onnx-dynamo captures without this rule",
        "https://docs.pytorch.org/docs/main/compile/dynamic_shapes_zero_one_specialization.html",
        pattern=r"0/1 speciali[sz]ed",
    ),
    Cause(
        "loop over a size",
        "a Python loop runs over the size of a dynamic axis: the export unrolls it, and the program has as "
        "many rounds as the example",
        "compute all rounds at once with tensors (a sum, cumsum, unfold, a matrix product); or try the patch "
        "mode rewrite (patch_modes: [none, rewrite]), which makes a scan of a `for` over an axis where it "
        "can prove that this changes nothing; or make the axis static if it really is",
        pattern=_FROZEN_LOOP.pattern,
    ),
    Cause(
        "fixed axis",
        "the model's code computes with the size of a dynamic axis as with a plain number, so that the graph "
        "is right for this size only",
        "look for int(), a comparison with a constant or a buffer made for one size (--diagnose names the "
        "line); or make the axis static if it really is",
        pattern=r"(?:marked .{0,80} as dynamic but your code specialized it|Constraints violated|"
        r"specialized it to be a constant|dynamic ax[ei]s became constant)",
        test=lambda e: not _loops(e) and not _through_tensor(e),
    ),
    Cause(
        "size through a tensor",
        "a size is put into a tensor and read from it again (int(torch.tensor(x.shape[1]))): what is in a "
        "tensor is data that an export does not know, or a constant",
        "use the size itself (n = x.shape[1]; // and % keep it a size), and make a tensor of it only where "
        "one is needed",
        test=_through_tensor,
    ),
    Cause(
        "guard on sizes",
        "the model compares sizes in Python, and the captured program holds for the side of its example only",
        "compute both sides with tensors (torch.where, a mask), use a patch mode that replaces the "
        "comparison, give a graph to each side (observe.graphs), or list the sizes that there are (resize: "
        "{symbol: [sizes]}); an ONNX model has no guards, and is right where both sides are the same",
        pattern=r"Guard failed: ",
        test=lambda e: not any(name.startswith(("aten.gru", "aten.lstm")) for name in e.operators),
    ),
    Cause(
        "data-dependent branch",
        "Python decides by the values of a tensor (if, while, assert, int(), .item()), which a trace does "
        "not know",
        "torch.where for a choice of values, torch.cond for a choice of code, torch._check for an assertion: "
        "the patch mode rewrite writes them where it can (patch_modes: [none, rewrite]); or keep the branch "
        "out of the exported method; of a tensor that holds a size use the size itself (x.shape[1])",
        "https://docs.pytorch.org/docs/main/compile/dynamic_shapes_troubleshooting_guardon_errors.html",
        pattern=_DATA_DEPENDENT,
        test=lambda e: not _through_tensor(e),
    ),
    Cause(
        "assertion about a value",
        "the captured program checks a demand when it runs (of torch._check, or what torch concluded from "
        "operators), and these inputs break it although eager takes them",
        "weaken the torch._check, or write what follows so that it holds for such values too; an ONNX model "
        "has no such check",
        pattern=r"Runtime assertion failed for expression",
    ),
    Cause(
        "missing ONNX operator",
        "no function for this operator of torch exists in the exporter's ONNX library, nor a decomposition "
        "into others that have one",
        "give a function of your own in custom_translation_table (exporter_options), or write the operation "
        "with other operators",
        "https://docs.pytorch.org/tutorials/_sources/beginner/onnx/onnx_registry_tutorial.rst.txt",
        pattern=r"No ONNX function found for|Exporting the operator '[\w:]+' to ONNX opset version \d+ is",
        test=lambda e: re.search(_COMPLEX_BY_TORCHSCRIPT, e.text) is None,
    ),
    Cause(
        "complex numbers",
        "the older exporter of ONNX (onnx-torchscript) knows no complex tensors",
        "use onnx-dynamo, and return torch.view_as_real(y) instead of a complex y; or compute with the parts",
        pattern=_COMPLEX_BY_TORCHSCRIPT,
    ),
    Cause(
        "complex output",
        "ONNX has no complex outputs: the exporter gives the real and the imaginary part on one more axis, "
        "the last one",
        "return torch.view_as_real(y) instead of y from the exported method (or from a wrapper of it, in the "
        "factory of the spec); whoever uses the ONNX model gets these parts in any case",
        pattern=r"complex(?:64|128)\s[^\n]*FAIL shape "
        r"(?:(\d+(?:x\d+)*)x2 instead of \1|2 instead of scalar)(?![\dx])",
    ),
    Cause(
        "complex input",
        "ONNX Runtime takes no complex tensors",
        "let the exported method take the parts, torch.view_as_real(x), and begin with torch.view_as_complex",
        pattern=r"ONNX Runtime takes no torch\.complex",
    ),
    Cause(
        "no kernel in ONNX Runtime",
        "the graph is valid, and the execution provider has no kernel for an operator with this dtype",
        "cast around the operator, choose another opset_version, or another execution provider",
        pattern=r"(?:NOT_IMPLEMENTED|Could not find an implementation for)",
    ),
    Cause(
        "scan of no rounds",
        "a loop over an axis is a Scan in the graph, and neither torch nor ONNX Runtime runs one over no "
        "elements, where the loop of eager has no round",
        "let the loop have a round (`range(1, n)` has none where n is 1): give it a first row that changes "
        "nothing; where nobody gives such sizes, list those that there are (resize: {symbol: [sizes]} of the "
        "spec)",
        pattern=r"Scan node\..{0,400}Invalid dim0_offset of 0\. Dimension 0 is 0",
    ),
    Cause(
        "**kwargs with dynamic shapes",
        "the exported method takes **kwargs, and torch.export finds no way to give their dynamic shapes",
        "export a method with named arguments (pytest-exportcheck does that by itself where it calls "
        "torch.export), or pass these arguments as constants",
        "https://github.com/pytorch/pytorch/issues/150022",
        pattern=r"Must provide a tree_name when there might be a mismatch",
    ),
    Cause(
        "unregistered class",
        "an argument or a result is of a class that torch.export cannot take apart into tensors",
        "register it with register_class_flattening (a dataclass: torch.export.register_dataclass), or pass "
        "its tensors one by one",
        "https://github.com/pytorch/pytorch/pull/106160",
        pattern=r"(?:Unsupported input type|Unsupported output type|not a pytree node|"
        r"Unsupported pytree|in output, which is not a known type|torch\.export takes no such input|"
        r"found unsupported (?:type|input)|"
        r"Expected input .{0,80} to be (?:a|of) Tensor|register it with register_)",
    ),
    Cause(
        "recurrent layer after another export",
        "an export earlier in the process left a kernel of a GRU or LSTM behind that fixes the number of "
        "steps; torch 2.13 keeps the first one an operator dispatched to",
        "run the case in a process of its own; if it passes there, this is the cause",
        "https://github.com/pytorch/pytorch/issues/191855",
        pattern=r"(?:invalid expand shape|became constants|speciali[sz]ed|Guard failed)",
        test=lambda e: (
            not e.fresh
            and (
                any(name.startswith(("aten.gru", "aten.lstm")) for name in e.operators)
                or re.search(r"\b(?:GRU|LSTM)\b", e.text) is not None
            )
        ),
    ),
    Cause(
        "fully masked attention rows",
        "a row of the attention mask allows no position at all (padding): torch gives zeros there, a plain "
        "softmax NaN or an average",
        "compare real positions only (compare: {output: {where: attention_mask}}), or let every row attend "
        "somewhere; in ONNX the patch mode torch gives zeros too (patch_modes: [none, torch])",
        "https://github.com/pytorch/pytorch/issues/103963",
        # A difference of a padded model alone proves nothing: it must be NaN, padding, or attention itself.
        pattern=r"(?:nan instead of|instead of nan|only where attention_mask is 0|"
        r"first wrong node %\w+ = aten\.\w*(?:softmax|scaled_dot_product))",
        test=lambda e: e.differs and (_masked_nan(e) if e.masked_rows is None else e.masked_rows),
    ),
    Cause(
        "padded positions",
        "only what is computed at padded positions differs: nothing there need have a right value, and "
        "rows of attention that may see nothing are zeros in torch and an average in a plain softmax",
        "compare real positions only (compare: {output: {where: attention_mask}}); of rows that see nothing "
        "the patch mode torch makes zeros in ONNX too (patch_modes: [none, torch])",
        pattern=r"they differ only where attention_mask is 0",
        test=lambda e: not e.masked_rows and not _masked_nan(e),
    ),
    Cause(
        "mask not read",
        "the program does not read the mask, or reads it otherwise than eager does: it is wrong in the "
        "padded calls and right without padding",
        "look for code that asks whether a mask is all ones, or whether the model is exported, and leaves it "
        "out then (--diagnose names the first wrong node and the module); for masks of transformers try the "
        "patch mode transformers, for rows that mask everything the mode torch "
        "(patch_modes: [none, transformers, torch])",
        pattern=r"the calls with zeros in [^\n]* differ \(\d+ of \d+\), those with ones only agree|"
        r"zeros in [^\n]* and differs?; (?:call 1|it) agrees with ones there",
        # NaN is of rows without a position: the row above.
        test=lambda e: re.search(_NAN, e.text) is None,
    ),
    Cause(
        "inexact DFT",
        "ONNX Runtime's CPU kernel of DFT sums one term after the other where the size is no power of two, "
        "with angles that are rounded in the dtype of the input: its error grows with the size (in float32 "
        "1e-4 of the largest value at 511), and torch's does not",
        "pad the axis to a power of two where the model allows that, or transform in float64, or "
        "by a product with the matrix of the transform; where that error is good enough, say so "
        "(tolerance: {outputs})",
        "https://github.com/microsoft/onnxruntime/blob/main/onnxruntime/core/providers/cpu/signal/dft.cc",
        pattern=r"a kernel of onnxruntime: .*first wrong node %\w+ = aten\._fft_",
        test=lambda e: e.differs and e.guilty == "kernel",
    ),
    Cause(
        "float16 overflow",
        "a value leaves the range of float16 (65504) in one of the two and not in the other: the order of "
        "operations differs, or one computes in float32 inside",
        "clamp before the operation that overflows, or keep that layer in float32; bfloat16 has the range of "
        "float32",
        "https://github.com/huggingface/transformers/issues/9295",
        pattern=r"(?:-?inf|nan) instead of|instead of (?:-?inf|nan)",
        test=lambda e: (
            e.dtype == "float16" and (e.masked_rows is False or (e.masked_rows is None and _infinite(e)))
        ),
    ),
    Cause(
        "baked scalar or threshold",
        "a Python number that the model computes from its inputs (a size, .item(), a comparison) became a "
        "constant in the captured program: it is right for the example and wrong for other inputs",
        "compute it with tensors; branch with torch.where or torch.cond; or give a graph to each side "
        "(observe.graphs)",
        test=lambda e: e.guilty == "capture" and e.differs and not e.masked_rows and not e.example_too,
    ),
    Cause(
        "other code while exporting",
        "the captured program is wrong for the very inputs that it was made of: the model runs other code "
        "while it is exported, or torch does",
        "look in the culprit for torch.compiler.is_compiling, is_exporting, torch.jit.is_tracing and the "
        "like, for a state that a call leaves behind, and for writes into tensors that share memory",
        test=lambda e: e.guilty == "capture" and e.differs and not e.masked_rows and e.example_too,
    ),
    Cause(
        "patch changes the model",
        "the patch mode replaces code of the model by code that computes something else",
        "leave the patch out: it may be older than the model's code",
        test=lambda e: e.guilty == "patches" and e.differs,
    ),
)


def causes_of_text(text: str, stage: str, dtype: str, fresh: bool) -> list[Cause]:
    """What the message of a failure alone shows; rows that need more than a message are left out.

    Parameters
    ----------
    fresh:
        It was confirmed in a process in which nothing ran before.
    """
    return known_causes(Evidence(text, stage, dtype, differs=stage in ("compare", "resize"), fresh=fresh))


def known_causes(evidence: Evidence) -> list[Cause]:
    """The rows that describe a failure, in the order of the table; empty if it is unknown."""
    return [cause for cause in CAUSES if cause.matches(evidence)]
