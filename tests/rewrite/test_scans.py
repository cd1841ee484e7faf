"""Python loops over a dynamic axis: which become scans, their numbers at unseen lengths, and which do not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch.utils import _pytree

from pytest_exportcheck.exporters.tables import shared_tables
from pytest_exportcheck.patches.rewrite import LoopProof, Rewriting, rewrite_for_export
from tests.engine.helpers import make_run

from .helpers import verdict
from .loop_forms import LOOPS, REFUSED, OverBlocks, OverBlocksByTheCounter

pytestmark = pytest.mark.filterwarnings("ignore")

_DYNAMIC = torch.export.Dim.DYNAMIC
_SHAPES = ({0: _DYNAMIC, 1: _DYNAMIC},)


def x_of(batch: int, length: int) -> torch.Tensor:
    return torch.randn(batch, length, 4, generator=torch.Generator().manual_seed(batch * 100 + length))


def rewriting_of(model: torch.nn.Module) -> tuple[Rewriting, list[torch.export.ExportedProgram]]:
    programs = []

    def export() -> None:
        # As the exporter for ONNX does: a size of 1 is a size as any other.
        config: Any = torch.fx.experimental._config
        with torch.no_grad(), config.patch(backed_size_oblivious=True):
            programs.append(torch.export.export(model, (x_of(2, 5),), dynamic_shapes=_SHAPES, strict=False))

    return rewrite_for_export(model, (x_of(2, 5),), calls=[((x_of(3, 7),), {})], export=export), programs


def fed(session: onnxruntime.InferenceSession, x: torch.Tensor) -> list[torch.Tensor]:
    (given,) = session.get_inputs()
    return [torch.as_tensor(one) for one in session.run(None, {given.name: x.numpy()})]


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_becomes_a_scan(name: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"onstrain|specialized|data-dependent"):
        torch.export.export(LOOPS[name]().eval(), (x_of(2, 5),), dynamic_shapes=_SHAPES, strict=False)
    rewriting, programs = rewriting_of(LOOPS[name]().eval())
    assert rewriting.refused is None, rewriting.refused
    assert rewriting.error is None, rewriting.error
    method = rewriting.methods[-1]
    assert "scan" in method.targets
    loops = [one for one in method.proof.branches if isinstance(one, LoopProof)]
    assert loops
    for proof in loops:
        assert proof.proven
        assert {1, 2, 3} <= {*proof.observed, *proof.made}
    assert "torch._higher_order_ops.scan(" in method.dump
    agree(LOOPS[name]().eval(), programs[0], tmp_path, ((2, 5), (1, 3), (4, 11), (3, 1)))


def agree(
    model: torch.nn.Module,
    program: torch.export.ExportedProgram,
    folder: Path,
    sizes: tuple[tuple[int, int], ...],
) -> None:
    """The program, and what it converts to, give what the model gives at every size."""
    file = folder / "model.onnx"
    with shared_tables():
        converted = torch.onnx.export(program, verbose=False)
    assert converted is not None
    converted.save(file)
    session = onnxruntime.InferenceSession(file)
    for batch, length in sizes:
        x = x_of(batch, length)
        with torch.no_grad():
            expected = [torch.as_tensor(one) for one in _pytree.tree_leaves(model(x.clone()))]
        for got in (_pytree.tree_leaves(program.module()(x.clone())), fed(session, x)):
            assert len(got) == len(expected)
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(torch.as_tensor(a), b, atol=1e-5, rtol=1e-5)


def test_a_number_of_blocks_that_is_baked_in(tmp_path: Path) -> None:
    rewriting, programs = rewriting_of(OverBlocks().eval())
    assert (rewriting.refused, rewriting.error) == (None, None)
    assert [method.targets for method in rewriting.methods] == [("scan",)]
    sizes = ((2, 5), (1, 3), (4, 11), (3, 17))
    with pytest.raises(Exception, match=r"Guard failed|differ|shape|size"):
        agree(OverBlocks().eval(), programs[0], tmp_path, sizes)  # without the rewriting
    agree(OverBlocks().eval(), programs[-1], tmp_path, sizes)


def test_a_loop_that_exports_and_cannot_be_a_scan_stays() -> None:
    rewriting, programs = rewriting_of(OverBlocksByTheCounter().eval())
    assert rewriting == Rewriting(())
    assert len(programs) == 1


@pytest.mark.parametrize("name", REFUSED)
def test_a_loop_that_cannot_be_a_scan_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    rewriting, _ = rewriting_of(make().eval())
    assert rewriting.refused is not None
    assert re.search(message, rewriting.refused.message), rewriting.refused.message
    assert rewriting.refused.place is not None
    assert rewriting.refused.place.file.endswith("loop_forms.py")


_MAMBA = """
import transformers as T


def build_model():
    torch.manual_seed(0)
    config = T.MambaConfig(
        vocab_size=99, hidden_size=8, num_hidden_layers=1, state_size=4, conv_kernel=4, expand=2,
        time_step_rank=2,
    )
    return T.MambaForCausalLM(config).eval()


def calls():
    return [((), dict(input_ids=torch.randint(5, 90, s), use_cache=False)) for s in ((2, 7), (3, 11))]
"""


def test_a_mamba_of_a_spec(tmp_path: Path) -> None:
    run = make_run(tmp_path, _MAMBA)
    assert verdict(run, "onnx-dynamo", "none")[0] == "export"
    for exporter in ("torch-export", "onnx-dynamo"):
        stage, failure, record = verdict(run, exporter, "rewrite")
        assert (stage, failure) == ("pass", None)
        name = "transformers.models.mamba.modeling_mamba.mamba_selective_scan"
        assert record["patches"]["rewritten"] == {name: ["scan"]}
        assert name in record["patches"]["nodes"]


class DeltaRule(torch.nn.Module):
    def forward(self, query, key, value, decay, beta):
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as rule

        return rule(query, key, value, decay, beta, chunk_size=3, output_final_state=True)


def test_the_chunks_of_the_gated_delta_rule() -> None:
    def inputs(batch: int, length: int) -> tuple[torch.Tensor, ...]:
        query, key, value = (x_of(batch, length).reshape(batch, length, 2, 2) * k for k in (0.5, 0.3, 1.0))
        return query, key, value, -query[..., 0].abs(), key[..., 0].sigmoid()

    shapes = tuple({0: _DYNAMIC, 1: _DYNAMIC} for _ in range(5))
    programs = []

    def export() -> None:
        with torch.no_grad():
            example = inputs(2, 8)
            programs.append(torch.export.export(DeltaRule(), example, dynamic_shapes=shapes, strict=False))

    rewriting = rewrite_for_export(DeltaRule(), inputs(2, 8), calls=[(inputs(3, 5), {})], export=export)
    assert [(method.target.rpartition(".")[2], method.targets) for method in rewriting.methods] == [
        ("torch_chunk_gated_delta_rule", ("scan",))
    ]
    baked, rewritten = programs[0].module(), programs[-1].module()
    for length in (7, 11, 20):
        given = inputs(3, length)
        with torch.no_grad():
            for a, b in zip(rewritten(*given), DeltaRule()(*given), strict=True):
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    with pytest.raises(AssertionError, match="Guard failed"):
        baked(*inputs(3, 20))
