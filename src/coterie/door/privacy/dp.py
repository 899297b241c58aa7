"""Differential privacy as federations: what a client can change is bounded, and noise hides it.

``Private`` is client-level DP: changes are clipped over all their arrays jointly, every client
counts the same, the sum of each group gets Gaussian noise and a denominator that no client can
move. The server adds the noise; under secure aggregation the clients do, in shares. ``Local`` is
for methods that must look at single replies: every client adds all of the noise to its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from coterie.door.door import Answer, Door
from coterie.door.privacy.accounting import Mechanism, Sampling, epsilon, reported, rounds_within
from coterie.door.privacy.client import BIT, changes, noised
from coterie.door.privacy.entropy import Entropy
from coterie.door.privacy.form import Form, Total
from coterie.door.privacy.nbafl import downlink_sigma
from coterie.door.privacy.noise import (
    discrete_gaussian,
    enough_on_grid,
    next_bound,
    share_below,
    split_noise,
    usual_count_sigma,
)
from coterie.door.privacy.secure import Secure
from coterie.door.privacy.settings import Privacy
from coterie.errors import ConfigError
from coterie.federation import (
    Array,
    Chosen,
    ClientId,
    Mean,
    Mixing,
    Order,
    Reply,
    Slot,
    Upload,
    mix,
    vector_of,
)
from coterie.weights import Weights

COUNT_NOISE = 4.0  # on a group's number of members, in units of the noise multiplier
ROOM = 0.25  # a group counts as no smaller than this part of an equal share
FINE = 1e-12  # how far from Gaussian the sum of the clients' discrete shares may be


@dataclass
class Spending:
    """What a run has spent: releases so far, how many the last round made, and the present bound.

    ``uploads`` are those of each client, where every client adds its own noise. ``form`` is what
    sums consist of, for a round in which nobody answers, and ``since`` what they are changes of.
    """

    bound: float
    releases: int = 0
    last: int = 1
    uploads: dict[ClientId, int] = field(default_factory=dict)
    form: list[Any] = field(default_factory=list)
    since: dict[str, str] = field(default_factory=lambda: {"model": "model"})

    def to_tree(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)


@dataclass(frozen=True)
class Account:
    """The price of releases: a mechanism, and the δ at which its ε is told.

    ``budget`` is the ε that must not be exceeded, if there is one, ``noise`` the noise in units of
    the bound, ``adjacency`` the change of clients that ε is about.
    """

    mechanism: Mechanism
    delta: float
    budget: float | None = None
    most: int = 1
    noise: float = 0.0
    adjacency: str = ""

    def running(self, releases: int) -> float:
        """ε so far, by Rényi divergences: quick, and a little above what is reported."""
        return epsilon(self.mechanism, releases, self.delta, "rdp") if releases else 0.0

    def report(self, releases: int) -> dict[str, Any]:
        """ε as reported at the end, and what it means."""
        used = reported(self.mechanism)
        return {
            "epsilon": epsilon(self.mechanism, releases, self.delta) if releases else 0.0,
            "delta": self.delta,
            "releases": releases,
            "noise": self.noise or self.mechanism.multiplier,
            "accountant": used,
            "sampling": self.mechanism.sampling.kind,
            "adjacency": self.adjacency or self.mechanism.sampling.adjacency,
        }

    def fits(self, releases: int) -> bool:
        """Whether so many releases stay within the budget."""
        if self.budget is None:
            return True
        room = rounds_within(self.mechanism, self.budget, self.delta, max(releases, self.most))
        return releases <= room


def account_of(privacy: Privacy, sampling: Sampling, rounds: int) -> Account:
    """The account of a run; local noise is accounted with no help from the draw of clients.

    Two uploads of one client differ by up to twice the bound, so their noise counts half.
    """
    assert privacy.noise is not None
    assert privacy.delta is not None
    multiplier, adjacency = privacy.noise, sampling.adjacency
    if privacy.mechanism == "local":
        sampling = Sampling("all", sampling.clients, sampling.clients)
        multiplier, adjacency = multiplier / 2, "replace the data of one client"
    mechanism = Mechanism(sampling, multiplier)
    return Account(mechanism, privacy.delta, privacy.epsilon, rounds, privacy.noise, adjacency)


@dataclass
class Private:
    """A federation whose means are noised: client-level DP.

    ``begin(models)`` names the groups of a round, whether anybody of them takes part or not: a
    group that nobody is in gets noise all the same, for its silence would tell.
    """

    door: Door
    privacy: Privacy
    expected: float  # how many clients a round has on average
    entropy: Entropy
    spending: Spending
    secure: Secure | None = None
    method: str = ""
    models: Mapping[Slot, Weights] = field(default_factory=dict)
    _released: int = 0

    @property
    def clients(self) -> Sequence[ClientId]:
        """Everybody who belongs to the federation."""
        return self.door.clients

    def begin(self, models: Mapping[Slot, Weights]) -> None:
        """Another round, with these groups."""
        self.models, self._released = models, 0

    def gather(self, orders: Sequence[Order]) -> list[Reply]:
        """Replies without vectors, as for a newcomer's choice; others are refused."""
        replies = self.door.exchange(orders)
        for reply in replies:
            if reply.arrays:
                raise ConfigError(
                    f"method {self.method} looks at single clients' vectors, and what it makes of "
                    "them is not noised. Choose another method, or privacy.mechanism = local"
                )
        return list(replies)

    def average(
        self, replies: Sequence[Reply], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """Nothing can be averaged that was not shown."""
        return mix(replies, into, by_examples)

    def reduce(
        self, orders: Sequence[Order], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """The noised mean of each group, everybody counting the same."""
        if orders and all(o.apart for o in orders):
            return self.door.reduce(orders, into, by_examples)
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
        self.spending.last = 1

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
        return self.entropy.stream("noise", self.door.round, *names)

    # --- sums -----------------------------------------------------------------------------------

    def _central(
        self, orders: Sequence[Order], into: Mixing, noise: Mapping[str, float]
    ) -> dict[Slot, Total]:
        """The server clips what it received, adds it up, and noises each sum."""
        answers = self.door.exchange(orders)
        self.door.saw(answers, "means", "central noise")
        quiet = {**noise, "multiplier": 0.0, "bits": 0.0}
        sums: dict[Slot, tuple[Answer, list[ClientId], Any]] = {}
        for answer in answers:
            slot = self._slot(answer, into)
            if slot is None or not answer.arrays:
                continue
            upload = Upload(answer.arrays, {}, answer.since)
            own = changes(upload, answer.received, self.method)
            form = Form.of(own, self.door.wire.layout)
            flat = form.flat(own)
            whole = noised(flat, {**quiet, "bits": noise["bits"]}, self.privacy.bits, 0.0, bytes)
            first, people, total = sums.setdefault(slot, (answer, [], 0))
            people.append(answer.client)
            sums[slot] = first, people, total + whole
        found = {}
        for slot, (first, people, total) in sums.items():
            form = Form.of(first.arrays, self.door.wire.layout)
            found[slot] = self._total(slot, form, people, total, noise, first.since)
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
        since: Mapping[str, str],
    ) -> Total:
        """A sum with all of the noise."""
        random, bits = self._random("sum", slot), self.privacy.bits
        drawn = discrete_gaussian(
            noise["multiplier"] * noise["clip"] * 2.0**bits, form.size, random
        )
        bit = discrete_gaussian(noise["bits"] * 2 * BIT, 1, random)
        values = (total + np.append(drawn, bit)).astype(np.int64).view(np.uint64)
        return Total(form, tuple(people), (), values, bits, dict(since))

    def _silent(
        self, totals: Mapping[Slot, Total], noise: Mapping[str, float]
    ) -> dict[Slot, Total]:
        """Sums of the groups that nobody is in now: noise alone."""
        own, layout = self.spending, self.door.wire.layout
        for total in totals.values():
            own.form, own.since = total.form.to_tree(), dict(total.since)
        if own.form:
            form = Form.from_tree(own.form, layout)
        else:  # nobody has answered yet: all of a model that may travel
            model = next(iter(self.models.values()))
            form = Form.of({"model": model.only(model.layout.shareable)}, layout)
        zero = np.zeros(form.size + 1, np.int64)
        return {
            slot: self._total(slot, form, (), zero, noise, own.since)
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
        moved = np.ldexp(whole, -total.bits) / self._denominator(slot, total, noise)
        arrays = {}
        for name, change in total.form.arrays(moved).items():
            base = self._base(slot, name, change, total, orders)
            arrays[name] = change if base is None else _plus(base, change)
        return Mean(arrays, len(total.clients), total.clients, _Withheld(self.method))

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
        of = total.since.get(name, "")
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


@dataclass
class Local:
    """A federation whose clients noise their own uploads; the server may look at each of them.

    No metric leaves a client, and everybody counts the same. With NbAFL's rules the server adds
    its noise to each mean (``downlink``, a standard deviation).
    """

    door: Door
    privacy: Privacy
    entropy: Entropy
    spending: Spending
    method: str = ""
    downlink: float = 0.0

    @property
    def clients(self) -> Sequence[ClientId]:
        """Everybody who belongs to the federation."""
        return self.door.clients

    def begin(self, models: Mapping[Slot, Weights]) -> None:
        """Another round."""
        self.spending.last = 0

    def gather(self, orders: Sequence[Order]) -> list[Reply]:
        """Each reply by itself, noised."""
        return self._noised(orders, "each")

    def average(
        self, replies: Sequence[Reply], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """The same means, of replies that a rule has looked at."""
        means = mix(replies, into, by_examples)
        return {s: replace(m, metrics=_Withheld(self.method)) for s, m in means.items()}

    def reduce(
        self, orders: Sequence[Order], into: Mixing, by_examples: bool = True
    ) -> dict[Slot, Mean]:
        """Weighted means of noised replies."""
        if isinstance(into, Chosen):
            raise ConfigError(
                f"method {self.method} has each client say which group it belongs to, which its "
                "noise does not hide: use privacy.mechanism = central"
            )
        means = self.average(self._noised(orders, "means"), into, by_examples)
        if not self.downlink:
            return means
        return {
            slot: replace(mean, arrays={n: self._sent(slot, n, a) for n, a in mean.arrays.items()})
            for slot, mean in means.items()
        }

    def _noised(self, orders: Sequence[Order], asked: str) -> list[Reply]:
        before, uploads = max(self.spending.uploads.values(), default=0), self.spending.uploads
        owed = {o.client for o in orders if not o.apart}
        try:
            answers = self.door.exchange(orders)
            owed -= {a.client for a in answers if not a.arrays}
        finally:  # lost ones too, and those of an abandoned round: nobody knows who has seen them
            for client in owed:
                uploads[client] = uploads.get(client, 0) + 1
            self.spending.releases = max(uploads.values(), default=0)
            self.spending.last += self.spending.releases - before
        self.door.saw(answers, asked, "local noise")
        return [Reply(a.client, a.examples, a.arrays, _Withheld(self.method)) for a in answers]

    def _sent(self, slot: Slot, name: str, array: Array) -> Array:
        """A mean with the server's noise."""
        bits, vector = self.privacy.bits, vector_of(array)
        random = self.entropy.stream("downlink", self.door.round, slot, name)
        drawn = discrete_gaussian(self.downlink * 2.0**bits, vector.numel(), random)
        noise = torch.from_numpy(np.ldexp(drawn.astype(np.float64), -bits)).reshape(vector.shape)
        moved = (vector.double() + noise).to(vector.dtype)
        return Weights(array.layout, moved) if isinstance(array, Weights) else moved


class _Withheld(dict[str, float]):
    """Metrics that did not leave their client."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def __missing__(self, name: str) -> float:
        raise ConfigError(
            f"method {self.method} needs the number '{name}' of its clients, which no noise hides: "
            "with noise it does not leave a client. Choose another method"
        )


def downlink_of(privacy: Privacy, least_samples: int, rounds: int, clients: int) -> float:
    """The standard deviation of NbAFL's downlink noise."""
    assert privacy.epsilon is not None
    assert privacy.delta is not None
    assert privacy.exposures is not None
    return downlink_sigma(
        privacy.clip,
        least_samples,
        privacy.epsilon,
        privacy.delta,
        rounds,
        privacy.exposures,
        clients,
    )


def _plus(base: Array, change: Array) -> Array:
    if isinstance(change, Weights):
        assert isinstance(base, Weights)
        return base.part(change.layout) + change
    return vector_of(base) + vector_of(change)


def _equal(one: Array, other: Array) -> bool:
    return torch.equal(vector_of(one), vector_of(other))
