"""The files of the cache: one per entry, a manifest in JSON and one part of bytes, nothing that is unpickled.

A file is believed only if its manifest holds the very key that is asked for and its checksum is right;
anything else is ignored with a word.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["CacheFiles", "Refused", "first_line"]

#: Of what a file holds; another one is not read.
FORMAT = 1

_MANIFEST = "manifest.json"

#: A temporary file of this age, in seconds, was left by a process that died.
_STALE = 3600.0

#: Protobuf takes no message of 2 GiB.
_LARGEST = 1_500_000_000

Found = TypeVar("Found")


class Refused(Exception):
    """The text says what is wrong with an entry."""


class CacheFiles:
    """The entries of one kind in a directory.

    Parameters
    ----------
    folder:
        Made at the first entry.
    limit:
        Bytes of all entries, of every kind; beyond it those that were not used for longest are removed.
    kind:
        What an entry is, as a word: the suffix of its file.
    part:
        Name of the bytes beside the manifest.
    """

    def __init__(self, folder: Path, limit: int, kind: str, part: str) -> None:
        self.folder = folder
        self._limit = limit
        self._kind = kind
        self._part = part
        self._said: set[str] = set()

    def path(self, key: Mapping[str, Any]) -> Path:
        """The file of an entry."""
        name = hashlib.sha256(canonical(key)).hexdigest()
        return self.folder / name[:2] / f"{name}.{self._kind}"

    def read(
        self, key: Mapping[str, Any], use: Callable[[dict[str, Any], bytes], Found]
    ) -> tuple[Found | None, list[str]]:
        """(what `use` makes of manifest and bytes, or ``None``; a word on an entry that cannot be used)."""
        path = self.path(key)
        try:
            with open(path, "rb") as file:
                found = use(*self._read(file, key))
        except FileNotFoundError:
            return None, []
        except Refused as refused:
            return None, [f"{path} is ignored: {refused}"]
        except Exception as error:
            return None, [f"{path} is ignored: {first_line(error)}"]
        with contextlib.suppress(OSError):
            os.utime(path)  # It was used.
        return found, []

    def _read(self, file: Any, key: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
        try:
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
                stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
                if [entry.filename for entry in entries] != [_MANIFEST, self._part] or not stored:
                    raise Refused("it is no entry of this cache")
                manifest = json.loads(archive.read(_MANIFEST))
                data = archive.read(self._part)
        except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError) as error:
            raise Refused(f"it is damaged ({first_line(error)})") from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise Refused("it has another format")
        if manifest.get("key") != json.loads(canonical(key)):
            raise Refused("it was made for something else")
        if hashlib.sha256(data).hexdigest() != manifest.get("sha256"):
            raise Refused("its checksum is wrong")
        return manifest, data

    def write(self, key: Mapping[str, Any], make: Callable[[], tuple[Mapping[str, Any], bytes]]) -> list[str]:
        """Keep manifest (without key and checksum) and bytes of `make`; a word if not, once per reason."""
        path = self.path(key)
        try:
            manifest, data = make()
            if len(data) > min(_LARGEST, self._limit):
                return []
            digest = hashlib.sha256(data).hexdigest()
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write(path, {"format": FORMAT, "key": key, "sha256": digest, **manifest}, data)
            self._bound()
        except OSError as error:
            text = f"{self.folder} keeps no {self._kind}s: {error.strerror or error}"
            if text in self._said:
                return []
            self._said.add(text)
            return [text]
        return []

    def _write(self, path: Path, manifest: Mapping[str, Any], data: bytes) -> None:
        descriptor, name = tempfile.mkstemp(prefix=".", suffix=".new", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                    archive.writestr(_MANIFEST, canonical(manifest))
                    archive.writestr(self._part, data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    def _bound(self) -> None:
        """Remove what was not used for longest, until the rest is within the limit."""
        entries: list[tuple[float, int, Path]] = []
        now = time.time()
        for folder in self.folder.glob("??"):
            for file in folder.iterdir():
                with contextlib.suppress(OSError):  # another process removed it
                    seen = file.stat()
                    if file.suffix in (".conversion", ".capture"):
                        entries.append((seen.st_mtime, seen.st_size, file))
                    elif file.suffix == ".new" and now - seen.st_mtime > _STALE:
                        file.unlink()
        size = sum(entry[1] for entry in entries)
        for _, bytes_, file in sorted(entries):
            if size <= self._limit:
                break
            with contextlib.suppress(OSError):
                file.unlink()
            size -= bytes_


def canonical(value: Any) -> bytes:
    """JSON, the same for equal values."""
    return json.dumps(value, sort_keys=True, ensure_ascii=True).encode()


def first_line(error: BaseException) -> str:
    """``ValueError: the first line``."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
