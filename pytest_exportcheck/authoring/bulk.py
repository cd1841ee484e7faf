"""First specs of every model type that is installed, each made in a process of its own."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path, PurePosixPath
from typing import Any

from ..plurals import counted
from .new import NO_CLASS, Draft, draft

__all__ = ["draft_all", "file_name", "model_types", "summary", "write_table"]

#: How many reasons a summary gives of each kind of failure.
_REASONS = 3


def model_types() -> list[str]:
    """Every model type that transformers has a configuration for."""
    from transformers import CONFIG_MAPPING

    return sorted(CONFIG_MAPPING.keys())


def file_name(source: str) -> str:
    """Name of the spec's file: the type, or of a factory ``tagger_build``; ``Tagger`` where it says both.

    Two files with a factory called ``build`` have a spec each, and so have two factories of a file.
    """
    place, _, factory = source.rpartition(":")
    name = factory or source
    file = PurePosixPath(place).name.removesuffix(".py").rpartition(".")[2]
    if file and file.lower() not in factory.lower():
        name = f"{file}_{factory}"
    return re.sub(r"\W+", "_", name).strip("_") + ".yaml"


def draft_all(types: Sequence[str], folder: Path, jobs: int, seconds: float) -> Iterator[Draft]:
    """Make a spec of each of `types`, `jobs` at a time; a type that takes longer than `seconds` is given up.

    Yields
    ------
    Draft
        In the order in which they end.
    """
    # What every child needs is imported once.
    import transformers.modeling_utils  # noqa: F401

    from .. import pipeline  # noqa: F401

    context = multiprocessing.get_context("fork")
    waiting = list(reversed(types))
    running: dict[Connection, tuple[str, BaseProcess, float]] = {}
    child: BaseProcess
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop()
                here, there = context.Pipe(duplex=False)
                arguments = (name, folder / file_name(name), there)
                child = context.Process(target=_child, args=arguments, daemon=True)
                child.start()
                there.close()
                running[here] = (name, child, time.monotonic())
            for connection in wait(list(running), timeout=1):
                assert isinstance(connection, Connection)
                name, child, _ = running.pop(connection)
                yield _received(name, connection, child)
            for connection, (name, child, began) in list(running.items()):
                if time.monotonic() - began > seconds:
                    del running[connection]
                    child.kill()
                    child.join()
                    yield Draft(name, problems=[f"took longer than {seconds:g} s"])
    finally:
        for _, child, _ in running.values():
            child.kill()


def _child(name: str, path: Path, connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    # What models print is not for the table.
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        made = draft(name, path)
    except Exception as error:
        made = Draft(name, problems=[f"{type(error).__name__}: {error}"])
    connection.send(asdict(made))
    connection.close()


def _received(name: str, connection: Connection, child: BaseProcess) -> Draft:
    made: dict[str, Any] | None = None
    with contextlib.suppress(EOFError):
        made = connection.recv()
    child.join()
    connection.close()
    if made is None:
        return Draft(name, problems=[f"the process ended with {child.exitcode}"])
    return Draft(**made)


def summary(drafts: Sequence[Draft]) -> list[str]:
    """Counts, then the most frequent reasons of the types that do not build, and of those not observed."""
    parts = [made for made in drafts if made.problems == [NO_CLASS]]
    unbuilt = [made for made in drafts if not made.builds and made not in parts]
    unobserved = [made for made in drafts if made.builds and not made.observed]
    warned = sum(bool(made.warnings) for made in drafts)
    lines = [
        f"{counted(len(drafts), 'model type')}",
        f"{sum(made.builds for made in drafts):5} give a model that builds",
        f"{sum(made.observed for made in drafts):5} are observed: their spec is written",
    ]
    if warned:
        lines.append(f"{warned:5} of these with warnings")
    if parts:
        lines.append(f"{len(parts):5} have no model class: each is a part of another model")
    for count, what in ((unbuilt, "not built"), (unobserved, "built, not observed")):
        if count:
            lines += [f"{len(count):5} {what}", *_reasons(count)]
    return lines


def _reasons(drafts: Sequence[Draft]) -> list[str]:
    found = Counter(_kind(made.problems[0]) for made in drafts if made.problems)
    first = found.most_common(_REASONS)
    lines = [f"      {count:5} {reason}" for reason, count in first]
    others = found.total() - sum(count for _, count in first)
    return lines + ([f"      {others:5} for other reasons"] if others else [])


def _kind(problem: str) -> str:
    """A problem without what is different in each model."""
    text = re.sub(r"^\w+: ", "", problem)
    text = re.sub(r"^\S+\.yaml(:\d+)+: ", "", text)
    text = re.sub(r"^the \w+ call \d+ raised: ", "a call raised ", text)
    text = re.sub(r"'[^']*'|\"[^\"]*\"|\b\d[\d,.]*\b|\[[^]]*\]", "_", text)
    text = re.sub(r"\b[A-Z]\w*[a-z]\w*(?= requires the| takes| got|\.)", "_", text)
    return text[:110]


def write_table(drafts: Sequence[Draft], path: Path) -> None:
    """Every draft without its text, as JSON."""
    rows = [{key: value for key, value in asdict(made).items() if key != "text"} for made in drafts]
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
