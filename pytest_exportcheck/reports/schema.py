"""The JSON Schema of the report: ``python -m pytest_exportcheck.reports.schema > docs/record.schema.json``.

The models say what a reader may rely on. Nothing is validated while a report is written; the tests hold real
records against them. A field that is added keeps `SCHEMA`; one that changes its meaning, or goes, raises it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..errors import COMPARISON, STAGES, TEST
from .json_report import SCHEMA

__all__ = ["Record", "Report", "schema", "schema_text"]

Stage = Literal[
    "load", "observe", "patch", "shapes", "export", "convert", "session", "run", "compare", "resize", "test"
]

#: JSON has no such numbers.
Number = float | Literal["nan", "inf", "-inf"]

_VERDICT = rf"^(pass|xpass|skip|(fail|xfail|crash|timeout) ({'|'.join((*STAGES, TEST))})|fail {COMPARISON})$"

#: Graph (empty where one serves all calls) -> path -> ``int64[batch, seq]``, or a constant.
Shapes = dict[str, dict[str, str]]


class _Open(BaseModel):
    """More keys are allowed: exporters and tests of a user's add their own."""

    model_config = ConfigDict(extra="allow")


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Seconds(_Closed):
    """What a stage took; of a case with a process of its own, what that process took."""

    wall_s: Annotated[float, Field(ge=0, description="Seconds by the clock.")]
    cpu_s: Annotated[float, Field(ge=0, description="CPU seconds of the process.")]


class Output(_Closed):
    """The comparison of one output with eager, on the call where it was worst."""

    path: Annotated[str, Field(description="Where it is: `cache.layers.0.keys`.")]
    ok: Annotated[
        bool, Field(description="Whether it is within the tolerance, or within what rounding does to eager.")
    ]
    shape: Annotated[list[int] | None, Field(description="Null for what is no tensor.")]
    dtype: Annotated[str, Field(description="Name of torch's dtype.")]
    reason: Annotated[str, Field(description="Why not, where it is no matter of numbers.")]
    max_abs: Annotated[Number, Field(description="Largest absolute error.")]
    max_rel: Annotated[
        Number,
        Field(
            description="Largest relative error where eager is not 0; inf: an element outside is 0 in eager."
        ),
    ]
    at: Annotated[list[int], Field(description="Index of the worst element.")]
    outside: Annotated[Number, Field(description="Share of elements outside the tolerance.")]
    would_need: Annotated[Number | None, Field(description="The atol with which it would pass.")]
    atol: Annotated[Number, Field(description="Allowed absolute error.")]
    rtol: Annotated[Number, Field(description="Allowed relative error.")]
    note: Annotated[str, Field(description="What else is known: positions left out, ties.")]
    eager_moves: Annotated[
        Number | None,
        Field(description="How far eager itself moves when its operators round otherwise; null: not asked."),
    ] = None
    by: Annotated[
        str,
        Field(description="The user's comparison that judged it (numbers are 0, and say nothing); or empty."),
    ] = ""


class Example(_Open):
    """The arguments that the exporter was given."""

    call: Annotated[int, Field(description="The observed call it was made from.")]
    sizes: Annotated[dict[str, int], Field(description="Symbol -> size.")]
    resized: Annotated[bool, Field(description="Whether its sizes differ from those of the call.")]
    note: Annotated[str | None, Field(description="Why it is as it is.")] = None


class Resize(_Open):
    """Sizes that no observed call had."""

    passed: Annotated[list[str], Field(description="Sizes at which the program agrees with eager.")] = []
    refused_by_eager: Annotated[list[str], Field(description="Sizes that eager refuses, and how.")] = []
    repeated: Annotated[
        list[str],
        Field(
            description="Sizes that eager takes only with repeated values, and what it says of drawn ones."
        ),
    ] = []
    no_memory: Annotated[
        list[str], Field(description="Sizes that were not judged for want of memory, and whose.")
    ] = []
    relations: Annotated[
        list[str], Field(description="Sizes at which a relation that rests on two calls does not hold.")
    ] = []
    thresholds: Annotated[list[str], Field(description="Sizes due to a comparison in the model.")] = []
    not_tried: Annotated[Any, Field(description="Comparisons for which no size was found.")] = None
    failed: Annotated[str, Field(description="The size at which it failed.")] = ""


