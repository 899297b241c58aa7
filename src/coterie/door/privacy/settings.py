"""What a run asks of privacy, and what does not go together with it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from coterie.door.policy import Policy, cohort_size
from coterie.door.privacy.entropy import KINDS
from coterie.errors import ConfigError, unknown
from coterie.weights import Layout

MECHANISMS = ("central", "local", "nbafl")
CLIPPINGS = ("fixed", "median", "quantile")
REVEALS = ("", "final-layer")
FEW = ("refuse", "skip")


@dataclass(frozen=True)
class Privacy:
    """Secure aggregation, and noise.

    ``secure``: the server learns sums only, each of at least ``min_group`` clients; what it does
    with ``small_groups`` is to "refuse" or to "skip" them. ``threshold`` is the share of a group
    that must stay to the end, ``neighbours`` with how many others each client shares masks (0: with
    all), ``bits`` the fixed-point digits behind the point. With ``same_orders`` clients unmask a
    sum only if all in it were sent the same order: other models to others could single one out.
    ``reveal`` names what single clients may show all the same.

    Noise is on when ``epsilon`` (a budget) or ``noise`` (its standard deviation on a sum, in units
    of the clipping bound) is given. ``mechanism`` says who adds it: the server ("central"; with
    ``secure`` the clients, in shares), each client for itself ("local"), or client and server by
    NbAFL's rules. ``clip`` bounds a client's change (NbAFL: its weights), as given ("fixed") or as
    the start of a bound that follows a ``quantile`` of the clients' norms (0.5 for "median").
    ``exposures`` are NbAFL's L, how many of a client's uploads others see, and ``aggregations`` its
    T, how many rounds there are. ``randomness`` is where keys and noise come from.
    """

    secure: bool = False
    min_group: int = 3
    threshold: float = 2 / 3
    neighbours: int = 0
    bits: int = 24
    reveal: str = ""
    small_groups: str = "refuse"
    same_orders: bool = True
    mechanism: str = "central"
    epsilon: float | None = None
    delta: float | None = None
    noise: float | None = None
    clip: float = 1.0
    clipping: str = "fixed"
    quantile: float = 0.5
    clip_rate: float = 0.2
    exposures: int | None = None
    aggregations: int | None = None
    randomness: str = "simulated"

    @property
    def noised(self) -> bool:
        """Whether there is any noise."""
        return self.epsilon is not None or self.noise is not None

    @property
    def on(self) -> bool:
        """Whether there is anything to do."""
        return self.secure or self.noised

    def does(self, mechanism: str) -> bool:
        """Whether there is noise of this kind."""
        return self.noised and self.mechanism == mechanism

    @property
    def follows(self) -> float | None:
        """The quantile that the clipping bound follows, if it does."""
        return {"fixed": None, "median": 0.5}.get(self.clipping, self.quantile)

    def check(self) -> None:
        """Refuse values that mean nothing, or that contradict each other."""
        for key, known in (
            ("mechanism", MECHANISMS),
            ("clipping", CLIPPINGS),
            ("reveal", REVEALS),
            ("small_groups", FEW),
            ("randomness", KINDS),
        ):
            if getattr(self, key) not in known:
                raise ConfigError(
                    unknown(f"privacy.{key}", getattr(self, key), [k for k in known if k])
                )
        for key, good, words in (
            ("min_group", self.min_group >= 2, "a sum of one hides nothing; give 2 or more"),
            ("threshold", 0.5 < self.threshold <= 1, "give a share above 0.5, up to 1"),
            ("neighbours", self.neighbours >= 0, "give 0 (all) or an even number"),
            ("neighbours", self.neighbours % 2 == 0, "give an even number, or 0 for all"),
            ("bits", 8 <= self.bits <= 40, "give 8 to 40 binary digits"),
            ("epsilon", self.epsilon is None or self.epsilon > 0, "give more than 0"),
            ("delta", self.delta is None or 0 < self.delta < 1, "give a number between 0 and 1"),
            ("noise", self.noise is None or self.noise > 0, "give more than 0"),
            ("clip", self.clip > 0, "give more than 0"),
            ("quantile", 0 < self.quantile < 1, "give a share between 0 and 1"),
            ("clip_rate", self.clip_rate > 0, "give more than 0"),
        ):
            if not good:
                raise ConfigError(f"privacy.{key} = {getattr(self, key)!r}: {words}")
        for key in ("epsilon", "noise", "clip", "clip_rate"):
            if not math.isfinite(getattr(self, key) or 0.0):
                raise ConfigError(f"privacy.{key} = {getattr(self, key)}: give a finite number")
        self._check_use()
        if self.reveal and not self.secure:
            raise ConfigError(
                f"privacy.reveal = '{self.reveal}' lets something through secure aggregation, "
                "which is off: add --secure, or leave it out"
            )
        if self.secure and self.noised and self.mechanism != "central":
            raise ConfigError(
                f"privacy.mechanism = '{self.mechanism}' does not go with --secure, in which "
                "clients add the noise of the central mechanism in shares: leave the mechanism out"
            )
        if self.noised and self.mechanism != "central" and self.clipping != "fixed":
            raise ConfigError(
                f"privacy.clipping = '{self.clipping}' follows what all clients say together, "
                f"which the mechanism '{self.mechanism}' never hears: use a fixed bound"
            )
        if self.reveal and self.noised:
            raise ConfigError(
                f"privacy.reveal = '{self.reveal}' shows what the noise should hide: leave one out"
            )

    def _check_use(self) -> None:
        """Refuse settings of noise that is not there: nobody should think that it is."""
        own, usual = asdict(self), asdict(Privacy())
        only = ["exposures", "aggregations"]
        keys = only if self.noised and self.mechanism != "nbafl" else []
        keys += ["noise"] if self.does("nbafl") else []
        if not self.noised:
            keys = ["mechanism", "delta", "clip", "clipping", "quantile", "clip_rate", *only]
        for key in keys:
            if own[key] != usual[key]:
                why = "means nothing to this mechanism" if self.noised else "is about noise, and "
                give = "--epsilon" if self.mechanism == "nbafl" else "--epsilon or privacy.noise"
                why += "" if self.noised else f"there is none: give {give}"
                raise ConfigError(f"privacy.{key} = {own[key]!r} {why}")

    def check_layout(self, layout: Layout) -> None:
        """Refuse models whose statistics would leave their clients without noise."""
        shared = [e.name for e in layout.entries if e.kind == "buffer" and not e.local]
        if self.noised and shared:
            raise ConfigError(
                f"the statistics of batch normalisation ({shared[0]}, …) cannot be clipped: with "
                "noise they must stay with the clients. Set model.bn = stats-local, or use a model "
                "with another normalisation"
            )

    def check_policy(self, policy: Policy, always_on: bool, clients: int) -> None:
        """Refuse samples of clients that no accountant knows."""
        if not self.does("central"):
            everybody = cohort_size(policy.cohort, clients) == clients and always_on
            if self.does("nbafl") and not everybody:
                raise ConfigError(
                    "privacy.mechanism = 'nbafl' is proved for full participation: set "
                    "run.cohort = 1.0 and leave out the availability"
                )
            return
        for key, used in (
            ("run.over_selection", policy.over_selection > 1),
            ("run.weighted", policy.weighted),
            ("availability", not always_on),
        ):
            if used:
                raise ConfigError(
                    f"{key} draws clients in a way that ε does not account for (whoever is faster "
                    "or more often on takes part more often): leave it out, or use "
                    "privacy.mechanism = local, which does not count on the draw"
                )
