"""Every fenced block of the README and of docs/*.md is executed, or in `scenes.NOT_RUN` with a reason."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from pytest_exportcheck.checks.golden import parse_golden
from pytest_exportcheck.errors import STAGES
from pytest_exportcheck.registry import COMPARISONS, EXPORTERS, PATCH_MODES
from pytest_exportcheck.spec import load_spec

from . import scenes
from .blocks import PAGES, ROOT, Block, all_blocks, commands, workflow_commands

if TYPE_CHECKING:
    from tests.warm_python import WarmPython

BLOCKS = all_blocks()

#: The engine of the plugin's own tests, for commands that are about pytest and its options.
_FAKE = ROOT / "tests" / "plugin" / "fake_pipeline.py"
_CONFTEST = f"""
import importlib.util, sys
from types import SimpleNamespace
sys.modules["pytest_exportcheck.fresh.warm"] = SimpleNamespace(warm_up=lambda: lambda: None)
spec = importlib.util.spec_from_file_location("pytest_exportcheck.pipeline", {str(_FAKE)!r})
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
"""

#: Pages whose shell blocks run with the real engine; those of the others run with the fake one.
REAL = ("docs/quickstart.md", "docs/failures.md", "docs/new.md")


def _environment() -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "GITHUB", "CI"))
    }
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # The plugin of hypothesis is half of what a bare pytest takes to start and to end.
    kept["PYTEST_ADDOPTS"] = "-p no:hypothesispytest"
    return {**kept, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def _not_run(block: Block) -> str | None:
    return next((reason for text, reason in scenes.NOT_RUN.items() if text in block.text), None)


def _of(*languages: str) -> list[Any]:
    return [pytest.param(block, id=str(block)) for block in BLOCKS if block.language in languages]


def _python(block: Block) -> scenes.Python | None:
    return next((each for each in scenes.PYTHON if each.page == block.page and each.has in block.text), None)


# What there is.


def test_every_language_has_a_test() -> None:
    known = {"sh", "yaml", "python", "toml", "json", "text", "mermaid"}
    assert [str(block) for block in BLOCKS if block.language not in known] == []
    assert {block.page for block in BLOCKS} >= {
        "README.md",
        "docs/quickstart.md",
        "docs/ci.md",
        "docs/failures.md",
    }


def test_no_exception_is_left_over() -> None:
    for text in scenes.NOT_RUN:
        assert sum(text in block.text for block in BLOCKS) == 1, text
    for each in scenes.PYTHON:
        assert sum(_python(block) is each for block in BLOCKS) == 1, each
    assert {*scenes.FILES, *scenes.MORE} <= {block.page for block in BLOCKS}


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            file, _, anchor = target.partition("#")
            if "://" in target:
                continue
            other = page if not file else page.parent / file
            assert other.exists(), f"{page.name}: {target}"
            if anchor:
                assert anchor in _anchors(other.read_text(encoding="utf-8")), f"{page.name}: {target}"


def test_a_section_that_is_named_is_a_link_to_it() -> None:
    for page in PAGES:
        text = _FENCE.sub("", page.read_text(encoding="utf-8"))
        # see "Fresh processes" in [options.md](options.md): nobody would notice that it has another name now
        named = re.findall(r'"([^"\n]+)"\s+in\s+\[[^]]+\]\(([^)#\s]+)\)', text)
        assert named == [], f"{page.name}: {named}: link to the section"


def test_anchors_are_those_of_headings_and_not_of_code() -> None:
    text = "# A `b` c\n```sh\n# no heading\n```\n## Twice\n## Twice\n## What, is *it*?\n"
    assert _anchors(text) == {"a-b-c", "twice", "twice-1", "what-is-it"}


_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def _anchors(text: str) -> set[str]:
    """What a link to a section of the page may name, as GitHub makes it."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.MULTILINE):
        name = _anchor(heading)
        again = (f"{name}-{number}" for number in range(1, 99))
        found.add(name if name not in found else next(other for other in again if other not in found))
    return found


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


# The real engine, in one process for all pages.


