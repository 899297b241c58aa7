"""What a run asks of privacy, and what does not go together with it."""

from __future__ import annotations

from dataclasses import asdict

from coterie.channel.policy import Policy, cohort_size
from coterie.core.schema import PrivacySection, section
from coterie.core.weights import Layout
from coterie.errors import ConfigError


@section("privacy")
class Privacy(PrivacySection):
    """Secure aggregation, and noise: the table ``[privacy]``, and what follows from it.

    Noise is on when ``epsilon`` (a budget) or ``noise`` (its standard deviation) is given.
    """

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
        """Refuse values that contradict each other."""
        self._check_use()
        if self.reveal and not self.secure:
            raise ConfigError(
                f"privacy.reveal = '{self.reveal}' lets something through secure aggregation, "
                "which is off: add --secure, or leave it out"
            )
        if self.weights == "equal" and not self.secure:
            raise ConfigError(
                "privacy.weights = 'equal' is about secure sums: add --secure, or leave it out"
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
