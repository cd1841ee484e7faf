"""`exportcheck compare` on two results of one benchmark: ratios beyond the noise bands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_exportcheck.cli import main
from pytest_exportcheck.reports.measurements import (
    RATIO_BAND,
    Measurements,
    differences,
    read_measurements,
)
from pytest_exportcheck.reports.read import ReportError


def measured(name: str = "main job", **rows: Any) -> Measurements:
    return Measurements(name, rows)


def texts(before: Measurements, after: Measurements) -> list[tuple[str, bool | None]]:
    return [(str(each), each.worse) for each in differences(before, after)]


def test_figures_within_the_bands_are_the_same() -> None:
    before = measured(ours={"cpu_s": 30.0, "of_script": 1.6, "said": "21 passed"})
    after = measured(ours={"cpu_s": 44.0, "of_script": 1.6 * RATIO_BAND, "said": "20 passed"})
    assert texts(before, after) == []
    assert texts(after, before) == []


def test_beyond_the_bands_they_are_worse_or_better() -> None:
    before = measured(ours={"cpu_s": 30.0, "of_script": 1.6}, cached={"of_ours": 0.5})
    after = measured(ours={"cpu_s": 46.0, "of_script": 2.0}, cached={"of_ours": 0.25})
    assert texts(before, after) == [
        ("ours: cpu_s 30 to 46 (1.53)", True),
        ("ours: of_script 1.6 to 2 (1.25)", True),
        ("cached: of_ours 0.5 to 0.25 (0.50)", False),
    ]


def test_small_and_missing_figures() -> None:
    before = measured(idle={"extra_cpu_s": 0.01, "ratio": 1.0}, gone={"cpu_s": 2.0})
    after = measured(idle={"extra_cpu_s": 0.1, "ratio": 1.0}, new={"cpu_s": 3.0})
    assert texts(before, after) == [
        ("gone: cpu_s is only in BEFORE", None),
        ("new: cpu_s is only in AFTER", None),
    ]
    with pytest.raises(ReportError, match="BEFORE is of the benchmark startup, AFTER of main job"):
        differences(measured("startup"), measured())


def test_figures_of_nothing() -> None:
    before = measured(ours={"cpu_s": 0.0, "ratio": 0.0, "of_script": 2.0}, small={"cpu_s": 0.0})
    after = measured(ours={"cpu_s": 9.0, "ratio": 1.0, "of_script": 0.0}, small={"cpu_s": 0.1})
    assert texts(before, after) == [
        ("ours: cpu_s 0 to 9", True),
        ("ours: ratio 0 to 1", True),
        ("ours: of_script 2 to 0 (0.00)", False),
    ]


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -1.0, "1.5", True, [1]])
def test_a_figure_that_is_no_number_is_told(
    odd: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = written(tmp_path / "a.json", {"benchmark": "main job", "rows": {"ours": {"ratio": 1.0}}})
    rows = {"ours": {"ratio": odd, "said": odd}}
    bad = written(tmp_path / "b.json", {"benchmark": "main job", "rows": rows})
    assert main(["compare", good, bad]) == 2
    assert f"b.json: ratio of ours is {odd!r}" in capsys.readouterr().err


def written(path: Path, data: Any) -> str:
    path.write_text(json.dumps(data), encoding="utf-8")
    return str(path)


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {"ours": {"cpu_s": 10.0, "of_script": 1.0}}
    before = written(tmp_path / "a.json", {"benchmark": "main job", "rows": rows})
    worse = {"ours": {"cpu_s": 10.0, "of_script": 1.5}}
    after = written(tmp_path / "b.json", {"benchmark": "main job", "rows": worse})
    assert main(["compare", before, before]) == 0
    assert main(["compare", after, before]) == 0
    capsys.readouterr()
    assert main(["compare", before, after]) == 1
    said = capsys.readouterr().out
    assert "worse  ours: of_script 1 to 1.5 (1.50)" in said
    assert "1 change, 1 worse (noise bands: ratios 1.2, seconds 1.5)" in said
    report = written(tmp_path / "c.json", {"schema": 1, "environment": {}, "cases": []})
    assert main(["compare", before, report]) == 2
    assert "a benchmark with a report" in capsys.readouterr().err
    assert read_measurements(Path(report)) is None
    odd = written(tmp_path / "d.json", {"benchmark": "main job", "rows": [1]})
    assert main(["compare", odd, odd]) == 2
    assert "without rows of figures" in capsys.readouterr().err
