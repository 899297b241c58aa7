"""Derived randomness: every random choice has its own seed, computed from its purpose.

No generator is kept between calls, so that results do not depend on the number of workers, the
order of replies, the engine, or interruptions of the run.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def seed_for(
    run_seed: int, purpose: str, round: int = 0, client: int = -1, stream: str = ""
) -> int:
    """A 63-bit seed for one purpose: a keyed hash of all arguments, the same on every machine.

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
    """Seed the generators that layers such as dropout use.

    On a CPU, ``torch.manual_seed`` would do the same, but check all types of accelerators first.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.manual_seed(seed)


def numpy_generator(seed: int) -> np.random.Generator:
    """A NumPy generator (PCG64) that starts at ``seed``."""
    return np.random.Generator(np.random.PCG64(seed))
