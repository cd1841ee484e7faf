"""Conversions of earlier runs: used where everything is the same, ignored where anything is odd."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import threading
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import pytest
import torch
from onnxscript.function_libs.torch_lib import registration

from pytest_exportcheck.cache_settings import CacheSettings
from pytest_exportcheck.exporters import conversion_cache
from pytest_exportcheck.exporters.conversion_cache import ConversionCache
from pytest_exportcheck.exporters.guards import Comparison
from pytest_exportcheck.spec import load_spec
from pytest_exportcheck.spec_run import SpecRun

from .helpers import make_run, verdict
from .test_conversions import WRONG_BEYOND, converted, judged, opened, without_sources

__all__ = ["converted", "opened"]

pytestmark = pytest.mark.filterwarnings("ignore")

NET = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(40, 40)
            self.register_buffer("scale", torch.tensor([[1.0, 2.0]]).repeat(1, 20))

        def forward(self, x):
            return torch.relu(self.linear(x)).transpose(0, 1) @ x * self.scale + x.shape[0]


    def build_model():
        return Net()


    def calls():
        return [((torch.randn(2, 40),), {}), ((torch.randn(4, 40),), {})]
"""

OTHER = NET.replace("torch.relu", "torch.sigmoid")


class Runs:
    """Runs one spec again and again, with a new `SpecRun` each time as another pytest run would."""

    def __init__(self, folder: Path, source: str = NET, extra: str = "", limit: int = 10**9) -> None:
        self.spec = make_run(folder, source, extra).spec
        self.folder = folder / "cache"
        self.limit = limit

    def __call__(self, mode: str = "none", salt: str = "", **more: Any) -> dict[str, Any]:
        """The record of the case, which must pass."""
        stage, error, record = self.judge(mode, salt, **more)
        assert stage == "pass", error
        return record

    def judge(
        self, mode: str = "none", salt: str = "", share: bool = True
    ) -> tuple[str, Any, dict[str, Any]]:
        settings = CacheSettings(self.folder, self.limit, salt)
        run = SpecRun(self.spec, share, settings)
        try:
            return verdict(run, "onnx-dynamo", mode)
        finally:
            run.close()

    def entries(self) -> list[Path]:
        return sorted(self.folder.glob("*/*.conversion"))

    def entry(self) -> Path:
        (found,) = self.entries()
        return found


@dataclass(frozen=True)
class Once:
    """The folder of a spec after one run with a cache, and the record of that run."""

    folder: Path
    source: str
    record: dict[str, Any]

    def again(self, folder: Path) -> Runs:
        """To be run from another folder, which a cache does not mind."""
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        return Runs(folder, self.source)


def _once(folder: Path, source: str) -> Once:
    return Once(folder, source, Runs(folder, source)())


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    return _once(tmp_path_factory.mktemp("once"), NET)


@pytest.fixture(scope="module")
def other_once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    return _once(tmp_path_factory.mktemp("other"), OTHER)


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.fixture
def kept(tmp_path: Path, once: Once) -> Runs:
    """What `runs` is after its first run."""
    return once.again(tmp_path)


def test_a_second_run_converts_nothing(runs: Runs, converted: list[str], opened: list[bytes]) -> None:
    alone = runs(share=False)
    assert not runs.entries(), "--no-share switches it off"
    first, second = runs(), runs()
    assert (first["conversion"], second["conversion"]) == ("new", "cached")
    assert len(converted) == 2
    assert judged(alone) == judged(first) == judged(second)
    assert "cache_notes" not in second
    assert len(set(map(without_sources, opened))) == 1


IN_BODIES = NET.replace(
    "return torch.relu(self.linear(x)).transpose(0, 1) @ x * self.scale + x.shape[0]",
    "y = torch.cond(x.sum() > 0, lambda x: self.linear(x).relu(), lambda x: x * self.scale[0], (x,))\n"
    "            return torch.cond(y.mean() > 1, lambda y: y + 1, lambda y: y.sigmoid(), (y,))",
)


