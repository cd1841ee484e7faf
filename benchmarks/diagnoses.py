"""What a diagnosis says about failures that exist today, and what it costs.

python benchmarks/diagnoses.py [--quick] [--shipped] [NAME ...]

For each: the guilty line, the culprits, CPU seconds of the whole diagnosis, and of exporting every traced
submodule with the same exporter, which is what one does by hand (stopped after `NAIVE_SECONDS`;
left out with ``--quick``). ``--shipped``: the expected failures of ``model_specs`` instead, one of each
spec, exporter, graph and stage.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from pytest_exportcheck.cases import CaseId
from pytest_exportcheck.diagnose import Subject, diagnose, subject_of, trace_forward_execution
from pytest_exportcheck.diagnose.diagnosis import subject_of_case
from pytest_exportcheck.diagnose.subject import Clock, quietly
from pytest_exportcheck.errors import ExportCheckError
from pytest_exportcheck.expectations import expectation_for
from pytest_exportcheck.exporters.base import Exported, ExportRequest
from pytest_exportcheck.exporters.transformers_onnx import TransformersOnnx
from pytest_exportcheck.pipeline import SpecRun, run_case
from pytest_exportcheck.plan import export_cases
from pytest_exportcheck.spec import ModelSpec, load_spec

ROOT = Path(__file__).resolve().parent.parent
BUDGET_SECONDS = 240.0
NAIVE_SECONDS = 60.0


def ids(batch: int, length: int) -> torch.Tensor:
    """Token ids, without the special ones."""
    return torch.randint(5, 60, (batch, length))


def bart_float16() -> Subject:
    """Its encoder clamps infinities in float16 only, by a branch on data."""
    config = transformers.BartConfig(
        vocab_size=64, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.BartModel(config).half().eval()
    return subject_of(
        model,
        [
            {"input_ids": ids(b, n), "decoder_input_ids": ids(b, n + 1), "use_cache": False}
            for b, n in ((2, 5), (3, 7))
        ],
    )


def reformer() -> Subject:
    """LSH and local attention over chunks."""
    config = transformers.ReformerConfig(
        vocab_size=64, hidden_size=16, attention_head_size=8, feed_forward_size=32, num_attention_heads=2,
        attn_layers=["local", "lsh"], lsh_attn_chunk_length=4, local_attn_chunk_length=4, num_buckets=2,
        axial_pos_shape=(4, 8), axial_pos_embds_dim=(8, 8), max_position_embeddings=32, is_decoder=False,
    )  # fmt: skip
    model = transformers.ReformerModel(config).eval()
    return subject_of(model, [{"input_ids": ids(b, n), "use_cache": False} for b, n in ((2, 8), (3, 16))])


def visual_bert() -> Subject:
    """Text and visual embeddings in one sequence, aligned: it asks whether any alignment is empty."""
    config = transformers.VisualBertConfig(
        vocab_size=64, hidden_size=16, visual_embedding_dim=12, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.VisualBertModel(config).eval()
    return subject_of(
        model,
        [
            {
                "input_ids": ids(b, n),
                "attention_mask": torch.ones(b, n, dtype=torch.int64),
                "visual_embeds": torch.randn(b, v, 12),
                "visual_attention_mask": torch.ones(b, v, dtype=torch.int64),
                "image_text_alignment": torch.randint(0, n, (b, v, 2)),
            }
            for b, n, v in ((2, 5, 3), (3, 7, 4))
        ],
    )


def qwen2_vl_vision() -> Subject:
    """Patches of images of any size: loops over the rows of ``grid_thw``."""
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    config = Qwen2VLVisionConfig(
        depth=2, embed_dim=16, num_heads=2, hidden_size=16, patch_size=4, mlp_ratio=2
    )
    model = Qwen2VisionTransformerPretrainedModel(config).eval()
    pixels = config.in_channels * config.temporal_patch_size * config.patch_size**2

    def call(*grids: list[int]) -> dict[str, Any]:
        count = sum(t * h * w for t, h, w in grids)
        return {"hidden_states": torch.randn(count, pixels), "grid_thw": torch.tensor(grids)}

    return subject_of(model, [call([1, 4, 4]), call([1, 6, 4])])


def sdpa_masked_row() -> Subject:
    """A row of the additive mask is -inf throughout: zeros in eager, NaN in ONNX."""
    path = ROOT / "tests/cases/models/07_sdpa_float_mask_minus_inf_row.py"
    spec = importlib.util.spec_from_file_location("masked", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return subject_of(module.build_model(), module.calls())


class _AutoShapes(TransformersOnnx):
    """As ``export_for_generation(dynamic=True)`` does it: all axes automatic, on the first decoding step."""

    def export(self, request: ExportRequest) -> Exported:
        import transformers.exporters as package

        real = package.OnnxConfig
        package.OnnxConfig = lambda dynamic_shapes, **options: real(dynamic=True, **options)  # type: ignore
        try:
            return super().export(request)
        finally:
            package.OnnxConfig = real  # type: ignore[misc]


def _generation(name: str) -> Subject:
    run = SpecRun(load_spec(ROOT / f"model_specs/{name}.yaml", ROOT))
    case = CaseId(run.spec.relative, "transformers-onnx", "own", "cpu", "float32", "decode")
    subject = subject_of_case(run, case)
    first = subject.shapes.complete(subject.calls[0])
    example = dataclasses.replace(subject.example, arguments=first)
    return dataclasses.replace(subject, exporter=_AutoShapes(), example=example)


def t5_decode() -> Subject:
    """The decoding graph of transformers' exporter: a past of length 1 becomes a constant."""
    return _generation("t5")


