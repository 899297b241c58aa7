"""Client-level DP as a federation: what a client can change is bounded, and noise hides it.

Changes are clipped over all their arrays jointly, every client
counts the same, the sum of each group gets Gaussian noise and a denominator that no client can
move. The server adds the noise; under secure aggregation the clients do, in shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from coterie.channel.compression.coding import laid_on
from coterie.channel.disclosure import Disclosure
from coterie.channel.exchange import Answer
from coterie.channel.privacy.client import BIT, changes, noised
from coterie.channel.privacy.encoding import Form, Total
from coterie.channel.privacy.entropy import Entropy
from coterie.channel.privacy.noise import (
    discrete_gaussian,
    enough_on_grid,
    next_bound,
    share_below,
    split_noise,
    usual_count_sigma,
)
from coterie.channel.privacy.secure_sums import Secure
from coterie.channel.privacy.settings import Privacy
from coterie.channel.privacy.spending import Spending, Withheld
from coterie.channel.release import Plain, Release
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

if TYPE_CHECKING:
    from coterie.channel.channel import Channel

COUNT_NOISE = 4.0  # on a group's number of members, in units of the noise multiplier
ROOM = 0.25  # a group counts as no smaller than this part of an equal share
FINE = 1e-12  # how far from Gaussian the sum of the clients' discrete shares may be


@dataclass
class Private(Release):
    """A federation whose means are noised: client-level DP.

    ``begin(models)`` names the groups of a round, whether anybody of them takes part or not: a
    group that nobody is in gets noise all the same, for its silence would tell.
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
        """Another round, with these groups."""
        self.models, self._released = models, 0

    def gather(self, orders: Sequence[Order]) -> list[Reply]:
        """What newcomers say, who come after the last release; before it nothing of one client."""
        if orders and self.channel.phase.name != "admit":
            raise ConfigError(
                f"method {self.method} asks for single clients' replies (task '{orders[0].task}'), "
                "and what it makes of them is not noised. Choose another method, or "
                "privacy.mechanism = local"
            )
        return list(self.channel.exchange(orders))

    def reduce(
        self, orders: Sequence[Order], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """The noised mean of each group, everybody counting the same."""
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
                f"method {self.method} asks for means before the first round, of everybody: ε "
                "accounts for rounds only. Choose another method, or privacy.mechanism = local"
            )
        self._released += 1
        if self._released > 1:
            raise ConfigError(
                f"method {self.method} asks for means {self._released} times in one round, of one "
                "draw of clients: ε accounts for one. Choose another method"
            )
        self.spending.releases += 1

    def _noise(self) -> dict[str, float]:
        """How much noise the changes get, once the bits and the counts have had their share."""
        multiplier = self.privacy.noise or 0.0
        bits = usual_count_sigma(self.expected) if self.privacy.follows is not None else 0.0
        found = split_noise(multiplier, bits) if bits else multiplier
        count = COUNT_NOISE * multiplier if len(self.models) > 1 else 0.0
        if count:  # a member moves its group's count by 1, twice what it moves a centred bit by
            found = split_noise(found, count / 2)
        return {
            "clip": self.spending.bound,
            "multiplier": found,
            "bits": bits,
            "counts": count,
        }

    def _random(self, *names: object) -> Any:
        return self.entropy.stream("noise", self.channel.phase.round, *names)

    # --- sums -----------------------------------------------------------------------------------

    def _central(
        self, orders: Sequence[Order], into: Mixing, noise: Mapping[str, float]
    ) -> dict[Slot, Total]:
        """The server clips what it received, adds it up, and noises each sum."""
        answers = self.channel.exchange(orders)
        self.channel.stage(Disclosure).saw(answers, "means", "central noise")
        quiet = {**noise, "multiplier": 0.0, "bits": 0.0}
        sums: dict[Slot, tuple[Answer, list[ClientId], Any]] = {}
        for answer in answers:
            slot = self._slot(answer, into)
            if slot is None or not answer.arrays:
                continue
            upload = Upload(answer.arrays, {}, answer.delta_of)
            own = changes(upload, answer.received, self.method)
            form = Form.of(own, self.channel.wire.layout)
            flat = form.flat(own)
            whole = noised(flat, {**quiet, "bits": noise["bits"]}, self.privacy.bits, 0.0, bytes)
            first, people, total = sums.setdefault(slot, (answer, [], 0))
            people.append(answer.client)
            sums[slot] = first, people, total + whole
        found = {}
        for slot, (first, people, total) in sums.items():
            form = Form.of(first.arrays, self.channel.wire.layout)
            found[slot] = self._total(slot, form, people, total, noise, first.delta_of)
        return found

    def _slot(self, answer: Answer, into: Mixing) -> Slot | None:
        if isinstance(into, Chosen):
            return int(answer.metrics[into.metric])
        row = [s for s, w in into.get(answer.client, {}).items() if w > 0]
        if len(row) > 1:
            raise ConfigError(
                f"method {self.method} adds client {answer.client} to {len(row)} sums at once: the "
                "noise is for one. Choose another method"
            )
        return row[0] if row else None

    def _total(
        self,
        slot: Slot,
        form: Form,
        people: Sequence[ClientId],
        total: Any,
        noise: Mapping[str, float],
        delta_of: Mapping[str, str],
    ) -> Total:
        """A sum with all of the noise."""
        random, bits = self._random("sum", slot), self.privacy.bits
        drawn = discrete_gaussian(
            noise["multiplier"] * noise["clip"] * 2.0**bits, form.size, random
        )
        bit = discrete_gaussian(noise["bits"] * 2 * BIT, 1, random)
        values = (total + np.append(drawn, bit)).astype(np.int64).view(np.uint64)
        return Total(form, tuple(people), (), values, bits, dict(delta_of))

    def _silent(
        self, totals: Mapping[Slot, Total], noise: Mapping[str, float]
    ) -> dict[Slot, Total]:
        """Sums of the groups that nobody is in now: noise alone."""
        own, layout = self.spending, self.channel.wire.layout
        for total in totals.values():
            own.form, own.delta_of = total.form.to_tree(), dict(total.delta_of)
        if own.form:
            form = Form.from_tree(own.form, layout)
        else:  # nobody has answered yet: all of a model that may travel
            model = next(iter(self.models.values()))
            form = Form.of({"model": model.only(model.layout.shareable)}, layout)
        zero = np.zeros(form.size + 1, np.int64)
        return {
            slot: self._total(slot, form, (), zero, noise, own.delta_of)
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
        """What the group's model moves to: its change is the noised sum by a noised number."""
        if self.secure is not None and total.clients:
            self._fine(total, noise)
        whole = total.values[: total.form.size].view(np.int64).astype(np.float64)
        count = self._denominator(slot, total, noise)
        moved = np.ldexp(whole, -total.bits) / count
        arrays = {}
        for name, change in total.form.arrays(moved).items():
            base = self._base(slot, name, change, total, orders)
            arrays[name] = laid_on(change, base)
        return Mean(arrays, round(count), total.clients, Withheld(self.method))

    def _denominator(self, slot: Slot, total: Total, noise: Mapping[str, float]) -> float:
        """The expected number of members; of several groups, each one's own, noised."""
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
        """What a sum's change is a change of: the same for all of its members."""
        of = total.delta_of.get(name, "")
        if not of:
            return None
        if not total.clients:
            model = self.models[slot]
            return model.part(change.layout) if isinstance(change, Weights) else None
        found = [orders[c].arrays[of] for c in total.clients]
        if any(f is not found[0] and not _equal(f, found[0]) for f in found):
            raise ConfigError(
                f"method {self.method} sends clients of one group different models: a sum of their "
                "changes means nothing. Choose another method"
            )
        return found[0]

    def _fine(self, total: Total, noise: Mapping[str, float]) -> None:
        sigma = noise["multiplier"] * noise["clip"] * 2.0**total.bits
        if total.form.size * enough_on_grid(sigma, len(total.clients)) > FINE:
            raise ConfigError(
                f"noise of {sigma:.3g} grid steps, shared by {len(total.clients)} clients, is too "
                f"coarse to count as Gaussian: raise privacy.bits above {total.bits}"
            )

    def _follow(self, totals: Mapping[Slot, Total], noise: Mapping[str, float]) -> None:
        """Let the bound follow its quantile, by what the noised bits say."""
        target = self.privacy.follows
        if target is None or not totals:
            return
        bits = sum(int(t.values[-1:].view(np.int64)[0]) for t in totals.values()) / (2 * BIT)
        below = min(1.0, max(0.0, share_below(bits, self.expected)))
        self.spending.bound = next_bound(self.spending.bound, below, target, self.privacy.clip_rate)


def _equal(one: Array, other: Array) -> bool:
    return torch.equal(vector_of(one), vector_of(other))