def _steps(folder: Path) -> list[dict[str, Any]]:
    """Files, commands and snippets in the order of the pages; `id` is the block's, or the command's."""
    steps: list[dict[str, Any]] = []
    for page in dict.fromkeys(block.page for block in BLOCKS):
        here = folder / page.replace("/", "_")
        written: dict[str, str] = {"pytest.ini": "[pytest]\nexportcheck_confirm = false\n"}

        def add(kind: str, key: str, here: Path = here, **more: str) -> None:
            steps.append({"id": key, "kind": kind, "folder": str(here), **more})

        def write(key: str, path: str, text: str, add: Any = add, written: Any = written) -> None:
            # A page may show a conftest.py piece by piece.
            text = written.get(path, "") + text if Path(path).name == "conftest.py" else text
            written[path] = text
            add("file", key, path=path, text=text)

        write(f"{page} ini", "pytest.ini", written["pytest.ini"])
        for path, text in scenes.FILES.get(page, {}).items():
            write(f"{page} {path}", path, text)
        if page == "docs/new.md":
            add("python", f"{page} folder", before="", text=_FOLDER, after="")
        for block in BLOCKS:
            if block.page != page or _not_run(block):
                continue
            python = _python(block) if block.language == "python" else None
            if python is not None:
                if page == "README.md":
                    add("sh", f"{page} more", text=scenes.MORE[page][0])
                add("python", str(block), before=python.before, text=block.text, after=python.after)
            elif block.file and block.language in ("python", "yaml") and ".github" not in block.file:
                if "__shapes__/tiny_llama" not in block.file:
                    write(str(block), block.file, block.text)
            elif block.language == "sh" and page in REAL:
                for command in commands(block.text):
                    add("sh", f"{block} {command}", text=command)
        if page != "README.md":
            for command in scenes.MORE.get(page, []):
                add("sh", f"{page} {command}", text=command)
    return steps


#: A folder with a pretrained model, for `exportcheck new ./my_model`.
_FOLDER = """
from transformers import LlamaConfig, LlamaForCausalLM
LlamaForCausalLM(LlamaConfig(
    vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2)).save_pretrained("my_model")
"""