class UniformInput(_Closed):
    """An input whose values were equal in every call, all or along an axis; what another value has shown."""

    path: Annotated[str, Field(description="Where it is.")]
    values: Annotated[
        str, Field(description="The value, several where calls differ; or `equal along axis 0`.")
    ]
    tried: Annotated[str, Field(description="What was changed: `mask[0, 6] = 0`.")] = ""
    result: Annotated[
        Literal["", "agrees", "agrees elsewhere", "no effect", "differs"],
        Field(
            description="The program against eager then; elsewhere: but for the position that the mask hides."
        ),
    ] = ""
    not_judged: Annotated[str, Field(description="Why nothing is known; empty where something is.")] = ""


class Patches(_Open):
    """The patches of the case's mode during the export."""

    active: Annotated[int, Field(description="How many were in place.")] = 0
    called: Annotated[Any, Field(description="Patch -> how often it was called.")] = None
    nodes: Annotated[dict[str, int], Field(description="Patch -> nodes of the graph made inside it.")] = {}
    resting: Annotated[Any, Field(description="Patch -> why it was not applied.")] = None
    ablation: Annotated[Any, Field(description="What the case does without each of the patches.")] = None


class Diagnosis(_Open):
    """Why the case fails, where that was asked for."""

    verdict: Annotated[str, Field(description="One line: the guilty step or module, and a workaround.")] = ""
    guilty: Annotated[str, Field(description="The same, of other tools.")] = ""
    rungs: Annotated[list[dict[str, Any]], Field(description="Steps compared with eager, in order.")] = []
    first_node: Annotated[Any, Field(description="The first node whose value is wrong.")] = None
    culprits: Annotated[Any, Field(description="The smallest failing submodules.")] = None
    cause: Annotated[Any, Field(description="A known cause that it looks like.")] = None


class Failure(_Open):
    """How a case failed in one process."""

    kind: Annotated[Literal["fail", "crash", "timeout", "error"], Field(description="How it ended.")]
    stage: Annotated[Stage, Field(description="Where.")]
    error: Annotated[str, Field(description="Class of the error.")]
    message: Annotated[str, Field(description="First line.")]
    details: Annotated[list[str], Field(description="The lines below it.")]


class History(_Closed):
    """A failure of this process that a fresh one does not confirm."""

    here: Annotated[Failure, Field(description="In the process that judged other cases before.")]
    fresh: Annotated[Failure | None, Field(description="In a fresh one; null: it passes there.")]
    before: Annotated[list[str], Field(description="Node ids of the tests that were judged before it.")]


class Expected(_Closed):
    """What the spec expects of the case."""

    stage: Annotated[Stage, Field(description="The stage that is expected to fail.")]
    reason: Annotated[str, Field(description="Why, in the spec's words.")]
    line: Annotated[int, Field(description="Line of the spec.")]


class Golden(_Closed):
    """The golden that the shapes check proposes (`--update-shapes`)."""

    path: Annotated[str, Field(description="The golden file.")]
    text: Annotated[str, Field(description="Its content.")]
    changed: Annotated[bool, Field(description="Whether it differs from what is accepted.")]


