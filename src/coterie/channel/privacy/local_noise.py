"""Local noise, which clients add to their own uploads, for methods that use single uploads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from coterie.channel.channel import Channel, Release
from coterie.channel.privacy.entropy import Entropy
from coterie.channel.privacy.nbafl import downlink_sigma
from coterie.channel.privacy.noise import discrete_gaussian
from coterie.channel.privacy.settings import Privacy
from coterie.channel.privacy.spending import Spending, Withheld
from coterie.core.aggregate import mix
from coterie.core.messages import Array, Chosen, Mean, Mixing, Order, Reply, Slot, vector_of
from coterie.core.weights import Weights
from coterie.errors import Abandoned, ConfigError


@dataclass
class LocalNoise(Release):
    """A release in which clients add noise to their uploads, so the server may use each of them.

    No metrics leave a client, and all clients count equally. ``fits`` says whether a number of
    uploads of one client stays within the budget. With NbAFL's rules the server also adds noise to
    the mean, of which there must be only one; ``downlink`` is its standard deviation.
    """

    channel: Channel
    privacy: Privacy
    entropy: Entropy
    spending: Spending
    fits: Callable[[int], bool]
    method: str = ""
    downlink: float = 0.0

    def gather(self, orders: Sequence[Order]) -> list[Reply]:
        """The single replies, with the clients' noise."""
        return self._noised(orders, "each")

    def average(
        self, replies: Sequence[Reply], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """The weighted means of replies that have been gathered."""
        means = mix(replies, into, by_examples)
        return {s: replace(m, metrics=Withheld(self.method)) for s, m in means.items()}

    def reduce(
        self, orders: Sequence[Order], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """The weighted means of replies with the clients' noise."""
        if isinstance(into, Chosen):
            raise ConfigError(
                f"method {self.method} has each client report its group, which local noise does "
                "not hide: use privacy.mechanism = central"
            )
        if self.privacy.mechanism == "nbafl" and len({s for row in into.values() for s in row}) > 1:
            raise ConfigError(
                f"method {self.method} asks for means of several groups, but NbAFL's noise is for "
                "one mean of all clients. Choose another method or mechanism"
            )
        means = self.average(self._noised(orders, "means"), into, by_examples)
        if not self.downlink:
            return means
        return {
            slot: replace(
                mean, arrays={n: self._with_noise(slot, n, a) for n, a in mean.arrays.items()}
            )
            for slot, mean in means.items()
        }

    def _noised(self, orders: Sequence[Order], use: str) -> list[Reply]:
        uploads = self.spending.uploads
        charged = {o.client for o in orders if not o.unmetered}
        if not self.fits(1 + max((uploads.get(c, 0) for c in charged), default=0)):
            why = f"method {self.method} asks for more uploads than the privacy budget allows"
            raise (Abandoned if self.channel.phase.cohort else ConfigError)(why)
        try:
            answers = self.channel.exchange(orders)
            charged -= {a.client for a in answers if not a.arrays}
        finally:  # lost and abandoned uploads count too, since somebody may have seen them
            for client in charged:
                uploads[client] = uploads.get(client, 0) + 1
            self.spending.releases = max(uploads.values(), default=0)
        self._refuse_shapes(answers)
        self.channel.records.saw(answers, use, "local noise")
        return [Reply(a.client, a.examples, a.arrays, Withheld(self.method)) for a in answers]

    def _refuse_shapes(self, answers: Sequence[Reply]) -> None:
        """Refuse arrays whose shapes differ among clients, since noise does not hide a shape."""
        shapes: dict[str, torch.Size] = {}
        for answer in answers:
            for name, array in answer.arrays.items():
                if shapes.setdefault(name, vector_of(array).shape) != vector_of(array).shape:
                    raise ConfigError(
                        f"method {self.method} sends '{name}' in a shape that depends on a "
                        "client's data, which noise does not hide. Choose another method"
                    )

    def _with_noise(self, slot: Slot, name: str, array: Array) -> Array:
        """Add the server's noise to an array of the mean."""
        bits, vector = self.privacy.bits, vector_of(array)
        random = self.entropy.stream("downlink", self.channel.phase.round, slot, name)
        drawn = discrete_gaussian(self.downlink * 2.0**bits, vector.numel(), random)
        noise = torch.from_numpy(np.ldexp(drawn.astype(np.float64), -bits)).reshape(vector.shape)
        result = (vector.double() + noise).to(vector.dtype)
        return Weights(array.layout, result) if isinstance(array, Weights) else result


def downlink_of(privacy: Privacy, least_samples: int, clients: int) -> float:
    """The standard deviation of NbAFL's downlink noise."""
    assert privacy.epsilon is not None
    assert privacy.delta is not None
    assert privacy.exposures is not None
    assert privacy.aggregations is not None
    return downlink_sigma(
        privacy.clip,
        least_samples,
        privacy.epsilon,
        privacy.delta,
        privacy.aggregations,
        privacy.exposures,
        clients,
    )