class Done:
    """What the steps said, with the folder's path left out."""

    def __init__(self, folder: Path, results: dict[str, dict[str, Any]]) -> None:
        self.folder = folder
        self.results = results

    def of(self, key: str) -> tuple[int, str]:
        result = self.results[key]
        return result["status"], self._clean(result["output"])

    def of_page(self, page: str) -> str:
        texts = [each["output"] for key, each in self.results.items() if key.startswith(page)]
        return self._clean("\n".join(texts))

    def page_folder(self, page: str) -> Path:
        return self.folder / page.replace("/", "_")

    def _clean(self, text: str) -> str:
        return re.sub(rf"{re.escape(str(self.folder))}/[^/\s]*/", "", text)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> Done:
    folder = tmp_path_factory.mktemp("real")
    steps = _steps(folder)
    for each in {step["folder"] for step in steps}:
        Path(each).mkdir()
    specs = ROOT / "model_specs"
    t5 = folder / "docs_new.md" / "model_specs"
    t5.mkdir()
    for step in steps:
        if step.get("path") == "model_specs/t5.yaml":
            step["text"] = (specs / "t5.yaml").read_text(encoding="utf-8")
    (folder / "steps.json").write_text(json.dumps(steps))
    driver = str(Path(__file__).with_name("driver.py"))
    command = [warm_python.executable, driver, "steps.json", "results.json"]
    process = subprocess.run(
        command, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=900, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return Done(folder, json.loads((folder / "results.json").read_text()))


def _real_commands() -> list[Any]:
    found = [
        (f"{block} {command}", command, block.page)
        for block in BLOCKS
        if block.language == "sh" and block.page in REAL and not _not_run(block)
        for command in commands(block.text)
    ]
    found += [
        (f"{page} {command}", command, page)
        for page, more in scenes.MORE.items()
        if page != "README.md"
        for command in more
    ]
    return [pytest.param(*each, id=each[0]) for each in found]


@pytest.mark.parametrize(("key", "command", "page"), _real_commands())
def test_real_command(done: Done, key: str, command: str, page: str) -> None:
    status, output = done.of(key)
    again = [each for each in done.results if each.startswith(page) and each.endswith(f" {command}")]
    red = again.index(key) < scenes.FAILS.get(page, {}).get(command, 0)
    # 1 is what both commands say of a failure; 2 and more are mistakes of the command line.
    assert status == (1 if red else 0), output[-3000:]


@pytest.mark.parametrize("block", [each for each in _of("python") if _python(each.values[0])])
def test_python_snippet(done: Done, block: Block) -> None:
    status, output = done.of(str(block))
    assert status == 0, output[-3000:]


def test_what_a_conftest_adds_is_used(done: Done) -> None:
    data = json.loads((done.page_folder("docs/extending.md") / "report.json").read_text())
    cases = {(case["exporter"], case["patch_mode"]): case for case in data["cases"] if case["exporter"]}
    assert set(cases) == {("torch-deferred", "none"), ("torch-deferred", "math-sdpa")}
    assert {case["verdict"] for case in cases.values()} == {"pass"}
    assert {case["team"] for case in cases.values()} == {"speech"}


def test_the_comparisons_of_the_page_judge(done: Done) -> None:
    """Both ways: what they allow passes, and what is wrong under them fails and is said."""
    data = json.loads((done.page_folder("docs/extending.md") / "answers.json").read_text())
    assert {Path(case["spec"]).stem: case["verdict"] for case in data["cases"]} == {
        "direction": "pass",
        "elsewhere": "fail compare",
        "detector": "pass",
        "worse": "fail compare",
    }
    rows = {Path(case["spec"]).stem: case["outputs"] for case in data["cases"]}
    assert {row["by"] for row in rows["detector"] + rows["worse"]} == {"detections"}
    assert "points elsewhere, cosine" in rows["elsewhere"][0]["reason"]
    assert "scores differ, ordered by score" in rows["worse"][0]["reason"]


def test_the_golden_of_the_readme_is_what_is_inferred(done: Done) -> None:
    (block,) = (each for each in BLOCKS if each.file == "model_specs/__shapes__/tiny_llama.yaml")
    written = done.page_folder("README.md") / block.file
    assert parse_golden(block.text, "README") == parse_golden(written.read_text(), "written")


@pytest.mark.parametrize("block", _of("text"))
def test_text_is_what_is_said(done: Done, block: Block) -> None:
    # The README shows a failure of the page about failures.
    page = "docs/failures.md" if block.page == "README.md" else block.page
    # Whether a case is among the slow ones, which are said, is a matter of the machine.
    said = [_plain(line) for line in done.of_page(page).splitlines() if not _SLOW.match(line)]
    position = 0
    for part in block.text.split("\n...\n"):
        lines = [_plain(line) for line in part.splitlines()]
        places = range(position, len(said) - len(lines) + 1)
        found = next((at for at in places if said[at : at + len(lines)] == lines), None)
        assert found is not None, f"nobody says (from line {position} on):\n{part}"
        position = found + len(lines)


_SLOW = re.compile(r"(slowest:|        ) +\d+\.\d s  .* \(\w+ \d+\.\d s\)$")


def _plain(line: str) -> str:
    """Without the digits of errors, which differ between machines, and what they do to columns."""
    return " ".join(re.sub(r"\d\.\de[+-]\d\d", "1e0", line).split())


# The fake engine: commands that are about pytest and its options.


@pytest.fixture
def project(tmp_path: Path, warm_plugin: WarmPython) -> Path:
    """A project with the specs that the pages name, all of them fine, and our two commands."""
    _tools(tmp_path, warm_plugin.executable)
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name in ("llama", "tiny_llama", "bert", "t5"):
        spec = tmp_path / "model_specs" / f"{name}.yaml"
        golden = f"model_specs/__shapes__/{name}.yaml"
        (tmp_path / golden).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / golden).write_text(f"# {golden}\ninputs:\n  x: float32[batch, 4]\n")
        spec.write_text(
            'exportcheck: 1\nmodel: {factory: "models.py:build"}\n'
            'observe:\n  calls: [{forward: {x: "float32[2, 4]"}}, {forward: {x: "float32[3, 4]"}}]\n'
            "matrix: {exporters: [onnx-dynamo]}\n"
        )
    return tmp_path


def _tools(folder: Path, python: str) -> None:
    """Our two commands, as pip writes them."""
    tools = folder / ".tools"
    tools.mkdir()
    for name, module in (("pytest", "pytest"), ("exportcheck", "pytest_exportcheck.cli")):
        # `python -m pytest` would put the current folder on sys.path, which `pytest` does not.
        code = f"import sys; from {module} import main; sys.exit(main())"
        if name == "pytest":
            code = "import sys; from pytest import console_main; sys.exit(console_main())"
        (tools / name).write_text(f'#!/bin/sh\nexec {shlex.quote(python)} -c "{code}" "$@"\n')
        (tools / name).chmod(0o755)


