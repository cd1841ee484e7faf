"""Fresh processes over the real engine: exporters of a conftest crash, hang or depend on history."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from .hostile_exporters import NAMES

CONFTEST = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})

def pytest_exportcheck_exporters(config):
    import hostile_exporters
    return hostile_exporters.exporters()
"""

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and RLIMIT_AS")


@pytest.fixture(params=["-n0", "-n2"])
def hostile(project, request):
    """A project whose conftest brings `hostile_exporters`, and the number of workers."""
    if request.param != "-n0":
        pytest.importorskip("xdist")
    project.pytester.makeconftest(CONFTEST)
    project.pytester.makeini("[pytest]\naddopts = --strict-markers\n")  # with confirmation
    golden = project.folder / "__shapes__"
    golden.mkdir()
    for name in ("one", "two"):
        (golden / f"{name}.yaml").write_text("inputs:\n  x: float32[x_dim_0, 4]\n")
    return project, request.param


def test_a_crash_or_a_hang_costs_one_case(hostile):
    project, workers = hostile
    exporters = f"[{', '.join(NAMES)}, torch-export, onnx-dynamo]"
    project.simple("one", exporters=exporters)
    project.simple("two", exporters="[segfault, history, onnx-dynamo]")
    # Generous enough for a busy machine; only the exporter that hangs comes to it.
    result = project.run(workers, "--stage-timeout=25", "--exportcheck-report=report.json")
    crashed = dict.fromkeys(("segfault", "abort", "leaves", "killed", "closes"), "crash export")
    passed = dict.fromkeys(("prints", "history", "torch-export", "onnx-dynamo"), "pass")
    failed = dict.fromkeys(("memory", "always"), "fail export")
    verdicts = crashed | passed | failed | {"hangs": "timeout export"}
    expected = {f"one[{name}-none]": verdict for name, verdict in verdicts.items()}
    expected |= {f"two[{name}-none]": verdicts[name] for name in ("segfault", "history", "onnx-dynamo")}
    assert project.verdicts() == expected | {f"{name}[shapes-None]": "pass" for name in ("one", "two")}
    shown = result.stdout.str()
    assert "E   stage export: memory refuses the model: MemoryError" in shown
    assert "hostile_exporters.py" in shown
    assert result.ret == 1


def test_what_depends_on_history_is_said(hostile):
    project, workers = hostile
    project.simple(
        "one",
        exporters="[history, always]",
        more="expect: [{when: {exporter: always}, fails: export, reason: never works}]\n",
    )
    project.simple("two", exporters="[history]")
    # One worker gets both specs, or two workers one each.
    result = project.run(workers, "--exportcheck-report=report.json", "-k", "test_export")
    verdicts = project.verdicts()
    assert verdicts.pop("one[always-none]") == "xfail export"
    assert verdicts.pop("one[history-none]") == "pass"
    if workers == "-n0":
        assert verdicts == {"two[history-none]": "fail export"}
        result.stdout.fnmatch_lines(
            ["E   stage export: fails at export in this process, passes in a fresh one: *depends on history"]
        )
    else:
        assert verdicts == {"two[history-none]": "pass"}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nothing is forked")
def test_what_is_imported_before_a_fork_leaves_no_threads_and_no_cuda(project, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    script = project.pytester.makepyfile(
        """
        import os, sys, threading
        import numpy
        before = len(os.listdir("/proc/self/task"))
        import torch
        assert torch.get_num_threads() == 2
        from pytest_exportcheck.fresh.warm import _MODULES, warm_up
        restore = warm_up()
        assert torch.get_num_threads() == 1
        assert threading.active_count() == 1
        assert len(os.listdir("/proc/self/task")) == before
        assert not torch.cuda.is_initialized()
        assert "onnxruntime" not in sys.modules
        missing = [name for name in _MODULES if name not in sys.modules]
        assert not missing, missing
        child = os.fork()
        if child == 0:
            restore()
            assert torch.get_num_threads() == 2
            big = torch.ones(1_000_000)
            assert float((big + big).sum()) == 2_000_000
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """
    )
    result = project.pytester.run(sys.executable, script, timeout=120)
    assert result.ret == 0, result.stderr.str()