class Record(_Open):
    """One case, or the shapes check of a spec."""

    spec: Annotated[str, Field(description="Path of the spec, relative to the root directory.")]
    exporter: Annotated[str | None, Field(description="Null: the shapes check of the spec.")]
    patch_mode: Annotated[str | None, Field(description="Null: the shapes check of the spec.")]
    device: Annotated[str, Field(description="`cpu` or `cuda`.")]
    dtype: Annotated[str, Field(description="`float32` and the like.")]
    graph: Annotated[str | None, Field(description="The group of calls, null where one program serves all.")]
    nodeid: Annotated[str, Field(description="The test that judged it.")]
    verdict: Annotated[str, Field(pattern=_VERDICT, description="`pass`, `fail <stage>`, ...")]
    stage: Annotated[Stage | None, Field(description="The last stage entered; null for a skip.")]
    durations: Annotated[dict[Stage, Seconds], Field(description="By stage.")]
    message: Annotated[str | None, Field(description="First line of the failure, or why it was skipped.")]
    details: Annotated[list[str], Field(description="The lines below it.")] = []
    reproduce: Annotated[str, Field(description="The command that runs this case alone.")] = ""
    accept: Annotated[str, Field(description="The command that accepts the shapes of its spec.")] = ""
    seed: Annotated[int, Field(description="Seed of weights and inputs.")] = 0
    expected: Annotated[Expected | None, Field(description="The spec's expectation, if any.")] = None
    facts: Annotated[dict[str, Any], Field(description="What the error knows more.")] = {}
    confirmed: Annotated[
        bool | None, Field(description="Whether a fresh process fails the same way; null: none could be had.")
    ] = None
    confirm_s: Annotated[float, Field(description="Seconds that took.")] = 0.0
    message_in_fresh_process: Annotated[str, Field(description="If it says something else.")] = ""
    history: Annotated[History | None, Field(description="Of a failure that was not confirmed.")] = None
    isolated: Annotated[bool, Field(description="Whether it ran in a process of its own.")] = False
    why_no_fork: Annotated[str, Field(description="Why that process was a new interpreter.")] = ""
    calls: Annotated[int, Field(description="Observed calls.")] = 0
    graphs: Annotated[list[str], Field(description="Shapes check: names of the graphs.")] = []
    broken: Annotated[list[str], Field(description="Shapes check: graphs that no program can serve.")] = []
    shapes: Annotated[Shapes, Field(description="Shapes check: inferred.")] = {}
    accepted: Annotated[Shapes | None, Field(description="Shapes check: those of the golden.")] = None
    golden_exists: Annotated[bool, Field(description="Shapes check: whether there is a golden.")] = False
    golden: Annotated[Golden | None, Field(description="Shapes check: what to write.")] = None
    observed_under: Annotated[str, Field(description="Patch mode under which the calls were recorded.")] = ""
    example: Annotated[Example | None, Field(description="What the exporter was given.")] = None
    warnings: Annotated[list[str], Field(description="Odd things that are no failure.")] = []
    left_behind: Annotated[
        list[str],
        Field(description="Functions, hooks, registrations that the case changed in its process."),
    ] = []
    captured: Annotated[
        dict[str, Any], Field(description="How the captured program did on the observed calls.")
    ] = {}
    exported_shapes: Annotated[
        dict[str, str], Field(description="Path of an input -> dims that the program declares.")
    ] = {}
    specialised: Annotated[list[str], Field(description="Dynamic axes that became constants.")] = []
    unused_inputs: Annotated[
        list[str], Field(description="Inputs on whose values no output of the program depends.")
    ] = []
    unused_inputs_not_judged: Annotated[
        list[str], Field(description="Those of them of which is not known whether eager depends on them.")
    ] = []
    uniform_inputs: Annotated[
        list[UniformInput],
        Field(description="Inputs of one value in every call: the program and eager at another value."),
    ] = []
    outputs: Annotated[list[Output], Field(description="Compared with eager, worst call of each.")] = []
    rounding: Annotated[
        list[str],
        Field(description="Outputs outside the tolerance that agree: eager itself moves as far by rounding."),
    ] = []
    resize: Annotated[Resize | None, Field(description="Other sizes.")] = None
    same_graph_as: Annotated[
        str, Field(description="The patch mode whose captured graph is the same; its results hold here too.")
    ] = ""
    conversion: Annotated[
        str,
        Field(description="`new`, `shared` (with the mode of the same graph) or `cached` (of a run before)."),
    ] = ""
    capture: Annotated[
        str,
        Field(description="With a cache: `new` or `cached` (of a run before, everything being the same)."),
    ] = ""
    capture_not_kept: Annotated[
        str, Field(description="Why a capture is neither kept nor reused: what of it cannot be told.")
    ] = ""
    cache_notes: Annotated[list[str], Field(description="What is wrong with the cache.")] = []
    rewritten: Annotated[
        dict[str, str] | None, Field(description="Rewritten method -> the diff of its source.")
    ] = None
    patches: Annotated[Patches | None, Field(description="The patches it went through.")] = None
    causes: Annotated[
        list[dict[str, str]],
        Field(description="Known causes that the failure looks like: name, sentence, remedy, link."),
    ] = []
    diagnosis: Annotated[Diagnosis | None, Field(description="Why it fails.")] = None
    nodes: Annotated[int, Field(description="Nodes of the program.")] = 0
    fx_nodes: Annotated[int, Field(description="Nodes of the captured program.")] = 0
    operators: Annotated[dict[str, int], Field(description="Operator -> how many nodes.")] = {}
    opset: Annotated[int, Field(description="Of the ONNX model.")] = 0
    model_bytes: Annotated[int, Field(description="Size of the ONNX model, weights included.")] = 0
    providers: Annotated[list[str], Field(description="Execution providers of the session.")] = []
    nodes_by_provider: Annotated[dict[str, int], Field(description="Provider -> nodes it runs.")] = {}
    onnx_inputs: Annotated[list[str], Field(description="Names of the inputs of the ONNX model.")] = []
    peak_rss_mb: Annotated[
        float | None,
        Field(description="Largest resident size of the process so far, MiB."),
    ] = None
    peak_rss_by_stage_mb: Annotated[
        dict[Stage, float] | None,
        Field(
            description="Stage -> largest resident size of the process during it, MiB; "
            "null where the system does not tell (Linux does)."
        ),
    ] = None