def _shell(command: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """`command` as a shell runs it, with our two commands on the path."""
    environment = {**_environment(), "PATH": f"{folder / '.tools'}{os.pathsep}{os.environ['PATH']}", **more}
    return subprocess.run(
        ["bash", "-eo", "pipefail", "-c", command],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def _fake_commands() -> list[Any]:
    return [
        pytest.param(command, id=f"{block} {command}")
        for block in BLOCKS
        if block.language == "sh" and block.page not in REAL and not _not_run(block)
        for command in commands(block.text)
    ]


@pytest.mark.parametrize("command", _fake_commands())
def test_command(project: Path, command: str) -> None:
    if "-n " in command:
        pytest.importorskip("xdist")
    result = _shell(command.replace("-n auto", "-n 2"), project)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]


def test_the_tests_of_the_readme(project: Path) -> None:
    (block,) = (each for each in BLOCKS if each.file == "test_tiny_llama.py")
    (project / block.file).write_text(block.text)
    result = _shell("pytest -q test_tiny_llama.py", project)
    assert result.returncode == 0, result.stdout
    assert "2 passed" in result.stdout


# GitHub Actions.

WORKFLOWS = [block for block in BLOCKS if block.file and block.file.startswith(".github/")]


def _reports(folder: Path) -> None:
    """The reports of the earlier jobs of a workflow."""
    for path in ("shards/0", "shards/1", "reports/pinned", "reports/newest", "reports/older-runtime"):
        file = folder / f"{path}.json"
        file.parent.mkdir(exist_ok=True)
        name = file.stem if path.startswith("shards") else "bert"
        case = {
            "spec": f"model_specs/{name}.yaml",
            "exporter": "onnx-dynamo", "patch_mode": "none", "device": "cpu", "dtype": "float32",
            "graph": None, "verdict": "pass", "stage": "resize", "durations": {}, "message": "",
        }  # fmt: skip
        if file.stem == "newest":
            case |= {"verdict": "fail export", "stage": "export"}
        file.write_text(json.dumps({"schema": 1, "environment": {"packages": {}}, "cases": [case]}))


@pytest.mark.parametrize("block", [pytest.param(each, id=str(each)) for each in WORKFLOWS])
def test_workflow(block: Block, project: Path) -> None:
    workflow = yaml.safe_load(block.text)
    assert {"name", True, "jobs"} <= set(workflow), "`on` is True to YAML 1.1"
    jobs = workflow["jobs"]
    for name, job in jobs.items():
        assert job["runs-on"]
        assert {job.get("needs", name)} <= set(jobs)
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])
    ran = 0
    for command in workflow_commands(workflow):
        if any(command.startswith(begin) for begin in scenes.NOT_RUN_IN_CI):
            continue
        ran += 1
        if command.startswith("exportcheck"):
            _reports(project)
        summary = project / "summary.md"
        result = _shell(
            re.sub("-n (auto|2)", "-n 0", command), project, CI="1", GITHUB_STEP_SUMMARY=str(summary)
        )
        said = result.stdout + result.stderr
        if "--require-device cuda" in command:
            # No GPU here: an error, and not a skip that says nothing.
            assert result.returncode != 0
            assert "cuda" in said
        elif "pinned.json reports/newest.json" in command:
            assert result.returncode == 1, said
            assert "something got worse" in summary.read_text()
        else:
            assert result.returncode == 0, f"{command}\n{said[-2000:]}"
    assert ran


def test_the_recipe_with_a_baseline(project: Path) -> None:
    """The first run has none; the next is the same; then a case is expected to fail, and a spec is gone."""
    (block,) = (each for each in WORKFLOWS if "exportcheck-baseline.yml" in str(each.file))
    (command,) = (each for each in workflow_commands(yaml.safe_load(block.text)) if each.startswith("pytest"))
    command = command.replace("-n auto", "-n 0")

    def run() -> tuple[int, str]:
        result = _shell(command, project, CI="1")
        return result.returncode, result.stdout

    heading = "compared with the baseline"
    status, said = run()
    assert status == 0, said
    assert heading not in said
    baseline = project / ".exportcheck" / "baseline.json"
    first = baseline.read_text()
    status, said = run()
    assert status == 0, said
    assert heading in said
    assert "0 worse" in said

    spec = project / "model_specs" / "bert.yaml"
    text = spec.read_text()
    spec.write_text(
        text.replace('build"}', 'build", kwargs: {do: {onnx-dynamo: export}}}')
        + "expect: [{when: {exporter: onnx-dynamo}, fails: export, reason: an upgrade}]\n"
    )
    status, said = run()
    assert status == 1, said
    assert "1 xfail" in said
    assert "pass -> xfail export" in said
    assert json.loads(baseline.read_text())["environment"]["exit_status"] == 0, "pytest alone was content"

    baseline.write_text(first)
    spec.unlink()
    (spec.parent / "__shapes__" / "bert.yaml").unlink()
    status, said = run()
    assert status == 1, said
    assert "nobody checks it any more" in said


