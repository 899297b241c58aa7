"""Privacy in a run: check the settings, calibrate noise to a budget, account for what is spent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from coterie.channel.channel import Channel
from coterie.channel.compression.coding import Coding
from coterie.channel.policy import Policy, cohort_size
from coterie.channel.privacy.accounting import Sampling, calibrate, sensible_delta
from coterie.channel.privacy.central_noise import Private
from coterie.channel.privacy.client import run_name
from coterie.channel.privacy.entropy import Entropy
from coterie.channel.privacy.local_noise import LocalNoise, downlink_of
from coterie.channel.privacy.secure_sums import Secure
from coterie.channel.privacy.settings import Privacy
from coterie.channel.privacy.spending import Account, Spending, account_of
from coterie.client.plan import Plan
from coterie.compose.layerwise import RESTS
from coterie.core.events import Event
from coterie.core.messages import Slot
from coterie.core.method import Method
from coterie.core.weights import Layout, Weights
from coterie.errors import ConfigError
from coterie.methods.docstrings import looked_at

EDGE = 0.1  # the part of δ reserved for cohorts just below privacy.min_group


def check_privacy(
    privacy: Privacy,
    method: Method,
    coding: Coding,
    policy: Policy,
    always_on: bool,
    layout: Layout,
    clients: int,
    clock: str = "none",
    optimizer: str = "sgd",
) -> None:
    """Refuse privacy settings that conflict with the rest of the run."""
    privacy.check()
    privacy.check_layout(layout)
    privacy.check_policy(policy, always_on, clients)
    if privacy.does("central") and clock == "wireless" and policy.deadline is not None:
        raise ConfigError(
            "run.deadline with clock.name = wireless lets one client make others late, since they "
            "share a channel, and ε does not account for that: leave out the deadline"
        )
    if privacy.noised and method.needs_all_layers == RESTS:
        raise ConfigError(
            f"method {method.name} skips layers according to numbers that clients report, which "
            "noise does not hide: leave out method.layer_interval"
        )
    if privacy.noised and privacy.mechanism != "central" and method.mirrors:
        raise ConfigError(
            f"method {method.name} keeps its correction at the mean of its clients' own "
            f"corrections, and privacy.mechanism = {privacy.mechanism} clips the corrections that "
            "they send and adds noise to them: choose another method"
        )
    if privacy.noised and method.no_noise:
        raise ConfigError(f"method {method.name} {method.no_noise}")
    by_samples = privacy.secure and not privacy.noised and privacy.weights == "samples"
    if by_samples and optimizer.lower() != "sgd":
        raise ConfigError(
            f"train.optimizer = '{optimizer}' makes steps of nearly the same length, so that with "
            "weights by samples, which the server knows, clients can be told apart in a secure "
            "sum: set privacy.weights = equal, or train.optimizer = sgd"
        )
    if privacy.secure and not coding.upwards.exact:
        raise ConfigError(
            f"wire.up = '{coding.up}' is lossy, and masked updates must add up exactly: leave out "
            "the codec or --secure"
        )
    if privacy.secure and privacy.same_orders and not coding.downwards.exact:
        raise ConfigError(
            f"wire.down = '{coding.down}' sends each client a change of the model it holds. "
            "Members of a secure sum confirm to each other that they received the same order, "
            "and the same change turns different models into different models: leave out the "
            "codec, or the confirmation with privacy.same_orders = false"
        )
    if method.sees != "each":
        return
    if privacy.does("nbafl"):
        raise ConfigError(
            f"method {method.name} makes more than one mean of what clients send "
            f"({seen_by(method)}), and NbAFL's downlink noise is for one mean a round. Choose "
            "another method, or privacy.mechanism = local"
        )
    if privacy.secure and not privacy.reveal:
        seen = seen_by(method)
        consent = ", or let that through with privacy.reveal = 'final-layer'" * (
            "final layer" in seen
        )
        raise ConfigError(
            f"method {method.name} does not work under secure aggregation, which shows sums only: "
            f"{seen}. Choose one that asks for means (`coterie methods`){consent}"
        )
    if privacy.secure and "final layer" not in seen_by(method):
        raise ConfigError(
            f"method {method.name} needs more than the final layer that --reveal lets through: "
            f"{seen_by(method)}. Choose one that asks for means (`coterie methods`)"
        )
    if privacy.does("central"):
        raise ConfigError(
            f"method {method.name} groups or mixes clients by what each of them sent. This "
            f"affects other clients' models and has no noise: {seen_by(method)}. Choose one "
            "that asks for means, or privacy.mechanism = local"
        )


def check_steps(privacy: Privacy, method: Method, steps: int | None) -> None:
    """Refuse sums that reveal a client because it makes more steps than the others."""
    if privacy.secure and method.same_steps and steps is None:
        raise ConfigError(
            f"method {method.name} {method.same_steps}: if one client makes more steps than the "
            "others, the two secure sums together tell what it sent. Set train.steps, so that all "
            "make the same number"
        )


def check_outliers(outliers: str, privacy: Privacy, method: Method) -> None:
    """Refuse a treatment of outliers that conflicts with the run."""
    if outliers != "clip":
        return
    advice = "Take run.outliers = reject"
    if method.no_clipping:
        raise ConfigError(
            f"run.outliers = 'clip' shortens what clients send, and method {method.name} "
            f"{method.no_clipping}. {advice}, or another method"
        )
    if privacy.noised:
        raise ConfigError(
            "run.outliers = 'clip' shortens updates to what is usual in the cohort, so each client "
            f"decides about the others', which ε does not account for. {advice}: noise has its own "
            "bound, privacy.clip"
        )
    if privacy.secure:
        raise ConfigError(
            "run.outliers = 'clip' shortens single updates, but under --secure the server sees "
            f"none. {advice}, which then leaves out what clients themselves find not to be finite"
        )


def left_public(privacy: Privacy, method: Method) -> str:
    """A sentence on data that the method takes as public and ε does not cover; empty if none."""
    uses_public = privacy.noised and method.takes_as_public
    return f"ε does not cover {method.takes_as_public}" if uses_public else ""


def seen_by(method: Method) -> str:
    """What the server sees of single clients, as the method's docstring says it."""
    return f"the server sees {looked_at(method) or 'the replies of each client'}"