class CaseIdentity(_Open):
    """What tells a case from every other one."""

    spec: Annotated[str, Field(description="Path from the root directory of pytest.")]
    exporter: Annotated[str | None, Field(description="null: the shapes check of the spec.")]
    patch_mode: Annotated[str | None, Field(description="null: the shapes check of the spec.")]
    device: Annotated[str, Field(description="cpu or cuda.")]
    dtype: Annotated[str, Field(description="Of the model.")]
    graph: Annotated[str | None, Field(description="Group of calls; null: one graph serves all.")]


class Selection(_Open):
    """What the run was asked for; a case that it lacks and that no filter left out is gone."""

    paths: Annotated[list[str], Field(description="Paths and node ids, from the root directory of pytest.")]
    options: Annotated[list[str], Field(description="Options that narrow the paths: -k, --exporter, ...")]
    deselected: Annotated[list[CaseIdentity], Field(description="Cases that were collected and not run.")]
    unfinished: Annotated[str | None, Field(description="Why the run ended early.")]


class Environment(_Open):
    """What the verdicts depend on, once for the whole run."""

    packages: Annotated[dict[str, str], Field(description="Distribution -> installed version.")]
    python: Annotated[str, Field(description="Version.")]
    platform: Annotated[str, Field(description="Operating system.")]
    machine: Annotated[str, Field(description="Architecture.")]
    cpu: Annotated[str | None, Field(description="Model of the processor.")]
    cpu_count: Annotated[int | None, Field(description="Logical processors.")]
    gpus: Annotated[list[str], Field(description="GPUs that cases ran on.")]
    arguments: Annotated[list[str], Field(description="Command line of pytest.")]
    options: Annotated[dict[str, Any], Field(description="Options of this plugin that were in force.")]
    variables: Annotated[dict[str, str], Field(description="Environment variables that matter, if set.")]
    seeds: Annotated[list[int], Field(description="Seeds of the specs; each record has its own.")]
    started: Annotated[str, Field(description="ISO 8601, UTC.")]
    seconds: Annotated[float, Field(ge=0, description="From the start to the report.")]
    exit_status: Annotated[int, Field(description="Of pytest, before a baseline was looked at.")]
    left_out: Annotated[str | None, Field(description="Why cases may be missing; null: every one ran.")]
    selection: Annotated[
        Selection | None, Field(description="What was asked for; null: nobody knows of all shards.")
    ] = None
    shards: Annotated[list[dict[str, Any]], Field(description="Merged reports: their environments.")] = []


class Report(_Closed):
    """A report of pytest-exportcheck: the environment once, one record per case."""

    schema_version: Annotated[Literal[1], Field(alias="schema", description="Version of this schema.")]
    environment: Annotated[Environment, Field(description="What the verdicts depend on.")]
    cases: Annotated[list[Record], Field(description="Sorted by spec, device, dtype, exporter, patch mode.")]


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of what ``--exportcheck-report`` writes."""
    generated = Report.model_json_schema()
    assert generated["properties"]["schema"]["const"] == SCHEMA
    generated["title"] = "pytest-exportcheck report"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **generated}


def schema_text() -> str:
    """The content of ``docs/record.schema.json``."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")