@pytest.mark.parametrize("source", [NET, IN_BODIES])
def test_a_kept_conversion_has_the_numbers_of_a_new_one(tmp_path: Path, source: str) -> None:
    """A comparison of the two runs would show a difference of sizes that nobody made."""
    runs = Runs(tmp_path, source)
    alone, first, second = runs(share=False), runs(), runs()
    assert (first["conversion"], second["conversion"]) == ("new", "cached")
    for name in ("model_bytes", "nodes", "operators", "opset"):
        assert alone[name] == first[name] == second[name], name


def test_the_mode_with_fixes_of_its_own_is_kept_too(tmp_path: Path, converted: list[str]) -> None:
    runs = Runs(tmp_path, extra="matrix: {exporters: [onnx-dynamo], patch_modes: [none, hf]}\n")
    records = [runs(mode) for mode in ("none", "hf", "none", "hf")]
    assert [record["conversion"] for record in records] == ["new", "new", "cached", "cached"]
    assert len(runs.entries()) == 2
    assert judged(records[1]) == judged(records[3])


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_weights_of_another_dtype(tmp_path: Path, dtype: str, opened: list[bytes]) -> None:
    source = NET.replace("return Net()", f"return Net().to(torch.{dtype})").replace(
        ", 40),)", f", 40).to(torch.{dtype}),)"
    )
    runs = Runs(tmp_path, source, "tolerance: {atol: 1.0, rtol: 1.0}\nresize: off\n")
    assert [runs()["conversion"] for _ in range(2)] == ["new", "cached"]
    assert len(set(map(without_sources, opened))) == 1


def test_an_entry_is_json_and_onnx_without_weights_and_paths(kept: Runs, tmp_path: Path) -> None:
    data = kept.entry().read_bytes()
    with zipfile.ZipFile(kept.entry()) as archive:
        assert archive.namelist() == ["manifest.json", "model.onnx"]
        manifest = json.loads(archive.read("manifest.json"))
        model = onnx.load_from_string(archive.read("model.onnx"))
    for path in (tmp_path, Path(torch.__file__).parent, Path(__file__).parent, Path.home()):
        assert str(path).encode() not in data
    run = SpecRun(kept.spec)
    weights = dict(run.model("cpu", "float32").named_parameters())
    assert weights["linear.bias"].detach().numpy().tobytes() not in data
    assert set(manifest["weights"].values()) >= {"linear.bias"}
    assert model.graph.node


def test_it_is_found_from_another_folder(runs: Runs, tmp_path: Path) -> None:
    """As on another machine, or in another checkout."""
    runs()
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    for name in ("net.py", "net.yaml"):
        shutil.copy(tmp_path / name, tmp_path / "elsewhere" / "deep" / name)
    folder = tmp_path / "elsewhere"
    runs.spec = load_spec(folder / "deep" / "net.yaml", folder)
    assert runs()["conversion"] == "cached"