def sampling_of(policy: Policy, clients: int) -> Sampling:
    """How the clients of a round are sampled, for the privacy accountant."""
    cohort = cohort_size(policy.cohort, clients)
    kind = "poisson" if policy.sampling == "poisson" else "fixed"
    return Sampling("all" if cohort == clients else kind, clients, cohort)


def calibrated(privacy: Privacy, policy: Policy, clients: int, rounds: int) -> Privacy:
    """Settings with everything filled in: δ, the noise for ``rounds`` rounds, NbAFL's exposures."""
    if not privacy.noised:
        return privacy
    privacy.check()
    if clients < 2:
        raise ConfigError("noise hides one client among others, but there is only one client")
    delta = sensible_delta(clients) if privacy.delta is None else privacy.delta
    if privacy.mechanism == "nbafl":
        aggregations = privacy.aggregations or rounds
        seen = privacy.exposures or aggregations
        if seen > aggregations:
            raise ConfigError(
                f"privacy.exposures = {seen} uploads of a client cannot be seen in {aggregations} "
                "rounds: give at most that many"
            )
        return replace(privacy, delta=delta, exposures=seen, aggregations=aggregations)
    if privacy.noise is not None:
        return replace(privacy, delta=delta)
    assert privacy.epsilon is not None
    sampling = sampling_of(policy, clients)
    if privacy.mechanism == "local":
        # Setting up the method may take one more upload.
        all_clients = Sampling("all", clients, clients)
        noise = 2 * calibrate(all_clients, privacy.epsilon, delta, rounds + 1)
        return replace(privacy, delta=delta, noise=noise)
    return replace(privacy, delta=delta, noise=calibrate(sampling, privacy.epsilon, delta, rounds))


