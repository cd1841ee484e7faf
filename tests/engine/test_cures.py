"""A failure that names code which a patch mode of ours replaces says so."""

from __future__ import annotations

import inspect

import pytest
import transformers.cache_utils as caches

from pytest_exportcheck.patches.cures import cure_lines

from .helpers import make_run, verdict


def lines_of(function):
    lines, first = inspect.getsourcelines(function)
    return first, first + len(lines) - 1


FIRST, LAST = lines_of(caches.DynamicSlidingWindowLayer.update)
OTHER, _ = lines_of(caches.DynamicLayer.update)


@pytest.mark.parametrize("file", ["transformers/cache_utils.py", caches.__file__])
@pytest.mark.parametrize("line", [FIRST, LAST])
def test_the_mode_that_replaces_the_line(file, line):
    for text in (
        f"decided at seq=3, and otherwise here: seq > 8 ({file}:{line}: if x:)",
        f"at {file}:{line} in update: if x:",
    ):
        (said,) = cure_lines([text], "none", "onnx")
        assert "patch mode transformers replaces code named above" in said
        assert "DynamicSlidingWindowLayer.update" in said
        assert said.endswith("patch_modes: [none, transformers]")
        assert cure_lines([text], "torch", "onnx")[0].endswith("patch_modes: [torch, transformers]")
        for has_it in ("transformers", "all"):
            assert cure_lines([text], has_it, "onnx") == []


@pytest.mark.parametrize(
    "text",
    [
        f"at transformers/cache_utils.py:{OTHER} in update: if x:",
        f"at transformers/cache_utils.py:{LAST + 1} in other",
        f"cache_utils.py:{FIRST}: if x:",
        f"mine/transformers/cache_utils.py:{FIRST}: if x:",
        f"/other/transformers/cache_utils.py:{FIRST}: if x:",
        f"transformers/cache_utils.pyi:{FIRST}",
        "no place at all",
    ],
)
def test_other_code_has_no_mode(text):
    assert cure_lines([text], "none", "onnx") == []


def test_the_failure_of_a_case_names_it(tmp_path):
    run = make_run(
        tmp_path,
        """
        from transformers.cache_utils import DynamicSlidingWindowLayer


        class Net(nn.Module):
            def forward(self, x):
                layer = DynamicSlidingWindowLayer(sliding_window=8)
                keys, _ = layer.update(x, x)
                if torch.compiler.is_exporting():
                    layer.update(None, None)
                return keys.sum(-1)


        def build_model():
            return Net()


        def calls():
            return [((torch.randn(2, 1, n, 4),), {}) for n in (5, 6)]
        """,
    )
    stage, error, _ = verdict(run, "torch-export")
    assert stage == "export"
    assert any("cache_utils.py:" in line and " in update" in line for line in error.details)
    assert error.details[-1].startswith("patch mode transformers replaces code named above (")
    assert error.details[-1].endswith("and may cure it: patch_modes: [none, transformers]")
