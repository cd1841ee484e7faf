"""Runs of one spec, each as another pytest run would make it, for the tests of kept captures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pytest_exportcheck.cache_settings import CacheSettings
from pytest_exportcheck.spec import load_spec
from pytest_exportcheck.spec_run import SpecRun

from .helpers import make_run, verdict

__all__ = ["NET", "Runs"]

NET = """
    import os

    OFFSET = 3.0


    def scaled(factor):
        def scale(x):
            return x * factor

        return scale


    class Net(nn.Module):
        gain = 2.0

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.steps = [1, 2]
            self.scale = scaled(1.5)

        def forward(self, x):
            if x.shape[0] <= 7:
                raise ValueError("too short")
            for step in self.steps:
                x = torch.relu(self.linear(x)) * step
            return self.scale(x) * self.gain + OFFSET + torch.tensor([1.0, 2.0]).sum()


    def build_model():
        return Net()


    def calls():
        return [((torch.randn(9, 6),), {}), ((torch.randn(12, 6),), {})]
"""


class Runs:
    """Runs one spec again and again, with a new `SpecRun` each time as another pytest run would."""

    def __init__(self, folder: Path, source: str = NET, extra: str = "") -> None:
        self.spec = make_run(folder, source, extra).spec
        self.folder = folder / "cache"

    def __call__(
        self, exporter: str = "torch-export", mode: str = "none", cache: bool = True
    ) -> dict[str, Any]:
        """The record of the case, which must pass."""
        stage, error, record = self.judge(exporter, mode, cache)
        assert stage == "pass", error
        return record

    def judge(
        self, exporter: str = "torch-export", mode: str = "none", cache: bool = True
    ) -> tuple[str, Any, dict[str, Any]]:
        run = SpecRun(self.spec, True, CacheSettings(self.folder, 10**9) if cache else None)
        try:
            return verdict(run, exporter, mode)
        finally:
            run.close()

    def change(self, old: str, new: str) -> None:
        """Another line in the factory's file."""
        path = self.spec.path.with_suffix(".py")
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8")
        self.spec = load_spec(self.spec.path, self.spec.path.parent)

    def entries(self) -> list[Path]:
        return sorted(self.folder.glob("*/*.capture"))
