"""Configuration of the project's own tests and of its own main job."""

from __future__ import annotations

import os

# Before torch is imported anywhere: one thread per worker, and no network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

pytest_plugins = ["pytester"]
