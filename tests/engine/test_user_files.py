"""A file that a spec names is a module with a private name, which nobody is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pytest_exportcheck import load_dynamic_shapes
from pytest_exportcheck.errors import ExportError
from pytest_exportcheck.failures import representation
from pytest_exportcheck.reports.record import to_plain
from pytest_exportcheck.user_files import module_name_of, with_user_files

from .helpers import make_run


@pytest.mark.parametrize(
    "stem", ["net", "my-net", "my.net", "net_0123456789ab", "_net", "a_b_c", "Netz\u00fc"]
)
def test_the_file_is_shown_in_the_place_of_its_module(stem):
    name = module_name_of(Path(f"/a/{stem}.py"))
    for private, shown in (
        ("{0}", "{1}.py"),
        ("{0}.Net.forward", "{1}.py:Net.forward"),
        ("{0}:Net", "{1}.py:Net"),
        ("<class '{0}.Net'> of {0}.", "<class '{1}.py:Net'> of {1}.py."),
        ("{0}.A, {0}.B", "{1}.py:A, {1}.py:B"),
    ):
        assert with_user_files(private.format(name)) == shown.replace("{1}", stem)
        assert to_plain({private.format(name): [private.format(name)]}) == {
            shown.replace("{1}", stem): [shown.replace("{1}", stem)]
        }


@pytest.mark.parametrize(
    "text",
    ["pytest_exportcheck_exporters", "_exportcheck_net_01234", "x_exportcheck_", "__exportcheck_probe__"],
)
def test_other_names_stay(text):
    assert with_user_files(text) == text


def test_messages_details_and_texts_name_the_file():
    name = module_name_of(Path("/a/net.py"))
    error = ExportError(f"{name}.Net is odd", details=[f"in {name}.Net.forward"])
    assert str(error) == "stage export: net.py:Net is odd\nin net.py:Net.forward"
    shown = representation("a.yaml", 1, "E", [f"at {name}.Net"])
    assert shown.reprcrash is not None
    assert shown.reprcrash.message == "at net.py:Net"


NAMED = """
    from collections import namedtuple

    Pair = namedtuple("Pair", "left right")


    class Net(nn.Module):
        def forward(self, pair):
            return pair.left + pair.right


    def build_model():
        return Net()


    def calls():
        return [((), {"pair": Pair(torch.ones(n, 4), torch.ones(n, 4))}) for n in (2, 3)]
"""


def test_a_golden_with_a_class_of_the_file_is_the_same_in_every_folder(tmp_path):
    texts = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        texts.append(make_run(tmp_path / name, NAMED).observe("cpu", "float32").golden_text("g.yaml"))
    assert texts[0] == texts[1]
    assert 'pair: "namedtuple net.py:Pair"' in texts[0]
    folder = tmp_path / "one" / "__shapes__"
    folder.mkdir()
    (folder / "net.yaml").write_text(texts[0])
    pair = load_dynamic_shapes(folder / "net.yaml")["pair"]
    assert type(pair).__name__ == "Pair"
    assert pair.left == {0: torch.export.Dim.DYNAMIC}
    (tmp_path / "one" / "net.py").unlink()
    (tmp_path / "two" / "net.yaml").write_text(texts[0])
    from pytest_exportcheck.checks.golden import GoldenError

    with pytest.raises(GoldenError, match=r"named tuple net\.py:Pair, which cannot be imported"):
        load_dynamic_shapes(tmp_path / "two" / "net.yaml")
