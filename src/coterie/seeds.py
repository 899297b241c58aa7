"""Derived randomness: every random choice has a seed of its own, computed from what it is for.

No generator is ever held between calls, so a result cannot depend on the number of workers, the
order of replies, the engine, or on whether the run was interrupted.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def seed_for(
    run_seed: int, purpose: str, round: int = 0, client: int = -1, stream: str = ""
) -> int:
    """A 63-bit seed for one purpose: a keyed hash of all five names, the same on every machine.

    >>> seed_for(0, "order", round=3, client=7) == seed_for(0, "order", round=3, client=7)
    True
    >>> seed_for(0, "order", round=3, client=7) == seed_for(0, "order", round=3, client=8)
    False
    """
    name = f"{run_seed}\x1f{purpose}\x1f{round}\x1f{client}\x1f{stream}".encode()
    digest = hashlib.blake2b(name, digest_size=8, person=b"coterie-seed").digest()
    return int.from_bytes(digest, "little") >> 1


def torch_generator(seed: int) -> torch.Generator:
    """A CPU generator that starts at ``seed``."""
    generator = torch.Generator()
    generator.manual_seed(seed)
    return generator


def seed_layers(seed: int, device: torch.device) -> None:
    """Seed what layers such as dropout draw from.

    On a CPU ``torch.manual_seed`` would do the same, and look at every kind of accelerator before.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.manual_seed(seed)


def numpy_generator(seed: int) -> np.random.Generator:
    """A NumPy generator (PCG64) that starts at ``seed``."""
    return np.random.Generator(np.random.PCG64(seed))
