"""Exporters that crash, hang, print, or depend on what ran before them."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time

import torch

from pytest_exportcheck.exporters.base import Exported, ExportRequest


def good(request: ExportRequest) -> Exported:
    return Exported(
        torch.export.export(request.model, (), request.kwargs, dynamic_shapes=request.dynamic_shapes)
    )


class Hostile:
    """Does something before it exports as it should."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.times = 0

    def export(self, request: ExportRequest) -> Exported:
        getattr(self, self.name.replace("-", "_"))()
        return good(request)

    def segfault(self):
        ctypes.string_at(0)

    def abort(self):
        os.abort()

    def leaves(self):
        print("leaving without a word", file=sys.stderr)
        os._exit(3)

    def killed(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def hangs(self):
        # A process of its own that outlives it, unless somebody ends it as well.
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open("grandchild", "a") as file:
            file.write(f"{child.pid}\n")
        time.sleep(600)

    def memory(self):
        # A limit that a request of this size exceeds: nothing is really allocated.
        resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))
        bytearray(1 << 41)

    def prints(self):
        for number in range(20_000):
            print(f"line {number} of many on stdout")
        os.write(2, b"straight to the descriptor\n")

    def closes(self):
        os.closerange(3, 4096)

    def history(self):
        self.times += 1
        if self.times > 1:
            raise ValueError(f"used {self.times} times")

    def always(self):
        raise ValueError("never works")


NAMES = ("segfault", "abort", "leaves", "killed", "hangs", "memory", "prints", "closes", "history", "always")


def exporters() -> dict[str, Hostile]:
    return {name: Hostile(name) for name in NAMES}
