"""Client-level differential privacy: bounds each client's contribution and hides it by noise.

A client's change is clipped over all its arrays jointly, and all clients count equally. The sum of
each group gets Gaussian noise and a denominator that no client can influence. The server adds the
noise; under secure aggregation the clients do, each a share of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from coterie.channel.channel import Channel, Plain, Release
from coterie.channel.compression.coding import laid_on
from coterie.channel.exchange import Answer
from coterie.channel.privacy.client import changes
from coterie.channel.privacy.client_noise import BIT, noised
from coterie.channel.privacy.encoding import Form, Total
from coterie.channel.privacy.entropy import Entropy
from coterie.channel.privacy.noise import (
    discrete_gaussian,
    fine_on_grid,
    next_bound,
    share_below,
    split_noise,
    usual_count_sigma,
)
from coterie.channel.privacy.secure_sums import Secure
from coterie.channel.privacy.settings import Privacy
from coterie.channel.privacy.spending import Spending, Withheld
from coterie.core.messages import (
    Array,
    Chosen,
    ClientId,
    Mean,
    Mixing,
    Order,
    Reply,
    Slot,
    Upload,
    vector_of,
)
from coterie.core.weights import Weights
from coterie.errors import ConfigError

COUNT_NOISE = 4.0  # on a group's number of members, in units of the noise multiplier
ROOM = 0.25  # the smallest size that a group counts as, as a fraction of an equal share


@dataclass
class Private(Release):
    """A release of means with noise, for client-level differential privacy.

    ``begin(models)`` names the groups of a round, whether any of their clients takes part or not: a
    group without participants gets noise as well, because its absence would be informative.
    """

    channel: Channel
    privacy: Privacy
    expected: float  # how many clients a round has on average
    entropy: Entropy
    spending: Spending
    secure: Secure | None = None
    method: str = ""
    models: Mapping[Slot, Weights] = field(default_factory=dict)
    _released: int = 0

    def begin(self, models: Mapping[Slot, Weights]) -> None:
        """Begin a round with these groups."""
        self.models, self._released = models, 0

    def gather(self, orders: Sequence[Order]) -> list[Reply]:
        """The replies of newcomers after the last release; other single replies are refused."""
        if orders and self.channel.phase.name != "admit":
            raise ConfigError(
                f"method {self.method} uses single clients' replies (task '{orders[0].task}'), to "
                "which no noise is added. Choose another method, or privacy.mechanism = local"
            )
        return list(self.channel.exchange(orders))

    def reduce(
        self, orders: Sequence[Order], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """The noised mean of each group, in which all clients count equally."""
        if orders and all(o.unmetered for o in orders):
            return Plain(self.channel).reduce(orders, into, by_examples)
        self._release()
        noise = self._noise()
        if self.secure is None:
            totals = self._central(orders, into, noise)
        else:
            totals = self.secure.sums(orders, into, False, noise)
        totals |= self._silent(totals, noise)
        self._follow(totals, noise)
        by_client = {o.client: o for o in orders}
        return {s: self._mean(s, t, by_client, noise) for s, t in totals.items()}

    def _release(self) -> None:
        if not self.models:
            raise ConfigError(
                f"method {self.method} asks for means of all clients before the first round, but ε "
                "accounts for rounds only. Choose another method, or privacy.mechanism = local"
            )
        self._released += 1
        if self._released > 1:
            raise ConfigError(
                f"method {self.method} asks for means {self._released} times in one round, but ε "
                "accounts for one mean of each sample of clients. Choose another method"
            )
        self.spending.releases += 1

    def _noise(self) -> dict[str, float]:
        """The noise for the changes, reduced by the noise for the bits and the counts."""
        multiplier = self.privacy.noise or 0.0
        bits = usual_count_sigma(self.expected) if self.privacy.follows is not None else 0.0
        for_changes = split_noise(multiplier, bits) if bits else multiplier
        count = COUNT_NOISE * multiplier if len(self.models) > 1 else 0.0
        if count:  # a member changes its group's count by 1, twice as much as a centred bit
            for_changes = split_noise(for_changes, count / 2)
        return {
            "clip": self.spending.bound,
            "multiplier": for_changes,
            "bits": bits,
            "counts": count,
        }

    def _random(self, *names: object) -> Any:
        return self.entropy.stream("noise", self.channel.phase.round, *names)

    # --- sums -----------------------------------------------------------------------------------

    def _central(
        self, orders: Sequence[Order], into: Mixing, noise: Mapping[str, float]
    ) -> dict[Slot, Total]:
        """Clip and sum the received changes, and add the server's noise to each sum."""
        answers = self.channel.exchange(orders)
        self.channel.records.saw(answers, "means", "central noise")
        quiet = {**noise, "multiplier": 0.0, "bits": 0.0}
        sums: dict[Slot, tuple[Answer, list[ClientId], Any]] = {}
        for answer in answers:
            slot = self._slot(answer, into)
            if slot is None or not answer.arrays:
                continue
            upload = Upload(answer.arrays, {}, answer.delta_of)
            arrays = changes(upload, answer.received, self.method)
            form = Form.of(arrays, self.channel.wire.layout)
            flat = form.flat(arrays)
            clipped = noised(flat, {**quiet, "bits": noise["bits"]}, self.privacy.bits, 0.0, bytes)
            first, clients, total = sums.setdefault(slot, (answer, [], 0))
            clients.append(answer.client)
            sums[slot] = first, clients, total + clipped
        totals = {}
        for slot, (first, clients, total) in sums.items():
            form = Form.of(first.arrays, self.channel.wire.layout)
            totals[slot] = self._total(slot, form, clients, total, noise, first.delta_of)
        return totals

    def _slot(self, answer: Answer, into: Mixing) -> Slot | None:
        if isinstance(into, Chosen):
            return int(answer.metrics[into.metric])
        row = [s for s, w in into.get(answer.client, {}).items() if w > 0]
        if len(row) > 1:
            raise ConfigError(
                f"method {self.method} adds client {answer.client} to {len(row)} sums at once, but "
                "the noise is for one. Choose another method"
            )
        return row[0] if row else None

    def _total(
        self,
        slot: Slot,
        form: Form,
        clients: Sequence[ClientId],
        total: Any,
        noise: Mapping[str, float],
        delta_of: Mapping[str, str],
    ) -> Total:
        """A sum with noise."""
        random, bits = self._random("sum", slot), self.privacy.bits
        drawn = discrete_gaussian(
            noise["multiplier"] * noise["clip"] * 2.0**bits, form.size, random
        )
        bit = discrete_gaussian(noise["bits"] * 2 * BIT, 1, random)
        values = (total + np.append(drawn, bit)).astype(np.int64).view(np.uint64)
        return Total(form, tuple(clients), (), values, bits, dict(delta_of))

    def _silent(
        self, totals: Mapping[Slot, Total], noise: Mapping[str, float]
    ) -> dict[Slot, Total]:
        """Sums of noise alone, for the groups without participants in this round."""
        last, layout = self.spending, self.channel.wire.layout
        for total in totals.values():
            last.form, last.delta_of = total.form.to_tree(), dict(total.delta_of)
        if last.form:
            form = Form.from_tree(last.form, layout)
        else:  # no client has answered yet: use all shareable layers of a model
            model = next(iter(self.models.values()))
            form = Form.of({"model": model.only(model.layout.shareable)}, layout)
        zero = np.zeros(form.size + 1, np.int64)
        return {
            slot: self._total(slot, form, (), zero, noise, last.delta_of)
            for slot in self.models
            if slot not in totals
        }

    # --- means ----------------------------------------------------------------------------------

    def _mean(
        self,
        slot: Slot,
        total: Total,
        orders: Mapping[ClientId, Order],
        noise: Mapping[str, float],
    ) -> Mean:
        """The group's new arrays: the noised sum over a noised count, added to the base."""
        if self.secure is not None and total.clients:
            self._check_grid(total, noise)
        integers = total.values[: total.form.size].view(np.int64).astype(np.float64)
        count = self._denominator(slot, total, noise)
        changed = np.ldexp(integers, -total.bits) / count
        arrays = {}
        for name, change in total.form.arrays(changed).items():
            base = self._base(slot, name, change, total, orders)
            arrays[name] = laid_on(change, base)
        return Mean(arrays, round(count), total.clients, Withheld(self.method))

    def _denominator(self, slot: Slot, total: Total, noise: Mapping[str, float]) -> float:
        """The expected number of participants or, with several groups, this group's noised one."""
        if len(self.models) <= 1:
            return self.expected
        drawn = discrete_gaussian(noise["counts"], 1, self._random("count", slot))
        fair = self.expected / len(self.models)
        return max(float(len(total.clients) + drawn[0]), ROOM * fair)

    def _base(
        self,
        slot: Slot,
        name: str,
        change: Array,
        total: Total,
        orders: Mapping[ClientId, Order],
    ) -> Array | None:
        """The base of a sum's change, which must be the same for all clients in the sum."""
        of = total.delta_of.get(name, "")
        if not of:
            return None
        if not total.clients:
            model = self.models[slot]
            return model.part(change.layout) if isinstance(change, Weights) else None
        bases = [orders[c].arrays[of] for c in total.clients]
        if any(base is not bases[0] and not _equal(base, bases[0]) for base in bases):
            raise ConfigError(
                f"method {self.method} sends clients of one group different models, so a sum of "
                "their changes has no meaning. Choose another method"
            )
        return bases[0]

    def _check_grid(self, total: Total, noise: Mapping[str, float]) -> None:
        """Refuse noise that is too coarse on the grid to be nearly Gaussian."""
        sigma = noise["multiplier"] * noise["clip"] * 2.0**total.bits
        if not fine_on_grid(sigma, len(total.clients), total.form.size):
            raise ConfigError(
                f"noise of {sigma:.3g} grid steps, shared by {len(total.clients)} clients, is too "
                f"coarse to count as Gaussian: raise privacy.bits above {total.bits}"
            )

    def _follow(self, totals: Mapping[Slot, Total], noise: Mapping[str, float]) -> None:
        """Move the clipping bound towards its quantile, using the noised bits."""
        target = self.privacy.follows
        if target is None or not totals:
            return
        bits = sum(int(t.values[-1:].view(np.int64)[0]) for t in totals.values()) / (2 * BIT)
        below = min(1.0, max(0.0, share_below(bits, self.expected)))
        self.spending.bound = next_bound(self.spending.bound, below, target, self.privacy.clip_rate)


def _equal(one: Array, other: Array) -> bool:
    return torch.equal(vector_of(one), vector_of(other))
