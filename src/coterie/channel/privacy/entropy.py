"""The source of keys, shares and noise: the operating system or, in a simulation, the run's seed.

A simulation is reproducible and therefore not private: anyone who knows its seed can remove all
masks. Its results say "simulated".
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from coterie.core.schema import Randomness
from coterie.errors import ConfigError, unknown

Random = Callable[[int], bytes]
KINDS: tuple[str, ...] = get_args(Randomness)


@dataclass(frozen=True)
class Entropy:
    """Makes streams of random bytes for named purposes; the names matter in simulations only.

    >>> Entropy("simulated", 7).stream("noise", 3, 1)(4) == Entropy("simulated", 7).stream(
    ...     "noise", 3, 1)(4)
    True
    >>> Entropy("system").stream("noise")(16) == Entropy("system").stream("noise")(16)
    False
    """

    kind: str = "simulated"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(unknown("privacy.randomness", self.kind, KINDS))

    def stream(self, *names: object) -> Random:
        """A source of random bytes for one purpose; in a simulation it is reproducible."""
        if self.kind == "system":
            return os.urandom
        name = "\x1f".join(str(n) for n in ("coterie-entropy", self.seed, *names)).encode()
        calls = 0

        def random(count: int) -> bytes:
            nonlocal calls
            calls += 1
            return hashlib.shake_256(name + calls.to_bytes(8, "little")).digest(count)

        return random
