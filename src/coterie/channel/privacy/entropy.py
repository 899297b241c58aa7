"""Where keys, shares and noise come from: the operating system, or, in a simulation, seeds.

A simulation is repeatable, and so is not private: whoever knows its seed can take every mask off.
Its results say "simulated".
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
    """Random bytes by what they are for; only a simulation looks at the names.

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
        """A source of random bytes for one purpose; in a simulation the same in every run."""
        if self.kind == "system":
            return os.urandom
        name = "\x1f".join(str(n) for n in ("coterie-entropy", self.seed, *names)).encode()
        drawn = 0

        def random(count: int) -> bytes:
            nonlocal drawn
            drawn += 1
            return hashlib.shake_256(name + drawn.to_bytes(8, "little")).digest(count)

        return random
