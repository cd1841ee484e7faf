"""Where conversions of other runs are kept, as options say it; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["CacheSettings"]


@dataclass(frozen=True)
class CacheSettings:
    """See `exporters.conversion_cache.ConversionCache`.

    Attributes
    ----------
    folder:
        Absolute path.
    limit:
        Bytes of all entries.
    salt:
        Digest of what else may change a conversion: the conftest files.
    """

    folder: Path
    limit: int
    salt: str = ""
