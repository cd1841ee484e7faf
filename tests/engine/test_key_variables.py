"""Environment variables in a key: all but those of a run, a terminal, a user or a package manager."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch._inductor.runtime import cache_dir_utils

from pytest_exportcheck.exporters import surroundings


def test_variables_of_a_run_count_only_where_code_reads_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_RUN_ID", "1")
    monkeypatch.setenv("TIMM_FUSED_ATTN", "0")
    few, every = surroundings.variables(every=False), surroundings.variables(every=True)
    assert "TIMM_FUSED_ATTN" in few
    assert "GITHUB_RUN_ID" not in few
    assert "GITHUB_RUN_ID" in every
    assert "PYTEST_CURRENT_TEST" not in every


def test_variables_that_libraries_write_say_what_ran_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    before = surroundings.variables(every=True)
    cache_dir_utils.cache_dir()
    assert "TORCHINDUCTOR_CACHE_DIR" in os.environ
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # transformers' pipelines
    assert surroundings.variables(every=True) == before


@pytest.mark.parametrize(
    "name",
    [
        *(
            "PWD",
            "SHELL",
            "TERM_PROGRAM",
            "KITTY_WINDOW_ID",
            "WT_SESSION",
            "SSH_CONNECTION",
            "LANG",
            "COLORFGBG",
        ),
        *("BASH_VERSION", "HISTFILE", "PS1", "XDG_SESSION_ID", "DESKTOP_SESSION", "SUDO_USER", "WSLENV"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "_CE_CONDA", "UV", "UV_CACHE_DIR", "PIP_INDEX_URL", "TOX_ENV_NAME"),
        *("CI_JOB_ID", "CIRCLE_BUILD_NUM", "RUNNER_TEMP", "ImageVersion", "KUBERNETES_SERVICE_HOST"),
        *("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"),
    ],
)
def test_what_a_terminal_or_a_package_manager_sets_does_not_count(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    assert name not in surroundings.variables(every=False)


@pytest.mark.parametrize(
    "name",
    ["PATH", "HOME", "CI", "OMP_NUM_THREADS", "TORCH_LOGS", "PYTHONHASHSEED", "HF_HOME", "MY_MODEL_WIDTH"],
)
def test_what_may_reach_a_capture_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert surroundings.variables(every=False)[name] == "1"


def test_of_what_torch_and_transformers_read_little_is_left_out() -> None:
    """Where caches lie, names and colours in messages, compilers: none of it reaches a capture."""
    access = re.compile(
        r"""(?:environ(?:\.get)?|getenv)\s*[(\[]\s*["'](\w+)["']|["'](\w+)["'] in os\.environ"""
    )
    read = set()
    for package in (torch, transformers):
        for file in Path(package.__file__).parent.rglob("*.py"):
            text = file.read_text(encoding="utf-8", errors="replace")
            if ("environ" in text or "getenv" in text) and "test" not in file.as_posix().partition("site-")[
                2
            ]:
                read |= {one or other for one, other in access.findall(text)}
    assert {"CI", "TORCHINDUCTOR_CACHE_DIR", "TRANSFORMERS_VERBOSITY"} <= read
    counted = surroundings._OF_A_TEST.fullmatch, surroundings._OF_A_RUN.fullmatch
    assert {name for name in read if any(left_out(name) for left_out in counted)} <= {
        *(
            "XDG_CACHE_HOME",
            "XDG_CONFIG_DIRS",
            "XDG_CONFIG_HOME",
            "XDG_DATA_DIRS",
            "XDG_DATA_HOME",
            "XDG_STATE_HOME",
        ),
        *("CONDA_EXE", "CONDA_PREFIX", "VIRTUAL_ENV", "NO_COLOR", "USER", "USERNAME", "VSCODE_PID"),
        "PIP_DISABLE_PIP_VERSION_CHECK",
    }
