"""Golden files on disk: where they are, who may write them, which are obsolete.

Workers only propose (the proposal travels on the test report); the controller writes, once, at the end of
the session. Nothing here knows what a golden says.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .spec import ModelSpec

__all__ = ["FOLDER", "Golden", "Proposals", "golden_of", "obsolete_goldens", "write_atomically"]

#: Folder of the golden files, beside the specs.
FOLDER = "__shapes__"

_SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__", "build", "dist"})


@dataclass(frozen=True)
class Golden:
    """The golden file of one spec.

    Attributes
    ----------
    path:
        Absolute path; the file may be missing.
    relative:
        The same, relative to the root directory, with forward slashes.
    """

    path: Path
    relative: str

    @property
    def display(self) -> str:
        """How messages name the file."""
        return self.relative

    def read(self) -> str | None:
        """The accepted text, ``None`` if nothing was accepted yet."""
        try:
            return self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None


def golden_of(spec: ModelSpec) -> Golden:
    """Where the golden of `spec` belongs: ``<folder>/__shapes__/<stem>.yaml``."""
    folder, _, name = spec.relative.rpartition("/")
    stem = name.rsplit(".", 1)[0]
    relative = "/".join(part for part in (folder, FOLDER, f"{stem}.yaml") if part)
    return Golden(Path(spec.path).parent / FOLDER / f"{stem}.yaml", relative)


@dataclass
class Proposals:
    """What the cells of this run propose, by golden file.

    Attributes
    ----------
    texts:
        Golden path -> text -> the cells that propose it.
    changed:
        Golden paths for which at least one cell proposes something else than what is accepted.
    """

    texts: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)

    def add(self, golden: Mapping[str, object], cell: str) -> None:
        """Note one cell's proposal, as found on a report."""
        path, text = str(golden["path"]), str(golden["text"])
        cells = self.texts.setdefault(path, {}).setdefault(text, [])
        if cell not in cells:
            cells.append(cell)
        if golden["changed"]:
            self.changed.add(path)

    def write(self, root: Path) -> tuple[list[str], list[str]]:
        """Write every golden that changed and on which the cells agree.

        Returns
        -------
        The paths written, and one message per golden that was not.
        """
        written, errors = [], []
        for relative in sorted(self.changed):
            texts = self.texts[relative]
            if len(texts) > 1:
                cells = " and ".join(f"{members[0]}" for members in texts.values())
                errors.append(
                    f"{relative} not written: {cells} propose different shapes for it. Make the cells agree, "
                    "or give them a spec each"
                )
                continue
            try:
                write_atomically(root / relative, next(iter(texts)))
            except OSError as error:
                errors.append(f"{relative} not written: {error.strerror or error}")
            else:
                written.append(relative)
        return written, errors


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that readers see the old or the new content, and no temporary file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        new.write_text(text, encoding="utf-8", newline="\n")
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise


def obsolete_goldens(folders: Iterable[Path]) -> list[Path]:
    """Golden files at or below `folders` whose spec is gone, sorted. Specs that are broken still count."""
    from .spec import is_spec_file, mistyped_key

    found = []
    for shapes in sorted({shapes for folder in folders for shapes in _shape_folders(folder)}):
        for golden in sorted(shapes.glob("*.yaml")):
            specs = (shapes.parent / f"{golden.stem}{suffix}" for suffix in (".yaml", ".yml"))
            if not any(is_spec_file(spec) or mistyped_key(spec) for spec in specs):
                found.append(golden)
    return found


def _shape_folders(folder: Path) -> Iterator[Path]:
    for current, subfolders, files in os.walk(folder):
        if "pyvenv.cfg" in files:
            subfolders.clear()
            continue
        if FOLDER in subfolders:
            yield Path(current, FOLDER)
        subfolders[:] = [
            name
            for name in subfolders
            if name != FOLDER and not name.startswith(".") and name not in _SKIPPED_FOLDERS
        ]
