"""Random numbers that depend on the spec alone, and leave the global generators as they were."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["seeded", "stable_seed"]


def stable_seed(key: str) -> int:
    """A 63-bit seed from text, the same in every process (`hash` is not)."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch, numpy and random inside the block; restore all of them behind it.

    Only the generators of the CPU and of `device` are touched: seeding every GPU, as `torch.manual_seed`
    does, would initialise CUDA later in a process that never asked for it.
    """
    import numpy as np
    import torch

    cuda = device.type == "cuda"
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    cuda_state = torch.cuda.get_rng_state(device) if cuda else None
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    if cuda:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)