def whisper_decode() -> Subject:
    """The same for whisper."""
    return _generation("whisper")


FAILURES: dict[str, Callable[[], Subject]] = {
    "bart float16": bart_float16,
    "reformer": reformer,
    "visual_bert": visual_bert,
    "qwen2_vl vision": qwen2_vl_vision,
    "sdpa masked row": sdpa_masked_row,
    "t5 decode": t5_decode,
    "whisper decode": whisper_decode,
}


def shipped() -> dict[str, Callable[[], tuple[Subject, ExportCheckError]]]:
    """By label, what takes a case of ``model_specs`` that is known to fail to its failure."""
    found: dict[str, Callable[[], tuple[Subject, ExportCheckError]]] = {}
    seen = set()
    for path in sorted((ROOT / "model_specs").glob("*.yaml")):
        spec = load_spec(path, ROOT)
        for case in export_cases(spec):
            known = expectation_for(spec, case)
            kind = known and (spec.relative, case.exporter, case.graph, known.stage)
            if known is None or kind in seen or case.device != "cpu":
                continue
            seen.add(kind)
            found[f"{path.stem} {case.label()} {known.stage}"] = functools.partial(_failed, spec, case)
    return found


def _failed(spec: ModelSpec, case: CaseId) -> tuple[Subject, ExportCheckError]:
    run = SpecRun(spec)
    try:
        run_case(run, case, lambda _stage: None, {})
    except ExportCheckError as error:
        return subject_of_case(run, case), error
    raise SystemExit(f"{case} passes")


def naive(subject: Subject) -> tuple[float, int, int]:
    """(CPU seconds, submodules exported, submodules) of exporting all of them with their recorded calls."""
    target = subject.target
    began = time.process_time()
    with torch.no_grad(), quietly(), subject.active():
        with trace_forward_execution(target.module, traced_method={"": target.method}) as root:
            for call in subject.calls:
                target.eager(call.arguments)
        pieces = list(root)
        for count, piece in enumerate(pieces):
            if time.process_time() - began > NAIVE_SECONDS:
                return time.process_time() - began, count, len(pieces)
            piece.export_once(subject.exporter, subject.options)
    return time.process_time() - began, len(pieces), len(pieces)


def main() -> int:
    """Print one block per failure; 1 if one was not explained."""
    warnings.simplefilter("ignore")
    quick = "--quick" in sys.argv
    # A subject, and the failure that is to be explained, if it is known already.
    failures: dict[str, Callable[[], tuple[Subject, ExportCheckError | None]]]
    if "--shipped" in sys.argv:
        failures = dict(shipped())
    else:
        failures = {name: lambda make=make: (make(), None) for name, make in FAILURES.items()}
    wanted = [name for name in sys.argv[1:] if not name.startswith("--")] or list(failures)
    rows = []
    unexplained = 0
    for name in wanted:
        torch.manual_seed(0)
        with quietly():
            subject, error = failures[name]()
        began = time.process_time()
        found = diagnose(subject, error, Clock(BUDGET_SECONDS))
        seconds = time.process_time() - began
        print(f"== {name}\n{found.verdict}")
        for culprit in found.pieces.culprits if found.pieces is not None else ():
            print(f"  culprit {culprit.site} ({culprit.kind}): {culprit.line or culprit.reason}")
        for cause in found.causes:
            print(f"  known cause: {cause.name}")
        for note in found.notes:
            print(f"  {note}")
        unexplained += not found.verdict.startswith("guilty")
        tried = found.pieces.tried if found.pieces is not None else 0
        print(f"  {seconds:.1f} s, {tried} submodules exported", flush=True)
        beside = ["-", "-"]
        if not quick:
            spent, done, pieces = naive(subject)
            more = "" if done == pieces else f" ({done} of {pieces})"
            print(f"  every submodule: {spent:.1f} s{more}", flush=True)
            beside = [f"{spent:.1f}{more}", f"{spent / seconds:.1f}"]
        rows.append((name, f"{seconds:.1f}", str(tried), *beside))
    print("\n| failure | diagnosis, CPU s | exports of submodules | every submodule, CPU s | ratio |")
    print("| --- | --- | --- | --- | --- |")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(f"{len(wanted) - unexplained} of {len(wanted)} explained")
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