def test_commands_left_out_of_workflows_are_there() -> None:
    found = [command for block in WORKFLOWS for command in workflow_commands(yaml.safe_load(block.text))]
    for begin in scenes.NOT_RUN_IN_CI:
        assert any(command.startswith(begin) for command in found), begin


# Files and fragments of files.


_MINIMAL = {
    "exportcheck": 1,
    "model": {"type": "llama"},
    "observe": {"calls": [{"forward": {"x": "float32[2]"}}]},
}


def _specs() -> list[Any]:
    return [each for each in _of("yaml") if each.values[0] not in WORKFLOWS]


@pytest.mark.parametrize("block", _specs())
def test_yaml(block: Block, tmp_path: Path) -> None:
    data = yaml.safe_load(block.text)
    if data is None:
        # Only a comment: the line that names the schema for editors.
        (schema,) = re.findall(r"\$schema=(\S+)$", block.text.strip())
        assert (ROOT / "model_specs" / schema).is_file()
        return
    if "inputs" in data:
        assert parse_golden(block.text, str(block))
        return
    text = block.text
    if "exportcheck" not in data:
        rest = {name: value for name, value in _MINIMAL.items() if name not in data}
        if "observe" in data and "calls" not in data["observe"]:
            rest["observe"] = {**data.pop("observe"), **_MINIMAL["observe"]}
            text = ""
        text += yaml.safe_dump(rest, sort_keys=False)
    (tmp_path / "spec.yaml").write_text(text)
    load_spec(tmp_path / "spec.yaml", tmp_path)


@pytest.mark.parametrize("block", _of("toml"))
def test_toml(block: Block) -> None:
    tomllib = pytest.importorskip("tomllib")
    groups = tomllib.loads(block.text)["project"]["entry-points"]
    assert set(groups) <= {registry.group for registry in (EXPORTERS, PATCH_MODES, COMPARISONS)}
    for group in groups.values():
        for value in group.values():
            module, name = value.split(":")
            assert any(each.file == f"{module}.py" and f"class {name}" in each.text for each in BLOCKS)


@pytest.mark.parametrize("block", _of("json"))
def test_json(block: Block) -> None:
    """A part of a record: a name, and keys that the code writes."""
    ((name, part),) = json.loads(block.text).items()
    assert part, f"{block}: nothing in {name}"
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "pytest_exportcheck").rglob("*.py"))
    for key in (name, *part):
        assert re.search(rf"""["']{key}["']|\b{key}[:=]""", code), f"{block}: no code writes {key!r}"


@pytest.mark.parametrize("block", _of("mermaid"))
def test_mermaid_names_the_stages(block: Block) -> None:
    assert block.text.startswith("flowchart ")
    assert set(re.findall(r'\["(\w+):', block.text)) == set(STAGES)


def test_every_python_block_is_a_snippet_or_a_file() -> None:
    for block in BLOCKS:
        if block.language == "python":
            assert _python(block) or block.file, f"{block}: neither a file nor in scenes.PYTHON"


# Words in the text.


def test_commands_and_options_in_the_text_exist() -> None:
    from pytest_exportcheck.cli import cli

    from .blocks import words

    help_text = subprocess.run(
        [sys.executable, "-m", "pytest", "--help"],
        env=_environment(), cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    known = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", help_text))
    ours = {option for each in cli.commands.values() for param in each.params for option in param.opts}
    ours |= {
        option for each in cli.commands.values() for param in each.params for option in param.secondary_opts
    }
    foreign = {"--junitxml", "--tx", "--dist", "--help", "-W", "-n"}
    for page in PAGES:
        for word in words(page.read_text(encoding="utf-8")):
            if word.startswith("exportcheck ") and not word.startswith("exportcheck: "):
                name = word.split()[1]
                assert name == "--help" or name in cli.commands, f"{page.name}: `{word}`"
            for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", word):
                assert option in known | ours | foreign, f"{page.name}: `{word}`: no option {option}"
