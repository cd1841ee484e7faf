"""Who registered a cache as a pytree node, in which layout, and what that does to exports of ours."""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_exportcheck.pytrees import register_flattening_functions
from pytest_exportcheck.pytrees.registration import registered_classes

if TYPE_CHECKING:
    from tests.warm_python import WarmPython


def _named(name: str) -> list[str]:
    return [str(one) for one in registered_classes() if one.cls.__name__ == name]


def test_ours_says_whose_it_is() -> None:
    with register_flattening_functions():
        assert _named("DynamicCache") == [
            "transformers.cache_utils.DynamicCache by pytest_exportcheck.pytrees.caches: "
            "keys and values, layer by layer"
        ]
    assert _named("DynamicCache") == []


def test_the_layout_of_executorch_is_named_replaced_and_put_back(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """It breaks every ONNX export of a cached model in the process; not ours."""
    script = textwrap.dedent(
        """
        import sys, warnings
        from pathlib import Path
        from transformers.integrations.executorch import register_dynamic_cache_export_support
        from pytest_exportcheck.pytrees.registration import registered_classes
        from tests.engine.helpers import make_run, verdict

        SOURCE = '''
        import transformers as T

        def build_model():
            torch.manual_seed(0)
            return T.LlamaForCausalLM(T.LlamaConfig(
                vocab_size=99, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                num_attention_heads=2,
            )).eval()

        def calls():
            return [((), dict(input_ids=torch.randint(5, 90, size))) for size in ((2, 4), (3, 9))]
        '''

        register_dynamic_cache_export_support()
        layouts = lambda: [str(one) for one in registered_classes() if one.cls.__name__ == "DynamicCache"]
        before = layouts()
        print(*before)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            print(verdict(make_run(Path(sys.argv[1]), SOURCE), "onnx-dynamo")[:2])
        print(*{str(one.message) for one in caught if "pytree node" in str(one.message)})
        assert layouts() == before
        """
    )
    done = subprocess.run(
        [warm_python.executable, "-c", script, str(tmp_path)],
        capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if "torch.onnx" not in line[:12]]
    assert (
        "transformers.cache_utils.DynamicCache by transformers.integrations.executorch: "
        "a list of keys and a list of values, with which ONNX exports fail"
    ) in lines
    assert "('pass', None)" in lines
    assert "call torch.onnx.export inside register_flattening_functions()" in lines[-1]


def test_what_an_import_registers_stays(warm_python: WarmPython) -> None:
    """Outputs of transformers' models are registered when their class is defined, and never again."""
    script = textwrap.dedent(
        """
        import sys
        from torch.utils import _pytree
        import transformers.cache_utils
        from pytest_exportcheck.pytrees.registration import (
            register_flattening_functions, without_our_flattening
        )

        assert "transformers.models.clip.modeling_clip" not in sys.modules
        with register_flattening_functions(), without_our_flattening():
            from transformers.models.clip.modeling_clip import CLIPOutput
        assert CLIPOutput in _pytree.SUPPORTED_NODES
        """
    )
    done = subprocess.run([warm_python.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_command_says_who_registered_what(tmp_path: Path, warm_python: WarmPython) -> None:
    """A mode of the user's is imported first, and whatever it registers is shown."""
    (tmp_path / "mine.py").write_text(
        "from transformers.integrations.executorch import register_dynamic_cache_export_support\n"
        "register_dynamic_cache_export_support()\n"
        "patches = {'torch.nn.functional.mish': lambda input: input}\n"
    )
    command = [warm_python.executable, "-m", "pytest_exportcheck.cli", "patches", "--pytrees"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *more], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    plain = run()
    assert plain.returncode == 0, plain.stderr
    assert "DynamicCache" not in plain.stdout
    assert ", 0 in a layout with which ONNX exports fail; " in plain.stderr
    broken = run("--mode", "mine.py:patches")
    assert broken.returncode == 1, broken.stderr
    assert (
        "transformers.cache_utils.DynamicCache by transformers.integrations.executorch: a list of keys and a "
        "list of values, with which ONNX exports fail" in broken.stdout
    )
    assert ", 1 in a layout with which ONNX exports fail; " in broken.stderr
