"""The privacy settings of a run, and checks that they are consistent."""

from __future__ import annotations

from dataclasses import asdict

from coterie.channel.policy import Policy, cohort_size
from coterie.core.schema import PrivacySection, section
from coterie.core.weights import Layout
from coterie.errors import ConfigError


@section("privacy")
class Privacy(PrivacySection):
    """The table ``[privacy]``: secure aggregation and noise.

    Noise is on if ``epsilon`` (a budget) or ``noise`` (its standard deviation) is set.
    """

    @property
    def noised(self) -> bool:
        """Whether noise is on."""
        return self.epsilon is not None or self.noise is not None

    @property
    def on(self) -> bool:
        """Whether secure aggregation or noise is on."""
        return self.secure or self.noised

    def does(self, mechanism: str) -> bool:
        """Whether noise of this mechanism is on."""
        return self.noised and self.mechanism == mechanism

    @property
    def follows(self) -> float | None:
        """The quantile that the clipping bound follows; None if the bound is fixed."""
        return {"fixed": None, "median": 0.5}.get(self.clipping, self.quantile)

    def check(self) -> None:
        """Refuse values that contradict each other."""
        self._check_use()
        if self.reveal and not self.secure:
            raise ConfigError(
                f"privacy.reveal = '{self.reveal}' is an exception to secure aggregation, which is "
                "off: add --secure, or leave out privacy.reveal"
            )
        if self.weights == "equal" and not self.secure:
            raise ConfigError(
                "privacy.weights = 'equal' applies to secure sums: add --secure, or leave it out"
            )
        if self.secure and self.noised and self.mechanism != "central":
            raise ConfigError(
                f"privacy.mechanism = '{self.mechanism}' cannot be used with --secure, with which "
                "clients add the noise of the central mechanism in shares: leave out the mechanism"
            )
        if self.noised and self.mechanism != "central" and self.clipping != "fixed":
            raise ConfigError(
                f"privacy.clipping = '{self.clipping}' needs a statistic of all clients, which the "
                f"mechanism '{self.mechanism}' does not compute: use a fixed bound"
            )
        if self.reveal and self.noised:
            raise ConfigError(
                f"privacy.reveal = '{self.reveal}' shows what the noise should hide: leave one out"
            )

    def _check_use(self) -> None:
        """Refuse settings that have no effect, which could suggest that there is noise."""
        values, defaults = asdict(self), asdict(Privacy())
        nbafl_only = ["exposures", "aggregations"]
        keys = nbafl_only if self.noised and self.mechanism != "nbafl" else []
        keys += ["noise"] if self.does("nbafl") else []
        if not self.noised:
            keys = ["mechanism", "delta", "clip", "clipping", "quantile", "clip_rate", *nbafl_only]
        for key in keys:
            if values[key] != defaults[key]:
                why = "has no effect with this mechanism: leave it out"
                if not self.noised:
                    to_set = "--epsilon" + (
                        "" if self.mechanism == "nbafl" else " or privacy.noise"
                    )
                    why = f"is about noise, and there is none: give {to_set}"
                raise ConfigError(f"privacy.{key} = {values[key]!r} {why}")

    def check_layout(self, layout: Layout) -> None:
        """Refuse models whose batch statistics would be sent without noise."""
        shared = [e.name for e in layout.entries if e.kind == "buffer" and not e.local]
        if self.noised and shared:
            raise ConfigError(
                f"the statistics of batch normalisation ({shared[0]}, …) cannot be clipped: with "
                "noise they must stay with the clients. Set model.bn = stats-local, or use a model "
                "with another normalisation"
            )

    def check_policy(self, policy: Policy, always_on: bool, clients: int) -> None:
        """Refuse ways of selecting clients that privacy accounting does not cover."""
        if not self.does("central"):
            all_clients = cohort_size(policy.cohort, clients) == clients and always_on
            if self.does("nbafl") and not all_clients:
                raise ConfigError(
                    "privacy.mechanism = 'nbafl' is proved for full participation only: set "
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
                    f"{key} selects clients in a way that ε does not account for (clients that are "
                    "faster, or on more often, take part more often): leave it out, or use "
                    "privacy.mechanism = local, which does not depend on the selection"
                )