class Guard:
    """Privacy during a run: the stages of the channel, and the account of what was spent."""

    def __init__(self, plan: Plan, policy: Policy, members: Sequence[int], rounds: int) -> None:
        self.plan, self.policy, self.members, self.rounds = plan, policy, members, rounds
        self.privacy = plan.privacy
        self.entropy = Entropy(self.privacy.randomness, plan.seed)
        self.spending = Spending(self.privacy.clip)
        self.account: Account | None = None
        if self.privacy.noised and self.privacy.mechanism != "nbafl":
            sampling = sampling_of(policy, len(members))
            self.account = account_of(self.privacy, sampling, rounds)
            if not self.account.fits(1):
                raise ConfigError(
                    f"privacy.epsilon = {self.privacy.epsilon:g} does not suffice for a single "
                    f"round with privacy.noise = {self.privacy.noise:g}: raise one of them"
                )
            self._refuse_edge(sampling)
        self._stage: Private | LocalNoise | None = None
        self._secure: Secure | None = None

    def _refuse_edge(self, sampling: Sampling) -> None:
        """Refuse cohorts that are often at the edge of ``privacy.min_group``.

        There one more client releases the updates of the others too, which ε does not account for.
        """
        if not self.privacy.secure or sampling.kind != "poisson" or self.account is None:
            return
        from scipy.stats import binom

        others, smallest = sampling.clients - 1, self.privacy.min_group - 1
        decisive = self.rounds * float(binom.pmf(smallest, others, sampling.rate))
        if decisive > EDGE * self.account.delta:
            raise ConfigError(
                f"with cohorts of about {sampling.cohort} of {sampling.clients} clients, one "
                f"client decides over privacy.min_group = {self.privacy.min_group} with "
                f"probability {decisive:.2g} in {self.rounds} rounds; δ = {self.account.delta:.2g} "
                "does not cover that: use larger cohorts (run.cohort)"
            )

    def around(self, channel: Channel, agreement: str = "") -> Channel:
        """Add the stages of privacy to a channel; ``agreement`` is what real clients agreed to."""
        if channel.state.spending.bound:  # a resumed run
            self.spending = channel.state.spending
        channel.state.spending = self.spending
        privacy, name = self.privacy, self.plan.method.name
        if privacy.secure:
            run = run_name(name, self.plan.seed)
            sums = self.plan.method.sums
            self._secure = Secure(channel, privacy, self.plan.roster, run, name, most=sums)
            self._secure.agreement = agreement
        if privacy.does("central"):
            expected = float(cohort_size(self.policy.cohort, len(self.members)))
            self._stage = Private(
                channel, privacy, expected, self.entropy, self.spending, self._secure, name
            )
        elif privacy.noised:
            self._stage = LocalNoise(
                channel, privacy, self.entropy, self.spending, self._fits, name, self._downlink()
            )
        channel.release = self._stage or self._secure or channel.release
        return channel

    def _fits(self, releases: int) -> bool:
        if self.privacy.does("nbafl"):
            return releases <= (self.privacy.aggregations or 0)
        return self.account is None or self.account.fits(releases)

    def _least_samples(self) -> int:
        return min(self.plan.train_sizes[c] for c in self.members)

    def _downlink(self) -> float:
        if self.privacy.mechanism != "nbafl":
            return 0.0
        return downlink_of(self.privacy, self._least_samples(), len(self.members))

    def begin(self, models: Mapping[Slot, Weights]) -> None:
        """Begin a round with these models."""
        if self._stage is not None:
            self._stage.begin(models)
        if self._secure is not None:
            self._secure.skipped = {}

    def event(self) -> Event:
        """The privacy fields of the round's event."""
        event: Event = {}
        if self._secure is not None and self._secure.skipped:
            event["withheld"] = dict(self._secure.skipped)
        if self.account is not None:
            event["privacy"] = {
                "epsilon": self.account.running(self.spending.releases),
                "delta": self.account.delta,
                "releases": self.spending.releases,
                "clip": self.spending.bound,
            }
        return event

    def over(self) -> str:
        """Why the budget allows no further round; empty if it does."""
        if self._fits(self.spending.releases + 1):
            return ""
        if self.account is None:
            return f"NbAFL's noise is for {self.privacy.aggregations} rounds"
        return f"the privacy budget of ε = {self.account.budget:g} has no room for another round"

    def summary(self) -> dict[str, Any]:
        """The privacy fields of the summary; empty if privacy is off."""
        privacy = self.privacy
        if not privacy.on:
            return {}
        summary: dict[str, Any] = {"secure": privacy.secure, "randomness": privacy.randomness}
        if privacy.reveal:
            summary["reveal"] = privacy.reveal
        if privacy.noised:
            summary["mechanism"] = privacy.mechanism
            summary["clipping"], summary["clip"] = privacy.clipping, self.spending.bound
        if self.account is not None:
            summary |= self.account.report(self.spending.releases)
            summary["budget"] = privacy.epsilon
        elif privacy.does("nbafl"):
            summary |= {
                "epsilon": privacy.epsilon,
                "delta": privacy.delta,
                "exposures": privacy.exposures,
                "aggregations": privacy.aggregations,
                "downlink": self._downlink(),
                "accountant": "nbafl",
                "adjacency": "one sample of one client, by NbAFL's own assumptions",
            }
        return summary