def change_seed(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    text = runs.spec.path.read_text().replace('build_model"', 'build_model", seed: 7')
    runs.spec.path.write_text(text)


def change_option(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.spec.path.write_text(
        runs.spec.path.read_text() + "exporter_options: {onnx-dynamo: {opset_version: 20}}\n"
    )


def change_source(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    source = runs.spec.path.with_suffix(".py")
    source.write_text(source.read_text().replace("+ x.shape[0]", "+ 2 * x.shape[0]"))


def change_dims(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    source = runs.spec.path.with_suffix(".py")
    text = source.read_text().replace("(self, x)", "(self, z)").replace("(x)", "(z)")
    source.write_text(text.replace("@ x", "@ z").replace("x.shape", "z.shape"))


def change_version(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = conversion_cache._versions()
    monkeypatch.setattr(conversion_cache, "_versions", lambda: {**versions, "onnxscript": "99"})


def change_code(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion_cache, "_code_digest", lambda: "other")


def change_variable(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHLIB_EXPERIMENTAL_PREFER_TRACING", "1")


@pytest.mark.parametrize(
    "change",
    [
        change_seed,
        change_option,
        change_source,
        change_dims,
        change_version,
        change_code,
        change_variable,
    ],
    ids=lambda change: change.__name__.removeprefix("change_"),
)
def test_one_difference_is_enough(
    kept: Runs, monkeypatch: pytest.MonkeyPatch, change: Callable[[Runs, pytest.MonkeyPatch], None]
) -> None:
    change(kept, monkeypatch)
    kept.spec = load_spec(kept.spec.path, kept.spec.path.parent)
    record = kept()
    assert record["conversion"] == "new"
    assert "cache_notes" not in record, "it is nobody's fault"
    assert len(kept.entries()) == 2


def test_conftest_files_and_warnings_that_are_errors_are_differences(kept: Runs) -> None:
    assert kept(salt="a conftest file")["conversion"] == "new"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "nobody says this")
        assert kept()["conversion"] == "new"
    assert kept()["conversion"] == "cached"


def test_functions_of_the_users_are_not_kept(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = copy.copy(registration.default_registry["aten::gelu"].overloads[0])
    theirs.__module__ = "conftest"
    extra = registration.OverloadedFunction("aten::frobnicate")
    extra.overloads.append(theirs)
    monkeypatch.setitem(registration.default_registry._registry, "aten::frobnicate", extra)
    assert [runs()["conversion"] for _ in range(2)] == ["new", "new"]
    assert not runs.entries()


# what is there is not what is looked for


def rewritten(
    path: Path, change: Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]], **how: Any
) -> None:
    with zipfile.ZipFile(path) as archive:
        manifest, model = json.loads(archive.read("manifest.json")), archive.read("model.onnx")
    manifest, model = change(manifest, model)
    with zipfile.ZipFile(path, "w", **how) as archive:
        archive.writestr("manifest.json", json.dumps(manifest))
        archive.writestr("model.onnx", model)


def truncated(path: Path, other: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def emptied(path: Path, other: Path) -> None:
    path.write_bytes(b"")


def text(path: Path, other: Path) -> None:
    path.write_text("PK: not quite")


def of_another_model(path: Path, other: Path) -> None:
    shutil.copy(other, path)


def another_model_in_it(path: Path, other: Path) -> None:
    """Its checksum is that of the manifest of the other one: valid, but the manifest is not ours."""
    with zipfile.ZipFile(other) as archive:
        model = archive.read("model.onnx")
    rewritten(path, lambda manifest, _: (manifest, model))


def with_another_format(path: Path, other: Path) -> None:
    rewritten(path, lambda manifest, model: ({**manifest, "format": 2}, model))


def with_a_list(path: Path, other: Path) -> None:
    rewritten(path, lambda manifest, model: ([manifest], model))  # type: ignore[return-value, arg-type]


def without_a_weight(path: Path, other: Path) -> None:
    rewritten(path, lambda manifest, model: ({**manifest, "weights": {}}, model))


def with_another_weight(path: Path, other: Path) -> None:
    def swap(manifest: dict[str, Any], model: bytes) -> tuple[dict[str, Any], bytes]:
        return {**manifest, "weights": dict.fromkeys(manifest["weights"], "scale")}, model

    rewritten(path, swap)


def with_an_unknown_weight(path: Path, other: Path) -> None:
    def swap(manifest: dict[str, Any], model: bytes) -> tuple[dict[str, Any], bytes]:
        return {**manifest, "weights": dict.fromkeys(manifest["weights"], "../weight")}, model

    rewritten(path, swap)


def without_comparisons(path: Path, other: Path) -> None:
    rewritten(path, lambda manifest, model: ({**manifest, "comparisons": None}, model))


def compressed(path: Path, other: Path) -> None:
    rewritten(path, lambda manifest, model: (manifest, model), compression=zipfile.ZIP_DEFLATED)


def no_model(path: Path, other: Path) -> None:
    def swap(manifest: dict[str, Any], model: bytes) -> tuple[dict[str, Any], bytes]:
        return {**manifest, "sha256": hashlib.sha256(b"\xff" * 99).hexdigest()}, b"\xff" * 99

    rewritten(path, swap)


HOSTILE = [
    truncated,
    emptied,
    text,
    of_another_model,
    another_model_in_it,
    with_another_format,
    with_a_list,
    without_a_weight,
    with_another_weight,
    with_an_unknown_weight,
    without_comparisons,
    compressed,
    no_model,
]


@pytest.mark.parametrize("damage", HOSTILE, ids=lambda damage: damage.__name__)
def test_what_is_not_right_is_ignored_with_a_word(
    kept: Runs, once: Once, other_once: Once, tmp_path: Path, damage: Callable[[Path, Path], None]
) -> None:
    path = kept.entry()
    damage(path, other_once.again(tmp_path / "other").entry())
    second = kept()
    assert second["conversion"] == "new"
    (note,) = second.pop("cache_notes")
    assert note.startswith(f"{path} is ignored: ")
    assert "\n" not in note
    assert judged(once.record) == judged(second)
    assert kept()["conversion"] == "cached", "the new one took its place"


def test_a_flipped_bit_anywhere_is_noticed_or_harmless(kept: Runs) -> None:
    """Some bytes of the archive say nothing (a time of day); all others are checked."""
    path = kept.entry()
    run = SpecRun(kept.spec)
    weights = {
        **dict(run.model("cpu", "float32").named_parameters()),
        **dict(run.model("cpu", "float32").named_buffers()),
    }
    with zipfile.ZipFile(path) as archive:
        manifest, right = json.loads(archive.read("manifest.json")), archive.read("model.onnx")
    cache = ConversionCache(kept.folder, 10**9)
    assert cache.path(manifest["key"]) == path

    def model_of(found: Any) -> bytes:
        return onnx_ir.to_proto(found.model).SerializeToString(deterministic=True)

    expected = model_of(cache.read(manifest["key"], weights)[0])
    assert right
    data = path.read_bytes()
    ignored = 0
    for position in range(0, len(data), max(1, len(data) // 300)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(bytes(flipped))
        found, notes = cache.read(manifest["key"], weights)
        ignored += found is None
        assert (found is None) == bool(notes)
        assert found is None or model_of(found) == expected, position
    assert ignored > 250


def test_a_folder_in_its_place(kept: Runs) -> None:
    path = kept.entry()
    path.unlink()
    path.mkdir()
    record = kept()
    assert record["conversion"] == "new"
    assert f"{path} is ignored: " in record["cache_notes"][0]
    assert "keeps no conversions" in record["cache_notes"][1]


def test_a_wrong_model_under_the_right_key_fails_no_case(runs: Runs, converted: list[str]) -> None:
    """It can only be forged. The numbers say so, and a new conversion is made."""
    first = runs()

    def forged(manifest: dict[str, Any], model: bytes) -> tuple[dict[str, Any], bytes]:
        proto = onnx.load_from_string(model)
        for node in proto.graph.node:
            if node.op_type == "Relu":
                node.op_type = "Sigmoid"
        data = proto.SerializeToString()
        return {**manifest, "sha256": hashlib.sha256(data).hexdigest()}, data

    rewritten(runs.entry(), forged)
    second = runs()
    assert second["conversion"] == "new"
    assert "with the cached conversion it fails at compare, with a new one it passes" in second["warnings"][0]
    assert second["outputs"] == first["outputs"]
    assert len(converted) == 2
    assert runs()["conversion"] == "cached", "the new one took its place"
    assert len(converted) == 2


def test_a_failure_is_that_of_a_new_conversion(tmp_path: Path, converted: list[str]) -> None:
    runs = Runs(tmp_path, WRONG_BEYOND)
    texts = []
    for number in (1, 2, 3):
        stage, error, record = runs.judge()
        assert stage == "resize"
        assert len(converted) == number
        assert record["conversion"] == "new"
        texts.append(str(error))
    assert len(set(texts)) == 1


# the folder


def test_its_size_is_bounded(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    names = ["first", "second", "third"]
    sizes = []
    for age, salt in enumerate(names):
        runs(salt=salt)
        # A capture and a conversion: the limit is for both.
        newest = [path for path in runs.folder.glob("*/*") if path.stat().st_mtime > 2_000_000]
        assert len(newest) == 2
        sizes.append(sum(path.stat().st_size for path in newest))
        for path in newest:
            os.utime(path, (1_000_000 + age, 1_000_000 + age))
    runs.limit = sum(sizes) + sizes[0] // 2
    assert runs(salt="first")["conversion"] == "cached", "and so it is the one used last"
    runs(salt="fourth")
    assert runs(salt="first")["conversion"] == "cached"
    assert runs(salt="third")["conversion"] == "cached"
    assert runs(salt="second")["conversion"] == "new"
    runs.limit = 10
    runs(salt="fifth")
    assert runs(salt="fifth")["conversion"] == "new", "one that does not fit is not kept"


def test_what_a_killed_process_left_is_removed(kept: Runs) -> None:
    fresh, stale = (kept.entry().parent / name for name in (".a.new", ".b.new"))
    for file in (fresh, stale):
        file.write_bytes(b"half")
    os.utime(stale, (1, 1))
    kept(salt="another")
    assert fresh.exists()
    assert not stale.exists()


def test_a_folder_that_cannot_be_written_is_said_once(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    runs.folder = tmp_path / "file" / "cache"
    settings = CacheSettings(runs.folder, 10**9)
    run = SpecRun(runs.spec, True, settings)
    stage, _, record = verdict(run, "onnx-dynamo")
    assert stage == "pass"
    notes = record["cache_notes"]
    assert any(note.startswith(f"{runs.folder} keeps no conversions: ") for note in notes)
    again = verdict(run, "onnx-dynamo")[2].get("cache_notes", [])
    assert not any("keeps no conversions" in note for note in again)


def test_many_at_once(kept: Runs) -> None:
    """Readers see a whole entry or none, whoever writes."""
    path = kept.entry()
    run = SpecRun(kept.spec)
    model = run.model("cpu", "float32")
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with zipfile.ZipFile(path) as archive:
        key = json.loads(archive.read("manifest.json"))["key"]
    cache = ConversionCache(kept.folder, 10**9)
    found, _ = cache.read(key, weights)
    assert found is not None
    comparison = Comparison("seq > 32", ("seq",), "", False, "_0 > 32")
    problems: list[Any] = []

    def work() -> None:
        own = ConversionCache(kept.folder, 10**9)
        for _ in range(15):
            mine, _ = cache.read(key, weights)
            assert mine is not None
            problems.extend(own.write(key, mine.model, weights, {"": [], "broken": [comparison]}))
            seen, notes = own.read(key, weights)
            problems.extend(notes)
            if seen is None:
                problems.append("not found")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert [each.name for each in kept.entry().parent.glob("*.conversion")] == [path.name]
    assert not list(kept.folder.glob("*/*.new"))
    decided = cache.read(key, weights)[0].decided  # type: ignore[union-attr]
    assert list(decided) == ["", "broken"]
    (read,) = decided["broken"]
    assert read == comparison
    assert read.holds({"seq": 33})
    assert not read.holds({"seq": 32})


def test_a_weight_is_read_once_until_it_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[torch.Tensor] = []
    digest = conversion_cache._digest

    def counted(tensor: torch.Tensor) -> str:
        read.append(tensor)
        return digest(tensor)

    monkeypatch.setattr(conversion_cache, "_digest", counted)
    cache = ConversionCache(tmp_path, 10**9)
    weight = torch.ones(3)

    def key() -> Any:
        return cache.key(graph="g", weights={"w": weight}, settings="", patches="", exporter="e")

    first = key()
    assert key() == first
    assert len(read) == 1
    weight[0] = 2
    assert key() != first
    assert len(read) == 2
